// SPDX-License-Identifier: Apache-2.0
// Several threads concurrently use a global for the first time.
#include "base/fork.h"
#include <array>
#include <gtest/gtest.h>
#include <thread>
#include <vector>

namespace inside_first_use_tests {

/// Creates an object that is never destroyed and stays reachable for leak checkers.
template <class T> T &make_immortal() {
    static auto &objects = *new std::vector<std::unique_ptr<T>>; // not destroyed at exit, before the leak check
    return *objects.emplace_back(std::make_unique<T>());
}

template <class Body> void run_in_threads(const Body &body) {
    std::array<std::thread, 4> threads;
    for (size_t i = 0; i < threads.size(); ++i) threads[i] = std::thread([&body, i] { body(i); });
    for (std::thread &thread : threads) thread.join();
}

TEST(PerProcess, ThreadsShareDataOfFirstUse) {
    dsopt::watch_forks();
    for (int round = 0; round < 200; ++round) {
        auto &shared = make_immortal<dsopt::PerProcess<int>>();
        run_in_threads([&](size_t) { shared.with([](int &count) { ++count; }); });
        ASSERT_EQ(shared.with([](int &count) { return count; }), 4);
    }
}

TEST(Lazy, ThreadsShareValueOfFirstUse) {
    for (int round = 0; round < 200; ++round) {
        auto &lazy = make_immortal<dsopt::Lazy<std::vector<size_t>>>();
        std::array<const std::vector<size_t> *, 4> seen{};
        run_in_threads([&](size_t i) {
            seen[i] = &lazy.get([i] { return std::vector<size_t>(100, i); });
            EXPECT_EQ(seen[i]->front(), seen[i]->back());
        });
        for (const auto *value : seen) ASSERT_EQ(value, seen[0]);
    }
}

} // namespace inside_first_use_tests
