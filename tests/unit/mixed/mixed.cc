// SPDX-License-Identifier: Apache-2.0
// Steps of 16-bit parameters with fp32 masters: results, skipped steps, memory and initialization of masters. See
// clip/clip.cc for clipping and accumulate.cc for accumulation.
#include "support/harness.h"

using namespace test;

LABEL_FILE(one_thread);

namespace mixed_tests {

const std::vector<size_t> kSizes = {1, 37, 0, 4097};

std::vector<Array> arrays(Random &random, int32_t dtype, double low, double high) {
    std::vector<Array> list;
    for (const size_t size : kSizes) list.emplace_back(dtype, random.floats(size, low, high));
    return list;
}
/// Returns arrays multiplied by `factor` in fp32 and converted to another dtype.
std::vector<Array> converted(const std::vector<Array> &from, int32_t dtype, float factor = 1) {
    std::vector<Array> list;
    for (const Array &array : from) {
        std::vector<float> values = array.floats();
        for (float &value : values) value *= factor;
        list.emplace_back(dtype, values);
    }
    return list;
}

class MixedStep : public testing::TestWithParam<std::tuple<int32_t, int32_t>> {
protected:
    int32_t algorithm() const { return std::get<0>(GetParam()); }
    int32_t dtype() const { return std::get<1>(GetParam()); }
    const Context ctx = make_context(2);
};
std::string pair_name(const testing::TestParamInfo<std::tuple<int32_t, int32_t>> &info) {
    return name_of(std::get<0>(info.param)) + "_" + dtype_name(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(, MixedStep,
                         testing::Combine(testing::ValuesIn(kAlgorithms),
                                          testing::Values(DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16)),
                         pair_name);

TEST_P(MixedStep, KeepsFp32MastersAndRoundsParametersToNearest) {
    const float scale = 1000;
    const Scaler scaler = make_scaler(ctx, double(scale));
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    DSOPT_NEW(dsopt_optimizer_desc, plain);
    desc.scaler = scaler.get();
    Random random(7);
    const std::vector<Array> start = arrays(random, dtype(), -1, 1);
    Trainer mixed(ctx, desc, group_of(algorithm()), start);
    Trainer reference(ctx, plain, group_of(algorithm()), converted(start, DSOPT_DTYPE_F32));
    for (int step = 1; step <= 8; ++step) {
        std::vector<Array> grads = arrays(random, dtype(), -200, 200);
        ASSERT_OK(mixed.step(grads));
        ASSERT_OK(reference.step(converted(grads, DSOPT_DTYPE_F32, float(1.0 / double(scale)))));
        for (size_t i = 0; i < kSizes.size(); ++i) {
            const auto p = int64_t(i);
            const std::vector<float> master = mixed.state("master", p);
            ASSERT_TRUE(same_bits(master, reference.weight(i).floats())) << "step " << step << ", tensor " << i;
            ASSERT_EQ(mixed.weight(i).text(), Array(dtype(), master).text()) << "step " << step << ", tensor " << i;
            ASSERT_TRUE(same_bits(mixed.state("exp_avg", p), reference.state("exp_avg", p)));
            ASSERT_TRUE(same_bits(mixed.state("exp_avg_sq", p), reference.state("exp_avg_sq", p)));
        }
        ASSERT_EQ(mixed.state("step"), std::vector<float>(kSizes.size(), float(step)));
    }
}

TEST_P(MixedStep, AcceptsGradientsOfAnyDtype) {
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    Random random(8);
    const std::vector<Array> start = arrays(random, dtype(), -1, 1);
    for (const int32_t grad_dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16}) {
        Trainer mixed(ctx, desc, group_of(algorithm()), start);
        Trainer reference(ctx, desc, group_of(algorithm()), converted(start, DSOPT_DTYPE_F32));
        for (int step = 0; step < 3; ++step) {
            std::vector<Array> grads = arrays(random, grad_dtype, -1, 1);
            ASSERT_OK(mixed.step(grads));
            ASSERT_OK(reference.step(converted(grads, DSOPT_DTYPE_F32)));
        }
        for (size_t i = 0; i < kSizes.size(); ++i)
            EXPECT_TRUE(same_bits(mixed.state("master", int64_t(i)), reference.weight(i).floats()))
                << dtype_name(grad_dtype);
    }
}

TEST_P(MixedStep, KeepsParametersAndStateOnOverflow) {
    const Scaler scaler = make_scaler(ctx, 64, 2);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.scaler = scaler.get();
    Random random(9);
    Trainer trainer(ctx, desc, group_of(algorithm()), arrays(random, dtype(), -1, 1));
    for (int step = 0; step < 2; ++step) must(trainer.step(arrays(random, dtype(), -1, 1)));
    for (const float bad : {kInf, -kInf, kNaN})
        for (const size_t index : {size_t(0), size_t(1023), size_t(4096)}) {
            must(dsopt_scaler_set(scaler.get(), DSOPT_SCALE_VALUE, 64, nullptr));
            const Snapshot before = trainer.snapshot();
            std::vector<Array> grads = arrays(random, dtype(), -1, 1), outs = arrays(random, DSOPT_DTYPE_F32, 5, 6);
            grads[3].set(index, bad);
            const std::vector<dsopt_tensor> out = list_of(outs);
            const Shared<float> report(DSOPT_REPORT_FLOATS, 0.0f);
            ASSERT_OK(trainer.step(grads, [&](dsopt_step &step) {
                step.flags = DSOPT_STEP_ZERO_GRADS;
                step.report = report.data();
                step.out = out.data();
            }));
            Snapshot after = trainer.snapshot();
            EXPECT_NE(after["scaler -1"], before.at("scaler -1"));
            after["scaler -1"] = before.at("scaler -1");
            after["loss_scale -1"] = before.at("loss_scale -1");
            EXPECT_TRUE(same(before, after));
            for (size_t i = 0; i < kSizes.size(); ++i) {
                EXPECT_EQ(grads[i].text(), Array(dtype(), kSizes[i], 0).text());
                EXPECT_TRUE(same_bits(outs[i].floats(), trainer.state("master", int64_t(i))));
            }
            EXPECT_EQ(report[DSOPT_REPORT_SKIPPED], 1);
            EXPECT_EQ(report[DSOPT_REPORT_NONFINITE], 1);
            EXPECT_EQ(report[DSOPT_REPORT_FIRST_BAD], 3);
            EXPECT_EQ(report[DSOPT_REPORT_DIVISOR], 0);
            EXPECT_EQ(report[DSOPT_REPORT_SCALE_USED], 64);
            EXPECT_EQ(report[DSOPT_REPORT_SCALE_NEXT], 32);
            EXPECT_EQ(info_of(scaler).scale, 32);
        }
    EXPECT_EQ(trainer.report().calls, 11);
    EXPECT_EQ(trainer.report().skipped, 9);
    EXPECT_EQ(trainer.report().skipped_in_row, 9);
    EXPECT_EQ(trainer.state("step"), std::vector<float>(4, 2));
}

TEST_P(MixedStep, ReadsTheLearningRateFromDeviceMemory) {
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    Random random(10);
    const std::vector<Array> start = arrays(random, dtype(), -1, 1);
    Trainer device(ctx, desc, group_of(algorithm()), start), host(ctx, desc, group_of(algorithm()), start);
    for (int step = 0; step < 5; ++step) {
        const std::vector<Array> grads = arrays(random, dtype(), -1, 1);
        const float lr = 0.25f / float(1 << step);
        ASSERT_OK(device.step(grads, [&](dsopt_step &s) { s.lr = on_device(lr); }));
        ASSERT_OK(dsopt_optimizer_set(host.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_LR, double(lr)));
        ASSERT_OK(host.step(grads));
        ASSERT_TRUE(same(device.snapshot(), host.snapshot())) << "step " << step;
    }
}

TEST_P(MixedStep, UpdatesScaleAndMastersOfTheCallerInApply) {
    const Scaler scaler = make_scaler(ctx, 8, 2), same_scaler = make_scaler(ctx, 8, 2);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    Random random(11);
    const std::vector<Array> start = arrays(random, dtype(), -1, 1);
    desc.scaler = scaler.get();
    Trainer stateful(ctx, desc, group_of(algorithm()), start);
    desc.scaler = same_scaler.get();
    Trainer pure(ctx, desc, group_of(algorithm()), start);
    // The initial values are those that an optimizer exports before its first step.
    const std::vector<dsopt_state_info> infos = pure.state();
    std::vector<Shared<uint32_t>> memory;
    std::vector<dsopt_tensor> state;
    for (size_t i = 0; i < infos.size(); ++i) {
        memory.emplace_back(size_t(infos[i].tensor.numel) + 2);
        state.push_back(infos[i].tensor);
        state.back().data = memory.back().data() + memory.back().size() % 2; // aligns the scaler's doubles
        std::vector<uint32_t> words(size_t(state.back().numel));
        must(dsopt_optimizer_export(pure.opt(), int64_t(i), words.data(), words.size() * 4));
        write_device(state.back().data, words.data(), words.size() * 4);
    }
    size_t bytes = 0;
    must(dsopt_optimizer_workspace(pure.opt(), &bytes));
    const Shared<char> workspace(bytes);
    std::vector<Array> weights = start;
    const std::vector<dsopt_tensor> params = list_of(weights);
    for (int step = 0; step < 7; ++step) {
        std::vector<Array> grads = arrays(random, dtype(), -1, 1);
        if (step == 4) grads[1].set(3, kInf);
        ASSERT_OK(stateful.step(grads));
        const std::vector<dsopt_tensor> list = list_of(grads);
        DSOPT_NEW(dsopt_step, call);
        call.grads = list.data();
        call.count = int64_t(list.size());
        call.params = params.data();
        call.state = state.data();
        call.state_count = int64_t(state.size());
        call.workspace = workspace.data();
        call.workspace_bytes = bytes;
        ASSERT_OK(dsopt_optimizer_apply(pure.opt(), &call));
    }
    const Snapshot wanted = stateful.snapshot();
    for (size_t i = 0; i < infos.size(); ++i) {
        const std::string name = std::string(infos[i].name) + " " + std::to_string(infos[i].param);
        EXPECT_EQ(device_text(state[i].data, size_t(state[i].numel) * 4), wanted.at(name)) << name;
    }
    for (size_t i = 0; i < kSizes.size(); ++i) {
        EXPECT_EQ(weights[i].text(), stateful.weight(i).text());
        EXPECT_EQ(pure.weight(i).text(), start[i].text());
    }
    EXPECT_EQ(info_of(same_scaler).updates, 0) << "dsopt_optimizer_apply must not change the scaler object";
}

TEST(MixedOutput, IsTheMasterRoundedToItsDtype) {
    const Context ctx = make_context(2);
    Random random(12);
    const std::vector<Array> start = arrays(random, DSOPT_DTYPE_F16, -1, 1);
    for (const int32_t out_dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16})
        for (const bool out_only : {false, true}) {
            DSOPT_NEW(dsopt_optimizer_desc, desc);
            Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAMW), start);
            std::vector<Array> outs = arrays(random, out_dtype, 5, 6);
            const std::vector<dsopt_tensor> out = list_of(outs);
            ASSERT_OK(trainer.step(arrays(random, DSOPT_DTYPE_F16, -1, 1), [&](dsopt_step &step) {
                step.out = out.data();
                step.flags = out_only ? DSOPT_STEP_OUT_ONLY : 0;
            }));
            for (size_t i = 0; i < kSizes.size(); ++i) {
                const std::vector<float> master = trainer.state("master", int64_t(i));
                EXPECT_EQ(outs[i].text(), Array(out_dtype, master).text());
                EXPECT_EQ(trainer.weight(i).text(), out_only ? start[i].text() : Array(DSOPT_DTYPE_F16, master).text());
            }
        }
}

