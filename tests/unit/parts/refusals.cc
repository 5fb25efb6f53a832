// SPDX-License-Identifier: Apache-2.0
// What a step in parts refuses, and what it leaves as it was.
#include "support/harness.h"
#include "support/parts.h"
#include "support/shard.h"

using namespace test;

namespace parts_refusals_tests {

struct Fixture {
    explicit Fixture(const dsopt_optimizer_desc &desc = optimizer_desc(0.5, DSOPT_OPTIMIZER_ACCUMULATE),
                     int32_t algorithm = DSOPT_ALGORITHM_ADAMW) :
        training{.groups = {group_of(algorithm)}, .desc = desc},
        context(make_context(1)),
        trainer(training.trainer(context, desc, none)),
        gradients(training.gradients(1)),
        list(list_of(gradients)) {}
    dsopt_optimizer *opt() const { return trainer.opt(); }
    dsopt_status ready(const std::function<void(dsopt_ready &)> &change) {
        DSOPT_NEW(dsopt_ready, ready);
        ready.first = 2;
        ready.count = 3;
        ready.grads = list.data() + 2;
        change(ready);
        const dsopt_status status = dsopt_optimizer_ready(opt(), &ready);
        free_from = ready.free_from;
        return status;
    }
    dsopt_status ready() {
        return ready([](dsopt_ready &) {});
    }
    dsopt_status step(const std::function<void(dsopt_step &)> &change) {
        DSOPT_NEW(dsopt_step, step);
        step.count = int64_t(list.size());
        step.flags = DSOPT_STEP_READY;
        change(step);
        return dsopt_optimizer_step(opt(), &step);
    }
    dsopt_status step() {
        return step([](dsopt_step &) {});
    }
    ShardTraining training;
    Context context;
    Scaler none;
    Trainer trainer;
    std::vector<Array> gradients;
    std::vector<dsopt_tensor> list;
    int64_t free_from = -1;
};

TEST(Ready, RefusesWrongArgumentsAndKeepsEarlierGradients) {
    Fixture f;
    ASSERT_OK(f.ready());
    const int64_t twice[] = {0, 1, 0}, ready_already[] = {0, 1, 3}, outside[] = {0, 11, 1}, negative[] = {-1};
    std::vector<dsopt_tensor> gradients;
    const auto with = [&](const int64_t *params, int64_t count) {
        gradients.clear();
        for (int64_t k = 0; k < count; ++k) gradients.push_back(f.list[size_t(params[k]) % f.list.size()]);
        return [=, data = gradients.data()](dsopt_ready &r) {
            r.first = 0, r.params = params, r.count = count, r.grads = data;
        };
    };
    EXPECT_TRUE(refused(f.ready(with(twice, 3)), DSOPT_ERR_ARGUMENT, "the gradient of 't0' is already ready"));
    EXPECT_TRUE(refused(f.ready(with(ready_already, 3)), DSOPT_ERR_ARGUMENT, "the gradient of 't3' is already ready"));
    EXPECT_TRUE(refused(f.ready(with(outside, 3)), DSOPT_ERR_ARGUMENT, "params[1] is 11"));
    EXPECT_TRUE(refused(f.ready(with(negative, 1)), DSOPT_ERR_ARGUMENT, "params[0] is -1"));
    EXPECT_TRUE(refused(f.ready([&](auto &r) { r.params = twice; }), DSOPT_ERR_ARGUMENT, "first is 2"));
    EXPECT_TRUE(refused(f.ready([](auto &r) { r.first = 9; }), DSOPT_ERR_ARGUMENT, "[9, 12) of 11"));
    EXPECT_TRUE(refused(f.ready([](auto &r) { r.first = -1; }), DSOPT_ERR_ARGUMENT, "[-1, 2) of 11"));
    EXPECT_TRUE(refused(f.ready([](auto &r) { r.count = -1; }), DSOPT_ERR_ARGUMENT, "count is -1"));
    EXPECT_TRUE(refused(f.ready([](auto &r) { r.count = INT64_MAX; }), DSOPT_ERR_ARGUMENT, "count"));
    EXPECT_TRUE(refused(f.ready([](auto &r) { r.grads = nullptr; }), DSOPT_ERR_ARGUMENT, "grads"));
    EXPECT_TRUE(refused(f.ready([](auto &r) { r.flags = 64; }), DSOPT_ERR_ARGUMENT, "0x40"));
    EXPECT_TRUE(refused(f.ready([](auto &r) { r.reserved = 1; }), DSOPT_ERR_ARGUMENT, "reserved"));
    EXPECT_TRUE(refused(f.ready([](auto &r) { r.size = 8; }), DSOPT_ERR_VERSION, "dsopt_ready"));
    EXPECT_TRUE(refused(f.ready([](auto &r) { r.first = 6, r.flags = DSOPT_READY_ACCUMULATED; }), DSOPT_ERR_ARGUMENT,
                        "no earlier call of this step has DSOPT_READY_ACCUMULATED"));
    EXPECT_TRUE(refused(dsopt_optimizer_ready(f.opt(), nullptr), DSOPT_ERR_ARGUMENT, "ready"));
    f.list[7].numel = 5;
    EXPECT_TRUE(refused(f.ready([&](auto &r) { r.first = 6, r.grads = f.list.data() + 6; }), DSOPT_ERR_SHAPE,
                        "gradient of 't7'"));
    EXPECT_EQ(f.free_from, 0);
    f.list = list_of(f.gradients);
    // All of it left no trace: the rest of the step is made.
    ASSERT_OK(f.ready([&](auto &r) { r.first = 0, r.count = 2, r.grads = f.list.data(); }));
    EXPECT_EQ(f.free_from, 11);
    ASSERT_OK(f.ready([&](auto &r) { r.first = 5, r.count = 6, r.grads = f.list.data() + 5; }));
    ASSERT_OK(f.step());
    Trainer whole = f.training.trainer(f.context, f.training.desc, f.none);
    ASSERT_OK(whole.step(f.gradients));
    expect_same_training(f.trainer, whole);
}

TEST(Ready, RefusesOtherCallsUntilTheStep) {
    Fixture f;
    ASSERT_OK(f.ready());
    const std::string before = f.trainer.text();
    constexpr const char *kText =
        "gradients are ready (parameter 't2'): end the step with DSOPT_STEP_READY, or reset them";
    const auto is_refused = [&](dsopt_status status) { return refused(status, DSOPT_ERR_STATE, kText); };
    EXPECT_TRUE(is_refused(f.trainer.step(f.gradients)));
    EXPECT_TRUE(is_refused(f.trainer.accumulate(f.gradients)));
    EXPECT_TRUE(is_refused(dsopt_optimizer_save(f.opt(), "/nowhere/at/all", nullptr)));
    EXPECT_TRUE(is_refused(dsopt_optimizer_load(f.opt(), "/nowhere/at/all", nullptr)));
    const std::vector<dsopt_tensor> weights = list_of(f.trainer.weights());
    EXPECT_TRUE(is_refused(dsopt_optimizer_bind(f.opt(), DSOPT_BIND_PARAMS, weights.data(), int64_t(weights.size()))));
    float value = 0;
    EXPECT_TRUE(is_refused(dsopt_optimizer_import(f.opt(), 0, &value, sizeof value)));
    EXPECT_TRUE(is_refused(dsopt_optimizer_import_f32(f.opt(), 0, &value, 1)));
    const dsopt_group group = group_of(DSOPT_ALGORITHM_SGD);
    const dsopt_param param = param_of({nullptr, 3, DSOPT_DTYPE_F32, 0});
    EXPECT_TRUE(is_refused(dsopt_optimizer_add_group(f.opt(), &group, &param, 1)));
    EXPECT_TRUE(is_refused(dsopt_optimizer_add_params(f.opt(), &param, 1)));
    for (const int32_t what : std::vector<int32_t>{DSOPT_RESET_MOMENTS, DSOPT_RESET_GRADS, DSOPT_RESET_COUNTERS, 0})
        EXPECT_TRUE(is_refused(dsopt_optimizer_reset(f.opt(), what, nullptr)));
    // Accumulators of other parameters, hyper-parameters and queries are not concerned.
    std::vector<Array> others = f.training.gradients(2);
    for (const size_t t : {2, 3, 4}) others[t] = Array::absent(others[t].size());
    EXPECT_OK(f.trainer.accumulate(others));
    EXPECT_OK(dsopt_optimizer_reset(f.opt(), DSOPT_RESET_READY | DSOPT_RESET_GRADS, nullptr));
    EXPECT_EQ(f.trainer.text(), before);
    ASSERT_OK(f.trainer.step(f.gradients));
    Trainer whole = f.training.trainer(f.context, f.training.desc, f.none);
    ASSERT_OK(whole.step(f.gradients));
    expect_same_training(f.trainer, whole);
}

TEST(StepReady, RefusesWrongArgumentsAndKeepsGradients) {
    Fixture f;
    ASSERT_OK(f.ready());
    EXPECT_TRUE(refused(f.step([&](auto &s) { s.grads = f.list.data(); }), DSOPT_ERR_ARGUMENT,
                        "dsopt_step.grads has data for 't2', whose gradient is ready"));
    EXPECT_TRUE(refused(f.step([](auto &s) { s.flags |= DSOPT_STEP_ZERO_GRADS; }), DSOPT_ERR_UNSUPPORTED,
                        "ZERO_GRADS with READY"));
    EXPECT_TRUE(refused(f.step([](auto &s) { s.flags |= DSOPT_STEP_ACCUMULATED; }), DSOPT_ERR_ARGUMENT,
                        "made ready without DSOPT_READY_ACCUMULATED"));
    EXPECT_TRUE(refused(f.step([](auto &s) { s.count = 5; }), DSOPT_ERR_SHAPE, "count is 5"));
    EXPECT_TRUE(refused(f.step([](auto &s) { s.flags |= 1 << 20; }), DSOPT_ERR_ARGUMENT, "unknown bits"));
    for (const size_t t : {2, 3, 4}) f.list[t].data = nullptr;
    ASSERT_OK(f.step([&](auto &s) { s.grads = f.list.data(); }));
    Trainer whole = f.training.trainer(f.context, f.training.desc, f.none);
    ASSERT_OK(whole.step(f.gradients));
    expect_same_training(f.trainer, whole);
    // Without a call of ready: all gradients come with the step, or there are none.
    f.list = list_of(f.gradients);
    ASSERT_OK(f.step([&](auto &s) { s.grads = f.list.data(); }));
    ASSERT_OK(whole.step(f.gradients));
    ASSERT_OK(f.step());
    for (Array &gradient : f.gradients) gradient = Array::absent(gradient.size());
    ASSERT_OK(whole.step(f.gradients));
    expect_same_training(f.trainer, whole);
}

TEST(Ready, IsForStandardMode) {
    dsopt_optimizer_desc desc = optimizer_desc(0.5);
    desc.compat = DSOPT_COMPAT_DEEPSPEED;
    Fixture f(desc);
    EXPECT_TRUE(refused(f.ready(), DSOPT_ERR_UNSUPPORTED, "the originals have no parts"));
    EXPECT_TRUE(refused(f.step(), DSOPT_ERR_UNSUPPORTED, "the originals have no parts"));
    int64_t first = 0, count = 0;
    EXPECT_TRUE(refused(dsopt_optimizer_bucket(f.opt(), 0, &first, &count), DSOPT_ERR_UNSUPPORTED,
                        "the originals have no parts"));
    EXPECT_TRUE(refused(f.ready([](auto &r) { r.flags = DSOPT_READY_ACCUMULATED; }), DSOPT_ERR_UNSUPPORTED, ""));
    Fixture plain(optimizer_desc());
    EXPECT_TRUE(refused(plain.ready([](auto &r) { r.flags = DSOPT_READY_ACCUMULATED; }), DSOPT_ERR_UNSUPPORTED,
                        "made without DSOPT_OPTIMIZER_ACCUMULATE"));
    DSOPT_NEW(dsopt_step, step);
    step.flags = DSOPT_STEP_READY;
    EXPECT_TRUE(refused(dsopt_optimizer_apply(plain.opt(), &step), DSOPT_ERR_UNSUPPORTED,
                        "dsopt_optimizer_apply has no parts"));
}

TEST(EarlyUpdate, RefusesWhatDecidesAboutTheWholeStep) {
    const Context context = make_context(1);
    const auto text = [](const char *what) {
        return std::string("EARLY_UPDATE: ") + what + " decides about the whole step";
    };
    const auto expect_refused = [&](const std::function<void(dsopt_optimizer_desc &)> &change, const std::string &why) {
        dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_EARLY_UPDATE);
        change(desc);
        dsopt_optimizer *made = nullptr;
        EXPECT_TRUE(refused(dsopt_optimizer_create(context.get(), &desc, &made), DSOPT_ERR_UNSUPPORTED, why));
    };
    expect_refused([](auto &d) { d.max_norm = 1; }, text("max_norm"));
    const Scaler scaler = make_scaler(context, 8);
    expect_refused([&](auto &d) { d.scaler = scaler.get(); }, text("a scaler"));
    expect_refused([](auto &d) { d.nonfinite = DSOPT_NONFINITE_SKIP; }, text("DSOPT_NONFINITE_SKIP"));
    expect_refused([](auto &d) { d.skip_budget = 3; }, text("a skip budget"));
    expect_refused([](auto &d) { d.flags |= DSOPT_OPTIMIZER_REPORT_NORMS; }, text("REPORT_NORMS"));
    expect_refused([](auto &d) { d.compat = DSOPT_COMPAT_DEEPSPEED; }, "the originals have no parts");
    const Optimizer made = make_optimizer(context, optimizer_desc(0, DSOPT_OPTIMIZER_EARLY_UPDATE));
    for (const int32_t algorithm : {DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM,
                                    DSOPT_ALGORITHM_ONEBIT_LAMB}) {
        const dsopt_group group = group_of(algorithm);
        EXPECT_TRUE(refused(dsopt_optimizer_add_group(made.get(), &group, nullptr, 0), DSOPT_ERR_UNSUPPORTED,
                            "decides about the whole step"));
    }
    dsopt_group group = group_of(DSOPT_ALGORITHM_SGD);
    group.max_norm = 1;
    EXPECT_TRUE(
        refused(dsopt_optimizer_add_group(made.get(), &group, nullptr, 0), DSOPT_ERR_UNSUPPORTED, text("max_norm")));
    EXPECT_TRUE(refused(dsopt_optimizer_set(made.get(), DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM, 1), DSOPT_ERR_UNSUPPORTED,
                        text("max_norm")));
    EXPECT_TRUE(refused(dsopt_optimizer_set(made.get(), DSOPT_ALL_GROUPS, DSOPT_KEY_SKIP_BUDGET, 1),
                        DSOPT_ERR_UNSUPPORTED, text("a skip budget")));
}

