// SPDX-License-Identifier: Apache-2.0
// Steps of the 1-bit family on the CPU, beside those of backend_cpu.cc.
#pragma once
#include "cpu/cut.h"
#include "cpu/onebit_kernels.h"
#include "optimizer/onebit.h"
#include <chrono>

namespace dsopt::cpu {

class OneBitStep {
public:
    /// span_of(i, begin, end) as backend_cpu.cc has it. Refers to it: std::function would allocate in every step.
    class SpanOf {
    public:
        template <class F>
        SpanOf(const F &f) :
            object_(&f),
            call_([](const void *object, int64_t i, int64_t begin, int64_t end) {
                return (*static_cast<const F *>(object))(i, begin, end);
            }) {}
        Span operator()(int64_t i, int64_t begin, int64_t end) const { return call_(object_, i, begin, end); }

    private:
        const void *object_;
        Span (*call_)(const void *, int64_t, int64_t, int64_t);
    };
    OneBitStep(const StepPlan &plan, const Kernels &kernels, const OneBitKernels &onebit) :
        plan_(plan),
        one_(*plan.onebit),
        kernels_(kernels),
        onebit_(onebit) {}

    /// True for tensors that the ordinary sweep leaves to this class.
    bool owns(int64_t i) const { return one_.stage != Stage::full && !one_.jobs[i].averaged; }
    /// Everything else of a step that is taken. Adds to ms, places as in dsopt_report.
    void run(const Cut &cut, const SpanOf &span_of, double *ms);
    /// What every step ends with, also one that is skipped.
    void end(const Cut &cut, bool taken);

private:
    template <class Visit> void for_own(const Cut &cut, const SpanOf &span_of, const Visit &visit);
    void lamb(const Cut &cut, const SpanOf &span_of);
    void mark(int phase);
    void send(const Cut &cut, const SpanOf &span_of);
    OneBitSpan onebit_span(int64_t i, const Span &span) const;
    void average_trust();
    void find_frozen_trust(const double *factors);

    const StepPlan &plan_;
    const OneBitPlan &one_;
    const Kernels &kernels_;
    const OneBitKernels &onebit_;
    Feed feed_ = Feed::momentum;
    bool momentum_in_bits_ = false; // until the exchange
    double *ms_ = nullptr;
    std::chrono::steady_clock::time_point last_{};
};

} // namespace dsopt::cpu
