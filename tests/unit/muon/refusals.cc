// SPDX-License-Identifier: Apache-2.0
// Groups, parameters and values of Muon that are refused. Each text names the parameter or the field, and its value.
#include "support/file.h"
#include "support/muon.h"
#include "support/rules.h"

using namespace test;

LABEL_FILE(one_thread);

namespace muon_refusals_tests {

/// Expects that a parameter is refused, and that nothing is added.
void expect_param_refused(const Cut &cut, dsopt_status status, const std::string &words,
                          const dsopt_group &group = muon_group(),
                          const dsopt_optimizer_desc &desc = optimizer_desc()) {
    Trainer trainer(cut_shapes(std::vector<Cut>{cut}), desc);
    dsopt_param param = cut.registered();
    param.name = "weight";
    param.tensor = trainer.model.params[0].tensor();
    EXPECT_TRUE(refused(dsopt_optimizer_add_group(trainer.opt(), &group, &param, 1), status, "'weight'|" + words))
        << words;
    int64_t groups = -1, count = -1;
    must(dsopt_optimizer_count(trainer.opt(), &groups, &count));
    EXPECT_EQ(groups + count, 0);
}
Cut flat(int64_t numel, int64_t rows = 0, int64_t cols = 0) {
    Cut cut;
    cut.flat = numel;
    cut.rows = rows;
    cut.cols = cols;
    return cut;
}
template <class F> dsopt_group changed(F &&change) {
    dsopt_group group = muon_group();
    change(group);
    return group;
}

// -------------------------------------------------------------------------------------------------------- parameters
TEST(MuonRefusals, ParametersWithoutTwoDimsThatAreNotCut) {
    expect_param_refused(flat(12), DSOPT_ERR_ARGUMENT, "rows and cols");
    expect_param_refused({{12}}, DSOPT_ERR_ARGUMENT, "1 dims|rows and cols");
    expect_param_refused({{2, 3, 2}}, DSOPT_ERR_ARGUMENT, "3 dims|rows and cols");
    expect_param_refused({{2, 3, 2, 1}}, DSOPT_ERR_ARGUMENT, "4 dims|rows and cols");
}

TEST(MuonRefusals, RowsOrColsAlone) {
    expect_param_refused({{4, 6}, 2, 0}, DSOPT_ERR_ARGUMENT, "rows 2|cols 0");
    expect_param_refused({{4, 6}, 0, 3}, DSOPT_ERR_ARGUMENT, "rows 0|cols 3");
    expect_param_refused(flat(24, 4, 0), DSOPT_ERR_ARGUMENT, "rows 4|cols 0");
    expect_param_refused({{4, 6}, -1, 6}, DSOPT_ERR_ARGUMENT, "rows -1|cols 6");
    expect_param_refused({{4, 6}, 4, INT64_MIN}, DSOPT_ERR_ARGUMENT, "rows 4|cols -9223372036854775808");
    expect_param_refused({{4, 6}, int64_t(1) << 31, 6}, DSOPT_ERR_ARGUMENT, "2147483648 x 6|2^31");
    expect_param_refused({{4, 6}, 4, INT64_MAX}, DSOPT_ERR_ARGUMENT, "4 x 9223372036854775807|2^31");
}

TEST(MuonRefusals, MatricesThatDoNotTileTheTensor) {
    expect_param_refused({{4, 6}, 3, 6}, DSOPT_ERR_SHAPE, "24|3 x 6");
    expect_param_refused({{4, 6}, 4, 4}, DSOPT_ERR_SHAPE, "24|4 x 4");   // 4 divides numel, but not the last dim
    expect_param_refused({{4, 6}, 2, 12}, DSOPT_ERR_SHAPE, "24|2 x 12"); // a row of two rows
    expect_param_refused({{4, 6}, 8, 3}, DSOPT_ERR_SHAPE, "24|8 x 3");   // column blocks with rows of both halves
    expect_param_refused({{4, 6}, 5, 2}, DSOPT_ERR_SHAPE, "24|5 x 2");
    expect_param_refused({{2, 3, 4}, 2, 8}, DSOPT_ERR_SHAPE, "24|2 x 8");
    expect_param_refused({{2, 3, 4}, 2, 6}, DSOPT_ERR_SHAPE, "24|2 x 6");
    expect_param_refused(flat(24, 5, 4), DSOPT_ERR_SHAPE, "24|5 x 4");
    expect_param_refused(flat(24, 7, 1), DSOPT_ERR_SHAPE, "24|7 x 1");
    expect_param_refused({{4, 6}, 48, 1}, DSOPT_ERR_SHAPE, "24|48 x 1");
    expect_param_refused({{4, 6}, INT32_MAX, INT32_MAX}, DSOPT_ERR_SHAPE, "24|2147483647 x 2147483647");
}

TEST(MuonRefusals, MatricesInOtherAlgorithms) {
    for (const int32_t algorithm : kStandardRules) {
        const dsopt_group group = group_of(algorithm);
        expect_param_refused({{4, 6}, 4, 6}, DSOPT_ERR_UNSUPPORTED, "rows and cols|Muon", group);
        expect_param_refused({{4, 6}, 0, 6}, DSOPT_ERR_UNSUPPORTED, "rows and cols|Muon", group);
        expect_param_refused({{4, 6}, 0, 0, DSOPT_PARAM_ROWS_ARE_INPUTS}, DSOPT_ERR_UNSUPPORTED, "ROWS_ARE_INPUTS|Muon",
                             group);
    }
    for (const int32_t algorithm : kFamily)
        expect_param_refused({{4, 6}, 4, 6}, DSOPT_ERR_UNSUPPORTED, "rows and cols|Muon", group_of(algorithm));
}

TEST(MuonRefusals, PartsOfAMatrix) {
    expect_param_refused({{4, 6}, 0, 0, DSOPT_PARAM_MODEL_PARALLEL}, DSOPT_ERR_UNSUPPORTED, "MODEL_PARALLEL");
    Cut slice = {{4, 6}, 4, 3};
    slice.offset = 24;
    expect_param_refused(slice, DSOPT_ERR_UNSUPPORTED, "offset 24");
    // Where other rules use the offset.
    dsopt_optimizer_desc random = optimizer_desc(0, DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING);
    slice.param = DSOPT_DTYPE_BF16;
    expect_param_refused(slice, DSOPT_ERR_UNSUPPORTED, "offset 24", muon_group(), random);
    expect_param_refused(slice, DSOPT_ERR_UNSUPPORTED, "offset 24",
                         changed([](dsopt_group &g) { g.exp_avg_format = DSOPT_MOMENT_BF16_RANDOM; }));
}

// ------------------------------------------------------------------------------------------------------------ groups
TEST(MuonRefusals, ValuesOutOfRange) {
    for (const double bad : {0.0, 1.0, -0.5, 1.5, double(INFINITY), double(NAN)})
        expect_refused(changed([&](dsopt_group &g) { g.momentum = bad; }), DSOPT_ERR_ARGUMENT, "momentum");
    for (const double bad : {0.0, 0x1p-101, 1.5, double(INFINITY), double(NAN), -1e-7})
        expect_refused(changed([&](dsopt_group &g) { g.eps = bad; }), DSOPT_ERR_ARGUMENT, "eps");
    for (const int32_t bad : {0, -1, 100, INT32_MAX, INT32_MIN})
        expect_refused(changed([&](dsopt_group &g) { g.ns_steps = bad; }), DSOPT_ERR_ARGUMENT,
                       "ns_steps|" + std::to_string(bad));
    for (const int32_t bad : {-1, 3, INT32_MAX})
        expect_refused(changed([&](dsopt_group &g) { g.ns_schedule = bad; }), DSOPT_ERR_ARGUMENT,
                       "ns_schedule|" + std::to_string(bad));
    for (const int32_t bad : {-1, 4, INT32_MAX})
        expect_refused(changed([&](dsopt_group &g) { g.adjust = bad; }), DSOPT_ERR_ARGUMENT,
                       "adjust|" + std::to_string(bad));
    for (const int32_t bad : {0, int(DSOPT_DTYPE_I32), int(DSOPT_DTYPE_F64), int(DSOPT_DTYPE_F8_E4M3), -1, 1000})
        expect_refused(changed([&](dsopt_group &g) { g.ns_dtype = bad; }), DSOPT_ERR_ARGUMENT,
                       "ns_dtype|" + std::to_string(bad));
    for (const double bad : {double(INFINITY), double(NAN), 1e39, -1e300}) {
        expect_refused(changed([&](dsopt_group &g) { g.ns_a = bad; }), DSOPT_ERR_ARGUMENT, "ns_a");
        expect_refused(changed([&](dsopt_group &g) { g.ns_b = bad; }), DSOPT_ERR_ARGUMENT, "ns_b");
        expect_refused(changed([&](dsopt_group &g) { g.ns_c = bad; }), DSOPT_ERR_ARGUMENT, "ns_c");
    }
    expect_refused(changed([](dsopt_group &g) { g.lr = -1; }), DSOPT_ERR_ARGUMENT, "lr|-1");
    expect_refused(changed([](dsopt_group &g) { g.weight_decay = -1; }), DSOPT_ERR_ARGUMENT, "weight_decay|-1");
}

TEST(MuonRefusals, FieldsAndFlagsWithoutEffect) {
    const auto unsupported = [](double dsopt_group::*field, const char *name) {
        expect_refused(changed([&](dsopt_group &g) { g.*field = 0.5; }), DSOPT_ERR_UNSUPPORTED,
                       std::string(name) + "|muon");
    };
    unsupported(&dsopt_group::beta1, "beta1");
    unsupported(&dsopt_group::beta2, "beta2");
    unsupported(&dsopt_group::dampening, "dampening");
    unsupported(&dsopt_group::lr_decay, "lr_decay");
    unsupported(&dsopt_group::initial_accumulator_value, "initial_accumulator_value");
    unsupported(&dsopt_group::max_trust, "max_trust");
    expect_refused(changed([](dsopt_group &g) { g.flags |= DSOPT_GROUP_EPS_INSIDE_SQRT; }), DSOPT_ERR_UNSUPPORTED,
                   "eps_inside_sqrt|muon");
    expect_refused(changed([](dsopt_group &g) { g.flags |= DSOPT_GROUP_EPS_UNCORRECTED; }), DSOPT_ERR_UNSUPPORTED,
                   "eps_uncorrected|muon");
    expect_refused(changed([](dsopt_group &g) { g.flags |= DSOPT_GROUP_NON_FREEZE; }), DSOPT_ERR_UNSUPPORTED,
                   "non_freeze|muon");
    expect_refused(changed([](dsopt_group &g) { g.flags |= 1 << 20; }), DSOPT_ERR_ARGUMENT, "unknown");
    expect_refused(changed([](dsopt_group &g) { g.freeze_step = 5; }), DSOPT_ERR_UNSUPPORTED, "freeze_step");
}

TEST(MuonRefusals, BiasCorrectionWithoutNesterov) {
    expect_refused(changed([](dsopt_group &g) { g.flags = 0; }), DSOPT_ERR_UNSUPPORTED, "bias correction|nesterov");
    for (const int32_t good : {int(DSOPT_GROUP_NESTEROV), int(DSOPT_GROUP_NO_BIAS_CORRECTION),
                               DSOPT_GROUP_NESTEROV | DSOPT_GROUP_NO_BIAS_CORRECTION})
        EXPECT_NO_THROW(muon_trainer({matrix(2, 3)}, changed([&](dsopt_group &g) { g.flags = good; })));
}

TEST(MuonRefusals, ATripleBesideAPreset) {
    for (const int32_t preset : {DSOPT_NS_POLAR_EXPRESS, DSOPT_NS_YOU}) {
        expect_refused(changed([&](dsopt_group &g) { g.ns_schedule = preset; }), DSOPT_ERR_UNSUPPORTED,
                       "ns_a|ns_schedule");
        expect_refused(changed([&](dsopt_group &g) { g.ns_schedule = preset, g.ns_a = g.ns_b = 0; }),
                       DSOPT_ERR_UNSUPPORTED, "ns_c|ns_schedule");
        EXPECT_NO_THROW(muon_trainer(
            {matrix(2, 3)}, changed([&](dsopt_group &g) { g.ns_schedule = preset, g.ns_a = g.ns_b = g.ns_c = 0; })));
    }
}

TEST(MuonRefusals, MomentumInFormatsWithScales) {
    for (const int32_t format : {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_Q8})
        expect_refused(changed([&](dsopt_group &g) { g.exp_avg_format = format; }), DSOPT_ERR_UNSUPPORTED,
                       std::string("exp_avg_format|") + (format == DSOPT_MOMENT_Q8 ? "Q8" : "E4M3"));
    expect_refused(changed([](dsopt_group &g) { g.exp_avg_format = 5; }), DSOPT_ERR_ARGUMENT, "exp_avg_format|5");
    for (const int32_t format : {DSOPT_MOMENT_BF16, DSOPT_MOMENT_BF16_RANDOM, DSOPT_MOMENT_E4M3, DSOPT_MOMENT_Q8})
        expect_refused(changed([&](dsopt_group &g) { g.exp_avg_sq_format = format; }), DSOPT_ERR_UNSUPPORTED,
                       "exp_avg_sq_format|muon");
}

TEST(MuonRefusals, FieldsOfMuonInOtherAlgorithms) {
    for (const int32_t algorithm : kStandardRules) {
        const auto other = [&](auto &&change) {
            dsopt_group group = group_of(algorithm);
            change(group);
            return group;
        };
        expect_refused(other([](dsopt_group &g) { g.ns_a = 1; }), DSOPT_ERR_UNSUPPORTED, "ns_a|Muon");
        expect_refused(other([](dsopt_group &g) { g.ns_b = 1; }), DSOPT_ERR_UNSUPPORTED, "ns_b|Muon");
        expect_refused(other([](dsopt_group &g) { g.ns_c = 1; }), DSOPT_ERR_UNSUPPORTED, "ns_c|Muon");
        expect_refused(other([](dsopt_group &g) { g.ns_steps = 5; }), DSOPT_ERR_UNSUPPORTED, "ns_steps|Muon");
        expect_refused(other([](dsopt_group &g) { g.ns_schedule = 1; }), DSOPT_ERR_UNSUPPORTED, "ns_schedule|Muon");
        expect_refused(other([](dsopt_group &g) { g.ns_dtype = DSOPT_DTYPE_BF16; }), DSOPT_ERR_UNSUPPORTED,
                       "ns_dtype|Muon");
        expect_refused(other([](dsopt_group &g) { g.adjust = 1; }), DSOPT_ERR_UNSUPPORTED, "adjust|Muon");
    }
}

// -------------------------------------------------------------------------------------------------------- optimizers
TEST(MuonRefusals, CompatMode) {
    expect_refused(muon_group(), DSOPT_ERR_UNSUPPORTED, "muon|standard mode", DSOPT_COMPAT_DEEPSPEED);
}

TEST(MuonRefusals, TheOneBitFamilyBesideIt) {
    for (const int32_t algorithm : kFamily)
        for (const bool muon_first : {false, true}) {
            Trainer trainer(shapes_of({}), optimizer_desc());
            const dsopt_group groups[] = {muon_first ? muon_group() : group_of(algorithm),
                                          muon_first ? group_of(algorithm) : muon_group()};
            must(dsopt_optimizer_add_group(trainer.opt(), &groups[0], nullptr, 0));
            EXPECT_TRUE(refused(dsopt_optimizer_add_group(trainer.opt(), &groups[1], nullptr, 0), DSOPT_ERR_UNSUPPORTED,
                                "muon|1-bit"));
            int64_t count = 0;
            must(dsopt_optimizer_count(trainer.opt(), &count, nullptr));
            EXPECT_EQ(count, 1);
        }
}

TEST(MuonRefusals, SplitMatricesWithoutRanks) {
    const Context context = make_context();
    const dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_SPLIT_MATRICES);
    dsopt_optimizer *opt = nullptr;
    EXPECT_TRUE(refused(dsopt_optimizer_create(context.get(), &desc, &opt), DSOPT_ERR_UNSUPPORTED,
                        "SPLIT_MATRICES|no effect|data"));
    EXPECT_EQ(opt, nullptr);
}

