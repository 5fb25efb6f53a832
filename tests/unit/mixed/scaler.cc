// SPDX-License-Identifier: Apache-2.0
// The loss scaler, alone and attached to optimizers.
#include "support/harness.h"

using namespace test;

LABEL_FILE(one_thread);

namespace mixed_scaler_tests {

/// A reference of the original's loss scalers, written from their specification (its "wrapper" has no hysteresis).
struct ReferenceScaler {
    double scale, factor = 2, min = 1, max = HUGE_VAL;
    int window = 1000, delayed_shift = 1;
    bool consecutive = false, raise_at_min = false, at_window = false;
    int iteration = 0, last_overflow = -1, hysteresis = 1, raised = 0, in_row = 0;

    void update(bool overflow) {
        in_row = overflow ? in_row + 1 : 0;
        if (overflow) {
            if (delayed_shift == 1 || hysteresis == 1) {
                if (scale == min && raise_at_min) {
                    ++raised;
                    return;
                }
                scale = std::max(scale / factor, min);
            } else {
                --hysteresis;
            }
            last_overflow = iteration;
        } else {
            if (consecutive) hysteresis = delayed_shift;
            const int since = iteration - last_overflow;
            if (at_window ? since % window == 0 : since - 1 > 0 && (since - 1) % window == 0) {
                hysteresis = delayed_shift;
                scale = std::min(scale * factor, max);
            }
        }
        ++iteration;
    }
};

void update(const Scaler &scaler, bool overflow) {
    const int32_t flag = overflow;
    must(dsopt_scaler_update(scaler.get(), on_device(flag), nullptr));
}

/// Returns the scale after each step: "." = good step, "X" = overflow.
std::vector<double> scales(const Scaler &scaler, const std::string &steps, std::vector<int> *hysteresis = nullptr) {
    std::vector<double> list;
    for (const char step : steps) {
        update(scaler, step == 'X');
        list.push_back(info_of(scaler).scale);
        EXPECT_EQ(on_host(dsopt_scaler_device_scale(scaler.get())), float(list.back()));
        if (hysteresis != nullptr) hysteresis->push_back(info_of(scaler).hysteresis);
    }
    return list;
}

dsopt_scaler_desc scaler_desc(double init, int window, int hysteresis, uint32_t flags) {
    DSOPT_NEW(dsopt_scaler_desc, desc);
    desc.init = init;
    desc.window = window;
    desc.hysteresis = hysteresis;
    desc.flags = flags;
    return desc;
}

TEST(ScalerGolden, GrowsAfterWindowGoodStepsAndHalvesOnOverflow) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 8, 2);
    EXPECT_EQ(scales(scaler, ".....X..."), (std::vector<double>{8, 8, 16, 16, 32, 16, 16, 16, 32}));
}

TEST(ScalerGolden, UsesUpHysteresisByIsolatedOverflows) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, scaler_desc(16, 3, 2, 0));
    std::vector<int> budget;
    EXPECT_EQ(scales(scaler, "....XX....X.X....", &budget),
              (std::vector<double>{16, 16, 16, 32, 32, 16, 16, 16, 16, 32, 32, 32, 16, 16, 16, 16, 32}));
    EXPECT_EQ(budget, (std::vector<int>{2, 2, 2, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2}));
}

TEST(ScalerGolden, RefillsHysteresisInEveryGoodStep) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, scaler_desc(16, 3, 2, DSOPT_SCALER_REFILL));
    std::vector<int> budget;
    EXPECT_EQ(scales(scaler, "....XX....X.X....", &budget),
              (std::vector<double>{16, 16, 16, 32, 32, 16, 16, 16, 16, 32, 32, 32, 32, 32, 32, 32, 64}));
    EXPECT_EQ(budget, (std::vector<int>{2, 2, 2, 2, 1, 1, 2, 2, 2, 2, 1, 2, 1, 2, 2, 2, 2}));
}

