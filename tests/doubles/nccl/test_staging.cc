// SPDX-License-Identifier: Apache-2.0
// Features that the engine adds to a comm: staging of data that is not in the comm's memory, and functions that a table
// lacks.
#include "nccl_ranks.h"

namespace nccl_test {
namespace staging_tests {

/// A comm used through a table of the caller.
struct WrappedComm {
    std::unique_ptr<Comm> comm;
    Place place;
    int calls = 0;

    template <class Call> int code(const Call &call) {
        ++calls;
        return outcome_of(call).status;
    }
    static WrappedComm &of(void *self) { return *static_cast<WrappedComm *>(self); }
    /// Returns a table with an all-to-all if bit 0 of `functions` is set, and an all-gather if bit 1 is.
    dsopt_comm_table table(unsigned functions) {
        dsopt_comm_table table{};
        table.size = sizeof table;
        table.self = this;
        table.rank = comm->rank();
        table.ranks = comm->ranks();
        table.memory = place == Place::host ? DSOPT_MEMORY_HOST : DSOPT_MEMORY_BACKEND;
        table.all_reduce = [](void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                              void *stream) {
            EXPECT_EQ(send, recv);
            return of(self).code([&] { of(self).comm->all_reduce(recv, count, dtype, op, stream, of(self).place); });
        };
        if (functions & 1)
            table.all_to_all = [](void *self, const void *send, void *recv, int64_t bytes, void *stream) {
                return of(self).code([&] { of(self).comm->all_to_all(send, recv, bytes, stream, of(self).place); });
            };
        if (functions & 2)
            table.all_gather = [](void *self, const void *send, void *recv, int64_t bytes, void *stream) {
                return of(self).code([&] { of(self).comm->all_gather(send, recv, bytes, stream, of(self).place); });
            };
        return table;
    }
};

dsopt_comm_desc local_desc(const std::string &id, int rank, int ranks) {
    dsopt_comm_desc desc = desc_of(id, rank, ranks, 60000);
    desc.kind = DSOPT_COMM_KIND_LOCAL;
    return desc;
}
std::string local_id() {
    std::string id(dsopt::kLocalIdBytes, '\0');
    dsopt::make_local_id(id.data());
    return id;
}

TEST(Staging, LocalCommRunsCollectivesInDeviceMemory) {
    const std::string id = local_id();
    run_ranks(3, [&](int rank) { run_all_collectives(StreamComm(cuda_context(rank), local_desc(id, rank, 3))); });
}

TEST(Staging, SelfCommCopies) {
    dsopt_comm_desc desc{};
    desc.size = sizeof desc;
    run_ranks(1, [&](int) { run_all_collectives(StreamComm(cuda_context(), desc)); });
}

TEST(TableComm, EmulatesMissingFunctions) {
    for (const Place place : {Place::host, Place::backend})
        for (unsigned functions = 0; functions < 4; ++functions) {
            const std::string id = place == Place::host ? local_id() : new_id();
            run_ranks(3, [&](int rank) {
                const auto context = cuda_context(rank);
                const dsopt_comm_desc inner =
                    place == Place::host ? local_desc(id, rank, 3) : desc_of(id, rank, 3, 60000);
                WrappedComm wrapped{dsopt::make_comm(context, inner), place};
                const dsopt_comm_table table = wrapped.table(functions);
                dsopt_comm_desc desc{};
                desc.size = sizeof desc;
                desc.kind = DSOPT_COMM_KIND_TABLE;
                desc.table = &table;
                const StreamComm stream_comm(context, desc);
                run_all_collectives(stream_comm);
                EXPECT_EQ(stream_comm.comm->info().calls, wrapped.calls) << "info().calls counts calls of the table";
                EXPECT_GT(wrapped.calls, 0);
            });
        }
}

TEST(TableComm, ReturnsStatusOfFailedEmulation) {
    dsopt_comm_table table{};
    table.size = sizeof table;
    table.ranks = 2;
    table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 77; };
    dsopt_comm_desc desc{};
    desc.size = sizeof desc;
    desc.kind = DSOPT_COMM_KIND_TABLE;
    desc.table = &table;
    const StreamComm stream_comm(cuda_context(), desc);
    char from[6] = {}, to[12];
    EXPECT_TRUE(fails(outcome_of([&] { stream_comm.comm->all_gather(from, to, 6, stream_comm.stream); }),
                      DSOPT_ERR_COMM, "(77)"));
    EXPECT_TRUE(fails(outcome_of([&] { stream_comm.comm->all_gather(from, to, 6, stream_comm.stream); }),
                      DSOPT_ERR_COMM, "unusable"));
}

/// A table of two ranks whose functions record their arguments.
struct RecordingTable {
    int calls = 0;
    cudaStream_t stream = nullptr;
    std::vector<const void *> of_caller;

    dsopt_comm_table table(bool all_functions) {
        dsopt_comm_table table{};
        table.size = sizeof table;
        table.self = this;
        table.ranks = 2;
        table.memory = DSOPT_MEMORY_BACKEND;
        table.all_reduce = [](void *self, const void *send, void *recv, int64_t, int32_t, int32_t, void *stream) {
            return static_cast<RecordingTable *>(self)->record(send, recv, stream);
        };
        if (!all_functions) return table;
        const auto rows = [](void *self, const void *send, void *recv, int64_t, void *stream) {
            return static_cast<RecordingTable *>(self)->record(send, recv, stream);
        };
        table.all_to_all = rows;
        table.all_gather = rows;
        return table;
    }
    int record(const void *send, const void *recv, void *passed_stream) {
        ++calls;
        EXPECT_EQ(passed_stream, stream);
        EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess) << "the stream is not done";
        int device = -1;
        EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
        EXPECT_EQ(device, 1) << "another device is current";
        for (const void *memory : of_caller) EXPECT_TRUE(send != memory && recv != memory) << "not the comm's memory";
        return 0;
    }
};

