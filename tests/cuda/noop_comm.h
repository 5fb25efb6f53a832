// SPDX-License-Identifier: Apache-2.0
// A comm table of two ranks in device memory. Its functions enqueue nothing, which is valid in stream order.
#pragma once
#include "dsopt.h"
#include "support/expect.h"

namespace cuda_test {

struct NoOpComm {
    dsopt_context *context = nullptr;
    dsopt_comm *comm = nullptr;
    explicit NoOpComm(uint32_t flags) {
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = DSOPT_BACKEND_CUDA;
        EXPECT_OK(dsopt_context_create(&context_desc, &context));
        DSOPT_NEW(dsopt_comm_table, table);
        table.ranks = 2;
        table.memory = DSOPT_MEMORY_BACKEND;
        table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 0; };
        table.all_to_all = table.all_gather = [](void *, const void *, void *, int64_t, void *) { return 0; };
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = DSOPT_COMM_KIND_TABLE;
        desc.table = &table;
        desc.flags = flags;
        EXPECT_OK(dsopt_comm_create(context, &desc, &comm));
    }
    ~NoOpComm() {
        dsopt_comm_destroy(comm);
        dsopt_context_destroy(context);
    }
    NoOpComm(const NoOpComm &) = delete;
    NoOpComm &operator=(const NoOpComm &) = delete;
};

} // namespace cuda_test
