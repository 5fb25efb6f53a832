// SPDX-License-Identifier: Apache-2.0
// Hyper-parameters that are read and set between steps, and groups that are added after steps.
#include "support/harness.h"

using namespace test;

LABEL_FILE(one_thread);

namespace step_hyper_tests {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Key {
    int32_t key;
    double dsopt_group::*field;
    const char *name;
    double value; // not the default
};
constexpr Key kKeys[] = {{DSOPT_KEY_LR, &dsopt_group::lr, "lr", 0.125},
                         {DSOPT_KEY_BETA1, &dsopt_group::beta1, "beta1", 0.75},
                         {DSOPT_KEY_BETA2, &dsopt_group::beta2, "beta2", 0.9375},
                         {DSOPT_KEY_EPS, &dsopt_group::eps, "eps", 1e-3},
                         {DSOPT_KEY_WEIGHT_DECAY, &dsopt_group::weight_decay, "weight_decay", 0.3},
                         {DSOPT_KEY_GROUP_MAX_NORM, &dsopt_group::max_norm, "max_norm", 0.01},
                         {DSOPT_KEY_MIN_TRUST, &dsopt_group::min_trust, "min_trust", 1.5},
                         {DSOPT_KEY_MAX_TRUST, &dsopt_group::max_trust, "max_trust", 0.02}};
bool is_trust(int32_t key) { return key == DSOPT_KEY_MIN_TRUST || key == DSOPT_KEY_MAX_TRUST; }

TEST(GroupInit, SetsTheDocumentedDefaults) {
    for (const int32_t algorithm : kAlgorithms) {
        dsopt_group group;
        std::memset(&group, 0x55, sizeof group);
        ASSERT_OK(dsopt_group_init(&group, sizeof group, algorithm));
        EXPECT_EQ(group.size, sizeof group);
        EXPECT_EQ(group.algorithm, algorithm);
        EXPECT_EQ(group.flags, 0u);
        EXPECT_EQ(group.lr, 1e-3);
        EXPECT_EQ(group.beta1, 0.9);
        EXPECT_EQ(group.beta2, 0.999);
        EXPECT_EQ(group.eps, 1e-8);
        EXPECT_EQ(group.weight_decay, algorithm == DSOPT_ALGORITHM_ADAMW ? 0.01 : 0);
        EXPECT_EQ(group.max_norm, 0);
        EXPECT_EQ(group.min_trust, algorithm == DSOPT_ALGORITHM_LAMB ? 0.01 : 0);
        EXPECT_EQ(group.max_trust, algorithm == DSOPT_ALGORITHM_LAMB ? 10 : 0);
    }
}

TEST(GroupInit, RefusesUnknownAlgorithmsAndWritesNothing) {
    for (const int32_t algorithm : {INT32_MIN, -1, 0, 1, 1000, INT32_MAX}) {
        dsopt_group group;
        std::memset(&group, 0x55, sizeof group);
        const dsopt_group before = group;
        EXPECT_TRUE(refused(dsopt_group_init(&group, sizeof group, algorithm), DSOPT_ERR_ARGUMENT,
                            "algorithm|" + std::to_string(algorithm)));
        EXPECT_EQ(0, std::memcmp(&group, &before, sizeof group));
    }
    EXPECT_TRUE(
        refused(dsopt_group_init(nullptr, sizeof(dsopt_group), DSOPT_ALGORITHM_ADAM), DSOPT_ERR_ARGUMENT, "group"));
}

class GroupKeys : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, GroupKeys, testing::ValuesIn(kAlgorithms), algorithm_name);

