// SPDX-License-Identifier: Apache-2.0
// Steps of the 1-bit family: kernels before an exchange, after it, and at the end of every step. Only the device knows
// if the step is skipped. So the host always launches all kernels, and every kernel tests if the step is skipped.
#include "compress.cuh"
#include "device/onebit_plan.h"
#include "kernels.h"
#include "reduce.cuh"
#include "update.cuh"

namespace dsopt::gpu {

/// Passed by value to every kernel of a step of the 1-bit family. Pointers of `onebit` are device pointers here.
struct DeviceOneBit {
    DevicePlan d;
    OneBitPlan onebit;
    Exchange exchange;
    bool packs;    // feed_also_packs()
    bool in_slice; // `d` has StepPlan::slice_jobs: arrays of the family are whole
    /// True if the bits of four neighbours of a tensor are in one byte, or there are no bits. In exchanges of compat
    /// mode a tensor may begin at any bit.
    bool whole_vectors;
};

/// Returns the index of a job's first element in a Compression or ListMean.
template <class Part>
__device__ __forceinline__ int64_t index_in(const Part &part, const TensorJob &job, const OneBitJob &onebit_job) {
    return onebit_job.worker + job.begin() - part.begin;
}

/// Loads the inputs of feed_values().
template <int V, Feed F>
__device__ __forceinline__ Inputs<V> load_inputs(const DeviceOneBit &b, const TensorJob &job,
                                                 const OneBitJob &onebit_job, int64_t i) {
    Inputs<V> t{};
    const bool in_bits =
        F == Feed::momentum && b.onebit.momentum != nullptr && b.onebit.schedule->momentum_in_bits != 0;
    t.g = fetch_gradient<V>(job, i);
    if (!in_bits) t.moment[0] = fetch<V>(job.moment(0), i);
    if constexpr (F == Feed::distance) {
        t.p = fetch<V>(job.weight(), i);
        t.moment[1] = fetch<V>(job.moment(1), i);
        t.onebit = load<V>(onebit_job.track(), b.in_slice ? job.begin() + i : i);
    }
    t.convert_all(job);
    if (in_bits)
        t.moment[0] = mean_of<V>(b.exchange.mean, b.onebit.momentum, onebit_job.scale_group,
                                 index_in(b.exchange.mean, job, onebit_job) + i);
    return t;
}

/// Scalars of a tensor in addition to those of find_scalars(). This struct is separate from SharedTensor: in one struct
/// with the job, the compiler would assume that each store may change all members.
struct SharedOneBit {
    OneBitScalars scalars;
    float scale;  // scale of its compensated values
    bool aligned; // all arrays are aligned, and DeviceOneBit::whole_vectors
};

/// Calls body(s, o, onebit_job, where) for this block's leaves of tensors in exchanges. Called once per kernel.
template <class Body> __device__ __forceinline__ void for_local_leaves(const DeviceOneBit &b, const Body &body) {
    __shared__ SharedTensor s;
    __shared__ SharedOneBit o;
    if (skipped(b.d)) return;
    const auto find = [&](int32_t tensor) INLINED {
        const OneBitJob &onebit_job = b.onebit.jobs[tensor];
        const bool compensates = b.onebit.has_peers && onebit_job.worker >= 0;
        o.scalars = onebit_scalars(b.onebit, tensor, b.d.plan.jobs[tensor].group);
        o.scale = compensates ? b.exchange.local.worker_scales()[onebit_job.scale_group] : 0.0f;
        o.aligned = b.whole_vectors && s.aligned &&
                    all_aligned(onebit_job.track(), onebit_job.fresh_variance, b.exchange.local.worker);
    };
    for_shared_leaves(b.d, {nullptr}, s, find, [&](const Leaf &where) INLINED {
        if (s.job.owner == Owner::exchange) body(s, o, b.onebit.jobs[s.tensor], where);
    });
}
/// Calls body(Width<V>, s, o, onebit_job, i) for V neighbours of a tensor in exchanges, from element i on.
template <class Body> __device__ __forceinline__ void for_local_packs(const DeviceOneBit &b, const Body &body) {
    for_local_leaves(b, [&](const auto &s, const auto &o, const auto &onebit_job, const Leaf &where) INLINED {
        for_packs(where.n, o.aligned,
                  [&](auto width, int offset) INLINED { body(width, s, o, onebit_job, where.begin + offset); });
    });
}

template <int V, Feed F>
__device__ __forceinline__ Pack<V> feed_values(const SharedTensor &s, const SharedOneBit &o, const Inputs<V> &t) {
    Pack<V> y;
    unrolled<V>([&](int k) INLINED {
        y.at[k] = feed_value(F, s.scalars, o.scalars, t.g.at[k], t.p.at[k], t.moment[0].at[k], t.moment[1].at[k],
                             t.onebit.at[k]);
    });
    return y;
}

/// Loads the inputs of apply_mean(), with the mean in place of the gradient. Without other ranks the mean is this
/// rank's values.
template <int V, Feed F>
__device__ __forceinline__ Inputs<V> load_mean(const DeviceOneBit &b, const SharedTensor &s, const SharedOneBit &o,
                                               const OneBitJob &onebit_job, int64_t i) {
    Inputs<V> t{};
    Pack<V> y;
    if (b.onebit.has_peers) // loaded first, because its addresses also need registers
        y = mean_of<V>(b.exchange.mean, b.exchange.mean.results, onebit_job.scale_group,
                       index_in(b.exchange.mean, s.job, onebit_job) + i);
    else
        t.g = fetch_gradient<V>(s.job, i);
    if (F != Feed::momentum || !b.onebit.has_peers)
        t.moment[0] = fetch<V>(s.job.moment(0), i); // else the mean replaces it
    t.p = fetch<V>(s.job.weight(), i);
    t.moment[1] = fetch<V>(s.job.moment(1), i);
    if constexpr (F == Feed::distance) t.onebit = load<V>(onebit_job.track(), i);
    if constexpr (F == Feed::scaled) t.onebit = load<V>(onebit_job.fresh_variance, i);
    t.convert_all(s.job);
    t.g = b.onebit.has_peers ? y : feed_values<V, F>(s, o, t);
    return t;
}

/// Adds this rank's values to the residual, stores the compensated values and, if b.packs, packs them into messages.
/// Before a synchronisation, also makes the local step of 0/1 Adam.
template <Feed F>
__global__ void __launch_bounds__(kThreads, F == Feed::distance ? 3 : 4)
    feed_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    DYNAMIC_SHARED(float, tile); // used if b.packs
    for_local_leaves(b, [&](const auto &s, const auto &o, const auto &onebit_job, const Leaf &where) INLINED {
        const int64_t first = index_in(b.exchange.local, s.job, onebit_job);
        float *const to = b.onebit.has_peers ? b.exchange.local.worker + first : nullptr;
        for_packs(where.n, o.aligned, [&]<int V>(Width<V>, int offset) INLINED {
            const int64_t i = where.begin + offset;
            Pack<V> sum{};
            if (to != nullptr) sum = load<V>(to, i);
            Inputs<V> t = load_inputs<V, F>(b, s.job, onebit_job, i);
            if constexpr (F == Feed::distance) {
                if (b.onebit.feed_steps) {
                    unrolled<V>([&](int k) INLINED {
                        local_step(s.scalars, o.scalars, t.g.at[k], t.p.at[k], t.moment[0].at[k], t.moment[1].at[k],
                                   t.onebit.at[k]);
                    });
                    store(t.p, s.job.weight(), i);
                    store(t.moment[0], s.job.moment(0), i);
                    if (!o.scalars.anchored) store(t.onebit, onebit_job.track(), i);
                }
            }
            if (to == nullptr) return;
            const Pack<V> values = feed_values<V, F>(s, o, t);
            const uint32_t active = active_from(b.exchange.local.active, first + i);
            sum = compensate(values, sum, o.scale, active);
            if (b.packs) to_tile(sum, tile + offset);
            store(sum, to, i);
        });
        if (b.packs)
            pack_leaf(b.exchange.local, onebit_job.scale_group, first + where.begin, where.n, tile,
                      b.exchange.local.layout.group_leaf[onebit_job.scale_group] + where.begin / kLeaf);
    });
}

