// SPDX-License-Identifier: Apache-2.0
// dsopt_comm_all_reduce of lists, compared with sums in double: sizes around every bucket limit, mixed dtypes,
// identical bits on every rank, the number of collectives, and failing comms.
#include "support/onebit.h"
#include <mutex>

using namespace test;

namespace comm_all_reduce_tests {

constexpr size_t kUnbucketedNumel = size_t(1) << 18; // larger fp32 tensors are reduced without the bucket
constexpr size_t kBucketNumel = size_t(1) << 20;     // elements of the bucket
constexpr int32_t kOps[] = {DSOPT_OP_SUM, DSOPT_OP_MEAN, DSOPT_OP_MAX};

struct Entry {
    size_t numel;
    int32_t dtype = DSOPT_DTYPE_F32;
    bool absent = false;
};
using Entries = std::vector<Entry>;

/// Returns a rank's value of an element. Sums of four of them are exact in fp32 and in double.
float value_of(int rank, size_t tensor, size_t i) {
    const auto mixed = uint32_t(i * 2654435761u + tensor * 40503u + size_t(rank) * 977u);
    return float(int(mixed >> 16 & 255) - 128) / 16; // exact in 16 bits
}
std::vector<Array> arrays_of(const Entries &entries, int rank) {
    std::vector<Array> arrays;
    for (size_t t = 0; t < entries.size(); ++t) {
        arrays.push_back(entries[t].absent ? Array::absent(entries[t].numel, entries[t].dtype)
                                           : Array(entries[t].dtype, entries[t].numel, 0));
        for (size_t i = 0; i < entries[t].numel && !entries[t].absent; ++i) arrays[t].set(i, value_of(rank, t, i));
    }
    return arrays;
}
double expected_value(int ranks, int32_t op, size_t tensor, size_t i) {
    double result = value_of(0, tensor, i);
    for (int rank = 1; rank < ranks; ++rank) {
        const double other = value_of(rank, tensor, i);
        result = op == DSOPT_OP_MAX ? std::max(result, other) : result + other;
    }
    return op == DSOPT_OP_MEAN ? result / ranks : result;
}
dsopt_status all_reduce(const Comm &comm, const std::vector<Array> &arrays, int32_t op) {
    const std::vector<dsopt_tensor> list = list_of(arrays);
    return dsopt_comm_all_reduce(comm.get(), list.data(), int64_t(list.size()), op, nullptr);
}
/// Checks every element of small arrays. Checks every 1009th element and the last one of larger arrays.
testing::AssertionResult matches_reference(const Array &array, int ranks, int32_t op, size_t tensor) {
    const size_t step = array.size() > 10000 ? 1009 : 1;
    for (size_t position = 0; position < array.size() + step; position += step) {
        if (array.size() == 0) break;
        const size_t i = std::min(position, array.size() - 1);
        const double expected = expected_value(ranks, op, tensor, i), unit = array.dtype() == DSOPT_DTYPE_F32 ? 0x1p-23
                                                                             : array.dtype() == DSOPT_DTYPE_F16
                                                                                 ? 0x1p-11
                                                                                 : 0x1p-8;
        // MEAN multiplies by a rounded 1 / ranks: one ulp of fp32 in addition to the rounding of the dtype.
        if (std::fabs(double(array[i]) - expected) > std::fabs(expected) * (unit + 0x1p-22))
            return testing::AssertionFailure() << array[i] << " instead of " << expected << " at " << i;
        if (op != DSOPT_OP_MEAN && array[i] != rounded(float(expected), array.dtype()))
            return testing::AssertionFailure() << array[i] << " is not " << expected << " rounded once, at " << i;
    }
    return testing::AssertionSuccess();
}
/// Compares the results of all ranks with the reference and with each other. Returns the number of calls that one rank
/// counts.
int64_t count_checked_calls(const Entries &entries, int ranks, int32_t op) {
    std::vector<std::vector<std::string>> bytes(static_cast<size_t>(ranks));
    std::vector<int64_t> calls(static_cast<size_t>(ranks));
    with_ranks(ranks, [&](int rank, const Context &, const Comm &comm) {
        const std::vector<Array> arrays = arrays_of(entries, rank);
        ASSERT_OK(all_reduce(comm, arrays, op));
        for (size_t t = 0; t < arrays.size(); ++t) {
            if (entries[t].absent) continue;
            EXPECT_TRUE(matches_reference(arrays[t], ranks, op, t))
                << "tensor " << t << " op " << op << " ranks " << ranks;
            bytes[size_t(rank)].push_back(arrays[t].text());
        }
        calls[size_t(rank)] = info_of(comm).calls;
    });
    for (int rank = 1; rank < ranks; ++rank) {
        EXPECT_TRUE(bytes[size_t(rank)] == bytes[0]) << "rank " << rank << " has different bits";
        EXPECT_EQ(calls[size_t(rank)], calls[0]);
    }
    return calls[0];
}

TEST(AllReduce, ComputesSumMeanAndMaxOfMixedDtypes) {
    const Entries entries{{3},
                          {700, DSOPT_DTYPE_F16},
                          {0},
                          {1, DSOPT_DTYPE_BF16},
                          {4097},
                          {5000, DSOPT_DTYPE_BF16},
                          {33, DSOPT_DTYPE_F16},
                          {0, DSOPT_DTYPE_F16}};
    for (const int ranks : {1, 2, 3, 4})
        for (const int32_t op : kOps) EXPECT_EQ(count_checked_calls(entries, ranks, op), ranks == 1 ? 0 : 1);
}

LABEL(long_emulated);
TEST(AllReduce, ReducesTensorsOfSizesAroundTheBucketLimit) {
    for (const size_t numel : {size_t(0), size_t(1), kUnbucketedNumel - 1, kUnbucketedNumel, kUnbucketedNumel + 1})
        for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16})
            for (const int32_t op : kOps) EXPECT_EQ(count_checked_calls({{numel, dtype}}, 2, op), numel == 0 ? 0 : 1);
}

