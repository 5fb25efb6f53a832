// SPDX-License-Identifier: Apache-2.0
// Calls of step and apply, on lists of any length, allocate nothing except the first one. A first step that fails to
// allocate memory has sent nothing.
#include "support/allocations.h"
#include "support/caller_memory.h"
#include "support/formats.h"
#include "support/muon.h"
#include "support/shard.h"

using namespace test;

namespace memory_warm_tests {

const Memory &host() {
    static const Memory memory = host_memory();
    return memory;
}

class WarmCall : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Tensors, WarmCall, testing::Values(1, 31, 32, 10000),
                         [](const auto &info) { return std::to_string(info.param); });

TEST_P(WarmCall, AllocatesNothingWithoutComm) {
    expect_no_allocations_in_warm_calls(DSOPT_BACKEND_CPU, host(), GetParam(), 5);
}
TEST_P(WarmCall, AllocatesNothingInAveragingSteps) {
    expect_no_allocations_in_averaging_steps(DSOPT_BACKEND_CPU, host(), GetParam(), 8);
}

TEST(FirstStep, SendsNothingIfAnAllocationFails) {
    for (const int32_t algorithm : kFamily)
        for (const uint32_t flags : {0u, uint32_t(DSOPT_OPTIMIZER_AVERAGES)}) {
            SCOPED_TRACE(name_of(algorithm));
            expect_first_step_repeatable(DSOPT_BACKEND_CPU, host(), algorithm, flags);
        }
}

// -------------------------------------------------------------------------------------------- new and allocator hooks
class WarmStep : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, WarmStep, testing::ValuesIn(kAlgorithms), algorithm_name);

struct AllocationCount {
    int64_t news, hooks;
};
template <class F> AllocationCount count_allocations(const HookCounter &hook, F &&call) {
    NewCounter::calls = 0;
    const int64_t before = hook.calls;
    dsopt_status status;
    {
        const CountScope armed;
        status = call();
    }
    EXPECT_EQ(status, DSOPT_OK) << dsopt_last_error();
    return {NewCounter::calls, hook.calls - before};
}

/// Returns a context with counted allocations and a pool that does not allocate.
Context watched_context(HookCounter &hook, int32_t threads) {
    dsopt_context_desc desc = context_desc(threads);
    hook.attach(desc);
    desc.parallel_for = run_in_order;
    return make_context(desc);
}

// The library calls the replaced operators.
TEST(AllocationCounter, CountsAllocationsOfTheLibrary) {
    HookCounter hook;
    const Context context = watched_context(hook, 1);
    dsopt_optimizer *created = nullptr;
    const AllocationCount count =
        count_allocations(hook, [&] { return dsopt_optimizer_create(context.get(), nullptr, &created); });
    const Optimizer opt(created);
    EXPECT_GT(count.news, 0);
    EXPECT_EQ(count.hooks, 0);
}

TEST_P(WarmStep, AllocatesNothingInApply) {
    HookCounter hook;
    const Context context = watched_context(hook, 4);
    const std::vector<Shape> shapes = shapes_of({100000, 0, 33, 9000}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F16);
    const Optimizer pure = make_pure(context, shapes, GetParam(), optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS));
    const CallerMemory caller_memory(pure.get(), shapes);
    dsopt_step step = caller_memory.arguments();
    std::vector<float> report(DSOPT_REPORT_FLOATS);
    step.report = report.data();
    step.out = caller_memory.params.data();
    for (int i = 0; i < 3; ++i) {
        const AllocationCount count = count_allocations(hook, [&] { return dsopt_optimizer_apply(pure.get(), &step); });
        EXPECT_EQ(count.news, 0);
        EXPECT_EQ(count.hooks, 0);
    }
    EXPECT_EQ(hook.calls, 0);
}

