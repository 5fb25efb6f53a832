// SPDX-License-Identifier: Apache-2.0
// DSOPT_MASTERS_REMAINDER: a bf16 parameter and 16 more bits are the master that a separate tensor would be.
#include "support/caller_memory.h"
#include "support/formats.h"

using namespace test;

LABEL_FILE(one_thread);

namespace formats_remainder_tests {

constexpr int32_t kBf16 = DSOPT_DTYPE_BF16;

/// True if a master lies in the middle of two bf16 numbers, so that the two ways of rounding may differ.
bool is_tie(float master) { return (bits_of(master) & 0xffff) == 0x8000; }

void expect_equal_masters(const Trainer &remainders, const Trainer &masters) {
    for (size_t i = 0; i < masters.model.params.size(); ++i) {
        const std::vector<float> wanted = exported(masters.opt(), int64_t(i), "master");
        EXPECT_TRUE(same_bits(f32_state(remainders.opt(), int64_t(i), "remainder"), wanted)) << i;
        for (size_t k = 0; k < wanted.size(); ++k)
            if (!is_tie(wanted[k])) { ASSERT_EQ(remainders.model.params[i][k], masters.model.params[i][k]) << k; }
    }
}

/// Trains with both kinds of masters, with skipped steps, and compares.
void compare_masters(int32_t algorithm, double max_norm, int steps) {
    dsopt_optimizer_desc separate = format_desc(), split = format_desc(DSOPT_MASTERS_REMAINDER);
    separate.max_norm = split.max_norm = max_norm;
    dsopt_group group = group_of(algorithm);
    if (algorithm == DSOPT_ALGORITHM_SGD) group.momentum = 0.9;
    const std::vector<Shape> shapes = shapes_of({0, 1, 255, 256, 257, 4097}, kBf16, kBf16);
    const Trainer masters(shapes, group, separate), remainders(shapes, group, split);
    for (int t = 1; t <= steps; ++t)
        for (const Trainer *const trainer : {&masters, &remainders}) {
            trainer->model.make_gradients(uint64_t(t));
            dsopt_step step = trainer->arguments();
            if (t % 7 == 3) step.skip = on_device(int32_t(1));
            must(trainer->step(step));
        }
    expect_equal_masters(remainders, masters);
    EXPECT_FALSE(has_state(remainders.opt(), 1, "master"));
}

class RemainderMasters : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Rules, RemainderMasters, testing::ValuesIn(kStandardRules), algorithm_name);

TEST_P(RemainderMasters, MatchSeparateMastersBitwise) {
    for (const double max_norm : {0.0, 0.5}) compare_masters(GetParam(), max_norm, 10);
}
LABEL(numbers_only);
LABEL(long_emulated);
TEST_P(RemainderMasters, MatchSeparateMastersBitwiseAfter200Steps) { compare_masters(GetParam(), 0.5, 200); }

TEST(RemainderMaster, StartsAsTheParameter) {
    const Trainer trainer(shapes_of({700}, kBf16, kBf16), make_group(DSOPT_ALGORITHM_ADAMW),
                          format_desc(DSOPT_MASTERS_REMAINDER));
    EXPECT_EQ(f32_state(trainer.opt(), 0, "remainder"), trainer.model.params[0].floats());
}

TEST(RemainderMaster, IsNotNeededByF32Parameters) {
    const std::vector<Shape> shapes = {{300, DSOPT_DTYPE_F32}, {300, kBf16, kBf16}};
    const Trainer mixed(shapes, make_group(DSOPT_ALGORITHM_ADAMW), format_desc(DSOPT_MASTERS_REMAINDER));
    const Trainer separate(shapes, make_group(DSOPT_ALGORITHM_ADAMW));
    mixed.train(1, 3);
    separate.train(1, 3);
    EXPECT_FALSE(has_state(mixed.opt(), 0, "remainder"));
    EXPECT_FALSE(has_state(mixed.opt(), 0, "master"));
    EXPECT_TRUE(same(mixed.model.params[0].text(), separate.model.params[0].text()));
}

