// SPDX-License-Identifier: Apache-2.0
// Steps of the 1-bit family: what goes into an exchange, what comes out of it, and what every step ends with. Whether
// the step is taken is the device's to know: every kernel asks, and the host launches them all the same.
#pragma once
#include "compress.cuh"
#include "device/onebit_plan.h"
#include "update.cuh"

namespace dsopt::gpu {

/// By value into every kernel of such a step. Pointers of `one` are device pointers here.
struct DeviceOneBit {
    DevicePlan d;
    OneBitPlan one;
    DeviceExchange x;
    bool packs; // a part is one tensor: bits are made while its kept sums are at hand
    /// Four neighbours of a tensor have their bits side by side; in compat mode a part may begin anywhere.
    bool whole_vectors;
};

/// What the values to feed are made of.
template <int V, Feed F>
__device__ __forceinline__ Inputs<V> load_inputs(const DeviceOneBit &b, const TensorJob &job, const OneBitJob &one,
                                                 int64_t i) {
    Inputs<V> t{};
    const bool in_bits = F == Feed::momentum && b.one.momentum != nullptr && b.one.schedule->momentum_in_bits != 0;
    t.g = fetch_gradient<V>(job, i);
    if (!in_bits) t.moment[0] = fetch<V>(job.moment(0), i);
    if constexpr (F == Feed::distance) {
        t.p = fetch<V>(job.weight(), i);
        t.moment[1] = fetch<V>(job.moment(1), i);
        t.own = load<V>(one.track(), i);
    }
    t.widen_all(job);
    if (in_bits) t.moment[0] = mean_of<V>(b.x, b.one.momentum, one.part, one.worker + i);
    return t;
}

/// Scalars of a tensor that go beside those of find_scalars(). Apart from them: in one struct with the job the compiler
/// would think that each store may change everything.
struct SharedOneBit {
    OneBitScalars one;
    float scale;  // of its kept sums
    bool aligned; // its arrays, and four neighbours have their bits side by side
};

/// body(s, o, one, where, leaf) for the block's leaves of tensors that go into exchanges. Once in a kernel.
template <Feed F, class Body> __device__ __forceinline__ void for_own_leaves(const DeviceOneBit &b, const Body &body) {
    __shared__ SharedTensor s;
    __shared__ SharedOneBit o;
    if (skipped(b.d)) return;
    const auto find = [&](int32_t tensor) INLINED {
        const OneBitJob &one = b.one.jobs[tensor];
        const bool kept = b.one.exchanges && b.x.message == nullptr && one.worker >= 0;
        o.one = onebit_scalars(b.one, F, tensor, b.d.plan.jobs[tensor].group);
        o.scale = kept ? b.x.worker_scales()[one.part] : 0.0f;
        o.aligned =
            b.whole_vectors && s.aligned && all_aligned(one.track(), one.fresh, b.x.worker, b.x.message, b.x.values);
    };
    for_shared_leaves(b.d, s, find, [&](uint32_t leaf, int32_t tensor, const Leaf &where) INLINED {
        if (s.job.owner == Owner::exchange) body(s, o, b.one.jobs[tensor], where, leaf);
    });
}
/// body(Width<V>, s, o, one, i) for V neighbours of such a tensor, from its i-th one on.
template <Feed F, class Body> __device__ __forceinline__ void for_own_packs(const DeviceOneBit &b, const Body &body) {
    for_own_leaves<F>(b, [&](const auto &s, const auto &o, const auto &one, const Leaf &where, uint32_t) INLINED {
        for_packs(where.n, o.aligned, [&](auto width, int at) INLINED { body(width, s, o, one, where.begin + at); });
    });
}

template <int V, Feed F>
__device__ __forceinline__ Pack<V> feed_values(const SharedTensor &s, const SharedOneBit &o, const Inputs<V> &t) {
    Pack<V> y;
    unrolled<V>([&](int k) INLINED {
        y.at[k] =
            feed_value(F, s.scalars, o.one, t.g.at[k], t.p.at[k], t.moment[0].at[k], t.moment[1].at[k], t.own.at[k]);
    });
    return y;
}

/// The mean, which without other ranks is the own values, in place of the gradient, and what is read to take it.
template <int V, Feed F>
__device__ __forceinline__ Inputs<V> load_mean(const DeviceOneBit &b, const SharedTensor &s, const SharedOneBit &o,
                                               const OneBitJob &one, int64_t i) {
    Inputs<V> t{};
    Pack<V> y;
    if (b.one.exchanges) // first: where it comes from needs registers, too
        y = mean_of<V>(b.x, b.x.results, one.part, one.worker + i);
    else
        t.g = fetch_gradient<V>(s.job, i);
    if (F != Feed::momentum || !b.one.exchanges)
        t.moment[0] = fetch<V>(s.job.moment(0), i); // else the mean replaces it
    t.p = fetch<V>(s.job.weight(), i);
    t.moment[1] = fetch<V>(s.job.moment(1), i);
    if constexpr (F == Feed::distance) t.own = load<V>(one.track(), i);
    if constexpr (F == Feed::scaled) t.own = load<V>(one.fresh, i);
    t.widen_all(s.job);
    t.g = b.one.exchanges ? y : feed_values<V, F>(s, o, t);
    return t;
}

/// Own values and what is owed to the kept sums, and their bits to the rows. Before a synchronisation 0/1 Adam takes
/// its step here.
template <Feed F>
__global__ void __launch_bounds__(kThreads, F == Feed::distance ? 3 : 4)
    feed_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel(b.one.exchanges && b.x.message == nullptr);
    DYNAMIC_SHARED(float, tiles); // where bits are made here
    TileTurns turns{tiles};
    for_own_leaves<F>(b, [&](const auto &s, const auto &o, const auto &one, const Leaf &where, uint32_t) INLINED {
        float *kept = b.one.exchanges ? (b.x.message != nullptr ? b.x.message : b.x.worker) + one.worker : nullptr;
        for_packs(where.n, o.aligned, [&]<int V>(Width<V>, int at) INLINED {
            const int64_t i = where.begin + at;
            Pack<V> sum{};
            if (kept != nullptr && b.x.message == nullptr) sum = load<V>(kept, i);
            Inputs<V> t = load_inputs<V, F>(b, s.job, one, i);
            if constexpr (F == Feed::distance) {
                unrolled<V>([&](int k) INLINED {
                    local_step(s.scalars, o.one, t.g.at[k], t.p.at[k], t.moment[0].at[k], t.moment[1].at[k],
                               t.own.at[k]);
                });
                store(t.p, s.job.weight(), i);
                store(t.moment[0], s.job.moment(0), i);
                if (!o.one.anchored) store(t.own, one.track(), i);
            }
            if (kept == nullptr) return;
            const Pack<V> values = feed_values<V, F>(s, o, t);
            if (b.x.message != nullptr) return store(values, kept, i); // as they are
            const uint32_t active = active_from(b.x.active, one.worker + i);
            sum = new_sums(values, sum, o.scale, active);
            if (b.packs) to_tile(sum, turns.tile() + at);
            store(sum, kept, i);
        });
        if (b.packs)
            pack_leaf(b.x, one.part, one.worker + where.begin, where.n, turns,
                      b.x.own.part_leaf[one.part] + where.begin / kLeaf);
    });
}