TEST_P(GroupKeys, ReadBackAndApplyFromTheNextStep) {
    const bool lamb = GetParam() == DSOPT_ALGORITHM_LAMB;
    for (const Key &key : kKeys) {
        if (is_trust(key.key) && !lamb) continue;
        const Trainer changed(shapes_of({400}), make_group(GetParam())),
            plain(shapes_of({400}), make_group(GetParam()));
        changed.train(1);
        plain.train(1);
        // The same optimizer, created with the new value; the state is copied.
        dsopt_group group = make_group(GetParam());
        group.*key.field = key.value;
        const Trainer created(shapes_of({400}), group);
        std::memcpy(created.model.params[0].data(), changed.model.params[0].data(), 1600);
        for (int64_t i = 0; i < state_count(created.opt()); ++i) {
            std::vector<char> bytes(size_t(state_info(created.opt(), i).tensor.numel) * 4);
            must(dsopt_optimizer_export(changed.opt(), i, bytes.data(), bytes.size()));
            must(dsopt_optimizer_import(created.opt(), i, bytes.data(), bytes.size()));
        }
        EXPECT_EQ(get(changed.opt(), 0, key.key), make_group(GetParam()).*key.field);
        ASSERT_OK(dsopt_optimizer_set(changed.opt(), 0, key.key, key.value));
        EXPECT_EQ(get(changed.opt(), 0, key.key), key.value);
        EXPECT_EQ(get(changed.opt(), DSOPT_ALL_GROUPS, key.key), key.value);
        changed.train(2);
        plain.train(2);
        created.train(2);
        EXPECT_TRUE(same(changed.text(), created.text())) << key.name;
        EXPECT_FALSE(same(changed.text(), plain.text())) << key.name;
    }
}

TEST_P(GroupKeys, SwitchFlagsFromTheNextStep) {
    const bool inside = GetParam() == DSOPT_ALGORITHM_LAMB || GetParam() == DSOPT_ALGORITHM_ADAM_LEGACY;
    for (const auto &[key, flag] : {std::pair{DSOPT_KEY_BIAS_CORRECTION, DSOPT_GROUP_NO_BIAS_CORRECTION},
                                    {DSOPT_KEY_EPS_INSIDE_SQRT, DSOPT_GROUP_EPS_INSIDE_SQRT},
                                    {DSOPT_KEY_EPS_UNCORRECTED, DSOPT_GROUP_EPS_UNCORRECTED}}) {
        dsopt_group group = make_group(GetParam());
        group.eps = 1e-3;
        const Trainer changed(shapes_of({400}), group);
        const double normal = key == DSOPT_KEY_BIAS_CORRECTION ? 1 : 0;
        EXPECT_EQ(get(changed.opt(), 0, key), normal);
        if (key != DSOPT_KEY_BIAS_CORRECTION && inside != (key == DSOPT_KEY_EPS_INSIDE_SQRT)) {
            EXPECT_TRUE(refused(dsopt_optimizer_set(changed.opt(), 0, key, 1), DSOPT_ERR_UNSUPPORTED,
                                inside ? "eps_uncorrected" : "eps_inside_sqrt"));
            continue;
        }
        group.flags = uint32_t(flag);
        const Trainer created(shapes_of({400}), group);
        EXPECT_EQ(get(created.opt(), 0, key), 1 - normal);
        ASSERT_OK(dsopt_optimizer_set(changed.opt(), 0, key, 1 - normal));
        EXPECT_EQ(get(changed.opt(), 0, key), 1 - normal);
        changed.train(1);
        created.train(1);
        EXPECT_TRUE(same(changed.text(), created.text()));
        ASSERT_OK(dsopt_optimizer_set(changed.opt(), 0, key, normal));
        EXPECT_EQ(get(changed.opt(), 0, key), normal);
        for (const double value : {0.5, -1.0, 2.0, kInf, double(NAN)})
            EXPECT_TRUE(
                refused(dsopt_optimizer_set(changed.opt(), 0, key, value), DSOPT_ERR_ARGUMENT, std::to_string(key)));
        EXPECT_EQ(get(changed.opt(), 0, key), normal);
    }
}