/// Does the same as feed_kernel for the padding after the tensors of a scale group.
__global__ void __launch_bounds__(kThreads, 4)
    feed_padding_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    if (skipped(b.d)) return;
    const Compression &local = b.exchange.local;
    for (int32_t i = int32_t(blockIdx.x); i < local.layout.group_count; i += int32_t(gridDim.x)) {
        const CompressLayout::ScaleGroup group = local.layout.groups[i];
        const float scale = local.worker_scales()[i];
        float *values = local.worker + group.begin;
        for (int64_t k = group.used + threadIdx.x; k < group.numel; k += kThreads) {
            const float residual = error_of(values[k], scale);
            values[k] = b.onebit.padding != nullptr ? b.onebit.padding[k - group.used] + residual : residual;
        }
    }
}
__global__ void __launch_bounds__(kThreads, 4)
    decompress_padding_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    if (skipped(b.d)) return;
    const ListMean &mean = b.exchange.mean;
    const CompressLayout::ScaleGroup group = mean.layout.groups[0];
    for (int64_t k = group.used + grid_thread(); k < group.numel; k += grid_threads())
        b.onebit.padding[k - group.used] = mean_of<1>(mean, mean.results, 0, group.begin + k).at[0];
}

/// Updates momentum and weights from the mean. Without other ranks the mean is this rank's values.
template <Feed F>
__global__ void __launch_bounds__(kThreads, F == Feed::distance ? 3 : 4)
    apply_mean_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    for_local_packs(b, [&]<int V>(Width<V>, const auto &s, const auto &o, const auto &onebit_job, int64_t i) INLINED {
        Inputs<V> t = load_mean<V, F>(b, s, o, onebit_job, i);
        const Pack<V> old = t.p;
        if (onebit_job.mask != nullptr) {
            unrolled<V>([&](int k) INLINED { t.g.at[k] *= onebit_job.mask[i + k]; });
        }
        unrolled<V>([&](int k) INLINED {
            apply_mean(F, s.scalars, o.scalars, t.g.at[k], t.p.at[k], t.moment[0].at[k], t.moment[1].at[k],
                       t.onebit.at[k]);
        });
        if (b.onebit.momentum == nullptr) store(t.moment[0], s.job.moment(0), i);
        if constexpr (F == Feed::distance) store(t.onebit, onebit_job.track(), i);
        store_weights(b.d.plan, s, s.job, t.p, old, i);
    });
}

