// SPDX-License-Identifier: Apache-2.0
// The table of options, src/rules/options.h: every row can be reached, and a function of the C header returns its text.
#include "rules/options.h"
#include "support/harness.h"
#include <cstring>

namespace inside_options_tests {

using namespace test;
using dsopt::Fact;
using dsopt::Facts;
using dsopt::OptionRule;
namespace facts = dsopt::facts;

// ----------------------------------------------------------------------------------------------------- the table alone
std::vector<Fact> list_of(const Facts &set) {
    std::vector<Fact> list;
    for (int fact = 0; fact < facts::count; ++fact)
        if (set.has(Fact(fact))) list.push_back(Fact(fact));
    return list;
}

/// Adds facts that earlier rows need until `rule` is the first row that refuses. Returns false if there are none.
bool reach(const OptionRule &rule, Facts set) {
    for (;;) {
        const OptionRule *const first = dsopt::first_refusal(rule.at, set);
        if (first == &rule) return true;
        if (first == nullptr) return false;
        const std::vector<Fact> needs = list_of(first->needs);
        const auto keeps = [&](Fact need) { return rule.refuses(set | Facts{need}); };
        const auto found = std::find_if(needs.begin(), needs.end(), keeps);
        if (found == needs.end()) return false;
        set.add(*found);
    }
}

TEST(OptionRules, AreReachedByEveryOptionAndExclusion) {
    for (const OptionRule &rule : dsopt::kOptionRules)
        for (const Fact option : list_of(rule.option)) {
            EXPECT_EQ(rule.refuses({option}), !rule.needs.empty()) << rule.text;
            if (!rule.needs.empty()) { EXPECT_TRUE(reach(rule, {option})) << rule.text; }
            for (const Fact need : list_of(rule.needs)) EXPECT_FALSE(rule.refuses({option, need})) << rule.text;
            for (const Fact excluded : list_of(rule.excludes)) {
                EXPECT_TRUE(reach(rule, {option, excluded})) << rule.text << ": " << facts::kFactNames[excluded].name;
                EXPECT_FALSE(rule.refuses({excluded})) << rule.text;
            }
        }
}

TEST(OptionRules, UseEveryFact) {
    Facts used;
    for (const OptionRule &rule : dsopt::kOptionRules) used = used | rule.option | rule.needs | rule.excludes;
    for (const dsopt::FactName &fact : facts::kFactNames) EXPECT_TRUE(used.has(fact.fact)) << fact.name;
}

TEST(CheckOptions, CopiesNamesAsTheyAre) {
    const auto text_of = [](const std::string &name) {
        try {
            dsopt::check_options<dsopt::At::param>({facts::offset}, {.name = name.c_str(), .number = INT64_MIN});
        } catch (const dsopt::Error &error) { return std::string(error.what()); }
        return std::string();
    };
    EXPECT_EQ(text_of("{number} %s {name"), "parameter '{number} %s {name' has offset -9223372036854775808: only "
                                            "rounding at random and formats with scales use it");
    EXPECT_EQ(text_of(std::string(1000, 'x')), "parameter '" + std::string(511 - 11, 'x'));
}

// ------------------------------------------------------------------------------------------------ through the C header
using ChangeDesc = std::function<void(dsopt_optimizer_desc &)>;
using ChangeGroup = std::function<void(dsopt_group &)>;
using ChangeParam = std::function<void(dsopt_param &)>;
using ChangeStep = std::function<void(dsopt_step &)>;

constexpr int32_t kSgd = DSOPT_ALGORITHM_SGD, kAdamW = DSOPT_ALGORITHM_ADAMW, kMuon = DSOPT_ALGORITHM_MUON,
                  kOneBit = DSOPT_ALGORITHM_ONEBIT_ADAM, kZeroOne = DSOPT_ALGORITHM_ZERO_ONE_ADAM;
constexpr int64_t kDims[] = {4, 4};

/// What the calls of the test share.
struct Calls {
    Context context = make_context(1);
    Comm data = self_comm(context), node = self_comm(context);
    Array weight{DSOPT_DTYPE_F32, 16, 1}, gradient{DSOPT_DTYPE_F32, 16, 1};

