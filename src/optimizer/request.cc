// SPDX-License-Identifier: Apache-2.0
// Checks of a call's arguments, before anything is enqueued.
#include "base/struct_io.h"
#include "optimizer/plan.h"
#include "rules/options.h"
#include <algorithm>

namespace dsopt {

uint32_t flags_of(const dsopt_step &step) {
    uint32_t flags = step.flags;
    if (flags & DSOPT_STEP_DELTA) flags |= DSOPT_STEP_OUT_ONLY;
    if (flags & DSOPT_STEP_ACCUMULATED) flags |= DSOPT_STEP_ZERO_GRADS;
    return flags;
}

namespace {

/// True if the call names values that an update before it could not know.
bool has_values(const dsopt_step &step) {
    const void *const values[] = {step.params, step.state,      step.out,  step.lr,
                                  step.hyper,  step.grad_scale, step.skip, step.grad_norms};
    return std::any_of(std::begin(values), std::end(values), [](const void *value) { return value != nullptr; });
}

Facts step_facts(const Optimizer &optimizer, const dsopt_step &step, bool functional) {
    const uint32_t flags = flags_of(step);
    const bool is_empty = step.count == 0; // an empty list needs no memory
    const auto has_matrices = [](const dsopt_group &group) { return is_matrix_rule(group.algorithm); };
    Facts all;
    const bool early = !functional && (optimizer.desc().flags & DSOPT_OPTIMIZER_EARLY_UPDATE);
    all.add(facts::split_matrices, optimizer.desc().flags & DSOPT_OPTIMIZER_SPLIT_MATRICES)
        .add(facts::early_update, early)
        .add(facts::functional, functional)
        .add(facts::accumulated, flags & DSOPT_STEP_ACCUMULATED)
        .add(facts::out, step.out != nullptr || (is_empty && (flags & DSOPT_STEP_OUT_ONLY)))
        .add(facts::out_only, flags & DSOPT_STEP_OUT_ONLY)
        .add(facts::no_nan, flags & DSOPT_STEP_NO_NAN)
        .add(facts::lr, step.lr != nullptr)
        .add(facts::parallel_user, step.parallel_user != nullptr);
    constexpr Facts options = options_of(At::step);
    if (!all.has_any(options)) return all; // most steps: what follows is what options need or exclude
    all.add(facts::grads, step.grads != nullptr)
        .add(facts::params, step.params != nullptr || is_empty)
        .add(facts::delta, flags & DSOPT_STEP_DELTA)
        .add(facts::report, step.report != nullptr)
        .add(facts::hyper, step.hyper != nullptr)
        .add(facts::parallel_for, step.parallel_for != nullptr)
        .add(facts::call_values, has_values(step));
    if (all.has(facts::split_matrices))
        all.add(facts::muon, std::any_of(optimizer.groups().begin(), optimizer.groups().end(), has_matrices));
    all = all | facts_of(optimizer.desc());
    return functional ? all.without({facts::early_update}) : all;
}

} // namespace

void check_step(const Optimizer &optimizer, const dsopt_step &step, bool functional) {
    check_groups(optimizer);
    const std::vector<Param> &params = optimizer.params();
    constexpr int32_t known =
        DSOPT_STEP_ZERO_GRADS | DSOPT_STEP_OUT_ONLY | DSOPT_STEP_DELTA | DSOPT_STEP_ACCUMULATED | DSOPT_STEP_NO_NAN;
    const bool accumulated = step.flags & DSOPT_STEP_ACCUMULATED;
    if (step.flags & ~known) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.flags has unknown bits: 0x%x", step.flags);
    if (step.reserved != 0) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.reserved is %u, must be 0", step.reserved);
    if (step.count != int64_t(params.size()))
        throw Error(DSOPT_ERR_SHAPE, "dsopt_step.count is %lld, registered are %zu parameters", ll(step.count),
                    params.size());
    if (step.count > 0 && !accumulated) not_null(step.grads, "dsopt_step.grads");
    const Facts all = step_facts(optimizer, step, functional);
    check_options<At::step>(all);
    const void *const scalars[] = {step.lr, step.hyper, step.grad_scale, step.skip, step.grad_norms, step.report};
    for (const void *scalar : scalars) check_aligned(scalar, 4, "a scalar of dsopt_step");

    const bool wrapped = optimizer.wrapper() != Wrapper::none;
    const uint32_t flags = flags_of(step);
    for (size_t i = 0; i < params.size(); ++i) {
        const Param &param = params[i];
        const char *name = param.name.c_str();
        const bool has_gradient = accumulated ? param.accumulated : step.grads[i].data != nullptr;
        if (has_gradient && !accumulated) check_same_numel(step.grads[i], param, "gradient of");
        const bool averaged = optimizer.participation()[i].is_averaged();
        // It says what the other ranks send.
        if (averaged && optimizer.parts() && !accumulated && !has_gradient)
            check_same_numel(step.grads[i], param, "absent gradient of");
        // An absent gradient counts as zeros if ranks exchange or average it, and 0/1 Adam keeps a copy of every
        // weight. The check is the same in every stage, so that it fails in the first step of a training, not later.
        const bool is_used = has_gradient || wrapped || optimizer.participation()[i].sent || averaged ||
                             optimizer.state().find(StateKind::anchor, int64_t(i)) != nullptr ||
                             optimizer.shards(); // ranks exchange every weight
        if (step.params != nullptr) check_param(step.params[i], param);
        const void *const data = step.params != nullptr ? step.params[i].data : param.data;
        const bool wanted = step.out != nullptr && step.out[i].data != nullptr;
        if (wanted)
            check_same_numel(step.out[i], param, "output of");
        else if ((flags & DSOPT_STEP_OUT_ONLY) && param.numel != 0)
            throw Error(DSOPT_ERR_ARGUMENT, "output of '%s' has no memory: OUT_ONLY and DELTA need every one", name);
        if (flags & DSOPT_STEP_OUT_ONLY) {
            const bool is_local = optimizer.groups()[size_t(param.group)].algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM;
            Facts of_param = all;
            of_param.add(facts::has_master, param.has_master)
                .add(facts::adds_local_steps, is_local && !param.has_master);
            check_options<At::output>(of_param, {.name = name});
        }
        if ((flags & DSOPT_STEP_OUT_ONLY) && wanted && param.has_remainder && step.out[i].dtype != DSOPT_DTYPE_BF16)
            throw Error(DSOPT_ERR_DTYPE,
                        "output of '%s' has dtype %s, must be BF16: it is the upper half of the new master", name,
                        dtype_name(step.out[i].dtype));
        if (data == nullptr && param.numel != 0 && (is_used || wanted))
            throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory: register, bind or pass it", name);
    }
}

} // namespace dsopt
