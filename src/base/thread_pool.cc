// SPDX-License-Identifier: Apache-2.0
#include "base/thread_pool.h"
#include "base/fork.h"
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dsopt {
namespace {

using Body = FunctionRef<void(int64_t)>;

/// A waiting thread spins for so long before it sleeps. A spinning thread begins its part within a microsecond; waking
/// a sleeping one takes 5 to 50 us. The parallel sections of a step follow each other after a few microseconds, hence
/// threads spin between them. The steps of a training follow each other after milliseconds, in which threads must not
/// occupy cores.
constexpr std::chrono::microseconds kSpin{50};

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory"); // as long as a pause of x86; `yield` takes one cycle on most cores
#endif
}

/// The processors on which this thread may run. Empty if there are more than a cpu_set_t has.
cpu_set_t affinity() {
    cpu_set_t set;
    if (::sched_getaffinity(0, sizeof set, &set) != 0) CPU_ZERO(&set);
    return set;
}

/// A number that one thread waits for and others change.
class alignas(64) Signal { // a cache line of its own
public:
    uint32_t load() const { return value_.load(std::memory_order_acquire); }
    bool replace(uint32_t value, uint32_t by) {
        return value_.compare_exchange_strong(value, by, std::memory_order_acq_rel, std::memory_order_relaxed);
    }
    /// For use while nothing waits and nothing else changes it.
    void reset(uint32_t value) { value_.store(value, std::memory_order_relaxed); }
    /// Returns the new value. The waiting thread sees it no sooner than at the next wake().
    uint32_t add(uint32_t by) { return value_.fetch_add(by) + by; } // sequentially consistent: see wait_while()
    void wake() {
        if (asleep_.load()) ::syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }

    /// Returns once `waits(value)` is false, with that value.
    template <class Waits> uint32_t wait_while(const Waits &waits, bool spins) {
        uint32_t value = load();
        if (spins && waits(value)) {
            const auto end = std::chrono::steady_clock::now() + kSpin;
            do {
                for (int i = 0; i < 16 && waits(value); ++i) {
                    pause();
                    value = load();
                }
            } while (waits(value) && std::chrono::steady_clock::now() < end);
        }
        while (waits(value)) {
            // Either this thread sees the new value here, or the thread that stored it sees `asleep_`.
            asleep_.store(true);
            value = value_.load();
            if (waits(value)) ::syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
            asleep_.store(false);
            value = load();
        }
        return value;
    }

private:
    std::atomic<uint32_t> value_{0};
    std::atomic<bool> asleep_{false};
};
static_assert(sizeof(std::atomic<uint32_t>) == 4, "a futex is a 32-bit word");

/// Threads that one call at a time uses. They are numbered from 1; 0 is the caller. A share of a call is the parts of
/// one thread. Thread i offers the shares of threads 2i + 1 and 2i + 2 before it begins its own, so that the last of
/// many threads begins after a few wake-ups. What a thread has not accepted when the caller's share is done, the caller
/// runs.
class Team {
public:
    Team *next = nullptr; // in the list of all teams
    // Under the lock of that list:
    int busy = 0;       // threads of the call that uses it, or 0
    pthread_t caller{}; // of the last call
    /// Where the threads may run: as the first caller at the time of its call.
    const cpu_set_t processors;

    explicit Team(const cpu_set_t &usable) : processors(usable) {}

    void run(int threads, int64_t parts, Body body, bool spins) noexcept {
        grow(threads - 1);
        body_ = &body, parts_ = parts;
        spins_.store(spins, std::memory_order_relaxed);
        shares_ = std::min(threads, int(workers_.size()) + 1);
        running_.reset(uint32_t(shares_) - 1);
        run_share(0);
        uint32_t left = running_.load();
        for (int share = 1; share < shares_ && left != 0; ++share) {
            if (!workers_[size_t(share) - 1]->accept()) continue;
            run_share(share);
            left = running_.add(uint32_t(-1));
        }
        if (left != 0) running_.wait_while([](uint32_t running) { return running != 0; }, spins);
    }

private:
    struct Worker {
        Worker(Team &of, int share_of_it) : team(of), share(share_of_it) {}
        Team &team;
        const int share;
        Signal offers;                   // odd: a share is offered; even: it was accepted
        std::atomic<int> offered_on{-1}; // the processor of the thread that offered the last share

        static bool is_none(uint32_t offers) { return offers % 2 == 0; }
        void offer() {
            offered_on.store(::sched_getcpu(), std::memory_order_relaxed);
            offers.add(1);
            offers.wake();
        }
        /// The scheduler may wake this thread on the processor of the thread that offered the share, which then cannot
        /// go on, while others are idle.
        void leave_processor() const {
            const int processor = ::sched_getcpu();
            if (processor < 0 || processor != offered_on.load(std::memory_order_relaxed)) return;
            const cpu_set_t usable = affinity();
            cpu_set_t others = usable;
            CPU_CLR(processor, &others);
            if (CPU_COUNT(&others) == 0) return;
            ::sched_setaffinity(0, sizeof others, &others);
            ::sched_setaffinity(0, sizeof usable, &usable);
        }
        /// True for one of the threads that call it after offer().
        bool accept() {
            const uint32_t offered = offers.load();
            return !is_none(offered) && offers.replace(offered, offered + 1);
        }
    };

    void grow(int count) noexcept {
        if (int(workers_.size()) >= count) return;
        // Signals are for the threads of the program, except those that the thread itself causes and those of profilers.
        sigset_t blocked, before;
        ::sigfillset(&blocked);
        for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF})
            ::sigdelset(&blocked, signal);
        ::pthread_sigmask(SIG_BLOCK, &blocked, &before);
        try {
            while (int(workers_.size()) < count) {
                workers_.push_back(std::make_unique<Worker>(*this, int(workers_.size()) + 1));
                pthread_t thread;
                if (::pthread_create(&thread, nullptr, serve, workers_.back().get()) != 0) {
                    workers_.pop_back();
                    break;
                }
                ::pthread_detach(thread);
            }
        } catch (const std::bad_alloc &) {}
        ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    static void *serve(void *of) noexcept {
        Worker &worker = *static_cast<Worker *>(of);
        Team &team = worker.team;
        ::pthread_setname_np(::pthread_self(), "dsopt");
        for (;;) {
            worker.offers.wait_while(Worker::is_none, team.spins_.load(std::memory_order_relaxed));
            worker.leave_processor();
            if (!worker.accept()) continue; // the caller runs the share
            team.run_share(worker.share);
            // Here the call may end. Teams are never destroyed, so at worst this wakes the caller of the next one.
            if (team.running_.add(uint32_t(-1)) == 0) team.running_.wake();
        }
        return nullptr;
    }

    void run_share(int share) {
        for (const int other : {2 * share + 1, 2 * share + 2})
            if (other < shares_) workers_[size_t(other) - 1]->offer();
        for (int64_t i = share; i < parts_; i += shares_) (*body_)(i);
    }

    std::vector<std::unique_ptr<Worker>> workers_;
    // The call. Written before the first share is offered.
    const Body *body_ = nullptr;
    int64_t parts_ = 0;
    int shares_ = 0;
    std::atomic<bool> spins_{false}; // also read between calls
    Signal running_;                 // shares that are not done, except the caller's
};