    ChangeDesc flags(int32_t flags, bool has_data = false) const {
        return [=, this](dsopt_optimizer_desc &desc) {
            desc.flags |= flags;
            if (has_data) desc.data = data.get();
        };
    }
    static ChangeDesc compat(int32_t flags = 0) {
        return [=](dsopt_optimizer_desc &desc) { desc.flags |= flags, desc.compat = DSOPT_COMPAT_DEEPSPEED; };
    }
    static ChangeDesc masters(int32_t masters) {
        return [=](dsopt_optimizer_desc &desc) { desc.masters = masters; };
    }

    dsopt_status optimizer(const ChangeDesc &change, dsopt_optimizer **made = nullptr) const {
        dsopt_optimizer_desc desc = optimizer_desc();
        change(desc);
        dsopt_optimizer *optimizer = nullptr;
        const dsopt_status status = dsopt_optimizer_create(context.get(), &desc, &optimizer);
        made != nullptr ? void(*made = optimizer) : dsopt_optimizer_destroy(optimizer);
        return status;
    }
    /// Adds groups with a parameter each, and passes the optimizer to `then` unless one of them is refused.
    dsopt_status groups(const ChangeDesc &change, const std::vector<dsopt_group> &list,
                        const ChangeParam &change_param = {},
                        const std::function<dsopt_status(dsopt_optimizer *)> &then = {}) const {
        dsopt_optimizer *made = nullptr;
        must(optimizer(change, &made));
        const Optimizer owned(made);
        for (size_t i = 0; i < list.size(); ++i) {
            dsopt_param param = param_of(i == 0 ? weight.tensor() : dsopt_tensor{nullptr, 16, DSOPT_DTYPE_F32, 0});
            param.dims = kDims;
            param.ndim = 2;
            if (change_param) change_param(param);
            if (const dsopt_status status = dsopt_optimizer_add_group(made, &list[i], &param, 1)) return status;
        }
        return then ? then(made) : DSOPT_OK;
    }
    dsopt_status group(int32_t algorithm, const ChangeGroup &change, const ChangeDesc &desc = {}) const {
        dsopt_group group = group_of(algorithm);
        if (change) change(group);
        return groups(desc ? desc : flags(0), {group});
    }
    dsopt_status param(int32_t algorithm, const ChangeParam &change, const ChangeDesc &desc = {}) const {
        return groups(desc ? desc : flags(0), {group_of(algorithm)}, change);
    }
    dsopt_status step(const ChangeStep &change, const ChangeDesc &desc = {}, int32_t algorithm = kAdamW,
                      int32_t dtype = DSOPT_DTYPE_F32, bool functional = false) const {
        const auto change_dtype = [=](dsopt_param &param) { param.tensor.dtype = dtype; };
        return groups(desc ? desc : flags(0), {group_of(algorithm)}, change_dtype, [&](dsopt_optimizer *optimizer) {
            const dsopt_tensor grads[] = {gradient.tensor()};
            DSOPT_NEW(dsopt_step, step);
            step.grads = grads;
            step.count = 1;
            change(step);
            return functional ? dsopt_optimizer_apply(optimizer, &step) : dsopt_optimizer_step(optimizer, &step);
        });
    }
    dsopt_status comm(int32_t kind, const std::function<void(dsopt_comm_desc &)> &change) const {
        DSOPT_NEW(dsopt_comm_table, table);
        table.ranks = 1;
        table.memory = DSOPT_MEMORY_HOST;
        table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 0; };
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = kind;
        if (kind == DSOPT_COMM_KIND_TABLE) desc.table = &table;
        change(desc);
        dsopt_comm *comm = nullptr;
        const dsopt_status status = dsopt_comm_create(context.get(), &desc, &comm);
        dsopt_comm_destroy(comm);
        return status;
    }
    dsopt_status scaler(int32_t profile, int32_t flags, int32_t hysteresis = 0) const {
        DSOPT_NEW(dsopt_scaler_desc, desc);
        desc.profile = profile;
        desc.flags = flags;
        desc.hysteresis = hysteresis;
        dsopt_scaler *scaler = nullptr;
        const dsopt_status status = dsopt_scaler_create(context.get(), &desc, &scaler);
        dsopt_scaler_destroy(scaler);
        return status;
    }
};

