// SPDX-License-Identifier: Apache-2.0
// Several threads use a global for the first time at once.
#include "base/fork.h"
#include <array>
#include <gtest/gtest.h>
#include <thread>
#include <vector>

namespace {

/// An object whose data are never freed: it stays reachable for leak checkers.
template <class T> T &make_kept() {
    static auto &kept = *new std::vector<std::unique_ptr<T>>; // not destroyed at exit, before leaks are looked for
    return *kept.emplace_back(std::make_unique<T>());
}

template <class Body> void in_threads(const Body &body) {
    std::array<std::thread, 4> threads;
    for (size_t i = 0; i < threads.size(); ++i) threads[i] = std::thread([&body, i] { body(i); });
    for (std::thread &thread : threads) thread.join();
}

TEST(PerProcess, ThreadsShareTheDataOfTheFirstUse) {
    dsopt::watch_forks();
    for (int round = 0; round < 200; ++round) {
        auto &shared = make_kept<dsopt::PerProcess<int>>();
        in_threads([&](size_t) { shared.with([](int &count) { ++count; }); });
        ASSERT_EQ(shared.with([](int &count) { return count; }), 4);
    }
}

TEST(Lazy, ThreadsShareTheValueOfTheFirstUse) {
    for (int round = 0; round < 200; ++round) {
        auto &lazy = make_kept<dsopt::Lazy<std::vector<size_t>>>();
        std::array<const std::vector<size_t> *, 4> seen{};
        in_threads([&](size_t i) {
            seen[i] = &lazy.get([i] { return std::vector<size_t>(100, i); });
            EXPECT_EQ(seen[i]->front(), seen[i]->back());
        });
        for (const auto *value : seen) ASSERT_EQ(value, seen[0]);
    }
}

} // namespace
