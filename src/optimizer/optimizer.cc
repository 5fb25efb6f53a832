// SPDX-License-Identifier: Apache-2.0
// Groups, parameters, hyper-parameters and what state tensors there are. Their memory is in state_memory.cc, the step
// itself in step.cc.
#include "optimizer/optimizer.h"
#include "base/text.h"
#include "rules/group.h"
#include "rules/rounding.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_set>

namespace dsopt {
namespace {

bool not_negative(double value) { return std::isfinite(value) && value >= 0; }
constexpr char kMaxValueRange[] = "0, or finite and above 0 in fp32";

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

} // namespace

Optimizer::Optimizer(std::shared_ptr<const Context> context, const dsopt_optimizer_desc &desc,
                     Attachments attachments) :
    context_(std::move(context)),
    desc_(desc),
    with_(std::move(attachments)) {
    if (desc.compat != DSOPT_COMPAT_NONE && desc.compat != DSOPT_COMPAT_DEEPSPEED)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_desc.compat is %d, which this library does not know",
                    desc.compat);
    constexpr int32_t known = DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_REPORT_NORMS |
                              DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING | DSOPT_OPTIMIZER_ACCUMULATE |
                              DSOPT_OPTIMIZER_TIMING | DSOPT_OPTIMIZER_AVERAGES | DSOPT_OPTIMIZER_CHECK_RANKS |
                              DSOPT_OPTIMIZER_MOMENTUM_BITS;
    if (desc.flags & ~known)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_desc.flags has unknown bits: 0x%x", desc.flags);
    if ((desc.flags & DSOPT_OPTIMIZER_MOMENTUM_BITS) && desc.compat != DSOPT_COMPAT_NONE)
        throw Error(DSOPT_ERR_UNSUPPORTED, "DSOPT_OPTIMIZER_MOMENTUM_BITS is for standard mode");
    if (desc.nonfinite < DSOPT_NONFINITE_AUTO || desc.nonfinite > DSOPT_NONFINITE_APPLY)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_desc.nonfinite is %d, not in [0, 2]", desc.nonfinite);
    if (desc.masters != DSOPT_MASTERS_PER_TENSOR && desc.masters != DSOPT_MASTERS_FLAT)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_desc.masters is %d, not 0 or 1", desc.masters);
    require(not_negative(desc.max_norm), "dsopt_optimizer_desc.max_norm", desc.max_norm, "finite and not negative");
    require(is_max_value(desc.max_value), "dsopt_optimizer_desc.max_value", desc.max_value, kMaxValueRange);
    require(desc.skip_budget >= 0, "dsopt_optimizer_desc.skip_budget", desc.skip_budget, "not negative");
    const bool no_master = desc.flags & DSOPT_OPTIMIZER_NO_MASTER,
               random = desc.flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
    if (random && !no_master)
        throw Error(DSOPT_ERR_UNSUPPORTED, "STOCHASTIC_ROUNDING has no effect with masters: it needs NO_MASTER");
    if (random && desc.compat != DSOPT_COMPAT_NONE)
        throw Error(DSOPT_ERR_UNSUPPORTED, "the original has no stochastic rounding");
    if ((desc.flags & DSOPT_OPTIMIZER_CHECK_RANKS) && !with_.data && !with_.node)
        throw Error(DSOPT_ERR_UNSUPPORTED, "CHECK_RANKS has no effect without dsopt_optimizer_desc.data");
    if (!random && desc.seed != 0)
        throw Error(DSOPT_ERR_UNSUPPORTED, "dsopt_optimizer_desc.seed has no effect without STOCHASTIC_ROUNDING");
    if (no_master && desc.masters != DSOPT_MASTERS_PER_TENSOR)
        throw Error(DSOPT_ERR_UNSUPPORTED, "dsopt_optimizer_desc.masters has no effect with NO_MASTER");
    if (desc.compat != DSOPT_COMPAT_NONE && with_.scaler && with_.scaler->rules().hysteresis > 1)
        throw Error(DSOPT_ERR_UNSUPPORTED,
                    "the original's wrappers ignore hysteresis: a scaler with one needs standard mode");
    if (check_node(with_.data.get(), with_.node.get(), desc.compat) == nullptr) with_.node.reset();
    for (const auto &comm : with_.experts) experts_.push_back(comm.get());
    if (with_.scaler) scaler_ticket_ = with_.scaler->attach(); // last: nothing after it may throw
}

