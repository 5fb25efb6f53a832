// SPDX-License-Identifier: Apache-2.0
// Optimizers: compared bit for bit with the same calls in C; and error cases.
#include "model.h"
#include <cmath>
#include <cstring>
#include <limits>

namespace optimizer_tests {

/// The same training with dsopt.h.
void train_in_c(Model &model, double max_norm, int steps) {
    dsopt_context *ctx = nullptr;
    dsopt_optimizer *opt = nullptr;
    dsopt_group group;
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.max_norm = max_norm;
    MUST(dsopt_context_create(nullptr, &ctx));
    MUST(dsopt_optimizer_create(ctx, &desc, &opt));
    MUST(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    group.lr = 0.01;
    group.weight_decay = 0.1;
    std::vector<dsopt_param> params;
    for (int i = 0; i < 3; ++i)
        params.push_back({model.weights[std::size_t(i)], kNames[i], nullptr, 0, 0, 0, 0, 0, 0, 0});
    MUST(dsopt_optimizer_add_group(opt, &group, params.data(), 3));
    for (int s = 0; s < steps; ++s) {
        model.next_gradients(std::uint32_t(s));
        DSOPT_NEW(dsopt_step, step);
        step.grads = model.grads.data();
        step.count = 3;
        MUST(dsopt_optimizer_step(opt, &step));
    }
    dsopt_optimizer_destroy(opt);
    dsopt_context_destroy(ctx);
}

TEST(CppOptimizer, StepGivesSameBitsAsC) {
    Model in_c, in_cpp;
    train_in_c(in_c, 1, 5);
    dsopt::context ctx;
    dsopt::optimizer_options options;
    options.max_norm = 1;
    dsopt::optimizer opt(ctx, options);
    opt.add_group(rule(), in_cpp.params);
    for (std::uint32_t s = 0; s < 5; ++s) {
        in_cpp.next_gradients(s);
        opt.step(in_cpp.grads);
    }
    expect_same(in_cpp, in_c);
    EXPECT_EQ(opt.report().calls, 5);
    EXPECT_GT(opt.report().grad_norm, 1);
}

/// State in the test's memory.
struct State {
    std::vector<std::vector<float>> memory; // I32 entries also have 4 bytes
    std::vector<dsopt::tensor> list;
    explicit State(const dsopt::optimizer &opt) {
        for (const dsopt::state_entry &entry : opt.state_list()) {
            memory.emplace_back(std::size_t(entry.numel()));
            list.push_back(entry.tensor());
            list.back().data = memory.back().data();
        }
    }
};

TEST(CppOptimizer, ApplyGivesSameBitsAsC) {
    Model in_c, in_cpp;
    train_in_c(in_c, 1, 5);
    dsopt::context ctx;
    dsopt::optimizer_options clipped;
    clipped.max_norm = 1;
    dsopt::optimizer opt(ctx, clipped);
    for (dsopt::param &param : in_cpp.params) param.tensor.data = nullptr; // passed with each call
    opt.add_group(rule(), in_cpp.params);
    State state(opt);
    opt.init_state(in_cpp.weights, state.list);
    std::vector<std::byte> workspace(opt.workspace());
    std::vector<float> report(DSOPT_REPORT_FLOATS), hyper(DSOPT_HYPER_FLOATS, NAN);
    dsopt::step_options options;
    options.params = in_cpp.weights;
    options.state = state.list;
    options.workspace = workspace;
    options.report = report;
    options.hyper = hyper;
    for (std::uint32_t s = 0; s < 5; ++s) {
        in_cpp.next_gradients(s);
        opt.apply(in_cpp.grads, options);
    }
    expect_same(in_cpp, in_c);
    EXPECT_GT(report[DSOPT_REPORT_GRAD_NORM], 1);
    const std::int32_t skip = 1;
    options.skip = &skip;
    opt.apply(in_cpp.grads, options);
    EXPECT_EQ(report[DSOPT_REPORT_SKIPPED], 1);
    EXPECT_EQ(report[DSOPT_REPORT_REASONS], DSOPT_SKIP_CALLER);
    expect_same(in_cpp, in_c);
    EXPECT_TRUE(std::isnan(report[DSOPT_REPORT_WEIGHT_NORM]));
    options.no_nan = true;
    opt.apply(in_cpp.grads, options);
    EXPECT_EQ(report[DSOPT_REPORT_WEIGHT_NORM], -1);
}

TEST(CppOptimizer, PassesEveryStepArgument) {
    Model model;
    dsopt::context ctx;
    dsopt::optimizer opt(ctx);
    opt.add_group(rule(), model.params);
    const Model before;
    std::vector<float> out[3];
    std::vector<dsopt::tensor> outs;
    for (std::size_t i = 0; i < 3; ++i) {
        out[i].resize(kNumels[i]);
        outs.push_back(dsopt::view(out[i]));
    }
    dsopt::step_options options;
    const float zero[] = {0}, scale = 4;
    options.lr = zero;
    options.grad_scale = &scale;
    options.out = outs;
    options.delta = true;
    opt.step(model.grads, options);
    expect_same(model, before); // only out is written
    for (const float delta : out[2]) EXPECT_EQ(delta, 0);
    options.delta = false;
    options.out_only = true;
    options.zero_grads = true;
    opt.step(model.grads, options);
    expect_same(model, before);
    EXPECT_EQ(out[2], before.w[2]);
    EXPECT_EQ(model.g[2][17], 0);
    Model elsewhere;
    options = {};
    options.params = elsewhere.weights;
    elsewhere.next_gradients(3);
    opt.step(elsewhere.grads, options);
    expect_same(model, before);
    EXPECT_NE(elsewhere.w[2], before.w[2]);
    EXPECT_EQ(opt.report().calls, 3);
    // The caller's norm is infinite, which counts as overflow.
    const float norms[] = {std::numeric_limits<float>::infinity()};
    dsopt::optimizer_options clipped;
    clipped.max_norm = 1;
    dsopt::optimizer other(ctx, clipped);
    other.add_group(rule(), model.params);
    options = {};
    options.grad_norms = norms;
    other.step(model.grads, options);
    EXPECT_EQ(other.report().reasons, DSOPT_SKIP_NORM);
    expect_same(model, before);
}

TEST(CppOptimizer, RejectsListsThatAreTooShort) {
    Model model;
    dsopt::context ctx;
    dsopt::optimizer opt(ctx);
    opt.add_group(rule(), model.params);
    const std::vector<dsopt::tensor> two(model.grads.begin(), model.grads.begin() + 2);
    std::vector<float> fifteen(15), seven(7);
    dsopt::step_options options;
    options.params = two;
    EXPECT_REFUSED(opt.step(model.grads, options), dsopt::argument_error, "params has 2 entries");
    options = {};
    options.out = two;
    EXPECT_REFUSED(opt.step(model.grads, options), dsopt::argument_error, "out has 2 entries");
    options = {};
    options.report = fifteen;
    EXPECT_REFUSED(opt.step(model.grads, options), dsopt::argument_error, "report has 15 entries");
    options = {};
    options.hyper = seven;
    EXPECT_REFUSED(opt.step(model.grads, options), dsopt::argument_error, "hyper has 7 entries");
    options = {};
    opt.add_group(rule());
    options.lr = dsopt::span<const float>(fifteen.data(), 1);
    EXPECT_REFUSED(opt.step(model.grads, options), dsopt::argument_error, "lr has 1 entries, needed are 2");
    options = {};
    options.grad_norms = dsopt::span<const float>(fifteen.data(), 1);
    EXPECT_REFUSED(opt.step(model.grads, options), dsopt::argument_error, "grad_norms has 1 entries");
    EXPECT_REFUSED(opt.step(two), dsopt::argument_error, "count");
    EXPECT_REFUSED(opt.apply(model.grads, {}), dsopt::argument_error, "params");
    EXPECT_REFUSED(opt.init_state(two, {}), dsopt::argument_error, "params has 2 entries");
    model.grads[1].numel = 6;
    EXPECT_REFUSED(opt.step(model.grads), dsopt::argument_error, "'b'");
    expect_same(model, Model());
}

TEST(CppOptimizer, RejectsInvalidParametersByName) {
    Model model;
    dsopt::context ctx;
    dsopt::optimizer opt(ctx);
    model.params[1].name = "a";
    EXPECT_REFUSED(opt.add_group(rule(), model.params), dsopt::argument_error, "a");
    model.params[1].name = std::string("b\0c", 3);
    EXPECT_REFUSED(opt.add_group(rule(), model.params), dsopt::argument_error, "params[1]");
    model.params[1].name = "b";
    model.params[1].dims = {2, 4};
    EXPECT_REFUSED(opt.add_group(rule(), model.params), dsopt::argument_error, "b");
    model.params[1].dims = {7};
    dsopt::adamw wrong;
    wrong.beta1 = 2;
    EXPECT_REFUSED(opt.add_group(wrong, model.params), dsopt::argument_error, "beta1");
    opt.add_group(rule(), model.params);
    EXPECT_EQ(opt.param_count(), 3);
    EXPECT_EQ(opt.group_count(), 1);
}

TEST(CppOptimizer, AddParamsKeepsOrderAcrossGroups) {
    Model model;
    dsopt::context ctx;
    dsopt::optimizer opt(ctx);
    dsopt::adamw decayed = rule(), plain;
    plain.lr = 0;
    plain.weight_decay = 0;
    decayed.lr = 0;
    opt.add_group(decayed);
    opt.add_group(plain);
    model.params[0].group = 1, model.params[2].group = 1;
    opt.add_params(model.params);
    EXPECT_EQ(opt.group_count(), 2);
    EXPECT_EQ(opt.param_count(), 3);
    model.params[0].name = "d", model.params[0].group = 2;
    EXPECT_REFUSED(opt.add_params({model.params[0]}), dsopt::argument_error, "group");
    EXPECT_EQ(opt.get(dsopt::key::weight_decay), 0.1);
    EXPECT_EQ(opt.get(dsopt::key::weight_decay, 1), 0);
    opt.set(dsopt::key::lr, 0.5);
    opt.set(dsopt::key::lr, 0.25, 1);
    EXPECT_EQ(opt.get(dsopt::key::lr, 0), 0.5);
    EXPECT_EQ(opt.get(dsopt::key::lr, 1), 0.25);
    EXPECT_EQ(opt.get(dsopt::key::algorithm), DSOPT_ALGORITHM_ADAMW);
    EXPECT_REFUSED(opt.set(dsopt::key::lr, -1), dsopt::argument_error, "lr");
    EXPECT_REFUSED(opt.set(dsopt::key::min_trust, 1), dsopt::unsupported_error, "min_trust");
    EXPECT_REFUSED(opt.get(dsopt::key::lr, 7), dsopt::argument_error, "group");
}

TEST(CppOptimizer, EpsUncorrectedIsReadAndSet) {
    dsopt::context ctx;
    dsopt::optimizer opt(ctx);
    dsopt::adamw keras;
    keras.eps_uncorrected = true;
    opt.add_group(keras, {});
    EXPECT_EQ(opt.get(dsopt::key::eps_uncorrected), 1);
    opt.set(dsopt::key::eps_uncorrected, 0);
    EXPECT_EQ(opt.get(dsopt::key::eps_uncorrected), 0);
    keras.bias_correction = false;
    EXPECT_REFUSED(opt.add_group(keras, {}), dsopt::unsupported_error, "eps_uncorrected");
}

/// Returns one weight that starts as 1, after steps with these gradients.
template <class Group> float trained(const Group &group, const std::vector<float> &gradients) {
    dsopt::context ctx;
    std::vector<float> w = {1}, g(1);
    dsopt::optimizer opt(ctx);
    opt.add_group(group, {{dsopt::view(w), "w"}});
    for (const float gradient : gradients) {
        g[0] = gradient;
        opt.step({dsopt::view(g)});
    }
    return w[0];
}

TEST(CppOptimizer, TrainsWithSgd) {
    dsopt::sgd sgd;
    sgd.lr = 0.5;
    EXPECT_EQ(trained(sgd, {0.5f, -0.25f}), 0.875f); // 1 - 0.25 + 0.125
    sgd.momentum = 0.5, sgd.dampening = 0.5;
    EXPECT_EQ(trained(sgd, {0.5f, -0.25f}), 0.6875f); // b is 0.5, then 0.25 - 0.125
    sgd.dampening = 0, sgd.nesterov = true;
    EXPECT_EQ(trained(sgd, {0.5f, -0.25f}), 0.75f); // b is 0.5, then 0; g + b/2 is 0.75, then -0.25
    sgd.weight_decay = 0.5, sgd.nesterov = false;
    EXPECT_EQ(trained(sgd, {0.5f, -0.25f}), 0.25f); // b is 1, then 0.5 + 0

    dsopt::context ctx;
    std::vector<float> w = {1};
    dsopt::optimizer opt(ctx);
    opt.add_group(sgd, {{dsopt::view(w), "w"}});
    EXPECT_STREQ(opt.state_list()[0].name(), "momentum_buffer");
    EXPECT_EQ(opt.get(dsopt::key::momentum), 0.5);
    opt.set(dsopt::key::dampening, 0.25);
    EXPECT_EQ(opt.get(dsopt::key::dampening), 0.25);
    EXPECT_REFUSED(opt.set(dsopt::key::nesterov, 1), dsopt::argument_error, "dampening");
    EXPECT_EQ(opt.get(dsopt::key::nesterov), 0);
    EXPECT_REFUSED(opt.set(dsopt::key::momentum, 0), dsopt::unsupported_error, "momentum");
    EXPECT_REFUSED(opt.get(dsopt::key::lr_decay), dsopt::unsupported_error, "lr_decay");
}

TEST(CppOptimizer, TrainsWithAdagrad) {
    dsopt::adagrad adagrad;
    adagrad.lr = 0.5, adagrad.eps = 0.5;
    EXPECT_EQ(trained(adagrad, {3, 4}), 1 - 0.5f * (3 / 3.5f) - 0.5f * (4 / 5.5f));
    adagrad.lr_decay = 1, adagrad.initial_accumulator_value = 16;
    EXPECT_NEAR(trained(adagrad, {3, 4}), 1 - 0.5 * 3 / 5.5 - 0.25 * 4 / (std::sqrt(41.) + 0.5), 1e-6);
    adagrad.eps_inside_sqrt = true;
    EXPECT_NEAR(trained(adagrad, {3}), 1 - 0.5 * 3 / std::sqrt(25.5), 1e-6);

    dsopt::context ctx;
    std::vector<float> w = {1};
    dsopt::optimizer opt(ctx);
    opt.add_group(adagrad, {{dsopt::view(w), "w"}});
    EXPECT_STREQ(opt.state_list()[0].name(), "sum");
    EXPECT_EQ(opt.get(dsopt::key::initial_accumulator_value), 16);
    EXPECT_EQ(opt.get(dsopt::key::lr_decay), 1);
    opt.set(dsopt::key::lr_decay, 2);
    EXPECT_EQ(opt.get(dsopt::key::lr_decay), 2);
    EXPECT_REFUSED(opt.set(dsopt::key::initial_accumulator_value, -1), dsopt::argument_error,
                   "initial_accumulator_value");
}

TEST(CppOptimizer, TrainsWithLion) {
    dsopt::lion lion;
    lion.lr = 0.25, lion.beta1 = 0.5, lion.beta2 = 0.75;
    EXPECT_EQ(trained(lion, {4, -0.5f, -4}), 0.75f); // m is 1, then 0.625: two steps down, one up
    lion.weight_decay = 0.5;
    EXPECT_EQ(trained(lion, {4, 0}), 0.296875f); // 1 - 0.25 * 1.5 is 0.625, less 0.25 * 1.3125

    dsopt::context ctx;
    std::vector<float> w = {1};
    dsopt::optimizer opt(ctx);
    opt.add_group(lion, {{dsopt::view(w), "w"}});
    EXPECT_EQ(opt.state_count(), 2); // and the counter
    EXPECT_STREQ(opt.state_list()[0].name(), "exp_avg");
    EXPECT_EQ(opt.get(dsopt::key::algorithm), DSOPT_ALGORITHM_LION);
    EXPECT_EQ(opt.get(dsopt::key::beta2), 0.75);
    EXPECT_REFUSED(opt.set(dsopt::key::eps, 1e-8), dsopt::unsupported_error, "eps");
}

TEST(CppOptimizer, ExportsImportsAndResetsState) {
    Model model;
    dsopt::context ctx;
    dsopt::optimizer opt(ctx);
    model.params[1].dims = {7, 1};
    opt.add_group(rule(), model.params);
    opt.step(model.grads);
    ASSERT_EQ(opt.state_count(), 7);
    const std::vector<dsopt::state_entry> list = opt.state_list();
    EXPECT_STREQ(list[2].name(), "exp_avg");
    EXPECT_EQ(list[2].param(), 1);
    EXPECT_EQ(list[2].dims(), (std::vector<std::int64_t>{7, 1}));
    EXPECT_EQ(list[2].dtype(), DSOPT_DTYPE_F32);
    std::vector<float> exp_avg(7);
    opt.export_state(2, exp_avg);
    for (int i = 0; i < 7; ++i) EXPECT_NEAR(exp_avg[std::size_t(i)], 0.1 * model.g[1][std::size_t(i)], 1e-7);
    std::int32_t steps[3] = {};
    opt.export_state(6, steps);
    EXPECT_EQ(steps[2], 1);
    steps[2] = 40;
    opt.import_state(6, steps);
    steps[2] = 0;
    opt.export_state(6, dsopt::span<std::int32_t>(steps));
    EXPECT_EQ(steps[2], 40);
    EXPECT_REFUSED(opt.export_state(6, exp_avg), dsopt::argument_error, "bytes");
    EXPECT_REFUSED(opt.import_state(2, steps), dsopt::argument_error, "bytes");
    EXPECT_REFUSED(opt.state(7), dsopt::argument_error, "index");
    opt.reset(dsopt::parts::moments | dsopt::parts::counters);
    opt.export_state(2, exp_avg);
    EXPECT_EQ(exp_avg[3], 0);
    opt.export_state(6, steps);
    EXPECT_EQ(steps[2], 0);
}

TEST(CppStateEntry, ThrowsIfStateMemoryWasReallocated) {
    Model model;
    dsopt::context ctx;
    dsopt::optimizer opt(ctx);
    opt.add_group(rule(), model.params);
    const dsopt::state_entry early = opt.state(0);
    EXPECT_EQ(early.tensor().data, nullptr);
    opt.step(model.grads);
    EXPECT_REFUSED((void)early.tensor(), dsopt::state_error, "exp_avg");
    const std::vector<dsopt::state_entry> entries = opt.state_list();
    const dsopt::state_entry &moment = entries.front(), &steps = entries.back();
    const auto *const words = static_cast<const std::int32_t *>(steps.tensor().data);
    bool moved = false;
    std::vector<float> more(200);
    for (std::size_t i = 0; i < more.size(); ++i) {
        opt.add_group(rule(), {{dsopt::view(&more[i], 1), ("more" + std::to_string(i)).c_str()}});
        try {
            EXPECT_EQ(steps.tensor().data, words);
            EXPECT_FALSE(moved) << "an entry of the old memory is valid again";
        } catch (const dsopt::state_error &) { moved = true; }
        EXPECT_EQ(moment.tensor().data, entries.front().tensor().data);
    }
    EXPECT_TRUE(moved);
    EXPECT_EQ(words[2], 1) << "the old memory is still allocated";
    opt = dsopt::optimizer(ctx);
    EXPECT_EQ(words[2], 1) << "the entries keep the old memory alive";
    EXPECT_EQ(static_cast<const std::int32_t *>(moment.tensor().data) != nullptr, true);
}

TEST(CppOptimizer, BindsStateAndParameterMemory) {
    Model model, reference, moved;
    dsopt::context ctx;
    dsopt::optimizer opt(ctx), plain(ctx);
    opt.add_group(rule(), model.params);
    plain.add_group(rule(), reference.params);
    State state(opt);
    opt.init_state({}, state.list);
    opt.bind_state(state.list);
    opt.bind_params(moved.weights);
    for (std::uint32_t s = 0; s < 3; ++s) {
        model.next_gradients(s);
        opt.step(model.grads);
        plain.step(model.grads);
    }
    expect_same(moved, reference);
    expect_same(model, Model());
    std::vector<float> exp_avg(7);
    plain.export_state(2, exp_avg);
    EXPECT_EQ(state.memory[2], exp_avg);
    moved.weights.pop_back();
    EXPECT_REFUSED(opt.bind_params(moved.weights), dsopt::argument_error, "2 entries");
}

TEST(CppOptimizer, AccumulatesGradients) {
    Model twice, once;
    dsopt::context ctx;
    dsopt::optimizer_options options;
    options.accumulate = true;
    dsopt::optimizer opt(ctx, options), plain(ctx);
    opt.add_group(rule(), twice.params);
    plain.add_group(rule(), once.params);
    opt.accumulate(twice.grads);
    opt.accumulate(twice.grads);
    const float two = 2;
    dsopt::step_options step;
    step.grad_scale = &two;
    opt.step_accumulated(step);
    plain.step(once.grads);
    expect_same(twice, once);
    EXPECT_REFUSED(plain.accumulate(once.grads), dsopt::unsupported_error, "ACCUMULATE");
    EXPECT_REFUSED(plain.step_accumulated(), dsopt::unsupported_error, "ACCUMULATE");
    step.out = dsopt::span<const dsopt::tensor>(once.grads.data(), 2);
    EXPECT_REFUSED(opt.step_accumulated(step), dsopt::argument_error, "out has 2 entries");
}

TEST(CppOptimizer, AcceptsEveryOption) {
    Model model;
    dsopt::context ctx;
    const auto refused = [&](auto set, const char *words) {
        dsopt::optimizer_options options;
        set(options);
        EXPECT_REFUSED(dsopt::optimizer(ctx, options).add_group(rule(), model.params), dsopt::unsupported_error, words);
    };
    refused([](auto &options) { options.stochastic_rounding = true; }, "STOCHASTIC_ROUNDING");
    refused([](auto &options) { options.averages = true; }, "AVERAGES");
    refused([](auto &options) { options.momentum_bits = true; }, "MOMENTUM_BITS");
    refused([](auto &options) { options.check_ranks = true; }, "CHECK_RANKS");
    dsopt::optimizer_options options;
    options.max_value = -1;
    EXPECT_REFUSED(dsopt::optimizer(ctx, options), dsopt::argument_error, "max_value");
    options = {};
    options.report_norms = options.timing = true;
    options.nonfinite = dsopt::nonfinite::skip;
    dsopt::optimizer opt(ctx, options);
    opt.add_group(rule(), model.params);
    opt.step(model.grads);
    EXPECT_GT(opt.report().weight_norm, 0);
    EXPECT_GT(opt.report().ms[DSOPT_MS_BASIC_STEP], 0);
    model.g[0][0] = NAN;
    opt.step(model.grads);
    EXPECT_EQ(opt.report().kind, DSOPT_FOUND_NAN);
    options = {};
    options.compat = dsopt::compat::deepspeed;
    options.masters = dsopt::masters::flat;
    dsopt::optimizer original(ctx, options);
    std::vector<dsopt::bf16> weights(4);
    dsopt::param param;
    param.tensor = dsopt::view(weights);
    original.add_group(rule(), {param});
    EXPECT_STREQ(original.state(0).name(), "master");
    options = {};
    options.no_master = true;
    dsopt::optimizer without(ctx, options);
    without.add_group(rule(), {param});
    EXPECT_STREQ(without.state(0).name(), "exp_avg");
}

} // namespace optimizer_tests
