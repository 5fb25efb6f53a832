// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <dsopt.hpp>
#include <functional>
#include <gtest/gtest.h>
#include <thread>

/// Expects `statement` to throw exactly `kind`, with `words` in its text.
#define EXPECT_REFUSED(statement, kind, words)                                                                         \
    try {                                                                                                              \
        statement;                                                                                                     \
        ADD_FAILURE() << "nothing was thrown";                                                                         \
    } catch (const dsopt::error &refused) {                                                                            \
        EXPECT_EQ(typeid(refused), typeid(kind)) << refused.what();                                                    \
        EXPECT_NE(std::string(refused.text()).find(words), std::string::npos) << refused.what();                       \
    }

/// Ends the test if a C call fails.
#define MUST(call) ASSERT_EQ(call, DSOPT_OK) << dsopt_last_error()

/// Different values, the same in every run.
inline std::vector<float> values(std::size_t count, std::uint32_t seed) {
    std::vector<float> made(count);
    for (float &value : made) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<float>(seed >> 8) * 0x1p-24f - 0.5f;
    }
    return made;
}

/// Runs all pieces on the calling thread and counts the calls.
struct SerialPool {
    int calls = 0;
    void operator()(std::int64_t n, dsopt::pieces run) {
        ++calls;
        for (std::int64_t i = 0; i < n; ++i) run(i);
    }
};

/// An exception that is not derived from std::exception.
struct Refusal {
    int number;
};

/// Returns the number of the Refusal that a call throws, 0 if it throws none.
template <class F> int refusal(F &&call) {
    try {
        call();
    } catch (const Refusal &refused) { return refused.number; }
    return 0;
}

/// Calls `body(rank)` on one thread per rank.
inline void on_ranks(int ranks, const std::function<void(int)> &body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) threads.emplace_back(body, r);
    for (std::thread &thread : threads) thread.join();
}
