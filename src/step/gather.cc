// SPDX-License-Identifier: Apache-2.0
#include "step/gather.h"
#include "exchange/exchange.h"

namespace dsopt {
void complete_leaves(const StepRun &run, double *values) {
    const RowComms &comms = run.rows->comms;
    const Execution &execution = run.plan.execution;
    for (Comm *comm : {comms.node, comms.between_parts})
        if (comm != nullptr)
            comm->all_reduce(values, execution.shape.leaves, DSOPT_DTYPE_F64, DSOPT_OP_SUM, execution.stream,
                             Place::backend);
}

void clear_leaves(const StepRun &run, void *results) {
    const Execution &execution = run.plan.execution;
    run.context.device().clear(results, size_t(execution.shape.leaves) * sizeof(double), execution.stream);
}

void complete_squares(const StepRun &run) { complete_leaves(run, run.plan.leaf.sums_a); }
void clear_squares(const StepRun &run) {
    clear_leaves(run, run.plan.leaf.sums_a);
    clear_leaves(run, run.plan.leaf.bad); // its sums stay those of this rank
}
void complete_sums(const StepRun &run) {
    for (double *sums : {run.plan.leaf.sums_a, run.plan.leaf.sums_b}) complete_leaves(run, sums);
}
void clear_sums(const StepRun &run) {
    for (double *sums : {run.plan.leaf.sums_a, run.plan.leaf.sums_b}) clear_leaves(run, sums);
}

void reserve_leaves(const StepRun &run) {
    const RowComms &comms = run.rows->comms;
    const int64_t bytes = run.plan.execution.shape.leaves * int64_t(sizeof(double));
    for (Comm *comm : {comms.node, comms.between_parts})
        if (comm != nullptr) comm->reserve({.all_reduce = bytes}, run.plan.execution.stream, Place::backend);
}

void gather_weights(const StepRun &run) {
    const StepRows &rows = *run.rows;
    const RowLayout &layout = rows.layout;
    const Execution &execution = run.plan.execution;
    const Device &device = run.context.device();
    const auto [own, count] = std::pair(rows.comms.first, rows.comms.count);
    const auto size_of = [&](size_t i) { return int64_t(dtype_size(rows.weights[i].dtype)); };
    for (int64_t stripe = 0; stripe < layout.stripes(); ++stripe) {
        const int64_t bytes = layout.row_bytes(stripe, size_of);
        if (bytes == 0) continue;
        PieceList pieces(rows);
        const auto add_row = [&](int row, char *in_memory) {
            (void)layout.for_pieces(stripe, row, size_of, [&](const RowLayout::Piece &piece) {
                pieces.add(piece_of(rows.weights[piece.tensor], piece.range), in_memory + piece.offset);
            });
        };
        const int64_t message = count * bytes;
        for (int row = 0; row < count; ++row) add_row(own + row, rows.staging[0] + row * bytes);
        device.clear(rows.staging[0], size_t(message), execution.stream);
        device.kernels().copy(pieces.tensors(), pieces.others(), pieces.count(), execution.parallel, execution.stream);
        char *const all = gather_rows(rows, rows.comms.between_parts, rows.comms.node, message, execution.stream);
        pieces.clear();
        for (int row = 0; row < layout.ranks(); ++row)
            if (row < own || row >= own + count) add_row(row, all + row * bytes);
        device.kernels().copy(pieces.others(), pieces.tensors(), pieces.count(), execution.parallel, execution.stream);
    }
}

void reserve_gather(const StepRun &run) {
    const RowComms &comms = run.rows->comms;
    int64_t message = comms.count * run.rows->layout.max_row_bytes();
    for (Comm *comm : {comms.between_parts, comms.node}) {
        if (comm == nullptr) continue;
        comm->reserve({.all_gather = message}, run.plan.execution.stream, Place::backend);
        message *= comm->ranks();
    }
}

} // namespace dsopt
