// SPDX-License-Identifier: Apache-2.0
// An object that one call at a time may change: whoever comes second is told, and nobody waits.
#pragma once
#include "base/not_copied.h"
#include "base/status.h"
#include <atomic>

namespace dsopt {

/// Who is in an optimizer: 0 = nobody, -1 = one call that changes it, n > 0 = as many that read it.
using InUse = std::atomic<int32_t>;
[[noreturn]] inline void refuse_second() {
    throw Error(DSOPT_ERR_BUSY, "the optimizer is in use by another thread, or by the call whose callback this is");
}

/// Nobody else: whoever comes second gets DSOPT_ERR_BUSY instead of a race.
class Exclusive : NotCopied {
public:
    explicit Exclusive(InUse &in_use) : in_use_(in_use) {
        int32_t nobody = 0;
        if (!in_use.compare_exchange_strong(nobody, -1, std::memory_order_acquire, std::memory_order_relaxed))
            refuse_second();
    }
    ~Exclusive() { in_use_.store(0, std::memory_order_release); }

private:
    InUse &in_use_;
};

/// Nobody who changes it; readers never stand in each other's way.
class Shared : NotCopied {
public:
    explicit Shared(InUse &in_use) : in_use_(in_use) {
        int32_t readers = in_use.load(std::memory_order_relaxed);
        do {
            if (readers < 0) refuse_second();
        } while (
            !in_use.compare_exchange_weak(readers, readers + 1, std::memory_order_acquire, std::memory_order_relaxed));
    }
    ~Shared() { in_use_.fetch_sub(1, std::memory_order_release); }

private:
    InUse &in_use_;
};

} // namespace dsopt
