// SPDX-License-Identifier: Apache-2.0
// Optimizers with a comm for the ranks of a node. The 1-bit family exchanges in two levels; other algorithms agree on
// skipping over both.
#include "support/two_level.h"

using namespace test;

namespace onebit_two_level_steps_tests {

Trainer trainer_of(const NodeRank &node_rank, const dsopt_group &group, const std::vector<Array> &weights,
                   uint32_t flags = 0) {
    dsopt_optimizer_desc desc = optimizer_desc(0, flags);
    desc.data = node_rank.data.get();
    desc.node = node_rank.node.get();
    return Trainer(node_rank.ctx, desc, group, weights);
}
const std::vector<size_t> kSizes = {700, 1, 33, 0, 5000, 4096};
std::vector<Array> weights() {
    Random random(5);
    std::vector<Array> list;
    for (const size_t n : kSizes) list.emplace_back(DSOPT_DTYPE_F32, random.floats(n));
    return list;
}
std::vector<Array> gradients(int rank, int64_t call) {
    Random random(uint64_t(1000 * call + rank));
    std::vector<Array> list;
    for (const size_t n : kSizes) list.emplace_back(DSOPT_DTYPE_F32, random.floats(n, -1, 1.2));
    return list;
}
ListVector vector_of_list() { return ListVector(std::vector<int64_t>(kSizes.begin(), kSizes.end())); }
/// Returns the number of elements of a chunk if the list is partitioned into `chunks`.
int64_t chunk_numel(int chunks) { return vector_of_list().chunk(chunks); }
class TwoLevelStep : public testing::TestWithParam<std::tuple<int32_t, int, int>> {
protected:
    const int32_t algorithm = std::get<0>(GetParam());
    const int per_node = std::get<1>(GetParam()), nodes = std::get<2>(GetParam());
};
INSTANTIATE_TEST_SUITE_P(, TwoLevelStep,
                         testing::Combine(testing::ValuesIn(kFamily), testing::Values(1, 2, 3),
                                          testing::Values(1, 2, 3)),
                         [](const auto &info) {
                             return std::string(name_of(std::get<0>(info.param))) +
                                    std::to_string(std::get<2>(info.param)) + "NodesOf" +
                                    std::to_string(std::get<1>(info.param));
                         });

LABEL_PARAMS(long_emulated, "*[13]NodesOf*");
LABEL_PARAMS(long_emulated, "*NodesOf[13]");
TEST_P(TwoLevelStep, GivesIdenticalReplicasAfterEveryExchange) {
    constexpr int64_t calls = 30;
    std::vector<std::vector<std::string>> all(size_t(per_node * nodes), std::vector<std::string>(calls));
    with_nodes(per_node, nodes, [&](const NodeRank &node_rank) {
        const int rank = node_rank.d * per_node + node_rank.l;
        Trainer trainer = trainer_of(node_rank, group_for(algorithm, 12), weights(), DSOPT_OPTIMIZER_AVERAGES);
        for (size_t call = 0; call < calls; ++call) {
            const bool local = reduction(trainer) == DSOPT_REDUCTION_LOCAL;
            ASSERT_OK(trainer.step(gradients(rank, int64_t(call) + 1)));
            if (local) continue;
            for (Array &weight : trainer.weights()) all[size_t(rank)][call] += weight.text();
            for (const float value : trainer.weight(4).floats()) ASSERT_LE(std::fabs(value), 100);
        }
    });
    for (size_t rank = 1; rank < all.size(); ++rank)
        for (size_t call = 0; call < calls; ++call)
            ASSERT_TRUE(all[rank][call] == all[0][call]) << "rank " << rank << ", call " << call + 1;
}

/// An element without any gradient keeps its weight and has no error, in every slice. All other elements move against
/// their gradient.
LABEL_PARAMS(long_emulated, "*[13]NodesOf*");
LABEL_PARAMS(long_emulated, "*NodesOf[13]");
TEST_P(TwoLevelStep, KeepsOnlyWeightsWithoutVarianceUnchanged) {
    const auto unused = [](size_t t, size_t i) { return (t == 0 && i >= 50 && i < 90) || (t == 4 && i % 5 == 0); };
    with_nodes(per_node, nodes, [&](const NodeRank &node_rank) {
        const int rank = node_rank.d * per_node + node_rank.l;
        Trainer trainer = trainer_of(node_rank, group_for(algorithm, 4, 1e-2, 0), weights(), DSOPT_OPTIMIZER_AVERAGES);
        const std::vector<Array> before = weights();
        for (int64_t call = 1; call <= 14; ++call) {
            std::vector<Array> grads = gradients(rank, call);
            for (size_t t = 0; t < kSizes.size(); ++t)
                for (size_t i = 0; i < kSizes[t]; ++i) grads[t].set(i, unused(t, i) ? 0.0f : i % 2 ? 0.5f : -0.5f);
            ASSERT_OK(trainer.step(grads));
        }
        for (size_t t = 0; t < kSizes.size(); ++t)
            for (size_t i = 0; i < kSizes[t]; ++i)
                if (unused(t, i)) {
                    ASSERT_EQ(trainer.weight(t)[i], before[t][i]) << "tensor " << t << ", element " << i;
                } else {
                    ASSERT_EQ(trainer.weight(t)[i] < before[t][i], i % 2 == 1) << "tensor " << t << ", element " << i;
                }
        if (per_node * nodes == 1 || nodes == 1) return; // no error feedback
        const std::vector<float> error = trainer.state("worker_error");
        const int64_t chunk = chunk_numel(per_node * nodes), slice = chunk * nodes, begin = slice * node_rank.l;
        const ListVector vector = vector_of_list();
        for (size_t t = 0; t < kSizes.size(); ++t)
            for (size_t i = 0; i < kSizes[t]; ++i) {
                const int64_t index = vector.begin[t] + int64_t(i) - begin;
                if (index < 0 || index >= slice) continue;
                if (unused(t, i)) { ASSERT_EQ(error[size_t(index)], 0) << "tensor " << t << ", element " << i; }
            }
    });
}

LABEL(long_emulated);
TEST_P(TwoLevelStep, ResumesFromACheckpointWithTheSameBits) {
    with_nodes(per_node, nodes, [&](const NodeRank &node_rank) {
        const int rank = node_rank.d * per_node + node_rank.l;
        Trainer first = trainer_of(node_rank, group_for(algorithm, 6), weights(), DSOPT_OPTIMIZER_AVERAGES);
        const auto train_calls = [&](Trainer &trainer, int64_t from, int64_t to) {
            for (int64_t call = from; call <= to; ++call) must(trainer.step(gradients(rank, call)));
        };
        train_calls(first, 1, 12);
        MemoryFile file;
        ASSERT_OK(file.save(first, DSOPT_IO_PARAMS));
        Trainer second = trainer_of(node_rank, group_for(algorithm, 6), weights(), DSOPT_OPTIMIZER_AVERAGES);
        ASSERT_OK(file.load(second, DSOPT_IO_PARAMS));
        train_calls(first, 13, 20);
        train_calls(second, 13, 20);
        EXPECT_TRUE(same(first.snapshot(), second.snapshot()));
    });
}

LABEL_PARAMS(long_emulated, "*[13]NodesOf*");
LABEL_PARAMS(long_emulated, "*NodesOf[13]");
TEST_P(TwoLevelStep, SkipsOnEveryRankIfOneHasBadGradients) {
    with_nodes(per_node, nodes, [&](const NodeRank &node_rank) {
        const int rank = node_rank.d * per_node + node_rank.l, ranks = per_node * nodes;
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.data = node_rank.data.get();
        desc.node = node_rank.node.get();
        desc.nonfinite = DSOPT_NONFINITE_SKIP;
        Trainer trainer(node_rank.ctx, desc, group_for(algorithm, 4), weights());
        for (int64_t call = 1; call <= 12; ++call) {
            std::vector<Array> grads = gradients(reduction(trainer) == DSOPT_REDUCTION_FULL ? 0 : rank, call);
            const bool bad = call % 3 == 0;
            if (bad && rank == int(call) % ranks) grads[4].set(77, kNaN);
            const std::string before = trainer.weight(4).text();
            ASSERT_OK(trainer.step(grads));
            EXPECT_EQ(trainer.report().last_skipped, bad) << call;
            EXPECT_EQ(trainer.weight(4).text() == before, bad) << call;
        }
    });
}

LABEL_PARAMS(long_emulated, "*[13]NodesOf*");
LABEL_PARAMS(long_emulated, "*NodesOf[13]");
TEST_P(TwoLevelStep, ClipsByTheRootMeanSquareOfTheNodesNorms) {
    std::vector<double> norms(size_t(per_node * nodes));
    double wanted = 0;
    for (int d = 0; d < nodes; ++d)
        for (size_t t = 0; t < kSizes.size(); ++t) {
            std::vector<double> mean(kSizes[t]);
            for (int l = 0; l < per_node; ++l) {
                const std::vector<float> values = gradients(d * per_node + l, 5)[t].floats();
                for (size_t i = 0; i < mean.size(); ++i) mean[i] += double(values[i]) / per_node;
            }
            for (const double value : mean) wanted += value * value / nodes;
        }
    with_nodes(per_node, nodes, [&](const NodeRank &node_rank) {
        const int rank = node_rank.d * per_node + node_rank.l;
        dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_AVERAGES);
        desc.data = node_rank.data.get();
        desc.node = node_rank.node.get();
        desc.max_norm = 0.5;
        dsopt_group group = group_for(algorithm, 2);
        group.var_interval_steps = algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM ? 1 : 0;
        Trainer trainer(node_rank.ctx, desc, group, weights());
        for (int64_t call = 1; call <= 5; ++call) ASSERT_OK(trainer.step(gradients(rank, call)));
        norms[size_t(rank)] = trainer.report().grad_norm;
    });
    for (const double norm : norms) {
        EXPECT_EQ(norm, norms[0]);
        EXPECT_NEAR(norm, std::sqrt(wanted), 1e-6 * std::sqrt(wanted));
    }
}