/// What is behind the tensors of a part.
__global__ void __launch_bounds__(kThreads, 4) feed_padding_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel(true);
    if (skipped(b.d)) return;
    for (int32_t i = int32_t(blockIdx.x); i < b.x.own.part_count; i += int32_t(gridDim.x)) {
        const CompressLayout::Part part = b.x.own.parts[i];
        const float scale = b.x.worker_scales()[i];
        float *kept = b.x.worker + part.begin;
        for (int64_t k = part.used + threadIdx.x; k < part.numel; k += kThreads) {
            const float owed = error_of(kept[k], scale);
            kept[k] = b.one.padding != nullptr ? b.one.padding[k - part.used] + owed : owed;
        }
    }
}
__global__ void __launch_bounds__(kThreads, 4) finish_padding_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel();
    if (skipped(b.d)) return;
    const CompressLayout::Part part = b.x.own.parts[0];
    for (int64_t k = part.used + grid_thread(); k < part.numel; k += grid_threads())
        b.one.padding[k - part.used] = mean_of<1>(b.x, b.x.results, 0, part.begin + k).at[0];
}

/// From the mean, which without other ranks is the own values, to momentum and weights.
template <Feed F>
__global__ void __launch_bounds__(kThreads, F == Feed::distance ? 3 : 4)
    finish_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel();
    for_own_packs<F>(b, [&]<int V>(Width<V>, const auto &s, const auto &o, const auto &one, int64_t i) INLINED {
        Inputs<V> t = load_mean<V, F>(b, s, o, one, i);
        const Pack<V> old = t.p;
        if (one.mask != nullptr) {
            unrolled<V>([&](int k) INLINED { t.g.at[k] *= one.mask[i + k]; });
        }
        unrolled<V>([&](int k) INLINED {
            take_mean(F, s.scalars, o.one, t.g.at[k], t.p.at[k], t.moment[0].at[k], t.moment[1].at[k], t.own.at[k]);
        });
        if (b.one.momentum == nullptr) store(t.moment[0], s.job.moment(0), i);
        if constexpr (F == Feed::distance) store(t.own, one.track(), i);
        publish(b.d.plan, s, t.p, old, i);
    });
}

