// SPDX-License-Identifier: Apache-2.0
// Concurrent calls, lifetime of handles, fork, the log hook, and texts of statuses and of the build.
#include "support/caller_memory.h"
#include "support/fork.h"
#include "support/harness.h"
#include <array>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>

using namespace test;

namespace threads_tests {

/// A parallel_for that blocks inside a step until release().
struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool inside = false, open = false;
    static void run(void *user, int64_t n, Body body, void *arg) {
        auto *self = static_cast<Gate *>(user);
        std::unique_lock lock(self->mutex);
        self->inside = true;
        self->changed.notify_all();
        self->changed.wait(lock, [&] { return self->open; });
        lock.unlock();
        run_in_order(nullptr, n, body, arg);
    }
    void wait_until_inside() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return inside; });
    }
    void release() {
        const std::lock_guard lock(mutex);
        open = true;
        changed.notify_all();
    }
};

using Results = std::vector<std::pair<std::string, dsopt_status>>;

/// Makes every call that needs exclusive access to the optimizer.
Results exclusive_calls(dsopt_optimizer *opt, const dsopt_step &step) {
    Results results;
    std::vector<float> values(40000);
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAM);
    int32_t reduction = 0;
    DSOPT_NEW(dsopt_report, report);
    DSOPT_NEW(dsopt_io, io);
    io.write = [](void *, const void *, size_t) { return 0; };
    io.read = [](void *, uint64_t, void *, size_t) { return 0; };
    results.emplace_back("step", dsopt_optimizer_step(opt, &step));
    results.emplace_back("add_group", dsopt_optimizer_add_group(opt, &group, nullptr, 0));
    results.emplace_back("set", dsopt_optimizer_set(opt, 0, DSOPT_KEY_LR, 5));
    results.emplace_back("export", dsopt_optimizer_export(opt, 0, values.data(), 160000));
    results.emplace_back("import", dsopt_optimizer_import(opt, 0, values.data(), 160000));
    results.emplace_back("bind", dsopt_optimizer_bind(opt, DSOPT_BIND_PARAMS, nullptr, 0));
    results.emplace_back("reset", dsopt_optimizer_reset(opt, DSOPT_RESET_COUNTERS, nullptr));
    results.emplace_back("accumulate", dsopt_optimizer_accumulate(opt, nullptr, 0, nullptr));
    results.emplace_back("next_reduction(0)", dsopt_optimizer_next_reduction(opt, 0, &reduction));
    results.emplace_back("report", dsopt_optimizer_report(opt, &report));
    results.emplace_back("save", dsopt_optimizer_save(opt, nullptr, &io));
    results.emplace_back("load", dsopt_optimizer_load(opt, nullptr, &io));
    return results;
}

/// Makes every call that several threads may make concurrently. The arguments of `apply` are invalid, which only a call
/// that is not refused as busy detects.
Results shared_calls(dsopt_optimizer *opt) {
    Results results;
    int64_t groups = -7, params = -7, count = -7;
    double value = -7;
    size_t bytes = 77;
    int32_t reduction = -7;
    DSOPT_NEW(dsopt_state_info, info);
    DSOPT_NEW(dsopt_step, step);
    step.count = -1;
    results.emplace_back("count", dsopt_optimizer_count(opt, &groups, &params));
    results.emplace_back("get", dsopt_optimizer_get(opt, 0, DSOPT_KEY_LR, &value));
    results.emplace_back("state_count", dsopt_optimizer_state_count(opt, &count));
    results.emplace_back("state", dsopt_optimizer_state(opt, 0, &info));
    results.emplace_back("workspace", dsopt_optimizer_workspace(opt, &bytes));
    results.emplace_back("next_reduction(5)", dsopt_optimizer_next_reduction(opt, 5, &reduction));
    const dsopt_status applied = dsopt_optimizer_apply(opt, &step);
    results.emplace_back("apply", applied == DSOPT_ERR_SHAPE ? DSOPT_OK : applied);
    const bool all = groups != -7 && params != -7 && value != -7 && count != -7 && bytes != 77 && reduction != -7;
    const bool none = groups == -7 && params == -7 && value == -7 && count == -7 && bytes == 77 && reduction == -7;
    EXPECT_TRUE(results[0].second == DSOPT_OK ? all : none) << "outputs that were written";
    return results;
}