TEST(ScalerGolden, OnlyCountsAFailureAtMinInTheDynamicProfile) {
    const Context ctx = make_context(2);
    dsopt_scaler_desc desc = scaler_desc(4, 0, 0, 0);
    desc.profile = DSOPT_PROFILE_DYNAMIC;
    const Scaler scaler = make_scaler(ctx, desc);
    EXPECT_EQ(scales(scaler, "XX"), (std::vector<double>{2, 1}));
    const dsopt_scaler_info before = info_of(scaler);
    EXPECT_EQ(scales(scaler, "X"), (std::vector<double>{1}));
    const dsopt_scaler_info after = info_of(scaler);
    EXPECT_EQ(before.failures, 0);
    EXPECT_EQ(after.failures, 1);
    EXPECT_EQ(after.updates, before.updates);
    EXPECT_EQ(after.last_overflow, before.last_overflow);
    EXPECT_EQ(after.hysteresis, before.hysteresis);
}

TEST(ScalerGolden, StaysAtTheMinimumWithKeepAtMin) {
    const Context ctx = make_context(2);
    dsopt_scaler_desc desc = scaler_desc(4, 0, 0, DSOPT_SCALER_KEEP_AT_MIN);
    desc.profile = DSOPT_PROFILE_DYNAMIC;
    const Scaler scaler = make_scaler(ctx, desc);
    EXPECT_EQ(scales(scaler, "XXXXX"), (std::vector<double>{2, 1, 1, 1, 1}));
    EXPECT_EQ(info_of(scaler).failures, 0);
    EXPECT_EQ(info_of(scaler).updates, 5);
}

TEST(ScalerUpdate, GrowsUpToTheLargestPowerOfTwoOfFp32) {
    const Context ctx = make_context(2);
    dsopt_scaler_desc desc = scaler_desc(std::ldexp(1.0, 126), 1, 0, 0);
    const Scaler scaler = make_scaler(ctx, desc);
    scales(scaler, "......");
    EXPECT_EQ(info_of(scaler).scale, std::ldexp(1.0, 127));
    EXPECT_EQ(info_of(scaler).dynamic, std::ldexp(1.0, 127));
    scales(scaler, "X");
    EXPECT_EQ(info_of(scaler).scale, std::ldexp(1.0, 126));
}

LABEL(long_emulated);
TEST(ScalerUpdate, FollowsTheReferenceOnRandomSequences) {
    const Context ctx = make_context(1);
    Random random(1);
    for (const double factor : {2.0, 1.5, 3.0})
        for (const int window : {1, 2, 3, 7})
            for (const int hysteresis : {1, 2, 5})
                for (uint32_t flags = 0; flags < 64; ++flags) {
                    if (flags &
                        ~uint32_t(DSOPT_SCALER_REFILL | DSOPT_SCALER_FAIL_AT_MIN | DSOPT_SCALER_GROWTH_AT_WINDOW))
                        continue;
                    if ((flags & DSOPT_SCALER_REFILL) && hysteresis == 1) continue; // refused
                    dsopt_scaler_desc desc = scaler_desc(64, window, hysteresis, flags);
                    desc.factor = factor;
                    desc.min = random.below(2) ? 0.25 : 3;
                    desc.max = random.below(2) ? 512 : 1000;
                    const Scaler scaler = make_scaler(ctx, desc);
                    ReferenceScaler reference{.scale = 64,
                                              .factor = factor,
                                              .min = desc.min,
                                              .max = desc.max,
                                              .window = window,
                                              .delayed_shift = hysteresis,
                                              .consecutive = (flags & DSOPT_SCALER_REFILL) != 0,
                                              .raise_at_min = (flags & DSOPT_SCALER_FAIL_AT_MIN) != 0,
                                              .at_window = (flags & DSOPT_SCALER_GROWTH_AT_WINDOW) != 0,
                                              .hysteresis = hysteresis};
                    const double probability = std::array{0.0, 0.1, 0.4, 0.9}[size_t(random.below(4))];
                    for (int i = 0; i < 200; ++i) {
                        const bool overflow = random.uniform() < probability;
                        reference.update(overflow);
                        update(scaler, overflow);
                        const dsopt_scaler_info info = info_of(scaler);
                        ASSERT_EQ(info.dynamic, reference.scale)
                            << "call " << i << ", flags " << flags << ", window " << window;
                        ASSERT_EQ(info.scale, double(float(reference.scale)));
                        ASSERT_EQ(info.updates, reference.iteration);
                        ASSERT_EQ(info.last_overflow, reference.last_overflow);
                        ASSERT_EQ(info.hysteresis, reference.hysteresis);
                        ASSERT_EQ(info.failures, reference.raised);
                        ASSERT_EQ(info.skipped_in_row, reference.in_row);
                        ASSERT_GE(info.dynamic, desc.min);
                        ASSERT_LE(info.dynamic, desc.max);
                    }
                }
}

