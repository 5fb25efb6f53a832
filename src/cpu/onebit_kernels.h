// SPDX-License-Identifier: Apache-2.0
// Loops of 1-bit compression. onebit_kernels.cc is compiled once per instruction set, as kernels.cc.
#pragma once
#include "cpu/kernels.h"
#include "device/compress.h"

namespace dsopt::cpu {

/// Where the mean of a scale group is.
struct MeanView {
    const ListMean *of = nullptr;  // NULL without an exchange: it is the rank's own values
    const char *results = nullptr; // messages of all servers: those of `of`, or others that are laid out so
    int32_t group = 0;
};

/// A piece of one tensor in a step with an exchange.
struct OneBitSpan : Span {
    explicit OneBitSpan(const Span &span) : Span(span) {}
    Feed feed{};
    OneBitScalars onebit{};
    int64_t worker = 0;              // index of the tensor's first element in the list's vector
    float *vector = nullptr;         // two levels: the values as they are, in place of compensated ones; or NULL
    float *compensated = nullptr;    // the worker's values; NULL without other ranks
    float scale = 0;                 // of them
    const int32_t *active = nullptr; // of the exchange
    float *track = nullptr;          // 0/1 Adam: OneBitJob::track(), or NULL
    const float *mask = nullptr;     // or NULL
    float *fresh = nullptr;          // 1-bit LAMB
    MeanView mean;
    MeanView momentum;          // `of` NULL: it is in exp_avg
    bool momentum_goes = false; // it stays in the results, not in exp_avg
};

/// What compensated values take up before they are packed, beside the residual.
struct Added {
    const float *x;
    int64_t numel; // of x from here on, which may be more than a leaf; behind it are zeros
    float scale;   // of the compensated values so far
};

struct OneBitKernels {
    // `active`: bits of the stretch, lowest first, or NULL; what does not take part is 0 and has no residual.
    /// value = x + residual; x NULL = 0.
    void (*add_residual)(const float *x, float *value, float scale, int64_t n);
    /// y = share times the sum of `count` rows, in their order, `stride` apart. y may be the first row.
    void (*add_up_rows)(const float *rows, int64_t stride, int count, float share, int64_t n, float *y);
    /// Two levels: value = the mean of the slices of `ranks` ranks + residual.
    void (*add_slices)(const float *slices, int64_t stride, int ranks, int64_t n, float *value, float scale,
                       const int32_t *active);
    /// value = x + residual, unless that was done before: `added` NULL. Then the leaf's sum of squares, and its bits:
    /// whole bytes, those behind the end are 1.
    double (*pack)(const Added *added, float *value, int64_t n, uint8_t *bits);
    /// A leaf of a server's segment: the mean of the messages of `ranks` ranks at `bit`, in rank order, plus residual.
    double (*serve)(const char *messages, int64_t message_bytes, int64_t message_scales, int ranks, int64_t slot,
                    int64_t bit, int64_t n, float *value, float scale, const int32_t *active, uint8_t *bits);
    /// `active`: of all elements. `streaming`: y is long, and not read again soon.
    void (*mean)(const MeanView &view, int64_t worker, int64_t n, float *y, const int32_t *active, bool streaming);
    void (*feed)(const OneBitSpan &span);
    void (*finish)(const OneBitSpan &span);
    /// 1-bit LAMB: the moments and, for each leaf, the sums of squares of the update without and with decay (in sums_a
    /// and sums_b) and the largest factor; then the weights.
    void (*lamb_mean)(const OneBitSpan &span, double *factors);
    void (*lamb_weights)(const OneBitSpan &span);
    /// 0/1 Adam between exchanges.
    void (*local)(const OneBitSpan &span);
};

} // namespace dsopt::cpu
