// SPDX-License-Identifier: Apache-2.0
// A step on a device. Calls of the driver enqueue kernels; the decision is made in the last block of pass 1, and what a
// step ends with in the last block of its last kernel.
#pragma once
#include "onebit_step.cuh"
#include "reduce.cuh"
#include "update.cuh"
#include <optional>

namespace dsopt::gpu {

__global__ void move_norms_kernel(const NormMove move) {
    begin_kernel();
    move();
}

class Step final : public StepLoops {
public:
    Step(const StepPlan &plan, const Launcher &launcher) : plan_(plan), launcher_(launcher) {
        const StepShape shape = shape_of(plan);
        const bool in_capture = capturing(launcher.stream);
        if (plan.onebit != nullptr && in_capture)
            throw Error(DSOPT_ERR_STATE, "the host chooses the stage of a 1-bit step: it cannot be captured");
        // 2^31 leaves are 2^43 elements: more than any device holds.
        if (shape.leaves > INT32_MAX)
            throw Error(DSOPT_ERR_SHAPE, "the list has %lld leaves, more than 2^31",
                        static_cast<long long>(shape.leaves));
        const Extra extra(plan.how.extra, shape);
        const StepTable table = bring_table(plan, shape, extra, launcher);
        d_ = {.plan = plan,
              .leaves = uint32_t(shape.leaves),
              .tensor_of_leaf = extra.tensor_of_leaf,
              .tensor_squares = extra.squares,
              .tensor_updates = extra.updates,
              .tensor_cell = extra.cell,
              .decided = needs_decision(plan)};
        d_.plan.jobs = table.jobs;
        d_.plan.groups = table.groups;
        if (plan.onebit != nullptr) onebit_.emplace(plan, d_, table.onebit, extra.layout, launcher);
        if (plan.how.timing && plan.how.cache != nullptr && !in_capture) {
            marks_ = &static_cast<Cache *>(plan.how.cache)->marks;
            marks_->reserve();
        }
    }

    void mark(int phase) override {
        if (marks_ == nullptr) return;
        if (phase < 0) marks_->clear();
        marks_->add(phase, launcher_.stream);
    }
    void inspect(bool agrees) override {
        d_.decided = d_.decided || agrees;
        if (plan_.policy.read_gradients)
            launcher_.over(d_.leaves / kWarps + 1, "inspect", inspect_kernel, d_, !agrees);
        else if (agrees)
            launcher_.block("fold", decide_kernel, d_, true, false);
        else if (d_.decided)
            launcher_.block("decide", decide_kernel, d_, true, true);
        is_decided_ = !agrees;
    }
    void move_norms(const NormMove &move) override { launcher_.thread("move_norms", move_norms_kernel, move); }
    void decide() override {
        if (!is_decided_) launcher_.block("decide", decide_kernel, d_, false, true);
    }
    OneBitLoops *onebit() override { return onebit_ ? &*onebit_ : nullptr; }
    // The step ends in the last block of its last kernel.
    void update() override {
        if (onebit_ && !leaves_work()) d_.leaves = 0;
        const size_t tiles = plan_.policy.reduces || plan_.policy.report_norms ? 2 * kTileBytes : 0;
        launcher_.over({d_.leaves, tiles}, "update", update_kernel, d_);
    }
    void update_weights(bool shared) override {
        if (shared) launcher_.over(plan_.count / kThreads + 1, "shared_trust", shared_trust_kernel, d_);
        launcher_.over(d_.leaves, "update_weights", update_weights_kernel, d_);
    }

private:
    static StepShape shape_of(const StepPlan &plan) {
        const TensorJob *const last = plan.count != 0 ? &plan.jobs[plan.count - 1] : nullptr;
        return {plan.count, plan.group_count, last != nullptr ? last->first_leaf + leaves_of(last->numel) : 0,
                plan.onebit != nullptr,
                plan.onebit != nullptr && plan.onebit->exchanges ? plan.onebit->exchange->layout : nullptr};
    }
    /// True if the update has something to do. In a skipped step it writes the outputs of all tensors.
    bool leaves_work() const {
        for (int64_t i = 0; i < plan_.count; ++i) {
            const TensorJob &job = plan_.jobs[i];
            if (job.owner == Owner::update || job.zeroes || job.out()) return true;
        }
        return false;
    }

    const StepPlan &plan_;
    const Launcher &launcher_;
    DevicePlan d_{};
    bool is_decided_ = false; // in inspect()
    std::optional<OneBitStep> onebit_;
    Marks *marks_ = nullptr;
};

} // namespace dsopt::gpu