TEST(MixedOutput, RefusesDeltaWithAMaster) {
    const Context ctx = make_context(2);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), std::vector<Array>{Array(DSOPT_DTYPE_BF16, 4, 1)});
    Array outs(DSOPT_DTYPE_F32, 4, 0);
    const dsopt_tensor out = outs.tensor();
    EXPECT_TRUE(refused(trainer.step({Array(DSOPT_DTYPE_BF16, 4, 1)},
                                     [&](dsopt_step &step) {
                                         step.out = &out;
                                         step.flags = DSOPT_STEP_DELTA;
                                     }),
                        DSOPT_ERR_UNSUPPORTED, "DELTA"));
}

TEST(MixedSkip, TreatsTheCallersFlagLikeAnOverflow) {
    const Context ctx = make_context(2);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    Random random(13);
    Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_LAMB), arrays(random, DSOPT_DTYPE_BF16, -1, 1));
    must(trainer.step(arrays(random, DSOPT_DTYPE_BF16, -1, 1)));
    const Snapshot before = trainer.snapshot();
    std::vector<Array> grads = arrays(random, DSOPT_DTYPE_BF16, -1, 1);
    const int32_t skip = 17, no_skip = 0;
    ASSERT_OK(trainer.step(grads, [&](dsopt_step &step) {
        step.skip = on_device(skip);
        step.flags = DSOPT_STEP_ZERO_GRADS;
    }));
    EXPECT_TRUE(same(before, trainer.snapshot()));
    EXPECT_EQ(trainer.report().last_skipped, 1);
    EXPECT_EQ(grads[1].text(), Array(DSOPT_DTYPE_BF16, 37, 0).text());
    ASSERT_OK(trainer.step(arrays(random, DSOPT_DTYPE_BF16, -1, 1),
                           [&](dsopt_step &step) { step.skip = on_device(no_skip); }));
    EXPECT_FALSE(same(before, trainer.snapshot()));
}

