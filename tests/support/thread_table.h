// SPDX-License-Identifier: Apache-2.0
// A table of collectives for ranks that are threads of a test.
#pragma once
#include "support/handles.h"
#include <algorithm>
#include <barrier>
#include <cstring>
#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace test {

/// A caller's comm of ranks that are threads. Its reduce_scatter adds from the last rank to the first; the other
/// functions are those that the engine builds everything else from.
class ThreadTable {
public:
    explicit ThreadTable(int ranks) : sent_(size_t(ranks)), barrier_(ranks) {}
    virtual ~ThreadTable() = default;
    Comm comm(const Context &context, int rank, uint32_t flags = 0) {
        DSOPT_NEW(dsopt_comm_table, table);
        table.self = new Rank{this, rank, 0};
        table.rank = rank;
        table.ranks = int32_t(sent_.size());
        table.all_reduce = [](void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                              void *) {
            return of(self).table->all_reduce(rank_of(self), send, recv, count, dtype, op);
        };
        table.all_to_all = [](void *self, const void *send, void *recv, int64_t bytes, void *) {
            return of(self).table->all_to_all(rank_of(self), send, recv, bytes);
        };
        table.all_gather = [](void *self, const void *send, void *recv, int64_t bytes, void *) {
            return of(self).table->all_gather(rank_of(self), send, recv, bytes);
        };
        table.reduce_scatter = [](void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                                  void *) {
            EXPECT_EQ(dtype, DSOPT_DTYPE_F32);
            EXPECT_EQ(op, DSOPT_OP_SUM);
            return of(self).table->reduce_scatter(rank_of(self), send, recv, count);
        };
        table.destroy = [](void *self) { delete static_cast<Rank *>(self); };
        return table_comm(context, table, flags);
    }

protected:
    /// Adds from the last rank to the first.
    virtual int reduce_scatter(int rank, const void *send, void *recv, int64_t count) {
        return exchange(
            rank, send,
            [&] {
                std::vector<float> sums(static_cast<size_t>(count));
                for (size_t i = 0; i < sums.size(); ++i)
                    for (size_t other = sent_.size(); other-- > 0;)
                        sums[i] += value<float>(other, size_t(rank) * sums.size() + i);
                return bytes_of(sums);
            },
            recv);
    }

private:
    struct Rank {
        ThreadTable *table;
        int rank, reserved;
    };
    static Rank &of(void *self) { return *static_cast<Rank *>(self); }
    static int rank_of(void *self) { return of(self).rank; }
    template <class T> T value(size_t rank, size_t i) const {
        T number;
        std::memcpy(&number, sent_[rank] + i * sizeof number, sizeof number);
        return number;
    }
    template <class T> static std::string bytes_of(const std::vector<T> &values) {
        return {reinterpret_cast<const char *>(values.data()), values.size() * sizeof(T)};
    }
    /// Called at the start of a collective. A result other than 0 is the collective's, on all ranks.
    virtual int enter(int) { return 0; }
    /// Computes a result when all ranks have called. Stores it when all ranks have computed theirs.
    template <class Result> int exchange(int rank, const void *send, const Result &result, void *recv) {
        if (const int failure = enter(rank)) return failure;
        sent_[size_t(rank)] = static_cast<const char *>(send);
        barrier_.arrive_and_wait();
        const std::string bytes = result();
        barrier_.arrive_and_wait();
        std::memcpy(recv, bytes.data(), bytes.size());
        return 0;
    }
    template <class T> std::string reduced(int64_t count, int32_t op) const {
        std::vector<T> values(static_cast<size_t>(count));
        for (size_t i = 0; i < values.size(); ++i) {
            values[i] = value<T>(0, i);
            for (size_t other = 1; other < sent_.size(); ++other)
                values[i] =
                    op == DSOPT_OP_SUM ? T(values[i] + value<T>(other, i)) : std::max(values[i], value<T>(other, i));
        }
        return bytes_of(values);
    }
    int all_reduce(int rank, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op) {
        return exchange(
            rank, send,
            [&] {
                if (dtype == DSOPT_DTYPE_F64) return reduced<double>(count, op);
                if (dtype == DSOPT_DTYPE_I32) return reduced<int32_t>(count, op);
                return reduced<float>(count, op);
            },
            recv);
    }
    int all_to_all(int rank, const void *send, void *recv, int64_t bytes) {
        return exchange(
            rank, send,
            [&] {
                std::string all;
                for (const char *sent : sent_) all.append(sent + rank * bytes, size_t(bytes));
                return all;
            },
            recv);
    }
    int all_gather(int rank, const void *send, void *recv, int64_t bytes) {
        return exchange(
            rank, send,
            [&] {
                std::string all;
                for (const char *sent : sent_) all.append(sent, size_t(bytes));
                return all;
            },
            recv);
    }

    std::vector<const char *> sent_;
    std::barrier<> barrier_;
};

} // namespace test
