// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/function_ref.h"
#include <cstdint>
#include <pthread.h>

namespace dsopt {

/// Calls body(i) for each i in [0, parts) on up to `threads` threads, one of which is the caller's, and returns when
/// all calls have returned. `body` must not throw. The threads are started by the first call that needs them, sleep
/// between calls, and last as long as the process. Calls from several threads at the same time use different threads.
/// Parts whose thread cannot be started, or has not begun when the caller's part is done, run on the calling thread.
/// May be called only after watch_forks(). A child of fork() starts new threads.
void run_on_pool(int threads, int64_t parts, FunctionRef<void(int64_t)> body) noexcept;

/// Starts a thread with the signals and the stack of those of the pool. Returns false if that fails.
bool start_library_thread(pthread_t &thread, void *(*run)(void *), void *argument) noexcept;

/// Returns the number of logical processors on which the calling thread may run, at least 1.
int usable_processors() noexcept;

} // namespace dsopt