/// 0/1 Adam between exchanges.
__global__ void __launch_bounds__(kThreads, 4) local_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel();
    constexpr Feed F = Feed::distance;
    for_own_packs<F>(b, [&]<int V>(Width<V>, const auto &s, const auto &o, const auto &one, int64_t i) INLINED {
        Inputs<V> t = load_inputs<V, F>(b, s.job, one, i);
        unrolled<V>([&](int k) INLINED {
            local_step(s.scalars, o.one, t.g.at[k], t.p.at[k], t.moment[0].at[k], t.moment[1].at[k], t.own.at[k]);
        });
        store(t.moment[0], s.job.moment(0), i);
        if (!o.one.anchored) store(t.own, one.track(), i);
        publish(b.d.plan, s, t.p, t.p, i);
    });
}

/// 1-bit LAMB: the moments and, a leaf each, the sums of squares of the update and the largest factor.
__global__ void __launch_bounds__(kThreads, 3) onebit_lamb_moments_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel(true);
    DYNAMIC_SHARED(float, memory);
    __shared__ uint32_t most_of_block;
    const Tiles tiles{memory, memory + kLeaf};
    constexpr Feed F = Feed::scaled;
    for_own_leaves<F>(b, [&](const auto &s, const auto &o, const auto &one, const Leaf &where, uint32_t leaf) INLINED {
        uint32_t most = 0; // factors are not negative, so they compare as integers, and a NaN is above them all
        if (threadIdx.x == 0) most_of_block = 0;
        for_packs(where.n, o.aligned, [&]<int V>(Width<V>, int at) INLINED {
            const int64_t i = where.begin + at;
            Inputs<V> t = load_mean<V, F>(b, s, o, one, i);
            unrolled<V>([&](int k) INLINED {
                const float value = o.one.anchored && t.moment[1].at[k] == 0 ? 0.0f : t.g.at[k];
                const LambUpdate u =
                    lamb_take_mean(s.scalars, o.one, value, one.mask != nullptr ? one.mask[i + k] : 1.0f, t.p.at[k],
                                   t.moment[0].at[k], t.moment[1].at[k], t.own.at[k]);
                tiles.a[at + k] = u.without_decay;
                tiles.b[at + k] = u.update;
                most = larger_factor(most, bits_of(u.factor) & 0x7fffffffu);
            });
            store(t.moment[0], s.job.moment(0), i);
            store(t.own, one.fresh, i);
        });
        sum_tiles(b.d, leaf, where.n, tiles); // a barrier first
        most = largest_of_lanes(most);
        if (threadIdx.x % 32 == 0) atomicMax(&most_of_block, most);
        __syncthreads();
        if (threadIdx.x == 0) b.one.factors[leaf] = double(float_of(most_of_block));
    });
}
/// The trust ratios that follow, or what other ranks need for theirs. One block.
__global__ void __launch_bounds__(kThreads, 1) onebit_trust_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel(b.d.plan.shards.count == 0); // as update_kernel()
    const StepPlan &plan = b.d.plan;
    if (skipped(b.d)) return;
    for_tensors(plan, [&](int32_t i, int32_t leaves, auto by) INLINED {
        const TensorJob &job = plan.jobs[i];
        if (job.owner != Owner::exchange) return;
        const double factor = by.most(b.one.factors + job.first_leaf, leaves),
                     without_decay = by.sum(plan.sums_a + job.first_leaf, leaves),
                     with_decay = by.sum(plan.sums_b + job.first_leaf, leaves);
        if (by.lead) find_frozen_trust(plan, b.one, i, factor, without_decay, with_decay);
    });
}
/// Those of sharded tensors, as shared_trust_kernel().
__global__ void __launch_bounds__(kThreads, 1) onebit_shared_trust_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel(true);
    const StepPlan &plan = b.d.plan;
    if (skipped(b.d)) return;
    for (int64_t i = threadIdx.x; i < plan.count; i += kThreads) take_shared_frozen_trust(plan, b.one, i);
}