TEST(MuonRefusals, SplitMatricesWithoutMuonAtTheFirstStep) {
    const Context context = make_context();
    const Comm comm = self_comm(context);
    const dsopt_optimizer_desc desc = desc_with(comm, DSOPT_COMPAT_NONE, DSOPT_OPTIMIZER_SPLIT_MATRICES);
    Trainer trainer(context, desc, group_of(DSOPT_ALGORITHM_ADAMW), std::vector<Array>{Array(DSOPT_DTYPE_F32, 6, 1)});
    const std::vector<Array> gradients = {Array(DSOPT_DTYPE_F32, 6, 1)};
    EXPECT_TRUE(refused(trainer.step(gradients), DSOPT_ERR_UNSUPPORTED, "SPLIT_MATRICES|no effect|muon"));
    EXPECT_EQ(trainer.weight()[0], 1);
}

TEST(MuonRefusals, SplitMatricesWithShardedState) {
    const Context context = make_context();
    const Comm comm = self_comm(context);
    const dsopt_optimizer_desc desc =
        desc_with(comm, DSOPT_COMPAT_NONE, DSOPT_OPTIMIZER_SPLIT_MATRICES | DSOPT_OPTIMIZER_SHARD);
    dsopt_optimizer *opt = nullptr;
    EXPECT_TRUE(refused(dsopt_optimizer_create(context.get(), &desc, &opt), DSOPT_ERR_UNSUPPORTED,
                        "SPLIT_MATRICES|no effect|SHARD"));
}

