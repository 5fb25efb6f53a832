// SPDX-License-Identifier: Apache-2.0
// Pass 1: sums the squares of every gradient and counts non-finite elements, in one read. The last block then makes the
// decision.
#include "kernels.h"
#include "reduce.cuh"

namespace dsopt::gpu {

/// Computes the same result as fold_gradients(), in parallel over tensors and then over the cells of the table. The
/// kernel has already stored the cells of tensors, and the squares of tensors with one leaf. `Parts`: other ranks have
/// completed the sums of squares, but not the counts of non-finite elements.
template <bool Parts> __device__ inline void fold_on_block(const DevicePlan &d) {
    const StepPlan &plan = d.plan;
    const NormTable &table = plan.norms;
    for_tensors(d, [&](int32_t i, int32_t leaves, auto fold) INLINED {
        if (leaves == 1) return;
        const TensorJob &job = plan.jobs[i];
        const double squares = is_inspected(job) ? fold.sum(plan.leaf.sums_a + job.leaves.first, leaves) : 0.0;
        if (fold.lead) d.tensor_squares[i] = squares;
    });
    __syncthreads();
    bool suspect = plan.policy.wrapper == Wrapper::fused && table.classes > 1; // squares may be those of weights
    const int32_t classes = int32_t(table.classes), group_cells = int32_t(table.groups) * classes;
    for (int32_t cell = int32_t(threadIdx.x / 32); cell < group_cells + classes; cell += kWarps) {
        const double sum = add_by_warp(int32_t(plan.count), [&](int32_t i) INLINED {
            const int32_t its_cell = d.tensor_cell[i];
            const double squares = d.tensor_squares[i];
            suspect = suspect || !is_finite(squares);
            // The last row is over all groups.
            const bool counts =
                its_cell >= 0 && (cell < group_cells ? its_cell == cell : its_cell % classes == cell - group_cells);
            return counts ? squares : 0.0;
        });
        if (threadIdx.x % 32 == 0) table.values[cell] = sum;
    }
    NonFinite found;
    if (__syncthreads_or(suspect)) { // a non-finite element makes the squares non-finite
        for_tensors(d, [&](int32_t i, int32_t leaves, auto fold) INLINED {
            const TensorJob &job = plan.jobs[i];
            if (!is_inspected(job)) return;
            const int64_t *bad = plan.leaf.bad + job.leaves.first;
            const int64_t bad_count = fold.sum_counts(leaves, [&](int32_t leaf) INLINED { return bad[leaf] & 0xffff; });
            if constexpr (Parts) {
                if (fold.lead) found.add_part(i, bad_count, d.tensor_squares[i]);
            } else {
                if (bad_count == 0) return; // the same in all lanes of a warp
                const int64_t nans = fold.sum_counts(leaves, [&](int32_t leaf) INLINED { return bad[leaf] >> 32; });
                found.add(i, fold.lead ? bad_count : 0, nans != 0);
            }
        });
        found = over_block(found);
    }
    if (threadIdx.x == 0) record_nonfinite(plan, found);
}

__global__ void __launch_bounds__(kThreads, 4) inspect_kernel(GRID_CONSTANT const PdlArgument<DevicePlan> argument) {
    const DevicePlan &d = argument.begin_kernel();
    const StepPlan &plan = d.plan;
    for_leaves_by_warp(d, {&plan.control->inspect.distributed}, [&](uint32_t position, int32_t tensor) INLINED {
        const TensorJob &job = plan.jobs[tensor];
        const Leaf where(job, position);
        const auto [begin, n] = where;
        const bool lead = threadIdx.x % 32 == 0, alone = job.leaves.count() == 1 && d.tail != Tail::none;
        if (lead && begin == 0) d.tensor_cell[tensor] = is_inspected(job) ? int32_t(norm_cell(plan.norms, job)) : -1;
        if (!is_inspected(job)) {
            if (lead && alone) d.tensor_squares[tensor] = 0;
            return;
        }
        // Compat mode also sums squares of weights. A loop, so that the code has one copy of leaf_squares() for both.
        const int reads = sums_weights(plan, job) ? 2 : 1;
        double squares = 0;
        int64_t bad = 0;
        for (int read = 0; read < reads; ++read) {
            squares = leaf_squares(read == 0 ? job.grad() : job.weight(), begin, n);
            if (read == 0 && !is_finite(squares)) bad = leaf_nonfinite(job.grad(), begin, n);
        }
        if (lead) {
            const int64_t leaf = leaf_index(job, where);
            if (alone)
                d.tensor_squares[tensor] = squares;
            else
                plan.leaf.sums_a[leaf] = squares;
            plan.leaf.bad[leaf] = bad;
        }
    });
    if (!last_block(plan.control->inspect) || d.tail == Tail::none) return;
    fold_on_block<false>(d);
    if (d.tail == Tail::fold_and_decide && threadIdx.x == 0) (void)decide_step(d.plan);
}

/// Folds the results of leaves in one block: of a pass 1 in several kernels or, with `Parts`, of several ranks.
template <bool Parts>
__global__ void __launch_bounds__(kThreads) fold_kernel(GRID_CONSTANT const PdlArgument<DevicePlan> argument) {
    const DevicePlan &d = argument.begin_kernel();
    const StepPlan &plan = d.plan;
    for (int64_t i = threadIdx.x; i < plan.count; i += kThreads) {
        const TensorJob &job = plan.jobs[i];
        const bool counts = is_inspected(job) && job.leaves.numel != 0;
        d.tensor_cell[i] = counts ? int32_t(norm_cell(plan.norms, job)) : -1;
        if (d.tensor_leaves[i] <= 1) d.tensor_squares[i] = counts ? plan.leaf.sums_a[job.leaves.first] : 0.0;
    }
    __syncthreads();
    fold_on_block<Parts>(d);
    if (d.tail == Tail::fold_and_decide && threadIdx.x == 0) (void)decide_step(plan);
}

/// Completes pass 1 in one thread. `folds`: clears the norms, because pass 1 did not run. `decides`: makes the
/// decision, after the all-reduce of norms if there are other ranks.
__global__ void decide_kernel(GRID_CONSTANT const PdlArgument<DevicePlan> argument, const bool folds,
                              const bool decides) {
    const DevicePlan &d = argument.begin_kernel();
    if (folds) clear_norms(d.plan);
    if (decides) (void)decide_step(d.plan);
}

void inspect(const DevicePlan &d, Next next, const Launcher &launcher) {
    launcher.launch_grid(d.leaves / kWarps + 1, {"inspect", next}, inspect_kernel, d);
}
void fold(const DevicePlan &d, bool completed, Next next, const Launcher &launcher) {
    if (completed)
        launcher.launch_block({"fold_completed", next}, fold_kernel<true>, d);
    else
        launcher.launch_block({"fold_pieces", next}, fold_kernel<false>, d);
}
void decide(const DevicePlan &d, bool folds, bool decides, Next next, const Launcher &launcher) {
    launcher.launch_thread({decides ? "decide" : "fold", next}, decide_kernel, d, folds, decides);
}

void load_inspect_kernels(KernelLoader &load) {
    load(inspect_kernel, fold_kernel<false>, fold_kernel<true>, decide_kernel);
}

} // namespace dsopt::gpu