TEST(MixedScale, DividesByGradScaleAndLossScale) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 128);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    DSOPT_NEW(dsopt_optimizer_desc, plain);
    desc.scaler = scaler.get();
    Random random(14);
    const std::vector<Array> start = arrays(random, DSOPT_DTYPE_F16, -1, 1);
    Trainer mixed(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), start),
        reference(ctx, plain, group_of(DSOPT_ALGORITHM_ADAM), start);
    const float batches = 3;
    std::vector<Array> grads = arrays(random, DSOPT_DTYPE_F16, -9, 9);
    ASSERT_OK(mixed.step(grads, [&](dsopt_step &step) { step.grad_scale = on_device(batches); }));
    ASSERT_OK(reference.step(converted(grads, DSOPT_DTYPE_F32, float(1.0 / 384))));
    EXPECT_TRUE(same_bits(mixed.state("exp_avg_sq", 3), reference.state("exp_avg_sq", 3)));
    EXPECT_EQ(mixed.report().divisor, 384);
    EXPECT_EQ(mixed.report().scale_used, 128);
}

TEST(MixedScale, UsesAnOverrideForUnscaling) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 8, 1);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.scaler = scaler.get();
    dsopt_group group = group_of(DSOPT_ALGORITHM_ADAM, 1e-2, 0);
    group.beta1 = 0; // exp_avg is the gradient that the rule uses
    Trainer trainer(ctx, desc, group, std::vector<Array>{Array(DSOPT_DTYPE_F16, 1, 1)});
    must(dsopt_scaler_set(scaler.get(), DSOPT_SCALE_OVERRIDE, 2, nullptr));
    for (int step = 0; step < 3; ++step) {
        ASSERT_OK(trainer.step({Array(DSOPT_DTYPE_F16, 1, 1 * on_host(dsopt_scaler_device_scale(scaler.get())))}));
        EXPECT_EQ(trainer.first("exp_avg"), 1);
        EXPECT_EQ(trainer.report().scale_used, 2);
        EXPECT_EQ(trainer.report().loss_scale, 2);
    }
    must(dsopt_scaler_set(scaler.get(), DSOPT_SCALE_CLEAR_OVERRIDE, 0, nullptr));
    for (const float scale : {8.0f, 8.0f, 16.0f}) { // the scale continues from its value before the override
        ASSERT_EQ(on_host(dsopt_scaler_device_scale(scaler.get())), scale);
        ASSERT_OK(trainer.step({Array(DSOPT_DTYPE_F16, 1, scale)}));
        EXPECT_EQ(trainer.first("exp_avg"), 1);
    }
}

