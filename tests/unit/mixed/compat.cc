// SPDX-License-Identifier: Apache-2.0
// Differences between compat mode and standard mode in mixed precision. Each is tested in both modes, with numbers that
// can be computed by hand. dsopt-replay compares with recorded runs of the original.
#include "support/harness.h"

using namespace test;

namespace mixed_compat_tests {

dsopt_optimizer_desc standard() {
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    return desc;
}
/// The original's wrapper with a flat master per group (FP16_Optimizer) or a master per tensor (FP16_UnfusedOptimizer).
dsopt_optimizer_desc compat(int32_t masters, uint32_t flags = 0) {
    dsopt_optimizer_desc desc = standard();
    desc.compat = DSOPT_COMPAT_DEEPSPEED;
    desc.masters = masters;
    desc.flags = flags;
    return desc;
}
dsopt_optimizer_desc flat() { return compat(DSOPT_MASTERS_FLAT); }
dsopt_optimizer_desc per_tensor() { return compat(DSOPT_MASTERS_PER_TENSOR); }
dsopt_optimizer_desc bare() { return compat(DSOPT_MASTERS_PER_TENSOR, DSOPT_OPTIMIZER_NO_MASTER); }

/// Returns a group whose exp_avg is the gradient that the rule uses: beta1 is 0, and there is no weight decay.
dsopt_group gradient_as_moment() {
    dsopt_group group = group_of(DSOPT_ALGORITHM_ADAM, 1e-2, 0);
    group.beta1 = 0;
    return group;
}
std::vector<Array> one_element(int32_t dtype, float value = 1) { return {Array(dtype, 1, value)}; }
void expect_near(double got, double wanted) {
    EXPECT_LE(std::fabs(got - wanted), 1e-12 * std::fabs(wanted)) << got << ", " << wanted;
}

// --------------------------------------------------------------------------------------------- counter of Adam's steps
/// Returns the change of a weight in its first step if its bias is corrected for step `t`.
double first_change(const dsopt_group &g, int t) {
    return g.lr * (1 - g.beta1) / (1 - std::pow(g.beta1, t)) / std::sqrt((1 - g.beta2) / (1 - std::pow(g.beta2, t)));
}

TEST(CompatStepCount, IsPerGroupAndRaisedForEveryDtype) {
    const Context ctx = make_context(1);
    dsopt_group group = group_of(DSOPT_ALGORITHM_ADAM, 0.125, 0);
    group.beta1 = 0.5;
    group.beta2 = 0.75;
    group.eps = 0;
    // fp16 is counted first, then bf16, then fp32, all in the count of the last tensor with a gradient.
    Trainer trainer(ctx, bare(), group,
                    std::vector<Array>{Array(DSOPT_DTYPE_F32, 1, 1), Array(DSOPT_DTYPE_F16, 1, 1),
                                       Array(DSOPT_DTYPE_BF16, 1, 1), Array(DSOPT_DTYPE_F32, 1, 1)});
    ASSERT_OK(trainer.step(
        {Array(DSOPT_DTYPE_F32, 1, 1), Array(DSOPT_DTYPE_F16, 1, 1), Array(DSOPT_DTYPE_BF16, 1, 1), Array::absent(1)}));
    EXPECT_EQ(trainer.state("step"), (std::vector<float>{0, 0, 3, 0}));
    EXPECT_NEAR(trainer.weight(1)[0], 1 - first_change(group, 1), 1e-3);
    EXPECT_NEAR(trainer.weight(2)[0], 1 - first_change(group, 2), 1e-2);
    EXPECT_NEAR(trainer.weight(0)[0], 1 - first_change(group, 3), 1e-6);
    ASSERT_OK(
        trainer.step({Array::absent(1), Array(DSOPT_DTYPE_F16, 1, 1), Array::absent(1), Array(DSOPT_DTYPE_F32, 1, 1)}));
    EXPECT_EQ(trainer.state("step"), (std::vector<float>{0, 0, 3, 2}))
        << "not counted in the last tensor with a gradient";
}

TEST(StandardStepCount, IsPerTensor) {
    const Context ctx = make_context(1);
    dsopt_group group = group_of(DSOPT_ALGORITHM_ADAM, 0.125, 0);
    group.beta1 = 0.5;
    group.eps = 0;
    dsopt_optimizer_desc desc = standard();
    desc.flags = DSOPT_OPTIMIZER_NO_MASTER;
    Trainer trainer(
        ctx, desc, group,
        std::vector<Array>{Array(DSOPT_DTYPE_F32, 1, 1), Array(DSOPT_DTYPE_F16, 1, 1), Array(DSOPT_DTYPE_BF16, 1, 1)});
    for (int step = 0; step < 3; ++step)
        must(trainer.step({Array(DSOPT_DTYPE_F32, 1, 1), step == 1 ? Array::absent(1) : Array(DSOPT_DTYPE_F16, 1, 1),
                           step == 0 ? Array(DSOPT_DTYPE_BF16, 1, 1) : Array::absent(1)}));
    EXPECT_EQ(trainer.state("step"), (std::vector<float>{3, 2, 1}));
    EXPECT_NEAR(trainer.weight(1)[0], 0.75, 1e-3); // two steps of lr each
    EXPECT_NEAR(trainer.weight(2)[0], 0.875, 1e-2);
}

// ------------------------------------------------------------------------------------------------------------ 1 - beta
TEST(CompatOneMinusBeta, IsComputedInFp32) {
    const Context ctx = make_context(1);
    for (const dsopt_optimizer_desc &desc : {flat(), per_tensor(), compat(DSOPT_MASTERS_PER_TENSOR)}) {
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM, 1e-3, 0), one_element(DSOPT_DTYPE_F16));
        ASSERT_OK(trainer.step(one_element(DSOPT_DTYPE_F16)));
        EXPECT_EQ(trainer.first("exp_avg"), 1.0f - 0.9f);
        EXPECT_EQ(trainer.first("exp_avg_sq"), 1.0f - 0.999f);
    }
}
TEST(StandardOneMinusBeta, IsComputedInDoubleAndRoundedOnce) {
    const Context ctx = make_context(1);
    Trainer trainer(ctx, standard(), group_of(DSOPT_ALGORITHM_ADAM, 1e-3, 0), one_element(DSOPT_DTYPE_F16));
    ASSERT_OK(trainer.step(one_element(DSOPT_DTYPE_F16)));
    EXPECT_EQ(trainer.first("exp_avg"), float(1.0 - 0.9));
    EXPECT_EQ(trainer.first("exp_avg_sq"), float(1.0 - 0.999));
    EXPECT_NE(float(1.0 - 0.9), 1.0f - 0.9f);
}

