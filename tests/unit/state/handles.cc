// SPDX-License-Identifier: Apache-2.0
// Several handles of one optimizer, detaching a scaler from its optimizers, and the keys of bias correction and
// freeze_step with the 1-bit family.
#include "support/onebit.h"
#include <condition_variable>
#include <mutex>
#include <thread>

using namespace test;

namespace state_handles_tests {

Optimizer retain(dsopt_optimizer *opt) {
    dsopt_optimizer *other = nullptr;
    must(dsopt_optimizer_retain(opt, &other));
    return Optimizer(other);
}
Optimizer new_optimizer(const Context &ctx, const dsopt_optimizer_desc &desc) {
    dsopt_optimizer *opt = nullptr;
    must(dsopt_optimizer_create(ctx.get(), &desc, &opt));
    return Optimizer(opt);
}
dsopt_status step_with(dsopt_optimizer *opt, const std::vector<Array> &grads) {
    const std::vector<dsopt_tensor> list = list_of(grads);
    DSOPT_NEW(dsopt_step, step);
    step.grads = list.data();
    step.count = int64_t(list.size());
    return dsopt_optimizer_step(opt, &step);
}

// ------------------------------------------------------------------------------------------------------------- handles
/// An allocator that counts live allocations.
struct CountingAllocator {
    std::atomic<int> live{0};
    Context context() {
        DSOPT_NEW(dsopt_context_desc, desc);
        desc.user = this;
        desc.threads = 1;
        desc.allocate = [](void *user, size_t bytes, size_t alignment, void *) {
            ++static_cast<CountingAllocator *>(user)->live;
            return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
        };
        desc.release = [](void *user, void *memory, size_t, void *) {
            --static_cast<CountingAllocator *>(user)->live;
            std::free(memory);
        };
        dsopt_context *ctx = nullptr;
        must(dsopt_context_create(&desc, &ctx));
        return Context(ctx);
    }
};

TEST(Retain, KeepsTheOptimizerUntilTheLastHandle) {
    CountingAllocator allocator;
    for (const int last : {0, 1, 2}) {
        const Context ctx = allocator.context();
        Optimizer handles[3];
        handles[0] = new_optimizer(ctx, optimizer_desc());
        const Array weight(DSOPT_DTYPE_F32, 5, 1);
        dsopt_param param{};
        param.tensor = weight.tensor();
        const dsopt_group group = group_of(DSOPT_ALGORITHM_ADAMW);
        must(dsopt_optimizer_add_group(handles[0].get(), &group, &param, 1));
        handles[1] = retain(handles[0].get());
        handles[2] = retain(handles[1].get()); // from a handle that was retained itself
        const std::vector<Array> grads{Array(DSOPT_DTYPE_F32, 5, 1)};
        must(step_with(handles[0].get(), grads));
        const int live = allocator.live;
        EXPECT_GT(live, 0);
        for (const int other : {0, 1, 2})
            if (other != last) handles[other].reset();
        EXPECT_EQ(allocator.live, live);
        EXPECT_OK(step_with(handles[last].get(), grads));
        handles[last].reset();
        EXPECT_EQ(allocator.live, 0);
    }
}

TEST(Retain, ReturnsAHandleOfTheSameOptimizer) {
    const Context ctx = make_context(1);
    Trainer trainer(ctx, optimizer_desc(), group_of(DSOPT_ALGORITHM_ADAMW),
                    std::vector<Array>{Array(DSOPT_DTYPE_F32, 5, 1)});
    const Optimizer other = retain(trainer.opt());
    must(dsopt_optimizer_set(other.get(), 0, DSOPT_KEY_LR, 0.5));
    EXPECT_EQ(trainer.get(DSOPT_KEY_LR), 0.5);
    must(step_with(other.get(), {Array(DSOPT_DTYPE_F32, 5, 1)}));
    must(trainer.step({Array(DSOPT_DTYPE_F32, 5, 1)}));
    DSOPT_NEW(dsopt_report, report);
    must(dsopt_optimizer_report(other.get(), &report));
    EXPECT_EQ(report.calls, 2);
    EXPECT_EQ(trainer.report().calls, 2);
    EXPECT_EQ(trainer.state("step")[0], 2);
    const Array late(DSOPT_DTYPE_F32, 3, 1);
    dsopt_param param{};
    param.tensor = late.tensor();
    must(dsopt_optimizer_add_params(other.get(), &param, 1));
    int64_t params = 0;
    must(dsopt_optimizer_count(trainer.opt(), nullptr, &params));
    EXPECT_EQ(params, 2);
}

TEST(Retain, ReportsBusyAcrossHandles) {
    struct Gate {
        std::mutex mutex;
        std::condition_variable changed;
        bool inside = false, open = false;
        static void run(void *user, int64_t n, void (*body)(void *, int64_t), void *arg) {
            auto &gate = *static_cast<Gate *>(user);
            {
                std::unique_lock lock(gate.mutex);
                gate.inside = true;
                gate.changed.notify_all();
                gate.changed.wait(lock, [&] { return gate.open; });
            }
            for (int64_t i = 0; i < n; ++i) body(arg, i);
        }
    } gate;
    DSOPT_NEW(dsopt_context_desc, desc);
    desc.parallel_for = Gate::run;
    desc.user = &gate;
    desc.threads = 2;
    const Context ctx = make_context(desc);
    Trainer trainer(ctx, optimizer_desc(), group_of(DSOPT_ALGORITHM_ADAMW),
                    std::vector<Array>{Array(DSOPT_DTYPE_F32, 1 << 18, 1)});
    const Optimizer other = retain(trainer.opt());
    std::thread steps([&] { EXPECT_OK(trainer.step({Array(DSOPT_DTYPE_F32, 1 << 18, 1)})); });
    {
        std::unique_lock lock(gate.mutex);
        EXPECT_TRUE(gate.changed.wait_for(lock, std::chrono::seconds(60), [&] { return gate.inside; }));
    }
    double value = 0;
    EXPECT_TRUE(refused(dsopt_optimizer_set(other.get(), 0, DSOPT_KEY_LR, 0.5), DSOPT_ERR_BUSY));
    EXPECT_TRUE(refused(dsopt_optimizer_get(other.get(), 0, DSOPT_KEY_LR, &value), DSOPT_ERR_BUSY));
    EXPECT_TRUE(refused(step_with(other.get(), {Array(DSOPT_DTYPE_F32, 1 << 18, 1)}), DSOPT_ERR_BUSY));
    const Optimizer third = retain(other.get()); // allowed during every other call
    {
        const std::lock_guard lock(gate.mutex);
        gate.open = true;
        gate.changed.notify_all();
    }
    steps.join();
    EXPECT_OK(dsopt_optimizer_set(third.get(), 0, DSOPT_KEY_LR, 0.5));
}

TEST(Retain, WorksFromAnyThread) {
    const Context ctx = make_context(1);
    Trainer trainer(ctx, optimizer_desc(), group_of(DSOPT_ALGORITHM_ADAMW),
                    std::vector<Array>{Array(DSOPT_DTYPE_F32, 5, 1)});
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
        threads.emplace_back([&] {
            for (int i = 0; i < 200; ++i) {
                Optimizer handle = retain(trainer.opt());
                double value = 0;
                EXPECT_OK(dsopt_optimizer_get(handle.get(), 0, DSOPT_KEY_LR, &value));
                handle = retain(handle.get());
            }
        });
    for (std::thread &thread : threads) thread.join();
}

// ------------------------------------------------------------------------------------------------------------- scalers
class ScalerDetach : public testing::Test {
protected:
    dsopt_optimizer_desc desc_of(const Scaler &scaler) const {
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.scaler = scaler.get();
        return desc;
    }
    std::unique_ptr<Trainer> trainer_of(const Scaler &scaler) const {
        return std::make_unique<Trainer>(ctx, desc_of(scaler), group_of(DSOPT_ALGORITHM_ADAMW),
                                         std::vector<Array>{Array(DSOPT_DTYPE_F16, 5, 1)});
    }
    dsopt_status try_create(const Scaler &scaler) const {
        const dsopt_optimizer_desc desc = desc_of(scaler);
        dsopt_optimizer *opt = nullptr;
        const dsopt_status status = dsopt_optimizer_create(ctx.get(), &desc, &opt);
        dsopt_optimizer_destroy(opt);
        return status;
    }
    const Context ctx = make_context(1);
    const std::vector<Array> grads{Array(DSOPT_DTYPE_F16, 5, 1)};
    const std::vector<Array> bad{Array(DSOPT_DTYPE_F16, 5, kInf)};
};

TEST_F(ScalerDetach, AllowsANewOptimizerAndStopsTheOldOne) {
    const Scaler scaler = make_scaler(ctx, 64);
    auto detached = trainer_of(scaler);
    must(detached->step(grads));
    EXPECT_TRUE(refused(try_create(scaler), DSOPT_ERR_STATE, "dsopt_scaler_detach"));
    ASSERT_OK(dsopt_scaler_detach(scaler.get()));
    const auto attached = trainer_of(scaler);
    EXPECT_TRUE(refused(try_create(scaler), DSOPT_ERR_STATE)) << "the new optimizer uses the scaler";

    const Snapshot before = detached->snapshot();
    EXPECT_TRUE(refused(detached->step(bad), DSOPT_ERR_STATE, "detached"));
    EXPECT_EQ(info_of(scaler).scale, 64);
    const std::vector<dsopt_tensor> params = list_of(detached->weights()), list = list_of(grads);
    std::vector<dsopt_tensor> state;
    for (const dsopt_state_info &info : detached->state()) state.push_back(info.tensor);
    size_t bytes = 0;
    must(dsopt_optimizer_workspace(detached->opt(), &bytes));
    std::vector<char> workspace(bytes);
    DSOPT_NEW(dsopt_step, step);
    step.grads = list.data();
    step.params = params.data();
    step.count = 1;
    step.state = state.data();
    step.state_count = int64_t(state.size());
    step.workspace = workspace.data();
    step.workspace_bytes = bytes;
    EXPECT_TRUE(refused(dsopt_optimizer_apply(detached->opt(), &step), DSOPT_ERR_STATE, "detached"));
    EXPECT_TRUE(same(before, detached->snapshot()));

    must(attached->step(bad));
    EXPECT_EQ(info_of(scaler).scale, 32);
    detached.reset(); // does not detach the new optimizer
    EXPECT_TRUE(refused(try_create(scaler), DSOPT_ERR_STATE));
    EXPECT_OK(attached->step(grads));
    EXPECT_EQ(info_of(scaler).updates, 3);
}

TEST_F(ScalerDetach, AcceptsAScalerWithoutOptimizers) {
    const Scaler scaler = make_scaler(ctx, 64);
    for (int i = 0; i < 2; ++i) ASSERT_OK(dsopt_scaler_detach(scaler.get()));
    EXPECT_OK(try_create(scaler));
    EXPECT_OK(try_create(scaler)) << "the first optimizer is destroyed";
}

TEST_F(ScalerDetach, DetachesAllOptimizersOfASharedScaler) {
    const Scaler scaler = make_scaler(ctx, 64, 1000, DSOPT_SCALER_SHARED);
    auto a = trainer_of(scaler), b = trainer_of(scaler);
    must(a->step(grads));
    ASSERT_OK(dsopt_scaler_detach(scaler.get()));
    const auto c = trainer_of(scaler);
    EXPECT_TRUE(refused(a->step(bad), DSOPT_ERR_STATE));
    EXPECT_TRUE(refused(b->step(bad), DSOPT_ERR_STATE));
    must(dsopt_scaler_update(scaler.get(), nullptr, nullptr));
    EXPECT_EQ(info_of(scaler).scale, 64) << "refused steps must not record an overflow";
    a.reset();
    b.reset();
    EXPECT_OK(c->step(grads));
    EXPECT_OK(try_create(scaler)) << "the scaler is shared";
}

TEST_F(ScalerDetach, IsNotCausedByDestroyingTheHandle) {
    Scaler scaler = make_scaler(ctx, 64);
    const auto trainer = trainer_of(scaler);
    const float *const scale = dsopt_scaler_device_scale(scaler.get());
    scaler.reset();
    must(trainer->step(bad));
    EXPECT_EQ(on_host(scale), 32);
}

// -------------------------------------------------------------------------------------------------------- 1-bit family
TEST(OneBitBiasCorrection, IsOffWithAndWithoutTheFlag) {
    for (const int32_t algorithm : kFamily) {
        const dsopt_group plain = group_for(algorithm, 2);
        EXPECT_EQ(plain.flags, 0);
        dsopt_group flagged = plain;
        flagged.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
        with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
            const Problem problem = problem_of(2);
            Trainer a = trainer_of(ctx, comm, plain, problem.weights()),
                    b = trainer_of(ctx, comm, flagged, problem.weights());
            for (int64_t call = 1; call <= 5; ++call) {
                const std::vector<Array> grads = problem.gradients_for(reduction(a, call), rank, call);
                must(a.step(grads));
                must(b.step(grads));
                ASSERT_TRUE(same(a.snapshot(), b.snapshot())) << name_of(algorithm) << " call " << call;
            }
            EXPECT_EQ(a.get(DSOPT_KEY_BIAS_CORRECTION), 0);
            EXPECT_EQ(b.get(DSOPT_KEY_BIAS_CORRECTION), 0);
        });
        const Context ctx = make_context(1);
        for (const dsopt_group &group : {plain, flagged}) {
            Trainer trainer(ctx, optimizer_desc(), group, std::vector<Array>{Array(DSOPT_DTYPE_F32, 4, 1)});
            for (const int32_t index : {0, int32_t(DSOPT_ALL_GROUPS)}) {
                EXPECT_TRUE(refused(dsopt_optimizer_set(trainer.opt(), index, DSOPT_KEY_BIAS_CORRECTION, 1),
                                    DSOPT_ERR_UNSUPPORTED, "bias correction"));
                EXPECT_OK(dsopt_optimizer_set(trainer.opt(), index, DSOPT_KEY_BIAS_CORRECTION, 0));
            }
            EXPECT_EQ(trainer.get(DSOPT_KEY_BIAS_CORRECTION), 0);
        }
    }
}

