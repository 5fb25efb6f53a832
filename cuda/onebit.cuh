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
    bool packs;         // a part is one tensor: bits are made while its kept sums are at hand
    bool whole_vectors; // four neighbours of a tensor have their bits side by side
};

/// Everything that the rules read, of V neighbours.
template <int V> struct Inputs { Pack<V> g, p, m, v, track; };
template <int V, Feed F>
__device__ __forceinline__ Inputs<V> load_inputs(const DeviceOneBit &b, const TensorJob &job, const OneBitJob &one,
                                                 int64_t i) {
    Inputs<V> t;
    t.g = load_gradient<V, true>(job, i);
    if (F == Feed::momentum && b.one.momentum != nullptr && b.one.schedule->momentum_in_bits != 0)
        t.m = mean_of<V>(b.x, b.one.momentum, one.part, one.worker + i);
    else
        t.m = load<V>(job.moment[0].data, job.moment[0].type, i, aligned16(job.moment[0].data));
    if constexpr (F == Feed::distance) {
        t.p = load_weight<V>(job, i);
        t.v = load<V>(job.moment[1].data, job.moment[1].type, i, aligned16(job.moment[1].data));
        t.track = load<V>(one.track(), Dtype::f32, i, aligned16(one.track()));
    } else {
        t.p = t.v = t.track = Pack<V>{};
    }
    return t;
}

/// Scalars of a tensor that go beside those of find_scalars().
struct SharedOneBit {
    OneBitScalars one;
    float scale; // of its kept sums
};
template <Feed F> __device__ inline void find_onebit_scalars(const DeviceOneBit &b, int32_t tensor, SharedOneBit &s) {
    s.one = onebit_scalars(b.one, F, tensor, b.d.plan.jobs[tensor].group);
    s.scale = b.one.exchanges && b.x.message == nullptr ? b.x.worker_scales()[b.one.jobs[tensor].part] : 0.0f;
}

/// body(tensor, job, begin, n, leaf) for the block's leaves of tensors that go into exchanges, with their scalars
/// found.
template <Feed F, class Body>
__device__ __forceinline__ void for_own_leaves(const DeviceOneBit &b, SharedScalars &s, SharedOneBit &o,
                                               const Body &body) {
    const StepPlan &plan = b.d.plan;
    if (skipped(b.d)) return;
    if (threadIdx.x == 0) s.group = -1, s.step = -1, s.trust = 1;
    for (uint32_t leaf = blockIdx.x; leaf < b.d.leaves; leaf += gridDim.x) {
        const int32_t tensor = b.d.tensor_of_leaf[leaf];
        const TensorJob &job = plan.jobs[tensor];
        if (!job.present || !job.onebit) continue;
        __syncthreads();
        if (threadIdx.x == 0) {
            find_scalars(b.d, tensor, s);
            find_onebit_scalars<F>(b, tensor, o);
        }
        __syncthreads();
        const int64_t begin = (leaf - job.first_leaf) * kLeaf;
        body(tensor, job, begin, int(job.numel - begin < kLeaf ? job.numel - begin : kLeaf), leaf);
    }
}

/// body(V, i, place) for a leaf of a tensor. Four elements at a time where their bits are neighbours in a row; moments
/// and weights are fp32 in this family. In compat mode one by one: a part may begin anywhere.
template <class Body>
__device__ __forceinline__ void for_own_packs(const DeviceOneBit &b, int64_t begin, int n, const Body &body) {
    const int whole = b.whole_vectors ? n / 4 * 4 : 0;
    for (int place = int(threadIdx.x) * 4; place < whole; place += kThreads * 4)
        body(std::integral_constant<int, 4>{}, begin + place, place);
    for (int place = whole + int(threadIdx.x); place < n; place += kThreads)
        body(std::integral_constant<int, 1>{}, begin + place, place);
}

