// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "device/context.h"
#include "rules/loss_scale.h"
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

namespace dsopt {

/// A loss scale and the state machine that updates it, in backend memory.
class Scaler {
public:
    Scaler(std::shared_ptr<const Context> context, const dsopt_scaler_desc &desc);

    const Context &context() const { return *context_; }
    /// Returns a copy: dsopt_optimizer_apply reads the rules while another optimizer of a shared scaler may load a
    /// checkpoint.
    ScalerRules rules() const {
        const std::lock_guard lock(mutex_);
        return rules_;
    }
    /// Returns the scale that the host wrote last, without waiting; nullopt once something may have changed it on the
    /// backend: an optimizer, update(), or a call on arrays, which may be the scaler's own memory.
    std::optional<double> host_written_scale() const {
        if (used_.load(std::memory_order_acquire)) return std::nullopt;
        return written_scale_.load(std::memory_order_relaxed);
    }
    float *scale() const { return static_cast<float *>(memory_.data()); }
    /// Returns the work that calls on this scaler and on its optimizers enqueued; NULL on backends that are the host.
    const std::shared_ptr<PendingWork> &pending() const { return pending_; }
    ScalerState *state() const { return reinterpret_cast<ScalerState *>(static_cast<char *>(memory_.data()) + 64); }

    /// Returns a token that an optimizer keeps as long as it has the scaler. Throws DSOPT_ERR_STATE for a second
    /// optimizer unless the scaler is SHARED.
    std::shared_ptr<void> attach() const;
    /// Detaches all optimizers.
    void detach_all();
    /// Throws DSOPT_ERR_STATE if the optimizer with this token was detached.
    void check_attached(const std::shared_ptr<void> &token) const;

    /// Waits for earlier calls and for `stream`, where kernels of the caller may read the scale.
    void set(int32_t what, double value, void *stream);
    void update(const int32_t *overflow, void *stream);
    void scale_loss(const dsopt_tensor &loss, void *stream) const;
    dsopt_scaler_info info() const;
    static dsopt_scaler_info decode(const ScalerState &state);
    /// Writes starting values to the caller's two state tensors; transition() updates them.
    void init_state(const dsopt_tensor *state, int64_t count, void *stream) const;
    void transition(const dsopt_tensor *state, int64_t count, const int32_t *overflow, void *stream) const;
    ScalerState first_state() const;
    /// Sets the rules from a checkpoint.
    void restore(const ScalerRules &rules) {
        const std::lock_guard lock(mutex_);
        rules_ = rules;
    }
    /// Limits the hysteresis counter to the rules. A loaded counter may exceed them, because the rules may have stayed.
    void clamp_hysteresis();
    static void check(const ScalerRules &rules);

private:
    /// Waits for calls on the scaler and on its optimizers, and returns the state.
    ScalerState read() const;
    void write(const ScalerState &state);

    std::shared_ptr<const Context> context_;
    ScalerRules rules_;
    double init_ = 0;
    std::atomic<double> written_scale_{1};
    mutable std::atomic<bool> used_{false};
    Memory memory_;
    std::shared_ptr<PendingWork> pending_;
    mutable std::mutex mutex_; // protects `rules_` and `token_`
    std::shared_ptr<void> token_ = std::make_shared<char>();
};

} // namespace dsopt
