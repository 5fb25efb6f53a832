// SPDX-License-Identifier: Apache-2.0
// The host's part of the 1-bit family's loops: which kernels run, in which order.
#pragma once
#include "onebit.cuh"
#include "table.cuh"

namespace dsopt::gpu {

// By Feed. The mean of what is `scaled` is taken by lamb_moments().
using OneBitKernel = void (*)(DeviceOneBit);
constexpr OneBitKernel kFeedKernels[] = {feed_kernel<Feed::momentum>, feed_kernel<Feed::scaled>,
                                         feed_kernel<Feed::gradient>, feed_kernel<Feed::distance>};
constexpr OneBitKernel kFinishKernels[] = {finish_kernel<Feed::momentum>, nullptr, finish_kernel<Feed::gradient>,
                                           finish_kernel<Feed::distance>};

class OneBitStep final : public OneBitLoops {
public:
    /// `plan` as the host has it, `d` as kernels do. `jobs`, `layout`: in device memory; no layout where nothing is
    /// exchanged.
    OneBitStep(const StepPlan &plan, const DevicePlan &d, const OneBitJob *jobs, const void *layout,
               const Launcher &launcher) :
        launcher_(launcher),
        b_{.d = d, .one = *plan.onebit, .x = {}, .packs = false, .whole_vectors = true} {
        b_.one.jobs = jobs;
        if (b_.one.exchanges) {
            b_.x = device_exchange(*plan.onebit->buffers, layout);
            b_.x.table = layout;
            b_.x.skip = &plan.control->skip;
            b_.packs = !b_.one.rules.compat && !b_.x.layout->has_levels();
            b_.whole_vectors = !b_.one.rules.compat;
        }
    }

    const ExchangeBuffers &buffers() const override { return b_.x; }
    void begin() override { launcher_.block("begin_onebit", begin_onebit_kernel, b_); }
    void scale_momenta() override {
        if (b_.d.plan.count == 0) return;
        launcher_.over(b_.d.leaves / kWarps + 1, "momentum_squares", momentum_squares_kernel, b_);
        launcher_.block("momentum_scaling", momentum_scaling_kernel, b_);
    }
    void feed(Feed feed) override {
        const OneBitKernel kernel = kFeedKernels[size_t(feed)];
        if (!b_.one.exchanges) {
            if (feed == Feed::distance) over_leaves("feed", kernel); // it takes a step, too
            return;
        }
        const CompressLayout &layout = *b_.x.layout;
        if (layout.has_levels()) {
            clear_gaps(b_.x, launcher_);
            return over_leaves("feed", kernel);
        }
        clear_rows(b_.x.send, layout.rows_bytes(), launcher_);
        over_leaves("feed", kernel, b_.packs ? kTurns * kTileBytes : 0);
        if (!b_.packs) {
            launcher_.over(b_.x.own.part_count, "feed_padding", feed_padding_kernel, b_);
            launcher_.over(layout.part_leaf.back(), "pack", pack_kernel, b_.x);
        }
        end_rows(b_.x, launcher_);
    }
    void take(Feed feed) override {
        over_leaves("finish", kFinishKernels[size_t(feed)]);
        if (b_.one.momentum != nullptr) over_leaves("keep_momentum", keep_momentum_kernel);
    }
    void local() override { over_leaves("local", local_kernel); }
    void lamb_moments() override {
        if (b_.one.padding != nullptr && b_.x.own.part_count != 0)
            launcher_.over(b_.x.own.ranks, "finish_padding", finish_padding_kernel, b_);
        over_leaves("onebit_lamb_moments", onebit_lamb_moments_kernel, 2 * kTileBytes);
    }
    void lamb_trust() override { launcher_.block("onebit_trust", onebit_trust_kernel, b_); }
    void lamb_shared_trust() override { launcher_.block("onebit_shared_trust", onebit_shared_trust_kernel, b_); }
    void lamb_weights() override { over_leaves("onebit_lamb_weights", onebit_lamb_weights_kernel); }
    void end() override { launcher_.block("end_onebit", end_onebit_kernel, b_); }
    void find_active() override { over_leaves("find_active", find_active_kernel); }
    void freeze(bool copies_variance) override {
        launcher_.over(b_.d.leaves, "freeze", freeze_kernel, b_, copies_variance);
    }

private:
    void over_leaves(const char *name, OneBitKernel kernel, size_t shared = 0) {
        launcher_.over({b_.d.leaves, shared}, name, kernel, b_);
    }

    const Launcher &launcher_;
    DeviceOneBit b_;
};

} // namespace dsopt::gpu
