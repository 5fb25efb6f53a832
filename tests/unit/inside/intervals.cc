// SPDX-License-Identifier: Apache-2.0
// The phases inspect and update, run for intervals of the tensors of a step in any order, give the bits of one run.
#include "base/sizes.h"
#include "optimizer/plan.h"
#include "support/handles.h"
#include <gtest/gtest.h>
#include <limits>

namespace inside_intervals_tests {

using namespace dsopt;
using dsopt::Context, dsopt::Optimizer; // several files are compiled as one, and others use namespace test

constexpr int64_t kSizes[] = {700, 1, 0, 4096, 12345, 4097, 64, 8192, 33, 300000};
constexpr int64_t kCount = std::size(kSizes);

/// Values of an optimizer's tensors.
struct Values {
    std::vector<std::vector<float>> weights, grads;
    std::vector<std::vector<char>> state;
    explicit Values(const Optimizer &optimizer) {
        for (int64_t i = 0; i < kCount; ++i) {
            auto &w = weights.emplace_back(kSizes[i]), &g = grads.emplace_back(kSizes[i]);
            for (size_t k = 0; k < w.size(); ++k) {
                w[k] = float(k % 91) / 64 - 0.5f;
                g[k] = float((k * 7 + size_t(i)) % 131) / 256 - 0.25f;
            }
        }
        for (size_t i = 0; i < optimizer.state().size(); ++i) {
            const StateEntry &entry = optimizer.state()[i];
            state.emplace_back(size_t(entry.numel) * dtype_size(entry.dtype));
        }
    }
    static std::vector<dsopt_tensor> list(std::vector<std::vector<float>> &arrays) {
        std::vector<dsopt_tensor> tensors;
        for (auto &array : arrays) tensors.push_back({array.data(), int64_t(array.size()), DSOPT_DTYPE_F32, 0});
        return tensors;
    }
    bool operator==(const Values &) const = default;
};

class Case {
public:
    Case(dsopt_algorithm algorithm, int threads) {
        dsopt_context_desc context{};
        context.size = sizeof context;
        context.threads = threads;
        dsopt_optimizer_desc desc{};
        desc.size = sizeof desc;
        desc.max_norm = 0.25;
        desc.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
        context.backend = DSOPT_BACKEND_CPU;
        optimizer_ = std::make_unique<Optimizer>(std::make_shared<Context>(context), desc, Attachments{});
        std::vector<dsopt_param> params(kCount);
        for (int64_t i = 0; i < kCount; ++i) params[size_t(i)].tensor = {nullptr, kSizes[i], DSOPT_DTYPE_F32, 0};
        optimizer_->add_group(test::group_of(algorithm), params.data(), kCount);
        optimizer_->finalize_groups();
    }
    Optimizer &optimizer() const { return *optimizer_; }

    /// Makes a step. `intervals`: of inspect and update; empty: one run.
    void step(Values &values, const std::vector<TensorInterval> &intervals) const {
        const std::vector<dsopt_tensor> grads = Values::list(values.grads), params = Values::list(values.weights);
        std::vector<dsopt_tensor> state;
        for (size_t i = 0; i < values.state.size(); ++i) {
            const StateEntry &entry = optimizer_->state()[i];
            state.push_back({values.state[i].data(), entry.numel, entry.dtype, 0});
        }
        dsopt_step step{};
        step.count = kCount;
        step.grads = grads.data();
        step.params = params.data();
        const StepSizes &sizes = optimizer_->sizes();
        std::vector<char> workspace(with_alignment_padding(sizes.workspace_bytes));
        char *const begin = workspace.data() + alignment_padding(workspace.data());
        const StepMemory memory(sizes, begin, nullptr);
        const StepTable table(memory.table, sizes.shape);
        const StepPlan plan =
            make_plan(*optimizer_, {step, flags_of(step)}, state.data(), memory, table, nullptr, nullptr);
        const PhaseList phases = phases_of(plan, nullptr, {});
        optimizer_->context().device().kernels().run_step(plan, [&](StepKernels &kernels) {
            for (size_t k = 0; k < phases.all().size(); ++k) {
                PhaseRun run{phases.all(), k, k + 1};
                const Phase phase = phases.all()[k];
                const bool divided = !intervals.empty() && (phase == Phase::inspect || phase == Phase::update);
                if (!divided) kernels.run(run);
                for (const TensorInterval &interval : intervals)
                    if (divided) run.tensors = interval, kernels.run(run);
            }
        });
        outcome_ = *plan.outcome;
    }
    const Outcome &outcome() const { return outcome_; }

private:
    std::unique_ptr<Optimizer> optimizer_;
    mutable Outcome outcome_{};
};

class RulesInIntervals : public testing::TestWithParam<dsopt_algorithm> {};
INSTANTIATE_TEST_SUITE_P(, RulesInIntervals,
                         testing::Values(DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_SGD, DSOPT_ALGORITHM_LION));

TEST_P(RulesInIntervals, GiveTheBitsOfOneRun) {
    const std::vector<std::vector<TensorInterval>> cases = {
        {{0, kCount}}, {{5, kCount - 5}, {0, 5}}, {{3, 1}, {9, 1}, {4, 5}, {0, 3}}, [] {
            std::vector<TensorInterval> each;
            for (int64_t i = kCount; i-- > 0;) each.push_back({i, 1});
            return each;
        }()};
    for (const int threads : {1, 3}) {
        const Case whole(GetParam(), threads);
        Values wanted(whole.optimizer());
        for (int step = 0; step < 3; ++step) whole.step(wanted, {});
        for (const auto &intervals : cases) {
            const Case divided(GetParam(), threads);
            Values found(divided.optimizer());
            for (int step = 0; step < 3; ++step) divided.step(found, intervals);
            EXPECT_TRUE(found == wanted) << intervals.size() << " intervals, " << threads << " threads";
            EXPECT_EQ(divided.outcome().grad_norm, whole.outcome().grad_norm);
            EXPECT_EQ(divided.outcome().update_norm, whole.outcome().update_norm);
        }
    }
}

TEST(Intervals, SkipTheStepForANonFiniteElementOfAny) {
    const Case divided(DSOPT_ALGORITHM_ADAMW, 2);
    Values values(divided.optimizer());
    values.grads[4][7] = std::numeric_limits<float>::infinity();
    const Values before = values;
    divided.step(values, {{6, kCount - 6}, {0, 6}});
    EXPECT_EQ(divided.outcome().nonfinite, 1);
    EXPECT_TRUE(values == before);
}

} // namespace inside_intervals_tests
