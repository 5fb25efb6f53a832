// SPDX-License-Identifier: Apache-2.0
// Ranks on emulated devices connected by the double of NCCL, for tests of all kinds of comms.
#pragma once
#include "nccl_ranks.h"
#include "support/fabric.h"
#include <array>

namespace nccl_test {

inline void fail_at(const std::string &id, int rank, int64_t n) {
    function_of_double<void(const char *, int, long)>("fake_nccl_fail_at")(id.c_str(), rank, long(n));
}

constexpr int kMostRanks = 3;
class NcclFabric final : public test::FailingFabric {
public:
    ~NcclFabric() override {
        for (const cudaStream_t stream : streams_) (void)cudaStreamDestroy(stream);
    }
    /// Each rank has its own device; their numbers start at `first_device`.
    explicit NcclFabric(int first_device = 0) : first_(first_device) {}
    void prepare_comm(int ranks) override {
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
    int destroy_timeout_ms() const override { return 5000; } // documented in dsopt.h
    int work_factor() const override { return 4; }
    test::Memory memory(int rank) const override {
        cudaStream_t &stream = streams_[size_t(rank)];
        EXPECT_EQ(cudaSetDevice(first_ + rank), cudaSuccess);
        if (stream == nullptr) { EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess); }
        return test::cuda_memory(stream);
    }
    /// Only one fabric at a time may use this.
    void fail_at(int64_t n) override { nccl_test::fail_at(id_, 0, n); }
    int64_t calls() const override { return function_of_double<long()>("fake_nccl_calls")(); }

private:
    const int first_;
    int ranks_ = 0;
    std::string id_;
    mutable std::array<cudaStream_t, kMostRanks> streams_{};
};

} // namespace nccl_test
