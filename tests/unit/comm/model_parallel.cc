// SPDX-License-Identifier: Apache-2.0
// LAMB on tensors that are sharded over model-parallel ranks: a tensor has one trust ratio, equal on all ranks.
#include "support/onebit.h"
#include "support/reference.h"
#include <barrier>

using namespace test;

namespace comm_model_parallel_tests {

/// A tensor of the whole model. `shards` has the size of each rank's shard; if empty, every rank has the whole tensor.
struct ModelTensor {
    std::vector<size_t> shards;
    size_t size = 0; // without shards
    int32_t dtype = DSOPT_DTYPE_F32;

    size_t numel() const {
        size_t sum = size;
        for (const size_t shard : shards) sum += shard;
        return sum;
    }
    std::vector<float> shard_of(const std::vector<float> &whole, int rank) const {
        if (shards.empty()) return whole;
        size_t begin = 0;
        for (int k = 0; k < rank; ++k) begin += shards[size_t(k)];
        const auto from = whole.begin() + int64_t(begin);
        return {from, from + int64_t(shards[size_t(rank)])};
    }
};

/// A model and its gradients, whole and by rank. Weights of the first third of a tensor are larger than the others, so
/// that ratios of single shards would differ a lot.
struct Model {
    std::vector<ModelTensor> tensors;
    double size = 1; // gradients are in [-size, 1.5 size]
    int absent = -1; // a tensor that has no gradient in every third step

    std::vector<float> weights(size_t t) const {
        Random random(t + 1);
        std::vector<float> values = random.floats(tensors[t].numel());
        for (size_t i = 0; i < values.size(); ++i) values[i] *= i < values.size() / 3 ? 4.0f : 0.25f;
        return values;
    }
    std::vector<float> gradients(size_t t, int step) const {
        Random random(100 * t + uint64_t(step));
        return random.floats(tensors[t].numel(), -size, 1.5 * size);
    }
    std::vector<Param> params() const {
        std::vector<Param> list;
        for (size_t t = 0; t < tensors.size(); ++t) list.push_back({Array(tensors[t].dtype, weights(t))});
        return list;
    }
    std::vector<Param> params(int rank) const {
        std::vector<Param> list;
        for (size_t t = 0; t < tensors.size(); ++t)
            list.push_back({Array(tensors[t].dtype, tensors[t].shard_of(weights(t), rank)), "t" + std::to_string(t),
                            tensors[t].shards.empty() ? 0 : int32_t(DSOPT_PARAM_MODEL_PARALLEL)});
        return list;
    }
    bool is_absent(size_t t, int step) const { return int(t) == absent && step % 3 == 2; }
    std::vector<Array> grads(int step) const {
        std::vector<Array> list;
        for (size_t t = 0; t < tensors.size(); ++t)
            list.push_back(is_absent(t, step) ? Array::absent(tensors[t].numel())
                                              : Array(tensors[t].dtype, gradients(t, step)));
        return list;
    }
    std::vector<Array> grads(int step, int rank) const {
        std::vector<Array> list;
        for (size_t t = 0; t < tensors.size(); ++t) {
            const std::vector<float> shard = tensors[t].shard_of(gradients(t, step), rank);
            // An empty shard is absent in every second step.
            const bool no_gradient = shard.empty() && step % 2 == 1;
            list.push_back(is_absent(t, step) || no_gradient ? Array::absent(shard.size())
                                                             : Array(tensors[t].dtype, shard));
        }
        return list;
    }
};

const Model kTwoShards{{{{5000, 9000}}, {{}, 77}, {{0, 300}}, {{}, 4097}, {{4096, 1}}}, 1, 4};
const Model kThreeShards{{{{1, 9000, 4096}}, {{700, 0, 30}}, {{}, 33}, {{10, 20, 5000}}}, 1, 3};

dsopt_optimizer_desc with_model(const Comm &comm, dsopt_optimizer_desc desc = optimizer_desc()) {
    desc.model = comm.get();
    return desc;
}
void expect_near(float got, double wanted, double relative, const std::string &what) {
    EXPECT_LE(std::fabs(double(got) - wanted), relative * std::fabs(wanted)) << what << ": " << got << ", " << wanted;
}
/// Compares a shard with the same elements of the whole tensor.
void expect_shard_near(const std::vector<float> &got, const std::vector<float> &wanted, double tolerance,
                       const std::string &what) {
    ASSERT_EQ(got.size(), wanted.size());
    for (size_t i = 0; i < got.size(); ++i)
        ASSERT_LE(std::fabs(double(got[i]) - double(wanted[i])), tolerance) << what << ", element " << i;
}

/// Results of one rank, or of the whole model, after a step.
struct Result {
    std::vector<float> ratios;
    std::vector<std::vector<float>> weights;
    std::map<std::string, std::vector<float>> state; // only of 1-bit LAMB
    bool skipped = false;
};
Result result_of(Trainer &trainer, bool onebit = false) {
    Result result;
    result.ratios = trainer.state("trust_ratio");
    for (const Array &weight : trainer.weights()) result.weights.push_back(weight.floats());
    for (const char *name : {"trust_average", "trust_factor", "trust_weight"})
        if (onebit) result.state[name] = trainer.state(name);
    result.skipped = trainer.report().last_skipped != 0;
    return result;
}

/// Trains the whole model and its shards and compares them. Ratios agree up to rounding and are identical on every
/// rank; weights agree up to `tolerance`. `change` is called once per list of gradients; the whole model has rank -1.
struct Training {
    Model model;
    int ranks = 2, steps = 7;
    dsopt_group group = group_of(DSOPT_ALGORITHM_LAMB);
    dsopt_optimizer_desc desc = optimizer_desc();
    double scale = 0;        // of a scaler; 0: no scaler
    double tolerance = 2e-6; // of weights
    std::function<void(int step, int rank, std::vector<Array> &grads)> change = {};

