// SPDX-License-Identifier: Apache-2.0
// Scaler updates on the caller's arrays: words and scale equal those of a handle, and the handle does not change.
#include "support/functional.h"

using namespace test;

namespace apply_functional_scaler_tests {

struct ScalerSettings {
    const char *name;
    int32_t profile, flags;
    double init, factor, min, max;
    int32_t window, hysteresis;
};
void PrintTo(const ScalerSettings &settings, std::ostream *out) { *out << settings.name; }

constexpr ScalerSettings kScalerSettings[] = {
    {"Default", DSOPT_PROFILE_DEFAULT, 0, 0, 0, 0, 0, 0, 0},
    {"DefaultShortWindow", DSOPT_PROFILE_DEFAULT, 0, 64, 0, 0, 0, 3, 0},
    {"Fused", DSOPT_PROFILE_FUSED, 0, 0, 0, 0, 0, 4, 0},
    {"Unfused", DSOPT_PROFILE_UNFUSED, 0, 2, 0, 0, 0, 5, 0},
    {"Dynamic", DSOPT_PROFILE_DYNAMIC, 0, 8, 0, 0, 0, 4, 0},
    {"DynamicKeepAtMin", DSOPT_PROFILE_DYNAMIC, DSOPT_SCALER_KEEP_AT_MIN, 8, 0, 0, 0, 4, 0},
    {"FailAtMin", DSOPT_PROFILE_DEFAULT, DSOPT_SCALER_FAIL_AT_MIN, 4, 0, 1, 0, 6, 0},
    {"MinAndMax", DSOPT_PROFILE_DEFAULT, 0, 16, 3, 5, 100, 2, 0},
    {"Hysteresis", DSOPT_PROFILE_DEFAULT, 0, 1024, 0, 0, 0, 4, 3},
    {"Refill", DSOPT_PROFILE_DEFAULT, DSOPT_SCALER_REFILL, 1024, 1.5, 0, 0, 4, 2},
    {"GrowthAtWindow", DSOPT_PROFILE_DEFAULT, DSOPT_SCALER_GROWTH_AT_WINDOW, 64, 0, 0, 0, 3, 0},
    {"GrowthAtWindowRefill", DSOPT_PROFILE_DYNAMIC, DSOPT_SCALER_GROWTH_AT_WINDOW | DSOPT_SCALER_REFILL, 64, 0, 0, 0, 1,
     4},
    {"Static", DSOPT_PROFILE_DEFAULT, DSOPT_SCALER_STATIC, 128, 0, 0, 0, 0, 0},
    {"StaticShared", DSOPT_PROFILE_DEFAULT, DSOPT_SCALER_STATIC | DSOPT_SCALER_SHARED, 0, 0, 0, 0, 0, 0},
    {"Shared", DSOPT_PROFILE_DEFAULT, DSOPT_SCALER_SHARED, 64, 0, 0, 0, 3, 2},
    {"PastFp32", DSOPT_PROFILE_DEFAULT, 0, 1e38, 0, 0, 0, 1, 0},
};

Scaler scaler_of(const Context &ctx, const ScalerSettings &settings) {
    DSOPT_NEW(dsopt_scaler_desc, desc);
    desc.profile = settings.profile;
    desc.flags = settings.flags;
    desc.init = settings.init;
    desc.factor = settings.factor;
    desc.min = settings.min;
    desc.max = settings.max;
    desc.window = settings.window;
    desc.hysteresis = settings.hysteresis;
    return make_scaler(ctx, desc);
}

/// The two state tensors, aligned only to their elements.
struct Arrays {
    explicit Arrays(int garbage = 0xcc) : scale(DSOPT_DTYPE_F32, 1, 0), words(DSOPT_DTYPE_I32, 12, 0) {
        scale.corrupt(garbage);
        words.corrupt(garbage);
    }
    std::array<dsopt_tensor, 2> list() const { return {scale.tensor(), words.tensor()}; }
    std::string text() const { return scale.text() + words.text(); }
    Array scale, words;
};
/// A handle, whose state tensors are read through an optimizer with this scaler.
class Handle {
public:
    Handle(const Context &ctx, const ScalerSettings &settings) : scaler(scaler_of(ctx, settings)) {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.scaler = scaler.get();
        trainer = std::make_unique<Trainer>(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM),
                                            std::vector<Array>{Array(DSOPT_DTYPE_F32, 3, 1)});
    }
    std::string text() const {
        std::string all;
        for (const dsopt_state_info &info : trainer->state())
            if (std::strcmp(info.name, "loss_scale") == 0 || std::strcmp(info.name, "scaler") == 0)
                all += device_text(info.tensor.data, size_t(info.tensor.numel) * 4);
        return all;
    }
    Scaler scaler;
    std::unique_ptr<Trainer> trainer;
};

