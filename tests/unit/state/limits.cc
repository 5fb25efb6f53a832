// SPDX-License-Identifier: Apache-2.0
// Counters and scales at the limits of their ranges. Every state that a program can reach can be saved and loaded.
// State that no step can produce is refused by name from import, bound memory and files.
#include "support/harness.h"
#include <cfloat>
#include <ctime>

using namespace test;

LABEL_FILE(one_thread);

namespace state_limits_tests {

constexpr double kLargestPowerOfTwo = 0x1p127;

std::vector<int32_t> all_algorithms() {
    std::vector<int32_t> list(std::begin(kStandardRules), std::end(kStandardRules));
    list.insert(list.end(), std::begin(kFamily), std::end(kFamily));
    return list;
}
bool is_family(int32_t algorithm) {
    return std::find(std::begin(kFamily), std::end(kFamily), algorithm) != std::end(kFamily);
}

/// An optimizer with one scaler and one parameter.
struct Scaled {
    explicit Scaled(int32_t algorithm, int32_t profile = DSOPT_PROFILE_DEFAULT, int32_t compat = DSOPT_COMPAT_NONE) :
        context(make_context()),
        load_resets(is_family(algorithm) && compat != DSOPT_COMPAT_NONE) {
        DSOPT_NEW(dsopt_scaler_desc, desc);
        desc.profile = profile;
        desc.window = 1;
        scaler = make_scaler(context, desc);
        dsopt_optimizer_desc optimizer = optimizer_desc();
        optimizer.scaler = scaler.get();
        optimizer.compat = compat;
        trainer = std::make_unique<Trainer>(context, optimizer, group_of(algorithm),
                                            std::vector<Array>{Array(DSOPT_DTYPE_F32, {1, 2, 3, 4})});
    }
    dsopt_status step(float gradient = 0) { return trainer->step({Array(DSOPT_DTYPE_F32, 4, gradient)}); }
    /// True if the optimizer can be saved and loaded and is then unchanged.
    testing::AssertionResult loads_unchanged() {
        MemoryFile memory_file;
        if (memory_file.save(*trainer) != DSOPT_OK) return testing::AssertionFailure() << dsopt_last_error();
        const std::string before = trainer->text() + hyper_text(trainer->opt());
        if (memory_file.load(*trainer) != DSOPT_OK) return testing::AssertionFailure() << dsopt_last_error();
        if (load_resets) return testing::AssertionSuccess();
        return same(trainer->text() + hyper_text(trainer->opt()), before);
    }
    dsopt_status import(const std::string &name, const void *words, size_t bytes, int64_t param = -1) {
        return dsopt_optimizer_import(trainer->opt(), state_index(trainer->opt(), param, name), words, bytes);
    }

    Context context;
    Scaler scaler;
    std::unique_ptr<Trainer> trainer;
    bool load_resets; // the 1-bit family in compat mode: a load resets some state (docs/compat.md)
};

TEST(ScaleRange, EndsAtTheLargestPowerOfTwoInEveryProfile) {
    for (int32_t profile = DSOPT_PROFILE_DEFAULT; profile <= DSOPT_PROFILE_DYNAMIC; ++profile)
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
            SCOPED_TRACE(profile);
            Scaled run(DSOPT_ALGORITHM_ADAMW, profile, compat);
            for (int i = 0; i < 150; ++i) ASSERT_OK(run.step());
            EXPECT_EQ(info_of(run.scaler).dynamic, kLargestPowerOfTwo);
            EXPECT_EQ(on_host(dsopt_scaler_device_scale(run.scaler.get())), float(kLargestPowerOfTwo));
            EXPECT_TRUE(run.loads_unchanged());
            ASSERT_OK(run.step(INFINITY));
            EXPECT_EQ(info_of(run.scaler).dynamic, kLargestPowerOfTwo / 2);
        }
}

TEST(ScaleRange, KeepsAndHalvesAValueAboveTheLargestPowerOfTwo) {
    Scaled run(DSOPT_ALGORITHM_ADAMW);
    ASSERT_OK(dsopt_scaler_set(run.scaler.get(), DSOPT_SCALE_VALUE, double(FLT_MAX), nullptr));
    for (int i = 0; i < 3; ++i) ASSERT_OK(run.step());
    EXPECT_EQ(info_of(run.scaler).dynamic, double(FLT_MAX));
    EXPECT_TRUE(run.loads_unchanged());
    ASSERT_OK(run.step(NAN));
    EXPECT_EQ(info_of(run.scaler).dynamic, double(FLT_MAX) / 2);
}

