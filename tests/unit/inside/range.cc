// SPDX-License-Identifier: Apache-2.0
// Ranges of src/base/range.h, and steps on ranges of a tensor, whose sums are reduced over the whole tensor.
#include "base/range.h"
#include "cpu/onebit_step.h"
#include "device/device.h"
#include "device/kernels.h"
#include "support/harness.h"
#include <vector>

using dsopt::intersection;
using dsopt::Range;

namespace inside_range_tests {

void expect_equal(const Range &range, int64_t begin, int64_t numel, int64_t whole) {
    EXPECT_EQ(range.begin, begin);
    EXPECT_EQ(range.numel, numel);
    EXPECT_EQ(range.whole, whole);
}

TEST(Range, WholeRangeHasAllElements) {
    constexpr Range all = dsopt::whole_range(10), none = dsopt::whole_range(0);
    expect_equal(all, 0, 10, 10);
    EXPECT_EQ(all.end(), 10);
    EXPECT_EQ(none.end(), 0);
    expect_equal(intersection(all, all), 0, 10, 10);
    expect_equal(intersection(none, none), 0, 0, 0);
}

TEST(Range, IntersectionHasCommonElements) {
    constexpr int64_t whole = 7;
    const auto has = [](const Range &range, int64_t i) { return i >= range.begin && i < range.end(); };
    for (int64_t a = 0; a <= whole; ++a)
        for (int64_t a_end = a; a_end <= whole; ++a_end)
            for (int64_t b = 0; b <= whole; ++b)
                for (int64_t b_end = b; b_end <= whole; ++b_end) {
                    const Range left{a, a_end - a, whole}, right{b, b_end - b, whole};
                    const Range both = intersection(left, right);
                    for (int64_t i = 0; i < whole; ++i) EXPECT_EQ(has(both, i), has(left, i) && has(right, i));
                    EXPECT_EQ(both.whole, whole);
                    EXPECT_GE(both.numel, 0);
                    EXPECT_GE(both.begin, b);
                    EXPECT_LE(both.end(), b_end);
                }
}

TEST(Range, IntersectionOfAdjacentRangesIsEmpty) {
    const Range left{0, 4, 12}, right{4, 8, 12};
    expect_equal(intersection(left, right), 4, 0, 12);
    expect_equal(intersection(right, left), 4, 0, 12);
}

TEST(Range, IntersectionWithAContainedRangeIsThatRange) {
    const Range outer{2, 8, 12}, inner{5, 3, 12};
    expect_equal(intersection(outer, inner), 5, 3, 12);
    expect_equal(intersection(inner, outer), 5, 3, 12);
}

TEST(Range, WithinIsRelativeToOuterRange) {
    const Range outer{2, 8, 12};
    expect_equal(Range{5, 3, 12}.within(outer), 3, 3, 8);
    expect_equal(outer.within(outer), 0, 8, 8);
    expect_equal(Range{10, 0, 12}.within(outer), 8, 0, 8);
}

using dsopt::kLeaf;
constexpr int64_t kNumel = 2 * kLeaf + 777, kOffset = 1000;

/// Arrays of a tensor and sums of its leaves, which all its ranges share. Weights are bf16, rounded stochastically.
struct Tensor {
    std::vector<uint16_t> weights = std::vector<uint16_t>(kNumel);
    std::vector<float> grads = std::vector<float>(kNumel), m = grads, v = grads;
    std::vector<double> sums_a = std::vector<double>(3), sums_b = sums_a;
    std::vector<int64_t> bad = std::vector<int64_t>(3);
    Tensor() {
        for (size_t i = 0; i < size_t(kNumel); ++i) {
            weights[i] = dsopt::f32_to_bf16(0.5f + float(i % 101) / 64);
            grads[i] = float(i % 97) / 32 - 1;
        }
    }
};

/// A LAMB step with clipping. The job covers a range of the tensor that begins with a leaf.
struct RangeStep {
    dsopt::TensorJob job{};
    dsopt::Hyper hyper{};
    dsopt::Scalars scalars{};
    dsopt::StepFlags control{};
    dsopt::Outcome outcome{};
    int32_t count = 0;
    float trust = 1;
    double divisor = 1;
    std::vector<double> norms = std::vector<double>(256);
    std::vector<int64_t> device_workspace = std::vector<int64_t>(256);
    dsopt::StepPlan plan{};

