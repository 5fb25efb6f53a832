// SPDX-License-Identifier: Apache-2.0
// The error-compensated 1-bit mean without an optimizer, compared with the algorithm in double.
#include "support/compressed.h"
#include "support/list_vector.h"
#include "support/shapes.h"
#include <barrier>

using namespace test;

namespace compressed_tests {

constexpr double kUlp = 0x1p-23;

Context context_of(int threads, int64_t chunk = 0) {
    DSOPT_NEW(dsopt_context_desc, desc);
    desc.threads = threads;
    desc.chunk = chunk;
    dsopt_context *ctx = nullptr;
    must(dsopt_context_create(&desc, &ctx));
    return Context(ctx);
}

// ---------------------------------------------------------------------------------------------------- the algorithm
struct Partition {
    int64_t ranks, chunk = 0, scales = 0;
    std::vector<int64_t> begin, numel;
    Partition(int64_t w, const std::vector<int64_t> &sizes) : ranks(w), numel(sizes) {
        const ListVector vector(sizes);
        begin = vector.begin;
        chunk = vector.chunk(w);
        for (int64_t d = 0; d < w; ++d) {
            int64_t first = -1, last = -1;
            for (size_t t = 0; t < sizes.size(); ++t)
                if (numel[t] > 0 && begin[t] < (d + 1) * chunk && begin[t] + numel[t] > d * chunk) {
                    if (first < 0) first = int64_t(t);
                    last = int64_t(t);
                }
            if (first >= 0) scales = std::max(scales, last - first + 1);
        }
    }
    int64_t message_bytes() const { return (4 * scales + chunk / 8 + 15) / 16 * 16; }
};

struct Expected {
    std::vector<std::vector<double>> y, worker, server; // y per tensor; errors per rank
    std::vector<std::vector<bool>> unclear;             // the sign of the server's value depends on rounding
    std::vector<std::vector<double>> magnitude;         // magnitude of the terms of a server's error, per rank
    std::vector<std::vector<double>> scale;             // per rank and tensor
    double unclear_count = 0;
};

Expected expected(const Partition &partition, const std::vector<Values> &x,
                  const std::vector<CompressedMean::Residuals> &errors) {
    const auto ranks = size_t(partition.ranks), tensors = partition.numel.size();
    Expected e;
    std::vector<std::vector<double>> sent(ranks, std::vector<double>(size_t(partition.chunk * partition.ranks)));
    for (size_t r = 0; r < ranks; ++r) {
        e.worker.emplace_back(size_t(partition.chunk * partition.ranks));
        e.scale.emplace_back(tensors);
        for (size_t t = 0; t < tensors; ++t) {
            double squares = 0;
            for (int64_t i = 0; i < partition.numel[t]; ++i) {
                const auto k = size_t(partition.begin[t] + i);
                const double b = double(float(double(x[r][t][size_t(i)]) + double(errors[r].worker[k])));
                e.worker[r][k] = b;
                squares += b * b;
            }
            const double s = partition.numel[t] > 0 ? std::sqrt(squares / double(partition.numel[t])) : 0;
            e.scale[r][t] = s;
            for (int64_t i = 0; i < partition.numel[t]; ++i) {
                const auto k = size_t(partition.begin[t] + i);
                sent[r][k] = e.worker[r][k] < 0 ? -s : s;
                e.worker[r][k] -= sent[r][k];
            }
        }
    }
    for (size_t t = 0; t < tensors; ++t) {
        e.y.emplace_back(size_t(partition.numel[t]));
        e.unclear.emplace_back(size_t(partition.numel[t]));
    }
    for (size_t d = 0; d < ranks; ++d) {
        e.server.emplace_back(size_t(partition.chunk));
        e.magnitude.emplace_back(size_t(partition.chunk));
        for (size_t t = 0; t < tensors; ++t) {
            const int64_t first = std::max(partition.begin[t], int64_t(d) * partition.chunk),
                          last = std::min(partition.begin[t] + partition.numel[t], int64_t(d + 1) * partition.chunk);
            if (first >= last) continue;
            double squares = 0, largest = 0;
            for (size_t r = 0; r < ranks; ++r) largest = std::max(largest, e.scale[r][t]);
            for (int64_t k = first; k < last; ++k) {
                const auto in = size_t(k - int64_t(d) * partition.chunk);
                double c = errors[d].server[in];
                for (size_t r = 0; r < ranks; ++r) c += sent[r][size_t(k)] / double(ranks);
                e.server[d][in] = c;
                squares += c * c;
            }
            const double s = std::sqrt(squares / double(last - first));
            for (int64_t k = first; k < last; ++k) {
                const auto in = size_t(k - int64_t(d) * partition.chunk), i = size_t(k - partition.begin[t]);
                const double c = e.server[d][in];
                e.magnitude[d][in] = largest + std::fabs(double(errors[d].server[in])) + s;
                e.unclear[t][i] = c != 0 && std::fabs(c) < 1e-6 * e.magnitude[d][in];
                e.unclear_count += e.unclear[t][i];
                e.y[t][i] = c < 0 ? -s : s;
                e.server[d][in] -= e.y[t][i];
            }
        }
    }
    return e;
}

class CompressedAllReduceSizes : public testing::TestWithParam<std::tuple<int, size_t>> {};
INSTANTIATE_TEST_SUITE_P(, CompressedAllReduceSizes,
                         testing::Combine(testing::Values(1, 2, 3, 4, 5, 6, 8), testing::Range(size_t(0), size_t(9))),
                         [](const auto &info) {
                             return edge_sizes()[std::get<1>(info.param)].name +
                                    std::to_string(std::get<0>(info.param));
                         });

LABEL_PARAMS(long_emulated, "*[568]");
TEST_P(CompressedAllReduceSizes, MatchesTheAlgorithmInDouble) {
    const auto ranks = size_t(std::get<0>(GetParam()));
    const std::vector<int64_t> sizes = edge_sizes()[std::get<1>(GetParam())].sizes;
    const Partition partition(int64_t(ranks), sizes);
    constexpr size_t rounds = 4;
    std::vector<std::vector<Values>> x(rounds, std::vector<Values>(ranks)), y = x;
    std::vector<std::vector<CompressedMean::Residuals>> errors(rounds + 1,
                                                               std::vector<CompressedMean::Residuals>(ranks));
    Random random(11);
    for (auto &round : x)
        for (size_t r = 0; r < ranks; ++r)
            for (const int64_t n : sizes)
                round[r].push_back(random.floats(size_t(n), -1 - 0.13 * double(r), 1 + 0.07 * double(r * r)));
    const CommId id = new_id();
    run_ranks(int(ranks), [&](int rank) {
        const auto r = size_t(rank);
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, int(ranks));
        CompressedMean side(comm, sizes);
        EXPECT_EQ(side.workers, partition.chunk * partition.ranks + int64_t(sizes.size()));
        EXPECT_EQ(side.servers, partition.chunk + partition.scales);
        errors[0][r] = side.residuals();
        for (size_t round = 0; round < rounds; ++round) {
            const dsopt_comm_info before = info_of(comm);
            ASSERT_OK(side.call(x[round][r]));
            const dsopt_comm_info after = info_of(comm);
            const int64_t bytes = 2 * (partition.ranks - 1) * (partition.chunk > 0 ? partition.message_bytes() : 0);
            EXPECT_EQ(after.bytes_sent - before.bytes_sent, bytes);
            EXPECT_EQ(after.bytes_received - before.bytes_received, bytes);
            EXPECT_LE(after.calls - before.calls, 2);
            y[round][r] = side.read();
            errors[round + 1][r] = side.residuals();
        }
    });
    if (partition.chunk == 0) return;
    double unclear = 0, elements = 0;
    for (size_t round = 0; round < rounds; ++round) {
        const Expected e = expected(partition, x[round], errors[round]);
        unclear += e.unclear_count;
        for (size_t r = 1; r < ranks; ++r)
            for (size_t t = 0; t < sizes.size(); ++t)
                ASSERT_TRUE(same_bits(y[round][r][t], y[round][0][t])) << "rank " << r << ", tensor " << t;
        for (size_t t = 0; t < sizes.size(); ++t)
            for (size_t i = 0; i < size_t(sizes[t]); ++i, ++elements) {
                const double got = y[round][0][t][i], wanted = e.y[t][i];
                const double off = e.unclear[t][i] ? std::fabs(got) - std::fabs(wanted) : got - wanted;
                const int64_t k = partition.begin[t] + int64_t(i), d = k / partition.chunk; // terms may cancel
                ASSERT_LE(std::fabs(off),
                          1e-6 * std::fabs(wanted) + 2 * kUlp * e.magnitude[size_t(d)][size_t(k % partition.chunk)])
                    << "tensor " << t << ", element " << i;
            }
        for (size_t r = 0; r < ranks; ++r)
            for (size_t t = 0; t < sizes.size(); ++t)
                for (int64_t i = 0; i < sizes[t]; ++i) {
                    const auto k = size_t(partition.begin[t] + i);
                    // error + sent value = input up to one rounding; the scale has another one
                    const double got = errors[round + 1][r].worker[k], wanted = e.worker[r][k];
                    ASSERT_LE(std::fabs(got - wanted), kUlp * (std::fabs(wanted) + e.scale[r][t]))
                        << "rank " << r << ", tensor " << t << ", element " << i;
                    const int64_t d = (partition.begin[t] + i) / partition.chunk;
                    if (d != int64_t(r) || e.unclear[t][size_t(i)]) continue;
                    const auto in = size_t(partition.begin[t] + i - d * partition.chunk);
                    ASSERT_LE(std::fabs(errors[round + 1][r].server[in] - e.server[r][in]), 2e-6 * e.magnitude[r][in])
                        << "server " << r << ", element " << in;
                }
        // Padding has no errors.
        for (size_t r = 0; r < ranks; ++r) {
            std::vector<bool> used(size_t(partition.chunk * partition.ranks));
            for (size_t t = 0; t < sizes.size(); ++t)
                for (int64_t i = 0; i < sizes[t]; ++i) used[size_t(partition.begin[t] + i)] = true;
            for (size_t k = 0; k < used.size(); ++k)
                if (!used[k]) {
                    ASSERT_EQ(errors[round + 1][r].worker[k], 0) << "rank " << r << ", index " << k;
                    if (int64_t(k) / partition.chunk == int64_t(r)) {
                        ASSERT_EQ(errors[round + 1][r].server[k - r * size_t(partition.chunk)], 0) << k;
                    }
                }
        }
    }
    EXPECT_LE(unclear, 0.01 * elements + 2) << "more would make the comparison of signs weak";
}