/// Own values and what is owed to the kept sums, and their bits to the rows. Before a synchronisation 0/1 Adam takes
/// its step here.
template <Feed F>
__global__ void __launch_bounds__(kThreads, F == Feed::distance ? 3 : 4) feed_kernel(const DeviceOneBit b) {
    DYNAMIC_SHARED(float, room); // a leaf, where bits are made here
    __shared__ SharedScalars s;
    __shared__ SharedOneBit o;
    for_own_leaves<F>(b, s, o, [&](int32_t tensor, const TensorJob &job, int64_t begin, int n, uint32_t) {
        const OneBitJob &one = b.one.jobs[tensor];
        float *kept = b.one.exchanges ? (b.x.message != nullptr ? b.x.message : b.x.worker) + one.worker : nullptr;
        for_own_packs(b, begin, n, [&](auto width, int64_t i, int place) {
            constexpr int W = decltype(width)::value;
            Inputs<W> t = load_inputs<W, F>(b, job, one, i);
            if constexpr (F == Feed::distance) {
#pragma unroll
                for (int k = 0; k < W; ++k)
                    local_step(s.scalars, o.one, t.g.at[k], t.p.at[k], t.m.at[k], t.v.at[k], t.track.at[k]);
                store(t.p, job.weight, job.weight_type, i, aligned16(job.weight));
                store(t.m, job.moment[0].data, job.moment[0].type, i, aligned16(job.moment[0].data));
                if (!o.one.anchored) store(t.track, one.track(), Dtype::f32, i, aligned16(one.track()));
            }
            if (kept == nullptr) return;
            if (b.x.message != nullptr) { // the values as they are
                Pack<W> x;
#pragma unroll
                for (int k = 0; k < W; ++k)
                    x.at[k] =
                        feed_value(F, s.scalars, o.one, t.g.at[k], t.p.at[k], t.m.at[k], t.v.at[k], t.track.at[k]);
                store(x, kept, Dtype::f32, i, aligned16(kept));
                return;
            }
            const uint32_t active = active_from(b.x.active, one.worker + i);
            Pack<W> sum = load<W>(kept, Dtype::f32, i, aligned16(kept));
#pragma unroll
            for (int k = 0; k < W; ++k) {
                const float value =
                    feed_value(F, s.scalars, o.one, t.g.at[k], t.p.at[k], t.m.at[k], t.v.at[k], t.track.at[k]);
                sum.at[k] = value + error_of(sum.at[k], o.scale);
                if (!((active >> k) & 1u)) sum.at[k] = 0;
                if (b.packs) room[place + k] = sum.at[k];
            }
            store(sum, kept, Dtype::f32, i, aligned16(kept));
        });
        if (!b.packs) return;
        __syncthreads();
        pack_room(b.x, one.part, one.worker + begin, n, room, b.x.layout.part_leaf[one.part] + begin / kLeaf);
    });
}

/// What is behind the tensors of a part.
__global__ void __launch_bounds__(kThreads, 4) feed_padding_kernel(const DeviceOneBit b) {
    if (skipped(b.d)) return;
    for (int32_t i = int32_t(blockIdx.x); i < b.x.layout.part_count; i += int32_t(gridDim.x)) {
        const CompressLayout::Part part = b.x.layout.parts[i];
        const float scale = b.x.worker_scales()[i];
        float *kept = b.x.worker + part.begin;
        for (int64_t k = part.used + threadIdx.x; k < part.numel; k += kThreads) {
            const float owed = error_of(kept[k], scale);
            kept[k] = b.one.padding != nullptr ? b.one.padding[k - part.used] + owed : owed;
        }
    }
}
__global__ void __launch_bounds__(kThreads, 4) finish_padding_kernel(const DeviceOneBit b) {
    if (skipped(b.d)) return;
    const CompressLayout::Part part = b.x.layout.parts[0];
    const int64_t used = part.used;
    for (int64_t k = used + int64_t(blockIdx.x) * kThreads + threadIdx.x; k < part.numel;
         k += int64_t(gridDim.x) * kThreads)
        b.one.padding[k - used] = mean_of<1>(b.x, b.x.results, 0, part.begin + k).at[0];
}