TEST(ScaleRange, LimitsCallersStateAtTheFirstOverflow) {
    const Context context = make_context();
    for (const double value : {0x1p416, HUGE_VAL}) {
        const Scaler scaler = make_scaler(context, 8.0, 1);
        const Shared<float> scale(1);
        const Shared<int32_t> words(12), overflow{1};
        const dsopt_tensor state[] = {{scale.data(), 1, DSOPT_DTYPE_F32, 0}, {words.data(), 12, DSOPT_DTYPE_I32, 0}};
        ASSERT_OK(dsopt_scaler_init_state(scaler.get(), state, 2, nullptr));
        std::memcpy(words.data(), &value, sizeof value);
        ASSERT_OK(dsopt_scaler_update_arrays(scaler.get(), state, 2, overflow.data(), nullptr));
        EXPECT_EQ(*scale, FLT_MAX / 2);
    }
}

TEST(ScaleRange, RefusesScalesThatFp32CannotHold) {
    const Context context = make_context();
    const Scaler scaler = make_scaler(context, 8.0);
    for (const double value : {0.0, -1.0, 1e-60, 1e39, double(NAN), HUGE_VAL})
        for (const int32_t what : {DSOPT_SCALE_VALUE, DSOPT_SCALE_OVERRIDE})
            EXPECT_TRUE(
                refused(dsopt_scaler_set(scaler.get(), what, value, nullptr), DSOPT_ERR_ARGUMENT, "loss scale"));
    dsopt_scaler *created = nullptr;
    for (const double min : {1e-60, 1e39}) {
        DSOPT_NEW(dsopt_scaler_desc, desc);
        desc.min = min;
        desc.init = 1e38;
        EXPECT_TRUE(refused(dsopt_scaler_create(context.get(), &desc, &created), DSOPT_ERR_ARGUMENT, "minimum scale"));
    }
}

/// Runs steps after every counter of the optimizer was set to its largest value.
class CounterLimits : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, CounterLimits, testing::ValuesIn(all_algorithms()), algorithm_name);

TEST_P(CounterLimits, AreSavedAndLoaded) {
    const double max_calls = 9007199254740992.0;
    const bool has_compat = is_family(GetParam()) || std::find(std::begin(kAlgorithms), std::end(kAlgorithms),
                                                               GetParam()) != std::end(kAlgorithms);
    for (const auto &[scale, compat] :
         {std::pair(double(FLT_MAX), DSOPT_COMPAT_NONE), std::pair(kLargestPowerOfTwo, DSOPT_COMPAT_NONE),
          std::pair(1.0, DSOPT_COMPAT_NONE), std::pair(double(FLT_MAX), DSOPT_COMPAT_DEEPSPEED),
          std::pair(1.0, DSOPT_COMPAT_DEEPSPEED)}) {
        if (compat != DSOPT_COMPAT_NONE && !has_compat) continue;
        SCOPED_TRACE(scale);
        SCOPED_TRACE(compat);
        Scaled run(GetParam(), DSOPT_PROFILE_DEFAULT, compat);
        ASSERT_OK(run.step(1));
        ASSERT_OK(dsopt_scaler_set(run.scaler.get(), DSOPT_SCALE_VALUE, scale, nullptr));
        ASSERT_OK(dsopt_optimizer_set(run.trainer->opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_CALLS, max_calls));
        const int32_t last = INT32_MAX;
        ASSERT_OK(run.import("step", &last, sizeof last));
        std::vector<int32_t> words = exported<int32_t>(run.trainer->opt(), -1, "scaler");
        words[4] = words[7] = words[10] = INT32_MAX; // updates, failures, skipped in a row
        ASSERT_OK(run.import("scaler", words.data(), 48));
        if (is_family(GetParam())) {
            int32_t schedule[8] = {INT32_MAX, 0, INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX, 0, 0};
            for (const int32_t frozen : {0, 1}) {
                schedule[1] = frozen;
                ASSERT_OK(run.import("schedule", schedule, sizeof schedule));
                ASSERT_OK(run.step(1));
                EXPECT_TRUE(run.loads_unchanged());
            }
        }
        for (const float gradient : {1.0f, INFINITY, 0.0f, NAN, 1.0f, 1.0f}) {
            ASSERT_OK(run.step(gradient));
            EXPECT_TRUE(run.loads_unchanged());
            const dsopt_scaler_info info = info_of(run.scaler);
            EXPECT_TRUE(std::isfinite(info.scale) && info.scale > 0 && info.updates >= 0) << info.updates;
        }
        EXPECT_EQ(run.trainer->get(DSOPT_KEY_CALLS), max_calls);
        EXPECT_EQ(steps(run.trainer->opt())[0], INT32_MAX);
        for (const float weight : run.trainer->weight().floats()) EXPECT_TRUE(std::isfinite(weight));
    }
}