struct Case {
    const char *text;
    std::function<dsopt_status()> call;
};

std::vector<Case> comm_cases(const Calls &calls) {
    static int any = 0;
    const auto with_flags = [&](int32_t kind, int32_t flags) {
        return [&calls, kind, flags] { return calls.comm(kind, [=](auto &desc) { desc.flags = flags; }); };
    };
    constexpr int32_t kEnqueue = DSOPT_COMM_FLAG_ENQUEUE, kSynchronize = DSOPT_COMM_FLAG_SYNCHRONIZE,
                      kSums = DSOPT_COMM_FLAG_PROVIDER_SUMS, kSelf = DSOPT_COMM_KIND_SELF,
                      kTable = DSOPT_COMM_KIND_TABLE;
    static const dsopt_comm_table table{};
    return {
        {"dsopt_comm_desc.table has no effect with kind 0",
         [&calls] { return calls.comm(kSelf, [](auto &desc) { desc.table = &table; }); }},
        {"dsopt_comm_desc.native has no effect with kind 0",
         [&calls] { return calls.comm(kSelf, [](auto &desc) { desc.native = &any; }); }},
        {"id, rank, ranks and timeout_ms of dsopt_comm_desc have no effect with kind 0",
         [&calls] { return calls.comm(kSelf, [](auto &desc) { desc.timeout_ms = 1; }); }},
        {"dsopt_comm_desc.native knows its ranks: id, rank and ranks must be 0",
         [&calls] { return calls.comm(DSOPT_COMM_KIND_NCCL, [](auto &desc) { desc.native = &any, desc.ranks = 2; }); }},
        {"DSOPT_COMM_FLAG_ENQUEUE and DSOPT_COMM_FLAG_SYNCHRONIZE contradict each other",
         with_flags(kTable, kEnqueue | kSynchronize)},
        {"DSOPT_COMM_FLAG_ANY_THREAD is for a TABLE: kind 0 has it", with_flags(kSelf, DSOPT_COMM_FLAG_ANY_THREAD)},
        {"DSOPT_COMM_FLAG_SYNCHRONIZE has no effect with kind 0", with_flags(kSelf, kSynchronize)},
        {"PROVIDER_SUMS has no effect with kind 0", with_flags(kSelf, kSums)},
        {"DSOPT_COMM_FLAG_ENQUEUE has no effect with kind 0", with_flags(kSelf, kEnqueue)},
        {"dsopt_comm_table.reduce_scatter is NULL", with_flags(kTable, kSums)},
        {"DSOPT_COMM_FLAG_ENQUEUE needs a CUDA context and a table that takes its memory",
         with_flags(kTable, kEnqueue)},
        {"DSOPT_COMM_FLAG_SYNCHRONIZE needs a CUDA context and a table that takes its memory",
         with_flags(kTable, kSynchronize)},
    };
}

