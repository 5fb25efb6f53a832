// SPDX-License-Identifier: Apache-2.0
// DSOPT_OPTIMIZER_CHECK_RANKS: before the first collective of a step the data-parallel ranks compare what they are
// about to do; where they will exchange bits, they compare their lists before the first step in any case. One
// all-reduce of a few integers; only if they differ, one more finds the tensor. A maximum of x and one of ~x tell every
// rank whether all have the same x, and so all come to the same end.
#include "optimizer/optimizer.h"
#include "rules/rounding.h"
#include <algorithm>
#include <iterator>

namespace dsopt {
namespace {

uint64_t mix(uint64_t key, uint64_t value) { return mix64(key ^ value) + 0x9e3779b97f4a7c15ull; }

/// Everything that ranks compare, as words.
struct Words {
    enum : int { params, list, calls, schedule, stage, gradients, parts };
    int32_t refused = 0;                             // rank + 1 of one that takes no part in the step
    int32_t high[parts][2] = {}, low[parts][2] = {}; // x and ~x: maxima become the largest x and ~ the smallest one
    void set(int part, uint64_t value) {
        for (int half = 0; half < 2; ++half) {
            high[part][half] = int32_t(uint32_t(value >> (32 * half)));
            low[part][half] = ~high[part][half];
        }
    }
    bool same(int part) const { return high[part][0] == ~low[part][0] && high[part][1] == ~low[part][1]; }
    int32_t least(int part) const { return ~low[part][0]; }
    int32_t most(int part) const { return high[part][0]; }
};
static_assert(sizeof(Words) == (1 + 4 * Words::parts) * sizeof(int32_t));

/// How ranks know a parameter. Experts of ranks differ, and so may their names.
uint64_t key_of(const Param &param, const dsopt_group &group) {
    uint64_t key = mix(uint64_t(param.numel), uint64_t(param.dtype) << 32 | uint32_t(param.group));
    key = mix(key, uint64_t(group.algorithm) << 32 | (group.flags & DSOPT_GROUP_NON_FREEZE));
    if (param.expert == 0)
        for (const char c : param.name) key = mix(key, uint8_t(c));
    return key;
}

const char *name_of(Stage stage) {
    switch (stage) {
    case Stage::dry: return "nothing";
    case Stage::full: return "full precision";
    case Stage::exchange: return "one bit an element";
    case Stage::local: return "a step by itself";
    case Stage::sync: break;
    }
    return "a synchronisation";
}

} // namespace

void Optimizer::reduce_words(void *words, size_t bytes, void *stream) const {
    for (Comm *comm : {with_.node.get(), with_.data.get()})
        if (comm != nullptr)
            comm->all_reduce(words, int64_t(bytes / sizeof(int32_t)), DSOPT_DTYPE_I32, DSOPT_OP_MAX, stream);
}

bool Optimizer::checks_ranks() const { return (desc_.flags & DSOPT_OPTIMIZER_CHECK_RANKS) && ranks() > 1; }

/// The first entry whose key is not the same on all ranks.
int64_t Optimizer::first_different(const std::vector<uint64_t> &keys, void *stream) const {
    std::vector<uint64_t> both = keys;
    for (const uint64_t key : keys) both.push_back(~key);
    reduce_words(both.data(), both.size() * sizeof(uint64_t), stream);
    for (size_t i = 0; i < keys.size(); ++i) // halves are compared as integers, each by itself
        if (both[i] != ~both[keys.size() + i]) return int64_t(i);
    return -1;
}

void Optimizer::check_ranks(const StepPlan &plan, bool lists_only, bool remembers) const {
    Words words;
    uint64_t list = 0, gradients = 0;
    for (const Param &param : params_) list = mix(list, key_of(param, groups_[size_t(param.group)]));
    // Where the caller averages, what is absent on one rank must be absent on all. Elsewhere it counts as zeros, or
    // concerns one rank alone.
    const bool full =
        plan.onebit == nullptr || (plan.onebit->stage == Stage::full && !(desc_.flags & DSOPT_OPTIMIZER_AVERAGES));
    const auto counts = [&](int64_t i) {
        return full && plan.wrapper == Wrapper::none && params_[size_t(i)].expert == 0;
    };
    for (int64_t i = 0; i < plan.count; ++i)
        if (counts(i)) gradients = mix(gradients, uint64_t(2 * i + plan.jobs[i].present));
    words.set(Words::params, uint64_t(plan.count));
    words.set(Words::list, list);
    for (int part = Words::calls; part < Words::parts; ++part) words.set(part, 0);
    if (!lists_only) {
        words.set(Words::calls, remembers ? uint32_t(calls_) : 0);
        words.set(Words::schedule, plan.onebit != nullptr ? uint32_t(plan.onebit->now.step) : 0);
        words.set(Words::stage, plan.onebit != nullptr ? uint32_t(plan.onebit->stage) : 0);
        words.set(Words::gradients, gradients);
    }
    const Words own = words;
    reduce_words(&words, sizeof words, plan.how.stream);

    const int rank = this->rank();
    if (words.refused != 0)
        throw Error(DSOPT_ERR_MISMATCH, "rank %d refused the arguments of this step, so no rank takes it",
                    words.refused - 1);
    if (!words.same(Words::params))
        throw Error(DSOPT_ERR_MISMATCH, "ranks have from %d to %d parameters, rank %d has %lld",
                    words.least(Words::params), words.most(Words::params), rank, ll(plan.count));
    if (!words.same(Words::list)) {
        std::vector<uint64_t> keys;
        for (const Param &param : params_) keys.push_back(key_of(param, groups_[size_t(param.group)]));
        const int64_t i = first_different(keys, plan.how.stream);
        const Param &param = params_[size_t(std::max<int64_t>(i, 0))];
        throw Error(
            DSOPT_ERR_MISMATCH,
            "ranks have other lists: parameter %lld is '%s' on rank %d, with %lld elements of dtype %d in group "
            "%d, and something else on another rank",
            ll(i), param.name.c_str(), rank, ll(param.numel), param.dtype, param.group);
    }
    if (!words.same(Words::calls))
        throw Error(DSOPT_ERR_MISMATCH, "ranks are at different steps: %d to %d are behind them, behind rank %d %d",
                    words.least(Words::calls), words.most(Words::calls), rank, own.most(Words::calls));
    if (!words.same(Words::schedule))
        throw Error(DSOPT_ERR_MISMATCH, "ranks are at different steps of the schedule: %d to %d, rank %d at %d",
                    words.least(Words::schedule), words.most(Words::schedule), rank, own.most(Words::schedule));
    if (!words.same(Words::stage))
        throw Error(DSOPT_ERR_MISMATCH, "ranks are about to do different things: '%s' and '%s', rank %d '%s'",
                    name_of(Stage(words.least(Words::stage))), name_of(Stage(words.most(Words::stage))), rank,
                    name_of(plan.onebit->stage));
    if (!words.same(Words::gradients)) {
        std::vector<uint64_t> keys;
        for (int64_t i = 0; i < plan.count; ++i) keys.push_back(counts(i) && plan.jobs[i].present);
        const int64_t i = std::max<int64_t>(first_different(keys, plan.how.stream), 0);
        throw Error(DSOPT_ERR_MISMATCH, "the gradient of '%s' is %s on rank %d, and not so on another rank",
                    params_[size_t(i)].name.c_str(), plan.jobs[i].present ? "there" : "absent", rank);
    }
    if (with_.node) check_places(plan.how.stream);
}

/// Two levels: those that exchange a slice must have the same one, or the mean is one of different tensors.
void Optimizer::check_places(void *stream) const {
    const int nodes = ranks() / node_ranks(), place = with_.node->rank();
    int32_t places[2] = {place, ~place};
    if (with_.data) with_.data->all_reduce(places, std::size(places), DSOPT_DTYPE_I32, DSOPT_OP_MAX, stream);
    const bool apart = places[0] != ~places[1];
    int32_t all[5] = {apart, nodes, ~nodes, node_ranks(), ~node_ranks()};
    reduce_words(all, sizeof all, stream);
    if (all[1] != ~all[2] || all[3] != ~all[4])
        throw Error(DSOPT_ERR_MISMATCH, "ranks have from %d to %d nodes of %d to %d ranks", ~all[2], all[1], ~all[4],
                    all[3]);
    if (all[0] != 0)
        throw Error(DSOPT_ERR_MISMATCH,
                    "dsopt_optimizer_desc.data has ranks of different places in their nodes, in this rank's from %d "
                    "to %d: they must be the same in each",
                    ~places[1], places[0]);
}

void Optimizer::refuse_to_ranks(void *stream) const noexcept {
    try {
        Words words;
        words.refused = rank() + 1;
        // The least of integers, so that it is never the maximum of two.
        for (auto *side : {&words.high, &words.low})
            for (auto &part : *side) part[0] = part[1] = INT32_MIN;
        reduce_words(&words, sizeof words, stream);
    } catch (const std::exception &) { // the caller hears of what came first
    }
}

} // namespace dsopt