/// Without other ranks the own values are the mean of V neighbours.
template <int V, Feed F>
__device__ __forceinline__ Pack<V> own_values(const SharedScalars &s, const SharedOneBit &o, const Inputs<V> &t) {
    Pack<V> y;
#pragma unroll
    for (int k = 0; k < V; ++k)
        y.at[k] = feed_value(F, s.scalars, o.one, t.g.at[k], t.p.at[k], t.m.at[k], t.v.at[k], t.track.at[k]);
    return y;
}

/// From the mean to momentum and weights.
template <Feed F>
__global__ void __launch_bounds__(kThreads, F == Feed::distance ? 3 : 4) finish_kernel(const DeviceOneBit b) {
    __shared__ SharedScalars s;
    __shared__ SharedOneBit o;
    const StepPlan &plan = b.d.plan;
    for_own_leaves<F>(b, s, o, [&](int32_t tensor, const TensorJob &job, int64_t begin, int n, uint32_t) {
        const OneBitJob &one = b.one.jobs[tensor];
        for_own_packs(b, begin, n, [&](auto width, int64_t i, int) {
            constexpr int W = decltype(width)::value;
            Inputs<W> t;
            Pack<W> y;
            t.g = t.m = t.track = Pack<W>{};
            if (b.one.exchanges) // first: where it comes from needs registers, too
                y = mean_of<W>(b.x, b.x.results, one.part, one.worker + i);
            else
                t.g = load_gradient<W, true>(job, i);
            if (F != Feed::momentum || !b.one.exchanges) // otherwise the mean replaces it
                t.m = load<W>(job.moment[0].data, job.moment[0].type, i, aligned16(job.moment[0].data));
            t.p = load_weight<W>(job, i);
            t.v = load<W>(job.moment[1].data, job.moment[1].type, i, aligned16(job.moment[1].data));
            if constexpr (F == Feed::distance) t.track = load<W>(one.track(), Dtype::f32, i, aligned16(one.track()));
            const Pack<W> old = t.p;
            if (!b.one.exchanges) y = own_values<W, F>(s, o, t);
            if (one.mask != nullptr) {
#pragma unroll
                for (int k = 0; k < W; ++k) y.at[k] *= one.mask[i + k];
            }
#pragma unroll
            for (int k = 0; k < W; ++k)
                take_mean(F, s.scalars, o.one, y.at[k], t.p.at[k], t.m.at[k], t.v.at[k], t.track.at[k]);
            if (b.one.momentum == nullptr)
                store(t.m, job.moment[0].data, job.moment[0].type, i, aligned16(job.moment[0].data));
            if constexpr (F == Feed::distance) store(t.track, one.track(), Dtype::f32, i, aligned16(one.track()));
            publish<W, true>(plan, job, s, t.p, old, i);
        });
    });
}

/// 0/1 Adam between exchanges.
__global__ void __launch_bounds__(kThreads, 4) local_kernel(const DeviceOneBit b) {
    __shared__ SharedScalars s;
    __shared__ SharedOneBit o;
    for_own_leaves<Feed::distance>(b, s, o, [&](int32_t tensor, const TensorJob &job, int64_t begin, int n, uint32_t) {
        const OneBitJob &one = b.one.jobs[tensor];
        for_own_packs(b, begin, n, [&](auto width, int64_t i, int) {
            constexpr int W = decltype(width)::value;
            Inputs<W> t = load_inputs<W, Feed::distance>(b, job, one, i);
#pragma unroll
            for (int k = 0; k < W; ++k)
                local_step(s.scalars, o.one, t.g.at[k], t.p.at[k], t.m.at[k], t.v.at[k], t.track.at[k]);
            store(t.m, job.moment[0].data, job.moment[0].type, i, aligned16(job.moment[0].data));
            if (!o.one.anchored) store(t.track, one.track(), Dtype::f32, i, aligned16(one.track()));
            publish<W, true>(b.d.plan, job, s, t.p, t.p, i);
        });
    });
}

