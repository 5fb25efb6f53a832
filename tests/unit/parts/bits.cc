// SPDX-License-Identifier: Apache-2.0
// A step in parts gives the bits of the undivided step, whatever the order and the grouping of dsopt_optimizer_ready.
#include "support/harness.h"
#include "support/parts.h"
#include "support/shard.h"
#include "support/two_level.h"

using namespace test;

namespace parts_bits_tests {

struct Case {
    const char *name;
    ShardTraining training;
    friend void PrintTo(const Case &each, std::ostream *out) { *out << each.name; }
};

dsopt_group clipped(int32_t algorithm) {
    dsopt_group group = group_of(algorithm);
    group.max_norm = 0.5;
    return group;
}
ShardTraining mixed(ShardTraining training, uint32_t flags = 0) {
    training.param = training.grad = DSOPT_DTYPE_BF16;
    training.desc.flags |= int32_t(flags);
    return training;
}
ShardTraining skipping(ShardTraining training) {
    training.desc.nonfinite = DSOPT_NONFINITE_SKIP;
    training.bad_step = 3;
    return training;
}
dsopt_optimizer_desc clipping(uint32_t flags = 0) { return optimizer_desc(0.5, flags); }

const std::vector<Case> kCases = {
    {"Clips", {.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .desc = clipping()}},
    {"ClipsAGroup", {.groups = {clipped(DSOPT_ALGORITHM_ADAMW), group_of(DSOPT_ALGORITHM_SGD)}}},
    {"Scales", mixed({.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .scaled = true, .bad_step = 2, .absent = 4})},
    {"Skips", skipping({.groups = {group_of(DSOPT_ALGORITHM_LION)}, .absent = 6})},
    {"Reports",
     {.groups = {group_of(DSOPT_ALGORITHM_ADAGRAD)}, .desc = clipping(DSOPT_OPTIMIZER_REPORT_NORMS), .absent = 0}},
    {"Lamb", {.groups = {group_of(DSOPT_ALGORITHM_LAMB)}, .desc = clipping()}},
    {"Keeps", {.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .absent = 2}},
    {"NoMaster", mixed({.groups = {group_of(DSOPT_ALGORITHM_ADAM)}, .desc = clipping()},
                       DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING)},
};
/// One matrix, three of them, a row; then tensors of AdamW.
ShardTraining matrices() {
    dsopt_group muon;
    must(dsopt_group_init(&muon, sizeof muon, DSOPT_ALGORITHM_MUON));
    muon.lr = 0.02;
    return {.groups = {muon, group_of(DSOPT_ALGORITHM_ADAMW)},
            .desc = clipping(),
            .absent = 2,
            .sizes = {24 * 40, 3 * 16 * 20, 33, 64 * 64, 700, 5000, 4097, 33},
            .blocks = {{{24, 40}}, {{16, 20}}, {{1, 33}}, {{64, 64}}}};
}

const std::vector<Case> kEarly = {
    {"EarlyAdamW", {.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .absent = 2}},
    {"EarlyMixed", mixed({.groups = {group_of(DSOPT_ALGORITHM_ADAMW), group_of(DSOPT_ALGORITHM_SGD)}, .absent = 7})},
    {"EarlyLion", mixed({.groups = {group_of(DSOPT_ALGORITHM_LION)}},
                        DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING)},
};

std::vector<Case> early_cases() {
    std::vector<Case> cases = kEarly;
    for (Case &each : cases) each.training.desc.flags |= DSOPT_OPTIMIZER_EARLY_UPDATE;
    return cases;
}
std::vector<Case> all_cases() {
    std::vector<Case> cases = kCases;
    cases.push_back({"Muon", matrices()});
    for (const Case &each : early_cases()) cases.push_back(each);
    return cases;
}
std::string name_of_case(const testing::TestParamInfo<Case> &info) { return info.param.name; }

class PartsOfOneRank : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(, PartsOfOneRank, testing::ValuesIn(all_cases()), name_of_case);

LABEL_PARAMS(one_of_many, "ClipsAGroup");
LABEL_PARAMS(one_of_many, "S*");
LABEL_PARAMS(one_of_many, "Reports");
LABEL_PARAMS(one_of_many, "Lamb");
LABEL_PARAMS(one_of_many, "NoMaster");
LABEL_PARAMS(one_of_many, "EarlyMixed");
LABEL_PARAMS(one_of_many, "EarlyLion");
TEST_P(PartsOfOneRank, GiveTheBitsOfTheUndividedStep) {
    const ShardTraining &training = GetParam().training;
    for (const int threads : {1, 3})
        for (const Parts parts : kAllParts) {
            SCOPED_TRACE(testing::Message() << name_of(parts) << ", " << threads << " threads");
            const Context context = make_context(threads);
            Scaler scaler, other_scaler;
            Trainer whole = training.trainer(context, training.desc, scaler);
            Trainer divided = training.trainer(context, training.desc, other_scaler);
            for (int64_t step = 1; step <= training.steps; ++step) {
                ASSERT_OK(whole.step(training.gradients(step)));
                ASSERT_OK(step_in_parts(divided, training.gradients(step), parts, uint64_t(step)));
                expect_same_training(divided, whole);
                if (HasFatalFailure()) return;
            }
        }
}

LABEL_PARAMS(one_of_many, "ClipsAGroup");
LABEL_PARAMS(one_of_many, "S*");
LABEL_PARAMS(one_of_many, "Reports");
LABEL_PARAMS(one_of_many, "Lamb");
LABEL_PARAMS(one_of_many, "NoMaster");
LABEL_PARAMS(one_of_many, "EarlyMixed");
LABEL_PARAMS(one_of_many, "EarlyLion");
// In one training, whatever was reused from the step before.
TEST_P(PartsOfOneRank, MayAlternateWithUndividedSteps) {
    const ShardTraining &training = GetParam().training;
    const Context context = make_context(1);
    Scaler scaler, other_scaler;
    Trainer whole = training.trainer(context, training.desc, scaler);
    Trainer divided = training.trainer(context, training.desc, other_scaler);
    std::vector<Array> gradients = training.gradients(1); // the same memory in all steps
    for (int64_t step = 1; step <= 12; ++step) {
        const std::vector<Array> now = training.gradients(step % 5 + 1);
        for (size_t t = 0; t < now.size(); ++t)
            if (now[t].tensor().data != nullptr && gradients[t].tensor().data != nullptr)
                gradients[t].write(now[t].text());
        ASSERT_OK(whole.step(gradients));
        if (step % 3 == 0) {
            ASSERT_OK(divided.step(gradients));
        } else {
            ASSERT_OK(step_in_parts(divided, gradients, kAllParts[size_t(step) % std::size(kAllParts)], 7));
        }
        expect_same_training(divided, whole);
        if (HasFatalFailure()) return;
    }
}

/// Makes an optimizer that of a rank.
void join(dsopt_optimizer_desc &desc, const Topology &topology, const NodeRank &rank, uint32_t flags) {
    desc.flags |= int32_t(topology.flag | flags);
    desc.bucket = topology.bucket;
    desc.data = rank.data.get();
    if (topology.per_node > 1) desc.node = rank.node.get();
}

class PartsOfRanks : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(, PartsOfRanks, testing::ValuesIn(all_cases()), name_of_case);

LABEL_PARAMS(one_of_many, "ClipsAGroup");
LABEL_PARAMS(one_of_many, "S*");
LABEL_PARAMS(one_of_many, "Reports");
LABEL_PARAMS(one_of_many, "Lamb");
LABEL_PARAMS(one_of_many, "NoMaster");
LABEL_PARAMS(one_of_many, "EarlyMixed");
LABEL_PARAMS(one_of_many, "EarlyLion");
// The caller has averaged the gradients. Ranks make different things ready.
TEST_P(PartsOfRanks, GiveTheBitsOfTheUndividedStepOfOneRank) {
    const ShardTraining &training = GetParam().training;
    if (std::string(GetParam().name) == "NoMaster") return;
    for (const Topology &topology : {Topology{1, 2, 0}, Topology{1, 3}, Topology{2, 2, DSOPT_OPTIMIZER_SHARD_NODE},
                                     Topology{1, 3, DSOPT_OPTIMIZER_SHARD, 8192}})
        with_nodes(topology.per_node, topology.nodes, [&](const NodeRank &rank) {
            dsopt_optimizer_desc desc = training.desc;
            Scaler scaler, one_scaler;
            Trainer whole = training.trainer(rank.ctx, desc, one_scaler);
            join(desc, topology, rank, DSOPT_OPTIMIZER_CHECK_RANKS);
            Trainer divided = training.trainer(rank.ctx, desc, scaler);
            for (int64_t step = 1; step <= training.steps; ++step) {
                const size_t number = size_t(rank.d * 2 + rank.l + step);
                ASSERT_OK(whole.step(training.gradients(step)));
                ASSERT_OK(
                    step_in_parts(divided, training.gradients(step), kAllParts[number % std::size(kAllParts)], number));
                expect_same_training(divided, whole);
                if (HasFatalFailure()) return;
            }
        });
}

// Each rank passes other gradients in another order, and some ranks make an undivided step. Buckets are exchanged while
// gradients are missing; without buckets the step exchanges all of them.
class AveragedParts : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(, AveragedParts, testing::ValuesIn(all_cases()), name_of_case);

LABEL_PARAMS(long_emulated, "ClipsAGroup");
LABEL_PARAMS(long_emulated, "Reports");
LABEL_PARAMS(long_emulated, "Lamb");
LABEL_PARAMS(long_emulated, "NoMaster");
LABEL_PARAMS(long_emulated, "EarlyMixed");
LABEL_PARAMS(long_emulated, "EarlyLion");
LABEL_PARAMS(one_of_many, "ClipsAGroup");
LABEL_PARAMS(one_of_many, "S*");
LABEL_PARAMS(one_of_many, "Reports");
LABEL_PARAMS(one_of_many, "Lamb");
LABEL_PARAMS(one_of_many, "NoMaster");
LABEL_PARAMS(one_of_many, "EarlyMixed");
LABEL_PARAMS(one_of_many, "EarlyLion");
TEST_P(AveragedParts, GiveTheBitsOfTheMean) {
    const ShardTraining &training = GetParam().training;
    uint32_t check = 0; // in every second topology
    for (const Topology &topology :
         {Topology{1, 3, 0}, Topology{1, 2, 0, 4096}, Topology{1, 3, DSOPT_OPTIMIZER_SHARD, 8192},
          Topology{2, 2, DSOPT_OPTIMIZER_SHARD, 4096}, Topology{2, 2, DSOPT_OPTIMIZER_SHARD_NODE, 16384},
          Topology{2, 2, 0, 4096}, Topology{1, 2, DSOPT_OPTIMIZER_SHARD, int64_t(1) << 20}}) {
        with_nodes(topology.per_node, topology.nodes, [&](const NodeRank &rank) {
            dsopt_optimizer_desc desc = training.desc;
            Scaler scaler, one_scaler;
            Trainer whole = training.trainer(rank.ctx, desc, one_scaler);
            join(desc, topology, rank, check | DSOPT_OPTIMIZER_AVERAGES);
            desc.buckets_in_flight = topology.bucket != 0 ? 1 + rank.l : 0;
            Trainer divided = training.trainer(rank.ctx, desc, scaler);
            for (int64_t step = 1; step <= training.steps; ++step) {
                ASSERT_OK(whole.step(mean_gradients(training, step, topology)));
                const size_t number = size_t(rank.d * 2 + rank.l + step) % (std::size(kAllParts) + 1);
                const std::vector<Array> own = own_gradients(training, step, rank);
                SCOPED_TRACE(testing::Message() << topology.name() << ", rank " << rank.d << "." << rank.l << ", step "
                                                << step << ", parts " << number << ", flags " << check);
                if (number == std::size(kAllParts)) {
                    ASSERT_OK(divided.step(own));
                } else {
                    ASSERT_OK(step_in_parts(divided, own, kAllParts[number], number));
                }
                expect_same_training(divided, whole);
                if (HasFatalFailure()) return;
            }
        });
        check ^= DSOPT_OPTIMIZER_CHECK_RANKS;
    }
}

TEST(PartsOfAccumulators, GiveTheBitsOfTheUndividedStep) {
    for (const Parts parts : {Parts::backward, Parts::groups, Parts::half})
        for (const double max_norm : {0.0, 0.5}) {
            ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}};
            training.desc = optimizer_desc(max_norm, DSOPT_OPTIMIZER_ACCUMULATE);
            const Context context = make_context(2);
            Scaler none;
            Trainer whole = training.trainer(context, training.desc, none);
            Trainer divided = training.trainer(context, training.desc, none);
            for (int64_t step = 1; step <= 3; ++step) {
                for (Trainer *trainer : {&whole, &divided}) ASSERT_OK(trainer->accumulate(training.gradients(step)));
                std::vector<Array> last = training.gradients(10 + step);
                const std::vector<std::vector<int64_t>> calls = calls_of(parts, int64_t(last.size()), uint64_t(step));
                std::vector<bool> passed(last.size());
                for (const auto &call : calls)
                    for (const int64_t i : call) passed[size_t(i)] = true;
                for (size_t i = 0; i < last.size(); ++i)
                    if (!passed[i]) last[i] = Array::absent(last[i].size());
                ASSERT_OK(whole.accumulate(last));
                ASSERT_OK(whole.step_accumulated());
                ASSERT_OK(step_in_parts(divided, last, parts, uint64_t(step), {}, DSOPT_READY_ACCUMULATED));
                expect_same_training(divided, whole);
                if (HasFatalFailure()) return;
            }
        }
}

TEST(PartsOfFamily, AreKeptForTheStep) {
    with_ranks(2, [&](int rank, const Context &context, const Comm &comm) {
        ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ONEBIT_ADAM)}, .steps = 6};
        training.groups[0].freeze_step = 3;
        dsopt_optimizer_desc desc = optimizer_desc(0.5);
        desc.data = comm.get();
        Scaler none;
        Trainer whole = training.trainer(context, desc, none), divided = training.trainer(context, desc, none);
        for (int64_t step = 1; step <= training.steps; ++step) {
            const auto gradients = [&] { return training.gradients(step < 4 ? step : step * 2 + rank); };
            ASSERT_OK(whole.step(gradients()));
            ASSERT_OK(step_in_parts(divided, gradients(), Parts::random, uint64_t(step)));
            expect_same_training(divided, whole);
            if (testing::Test::HasFatalFailure()) return;
        }
    });
}

} // namespace parts_bits_tests
