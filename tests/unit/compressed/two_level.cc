// SPDX-License-Identifier: Apache-2.0
// The 1-bit mean over two comms, the ranks of a node and the nodes, compared with the algorithm in double.
#include "support/two_level.h"
#include "support/compressed.h"
#include "support/shapes.h"

using namespace test;

namespace compressed_two_level_tests {

constexpr double kUlp = 0x1p-23;

// ---------------------------------------------------------------------------------------------------- the algorithm
struct Expected {
    std::vector<double> y, server, bound; // per element: result, server error, tolerance
    std::vector<bool> unclear;            // the sign of the server's value depends on rounding
    std::vector<double> worker;           // errors of the workers of `node`
    std::vector<double> magnitude;        // of the terms of worker errors
};

/// x[d * per_node + l] has the elements of a rank, and errors[d * per_node + l] its errors.
Expected expected(const ExchangeLayout &partition, const std::vector<std::vector<float>> &x,
                  const std::vector<CompressedMean::Residuals> &errors, int64_t node) {
    const auto ranks = [&](int64_t l, int64_t d) { return size_t(d * partition.per_node + l); };
    const auto all = size_t(partition.slice() * partition.per_node);
    Expected e{std::vector<double>(all), std::vector<double>(all), std::vector<double>(all),
               std::vector<bool>(all),   std::vector<double>(all), std::vector<double>(all)};
    for (int64_t l = 0; l < partition.per_node; ++l) {
        const int64_t first = l * partition.slice(), end = first + partition.slice();
        std::vector<std::vector<double>> sent(size_t(partition.nodes), std::vector<double>(size_t(partition.slice())));
        std::vector<double> largest(size_t(partition.slice()));
        for (int64_t d = 0; d < partition.nodes; ++d)
            for (size_t t = 0; t < partition.numel.size(); ++t) {
                const int64_t from = partition.from(t, first), to = partition.to(t, end);
                std::vector<double> b;
                double squares = 0;
                for (int64_t k = from; k < to; ++k) {
                    float mean = 0; // as in the engine: sums in rank order, then multiplies
                    for (int64_t r = 0; r < partition.per_node; ++r)
                        mean = r == 0 ? x[ranks(r, d)][size_t(k)] : mean + x[ranks(r, d)][size_t(k)];
                    mean *= 1.0f / float(partition.per_node);
                    b.push_back(double(mean + errors[ranks(l, d)].worker[size_t(k - first)]));
                    squares += b.back() * b.back();
                }
                const double scale = to > from ? std::sqrt(squares / double(to - from)) : 0;
                for (int64_t k = from; k < to; ++k) {
                    const double value = b[size_t(k - from)], sign = value < 0 ? -scale : scale;
                    sent[size_t(d)][size_t(k - first)] = sign;
                    largest[size_t(k - first)] = std::max(largest[size_t(k - first)], scale);
                    if (d != node) continue;
                    e.worker[size_t(k)] = value - sign;
                    e.magnitude[size_t(k)] = std::fabs(value) + scale;
                }
            }
        for (int64_t d = 0; d < partition.nodes; ++d)
            for (size_t t = 0; t < partition.numel.size(); ++t) {
                const int64_t begin = first + d * partition.chunk, from = partition.from(t, begin),
                              to = partition.to(t, begin + partition.chunk);
                std::vector<double> c;
                double squares = 0;
                for (int64_t k = from; k < to; ++k) {
                    c.push_back(double(errors[ranks(l, d)].server[size_t(k - begin)]));
                    for (const auto &message : sent) c.back() += message[size_t(k - first)] / double(partition.nodes);
                    squares += c.back() * c.back();
                }
                const double scale = to > from ? std::sqrt(squares / double(to - from)) : 0;
                for (int64_t k = from; k < to; ++k) {
                    const double value = c[size_t(k - from)], size = largest[size_t(k - first)] + std::fabs(value);
                    e.y[size_t(k)] = value < 0 ? -scale : scale;
                    e.server[size_t(k)] = value - e.y[size_t(k)];
                    e.unclear[size_t(k)] = value != 0 && std::fabs(value) < 2e-6 * size;
                    e.bound[size_t(k)] = 1e-6 * scale + 2 * kUlp * size;
                }
            }
    }
    return e;
}

class TwoLevelAllReduceSizes : public testing::TestWithParam<std::tuple<int, int, size_t>> {};
INSTANTIATE_TEST_SUITE_P(, TwoLevelAllReduceSizes,
                         testing::Combine(testing::Range(1, 5), testing::Range(1, 5),
                                          testing::Range(size_t(0), size_t(6))),
                         [](const auto &info) {
                             return edge_sizes()[std::get<2>(info.param)].name +
                                    std::to_string(std::get<1>(info.param)) + "NodesOf" +
                                    std::to_string(std::get<0>(info.param));
                         });

LABEL_PARAMS(one_of_many, "*4NodesOf*");
LABEL_PARAMS(long_emulated, "*[34]NodesOf*");
TEST_P(TwoLevelAllReduceSizes, MatchesTheAlgorithmInDouble) {
    const int per_node = std::get<0>(GetParam()), nodes = std::get<1>(GetParam());
    const auto ranks = size_t(per_node * nodes);
    const std::vector<int64_t> sizes = edge_sizes()[std::get<2>(GetParam())].sizes;
    const ExchangeLayout partition(per_node, nodes, sizes);
    const bool exact = nodes == 1 && per_node > 1;
    constexpr size_t rounds = 3;
    const auto all = size_t(partition.slice() * per_node);
    std::vector<std::vector<std::vector<float>>> x(rounds, std::vector<std::vector<float>>(ranks)), y = x;
    std::vector<std::vector<CompressedMean::Residuals>> errors(rounds + 1,
                                                               std::vector<CompressedMean::Residuals>(ranks));
    Random random(11);
    for (auto &round : x)
        for (size_t r = 0; r < ranks; ++r) {
            round[r].resize(all);
            for (size_t t = 0; t < sizes.size(); ++t)
                for (int64_t i = 0; i < sizes[t]; ++i)
                    round[r][size_t(partition.begin[t] + i)] =
                        float(random.uniform(-1 - 0.13 * double(r), 1 + 0.07 * double(r * r)));
        }
    with_nodes(per_node, nodes, [&](const NodeRank &node_rank) {
        const auto r = size_t(node_rank.d * per_node + node_rank.l);
        CompressedMean side(node_rank.data, sizes, DSOPT_COMPAT_NONE, node_rank.node.get());
        EXPECT_EQ(int64_t(side.worker.size()), exact ? 0 : partition.slice() + int64_t(sizes.size()));
        EXPECT_EQ(int64_t(side.server.size()), exact ? 0 : partition.chunk + partition.scales);
        errors[0][r] = side.residuals();
        for (size_t round = 0; round < rounds; ++round) {
            Values input;
            for (size_t t = 0; t < sizes.size(); ++t)
                input.emplace_back(x[round][r].begin() + partition.begin[t],
                                   x[round][r].begin() + partition.begin[t] + sizes[t]);
            const dsopt_comm_info node = info_of(node_rank.node), data = info_of(node_rank.data);
            ASSERT_OK(side.call(input));
            // Between nodes, a rank sends two messages to each other node. In a node, it sends one fp32 slice to each
            // other rank, then the bits of this rank's slice.
            const int64_t message = partition.chunk > 0 ? partition.message_bytes() : 0,
                          returned_bytes = exact ? partition.slice() * 4 : nodes * message;
            EXPECT_EQ(info_of(node_rank.data).bytes_sent - data.bytes_sent, 2 * (nodes - 1) * message);
            EXPECT_EQ(info_of(node_rank.data).bytes_received - data.bytes_received, 2 * (nodes - 1) * message);
            EXPECT_EQ(info_of(node_rank.node).bytes_sent - node.bytes_sent,
                      (per_node - 1) * (partition.slice() * 4 + returned_bytes));
            EXPECT_LE(info_of(node_rank.data).calls - data.calls, 2);
            EXPECT_EQ(info_of(node_rank.node).calls - node.calls, per_node > 1 && partition.chunk > 0 ? 2 : 0);
            y[round][r].resize(all);
            for (size_t t = 0; t < sizes.size(); ++t)
                std::copy(side.values[t].begin(), side.values[t].end(), y[round][r].begin() + partition.begin[t]);
            errors[round + 1][r] = side.residuals();
        }
    });
    if (partition.chunk == 0) return;
    double unclear = 0;
    for (size_t round = 0; round < rounds; ++round) {
        for (size_t r = 1; r < ranks; ++r) ASSERT_TRUE(same_bits(y[round][r], y[round][0])) << "rank " << r;
        if (exact) {
            for (size_t k = 0; k < all; ++k) {
                float sum = x[round][0][k];
                for (size_t r = 1; r < ranks; ++r) sum += x[round][r][k];
                ASSERT_EQ(y[round][0][k], sum * (1.0f / float(ranks))) << k;
            }
            continue;
        }
        for (int64_t d = 0; d < nodes; ++d) {
            const Expected e = expected(partition, x[round], errors[round], d);
            for (size_t k = 0; k < all; ++k) {
                unclear += e.unclear[k];
                const double got = y[round][0][k], wanted = e.y[k];
                const double off = e.unclear[k] ? std::fabs(got) - std::fabs(wanted) : got - wanted;
                ASSERT_LE(std::fabs(off), e.bound[k]) << "element " << k;
                const auto l = int64_t(k) / partition.slice();
                const double error =
                    errors[round + 1][size_t(d * per_node + l)].worker[k - size_t(l * partition.slice())];
                ASSERT_LE(std::fabs(error - e.worker[k]), kUlp * e.magnitude[k]) << "node " << d << ", element " << k;
                const int64_t in_chunk = int64_t(k) - l * partition.slice() - d * partition.chunk;
                if (e.unclear[k] || in_chunk < 0 || in_chunk >= partition.chunk) continue;
                const double server_error = errors[round + 1][size_t(d * per_node + l)].server[size_t(in_chunk)];
                ASSERT_LE(std::fabs(server_error - e.server[k]), 2 * e.bound[k]) << "node " << d << ", element " << k;
            }
        }
    }
    EXPECT_LE(unclear, 0.01 * double(rounds * all * size_t(nodes)) + 2)
        << "more would make the comparison of signs weak";
}

// --------------------------------------------------------------------------------------------------------- same bits
struct Bits {
    Values y;
    std::vector<float> worker, server;
};
const std::vector<int64_t> kSizes = {70001, 0, 1, 33, 4097, 200000, 12345};
Bits three_calls(const Comm &data, dsopt_comm *node, int rank) {
    CompressedMean side(data, kSizes, DSOPT_COMPAT_NONE, node);
    Random random(uint64_t(20 + rank));
    for (int round = 0; round < 3; ++round) {
        Values x;
        for (const int64_t n : kSizes) x.push_back(random.floats(size_t(n), -1, 1.2));
        must(side.call(x));
    }
    return {side.read(), side.worker, side.server};
}
void expect_same(const Bits &a, const Bits &b, const char *what) {
    for (size_t t = 0; t < a.y.size(); ++t) EXPECT_TRUE(same_bits(a.y[t], b.y[t])) << what << ", tensor " << t;
    EXPECT_TRUE(same_bits(a.worker, b.worker)) << what;
    EXPECT_TRUE(same_bits(a.server, b.server)) << what;
}

TEST(TwoLevelAllReduce, MatchesOneLevelWithOneRankPerNode) {
    with_nodes(1, 3, [&](const NodeRank &node_rank) {
        const Bits flat = three_calls(node_rank.data, nullptr, node_rank.d);
        expect_same(three_calls(node_rank.data, node_rank.node.get(), node_rank.d), flat, "one rank per node");
        const Comm self = self_comm(node_rank.ctx);
        expect_same(three_calls(node_rank.data, self.get(), node_rank.d), flat, "the comm of one rank");
    });
}

TEST(TwoLevelAllReduce, IsBitIdenticalForAnyThreadsChunksAndIsa) {
    struct Config {
        int threads;
        int64_t chunk;
        const char *isa;
    };
    const auto run = [&](const Config &config) {
        std::array<Bits, 4> all;
        std::array<Context, 4> contexts;
        for (Context &ctx : contexts) {
            if (config.isa != nullptr) setenv("DSOPT_ISA", config.isa, 1);
            DSOPT_NEW(dsopt_context_desc, desc);
            desc.threads = config.threads;
            desc.chunk = config.chunk;
            dsopt_context *context = nullptr;
            must(dsopt_context_create(&desc, &context));
            ctx = Context(context);
            if (config.isa != nullptr) unsetenv("DSOPT_ISA");
        }
        with_nodes(
            2, 2,
            [&](const NodeRank &node_rank) {
                const int rank = node_rank.d * 2 + node_rank.l;
                all[size_t(rank)] = three_calls(node_rank.data, node_rank.node.get(), rank);
            },
            [&](int rank) { return std::move(contexts[size_t(rank)]); });
        return all;
    };
    const auto wanted = run({1, 0, nullptr});
    for (const Config config :
         {Config{3, 0, nullptr}, Config{4, 8192, nullptr}, Config{1, 0, "generic"}, Config{2, 0, "avx2"}}) {
        const auto got = run(config);
        for (size_t r = 0; r < 4; ++r)
            expect_same(got[r], wanted[r], (std::to_string(config.threads) + " threads").c_str());
    }
}

LABEL(long_emulated);
TEST(TwoLevelAllReduce, SendsEachSliceOfANodeOnce) {
    constexpr int per_node = 4, nodes = 3, ranks = per_node * nodes;
    std::atomic<int64_t> flat{0}, two{0};
    const CommId id = new_id();
    run_ranks(ranks, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, ranks);
        (void)three_calls(comm, nullptr, rank);
        const int64_t message = info_of(comm).bytes_sent / (ranks - 1);
        flat += message * (ranks - per_node); // only to ranks of other nodes
    });
    with_nodes(per_node, nodes, [&](const NodeRank &node_rank) {
        (void)three_calls(node_rank.data, node_rank.node.get(), node_rank.d * per_node + node_rank.l);
        two += info_of(node_rank.data).bytes_sent;
    });
    EXPECT_GT(two, 0);
    EXPECT_EQ(flat, per_node * two);
}

