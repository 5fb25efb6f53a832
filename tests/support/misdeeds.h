// SPDX-License-Identifier: Apache-2.0
// Runs in which one rank does something that the others do not expect. In all of them, each call of each rank returns a
// status in bounded time, a call that fails changes nothing, and the remaining ranks can save and load.
#pragma once
#include "fabric.h"
#include "lateness.h"
#include "numbers.h"
#include "onebit_run.h"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <gtest/gtest.h>
#include <mutex>
#include <optional>
#include <thread>

namespace test {

enum class Misdeed {
    leaves,       // makes no more calls, and keeps its comm
    aborts,       // its comm
    is_aborted,   // by another thread, while it steps or waits
    destroys,     // its optimizer and comm before the last step
    never_comes,  // not even to create the comm
    comes_late,   // after 1.5 times the time-out of the others
    steps_twice,  // in place of once
    skips_a_step, // that the others take
    calls_other,  // another collective in place of a step
    has_less,     // one tensor less in its list
    other_size,   // of one tensor
    other_rule,   // another algorithm
    other_hyper,  // other freeze step and no clipping
    no_gradients, // in one step
    saves,        // while the others step
    two_threads   // step at once
};
constexpr int kMisdeeds = int(Misdeed::two_threads) + 1;

struct MisdeedCase {
    Misdeed misdeed;
    int32_t algorithm;
    int ranks, who;
    int64_t when;
    bool checks, averages;

    std::string text() const {
        return "misdeed " + std::to_string(int(misdeed)) + ", " + name_of(algorithm) + ", rank " + std::to_string(who) +
               " of " + std::to_string(ranks) + ", call " + std::to_string(when) + (checks ? ", checks" : "") +
               (averages ? ", averages" : "");
    }
};
/// Returns all misdeeds with all algorithms; the other members are random.
inline std::vector<MisdeedCase> misdeed_cases(uint64_t seed, int most_ranks) {
    std::vector<MisdeedCase> cases;
    const auto draw = [&seed](int below) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        return int((seed >> 33) % uint64_t(below));
    };
    for (int misdeed = 0; misdeed < kMisdeeds; ++misdeed)
        for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ONEBIT_ADAM,
                                        DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB}) {
            MisdeedCase one{Misdeed(misdeed), algorithm, 2 + draw(most_ranks - 1), 0, 1 + draw(5), draw(3) == 0, false};
            one.who = draw(one.ranks);
            one.averages = algorithm >= DSOPT_ALGORITHM_ONEBIT_ADAM && draw(2) == 0;
            cases.push_back(one);
        }
    return cases;
}

/// Maximum over several threads.
class Longest {
public:
    void add(int64_t value) {
        int64_t before = value_;
        while (before < value && !value_.compare_exchange_weak(before, value)) {}
    }
    int64_t value() const { return value_; }

private:
    std::atomic<int64_t> value_{INT64_MIN};
};

class MisdeedRun {
public:
    MisdeedRun(Fabric &fabric, const MisdeedCase &how, int timeout_ms, const Lateness &lateness, Longest &longest) :
        fabric_(fabric),
        how_(how),
        timeout_ms_(timeout_ms),
        lateness_(lateness),
        longest_(longest) {}
    void run() {
        SCOPED_TRACE(how_.text());
        fabric_.renew(how_.ranks);
        EXPECT_NO_THROW(run_ranks(how_.ranks, [&](int rank) { live(rank); }));
    }

private:
    using Clock = std::chrono::steady_clock;
    /// Allowed time for the work of a call: one second, more with sanitizers.
    int64_t slack_ms() const { return 1000 * (kSanitized ? 4 : 1) * fabric_.work_factor(); }
    bool does(int rank, Misdeed misdeed) const { return rank == how_.who && how_.misdeed == misdeed; }
    void nap(double timeouts) const {
        std::this_thread::sleep_for(std::chrono::milliseconds(int(timeouts * timeout_ms_)));
    }
    /// Checks that a call takes no longer than `most_ms` plus slack_ms() plus the scheduling delay of the machine.
    template <class Body> auto timed(const char *what, int64_t most_ms, const Body &body) {
        struct Watch {
            MisdeedRun &run;
            const char *what;
            const int64_t most;
            const int64_t late = run.lateness_.total_ms();
            const Clock::time_point begin = Clock::now();
            ~Watch() {
                const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
                const int64_t was_late = run.lateness_.total_ms() - late;
                EXPECT_LT(took, most + run.slack_ms() + was_late)
                    << what << ", while the machine was " << was_late << " ms late: " << run.how_.text();
                run.longest_.add(took - most - was_late);
            }
        } const watch{*this, what, most_ms};
        return body();
    }
    template <class Body> auto timed(const char *what, const Body &body) { return timed(what, timeout_ms_, body); }

