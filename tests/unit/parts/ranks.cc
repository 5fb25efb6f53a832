// SPDX-License-Identifier: Apache-2.0
// Buckets that are exchanged while gradients are missing: comms in use, threads, ranks that differ, failures.
#include "support/harness.h"
#include "support/parts.h"
#include "support/shard.h"
#include "support/thread_table.h"
#include "support/two_level.h"
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

using namespace test;

namespace parts_ranks_tests {

constexpr int64_t kBucket = 8192; // of kShardSizes: {0-4, 5}, {6}, {7-10}

ShardTraining training_of(double max_norm = 0.5) {
    return {.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .desc = optimizer_desc(max_norm)};
}
dsopt_optimizer_desc averaging(const ShardTraining &training, const Comm &data,
                               uint32_t flags = DSOPT_OPTIMIZER_SHARD) {
    dsopt_optimizer_desc desc = training.desc;
    desc.flags |= int32_t(flags | DSOPT_OPTIMIZER_AVERAGES);
    desc.bucket = kBucket;
    desc.data = data.get();
    return desc;
}
std::vector<Array> gradients_of(const ShardTraining &training, int64_t step, int rank) {
    const Context none;
    const Comm no_comm;
    return own_gradients(training, step, {0, rank, none, no_comm, no_comm});
}
/// Makes parameters [first, end) ready.
dsopt_status ready(const Trainer &trainer, const std::vector<Array> &gradients, int64_t first, int64_t end,
                   int64_t *free_from = nullptr) {
    const std::vector<dsopt_tensor> list = list_of(gradients);
    DSOPT_NEW(dsopt_ready, ready);
    ready.first = first;
    ready.count = end - first;
    ready.grads = list.data() + first;
    const dsopt_status status = dsopt_optimizer_ready(trainer.opt(), &ready);
    if (free_from != nullptr) *free_from = ready.free_from;
    return status;
}
dsopt_status end_step(const Trainer &trainer, const std::vector<Array> &gradients, int64_t ready_from) {
    std::vector<dsopt_tensor> list = list_of(gradients);
    for (size_t i = size_t(ready_from); i < list.size(); ++i) list[i].data = nullptr;
    DSOPT_NEW(dsopt_step, step);
    step.count = int64_t(list.size());
    step.grads = list.data();
    step.flags = DSOPT_STEP_READY;
    return dsopt_optimizer_step(trainer.opt(), &step);
}
dsopt_status forget(const Trainer &trainer) { return dsopt_optimizer_reset(trainer.opt(), DSOPT_RESET_READY, nullptr); }

TEST(Buckets, AreTheRunsThatAQueryReturns) {
    with_ranks(2, [&](int, const Context &context, const Comm &data) {
        const ShardTraining training = training_of();
        Scaler none;
        const Trainer trainer = training.trainer(context, averaging(training, data), none);
        const int64_t firsts[] = {0, 0, 0, 0, 0, 0, 6, 7, 7, 7, 10}, counts[] = {6, 6, 6, 6, 6, 6, 1, 3, 3, 3, 1};
        for (int64_t i = 0; i < 11; ++i) {
            int64_t first = -1, count = -1;
            ASSERT_OK(dsopt_optimizer_bucket(trainer.opt(), i, &first, &count));
            EXPECT_EQ(first, firsts[i]) << i;
            EXPECT_EQ(count, counts[i]) << i;
        }
    });
}

// A bucket is copied when it is complete and those after it were.
TEST(Buckets, AreFreeFromTheLastOneOn) {
    with_ranks(2, [&](int rank, const Context &context, const Comm &data) {
        const ShardTraining training = training_of();
        Scaler none;
        Trainer trainer = training.trainer(context, averaging(training, data), none);
        const std::vector<Array> gradients = gradients_of(training, 1, rank);
        const int64_t calls[][3] = {{6, 7, 11}, {8, 10, 11}, {10, 11, 10}, {7, 8, 6}, {0, 5, 6}, {5, 6, 0}};
        for (const auto &[first, end, free_from] : calls) {
            int64_t found = -1;
            ASSERT_OK(ready(trainer, gradients, first, end, &found));
            EXPECT_EQ(found, free_from) << first;
            ASSERT_OK(dsopt_optimizer_wait(trainer.opt(), 0, 11, nullptr));
        }
        ASSERT_OK(end_step(trainer, gradients, 0));
    });
}

TEST(Comms, AreInUseUntilTheStep) {
    with_ranks(2, [&](int rank, const Context &context, const Comm &data) {
        const ShardTraining training = training_of();
        Scaler none;
        Trainer trainer = training.trainer(context, averaging(training, data), none),
                other = training.trainer(context, averaging(training, data), none);
        const std::vector<Array> gradients = gradients_of(training, 1, rank);
        ASSERT_OK(other.step(gradients));
        ASSERT_OK(ready(trainer, gradients, 6, 11));
        const std::string before = other.text();
        for (int round = 0; round < 2; ++round) {
            constexpr const char *kText = "the comm is in use: gradients of an optimizer that uses it are ready";
            EXPECT_TRUE(refused(other.step(gradients), DSOPT_ERR_BUSY, kText));
            EXPECT_TRUE(refused(ready(other, gradients, 6, 11), DSOPT_ERR_BUSY, kText));
            const Array value(DSOPT_DTYPE_F32, 3, 0);
            dsopt_tensor list[] = {value.tensor()};
            EXPECT_TRUE(
                refused(dsopt_comm_all_reduce(data.get(), list, 1, DSOPT_OP_SUM, nullptr), DSOPT_ERR_BUSY, kText));
            EXPECT_EQ(info_of(data).status, DSOPT_OK);
        }
        EXPECT_EQ(other.text(), before);
        ASSERT_OK(end_step(trainer, gradients, 6));
        ASSERT_OK(other.step(gradients));
        EXPECT_EQ(info_of(data).status, DSOPT_OK);
    });
}

/// Notes which threads call the table.
class NotingTable final : public ThreadTable {
public:
    using ThreadTable::ThreadTable;
    std::set<std::thread::id> threads;

protected:
    int enter(int) override {
        const std::lock_guard lock(mutex_);
        threads.insert(std::this_thread::get_id());
        return 0;
    }

private:
    std::mutex mutex_;
};

// Hooks are called by the caller's threads, and so is a table without ANY_THREAD.
TEST(Threads, OfTheLibraryCallNoHook) {
    for (const uint32_t any : {0u, uint32_t(DSOPT_COMM_FLAG_ANY_THREAD)}) {
        NotingTable table(2);
        std::mutex mutex;
        std::set<std::thread::id> callers;
        run_ranks(2, [&](int rank) {
            struct Hooks {
                std::thread::id thread = std::this_thread::get_id();
                std::atomic<int> wrong{0};
            } hooks;
            {
                const std::lock_guard lock(mutex);
                callers.insert(hooks.thread);
            }
            dsopt_context_desc context_desc = test::context_desc(2);
            context_desc.user = &hooks;
            context_desc.parallel_for = [](void *user, int64_t count, void (*body)(void *, int64_t), void *argument) {
                auto &self = *static_cast<Hooks *>(user);
                self.wrong += self.thread != std::this_thread::get_id();
                for (int64_t i = 0; i < count; ++i) body(argument, i);
            };
            const Context context = make_context(context_desc);
            const Comm data = table.comm(context, rank, any);
            const ShardTraining training = training_of();
            Scaler none;
            Trainer trainer = training.trainer(context, averaging(training, data), none);
            for (int64_t step = 1; step <= 3; ++step) {
                const std::vector<Array> gradients = gradients_of(training, step, rank);
                for (int64_t i = 11; i-- > 0;) ASSERT_OK(ready(trainer, gradients, i, i + 1));
                ASSERT_OK(end_step(trainer, gradients, 0));
            }
            EXPECT_EQ(hooks.wrong, 0);
        });
        size_t others = 0;
        for (const std::thread::id thread : table.threads) others += callers.count(thread) == 0;
        EXPECT_EQ(others, any != 0 && context_desc().backend == DSOPT_BACKEND_CPU ? 2u : 0u);
    }
}

TEST(Ranks, ThatPassOtherDtypesGetMismatchAndGoOn) {
    with_ranks(2, [&](int rank, const Context &context, const Comm &data) {
        ShardTraining training = training_of();
        Scaler none;
        Trainer trainer = training.trainer(context, averaging(training, data, DSOPT_OPTIMIZER_CHECK_RANKS), none);
        for (int64_t step = 1; step <= 2; ++step) {
            std::vector<Array> gradients = gradients_of(training, step, rank);
            if (rank == 1) gradients[6] = Array(DSOPT_DTYPE_BF16, gradients[6].size(), 0);
            const std::string before = trainer.text();
            ASSERT_OK(ready(trainer, gradients, 6, 11));
            EXPECT_TRUE(refused(dsopt_optimizer_wait(trainer.opt(), 6, 1, nullptr), DSOPT_ERR_MISMATCH,
                                "the gradient of 't6' has dtype"));
            EXPECT_TRUE(refused(ready(trainer, gradients, 5, 6), DSOPT_ERR_MISMATCH, "'t6'"));
            EXPECT_TRUE(refused(end_step(trainer, gradients, 6), DSOPT_ERR_MISMATCH, "'t6'")); // the step is over
            EXPECT_EQ(trainer.text(), before);
            EXPECT_EQ(info_of(data).status, DSOPT_OK);
            ASSERT_OK(step_in_parts(trainer, gradients_of(training, step, rank), Parts::backward, 1));
        }
    });
}

TEST(Ranks, WithOtherBucketsGetMismatch) {
    with_ranks(2, [&](int rank, const Context &context, const Comm &data) {
        const ShardTraining training = training_of();
        Scaler none;
        dsopt_optimizer_desc desc = averaging(training, data);
        desc.bucket = rank == 0 ? 4096 : 8192;
        Trainer trainer = training.trainer(context, desc, none);
        EXPECT_TRUE(refused(trainer.step(gradients_of(training, 1, rank)), DSOPT_ERR_MISMATCH,
                            "ranks have different options: bucket is"));
        EXPECT_EQ(info_of(data).status, DSOPT_OK);
    });
}

// With CHECK_RANKS a rank whose step is refused tells the others, at the place at which they compare.
TEST(Ranks, LearnOfAStepThatIsRefused) {
    for (const int64_t from : {11, 7, 0}) // what the refused rank has made ready
        with_ranks(2, [&](int rank, const Context &context, const Comm &data) {
            const ShardTraining training = training_of();
            Scaler none;
            Trainer trainer = training.trainer(context, averaging(training, data, DSOPT_OPTIMIZER_CHECK_RANKS), none);
            Trainer whole = training.trainer(context, training.desc, none);
            const std::vector<Array> gradients = gradients_of(training, 1, rank);
            const std::string before = trainer.text();
            if (rank == 0) {
                if (from < 11) { ASSERT_OK(ready(trainer, gradients, from, 11)); }
                DSOPT_NEW(dsopt_step, step);
                step.count = 5;
                step.flags = DSOPT_STEP_READY;
                EXPECT_TRUE(refused(dsopt_optimizer_step(trainer.opt(), &step), DSOPT_ERR_SHAPE, "count is 5"));
            } else {
                EXPECT_TRUE(refused(trainer.step(gradients), DSOPT_ERR_MISMATCH, "the step of rank 0 failed"));
            }
            EXPECT_EQ(trainer.text(), before);
            EXPECT_EQ(info_of(data).status, DSOPT_OK);
            ASSERT_OK(trainer.step(gradients));
            ASSERT_OK(whole.step(mean_gradients(training, 1, {1, 2})));
            ASSERT_TRUE(same(trainer.weight(0).text(), whole.weight(0).text()));
        });
}

TEST(Reset, ForgetsWhatRanksHaveExchanged) {
    for (const uint32_t check : {0u, uint32_t(DSOPT_OPTIMIZER_CHECK_RANKS)})
        with_ranks(3, [&](int rank, const Context &context, const Comm &data) {
            const ShardTraining training = training_of();
            Scaler none;
            Trainer trainer = training.trainer(context, averaging(training, data, DSOPT_OPTIMIZER_SHARD | check), none);
            Trainer whole = training.trainer(context, training.desc, none);
            for (int64_t step = 1; step <= 3; ++step) {
                // Each rank is at another bucket; one has nothing ready.
                const std::vector<Array> failed = gradients_of(training, 50 + step, rank);
                const int64_t from[] = {11, 7, 0};
                if (rank != 0) { ASSERT_OK(ready(trainer, failed, from[rank], 11)); }
                ASSERT_OK(forget(trainer));
                ASSERT_OK(step_in_parts(trainer, gradients_of(training, step, rank), kAllParts[size_t(rank)], 1));
                ASSERT_OK(whole.step(mean_gradients(training, step, {1, 3})));
                expect_same_training(trainer, whole);
                if (testing::Test::HasFatalFailure()) return;
            }
        });
}

TEST(Reset, UpdatesNothing) {
    with_ranks(2, [&](int rank, const Context &context, const Comm &data) {
        const ShardTraining training = training_of(0);
        dsopt_optimizer_desc desc = averaging(training, data, DSOPT_OPTIMIZER_EARLY_UPDATE | DSOPT_OPTIMIZER_SHARD);
        Scaler none;
        Trainer trainer = training.trainer(context, desc, none);
        ASSERT_OK(trainer.step(gradients_of(training, 1, rank)));
        const std::string before = trainer.text();
        ASSERT_OK(forget(trainer)); // of a step in which nothing was ready
        EXPECT_EQ(trainer.text(), before);
    });
}

// Ranks have sent different numbers of buckets, of accumulators.
TEST(Reset, ForgetsAccumulatedGradients) {
    with_ranks(2, [&](int rank, const Context &context, const Comm &data) {
        ShardTraining training = training_of();
        training.grad = DSOPT_DTYPE_BF16;
        Scaler none;
        dsopt_optimizer_desc desc = averaging(training, data, DSOPT_OPTIMIZER_ACCUMULATE | DSOPT_OPTIMIZER_SHARD);
        Trainer trainer = training.trainer(context, desc, none);
        const auto make_step = [&](int64_t from) {
            const std::vector<Array> gradients = gradients_of(training, 1, rank);
            const std::vector<dsopt_tensor> list = list_of(gradients);
            DSOPT_NEW(dsopt_ready, ready);
            ready.first = from;
            ready.count = 11 - from;
            ready.grads = list.data() + from;
            ready.flags = DSOPT_READY_ACCUMULATED;
            return dsopt_optimizer_ready(trainer.opt(), &ready);
        };
        const auto end = [&] {
            DSOPT_NEW(dsopt_step, step);
            step.count = 11;
            step.flags = DSOPT_STEP_READY | DSOPT_STEP_ACCUMULATED;
            return dsopt_optimizer_step(trainer.opt(), &step);
        };
        for (int round = 0; round < 2; ++round) {
            ASSERT_OK(make_step(0));
            ASSERT_OK(end());
            ASSERT_OK(make_step(rank == 0 ? 10 : 6));
            ASSERT_OK(forget(trainer));
            ASSERT_OK(dsopt_optimizer_reset(trainer.opt(), DSOPT_RESET_GRADS, nullptr));
        }
        EXPECT_EQ(info_of(data).status, DSOPT_OK);
    });
}

TEST(Comms, AreFreeAfterABusyCall) {
    with_nodes(2, 2, [&](const NodeRank &rank) {
        const ShardTraining training = training_of();
        Scaler none;
        dsopt_optimizer_desc desc = averaging(training, rank.data), other_desc = desc;
        desc.data = nullptr;
        desc.node = other_desc.node = rank.node.get();
        Trainer trainer = training.trainer(rank.ctx, desc, none), other = training.trainer(rank.ctx, other_desc, none);
        const std::vector<Array> gradients = gradients_of(training, 1, rank.l);
        ASSERT_OK(ready(trainer, gradients, 6, 11));
        EXPECT_TRUE(refused(ready(other, gradients, 6, 11), DSOPT_ERR_BUSY, "in use"));
        const Array value(DSOPT_DTYPE_F32, 3, 0);
        dsopt_tensor list[] = {value.tensor()};
        EXPECT_OK(dsopt_comm_all_reduce(rank.data.get(), list, 1, DSOPT_OP_SUM, nullptr));
        ASSERT_OK(end_step(trainer, gradients, 6));
        ASSERT_OK(other.step(gradients));
    });
}

/// A rank stops in a step: it aborts, or destroys its optimizer. The others get a status in bounded time.
TEST(Failure, OfARankReachesTheOthers) {
    for (const bool destroys : {false, true})
        for (const int64_t from : {10, 7, 6, 0})
            with_ranks(2, [&](int rank, const Context &context, const Comm &data) {
                const ShardTraining training = training_of();
                Scaler none;
                Trainer trainer = training.trainer(context, averaging(training, data), none);
                ASSERT_OK(trainer.step(gradients_of(training, 1, rank)));
                const std::vector<Array> gradients = gradients_of(training, 2, rank);
                if (rank == 1) {
                    for (int64_t i = 11; i-- > from;) (void)!ready(trainer, gradients, i, i + 1);
                    if (destroys)
                        trainer.drop();
                    else
                        dsopt_comm_abort(data.get());
                    return;
                }
                const std::string before = trainer.text();
                const auto begin = std::chrono::steady_clock::now();
                for (int64_t i = 11; i-- > 0;)
                    (void)!ready(trainer, gradients, i, i + 1); // the status, sooner or later
                const dsopt_status status = end_step(trainer, gradients, 0);
                EXPECT_TRUE(status == DSOPT_ERR_ABORTED || status == DSOPT_ERR_COMM) << status << dsopt_last_error();
                EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
                EXPECT_NE(info_of(data).status, DSOPT_OK);
                EXPECT_EQ(trainer.text(), before);
                EXPECT_EQ(trainer.report().calls, 1);
            });
}

/// Each collective of a step fails in turn, on all ranks.
class FailingTable final : public ThreadTable {
public:
    FailingTable(int ranks, int good) : ThreadTable(ranks), left_(size_t(ranks), good) {}
    bool has_failed() const { return failed_; }

protected:
    int enter(int rank) override {
        if (left_[size_t(rank)]-- > 0) return 0;
        failed_ = true;
        return 77;
    }

private:
    std::vector<int> left_;
    std::atomic<bool> failed_{false};
};

TEST(Failure, OfAnyCollectiveLeavesWeightsAndMoments) {
    for (const uint32_t any : {0u, uint32_t(DSOPT_COMM_FLAG_ANY_THREAD)})
        for (int good = 0;; ++good) {
            FailingTable table(2, good);
            std::atomic<int> completed{0};
            run_ranks(2, [&](int rank) {
                const Context context = make_context(1);
                const Comm data = table.comm(context, rank, any);
                const ShardTraining training = training_of();
                Scaler none;
                Trainer trainer = training.trainer(context, averaging(training, data, 0), none);
                must(dsopt_optimizer_reset(trainer.opt(), DSOPT_RESET_MASTERS, nullptr));
                const std::string before = trainer.text();
                const std::vector<Array> gradients = gradients_of(training, 1, rank);
                dsopt_status status = DSOPT_OK;
                for (int64_t i = 11; i-- > 3 && status == DSOPT_OK;) status = ready(trainer, gradients, i, i + 1);
                const dsopt_status ended = end_step(trainer, gradients, 3);
                if (ended == DSOPT_OK) {
                    ++completed;
                    return;
                }
                EXPECT_TRUE(status == DSOPT_OK || status == DSOPT_ERR_COMM);
                EXPECT_EQ(ended, DSOPT_ERR_COMM) << dsopt_last_error();
                EXPECT_EQ(trainer.text(), before);
                EXPECT_TRUE(refused(trainer.step(gradients), DSOPT_ERR_COMM, "failed earlier"));
            });
            if (completed == 2) break;
            ASSERT_TRUE(table.has_failed());
            ASSERT_LT(good, 40);
        }
}

} // namespace parts_ranks_tests
