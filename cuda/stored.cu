// SPDX-License-Identifier: Apache-2.0
// Pass 2 of tensors whose moments or masters are stored in formats other than fp32. Kernels of their own: inside
// update_kernel the formats would take registers from lists without them. A step with both kinds of tensors launches
// both kernels, these last.
#include "formats.cuh"
#include "kernels.h"

namespace dsopt::gpu {

/// Memory that a block of threads shares, in addition to its tensor.
struct SharedFormats {
    Maps maps;
    uint64_t key[kMoments]; // of the moments that are rounded at random
    Stash stash;
    Position position[kWarps];
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

// Only the arithmetic depends on the rule: loads and stores of all formats are compiled once per kernel.

// These functions read the block from its position again after forget_shared(), so that no register keeps it.

__device__ __forceinline__ void update_block(const StepPlan &plan, const SharedTensor &s, SharedFormats &formats,
                                             const Position &at, const Tiles &tiles) {
    BlockInputs t{formats.stash};
    t.load<true>(s.job, at.block(), formats.maps);
    if (keeps_old(plan)) to_tile(t.p, tiles.a + at.first, at.block());
    visit_rule<Passes::elementwise>(s.rule, [&](auto formula) INLINED {
        using R = typename decltype(formula)::type;
        t.for_elements<R::moments.count, true>([&](int k, auto &...each)
                                                   INLINED { R{s.scalars}(t.g.at[k % 4], t.p.at[k], each...); });
    });
    forget_shared();
    store_masters(plan, s, t.p, tiles.a + at.first, at.block());
    forget_shared();
    if (plan.policy.report_norms) store_changes(t.p, tiles, at);
    t.store_moments(s.job, at, formats.key, formats.maps, false);
}

/// First pass of Passes::reduced. The update is that of the moments that the second pass will load.
__device__ __forceinline__ void first_pass_block(const SharedTensor &s, SharedFormats &formats, const Position &at,
                                                 const Tiles &tiles) {
    BlockInputs t{formats.stash};
    t.load<true>(s.job, at.block(), formats.maps);
    visit_rule<Passes::reduced>(s.rule, [&](auto formula) INLINED {
        using R = typename decltype(formula)::type;
        t.for_elements<R::moments.count, true>([&](int k, auto &...each) INLINED {
            typename R::Moments{s.scalars}.take_gradient(t.g.at[k % 4], each...);
        });
    });
    t.store_moments(s.job, at, formats.key, formats.maps, true);
    Eight update{};
    visit_rule<Passes::reduced>(s.rule, [&](auto formula) INLINED {
        using R = typename decltype(formula)::type;
        t.for_elements<R::moments.count>([&](int k, auto &...each) INLINED {
            update.at[k] = typename R::Moments{s.scalars}.update(t.p.at[k], each...);
        });
    });
    forget_shared();
    to_tile(t.p, tiles.a + at.first, at.block());
    to_tile(update, tiles.b + at.first, at.block());
}

/// `memory`: shared memory for the weights of a leaf.
__device__ __forceinline__ void second_pass_block(const StepPlan &plan, const SharedTensor &s, SharedFormats &formats,
                                                  const Position &at, float *memory) {
    BlockInputs t{formats.stash};
    t.load<false>(s.job, at.block(), formats.maps);
    if (keeps_old(plan)) to_tile(t.p, memory + at.first, at.block());
    visit_rule<Passes::reduced>(s.rule, [&](auto formula) INLINED {
        using R = typename decltype(formula)::type;
        t.for_elements<R::moments.count>([&](int k, auto &...each) INLINED {
            typename R::Weights{s.scalars, s.trust}(t.p.at[k], each...);
        });
    });
    forget_shared();
    store_masters(plan, s, t.p, memory + at.first, at.block());
}

/// Writes the outputs of a tensor that the step does not update.
__device__ __forceinline__ void unchanged_block(const StepPlan &plan, const TensorJob &job, const Block &block) {
    if (job.out()) {
        const bool copies = job.remainder == nullptr || job.out().format == Dtype::bf16;
        Eight weights =
            copies ? convert_to_f32(fetch(job.weight(), block), block, job.weight().format) : load_masters(job, block);
        if (plan.flags & DSOPT_STEP_DELTA) weights = Eight{};
        store(weights, job.out(), block);
    }
    if (job.zeroes) store(Eight{}, job.grad(), block);
}

__global__ void __launch_bounds__(kThreads, kBlocks)
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
                return for_blocks(formats.position, where, s.aligned,
                                  [&](const Position &at) INLINED { unchanged_block(plan, s.job, at.block()); });
            if (s.job.owner != Owner::update) return;
            for_blocks(formats.position, where, s.aligned, [&](const Position &at) INLINED {
                if (passes_of(s.rule) == Passes::reduced)
                    first_pass_block(s, formats, at, tiles);
                else
                    update_block(plan, s, formats, at, tiles);
            });
            if (passes_of(s.rule) == Passes::reduced || plan.policy.report_norms)
                sum_tiles(plan, s.job, formats.position[threadIdx.x / 32].whole_leaf(s.job), tiles);
        });
    if (last_block(plan.control->update)) end_update(d);
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    update_stored_weights_kernel(GRID_CONSTANT const PdlArgument<DevicePlan> argument) {
    const DevicePlan &d = argument.begin_kernel();
    DYNAMIC_SHARED(float, memory);
    __shared__ SharedTensor s;
    __shared__ SharedFormats formats;
    const StepPlan &plan = d.plan;
    const bool skip = skipped(d);
    if (threadIdx.x == 0) formats.maps.fill();
    if (!skip)
        for_shared_leaves(
            d, {&plan.control->update_weights.distributed}, s, [](int32_t) {},
            [&](const Leaf &where) INLINED {
                if (!s.job.stored || !is_reduced(s.job, s.rule)) return;
                if (threadIdx.x == 0 && where.begin == 0) plan.scalars[s.tensor] = s.scalars; // for update_weight()
                for_blocks(formats.position, where, s.aligned,
                           [&](const Position &at) INLINED { second_pass_block(plan, s, formats, at, memory); });
            });
    if (last_block(plan.control->update_weights) && d.tail == Tail::finish) finish(d, skip);
}

void update_stored(const DevicePlan &d, Next next, const Launcher &launcher) {
    const size_t tiles = d.plan.policy.reduces || keeps_old(d.plan) ? 2 * kTileBytes : 0;
    launcher.launch_grid({d.leaves, tiles}, {"update_stored", next}, update_stored_kernel, d);
}
void update_stored_weights(const DevicePlan &d, Next next, const Launcher &launcher) {
    const size_t tile = keeps_old(d.plan) ? kTileBytes : 0;
    launcher.launch_grid({d.leaves, tile}, {"update_stored_weights", next}, update_stored_weights_kernel, d);
}

void load_stored_kernels(KernelLoader &load) { load(update_stored_kernel, update_stored_weights_kernel); }

} // namespace dsopt::gpu
