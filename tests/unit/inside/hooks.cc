// SPDX-License-Identifier: Apache-2.0
// A parallel_for of the caller that does not run every piece once: the call returns an error and runs no piece twice.
// Bindings cannot throw through C, so their parallel_for returns normally even if their pool failed.
#include "base/parallel.h"
#include "base/status.h"
#include "support/compressed.h"
#include <condition_variable>
#include <mutex>

using namespace test;

namespace inside_hooks_tests {

using Body = void (*)(void *arg, int64_t i);

constexpr int kThreads = 4;
constexpr size_t kNumel = 600000; // enough for kThreads pieces in every pass, with 2-byte elements too

void run_all(int64_t n, Body body, void *arg) {
    for (int64_t i = 0; i < n; ++i) body(arg, i);
}
/// A pool that runs every piece once, except in one of the calls after `arm`.
struct Pool {
    void (*faulty)(int64_t n, Body body, void *arg) = run_all;
    int64_t faulty_call = -1, calls = 0;
    static void run(void *user, int64_t n, Body body, void *arg) {
        auto &self = *static_cast<Pool *>(user);
        if (self.calls++ == self.faulty_call)
            self.faulty(n, body, arg);
        else
            run_all(n, body, arg);
    }
    void arm(int64_t call) {
        calls = 0;
        faulty_call = call;
    }
};
Context context_with(Pool &pool) {
    DSOPT_NEW(dsopt_context_desc, desc);
    desc.threads = kThreads;
    desc.parallel_for = Pool::run;
    desc.user = &pool;
    dsopt_context *ctx = nullptr;
    must(dsopt_context_create(&desc, &ctx));
    return Context(ctx);
}

struct Fault {
    const char *name;
    void (*run)(int64_t n, Body body, void *arg);
    std::vector<const char *> words; // expected in the text, for four pieces
};
const Fault kNothing{"runs nothing", [](int64_t, Body, void *) {}, {"had run 0 of 4 pieces", "returned"}};
const Fault kLast{"skips the last piece",
                  [](int64_t n, Body body, void *arg) { run_all(n - 1, body, arg); },
                  {"had run 3 of 4 pieces", "returned"}};
const Fault kTwice{"runs one piece twice",
                   [](int64_t n, Body body, void *arg) {
                       run_all(n, body, arg);
                       body(arg, 2);
                   },
                   {"had run 4 of 4 pieces", "piece 2 twice"}};
const Fault kInsteadOfAnother{"runs one piece in place of another",
                              [](int64_t n, Body body, void *arg) {
                                  for (int64_t i = 0; i < n; ++i) body(arg, i == 1 ? 0 : i);
                              },
                              {"had run 3 of 4 pieces", "piece 0 twice"}};
const Fault kAfterLast{"runs one piece after the last",
                       [](int64_t n, Body body, void *arg) {
                           for (int64_t i = 1; i <= n; ++i) body(arg, i);
                       },
                       {"had run 3 of 4 pieces", "piece 4, which is none"}};
const Fault kBeforeFirst{"runs one piece before the first",
                         [](int64_t n, Body body, void *arg) {
                             run_all(n, body, arg);
                             body(arg, -1);
                         },
                         {"had run 4 of 4 pieces", "piece -1, which is none"}};
const Fault kThrows{"throws",
                    [](int64_t, Body body, void *arg) {
                        body(arg, 0);
                        throw std::runtime_error("the pool is down");
                    },
                    {"had run 1 of 4 pieces", "threw", "the pool is down"}};
const Fault kThrowsAfterAll{"throws after all pieces",
                            [](int64_t n, Body body, void *arg) {
                                run_all(n, body, arg);
                                throw std::bad_alloc();
                            },
                            {"had run 4 of 4 pieces", "threw"}};
const Fault kThrowsANumber{
    "throws a number", [](int64_t, Body, void *) { throw 5; }, {"had run 0 of 4 pieces", "no std::exception"}};
const Fault *const kFaults[] = {&kNothing,     &kLast,   &kTwice,          &kInsteadOfAnother, &kAfterLast,
                                &kBeforeFirst, &kThrows, &kThrowsAfterAll, &kThrowsANumber};

testing::AssertionResult describes(const std::string &text, const Fault &fault) {
    for (const char *word : fault.words)
        if (text.find(word) == std::string::npos)
            return testing::AssertionFailure() << fault.name << ": '" << word << "' is not in: " << text;
    return testing::AssertionSuccess();
}

// -------------------------------------------------------------------------------------------------------------- pieces
TEST(ParallelFor, DetectsMissingAndRepeatedPieces) {
    for (const Fault *fault : kFaults) {
        Pool pool{fault->run, 0};
        const dsopt::Parallel parallel{kThreads, Pool::run, &pool};
        std::vector<int> runs(kThreads);
        try {
            parallel.run(kThreads, [&](int64_t i) { ++runs.at(size_t(i)); });
            ADD_FAILURE() << fault->name;
        } catch (const dsopt::Error &error) {
            EXPECT_EQ(error.status(), DSOPT_ERR_HOOK) << fault->name;
            EXPECT_TRUE(describes(error.what(), *fault));
        }
        for (const int times : runs) EXPECT_LE(times, 1) << fault->name;
    }
}

TEST(ParallelFor, CountsPiecesUpToMaximum) {
    for (const int64_t parts : {int64_t(2), int64_t(63), int64_t(64), int64_t(65), int64_t(128), int64_t(1000),
                                int64_t(dsopt::Parallel::kMaxThreads)}) {
        Pool pool;
        const dsopt::Parallel parallel{int(parts), Pool::run, &pool};
        std::vector<int> runs(static_cast<size_t>(parts));
        parallel.run(parts, [&](int64_t i) { ++runs.at(size_t(i)); });
        EXPECT_EQ(std::count(runs.begin(), runs.end(), 1), parts);
        pool = {kLast.run, 0};
        EXPECT_THROW(parallel.run(parts, [&](int64_t i) { ++runs.at(size_t(i)); }), dsopt::Error);
        EXPECT_EQ(std::count(runs.begin(), runs.end(), 2), parts - 1);
    }
}

TEST(ParallelFor, WaitsForPiecesAfterEarlyReturn) {
    struct EarlyPool {
        std::mutex mutex;
        std::condition_variable changed;
        bool inside = false, returns = false;
        std::thread thread;
    } pool;
    const dsopt::Parallel parallel{2,
                                   [](void *user, int64_t, Body body, void *arg) {
                                       auto &self = *static_cast<EarlyPool *>(user);
                                       self.thread = std::thread([=] { body(arg, 1); });
                                       body(arg, 0);
                                       std::unique_lock lock(self.mutex);
                                       self.changed.wait(lock, [&] { return self.inside; });
                                       self.returns = true;
                                       self.changed.notify_all();
                                   },
                                   &pool};
    int result = 0; // not atomic: a caller that does not wait has a data race
    try {
        parallel.run(2, [&](int64_t i) {
            if (i == 0) return;
            std::unique_lock lock(pool.mutex);
            pool.inside = true;
            pool.changed.notify_all();
            pool.changed.wait(lock, [&] { return pool.returns; });
            lock.unlock();
            std::this_thread::sleep_for(std::chrono::milliseconds(50)); // so that the pool returns first
            result = 7;
        });
    } catch (const dsopt::Error &error) { EXPECT_EQ(error.status(), DSOPT_ERR_HOOK) << error.what(); }
    EXPECT_EQ(result, 7);
    pool.thread.join();
}

// --------------------------------------------------------------------------------------------------------------- calls
dsopt_tensor tensor_of(std::vector<float> &values) {
    return {values.data(), int64_t(values.size()), DSOPT_DTYPE_F32, 0};
}
dsopt_optimizer_desc optimizer_desc(double max_norm = 0, uint32_t flags = 0) {
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.max_norm = max_norm;
    desc.flags = flags;
    return desc;
}
Array numbers(int32_t dtype = DSOPT_DTYPE_F32, uint64_t seed = 1) { return {dtype, Random(seed).floats(kNumel)}; }
std::vector<Array> gradients(uint64_t seed = 2) {
    std::vector<Array> list;
    list.push_back(numbers(DSOPT_DTYPE_F32, seed));
    return list;
}
Trainer trainer_of(const Context &ctx, int32_t algorithm, const dsopt_optimizer_desc &desc,
                   int32_t dtype = DSOPT_DTYPE_F32) {
    std::vector<Param> params;
    params.push_back({numbers(dtype)});
    return {ctx, desc, group_of(algorithm), std::move(params)};
}

/// A call that uses the pool of the context. It creates its arguments before `arm`.
struct PoolCall {
    const char *name;
    std::function<dsopt_status(const Context &ctx, const std::function<void()> &arm)> call;
};
PoolCall list_call(const char *name,
                   std::function<dsopt_status(dsopt_context *, dsopt_tensor &, dsopt_tensor &)> call) {
    return {name, [call](const Context &ctx, const std::function<void()> &arm) {
                std::vector<float> x(kNumel, 1), y(kNumel, 2);
                dsopt_tensor first = tensor_of(x), second = tensor_of(y);
                arm();
                const dsopt_status status = call(ctx.get(), first, second);
                const auto is_good = [](float value) { return value == 2 || value == 3; };
                EXPECT_TRUE(std::all_of(y.begin(), y.end(), is_good)) << "an element was added twice";
                return status;
            }};
}
PoolCall step_call(const char *name, int32_t algorithm, double max_norm, int32_t dtype, bool warm) {
    return {name, [=](const Context &ctx, const std::function<void()> &arm) {
                Trainer trainer = trainer_of(ctx, algorithm, optimizer_desc(max_norm), dtype);
                const std::vector<Array> grads = gradients();
                if (warm) must(trainer.step(grads));
                arm();
                return trainer.step(grads);
            }};
}
std::vector<PoolCall> pool_calls() {
    std::vector<PoolCall> all;
    all.push_back(list_call("zero_grad", [](dsopt_context *ctx, dsopt_tensor &x, dsopt_tensor &) {
        return dsopt_zero_grad(ctx, &x, 1, DSOPT_ZERO_FILL, nullptr);
    }));
    all.push_back(list_call("tensors_norm", [](dsopt_context *ctx, dsopt_tensor &x, dsopt_tensor &) {
        dsopt_norm_result result{};
        result.norm = -7;
        const dsopt_status status = dsopt_tensors_norm(ctx, &x, 1, DSOPT_NORM_L2, 0, nullptr, &result, nullptr);
        EXPECT_EQ(result.norm == -7, status != DSOPT_OK);
        return status;
    }));
    all.push_back(list_call("tensors_axpby", [](dsopt_context *ctx, dsopt_tensor &x, dsopt_tensor &y) {
        return dsopt_tensors_axpby(ctx, nullptr, &x, 1, &y, 1, nullptr);
    }));
    all.push_back(list_call("tensors_clamp", [](dsopt_context *ctx, dsopt_tensor &x, dsopt_tensor &) {
        return dsopt_tensors_clamp(ctx, &x, 1, 0.5, nullptr);
    }));
    all.push_back(step_call("step", DSOPT_ALGORITHM_ADAMW, 0, DSOPT_DTYPE_F32, false));
    all.push_back(step_call("a clipped step", DSOPT_ALGORITHM_ADAMW, 1, DSOPT_DTYPE_F32, true));
    all.push_back(step_call("a clipped step of LAMB", DSOPT_ALGORITHM_LAMB, 1, DSOPT_DTYPE_F32, true));
    all.push_back(step_call("the first step with masters", DSOPT_ALGORITHM_ADAMW, 0, DSOPT_DTYPE_BF16, false));
    all.push_back({"accumulate", [](const Context &ctx, const std::function<void()> &arm) {
                       Trainer trainer =
                           trainer_of(ctx, DSOPT_ALGORITHM_ADAMW, optimizer_desc(0, DSOPT_OPTIMIZER_ACCUMULATE));
                       arm();
                       return trainer.accumulate(gradients());
                   }});
    all.push_back({"reset", [](const Context &ctx, const std::function<void()> &arm) {
                       Trainer trainer = trainer_of(ctx, DSOPT_ALGORITHM_ADAMW, optimizer_desc(), DSOPT_DTYPE_BF16);
                       must(trainer.step(gradients()));
                       arm();
                       return dsopt_optimizer_reset(trainer.opt(), DSOPT_RESET_MASTERS, nullptr);
                   }});
    all.push_back({"export", [](const Context &ctx, const std::function<void()> &arm) {
                       Trainer trainer = trainer_of(ctx, DSOPT_ALGORITHM_ADAMW, optimizer_desc(), DSOPT_DTYPE_BF16);
                       std::vector<float> master(kNumel);
                       arm();
                       return dsopt_optimizer_export(trainer.opt(), 0, master.data(), kNumel * sizeof(float));
                   }});
    all.push_back({"load", [](const Context &ctx, const std::function<void()> &arm) {
                       Trainer trainer = trainer_of(ctx, DSOPT_ALGORITHM_ADAMW, optimizer_desc(), DSOPT_DTYPE_BF16);
                       MemoryFile file;
                       must(file.save(trainer));
                       arm();
                       return file.load(trainer, DSOPT_IO_NO_MASTERS);
                   }});
    all.push_back({"compressed_allreduce", [](const Context &ctx, const std::function<void()> &arm) {
                       const Comm comm = self_comm(ctx);
                       CompressedMean side(comm, {int64_t(kNumel)});
                       arm();
                       return side.call();
                   }});
    return all;
}

TEST(ParallelFor, ReturnsStatusForFaultInAnyCall) {
    for (const PoolCall &entry : pool_calls())
        for (const Fault *fault : {&kLast, &kTwice, &kThrows}) {
            int64_t failed = 0;
            for (bool faulted = true; faulted; failed += faulted) {
                Pool pool{fault->run};
                const Context ctx = context_with(pool);
                const dsopt_status status = entry.call(ctx, [&] { pool.arm(failed); });
                faulted = pool.calls > failed;
                EXPECT_EQ(status, faulted ? DSOPT_ERR_HOOK : DSOPT_OK) << entry.name << ", " << fault->name;
                EXPECT_TRUE(!faulted || describes(dsopt_last_error(), *fault))
                    << entry.name << ": " << dsopt_last_error();
            }
            EXPECT_GT(failed, 0) << entry.name;
        }
}

TEST(ParallelFor, DetectsFaultsInPoolOfStep) {
    for (const Fault *fault : kFaults) {
        Pool pool{fault->run, 0};
        const Context ctx = make_context(kThreads);
        Trainer trainer = trainer_of(ctx, DSOPT_ALGORITHM_ADAMW, optimizer_desc());
        const dsopt_status status = trainer.step(gradients(), [&](dsopt_step &step) {
            step.parallel_for = Pool::run;
            step.parallel_user = &pool;
        });
        EXPECT_EQ(status, DSOPT_ERR_HOOK) << fault->name;
        EXPECT_TRUE(describes(dsopt_last_error(), *fault));
    }
}

TEST(ParallelFor, LoadRestoresStateAfterFaultInAnyPass) {
    Pool pool{kLast.run};
    const Context ctx = context_with(pool);
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB}) {
        const dsopt_optimizer_desc desc = optimizer_desc(1, DSOPT_OPTIMIZER_REPORT_NORMS);
        Trainer trainer = trainer_of(ctx, algorithm, desc, DSOPT_DTYPE_BF16),
                plain = trainer_of(ctx, algorithm, desc, DSOPT_DTYPE_BF16);
        const std::vector<Array> grads = gradients();
        for (Trainer *each : {&trainer, &plain}) must(each->step(grads));
        MemoryFile file;
        must(file.save(trainer, DSOPT_IO_PARAMS));
        must(plain.step(gradients(3)));
        int64_t failed = 0;
        for (;; ++failed) {
            pool.arm(failed);
            const dsopt_status status = trainer.step(gradients(3));
            pool.arm(-1);
            if (status == DSOPT_OK) break;
            EXPECT_EQ(status, DSOPT_ERR_HOOK);
            EXPECT_EQ(trainer.report().calls, 1); // the failed call did not leave the optimizer busy
            must(file.load(trainer, DSOPT_IO_PARAMS));
        }
        EXPECT_GT(failed, 1);
        EXPECT_TRUE(same(trainer.snapshot(), plain.snapshot()));
        EXPECT_EQ(trainer.report().calls, 2);
    }
}