/// Local step of 0/1 Adam between exchanges.
__global__ void __launch_bounds__(kThreads, 4) local_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    constexpr Feed F = Feed::distance;
    for_local_packs(b, [&]<int V>(Width<V>, const auto &s, const auto &o, const auto &onebit_job, int64_t i) INLINED {
        Inputs<V> t = load_inputs<V, F>(b, s.job, onebit_job, i);
        unrolled<V>([&](int k) INLINED {
            local_step(s.scalars, o.scalars, t.g.at[k], t.p.at[k], t.moment[0].at[k], t.moment[1].at[k],
                       t.onebit.at[k]);
        });
        store(t.moment[0], s.job.moment(0), i);
        if (!o.scalars.anchored) store(t.onebit, onebit_job.track(), i);
        store_weights(b.d.plan, s, s.job, t.p, t.p, i);
    });
}

/// 1-bit LAMB: updates the moments and computes, per leaf, the sums of squares of the update and the largest factor.
__global__ void __launch_bounds__(kThreads, 3)
    onebit_lamb_moments_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    DYNAMIC_SHARED(float, memory);
    __shared__ uint32_t largest_of_block;
    const Tiles tiles{memory, memory + kLeaf};
    constexpr Feed F = Feed::scaled;
    for_local_leaves(b, [&](const auto &s, const auto &o, const auto &onebit_job, const Leaf &where) INLINED {
        uint32_t largest = 0; // factors are not negative: compared as integers, in which NaNs are the largest
        if (threadIdx.x == 0) largest_of_block = 0;
        for_packs(where.n, o.aligned, [&]<int V>(Width<V>, int offset) INLINED {
            const int64_t i = where.begin + offset;
            Inputs<V> t = load_mean<V, F>(b, s, o, onebit_job, i);
            unrolled<V>([&](int k) INLINED {
                const LambUpdate u = lamb_apply_mean(s.scalars, o.scalars, t.g.at[k],
                                                     onebit_job.mask != nullptr ? onebit_job.mask[i + k] : 1.0f,
                                                     t.p.at[k], t.moment[0].at[k], t.moment[1].at[k], t.onebit.at[k]);
                tiles.a[offset + k] = u.without_decay;
                tiles.b[offset + k] = u.update;
                largest = larger_factor(largest, bits_of(u.factor) & 0x7fffffffu);
            });
            store(t.moment[0], s.job.moment(0), i);
            store(t.onebit, onebit_job.fresh_variance, i);
        });
        sum_tiles(b.d.plan, s.job, where, tiles); // begins with a barrier
        largest = largest_of_lanes(largest);
        if (threadIdx.x % 32 == 0) atomicMax(&largest_of_block, largest);
        __syncthreads();
        if (threadIdx.x == 0) b.onebit.factors[leaf_index(s.job, where)] = double(float_of(largest_of_block));
    });
}
/// Computes the trust ratios from the results of onebit_lamb_moments_kernel or, for sharded tensors, stores the sums
/// for the all-reduce. One block.
__global__ void __launch_bounds__(kThreads, 1)
    onebit_trust_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    const StepPlan &plan = b.d.plan;
    if (skipped(b.d)) return;
    for_tensors(b.d, [&](int32_t i, int32_t, auto fold) INLINED { find_frozen_trust(plan, b.onebit, i, fold); });
}
/// Computes the trust ratios of sharded tensors, like shared_trust_kernel.
__global__ void __launch_bounds__(kThreads, 1)
    onebit_shared_trust_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    const StepPlan &plan = b.d.plan;
    if (skipped(b.d)) return;
    for (int64_t i = threadIdx.x; i < plan.count; i += kThreads) store_shared_frozen_trust_ratio(plan, b.onebit, i);
}

