// SPDX-License-Identifier: Apache-2.0
// Runs in which one rank does something that the others do not expect. In all of them, each call of each rank returns a
// status in bounded time, a call that fails changes nothing, and the remaining ranks can save and load.
#pragma once
#include "fabric.h"
#include "numbers.h"
#include "onebit_run.h"
#include "scheduling_delay.h"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <gtest/gtest.h>
#include <mutex>
#include <optional>
#include <thread>

namespace test {

enum class RankFault {
    stops_calling,          // makes no more calls, and keeps its comm
    aborts,                 // its comm
    is_aborted,             // by another thread, while it steps or waits
    destroys,               // its optimizer and comm before the last step
    never_joins,            // not even to create the comm
    joins_late,             // after 1.5 times the time-out of the others
    steps_twice,            // in place of once
    skips_step,             // that the others take
    calls_other_collective, // another collective in place of a step
    fewer_tensors,          // one tensor less in its list
    other_size,             // of one tensor
    other_rule,             // another algorithm
    other_hyper,            // other freeze step and no clipping
    no_gradients,           // in one step
    saves,                  // while the others step
    two_threads             // step at once
};
constexpr int kRankFaults = int(RankFault::two_threads) + 1;

struct RankFaultCase {
    RankFault fault;
    int32_t algorithm;
    int ranks, faulty_rank;
    int64_t faulty_call;
    bool checks, averages;

    std::string text() const {
        return "fault " + std::to_string(int(fault)) + ", " + name_of(algorithm) + ", rank " +
               std::to_string(faulty_rank) + " of " + std::to_string(ranks) + ", call " + std::to_string(faulty_call) +
               (checks ? ", checks" : "") + (averages ? ", averages" : "");
    }
};
/// Returns all faults with all algorithms; the other members are random.
inline std::vector<RankFaultCase> rank_fault_cases(uint64_t seed, int max_ranks) {
    std::vector<RankFaultCase> cases;
    const auto draw = [&seed](int below) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        return int((seed >> 33) % uint64_t(below));
    };
    for (int fault = 0; fault < kRankFaults; ++fault)
        for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ONEBIT_ADAM,
                                        DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB}) {
            RankFaultCase fault_case{RankFault(fault), algorithm, 2 + draw(max_ranks - 1), 0, 1 + draw(5),
                                     draw(3) == 0,     false};
            fault_case.faulty_rank = draw(fault_case.ranks);
            fault_case.averages = algorithm >= DSOPT_ALGORITHM_ONEBIT_ADAM && draw(2) == 0;
            cases.push_back(fault_case);
        }
    return cases;
}

/// Maximum over several threads.
class AtomicMaximum {
public:
    void add(int64_t value) {
        int64_t before = value_;
        while (before < value && !value_.compare_exchange_weak(before, value)) {}
    }
    int64_t value() const { return value_; }

private:
    std::atomic<int64_t> value_{INT64_MIN};
};

class RankFaultRun {
public:
    RankFaultRun(Fabric &fabric, const RankFaultCase &fault_case, int timeout_ms, const SchedulingDelay &delay,
                 AtomicMaximum &longest) :
        fabric_(fabric),
        case_(fault_case),
        timeout_ms_(timeout_ms),
        delay_(delay),
        longest_(longest) {}
    /// A case with a call beyond its bound runs again, because a loaded machine may have paused, but a defect returns.
    void run() {
        SCOPED_TRACE(case_.text());
        for (int runs = 0; runs < 3; ++runs) {
            late_.clear();
            fabric_.prepare_comm(case_.ranks);
            EXPECT_NO_THROW(run_ranks(case_.ranks, [&](int rank) { run_rank(rank); }));
            if (late_.empty()) return;
        }
        ADD_FAILURE() << "in each of three runs:" << late_;
    }

private:
    using Clock = std::chrono::steady_clock;
    /// Allowed time for the work of a call: one second, more with sanitizers.
    int64_t slack_ms() const { return 1000 * (kSanitized ? 4 : 1) * fabric_.work_factor(); }
    bool has_fault(int rank, RankFault fault) const { return rank == case_.faulty_rank && case_.fault == fault; }
    void sleep_timeouts(double timeouts) const {
        std::this_thread::sleep_for(std::chrono::milliseconds(int(timeouts * timeout_ms_)));
    }
    /// Checks that a call takes no longer than `limit_ms` plus slack_ms() plus the scheduling delay of the machine.
    template <class Body> auto timed(const char *what, int64_t limit_ms, const Body &body) {
        struct Watch {
            RankFaultRun &run;
            const char *what;
            const int64_t limit;
            const int64_t earlier_delay_ms = run.delay_.total_ms();
            const Clock::time_point begin = Clock::now();
            ~Watch() {
                const auto duration_ms =
                    std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
                const int64_t delay_ms = run.delay_.total_ms() - earlier_delay_ms;
                run.longest_.add(duration_ms - limit - delay_ms);
                if (duration_ms < limit + run.slack_ms() + delay_ms) return;
                const std::lock_guard lock(run.late_mutex_);
                run.late_ += '\n' + std::string(what) + ": " + std::to_string(duration_ms) + " ms, of which " +
                             std::to_string(delay_ms) + " are scheduling delay; allowed: " + std::to_string(limit) +
                             " + " + std::to_string(run.slack_ms());
            }
        } const watch{*this, what, limit_ms};
        return body();
    }
    template <class Body> auto timed(const char *what, const Body &body) { return timed(what, timeout_ms_, body); }