__global__ void __launch_bounds__(kThreads, 4) onebit_lamb_weights_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel();
    for_own_packs<Feed::scaled>(b, [&]<int V>(Width<V>, const auto &s, const auto &, const auto &, int64_t i) INLINED {
        Inputs<V> t = load_inputs<V, 2, false>(s.job, i);
        const Pack<V> old = t.p;
        const float lr = s.scalars.lr * s.trust;
        unrolled<V>([&](int k) INLINED {
            t.p.at[k] = t.p.at[k] - lr * frozen_update(s.scalars, t.p.at[k], t.moment[0].at[k], t.moment[1].at[k]);
        });
        publish(b.d.plan, s, t.p, old, i);
    });
}

/// Before anything else of a step that is taken. One block.
__global__ void __launch_bounds__(kThreads, 1) begin_onebit_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel(true);
    const StepPlan &plan = b.d.plan;
    if (skipped(b.d)) return;
    for (int64_t i = threadIdx.x; i < plan.count; i += kThreads) begin_tensor(b.one, i);
    for (int64_t g = threadIdx.x; g < plan.group_count; g += kThreads) begin_group(plan, b.one, g);
}

/// The original's 1-bit LAMB has one scale for everything, so momenta are first brought to the same size: sums of
/// squares a leaf, and then, in one block, the factors.
__global__ void __launch_bounds__(kThreads) momentum_squares_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel(true);
    __shared__ __align__(16) float tiles[kWarps][kTile];
    if (skipped(b.d) || b.one.trust_scaling[0] != 0) return;
    for_leaves_by_warp(b.d, [&](uint32_t leaf, int32_t tensor) INLINED {
        const TensorJob &job = b.d.plan.jobs[tensor];
        const Leaf where(job, leaf);
        const double squares = leaf_squares(job.moment(0), where.begin, where.n, tiles[threadIdx.x / 32]);
        if (threadIdx.x % 32 == 0) b.d.plan.sums_a[leaf] = squares;
    });
}
__global__ void __launch_bounds__(kThreads, 1) momentum_scaling_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel(true);
    __shared__ double mean;
    const StepPlan &plan = b.d.plan;
    const bool known = b.one.trust_scaling[0] != 0;
    __syncthreads(); // it is written below
    if (skipped(b.d) || known) return;
    for_tensors(plan, [&](int32_t i, int32_t leaves, auto by) INLINED {
        const double squares = by.sum(plan.sums_a + plan.jobs[i].first_leaf, leaves);
        if (by.lead) b.one.trust_scaling[i] = rms_of(squares, plan.jobs[i].numel);
    });
    __syncthreads();
    if (threadIdx.x < 32) {
        const double sum = add_by_warp(int32_t(plan.count), [&](int32_t i) INLINED {
            return double(b.one.trust_scaling[i]) / double(plan.count);
        });
        if (threadIdx.x == 0) mean = sum;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < plan.count; i += kThreads)
        b.one.trust_scaling[i] = b.one.trust_scaling[i] > 0 ? float(mean / double(b.one.trust_scaling[i])) : 1.0f;
}