    onebit_run::Setting setting_of(int rank) const {
        onebit_run::Setting setting;
        setting.algorithm = how_.algorithm;
        if (does(rank, Misdeed::other_rule))
            setting.algorithm = how_.algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM ? int32_t(DSOPT_ALGORITHM_ADAMW)
                                                                              : int32_t(DSOPT_ALGORITHM_ONEBIT_ADAM);
        setting.sizes = {70, 1, 33};
        if (does(rank, Misdeed::has_less)) setting.sizes.pop_back();
        if (does(rank, Misdeed::other_size)) setting.sizes[1] = 9;
        const bool family = setting.algorithm >= DSOPT_ALGORITHM_ONEBIT_ADAM;
        setting.freeze_step = family ? 2 : 0;
        setting.averages = family && how_.averages;
        setting.max_norm = 20;
        if (does(rank, Misdeed::other_hyper)) {
            setting.freeze_step += family;
            setting.max_norm = 0;
        }
        setting.flags = how_.checks ? DSOPT_OPTIMIZER_CHECK_RANKS : 0;
        return setting;
    }

    void live(int rank) {
        if (does(rank, Misdeed::never_comes)) return;
        const Memory memory = fabric_.memory(rank);
        const Context context = fabric_.context(rank);
        dsopt_comm *made = nullptr;
        const dsopt_status joined =
            timed("create", [&] { return fabric_.join(rank, timeout_ms_, context.get(), &made); });
        Comm comm(made);
        if (joined != DSOPT_OK) {
            expect_lost(joined, "create");
            EXPECT_EQ(made, nullptr);
            return;
        }
        std::optional<std::thread> second;
        std::vector<dsopt_tensor> list; // of gradients; outlives a step
        dsopt_optimizer *opt = nullptr;
        onebit_run::Setting setting = setting_of(rank);
        setting.change = [&](int64_t call, dsopt_step &step) {
            if (rank != how_.who || call != how_.when) return;
            list.assign(step.grads, step.grads + step.count);
            step.grads = list.data();
            if (how_.misdeed == Misdeed::no_gradients)
                for (dsopt_tensor &grad : list) grad.data = nullptr;
            if (how_.misdeed == Misdeed::two_threads)
                second.emplace([&opt, step] { (void)!dsopt_optimizer_step(opt, &step); });
        };
        std::optional<onebit_run::Rank> trainer(std::in_place, context.get(), comm.get(), rank, setting, memory);
        opt = trainer->opt();
        std::thread aborts;
        dsopt_status lost = DSOPT_OK;
        for (int64_t call = 1; call <= 6 && lost == DSOPT_OK; ++call) {
            if (rank == how_.who && call == how_.when) {
                if (how_.misdeed == Misdeed::leaves) nap(2);
                if (how_.misdeed == Misdeed::leaves || how_.misdeed == Misdeed::destroys) break;
                if (how_.misdeed == Misdeed::skips_a_step) continue;
                if (how_.misdeed == Misdeed::aborts) dsopt_comm_abort(comm.get());
                if (how_.misdeed == Misdeed::is_aborted) aborts = std::thread([&] { dsopt_comm_abort(comm.get()); });
                if (how_.misdeed == Misdeed::comes_late) nap(1.5);
                if (how_.misdeed == Misdeed::calls_other) timed("norm", [&] { call_other(*trainer, comm, memory); });
                if (how_.misdeed == Misdeed::steps_twice) (void)!timed("step", [&] { return trainer->step(call); });
                if (how_.misdeed == Misdeed::saves) (void)trainer->save();
            }
            const std::string before = trainer->bytes(false);
            const dsopt_status status = timed("step", [&] { return trainer->step(call); });
            if (second) second->join();
            const bool two = second.has_value(); // two steps at once: it is undefined which of them returned what
            second.reset();
            if (status == DSOPT_OK) continue;
            // 0/1 Adam changes weights before a synchronization.
            if (!two && setting.algorithm != DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
                EXPECT_EQ(trainer->bytes(false), before) << how_.text() << ": " << dsopt_status_name(status);
            }
            if (status == DSOPT_ERR_MISMATCH || (two && status == DSOPT_ERR_BUSY)) continue; // the comm is still usable
            expect_lost(status, "step");
            lost = status;
        }
        if (aborts.joinable()) aborts.join();
        if (lost != DSOPT_OK) {
            EXPECT_EQ(timed("step", [&] { return trainer->step(7); }), info_of(comm).status) << how_.text();
        }
        if (!does(rank, Misdeed::destroys)) {
            std::string saved = timed("save", [&] { return trainer->save(); });
            timed("load", [&] { trainer->load(saved); });
        }
        timed("destroy", fabric_.farewell_ms(), [&] {
            trainer.reset();
            comm.reset();
        });
    }
    void expect_lost(dsopt_status status, const char *what) const {
        EXPECT_TRUE(status == DSOPT_ERR_COMM || status == DSOPT_ERR_TIMEOUT || status == DSOPT_ERR_ABORTED)
            << what << ": " << dsopt_status_name(status) << ": " << dsopt_last_error() << "; " << how_.text();
    }
    /// Calls a sum of another size, which no other rank calls.
    static void call_other(const onebit_run::Rank &, const Comm &comm, const Memory &memory) {
        const Block block(memory, std::string(5 * sizeof(float), '\0'));
        const dsopt_tensor tensor = {block.data(), 5, DSOPT_DTYPE_F32, 0};
        (void)!dsopt_comm_all_reduce(comm.get(), &tensor, 1, DSOPT_OP_SUM, memory.stream);
    }

