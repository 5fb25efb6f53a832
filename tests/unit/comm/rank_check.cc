// SPDX-License-Identifier: Apache-2.0
// DSOPT_OPTIMIZER_CHECK_RANKS: if ranks are about to make different steps, all of them return a status and change
// nothing.
#include "support/onebit.h"

using namespace test;

namespace comm_rank_check_tests {

dsopt_optimizer_desc checked_desc(const Comm &comm, uint32_t flags = 0) {
    return desc_with(comm, DSOPT_COMPAT_NONE, flags | DSOPT_OPTIMIZER_CHECK_RANKS);
}
const std::vector<size_t> kSizes = {40, 700, 33};
std::vector<Array> arrays(float value) {
    std::vector<Array> list;
    for (const size_t n : kSizes) list.emplace_back(DSOPT_DTYPE_F32, n, value);
    return list;
}

/// A difference between one rank and the others. Each rank calls build() and before_step(), then makes a step that must
/// be refused with `text` and change nothing.
struct Difference {
    const char *what, *text;
    std::function<void(Trainer &, bool differs)> build;
    std::function<void(Trainer &, std::vector<Array> &, bool differs)> before_step = {};
};
std::vector<Param> named_params(const std::vector<Array> &weights) {
    std::vector<Param> params;
    for (size_t i = 0; i < weights.size(); ++i) params.push_back({weights[i], "layer" + std::to_string(i)});
    return params;
}

TEST(CheckRanks, NamesTheDifferenceOnEveryRankAndChangesNothing) {
    const auto add = [](Trainer &trainer, const std::vector<Param> &params, const dsopt_group &group) {
        must(trainer.add_group(group, params));
    };
    const dsopt_group group = group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 5);
    const auto add_named_group = [&](Trainer &trainer, bool) { add(trainer, named_params(arrays(1)), group); };
    const Difference differences[] = {
        {"one more parameter", "from 3 to 4 parameters",
         [&](Trainer &trainer, bool differs) {
             std::vector<Param> params = named_params(arrays(1));
             if (differs) params.push_back({Array(DSOPT_DTYPE_F32, 5, 1), "more"});
             add(trainer, params, group);
         },
         [](Trainer &, std::vector<Array> &grads, bool differs) {
             if (differs) grads.emplace_back(DSOPT_DTYPE_F32, 5, 0.5f);
         }},
        {"a size", "parameter 1 is 'layer1'",
         [&](Trainer &trainer, bool differs) {
             std::vector<Param> params = named_params(arrays(1));
             if (differs) params[1].weight = Array(DSOPT_DTYPE_F32, 701, 1);
             add(trainer, params, group);
         },
         [](Trainer &, std::vector<Array> &grads, bool differs) {
             if (differs) grads[1] = Array(DSOPT_DTYPE_F32, 701, 0.5f);
         }},
        {"a dtype", "parameter 2 is 'layer2'",
         [&](Trainer &trainer, bool differs) {
             std::vector<Param> params = named_params(arrays(1));
             if (differs) params[2].weight = Array(DSOPT_DTYPE_BF16, 33, 1);
             add(trainer, params, group);
         }},
        {"a name", "parameter 0 is",
         [&](Trainer &trainer, bool differs) {
             std::vector<Param> params = named_params(arrays(1));
             if (differs) params[0].name = "another";
             add(trainer, params, group);
         }},
        {"the order", "parameter 1 is",
         [&](Trainer &trainer, bool differs) {
             std::vector<Param> params = named_params(arrays(1));
             params[2].weight = Array(DSOPT_DTYPE_F32, 700, 1);
             if (differs) std::swap(params[1].name, params[2].name);
             add(trainer, params, group);
         },
         [](Trainer &, std::vector<Array> &grads, bool) { grads[2] = Array(DSOPT_DTYPE_F32, 700, 0.5f); }},
        {"the partition into groups", "parameter 1 is 'layer1'",
         [&](Trainer &trainer, bool differs) {
             const std::vector<Param> params = named_params(arrays(1));
             add(trainer, {params.begin(), params.begin() + (differs ? 1 : 2)}, group);
             add(trainer, {params.begin() + (differs ? 1 : 2), params.end()}, group);
         }},
        {"non_freeze", "algorithm, flags of group 0 are 16, ",
         [&](Trainer &trainer, bool differs) {
             dsopt_group other = group;
             if (differs) other.flags |= DSOPT_GROUP_NON_FREEZE;
             add(trainer, named_params(arrays(1)), other);
         }},
        {"the algorithm", "algorithm, flags of group 0 are ",
         [&](Trainer &trainer, bool differs) {
             add(trainer, named_params(arrays(1)),
                 differs ? group_of(DSOPT_ALGORITHM_ADAMW) : group_of(DSOPT_ALGORITHM_ADAM));
         }},
        {"the number of calls", "from 2 to 7, rank", add_named_group,
         [](Trainer &trainer, std::vector<Array> &, bool differs) {
             must(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_CALLS, differs ? 7 : 2));
         }},
        {"the schedule", "different steps of the schedule: 0 to 9", add_named_group,
         [](Trainer &trainer, std::vector<Array> &, bool differs) {
             const std::vector<dsopt_state_info> list = trainer.state();
             const int32_t words[8] = {9};
             for (size_t i = 0; i < list.size() && differs; ++i)
                 if (std::strcmp(list[i].name, "schedule") == 0)
                     must(dsopt_optimizer_import(trainer.opt(), int64_t(i), words, sizeof words));
         }},
        {"the stage", "'full precision' and 'one bit per element'", add_named_group,
         [](Trainer &trainer, std::vector<Array> &, bool differs) {
             const std::vector<dsopt_state_info> list = trainer.state();
             const int32_t words[8] = {9, differs};
             for (size_t i = 0; i < list.size(); ++i)
                 if (std::strcmp(list[i].name, "schedule") == 0)
                     must(dsopt_optimizer_import(trainer.opt(), int64_t(i), words, sizeof words));
         }},
        {"a group without parameters", "from 3 to 3 parameters in 1 to 2 groups",
         [&](Trainer &trainer, bool differs) {
             add(trainer, named_params(arrays(1)), group_of(DSOPT_ALGORITHM_ADAMW));
             if (differs) add(trainer, {}, group);
         }},
        {"an absent gradient", "the gradient of 'layer1' is", add_named_group,
         [](Trainer &, std::vector<Array> &grads, bool differs) {
             if (differs) grads[1] = Array::absent(700);
         }}};
    for (const int ranks : {2, 3})
        for (const Difference &difference : differences)
            for (int differing_rank = 0; differing_rank < ranks; ++differing_rank) {
                with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
                    Trainer trainer(ctx, checked_desc(comm));
                    difference.build(trainer, rank == differing_rank);
                    std::vector<Array> grads = arrays(0.5f);
                    if (difference.before_step) difference.before_step(trainer, grads, rank == differing_rank);
                    const Snapshot before = trainer.snapshot();
                    const int64_t calls = trainer.report().calls;
                    for (int again = 0; again < 2; ++again)
                        EXPECT_TRUE(refused(trainer.step(grads), DSOPT_ERR_MISMATCH, difference.text))
                            << difference.what << ", rank " << rank;
                    EXPECT_TRUE(same(trainer.snapshot(), before)) << difference.what;
                    EXPECT_EQ(trainer.report().calls, calls);
                    EXPECT_EQ(info_of(comm).status, DSOPT_OK);
                    EXPECT_OK(call_collective(ctx, comm)) << "the comm stays usable";
                });
            }
}