// -------------------------------------------------------------------------------- order of scaler update and unscaling
/// Returns the unscaled gradients that the rule uses in calls `.....X...` (X = overflow). They are 1 if gradients are
/// divided by the scale that they were multiplied by. The scaler starts at 8 and has window 2.
std::vector<double> applied_gradients(const dsopt_optimizer_desc &wanted, std::vector<double> *norms) {
    const Context ctx = make_context(1);
    const Scaler scaler = make_scaler(ctx, 8, 2);
    dsopt_optimizer_desc desc = wanted;
    desc.scaler = scaler.get();
    Trainer trainer(ctx, desc, gradient_as_moment(), one_element(DSOPT_DTYPE_F16));
    std::vector<double> gradients;
    const double scales[] = {8, 8, 16, 16, 32, 16, 16, 16, 32};
    for (int call = 0; call < 9; ++call) {
        const float used = on_host(dsopt_scaler_device_scale(scaler.get()));
        must(trainer.step(one_element(DSOPT_DTYPE_F16, call == 5 ? kInf : used)));
        const dsopt_report report = trainer.report();
        gradients.push_back(report.last_skipped ? 0 : double(trainer.first("exp_avg")));
        EXPECT_EQ(report.scale_used, double(used));
        EXPECT_EQ(report.loss_scale, scales[call]);
        EXPECT_EQ(report.last_skipped ? 0 : report.scale_used / report.divisor, gradients.back());
        if (!report.last_skipped) norms->push_back(report.grad_norm);
    }
    return gradients;
}
TEST(CompatScale, ChangesBeforeGradientsAreDividedByIt) {
    for (const dsopt_optimizer_desc &desc : {flat(), per_tensor()}) {
        std::vector<double> norms;
        EXPECT_EQ(applied_gradients(desc, &norms), (std::vector<double>{1, 1, 0.5, 1, 0.5, 0, 1, 1, 0.5}));
        const std::vector<double> unscaled = {1, 1, 0.5, 1, 0.5, 1, 1, 0.5}, scaled = {8, 8, 8, 16, 16, 16, 16, 16};
        EXPECT_EQ(norms, desc.masters == DSOPT_MASTERS_FLAT ? unscaled : scaled);
    }
}
TEST(StandardScale, ChangesAfterGradientsAreDividedByIt) {
    std::vector<double> norms;
    EXPECT_EQ(applied_gradients(standard(), &norms), (std::vector<double>{1, 1, 1, 1, 1, 0, 1, 1, 1}));
    EXPECT_EQ(norms, std::vector<double>(8, 1));
}

