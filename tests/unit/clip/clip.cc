// SPDX-License-Identifier: Apache-2.0
// Clipping by norm and by value, with scales, limits per group, and norms that the caller passes.
#include "clip.h"

using namespace test;

namespace clip_tests {

const std::vector<int64_t> kSizes = {5000, 0, 33, 4097};

void expect_near(double got, double wanted, double tolerance = 1e-12) {
    EXPECT_LE(std::fabs(got - wanted), tolerance * std::fabs(wanted)) << got << " instead of " << wanted;
}
std::vector<Array> scaled_by(const std::vector<Array> &grads, float factor) {
    std::vector<Array> list;
    for (const Array &grad : grads) {
        std::vector<float> values = grad.floats();
        for (float &value : values) value *= factor;
        list.emplace_back(DSOPT_DTYPE_F32, values);
    }
    return list;
}

TEST(Clip, DividesByNormOverMaxNormAndReportsUnscaledNorm) {
    const double scale = 64;
    Random random(3);
    const Context ctx = make_context(2);
    dsopt_optimizer_desc desc = optimizer_desc();
    for (const int32_t algorithm : kStandardRules)
        for (const double max_norm : {0.25, 1e6}) {
            const Scaler scaler = make_scaler(ctx, scale);
            desc.scaler = scaler.get();
            desc.max_norm = max_norm;
            const std::vector<Array> start = mixed_arrays(random);
            Trainer clipped(ctx, desc, group_of(algorithm), start),
                reference(ctx, optimizer_desc(), group_of(algorithm), start);
            for (int step = 0; step < 4; ++step) {
                const std::vector<Array> g = mixed_arrays(random, 8);
                ASSERT_OK(clipped.step(g));
                const dsopt_report report = clipped.report();
                const double norm = exact_norm(g) / scale;
                expect_near(report.grad_norm, norm);
                expect_near(report.dense_norm, norm);
                EXPECT_EQ(report.expert_norm, 0);
                expect_near(report.divisor, scale * std::max(1.0, (norm + 1e-6) / max_norm));
                ASSERT_OK(reference.step(scaled_by(g, float(1 / report.divisor))));
                Snapshot got = clipped.snapshot();
                got.erase("scaler -1");
                got.erase("loss_scale -1");
                ASSERT_TRUE(same(got, reference.snapshot())) << "algorithm " << algorithm << ", max norm " << max_norm;
            }
        }
}

TEST(Clip, KeepsGradientsUpToMaxNorm) {
    const Context ctx = make_context(2);
    Trainer trainer(ctx, optimizer_desc(5.000002), gradient_as_moment(),
                    std::vector<Array>{Array(DSOPT_DTYPE_F32, 2, 1)});
    ASSERT_OK(trainer.step({Array(DSOPT_DTYPE_F32, {3, 4})}));
    EXPECT_EQ(trainer.report().divisor, 1);
    EXPECT_EQ(trainer.state("exp_avg", 0), (std::vector<float>{3, 4}));
    must(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM, 2.5)); // from the next step on
    ASSERT_OK(trainer.step({Array(DSOPT_DTYPE_F32, {3, 4})}));
    expect_near(trainer.report().divisor, (5 + 1e-6) / 2.5);
}

TEST(Clip, ClampsUnscaledElementsAfterTheNorm) {
    const float scale = 8;
    Random random(3);
    const Context ctx = make_context(2);
    dsopt_optimizer_desc desc = optimizer_desc();
    const Scaler scaler = make_scaler(ctx, double(scale));
    desc.scaler = scaler.get();
    desc.max_value = 0.75;
    for (const double max_norm : {0.0, 2.0}) {
        desc.max_norm = max_norm;
        Trainer trainer(ctx, desc, gradient_as_moment(), std::vector<Array>{Array(DSOPT_DTYPE_F16, 5000, 1)});
        const Array grad(DSOPT_DTYPE_F16, random.floats(5000, -10, 10));
        ASSERT_OK(trainer.step({grad}));
        const float inverse = float(1 / trainer.report().divisor);
        std::vector<float> wanted = grad.floats();
        for (float &g : wanted) g = std::clamp(g * inverse, -0.75f, 0.75f);
        EXPECT_TRUE(same_bits(trainer.state("exp_avg", 0), wanted));
        expect_near(trainer.report().grad_norm, exact_norm({grad}) / double(scale)); // the norm before clamping
    }
}

TEST(Clip, KeepsNanAndClampsInfIfNonfiniteIsApplied) {
    const Context ctx = make_context(2);
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.max_value = 2;
    desc.nonfinite = DSOPT_NONFINITE_APPLY;
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16}) {
        Trainer trainer(ctx, desc, gradient_as_moment(), std::vector<Array>{Array(dtype, 5, 1)});
        ASSERT_OK(trainer.step({Array(dtype, {kNaN, kInf, -kInf, 3, -1})}));
        EXPECT_TRUE(same_bits(trainer.state("exp_avg", 0), {kNaN, 2, -2, 2, -1})) << dtype_name(dtype);
    }
}

TEST(Clip, RefusesAMaxValueThatIsZeroInFp32) {
    const Context ctx = make_context();
    dsopt_optimizer *opt = nullptr;
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.max_value = 1e-60;
    EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_ARGUMENT, "max_value"));
    EXPECT_EQ(opt, nullptr);
}

class ClipByNorm : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, ClipByNorm, testing::ValuesIn(kAlgorithms), algorithm_name);