TEST(TwoLevelOptimizer, MatchesOneLevelWithOneRankPerNode) {
    with_nodes(1, 3, [&](const NodeRank &node_rank) {
        dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_AVERAGES);
        desc.data = node_rank.data.get();
        Trainer flat(node_rank.ctx, desc, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 4), weights());
        Trainer two_level =
            trainer_of(node_rank, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 4), weights(), DSOPT_OPTIMIZER_AVERAGES);
        for (int64_t call = 1; call <= 10; ++call) {
            ASSERT_OK(flat.step(gradients(node_rank.d, call)));
            ASSERT_OK(two_level.step(gradients(node_rank.d, call)));
        }
        EXPECT_TRUE(same(flat.snapshot(), two_level.snapshot()));
    });
}

TEST(TwoLevelOptimizer, CompressesNothingInOneNode) {
    constexpr int per_node = 4;
    std::vector<float> wanted;
    {
        const Context ctx = make_context(1); // one rank with the mean gradients
        Trainer alone(ctx, optimizer_desc(), group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 4), weights());
        for (int64_t call = 1; call <= 12; ++call) {
            std::vector<Array> mean = gradients(0, call);
            for (int rank = 1; rank < per_node; ++rank) {
                const std::vector<Array> other = gradients(rank, call);
                for (size_t t = 0; t < mean.size(); ++t)
                    for (size_t i = 0; i < mean[t].size(); ++i) mean[t].set(i, mean[t][i] + other[t][i]);
            }
            for (Array &tensor : mean)
                for (size_t i = 0; i < tensor.size(); ++i) tensor.set(i, tensor[i] / per_node);
            ASSERT_OK(alone.step(mean));
        }
        wanted = alone.weight(4).floats();
    }
    with_nodes(per_node, 1, [&](const NodeRank &node_rank) {
        dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_AVERAGES);
        desc.node = node_rank.node.get(); // no data comm: one node
        Trainer trainer(node_rank.ctx, desc, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 4), weights());
        for (int64_t call = 1; call <= 12; ++call) ASSERT_OK(trainer.step(gradients(node_rank.l, call)));
        for (const dsopt_state_info &info : trainer.state())
            for (const char *name : {"worker_error", "server_error", "active"}) EXPECT_STRNE(info.name, name);
        const std::vector<float> got = trainer.weight(4).floats();
        for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], wanted[i], 2e-5) << i;
    });
}