TEST(SynchronizeFlag, PassesCommMemoryAfterStreamIsDone) {
    for (const bool all_functions : {true, false}) {
        RecordingTable recorded;
        const dsopt_comm_table table = recorded.table(all_functions);
        dsopt_comm_desc desc{};
        desc.size = sizeof desc;
        desc.kind = DSOPT_COMM_KIND_TABLE;
        desc.flags = DSOPT_COMM_FLAG_SYNCHRONIZE;
        desc.table = &table;
        const StreamComm stream_comm(cuda_context(1), desc);
        recorded.stream = stream_comm.stream;
        const DeviceBytes from(Bytes(1 << 20, 1)), to(Bytes(1 << 20, 2));
        recorded.of_caller = {from.data(), to.data()};
        ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
        const auto busy = [&] { // a function that is called without a wait finds the stream busy
            EXPECT_EQ(cudaMemsetAsync(to.data(), 3, 1 << 20, stream_comm.stream), cudaSuccess);
        };
        busy();
        stream_comm.comm->all_reduce(from.data(), 1 << 18, DSOPT_DTYPE_F32, DSOPT_OP_SUM, stream_comm.stream,
                                     Place::backend);
        busy();
        stream_comm.comm->all_gather(from.data(), to.data(), 1 << 19, stream_comm.stream, Place::backend);
        busy();
        stream_comm.comm->all_to_all(from.data(), to.data(), 1 << 19, stream_comm.stream, Place::backend);
        EXPECT_EQ(recorded.calls, all_functions ? 3 : 4) << "an all-to-all is an all-gather for each rank";
        EXPECT_EQ(cudaStreamSynchronize(stream_comm.stream), cudaSuccess);
    }
}

TEST(SynchronizeFlag, IsRejectedIfItHasNoEffect) {
    const auto outcome = [](int32_t kind, int32_t memory, int32_t flags, int32_t backend) {
        dsopt_comm_table table{};
        table.size = sizeof table;
        table.ranks = 1;
        table.memory = memory;
        table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 0; };
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = kind;
        desc.flags = flags;
        desc.table = kind == DSOPT_COMM_KIND_TABLE ? &table : nullptr;
        const test::Context context = test::make_context(test::context_desc(1, backend));
        dsopt_comm *comm = nullptr;
        const dsopt_status status = dsopt_comm_create(context.get(), &desc, &comm);
        dsopt_comm_destroy(comm);
        return status;
    };
    constexpr int32_t flag = DSOPT_COMM_FLAG_SYNCHRONIZE, cuda = DSOPT_BACKEND_CUDA;
    EXPECT_EQ(outcome(DSOPT_COMM_KIND_TABLE, DSOPT_MEMORY_BACKEND, flag, cuda), DSOPT_OK) << dsopt_last_error();
    EXPECT_EQ(outcome(DSOPT_COMM_KIND_TABLE, DSOPT_MEMORY_HOST, flag, cuda), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(outcome(DSOPT_COMM_KIND_TABLE, DSOPT_MEMORY_BACKEND, flag, DSOPT_BACKEND_CPU), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(outcome(DSOPT_COMM_KIND_SELF, DSOPT_MEMORY_BACKEND, flag, cuda), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(outcome(DSOPT_COMM_KIND_NCCL, DSOPT_MEMORY_BACKEND, flag, cuda), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(outcome(DSOPT_COMM_KIND_TABLE, DSOPT_MEMORY_BACKEND, flag | DSOPT_COMM_FLAG_ENQUEUE, cuda),
              DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(outcome(DSOPT_COMM_KIND_TABLE, DSOPT_MEMORY_BACKEND, 16, cuda), DSOPT_ERR_ARGUMENT);
}

TEST(TableComm, ReturnsNegatedStatusUnchanged) {
    const struct {
        int code;
        dsopt_status status;
    } cases[] = {{-DSOPT_ERR_COMM, DSOPT_ERR_COMM},       {-DSOPT_ERR_TIMEOUT, DSOPT_ERR_TIMEOUT},
                 {-DSOPT_ERR_ABORTED, DSOPT_ERR_ABORTED}, {-DSOPT_ERR_NOMEM, DSOPT_ERR_COMM},
                 {DSOPT_ERR_TIMEOUT, DSOPT_ERR_COMM},     {-1, DSOPT_ERR_COMM}};
    static int code;
    for (const auto &test : cases) {
        code = test.code;
        dsopt_comm_table table{};
        table.size = sizeof table;
        table.ranks = 2;
        table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return code; };
        dsopt_comm_desc desc{};
        desc.size = sizeof desc;
        desc.kind = DSOPT_COMM_KIND_TABLE;
        desc.table = &table;
        const StreamComm stream_comm(cuda_context(), desc);
        EXPECT_TRUE(fails(outcome_of([&] { stream_comm.add(1); }), test.status)) << test.code;
        EXPECT_EQ(stream_comm.comm->info().status, test.status) << test.code;
    }
}

} // namespace staging_tests
} // namespace nccl_test
