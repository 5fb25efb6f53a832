// SPDX-License-Identifier: Apache-2.0
#include "cpu/step.h"
#include "cpu/matrix_step.h"
#include "cpu/onebit_step.h"
#include <chrono>
#include <optional>

namespace dsopt::cpu {
namespace {

class Step final : public StepKernels {
public:
    Step(const StepPlan &plan, const Kernels &kernels, const Products &products, const CacheSizes &caches) :
        plan_(plan),
        kernels_(kernels),
        caches_(caches),
        partition_(plan, plan.jobs, caches, kernels.bf16_instruction) {
        if (plan.slice_jobs != nullptr) inspected_.emplace(plan, plan.slice_jobs, caches, kernels.bf16_instruction);
        if (plan.matrices != nullptr) matrices_ = &matrix_step_.emplace(plan, kernels, products);
        if (plan.onebit != nullptr) onebit_ = &onebit_step_.emplace(plan, kernels, partition_, inspected());
    }

    void mark(int phase) override {
        if (!plan_.execution.timing) return;
        const auto now = Clock::now();
        double *const ms = plan_.outcome->ms;
        if (phase >= 0)
            ms[phase] += std::chrono::duration<double, std::milli>(now - last_mark_).count();
        else
            std::fill_n(ms, DSOPT_MS_PHASES, 0.0);
        last_mark_ = now;
    }

    void run(const PhaseRun &part) override {
        if (part.tensors) return run(part.phases()[0], *part.tensors);
        for (size_t k = 0; k < part.phases().size(); ++k) {
            run(part.phases()[k]);
            if (part.ends_timing(k)) mark(info_of(part.phases()[k]).ms);
        }
    }

private:
    using Clock = std::chrono::steady_clock;

    void run(Phase phase) {
        switch (phase) {
        case Phase::inspect: return inspect(inspected());
        case Phase::fold: return fold_gradients(plan_, false);
        case Phase::fold_completed: return fold_gradients(plan_, true);
        case Phase::decide:
            if (decide_step(plan_)) make_scalars_of(plan_, 0, plan_.count);
            return;
        case Phase::begin_onebit: return onebit_->decide(OneBitDecision::begin);
        case Phase::update: return update();
        case Phase::trust: return trust();
        case Phase::shared_trust: return for_tensors([this](int64_t i) { store_shared_trust_ratio(plan_, i); });
        case Phase::weights: return weights();
        case Phase::finish: return finish();
        default: return; // of the driver
        }
    }

    void run(Phase phase, const TensorInterval &tensors) {
        const bool inspects = phase == Phase::inspect;
        const TensorJob *const jobs = inspects && plan_.slice_jobs != nullptr ? plan_.slice_jobs : plan_.jobs;
        const StepPartition partition(plan_, jobs, tensors, caches_, kernels_.bf16_instruction);
        if (inspects) return inspect(partition);
        make_scalars_of(plan_, tensors.first, tensors.end()); // gradients may be present now that were not at `decide`
        partition.run([this](int64_t, const Span &span) { update(span); });
    }

    void inspect(const StepPartition &partition) const {
        partition.run([&](int64_t, const Span &span) {
            const TensorJob &job = *span.job;
            if (!is_inspected(job)) return;
            const int64_t leaf = job.first_leaf + span.begin / kLeaf;
            kernels_.inspect(job.grad(), span.begin, span.end, plan_.leaf.sums_a, plan_.leaf.bad, nullptr, leaf);
            if (sums_weights(plan_, job)) kernels_.squares(job.weight(), span.begin, span.end, plan_.leaf.sums_a, leaf);
        });
    }
    void update() const {
        const auto visit = [this](int64_t, const Span &span) { update(span); };
        if (is_skipped()) return partition_.run(visit);
        partition_.run_main_pass(visit);
    }
    void update(const Span &span) const {
        if (is_skipped() || span.job->owner == Owner::none)
            kernels_.unchanged(span);
        else if (span.job->owner == Owner::update)
            kernels_.update(span);
    }
    void trust() const {
        for_tensors([this](int64_t i) { find_trust(plan_, i, LeafFold()); });
    }
    void weights() const {
        if (is_skipped()) return;
        partition_.run([this](int64_t, const Span &span) {
            if (is_reduced(*span.job, span.rule)) kernels_.update_weights(span);
        });
    }
    void finish() const {
        for_tensors([this](int64_t i) { advance_count(plan_, i, plan_.jobs[i].advance); });
        if (!is_skipped() && plan_.policy.report_norms) fold_updates(plan_);
        write_report(plan_);
    }
    /// Calls body(i) for each tensor, unless the step is skipped.
    template <class Body> void for_tensors(const Body &body) const {
        for (int64_t i = 0; !is_skipped() && i < plan_.count; ++i) body(i);
    }

    bool is_skipped() const { return plan_.control->skip != 0; }
    const StepPartition &inspected() const { return inspected_ ? *inspected_ : partition_; }

    const DefaultFloatEnvironment environment_;
    const StepPlan &plan_;
    const Kernels &kernels_;
    const CacheSizes &caches_;
    const StepPartition partition_;
    std::optional<StepPartition> inspected_; // of StepPlan::slice_jobs
    std::optional<OneBitStep> onebit_step_;
    std::optional<MatrixStep> matrix_step_;
    Clock::time_point last_mark_;
};

} // namespace

void run_step(const StepPlan &plan, const Kernels &kernels, const Products &products, const CacheSizes &caches,
              FunctionRef<void(StepKernels &)> body) {
    Step step(plan, kernels, products, caches);
    body(step);
}

} // namespace dsopt::cpu
