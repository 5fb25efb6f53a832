// SPDX-License-Identifier: Apache-2.0
// Trainings whose state is sharded, beside the same training on one rank that has all of the state.
#pragma once
#include "formats.h"
#include "harness.h"
#include "two_level.h"
#include <array>
#include <ostream>
#include <tuple>

namespace test {

/// Data-parallel ranks in nodes, and how state is sharded over them.
struct Topology {
    int per_node, nodes;
    uint32_t flag = DSOPT_OPTIMIZER_SHARD;
    int64_t bucket = 0;
    int ranks() const { return per_node * nodes; }
    std::string name() const {
        return std::to_string(nodes) + "x" + std::to_string(per_node) +
               (flag == DSOPT_OPTIMIZER_SHARD_NODE       ? "InNode"
                : flag == DSOPT_OPTIMIZER_SPLIT_MATRICES ? "Split"
                : flag == 0                              ? "Unsharded"
                                                         : "") +
               (bucket != 0 ? "Bucket" + std::to_string(bucket) : "");
    }
    friend void PrintTo(const Topology &t, std::ostream *out) { *out << t.name(); }
};
inline std::string topology_name(const testing::TestParamInfo<Topology> &info) { return info.param.name(); }
inline const std::vector<Topology> kTopologies = {{1, 1},
                                                  {1, 2},
                                                  {1, 3},
                                                  {1, 5},
                                                  {1, 8},
                                                  {2, 1},
                                                  {2, 2},
                                                  {3, 2},
                                                  {2, 3},
                                                  {3, 1, DSOPT_OPTIMIZER_SHARD_NODE},
                                                  {2, 2, DSOPT_OPTIMIZER_SHARD_NODE},
                                                  {3, 2, DSOPT_OPTIMIZER_SHARD_NODE},
                                                  {1, 3, DSOPT_OPTIMIZER_SHARD, 4096},
                                                  {2, 2, DSOPT_OPTIMIZER_SHARD, 16384},
                                                  {2, 2, DSOPT_OPTIMIZER_SHARD_NODE, 4096},
                                                  {1, 2, DSOPT_OPTIMIZER_SHARD, int64_t(1) << 40}};
inline const std::vector<Topology> kFewTopologies = {
    {1, 3}, {2, 2}, {2, 3, DSOPT_OPTIMIZER_SHARD_NODE}, {1, 3, DSOPT_OPTIMIZER_SHARD, 8192}};

/// Blocks that several tensors share, tensors of several blocks, an empty one, every edge of a leaf.
inline const std::vector<int64_t> kShardSizes = {700, 1, 33, 0, 5000, 4096, 12345, 64, 4095, 9000, 4097};

/// The bytes of a state tensor by element of its parameter: of a sharded one, the part.
struct StatePart {
    dsopt_state_info info;
    int64_t begin, numel; // elements of the tensor
};
inline StatePart part_of_state(const dsopt_optimizer *opt, int64_t index) {
    const dsopt_state_info info = state_info(opt, index);
    if (!(info.flags & DSOPT_STATE_SHARDED)) return {info, 0, info.tensor.numel};
    int64_t begin = -1, numel = -1;
    must(dsopt_optimizer_shard(opt, info.param, -1, &begin, &numel));
    return {info, begin / info.block, (numel + info.block - 1) / info.block};
}

/// Compares weights, counters, report and every state tensor of a rank with an optimizer that has all of the state.
inline void expect_same_training(Trainer &sharded, Trainer &whole) {
    for (size_t i = 0; i < whole.weights().size(); ++i)
        ASSERT_TRUE(same(sharded.weight(i).text(), whole.weight(i).text())) << "weights of tensor " << i;
    ASSERT_EQ(state_count(sharded.opt()), state_count(whole.opt()));
    for (int64_t i = 0; i < state_count(whole.opt()); ++i) {
        const StatePart part = part_of_state(sharded.opt(), i);
        const dsopt_state_info info = state_info(whole.opt(), i);
        ASSERT_STREQ(part.info.name, info.name);
        ASSERT_EQ(part.info.tensor.numel, part.numel) << info.name;
        const std::string all = exported_text(whole.opt(), i);
        const size_t size = size_of(info.tensor.dtype);
        ASSERT_TRUE(
            same(exported_text(sharded.opt(), i), all.substr(size_t(part.begin) * size, size_t(part.numel) * size)))
            << info.name << " of parameter " << info.param;
    }
    const dsopt_report a = sharded.report(), b = whole.report();
    const auto bits = [](double value) { return std::isnan(value) ? 0 : __builtin_bit_cast(uint64_t, value); };
    ASSERT_EQ(a.calls, b.calls);
    ASSERT_EQ(a.skipped, b.skipped);
    ASSERT_EQ(a.last_skipped, b.last_skipped);
    ASSERT_EQ(a.first_bad, b.first_bad);
    ASSERT_EQ(a.kind, b.kind);
    ASSERT_EQ(a.reasons & ~DSOPT_SKIP_PEER, b.reasons & ~DSOPT_SKIP_PEER);
    for (const auto field :
         {&dsopt_report::loss_scale, &dsopt_report::scale_used, &dsopt_report::grad_norm, &dsopt_report::dense_norm,
          &dsopt_report::weight_norm, &dsopt_report::update_norm, &dsopt_report::divisor})
        ASSERT_EQ(bits(a.*field), bits(b.*field));
}

/// A training: what is registered, and the gradients of every step, which the caller has averaged.
struct ShardTraining {
    std::vector<dsopt_group> groups; // tensor t is in group t % groups.size(), in the order of groups
    int32_t param = DSOPT_DTYPE_F32, grad = DSOPT_DTYPE_F32;
    dsopt_optimizer_desc desc = optimizer_desc();
    bool scaled = false; // a dynamic loss scale
    int bad_step = 0;    // step in which a gradient has an Inf; 0: none
    size_t absent = 999; // a tensor without a gradient in even steps
    std::vector<int64_t> sizes = kShardSizes;
    int64_t steps = 5;
    int32_t param_flags = 0;
    std::vector<std::array<int64_t, 2>> blocks = {}; // rows and columns of the matrices of the first tensors

