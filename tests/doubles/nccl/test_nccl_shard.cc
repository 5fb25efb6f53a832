// SPDX-License-Identifier: Apache-2.0
// Sharded state and means of gradients on emulated devices connected by the double of NCCL.
#include "../shard_faults.h"
#include "nccl_device.h"
#include "nccl_fabric.h"

namespace nccl_test {
namespace nccl_shard_tests {

TEST(NcclShard, HasTheBitsOfOneRank) {
    for (const uint32_t flags : {0u, uint32_t(DSOPT_COMM_FLAG_ENQUEUE)})
        for (const int ranks : {2, 3}) {
            const std::string id = new_id();
            run_ranks(ranks, [&](int rank) {
                const Device device(id, rank, ranks, 60000, flags);
                shard_run::expect_bits_of_one_rank(device.context, device.comm, rank, ranks,
                                                   test::cuda_memory(device.stream));
            });
        }
}

TEST(NcclShard, AddsByReduceScatterWithProviderSums) {
    for (const uint32_t flags : {0u, uint32_t(DSOPT_COMM_FLAG_ENQUEUE)})
        for (const int ranks : {2, 3}) {
            const std::string id = new_id();
            std::vector<std::string> weights{size_t(ranks)};
            run_ranks(ranks, [&](int rank) {
                const Device device(id, rank, ranks, 60000, flags | DSOPT_COMM_FLAG_PROVIDER_SUMS);
                weights[size_t(rank)] = shard_run::train_with_provider_sums(device.context, device.comm, ranks, rank,
                                                                            test::cuda_memory(device.stream));
            });
            for (const std::string &of_rank : weights) EXPECT_TRUE(of_rank == weights[0]);
        }
}

TEST(NcclShard, GraphMatchesPlainSteps) {
    constexpr int64_t replays = 100;
    for (const uint32_t flags : {uint32_t(DSOPT_OPTIMIZER_SHARD), uint32_t(DSOPT_OPTIMIZER_AVERAGES),
                                 uint32_t(DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_AVERAGES)})
        for (const uint32_t sums : {0u, uint32_t(DSOPT_COMM_FLAG_PROVIDER_SUMS)}) {
            const bool averages = (flags & DSOPT_OPTIMIZER_AVERAGES) != 0;
            if (!averages && sums != 0) continue;
            const std::string id = new_id();
            run_ranks(2, [&](int rank) {
                const Device device(id, rank, 2, 60000, DSOPT_COMM_FLAG_ENQUEUE | sums);
                shard_run::Setting setting;
                setting.flags = flags;
                setting.sizes = {2100, 0, 33, 2100};
                const test::Memory memory = test::cuda_memory(device.stream);
                const auto gradients = averages ? shard_run::gradients_of(rank) : shard_run::means_of(2);
                shard_run::RankTrainer plain(device.context, device.comm, setting, memory),
                    captured(device.context, device.comm, setting, memory);
                test::must(plain.step(1, gradients));
                test::must(captured.step(1, gradients)); // allocates
                cudaGraph_t graph = nullptr;
                cudaGraphExec_t exec = nullptr;
                EXPECT_EQ(cudaStreamBeginCapture(device.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
                test::must(captured.step());
                EXPECT_EQ(cudaStreamEndCapture(device.stream, &graph), cudaSuccess);
                EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
                for (int64_t call = 2; call <= replays + 1; ++call) {
                    test::must(plain.step(call, gradients));
                    captured.fill(call, gradients);
                    EXPECT_EQ(cudaGraphLaunch(exec, device.stream), cudaSuccess);
                    ASSERT_EQ(captured.weights(), plain.weights()) << "flags " << flags << ", call " << call;
                }
                EXPECT_EQ(captured.state_bytes(), plain.state_bytes());
                (void)cudaGraphExecDestroy(exec);
                (void)cudaGraphDestroy(graph);
            });
        }
}

TEST(NcclShard, ReturnsStatusIfOnlyOneRankHasProviderSums) {
    const std::string id = new_id();
    run_ranks(2, [&](int rank) {
        const Device device(id, rank, 2, 1000, rank == 0 ? uint32_t(DSOPT_COMM_FLAG_PROVIDER_SUMS) : 0);
        shard_run::Setting setting;
        setting.flags |= DSOPT_OPTIMIZER_AVERAGES | DSOPT_OPTIMIZER_CHECK_RANKS;
        shard_run::RankTrainer trainer(device.context, device.comm, setting, test::cuda_memory(device.stream));
        EXPECT_NE(trainer.step(1, shard_run::gradients_of(rank)), DSOPT_OK);
    });
}

class FaultyNccl final : public shard_run::FaultyFabric {
public:
    void prepare(shard_run::Fault fault, int64_t n) override {
        fault_ = fault;
        call_ = n;
        id_ = new_id();
        hang_.reset();
        if (fault == shard_run::Fault::hangs)
            hang_ = std::make_unique<Environment>("DSOPT_FAKE_NCCL_FAULT",
                                                  ("0:" + std::to_string(n - 1) + ":hang").c_str());
    }
    void arm() override { fail_at(id_, 0, fault_ == shard_run::Fault::fails ? call_ : 0); }
    dsopt_status join(int rank, int timeout_ms, int32_t flags, dsopt_context *context, dsopt_comm **comm) override {
        const dsopt_comm_desc desc = desc_of(id_, rank, 2, timeout_ms, uint32_t(flags));
        return dsopt_comm_create(context, &desc, comm);
    }
    test::Context context(int rank) const override { return fabric_.context(rank); }
    test::Memory memory(int rank) const override { return fabric_.memory(rank); }
    int work_factor() const override { return fabric_.work_factor(); }

private:
    const NcclFabric fabric_;
    std::string id_;
    std::unique_ptr<Environment> hang_;
    shard_run::Fault fault_ = shard_run::Fault::none;
    int64_t call_ = 0;
};

TEST(NcclShardFaults, ReturnStatusAndLeaveThePartOfAStep) {
    const Environment seen("DSOPT_FAKE_NCCL_DEAD", "error");
    FaultyNccl fabric;
    fail_each_call_of_sharded_steps(fabric);
}

} // namespace nccl_shard_tests
} // namespace nccl_test