// Weights depend on each of these options, and ranks that differ in one would have different weights, or with sharded
// state parts of the list that were made by different rules.
TEST(CheckRanks, ComparesEveryOptionThatWeightsDependOn) {
    struct Option {
        const char *text; // of the refusal
        std::function<void(dsopt_optimizer_desc &, dsopt_group &, std::vector<Param> &)> change;
    };
    using Desc = dsopt_optimizer_desc;
    using Group = dsopt_group;
    using Params = std::vector<Param>;
    const auto field = [](double Group::*value, double other) {
        return [=](Desc &, Group &group, Params &) { group.*value = other; };
    };
    const auto option = [](auto Desc::*value, auto other) {
        return [=](Desc &desc, Group &, Params &) { desc.*value = other; };
    };
    const auto flag = [](int32_t flag) { return [=](Desc &desc, Group &, Params &) { desc.flags |= flag; }; };
    const auto param = [](int32_t flags) { return [=](Desc &, Group &, Params &list) { list[2].flags = flags; }; };
    const std::vector<Option> options = {
        {"dsopt_optimizer_desc.flags are 0x", flag(DSOPT_OPTIMIZER_NO_MASTER)},
        {"dsopt_optimizer_desc.flags are 0x", flag(DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING | DSOPT_OPTIMIZER_NO_MASTER)},
        {"dsopt_optimizer_desc.flags are 0x", flag(DSOPT_OPTIMIZER_ACCUMULATE)},
        {"compat, nonfinite are 0, ", option(&Desc::nonfinite, DSOPT_NONFINITE_SKIP)},
        {"masters, skip_budget are ", option(&Desc::masters, DSOPT_MASTERS_REMAINDER)},
        {"masters, skip_budget are 0, ", option(&Desc::skip_budget, 3)},
        {"max_norm is ", option(&Desc::max_norm, 2.0)},
        {"max_value is ", option(&Desc::max_value, 0.5)},
        {"seed is ", option(&Desc::seed, uint64_t(1) << 40)},
        {"parameter 0 is 'layer0'", [](Desc &, Group &, Params &list) { list[0].offset = 4096; }},
        {"lr of group 0 is ", field(&Group::lr, 0.5)},
        {"beta1 of group 0 is ", field(&Group::beta1, 0.5)},
        {"beta2 of group 0 is ", field(&Group::beta2, 0.5)},
        {"eps of group 0 is ", field(&Group::eps, 0.5)},
        {"weight_decay of group 0 is ", field(&Group::weight_decay, 0.5)},
        {"max_norm of group 0 is ", field(&Group::max_norm, 0.5)},
        {"max_trust of group 0 is ", field(&Group::max_trust, 0.5)},
        {"algorithm, flags of group 0 are ",
         [](Desc &, Group &group, Params &) { group.flags |= DSOPT_GROUP_NO_BIAS_CORRECTION; }},
        {"exp_avg_format, exp_avg_sq_format of group 0 are ",
         [](Desc &, Group &group, Params &) { group.exp_avg_format = DSOPT_MOMENT_BF16; }},
        {"parameter 2 is 'layer2'", param(DSOPT_PARAM_MODEL_PARALLEL)},
        {"parameter 2 is 'layer2'", param(DSOPT_PARAM_REPLICATED)},
    };
    const auto train = [](Trainer &trainer, const char *text) {
        const Snapshot before = trainer.snapshot();
        EXPECT_TRUE(refused(trainer.step(arrays(0.5f)), DSOPT_ERR_MISMATCH, text));
        EXPECT_TRUE(same(trainer.snapshot(), before)) << text;
    };
    for (const uint32_t flags : {uint32_t(DSOPT_OPTIMIZER_CHECK_RANKS), uint32_t(DSOPT_OPTIMIZER_SHARD)})
        for (const Option &differing : options)
            with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
                dsopt_optimizer_desc desc = desc_with(comm, DSOPT_COMPAT_NONE, flags);
                dsopt_group group = group_of(DSOPT_ALGORITHM_LAMB);
                group.exp_avg_sq_format = DSOPT_MOMENT_BF16_RANDOM; // uses seed and offset
                std::vector<Param> params = named_params(arrays(1));
                params[0].weight = Array(DSOPT_DTYPE_BF16, 40, 1);
                if (rank == 1) differing.change(desc, group, params);
                Trainer trainer(ctx, desc, group, params);
                train(trainer, differing.text);
            });
    // The seed has no effect where nothing is rounded at random.
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        dsopt_optimizer_desc desc = checked_desc(comm);
        desc.seed = uint64_t(rank);
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAMW), named_params(arrays(1)));
        EXPECT_OK(trainer.step(arrays(1)));
    });
    // A scaler, and another rule of a scaler.
    for (const bool both : {false, true})
        with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
            DSOPT_NEW(dsopt_scaler_desc, rules);
            if (rank == 1) rules.window = 7;
            const Scaler scaler = make_scaler(ctx, rules);
            dsopt_optimizer_desc desc = checked_desc(comm);
            if (both || rank == 1) desc.scaler = scaler.get();
            Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAMW), named_params(arrays(1)));
            train(trainer, both ? "scaler's window, hysteresis are " : "scaler, its flags are ");
        });
    // What rank 0 may do alone: it logs norms and times.
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        const uint32_t logs = DSOPT_OPTIMIZER_REPORT_NORMS | DSOPT_OPTIMIZER_TIMING;
        Trainer trainer(ctx, checked_desc(comm, rank == 0 ? logs : 0), group_of(DSOPT_ALGORITHM_ADAMW),
                        named_params(arrays(1)));
        EXPECT_OK(trainer.step(arrays(1)));
    });
}

