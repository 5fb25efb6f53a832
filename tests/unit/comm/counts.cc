// SPDX-License-Identifier: Apache-2.0
// Counters of dsopt_comm_info per kind of collective, compared with exact numbers.
#include "support/onebit.h"

using namespace test;

namespace comm_counts_tests {

struct Counters {
    int64_t calls, sent, received;
    bool operator==(const Counters &other) const {
        return calls == other.calls && sent == other.sent && received == other.received;
    }
};
void PrintTo(const Counters &n, std::ostream *out) {
    *out << n.calls << " calls, " << n.sent << " bytes sent, " << n.received << " received";
}
Counters counters_of(const dsopt_comm_info &info, int kind) {
    return {info.calls_of[kind], info.sent_of[kind], info.received_of[kind]};
}
Counters difference(const dsopt_comm_info &now, const dsopt_comm_info &then, int kind) {
    const Counters a = counters_of(now, kind), b = counters_of(then, kind);
    return {a.calls - b.calls, a.sent - b.sent, a.received - b.received};
}
void expect_sums(const dsopt_comm_info &info) {
    Counters sum{};
    for (int kind = 0; kind < DSOPT_COLLECTIVE_SLOTS; ++kind) {
        const Counters n = counters_of(info, kind);
        sum = {sum.calls + n.calls, sum.sent + n.sent, sum.received + n.received};
        if (kind > DSOPT_COLLECTIVE_ALL_GATHER) { EXPECT_EQ(n, (Counters{0, 0, 0})) << kind; }
    }
    EXPECT_EQ(sum, (Counters{info.calls, info.bytes_sent, info.bytes_received}));
}
constexpr Counters kNothing{0, 0, 0};

TEST(CommInfo, CountsOneBitPerElementOfACompressedMean) {
    for (const int ranks : {2, 3, 4})
        with_ranks(ranks, [&](int, const Context &, const Comm &comm) {
            // The tensors are in blocks 0 to 2 and 3 to 6.
            Array a(DSOPT_DTYPE_F32, 9600, 1), b(DSOPT_DTYPE_F32, 14400, -1);
            const std::vector<dsopt_tensor> list = {a.tensor(), b.tensor()};
            DSOPT_NEW(dsopt_compressed, args);
            args.tensors = list.data();
            args.count = 2;
            int64_t worker = 0, server = 0;
            must(dsopt_compressed_sizes(comm.get(), &args, &worker, &server, &args.workspace_bytes));
            const Shared<float> worker_error(static_cast<size_t>(worker)), server_error(static_cast<size_t>(server));
            const Shared<char> memory(args.workspace_bytes + 256);
            args.worker_error = worker_error.data();
            args.server_error = server_error.data();
            args.workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
            const int64_t blocks = (7 + ranks - 1) / ranks, chunk = 4096 * blocks, scales = 3 % blocks == 0 ? 1 : 2;
            const int64_t message = (chunk / 8 + 4 * scales + 15) / 16 * 16, bytes = (ranks - 1) * message;
            for (int64_t call = 1; call <= 3; ++call) {
                ASSERT_OK(dsopt_compressed_allreduce(comm.get(), &args));
                const dsopt_comm_info info = info_of(comm);
                for (const int kind : {DSOPT_COLLECTIVE_ALL_TO_ALL, DSOPT_COLLECTIVE_ALL_GATHER})
                    EXPECT_EQ(counters_of(info, kind), (Counters{call, call * bytes, call * bytes}))
                        << ranks << " ranks";
                EXPECT_EQ(counters_of(info, DSOPT_COLLECTIVE_ALL_REDUCE), kNothing);
                expect_sums(info);
            }
        });
}

TEST(CommInfo, CountsStepsOfOneBitAdamByReduction) {
    constexpr int ranks = 4;
    constexpr int64_t numel = 32768;
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        const Problem problem{{numel}, ranks};
        Trainer trainer = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), problem.weights(),
                                     DSOPT_OPTIMIZER_AVERAGES);
        // All steps reduce one double, the skip flag. Compressed steps reduce two more: the squares of the group and of
        // all groups.
        const int64_t agree = 8 * 2 * 3 / 4, norms = 3 * agree;
        // A row of gradients for each of the other ranks, and the means in the other direction.
        const int64_t rows = 3 * numel / 4 * 4, bits = 3 * ((numel / 4 / 8 + 4 + 15) / 16 * 16);
        for (int64_t call = 1; call <= 5; ++call) {
            const dsopt_comm_info before = info_of(comm);
            ASSERT_OK(trainer.step(problem.local_gradients(rank, call)));
            const dsopt_comm_info after = info_of(comm);
            const bool full = call <= 2;
            const auto all_reduce = difference(after, before, DSOPT_COLLECTIVE_ALL_REDUCE);
            const int64_t lists = call == 1 ? 148 * 2 * 3 / 4 : 0, sum = agree + lists; // lists are compared once
            EXPECT_EQ(all_reduce, (full ? Counters{1 + (call == 1), sum, sum} : Counters{1, norms, norms})) << call;
            for (const int kind : {DSOPT_COLLECTIVE_ALL_TO_ALL, DSOPT_COLLECTIVE_ALL_GATHER})
                EXPECT_EQ(difference(after, before, kind), (full ? Counters{1, rows, rows} : Counters{1, bits, bits}))
                    << call;
            expect_sums(after);
        }
    });
}