// ----------------------------------------------------------------------------------------- construction of the wrapper
TEST(CompatConstruction, StepsOnceOnZeroGradients) {
    const Context ctx = make_context(1);
    struct {
        int32_t algorithm;
        float master;
    } const cases[] = {{DSOPT_ALGORITHM_ADAMW, 0.99f}, {DSOPT_ALGORITHM_ADAM, 0.9f}};
    for (const dsopt_optimizer_desc &desc : {flat(), per_tensor()})
        for (const auto &test : cases) {
            Trainer trainer(ctx, desc, group_of(test.algorithm, 0.1, 0.1), one_element(DSOPT_DTYPE_F16));
            EXPECT_EQ(trainer.state().back().tensor.data, nullptr) << "listing the state must not allocate it";
            EXPECT_FLOAT_EQ(trainer.first("master"), test.master);
            EXPECT_EQ(trainer.weight()[0], 1) << "the step must not change parameters";
            EXPECT_EQ(trainer.first("step", -1), 1);
            EXPECT_EQ(trainer.report().calls, 0);
            ASSERT_OK(trainer.step(one_element(DSOPT_DTYPE_F16)));
            EXPECT_EQ(trainer.first("step", -1), 2);
        }
    Trainer lamb(ctx, per_tensor(), group_of(DSOPT_ALGORITHM_LAMB, 0.1, 0.1),
                 one_element(DSOPT_DTYPE_F16)); // trust ratio 10, u = 0.1
    EXPECT_NEAR(lamb.first("master"), 1 - 0.1 * std::sqrt(1 - 0.999) / (1 - 0.9) * 10 * 0.1, 1e-6);
}
TEST(CompatConstruction, IsRunByTheFirstStepAndNotByALoad) {
    const Context ctx = make_context(1);
    Trainer stepped(ctx, flat(), group_of(DSOPT_ALGORITHM_ADAMW, 0.1, 0.1), one_element(DSOPT_DTYPE_F16));
    Trainer exported(ctx, flat(), group_of(DSOPT_ALGORITHM_ADAMW, 0.1, 0.1), one_element(DSOPT_DTYPE_F16));
    (void)exported.snapshot();
    must(stepped.step(one_element(DSOPT_DTYPE_F16)));
    must(exported.step(one_element(DSOPT_DTYPE_F16)));
    EXPECT_TRUE(same(stepped.snapshot(), exported.snapshot()));
    MemoryFile file;
    must(file.save(stepped));
    Trainer loaded(ctx, flat(), group_of(DSOPT_ALGORITHM_ADAMW, 0.1, 0.1), one_element(DSOPT_DTYPE_F16));
    must(file.load(loaded));
    EXPECT_EQ(loaded.first("master"), stepped.first("master"));
    EXPECT_EQ(loaded.first("step", -1), 2);
}
TEST(StandardConstruction, ChangesNothing) {
    const Context ctx = make_context(1);
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB}) {
        Trainer trainer(ctx, standard(), group_of(algorithm, 0.1, 0.1), one_element(DSOPT_DTYPE_F16));
        EXPECT_EQ(trainer.first("master"), 1);
        EXPECT_EQ(trainer.first("step", -1), 0);
    }
}

