// SPDX-License-Identifier: Apache-2.0
// Sharded steps of two ranks in which one call of a comm's library fails or never arrives, each in turn. Every rank gets
// a status in bounded time. What a failed step leaves:
//
//   before the update               everything as it was
//   while LAMB completes its sums   moments of the new step in this rank's part, weights as they were
//   in the gather                   this rank's part and the tensors' counters of the new step, other weights undefined
//
// With the last checkpoint and a new comm the step has the same bits as without a failure.
#pragma once
#include "shard_run.h"
#include "support/numbers.h"
#include "support/scheduling_delay.h"
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <gtest/gtest.h>
#include <mutex>

namespace shard_run {

enum class Fault { none, fails, hangs };

/// Connects ranks, and injects faults into calls of rank 0.
class FaultyFabric {
public:
    virtual ~FaultyFabric() = default;
    /// Prepares the next comm. After arm(), the n-th call of rank 0, counted from 1, has the fault.
    virtual void prepare(Fault fault, int64_t n) = 0;
    /// Called by rank 0, after it has joined.
    virtual void arm() {}
    /// Same as dsopt_comm_create. `flags`: of the comm.
    virtual dsopt_status join(int rank, int timeout_ms, int32_t flags, dsopt_context *context, dsopt_comm **comm) = 0;
    virtual test::Context context(int) const { return test::make_context(1); }
    virtual Memory memory(int) const { return test::host_memory(); }
    /// True if ranks are told that a call of another rank has failed.
    virtual bool reports_failures() const { return true; }
    virtual int work_factor() const { return 1; }
};

struct FaultCase {
    Fault fault;
    uint32_t flags;         // of the optimizer
    int32_t comm_flags = 0; // of the comm
    int32_t algorithm = DSOPT_ALGORITHM_ADAMW;
};

class ShardFaultRun {
public:
    ShardFaultRun(FaultyFabric &fabric, const FaultCase &fault_case) :
        fabric_(fabric),
        case_(fault_case),
        steps_(fault_case.fault == Fault::hangs ? 1 : 2) {
        setting_.flags = case_.flags;
        setting_.algorithm = case_.algorithm;
        setting_.sizes = {2100, 0, 33, 2100}; // two blocks
    }
    /// Runs with a fault in each call in turn, until no call is left.
    void run_each() {
        ASSERT_TRUE(run(Fault::none, 0) == Outcome::succeeded);
        healthy_ = results_;
        int64_t n = 0;
        for (int succeeded = 0; succeeded < 3;) { // steps may ignore the failure of a call
            ASSERT_LT(++n, 1000) << "all calls fail";
            succeeded = run(case_.fault, n) == Outcome::succeeded ? succeeded + 1 : 0;
            if (testing::Test::HasFailure()) return;
        }
        EXPECT_GT(failed_before_gather_, 0);
        EXPECT_GT(failed_in_gather_, 0);
        EXPECT_EQ(moved_moments_, setting_.algorithm == DSOPT_ALGORITHM_LAMB);
        testing::Test::RecordProperty("calls of the last case", std::to_string(n - 3));
    }

private:
    static constexpr int kRanks = 2;
    using Clock = std::chrono::steady_clock;
    enum class Outcome { succeeded, failed, not_joined };
    struct Member {
        Memory memory;
        test::Context context;
        test::Comm comm;
        std::unique_ptr<RankTrainer> trainer;
    };
    struct Result {
        RankTrainer::Saved saved;
        std::string own_weights;
        int64_t calls = 0;
    };
    struct Rank {
        bool joined = false, failed = false, in_gather = false;
        std::vector<Result> after; // each step; [0]: before the first
    };
    using Ranks = std::array<Rank, kRanks>;

    // Where a failure is not reported, the other rank waits until the time-out.
    bool waits(Fault fault) const {
        return fault == Fault::hangs || (fault == Fault::fails && !fabric_.reports_failures());
    }
    int timeout_ms(Fault fault) const { return waits(fault) ? 400 * (test::kSanitized ? 4 : 1) : 60000; }