TEST(MixedScale, SkipsOverflowsWithAStaticScale) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 128, 0, DSOPT_SCALER_STATIC);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.scaler = scaler.get();
    Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), std::vector<Array>{Array(DSOPT_DTYPE_F16, 2, 1)});
    must(trainer.step({Array(DSOPT_DTYPE_F16, 2, 128)}));
    const std::string before = trainer.weight().text();
    ASSERT_OK(trainer.step({Array(DSOPT_DTYPE_F16, {128, kInf})}));
    EXPECT_EQ(trainer.weight().text(), before);
    EXPECT_EQ(trainer.report().last_skipped, 1);
    EXPECT_EQ(trainer.report().loss_scale, 128);
}

// ------------------------------------------------------------------------------------------------------------- masters
TEST(Masters, AreContiguousPerGroupInFlatMode) {
    const Context ctx = make_context(2);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.masters = DSOPT_MASTERS_FLAT;
    Random random(15);
    Trainer trainer(ctx, desc);
    const auto params = [&](std::vector<Array> weights, const std::string &prefix) {
        std::vector<Param> list;
        for (Array &weight : weights) list.push_back({std::move(weight), prefix + std::to_string(list.size())});
        return list;
    };
    must(trainer.add_group(group_of(DSOPT_ALGORITHM_ADAM), params(arrays(random, DSOPT_DTYPE_F16, -1, 1), "a")));
    must(trainer.add_group(group_of(DSOPT_ALGORITHM_LAMB), params(arrays(random, DSOPT_DTYPE_BF16, -1, 1), "b")));
    std::vector<Array> grads = arrays(random, DSOPT_DTYPE_F16, -1, 1), more = arrays(random, DSOPT_DTYPE_F16, -1, 1);
    grads.insert(grads.end(), more.begin(), more.end());
    ASSERT_OK(trainer.step(grads));
    for (const int64_t first : {0, 4}) {
        const char *next = nullptr;
        for (const dsopt_state_info &entry : trainer.state()) {
            if (std::strcmp(entry.name, "master") != 0 || entry.param < first || entry.param >= first + 4) continue;
            EXPECT_TRUE(next == nullptr || next == entry.tensor.data);
            next = static_cast<char *>(entry.tensor.data) + entry.tensor.numel * 4;
        }
    }
    for (size_t i = 0; i < 8; ++i)
        EXPECT_EQ(trainer.weight(i).text(),
                  Array(trainer.weight(i).dtype(), trainer.state("master", int64_t(i))).text());
}