TEST(TwoLevelOptimizer, ExportsTheWorkerErrorOfASlice) {
    with_nodes(2, 2, [&](const NodeRank &node_rank) {
        const int rank = node_rank.d * 2 + node_rank.l;
        Trainer first = trainer_of(node_rank, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 3), weights(),
                                   DSOPT_OPTIMIZER_AVERAGES),
                second = trainer_of(node_rank, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 3), weights(),
                                    DSOPT_OPTIMIZER_AVERAGES);
        for (int64_t call = 1; call <= 8; ++call) ASSERT_OK(first.step(gradients(rank, call)));
        std::vector<int64_t> sizes;
        for (const size_t n : kSizes) sizes.push_back(int64_t(n));
        const ExchangeLayout at(2, 2, sizes);
        const std::vector<float> error = first.state("worker_error");
        EXPECT_EQ(int64_t(error.size()), at.slice() + int64_t(sizes.size()));
        EXPECT_EQ(int64_t(first.state("server_error").size()), at.chunk + at.scales);
        EXPECT_TRUE(std::any_of(error.begin(), error.end(), [](float value) { return value != 0; }));
        const std::vector<dsopt_state_info> list = first.state();
        for (size_t i = 0; i < list.size(); ++i) { // copies all state through host memory
            std::string bytes(size_t(list[i].tensor.numel) * 4, 0);
            must(dsopt_optimizer_export(first.opt(), int64_t(i), bytes.data(), bytes.size()));
            must(dsopt_optimizer_import(second.opt(), int64_t(i), bytes.data(), bytes.size()));
        }
        for (size_t t = 0; t < kSizes.size(); ++t) {
            const dsopt_tensor to = second.weight(t).tensor(), from = first.weight(t).tensor();
            if (to.numel > 0) std::memcpy(to.data, from.data, size_t(to.numel) * 4);
        }
        for (int64_t call = 9; call <= 14; ++call) {
            ASSERT_OK(first.step(gradients(rank, call)));
            ASSERT_OK(second.step(gradients(rank, call)));
        }
        EXPECT_TRUE(same(first.snapshot(), second.snapshot()));
    });
}

