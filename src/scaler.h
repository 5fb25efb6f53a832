// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "context.h"
#include "rules/scaler.h"
#include <atomic>
#include <memory>

namespace dsopt {

/// A loss scale and the machine that moves it, in backend memory.
class Scaler {
public:
    Scaler(std::shared_ptr<const Context> context, const dsopt_scaler_desc &desc);

    const Context &context() const { return *context_; }
    const ScalerRules &rules() const { return rules_; }
    float *scale() const { return static_cast<float *>(memory_.data()); }
    ScalerState *state() const { return reinterpret_cast<ScalerState *>(static_cast<char *>(memory_.data()) + 64); }
    bool shared() const { return rules_.flags & DSOPT_SCALER_SHARED; }

    /// Throws DSOPT_ERR_STATE for a second optimizer unless SHARED.
    void attach();
    void detach() noexcept { attached_.fetch_sub(1); }

    void set(int32_t what, double value, void *stream);
    void update(const int32_t *overflow, void *stream);
    void scale_loss(const dsopt_tensor &loss, void *stream) const;
    dsopt_scaler_info info() const;
    /// From a checkpoint.
    void restore(const ScalerRules &rules) { rules_ = rules; }
    static void check(const ScalerRules &rules);

private:
    ScalerState read() const;
    void write(const ScalerState &state, void *stream);

    std::shared_ptr<const Context> context_;
    ScalerRules rules_;
    Memory memory_;
    std::atomic<int> attached_{0};
};

} // namespace dsopt