Optimizer::~Optimizer() {
    if (with_.scaler) with_.scaler->detach(scaler_ticket_);
    // Before memory goes, which waits for the device: their last owner ends what a peer that is gone holds up there.
    experts_.clear();
    for (auto *comm : {&with_.data, &with_.model, &with_.node}) comm->reset();
    with_.experts.clear();
}

/// One parameter as registered, checked by itself. `state` and `first_leaf` are still to be filled in.
Param Optimizer::make_param(const dsopt_param &given, int64_t index, int32_t group) const {
    Param param{};
    param.name = param_name(given, index);
    const Label label{"parameter", param.name.c_str()};
    check_float_tensor(given.tensor, label);
    constexpr int32_t known = DSOPT_PARAM_MODEL_PARALLEL | DSOPT_PARAM_REPLICATED | DSOPT_PARAM_MASKED;
    if (given.flags & ~known)
        throw Error(DSOPT_ERR_ARGUMENT, "parameter '%s' has unknown flags 0x%x", label.name, given.flags);
    if (given.expert < 0 || given.expert > desc_.expert_count)
        throw Error(DSOPT_ERR_ARGUMENT, "parameter '%s' has expert comm %d of %d", label.name, given.expert,
                    desc_.expert_count);
    const bool random = desc_.flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING,
               no_master = desc_.flags & DSOPT_OPTIMIZER_NO_MASTER;
    if (given.offset < 0 || (given.offset != 0 && !random))
        throw Error(DSOPT_ERR_UNSUPPORTED, "parameter '%s' has offset %lld: only stochastic rounding has a use for one",
                    label.name, ll(given.offset));
    if (random && given.tensor.dtype == DSOPT_DTYPE_F16)
        throw Error(DSOPT_ERR_UNSUPPORTED, "parameter '%s' is F16: stochastic rounding is for BF16", label.name);
    param.random_key = desc_.seed;
    for (const char c : param.name) param.random_key = mix64(param.random_key ^ uint8_t(c)) + 1;
    param.dims = param_dims(given, label.name);
    param.data = given.tensor.data;
    param.numel = given.tensor.numel;
    param.dtype = given.tensor.dtype;
    param.group = group;
    param.offset = given.offset;
    param.flags = given.flags;
    param.expert = given.expert;
    param.has_master = param.dtype != DSOPT_DTYPE_F32 && !no_master;
    return param;
}

/// Its state tensors, in the order of the table in dsopt.h.
void Optimizer::add_param_state(const Param &param, int64_t index, const dsopt_group &group, StateTable &state) const {
    const bool no_master = desc_.flags & DSOPT_OPTIMIZER_NO_MASTER;
    const auto add = [&](StateKind kind, int32_t dtype, int32_t flags, const MomentInfo *moment = nullptr) {
        state.add({kind, index, dtype, flags, param.numel, nullptr, moment});
    };
    if (param.has_master) add(StateKind::master, DSOPT_DTYPE_F32, DSOPT_STATE_FROM_PARAM);
    // The original keeps moments in the dtype of what it updates; halves lose the second moment there.
    const int32_t type = desc_.compat == DSOPT_COMPAT_DEEPSPEED && no_master ? param.dtype : DSOPT_DTYPE_F32;
    const MomentList &moments = moments_of(group);
    for (int k = 0; k < moments.count; ++k) add(kMomentKinds[k], type, 0, &moments.at[k]);
    if (desc_.flags & DSOPT_OPTIMIZER_ACCUMULATE) add(StateKind::grad_accum, DSOPT_DTYPE_F32, 0);
    OneBit::add_param_state(param, index, group, desc_, state);
}

/// The state tensors of the whole optimizer, in the order of the table in dsopt.h.
void Optimizer::add_own_state(const OneBit *onebit, const std::vector<dsopt_group> &groups, int64_t params,
                              StateTable &state) const {
    const auto add = [&](StateKind kind, int32_t dtype, int64_t numel, void *data = nullptr) {
        state.add({kind, StateTable::kOptimizer, dtype, 0, numel, data});
    };
    if (onebit != nullptr) onebit->add_state(int64_t(groups.size()), params, state);
    if (with_.scaler) {
        add(StateKind::loss_scale, DSOPT_DTYPE_F32, 1, with_.scaler->scale());
        add(StateKind::scaler, DSOPT_DTYPE_I32, sizeof(ScalerState) / 4, with_.scaler->state());
    }
    if (std::any_of(groups.begin(), groups.end(), has_trust)) add(StateKind::trust_ratio, DSOPT_DTYPE_F32, params);
    add(StateKind::step, DSOPT_DTYPE_I32, params);
}

