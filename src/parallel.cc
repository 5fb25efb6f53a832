// SPDX-License-Identifier: Apache-2.0
#include "parallel.h"
#include <algorithm>
#include <thread>
#include <vector>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dsopt {

void Parallel::run_parts(int64_t parts, void (*body)(void *, int64_t), void *arg) const {
    if (hook != nullptr) {
        hook(user, parts, body, arg);
        return;
    }
    const int workers = int(std::min<int64_t>(parts, threads));
    if (workers <= 1) {
        for (int64_t i = 0; i < parts; ++i) body(arg, i);
        return;
    }
#if defined(_OPENMP)
#pragma omp parallel for num_threads(workers) schedule(static)
    for (int64_t i = 0; i < parts; ++i) body(arg, i);
#else
    // A build without OpenMP (the thread sanitizer does not see into its runtime) starts its workers anew each time.
    // Where the system gives no thread, its part runs here.
    const auto share = [=](int worker) {
        for (int64_t i = worker; i < parts; i += workers) body(arg, i);
    };
    std::thread pool[64];
    const int started = std::min(workers - 1, 64);
    int running = 0;
    try {
        for (; running < started; ++running) pool[running] = std::thread(share, running + 1);
    } catch (const std::exception &) {}
    share(0);
    for (int worker = running + 1; worker < workers; ++worker) share(worker);
    for (int i = 0; i < running; ++i) pool[i].join();
#endif
}

int default_threads() {
#if defined(_OPENMP)
    return std::max(1, omp_get_max_threads());
#else
    return int(std::max(1u, std::thread::hardware_concurrency()));
#endif
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
