// SPDX-License-Identifier: Apache-2.0
// A rank hangs or aborts in the middle of a compressed step: the other ranks return a status in bounded time.
#include "support/onebit.h"
#include "support/onebit_run.h"
#include <barrier>
#include <chrono>
#include <condition_variable>
#include <mutex>

using namespace test;

LABEL_FILE(cpu); // the rank stops at a parallel loop of the host
using Clock = std::chrono::steady_clock;

namespace onebit_failures_tests {

constexpr int kRanks = 3;
constexpr int64_t kCall = 4;                              // a compressed step
constexpr auto kBound = std::chrono::milliseconds(60000); // longest allowed time of the other ranks

/// A parallel_for that counts its calls in one step and calls `on_stop` before loop number `stop_at`.
struct StoppingPool {
    int64_t stop_at = -1;
    std::function<void()> on_stop = {};
    int64_t loops = 0;
    bool armed = false;
    static void run(void *user, int64_t n, void (*body)(void *, int64_t), void *arg) {
        auto &self = *static_cast<StoppingPool *>(user);
        if (self.armed && self.loops++ == self.stop_at) self.on_stop();
        for (int64_t i = 0; i < n; ++i) body(arg, i);
    }
};
onebit_run::Setting setting_of(int32_t algorithm, StoppingPool &pool) {
    onebit_run::Setting setting;
    setting.algorithm = algorithm;
    setting.sizes = {450000}; // enough work to use the pool in every phase
    setting.freeze_step = 2;
    setting.change = [&pool](int64_t call, dsopt_step &step) {
        pool.armed = call == kCall;
        step.parallel_for = StoppingPool::run;
        step.parallel_user = &pool;
    };
    return setting;
}

/// Measurements of a step without a failure.
struct UndisturbedStep {
    int64_t loops;  // parallel loops of the step
    int timeout_ms; // time of kCall steps, if one run per loop is concurrent
};
UndisturbedStep measure_step(int32_t algorithm) {
    const auto begin = Clock::now();
    const CommId id = new_id();
    std::array<StoppingPool, kRanks> pools;
    run_ranks(kRanks, [&](int rank) {
        const Context ctx = make_context(2);
        const Comm comm = local_comm(ctx, id, rank, kRanks);
        onebit_run::RankTrainer trainer(ctx.get(), comm.get(), rank, setting_of(algorithm, pools[size_t(rank)]));
        for (int64_t call = 1; call <= kCall; ++call) must(trainer.step(call));
    });
    const int64_t loops = pools[0].loops;
    const auto duration_ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
    return {loops, int(std::clamp<int64_t>(loops * duration_ms, 1500, 10000))};
}

/// Rank 0 stops before a parallel loop of its compressed step. It waits until the other ranks have failed, or aborts.
/// Returns the reason, without a check, if the steps before it do not end within the time-out.
std::string try_stop_at(int32_t algorithm, int64_t loop, bool hangs, int timeout_ms) {
    const std::string what = std::string(name_of(algorithm)) + ", loop " + std::to_string(loop);
    const CommId id = new_id();
    std::mutex mutex;
    std::condition_variable changed;
    int failed_peers = 0;
    std::string too_slow;
    std::barrier before_last_step(kRanks);
    run_ranks(kRanks, [&](int rank) {
        Context ctx;
        Comm comm;
        std::unique_ptr<onebit_run::RankTrainer> running;
        StoppingPool pool;
        if (rank == 0) pool.stop_at = loop;
        pool.on_stop = [&] {
            if (!hangs) return dsopt_comm_abort(comm.get());
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return failed_peers == kRanks - 1; });
        };
        try {
            ctx = make_context(2);
            comm = local_comm(ctx, id, rank, kRanks, timeout_ms);
            running =
                std::make_unique<onebit_run::RankTrainer>(ctx.get(), comm.get(), rank, setting_of(algorithm, pool));
            for (int64_t call = 1; call < kCall; ++call) must(running->step(call));
        } catch (const std::exception &problem) {
            const std::lock_guard lock(mutex);
            too_slow = problem.what();
        }
        before_last_step.arrive_and_wait();
        if (!too_slow.empty()) return;
        onebit_run::RankTrainer &trainer = *running;
        const dsopt_status failure = hangs ? DSOPT_ERR_TIMEOUT : DSOPT_ERR_ABORTED;
        const std::string before = trainer.bytes(false);
        const auto begin = Clock::now();
        const dsopt_status status = trainer.step(kCall);
        // After its last collective a rank blocks no peer: the step succeeds, and the next one fails.
        EXPECT_TRUE(status == DSOPT_OK || status == failure) << what << ": " << dsopt_last_error();
        if (status != DSOPT_OK && algorithm != DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
            EXPECT_EQ(trainer.bytes(false), before) << what;
        }
        if (rank != 0 || status != DSOPT_OK) { EXPECT_TRUE(refused(trainer.step(kCall + 1), failure)) << what; }
        EXPECT_LT(Clock::now() - begin, kBound + std::chrono::milliseconds(timeout_ms)) << what << ", rank " << rank;
        EXPECT_EQ(info_of(comm).status, rank == 0 && status == DSOPT_OK ? info_of(comm).status : failure) << what;
        if (rank == 0) return;
        const std::lock_guard lock(mutex);
        ++failed_peers;
        changed.notify_all();
    });
    return too_slow;
}
/// The same, with a time-out that is longer each time the machine is too slow for it.
void stop_at(int32_t algorithm, int64_t loop, bool hangs, int timeout_ms) {
    std::string problem;
    for (int time = timeout_ms; !(problem = try_stop_at(algorithm, loop, hangs, time)).empty(); time *= 4)
        ASSERT_LT(time, 1000000) << problem;
}

class OneBitStepFailure : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(, OneBitStepFailure, testing::ValuesIn(kFamily),
                         [](const auto &info) { return std::string(name_of(info.param)); });

LABEL_PARAMS(one_of_many, "OneBitAdam");
LABEL_PARAMS(one_of_many, "ZeroOneAdam");
LABEL_PARAMS(slow, "OneBitAdam");
LABEL_PARAMS(slow, "ZeroOneAdam");
TEST_P(OneBitStepFailure, TimesOutOnPeersIfARankHangs) {
    const UndisturbedStep step = measure_step(GetParam());
    ASSERT_GE(step.loops, 4) << "compression, decompression and the loops before and after them";
    std::vector<std::thread> runs; // one per loop, concurrently: most of the time is spent waiting
    for (int64_t loop = 0; loop < step.loops; ++loop)
        runs.emplace_back([=] { stop_at(GetParam(), loop, true, step.timeout_ms); });
    for (std::thread &thread : runs) thread.join();
}

LABEL_PARAMS(one_of_many, "OneBitAdam");
LABEL_PARAMS(one_of_many, "OneBitLamb");
LABEL_PARAMS(slow, "OneBitAdam");
LABEL_PARAMS(slow, "OneBitLamb");
TEST_P(OneBitStepFailure, ReturnsAbortedOnPeersIfARankAborts) {
    const UndisturbedStep step = measure_step(GetParam());
    for (int64_t loop = 0; loop < step.loops; ++loop) stop_at(GetParam(), loop, false, 60000);
}

} // namespace onebit_failures_tests