TEST(ScalerUpdate, GrowsAfterWindowGoodStepsInBothForms) {
    const Context ctx = make_context(1);
    for (const int window : {1, 2, 5, 1000})
        for (const bool at_window : {false, true}) {
            const Scaler scaler = make_scaler(ctx, 4, window, at_window ? DSOPT_SCALER_GROWTH_AT_WINDOW : 0);
            update(scaler, true); // 2
            for (double wanted = 2; wanted < 16; wanted *= 2) {
                // By default, the first growth takes one step more than `window`, later ones take `window` steps.
                const int steps = window + (!at_window && wanted == 2);
                for (int i = 1; i < steps; ++i) {
                    update(scaler, false);
                    ASSERT_EQ(info_of(scaler).scale, wanted) << "window " << window << ", good step " << i;
                }
                update(scaler, false);
                ASSERT_EQ(info_of(scaler).scale, 2 * wanted) << "window " << window << ", form " << at_window;
            }
        }
}

TEST(ScalerUpdate, ToleratesAsManyOverflowsAsItsHysteresis) {
    const Context ctx = make_context(1);
    for (const int hysteresis : {1, 2, 3, 8}) {
        const Scaler scaler = make_scaler(ctx, scaler_desc(16, 1000, hysteresis, 0));
        for (int i = 1; i < hysteresis; ++i) {
            update(scaler, true);
            EXPECT_EQ(info_of(scaler).scale, 16);
        }
        for (const double wanted : {8.0, 4.0, 2.0, 1.0, 1.0}) {
            update(scaler, true);
            EXPECT_EQ(info_of(scaler).scale, wanted);
        }
    }
}

TEST(ScalerUpdate, CountsButKeepsAStaticScale) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 128, 0, DSOPT_SCALER_STATIC);
    for (int i = 0; i < 3000; ++i) update(scaler, i % 3 == 0);
    EXPECT_EQ(info_of(scaler).scale, 128);
    EXPECT_EQ(info_of(scaler).updates, 3000);
    EXPECT_EQ(info_of(make_scaler(ctx, 0, 0, DSOPT_SCALER_STATIC)).scale, 1);
}

TEST(ScalerProfiles, SetTheInitialAndMinimumScale) {
    struct {
        int32_t profile;
        double init, min;
    } const profiles[] = {{DSOPT_PROFILE_DEFAULT, 65536, 1},
                          {DSOPT_PROFILE_FUSED, 4294967296.0, 1},
                          {DSOPT_PROFILE_UNFUSED, 65536, 0.25},
                          {DSOPT_PROFILE_DYNAMIC, 4294967296.0, 1}};
    const Context ctx = make_context(2);
    for (const auto &profile : profiles) {
        DSOPT_NEW(dsopt_scaler_desc, desc);
        desc.profile = profile.profile;
        const Scaler scaler = make_scaler(ctx, desc);
        EXPECT_EQ(info_of(scaler).scale, profile.init);
        EXPECT_EQ(info_of(scaler).last_overflow, -1);
        for (int i = 0; i < 1000; ++i) update(scaler, false);
        EXPECT_EQ(info_of(scaler).scale, profile.init) << "the window is 1000 good steps";
        update(scaler, false);
        EXPECT_EQ(info_of(scaler).scale, 2 * profile.init);
        for (int i = 0; i < 50; ++i) update(scaler, true);
        EXPECT_EQ(info_of(scaler).scale, profile.min);
        EXPECT_EQ(info_of(scaler).failures > 0, profile.profile == DSOPT_PROFILE_DYNAMIC);
    }
    dsopt_scaler *scaler = nullptr;
    ASSERT_OK(dsopt_scaler_create(ctx.get(), nullptr, &scaler));
    EXPECT_EQ(info_of(Scaler(scaler)).scale, 65536);
}

