// SPDX-License-Identifier: Apache-2.0
// One step: check the lists, make the plan, hand it to the backend.
#include "base/workspace.h"
#include "device/decide.h"
#include "optimizer/optimizer.h"
#include "rules/group.h"
#include <algorithm>
#include <cmath>
#include <cstring>

namespace dsopt {
namespace {

long long ll(int64_t value) { return static_cast<long long>(value); }

/// `state` NULL: the rule has no such moment.
Moment moment_of(const dsopt_tensor *state) {
    return state != nullptr ? Moment{state->data, Dtype(state->dtype), {}} : Moment{nullptr, Dtype::f32, {}};
}

} // namespace

/// The lists of one call after checking. `params` NULL: where they are bound.
struct Optimizer::Arguments {
    const dsopt_step &step;
    const dsopt_tensor *params, *out;
    uint32_t flags;
    Parallel parallel;
    bool initial; // the original's step on zero gradients when a wrapper is made
    bool *met = nullptr;
};

/// Offsets of the parts of a step's memory, each on its own cache line. They rise with parameters only, so sizes are
/// constant. What the host writes comes behind the rest where backend memory is host memory, and in memory of its own
/// otherwise.
struct Optimizer::Layout {
    size_t scalars, divisors, norms, sums_a, sums_b, bad, shards, extra, exchange, mean, bytes;
    size_t jobs, hypers, onebit, cost, lists, host_bytes; // the first three make a backend's table, in this order
};

Optimizer::Layout Optimizer::layout() const {
    const size_t count = params_.size(), groups = groups_.size();
    const size_t leaves = params_.empty() ? 0 : size_t(params_.back().first_leaf + leaves_of(params_.back().numel));
    size_t at = 0;
    const auto place = [&](size_t bytes) {
        const size_t offset = at;
        at += (bytes + 63) / 64 * 64;
        return offset;
    };
    Layout l;
    l.scalars = place(count * sizeof(Scalars));
    l.divisors = place(groups * sizeof(double));
    const auto classes = 1 + size_t(desc_.expert_count);
    l.norms = place(((groups + 1) * classes + 1 + groups + 2) * sizeof(double)); // a NormTable and a message of it
    l.sums_a = place(leaves * sizeof(double));
    l.sums_b = place(leaves * sizeof(double));
    l.bad = place(leaves * sizeof(int64_t));
    l.shards = place(shard_bytes(shard_count()));
    l.extra = place(context_->backend().extra_bytes(int64_t(count), int64_t(groups), int64_t(leaves), onebit_.get()));
    l.exchange = place(onebit_ && onebit_->compresses ? onebit_->layout.workspace_bytes() : 0);
    l.mean = place(onebit_ ? size_t(onebit_->mean_numel + onebit_->mean_scratch) * sizeof(float) : 0);
    const size_t shared = at;
    if (!context_->backend().is_host()) at = 0;
    l.jobs = place(count * sizeof(TensorJob));
    l.hypers = place(groups * sizeof(Hyper));
    l.onebit = place(onebit_ ? count * sizeof(OneBitJob) : 0);
    l.cost = place((count + 1) * sizeof(int64_t));
    l.lists = place(onebit_ && onebit_->mean_numel != 0 ? 3 * count * sizeof(dsopt_tensor) : 0);
    l.bytes = context_->backend().is_host() ? at : shared;
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

Optimizer::Arguments Optimizer::check_step(const dsopt_step &step, bool functional) const {
    if (groups_.empty()) throw Error(DSOPT_ERR_STATE, "the optimizer has no groups yet");
    constexpr int32_t known =
        DSOPT_STEP_ZERO_GRADS | DSOPT_STEP_OUT_ONLY | DSOPT_STEP_DELTA | DSOPT_STEP_ACCUMULATED | DSOPT_STEP_NO_NAN;
    const bool accumulated = step.flags & DSOPT_STEP_ACCUMULATED;
    if (step.flags & ~known) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.flags has unknown bits: 0x%x", step.flags);
    if (step.reserved != 0) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.reserved is %u, must be 0", step.reserved);
    if (step.count != int64_t(params_.size()))
        throw Error(DSOPT_ERR_SHAPE, "dsopt_step.count is %lld, registered are %zu parameters", ll(step.count),
                    params_.size());
    if (step.count > 0 && !accumulated && step.grads == nullptr)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.grads is NULL");
    if (accumulated && step.grads != nullptr)
        throw Error(DSOPT_ERR_ARGUMENT,
                    "dsopt_step.grads with DSOPT_STEP_ACCUMULATED: the gradients are in the accumulators");
    if (accumulated && !(desc_.flags & DSOPT_OPTIMIZER_ACCUMULATE))
        throw Error(DSOPT_ERR_UNSUPPORTED, "the optimizer was made without DSOPT_OPTIMIZER_ACCUMULATE");
    if (accumulated && functional)
        throw Error(DSOPT_ERR_UNSUPPORTED,
                    "dsopt_optimizer_apply remembers nothing: give it the accumulators as gradients");
    if (functional && step.count > 0 && step.params == nullptr)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_apply needs dsopt_step.params");
    if (step.parallel_for == nullptr && step.parallel_user != nullptr)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.parallel_user without parallel_for");
    if (step.lr != nullptr && step.hyper != nullptr)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.lr and hyper: the rows of hyper have the learning rate");
    if ((step.flags & DSOPT_STEP_NO_NAN) && step.report == nullptr)
        throw Error(DSOPT_ERR_UNSUPPORTED, "DSOPT_STEP_NO_NAN has no effect without dsopt_step.report");
    for (const void *scalar : {static_cast<const void *>(step.lr), static_cast<const void *>(step.hyper),
                               static_cast<const void *>(step.grad_scale), static_cast<const void *>(step.skip),
                               static_cast<const void *>(step.grad_norms), static_cast<const void *>(step.report)})
        if (reinterpret_cast<uintptr_t>(scalar) % 4 != 0)
            throw Error(DSOPT_ERR_ALIGNMENT, "a scalar of dsopt_step is at %p, not aligned to 4 bytes", scalar);

    uint32_t flags = step.flags;
    if (flags & DSOPT_STEP_DELTA) flags |= DSOPT_STEP_OUT_ONLY;
    if ((flags & DSOPT_STEP_OUT_ONLY) && step.count > 0 && step.out == nullptr)
        throw Error(DSOPT_ERR_ARGUMENT, "DSOPT_STEP_OUT_ONLY and _DELTA need dsopt_step.out");
    for (size_t i = 0; i < params_.size(); ++i) {
        const Param &param = params_[i];
        const char *name = param.name.c_str();
        bool present = accumulated ? param.accumulated : step.grads[i].data != nullptr;
        if (present && !accumulated) {
            check_float_tensor(step.grads[i], {"gradient of", name});
            check_numel(step.grads[i], param.numel, {"gradient of", name});
        }
        // Ranks exchange what an absent gradient stands for, zeros.
        present = present || wrapper() != Wrapper::none || (onebit_ && onebit_->worker[i] >= 0);
        const void *data = param.data;
        if (step.params != nullptr) {
            const dsopt_tensor &given = step.params[i];
            check_param(given, param);
            data = given.data;
        }
        const bool wanted = step.out != nullptr && step.out[i].data != nullptr;
        if (wanted) {
            check_float_tensor(step.out[i], {"output of", name});
            check_numel(step.out[i], param.numel, {"output of", name});
        } else if ((flags & DSOPT_STEP_OUT_ONLY) && param.numel != 0) {
            throw Error(DSOPT_ERR_ARGUMENT, "output of '%s' has no memory: OUT_ONLY and DELTA need every one", name);
        }
        if ((flags & DSOPT_STEP_DELTA) && param.has_master)
            throw Error(DSOPT_ERR_UNSUPPORTED,
                        "DSOPT_STEP_DELTA with a master: adding the change to the rounded '%s' "
                        "would not give the new weight",
                        name);
        if ((flags & DSOPT_STEP_OUT_ONLY) && !param.has_master &&
            groups_[size_t(param.group)].algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM)
            throw Error(DSOPT_ERR_UNSUPPORTED,
                        "OUT_ONLY and DELTA with 0/1 Adam: its local steps add up in '%s', which has no master", name);
        if (data == nullptr && param.numel != 0 && (present || wanted))
            throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory: register, bind or pass it", name);
    }
    if (accumulated) flags |= DSOPT_STEP_ZERO_GRADS;
    return {step, step.params, step.out, flags, context_->parallel(step.parallel_for, step.parallel_user), false};
}

/// Which of the original's wrappers compat mode stands for.
Wrapper Optimizer::wrapper() const {
    if (desc_.compat != DSOPT_COMPAT_DEEPSPEED) return Wrapper::none;
    for (const Param &param : params_)
        if (param.has_master) return desc_.masters == DSOPT_MASTERS_FLAT ? Wrapper::fused : Wrapper::unfused;
    return Wrapper::none;
}

const dsopt_tensor *Optimizer::find_state(const dsopt_tensor *state, StateKind kind) const {
    const StateEntry *const entry = find_entry(kind);
    return entry != nullptr ? state + (entry - state_.data()) : nullptr;
}

const StateEntry *Optimizer::find_entry(StateKind kind) const {
    for (size_t i = state_.size(); i-- > 0 && state_[i].param < 0;)
        if (state_[i].kind == kind) return &state_[i];
    return nullptr;
}

void Optimizer::run(const Arguments &arguments, const dsopt_tensor *state, void *workspace,
                    const OfEngine *of_engine) const {
    const dsopt_step &step = arguments.step;
    const Layout place = layout();
    const auto part = [&]<class T>(size_t offset, T *) {
        return reinterpret_cast<T *>(static_cast<char *>(workspace) + offset);
    };
    workspace = static_cast<char *>(workspace) + slack_of(workspace);
    const HostScratch scratch(host_scratch_, context_->backend().is_host() ? 0 : place.host_bytes);
    char *host = context_->backend().is_host() ? static_cast<char *>(workspace) : scratch.data();
    const auto host_part = [&]<class T>(size_t offset, T *) { return reinterpret_cast<T *>(host + offset); };

    const Wrapper wrapped = wrapper();
    const bool accumulated = arguments.flags & DSOPT_STEP_ACCUMULATED;
    const bool first_model_rank = !with_.model || with_.model->rank() == 0;
    auto *jobs = host_part(place.jobs, static_cast<TensorJob *>(nullptr));
    OneBitPlan onebit{};
    if (onebit_)
        onebit = plan_onebit(state, host_part(place.onebit, static_cast<OneBitJob *>(nullptr)), workspace,
                             place.exchange, of_engine != nullptr ? of_engine->schedule : nullptr, step.stream);
    // Where ranks exchange, an absent gradient is one of zeros: all must send the same.
    const bool exchanges = onebit_ && (onebit.stage == Stage::exchange || onebit.stage == Stage::sync);
    const bool shares = shares_trust();
    int32_t slots = 0;
    for (size_t i = 0; i < params_.size(); ++i) {
        const Param &param = params_[i];
        const auto own = [&](StateKind kind) { return find_state(state, param, kind); };
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
                              (exchanges && onebit.jobs[i].worker >= 0),
                   .has_master = param.has_master,
                   .in_norm = !(param.flags & DSOPT_PARAM_REPLICATED) && (sharded || first_model_rank),
                   .stochastic = (desc_.flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING) && param.dtype == DSOPT_DTYPE_BF16,
                   .onebit = onebit_ && !onebit.jobs[i].averaged,
                   .reserved = {}};
    }

    auto *hypers = host_part(place.hypers, static_cast<Hyper *>(nullptr));
    const bool compat = desc_.compat == DSOPT_COMPAT_DEEPSPEED;
    // In the call that the original spends on nothing, moments of groups that are not frozen do move.
    const bool dry = onebit_ && onebit.stage == Stage::dry;
    bool clips = desc_.max_norm > 0, has_lamb = false;
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
                     formula_of(g),
                     !(g.flags & DSOPT_GROUP_NO_BIAS_CORRECTION) && !is_onebit(g.algorithm),
                     compat && !is_onebit(g.algorithm),
                     (g.flags & DSOPT_GROUP_EPS_UNCORRECTED) != 0,
                     {}};
        clips = clips || g.max_norm > 0;
        has_lamb = has_lamb || has_trust(g);
    }
    const bool scales = with_.scaler != nullptr && !arguments.initial;
    // The fused wrapper looks at every gradient, but without a scaler it only reports; the other one skips.
    const bool looks =
        (desc_.nonfinite == DSOPT_NONFINITE_SKIP || clips || scales || wrapped != Wrapper::none) && !arguments.initial;
    const bool reports_only = wrapped == Wrapper::fused && !scales && desc_.nonfinite == DSOPT_NONFINITE_AUTO;
    const bool skips = desc_.nonfinite != DSOPT_NONFINITE_APPLY && !reports_only;
    const dsopt_tensor *trust = find_state(state, StateKind::trust_ratio),
                       *loss_scale = find_state(state, StateKind::loss_scale),
                       *scaler = find_state(state, StateKind::scaler);
    const bool averages = onebit_ && onebit_->mean_numel != 0 && !arguments.initial;
    const StepPlan plan{.jobs = jobs,
                        .count = int64_t(params_.size()),
                        .groups = hypers,
                        .group_count = int64_t(groups_.size()),
                        .flags = arguments.flags,
                        .wrapper = wrapped,
                        .read_gradients = looks && step.grad_norms == nullptr,
                        .skip_nonfinite = skips,
                        .report_norms = (desc_.flags & DSOPT_OPTIMIZER_REPORT_NORMS) != 0,
                        .has_lamb = has_lamb,
                        .timing = (desc_.flags & DSOPT_OPTIMIZER_TIMING) != 0,
                        .dry = dry,
                        .local_gradients = onebit_ && onebit.stage != Stage::full && onebit.stage != Stage::dry,
                        .max_norm = arguments.initial ? 0.0 : desc_.max_norm,
                        .max_value = desc_.max_value > 0 ? float(desc_.max_value) : INFINITY,
                        .lr = step.lr,
                        .hyper = step.hyper,
                        .grad_scale = step.grad_scale,
                        .grad_norms = step.grad_norms,
                        .skip = step.skip,
                        .loss_scale = scales ? static_cast<float *>(loss_scale->data) : nullptr,
                        .scaler = scales ? static_cast<ScalerState *>(scaler->data) : nullptr,
                        .scaler_rules = scales ? with_.scaler->rules() : ScalerRules{},
                        .comms = arguments.initial ? CommSet{} : comms(),
                        .step = static_cast<int32_t *>(find_state(state, StateKind::step)->data),
                        .onebit = onebit_ ? &onebit : nullptr,
                        .trust_ratio = has_lamb ? static_cast<float *>(trust->data) : nullptr,
                        .report = step.report,
                        .outcome = of_engine != nullptr ? static_cast<Outcome *>(of_engine->outcome->data()) : nullptr,
                        .scalars = part(place.scalars, static_cast<Scalars *>(nullptr)),
                        .divisors = part(place.divisors, static_cast<double *>(nullptr)),
                        .norms = part(place.norms, static_cast<double *>(nullptr)),
                        .cost = host_part(place.cost, static_cast<int64_t *>(nullptr)),
                        .sums_a = part(place.sums_a, static_cast<double *>(nullptr)),
                        .sums_b = part(place.sums_b, static_cast<double *>(nullptr)),
                        .bad = part(place.bad, static_cast<int64_t *>(nullptr)),
                        .shard_sums = part(place.shards, static_cast<ShardSums *>(nullptr)),
                        .shard_count = slots,
                        .extra = part(place.extra, static_cast<void *>(nullptr)),
                        .cache = of_engine != nullptr ? cache_.get() : nullptr,
                        .mirror = of_engine != nullptr && desc_.skip_budget > 0 ? static_cast<Outcome *>(mirror_.get())
                                                                                : nullptr,
                        .stream = step.stream,
                        .parallel = arguments.parallel,
                        .chunk = context_->chunk()};
    if (context_->checks_pointers()) check_pointers(plan);
    if (arguments.met != nullptr && checks_ranks()) {
        *arguments.met = true;
        check_ranks(plan, false);
    } else if (of_engine != nullptr && !lists_compared_ && onebit_ && onebit_->compresses)
        check_ranks(plan, true); // other lists would be other messages
    if (averages)
        average_gradients(plan, part(place.mean, static_cast<float *>(nullptr)),
                          host_part(place.lists, static_cast<dsopt_tensor *>(nullptr)));
    if (of_engine != nullptr && of_engine->schedule != nullptr) of_engine->schedule->valid = false; // should it fail
    context_->backend().step(plan);
    if (onebit_ && of_engine != nullptr && of_engine->schedule != nullptr) {
        KnownSchedule &known = *of_engine->schedule;
        known.valid = !compat && !context_->backend().is_host();
        known.state = onebit.now;
        (void)advance_schedule(onebit_->rules, known.state);
    }
    if (averages && (arguments.flags & DSOPT_STEP_ZERO_GRADS)) {
        const dsopt_tensor *list = step.grads;
        for (size_t i = 0; i < params_.size(); ++i) // the step has seen copies of these
            if (onebit_->mean[i] >= 0)
                context_->backend().zero(accumulated ? find_state(state, params_[i], StateKind::grad_accum) : list + i,
                                         1, arguments.parallel, step.stream);
    }
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
            if (data != nullptr && job.numel != 0 && !context_->backend().owns(data))
                throw Error(DSOPT_ERR_DEVICE, "%s of '%s' at %p is not memory of this context's device", role,
                            params_[size_t(i)].name.c_str(), data);
    }
}

