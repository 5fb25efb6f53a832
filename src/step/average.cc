// SPDX-License-Identifier: Apache-2.0
#include "step/average.h"
#include "exchange/exchange.h"

namespace dsopt {
namespace {

using Piece = RowLayout::Piece;

/// Rows that a rank received: a row of each of `count` ranks, at multiples of `stride` bytes.
struct Received {
    char *data;
    bool f32; // the dtype of elements; false: that of the gradients
    int64_t stride;
    int count;
};

/// Averages stripes of a list of gradients, over all ranks or in the node.
class Averager {
public:
    Averager(const StepRun &run, const dsopt_tensor *gradients, bool in_node) :
        run_(run),
        rows_(*run.rows),
        gradients_(gradients),
        in_node_(in_node),
        jobs_(in_node && run.plan.slice_jobs != nullptr && !run.rows->all_of_node ? run.plan.slice_jobs
                                                                                  : run.plan.jobs),
        local_(rows_.comms.local),
        nodes_(local_.nodes()),
        sends_f32_(rows_.comms.first_level().provider_sums()) {}

    /// `packed`: the rows of the stripe, which pack() has made; NULL: they are made here.
    void average(int64_t stripe, const char *packed) const {
        const int64_t bytes = row_bytes(stripe, false), f32_bytes = row_bytes(stripe, true);
        if (bytes == 0) return;
        if (packed == nullptr) {
            pack(stripe, sent());
            packed = sent();
        }
        Comm *const data = rows_.comms.data, *const node = rows_.comms.node;
        if (node == nullptr) return add_up(stripe, exchange(*data, packed, bytes, false), f32_bytes);
        // Of this rank in its node: a row per node.
        const Received slice = exchange(*node, packed, nodes_ * bytes, false);
        if (nodes_ == 1 && !in_node_) return add_up(stripe, slice, f32_bytes);
        const bool stores = in_node_ && !rows_.all_of_node; // means, not sums to send
        if (!stores) clear(sent(), nodes_ * f32_bytes);
        PieceList pieces(rows_);
        const int first = local_.first_of_slice();
        for (int k = 0; k < nodes_; ++k)
            for_pieces(stripe, first + k, false, [&](const Piece &piece, int64_t f32_offset) {
                pieces.add(stores ? mean_of(piece) : f32_piece(piece, sent() + k * f32_bytes + f32_offset),
                           received() + k * bytes + piece.offset, sent_dtype(piece.tensor));
            });
        sum(pieces, {slice.stride, slice.count, in_node_ ? 1.0f / float(local_.node_ranks) : 1.0f});
        if (stores) return;
        if (in_node_) return gather_means(stripe, nullptr, node, nodes_ * f32_bytes, 0, f32_bytes);
        add_up(stripe, exchange(*data, sent(), f32_bytes, true), f32_bytes);
    }
    /// Returns the bytes of the packed rows of a stripe.
    int64_t packed_bytes(int64_t stripe) const { return local_.ranks * row_bytes(stripe, false); }
    /// Copies the gradients to one row per rank; absent ones are zeros.
    void pack(int64_t stripe, char *to) const {
        const int64_t bytes = row_bytes(stripe, false);
        clear(to, local_.ranks * bytes);
        PieceList pieces(rows_);
        for (int row = 0; row < local_.ranks; ++row)
            for_pieces(stripe, row, false, [&](const Piece &piece, int64_t) {
                const dsopt_tensor &gradient = gradients_[piece.tensor];
                if (gradient.data != nullptr)
                    pieces.add(piece_of(gradient, piece.range), to + row * bytes + piece.offset,
                               sent_dtype(piece.tensor));
            });
        if (!sends_f32_) return copy(pieces.tensors(), pieces.others(), pieces.count());
        const Execution &execution = run_.plan.execution;
        run_.context.device().kernels().axpby({}, pieces.tensors(), 0, pieces.others(), pieces.count(),
                                              execution.parallel, execution.stream);
    }

private:
    /// Sends a message of `bytes` to every rank of `comm`, which adds up what it receives. If the provider adds, there
    /// is only the sum.
    Received exchange(Comm &comm, const char *from, int64_t bytes, bool f32) const {
        if (comm.provider_sums()) {
            comm.reduce_scatter(from, received(), bytes / int64_t(sizeof(float)), stream(), Place::backend);
            return {received(), true, 0, 1};
        }
        comm.all_to_all(from, received(), bytes, stream(), Place::backend);
        return {received(), f32, bytes, comm.ranks()};
    }
    /// Returns the dtype in which a gradient is sent.
    int32_t sent_dtype(size_t i) const { return sends_f32_ ? DSOPT_DTYPE_F32 : gradients_[i].dtype; }

