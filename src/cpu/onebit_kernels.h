// SPDX-License-Identifier: Apache-2.0
// Kernels of 1-bit compression. onebit_kernels.cc is compiled once per instruction set, like kernels.cc.
#pragma once
#include "cpu/kernels.h"
#include "device/compress.h"

namespace dsopt::cpu {

/// Location of the mean of a scale group.
struct MeanView {
    const ListMean *of = nullptr;  // NULL without an exchange: the mean is this rank's values
    const char *results = nullptr; // messages of all servers: of->results, or a buffer with the same layout
    int32_t group = 0;
};

/// Elements of one tensor in a step of the 1-bit family.
struct OneBitSpan : Span {
    explicit OneBitSpan(const Span &span) : Span(span) {}
    Feed feed{};
    OneBitScalars onebit{};
    bool steps = false;              // OneBitPlan::feed_steps
    int64_t in_mean = 0;             // index of the job's first element in the layout of the mean, and in `active`
    int64_t in_local = 0;            // the same in `compensated`
    float *compensated = nullptr;    // the worker's values; NULL without other ranks
    float scale = 0;                 // scale of the compensated values
    const int32_t *active = nullptr; // ListMean::active
    float *track = nullptr;          // 0/1 Adam: OneBitJob::track(), or NULL
    const float *mask = nullptr;     // OneBitJob::mask, or NULL
    float *fresh_variance = nullptr; // OneBitJob::fresh_variance
    MeanView mean;
    MeanView momentum;                // `of` NULL: the momentum is in exp_avg
    bool momentum_in_results = false; // the new momentum stays in the results; exp_avg is not written
};

/// Values that are added to the residual before the compensated values are packed.
struct FeedInputs {
    const float *x;
    int64_t numel; // elements of x from here on, possibly more than a leaf; elements after them are 0
    float scale;   // scale of the compensated values before the addition
};

struct OneBitKernels {
    // `active`: one bit per element of the range, lowest first, or NULL (all are active). An inactive element is 0 and
    // has no residual.
    /// Computes value = x + residual. x NULL: x = 0.
    void (*add_residual)(const float *x, float *value, float scale, int64_t n);
    /// Computes y = share * (sum of `count` rows, in order). Row k begins at rows + k * stride. y may be the first row.
    void (*sum_slices)(const float *rows, int64_t stride, int count, float share, int64_t n, float *y);
    /// Two levels: computes value = mean of the slices of `ranks` ranks + residual.
    void (*add_slices)(const float *slices, int64_t stride, int ranks, int64_t n, float *value, float scale,
                       const int32_t *active);
    /// Computes value = x + residual, unless `added` is NULL. Packs the signs of the leaf into whole bytes, in which
    /// bits after its end are 1. Returns the leaf's sum of squares.
    double (*pack)(const FeedInputs *added, float *value, int64_t n, uint8_t *bits);
    /// Computes, for a leaf of a server's segment, value = mean over the messages of `ranks` ranks, in rank order, +
    /// residual. Packs the signs and returns the sum of squares. `slot`: index of the scale in a message. `bit`: index
    /// of the leaf's first bit in a message.
    double (*reduce_messages)(const char *messages, int64_t message_bytes, int64_t message_scales, int ranks,
                              int64_t slot, int64_t bit, int64_t n, float *value, float scale, const int32_t *active,
                              uint8_t *bits);
    /// Writes the mean of n elements, from the worker's element `worker` on. `active`: bits of the whole list.
    /// `streaming`: y is long and not read again soon, so non-temporal stores are used if it is aligned.
    void (*mean)(const MeanView &view, int64_t worker, int64_t n, float *y, const int32_t *active, bool streaming);
    void (*feed)(const OneBitSpan &span);
    void (*apply_mean)(const OneBitSpan &span);
    /// 1-bit LAMB. lamb_mean updates the moments and writes, for each leaf, the sums of squares of the update without
    /// and with decay (to sums_a and sums_b) and the largest factor. lamb_weights then updates the weights.
    void (*lamb_mean)(const OneBitSpan &span, double *factors);
    void (*lamb_weights)(const OneBitSpan &span);
    /// 0/1 Adam: a local step between exchanges.
    void (*local)(const OneBitSpan &span);
};

} // namespace dsopt::cpu