TEST(ScalerSet, ContinuesFromANewValue) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 8, 2);
    ASSERT_OK(dsopt_scaler_set(scaler.get(), DSOPT_SCALE_VALUE, 100, nullptr));
    EXPECT_EQ(scales(scaler, "...X"), (std::vector<double>{100, 100, 200, 100}));
}

TEST(ScalerSet, PausesUpdatesUntilAnOverrideIsCleared) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 8, 2);
    const Scaler without_override = make_scaler(ctx, 8, 2);
    (void)scales(scaler, "..");
    (void)scales(without_override, "..");
    ASSERT_OK(dsopt_scaler_set(scaler.get(), DSOPT_SCALE_OVERRIDE, 2, nullptr));
    EXPECT_EQ(scales(scaler, ".X.X...."), std::vector<double>(8, 2));
    EXPECT_EQ(info_of(scaler).overridden, 1);
    EXPECT_EQ(info_of(scaler).dynamic, 8);
    EXPECT_EQ(info_of(scaler).updates, 2);
    ASSERT_OK(dsopt_scaler_set(scaler.get(), DSOPT_SCALE_CLEAR_OVERRIDE, 0, nullptr));
    EXPECT_EQ(on_host(dsopt_scaler_device_scale(scaler.get())), 8);
    EXPECT_EQ(info_of(scaler).overridden, 0);
    EXPECT_EQ(scales(scaler, "...X...."), scales(without_override, "...X...."));
}

