// SPDX-License-Identifier: Apache-2.0
#include "step/rows.h"
#include "exchange/exchange.h"
#include <algorithm>
#include <utility>
#include <vector>

namespace dsopt {

// A tensor begins at a multiple of 64 elements of the vector, so pieces that begin at cache lines take no more memory
// in a row than in the vector.
static_assert(ListVector::kAlignment % int64_t(kCacheLine) == 0);

RowLayout::RowLayout(std::vector<RowSection> sections, int ranks, int64_t element, int64_t capacity) :
    ranks_(ranks),
    element_(element) {
    sections_.reserve(sections.size());
    for (RowSection &section : sections) add(std::move(section), capacity);
    for (const int64_t stripe : stripes_with_most_pieces()) {
        int64_t pieces = 0;
        for (int row = 0; row < ranks; ++row)
            (void)for_pieces(
                stripe, row, [](size_t) { return 1; }, [&](const Piece &) { ++pieces; });
        max_pieces_ = std::max(max_pieces_, pieces);
    }
}

void RowLayout::add(RowSection section, int64_t capacity) {
    const int chunks = ranks_ / int(section.vectors.size());
    int64_t longest = 0; // chunk, in blocks
    for (const ListVector &vector : section.vectors)
        longest = std::max(longest, VectorPartition{vector.blocks(), chunks}.chunk_blocks());
    const int64_t fitting = capacity / (ranks_ * ListVector::kBlock * element_);
    const int64_t blocks = std::clamp<int64_t>(fitting, 1, std::max<int64_t>(longest, 1));
    max_blocks_ = std::max(max_blocks_, blocks);
    sections_.push_back({std::move(section), stripes(), (longest + blocks - 1) / blocks, blocks});
}

/// Returns the stripes among which one has the most pieces: the first ones, and those in which a tensor begins. The pieces
/// of any other stripe are of tensors that also have a piece in the stripe before. So the time does not depend on the
/// sizes of tensors.
std::vector<int64_t> RowLayout::stripes_with_most_pieces() const {
    std::vector<int64_t> found;
    for (const Section &section : sections_)
        for (const ListVector &vector : section.vectors) {
            const int64_t blocks =
                VectorPartition{vector.blocks(), ranks_ / int(section.vectors.size())}.chunk_blocks();
            if (blocks == 0) continue;
            found.push_back(section.first_stripe);
            for (size_t i = 0; i < vector.tensors(); ++i)
                if (vector.range(i).numel != 0)
                    found.push_back(section.first_stripe +
                                    vector.range(i).begin / ListVector::kBlock % blocks / section.stripe_blocks);
        }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
}

RowComms row_comms(Comm *data, Comm *node, Sharding sharding, bool has_slice_jobs) {
    const DataRank local = data_rank_of(data, node);
    const bool in_node = sharding == Sharding::in_node;
    return {.data = data,
            .node = node,
            .local = local,
            .between_parts = in_node || has_slice_jobs ? nullptr : data,
            .first = in_node ? local.first_of_slice() : local.rank,
            .count = in_node ? local.nodes() : 1};
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
