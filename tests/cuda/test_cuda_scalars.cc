// SPDX-License-Identifier: Apache-2.0
// Values in device memory that the host would have refused: the step is skipped as on the CPU, with equal bits and the
// same reasons, and the scaler recovers identically. Also the functions on arrays.
#include "side.h"

namespace cuda_test {

namespace {

/// A few numbers on the host or on the device.
class Number {
public:
    Number(bool device, const std::vector<float> &values) : bytes_(device, values.size() * 4, 0) {
        if (values.empty()) return;
        std::vector<char> raw(values.size() * 4);
        std::memcpy(raw.data(), values.data(), raw.size());
        bytes_.set(raw);
    }
    float *floats() const { return reinterpret_cast<float *>(bytes_.data()); }
    int32_t *words() const { return reinterpret_cast<int32_t *>(bytes_.data()); }
    std::vector<char> get() const { return bytes_.get(); }

private:
    Bytes bytes_;
};

struct Case {
    const char *name;
    std::vector<float> grad_scale, lr, hyper, grad_norms, skip, loss_scale; // empty: not passed
    int32_t reasons;
};
std::vector<float> rows(int row, int place, float value) {
    std::vector<float> all(2 * DSOPT_HYPER_FLOATS, NAN);
    all[size_t(row * DSOPT_HYPER_FLOATS + place)] = value;
    return all;
}
std::vector<Case> cases(bool scaler) {
    std::vector<Case> list{
        {"scale 0", {0}, {}, {}, {}, {}, {}, DSOPT_SKIP_SCALE},
        {"scale nan", {NAN}, {}, {}, {}, {}, {}, DSOPT_SKIP_SCALE},
        {"scale negative", {-2}, {}, {}, {}, {}, {}, DSOPT_SKIP_SCALE},
        {"scale inf", {INFINITY}, {}, {}, {}, {}, {}, DSOPT_SKIP_SCALE},
        {"scale denormal", {1e-42f}, {}, {}, {}, {}, {}, DSOPT_SKIP_SCALE},
        {"lr nan", {}, {1, NAN}, {}, {}, {}, {}, DSOPT_SKIP_HYPER},
        {"lr negative", {}, {-1, 1}, {}, {}, {}, {}, DSOPT_SKIP_HYPER},
        {"beta", {}, {}, rows(1, DSOPT_HYPER_BETA2, 1), {}, {}, {}, DSOPT_SKIP_HYPER},
        {"last place", {}, {}, rows(0, 7, 1), {}, {}, {}, DSOPT_SKIP_HYPER},
        {"skip", {}, {}, {}, {}, {1}, {}, DSOPT_SKIP_CALLER},
        {"two", {0}, {1, -1}, {}, {}, {1}, {}, DSOPT_SKIP_SCALE | DSOPT_SKIP_HYPER | DSOPT_SKIP_CALLER}};
    if (!scaler) return list; // without a scaler the policy accepts norms
    list.push_back({"norm", {}, {}, {}, {1, -1}, {}, {}, DSOPT_SKIP_NORM});
    for (const float bad : {0.0f, -8.0f, NAN, INFINITY, 1e-42f})
        list.push_back({"loss scale", {}, {}, {}, {}, {}, {bad}, DSOPT_SKIP_SCALE});
    list.push_back({"both", {3e38f}, {}, {}, {}, {}, {3e38f}, DSOPT_SKIP_SCALE});
    return list;
}

void expect_skipped_alike(const Setting &setting) {
    for (const Case &c : cases(setting.scaler)) {
        SCOPED_TRACE(c.name);
        Side host(false, setting), device(true, setting);
        for (int t = 0; t < 4; ++t) {
            for (Side *side : {&host, &device}) {
                const bool there = side == &device;
                side->fill_gradients(t);
                if (t % 2 == 0) {
                    ASSERT_OK(side->step());
                    continue;
                }
                const Number grad_scale(there, c.grad_scale), lr(there, c.lr), hyper(there, c.hyper),
                    norms(there, c.grad_norms), skip(there, c.skip), report(there, std::vector<float>(16));
                if (!c.loss_scale.empty())
                    memory_of(there).write(const_cast<float *>(dsopt_scaler_device_scale(side->scaler)),
                                           c.loss_scale.data(), sizeof(float));
                dsopt_step step = side->arguments();
                if (!c.grad_scale.empty()) step.grad_scale = grad_scale.floats();
                if (!c.lr.empty()) step.lr = lr.floats();
                if (!c.hyper.empty()) step.hyper = hyper.floats();
                if (!c.grad_norms.empty()) step.grad_norms = norms.floats();
                if (!c.skip.empty()) step.skip = skip.words();
                step.report = report.floats();
                ASSERT_OK(dsopt_optimizer_step(side->optimizer, &step));
                DSOPT_NEW(dsopt_report, said);
                ASSERT_OK(dsopt_optimizer_report(side->optimizer, &said));
                EXPECT_EQ(said.last_skipped, 1) << there;
                EXPECT_EQ(said.reasons, c.reasons) << there;
                float places[16];
                std::memcpy(places, report.get().data(), sizeof places);
                EXPECT_EQ(places[DSOPT_REPORT_SKIPPED], 1) << there;
                EXPECT_EQ(places[DSOPT_REPORT_REASONS], float(c.reasons)) << there;
                EXPECT_TRUE(places[DSOPT_REPORT_SCALE_NEXT] > 0 && std::isfinite(places[DSOPT_REPORT_SCALE_NEXT]));
            }
            auto a = host.everything(), b = device.everything();
            if (!c.loss_scale.empty()) a.pop_back(), b.pop_back(); // scale_used, which is NaN
            ASSERT_TRUE(same(a, b)) << "step " << t;
        }
    }
}

} // namespace

TEST_F(Cuda, SkipsForSpoiltNumbersLikeTheCpu) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ONEBIT_ADAM})
        for (const int mode : {0, 1, 2, 3, 4}) {
            Setting s;
            s.sizes = {5, 4097, 33, 100};
            s.algorithm = algorithm;
            s.scaler = mode != 1;
            s.desc.nonfinite = mode == 1 ? DSOPT_NONFINITE_APPLY : DSOPT_NONFINITE_AUTO;
            s.desc.max_norm = mode == 0 ? 1 : 0;
            s.desc.compat = mode >= 2 ? DSOPT_COMPAT_DEEPSPEED : DSOPT_COMPAT_NONE;
            s.param = s.grad = mode >= 3 ? DSOPT_DTYPE_F16 : DSOPT_DTYPE_F32;
            s.desc.masters = mode == 4 ? DSOPT_MASTERS_FLAT : DSOPT_MASTERS_PER_TENSOR;
            SCOPED_TRACE("algorithm " + std::to_string(algorithm) + " mode " + std::to_string(mode));
            expect_skipped_alike(s);
        }
}