TEST(AllReduce, ReducesLargeAndSmallTensorsInAnyOrder) {
    EXPECT_EQ(count_checked_calls({{5}, {kUnbucketedNumel + 3}, {7, DSOPT_DTYPE_F16}, {kUnbucketedNumel}, {0}, {9}}, 3,
                                  DSOPT_OP_MEAN),
              3);
}

LABEL(long_emulated);
TEST(AllReduce, FillsABucketToItsLastElement) {
    const size_t part = kBucketNumel / 16 - 1; // fp32, just small enough for the bucket
    for (const int extra : {-1, 0, 1}) {
        Entries entries(16, Entry{part});
        entries.push_back({size_t(16 + extra)});
        EXPECT_EQ(count_checked_calls(entries, 2, DSOPT_OP_SUM), extra > 0 ? 2 : 1) << extra;
    }
}

TEST(AllReduce, SplitsA16BitTensorLargerThanTheBucket) {
    EXPECT_EQ(count_checked_calls({{3}, {kBucketNumel + 5, DSOPT_DTYPE_F16}, {2, DSOPT_DTYPE_BF16}}, 2, DSOPT_OP_MEAN),
              2);
}

TEST(AllReduce, ReducesManyTinyTensorsInOneCollective) {
    Entries entries;
    for (size_t t = 0; t < 200; ++t)
        entries.push_back({t % 7, t % 3 == 0   ? int32_t(DSOPT_DTYPE_F16)
                                  : t % 3 == 1 ? int32_t(DSOPT_DTYPE_F32)
                                               : int32_t(DSOPT_DTYPE_BF16)});
    for (const int ranks : {2, 4}) EXPECT_EQ(count_checked_calls(entries, ranks, DSOPT_OP_MEAN), 1);
}