// -------------------------------------------------------------------------------------------------------- properties
LABEL(numbers_only);
LABEL(long_emulated);
LABEL(slow);
TEST(TwoLevelAllReduce, ConvergesToTheMeanOverManyCalls) {
    constexpr size_t numel = 500;
    constexpr int calls = 2000;
    for (const auto &[per_node, nodes] : {std::pair{2, 2}, {3, 2}, {2, 3}}) {
        const int ranks = per_node * nodes;
        Values x;
        for (int r = 0; r < ranks; ++r) x.push_back(Random(uint64_t(30 + r)).floats(numel, -1, 1.5));
        with_nodes(per_node, nodes, [&, per_node = per_node](const NodeRank &node_rank) {
            CompressedMean side(node_rank.data, {int64_t(numel)}, DSOPT_COMPAT_NONE, node_rank.node.get());
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
                ASSERT_OK(side.call({x[size_t(node_rank.d * per_node + node_rank.l)]}));
                for (size_t i = 0; i < numel; ++i) sum[i] += double(side.values[0][i]);
                if (call == 20) early = largest_deviation(call);
            }
            EXPECT_LE(largest_deviation(calls), 0.03);
            EXPECT_LE(largest_deviation(calls), early / 5);
        });
    }
}

// ---------------------------------------------------------------------------------------------------------- refusals
class TwoLevelArguments : public testing::Test {
protected:
    void expect(const NodeRank &node_rank, CompressedMean &side, dsopt_status wanted, const char *text) {
        for (auto &tensor : side.values) std::fill(tensor.begin(), tensor.end(), 3.0f);
        const Values values = side.read();
        const auto worker = side.worker, server = side.server;
        EXPECT_TRUE(refused(side.call({}), wanted, text));
        int64_t a = -5, b = -5;
        EXPECT_TRUE(refused(dsopt_compressed_sizes(node_rank.data.get(), &side.args, &a, &b, nullptr), wanted, text));
        EXPECT_TRUE(refused(dsopt_compressed_errors(node_rank.data.get(), &side.args, nullptr, nullptr), wanted, text));
        EXPECT_TRUE(a == -5 && b == -5);
        EXPECT_EQ(side.read(), values);
        EXPECT_EQ(side.worker, worker);
        EXPECT_EQ(side.server, server);
        EXPECT_EQ(info_of(node_rank.data).status, DSOPT_OK) << "a refusal does not make a comm unusable";
        EXPECT_EQ(info_of(node_rank.node).status, DSOPT_OK);
    }
};

