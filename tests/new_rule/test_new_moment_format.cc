// SPDX-License-Identifier: Apache-2.0
// A format of moments that no release has, FP8 E5M2 with scales, on both devices: the engine needs no changes except
// those of edit.py.
#include "../cuda/backend_optimizer.h"
#include "support/file.h"
#include <algorithm>
#include <map>

using namespace cuda_test;

namespace {

constexpr int32_t kAlgorithms[] = {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_LION,
                                   DSOPT_ALGORITHM_ADEMAMIX, DSOPT_ALGORITHM_ADEMAMIX_TRUST};

void with_betas(dsopt_group &group, int index) {
    if (group.algorithm >= DSOPT_ALGORITHM_ADEMAMIX) group.beta3 = index == 0 ? 0.95 : 0.5;
}

/// Means of gradients are in the format, and squares, where there are any, in BF16 or, unless `random`, in F32.
Setting setting_of(int32_t algorithm, bool random = true) {
    Setting setting;
    setting.algorithm = algorithm;
    setting.change = with_betas;
    setting.desc.seed = 3;
    setting.first_format = DSOPT_MOMENT_E5M2;
    if (random && algorithm != DSOPT_ALGORITHM_LION) setting.second_format = DSOPT_MOMENT_BF16_RANDOM;
    return setting;
}
/// In addition parameters, gradients and masters of all dtypes, not aligned, clipped, with outputs.
Setting mixed(int32_t algorithm) {
    Setting setting = setting_of(algorithm);
    setting.mixed = setting.shifted = setting.scaler = true;
    setting.desc.max_norm = 1;
    setting.desc.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
    setting.out = DSOPT_DTYPE_BF16;
    return setting;
}

/// Bytes of parameters, and of state by parameter and name.
struct Snapshot {
    std::vector<std::vector<char>> params;
    std::map<std::string, std::vector<char>> state;
    explicit Snapshot(BackendOptimizer &side) {
        for (const Bytes &param : side.params) params.push_back(param.get());
        for_state(side, [&](int64_t i, const dsopt_state_info &info) {
            const int32_t dtype = info.tensor.dtype;
            const size_t size = dtype == DSOPT_DTYPE_F8_E5M2 ? 1 : size_of(dtype);
            std::vector<char> &bytes = state[std::to_string(info.param) + "." + info.name];
            bytes.resize(size_t(info.tensor.numel) * size);
            BackendOptimizer::must(dsopt_optimizer_export(side.optimizer, i, bytes.data(), bytes.size()));
        });
    }
    template <class Call> static void for_state(BackendOptimizer &side, const Call &call) {
        int64_t count = 0;
        BackendOptimizer::must(dsopt_optimizer_state_count(side.optimizer, &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            BackendOptimizer::must(dsopt_optimizer_state(side.optimizer, i, &info));
            call(i, info);
        }
    }
};
void expect_equal(BackendOptimizer &a, BackendOptimizer &b) {
    const Snapshot x(a), y(b);
    ASSERT_EQ(x.state.size(), y.state.size());
    for (const auto &[name, bytes] : x.state) EXPECT_TRUE(bytes == y.state.at(name)) << name;
    for (size_t i = 0; i < x.params.size(); ++i) EXPECT_TRUE(x.params[i] == y.params[i]) << "parameter " << i;
}

/// Returns a moment of every parameter as fp32.
std::vector<std::vector<float>> f32_moments(BackendOptimizer &side, const std::string &name) {
    std::vector<std::vector<float>> all(side.params.size());
    Snapshot::for_state(side, [&](int64_t i, const dsopt_state_info &info) {
        if (info.name != name) return;
        std::vector<float> &values = all[size_t(info.param)];
        values.resize(size_t(info.tensor.numel));
        BackendOptimizer::must(dsopt_optimizer_export_f32(side.optimizer, i, values.data(), info.tensor.numel));
    });
    return all;
}

class NewMomentFormat : public Cuda {};

TEST_F(NewMomentFormat, StoresCodesOfOneByteWithScales) {
    for (const bool device : {false, true}) {
        BackendOptimizer side(device, setting_of(DSOPT_ALGORITHM_ADEMAMIX));
        int moments = 0, scales = 0;
        Snapshot::for_state(side, [&](int64_t, const dsopt_state_info &info) {
            const std::string name = info.name;
            const int64_t numel = info.param < 0 ? 0 : side.gradients[size_t(info.param)].numel;
            if (name == "exp_avg" || name == "exp_avg_slow") {
                EXPECT_EQ(info.tensor.dtype, DSOPT_DTYPE_F8_E5M2);
                EXPECT_EQ(info.tensor.numel, numel);
                ++moments;
            } else if (name == "exp_avg_scale" || name == "exp_avg_slow_scale") {
                EXPECT_EQ(info.tensor.dtype, DSOPT_DTYPE_F32);
                EXPECT_EQ(info.tensor.numel, (numel + 255) / 256);
                ++scales;
            }
        });
        EXPECT_EQ(moments, 2 * int(side.params.size()));
        EXPECT_EQ(scales, moments);
    }
}

TEST_F(NewMomentFormat, GivesSameBitsOnCpuAndDevice) {
    for (const int32_t algorithm : kAlgorithms)
        for (const Setting &setting : {setting_of(algorithm), setting_of(algorithm, false), mixed(algorithm)}) {
            SCOPED_TRACE(algorithm);
            BackendOptimizer host(false, setting), device(true, setting);
            for (int t = 0; t < 4; ++t) {
                for (BackendOptimizer *side : {&host, &device}) {
                    side->fill_gradients(t);
                    ASSERT_OK(side->step());
                }
                expect_equal(host, device);
                if (HasFailure()) return;
            }
        }
}

/// The error of a moment is at most beta times its error before the step, and half the distance between neighbouring
/// levels: an eighth of the magnitude, or 2^-17 of the largest level divided by 57344.
TEST_F(NewMomentFormat, DiffersFromF32MomentsByRoundingErrors) {
    for (const bool device : {false, true}) {
        Setting setting = setting_of(DSOPT_ALGORITHM_ADAMW, false);
        BackendOptimizer low(device, setting);
        setting.first_format = DSOPT_MOMENT_F32;
        BackendOptimizer exact(device, setting);
        std::vector<std::vector<double>> bounds;
        for (const dsopt_tensor &gradient : exact.gradients) bounds.emplace_back(size_t(gradient.numel));
        double largest_error = 0;
        for (int t = 0; t < 8; ++t) {
            for (BackendOptimizer *side : {&low, &exact}) {
                side->fill_gradients(t);
                ASSERT_OK(side->step());
            }
            const auto stored = f32_moments(low, "exp_avg"), moments = f32_moments(exact, "exp_avg");
            for (size_t i = 0; i < moments.size(); ++i) {
                ASSERT_EQ(stored[i].size(), moments[i].size());
                const double beta = i < moments.size() / 2 ? 0.9 : 0.8; // of the two groups
                double top = 0;
                for (size_t k = 0; k < moments[i].size(); ++k) {
                    bounds[i][k] *= beta;
                    top = std::max(top, std::fabs(double(moments[i][k])) + bounds[i][k]);
                }
                for (size_t k = 0; k < moments[i].size(); ++k) {
                    const double rounded = (std::fabs(double(moments[i][k])) + bounds[i][k]) / 8;
                    bounds[i][k] += std::max(rounded, top * 0x1p-17 / 57344) + 1e-6 * top; // and fp32 arithmetic
                    const double error = std::fabs(double(stored[i][k]) - double(moments[i][k]));
                    ASSERT_LE(error, bounds[i][k]) << "step " << t << ", element " << k << " of " << i;
                    largest_error = std::max(largest_error, error / top);
                }
            }
        }
        EXPECT_GT(largest_error, 0.02); // moments of two bits of fraction
    }
}

TEST_F(NewMomentFormat, ResumesFromCheckpointWithSameBits) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ADEMAMIX_TRUST})
        for (const bool device : {false, true}) {
            BackendOptimizer whole(device, mixed(algorithm)), loaded(!device, mixed(algorithm));
            test::MemoryFile file;
            const dsopt_io to = file.io(DSOPT_IO_PARAMS);
            for (int t = 0; t < 6; ++t) {
                whole.fill_gradients(t);
                ASSERT_OK(whole.step());
                if (t == 2) BackendOptimizer::must(dsopt_optimizer_save(whole.optimizer, nullptr, &to));
            }
            EXPECT_NE(file.data.find("\"F8_E5M2\""), std::string::npos);
            EXPECT_NE(file.data.find(".exp_avg_format\":\"e5m2\""), std::string::npos);
            const dsopt_io from = file.io(DSOPT_IO_PARAMS); // with the size of the file
            ASSERT_OK(dsopt_optimizer_load(loaded.optimizer, nullptr, &from));
            for (int t = 3; t < 6; ++t) {
                loaded.fill_gradients(t);
                ASSERT_OK(loaded.step());
            }
            expect_equal(whole, loaded);
        }
}