// The caller loads other weights without telling the engine: the master moves by at most half a unit.
TEST(RemainderMaster, FollowsWeightsThatTheCallerOverwrites) {
    Trainer trainer(shapes_of({300}, kBf16, kBf16), make_group(DSOPT_ALGORITHM_ADAMW),
                    format_desc(DSOPT_MASTERS_REMAINDER));
    trainer.train(1, 5);
    trainer.weight().fill(77);
    const std::vector<float> masters = f32_state(trainer.opt(), 0, "remainder");
    for (size_t i = 0; i < masters.size(); ++i)
        ASSERT_LE(std::fabs(masters[i] - trainer.weight()[i]), std::fabs(trainer.weight()[i]) / 128) << i;
    must(dsopt_optimizer_reset(trainer.opt(), DSOPT_RESET_MASTERS, nullptr));
    EXPECT_EQ(f32_state(trainer.opt(), 0, "remainder"), trainer.weight().floats());
}

TEST(RemainderMaster, OfAWeightThatTheCallerSetsToZeroIsNextToZero) {
    for (const uint16_t zero : {uint16_t(0), uint16_t(0x8000)}) {
        Trainer trainer(shapes_of({300}, kBf16, kBf16), make_group(DSOPT_ALGORITHM_ADAMW),
                        format_desc(DSOPT_MASTERS_REMAINDER));
        trainer.train(1, 5);
        const std::string text = exported_text(trainer.opt(), state_index(trainer.opt(), 0, "remainder"));
        std::vector<uint16_t> remainders(300);
        std::memcpy(remainders.data(), text.data(), text.size());
        ASSERT_GT(*std::max_element(remainders.begin(), remainders.end()), 0x8000);
        std::fill_n(trainer.weight().as<uint16_t>(), 300, zero);
        const std::vector<float> masters = f32_state(trainer.opt(), 0, "remainder");
        for (size_t i = 0; i < masters.size(); ++i) {
            ASSERT_LE(std::fabs(masters[i]), 0x1p-133f) << i;
            ASSERT_EQ(std::signbit(masters[i]), zero != 0) << i;
        }
        trainer.train(6, 6);
        for (float weight : trainer.weight().floats()) ASSERT_TRUE(std::isfinite(weight));
    }
}

TEST(RemainderMaster, ResetNeedsNoMemoryOfParameters) {
    Trainer trainer(shapes_of({300}, kBf16, kBf16), make_group(DSOPT_ALGORITHM_ADAMW),
                    format_desc(DSOPT_MASTERS_REMAINDER));
    trainer.train(1);
    const dsopt_tensor none{nullptr, 300, kBf16, 0};
    must(dsopt_optimizer_bind(trainer.opt(), DSOPT_BIND_PARAMS, &none, 1));
    EXPECT_OK(dsopt_optimizer_reset(trainer.opt(), DSOPT_RESET_MASTERS, nullptr));
    const std::string text = exported_text(trainer.opt(), state_index(trainer.opt(), 0, "remainder"));
    EXPECT_EQ(text, std::string(600, '\0'));
}

TEST(RemainderMaster, ImportSetsTheParameterToo) {
    const Trainer trainer(shapes_of({600}, kBf16, kBf16), make_group(DSOPT_ALGORITHM_ADAMW),
                          format_desc(DSOPT_MASTERS_REMAINDER));
    Random random(9);
    const std::vector<float> masters = random.floats(600);
    const int64_t index = state_index(trainer.opt(), 0, "remainder");
    must(dsopt_optimizer_import_f32(trainer.opt(), index, masters.data(), 600));
    EXPECT_EQ(f32_state(trainer.opt(), 0, "remainder"), masters);
    for (size_t i = 0; i < 600; ++i)
        if (!is_tie(masters[i])) { ASSERT_EQ(trainer.model.params[0][i], rounded(masters[i], kBf16)); }
}

// Outputs of a step: BF16 is the new parameter, F32 the master.
TEST(RemainderOutput, IsParameterOrMaster) {
    for (const int32_t dtype : kDtypes) {
        Trainer trainer(shapes_of({700}, kBf16, kBf16), make_group(DSOPT_ALGORITHM_ADAMW),
                        format_desc(DSOPT_MASTERS_REMAINDER));
        trainer.train(1, 2);
        const Array out(dtype, 700, 0);
        const dsopt_tensor list[] = {out.tensor()};
        for (const int32_t skip : {0, 1}) {
            trainer.model.make_gradients(3);
            dsopt_step step = trainer.arguments();
            step.out = list;
            if (skip != 0) step.skip = on_device(skip);
            must(trainer.step(step));
            const std::vector<float> masters = f32_state(trainer.opt(), 0, "remainder");
            for (size_t i = 0; i < 700; ++i)
                ASSERT_EQ(out[i], dtype == kBf16 ? trainer.weight()[i] : rounded(masters[i], dtype)) << i;
        }
    }
}

