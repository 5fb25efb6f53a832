// SPDX-License-Identifier: Apache-2.0
// A world of ranks that are threads, and which of their calls fails.
#pragma once
#include "mpi.h"

class FakeMpi {
public:
    explicit FakeMpi(int ranks);
    /// The calling thread is that rank from now on. Nothing of a world goes before the process ends: a collective that
    /// was left behind may still be written to.
    void enter(int rank) const;
    /// The n-th call from now on of this thread fails, and with it what other ranks wait for there. 0: none. Looking at
    /// a request again does not count.
    static void fail_at(int64_t n);
    /// Of this thread, since then.
    static int64_t calls();
    /// Copies what a message between two ranks moves: memcpy, or another function that also knows memory of a device.
    /// Collectives read and write memory of the host alone, as those of Open MPI that do not block.
    static void copy_messages_by(void (*copy)(void *to, const void *from, size_t bytes));
    /// True if a message was given memory that begins in this range, since the last world was made.
    static bool was_given(const void *begin, size_t bytes);

private:
    struct FakeMpiShared *const shared_;
};
