// SPDX-License-Identifier: Apache-2.0
// The vector that the tensors of a list form, and its partition among data-parallel ranks, for exchanges, sharded state
// and checkpoints. Both follow from the sizes alone.
#pragma once
#include "base/range.h"
#include <cstddef>
#include <vector>

namespace dsopt {

/// Tensors in the order of the list. Sums over tensors are formed of leaves of kLeaf elements, so no leaf crosses a
/// block: a tensor that does not fit into the rest of a block begins at the next one. All tensors begin at multiples of
/// kAlignment, so whole cache lines and whole words of bits belong to one tensor.
class ListVector {
public:
    static constexpr int64_t kBlock = 4096, kAlignment = 64; // elements
    explicit ListVector(const std::vector<int64_t> &numels);
    /// Returns the range of a tensor in the vector. An empty tensor takes no place.
    Range range(size_t tensor) const { return {begins_[tensor], numels_[tensor], numel()}; }
    size_t tensors() const { return begins_.size(); }
    /// Returns the tensor that contains an element of the vector, or the next one.
    size_t tensor_at(int64_t element) const;
    int64_t blocks() const { return blocks_; }
    int64_t numel() const { return blocks_ * kBlock; }

private:
    std::vector<int64_t> begins_, numels_;
    int64_t blocks_ = 0;
};

/// Partition of a vector of `blocks` blocks into one chunk per rank: the same number of blocks each, except for the last
/// ones, which may be shorter or empty.
struct VectorPartition {
    int64_t blocks;
    int ranks;

    int64_t chunk_blocks() const { return (blocks + ranks - 1) / ranks; }
    int64_t chunk_numel() const { return chunk_blocks() * ListVector::kBlock; }
    /// Returns `count` consecutive chunks.
    Range chunks(int64_t first, int64_t count = 1) const {
        const int64_t numel = blocks * ListVector::kBlock;
        return intersection({first * chunk_numel(), count * chunk_numel(), numel}, whole_range(numel));
    }
};

/// Returns the elements of a tensor that are in `chunk`, as a range of the tensor. The bounds are multiples of
/// ListVector::kBlock or the tensor's end. An empty part begins at 0.
Range part_of(const Range &tensor, const Range &chunk);

} // namespace dsopt
