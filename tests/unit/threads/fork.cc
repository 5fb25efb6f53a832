// SPDX-License-Identifier: Apache-2.0
// A child whose parent used OpenMP by itself and had no context: its threads did not come along, and dsopt had not been
// there to see the fork. Nothing in this program makes a context outside a child.
#include "support/fork.h"
#include "support/harness.h"
#include <sys/prctl.h>

using namespace test;

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

} // namespace
