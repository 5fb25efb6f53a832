// SPDX-License-Identifier: Apache-2.0
#include "optimizer/registry.h"
#include "optimizer/group.h"
#include "optimizer/onebit.h"
#include <algorithm>

namespace dsopt {

void Registry::truncate(const Mark &mark) noexcept {
    for (size_t i = mark.params; i < params.size(); ++i) {
        if (memory) memory->remove(params[i].tensor());
        names.erase(params[i].name);
    }
    params.erase(params.begin() + int64_t(mark.params), params.end());
    groups.erase(groups.begin() + int64_t(mark.groups), groups.end());
    wrapper = mark.wrapper;
    trust_slots = mark.trust_slots;
    stored_params = mark.stored_params;
    family = mark.family;
    state.truncate(int64_t(mark.params));
    for (const StateEntry &entry : mark.of_optimizer) state.add(entry); // no allocation: the capacity is there
}

void Registry::add(const dsopt_group *group, const dsopt_param *given, int64_t count, const dsopt_optimizer_desc &desc,
                   bool shares_trust) {
    const size_t first_new = params.size();
    if (!memory) memory = map_memory(nullptr, nullptr);
    if (group != nullptr) groups.push_back(*group);
    add_params(given, count, group == nullptr, desc, shares_trust);
    family = find_onebit(first_new, desc);
    state.truncate(int64_t(first_new));
    for (size_t i = first_new; i < params.size(); ++i) add_param_state(int64_t(i), desc);
}

void Registry::add_params(const dsopt_param *given, int64_t count, bool named_groups, const dsopt_optimizer_desc &desc,
                          bool shares_trust) {
    if (count < 0) throw Error(DSOPT_ERR_ARGUMENT, "count of parameters is %lld", ll(count));
    if (count > 0 && given == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "params is NULL, count is %lld", ll(count));
    if (count > INT32_MAX - int64_t(params.size()))
        throw Error(DSOPT_ERR_SHAPE, "%zu and %lld parameters are more than 2^31", params.size(), ll(count));
    const bool compat = desc.compat != DSOPT_COMPAT_NONE;
    std::vector<bool> used(compat && named_groups ? groups.size() : 0); // the original's groups are contiguous
    if (!used.empty())
        for (const Param &param : params) used[size_t(param.group)] = true;
    for (int64_t i = 0; i < count; ++i) {
        const auto index = int64_t(params.size());
        const int32_t group = named_groups ? given[i].group : int32_t(groups.size()) - 1;
        if (!named_groups && given[i].group != 0)
            throw Error(DSOPT_ERR_ARGUMENT,
                        "dsopt_param.group of parameter %lld is %d: in dsopt_optimizer_add_group it must be 0",
                        ll(index), given[i].group);
        if (group < 0 || size_t(group) >= groups.size())
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_param.group of parameter %lld is %d, there are %zu groups",
                        ll(index), group, groups.size());
        Param param = make_param(given[i], index, group, groups[size_t(group)], desc);
        if (names.contains(param.name))
            throw Error(DSOPT_ERR_ARGUMENT, "two parameters are called '%s'", param.name.c_str());
        memory->check(param.tensor(), param.label());
        // The original's wrappers take a step when they are constructed, with the parameters that a group has then.
        if (named_groups && compat && state.is_complete())
            throw Error(DSOPT_ERR_STATE,
                        "in compat mode parameters come before the state is made: add a group for '%s'",
                        param.name.c_str());
        if (!used.empty()) {
            if (used[size_t(group)] && params.back().group != group)
                check_options<At::param>(facts_of(desc) | Facts{facts::apart},
                                         {.name = param.name.c_str(), .number = group});
            used[size_t(group)] = true;
        }
        param.first_leaf = index == 0 ? 0 : params.back().leaves().end();
        // Each size is legal on its own. This limit keeps the total bytes of state and workspace from overflowing.
        if (param.leaves().end() > (int64_t(1) << 44))
            throw Error(DSOPT_ERR_SHAPE, "with parameter '%s' the optimizer has more than 2^56 elements",
                        param.name.c_str());
        const bool shared =
            shares_trust && (param.flags & DSOPT_PARAM_MODEL_PARALLEL) && has_trust_ratio(groups[size_t(group)]);
        param.trust_slot = shared ? trust_slots++ : -1;
        if (param.has_master && compat)
            wrapper = desc.masters == DSOPT_MASTERS_FLAT ? Wrapper::fused : Wrapper::unfused;
        stored_params += param.stored();
        params.push_back(std::move(param)); // first, so that truncate() reverts the rest if it fails
        const auto name = names.insert(params.back().name).first;
        memory->add(params.back().tensor(), {"parameter", name->c_str()});
    }
}

