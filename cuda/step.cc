// SPDX-License-Identifier: Apache-2.0
// A step on a device. Calls of the driver enqueue kernels. The last block of pass 1 makes the decision; the last block
// of the last kernel advances counters and writes the report.
#include "device/decide.h"
#include "kernels.h"
#include "table.h"
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
        // 2^31 leaves are 2^43 elements: more than any device holds.
        if (shape.leaves > INT32_MAX)
            throw Error(DSOPT_ERR_SHAPE, "the list has %lld leaves, more than 2^31",
                        static_cast<long long>(shape.leaves));
        const DeviceWorkspace device_workspace(plan.execution.device_workspace, shape);
        table_.emplace(upload_table(plan, device_workspace, launcher));
        d_ = {.plan = plan,
              .leaves = uint32_t(plan.visited.count),
              .first_leaf = uint32_t(plan.visited.first),
              .tensor_of_leaf = device_workspace.map.tensor_of_leaf,
              .tensor_leaves = device_workspace.map.tensor_leaves,
              .tensor_squares = device_workspace.squares,
              .tensor_updates = device_workspace.updates,
              .tensor_cell = device_workspace.cell,
              .decided = needs_decision(plan)};
        d_.plan.jobs = table_->jobs;
        d_.plan.groups = table_->groups;
        fed_ = d_;
        fed_.leaves = uint32_t(plan.fed_visited.count);
        fed_.first_leaf = uint32_t(plan.fed_visited.first);
        if (plan.fed != nullptr) fed_.plan.jobs = table_->fed;
        layout_ = device_workspace.layout;
        if (plan.execution.timing && plan.execution.cache != nullptr && !in_capture) {
            marks_ = &static_cast<Cache *>(plan.execution.cache)->marks;
            marks_->reserve();
        }
    }

    /// Calls body(*this), with the kernels of the 1-bit family or of matrices if the plan has them. No plan has both.
    void run(Lt *lt, FunctionRef<void(StepKernels &)> body) {
        if (plan_.onebit != nullptr)
            return with_onebit_kernels(plan_, d_, fed_, table_->onebit, layout_, launcher_,
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
    void inspect(Fold fold) override {
        const bool agrees = fold != Fold::decide;
        d_.decided = d_.decided || agrees;
        if (plan_.policy.read_gradients)
            gpu::inspect(fed_, fold, launcher_);
        else if (fold == Fold::table)
            gpu::decide(d_, true, false, launcher_);
        else if (d_.decided && fold == Fold::decide)
            gpu::decide(d_, true, true, launcher_);
        is_decided_ = !agrees;
    }
    void fold_gradients() override {
        if (plan_.policy.read_gradients)
            fold_parts(d_, launcher_);
        else
            gpu::decide(d_, true, false, launcher_);
    }
    void decide() override {
        if (!is_decided_) gpu::decide(d_, false, true, launcher_);
    }
    // The last block of the last kernel completes the step.
    void update() override {
        d_.backwards = plan_.policy.read_gradients;
        if ((onebit_ != nullptr || matrices_ != nullptr) && !leaves_work()) d_.leaves = 0;
        gpu::update(d_, launcher_);
    }
    void find_trust() override { find_trust_of_parts(d_, launcher_); }
    void finish() override { finish_later(d_, launcher_); }
    void update_weights(bool shared) override {
        if (shared) share_trust(d_, launcher_);
        d_.backwards = !d_.backwards;
        gpu::update_weights(d_, launcher_);
    }

private:
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
    DevicePlan d_{}, fed_{};         // with the jobs of the plan, and those of StepPlan::fed if there are any
    bool is_decided_ = false;        // inspect() makes the decision
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
