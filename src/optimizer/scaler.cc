// SPDX-License-Identifier: Apache-2.0
#include "optimizer/scaler.h"
#include "base/struct_io.h"
#include "base/tensor_list.h"
#include "rules/options.h"
#include <cmath>

namespace dsopt {
namespace {

struct Profile {
    double init, min;
    uint32_t flags;
};
constexpr Profile kProfiles[] = {
    {65536, 1, 0}, {4294967296.0, 1, 0}, {65536, 0.25, 0}, {4294967296.0, 1, DSOPT_SCALER_FAIL_AT_MIN}};

ScalerRules make_rules(const dsopt_scaler_desc &desc, double &init) {
    constexpr uint32_t known = DSOPT_SCALER_STATIC | DSOPT_SCALER_REFILL | DSOPT_SCALER_FAIL_AT_MIN |
                               DSOPT_SCALER_KEEP_AT_MIN | DSOPT_SCALER_SHARED | DSOPT_SCALER_GROWTH_AT_WINDOW;
    require_in(DSOPT_PROFILE_DEFAULT, DSOPT_PROFILE_DYNAMIC, "dsopt_scaler_desc.profile", desc.profile);
    if (desc.flags & ~known)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_scaler_desc.flags has unknown bits: 0x%x", desc.flags);
    const bool fixed = desc.flags & DSOPT_SCALER_STATIC;
    const auto flag = [&](uint32_t bit) { return (desc.flags & bit) != 0; };
    check_options<At::scaler>(
        Facts()
            .add(facts::static_scaler, fixed)
            .add(facts::scaler_rules, desc.factor != 0 || desc.min != 0 || desc.max != 0 || desc.window != 0 ||
                                          desc.hysteresis != 0 || flag(~(DSOPT_SCALER_STATIC | DSOPT_SCALER_SHARED)))
            .add(facts::wrapper_profile, desc.profile == DSOPT_PROFILE_FUSED || desc.profile == DSOPT_PROFILE_UNFUSED)
            .add(facts::dynamic_profile, desc.profile == DSOPT_PROFILE_DYNAMIC)
            .add(facts::hysteresis, desc.hysteresis > 1)
            .add(facts::refill, flag(DSOPT_SCALER_REFILL))
            .add(facts::fail_at_min, flag(DSOPT_SCALER_FAIL_AT_MIN))
            .add(facts::keep_at_min, flag(DSOPT_SCALER_KEEP_AT_MIN)));

    const Profile &profile = kProfiles[desc.profile];
    ScalerRules rules;
    rules.factor = desc.factor != 0 ? desc.factor : 2;
    rules.min = desc.min != 0 ? desc.min : fixed ? 0 : profile.min;
    rules.max = desc.max != 0 ? desc.max : HUGE_VAL;
    rules.window = desc.window != 0 ? desc.window : 1000;
    rules.hysteresis = desc.hysteresis != 0 ? desc.hysteresis : 1;
    rules.flags = (desc.flags | profile.flags) & ~uint32_t(DSOPT_SCALER_KEEP_AT_MIN);
    if (desc.flags & (DSOPT_SCALER_KEEP_AT_MIN | DSOPT_SCALER_STATIC))
        rules.flags &= ~uint32_t(DSOPT_SCALER_FAIL_AT_MIN);
    Scaler::check(rules);
    init = desc.init != 0 ? desc.init : fixed ? 1 : profile.init;
    if (!is_loss_scale(init) || init < rules.min || init > rules.max)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_scaler_desc.init is %g, not in [min, max] = [%g, %g]", init, rules.min,
                    rules.max);
    return rules;
}

/// Checks a list of the two state tensors "loss_scale" and "scaler", and returns their memory.
PlannedScaler check_arrays(const dsopt_tensor *list, int64_t count, const ScalerRules &rules) {
    check_length(list, count, 2, "the list of the scaler's state");
    const auto check = [](const dsopt_tensor &tensor, const char *name, int32_t dtype, int64_t numel) {
        check_like(tensor, dtype, numel, {name, "the scaler"});
        if (tensor.data == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "%s has no memory", name);
    };
    check(list[0], "loss_scale", DSOPT_DTYPE_F32, 1);
    check(list[1], "scaler", DSOPT_DTYPE_I32, sizeof(ScalerState) / 4);
    return {static_cast<float *>(list[0].data), static_cast<ScalerState *>(list[1].data), rules};
}

void run_transition(const Context &context, const PlannedScaler &scaler, const int32_t *overflow, void *stream) {
    check_aligned(overflow, sizeof *overflow, "overflow");
    context.device().kernels().run_in_one_thread(UpdateScaler{scaler.rules, scaler.state, scaler.scale, overflow},
                                                 stream);
}

} // namespace

void Scaler::check(const ScalerRules &rules) {
    require(std::isfinite(rules.factor) && rules.factor > 1, "the scale factor", rules.factor, "above 1");
    const bool no_minimum = rules.min == 0 && (rules.flags & DSOPT_SCALER_STATIC);
    require(no_minimum || is_loss_scale(rules.min), "the minimum scale", rules.min, "positive and finite in fp32");
    if (!(rules.max >= rules.min))
        throw Error(DSOPT_ERR_ARGUMENT, "the maximum scale is %g, the minimum %g", rules.max, rules.min);
    if (rules.window < 1) throw Error(DSOPT_ERR_ARGUMENT, "the scale window is %d, must be at least 1", rules.window);
    if (rules.hysteresis < 1)
        throw Error(DSOPT_ERR_ARGUMENT, "the hysteresis is %d, must be at least 1", rules.hysteresis);
}

