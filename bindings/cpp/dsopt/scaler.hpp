/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSOPT_SCALER_HPP
#define DSOPT_SCALER_HPP
/** Loss scales, as handles and on arrays. Programs include dsopt.hpp. */
#include "context.hpp"

namespace dsopt {

/// Options of a scaler. A number that is 0 has the value of the profile.
struct scaler_options {
    dsopt::profile profile = dsopt::profile::standard;
    double init = 0, factor = 0, min = 0, max = 0;
    std::int32_t window = 0, hysteresis = 0;
    /// The scale never changes automatically.
    bool fixed = false;
    bool refill = false, fail_at_min = false, keep_at_min = false;
    /// For several optimizers; update() updates the scale.
    bool shared = false;
    bool growth_at_window = false;
};

using scaler_info = dsopt_scaler_info;

class scaler {
public:
    explicit scaler(const context &ctx, const scaler_options &options = {}) : handle_(create(ctx, desc_of(options))) {}
    static scaler adopt(dsopt_scaler *handle) noexcept { return scaler(handle); }
    dsopt_scaler *get() const noexcept { return handle_.get(); }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

    /// Detaches the scaler from its optimizers, so that a new one can use it.
    void detach() { detail::check(dsopt_scaler_detach(get())); }
    /// The loss scale: one float in backend memory, at a fixed address. nullptr if this object was moved from.
    const float *device_scale() const noexcept { return dsopt_scaler_device_scale(get()); }
    void set(double value, void *stream = nullptr) { set(DSOPT_SCALE_VALUE, value, stream); }
    void set_override(double value, void *stream = nullptr) { set(DSOPT_SCALE_OVERRIDE, value, stream); }
    void clear_override(void *stream = nullptr) { set(DSOPT_SCALE_CLEAR_OVERRIDE, 0, stream); }
    /// Executes one transition. `overflow` is in backend memory; nullptr = what the optimizers recorded.
    void update(const std::int32_t *overflow = nullptr, void *stream = nullptr) {
        detail::check(dsopt_scaler_update(get(), overflow, stream));
    }
    /// Waits for earlier calls on the scaler and its optimizers.
    scaler_info info() {
        scaler_info info = detail::desc_of<scaler_info>();
        detail::check(dsopt_scaler_query(get(), &info));
        return info;
    }
    /// Multiplies a loss of one element.
    void scale_loss(const tensor &loss, void *stream = nullptr) const {
        detail::check(dsopt_scaler_scale_loss(get(), &loss, stream));
    }

    /* On arrays: a list of state tensors "loss_scale" and "scaler". */
    void init_state(span<const tensor> state, void *stream = nullptr) const {
        detail::check(dsopt_scaler_init_state(get(), state.data(), detail::count(state), stream));
    }
    void update_arrays(span<const tensor> state, const std::int32_t *overflow = nullptr, void *stream = nullptr) const {
        detail::check(dsopt_scaler_update_arrays(get(), state.data(), detail::count(state), overflow, stream));
    }
    /// The 12 words of state tensor "scaler", in host memory.
    static scaler_info decode(span<const std::int32_t> words) {
        if (words.size() != 12) detail::refuse_size("words", words.size(), "the scaler's are", 12);
        scaler_info info = detail::desc_of<scaler_info>();
        detail::check(dsopt_scaler_decode(words.data(), &info));
        return info;
    }

private:
    using handle = detail::handle<dsopt_scaler, dsopt_scaler_destroy>;
    explicit scaler(dsopt_scaler *made) noexcept : handle_(made) {}
    static dsopt_scaler_desc desc_of(const scaler_options &options) noexcept {
        dsopt_scaler_desc desc = detail::desc_of<dsopt_scaler_desc>();
        desc.profile = static_cast<std::int32_t>(options.profile);
        if (options.fixed) desc.flags |= DSOPT_SCALER_STATIC;
        if (options.refill) desc.flags |= DSOPT_SCALER_REFILL;
        if (options.fail_at_min) desc.flags |= DSOPT_SCALER_FAIL_AT_MIN;
        if (options.keep_at_min) desc.flags |= DSOPT_SCALER_KEEP_AT_MIN;
        if (options.shared) desc.flags |= DSOPT_SCALER_SHARED;
        if (options.growth_at_window) desc.flags |= DSOPT_SCALER_GROWTH_AT_WINDOW;
        desc.init = options.init;
        desc.factor = options.factor;
        desc.min = options.min;
        desc.max = options.max;
        desc.window = options.window;
        desc.hysteresis = options.hysteresis;
        return desc;
    }
    static handle create(const context &ctx, const dsopt_scaler_desc &desc) {
        return detail::make<handle>([&](dsopt_scaler **made) { return dsopt_scaler_create(ctx.get(), &desc, made); });
    }
    void set(std::int32_t what, double value, void *stream) {
        detail::check(dsopt_scaler_set(get(), what, value, stream));
    }
    handle handle_;
};

} // namespace dsopt
#endif