    Outcome run(Fault fault, int64_t n) {
        // A loaded machine may need longer than the time-out to create a comm, and may pause during a step.
        for (int attempt = 0; attempt < 5; ++attempt) {
            results_ = {};
            late_.clear();
            const Outcome outcome = run_once(fault, n);
            if (outcome != Outcome::not_joined && late_.empty()) return outcome;
        }
        ADD_FAILURE() << where(n) << ": no comm, or a step beyond its bound, in each of five runs:" << late_;
        return Outcome::failed;
    }
    std::string where(int64_t n) const {
        return "call " + std::to_string(n) + ", flags " + std::to_string(case_.flags) + " and " +
               std::to_string(case_.comm_flags);
    }
    Outcome run_once(Fault fault, int64_t n) {
        fabric_.prepare(fault, n);
        std::barrier barrier(kRanks);
        EXPECT_NO_THROW(test::run_ranks(kRanks, [&](int rank) {
            try {
                run_rank(rank, fault, barrier);
            } catch (...) {
                barrier.arrive_and_drop();
                throw;
            }
        })) << where(n);
        const auto &[first, second] = results_;
        if (!first.joined || !second.joined) return Outcome::not_joined;
        if (first.failed && first.after.size() == size_t(steps_)) { // in the last step
            // Calls of rank 0 fail in the order of its step.
            EXPECT_TRUE(first.in_gather || failed_in_gather_ == 0 || waits(fault)) << where(n);
            ++(first.in_gather ? failed_in_gather_ : failed_before_gather_);
        }
        return first.failed || second.failed ? Outcome::failed : Outcome::succeeded;
    }

    void run_rank(int rank, Fault fault, std::barrier<> &barrier) {
        Rank &result = results_[size_t(rank)];
        Member member{fabric_.memory(rank), fabric_.context(rank), nullptr, nullptr};
        barrier.arrive_and_wait(); // the time-out includes the creation
        result.joined = join(member, rank, timeout_ms(fault)) == DSOPT_OK;
        barrier.arrive_and_wait();
        if (!results_[0].joined || !results_[1].joined) return;
        member.trainer = new_trainer(member);
        if (rank == 0) fabric_.arm();
        result.after.push_back(result_of(member));
        for (int64_t call = 1; call <= steps_ && !result.failed; ++call) {
            barrier.arrive_and_wait();
            const int64_t earlier_delay_ms = delay_.total_ms();
            const Clock::time_point begin = Clock::now();
            const dsopt_status status = step(member, rank, call);
            const int64_t ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count(),
                          delay_ms = delay_.total_ms() - earlier_delay_ms,
                          limit_ms = waits(fault) ? timeout_ms(fault) : 0;
            if (status == DSOPT_OK) {
                result.after.push_back(result_of(member));
                if (!healthy_[0].after.empty())
                    expect(result.after.back().saved == healthy_[size_t(rank)].after[size_t(call)].saved,
                           "the bits of a run without a failure");
            } else {
                const std::string text = dsopt_last_error();
                result.failed = true;
                expect(fault != Fault::none, "a step without a failure: " + text);
                if (ms >= limit_ms + 1000 * (test::kSanitized ? 4 : 1) * fabric_.work_factor() + delay_ms) {
                    const std::lock_guard lock(late_mutex_);
                    late_ += '\n' + std::to_string(ms) + " ms, of which " + std::to_string(delay_ms) +
                             " are scheduling delay: " + text;
                }
                expect_failed_step(member, rank, call, status, text);
            }
            barrier.arrive_and_wait();
            if (results_[0].failed || results_[1].failed) return repeat(member, rank, call, barrier);
        }
    }
    void expect_failed_step(const Member &member, int rank, int64_t call, dsopt_status status,
                            const std::string &text) {
        Rank &result = results_[size_t(rank)];
        expect(status == DSOPT_ERR_COMM || (status == DSOPT_ERR_TIMEOUT && waits(case_.fault)),
               "the status of a failed comm: " + std::string(dsopt_status_name(status)) + ": " + text);
        expect(info_of(member.comm.get()).status == status, "a comm with the status of the step: " + text);
        const Result now = result_of(member), &before = result.after.back();
        result.in_gather = now.own_weights != before.own_weights;
        if (result.in_gather) {
            const Result &next = healthy_[size_t(rank)].after[size_t(call)];
            expect(now.saved.state == next.saved.state && now.own_weights == next.own_weights,
                   "this rank's part and the counters of the new step: " + text);
        } else if (now.saved.state != before.saved.state) {
            expect(setting_.algorithm == DSOPT_ALGORITHM_LAMB && now.saved.weights == before.saved.weights,
                   "everything as before the step: " + text);
            moved_moments_ = true;
        } else {
            expect(now.saved == before.saved, "everything as before the step: " + text);
        }
        expect(now.calls == before.calls, "a count of the steps that succeeded: " + text);
        expect(step(member, rank, call) == status, "the same status again");
        expect(result_of(member).saved == now.saved, "state that a refused step leaves as it was");
    }
    /// Repeats a failed step with a new comm and the checkpoint of the step before.
    void repeat(Member &member, int rank, int64_t call, std::barrier<> &barrier) {
        Rank &result = results_[size_t(rank)];
        member.trainer.reset();
        member.comm.reset();
        barrier.arrive_and_wait();
        if (rank == 0) fabric_.prepare(Fault::none, 0);
        barrier.arrive_and_wait();
        must(join(member, rank, 60000), "create a new comm");
        member.trainer = new_trainer(member);
        member.trainer->load(result.after[size_t(call - 1)].saved);
        must(step(member, rank, call), "the same step with a new comm");
        expect(result_of(member).saved == healthy_[size_t(rank)].after[size_t(call)].saved,
               "the bits of a run without a failure, with a new comm");
        if (!result.failed) result.after.pop_back();
    }

