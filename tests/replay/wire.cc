// SPDX-License-Identifier: Apache-2.0
#include "wire.h"
#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <thread>

namespace replay {

void Wire::on_all(const std::function<void(int64_t)> &run) {
    std::vector<std::exception_ptr> failures(endpoints_.size());
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < ranks(); ++rank)
        threads.emplace_back([&, rank] {
            try {
                run(rank);
            } catch (...) {
                failures[size_t(rank)] = std::current_exception();
                abort(); // so that other ranks do not wait for this rank
            }
        });
    for (std::thread &thread : threads) thread.join();
    for (const std::exception_ptr &failure : failures)
        if (failure) std::rethrow_exception(failure);
}

void Wire::abort() {
    const std::lock_guard lock(mutex_);
    failed_ = true;
    changed_.notify_all();
}

bool Wire::barrier() {
    std::unique_lock lock(mutex_);
    const int64_t round = round_;
    if (++arrived_ == int(endpoints_.size())) {
        arrived_ = 0;
        ++round_;
        changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round || failed_; });
    return !failed_;
}

int Wire::all_reduce(void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op, void *) {
    Endpoint &endpoint = *static_cast<Endpoint *>(self);
    endpoint.data = send;
    if (!endpoint.wire->barrier()) return 1;
    std::vector<double> fp64_sums(size_t(count), 0);
    std::vector<float> fp32_sums(size_t(count), 0); // fp32 is added in fp32, in rank order
    for (const Endpoint &other : endpoint.wire->endpoints_)
        for (int64_t i = 0; i < count; ++i) {
            const double value = to_double(other.data, dtype, i);
            double &sum = fp64_sums[size_t(i)];
            const bool first = &other == &endpoint.wire->endpoints_[0];
            sum = first ? value : op == DSOPT_OP_SUM ? sum + value : std::max(sum, value);
            fp32_sums[size_t(i)] = op == DSOPT_OP_SUM && !first ? fp32_sums[size_t(i)] + float(value) : float(sum);
        }
    if (!endpoint.wire->barrier()) return 1; // all ranks have read
    for (int64_t i = 0; i < count; ++i) {
        if (dtype == DSOPT_DTYPE_F32)
            static_cast<float *>(recv)[i] = fp32_sums[size_t(i)];
        else if (dtype == DSOPT_DTYPE_F64)
            static_cast<double *>(recv)[i] = fp64_sums[size_t(i)];
        else
            static_cast<int32_t *>(recv)[i] = int32_t(fp64_sums[size_t(i)]);
    }
    return 0;
}

int Wire::all_to_all(void *self, const void *send, void *recv, int64_t bytes, void *) {
    Endpoint &endpoint = *static_cast<Endpoint *>(self);
    const auto *from = static_cast<const unsigned char *>(send);
    endpoint.to_all.assign(from, from + bytes * endpoint.wire->ranks());
    ++endpoint.exchanges;
    endpoint.data = send;
    if (!endpoint.wire->barrier()) return 1;
    auto *to = static_cast<unsigned char *>(recv);
    for (const Endpoint &other : endpoint.wire->endpoints_) {
        std::memcpy(to, static_cast<const unsigned char *>(other.data) + endpoint.rank * bytes, size_t(bytes));
        to += bytes;
    }
    return endpoint.wire->barrier() ? 0 : 1;
}

int Wire::all_gather(void *self, const void *send, void *recv, int64_t bytes, void *) {
    Endpoint &endpoint = *static_cast<Endpoint *>(self);
    const auto *from = static_cast<const unsigned char *>(send);
    endpoint.gathered.assign(from, from + bytes);
    endpoint.data = send;
    if (!endpoint.wire->barrier()) return 1;
    auto *to = static_cast<unsigned char *>(recv);
    for (const Endpoint &other : endpoint.wire->endpoints_) {
        std::memcpy(to, other.data, size_t(bytes));
        to += bytes;
    }
    return endpoint.wire->barrier() ? 0 : 1;
}

dsopt_comm_table Wire::table(int64_t rank) {
    DSOPT_NEW(dsopt_comm_table, table);
    table.self = &endpoints_[size_t(rank)];
    table.rank = int32_t(rank);
    table.ranks = int32_t(ranks());
    table.all_reduce = all_reduce;
    table.all_to_all = all_to_all;
    table.all_gather = all_gather;
    return table;
}

std::vector<Padded> padded_layout(const std::vector<int64_t> &numels, int64_t ranks) {
    const int64_t alignment = ranks * std::lcm<int64_t>(ranks, 8);
    std::vector<Padded> layout;
    int64_t worker = 0, server = 0;
    for (const int64_t numel : numels) {
        const int64_t padded = (numel + alignment - 1) / alignment * alignment;
        layout.push_back({padded, padded / ranks, worker, server});
        worker += padded;
        server += padded / ranks;
    }
    return layout;
}

std::vector<double> Message::bytes(const Padded &vector) const {
    const unsigned char *from = data + vectors * sizeof(float) + vector.server / 8;
    return {from, from + vector.chunk / 8};
}

} // namespace replay