TEST_F(TwoLevelArguments, RefusesCompatMode) {
    with_nodes(2, 2, [&](const NodeRank &node_rank) {
        CompressedMean side(node_rank.data, {40, 0, 9}, DSOPT_COMPAT_NONE, node_rank.node.get());
        side.args.compat = DSOPT_COMPAT_DEEPSPEED;
        expect(node_rank, side, DSOPT_ERR_UNSUPPORTED, "compat");
    });
}
TEST_F(TwoLevelArguments, RefusesOneCommForBothLevels) {
    with_nodes(1, 2, [&](const NodeRank &node_rank) {
        CompressedMean side(node_rank.data, {40, 0, 9}, DSOPT_COMPAT_NONE, node_rank.node.get());
        side.args.node = node_rank.data.get();
        expect(node_rank, side, DSOPT_ERR_ARGUMENT, "one comm");
    });
}
TEST_F(TwoLevelArguments, RefusesASmallWorkspace) {
    with_nodes(2, 2, [&](const NodeRank &node_rank) {
        CompressedMean side(node_rank.data, {40, 0, 9}, DSOPT_COMPAT_NONE, node_rank.node.get());
        side.args.workspace_bytes -= 256;
        EXPECT_TRUE(refused(side.call({}), DSOPT_ERR_WORKSPACE, "workspace"));
    });
}
TEST(TwoLevelAllReduce, ReturnsTheStatusOfTheNodeComm) {
    with_nodes(2, 2, [&](const NodeRank &node_rank) {
        CompressedMean side(node_rank.data, {40, 0, 9}, DSOPT_COMPAT_NONE, node_rank.node.get());
        dsopt_comm_abort(node_rank.node.get());
        EXPECT_TRUE(refused(side.call({}), DSOPT_ERR_ABORTED));
        EXPECT_EQ(info_of(node_rank.data).calls, 0);
    });
}
TEST(TwoLevelAllReduce, FailsOnEveryRankIfARankIsDestroyed) {
    with_nodes(2, 2, [&](const NodeRank &node_rank) {
        if (node_rank.l == 1 && node_rank.d == 1) return;
        CompressedMean side(node_rank.data, {40, 0, 9}, DSOPT_COMPAT_NONE, node_rank.node.get());
        EXPECT_TRUE(refused(side.call({}), DSOPT_ERR_COMM));
    });
}

} // namespace compressed_two_level_tests
