// SPDX-License-Identifier: Apache-2.0
// dsopt_optimizer_apply compared with dsopt_optimizer_step: identical bits, outputs, and concurrent calls.
#include "support/caller_memory.h"

#include "support/file.h"

using namespace test;

namespace apply_tests {

const std::vector<int64_t> kSizes = {5000, 0, 33, 9000};

class Apply : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, Apply, testing::ValuesIn(kAlgorithms), algorithm_name);

TEST_P(Apply, MatchesTheBitsOfStep) {
    const Context context = make_context(context_desc(2));
    for (const int32_t param : kDtypes) {
        const std::vector<Shape> shapes = shapes_of(kSizes, param, param);
        const dsopt_optimizer_desc desc = optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS);
        const Optimizer pure = make_pure(context, shapes, GetParam(), desc);
        CallerMemory caller_memory(pure.get(), shapes);
        const Trainer trainer(shapes, make_group(GetParam()), desc);
        for (uint64_t t = 1; t <= 20; ++t) {
            const Shared<float> reports[2] = {Shared<float>(DSOPT_REPORT_FLOATS, -7),
                                              Shared<float>(DSOPT_REPORT_FLOATS, -8)};
            const float lr = 0.01f / float(t), scale = t % 3 ? 1.0f : 16.0f;
            const int32_t skip = t == 7;
            caller_memory.model.make_gradients(t);
            trainer.model.make_gradients(t);
            if (t == 11) caller_memory.model.grads[2].set(5, NAN), trainer.model.grads[2].set(5, NAN);
            for (int side = 0; side < 2; ++side) {
                dsopt_step step = side == 0 ? caller_memory.arguments() : trainer.arguments();
                step.lr = on_device(lr);
                step.grad_scale = on_device(scale);
                step.skip = on_device(skip);
                step.report = reports[side].data();
                if (side == 0) {
                    caller_memory.workspace.corrupt(int(t * 37)); // a call must not depend on earlier contents
                    ASSERT_OK(dsopt_optimizer_apply(pure.get(), &step));
                } else {
                    must(trainer.step(step));
                }
            }
            ASSERT_EQ(0, std::memcmp(reports[0].data(), reports[1].data(), sizeof(float) * DSOPT_REPORT_FLOATS)) << t;
        }
        EXPECT_TRUE(same(caller_memory.text(), trainer.text()));
        EXPECT_TRUE(caller_memory.intact());
        EXPECT_EQ(steps(trainer.opt())[0], 18);
    }
}

TEST_P(Apply, WritesOutputsLikeStep) {
    const Context context = make_context(context_desc(3));
    const std::vector<Shape> shapes = shapes_of(kSizes);
    const Optimizer pure = make_pure(context, shapes, GetParam(), optimizer_desc());
    const CallerMemory caller_memory(pure.get(), shapes);
    const Trainer trainer(shapes, make_group(GetParam()));
    std::vector<Array> outs[2];
    for (auto &list : outs)
        for (const int64_t numel : kSizes) list.emplace_back(DSOPT_DTYPE_F32, size_t(numel), 0.0f);
    const std::vector<dsopt_tensor> lists[2] = {list_of(outs[0]), list_of(outs[1])};
    for (const uint32_t flags :
         {0u, uint32_t(DSOPT_STEP_OUT_ONLY), uint32_t(DSOPT_STEP_DELTA | DSOPT_STEP_ZERO_GRADS)}) {
        dsopt_step step = caller_memory.arguments(), other = trainer.arguments();
        step.out = lists[0].data();
        other.out = lists[1].data();
        step.flags = other.flags = flags;
        ASSERT_OK(dsopt_optimizer_apply(pure.get(), &step));
        must(trainer.step(other));
        for (size_t i = 0; i < kSizes.size(); ++i) {
            EXPECT_TRUE(same(outs[0][i].text(), outs[1][i].text()));
            EXPECT_TRUE(same(caller_memory.model.grads[i].text(), trainer.model.grads[i].text()));
        }
        EXPECT_TRUE(same(caller_memory.text(), trainer.text()));
    }
}