TEST(EarlyUpdate, RefusesValuesThatComeAfterTheUpdate) {
    Fixture f(optimizer_desc(0, DSOPT_OPTIMIZER_EARLY_UPDATE));
    ASSERT_OK(f.ready());
    constexpr const char *kText = "EARLY_UPDATE: params, state, out, lr, hyper, grad_scale, skip and grad_norms";
    const Array scalar(DSOPT_DTYPE_F32, 8, 0);
    const std::vector<dsopt_tensor> weights = list_of(f.trainer.weights());
    const auto *values = scalar.as<float>();
    const std::function<void(dsopt_step &)> changes[] = {
        [&](dsopt_step &s) { s.params = weights.data(); },
        [&](dsopt_step &s) { s.out = weights.data(); },
        [&](dsopt_step &s) { s.lr = values; },
        [&](dsopt_step &s) { s.hyper = values; },
        [&](dsopt_step &s) { s.grad_scale = values; },
        [&](dsopt_step &s) { s.grad_norms = values; },
        [&](dsopt_step &s) { s.skip = reinterpret_cast<const int32_t *>(values); }};
    for (const auto &change : changes) EXPECT_TRUE(refused(f.step(change), DSOPT_ERR_UNSUPPORTED, kText));
    EXPECT_TRUE(refused(dsopt_optimizer_set(f.opt(), 0, DSOPT_KEY_LR, 0.5), DSOPT_ERR_STATE, "gradients are ready"));
    ASSERT_OK(f.step());
    EXPECT_OK(dsopt_optimizer_set(f.opt(), 0, DSOPT_KEY_LR, 0.5));
}