TEST(ScalerSet, RefusesInvalidScales) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 8, 2);
    for (const int32_t what : {DSOPT_SCALE_VALUE, DSOPT_SCALE_OVERRIDE})
        for (const double value : {0.0, -1.0, HUGE_VAL, double(kNaN), 1e39})
            EXPECT_TRUE(refused(dsopt_scaler_set(scaler.get(), what, value, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_scaler_set(scaler.get(), DSOPT_SCALE_CLEAR_OVERRIDE, 3, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_scaler_set(scaler.get(), 7, 1, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_scaler_set(nullptr, DSOPT_SCALE_VALUE, 1, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_EQ(info_of(scaler).scale, 8);
    EXPECT_EQ(info_of(scaler).overridden, 0);
}

TEST(ScalerCreate, RefusesValuesOutOfRangeOrWithoutEffect) {
    using Desc = dsopt_scaler_desc;
    struct {
        const char *what;
        void (*change)(Desc &);
        dsopt_status status;
    } const cases[] = {
        {"profile", [](Desc &d) { d.profile = 4; }, DSOPT_ERR_ARGUMENT},
        {"profile below", [](Desc &d) { d.profile = -1; }, DSOPT_ERR_ARGUMENT},
        {"flags", [](Desc &d) { d.flags = 64; }, DSOPT_ERR_ARGUMENT},
        {"init", [](Desc &d) { d.init = -1; }, DSOPT_ERR_ARGUMENT},
        {"init NaN", [](Desc &d) { d.init = double(kNaN); }, DSOPT_ERR_ARGUMENT},
        {"init past fp32", [](Desc &d) { d.init = 1e39; }, DSOPT_ERR_ARGUMENT},
        {"init below min", [](Desc &d) { d.init = 0.5; }, DSOPT_ERR_ARGUMENT},
        {"init above max", [](Desc &d) { d.init = 8, d.max = 4; }, DSOPT_ERR_ARGUMENT},
        {"factor 1", [](Desc &d) { d.factor = 1; }, DSOPT_ERR_ARGUMENT},
        {"factor Inf", [](Desc &d) { d.factor = HUGE_VAL; }, DSOPT_ERR_ARGUMENT},
        {"min", [](Desc &d) { d.min = -1; }, DSOPT_ERR_ARGUMENT},
        {"min NaN", [](Desc &d) { d.min = double(kNaN); }, DSOPT_ERR_ARGUMENT},
        {"max below min", [](Desc &d) { d.init = d.min = 4, d.max = 2; }, DSOPT_ERR_ARGUMENT},
        {"max NaN", [](Desc &d) { d.max = double(kNaN); }, DSOPT_ERR_ARGUMENT},
        {"window", [](Desc &d) { d.window = -1; }, DSOPT_ERR_ARGUMENT},
        {"hysteresis", [](Desc &d) { d.hysteresis = -2; }, DSOPT_ERR_ARGUMENT},
        {"static with window", [](Desc &d) { d.flags = DSOPT_SCALER_STATIC, d.window = 5; }, DSOPT_ERR_UNSUPPORTED},
        {"static with factor", [](Desc &d) { d.flags = DSOPT_SCALER_STATIC, d.factor = 2; }, DSOPT_ERR_UNSUPPORTED},
        {"static with min", [](Desc &d) { d.flags = DSOPT_SCALER_STATIC, d.min = 1; }, DSOPT_ERR_UNSUPPORTED},
        {"static with max", [](Desc &d) { d.flags = DSOPT_SCALER_STATIC, d.max = 8; }, DSOPT_ERR_UNSUPPORTED},
        {"static with hysteresis", [](Desc &d) { d.flags = DSOPT_SCALER_STATIC, d.hysteresis = 2; },
         DSOPT_ERR_UNSUPPORTED},
        {"static that fails", [](Desc &d) { d.flags = DSOPT_SCALER_STATIC | DSOPT_SCALER_FAIL_AT_MIN; },
         DSOPT_ERR_UNSUPPORTED},
        {"static growth", [](Desc &d) { d.flags = DSOPT_SCALER_STATIC | DSOPT_SCALER_GROWTH_AT_WINDOW; },
         DSOPT_ERR_UNSUPPORTED},
        {"refill", [](Desc &d) { d.flags = DSOPT_SCALER_REFILL; }, DSOPT_ERR_UNSUPPORTED},
        {"keep at min", [](Desc &d) { d.flags = DSOPT_SCALER_KEEP_AT_MIN; }, DSOPT_ERR_UNSUPPORTED},
        {"keep and fail at min",
         [](Desc &d) {
             d.profile = DSOPT_PROFILE_DYNAMIC, d.flags = DSOPT_SCALER_KEEP_AT_MIN | DSOPT_SCALER_FAIL_AT_MIN;
         },
         DSOPT_ERR_ARGUMENT},
        {"fused hysteresis", [](Desc &d) { d.profile = DSOPT_PROFILE_FUSED, d.hysteresis = 2; }, DSOPT_ERR_UNSUPPORTED},
        {"unfused hysteresis", [](Desc &d) { d.profile = DSOPT_PROFILE_UNFUSED, d.hysteresis = 2; },
         DSOPT_ERR_UNSUPPORTED},
        {"fused failing", [](Desc &d) { d.profile = DSOPT_PROFILE_FUSED, d.flags = DSOPT_SCALER_FAIL_AT_MIN; },
         DSOPT_ERR_UNSUPPORTED},
        {"short struct", [](Desc &d) { d.size = 8; }, DSOPT_ERR_VERSION},
    };
    const Context ctx = make_context(2);
    auto *const untouched = reinterpret_cast<dsopt_scaler *>(16);
    for (const auto &test : cases) {
        DSOPT_NEW(dsopt_scaler_desc, desc);
        test.change(desc);
        dsopt_scaler *scaler = untouched;
        EXPECT_TRUE(refused(dsopt_scaler_create(ctx.get(), &desc, &scaler), test.status)) << test.what;
        EXPECT_EQ(scaler, untouched) << test.what;
    }
    EXPECT_TRUE(refused(dsopt_scaler_create(ctx.get(), nullptr, nullptr), DSOPT_ERR_ARGUMENT, "scaler"));
    dsopt_scaler *scaler = nullptr;
    EXPECT_TRUE(refused(dsopt_scaler_create(nullptr, nullptr, &scaler), DSOPT_ERR_ARGUMENT, "ctx"));
    EXPECT_EQ(dsopt_scaler_device_scale(nullptr), nullptr);
    dsopt_scaler_destroy(nullptr);
}

TEST(ScalerDeviceScale, HasAFixedAddressAndFollowsTheScale) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 8, 1);
    const float *const scale = dsopt_scaler_device_scale(scaler.get());
    for (int i = 0; i < 20; ++i) {
        update(scaler, i % 4 == 3);
        must(dsopt_scaler_set(scaler.get(), i % 2 ? DSOPT_SCALE_OVERRIDE : DSOPT_SCALE_CLEAR_OVERRIDE, i % 2 ? 3 : 0,
                              nullptr));
        ASSERT_EQ(dsopt_scaler_device_scale(scaler.get()), scale);
        ASSERT_EQ(on_host(scale), float(info_of(scaler).scale));
    }
}

TEST(ScalerUpdate, RefusesAMisalignedFlag) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 8, 1);
    alignas(4) char memory[8] = {};
    EXPECT_TRUE(refused(dsopt_scaler_update(scaler.get(), reinterpret_cast<const int32_t *>(memory + 1), nullptr),
                        DSOPT_ERR_ALIGNMENT));
    EXPECT_EQ(info_of(scaler).updates, 0);
}

TEST(ScaleLoss, MultipliesOnceAndRoundsToTheDtypeOfTheLoss) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 24.5, 1, DSOPT_SCALER_STATIC);
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16})
        for (const float value : {0.7f, -3.3f, 0.0f, 1e-7f, 60000.0f, kInf, kNaN}) {
            Array loss(dtype, 1, value);
            const float wanted = rounded(rounded(value, dtype) * 24.5f, dtype);
            const dsopt_tensor tensor = loss.tensor();
            ASSERT_OK(dsopt_scaler_scale_loss(scaler.get(), &tensor, nullptr));
            EXPECT_TRUE(same_bits({loss[0]}, {wanted})) << dtype_name(dtype) << " " << value;
        }
    Array loss(DSOPT_DTYPE_F32, 2, 1);
    dsopt_tensor tensor = loss.tensor();
    EXPECT_TRUE(refused(dsopt_scaler_scale_loss(scaler.get(), &tensor, nullptr), DSOPT_ERR_SHAPE));
    tensor.numel = 1;
    tensor.dtype = DSOPT_DTYPE_I32;
    EXPECT_TRUE(refused(dsopt_scaler_scale_loss(scaler.get(), &tensor, nullptr), DSOPT_ERR_DTYPE));
    tensor.dtype = DSOPT_DTYPE_F32;
    tensor.data = nullptr;
    EXPECT_TRUE(refused(dsopt_scaler_scale_loss(scaler.get(), &tensor, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_scaler_scale_loss(scaler.get(), nullptr, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_EQ(loss[0], 1);
}

// ----------------------------------------------------------------------------------------------------- with optimizers
Trainer attached(const Context &ctx, const Scaler &scaler) {
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.scaler = scaler.get();
    return Trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), std::vector<Array>{Array(DSOPT_DTYPE_F16, 3, 1)});
}
std::vector<Array> gradient(bool overflow) { return {Array(DSOPT_DTYPE_F16, {1, overflow ? kInf : 0.5f, 2})}; }

TEST(ScalerShared, ChangesOnlyInUpdateAfterAnyOverflow) {
    const Context ctx = make_context(2);
    for (int bad = 0; bad < 4; ++bad) { // bit mask of the optimizers whose gradients overflow
        const Scaler scaler = make_scaler(ctx, 8, 1, DSOPT_SCALER_SHARED);
        Trainer a = attached(ctx, scaler), b = attached(ctx, scaler);
        ASSERT_OK(a.step(gradient(bad & 1)));
        ASSERT_OK(b.step(gradient(bad & 2)));
        EXPECT_EQ(info_of(scaler).scale, 8);
        EXPECT_EQ(info_of(scaler).updates, 0);
        EXPECT_EQ(a.report().last_skipped, bad & 1);
        EXPECT_EQ(b.report().last_skipped, bad >> 1);
        ASSERT_OK(dsopt_scaler_update(scaler.get(), nullptr, nullptr));
        EXPECT_EQ(info_of(scaler).updates, 1);
        EXPECT_EQ(info_of(scaler).scale, bad ? 4 : 8);
        // The update has cleared the recorded overflow.
        ASSERT_OK(dsopt_scaler_update(scaler.get(), nullptr, nullptr));
        EXPECT_EQ(info_of(scaler).scale, bad ? 4 : 16);
    }
}

TEST(ScalerShared, AllowsASecondOptimizerOnlyWithTheFlag) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 8, 1);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.scaler = scaler.get();
    {
        const Trainer first(ctx, desc);
        dsopt_optimizer *second = nullptr;
        EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &second), DSOPT_ERR_STATE, "SHARED"));
        EXPECT_EQ(second, nullptr);
    }
    const Trainer another(ctx, desc);
}

