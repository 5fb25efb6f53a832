// SPDX-License-Identifier: Apache-2.0
#include "cpu/matrix_step.h"
#include "cpu/partition.h"

namespace dsopt::cpu {

MatrixMemory::MatrixMemory(const MatrixBatch &batch, void *memory) {
    Arena arena(memory);
    const MatrixShape &shape = batch.shape;
    arena.take(matrices, batch.count);
    arena.take(squares, batch.count * shape.leaves());
    arena.take(x, batch.count * shape.numel());
    arena.take(products, batch.count * ns_workspace_bytes(shape.n(), shape.m(), batch.recipe.input));
    bytes = arena.bytes();
}

void MatrixStep::run(MatrixPass pass, int64_t index) {
    if (plan_.control->skip != 0) return;
    const MatrixBatch &batch = matrices_.batches[index];
    const MatrixMemory memory(batch, matrices_.workspace);
    switch (pass) {
    case MatrixPass::form: return form(batch, memory);
    case MatrixPass::orthogonalize: return orthogonalize(batch, memory);
    case MatrixPass::send: return exchange(batch, memory, true);
    case MatrixPass::take: return exchange(batch, memory, false);
    case MatrixPass::apply: return apply(batch, memory);
    }
}

/// Calls visit(job, matrix, first, last), on all threads, with leaves [first, last) of a matrix, whose index is that in
/// the batch. `mine`: only matrices that this rank orthogonalises.
template <class Visit> void MatrixStep::for_leaves(const MatrixBatch &batch, bool mine, const Visit &visit) const {
    const int64_t of_matrix = batch.shape.leaves(), leaves = batch.count * of_matrix;
    const Parallel &parallel = plan_.execution.parallel;
    const int64_t parts = threads_for(leaves * kLeaf * int64_t(sizeof(float)), parallel);
    parallel.run(parts, [&](int64_t part) {
        const DefaultFloatEnvironment environment;
        const int64_t begin = leaves * part / parts, end = leaves * (part + 1) / parts;
        for (int64_t k = batch.first_job; k < batch.first_job + batch.jobs; ++k) {
            const MatrixJob &job = matrices_.jobs[k];
            if (!is_active(job)) continue;
            const int64_t first = std::max(job.index, begin / of_matrix),
                          last = std::min(job.index + job.count, (end + of_matrix - 1) / of_matrix);
            for (int64_t matrix = first; matrix < last; ++matrix)
                if (!mine || is_mine(batch.first + matrix))
                    visit(job, matrix, std::max<int64_t>(begin - matrix * of_matrix, 0),
                          std::min(end - matrix * of_matrix, of_matrix));
        }
    });
}

void MatrixStep::form(const MatrixBatch &batch, const MatrixMemory &memory) const {
    const MatrixShape &shape = batch.shape;
    const Rule rule = plan_.groups[batch.group].rule;
    for_leaves(batch, false, [&](const MatrixJob &job, int64_t matrix, int64_t first, int64_t last) {
        const TensorJob &tensor = plan_.jobs[job.tensor];
        kernels_.form({.job = &tensor,
                       .scalars = &plan_.scalars[job.tensor],
                       .rule = rule,
                       .step = step_of(plan_, tensor),
                       .shape = &shape,
                       .begin = shape.first(job.first + matrix - job.index),
                       .first_leaf = first,
                       .last_leaf = last,
                       .x = memory.x + matrix * shape.numel(),
                       .squares = memory.squares + matrix * shape.leaves()});
    });
}

void MatrixStep::orthogonalize(const MatrixBatch &batch, const MatrixMemory &memory) const {
    const MatrixShape &shape = batch.shape;
    const int64_t numel = shape.numel(), bytes = ns_workspace_bytes(shape.n(), shape.m(), batch.recipe.input);
    const double eps = hyper_of(plan_, batch.group).eps;
    int64_t count = 0;
    for (int64_t k = batch.first_job; k < batch.first_job + batch.jobs; ++k) {
        const MatrixJob &job = matrices_.jobs[k];
        for (int64_t i = job.index; is_active(job) && i < job.index + job.count; ++i)
            if (is_mine(batch.first + i)) {
                const double squares = fold_leaves(memory.squares, {i * shape.leaves(), numel});
                memory.matrices[count++] = ns_matrix(shape.n(), shape.m(), ns_scale(squares, eps), memory.x + i * numel,
                                                     memory.products + i * bytes, batch.recipe.input);
            }
    }
    newton_schulz(products_, batch.recipe, memory.matrices, count, plan_.execution.parallel, matrices_.scratch);
}

void MatrixStep::exchange(const MatrixBatch &batch, const MatrixMemory &memory, bool sends) const {
    const int64_t numel = batch.shape.numel();
    const auto input = int32_t(batch.recipe.input);
    for_leaves(batch, sends, [&](const MatrixJob &, int64_t matrix, int64_t first, int64_t last) {
        const MatrixPlace &place = matrices_.places[batch.first + matrix];
        char *const row = sends ? matrices_.row : matrices_.rows + place.rank * matrices_.row_bytes;
        const dsopt_tensor x{memory.x + matrix * numel, numel, DSOPT_DTYPE_F32, 0};
        const dsopt_tensor sent{row + place.offset, numel, input, 0};
        const int64_t begin = first * kLeaf, end = std::min(last * kLeaf, numel);
        kernels_.axpby(1, sends ? x : sent, 0, sends ? sent : x, begin, end);
    });
}

void MatrixStep::apply(const MatrixBatch &batch, const MatrixMemory &memory) const {
    const MatrixShape &shape = batch.shape;
    const Hyper hyper = hyper_of(plan_, batch.group);
    const auto leaves_of_job = [&](const MatrixJob &job) { return leaves_of(job.count * shape.numel()); };
    int64_t leaves = 0;
    for (int64_t k = batch.first_job; k < batch.first_job + batch.jobs; ++k) leaves += leaves_of_job(matrices_.jobs[k]);
    const Parallel &parallel = plan_.execution.parallel;
    const int64_t parts = threads_for(leaves * kLeaf * int64_t(sizeof(float)), parallel);
    parallel.run(parts, [&](int64_t part) {
        const DefaultFloatEnvironment environment;
        const int64_t begin = leaves * part / parts, end = leaves * (part + 1) / parts;
        int64_t before = 0; // leaves of the jobs so far
        for (int64_t k = batch.first_job; k < batch.first_job + batch.jobs && before < end; ++k) {
            const MatrixJob &job = matrices_.jobs[k];
            const int64_t of_job = leaves_of_job(job), first = std::max(begin - before, int64_t(0)),
                          last = std::min(end - before, of_job);
            before += of_job;
            if (!is_active(job) || first >= last) continue;
            const TensorJob &tensor = plan_.jobs[job.tensor];
            const int64_t element = job.first / shape.across() * shape.band();
            const Span span{.job = &tensor,
                            .scalars = &plan_.scalars[job.tensor],
                            .rule = hyper.rule,
                            .begin = element + first * kLeaf,
                            .end = element + std::min(last * kLeaf, job.count * shape.numel()),
                            .flags = plan_.flags,
                            .sums = plan_.policy.report_norms,
                            .sums_a = plan_.leaf.sums_a,
                            .sums_b = plan_.leaf.sums_b,
                            .trust = 1,
                            .step = step_of(plan_, tensor),
                            .streaming = false,
                            .bf16_instruction = kernels_.bf16_instruction,
                            .prefetch = nullptr};
            kernels_.apply_matrices(span, {.shape = &shape,
                                           .first = job.first,
                                           .x = memory.x + job.index * shape.numel(),
                                           .adjust = batch.adjust,
                                           .hyper = &hyper});
        }
    });
}

} // namespace dsopt::cpu