TEST(TwoLevelOptimizer, GivesTheSameBitsWithMomentumBits) {
    for (const auto &[per_node, nodes] : {std::pair{2, 2}, {3, 1}})
        with_nodes(per_node, nodes, [&, per_node = per_node](const NodeRank &node_rank) {
            const int rank = node_rank.d * per_node + node_rank.l;
            const dsopt_group group = group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 4);
            Trainer plain = trainer_of(node_rank, group, weights(), DSOPT_OPTIMIZER_AVERAGES);
            Trainer bits =
                trainer_of(node_rank, group, weights(), DSOPT_OPTIMIZER_AVERAGES | DSOPT_OPTIMIZER_MOMENTUM_BITS);
            for (int64_t call = 1; call <= 12; ++call) {
                ASSERT_OK(plain.step(gradients(rank, call)));
                ASSERT_OK(bits.step(gradients(rank, call)));
                if (call == 9) { EXPECT_TRUE(same_bits(bits.state("exp_avg", 4), plain.state("exp_avg", 4))); }
            }
            for (size_t t = 0; t < kSizes.size(); ++t) {
                EXPECT_TRUE(same_bits(bits.weight(t).floats(), plain.weight(t).floats())) << t;
                EXPECT_TRUE(same_bits(bits.state("exp_avg", int64_t(t)), plain.state("exp_avg", int64_t(t)))) << t;
            }
        });
}