    bool onebit() const { return group.algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB; }
    std::vector<Result> run(const Context &ctx, const Comm &comm, int rank) const {
        dsopt_optimizer_desc rank_desc = with_model(comm, desc);
        const Scaler scaler = scale != 0 ? make_scaler(ctx, scale) : nullptr;
        rank_desc.scaler = scaler.get();
        Trainer trainer(ctx, rank_desc, group, rank < 0 ? model.params() : model.params(rank));
        std::vector<Result> results;
        for (int step = 0; step < steps; ++step) {
            std::vector<Array> grads = rank < 0 ? model.grads(step) : model.grads(step, rank);
            if (change) change(step, rank, grads);
            must(trainer.step(grads));
            results.push_back(result_of(trainer, onebit()));
        }
        return results;
    }
    void expect_shards_match_whole() const {
        const Context ctx = make_context(1);
        const std::vector<Result> whole = run(ctx, nullptr, -1);
        std::vector<std::vector<Result>> parts(static_cast<size_t>(ranks));
        const CommId id = new_id();
        run_ranks(ranks, [&](int rank) {
            const Context own = make_context(2);
            parts[size_t(rank)] = run(own, local_comm(own, id, rank, ranks), rank);
        });
        for (int rank = 0; rank < ranks; ++rank) compare(parts[size_t(rank)], whole, parts[0], rank);
    }
    void compare(const std::vector<Result> &got, const std::vector<Result> &whole, const std::vector<Result> &first,
                 int rank) const {
        ASSERT_EQ(got.size(), whole.size());
        for (size_t step = 0; step < got.size(); ++step) {
            const std::string what = "step " + std::to_string(step) + ", rank " + std::to_string(rank);
            EXPECT_TRUE(same_bits(got[step].ratios, first[step].ratios)) << what;
            EXPECT_EQ(got[step].skipped, whole[step].skipped) << what;
            for (const auto &[name, values] : got[step].state) {
                EXPECT_TRUE(same_bits(values, first[step].state.at(name))) << name << ", " << what;
                for (size_t t = 0; t < values.size(); ++t)
                    expect_near(values[t], whole[step].state.at(name)[t], 1e-5, name + ", " + what);
            }
            for (size_t t = 0; t < model.tensors.size(); ++t) {
                expect_near(got[step].ratios[t], whole[step].ratios[t], 1e-5, what + ", ratio " + std::to_string(t));
                expect_shard_near(got[step].weights[t], model.tensors[t].shard_of(whole[step].weights[t], rank),
                                  tolerance, what + ", tensor " + std::to_string(t));
            }
        }
    }
};

TEST(ShardedLamb, UpdatesShardsLikeTheWholeTensor) {
    for (const int ranks : {2, 3})
        for (const int32_t flags : {0u, uint32_t(DSOPT_GROUP_EPS_INSIDE_SQRT)}) {
            Training training{ranks == 2 ? kTwoShards : kThreeShards, ranks};
            training.group.flags = flags;
            training.expect_shards_match_whole();
        }
}

TEST(ShardedLamb, MatchesTheFormulaInDoublePrecision) {
    const Model &model = kThreeShards;
    const dsopt_group group = group_of(DSOPT_ALGORITHM_LAMB);
    const CommId id = new_id();
    constexpr int ranks = 3, steps = 4;
    using State = std::map<std::string, std::vector<std::vector<float>>>; // by name, of tensors
    std::array<std::array<State, ranks>, steps + 1> seen;
    std::array<std::array<std::vector<float>, ranks>, steps + 1> ratios;
    run_ranks(ranks, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, ranks);
        Trainer trainer(ctx, with_model(comm), group, model.params(rank));
        for (int step = 0; step <= steps; ++step) {
            if (step > 0) must(trainer.step(model.grads(0, rank)));
            State &now = seen[size_t(step)][size_t(rank)];
            for (const char *name : {"exp_avg", "exp_avg_sq"})
                for (size_t t = 0; t < model.tensors.size(); ++t) now[name].push_back(trainer.state(name, int64_t(t)));
            for (const Array &weight : trainer.weights()) now["weight"].push_back(weight.floats());
            ratios[size_t(step)][size_t(rank)] = trainer.state("trust_ratio");
        }
    });
    const auto join = [&](int step, const char *name, size_t t) {
        std::vector<double> whole;
        for (size_t rank = 0; rank < (model.tensors[t].shards.empty() ? 1 : ranks); ++rank)
            for (const float x : seen[size_t(step)][rank].at(name)[t]) whole.push_back(x);
        return whole;
    };
    for (int step = 1; step <= steps; ++step)
        for (size_t t = 0; t < model.tensors.size(); ++t) {
            const std::vector<float> g = model.gradients(t, 0);
            const test::ReferenceStep wanted = test::reference_step(
                group, {join(step - 1, "weight", t), join(step - 1, "exp_avg", t), join(step - 1, "exp_avg_sq", t)},
                {g.begin(), g.end()}, step);
            const std::vector<double> got = join(step, "weight", t);
            for (size_t i = 0; i < got.size(); ++i)
                ASSERT_LE(std::fabs(got[i] - wanted.now.p[i]),
                          wanted.roundings[i] * wanted.size[i] * test::kRounding + test::ulp(wanted.now.p[i]))
                    << "step " << step << ", tensor " << t << ", element " << i;
            expect_near(ratios[size_t(step)][0][t], wanted.trust, 1e-6, "ratio");
        }
}

