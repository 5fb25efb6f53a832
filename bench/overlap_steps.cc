// SPDX-License-Identifier: Apache-2.0
// overlap_steps LIST [ROUNDS]: time of forward pass, backward pass and an AdamW step whose gradients are passed while the
// backward pass runs, divided by the time of the same with an undivided step, as Markdown rows. Two ranks are threads of
// this process, with AVERAGES and SHARD, 16 buckets, fp32. The collectives of their table take as long as their bytes at a
// set bandwidth, in which they sleep: all-to-all and all-gather together as long as both passes. The passes are loops of
// one thread that last 5 times as long as the update, of which the backward pass has two thirds. Both kinds of steps
// alternate, so ratios are formed within a round; the rows have medians and quartiles.
#include "bench_util.h"
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>
#include <thread>

namespace {

using namespace bench;
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr int kRanks = 2, kBuckets = 16;

double quantile(std::vector<double> values, double share) {
    std::sort(values.begin(), values.end());
    const double at = share * double(values.size() - 1);
    const auto low = size_t(at);
    return values[low] + (at - double(low)) * (values[std::min(low + 1, values.size() - 1)] - values[low]);
}

/// Computes for a time, as a layer does.
void compute(double seconds) {
    const auto end = Clock::now() + Seconds(seconds);
    double value = 1;
    while (Clock::now() < end)
        for (int i = 0; i < 100; ++i) value = value * 1.0000001 + 1e-9;
    asm volatile("" : : "g"(&value) : "memory");
}

/// Collectives of the ranks.
class Link {
public:
    double seconds_per_byte = 0; // of the messages of all_to_all and all_gather
    dsopt_comm *comm(dsopt_context *context, int rank) {
        DSOPT_NEW(dsopt_comm_table, table);
        selves_[rank] = {this, rank};
        table.self = &selves_[rank];
        table.rank = rank;
        table.ranks = kRanks;
        table.all_reduce = [](void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                              void *) { return of(self)->all_reduce(rank_of(self), send, recv, count, dtype, op); };
        table.all_to_all = [](void *self, const void *send, void *recv, int64_t bytes, void *) {
            return of(self)->exchange(rank_of(self), send, recv, bytes, bytes);
        };
        table.all_gather = [](void *self, const void *send, void *recv, int64_t bytes, void *) {
            return of(self)->exchange(rank_of(self), send, recv, bytes, 0);
        };
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = DSOPT_COMM_KIND_TABLE;
        desc.table = &table;
        desc.flags = DSOPT_COMM_FLAG_ANY_THREAD;
        dsopt_comm *made = nullptr;
        check(dsopt_comm_create(context, &desc, &made));
        return made;
    }

private:
    struct Self {
        Link *link;
        int rank;
    };
    static Link *of(void *self) { return static_cast<Self *>(self)->link; }
    static int rank_of(void *self) { return static_cast<Self *>(self)->rank; }
    /// `stride`: bytes between the messages that a rank sends to two others; 0: it sends the same.
    int exchange(int rank, const void *send, void *recv, int64_t bytes, int64_t stride) {
        sent_[rank] = static_cast<const char *>(send);
        together_.arrive_and_wait();
        std::this_thread::sleep_for(Seconds(seconds_per_byte * double(bytes) * (kRanks - 1)));
        for (int other = 0; other < kRanks; ++other)
            std::memcpy(static_cast<char *>(recv) + other * bytes, sent_[other] + rank * stride, size_t(bytes));
        together_.arrive_and_wait();
        return 0;
    }
    template <class T> void reduce(const void *send, T *recv, int64_t count, int32_t op) {
        (void)send;
        std::vector<T> values(static_cast<size_t>(count));
        for (int64_t i = 0; i < count; ++i) {
            const T a = reinterpret_cast<const T *>(sent_[0])[i], b = reinterpret_cast<const T *>(sent_[1])[i];
            values[size_t(i)] = op == DSOPT_OP_SUM ? T(a + b) : std::max(a, b);
        }
        together_.arrive_and_wait();
        std::memcpy(recv, values.data(), values.size() * sizeof(T));
    }
    int all_reduce(int rank, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op) {
        sent_[rank] = static_cast<const char *>(send);
        together_.arrive_and_wait();
        if (dtype == DSOPT_DTYPE_F64)
            reduce(send, static_cast<double *>(recv), count, op);
        else if (dtype == DSOPT_DTYPE_I32)
            reduce(send, static_cast<int32_t *>(recv), count, op);
        else
            reduce(send, static_cast<float *>(recv), count, op);
        together_.arrive_and_wait();
        return 0;
    }