LABEL(long_emulated);
TEST(StepTiming, MeasuresPhasesOfCompressedStepsIfEnabled) {
    for (const int32_t algorithm : kFamily)
        for (const uint32_t timing : {0, int(DSOPT_OPTIMIZER_TIMING)})
            with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
                const Problem problem{{50000}, 2};
                Trainer trainer = trainer_of(ctx, comm, group_for(algorithm, 3), problem.weights(), timing);
                for (int64_t call = 1; call <= 12; ++call) {
                    const int32_t what = reduction(trainer);
                    must(trainer.step(problem.gradients_for(what, rank, call)));
                    const dsopt_report report = trainer.report();
                    for (const int phase : {DSOPT_MS_COMPRESS, DSOPT_MS_EXCHANGE, DSOPT_MS_DECOMPRESS})
                        EXPECT_EQ(report.ms[phase] > 0, timing != 0 && what == DSOPT_REDUCTION_COMPRESSED)
                            << name_of(algorithm) << ", phase " << phase << ", call " << call;
                }
            });
}

TEST(CommInfo, CountsRingTrafficOfAllReduces) {
    for (const int ranks : {1, 2, 3, 5})
        with_ranks(ranks, [&](int, const Context &ctx, const Comm &comm) {
            Trainer trainer(ctx, desc_with(comm), group_of(DSOPT_ALGORITHM_ADAM),
                            std::vector<Array>{Array(DSOPT_DTYPE_F32, 9, 1)});
            for (int64_t call = 1; call <= 3; ++call) { // one double, the skip flag
                ASSERT_OK(trainer.step({Array(DSOPT_DTYPE_F32, 9, 1)}));
                const int64_t bytes = call * (2 * 8 * (ranks - 1) / ranks);
                EXPECT_EQ(counters_of(info_of(comm), DSOPT_COLLECTIVE_ALL_REDUCE),
                          (ranks == 1 ? kNothing : Counters{call, bytes, bytes}));
                expect_sums(info_of(comm));
            }
        });
}

enum { kToAll = 1, kGather = 2 };
/// Returns a comm of rank 1 of 4 whose peers send zeros. Its table has all_reduce and the functions in `functions`.
Comm comm_with(const Context &ctx, unsigned functions, int result = 0) {
    static int results[2] = {0, 9};
    DSOPT_NEW(dsopt_comm_table, table);
    table.self = &results[result != 0];
    table.rank = 1;
    table.ranks = 4;
    table.all_reduce = [](void *self, const void *, void *, int64_t, int32_t, int32_t, void *) {
        return *static_cast<int *>(self);
    };
    const auto zeros = [](void *self, const void *, void *recv, int64_t bytes, void *) {
        std::memset(recv, 0, size_t(4 * bytes));
        return *static_cast<int *>(self);
    };
    if (functions & kToAll) table.all_to_all = zeros;
    if (functions & kGather) table.all_gather = zeros;
    return table_comm(ctx, table);
}
dsopt_status compress(const Comm &comm, size_t numel) {
    Array x(DSOPT_DTYPE_F32, numel, 1);
    const dsopt_tensor tensor = x.tensor();
    DSOPT_NEW(dsopt_compressed, args);
    args.tensors = &tensor;
    args.count = 1;
    int64_t worker = 0, server = 0;
    must(dsopt_compressed_sizes(comm.get(), &args, &worker, &server, &args.workspace_bytes));
    const Shared<float> worker_error(static_cast<size_t>(worker)), server_error(static_cast<size_t>(server));
    const Shared<char> memory(args.workspace_bytes + 256);
    args.worker_error = worker_error.data();
    args.server_error = server_error.data();
    args.workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
    return dsopt_compressed_allreduce(comm.get(), &args);
}

TEST(CommInfo, CountsFallbacksAsTheFunctionsTheyCall) {
    const Context ctx = make_context(1);
    constexpr int64_t message = 528; // 512 bytes of bits and 4 of scales, rounded up to 16 bytes
    struct Case {
        unsigned functions;
        Counters reduce, to_all, gather;
    };
    const Case cases[] = {
        {kToAll | kGather, kNothing, {1, 3 * message, 3 * message}, {1, 3 * message, 3 * message}},
        {kGather, kNothing, kNothing, {5, 15 * message, 15 * message}}, // one per rank's column, and the gather
        {0, {5, 5 * (4 * message * 2 * 3 / 4), 5 * (4 * message * 2 * 3 / 4)}, kNothing, kNothing}};
    for (const Case &c : cases) {
        const Comm comm = comm_with(ctx, c.functions);
        ASSERT_OK(compress(comm, 4096)) << c.functions;
        const dsopt_comm_info info = info_of(comm);
        EXPECT_EQ(counters_of(info, DSOPT_COLLECTIVE_ALL_REDUCE), c.reduce) << c.functions;
        EXPECT_EQ(counters_of(info, DSOPT_COLLECTIVE_ALL_TO_ALL), c.to_all) << c.functions;
        EXPECT_EQ(counters_of(info, DSOPT_COLLECTIVE_ALL_GATHER), c.gather) << c.functions;
        expect_sums(info);
    }
}

TEST(CommInfo, CountsNoBytesOfAFailedCall) {
    const Context ctx = make_context(1);
    const Comm comm = comm_with(ctx, kToAll | kGather, 9);
    EXPECT_TRUE(refused(compress(comm, 4096), DSOPT_ERR_COMM));
    EXPECT_TRUE(refused(compress(comm, 4096), DSOPT_ERR_COMM)) << "not called again";
    EXPECT_EQ(counters_of(info_of(comm), DSOPT_COLLECTIVE_ALL_TO_ALL), (Counters{1, 0, 0}));
    expect_sums(info_of(comm));
}

} // namespace comm_counts_tests