    char *sent() const { return rows_.staging[0]; }
    char *received() const { return rows_.staging[1]; }
    void *stream() const { return run_.plan.execution.stream; }
    void clear(char *memory, int64_t bytes) const { run_.context.device().clear(memory, size_t(bytes), stream()); }
    void sum(const PieceList &pieces, const SumRows &rows) const {
        run_.context.device().kernels().for_elements(rows, pieces.others(), pieces.tensors(), pieces.count(),
                                                     run_.plan.execution.parallel, stream());
    }
    void copy(const dsopt_tensor *from, const dsopt_tensor *to, int64_t count) const {
        run_.context.device().kernels().copy(from, to, count, run_.plan.execution.parallel, stream());
    }
    auto size_of(bool f32) const {
        return [this, f32](size_t i) {
            if (gradients_[i].numel == 0) return int64_t(0);
            return int64_t(dtype_size(f32 ? int32_t(DSOPT_DTYPE_F32) : sent_dtype(i)));
        };
    }
    int64_t row_bytes(int64_t stripe, bool f32) const { return rows_.layout.row_bytes(stripe, size_of(f32)); }
    /// Calls visit(piece, offset of the piece in an F32 row) for each piece of a row.
    template <class Visit> void for_pieces(int64_t stripe, int row, bool f32, const Visit &visit) const {
        int64_t f32_offset = 0;
        (void)rows_.layout.for_pieces(stripe, row, size_of(f32), [&](const Piece &piece) {
            visit(piece, f32_offset);
            f32_offset += round_up(piece.range.numel * int64_t(sizeof(float)), int64_t(kCacheLine));
        });
    }
    /// Returns the elements of a piece in the mean of its tensor.
    dsopt_tensor mean_of(const Piece &piece) const {
        const TensorJob &job = jobs_[piece.tensor];
        return piece_of({job.data[kGrad], job.range.numel, DSOPT_DTYPE_F32, 0},
                        {piece.range.begin - job.begin(), piece.range.numel, job.range.numel});
    }
    static dsopt_tensor f32_piece(const Piece &piece, char *data) {
        return {data, piece.range.numel, DSOPT_DTYPE_F32, 0};
    }

    /// Computes this rank's row of means, and gathers those of the other ranks if its jobs need them.
    void add_up(int64_t stripe, const Received &from, int64_t f32_bytes) const {
        const bool alone = rows_.sharding == Sharding::ranks;
        PieceList pieces(rows_);
        if (!alone) clear(sent(), f32_bytes);
        for_pieces(stripe, local_.rank, from.f32, [&](const Piece &piece, int64_t f32_offset) {
            pieces.add(alone ? mean_of(piece)
                             : dsopt_tensor{sent() + f32_offset, piece.range.numel, DSOPT_DTYPE_F32, 0},
                       from.data + piece.offset, from.f32 ? int32_t(DSOPT_DTYPE_F32) : sent_dtype(piece.tensor));
        });
        sum(pieces, {from.stride, from.count, 1.0f / float(local_.ranks)});
        if (alone) return;
        const bool in_node = rows_.sharding == Sharding::in_node;
        gather_means(stripe, rows_.comms.data, in_node ? nullptr : rows_.comms.node, f32_bytes,
                     in_node ? local_.first_of_slice() : 0, f32_bytes);
    }
    /// Gathers F32 rows over the comms, and copies them to the means. `message`: bytes of this rank's rows. `first`: the
    /// first row that all ranks together have.
    void gather_means(int64_t stripe, Comm *data, Comm *node, int64_t message, int first, int64_t f32_bytes) const {
        char *const all = gather_rows(rows_, data, node, message, stream());
        const int64_t count =
            message / f32_bytes * (data != nullptr ? data->ranks() : 1) * (node != nullptr ? node->ranks() : 1);
        PieceList pieces(rows_);
        for (int row = 0; row < int(count); ++row)
            for_pieces(stripe, first + row, true, [&](const Piece &piece, int64_t) {
                pieces.add(mean_of(piece), all + row * f32_bytes + piece.offset);
            });
        copy(pieces.others(), pieces.tensors(), pieces.count());
    }

    const StepRun &run_;
    const StepRows &rows_;
    const dsopt_tensor *const gradients_;
    const bool in_node_;
    const TensorJob *const jobs_; // their gradients are the means
    const DataRank local_;
    const int nodes_;
    const bool sends_f32_; // the first comm's provider adds, which it can do in F32 only
};

/// Calls body(stripe) for the stripes of a section.
template <class Body> void for_stripes(const StepRows &rows, int section, const Body &body) {
    for (int64_t stripe = rows.layout.first_stripe(section); stripe < rows.layout.first_stripe(section + 1); ++stripe)
        body(stripe);
}

} // namespace

void average_gradients(const StepRun &run) {
    const StepRows &rows = *run.rows;
    for (const dsopt_tensor *gradients : {rows.averaged_in_node, rows.averaged}) {
        if (gradients == nullptr) continue;
        const Averager averager(run, gradients, gradients == rows.averaged_in_node);
        const auto average = [&](int section) {
            for_stripes(rows, section, [&](int64_t stripe) { averager.average(stripe, nullptr); });
        };
        // Buckets become complete from the last one to the first, and a step without parts sends the same messages.
        if (!rows.buckets_are_averaged)
            for (int bucket = rows.buckets; bucket-- > 0;) average(bucket);
        for (int section = rows.buckets; section < rows.layout.sections(); ++section) average(section);
    }
}

int64_t packed_bytes(const StepRun &run, int bucket) {
    const Averager averager(run, run.rows->averaged, false);
    int64_t bytes = 0;
    for_stripes(*run.rows, bucket, [&](int64_t stripe) { bytes += averager.packed_bytes(stripe); });
    return bytes;
}

void pack_bucket(const StepRun &run, int bucket, char *to) {
    const Averager averager(run, run.rows->averaged, false);
    for_stripes(*run.rows, bucket, [&](int64_t stripe) {
        averager.pack(stripe, to);
        to += averager.packed_bytes(stripe);
    });
}

void average_bucket(const StepRun &run, int bucket, const char *packed) {
    const Averager averager(run, run.rows->averaged, false);
    for_stripes(*run.rows, bucket, [&](int64_t stripe) {
        averager.average(stripe, packed);
        if (packed != nullptr) packed += averager.packed_bytes(stripe);
    });
}

void reserve_average(const StepRun &run) {
    int64_t message = run.rows->layout.max_row_bytes();
    for (Comm *comm : {run.rows->comms.data, run.rows->comms.node}) {
        if (comm == nullptr) continue;
        comm->reserve({.all_to_all = message, .all_gather = message}, run.plan.execution.stream, Place::backend);
        message *= comm->ranks();
    }
}

} // namespace dsopt
