// SPDX-License-Identifier: Apache-2.0
#include "step/rows.h"
#include <utility>

namespace dsopt {

// A tensor begins at a multiple of 64 elements of the vector, so pieces that begin at cache lines take no more memory
// in a row than in the vector.
static_assert(ListVector::kAlignment % int64_t(kCacheLine) == 0);

RowLayout::RowLayout(ListVector vector, std::vector<ListVector> dealt, int ranks, int64_t element, int64_t capacity) :
    vector_(std::move(vector)),
    dealt_(std::move(dealt)),
    partition_{vector_.blocks(), ranks},
    element_(element) {
    stripes_ = stripes_of(partition_.chunk_blocks(), capacity);
    int64_t longest = 0;
    for (const ListVector &owned : dealt_)
        longest = std::max(longest, VectorPartition{owned.blocks(), ranks / int(dealt_.size())}.chunk_blocks());
    dealt_stripes_ = stripes_of(longest, capacity);
    for (int64_t stripe = 0; stripe < stripes(); ++stripe) {
        int64_t pieces = 0;
        for (int row = 0; row < ranks; ++row)
            (void)for_pieces(
                stripe, row, [](size_t) { return 1; }, [&](const Piece &) { ++pieces; });
        max_pieces_ = std::max(max_pieces_, pieces);
    }
}

RowLayout::Stripes RowLayout::stripes_of(int64_t chunk_blocks, int64_t capacity) const {
    const int64_t fitting = capacity / (ranks() * ListVector::kBlock * element_);
    const int64_t blocks = std::clamp<int64_t>(fitting, 1, std::max<int64_t>(chunk_blocks, 1));
    return {blocks, (chunk_blocks + blocks - 1) / blocks};
}

char *gather_rows(const StepRows &rows, Comm *data, Comm *node, int64_t bytes, void *stream) {
    int at = 0;
    for (Comm *comm : {data, node}) {
        if (comm == nullptr) continue;
        comm->all_gather(rows.staging[at], rows.staging[1 - at], bytes, stream, Place::backend);
        bytes *= comm->ranks();
        at = 1 - at;
    }
    return rows.staging[at];
}

} // namespace dsopt