std::vector<Case> optimizer_cases(const Calls &calls) {
    const auto made = [&calls](const ChangeDesc &change) {
        return [&calls, change] { return calls.optimizer(change); };
    };
    constexpr int32_t kShard = DSOPT_OPTIMIZER_SHARD, kInNode = DSOPT_OPTIMIZER_SHARD_NODE;
    const auto early = [made](const ChangeDesc &change) {
        return made([change](auto &desc) { desc.flags = DSOPT_OPTIMIZER_EARLY_UPDATE, change(desc); });
    };
    return {
        {"DSOPT_CONTEXT_CHECK_POINTERS has no effect on the CPU",
         [] {
             dsopt_context_desc desc = context_desc();
             desc.flags = DSOPT_CONTEXT_CHECK_POINTERS;
             dsopt_context *context = nullptr;
             return dsopt_context_create(&desc, &context);
         }},
        {"a static scaler has nothing but init: the other options have no effect",
         [&calls] { return calls.scaler(DSOPT_PROFILE_DEFAULT, DSOPT_SCALER_STATIC, 2); }},
        {"the original's wrappers ignore hysteresis and never fail at the minimum: use DSOPT_PROFILE_DEFAULT for a "
         "scaler that has them",
         [&calls] { return calls.scaler(DSOPT_PROFILE_FUSED, 0, 2); }},
        {"DSOPT_SCALER_KEEP_AT_MIN has an effect with the DYNAMIC profile only",
         [&calls] { return calls.scaler(DSOPT_PROFILE_DEFAULT, DSOPT_SCALER_KEEP_AT_MIN); }},
        {"DSOPT_SCALER_KEEP_AT_MIN and DSOPT_SCALER_FAIL_AT_MIN contradict each other",
         [&calls] { return calls.scaler(DSOPT_PROFILE_DYNAMIC, DSOPT_SCALER_KEEP_AT_MIN | DSOPT_SCALER_FAIL_AT_MIN); }},
        {"DSOPT_SCALER_REFILL has no effect without hysteresis above 1",
         [&calls] { return calls.scaler(DSOPT_PROFILE_DEFAULT, DSOPT_SCALER_REFILL, 1); }},
        {"DSOPT_OPTIMIZER_MOMENTUM_BITS is for standard mode", made(Calls::compat(DSOPT_OPTIMIZER_MOMENTUM_BITS))},
        {"STOCHASTIC_ROUNDING has no effect with masters: it needs NO_MASTER",
         made(calls.flags(DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING))},
        {"the original has no stochastic rounding",
         made(Calls::compat(DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING | DSOPT_OPTIMIZER_NO_MASTER))},
        {"CHECK_RANKS has no effect without dsopt_optimizer_desc.data", made(calls.flags(DSOPT_OPTIMIZER_CHECK_RANKS))},
        {"AVERAGES has no effect without dsopt_optimizer_desc.data", made(calls.flags(DSOPT_OPTIMIZER_AVERAGES))},
        {"SPLIT_MATRICES has no effect without dsopt_optimizer_desc.data",
         made(calls.flags(DSOPT_OPTIMIZER_SPLIT_MATRICES))},
        {"SPLIT_MATRICES has no effect with SHARD: a rank has the matrices of its own tensors",
         made(calls.flags(DSOPT_OPTIMIZER_SPLIT_MATRICES | kShard, true))},
        {"dsopt_optimizer_desc.masters has no effect with NO_MASTER",
         made([](auto &desc) { desc.flags = DSOPT_OPTIMIZER_NO_MASTER, desc.masters = DSOPT_MASTERS_FLAT; })},
        {"DSOPT_MASTERS_REMAINDER is for standard mode",
         made([](auto &desc) { desc.compat = DSOPT_COMPAT_DEEPSPEED, desc.masters = DSOPT_MASTERS_REMAINDER; })},
        {"the original's wrappers ignore hysteresis: a scaler with one needs standard mode",
         [&calls] {
             DSOPT_NEW(dsopt_scaler_desc, rules);
             rules.hysteresis = 2;
             const Scaler scaler = make_scaler(calls.context, rules);
             return calls.optimizer([&](auto &desc) { Calls::compat()(desc), desc.scaler = scaler.get(); });
         }},
        {"SHARD and SHARD_NODE exclude one another", made(calls.flags(kShard | kInNode, true))},
        {"dsopt_optimizer_desc.bucket has no effect without AVERAGES, SHARD or SHARD_NODE",
         made([](auto &desc) { desc.bucket = 4096; })},
        {"dsopt_optimizer_desc.buckets_in_flight has no effect without bucket",
         made([](auto &desc) { desc.buckets_in_flight = 2; })},
        {"the originals have no buckets: dsopt_optimizer_desc.bucket is for standard mode", made([](auto &desc) {
             Calls::compat(kShard)(desc);
             desc.bucket = 4096;
         })},
        {"the originals have no parts: EARLY_UPDATE is for standard mode",
         early([](auto &desc) { desc.compat = DSOPT_COMPAT_DEEPSPEED; })},
        {"EARLY_UPDATE: max_norm decides about the whole step", early([](auto &desc) { desc.max_norm = 1; })},
        {"EARLY_UPDATE: a scaler decides about the whole step",
         [&calls] {
             const Scaler scaler = make_scaler(calls.context, 8);
             return calls.optimizer(
                 [&](auto &desc) { desc.flags = DSOPT_OPTIMIZER_EARLY_UPDATE, desc.scaler = scaler.get(); });
         }},
        {"EARLY_UPDATE: DSOPT_NONFINITE_SKIP decides about the whole step",
         early([](auto &desc) { desc.nonfinite = DSOPT_NONFINITE_SKIP; })},
        {"EARLY_UPDATE: a skip budget decides about the whole step", early([](auto &desc) { desc.skip_budget = 1; })},
        {"EARLY_UPDATE: REPORT_NORMS decides about the whole step",
         early([](auto &desc) { desc.flags |= DSOPT_OPTIMIZER_REPORT_NORMS; })},
        {"the original's optimizers keep all state on every rank: SHARD is for standard mode",
         made(Calls::compat(kShard))},
        {"SHARD_NODE has no effect without dsopt_optimizer_desc.node", made(calls.flags(kInNode, true))},
        {"SHARD has no effect without dsopt_optimizer_desc.data", made(calls.flags(kShard))},
        {"experts do not go with SHARD: give them an optimizer of their own, on one SHARED scaler",
         [&calls] {
             dsopt_comm *const expert = calls.node.get();
             return calls.optimizer([&](auto &desc) {
                 calls.flags(kShard, true)(desc);
                 desc.experts = &expert;
                 desc.expert_count = 1;
             });
         }},
        {"the original has no exchange in two levels: no node comm in compat mode",
         made([&calls](auto &desc) { Calls::compat()(desc), desc.node = calls.node.get(); })},
    };
}