TEST_P(WarmStep, AllocatesNothing) {
    HookCounter hook;
    {
        dsopt_context_desc desc = context_desc(4);
        hook.attach(desc);
        desc.parallel_for = run_in_order;
        Trainer trainer(shapes_of({100000, 0, 33, 9000}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F16),
                        optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS), desc);
        trainer.add(make_group(GetParam()), 3);
        dsopt_step step = trainer.arguments();
        const auto warm = [&] {
            for (int i = 0; i < 3; ++i) {
                const AllocationCount count = count_allocations(hook, [&] { return trainer.step(step); });
                EXPECT_EQ(count.news, 0);
                EXPECT_EQ(count.hooks, 0);
            }
        };
        AllocationCount count = count_allocations(hook, [&] { return trainer.step(step); });
        EXPECT_GT(count.news + count.hooks, 0);
        warm();
        // Other arguments of a call allocate nothing either, except that the first call with a partial state list may.
        std::vector<dsopt_tensor> params = list_of(trainer.model.params), state;
        for (int64_t i = 0; i < state_count(trainer.opt()); ++i) {
            state.push_back(state_info(trainer.opt(), i).tensor);
            if (i % 2) state.back().data = nullptr;
        }
        step.params = params.data();
        step.out = params.data();
        step.flags = DSOPT_STEP_ZERO_GRADS;
        warm();
        step.state = state.data();
        step.state_count = int64_t(state.size());
        (void)count_allocations(hook, [&] { return trainer.step(step); });
        warm();
        // A new group allocates once.
        trainer.add(make_group(DSOPT_ALGORITHM_ADAMW), 1);
        step = trainer.arguments();
        count = count_allocations(hook, [&] { return trainer.step(step); });
        EXPECT_GT(count.hooks, 0);
        warm();
        must(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_LR, 0.5));
        warm();
        // Gradients and parameters have other addresses in each call, as in frameworks, and some gradients are absent.
        const Model second_model(shapes_of({100000, 0, 33, 9000}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F32));
        std::vector<dsopt_tensor> moved[] = {list_of(second_model.grads), list_of(trainer.model.grads)};
        const std::vector<dsopt_tensor> weights[] = {list_of(second_model.params), list_of(trainer.model.params)};
        moved[1][2].data = nullptr;
        for (int i = 0; i < 6; ++i) {
            DSOPT_NEW(dsopt_step, other);
            other.grads = moved[i % 2].data();
            other.params = weights[i / 2 % 2].data();
            other.out = i % 3 == 0 ? weights[i % 2].data() : nullptr;
            other.count = 4;
            const AllocationCount no_allocation = count_allocations(hook, [&] { return trainer.step(other); });
            EXPECT_EQ(no_allocation.news + no_allocation.hooks, 0) << i;
        }
        count = count_allocations(hook, [&] {
            DSOPT_NEW(dsopt_report, report);
            return dsopt_optimizer_report(trainer.opt(), &report);
        });
        EXPECT_EQ(count.news + count.hooks, 0);
        EXPECT_GT(hook.live, 0);
        // A refused call does not allocate its text.
        step.count = 1;
        NewCounter::calls = 0;
        {
            const CountScope armed;
            EXPECT_NE(trainer.step(step), DSOPT_OK);
        }
        EXPECT_EQ(NewCounter::calls, 0);
    }
    EXPECT_EQ(hook.live, 0);
    EXPECT_EQ(hook.live_bytes, 0);
    EXPECT_EQ(hook.wrong, 0);
}