TEST(TwoLevelOptimizer, SendsRowsInFullSteps) {
    constexpr int64_t numel = 1001;
    with_nodes(3, 2, [&](const NodeRank &node_rank) {
        Trainer trainer = trainer_of(node_rank, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 50),
                                     {Array(DSOPT_DTYPE_F32, size_t(numel), 1.0f)}, DSOPT_OPTIMIZER_AVERAGES);
        const int rank = node_rank.d * 3 + node_rank.l;
        const Array gradient(DSOPT_DTYPE_F32, Random(uint64_t(rank)).floats(size_t(numel)));
        ASSERT_OK(trainer.step({gradient}));
        const dsopt_comm_info node = info_of(node_rank.node), data = info_of(node_rank.data);
        ASSERT_OK(trainer.step({gradient}));
        // A row of each rank, all as long as the longest, to the other rank of `data` and back, and a row of each node to
        // the two other ranks of `node` and back. The skip flag is one double over both levels.
        constexpr int64_t row = (numel * 4 + 63) / 64 * 64, flag = 8;
        EXPECT_EQ(info_of(node_rank.data).bytes_sent - data.bytes_sent, 2 * row + flag);
        EXPECT_EQ(info_of(node_rank.node).bytes_sent - node.bytes_sent, 2 * 2 * 2 * row + flag * 4 / 3);
    });
}

LABEL(numbers_only);
LABEL(long_emulated);
LABEL(slow);
TEST(TwoLevelOptimizer, ConvergesLikeOneLevel) {
    // Each rank minimizes the distance to its own point; the sum of squares is least at their mean. No coordinate
    // begins near the mean: one scale for all coordinates would make those with a small variance noisy.
    constexpr size_t numel = 3000;
    constexpr int per_node = 2, nodes = 2, ranks = per_node * nodes;
    std::vector<float> common = Random(59).floats(numel, -1, 1);
    for (float &value : common) value += value < 0 ? -1.0f : 1.0f;
    std::vector<std::vector<float>> point;
    std::vector<double> target(numel);
    for (int r = 0; r < ranks; ++r) {
        point.push_back(Random(uint64_t(60 + r)).floats(numel, -0.3, 0.3));
        for (size_t i = 0; i < numel; ++i) {
            point.back()[i] += common[i];
            target[i] += double(point.back()[i]) / ranks;
        }
    }
    struct Losses {
        double frozen, last;
    };
    const auto train = [&](Trainer &trainer, int rank) {
        Losses losses{};
        for (int call = 1; call <= 400; ++call) {
            Array gradient(DSOPT_DTYPE_F32, numel, 0.0f);
            for (size_t i = 0; i < numel; ++i) gradient.set(i, trainer.weight()[i] - point[size_t(rank)][i]);
            must(trainer.step({gradient}));
            losses.last = 0;
            for (size_t i = 0; i < numel; ++i)
                losses.last += std::pow(double(trainer.weight()[i]) - target[i], 2) / numel;
            if (call == 40) losses.frozen = losses.last;
        }
        return losses;
    };
    dsopt_group group = group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 40);
    group.weight_decay = 0;
    group.lr = 2e-3;
    const std::vector<Array> start = {Array(DSOPT_DTYPE_F32, numel, 0.0f)};
    std::array<Losses, ranks> flat{}, two_level{};
    const CommId id = new_id();
    run_ranks(ranks, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, ranks);
        dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_AVERAGES);
        desc.data = comm.get();
        Trainer trainer(ctx, desc, group, start);
        flat[size_t(rank)] = train(trainer, rank);
    });
    with_nodes(per_node, nodes, [&](const NodeRank &node_rank) {
        const int rank = node_rank.d * per_node + node_rank.l;
        Trainer trainer = trainer_of(node_rank, group, start, DSOPT_OPTIMIZER_AVERAGES);
        two_level[size_t(rank)] = train(trainer, rank);
    });
    EXPECT_LT(flat[0].last, 0.1 * flat[0].frozen);
    for (const Losses &losses : two_level) {
        EXPECT_EQ(losses.last, two_level[0].last);
        EXPECT_LT(losses.last, 0.1 * losses.frozen) << "in compressed steps";
        EXPECT_LT(losses.last, 1.2 * flat[0].last) << "with less noise";
    }
    RecordProperty("flat", std::to_string(flat[0].last));
    RecordProperty("two_level", std::to_string(two_level[0].last));
}

