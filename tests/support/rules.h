// SPDX-License-Identifier: Apache-2.0
// Common parts of the tests of element-wise rules with one moment or none: each step is compared with the rule's
// formula in double precision, from the engine's own state before the step. Also properties that hold for every rule.
#pragma once
#include "caller_memory.h"
#include "harness.h"
#include <cfloat>
#include <ostream>

namespace test {

/// Computes one element of a step in double. Returns the scale of the allowed error: the sum of the magnitudes of the
/// weight's terms, each of which is rounded a few times.
using Formula = std::function<double(const dsopt_group &group, int64_t t, double g, double &p, double &m)>;

struct RuleCase {
    std::string name;
    dsopt_group group;
    std::string moment; // "": none
    Formula formula;
    double start = 0; // initial value of the moment
    friend void PrintTo(const RuleCase &c, std::ostream *out) { *out << c.name; }
};

struct RuleUse {
    int32_t param = DSOPT_DTYPE_F32, grad = DSOPT_DTYPE_F32;
    dsopt_optimizer_desc desc = optimizer_desc();
};

/// Sizes around every edge: empty, single, a vector, a leaf.
inline const std::vector<int64_t> kRuleSizes = {0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 4095, 4096, 4097, 8193};

inline std::vector<double> as_doubles(const std::vector<float> &values) { return {values.begin(), values.end()}; }

inline void expect_formula(const RuleCase &c, const RuleUse &use) {
    const Trainer trainer(shapes_of(kRuleSizes, use.param, use.grad), c.group, use.desc);
    dsopt_optimizer *const opt = trainer.opt();
    const bool master = use.param != DSOPT_DTYPE_F32 && !(use.desc.flags & DSOPT_OPTIMIZER_NO_MASTER);
    const bool rounds = use.param != DSOPT_DTYPE_F32 && !master;
    const double unit = !rounds ? FLT_EPSILON : use.param == DSOPT_DTYPE_F16 ? 1.0 / 1024 : 1.0 / 128;
    const double least = rounds && use.param == DSOPT_DTYPE_F16 ? std::ldexp(1, -25) : FLT_MIN; // half a subnormal
    const auto weights = [&](int64_t i) {
        return master ? as_doubles(exported(opt, i, "master")) : as_doubles(trainer.model.params[size_t(i)].floats());
    };
    const auto moments = [&](int64_t i) {
        return c.moment.empty() ? std::vector<double>(size_t(kRuleSizes[size_t(i)]))
                                : as_doubles(exported(opt, i, c.moment));
    };
    for (int64_t t = 1; t <= 6; ++t) {
        trainer.model.make_gradients(uint64_t(t));
        std::vector<std::vector<double>> p, m;
        for (size_t i = 0; i < kRuleSizes.size(); ++i)
            p.push_back(weights(int64_t(i))), m.push_back(moments(int64_t(i)));
        must(trainer.step(trainer.arguments()));
        const double divisor = use.desc.max_norm > 0 ? report_of(opt).divisor : 1;
        for (size_t i = 0; i < kRuleSizes.size(); ++i) {
            const std::vector<double> p_now = weights(int64_t(i)), m_now = moments(int64_t(i));
            for (size_t k = 0; k < p[i].size(); ++k) {
                const double g = trainer.model.grads[i][k] / divisor, old = m[i][k];
                const double size = c.formula(c.group, t, g, p[i][k], m[i][k]);
                ASSERT_NEAR(p_now[k], p[i][k], 6 * FLT_EPSILON * size + unit * std::fabs(p[i][k]) + least)
                    << c.name << ", step " << t << ", tensor " << i << ", element " << k;
                ASSERT_NEAR(m_now[k], m[i][k], 6 * FLT_EPSILON * (std::fabs(old) + size + std::fabs(m[i][k])))
                    << c.name << ", step " << t << ", tensor " << i << ", element " << k;
                if (!master) continue;
                ASSERT_EQ(trainer.model.params[i][k], rounded(float(p_now[k]), use.param));
            }
        }
    }
    EXPECT_TRUE(trainer.model.intact());
}

/// Tests all dtypes of weights and gradients, with and without masters, with and without clipping.
inline void expect_formula_everywhere(const RuleCase &c) {
    for (const int32_t param : kDtypes)
        for (const int32_t grad : kDtypes) expect_formula(c, {param, grad});
    expect_formula(c, {DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16, optimizer_desc(0, DSOPT_OPTIMIZER_NO_MASTER)});
    expect_formula(c, {DSOPT_DTYPE_F16, DSOPT_DTYPE_F32, optimizer_desc(0, DSOPT_OPTIMIZER_NO_MASTER)});
    expect_formula(c, {DSOPT_DTYPE_F32, DSOPT_DTYPE_F32, optimizer_desc(3)});
    expect_formula(c, {DSOPT_DTYPE_BF16, DSOPT_DTYPE_F16, optimizer_desc(0.1)});
}

/// Tests that a missing moment has no entry and no memory.
inline void expect_state(const RuleCase &c) {
    const Trainer trainer(shapes_of({1000, 0, 24}), c.group);
    const int64_t counters = 3 * 4, moments = c.moment.empty() ? 0 : 1024 * 4;
    EXPECT_EQ(report_of(trainer.opt()).state_bytes, counters + moments);
    ASSERT_EQ(state_count(trainer.opt()), c.moment.empty() ? 1 : 4);
    if (c.moment.empty()) return;
    for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(state_info(trainer.opt(), i).name, c.moment);
}

/// Tests that the bits do not depend on instruction set, number of threads or form of the call.
inline void expect_same_bits_in_all_modes(const RuleCase &c) {
    std::string wanted;
    const auto note = [&](const std::string &text, const std::string &what) {
        if (wanted.empty())
            wanted = text;
        else
            EXPECT_TRUE(same(text, wanted)) << c.name << ": " << what;
    };
    const std::vector<Shape> shapes = {{20000}, {4097, DSOPT_DTYPE_F32, DSOPT_DTYPE_F16}, {0}, {1}, {333}};
    for (const char *isa : kIsas)
        for (const int32_t threads : {1, 3}) {
            setenv("DSOPT_ISA", isa, 1);
            const Trainer trainer(shapes, c.group, optimizer_desc(), context_desc(threads));
            unsetenv("DSOPT_ISA");
            trainer.train(1, 4);
            note(trainer.text(), std::string(isa) + ", " + std::to_string(threads) + " threads");
        }
    // The functional form, on state that dsopt_optimizer_init_state initialized over garbage.
    const Trainer trainer(shapes, c.group);
    CallerMemory caller_memory(trainer.opt(), trainer.model.params, 0x7f);
    must(caller_memory.init());
    for (uint64_t t = 1; t <= 4; ++t) {
        trainer.model.make_gradients(t);
        must(caller_memory.apply(trainer.model.grads));
    }
    EXPECT_TRUE(caller_memory.intact()) << c.name;
    note(caller_memory.text(), "apply");
}

/// Tests that six steps are the same if a checkpoint file is saved and loaded after three.
inline void expect_resumed(const RuleCase &c) {
    const Folder folder;
    const std::string path = folder / "rule.safetensors";
    const std::vector<Shape> shapes = shapes_of({100, 5000}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16);
    const Trainer whole(shapes, c.group), first(shapes, c.group);
    whole.train(1, 6);
    first.train(1, 3);
    must(dsopt_optimizer_save(first.opt(), path.c_str(), nullptr));
    dsopt_group other = c.group;
    other.lr = 0.5;
    const Trainer second(shapes, other);
    for (size_t i = 0; i < shapes.size(); ++i) second.model.params[i].write(first.model.params[i].text());
    EXPECT_OK(dsopt_optimizer_load(second.opt(), path.c_str(), nullptr));
    second.train(4, 6);
    EXPECT_TRUE(same(second.text(), whole.text())) << c.name;
    EXPECT_EQ(get(second.opt(), 0, DSOPT_KEY_LR), c.group.lr);
}

/// Tests that scales, accumulators, outputs, deltas and random rounding work as with other rules.
inline void expect_options(const RuleCase &c) {
    const std::vector<int64_t> sizes = {4097, 9};
    const Trainer plain(shapes_of(sizes), c.group), scaled(shapes_of(sizes), c.group),
        summed(shapes_of(sizes), c.group, optimizer_desc(0, DSOPT_OPTIMIZER_ACCUMULATE)),
        delta(shapes_of(sizes), c.group);
    const float four = 4;
    for (uint64_t t = 1; t <= 3; ++t) {
        plain.train(t);
        scaled.model.make_gradients(t);
        for (const Array &grad : scaled.model.grads)
            for (size_t i = 0; i < grad.size(); ++i) grad.set(i, 4 * grad[i]);
        dsopt_step step = scaled.arguments();
        step.grad_scale = &four;
        must(scaled.step(step));
        summed.model.make_gradients(t);
        for (const Array &grad : summed.model.grads)
            for (size_t i = 0; i < grad.size(); ++i) grad.set(i, grad[i] / 2);
        for (int half = 0; half < 2; ++half)
            must(dsopt_optimizer_accumulate(summed.opt(), summed.grads.data(), 2, nullptr));
        step = summed.arguments();
        step.grads = nullptr;
        step.flags = DSOPT_STEP_ACCUMULATED;
        must(summed.step(step));
        delta.model.make_gradients(t);
        std::vector<Array> outs;
        for (const int64_t n : sizes) outs.emplace_back(DSOPT_DTYPE_F32, size_t(n), 0.0f);
        const std::vector<dsopt_tensor> out = list_of(outs);
        step = delta.arguments();
        step.out = out.data();
        step.flags = DSOPT_STEP_DELTA;
        must(delta.step(step));
        for (size_t i = 0; i < sizes.size(); ++i)
            for (size_t k = 0; k < outs[i].size(); ++k) {
                const float old = delta.model.params[i][k];
                ASSERT_EQ(outs[i][k], plain.model.params[i][k] - old) << c.name;
                delta.model.params[i].set(k, plain.model.params[i][k]);
            }
    }
    EXPECT_TRUE(same(scaled.text(), plain.text())) << c.name;
    EXPECT_TRUE(same(summed.model.text(), plain.model.text())) << c.name;

    dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING);
    desc.seed = 3;
    const Trainer random(shapes_of({5000}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F32), c.group, desc);
    const std::vector<double> before = as_doubles(random.model.params[0].floats());
    random.train(1);
    int64_t off = 0; // not one of the two neighbors
    double error = 0;
    for (size_t k = 0; k < before.size(); ++k) {
        double p = before[k], m = c.start;
        (void)c.formula(c.group, 1, random.model.grads[0][k], p, m);
        const double got = random.model.params[0][k], step = std::ldexp(1.0, std::ilogb(p == 0 ? 1.0 : p) - 7);
        off += std::fabs(got - p) > step * 1.001;
        error += (got - p) / step;
    }
    EXPECT_EQ(off, 0) << c.name;
    EXPECT_LT(std::fabs(error / 5000), 0.05) << c.name; // rounding to nearest or down would give up to 0.5
}