// ---------------------------------------------------------------------------------------------------- a step in parts
TEST(WarmStepInParts, AllocatesNothing) {
    const std::pair<double, uint32_t> options[] = {{0.5, 0}, {0, 0}, {0, uint32_t(DSOPT_OPTIMIZER_EARLY_UPDATE)}};
    for (const auto &[max_norm, flags] : options) {
        HookCounter hook;
        dsopt_context_desc desc = context_desc(4);
        hook.attach(desc);
        desc.parallel_for = run_in_order;
        Trainer trainer(shapes_of({100000, 0, 33, 9000}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F16),
                        optimizer_desc(max_norm, flags), desc);
        trainer.add(make_group(DSOPT_ALGORITHM_ADAMW), 4);
        // Gradients at two places, one of which is absent at one of them, so that tables are and are not reused.
        const Model second_model(shapes_of({100000, 0, 33, 9000}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F16));
        std::vector<dsopt_tensor> gradients[] = {list_of(trainer.model.grads), list_of(second_model.grads)};
        gradients[1][2].data = nullptr;
        for (int i = 0; i < 8; ++i) {
            const std::vector<dsopt_tensor> &list = gradients[i / 3 % 2];
            int64_t allocated = 0;
            const auto count = [&](const std::function<dsopt_status()> &call) {
                const AllocationCount found = count_allocations(hook, call);
                allocated += found.news + found.hooks;
            };
            for (int64_t k = 3; k >= 0; --k) {
                DSOPT_NEW(dsopt_ready, ready);
                ready.first = k;
                ready.count = 1;
                ready.grads = &list[size_t(k)];
                count([&] { return dsopt_optimizer_ready(trainer.opt(), &ready); });
            }
            DSOPT_NEW(dsopt_step, step);
            step.count = 4;
            step.flags = DSOPT_STEP_READY;
            count([&] { return dsopt_optimizer_step(trainer.opt(), &step); });
            EXPECT_EQ(allocated > 0, i == 0) << i;
        }
    }
}

// ----------------------------------------------------------------------------------------------- low-precision state
class WarmFormatStep : public testing::TestWithParam<FormatCase> {};
INSTANTIATE_TEST_SUITE_P(Rules, WarmFormatStep, testing::ValuesIn(all_format_cases()), format_case_name);

const std::vector<Shape> kFormatShapes = shapes_of({9000, 0, 257, 1}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16);

TEST_P(WarmFormatStep, AllocatesNothing) {
    HookCounter hook;
    {
        dsopt_context_desc context = context_desc(4);
        hook.attach(context);
        context.parallel_for = run_in_order;
        const Trainer trainer(kFormatShapes, GetParam().group(), format_desc(DSOPT_MASTERS_REMAINDER), context);
        const Model second_model(kFormatShapes);
        const std::vector<dsopt_tensor> lists[] = {list_of(trainer.model.grads), list_of(second_model.grads)};
        std::vector<dsopt_tensor> out = list_of(second_model.params);
        for (int call = 0; call < 6; ++call) { // gradients have other addresses in each call
            dsopt_step step = trainer.arguments();
            step.grads = lists[call % 2].data();
            if (call % 3 == 2) step.out = out.data();
            const AllocationCount count = count_allocations(hook, [&] { return trainer.step(step); });
            if (call == 0) {
                EXPECT_GT(count.news, 0);
                EXPECT_GT(count.hooks, 0);
            } else {
                EXPECT_EQ(count.news, 0) << call;
                EXPECT_EQ(count.hooks, 0) << call;
            }
        }
    }
    EXPECT_EQ(hook.live, 0);
}

TEST_P(WarmFormatStep, AllocatesNothingInApply) {
    HookCounter hook;
    const Context context = watched_context(hook, 4);
    const Optimizer pure = make_optimizer(context, format_desc(DSOPT_MASTERS_REMAINDER));
    std::vector<dsopt_param> params;
    for (const Shape &shape : kFormatShapes) params.push_back(param_of({nullptr, shape.numel, shape.param, 0}));
    const dsopt_group group = GetParam().group();
    must(dsopt_optimizer_add_group(pure.get(), &group, params.data(), int64_t(params.size())));
    const CallerMemory caller_memory(pure.get(), kFormatShapes);
    const dsopt_step step = caller_memory.arguments();
    for (int i = 0; i < 3; ++i) {
        const AllocationCount count = count_allocations(hook, [&] { return dsopt_optimizer_apply(pure.get(), &step); });
        EXPECT_EQ(count.news, 0);
        EXPECT_EQ(count.hooks, 0);
    }
}

