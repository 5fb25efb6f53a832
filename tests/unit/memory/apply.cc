// SPDX-License-Identifier: Apache-2.0
// The step as a pure function of the caller's memory, and that neither form of a step allocates once it is warm.
#include "support/owned.h"

#include "support/alloc.h"
#include "support/file.h"

using namespace test;

namespace {

const std::vector<int64_t> kSizes = {5000, 0, 33, 9000};

class Apply : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, Apply, testing::ValuesIn(kAlgorithms), algorithm_name);

TEST_P(Apply, HasTheBitsOfStepOverTwentySteps) {
    const Context context = make_context(context_desc(2));
    for (const int32_t param : kDtypes) {
        const std::vector<Shape> shapes = shapes_of(kSizes, param, param);
        const dsopt_optimizer_desc desc = optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS);
        const Optimizer pure = make_pure(context, shapes, GetParam(), desc);
        Owned owned(pure.get(), shapes);
        const Trainer trainer(shapes, make_group(GetParam()), desc);
        for (uint64_t t = 1; t <= 20; ++t) {
            std::vector<float> reports[2] = {std::vector<float>(DSOPT_REPORT_FLOATS, -7),
                                             std::vector<float>(DSOPT_REPORT_FLOATS, -8)};
            const float lr = 0.01f / float(t), scale = t % 3 ? 1.0f : 16.0f;
            const int32_t skip = t == 7;
            owned.model.make_gradients(t);
            trainer.model.make_gradients(t);
            if (t == 11) owned.model.grads[2].set(5, NAN), trainer.model.grads[2].set(5, NAN);
            for (int side = 0; side < 2; ++side) {
                dsopt_step step = side == 0 ? owned.arguments() : trainer.arguments();
                step.lr = &lr;
                step.grad_scale = &scale;
                step.skip = &skip;
                step.report = reports[side].data();
                if (side == 0) {
                    owned.workspace.spoil(int(t * 37)); // nothing may be remembered there
                    ASSERT_OK(dsopt_optimizer_apply(pure.get(), &step));
                } else {
                    must(trainer.step(step));
                }
            }
            ASSERT_EQ(0, std::memcmp(reports[0].data(), reports[1].data(), sizeof(float) * DSOPT_REPORT_FLOATS)) << t;
        }
        EXPECT_TRUE(same(owned.text(), trainer.text()));
        EXPECT_TRUE(owned.intact());
        EXPECT_EQ(steps(trainer.opt())[0], 18);
    }
}

TEST_P(Apply, RemembersNothing) {
    const Context context = make_context();
    const std::vector<Shape> shapes = shapes_of(kSizes, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F32);
    const Optimizer pure = make_pure(context, shapes, GetParam(), optimizer_desc(1.0));
    const Owned owned(pure.get(), shapes);
    const dsopt_step step = owned.arguments();
    for (int i = 0; i < 3; ++i) ASSERT_OK(dsopt_optimizer_apply(pure.get(), &step));
    EXPECT_EQ(report_of(pure.get()).calls, 0);
    EXPECT_TRUE(std::isnan(report_of(pure.get()).grad_norm));
    for (int64_t i = 0; i < state_count(pure.get()); ++i) EXPECT_EQ(state_info(pure.get(), i).tensor.data, nullptr);
    EXPECT_EQ(owned.blocks.back().as<int32_t>()[0], 3); // the counters are the caller's
}

TEST_P(Apply, HasOutputsAndFlagsLikeStep) {
    const Context context = make_context(context_desc(3));
    const std::vector<Shape> shapes = shapes_of(kSizes);
    const Optimizer pure = make_pure(context, shapes, GetParam(), optimizer_desc());
    const Owned owned(pure.get(), shapes);
    const Trainer trainer(shapes, make_group(GetParam()));
    std::vector<Array> outs[2];
    for (auto &list : outs)
        for (const int64_t numel : kSizes) list.emplace_back(DSOPT_DTYPE_F32, size_t(numel), 0.0f);
    const std::vector<dsopt_tensor> lists[2] = {list_of(outs[0]), list_of(outs[1])};
    for (const uint32_t flags :
         {0u, uint32_t(DSOPT_STEP_OUT_ONLY), uint32_t(DSOPT_STEP_DELTA | DSOPT_STEP_ZERO_GRADS)}) {
        dsopt_step step = owned.arguments(), other = trainer.arguments();
        step.out = lists[0].data();
        other.out = lists[1].data();
        step.flags = other.flags = flags;
        ASSERT_OK(dsopt_optimizer_apply(pure.get(), &step));
        must(trainer.step(other));
        for (size_t i = 0; i < kSizes.size(); ++i) {
            EXPECT_TRUE(same(outs[0][i].text(), outs[1][i].text()));
            EXPECT_TRUE(same(owned.model.grads[i].text(), trainer.model.grads[i].text()));
        }
        EXPECT_TRUE(same(owned.text(), trainer.text()));
    }
}

