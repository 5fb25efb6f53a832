// SPDX-License-Identifier: Apache-2.0
// A world whose ranks are threads, and the choice of the call that fails.
#pragma once
#include "mpi.h"

class FakeMpi {
public:
    explicit FakeMpi(int ranks);
    /// Makes the calling thread the rank `rank`. A world is not destroyed before the process ends, because abandoned
    /// collectives may still write to it.
    void enter(int rank) const;
    /// Makes the n-th call of this thread from now on fail, and with it the operations that other ranks wait for. 0: no
    /// call fails. Repeated tests of a request do not count.
    static void fail_at(int64_t n);
    /// Makes the n-th collective or message of this thread from now on never arrive: no rank that waits for it gets a
    /// result. 0: every call arrives. fail_at() sets 0.
    static void hang_at(int64_t n);
    /// Returns the number of calls of this thread since fail_at().
    static int64_t calls();
    /// Sets the function that copies the data of messages between two ranks: memcpy, or a function that also handles
    /// device memory. Collectives access host memory alone, as Open MPI's non-blocking ones do.
    static void copy_messages_by(void (*copy)(void *to, const void *from, size_t bytes));
    /// Returns true if memory that begins in this range was passed to a message since the last world was created.
    static bool was_passed(const void *begin, size_t bytes);

private:
    struct FakeMpiShared *const shared_;
};
