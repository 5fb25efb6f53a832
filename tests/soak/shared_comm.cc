// SPDX-License-Identifier: Apache-2.0
#include "shared_comm.h"
#include <algorithm>
#include <cstring>
#include <unistd.h>
#include <vector>

namespace soak {
namespace {

template <class T> void reduce(T *sum, const char *message, size_t count, int32_t op) {
    for (size_t i = 0; i < count; ++i) {
        T value;
        std::memcpy(&value, message + i * sizeof value, sizeof value);
        sum[i] = op == DSOPT_OP_MAX ? std::max(sum[i], value) : T(sum[i] + value);
    }
}

} // namespace

dsopt_comm_table SharedEndpoint::table() {
    DSOPT_NEW(dsopt_comm_table, table);
    table.self = this;
    table.rank = rank_;
    table.ranks = ranks_;
    table.all_reduce = [](void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op, void *) {
        return static_cast<SharedEndpoint *>(self)->all_reduce(send, recv, count, dtype, op);
    };
    table.all_to_all = [](void *self, const void *send, void *recv, int64_t bytes, void *) {
        return static_cast<SharedEndpoint *>(self)->all_to_all(send, recv, bytes);
    };
    table.all_gather = [](void *self, const void *send, void *recv, int64_t bytes, void *) {
        return static_cast<SharedEndpoint *>(self)->all_gather(send, recv, bytes);
    };
    table.abort = [](void *self) { static_cast<SharedEndpoint *>(self)->shared_.aborted = 1; };
    return table;
}

int SharedEndpoint::wait() {
    const auto end = std::chrono::steady_clock::now() + timeout_;
    const int round = shared_.round;
    if (shared_.arrived.fetch_add(1) + 1 == ranks_) {
        shared_.arrived = 0;
        ++shared_.round;
        return 0;
    }
    while (shared_.round == round) {
        if (shared_.aborted != 0) return -DSOPT_ERR_ABORTED;
        if (std::chrono::steady_clock::now() > end) return -DSOPT_ERR_TIMEOUT;
        ::usleep(20);
    }
    return 0;
}

template <class F> int SharedEndpoint::in_pieces(const void *send, size_t bytes, const F &exchange) {
    for (size_t begin = 0; begin < bytes; begin += SharedComm::kMessageBytes) {
        const size_t piece = std::min(bytes - begin, SharedComm::kMessageBytes);
        std::memcpy(shared_.messages[rank_], static_cast<const char *>(send) + begin, piece);
        if (const int status = wait()) return status;
        exchange(begin, piece);
        if (const int status = wait()) return status;
    }
    return 0;
}

int SharedEndpoint::all_reduce(const void *send, void *recv, int64_t count, int32_t dtype, int32_t op) {
    const size_t element = dtype == DSOPT_DTYPE_F64 ? 8 : 4;
    return in_pieces(send, size_t(count) * element, [&](size_t begin, size_t bytes) {
        char *const to = static_cast<char *>(recv) + begin;
        std::memcpy(to, shared_.messages[0], bytes); // in rank order: the same bits on all ranks
        for (int rank = 1; rank < ranks_; ++rank) {
            if (dtype == DSOPT_DTYPE_F64)
                reduce(reinterpret_cast<double *>(to), shared_.messages[rank], bytes / element, op);
            else if (dtype == DSOPT_DTYPE_I32)
                reduce(reinterpret_cast<int32_t *>(to), shared_.messages[rank], bytes / element, op);
            else
                reduce(reinterpret_cast<float *>(to), shared_.messages[rank], bytes / element, op);
        }
    });
}
int SharedEndpoint::all_gather(const void *send, void *recv, int64_t bytes_per_rank) {
    return in_pieces(send, size_t(bytes_per_rank), [&](size_t begin, size_t bytes) {
        for (int rank = 0; rank < ranks_; ++rank)
            std::memcpy(static_cast<char *>(recv) + size_t(rank) * size_t(bytes_per_rank) + begin,
                        shared_.messages[rank], bytes);
    });
}
int SharedEndpoint::all_to_all(const void *send, void *recv, int64_t bytes_per_rank) {
    // Every rank receives everything and copies its own messages, which are few.
    const size_t message = size_t(bytes_per_rank), all = message * size_t(ranks_);
    std::vector<char> gathered(all * size_t(ranks_));
    const int status = all_gather(send, gathered.data(), int64_t(all));
    if (status != 0) return status;
    for (int rank = 0; rank < ranks_; ++rank)
        std::memcpy(static_cast<char *>(recv) + size_t(rank) * message,
                    gathered.data() + size_t(rank) * all + size_t(rank_) * message, message);
    return 0;
}

} // namespace soak