TEST_P(Apply, WritesOutputsOverTheGradients) {
    const std::vector<int64_t> sizes = {100003, 0, 33, 9000};
    for (const int32_t threads : {1, 3})
        for (const int32_t dtype : kDtypes) { // of gradients and outputs
            const Context context = make_context(context_desc(threads));
            const std::vector<Shape> shapes = shapes_of(sizes, DSOPT_DTYPE_F32, dtype);
            const Optimizer pure = make_pure(context, shapes, GetParam(), optimizer_desc(0.5));
            Owned over(pure.get(), shapes), apart(pure.get(), shapes);
            std::vector<Array> outs;
            for (const int64_t numel : sizes) outs.emplace_back(dtype, size_t(numel), 0.0f);
            const std::vector<dsopt_tensor> list = list_of(outs);
            uint64_t t = 0;
            for (const int32_t flags : {0, int32_t(DSOPT_STEP_OUT_ONLY), int32_t(DSOPT_STEP_DELTA)})
                for (const int32_t skip : {0, 1}) {
                    over.model.make_gradients(++t);
                    apart.model.make_gradients(t);
                    dsopt_step step = over.arguments(), other = apart.arguments();
                    step.flags = other.flags = flags;
                    step.skip = other.skip = &skip;
                    step.out = over.grads.data();
                    other.out = list.data();
                    ASSERT_OK(dsopt_optimizer_apply(pure.get(), &step));
                    ASSERT_OK(dsopt_optimizer_apply(pure.get(), &other));
                    for (size_t i = 0; i < sizes.size(); ++i) {
                        EXPECT_TRUE(same(over.model.grads[i].text(), outs[i].text())) << flags << skip << i;
                        EXPECT_TRUE(same(over.model.params[i].text(), apart.model.params[i].text())) << i;
                    }
                    for (size_t i = 0; i < over.blocks.size(); ++i)
                        EXPECT_TRUE(same(over.blocks[i].text(), apart.blocks[i].text())) << i;
                }
            EXPECT_TRUE(over.intact());
        }
}

TEST_P(Apply, WorksFromManyThreadsAtOnceOnDifferentMemory) {
    const Context context = make_context(context_desc(2));
    const std::vector<Shape> shapes = shapes_of({20000, 3, 0, 4097}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16);
    const Optimizer pure = make_pure(context, shapes, GetParam(), optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS));
    const Trainer trainer(shapes, make_group(GetParam()), optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS));
    trainer.train(1, 20);
    constexpr int kThreads = 3;
    std::vector<Owned> owned;
    for (int i = 0; i < kThreads; ++i) owned.emplace_back(pure.get(), shapes);
    std::atomic<int> failed{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i)
        threads.emplace_back([&, i] {
            for (uint64_t t = 1; t <= 20; ++t) {
                owned[size_t(i)].model.make_gradients(t);
                const dsopt_step step = owned[size_t(i)].arguments();
                size_t bytes = 0;
                DSOPT_NEW(dsopt_state_info, info);
                failed += dsopt_optimizer_apply(pure.get(), &step) != DSOPT_OK;
                failed += dsopt_optimizer_workspace(pure.get(), &bytes) != DSOPT_OK;
                failed += dsopt_optimizer_state(pure.get(), 0, &info) != DSOPT_OK;
            }
        });
    for (std::thread &thread : threads) thread.join();
    EXPECT_EQ(failed, 0);
    for (const Owned &one : owned) EXPECT_TRUE(same(one.text(), trainer.text()));
}