/// Adds the parameter's state tensors, in the order of the table in dsopt.h.
void Registry::add_param_state(int64_t index, const dsopt_optimizer_desc &desc) {
    const Param &param = params[size_t(index)];
    const dsopt_group &group = groups[size_t(param.group)];
    if (param.has_master) state.add(param.has_remainder ? StateKind::remainder : StateKind::master, index, param.numel);
    // The original stores moments in the dtype of the tensor that it updates. In fp16 the second moment underflows.
    const bool as_param = desc.compat != DSOPT_COMPAT_NONE && (desc.flags & DSOPT_OPTIMIZER_NO_MASTER);
    const MomentList &moments = moments_of(group);
    for (int k = 0; k < moments.count; ++k) {
        const auto add = [&](StateKind kind, int64_t numel, int32_t dtype) {
            state.add({whole_range(numel), kind, index, dtype, 0, nullptr, &moments.info[k]});
        };
        add(moment_kind(k), param.numel, as_param ? param.dtype : dtype_of(param.formats[k]));
        if (has_scales(param.formats[k])) add(scale_kind(k), blocks_of(param.numel), DSOPT_DTYPE_F32);
    }
    if (desc.flags & DSOPT_OPTIMIZER_ACCUMULATE) {
        const int32_t local = desc.flags & DSOPT_OPTIMIZER_AVERAGES ? DSOPT_STATE_RANK_LOCAL : 0;
        state.add({whole_range(param.numel), StateKind::grad_accum, index, DSOPT_DTYPE_F32, local});
    }
    OneBit::add_param_state(param, index, group, desc, state);
}

/// Adds the state tensors of the whole optimizer, in the order of the table in dsopt.h.
void Registry::add_optimizer_state(const OneBit *onebit, const Scaler *scaler) {
    const auto count = int64_t(params.size());
    const auto add = [&](StateKind kind, int64_t numel, void *data = nullptr) {
        state.add(kind, StateTable::kOptimizer, numel, data);
    };
    if (onebit != nullptr) onebit->add_state(int64_t(groups.size()), count, state);
    if (scaler != nullptr) {
        add(StateKind::loss_scale, 1, scaler->scale());
        add(StateKind::scaler, sizeof(ScalerState) / 4, scaler->state());
    }
    const auto with_trust = [](const dsopt_group &group) { return has_trust_ratio(group); };
    if (std::any_of(groups.begin(), groups.end(), with_trust)) add(StateKind::trust_ratio, count);
    add(StateKind::step, count);
}

/// Returns the index of the first group of the 1-bit family, or -1. Throws if the last group, the new parameters or an
/// option cannot be combined with the family.
int64_t Registry::find_onebit(size_t first_new, const dsopt_optimizer_desc &desc) const {
    const bool joins = is_onebit(groups.back().algorithm);
    const int64_t first = family < 0 && joins ? int64_t(groups.size()) - 1 : family;
    Facts all = facts_of(desc) | algorithm_fact(groups.back().algorithm);
    // Earlier groups were checked against the family if it has a group: adding groups takes time that is linear.
    if (family >= 0)
        all = all | algorithm_fact(groups[size_t(family)].algorithm);
    else if (joins)
        for (const dsopt_group &group : groups) all = all | algorithm_fact(group.algorithm);
    // Only compat mode refuses them. Earlier parameters were checked if there was a group of the family.
    for (size_t i = family >= 0 ? first_new : 0; first >= 0 && all.has(facts::compat) && i < params.size(); ++i)
        all.add(facts::other_algorithm, !is_onebit(groups[size_t(params[i].group)].algorithm));
    check_options<At::groups>(all);
    if (first >= 0 && joins) check_family(groups[size_t(first)], groups.back());
    return first;
}

MemoryMap Registry::map_memory(const dsopt_tensor *in_place_of_params, const dsopt_tensor *in_place_of_state) const {
    MemoryMap map;
    const auto name_of = [&](int64_t param) { return names.find(params[size_t(param)].name)->c_str(); };
    for (size_t i = 0; i < params.size(); ++i)
        map.add(in_place_of_params != nullptr ? in_place_of_params[i] : params[i].tensor(),
                {"parameter", name_of(int64_t(i))});
    for (size_t i = 0; i < state.size(); ++i)
        map.add(in_place_of_state != nullptr ? in_place_of_state[i] : state[i].tensor(),
                {state[i].name(), state[i].param < 0 ? "the optimizer" : name_of(state[i].param)});
    return map;
}

} // namespace dsopt
