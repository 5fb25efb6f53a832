// SPDX-License-Identifier: Apache-2.0
// The loops of a step, as the driver (src/step) calls them: on every device in the same order. Each call enqueues work
// in stream order; where a device fuses loops, a later call finds its work done. Nothing here knows other ranks.
#pragma once
#include "device/decide.h"
#include "device/onebit_plan.h"

namespace dsopt {

/// Passes of an exchange (device/compress.h). In a skipped step they leave what is kept as it is.
enum class ExchangePass : uint8_t {
    clear_messages, // bits between tensors are 1, too
    pack_list,      // a list is added to the compensated values, and those are packed into messages
    pack_values,    // compensated values that are complete are packed
    message_scales, // when all values are packed: scales, to where they are kept and to the messages
    clear_result,   // as clear_messages
    serve,          // the mean of all ranks' messages is added to the server's compensated values, which are packed
    result_scales,  // as message_scales
    decode,         // the mean goes to the list
    // Two levels.
    clear_gaps,    // zeros between tensors of the vector
    copy_list,     // the list goes to the vector
    pack_slice,    // as pack_list, with the node's mean of this rank's slice
    average_slice, // one node: that mean goes to the first of the slices
};

class ExchangeLoops {
public:
    /// Enqueues one pass. The order of passes is in src/exchange/exchange.cc.
    virtual void run(ExchangePass pass) = 0;

protected:
    ~ExchangeLoops() = default;
};

/// Passes over the tensors that go into exchanges of the 1-bit family. Those before find_active change nothing in a
/// skipped step.
enum class OneBitPass : uint8_t {
    momentum_squares, // compat mode of 1-bit LAMB: of each leaf, unless trust_scaling is known
    /// OneBitPlan::feed goes to the compensated values, or with two levels to the vector. It is packed, too, if
    /// feed_packs(). Before a synchronisation 0/1 Adam takes its own step here.
    feed,
    feed_padding,    // compat mode: the same for what is behind the tensors of a scale group
    take,            // from results, or without other ranks from the own values, to moments and weights
    keep_results,    // they go to where the momentum is kept
    local,           // 0/1 Adam between exchanges
    take_padding,    // 1-bit LAMB of the original: from results to the tail of its flat momentum
    lamb_moments,    // 1-bit LAMB in place of `take`: moments, sums of squares and the largest factor of each leaf
    lamb_weights,    // and weights
    find_active,     // standard mode: which elements have a variance
    freeze,          // the variance is frozen by this step: anchors are stored, residuals are zeroed
    freeze_variance, // the same, and copies of the variance are taken
};

/// Decisions that are one for a tensor or group, by the functions of device/onebit_plan.h. In a skipped step only
/// `end` does anything.
enum class OneBitDecision : uint8_t {
    begin,         // begin_tensor(), begin_group()
    scale_momenta, // compat mode of 1-bit LAMB: trust_scaling, unless it is known
    trust,         // find_frozen_trust()
    shared_trust,  // take_shared_frozen_trust()
    end,           // end_tensor(), end_group(), end_schedule()
};

/// Loops of the 1-bit family, with those of its exchange. The order of passes is in src/step/onebit.cc.
class OneBitLoops : public ExchangeLoops {
public:
    using ExchangeLoops::run;
    virtual void run(OneBitPass pass) = 0;
    virtual void decide(OneBitDecision decision) = 0;

protected:
    ~OneBitLoops() = default;
};

class StepLoops {
public:
    /// Time since the last mark belongs to this phase, DSOPT_MS_...; -1: the first mark of a step, which resets all
    /// phases.
    virtual void mark(int phase) = 0;
    /// Pass 1, where the plan reads gradients, and the fold into the table of norms with this rank's reasons to skip.
    /// Without `agrees` a device may decide at once.
    virtual void inspect(bool agrees) = 0;
    /// decide_step(). Where ranks agree on the table, they have done so.
    virtual void decide() = 0;
    /// Passes::elementwise; of Passes::reduced the first pass, and the factors of tensors that no other rank has a part
    /// of. If the plan reduces nothing: counters of a step that is taken, norms and the report, too.
    virtual void update() = 0;
    /// The second pass of Passes::reduced, after take_shared_trust() where model ranks have added up the sums of
    /// `shared` tensors; then counters, norms and the report.
    virtual void update_weights(bool shared) = 0;
    /// NULL where the plan has none.
    OneBitLoops *onebit() const { return onebit_; }

protected:
    ~StepLoops() = default;
    OneBitLoops *onebit_ = nullptr;
};

} // namespace dsopt