__global__ void __launch_bounds__(kThreads, 4)
    onebit_lamb_weights_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    for_local_packs(b, [&]<int V>(Width<V>, const auto &s, const auto &, const auto &, int64_t i) INLINED {
        Inputs<V> t = load_inputs<V, 2, false>(s.job, i);
        const Pack<V> old = t.p;
        const float lr = s.scalars.lr * s.trust;
        unrolled<V>([&](int k) INLINED {
            t.p.at[k] = t.p.at[k] - lr * frozen_update(s.scalars, t.p.at[k], t.moment[0].at[k], t.moment[1].at[k]);
        });
        store_weights(b.d.plan, s, s.job, t.p, old, i);
    });
}

/// Runs before everything else in a step that is taken. One block.
__global__ void __launch_bounds__(kThreads, 1)
    begin_onebit_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    const StepPlan &plan = b.d.plan;
    if (skipped(b.d)) return;
    for (int64_t i = threadIdx.x; i < plan.count; i += kThreads) begin_tensor(b.onebit, i);
    for (int64_t g = threadIdx.x; g < plan.group_count; g += kThreads) begin_group(plan, b.onebit, g);
}

/// Sums the squares of each leaf of the momenta. momentum_scaling_kernel then computes the scaling factors in one
/// block.
__global__ void __launch_bounds__(kThreads)
    momentum_squares_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    if (skipped(b.d) || has_momentum_scaling(b.onebit)) return;
    for_leaves_by_warp(b.d, {nullptr}, [&](uint32_t position, int32_t tensor) INLINED {
        const TensorJob &job = b.d.plan.jobs[tensor];
        const Leaf where(job, position);
        const double squares = leaf_squares(job.moment(0), where.begin, where.n);
        if (threadIdx.x % 32 == 0) b.d.plan.leaf.sums_a[leaf_index(job, where)] = squares;
    });
}
__global__ void __launch_bounds__(kThreads, 1)
    momentum_scaling_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    __shared__ double mean;
    const StepPlan &plan = b.d.plan;
    const bool known = has_momentum_scaling(b.onebit);
    __syncthreads(); // trust_scaling is written below
    if (skipped(b.d) || known) return;
    for_tensors(b.d, [&](int32_t i, int32_t, auto fold) INLINED { find_momentum_rms(plan, b.onebit, i, fold); });
    __syncthreads();
    if (threadIdx.x < 32) {
        const double sum =
            add_by_warp(int32_t(plan.count), [&](int32_t i) INLINED { return share_of_mean_rms(plan, b.onebit, i); });
        if (threadIdx.x == 0) mean = sum;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < plan.count; i += kThreads) scale_momentum(b.onebit, i, mean);
}