std::vector<Case> group_cases(const Calls &calls) {
    const auto group = [&calls](int32_t algorithm, const ChangeGroup &change, const ChangeDesc &desc = {}) {
        return [&calls, algorithm, change, desc] { return calls.group(algorithm, change, desc); };
    };
    const auto both = [&calls](const ChangeDesc &desc, int32_t first, int32_t second) {
        return [&calls, desc, first, second] { return calls.groups(desc, {group_of(first), group_of(second)}); };
    };
    const int32_t bits = DSOPT_OPTIMIZER_MOMENTUM_BITS;
    return {
        {"the original has no sgd: it needs standard mode", group(kSgd, {}, Calls::compat())},
        {"eps_uncorrected has no effect without bias correction",
         group(kAdamW, [](auto &g) { g.flags = DSOPT_GROUP_EPS_UNCORRECTED | DSOPT_GROUP_NO_BIAS_CORRECTION; })},
        {"the original has no eps_uncorrected",
         group(
             kAdamW, [](auto &g) { g.flags = DSOPT_GROUP_EPS_UNCORRECTED; }, Calls::compat())},
        {"dampening has no effect without momentum", group(kSgd, [](auto &g) { g.dampening = 0.5; })},
        {"nesterov has no effect without momentum", group(kSgd, [](auto &g) { g.flags = DSOPT_GROUP_NESTEROV; })},
        {"ns_a, ns_b and ns_c have no effect with a preset of ns_schedule",
         group(kMuon, [](auto &g) { g.ns_schedule = DSOPT_NS_YOU; })},
        {"bias correction has no effect without nesterov: a factor of the momentum does not change its "
         "orthogonalised matrix",
         group(kMuon, [](auto &g) { g.flags = 0; })},
        {"exp_avg_format with DSOPT_MASTERS_FLAT: moments are F32 there",
         group(
             kAdamW, [](auto &g) { g.exp_avg_format = DSOPT_MOMENT_BF16; }, Calls::masters(DSOPT_MASTERS_FLAT))},
        {"exp_avg_sq_format with DSOPT_MASTERS_FLAT: moments are F32 there",
         group(
             kAdamW, [](auto &g) { g.exp_avg_sq_format = DSOPT_MOMENT_Q8; }, Calls::masters(DSOPT_MASTERS_FLAT))},
        {"0/1 Adam is not sharded", group(kZeroOne, {}, calls.flags(DSOPT_OPTIMIZER_SHARD, true))},
        {"the 1-bit family is sharded in its node: DSOPT_OPTIMIZER_SHARD_NODE",
         group(kOneBit, {}, calls.flags(DSOPT_OPTIMIZER_SHARD, true))},
        {"the 1-bit family exchanges one vector: dsopt_optimizer_desc.bucket must be 0",
         group(kOneBit, {},
               [&calls](auto &desc) {
                   calls.flags(DSOPT_OPTIMIZER_AVERAGES, true)(desc);
                   desc.bucket = 4096;
               })},
        {"EARLY_UPDATE: muon decides about the whole step",
         group(kMuon, {}, calls.flags(DSOPT_OPTIMIZER_EARLY_UPDATE))},
        {"EARLY_UPDATE: max_norm decides about the whole step",
         group(
             kAdamW, [](auto &g) { g.max_norm = 1; }, calls.flags(DSOPT_OPTIMIZER_EARLY_UPDATE))},
        {"DSOPT_OPTIMIZER_MOMENTUM_BITS is for 1-bit Adam", group(kZeroOne, {}, calls.flags(bits))},
        {"DSOPT_OPTIMIZER_MOMENTUM_BITS is for the 1-bit family, whose first group comes first",
         group(kAdamW, {}, calls.flags(bits))},
        {"REPORT_NORMS is not available for the 1-bit family",
         group(kOneBit, {}, calls.flags(DSOPT_OPTIMIZER_REPORT_NORMS))},
        {"DSOPT_MASTERS_REMAINDER is not available for the 1-bit family",
         group(kOneBit, {}, Calls::masters(DSOPT_MASTERS_REMAINDER))},
        {"muon and the 1-bit family in one optimizer", both(calls.flags(0), kMuon, kOneBit)},
        {"an optimizer has one algorithm of the 1-bit family, not two", both(calls.flags(0), kOneBit, kZeroOne)},
        {"the original's 1-bit optimizers have one algorithm in all groups", both(Calls::compat(), kAdamW, kOneBit)},
    };
}

