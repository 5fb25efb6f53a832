// SPDX-License-Identifier: Apache-2.0
// local_times LIST [ROUNDS]: local work of a rank in a step of AdamW, of AdamW with sharded state (16-bit tensors, fp32
// masters, gradients that the engine averages) and of 1-bit Adam, as JSON for alpha_beta.py. The
// comms have the given number of ranks and functions that do nothing, so only this machine's work is timed. Prints
// nanoseconds per element of the whole list, the minimum of the rounds.
#include "bench_util.h"
#include <algorithm>
#include <chrono>
#include <limits>

namespace {

using namespace bench;

constexpr int kPerNode = 8;

struct Times {
    double step = std::numeric_limits<double>::infinity();
    double compress = 0, exchange = 0, decompress = 0; // of the same step
};

/// Times a step. `node` 0: no node comm. `data` 0: no comm at all.
Times measure(dsopt_context *ctx, int32_t algorithm, const List &params, const List &grads, int data, int node,
              int rounds, uint32_t flags = 0) {
    dsopt_comm *const data_comm = data > 0 ? idle_comm(ctx, data) : nullptr, *const node_comm =
                                                                                 node > 0 ? idle_comm(ctx, node)
                                                                                          : nullptr;
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.data = data_comm;
    desc.node = node_comm;
    desc.flags = DSOPT_OPTIMIZER_TIMING | flags;
    dsopt_optimizer *opt = nullptr;
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    dsopt_group group;
    check(dsopt_group_init(&group, sizeof group, algorithm));
    if (algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM) group.freeze_step = 1;
    std::vector<dsopt_param> list;
    for (const dsopt_tensor &tensor : params.tensors) list.emplace_back().tensor = tensor;
    check(dsopt_optimizer_add_group(opt, &group, list.data(), int64_t(list.size())));
    DSOPT_NEW(dsopt_step, step);
    step.grads = grads.tensors.data();
    step.count = int64_t(grads.tensors.size());
    // the first step is in full precision and allocates; the second step allocates nothing
    for (int i = 0; i < 2; ++i) check(dsopt_optimizer_step(opt, &step));
    Times best;
    for (int i = 0; i < rounds; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        check(dsopt_optimizer_step(opt, &step));
        const double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
        if (ns >= best.step) continue;
        DSOPT_NEW(dsopt_report, report);
        check(dsopt_optimizer_report(opt, &report));
        best = {ns, report.ms[DSOPT_MS_COMPRESS] * 1e6, report.ms[DSOPT_MS_EXCHANGE] * 1e6,
                report.ms[DSOPT_MS_DECOMPRESS] * 1e6};
    }
    dsopt_optimizer_destroy(opt);
    dsopt_comm_destroy(node_comm);
    dsopt_comm_destroy(data_comm);
    return best;
}

void print(const char *name, const Times &times, double elements, const char *end) {
    std::printf("    \"%s\": {\"step\": %.4f, \"compress\": %.4f, \"exchange\": %.4f, \"decompress\": %.4f}%s\n", name,
                times.step / elements, times.compress / elements, times.exchange / elements,
                times.decompress / elements, end);
    std::fflush(stdout);
}

} // namespace

int main(int argc, char **argv) {
    if (argc < 2) {
        std::fprintf(stderr, "local_times LIST [ROUNDS]\n");
        return 1;
    }
    const std::vector<int64_t> sizes = shapes(argv[1]);
    const int rounds = argc > 2 ? std::atoi(argv[2]) : 7;
    const double elements = double(total(sizes));
    dsopt_context *ctx = nullptr;
    check(dsopt_context_create(nullptr, &ctx));
    const List params(sizes, DSOPT_DTYPE_F32), grads(sizes, DSOPT_DTYPE_F32), halves(sizes, DSOPT_DTYPE_F16);
    for (const dsopt_tensor &tensor : grads.tensors)
        for (int64_t i = 0; i < tensor.numel; ++i) static_cast<float *>(tensor.data)[i] = i % 3 == 0 ? -1e-3f : 2e-3f;
    check(dsopt_tensors_axpby(ctx, nullptr, grads.tensors.data(), 0, halves.tensors.data(),
                              int64_t(halves.tensors.size()), nullptr));
    std::printf("{\n  \"list\": \"%s\",\n  \"elements\": %.0f,\n  \"per_node\": %d,\n  \"times\": {\n", argv[1],
                elements, kPerNode);
    print("full_f32", measure(ctx, DSOPT_ALGORITHM_ADAMW, params, grads, 0, 0, rounds), elements, ",");
    print("full_f16", measure(ctx, DSOPT_ALGORITHM_ADAMW, params, halves, 0, 0, rounds), elements, ",");
    print("momentum_bits_8",
          measure(ctx, DSOPT_ALGORITHM_ONEBIT_ADAM, params, grads, 8, 0, rounds, DSOPT_OPTIMIZER_MOMENTUM_BITS),
          elements, ",");
    const List weights(sizes, DSOPT_DTYPE_F16);
    const int32_t averages = DSOPT_OPTIMIZER_AVERAGES, shard = averages | DSOPT_OPTIMIZER_SHARD,
                  in_node = averages | DSOPT_OPTIMIZER_SHARD_NODE;
    for (int ranks = 8; ranks <= 4096; ranks *= 2) {
        const int nodes = ranks / kPerNode;
        const auto sharded = [&](const char *name, int data, int node, int32_t flags) {
            const std::string key = name + std::to_string(ranks);
            print(key.c_str(),
                  measure(ctx, DSOPT_ALGORITHM_ADAMW, weights, halves, data, node, rounds, uint32_t(flags)), elements,
                  ",");
        };
        sharded("shard_", ranks, 0, shard);
        if (nodes > 1) sharded("shard_two_level_", nodes, kPerNode, shard);
        sharded("shard_in_node_", nodes, kPerNode, in_node);
    }
    for (int ranks = 8; ranks <= 4096; ranks *= 2) {
        const std::string one_level = "flat_" + std::to_string(ranks),
                          two_levels = "two_level_" + std::to_string(ranks);
        print(one_level.c_str(), measure(ctx, DSOPT_ALGORITHM_ONEBIT_ADAM, params, grads, ranks, 0, rounds), elements,
              ",");
        print(two_levels.c_str(),
              measure(ctx, DSOPT_ALGORITHM_ONEBIT_ADAM, params, grads, ranks / kPerNode, kPerNode, rounds), elements,
              ranks < 4096 ? "," : "");
    }
    std::printf("  }\n}\n");
    dsopt_context_destroy(ctx);
}