TEST_P(GroupKeys, RefuseValuesOutOfRangeAndKeepTheOldOnes) {
    const Trainer trainer(shapes_of({5}), make_group(GetParam()));
    dsopt_optimizer *const opt = trainer.opt();
    const std::string before = hyper_text(opt) + trainer.text();
    for (const Key &key : kKeys) {
        std::vector<double> bad = {-1, -1e-300, 1e300, kInf, -kInf, NAN};
        if (key.key == DSOPT_KEY_BETA1 || key.key == DSOPT_KEY_BETA2) bad.insert(bad.end(), {1, 1.0000000001, 2});
        if (key.key == DSOPT_KEY_MIN_TRUST) bad.push_back(10.1);
        if (key.key == DSOPT_KEY_MAX_TRUST) bad.push_back(0.009);
        const bool has_key = !is_trust(key.key) || GetParam() == DSOPT_ALGORITHM_LAMB;
        for (const double value : bad)
            for (const int32_t group : {0, int32_t(DSOPT_ALL_GROUPS)}) {
                const char *const word =
                    is_trust(key.key) ? "trust" : key.name; // the error of one bound may name the other
                EXPECT_TRUE(refused(dsopt_optimizer_set(opt, group, key.key, value),
                                    has_key ? DSOPT_ERR_ARGUMENT : DSOPT_ERR_UNSUPPORTED, word));
            }
        if (has_key) continue;
        double value = -7;
        EXPECT_TRUE(refused(dsopt_optimizer_get(opt, 0, key.key, &value), DSOPT_ERR_UNSUPPORTED, "trust"));
        EXPECT_EQ(value, -7);
    }
    EXPECT_TRUE(same(hyper_text(opt) + trainer.text(), before));
}

TEST_P(GroupKeys, AcceptTheBoundsOfTheirRanges) {
    const Trainer trainer(shapes_of({5}), make_group(GetParam()));
    for (const auto &[key, value] : std::vector<std::pair<int32_t, double>>{{DSOPT_KEY_LR, 0},
                                                                            {DSOPT_KEY_LR, 3.4028234663852886e38},
                                                                            {DSOPT_KEY_BETA1, 0},
                                                                            {DSOPT_KEY_BETA1, 1 - 0x1p-53},
                                                                            {DSOPT_KEY_BETA2, 0},
                                                                            {DSOPT_KEY_EPS, 0},
                                                                            {DSOPT_KEY_WEIGHT_DECAY, 0},
                                                                            {DSOPT_KEY_GROUP_MAX_NORM, 0}}) {
        EXPECT_OK(dsopt_optimizer_set(trainer.opt(), 0, key, value));
        EXPECT_EQ(get(trainer.opt(), 0, key), value);
    }
}

TEST(OptimizerSet, RefusesWrongGroupsAndKeys) {
    const Trainer trainer(shapes_of({5}), make_group(DSOPT_ALGORITHM_ADAMW));
    dsopt_optimizer *const opt = trainer.opt();
    const std::string before = hyper_text(opt);
    double value = -7;
    for (const int32_t group : {-2, 1, INT32_MAX, INT32_MIN}) {
        EXPECT_TRUE(refused(dsopt_optimizer_set(opt, group, DSOPT_KEY_LR, 1), DSOPT_ERR_ARGUMENT,
                            "group|" + std::to_string(group)));
        EXPECT_TRUE(refused(dsopt_optimizer_get(opt, group, DSOPT_KEY_LR, &value), DSOPT_ERR_ARGUMENT,
                            "group|" + std::to_string(group)));
    }
    for (const int32_t key : {INT32_MIN, -1, 0, 31, 100000, INT32_MAX}) {
        EXPECT_TRUE(refused(dsopt_optimizer_set(opt, 0, key, 1), DSOPT_ERR_ARGUMENT, "key|" + std::to_string(key)));
        EXPECT_TRUE(
            refused(dsopt_optimizer_get(opt, 0, key, &value), DSOPT_ERR_ARGUMENT, "key|" + std::to_string(key)));
    }
    for (const int32_t key : {DSOPT_KEY_MAX_NORM, DSOPT_KEY_MAX_VALUE, DSOPT_KEY_SKIP_BUDGET, DSOPT_KEY_CALLS}) {
        EXPECT_TRUE(refused(dsopt_optimizer_set(opt, 0, key, 1), DSOPT_ERR_ARGUMENT, "DSOPT_ALL_GROUPS"));
        EXPECT_TRUE(refused(dsopt_optimizer_get(opt, 0, key, &value), DSOPT_ERR_ARGUMENT, "DSOPT_ALL_GROUPS"));
    }
    EXPECT_TRUE(refused(dsopt_optimizer_set(opt, 0, DSOPT_KEY_ALGORITHM, DSOPT_ALGORITHM_ADAM), DSOPT_ERR_UNSUPPORTED,
                        "algorithm"));
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_ALGORITHM), DSOPT_ALGORITHM_ADAMW);
    EXPECT_TRUE(refused(dsopt_optimizer_get(opt, 0, DSOPT_KEY_LR, nullptr), DSOPT_ERR_ARGUMENT, "value"));
    EXPECT_EQ(value, -7);
    EXPECT_TRUE(same(hyper_text(opt), before));
}