/// Runs at the end of every step, skipped or not. One block.
__global__ void __launch_bounds__(kThreads, 1)
    end_onebit_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    const StepPlan &plan = b.d.plan;
    const bool taken = !skipped(b.d);
    for (int64_t i = threadIdx.x; taken && i < plan.count; i += kThreads) end_tensor(plan, b.onebit, i);
    for (int64_t g = threadIdx.x; taken && g < plan.group_count; g += kThreads) end_group(b.onebit, g);
    if (threadIdx.x == 0) end_schedule(b.onebit, taken);
}

/// Copies the results to OneBitPlan::momentum.
__global__ void __launch_bounds__(kThreads)
    store_results_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    if (skipped(b.d)) return;
    const int64_t words = b.exchange.mean.layout.messages_bytes() / 4;
    const auto *from = reinterpret_cast<const int32_t *>(b.exchange.mean.results);
    auto *to = reinterpret_cast<int32_t *>(b.onebit.momentum);
    for (int64_t k = grid_thread(); k < words; k += grid_threads()) to[k] = from[k];
}

/// Finds the elements whose variance is not 0. Runs in standard mode, after an update of the variance.
__global__ void __launch_bounds__(kThreads) find_active_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument) {
    const DeviceOneBit &b = argument.begin_kernel();
    for_leaves_by_block(b.d, [&](uint32_t position, int32_t tensor) INLINED {
        const TensorJob &job = b.d.plan.jobs[tensor];
        const OneBitJob &onebit_job = b.onebit.jobs[tensor];
        const int64_t first_element = index_in(b.exchange.mean, job, onebit_job);
        const Leaf where(job, position);
        if (onebit_job.worker < 0) return;
        for (int first = int(threadIdx.x) / 32 * 32; first < where.n; first += kThreads) {
            const int i = first + int(threadIdx.x % 32);
            const bool nonzero = i < where.n && has_variance(load<1>(job.moment(1), where.begin + i).at[0]);
            const unsigned word = __ballot_sync(0xffffffffu, nonzero);
            if (threadIdx.x % 32 == 0) b.onebit.active[(first_element + where.begin + first) / 32] = int32_t(word);
        }
    });
}