// --------------------------------------------------------------------------------------------------------- same bits
struct Bits {
    Values y;
    CompressedMean::Residuals errors;
    std::vector<float> worker, server;
};

TEST(CompressedAllReduce, IsBitIdenticalForAnyThreadsChunksAndIsa) {
    struct Config {
        int threads;
        int64_t chunk;
        const char *isa;
    };
    const std::vector<int64_t> sizes = {70001, 0, 1, 33, 4097, 200000, 12345};
    constexpr size_t ranks = 3;
    const auto run = [&](const Config &config) {
        std::array<Bits, ranks> all;
        std::array<Context, ranks> contexts;
        for (auto &ctx : contexts) {
            if (config.isa != nullptr) setenv("DSOPT_ISA", config.isa, 1);
            ctx = context_of(config.threads, config.chunk);
            if (config.isa != nullptr) unsetenv("DSOPT_ISA");
        }
        const CommId id = new_id();
        run_ranks(ranks, [&](int rank) {
            const auto r = size_t(rank);
            const Comm comm = local_comm(contexts[r], id, rank, ranks);
            CompressedMean side(comm, sizes);
            Random random(uint64_t(20 + rank));
            for (int round = 0; round < 3; ++round) {
                Values x;
                for (const int64_t n : sizes) x.push_back(random.floats(size_t(n), -1, 1.2));
                ASSERT_OK(side.call(x));
            }
            all[r] = {side.read(), side.residuals(), side.worker, side.server};
        });
        return all;
    };
    const auto wanted = run({1, 0, nullptr});
    for (const Config config : {Config{3, 0, nullptr}, Config{4, 8192, nullptr}, Config{2, 1 << 20, nullptr},
                                Config{1, 0, "generic"}, Config{2, 0, "avx2"}}) {
        const auto got = run(config);
        for (size_t r = 0; r < ranks; ++r) {
            for (size_t t = 0; t < sizes.size(); ++t) {
                EXPECT_TRUE(same_bits(got[r].y[t], wanted[r].y[t])) << config.threads << " threads, tensor " << t;
                EXPECT_TRUE(same_bits(got[r].y[t], got[0].y[t])) << "rank " << r;
            }
            EXPECT_TRUE(same_bits(got[r].errors.worker, wanted[r].errors.worker)) << config.threads << " threads";
            EXPECT_TRUE(same_bits(got[r].errors.server, wanted[r].errors.server)) << config.threads << " threads";
            EXPECT_TRUE(same_bits(got[r].worker, wanted[r].worker)) << config.threads << " threads";
            EXPECT_TRUE(same_bits(got[r].server, wanted[r].server)) << config.threads << " threads";
        }
    }
}