std::vector<Case> param_cases(const Calls &calls) {
    const auto param = [&calls](int32_t algorithm, const ChangeParam &change, const ChangeDesc &desc = {}) {
        return [&calls, algorithm, change, desc] { return calls.param(algorithm, change, desc); };
    };
    const auto flagged = [](int32_t flags) { return [=](dsopt_param &p) { p.flags = flags; }; };
    const auto typed = [](int32_t dtype) { return [=](dsopt_param &p) { p.tensor = {nullptr, 16, dtype, 0}; }; };
    return {
        {"DSOPT_PARAM_F32_MOMENTS of parameter 'p0' has no effect: the moments of its group are F32",
         param(kAdamW, flagged(DSOPT_PARAM_F32_MOMENTS))},
        {"parameter 'p0' has offset 3: only rounding at random and formats with scales use it",
         param(kAdamW, [](auto &p) { p.offset = 3; })},
        {"parameter 'p0' is F16: stochastic rounding is for BF16",
         param(kAdamW, typed(DSOPT_DTYPE_F16),
               calls.flags(DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING | DSOPT_OPTIMIZER_NO_MASTER))},
        {"parameter 'p0' is F16: remainders are for BF16",
         param(kAdamW, typed(DSOPT_DTYPE_F16), Calls::masters(DSOPT_MASTERS_REMAINDER))},
        {"rows and cols of parameter 'p0' has no effect in adamw: it is for Muon",
         param(kAdamW, [](auto &p) { p.rows = p.cols = 4; })},
        {"DSOPT_PARAM_ROWS_ARE_INPUTS of parameter 'p0' has no effect in adamw: it is for Muon",
         param(kAdamW, flagged(DSOPT_PARAM_ROWS_ARE_INPUTS))},
        {"parameter 'p0' is MODEL_PARALLEL: muon would need the whole matrix. Without the flag its shard is "
         "orthogonalised on its own",
         param(kMuon, flagged(DSOPT_PARAM_MODEL_PARALLEL))},
        {"parameter 'p0' has offset 4: muon needs whole matrices",
         param(
             kMuon, [](auto &p) { p.offset = 4; },
             calls.flags(DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING | DSOPT_OPTIMIZER_NO_MASTER))},
        {"parameter 'p0' is masked: only the 1-bit family uses masks", param(kAdamW, flagged(DSOPT_PARAM_MASKED))},
        {"parameter 'p0' has a mask, which MOMENTUM_BITS does not support",
         param(kOneBit, flagged(DSOPT_PARAM_MASKED), calls.flags(DSOPT_OPTIMIZER_MOMENTUM_BITS))},
        {"parameter 'p0': the 1-bit family needs F32 weights or masters",
         param(kOneBit, typed(DSOPT_DTYPE_BF16), calls.flags(DSOPT_OPTIMIZER_NO_MASTER))},
        {"parameter 'p2' of group 0 must come directly after the other parameters of that group (compat mode)",
         [&calls] {
             const std::vector<dsopt_group> two(2, group_of(kAdamW));
             return calls.groups(Calls::compat(), two, {}, [](dsopt_optimizer *optimizer) {
                 const dsopt_param param = param_of({nullptr, 16, DSOPT_DTYPE_F32, 0});
                 return dsopt_optimizer_add_params(optimizer, &param, 1);
             });
         }},
    };
}

