// SPDX-License-Identifier: Apache-2.0
// Makes the plan of a step from checked lists.
#include "optimizer/group.h"
#include "optimizer/plan_jobs.h"
#include <cmath>

namespace dsopt {

namespace {

/// Returns the policy of a step with these groups.
StepPolicy policy_of(const Optimizer &optimizer, const StepRequest &request, const StepTable &table,
                     const OneBitPlan *onebit) {
    const dsopt_optimizer_desc &desc = optimizer.desc();
    bool reduces = false;
    for (size_t i = 0; i < optimizer.groups().size(); ++i)
        reduces = reduces || passes_of(table.groups[i].rule) == Passes::reduced;
    const Wrapper wrapped = optimizer.wrapper();
    const bool has_scaler = optimizer.attachments().scaler != nullptr && !request.initial;
    const bool inspects = inspects_gradients(optimizer) && !request.initial;
    const bool reports_only = wrapped == Wrapper::fused && !has_scaler && desc.nonfinite == DSOPT_NONFINITE_AUTO;
    return {.wrapper = wrapped,
            .read_gradients = inspects && request.step.grad_norms == nullptr,
            .skip_nonfinite = desc.nonfinite != DSOPT_NONFINITE_APPLY && !reports_only,
            .report_norms = (desc.flags & DSOPT_OPTIMIZER_REPORT_NORMS) != 0,
            .reduces = reduces,
            .stored = optimizer.stored_params() != 0,
            .early = request.stateful && (desc.flags & DSOPT_OPTIMIZER_EARLY_UPDATE) != 0,
            .plain = optimizer.stored_params() != int64_t(optimizer.params().size()) || optimizer.params().empty(),
            // The first call of compat mode is dry: learning rates are 0. NON_FREEZE groups do update moments.
            .dry = onebit != nullptr && onebit->stage == Stage::dry};
}

} // namespace

bool inspects_gradients(const Optimizer &optimizer) {
    const dsopt_optimizer_desc &desc = optimizer.desc();
    bool clips = desc.max_norm > 0;
    for (const dsopt_group &group : optimizer.groups()) clips = clips || group.max_norm > 0;
    // The fused wrapper inspects every gradient; without a scaler it only reports. The unfused wrapper also skips.
    return desc.nonfinite == DSOPT_NONFINITE_SKIP || clips || optimizer.attachments().scaler != nullptr ||
           optimizer.wrapper() != Wrapper::none;
}

StepPlan make_plan(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state,
                   const StepMemory &memory, const StepTable &table, const OneBitPlan *onebit,
                   const MatrixPlan *matrices) {
    const Context &context = optimizer.context();
    const dsopt_optimizer_desc &desc = optimizer.desc();
    const Attachments &with = optimizer.attachments();
    const StateTable &entries = optimizer.state();
    const StepShape &shape = optimizer.sizes().shape;
    const dsopt_step &step = request.step;
    // 2^31 leaves are 2^43 elements: more than any memory holds.
    if (shape.leaves > INT32_MAX)
        throw Error(DSOPT_ERR_SHAPE, "the list has %lld leaves, more than 2^31", ll(shape.leaves));
    plan_tables(optimizer, request, state, memory.mean, onebit, table);
    // In the stages that exchange. Such plans are never reused.
    const bool has_slice =
        table.slice_jobs != nullptr && (onebit->stage == Stage::exchange || onebit->stage == Stage::sync);
    if (has_slice) plan_slice_jobs(optimizer, request, *onebit, table);
    const bool compressed = onebit != nullptr && onebit->stage != Stage::full;
    PlannedScaler scaler{};
    if (with.scaler != nullptr && !request.initial)
        scaler = {entries.data<float>(state, StateKind::loss_scale),
                  entries.data<ScalerState>(state, StateKind::scaler), with.scaler->rules()};
    return {
        .jobs = table.jobs,
        .slice_jobs = has_slice ? table.slice_jobs : nullptr,
        .count = shape.tensors,
        .groups = table.groups,
        .group_count = shape.groups,
        .flags = request.flags,
        .policy = policy_of(optimizer, request, table, onebit),
        .limits = {request.initial ? 0.0 : desc.max_norm, desc.max_value > 0 ? float(desc.max_value) : INFINITY},
        .caller = {step.lr, step.hyper, step.grad_scale, step.grad_norms, step.skip},
        .scaler = scaler,
        .step = entries.data<int32_t>(state, StateKind::step),
        .onebit = onebit,
        .matrices = matrices,
        .trust_ratio = entries.data<float>(state, StateKind::trust_ratio),
        .report = step.report,
        .outcome = memory.outcome,
        .execution = {step.stream, context.parallel(step.parallel_for, step.parallel_user), context.chunk(),
                      memory.device_workspace, shape, nullptr, (desc.flags & DSOPT_OPTIMIZER_TIMING) != 0,
                      request.reuse},
        .control = memory.control,
        .scalars = memory.scalars,
        .divisors = memory.divisors,
        .norms = {memory.norms, shape.groups, 1 + int64_t(request.initial ? 0 : with.experts.size())},
        .leaf = {memory.sums_a, memory.sums_b, memory.bad},
        .visited = optimizer.shards() ? optimizer.parts()->leaves() : shape.leaves,
        .inspected = has_slice            ? optimizer.parts()->slice_leaves()
                     : optimizer.shards() ? optimizer.parts()->inspected_leaves()
                                          : shape.leaves,
        .shards = {memory.shards, optimizer.trust_slots(), compressed ? optimizer.onebit()->setup().trust_slots : 0}};
}

StepRows plan_rows(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state,
                   const StepMemory &memory, const StepPlan &plan) {
    const RankParts &parts = *optimizer.parts();
    StepRows rows{.layout = parts.layout(),
                  .sharding = parts.sharding(),
                  .comms = row_comms(optimizer.attachments().data.get(), optimizer.attachments().node.get(),
                                     parts.sharding(), plan.slice_jobs != nullptr),
                  .averaged = nullptr,
                  .averaged_in_node = nullptr,
                  .all_of_node = plan.onebit != nullptr && needs_all_of_node(*plan.onebit),
                  .weights = optimizer.shards() ? memory.weights : nullptr,
                  .buckets = parts.buckets(),
                  .buckets_are_averaged = request.buckets_are_averaged,
                  .lists = memory.pieces,
                  .staging = {memory.staging[0], memory.staging[1]}};
    for (size_t i = 0; i < optimizer.params().size(); ++i) {
        const Param &param = optimizer.params()[i];
        const dsopt_tensor *const gradient = gradient_of(optimizer, request, state, i);
        memory.weights[i] = param.tensor();
        memory.weights[i].data = memory_of_param(optimizer, request, i);
        memory.averaged[i] = memory.averaged_in_node[i] = memory.gradients[i] = {};
        const Averages averages = averages_in(request, optimizer.participation()[i], stage_of(plan.onebit));
        if (averages != Averages::none) {
            const bool accumulated = request.flags & DSOPT_STEP_ACCUMULATED, all = averages == Averages::all;
            (all ? memory.averaged : memory.averaged_in_node)[i] = {
                gradient != nullptr ? gradient->data : nullptr, param.numel,
                accumulated ? int32_t(DSOPT_DTYPE_F32) : request.step.grads[i].dtype, 0};
            (all ? rows.averaged : rows.averaged_in_node) = all ? memory.averaged : memory.averaged_in_node;
        }
        if (gradient != nullptr && (averages != Averages::none || optimizer.shards())) memory.gradients[i] = *gradient;
    }
    return rows;
}

void check_pointers(const Optimizer &optimizer, const StepRequest &request, const StepPlan &plan) {
    const dsopt_tensor *const grads = request.step.grads;
    for (int64_t i = 0; i < plan.count; ++i) {
        const TensorJob &job = plan.jobs[i];
        const MomentList &moments = moments_of(optimizer.groups()[size_t(job.group)]);
        constexpr const char *kNames[] = {"gradient", "weight", "parameter", "output"}; // of SlotIndex
        static_assert(std::size(kNames) == kMoment);
        int64_t numel = optimizer.params()[size_t(i)].numel;
        const auto check = [&](const void *data, const char *role) {
            if (data != nullptr && numel != 0 && !optimizer.context().device().owns(data))
                throw Error(DSOPT_ERR_DEVICE, "%s of '%s' at %p is not memory of this context's device", role,
                            optimizer.params()[size_t(i)].name.c_str(), data);
        };
        // Whole tensors first: the job has this rank's part, and the average in place of the gradient.
        check(grads != nullptr ? grads[i].data : nullptr, kNames[kGrad]);
        check(memory_of_param(optimizer, request, size_t(i)), kNames[kCopy]);
        numel = job.range.numel;
        for (int k = 0; k < kSlots; ++k) check(job.data[k], k < kMoment ? kNames[k] : moments.info[k - kMoment].name);
        for (int k = 0; k < kMoments; ++k) check(job.scale[k], moments.info[k].scale_name);
        check(job.remainder, record_of(StateKind::remainder).name);
    }
}

} // namespace dsopt