TEST(CheckRanks, AllowsStepsOnceRanksAgreeAgain) {
    std::array<Snapshot, 2> all;
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer trainer(ctx, checked_desc(comm), group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), named_params(arrays(1)));
        for (int64_t call = 1; call <= 8; ++call) {
            std::vector<Array> grads = arrays(float(call));
            const bool full = reduction(trainer) == DSOPT_REDUCTION_FULL;
            if (rank == 1) grads[0] = Array::absent(40);
            if (full) { EXPECT_TRUE(refused(trainer.step(grads), DSOPT_ERR_MISMATCH, "'layer0'")); }
            if (full) grads = arrays(float(call));
            EXPECT_OK(trainer.step(grads)) << call << ": an absent gradient is zeros in compressed steps";
        }
        all[size_t(rank)] = trainer.snapshot();
        EXPECT_EQ(trainer.report().calls, 8);
        for (const char *local : {"worker_error -1", "server_error -1"}) all[size_t(rank)].erase(local);
    });
    EXPECT_TRUE(same(all[0], all[1]));
}

TEST(CheckRanks, ReportsARankThatRefusesItsArguments) {
    struct WrongArgument {
        dsopt_status status;
        std::function<void(dsopt_step &)> change;
    };
    const WrongArgument wrong_arguments[] = {{DSOPT_ERR_SHAPE, [](dsopt_step &step) { --step.count; }},
                                             {DSOPT_ERR_ARGUMENT, [](dsopt_step &step) { step.grads = nullptr; }},
                                             {DSOPT_ERR_ARGUMENT, [](dsopt_step &step) { step.flags = 1u << 30; }},
                                             {DSOPT_ERR_VERSION, [](dsopt_step &step) { step.size = 8; }},
                                             {DSOPT_ERR_SHAPE, [](dsopt_step &step) { step.state_count = 3; }}};
    for (const WrongArgument &wrong : wrong_arguments)
        with_ranks(3, [&](int rank, const Context &ctx, const Comm &comm) {
            Trainer trainer(ctx, checked_desc(comm), group_for(DSOPT_ALGORITHM_ONEBIT_LAMB, 2),
                            named_params(arrays(1)));
            must(trainer.step(arrays(1)));
            const Snapshot before = trainer.snapshot();
            const dsopt_status status =
                trainer.step(arrays(1), rank == 1 ? wrong.change : std::function<void(dsopt_step &)>());
            if (rank == 1) {
                EXPECT_TRUE(status == wrong.status || status == DSOPT_ERR_ARGUMENT) << dsopt_last_error();
            } else {
                EXPECT_TRUE(refused(status, DSOPT_ERR_MISMATCH, "the step of rank 1 failed before"));
            }
            EXPECT_TRUE(same(trainer.snapshot(), before));
            EXPECT_OK(trainer.step(arrays(1)));
        });
}

