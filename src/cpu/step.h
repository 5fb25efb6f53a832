// SPDX-License-Identifier: Apache-2.0
// A step on the CPU: each call of the driver runs at once, on all threads.
#pragma once
#include "cpu/onebit.h"
#include "device/step_table.h"
#include <chrono>
#include <optional>

namespace dsopt::cpu {

class Step final : public StepLoops, private SpanSource {
public:
    Step(const StepPlan &plan, const Kernels &kernels, const OneBitKernels &onebit);
    /// Memory for Execution::extra.
    static size_t extra_bytes(const StepShape &shape) { return size_t(shape.tensors + 1) * sizeof(int64_t); }

    void mark(int phase) override;
    void inspect(bool agrees) override;
    void move_norms(const NormMove &move) override { move(); }
    void decide() override;
    bool is_skipped() override { return plan_.control->skip != 0; }
    void update() override;
    void update_weights(bool shared) override;
    OneBitLoops *onebit() override { return onebit_ ? &*onebit_ : nullptr; }
    void finish() override;

private:
    using Clock = std::chrono::steady_clock;
    Span span_of(int64_t tensor, int64_t begin, int64_t end) const override;
    bool is_elsewhere(int64_t tensor) const;

    const DefaultFloatEnvironment environment_;
    const StepPlan &plan_;
    const Kernels &kernels_;
    const Cut cut_;
    const bool streaming_;
    std::optional<OneBitStep> onebit_;
    Clock::time_point last_mark_;
};

} // namespace dsopt::cpu
