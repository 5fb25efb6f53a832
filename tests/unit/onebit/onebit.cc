// SPDX-License-Identifier: Apache-2.0
// 1-bit Adam, 0/1 Adam and 1-bit LAMB in standard mode: identical replicas, schedules, error feedback, groups and
// refusals. Recorded cases test compat mode.
#include "support/onebit.h"
#include <optional>

using namespace test;

namespace onebit_tests {

class OneBitStep : public testing::TestWithParam<std::tuple<int32_t, int>> {
protected:
    const int32_t algorithm = std::get<0>(GetParam());
    const int ranks = std::get<1>(GetParam());
    const Problem problem = problem_of(ranks);
};
INSTANTIATE_TEST_SUITE_P(, OneBitStep, testing::Combine(testing::ValuesIn(kFamily), testing::Values(1, 2, 3)),
                         [](const auto &info) {
                             return name_of(std::get<0>(info.param)) + std::to_string(std::get<1>(info.param));
                         });

// ---------------------------------------------------------------------------------------------------------- replicas
LABEL_PARAMS(long_emulated, "*[13]");
TEST_P(OneBitStep, GivesIdenticalReplicasAfterEveryExchange) {
    constexpr int64_t calls = 40;
    std::vector<std::vector<Snapshot>> all{size_t(ranks)};
    std::string text;
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer trainer = trainer_of(ctx, comm, group_for(algorithm, 12), problem.weights());
        if (rank == 0) text = schedule(trainer, calls);
        for (int64_t call = 1; call <= calls; ++call) {
            ASSERT_OK(trainer.step(problem.gradients_for(reduction(trainer), rank, call)));
            all[size_t(rank)].push_back(trainer.snapshot());
        }
    });
    bool differ_locally = false;
    for (size_t call = 0; call < calls; ++call) {
        for (const auto &[name, bytes] : all[0][call]) {
            const bool local = name == "worker_error -1" || name == "server_error -1";
            for (size_t rank = 1; rank < size_t(ranks); ++rank) {
                const bool same = all[rank][call].at(name) == bytes;
                if (text[call] != '-' && !local) {
                    ASSERT_TRUE(same) << name << ", call " << call + 1 << ", rank " << rank;
                }
                differ_locally = differ_locally || (text[call] == '-' && !same);
            }
        }
    }
    EXPECT_EQ(differ_locally, algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM && ranks > 1)
        << "ranks differ only between exchanges of 0/1 Adam";
    for (const auto &[name, bytes] : all[0].back())
        if (name.rfind("param", 0) == 0)
            for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
                float value;
                std::memcpy(&value, &bytes[i], 4);
                ASSERT_TRUE(std::fabs(value) < 100) << name;
            }
}

// ---------------------------------------------------------------------------------------------------------- schedule
LABEL(long_emulated);
TEST_P(OneBitStep, MatchesAdamOrLambUpToFreezeStep) {
    constexpr int64_t freeze = 7;
    const bool lamb = algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB;
    dsopt_group group = group_for(algorithm, freeze),
                plain = group_of(lamb ? DSOPT_ALGORITHM_LAMB : DSOPT_ALGORITHM_ADAMW, 1e-2, 0.01);
    group.var_interval_steps = algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM ? 100 : 0;
    plain.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer trainer = trainer_of(ctx, comm, group, problem.weights()),
                other = trainer_of(ctx, comm, plain, problem.weights());
        for (int64_t call = 1; call <= freeze; ++call) {
            const std::string before = trainer.weight(0).text();
            ASSERT_EQ(reduction(trainer), DSOPT_REDUCTION_FULL) << call;
            ASSERT_OK(trainer.step(problem.mean(call)));
            ASSERT_OK(other.step(problem.mean(call)));
            ASSERT_NE(trainer.weight(0).text(), before) << "the first call changes weights";
            for (size_t t = 0; t < problem.sizes.size(); ++t) {
                ASSERT_TRUE(same_bits(trainer.weight(t).floats(), other.weight(t).floats())) << call;
                for (const char *name : {"exp_avg", "exp_avg_sq"})
                    ASSERT_TRUE(same_bits(trainer.state(name, int64_t(t)), other.state(name, int64_t(t)))) << call;
            }
        }
        EXPECT_NE(reduction(trainer), DSOPT_REDUCTION_FULL);
        for (int64_t call = freeze + 1; call <= freeze + 9; ++call)
            ASSERT_OK(trainer.step(problem.local_gradients(rank, call)));
        for (size_t t = 0; t < problem.sizes.size(); ++t)
            EXPECT_TRUE(same_bits(trainer.state("exp_avg_sq", int64_t(t)), other.state("exp_avg_sq", int64_t(t))))
                << "the variance is frozen";
    });
}

LABEL(long_emulated);
TEST_P(OneBitStep, FollowsNextReduction) {
    constexpr int64_t calls = 40;
    // The schedule of 0/1 Adam follows the original with the same settings. There the first call is step 2, and the
    // last variance step may be number freeze_step + 1: FFF1F1F111F111F11111 11111-1---1---1---1
    const std::string wanted = algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM ? "FF1F1F1F111F111F1111"
                                                                            "1111-1-1---1---1---1"
                                                                          : std::string(20, 'F') + std::string(20, '1');
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer trainer = trainer_of(ctx, comm, group_for(algorithm, 20), problem.weights());
        EXPECT_EQ(schedule(trainer, calls), wanted);
        for (int64_t call = 1; call <= calls; ++call) {
            ASSERT_EQ(letter(reduction(trainer)), wanted[size_t(call - 1)]) << call;
            const dsopt_comm_info before = info_of(comm);
            const std::vector<float> v = trainer.state("exp_avg_sq", 0);
            ASSERT_OK(trainer.step(problem.gradients_for(reduction(trainer), rank, call)));
            const dsopt_comm_info after = info_of(comm);
            const char what = wanted[size_t(call - 1)];
            // Ranks compare lists in the first call and agree on skipping in every call. An exchange adds two calls.
            EXPECT_EQ(after.calls - before.calls, ranks == 1 ? 0 : (what == '1' ? 3 : 1) + (call == 1)) << call;
            EXPECT_EQ(after.bytes_sent - before.bytes_sent > 1000, what == '1' && ranks > 1) << call;
            EXPECT_EQ(trainer.state("exp_avg_sq", 0) != v, what == 'F') << call;
        }
        EXPECT_EQ(schedule(trainer, calls), wanted) << "it does not depend on earlier calls";
        EXPECT_EQ(reduction(trainer, 0), reduction(trainer, calls + 1));
    });
}