std::vector<Case> step_cases(const Calls &calls) {
    static float scalar = 0;
    static Array other(DSOPT_DTYPE_F32, 16, 1);
    static const dsopt_tensor output = other.tensor();
    const auto flagged = [](int32_t flags) { return [=](dsopt_step &step) { step.flags = flags; }; };
    const auto from_sums = [](dsopt_step &step) { step.flags = DSOPT_STEP_ACCUMULATED, step.grads = nullptr; };
    const auto with_output = [](int32_t flags) {
        return [=](dsopt_step &step) { step.flags = flags, step.out = &output; };
    };
    const auto step = [&calls](const ChangeStep &change, const ChangeDesc &desc = {}, int32_t algorithm = kAdamW,
                               int32_t dtype = DSOPT_DTYPE_F32, bool functional = false) {
        return [=, &calls] { return calls.step(change, desc, algorithm, dtype, functional); };
    };
    const ChangeDesc accumulates = calls.flags(DSOPT_OPTIMIZER_ACCUMULATE);
    return {
        {"dsopt_optimizer_apply has no parts", step(flagged(DSOPT_STEP_READY), {}, kAdamW, DSOPT_DTYPE_F32, true)},
        {"the originals have no parts", step(flagged(DSOPT_STEP_READY), Calls::compat())},
        {"ZERO_GRADS with READY: gradients that were ready may be freed; zero them when they are free",
         step(flagged(DSOPT_STEP_READY | DSOPT_STEP_ZERO_GRADS))},
        {"EARLY_UPDATE: params, state, out, lr, hyper, grad_scale, skip and grad_norms of dsopt_step must be NULL: "
         "parameters are updated before the step",
         step([](auto &s) { s.lr = &scalar; }, calls.flags(DSOPT_OPTIMIZER_EARLY_UPDATE))},
        {"dsopt_step.grads with DSOPT_STEP_ACCUMULATED: the gradients are in the accumulators",
         step(flagged(DSOPT_STEP_ACCUMULATED), accumulates)},
        {"the optimizer was made without DSOPT_OPTIMIZER_ACCUMULATE", step(from_sums)},
        {"dsopt_optimizer_apply is stateless: pass the accumulators as gradients",
         step(from_sums, accumulates, kAdamW, DSOPT_DTYPE_F32, true)},
        {"dsopt_optimizer_apply needs dsopt_step.params", step(flagged(0), {}, kAdamW, DSOPT_DTYPE_F32, true)},
        {"dsopt_step.parallel_user without parallel_for", step([](auto &s) { s.parallel_user = &scalar; })},
        {"dsopt_step.lr and hyper: the rows of hyper have the learning rate",
         step([](auto &s) { s.lr = s.hyper = &scalar; })},
        {"DSOPT_STEP_NO_NAN has no effect without dsopt_step.report", step(flagged(DSOPT_STEP_NO_NAN))},
        {"SPLIT_MATRICES has no effect without a group of muon",
         step(flagged(0), calls.flags(DSOPT_OPTIMIZER_SPLIT_MATRICES, true))},
        {"DSOPT_STEP_OUT_ONLY and _DELTA need dsopt_step.out", step(flagged(DSOPT_STEP_OUT_ONLY))},
        {"dsopt_step.out: with SHARD a rank computes new weights of its part only",
         step(with_output(0), calls.flags(DSOPT_OPTIMIZER_SHARD, true))},
        {"DSOPT_STEP_DELTA with a master: adding the change to the rounded 'p0' would not give the new weight",
         step(with_output(DSOPT_STEP_DELTA), {}, kAdamW, DSOPT_DTYPE_BF16)},
        {"OUT_ONLY and DELTA with 0/1 Adam: its local steps add up in 'p0', which has no master",
         step(with_output(DSOPT_STEP_OUT_ONLY), {}, kZeroOne)},
    };
}