/// 1-bit LAMB: the moments and, a leaf each, the sums of squares of the update and the largest factor.
__global__ void __launch_bounds__(kThreads, 3) onebit_lamb_moments_kernel(const DeviceOneBit b) {
    DYNAMIC_SHARED(float, room);
    __shared__ SharedScalars s;
    __shared__ SharedOneBit o;
    __shared__ uint32_t most_of_block;
    const Rooms rooms{room, room + kLeaf};
    for_own_leaves<Feed::scaled>(
        b, s, o, [&](int32_t tensor, const TensorJob &job, int64_t begin, int n, uint32_t leaf) {
            const OneBitJob &one = b.one.jobs[tensor];
            uint32_t most = 0; // factors are not negative, so they compare as integers, and a NaN is above them all
            if (threadIdx.x == 0) most_of_block = 0;
            for_own_packs(b, begin, n, [&](auto width, int64_t i, int place) {
                constexpr int W = decltype(width)::value;
                Inputs<W> t;
                Pack<W> y;
                t.g = t.track = Pack<W>{};
                if (b.one.exchanges)
                    y = mean_of<W>(b.x, b.x.results, one.part, one.worker + i);
                else
                    t.g = load_gradient<W, true>(job, i);
                t.m = load<W>(job.moment[0].data, job.moment[0].type, i, aligned16(job.moment[0].data));
                t.p = load_weight<W>(job, i);
                t.v = load<W>(job.moment[1].data, job.moment[1].type, i, aligned16(job.moment[1].data));
                Pack<W> fresh = load<W>(one.fresh, Dtype::f32, i, aligned16(one.fresh));
                if (!b.one.exchanges) y = own_values<W, Feed::scaled>(s, o, t);
#pragma unroll
                for (int k = 0; k < W; ++k) {
                    const float value = o.one.anchored && t.v.at[k] == 0 ? 0.0f : y.at[k];
                    const LambUpdate u =
                        lamb_take_mean(s.scalars, o.one, value, one.mask != nullptr ? one.mask[i + k] : 1.0f, t.p.at[k],
                                       t.m.at[k], t.v.at[k], fresh.at[k]);
                    rooms.a[place + k] = u.without_decay;
                    rooms.b[place + k] = u.update;
                    const uint32_t factor = bits_of(u.factor) & 0x7fffffffu;
                    most = factor > most ? factor : most;
                }
                store(t.m, job.moment[0].data, job.moment[0].type, i, aligned16(job.moment[0].data));
                store(fresh, one.fresh, Dtype::f32, i, aligned16(one.fresh));
            });
            sum_rooms(b.d, leaf, n, rooms); // a barrier first
            for (int width = 16; width != 0; width /= 2) {
                const uint32_t other = __shfl_xor_sync(0xffffffffu, most, width);
                most = other > most ? other : most;
            }
            if (threadIdx.x % 32 == 0) atomicMax(&most_of_block, most);
            __syncthreads();
            if (threadIdx.x == 0) b.one.factors[leaf] = double(float_of(most_of_block));
        });
}
/// The trust ratios that follow, or what other ranks need for theirs. One block.
__global__ void __launch_bounds__(kThreads, 1) onebit_trust_kernel(const DeviceOneBit b) {
    const StepPlan &plan = b.d.plan;
    if (skipped(b.d)) return;
    for_tensors(
        int32_t(plan.count), [&](int32_t i) { return int32_t(leaves_of(plan.jobs[i].numel)); },
        [&](int32_t i, int32_t leaves, auto by) {
            const TensorJob &job = plan.jobs[i];
            if (!job.present || !job.onebit) return;
            const double factor = by.most(b.one.factors + job.first_leaf, leaves),
                         without = by.sum(plan.sums_a + job.first_leaf, leaves),
                         with = by.sum(plan.sums_b + job.first_leaf, leaves);
            if (by.lead) find_frozen_trust(plan, b.one, i, factor, without, with);
        });
}
/// Those of sharded tensors, as shared_trust_kernel().
__global__ void __launch_bounds__(kThreads, 1) onebit_shared_trust_kernel(const DeviceOneBit b) {
    const StepPlan &plan = b.d.plan;
    if (skipped(b.d)) return;
    for (int64_t i = threadIdx.x; i < plan.count; i += kThreads) take_shared_frozen_trust(plan, b.one, i);
}