TEST_P(Apply, BesideChangesOfTheOptimizerIsBusyOrHasTheBitsOfOneOfItsForms) {
    constexpr double rates[] = {0.25, 1e-3};
    constexpr int kThreads = 3, kApplies = 6, kRounds = 6;
    const std::vector<Shape> shapes = shapes_of({20000, 3, 0, 4097});
    const Trainer trainer(shapes, make_group(GetParam()), optimizer_desc(0.5), context_desc(2));
    dsopt_optimizer *const opt = trainer.opt();
    trainer.train(1);
    const Optimizer largest = make_pure(trainer.own_context, shapes, GetParam(), optimizer_desc(0.5));
    const dsopt_group empty = make_group(GetParam());
    for (int i = 0; i < kRounds; ++i) must(dsopt_optimizer_add_group(largest.get(), &empty, nullptr, 0));
    std::string texts[2];
    for (int i = 0; i < 2; ++i) {
        must(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_LR, rates[i]));
        const Owned owned(largest.get(), shapes);
        const dsopt_step step = owned.arguments();
        must(dsopt_optimizer_apply(opt, &step));
        texts[i] = owned.text();
    }
    ASSERT_NE(texts[0], texts[1]);

    std::atomic<int> wrong{0};
    // Whoever is refused tries again: one of them always gets on.
    const auto until_free = [&](const auto &call) {
        for (dsopt_status status = call(); status != DSOPT_OK; status = call()) {
            if (status != DSOPT_ERR_BUSY) return void(++wrong);
            std::this_thread::yield();
        }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i)
        threads.emplace_back([&] {
            for (int k = 0; k < kApplies; ++k) {
                const Owned owned(largest.get(), shapes);
                const dsopt_step step = owned.arguments();
                until_free([&] { return dsopt_optimizer_apply(opt, &step); });
                wrong += owned.text() != texts[0] && owned.text() != texts[1];
                double rate = rates[0];
                int64_t groups = 1, params = 4, entries = 0;
                size_t bytes = 0;
                int32_t reduction = 0;
                DSOPT_NEW(dsopt_state_info, info);
                until_free([&] { return dsopt_optimizer_get(opt, 0, DSOPT_KEY_LR, &rate); });
                until_free([&] { return dsopt_optimizer_count(opt, &groups, &params); });
                until_free([&] { return dsopt_optimizer_state_count(opt, &entries); });
                until_free([&] { return dsopt_optimizer_state(opt, entries - 1, &info); });
                until_free([&] { return dsopt_optimizer_workspace(opt, &bytes); });
                until_free([&] { return dsopt_optimizer_next_reduction(opt, 1, &reduction); });
                wrong += (rate != rates[0] && rate != rates[1]) || groups < 1 || groups > 1 + kRounds || params != 4;
                wrong += info.tensor.numel != 4;
            }
        });
    threads.emplace_back([&] {
        const std::vector<dsopt_tensor> params = list_of(trainer.model.params);
        std::vector<int32_t> steps(4);
        for (int round = 0; round < kRounds; ++round) {
            until_free([&] { return dsopt_optimizer_add_group(opt, &empty, nullptr, 0); });
            until_free([&] { return dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_LR, rates[round % 2]); });
            until_free([&] { return dsopt_optimizer_bind(opt, DSOPT_BIND_PARAMS, params.data(), 4); });
            const dsopt_step step = trainer.arguments();
            until_free([&] { return dsopt_optimizer_step(opt, &step); });
            Tape tape;
            until_free([&] {
                tape.data.clear();
                const dsopt_io io = tape.io();
                return dsopt_optimizer_save(opt, nullptr, &io);
            });
            const dsopt_io io = tape.io();
            until_free([&] { return dsopt_optimizer_load(opt, nullptr, &io); });
            int64_t entries = 0;
            until_free([&] { return dsopt_optimizer_state_count(opt, &entries); });
            until_free([&] { return dsopt_optimizer_export(opt, entries - 1, steps.data(), 16); });
            until_free([&] { return dsopt_optimizer_import(opt, entries - 1, steps.data(), 16); });
            until_free([&] { return dsopt_optimizer_reset(opt, DSOPT_RESET_MOMENTS, nullptr); });
            DSOPT_NEW(dsopt_report, report);
            until_free([&] { return dsopt_optimizer_report(opt, &report); });
        }
    });
    for (std::thread &thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(report_of(opt).calls, 1 + kRounds);
}

TEST_P(Apply, WorkspaceChangesWithGroupsAlone) {
    Trainer trainer(shapes_of({100, 200}), optimizer_desc());
    trainer.add(make_group(GetParam()), 1);
    const auto bytes = [&] {
        size_t bytes = 0;
        must(dsopt_optimizer_workspace(trainer.opt(), &bytes));
        return bytes;
    };
    const size_t before = bytes();
    trainer.train(1);
    must(dsopt_optimizer_set(trainer.opt(), 0, DSOPT_KEY_LR, 0.5));
    must(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM, 0.5));
    EXPECT_EQ(bytes(), before);
    EXPECT_EQ(report_of(trainer.opt()).workspace_bytes, int64_t(before));
    trainer.add(make_group(DSOPT_ALGORITHM_ADAMW), 1);
    EXPECT_GT(bytes(), before);
}

// --------------------------------------------------------------------------------------------------- no allocation
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

TEST_P(Apply, NeverAllocates) {
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

TEST_P(Apply, AndAWarmStepDoesNotEither) {
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