/// All of a process, for calls to choose from. Their number is that of the calls that ran at the same time.
class Teams {
public:
    /// A team for a call on this many threads. Prefers the team of this thread's last call, whose threads have parts
    /// of the same tensors in their caches, then a team that may run where this thread may. `spins`: there is a
    /// processor for each thread of all calls.
    Team &take(int threads, bool &spins) {
        const pthread_t self = ::pthread_self();
        Team *team = first_;
        while (team != nullptr && (team->busy != 0 || ::pthread_equal(team->caller, self) == 0)) team = team->next;
        if (team == nullptr) team = &team_for(affinity());
        team->caller = self;
        team->busy = threads;
        int all = 0;
        for (const Team *other = first_; other != nullptr; other = other->next)
            if (CPU_EQUAL(&other->processors, &team->processors)) all += other->busy;
        const int processors = CPU_COUNT(&team->processors);
        spins = processors == 0 || all <= processors;
        return *team;
    }

private:
    Team &team_for(const cpu_set_t &usable) {
        for (Team *team = first_; team != nullptr; team = team->next)
            if (team->busy == 0 && CPU_EQUAL(&team->processors, &usable)) return *team;
        auto *const made = new Team(usable);
        made->next = first_;
        return *(first_ = made);
    }
    Team *first_ = nullptr;
};
constinit PerProcess<Teams> all_teams;

} // namespace

int usable_processors() noexcept {
    const cpu_set_t set = affinity();
    const int count = CPU_COUNT(&set);
    return count != 0 ? count : int(std::max(1u, std::thread::hardware_concurrency()));
}

void run_on_pool(int threads, int64_t parts, Body body) noexcept {
    Team *team = nullptr;
    bool spins = false;
    try {
        team = &all_teams.with([&](Teams &teams) -> Team & { return teams.take(threads, spins); });
    } catch (const std::bad_alloc &) {
        for (int64_t i = 0; i < parts; ++i) body(i);
        return;
    }
    team->run(threads, parts, body, spins);
    all_teams.with([team](Teams &) { team->busy = 0; });
}

} // namespace dsopt