TEST(EarlyUpdate, NeedsMemoryOfParameters) {
    const Context context = make_context(1);
    const Optimizer made = make_optimizer(context, optimizer_desc(0, DSOPT_OPTIMIZER_EARLY_UPDATE));
    const dsopt_group group = group_of(DSOPT_ALGORITHM_SGD);
    const dsopt_param param = param_of({nullptr, 3, DSOPT_DTYPE_F32, 0}, "w");
    must(dsopt_optimizer_add_group(made.get(), &group, &param, 1));
    const Array gradient(DSOPT_DTYPE_F32, 3, 0);
    const dsopt_tensor list[] = {gradient.tensor()};
    DSOPT_NEW(dsopt_ready, ready);
    ready.count = 1;
    ready.grads = list;
    EXPECT_TRUE(refused(dsopt_optimizer_ready(made.get(), &ready), DSOPT_ERR_STATE, "parameter 'w' has no memory"));
}

TEST(EarlyUpdate, FreesGradientsFromTheLastOneOn) {
    Fixture f(optimizer_desc(0, DSOPT_OPTIMIZER_EARLY_UPDATE));
    const int64_t calls[][2] = {{5, 11}, {10, 10}, {8, 10}, {9, 8}, {7, 7}, {6, 5}};
    for (const auto &[param, free_from] : calls) {
        ASSERT_OK(f.ready([&, at = param](auto &r) { r.first = at, r.count = 1, r.grads = &f.list[size_t(at)]; }));
        EXPECT_EQ(f.free_from, free_from) << param;
        int64_t first = -1, count = -1;
        ASSERT_OK(dsopt_optimizer_bucket(f.opt(), param, &first, &count));
        EXPECT_EQ(first, param);
        EXPECT_EQ(count, 1);
        ASSERT_OK(dsopt_optimizer_wait(f.opt(), param, 1, nullptr));
    }
    EXPECT_TRUE(refused(dsopt_optimizer_wait(f.opt(), 9, 3, nullptr), DSOPT_ERR_ARGUMENT, "[9, 12) of 11"));
    int64_t first = -1, count = -1;
    EXPECT_TRUE(refused(dsopt_optimizer_bucket(f.opt(), 11, &first, &count), DSOPT_ERR_ARGUMENT, "11"));
    EXPECT_EQ(first, -1);
    ASSERT_OK(dsopt_optimizer_reset(f.opt(), DSOPT_RESET_READY, nullptr));
    ASSERT_OK(f.ready()); // from the start
    EXPECT_EQ(f.free_from, 11);
}