TEST(OptimizerSet, FailsWithoutGroups) {
    const Context context = make_context();
    const Optimizer opt = make_optimizer(context);
    double value = -7;
    EXPECT_TRUE(
        refused(dsopt_optimizer_get(opt.get(), DSOPT_ALL_GROUPS, DSOPT_KEY_LR, &value), DSOPT_ERR_STATE, "groups"));
    EXPECT_EQ(value, -7);
    // A call without any effect must not return success.
    EXPECT_NE(dsopt_optimizer_set(opt.get(), DSOPT_ALL_GROUPS, DSOPT_KEY_LR, 0.5), DSOPT_OK);
    EXPECT_NE(dsopt_optimizer_set(opt.get(), DSOPT_ALL_GROUPS, 12345, NAN), DSOPT_OK);
    int64_t groups = -7, params = -7;
    EXPECT_OK(dsopt_optimizer_count(opt.get(), &groups, &params));
    EXPECT_EQ(groups, 0);
    EXPECT_EQ(params, 0);
    EXPECT_OK(dsopt_optimizer_count(opt.get(), nullptr, nullptr));
}

TEST(OptimizerSet, SetsKeysOfTheWholeOptimizer) {
    const Trainer trainer(shapes_of({50}), make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(2.5));
    dsopt_optimizer *const opt = trainer.opt();
    EXPECT_EQ(get(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM), 2.5);
    ASSERT_OK(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM, 0));
    trainer.train(1);
    EXPECT_TRUE(std::isnan(report_of(opt).grad_norm)); // clipping is off
    ASSERT_OK(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM, 1e-3));
    trainer.train(2);
    EXPECT_GT(report_of(opt).divisor, 100);
    for (const double value : {-1.0, kInf, double(NAN)})
        EXPECT_TRUE(refused(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM, value), DSOPT_ERR_ARGUMENT,
                            "max_norm"));
    EXPECT_EQ(get(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM), 1e-3);

    ASSERT_OK(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_VALUE, 0.75));
    for (const double value : {-1.0, kInf, double(NAN)})
        EXPECT_TRUE(refused(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_VALUE, value), DSOPT_ERR_ARGUMENT,
                            "max_value"));
    EXPECT_EQ(get(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_VALUE), 0.75);
    ASSERT_OK(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_SKIP_BUDGET, 3));
    for (const double value : {-1.0, 0.5, 2147483648.0, kInf, double(NAN)})
        EXPECT_TRUE(refused(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_SKIP_BUDGET, value),
                            DSOPT_ERR_ARGUMENT, "budget"));
    EXPECT_EQ(get(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_SKIP_BUDGET), 3);

    EXPECT_EQ(get(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_CALLS), 2);
    for (const double value : {0.0, 7.0, 9007199254740992.0}) {
        ASSERT_OK(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_CALLS, value));
        EXPECT_EQ(get(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_CALLS), value);
        EXPECT_EQ(report_of(opt).calls, int64_t(value));
    }
    for (const double value : {-1.0, 0.5, 9007199254740994.0, 1e30, kInf, double(NAN)})
        EXPECT_TRUE(
            refused(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_CALLS, value), DSOPT_ERR_ARGUMENT, "calls"));
    EXPECT_EQ(steps(opt), std::vector<int32_t>{2}); // not the number of calls
}

