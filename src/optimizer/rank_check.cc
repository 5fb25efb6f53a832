// SPDX-License-Identifier: Apache-2.0
// With DSOPT_OPTIMIZER_CHECK_RANKS the data-parallel ranks compare their steps before the first collective of a step.
// Ranks that exchange bits, gradients or weights compare lists and options before the first step even without the flag.
//
// The comparison is one all-reduce of a few integers. Only if these differ, more all-reduces find the tensor. The
// maxima of x and of ~x show every rank if all ranks have the same x, so all ranks come to the same result.
#include "optimizer/group.h"
#include "optimizer/plan.h"
#include "rules/rounding.h"
#include "step/agree.h"
#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <iterator>

namespace dsopt {
namespace {

uint64_t mix(uint64_t key, uint64_t value) { return mix64(key ^ value) + 0x9e3779b97f4a7c15ull; }

/// Everything that ranks compare, as words.
struct ComparedWords {
    enum : int { params, list, calls, schedule, stage, gradients, flags, options, sums, count };
    int32_t refused = 0;                             // rank + 1 of a rank whose call has failed already, 0 = none
    int32_t high[count][2] = {}, low[count][2] = {}; // x and ~x; their maxima are the largest x and ~ the smallest x
    void set(int word, uint64_t value) {
        for (int half = 0; half < 2; ++half) {
            high[word][half] = int32_t(uint32_t(value >> (32 * half)));
            low[word][half] = ~high[word][half];
        }
    }
    bool same(int word) const { return high[word][0] == ~low[word][0] && high[word][1] == ~low[word][1]; }
    int32_t min(int word, int half = 0) const { return ~low[word][half]; }
    int32_t max(int word, int half = 0) const { return high[word][half]; }
};
static_assert(sizeof(ComparedWords) == (1 + 4 * ComparedWords::count) * sizeof(int32_t));

/// Flags of dsopt_optimizer_desc that a rank may have on its own: weights do not depend on them.
constexpr int32_t kFlagsOfOneRank =
    DSOPT_OPTIMIZER_TIMING | DSOPT_OPTIMIZER_REPORT_NORMS | DSOPT_OPTIMIZER_MOMENTUM_BITS;

/// A value that ranks compare, or two of 32 bits, and how a message shows it.
struct Word {
    const char *name;
    enum { real, whole, pair } shown;
    uint64_t bits;
};
Word real_word(const char *name, double value) { return {name, Word::real, std::bit_cast<uint64_t>(value)}; }
Word whole_word(const char *name, uint64_t value) { return {name, Word::whole, value}; }
Word pair_word(const char *names, int32_t first, int32_t second) {
    return {names, Word::pair, uint64_t(uint32_t(second)) << 32 | uint32_t(first)};
}

/// Returns the other options of the whole optimizer that ranks compare.
constexpr size_t kOptions = 11;
std::array<Word, kOptions> options_of(const Optimizer &optimizer) {
    const dsopt_optimizer_desc &desc = optimizer.desc();
    const Scaler *const scaler = optimizer.attachments().scaler.get();
    const auto rounds_at_random = [](const dsopt_group &group) {
        return group.exp_avg_format == DSOPT_MOMENT_BF16_RANDOM || group.exp_avg_sq_format == DSOPT_MOMENT_BF16_RANDOM;
    };
    bool uses_seed = (desc.flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING) != 0;
    for (const dsopt_group &group : optimizer.groups()) uses_seed = uses_seed || rounds_at_random(group);
    const ScalerRules rules = scaler ? scaler->rules() : ScalerRules{};
    return {pair_word("compat, nonfinite", desc.compat, desc.nonfinite),
            pair_word("masters, skip_budget", desc.masters, desc.skip_budget),
            real_word("max_norm", desc.max_norm),
            real_word("max_value", desc.max_value),
            whole_word("bucket", uint64_t(desc.bucket)),
            whole_word("seed", uses_seed ? desc.seed : 0),
            pair_word("scaler, its flags", scaler != nullptr, int32_t(rules.flags)),
            real_word("scaler's factor", rules.factor),
            real_word("scaler's min", rules.min),
            real_word("scaler's max", rules.max),
            pair_word("scaler's window, hysteresis", rules.window, rules.hysteresis)};
}

/// Returns an option of a group: every field of dsopt_group except its size.
constexpr size_t kFields = std::size(kGroupFields), kInts = std::size(kGroupInts), kGroupOptions = 2 + kFields + kInts;
static_assert(sizeof(dsopt_group) ==
                  sizeof(size_t) + 4 * sizeof(int32_t) + kFields * sizeof(double) + kInts * sizeof(int32_t),
              "ranks compare every field");
Word option_of(const dsopt_group &group, size_t i) {
    if (i == 0) return pair_word("algorithm, flags", group.algorithm, group.flags);
    if (i == 1) return pair_word("exp_avg_format, exp_avg_sq_format", group.exp_avg_format, group.exp_avg_sq_format);
    i -= 2;
    if (i >= kFields) return whole_word(kGroupInts[i - kFields].name, uint64_t(group.*kGroupInts[i - kFields].value));
    const GroupField &field = kGroupFields[i];
    if (field.whole != nullptr) return whole_word(field.name, uint64_t(group.*field.whole));
    return real_word(field.name, group.*field.value);
}

/// Options of the optimizer, then those of each group.
class OptionList {
public:
    explicit OptionList(const Optimizer &optimizer) : options_(options_of(optimizer)), groups_(optimizer.groups()) {}
    size_t count() const { return kOptions + groups_.size() * kGroupOptions; }
    uint64_t operator[](size_t i) const { return word(i).bits; }
    /// Writes "lr of group 1 is 0.001".
    void describe(size_t i, char *text, size_t size) const {
        const Word known = word(i);
        char group[32] = "", value[48];
        if (i >= kOptions) std::snprintf(group, sizeof group, " of group %zu", group_at(i));
        switch (known.shown) {
        case Word::real: std::snprintf(value, sizeof value, "is %.17g", std::bit_cast<double>(known.bits)); break;
        case Word::whole:
            std::snprintf(value, sizeof value, "is %llu", static_cast<unsigned long long>(known.bits));
            break;
        case Word::pair:
            std::snprintf(value, sizeof value, "are %d, %d", int32_t(uint32_t(known.bits)), int32_t(known.bits >> 32));
            break;
        }
        std::snprintf(text, size, "%s%s %s", known.name, group, value);
    }

private:
    static size_t group_at(size_t i) { return (i - kOptions) / kGroupOptions; }
    Word word(size_t i) const {
        return i < kOptions ? options_[i] : option_of(groups_[group_at(i)], (i - kOptions) % kGroupOptions);
    }
    const std::array<Word, kOptions> options_;
    const std::vector<dsopt_group> &groups_;
};

/// Returns a hash of the properties of a parameter that ranks compare. Names of experts may differ between ranks.
uint64_t key_of(const Param &param) {
    uint64_t key = mix(uint64_t(param.numel), uint64_t(param.dtype) << 32 | uint32_t(param.group));
    key = mix(key, uint64_t(uint32_t(param.flags)) << 32 | uint32_t(param.has_master) << 1 | param.has_remainder);
    for (const Format format : param.formats) key = mix(key, uint64_t(format));
    if (param.matrix.rows != 0) key = mix(key, uint64_t(param.matrix.rows) << 32 | uint64_t(param.matrix.cols));
    if (param.expert == 0) {
        key = mix(key, uint64_t(param.begin));
        for (const char c : param.name) key = mix(key, uint8_t(c));
    }
    return key;
}

const char *name_of(Stage stage) {
    switch (stage) {
    case Stage::dry: return "nothing";
    case Stage::full: return "full precision";
    case Stage::exchange: return "one bit per element";
    case Stage::local: return "a local step";
    case Stage::sync: break;
    }
    return "a synchronisation";
}

/// Two levels: ranks that exchange a slice with one another must have the same rank in their nodes. Otherwise they
/// would average different tensors.
void check_nodes(const Optimizer &optimizer, void *stream) {
    const int node_ranks = optimizer.data_rank().node_ranks;
    const Attachments &with = optimizer.attachments();
    const int nodes = optimizer.data_rank().nodes(), index = with.node->rank();
    int32_t indices[2] = {index, ~index};
    if (with.data) with.data->all_reduce(indices, std::size(indices), DSOPT_DTYPE_I32, DSOPT_OP_MAX, stream);
    const bool differs = indices[0] != ~indices[1];
    int32_t all[5] = {differs, nodes, ~nodes, node_ranks, ~node_ranks};
    max_over_ranks(optimizer, all, sizeof all, stream);
    if (all[1] != ~all[2] || all[3] != ~all[4])
        throw Error(DSOPT_ERR_MISMATCH, "ranks have from %d to %d nodes of %d to %d ranks", ~all[2], all[1], ~all[4],
                    all[3]);
    if (all[0] != 0)
        throw Error(DSOPT_ERR_MISMATCH,
                    "dsopt_optimizer_desc.data has ranks with different ranks in their nodes, in this rank's from %d "
                    "to %d: they must be the same in each",
                    ~indices[1], indices[0]);
}

/// Returns the dtype in which a gradient is sent; 0: it is not.
int32_t sent_dtype(const StepRows *rows, size_t i) {
    if (rows == nullptr) return 0;
    for (const dsopt_tensor *list : {rows->averaged, rows->averaged_in_node})
        if (list != nullptr && list[i].numel != 0) return list[i].dtype;
    return 0;
}

} // namespace

void max_over_ranks(const Optimizer &optimizer, void *words, size_t bytes, void *stream) {
    for (Comm *comm : {optimizer.attachments().node.get(), optimizer.attachments().data.get()})
        if (comm != nullptr)
            comm->all_reduce(words, int64_t(bytes / sizeof(int32_t)), DSOPT_DTYPE_I32, DSOPT_OP_MAX, stream);
}

int64_t first_different(const Optimizer &optimizer, size_t count, FunctionRef<uint64_t(size_t)> key, void *stream) {
    constexpr size_t piece = kComparedBytes / sizeof(uint64_t) / 2;
    uint64_t keys[piece], inverse[piece];
    // Compares the list in pieces that fit on the stack: if one rank failed to allocate memory for all keys, the others
    // would wait in the all-reduce.
    for (size_t begin = 0; begin < count; begin += piece) {
        const size_t n = std::min(piece, count - begin);
        for (size_t k = 0; k < n; ++k) inverse[k] = ~(keys[k] = key(begin + k));
        for (uint64_t *words : {keys, inverse}) max_over_ranks(optimizer, words, n * sizeof(uint64_t), stream);
        for (size_t k = 0; k < n; ++k) // the all-reduce takes the maximum of each 32-bit half
            if (keys[k] != ~inverse[k]) return int64_t(begin + k);
    }
    return -1;
}

bool checks_ranks(const Optimizer &optimizer) {
    return (optimizer.desc().flags & DSOPT_OPTIMIZER_CHECK_RANKS) && optimizer.data_rank().ranks > 1;
}

namespace {

/// What the ranks compare of one step.
class Comparison {
public:
    Comparison(const Optimizer &optimizer, const StepPlan &plan, const StepRows *rows, const Compared &compared) :
        optimizer_(optimizer),
        plan_(plan),
        rows_(rows),
        options_(optimizer),
        // If the caller averages, a gradient that is absent on one rank must be absent on all. Otherwise an absent
        // gradient counts as zeros, or affects this rank only, and the dtype is that of messages.
        compares_presence_(!(optimizer.desc().flags & DSOPT_OPTIMIZER_AVERAGES) && stage() == Stage::full &&
                           compared.calls && plan.policy.wrapper == Wrapper::none),
        compared_(compared) {}