bool same_info(const dsopt_scaler_info &a, const dsopt_scaler_info &b) { return std::memcmp(&a, &b, sizeof a) == 0; }
dsopt_scaler_info decoded(const Arrays &arrays) {
    int32_t words[12];
    const std::string text = arrays.words.text();
    std::memcpy(words, text.data(), sizeof words);
    DSOPT_NEW(dsopt_scaler_info, info);
    must(dsopt_scaler_decode(words, &info));
    return info;
}

class ScalerArrays : public testing::TestWithParam<ScalerSettings> {};
INSTANTIATE_TEST_SUITE_P(, ScalerArrays, testing::ValuesIn(kScalerSettings),
                         [](const auto &info) { return info.param.name; });

TEST_P(ScalerArrays, UpdatesLikeTheHandle) {
    const Context ctx = make_context(1);
    for (const int overflow_interval : {2, 5, 1000}) {
        const Handle handle(ctx, GetParam()), other(ctx, GetParam());
        const std::string untouched = other.text();
        const Arrays arrays;
        const auto list = arrays.list();
        ASSERT_OK(dsopt_scaler_init_state(other.scaler.get(), list.data(), 2, nullptr));
        ASSERT_EQ(arrays.text(), handle.text());
        Random random(uint64_t(overflow_interval) + 7);
        for (int i = 0; i < 400; ++i) {
            const int32_t overflow = random.below(overflow_interval) == 0 ? random.below(3) - 1 : 0;
            const bool recorded = i % 9 == 4; // no flag: the step had no overflow
            const int32_t *const flag = recorded ? nullptr : on_device(overflow);
            must(dsopt_scaler_update(handle.scaler.get(), flag, nullptr));
            must(dsopt_scaler_update_arrays(other.scaler.get(), list.data(), 2, flag, nullptr));
            ASSERT_EQ(arrays.text(), handle.text()) << i;
            ASSERT_TRUE(same_info(decoded(arrays), info_of(handle.scaler))) << i;
        }
        EXPECT_EQ(other.text(), untouched);
    }
}

TEST_P(ScalerArrays, AcceptsAnOverrideInTheWords) {
    const Context ctx = make_context(1);
    const Handle handle(ctx, GetParam()), other(ctx, GetParam());
    Arrays arrays;
    const auto list = arrays.list();
    must(dsopt_scaler_init_state(other.scaler.get(), list.data(), 2, nullptr));
    const auto both = [&](int32_t overflow) {
        must(dsopt_scaler_update(handle.scaler.get(), on_device(overflow), nullptr));
        must(dsopt_scaler_update_arrays(other.scaler.get(), list.data(), 2, on_device(overflow), nullptr));
    };
    for (const int32_t overflow : {1, 0, 0, 1}) both(overflow);
    must(dsopt_scaler_set(handle.scaler.get(), DSOPT_SCALE_OVERRIDE, 12, nullptr));
    std::string words = arrays.words.text();
    const double forced = 12;
    const int32_t overridden = 1;
    const float scale = 12;
    std::memcpy(words.data() + 2 * 4, &forced, 8);
    std::memcpy(words.data() + 8 * 4, &overridden, 4);
    arrays.words.write(words);
    arrays.scale.write({reinterpret_cast<const char *>(&scale), 4});
    for (const int32_t overflow : {1, 0, 0, 1, 0}) {
        both(overflow);
        EXPECT_EQ(arrays.text(), handle.text());
        EXPECT_EQ(decoded(arrays).scale, 12);
        EXPECT_TRUE(same_info(decoded(arrays), info_of(handle.scaler)));
    }
}