TEST(OptimizerSet, LimitsEpsUncorrectedToCorrectedStandardMode) {
    const Trainer flagged(shapes_of({5}), make_group(DSOPT_ALGORITHM_ADAMW, 0, DSOPT_GROUP_EPS_UNCORRECTED));
    EXPECT_TRUE(refused(dsopt_optimizer_set(flagged.opt(), 0, DSOPT_KEY_BIAS_CORRECTION, 0), DSOPT_ERR_UNSUPPORTED,
                        "eps_uncorrected|bias correction"));
    EXPECT_EQ(get(flagged.opt(), 0, DSOPT_KEY_BIAS_CORRECTION), 1);
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.compat = DSOPT_COMPAT_DEEPSPEED;
    const Trainer compat(shapes_of({5}), make_group(DSOPT_ALGORITHM_ADAMW), desc);
    EXPECT_TRUE(refused(dsopt_optimizer_set(compat.opt(), 0, DSOPT_KEY_EPS_UNCORRECTED, 1), DSOPT_ERR_UNSUPPORTED,
                        "original|eps_uncorrected"));
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAM, 0, DSOPT_GROUP_EPS_UNCORRECTED);
    EXPECT_TRUE(refused(dsopt_optimizer_add_group(compat.opt(), &group, nullptr, 0), DSOPT_ERR_UNSUPPORTED,
                        "original|eps_uncorrected"));
}

TEST(OptimizerSet, ChangesAllGroupsOrNone) {
    Trainer trainer(shapes_of({5, 5, 5}), optimizer_desc());
    for (const int32_t algorithm : {DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ADAM_LEGACY, DSOPT_ALGORITHM_ADAMW})
        trainer.add(make_group(algorithm), 1);
    dsopt_optimizer *const opt = trainer.opt();
    EXPECT_OK(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_LR, 0.25));
    for (int32_t group = 0; group < 3; ++group) EXPECT_EQ(get(opt, group, DSOPT_KEY_LR), 0.25);
    EXPECT_OK(dsopt_optimizer_set(opt, 1, DSOPT_KEY_LR, 0.5));
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_LR), 0.25);
    EXPECT_EQ(get(opt, 1, DSOPT_KEY_LR), 0.5);
    // The last group does not support these keys, so no group is changed.
    const std::string before = hyper_text(opt);
    EXPECT_TRUE(refused(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_EPS_INSIDE_SQRT, 1), DSOPT_ERR_UNSUPPORTED,
                        "eps_inside_sqrt"));
    EXPECT_TRUE(
        refused(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_TRUST, 5), DSOPT_ERR_UNSUPPORTED, "trust"));
    EXPECT_TRUE(same(hyper_text(opt), before));
}

// -------------------------------------------------------------------------------------------------- groups after steps
class AddGroupAfterSteps : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, AddGroupAfterSteps, testing::ValuesIn(kAlgorithms), algorithm_name);

TEST_P(AddGroupAfterSteps, KeepsStateAndCountsOfOtherGroups) {
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16}) {
        Trainer trainer(shapes_of({300, 5000, 20}, dtype, DSOPT_DTYPE_F32), optimizer_desc(), context_desc(2));
        trainer.add(make_group(DSOPT_ALGORITHM_ADAMW), 1);
        trainer.train(1, 2);
        const std::vector<float> m = exported(trainer.opt(), 0, "exp_avg");
        trainer.add(make_group(GetParam()), 2);
        EXPECT_EQ(exported(trainer.opt(), 0, "exp_avg"), m);
        EXPECT_EQ(steps(trainer.opt()), (std::vector<int32_t>{2, 0, 0}));
        trainer.train(3, 5);
        EXPECT_EQ(steps(trainer.opt()), (std::vector<int32_t>{5, 3, 3}));
        EXPECT_EQ(report_of(trainer.opt()).calls, 5);
        for (size_t i = 0; i < 3; ++i) {
            const Shape shape{trainer.model.params[i].numel(), dtype, DSOPT_DTYPE_F32, 0, int64_t(i)};
            const Trainer alone({shape}, make_group(i == 0 ? int32_t(DSOPT_ALGORITHM_ADAMW) : GetParam()));
            alone.train(i == 0 ? 1 : 3, 5);
            EXPECT_TRUE(same(alone.model.text(), trainer.model.params[i].text())) << i;
        }
    }
}

