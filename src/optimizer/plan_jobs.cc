// SPDX-License-Identifier: Apache-2.0
#include "optimizer/plan_jobs.h"
#include "optimizer/group.h"

namespace dsopt {
namespace {

/// Returns an empty slot for NULL.
Slot slot_or_none(const dsopt_tensor *tensor) {
    return tensor != nullptr ? slot_of(*tensor) : Slot{nullptr, Dtype::f32};
}

/// Returns an array from an element on; NULL stays NULL.
void *from_element(void *data, int64_t element, size_t size) {
    return data != nullptr ? static_cast<char *>(data) + size_t(element) * size : nullptr;
}

/// Sets the arrays of a job. Arrays of state have this rank's part only; parameters and gradients are whole.
void set_arrays(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state, float *means,
                Averages averages, size_t i, TensorJob &job) {
    const dsopt_step &step = request.step;
    const Param &param = optimizer.params()[i];
    const auto state_of = [&](StateKind kind) { return optimizer.state().find(state, kind, int64_t(i)); };
    const auto memory_of = [&](StateKind kind) {
        const dsopt_tensor *const tensor = state_of(kind);
        return tensor != nullptr ? tensor->data : nullptr;
    };
    const Range part = optimizer.part_of(i);
    const auto slot_of_part = [&](const Slot &slot) {
        return Slot{from_element(slot.data, part.begin, dtype_size(slot.format)), slot.format};
    };
    const dsopt_tensor *const out = step.out != nullptr && step.out[i].data != nullptr ? &step.out[i] : nullptr;
    const bool copies = param.has_master && !(request.flags & DSOPT_STEP_OUT_ONLY) && !request.initial;
    const Slot param_slot = slot_of_part({memory_of_param(optimizer, request, i), Dtype(param.dtype)});
    const bool separate = param.has_master && !param.has_remainder;
    if (optimizer.parts() != nullptr && averages != Averages::none) {
        job.set(kGrad, {means + optimizer.parts()->mean(i), Dtype::f32});
        job.zeroes = false;
    } else {
        job.set(kGrad, slot_of_part(slot_or_none(gradient_of(optimizer, request, state, i))));
    }
    job.set(kWeight, separate ? slot_of(*state_of(StateKind::master)) : param_slot);
    job.set(kCopy, {copies && separate ? param_slot.data : nullptr, param_slot.format});
    job.set(kOut, slot_or_none(out));
    job.remainder = static_cast<uint16_t *>(memory_of(StateKind::remainder));
    for (int k = 0; k < kMoments; ++k) {
        const dsopt_tensor *const moment = state_of(moment_kind(k));
        // In compat mode moments may have the dtype of the parameter.
        const Format format = moment == nullptr                 ? Format::f32
                              : param.formats[k] != Format::f32 ? param.formats[k]
                                                                : Format(moment->dtype);
        job.data[kMoment + k] = moment != nullptr ? moment->data : nullptr;
        job.formats[kMoment + k] = format;
        job.scale[k] = static_cast<float *>(memory_of(scale_kind(k)));
    }
}

/// The original's fused Adam has one step counter per group: the counter of the group's last tensor with a gradient. A
/// step advances it once per parameter dtype that is present, in the order f16, bf16, f32, and all tensors of a dtype
/// use the value after the advance for that dtype. With a wrapper the original's group is one fp32 tensor, so every
/// tensor has its own counter.
void assign_group_counters(const std::vector<dsopt_group> &groups, TensorJob *jobs, int64_t count) {
    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
        int32_t last = -1;
        bool present[3] = {};
        const auto type = [&](int64_t i) {
            switch (jobs[i].weight().format) {
            case Dtype::f16: return 0;
            case Dtype::bf16: return 1;
            case Dtype::f32: break;
            }
            return 2;
        };
        for (end = begin; end < count && jobs[end].group == jobs[begin].group; ++end)
            if (jobs[end].present) last = int32_t(end), present[type(end)] = true;
        if (last < 0 || !info_of(groups[size_t(jobs[begin].group)].algorithm).counts_per_group) continue;
        const uint8_t ordinals[] = {1, uint8_t(1 + present[0]), uint8_t(1 + present[0] + present[1])};
        for (int64_t i = begin; i < end; ++i) {
            jobs[i].counter = last;
            jobs[i].ordinal = ordinals[type(i)];
            jobs[i].advance = 0;
        }
        jobs[last].advance = uint8_t(present[0] + present[1] + present[2]);
    }
}

void plan_groups(const std::vector<dsopt_group> &groups, bool compat, Hyper *hypers) {
    for (size_t i = 0; i < groups.size(); ++i) {
        const dsopt_group &g = groups[i];
        Hyper &hyper = hypers[i] = {};
        for (const GroupField &field : kGroupFields)
            if (field.hyper != nullptr) hyper.*field.hyper = g.*field.value;
        hyper.rule = formula_of(g, compat);
        hyper.bias_correction = !(g.flags & DSOPT_GROUP_NO_BIAS_CORRECTION) && !is_onebit(g.algorithm);
        hyper.compat = compat && !is_onebit(g.algorithm);
        hyper.eps_uncorrected = (g.flags & DSOPT_GROUP_EPS_UNCORRECTED) != 0;
    }
}

} // namespace