TEST(ParallelFor, FaultDuringInitializationLeavesNoState) {
    // In compat mode with masters, initialization includes a step on zero gradients, which must not be lost.
    for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
        Pool pool{kLast.run};
        const Context ctx = context_with(pool);
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.compat = compat;
        Trainer trainer = trainer_of(ctx, DSOPT_ALGORITHM_ADAMW, desc, DSOPT_DTYPE_BF16),
                plain = trainer_of(ctx, DSOPT_ALGORITHM_ADAMW, desc, DSOPT_DTYPE_BF16);
        std::vector<float> master(kNumel);
        const auto read = [&] {
            return dsopt_optimizer_export(trainer.opt(), 0, master.data(), kNumel * sizeof(float));
        };
        int64_t failed = 0;
        for (;; ++failed) {
            pool.arm(failed);
            const dsopt_status status = read();
            pool.arm(-1);
            if (status == DSOPT_OK) break;
            EXPECT_EQ(status, DSOPT_ERR_HOOK);
            for (const dsopt_state_info &info : trainer.state()) EXPECT_EQ(info.tensor.data, nullptr) << info.name;
        }
        EXPECT_EQ(failed, compat == DSOPT_COMPAT_NONE ? 1 : 2);
        for (Trainer *each : {&trainer, &plain}) must(each->step(gradients()));
        EXPECT_TRUE(same(trainer.snapshot(), plain.snapshot()));
    }
}

