// SPDX-License-Identifier: Apache-2.0
// Messages with pieces of a list's tensors, for data-parallel ranks that each have a part of the list.
#pragma once
#include "base/sizes.h"
#include "exchange/vector.h"
#include <algorithm>

namespace dsopt {

/// Layout of messages. The list is a ListVector with one chunk per rank. A stripe is the same blocks of every chunk, and
/// a row is the elements of one chunk in a stripe: in the order of the list, each tensor's piece begins at a multiple of
/// kCacheLine bytes. Every row of a stripe has the length of the longest one, and gaps are zeros. Stripes bound the
/// memory for rows, whatever the list.
class RowLayout {
public:
    /// `capacity`: bytes of one row of every rank, unless a stripe of one block needs more. `element`: bytes of the
    /// largest element.
    RowLayout(ListVector vector, int ranks, int64_t element, int64_t capacity);
    int ranks() const { return partition_.ranks; }
    int64_t stripes() const { return stripes_; }
    /// Returns an upper bound of row_bytes().
    int64_t max_row_bytes() const { return stripe_blocks_ * ListVector::kBlock * element_; }
    /// Returns the largest number of pieces of a stripe, in all rows together.
    int64_t max_pieces() const { return max_pieces_; }
    const ListVector &vector() const { return vector_; }
    const VectorPartition &partition() const { return partition_; }

    struct Piece {
        size_t tensor;
        Range range;    // of the tensor
        int64_t offset; // bytes in the row
    };
    /// Calls visit(piece) for each piece of a row. Returns the bytes of the row. size_of(tensor): bytes of an element,
    /// 0 for a tensor that is left out.
    template <class Size, class Visit>
    int64_t for_pieces(int64_t stripe, int row, const Size &size_of, const Visit &visit) const {
        const int64_t blocks = partition_.chunk_blocks(), first = stripe * stripe_blocks_;
        const int64_t count = std::min(stripe_blocks_, blocks - first);
        const Range elements = intersection(
            {(row * blocks + first) * ListVector::kBlock, count * ListVector::kBlock, 0}, whole_range(vector_.numel()));
        int64_t bytes = 0;
        for (size_t i = vector_.tensor_at(elements.begin); i < vector_.tensors(); ++i) {
            const Range tensor = vector_.range(i);
            if (tensor.begin >= elements.end()) break;
            const Range range = part_of(tensor, elements);
            const int64_t size = size_of(i);
            if (range.numel == 0 || size == 0) continue;
            visit(Piece{i, range, bytes});
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
    ListVector vector_;
    VectorPartition partition_;
    int64_t element_, stripe_blocks_, stripes_, max_pieces_ = 0;
};

} // namespace dsopt
