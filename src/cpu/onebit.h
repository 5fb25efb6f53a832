// SPDX-License-Identifier: Apache-2.0
// Loops of the 1-bit family on the CPU, beside those of cpu/step.h.
#pragma once
#include "cpu/cut.h"
#include "cpu/onebit_kernels.h"
#include "device/step_loops.h"

namespace dsopt::cpu {

/// Pieces of tensors as loops take them.
class SpanSource {
public:
    virtual Span span_of(int64_t tensor, int64_t begin, int64_t end) const = 0;

protected:
    ~SpanSource() = default;
};

class OneBitStep final : public OneBitLoops {
public:
    OneBitStep(const StepPlan &plan, const Kernels &kernels, const OneBitKernels &onebit, const Cut &cut,
               const SpanSource &spans);

    /// True for tensors that the ordinary sweep leaves to this class.
    bool owns(int64_t i) const { return one_.stage != Stage::full && !one_.jobs[i].averaged; }
    const ExchangeBuffers &buffers() const override { return buffers_; }
    void begin() override;
    void scale_momenta() override;
    void feed(Feed feed) override;
    void take(Feed feed) override;
    void local() override;
    void lamb_moments() override;
    void lamb_trust() override;
    void lamb_shared_trust() override;
    void lamb_weights() override;
    void end() override;
    void find_active() override;
    void freeze(bool copies_variance) override;

private:
    /// Which row of results holds what is read: the exchange's, or those that stay as the momentum.
    OneBitSpan span_of(int64_t tensor, const Span &span, Feed feed, bool feeding) const;
    template <class Visit> void for_own(Feed feed, bool feeding, const Visit &visit) const;
    void feed_leaves(Feed feed) const;
    bool is_skipped() const { return plan_.control->skip != 0; }

    const StepPlan &plan_;
    const OneBitPlan &one_;
    const Kernels &kernels_;
    const OneBitKernels &onebit_;
    const Cut &cut_;
    const SpanSource &spans_;
    ExchangeBuffers buffers_;
};

} // namespace dsopt::cpu
