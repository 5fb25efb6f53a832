// SPDX-License-Identifier: Apache-2.0
#include "optimizer/param.h"
#include "base/text.h"
#include "optimizer/group.h"
#include "optimizer/matrices.h"
#include "rules/rounding.h"
#include <cstring>

namespace dsopt {
namespace {

std::string param_name(const dsopt_param &param, int64_t index) {
    if (param.name == nullptr) return "p" + std::to_string(index);
    const size_t length = strnlen(param.name, 1001);
    if (length == 0 || length > 1000)
        throw Error(DSOPT_ERR_ARGUMENT, "name of parameter %lld has %s bytes, must be 1 to 1000", ll(index),
                    length == 0 ? "0" : "more than 1000");
    if (!is_text({param.name, length}))
        throw Error(DSOPT_ERR_ARGUMENT, "name of parameter %lld is not UTF-8", ll(index));
    return param.name;
}

std::vector<int64_t> param_dims(const dsopt_param &param, const char *name) {
    if (param.ndim < 0 || param.ndim > 8 || (param.ndim > 0 && param.dims == nullptr))
        throw Error(DSOPT_ERR_ARGUMENT, "parameter '%s' has ndim %d%s, must be 0 to 8 with dims", name, param.ndim,
                    param.dims == nullptr ? " and no dims" : "");
    if (param.ndim == 0) return {param.tensor.numel};
    std::vector<int64_t> dims(param.dims, param.dims + param.ndim);
    int64_t product = 1;
    for (const int64_t dim : dims)
        if (dim < 0 || __builtin_mul_overflow(product, dim, &product))
            throw Error(DSOPT_ERR_ARGUMENT, "parameter '%s' has dimension %lld", name, ll(dim));
    if (product != param.tensor.numel)
        throw Error(DSOPT_ERR_ARGUMENT, "dims of parameter '%s' multiply to %lld, its numel is %lld", name, ll(product),
                    ll(param.tensor.numel));
    return dims;
}

/// Sets the formats of the moments.
void set_formats(const dsopt_param &given, const dsopt_group &rules, Param &param) {
    const char *const name = param.name.c_str();
    const bool f32 = given.flags & DSOPT_PARAM_F32_MOMENTS;
    const MomentList &moments = moments_of(rules);
    bool scales = false;
    for (int k = 0; k < kMoments; ++k) {
        param.formats[k] = k < moments.count && !f32 ? format_of(moments.info[k], rules) : Format::f32;
        scales = scales || has_scales(param.formats[k]);
    }
    if (scales) param.scale_dims = {blocks_of(param.numel)};
    if (scales && given.offset % kBlock != 0)
        throw Error(DSOPT_ERR_ARGUMENT,
                    "parameter '%s' has offset %lld, no multiple of %lld: its moments have a scale per %lld elements",
                    name, ll(given.offset), ll(kBlock), ll(kBlock));
}

/// True if a moment is rounded at random, or has scales.
bool formats_use_offset(const Param &param) {
    for (const Format format : param.formats)
        if (format == Format::bf16_random || has_scales(format)) return true;
    return false;
}

Facts param_facts(const dsopt_param &given, const Param &param) {
    const auto flag = [&](int32_t bit) { return (given.flags & bit) != 0; };
    return Facts()
        .add(facts::masked, flag(DSOPT_PARAM_MASKED))
        .add(facts::f32_moments, flag(DSOPT_PARAM_F32_MOMENTS))
        .add(facts::offset, given.offset != 0)
        .add(facts::offset_is_used, given.offset >= 0 && formats_use_offset(param)) // no call uses one below 0
        .add(facts::f16, param.dtype == DSOPT_DTYPE_F16)
        .add(facts::no_f32_weight, param.dtype != DSOPT_DTYPE_F32 && !param.has_master)
        .add(facts::rows_cols, given.rows != 0 || given.cols != 0)
        .add(facts::rows_are_inputs, flag(DSOPT_PARAM_ROWS_ARE_INPUTS))
        .add(facts::model_parallel, flag(DSOPT_PARAM_MODEL_PARALLEL));
}

} // namespace

Param make_param(const dsopt_param &given, int64_t index, int32_t group, const dsopt_group &rules,
                 const dsopt_optimizer_desc &desc) {
    Param param{};
    param.name = param_name(given, index);
    const char *const name = param.name.c_str();
    check_float_tensor(given.tensor, param.label());
    constexpr int32_t known = DSOPT_PARAM_MODEL_PARALLEL | DSOPT_PARAM_REPLICATED | DSOPT_PARAM_MASKED |
                              DSOPT_PARAM_F32_MOMENTS | DSOPT_PARAM_ROWS_ARE_INPUTS;
    if (given.flags & ~known)
        throw Error(DSOPT_ERR_ARGUMENT, "parameter '%s' has unknown flags 0x%x", name, given.flags);
    if (given.expert < 0 || given.expert > desc.expert_count)
        throw Error(DSOPT_ERR_ARGUMENT, "parameter '%s' has expert comm %d of %d", name, given.expert,
                    desc.expert_count);
    param.numel = given.tensor.numel;
    param.dtype = given.tensor.dtype;
    param.has_master = param.dtype != DSOPT_DTYPE_F32 && !(desc.flags & DSOPT_OPTIMIZER_NO_MASTER);
    param.has_remainder = param.has_master && desc.masters == DSOPT_MASTERS_REMAINDER;
    set_formats(given, rules, param);
    Facts all = facts_of(desc) | facts_of(rules) | param_facts(given, param);
    all.add(facts::offset_is_used, given.offset >= 0 && all.has(facts::stochastic_rounding));
    check_options<At::param>(all, {.name = name, .algorithm = info_of(rules.algorithm).name, .number = given.offset});
    if (given.offset > INT64_MAX - given.tensor.numel)
        throw Error(DSOPT_ERR_SHAPE, "parameter '%s' has offset %lld and %lld elements: its tensor has 2^63 at most",
                    name, ll(given.offset), ll(given.tensor.numel));
    param.random_key = desc.seed;
    for (const char c : param.name) param.random_key = mix64(param.random_key ^ uint8_t(c)) + 1;
    param.begin = given.offset;
    param.whole = param.end();
    param.dims = param_dims(given, name);
    param.matrix = matrix_shape_of(given, param, rules);
    param.data = given.tensor.data;
    param.group = group;
    param.flags = given.flags;
    param.expert = given.expert;
    return param;
}

void check_param(const dsopt_tensor &given, const Param &param) {
    check_like(given, param.dtype, param.numel, param.label());
}

} // namespace dsopt
