// SPDX-License-Identifier: Apache-2.0
// A rule with three moments and one more beta than any that ships, on both devices: the engine needs no changes except
// those of edit.py.
#include "../cuda/backend_optimizer.h"
#include "support/file.h"

using namespace cuda_test;

namespace {

constexpr int32_t kBoth[] = {DSOPT_ALGORITHM_ADEMAMIX, DSOPT_ALGORITHM_ADEMAMIX_TRUST};

void with_beta3(dsopt_group &group, int index) { group.beta3 = index == 0 ? 0.95 : 0.5; }

/// The second group has a rule with fewer moments.
void with_lamb(dsopt_group &group, int index) {
    if (index == 0) return with_beta3(group, index);
    ASSERT_OK(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_LAMB));
}

Setting plain(int32_t algorithm) {
    Setting setting;
    setting.algorithm = algorithm;
    setting.change = with_beta3;
    return setting;
}
Setting mixed(int32_t algorithm) {
    Setting setting = plain(algorithm);
    setting.mixed = setting.shifted = setting.scaler = true;
    setting.desc.max_norm = 1;
    setting.desc.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
    setting.out = DSOPT_DTYPE_BF16;
    setting.step_flags = DSOPT_STEP_ZERO_GRADS;
    return setting;
}

std::vector<float> floats_of(const std::vector<char> &bytes) {
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
    return values;
}
/// Returns a copy of the state tensor `name` of a parameter.
std::vector<float> state_of(BackendOptimizer &side, int64_t param, const std::string &name) {
    int64_t count = 0;
    BackendOptimizer::must(dsopt_optimizer_state_count(side.optimizer, &count));
    for (int64_t i = 0; i < count; ++i) {
        DSOPT_NEW(dsopt_state_info, info);
        BackendOptimizer::must(dsopt_optimizer_state(side.optimizer, i, &info));
        if (info.param != param || info.name != name) continue;
        std::vector<float> values(size_t(info.tensor.numel));
        BackendOptimizer::must(dsopt_optimizer_export(side.optimizer, i, values.data(), values.size() * sizeof(float)));
        return values;
    }
    ADD_FAILURE() << "no state tensor " << name;
    return {};
}

class NewRule : public Cuda {};

TEST_F(NewRule, MatchesDoublePrecisionFormula) {
    BackendOptimizer side(false, plain(DSOPT_ALGORITHM_ADEMAMIX));
    constexpr size_t kTensor = 3; // 1023 elements, of the first group
    const std::vector<float> start = floats_of(side.params[kTensor].get());
    std::vector<double> p(start.begin(), start.end()), m(p.size()), v(p.size()), slow(p.size());
    const double beta1 = 0.9, beta2 = 0.999, beta3 = 0.95, lr = 1e-3, eps = 1e-8, wd = 0.1;
    for (int t = 1; t <= 6; ++t) {
        side.fill_gradients(t);
        const std::vector<float> g = floats_of(side.grads[kTensor].get());
        ASSERT_OK(side.step());
        const double c1 = 1 - std::pow(beta1, t), c2 = 1 - std::pow(beta2, t);
        for (size_t k = 0; k < p.size(); ++k) {
            m[k] = beta1 * m[k] + (1 - beta1) * double(g[k]);
            v[k] = beta2 * v[k] + (1 - beta2) * double(g[k]) * double(g[k]);
            slow[k] = beta3 * slow[k] + (1 - beta3) * double(g[k]);
            p[k] -= lr * ((m[k] / c1 + 5 * slow[k]) / (std::sqrt(v[k] / c2) + eps) + wd * p[k]);
        }
    }
    const std::vector<float> now = floats_of(side.params[kTensor].get()),
                             mean = state_of(side, kTensor, "exp_avg_slow");
    ASSERT_EQ(now.size(), p.size());
    ASSERT_EQ(mean.size(), p.size());
    for (size_t k = 0; k < p.size(); ++k) {
        ASSERT_NEAR(now[k], p[k], 2e-6) << k;
        ASSERT_NEAR(mean[k], slow[k], 1e-6) << k;
    }
}

TEST_F(NewRule, GivesSameBitsOnCpuAndDevice) {
    for (const int32_t algorithm : kBoth) {
        expect_same_bits(plain(algorithm), "fp32");
        Setting setting = mixed(algorithm);
        expect_same_bits(setting, "masters");
        setting.desc.flags = DSOPT_OPTIMIZER_NO_MASTER;
        expect_same_bits(setting, "no masters");
    }
}

TEST_F(NewRule, GivesSameBitsOnCpuAndDeviceNextToLamb) {
    Setting setting = plain(DSOPT_ALGORITHM_ADEMAMIX_TRUST);
    setting.change = with_lamb;
    expect_same_bits(setting, "fp32");
    setting = mixed(DSOPT_ALGORITHM_ADEMAMIX_TRUST);
    setting.change = with_lamb;
    expect_same_bits(setting, "masters");
}

