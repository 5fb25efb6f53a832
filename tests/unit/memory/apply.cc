// SPDX-License-Identifier: Apache-2.0
// Neither form of a step allocates once it is warm.
#include "support/owned.h"

#include "support/alloc.h"

using namespace test;

namespace {

class WarmSteps : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, WarmSteps, testing::ValuesIn(kAlgorithms), algorithm_name);

struct Count {
    int64_t news, hooks;
};
template <class F> Count allocations(const HookWatch &hook, F &&call) {
    NewWatch::calls = 0;
    const int64_t before = hook.calls;
    dsopt_status status;
    {
        const Armed armed;
        status = call();
    }
    EXPECT_EQ(status, DSOPT_OK) << dsopt_last_error();
    return {NewWatch::calls, hook.calls - before};
}

/// A context with its allocator watched, and a pool that does not allocate either.
Context watched_context(HookWatch &hook, int32_t threads) {
    dsopt_context_desc desc = context_desc(threads);
    hook.attach(desc);
    desc.parallel_for = run_in_order;
    return make_context(desc);
}

TEST(Allocations, AreSeenAtAll) { // that the replaced operators are the ones that the library calls
    HookWatch hook;
    const Context context = watched_context(hook, 1);
    dsopt_optimizer *made = nullptr;
    const Count count = allocations(hook, [&] { return dsopt_optimizer_create(context.get(), nullptr, &made); });
    const Optimizer opt(made);
    EXPECT_GT(count.news, 0);
    EXPECT_EQ(count.hooks, 0);
}

TEST_P(WarmSteps, OfApplyDoNotAllocate) {
    HookWatch hook;
    const Context context = watched_context(hook, 4);
    const std::vector<Shape> shapes = shapes_of({100000, 0, 33, 9000}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F16);
    const Optimizer pure = make_pure(context, shapes, GetParam(), optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS));
    const Owned owned(pure.get(), shapes);
    dsopt_step step = owned.arguments();
    std::vector<float> report(DSOPT_REPORT_FLOATS);
    step.report = report.data();
    step.out = owned.params.data();
    for (int i = 0; i < 3; ++i) {
        const Count count = allocations(hook, [&] { return dsopt_optimizer_apply(pure.get(), &step); });
        EXPECT_EQ(count.news, 0);
        EXPECT_EQ(count.hooks, 0);
    }
    EXPECT_EQ(hook.calls, 0);
}

TEST_P(WarmSteps, DoNotAllocate) {
    HookWatch hook;
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
                const Count count = allocations(hook, [&] { return trainer.step(step); });
                EXPECT_EQ(count.news, 0);
                EXPECT_EQ(count.hooks, 0);
            }
        };
        Count count = allocations(hook, [&] { return trainer.step(step); });
        EXPECT_GT(count.news + count.hooks, 0);
        warm();
        // Whatever else a call brings does not matter either; the first with a partial state list may make room for it.
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
        (void)allocations(hook, [&] { return trainer.step(step); });
        warm();
        // A new group needs memory once.
        trainer.add(make_group(DSOPT_ALGORITHM_ADAMW), 1);
        step = trainer.arguments();
        count = allocations(hook, [&] { return trainer.step(step); });
        EXPECT_GT(count.hooks, 0);
        warm();
        must(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_LR, 0.5));
        warm();
        // Lists move, as those of a framework do: other gradients and parameters at each call, some of them absent.
        const Model elsewhere(shapes_of({100000, 0, 33, 9000}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F32));
        std::vector<dsopt_tensor> moved[] = {list_of(elsewhere.grads), list_of(trainer.model.grads)};
        const std::vector<dsopt_tensor> weights[] = {list_of(elsewhere.params), list_of(trainer.model.params)};
        moved[1][2].data = nullptr;
        for (int i = 0; i < 6; ++i) {
            DSOPT_NEW(dsopt_step, other);
            other.grads = moved[i % 2].data();
            other.params = weights[i / 2 % 2].data();
            other.out = i % 3 == 0 ? weights[i % 2].data() : nullptr;
            other.count = 4;
            const Count none = allocations(hook, [&] { return trainer.step(other); });
            EXPECT_EQ(none.news + none.hooks, 0) << i;
        }
        count = allocations(hook, [&] {
            DSOPT_NEW(dsopt_report, report);
            return dsopt_optimizer_report(trainer.opt(), &report);
        });
        EXPECT_EQ(count.news + count.hooks, 0);
        EXPECT_GT(hook.live, 0);
        // A refused call does not allocate its text.
        step.count = 1;
        NewWatch::calls = 0;
        {
            const Armed armed;
            EXPECT_NE(trainer.step(step), DSOPT_OK);
        }
        EXPECT_EQ(NewWatch::calls, 0);
    }
    EXPECT_EQ(hook.live, 0);
    EXPECT_EQ(hook.live_bytes, 0);
    EXPECT_EQ(hook.wrong, 0);
}

TEST(Allocations, AreNotMadeByWarm1BitStepsInAnyStageNorByTheirComm) {
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
                    const int64_t before = NewWatch::calls;
                    dsopt_status status;
                    {
                        const Armed armed;
                        status = trainer.step(step);
                    }
                    must(status);
                    must(meet(context, comm)); // calls are counted of both ranks
                    // The call that compat mode spends on nothing sends nothing either: the comm's memory comes next.
                    if (call > (compat == DSOPT_COMPAT_NONE ? 0 : 1)) news += NewWatch::calls - before;
                }
            });
            EXPECT_EQ(news, 0) << name_of(algorithm) << " compat " << compat;
        }
}

} // namespace
