// SPDX-License-Identifier: Apache-2.0
// Kernels of a step, which the driver (src/step) calls in the same order on every device. Each call enqueues work in
// stream order. Nothing here depends on other ranks.
#pragma once
#include "device/decide.h"
#include "device/matrix_plan.h"
#include "device/onebit_plan.h"
#include "device/phases.h"

namespace dsopt {

/// Passes of an exchange (device/compress.h). In a skipped step they do not change the buffers that are kept between
/// calls.
enum class ExchangePass : uint8_t {
    clear_messages,  // sets all bits to 1, including those between tensors
    pack_list,       // adds a list to the residual, and packs the compensated values into messages
    pack_values,     // packs compensated values that are complete
    message_scales,  // after all values are packed: stores scales with the compensated values and in the messages
    clear_result,    // like clear_messages, for the result
    reduce_messages, // adds the mean of all ranks' messages to the server's residual, and packs the compensated values
    result_scales,   // like message_scales, for the result
    decode,          // decompresses the mean to the list
    // Two levels.
    clear_gaps,    // zeroes the vector between tensors
    copy_list,     // copies the list to the vector
    pack_slice,    // like pack_list, with the node's mean of this rank's slice
    average_slice, // one node: stores that mean to the first of the slices
};

class ExchangeKernels {
public:
    /// Enqueues one pass. The order of passes is in src/exchange/exchange.cc.
    virtual void run(ExchangePass pass) = 0;

protected:
    ~ExchangeKernels() = default;
};

/// Passes over the tensors in exchanges of the 1-bit family. The passes before find_active change nothing in a skipped
/// step.
enum class OneBitPass : uint8_t {
    momentum_squares, // compat mode of 1-bit LAMB: sums the squares of each leaf, unless trust_scaling is known
    /// Adds the values that OneBitPlan::feed selects to the residual, with the jobs of StepPlan::slice_jobs if there are any.
    /// Packs them, too, if feed_also_packs(). Makes the local step of 0/1 Adam first if OneBitPlan::feed_steps.
    feed,
    feed_padding,       // compat mode: the same for the padding after the tensors of a scale group
    apply_mean,         // updates moments and weights from results or, without other ranks, from this rank's values
    store_results,      // copies the results to OneBitPlan::momentum
    local,              // local step of 0/1 Adam between exchanges
    decompress_padding, // 1-bit LAMB of the original: decompresses results to OneBitPlan::padding
    lamb_moments,    // 1-bit LAMB, in place of apply_mean: moments, sums of squares and the largest factor of each leaf
    lamb_weights,    // 1-bit LAMB, in place of apply_mean: weights
    find_active,     // standard mode: finds the elements whose variance is not 0
    freeze,          // this step freezes the variance: stores anchors, zeroes residuals
    freeze_variance, // the same, and copies the variance
};

/// Decisions per tensor or group, made by the functions of device/onebit_plan.h. In a skipped step only `end` has an
/// effect.
enum class OneBitDecision : uint8_t {
    begin,         // begin_tensor(), begin_group()
    scale_momenta, // compat mode of 1-bit LAMB: computes trust_scaling, unless it is known
    trust,         // find_frozen_trust()
    shared_trust,  // store_shared_frozen_trust_ratio()
    end,           // end_tensor(), end_group(), end_schedule()
};

/// Kernels of the 1-bit family, including those of its exchange. The order of passes is in src/step/onebit.cc.
class OneBitStepKernels : public ExchangeKernels {
public:
    using ExchangeKernels::run;
    virtual void run(OneBitPass pass) = 0;
    virtual void decide(OneBitDecision decision) = 0;

protected:
    ~OneBitStepKernels() = default;
};

class StepKernels {
public:
    /// Adds the time since the last mark to this phase, DSOPT_MS_...; -1: the first mark of a step, which resets all
    /// phases.
    virtual void mark(int phase) = 0;
    /// Runs phases with PhaseInfo::on_device, in order, and calls mark() where PhaseRun::ends_timing(). A device may do
    /// the work of several in one kernel.
    virtual void run(const PhaseRun &part) = 0;
    /// Returns NULL if the plan has no group of the 1-bit family.
    OneBitStepKernels *onebit() const { return onebit_; }
    /// Returns NULL if the plan has no matrices.
    MatrixStepKernels *matrices() const { return matrices_; }

protected:
    ~StepKernels() = default;
    OneBitStepKernels *onebit_ = nullptr;
    MatrixStepKernels *matrices_ = nullptr;
};

} // namespace dsopt
