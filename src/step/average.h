// SPDX-License-Identifier: Apache-2.0
// Gradients that the engine averages itself, in full precision over all data ranks.
#pragma once
#include "comm/comm.h"

namespace dsopt {

/// Jobs that get the mean of all ranks' gradients in place of their own, in memory of the step.
class GradientMeans {
public:
    /// `lists`: memory for three lists of `count` tensors.
    GradientMeans(dsopt_tensor *lists, int64_t count) : from_(lists), to_(lists + count), runs_(lists + 2 * count) {}

    /// The job's gradient becomes that of `mean`, which has `padded` elements.
    void add(TensorJob &job, float *mean, int64_t padded, const Device &device, void *stream);
    /// Copies, adds up and divides. `scratch`: for sum_over_ranks().
    void average(const Context &context, const CommSet &comms, float *scratch, const Execution &how) const;
    /// Elements of the longest run, which is one all-reduce.
    int64_t longest() const;
    /// The caller's gradients, of which the step saw copies.
    void zero_originals(const Device &device, const Execution &how) const;

private:
    dsopt_tensor *from_, *to_; // gradients that are there, and where they go
    dsopt_tensor *runs_;       // neighbours in memory go together
    int64_t count_ = 0, run_count_ = 0;
};

} // namespace dsopt
