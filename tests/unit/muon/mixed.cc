// SPDX-License-Identifier: Apache-2.0
// Muon beside groups of other rules; skipped steps; hyper-parameters in backend memory; norms; formats of the momentum.
#include "support/caller_memory.h"
#include "support/formats.h"
#include "support/lanes.h"
#include "support/muon.h"

using namespace test;

LABEL_FILE(one_thread);

namespace muon_mixed_tests {

/// Two matrices, and two flat tensors.
const std::vector<Cut> kMatrices = {matrix(20, 33, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F32), {{17, 48}, 17, 16}};
const std::vector<int64_t> kFlat = {5000, 33};

/// An optimizer whose first group has the matrices, and whose second group has the flat tensors.
struct Mixed {
    Mixed(const dsopt_group &first, const dsopt_group &second, dsopt_optimizer_desc desc = optimizer_desc(),
          bool scaled = false) :
        context(make_context()) {
        if (scaled) {
            scaler = make_scaler(context, 64, 2);
            desc.scaler = scaler.get();
        }
        std::vector<Shape> shapes = cut_shapes(kMatrices);
        for (const int64_t numel : kFlat) shapes.push_back({numel, DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16});
        model = Model(shapes);
        opt = make_optimizer(context, desc);
        std::vector<dsopt_param> params = params_of(kMatrices), flat(kFlat.size());
        if (first.algorithm != DSOPT_ALGORITHM_MUON)
            for (dsopt_param &param : params) param.rows = param.cols = 0;
        for (size_t i = 0; i < 2; ++i) params[i].tensor = model.params[i].tensor();
        for (size_t i = 0; i < 2; ++i) flat[i].tensor = model.params[2 + i].tensor();
        must(dsopt_optimizer_add_group(opt.get(), &first, params.data(), 2));
        must(dsopt_optimizer_add_group(opt.get(), &second, flat.data(), 2));
    }
    void step(const std::function<void(dsopt_step &)> &change = {}) {
        const std::vector<dsopt_tensor> grads = list_of(model.grads);
        DSOPT_NEW(dsopt_step, step);
        step.grads = grads.data();
        step.count = 4;
        if (change) change(step);
        ASSERT_OK(dsopt_optimizer_step(opt.get(), &step));
    }
    /// Returns weights and state of the second group.
    std::string second() {
        std::string all = model.params[2].text() + model.params[3].text();
        for (int64_t i = 0; i < state_count(opt.get()); ++i)
            if (state_info(opt.get(), i).param >= 2) all += exported_text(opt.get(), i);
        return all;
    }
    Context context;
    Scaler scaler;
    Model model;
    Optimizer opt;
};

const int32_t kOthers[] = {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_SGD, DSOPT_ALGORITHM_LION};

TEST(MuonMixed, LeavesTheBitsOfOtherGroups) {
    for (const int32_t algorithm : kOthers) {
        Mixed mixed(muon_group(DSOPT_DTYPE_BF16), group_of(algorithm));
        Trainer alone({{5000, DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16, 0, 2}, {33, DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16, 0, 3}},
                      group_of(algorithm));
        for (uint64_t t = 1; t <= 4; ++t) {
            mixed.model.make_gradients(t);
            mixed.step();
            alone.train(t);
        }
        EXPECT_TRUE(same(mixed.model.params[2].text() + mixed.model.params[3].text(), alone.model.text()))
            << name_of(algorithm);
    }
}

// One norm over all gradients, one scaler and one report: as with two groups of the other rule.
TEST(MuonMixed, ClipsScalesAndReportsAllGroupsTogether) {
    for (const int32_t algorithm : kOthers) {
        Mixed mixed(muon_group(DSOPT_DTYPE_F16), group_of(algorithm), optimizer_desc(0.5), true),
            other(group_of(algorithm), group_of(algorithm), optimizer_desc(0.5), true);
        for (uint64_t t = 1; t <= 6; ++t) {
            for (Mixed *both : {&mixed, &other}) {
                both->model.make_gradients(t);
                if (t == 3) both->model.grads[0].set(7, kInf); // of a matrix
                if (t == 5) both->model.grads[2].set(7, kNaN);
                both->step();
            }
            const dsopt_report a = report_of(mixed.opt.get()), b = report_of(other.opt.get());
            EXPECT_EQ(a.calls, b.calls);
            EXPECT_EQ(a.skipped, b.skipped);
            EXPECT_EQ(a.last_skipped, t == 3 || t == 5);
            EXPECT_EQ(a.nonfinite, b.nonfinite);
            EXPECT_EQ(a.first_bad, b.first_bad);
            EXPECT_EQ(a.loss_scale, b.loss_scale);
            EXPECT_EQ(a.divisor, b.divisor);
            EXPECT_EQ(bits_of(float(a.grad_norm)), bits_of(float(b.grad_norm)));
            ASSERT_TRUE(same(mixed.second(), other.second())) << name_of(algorithm) << t;
        }
        EXPECT_EQ(steps(mixed.opt.get()), std::vector<int32_t>(4, 4));
    }
}

TEST(MuonMixed, ClipsByItsOwnGroupAlone) {
    dsopt_group clipped = muon_group();
    clipped.max_norm = 0.25;
    Mixed mixed(clipped, group_of(DSOPT_ALGORITHM_ADAMW)), free(muon_group(), group_of(DSOPT_ALGORITHM_ADAMW));
    for (uint64_t t = 1; t <= 3; ++t)
        for (Mixed *both : {&mixed, &free}) {
            both->model.make_gradients(t);
            both->step();
        }
    EXPECT_TRUE(same(mixed.second(), free.second()));
    EXPECT_FALSE(same(mixed.model.params[0].text(), free.model.params[0].text()));
}

TEST(MuonMixed, HoldsSeveralGroupsOfItsOwn) {
    dsopt_group first = muon_group(DSOPT_DTYPE_BF16), second = muon_group(DSOPT_DTYPE_F32);
    second.lr = 0.1, second.ns_steps = 3, second.adjust = DSOPT_ADJUST_SPECTRAL, second.momentum = 0.5;
    Trainer both(cut_shapes({matrix(20, 33), matrix(20, 33)}), optimizer_desc());
    both.add(first, params_of({matrix(20, 33)}));
    both.add(second, params_of({matrix(20, 33)}));
    both.train(1, 3);
    for (size_t i = 0; i < 2; ++i) {
        Trainer alone({{660, DSOPT_DTYPE_F32, DSOPT_DTYPE_F32, 0, int64_t(i)}}, optimizer_desc());
        alone.add(i == 0 ? first : second, params_of({matrix(20, 33)}));
        alone.train(1, 3);
        EXPECT_TRUE(same(alone.model.text(), both.model.params[i].text())) << i;
    }
}

// ------------------------------------------------------------------------------------------------------ skipped steps
TEST(MuonSkip, LeavesWeightsAndMomentumIfAGradientIsNotFinite) {
    for (const float bad : {kInf, -kInf, kNaN})
        for (const bool scaled : {false, true})
            for (const size_t tensor : {size_t(0), size_t(1), size_t(3)}) {
                dsopt_optimizer_desc desc = optimizer_desc();
                desc.nonfinite = DSOPT_NONFINITE_SKIP;
                Mixed mixed(muon_group(DSOPT_DTYPE_BF16), group_of(DSOPT_ALGORITHM_ADAMW), desc, scaled);
                mixed.step();
                const auto bytes = [&] {
                    std::string all = mixed.model.text();
                    for (int64_t i = 0; i < state_count(mixed.opt.get()); ++i) {
                        const std::string name = state_info(mixed.opt.get(), i).name;
                        if (name != "scaler" && name != "loss_scale") all += exported_text(mixed.opt.get(), i);
                    }
                    return all;
                };
                const std::string before = bytes();
                mixed.model.make_gradients(2);
                mixed.model.grads[tensor].set(mixed.model.grads[tensor].size() - 1, bad);
                mixed.step();
                EXPECT_TRUE(same(bytes(), before));
                const dsopt_report report = report_of(mixed.opt.get());
                EXPECT_EQ(report.last_skipped, 1);
                EXPECT_EQ(report.first_bad, int64_t(tensor));
                EXPECT_EQ(report.reasons & DSOPT_SKIP_GRADIENTS, DSOPT_SKIP_GRADIENTS);
                // The next step is the second one.
                Mixed clean(muon_group(DSOPT_DTYPE_BF16), group_of(DSOPT_ALGORITHM_ADAMW), optimizer_desc());
                clean.step();
                for (Mixed *both : {&mixed, &clean}) both->model.make_gradients(3);
                if (scaled) continue; // the loss scale is another one
                mixed.step();
                clean.step();
                EXPECT_TRUE(same(mixed.model.text(), clean.model.text()));
            }
}

TEST(MuonSkip, LeavesWeightsAndMomentumIfTheCallerSkips) {
    const Trainer trainer = muon_trainer({matrix(20, 33, DSOPT_DTYPE_BF16)}, muon_group(DSOPT_DTYPE_BF16));
    trainer.train(1);
    const std::string before = trainer.text();
    const int32_t skip = 1;
    Array out(DSOPT_DTYPE_BF16, 660, 0);
    const dsopt_tensor outs = out.tensor();
    dsopt_step step = trainer.arguments();
    step.skip = on_device(skip);
    step.flags = DSOPT_STEP_ZERO_GRADS;
    for (const dsopt_tensor *const list : {static_cast<const dsopt_tensor *>(nullptr), &outs}) {
        step.out = list;
        trainer.model.make_gradients(2);
        must(trainer.step(step));
        EXPECT_TRUE(same(trainer.text(), before));
        EXPECT_EQ(trainer.model.grads[0].text(), std::string(660 * 4, '\0'));
        EXPECT_EQ(trainer.report().reasons, DSOPT_SKIP_CALLER);
    }
    EXPECT_TRUE(same(out.text(), trainer.model.params[0].text()));
}

TEST(MuonSkip, AppliesNonfiniteGradientsIfTold) {
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.nonfinite = DSOPT_NONFINITE_APPLY;
    const Cut cut = {{2, 20, 18}, 20, 18};
    const Trainer trainer = muon_trainer({cut}, muon_group(), desc);
    trainer.model.grads[0].set(5, kNaN);
    must(trainer.step(trainer.arguments()));
    for (size_t i = 0; i < 720; ++i) // a whole matrix
        ASSERT_EQ(std::isnan(trainer.model.params[0][i]), i < 360) << i;
}

// ------------------------------------------------------------------------------------- values in backend memory, rows
TEST(MuonHyper, ReadsRowsLikeValuesThatAreSet) {
    const std::vector<Cut> cuts = {matrix(20, 33), {{17, 48}, 17, 16}};
    const struct {
        int index;
        int32_t key;
        float values[3];
    } entries[] = {{DSOPT_HYPER_LR, DSOPT_KEY_LR, {0.01f, 0.0f, 0.5f}},
                   {DSOPT_HYPER_MOMENTUM, DSOPT_KEY_MOMENTUM, {0.5f, 0.99f, 0x1p-20f}},
                   {DSOPT_HYPER_WEIGHT_DECAY, DSOPT_KEY_WEIGHT_DECAY, {0.0f, 0.5f, 1.0f}},
                   {DSOPT_HYPER_EPS, DSOPT_KEY_EPS, {1e-7f, 1.0f, 0x1p-100f}},
                   {DSOPT_HYPER_GROUP_MAX_NORM, DSOPT_KEY_GROUP_MAX_NORM, {0.25f, 5.0f, 0.01f}}};
    for (const auto &entry : entries) {
        dsopt_group group = muon_group(DSOPT_DTYPE_BF16);
        group.max_norm = 1;
        const Trainer host = muon_trainer(cuts, group), device = muon_trainer(cuts, group);
        CallerMemory pure(host.opt(), device.model.params);
        must(pure.init());
        for (uint64_t t = 1; t <= 3; ++t) {
            must(dsopt_optimizer_set(host.opt(), 0, entry.key, double(entry.values[t - 1])));
            host.train(t);
            std::vector<float> row(DSOPT_HYPER_FLOATS, kNaN);
            row[size_t(entry.index)] = entry.values[t - 1];
            device.model.make_gradients(t);
            dsopt_step step = device.arguments();
            step.hyper = on_device(row);
            must(device.step(step));
            must(pure.apply(device.model.grads, [&](dsopt_step &args) { args.hyper = on_device(row); }));
        }
        EXPECT_TRUE(same(device.text(), host.text())) << entry.key;
        EXPECT_TRUE(same(pure.model.text(), host.model.text())) << entry.key;
    }
}

TEST(MuonHyper, ReadsTheCallersLearningRate) {
    const Trainer host = muon_trainer({matrix(20, 33)}), device = muon_trainer({matrix(20, 33)});
    for (uint64_t t = 1; t <= 3; ++t) {
        const float lr = 0.125f / float(t);
        must(dsopt_optimizer_set(host.opt(), 0, DSOPT_KEY_LR, double(lr)));
        host.train(t);
        device.model.make_gradients(t);
        dsopt_step step = device.arguments();
        step.lr = on_device(lr);
        must(device.step(step));
    }
    EXPECT_TRUE(same(device.text(), host.text()));
}

TEST(MuonHyper, SkipsIfAValueIsOutOfRange) {
    const Trainer trainer = muon_trainer({matrix(20, 33)});
    trainer.train(1);
    const std::string before = trainer.text();
    const auto expect_skipped = [&](int index, float value, bool skipped) {
        std::vector<float> row(DSOPT_HYPER_FLOATS, kNaN);
        row[size_t(index)] = value;
        dsopt_step step = trainer.arguments();
        step.hyper = on_device(row);
        must(trainer.step(step));
        EXPECT_EQ(report_of(trainer.opt()).reasons, skipped ? int(DSOPT_SKIP_HYPER) : 0) << index << " " << value;
        EXPECT_EQ(same(trainer.text(), before), skipped) << index << " " << value;
    };
    for (const float bad : {0.0f, 1.0f, -0.5f, 2.0f, kInf}) expect_skipped(DSOPT_HYPER_MOMENTUM, bad, true);
    for (const float bad : {0.0f, 0x1p-101f, 1.5f, -1e-7f, kInf}) expect_skipped(DSOPT_HYPER_EPS, bad, true);
    for (const float bad : {-1.0f, kInf}) {
        expect_skipped(DSOPT_HYPER_LR, bad, true);
        expect_skipped(DSOPT_HYPER_WEIGHT_DECAY, bad, true);
    }
    for (const int index : {int(DSOPT_HYPER_BETA1), int(DSOPT_HYPER_BETA2), 9}) expect_skipped(index, 0.5f, true);
    const float lr = -1;
    dsopt_step step = trainer.arguments();
    step.lr = on_device(lr);
    must(trainer.step(step));
    EXPECT_EQ(report_of(trainer.opt()).reasons, DSOPT_SKIP_HYPER);
    EXPECT_TRUE(same(trainer.text(), before));
    expect_skipped(DSOPT_HYPER_EPS, 0x1p-100f, false);
}

// --------------------------------------------------------------------------------------------------- norms and formats
TEST(MuonNorms, ReportsNormsOfWeightsAndUpdates) {
    for (const int32_t param : {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16}) {
        std::vector<Cut> cuts = {matrix(70, 65), {{17, 48}, 17, 16}, matrix(1, 1), matrix(0, 3)};
        for (Cut &cut : cuts) cut.param = param;
        const Trainer trainer =
            muon_trainer(cuts, muon_group(DSOPT_DTYPE_BF16), optimizer_desc(0, DSOPT_OPTIMIZER_REPORT_NORMS));
        const auto weights = [&](size_t i) {
            return param == DSOPT_DTYPE_F32 ? trainer.model.params[i].floats()
                                            : exported(trainer.opt(), int64_t(i), "master");
        };
        for (uint64_t t = 1; t <= 3; ++t) {
            std::vector<std::vector<float>> before;
            for (size_t i = 0; i < cuts.size(); ++i) before.push_back(weights(i));
            trainer.train(t);
            double updates = 0;
            for (size_t i = 0; i < cuts.size(); ++i) {
                const double norm = norm_of(difference(doubles_of(weights(i)), doubles_of(before[i])));
                updates += norm * norm;
            }
            const dsopt_report report = trainer.report();
            EXPECT_EQ(report.weight_norm, std::sqrt(lanes::squares_of_list(before))); // to the bit
            EXPECT_NEAR(report.update_norm, std::sqrt(updates), 1e-5 * std::sqrt(updates));
        }
    }
}

TEST(MuonNorms, ReportsTheSameNormsBesideOtherGroups) {
    const uint32_t flag = DSOPT_OPTIMIZER_REPORT_NORMS;
    Mixed mixed(muon_group(), group_of(DSOPT_ALGORITHM_ADAMW), optimizer_desc(0, flag));
    for (uint64_t t = 1; t <= 3; ++t) {
        const auto norms = [&] {
            double squares = 0;
            for (size_t i = 0; i < 4; ++i) {
                const std::vector<float> values =
                    i == 0 && t > 1 ? exported(mixed.opt.get(), 0, "master") : mixed.model.params[i].floats();
                for (const float value : values) squares += double(value) * value;
            }
            return std::sqrt(squares);
        };
        const double before = norms();
        mixed.model.make_gradients(t);
        mixed.step();
        EXPECT_NEAR(report_of(mixed.opt.get()).weight_norm, before, 1e-9 * before);
    }
}

TEST(MuonFormats, StoreTheMomentumInSixteenBits) {
    for (const int32_t format : {DSOPT_MOMENT_BF16, DSOPT_MOMENT_BF16_RANDOM}) {
        dsopt_group group = muon_group();
        group.exp_avg_format = format;
        const std::vector<Cut> cuts = {matrix(70, 65), {{17, 48}, 17, 16}};
        const Trainer trainer = muon_trainer(cuts, group, format_desc());
        EXPECT_EQ(state_info(trainer.opt(), 0).tensor.dtype, DSOPT_DTYPE_BF16);
        int up = 0, down = 0;
        for (uint64_t t = 1; t <= 4; ++t) {
            const auto momenta = [&](int64_t i) { return f32_state(trainer.opt(), i, "momentum_buffer"); };
            const std::vector<float> before[] = {momenta(0), momenta(1)};
            trainer.train(t);
            for (size_t i = 0; i < cuts.size(); ++i) {
                const std::vector<float> now = momenta(int64_t(i));
                const auto mu = float(0.95), a = float(1 - 0.95);
                for (size_t k = 0; k < now.size(); ++k) {
                    const float m = mu * before[i][k] + a * trainer.model.grads[i][k];
                    const float nearest = rounded(m, DSOPT_DTYPE_BF16);
                    if (format == DSOPT_MOMENT_BF16) {
                        ASSERT_EQ(now[k], nearest) << k;
                    } else {
                        ASSERT_LT(std::fabs(now[k] - m), std::ldexp(1.0f, std::ilogb(m) - 7)) << k;
                    }
                    up += now[k] > m, down += now[k] < m;
                }
            }
        }
        if (format == DSOPT_MOMENT_BF16) continue;
        EXPECT_LT(std::abs(up - down), 600) << up; // of 21,000
    }
}

TEST(MuonFormats, RoundAtRandomBySeedNameStepAndElement) {
    dsopt_group group = muon_group();
    group.exp_avg_format = DSOPT_MOMENT_BF16_RANDOM;
    const auto trained = [&](uint64_t seed, const char *name) {
        Cut cut = matrix(20, 33);
        cut.name = name;
        const Trainer trainer = muon_trainer({cut}, group, format_desc(DSOPT_MASTERS_PER_TENSOR, seed));
        trainer.train(1, 3);
        return trainer.text();
    };
    EXPECT_TRUE(same(trained(5, "a"), trained(5, "a")));
    EXPECT_FALSE(same(trained(5, "a"), trained(6, "a")));
    EXPECT_FALSE(same(trained(5, "a"), trained(5, "b")));
}

TEST(MuonFormats, KeepTheMomentumOfAFlaggedParameterInF32) {
    dsopt_group group = muon_group();
    group.exp_avg_format = DSOPT_MOMENT_BF16;
    Cut flagged = matrix(20, 33);
    flagged.flags = DSOPT_PARAM_F32_MOMENTS;
    const Trainer trainer = muon_trainer({flagged}, group), plain = muon_trainer({matrix(20, 33)});
    trainer.train(1, 3);
    plain.train(1, 3);
    EXPECT_TRUE(same(trainer.text(), plain.text()));
}

TEST(MuonState, StartsAgainAfterAReset) {
    const Trainer trainer = muon_trainer({matrix(20, 33)}), fresh = muon_trainer({matrix(20, 33)});
    trainer.train(1, 3);
    trainer.model.params[0].write(fresh.model.params[0].text());
    must(dsopt_optimizer_reset(trainer.opt(), DSOPT_RESET_MOMENTS | DSOPT_RESET_COUNTERS, nullptr));
    for (const float m : trainer.state("momentum_buffer", 0)) ASSERT_EQ(m, 0);
    trainer.train(1, 2);
    fresh.train(1, 2);
    EXPECT_TRUE(same(trainer.text(), fresh.text()));
}

} // namespace muon_mixed_tests