LABEL_PARAMS(long_emulated, "Adam*");
TEST_P(Apply, WritesOutputsOverTheGradients) {
    const std::vector<int64_t> sizes = {100003, 0, 33, 9000};
    for (const int32_t threads : {1, 3})
        for (const int32_t dtype : kDtypes) { // dtype of gradients and outputs
            const Context context = make_context(context_desc(threads));
            const std::vector<Shape> shapes = shapes_of(sizes, DSOPT_DTYPE_F32, dtype);
            const Optimizer pure = make_pure(context, shapes, GetParam(), optimizer_desc(0.5));
            CallerMemory in_place(pure.get(), shapes), separate(pure.get(), shapes);
            std::vector<Array> outs;
            for (const int64_t numel : sizes) outs.emplace_back(dtype, size_t(numel), 0.0f);
            const std::vector<dsopt_tensor> list = list_of(outs);
            uint64_t t = 0;
            for (const int32_t flags : {0, int32_t(DSOPT_STEP_OUT_ONLY), int32_t(DSOPT_STEP_DELTA)})
                for (const int32_t skip : {0, 1}) {
                    in_place.model.make_gradients(++t);
                    separate.model.make_gradients(t);
                    dsopt_step step = in_place.arguments(), other = separate.arguments();
                    step.flags = other.flags = flags;
                    step.skip = other.skip = on_device(skip);
                    step.out = in_place.grads.data();
                    other.out = list.data();
                    ASSERT_OK(dsopt_optimizer_apply(pure.get(), &step));
                    ASSERT_OK(dsopt_optimizer_apply(pure.get(), &other));
                    for (size_t i = 0; i < sizes.size(); ++i) {
                        EXPECT_TRUE(same(in_place.model.grads[i].text(), outs[i].text())) << flags << skip << i;
                        EXPECT_TRUE(same(in_place.model.params[i].text(), separate.model.params[i].text())) << i;
                    }
                    for (size_t i = 0; i < in_place.blocks.size(); ++i)
                        EXPECT_TRUE(same(in_place.blocks[i].text(), separate.blocks[i].text())) << i;
                }
            EXPECT_TRUE(in_place.intact());
        }
}

TEST_P(Apply, RunsOnManyThreadsWithDifferentMemory) {
    const Context context = make_context(context_desc(2));
    const std::vector<Shape> shapes = shapes_of({20000, 3, 0, 4097}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16);
    const Optimizer pure = make_pure(context, shapes, GetParam(), optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS));
    const Trainer trainer(shapes, make_group(GetParam()), optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS));
    trainer.train(1, 20);
    constexpr int kThreads = 3;
    std::vector<CallerMemory> caller_memory;
    for (int i = 0; i < kThreads; ++i) caller_memory.emplace_back(pure.get(), shapes);
    std::atomic<int> failed{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i)
        threads.emplace_back([&, i] {
            for (uint64_t t = 1; t <= 20; ++t) {
                caller_memory[size_t(i)].model.make_gradients(t);
                const dsopt_step step = caller_memory[size_t(i)].arguments();
                size_t bytes = 0;
                DSOPT_NEW(dsopt_state_info, info);
                failed += dsopt_optimizer_apply(pure.get(), &step) != DSOPT_OK;
                failed += dsopt_optimizer_workspace(pure.get(), &bytes) != DSOPT_OK;
                failed += dsopt_optimizer_state(pure.get(), 0, &info) != DSOPT_OK;
            }
        });
    for (std::thread &thread : threads) thread.join();
    EXPECT_EQ(failed, 0);
    for (const CallerMemory &memory : caller_memory) EXPECT_TRUE(same(memory.text(), trainer.text()));
}