// ------------------------------------------------------------------------------------------------------------- muon
const std::vector<Cut> kCuts = {
    matrix(64, 90, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16), {{40, 120}, 40, 40}, matrix(0, 8), matrix(5, 3)};

class WarmMuonStep : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Products, WarmMuonStep, testing::ValuesIn(kDtypes),
                         [](const auto &info) { return dtype_name(info.param); });

LABEL(cpu);
TEST_P(WarmMuonStep, AllocatesNothing) {
    HookCounter hook;
    {
        dsopt_context_desc context = context_desc(4);
        hook.attach(context);
        context.parallel_for = run_in_order;
        std::vector<Shape> shapes = cut_shapes(kCuts);
        shapes.push_back({500});
        Trainer trainer(shapes, optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS), context);
        trainer.add(muon_group(GetParam()), params_of(kCuts));
        trainer.add(make_group(DSOPT_ALGORITHM_ADAMW), 1);
        const Model second_model(shapes);
        std::vector<dsopt_tensor> lists[] = {list_of(trainer.model.grads), list_of(second_model.grads)};
        lists[1][1].data = nullptr;
        const std::vector<dsopt_tensor> out = list_of(second_model.params);
        for (int call = 0; call < 8; ++call) { // gradients have other addresses in each call, and one is absent
            dsopt_step step = trainer.arguments();
            step.grads = lists[call % 2].data();
            if (call % 3 == 2) step.out = out.data();
            if (call == 6) must(dsopt_optimizer_set(trainer.opt(), 0, DSOPT_KEY_NS_STEPS, 7));
            if (call == 7) must(dsopt_optimizer_set(trainer.opt(), 0, DSOPT_KEY_LR, 0.5));
            const AllocationCount count = count_allocations(hook, [&] { return trainer.step(step); });
            EXPECT_EQ(count.news > 0, call == 0) << call;
            EXPECT_EQ(count.hooks > 0, call == 0) << call;
        }
    }
    EXPECT_EQ(hook.live, 0);
    EXPECT_EQ(hook.wrong, 0);
}

LABEL(cpu);
TEST_P(WarmMuonStep, AllocatesNothingInApply) {
    HookCounter hook;
    const Context context = watched_context(hook, 4);
    const Optimizer pure = make_optimizer(context, optimizer_desc(0.5));
    std::vector<dsopt_param> params = params_of(kCuts);
    for (size_t i = 0; i < params.size(); ++i) params[i].tensor = {nullptr, kCuts[i].numel(), kCuts[i].param, 0};
    const dsopt_group group = muon_group(GetParam());
    must(dsopt_optimizer_add_group(pure.get(), &group, params.data(), int64_t(params.size())));
    const CallerMemory caller_memory(pure.get(), cut_shapes(kCuts));
    const dsopt_step step = caller_memory.arguments();
    for (int i = 0; i < 3; ++i) {
        const AllocationCount count = count_allocations(hook, [&] { return dsopt_optimizer_apply(pure.get(), &step); });
        EXPECT_EQ(count.news, 0) << i;
        EXPECT_EQ(count.hooks, 0) << i;
    }
    EXPECT_EQ(hook.calls, 0);
}