void Optimizer::add_group(const dsopt_group &group, const dsopt_param *params, int64_t count) {
    check_group(group, desc_.compat != DSOPT_COMPAT_NONE);
    std::vector<dsopt_group> groups = groups_;
    groups.push_back(group);
    grow(std::move(groups), params, count, false);
}
void Optimizer::add_params(const dsopt_param *params, int64_t count) {
    if (groups_.empty()) throw Error(DSOPT_ERR_STATE, "the optimizer has no groups yet");
    grow(groups_, params, count, true);
}

/// The registered parameters with those of the call behind them. `named_groups`: parameters say to which of the groups
/// they go; else all of them go to the last one.
std::vector<Param> Optimizer::with_params(const std::vector<dsopt_group> &groups, const dsopt_param *added,
                                          int64_t count, bool named_groups) const {
    if (count < 0) throw Error(DSOPT_ERR_ARGUMENT, "count of parameters is %lld", ll(count));
    if (count > 0 && added == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "params is NULL, count is %lld", ll(count));
    if (count > INT32_MAX - int64_t(params_.size()))
        throw Error(DSOPT_ERR_SHAPE, "%zu and %lld parameters are more than 2^31", params_.size(), ll(count));
    const bool compat = desc_.compat != DSOPT_COMPAT_NONE;
    // The original's wrappers step once when they are made, with all that a group has then.
    if (named_groups && count != 0 && compat && !state_list_.empty())
        throw Error(DSOPT_ERR_STATE, "in compat mode parameters come before the state is made: add a group for '%s'",
                    param_name(added[0], int64_t(params_.size())).c_str());
    std::vector<Param> params = params_;
    params.reserve(params.size() + size_t(count));
    std::unordered_set<std::string> names;
    std::vector<bool> used(groups.size()); // of the original, whose groups' parameters follow one another
    for (const Param &param : params) {
        names.insert(param.name);
        used[size_t(param.group)] = true;
    }
    for (int64_t i = 0; i < count; ++i) {
        const int64_t index = int64_t(params.size());
        const int32_t group = named_groups ? added[i].group : int32_t(groups.size()) - 1;
        if (!named_groups && added[i].group != 0)
            throw Error(DSOPT_ERR_ARGUMENT,
                        "dsopt_param.group of parameter %lld is %d: in dsopt_optimizer_add_group it must be 0",
                        ll(index), added[i].group);
        if (group < 0 || size_t(group) >= groups.size())
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_param.group of parameter %lld is %d, there are %zu groups",
                        ll(index), group, groups.size());
        Param param = make_param(added[i], index, group);
        if (!names.insert(param.name).second)
            throw Error(DSOPT_ERR_ARGUMENT, "two parameters are called '%s'", param.name.c_str());
        if (compat && used[size_t(group)] && params.back().group != group)
            throw Error(DSOPT_ERR_UNSUPPORTED,
                        "parameter '%s' goes to group %d, whose others do not stand before it: in compat mode the "
                        "parameters of a group follow one another",
                        param.name.c_str(), group);
        used[size_t(group)] = true;
        param.first_leaf = index == 0 ? 0 : params.back().first_leaf + leaves_of(params.back().numel);
        // Each size is legal; their sums must be, too, in bytes of all state and workspace.
        if (param.first_leaf + leaves_of(param.numel) > (int64_t(1) << 44))
            throw Error(DSOPT_ERR_SHAPE, "with parameter '%s' the optimizer has more than 2^56 elements",
                        param.name.c_str());
        params.push_back(std::move(param));
    }
    return params;
}

