// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace dsopt {

/// A parameter as registered.
struct Param {
    std::string name;
    std::vector<int64_t> dims;
    void *data;
    int64_t numel;
    int32_t dtype;
    int32_t group;
    int64_t first_leaf;
    int64_t offset;
    uint64_t random_key; // of stochastic rounding: name and seed
    int32_t flags;       // DSOPT_PARAM_...
    int32_t expert;
    bool has_master;
    bool accumulated; // its accumulator got something since the last step
};

} // namespace dsopt
