// SPDX-License-Identifier: Apache-2.0
// Calls into libraries that may never come back.
#pragma once
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace dsopt {

/// A point in time; far away for a negative number of milliseconds.
class Deadline {
public:
    explicit Deadline(int timeout_ms) :
        bounded_(timeout_ms >= 0),
        at_(std::chrono::steady_clock::now() + std::chrono::milliseconds(bounded_ ? timeout_ms : 0)) {}
    bool over() const { return bounded_ && std::chrono::steady_clock::now() >= at_; }
    /// Waits for done(), which changes with `lock` held. False: it was not by then.
    template <class Done>
    bool wait(std::condition_variable &changed, std::unique_lock<std::mutex> &lock, const Done &done) const {
        if (bounded_) return changed.wait_until(lock, at_, done);
        changed.wait(lock, done);
        return true;
    }
    template <class T> bool wait(const std::future<T> &result) const {
        if (bounded_) return result.wait_until(at_) == std::future_status::ready;
        result.wait();
        return true;
    }

private:
    bool bounded_;
    std::chrono::steady_clock::time_point at_;
};

/// Calls look() until it says that what it looks at is over. False: it was not by then.
template <class Look> bool poll(const Deadline &deadline, const Look &look) {
    for (int looks = 1; !look(); ++looks) {
        if (deadline.over()) return false;
        // No naps at first, because most exchanges are short; of a millisecond in the end.
        if (looks < 200)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(std::chrono::microseconds(looks < 1200 ? 50 : 1000));
    }
    return true;
}

/// Runs `body` on a thread of its own. Nothing if it has not returned by then, where the thread and what `body` holds
/// are left behind, or has thrown, or no thread could be had.
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
