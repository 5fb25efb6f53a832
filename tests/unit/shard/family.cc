// SPDX-License-Identifier: Apache-2.0
// The 1-bit family with state that is sharded in the node, and the exchange of node means in two levels.
#include "support/compressed.h"
#include "support/file.h"
#include "support/shard.h"

using namespace test;

namespace shard_family_tests {

struct FamilyCase {
    int32_t algorithm;
    int per_node, nodes;
    std::string name() const { return name_of(algorithm) + std::to_string(nodes) + "x" + std::to_string(per_node); }
    friend void PrintTo(const FamilyCase &c, std::ostream *out) { *out << c.name(); }
};
std::vector<FamilyCase> cases() {
    std::vector<FamilyCase> list;
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB})
        for (const auto &[per_node, nodes] : {std::pair{2, 2}, {3, 2}, {2, 3}, {3, 1}, {1, 2}})
            list.push_back({algorithm, per_node, nodes});
    return list;
}

std::vector<Array> own(const std::vector<int64_t> &sizes, const NodeRank &rank, int64_t call, bool bad = false) {
    std::vector<Array> list;
    for (size_t t = 0; t < sizes.size(); ++t) {
        Random random(uint64_t(1000 * call + 10 * rank.d + rank.l) * 100 + t);
        list.emplace_back(DSOPT_DTYPE_F32, random.floats(size_t(sizes[t]), -1, 1.2));
        for (size_t i = 0; i < list[t].size(); i += 7) list[t].set(i, 0); // elements without variance
    }
    if (bad && rank.d == 0 && rank.l == 0) list[6].set(5000, kInf);
    return list;
}

/// Options of a run, beside the algorithm.
struct FamilyRun {
    dsopt_optimizer_desc desc = optimizer_desc(0.5);
    int32_t param = DSOPT_DTYPE_F32;
    int32_t param_flags = 0;
    bool beside = false; // a group that is never compressed, and one of another algorithm
    bool averages = true;
    int bad_call = 0;
};

class ShardFamily : public testing::TestWithParam<FamilyCase> {
protected:
    Trainer trainer(const NodeRank &rank, const FamilyRun &run, uint32_t flags) const {
        dsopt_optimizer_desc desc = run.desc;
        desc.flags |= int32_t(flags | (run.averages ? uint32_t(DSOPT_OPTIMIZER_AVERAGES) : 0u));
        desc.data = rank.data.get();
        desc.node = rank.node.get();
        Trainer made(rank.ctx, desc);
        dsopt_group plain = group_for(GetParam().algorithm, 3), frozen = plain;
        frozen.flags |= DSOPT_GROUP_NON_FREEZE;
        std::vector<dsopt_group> groups{plain};
        if (run.beside && GetParam().algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM) groups.push_back(frozen);
        if (run.beside) groups.push_back(group_of(DSOPT_ALGORITHM_ADAMW));
        for (size_t g = 0; g < groups.size(); ++g) {
            std::vector<Param> params;
            for (size_t t = kShardSizes.size() * g / groups.size(); t < kShardSizes.size() * (g + 1) / groups.size();
                 ++t) {
                params.push_back({Array(run.param, size_t(kShardSizes[t]), 0), "t" + std::to_string(t),
                                  g == 0 ? run.param_flags : 0});
                params.back().weight.fill(t + 1);
            }
            must(made.add_group(groups[g], std::move(params)));
        }
        return made;
    }

