// SPDX-License-Identifier: Apache-2.0
#include "step/gather.h"
#include "exchange/exchange.h"

namespace dsopt {
namespace {

/// The comms over which the parts of sharded state, or those of StepPlan::fed, are spread.
struct PartComms {
    Comm *data, *node;
};
PartComms comms_of(const StepRun &run) {
    const bool in_node = run.rows->sharding == Sharding::in_node || run.plan.fed != nullptr;
    return {in_node ? nullptr : run.comms.data, run.comms.node};
}

/// The rows with this rank's part.
struct OwnRows {
    int first, count;
};
OwnRows own_rows(const StepRun &run) {
    const DataRank local = data_rank_of(run.comms.data, run.comms.node);
    const bool in_node = run.rows->sharding == Sharding::in_node;
    return in_node ? OwnRows{local.first_of_slice(), local.nodes()} : OwnRows{local.rank, 1};
}

} // namespace

void complete_leaves(const StepRun &run, double *values) {
    const auto [data, node] = comms_of(run);
    const Execution &execution = run.plan.execution;
    for (Comm *comm : {node, data})
        if (comm != nullptr)
            comm->all_reduce(values, execution.shape.leaves, DSOPT_DTYPE_F64, DSOPT_OP_SUM, execution.stream,
                             Place::backend);
}

void clear_leaves(const StepRun &run, void *results) {
    const Execution &execution = run.plan.execution;
    run.context.device().clear(results, size_t(execution.shape.leaves) * sizeof(double), execution.stream);
}

void gather_weights(const StepRun &run) {
    const StepRows &rows = *run.rows;
    const RowLayout &layout = rows.layout;
    const Execution &execution = run.plan.execution;
    const Device &device = run.context.device();
    const auto [data, node] = comms_of(run);
    const auto [own, count] = own_rows(run);
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
        char *const all = gather_rows(rows, data, node, message, execution.stream);
        pieces.clear();
        for (int row = 0; row < layout.ranks(); ++row)
            if (row < own || row >= own + count) add_row(row, all + row * bytes);
        device.kernels().copy(pieces.others(), pieces.tensors(), pieces.count(), execution.parallel, execution.stream);
    }
}

void reserve_gather(const StepRun &run) {
    const auto [data, node] = comms_of(run);
    const int64_t leaves = run.plan.execution.shape.leaves * int64_t(sizeof(double));
    int64_t message = own_rows(run).count * run.rows->layout.max_row_bytes();
    for (Comm *comm : {data, node}) {
        if (comm == nullptr) continue;
        comm->reserve({.all_reduce = leaves, .all_gather = message}, run.plan.execution.stream, Place::backend);
        message *= comm->ranks();
    }
}

} // namespace dsopt
