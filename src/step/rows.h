// SPDX-License-Identifier: Apache-2.0
// Messages with pieces of a list's tensors, for data-parallel ranks that each have a part of the list.
#pragma once
#include "base/dtype.h"
#include "base/sizes.h"
#include "comm/comm.h"
#include "exchange/layout.h"
#include "exchange/vector.h"
#include <algorithm>

namespace dsopt {

/// Consecutive tensors of a list, in one vector; or those of a list that one rank has as a whole, in one vector per
/// owner. Tensors that are in another section have no elements here.
struct RowSection {
    std::vector<ListVector> vectors;
    size_t first; // index in the list of the vectors' first tensor
};

/// Layout of messages. The list is divided into sections, whose vectors have one chunk per rank: a section of one
/// vector per owner has the ranks of each owner in turn. A stripe is the same blocks of every chunk of a section, and a
/// row is the elements of one chunk in a stripe: in the order of the list, each tensor's piece begins at a multiple of
/// kCacheLine bytes. Every row of a stripe has the length of the longest one, and gaps are zeros. Stripes bound the
/// memory for rows, whatever the list.
class RowLayout {
public:
    /// `capacity`: bytes of one row of every rank, unless a stripe of one block needs more. `element`: bytes of the
    /// largest element.
    RowLayout(std::vector<RowSection> sections, int ranks, int64_t element, int64_t capacity);
    int ranks() const { return ranks_; }
    int sections() const { return int(sections_.size()); }
    const RowSection &section(int index) const { return sections_[size_t(index)]; }
    /// Returns the partition of a vector of a section.
    VectorPartition partition(int section, size_t vector = 0) const {
        const Section &of = sections_[size_t(section)];
        return {of.vectors[vector].blocks(), ranks_ / int(of.vectors.size())};
    }
    int64_t stripes() const { return sections_.empty() ? 0 : sections_.back().end(); }
    /// Returns the first stripe of a section; of the section after the last one, the number of stripes.
    int64_t first_stripe(int section) const {
        return section < sections() ? sections_[size_t(section)].first_stripe : stripes();
    }
    /// Returns the bytes of one of StepRows::staging.
    int64_t staging_bytes() const { return ranks() * max_row_bytes(); }
    /// Returns an upper bound of row_bytes().
    int64_t max_row_bytes() const { return max_blocks_ * ListVector::kBlock * element_; }
    /// Returns the largest number of pieces of a stripe, in all rows together.
    int64_t max_pieces() const { return max_pieces_; }

    struct Piece {
        size_t tensor;
        Range range;    // of the tensor
        int64_t offset; // bytes in the row
    };
    /// Calls visit(piece) for each piece of a row. Returns the bytes of the row. size_of(tensor): bytes of an element,
    /// 0 for a tensor that is left out.
    template <class Size, class Visit>
    int64_t for_pieces(int64_t stripe, int row, const Size &size_of, const Visit &visit) const {
        const Section &section = section_at(stripe);
        const int chunks = ranks_ / int(section.vectors.size()); // of the vector
        const ListVector &vector = section.vectors[size_t(row / chunks)];
        const int64_t blocks = VectorPartition{vector.blocks(), chunks}.chunk_blocks(),
                      first = (stripe - section.first_stripe) * section.stripe_blocks,
                      count = std::max<int64_t>(std::min(section.stripe_blocks, blocks - first), 0);
        const Range elements =
            intersection({(row % chunks * blocks + first) * ListVector::kBlock, count * ListVector::kBlock, 0},
                         whole_range(vector.numel()));
        int64_t bytes = 0;
        for (size_t i = vector.tensor_at(elements.begin); i < vector.tensors(); ++i) {
            const Range tensor = vector.range(i);
            if (tensor.begin >= elements.end()) break;
            const Range range = part_of(tensor, elements);
            if (range.numel == 0) continue;
            const int64_t size = size_of(section.first + i);
            if (size == 0) continue;
            visit(Piece{section.first + i, range, bytes});
            bytes += round_up(range.numel * size, int64_t(kCacheLine));
        }
        return bytes;
    }
    /// Returns the length of every row of a stripe.
    template <class Size> int64_t row_bytes(int64_t stripe, const Size &size_of) const {
        int64_t bytes = 0;
        for (int row = 0; row < ranks(); ++row)
            bytes = std::max(bytes, for_pieces(stripe, row, size_of, [](const Piece &) {}));
        return bytes;
    }

private:
    struct Section : RowSection {
        int64_t first_stripe, stripes, stripe_blocks; // stripe_blocks: of a chunk in one stripe
        int64_t end() const { return first_stripe + stripes; }
    };
    const Section &section_at(int64_t stripe) const {
        const auto after = [](int64_t index, const Section &section) { return index < section.end(); };
        return *std::upper_bound(sections_.begin(), sections_.end(), stripe, after);
    }
    void add(RowSection section, int64_t capacity);
    std::vector<int64_t> stripes_with_most_pieces() const;

