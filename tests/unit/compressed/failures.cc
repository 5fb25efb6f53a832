// SPDX-License-Identifier: Apache-2.0
// The error-compensated 1-bit mean without an optimizer: refused arguments and failing collectives.
#include "support/compressed.h"

using namespace test;

namespace compressed_failures_tests {

// ---------------------------------------------------------------------------------------------------------- refusals
class CompressedArguments : public testing::Test {
protected:
    const Context ctx = make_context(1);
    const Comm comm = self_comm(ctx);
    CompressedMean side{comm, {40, 0, 9}};

    void SetUp() override {
        for (auto &tensor : side.values) std::fill(tensor.begin(), tensor.end(), 3.0f);
    }
    void expect(dsopt_status wanted, const char *text, bool sizes_too = true) {
        const auto worker = side.worker, server = side.server;
        const auto values = side.read();
        EXPECT_TRUE(refused(side.call(), wanted, text));
        EXPECT_EQ(side.worker, worker);
        EXPECT_EQ(side.server, server);
        EXPECT_EQ(side.read(), values);
        EXPECT_EQ(info_of(comm).status, DSOPT_OK) << "a refusal does not make the comm unusable";
        int64_t a = -5, b = -5;
        size_t c = 77;
        const dsopt_status status = dsopt_compressed_sizes(comm.get(), &side.args, &a, &b, &c);
        if (sizes_too) {
            EXPECT_TRUE(refused(status, wanted, text));
            EXPECT_TRUE(a == -5 && b == -5 && c == 77) << "outputs are unchanged";
        } else {
            EXPECT_OK(status);
        }
    }
};

TEST_F(CompressedArguments, RefusesDtypesOtherThanFp32) {
    for (const int32_t dtype :
         std::initializer_list<int32_t>{DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F64, DSOPT_DTYPE_I32, 0, 99}) {
        side.list[2].dtype = dtype;
        expect(DSOPT_ERR_DTYPE, "'2'");
    }
}
TEST_F(CompressedArguments, RefusesNegativeSizesAndCounts) {
    side.list[2].numel = -1;
    expect(DSOPT_ERR_SHAPE, "'2'");
    side.list[2].numel = int64_t(1) << 57;
    side.list[2].data = nullptr;
    expect(DSOPT_ERR_SHAPE, "");
    side.list[2] = {side.values[2].data(), 9, DSOPT_DTYPE_F32, 0};
    side.args.count = -1;
    expect(DSOPT_ERR_ARGUMENT, "count");
}
TEST_F(CompressedArguments, RefusesANullList) {
    side.args.tensors = nullptr;
    expect(DSOPT_ERR_ARGUMENT, "tensors");
}
TEST_F(CompressedArguments, RefusesNullAndMisalignedTensors) {
    side.list[0].data = nullptr;
    expect(DSOPT_ERR_ARGUMENT, "'0'", false);
    side.list[0].data = reinterpret_cast<char *>(side.values[0].data()) + 2;
    expect(DSOPT_ERR_ALIGNMENT, "'0'");
}
TEST_F(CompressedArguments, RefusesNullAndMisalignedErrorBuffers) {
    float *const worker = side.args.worker_error, *const server = side.args.server_error;
    side.args.worker_error = nullptr;
    expect(DSOPT_ERR_ARGUMENT, "worker_error", false);
    EXPECT_TRUE(refused(dsopt_compressed_errors(comm.get(), &side.args, nullptr, nullptr), DSOPT_ERR_ARGUMENT));
    side.args.worker_error = worker;
    side.args.server_error = nullptr;
    expect(DSOPT_ERR_ARGUMENT, "server_error", false);
    for (const bool first : {true, false}) {
        side.args.worker_error = first ? reinterpret_cast<float *>(reinterpret_cast<char *>(worker) + 2) : worker;
        side.args.server_error = first ? server : reinterpret_cast<float *>(reinterpret_cast<char *>(server) + 2);
        expect(DSOPT_ERR_ALIGNMENT, "error buffer", false);
    }
}
TEST_F(CompressedArguments, RefusesAMissingOrSmallWorkspace) {
    const std::string needed = std::to_string(side.bytes - 255); // memory of the workspace is aligned
    side.args.workspace_bytes = side.bytes - 256;
    expect(DSOPT_ERR_WORKSPACE, needed.c_str(), false);
    side.args.workspace_bytes = 0;
    expect(DSOPT_ERR_WORKSPACE, needed.c_str(), false);
    side.args.workspace_bytes = side.bytes;
    void *const workspace = side.args.workspace;
    side.args.workspace = nullptr;
    expect(DSOPT_ERR_WORKSPACE, needed.c_str(), false);
    side.args.workspace = static_cast<char *>(workspace) + 1;
    side.args.workspace_bytes = side.bytes - 1;
    expect(DSOPT_ERR_WORKSPACE, std::to_string(side.bytes).c_str(), false);
}
TEST_F(CompressedArguments, RefusesUnknownCompatReservedAndVersion) {
    for (const int32_t compat : {-1, 2}) {
        side.args.compat = compat;
        expect(DSOPT_ERR_ARGUMENT, "compat");
    }
    side.args.compat = 0;
    side.args.reserved = 1;
    expect(DSOPT_ERR_ARGUMENT, "reserved");
    side.args.reserved = 0;
    side.args.size = sizeof side.args - 4;
    expect(DSOPT_ERR_VERSION, "");
}
TEST_F(CompressedArguments, RefusesNullArguments) {
    EXPECT_TRUE(refused(dsopt_compressed_allreduce(nullptr, &side.args), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_compressed_allreduce(comm.get(), nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_compressed_sizes(nullptr, &side.args, nullptr, nullptr, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_compressed_sizes(comm.get(), nullptr, nullptr, nullptr, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_compressed_errors(nullptr, &side.args, nullptr, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_compressed_errors(comm.get(), nullptr, nullptr, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_OK(dsopt_compressed_sizes(comm.get(), &side.args, nullptr, nullptr, nullptr));
    EXPECT_OK(dsopt_compressed_errors(comm.get(), &side.args, nullptr, nullptr));
}

// ---------------------------------------------------------------------------------------------------------- failures
/// A table of two ranks, of which the other one has the same data. Its collectives return the given codes.
struct FailingTable {
    int all_to_all = 0, all_gather = 0;
    int calls = 0;
    static Comm comm(const Context &ctx, FailingTable &functions) {
        DSOPT_NEW(dsopt_comm_table, table);
        table.self = &functions;
        table.ranks = 2;
        table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 0; };
        table.all_to_all = [](void *self, const void *send, void *recv, int64_t bytes, void *) {
            ++static_cast<FailingTable *>(self)->calls;
            std::memcpy(recv, send, size_t(2 * bytes));
            return static_cast<FailingTable *>(self)->all_to_all;
        };
        table.all_gather = [](void *self, const void *send, void *recv, int64_t bytes, void *) {
            ++static_cast<FailingTable *>(self)->calls;
            for (int r = 0; r < 2; ++r) std::memcpy(static_cast<char *>(recv) + r * bytes, send, size_t(bytes));
            return static_cast<FailingTable *>(self)->all_gather;
        };
        return table_comm(ctx, table);
    }
};

TEST(CompressedAllReduce, ReturnsTheTablesErrorAndStaysUnusable) {
    const Context ctx = make_context(1);
    struct {
        int all_to_all, all_gather;
        dsopt_status wanted;
    } const cases[] = {{7, 0, DSOPT_ERR_COMM},
                       {0, 9, DSOPT_ERR_COMM},
                       {-DSOPT_ERR_TIMEOUT, 0, DSOPT_ERR_TIMEOUT},
                       {0, -DSOPT_ERR_ABORTED, DSOPT_ERR_ABORTED}};
    for (const auto &c : cases) {
        FailingTable functions;
        const Comm comm = FailingTable::comm(ctx, functions);
        CompressedMean side(comm, {100});
        ASSERT_OK(side.call());
        EXPECT_EQ(functions.calls, 2);
        functions.all_to_all = c.all_to_all;
        functions.all_gather = c.all_gather;
        EXPECT_TRUE(refused(side.call(), c.wanted));
        const int calls = functions.calls;
        EXPECT_TRUE(refused(side.call(), c.wanted)) << "sticky";
        EXPECT_EQ(functions.calls, calls) << "an unusable comm is not called again";
        EXPECT_EQ(info_of(comm).status, c.wanted);
    }
}

TEST(CompressedAllReduce, TimesOutIfAPeerDoesNotCall) {
    const Context ctx = make_context(1);
    const CommId id = new_id();
    std::array<Comm, 2> comms;
    run_ranks(2, [&](int rank) { comms[size_t(rank)] = local_comm(ctx, id, rank, 2, 1500); });
    CompressedMean side(comms[0], {100});
    EXPECT_TRUE(refused(side.call(), DSOPT_ERR_TIMEOUT));
}

} // namespace compressed_failures_tests
