// SPDX-License-Identifier: Apache-2.0
#include "base/fork.h"
#include "base/status.h"
#include <cstring>
#include <pthread.h>

namespace dsopt {
namespace {

constinit std::atomic<int64_t> generation{0};
constinit std::atomic<bool> watched{false};

} // namespace

int64_t fork_generation() noexcept { return generation.load(std::memory_order_relaxed); }

void watch_forks() {
    if (watched.load(std::memory_order_acquire)) return;
    // Threads that get here at the same time register the handler several times; then a fork adds more than one.
    const int failed = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
    if (failed != 0) throw Error(DSOPT_ERR_NOMEM, "pthread_atfork failed: %s", std::strerror(failed));
    watched.store(true, std::memory_order_release);
}

} // namespace dsopt