class RuleTest : public testing::TestWithParam<RuleCase> {};

/// The test suite of one rule, for a vector of cases.
#define RULE_SUITE(suite, cases)                                                                                       \
    class suite : public RuleTest {};                                                                                  \
    INSTANTIATE_TEST_SUITE_P(, suite, testing::ValuesIn(cases), [](const auto &info) { return info.param.name; });     \
    LABEL_TEST(numbers_only, suite, MatchesFormula);                                                                   \
    LABEL_TEST(long_emulated, suite, MatchesFormula);                                                                  \
    TEST_P(suite, MatchesFormula) { expect_formula_everywhere(GetParam()); }                                           \
    TEST_P(suite, HasOnlyNeededState) { expect_state(GetParam()); }                                                    \
    TEST_P(suite, HasSameBitsInAllModes) { expect_same_bits_in_all_modes(GetParam()); }                                \
    TEST_P(suite, ResumesFromCheckpoint) { expect_resumed(GetParam()); }                                               \
    TEST_P(suite, SupportsStepOptions) { expect_options(GetParam()); }

/// Expects that dsopt_optimizer_add_group refuses a group, with these words in the error text.
inline void expect_refused(const dsopt_group &group, dsopt_status status, const std::string &words,
                           int32_t compat = DSOPT_COMPAT_NONE) {
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.compat = compat;
    const Trainer trainer(shapes_of({}), desc);
    EXPECT_TRUE(refused(dsopt_optimizer_add_group(trainer.opt(), &group, nullptr, 0), status, words));
}

} // namespace test