TEST(AllReduce, IgnoresEntriesWithoutData) {
    Entries entries{
        {10}, {11, DSOPT_DTYPE_F32, true}, {12, DSOPT_DTYPE_F16}, {kUnbucketedNumel, DSOPT_DTYPE_F32, true}};
    EXPECT_EQ(count_checked_calls(entries, 2, DSOPT_OP_SUM), 1);
    for (Entry &entry : entries) entry.absent = true;
    EXPECT_EQ(count_checked_calls(entries, 2, DSOPT_OP_SUM), 0);
}

TEST(AllReduce, ComputesAMeanWhoseSumWouldOverflow) {
    with_ranks(4, [&](int rank, const Context &, const Comm &comm) {
        const float large = 60000; // of 65504
        std::vector<Array> arrays{Array(DSOPT_DTYPE_F16, 3, large), Array(DSOPT_DTYPE_F16, 3, rank == 0 ? 1.0f : 0.0f)};
        ASSERT_OK(all_reduce(comm, arrays, DSOPT_OP_MEAN));
        EXPECT_EQ(arrays[0].floats(), std::vector<float>(3, rounded(large, DSOPT_DTYPE_F16)));
        EXPECT_EQ(arrays[1][0], 0.25f);
        ASSERT_OK(all_reduce(comm, arrays, DSOPT_OP_SUM));
        EXPECT_EQ(arrays[0][0], kInf);
        EXPECT_EQ(arrays[1][0], 1);
    });
}

TEST(AllReduce, PropagatesNonFiniteElementsToEveryRank) {
    with_ranks(2, [&](int rank, const Context &, const Comm &comm) {
        std::vector<Array> arrays{Array(DSOPT_DTYPE_F32, 3, 1), Array(DSOPT_DTYPE_F16, 3, 1)};
        if (rank == 1) arrays[0].set(0, kNaN), arrays[1].set(2, kInf);
        ASSERT_OK(all_reduce(comm, arrays, DSOPT_OP_MEAN));
        EXPECT_TRUE(std::isnan(arrays[0][0]));
        EXPECT_EQ(arrays[0][1], 1);
        EXPECT_EQ(arrays[1][2], kInf);
    });
}

TEST(AllReduce, ReusesTheBucketForListsOfOtherSizes) {
    with_ranks(2, [&](int rank, const Context &, const Comm &comm) {
        for (const size_t numel : {size_t(10), size_t(5000), size_t(1), size_t(70000), size_t(3)}) {
            const std::vector<Array> arrays = arrays_of({{numel}, {numel, DSOPT_DTYPE_BF16}}, rank);
            ASSERT_OK(all_reduce(comm, arrays, DSOPT_OP_SUM));
            for (size_t t = 0; t < 2; ++t) EXPECT_TRUE(matches_reference(arrays[t], 2, DSOPT_OP_SUM, t)) << numel;
        }
    });
}

// ------------------------------------------------------------------------------------------------------------ failures
TEST(AllReduce, FailsOnEveryRankIfListsDifferInSize) {
    with_ranks(2, [&](int rank, const Context &, const Comm &comm) {
        EXPECT_TRUE(refused(all_reduce(comm, arrays_of({{size_t(5 + rank)}}, rank), DSOPT_OP_SUM), DSOPT_ERR_COMM));
        EXPECT_EQ(info_of(comm).status, DSOPT_ERR_COMM);
        EXPECT_TRUE(refused(all_reduce(comm, arrays_of({{5}}, rank), DSOPT_OP_SUM), DSOPT_ERR_COMM, "unusable"));
    });
}