// -------------------------------------------------------------------------------------------------- keys and defaults
TEST(MuonGroup, HasTheDefaultsOfTorch) {
    dsopt_group group;
    must(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_MUON));
    EXPECT_EQ(group.lr, 1e-3);
    EXPECT_EQ(group.momentum, 0.95);
    EXPECT_EQ(group.weight_decay, 0.1);
    EXPECT_EQ(group.eps, 1e-7);
    EXPECT_EQ(group.flags, DSOPT_GROUP_NESTEROV | DSOPT_GROUP_NO_BIAS_CORRECTION);
    EXPECT_EQ(group.ns_a, 3.4445);
    EXPECT_EQ(group.ns_b, -4.7750);
    EXPECT_EQ(group.ns_c, 2.0315);
    EXPECT_EQ(group.ns_steps, 5);
    EXPECT_EQ(group.ns_schedule, DSOPT_NS_CONSTANT);
    EXPECT_EQ(group.ns_dtype, DSOPT_DTYPE_BF16);
    EXPECT_EQ(group.adjust, DSOPT_ADJUST_ORIGINAL);
    for (const double zero : {group.beta1, group.beta2, group.dampening, group.max_norm}) EXPECT_EQ(zero, 0);
}

TEST(MuonKeys, AreReadAndSet) {
    const Trainer trainer = muon_trainer({matrix(4, 6)});
    dsopt_optimizer *const opt = trainer.opt();
    const struct {
        int32_t key;
        double was, set;
    } keys[] = {{DSOPT_KEY_NS_STEPS, 5, 3},    {DSOPT_KEY_NS_A, 3.4445, 2}, {DSOPT_KEY_NS_B, -4.7750, -1.5},
                {DSOPT_KEY_NS_C, 2.0315, 0.5}, {DSOPT_KEY_ADJUST, 0, 3},    {DSOPT_KEY_MOMENTUM, 0.95, 0.5},
                {DSOPT_KEY_EPS, 1e-7, 1e-6},   {DSOPT_KEY_NESTEROV, 1, 0},  {DSOPT_KEY_WEIGHT_DECAY, 0.1, 0.3},
                {DSOPT_KEY_LR, 0.02, 0.5}};
    for (const auto &[key, was, set] : keys) {
        EXPECT_EQ(get(opt, 0, key), was) << key;
        EXPECT_OK(dsopt_optimizer_set(opt, 0, key, set));
        EXPECT_EQ(get(opt, 0, key), set) << key;
    }
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_NS_SCHEDULE), DSOPT_NS_CONSTANT);
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_NS_DTYPE), DSOPT_DTYPE_F32);
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_ALGORITHM), DSOPT_ALGORITHM_MUON);
}