    onebit_run::Setting setting_of(int rank) const {
        onebit_run::Setting setting;
        setting.algorithm = case_.algorithm;
        if (has_fault(rank, RankFault::other_rule))
            setting.algorithm = case_.algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM ? int32_t(DSOPT_ALGORITHM_ADAMW)
                                                                               : int32_t(DSOPT_ALGORITHM_ONEBIT_ADAM);
        setting.sizes = {70, 1, 33};
        if (has_fault(rank, RankFault::fewer_tensors)) setting.sizes.pop_back();
        if (has_fault(rank, RankFault::other_size)) setting.sizes[1] = 9;
        const bool family = setting.algorithm >= DSOPT_ALGORITHM_ONEBIT_ADAM;
        setting.freeze_step = family ? 2 : 0;
        setting.averages = family && case_.averages;
        setting.max_norm = 20;
        if (has_fault(rank, RankFault::other_hyper)) {
            setting.freeze_step += family;
            setting.max_norm = 0;
        }
        setting.flags = case_.checks ? DSOPT_OPTIMIZER_CHECK_RANKS : 0;
        return setting;
    }

    void run_rank(int rank) {
        if (has_fault(rank, RankFault::never_joins)) return;
        const Memory memory = fabric_.memory(rank);
        const Context context = fabric_.context(rank);
        dsopt_comm *made = nullptr;
        const dsopt_status joined =
            timed("create", [&] { return fabric_.join(rank, timeout_ms_, context.get(), &made); });
        Comm comm(made);
        if (joined != DSOPT_OK) {
            expect_unusable_comm(joined, "create");
            EXPECT_EQ(made, nullptr);
            return;
        }
        std::optional<std::thread> second;
        std::vector<dsopt_tensor> list; // of gradients; outlives a step
        dsopt_optimizer *opt = nullptr;
        onebit_run::Setting setting = setting_of(rank);
        setting.change = [&](int64_t call, dsopt_step &step) {
            if (rank != case_.faulty_rank || call != case_.faulty_call) return;
            list.assign(step.grads, step.grads + step.count);
            step.grads = list.data();
            if (case_.fault == RankFault::no_gradients)
                for (dsopt_tensor &grad : list) grad.data = nullptr;
            if (case_.fault == RankFault::two_threads)
                second.emplace([&opt, step] { (void)!dsopt_optimizer_step(opt, &step); });
        };
        std::optional<onebit_run::RankTrainer> trainer(std::in_place, context.get(), comm.get(), rank, setting, memory);
        opt = trainer->opt();
        std::thread aborts;
        dsopt_status failure = DSOPT_OK;
        for (int64_t call = 1; call <= 6 && failure == DSOPT_OK; ++call) {
            if (rank == case_.faulty_rank && call == case_.faulty_call) {
                if (case_.fault == RankFault::stops_calling) sleep_timeouts(2);
                if (case_.fault == RankFault::stops_calling || case_.fault == RankFault::destroys) break;
                if (case_.fault == RankFault::skips_step) continue;
                if (case_.fault == RankFault::aborts) dsopt_comm_abort(comm.get());
                if (case_.fault == RankFault::is_aborted) aborts = std::thread([&] { dsopt_comm_abort(comm.get()); });
                if (case_.fault == RankFault::joins_late) sleep_timeouts(1.5);
                if (case_.fault == RankFault::calls_other_collective)
                    timed("norm", [&] { call_other(*trainer, comm, memory); });
                if (case_.fault == RankFault::steps_twice) (void)!timed("step", [&] { return trainer->step(call); });
                if (case_.fault == RankFault::saves) (void)trainer->save();
            }
            const std::string before = trainer->bytes(false);
            const dsopt_status status = timed("step", [&] { return trainer->step(call); });
            if (second) second->join();
            const bool two = second.has_value(); // two concurrent steps: which of them fails is undefined
            second.reset();
            if (status == DSOPT_OK) continue;
            // 0/1 Adam changes weights before a synchronization.
            if (!two && setting.algorithm != DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
                EXPECT_EQ(trainer->bytes(false), before) << case_.text() << ": " << dsopt_status_name(status);
            }
            if (status == DSOPT_ERR_MISMATCH || (two && status == DSOPT_ERR_BUSY)) continue; // the comm is still usable
            expect_unusable_comm(status, "step");
            failure = status;
        }
        if (aborts.joinable()) aborts.join();
        if (failure != DSOPT_OK) {
            EXPECT_EQ(timed("step", [&] { return trainer->step(7); }), info_of(comm).status) << case_.text();
        }
        if (!has_fault(rank, RankFault::destroys)) {
            std::string saved = timed("save", [&] { return trainer->save(); });
            timed("load", [&] { trainer->load(saved); });
        }
        timed("destroy", fabric_.destroy_timeout_ms(), [&] {
            trainer.reset();
            comm.reset();
        });
    }
    void expect_unusable_comm(dsopt_status status, const char *what) const {
        EXPECT_TRUE(status == DSOPT_ERR_COMM || status == DSOPT_ERR_TIMEOUT || status == DSOPT_ERR_ABORTED)
            << what << ": " << dsopt_status_name(status) << ": " << dsopt_last_error() << "; " << case_.text();
    }
    /// Calls a sum of another size, which no other rank calls.
    static void call_other(const onebit_run::RankTrainer &, const Comm &comm, const Memory &memory) {
        const Block block(memory, std::string(5 * sizeof(float), '\0'));
        const dsopt_tensor tensor = {block.data(), 5, DSOPT_DTYPE_F32, 0};
        (void)!dsopt_comm_all_reduce(comm.get(), &tensor, 1, DSOPT_OP_SUM, memory.stream);
    }