/// True if `text` is that of a row, in which {name} and the like stand for any text.
bool is_text_of(const std::string &row, const std::string &text) {
    size_t at = 0, end = 0;
    for (size_t begin = 0; begin <= row.size(); begin = end + 1) {
        const size_t open = std::min(row.find('{', begin), row.size());
        const std::string part = row.substr(begin, open - begin);
        const size_t found = text.find(part, at);
        if (found == std::string::npos || (begin == 0 && found != 0)) return false;
        at = found + part.size();
        end = open == row.size() ? open : row.find('}', open);
    }
    return row.back() == '}' || at == text.size();
}

LABEL(cpu); // some of the refusals are those of the CPU
TEST(OptionRules, AreReportedByTheFunctionsOfTheHeader) {
    const Calls calls;
    std::vector<Case> cases;
    for (const auto &part :
         {comm_cases(calls), optimizer_cases(calls), group_cases(calls), param_cases(calls), step_cases(calls)})
        cases.insert(cases.end(), part.begin(), part.end());
    for (const Case &c : cases) {
        dsopt_status expected = DSOPT_OK;
        for (const OptionRule &rule : dsopt::kOptionRules)
            if (is_text_of(rule.text, c.text)) expected = rule.status;
        EXPECT_NE(expected, DSOPT_OK) << "no row: " << c.text;
        EXPECT_EQ(c.call(), expected) << c.text;
        EXPECT_STREQ(dsopt_last_error(), c.text);
    }
    for (const OptionRule &rule : dsopt::kOptionRules)
        EXPECT_TRUE(
            std::any_of(cases.begin(), cases.end(), [&](const Case &c) { return is_text_of(rule.text, c.text); }))
            << "no case: " << rule.text;
}

} // namespace inside_options_tests
