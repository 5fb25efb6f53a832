// SPDX-License-Identifier: Apache-2.0
#include "step/parts.h"
#include "exchange/exchange.h"
#include "step/drive.h"

namespace dsopt {
namespace {

/// The comms over which a rank finds the other parts, in the order of sums; NULL = one rank.
struct PartComms {
    Comm *data, *node;
};
PartComms comms_of(const StepRun &run) { return {run.parts->in_node ? nullptr : run.comms.data, run.comms.node}; }

/// Number of rows of each kind in StepParts::staging.
struct StagedRows {
    int own;     // this rank's message
    int of_data; // two levels: what `data` gathers, before `node` does
    int all;
    StagedRows(int ranks, int node_ranks, bool in_node) :
        own(in_node ? ranks / node_ranks : 1),
        of_data(!in_node && node_ranks != 1 ? ranks / node_ranks : 0),
        all(ranks) {}
};

/// A list of tensors and their places in rows, for copies.
struct Copies {
    dsopt_tensor *tensors, *pieces;
    int64_t count = 0;

    void add(const RowLayout::Piece &piece, char *row, const dsopt_tensor &tensor) {
        const auto size = int64_t(dtype_size(tensor.dtype));
        tensors[count] = {static_cast<char *>(tensor.data) + piece.range.begin * size, piece.range.numel, tensor.dtype,
                          0};
        pieces[count++] = {row + piece.offset, piece.range.numel, tensor.dtype, 0};
    }
};

} // namespace

int64_t StepParts::staging_bytes(const RowLayout &rows, const DataRank &local, bool in_node) {
    const StagedRows staged(local.ranks, local.node_ranks, in_node);
    return (staged.own + staged.of_data + staged.all) * rows.max_row_bytes();
}

void complete_leaves(const StepRun &run, double *values) {
    const auto [data, node] = comms_of(run);
    const Execution &execution = run.plan.execution;
    for (Comm *comm : {node, data})
        if (comm != nullptr)
            comm->all_reduce(values, execution.shape.leaves, DSOPT_DTYPE_F64, DSOPT_OP_SUM, execution.stream,
                             Place::backend);
}

void clear_sums(const StepRun &run, bool counts) {
    const Execution &execution = run.plan.execution;
    const LeafResults &leaf = run.plan.leaf;
    const size_t bytes = size_t(execution.shape.leaves) * sizeof(double);
    for (void *results : {static_cast<void *>(leaf.sums_a), counts ? static_cast<void *>(leaf.bad) : leaf.sums_b})
        run.context.device().clear(results, bytes, execution.stream);
}

void gather_weights(const StepRun &run) {
    const StepParts &parts = *run.parts;
    const RowLayout &rows = parts.rows;
    const Execution &execution = run.plan.execution;
    const Device &device = run.context.device();
    const auto [data, node] = comms_of(run);
    const DataRank local = data_rank_of(run.comms.data, run.comms.node);
    const StagedRows staged(local.ranks, local.node_ranks, parts.in_node);
    const int own = local.rank / staged.own * staged.own; // the first of its rows
    const auto size_of = [&](size_t i) { return int64_t(dtype_size(parts.weights[i].dtype)); };
    const auto copies_of = [&](int row, char *to, int64_t stripe, Copies &copies) {
        (void)rows.for_pieces(stripe, row, size_of, [&](const RowLayout::Piece &piece) {
            copies.add(piece, to, parts.weights[piece.tensor]);
        });
    };
    for (int64_t stripe = 0; stripe < rows.stripes(); ++stripe) {
        const int64_t bytes = rows.row_bytes(stripe, size_of);
        if (bytes == 0) continue;
        char *const sent = parts.staging, *const of_data = sent + staged.own * bytes,
                    *const all = of_data + staged.of_data * bytes;
        Copies packed{parts.lists, parts.lists + rows.max_pieces()}, unpacked = packed;
        for (int k = 0; k < staged.own; ++k) copies_of(own + k, sent + k * bytes, stripe, packed);
        device.clear(sent, size_t(staged.own * bytes), execution.stream);
        device.kernels().copy(packed.tensors, packed.pieces, packed.count, execution.parallel, execution.stream);
        const char *message = sent;
        int64_t message_bytes = staged.own * bytes;
        if (data != nullptr) {
            char *const gathered = node != nullptr ? of_data : all;
            data->all_gather(message, gathered, message_bytes, execution.stream, Place::backend);
            message = gathered;
            message_bytes *= data->ranks();
        }
        if (node != nullptr) node->all_gather(message, all, message_bytes, execution.stream, Place::backend);
        for (int row = 0; row < staged.all; ++row)
            if (row < own || row >= own + staged.own) copies_of(row, all + row * bytes, stripe, unpacked);
        device.kernels().copy(unpacked.pieces, unpacked.tensors, unpacked.count, execution.parallel, execution.stream);
    }
}

void reserve_parts(const StepRun &run) {
    const StepParts &parts = *run.parts;
    const auto [data, node] = comms_of(run);
    const DataRank local = data_rank_of(run.comms.data, run.comms.node);
    const StagedRows staged(local.ranks, local.node_ranks, parts.in_node);
    const int64_t leaves = run.plan.execution.shape.leaves * int64_t(sizeof(double));
    int64_t message = staged.own * parts.rows.max_row_bytes();
    for (Comm *comm : {data, node}) {
        if (comm == nullptr) continue;
        comm->reserve({.all_reduce = leaves, .all_gather = message}, run.plan.execution.stream, Place::backend);
        message *= comm->ranks();
    }
}

} // namespace dsopt
