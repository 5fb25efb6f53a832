// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/tensor_list.h"
#include "device/matrix_plan.h"
#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

namespace dsopt {

/// A registered parameter: a range of the tensor with its name. Random numbers are a function of indices in that
/// tensor. dsopt_param does not have the tensor's size, so `whole` is the smallest possible size.
struct Param : Range {
    std::string name;
    std::vector<int64_t> dims;
    void *data;
    int32_t dtype;
    int32_t group;
    int64_t first_leaf;
    uint64_t random_key; // of stochastic rounding: a hash of name and seed
    int32_t flags;       // DSOPT_PARAM_...
    int32_t expert;
    int32_t trust_slot;              // as in TensorJob
    bool has_master;                 // or a remainder
    bool has_remainder;              // DSOPT_MASTERS_REMAINDER
    Format formats[kMoments];        // of its moments; in compat mode they may have the parameter's dtype
    std::vector<int64_t> part_dims;  // sharded state: the only dimension of its state tensors; else empty
    std::vector<int64_t> scale_dims; // the only dimension of its scales; empty: no moment has scales
    MatrixShape matrix;              // of rules with Passes::matrix; rows 0: none
    bool accumulated;                // gradients were accumulated since the last step

    /// True if there is a master that starts as a copy of the parameter.
    bool starts_master() const { return has_master && !has_remainder; }
    /// As in TensorJob.
    bool stored() const {
        const auto is_low = [](Format format) { return format != Format::f32; };
        return has_remainder || std::any_of(std::begin(formats), std::end(formats), is_low);
    }
    TensorLeaves leaves() const { return {first_leaf, numel}; }
    dsopt_tensor tensor() const { return {data, numel, dtype, 0}; }
    Label label() const { return {"parameter", name.c_str()}; }
};

/// Checks one parameter on its own and returns it. `rules`: its group. The caller sets `first_leaf` and `trust_slot`,
/// which depend on other parameters.
Param make_param(const dsopt_param &given, int64_t index, int32_t group, const dsopt_group &rules,
                 const dsopt_optimizer_desc &desc);
/// Throws unless `given` is a float tensor with as many elements as `param`, such as a gradient. `role` as in Label.
inline void check_same_numel(const dsopt_tensor &given, const Param &param, const char *role) {
    const Label label{role, param.name.c_str()};
    check_float_tensor(given, label);
    check_numel(given, param.numel, label);
}
/// Throws unless `given` can replace the registered tensor.
void check_param(const dsopt_tensor &given, const Param &param);

} // namespace dsopt
