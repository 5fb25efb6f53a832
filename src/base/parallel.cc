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

/// The parts of one call in the hands of the caller's pool. Each runs once at most, whatever the pool does, and in the
/// end it is known what did not happen. A binding's pool cannot throw through C: it prints an exception and comes back.
class Handout {
public:
    Handout(int64_t parts, Body body) : parts_(parts), body_(body) {}

    /// In place of the body.
    static void run(void *handout, int64_t i) {
        Handout &self = *static_cast<Handout *>(handout);
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

    /// After the pool came back, or threw `thrown`.
    void check(const char *thrown) {
        const int64_t done = done_.load(std::memory_order_acquire);
        const int64_t again = again_.load(std::memory_order_relaxed),
                      outside = outside_.load(std::memory_order_relaxed);
        if (done == parts_ && again < 0 && outside == 0 && thrown == nullptr) return;
        // What it left running uses this frame and the caller's memory.
        while (done_.load(std::memory_order_acquire) != begun()) std::this_thread::yield();
        char twice[80] = "", none[96] = "";
        if (again >= 0) std::snprintf(twice, sizeof twice, "; it handed out piece %lld twice", ll(again));
        if (outside != 0)
            std::snprintf(none, sizeof none, "; it handed out piece %lld, which is none of them", ll(outside));
        throw Error(DSOPT_ERR_HOOK, "the parallel_for hook had run %lld of %lld pieces when it %s%s%s%s%s", ll(done),
                    ll(parts_), thrown != nullptr ? "threw" : "returned", twice, none, thrown != nullptr ? ": " : "",
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
    std::atomic<uint64_t> begun_[Parallel::kMaxThreads / 64] = {}; // a bit a part
    std::atomic<int64_t> done_{0};
    std::atomic<int64_t> again_{-1}, outside_{0}; // the last of those that should not have come; 0 is never outside
};

} // namespace

void Parallel::run_parts(int64_t parts, Body body) const {
    if (hook != nullptr) {
        Handout handout(parts, body);
        try {
            hook(user, parts, Handout::run, &handout);
        } catch (const std::exception &error) { handout.check(error.what()); } catch (...) {
            handout.check("something that is no std::exception");
        }
        handout.check(nullptr);
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
        int value = 0; // the first number of a list, which is for the outermost level
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
#error "say here how to set the default rounding mode and keep denormals on this processor"
#endif

} // namespace dsopt
