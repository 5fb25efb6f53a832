// SPDX-License-Identifier: Apache-2.0
#include "base/thread_pool.h"
#include "base/fork.h"
#include "support/fork.h"
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <dlfcn.h>
#include <pthread.h>
#include <set>
#include <thread>
#include <vector>

using namespace test;

namespace inside_thread_pool_tests {
std::atomic<int> g_started{0};  // number of threads started since the last reset
std::atomic<int> g_limit{-1};   // number of threads that may be started; -1: no limit
std::atomic<size_t> g_stack{0}; // of the last thread that was started
} // namespace inside_thread_pool_tests

/// Overrides the function of the C library. Counts threads, and fails like a limit on the processes of the user.
extern "C" int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                              void *argument) {
    using namespace inside_thread_pool_tests;
    using Create = int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    static const auto next = reinterpret_cast<Create>(::dlsym(RTLD_NEXT, "pthread_create"));
    if (g_limit >= 0 && g_started >= g_limit) return EAGAIN;
    ++g_started;
    size_t stack = 0;
    if (attributes != nullptr) pthread_attr_getstacksize(attributes, &stack);
    g_stack = stack;
    return next(thread, attributes, run, argument);
}

namespace inside_thread_pool_tests {

using dsopt::run_on_pool;

/// Returns how often each part ran.
std::vector<int> run_counts(int threads, int64_t parts) {
    std::vector<std::atomic<int>> counts(static_cast<size_t>(parts));
    run_on_pool(threads, parts, [&](int64_t i) { ++counts[size_t(i)]; });
    return {counts.begin(), counts.end()};
}

class ThreadPool : public testing::Test {
protected:
    void SetUp() override { dsopt::watch_forks(); }
    void TearDown() override { g_limit = -1; }
};

TEST_F(ThreadPool, RunsEachPartOnce) {
    for (const int threads : {1, 2, 3, 4, 9})
        for (const int64_t parts : {0, 1, threads - 1, threads, threads + 1, 5 * threads + 2})
            EXPECT_EQ(run_counts(threads, parts), std::vector<int>(size_t(parts), 1)) << threads << ' ' << parts;
}

#if defined(__GLIBC__)
/// Sets the default size of stacks of new threads during its lifetime.
class DefaultStack {
public:
    explicit DefaultStack(size_t bytes) {
        pthread_getattr_default_np(&before_);
        pthread_attr_t changed;
        pthread_getattr_default_np(&changed);
        pthread_attr_setstacksize(&changed, bytes);
        EXPECT_EQ(pthread_setattr_default_np(&changed), 0);
        pthread_attr_destroy(&changed);
    }
    DefaultStack(const DefaultStack &) = delete;
    DefaultStack &operator=(const DefaultStack &) = delete;
    ~DefaultStack() {
        pthread_setattr_default_np(&before_);
        pthread_attr_destroy(&before_);
    }

private:
    pthread_attr_t before_;
};

TEST_F(ThreadPool, StartsThreadsWithAtLeast512KiBOfStack) {
    int threads = 32; // more than other tests start
    for (const auto &[usual, wanted] :
         {std::pair(size_t(64) << 10, size_t(512) << 10), {size_t(2) << 20, size_t(2) << 20}}) {
        const DefaultStack stack(usual);
        g_started = 0;
        run_counts(threads, threads);
        EXPECT_GT(g_started, 0);
        EXPECT_GE(g_stack, wanted); // the thread sanitizer adds to it
        threads *= 2;
    }
}
#endif

TEST_F(ThreadPool, RunsEachPartOnceInRepeatedCalls) {
    for (int round = 0; round < 20000; ++round) {
        const int threads = 2 + round % 4;
        ASSERT_EQ(run_counts(threads, threads), std::vector<int>(size_t(threads), 1)) << round;
    }
}

TEST_F(ThreadPool, MakesWritesOfPartsVisible) {
    std::vector<int64_t> values(64, 0);
    for (int64_t round = 1; round <= 2000; ++round) {
        run_on_pool(4, 4, [&](int64_t part) { // not atomic
            for (size_t i = size_t(part) * 16; i < size_t(part + 1) * 16; ++i) ++values[i];
        });
        ASSERT_EQ(values, std::vector<int64_t>(64, round));
    }
}

TEST_F(ThreadPool, RunsPartsConcurrently) {
    std::atomic<int> inside{0};
    run_on_pool(3, 3, [&](int64_t) { // returns only if three threads run it concurrently
        ++inside;
        while (inside < 3) std::this_thread::yield();
    });
    EXPECT_EQ(inside, 3);
}

TEST_F(ThreadPool, ReusesThreads) {
    (void)run_counts(4, 4);
    g_started = 0;
    for (int round = 0; round < 100; ++round) (void)run_counts(2 + round % 3, 4);
    EXPECT_EQ(g_started, 0);
}

TEST_F(ThreadPool, RunsConcurrentCalls) {
    std::atomic<int> inside{0};
    std::array<std::thread, 4> callers;
    for (std::thread &caller : callers)
        caller = std::thread([&] {
            run_on_pool(2, 2, [&](int64_t) {
                ++inside;
                while (inside < 8) std::this_thread::yield();
            });
            for (int round = 0; round < 500; ++round) EXPECT_EQ(run_counts(3, 5), std::vector<int>(5, 1));
        });
    for (std::thread &caller : callers) caller.join();
    EXPECT_EQ(inside, 8);
}

TEST_F(ThreadPool, RunsNestedCalls) {
    std::atomic<int> count{0};
    run_on_pool(3, 3, [&](int64_t) { run_on_pool(3, 3, [&](int64_t) { ++count; }); });
    EXPECT_EQ(count, 9);
}

TEST_F(ThreadPool, ReusesThreadsOfCaller) {
    std::array<std::set<pthread_t>, 2> seen;
    std::atomic<int> round{0};
    const auto ids = [](std::set<pthread_t> &into) {
        std::array<pthread_t, 3> of_parts{};
        std::atomic<int> inside{0};
        run_on_pool(3, 3, [&](int64_t part) {
            of_parts[size_t(part)] = ::pthread_self();
            ++inside;
            while (inside < 3) std::this_thread::yield();
        });
        into.insert(of_parts.begin(), of_parts.end());
    };
    std::array<std::thread, 2> callers;
    for (size_t i = 0; i < callers.size(); ++i)
        callers[i] = std::thread([&, i] {
            ids(seen[i]);
            ++round;
            while (round < 2) std::this_thread::yield(); // both callers have completed their first call
            for (int call = 0; call < 50; ++call) ids(seen[i]);
        });
    for (std::thread &caller : callers) caller.join();
    for (const auto &set : seen) EXPECT_LE(set.size(), 5U) << "the team may change only once, after the first call";
}

#if !defined(__SANITIZE_THREAD__) // under which no threads can start in a child
TEST_F(ThreadPool, StartsNewThreadsInChild) {
    (void)run_counts(4, 4);
    EXPECT_TRUE(passes_in_child([](const auto &expect) {
        g_started = 0;
        expect(run_counts(4, 9) == std::vector<int>(9, 1));
        expect(g_started == 3);
        expect(bool(passes_in_child([](const auto &expect) { expect(run_counts(4, 9) == std::vector<int>(9, 1)); })));
    }));
    EXPECT_EQ(run_counts(4, 9), std::vector<int>(9, 1));
}

TEST_F(ThreadPool, RunsInChildForkedDuringCall) {
    std::atomic<bool> inside{false}, leaves{false};
    std::thread other([&] {
        run_on_pool(2, 2, [&](int64_t) {
            inside = true;
            while (!leaves) std::this_thread::yield();
        });
    });
    while (!inside) std::this_thread::yield();
    EXPECT_TRUE(passes_in_child([](const auto &expect) { expect(run_counts(4, 9) == std::vector<int>(9, 1)); }));
    leaves = true;
    other.join();
}

#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 34)
TEST_F(ThreadPool, RunsInChildWithoutForkHandlers) {
    (void)run_counts(4, 4);
    const auto runs = [](const auto &expect) { expect(run_counts(4, 9) == std::vector<int>(9, 1)); };
    EXPECT_TRUE(passes_in_child(runs, ::_Fork));
}
#endif

TEST_F(ThreadPool, RunsAllPartsIfThreadsCannotBeStarted) {
    for (const int limit : {0, 1, 2}) // each in a new process without threads
        EXPECT_TRUE(passes_in_child([limit](const auto &expect) {
            g_started = 0;
            g_limit = limit;
            expect(run_counts(6, 11) == std::vector<int>(11, 1));
            expect(g_started == limit);
            expect(run_counts(6, 11) == std::vector<int>(11, 1));
            g_limit = -1;
            expect(run_counts(6, 11) == std::vector<int>(11, 1));
            expect(g_started == 5); // the remaining threads have been started
        })) << limit;
}
#endif

TEST_F(ThreadPool, BlocksSignalsExceptOfCrashesAndProfilers) {
    std::array<sigset_t, 2> masks{};
    std::atomic<int> inside{0};
    run_on_pool(2, 2, [&](int64_t part) {
        ::pthread_sigmask(SIG_SETMASK, nullptr, &masks[size_t(part)]);
        ++inside;
        while (inside < 2) std::this_thread::yield();
    });
    EXPECT_EQ(::sigismember(&masks[0], SIGTERM), 0);
    for (const int signal : {SIGTERM, SIGINT, SIGCHLD, SIGALRM, SIGUSR1})
        EXPECT_EQ(::sigismember(&masks[1], signal), 1);
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGPROF})
        EXPECT_EQ(::sigismember(&masks[1], signal), 0) << "crash handlers and profilers receive these signals";
}

TEST_F(ThreadPool, NamesItsThreads) {
    std::array<char, 16> name{};
    std::atomic<int> inside{0};
    run_on_pool(2, 2, [&](int64_t part) {
        if (part == 1) ::pthread_getname_np(::pthread_self(), name.data(), name.size());
        ++inside;
        while (inside < 2) std::this_thread::yield();
    });
    EXPECT_STREQ(name.data(), "dsopt");
}

} // namespace inside_thread_pool_tests
