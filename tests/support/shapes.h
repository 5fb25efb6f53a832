// SPDX-License-Identifier: Apache-2.0
// Lists with edges that an exchange must handle: words of bits, leaves, chunks that begin inside a tensor.
#pragma once
#include <cstdint>
#include <vector>

namespace test {

struct Sizes {
    const char *name;
    std::vector<int64_t> sizes;
};
inline std::vector<Sizes> edge_sizes() {
    Sizes many{"Many", {}};
    for (int64_t i = 0; i < 300; ++i) many.sizes.push_back(1 + i * 7 % 40);
    return {{"None", {}},
            {"Empty", {0, 0}},
            {"One", {1}},
            {"Edges", {0, 1, 31, 32, 33, 0, 4095, 4096, 4097, 0}},
            {"Spanning", {5, 20000, 3, 64, 0, 9001}},
            many,
            {"Below", {31}},
            {"Word", {32}},
            {"Above", {33}}};
}

} // namespace test
