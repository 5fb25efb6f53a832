// SPDX-License-Identifier: Apache-2.0
// A step in parts: what dsopt_optimizer_ready does with gradients, and how the step takes them over.
#include "optimizer/ready.h"
#include "base/struct_io.h"
#include "optimizer/plan_jobs.h"
#include "rules/options.h"
#include "step/drive.h"
#include <algorithm>

namespace dsopt {

size_t ReadyGradients::first() const {
    size_t i = 0;
    while (progress_[i] == Progress::none) ++i;
    return i;
}

void ReadyGradients::add(const dsopt_ready &ready, const std::vector<Param> &params) {
    for (int64_t k = 0; k < ready.count; ++k) {
        const size_t i = param_of(ready, k);
        if (has(i)) {
            while (k-- > 0) progress_[param_of(ready, k)] = Progress::none;
            throw Error(DSOPT_ERR_ARGUMENT, "the gradient of '%s' is already ready", params[i].name.c_str());
        }
        progress_[i] = Progress::kept;
    }
    for (int64_t k = 0; ready.grads != nullptr && k < ready.count; ++k) grads_[param_of(ready, k)] = ready.grads[k];
    count_ += ready.count;
    accumulated_ = ready.flags & DSOPT_READY_ACCUMULATED;
}

void ReadyGradients::remove(const dsopt_ready &ready) {
    for (int64_t k = 0; k < ready.count; ++k) progress_[param_of(ready, k)] = Progress::none;
    count_ -= ready.count;
}

void ReadyGradients::set_done(const dsopt_ready &ready) {
    for (int64_t k = 0; k < ready.count; ++k) progress_[param_of(ready, k)] = Progress::done;
    while (done_from_ > 0 && progress_[size_t(done_from_ - 1)] == Progress::done) --done_from_;
}

void ReadyGradients::set_done(const RankParts &parts) {
    for (size_t i = 0; i < progress_.size(); ++i)
        if (parts.is_in_bucket(i)) progress_[i] = Progress::done;
}

void ReadyGradients::clear() {
    ended = begun = false;
    if (buckets && buckets->has_begun()) buckets->end();
    if (empty() && !planned) return;
    std::fill(progress_.begin(), progress_.end(), Progress::none);
    count_ = 0;
    done_from_ = int64_t(progress_.size());
    planned.reset();
}

const dsopt_tensor *ReadyGradients::complete(const dsopt_tensor *others) {
    for (size_t i = 0; count_ != int64_t(grads_.size()) && i < grads_.size(); ++i) {
        if (!has(i)) grads_[i] = others != nullptr ? others[i] : dsopt_tensor{};
    }
    return grads_.data();
}

std::span<const TensorInterval> ReadyGradients::left() {
    size_t count = 0;
    for (size_t i = 0; i < progress_.size(); ++i) {
        if (progress_[i] == Progress::done) continue;
        if (count == 0 || intervals_[count - 1].end() != int64_t(i)) intervals_[count++] = {int64_t(i), 0};
        ++intervals_[count - 1].count;
    }
    return {intervals_.data(), count};
}

namespace {

/// With DSOPT_CONTEXT_CHECK_POINTERS: throws unless a gradient is in memory of the context's device.
void check_owned(const Optimizer &optimizer, const dsopt_tensor &gradient, const Param &param) {
    const Context &context = optimizer.context();
    if (context.checks_pointers() && gradient.data != nullptr && param.numel != 0 &&
        !context.device().owns(gradient.data))
        throw Error(DSOPT_ERR_DEVICE, "gradient of '%s' at %p is not memory of this context's device",
                    param.name.c_str(), gradient.data);
}

/// Throws if an argument is wrong, or if the gradients cannot be ready now.
void check_ready(const Optimizer &optimizer, const dsopt_ready &ready, const ReadyGradients *earlier) {
    check_groups(optimizer);
    const std::vector<Param> &params = optimizer.params();
    const dsopt_optimizer_desc &desc = optimizer.desc();
    const bool accumulated = ready.flags & DSOPT_READY_ACCUMULATED;
    if (ready.flags & ~DSOPT_READY_ACCUMULATED)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_ready.flags has unknown bits: 0x%x", ready.flags);
    if (ready.reserved != 0) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_ready.reserved is %d, must be 0", ready.reserved);
    check_options<At::step>(Facts{facts::ready}
                                .add(facts::compat, optimizer.compat())
                                .add(facts::accumulated, accumulated)
                                .add(facts::accumulate, desc.flags & DSOPT_OPTIMIZER_ACCUMULATE));
    const auto size = int64_t(params.size());
    if (ready.count < 0 || ready.count > size)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_ready.count is %lld, there are %zu parameters", ll(ready.count),
                    params.size());
    if (ready.params == nullptr && (ready.first < 0 || ready.first > size - ready.count))
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_ready: parameters [%lld, %lld) of %zu", ll(ready.first),
                    ll(ready.first) + ll(ready.count), params.size());
    if (ready.params != nullptr && ready.first != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_ready.first is %lld with a list of indices, must be 0", ll(ready.first));
    if (ready.count > 0 && !accumulated) not_null(ready.grads, "dsopt_ready.grads");
    if (earlier != nullptr && !earlier->empty() && earlier->accumulated() != accumulated)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_ready.flags: %s call of this step has DSOPT_READY_ACCUMULATED",
                    accumulated ? "no earlier" : "an earlier");
    const bool needs_memory = desc.flags & DSOPT_OPTIMIZER_EARLY_UPDATE;
    for (int64_t k = 0; k < ready.count; ++k) {
        if (ready.params != nullptr && (ready.params[k] < 0 || ready.params[k] >= size))
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_ready.params[%lld] is %lld, there are %zu parameters", ll(k),
                        ll(ready.params[k]), params.size());
        const size_t i = param_of(ready, k);
        const Param &param = params[i];
        const dsopt_tensor *const gradient = ready.grads != nullptr ? &ready.grads[k] : nullptr;
        const bool present = gradient != nullptr && gradient->data != nullptr;
        if (present) check_same_numel(*gradient, param, "gradient of");
        if (gradient != nullptr && !present && !accumulated && optimizer.parts() != nullptr &&
            optimizer.participation()[i].is_averaged())
            check_same_numel(*gradient, param, "absent gradient of");
        if (present) check_owned(optimizer, *gradient, param);
        if (needs_memory && param.data == nullptr && param.numel != 0)
            throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory: with EARLY_UPDATE register or bind it",
                        param.name.c_str());
    }
}

} // namespace