TEST(CheckRanks, ComparesRanksInApply) {
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer trainer(ctx, checked_desc(comm), group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), named_params(arrays(1)));
        (void)trainer.snapshot(); // allocates
        std::vector<dsopt_tensor> state;
        for (const dsopt_state_info &info : trainer.state()) state.push_back(info.tensor);
        const std::vector<dsopt_tensor> params = list_of(trainer.weights());
        size_t bytes = 0;
        must(dsopt_optimizer_workspace(trainer.opt(), &bytes));
        const Shared<char> memory(bytes + 256);
        const auto apply = [&](const std::vector<Array> &grads) {
            const std::vector<dsopt_tensor> list = list_of(grads);
            DSOPT_NEW(dsopt_step, step);
            step.grads = list.data();
            step.params = params.data();
            step.count = int64_t(list.size());
            step.state = state.data();
            step.state_count = int64_t(state.size());
            step.workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
            step.workspace_bytes = bytes;
            return dsopt_optimizer_apply(trainer.opt(), &step);
        };
        std::vector<Array> grads = arrays(1);
        if (rank == 0) grads[2] = Array::absent(33);
        const Snapshot before = trainer.snapshot();
        EXPECT_TRUE(refused(apply(grads), DSOPT_ERR_MISMATCH, "'layer2'"));
        grads.pop_back();
        EXPECT_NE(dsopt_status(DSOPT_OK), apply(rank == 0 ? arrays(1) : grads));
        EXPECT_TRUE(same(trainer.snapshot(), before));
        for (int call = 1; call <= 4; ++call) EXPECT_OK(apply(arrays(1)));
    });
}