TEST(ScalerUpdateCount, KeepsTheWindowAtItsLimit) {
    const Context context = make_context();
    const auto growths = [&](int32_t updates, int32_t last_overflow) {
        const Scaler scaler = make_scaler(context, 8.0, 5);
        const Shared<float> scale(1);
        const Shared<int32_t> words(12), overflow{0};
        const dsopt_tensor state[] = {{scale.data(), 1, DSOPT_DTYPE_F32, 0}, {words.data(), 12, DSOPT_DTYPE_I32, 0}};
        must(dsopt_scaler_init_state(scaler.get(), state, 2, nullptr));
        words[4] = updates;
        words[5] = last_overflow;
        std::string text;
        for (int i = 0; i < 23; ++i) {
            const float before = *scale;
            must(dsopt_scaler_update_arrays(scaler.get(), state, 2, overflow.data(), nullptr));
            text += *scale > before ? '+' : '.';
        }
        return text;
    };
    EXPECT_EQ(growths(INT32_MAX - 7, INT32_MAX - 100), growths(1000000 - 7, 1000000 - 100));
    EXPECT_NE(growths(INT32_MAX, INT32_MAX - 3).find('+'), std::string::npos);
}

// ------------------------------------------------------------------------------------------------------- invalid state
struct InvalidWords {
    const char *entry;
    std::function<void(int32_t *words)> change;
    const char *names; // words of the error message
};
const std::vector<InvalidWords> &invalid_words() {
    const auto set_double = [](int32_t *words, double value) { std::memcpy(words, &value, sizeof value); };
    static const std::vector<InvalidWords> list = {
        {"step", [](int32_t *w) { w[0] = -5; }, "step|-5|'p0'"},
        {"schedule", [](int32_t *w) { w[0] = -1; }, "schedule|step|-1"},
        {"schedule", [](int32_t *w) { w[1] = 2; }, "schedule|frozen|2"},
        {"schedule", [](int32_t *w) { w[2] = -3; }, "schedule|var_interval|-3"},
        {"schedule", [](int32_t *w) { w[3] = -1; }, "schedule|var_counter|-1"},
        {"schedule", [](int32_t *w) { w[4] = INT32_MIN; }, "schedule|local_interval"},
        {"schedule", [](int32_t *w) { w[5] = -1; }, "schedule|local_counter"},
        {"schedule", [](int32_t *w) { w[6] = 1; }, "schedule|momentum_in_bits"},
        {"lr_sum", [=](int32_t *w) { set_double(w, NAN); }, "lr_sum|nan"},
        {"scaler", [=](int32_t *w) { set_double(w, HUGE_VAL); }, "scaler|inf"},
        {"scaler", [=](int32_t *w) { set_double(w, 0x1p416); }, "scaler|loss scale"},
        {"scaler", [=](int32_t *w) { set_double(w, 0); }, "scaler|loss scale"},
        {"scaler", [=](int32_t *w) { w[8] = 1, set_double(w + 2, -1); }, "scaler|override"},
        {"scaler", [](int32_t *w) { w[8] = 7; }, "scaler|overridden|7"},
        {"scaler", [](int32_t *w) { w[4] = -1; }, "scaler|updates|-1"},
        {"scaler", [](int32_t *w) { w[5] = -2; }, "scaler|last_overflow|-2"},
        {"scaler", [](int32_t *w) { w[6] = 0; }, "scaler|hysteresis|0"},
        {"scaler", [](int32_t *w) { w[6] = 9; }, "scaler|hysteresis|9"},
        {"scaler", [](int32_t *w) { w[7] = -1; }, "scaler|failures|-1"},
        {"scaler", [](int32_t *w) { w[10] = -1; }, "scaler|skipped_in_row|-1"},
        {"loss_scale",
         [](int32_t *w) {
             const float nan = NAN;
             std::memcpy(w, &nan, 4);
         },
         "loss_scale|nan"},
    };
    return list;
}