void Optimizer::check_nothing_ready() const {
    if (ready_ && !ready_->empty())
        throw Error(DSOPT_ERR_STATE,
                    "gradients are ready (parameter '%s'): end the step with DSOPT_STEP_READY, or reset them",
                    params()[ready_->first()].name.c_str());
}

/// Returns the phase that a gradient goes through when it is ready; nullopt: it is kept for the step.
std::optional<Phase> Optimizer::phase_of_parts() const {
    const bool averages = parts() != nullptr && (desc_.flags & DSOPT_OPTIMIZER_AVERAGES);
    if (onebit() != nullptr || (averages && !exchanges_buckets())) return std::nullopt;
    if (desc_.flags & DSOPT_OPTIMIZER_EARLY_UPDATE) return Phase::update;
    if (inspects_gradients(*this)) return Phase::inspect;
    return std::nullopt;
}

ReadyGradients &Optimizer::ready_gradients() {
    if (!ready_) ready_ = std::make_unique<ReadyGradients>(params().size());
    return *ready_;
}

void Optimizer::ready(dsopt_ready *user) {
    const dsopt_ready ready = read_struct(not_null(user, "ready"), "dsopt_ready");
    context_->device().check_stream(ready.stream);
    check_ready(*this, ready, ready_.get());
    ReadyGradients &all = ready_gradients();
    if (all.buckets) all.buckets->check();
    if (ready.count == 0) {
        user->free_from = free_from();
        return;
    }
    all.add(ready, params());
    try {
        const Enqueues work(pending(), ready.stream);
        order_after_calls(ready.stream);
        run_part(ready);
    } catch (...) {
        all.remove(ready);
        if (all.empty()) all.clear();
        of_steps_.call.version = 0; // the tables may have addresses of these gradients
        throw;
    }
    user->free_from = free_from();
}

/// Returns dsopt_ready.free_from.
int64_t Optimizer::free_from() const {
    if (ready_->buckets) return ready_->buckets->free_from();
    return phase_of_parts() == Phase::update ? ready_->done_from() : int64_t(params().size());
}

