// SPDX-License-Identifier: Apache-2.0
// Global variables and fork(). A child starts with the parent's memory as of the fork, and without the parent's other
// threads. A mutex that another thread held stays locked for ever, and so does the guard of a function-local static
// that another thread was initializing. Hence every global of the library is initialized at compile time (constinit),
// and values that are computed at run time are in one of the two templates below. tests/abi/symbols.py rejects guards.
#pragma once
#include "base/not_copied.h"
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

namespace dsopt {

/// Returns a number that rises in every child of fork() once watch_forks() was called. It identifies objects of the
/// parent: their memory is copied, but worker threads and device contexts are not.
int64_t fork_generation() noexcept;
/// Must be called before any object is created that must not be used in a child.
void watch_forks();

/// A constant that is computed when it is first needed. Threads that need it at the same time all compute it, and the
/// first result stays, also in children. It is never destroyed.
template <class T> class Lazy : NotCopied {
public:
    template <class Make> const T &get(const Make &make) {
        const T *known = value_.load(std::memory_order_acquire);
        if (known != nullptr) return *known;
        auto made = std::make_unique<const T>(make());
        if (value_.compare_exchange_strong(known, made.get(), std::memory_order_acq_rel, std::memory_order_acquire))
            known = made.release();
        return *known;
    }

private:
    std::atomic<const T *> value_{nullptr};
};

/// Data shared by all threads of a process, protected by a lock. A child starts with empty data and an unlocked mutex.
/// May be used only after watch_forks(), which creating a context calls. Never destroyed: users may outlive static
/// destructors.
template <class T> class PerProcess : NotCopied {
public:
    /// Calls use(T &) with the lock held.
    template <class Use> decltype(auto) with(const Use &use) {
        Shared &shared = of_this_process();
        const std::lock_guard lock(shared.mutex);
        return use(shared.data);
    }

private:
    struct Shared {
        Shared(int64_t created_in, const Shared *parents) : generation(created_in), of_parent(parents) {}
        const int64_t generation;
        // The parent process's data. Unused; keeps the memory reachable for leak checkers.
        const Shared *const of_parent;
        std::mutex mutex;
        T data{};
    };
    Shared &of_this_process() {
        const int64_t generation = fork_generation();
        Shared *shared = shared_.load(std::memory_order_acquire);
        if (shared != nullptr && shared->generation == generation) return *shared;
        auto made = std::make_unique<Shared>(generation, shared);
        if (shared_.compare_exchange_strong(shared, made.get(), std::memory_order_acq_rel, std::memory_order_acquire))
            shared = made.release();
        return *shared; // the object of another thread if the exchange failed
    }
    std::atomic<Shared *> shared_{nullptr};
};

} // namespace dsopt
