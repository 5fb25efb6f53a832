// SPDX-License-Identifier: Apache-2.0
// The host's part of the 1-bit family's loops: which kernels run, in which order.
#pragma once
#include "onebit.cuh"
#include "table.cuh"

namespace dsopt::gpu {

// By Feed. The mean of what is `scaled` is taken by OneBitPass::lamb_moments.
using OneBitKernel = void (*)(DeviceOneBit);
constexpr OneBitKernel kFeedKernels[] = {feed_kernel<Feed::momentum>, feed_kernel<Feed::scaled>,
                                         feed_kernel<Feed::gradient>, feed_kernel<Feed::distance>};
constexpr OneBitKernel kFinishKernels[] = {finish_kernel<Feed::momentum>, nullptr, finish_kernel<Feed::gradient>,
                                           finish_kernel<Feed::distance>};

class OneBitStep final : public OneBitLoops {
public:
    /// `plan` as the host has it, `d` as kernels do. `jobs`, `layout`: in device memory; no layout where nothing is
    /// exchanged.
    OneBitStep(const StepPlan &plan, const DevicePlan &d, const OneBitJob *jobs, char *layout,
               const Launcher &launcher) :
        launcher_(launcher),
        b_{.d = d, .one = *plan.onebit, .x = {}, .packs = false, .whole_vectors = !plan.onebit->rules.compat} {
        b_.one.jobs = jobs;
        if (!b_.one.exchanges) return;
        b_.x = plan.onebit->exchange->on_device(layout, &plan.control->skip);
        b_.packs = !b_.one.rules.compat && !b_.x.layout->has_levels();
    }

    void run(ExchangePass pass) override { ExchangeRun{launcher_, b_.x}.run(pass); }

    void run(OneBitPass pass, Feed feed) override {
        switch (pass) {
        case OneBitPass::momentum_squares:
            return launcher_.over(b_.d.leaves / kWarps + 1, "momentum_squares", momentum_squares_kernel, b_);
        case OneBitPass::feed:
            return over_leaves("feed", kFeedKernels[size_t(feed)], b_.packs ? kTurns * kTileBytes : 0);
        case OneBitPass::feed_padding:
            return launcher_.over(b_.x.own.layout.group_count, "feed_padding", feed_padding_kernel, b_);
        case OneBitPass::take: return over_leaves("finish", kFinishKernels[size_t(feed)]);
        case OneBitPass::keep_results: return over_leaves("keep_results", keep_results_kernel);
        case OneBitPass::local: return over_leaves("local", local_kernel);
        case OneBitPass::take_padding:
            return launcher_.over(b_.x.own.layout.ranks, "take_padding", take_padding_kernel, b_);
        case OneBitPass::lamb_moments:
            return over_leaves("onebit_lamb_moments", onebit_lamb_moments_kernel, 2 * kTileBytes);
        case OneBitPass::lamb_weights: return over_leaves("onebit_lamb_weights", onebit_lamb_weights_kernel);
        case OneBitPass::find_active: return over_leaves("find_active", find_active_kernel);
        case OneBitPass::freeze: return launcher_.over(b_.d.leaves, "freeze", freeze_kernel, b_, false);
        case OneBitPass::freeze_variance: return launcher_.over(b_.d.leaves, "freeze", freeze_kernel, b_, true);
        }
    }

    void decide(OneBitDecision decision) override {
        switch (decision) {
        case OneBitDecision::begin: return launcher_.block("begin_onebit", begin_onebit_kernel, b_);
        case OneBitDecision::scale_momenta: return launcher_.block("momentum_scaling", momentum_scaling_kernel, b_);
        case OneBitDecision::trust: return launcher_.block("onebit_trust", onebit_trust_kernel, b_);
        case OneBitDecision::shared_trust:
            return launcher_.block("onebit_shared_trust", onebit_shared_trust_kernel, b_);
        case OneBitDecision::end: return launcher_.block("end_onebit", end_onebit_kernel, b_);
        }
    }

private:
    void over_leaves(const char *name, OneBitKernel kernel, size_t shared = 0) {
        launcher_.over({b_.d.leaves, shared}, name, kernel, b_);
    }

    const Launcher &launcher_;
    DeviceOneBit b_;
};

} // namespace dsopt::gpu
