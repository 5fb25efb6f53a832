// SPDX-License-Identifier: Apache-2.0
// Layouts of tensor lists in exchanges. A layout is computed once, when the sizes are known.
#pragma once
#include "device/compress.h"
#include <vector>

namespace dsopt {

/// The index of a data-parallel rank, the number of ranks, and the number of ranks per node. With two levels ranks are
/// ordered by the chunks that they average, so the ranks with the same slice are contiguous.
struct DataRank {
    int rank, ranks, node_ranks;
    int nodes() const { return ranks / node_ranks; }
    /// Returns the first rank with the same slice.
    int first_of_slice() const { return rank / nodes() * nodes(); }
};

/// Returns the layout of tensors of these sizes on a rank. `compat`: as in the original, each tensor is a separate
/// vector, padded to a multiple of ranks * lcm(ranks, 8) with elements that enter the scale like all others. Otherwise
/// the whole list is a ListVector with one chunk per rank and one scale per tensor; elements between tensors are ignored.
/// With two levels each rank of a node has a slice of that vector. `exchanged`: the tensors that are compressed, the
/// others only take their place in the vector; empty = all, which compat mode needs.
OwnedLayout layout_for(const DataRank &local, bool compat, const std::vector<int64_t> &numels,
                       const std::vector<bool> &exchanged = {});

} // namespace dsopt