TEST_P(AddGroupAfterSteps, KeepsTheOrderOfStateTensors) {
    Trainer trainer(shapes_of({3, 4}), optimizer_desc());
    trainer.add(make_group(GetParam()), 1);
    const int64_t before = state_count(trainer.opt());
    trainer.train(1);
    trainer.add(make_group(DSOPT_ALGORITHM_LAMB), 1);
    int64_t groups = 0, params = 0;
    must(dsopt_optimizer_count(trainer.opt(), &groups, &params));
    EXPECT_EQ(groups, 2);
    EXPECT_EQ(params, 2);
    EXPECT_EQ(state_count(trainer.opt()), before + 2 + (GetParam() != DSOPT_ALGORITHM_LAMB));
    EXPECT_EQ(exported(trainer.opt(), -1, "trust_ratio")[1], 0);
    std::vector<std::string> names;
    for (int64_t i = 0; i < state_count(trainer.opt()); ++i)
        names.push_back(std::to_string(state_info(trainer.opt(), i).param) + state_info(trainer.opt(), i).name);
    EXPECT_EQ(names, (std::vector<std::string>{"0exp_avg", "0exp_avg_sq", "1exp_avg", "1exp_avg_sq", "-1trust_ratio",
                                               "-1step"}));
    EXPECT_EQ(steps(trainer.opt()), (std::vector<int32_t>{1, 0}));
}

TEST(AddGroupWithBoundState, CopiesBoundCountersToOwnMemory) {
    Trainer trainer(shapes_of({30, 40}), optimizer_desc());
    trainer.add(make_group(DSOPT_ALGORITHM_ADAMW), 1);
    Array m(DSOPT_DTYPE_F32, 30, 0), v(DSOPT_DTYPE_F32, 30, 0), step(DSOPT_DTYPE_I32, 1, 0);
    const std::vector<dsopt_tensor> bound = {m.tensor(), v.tensor(), step.tensor()};
    ASSERT_OK(dsopt_optimizer_bind(trainer.opt(), DSOPT_BIND_STATE, bound.data(), 3));
    trainer.train(1, 3);
    EXPECT_EQ(step.as<int32_t>()[0], 3);
    trainer.add(make_group(DSOPT_ALGORITHM_ADAMW), 1);
    trainer.train(4, 4);
    EXPECT_EQ(steps(trainer.opt()), (std::vector<int32_t>{4, 1}));
    EXPECT_EQ(step.as<int32_t>()[0], 3); // too short for two parameters: no longer used
    EXPECT_EQ(state_info(trainer.opt(), 0).tensor.data, m.data());
}

TEST(RefusedAddGroup, LeavesTheOptimizerUnchanged) {
    Trainer trainer(shapes_of({30, 40}), optimizer_desc(1.0));
    trainer.add(make_group(DSOPT_ALGORITHM_ADAMW), 1);
    trainer.train(1);
    const std::string before = trainer.text() + hyper_text(trainer.opt());
    const int64_t count = state_count(trainer.opt());
    const dsopt_group group = make_group(DSOPT_ALGORITHM_LAMB);
    auto list = trainer.model.registered(1, 2);
    list.push_back(list[0]); // overlaps p1
    EXPECT_TRUE(refused(dsopt_optimizer_add_group(trainer.opt(), &group, list.data(), 2), DSOPT_ERR_OVERLAP, "p1|p2"));
    EXPECT_EQ(state_count(trainer.opt()), count);
    EXPECT_TRUE(same(trainer.text() + hyper_text(trainer.opt()), before));
    ASSERT_OK(dsopt_optimizer_add_group(trainer.opt(), &group, list.data(), 1));
}

} // namespace step_hyper_tests