TEST(WarmOneBitStep, AllocatesNothingInAnyStage) {
    for (const int32_t algorithm : kFamily)
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
            std::atomic<int64_t> news{0};
            with_ranks(2, [&](int rank, const Context &context, const Comm &comm) {
                dsopt_group group = make_group(algorithm);
                group.freeze_step = 4;
                if (algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM)
                    group.var_interval_steps = 1, group.local_interval_steps = 2, group.max_local_interval = 2;
                Trainer trainer(
                    context, desc_with(comm, compat, DSOPT_OPTIMIZER_AVERAGES), group,
                    std::vector<Array>{Array(DSOPT_DTYPE_F32, 5000, 1.0f), Array(DSOPT_DTYPE_F32, 33, 2.0f)});
                std::vector<Array> gradients[2];
                for (auto &list : gradients)
                    for (const Array &weight : trainer.weights()) list.emplace_back(weight).fill(uint64_t(rank + 1));
                const std::vector<dsopt_tensor> lists[] = {list_of(gradients[0]), list_of(gradients[1])};
                for (int call = 0; call < 14; ++call) {
                    DSOPT_NEW(dsopt_step, step);
                    step.grads = lists[call % 2].data();
                    step.count = 2;
                    const int64_t before = NewCounter::calls;
                    dsopt_status status;
                    {
                        const CountScope armed;
                        status = trainer.step(step);
                    }
                    must(status);
                    must(call_collective(context, comm)); // the counter includes both ranks
                    // The first call of compat mode changes and sends nothing, so the comm allocates in the second one.
                    if (call > (compat == DSOPT_COMPAT_NONE ? 0 : 1)) news += NewCounter::calls - before;
                }
            });
            EXPECT_EQ(news, 0) << name_of(algorithm) << " compat " << compat;
        }
}

class WarmShardedStep : public testing::TestWithParam<Topology> {};
INSTANTIATE_TEST_SUITE_P(Ranks, WarmShardedStep, testing::ValuesIn(kFewTopologies), topology_name);

TEST_P(WarmShardedStep, AllocatesNothing) {
    for (const uint32_t averages : {0u, uint32_t(DSOPT_OPTIMIZER_AVERAGES)}) {
        std::atomic<int64_t> news{0};
        with_nodes(GetParam().per_node, GetParam().nodes, [&](const NodeRank &rank) {
            ShardTraining training;
            training.groups = {make_group(DSOPT_ALGORITHM_ADAMW), make_group(DSOPT_ALGORITHM_LAMB)};
            training.param = training.grad = DSOPT_DTYPE_BF16;
            training.scaled = true;
            Scaler scaler;
            dsopt_optimizer_desc desc = optimizer_desc(0.5, averages | GetParam().flag);
            desc.bucket = GetParam().bucket;
            desc.masters = DSOPT_MASTERS_PER_TENSOR;
            desc.data = rank.data.get();
            if (GetParam().per_node > 1) desc.node = rank.node.get();
            Trainer trainer = training.trainer(rank.ctx, desc, scaler);
            const std::vector<Array> gradients[] = {training.gradients(1), training.gradients(2)};
            const std::vector<dsopt_tensor> lists[] = {list_of(gradients[0]), list_of(gradients[1])};
            for (int call = 0; call < 6; ++call) {
                DSOPT_NEW(dsopt_step, step);
                step.grads = lists[call % 2].data();
                step.count = int64_t(lists[0].size());
                const int64_t before = NewCounter::calls;
                dsopt_status status;
                {
                    const CountScope armed;
                    status = DSOPT_OK;
                    for (int64_t i = step.count; call % 3 != 0 && status == DSOPT_OK && i-- > 0;) {
                        DSOPT_NEW(dsopt_ready, ready);
                        ready.first = i;
                        ready.count = 1;
                        ready.grads = &lists[call % 2][size_t(i)];
                        status = dsopt_optimizer_ready(trainer.opt(), &ready);
                    }
                    if (call % 3 != 0) step.grads = nullptr, step.flags = DSOPT_STEP_READY;
                    if (status == DSOPT_OK) status = trainer.step(step);
                }
                must(status);
                // The counter includes all ranks: each waits until the others have returned.
                must(call_collective(rank.ctx, rank.data));
                if (GetParam().per_node > 1) must(call_collective(rank.ctx, rank.node));
                if (call > 1)
                    news += // the first undivided step, and the first one in parts
                        NewCounter::calls - before;
            }
        });
        EXPECT_EQ(news, 0) << "AVERAGES " << averages;
    }
}

} // namespace memory_warm_tests