TEST(ShardedLamb, WorksWithMastersClippingScalingAndSkippedSteps) {
    for (const int32_t dtype : {DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16}) {
        Training training{kTwoShards};
        for (ModelTensor &tensor : training.model.tensors) tensor.dtype = dtype;
        training.model.size = 100;
        training.scale = 64;
        training.desc.max_norm = 0.5;
        training.tolerance = 0.04; // one rounding of the 16-bit copy
        training.change = [](int step, int rank, std::vector<Array> &grads) {
            // The same element in the whole tensor and in the shard of rank 1.
            if (step == 3 && rank < 0) grads[0].set(5000, kInf);
            if (step == 3 && rank == 1) grads[0].set(0, kInf);
        };
        training.expect_shards_match_whole();
    }
}

TEST(ShardedLamb, ReducesSumsOncePerStepEvenIfSkipped) {
    const struct {
        int32_t algorithm;
        int32_t flags;
        int64_t calls, bytes; // in addition to those of the norms: 24 bytes per sharded tensor
    } cases[] = {{DSOPT_ALGORITHM_LAMB, DSOPT_PARAM_MODEL_PARALLEL, 1, 3 * 24},
                 {DSOPT_ALGORITHM_LAMB, 0, 0, 0},
                 {DSOPT_ALGORITHM_ADAMW, DSOPT_PARAM_MODEL_PARALLEL, 0, 0}};
    for (const auto &c : cases) {
        const CommId id = new_id();
        run_ranks(2, [&](int rank) {
            const Context ctx = make_context(1);
            const Comm comm = local_comm(ctx, id, rank, 2);
            dsopt_optimizer_desc desc = with_model(comm);
            desc.nonfinite = DSOPT_NONFINITE_SKIP;
            std::vector<Param> params;
            for (const size_t n : {5, 6, 7}) params.push_back({Array(DSOPT_DTYPE_F32, n, 1), "", c.flags});
            Trainer trainer(ctx, desc, group_of(c.algorithm), params);
            for (const bool skipped : {false, true, false}) {
                std::vector<Array> grads;
                for (const size_t n : {5, 6, 7}) grads.emplace_back(DSOPT_DTYPE_F32, n, 1);
                if (skipped && rank == 1) grads[1].set(2, kNaN);
                const dsopt_comm_info before = info_of(comm);
                must(trainer.step(grads));
                const dsopt_comm_info after = info_of(comm);
                EXPECT_EQ(trainer.report().last_skipped, skipped);
                EXPECT_EQ(after.calls - before.calls, 1 + c.calls);
                EXPECT_EQ(after.bytes_sent - before.bytes_sent, 3 * 8 + c.bytes);
            }
        });
    }
}

