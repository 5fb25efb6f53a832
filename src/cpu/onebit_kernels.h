// SPDX-License-Identifier: Apache-2.0
// Loops of 1-bit compression. onebit_kernels.cc is compiled once per instruction set, as kernels.cc.
#pragma once
#include "cpu/kernels.h"
#include "rules/onebit.h"

namespace dsopt::cpu {

/// Bits and scales of all chunks as they arrived, and where an element of a part is in them.
struct MeanView {
    const char *rows; // NULL: nothing was compressed
    int64_t row_bytes, row_scales;
    const int32_t *first_part;    // of every chunk
    int64_t begin, chunk, server; // of the part's unit
    int32_t part;
    const float *values; // the mean itself, by the worker's elements; NULL without rows: it is the rank's own values
    bool is_own() const { return rows == nullptr && values == nullptr; }
};

/// A piece of one tensor in a step with an exchange.
struct OneBitSpan : Span {
    explicit OneBitSpan(const Span &span) : Span(span) {}
    Feed feed{};
    OneBitScalars onebit{};
    int64_t worker = 0;              // place of the tensor's first element among the worker's
    float *message = nullptr;        // two levels: the values as they are, in place of kept sums; or NULL
    float *kept = nullptr;           // the worker's elements; NULL without other ranks
    float kept_scale = 0;            // of the kept sums
    const int32_t *active = nullptr; // of the exchange
    float *track = nullptr;          // 0/1 Adam: OneBitJob::track(), or NULL
    const float *mask = nullptr;     // or NULL
    float *fresh = nullptr;          // 1-bit LAMB
    MeanView mean{};
    MeanView momentum{};        // rows NULL: it is in exp_avg
    bool momentum_goes = false; // it stays in the rows, not in exp_avg
};

/// What kept sums take up before they are packed, beside what they owe.
struct Owed {
    const float *x;
    int64_t numel; // of x from here on, which may be more than a leaf; behind it are zeros
    float scale;   // of the sums so far
};

struct OneBitKernels {
    // `active`: bits of the stretch, lowest first, or NULL; what does not take part is 0 and owes nothing.
    /// kept = x + what is owed; x NULL = 0.
    void (*add_error)(const float *x, float *kept, float scale, int64_t n);
    /// y = share times the sum of `count` rows, in their order, `stride` apart. y may be the first row.
    void (*add_up_rows)(const float *rows, int64_t stride, int count, float share, int64_t n, float *y);
    /// Two levels: kept = the mean of as many rows as there are ranks + what is owed.
    void (*add_rows)(const float *rows, int64_t stride, int ranks, int64_t n, float *kept, float scale,
                     const int32_t *active);
    /// kept = x + what is owed, unless that was done before: `owed` NULL. Then the leaf's sum of squares, and its bits:
    /// whole bytes, those behind the end are 1.
    double (*pack)(const Owed *owed, float *kept, int64_t n, uint8_t *bits);
    /// A leaf of a server's segment: the mean of `ranks` rows at `bit`, in rank order, plus what is owed.
    double (*serve)(const char *rows, int64_t row_bytes, int64_t row_scales, int ranks, int64_t slot, int64_t bit,
                    int64_t n, float *kept, float scale, const int32_t *active, uint8_t *bits);
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