// Lists larger than the caches are decoded with non-temporal stores if vectors of the tensor are aligned, and without
// them if the tensor is shifted.
LABEL(one_of_many);
LABEL(long_emulated);
LABEL(slow);
TEST(CompressedAllReduce, IsBitIdenticalForAnyAlignmentOfLongLists) {
    constexpr size_t numel[] = {8400005, 8400037};
    std::vector<float> pattern(numel[1] + 32); // has period 19
    for (size_t i = 0; i < pattern.size(); ++i) pattern[i] = float(i * 7 % 19) - 9;
    const auto run = [&](const char *isa, size_t shift) {
        setenv("DSOPT_ISA", isa, 1);
        const Context ctx = make_context(2);
        unsetenv("DSOPT_ISA");
        const Comm comm = self_comm(ctx);
        std::vector<float> memory(numel[0] + numel[1] + 64);
        const size_t first = (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) / sizeof(float);
        // The second tensor begins in the middle of a cache line.
        const size_t offsets[] = {first + shift, first + (numel[0] + 24) / 16 * 16 + 8 + shift};
        std::array<dsopt_tensor, 2> list{};
        for (size_t t = 0; t < 2; ++t) {
            std::memcpy(&memory[offsets[t]], &pattern[11 * t], numel[t] * sizeof(float)); // 11 * 7 = 4 * 19 + 1
            list[t] = {&memory[offsets[t]], int64_t(numel[t]), DSOPT_DTYPE_F32, 0};
        }
        DSOPT_NEW(dsopt_compressed, arguments);
        arguments.tensors = list.data();
        arguments.count = 2;
        int64_t worker = 0, server = 0;
        size_t bytes = 0;
        must(dsopt_compressed_sizes(comm.get(), &arguments, &worker, &server, &bytes));
        const Shared<float> worker_error(static_cast<size_t>(worker)), server_error(static_cast<size_t>(server));
        const Shared<char> workspace(bytes + 256);
        arguments.worker_error = worker_error.data();
        arguments.server_error = server_error.data();
        arguments.workspace = workspace.data() + (256 - reinterpret_cast<uintptr_t>(workspace.data()) % 256);
        arguments.workspace_bytes = bytes;
        must(dsopt_compressed_allreduce(comm.get(), &arguments));
        std::vector<float> all;
        for (size_t t = 0; t < 2; ++t) all.insert(all.end(), &memory[offsets[t]], &memory[offsets[t]] + numel[t]);
        const bool outside =
            std::all_of(memory.begin(), memory.begin() + long(offsets[0]), [](float x) { return x == 0; }) &&
            memory[offsets[0] + numel[0]] == 0 && memory[offsets[1] - 1] == 0 && memory[offsets[1] + numel[1]] == 0;
        EXPECT_TRUE(outside) << isa << ", shift " << shift;
        all.insert(all.end(), worker_error.begin(), worker_error.end());
        return all;
    };
    const std::vector<float> wanted = run("generic", 0);
    EXPECT_GT(std::fabs(wanted[0]), 1);
    for (const char *isa : {"avx2", "avx512"})
        for (const size_t shift : {0, 8, 1})
            EXPECT_TRUE(same_bits(run(isa, shift), wanted)) << isa << ", shift " << shift;
}