    void expect_bits_of_unsharded(const FamilyRun &run, int64_t calls = 9) const {
        const auto [algorithm, per_node, nodes] = GetParam();
        with_nodes(per_node, nodes, [&, per_node = per_node, nodes = nodes](const NodeRank &rank) {
            Trainer whole = trainer(rank, run, 0), sharded = trainer(rank, run, DSOPT_OPTIMIZER_SHARD_NODE);
            for (int64_t call = 1; call <= calls; ++call) {
                const bool bad = call == run.bad_call;
                // Without AVERAGES full steps get the same gradients on all ranks.
                const bool same_gradients = !run.averages && reduction(whole) == DSOPT_REDUCTION_FULL;
                const NodeRank first{0, 0, rank.ctx, rank.node, rank.data};
                const std::vector<Array> gradients = own(kShardSizes, same_gradients ? first : rank, call, bad);
                ASSERT_OK(whole.step(gradients));
                ASSERT_OK(sharded.step(gradients));
                for (size_t i = 0; i < whole.weights().size(); ++i)
                    ASSERT_TRUE(same(sharded.weight(i).text(), whole.weight(i).text()))
                        << "call " << call << ", weights of tensor " << i;
                const dsopt_report a = sharded.report(), b = whole.report();
                ASSERT_EQ(a.last_skipped, b.last_skipped) << call;
                ASSERT_EQ(a.reasons, b.reasons) << call;
                ASSERT_EQ(a.grad_norm, b.grad_norm) << call;
            }
            const ListVector vector(kShardSizes);
            const int64_t slice = vector.chunk(per_node * nodes) * nodes * rank.l;
            for (int64_t i = 0; i < state_count(whole.opt()); ++i) {
                const StatePart part = part_of_state(sharded.opt(), i);
                const dsopt_state_info info = state_info(whole.opt(), i);
                const std::string name = info.name;
                ASSERT_STREQ(part.info.name, info.name);
                if (name == "exp_avg_bits") continue; // of the slice
                const size_t size = size_of(info.tensor.dtype);
                const int64_t begin = name == "active" ? slice / 32 : part.begin;
                const std::string all = exported_text(whole.opt(), i), mine = exported_text(sharded.opt(), i);
                // A slice behind the last compressed tensor has no bits.
                const size_t offset = std::min(size_t(begin) * size, all.size());
                ASSERT_TRUE(same(mine, all.substr(offset, mine.size()))) << name << " of " << info.param;
            }
        });
    }
};
INSTANTIATE_TEST_SUITE_P(, ShardFamily, testing::ValuesIn(cases()), [](const auto &info) { return info.param.name(); });

LABEL_PARAMS(long_emulated, "*[13]x*");
LABEL_PARAMS(long_emulated, "*2x3");
LABEL_PARAMS(one_of_many, "*[13]x*");
TEST_P(ShardFamily, GivesTheBitsOfTwoLevels) {
    expect_bits_of_unsharded({.bad_call = 6});
    expect_bits_of_unsharded({.averages = false, .bad_call = 2});
}

LABEL_PARAMS(long_emulated, "*[13]x*");
LABEL_PARAMS(long_emulated, "*2x3");
LABEL_PARAMS(one_of_many, "*[13]x*");
TEST_P(ShardFamily, GivesTheBitsOfTwoLevelsInMixedPrecision) {
    expect_bits_of_unsharded({.param = DSOPT_DTYPE_BF16, .bad_call = 7});
}

LABEL(long_emulated);
TEST_P(ShardFamily, GivesTheBitsOfTwoLevelsBesideOtherGroups) {
    expect_bits_of_unsharded({.beside = true, .bad_call = 5});
}

LABEL(long_emulated);
TEST_P(ShardFamily, GivesTheBitsOfTwoLevelsWithMasks) { expect_bits_of_unsharded({.param_flags = DSOPT_PARAM_MASKED}); }

LABEL_PARAMS(long_emulated, "*[13]x*");
LABEL_PARAMS(long_emulated, "*2x3");
LABEL_PARAMS(one_of_many, "*[13]x*");
TEST_P(ShardFamily, GivesTheBitsOfTwoLevelsWithMomentumInBits) {
    if (GetParam().algorithm != DSOPT_ALGORITHM_ONEBIT_ADAM) return;
    expect_bits_of_unsharded({.desc = optimizer_desc(0.5, DSOPT_OPTIMIZER_MOMENTUM_BITS)});
}

// Files of one node sharding, of another one, and of ranks with all of the state load into each other. Error feedback is
// redistributed: afterwards replicas agree, and with the same ranks the bits are those of an uninterrupted run.
LABEL_PARAMS(long_emulated, "*[13]x*");
LABEL_PARAMS(long_emulated, "*2x3");
LABEL_PARAMS(long_emulated, "*Lamb2x[12]");
LABEL_PARAMS(long_emulated, "*2x1");
LABEL_PARAMS(one_of_many, "*[13]x*");
LABEL_PARAMS(one_of_many, "*2x[13]");
LABEL_PARAMS(one_of_many, "*Lamb*");
TEST_P(ShardFamily, ResumesFromFilesOfOtherRanks) {
    const auto [algorithm, per_node, nodes] = GetParam();
    const FamilyRun run{.averages = true};
    const auto steps = [&](Trainer &trainer, const NodeRank &rank, int64_t from, int64_t to) {
        for (int64_t call = from; call <= to; ++call) must(trainer.step(own(kShardSizes, rank, call)));
    };
    for (const uint32_t saves : {0u, uint32_t(DSOPT_OPTIMIZER_SHARD_NODE)}) {
        std::vector<MemoryFile> files(size_t(per_node * nodes));
        std::string weights;
        with_nodes(per_node, nodes, [&, nodes = nodes](const NodeRank &rank) {
            Trainer first = trainer(rank, run, saves);
            steps(first, rank, 1, 6);
            must(files[size_t(rank.l * nodes + rank.d)].save(first, DSOPT_IO_PARAMS));
            if (rank.l == 0 && rank.d == 0) weights = first.model.text();
        });
        std::vector<const MemoryFile *> list;
        for (const MemoryFile &file : files) list.push_back(&file);
        for (const auto &[l, d] : {std::pair{per_node, nodes}, {2, 2}, {3, 2}, {1, 2}, {2, 1}})
            for (const uint32_t loads : {0u, uint32_t(DSOPT_OPTIMIZER_SHARD_NODE)}) {
                std::vector<std::string> after(size_t(l * d)), bits(size_t(l * d));
                with_nodes(l, d, [&, l = l, d = d](const NodeRank &rank) {
                    Trainer second = trainer(rank, run, loads);
                    ASSERT_OK(load_all(second.opt(), list, DSOPT_IO_PARAMS));
                    ASSERT_EQ(second.model.text(), weights);
                    steps(second, rank, 7, 9);
                    after[size_t(rank.l * d + rank.d)] = second.model.text();
                    if (l != GetParam().per_node || d != GetParam().nodes) return;
                    Trainer whole = trainer(rank, run, 0);
                    steps(whole, rank, 1, 9);
                    // Another sharding of the same ranks redistributes the errors, too, which rounds them.
                    if (saves == loads) { EXPECT_TRUE(same(second.model.text(), whole.model.text())); }
                });
                for (const std::string &text : after)
                    EXPECT_TRUE(same(text, after[0])) << l << " " << d << " " << loads;
            }
    }
}