TEST(ConcurrentCalls, ReturnBusyDuringStep) {
    const Trainer trainer(shapes_of({40000}), make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(), context_desc(2)),
        plain(shapes_of({40000}), make_group(DSOPT_ALGORITHM_ADAMW));
    Gate gate;
    dsopt_step step = trainer.arguments(), other = step;
    step.parallel_for = Gate::run;
    step.parallel_user = &gate;
    dsopt_status first = DSOPT_ERR_INTERNAL;
    std::thread thread([&] { first = trainer.step(step); });
    gate.wait_until_inside();
    for (const Results &results : {exclusive_calls(trainer.opt(), other), shared_calls(trainer.opt())})
        for (const auto &[name, status] : results) EXPECT_EQ(status, DSOPT_ERR_BUSY) << name;
    EXPECT_NE(std::strstr(dsopt_last_error(), "another thread"), nullptr);
    gate.release();
    thread.join();
    EXPECT_EQ(first, DSOPT_OK);
    for (const auto &[name, status] : shared_calls(trainer.opt())) EXPECT_OK(status) << name;
    must(plain.step(plain.arguments()));
    EXPECT_TRUE(same(trainer.text(), plain.text()));
    EXPECT_EQ(get(trainer.opt(), 0, DSOPT_KEY_LR), 1e-3);
}

TEST(ConcurrentCalls, AllowReadersButNotWritersDuringApply) {
    const Trainer trainer(shapes_of({40000}), make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(), context_desc(2));
    trainer.train(1);
    const std::string before = trainer.text();
    const CallerMemory first_state(trainer.opt(), shapes_of({40000})), second_state(trainer.opt(), shapes_of({40000}));
    Gate gate;
    dsopt_step step = first_state.arguments();
    step.parallel_for = Gate::run;
    step.parallel_user = &gate;
    dsopt_status first = DSOPT_ERR_INTERNAL;
    std::thread thread([&] { first = dsopt_optimizer_apply(trainer.opt(), &step); });
    gate.wait_until_inside();
    for (const auto &[name, status] : exclusive_calls(trainer.opt(), trainer.arguments()))
        EXPECT_EQ(status, DSOPT_ERR_BUSY) << name;
    for (const auto &[name, status] : shared_calls(trainer.opt())) EXPECT_OK(status) << name;
    const dsopt_step second = second_state.arguments();
    EXPECT_OK(dsopt_optimizer_apply(trainer.opt(), &second));
    gate.release();
    thread.join();
    EXPECT_EQ(first, DSOPT_OK);
    EXPECT_TRUE(same(trainer.text(), before));
    EXPECT_TRUE(same(first_state.text(), second_state.text()));
    trainer.train(2); // the optimizer is not busy any more
}

TEST(ConcurrentCalls, ReturnBusyFromCallbacksOfStepAndSave) {
    const Trainer trainer(shapes_of({40000}), make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(), context_desc(2));
    struct Inside {
        const Trainer *trainer;
        Results results;
    } inside{&trainer, {}};
    dsopt_step step = trainer.arguments();
    step.parallel_user = &inside;
    step.parallel_for = [](void *user, int64_t n, Body body, void *arg) {
        auto *self = static_cast<Inside *>(user);
        self->results = exclusive_calls(self->trainer->opt(), self->trainer->arguments());
        for (const auto &result : shared_calls(self->trainer->opt())) self->results.push_back(result);
        run_in_order(nullptr, n, body, arg);
    };
    ASSERT_OK(trainer.step(step));
    EXPECT_EQ(inside.results.size(), 19u);
    for (const auto &[name, status] : inside.results) EXPECT_EQ(status, DSOPT_ERR_BUSY) << name;
    inside.results.clear();
    DSOPT_NEW(dsopt_io, io);
    io.user = &inside;
    io.write = [](void *user, const void *, size_t) {
        auto *self = static_cast<Inside *>(user);
        self->results.emplace_back("step", self->trainer->step(self->trainer->arguments()));
        return 0;
    };
    ASSERT_OK(dsopt_optimizer_save(trainer.opt(), nullptr, &io));
    EXPECT_FALSE(inside.results.empty());
    for (const auto &[name, status] : inside.results) EXPECT_EQ(status, DSOPT_ERR_BUSY);
}