    Fabric &fabric_;
    const MisdeedCase how_;
    const int timeout_ms_;
    const Lateness &lateness_;
    Longest &longest_; // time of a call beyond its bound and the scheduling delay
};

/// Runs all cases of `seeds` seeds on one worker per fabric. The workers run in parallel, because most of the time is
/// spent waiting.
inline void commit_all_misdeeds(const std::vector<std::unique_ptr<Fabric>> &fabrics, uint64_t seeds, int most_ranks,
                                bool fewer = false) {
    std::vector<MisdeedCase> cases;
    const auto first = 1 + uint64_t(testing::GTEST_FLAG(random_seed)); // --gtest_random_seed selects others
    for (uint64_t seed = first; seed < first + seeds; ++seed)
        for (const MisdeedCase &one : misdeed_cases(seed, most_ranks)) cases.push_back(one);
    if (fewer) // one algorithm per misdeed
        std::erase_if(cases, [&, i = 0](const MisdeedCase &one) mutable { return (i++ + int(one.misdeed)) % 4 != 0; });
    const int timeout_ms = kSanitized ? 600 : 200;
    const Lateness lateness;
    Longest longest;
    std::atomic<size_t> next{0};
    std::vector<std::thread> workers;
    for (const auto &fabric : fabrics)
        workers.emplace_back([&, own = fabric.get()] {
            for (size_t i = next++; i < cases.size(); i = next++)
                MisdeedRun(*own, cases[i], timeout_ms, lateness, longest).run();
        });
    for (std::thread &worker : workers) worker.join();
    testing::Test::RecordProperty("longest call beyond its bound without the second, ms",
                                  std::to_string(longest.value()));
    testing::Test::RecordProperty("machine late, ms", std::to_string(lateness.total_ms()));
}

} // namespace test