// -------------------------------------------------------------------------------------------------------- properties
TEST(CompressedAllReduce, MapsZerosToZerosWithoutErrors) {
    const CommId id = new_id();
    run_ranks(3, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, 3);
        CompressedMean side(comm, {1, 100, 0, 5000});
        for (int round = 0; round < 3; ++round) {
            for (auto &tensor : side.values) std::fill(tensor.begin(), tensor.end(), round % 2 ? -0.0f : 0.0f);
            ASSERT_OK(side.call());
            for (const auto &tensor : side.values)
                for (const float value : tensor) ASSERT_EQ(value, 0);
            for (const float value : side.residuals().worker) ASSERT_EQ(value, 0);
            for (const float value : side.residuals().server) ASSERT_EQ(value, 0);
        }
    });
}

LABEL(numbers_only);
LABEL(long_emulated);
LABEL(slow);
TEST(CompressedAllReduce, ConvergesToTheMeanOverManyCalls) {
    constexpr int ranks = 4, calls = 2000;
    constexpr size_t numel = 500;
    std::array<std::vector<float>, ranks> x;
    for (size_t r = 0; r < ranks; ++r) x[r] = Random(30 + r).floats(numel, -1, 1.5);
    const CommId id = new_id();
    run_ranks(ranks, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, ranks);
        CompressedMean side(comm, {int64_t(numel)});
        std::vector<double> sum(numel);
        const auto largest_deviation = [&](int after) {
            double largest_so_far = 0;
            for (size_t i = 0; i < numel; ++i) {
                double mean = 0;
                for (const auto &other : x) mean += double(other[i]) / ranks;
                largest_so_far = std::max(largest_so_far, std::fabs(sum[i] / after - mean));
            }
            return largest_so_far;
        };
        double early = 0;
        for (int call = 1; call <= calls; ++call) {
            ASSERT_OK(side.call({x[size_t(rank)]}));
            for (size_t i = 0; i < numel; ++i) sum[i] += double(side.values[0][i]);
            if (call == 20) early = largest_deviation(call);
        }
        // Errors stay bounded, so the error of the mean is at most a constant divided by the number of calls.
        EXPECT_LE(largest_deviation(calls), 0.03);
        EXPECT_LE(largest_deviation(calls), early / 5);
    });
}

