// SPDX-License-Identifier: Apache-2.0
// Non-blocking reader-writer lock of an optimizer: a conflicting call gets DSOPT_ERR_BUSY.
#pragma once
#include "base/not_copied.h"
#include "base/status.h"
#include <atomic>

namespace dsopt {

/// State of the lock: 0 = free, -1 = held by one call that changes the optimizer, n > 0 = held by n readers.
using InUse = std::atomic<int32_t>;
[[noreturn]] inline void throw_busy() {
    throw Error(DSOPT_ERR_BUSY, "the optimizer is in use by another thread, or by the call whose callback this is");
}

/// Holds the lock exclusively. Throws BUSY if the lock is held.
class Exclusive : NotCopied {
public:
    explicit Exclusive(InUse &in_use) : in_use_(in_use) {
        int32_t unlocked = 0;
        if (!in_use.compare_exchange_strong(unlocked, -1, std::memory_order_acquire, std::memory_order_relaxed))
            throw_busy();
    }
    ~Exclusive() { in_use_.store(0, std::memory_order_release); }

private:
    InUse &in_use_;
};

/// Holds the lock as a reader. Throws BUSY if the lock is held exclusively.
class Shared : NotCopied {
public:
    explicit Shared(InUse &in_use) : in_use_(in_use) {
        int32_t readers = in_use.load(std::memory_order_relaxed);
        do {
            if (readers < 0) throw_busy();
        } while (
            !in_use.compare_exchange_weak(readers, readers + 1, std::memory_order_acquire, std::memory_order_relaxed));
    }
    ~Shared() { in_use_.fetch_sub(1, std::memory_order_release); }

private:
    InUse &in_use_;
};

} // namespace dsopt
