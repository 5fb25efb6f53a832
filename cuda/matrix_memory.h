// SPDX-License-Identifier: Apache-2.0
// Workspace of a batch of matrices on a device. Matrices are row-major as their tensors are; their rows are padded to
// kLtAlignment. Wide and tall matrices have other products, so that none is transposed in memory.
#pragma once
#include "device/matrix_plan.h"
#include "lt.h"

namespace dsopt::gpu {

/// Arrays of a batch, each with one block per matrix.
struct MatrixMemory {
    double *squares;     // of leaves
    float *x;            // what is orthogonalised
    void *inputs;        // x, rounded to the type of products' inputs
    void *a, *b;         // square matrices
    void *lt;            // of kLtWorkspace bytes, aligned to kWorkspaceAlignment
    int64_t ld, size_ld; // elements of a row of x, and of a square matrix
    size_t bytes;

    /// `memory` NULL: only computes the sizes.
    MatrixMemory(const MatrixBatch &batch, void *memory) {
        Arena arena(memory);
        const MatrixShape &shape = batch.shape;
        const auto size = int64_t(dtype_size(batch.recipe.input));
        ld = round_up(shape.cols, kLtAlignment / size);
        size_ld = round_up(shape.n(), kLtAlignment / size);
        arena.take(squares, batch.count * shape.leaves());
        arena.take(x, batch.count * padded(shape));
        arena.take_bytes(inputs, size_t(batch.count * padded(shape) * size));
        for (void **square : {&a, &b}) arena.take_bytes(*square, size_t(batch.count * shape.n() * size_ld * size));
        arena.take_bytes(lt, with_alignment_padding(kLtWorkspace));
        if (lt != nullptr) lt = static_cast<char *>(lt) + alignment_padding(lt);
        bytes = arena.bytes();
    }
    /// Returns the number of elements of x per matrix, with padding.
    DSOPT_HD int64_t padded(const MatrixShape &shape) const { return shape.rows * ld; }
};

/// Matrices first, first + step, ... of a batch, `count` of them: a call of cuBLASLt has one stride per operand.
struct MatrixRun {
    int64_t first, step, count;
};

/// The three products of a Newton-Schulz iteration. For cuBLASLt a row-major matrix is its transposed column-major one.
/// Square matrices are symmetric.
struct MatrixProducts {
    LtShape gram, square, update;

    MatrixProducts(const MatrixBatch &batch, const MatrixMemory &memory, const MatrixRun &run) {
        const MatrixShape &shape = batch.shape;
        const bool tall = shape.tall();
        const int64_t n = shape.n(), m = shape.m(), step = run.count > 1 ? run.step : 0;
        const LtMatrix x{memory.ld, step * memory.padded(shape), false};
        const LtMatrix symmetric{memory.size_ld, step * n * memory.size_ld, false};
        const auto count = int32_t(run.count);
        const Dtype input = batch.recipe.input;
        LtMatrix transposed = x;
        transposed.transposed = true;
        gram = {n, n, m, tall ? x : transposed, tall ? transposed : x, symmetric, count, input, input};
        square = {n, n, n, symmetric, symmetric, symmetric, count, input, input};
        if (tall)
            update = {n, m, n, symmetric, x, x, count, input, Dtype::f32};
        else
            update = {m, n, n, x, symmetric, x, count, input, Dtype::f32};
    }
};

} // namespace dsopt::gpu