// One exchange of two levels is, slice by slice, the exchange of the nodes' values over the ranks with that slice.
TEST(TwoLevelExchange, SendsTheMomentumOfTheNodesMeanGradient) {
    const std::vector<int64_t> sizes = {3000, 1000, 4096, 8192, 64, 12000}; // 8 blocks, so that all slices are full
    with_nodes(2, 2, [&](const NodeRank &rank) {
        dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_AVERAGES);
        desc.data = rank.data.get();
        desc.node = rank.node.get();
        const ListVector vector(sizes);
        ASSERT_EQ(vector.blocks, 8);
        std::vector<Array> weights;
        for (const int64_t n : sizes) weights.emplace_back(DSOPT_DTYPE_F32, size_t(n), 0.5f);
        dsopt_group group = group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2);
        Trainer trainer(rank.ctx, desc, group, weights);
        // The parts of the tensors in this rank's slice, as a list of its own.
        const int64_t slice = vector.chunk(4) * 2, first = slice * rank.l;
        struct Part {
            size_t tensor;
            int64_t begin, numel;
        };
        std::vector<Part> parts;
        std::vector<int64_t> numels;
        for (size_t t = 0; t < sizes.size(); ++t) {
            const int64_t from = std::max(vector.begin[t], first),
                          to = std::min(vector.begin[t] + sizes[t], first + slice);
            if (from < to) parts.push_back({t, from - vector.begin[t], to - from}), numels.push_back(to - from);
        }
        CompressedMean mean(rank.data, numels);
        for (int64_t call = 1; call <= 6; ++call) {
            std::vector<std::vector<float>> before;
            for (size_t t = 0; t < sizes.size(); ++t) before.push_back(trainer.state("exp_avg", int64_t(t)));
            const auto gradients_of = [&](int l) {
                std::vector<Array> list;
                for (size_t t = 0; t < sizes.size(); ++t)
                    list.emplace_back(
                        DSOPT_DTYPE_F32,
                        Random(uint64_t(100 * call + 10 * rank.d + l) * 10 + t).floats(size_t(sizes[t]), -1, 1));
                return list;
            };
            const std::vector<Array> a = gradients_of(0), b = gradients_of(1);
            ASSERT_OK(trainer.step(rank.l == 0 ? a : b));
            if (call <= 2) continue;
            Values values;
            for (const Part &part : parts) {
                std::vector<float> value;
                for (int64_t i = part.begin; i < part.begin + part.numel; ++i) {
                    const float h = (a[part.tensor][size_t(i)] + b[part.tensor][size_t(i)]) * 0.5f;
                    value.push_back(float(group.beta1) * before[part.tensor][size_t(i)] + float(1 - group.beta1) * h);
                }
                values.push_back(std::move(value));
            }
            must(mean.call(values));
            const Values results = mean.read();
            for (size_t k = 0; k < parts.size(); ++k) {
                const std::vector<float> now = trainer.state("exp_avg", int64_t(parts[k].tensor));
                const auto begin = now.begin() + parts[k].begin;
                ASSERT_TRUE(same_bits(results[k], {begin, begin + parts[k].numel}))
                    << "call " << call << ", part " << k;
            }
        }
    });
}

} // namespace shard_family_tests