TEST(MuonKeys, ScheduleSetsTheTriple) {
    const Trainer trainer = muon_trainer({matrix(4, 6)});
    dsopt_optimizer *const opt = trainer.opt();
    const auto triple = [&] {
        return std::vector<double>{get(opt, 0, DSOPT_KEY_NS_A), get(opt, 0, DSOPT_KEY_NS_B),
                                   get(opt, 0, DSOPT_KEY_NS_C)};
    };
    must(dsopt_optimizer_set(opt, 0, DSOPT_KEY_NS_A, 2));
    for (const int32_t preset : {DSOPT_NS_POLAR_EXPRESS, DSOPT_NS_YOU}) {
        EXPECT_OK(dsopt_optimizer_set(opt, 0, DSOPT_KEY_NS_SCHEDULE, preset));
        EXPECT_EQ(get(opt, 0, DSOPT_KEY_NS_SCHEDULE), preset);
        EXPECT_EQ(triple(), (std::vector<double>{0, 0, 0}));
        EXPECT_TRUE(refused(dsopt_optimizer_set(opt, 0, DSOPT_KEY_NS_B, -2), DSOPT_ERR_UNSUPPORTED, "ns_b|preset"));
    }
    EXPECT_OK(dsopt_optimizer_set(opt, 0, DSOPT_KEY_NS_SCHEDULE, DSOPT_NS_CONSTANT));
    EXPECT_EQ(triple(), (std::vector<double>{3.4445, -4.7750, 2.0315}));
    must(dsopt_optimizer_set(opt, 0, DSOPT_KEY_NS_A, 2));
    EXPECT_OK(dsopt_optimizer_set(opt, 0, DSOPT_KEY_NS_SCHEDULE, DSOPT_NS_CONSTANT)); // as it is: the triple stays
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_NS_A), 2);
}