LABEL_PARAMS(long_emulated, "*[13]");
LABEL_PARAMS(long_emulated, "*Adam2");
TEST_P(OneBitStep, AdvancesOnlyTheScheduleIfSkipped) {
    constexpr int64_t calls = 40, freeze = 12;
    const std::vector<int64_t> skips = {1, 3, 4, 9, 13, 15, 17, 20, 24, 28, 29, 31};
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        const Scaler scaler = make_scaler(ctx, 8, 1000, DSOPT_SCALER_STATIC);
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.data = comm.get();
        desc.scaler = scaler.get();
        Trainer trainer(ctx, desc, group_for(algorithm, freeze), problem.weights());
        const std::string wanted = schedule(trainer, calls);
        int64_t skipped = 0;
        for (int64_t call = 1; call <= calls; ++call) {
            ASSERT_EQ(letter(reduction(trainer)), wanted[size_t(call - 1)]) << call;
            std::vector<Array> grads = problem.gradients_for(reduction(trainer), rank, call);
            const bool skip = std::find(skips.begin(), skips.end(), call) != skips.end();
            const int32_t skip_flag = 1;
            const bool flag = skip && call % 2 == 0;
            const int bad = int(call) % ranks; // only this rank has a reason to skip
            if (skip && !flag && rank == bad) grads[4].set(77, call % 3 ? kInf : kNaN);
            Snapshot before = trainer.snapshot();
            ASSERT_OK(
                trainer.step(grads, [&](dsopt_step &step) { step.skip = flag && rank == bad ? &skip_flag : nullptr; }));
            EXPECT_EQ(trainer.report().last_skipped, skip) << call;
            skipped += skip;
            Snapshot after = trainer.snapshot();
            EXPECT_NE(before.at("schedule -1"), after.at("schedule -1"));
            for (const char *key : {"schedule -1", "scaler -1"}) {
                before.erase(key);
                after.erase(key);
            }
            if (skip) { ASSERT_TRUE(same(before, after)) << call; }
            if (!skip) { ASSERT_FALSE(same(before, after)) << call; }
        }
        EXPECT_EQ(trainer.report().skipped, skipped);
    });
}

LABEL_PARAMS(long_emulated, "*[13]");
LABEL_PARAMS(long_emulated, "OneBit*2");
TEST_P(OneBitStep, FreezesEvenIfTheFreezeStepIsSkipped) {
    std::array<std::vector<std::string>, 3> weights;
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer trainer = trainer_of(ctx, comm, group_for(algorithm, 6), problem.weights());
        const std::string wanted = schedule(trainer, 22);
        for (int64_t call = 1; call <= 22; ++call) {
            const int32_t skip = call == 6;
            ASSERT_EQ(letter(reduction(trainer)), wanted[size_t(call - 1)]) << call;
            const std::string before = trainer.weight(0).text();
            ASSERT_OK(trainer.step(problem.gradients_for(reduction(trainer), rank, call),
                                   [&](dsopt_step &step) { step.skip = on_device(skip); }));
            EXPECT_EQ(trainer.weight(0).text() == before, skip == 1);
            if (wanted[size_t(call - 1)] != '-') weights[size_t(rank)].push_back(trainer.weight(4).text());
            for (const float value : trainer.weight(4).floats()) ASSERT_LE(std::fabs(value), 100) << call;
        }
    });
    for (int rank = 1; rank < ranks; ++rank) EXPECT_TRUE(weights[size_t(rank)] == weights[0]) << "rank " << rank;
}

// ------------------------------------------------------------------------------------------------------- checkpoints
LABEL_PARAMS(one_of_many, "*[12]");
LABEL_PARAMS(one_of_many, "OneBit*");
LABEL(long_emulated);
TEST_P(OneBitStep, ResumesFromACheckpointWithTheSameBits) {
    constexpr int64_t calls = 36;
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        for (const int64_t middle : {5, 12, 13, 20, 27, 30}) {
            Trainer first = trainer_of(ctx, comm, group_for(algorithm, 12), problem.weights());
            const auto train_calls = [&](Trainer &trainer, int64_t from, int64_t to) {
                for (int64_t call = from; call <= to; ++call)
                    must(trainer.step(problem.gradients_for(reduction(trainer), rank, call)));
            };
            train_calls(first, 1, middle);
            MemoryFile file;
            ASSERT_OK(file.save(first, DSOPT_IO_PARAMS));
            Trainer second = trainer_of(ctx, comm, group_for(algorithm, 99, 0.5, 0), problem.weights());
            ASSERT_OK(file.load(second, DSOPT_IO_PARAMS));
            EXPECT_EQ(second.get(DSOPT_KEY_FREEZE_STEP), 12);
            EXPECT_EQ(reduction(second), reduction(first));
            EXPECT_EQ(schedule(second, calls), schedule(first, calls));
            train_calls(first, middle + 1, calls);
            train_calls(second, middle + 1, calls);
            Snapshot a = first.snapshot(), b = second.snapshot();
            if (ranks > 1) { EXPECT_NE(a.at("worker_error -1").find_first_not_of('\0'), std::string::npos); }
            EXPECT_TRUE(same(a, b)) << "saved after " << middle;
        }
    });
}

// ------------------------------------------------------------------------------------------------------------ errors
LABEL(long_emulated);
TEST_P(OneBitStep, ContinuesFromExportedStateWithTheSameBits) {
    if (ranks == 1) return; // no buffers
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer first = trainer_of(ctx, comm, group_for(algorithm, 3), problem.weights());
        const auto train_calls = [&](Trainer &trainer, int64_t from, int64_t to) {
            for (int64_t call = from; call <= to; ++call)
                must(trainer.step(problem.gradients_for(reduction(trainer), rank, call)));
        };
        train_calls(first, 1, 8);
        Trainer second = trainer_of(ctx, comm, group_for(algorithm, 3), problem.weights());
        const std::vector<dsopt_state_info> list = first.state();
        for (size_t i = 0; i < list.size(); ++i) { // copies all state through host memory
            std::string bytes(size_t(list[i].tensor.numel) * 4, 0);
            must(dsopt_optimizer_export(first.opt(), int64_t(i), bytes.data(), bytes.size()));
            must(dsopt_optimizer_import(second.opt(), int64_t(i), bytes.data(), bytes.size()));
        }
        for (size_t t = 0; t < problem.sizes.size(); ++t) {
            const dsopt_tensor to = second.weight(t).tensor(), from = first.weight(t).tensor();
            if (to.numel > 0) std::memcpy(to.data, from.data, size_t(to.numel) * 4);
        }
        EXPECT_TRUE(same(first.snapshot(), second.snapshot()));
        train_calls(first, 9, 20);
        train_calls(second, 9, 20);
        EXPECT_TRUE(same(first.snapshot(), second.snapshot()));
    });
}

