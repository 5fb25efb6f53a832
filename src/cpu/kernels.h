// SPDX-License-Identifier: Apache-2.0
// Kernels of the CPU backend. kernels.cc is compiled once per instruction set; the results are bitwise identical.
#pragma once
#include "device/matrix_plan.h"
#include "rules/all.h"

namespace dsopt::cpu {

/// Makes non-temporal stores visible to other threads. Waits for all earlier stores, so a thread calls it once, after
/// its last tensor.
__attribute__((always_inline)) inline void fence_streaming() {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

struct OneBitKernels;
struct PrefetchCursor;

/// Elements [begin, end) of one tensor in a step. `begin` is a multiple of kLeaf. `end` is a multiple of kLeaf or the
/// tensor's end.
struct Span {
    const TensorJob *job;
    const Scalars *scalars;
    Rule rule;
    int64_t begin, end;
    uint32_t flags;
    bool sums;                // Passes::elementwise: also sums old^2 and (new - old)^2 of each leaf's weights
    double *sums_a, *sums_b;  // indexed by leaf, for all leaves of the step
    float trust;              // Passes::reduced, second pass: trust ratio
    int64_t step;             // step number of the tensor, for stochastic rounding
    bool streaming;           // copies and outputs use non-temporal stores; the caller calls fence_streaming()
    bool bf16_instruction;    // as in Kernels
    PrefetchCursor *prefetch; // NULL: no prefetch
};

/// Leaves of one matrix in a step, and its memory.
struct MatrixSpan {
    const TensorJob *job;
    const Scalars *scalars;
    Rule rule;
    int64_t step; // as in Span
    const MatrixShape *shape;
    int64_t begin;                 // index of the matrix's first element in the tensor
    int64_t first_leaf, last_leaf; // leaves [first_leaf, last_leaf) of the matrix
    float *x;                      // n x m, row-major: the transpose of a tall matrix
    double *squares;               // of each leaf of the matrix
};
/// Results of the matrices of one tensor, for the elements of a Span.
struct MatrixResults {
    const MatrixShape *shape;
    int64_t first;  // the first of the tensor's matrices that is at `x`
    const float *x; // matrices of n x m, one after the other
    double adjust;
    const Hyper *hyper;
};

struct Kernels {
    const char *name;
    const OneBitKernels &onebit;
    /// Pass 1, over elements [begin, end) as in Span. Writes, for each leaf, the sum of squares, the number of
    /// non-finite elements plus 2^32 times the number of NaNs and, if `largest` is not NULL, the largest magnitude (NaN
    /// if there is one). `leaf` is the index of the first leaf.
    void (*inspect)(const Slot &slot, int64_t begin, int64_t end, double *squares, int64_t *bad, float *largest,
                    int64_t leaf);
    void (*squares)(const Slot &slot, int64_t begin, int64_t end, double *squares, int64_t leaf);
    /// Passes::elementwise: updates everything in one read-modify-write. Passes::reduced: the first pass, which updates
    /// the moments and sums weight^2 and update^2 of each leaf.
    void (*update)(const Span &span);
    /// Passes::reduced: the second pass, which updates the weights.
    void (*update_weights)(const Span &span);
    /// Passes::matrix: moves the momentum, and stores what is orthogonalised.
    void (*form)(const MatrixSpan &span);
    /// Passes::matrix: updates the weights.
    void (*apply_matrices)(const Span &span, const MatrixResults &results);
    /// Handles a tensor that the step does not update: writes its output and zeroes its gradient, if requested.
    void (*unchanged)(const Span &span);
    /// y = a x + b y; y is not read when b is 0. `begin` and `end` in elements.
    void (*axpby)(float a, const dsopt_tensor &x, float b, const dsopt_tensor &y, int64_t begin, int64_t end);
    void (*clamp)(const dsopt_tensor &x, float limit, int64_t begin, int64_t end);
    bool bf16_instruction; // spans may round to bf16 with the processor's instruction
};

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;   // with F16C
extern const Kernels kernels_avx512; // with F, BW, DQ and VL
extern const Kernels kernels_avx512_bf16;
#endif

} // namespace dsopt::cpu