/// Makes the plan of the parts of a step. The tables of the last step are used if they are valid: most often only
/// addresses of gradients change.
void Optimizer::plan_parts(const dsopt_tensor *grads, void *stream) {
    ReadyGradients &all = *ready_;
    ensure_workspace(stream);
    // Jobs of the last step may say that it zeroes gradients, which are only read here.
    const bool zeroed = of_steps_.call.call.flags & DSOPT_STEP_ZERO_GRADS;
    all.reuses_tables = !all.accumulated() && !zeroed && of_steps_.call.version == registry_.version();
    dsopt_step step{};
    step.count = int64_t(params().size());
    step.grads = grads;
    step.stream = stream;
    step.flags = all.accumulated() ? DSOPT_STEP_ACCUMULATED : 0;
    all.planned.emplace(*this,
                        StepRequest{.step = step,
                                    .flags = flags_of(step),
                                    .stateful = true,
                                    .reuse = all.reuses_tables ? Reuse::all : Reuse::nothing,
                                    .host = of_steps_.call.tables.data(),
                                    .is_part = true},
                        state().list().data(), of_steps_.workspace.data());
}

/// Sets the gradients of a call in the tables.
void Optimizer::plan_gradients(const dsopt_ready &ready) {
    ReadyGradients &all = *ready_;
    dsopt_step step{};
    step.grads = all.grads();
    step.flags = all.accumulated() ? DSOPT_STEP_ACCUMULATED : 0;
    const StepRequest request{.step = step, .flags = flags_of(step), .stateful = true};
    for (int64_t k = 0; k < ready.count; ++k) {
        const size_t i = param_of(ready, k);
        TensorJob &job = all.planned->table.jobs[i];
        if (all.reuses_tables && differs_in_address(step.grads[i], of_steps_.call.grads[i])) {
            set_gradient_address(*this, step.grads[i], i, job);
            continue;
        }
        plan_job(*this, request, state().list().data(), all.planned->memory.mean, Stage::full, i, job);
        all.reuses_tables = false;
        of_steps_.call.version = 0;
    }
}

/// Makes what the exchange of buckets needs, unless it has begun.
void Optimizer::begin_buckets(void *stream) {
    ReadyGradients &all = ready_gradients();
    if (!all.buckets) all.buckets = std::make_unique<BucketExchange>(*this);
    if (all.buckets->has_begun()) return;
    check_skip_budget(stream);
    check_scaler();
    const std::optional<Phase> phase = phase_of_parts();
    if (phase == Phase::update) ensure_state(nullptr, stream);
    plan_parts(all.grads(), stream); // jobs have the means, and rows get the gradients later
    const bool compares = checks_ranks(*this) || !of_steps_.lists_compared;
    all.buckets->begin(*all.planned, phase,
                       compares ? std::optional(Compared{.calls = false, .sums = false}) : std::nullopt);
}

/// Returns the gradient of a parameter that the ranks average.
dsopt_tensor Optimizer::sent_gradient(const dsopt_tensor &gradient, size_t i, bool accumulated) const {
    if (!participation()[i].is_averaged()) return {};
    dsopt_tensor sent = gradient;
    if (accumulated) sent = *state().find(state().list().data(), StateKind::grad_accum, int64_t(i));
    if (accumulated && !params()[i].accumulated) sent.data = nullptr;
    sent.numel = params()[i].numel;
    return sent;
}

void Optimizer::send_part(const dsopt_ready &ready) {
    ReadyGradients &all = *ready_;
    if (all.accumulated()) ensure_state(nullptr, ready.stream);
    begin_buckets(ready.stream);
    all.buckets->make_slots();
    if (all.accumulated()) add_to_accumulators(ready);
    const CommUser user(this);
    all.buckets->set_stream(ready.stream);
    for (int64_t k = 0; k < ready.count; ++k) {
        const size_t i = param_of(ready, k);
        all.buckets->add(i, sent_gradient(all.grads()[i], i, all.accumulated()));
    }
}

/// Exchanges the buckets that are left, with the gradients of the step.
void Optimizer::finish_buckets(const dsopt_step &step) {
    const bool accumulated = step.flags & DSOPT_STEP_ACCUMULATED;
    ReadyGradients &all = ready_gradients();
    if (!accumulated) (void)all.complete(step.grads);
    for (size_t i = 0; !accumulated && i < params().size(); ++i) check_owned(*this, step.grads[i], params()[i]);
    begin_buckets(step.stream);
    all.buckets->set_stream(step.stream);
    for (size_t i = 0; i < params().size(); ++i)
        if (!all.has(i))
            all.buckets->set(i, sent_gradient(accumulated ? dsopt_tensor{} : step.grads[i], i, accumulated));
    all.ended = true;
    all.buckets->finish(context_->parallel(step.parallel_for, step.parallel_user));
    if (all.buckets->phase()) all.set_done(*parts());
}