TEST(ConcurrentCalls, MakeEachStepCompletelyOrNotAtAll) {
    const Trainer trainer(shapes_of({3000, 5}), make_group(DSOPT_ALGORITHM_LAMB), optimizer_desc(1.0)),
        plain(shapes_of({3000, 5}), make_group(DSOPT_ALGORITHM_LAMB), optimizer_desc(1.0));
    std::atomic<int> failures{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
        threads.emplace_back([&] {
            const dsopt_step step = trainer.arguments();
            for (int successes = 0; successes < 50;) {
                const dsopt_status status = trainer.step(step);
                successes += status == DSOPT_OK;
                if (status == DSOPT_OK) continue;
                failures += status != DSOPT_ERR_BUSY || std::string(dsopt_last_error()).empty();
                if (failures) return;
                std::this_thread::yield(); // the thread of the running step may be waiting for a core
            }
        });
    for (std::thread &thread : threads) thread.join();
    ASSERT_EQ(failures, 0);
    const int64_t taken = 200;
    EXPECT_EQ(report_of(trainer.opt()).calls, taken);
    for (int64_t i = 0; i < taken; ++i) must(plain.step(plain.arguments()));
    EXPECT_TRUE(same(trainer.text(), plain.text()));
}

TEST(ConcurrentOptimizers, ShareOneContext) {
    const Context context = make_context(context_desc(2));
    const Trainer plain(shapes_of({20000, 7}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16), make_group(DSOPT_ALGORITHM_LAMB),
                        optimizer_desc(0.5));
    plain.train(1, 5);
    std::vector<std::string> texts(4);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
        threads.emplace_back([&, i] {
            const Model model(shapes_of({20000, 7}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16));
            const Optimizer opt = make_optimizer(context, optimizer_desc(0.5));
            const dsopt_group group = make_group(DSOPT_ALGORITHM_LAMB);
            const auto list = model.registered();
            must(dsopt_optimizer_add_group(opt.get(), &group, list.data(), 2));
            std::vector<dsopt_tensor> grads = list_of(model.grads);
            for (uint64_t t = 1; t <= 5; ++t) {
                model.make_gradients(t);
                DSOPT_NEW(dsopt_step, step);
                step.grads = grads.data();
                step.count = 2;
                must(dsopt_optimizer_step(opt.get(), &step));
            }
            must(dsopt_zero_grad(context.get(), grads.data(), 2, DSOPT_ZERO_FILL, nullptr));
            texts[size_t(i)] = model.text() + state_text(opt.get());
        });
    for (std::thread &thread : threads) thread.join();
    for (const std::string &text : texts) EXPECT_TRUE(same(text, plain.text()));
}

TEST(ConcurrentOptimizers, AreCreatedAndDestroyed) {
    std::atomic<int> failed{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
        threads.emplace_back([&] {
            for (int k = 0; k < 50; ++k) {
                dsopt_context *context = nullptr;
                dsopt_optimizer *opt = nullptr;
                failed += dsopt_context_create(nullptr, &context) != DSOPT_OK;
                failed += dsopt_optimizer_create(context, nullptr, &opt) != DSOPT_OK;
                failed += dsopt_build_info() == nullptr;
                dsopt_context_destroy(context);
                dsopt_optimizer_destroy(opt);
            }
        });
    for (std::thread &thread : threads) thread.join();
    EXPECT_EQ(failed, 0);
}

TEST(LastError, IsPerThread) {
    EXPECT_NE(dsopt_optimizer_count(nullptr, nullptr, nullptr), DSOPT_OK);
    const std::string text = dsopt_last_error();
    EXPECT_NE(text, "");
    std::string before, after;
    std::thread([&] {
        before = dsopt_last_error();
        dsopt_group group{};
        (void)(dsopt_group_init(&group, sizeof group, 1234) == DSOPT_OK);
        after = dsopt_last_error();
    }).join();
    EXPECT_EQ(before, "");
    EXPECT_NE(after.find("1234"), std::string::npos);
    EXPECT_EQ(dsopt_last_error(), text);
    const Context context = make_context(); // a successful call does not change the last error
    EXPECT_EQ(dsopt_last_error(), text);
}

// ------------------------------------------------------------------------------------------------------------- handles
TEST(Handles, OptimizerOutlivesHandleOfContext) {
    struct Hooks {
        int allocated = 0, released = 0;
    } hooks;
    dsopt_context_desc desc = context_desc();
    desc.user = &hooks;
    desc.allocate = [](void *user, size_t bytes, size_t alignment, void *) {
        ++static_cast<Hooks *>(user)->allocated;
        return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    desc.release = [](void *user, void *memory, size_t, void *) {
        ++static_cast<Hooks *>(user)->released;
        std::free(memory);
    };
    Trainer trainer(shapes_of({100, 200}, DSOPT_DTYPE_BF16), optimizer_desc(1.0), desc);
    trainer.add(make_group(DSOPT_ALGORITHM_ADAMW), 1);
    trainer.own_context.reset();
    trainer.train(1);
    trainer.add(make_group(DSOPT_ALGORITHM_LAMB), 1);
    trainer.train(2, 3);
    EXPECT_EQ(report_of(trainer.opt()).calls, 3);
    DSOPT_NEW(dsopt_io, io);
    io.write = [](void *, const void *, size_t) { return 0; };
    EXPECT_OK(dsopt_optimizer_save(trainer.opt(), nullptr, &io));
    EXPECT_GT(hooks.allocated, 0);
    EXPECT_LT(hooks.released, hooks.allocated);
    trainer.drop();
    EXPECT_EQ(hooks.released, hooks.allocated);
}

TEST(Handles, CanBeDestroyedInAnyOrder) {
    for (int order = 0; order < 6; ++order) {
        const Model model(shapes_of({10, 20}));
        Context context = make_context();
        Optimizer a = make_optimizer(context), b = make_optimizer(context);
        const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAM);
        const auto list = model.registered();
        must(dsopt_optimizer_add_group(a.get(), &group, list.data(), 1));
        must(dsopt_optimizer_add_group(b.get(), &group, list.data() + 1, 1));
        (void)state_text(a.get());
        const std::function<void()> ends[] = {[&] { context.reset(); }, [&] { a.reset(); }, [&] { b.reset(); }};
        const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
        for (const int i : orders[order]) ends[i]();
    }
}

// ---------------------------------------------------------------------------------------------------------------- fork
TEST(Fork, ChildCanOnlyDestroyOptimizersAndContexts) {
    Trainer trainer(shapes_of({100}, DSOPT_DTYPE_BF16), make_group(DSOPT_ALGORITHM_ADAMW));
    trainer.train(1);
    const std::string before = trainer.text();
    EXPECT_TRUE(passes_in_child([&](const auto &expect) {
        dsopt_optimizer *const opt = trainer.opt();
        dsopt_context *const ctx = trainer.own_context.get();
        for (const auto &[name, status] : exclusive_calls(opt, trainer.arguments())) expect(status == DSOPT_ERR_FORKED);
        int64_t count = -7;
        double value = -7;
        size_t bytes = 77;
        int32_t reduction = -7;
        DSOPT_NEW(dsopt_state_info, info);
        const dsopt_step step = trainer.arguments();
        dsopt_optimizer *made = nullptr;
        expect(dsopt_optimizer_count(opt, &count, nullptr) == DSOPT_ERR_FORKED && count == -7);
        expect(dsopt_optimizer_get(opt, 0, DSOPT_KEY_LR, &value) == DSOPT_ERR_FORKED && value == -7);
        expect(dsopt_optimizer_state_count(opt, &count) == DSOPT_ERR_FORKED);
        expect(dsopt_optimizer_state(opt, 0, &info) == DSOPT_ERR_FORKED);
        expect(dsopt_optimizer_workspace(opt, &bytes) == DSOPT_ERR_FORKED && bytes == 77);
        expect(dsopt_optimizer_apply(opt, &step) == DSOPT_ERR_FORKED);
        for (const int64_t call : {0, 1})
            expect(dsopt_optimizer_next_reduction(opt, call, &reduction) == DSOPT_ERR_FORKED);
        expect(dsopt_optimizer_create(ctx, nullptr, &made) == DSOPT_ERR_FORKED && made == nullptr);
        expect(std::strstr(dsopt_last_error(), "fork") != nullptr);
        // Functions on lists of tensors.
        dsopt_norm_result result;
        for (const int32_t how : {DSOPT_ZERO_FILL, DSOPT_ZERO_NONE})
            expect(dsopt_zero_grad(ctx, nullptr, 0, how, nullptr) == DSOPT_ERR_FORKED);
        expect(dsopt_tensors_norm(ctx, nullptr, 0, DSOPT_NORM_L2, 0, nullptr, &result, nullptr) == DSOPT_ERR_FORKED);
        expect(dsopt_tensors_axpby(ctx, nullptr, nullptr, 1, nullptr, 0, nullptr) == DSOPT_ERR_FORKED);
        expect(dsopt_tensors_clamp(ctx, nullptr, 0, 1, nullptr) == DSOPT_ERR_FORKED);
        // Handles that the child creates work.
        {
            const Trainer created(shapes_of({100}, DSOPT_DTYPE_BF16), make_group(DSOPT_ALGORITHM_ADAMW));
            created.train(1);
            expect(created.text() == before);
        }
        trainer.drop();
        trainer.own_context.reset();
    }));
    EXPECT_TRUE(same(trainer.text(), before)); // the parent can still step
    trainer.train(2);
}

TEST(Fork, ChildCanOnlyDestroyCommsAndScalers) {
    const Context context = make_context();
    dsopt_comm *comm = nullptr;
    dsopt_scaler *scaler = nullptr;
    ASSERT_OK(dsopt_comm_create(context.get(), nullptr, &comm));
    ASSERT_OK(dsopt_scaler_create(context.get(), nullptr, &scaler));
    EXPECT_TRUE(passes_in_child([&](const auto &expect) {
        const Context fresh = make_context();
        dsopt_comm *other_comm = nullptr;
        dsopt_scaler *other_scaler = nullptr;
        expect(dsopt_comm_create(context.get(), nullptr, &other_comm) == DSOPT_ERR_FORKED);
        expect(dsopt_scaler_create(context.get(), nullptr, &other_scaler) == DSOPT_ERR_FORKED);
        DSOPT_NEW(dsopt_context_info, about);
        expect(dsopt_context_query(context.get(), &about) == DSOPT_ERR_FORKED);
        DSOPT_NEW(dsopt_comm_info, info);
        dsopt_norm_result result;
        expect(dsopt_comm_query(comm, &info) == DSOPT_ERR_FORKED);
        expect(dsopt_tensors_norm(fresh.get(), nullptr, 0, DSOPT_NORM_L2, 0, comm, &result, nullptr) ==
               DSOPT_ERR_FORKED);
        float value = 1;
        dsopt_tensor tensor{&value, 1, DSOPT_DTYPE_F32, 0};
        DSOPT_NEW(dsopt_compressed, compressed);
        compressed.tensors = &tensor;
        compressed.count = 1;
        for (dsopt_comm *const node : {comm, static_cast<dsopt_comm *>(nullptr)}) {
            compressed.node = node;
            expect(dsopt_compressed_sizes(comm, &compressed, nullptr, nullptr, nullptr) == DSOPT_ERR_FORKED);
            expect(dsopt_compressed_allreduce(comm, &compressed) == DSOPT_ERR_FORKED);
            expect(dsopt_compressed_errors(comm, &compressed, nullptr, nullptr) == DSOPT_ERR_FORKED);
        }
        DSOPT_NEW(dsopt_scaler_info, scale);
        expect(dsopt_scaler_query(scaler, &scale) == DSOPT_ERR_FORKED);
        expect(dsopt_scaler_set(scaler, DSOPT_SCALE_VALUE, 2, nullptr) == DSOPT_ERR_FORKED);
        expect(dsopt_scaler_update(scaler, nullptr, nullptr) == DSOPT_ERR_FORKED);
        expect(dsopt_scaler_scale_loss(scaler, &tensor, nullptr) == DSOPT_ERR_FORKED && value == 1);
        // The child cannot use them with its own handles either.
        for (int member = 0; member < 5; ++member) {
            DSOPT_NEW(dsopt_optimizer_desc, desc);
            if (member == 0) desc.scaler = scaler;
            if (member == 1) desc.data = comm;
            if (member == 2) desc.model = comm;
            if (member == 3) desc.node = comm;
            if (member == 4) desc.experts = &comm, desc.expert_count = 1;
            dsopt_optimizer *made = nullptr;
            expect(dsopt_optimizer_create(fresh.get(), &desc, &made) == DSOPT_ERR_FORKED && made == nullptr);
        }
        dsopt_comm_abort(comm);
        dsopt_comm_destroy(comm);
        dsopt_scaler_destroy(scaler);
    }));
    dsopt_comm_destroy(comm);
    dsopt_scaler_destroy(scaler);
}

TEST(Fork, ChildDoesNotAbortCommOfParent) {
    const Context context = make_context();
    int aborts = 0, ends = 0; // per process
    struct Counts {
        int *aborts, *ends;
    } counts{&aborts, &ends};
    DSOPT_NEW(dsopt_comm_table, table);
    table.self = &counts;
    table.ranks = 1;
    table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 0; };
    table.abort = [](void *self) { ++*static_cast<Counts *>(self)->aborts; };
    table.destroy = [](void *self) { ++*static_cast<Counts *>(self)->ends; };
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = DSOPT_COMM_KIND_TABLE;
    desc.table = &table;
    dsopt_comm *comm = nullptr;
    ASSERT_OK(dsopt_comm_create(context.get(), &desc, &comm));
    EXPECT_TRUE(passes_in_child([&](const auto &expect) {
        dsopt_comm_abort(comm); // an abort could affect the other ranks
        expect(aborts == 0);
        dsopt_comm_destroy(comm);
        expect(ends == 1);
    }));
    dsopt_comm_abort(comm);
    EXPECT_EQ(aborts, 1);
    dsopt_comm_destroy(comm);
}

TEST(Fork, ChildStepsAfterParentUsedThreads) {
    const auto train = [] {
        const Trainer trainer(shapes_of({400000}), make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(0.5),
                              context_desc(4));
        trainer.train(1, 2);
        must(dsopt_zero_grad(trainer.own_context.get(), const_cast<dsopt_tensor *>(trainer.grads.data()), 1,
                             DSOPT_ZERO_FILL, nullptr));
        return trainer.text();
    };
    const std::string expected = train();
    EXPECT_TRUE(passes_in_child([&](const auto &expect) {
        expect(train() == expected);
        const Context made_in_child = make_context();
        expect(bool(passes_in_child([&](const auto &expect) {
            expect(dsopt_zero_grad(made_in_child.get(), nullptr, 0, DSOPT_ZERO_FILL, nullptr) == DSOPT_ERR_FORKED);
            expect(train() == expected);
        })));
    }));
    EXPECT_EQ(train(), expected);
}

TEST(Fork, ChildDoesNotWaitForStepInParent) {
    Trainer trainer(shapes_of({400000}), make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(), context_desc(2));
    Gate gate;
    dsopt_step step = trainer.arguments();
    step.parallel_for = Gate::run;
    step.parallel_user = &gate;
    dsopt_status first = DSOPT_ERR_INTERNAL;
    std::thread thread([&] { first = trainer.step(step); });
    gate.wait_until_inside();
    EXPECT_TRUE(passes_in_child([&](const auto &expect) {
        for (const auto &[name, status] : exclusive_calls(trainer.opt(), trainer.arguments()))
            expect(status == DSOPT_ERR_FORKED);
        trainer.drop();
        trainer.own_context.reset();
        // One thread only: under the thread sanitizer, no threads can start in this child.
        const Trainer created(shapes_of({400000}), make_group(DSOPT_ALGORITHM_ADAMW));
        created.train(1);
    }));
    gate.release();
    thread.join();
    EXPECT_EQ(first, DSOPT_OK);
}

TEST(Fork, ChildDestroysCommOfWaitingRank) {
    std::array<char, 16> id{};
    size_t bytes = id.size();
    ASSERT_OK(dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, id.data(), &bytes));
    const Context context = make_context();
    dsopt_comm *comms[2] = {};
    std::unique_ptr<Trainer> trainers[2];
    const auto make = [&](int rank) {
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = DSOPT_COMM_KIND_LOCAL;
        desc.rank = rank;
        desc.ranks = 2;
        desc.timeout_ms = -1;
        desc.id = id.data();
        desc.id_bytes = id.size();
        must(dsopt_comm_create(context.get(), &desc, &comms[rank]));
        dsopt_optimizer_desc desc_with_comm = optimizer_desc(1);
        desc_with_comm.data = comms[rank];
        trainers[rank] = std::make_unique<Trainer>(shapes_of({100}), make_group(DSOPT_ALGORITHM_ADAMW), desc_with_comm);
    };
    std::atomic<bool> made{false};
    dsopt_status status = DSOPT_ERR_INTERNAL;
    std::thread other([&] {
        make(1);
        made = true;
        status = trainers[1]->step(trainers[1]->arguments());
    });
    make(0);
    while (!made) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(200)); // by then the rank is probably waiting
    EXPECT_TRUE(passes_in_child([&](const auto &) {
        for (dsopt_comm *comm : comms) {
            dsopt_comm_abort(comm);
            dsopt_comm_destroy(comm);
        }
        for (auto &trainer : trainers) trainer.reset();
    }));
    EXPECT_OK(trainers[0]->step(trainers[0]->arguments()));
    other.join();
    EXPECT_EQ(status, DSOPT_OK);
    for (dsopt_comm *comm : comms) dsopt_comm_destroy(comm);
}