    ComparedWords words(const PhaseList &phases, bool counts) const {
        ComparedWords words;
        for (int word = 0; word < ComparedWords::count; ++word) words.set(word, 0);
        if (compared_.lists) {
            words.set(ComparedWords::flags, uint32_t(optimizer_.desc().flags & ~kFlagsOfOneRank));
            words.set(ComparedWords::options, hash(options_.count(), [&](size_t i) { return options_[i]; }));
            words.set(ComparedWords::params, uint64_t(optimizer_.groups().size()) << 32 | uint64_t(plan_.count));
            words.set(ComparedWords::list, hash(params().size(), [&](size_t i) { return key_of(params()[i]); }));
        }
        if (compared_.sums)
            words.set(ComparedWords::sums, phases.has(Phase::complete_squares) + 2 * phases.has(Phase::complete_sums));
        words.set(ComparedWords::gradients, hash(size_t(compared_.gradients.count), [&](size_t k) {
                      return gradient_key(size_t(compared_.gradients.first) + k);
                  }));
        if (!compared_.calls) return words;
        if (counts) words.set(ComparedWords::calls, uint32_t(optimizer_.calls()));
        if (plan_.onebit != nullptr) words.set(ComparedWords::schedule, uint32_t(plan_.onebit->now.step));
        words.set(ComparedWords::stage, uint32_t(stage()));
        return words;
    }

