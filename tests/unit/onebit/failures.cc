// SPDX-License-Identifier: Apache-2.0
// A rank that hangs or gives up in the middle of a compressed step: the others get a status in bounded time.
#include "support/onebit.h"
#include "support/onebit_run.h"
#include <chrono>
#include <condition_variable>
#include <mutex>

using namespace test;

LABEL_FILE(cpu); // stops in pieces of the host's loops
using Clock = std::chrono::steady_clock;

namespace {

constexpr int kRanks = 3;
constexpr int64_t kCall = 4;                              // a compressed step
constexpr auto kBound = std::chrono::milliseconds(60000); // what the others may take at most

/// The pool of rank 0, which stops at the piece of work with a number, in one step.
struct Stopper {
    int64_t stop_at = -1;
    std::function<void()> instead = {};
    int64_t pieces = 0;
    bool armed = false;
    static void run(void *user, int64_t n, void (*body)(void *, int64_t), void *arg) {
        auto &self = *static_cast<Stopper *>(user);
        if (self.armed && self.pieces++ == self.stop_at) self.instead();
        for (int64_t i = 0; i < n; ++i) body(arg, i);
    }
};
onebit_run::Setting setting_of(int32_t algorithm, Stopper &stopper) {
    onebit_run::Setting setting;
    setting.algorithm = algorithm;
    setting.sizes = {450000}; // enough work to ask for the pool in every phase
    setting.freeze_step = 2;
    setting.change = [&stopper](int64_t call, dsopt_step &step) {
        stopper.armed = call == kCall;
        step.parallel_for = Stopper::run;
        step.parallel_user = &stopper;
    };
    return setting;
}

/// A step in which nothing goes wrong.
struct Healthy {
    int64_t pieces; // of work that it asks for
    int timeout_ms; // what four such steps take on this machine now, with as many others at the same time
};
Healthy healthy_step(int32_t algorithm) {
    const auto begin = Clock::now();
    const CommId id = new_id();
    std::array<Stopper, kRanks> stoppers;
    run_ranks(kRanks, [&](int rank) {
        const Context ctx = make_context(2);
        const Comm comm = local_comm(ctx, id, rank, kRanks);
        onebit_run::Rank trainer(ctx.get(), comm.get(), rank, setting_of(algorithm, stoppers[size_t(rank)]));
        for (int64_t call = 1; call <= kCall; ++call) must(trainer.step(call));
    });
    const int64_t pieces = stoppers[0].pieces;
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
    return {pieces, int(std::clamp<int64_t>(pieces * took, 1500, 10000))};
}

/// Rank 0 stops before a piece of work of its compressed step, and does something in place of going on.
void stop_at(int32_t algorithm, int64_t piece, bool hangs, int timeout_ms) {
    const std::string what = std::string(name_of(algorithm)) + ", piece " + std::to_string(piece);
    const CommId id = new_id();
    std::mutex mutex;
    std::condition_variable changed;
    int others = 0; // that have their status
    run_ranks(kRanks, [&](int rank) {
        const Context ctx = make_context(2);
        const Comm comm = local_comm(ctx, id, rank, kRanks, timeout_ms);
        Stopper stopper;
        if (rank == 0) stopper.stop_at = piece;
        stopper.instead = [&] {
            if (!hangs) return dsopt_comm_abort(comm.get());
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return others == kRanks - 1; });
        };
        onebit_run::Rank trainer(ctx.get(), comm.get(), rank, setting_of(algorithm, stopper));
        for (int64_t call = 1; call < kCall; ++call) must(trainer.step(call));
        const dsopt_status lost = hangs ? DSOPT_ERR_TIMEOUT : DSOPT_ERR_ABORTED;
        const std::string before = trainer.bytes(false);
        const auto begin = Clock::now();
        const dsopt_status status = trainer.step(kCall);
        // Behind its last collective a rank holds nobody up any more: the step is taken, and the next one is lost.
        EXPECT_TRUE(status == DSOPT_OK || status == lost) << what << ": " << dsopt_last_error();
        if (status != DSOPT_OK && algorithm != DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
            EXPECT_EQ(trainer.bytes(false), before) << what;
        }
        if (rank != 0 || status != DSOPT_OK) { EXPECT_TRUE(refused(trainer.step(kCall + 1), lost)) << what; }
        EXPECT_LT(Clock::now() - begin, kBound) << what << ", rank " << rank;
        EXPECT_EQ(info_of(comm).status, rank == 0 && status == DSOPT_OK ? info_of(comm).status : lost) << what;
        if (rank == 0) return;
        const std::lock_guard lock(mutex);
        ++others;
        changed.notify_all();
    });
}

class StoppedStep : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(, StoppedStep, testing::ValuesIn(kFamily),
                         [](const auto &info) { return std::string(name_of(info.param)); });

LABEL_PARAMS(one_of_many, "OneBitAdam");
LABEL_PARAMS(one_of_many, "ZeroOneAdam");
TEST_P(StoppedStep, ARankThatHangsAnywhereInItGivesTheOthersATimeOut) {
    const Healthy step = healthy_step(GetParam());
    ASSERT_GE(step.pieces, 4) << "packing, serving and what is around them";
    std::vector<std::thread> all; // every place at once: most of the time is spent waiting
    for (int64_t piece = 0; piece < step.pieces; ++piece)
        all.emplace_back([=] { stop_at(GetParam(), piece, true, step.timeout_ms); });
    for (std::thread &thread : all) thread.join();
}

LABEL_PARAMS(one_of_many, "OneBitAdam");
LABEL_PARAMS(one_of_many, "OneBitLamb");
TEST_P(StoppedStep, ARankThatAbortsAnywhereInItGivesTheOthersAStatusAtOnce) {
    const Healthy step = healthy_step(GetParam());
    for (int64_t piece = 0; piece < step.pieces; ++piece) stop_at(GetParam(), piece, false, 60000);
}

} // namespace
