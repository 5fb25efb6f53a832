// SPDX-License-Identifier: Apache-2.0
// An independent implementation of the order of additions in a norm. In a leaf of 4,096 elements, lane l of 128 adds
// the squares of values l, l + 128, ... sequentially. Then lanes 4t to 4t + 3 are added as (a + b) + (c + d), and the
// upper half of these 32 sums is added to the lower half, five times. The leaves of a tensor, and the tensors of a
// list, are added by 32 lanes, then by halves as above.
#pragma once
#include <cstddef>
#include <vector>

namespace lanes {

inline double add(const std::vector<double> &values) {
    volatile double lane[32] = {}; // volatile: each addition is rounded separately
    for (size_t i = 0; i < values.size(); ++i) lane[i % 32] = lane[i % 32] + values[i];
    for (int width = 16; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] = lane[i] + lane[i + width];
    return lane[0];
}
inline double add_leaf(const std::vector<double> &squares) {
    volatile double lane[128] = {};
    for (size_t i = 0; i < squares.size(); ++i) lane[i % 128] = lane[i % 128] + squares[i];
    std::vector<double> sums;
    for (size_t t = 0; t < 32; ++t) {
        volatile const double left = lane[4 * t] + lane[4 * t + 1], right = lane[4 * t + 2] + lane[4 * t + 3];
        sums.push_back(left + right);
    }
    return add(sums); // for 32 values only the additions by halves remain
}

/// Returns the sum of squares. `tensor` may be any type with size() and an operator[] that returns floats.
template <class Tensor> double squares(const Tensor &tensor) {
    std::vector<double> leaves, leaf;
    for (size_t i = 0; i < tensor.size(); ++i) {
        leaf.push_back(double(tensor[i]) * double(tensor[i])); // exact
        if (leaf.size() < 4096 && i + 1 < tensor.size()) continue;
        leaves.push_back(add_leaf(leaf));
        leaf.clear();
    }
    return add(leaves);
}

template <class Tensor> double squares_of_list(const std::vector<Tensor> &list) {
    std::vector<double> tensors;
    for (const Tensor &tensor : list) tensors.push_back(squares(tensor));
    return add(tensors);
}

} // namespace lanes