/// The 1-bit family's part for these groups and parameters; NULL without one of its groups.
std::unique_ptr<OneBit> Optimizer::make_onebit(const std::vector<dsopt_group> &groups,
                                               const std::vector<Param> &params) const {
    if (std::none_of(groups.begin(), groups.end(), [](const auto &g) { return is_onebit(g.algorithm); })) {
        if (desc_.flags & (DSOPT_OPTIMIZER_AVERAGES | DSOPT_OPTIMIZER_MOMENTUM_BITS))
            throw Error(DSOPT_ERR_UNSUPPORTED, "%s is for the 1-bit family, whose first group comes first",
                        desc_.flags & DSOPT_OPTIMIZER_AVERAGES ? "DSOPT_OPTIMIZER_AVERAGES"
                                                               : "DSOPT_OPTIMIZER_MOMENTUM_BITS");
        return nullptr;
    }
    if (desc_.flags & DSOPT_OPTIMIZER_REPORT_NORMS)
        throw Error(DSOPT_ERR_UNSUPPORTED, "REPORT_NORMS is not there for the 1-bit family");
    auto onebit = std::make_unique<OneBit>(*context_, groups, params, desc_, data_rank());
    const StateEntry *const schedule = state_.find(StateKind::schedule);
    if (schedule == nullptr || schedule->data == nullptr) return onebit;
    const auto joins = [&](const Param &param) { return goes_into_exchanges(groups[size_t(param.group)]); };
    const auto first = std::find_if(params.begin() + int64_t(params_.size()), params.end(), joins);
    if (first != params.end() && onebit_->read_schedule(schedule->data, true, nullptr).frozen)
        throw Error(DSOPT_ERR_STATE, "the variance is frozen: '%s' would have none, and never move",
                    first->name.c_str());
    return onebit;
}

/// What has one element per parameter is copied into something longer. Returns the memory.
std::vector<Memory> Optimizer::carry_state(const std::vector<StateEntry> &old, StateTable &state) const {
    const Device &device = context_->device();
    std::vector<Memory> memory;
    for (const StateEntry &entry : old) {
        const int64_t slot = state.slot(StateTable::kOptimizer, entry.kind);
        if (entry.data == nullptr || slot < 0 || !entry.carried()) continue;
        StateEntry &longer = state[size_t(slot)];
        memory.emplace_back(context_, std::max<size_t>(longer.bytes(), 1), nullptr);
        longer.data = memory.back().data();
        device.clear(longer.data, longer.bytes(), nullptr);
        device.copy(longer.data, entry.data, entry.bytes());
    }
    device.synchronize();
    return memory;
}

void Optimizer::grow(std::vector<dsopt_group> groups, const dsopt_param *added, int64_t count, bool named_groups) {
    // Everything is built beside the live lists and swapped in at the end, so a failure changes nothing.
    std::vector<Param> params = with_params(groups, added, count, named_groups);
    StateTable state = state_;
    const std::vector<StateEntry> own = state.take_optimizer(); // these follow the parameters' and grow with them
    for (size_t i = params_.size(); i < params.size(); ++i)
        add_param_state(params[i], int64_t(i), groups[size_t(params[i].group)], state);
    std::vector<Interval> intervals;
    for (const Param &param : params)
        intervals.push_back(interval_of({param.data, param.numel, param.dtype, 0}, {"parameter", param.name.c_str()}));
    for (const StateEntry &entry : state)
        if (entry.data != nullptr)
            intervals.push_back(interval_of(entry.tensor(), {entry.name(), params[size_t(entry.param)].name.c_str()}));
    check_overlap(intervals);
    std::unique_ptr<OneBit> onebit = make_onebit(groups, params);
    add_own_state(onebit.get(), groups, int64_t(params.size()), state);
    settle_momentum(); // its rows are those of the list as it was
    std::vector<Memory> memory = carry_state(own, state);
    memory_.reserve(memory_.size() + memory.size());

    groups_.swap(groups);
    params_.swap(params);
    state_.swap(state);
    onebit_ = std::move(onebit);
    for (Memory &block : memory) memory_.push_back(std::move(block));
    workspace_ = Memory();
    cache_.reset(); // it describes that
    lists_compared_ = false;
    state_list_.clear();
}

void Optimizer::restore(std::vector<dsopt_group> groups, double max_norm, double max_value, int64_t calls) {
    groups_.swap(groups);
    if (onebit_) onebit_->follow(groups_);
    desc_.max_norm = max_norm;
    desc_.max_value = max_value;
    calls_ = calls;
    state_changed();
}