TEST(ShardedLamb, TreatsACommOfOneRankAsNull) {
    const Context ctx = make_context(1);
    const Comm alone = self_comm(ctx);
    const std::vector<Param> params = {{Array(DSOPT_DTYPE_F32, {1, 2, 3}), "w", DSOPT_PARAM_MODEL_PARALLEL}};
    Trainer with(ctx, with_model(alone), group_of(DSOPT_ALGORITHM_LAMB), params),
        without(ctx, optimizer_desc(), group_of(DSOPT_ALGORITHM_LAMB), params);
    for (int step = 0; step < 3; ++step)
        for (Trainer *trainer : {&with, &without}) must(trainer->step({Array(DSOPT_DTYPE_F32, {1, 1, float(step)})}));
    EXPECT_TRUE(same(with.snapshot(), without.snapshot()));
    EXPECT_EQ(with.report().workspace_bytes, without.report().workspace_bytes);
}

TEST(ShardedLamb, HasOneRatioPerShardInCompatMode) {
    const CommId id = new_id();
    run_ranks(2, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, 2);
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.compat = DSOPT_COMPAT_DEEPSPEED;
        Trainer alone(ctx, desc, group_of(DSOPT_ALGORITHM_LAMB), kTwoShards.params(rank)),
            sharded(ctx, with_model(comm, desc), group_of(DSOPT_ALGORITHM_LAMB), kTwoShards.params(rank));
        for (int step = 0; step < 3; ++step) {
            const std::vector<Array> grads = kTwoShards.grads(2 * step, rank);
            must(alone.step(grads));
            must(sharded.step(grads));
        }
        EXPECT_TRUE(same(alone.snapshot(), sharded.snapshot()));
    });
}

