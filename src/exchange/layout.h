// SPDX-License-Identifier: Apache-2.0
// How the tensors of a list are laid out for exchanges. Layouts are made once, when the sizes are known.
#pragma once
#include "device/compress.h"
#include <vector>

namespace dsopt {

/// A rank among the data-parallel ones, which come in nodes. Two levels: in the order of the chunks that they serve, so
/// those that share a slice follow one another.
struct DataRank {
    int rank, ranks, node_ranks;
};

/// How such a rank exchanges tensors of these sizes. `compat`: as the original does, every tensor is a vector of its
/// own, padded to a multiple of ranks * lcm(ranks, 8) with elements that count like any other. Otherwise the whole list
/// is one vector, with one scale a tensor: tensors begin at multiples of 32 elements, and what is between them takes no
/// part. With two levels each rank of a node has a slice of that vector.
OwnedLayout layout_for(const DataRank &own, bool compat, const std::vector<int64_t> &numels);

} // namespace dsopt