// Nothing of a step is left for the next one, whatever kind it was.
TEST(StepReady, KeepsGradientsIfItIsRefusedAfterAnUndividedStep) {
    Fixture f;
    Trainer whole = f.training.trainer(f.context, f.training.desc, f.none);
    ASSERT_OK(f.ready());
    ASSERT_OK(f.step());
    ASSERT_OK(f.trainer.step(f.gradients));
    ASSERT_OK(f.ready());
    EXPECT_TRUE(refused(f.step([](auto &s) { s.count = 5; }), DSOPT_ERR_SHAPE, "count is 5"));
    ASSERT_OK(f.step());
    for (size_t t = 0; t < f.gradients.size(); ++t)
        if (t < 2 || t > 4) f.list[t].data = nullptr;
    const auto partial = [&] {
        DSOPT_NEW(dsopt_step, step);
        step.grads = f.list.data();
        step.count = int64_t(f.list.size());
        return whole.step(step);
    };
    ASSERT_OK(partial());
    ASSERT_OK(whole.step(f.gradients));
    ASSERT_OK(partial());
    expect_same_training(f.trainer, whole);
}

TEST(Ready, OfNoParameterBeginsNoStep) {
    for (const uint32_t flags : {0u, uint32_t(DSOPT_OPTIMIZER_EARLY_UPDATE)}) {
        Fixture f(optimizer_desc(flags == 0 ? 0.5 : 0, flags));
        Trainer whole = f.training.trainer(f.context, f.training.desc, f.none);
        const auto nothing = [&] { return f.ready([](auto &r) { r.first = 11, r.count = 0; }); };
        ASSERT_OK(nothing());
        EXPECT_EQ(f.free_from, 11);
        ASSERT_OK(f.trainer.step(f.gradients));
        ASSERT_OK(whole.step(f.gradients));
        ASSERT_OK(nothing());
        ASSERT_OK(f.ready());
        ASSERT_OK(nothing());
        for (const size_t t : {2, 3, 4}) f.list[t].data = nullptr;
        ASSERT_OK(f.step([&](auto &s) { s.grads = f.list.data(); }));
        ASSERT_OK(whole.step(f.gradients));
        expect_same_training(f.trainer, whole);
    }
}

