// SPDX-License-Identifier: Apache-2.0
// Newton-Schulz iterations of rules/muon.h. An iteration with coefficients (a, b, c) computes A = rd(Xh Xh^T),
// B = rd(b A + c A A) and X = a X + B Xh, where Xh = rd(X). rd() rounds to the dtype of the products' inputs.
#pragma once
#include "base/parallel.h"
#include "base/sizes.h"
#include "cpu/gemm.h"
#include "device/matrix_plan.h"

namespace dsopt::cpu {

/// A matrix of n x m, n <= m, row-major (the caller stores tall matrices transposed), with its workspace. The
/// iterations begin with X = x * scale, rounded once; on return x is O = rd(X).
struct NsMatrix {
    int64_t n, m;
    double scale;
    float *x;
    void *input; // n x m elements of ns_input()
    void *a, *b; // n x n elements of ns_input()
};

/// Returns the bytes of an array of `count` elements in the workspace.
constexpr int64_t ns_array_bytes(int64_t count, int64_t n, Dtype input) {
    return round_up(count * int64_t(dtype_size(ns_input(n, input))), int64_t(kCacheLine));
}
/// Returns the bytes of `input`, `a` and `b` of a matrix together, each rounded up to 64.
constexpr int64_t ns_workspace_bytes(int64_t n, int64_t m, Dtype input) {
    return ns_array_bytes(n * m, n, input) + 2 * ns_array_bytes(n * n, n, input);
}
/// Returns a matrix with its arrays in a workspace of ns_workspace_bytes().
inline NsMatrix ns_matrix(int64_t n, int64_t m, double scale, float *x, void *workspace, Dtype input) {
    char *const memory = static_cast<char *>(workspace), *const a = memory + ns_array_bytes(n * m, n, input);
    return {n, m, scale, x, memory, a, a + ns_array_bytes(n * n, n, input)};
}

/// Returns the bytes of newton_schulz()'s scratch for `count` matrices of n x m.
int64_t ns_scratch_bytes(const Products &products, int64_t n, int64_t m, int64_t count, int64_t threads);

/// Runs the iterations of `count` matrices on all threads: many small matrices are spread over the threads, each
/// product of a large one is partitioned. The number of threads does not change the result. Throws HOOK as
/// Parallel::run() does; the matrices are then undefined. Allocates nothing.
/// `scratch` is aligned to 64 bytes.
void newton_schulz(const Products &products, const NsRecipe &recipe, const NsMatrix *matrices, int64_t count,
                   const Parallel &parallel, char *scratch);

/// Returns the number of products that this process has run, 3 per step and matrix. For tests.
int64_t products_run();

} // namespace dsopt::cpu
