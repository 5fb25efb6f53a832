// SPDX-License-Identifier: Apache-2.0
// From checked lists to the plan of a step.
#include "optimizer/step_parts.h"
#include "rules/group.h"
#include <algorithm>
#include <cmath>

namespace dsopt {
namespace {

/// `state` NULL: the rule has no such moment.
Moment moment_of(const dsopt_tensor *state) {
    return state != nullptr ? Moment{state->data, Dtype(state->dtype), {}} : Moment{nullptr, Dtype::f32, {}};
}

} // namespace

StepShape Optimizer::shape() const {
    const int64_t leaves = params_.empty() ? 0 : params_.back().first_leaf + leaves_of(params_.back().numel);
    return {int64_t(params_.size()), int64_t(groups_.size()), leaves, onebit_ != nullptr,
            onebit_ && onebit_->setup().compresses ? &onebit_->setup().layout : nullptr};
}

Optimizer::Layout Optimizer::layout() const {
    const StepShape shape = this->shape();
    const size_t count = params_.size(), groups = groups_.size(), leaves = size_t(shape.leaves);
    const NormTable norms{nullptr, shape.groups, 1 + desc_.expert_count};
    const Device &device = context_->device();
    size_t at = 0;
    const auto place = [&](size_t bytes) {
        const size_t offset = at;
        at += round_up(bytes);
        return offset;
    };
    Layout l;
    l.shared = place(sizeof(SharedWords));
    l.scalars = place(count * sizeof(Scalars));
    l.divisors = place(groups * sizeof(double));
    l.norms = place(size_t(norms.size_with_lanes()) * sizeof(double));
    l.sums_a = place(leaves * sizeof(double));
    l.sums_b = place(leaves * sizeof(double));
    l.bad = place(leaves * sizeof(int64_t));
    l.factors =
        place(onebit_ && onebit_->setup().rules.algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB ? leaves * sizeof(double) : 0);
    l.shards = place(ShardTable{nullptr, shard_count()}.bytes());
    l.extra = place(device.loops().extra_bytes(shape));
    l.exchange = place(shape.exchange != nullptr ? shape.exchange->workspace_bytes() : 0);
    l.mean = place(onebit_ ? size_t(onebit_->setup().mean_numel + onebit_->setup().mean_scratch) * sizeof(float) : 0);
    const size_t workspace = at;
    if (!device.is_host()) at = 0;
    l.table = place(StepTable::bytes(shape));
    l.lists = place(onebit_ && onebit_->setup().mean_numel != 0 ? 3 * count * sizeof(dsopt_tensor) : 0);
    l.host_norms = place(device.is_host() ? 0 : size_t(norms.size_with_message()) * sizeof(double));
    l.bytes = device.is_host() ? at : workspace;
    l.host_bytes = at;
    return l;
}

/// Standard mode has one trust ratio a tensor, whichever ranks hold it; the original one a shard.
bool Optimizer::shares_trust() const {
    return desc_.compat == DSOPT_COMPAT_NONE && with_.model && with_.model->ranks() > 1;
}
bool Optimizer::shares_trust(const Param &param) const {
    return (param.flags & DSOPT_PARAM_MODEL_PARALLEL) && has_trust(groups_[size_t(param.group)]);
}
int64_t Optimizer::shard_count() const {
    if (!shares_trust()) return 0;
    return std::count_if(params_.begin(), params_.end(), [&](const Param &param) { return shares_trust(param); });
}

size_t Optimizer::workspace_bytes() const { return with_slack(layout().bytes); }

/// Which of the original's wrappers compat mode stands for.
Wrapper Optimizer::wrapper() const {
    if (desc_.compat != DSOPT_COMPAT_DEEPSPEED) return Wrapper::none;
    for (const Param &param : params_)
        if (param.has_master) return desc_.masters == DSOPT_MASTERS_FLAT ? Wrapper::fused : Wrapper::unfused;
    return Wrapper::none;
}

/// Returns the number of tensors whose trust ratios other model ranks have a part in.
int32_t Optimizer::plan_jobs(const Arguments &arguments, const dsopt_tensor *state, const OneBitPlan *onebit,
                             TensorJob *jobs) const {
    const dsopt_step &step = arguments.step;
    const Wrapper wrapped = wrapper();
    const bool accumulated = arguments.flags & DSOPT_STEP_ACCUMULATED;
    const bool first_model_rank = !with_.model || with_.model->rank() == 0;
    // Where ranks exchange, an absent gradient is one of zeros: all must send the same.
    const bool exchanges = onebit != nullptr && (onebit->stage == Stage::exchange || onebit->stage == Stage::sync);
    const bool shares = shares_trust();
    int32_t slots = 0;
    for (size_t i = 0; i < params_.size(); ++i) {
        const Param &param = params_[i];
        const auto own = [&](StateKind kind) { return state_.find(state, int64_t(i), kind); };
        void *data = arguments.params != nullptr ? arguments.params[i].data : param.data;
        const dsopt_tensor *out =
            arguments.out != nullptr && arguments.out[i].data != nullptr ? &arguments.out[i] : nullptr;
        const bool copies = param.has_master && !(arguments.flags & DSOPT_STEP_OUT_ONLY) && !arguments.initial;
        const dsopt_tensor *grad = nullptr;
        if (accumulated)
            grad = param.accumulated ? own(StateKind::grad_accum) : nullptr;
        else if (!arguments.initial && step.grads[i].data != nullptr)
            grad = &step.grads[i];
        const bool sharded = param.flags & DSOPT_PARAM_MODEL_PARALLEL;
        jobs[i] = {.grad = grad != nullptr ? grad->data : nullptr,
                   .weight = param.has_master ? own(StateKind::master)->data : data,
                   .moment = {moment_of(own(StateKind::first_moment)), moment_of(own(StateKind::second_moment))},
                   .copy = copies ? data : nullptr,
                   .out = out != nullptr ? out->data : nullptr,
                   .numel = param.numel,
                   .first_leaf = param.first_leaf,
                   .offset = param.offset,
                   .random_key = param.random_key,
                   .group = param.group,
                   .expert = param.expert,
                   .trust_slot = shares && shares_trust(param) ? slots++ : -1,
                   .grad_type = grad != nullptr ? Dtype(grad->dtype) : Dtype::f32,
                   .weight_type = param.has_master ? Dtype::f32 : Dtype(param.dtype),
                   .copy_type = Dtype(param.dtype),
                   .out_type = out != nullptr ? Dtype(out->dtype) : Dtype::f32,
                   // A wrapper takes an absent gradient for zeros; what has no memory yet cannot take part even so.
                   .present = grad != nullptr ||
                              (wrapped != Wrapper::none && (param.has_master || data != nullptr || param.numel == 0)) ||
                              (exchanges && onebit->jobs[i].worker >= 0),
                   .has_master = param.has_master,
                   .in_norm = !(param.flags & DSOPT_PARAM_REPLICATED) && (sharded || first_model_rank),
                   .stochastic = (desc_.flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING) && param.dtype == DSOPT_DTYPE_BF16,
                   .onebit = onebit != nullptr && !onebit->jobs[i].averaged,
                   .zeroes = (arguments.flags & DSOPT_STEP_ZERO_GRADS) && grad != nullptr,
                   .reserved = {}};
    }
    return slots;
}

void Optimizer::plan_groups(Hyper *hypers) const {
    const bool compat = desc_.compat == DSOPT_COMPAT_DEEPSPEED;
    for (size_t i = 0; i < groups_.size(); ++i) {
        const dsopt_group &g = groups_[i];
        hypers[i] = {g.lr,
                     g.beta1,
                     g.beta2,
                     g.eps,
                     g.weight_decay,
                     g.max_norm,
                     g.min_trust,
                     g.max_trust,
                     g.momentum,
                     g.dampening,
                     g.lr_decay,
                     formula_of(g, compat),
                     !(g.flags & DSOPT_GROUP_NO_BIAS_CORRECTION) && !is_onebit(g.algorithm),
                     compat && !is_onebit(g.algorithm),
                     (g.flags & DSOPT_GROUP_EPS_UNCORRECTED) != 0,
                     {}};
    }
}

/// Everything except the tables of tensors and groups, which are there.
StepPlan Optimizer::make_plan(const Arguments &arguments, const dsopt_tensor *state, char *workspace,
                              const Layout &place, const StepTable &table, const OfEngine *of_engine) const {
    const dsopt_step &step = arguments.step;
    const auto part = [&]<class T>(size_t offset, T *) { return reinterpret_cast<T *>(workspace + offset); };
    const auto doubles = [&](size_t offset) { return part(offset, static_cast<double *>(nullptr)); };
    SharedWords *const shared = part(place.shared, static_cast<SharedWords *>(nullptr));
    bool clips = desc_.max_norm > 0, has_lamb = false;
    for (size_t i = 0; i < groups_.size(); ++i) {
        clips = clips || table.groups[i].max_norm > 0;
        has_lamb = has_lamb || sweeps_of(table.groups[i].rule) == 2;
    }
    const Wrapper wrapped = wrapper();
    const bool scales = with_.scaler != nullptr && !arguments.initial;
    // The fused wrapper looks at every gradient, but without a scaler it only reports; the other one skips.
    const bool looks =
        (desc_.nonfinite == DSOPT_NONFINITE_SKIP || clips || scales || wrapped != Wrapper::none) && !arguments.initial;
    const bool reports_only = wrapped == Wrapper::fused && !scales && desc_.nonfinite == DSOPT_NONFINITE_AUTO;
    const bool skips = desc_.nonfinite != DSOPT_NONFINITE_APPLY && !reports_only;
    PlannedScaler scaler{};
    if (scales)
        scaler = {static_cast<float *>(state_.find(state, StateKind::loss_scale)->data),
                  static_cast<ScalerState *>(state_.find(state, StateKind::scaler)->data), with_.scaler->rules()};
    return {
        .jobs = table.jobs,
        .count = int64_t(params_.size()),
        .groups = table.groups,
        .group_count = int64_t(groups_.size()),
        .flags = arguments.flags,
        .wrapper = wrapped,
        .read_gradients = looks && step.grad_norms == nullptr,
        .skip_nonfinite = skips,
        .report_norms = (desc_.flags & DSOPT_OPTIMIZER_REPORT_NORMS) != 0,
        .has_lamb = has_lamb,
        .dry = false,
        .limits = {arguments.initial ? 0.0 : desc_.max_norm, desc_.max_value > 0 ? float(desc_.max_value) : INFINITY},
        .given = {step.lr, step.hyper, step.grad_scale, step.grad_norms, step.skip},
        .scaler = scaler,
        .step = static_cast<int32_t *>(state_.find(state, StateKind::step)->data),
        .onebit = nullptr,
        .trust_ratio = has_lamb ? static_cast<float *>(state_.find(state, StateKind::trust_ratio)->data) : nullptr,
        .report = step.report,
        .outcome = of_engine != nullptr ? static_cast<Outcome *>(of_engine->outcome->data()) : &shared->outcome,
        .how = {step.stream, arguments.parallel, context_->chunk(), workspace + place.extra,
                of_engine != nullptr ? cache_.get() : nullptr, (desc_.flags & DSOPT_OPTIMIZER_TIMING) != 0},
        .control = &shared->control,
        .scalars = part(place.scalars, static_cast<Scalars *>(nullptr)),
        .divisors = doubles(place.divisors),
        .norms = {doubles(place.norms), int64_t(groups_.size()), 1 + int64_t(arguments.initial ? 0 : experts_.size())},
        .sums_a = doubles(place.sums_a),
        .sums_b = doubles(place.sums_b),
        .bad = part(place.bad, static_cast<int64_t *>(nullptr)),
        .shards = {part(place.shards, static_cast<ShardSums *>(nullptr)), 0}};
}

void Optimizer::check_pointers(const StepPlan &plan) const {
    for (int64_t i = 0; i < plan.count; ++i) {
        const TensorJob &job = plan.jobs[i];
        const MomentList &moments = moments_of(groups_[size_t(job.group)]);
        const std::pair<const char *, const void *> parts[] = {{"gradient", job.grad},
                                                               {"weight", job.weight},
                                                               {moments.at[0].name, job.moment[0].data},
                                                               {moments.at[1].name, job.moment[1].data},
                                                               {"parameter", job.copy},
                                                               {"output", job.out}};
        for (const auto &[role, data] : parts)
            if (data != nullptr && job.numel != 0 && !context_->device().owns(data))
                throw Error(DSOPT_ERR_DEVICE, "%s of '%s' at %p is not memory of this context's device", role,
                            params_[size_t(i)].name.c_str(), data);
    }
}

} // namespace dsopt