TEST(OneBitSchedule, OfAnImportReplacesThatOfEarlierSteps) {
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        const Problem problem{{100, 40}, 2};
        Trainer first = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ZERO_ONE_ADAM, 2), problem.weights());
        Trainer second = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ZERO_ONE_ADAM, 2), problem.weights());
        const auto train_calls = [&](Trainer &trainer, int64_t from, int64_t to) {
            for (int64_t call = from; call <= to; ++call)
                must(trainer.step(problem.gradients_for(reduction(trainer), rank, call)));
        };
        train_calls(first, 1, 7);
        train_calls(second, 1, 1); // its schedule has been read
        const std::vector<dsopt_state_info> list = first.state();
        for (size_t i = 0; i < list.size(); ++i) {
            std::string bytes(size_t(list[i].tensor.numel) * size_of(list[i].tensor.dtype), 0);
            must(dsopt_optimizer_export(first.opt(), int64_t(i), bytes.data(), bytes.size()));
            must(dsopt_optimizer_import(second.opt(), int64_t(i), bytes.data(), bytes.size()));
        }
        for (size_t t = 0; t < problem.sizes.size(); ++t) {
            const dsopt_tensor to = second.weight(t).tensor(), from = first.weight(t).tensor();
            std::memcpy(to.data, from.data, size_t(to.numel) * 4);
        }
        EXPECT_EQ(reduction(first), reduction(second));
        train_calls(first, 8, 12);
        train_calls(second, 8, 12);
        EXPECT_TRUE(same(first.snapshot(), second.snapshot()));
    });
}

TEST(OneBitErrorFeedback, KeepsTheMomentumMinusTheSentValue) {
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        const Problem problem{{100, 40}, 2};
        Trainer trainer = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), problem.weights());
        for (int64_t call : {1, 2}) must(trainer.step(problem.mean(call)));
        for (const float value : trainer.state("worker_error")) EXPECT_EQ(value, 0);
        std::vector<std::vector<float>> m = {trainer.state("exp_avg", 0), trainer.state("exp_avg", 1)};
        const std::vector<Array> grads = problem.local_gradients(rank, 3);
        ASSERT_OK(trainer.step(grads));
        const std::vector<float> error = trainer.state("worker_error");
        ASSERT_EQ(error.size(), 2 * 4096u + 2); // a chunk of one block per rank, and two scales
        const size_t begin[] = {0, 128};
        std::vector<bool> used(error.size());
        for (size_t t = 0; t < 2; ++t) {
            double squares = 0;
            for (size_t i = 0; i < m[t].size(); ++i) {
                m[t][i] = 0.9f * m[t][i] + 0.1f * grads[t][i];
                squares += double(m[t][i]) * double(m[t][i]);
            }
            const double scale = std::sqrt(squares / double(m[t].size()));
            for (size_t i = 0; i < m[t].size(); ++i) {
                const double x = double(m[t][i]);
                EXPECT_NEAR(error[begin[t] + i], x - (x < 0 ? -scale : scale), 1e-6) << t << ", " << i;
                used[begin[t] + i] = true;
            }
        }
        for (size_t i = 0; i < error.size(); ++i)
            if (!used[i]) { EXPECT_EQ(error[i], 0) << i; }
        must(dsopt_optimizer_reset(trainer.opt(), DSOPT_RESET_ERRORS, nullptr));
        for (const char *name : {"worker_error", "server_error"})
            for (const float value : trainer.state(name)) EXPECT_EQ(value, 0);
    });
}

// ---------------------------------------------------------------------------------------------------------- training
/// Returns the loss of a quadratic function after training with noise that differs between ranks.
double train(int32_t algorithm, int ranks, int64_t calls) {
    constexpr size_t numel = 256;
    Random random(8);
    const std::vector<float> target = random.floats(numel, -2, 2), curvature = random.floats(numel, 0.3, 3);
    double loss = 0;
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        dsopt_group group = group_of(algorithm, 0, 0);
        if (algorithm == DSOPT_ALGORITHM_ADAMW || algorithm == DSOPT_ALGORITHM_LAMB)
            group.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
        else
            group = group_for(algorithm, std::max<int64_t>(calls / 5, 1), 0, 0);
        if (algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
            group.var_interval_steps = 16;
            group.local_interval_steps = calls / 4 + 1;
        }
        Trainer trainer = trainer_of(ctx, comm, group, {Array(DSOPT_DTYPE_F32, numel, 0)});
        for (int64_t call = 1; call <= calls; ++call) {
            const double progress = double(call) / double(calls);
            must(dsopt_optimizer_set(
                trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_LR,
                (algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB || algorithm == DSOPT_ALGORITHM_LAMB ? 0.1 : 0.03) *
                    std::min(10 * progress, 1 - progress)));
            const bool full = reduction(trainer) == DSOPT_REDUCTION_FULL;
            std::vector<float> grad(numel);
            for (int other = 0; other < ranks; ++other) {
                Random noise(uint64_t(call * 100 + other));
                for (size_t i = 0; i < numel; ++i) {
                    const float local = curvature[i] * (trainer.weight()[i] - target[i]) + float(noise.uniform(-3, 3));
                    if (full)
                        grad[i] += local / float(ranks);
                    else if (other == rank)
                        grad[i] = local;
                }
            }
            must(trainer.step({Array(DSOPT_DTYPE_F32, grad)}));
        }
        if (rank != 0) return;
        for (size_t i = 0; i < numel; ++i)
            loss += 0.5 * double(curvature[i]) * std::pow(double(trainer.weight()[i] - target[i]), 2);
    });
    return loss;
}

LABEL(numbers_only);
LABEL(long_emulated);
LABEL(slow);
TEST(OneBitTraining, ConvergesLikeFullPrecision) {
    constexpr int64_t calls = 2000;
    for (const int ranks : {2, 4}) {
        const double begin = train(DSOPT_ALGORITHM_ADAMW, ranks, 0), adam = train(DSOPT_ALGORITHM_ADAMW, ranks, calls),
                     lamb = train(DSOPT_ALGORITHM_LAMB, ranks, calls);
        ASSERT_LT(std::max(adam, lamb), 0.006 * begin);
        for (const int32_t algorithm : kFamily) {
            const double full = algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB ? lamb : adam,
                         loss = train(algorithm, ranks, calls);
            EXPECT_LT(loss - full, 0.002 * begin)
                << name_of(algorithm) << ", " << ranks << " ranks: " << loss << ", in full precision " << full;
        }
    }
}

LABEL(long_emulated);
TEST(OneBitTraining, KeepsWeightsWithoutVarianceUnchanged) {
    for (const int32_t algorithm : kFamily)
        for (const int ranks : {1, 2})
            with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
                const Problem problem{{300, 64}, ranks};
                Trainer trainer = trainer_of(ctx, comm, group_for(algorithm, 4, 1e-2, 0), problem.weights());
                const std::vector<float> before = trainer.weight(0).floats();
                for (int64_t call = 1; call <= 30; ++call) {
                    std::vector<Array> grads = problem.gradients_for(reduction(trainer), rank, call);
                    for (size_t i = 100; i < 200 && (i < 150 || call <= 4); ++i)
                        grads[0].set(i, 0); // no gradient at all, or only after the freeze
                    ASSERT_OK(trainer.step(grads));
                }
                for (size_t i = 100; i < 200; ++i)
                    ASSERT_EQ(trainer.weight(0)[i], before[i]) << name_of(algorithm) << ", element " << i;
                EXPECT_NE(trainer.weight(0)[0], before[0]);
            });
}

