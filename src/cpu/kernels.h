// SPDX-License-Identifier: Apache-2.0
// The loops of the CPU backend. kernels.cc is compiled once per instruction set; all of them give the same bits.
#pragma once
#include "device/plan.h"
#include "rules/all.h"

namespace dsopt::cpu {

/// Streaming stores are visible to other threads only after this. It waits for all stores before it, so a thread calls
/// it once, behind all its tensors.
__attribute__((always_inline)) inline void fence_streaming() {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

struct OneBitKernels;
struct PrefetchCursor;

/// A piece of one tensor in a step. `begin` is a multiple of kLeaf and `end` too, or the tensor's end.
struct Span {
    const TensorJob *job;
    const Scalars *scalars;
    Rule rule;
    int64_t begin, end;
    uint32_t flags;
    bool sums;                // Passes::elementwise: also sum old^2 and (new - old)^2 of each leaf
    double *sums_a, *sums_b;  // of all leaves of the step
    float trust;              // Passes::reduced, second pass: the factor
    int64_t step;             // of the tensor, for stochastic rounding
    bool streaming;           // copies and outputs go past the caches; the caller fences them
    bool bf16_instruction;    // as in Kernels
    PrefetchCursor *prefetch; // NULL: without prefetch
};

struct Kernels {
    const char *name;
    const OneBitKernels &onebit;
    /// Pass 1, of a piece as in Span. For each leaf: the sum of squares, the number of non-finite elements (NaNs times
    /// 2^32 on top) and, where wanted, the largest magnitude (NaN if there is one). `leaf` is the index of the first.
    void (*inspect)(const Slot &slot, int64_t begin, int64_t end, double *squares, int64_t *bad, float *largest,
                    int64_t leaf);
    void (*squares)(const Slot &slot, int64_t begin, int64_t end, double *squares, int64_t leaf);
    /// Passes::elementwise: everything in one read-modify-write. Passes::reduced, first pass: moments, and sums of
    /// weight^2 and update^2 of each leaf.
    void (*update)(const Span &span);
    /// Passes::reduced, second pass.
    void (*update_weights)(const Span &span);
    /// A tensor that stays as it is: outputs and zeroed gradients all the same.
    void (*unchanged)(const Span &span);
    /// y = a x + b y; y is not read when b is 0. `begin` and `end` in elements.
    void (*axpby)(float a, const dsopt_tensor &x, float b, const dsopt_tensor &y, int64_t begin, int64_t end);
    void (*clamp)(const dsopt_tensor &x, float limit, int64_t begin, int64_t end);
    bool bf16_instruction; // spans may round by it
};

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;   // and F16C
extern const Kernels kernels_avx512; // F, BW, DQ, VL
extern const Kernels kernels_avx512_bf16;
#endif

} // namespace dsopt::cpu