TEST(ScalerAttached, StaysAliveWithoutItsHandle) {
    const Context ctx = make_context(2);
    Scaler scaler = make_scaler(ctx, 8, 1);
    Trainer trainer = attached(ctx, scaler);
    const float *const scale = dsopt_scaler_device_scale(scaler.get());
    scaler.reset();
    for (const float wanted : {8.0f, 16.0f, 32.0f}) {
        ASSERT_OK(trainer.step(gradient(false)));
        EXPECT_EQ(on_host(scale), wanted);
    }
    EXPECT_EQ(trainer.report().loss_scale, 32);
}

TEST(ScalerLoad, ContinuesWithTheSameSequence) {
    const Context ctx = make_context(2);
    const std::string steps = "...X..XX.....X.........X.X....X..";
    for (size_t middle = 0; middle < steps.size(); middle += 4) {
        dsopt_scaler_desc desc = scaler_desc(64, 3, 3, DSOPT_SCALER_REFILL | DSOPT_SCALER_GROWTH_AT_WINDOW);
        desc.min = 2;
        desc.max = 300;
        desc.factor = 1.5;
        const Scaler saved = make_scaler(ctx, desc),
                     loaded = make_scaler(ctx, 1024, 7); // the file also contains window, factor and limits
        Trainer a = attached(ctx, saved), b = attached(ctx, loaded);
        for (size_t i = 0; i < middle; ++i) must(a.step(gradient(steps[i] == 'X')));
        MemoryFile file;
        ASSERT_OK(file.save(a));
        ASSERT_OK(file.load(b));
        for (size_t i = middle; i < steps.size(); ++i) {
            must(a.step(gradient(steps[i] == 'X')));
            must(b.step(gradient(steps[i] == 'X')));
            const dsopt_scaler_info x = info_of(saved), y = info_of(loaded);
            ASSERT_EQ(std::memcmp(&x, &y, sizeof x), 0) << "saved after " << middle << ", step " << i;
        }
    }
}