TEST(CompressedAllReduce, TreatsNegativeZeroAsPositive) {
    const Context ctx = make_context(1);
    const Comm comm = self_comm(ctx);
    CompressedMean side(comm, {4});
    ASSERT_OK(side.call({{-0.0f, 2, -2, 2}}));
    const float scale = float(std::sqrt(3.0));
    EXPECT_FLOAT_EQ(side.values[0][0], scale);
    EXPECT_FLOAT_EQ(side.values[0][2], -scale);
    EXPECT_FLOAT_EQ(side.residuals().worker[0], -scale);
}

TEST(CompressedAllReduce, FeedsErrorsBackOnOneRank) {
    const Context ctx = make_context(1);
    const Comm comm = self_comm(ctx);
    CompressedMean side(comm, {3});
    ASSERT_OK(side.call({{3, -1, 1}}));
    const float scale = float(std::sqrt(11.0 / 3));
    EXPECT_TRUE(same_bits(side.values[0], {scale, -scale, scale}));
    EXPECT_EQ(info_of(comm).bytes_sent, 0);
    ASSERT_OK(side.call({{0, 0, 0}})); // only the errors are sent
    EXPECT_LT(side.values[0][2], 0);
    EXPECT_GT(side.values[0][0], 0);
}

TEST(CompressedAllReduce, KeepsNaNWithinItsTensor) {
    const CommId id = new_id();
    std::array<Values, 2> ends;
    run_ranks(2, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, 2);
        CompressedMean side(comm, {40, 40});
        Values bad(2, std::vector<float>(40, 1)), good = bad;
        if (rank == 1) bad[0][3] = kNaN;
        ASSERT_OK(side.call(bad));
        for (const float value : side.values[0]) EXPECT_TRUE(std::isnan(value));
        for (const float value : side.values[1]) EXPECT_EQ(value, 1);
        ASSERT_OK(side.call(good));
        for (const float value : side.values[0]) EXPECT_TRUE(std::isnan(value));
        for (const float value : side.values[1]) EXPECT_EQ(value, 1);
        ends[size_t(rank)] = side.read();
    });
    for (size_t t = 0; t < 2; ++t) EXPECT_TRUE(same_bits(ends[0][t], ends[1][t]));
}