Scaler::Scaler(std::shared_ptr<const Context> context, const dsopt_scaler_desc &desc) : context_(std::move(context)) {
    rules_ = make_rules(desc, init_);
    const Device &device = context_->device();
    pending_ = device.make_pending_work();
    memory_ = Memory(context_, 128, nullptr);
    device.wait_for_default_stream(); // the allocation hook may be stream-ordered
    write(first_state());
}

ScalerState Scaler::first_state() const {
    ScalerState state{};
    state.dynamic = init_;
    state.last_overflow = -1;
    state.hysteresis = rules().hysteresis;
    return state;
}

std::shared_ptr<void> Scaler::attach() const {
    const std::lock_guard lock(mutex_);
    if (token_.use_count() > 1 && !(rules_.flags & DSOPT_SCALER_SHARED))
        throw Error(DSOPT_ERR_STATE, "the scaler has an optimizer already: a second one needs DSOPT_SCALER_SHARED, or "
                                     "dsopt_scaler_detach first");
    used_.store(true, std::memory_order_release);
    return token_;
}
void Scaler::detach_all() {
    std::shared_ptr<void> new_token = std::make_shared<char>();
    const std::lock_guard lock(mutex_);
    token_.swap(new_token);
}
void Scaler::check_attached(const std::shared_ptr<void> &token) const {
    const std::lock_guard lock(mutex_);
    if (token != token_) throw Error(DSOPT_ERR_STATE, "the scaler was detached from this optimizer");
}

ScalerState Scaler::read() const {
    ScalerState state;
    if (pending_) pending_->wait(PendingWork::Waits::host_for_replays);
    context_->device().copy(&state, this->state(), sizeof state);
    return state;
}
void Scaler::write(const ScalerState &state) {
    const float scale = scale_in_use(state);
    context_->device().copy(this->state(), &state, sizeof state);
    context_->device().copy(this->scale(), &scale, sizeof scale);
    written_scale_.store(double(scale), std::memory_order_relaxed);
}

void Scaler::clamp_hysteresis() {
    ScalerState state = read();
    if (state.hysteresis <= rules().hysteresis) return;
    state.hysteresis = rules().hysteresis;
    write(state);
}

void Scaler::set(int32_t what, double value, void *stream) {
    (void)context_->device().finished(stream); // refuses a stream that is being captured
    context_->device().wait(stream);
    ScalerState state = read();
    if (what == DSOPT_SCALE_CLEAR_OVERRIDE) {
        if (value != 0) throw Error(DSOPT_ERR_ARGUMENT, "clearing an override takes no value, got %g", value);
        state.overridden = 0;
        state.forced = 0;
    } else if (what == DSOPT_SCALE_VALUE || what == DSOPT_SCALE_OVERRIDE) {
        require(is_loss_scale(value), "the loss scale", value, "positive and finite in fp32");
        if (what == DSOPT_SCALE_VALUE)
            state.dynamic = value;
        else {
            state.forced = value;
            state.overridden = 1;
        }
    } else {
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_scaler_set: what is %d", what);
    }
    write(state);
}

void Scaler::update(const int32_t *overflow, void *stream) {
    used_.store(true, std::memory_order_release);
    const Enqueues work(pending_.get(), stream);
    run_transition(*context_, {scale(), state(), rules()}, overflow, stream);
}
void Scaler::transition(const dsopt_tensor *state, int64_t count, const int32_t *overflow, void *stream) const {
    const PlannedScaler scaler = check_arrays(state, count, rules());
    used_.store(true, std::memory_order_release);
    const Enqueues work(pending_.get(), stream);
    run_transition(*context_, scaler, overflow, stream);
}
void Scaler::init_state(const dsopt_tensor *state, int64_t count, void *stream) const {
    const PlannedScaler scaler = check_arrays(state, count, rules());
    used_.store(true, std::memory_order_release);
    const Enqueues work(pending_.get(), stream);
    context_->device().kernels().run_in_one_thread(WriteScaler{first_state(), scaler.state, scaler.scale}, stream);
}

void Scaler::scale_loss(const dsopt_tensor &loss, void *stream) const {
    check_float_tensor(loss, {"loss", ""});
    check_numel(loss, 1, {"loss", ""});
    if (loss.data == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "the loss has no memory");
    const Enqueues work(pending_.get(), stream);
    context_->device().kernels().axpby({.data = scale()}, &loss, 0, &loss, 1, context_->parallel(), stream);
}

dsopt_scaler_info Scaler::info() const { return decode(read()); }
dsopt_scaler_info Scaler::decode(const ScalerState &state) {
    dsopt_scaler_info info{};
    info.scale = double(scale_in_use(state));
    info.dynamic = state.dynamic;
    info.updates = state.updates;
    info.last_overflow = state.last_overflow;
    info.hysteresis = state.hysteresis;
    info.overridden = state.overridden;
    info.failures = state.failures;
    info.skipped_in_row = state.skipped_in_row;
    return info;
}

} // namespace dsopt