__global__ void __launch_bounds__(kThreads, 4) onebit_lamb_weights_kernel(const DeviceOneBit b) {
    __shared__ SharedScalars s;
    __shared__ SharedOneBit o;
    for_own_leaves<Feed::scaled>(b, s, o, [&](int32_t, const TensorJob &job, int64_t begin, int n, uint32_t) {
        for_own_packs(b, begin, n, [&](auto width, int64_t i, int) {
            constexpr int W = decltype(width)::value;
            Pack<W> p = load_weight<W>(job, i);
            const Pack<W> m = load<W>(job.moment[0].data, job.moment[0].type, i, aligned16(job.moment[0].data)),
                          v = load<W>(job.moment[1].data, job.moment[1].type, i, aligned16(job.moment[1].data)),
                          old = p;
            const float lr = s.scalars.lr * s.trust;
#pragma unroll
            for (int k = 0; k < W; ++k) p.at[k] = p.at[k] - lr * frozen_update(s.scalars, p.at[k], m.at[k], v.at[k]);
            publish<W, true>(b.d.plan, job, s, p, old, i);
        });
    });
}

/// Before anything else of a step that is taken. One block.
__global__ void __launch_bounds__(kThreads, 1) begin_onebit_kernel(const DeviceOneBit b) {
    const StepPlan &plan = b.d.plan;
    if (skipped(b.d)) return;
    for (int64_t i = threadIdx.x; i < plan.count; i += kThreads) begin_tensor(b.one, i);
    for (int64_t g = threadIdx.x; g < plan.group_count; g += kThreads) begin_group(plan, b.one, g);
}

/// The original's 1-bit LAMB has one scale for everything, so momenta are first brought to the same size: sums of
/// squares a leaf, and then, in one block, the factors.
__global__ void __launch_bounds__(kThreads) momentum_squares_kernel(const DeviceOneBit b) {
    __shared__ float room[kWarps][kStage];
    const StepPlan &plan = b.d.plan;
    const int warp = int(threadIdx.x / 32);
    if (skipped(b.d) || b.one.trust_scaling[0] != 0) return;
    for (uint32_t leaf = blockIdx.x * kWarps + warp; leaf < b.d.leaves; leaf += gridDim.x * kWarps) {
        const TensorJob &job = plan.jobs[b.d.tensor_of_leaf[leaf]];
        const int64_t begin = (leaf - job.first_leaf) * kLeaf;
        const int n = int(job.numel - begin < kLeaf ? job.numel - begin : kLeaf);
        const double squares = leaf_squares(job.moment[0].data, job.moment[0].type, begin, n, room[warp]);
        if (threadIdx.x % 32 == 0) plan.sums_a[leaf] = squares;
    }
}
__global__ void __launch_bounds__(kThreads, 1) momentum_scaling_kernel(const DeviceOneBit b) {
    __shared__ double mean;
    const StepPlan &plan = b.d.plan;
    const bool known = b.one.trust_scaling[0] != 0;
    __syncthreads(); // it is written below
    if (skipped(b.d) || known) return;
    for_tensors(
        int32_t(plan.count), [&](int32_t i) { return int32_t(leaves_of(plan.jobs[i].numel)); },
        [&](int32_t i, int32_t leaves, auto by) {
            const double squares = by.sum(plan.sums_a + plan.jobs[i].first_leaf, leaves);
            if (by.lead) b.one.trust_scaling[i] = rms_of(squares, plan.jobs[i].numel);
        });
    __syncthreads();
    if (threadIdx.x < 32) {
        const double sum = add_by_warp(int32_t(plan.count),
                                       [&](int32_t i) { return double(b.one.trust_scaling[i]) / double(plan.count); });
        if (threadIdx.x == 0) mean = sum;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < plan.count; i += kThreads)
        b.one.trust_scaling[i] = b.one.trust_scaling[i] > 0 ? float(mean / double(b.one.trust_scaling[i])) : 1.0f;
}