// ---------------------------------------------------------------------------------------------------------- hysteresis
TEST(CompatHysteresis, IsRefusedAtCreation) {
    const Context ctx = make_context(1);
    DSOPT_NEW(dsopt_scaler_desc, scaler_desc);
    scaler_desc.hysteresis = 2;
    const Scaler scaler = make_scaler(ctx, scaler_desc);
    dsopt_optimizer_desc desc = flat();
    desc.scaler = scaler.get();
    dsopt_optimizer *opt = nullptr;
    EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_UNSUPPORTED, "hysteresis"));
    EXPECT_EQ(opt, nullptr);
    desc = standard();
    desc.scaler = scaler.get();
    const Trainer accepted(ctx, desc); // the refused call has not attached the scaler
}
TEST(CompatHysteresis, IsRefusedFromACheckpoint) {
    const Context ctx = make_context(1);
    DSOPT_NEW(dsopt_scaler_desc, scaler_desc);
    scaler_desc.hysteresis = 2;
    const Scaler with_hysteresis = make_scaler(ctx, scaler_desc), plain = make_scaler(ctx, 64);
    dsopt_optimizer_desc desc = standard();
    desc.scaler = with_hysteresis.get();
    Trainer saved(ctx, desc, gradient_as_moment(), one_element(DSOPT_DTYPE_F16));
    desc = flat();
    desc.scaler = plain.get();
    Trainer loaded(ctx, desc, gradient_as_moment(), one_element(DSOPT_DTYPE_F16));
    MemoryFile file;
    must(file.save(saved));
    EXPECT_TRUE(refused(file.load(loaded), DSOPT_ERR_MISMATCH, "hysteresis"));
    EXPECT_EQ(info_of(plain).scale, 64);
    EXPECT_OK(file.load(loaded, DSOPT_IO_NO_SCALER));
}
TEST(StandardHysteresis, IsApplied) {
    const Context ctx = make_context(1);
    DSOPT_NEW(dsopt_scaler_desc, scaler_desc);
    scaler_desc.hysteresis = 2;
    scaler_desc.init = 16;
    const Scaler scaler = make_scaler(ctx, scaler_desc);
    dsopt_optimizer_desc desc = standard();
    desc.scaler = scaler.get();
    Trainer trainer(ctx, desc, gradient_as_moment(), one_element(DSOPT_DTYPE_F16));
    for (const double scale : {16.0, 8.0, 4.0}) {
        must(trainer.step(one_element(DSOPT_DTYPE_F16, kInf)));
        EXPECT_EQ(info_of(scaler).scale, scale);
    }
}

// --------------------------------------------------------------------------------------------------- the reported norm
double reported_norm(dsopt_optimizer_desc desc) {
    const Context ctx = make_context(1);
    const Scaler scaler = make_scaler(ctx, 16);
    desc.scaler = scaler.get();
    desc.max_norm = 100;
    Trainer trainer(ctx, desc, gradient_as_moment(), std::vector<Array>{Array(DSOPT_DTYPE_F16, 2, 1)});
    must(trainer.step({Array(DSOPT_DTYPE_F16, {48, 64})}));
    EXPECT_EQ(trainer.report().divisor, 16);
    return trainer.report().grad_norm;
}
TEST(CompatNorm, IsReportedScaledOnlyByTheUnfusedWrapper) {
    EXPECT_EQ(reported_norm(per_tensor()), 80);
    EXPECT_EQ(reported_norm(flat()), 5);
}
TEST(StandardNorm, IsReportedUnscaled) { EXPECT_EQ(reported_norm(standard()), 5); }

/// Returns the gradient that the rule uses for 1e30 if max_norm is 1.
double clipped_huge_gradient(dsopt_optimizer_desc desc, double *norm) {
    const Context ctx = make_context(1);
    desc.max_norm = 1;
    Trainer trainer(ctx, desc, gradient_as_moment(), one_element(DSOPT_DTYPE_BF16));
    must(trainer.step(one_element(DSOPT_DTYPE_BF16, 1e30f)));
    EXPECT_EQ(trainer.report().last_skipped, 0);
    *norm = trainer.report().grad_norm;
    return double(trainer.first("exp_avg"));
}
TEST(CompatNorm, IsOneIfItOverflowsFp32) {
    for (const dsopt_optimizer_desc &desc : {flat(), per_tensor()}) {
        double norm = 0;
        EXPECT_NEAR(clipped_huge_gradient(desc, &norm) / 1e30, 1, 0.01);
        EXPECT_EQ(norm, 1);
    }
}
TEST(StandardNorm, IsComputedInDoubleAndClipsHugeGradients) {
    double norm = 0;
    EXPECT_NEAR(clipped_huge_gradient(standard(), &norm), 1, 1e-6);
    expect_near(norm, double(rounded(1e30f, DSOPT_DTYPE_BF16)));
}
TEST(StandardNorm, SkipsTheStepIfItIsNotFinite) {
    const Context ctx = make_context(1);
    dsopt_optimizer_desc desc = standard();
    desc.max_norm = 1;
    Trainer trainer(ctx, desc, gradient_as_moment(), one_element(DSOPT_DTYPE_BF16));
    must(trainer.step(one_element(DSOPT_DTYPE_BF16, kInf)));
    EXPECT_EQ(trainer.report().last_skipped, 1);
    EXPECT_EQ(trainer.weight()[0], 1);
}