// ------------------------------------------------------------------------------------------------------------- masks
LABEL(long_emulated);
TEST(OneBitMask, ZeroesMaskedMomentaAndKeepsWeights) {
    for (const int32_t algorithm : kFamily)
        with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
            const Problem problem{{300, 64}, 2};
            dsopt_optimizer_desc desc = optimizer_desc();
            desc.data = comm.get();
            const std::vector<Array> weights = problem.weights();
            Trainer trainer(ctx, desc, group_for(algorithm, 4, 1e-2, 0),
                            {{weights[0], "a", DSOPT_PARAM_MASKED}, {weights[1], "b"}});
            const std::vector<dsopt_state_info> list = trainer.state();
            int64_t mask = -1;
            for (size_t i = 0; i < list.size(); ++i)
                if (std::strcmp(list[i].name, "mask") == 0) mask = int64_t(i);
            ASSERT_GE(mask, 0);
            EXPECT_EQ(list[size_t(mask)].param, 0);
            std::vector<float> values(300, 1);
            for (size_t i = 100; i < 200; ++i) values[i] = 0;
            must(dsopt_optimizer_import(trainer.opt(), mask, values.data(), values.size() * 4));
            for (int64_t call = 1; call <= 30; ++call) {
                const int32_t what = reduction(trainer);
                std::vector<Array> grads = problem.gradients_for(what, rank, call);
                if (call > 1) // one gradient gives the elements a variance
                    for (size_t i = 100; i < 200; ++i) grads[0].set(i, 0);
                else
                    for (size_t i = 100; i < 200; ++i) grads[0].set(i, 1e-3f);
                const std::vector<float> before = trainer.weight(0).floats();
                ASSERT_OK(trainer.step(grads));
                if (what != DSOPT_REDUCTION_COMPRESSED || call <= 4) continue;
                const std::vector<float> m = trainer.state("exp_avg", 0);
                for (size_t i = 100; i < 200; ++i) {
                    ASSERT_EQ(m[i], 0) << name_of(algorithm) << ", call " << call;
                    ASSERT_EQ(trainer.state("mask", 0)[i], 0);
                    if (algorithm != DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
                        ASSERT_EQ(trainer.weight(0)[i], before[i]) << call;
                    }
                }
                EXPECT_NE(m[0], 0);
                EXPECT_NE(trainer.state("exp_avg", 1)[0], 0);
            }
        });
}

// ------------------------------------------------------------------------------------------------------------ groups
TEST(OneBitGroup, MatchesAdamWithNonFreeze) {
    for (const bool engine_averages : {false, true})
        with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
            const Problem problem{{50, 300}, 2};
            dsopt_optimizer_desc desc = optimizer_desc(0, engine_averages ? DSOPT_OPTIMIZER_AVERAGES : 0);
            desc.data = comm.get();
            const std::vector<Array> weights = problem.weights();
            dsopt_group frozen = group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 5), non_freeze = frozen,
                        plain = group_of(DSOPT_ALGORITHM_ADAMW, 1e-2, 0.01);
            non_freeze.flags |= DSOPT_GROUP_NON_FREEZE;
            plain.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
            Trainer trainer(ctx, desc), other(ctx, optimizer_desc(), plain, {{weights[1], "w"}});
            must(trainer.add_group(frozen, {{weights[0], "a"}}));
            must(trainer.add_group(non_freeze, {{weights[1], "b"}}));
            for (int64_t call = 1; call <= 20; ++call) {
                const int32_t what = engine_averages ? DSOPT_REDUCTION_LOCAL : reduction(trainer);
                ASSERT_OK(trainer.step(problem.gradients_for(what, rank, call)));
                ASSERT_OK(other.step({problem.mean(call)[1]}));
                ASSERT_TRUE(same_bits(trainer.weight(1).floats(), other.weight(0).floats())) << call;
                ASSERT_TRUE(same_bits(trainer.state("exp_avg_sq", 1), other.state("exp_avg_sq", 0))) << call;
            }
        });
}

TEST(OneBitGroup, TrainsNextToAnAdamGroup) {
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        const Problem problem{{50, 300}, 2};
        const std::vector<Array> weights = problem.weights();
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.data = comm.get();
        Trainer trainer(ctx, desc),
            other(ctx, optimizer_desc(), group_of(DSOPT_ALGORITHM_ADAMW, 2e-2, 0.1), {{weights[0], "w"}});
        must(trainer.add_group(group_of(DSOPT_ALGORITHM_ADAMW, 2e-2, 0.1), {{weights[0], "a"}}));
        must(trainer.add_group(group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 5), {{weights[1], "b"}}));
        EXPECT_EQ(schedule(trainer, 8), "FFFFF111");
        must(dsopt_optimizer_set(trainer.opt(), 1, DSOPT_KEY_LR, 5e-3));
        EXPECT_EQ(schedule(trainer, 8), "FFFFF111") << "setting another key does not change freeze_step";
        for (int64_t call = 1; call <= 12; ++call) {
            EXPECT_EQ(reduction(trainer), reduction(trainer, call));
            ASSERT_OK(trainer.step(problem.gradients_for(reduction(trainer), rank, call)));
            ASSERT_OK(other.step({problem.mean(call)[0]}));
            ASSERT_TRUE(same_bits(trainer.weight(0).floats(), other.weight(0).floats())) << call;
        }
        must(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_FREEZE_STEP, 3));
        EXPECT_EQ(schedule(trainer, 8), "FFF11111");
        double value = 0;
        must(dsopt_optimizer_get(trainer.opt(), 1, DSOPT_KEY_FREEZE_STEP, &value));
        EXPECT_EQ(value, 3);
        EXPECT_TRUE(
            refused(dsopt_optimizer_get(trainer.opt(), 0, DSOPT_KEY_FREEZE_STEP, &value), DSOPT_ERR_UNSUPPORTED));
    });
}

