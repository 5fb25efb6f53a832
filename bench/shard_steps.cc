// SPDX-License-Identifier: Apache-2.0
// shard_steps LIST [ROUNDS] [RANKS...]: time of an AdamW step with sharded state divided by the time of the same step
// without, on ranks that are threads of this process (DSOPT_COMM_KIND_LOCAL), as Markdown rows. Each rank has one thread,
// and weights, gradients and state of its own, all fp32. A step lasts until all ranks have ended it. The four kinds of
// steps alternate, so ratios are formed within a round; the rows have medians and quartiles of the rounds. "CPU time"
// is the same ratio of the time that all ranks computed, which other programs on the machine disturb less.
#include "bench_util.h"
#include <algorithm>
#include <barrier>
#include <chrono>
#include <ctime>
#include <thread>

namespace {

using namespace bench;
using Clock = std::chrono::steady_clock;

enum Kind { kAlone, kShard, kAverages, kShardAverages, kKinds };
constexpr int32_t kFlags[kKinds] = {0, DSOPT_OPTIMIZER_SHARD, DSOPT_OPTIMIZER_AVERAGES,
                                    DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_AVERAGES};

/// Upper limit of sharded / unsharded; 0: none. A step moves 28 bytes per element, a sharded one 28 / W in its part, 8 / W
/// into rows, and receives (W - 1) / W of 8 in 8 + 8 bytes.
double goal(bool averages, int ranks) {
    if (averages) return ranks == 2 ? 0.8 : 0;
    return 1.25 * (28.0 / ranks + 8.0 / ranks + 8 + 8.0 * (ranks - 1) / ranks) / 28;
}

double quantile(std::vector<double> values, double share) {
    std::sort(values.begin(), values.end());
    const double at = share * double(values.size() - 1);
    const auto low = size_t(at);
    return values[low] + (at - double(low)) * (values[std::min(low + 1, values.size() - 1)] - values[low]);
}

struct Measured {
    std::vector<double> ms[kKinds], cpu_ms[kKinds]; // by round
};

double thread_ms() {
    timespec now{};
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) * 1e3 + double(now.tv_nsec) * 1e-6;
}
std::vector<double> quotients(const std::vector<double> &of, const std::vector<double> &by) {
    std::vector<double> result;
    for (size_t i = 0; i < of.size(); ++i) result.push_back(of[i] / by[i]);
    return result;
}

Measured measure(const std::vector<int64_t> &sizes, int ranks, int rounds) {
    Measured measured;
    std::barrier together(ranks);
    std::vector<double> computed(size_t(ranks), 0.0); // by rank
    char id[16] = "";                                 // the length of an id of LOCAL
    std::snprintf(id, sizeof id, "shard_steps %d", ranks);
    const auto run = [&](int rank) {
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.threads = 1;
        dsopt_context *context = nullptr;
        check(dsopt_context_create(&context_desc, &context));
        DSOPT_NEW(dsopt_comm_desc, comm_desc);
        comm_desc.kind = DSOPT_COMM_KIND_LOCAL;
        comm_desc.rank = rank;
        comm_desc.ranks = ranks;
        comm_desc.id = id;
        comm_desc.id_bytes = sizeof id;
        dsopt_comm *comm = nullptr;
        check(dsopt_comm_create(context, &comm_desc, &comm));
        const List weights(sizes, DSOPT_DTYPE_F32), grads(sizes, DSOPT_DTYPE_F32);
        for (const dsopt_tensor &tensor : grads.tensors) // the same on all ranks: averaged, or their own mean
            for (int64_t i = 0; i < tensor.numel; ++i)
                static_cast<float *>(tensor.data)[i] = i % 3 == 0 ? -1e-3f : 2e-3f;
        DSOPT_NEW(dsopt_step, step);
        step.grads = grads.tensors.data();
        step.count = int64_t(grads.tensors.size());
        dsopt_optimizer *optimizers[kKinds];
        for (int kind = 0; kind < kKinds; ++kind) {
            DSOPT_NEW(dsopt_optimizer_desc, desc);
            desc.flags = kFlags[kind];
            desc.data = kind == kAlone ? nullptr : comm;
            check(dsopt_optimizer_create(context, &desc, &optimizers[kind]));
            dsopt_group group;
            check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
            std::vector<dsopt_param> params;
            for (const dsopt_tensor &tensor : weights.tensors) params.emplace_back().tensor = tensor;
            check(dsopt_optimizer_add_group(optimizers[kind], &group, params.data(), int64_t(params.size())));
        }
        for (int round = -2; round < rounds; ++round) // the first steps allocate
            for (int kind = 0; kind < kKinds; ++kind) {
                together.arrive_and_wait();
                const auto begin = Clock::now();
                const double cpu = thread_ms();
                check(dsopt_optimizer_step(optimizers[kind], &step));
                computed[size_t(rank)] = thread_ms() - cpu;
                together.arrive_and_wait();
                const double ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
                if (rank != 0 || round < 0) continue;
                measured.ms[kind].push_back(ms);
                double sum = 0;
                for (const double each : computed) sum += each;
                measured.cpu_ms[kind].push_back(sum);
            }
        for (dsopt_optimizer *optimizer : optimizers) dsopt_optimizer_destroy(optimizer);
        together.arrive_and_wait(); // a rank that leaves makes the comm unusable
        dsopt_comm_destroy(comm);
        dsopt_context_destroy(context);
    };
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
    for (std::thread &thread : threads) thread.join();
    return measured;
}

} // namespace

int main(int argc, char **argv) {
    if (argc < 2) {
        std::fprintf(stderr, "shard_steps LIST [ROUNDS] [RANKS...]\n");
        return 1;
    }
    const std::vector<int64_t> sizes = shapes(argv[1]);
    const int rounds = argc > 2 ? std::atoi(argv[2]) : 15;
    std::vector<int> counts;
    for (int i = 3; i < argc; ++i) counts.push_back(std::atoi(argv[i]));
    if (counts.empty()) counts = {2, 4, 8};
    std::printf(
        "| list | ranks | gradients averaged by | unsharded, ms | sharded, ms | sharded / unsharded | quartiles | "
        "CPU time | goal |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for (const int ranks : counts) {
        const Measured measured = measure(sizes, ranks, rounds);
        for (const bool averages : {false, true}) {
            const std::vector<double> &whole = measured.ms[averages ? kAverages : kAlone],
                                      &parts = measured.ms[averages ? kShardAverages : kShard];
            const std::vector<double> ratios = quotients(parts, whole),
                                      cpu = quotients(measured.cpu_ms[averages ? kShardAverages : kShard],
                                                      measured.cpu_ms[averages ? kAverages : kAlone]);
            const double limit = goal(averages, ranks);
            char text[16] = "";
            if (limit != 0) std::snprintf(text, sizeof text, "%.2f", limit);
            std::printf("| %s | %d | %s | %.2f | %.2f | %.2f | %.2f to %.2f | %.2f | %s |\n", argv[1], ranks,
                        averages ? "the engine" : "the caller", quantile(whole, 0.5), quantile(parts, 0.5),
                        quantile(ratios, 0.5), quantile(ratios, 0.25), quantile(ratios, 0.75), quantile(cpu, 0.5),
                        text);
            std::fflush(stdout);
        }
    }
}
