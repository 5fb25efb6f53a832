// SPDX-License-Identifier: Apache-2.0
// Where the tensors of a list lie in its vector, and the vector's partition among ranks. Computed element by element,
// independently of src/exchange/vector.cc.
#pragma once
#include <cstdint>
#include <vector>

namespace test {

constexpr int64_t kVectorBlock = 4096;

/// Tensors begin at multiples of 64 elements. One that would cross the end of a block of 4,096 begins at the next block.
struct ListVector {
    std::vector<int64_t> begin;
    int64_t blocks = 0;
    template <class Size> explicit ListVector(const std::vector<Size> &sizes) {
        int64_t end = 0;
        for (const Size size : sizes) {
            const auto n = int64_t(size);
            int64_t at = end;
            if (n != 0)
                while (at % 64 != 0 || (at % kVectorBlock != 0 && at % kVectorBlock + n > kVectorBlock)) ++at;
            begin.push_back(at);
            end = at + n;
        }
        while (blocks * kVectorBlock < end) ++blocks;
    }
    /// Returns the elements of one chunk: all have the same number of blocks.
    int64_t chunk(int64_t ranks) const { return (blocks + ranks - 1) / ranks * kVectorBlock; }
};

} // namespace test