    const int ranks_;
    const int64_t element_;
    std::vector<Section> sections_;
    int64_t max_blocks_ = 1, max_pieces_ = 0;
};

/// The parts that ranks keep of sharded state.
enum class Sharding : uint8_t {
    none,   // every rank has everything
    ranks,  // one part per rank: DSOPT_OPTIMIZER_SHARD
    in_node // one part per rank of a node: DSOPT_OPTIMIZER_SHARD_NODE
};

/// The comms of a step's rows, and this rank's place in them.
struct RowComms {
    Comm *data, *node; // of all data-parallel ranks; NULL: there is no such level
    DataRank local;
    Comm *between_parts; // in addition to `node`, the comm over which parts are spread; NULL: each node has all parts
    int first, count;    // rows with this rank's part
    /// Returns the comm that gradients are sent over first.
    Comm &first_level() const { return node != nullptr ? *node : *data; }
};
/// `has_slice_jobs`: the step has StepPlan::slice_jobs, and a rank's part is its slice of the node.
RowComms row_comms(Comm *data, Comm *node, Sharding sharding, bool has_slice_jobs);

/// Messages of a step in rows, and their memory.
struct StepRows {
    const RowLayout &layout;
    Sharding sharding;
    RowComms comms;
    /// This rank's gradients that the step averages over all ranks, whole; one entry per tensor, with numel 0 for other
    /// tensors, and without data for zeros. NULL if there are none.
    const dsopt_tensor *averaged;
    /// The same for gradients that the step averages inside the node. `all_of_node`: every rank of the node gets all
    /// means; otherwise those of its slice, which are the gradients of StepPlan::slice_jobs or of sharded jobs.
    const dsopt_tensor *averaged_in_node;
    bool all_of_node;
    const dsopt_tensor *weights; // the whole parameters of sharded state, or NULL
    int buckets;                 // the first sections of the layout
    bool buckets_are_averaged;   // before the step, which averages the rest
    dsopt_tensor *lists;         // 2 * RowLayout::max_pieces() tensors
    char *staging[2];            // two times a row of every rank: what a collective sends and what it receives
};

/// Returns a range of a tensor.
inline dsopt_tensor piece_of(const dsopt_tensor &tensor, const Range &range) {
    const int64_t offset = range.begin * int64_t(dtype_size(tensor.dtype));
    return {static_cast<char *>(tensor.data) + offset, range.numel, tensor.dtype, 0};
}

/// Pieces of tensors, and their places in rows or sources of their sums: two lists for one operation of a device.
class PieceList {
public:
    explicit PieceList(const StepRows &rows) : tensors_(rows.lists), others_(rows.lists + rows.layout.max_pieces()) {}
    /// Adds a piece, and the same number of elements at `other`.
    void add(const dsopt_tensor &piece, char *other, int32_t dtype) {
        tensors_[count_] = piece;
        others_[count_++] = {other, piece.numel, dtype, 0};
    }
    void add(const dsopt_tensor &piece, char *other) { add(piece, other, piece.dtype); }
    void clear() { count_ = 0; }
    const dsopt_tensor *tensors() const { return tensors_; }
    const dsopt_tensor *others() const { return others_; }
    int64_t count() const { return count_; }

private:
    dsopt_tensor *tensors_, *others_;
    int64_t count_ = 0;
};

/// Gathers a message of every rank, at staging[0], over `data` and then over `node`; NULL = one rank. Returns the
/// messages, in the order of rows.
char *gather_rows(const StepRows &rows, Comm *data, Comm *node, int64_t bytes, void *stream);

} // namespace dsopt