TEST(OneBitGroup, LogsThatErrorFeedbackBeginsAgainIfParametersAreAdded) {
    const CommId id = new_id();
    run_ranks(2, [&](int rank) {
        std::string log;
        dsopt_context_desc desc = context_desc(1);
        desc.log_level = DSOPT_LOG_INFO;
        desc.log = [](void *user, int32_t, const char *text) { *static_cast<std::string *>(user) += text; };
        desc.user = &log;
        const Context ctx = make_context(desc);
        EXPECT_NE(log.find(", 1 thread"), std::string::npos) << log;
        const Comm comm = local_comm(ctx, id, rank, 2);
        const Problem problem{{50, 300}, 2};
        dsopt_group group = group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2);
        Trainer trainer(ctx, desc_with(comm), group, {problem.weights()[0]});
        group.flags |= DSOPT_GROUP_NON_FREEZE;
        const std::string text = "parameters were added: error feedback begins with zeros";
        must(trainer.add_group(group, {{Array(DSOPT_DTYPE_F32, 7, 1), "before"}}));
        EXPECT_EQ(log.find(text), std::string::npos) << log;
        for (int64_t call = 1; call <= 4; ++call)
            must(
                trainer.step({problem.gradients_for(reduction(trainer), rank, call)[0], Array(DSOPT_DTYPE_F32, 7, 1)}));
        must(trainer.add_group(group, {{Array(DSOPT_DTYPE_F32, 7, 1), "after"}}));
        EXPECT_NE(log.find(text), std::string::npos) << log;
    });
}

TEST(OneBitGroup, SetsFreezeStepForAllGroupsAtOnce) {
    const Context ctx = make_context(1);
    for (const int32_t algorithm : kFamily) {
        Trainer trainer(ctx, optimizer_desc(), group_for(algorithm, 7),
                        std::vector<Array>{Array(DSOPT_DTYPE_F32, 3, 1)});
        must(trainer.add_group(group_for(algorithm, 7, 1), {{Array(DSOPT_DTYPE_F32, 3, 1), "q"}}));
        EXPECT_EQ(trainer.get(DSOPT_KEY_FREEZE_STEP), 7);
        EXPECT_TRUE(refused(dsopt_optimizer_set(trainer.opt(), 0, DSOPT_KEY_FREEZE_STEP, 3), DSOPT_ERR_ARGUMENT));
        for (const double bad : {0.0, -1.0, 2.5, double(kNaN), double(kInf), 2147483647.0})
            EXPECT_TRUE(refused(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_FREEZE_STEP, bad),
                                DSOPT_ERR_ARGUMENT, "freeze_step"));
        EXPECT_EQ(trainer.get(DSOPT_KEY_FREEZE_STEP), 7);
        must(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_FREEZE_STEP, 3));
        double value = 0;
        must(dsopt_optimizer_get(trainer.opt(), 1, DSOPT_KEY_FREEZE_STEP, &value));
        EXPECT_EQ(value, 3);
        EXPECT_EQ(schedule(trainer, 5).substr(3), "11"); // independent of the number of ranks
        Trainer adam(ctx, optimizer_desc(), group_of(DSOPT_ALGORITHM_ADAMW),
                     std::vector<Array>{Array(DSOPT_DTYPE_F32, 3, 1)});
        EXPECT_TRUE(refused(dsopt_optimizer_set(adam.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_FREEZE_STEP, 3),
                            DSOPT_ERR_UNSUPPORTED, "freeze_step"));
    }
}

TEST(NextReduction, IsFullWithoutOneBitGroups) {
    const Context ctx = make_context(1);
    Trainer trainer(ctx, optimizer_desc());
    int32_t value = 9;
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction(trainer.opt(), 0, &value), DSOPT_ERR_STATE));
    must(trainer.add_group(group_of(DSOPT_ALGORITHM_ADAM), {{Array(DSOPT_DTYPE_F32, 3, 1), "w"}}));
    EXPECT_EQ(schedule(trainer, 5), "FFFFF");
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction(trainer.opt(), -1, &value), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction(trainer.opt(), 1, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction(nullptr, 1, &value), DSOPT_ERR_ARGUMENT));
    EXPECT_EQ(value, 9);
}

// ---------------------------------------------------------------------------------------------------------- averages
LABEL_PARAMS(long_emulated, "*[13]");
TEST_P(OneBitStep, AveragesWithTheBitsOfTheCallersMean) {
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        const dsopt_group group = group_for(algorithm, 12);
        Trainer averaged = trainer_of(ctx, comm, group, problem.weights()),
                engine = trainer_of(ctx, comm, group, problem.weights(), DSOPT_OPTIMIZER_AVERAGES);
        for (int64_t call = 1; call <= 30; ++call) {
            ASSERT_OK(averaged.step(problem.gradients_for(reduction(averaged), rank, call)));
            const std::vector<Array> grads = problem.local_gradients(rank, call);
            ASSERT_OK(engine.step(grads));
            EXPECT_EQ(grads[4].text(), problem.local_gradients(rank, call)[4].text())
                << "the caller's gradients are not changed";
            ASSERT_TRUE(same(averaged.snapshot(), engine.snapshot())) << call;
        }
    });
}

LABEL_PARAMS(long_emulated, "*[13]");
TEST_P(OneBitStep, TreatsAbsentGradientsAsZerosInReductions) {
    std::array<std::vector<Snapshot>, 3> all;
    std::string text;
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        const dsopt_group group = group_for(algorithm, 12);
        Trainer trainer = trainer_of(ctx, comm, group, problem.weights(), DSOPT_OPTIMIZER_AVERAGES);
        if (rank == 0) text = schedule(trainer, 30);
        for (int64_t call = 1; call <= 30; ++call) {
            std::vector<Array> grads = problem.local_gradients(rank, call);
            if (call % 3 == 0 && rank == ranks - 1 && ranks > 1) grads[0] = Array::absent(grads[0].size());
            ASSERT_OK(trainer.step(grads));
            Snapshot now = trainer.snapshot();
            now.erase("worker_error -1");
            now.erase("server_error -1");
            now.erase("step -1"); // counts this rank's local steps
            all[size_t(rank)].push_back(now);
        }
    });
    for (int rank = 1; rank < ranks; ++rank)
        for (size_t call = 0; call < 30; ++call)
            if (text[call] != '-') { EXPECT_TRUE(same(all[size_t(rank)][call], all[0][call])) << "call " << call + 1; }
}

