// SPDX-License-Identifier: Apache-2.0
// The adapter of dsopt_mpi.h over a double of MPI, whose ranks are threads, and which fails on request.
#define DSOPT_MPI_PIECE 4096
#include "dsopt_mpi.h"
#include "fake_mpi.h"
#include "support/fault_life.h"
#include "support/misdeeds.h"

using namespace test;

namespace {

class MpiFabric final : public FailingFabric {
public:
    void renew(int ranks) override {
        world_ = std::make_unique<FakeMpi>(ranks);
        FakeMpi::fail_at(0);
    }
    dsopt_status join(int rank, int timeout_ms, dsopt_context *context, dsopt_comm **comm) override {
        world_->enter(rank);
        return dsopt_mpi_comm_timeout(context, MPI_COMM_WORLD, timeout_ms, comm);
    }
    void fail_at(int64_t n) override { FakeMpi::fail_at(n); }
    int64_t calls() const override { return FakeMpi::calls(); }

private:
    std::unique_ptr<FakeMpi> world_;
};

class MpiFaults : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(, MpiFaults,
                         testing::Values(DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ONEBIT_ADAM,
                                         DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB),
                         [](const auto &info) { return name_of(info.param); });

TEST_P(MpiFaults, OfEveryCallInTurnGiveAStatusAndTheSameCallSucceedsWithANewComm) {
    MpiFabric fabric;
    fail_each_call(fabric, GetParam(), GetParam() < DSOPT_ALGORITHM_ZERO_ONE_ADAM);
}

TEST(Misdeeds, OfAnMpiRankGiveEveryRankAStatusInBoundedTime) {
    std::vector<std::unique_ptr<Fabric>> fabrics;
    for (int i = 0; i < 8; ++i) fabrics.push_back(std::make_unique<MpiFabric>());
    commit_all_misdeeds(fabrics, kSanitized ? 1 : 3, 4);
}

} // namespace
