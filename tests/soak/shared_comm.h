// SPDX-License-Identifier: Apache-2.0
// A comm between processes of one fork: messages in memory shared by them. A rank may be killed at any point in it.
#pragma once
#include "dsopt.h"
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace soak {

constexpr int kMaxRanks = 4;

/// In shared memory, zeroed. Has no members with destructors, since the process that uses them may be killed.
struct SharedComm {
    static constexpr size_t kMessageBytes = 128 << 10;
    std::atomic<int> aborted, arrived, round;
    alignas(64) char messages[kMaxRanks][kMessageBytes];
};

/// One rank's end. Waits return DSOPT_ERR_TIMEOUT after the time-out, and DSOPT_ERR_ABORTED if any rank aborts.
class SharedEndpoint {
public:
    SharedEndpoint(SharedComm &shared, int rank, int ranks, std::chrono::milliseconds timeout) :
        shared_(shared),
        rank_(rank),
        ranks_(ranks),
        timeout_(timeout) {}
    dsopt_comm_table table();

private:
    int all_reduce(const void *send, void *recv, int64_t count, int32_t dtype, int32_t op);
    int all_to_all(const void *send, void *recv, int64_t bytes);
    int all_gather(const void *send, void *recv, int64_t bytes);
    /// Returns 0 or a negative status. `exchange(begin, bytes)` reads the data of all ranks after each has stored its
    /// piece.
    template <class F> int in_pieces(const void *send, size_t bytes, const F &exchange);
    int wait();

    SharedComm &shared_;
    int rank_, ranks_;
    std::chrono::milliseconds timeout_;
};

} // namespace soak
