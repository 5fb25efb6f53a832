// SPDX-License-Identifier: Apache-2.0
#include "step/drive.h"
#include "exchange/exchange.h"
#include "step/agree.h"
#include "step/average.h"
#include "step/gather.h"
#include "step/matrices.h"
#include "step/onebit.h"
#include <algorithm>

namespace dsopt {
namespace {

/// What the driver does in a phase that communicates or zeroes memory, and how it reserves memory of comms for it.
struct DriverPhase {
    Phase phase;
    void (*reserve)(const StepRun &run); // NULL: no collective
    void (*run)(const StepRun &run, StepKernels &kernels);
};
constexpr DriverPhase kDriverPhases[] = {
    {Phase::average, reserve_average, [](const StepRun &run, StepKernels &) { average_gradients(run); }},
    {Phase::clear_squares, nullptr, [](const StepRun &run, StepKernels &) { clear_squares(run); }},
    {Phase::complete_squares, reserve_leaves, [](const StepRun &run, StepKernels &) { complete_squares(run); }},
    {Phase::agree, reserve_norms, [](const StepRun &run, StepKernels &) { all_reduce_norms(run); }},
    {Phase::onebit, reserve_onebit, update_onebit},
    {Phase::clear_shards, nullptr, [](const StepRun &run, StepKernels &) { clear_shard_sums(run); }},
    {Phase::clear_sums, nullptr, [](const StepRun &run, StepKernels &) { clear_sums(run); }},
    {Phase::matrices, reserve_matrices, update_matrices},
    {Phase::complete_sums, reserve_leaves, [](const StepRun &run, StepKernels &) { complete_sums(run); }},
    {Phase::sum_shards, reserve_shards, [](const StepRun &run, StepKernels &) { all_reduce_shards(run, false); }},
    {Phase::end_onebit, nullptr, end_onebit},
    {Phase::gather, reserve_gather, [](const StepRun &run, StepKernels &) { gather_weights(run); }},
};

/// Returns NULL for a phase that runs on the device.
const DriverPhase *driver_phase(Phase phase) {
    if (info_of(phase).on_device) return nullptr;
    const DriverPhase *each = kDriverPhases;
    while (each->phase != phase) ++each; // has_all_driver_phases()
    return each;
}
constexpr bool has_all_driver_phases() {
    for (const PhaseInfo &info : kPhases) {
        size_t found = 0;
        for (const DriverPhase &each : kDriverPhases) found += each.phase == info.phase;
        if (found != (info.on_device ? 0 : 1)) return false;
    }
    return true;
}
static_assert(has_all_driver_phases());

/// Runs the phases [first, end). `in_parts`: neighbours of this phase are not run together with it.
void run_phases(const StepRun &run, StepKernels &kernels, size_t first, size_t last, size_t in_parts) {
    const Phases all = run.phases.all();
    for (PhaseRun part{all, first, first}; part.end < last;) {
        part.begin = part.end++;
        const Phase phase = all[part.begin];
        if (part.begin == in_parts) {
            for (const TensorInterval &interval : run.parts->left) kernels.run({all, part.begin, part.end, interval});
        } else if (const DriverPhase *const each = driver_phase(phase)) {
            const bool has_run = part.begin < in_parts && in_parts < all.size() && info_of(phase).ranks == kNoRanks;
            if (!has_run) each->run(run, kernels);
        } else {
            while (part.end < last && part.end != in_parts && info_of(all[part.end]).on_device) ++part.end;
            kernels.run(part);
            continue;
        }
        if (part.ends_timing(0)) kernels.mark(info_of(phase).ms);
    }
}
size_t index_of(Phase phase, Phases all) { return size_t(std::find(all.begin(), all.end(), phase) - all.begin()); }
void run_phases(const StepRun &run, StepKernels &kernels) {
    const Phases all = run.phases.all();
    kernels.mark(-1);
    run_phases(run, kernels, 0, all.size(), run.parts ? index_of(run.parts->phase, all) : all.size());
}

} // namespace

void reserve(const StepRun &run) {
    for (Comm *comm : {run.comms.data, run.comms.node})
        if (comm != nullptr) comm->reserve({.all_reduce = run.compared_bytes}, run.plan.execution.stream, Place::host);
    for (const Phase phase : run.phases.all())
        if (const DriverPhase *const each = driver_phase(phase); each != nullptr && each->reserve != nullptr)
            each->reserve(run);
}

void drive(const StepRun &run) {
    const Device &device = run.context.device();
    const auto &[data, model, experts, expert_count, node] = run.comms;
    const bool alone = data == nullptr && model == nullptr && expert_count == 0 && node == nullptr;
    device.kernels().run_step(run.plan, [&](StepKernels &kernels) {
        if (alone) {
            run.compare();
            return run_phases(run, kernels);
        }
        reserve(run);
        run.compare();
        unusable_on_failure(run.comms, [&] { run_phases(run, kernels); });
    });
    const Execution &execution = run.plan.execution;
    if (run.zeroed != nullptr) device.kernels().zero(run.zeroed, run.plan.count, execution.parallel, execution.stream);
}

void drive_part(const StepRun &run, Phase phase, bool is_first,
                FunctionRef<void(FunctionRef<void(const TensorInterval &)>)> for_intervals) {
    run.context.device().kernels().run_step(run.plan, [&](StepKernels &kernels) {
        const Phases all = run.phases.all();
        const size_t index = index_of(phase, all);
        kernels.mark(-1);
        for (size_t first = 0, last = 0; is_first && last < index; first = last = last + 1) {
            while (last < index && info_of(all[last]).ranks == kNoRanks) ++last;
            run_phases(run, kernels, first, last, all.size());
        }
        for_intervals([&](const TensorInterval &interval) { kernels.run({all, index, index + 1, interval}); });
    });
}

} // namespace dsopt
