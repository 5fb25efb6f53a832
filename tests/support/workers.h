// SPDX-License-Identifier: Apache-2.0
// parallel_for hooks for contexts.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace test {

using Body = void (*)(void *arg, int64_t i);

/// A hook with its own threads; the caller works too. Each thread calls `enter` first.
struct Workers {
    int count = 3;
    void (*enter)() = nullptr;
    static void run(void *user, int64_t n, Body body, void *arg) {
        const auto *self = static_cast<const Workers *>(user);
        std::atomic<int64_t> next{0};
        const auto work = [&] {
            for (int64_t i = next++; i < n; i = next++) body(arg, i);
        };
        std::vector<std::thread> threads;
        for (int i = 0; i < self->count; ++i)
            threads.emplace_back([&] {
                if (self->enter != nullptr) self->enter();
                work();
            });
        work();
        for (std::thread &thread : threads) thread.join();
    }
};
inline void run_reversed(void *, int64_t n, Body body, void *arg) {
    for (int64_t i = n - 1; i >= 0; --i) body(arg, i);
}
inline void run_in_order(void *, int64_t n, Body body, void *arg) {
    for (int64_t i = 0; i < n; ++i) body(arg, i);
}

} // namespace test