LABEL(varies);
TEST_P(Apply, IsBusyOrConsistentDuringConcurrentChanges) {
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
        const CallerMemory caller_memory(largest.get(), shapes);
        const dsopt_step step = caller_memory.arguments();
        must(dsopt_optimizer_apply(opt, &step));
        texts[i] = caller_memory.text();
    }
    ASSERT_NE(texts[0], texts[1]);

    std::atomic<int> wrong{0};
    // Repeats a call that returns DSOPT_ERR_BUSY. At least one thread always makes progress.
    const auto retry_while_busy = [&](const auto &call) {
        for (dsopt_status status = call(); status != DSOPT_OK; status = call()) {
            if (status != DSOPT_ERR_BUSY) return void(++wrong);
            std::this_thread::yield();
        }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i)
        threads.emplace_back([&] {
            for (int k = 0; k < kApplies; ++k) {
                const CallerMemory caller_memory(largest.get(), shapes);
                const dsopt_step step = caller_memory.arguments();
                retry_while_busy([&] { return dsopt_optimizer_apply(opt, &step); });
                wrong += caller_memory.text() != texts[0] && caller_memory.text() != texts[1];
                double rate = rates[0];
                int64_t groups = 1, params = 4, entries = 0;
                size_t bytes = 0;
                int32_t reduction = 0;
                DSOPT_NEW(dsopt_state_info, info);
                retry_while_busy([&] { return dsopt_optimizer_get(opt, 0, DSOPT_KEY_LR, &rate); });
                retry_while_busy([&] { return dsopt_optimizer_count(opt, &groups, &params); });
                retry_while_busy([&] { return dsopt_optimizer_state_count(opt, &entries); });
                retry_while_busy([&] { return dsopt_optimizer_state(opt, entries - 1, &info); });
                retry_while_busy([&] { return dsopt_optimizer_workspace(opt, &bytes); });
                retry_while_busy([&] { return dsopt_optimizer_next_reduction(opt, 1, &reduction); });
                wrong += (rate != rates[0] && rate != rates[1]) || groups < 1 || groups > 1 + kRounds || params != 4;
                wrong += info.tensor.numel != 4;
            }
        });
    threads.emplace_back([&] {
        const std::vector<dsopt_tensor> params = list_of(trainer.model.params);
        std::vector<int32_t> steps(4);
        for (int round = 0; round < kRounds; ++round) {
            retry_while_busy([&] { return dsopt_optimizer_add_group(opt, &empty, nullptr, 0); });
            retry_while_busy(
                [&] { return dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_LR, rates[round % 2]); });
            retry_while_busy([&] { return dsopt_optimizer_bind(opt, DSOPT_BIND_PARAMS, params.data(), 4); });
            const dsopt_step step = trainer.arguments();
            retry_while_busy([&] { return dsopt_optimizer_step(opt, &step); });
            MemoryFile memory_file;
            retry_while_busy([&] {
                memory_file.data.clear();
                const dsopt_io io = memory_file.io();
                return dsopt_optimizer_save(opt, nullptr, &io);
            });
            const dsopt_io io = memory_file.io();
            retry_while_busy([&] { return dsopt_optimizer_load(opt, nullptr, &io); });
            int64_t entries = 0;
            retry_while_busy([&] { return dsopt_optimizer_state_count(opt, &entries); });
            retry_while_busy([&] { return dsopt_optimizer_export(opt, entries - 1, steps.data(), 16); });
            retry_while_busy([&] { return dsopt_optimizer_import(opt, entries - 1, steps.data(), 16); });
            retry_while_busy([&] { return dsopt_optimizer_reset(opt, DSOPT_RESET_MOMENTS, nullptr); });
            DSOPT_NEW(dsopt_report, report);
            retry_while_busy([&] { return dsopt_optimizer_report(opt, &report); });
        }
    });
    for (std::thread &thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(report_of(opt).calls, 1 + kRounds);
}

TEST_P(Apply, NeedsMoreWorkspaceOnlyWithMoreGroups) {
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

} // namespace apply_tests
