// SPDX-License-Identifier: Apache-2.0
// Element-wise passes over matrices. Compiled like kernels.cc, once per instruction set.
#include "cpu/tiles.h"
#include "rules/all.h"

namespace dsopt::cpu {
namespace {

/// Elements that are formed before they are transposed: as many as fit on a small stack.
constexpr int64_t kPiece = kLeaf / 2;
static_assert(kPiece % kTile == 0);
struct alignas(64) PieceBuffer {
    float at[kPiece];
};

/// Moves the momentum of `n` consecutive elements of the tensor.
template <class R>
void form_tile(const typename R::Form &rule, const Span &span, int64_t element, int64_t n, float *u) {
    Buffer g_buffer, m_buffer;
    const float *const g = open_gradient(*span.job, element, n, g_buffer);
    float *const m = open_moment(span, 0, element, n, m_buffer);
    apply(rule, n, g, m, u);
    close_moment<R>(m, span, 0, element, n);
}

template <class R> void form_leaves(const MatrixSpan &span) {
    const typename R::Form rule{*span.scalars};
    const MatrixShape &shape = *span.shape;
    const int64_t rows = shape.rows, cols = shape.cols;
    Span tile{};
    tile.job = span.job;
    tile.step = span.step;
    PieceBuffer buffer;
    for (int64_t leaf = span.first_leaf; leaf < span.last_leaf; ++leaf) {
        const int64_t leaf_end = least((leaf + 1) * kLeaf, shape.numel());
        LeafSum sum(leaf_end - leaf * kLeaf);
        for (int64_t begin = leaf * kLeaf; begin < leaf_end; begin += kPiece) {
            const int64_t numel = least(kPiece, leaf_end - begin);
            float *const u = shape.tall() ? buffer.at : span.x + begin;
            int64_t row = begin / cols, col = begin % cols;
            for (int64_t i = 0; i < numel;) {
                const int64_t run = shape.stride == cols ? kTile : cols - col, n = least(least(kTile, run), numel - i);
                form_tile<R>(rule, tile, span.begin + row * shape.stride + col, n, u + i);
                i += n;
                col += n;
                if (col >= cols) row += col / cols, col %= cols;
            }
            sum.add(u, numel);
            if (!shape.tall()) continue;
            row = begin / cols, col = begin % cols;
            for (int64_t i = 0; i < numel; ++row, col = 0) { // transposes
                const int64_t n = least(cols - col, numel - i);
                float *const to = span.x + col * rows + row;
                for (int64_t k = 0; k < n; ++k) to[k * rows] = u[i + k];
                i += n;
            }
        }
        span.squares[leaf] = sum.fold();
    }
}

/// Copies the results of `n` consecutive elements of the tensor.
void gather(const MatrixResults &results, int64_t element, int64_t n, float *to) {
    const MatrixShape &shape = *results.shape;
    int64_t matrix = element / shape.band() * shape.across(), row = element % shape.band() / shape.stride,
            col = element % shape.stride;
    matrix += col / shape.cols, col %= shape.cols;
    for (int64_t i = 0; i < n;) {
        const int64_t count = least(shape.cols - col, n - i);
        const float *const x = results.x + (matrix - results.first) * shape.numel();
        if (shape.tall())
            for (int64_t k = 0; k < count; ++k) to[i + k] = x[(col + k) * shape.rows + row];
        else
            __builtin_memcpy(to + i, x + row * shape.cols + col, size_t(count) * sizeof(float));
        i += count;
        col = 0; // of the next matrix in the band, or of the next row, or of the next band
        if (++matrix % shape.across() != 0) continue;
        matrix -= shape.across();
        if (++row != shape.rows) continue;
        row = 0;
        matrix += shape.across();
    }
}

} // namespace

void DSOPT_JOIN(form_, DSOPT_ISA)(const MatrixSpan &span) {
    visit(span.rule, [&](auto formula) {
        using R = typename decltype(formula)::type;
        if constexpr (R::passes == Passes::matrix) form_leaves<R>(span);
    });
}

void DSOPT_JOIN(apply_matrices_, DSOPT_ISA)(const Span &span, const MatrixResults &results) {
    const MatrixApply rule(*results.hyper, results.adjust);
    const TensorJob &job = *span.job;
    WeightTile weights(span, span.sums);
    Buffer o;
    for (int64_t leaf = span.begin; leaf < span.end; leaf += kLeaf) {
        const int64_t stop = least(leaf + kLeaf, span.end), summed = span.sums ? stop - leaf : 0;
        LeafSum weight_sum(summed), change_sum(summed);
        for (int64_t i = leaf; i < stop; i += kTile) {
            const int64_t n = least(kTile, stop - i);
            gather(results, i, n, o.at);
            float *const p = weights.open(i, n);
            if (span.sums) weight_sum.add(p, n);
            apply(rule, n, p, static_cast<const float *>(o.at));
            weights.close(i, n);
            if (span.sums) change_sum.add(weights.change(), n);
        }
        if (!span.sums) continue;
        span.sums_a[job.first_leaf + leaf / kLeaf] = weight_sum.fold();
        span.sums_b[job.first_leaf + leaf / kLeaf] = change_sum.fold();
    }
}

} // namespace dsopt::cpu