/// What every step ends with, also one that is skipped. One block.
__global__ void __launch_bounds__(kThreads, 1) end_onebit_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel();
    const StepPlan &plan = b.d.plan;
    const bool taken = !skipped(b.d);
    for (int64_t i = threadIdx.x; taken && i < plan.count; i += kThreads) end_tensor(plan, b.one, i);
    for (int64_t g = threadIdx.x; taken && g < plan.group_count; g += kThreads) end_group(b.one, g);
    if (threadIdx.x == 0) end_schedule(b.one, taken);
}

/// Rows of results to where the momentum is kept.
__global__ void __launch_bounds__(kThreads) keep_momentum_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel();
    if (skipped(b.d)) return;
    const int64_t words = b.x.all.row_bytes * b.x.all.ranks / 4;
    const auto *from = reinterpret_cast<const int32_t *>(b.x.results);
    auto *to = reinterpret_cast<int32_t *>(b.one.momentum);
    for (int64_t k = grid_thread(); k < words; k += grid_threads()) to[k] = from[k];
}

/// Standard mode, after the variance has moved: which elements have one.
__global__ void __launch_bounds__(kThreads) find_active_kernel(GRID_CONSTANT const DeviceOneBit b) {
    begin_kernel();
    for_leaves_by_block(b.d, [&](uint32_t leaf, int32_t tensor) INLINED {
        const TensorJob &job = b.d.plan.jobs[tensor];
        const int64_t worker = b.one.jobs[tensor].worker;
        const Leaf where(job, leaf);
        if (worker < 0) return;
        for (int first = int(threadIdx.x) / 32 * 32; first < where.n; first += kThreads) {
            const int i = first + int(threadIdx.x % 32);
            const bool has = i < where.n && load<1>(job.moment(1), where.begin + i).at[0] != 0;
            const unsigned word = __ballot_sync(0xffffffffu, has);
            if (threadIdx.x % 32 == 0) b.one.active[(worker + where.begin + first) / 32] = int32_t(word);
        }
    });
}

/// The step that froze the variance: copies are taken, and errors belong to another quantity from here on.
__global__ void __launch_bounds__(kThreads)
    freeze_kernel(GRID_CONSTANT const DeviceOneBit b, const bool copies_variance) {
    begin_kernel();
    if (b.one.rules.compat && skipped(b.d)) return;
    for_leaves_by_block(b.d, [&](uint32_t leaf, int32_t tensor) INLINED {
        const TensorJob &job = b.d.plan.jobs[tensor];
        const OneBitJob &one = b.one.jobs[tensor];
        const Leaf where(job, leaf);
        const bool aligned = all_aligned(job.data[kWeight], job.data[kMoment + 1], one.fresh, one.anchor);
        for_packs(where.n, aligned, [&]<int V>(Width<V>, int at) INLINED {
            const int64_t i = where.begin + at;
            if (copies_variance && one.fresh != nullptr) store(load<V>(job.moment(1), i), one.fresh, i);
            if (one.anchor != nullptr) store(load<V>(job.weight(), i), one.anchor, i);
        });
    });
    if (!b.one.exchanges || b.x.values != nullptr) return; // nothing is owed
    const int64_t workers = b.x.own.worker_numel + b.x.own.part_count,
                  servers = b.x.own.server_numel + b.x.own.row_scales;
    for (int64_t k = grid_thread(); k < workers; k += grid_threads()) b.x.worker[k] = 0;
    for (int64_t k = grid_thread(); k < servers; k += grid_threads()) b.x.server[k] = 0;
}

} // namespace dsopt::gpu
