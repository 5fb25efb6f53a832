// SPDX-License-Identifier: Apache-2.0
// A child whose parent used OpenMP by itself and had no context: its threads did not come along, and dsopt had not been
// there to see the fork. Nothing in this program makes a context outside a child, except the last test.
#include "support/fork.h"
#include "support/harness.h"
#include <sys/prctl.h>

using namespace test;

namespace {
std::atomic<int> g_asked{0};
}
/// In place of the runtime's. LLVM's waits for ever in a child if a thread of the parent was initializing the runtime.
extern "C" int omp_get_max_threads() {
    ++g_asked;
    return 2;
}

namespace {

/// The caller's own loop, which leaves the runtime's threads behind.
int64_t use_openmp() {
    int64_t sum = 0;
#pragma omp parallel for num_threads(4) reduction(+ : sum)
    for (int64_t i = 0; i < 1000; ++i) sum += i;
    return sum;
}

std::string trained(int32_t threads) {
    const Trainer trainer(shapes_of({400000}), make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(0.5),
                          context_desc(threads));
    trainer.train(1, 2);
    return trainer.text();
}

TEST(Fork, WhatAChildMakesStepsThoughItsParentUsedOpenMpBeforeAnyContext) {
    ASSERT_EQ(use_openmp(), 499500);
    EXPECT_TRUE(holds_in_child([](const auto &expect) {
        const std::string alone = trained(1);
        for (const int32_t threads : {4, 100, 0}) expect(trained(threads) == alone);
        expect(bool(holds_in_child([&](const auto &expect) { expect(trained(4) == alone); })));
    }));
}

TEST(Fork, ANameWithParenthesesDoesNotHideIt) {
    ASSERT_EQ(use_openmp(), 499500);
    EXPECT_TRUE(holds_in_child([](const auto &expect) {
        expect(::prctl(PR_SET_NAME, ") S 1 (", 0, 0, 0) == 0);
        expect(!trained(4).empty());
    }));
}

/// Into how many pieces a context with the default number of threads cuts a long list.
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

TEST(Fork, AChildTakesItsThreadCountFromTheEnvironment) {
    EXPECT_EQ(default_pieces(), 2); // the parent's
    EXPECT_GT(g_asked, 0);
    g_asked = 0;
    EXPECT_TRUE(holds_in_child([](const auto &expect) {
        for (const char *const wanted : {"3", "5,2", " 7 "}) {
            expect(::setenv("OMP_NUM_THREADS", wanted, 1) == 0);
            expect(default_pieces() == std::atoi(wanted));
        }
        ::unsetenv("OMP_NUM_THREADS");
        const auto cores = int64_t(std::thread::hardware_concurrency());
        expect(cores == 1 || default_pieces() == cores);
        for (const char *const wanted : {"", "many", "-1", "0"}) {
            expect(::setenv("OMP_NUM_THREADS", wanted, 1) == 0);
            expect(cores == 1 || default_pieces() == cores);
        }
        expect(g_asked == 0);
    }));
}

} // namespace