TEST(TwoLevelOptimizer, AgreesOnSkippingWithAdamW) {
    with_nodes(2, 2, [&](const NodeRank &node_rank) {
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.data = node_rank.data.get();
        desc.node = node_rank.node.get();
        desc.nonfinite = DSOPT_NONFINITE_SKIP;
        Trainer trainer(node_rank.ctx, desc, group_of(DSOPT_ALGORITHM_ADAMW), weights());
        std::vector<Array> grads = gradients(0, 1);
        if (node_rank.l == 1 && node_rank.d == 1) grads[0].set(3, kInf);
        ASSERT_OK(trainer.step(grads));
        EXPECT_EQ(trainer.report().last_skipped, 1);
        ASSERT_OK(trainer.step(gradients(0, 2)));
        EXPECT_EQ(trainer.report().last_skipped, 0);
    });
}

TEST(TwoLevelOptimizer, IsRefusedInCompatModeAndWithOneComm) {
    with_nodes(2, 1, [&](const NodeRank &node_rank) {
        dsopt_optimizer *opt = nullptr;
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.data = node_rank.data.get();
        desc.node = node_rank.node.get();
        desc.compat = DSOPT_COMPAT_DEEPSPEED;
        EXPECT_TRUE(refused(dsopt_optimizer_create(node_rank.ctx.get(), &desc, &opt), DSOPT_ERR_UNSUPPORTED, "compat"));
        desc.compat = DSOPT_COMPAT_NONE;
        desc.data = node_rank.node.get();
        EXPECT_TRUE(refused(dsopt_optimizer_create(node_rank.ctx.get(), &desc, &opt), DSOPT_ERR_ARGUMENT, "one comm"));
        EXPECT_EQ(opt, nullptr);
    });
}

// -------------------------------------------------------------------------------------------------------- checkpoints
struct Nodes {
    int per_node, nodes;
    int ranks() const { return per_node * nodes; }
    std::string text() const { return std::to_string(nodes) + " nodes of " + std::to_string(per_node); }
};
std::vector<int64_t> param_sizes() { return {kSizes.begin(), kSizes.end()}; }
/// Errors of all elements, tensor by tensor: the mean over its workers, and the error of its server.
struct Errors {
    std::vector<float> worker, server;
};
Errors errors_of(const Nodes &nodes, const std::vector<std::vector<float>> &worker,
                 const std::vector<std::vector<float>> &server) { // in the order l * nodes + d
    const ExchangeLayout at(nodes.per_node, nodes.nodes, param_sizes());
    Errors errors;
    for (size_t t = 0; t < kSizes.size(); ++t)
        for (int64_t k = at.begin[t]; k < at.begin[t] + at.numel[t]; ++k) {
            const int64_t l = k / at.slice();
            double sum = 0;
            for (int64_t d = 0; d < at.nodes; ++d) sum += worker[size_t(l * at.nodes + d)][size_t(k - l * at.slice())];
            errors.worker.push_back(float(sum / double(at.nodes)));
            errors.server.push_back(server[size_t(k / at.chunk)][size_t(k % at.chunk)]);
        }
    return errors;
}