/// Returns the divisor of a parameter's gradients, computed from exp_avg after the first step.
double divisor_applied(const Trainer &trainer, int64_t param) {
    const std::vector<float> m = exported(trainer.opt(), param, "exp_avg");
    double moments = 0, gradients = 0;
    for (size_t i = 0; i < m.size(); ++i) {
        moments += std::fabs(double(m[i]));
        gradients += std::fabs(double(trainer.model.grads[size_t(param)][size_t(int64_t(i))]));
    }
    return 0.1 * gradients / moments;
}

TEST_P(ClipByNorm, AppliesTheLargerDivisorOfGroupAndOptimizer) {
    dsopt_group tight = make_group(GetParam(), 0), loose = tight, none = tight;
    tight.max_norm = 0.01;
    loose.max_norm = 1e6;
    for (const double max_norm : {0.0, 1e5, 0.5})
        for (const float scale : {1.0f, 2.0f})
            for (const bool tight_first : {true, false}) {
                SCOPED_TRACE(testing::Message() << max_norm << ", scale " << scale << ", tight first " << tight_first);
                Trainer trainer(shapes_of({1000, 2000, 3000}), optimizer_desc(max_norm));
                trainer.add(tight_first ? tight : none, 1);
                trainer.add(loose, 1);
                trainer.add(tight_first ? none : tight, 1);
                dsopt_step step = trainer.arguments();
                step.grad_scale = on_device(scale);
                must(trainer.step(step));
                const size_t tight_index = tight_first ? 0 : 2;
                const auto divisor = [&](double norm, double limit) {
                    return scale * (limit > 0 ? std::max(1.0, (norm / double(scale) + 1e-6) / limit) : 1.0);
                };
                const double of_optimizer = divisor(exact_norm(trainer.model.grads), max_norm),
                             of_group = divisor(exact_norm(trainer.model.grads, tight_index, tight_index + 1), 0.01);
                ASSERT_GT(of_group, of_optimizer);
                for (size_t i = 0; i < 3; ++i) {
                    const double wanted = i == tight_index ? of_group : of_optimizer;
                    EXPECT_NEAR(divisor_applied(trainer, int64_t(i)), wanted, 1e-6 * wanted) << "group " << i;
                }
                const double first = tight_first ? of_group : of_optimizer; // the report contains that of group 0
                EXPECT_NEAR(report_of(trainer.opt()).divisor, first, 1e-13 * first);
            }
}

TEST_P(ClipByNorm, UsesAndReportsTheNormOfUnscaledGradients) {
    const float scale = 1000;
    for (const double max_norm : {0.01, 1e9}) {
        const Trainer trainer(shapes_of(kSizes), make_group(GetParam(), 0), optimizer_desc(max_norm));
        dsopt_step step = trainer.arguments();
        step.grad_scale = on_device(scale);
        must(trainer.step(step));
        const dsopt_report report = report_of(trainer.opt());
        const double norm = exact_norm(trainer.model.grads) / double(scale);
        const double divisor = double(scale) * std::max(1.0, (norm + 1e-6) / max_norm);
        EXPECT_NEAR(report.grad_norm, norm, 1e-13 * norm);
        EXPECT_NEAR(report.divisor, divisor, 1e-13 * divisor);
        EXPECT_EQ(report.divisor == double(scale), max_norm > norm);
        EXPECT_NEAR(divisor_applied(trainer, 0), divisor, 1e-6 * divisor);
    }
}

// Gradients are 3 and 4, so every norm is an integer and the fp32 norm of the caller is exact.
TEST_P(ClipByNorm, GivesTheSameBitsWithNormsOfTheCaller) {
    dsopt_group group = make_group(GetParam());
    group.max_norm = 1.5;
    for (const float scale : {1.0f, 4.0f}) {
        Trainer engine(shapes_of({2, 2}), optimizer_desc(2.0)), caller(shapes_of({2, 2}), optimizer_desc(2.0));
        for (Trainer *trainer : {&engine, &caller}) {
            trainer->add(group, 1);
            trainer->add(group, 1);
            for (const Array &grad : trainer->model.grads) {
                grad.set(0, 3 * scale);
                grad.set(1, 4 * scale);
            }
        }
        const float norms[] = {5 * scale, 5 * scale};
        for (int t = 0; t < 3; ++t) {
            dsopt_step step = engine.arguments();
            step.grad_scale = on_device(scale);
            must(engine.step(step));
            step = caller.arguments();
            step.grad_scale = on_device(scale);
            step.grad_norms = on_device(norms);
            must(caller.step(step));
        }
        EXPECT_TRUE(same(engine.text(), caller.text()));
        EXPECT_EQ(report_of(caller.opt()).divisor, report_of(engine.opt()).divisor);
        EXPECT_EQ(report_of(caller.opt()).grad_norm, report_of(engine.opt()).grad_norm);
        EXPECT_EQ(report_of(caller.opt()).grad_norm, 5 * std::sqrt(2.0));
    }
}

TEST_P(ClipByNorm, UsesNormsOfTheCallerInsteadOfGradients) {
    const Trainer trainer(shapes_of({2}), make_group(GetParam(), 0), optimizer_desc(1.0));
    const float norm = 1e6f; // not the norm of the gradients
    dsopt_step step = trainer.arguments();
    step.grad_norms = on_device(norm);
    must(trainer.step(step));
    EXPECT_NEAR(divisor_applied(trainer, 0), 1e6, 2);
    EXPECT_EQ(report_of(trainer.opt()).grad_norm, 1e6);
}

} // namespace clip_tests