TEST_P(ScalerArrays, InitializesFromTheDescriptor) {
    const Context ctx = make_context(1);
    const Handle handle(ctx, GetParam());
    const Arrays before, after(0x11);
    const auto lists = {before.list(), after.list()};
    must(dsopt_scaler_init_state(handle.scaler.get(), lists.begin()->data(), 2, nullptr));
    const int32_t overflow = 1;
    for (int i = 0; i < 3; ++i) must(dsopt_scaler_update(handle.scaler.get(), on_device(overflow), nullptr));
    must(dsopt_scaler_set(handle.scaler.get(), DSOPT_SCALE_VALUE, 3, nullptr));
    must(dsopt_scaler_init_state(handle.scaler.get(), (lists.begin() + 1)->data(), 2, nullptr));
    EXPECT_EQ(before.text(), after.text());
    EXPECT_NE(before.text(), handle.text());
    // dsopt_optimizer_init_state writes the same values.
    CallerMemory caller_memory(handle.trainer->opt(), {Array(DSOPT_DTYPE_F32, 3, 1)});
    must(caller_memory.init());
    EXPECT_EQ(caller_memory.blocks[caller_memory.index("loss_scale")].text() +
                  caller_memory.blocks[caller_memory.index("scaler")].text(),
              before.text());
}

TEST_P(ScalerArrays, UpdatesOnManyThreads) {
    const Context ctx = make_context(1);
    const Handle handle(ctx, GetParam());
    const Arrays arrays[3];
    std::vector<std::thread> threads;
    std::atomic<int> failed{0};
    for (const Arrays &own : arrays)
        threads.emplace_back([&] {
            const auto list = own.list();
            failed += dsopt_scaler_init_state(handle.scaler.get(), list.data(), 2, nullptr) != DSOPT_OK;
            for (int32_t i = 0; i < 50; ++i) {
                const int32_t overflow = i % 7 == 3;
                failed += dsopt_scaler_update_arrays(handle.scaler.get(), list.data(), 2, on_device(overflow),
                                                     nullptr) != DSOPT_OK;
            }
        });
    for (std::thread &thread : threads) thread.join();
    EXPECT_EQ(failed, 0);
    for (const Arrays &own : arrays) EXPECT_EQ(own.text(), arrays[0].text());
}

// ------------------------------------------------------------------------------------------------- several optimizers
TEST(SharedScaler, UpdatesArraysOfTwoOptimizersLikeTheHandle) {
    const Context ctx = make_context(1);
    for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED})
        for (const int32_t more : {0, int32_t(DSOPT_SCALER_STATIC)}) {
            const ScalerSettings settings{
                "", DSOPT_PROFILE_DEFAULT, DSOPT_SCALER_SHARED | more, 64, 0, 0, 0, more ? 0 : 2, 0};
            const Scaler stepping = scaler_of(ctx, settings), pure = scaler_of(ctx, settings);
            OptimizerSettings all_settings[2];
            all_settings[0].kind = DtypeMix::per_tensor;
            all_settings[1].algorithm = DSOPT_ALGORITHM_LAMB;
            std::vector<std::vector<Array>> weights;
            std::vector<Optimizer> steppers, pures;
            std::vector<std::unique_ptr<CallerMemory>> caller_memory;
            const Arrays arrays;
            const auto list = arrays.list();
            must(dsopt_scaler_init_state(pure.get(), list.data(), 2, nullptr));
            for (OptimizerSettings &settings : all_settings) {
                settings.compat = compat;
                weights.push_back(weights_of(settings));
                steppers.push_back(make_optimizer(ctx, settings, weights.back(), true, stepping.get()));
                pures.push_back(make_optimizer(ctx, settings, weights.back(), false, pure.get()));
                caller_memory.push_back(std::make_unique<CallerMemory>(pures.back().get(), weights.back()));
                must(caller_memory.back()->init());
            }
            Random random(3);
            for (int64_t call = 1; call <= 20; ++call) {
                const int bad = random.below(4); // which optimizer overflows, if any
                for (int i = 0; i < 2; ++i) {
                    std::vector<Array> grads = gradients_of(all_settings[i], 0, call);
                    if (bad == i || bad == 2) grads[3].set(1, kInf);
                    const std::vector<dsopt_tensor> gradients = list_of(grads);
                    DSOPT_NEW(dsopt_step, step);
                    step.grads = gradients.data();
                    step.count = int64_t(gradients.size());
                    must(dsopt_optimizer_step(steppers[size_t(i)].get(), &step));
                    CallerMemory &own = *caller_memory[size_t(i)];
                    std::vector<dsopt_tensor> state = own.state;
                    state[own.index("loss_scale")] = list[0];
                    state[own.index("scaler")] = list[1];
                    must(own.apply(grads, [&](dsopt_step &pure_step) { pure_step.state = state.data(); }));
                    Snapshot a = raw_snapshot(steppers[size_t(i)].get(), weights[size_t(i)]), b = own.snapshot();
                    const auto words = a.at("loss_scale -1") + a.at("scaler -1");
                    EXPECT_EQ(words, arrays.text()) << call;
                    for (Snapshot *all : {&a, &b}) all->erase("loss_scale -1"), all->erase("scaler -1");
                    ASSERT_TRUE(same(a, b)) << call << ", optimizer " << i;
                }
                int32_t words[12];
                std::memcpy(words, arrays.words.text().data(), sizeof words);
                EXPECT_EQ(words[9], bad != 3) << call;
                must(dsopt_scaler_update(stepping.get(), nullptr, nullptr));
                must(dsopt_scaler_update_arrays(pure.get(), list.data(), 2, nullptr, nullptr));
                ASSERT_TRUE(same_info(decoded(arrays), info_of(stepping))) << call;
                EXPECT_EQ(info_of(pure).updates, 0);
                EXPECT_EQ(info_of(pure).scale, 64);
            }
            EXPECT_GT(info_of(stepping).updates, 0);
        }
}