TEST(RemainderOutput, OnlyIsTheUpperHalfOfTheNewMaster) {
    const std::vector<Shape> shapes = shapes_of({1, 700, 4097}, kBf16, kBf16);
    const dsopt_optimizer_desc desc = format_desc(DSOPT_MASTERS_REMAINDER);
    Trainer in_place(shapes, make_group(DSOPT_ALGORITHM_LAMB), desc),
        apart(shapes, make_group(DSOPT_ALGORITHM_LAMB), desc);
    for (uint64_t t = 1; t <= 3; ++t) {
        in_place.train(t);
        const std::string before = apart.model.text();
        std::vector<Array> outs;
        for (const Array &param : apart.model.params) outs.emplace_back(kBf16, param.size(), 0.0f);
        const std::vector<dsopt_tensor> list = list_of(outs);
        apart.model.make_gradients(t);
        dsopt_step step = apart.arguments();
        step.flags |= DSOPT_STEP_OUT_ONLY;
        step.out = list.data();
        must(apart.step(step));
        EXPECT_TRUE(same(apart.model.text(), before));
        for (size_t i = 0; i < outs.size(); ++i) apart.model.params[i].write(outs[i].text());
    }
    EXPECT_TRUE(same(apart.text(), in_place.text()));
}

TEST(RemainderOutput, OnlyMustBeBf16) {
    Trainer trainer(shapes_of({300}, kBf16, kBf16), make_group(DSOPT_ALGORITHM_ADAMW),
                    format_desc(DSOPT_MASTERS_REMAINDER));
    trainer.train(1);
    const std::string before = trainer.text();
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16}) {
        const Array out(dtype, 300, 0);
        const dsopt_tensor list[] = {out.tensor()};
        dsopt_step step = trainer.arguments();
        step.out = list;
        step.flags = DSOPT_STEP_OUT_ONLY;
        EXPECT_TRUE(refused(trainer.step(step), DSOPT_ERR_DTYPE, "p0|BF16|" + dtype_name(dtype)));
        step.flags = DSOPT_STEP_DELTA;
        EXPECT_TRUE(refused(trainer.step(step), DSOPT_ERR_UNSUPPORTED, "DELTA|p0"));
    }
    EXPECT_TRUE(same(trainer.text(), before));
}

TEST(RemainderMaster, IsInUpdateNorms) {
    dsopt_optimizer_desc separate = format_desc(), split = format_desc(DSOPT_MASTERS_REMAINDER);
    separate.flags = split.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
    const std::vector<Shape> shapes = shapes_of({300, 5000}, kBf16, kBf16);
    const Trainer masters(shapes, make_group(DSOPT_ALGORITHM_ADAMW), separate);
    const Trainer remainders(shapes, make_group(DSOPT_ALGORITHM_ADAMW), split);
    masters.train(1, 3);
    remainders.train(1, 3);
    EXPECT_EQ(remainders.report().update_norm, masters.report().update_norm);
    EXPECT_EQ(remainders.report().weight_norm, masters.report().weight_norm);
}

TEST(RemainderMaster, OfNanStaysNan) {
    const Trainer trainer(shapes_of({256}, kBf16, kBf16), make_group(DSOPT_ALGORITHM_SGD),
                          format_desc(DSOPT_MASTERS_REMAINDER));
    std::vector<float> masters(256, 1);
    masters[3] = float_of(0x7fffffff);
    masters[4] = float_of(0xffffffff);
    masters[5] = kInf;
    masters[6] = float_of(0x7f7fffff);
    must(dsopt_optimizer_import_f32(trainer.opt(), state_index(trainer.opt(), 0, "remainder"), masters.data(), 256));
    const Array &weights = trainer.model.params[0];
    EXPECT_TRUE(std::isnan(weights[3]) && std::isnan(weights[4]));
    EXPECT_EQ(weights[5], kInf);
    EXPECT_EQ(weights[6], kInf); // rounds up, and is still exact with its remainder
    EXPECT_EQ(f32_state(trainer.opt(), 0, "remainder")[6], masters[6]);
}

} // namespace formats_remainder_tests
