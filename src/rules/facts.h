// SPDX-License-Identifier: Apache-2.0
// What is true of a description, a parameter or a call, as far as options.h decides by it which options go together.
#pragma once
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace dsopt {

namespace facts {
enum Fact : uint8_t {
    // dsopt_optimizer_desc
    compat,
    data,
    node,
    experts,
    masters_flat,
    masters_remainder,
    no_master,
    report_norms,
    stochastic_rounding,
    accumulate,
    averages,
    check_ranks,
    momentum_bits,
    shard,
    shard_node,
    split_matrices,
    bucket,
    buckets_in_flight,
    early_update,
    scaler,
    nonfinite_skip,
    skip_budget,
    max_norm, // of the optimizer, or of a group
    // dsopt_group
    onebit_adam,
    zero_one_adam,
    onebit_lamb,
    lamb,
    muon,
    other_algorithm,
    standard_only,
    exp_avg_format,
    exp_avg_sq_format,
    no_bias_correction,
    eps_uncorrected,
    nesterov,
    momentum,
    dampening,
    ns_preset,
    ns_triple,
    corrected_muon,
    // dsopt_param
    masked,
    f32_moments,
    offset,
    offset_is_used,
    f16,
    no_f32_weight,
    rows_cols,
    rows_are_inputs,
    model_parallel,
    apart,
    // dsopt_step, and what a call is
    functional,
    accumulated,
    grads,
    params,
    out,
    out_only,
    delta,
    no_nan,
    report,
    lr,
    hyper,
    parallel_for,
    parallel_user,
    ready,
    zero_grads,
    call_values,
    has_master,
    adds_local_steps,
    // dsopt_comm_desc
    local_comm,
    table_comm,
    nccl_comm,
    hccl_comm,
    table,
    native,
    rank_or_id,
    timeout,
    enqueue,
    synchronize,
    provider_sums,
    any_thread,
    no_reduce_scatter,
    host_memory,
    // dsopt_scaler_desc
    static_scaler,
    scaler_rules,
    wrapper_profile,
    dynamic_profile,
    hysteresis,
    refill,
    fail_at_min,
    keep_at_min,
    // dsopt_context_desc
    check_pointers,
    cpu,
    count
};
} // namespace facts
using facts::Fact;

/// A set of facts.
class Facts {
public:
    constexpr Facts() = default;
    constexpr Facts(std::initializer_list<Fact> list) {
        for (const Fact fact : list) add(fact);
    }
    constexpr Facts &add(Fact fact, bool is_true = true) {
        words_[fact / 64] |= uint64_t(is_true) << fact % 64;
        return *this;
    }
    constexpr Facts without(Facts other) const {
        Facts left = *this;
        for (size_t i = 0; i < kWords; ++i) left.words_[i] &= ~other.words_[i];
        return left;
    }
    constexpr Facts operator|(const Facts &other) const {
        Facts both = *this;
        for (size_t i = 0; i < kWords; ++i) both.words_[i] |= other.words_[i];
        return both;
    }
    constexpr bool has_any(const Facts &other) const {
        bool any = false;
        for (size_t i = 0; i < kWords; ++i) any = any || (words_[i] & other.words_[i]) != 0;
        return any;
    }
    constexpr bool has(Fact fact) const { return (words_[fact / 64] >> fact % 64 & 1) != 0; }
    constexpr bool empty() const {
        for (const uint64_t word : words_)
            if (word != 0) return false;
        return true;
    }

private:
    static constexpr size_t kWords = 2;
    uint64_t words_[kWords]{};
    static_assert(facts::count <= 64 * kWords);
};

/// The name of a fact in documents and in dsopt.json.
struct FactName {
    Fact fact;
    const char *name;
};

namespace facts {
inline constexpr FactName kFactNames[] = {
    {compat, "compat mode"},
    {data, "dsopt_optimizer_desc.data"},
    {node, "dsopt_optimizer_desc.node"},
    {experts, "dsopt_optimizer_desc.experts"},
    {masters_flat, "DSOPT_MASTERS_FLAT"},
    {masters_remainder, "DSOPT_MASTERS_REMAINDER"},
    {no_master, "DSOPT_OPTIMIZER_NO_MASTER"},
    {report_norms, "DSOPT_OPTIMIZER_REPORT_NORMS"},
    {stochastic_rounding, "DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING"},
    {accumulate, "DSOPT_OPTIMIZER_ACCUMULATE"},
    {averages, "DSOPT_OPTIMIZER_AVERAGES"},
    {check_ranks, "DSOPT_OPTIMIZER_CHECK_RANKS"},
    {momentum_bits, "DSOPT_OPTIMIZER_MOMENTUM_BITS"},
    {shard, "DSOPT_OPTIMIZER_SHARD"},
    {shard_node, "DSOPT_OPTIMIZER_SHARD_NODE"},
    {split_matrices, "DSOPT_OPTIMIZER_SPLIT_MATRICES"},
    {bucket, "dsopt_optimizer_desc.bucket"},
    {buckets_in_flight, "dsopt_optimizer_desc.buckets_in_flight"},
    {early_update, "DSOPT_OPTIMIZER_EARLY_UPDATE"},
    {scaler, "dsopt_optimizer_desc.scaler"},
    {nonfinite_skip, "DSOPT_NONFINITE_SKIP"},
    {skip_budget, "dsopt_optimizer_desc.skip_budget"},
    {max_norm, "max_norm of the optimizer or a group"},
    {onebit_adam, "DSOPT_ALGORITHM_ONEBIT_ADAM"},
    {zero_one_adam, "DSOPT_ALGORITHM_ZERO_ONE_ADAM"},
    {onebit_lamb, "DSOPT_ALGORITHM_ONEBIT_LAMB"},
    {lamb, "DSOPT_ALGORITHM_LAMB"},
    {muon, "DSOPT_ALGORITHM_MUON"},
    {other_algorithm, "parameters of other algorithms next to the 1-bit family"},
    {standard_only, "SGD, Adagrad, Lion, Muon"},
    {exp_avg_format, "dsopt_group.exp_avg_format"},
    {exp_avg_sq_format, "dsopt_group.exp_avg_sq_format"},
    {no_bias_correction, "DSOPT_GROUP_NO_BIAS_CORRECTION"},
    {eps_uncorrected, "DSOPT_GROUP_EPS_UNCORRECTED"},
    {nesterov, "DSOPT_GROUP_NESTEROV"},
    {momentum, "dsopt_group.momentum"},
    {dampening, "dsopt_group.dampening"},
    {ns_preset, "a preset of dsopt_group.ns_schedule"},
    {ns_triple, "dsopt_group.ns_a, ns_b, ns_c"},
    {corrected_muon, "bias correction of Muon"},
    {masked, "DSOPT_PARAM_MASKED"},
    {f32_moments, "DSOPT_PARAM_F32_MOMENTS"},
    {offset, "dsopt_param.offset"},
    {offset_is_used, "rounding at random, or a format with scales"},
    {f16, "F16 parameters"},
    {no_f32_weight, "16-bit parameters without a master"},
    {rows_cols, "dsopt_param.rows, cols"},
    {rows_are_inputs, "DSOPT_PARAM_ROWS_ARE_INPUTS"},
    {model_parallel, "DSOPT_PARAM_MODEL_PARALLEL"},
    {apart, "a parameter apart from the others of its group"},
    {functional, "dsopt_optimizer_apply"},
    {accumulated, "DSOPT_STEP_ACCUMULATED"},
    {grads, "dsopt_step.grads"},
    {params, "dsopt_step.params"},
    {out, "dsopt_step.out"},
    {out_only, "DSOPT_STEP_OUT_ONLY"},
    {delta, "DSOPT_STEP_DELTA"},
    {no_nan, "DSOPT_STEP_NO_NAN"},
    {report, "dsopt_step.report"},
    {lr, "dsopt_step.lr"},
    {hyper, "dsopt_step.hyper"},
    {parallel_for, "dsopt_step.parallel_for"},
    {parallel_user, "dsopt_step.parallel_user"},
    {ready, "DSOPT_STEP_READY or dsopt_optimizer_ready"},
    {zero_grads, "DSOPT_STEP_ZERO_GRADS"},
    {call_values, "dsopt_step.params, state, out, lr, hyper, grad_scale, skip, grad_norms"},
    {has_master, "a parameter with a master"},
    {adds_local_steps, "a parameter of 0/1 Adam without a master"},
    {local_comm, "DSOPT_COMM_KIND_LOCAL"},
    {table_comm, "DSOPT_COMM_KIND_TABLE"},
    {nccl_comm, "DSOPT_COMM_KIND_NCCL"},
    {hccl_comm, "DSOPT_COMM_KIND_HCCL"},
    {table, "dsopt_comm_desc.table"},
    {native, "dsopt_comm_desc.native"},
    {rank_or_id, "dsopt_comm_desc.id, rank, ranks"},
    {timeout, "dsopt_comm_desc.timeout_ms"},
    {enqueue, "DSOPT_COMM_FLAG_ENQUEUE"},
    {synchronize, "DSOPT_COMM_FLAG_SYNCHRONIZE"},
    {provider_sums, "DSOPT_COMM_FLAG_PROVIDER_SUMS"},
    {any_thread, "DSOPT_COMM_FLAG_ANY_THREAD"},
    {no_reduce_scatter, "a table without reduce_scatter"},
    {host_memory, "a CPU context, or a table that takes host memory"},
    {static_scaler, "DSOPT_SCALER_STATIC"},
    {scaler_rules, "options of dsopt_scaler_desc other than init"},
    {wrapper_profile, "DSOPT_PROFILE_FUSED or DSOPT_PROFILE_UNFUSED"},
    {dynamic_profile, "DSOPT_PROFILE_DYNAMIC"},
    {hysteresis, "a scaler with hysteresis above 1"},
    {refill, "DSOPT_SCALER_REFILL"},
    {fail_at_min, "DSOPT_SCALER_FAIL_AT_MIN"},
    {keep_at_min, "DSOPT_SCALER_KEEP_AT_MIN"},
    {check_pointers, "DSOPT_CONTEXT_CHECK_POINTERS"},
    {cpu, "DSOPT_BACKEND_CPU"},
};
static_assert([] {
    for (size_t i = 0; i < count; ++i)
        if (kFactNames[i].fact != i) return false;
    return sizeof kFactNames / sizeof *kFactNames == count;
}());
} // namespace facts

} // namespace dsopt