void Optimizer::run_part(const dsopt_ready &ready) {
    if (exchanges_buckets()) return send_part(ready);
    ReadyGradients &all = *ready_;
    const std::optional<Phase> phase = phase_of_parts();
    if (phase == Phase::update || all.accumulated()) ensure_state(nullptr, ready.stream);
    if (phase && !all.planned) plan_parts(all.complete(nullptr), ready.stream);
    if (all.accumulated()) add_to_accumulators(ready);
    if (!phase) return;
    plan_gradients(ready);
    Planned &planned = *all.planned;
    planned.plan.execution.stream = ready.stream;
    planned.plan.execution.reuse = Reuse::all_but_addresses; // CUDA compares tables
    const auto nothing = [] {};                              // is compared
    drive_part(planned.run(*this, nothing, 0), *phase, !all.begun,
               [&](FunctionRef<void(const TensorInterval &)> run) { for_intervals(ready, run); });
    all.begun = true;
    all.set_done(ready);
}

/// Returns the whole step that ends a step in parts.
dsopt_step Optimizer::complete_ready(const dsopt_step &step) {
    const bool accumulated = step.flags & DSOPT_STEP_ACCUMULATED, any = ready_ && !ready_->empty();
    check_options<At::step>(
        Facts{facts::ready}.add(facts::compat, compat()).add(facts::zero_grads, step.flags & DSOPT_STEP_ZERO_GRADS));
    if (any && ready_->accumulated() != accumulated)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.flags: the gradients were made ready %s DSOPT_READY_ACCUMULATED",
                    accumulated ? "without" : "with");
    dsopt_step whole = step;
    whole.flags &= ~DSOPT_STEP_READY;
    if (accumulated || step.count != int64_t(params().size())) return whole; // the step refuses another count
    for (size_t i = 0; any && step.grads != nullptr && i < params().size(); ++i)
        if (step.grads[i].data != nullptr && ready_->has(i))
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.grads has data for '%s', whose gradient is ready",
                        params()[i].name.c_str());
    if (any || step.grads == nullptr) whole.grads = ready_gradients().complete(step.grads);
    return whole;
}

void Optimizer::forget_ready(void *stream) {
    if (exchanges_buckets()) {
        const CommUser user(this);
        const Enqueues work(pending(), stream);
        order_after_calls(stream);
        begin_buckets(stream);
        ReadyGradients &all = *ready_;
        all.buckets->set_stream(stream);
        all.buckets->wait();
        all.buckets->drop_results();
        all.ended = true;
        if (!all.buckets->has_failed()) {
            if (all.buckets->compares()) {
                report_refusal(*this, stream); // at the place at which other ranks compare, or report the same
            } else {
                for (size_t i = 0; i < params().size(); ++i)
                    all.buckets->set_zeros(i, participation()[i].is_averaged() ? params()[i].numel : 0);
                try {
                    all.buckets->finish(context_->parallel());
                } catch (...) {
                    all.clear();
                    throw;
                }
            }
        }
        all.clear();
    }
    order_after_calls(stream);
    if (ready_) ready_->clear();
    of_steps_.call.version = 0; // the tables may have addresses of these gradients
}

void Optimizer::end_failed_step() {
    of_steps_.call.version = 0;
    if (ready_ && ready_->ended) ready_->clear();
}

bool Optimizer::may_report_refusal() {
    if (ready_) ready_->ended = true; // the other ranks forget their gradients, too
    if (!ready_ || !ready_->buckets || !ready_->buckets->has_begun()) return true;
    ready_->buckets->wait();
    return !ready_->buckets->has_failed();
}

void Optimizer::wait_for_parts() const {
    if (ready_ && ready_->buckets) ready_->buckets->wait();
}

void Optimizer::wait(int64_t first, int64_t count, void *stream) const {
    check_groups(*this);
    const auto size = int64_t(params().size());
    if (first < 0 || count < 0 || first > size - count)
        throw Error(DSOPT_ERR_ARGUMENT, "parameters [%lld, %lld) of %zu", ll(first), ll(first) + ll(count),
                    params().size());
    if (ready_ && ready_->buckets && ready_->buckets->has_begun() && count > 0)
        ready_->buckets->wait_for(size_t(first));
    order_after_calls(stream);
}

TensorInterval Optimizer::bucket(int64_t param) const {
    check_groups(*this);
    check_options<At::step>(Facts{facts::ready}.add(facts::compat, compat()));
    if (param < 0 || size_t(param) >= params().size())
        throw Error(DSOPT_ERR_ARGUMENT, "parameter %lld of %zu", ll(param), params().size());
    if (exchanges_buckets() && parts()->is_in_bucket(size_t(param)))
        return parts()->tensors_of(parts()->bucket_of(size_t(param)));
    return {param, !exchanges_buckets() && phase_of_parts() == Phase::update};
}

} // namespace dsopt