/// The original's wrappers take one step of the base optimizer on zero gradients when they are made: counters become 1
/// and decay is applied to the masters, not to the parameters.
void Optimizer::take_initial_step(const dsopt_tensor *params, const dsopt_tensor *state, void *workspace,
                                  void *stream) const {
    dsopt_step step{};
    step.stream = stream;
    run({step, params, nullptr, 0, context_->parallel(), true}, state, workspace, nullptr);
}

void Optimizer::step(const dsopt_step &step) {
    bool met = false;
    try {
        take_step(step, met);
    } catch (...) {
        if (checks_ranks() && !met) refuse_to_ranks(step.stream);
        throw;
    }
}

void Optimizer::apply(const dsopt_step &step) const {
    bool met = false;
    try {
        take_apply(step, met);
    } catch (...) {
        if (checks_ranks() && !met) refuse_to_ranks(step.stream);
        throw;
    }
}

void Optimizer::take_step(const dsopt_step &step, bool &met) {
    // What has arrived of earlier steps; nobody waits for it, but ranks must come to the same answer.
    if (desc_.skip_budget > 0 && mirror_ && has_peers(comms())) {
        (void)context_->backend().finished(step.stream); // refuses a stream that is being captured
        context_->backend().synchronize(step.stream);
    }
    if (const Outcome *known = last_known();
        known != nullptr && desc_.skip_budget > 0 && known->skipped_in_row >= desc_.skip_budget)
        throw Error(DSOPT_ERR_SKIPS,
                    "%lld steps in a row were skipped, the budget is %d; the last one found %lld non-finite "
                    "elements",
                    ll(known->skipped_in_row), desc_.skip_budget, ll(known->nonfinite));
    check_scaler();
    Arguments arguments = check_step(step, false);
    arguments.met = &met;
    if (step.workspace != nullptr || step.workspace_bytes != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.workspace is for dsopt_optimizer_apply");
    bool complete = false; // the caller's list covers everything: the engine needs no memory of its own
    if (step.state != nullptr) {
        check_state_list(step.state, step.state_count, false);
        complete = true;
        for (size_t i = 0; i < state_.size(); ++i)
            complete = complete && (step.state[i].data != nullptr || state_[i].numel == 0);
    } else if (step.state_count != 0) {
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.state_count is %lld without state", ll(step.state_count));
    }
    ensure_workspace(step.stream);
    const dsopt_tensor *state = step.state;
    if (!complete) {
        ensure_state(step.params, step.stream);
        state = state_list_.data();
        if (step.state != nullptr) {
            call_list_ = state_list_;
            for (size_t i = 0; i < call_list_.size(); ++i)
                if (step.state[i].data != nullptr) call_list_[i] = step.state[i];
            state = call_list_.data();
        }
    }
    const bool own = step.state == nullptr || find_state(step.state, StateKind::schedule) == nullptr ||
                     find_state(step.state, StateKind::schedule)->data == nullptr;
    if (complete || !own) state_changed(); // the list may name the engine's own memory
    const OfEngine of_engine{&outcome_memory_, complete || !own ? nullptr : &known_schedule_};
    run(arguments, state, workspace_.data(), &of_engine);
    lists_compared_ = true;
    ++calls_;
    if (arguments.flags & DSOPT_STEP_ACCUMULATED)
        for (Param &param : params_) param.accumulated = false;
}

void Optimizer::take_apply(const dsopt_step &step, bool &met) const {
    Arguments arguments = check_step(step, true);
    arguments.met = &met;
    check_state_list(step.state, step.state_count, true);
    const size_t bytes = layout().bytes, needed = bytes + slack_of(step.workspace);
    if (bytes != 0 && (step.workspace == nullptr || step.workspace_bytes < needed))
        throw Error(DSOPT_ERR_WORKSPACE, "dsopt_step.workspace has %zu bytes, %zu are needed",
                    step.workspace == nullptr ? size_t(0) : step.workspace_bytes, needed);
    check_scaler();
    const dsopt_tensor *const schedule = find_state(step.state, StateKind::schedule);
    if (schedule != nullptr && schedule->data == state_[size_t(schedule - step.state)].data) state_changed();
    run(arguments, step.state, step.workspace, nullptr);
}

void Optimizer::ensure_workspace(void *stream) {
    const Backend &backend = context_->backend();
    if (workspace_.data() == nullptr) workspace_ = Memory(context_, std::max<size_t>(workspace_bytes(), 64), stream);
    if (!cache_) cache_ = backend.make_cache();
    call_list_.reserve(state_.size());
    if (outcome_memory_.data() != nullptr) return;
    Memory outcome(context_, sizeof(Outcome), stream);
    if (!backend.is_host()) mirror_ = backend.host_buffer(sizeof(Outcome));
    const Outcome first = no_outcome();
    if (mirror_.get() != nullptr) std::memcpy(mirror_.get(), &first, sizeof first);
    backend.copy_from_host(outcome.data(), &first, sizeof first, stream);
    outcome_memory_ = std::move(outcome);
}

Outcome Optimizer::no_outcome() {
    Outcome outcome{};
    outcome.first_bad = -1;
    outcome.grad_norm = outcome.dense_norm = outcome.expert_norm = outcome.weight_norm = outcome.update_norm = NAN;
    outcome.scale_used = 1;
    return outcome;
}

const Outcome *Optimizer::last_known() const {
    return static_cast<const Outcome *>(context_->backend().is_host() ? outcome_memory_.data() : mirror_.get());
}

void Optimizer::change_outcome(void (*change)(Outcome &)) {
    if (outcome_memory_.data() == nullptr) return;
    const Backend &backend = context_->backend();
    backend.synchronize(nullptr);
    Outcome outcome;
    backend.copy_to_host(&outcome, outcome_memory_.data(), sizeof outcome, nullptr);
    change(outcome);
    backend.copy_from_host(outcome_memory_.data(), &outcome, sizeof outcome, nullptr);
    if (mirror_.get() != nullptr) std::memcpy(mirror_.get(), &outcome, sizeof outcome);
}

dsopt_report Optimizer::report() const {
    dsopt_report r{};
    Outcome outcome = no_outcome();
    if (outcome_memory_.data() != nullptr) {
        context_->backend().synchronize(nullptr);
        context_->backend().copy_to_host(&outcome, outcome_memory_.data(), sizeof outcome, nullptr);
    }
    r.calls = calls_;
    r.skipped = outcome.total_skipped;
    r.skipped_in_row = outcome.skipped_in_row;
    r.nonfinite = outcome.nonfinite;
    r.first_bad = outcome.first_bad;
    if (outcome.first_bad >= 0) r.first_bad_name = params_[size_t(outcome.first_bad)].name.c_str();
    r.last_skipped = outcome.skipped;
    r.kind = outcome.kind;
    r.reasons = outcome.reasons;
    r.loss_scale = with_.scaler ? with_.scaler->info().scale : 1;
    r.scale_used = outcome.scale_used;
    r.grad_norm = outcome.grad_norm;
    r.dense_norm = outcome.dense_norm;
    r.expert_norm = outcome.expert_norm;
    r.weight_norm = outcome.weight_norm;
    r.update_norm = outcome.update_norm;
    r.divisor = outcome.divisor;
    std::memcpy(r.ms, outcome.ms, sizeof r.ms);
    context_->backend().phase_times(cache_.get(), r.ms);
    r.resharded_from = resharded_from_;
    for (const StateEntry &entry : state_) r.state_bytes += int64_t(entry.bytes());
    r.workspace_bytes = groups_.empty() ? 0 : int64_t(workspace_bytes());
    return r;
}

} // namespace dsopt
