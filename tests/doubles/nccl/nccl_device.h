// SPDX-License-Identifier: Apache-2.0
// Ranks on emulated devices, used through the C header.
#pragma once
#include "nccl_ranks.h"
#include "support/onebit_run.h"

namespace nccl_test {

/// Context, comm and stream of one rank.
class Device {
public:
    Device(const std::string &id, int rank, int ranks, int timeout_ms, uint32_t flags = 0) {
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = DSOPT_BACKEND_CUDA;
        context_desc.device = rank;
        onebit_run::must(dsopt_context_create(&context_desc, &context));
        const dsopt_comm_desc desc = desc_of(id, rank, ranks, timeout_ms, flags);
        onebit_run::must(dsopt_comm_create(context, &desc, &comm));
        EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    }
    ~Device() {
        dsopt_comm_destroy(comm);
        dsopt_context_destroy(context);
        (void)cudaStreamDestroy(stream);
    }
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;
    dsopt_context *context = nullptr;
    dsopt_comm *comm = nullptr;
    cudaStream_t stream = nullptr;
};

} // namespace nccl_test