/// Stores anchors and copies of the variance, and zeroes the residuals. Runs after the step that froze the variance.
__global__ void __launch_bounds__(kThreads)
    freeze_kernel(GRID_CONSTANT const PdlArgument<DeviceOneBit> argument, const bool copies_variance) {
    const DeviceOneBit &b = argument.begin_kernel();
    if (!freezes(b.onebit, skipped(b.d))) return;
    for_leaves_by_block(b.d, [&](uint32_t position, int32_t tensor) INLINED {
        const TensorJob &job = b.d.plan.jobs[tensor];
        const OneBitJob &onebit_job = b.onebit.jobs[tensor];
        const Leaf where(job, position);
        const bool aligned =
            all_aligned(job.data[kWeight], job.data[kMoment + 1], onebit_job.fresh_variance, onebit_job.anchor);
        for_packs(where.n, aligned, [&]<int V>(Width<V>, int offset) INLINED {
            const int64_t i = where.begin + offset;
            if (copies_variance && onebit_job.fresh_variance != nullptr)
                store(load<V>(job.moment(1), i), onebit_job.fresh_variance, i);
            if (onebit_job.anchor != nullptr) store(load<V>(job.weight(), i), onebit_job.anchor, i);
        });
    });
    if (!clears_residuals(b.onebit, b.exchange.mean)) return;
    const Compression &local = b.exchange.local;
    const int64_t workers = local.layout.worker_floats(), servers = local.layout.server_floats();
    for (int64_t k = grid_thread(); k < workers; k += grid_threads()) local.worker[k] = 0;
    for (int64_t k = grid_thread(); k < servers; k += grid_threads()) local.server[k] = 0;
}

// Indexed by Feed. OneBitPass::lamb_moments handles the mean of Feed::scaled.
using OneBitKernel = void (*)(PdlArgument<DeviceOneBit>);
constexpr OneBitKernel kFeedKernels[] = {feed_kernel<Feed::momentum>, feed_kernel<Feed::scaled>,
                                         feed_kernel<Feed::gradient>, feed_kernel<Feed::distance>};
constexpr OneBitKernel kApplyMeanKernels[] = {apply_mean_kernel<Feed::momentum>, nullptr,
                                              apply_mean_kernel<Feed::gradient>, apply_mean_kernel<Feed::distance>};

class OneBitStep final : public OneBitStepKernels {
public:
    OneBitStep(const StepPlan &plan, const DevicePlan &d, const DevicePlan &sent, const OneBitJob *jobs, void *layout,
               const Launcher &launcher) :
        launcher_(launcher),
        b_{.d = d,
           .onebit = *plan.onebit,
           .exchange = {},
           .packs = false,
           .in_slice = false,
           .whole_vectors = !(plan.onebit->has_peers && plan.onebit->rules.compat)} {
        b_.onebit.jobs = jobs;
        if (b_.onebit.has_peers) {
            b_.exchange = plan.onebit->exchange->on_device(layout, &plan.control->skip);
            b_.packs = feed_also_packs(b_.onebit);
        }
        feeding_ = b_;
        feeding_.d = sent;
        feeding_.in_slice = plan.slice_jobs != nullptr;
    }

    void run(ExchangePass pass) override { run_pass(pass, b_.exchange, nullptr, launcher_); }