// ---------------------------------------------------------------------------------------- Inf and NaN without a scaler
TEST(CompatNonfinite, IsReportedAndAppliedByTheFusedWrapper) {
    const Context ctx = make_context(1);
    Trainer trainer(ctx, flat(), gradient_as_moment(), one_element(DSOPT_DTYPE_BF16));
    must(trainer.step(one_element(DSOPT_DTYPE_BF16, kNaN)));
    EXPECT_EQ(trainer.report().nonfinite, 1);
    EXPECT_EQ(trainer.report().first_bad, 0);
    EXPECT_EQ(trainer.report().last_skipped, 0);
    EXPECT_TRUE(std::isnan(trainer.weight()[0]));
}
TEST(CompatNonfinite, SkipsTheStepOfTheUnfusedWrapper) {
    const Context ctx = make_context(1);
    Trainer trainer(ctx, per_tensor(), gradient_as_moment(), one_element(DSOPT_DTYPE_BF16));
    must(trainer.step(one_element(DSOPT_DTYPE_BF16, kNaN)));
    EXPECT_EQ(trainer.report().nonfinite, 1);
    EXPECT_EQ(trainer.report().last_skipped, 1);
    EXPECT_EQ(trainer.weight()[0], 1);
}
TEST(CompatNonfinite, IsAppliedWithoutAWrapper) {
    const Context ctx = make_context(1);
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16}) {
        Trainer trainer(ctx, bare(), gradient_as_moment(), one_element(dtype));
        must(trainer.step(one_element(dtype, kNaN)));
        EXPECT_EQ(trainer.report().last_skipped, 0);
        EXPECT_TRUE(std::isnan(trainer.weight()[0]));
    }
}
TEST(CompatNonfinite, FollowsAnExplicitPolicy) {
    const Context ctx = make_context(1);
    dsopt_optimizer_desc skip = flat(), apply = per_tensor();
    skip.nonfinite = DSOPT_NONFINITE_SKIP;
    apply.nonfinite = DSOPT_NONFINITE_APPLY;
    Trainer skipping(ctx, skip, gradient_as_moment(), one_element(DSOPT_DTYPE_BF16)),
        applying(ctx, apply, gradient_as_moment(), one_element(DSOPT_DTYPE_BF16));
    must(skipping.step(one_element(DSOPT_DTYPE_BF16, kNaN)));
    must(applying.step(one_element(DSOPT_DTYPE_BF16, kNaN)));
    EXPECT_EQ(skipping.report().last_skipped, 1);
    EXPECT_EQ(applying.report().last_skipped, 0);
}
TEST(StandardNonfinite, SkipsBf16AndFp32WithThePolicySkip) {
    const Context ctx = make_context(1);
    dsopt_optimizer_desc desc = standard();
    desc.nonfinite = DSOPT_NONFINITE_SKIP;
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16})
        for (const float bad : {kNaN, kInf}) {
            Trainer trainer(ctx, desc, gradient_as_moment(), one_element(dtype));
            must(trainer.step(one_element(dtype, bad)));
            EXPECT_EQ(trainer.report().last_skipped, 1);
            EXPECT_EQ(trainer.weight()[0], 1);
            EXPECT_EQ(trainer.first("step", -1), 0);
        }
}
TEST(CompatCallerNorm, IsAnOverflowIfNegative) {
    const Context ctx = make_context(1);
    const Scaler scaler = make_scaler(ctx, 16);
    dsopt_optimizer_desc desc = flat();
    desc.scaler = scaler.get();
    Trainer trainer(ctx, desc, gradient_as_moment(), one_element(DSOPT_DTYPE_F16));
    const float norm = -1; // the original's get_weight_norm returns -1 for a norm that is not finite
    must(trainer.step(one_element(DSOPT_DTYPE_F16), [&](dsopt_step &step) { step.grad_norms = on_device(norm); }));
    EXPECT_EQ(trainer.report().last_skipped, 1);
    EXPECT_EQ(info_of(scaler).scale, 8);
}

