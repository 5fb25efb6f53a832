// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"
#include "base/status.h"
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>
#if defined(_OPENMP)
#include <omp.h>
#endif
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

/// Where there is no OpenMP: a build without it (the thread sanitizer does not see into its runtime), a child of
/// fork(). Where the system gives no thread, its share runs here.
void run_on_new_threads(int workers, int64_t parts, Body body) {
    constexpr int most = 64;
    std::thread pool[most];
    const int team = std::min(workers, most + 1);
    const auto share = [=](int worker) {
        for (int64_t i = worker; i < parts; i += team) body(i);
    };
    int running = 0;
    try {
        for (; running < team - 1; ++running) pool[running] = std::thread(share, running + 1);
    } catch (const std::exception &) {}
    share(0);
    for (int worker = running + 1; worker < team; ++worker) share(worker);
    for (int i = 0; i < running; ++i) pool[i].join();
}

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
#if defined(_OPENMP)
    if (!plain_threads) {
#pragma omp parallel for num_threads(workers) schedule(static)
        for (int64_t i = 0; i < parts; ++i) body(i);
        return;
    }
#endif
    run_on_new_threads(workers, parts, body);
}

int default_threads([[maybe_unused]] bool forked) {
#if defined(_OPENMP)
    if (!forked) return std::max(1, omp_get_max_threads());
    const char *const wanted = secure_getenv("OMP_NUM_THREADS");
    int threads = 0; // the first number of a list: that of the outermost level
    if (wanted != nullptr && std::sscanf(wanted, "%9d", &threads) == 1 && threads > 0) return threads;
#endif
    return int(std::max(1u, std::thread::hardware_concurrency()));
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
