// SPDX-License-Identifier: Apache-2.0
// Pass 2 of tensors whose moments or masters are stored in formats other than fp32. Kernels of their own: inside
// update_kernel the formats would take registers from lists without them. A step with both kinds of tensors launches
// both kernels, these last.
#include "formats.cuh"
#include "kernels.h"

namespace dsopt::gpu {

/// Resident blocks per multiprocessor.
constexpr int kStoredBlocks = 3;

/// What a block of threads shares, in addition to its tensor.
struct SharedFormats {
    Maps maps;
    uint64_t key[kMoments]; // of the moments that are rounded at random
};

/// Sets the keys of a tensor's moments. Called by one thread.
__device__ __forceinline__ void find_keys(const SharedTensor &s, SharedFormats &formats) {
    visit(s.rule, [&](auto formula) INLINED {
        using R = typename decltype(formula)::type;
        unrolled<R::moments.count>([&](int m) INLINED {
            constexpr MomentList moments = R::moments;
            const MomentKind kind = moments.info[m].squares ? MomentKind::square : MomentKind::gradient;
            formats.key[m] = moment_key(s.job.random_key, kind, s.step);
        });
    });
}

template <class R, int V>
__device__ __forceinline__ void update_block(const StepPlan &plan, const SharedTensor &s, const SharedFormats &formats,
                                             const Leaf &where, const BlockPacks<V> &packs, const Tiles &tiles) {
    constexpr int moments = R::moments.count;
    const TensorJob &job = s.job;
    BlockInputs<V> t;
    t.template load<moments>(job, packs, formats.maps);
    unrolled<BlockPacks<V>::count>([&](int q) INLINED {
        if (!packs.has(q)) return;
        Pack<V> &p = t.p.pack[q];
        const Pack<V> old = p;
        unrolled<V>([&](int k) INLINED {
            t.template with_moments_of<moments>(
                q, k, [&](auto &...each) INLINED { R{s.scalars}(t.g.pack[q].at[k], p.at[k], each...); });
        });
        store_masters<V>(plan, s, p, old, packs.at(q));
        if (plan.policy.report_norms) {
            const auto i = int(packs.at(q) - where.begin);
            to_tile(old, tiles.a + i);
            to_tile(p - old, tiles.b + i);
        }
    });
    unrolled<moments>([&](int m) INLINED {
        store_moment<false, V>(t.moment[m], job.stored_moment(m), packs, formats.key[m], job.range.begin, formats.maps);
    });
}

/// First pass of Passes::reduced. The update is that of the moments that the second pass will load.
template <class R, int V>
__device__ __forceinline__ void first_pass_block(const SharedTensor &s, const SharedFormats &formats, const Leaf &where,
                                                 const BlockPacks<V> &packs, const Tiles &tiles) {
    constexpr int moments = R::moments.count, count = BlockPacks<V>::count;
    const typename R::Moments rule{s.scalars};
    const TensorJob &job = s.job;
    BlockInputs<V> t;
    t.template load<moments>(job, packs, formats.maps);
    unrolled<count>([&](int q) INLINED {
        if (!packs.has(q)) return;
        unrolled<V>([&](int k) INLINED {
            t.template with_moments_of<moments>(
                q, k, [&](auto &...each) INLINED { rule.take_gradient(t.g.pack[q].at[k], each...); });
        });
    });
    unrolled<moments>([&](int m) INLINED {
        store_moment<true, V>(t.moment[m], job.stored_moment(m), packs, formats.key[m], job.range.begin, formats.maps);
    });
    unrolled<count>([&](int q) INLINED {
        if (!packs.has(q)) return;
        const auto i = int(packs.at(q) - where.begin);
        unrolled<V>([&](int k) INLINED {
            const float p = t.p.pack[q].at[k];
            tiles.a[i + k] = p;
            t.template with_moments_of<moments>(
                q, k, [&](auto &...each) INLINED { tiles.b[i + k] = rule.update(p, each...); });
        });
    });
}

template <class R, int V>
__device__ __forceinline__ void second_pass_block(const StepPlan &plan, const SharedTensor &s, const Maps &maps,
                                                  const BlockPacks<V> &packs) {
    constexpr int moments = R::moments.count;
    BlockInputs<V> t;
    t.template load<moments, false>(s.job, packs, maps);
    unrolled<BlockPacks<V>::count>([&](int q) INLINED {
        if (!packs.has(q)) return;
        Pack<V> &p = t.p.pack[q];
        const Pack<V> old = p;
        unrolled<V>([&](int k) INLINED {
            t.template with_moments_of<moments>(q, k, [&](auto &...each) INLINED {
                typename R::Weights{s.scalars, s.trust}(p.at[k], each...);
            });
        });
        store_masters<V>(plan, s, p, old, packs.at(q));
    });
}

__global__ void __launch_bounds__(kThreads, kStoredBlocks)
    update_stored_kernel(GRID_CONSTANT const PdlArgument<DevicePlan> argument) {
    const DevicePlan &d = argument.begin_kernel();
    DYNAMIC_SHARED(float, memory);
    __shared__ SharedTensor s;
    __shared__ SharedFormats formats;
    const StepPlan &plan = d.plan;
    const Tiles tiles{memory, memory + kLeaf};
    if (threadIdx.x == 0) formats.maps.fill(); // for_shared_leaves() has a barrier before the first leaf
    for_shared_leaves(
        d, {&plan.control->update.distributed}, s, [&](int32_t) INLINED { find_keys(s, formats); },
        [&](const Leaf &where) INLINED {
            if (!s.job.stored) return;
            if (skipped(d) || s.job.owner == Owner::none)
                return for_packs(where.n, s.aligned, [&]<int V>(Width<V>, int i) INLINED {
                    unchanged_masters<V>(plan, s.job, where.begin + i);
                });
            visit(s.rule, [&](auto formula) INLINED {
                using R = typename decltype(formula)::type;
                for_blocks(where, s.aligned, [&]<int V>(const BlockPacks<V> &packs) INLINED_ON_DEVICE {
                    if constexpr (R::passes == Passes::reduced)
                        first_pass_block<R, V>(s, formats, where, packs, tiles);
                    else
                        update_block<R, V>(plan, s, formats, where, packs, tiles);
                });
            });
            if (passes_of(s.rule) == Passes::reduced || plan.policy.report_norms) sum_tiles(plan, s.job, where, tiles);
        });
    if (last_block(plan.control->update)) end_update(d);
}

__global__ void __launch_bounds__(kThreads, kStoredBlocks)
    update_stored_weights_kernel(GRID_CONSTANT const PdlArgument<DevicePlan> argument) {
    const DevicePlan &d = argument.begin_kernel();
    __shared__ SharedTensor s;
    __shared__ Maps maps;
    const StepPlan &plan = d.plan;
    const bool skip = skipped(d);
    if (threadIdx.x == 0) maps.fill();
    if (!skip)
        for_shared_leaves(
            d, {&plan.control->update_weights.distributed}, s, [](int32_t) {},
            [&](const Leaf &where) INLINED {
                if (!s.job.stored || !is_reduced(s.job, s.rule)) return;
                if (threadIdx.x == 0 && where.begin == 0) plan.scalars[s.tensor] = s.scalars; // for update_weight()
                visit(s.rule, [&](auto formula) INLINED {
                    using R = typename decltype(formula)::type;
                    if constexpr (R::passes == Passes::reduced)
                        for_blocks(where, s.aligned, [&]<int V>(const BlockPacks<V> &packs) INLINED {
                            second_pass_block<R, V>(plan, s, maps, packs);
                        });
                });
            });
    if (last_block(plan.control->update_weights)) finish(d, skip);
}

void update_stored(const DevicePlan &d, Next next, const Launcher &launcher) {
    const size_t tiles = d.plan.policy.reduces || d.plan.policy.report_norms ? 2 * kTileBytes : 0;
    launcher.launch_grid({d.leaves, tiles}, {"update_stored", next}, update_stored_kernel, d);
}
void update_stored_weights(const DevicePlan &d, Next next, const Launcher &launcher) {
    launcher.launch_grid(d.leaves, {"update_stored_weights", next}, update_stored_weights_kernel, d);
}

void load_stored_kernels(KernelLoader &load) { load(update_stored_kernel, update_stored_weights_kernel); }

} // namespace dsopt::gpu
