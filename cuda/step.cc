// SPDX-License-Identifier: Apache-2.0
// A step on a device: phases enqueue kernels. The last block of a pass also does the work of the phases after it that
// need no other ranks, which saves the time of launching kernels for them.
#include "device/decide.h"
#include "kernels.h"
#include "table.h"
#include <algorithm>
#include <initializer_list>
#include <optional>

namespace dsopt::gpu {
namespace {

class Step final : public StepKernels {
public:
    Step(const StepPlan &plan, const Launcher &launcher) : plan_(plan), launcher_(launcher) {
        const StepShape &shape = plan.execution.shape;
        const bool in_capture = capturing(launcher.stream);
        if (plan.onebit != nullptr && in_capture)
            throw Error(DSOPT_ERR_STATE, "the host chooses the stage of a 1-bit step: it cannot be captured");
        const DeviceWorkspace device_workspace(plan.execution.device_workspace, shape);
        table_.emplace(upload_table(plan, device_workspace, launcher));
        d_ = {.plan = plan,
              .leaves = uint32_t(plan.visited),
              .tensor_of_leaf = device_workspace.map.tensor_of_leaf,
              .tensor_leaves = device_workspace.map.tensor_leaves,
              .tensor_squares = device_workspace.squares,
              .tensor_updates = device_workspace.updates,
              .tensor_cell = device_workspace.cell,
              .decided = true,
              .tail = Tail::none};
        d_.plan.jobs = table_->jobs;
        d_.plan.groups = table_->groups;
        inspected_ = d_;
        inspected_.leaves = uint32_t(plan.inspected);
        if (plan.slice_jobs != nullptr) {
            inspected_.plan.jobs = table_->slice_jobs;
            inspected_.tensor_of_leaf = device_workspace.slice_map;
        }
        layout_ = device_workspace.layout;
        if (plan.execution.timing && plan.execution.cache != nullptr && !in_capture) {
            marks_ = &static_cast<Cache *>(plan.execution.cache)->marks;
            marks_->reserve();
        }
    }

    /// Calls body(*this), with the kernels of the 1-bit family or of matrices if the plan has them. No plan has both.
    void run(Lt *lt, FunctionRef<void(StepKernels &)> body) {
        if (plan_.onebit != nullptr)
            return with_onebit_kernels(plan_, d_, inspected_, table_->onebit, layout_, launcher_,
                                       [&](OneBitStepKernels &kernels) {
                                           onebit_ = &kernels;
                                           body(*this);
                                       });
        if (plan_.matrices == nullptr) return body(*this);
        with_matrix_kernels(plan_, d_, *table_, *lt, launcher_, [&](MatrixStepKernels &kernels) {
            matrices_ = &kernels;
            body(*this);
        });
    }

    void mark(int phase) override {
        if (marks_ == nullptr) return;
        if (phase < 0) marks_->clear();
        marks_->add(phase, launcher_.stream);
    }
    void run(const PhaseRun &part) override {
        if (part.tensors) return run(part.phases()[0], *part.tensors);
        const Phases phases = part.phases();
        for (size_t k = 0; k < phases.size();) {
            const Fused fused = fuse(phases.subspan(k));
            const size_t end = k + fused.count;
            launch(phases[k], fused.tail, kernel_if(end < phases.size() || is_followed_by_kernel(part)));
            for (; k < end; ++k)
                if (part.ends_timing(k)) mark(info_of(phases[k]).ms);
        }
    }

private:
    struct Fused {
        size_t count; // of phases that one kernel does
        Tail tail;
    };
    /// Returns what the kernel of the first phase does: the rule which neighbours are one kernel.
    static Fused fuse(Phases phases) {
        const auto begins_with = [&](std::initializer_list<Phase> first) {
            return phases.size() >= first.size() && std::equal(first.begin(), first.end(), phases.begin());
        };
        if (begins_with({Phase::inspect, Phase::fold, Phase::decide})) return {3, Tail::fold_and_decide};
        if (begins_with({Phase::inspect, Phase::fold})) return {2, Tail::fold};
        if (begins_with({Phase::fold, Phase::decide})) return {2, Tail::fold_and_decide};
        if (begins_with({Phase::update, Phase::trust})) return {2, Tail::trust};
        if (begins_with({Phase::update, Phase::finish}) || begins_with({Phase::weights, Phase::finish}))
            return {2, Tail::finish};
        return {1, Tail::none};
    }
    /// True if the driver's next phase begins with a kernel, and not with a collective, a copy or a memset.
    bool is_followed_by_kernel(const PhaseRun &part) const {
        return part.is_followed_by(Phase::onebit) && !plan_.onebit->has_peers && !plan_.onebit->sharded &&
               plan_.shards.exchanged == 0;
    }

