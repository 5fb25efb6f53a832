// SPDX-License-Identifier: Apache-2.0
#include "step/rows.h"
#include <utility>

namespace dsopt {

// A tensor begins at a multiple of 64 elements of the vector, so pieces that begin at cache lines take no more memory
// in a row than in the vector.
static_assert(ListVector::kAlignment % int64_t(kCacheLine) == 0);

RowLayout::RowLayout(ListVector vector, int ranks, int64_t element, int64_t capacity) :
    vector_(std::move(vector)),
    partition_{vector_.blocks(), ranks},
    element_(element) {
    const int64_t chunk = partition_.chunk_blocks(), fitting = capacity / (ranks * ListVector::kBlock * element);
    stripe_blocks_ = std::clamp<int64_t>(fitting, 1, std::max<int64_t>(chunk, 1));
    stripes_ = (chunk + stripe_blocks_ - 1) / stripe_blocks_;
    for (int64_t stripe = 0; stripe < stripes_; ++stripe) {
        int64_t pieces = 0;
        for (int row = 0; row < ranks; ++row)
            (void)for_pieces(
                stripe, row, [](size_t) { return 1; }, [&](const Piece &) { ++pieces; });
        max_pieces_ = std::max(max_pieces_, pieces);
    }
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