TEST(ShardedLamb, StepsNextToGroupsOfOtherAlgorithms) {
    Training training{kTwoShards};
    const Context ctx = make_context(1);
    const auto run = [&](const Comm &comm, int rank) {
        Trainer trainer(ctx, with_model(comm), group_of(DSOPT_ALGORITHM_ADAMW),
                        {{Array(DSOPT_DTYPE_F32, 9, 1), "first", comm ? int32_t(DSOPT_PARAM_MODEL_PARALLEL) : 0}});
        must(trainer.add_group(training.group, rank < 0 ? kTwoShards.params() : kTwoShards.params(rank)));
        dsopt_group third = group_of(DSOPT_ALGORITHM_LAMB, 1e-3);
        third.max_trust = 0.1;
        must(trainer.add_group(third, {{Array(DSOPT_DTYPE_F32, 8, 1), "last"}}));
        for (int step = 0; step < 4; ++step) {
            std::vector<Array> grads{Array(DSOPT_DTYPE_F32, 9, 1)};
            for (Array &grad : rank < 0 ? kTwoShards.grads(step) : kTwoShards.grads(step, rank))
                grads.push_back(std::move(grad));
            grads.emplace_back(DSOPT_DTYPE_F32, 8, 1);
            must(trainer.step(grads));
        }
        return result_of(trainer);
    };
    const Result whole = run(nullptr, -1);
    EXPECT_EQ(whole.ratios.back(), 0.1f);
    const CommId id = new_id();
    run_ranks(2, [&](int rank) {
        const Result got = run(local_comm(ctx, id, rank, 2), rank);
        for (size_t t = 0; t < got.ratios.size(); ++t) {
            expect_near(got.ratios[t], whole.ratios[t], 1e-6, "ratio");
            const bool inside = t > 0 && t <= kTwoShards.tensors.size();
            expect_shard_near(got.weights[t],
                              inside ? kTwoShards.tensors[t - 1].shard_of(whole.weights[t], rank) : whole.weights[t],
                              2e-6, "tensor " + std::to_string(t));
        }
    });
}

TEST(ShardedLamb, AppliesTheBitsOfStep) {
    const CommId id = new_id();
    run_ranks(2, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, 2);
        Trainer a(ctx, with_model(comm), group_of(DSOPT_ALGORITHM_LAMB), kTwoShards.params(rank)),
            b(ctx, with_model(comm), group_of(DSOPT_ALGORITHM_LAMB), kTwoShards.params(rank));
        must(a.step(kTwoShards.grads(0, rank)));
        must(b.step(kTwoShards.grads(0, rank)));
        size_t bytes = 0;
        must(dsopt_optimizer_workspace(b.opt(), &bytes));
        const Shared<char> workspace(bytes);
        std::vector<dsopt_tensor> params, state;
        for (const Array &weight : b.weights()) params.push_back(weight.tensor());
        for (const dsopt_state_info &info : b.state()) state.push_back(info.tensor);
        const std::vector<Array> arrays = kTwoShards.grads(1, rank);
        const std::vector<dsopt_tensor> grads = list_of(arrays);
        DSOPT_NEW(dsopt_step, step);
        step.grads = grads.data();
        step.params = params.data();
        step.state = state.data();
        step.count = int64_t(grads.size());
        step.state_count = int64_t(state.size());
        step.workspace = workspace.data();
        step.workspace_bytes = bytes;
        must(a.step(arrays));
        must(dsopt_optimizer_apply(b.opt(), &step));
        EXPECT_TRUE(same(a.snapshot(), b.snapshot()));
    });
}

// --------------------------------------------------------------------------------------------------------- 1-bit LAMB
Training onebit_training(const Model &model, int ranks, double weight_decay) {
    Training training{model, ranks, 9};
    training.group = group_for(DSOPT_ALGORITHM_ONEBIT_LAMB, 4, 1e-2, weight_decay);
    training.tolerance = 1e-5;
    return training;
}