    Fabric &fabric_;
    const RankFaultCase case_;
    const int timeout_ms_;
    const SchedulingDelay &delay_;
    AtomicMaximum &longest_; // time of a call beyond its bound and the scheduling delay
    std::mutex late_mutex_;
    std::string late_; // a line for each call of this run that took longer
};

/// Runs all cases of `seeds` seeds on one worker per fabric. The workers run in parallel, because most of the time is
/// spent waiting.
inline void run_all_rank_faults(const std::vector<std::unique_ptr<Fabric>> &fabrics, uint64_t seeds, int max_ranks,
                                bool fewer = false) {
    std::vector<RankFaultCase> cases;
    const auto first = 1 + uint64_t(testing::GTEST_FLAG(random_seed)); // --gtest_random_seed selects others
    for (uint64_t seed = first; seed < first + seeds; ++seed)
        for (const RankFaultCase &fault_case : rank_fault_cases(seed, max_ranks)) cases.push_back(fault_case);
    if (fewer) // one algorithm per fault
        std::erase_if(cases, [&, i = 0](const RankFaultCase &fault_case) mutable {
            return (i++ + int(fault_case.fault)) % 4 != 0;
        });
    const int timeout_ms = kSanitized ? 600 : 200;
    const SchedulingDelay delay;
    AtomicMaximum longest;
    std::atomic<size_t> next{0};
    std::vector<std::thread> workers;
    for (const auto &fabric : fabrics)
        workers.emplace_back([&, own = fabric.get()] {
            for (size_t i = next++; i < cases.size(); i = next++)
                RankFaultRun(*own, cases[i], timeout_ms, delay, longest).run();
        });
    for (std::thread &worker : workers) worker.join();
    testing::Test::RecordProperty("longest call beyond its bound without the second, ms",
                                  std::to_string(longest.value()));
    testing::Test::RecordProperty("scheduling delay, ms", std::to_string(delay.total_ms()));
}

} // namespace test