// ------------------------------------------------------------------------------------------------ hyper-parameters
namespace {

bool is_optimizer_key(int32_t key) {
    return key == DSOPT_KEY_MAX_NORM || key == DSOPT_KEY_MAX_VALUE || key == DSOPT_KEY_SKIP_BUDGET ||
           key == DSOPT_KEY_CALLS;
}

dsopt_group changed_group(dsopt_group group, int32_t key, double value) {
    const auto set_flag = [&](int32_t flag, bool on) {
        if (value != 0 && value != 1) throw Error(DSOPT_ERR_ARGUMENT, "key %d takes 0 or 1, not %g", key, value);
        group.flags = on ? group.flags | flag : group.flags & ~flag;
    };
    const RuleInfo &info = info_of(group.algorithm);
    if (const GroupField *const field = find_field(key))
        group.*field->value = value;
    else if (const GroupFlag *const flag = find_flag(key))
        set_flag(flag->flag, value == 1);
    else if (key == DSOPT_KEY_BIAS_CORRECTION && !(info.fields & kBiasCorrection)) {
        if (value != 0) throw Error(DSOPT_ERR_UNSUPPORTED, "%s has no bias correction", info.name);
    } else if (key == DSOPT_KEY_BIAS_CORRECTION)
        set_flag(DSOPT_GROUP_NO_BIAS_CORRECTION, value == 0);
    else if (key == DSOPT_KEY_FREEZE_STEP && is_onebit(group.algorithm)) {
        if (!(value >= 1 && value < INT32_MAX && std::floor(value) == value))
            throw Error(DSOPT_ERR_ARGUMENT, "freeze_step is %g, must be a whole number in [1, 2^31 - 1)", value);
        group.freeze_step = int64_t(value);
    } else if (key == DSOPT_KEY_FREEZE_STEP)
        throw Error(DSOPT_ERR_UNSUPPORTED, "freeze_step has an effect in the 1-bit family only");
    else if (key == DSOPT_KEY_ALGORITHM)
        throw Error(DSOPT_ERR_UNSUPPORTED, "the algorithm of a group cannot change");
    else
        throw Error(DSOPT_ERR_ARGUMENT, "key %d is no hyper-parameter", key);
    return group;
}

} // namespace

void Optimizer::set(int32_t group, int32_t key, double value) {
    if (is_optimizer_key(key)) {
        if (group != DSOPT_ALL_GROUPS)
            throw Error(DSOPT_ERR_ARGUMENT, "key %d is of the optimizer: group must be DSOPT_ALL_GROUPS, not %d", key,
                        group);
        const bool whole = value >= 0 && std::floor(value) == value;
        if (key == DSOPT_KEY_MAX_NORM) {
            require(not_negative(value), "max_norm", value, "finite and not negative");
            desc_.max_norm = value;
        } else if (key == DSOPT_KEY_MAX_VALUE) {
            require(is_max_value(value), "max_value", value, kMaxValueRange);
            desc_.max_value = value;
        } else if (key == DSOPT_KEY_SKIP_BUDGET) {
            require(whole && value <= INT32_MAX, "skip budget", value, "a whole number in [0, 2^31)");
            desc_.skip_budget = int32_t(value);
            change_outcome([](Outcome &outcome) { outcome.skipped_in_row = 0; });
        } else {
            require(whole && value <= 9007199254740992.0, "calls", value, "a whole number in [0, 2^53]");
            calls_ = int64_t(value);
        }
        return;
    }
    if (group != DSOPT_ALL_GROUPS && (group < 0 || size_t(group) >= groups_.size()))
        throw Error(DSOPT_ERR_ARGUMENT, "group %d of %zu", group, groups_.size());
    if (groups_.empty()) throw Error(DSOPT_ERR_STATE, "the optimizer has no groups yet");
    if (key == DSOPT_KEY_FREEZE_STEP && group != DSOPT_ALL_GROUPS && is_onebit(groups_[size_t(group)].algorithm))
        throw Error(DSOPT_ERR_ARGUMENT, "freeze_step is the same in all groups: use DSOPT_ALL_GROUPS");
    const size_t first = group == DSOPT_ALL_GROUPS ? 0 : size_t(group);
    const size_t last = group == DSOPT_ALL_GROUPS ? groups_.size() : first + 1;
    const auto takes = [&](const dsopt_group &other) { // a group of another algorithm may stand beside the 1-bit family
        return key != DSOPT_KEY_FREEZE_STEP || group != DSOPT_ALL_GROUPS || !onebit_ || is_onebit(other.algorithm);
    };
    for (size_t i = first; i < last; ++i) {
        if (!takes(groups_[i])) continue;
        const dsopt_group changed = changed_group(groups_[i], key, value);
        check_group(changed, desc_.compat != DSOPT_COMPAT_NONE);
        if (const MomentInfo *const moment = first_difference(moments_of(groups_[i]), moments_of(changed)))
            throw Error(DSOPT_ERR_UNSUPPORTED,
                        "key %d of group %zu cannot become %g: state tensor %s is there with one of the values only",
                        key, i, value, moment->name);
    }
    for (size_t i = first; i < last; ++i)
        if (takes(groups_[i])) groups_[i] = changed_group(groups_[i], key, value);
    if (onebit_) onebit_->follow(groups_);
}