TEST(ShardedOneBitLamb, UpdatesShardsLikeTheWholeTensor) {
    for (const int ranks : {2, 3})
        for (const double weight_decay : {0.0, 0.5}) {
            Training training = onebit_training(ranks == 2 ? kTwoShards : kThreeShards, ranks, weight_decay);
            training.group.trust_threshold = 0.9; // does not bound the largest factor
            training.group.trust_max_change = 1000;
            training.group.trust_min_change = 0;
            training.expect_shards_match_whole();
        }
}

TEST(ShardedOneBitLamb, TreatsAFactorOfNaNAsTheLargest) {
    Training training = onebit_training(kTwoShards, 2, 0.5);
    training.desc.nonfinite = DSOPT_NONFINITE_APPLY;
    training.tolerance = INFINITY;
    training.model.tensors = {kTwoShards.tensors[0]};
    training.model.absent = -1;
    training.steps = 6;
    const Context ctx = make_context(1);
    const auto run = [&](const Comm &comm, int rank) {
        Trainer trainer(ctx, with_model(comm, training.desc), training.group,
                        rank < 0 ? training.model.params() : training.model.params(rank));
        for (int step = 0; step < training.steps; ++step) {
            std::vector<Array> grads = rank < 0 ? training.model.grads(step) : training.model.grads(step, rank);
            if (step == 5 && rank < 0) grads[0].set(5003, kNaN);
            if (step == 5 && rank == 1) grads[0].set(3, kNaN);
            must(trainer.step(grads));
        }
        return trainer.first("trust_factor", -1);
    };
    const float whole = run(nullptr, -1);
    const CommId id = new_id();
    std::array<float, 2> got{};
    run_ranks(2, [&](int rank) { got[size_t(rank)] = run(local_comm(ctx, id, rank, 2), rank); });
    EXPECT_EQ(got[0], got[1]);
    expect_near(got[0], whole, 1e-6, "factor");
}

TEST(ShardedOneBitLamb, AgreesOnRatiosOverModelAndDataRanks) {
    // Four ranks: model {0, 1} and {2, 3}, data {0, 2} and {1, 3}.
    const CommId model_ids[] = {new_id(), new_id()}, data_ids[] = {new_id(), new_id()};
    constexpr int steps = 9;
    std::array<std::vector<Result>, 4> all;
    run_ranks(4, [&](int rank) {
        const int m = rank % 2, d = rank / 2;
        const Context ctx = make_context(1);
        const Comm model = local_comm(ctx, model_ids[d], m, 2), data = local_comm(ctx, data_ids[m], d, 2);
        const Scaler scaler = make_scaler(ctx, 4);
        dsopt_optimizer_desc desc = with_model(model, optimizer_desc(0, DSOPT_OPTIMIZER_AVERAGES));
        desc.data = data.get();
        desc.scaler = scaler.get();
        desc.max_norm = 1;
        Trainer trainer(ctx, desc, group_for(DSOPT_ALGORITHM_ONEBIT_LAMB, 4), kTwoShards.params(m));
        for (int step = 0; step < steps; ++step) {
            std::vector<Array> grads = kTwoShards.grads(step + 10 * d, m);
            if (step % 3 == 1 && rank == 3) grads[0].set(0, kInf);
            const dsopt_comm_info before = info_of(model);
            must(trainer.step(grads));
            all[size_t(rank)].push_back(result_of(trainer, true));
            const bool skipped = step % 3 == 1, frozen = step >= 4;
            EXPECT_EQ(all[size_t(rank)].back().skipped, skipped);
            EXPECT_EQ(info_of(model).calls - before.calls, frozen ? 3 : 2) << step;
        }
    });
    // Unsharded tensors are exchanged in lists that differ between model ranks, so their bits are identical only
    // between data ranks.
    for (size_t rank = 1; rank < 4; ++rank)
        for (size_t step = 0; step < steps; ++step)
            for (size_t t = 0; t < kTwoShards.tensors.size(); ++t) {
                if (rank != 2 && kTwoShards.tensors[t].shards.empty()) continue;
                const std::string what = std::to_string(rank) + ", " + std::to_string(step) + ", " + std::to_string(t);
                const Result &got = all[rank][step], &first = all[0][step];
                EXPECT_EQ(got.ratios[t], first.ratios[t]) << what;
                for (const auto &[name, values] : got.state)
                    EXPECT_EQ(values[t], first.state.at(name)[t]) << name << ", " << what;
                if (rank == 2) { EXPECT_TRUE(same_bits(got.weights[t], first.weights[t])) << what; }
            }
}