LABEL(one_of_many);
LABEL(long_emulated);
TEST(TwoLevelCheckpoint, RedistributesErrorsOverOtherNodes) {
    const std::pair<Nodes, Nodes> moves[] = {{{1, 4}, {2, 2}}, {{2, 2}, {1, 4}}, {{2, 2}, {1, 3}}, {{1, 3}, {2, 2}},
                                             {{2, 3}, {3, 2}}, {{3, 2}, {2, 4}}, {{4, 1}, {2, 2}}, {{2, 2}, {4, 1}},
                                             {{1, 1}, {2, 2}}, {{2, 2}, {1, 1}}, {{2, 2}, {2, 2}}};
    for (const auto &[from, to] : moves) {
        SCOPED_TRACE(from.text() + " to " + to.text());
        const auto saving = size_t(from.ranks()), loading = size_t(to.ranks());
        std::vector<MemoryFile> files(saving);
        std::vector<std::vector<float>> worker(saving), server(saving), new_worker(loading), new_server(loading);
        std::vector<std::string> weights_then(saving), weights_now(loading), weights_later(loading);
        const auto text = [](Trainer &trainer) {
            std::string all;
            for (Array &weight : trainer.weights()) all += weight.text();
            return all;
        };
        with_nodes(from.per_node, from.nodes, [&, nodes = from.nodes](const NodeRank &node_rank) {
            const auto r = size_t(node_rank.l * nodes + node_rank.d);
            Trainer trainer =
                trainer_of(node_rank, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 6), weights(), DSOPT_OPTIMIZER_AVERAGES);
            for (int64_t call = 1; call <= 15; ++call) must(trainer.step(gradients(int(r), call)));
            must(files[r].save(trainer, DSOPT_IO_PARAMS));
            weights_then[r] = text(trainer);
            if (nodes == 1) return;
            worker[r] = trainer.state("worker_error");
            server[r] = trainer.state("server_error");
        });
        std::vector<const MemoryFile *> list;
        for (const MemoryFile &file : files) list.push_back(&file);
        std::reverse(list.begin(), list.end()); // the order of files does not matter
        const bool other = from.ranks() != to.ranks() || from.per_node != to.per_node;
        with_nodes(to.per_node, to.nodes, [&, from = from, nodes = to.nodes](const NodeRank &node_rank) {
            const auto r = size_t(node_rank.l * nodes + node_rank.d);
            Trainer trainer =
                trainer_of(node_rank, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 6), weights(), DSOPT_OPTIMIZER_AVERAGES);
            if (other && from.nodes > 1 && nodes > 1) {
                EXPECT_TRUE(refused(files[0].load(trainer, DSOPT_IO_PARAMS), DSOPT_ERR_MISMATCH, "files"))
                    << "the file of one rank is not enough";
            }
            ASSERT_OK(load_all(trainer.opt(), list, DSOPT_IO_PARAMS));
            EXPECT_EQ(trainer.report().resharded_from, other ? from.ranks() : 0);
            weights_now[r] = text(trainer);
            if (nodes > 1) {
                new_worker[r] = trainer.state("worker_error");
                new_server[r] = trainer.state("server_error");
            }
            for (int64_t call = 16; call <= 22; ++call) ASSERT_OK(trainer.step(gradients(int(r), call)));
            weights_later[r] = text(trainer);
        });
        for (size_t r = 0; r < loading; ++r) {
            EXPECT_TRUE(weights_now[r] == weights_then[0]) << "rank " << r;
            EXPECT_TRUE(weights_later[r] == weights_later[0]) << "rank " << r;
        }
        if (to.nodes == 1) continue;
        const Errors after = errors_of(to, new_worker, new_server);
        if (from.nodes == 1) {
            for (const float value : after.worker) ASSERT_EQ(value, 0);
            for (const float value : after.server) ASSERT_EQ(value, 0);
            continue;
        }
        const Errors before = errors_of(from, worker, server);
        EXPECT_TRUE(same_bits(after.worker, before.worker));
        EXPECT_TRUE(same_bits(after.server, before.server));
        EXPECT_TRUE(std::any_of(after.server.begin(), after.server.end(), [](float value) { return value != 0; }));
    }
}