void plan_job(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state, float *means,
              Stage stage, size_t i, TensorJob &job) {
    const Param &param = optimizer.params()[i];
    const Comm *const model = optimizer.attachments().model.get();
    const Range part = optimizer.part_of(i);
    const bool has_gradient = gradient_of(optimizer, request, state, i) != nullptr;
    // With a wrapper an absent gradient counts as zeros, unless the parameter has no memory yet.
    const bool is_zeros = optimizer.wrapper() != Wrapper::none &&
                          (param.has_master || memory_of_param(optimizer, request, i) != nullptr || param.numel == 0);
    const Participation &participation = optimizer.participation()[i];
    const bool present = has_gradient || is_zeros || (!request.initial && participation.absent_is_zeros(stage));
    const bool sharded = param.flags & DSOPT_PARAM_MODEL_PARALLEL;
    const bool rounds_at_random = optimizer.desc().flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
    job = {.data = {},
           .scale = {},
           .remainder = nullptr,
           .random_key = param.random_key,
           .range = {param.begin + part.begin, part.numel, param.whole},
           .first_leaf = int32_t(param.first_leaf + part.begin / kLeaf),
           .position = int32_t(optimizer.shards() ? optimizer.parts()->position(i) : param.first_leaf),
           .leaves = param.leaves(),
           .group = param.group,
           .expert = param.expert,
           .trust_slot = param.trust_slot,
           .counter = int32_t(i),
           .ordinal = 1,
           .advance = present,
           .owner = present ? participation.owner(stage) : Owner::none,
           .present = present,
           .has_master = param.has_master,
           .in_norm = !(param.flags & DSOPT_PARAM_REPLICATED) && (sharded || model == nullptr || model->rank() == 0),
           .stochastic = rounds_at_random && param.dtype == DSOPT_DTYPE_BF16,
           .zeroes = (request.flags & DSOPT_STEP_ZERO_GRADS) && has_gradient && !optimizer.shards(),
           .formats = {},
           .stored = param.stored()};
    set_arrays(optimizer, request, state, means, averages_in(request, participation, stage), i, job);
}

void set_gradient_address(const Optimizer &optimizer, const dsopt_tensor &gradient, size_t i, TensorJob &job) {
    job.data[kGrad] = from_element(gradient.data, optimizer.part_of(i).begin, dtype_size(gradient.dtype));
}

const dsopt_tensor *gradient_of(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state,
                                size_t i) {
    if (request.flags & DSOPT_STEP_ACCUMULATED)
        return optimizer.params()[i].accumulated ? optimizer.state().find(state, StateKind::grad_accum, int64_t(i))
                                                 : nullptr;
    return !request.initial && request.step.grads[i].data != nullptr ? &request.step.grads[i] : nullptr;
}

void plan_tables(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state, float *means,
                 const OneBitPlan *onebit, const StepTable &table) {
    const dsopt_step &step = request.step;
    if (request.reuse == Reuse::all_but_addresses) {
        const bool averaged = optimizer.parts() != nullptr && (optimizer.desc().flags & DSOPT_OPTIMIZER_AVERAGES);
        for (int64_t i = 0; !averaged && i < step.count; ++i)
            set_gradient_address(optimizer, step.grads[i], size_t(i), table.jobs[i]);
    } else if (request.reuse == Reuse::nothing) {
        for (size_t i = 0; i < optimizer.params().size(); ++i)
            plan_job(optimizer, request, state, means, stage_of(onebit), i, table.jobs[i]);
        plan_groups(optimizer.groups(), optimizer.compat(), table.groups);
        if (optimizer.compat() && optimizer.wrapper() == Wrapper::none)
            assign_group_counters(optimizer.groups(), table.jobs, int64_t(optimizer.params().size()));
    }
}

void plan_slice_jobs(const Optimizer &optimizer, const StepRequest &request, const OneBitPlan &onebit,
                     const StepTable &table) {
    for (size_t i = 0; i < optimizer.params().size(); ++i) {
        const Param &param = optimizer.params()[i];
        const Range slice = optimizer.parts()->slice(i);
        const bool has_slice = averages_in(request, optimizer.participation()[i], onebit.stage) == Averages::in_node &&
                               !needs_all_of_node(onebit); // of the mean
        TensorJob &job = table.slice_jobs[i] = table.jobs[i];
        job.range = {param.begin + slice.begin, slice.numel, param.whole};
        job.first_leaf = int32_t(param.first_leaf + slice.begin / kLeaf);
        job.position = int32_t(optimizer.parts()->slice_position(i));
        job.zeroes = false;
        for (int k = 0; k < kSlots; ++k)
            if (k != kGrad || !has_slice)
                job.data[k] = from_element(job.data[k], slice.begin, size_t(size_of(job.formats[k])));
        job.data[kCopy] = job.data[kOut] = nullptr; // no pass over these jobs writes weights to them
    }
}

} // namespace dsopt