TEST(EarlyUpdate, LeavesGradientsAfterAStepThatZeroedThem) {
    Fixture f(optimizer_desc(0, DSOPT_OPTIMIZER_EARLY_UPDATE));
    ASSERT_OK(f.trainer.step(f.gradients, [](dsopt_step &s) { s.flags = DSOPT_STEP_ZERO_GRADS; }));
    for (Array &gradient : f.gradients) gradient.fill(3);
    const std::string before = f.gradients[4].text();
    ASSERT_OK(f.ready());
    EXPECT_EQ(f.gradients[4].text(), before);
    ASSERT_OK(f.step());
}

TEST(StepReady, FindsNonFiniteElementsOfGradientsThatWereReady) {
    Fixture f;
    f.gradients[3] = Array(DSOPT_DTYPE_F32, f.gradients[3].size(), 0);
    f.gradients[4].set(7, kInf);
    const std::string before = f.trainer.text();
    ASSERT_OK(f.ready());
    ASSERT_OK(f.step());
    EXPECT_EQ(f.trainer.report().last_skipped, 1);
    EXPECT_EQ(f.trainer.report().first_bad, 4);
    ASSERT_OK(f.trainer.step(f.training.gradients(2))); // nothing of it is left
    EXPECT_EQ(f.trainer.report().last_skipped, 0);
    EXPECT_NE(f.trainer.text(), before);
}

} // namespace parts_refusals_tests