// --------------------------------------------------------------------------------------------------------------- ranks
TEST(ParallelFor, FaultBetweenCollectivesMakesCommUnusable) {
    const CommId id = new_id();
    run_ranks(2, [&](int rank) {
        Pool pool{kLast.run};
        const Context ctx = context_with(pool);
        const Comm comm = local_comm(ctx, id, rank, 2, -1); // without a time-out
        dsopt_optimizer_desc desc = optimizer_desc(1, DSOPT_OPTIMIZER_CHECK_RANKS);
        desc.data = comm.get();
        Trainer trainer = trainer_of(ctx, DSOPT_ALGORITHM_ADAMW, desc);
        must(trainer.step(gradients()));
        if (rank == 0) {
            pool.arm(0); // fails in pass 1, before the norm is reduced
            EXPECT_TRUE(refused(trainer.step(gradients()), DSOPT_ERR_HOOK, "3 of 4"));
            EXPECT_EQ(info_of(comm).status, DSOPT_ERR_HOOK)
                << "another step would be combined with the norm of the other rank";
            dsopt_comm_abort(comm.get());
        } else {
            EXPECT_TRUE(refused(trainer.step(gradients()), DSOPT_ERR_ABORTED));
        }
        const dsopt_status failure = rank == 0 ? DSOPT_ERR_HOOK : DSOPT_ERR_ABORTED;
        EXPECT_EQ(info_of(comm).status, failure);
        EXPECT_TRUE(refused(trainer.step(gradients()), failure));
    });
}

TEST(ParallelFor, FaultBeforeCollectiveIsReportedToOtherRanks) {
    const CommId id = new_id();
    run_ranks(2, [&](int rank) {
        Pool pool{kLast.run};
        const Context ctx = context_with(pool);
        const Comm comm = local_comm(ctx, id, rank, 2, -1);
        dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_CHECK_RANKS);
        desc.data = comm.get();
        Trainer trainer = trainer_of(ctx, DSOPT_ALGORITHM_ADAMW, desc, DSOPT_DTYPE_BF16);
        if (rank == 0) pool.arm(0); // fails while masters are initialized
        const dsopt_status status = trainer.step(gradients());
        EXPECT_TRUE(rank == 0 ? refused(status, DSOPT_ERR_HOOK)
                              : refused(status, DSOPT_ERR_MISMATCH, "the step of rank 0 failed before"));
        EXPECT_OK(trainer.step(gradients()));
        EXPECT_EQ(info_of(comm).status, DSOPT_OK);
    });
}

} // namespace inside_hooks_tests