TEST(CompressedAllReduce, SendsOneBitPerElementOfGpt2) {
    std::vector<int64_t> sizes = {50257 * 768, 1024 * 768};
    for (int layer = 0; layer < 12; ++layer)
        for (const int64_t n :
             {768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768})
            sizes.push_back(n);
    sizes.push_back(768);
    sizes.push_back(768);
    constexpr int ranks = 8;
    int64_t total = 0;
    for (const int64_t n : sizes) total += n;
    EXPECT_EQ(total, 124439808);
    std::vector<dsopt_tensor> list;
    for (const int64_t n : sizes) list.push_back({nullptr, n, DSOPT_DTYPE_F32, 0});
    const CommId id = new_id();
    run_ranks(ranks, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, ranks);
        DSOPT_NEW(dsopt_compressed, args);
        args.tensors = list.data();
        args.count = int64_t(list.size());
        int64_t worker = 0, server = 0;
        ASSERT_OK(dsopt_compressed_sizes(comm.get(), &args, &worker, &server, nullptr));
        const int64_t chunk = (worker - args.count) / ranks, scales = server - chunk;
        EXPECT_EQ(chunk % kVectorBlock, 0);
        EXPECT_GE(chunk * ranks, total);
        const double bits = 8.0 * double(ranks) * double((4 * scales + chunk / 8 + 15) / 16 * 16) / double(total);
        EXPECT_GE(bits, 1);
        EXPECT_LE(bits, 1.001);
    });
}

/// The table of one of two ranks, which has no collective but the all-reduce.
class SumsOnly {
public:
    struct Shared {
        std::barrier<> barrier{2};
        const void *sent[2] = {};
    };
    SumsOnly(Shared &shared, int rank) : shared_(shared), rank_(rank) {}
    Comm comm(const Context &ctx) {
        DSOPT_NEW(dsopt_comm_table, table);
        table.self = this;
        table.rank = rank_;
        table.ranks = 2;
        table.all_reduce = [](void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t, void *) {
            SumsOnly &rank = *static_cast<SumsOnly *>(self);
            return dtype == DSOPT_DTYPE_I32 ? rank.sum<int32_t>(send, recv, count) : rank.sum<float>(send, recv, count);
        };
        return table_comm(ctx, table);
    }

private:
    template <class T> int sum(const void *send, void *recv, int64_t count) {
        shared_.sent[rank_] = send;
        shared_.barrier.arrive_and_wait();
        std::vector<T> sums(static_cast<const T *>(shared_.sent[0]), static_cast<const T *>(shared_.sent[0]) + count);
        for (int64_t i = 0; i < count; ++i) sums[size_t(i)] += static_cast<const T *>(shared_.sent[1])[i];
        shared_.barrier.arrive_and_wait(); // `recv` may be `send`
        std::copy(sums.begin(), sums.end(), static_cast<T *>(recv));
        return 0;
    }
    Shared &shared_;
    int rank_;
};

