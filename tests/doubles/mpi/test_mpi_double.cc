// SPDX-License-Identifier: Apache-2.0
// The adapter of dsopt_mpi.h over a double of MPI whose ranks are threads and whose calls fail on request.
#include "mpi_fabric.h"
#include "support/failing_calls.h"
#include "support/rank_faults.h"
#include <gtest/gtest-spi.h>

using namespace test;

namespace mpi_double_tests {

class MpiFaults : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(, MpiFaults,
                         testing::Values(DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ONEBIT_ADAM,
                                         DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB),
                         [](const auto &info) { return name_of(info.param); });

TEST_P(MpiFaults, ReturnStatusAndNewCommSucceeds) {
    MpiFabric fabric;
    fail_each_call(fabric, GetParam(), GetParam() < DSOPT_ALGORITHM_ZERO_ONE_ADAM);
}

/// Properties of the double that the tests of the adapter rely on.
TEST(MpiDouble, ReadsSendBufferWhenReceiveIsPosted) {
    const FakeMpi world(1);
    world.enter(0);
    int sent[2] = {1, 2}, received[2] = {-1, -1}, complete = -1;
    MPI_Request send = nullptr, receive = nullptr;
    ASSERT_EQ(MPI_Isend(sent, 2, MPI_INT32_T, 0, 0, MPI_COMM_WORLD, &send), MPI_SUCCESS);
    EXPECT_EQ(MPI_Test(&send, &complete, MPI_STATUS_IGNORE), MPI_SUCCESS);
    EXPECT_EQ(complete, 0);
    sent[1] = 3;
    ASSERT_EQ(MPI_Irecv(received, 2, MPI_INT32_T, 0, 0, MPI_COMM_WORLD, &receive), MPI_SUCCESS);
    for (MPI_Request *request : {&send, &receive}) {
        EXPECT_EQ(MPI_Test(request, &complete, MPI_STATUS_IGNORE), MPI_SUCCESS);
        EXPECT_EQ(complete, 1);
    }
    EXPECT_EQ(received[0], 1);
    EXPECT_EQ(received[1], 3);
}

TEST(MpiDouble, ReportsTruncationToReceiver) {
    const FakeMpi world(1);
    world.enter(0);
    int sent[2] = {1, 2}, received[2] = {-1, -1}, complete = -1;
    MPI_Request send = nullptr, receive = nullptr;
    ASSERT_EQ(MPI_Irecv(received, 1, MPI_INT32_T, 0, 0, MPI_COMM_WORLD, &receive), MPI_SUCCESS);
    ASSERT_EQ(MPI_Isend(sent, 2, MPI_INT32_T, 0, 0, MPI_COMM_WORLD, &send), MPI_SUCCESS);
    EXPECT_EQ(MPI_Test(&receive, &complete, MPI_STATUS_IGNORE), MPI_ERR_TRUNCATE);
    EXPECT_EQ(MPI_Test(&send, &complete, MPI_STATUS_IGNORE), MPI_SUCCESS);
    EXPECT_EQ(received[0], -1);
    EXPECT_EQ(received[1], -1);
}

TEST(MpiDouble, DetectsFreeWithPendingRequest) {
    const FakeMpi world(1);
    world.enter(0);
    MPI_Request request = nullptr;
    static MPI_Comm comm = nullptr; // EXPECT_NONFATAL_FAILURE cannot use locals
    int complete = 0, value = 0;
    ASSERT_EQ(MPI_Comm_idup(MPI_COMM_WORLD, &comm, &request), MPI_SUCCESS);
    ASSERT_EQ(MPI_Test(&request, &complete, MPI_STATUS_IGNORE), MPI_SUCCESS);
    ASSERT_EQ(MPI_Isend(&value, 1, MPI_INT32_T, 0, 0, comm, &request), MPI_SUCCESS);
    EXPECT_NONFATAL_FAILURE(MPI_Comm_free(&comm), "were not waited for");
}

TEST(RankFaults, ReturnStatusInBoundedTime) {
    std::vector<std::unique_ptr<Fabric>> fabrics;
    for (int i = 0; i < 8; ++i) fabrics.push_back(std::make_unique<MpiFabric>());
    run_all_rank_faults(fabrics, kSanitized ? 1 : 3, 4);
}

} // namespace mpi_double_tests
