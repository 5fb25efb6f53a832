// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dsopt {
namespace {

using Body = FunctionRef<void(int64_t i)>;

/// Runs the parts of one call on the caller's pool. Each part runs at most once, whatever the pool does, and check()
/// reports parts that did not run exactly once. A pool's exception alone would not report them: the pool of a binding
/// cannot throw through C, so it prints the exception and returns.
class PoolRun {
public:
    PoolRun(int64_t parts, Body body) : parts_(parts), body_(body) {}

    /// The function that the pool calls in place of the body. `context`: the PoolRun.
    static void run(void *context, int64_t i) {
        PoolRun &self = *static_cast<PoolRun *>(context);
        if (i < 0 || i >= self.parts_) {
            self.outside_.store(i, std::memory_order_relaxed);
            return;
        }
        const uint64_t bit = uint64_t(1) << (i % 64);
        if (self.begun_[i / 64].fetch_or(bit, std::memory_order_relaxed) & bit) {
            self.again_.store(i, std::memory_order_relaxed);
            return;
        }
        self.body_(i);
        self.done_.fetch_add(1, std::memory_order_release);
    }

    /// Throws HOOK if the pool threw an exception (`thrown`: its text, else NULL) or did not run each part exactly
    /// once. Must be called after the pool returned or threw.
    void check(const char *thrown) {
        const int64_t done = done_.load(std::memory_order_acquire);
        const int64_t again = again_.load(std::memory_order_relaxed),
                      outside = outside_.load(std::memory_order_relaxed);
        if (done == parts_ && again < 0 && outside == 0 && thrown == nullptr) return;
        // Waits for parts that still run: they use this stack frame and the caller's memory.
        while (done_.load(std::memory_order_acquire) != begun()) std::this_thread::yield();
        char twice[80] = "", invalid[96] = "";
        if (again >= 0) std::snprintf(twice, sizeof twice, "; it handed out piece %lld twice", ll(again));
        if (outside != 0)
            std::snprintf(invalid, sizeof invalid, "; it handed out piece %lld, which is none of them", ll(outside));
        throw Error(DSOPT_ERR_HOOK, "the parallel_for hook had run %lld of %lld pieces when it %s%s%s%s%s", ll(done),
                    ll(parts_), thrown != nullptr ? "threw" : "returned", twice, invalid, thrown != nullptr ? ": " : "",
                    thrown != nullptr ? thrown : "");
    }

private:
    int64_t begun() const {
        int64_t count = 0;
        for (int64_t word = 0; word * 64 < parts_; ++word)
            count += __builtin_popcountll(begun_[word].load(std::memory_order_relaxed));
        return count;
    }

    const int64_t parts_;
    const Body body_;
    std::atomic<uint64_t> begun_[Parallel::kMaxThreads / 64] = {}; // one bit per part
    std::atomic<int64_t> done_{0};
    // The last index that the pool passed twice, -1 = none, and the last one outside [0, parts), 0 = none.
    std::atomic<int64_t> again_{-1}, outside_{0};
};

} // namespace

void Parallel::run_parts(int64_t parts, Body body) const {
    if (hook != nullptr) {
        PoolRun pool_run(parts, body);
        try {
            hook(user, parts, PoolRun::run, &pool_run);
        } catch (const std::exception &error) { pool_run.check(error.what()); } catch (...) {
            pool_run.check("something that is no std::exception");
        }
        pool_run.check(nullptr);
        return;
    }
    const int workers = int(std::min<int64_t>(parts, threads));
    if (workers <= 1) {
        for (int64_t i = 0; i < parts; ++i) body(i);
        return;
    }
    run_on_pool(workers, parts, body);
}

int default_threads() {
    const auto number = [](const char *variable) {
        const char *const text = secure_getenv(variable);
        int value = 0; // the first number of a list, which is for the outermost parallel region
        return text != nullptr && std::sscanf(text, "%9d", &value) == 1 ? std::max(value, 0) : 0;
    };
    const int wanted = number("OMP_NUM_THREADS"), most = number("OMP_THREAD_LIMIT");
    const int threads = wanted > 0 ? wanted : usable_processors();
    return most > 0 ? std::min(threads, most) : threads;
}

#if defined(__x86_64__)
DefaultFloatEnvironment::DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
DefaultFloatEnvironment::~DefaultFloatEnvironment() { _mm_setcsr(unsigned(saved_)); }
#elif defined(__aarch64__)
DefaultFloatEnvironment::DefaultFloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(0ul));
}
DefaultFloatEnvironment::~DefaultFloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
#error "DefaultFloatEnvironment needs code that sets the default rounding mode and keeps denormals on this processor"
#endif

} // namespace dsopt