// --------------------------------------------------------------------------------------------------- mixed precision
LABEL_PARAMS(long_emulated, "*[13]");
TEST_P(OneBitStep, TrainsFp16WeightsWithMastersAndAScaler) {
    std::array<std::vector<double>, 3> scales;
    std::array<std::vector<std::string>, 3> weights;
    Problem fp16_problem = problem;
    fp16_problem.dtype = DSOPT_DTYPE_F16;
    fp16_problem.size = 8;
    std::string text;
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        const Scaler scaler = make_scaler(ctx, 64, 5);
        dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_AVERAGES);
        desc.data = comm.get();
        desc.scaler = scaler.get();
        desc.max_norm = 1;
        Trainer trainer(ctx, desc, group_for(algorithm, 12), fp16_problem.weights());
        const std::string own_schedule = schedule(trainer, 40);
        if (rank == 0) text = own_schedule;
        for (int64_t call = 1; call <= 40; ++call) {
            std::vector<Array> grads = fp16_problem.local_gradients(rank, call);
            const bool bad = call % 7 == 0;
            if (bad && rank == int(call) % ranks) grads[2].set(5, kInf);
            const std::string before = trainer.weight(4).text();
            ASSERT_OK(trainer.step(grads));
            EXPECT_EQ(trainer.report().last_skipped, bad) << call;
            EXPECT_EQ(trainer.weight(4).text() == before, bad) << call;
            scales[size_t(rank)].push_back(trainer.report().loss_scale);
            scales[size_t(rank)].push_back(trainer.report().divisor);
            const std::vector<float> master = trainer.state("master", 4);
            for (size_t i = 0; i < master.size(); ++i) {
                ASSERT_EQ(trainer.weight(4)[i], rounded(master[i], DSOPT_DTYPE_F16)) << call << ", " << i;
                ASSERT_LE(std::fabs(master[i]), 10);
            }
            if (own_schedule[size_t(call - 1)] != '-' && !bad)
                weights[size_t(rank)].push_back(trainer.weight(4).text());
        }
    });
    for (int rank = 1; rank < ranks; ++rank) {
        EXPECT_EQ(scales[size_t(rank)], scales[0]) << "the loss scale and the divisor agree";
        EXPECT_TRUE(weights[size_t(rank)] == weights[0]) << "rank " << rank;
    }
    EXPECT_EQ(scales[0][2 * 6], scales[0][2 * 5] / 2);
}

// --------------------------------------------------------------------------------------------------------- 0/1 Adam
TEST(ZeroOneAdam, KeepsWeightsInAWindowWithLearningRateZero) {
    for (const int ranks : {1, 2}) {
        std::array<std::vector<std::string>, 2> weights;
        with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
            const Problem problem = problem_of(ranks);
            Trainer trainer = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ZERO_ONE_ADAM, 4), problem.weights());
            const std::string text = schedule(trainer, 40);
            for (int64_t call = 1; call <= 40; ++call) {
                const bool zero_lr = (call > 16 && call <= 24) || call == 30; // whole windows and part of one
                must(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_LR, zero_lr ? 0 : 1e-2));
                const std::string before = trainer.weight(0).text();
                ASSERT_OK(trainer.step(problem.gradients_for(reduction(trainer), rank, call)));
                // Errors of earlier windows are still applied at an exchange.
                if (!zero_lr || ranks == 1 || text[size_t(call - 1)] == '-') {
                    EXPECT_EQ(trainer.weight(0).text() == before, zero_lr) << call;
                }
                for (const char *name : {"exp_avg", "anchor"})
                    for (const float value : trainer.state(name, 4)) ASSERT_LE(std::fabs(value), 100) << call;
                if (text[size_t(call - 1)] != '-') weights[size_t(rank)].push_back(trainer.weight(4).text());
            }
            EXPECT_EQ(text.substr(15, 9), "1---1---1");
        });
        if (ranks == 2) { EXPECT_TRUE(weights[0] == weights[1]); }
    }
}