TEST_F(NewMomentFormat, ConvertsToAndFromOtherFormatsInLoad) {
    Setting setting = setting_of(DSOPT_ALGORITHM_ADAMW, false);
    BackendOptimizer low(false, setting), again(true, setting);
    setting.first_format = DSOPT_MOMENT_F32;
    BackendOptimizer exact(true, setting);
    setting.first_format = DSOPT_MOMENT_Q8;
    BackendOptimizer other(false, setting);
    low.fill_gradients(0);
    ASSERT_OK(low.step());
    const auto save = [](test::MemoryFile &file, const BackendOptimizer &side) {
        const dsopt_io to = file.io();
        return dsopt_optimizer_save(side.optimizer, nullptr, &to);
    };
    const auto load = [](test::MemoryFile &file, const BackendOptimizer &side, uint32_t flags) {
        const dsopt_io from = file.io(flags);
        return dsopt_optimizer_load(side.optimizer, nullptr, &from);
    };
    test::MemoryFile file, converted;
    ASSERT_OK(save(file, low));
    EXPECT_EQ(load(file, exact, 0), DSOPT_ERR_MISMATCH);
    EXPECT_NE(std::string(dsopt_last_error()).find("F8_E5M2"), std::string::npos) << dsopt_last_error();
    ASSERT_OK(load(file, other, DSOPT_IO_CONVERT));
    ASSERT_OK(load(file, exact, DSOPT_IO_CONVERT));
    EXPECT_EQ(f32_moments(low, "exp_avg"), f32_moments(exact, "exp_avg"));
    // The levels of a block are levels again: its largest element has the largest code.
    ASSERT_OK(save(converted, exact));
    ASSERT_OK(load(converted, again, DSOPT_IO_CONVERT));
    const Snapshot a(low), b(again);
    for (const auto &[name, bytes] : a.state) EXPECT_TRUE(bytes == b.state.at(name)) << name;
}

