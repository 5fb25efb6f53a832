// SPDX-License-Identifier: Apache-2.0
// What the engine makes up for: data in other memory than a comm works in, and functions that a table does not have.
#include "nccl_ranks.h"

namespace nccl_test {
namespace {

/// Another comm behind a table of the caller.
struct Behind {
    std::unique_ptr<Comm> comm;
    Place place;
    int calls = 0;

    template <class Call> int code(const Call &call) {
        ++calls;
        return outcome_of(call).status;
    }
    static Behind &of(void *self) { return *static_cast<Behind *>(self); }
    dsopt_comm_table table(unsigned with) {
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
        if (with & 1)
            table.all_to_all = [](void *self, const void *send, void *recv, int64_t bytes, void *stream) {
                return of(self).code([&] { of(self).comm->all_to_all(send, recv, bytes, stream, of(self).place); });
            };
        if (with & 2)
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

TEST(Staging, LocalCommServesDeviceMemory) {
    const std::string id = local_id();
    run_ranks(3, [&](int rank) { exercise(Rank(cuda_context(rank), local_desc(id, rank, 3))); });
}

TEST(Staging, OneRankCopies) {
    dsopt_comm_desc desc{};
    desc.size = sizeof desc;
    run_ranks(1, [&](int) { exercise(Rank(cuda_context(), desc)); });
}

TEST(MissingFunctions, AreMadeFromTheOthersInBothKindsOfMemory) {
    for (const Place place : {Place::host, Place::backend})
        for (unsigned with = 0; with < 4; ++with) {
            const std::string id = place == Place::host ? local_id() : new_id();
            run_ranks(3, [&](int rank) {
                const auto context = cuda_context(rank);
                const dsopt_comm_desc inner =
                    place == Place::host ? local_desc(id, rank, 3) : desc_of(id, rank, 3, 60000);
                Behind behind{dsopt::make_comm(context, inner), place};
                const dsopt_comm_table table = behind.table(with);
                dsopt_comm_desc desc{};
                desc.size = sizeof desc;
                desc.kind = DSOPT_COMM_KIND_TABLE;
                desc.table = &table;
                const Rank mine(context, desc);
                exercise(mine);
                EXPECT_EQ(mine.comm->info().calls, behind.calls) << "what is counted is what the table was asked for";
                EXPECT_GT(behind.calls, 0);
            });
        }
}

TEST(MissingFunctions, FailureInsideOneIsAFailureOfTheCall) {
    dsopt_comm_table table{};
    table.size = sizeof table;
    table.ranks = 2;
    table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 77; };
    dsopt_comm_desc desc{};
    desc.size = sizeof desc;
    desc.kind = DSOPT_COMM_KIND_TABLE;
    desc.table = &table;
    const Rank mine(cuda_context(), desc);
    char from[6] = {}, to[12];
    EXPECT_TRUE(fails(outcome_of([&] { mine.comm->all_gather(from, to, 6, mine.stream); }), DSOPT_ERR_COMM, "(77)"));
    EXPECT_TRUE(
        fails(outcome_of([&] { mine.comm->all_gather(from, to, 6, mine.stream); }), DSOPT_ERR_COMM, "unusable"));
}

TEST(TableCodes, NegativeStatusIsTakenAsItIs) {
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
        const Rank mine(cuda_context(), desc);
        EXPECT_TRUE(fails(outcome_of([&] { mine.add(1); }), test.status)) << test.code;
        EXPECT_EQ(mine.comm->info().status, test.status) << test.code;
    }
}

} // namespace
} // namespace nccl_test