TEST(Masters, AreUpdatedInBoundMemory) {
    const Context ctx = make_context(2);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    Random random(16);
    const std::vector<Array> start = arrays(random, DSOPT_DTYPE_F16, -1, 1);
    Trainer bound(ctx, desc, group_of(DSOPT_ALGORITHM_ADAMW), start),
        plain(ctx, desc, group_of(DSOPT_ALGORITHM_ADAMW), start);
    std::vector<Array> masters = converted(start, DSOPT_DTYPE_F32);
    std::vector<dsopt_tensor> list;
    for (const dsopt_state_info &entry : bound.state()) {
        list.push_back(entry.tensor);
        if (std::strcmp(entry.name, "master") == 0) list.back().data = masters[size_t(entry.param)].tensor().data;
    }
    ASSERT_OK(dsopt_optimizer_bind(bound.opt(), DSOPT_BIND_STATE, list.data(), int64_t(list.size())));
    for (int step = 0; step < 3; ++step) {
        const std::vector<Array> grads = arrays(random, DSOPT_DTYPE_F16, -1, 1);
        ASSERT_OK(bound.step(grads));
        ASSERT_OK(plain.step(grads));
    }
    EXPECT_TRUE(same(bound.snapshot(), plain.snapshot()));
    for (size_t i = 0; i < kSizes.size(); ++i)
        EXPECT_TRUE(same_bits(masters[i].floats(), plain.state("master", int64_t(i))));
}

TEST(Masters, AreCopiedFromParametersByReset) {
    const Context ctx = make_context(2);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    Random random(17);
    Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), arrays(random, DSOPT_DTYPE_BF16, -1, 1));
    for (int step = 0; step < 3; ++step) must(trainer.step(arrays(random, DSOPT_DTYPE_BF16, -1, 1)));
    const Snapshot before = trainer.snapshot();
    for (size_t i = 0; i < kSizes.size(); ++i)
        for (size_t k = 0; k < kSizes[i]; ++k) trainer.weight(i).set(k, float(k % 7));
    ASSERT_OK(dsopt_optimizer_reset(trainer.opt(), DSOPT_RESET_MASTERS, nullptr));
    for (size_t i = 0; i < kSizes.size(); ++i)
        EXPECT_TRUE(same_bits(trainer.state("master", int64_t(i)), trainer.weight(i).floats()));
    const Snapshot after = trainer.snapshot();
    for (const auto &[name, bytes] : before)
        if (name.compare(0, 3, "exp") == 0 || name.compare(0, 4, "step") == 0) {
            EXPECT_EQ(after.at(name), bytes) << name;
        }
}