TEST(ScalerLoad, KeepsTheScalerWithNoScaler) {
    const Context ctx = make_context(2);
    const Scaler saved = make_scaler(ctx, 8, 1), kept = make_scaler(ctx, 512, 5);
    Trainer a = attached(ctx, saved), b = attached(ctx, kept);
    for (int i = 0; i < 3; ++i) must(a.step(gradient(false)));
    MemoryFile file;
    ASSERT_OK(file.save(a));
    const dsopt_scaler_info before = info_of(kept);
    ASSERT_OK(file.load(b, DSOPT_IO_NO_SCALER));
    const dsopt_scaler_info after = info_of(kept);
    EXPECT_EQ(std::memcmp(&before, &after, sizeof before), 0);
    EXPECT_EQ(b.state("step"), a.state("step"));
}

TEST(ScalerLoad, RestoresAnOverride) {
    const Context ctx = make_context(2);
    const Scaler saved = make_scaler(ctx, 8, 1), loaded = make_scaler(ctx, 8, 1);
    Trainer a = attached(ctx, saved), b = attached(ctx, loaded);
    must(dsopt_scaler_set(saved.get(), DSOPT_SCALE_OVERRIDE, 3, nullptr));
    MemoryFile file;
    ASSERT_OK(file.save(a));
    ASSERT_OK(file.load(b));
    EXPECT_EQ(info_of(loaded).scale, 3);
    EXPECT_EQ(info_of(loaded).dynamic, 8);
    EXPECT_EQ(on_host(dsopt_scaler_device_scale(loaded.get())), 3);
}