TEST(ZeroOneAdam, RefusesDeltaAndOutOnlyWithoutAMaster) {
    const Context ctx = make_context(1);
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16}) {
        Trainer trainer(ctx, optimizer_desc(), group_for(DSOPT_ALGORITHM_ZERO_ONE_ADAM, 4),
                        std::vector<Array>{Array(dtype, 5, 1)});
        const Array out(dtype, 5, 77);
        const dsopt_tensor to = out.tensor();
        for (const uint32_t flags : {DSOPT_STEP_OUT_ONLY, DSOPT_STEP_DELTA}) {
            const dsopt_status status = trainer.step({Array(DSOPT_DTYPE_F32, 5, 1)}, [&](dsopt_step &step) {
                step.out = &to;
                step.flags = flags;
            });
            if (dtype == DSOPT_DTYPE_F16 && flags == DSOPT_STEP_OUT_ONLY) {
                EXPECT_OK(status);
                EXPECT_NE(out[0], 77);
            } else {
                EXPECT_TRUE(refused(status, DSOPT_ERR_UNSUPPORTED, "'p0'"));
            }
            EXPECT_EQ(trainer.weight()[0], 1);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------- refusals
TEST(OneBitGroup, RefusesInvalidFields) {
    const Context ctx = make_context(1);
    struct Case {
        const char *what;
        dsopt_status wanted;
        const char *text;
        std::function<void(dsopt_group &)> change;
    };
    for (const int32_t algorithm : kFamily) {
        const bool zero_one = algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM,
                   lamb = algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB;
        std::vector<Case> cases = {
            {"eps inside", DSOPT_ERR_UNSUPPORTED, "eps_inside_sqrt",
             [](dsopt_group &g) { g.flags |= DSOPT_GROUP_EPS_INSIDE_SQRT; }},
            {"lr", DSOPT_ERR_ARGUMENT, "lr", [](dsopt_group &g) { g.lr = double(kNaN); }},
            {"beta1", DSOPT_ERR_ARGUMENT, "beta1", [](dsopt_group &g) { g.beta1 = 1; }},
            {"freeze_step 0", DSOPT_ERR_ARGUMENT, "freeze_step", [](dsopt_group &g) { g.freeze_step = 0; }},
            {"freeze_step -1", DSOPT_ERR_ARGUMENT, "freeze_step", [](dsopt_group &g) { g.freeze_step = -1; }},
            {"freeze_step 2^31 - 1", DSOPT_ERR_ARGUMENT, "freeze_step",
             [](dsopt_group &g) { g.freeze_step = INT32_MAX; }}};
        const auto add_count_cases = [&](const char *name, int64_t dsopt_group::*field) {
            for (const int64_t bad : {int64_t(zero_one ? 0 : 1), int64_t(-1)})
                cases.push_back({name, zero_one ? DSOPT_ERR_ARGUMENT : DSOPT_ERR_UNSUPPORTED, name,
                                 [field, bad](dsopt_group &g) { g.*field = bad; }});
        };
        add_count_cases("var_interval_steps", &dsopt_group::var_interval_steps);
        add_count_cases("local_interval_steps", &dsopt_group::local_interval_steps);
        add_count_cases("max_local_interval", &dsopt_group::max_local_interval);
        const auto add_real_cases = [&](const char *name, double dsopt_group::*field, const std::vector<double> &bad) {
            for (const double value : bad)
                cases.push_back({name, lamb ? DSOPT_ERR_ARGUMENT : DSOPT_ERR_UNSUPPORTED, lamb ? name : "LAMB",
                                 [field, value](dsopt_group &g) { g.*field = value; }});
        };
        add_real_cases("trust_beta", &dsopt_group::trust_beta, {1, -0.1, double(kNaN)});
        add_real_cases("trust_threshold", &dsopt_group::trust_threshold, {1, -0.1, double(kNaN)});
        add_real_cases("trust_min_change", &dsopt_group::trust_min_change, {5, -0.1, double(kNaN)});
        add_real_cases("trust_max_change", &dsopt_group::trust_max_change, {-1, double(kInf), double(kNaN)});
        add_real_cases("max_trust", &dsopt_group::max_trust, {-1, double(kInf)});
        if (algorithm != DSOPT_ALGORITHM_ONEBIT_ADAM)
            cases.push_back({"non_freeze", DSOPT_ERR_UNSUPPORTED, "non_freeze",
                             [](dsopt_group &g) { g.flags |= DSOPT_GROUP_NON_FREEZE; }});
        for (const Case &c : cases) {
            Trainer trainer(ctx, optimizer_desc());
            dsopt_group group = group_for(algorithm, 5);
            c.change(group);
            EXPECT_TRUE(refused(trainer.add_group(group, {{Array(DSOPT_DTYPE_F32, 2, 1), "w"}}), c.wanted, c.text))
                << name_of(algorithm) << ": " << c.what;
            int64_t groups = -1;
            must(dsopt_optimizer_count(trainer.opt(), &groups, nullptr));
            EXPECT_EQ(groups, 0);
        }
        Trainer trainer(ctx, optimizer_desc(), group_for(algorithm, 5),
                        std::vector<Array>{Array(DSOPT_DTYPE_F32, 2, 1)});
        EXPECT_TRUE(
            refused(dsopt_optimizer_set(trainer.opt(), 0, DSOPT_KEY_BIAS_CORRECTION, 1), DSOPT_ERR_UNSUPPORTED));
        EXPECT_TRUE(
            refused(dsopt_optimizer_set(trainer.opt(), 0, DSOPT_KEY_EPS_INSIDE_SQRT, 1), DSOPT_ERR_UNSUPPORTED));
    }
    for (const int32_t other :
         {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ADAM_LEGACY}) {
        const std::function<void(dsopt_group &)> changes[] = {[](dsopt_group &g) { g.freeze_step = 1; },
                                                              [](dsopt_group &g) { g.var_interval_steps = 1; },
                                                              [](dsopt_group &g) { g.local_interval_steps = 1; },
                                                              [](dsopt_group &g) { g.max_local_interval = 1; },
                                                              [](dsopt_group &g) { g.trust_beta = 0.5; },
                                                              [](dsopt_group &g) { g.trust_threshold = 0.5; },
                                                              [](dsopt_group &g) { g.trust_max_change = 1; },
                                                              [](dsopt_group &g) { g.flags |= DSOPT_GROUP_NON_FREEZE; }};
        for (const auto &change : changes) {
            Trainer trainer(ctx, optimizer_desc());
            dsopt_group group = group_of(other);
            change(group);
            EXPECT_TRUE(
                refused(trainer.add_group(group, {{Array(DSOPT_DTYPE_F32, 2, 1), "w"}}), DSOPT_ERR_UNSUPPORTED));
        }
        Trainer trainer(ctx, optimizer_desc());
        EXPECT_TRUE(
            refused(trainer.add_group(group_of(other), {{Array(DSOPT_DTYPE_F32, 2, 1), "w", DSOPT_PARAM_MASKED}}),
                    DSOPT_ERR_UNSUPPORTED, "'w'"));
    }
}

TEST(OneBitGroup, RefusesOtherAlgorithmsAndSchedules) {
    const Context ctx = make_context(1);
    for (const int32_t algorithm : kFamily) {
        Trainer trainer(ctx, optimizer_desc(), group_for(algorithm, 5),
                        std::vector<Array>{Array(DSOPT_DTYPE_F32, 2, 1)});
        const auto add = [&](const dsopt_group &group) {
            return trainer.add_group(group, {{Array(DSOPT_DTYPE_F32, 2, 1), "other"}});
        };
        EXPECT_TRUE(refused(add(group_for(algorithm, 6)), DSOPT_ERR_ARGUMENT, "freeze_step"));
        for (const int32_t second : kFamily)
            if (second != algorithm) {
                EXPECT_TRUE(refused(add(group_for(second, 5)), DSOPT_ERR_UNSUPPORTED, "one algorithm"));
            }
        if (algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM)
            for (int64_t dsopt_group::*field : {&dsopt_group::var_interval_steps, &dsopt_group::local_interval_steps,
                                                &dsopt_group::max_local_interval}) {
                dsopt_group group = group_for(algorithm, 5);
                ++(group.*field);
                EXPECT_TRUE(refused(add(group), DSOPT_ERR_ARGUMENT, "interval|must be the same in all groups"));
            }
        EXPECT_OK(add(group_for(algorithm, 5)));
    }
}

TEST(OneBitGroup, RefusesUnsupportedOptions) {
    const Context ctx = make_context(1);
    for (const int32_t algorithm : kFamily) {
        for (const int32_t dtype : {DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16}) {
            Trainer trainer(ctx, optimizer_desc(0, DSOPT_OPTIMIZER_NO_MASTER));
            EXPECT_TRUE(refused(trainer.add_group(group_for(algorithm, 5), {{Array(dtype, 2, 1), "w"}}),
                                DSOPT_ERR_UNSUPPORTED, "'w'"));
        }
        Trainer norms(ctx, optimizer_desc(0, DSOPT_OPTIMIZER_REPORT_NORMS));
        EXPECT_TRUE(refused(norms.add_group(group_for(algorithm, 5), {{Array(DSOPT_DTYPE_F32, 2, 1), "w"}}),
                            DSOPT_ERR_UNSUPPORTED, "REPORT_NORMS"));
    }
    Trainer bits(ctx, optimizer_desc(0, DSOPT_OPTIMIZER_MOMENTUM_BITS));
    EXPECT_TRUE(refused(bits.add_group(group_of(DSOPT_ALGORITHM_ADAM), {{Array(DSOPT_DTYPE_F32, 2, 1), "w"}}),
                        DSOPT_ERR_UNSUPPORTED, "MOMENTUM_BITS"));
}

TEST_P(OneBitStep, FailsIfARankIsDestroyed) {
    if (ranks == 1) return;
    const Context ctx = make_context(1);
    const CommId id = new_id();
    std::vector<Comm> comms(static_cast<size_t>(ranks));
    run_ranks(ranks, [&](int rank) { comms[size_t(rank)] = local_comm(ctx, id, rank, ranks, -1); });
    run_ranks(ranks, [&](int rank) {
        Comm &comm = comms[size_t(rank)];
        std::optional<Trainer> trainer(trainer_of(ctx, comm, group_for(algorithm, 2), problem.weights()));
        for (int64_t call = 1; call <= 3; ++call)
            must(trainer->step(problem.gradients_for(reduction(*trainer), rank, call)));
        if (rank == ranks - 1) {
            trainer.reset();
            comm.reset();
            return;
        }
        ASSERT_EQ(reduction(*trainer), DSOPT_REDUCTION_COMPRESSED);
        const std::string before = trainer->weight(4).text();
        EXPECT_TRUE(refused(trainer->step(problem.local_gradients(rank, 4)), DSOPT_ERR_COMM));
        EXPECT_TRUE(refused(trainer->step(problem.local_gradients(rank, 4)), DSOPT_ERR_COMM)) << "sticky";
        if (algorithm != DSOPT_ALGORITHM_ZERO_ONE_ADAM) { EXPECT_EQ(trainer->weight(4).text(), before); }
        EXPECT_EQ(info_of(comm).status, DSOPT_ERR_COMM);
    });
}

TEST(OneBitGroup, TrainsOnAfterAnAdamGroupIsAdded) {
    with_ranks(2, [&](int, const Context &ctx, const Comm &comm) {
        for (const int32_t algorithm : kFamily) {
            SCOPED_TRACE(name_of(algorithm));
            Trainer trainer(ctx, desc_with(comm));
            // All ranks have identical gradients, so they need no averaging.
            const auto gradient = [](int64_t call) {
                return Array(DSOPT_DTYPE_F32, Random(uint64_t(call)).floats(100, 0.5, 1));
            };
            must(trainer.add_group(group_for(algorithm, 4, 1e-2, 0), {{Array(DSOPT_DTYPE_F32, 100, 1), "a"}}));
            for (int64_t call = 1; call <= 8; ++call) must(trainer.step({gradient(call)}));
            const std::vector<float> before = trainer.weight(0).floats();
            must(trainer.add_group(group_of(DSOPT_ALGORITHM_ADAM, 1e-2, 0), {{Array(DSOPT_DTYPE_F32, 100, 1), "b"}}));
            for (int64_t call = 9; call <= 16; ++call) must(trainer.step({gradient(call), gradient(-call)}));
            for (size_t i = 0; i < 100; ++i) {
                ASSERT_LT(trainer.weight(0).floats()[i], before[i] - 1e-3) << i;
                ASSERT_LT(trainer.weight(1).floats()[i], 0.95) << i;
            }
        }
    });
}

TEST(OneBitGroup, IsRefusedOnceTheVarianceIsFrozen) {
    for (const int ranks : {1, 2})
        with_ranks(ranks, [&](int, const Context &ctx, const Comm &comm) {
            for (const int32_t algorithm : kFamily)
                for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
                    Trainer trainer(ctx, desc_with(comm, compat));
                    const dsopt_group group = group_for(algorithm, 4);
                    must(trainer.add_group(group, {{Array(DSOPT_DTYPE_F32, 10, 1), "a"}}));
                    for (int call = 0; call < 3; ++call) must(trainer.step({Array(DSOPT_DTYPE_F32, 10, 0.5f)}));
                    must(trainer.add_group(group, {{Array(DSOPT_DTYPE_F32, 10, 1), "b"}}));
                    const std::vector<Array> grads(2, Array(DSOPT_DTYPE_F32, 10, 0.5f));
                    for (int call = 0; call < 5; ++call) must(trainer.step(grads));
                    Array late(DSOPT_DTYPE_F32, 10, 1);
                    dsopt_param param{};
                    param.tensor = late.tensor();
                    param.name = "c";
                    const std::vector<dsopt_state_info> before = trainer.state();
                    EXPECT_TRUE(refused(dsopt_optimizer_add_group(trainer.opt(), &group, &param, 1), DSOPT_ERR_STATE,
                                        "frozen"));
                    for (const dsopt_state_info &info : before) // nothing was added, so dims are still valid
                        EXPECT_EQ(info.ndim == 1 ? *info.dims : info.tensor.numel, info.tensor.numel) << info.name;
                    must(trainer.step(grads));
                    if (compat != DSOPT_COMPAT_NONE) continue;
                    must(trainer.add_group(group_of(DSOPT_ALGORITHM_ADAM), {{Array(DSOPT_DTYPE_F32, 10, 1), "d"}}));
                    EXPECT_TRUE(refused(dsopt_optimizer_add_group(trainer.opt(), &group, &param, 1), DSOPT_ERR_STATE,
                                        "frozen"));
                    must(trainer.step(std::vector<Array>(3, Array(DSOPT_DTYPE_F32, 10, 0.5f))));
                }
        });
}

TEST(OneBitGroup, TrainsTheSameIfGroupsAreAddedOneByOne) {
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        for (const int32_t algorithm : kFamily) {
            SCOPED_TRACE(name_of(algorithm));
            const Array b(DSOPT_DTYPE_F32, 33, 1), c(DSOPT_DTYPE_F32, 9, 2);
            std::vector<std::string> trained;
            for (const bool together : {true, false}) {
                Trainer trainer(ctx, desc_with(comm));
                must(trainer.add_group(group_for(algorithm, 3, 1e-2, 0), {{Array(DSOPT_DTYPE_F32, 100, 1), "a"}}));
                std::vector<Array> grads = {Array(DSOPT_DTYPE_F32, Random(uint64_t(rank)).floats(100, 0.5, 1))};
                for (int64_t call = 0; call < 6; ++call) must(trainer.step(grads));
                const dsopt_group adam = group_of(DSOPT_ALGORITHM_ADAM, 1e-2, 0);
                if (together) {
                    must(trainer.add_group(adam, {{b, "b"}, {c, "c"}}));
                } else {
                    must(trainer.add_group(adam, {{b, "b"}}));
                    must(trainer.add_group(adam, {{c, "c"}}));
                }
                grads.emplace_back(DSOPT_DTYPE_F32, Random(uint64_t(rank) + 2).floats(33, 0.5, 1));
                grads.emplace_back(DSOPT_DTYPE_F32, Random(uint64_t(rank) + 4).floats(9, 0.5, 1));
                for (int64_t call = 0; call < 6; ++call) must(trainer.step(grads));
                trained.emplace_back();
                for (size_t i = 0; i < 3; ++i) trained.back() += trainer.weight(i).text();
            }
            EXPECT_EQ(trained[0], trained[1]);
        }
    });
}

TEST(OneBitGroup, StepsWithoutParameters) {
    with_ranks(2, [&](int, const Context &ctx, const Comm &comm) {
        for (const int32_t algorithm : kFamily)
            for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
                Trainer trainer(ctx, desc_with(comm, compat));
                ASSERT_OK(trainer.add_group(group_for(algorithm, 2), std::vector<Param>{}));
                for (int call = 0; call < 5; ++call) ASSERT_OK(trainer.step(std::vector<Array>{}));
            }
    });
}

} // namespace onebit_tests
