// SPDX-License-Identifier: Apache-2.0
// Gradients that the engine averages itself, in full precision over all data ranks.
#pragma once
#include "comm/comm.h"

namespace dsopt {

/// Jobs that use the mean of all ranks' gradients in place of this rank's gradient, in memory of the step.
class GradientMeans {
public:
    /// `lists`: memory for three lists of `count` tensors.
    GradientMeans(dsopt_tensor *lists, int64_t count) : from_(lists), to_(lists + count), runs_(lists + 2 * count) {}

    /// Adds a job, whose gradient becomes `mean`, an array of `padded` elements.
    void add(TensorJob &job, float *mean, int64_t padded, const Device &device, void *stream);
    /// Copies the gradients, sums them over ranks and divides the sums. `scratch`: for sum_over_ranks().
    void average(const Context &context, const CommSet &comms, float *scratch, const Execution &execution) const;
    /// Returns the number of elements of the longest run. Each run is one all-reduce.
    int64_t longest() const;
    /// Zeroes the caller's gradients, of which the step used copies.
    void zero_originals(const Device &device, const Execution &execution) const;

private:
    dsopt_tensor *from_, *to_; // the present gradients, and their copies
    dsopt_tensor *runs_;       // runs of contiguous means
    int64_t count_ = 0, run_count_ = 0;
};

} // namespace dsopt
