// SPDX-License-Identifier: Apache-2.0
// The order of additions in a norm, written down a second time: lane l of 32 adds values l, l + 32, ... one after the
// other, then the upper half of the lanes is added to the lower half, five times. The values are the squares of a leaf's
// 4,096 elements, then a tensor's leaves, then a list's tensors.
#pragma once
#include <cstddef>
#include <vector>

namespace lanes {

inline double add(const std::vector<double> &values) {
    volatile double lane[32] = {}; // each addition is rounded by itself
    for (size_t i = 0; i < values.size(); ++i) lane[i % 32] = lane[i % 32] + values[i];
    for (int width = 16; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] = lane[i] + lane[i + width];
    return lane[0];
}

/// `tensor`: anything with size() and an operator[] that gives floats.
template <class Tensor> double squares(const Tensor &tensor) {
    std::vector<double> leaves, leaf;
    for (size_t i = 0; i < tensor.size(); ++i) {
        leaf.push_back(double(tensor[i]) * double(tensor[i])); // exact
        if (leaf.size() < 4096 && i + 1 < tensor.size()) continue;
        leaves.push_back(add(leaf));
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