LABEL(long_emulated);
TEST(CheckRanks, AddsOneSmallAllReduceAndChangesNoBit) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM,
                                    DSOPT_ALGORITHM_ONEBIT_LAMB})
        with_ranks(3, [&](int rank, const Context &ctx, const Comm &comm) {
            const Problem problem = problem_of(3);
            const bool onebit = algorithm != DSOPT_ALGORITHM_ADAMW;
            const dsopt_group group = onebit ? group_for(algorithm, 6) : group_of(algorithm);
            Trainer plain(ctx, desc_with(comm), group, problem.weights()),
                with(ctx, checked_desc(comm), group, problem.weights());
            for (int64_t call = 1; call <= 24; ++call) {
                const std::vector<Array> grads = problem.gradients_for(reduction(plain), rank, call);
                const dsopt_comm_info first = info_of(comm);
                ASSERT_OK(plain.step(grads));
                const dsopt_comm_info second = info_of(comm);
                ASSERT_OK(with.step(grads));
                const dsopt_comm_info third = info_of(comm);
                const bool more =
                    call > 1 || !onebit; // lists of the 1-bit family are compared once without the flag, too
                EXPECT_EQ(third.calls - second.calls, second.calls - first.calls + more);
                EXPECT_EQ(third.bytes_sent - second.bytes_sent,
                          second.bytes_sent - first.bytes_sent + more * (148 * 2 * 2 / 3));
                EXPECT_TRUE(same(plain.snapshot(), with.snapshot())) << call;
            }
        });
}

TEST(CheckRanks, ComparesOneBitListsWithoutTheFlag) {
    for (const int32_t algorithm : kFamily)
        with_ranks(3, [&](int rank, const Context &ctx, const Comm &comm) {
            Problem problem = problem_of(3);
            if (rank == 1) std::swap(problem.sizes[1], problem.sizes[2]); // as many elements at other offsets
            Trainer differing(ctx, desc_with(comm), group_for(algorithm, 4), problem.weights());
            const Snapshot before = differing.snapshot();
            for (int k = 0; k < 2; ++k) { // the second step is refused, too
                EXPECT_EQ(differing.step(problem.local_gradients(rank, 1)), DSOPT_ERR_MISMATCH) << name_of(algorithm);
                EXPECT_NE(std::string(dsopt_last_error()).find("parameter 1 is"), std::string::npos)
                    << dsopt_last_error();
            }
            EXPECT_TRUE(same(differing.snapshot(), before));
            EXPECT_EQ(info_of(comm).status, DSOPT_OK) << "the comm stays usable";

            Trainer trainer(ctx, desc_with(comm), group_for(algorithm, 4), problem_of(3).weights());
            ASSERT_OK(trainer.step(problem_of(3).mean(1)));
            Array weight(DSOPT_DTYPE_F32, size_t(rank == 2 ? 40 : 41), 0.5f);
            dsopt_param param{};
            param.tensor = weight.tensor();
            param.name = "late";
            const dsopt_group group = group_for(algorithm, 4);
            must(dsopt_optimizer_add_group(trainer.opt(), &group, &param, 1));
            std::vector<Array> grads = problem_of(3).mean(2);
            grads.emplace_back(DSOPT_DTYPE_F32, weight.size(), 0.1f);
            const std::vector<dsopt_tensor> list = list_of(grads);
            DSOPT_NEW(dsopt_step, step);
            step.grads = list.data();
            step.count = int64_t(list.size());
            EXPECT_EQ(dsopt_optimizer_step(trainer.opt(), &step), DSOPT_ERR_MISMATCH);
            EXPECT_NE(std::string(dsopt_last_error()).find("late"), std::string::npos) << dsopt_last_error();
        });
}