// ---------------------------------------------------------------------------------------------------------- refusals
TEST(ScalerUpdateArrays, RefusesInvalidListsAndWritesNothing) {
    const Context ctx = make_context(1);
    const Scaler scaler = make_scaler(ctx, 64, 2);
    const Arrays arrays;
    const std::string before = arrays.text();
    const int32_t overflow[12] = {1, 1};
    for (const bool transition : {false, true}) {
        const auto call = [&](const dsopt_tensor *list, int64_t count) {
            return transition ? dsopt_scaler_update_arrays(scaler.get(), list, count, overflow, nullptr)
                              : dsopt_scaler_init_state(scaler.get(), list, count, nullptr);
        };
        const auto good = arrays.list();
        EXPECT_TRUE(refused(call(nullptr, 2), DSOPT_ERR_ARGUMENT, "NULL"));
        EXPECT_TRUE(refused(call(good.data(), 1), DSOPT_ERR_SHAPE, "not 2"));
        EXPECT_TRUE(refused(call(good.data(), 3), DSOPT_ERR_SHAPE, "not 2"));
        const std::array<dsopt_tensor, 2> swapped{good[1], good[0]};
        EXPECT_TRUE(refused(call(swapped.data(), 2), DSOPT_ERR_DTYPE, "loss_scale"));
        for (const int i : {0, 1}) {
            const char *const name = i == 0 ? "loss_scale" : "scaler";
            auto list = good;
            list[size_t(i)].data = nullptr;
            EXPECT_TRUE(refused(call(list.data(), 2), DSOPT_ERR_ARGUMENT, name));
            list = good;
            list[size_t(i)].numel += 1;
            EXPECT_TRUE(refused(call(list.data(), 2), DSOPT_ERR_SHAPE, name));
            list = good;
            list[size_t(i)].dtype = DSOPT_DTYPE_F16;
            EXPECT_TRUE(refused(call(list.data(), 2), DSOPT_ERR_DTYPE, name));
            list = good;
            list[size_t(i)].data = static_cast<char *>(list[size_t(i)].data) + 2;
            EXPECT_TRUE(refused(call(list.data(), 2), DSOPT_ERR_ALIGNMENT, name));
        }
        EXPECT_TRUE(refused(transition ? dsopt_scaler_update_arrays(nullptr, good.data(), 2, overflow, nullptr)
                                       : dsopt_scaler_init_state(nullptr, good.data(), 2, nullptr),
                            DSOPT_ERR_ARGUMENT));
    }
    const auto good = arrays.list();
    auto *const misaligned = reinterpret_cast<const int32_t *>(reinterpret_cast<uintptr_t>(overflow) + 1);
    EXPECT_TRUE(
        refused(dsopt_scaler_update_arrays(scaler.get(), good.data(), 2, misaligned, nullptr), DSOPT_ERR_ALIGNMENT));
    EXPECT_EQ(arrays.text(), before);
    DSOPT_NEW(dsopt_scaler_info, info);
    EXPECT_TRUE(refused(dsopt_scaler_decode(nullptr, &info), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_scaler_decode(overflow, nullptr), DSOPT_ERR_ARGUMENT));
    info.size = 8;
    EXPECT_TRUE(refused(dsopt_scaler_decode(overflow, &info), DSOPT_ERR_VERSION));
}

} // namespace apply_functional_scaler_tests
