// SPDX-License-Identifier: Apache-2.0
#include "shared_comm.h"
#include <algorithm>
#include <cstring>
#include <unistd.h>
#include <vector>

namespace soak {
namespace {

template <class T> void reduce(T *sum, const char *row, size_t count, int32_t op) {
    for (size_t i = 0; i < count; ++i) {
        T value;
        std::memcpy(&value, row + i * sizeof value, sizeof value);
        sum[i] = op == DSOPT_OP_MAX ? std::max(sum[i], value) : T(sum[i] + value);
    }
}

} // namespace

dsopt_comm_table SharedEnd::table() {
    DSOPT_NEW(dsopt_comm_table, table);
    table.self = this;
    table.rank = rank_;
    table.ranks = ranks_;
    table.all_reduce = [](void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op, void *) {
        return static_cast<SharedEnd *>(self)->all_reduce(send, recv, count, dtype, op);
    };
    table.all_to_all = [](void *self, const void *send, void *recv, int64_t bytes, void *) {
        return static_cast<SharedEnd *>(self)->all_to_all(send, recv, bytes);
    };
    table.all_gather = [](void *self, const void *send, void *recv, int64_t bytes, void *) {
        return static_cast<SharedEnd *>(self)->all_gather(send, recv, bytes);
    };
    table.abort = [](void *self) { static_cast<SharedEnd *>(self)->shared_.aborted = 1; };
    return table;
}

int SharedEnd::wait() {
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

template <class F> int SharedEnd::in_pieces(const void *send, size_t bytes, const F &exchange) {
    for (size_t begin = 0; begin < bytes; begin += SharedComm::kRow) {
        const size_t piece = std::min(bytes - begin, SharedComm::kRow);
        std::memcpy(shared_.rows[rank_], static_cast<const char *>(send) + begin, piece);
        if (const int status = wait()) return status;
        exchange(begin, piece);
        if (const int status = wait()) return status;
    }
    return 0;
}

int SharedEnd::all_reduce(const void *send, void *recv, int64_t count, int32_t dtype, int32_t op) {
    const size_t element = dtype == DSOPT_DTYPE_F64 ? 8 : 4;
    return in_pieces(send, size_t(count) * element, [&](size_t begin, size_t bytes) {
        char *const to = static_cast<char *>(recv) + begin;
        std::memcpy(to, shared_.rows[0], bytes); // in rank order: the same bits on all ranks
        for (int rank = 1; rank < ranks_; ++rank) {
            if (dtype == DSOPT_DTYPE_F64)
                reduce(reinterpret_cast<double *>(to), shared_.rows[rank], bytes / element, op);
            else if (dtype == DSOPT_DTYPE_I32)
                reduce(reinterpret_cast<int32_t *>(to), shared_.rows[rank], bytes / element, op);
            else
                reduce(reinterpret_cast<float *>(to), shared_.rows[rank], bytes / element, op);
        }
    });
}
int SharedEnd::all_gather(const void *send, void *recv, int64_t bytes_per_rank) {
    return in_pieces(send, size_t(bytes_per_rank), [&](size_t begin, size_t bytes) {
        for (int rank = 0; rank < ranks_; ++rank)
            std::memcpy(static_cast<char *>(recv) + size_t(rank) * size_t(bytes_per_rank) + begin, shared_.rows[rank],
                        bytes);
    });
}
int SharedEnd::all_to_all(const void *send, void *recv, int64_t bytes_per_rank) {
    // Every rank receives everything and copies its own rows, which are few.
    const size_t row = size_t(bytes_per_rank), all = row * size_t(ranks_);
    std::vector<char> gathered(all * size_t(ranks_));
    const int status = all_gather(send, gathered.data(), int64_t(all));
    if (status != 0) return status;
    for (int rank = 0; rank < ranks_; ++rank)
        std::memcpy(static_cast<char *>(recv) + size_t(rank) * row,
                    gathered.data() + size_t(rank) * all + size_t(rank_) * row, row);
    return 0;
}

} // namespace soak
