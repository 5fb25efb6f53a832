// SPDX-License-Identifier: Apache-2.0
// Sharded state and means of gradients over the double of MPI.
#include "../shard_faults.h"
#include "mpi_fabric.h"

using namespace test;

namespace mpi_shard_tests {

void with_comms(bool sums, int ranks, const std::function<void(dsopt_context *, dsopt_comm *, int rank)> &body) {
    MpiFabric fabric;
    fabric.prepare_comm(ranks);
    run_ranks(ranks, [&](int rank) {
        const Context context = make_context(1);
        dsopt_comm *made = nullptr;
        must(sums ? fabric.join_sums(rank, 60000, context.get(), &made)
                  : fabric.join(rank, 60000, context.get(), &made));
        const Comm comm(made);
        body(context.get(), made, rank);
    });
}

TEST(MpiShard, HasTheBitsOfOneRank) {
    for (const int ranks : {1, 2, 3})
        with_comms(false, ranks, [&](dsopt_context *context, dsopt_comm *comm, int rank) {
            shard_run::expect_bits_of_one_rank(context, comm, rank, ranks, host_memory());
        });
}

TEST(MpiShard, AddsByReduceScatterWithProviderSums) {
    for (const int ranks : {2, 3}) {
        std::vector<std::string> weights{size_t(ranks)};
        with_comms(true, ranks, [&](dsopt_context *context, dsopt_comm *comm, int rank) {
            weights[size_t(rank)] = shard_run::train_with_provider_sums(context, comm, ranks, rank, host_memory());
        });
        for (const std::string &of_rank : weights) EXPECT_TRUE(of_rank == weights[0]);
    }
}

TEST(MpiShard, ReturnsStatusIfOnlyOneRankHasProviderSums) {
    MpiFabric fabric;
    fabric.prepare_comm(2);
    run_ranks(2, [&](int rank) {
        const Context context = make_context(1);
        dsopt_comm *made = nullptr;
        must(rank == 0 ? fabric.join(rank, 60000, context.get(), &made)
                       : fabric.join_sums(rank, 60000, context.get(), &made));
        const Comm comm(made);
        shard_run::Setting setting;
        setting.flags |= DSOPT_OPTIMIZER_AVERAGES;
        shard_run::RankTrainer trainer(context.get(), made, setting, host_memory());
        EXPECT_EQ(trainer.step(1, shard_run::gradients_of(rank)), DSOPT_ERR_COMM);
        EXPECT_NE(std::strstr(dsopt_last_error(), "different"), nullptr) << dsopt_last_error();
    });
}

class FaultyMpi final : public shard_run::FaultyFabric {
public:
    void prepare(shard_run::Fault fault, int64_t n) override {
        fault_ = fault;
        call_ = n;
        fabric_.prepare_comm(2);
    }
    void arm() override {
        if (fault_ == shard_run::Fault::hangs)
            FakeMpi::hang_at(call_);
        else
            FakeMpi::fail_at(fault_ == shard_run::Fault::fails ? call_ : 0);
    }
    dsopt_status join(int rank, int timeout_ms, int32_t flags, dsopt_context *context, dsopt_comm **comm) override {
        return flags == DSOPT_COMM_FLAG_PROVIDER_SUMS ? fabric_.join_sums(rank, timeout_ms, context, comm)
                                                      : fabric_.join(rank, timeout_ms, context, comm);
    }

private:
    MpiFabric fabric_;
    shard_run::Fault fault_ = shard_run::Fault::none;
    int64_t call_ = 0;
};

TEST(MpiShardFaults, ReturnStatusAndLeaveThePartOfAStep) {
    FaultyMpi fabric;
    fail_each_call_of_sharded_steps(fabric);
}

} // namespace mpi_shard_tests
