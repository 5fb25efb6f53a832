// SPDX-License-Identifier: Apache-2.0
// Comms of every kind that runs here, and exceptions that pass through them.
#include "support.h"
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>

namespace comm_tests {

TEST(CppComm, ReducesOverThreads) {
    const std::vector<std::byte> id = dsopt::comm::unique_id(dsopt::comm_kind::local);
    EXPECT_EQ(id.size(), 16u);
    on_ranks(2, [&](int rank) {
        dsopt::context ctx;
        dsopt::comm comm = dsopt::comm::local(ctx, id, rank, 2);
        std::vector<float> data = {1.f + static_cast<float>(rank), 4};
        comm.all_reduce({dsopt::view(data)});
        EXPECT_EQ(data, (std::vector<float>{1.5f, 4}));
        comm.all_reduce({dsopt::view(data)}, dsopt::op::sum);
        EXPECT_EQ(data[1], 8);
        data[0] = static_cast<float>(rank);
        comm.all_reduce({dsopt::view(data)}, dsopt::op::max);
        EXPECT_EQ(data[0], 1);
        EXPECT_EQ(comm.info().rank, rank);
        EXPECT_EQ(comm.info().ranks, 2);
        EXPECT_GT(comm.info().bytes_sent, 0);
        dsopt_norm_result found;
        dsopt::norm_options over_all;
        over_all.comm = &comm;
        data = {3, 4};
        ctx.norm({dsopt::view(data)}, &found, over_all);
        EXPECT_EQ(found.norm, std::sqrt(50.));
    });
}

TEST(CppComm, TimesOutAndAborts) {
    const std::vector<std::byte> id = dsopt::comm::unique_id(dsopt::comm_kind::local);
    dsopt::context ctx;
    dsopt::comm_options options;
    options.timeout = std::chrono::milliseconds(50);
    EXPECT_REFUSED(dsopt::comm::local(ctx, id, 0, 2, options), dsopt::timeout, "");
    options.timeout = std::chrono::hours(24 * 365);
    EXPECT_REFUSED(dsopt::comm::local(ctx, id, 0, 2, options), dsopt::argument_error, "timeout");
    options.timeout = std::chrono::milliseconds(-7);
    const std::vector<std::byte> second = dsopt::comm::unique_id(dsopt::comm_kind::local);
    on_ranks(2, [&](int rank) {
        dsopt::context own_context;
        dsopt::comm comm = dsopt::comm::local(own_context, second, rank, 2, options);
        std::vector<float> data(3);
        if (rank == 0) {
            comm.abort();
        } else {
            EXPECT_REFUSED(comm.all_reduce({dsopt::view(data)}), dsopt::aborted, "");
            EXPECT_EQ(comm.info().status, DSOPT_ERR_ABORTED);
        }
    });
    EXPECT_REFUSED(dsopt::comm::unique_id(dsopt::comm_kind::self), dsopt::unsupported_error, "");
    EXPECT_REFUSED(dsopt::comm::native(ctx, dsopt::comm_kind::nccl, nullptr), dsopt::argument_error, "communicator");
    EXPECT_REFUSED(dsopt::comm::native(ctx, dsopt::comm_kind::nccl, &options), dsopt::unsupported_error, "");
    EXPECT_REFUSED(dsopt::comm(ctx, dsopt::comm_kind::local, {}, 0, 2), dsopt::argument_error, "id");
    for (const auto make : {dsopt::comm::nccl, dsopt::comm::hccl}) { // no device, or invalid bytes
        EXPECT_THROW(make(ctx, id, 0, 2, {}), dsopt::error);
    }
}

/// Two ranks that exchange data in memory.
struct Exchange {
    std::mutex mutex;
    std::condition_variable changed;
    int arrived = 0, round = 0;
    const void *sent[2] = {};
    template <class F> void run(int rank, const void *send, F &&read) {
        std::unique_lock<std::mutex> lock(mutex);
        sent[rank] = send;
        wait(lock);
        read();
        wait(lock);
    }

private:
    void wait(std::unique_lock<std::mutex> &lock) {
        const int current = round;
        if (++arrived == 2) {
            arrived = 0;
            ++round;
            changed.notify_all();
        }
        changed.wait(lock, [&] { return round != current; });
    }
};

/// A class with the functions of dsopt_comm_table. Counts its instances.
struct Collectives {
    Exchange &exchange;
    int own_rank, throws = 0, scattered = 0;
    std::atomic<int> *objects;
    Collectives(Exchange &exchange_, int rank_, std::atomic<int> *count) :
        exchange(exchange_),
        own_rank(rank_),
        objects(count) {
        ++*objects;
    }
    Collectives(const Collectives &) = delete;
    ~Collectives() { --*objects; }
    std::int32_t rank() const { return own_rank; }
    std::int32_t ranks() const { return 2; }
    void all_reduce(const void *send, void *recv, std::int64_t count, dsopt::dtype type, dsopt::op op, void *) {
        if (throws == 1) throw Refusal{6};
        if (throws == 2) throw dsopt::timeout(DSOPT_ERR_TIMEOUT, "the other rank is late");
        switch (type) {
        case dsopt::dtype::f32: return reduce<float>(send, recv, count, op);
        case dsopt::dtype::f64: return reduce<double>(send, recv, count, op);
        default: return reduce<std::int32_t>(send, recv, count, op);
        }
    }
    void all_gather(const void *send, void *recv, std::int64_t bytes, void *) {
        const auto size = static_cast<std::size_t>(bytes);
        exchange.run(own_rank, send, [&] {
            for (std::size_t r = 0; r < 2; ++r)
                std::memcpy(static_cast<char *>(recv) + r * size, exchange.sent[r], size);
        });
    }
    void all_to_all(const void *send, void *recv, std::int64_t bytes, void *) {
        const auto size = static_cast<std::size_t>(bytes), row = static_cast<std::size_t>(own_rank) * size;
        exchange.run(own_rank, send, [&] {
            for (std::size_t r = 0; r < 2; ++r) {
                std::memcpy(static_cast<char *>(recv) + r * size, static_cast<const char *>(exchange.sent[r]) + row,
                            size);
            }
        });
    }
    void reduce_scatter(const void *send, void *recv, std::int64_t count, dsopt::dtype type, dsopt::op op, void *) {
        EXPECT_EQ(type, dsopt::dtype::f32);
        EXPECT_EQ(op, dsopt::op::sum);
        ++scattered;
        const std::size_t numel = static_cast<std::size_t>(count), row = static_cast<std::size_t>(own_rank) * numel;
        std::vector<float> sum(numel);
        exchange.run(own_rank, send, [&] {
            for (std::size_t i = 0; i < numel; ++i)
                sum[i] = static_cast<const float *>(exchange.sent[1])[row + i] +
                         static_cast<const float *>(exchange.sent[0])[row + i];
        });
        if (numel != 0) std::memcpy(recv, sum.data(), numel * sizeof(float));
    }
    std::string error() const { return throws == 3 ? "the network is down" : ""; }
    void abort() {}

private:
    template <class T> void reduce(const void *send, void *recv, std::int64_t count, dsopt::op op) {
        std::vector<T> sum(static_cast<std::size_t>(count));
        exchange.run(own_rank, send, [&] {
            for (std::size_t i = 0; i < sum.size(); ++i) {
                const T a = static_cast<const T *>(exchange.sent[0])[i],
                        b = static_cast<const T *>(exchange.sent[1])[i];
                sum[i] = op == dsopt::op::max ? std::max(a, b) : a + b;
            }
        });
        if (!sum.empty()) std::memcpy(recv, sum.data(), sum.size() * sizeof(T));
    }
};

/// Runs 1-bit Adam on two ranks with comms that `connect` creates. Returns their weights, which must be identical.
template <class Connect> std::vector<float> onebit(Connect &&connect) {
    std::vector<float> weights[2];
    on_ranks(2, [&](int rank) {
        dsopt::context ctx;
        dsopt::comm comm = connect(ctx, rank);
        dsopt::optimizer_options options;
        options.data = &comm;
        options.averages = true;
        options.check_ranks = true;
        dsopt::optimizer opt(ctx, options);
        std::vector<float> &w = weights[rank] = values(130, 3);
        dsopt::onebit_adam group;
        group.freeze_step = 2;
        opt.add_group(group, {{dsopt::view(w), "w"}});
        for (std::uint32_t s = 0; s < 4; ++s) {
            const std::vector<float> g = values(130, 100 * s + static_cast<std::uint32_t>(rank));
            EXPECT_EQ(opt.next_reduction(), s < 2 ? dsopt::reduction::full : dsopt::reduction::compressed);
            EXPECT_EQ(opt.next_reduction(3), dsopt::reduction::compressed);
            opt.step({dsopt::read_only(g)});
        }
        for (std::int64_t i = 0; i < opt.state_count(); ++i) {
            if (std::strcmp(opt.state(i).name(), "schedule") != 0) continue;
            std::int32_t words[8] = {}, next = 0;
            opt.export_state(i, words);
            EXPECT_EQ(opt.decode_schedule(words).step, 4);
            EXPECT_EQ(opt.decode_schedule(words).frozen, 1);
            const dsopt::tensor schedule = dsopt::view(words);
            opt.next_reduction_on_device(&schedule, &next);
            EXPECT_EQ(next, DSOPT_REDUCTION_COMPRESSED);
            EXPECT_REFUSED(opt.decode_schedule({words, 7}), dsopt::argument_error, "words has 7 entries");
        }
    });
    EXPECT_EQ(weights[0], weights[1]);
    return weights[0];
}

TEST(CppComm, CollectivesOfAClassGiveSameBitsAsLocal) {
    std::atomic<int> objects{0};
    Exchange exchange;
    const std::vector<float> by_class = onebit([&](const dsopt::context &ctx, int rank) {
        return dsopt::comm::of(ctx, std::make_unique<Collectives>(exchange, rank, &objects));
    });
    EXPECT_EQ(objects, 0);
    const std::vector<std::byte> id = dsopt::comm::unique_id(dsopt::comm_kind::local);
    const std::vector<float> local =
        onebit([&](const dsopt::context &ctx, int rank) { return dsopt::comm::local(ctx, id, rank, 2); });
    EXPECT_EQ(by_class, local);
}

TEST(CppComm, ProviderSumsAreOfReduceScatter) {
    std::atomic<int> objects{0};
    Exchange exchange;
    std::vector<float> weights[2];
    on_ranks(2, [&](int rank) {
        dsopt::context ctx;
        auto collectives = std::make_unique<Collectives>(exchange, rank, &objects);
        const Collectives &calls = *collectives;
        dsopt::table_options sums;
        sums.provider_sums = true;
        dsopt::comm comm = dsopt::comm::of(ctx, std::move(collectives), sums);
        dsopt::optimizer_options options;
        options.data = &comm;
        options.averages = true;
        dsopt::optimizer opt(ctx, options);
        std::vector<float> &w = weights[rank] = {1, 2};
        dsopt::sgd sgd;
        sgd.lr = 1;
        opt.add_group(sgd, {{dsopt::view(w), "w"}});
        const std::vector<float> g = {0.5f + static_cast<float>(rank), 1};
        opt.step({dsopt::read_only(g)});
        EXPECT_EQ(calls.scattered, 1);
        EXPECT_EQ(w, (std::vector<float>{0, 1}));
        EXPECT_GT(comm.info().calls_of[DSOPT_COLLECTIVE_REDUCE_SCATTER], 0);
    });
    EXPECT_EQ(weights[0], weights[1]);
    dsopt::context ctx;
    dsopt::comm_options options;
    options.provider_sums = true;
    const std::vector<std::byte> id = dsopt::comm::unique_id(dsopt::comm_kind::local);
    EXPECT_REFUSED(dsopt::comm::local(ctx, id, 0, 1, options), dsopt::unsupported_error, "PROVIDER_SUMS");
}

TEST(CppComm, RethrowsExceptionsOfCollectives) {
    std::atomic<int> objects{0};
    Exchange exchange;
    dsopt::context ctx;
    std::vector<float> data(3);
    const auto make = [&](int throws) {
        auto collectives = std::make_unique<Collectives>(exchange, 0, &objects);
        collectives->throws = throws;
        return dsopt::comm::of(ctx, std::move(collectives));
    };
    {
        dsopt::comm comm = make(1);
        EXPECT_EQ(refusal([&] { comm.all_reduce({dsopt::view(data)}); }), 6);
        EXPECT_REFUSED(comm.all_reduce({dsopt::view(data)}), dsopt::comm_error, ""); // the comm is unusable
        EXPECT_EQ(comm.info().status, DSOPT_ERR_COMM);
        dsopt::comm late = make(2);
        EXPECT_REFUSED(late.all_reduce({dsopt::view(data)}), dsopt::timeout, "the other rank is late");
        EXPECT_REFUSED(late.all_reduce({dsopt::view(data)}), dsopt::timeout, "");
        EXPECT_EQ(objects, 2);
    }
    EXPECT_EQ(objects, 0);
    EXPECT_REFUSED(dsopt::comm::of(ctx, std::unique_ptr<Collectives>()), dsopt::argument_error, "collectives");
    auto wrong = std::make_unique<Collectives>(exchange, 7, &objects); // rank 7 of 2
    EXPECT_REFUSED(dsopt::comm::of(ctx, std::move(wrong)), dsopt::argument_error, "rank");
    auto host = std::make_unique<Collectives>(exchange, 0, &objects);
    dsopt::table_options options;
    options.where = dsopt::memory::backend;
    options.synchronize = true;
    EXPECT_REFUSED(dsopt::comm::of(ctx, std::move(host), options), dsopt::unsupported_error,
                   "DSOPT_COMM_FLAG_SYNCHRONIZE needs a CUDA context");
    EXPECT_EQ(objects, 0);
}

TEST(CppComm, CompressesAList) {
    const std::vector<std::byte> id = dsopt::comm::unique_id(dsopt::comm_kind::local);
    std::vector<float> means[2];
    on_ranks(2, [&](int rank) {
        dsopt::context ctx;
        dsopt::comm comm = dsopt::comm::local(ctx, id, rank, 2);
        const std::vector<float> given = values(100, 5 + static_cast<std::uint32_t>(rank));
        std::vector<float> data = given;
        const dsopt::tensor list[] = {dsopt::view(data)};
        dsopt::compressed_arguments arguments;
        arguments.tensors = list;
        const dsopt::compressed_sizes sizes = comm.compressed_sizes(arguments);
        EXPECT_EQ(sizes.worker_elements, 2 * sizes.server_elements);
        std::vector<float> worker(static_cast<std::size_t>(sizes.worker_error)),
            server(static_cast<std::size_t>(sizes.server_error));
        std::vector<std::byte> workspace(sizes.workspace);
        arguments.workspace = workspace;
        arguments.server_error = server;
        arguments.worker_error = {worker.data(), worker.size() - 1};
        EXPECT_REFUSED(comm.compressed_allreduce(arguments), dsopt::argument_error, "worker_error has");
        arguments.worker_error = worker;
        comm.compressed_allreduce(arguments);
        means[rank] = data;
        std::vector<float> owed(static_cast<std::size_t>(sizes.worker_elements));
        comm.compressed_errors(arguments, owed, {});
        double sent = 0; // sent value + residual = original value
        for (std::size_t i = 0; i < given.size(); ++i)
            sent += std::abs(std::abs(given[i] - owed[i]) - std::abs(given[0] - owed[0]));
        EXPECT_LT(sent, 1e-4);
        EXPECT_REFUSED(comm.compressed_errors(arguments, {owed.data(), 3}, {}), dsopt::argument_error, "worker has 3");
        EXPECT_REFUSED(comm.compressed_errors(arguments, {}, {owed.data(), 3}), dsopt::argument_error, "server has 3");
    });
    EXPECT_EQ(means[0], means[1]);
}

} // namespace comm_tests