// ------------------------------------------------------------------------------------------- gradients that are absent
TEST(CompatAbsentGradients, AreZerosForAWrapper) {
    const Context ctx = make_context(1);
    for (const dsopt_optimizer_desc &desc : {flat(), per_tensor()}) {
        const auto two = std::vector<Array>{Array(DSOPT_DTYPE_F16, 1, 1), Array(DSOPT_DTYPE_F16, 1, 1)};
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM, 0.1, 0), two),
            zeros(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM, 0.1, 0), two);
        must(trainer.step({Array(DSOPT_DTYPE_F16, 1, 1), Array(DSOPT_DTYPE_F16, 1, 1)}));
        must(zeros.step({Array(DSOPT_DTYPE_F16, 1, 1), Array(DSOPT_DTYPE_F16, 1, 1)}));
        must(trainer.step({Array(DSOPT_DTYPE_F16, 1, 1), Array::absent(1)}));
        must(zeros.step({Array(DSOPT_DTYPE_F16, 1, 1), Array(DSOPT_DTYPE_F16, 1, 0)}));
        EXPECT_TRUE(same(trainer.snapshot(), zeros.snapshot()));
        EXPECT_EQ(trainer.state("step"), (std::vector<float>{3, 3}));
    }
}
TEST(StandardAbsentGradients, KeepTheTensorAndItsStepCount) {
    const Context ctx = make_context(1);
    Trainer trainer(ctx, standard(), group_of(DSOPT_ALGORITHM_ADAM, 0.1, 0.1),
                    std::vector<Array>{Array(DSOPT_DTYPE_F16, 1, 1), Array(DSOPT_DTYPE_F16, 1, 1)});
    must(trainer.step({Array(DSOPT_DTYPE_F16, 1, 1), Array(DSOPT_DTYPE_F16, 1, 1)}));
    const Snapshot before = trainer.snapshot();
    must(trainer.step({Array(DSOPT_DTYPE_F16, 1, 1), Array::absent(1)}));
    const Snapshot after = trainer.snapshot();
    for (const char *name : {"param 1", "master 1", "exp_avg 1", "exp_avg_sq 1"})
        EXPECT_EQ(before.at(name), after.at(name)) << name;
    EXPECT_EQ(trainer.state("step"), (std::vector<float>{2, 1}));
}

// ------------------------------------------------------------------------------------------- ---- overflow of one rank
std::array<int, 2> skipped_ranks(const dsopt_optimizer_desc &wanted) {
    const CommId id = new_id();
    std::array<int, 2> skipped{};
    run_ranks(2, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, 2);
        const Scaler scaler = make_scaler(ctx, 16);
        dsopt_optimizer_desc desc = wanted;
        desc.data = comm.get();
        desc.scaler = scaler.get();
        Trainer trainer(ctx, desc, gradient_as_moment(), one_element(DSOPT_DTYPE_F16));
        must(trainer.step(one_element(DSOPT_DTYPE_F16, rank == 0 ? kInf : 1)));
        skipped[size_t(rank)] = trainer.report().last_skipped;
    });
    return skipped;
}
TEST(CompatOverflow, SkipsTheStepOnlyOnItsDataRank) {
    for (const dsopt_optimizer_desc &desc : {flat(), per_tensor()})
        EXPECT_EQ(skipped_ranks(desc), (std::array<int, 2>{1, 0}));
}
TEST(StandardOverflow, SkipsTheStepOnAllDataRanks) { EXPECT_EQ(skipped_ranks(standard()), (std::array<int, 2>{1, 1})); }

