// SPDX-License-Identifier: Apache-2.0
// The full mean over nodes: one pass over the messages of all ranks of a node, and sums in rank order.
#include "backend_optimizer.h"
#include <algorithm>
#include <barrier>

using namespace cuda_test;

namespace cuda_two_level_tests {

using CudaTwoLevelMean = Cuda;

constexpr int kNodes = 2;

Setting averaging() {
    Setting s;
    s.algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM;
    s.sizes = {40, 0, 1, 5000, 33};
    s.desc.flags = DSOPT_OPTIMIZER_AVERAGES;
    s.change = [](dsopt_group &group, int) {
        group.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
        group.freeze_step = 4;
        group.beta1 = 0; // the momentum is the mean itself
    };
    return s;
}

std::vector<float> floats(const std::vector<char> &bytes) {
    std::vector<float> values(bytes.size() / sizeof(float));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
}
std::vector<float> momentum(BackendOptimizer &side, int64_t param) {
    std::vector<char> bytes;
    int64_t count = 0;
    BackendOptimizer::must(dsopt_optimizer_state_count(side.optimizer, &count));
    for (int64_t i = 0; i < count; ++i) {
        DSOPT_NEW(dsopt_state_info, info);
        BackendOptimizer::must(dsopt_optimizer_state(side.optimizer, i, &info));
        if (info.param != param || std::strcmp(info.name, "exp_avg") != 0) continue;
        bytes.resize(size_t(info.tensor.numel) * sizeof(float));
        BackendOptimizer::must(dsopt_optimizer_export(side.optimizer, i, bytes.data(), bytes.size()));
    }
    return floats(bytes);
}

/// Runs two steps on nodes of `per_node` ranks. Returns the kernels of all ranks in the second step.
std::vector<std::string> train(bool device, int per_node) {
    const Nodes nodes(per_node, kNodes);
    const int ranks = nodes.count();
    const Setting setting = averaging();
    std::vector<std::vector<std::vector<float>>> grads(static_cast<size_t>(ranks)); // by rank and tensor
    std::vector<std::string> kernels;
    std::barrier barrier(ranks);
    Ranks::run(ranks, [&](int rank) {
        const int node_index = rank / per_node, node_rank = rank % per_node;
        BackendOptimizer side(device, setting, &nodes.across[size_t(node_rank)], node_index,
                              &nodes.inside[size_t(node_index)], node_rank);
        for (int t = 0; t < 2; ++t) {
            side.fill_gradients(t + 20 * rank);
            if (t == 1)
                for (const Bytes &bytes : side.grads) grads[size_t(rank)].push_back(floats(bytes.get()));
            barrier.arrive_and_wait();
            if (device && rank == 0) fakert::mark();
            barrier.arrive_and_wait();
            EXPECT_EQ(side.step(), DSOPT_OK) << dsopt_last_error();
            barrier.arrive_and_wait();
        }
        if (device && rank == 0) kernels = fakert::launched_kernels();
        for (size_t p = 0; p < setting.sizes.size(); ++p) {
            const std::vector<float> mean = momentum(side, int64_t(p));
            ASSERT_EQ(int64_t(mean.size()), setting.sizes[p]);
            for (size_t k = 0; k < mean.size(); ++k) {
                float all = 0;
                for (int node = 0; node < kNodes; ++node) {
                    float sum = grads[size_t(node * per_node)][p][k];
                    for (int other = 1; other < per_node; ++other) sum += grads[size_t(node * per_node + other)][p][k];
                    all = node == 0 ? sum : all + sum;
                }
                ASSERT_EQ(mean[k], all * (1.0f / float(ranks))) << "tensor " << p << ", element " << k;
            }
        }
    });
    return kernels;
}

TEST_F(CudaTwoLevelMean, SumsRanksOfNodeInOnePassInRankOrder) {
    allow_many_blocks();
    for (const int per_node : {2, 3, 4}) {
        (void)train(false, per_node);
        const std::vector<std::string> kernels = train(true, per_node);
        const auto launches = [&](const char *name) { return std::count(kernels.begin(), kernels.end(), name); };
        // The list has three blocks, one per chunk. They are in two slices of each node, whose ranks add up the
        // gradients of the node. Three ranks add up the sums of the nodes. There is no pass per rank that is added.
        EXPECT_EQ(launches("sum_rows"), 2 * kNodes + 3);
        // Each rank packs its gradients and unpacks the means.
        EXPECT_EQ(launches("copy"), 2 * per_node * kNodes);
        EXPECT_EQ(launches("axpby"), 0);
    }
}

} // namespace cuda_two_level_tests
