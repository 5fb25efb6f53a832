// SPDX-License-Identifier: Apache-2.0
// Gradient accumulation in fp32 across micro-batches.
#include "support/harness.h"

using namespace test;

LABEL_FILE(one_thread);

namespace mixed_accumulate_tests {

const std::vector<size_t> kSizes = {5, 5000, 0, 33};

class Accumulate : public testing::TestWithParam<int32_t> { // the dtype of gradients
protected:
    int32_t dtype() const { return GetParam(); }
    Random random{4};
    const Context ctx = make_context(2);
    dsopt_optimizer_desc desc = accumulating();
    static dsopt_optimizer_desc accumulating() {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.flags = DSOPT_OPTIMIZER_ACCUMULATE;
        return desc;
    }
    std::vector<Array> arrays(int32_t dtype, double size = 1) {
        std::vector<Array> list;
        for (const size_t n : kSizes) list.emplace_back(dtype, random.floats(n, -size, size));
        return list;
    }
};
INSTANTIATE_TEST_SUITE_P(, Accumulate, testing::Values(DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16),
                         [](const auto &info) { return std::string(dtype_name(info.param)); });

TEST_P(Accumulate, SumsMicroBatchesInFp32AndStepsWithTheSum) {
    DSOPT_NEW(dsopt_optimizer_desc, plain);
    const std::vector<Array> start = arrays(DSOPT_DTYPE_F16);
    Trainer accumulating(ctx, desc, group_of(DSOPT_ALGORITHM_ADAMW), start),
        reference(ctx, plain, group_of(DSOPT_ALGORITHM_ADAMW), start);
    for (int step = 0; step < 3; ++step) {
        std::vector<std::vector<float>> sums;
        for (const size_t n : kSizes) sums.emplace_back(n, 0.0f);
        for (int batch = 0; batch < 5; ++batch) {
            const std::vector<Array> grads = arrays(dtype());
            ASSERT_OK(accumulating.accumulate(grads));
            for (size_t i = 0; i < kSizes.size(); ++i)
                for (size_t k = 0; k < kSizes[i]; ++k) sums[i][k] += grads[i][k];
        }
        std::vector<Array> total;
        for (size_t i = 0; i < kSizes.size(); ++i) {
            EXPECT_TRUE(same_bits(accumulating.state("grad_accum", int64_t(i)), sums[i]));
            total.emplace_back(DSOPT_DTYPE_F32, sums[i]);
        }
        ASSERT_OK(accumulating.step_accumulated());
        ASSERT_OK(reference.step(total));
        Snapshot got = accumulating.snapshot();
        for (size_t i = 0; i < kSizes.size(); ++i) {
            EXPECT_TRUE(same_bits(accumulating.state("grad_accum", int64_t(i)), std::vector<float>(kSizes[i], 0.0f)));
            got.erase("grad_accum " + std::to_string(i));
        }
        ASSERT_TRUE(same(got, reference.snapshot())) << "step " << step;
    }
}

TEST_P(Accumulate, TreatsParametersWithoutGradientsAsAbsent) {
    Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAMW), arrays(DSOPT_DTYPE_F16));
    const auto without = [&](std::initializer_list<size_t> absent) {
        std::vector<Array> grads = arrays(dtype());
        for (const size_t i : absent) grads[i] = Array::absent(kSizes[i], dtype());
        return grads;
    };
    ASSERT_OK(trainer.accumulate(without({0, 1})));
    ASSERT_OK(trainer.accumulate(without({0, 3})));
    ASSERT_OK(trainer.step_accumulated());
    EXPECT_EQ(trainer.state("step"), (std::vector<float>{0, 1, 1, 1}));
    const Snapshot before = trainer.snapshot();
    ASSERT_OK(trainer.step_accumulated()); // no gradients since the last step
    EXPECT_TRUE(same(before, trainer.snapshot()));
    ASSERT_OK(trainer.accumulate(without({1, 2, 3})));
    ASSERT_OK(trainer.step_accumulated());
    EXPECT_EQ(trainer.state("step"), (std::vector<float>{1, 1, 1, 1}));
}