TEST(CompressedAllReduce, WithATableThatHasOnlyAnAllReduceHasTheSameBitsInEveryCall) {
    SumsOnly::Shared shared;
    const std::vector<int64_t> sizes = {5, 4097};
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        SumsOnly table(shared, rank);
        const Comm sums = table.comm(ctx);
        CompressedMean wanted(comm, sizes), got(sums, sizes);
        Random random(1 + uint64_t(rank));
        for (int call = 0; call < 3; ++call) {
            Values x;
            for (const int64_t n : sizes) x.push_back(random.floats(size_t(n), -1, 1));
            ASSERT_OK(wanted.call(x));
            ASSERT_OK(got.call(x));
            for (size_t t = 0; t < sizes.size(); ++t)
                EXPECT_TRUE(same_bits(got.values[t], wanted.values[t])) << "call " << call << ", tensor " << t;
            EXPECT_TRUE(same_bits(got.worker, wanted.worker)) << "call " << call;
            EXPECT_TRUE(same_bits(got.server, wanted.server)) << "call " << call;
        }
    });
}

// ------------------------------------------------------------------------------------------------------------ compat
TEST(CompressedAllReduce, MatchesTheOriginalInCompatMode) {
    const float x[2][2][5] = {{{1, -2, 3, 0, 0.5f}, {-1, -2, 1, 0.25f, 0.5f}},
                              {{0.5f, 0.5f, -1, 2, -3}, {0.5f, 1, -1, -2, 1}}};
    const double y[2][5] = {{0.73727793, -0.73727793, 0.73727793, 0.73727793, 0.73727793},
                            {0.74849153, -0.74849153, 0.74849153, 0.74849153, -0.74849153}};
    const double worker[2][2][6] = {{{0.056270719, -1.0562707, 2.0562706, -0.94372928, -0.44372928, -0.94372928},
                                     {-0.3718828, -1.3718828, 0.3718828, -0.3781172, -0.1281172, -0.6281172}},
                                    {{-0.68132865, 0.68132865, -0.18132877, -0.18132865, -2.20613, 0.29387009},
                                     {-0.7124446, 0.46867901, 0.2124446, -1.5375552, 0.031320989, 0.2124446}}};
    const double server[2][8] = {
        {-0.57947189, -0.048645318, 0.048645318, 0.048645318, 0.048645318, 0.048645318, 0.048645318, 0.048645318},
        {-0.28888279, -0.33923435, -0.5013274, -0.5013274, 0.59861803, -0.24194378, -0.24194378, -0.24194378}};
    const CommId id = new_id();
    run_ranks(2, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, 2);
        CompressedMean side(comm, {5}, DSOPT_COMPAT_DEEPSPEED);
        EXPECT_EQ(side.workers, 16 + 1);
        EXPECT_EQ(side.servers, 8 + 1);
        for (size_t round = 0; round < 2; ++round) {
            const float *input = x[round][rank];
            ASSERT_OK(side.call({std::vector<float>(input, input + 5)}));
            const CompressedMean::Residuals errors = side.residuals();
            for (size_t i = 0; i < 5; ++i) EXPECT_NEAR(side.values[0][i], y[round][i], 2e-6) << i;
            for (size_t i = 0; i < 16; ++i)
                EXPECT_NEAR(errors.worker[i], worker[round][rank][std::min<size_t>(i, 5)], 4e-6) << i;
            for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(errors.server[i], rank == 0 ? server[round][i] : 0, 4e-6) << i;
        }
    });
}

} // namespace compressed_tests
