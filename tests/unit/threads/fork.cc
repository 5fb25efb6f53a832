// SPDX-License-Identifier: Apache-2.0
// Children of a process without a context, in which dsopt has not installed its fork handlers, and the default number
// of threads. Before DefaultThreads, only children create contexts.
#include "support/fork.h"
#include "support/harness.h"
#include <sched.h>

using namespace test;

namespace threads_fork_tests {

/// Forks without running handlers of pthread_atfork, if the C library has such a function.
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 34)
constexpr auto kBareFork = ::_Fork;
#else
constexpr auto kBareFork = ::fork;
#endif

std::string trained(int32_t threads) {
    const Trainer trainer(shapes_of({400000}), make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(0.5),
                          context_desc(threads));
    trainer.train(1, 2);
    return trainer.text();
}

TEST(Fork, ChildStepsIfParentHadNoContext) {
    EXPECT_TRUE(passes_in_child([](const auto &expect) {
        const std::string expected = trained(1);
        for (const int32_t threads : {4, 100, 0}) expect(trained(threads) == expected);
        const auto trains_identically = [&](const auto &expect) { expect(trained(4) == expected); };
        expect(bool(passes_in_child(trains_identically)));
        expect(bool(passes_in_child(trains_identically, kBareFork)));
    }));
}

/// Returns the number of pieces into which a context with the default number of threads partitions a long list.
int64_t default_pieces() {
    int64_t most = 0;
    dsopt_context_desc desc = context_desc(0);
    desc.user = &most;
    desc.parallel_for = [](void *user, int64_t n, void (*body)(void *, int64_t), void *arg) {
        *static_cast<int64_t *>(user) = std::max(*static_cast<int64_t *>(user), n);
        for (int64_t i = 0; i < n; ++i) body(arg, i);
    };
    const Trainer trainer(shapes_of({4000000}), make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(), desc);
    trainer.train(1);
    return most;
}

class DefaultThreads : public testing::Test {
protected:
    void SetUp() override { TearDown(); }
    void TearDown() override {
        for (const char *const name : {"OMP_NUM_THREADS", "OMP_THREAD_LIMIT"}) ::unsetenv(name);
    }
};

TEST_F(DefaultThreads, FollowEnvironment) {
    for (const char *const wanted : {"3", "5,2", " 7 "}) {
        ASSERT_EQ(::setenv("OMP_NUM_THREADS", wanted, 1), 0);
        EXPECT_EQ(default_pieces(), std::atoi(wanted));
    }
    ASSERT_EQ(::setenv("OMP_THREAD_LIMIT", "4", 1), 0);
    EXPECT_EQ(default_pieces(), 4);
    ASSERT_EQ(::setenv("OMP_NUM_THREADS", "2", 1), 0);
    EXPECT_EQ(default_pieces(), 2);
}

TEST_F(DefaultThreads, AreReported) {
    const auto info_of = [](const dsopt_context_desc &desc) {
        const Context context = make_context(desc);
        DSOPT_NEW(dsopt_context_info, info);
        EXPECT_OK(dsopt_context_query(context.get(), &info));
        return info;
    };
    ASSERT_EQ(::setenv("OMP_NUM_THREADS", "3", 1), 0);
    dsopt_context_desc desc = context_desc(0);
    EXPECT_EQ(info_of(desc).threads, 3);
    desc.threads = 2;
    desc.log_level = DSOPT_LOG_INFO;
    const dsopt_context_info info = info_of(desc);
    EXPECT_EQ(info.threads, 2);
    EXPECT_EQ(info.log_level, DSOPT_LOG_INFO);
    EXPECT_EQ(info.backend, DSOPT_BACKEND_CPU);
    EXPECT_EQ(info.device, 0);
    EXPECT_EQ(info.size, sizeof info);

    const Context context = make_context();
    DSOPT_NEW(dsopt_context_info, given);
    EXPECT_TRUE(refused(dsopt_context_query(nullptr, &given), DSOPT_ERR_ARGUMENT, "ctx is NULL"));
    EXPECT_TRUE(refused(dsopt_context_query(context.get(), nullptr), DSOPT_ERR_ARGUMENT, "dsopt_context_info is NULL"));
    given.size = 8;
    EXPECT_TRUE(refused(dsopt_context_query(context.get(), &given), DSOPT_ERR_VERSION, "dsopt_context_info.size is 8"));
}

TEST_F(DefaultThreads, EqualUsableProcessorsWithoutEnvironment) {
    cpu_set_t all;
    ASSERT_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
    const int64_t processors = CPU_COUNT(&all);
    const auto expect_processors = [&](int64_t count) {
        EXPECT_EQ(default_pieces(), count == 1 ? 0 : count); // a single piece is not passed to parallel_for
    };
    expect_processors(processors);
    for (const char *const wanted : {"", "many", "-1", "0"}) {
        ASSERT_EQ(::setenv("OMP_NUM_THREADS", wanted, 1), 0);
        expect_processors(processors);
    }
    cpu_set_t single;
    CPU_ZERO(&single);
    int first = 0;
    while (!CPU_ISSET(first, &all)) ++first;
    CPU_SET(first, &single);
    ASSERT_EQ(::sched_setaffinity(0, sizeof single, &single), 0);
    expect_processors(1);
    ASSERT_EQ(::sched_setaffinity(0, sizeof all, &all), 0);
}

} // namespace threads_fork_tests