TEST_P(Accumulate, SkipsTheStepAndClearsSumsAfterAnOverflow) {
    const Scaler scaler = make_scaler(ctx, 32);
    desc.scaler = scaler.get();
    Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), arrays(DSOPT_DTYPE_F16));
    const Snapshot start = trainer.snapshot();
    for (int batch = 0; batch < 3; ++batch) {
        std::vector<Array> grads = arrays(dtype());
        if (batch == 1) grads[1].set(4097, -kInf);
        must(trainer.accumulate(grads));
    }
    ASSERT_OK(trainer.step_accumulated());
    EXPECT_EQ(trainer.report().last_skipped, 1);
    EXPECT_EQ(trainer.report().first_bad, 1);
    EXPECT_EQ(info_of(scaler).scale, 16);
    Snapshot after = trainer.snapshot();
    after["scaler -1"] = start.at("scaler -1");
    after["loss_scale -1"] = start.at("loss_scale -1");
    EXPECT_TRUE(same(start, after)) << "parameters or state changed";
}

TEST_P(Accumulate, IsUnscaledAndClippedLikeOtherGradients) {
    const Scaler scaler = make_scaler(ctx, 32);
    DSOPT_NEW(dsopt_optimizer_desc, plain);
    desc.scaler = scaler.get();
    desc.max_norm = 1.5;
    const std::vector<Array> start = arrays(DSOPT_DTYPE_BF16);
    Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_LAMB), start),
        reference(ctx, plain, group_of(DSOPT_ALGORITHM_LAMB), start);
    const std::vector<Array> a = arrays(dtype(), 30), b = arrays(dtype(), 30);
    must(trainer.accumulate(a));
    must(trainer.accumulate(b));
    const float batches = 2;
    DSOPT_NEW(dsopt_step, step);
    step.count = 4;
    step.flags = DSOPT_STEP_ACCUMULATED;
    step.grad_scale = on_device(batches);
    ASSERT_OK(dsopt_optimizer_step(trainer.opt(), &step));
    const dsopt_report report = trainer.report();
    EXPECT_GT(report.divisor, 64);
    EXPECT_NEAR(report.divisor, 64 * (report.grad_norm + 1e-6) / 1.5, 1e-9);
    std::vector<Array> mean;
    for (size_t i = 0; i < kSizes.size(); ++i) {
        std::vector<float> values = a[i].floats();
        for (size_t k = 0; k < values.size(); ++k) values[k] = (values[k] + b[i][k]) * float(1 / report.divisor);
        mean.emplace_back(DSOPT_DTYPE_F32, values);
    }
    ASSERT_OK(reference.step(mean));
    for (size_t i = 0; i < kSizes.size(); ++i) EXPECT_EQ(trainer.weight(i).text(), reference.weight(i).text());
}

TEST_P(Accumulate, ResumesBetweenMicroBatchesWithTheSameBits) {
    const std::vector<Array> start = arrays(DSOPT_DTYPE_F16);
    Trainer uninterrupted(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), start),
        first(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), start);
    Trainer second(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), arrays(DSOPT_DTYPE_F16));
    std::vector<std::vector<Array>> batches;
    for (int i = 0; i < 4; ++i) batches.push_back(arrays(dtype()));
    batches[0][3] = batches[1][3] = Array::absent(kSizes[3], dtype()); // present only after the save
    batches[2][0] = batches[3][0] = Array::absent(kSizes[0], dtype()); // present only before the save
    for (int i = 0; i < 4; ++i) must(uninterrupted.accumulate(batches[size_t(i)]));
    must(uninterrupted.step_accumulated());
    for (int i = 0; i < 2; ++i) must(first.accumulate(batches[size_t(i)]));
    MemoryFile file;
    ASSERT_OK(file.save(first, DSOPT_IO_PARAMS));
    ASSERT_OK(file.load(second, DSOPT_IO_PARAMS));
    for (int i = 2; i < 4; ++i) must(second.accumulate(batches[size_t(i)]));
    must(second.step_accumulated());
    EXPECT_TRUE(same(uninterrupted.snapshot(), second.snapshot()));
    EXPECT_EQ(second.state("step"), (std::vector<float>(4, 1)));
}

TEST_P(Accumulate, ResumesWithAnotherOrderOfParameters) {
    const auto list = [](const std::vector<std::string> &names) {
        std::vector<Param> params;
        for (const std::string &name : names) params.push_back({Array(DSOPT_DTYPE_F16, 5, 1), name});
        return params;
    };
    const dsopt_group group = group_of(DSOPT_ALGORITHM_ADAM);
    Trainer first(ctx, desc, group, list({"a", "b", "c"})), second(ctx, desc, group, list({"c", "a", "b"}));
    const Array absent = Array::absent(5, dtype());
    must(first.accumulate({Array(dtype(), 5, 1), absent, absent}));
    MemoryFile file;
    ASSERT_OK(file.save(first));
    ASSERT_OK(file.load(second));
    must(second.step_accumulated());
    EXPECT_EQ(second.state("step"), (std::vector<float>{0, 1, 0}));
}

