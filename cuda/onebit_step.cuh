// SPDX-License-Identifier: Apache-2.0
// The host's part of the 1-bit family's loops: which kernels run, in which order.
#pragma once
#include "onebit.cuh"
#include "pack.cuh"

namespace dsopt::gpu {

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
            buffers_ = *plan.onebit->buffers;
            buffers_.table = layout;
            buffers_.skip = &plan.control->skip;
            b_.x = device_exchange(buffers_, layout);
            b_.packs = !b_.one.compat && !buffers_.layout->has_levels();
            b_.whole_vectors = !b_.one.compat;
        }
    }

    const ExchangeBuffers &buffers() const override { return buffers_; }
    void begin() override { launch_one("begin_onebit", begin_onebit_kernel); }
    void scale_momenta() override {
        if (b_.d.plan.count == 0) return;
        check(::gpu::launch("momentum_squares", momentum_squares_kernel,
                            launcher_.blocks_for((b_.d.leaves + kWarps - 1) / kWarps), kThreads, 0, launcher_.stream,
                            b_),
              "momentum_squares");
        launch_one("momentum_scaling", momentum_scaling_kernel);
    }
    void feed(Feed feed) override {
        switch (feed) {
        case Feed::momentum: return send<Feed::momentum>();
        case Feed::scaled: return send<Feed::scaled>();
        case Feed::gradient: return send<Feed::gradient>();
        case Feed::distance: return send<Feed::distance>();
        }
    }
    void take(Feed feed) override {
        switch (feed) {
        case Feed::momentum: launch("finish", finish_kernel<Feed::momentum>); break;
        case Feed::gradient: launch("finish", finish_kernel<Feed::gradient>); break;
        case Feed::distance: launch("finish", finish_kernel<Feed::distance>); break;
        case Feed::scaled: return; // lamb_moments()
        }
        if (b_.one.momentum != nullptr) launch("keep_momentum", keep_momentum_kernel);
    }
    void local() override { launch("local", local_kernel); }
    void lamb_moments() override {
        if (b_.one.padding != nullptr && b_.x.layout.part_count != 0)
            check(::gpu::launch("finish_padding", finish_padding_kernel, launcher_.blocks_for(b_.x.layout.ranks),
                                kThreads, 0, launcher_.stream, b_),
                  "finish_padding");
        launch("onebit_lamb_moments", onebit_lamb_moments_kernel, 2 * kLeaf * sizeof(float));
    }
    void lamb_trust() override { launch_one("onebit_trust", onebit_trust_kernel); }
    void lamb_shared_trust() override { launch_one("onebit_shared_trust", onebit_shared_trust_kernel); }
    void lamb_weights() override { launch("onebit_lamb_weights", onebit_lamb_weights_kernel); }
    void end() override { launch_one("end_onebit", end_onebit_kernel); }
    void find_active() override { launch("find_active", find_active_kernel); }
    void freeze(bool copies_variance) override {
        check(::gpu::launch("freeze", freeze_kernel, launcher_.blocks_for(b_.d.leaves), kThreads, 0, launcher_.stream,
                            b_, copies_variance),
              "freeze");
    }

private:
    void launch_one(const char *name, void (*kernel)(DeviceOneBit)) {
        check(::gpu::launch(name, kernel, 1, kThreads, 0, launcher_.stream, b_), name);
    }
    /// Over all leaves.
    void launch(const char *name, void (*kernel)(DeviceOneBit), size_t shared = 0) {
        check(::gpu::launch(name, kernel, launcher_.blocks_for(b_.d.leaves), kThreads, shared, launcher_.stream, b_),
              name);
    }
    template <Feed F> void send() {
        if (!b_.one.exchanges) {
            if (F == Feed::distance) launch("feed", feed_kernel<F>);
            return;
        }
        const CompressLayout &layout = *buffers_.layout;
        if (layout.has_levels()) {
            clear_gaps(b_.x, launcher_);
            return launch("feed", feed_kernel<F>);
        }
        clear_rows(b_.x.send, layout.row_bytes() * layout.ranks, launcher_.stream);
        launch("feed", feed_kernel<F>, b_.packs ? kLeaf * sizeof(float) : 0);
        if (!b_.packs) {
            check(::gpu::launch("feed_padding", feed_padding_kernel, launcher_.blocks_for(b_.x.layout.part_count),
                                kThreads, 0, launcher_.stream, b_),
                  "feed_padding");
            check(::gpu::launch("pack", pack_kernel, launcher_.blocks_for(layout.part_leaf.back()), kThreads, 0,
                                launcher_.stream, b_.x),
                  "pack");
        }
        end_rows(b_.x, launcher_);
    }

    const Launcher &launcher_;
    ExchangeBuffers buffers_;
    DeviceOneBit b_;
};

} // namespace dsopt::gpu