TEST(InvalidState, IsRefusedByNameFromImportBindAndLoad) {
    for (const InvalidWords &invalid : invalid_words()) {
        SCOPED_TRACE(invalid.names);
        Scaled run(DSOPT_ALGORITHM_ZERO_ONE_ADAM);
        for (int i = 0; i < 2; ++i) ASSERT_OK(run.step(1));
        dsopt_optimizer *const opt = run.trainer->opt();
        const int64_t index = state_index(opt, -1, invalid.entry);
        const std::string good = exported_text(opt, index), before = run.trainer->text();
        std::vector<int32_t> words(good.size() / 4);
        std::memcpy(words.data(), good.data(), good.size());
        invalid.change(words.data());

        EXPECT_TRUE(refused(dsopt_optimizer_import(opt, index, words.data(), good.size()), DSOPT_ERR_ARGUMENT,
                            std::string("import|") + invalid.names));
        EXPECT_TRUE(same(run.trainer->text(), before));

        std::vector<dsopt_tensor> list;
        for (const dsopt_state_info &info : state_of(opt)) list.push_back(info.tensor);
        list[size_t(index)].data = words.data();
        EXPECT_TRUE(refused(dsopt_optimizer_bind(opt, DSOPT_BIND_STATE, list.data(), int64_t(list.size())),
                            DSOPT_ERR_ARGUMENT, std::string("bound memory|") + invalid.names));
        EXPECT_TRUE(same(run.trainer->text(), before));

        // A file with invalid words: they are written to bound memory after bind, which only a load can detect.
        std::vector<int32_t> bound(words.size());
        std::memcpy(bound.data(), good.data(), good.size());
        list[size_t(index)].data = bound.data();
        ASSERT_OK(dsopt_optimizer_bind(opt, DSOPT_BIND_STATE, list.data(), int64_t(list.size())));
        bound = words;
        MemoryFile memory_file;
        ASSERT_OK(memory_file.save(*run.trainer));
        Scaled other(DSOPT_ALGORITHM_ZERO_ONE_ADAM);
        ASSERT_OK(other.step(1));
        const std::string state = other.trainer->text();
        EXPECT_TRUE(
            refused(memory_file.load(*other.trainer), DSOPT_ERR_FORMAT, std::string("checkpoint|") + invalid.names));
        EXPECT_TRUE(same(other.trainer->text(), state));
        run.trainer->drop(); // destroys the optimizer before the bound memory
    }
}

// ---------------------------------------------------------------------------------------------------- sizes and counts
TEST(UnknownStructSize, IsRefusedBeforeTheStructIsAccessed) {
    const Context context = make_context();
    for (const size_t size : {size_t(4097), size_t(1) << 40, SIZE_MAX}) {
        dsopt_group group;
        std::memset(&group, 0x5a, sizeof group);
        EXPECT_TRUE(refused(dsopt_group_init(&group, size, DSOPT_ALGORITHM_ADAM), DSOPT_ERR_VERSION, "dsopt_group"));
        EXPECT_EQ(reinterpret_cast<unsigned char *>(&group)[sizeof group - 1], 0x5a);
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.size = size;
        dsopt_optimizer *opt = nullptr;
        EXPECT_TRUE(refused(dsopt_optimizer_create(context.get(), &desc, &opt), DSOPT_ERR_VERSION, "optimizer_desc"));
        const Optimizer created = make_optimizer(context);
        DSOPT_NEW(dsopt_report, report);
        report.size = size;
        EXPECT_TRUE(refused(dsopt_optimizer_report(created.get(), &report), DSOPT_ERR_VERSION, "dsopt_report"));
    }
}

/// Returns the CPU time of this thread in seconds, the minimum of several runs.
template <class F> double seconds_of(int runs, const F &body) {
    const auto now = [] {
        timespec t{};
        ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
    };
    double shortest = HUGE_VAL;
    for (int i = 0; i < runs; ++i) {
        const double begin = now();
        body();
        shortest = std::min(shortest, now() - begin);
    }
    return shortest;
}