// ------------------------------------------------------------------------------------------------- experts in the norm
/// Returns the report of a step: the dense gradient has norm 5, the expert gradient 12, the expert weights 200.
dsopt_report with_expert(dsopt_optimizer_desc desc) {
    const Context ctx = make_context(1);
    const Comm comm = self_comm(ctx);
    dsopt_comm *const experts[] = {comm.get()};
    desc.experts = experts;
    desc.expert_count = 1;
    desc.max_norm = 1;
    Trainer trainer(ctx, desc, gradient_as_moment(),
                    {{Array(DSOPT_DTYPE_F16, 2, 1), "dense"}, {Array(DSOPT_DTYPE_F16, {120, 160}), "expert", 0, 1}});
    must(trainer.step({Array(DSOPT_DTYPE_F16, {3, 4}), Array(DSOPT_DTYPE_F16, {0, 12})}));
    EXPECT_FLOAT_EQ(float(trainer.state("exp_avg", 1)[1]), float(12 / trainer.report().divisor))
        << "expert gradients are not divided by the same divisor";
    return trainer.report();
}
TEST(CompatExperts, AddWeightNormsInTheFusedWrapper) {
    const dsopt_report report = with_expert(flat());
    EXPECT_NEAR(report.grad_norm, std::sqrt(25 + 40000.0), 1e-6);
    expect_near(report.divisor, report.grad_norm + 1e-6);
}
TEST(CompatExperts, AreExcludedByTheUnfusedWrapper) {
    const dsopt_report report = with_expert(per_tensor());
    EXPECT_EQ(report.grad_norm, 5);
    expect_near(report.divisor, 5 + 1e-6);
}
TEST(StandardExperts, AddGradientNorms) {
    const dsopt_report report = with_expert(standard());
    EXPECT_EQ(report.grad_norm, 13);
    EXPECT_EQ(report.dense_norm, 5);
    EXPECT_EQ(report.expert_norm, 12);
    expect_near(report.divisor, 13 + 1e-6);
}

// ------------------------------------------------------------------------------------------------------- empty tensors
void step_with_empty_tensors(dsopt_optimizer_desc desc, int32_t algorithm) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 4);
    desc.scaler = scaler.get();
    desc.max_norm = 1;
    Random random(1);
    std::vector<Array> weights, grads;
    for (const size_t size : {0, 3, 0, 0, 5000, 0}) {
        weights.emplace_back(DSOPT_DTYPE_F16, random.floats(size));
        grads.emplace_back(DSOPT_DTYPE_F16, random.floats(size));
    }
    Trainer with_empty(ctx, desc, group_of(algorithm), weights);
    desc.scaler = nullptr;
    const Scaler other = make_scaler(ctx, 4);
    desc.scaler = other.get();
    Trainer without_empty(ctx, desc, group_of(algorithm), std::vector<Array>{weights[1], weights[4]});
    for (int step = 0; step < 3; ++step) {
        ASSERT_OK(with_empty.step(grads));
        ASSERT_OK(without_empty.step({grads[1], grads[4]}));
    }
    EXPECT_EQ(with_empty.weight(1).text(), without_empty.weight(0).text());
    EXPECT_EQ(with_empty.weight(4).text(), without_empty.weight(1).text());
    EXPECT_EQ(with_empty.report().grad_norm, without_empty.report().grad_norm);
}
TEST(CompatEmptyTensors, ChangeNothingAnywhereInTheList) {
    step_with_empty_tensors(flat(), DSOPT_ALGORITHM_ADAM);
    step_with_empty_tensors(per_tensor(), DSOPT_ALGORITHM_LAMB);
}
TEST(StandardEmptyTensors, ChangeNothingAnywhereInTheList) {
    for (const int32_t algorithm :
         {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ADAM_LEGACY})
        step_with_empty_tensors(standard(), algorithm);
}

TEST(CompatMoments, HaveTheParametersDtypeWithoutAWrapper) {
    const Context ctx = make_context(1);
    for (const bool original : {true, false}) {
        dsopt_optimizer_desc desc = bare();
        desc.compat = original ? DSOPT_COMPAT_DEEPSPEED : DSOPT_COMPAT_NONE;
        Trainer trainer(ctx, desc, gradient_as_moment(),
                        std::vector<Array>{Array(DSOPT_DTYPE_F16, 1, 1), Array(DSOPT_DTYPE_BF16, 1, 1),
                                           Array(DSOPT_DTYPE_F32, 1, 1)});
        for (const dsopt_state_info &entry : trainer.state()) {
            if (entry.param < 0) continue;
            EXPECT_EQ(entry.tensor.dtype, original ? trainer.weight(size_t(entry.param)).dtype() : DSOPT_DTYPE_F32);
        }
    }
}

} // namespace mixed_compat_tests
