// SPDX-License-Identifier: Apache-2.0
// The host's part of compression and of the 1-bit family's steps: which kernels run, in which order.
#pragma once
#include "agree.cuh"
#include "onebit.cuh"
#include <algorithm>

namespace dsopt::gpu {

/// `layout`: in device memory, as LayoutImage has it.
inline DeviceExchange device_exchange(const Exchange &exchange, const void *layout) {
    const CompressLayout &of = *exchange.layout;
    return {.layout = LayoutImage::view(of, layout),
            .all = LayoutImage::view_all(of, layout),
            .worker = exchange.worker,
            .server = exchange.server,
            .active = exchange.active,
            .own_active = exchange.own_active(),
            .message = exchange.message,
            .slices = exchange.slices,
            .values = of.is_exact() ? exchange.message : nullptr,
            .slice = of.slice,
            .node_ranks = of.node_ranks,
            .send = exchange.send,
            .recv = exchange.recv,
            .result = exchange.result,
            .results = exchange.results,
            .sums = exchange.sums,
            .counts = exchange.counts,
            .skip = exchange.skip};
}

/// Blocks of a grid over so many pieces of work, and no more than `most`.
inline unsigned grid_of(int64_t pieces, unsigned most) {
    return unsigned(std::clamp<int64_t>(pieces, 1, int64_t(most)));
}

/// Bits between tensors are 1, too.
inline void clear_rows(char *rows, int64_t bytes, cudaStream_t stream) {
    if (bytes != 0) check(cudaMemsetAsync(rows, 0xff, size_t(bytes), stream), "cudaMemsetAsync");
}
inline void end_rows(const DeviceExchange &x, unsigned blocks, cudaStream_t stream) {
    check(::gpu::launch("row_scales", row_scales_kernel, grid_of(x.layout.part_count / kWarps + 1, blocks), kThreads, 0,
                        stream, x),
          "row_scales");
}
inline void clear_gaps(const DeviceExchange &x, unsigned blocks, cudaStream_t stream) {
    if (x.all.part_count == 0) return;
    check(::gpu::launch("clear_gaps", clear_gaps_kernel, grid_of(x.all.part_count / kThreads + 1, blocks), kThreads, 0,
                        stream, x),
          "clear_gaps");
}
/// What the ranks of the node sent to the own slice of the mean, and that to rows.
inline void pack_slice(const CompressLayout &layout, const DeviceExchange &x, unsigned blocks, cudaStream_t stream) {
    if (layout.is_exact()) {
        check(::gpu::launch("mean_slice", mean_slice_kernel, grid_of(layout.slice / (kThreads * 4) + 1, blocks),
                            kThreads, 0, stream, x),
              "mean_slice");
        return;
    }
    clear_rows(x.send, layout.row_bytes() * layout.ranks, stream);
    check(::gpu::launch("feed_slice", feed_slice_kernel, grid_of(layout.part_leaf.back(), blocks), kThreads, 0, stream,
                        x),
          "feed_slice");
    end_rows(x, blocks, stream);
}
inline void serve_rows(const CompressLayout &layout, const DeviceExchange &x, unsigned blocks, cudaStream_t stream) {
    clear_rows(x.result, layout.row_bytes(), stream);
    check(::gpu::launch("serve", serve_kernel, grid_of(layout.segment_leaf.back(), blocks), kThreads, 0, stream, x),
          "serve");
    check(::gpu::launch("result_scales", result_scales_kernel, grid_of(x.layout.segment_count / kWarps + 1, blocks),
                        kThreads, 0, stream, x),
          "result_scales");
}

/// One step. Between the decision, on which every kernel here depends, and the update of other tensors, which counts
/// steps.
class OneBitStep {
public:
    /// `plan` as the host has it, `d` as kernels do. `layout`: in device memory, NULL where nothing is exchanged.
    OneBitStep(const StepPlan &plan, const DevicePlan &d, const OneBitJob *jobs, const void *layout, unsigned blocks,
               cudaStream_t stream) :
        plan_(plan),
        one_(*plan.onebit),
        blocks_(blocks),
        stream_(stream),
        exchange_(one_.exchange) {
        exchange_.table = layout;
        exchange_.skip = &d.control->skip;
        const bool exchanges = one_.setup->compresses;
        b_ = {.d = d,
              .x = exchanges ? device_exchange(exchange_, layout) : DeviceExchange{},
              .jobs = jobs,
              .rules = one_.setup->rules,
              .trust = one_.trust,
              .schedule = one_.schedule,
              .lr_sum = one_.lr_sum,
              .trust_average = one_.trust_average,
              .trust_factor = one_.trust_factor,
              .scaling = one_.scaling,
              .active = one_.active,
              .padding = one_.padding,
              .momentum = one_.momentum,
              .factors = reinterpret_cast<double *>(plan.bad),
              .stage = one_.stage,
              .compat = one_.compat,
              .exchanges = exchanges,
              .packs = exchanges && !one_.compat && one_.node == nullptr,
              .whole_vectors = !exchanges || !one_.compat};
    }