    std::vector<Array> gradients(int64_t step) const {
        std::vector<Array> list;
        for (size_t t = 0; t < sizes.size(); ++t) {
            list.push_back(t == absent && step % 2 == 0 ? Array::absent(size_t(sizes[t]), grad)
                                                        : Array(grad, size_t(sizes[t]), 0));
            if (list.back().tensor().data == nullptr) continue;
            list.back().fill(uint64_t(step) * 100 + t);
            if (step == bad_step && t == 6) list.back().set(size_t(sizes[t]) - 1, kInf);
        }
        return list;
    }
    /// Returns an optimizer. `scaler` must outlive it.
    Trainer trainer(const Context &context, const dsopt_optimizer_desc &with, Scaler &scaler) const {
        dsopt_optimizer_desc full = with;
        if (scaled) {
            scaler = make_scaler(context, 1024, 3);
            full.scaler = scaler.get();
        }
        Trainer made(context, full);
        for (size_t g = 0; g < groups.size(); ++g) {
            std::vector<Param> params;
            for (size_t t = sizes.size() * g / groups.size(); t < sizes.size() * (g + 1) / groups.size(); ++t) {
                params.push_back({Array(param, size_t(sizes[t]), 0), "t" + std::to_string(t), param_flags});
                params.back().weight.fill(t + 1);
                if (t < blocks.size())
                    std::tie(params.back().rows, params.back().cols) = std::pair(blocks[t][0], blocks[t][1]);
            }
            must(made.add_group(groups[g], std::move(params)));
        }
        return made;
    }
};

/// Returns the gradients of a rank that are not averaged. A tensor may be absent on one rank only.
inline std::vector<Array> own_gradients(const ShardTraining &training, int64_t step, const NodeRank &rank) {
    ShardTraining own = training;
    const int number = rank.d * 100 + rank.l;
    if (number != 0) own.bad_step = 0;
    if (number != 1) own.absent = 999;
    std::vector<Array> list = own.gradients(step);
    for (size_t t = 0; t < list.size(); ++t) {
        if (list[t].tensor().data == nullptr) continue;
        const bool bad = list[t].numel() != 0 && std::isinf(list[t][list[t].size() - 1]);
        list[t].fill(uint64_t(step) * 100 + t + 7777 * uint64_t(number));
        if (bad) list[t].set(list[t].size() - 1, kInf);
    }
    return list;
}
/// Returns the mean of the gradients of all ranks: the ranks of a node are added up in order, then the nodes, in fp32.
inline std::vector<Array> mean_gradients(const ShardTraining &training, int64_t step, const Topology &topology) {
    std::vector<std::vector<float>> total;
    const auto add = [](std::vector<std::vector<float>> &sums, const std::vector<std::vector<float>> &values) {
        if (sums.empty()) {
            sums = values;
            return;
        }
        for (size_t t = 0; t < sums.size(); ++t)
            for (size_t i = 0; i < sums[t].size(); ++i) sums[t][i] += values[t][i];
    };
    const Context none;
    const Comm no_comm;
    for (int d = 0; d < topology.nodes; ++d) {
        std::vector<std::vector<float>> of_node;
        for (int l = 0; l < topology.per_node; ++l) {
            std::vector<std::vector<float>> values;
            for (const Array &gradient : own_gradients(training, step, {l, d, none, no_comm, no_comm}))
                values.push_back(gradient.tensor().data != nullptr ? gradient.floats()
                                                                   : std::vector<float>(gradient.size()));
            add(of_node, values);
        }
        add(total, of_node);
    }
    std::vector<Array> means;
    for (std::vector<float> &values : total) {
        for (float &value : values) value *= 1.0f / float(topology.ranks());
        means.emplace_back(DSOPT_DTYPE_F32, values);
    }
    return means;
}

/// Runs the training with DSOPT_OPTIMIZER_AVERAGES, and on one rank that gets the mean. Compares after every step.
inline void expect_bits_of_mean(const ShardTraining &training, const Topology &topology) {
    with_nodes(topology.per_node, topology.nodes, [&](const NodeRank &rank) {
        dsopt_optimizer_desc desc = training.desc;
        Scaler scaler, one_scaler;
        Trainer whole = training.trainer(rank.ctx, desc, one_scaler);
        desc.flags |= int32_t(topology.flag) | DSOPT_OPTIMIZER_AVERAGES;
        desc.bucket = topology.bucket;
        desc.data = rank.data.get();
        if (topology.per_node > 1) desc.node = rank.node.get();
        Trainer averages = training.trainer(rank.ctx, desc, scaler);
        for (int64_t step = 1; step <= training.steps; ++step) {
            const std::vector<Array> gradients = own_gradients(training, step, rank);
            ASSERT_OK(averages.step(gradients));
            ASSERT_OK(whole.step(mean_gradients(training, step, topology)));
            expect_same_training(averages, whole);
            if (testing::Test::HasFatalFailure()) return;
        }
    });
}

/// Runs the training sharded and on one rank, and compares after every step. `take` makes a step.
inline void expect_same_bits(
    const ShardTraining &training, const Topology &topology, int threads = 1,
    const std::function<dsopt_status(Trainer &, const std::vector<Array> &)> &take =
        [](Trainer &trainer, const std::vector<Array> &gradients) { return trainer.step(gradients); }) {
    with_nodes(
        topology.per_node, topology.nodes,
        [&](const NodeRank &rank) {
            dsopt_optimizer_desc desc = training.desc;
            Scaler scaler, one_scaler;
            Trainer whole = training.trainer(rank.ctx, desc, one_scaler);
            desc.flags |= int32_t(topology.flag);
            desc.bucket = topology.bucket;
            desc.data = rank.data.get();
            if (topology.per_node > 1) desc.node = rank.node.get();
            Trainer sharded = training.trainer(rank.ctx, desc, scaler);
            for (int64_t step = 1; step <= training.steps; ++step) {
                ASSERT_OK(take(sharded, training.gradients(step)));
                ASSERT_OK(take(whole, training.gradients(step)));
                expect_same_training(sharded, whole);
                if (testing::Test::HasFatalFailure()) return;
            }
            for (const Array &weight : sharded.weights()) ASSERT_TRUE(weight.intact());
        },
        [&](int) { return make_context(threads); });
}

} // namespace test