    RangeStep(Tensor &tensor, int64_t begin, int64_t numel) {
        job.set(dsopt::kGrad, {tensor.grads.data() + begin, dsopt::Dtype::f32});
        job.set(dsopt::kWeight, {tensor.weights.data() + begin, dsopt::Dtype::bf16});
        job.set(dsopt::kMoment, {tensor.m.data() + begin, dsopt::Dtype::f32});
        job.set(dsopt::kMoment + 1, {tensor.v.data() + begin, dsopt::Dtype::f32});
        job.range = {kOffset + begin, numel, kOffset + kNumel};
        job.first_leaf = int32_t(begin / kLeaf);
        job.leaves = {0, kNumel};
        job.random_key = 5;
        job.trust_slot = -1;
        job.ordinal = job.advance = 1;
        job.owner = dsopt::Owner::update;
        job.present = job.in_norm = job.stochastic = true;
        hyper = {.lr = 0.1,
                 .beta1 = 0.9,
                 .beta2 = 0.999,
                 .eps = 1e-8,
                 .weight_decay = 0.01,
                 .max_norm = 0,
                 .min_trust = 0.01,
                 .max_trust = 10,
                 .momentum = 0,
                 .dampening = 0,
                 .lr_decay = 0,
                 .rule = dsopt::Rule::lamb,
                 .bias_correction = true,
                 .compat = false,
                 .eps_uncorrected = false,
                 .reserved = {}};
        plan.jobs = &job;
        plan.groups = &hyper;
        plan.count = plan.group_count = 1;
        plan.policy.read_gradients = plan.policy.skip_nonfinite = plan.policy.report_norms = plan.policy.reduces = true;
        plan.limits = {1.0, INFINITY};
        plan.step = &count;
        plan.trust_ratio = &trust;
        plan.outcome = &outcome;
        plan.execution.chunk = kLeaf;
        plan.execution.device_workspace = device_workspace.data();
        plan.control = &control;
        plan.scalars = &scalars;
        plan.divisors = &divisor;
        plan.norms = {norms.data(), 1, 1};
        plan.leaf = {tensor.sums_a.data(), tensor.sums_b.data(), tensor.bad.data()};
    }
};

/// Makes one step of all ranges, pass by pass: a reduction reads sums that the previous pass of all ranges has written.
void run(const dsopt::DeviceKernels &kernels, const std::vector<RangeStep *> &steps,
         std::vector<dsopt::StepKernels *> running = {}) {
    if (running.size() < steps.size())
        return kernels.run_step(steps[running.size()]->plan, [&](dsopt::StepKernels &step_kernels) {
            auto all = running;
            all.push_back(&step_kernels);
            run(kernels, steps, all);
        });
    const auto run_phases = [&](std::vector<dsopt::Phase> phases) {
        for (dsopt::StepKernels *each : running) each->run({phases, 0, phases.size()});
    };
    for (int twice = 0; twice < 2; ++twice) run_phases({dsopt::Phase::inspect, dsopt::Phase::fold});
    run_phases({dsopt::Phase::decide, dsopt::Phase::update});
    run_phases({dsopt::Phase::trust});
    run_phases({dsopt::Phase::weights, dsopt::Phase::finish});
}

TEST(TensorJob, StepsOfRangesEqualStepOfWholeTensor) {
    const std::unique_ptr<dsopt::Device> device = dsopt::make_cpu_device();
    Tensor whole, cut;
    RangeStep all(whole, 0, kNumel), first(cut, 0, kLeaf), rest(cut, kLeaf, kNumel - kLeaf);
    for (int step = 0; step < 3; ++step) {
        run(device->kernels(), {&all});
        run(device->kernels(), {&first, &rest});
        EXPECT_EQ(whole.weights, cut.weights);
        EXPECT_EQ(whole.m, cut.m);
        EXPECT_EQ(whole.v, cut.v);
        for (const RangeStep *range : {&first, &rest}) {
            EXPECT_EQ(range->outcome.grad_norm, all.outcome.grad_norm);
            EXPECT_EQ(range->outcome.weight_norm, all.outcome.weight_norm);
            EXPECT_EQ(range->outcome.update_norm, all.outcome.update_norm);
            EXPECT_EQ(range->trust, all.trust);
            EXPECT_EQ(range->count, step + 1);
        }
        EXPECT_GT(all.outcome.grad_norm, 1);
        EXPECT_GT(all.outcome.update_norm, 0);
    }
}

} // namespace inside_range_tests