    void run(Phase phase, const TensorInterval &tensors) {
        DevicePlan &d = phase == Phase::inspect ? inspected_ : d_;
        const DevicePlan all = d;
        if (phase == Phase::update) d.decided = needs_decision(plan_);
        const TensorJob *const jobs =
            phase == Phase::inspect && plan_.slice_jobs != nullptr ? plan_.slice_jobs : plan_.jobs;
        // The leaves of matrices in sharded state come last, and only pass 1 visits them.
        int64_t first[2] = {INT64_MAX, INT64_MAX}, end[2] = {0, 0};
        for (int64_t i = tensors.first; i < tensors.end(); ++i) {
            const int64_t position = jobs[i].position, leaves = leaves_of(jobs[i].range.numel);
            const int k = jobs == plan_.jobs && position >= plan_.visited;
            if (leaves == 0) continue;
            first[k] = std::min(first[k], position);
            end[k] = position + leaves;
        }
        for (int k = 0; k < (phase == Phase::inspect ? 2 : 1); ++k) {
            if (end[k] == 0) continue;
            d.first_position = uint32_t(first[k]);
            d.leaves = uint32_t(end[k] - first[k]);
            launch(phase, Tail::none, Next::unknown);
        }
        d.first_position = all.first_position;
        d.leaves = all.leaves;
    }
    void launch(Phase phase, Tail tail, Next next) {
        DevicePlan &d = phase == Phase::inspect ? inspected_ : d_;
        d.tail = tail;
        switch (phase) {
        case Phase::inspect: return gpu::inspect(d, next, launcher_);
        case Phase::fold:
            // Without something to decide before it, the end of the step does both.
            d.decided = tail == Tail::none || needs_decision(plan_);
            if (plan_.policy.read_gradients) return fold(d, false, next, launcher_); // after pass 1 in several kernels
            if (d.decided) gpu::decide(d, true, tail == Tail::fold_and_decide, next, launcher_);
            return;
        case Phase::fold_completed:
            if (plan_.policy.read_gradients) return fold(d, true, next, launcher_);
            return gpu::decide(d, true, false, next, launcher_);
        case Phase::decide: return gpu::decide(d, false, true, next, launcher_);
        case Phase::begin_onebit: return onebit_->decide(OneBitDecision::begin);
        case Phase::update:
            d.backwards = plan_.policy.read_gradients;
            if ((onebit_ != nullptr || matrices_ != nullptr) && !leaves_work()) d.leaves = 0;
            return gpu::update(d, next, launcher_);
        case Phase::trust: return find_trust(d, next, launcher_);
        case Phase::shared_trust: return find_shared_trust(d, next, launcher_);
        case Phase::weights: d.backwards = !d.backwards; return gpu::update_weights(d, next, launcher_);
        case Phase::finish: return finish(d, next, launcher_);
        default: return; // of the driver
        }
    }

    /// True if the update has something to do. In a skipped step the update writes the outputs of all tensors.
    bool leaves_work() const {
        for (int64_t i = 0; i < plan_.count; ++i) {
            const TensorJob &job = plan_.jobs[i];
            if (job.owner == Owner::update || job.zeroes || job.out()) return true;
        }
        return false;
    }

    const StepPlan &plan_;
    const Launcher &launcher_;
    DevicePlan d_{}, inspected_{};   // with the jobs of the plan, and those of StepPlan::slice_jobs if there are any
    std::optional<StepTable> table_; // in device memory, like `layout_`
    void *layout_ = nullptr;
    Marks *marks_ = nullptr;
};

} // namespace

size_t device_workspace_bytes(const StepShape &shape) { return DeviceWorkspace(nullptr, shape).bytes; }
std::unique_ptr<StepCache> make_cache(const Gpu &gpu) { return std::make_unique<Cache>(gpu); }
void run_step(const StepPlan &plan, Lt *lt, const Launcher &launcher, FunctionRef<void(StepKernels &)> body) {
    Step(plan, launcher).run(lt, body);
}

} // namespace dsopt::gpu