// --------------------------------------------------------------------------------------------------- comms that fail
/// A table of two ranks, of which the other one has the same data. One of its calls fails.
struct FailingTable {
    int failing_call, calls = 0;
    static int all_reduce(void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t, void *) {
        auto &me = *static_cast<FailingTable *>(self);
        if (send != recv) std::memcpy(recv, send, size_t(count) * (dtype == DSOPT_DTYPE_F64 ? 8 : 4));
        return ++me.calls == me.failing_call ? -DSOPT_ERR_ABORTED : 0;
    }
    Comm comm(const Context &ctx) {
        DSOPT_NEW(dsopt_comm_table, table);
        table.self = this;
        table.ranks = 2;
        table.all_reduce = all_reduce;
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = DSOPT_COMM_KIND_TABLE;
        desc.table = &table;
        dsopt_comm *comm = nullptr;
        must(dsopt_comm_create(ctx.get(), &desc, &comm));
        return Comm(comm);
    }
};

TEST(ShardedLamb, KeepsWeightsIfTheReductionOfSumsFails) {
    const Context ctx = make_context(1);
    FailingTable failing{4}; // a step makes two calls; the second one is between the sweeps
    const Comm comm = failing.comm(ctx);
    Trainer trainer(ctx, with_model(comm), group_of(DSOPT_ALGORITHM_LAMB),
                    {{Array(DSOPT_DTYPE_F32, 5000, 1), "sharded", DSOPT_PARAM_MODEL_PARALLEL},
                     {Array(DSOPT_DTYPE_F32, 7, 1), "plain"}});
    const std::vector<Array> grads = {Array(DSOPT_DTYPE_F32, 5000, 1), Array(DSOPT_DTYPE_F32, 7, 2)};
    ASSERT_OK(trainer.step(grads));
    const Snapshot before = trainer.snapshot();
    EXPECT_TRUE(refused(trainer.step(grads), DSOPT_ERR_ABORTED));
    const Snapshot after = trainer.snapshot();
    for (const char *name : {"param 0", "param 1"}) EXPECT_EQ(after.at(name), before.at(name));
    EXPECT_NE(after.at("exp_avg 0"), before.at("exp_avg 0")) << "the moments were updated";
    EXPECT_EQ(info_of(comm).status, DSOPT_ERR_ABORTED);
    EXPECT_TRUE(refused(trainer.step(grads), DSOPT_ERR_ABORTED)) << "the comm is unusable";
    EXPECT_TRUE(same(after, trainer.snapshot())) << "and changes nothing more";
}

TEST(ShardedLamb, TimesOutIfAPeerHasNoShards) {
    const CommId id = new_id();
    std::barrier finished(2);
    run_ranks(2, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, 2, rank == 0 ? 2000 : 60000);
        // Rank 1 has no sharded tensor: it reduces the norms and no sums for ratios.
        Trainer trainer(ctx, with_model(comm), group_of(DSOPT_ALGORITHM_LAMB),
                        {{Array(DSOPT_DTYPE_F32, 9, 1), "w", rank == 0 ? int32_t(DSOPT_PARAM_MODEL_PARALLEL) : 0}});
        const dsopt_status status = trainer.step({Array(DSOPT_DTYPE_F32, 9, 1)});
        EXPECT_EQ(status, rank == 0 ? DSOPT_ERR_TIMEOUT : DSOPT_OK) << dsopt_last_error();
        finished.arrive_and_wait(); // keeps both comms alive
    });
}

} // namespace comm_model_parallel_tests
