// SPDX-License-Identifier: Apache-2.0
// The adapter of dsopt_mpi.h over a double of MPI, whose ranks are threads, and which fails on request.
#include "mpi_fabric.h"
#include "support/fault_life.h"
#include "support/misdeeds.h"

using namespace test;

namespace {

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
