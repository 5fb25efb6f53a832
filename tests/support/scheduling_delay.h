// SPDX-License-Identifier: Apache-2.0
// Measures the scheduling delay of a loaded machine, for bounds on the time of calls that hold on any machine. Depends
// on no test framework.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <thread>

namespace test {

/// A thread that alternately sleeps and works for a fixed time. Any additional time is scheduling delay, which affects
/// other threads, too.
class SchedulingDelay {
public:
    SchedulingDelay() : due_(now() + kSleep), thread_([this] { measure(); }) {}
    ~SchedulingDelay() {
        stops_ = true;
        thread_.join();
    }
    SchedulingDelay(const SchedulingDelay &) = delete;
    SchedulingDelay &operator=(const SchedulingDelay &) = delete;

    /// Returns the total delay in milliseconds since the beginning, including a delay that is not over yet.
    int64_t total_ms() const {
        const int64_t due = due_; // read first: a concurrent addition then counts twice instead of not at all
        const int64_t pending = now() - due;
        return (sum_ + (pending > 0 ? pending : 0)) / 1000;
    }

private:
    static constexpr int64_t kSleep = 20000, kWork = 1000; // microseconds
    static int64_t now() { return clock_us(CLOCK_MONOTONIC); }
    static int64_t clock_us(clockid_t clock) {
        timespec time{};
        (void)clock_gettime(clock, &time);
        return int64_t(time.tv_sec) * 1000000 + time.tv_nsec / 1000;
    }
    void measure() {
        while (!stops_) {
            const int64_t begin = now(), used = clock_us(CLOCK_THREAD_CPUTIME_ID);
            std::this_thread::sleep_for(std::chrono::microseconds(kSleep));
            int64_t worked = 0;
            while (worked < kWork) worked = clock_us(CLOCK_THREAD_CPUTIME_ID) - used;
            const int64_t end = now(), late = end - begin - kSleep - worked;
            if (late > 0) sum_ += late;
            due_ = end + kSleep + kWork;
        }
    }

    std::atomic<bool> stops_{false};
    std::atomic<int64_t> sum_{0}, due_;
    std::thread thread_;
};

} // namespace test