    dsopt_status step(const Member &member, int rank, int64_t call) const {
        const bool averages = (case_.flags & DSOPT_OPTIMIZER_AVERAGES) != 0;
        return member.trainer->step(call, averages ? gradients_of(rank) : means_of(kRanks));
    }
    dsopt_status join(Member &member, int rank, int timeout_ms) {
        dsopt_comm *comm = nullptr;
        const dsopt_status status = fabric_.join(rank, timeout_ms, case_.comm_flags, member.context.get(), &comm);
        member.comm.reset(comm);
        return status;
    }
    std::unique_ptr<RankTrainer> new_trainer(const Member &member) const {
        return std::make_unique<RankTrainer>(member.context.get(), member.comm.get(), setting_, member.memory);
    }
    static Result result_of(const Member &member) {
        return {member.trainer->save(), member.trainer->own_weights(), member.trainer->calls()};
    }

    FaultyFabric &fabric_;
    const FaultCase case_;
    const int64_t steps_; // a hanging call takes the time-out, so only those of one step hang
    const test::SchedulingDelay delay_;
    std::mutex late_mutex_;
    std::string late_; // a line for each step of this run that took longer
    Setting setting_;
    Ranks results_, healthy_;
    int failed_before_gather_ = 0, failed_in_gather_ = 0;
    std::atomic<bool> moved_moments_ = false;
};

/// Runs all kinds of sharded steps with each fault.
inline void fail_each_call_of_sharded_steps(FaultyFabric &fabric) {
    constexpr uint32_t averages = DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_AVERAGES;
    for (const FaultCase &fault_case :
         {FaultCase{Fault::fails, DSOPT_OPTIMIZER_SHARD}, FaultCase{Fault::fails, averages},
          FaultCase{Fault::fails, averages, DSOPT_COMM_FLAG_PROVIDER_SUMS},
          FaultCase{Fault::fails, averages, 0, DSOPT_ALGORITHM_LAMB}, FaultCase{Fault::hangs, averages},
          FaultCase{Fault::hangs, averages, DSOPT_COMM_FLAG_PROVIDER_SUMS}}) {
        ShardFaultRun(fabric, fault_case).run_each();
        if (testing::Test::HasFailure()) return;
    }
}

} // namespace shard_run