    void run(OneBitPass pass) override {
        switch (pass) {
        case OneBitPass::momentum_squares:
            return launcher_.launch_grid(b_.d.leaves / kWarps + 1, {"momentum_squares", Next::kernel},
                                         momentum_squares_kernel, b_);
        case OneBitPass::feed: {
            const Next next = kernel_if(b_.onebit.has_peers); // completes the messages
            return launcher_.launch_grid({feeding_.d.leaves, b_.packs ? kTileBytes : 0}, {"feed", next},
                                         kFeedKernels[size_t(b_.onebit.feed)], feeding_);
        }
        case OneBitPass::feed_padding:
            return launcher_.launch_grid(b_.exchange.local.layout.group_count, {"feed_padding", Next::kernel},
                                         feed_padding_kernel, b_);
        case OneBitPass::apply_mean: return launch_over_leaves("apply_mean", kApplyMeanKernels[size_t(b_.onebit.feed)]);
        case OneBitPass::store_results: return launch_over_leaves("store_results", store_results_kernel);
        case OneBitPass::local: return launch_over_leaves("local", local_kernel);
        case OneBitPass::decompress_padding:
            return launcher_.launch_grid(b_.exchange.local.layout.ranks, "decompress_padding",
                                         decompress_padding_kernel, b_);
        case OneBitPass::lamb_moments:
            return launch_over_leaves({"onebit_lamb_moments", unless_shards()}, onebit_lamb_moments_kernel,
                                      2 * kTileBytes);
        case OneBitPass::lamb_weights: return launch_over_leaves("onebit_lamb_weights", onebit_lamb_weights_kernel);
        case OneBitPass::find_active: return launch_over_leaves("find_active", find_active_kernel);
        case OneBitPass::freeze: return launcher_.launch_grid(b_.d.leaves, "freeze", freeze_kernel, b_, false);
        case OneBitPass::freeze_variance: return launcher_.launch_grid(b_.d.leaves, "freeze", freeze_kernel, b_, true);
        }
    }

    void decide(OneBitDecision decision) override {
        switch (decision) {
        case OneBitDecision::begin:
            return launcher_.launch_block({"begin_onebit", after_begin()}, begin_onebit_kernel, b_);
        case OneBitDecision::scale_momenta:
            return launcher_.launch_block({"momentum_scaling", Next::kernel}, momentum_scaling_kernel, b_);
        case OneBitDecision::trust:
            return launcher_.launch_block({"onebit_trust", unless_shards()}, onebit_trust_kernel, b_);
        case OneBitDecision::shared_trust:
            return launcher_.launch_block({"onebit_shared_trust", Next::kernel}, onebit_shared_trust_kernel, b_);
        case OneBitDecision::end: return launcher_.launch_block("end_onebit", end_onebit_kernel, b_);
        }
    }

private:
    void launch_over_leaves(Label label, OneBitKernel kernel, size_t shared = 0) {
        launcher_.launch_grid({b_.d.leaves, shared}, label, kernel, b_);
    }
    // The order of passes is in src/step/onebit.cc. The sums of shards are zeroed before a kernel computes them, and
    // all-reduced afterwards.
    Next unless_shards() const { return kernel_if(b_.d.plan.shards.exchanged == 0 && !b_.onebit.sharded); }
    /// Exchanges of compat mode begin with a copy to the host, and the update of shards with a memset.
    Next after_begin() const {
        const bool host_decides = b_.onebit.has_peers && b_.onebit.rules.compat;
        return kernel_if(!host_decides && !b_.onebit.sharded && !b_.exchange.local.layout.has_holes &&
                         (b_.onebit.stage == Stage::local || b_.d.plan.shards.count == 0));
    }

    const Launcher &launcher_;
    DeviceOneBit b_, feeding_; // the latter for OneBitPass::feed
};

void with_onebit_kernels(const StepPlan &plan, const DevicePlan &d, const DevicePlan &sent, const OneBitJob *jobs,
                         void *layout, const Launcher &launcher, FunctionRef<void(OneBitStepKernels &)> body) {
    OneBitStep step(plan, d, sent, jobs, layout, launcher);
    body(step);
}

void load_onebit_kernels(KernelLoader &load) {
    for (const auto kernel : kFeedKernels) load(kernel);
    for (const auto kernel : kApplyMeanKernels)
        if (kernel != nullptr) load(kernel);
    load(begin_onebit_kernel, momentum_squares_kernel, momentum_scaling_kernel, feed_padding_kernel,
         decompress_padding_kernel, store_results_kernel, local_kernel, onebit_lamb_moments_kernel, onebit_trust_kernel,
         onebit_shared_trust_kernel, onebit_lamb_weights_kernel, find_active_kernel, freeze_kernel, end_onebit_kernel);
}

} // namespace dsopt::gpu
