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
        partition_(plan, plan.jobs, caches, kernels.bf16_instruction) {
        if (plan.fed != nullptr) fed_.emplace(plan, plan.fed, caches, kernels.bf16_instruction);
        if (plan.matrices != nullptr) matrices_ = &matrix_step_.emplace(plan, kernels, products);
        if (plan.onebit != nullptr) onebit_ = &onebit_step_.emplace(plan, kernels, partition_, fed());
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

    void inspect(Fold fold) override {
        if (plan_.policy.read_gradients)
            fed().run([&](int64_t, const Span &span) {
                const TensorJob &job = *span.job;
                if (!is_inspected(job)) return;
                const int64_t leaf = job.first_leaf + span.begin / kLeaf;
                kernels_.inspect(job.grad(), span.begin, span.end, plan_.leaf.sums_a, plan_.leaf.bad, nullptr, leaf);
                if (sums_weights(plan_, job))
                    kernels_.squares(job.weight(), span.begin, span.end, plan_.leaf.sums_a, leaf);
            });
        if (fold != Fold::none) fold_gradients();
    }
    void fold_gradients() override { dsopt::fold_gradients(plan_); }

    void decide() override {
        if (decide_step(plan_)) make_all_scalars(plan_);
    }

    void update() override {
        if (is_skipped()) {
            partition_.run([this](int64_t, const Span &span) { kernels_.unchanged(span); });
            if (!plan_.policy.reduces) end();
            return;
        }
        partition_.run_main_pass([this](int64_t, const Span &span) {
            if (span.job->owner == Owner::none)
                kernels_.unchanged(span);
            else if (span.job->owner == Owner::update)
                kernels_.update(span);
        });
        if (!plan_.policy.reduces) return end();
        if (!plan_.policy.parts) find_trust();
    }

    void find_trust() override {
        for (int64_t i = 0; !is_skipped() && i < plan_.count; ++i) dsopt::find_trust(plan_, i, LeafFold());
    }

    void update_weights(bool shared) override {
        if (is_skipped()) return end();
        for (int64_t i = 0; shared && i < plan_.count; ++i) store_shared_trust_ratio(plan_, i);
        partition_.run([&](int64_t, const Span &span) {
            if (is_reduced(*span.job, span.rule)) kernels_.update_weights(span);
        });
        end();
    }

    void finish() override {
        if (!is_skipped()) {
            for (int64_t i = 0; i < plan_.count; ++i) advance_count(plan_, i, plan_.jobs[i].advance);
            if (plan_.policy.report_norms) fold_updates(plan_);
        }
        write_report(plan_);
    }

private:
    using Clock = std::chrono::steady_clock;

    bool is_skipped() const { return plan_.control->skip != 0; }
    const StepPartition &fed() const { return fed_ ? *fed_ : partition_; }
    void end() {
        if (!plan_.policy.ends_later) finish();
    }

    const DefaultFloatEnvironment environment_;
    const StepPlan &plan_;
    const Kernels &kernels_;
    const StepPartition partition_;
    std::optional<StepPartition> fed_; // of StepPlan::fed
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