TEST_F(NewMomentFormat, IsRefusedByName) {
    const auto refused = [](int32_t algorithm, int32_t first, int32_t second) {
        dsopt_group group;
        BackendOptimizer::must(dsopt_group_init(&group, sizeof group, algorithm));
        group.exp_avg_format = first;
        group.exp_avg_sq_format = second;
        BackendOptimizer side(false, Setting{});
        EXPECT_NE(dsopt_optimizer_add_group(side.optimizer, &group, nullptr, 0), DSOPT_OK) << algorithm;
        return std::string(dsopt_last_error());
    };
    const auto expect = [](const std::string &text, const char *words) {
        EXPECT_NE(text.find(words), std::string::npos) << text;
    };
    expect(refused(DSOPT_ALGORITHM_ADAMW, DSOPT_MOMENT_F32, DSOPT_MOMENT_E5M2),
           "exp_avg_sq_format is E5M2: exp_avg_sq needs more bits of fraction");
    expect(refused(DSOPT_ALGORITHM_MUON, DSOPT_MOMENT_E5M2, DSOPT_MOMENT_F32), "exp_avg_format is E5M2: the momentum");
    expect(refused(DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_MOMENT_E5M2, DSOPT_MOMENT_F32), "exp_avg_format is E5M2");
    expect(refused(DSOPT_ALGORITHM_ADAMW, DSOPT_MOMENT_E5M2 + 1, DSOPT_MOMENT_F32), "exp_avg_format");
}

} // namespace