TEST_P(Accumulate, IsClearedByReset) {
    Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), arrays(DSOPT_DTYPE_F16));
    const Snapshot start = trainer.snapshot();
    must(trainer.accumulate(arrays(dtype())));
    ASSERT_OK(dsopt_optimizer_reset(trainer.opt(), DSOPT_RESET_GRADS, nullptr));
    EXPECT_TRUE(same(start, trainer.snapshot()));
    ASSERT_OK(trainer.step_accumulated());
    EXPECT_EQ(trainer.state("step"), (std::vector<float>(4, 0)));
}

TEST_P(Accumulate, KeepsSumsInAnOrdinaryStep) {
    Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), arrays(DSOPT_DTYPE_F16));
    must(trainer.accumulate(arrays(dtype())));
    const std::vector<float> sum = trainer.state("grad_accum", 1);
    ASSERT_OK(trainer.step(arrays(dtype()), [](dsopt_step &step) { step.flags = DSOPT_STEP_ZERO_GRADS; }));
    EXPECT_TRUE(same_bits(trainer.state("grad_accum", 1), sum));
}

TEST(RefusedAccumulate, NamesTheBadArgument) {
    const Context ctx = make_context(2);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    const std::vector<Array> weights = {Array(DSOPT_DTYPE_F16, 3, 1), Array(DSOPT_DTYPE_F32, 2, 1)};
    Trainer plain(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), weights);
    const std::vector<Array> grads = {Array(DSOPT_DTYPE_F16, 3, 1), Array(DSOPT_DTYPE_F32, 2, 1)};
    EXPECT_TRUE(refused(plain.accumulate(grads), DSOPT_ERR_UNSUPPORTED, "ACCUMULATE"));
    EXPECT_TRUE(refused(plain.step_accumulated(), DSOPT_ERR_UNSUPPORTED, "ACCUMULATE"));
    desc.flags = DSOPT_OPTIMIZER_ACCUMULATE;
    Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), weights);
    must(trainer.accumulate(grads));
    const Snapshot before = trainer.snapshot();
    EXPECT_TRUE(refused(trainer.step(grads, [](dsopt_step &step) { step.flags = DSOPT_STEP_ACCUMULATED; }),
                        DSOPT_ERR_ARGUMENT, "grads"));
    EXPECT_TRUE(refused(trainer.accumulate({grads[0]}), DSOPT_ERR_SHAPE));
    EXPECT_TRUE(refused(trainer.accumulate({grads[0], Array(DSOPT_DTYPE_F32, 3, 1)}), DSOPT_ERR_SHAPE, "p1"));
    EXPECT_TRUE(refused(dsopt_optimizer_accumulate(trainer.opt(), nullptr, 2, nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_optimizer_accumulate(trainer.opt(), nullptr, 0, nullptr), DSOPT_ERR_SHAPE, "0 entries"));
    std::vector<dsopt_tensor> list = list_of(grads);
    list[1].dtype = DSOPT_DTYPE_I32;
    EXPECT_TRUE(refused(dsopt_optimizer_accumulate(trainer.opt(), list.data(), 2, nullptr), DSOPT_ERR_DTYPE, "p1"));
    list = list_of(grads);
    list[0].data = static_cast<char *>(list[0].data) + 1;
    EXPECT_TRUE(refused(dsopt_optimizer_accumulate(trainer.opt(), list.data(), 2, nullptr), DSOPT_ERR_ALIGNMENT, "p0"));
    EXPECT_TRUE(same(before, trainer.snapshot()));
    DSOPT_NEW(dsopt_step, step);
    step.count = 2;
    step.flags = DSOPT_STEP_ACCUMULATED;
    EXPECT_TRUE(refused(dsopt_optimizer_apply(trainer.opt(), &step), DSOPT_ERR_UNSUPPORTED, "apply"));
}

TEST(AccumulateLoad, RefusesACheckpointWithoutSums) {
    const Context ctx = make_context(2);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    const std::vector<Array> weights = {Array(DSOPT_DTYPE_F16, 3, 1)};
    Trainer plain(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), weights);
    desc.flags = DSOPT_OPTIMIZER_ACCUMULATE;
    Trainer accumulating(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), weights);
    MemoryFile file;
    must(file.save(plain));
    EXPECT_TRUE(refused(file.load(accumulating), DSOPT_ERR_MISMATCH));
    EXPECT_OK(file.load(accumulating, DSOPT_IO_NO_STATE));
}

} // namespace mixed_accumulate_tests
