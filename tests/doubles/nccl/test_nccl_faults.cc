// SPDX-License-Identifier: Apache-2.0
// Every call of NCCL fails in turn.
#include "comm/nccl/api.h"
#include "nccl_ranks.h"
#include "support/fault_life.h"
#include "support/misdeeds.h"

namespace nccl_test {
namespace {

void fail_at(const std::string &id, int rank, int64_t n) {
    in_double<void(const char *, int, long)>("fake_nccl_fail_at")(id.c_str(), rank, long(n));
}

constexpr int kMostRanks = 3;
class NcclFabric final : public test::FailingFabric {
public:
    ~NcclFabric() override {
        for (const cudaStream_t stream : streams_) (void)cudaStreamDestroy(stream);
    }
    /// Each rank has a device of its own, from this one on.
    explicit NcclFabric(int first_device = 0) : first_(first_device) {}
    void renew(int ranks) override {
        ranks_ = ranks;
        id_ = new_id();
    }
    dsopt_status join(int rank, int timeout_ms, dsopt_context *context, dsopt_comm **comm) override {
        const dsopt_comm_desc desc = desc_of(id_, rank, ranks_, timeout_ms);
        return dsopt_comm_create(context, &desc, comm);
    }
    test::Context context(int rank) const override {
        return test::make_context(test::context_desc(1, DSOPT_BACKEND_CUDA, first_ + rank));
    }
    test::Memory memory(int rank) const override {
        cudaStream_t &stream = streams_[size_t(rank)];
        EXPECT_EQ(cudaSetDevice(first_ + rank), cudaSuccess);
        if (stream == nullptr) { EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess); }
        return test::cuda_memory(stream);
    }
    /// Of one fabric at a time.
    void fail_at(int64_t n) override { nccl_test::fail_at(id_, 0, n); }
    int64_t calls() const override { return in_double<long()>("fake_nccl_calls")(); }

private:
    const int first_;
    int ranks_ = 0;
    std::string id_;
    mutable std::array<cudaStream_t, kMostRanks> streams_{};
};

class NcclFaults : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(, NcclFaults,
                         testing::Values(DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ONEBIT_ADAM,
                                         DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB),
                         [](const auto &info) { return test::name_of(info.param); });

TEST_P(NcclFaults, OfEveryCallInTurnGiveAStatusAndTheSameCallSucceedsWithANewComm) {
    const Environment seen("DSOPT_FAKE_NCCL_DEAD", "error");
    NcclFabric fabric;
    test::fail_each_call(fabric, GetParam(), GetParam() < DSOPT_ALGORITHM_ZERO_ONE_ADAM);
}

TEST(Misdeeds, OfAnNcclRankGiveEveryRankAStatusInBoundedTime) {
    std::vector<std::unique_ptr<test::Fabric>> fabrics;
    for (int i = 0; i < kDevices / kMostRanks; ++i) fabrics.push_back(std::make_unique<NcclFabric>(i * kMostRanks));
    test::commit_all_misdeeds(fabrics, 1, kMostRanks);
}

TEST(NcclFault, OfTheCallersCommunicatorAreRefusedAndItServesTheNextCall) {
    const dsopt::nccl::Api api{dsopt::Library::any(dsopt::nccl::kSoname, dsopt::nccl::kKnown, dsopt::nccl::kVariable)};
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

TEST(NcclFault, OfMakingAnIdGiveAStatusOnce) {
    (void)new_id(); // loads the library
    char bytes[128];
    size_t size = sizeof bytes;
    fail_at("", 0, 1);
    EXPECT_EQ(dsopt_comm_unique_id(DSOPT_COMM_KIND_NCCL, bytes, &size), DSOPT_ERR_COMM);
    EXPECT_EQ(dsopt_comm_unique_id(DSOPT_COMM_KIND_NCCL, bytes, &size), DSOPT_OK) << dsopt_last_error();
}

} // namespace
} // namespace nccl_test