TEST_F(Cuda, MovesAndRecoversAScalerOnArraysLikeTheCpu) {
    const double spoilt[][2] = {{0, 0}, {NAN, 0}, {INFINITY, 0}, {-4, 0}, {64, NAN}};
    for (size_t i = 0; i < std::size(spoilt); ++i) {
        std::vector<char> results[2];
        for (const bool there : {false, true}) {
            DSOPT_NEW(dsopt_context_desc, where);
            where.backend = there ? DSOPT_BACKEND_CUDA : DSOPT_BACKEND_CPU;
            dsopt_context *context = nullptr;
            dsopt_scaler *scaler = nullptr;
            ASSERT_OK(dsopt_context_create(&where, &context));
            ASSERT_OK(dsopt_scaler_create(context, nullptr, &scaler));
            {
                std::vector<float> words(12), scale(1);
                std::memcpy(words.data(), spoilt[i], 16);
                const int32_t overridden = i == 4;
                std::memcpy(&words[8], &overridden, 4);
                const Number state(there, words), at(there, scale), overflow(there, {1}), none(there, {0});
                const dsopt_tensor list[2] = {{at.floats(), 1, DSOPT_DTYPE_F32, 0},
                                              {state.words(), 12, DSOPT_DTYPE_I32, 0}};
                for (int t = 0; t < 3; ++t) {
                    ASSERT_OK(
                        dsopt_scaler_update_arrays(scaler, list, 2, t == 2 ? none.words() : overflow.words(), nullptr));
                    for (const auto &part : {state.get(), at.get()})
                        results[there].insert(results[there].end(), part.begin(), part.end());
                }
                float now = 0;
                std::memcpy(&now, at.get().data(), 4);
                EXPECT_TRUE(now > 0 && std::isfinite(now)) << i;
                ASSERT_OK(dsopt_scaler_init_state(scaler, list, 2, nullptr));
                std::memcpy(&now, at.get().data(), 4);
                EXPECT_EQ(now, 65536);
            }
            dsopt_scaler_destroy(scaler);
            dsopt_context_destroy(context);
        }
        EXPECT_TRUE(results[0] == results[1]) << i;
    }
}

} // namespace cuda_test