TEST(TwoLevelCheckpoint, RefusesAFileOfAnotherRank) {
    std::array<MemoryFile, 4> files;
    with_nodes(2, 2, [&](const NodeRank &node_rank) {
        Trainer trainer =
            trainer_of(node_rank, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), weights(), DSOPT_OPTIMIZER_AVERAGES);
        for (int64_t call = 1; call <= 4; ++call) must(trainer.step(gradients(node_rank.l + 2 * node_rank.d, call)));
        must(files[size_t(node_rank.l * 2 + node_rank.d)].save(trainer));
    });
    with_nodes(2, 2, [&](const NodeRank &node_rank) {
        Trainer trainer =
            trainer_of(node_rank, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), weights(), DSOPT_OPTIMIZER_AVERAGES);
        const Snapshot before = trainer.snapshot();
        EXPECT_TRUE(
            refused(files[size_t(node_rank.d * 2 + 1 - node_rank.l)].load(trainer), DSOPT_ERR_MISMATCH, "rank"));
        EXPECT_TRUE(same(trainer.snapshot(), before));
        EXPECT_OK(files[size_t(node_rank.l * 2 + node_rank.d)].load(trainer));
    });
}

TEST(TwoLevelOptimizer, ComparesRanksInNodesWithCheckRanks) {
    constexpr int per_node = 3, nodes = 2;
    constexpr int swapped[per_node] = {1, 0, 2}; // swaps two ranks of the second node between comms
    std::array<CommId, nodes> in_node;
    std::array<CommId, per_node> between;
    for (CommId &id : in_node) id = new_id();
    for (CommId &id : between) id = new_id();
    run_ranks(per_node * nodes, [&](int rank) {
        const int l = rank % per_node, d = rank / per_node;
        const Context ctx = make_context(1);
        const Comm node = local_comm(ctx, in_node[size_t(d)], l, per_node),
                   data = local_comm(ctx, between[size_t(d == 0 ? l : swapped[l])], d, nodes);
        Trainer trainer = trainer_of({l, d, ctx, node, data}, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), weights(),
                                     DSOPT_OPTIMIZER_AVERAGES | DSOPT_OPTIMIZER_CHECK_RANKS);
        const Snapshot before = trainer.snapshot();
        EXPECT_TRUE(refused(trainer.step(gradients(rank, 1)), DSOPT_ERR_MISMATCH, "different ranks in their nodes"))
            << rank;
        EXPECT_TRUE(same(trainer.snapshot(), before));
    });
    with_nodes(3, 2, [&](const NodeRank &node_rank) {
        Trainer trainer = trainer_of(node_rank, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), weights(),
                                     DSOPT_OPTIMIZER_AVERAGES | DSOPT_OPTIMIZER_CHECK_RANKS);
        for (int64_t call = 1; call <= 4; ++call)
            EXPECT_OK(trainer.step(gradients(node_rank.d * 3 + node_rank.l, call)));
    });
}

TEST(TwoLevelOptimizer, ComparesListsOverBothLevels) {
    for (const int differing_rank : {0, 1, 2, 3}) // one rank has another list
        with_nodes(2, 2, [&](const NodeRank &node_rank) {
            const int rank = node_rank.d * 2 + node_rank.l;
            std::vector<Array> list = weights();
            if (rank == differing_rank) list[4] = Array(DSOPT_DTYPE_F32, 4999, 1.0f);
            Trainer trainer = trainer_of(node_rank, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), list,
                                         DSOPT_OPTIMIZER_AVERAGES | DSOPT_OPTIMIZER_CHECK_RANKS);
            std::vector<Array> grads = gradients(rank, 1);
            if (rank == differing_rank) grads[4] = Array(DSOPT_DTYPE_F32, 4999, 1.0f);
            EXPECT_TRUE(refused(trainer.step(grads), DSOPT_ERR_MISMATCH, "parameter 4"));
            EXPECT_EQ(info_of(node_rank.node).status, DSOPT_OK);
            EXPECT_EQ(info_of(node_rank.data).status, DSOPT_OK);
        });
}

} // namespace onebit_two_level_steps_tests
