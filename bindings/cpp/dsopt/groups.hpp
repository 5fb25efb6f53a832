/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSOPT_GROUPS_HPP
#define DSOPT_GROUPS_HPP
/**
 * Groups: a struct per algorithm with its hyper-parameters and their defaults; dsopt.h has the formulas. Each converts
 * to dsopt_group, the argument of optimizer::add_group. Programs include dsopt.hpp.
 */
#include "types.hpp"
#include <string>
#include <vector>

namespace dsopt {

namespace detail {
inline dsopt_group group_of(std::int32_t algorithm) {
    dsopt_group group;
    check(dsopt_group_init(&group, sizeof group, algorithm));
    return group;
}
/// Sets the fields that every algorithm has.
template <class Options> dsopt_group group_of(std::int32_t algorithm, const Options &from) {
    dsopt_group group = group_of(algorithm);
    group.lr = from.lr;
    group.weight_decay = from.weight_decay;
    group.max_norm = from.max_norm;
    return group;
}
/// Sets the fields of algorithms with two moments too: Adam, LAMB and the 1-bit family.
template <class Options> dsopt_group adaptive_group_of(std::int32_t algorithm, const Options &from) {
    dsopt_group group = group_of(algorithm, from);
    group.beta1 = from.beta1;
    group.beta2 = from.beta2;
    group.eps = from.eps;
    return group;
}
template <class Options> void set_trust(dsopt_group &group, const Options &from) noexcept {
    group.min_trust = from.min_trust;
    group.max_trust = from.max_trust;
}
inline void set_exp_avg_format(dsopt_group &group, moment format) noexcept {
    group.exp_avg_format = static_cast<std::int32_t>(format);
}
inline void set_exp_avg_sq_format(dsopt_group &group, moment format) noexcept {
    group.exp_avg_sq_format = static_cast<std::int32_t>(format);
}
/// Sets the formats of algorithms with two moments.
template <class Options> void set_formats(dsopt_group &group, const Options &from) noexcept {
    set_exp_avg_format(group, from.exp_avg_format);
    set_exp_avg_sq_format(group, from.exp_avg_sq_format);
}
inline void set_bias_correction(dsopt_group &group, bool on) noexcept {
    if (!on) group.flags |= DSOPT_GROUP_NO_BIAS_CORRECTION;
}
inline void set_flag(dsopt_group &group, std::int32_t flag, bool on) noexcept {
    if (on) group.flags |= flag;
}
} // namespace detail

struct adam {
    double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, max_norm = 0;
    bool bias_correction = true;
    /// eps next to the root of the uncorrected variance, as in Keras.
    bool eps_uncorrected = false;
    moment exp_avg_format = moment::f32, exp_avg_sq_format = moment::f32;
    operator dsopt_group() const {
        dsopt_group group = detail::adaptive_group_of(DSOPT_ALGORITHM_ADAM, *this);
        detail::set_bias_correction(group, bias_correction);
        detail::set_flag(group, DSOPT_GROUP_EPS_UNCORRECTED, eps_uncorrected);
        detail::set_formats(group, *this);
        return group;
    }
};

struct adamw {
    double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01, max_norm = 0;
    bool bias_correction = true;
    /// eps next to the root of the uncorrected variance, as in Keras.
    bool eps_uncorrected = false;
    moment exp_avg_format = moment::f32, exp_avg_sq_format = moment::f32;
    operator dsopt_group() const {
        dsopt_group group = detail::adaptive_group_of(DSOPT_ALGORITHM_ADAMW, *this);
        detail::set_bias_correction(group, bias_correction);
        detail::set_flag(group, DSOPT_GROUP_EPS_UNCORRECTED, eps_uncorrected);
        detail::set_formats(group, *this);
        return group;
    }
};

struct adam_legacy {
    double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, max_norm = 0;
    bool bias_correction = true, eps_inside_sqrt = false;
    moment exp_avg_format = moment::f32, exp_avg_sq_format = moment::f32;
    operator dsopt_group() const {
        dsopt_group group = detail::adaptive_group_of(DSOPT_ALGORITHM_ADAM_LEGACY, *this);
        detail::set_bias_correction(group, bias_correction);
        detail::set_flag(group, DSOPT_GROUP_EPS_INSIDE_SQRT, eps_inside_sqrt);
        detail::set_formats(group, *this);
        return group;
    }
};

struct lamb {
    double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, max_norm = 0;
    double min_trust = 0.01, max_trust = 10;
    bool bias_correction = true, eps_inside_sqrt = false;
    moment exp_avg_format = moment::f32, exp_avg_sq_format = moment::f32;
    operator dsopt_group() const {
        dsopt_group group = detail::adaptive_group_of(DSOPT_ALGORITHM_LAMB, *this);
        detail::set_trust(group, *this);
        detail::set_bias_correction(group, bias_correction);
        detail::set_flag(group, DSOPT_GROUP_EPS_INSIDE_SQRT, eps_inside_sqrt);
        detail::set_formats(group, *this);
        return group;
    }
};

struct sgd {
    double lr = 1e-3, weight_decay = 0, max_norm = 0;
    /// 0 = none, and no state. Cannot change between 0 and another value later.
    double momentum = 0;
    /// Needs momentum.
    double dampening = 0;
    /// Needs momentum, and no dampening.
    bool nesterov = false;
    /// Of momentum_buffer. Needs momentum.
    moment exp_avg_format = moment::f32;
    operator dsopt_group() const {
        dsopt_group group = detail::group_of(DSOPT_ALGORITHM_SGD, *this);
        group.momentum = momentum;
        group.dampening = dampening;
        detail::set_flag(group, DSOPT_GROUP_NESTEROV, nesterov);
        detail::set_exp_avg_format(group, exp_avg_format);
        return group;
    }
};

struct adagrad {
    double lr = 1e-2, eps = 1e-10, weight_decay = 0, max_norm = 0;
    double lr_decay = 0;
    /// Initial sum of squares.
    double initial_accumulator_value = 0;
    /// As in optax.
    bool eps_inside_sqrt = false;
    /// Of sum.
    moment exp_avg_sq_format = moment::f32;
    operator dsopt_group() const {
        dsopt_group group = detail::group_of(DSOPT_ALGORITHM_ADAGRAD, *this);
        group.eps = eps;
        group.lr_decay = lr_decay;
        group.initial_accumulator_value = initial_accumulator_value;
        detail::set_flag(group, DSOPT_GROUP_EPS_INSIDE_SQRT, eps_inside_sqrt);
        detail::set_exp_avg_sq_format(group, exp_avg_sq_format);
        return group;
    }
};

struct lion {
    double lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0, max_norm = 0;
    moment exp_avg_format = moment::f32;
    operator dsopt_group() const {
        dsopt_group group = detail::group_of(DSOPT_ALGORITHM_LION, *this);
        group.beta1 = beta1;
        group.beta2 = beta2;
        detail::set_exp_avg_format(group, exp_avg_format);
        return group;
    }
};

/// Coefficients of a Newton-Schulz iteration: X = a X + (b A + c A A) X with A = X X^T.
struct ns_triple {
    double a = 0, b = 0, c = 0;
};

/// For matrices; parameters of another shape need param::rows and cols, or a group of another algorithm.
struct muon {
    double lr = 1e-3, momentum = 0.95, weight_decay = 0.1, eps = 1e-7, max_norm = 0;
    bool nesterov = true;
    /// Optax's mixture; needs nesterov.
    bool bias_correction = false;
    std::int32_t ns_steps = 5;
    dsopt::ns_schedule ns_schedule = dsopt::ns_schedule::constant;
    /// All 0 = the schedule's: 3.4445, -4.775, 2.0315, or those of the preset, which has no other.
    ns_triple ns_coefficients = {};
    /// Inputs of products: bf16, f16 or f32.
    dtype ns_dtype = dtype::bf16;
    dsopt::adjust adjust = dsopt::adjust::original;
    /// Of momentum_buffer: f32, bf16 or bf16_random.
    moment exp_avg_format = moment::f32;
    operator dsopt_group() const {
        dsopt_group group = detail::group_of(DSOPT_ALGORITHM_MUON, *this);
        group.momentum = momentum;
        group.eps = eps;
        group.flags = 0; // the defaults set both
        detail::set_flag(group, DSOPT_GROUP_NESTEROV, nesterov);
        detail::set_bias_correction(group, bias_correction);
        group.ns_steps = ns_steps;
        group.ns_schedule = static_cast<std::int32_t>(ns_schedule);
        const bool given = ns_coefficients.a != 0 || ns_coefficients.b != 0 || ns_coefficients.c != 0;
        if (given || ns_schedule != dsopt::ns_schedule::constant) {
            group.ns_a = ns_coefficients.a;
            group.ns_b = ns_coefficients.b;
            group.ns_c = ns_coefficients.c;
        }
        group.ns_dtype = static_cast<std::int32_t>(ns_dtype);
        group.adjust = static_cast<std::int32_t>(adjust);
        detail::set_exp_avg_format(group, exp_avg_format);
        return group;
    }
};

struct onebit_adam {
    double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, max_norm = 0;
    std::int64_t freeze_step = 100000;
    /// The group is never compressed and its variance never frozen.
    bool non_freeze = false;
    operator dsopt_group() const {
        dsopt_group group = detail::adaptive_group_of(DSOPT_ALGORITHM_ONEBIT_ADAM, *this);
        group.freeze_step = freeze_step;
        detail::set_flag(group, DSOPT_GROUP_NON_FREEZE, non_freeze);
        return group;
    }
};

struct zero_one_adam {
    double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, max_norm = 0;
    std::int64_t freeze_step = 100000, var_interval_steps = 16, local_interval_steps = 32678, max_local_interval = 16;
    operator dsopt_group() const {
        dsopt_group group = detail::adaptive_group_of(DSOPT_ALGORITHM_ZERO_ONE_ADAM, *this);
        group.freeze_step = freeze_step;
        group.var_interval_steps = var_interval_steps;
        group.local_interval_steps = local_interval_steps;
        group.max_local_interval = max_local_interval;
        return group;
    }
};

struct onebit_lamb {
    double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, max_norm = 0;
    double min_trust = 0.01, max_trust = 10;
    std::int64_t freeze_step = 100000;
    double trust_beta = 0.9, trust_threshold = 0.1, trust_min_change = 0.5, trust_max_change = 4;
    operator dsopt_group() const {
        dsopt_group group = detail::adaptive_group_of(DSOPT_ALGORITHM_ONEBIT_LAMB, *this);
        detail::set_trust(group, *this);
        group.freeze_step = freeze_step;
        group.trust_beta = trust_beta;
        group.trust_threshold = trust_threshold;
        group.trust_min_change = trust_min_change;
        group.trust_max_change = trust_max_change;
        return group;
    }
};

/// A parameter as it is registered.
struct param {
    dsopt::tensor tensor = {};
    /// Empty = "p<index>".
    std::string name = {};
    /// Shape, for checkpoints; empty = flat.
    std::vector<std::int64_t> dims = {};
    bool model_parallel = false, replicated = false, masked = false;
    /// First element if the parameter is a slice of a tensor of that name. For rounding at random, and for moments in
    /// E4M3 or Q8.
    std::int64_t offset = 0;
    /// 0 = dense; k: an expert of expert comm k - 1.
    std::int32_t expert = 0;
    /// optimizer::add_params: index of the group.
    std::int32_t group = 0;
    /// The moments are F32, whatever the formats of the group: for embeddings, norms and biases.
    bool f32_moments = false;
    /// Muon: the tensor is partitioned into matrices of rows x cols, dsopt_param.rows. 0 = a tensor of two dims is one
    /// matrix.
    std::int64_t rows = 0, cols = 0;
    /// Muon: the weight is used as y = x W, so a matrix has `cols` outputs.
    bool rows_are_inputs = false;
};

namespace detail {
inline std::vector<dsopt_param> params_of(span<const param> list) {
    std::vector<dsopt_param> params;
    params.reserve(list.size());
    for (const param &from : list) {
        dsopt_param to = dsopt_param();
        to.tensor = from.tensor;
        if (!from.name.empty())
            to.name = text_of("the name of params[" + std::to_string(params.size()) + "]", from.name);
        to.dims = from.dims.empty() ? nullptr : from.dims.data();
        to.ndim = static_cast<std::int32_t>(from.dims.size());
        if (from.model_parallel) to.flags |= DSOPT_PARAM_MODEL_PARALLEL;
        if (from.replicated) to.flags |= DSOPT_PARAM_REPLICATED;
        if (from.masked) to.flags |= DSOPT_PARAM_MASKED;
        if (from.f32_moments) to.flags |= DSOPT_PARAM_F32_MOMENTS;
        if (from.rows_are_inputs) to.flags |= DSOPT_PARAM_ROWS_ARE_INPUTS;
        to.offset = from.offset;
        to.expert = from.expert;
        to.group = from.group;
        to.rows = from.rows;
        to.cols = from.cols;
        params.push_back(to);
    }
    return params;
}
} // namespace detail

} // namespace dsopt
#endif