    // The next three throw MISMATCH if the words of the ranks differ. They name the difference.
    void check_lists(const ComparedWords &words) const {
        if (!words.same(ComparedWords::flags))
            throw Error(DSOPT_ERR_MISMATCH,
                        "ranks have different options: dsopt_optimizer_desc.flags are 0x%x on rank %d",
                        optimizer_.desc().flags, rank());
        if (!words.same(ComparedWords::params))
            throw Error(
                DSOPT_ERR_MISMATCH, "ranks have from %d to %d parameters in %d to %d groups, rank %d has %lld in %zu",
                words.min(ComparedWords::params), words.max(ComparedWords::params), words.min(ComparedWords::params, 1),
                words.max(ComparedWords::params, 1), rank(), ll(plan_.count), optimizer_.groups().size());
        if (!words.same(ComparedWords::options)) {
            char text[128];
            options_.describe(first(options_.count(), [&](size_t i) { return options_[i]; }), text, sizeof text);
            throw Error(DSOPT_ERR_MISMATCH,
                        "ranks have different options: %s on rank %d, and something else on another rank", text,
                        rank());
        }
        if (words.same(ComparedWords::list)) return;
        const size_t i = first(params().size(), [&](size_t index) { return key_of(params()[index]); });
        const Param &param = params()[i];
        throw Error(
            DSOPT_ERR_MISMATCH,
            "ranks have different lists: parameter %zu is '%s' on rank %d, with %lld elements of dtype %d in group "
            "%d, flags 0x%x, %s, and something else on another rank",
            i, param.name.c_str(), rank(), ll(param.numel), param.dtype, param.group, param.flags,
            param.has_remainder ? "a remainder"
            : param.has_master  ? "a master"
                                : "no master");
    }
    void check_calls(const ComparedWords &words, const ComparedWords &local) const {
        if (!words.same(ComparedWords::calls))
            throw Error(DSOPT_ERR_MISMATCH, "ranks have made different numbers of calls: from %d to %d, rank %d %d",
                        words.min(ComparedWords::calls), words.max(ComparedWords::calls), rank(),
                        local.max(ComparedWords::calls));
        if (!words.same(ComparedWords::schedule))
            throw Error(DSOPT_ERR_MISMATCH, "ranks are at different steps of the schedule: %d to %d, rank %d at %d",
                        words.min(ComparedWords::schedule), words.max(ComparedWords::schedule), rank(),
                        local.max(ComparedWords::schedule));
        if (!words.same(ComparedWords::stage))
            throw Error(DSOPT_ERR_MISMATCH, "ranks are at different stages: '%s' and '%s', rank %d '%s'",
                        name_of(Stage(words.min(ComparedWords::stage))),
                        name_of(Stage(words.max(ComparedWords::stage))), rank(),
                        name_of(Stage(local.max(ComparedWords::stage))));
        if (!words.same(ComparedWords::sums))
            throw Error(DSOPT_ERR_MISMATCH,
                        "ranks have different options: some read gradients before the update (max_norm, a scaler or "
                        "DSOPT_NONFINITE_SKIP, without dsopt_step.grad_norms) or have REPORT_NORMS, others do not");
    }
    void check_gradients(const ComparedWords &words) const {
        if (words.same(ComparedWords::gradients)) return;
        const auto begin = size_t(compared_.gradients.first);
        const size_t i =
            begin + first(size_t(compared_.gradients.count), [&](size_t k) { return gradient_key(begin + k); });
        const char *const name = params()[i].name.c_str();
        if (const int32_t dtype = sent_dtype(rows_, i))
            throw Error(DSOPT_ERR_MISMATCH, "the gradient of '%s' has dtype %s on rank %d, and another on another rank",
                        name, dtype_name(dtype), rank());
        throw Error(DSOPT_ERR_MISMATCH, "the gradient of '%s' is %s on rank %d, and not so on another rank", name,
                    plan_.jobs[i].present ? "there" : "absent", rank());
    }

private:
    const std::vector<Param> &params() const { return optimizer_.params(); }
    int rank() const { return optimizer_.data_rank().rank; }
    Stage stage() const { return plan_.onebit != nullptr ? plan_.onebit->stage : Stage::full; }
    uint64_t gradient_key(size_t i) const {
        if (compared_.of != Compared::Of::all &&
            optimizer_.parts()->is_in_bucket(i) != (compared_.of == Compared::Of::in_buckets))
            return 0;
        if (const int32_t dtype = sent_dtype(rows_, i)) return uint64_t(dtype) << 32;
        return compares_presence_ && params()[i].expert == 0 && plan_.jobs[i].present;
    }
    template <class Key> static uint64_t hash(size_t count, const Key &key) {
        uint64_t all = 0;
        for (size_t i = 0; i < count; ++i) all = mix(all, key(i));
        return all;
    }
    /// Returns the index of the first key that differs between ranks. A collective call.
    size_t first(size_t count, FunctionRef<uint64_t(size_t)> key) const {
        return size_t(std::max<int64_t>(first_different(optimizer_, count, key, plan_.execution.stream), 0));
    }