/// What every step ends with, also one that is skipped. One block.
__global__ void __launch_bounds__(kThreads, 1) end_onebit_kernel(const DeviceOneBit b) {
    const StepPlan &plan = b.d.plan;
    const bool taken = !skipped(b.d);
    for (int64_t i = threadIdx.x; taken && i < plan.count; i += kThreads) end_tensor(plan, b.one, i);
    for (int64_t g = threadIdx.x; taken && g < plan.group_count; g += kThreads) end_group(b.one, g);
    if (threadIdx.x == 0) end_schedule(b.one, taken);
}

/// Rows of results to where the momentum is kept.
__global__ void __launch_bounds__(kThreads) keep_momentum_kernel(const DeviceOneBit b) {
    if (skipped(b.d)) return;
    const int64_t words = b.x.all.row_bytes * b.x.all.ranks / 4;
    const auto *from = reinterpret_cast<const int32_t *>(b.x.results);
    auto *to = reinterpret_cast<int32_t *>(b.one.momentum);
    for (int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x; k < words; k += int64_t(gridDim.x) * kThreads)
        to[k] = from[k];
}

/// Standard mode, after the variance has moved: which elements have one.
__global__ void __launch_bounds__(kThreads) find_active_kernel(const DeviceOneBit b) {
    const StepPlan &plan = b.d.plan;
    for (uint32_t leaf = blockIdx.x; leaf < b.d.leaves; leaf += gridDim.x) {
        const int32_t tensor = b.d.tensor_of_leaf[leaf];
        const TensorJob &job = plan.jobs[tensor];
        const int64_t worker = b.one.jobs[tensor].worker, begin = (leaf - job.first_leaf) * kLeaf;
        if (worker < 0) continue;
        const int n = int(job.numel - begin < kLeaf ? job.numel - begin : kLeaf);
        for (int k = int(threadIdx.x) / 32 * 32; k < n; k += kThreads) {
            const int own = k + int(threadIdx.x % 32);
            const bool has = own < n && load_one(job.moment[1].data, job.moment[1].type, begin + own) != 0;
            const unsigned word = __ballot_sync(0xffffffffu, has);
            if (threadIdx.x % 32 == 0) b.one.active[(worker + begin + k) / 32] = int32_t(word);
        }
    }
}

/// The step that froze the variance: copies are taken, and errors belong to another quantity from here on.
__global__ void __launch_bounds__(kThreads) freeze_kernel(const DeviceOneBit b, const bool copies_variance) {
    const StepPlan &plan = b.d.plan;
    if (b.one.compat && skipped(b.d)) return;
    for (uint32_t leaf = blockIdx.x; leaf < b.d.leaves; leaf += gridDim.x) {
        const int32_t tensor = b.d.tensor_of_leaf[leaf];
        const TensorJob &job = plan.jobs[tensor];
        const OneBitJob &one = b.one.jobs[tensor];
        const int64_t begin = (leaf - job.first_leaf) * kLeaf;
        const int n = int(job.numel - begin < kLeaf ? job.numel - begin : kLeaf);
        for_packs<4>(begin, n, [&](auto width, int64_t i, int) {
            constexpr int W = decltype(width)::value;
            if (copies_variance && one.fresh != nullptr)
                store(load<W>(job.moment[1].data, Dtype::f32, i, aligned16(job.moment[1].data)), one.fresh, Dtype::f32,
                      i, aligned16(one.fresh));
            if (one.anchor != nullptr) store(load_weight<W>(job, i), one.anchor, Dtype::f32, i, aligned16(one.anchor));
        });
    }
    if (!b.one.exchanges || b.x.values != nullptr) return; // nothing is owed
    const int64_t workers = b.x.layout.worker_numel + b.x.layout.part_count,
                  servers = b.x.layout.server_numel + b.x.layout.row_scales;
    for (int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x; k < workers; k += int64_t(gridDim.x) * kThreads)
        b.x.worker[k] = 0;
    for (int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x; k < servers; k += int64_t(gridDim.x) * kThreads)
        b.x.server[k] = 0;
}

} // namespace dsopt::gpu