    Self selves_[kRanks]{};
    const char *sent_[kRanks]{};
    std::barrier<> together_{kRanks};
};

struct Measured {
    std::vector<double> undivided, parts; // seconds, by round
    double passes = 0, update = 0, exchange = 0;
};

/// A rank: its optimizer, and the passes of a training.
class Rank {
public:
    Rank(Link &link, int rank, const std::vector<int64_t> &sizes) :
        weights_(sizes, DSOPT_DTYPE_F32),
        grads_(sizes, DSOPT_DTYPE_F32),
        numel_(total(sizes)) {
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.threads = 1;
        check(dsopt_context_create(&context_desc, &context_));
        comm_ = link.comm(context_, rank);
        for (const dsopt_tensor &tensor : grads_.tensors)
            for (int64_t i = 0; i < tensor.numel; ++i)
                static_cast<float *>(tensor.data)[i] = i % 3 == 0 ? -1e-3f : 2e-3f;
        optimizer_ = create(comm_);
        alone_ = create(nullptr);
    }
    ~Rank() {
        dsopt_optimizer_destroy(optimizer_);
        dsopt_optimizer_destroy(alone_);
        dsopt_comm_destroy(comm_);
        dsopt_context_destroy(context_);
    }
    /// Forward and backward pass and a step. `passes`: seconds.
    void train(double passes, bool in_parts) {
        compute(passes / 3);
        const auto count = int64_t(grads_.tensors.size());
        double due = 0;
        for (int64_t i = count; i-- > 0;) {
            due += passes * 2 / 3 * double(grads_.tensors[size_t(i)].numel) / double(numel_);
            if (due > 1e-4 || i == 0) {
                compute(due);
                due = 0;
            }
            if (!in_parts) continue;
            DSOPT_NEW(dsopt_ready, ready);
            ready.first = i;
            ready.count = 1;
            ready.grads = &grads_.tensors[size_t(i)];
            check(dsopt_optimizer_ready(optimizer_, &ready));
        }
        step(optimizer_, in_parts);
    }
    /// A step of one rank.
    void update() { step(alone_, false); }

private:
    dsopt_optimizer *create(dsopt_comm *data) {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.data = data;
        if (data != nullptr) {
            desc.flags = DSOPT_OPTIMIZER_AVERAGES | DSOPT_OPTIMIZER_SHARD;
            desc.bucket = std::max<int64_t>(numel_ / kBuckets / 4096, 1) * 4096;
        }
        dsopt_optimizer *made = nullptr;
        check(dsopt_optimizer_create(context_, &desc, &made));
        dsopt_group group;
        check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
        std::vector<dsopt_param> params;
        for (const dsopt_tensor &tensor : weights_.tensors) params.emplace_back().tensor = tensor;
        check(dsopt_optimizer_add_group(made, &group, params.data(), int64_t(params.size())));
        return made;
    }
    void step(dsopt_optimizer *optimizer, bool ends_parts) {
        DSOPT_NEW(dsopt_step, step);
        step.count = int64_t(grads_.tensors.size());
        step.grads = ends_parts ? nullptr : grads_.tensors.data();
        step.flags = ends_parts ? DSOPT_STEP_READY : 0;
        check(dsopt_optimizer_step(optimizer, &step));
    }

    const List weights_, grads_;
    const int64_t numel_;
    dsopt_context *context_ = nullptr;
    dsopt_comm *comm_ = nullptr;
    dsopt_optimizer *optimizer_ = nullptr, *alone_ = nullptr;
};

Measured measure(const std::vector<int64_t> &sizes, int rounds) {
    Measured measured;
    Link link;
    std::barrier together(kRanks);
    const auto timed = [&](const auto &body) {
        together.arrive_and_wait();
        const auto begin = Clock::now();
        body();
        together.arrive_and_wait();
        return Seconds(Clock::now() - begin).count();
    };
    const auto run = [&](int number) {
        Rank rank(link, number, sizes);
        std::vector<double> updates;
        for (int i = 0; i < 5; ++i) updates.push_back(timed([&] { rank.update(); }));
        for (const bool in_parts : {false, true}) rank.train(0, in_parts); // allocates
        if (number == 0) {
            measured.update = quantile(updates, 0.5);
            measured.passes = 5 * measured.update;
            measured.exchange = measured.passes;
            // Each rank sends half of the gradients and half of the weights.
            link.seconds_per_byte = measured.exchange / (4.0 * double(total(sizes)));
        }
        together.arrive_and_wait();
        for (int round = 0; round < rounds; ++round)
            for (const bool in_parts : {false, true}) {
                const double seconds = timed([&] { rank.train(measured.passes, in_parts); });
                if (number == 0) (in_parts ? measured.parts : measured.undivided).push_back(seconds);
            }
        together.arrive_and_wait();
    };
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back(run, rank);
    for (std::thread &thread : threads) thread.join();
    return measured;
}

} // namespace

int main(int argc, char **argv) {
    if (argc < 2) {
        std::fprintf(stderr, "overlap_steps LIST [ROUNDS]\n");
        return 1;
    }
    const int rounds = argc > 2 ? std::atoi(argv[2]) : 15;
    const Measured measured = measure(shapes(argv[1]), rounds);
    std::vector<double> ratios;
    for (size_t i = 0; i < measured.parts.size(); ++i) ratios.push_back(measured.parts[i] / measured.undivided[i]);
    const double bound = std::max(measured.passes + measured.update, measured.exchange);
    std::printf(
        "| list | passes, ms | update, ms | exchange, ms | undivided, ms | in parts, ms | in parts / undivided | "
        "quartiles | in parts / max(passes + update, exchange) |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
    std::printf("| %s | %.1f | %.1f | %.1f | %.1f | %.1f | %.2f | %.2f to %.2f | %.2f |\n", argv[1],
                measured.passes * 1e3, measured.update * 1e3, measured.exchange * 1e3,
                quantile(measured.undivided, 0.5) * 1e3, quantile(measured.parts, 0.5) * 1e3, quantile(ratios, 0.5),
                quantile(ratios, 0.25), quantile(ratios, 0.75), quantile(measured.parts, 0.5) / bound);
}