    const Optimizer &optimizer_;
    const StepPlan &plan_;
    const StepRows *const rows_;
    const OptionList options_;
    const bool compares_presence_;
    const Compared &compared_;
};

} // namespace

void check_ranks(const Optimizer &optimizer, const StepPlan &plan, const PhaseList &phases, const StepRows *rows,
                 const Compared &compared, bool counts) {
    const Comparison step(optimizer, plan, rows, compared);
    const ComparedWords local = step.words(phases, counts);
    ComparedWords words = local;
    max_over_ranks(optimizer, &words, sizeof words, plan.execution.stream);
    if (words.refused != 0)
        throw Error(DSOPT_ERR_MISMATCH,
                    "the step of rank %d failed before the ranks compared their calls, so no rank takes it",
                    words.refused - 1);
    step.check_lists(words);
    step.check_calls(words, local);
    step.check_gradients(words);
    if (compared.lists && optimizer.attachments().node) check_nodes(optimizer, plan.execution.stream);
}

void report_refusal(const Optimizer &optimizer, void *stream) noexcept {
    try {
        ComparedWords words;
        words.refused = optimizer.data_rank().rank + 1;
        // INT32_MIN leaves the other ranks' maxima as they are.
        for (auto *side : {&words.high, &words.low})
            for (auto &word : *side) word[0] = word[1] = INT32_MIN;
        const Device &device = optimizer.context().device();
        device.on_device([&] {
            try {
                device.check_stream(stream);
            } catch (const Error &) {
                stream = nullptr; // the refused call's stream is unusable; NULL is the default stream of the device
            }
            max_over_ranks(optimizer, &words, sizeof words, stream);
        });
    } catch (const std::exception &) { // ignored: the call returns the error that it failed with
    }
}

} // namespace dsopt