TEST(ScalerLoad, RefusesACheckpointWithoutAScale) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 8, 1);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    Trainer without(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), std::vector<Array>{Array(DSOPT_DTYPE_F16, 3, 1)});
    Trainer with = attached(ctx, scaler);
    MemoryFile file;
    ASSERT_OK(file.save(without));
    EXPECT_TRUE(refused(file.load(with), DSOPT_ERR_MISMATCH, "loss_scale"));
    EXPECT_OK(file.load(with, DSOPT_IO_NO_SCALER));
    ASSERT_OK(file.save(with));
    EXPECT_OK(file.load(without)); // a scale in the file is ignored without a scaler
}

TEST(ScalerLoad, RefusesADynamicScaleForAStaticScaler) {
    const Context ctx = make_context(2);
    const Scaler saved = make_scaler(ctx, 8, 1), fixed = make_scaler(ctx, 8, 0, DSOPT_SCALER_STATIC);
    Trainer a = attached(ctx, saved), b = attached(ctx, fixed);
    MemoryFile file;
    ASSERT_OK(file.save(a));
    EXPECT_TRUE(refused(file.load(b), DSOPT_ERR_MISMATCH, "static"));
    EXPECT_OK(file.load(b, DSOPT_IO_NO_SCALER));
}

TEST(ScalerExport, NeedsNoMemoryOfParameters) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 4096);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.scaler = scaler.get();
    dsopt_optimizer *raw = nullptr;
    must(dsopt_optimizer_create(ctx.get(), &desc, &raw));
    const Optimizer opt(raw);
    dsopt_group group;
    must(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    dsopt_param param{};
    param.tensor = {nullptr, 5, DSOPT_DTYPE_F16, 0}; // a master cannot be initialized
    must(dsopt_optimizer_add_group(raw, &group, &param, 1));
    int64_t count = 0;
    must(dsopt_optimizer_state_count(raw, &count));
    for (int64_t i = 0; i < count; ++i) {
        DSOPT_NEW(dsopt_state_info, info);
        must(dsopt_optimizer_state(raw, i, &info));
        std::vector<char> bytes(size_t(info.tensor.numel) * 4);
        const dsopt_status status = dsopt_optimizer_export(raw, i, bytes.data(), bytes.size());
        const std::string name = info.name;
        if (name != "loss_scale" && name != "scaler") {
            EXPECT_TRUE(refused(status, DSOPT_ERR_STATE, "no memory")) << name;
            continue;
        }
        ASSERT_OK(status) << name;
        if (name == "loss_scale") {
            float scale = 0;
            std::memcpy(&scale, bytes.data(), sizeof scale);
            EXPECT_EQ(scale, 4096.0f);
        } else {
            int32_t words[12];
            std::memcpy(words, bytes.data(), sizeof words);
            DSOPT_NEW(dsopt_scaler_info, decoded);
            must(dsopt_scaler_decode(words, &decoded));
            EXPECT_EQ(decoded.scale, 4096.0);
            EXPECT_EQ(decoded.last_overflow, -1);
        }
    }
}

} // namespace mixed_scaler_tests