TEST(CheckRanks, AcceptsAbsentGradientsThatTheStepAccepts) {
    for (const int32_t algorithm : kFamily)
        with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
            const Problem problem = problem_of(2);
            Trainer trainer(ctx, checked_desc(comm, DSOPT_OPTIMIZER_AVERAGES), group_for(algorithm, 4),
                            problem.weights());
            for (int64_t call = 1; call <= 24; ++call) { // averaged, compressed and local steps
                std::vector<Array> grads = problem.local_gradients(rank, call);
                if (call % 2 == rank) grads[0] = Array::absent(grads[0].size());
                EXPECT_OK(trainer.step(grads)) << name_of(algorithm) << ", " << call;
            }
        });
    // Expert parameters may differ between ranks.
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        const Comm alone = self_comm(ctx);
        dsopt_comm *const experts[] = {alone.get()};
        dsopt_optimizer_desc desc = checked_desc(comm);
        desc.experts = experts;
        desc.expert_count = 1;
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM),
                        {{Array(DSOPT_DTYPE_F32, 9, 1), "dense"},
                         {Array(DSOPT_DTYPE_F32, 7, 1), "expert" + std::to_string(rank), 0, 1}});
        EXPECT_OK(trainer.step({Array(DSOPT_DTYPE_F32, 9, 1), rank ? Array(DSOPT_DTYPE_F32, 7, 1) : Array::absent(7)}));
    });
}

TEST(CheckRanks, IsOffByDefaultAndRefusedWithoutAComm) {
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer trainer(ctx, desc_with(comm), group_of(DSOPT_ALGORITHM_ADAM), named_params(arrays(1)));
        std::vector<Array> grads = arrays(1);
        if (rank == 0) grads[1] = Array::absent(700);
        EXPECT_OK(trainer.step(grads));
    });
    const Context ctx = make_context(1);
    const dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_CHECK_RANKS);
    dsopt_optimizer *opt = nullptr;
    EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_UNSUPPORTED, "CHECK_RANKS"));
    EXPECT_EQ(opt, nullptr);
    const Comm self = self_comm(ctx); // a comm of one rank is accepted
    Trainer trainer(ctx, checked_desc(self), group_of(DSOPT_ALGORITHM_ADAM), named_params(arrays(1)));
    EXPECT_OK(trainer.step(arrays(1)));
    EXPECT_EQ(info_of(self).calls, 0);
}

TEST(CheckRanks, ReportsAnExhaustedSkipBudgetOnEveryRank) {
    with_ranks(2, [&](int, const Context &ctx, const Comm &comm) {
        dsopt_optimizer_desc desc = checked_desc(comm);
        desc.skip_budget = 2;
        desc.nonfinite = DSOPT_NONFINITE_SKIP;
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), named_params(arrays(1)));
        for (int call = 0; call < 2; ++call) EXPECT_OK(trainer.step(arrays(kNaN)));
        for (int call = 0; call < 2; ++call) EXPECT_TRUE(refused(trainer.step(arrays(1)), DSOPT_ERR_SKIPS));
        must(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_SKIP_BUDGET, 2));
        EXPECT_OK(trainer.step(arrays(1)));
    });
}

} // namespace comm_rank_check_tests