TEST(FreezeStepKey, IsRefusedOutsideTheOneBitFamily) {
    const Context ctx = make_context(1);
    Trainer plain(ctx, optimizer_desc(), group_of(DSOPT_ALGORITHM_ADAMW),
                  std::vector<Array>{Array(DSOPT_DTYPE_F32, 4, 1)});
    for (const int32_t index : {0, int32_t(DSOPT_ALL_GROUPS)})
        EXPECT_TRUE(refused(dsopt_optimizer_set(plain.opt(), index, DSOPT_KEY_FREEZE_STEP, 5), DSOPT_ERR_UNSUPPORTED,
                            "has no freeze_step"));
    must(plain.add_group(group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 7), {{Array(DSOPT_DTYPE_F32, 4, 1), "b"}}));
    EXPECT_TRUE(refused(dsopt_optimizer_set(plain.opt(), 0, DSOPT_KEY_FREEZE_STEP, 5), DSOPT_ERR_UNSUPPORTED,
                        "has no freeze_step"));
    EXPECT_TRUE(
        refused(dsopt_optimizer_set(plain.opt(), 1, DSOPT_KEY_FREEZE_STEP, 5), DSOPT_ERR_ARGUMENT, "DSOPT_ALL_GROUPS"));
    EXPECT_OK(dsopt_optimizer_set(plain.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_FREEZE_STEP, 5));
    double value = 0;
    must(dsopt_optimizer_get(plain.opt(), 1, DSOPT_KEY_FREEZE_STEP, &value));
    EXPECT_EQ(value, 5);
    EXPECT_TRUE(refused(dsopt_optimizer_get(plain.opt(), 0, DSOPT_KEY_FREEZE_STEP, &value), DSOPT_ERR_UNSUPPORTED));
    EXPECT_EQ(value, 5);
}

TEST(StateCount, AllowsConcurrentReadersAfterAddGroup) {
    const Context ctx = make_context();
    const Optimizer opt = new_optimizer(ctx, optimizer_desc());
    const dsopt_group group = group_of(DSOPT_ALGORITHM_ONEBIT_LAMB);
    for (int64_t round = 1; round <= 20; ++round) {
        const dsopt_param param = param_of({nullptr, 5, DSOPT_DTYPE_F32, 0});
        must(dsopt_optimizer_add_group(opt.get(), &group, &param, 1));
        std::vector<std::thread> readers;
        for (int i = 0; i < 4; ++i)
            readers.emplace_back([&] {
                int64_t count = 0;
                EXPECT_OK(dsopt_optimizer_state_count(opt.get(), &count));
                EXPECT_EQ(count, 3 * round + 6);
            });
        for (std::thread &reader : readers) reader.join();
    }
}

} // namespace state_handles_tests