double Optimizer::get(int32_t group, int32_t key) const {
    if (is_optimizer_key(key)) {
        if (group != DSOPT_ALL_GROUPS)
            throw Error(DSOPT_ERR_ARGUMENT, "key %d is of the optimizer: group must be DSOPT_ALL_GROUPS, not %d", key,
                        group);
        return key == DSOPT_KEY_MAX_NORM    ? desc_.max_norm
               : key == DSOPT_KEY_MAX_VALUE ? desc_.max_value
               : key == DSOPT_KEY_CALLS     ? double(calls_)
                                            : double(desc_.skip_budget);
    }
    if (groups_.empty()) throw Error(DSOPT_ERR_STATE, "the optimizer has no groups yet");
    const size_t index = group == DSOPT_ALL_GROUPS ? 0 : size_t(group);
    if (group < DSOPT_ALL_GROUPS || index >= groups_.size())
        throw Error(DSOPT_ERR_ARGUMENT, "group %d of %zu", group, groups_.size());
    const dsopt_group &g = groups_[index];
    const RuleInfo &info = info_of(g.algorithm);
    if (const GroupFlag *const flag = find_flag(key)) return (g.flags & flag->flag) != 0;
    switch (key) {
    case DSOPT_KEY_ALGORITHM: return g.algorithm;
    case DSOPT_KEY_BIAS_CORRECTION:
        return (info.fields & kBiasCorrection) && !(g.flags & DSOPT_GROUP_NO_BIAS_CORRECTION);
    case DSOPT_KEY_FREEZE_STEP:
        if (!is_onebit(g.algorithm)) throw Error(DSOPT_ERR_UNSUPPORTED, "group %zu has no freeze_step", index);
        return double(g.freeze_step);
    }
    const GroupField *const field = find_field(key);
    if (field == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "key %d is no hyper-parameter", key);
    if (field->field != 0 && !(info.fields & field->field))
        throw Error(DSOPT_ERR_UNSUPPORTED, "group %zu is %s, which has no %s", index, info.name, field->name);
    return g.*field->value;
}

// ---------------------------------------------------------------------------------------------- gradient accumulation
void Optimizer::accumulate(const dsopt_tensor *grads, int64_t count, void *stream) {
    if (!(desc_.flags & DSOPT_OPTIMIZER_ACCUMULATE))
        throw Error(DSOPT_ERR_UNSUPPORTED, "the optimizer was made without DSOPT_OPTIMIZER_ACCUMULATE");
    if (count != int64_t(params_.size()))
        throw Error(DSOPT_ERR_SHAPE, "the list has %lld gradients, registered are %zu parameters", ll(count),
                    params_.size());
    if (count > 0 && grads == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "the list of gradients is NULL");
    for (size_t i = 0; i < params_.size(); ++i) {
        if (grads[i].data == nullptr) continue;
        const Label label{"gradient of", params_[i].name.c_str()};
        check_float_tensor(grads[i], label);
        check_numel(grads[i], params_[i].numel, label);
    }
    call_list_.reserve(state_.size());
    ensure_state(nullptr, stream);
    call_list_.resize(params_.size());
    for (size_t i = 0; i < params_.size(); ++i)
        call_list_[i] = *state_.find(state_list_.data(), int64_t(i), StateKind::grad_accum);
    context_->device().loops().axpby({}, grads, 1, call_list_.data(), count, context_->parallel(), stream);
    for (size_t i = 0; i < params_.size(); ++i)
        params_[i].accumulated = params_[i].accumulated || grads[i].data != nullptr;
}

std::string Optimizer::accumulated() const {
    std::string digits;
    for (const Param &param : params_) digits += param.accumulated ? '1' : '0';
    return digits;
}
void Optimizer::set_accumulated(const std::string &digits) {
    for (size_t i = 0; i < params_.size() && i < digits.size(); ++i) params_[i].accumulated = digits[i] == '1';
}

} // namespace dsopt
