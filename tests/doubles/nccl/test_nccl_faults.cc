// SPDX-License-Identifier: Apache-2.0
// Every call of NCCL fails once, in separate runs.
#include "comm/nccl/api.h"
#include "nccl_fabric.h"
#include "support/failing_calls.h"

namespace nccl_test {
namespace nccl_faults_tests {

class NcclFaults : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(, NcclFaults,
                         testing::Values(DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ONEBIT_ADAM,
                                         DSOPT_ALGORITHM_ZERO_ONE_ADAM),
                         [](const auto &info) { return test::name_of(info.param); });

TEST_P(NcclFaults, ReturnStatusAndNewCommSucceeds) {
    const Environment seen("DSOPT_FAKE_NCCL_DEAD", "error");
    NcclFabric fabric;
    test::fail_each_call(fabric, GetParam(), GetParam() < DSOPT_ALGORITHM_ZERO_ONE_ADAM);
}

TEST(NcclFaultsOfNativeComm, FailCreateAndNextCreateSucceeds) {
    const dsopt::nccl::Api api{dsopt::Library::any(dsopt::nccl::kLibrary)};
    dsopt::nccl::UniqueId id;
    ASSERT_EQ(api.get_unique_id(&id), dsopt::nccl::success);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    dsopt::nccl::Communicator native = nullptr;
    ASSERT_EQ(api.init(&native, 1, id, 0), dsopt::nccl::success);
    const test::Context context = test::make_context(test::context_desc(1, DSOPT_BACKEND_CUDA));
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = DSOPT_COMM_KIND_NCCL;
    desc.native = native;
    for (int64_t call = 1;; ++call) {
        fail_at(id.bytes, 0, call);
        dsopt_comm *comm = nullptr;
        const dsopt_status status = dsopt_comm_create(context.get(), &desc, &comm);
        if (status == DSOPT_OK) {
            EXPECT_EQ(call, 5) << "health, rank, ranks, device";
            dsopt_comm_destroy(comm);
            break;
        }
        EXPECT_EQ(status, DSOPT_ERR_COMM) << dsopt_last_error();
        EXPECT_EQ(comm, nullptr);
        ASSERT_EQ(dsopt_comm_create(context.get(), &desc, &comm), DSOPT_OK) << dsopt_last_error();
        dsopt_comm_destroy(comm);
    }
    fail_at(id.bytes, 0, 0);
    EXPECT_EQ(api.destroy(native), dsopt::nccl::success);
}

TEST(NcclFaultsOfUniqueId, ReturnStatusOnce) {
    (void)new_id(); // loads the library
    char bytes[128];
    size_t size = sizeof bytes;
    fail_at("", 0, 1);
    EXPECT_EQ(dsopt_comm_unique_id(DSOPT_COMM_KIND_NCCL, bytes, &size), DSOPT_ERR_COMM);
    EXPECT_EQ(dsopt_comm_unique_id(DSOPT_COMM_KIND_NCCL, bytes, &size), DSOPT_OK) << dsopt_last_error();
}

} // namespace nccl_faults_tests
} // namespace nccl_test