// ----------------------------------------------------------------------------------------------------------------- log
struct Log {
    std::vector<std::pair<int32_t, std::string>> lines;
    dsopt_context_desc desc(int32_t level) {
        dsopt_context_desc desc = context_desc();
        desc.log_level = level;
        desc.user = this;
        desc.log = [](void *user, int32_t level, const char *text) {
            static_cast<Log *>(user)->lines.emplace_back(level, text);
        };
        return desc;
    }
};

TEST(LogHook, ReceivesMessagesUpToLevel) {
    for (const int32_t level : {DSOPT_LOG_ERROR, DSOPT_LOG_WARN, DSOPT_LOG_INFO, DSOPT_LOG_TRACE}) {
        Log log;
        const Context context = make_context(log.desc(level));
        EXPECT_EQ(log.lines.empty(), level < DSOPT_LOG_INFO);
        for (const auto &[line_level, text] : log.lines) {
            EXPECT_LE(line_level, level);
            EXPECT_FALSE(text.empty());
        }
    }
}

TEST(LogHook, UsesEnvironmentAtLevelZero) {
    for (const auto &[value, lines] : {std::pair{"info", true},
                                       {"trace", true},
                                       {"warn", false},
                                       {"error", false},
                                       {"nonsense", false},
                                       {"", false}}) {
        setenv("DSOPT_LOG", value, 1);
        Log log;
        const Context context = make_context(log.desc(0));
        EXPECT_EQ(!log.lines.empty(), lines) << value;
    }
    unsetenv("DSOPT_LOG");
    Log log;
    const Context context = make_context(log.desc(0));
    EXPECT_TRUE(log.lines.empty());
}

