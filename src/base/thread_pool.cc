// SPDX-License-Identifier: Apache-2.0
#include "base/thread_pool.h"
#include "base/fork.h"
#include "base/not_copied.h"
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

/// Time for which a waiting thread spins before it sleeps. A spinning thread begins its part within a microsecond;
/// waking a sleeping thread takes 5 to 50 us. The parallel sections of a step follow each other after a few
/// microseconds, hence threads spin between them. The steps of a training follow each other after milliseconds,
/// during which idle threads must not occupy cores.
constexpr std::chrono::microseconds kSpin{50};

/// Least stack of a thread, if the default is smaller: it may be a limit of the process that is for other threads, or
/// musl's 128 KiB. A part of a step uses less than 64 KiB, and the rest is for sanitizers and thread-local variables.
constexpr size_t kLeastStack = size_t(512) << 10;

/// Attributes of a new thread.
class Attributes : NotCopied {
public:
    Attributes() {
        valid_ = ::pthread_attr_init(&attributes_) == 0;
        size_t bytes = 0;
        if (valid_ && ::pthread_attr_getstacksize(&attributes_, &bytes) == 0 && bytes < kLeastStack)
            (void)::pthread_attr_setstacksize(&attributes_, kLeastStack);
    }
    ~Attributes() {
        if (valid_) ::pthread_attr_destroy(&attributes_);
    }
    /// NULL: the default.
    const pthread_attr_t *get() const { return valid_ ? &attributes_ : nullptr; }

private:
    pthread_attr_t attributes_;
    bool valid_;
};

/// While it lives, new threads block signals, which the program's threads then handle. The exceptions are signals that
/// a thread itself causes, and the signal of profilers.
class BlockedSignals : NotCopied {
public:
    BlockedSignals() {
        sigset_t blocked;
        ::sigfillset(&blocked);
        for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF})
            ::sigdelset(&blocked, signal);
        ::pthread_sigmask(SIG_BLOCK, &blocked, &before_);
    }
    ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

private:
    sigset_t before_;
};

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory"); // takes as long as a pause of x86; `yield` takes one cycle on most cores
#endif
}

/// Returns the processors on which this thread may run; an empty set if the machine has more than a cpu_set_t can hold.
cpu_set_t affinity() {
    cpu_set_t set;
    if (::sched_getaffinity(0, sizeof set, &set) != 0) CPU_ZERO(&set);
    return set;
}

/// A number that one thread waits for and others change.
class alignas(64) Signal { // on a separate cache line
public:
    uint32_t load() const { return value_.load(std::memory_order_acquire); }
    bool replace(uint32_t value, uint32_t desired) {
        return value_.compare_exchange_strong(value, desired, std::memory_order_acq_rel, std::memory_order_relaxed);
    }
    /// May be called only while no thread waits and no other thread changes the number.
    void reset(uint32_t value) { value_.store(value, std::memory_order_relaxed); }
    /// Returns the new value. A thread that sleeps in wait_while() sees it only after wake(). Sequentially consistent:
    /// see wait_while().
    uint32_t add(uint32_t increment) { return value_.fetch_add(increment) + increment; }
    void wake() {
        if (asleep_.load()) ::syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }

    /// Waits until `waits(value)` is false, and returns that value.
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

/// A group of threads that one call at a time uses. They are numbered from 1; 0 is the caller. A share is the set of
/// parts that one thread runs. Thread i offers the shares of threads 2i + 1 and 2i + 2 before it begins its own share,
/// so that the last of many threads begins after a few wake-ups. The caller runs each share that its thread has not
/// accepted when the caller's own share is done.
class Team {
public:
    Team *next = nullptr; // in the list of all teams
    // Protected by the lock of that list:
    int busy = 0;       // number of threads of the running call, or 0
    pthread_t caller{}; // the thread that made the last call
    /// Processors on which the threads may run: those of the first caller at the time of its call.
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
        Worker(Team &its_team, int its_share) : team(its_team), share(its_share) {}
        Team &team;
        const int share;
        Signal offers;                   // odd: a share is offered; even: it was accepted
        std::atomic<int> offered_on{-1}; // the processor of the thread that offered the last share

        static bool has_no_offer(uint32_t offers) { return offers % 2 == 0; }
        void offer() {
            offered_on.store(::sched_getcpu(), std::memory_order_relaxed);
            offers.add(1);
            offers.wake();
        }
        /// Moves this thread off the processor of the thread that offered the share. The scheduler may wake this thread
        /// there even though other processors are idle, and the offering thread could not continue.
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
        /// True for exactly one of the threads that call this function after offer().
        bool accept() {
            const uint32_t offered = offers.load();
            return !has_no_offer(offered) && offers.replace(offered, offered + 1);
        }
    };

    void grow(int count) noexcept {
        if (int(workers_.size()) >= count) return;
        const BlockedSignals blocked;
        try {
            const Attributes attributes;
            while (int(workers_.size()) < count) {
                workers_.push_back(std::make_unique<Worker>(*this, int(workers_.size()) + 1));
                pthread_t thread;
                if (::pthread_create(&thread, attributes.get(), run_worker, workers_.back().get()) != 0) {
                    workers_.pop_back();
                    break;
                }
                ::pthread_detach(thread);
            }
        } catch (const std::bad_alloc &) {}
    }

    static void *run_worker(void *argument) noexcept {
        Worker &worker = *static_cast<Worker *>(argument);
        Team &team = worker.team;
        ::pthread_setname_np(::pthread_self(), "dsopt");
        for (;;) {
            worker.offers.wait_while(Worker::has_no_offer, team.spins_.load(std::memory_order_relaxed));
            worker.leave_processor();
            if (!worker.accept()) continue; // the caller runs the share
            team.run_share(worker.share);
            // After add() the call may end. Teams are never destroyed, so at worst wake() wakes the caller of the next
            // call.
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
    // The running call. These members are written before the first share is offered.
    const Body *body_ = nullptr;
    int64_t parts_ = 0;
    int shares_ = 0;
    std::atomic<bool> spins_{false}; // also read between calls
    Signal running_;                 // number of unfinished shares, excluding the caller's
};

/// All teams of a process. Their number is the largest number of calls that ran at the same time.
class Teams {
public:
    /// Returns a team for a call on `threads` threads. Prefers the team of this thread's last call, whose threads have
    /// parts of the same tensors in their caches, then a team with this thread's processors. Sets `spins` if there is a
    /// processor for each thread of all running calls.
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

bool start_library_thread(pthread_t &thread, void *(*run)(void *), void *argument) noexcept {
    const BlockedSignals blocked;
    const Attributes attributes;
    return ::pthread_create(&thread, attributes.get(), run, argument) == 0;
}

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
