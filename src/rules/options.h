// SPDX-License-Identifier: Apache-2.0
// Which options go together: what each option needs and excludes, with the text of the refusal. check_options() reads
// the table wherever something is created or added, and before a step. scripts/generate/options.py writes the table to
// dsopt.json and to the documents.
#pragma once
#include "base/status.h"
#include "rules/facts.h"
#include <iterator>
#include <utility>

namespace dsopt {

/// When a row of the table is checked. The rows are in this order.
enum class At : uint8_t { context, scaler, comm, optimizer, group, groups, param, step, output, count };

/// Refuses facts that have one of `option` and none of `needs`, or one of `option` and one of `excludes`. A row has
/// either list.
struct OptionRule {
    At at;
    Facts option, needs = {}, excludes = {};
    dsopt_status status = DSOPT_ERR_UNSUPPORTED;
    const char *text; // {name}, {algorithm} and {number} stand for those of OptionWords

    constexpr bool refuses(const Facts &facts) const {
        return option.has_any(facts) && (needs.empty() ? excludes.has_any(facts) : !needs.has_any(facts));
    }
};

namespace facts {
/// In the order of the checks: the first row of an At that refuses the facts is reported.
inline constexpr OptionRule kOptionRules[] = {
    // ------------------------------------------------------------------------------------------------------- contexts
    {.at = At::context,
     .option = {check_pointers},
     .excludes = {cpu},
     .text = "DSOPT_CONTEXT_CHECK_POINTERS has no effect on the CPU"},
    // -------------------------------------------------------------------------------------------------------- scalers
    {.at = At::scaler,
     .option = {static_scaler},
     .excludes = {scaler_rules},
     .text = "a static scaler has nothing but init: the other options have no effect"},
    {.at = At::scaler,
     .option = {wrapper_profile},
     .excludes = {hysteresis, refill, fail_at_min},
     .text = "the original's wrappers ignore hysteresis and never fail at the minimum: use DSOPT_PROFILE_DEFAULT for a "
             "scaler that has them"},
    {.at = At::scaler,
     .option = {keep_at_min},
     .needs = {dynamic_profile},
     .text = "DSOPT_SCALER_KEEP_AT_MIN has an effect with the DYNAMIC profile only"},
    {.at = At::scaler,
     .option = {keep_at_min},
     .excludes = {fail_at_min},
     .status = DSOPT_ERR_ARGUMENT,
     .text = "DSOPT_SCALER_KEEP_AT_MIN and DSOPT_SCALER_FAIL_AT_MIN contradict each other"},
    {.at = At::scaler,
     .option = {refill},
     .needs = {hysteresis},
     .text = "DSOPT_SCALER_REFILL has no effect without hysteresis above 1"},
    // ---------------------------------------------------------------------------------------------------------- comms
    {.at = At::comm,
     .option = {table},
     .needs = {table_comm},
     .text = "dsopt_comm_desc.table has no effect with kind {number}"},
    {.at = At::comm,
     .option = {native},
     .needs = {nccl_comm, hccl_comm},
     .text = "dsopt_comm_desc.native has no effect with kind {number}"},
    {.at = At::comm,
     .option = {rank_or_id, timeout},
     .needs = {local_comm, nccl_comm, hccl_comm},
     .text = "id, rank, ranks and timeout_ms of dsopt_comm_desc have no effect with kind {number}"},
    {.at = At::comm,
     .option = {native},
     .excludes = {rank_or_id},
     .text = "dsopt_comm_desc.native knows its ranks: id, rank and ranks must be 0"},
    {.at = At::comm,
     .option = {enqueue},
     .excludes = {synchronize},
     .status = DSOPT_ERR_ARGUMENT,
     .text = "DSOPT_COMM_FLAG_ENQUEUE and DSOPT_COMM_FLAG_SYNCHRONIZE contradict each other"},
    {.at = At::comm,
     .option = {synchronize},
     .needs = {table_comm},
     .text = "DSOPT_COMM_FLAG_SYNCHRONIZE has no effect with kind {number}"},
    {.at = At::comm,
     .option = {provider_sums},
     .needs = {table_comm, nccl_comm, hccl_comm},
     .text = "PROVIDER_SUMS has no effect with kind {number}"},
    {.at = At::comm,
     .option = {enqueue},
     .needs = {table_comm, nccl_comm},
     .text = "DSOPT_COMM_FLAG_ENQUEUE has no effect with kind {number}"},
    {.at = At::comm,
     .option = {provider_sums},
     .excludes = {no_reduce_scatter},
     .text = "dsopt_comm_table.reduce_scatter is NULL"},
    {.at = At::comm,
     .option = {enqueue},
     .excludes = {host_memory},
     .text = "DSOPT_COMM_FLAG_ENQUEUE needs a CUDA context and a table that takes its memory"},
    {.at = At::comm,
     .option = {synchronize},
     .excludes = {host_memory},
     .text = "DSOPT_COMM_FLAG_SYNCHRONIZE needs a CUDA context and a table that takes its memory"},
    {.at = At::comm,
     .option = {any_thread},
     .needs = {table_comm},
     .text = "DSOPT_COMM_FLAG_ANY_THREAD is for a TABLE: kind {number} has it"},
    // ----------------------------------------------------------------------------------------------------- optimizers
    {.at = At::optimizer,
     .option = {momentum_bits},
     .excludes = {compat},
     .text = "DSOPT_OPTIMIZER_MOMENTUM_BITS is for standard mode"},
    {.at = At::optimizer,
     .option = {stochastic_rounding},
     .needs = {no_master},
     .text = "STOCHASTIC_ROUNDING has no effect with masters: it needs NO_MASTER"},
    {.at = At::optimizer,
     .option = {stochastic_rounding},
     .excludes = {compat},
     .text = "the original has no stochastic rounding"},
    {.at = At::optimizer,
     .option = {check_ranks},
     .needs = {data, node},
     .text = "CHECK_RANKS has no effect without dsopt_optimizer_desc.data"},
    {.at = At::optimizer,
     .option = {averages},
     .needs = {data, node},
     .text = "AVERAGES has no effect without dsopt_optimizer_desc.data"},
    {.at = At::optimizer,
     .option = {split_matrices},
     .needs = {data, node},
     .text = "SPLIT_MATRICES has no effect without dsopt_optimizer_desc.data"},
    {.at = At::optimizer,
     .option = {split_matrices},
     .excludes = {shard, shard_node},
     .text = "SPLIT_MATRICES has no effect with SHARD: a rank has the matrices of its own tensors"},
    {.at = At::optimizer,
     .option = {masters_flat, masters_remainder},
     .excludes = {no_master},
     .text = "dsopt_optimizer_desc.masters has no effect with NO_MASTER"},
    {.at = At::optimizer,
     .option = {masters_remainder},
     .excludes = {compat},
     .text = "DSOPT_MASTERS_REMAINDER is for standard mode"},
    {.at = At::optimizer,
     .option = {hysteresis},
     .excludes = {compat},
     .text = "the original's wrappers ignore hysteresis: a scaler with one needs standard mode"},
    {.at = At::optimizer,
     .option = {shard},
     .excludes = {shard_node},
     .text = "SHARD and SHARD_NODE exclude one another"},
    {.at = At::optimizer,
     .option = {bucket},
     .needs = {averages, shard, shard_node},
     .text = "dsopt_optimizer_desc.bucket has no effect without AVERAGES, SHARD or SHARD_NODE"},
    {.at = At::optimizer,
     .option = {buckets_in_flight},
     .needs = {bucket},
     .text = "dsopt_optimizer_desc.buckets_in_flight has no effect without bucket"},
    {.at = At::optimizer,
     .option = {bucket},
     .excludes = {compat},
     .text = "the originals have no buckets: dsopt_optimizer_desc.bucket is for standard mode"},
    {.at = At::optimizer,
     .option = {early_update},
     .excludes = {compat},
     .text = "the originals have no parts: EARLY_UPDATE is for standard mode"},
    {.at = At::optimizer,
     .option = {early_update},
     .excludes = {max_norm},
     .text = "EARLY_UPDATE: max_norm decides about the whole step"},
    {.at = At::optimizer,
     .option = {early_update},
     .excludes = {scaler},
     .text = "EARLY_UPDATE: a scaler decides about the whole step"},
    {.at = At::optimizer,
     .option = {early_update},
     .excludes = {nonfinite_skip},
     .text = "EARLY_UPDATE: DSOPT_NONFINITE_SKIP decides about the whole step"},
    {.at = At::optimizer,
     .option = {early_update},
     .excludes = {skip_budget},
     .text = "EARLY_UPDATE: a skip budget decides about the whole step"},
    {.at = At::optimizer,
     .option = {early_update},
     .excludes = {report_norms},
     .text = "EARLY_UPDATE: REPORT_NORMS decides about the whole step"},
    {.at = At::optimizer,
     .option = {shard, shard_node},
     .excludes = {compat},
     .text = "the original's optimizers keep all state on every rank: SHARD is for standard mode"},
    {.at = At::optimizer,
     .option = {shard_node},
     .needs = {node},
     .text = "SHARD_NODE has no effect without dsopt_optimizer_desc.node"},
    {.at = At::optimizer,
     .option = {shard},
     .needs = {data, node},
     .text = "SHARD has no effect without dsopt_optimizer_desc.data"},
    {.at = At::optimizer,
     .option = {shard, shard_node},
     .excludes = {experts},
     .text = "experts do not go with SHARD: give them an optimizer of their own, on one SHARED scaler"},
    {.at = At::optimizer,
     .option = {node},
     .excludes = {compat},
     .text = "the original has no exchange in two levels: no node comm in compat mode"},
    // --------------------------------------------------------------------------------------------------------- groups
    {.at = At::group,
     .option = {standard_only},
     .excludes = {compat},
     .text = "the original has no {algorithm}: it needs standard mode"},
    {.at = At::group,
     .option = {eps_uncorrected},
     .excludes = {no_bias_correction},
     .text = "eps_uncorrected has no effect without bias correction"},
    {.at = At::group, .option = {eps_uncorrected}, .excludes = {compat}, .text = "the original has no eps_uncorrected"},
    {.at = At::group, .option = {dampening}, .needs = {momentum}, .text = "dampening has no effect without momentum"},
    {.at = At::group, .option = {nesterov}, .needs = {momentum}, .text = "nesterov has no effect without momentum"},
    {.at = At::group,
     .option = {ns_triple},
     .excludes = {ns_preset},
     .text = "ns_a, ns_b and ns_c have no effect with a preset of ns_schedule"},
    {.at = At::group,
     .option = {corrected_muon},
     .needs = {nesterov},
     .text = "bias correction has no effect without nesterov: a factor of the momentum does not change its "
             "orthogonalised matrix"},
    {.at = At::group,
     .option = {exp_avg_format},
     .excludes = {masters_flat},
     .text = "exp_avg_format with DSOPT_MASTERS_FLAT: moments are F32 there"},
    {.at = At::group,
     .option = {exp_avg_sq_format},
     .excludes = {masters_flat},
     .text = "exp_avg_sq_format with DSOPT_MASTERS_FLAT: moments are F32 there"},
    {.at = At::group, .option = {zero_one_adam}, .excludes = {shard, shard_node}, .text = "0/1 Adam is not sharded"},
    {.at = At::group,
     .option = {onebit_adam, onebit_lamb},
     .excludes = {shard},
     .text = "the 1-bit family is sharded in its node: DSOPT_OPTIMIZER_SHARD_NODE"},
    {.at = At::group,
     .option = {onebit_adam, zero_one_adam, onebit_lamb},
     .excludes = {bucket},
     .text = "the 1-bit family exchanges one vector: dsopt_optimizer_desc.bucket must be 0"},
    {.at = At::group,
     .option = {early_update},
     .excludes = {lamb, muon, onebit_adam, zero_one_adam, onebit_lamb},
     .text = "EARLY_UPDATE: {algorithm} decides about the whole step"},
    {.at = At::group,
     .option = {early_update},
     .excludes = {max_norm},
     .text = "EARLY_UPDATE: max_norm decides about the whole step"},
    {.at = At::group,
     .option = {zero_one_adam, onebit_lamb},
     .excludes = {momentum_bits},
     .text = "DSOPT_OPTIMIZER_MOMENTUM_BITS is for 1-bit Adam"},
    // ------------------------------------------------------------------------------------- all groups of an optimizer
    {.at = At::groups,
     .option = {momentum_bits},
     .needs = {onebit_adam, zero_one_adam, onebit_lamb},
     .text = "DSOPT_OPTIMIZER_MOMENTUM_BITS is for the 1-bit family, whose first group comes first"},
    {.at = At::groups,
     .option = {onebit_adam, zero_one_adam, onebit_lamb},
     .excludes = {report_norms},
     .text = "REPORT_NORMS is not available for the 1-bit family"},
    {.at = At::groups,
     .option = {onebit_adam, zero_one_adam, onebit_lamb},
     .excludes = {masters_remainder},
     .text = "DSOPT_MASTERS_REMAINDER is not available for the 1-bit family"},
    {.at = At::groups,
     .option = {onebit_adam, zero_one_adam, onebit_lamb},
     .excludes = {muon},
     .text = "muon and the 1-bit family in one optimizer"},
    {.at = At::groups,
     .option = {onebit_adam},
     .excludes = {zero_one_adam, onebit_lamb},
     .text = "an optimizer has one algorithm of the 1-bit family, not two"},
    {.at = At::groups,
     .option = {zero_one_adam},
     .excludes = {onebit_lamb},
     .text = "an optimizer has one algorithm of the 1-bit family, not two"},
    {.at = At::groups,
     .option = {other_algorithm},
     .excludes = {compat},
     .text = "the original's 1-bit optimizers have one algorithm in all groups"},
    // ----------------------------------------------------------------------------------------------------- parameters
    {.at = At::param,
     .option = {f32_moments},
     .needs = {exp_avg_format, exp_avg_sq_format},
     .text = "DSOPT_PARAM_F32_MOMENTS of parameter '{name}' has no effect: the moments of its group are F32"},
    {.at = At::param,
     .option = {offset},
     .needs = {offset_is_used},
     .text = "parameter '{name}' has offset {number}: only rounding at random and formats with scales use it"},
    {.at = At::param,
     .option = {stochastic_rounding},
     .excludes = {f16},
     .text = "parameter '{name}' is F16: stochastic rounding is for BF16"},
    {.at = At::param,
     .option = {masters_remainder},
     .excludes = {f16},
     .text = "parameter '{name}' is F16: remainders are for BF16"},
    {.at = At::param,
     .option = {rows_cols},
     .needs = {muon},
     .text = "rows and cols of parameter '{name}' has no effect in {algorithm}: it is for Muon"},
    {.at = At::param,
     .option = {rows_are_inputs},
     .needs = {muon},
     .text = "DSOPT_PARAM_ROWS_ARE_INPUTS of parameter '{name}' has no effect in {algorithm}: it is for Muon"},
    {.at = At::param,
     .option = {muon},
     .excludes = {model_parallel},
     .text = "parameter '{name}' is MODEL_PARALLEL: muon would need the whole matrix. Without the flag its shard is "
             "orthogonalised on its own"},
    {.at = At::param,
     .option = {muon},
     .excludes = {offset},
     .text = "parameter '{name}' has offset {number}: muon needs whole matrices"},
    {.at = At::param,
     .option = {masked},
     .needs = {onebit_adam, zero_one_adam, onebit_lamb},
     .text = "parameter '{name}' is masked: only the 1-bit family uses masks"},
    {.at = At::param,
     .option = {masked},
     .excludes = {momentum_bits},
     .text = "parameter '{name}' has a mask, which MOMENTUM_BITS does not support"},
    {.at = At::param,
     .option = {onebit_adam, zero_one_adam, onebit_lamb},
     .excludes = {no_f32_weight},
     .text = "parameter '{name}': the 1-bit family needs F32 weights or masters"},
    {.at = At::param,
     .option = {apart},
     .excludes = {compat},
     .text = "parameter '{name}' of group {number} must come directly after the other parameters of that group (compat "
             "mode)"},
    // ---------------------------------------------------------------------------------------------------------- steps
    {.at = At::step, .option = {ready}, .excludes = {functional}, .text = "dsopt_optimizer_apply has no parts"},
    {.at = At::step, .option = {ready}, .excludes = {compat}, .text = "the originals have no parts"},
    {.at = At::step,
     .option = {ready},
     .excludes = {zero_grads},
     .text = "ZERO_GRADS with READY: gradients that were ready may be freed; zero them when they are free"},
    {.at = At::step,
     .option = {early_update},
     .excludes = {call_values},
     .text = "EARLY_UPDATE: params, state, out, lr, hyper, grad_scale, skip and grad_norms of dsopt_step must be NULL: "
             "parameters are updated before the step"},
    {.at = At::step,
     .option = {accumulated},
     .excludes = {grads},
     .status = DSOPT_ERR_ARGUMENT,
     .text = "dsopt_step.grads with DSOPT_STEP_ACCUMULATED: the gradients are in the accumulators"},
    {.at = At::step,
     .option = {accumulated},
     .needs = {accumulate},
     .text = "the optimizer was made without DSOPT_OPTIMIZER_ACCUMULATE"},
    {.at = At::step,
     .option = {accumulated},
     .excludes = {functional},
     .text = "dsopt_optimizer_apply is stateless: pass the accumulators as gradients"},
    {.at = At::step,
     .option = {functional},
     .needs = {params},
     .status = DSOPT_ERR_ARGUMENT,
     .text = "dsopt_optimizer_apply needs dsopt_step.params"},
    {.at = At::step,
     .option = {parallel_user},
     .needs = {parallel_for},
     .status = DSOPT_ERR_ARGUMENT,
     .text = "dsopt_step.parallel_user without parallel_for"},
    {.at = At::step,
     .option = {lr},
     .excludes = {hyper},
     .status = DSOPT_ERR_ARGUMENT,
     .text = "dsopt_step.lr and hyper: the rows of hyper have the learning rate"},
    {.at = At::step,
     .option = {no_nan},
     .needs = {report},
     .text = "DSOPT_STEP_NO_NAN has no effect without dsopt_step.report"},
    {.at = At::step,
     .option = {split_matrices},
     .needs = {muon},
     .text = "SPLIT_MATRICES has no effect without a group of muon"},
    {.at = At::step,
     .option = {out_only},
     .needs = {out},
     .status = DSOPT_ERR_ARGUMENT,
     .text = "DSOPT_STEP_OUT_ONLY and _DELTA need dsopt_step.out"},
    {.at = At::step,
     .option = {out, out_only},
     .excludes = {shard, shard_node},
     .text = "dsopt_step.out: with SHARD a rank computes new weights of its part only"},
    // ---------------------------------------------------------------------- parameters of a step with OUT_ONLY, DELTA
    {.at = At::output,
     .option = {delta},
     .excludes = {has_master},
     .text = "DSOPT_STEP_DELTA with a master: adding the change to the rounded '{name}' would not give the new weight"},
    {.at = At::output,
     .option = {out_only},
     .excludes = {adds_local_steps},
     .text = "OUT_ONLY and DELTA with 0/1 Adam: its local steps add up in '{name}', which has no master"},
};
} // namespace facts
using facts::kOptionRules;

static_assert([] {
    At last = At::context;
    for (const OptionRule &rule : kOptionRules) {
        if (rule.option.empty() || rule.needs.empty() == rule.excludes.empty() || rule.at < last) return false;
        last = rule.at;
    }
    return true;
}());

/// What the text of a refusal names.
struct OptionWords {
    const char *name = "", *algorithm = "";
    int64_t number = 0;
};
/// Returns the index of the first row of `at`; of its end, with the At that follows.
constexpr size_t first_row(At at) {
    size_t index = 0;
    while (index < std::size(kOptionRules) && kOptionRules[index].at < at) ++index;
    return index;
}
/// Returns the options of all rows of `at`: facts with none of them are not refused.
constexpr Facts options_of(At at) {
    Facts all;
    for (const OptionRule &rule : kOptionRules)
        if (rule.at == at) all = all | rule.option;
    return all;
}
/// Returns the first row of `at` that refuses the facts; NULL: there is none.
const OptionRule *first_refusal(At at, const Facts &facts);
/// Throws the text of that row.
[[noreturn]] void throw_refusal(At at, const Facts &facts, const OptionWords &words);
/// Throws the text of the first row that refuses the facts. The rows are constants of the compiler, because a step of a
/// small list takes about a microsecond.
template <At at> void check_options(const Facts &facts, const OptionWords &words = {}) {
    constexpr Facts options = options_of(at);
    if (!facts.has_any(options)) return;
    constexpr size_t begin = first_row(at), end = first_row(At(size_t(at) + 1));
    const bool is_refused = [&]<size_t... I>(std::index_sequence<I...>) {
        return (kOptionRules[begin + I].refuses(facts) || ...);
    }
    (std::make_index_sequence<end - begin>{});
    if (is_refused) throw_refusal(at, facts, words);
}

/// Returns the facts of an optimizer: of every optimizer call that creates or adds, and of every step.
Facts facts_of(const dsopt_optimizer_desc &desc);

} // namespace dsopt