TEST_F(NewRule, ApplyGivesSameBitsAsStep) {
    for (const int32_t algorithm : kBoth)
        for (const bool device : {false, true}) {
            BackendOptimizer steps(device, mixed(algorithm)), pure(device, mixed(algorithm));
            const std::vector<dsopt_tensor> engine = pure.state(); // only sizes and dtypes are used
            std::vector<Bytes> memory;
            std::vector<dsopt_tensor> state, weights;
            for (const dsopt_tensor &tensor : engine) {
                memory.emplace_back(device, size_t(tensor.numel) * size_of(tensor.dtype), 0);
                state.push_back({memory.back().data(), tensor.numel, tensor.dtype, 0});
            }
            for (size_t i = 0; i < pure.params.size(); ++i)
                weights.push_back({pure.params[i].data(), pure.gradients[i].numel, pure.param_types[i], 0});
            size_t bytes = 0;
            ASSERT_OK(dsopt_optimizer_workspace(pure.optimizer, &bytes));
            const Bytes workspace(device, bytes, 0);
            ASSERT_OK(dsopt_optimizer_init_state(pure.optimizer, weights.data(), int64_t(weights.size()), state.data(),
                                                 int64_t(state.size()), nullptr));
            for (int t = 0; t < 4; ++t) {
                steps.fill_gradients(t);
                pure.fill_gradients(t);
                dsopt_step call = pure.arguments();
                call.params = weights.data();
                call.state = state.data();
                call.state_count = int64_t(state.size());
                call.workspace = workspace.data();
                call.workspace_bytes = bytes;
                ASSERT_OK(dsopt_optimizer_apply(pure.optimizer, &call));
                ASSERT_OK(steps.step());
            }
            for (size_t i = 0; i < steps.params.size(); ++i)
                EXPECT_EQ(steps.params[i].get(), pure.params[i].get()) << i;
            DSOPT_NEW(dsopt_state_info, info);
            for (size_t i = 0; i < state.size(); ++i) {
                ASSERT_OK(dsopt_optimizer_state(steps.optimizer, int64_t(i), &info));
                if (info.param < 0) continue;
                std::vector<char> host(size_t(info.tensor.numel) * size_of(info.tensor.dtype));
                ASSERT_OK(dsopt_optimizer_export(steps.optimizer, int64_t(i), host.data(), host.size()));
                EXPECT_EQ(host, memory[i].get()) << info.name << " of " << info.param;
            }
        }
}

TEST_F(NewRule, ResumesFromCheckpointWithSameBits) {
    for (const int32_t algorithm : kBoth)
        for (const bool device : {false, true}) {
            BackendOptimizer whole(device, mixed(algorithm)), loaded(device, mixed(algorithm));
            test::MemoryFile memory_file;
            const dsopt_io to = memory_file.io(DSOPT_IO_PARAMS);
            for (int t = 0; t < 6; ++t) {
                whole.fill_gradients(t);
                ASSERT_OK(whole.step());
                if (t == 2) BackendOptimizer::must(dsopt_optimizer_save(whole.optimizer, nullptr, &to));
            }
            EXPECT_NE(memory_file.data.find("exp_avg_slow"), std::string::npos);
            EXPECT_NE(memory_file.data.find("beta3"), std::string::npos);
            ASSERT_OK(dsopt_optimizer_set(loaded.optimizer, DSOPT_ALL_GROUPS, DSOPT_KEY_BETA3, 0.25));
            const dsopt_io from = memory_file.io(DSOPT_IO_PARAMS);
            ASSERT_OK(dsopt_optimizer_load(loaded.optimizer, nullptr, &from));
            for (int t = 3; t < 6; ++t) {
                loaded.fill_gradients(t);
                ASSERT_OK(loaded.step());
            }
            EXPECT_TRUE(same(whole.all_bytes(), loaded.all_bytes()));
        }
}

TEST_F(NewRule, ReadsBeta3FromHyperRows) {
    for (const bool device : {false, true}) {
        BackendOptimizer by_key(device, plain(DSOPT_ALGORITHM_ADEMAMIX)),
            by_row(device, plain(DSOPT_ALGORITHM_ADEMAMIX));
        ASSERT_OK(dsopt_optimizer_set(by_key.optimizer, DSOPT_ALL_GROUPS, DSOPT_KEY_BETA3, 0.75));
        std::vector<float> rows(2 * DSOPT_HYPER_FLOATS, NAN);
        rows[DSOPT_HYPER_BETA3] = rows[DSOPT_HYPER_FLOATS + DSOPT_HYPER_BETA3] = 0.75f;
        const Bytes device_rows(device, rows.size() * sizeof(float), 0);
        const auto set = [&] {
            device_rows.set({reinterpret_cast<const char *>(rows.data()),
                             reinterpret_cast<const char *>(rows.data() + rows.size())});
        };
        set();
        dsopt_step call = by_row.arguments();
        call.hyper = reinterpret_cast<const float *>(device_rows.data());
        by_key.fill_gradients(0);
        by_row.fill_gradients(0);
        ASSERT_OK(by_key.step());
        ASSERT_OK(dsopt_optimizer_step(by_row.optimizer, &call));
        for (size_t i = 0; i < by_key.params.size(); ++i)
            EXPECT_EQ(by_key.params[i].get(), by_row.params[i].get()) << i;
        rows[DSOPT_HYPER_BETA3] = 1; // out of range
        set();
        ASSERT_OK(dsopt_optimizer_step(by_row.optimizer, &call));
        DSOPT_NEW(dsopt_report, report);
        ASSERT_OK(dsopt_optimizer_report(by_row.optimizer, &report));
        EXPECT_EQ(report.skipped, 1);
    }
}

TEST_F(NewRule, OtherRulesRejectBeta3) {
    Setting setting;
    setting.algorithm = DSOPT_ALGORITHM_ADAMW;
    BackendOptimizer side(false, setting);
    EXPECT_EQ(dsopt_optimizer_set(side.optimizer, 0, DSOPT_KEY_BETA3, 0.5), DSOPT_ERR_UNSUPPORTED);
    EXPECT_NE(std::string(dsopt_last_error()).find("beta3"), std::string::npos) << dsopt_last_error();
}

} // namespace