TEST(MuonKeys, RefuseWhatAGroupRefuses) {
    const Trainer trainer = muon_trainer({matrix(4, 6)});
    dsopt_optimizer *const opt = trainer.opt();
    const std::string before = hyper_text(opt);
    const struct {
        int32_t key;
        double value;
        const char *word;
    } bad[] = {{DSOPT_KEY_NS_STEPS, 0, "ns_steps"},
               {DSOPT_KEY_NS_STEPS, 100, "ns_steps"},
               {DSOPT_KEY_NS_STEPS, 2.5, "ns_steps"},
               {DSOPT_KEY_NS_STEPS, double(NAN), "ns_steps"},
               {DSOPT_KEY_ADJUST, 4, "adjust"},
               {DSOPT_KEY_ADJUST, -1, "adjust"},
               {DSOPT_KEY_NS_SCHEDULE, 3, "ns_schedule"},
               {DSOPT_KEY_NS_SCHEDULE, 0.5, "ns_schedule"},
               {DSOPT_KEY_NS_A, double(INFINITY), "ns_a"},
               {DSOPT_KEY_NS_C, 1e39, "ns_c"},
               {DSOPT_KEY_MOMENTUM, 0, "momentum"},
               {DSOPT_KEY_MOMENTUM, 1, "momentum"},
               {DSOPT_KEY_EPS, 0, "eps"},
               {DSOPT_KEY_EPS, 2, "eps"}};
    for (const auto &[key, value, word] : bad)
        EXPECT_TRUE(refused(dsopt_optimizer_set(opt, 0, key, value), DSOPT_ERR_ARGUMENT, word)) << word << value;
    EXPECT_TRUE(refused(dsopt_optimizer_set(opt, 0, DSOPT_KEY_NS_DTYPE, DSOPT_DTYPE_BF16), DSOPT_ERR_UNSUPPORTED,
                        "ns_dtype|cannot change"));
    for (const int32_t key : {DSOPT_KEY_BETA1, DSOPT_KEY_BETA2, DSOPT_KEY_DAMPENING, DSOPT_KEY_MAX_TRUST,
                              DSOPT_KEY_EPS_INSIDE_SQRT, DSOPT_KEY_EPS_UNCORRECTED})
        EXPECT_TRUE(refused(dsopt_optimizer_set(opt, 0, key, 0.5),
                            key >= DSOPT_KEY_EPS_INSIDE_SQRT && key != DSOPT_KEY_DAMPENING ? DSOPT_ERR_ARGUMENT
                                                                                           : DSOPT_ERR_UNSUPPORTED))
            << key;
    EXPECT_OK(dsopt_optimizer_set(opt, 0, DSOPT_KEY_NESTEROV, 0));
    EXPECT_TRUE(refused(dsopt_optimizer_set(opt, 0, DSOPT_KEY_BIAS_CORRECTION, 1), DSOPT_ERR_UNSUPPORTED, "nesterov"));
    EXPECT_OK(dsopt_optimizer_set(opt, 0, DSOPT_KEY_NESTEROV, 1));
    EXPECT_EQ(hyper_text(opt), before);
    EXPECT_OK(dsopt_optimizer_set(opt, 0, DSOPT_KEY_BIAS_CORRECTION, 1));
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_BIAS_CORRECTION), 1);
    EXPECT_TRUE(refused(dsopt_optimizer_set(opt, 0, DSOPT_KEY_NESTEROV, 0), DSOPT_ERR_UNSUPPORTED, "nesterov"));
}