TEST(LogHook, ReportsInstructionSet) {
    for (const char *isa : {"generic", "no such thing"}) {
        setenv("DSOPT_ISA", isa, 1);
        Log log;
        const Context context = make_context(log.desc(DSOPT_LOG_INFO));
        ASSERT_FALSE(log.lines.empty());
        EXPECT_NE(log.lines[0].second.find("generic"), std::string::npos) << log.lines[0].second;
    }
    unsetenv("DSOPT_ISA");
}

TEST(LogHook, ReportsRequestedInstructionSetIfSupported) {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool has[] = {true, avx2, avx512, avx512 && __builtin_cpu_supports("avx512bf16")};
#else
    const bool has[] = {true, false, false, false};
#endif
    std::string wanted;
    for (size_t i = 0; i < std::size(kAllIsas); ++i) {
        if (has[i]) wanted = kAllIsas[i];
        const Isa isa(kAllIsas[i]);
        Log log;
        const Context context = make_context(log.desc(DSOPT_LOG_INFO));
        ASSERT_FALSE(log.lines.empty());
        const std::string &line = log.lines[0].second;
        EXPECT_NE(line.find(" backend, " + wanted + ", "), std::string::npos) << line << ", " << kAllIsas[i];
    }
}

// --------------------------------------------------------------------------------------------------------------- texts
TEST(StatusName, ExistsForEveryStatus) {
    const std::pair<dsopt_status, const char *> names[] = {{DSOPT_OK, "DSOPT_OK"},
                                                           {DSOPT_ERR_ARGUMENT, "DSOPT_ERR_ARGUMENT"},
                                                           {DSOPT_ERR_SHAPE, "DSOPT_ERR_SHAPE"},
                                                           {DSOPT_ERR_DTYPE, "DSOPT_ERR_DTYPE"},
                                                           {DSOPT_ERR_ALIGNMENT, "DSOPT_ERR_ALIGNMENT"},
                                                           {DSOPT_ERR_OVERLAP, "DSOPT_ERR_OVERLAP"},
                                                           {DSOPT_ERR_DEVICE, "DSOPT_ERR_DEVICE"},
                                                           {DSOPT_ERR_WORKSPACE, "DSOPT_ERR_WORKSPACE"},
                                                           {DSOPT_ERR_VERSION, "DSOPT_ERR_VERSION"},
                                                           {DSOPT_ERR_UNSUPPORTED, "DSOPT_ERR_UNSUPPORTED"},
                                                           {DSOPT_ERR_STATE, "DSOPT_ERR_STATE"},
                                                           {DSOPT_ERR_BUSY, "DSOPT_ERR_BUSY"},
                                                           {DSOPT_ERR_FORKED, "DSOPT_ERR_FORKED"},
                                                           {DSOPT_ERR_SKIPS, "DSOPT_ERR_SKIPS"},
                                                           {DSOPT_ERR_HOOK, "DSOPT_ERR_HOOK"},
                                                           {DSOPT_ERR_NOMEM, "DSOPT_ERR_NOMEM"},
                                                           {DSOPT_ERR_MISSING, "DSOPT_ERR_MISSING"},
                                                           {DSOPT_ERR_IO, "DSOPT_ERR_IO"},
                                                           {DSOPT_ERR_INTERNAL, "DSOPT_ERR_INTERNAL"},
                                                           {DSOPT_ERR_BACKEND, "DSOPT_ERR_BACKEND"},
                                                           {DSOPT_ERR_COMM, "DSOPT_ERR_COMM"},
                                                           {DSOPT_ERR_TIMEOUT, "DSOPT_ERR_TIMEOUT"},
                                                           {DSOPT_ERR_ABORTED, "DSOPT_ERR_ABORTED"},
                                                           {DSOPT_ERR_FORMAT, "DSOPT_ERR_FORMAT"},
                                                           {DSOPT_ERR_CHECKSUM, "DSOPT_ERR_CHECKSUM"},
                                                           {DSOPT_ERR_MISMATCH, "DSOPT_ERR_MISMATCH"}};
    for (const auto &[status, name] : names) EXPECT_STREQ(dsopt_status_name(status), name);
    for (const dsopt_status status : {-1, 1, 9, 9999, INT32_MAX, INT32_MIN})
        EXPECT_STREQ(dsopt_status_name(status), "unknown status");
}

TEST(BuildInfo, MatchesVersionAndListsFeatures) {
    EXPECT_EQ(dsopt_version(), DSOPT_VERSION_MAJOR * 10000 + DSOPT_VERSION_MINOR * 100 + DSOPT_VERSION_PATCH);
    EXPECT_EQ(dsopt_abi_version(), DSOPT_ABI_VERSION);
    const std::string info = dsopt_build_info();
    EXPECT_EQ(info.front(), '{');
    EXPECT_EQ(info.back(), '}');
    for (const char *key : {"version", "abi", "compiler", "backends", "comms", "isa"})
        EXPECT_NE(info.find('"' + std::string(key) + '"'), std::string::npos) << key;
    EXPECT_EQ(dsopt_build_info(), dsopt_build_info());
}

} // namespace threads_tests
