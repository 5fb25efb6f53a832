// SPDX-License-Identifier: Apache-2.0
// Bounded waits for library calls that may never return.
#pragma once
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace dsopt {

/// A point in time; never reached for a negative number of milliseconds.
class Deadline {
public:
    explicit Deadline(int timeout_ms) :
        bounded_(timeout_ms >= 0),
        end_(std::chrono::steady_clock::now() + std::chrono::milliseconds(bounded_ ? timeout_ms : 0)) {}
    bool passed() const { return bounded_ && std::chrono::steady_clock::now() >= end_; }
    /// Waits for done(), which changes with `lock` held. Returns false if done() was still false at the deadline.
    template <class Done>
    bool wait(std::condition_variable &changed, std::unique_lock<std::mutex> &lock, const Done &done) const {
        if (bounded_) return changed.wait_until(lock, end_, done);
        changed.wait(lock, done);
        return true;
    }
    template <class T> bool wait(const std::future<T> &result) const {
        if (bounded_) return result.wait_until(end_) == std::future_status::ready;
        result.wait();
        return true;
    }

private:
    bool bounded_;
    std::chrono::steady_clock::time_point end_;
};

/// Calls is_done() until it returns true. Returns false if the deadline passed first.
template <class IsDone> bool poll(const Deadline &deadline, const IsDone &is_done) {
    for (int calls = 1; !is_done(); ++calls) {
        if (deadline.passed()) return false;
        // Yields at first, because most exchanges are short; later sleeps 50 us and finally 1 ms per call.
        if (calls < 200)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(std::chrono::microseconds(calls < 1200 ? 50 : 1000));
    }
    return true;
}

/// Runs `body` on a separate thread. Returns nullopt if `body` throws, if no thread can be created, or if `body` has
/// not returned by the deadline. In the last case the thread is detached and keeps what `body` holds.
template <class Body> auto run_bounded(const Deadline &deadline, Body body) -> std::optional<decltype(body())> {
    try {
        std::packaged_task<decltype(body())()> task(std::move(body));
        auto result = task.get_future();
        std::thread thread(std::move(task));
        if (!deadline.wait(result)) {
            thread.detach();
            return {};
        }
        thread.join();
        return result.get();
    } catch (...) { return {}; }
}

} // namespace dsopt