TEST(AllReduce, ReturnsAbortedForEmptyListsToo) {
    const Context ctx = make_context(1);
    const Comm self = self_comm(ctx);
    with_ranks(2, [&](int, const Context &, const Comm &comm) {
        dsopt_comm_abort(comm.get());
        EXPECT_TRUE(refused(all_reduce(comm, arrays_of({{5}}, 0), DSOPT_OP_SUM), DSOPT_ERR_ABORTED));
        EXPECT_TRUE(refused(all_reduce(comm, {}, DSOPT_OP_SUM), DSOPT_ERR_ABORTED));
        EXPECT_TRUE(refused(all_reduce(comm, arrays_of({{0}, {3, DSOPT_DTYPE_F16, true}}, 0), DSOPT_OP_SUM),
                            DSOPT_ERR_ABORTED));
    });
    EXPECT_OK(all_reduce(self, arrays_of({{5}}, 0), DSOPT_OP_SUM));
    dsopt_comm_abort(self.get());
    EXPECT_TRUE(refused(all_reduce(self, arrays_of({{5}}, 0), DSOPT_OP_SUM), DSOPT_ERR_ABORTED));
}

TEST(AllReduce, ReturnsAbortedIfAPeerAborts) {
    const Context ctx = make_context(1);
    const CommId id = new_id();
    std::vector<Comm> comms(2);
    run_ranks(2, [&](int rank) { comms[size_t(rank)] = local_comm(ctx, id, rank, 2, -1); });
    std::thread waits(
        [&] { EXPECT_TRUE(refused(all_reduce(comms[0], arrays_of({{5}}, 0), DSOPT_OP_SUM), DSOPT_ERR_ABORTED)); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    dsopt_comm_abort(comms[1].get());
    waits.join();
}

TEST(AllReduce, TimesOutIfAPeerDoesNotCall) {
    const Context ctx = make_context(1);
    const CommId id = new_id();
    std::vector<Comm> comms(2);
    run_ranks(2, [&](int rank) { comms[size_t(rank)] = local_comm(ctx, id, rank, 2, 300); });
    EXPECT_TRUE(refused(all_reduce(comms[0], arrays_of({{5}}, 0), DSOPT_OP_SUM), DSOPT_ERR_TIMEOUT));
}

// --------------------------------------------------------------------------------------------------------------- table
/// Functions of a caller's comm of two ranks, of which the other one has the same data.
struct MirrorTable {
    std::vector<std::pair<int64_t, int32_t>> calls; // count, op
    int failing_call = -1, code = 0;
    dsopt_comm_table table() {
        DSOPT_NEW(dsopt_comm_table, table);
        table.self = this;
        table.ranks = 2;
        table.all_reduce = [](void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                              void *) {
            auto &mirror = *static_cast<MirrorTable *>(self);
            EXPECT_EQ(dtype, DSOPT_DTYPE_F32);
            EXPECT_TRUE(op == DSOPT_OP_SUM || op == DSOPT_OP_MAX) << "a table has no MEAN";
            mirror.calls.emplace_back(count, op);
            if (int(mirror.calls.size()) - 1 == mirror.failing_call) return mirror.code;
            for (int64_t i = 0; i < count; ++i)
                static_cast<float *>(recv)[i] = static_cast<const float *>(send)[i] * (op == DSOPT_OP_SUM ? 2 : 1);
            return 0;
        };
        return table;
    }
    Comm comm(const Context &ctx) {
        const dsopt_comm_table functions = table();
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = DSOPT_COMM_KIND_TABLE;
        desc.table = &functions;
        dsopt_comm *comm = nullptr;
        must(dsopt_comm_create(ctx.get(), &desc, &comm));
        return Comm(comm);
    }
};

TEST(AllReduce, CallsTheTableWithFp32AndSumOrMaxOnly) {
    const Context ctx = make_context(1);
    MirrorTable other;
    const Comm comm = other.comm(ctx);
    for (const int32_t op : kOps) {
        other.calls.clear();
        const Entries entries{{7}, {9, DSOPT_DTYPE_F16}, {kUnbucketedNumel}};
        const std::vector<Array> arrays = arrays_of(entries, 0);
        ASSERT_OK(all_reduce(comm, arrays, op));
        const float factor = op == DSOPT_OP_SUM ? 2 : 1;
        for (size_t t = 0; t < arrays.size(); ++t)
            for (size_t i = 0; i < arrays[t].size(); i += 5) ASSERT_EQ(arrays[t][i], factor * value_of(0, t, i));
        using Calls = std::vector<std::pair<int64_t, int32_t>>;
        const int32_t asked = op == DSOPT_OP_MEAN ? int32_t(DSOPT_OP_SUM) : op;
        EXPECT_EQ(other.calls, (Calls{{int64_t(kUnbucketedNumel), asked}, {16, asked}}));
    }
}

TEST(AllReduce, ReturnsTheTablesErrorAndMakesTheCommUnusable) {
    const Context ctx = make_context(1);
    const std::pair<int, dsopt_status> cases[] = {{77, DSOPT_ERR_COMM},
                                                  {-DSOPT_ERR_COMM, DSOPT_ERR_COMM},
                                                  {-DSOPT_ERR_TIMEOUT, DSOPT_ERR_TIMEOUT},
                                                  {-DSOPT_ERR_ABORTED, DSOPT_ERR_ABORTED}};
    for (const auto &[code, status] : cases)
        for (const int failing_call : {0, 1}) {
            MirrorTable other;
            other.failing_call = failing_call;
            other.code = code;
            const Comm comm = other.comm(ctx);
            const std::vector<Array> arrays = arrays_of({{7}, {kUnbucketedNumel}}, 0);
            EXPECT_TRUE(refused(all_reduce(comm, arrays, DSOPT_OP_MEAN), status));
            EXPECT_EQ(info_of(comm).status, status);
            EXPECT_TRUE(refused(all_reduce(comm, arrays, DSOPT_OP_MEAN), status));
            EXPECT_EQ(int(other.calls.size()), failing_call + 1) << "an unusable comm is not called again";
        }
}

// ------------------------------------------------------------------------------------------------------------ training
TEST(AllReduce, AveragesGradientsToThoseOfTheWholeBatch) {
    // A linear model with squared errors: the gradient of the batch is the mean of the gradients of its parts.
    constexpr size_t inputs = 20;
    constexpr int samples = 24, steps = 30;
    const auto gradient = [](const Array &weight, int begin, int end) {
        std::vector<double> sum(inputs);
        for (int s = begin; s < end; ++s) {
            Random random{uint64_t(s + 1)};
            const std::vector<float> x = random.floats(inputs);
            double error = -random.uniform(-1, 1);
            for (size_t i = 0; i < inputs; ++i) error += double(weight[i]) * double(x[i]);
            for (size_t i = 0; i < inputs; ++i) sum[i] += 2 * error * double(x[i]) / (end - begin);
        }
        return Array(DSOPT_DTYPE_F32, {sum.begin(), sum.end()});
    };
    const Context ctx = make_context(1);
    const auto start = [&](const Context &where) {
        return Trainer(where, optimizer_desc(), group_of(DSOPT_ALGORITHM_ADAMW),
                       std::vector<Array>{Array(DSOPT_DTYPE_F32, inputs, 0.1f)});
    };
    Trainer whole = start(ctx);
    for (int step = 0; step < steps; ++step) must(whole.step({gradient(whole.weight(), 0, samples)}));
    for (const int ranks : {2, 3, 4})
        with_ranks(ranks, [&](int rank, const Context &own, const Comm &comm) {
            Trainer trainer = start(own);
            const int part = samples / ranks;
            for (int step = 0; step < steps; ++step) {
                const std::vector<Array> grads{gradient(trainer.weight(), rank * part, (rank + 1) * part)};
                ASSERT_OK(all_reduce(comm, grads, DSOPT_OP_MEAN));
                must(trainer.step(grads));
            }
            for (size_t i = 0; i < inputs; ++i) EXPECT_NEAR(trainer.weight()[i], whole.weight()[i], 2e-5);
        });
}

} // namespace comm_all_reduce_tests