    /// What tensors that go into exchanges get. mark(k), k = 0, 1, 2: after compression, the exchange, the rest.
    template <class Mark> void run(const Mark &mark) {
        const int32_t algorithm = b_.rules.algorithm;
        const bool local = one_.stage == Stage::local || one_.stage == Stage::sync;
        if (one_.trust_factor != nullptr || local) launch_one("begin_onebit", begin_onebit_kernel);
        // Nothing on the wire for a step that is skipped. In standard mode nobody waits to find out.
        if (one_.compat && b_.exchanges && look(exchange_.skip) != 0) return;
        switch (one_.stage) {
        case Stage::dry:
        case Stage::full: return;
        case Stage::local: return launch("local", local_kernel, 0);
        case Stage::sync: return through<Feed::distance>(mark);
        case Stage::exchange: break;
        }
        if (algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) return through<Feed::gradient>(mark);
        if (algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM) return through<Feed::momentum>(mark);
        if (one_.compat && plan_.count != 0 && look(one_.scaling) == 0) { // not yet
            check(::gpu::launch("momentum_squares", momentum_squares_kernel,
                                grid_of((b_.d.leaves + kWarps - 1) / kWarps, blocks_), kThreads, 0, stream_, b_),
                  "momentum_squares");
            launch_one("momentum_scaling", momentum_scaling_kernel);
        }
        send<Feed::scaled>(mark);
        launch("onebit_lamb_moments", onebit_lamb_moments_kernel, 2 * kLeaf * sizeof(float));
        const bool shards = has_shards(plan_, true);
        if (shards) clear_shards(plan_, stream_);
        launch_one("onebit_trust", onebit_trust_kernel);
        if (shards) {
            agree_on_shards(plan_, exchange_.skip, true, stream_);
            launch_one("onebit_shared_trust", onebit_shared_trust_kernel);
        }
        launch("onebit_lamb_weights", onebit_lamb_weights_kernel, 0);
        mark(2);
    }

    /// After everything else of the step.
    void end() {
        const ScheduleRules &rules = b_.rules;
        ScheduleState next = one_.now; // if the step is taken, in compat mode
        const bool froze = advance_schedule(rules, next);
        launch_one("end_onebit", end_onebit_kernel);
        // Only where an exchange follows: this reads the whole variance.
        if (one_.stage == Stage::full && one_.active != nullptr && stage_of(rules, next) != Stage::full)
            check(::gpu::launch("find_active", find_active_kernel, grid_of(b_.d.leaves, blocks_), kThreads, 0, stream_,
                                b_),
                  "find_active");
        const bool late = one_.compat && next.step != rules.freeze_step;
        if (froze)
            check(::gpu::launch("freeze", freeze_kernel, grid_of(b_.d.leaves, blocks_), kThreads, 0, stream_, b_,
                                rules.algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB && !late),
                  "freeze");
    }

private:
    void launch_one(const char *name, void (*kernel)(DeviceOneBit)) {
        check(::gpu::launch(name, kernel, 1, kThreads, 0, stream_, b_), name);
    }
    /// Over all leaves.
    void launch(const char *name, void (*kernel)(DeviceOneBit), size_t shared) {
        check(::gpu::launch(name, kernel, grid_of(b_.d.leaves, blocks_), kThreads, shared, stream_, b_), name);
    }
    /// A value of a word on the device. For compat mode, in which the host waits anyway.
    template <class T> T look(const T *word) const {
        T value{};
        check(cudaMemcpyAsync(&value, word, sizeof value, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
        check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
        return value;
    }
    template <Feed F, class Mark> void send(const Mark &mark) {
        if (!b_.exchanges) {
            if (F == Feed::distance) launch("feed", feed_kernel<F>, 0);
            return;
        }
        const CompressLayout &layout = one_.setup->layout;
        if (one_.node != nullptr) {
            clear_gaps(b_.x, blocks_, stream_);
            launch("feed", feed_kernel<F>, 0);
            mark(0);
            two_level_exchange(*one_.context, one_.comm, *one_.node, exchange_, plan_.parallel, plan_.stream);
            mark(1);
            return;
        }
        clear_rows(b_.x.send, layout.row_bytes() * layout.ranks, stream_);
        launch("feed", feed_kernel<F>, b_.packs ? kLeaf * sizeof(float) : 0);
        if (!b_.packs) {
            check(::gpu::launch("feed_padding", feed_padding_kernel, grid_of(b_.x.layout.part_count, blocks_), kThreads,
                                0, stream_, b_),
                  "feed_padding");
            check(::gpu::launch("pack", pack_kernel, grid_of(layout.part_leaf.back(), blocks_), kThreads, 0, stream_,
                                b_.x),
                  "pack");
        }
        end_rows(b_.x, blocks_, stream_);
        mark(0);
        exchange(*one_.context, *one_.comm, exchange_, plan_.parallel, plan_.stream);
        mark(1);
        if (one_.padding != nullptr && b_.x.layout.part_count != 0)
            check(::gpu::launch("finish_padding", finish_padding_kernel, grid_of(layout.ranks, blocks_), kThreads, 0,
                                stream_, b_),
                  "finish_padding");
    }
    template <Feed F, class Mark> void through(const Mark &mark) {
        send<F>(mark);
        launch("finish", finish_kernel<F>, 0);
        if (one_.momentum != nullptr) launch("keep_momentum", keep_momentum_kernel, 0);
        mark(2);
    }

    const StepPlan &plan_;
    const OneBitPlan &one_;
    unsigned blocks_;
    cudaStream_t stream_;
    Exchange exchange_;
    DeviceOneBit b_;
};

} // namespace dsopt::gpu