TEST(MuonKeys, AreNotOfOtherAlgorithms) {
    for (const int32_t algorithm : kStandardRules) {
        const Trainer trainer(shapes_of({4}), group_of(algorithm));
        for (int32_t key = DSOPT_KEY_NS_STEPS; key <= DSOPT_KEY_NS_DTYPE; ++key) {
            double value = 7;
            EXPECT_TRUE(refused(dsopt_optimizer_get(trainer.opt(), 0, key, &value), DSOPT_ERR_UNSUPPORTED)) << key;
            EXPECT_EQ(value, 7);
            EXPECT_TRUE(refused(dsopt_optimizer_set(trainer.opt(), 0, key, 1), DSOPT_ERR_UNSUPPORTED)) << key;
        }
    }
}

// A value that is set takes effect at the next step, as if the group had it from the start.
TEST(MuonKeys, TakeEffectAtTheNextStep) {
    const struct {
        int32_t key;
        double value;
    } keys[] = {{DSOPT_KEY_NS_STEPS, 2},     {DSOPT_KEY_NS_A, 3},     {DSOPT_KEY_NS_B, -4}, {DSOPT_KEY_NS_C, 1.5},
                {DSOPT_KEY_NS_SCHEDULE, 1},  {DSOPT_KEY_ADJUST, 1},   {DSOPT_KEY_LR, 0.1},  {DSOPT_KEY_MOMENTUM, 0.5},
                {DSOPT_KEY_WEIGHT_DECAY, 1}, {DSOPT_KEY_NESTEROV, 0}, {DSOPT_KEY_EPS, 0.5}};
    for (const auto &[key, value] : keys) {
        const std::vector<Cut> cuts = {matrix(24, 17)};
        const Trainer warm = muon_trainer(cuts), fresh = muon_trainer(cuts), plain = muon_trainer(cuts);
        warm.train(1);
        must(dsopt_optimizer_set(warm.opt(), 0, key, value));
        must(dsopt_optimizer_set(fresh.opt(), 0, key, value));
        // The first step of `warm` is undone.
        warm.model.params[0].write(fresh.model.params[0].text());
        must(dsopt_optimizer_reset(warm.opt(), DSOPT_RESET_MOMENTS | DSOPT_RESET_COUNTERS, nullptr));
        for (const Trainer *trainer : {&warm, &fresh, &plain}) {
            trainer->model.make_gradients(1);
            const Array &gradient = trainer->model.grads[0];
            if (key == DSOPT_KEY_EPS) // the norm is below eps
                for (size_t i = 0; i < gradient.size(); ++i) gradient.set(i, gradient[i] * 0x1p-10f);
            must(trainer->step(trainer->arguments()));
        }
        EXPECT_TRUE(same(warm.text(), fresh.text())) << key;
        EXPECT_FALSE(same(plain.model.text(), fresh.model.text())) << key;
    }
}

} // namespace muon_refusals_tests