// Time grows linearly, not quadratically: 20 or 50 times the work may take 100 or 500 times as long, because of caches.
LABEL(numbers_only);
LABEL(cpu); // time of the host
TEST(ManyGroups, AreAddedInLinearTime) {
    const Context context = make_context();
    std::vector<float> memory(100000);
    struct {
        int32_t algorithm;
        bool bound, stepped;
    } const kinds[] = {{DSOPT_ALGORITHM_ADAMW, false, false},
                       {DSOPT_ALGORITHM_ADAMW, true, false},
                       {DSOPT_ALGORITHM_LAMB, true, true},
                       {DSOPT_ALGORITHM_ONEBIT_LAMB, true, false},
                       {DSOPT_ALGORITHM_ONEBIT_LAMB, true, true}};
    for (const auto &kind : kinds) {
        const auto add = [&](int64_t count) {
            const Optimizer opt = make_optimizer(context);
            const dsopt_group group = group_of(kind.algorithm);
            if (kind.stepped) {
                must(dsopt_optimizer_add_group(opt.get(), &group, nullptr, 0));
                DSOPT_NEW(dsopt_step, step);
                must(dsopt_optimizer_step(opt.get(), &step)); // allocates the state
            }
            for (int64_t i = 0; i < count; ++i) {
                const dsopt_param param = param_of({kind.bound ? &memory[size_t(i)] : nullptr, 1, DSOPT_DTYPE_F32, 0});
                must(dsopt_optimizer_add_group(opt.get(), &group, &param, 1));
            }
        };
        const double base = seconds_of(5, [&] { add(5000); }), many = seconds_of(1, [&] { add(100000); });
        EXPECT_LT(many, 100 * base) << base << " seconds for 5,000 groups";
    }
}

LABEL(cpu); // time of the host
TEST(ManyAbsentGradients, TakeLinearTimeInCompatMode) {
    const auto time_of = [&](size_t count, int runs) {
        const Context context = make_context();
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.compat = DSOPT_COMPAT_DEEPSPEED;
        const Optimizer opt = make_optimizer(context, desc);
        const dsopt_group group = group_of(DSOPT_ALGORITHM_ADAMW);
        std::vector<float> weights(count);
        std::vector<dsopt_param> params;
        for (float &weight : weights) params.push_back(param_of({&weight, 1, DSOPT_DTYPE_F32, 0}));
        must(dsopt_optimizer_add_group(opt.get(), &group, params.data(), int64_t(count)));
        const std::vector<dsopt_tensor> absent(count, {nullptr, 1, DSOPT_DTYPE_F32, 0});
        DSOPT_NEW(dsopt_step, step);
        step.grads = absent.data();
        step.count = int64_t(count);
        must(dsopt_optimizer_step(opt.get(), &step)); // allocates the state
        return seconds_of(runs, [&] { must(dsopt_optimizer_step(opt.get(), &step)); });
    };
    const double base = time_of(2000, 30);
    EXPECT_LT(time_of(100000, 3), 500 * base) << base << " seconds for 2,000 tensors";
}

TEST(UnknownIsa, IsLoggedAndInTheBuildInfo) {
    GTEST_FLAG_SET(death_test_style, "threadsafe"); // starts a process in which dsopt_build_info was not called yet
    EXPECT_EXIT(
        {
            ::setenv("DSOPT_ISA", "AVX2 \"quoted\"", 1);
            std::string log;
            DSOPT_NEW(dsopt_context_desc, desc);
            desc.log = [](void *user, int32_t level, const char *text) {
                if (level == DSOPT_LOG_WARN) static_cast<std::string *>(user)->append(text);
            };
            desc.user = &log;
            const Context context = make_context(desc);
            const std::string info = dsopt_build_info();
            const bool good =
                log.find("DSOPT_ISA is \"AVX2") != std::string::npos &&
                info.find("\"isa\": \"generic\", \"isa_unknown\": \"AVX2 ?quoted?\"") != std::string::npos;
            if (!good) std::fprintf(stderr, "%s\n%s\n", log.c_str(), info.c_str());
            std::_Exit(good ? 0 : 1);
        },
        testing::ExitedWithCode(0), "");
    EXPECT_EQ(std::string(dsopt_build_info()).find("isa_unknown"), std::string::npos);
}

} // namespace state_limits_tests