TEST(Masters, AreLoadedUnlessNoMastersIsSet) {
    const Context ctx = make_context(2);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    Random random(18);
    Trainer saved(ctx, desc, group_of(DSOPT_ALGORITHM_ADAMW), arrays(random, DSOPT_DTYPE_F16, -1, 1));
    for (int step = 0; step < 3; ++step) must(saved.step(arrays(random, DSOPT_DTYPE_F16, -1, 1)));
    const Snapshot wanted = saved.snapshot();
    MemoryFile file;
    ASSERT_OK(file.save(saved, DSOPT_IO_PARAMS));
    const std::vector<Array> other = arrays(random, DSOPT_DTYPE_F16, -1, 1);
    for (const uint32_t flags : {0, int(DSOPT_IO_NO_MASTERS), int(DSOPT_IO_NO_STATE), int(DSOPT_IO_PARAMS),
                                 DSOPT_IO_PARAMS | DSOPT_IO_NO_MASTERS}) {
        Trainer loaded(ctx, desc, group_of(DSOPT_ALGORITHM_ADAMW), other);
        ASSERT_OK(file.load(loaded, flags));
        const Snapshot got = loaded.snapshot();
        for (size_t i = 0; i < kSizes.size(); ++i) {
            const std::string p = std::to_string(i);
            EXPECT_EQ(got.at("param " + p), flags & DSOPT_IO_PARAMS ? wanted.at("param " + p) : other[i].text());
            if (flags & DSOPT_IO_NO_MASTERS)
                EXPECT_TRUE(same_bits(loaded.state("master", int64_t(i)), loaded.weight(i).floats()));
            else
                EXPECT_EQ(got.at("master " + p), wanted.at("master " + p));
            EXPECT_EQ(got.at("exp_avg_sq " + p) == wanted.at("exp_avg_sq " + p),
                      !(flags & DSOPT_IO_NO_STATE) || kSizes[i] == 0);
        }
        EXPECT_EQ(got.at("step -1") == wanted.at("step -1"), !(flags & DSOPT_IO_NO_STATE));
    }
}

TEST(Masters, AreCopiedFromParametersAfterAFailedLoad) {
    const Context ctx = make_context(2);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    Random random(19);
    const std::vector<Array> start = arrays(random, DSOPT_DTYPE_F16, 1, 2);
    Trainer saved(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), arrays(random, DSOPT_DTYPE_F16, -1, 1));
    MemoryFile file;
    ASSERT_OK(file.save(saved));
    file.data.back() = char(file.data.back() ^ 1);
    Trainer failed(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), start),
        unloaded(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), start);
    ASSERT_TRUE(refused(file.load(failed), DSOPT_ERR_CHECKSUM));
    EXPECT_TRUE(same(failed.snapshot(), unloaded.snapshot()));
}

TEST(Masters, AreAbsentWithNoMasterSoThatEachStepRounds) {
    const Context ctx = make_context(2);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    DSOPT_NEW(dsopt_optimizer_desc, plain);
    desc.flags = DSOPT_OPTIMIZER_NO_MASTER;
    Random random(20);
    for (const int32_t dtype : {DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16}) {
        const std::vector<Array> start = arrays(random, dtype, -1, 1);
        Trainer half(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), start),
            reference(ctx, plain, group_of(DSOPT_ALGORITHM_ADAM), converted(start, DSOPT_DTYPE_F32));
        for (const dsopt_state_info &entry : half.state()) EXPECT_STRNE(entry.name, "master");
        for (int step = 0; step < 4; ++step) {
            const std::vector<Array> grads = arrays(random, dtype, -1, 1);
            ASSERT_OK(half.step(grads));
            ASSERT_OK(reference.step(grads));
            for (size_t i = 0; i < kSizes.size(); ++i) {
                ASSERT_EQ(half.weight(i).text(), Array(dtype, reference.weight(i).floats()).text());
                for (size_t k = 0; k < kSizes[i]; ++k) reference.weight(i).set(k, half.weight(i)[k]);
            }
        }
    }
}

} // namespace mixed_tests
