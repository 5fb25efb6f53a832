// SPDX-License-Identifier: Apache-2.0
// Every pair of options: dtypes, masters, formats, clipping, outputs. Each list of options is trained by
// dsopt_optimizer_step without output options, with them, and by dsopt_optimizer_apply, with the same bits. Each step is
// compared with the recurrence in double precision, from the engine's own state before the step.
#include "support/caller_memory.h"
#include "support/formats.h"
#include "support/muon.h"
#include <ostream>
#include <set>

using namespace test;

LABEL_FILE(one_thread);

namespace muon_options_tests {

constexpr int32_t kF32 = DSOPT_DTYPE_F32, kF16 = DSOPT_DTYPE_F16, kBf16 = DSOPT_DTYPE_BF16;
constexpr int32_t kF32Moments = DSOPT_MOMENT_F32, kBf16Moments = DSOPT_MOMENT_BF16,
                  kRandomMoments = DSOPT_MOMENT_BF16_RANDOM;
enum Masters { kMasters, kNoMasters, kRemainders, kRandomRounding };
enum Clip { kNoClip, kNorm, kGroupNorm, kValue };
enum Out { kParams, kOut, kOutOnly, kDelta, kZeroGrads };

struct Options {
    int32_t param, grad;
    Masters masters; // of parameters with 16 bits
    int32_t format, products;
    Clip clip;
    bool scaled;
    Out out;
    bool accumulate, norms;

    std::array<int, 10> values() const {
        return {param, grad, masters, format, products, clip, scaled, out, accumulate, norms};
    }
    bool rounds() const { return param != kF32 && (masters == kNoMasters || masters == kRandomRounding); }
    bool valid() const {
        if (masters == kNoMasters && param == kF32) return false;
        if ((masters == kRemainders || masters == kRandomRounding) && param != kBf16) return false;
        if (out == kDelta && param != kF32 && !rounds()) return false;
        return out != kZeroGrads || !accumulate; // there are no gradients to zero
    }
    friend void PrintTo(const Options &options, std::ostream *out) {
        for (const int value : options.values()) *out << value << ' ';
    }
};

const std::vector<Options> kOptions = {
    {kF32, kF32, kMasters, kBf16Moments, kF16, kNoClip, false, kOut, false, true},
    {kF32, kF16, kMasters, kF32Moments, kF16, kNoClip, false, kZeroGrads, false, false},
    {kF32, kF16, kMasters, kBf16Moments, kF16, kNorm, true, kDelta, false, false},
    {kF32, kBf16, kMasters, kBf16Moments, kBf16, kValue, true, kParams, true, true},
    {kF32, kBf16, kMasters, kRandomMoments, kF32, kGroupNorm, false, kOutOnly, true, false},
    {kF16, kF32, kNoMasters, kF32Moments, kBf16, kNoClip, false, kOutOnly, false, true},
    {kF16, kF32, kNoMasters, kRandomMoments, kF32, kNoClip, true, kDelta, true, false},
    {kF16, kF16, kMasters, kF32Moments, kF32, kValue, true, kOut, true, false},
    {kF16, kF16, kNoMasters, kF32Moments, kF16, kGroupNorm, true, kDelta, true, false},
    {kF16, kF16, kNoMasters, kRandomMoments, kF16, kNorm, false, kParams, true, false},
    {kF16, kBf16, kNoMasters, kBf16Moments, kF32, kGroupNorm, true, kZeroGrads, false, true},
    {kF16, kBf16, kNoMasters, kRandomMoments, kF16, kNorm, true, kOut, true, true},
    {kBf16, kF32, kRemainders, kRandomMoments, kF32, kNorm, false, kZeroGrads, false, true},
    {kBf16, kF32, kRemainders, kRandomMoments, kBf16, kGroupNorm, false, kOut, false, false},
    {kBf16, kF32, kRandomRounding, kF32Moments, kF32, kGroupNorm, true, kParams, false, true},
    {kBf16, kF32, kRandomRounding, kBf16Moments, kF16, kValue, false, kOutOnly, false, true},
    {kBf16, kF16, kMasters, kRandomMoments, kF16, kValue, true, kZeroGrads, false, false},
    {kBf16, kF16, kRemainders, kF32Moments, kF16, kGroupNorm, true, kParams, true, true},
    {kBf16, kF16, kRemainders, kBf16Moments, kF32, kNorm, true, kOutOnly, true, false},
    {kBf16, kF16, kRemainders, kBf16Moments, kBf16, kValue, true, kOutOnly, true, false},
    {kBf16, kF16, kRandomRounding, kF32Moments, kBf16, kNorm, true, kZeroGrads, false, false},
    {kBf16, kBf16, kNoMasters, kF32Moments, kF16, kValue, false, kDelta, false, true},
    {kBf16, kBf16, kRemainders, kBf16Moments, kF16, kNoClip, false, kParams, false, true},
    {kBf16, kBf16, kRandomRounding, kRandomMoments, kF32, kValue, false, kOut, true, false},
    {kBf16, kBf16, kRandomRounding, kRandomMoments, kBf16, kNoClip, true, kDelta, false, true},
};

LABEL(long_emulated);
LABEL(numbers_only);
TEST(MuonOptionList, HasEveryPairThatIsPossible) {
    using Pair = std::array<int, 4>; // option, value, option, value
    const auto add = [](std::set<Pair> &pairs, const Options &options) {
        const std::array<int, 10> values = options.values();
        for (int i = 0; i < 10; ++i)
            for (int k = 0; k < i; ++k) pairs.insert({i, values[size_t(i)], k, values[size_t(k)]});
    };
    std::set<Pair> listed, possible;
    for (const Options &options : kOptions) {
        EXPECT_TRUE(options.valid());
        add(listed, options);
    }
    for (int code = 0; code < 3 * 3 * 4 * 3 * 3 * 4 * 2 * 5 * 2 * 2; ++code) {
        int left = code;
        const auto next = [&](int count) {
            const int value = left % count;
            left /= count;
            return value;
        };
        constexpr int32_t formats[] = {kF32Moments, kBf16Moments, kRandomMoments};
        Options options{};
        options.param = kDtypes[next(3)];
        options.grad = kDtypes[next(3)];
        options.masters = Masters(next(4));
        options.format = formats[next(3)];
        options.products = kDtypes[next(3)];
        options.clip = Clip(next(4));
        options.scaled = next(2) != 0;
        options.out = Out(next(5));
        options.accumulate = next(2) != 0;
        options.norms = next(2) != 0;
        if (options.valid()) add(possible, options);
    }
    EXPECT_EQ(listed, possible);
}

/// One training.
class Training {
public:
    /// `plain`: new weights are in the parameters, and gradients are passed to each step. `pure`: by
    /// dsopt_optimizer_apply.
    Training(const Options &given, bool plain, bool pure) : options(given), context_(make_context()), pure_(pure) {
        if (plain) options.out = kParams;
        if (plain || pure) options.accumulate = false;
        dsopt_optimizer_desc desc = optimizer_desc(options.clip == kNorm ? 0.1 : 0);
        desc.seed = 5;
        if (options.clip == kValue) desc.max_value = 0.01;
        if (options.masters == kRemainders) desc.masters = DSOPT_MASTERS_REMAINDER;
        if (options.rounds()) desc.flags |= DSOPT_OPTIMIZER_NO_MASTER;
        if (options.masters == kRandomRounding) desc.flags |= DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
        if (options.norms) desc.flags |= DSOPT_OPTIMIZER_REPORT_NORMS;
        if (options.accumulate) desc.flags |= DSOPT_OPTIMIZER_ACCUMULATE;
        if (options.scaled) scaler_ = make_scaler(context_, 64, 0, DSOPT_SCALER_STATIC);
        desc.scaler = scaler_.get();
        opt_ = make_optimizer(context_, desc);
        group = muon_group(options.products);
        group.exp_avg_format = options.format;
        if (options.clip == kGroupNorm) group.max_norm = 0.05;
        cuts = {matrix(20, 33), {{17, 48}, 17, 16}, matrix(1, 5), matrix(0, 8)};
        for (Cut &cut : cuts) cut.param = options.param, cut.grad = options.grad;
        model = Model(cut_shapes(cuts));
        std::vector<dsopt_param> params = params_of(cuts);
        for (size_t i = 0; i < cuts.size(); ++i) {
            params[i].tensor = model.params[i].tensor();
            if (pure) params[i].tensor.data = nullptr;
        }
        must(dsopt_optimizer_add_group(opt(), &group, params.data(), int64_t(params.size())));
        if (!pure) return;
        caller_memory_ = std::make_unique<CallerMemory>(opt(), model.params);
        must(caller_memory_->init());
    }
    dsopt_optimizer *opt() const { return opt_.get(); }
    std::vector<Array> &weights() { return pure_ ? caller_memory_->model.params : model.params; }

    void step(uint64_t seed) {
        model.make_gradients(seed);
        const std::vector<Array> before = weights();
        // F32 holds every difference of weights with 16 bits.
        std::vector<Array> outs;
        for (const Array &weight : weights())
            outs.emplace_back(options.out == kDelta ? kF32 : options.param, weight.size(), 7.0f);
        const std::vector<dsopt_tensor> out = list_of(outs), grads = list_of(model.grads);
        const auto change = [&](dsopt_step &step) {
            step.report = report.data();
            if (options.out == kOut || options.out == kOutOnly || options.out == kDelta) step.out = out.data();
            if (options.out == kOutOnly) step.flags |= DSOPT_STEP_OUT_ONLY;
            if (options.out == kDelta) step.flags |= DSOPT_STEP_DELTA;
            if (options.out == kZeroGrads) step.flags |= DSOPT_STEP_ZERO_GRADS;
        };
        if (pure_) {
            ASSERT_OK(caller_memory_->apply(model.grads, change));
        } else {
            DSOPT_NEW(dsopt_step, step);
            step.grads = grads.data();
            step.count = int64_t(grads.size());
            if (options.accumulate) {
                for (const Array &gradient : model.grads)
                    for (size_t k = 0; k < gradient.size(); ++k) gradient.set(k, gradient[k] / 2);
                for (int half = 0; half < 2; ++half)
                    must(dsopt_optimizer_accumulate(opt(), grads.data(), step.count, nullptr));
                step.grads = nullptr;
                step.flags = DSOPT_STEP_ACCUMULATED;
            }
            change(step);
            ASSERT_OK(dsopt_optimizer_step(opt(), &step));
        }
        check_outputs(before, outs);
    }

    /// Returns everything that must be the same for all trainings.
    Snapshot snapshot() const {
        Snapshot all;
        if (pure_) {
            all = caller_memory_->snapshot();
        } else {
            for (size_t i = 0; i < model.params.size(); ++i) all["param " + std::to_string(i)] = model.params[i].text();
            const std::vector<dsopt_state_info> list = state_of(opt());
            for (size_t i = 0; i < list.size(); ++i) all[key_of(list[i])] = exported_text(opt(), int64_t(i));
        }
        std::erase_if(all, [](const auto &entry) { return entry.first.rfind("grad_accum", 0) == 0; });
        return all;
    }
    bool intact() const { return model.intact() && (!pure_ || caller_memory_->intact()); }

    /// Returns masters, or weights if there are none.
    Doubles exact_weights(size_t i) {
        if (options.param == kF32 || options.rounds()) return doubles_of(weights()[i].floats());
        return doubles_of(f32_state(opt(), int64_t(i), options.masters == kRemainders ? "remainder" : "master"));
    }

    Options options;
    std::vector<Cut> cuts;
    dsopt_group group;
    Model model;
    Shared<float> report = Shared<float>(DSOPT_REPORT_FLOATS);

private:
    /// Checks what the step wrote, and writes new weights to the parameters if it did not.
    void check_outputs(const std::vector<Array> &before, const std::vector<Array> &outs) {
        for (size_t i = 0; i < outs.size(); ++i) {
            const Array &weight = weights()[i];
            const bool keeps = options.out == kOutOnly || options.out == kDelta;
            EXPECT_TRUE(options.out != kOut || same(outs[i].text(), weight.text())) << i;
            EXPECT_TRUE(!keeps || same(weight.text(), before[i].text())) << i;
            if (options.out == kOutOnly) weight.write(outs[i].text());
            if (options.out == kDelta)
                for (size_t k = 0; k < weight.size(); ++k) weight.set(k, weight[k] + outs[i][k]);
            const std::string zeros(model.grads[i].bytes(), '\0');
            EXPECT_TRUE(options.out != kZeroGrads || model.grads[i].text() == zeros) << i;
            EXPECT_TRUE(outs[i].intact());
        }
    }
    Context context_;
    Scaler scaler_;
    Optimizer opt_;
    std::unique_ptr<CallerMemory> caller_memory_;
    bool pure_;
};

double rounding_of(const Options &options) {
    if (!options.rounds()) return 3 * 0x1p-24;
    if (options.masters == kRandomRounding) return 0x1p-7;
    return options.param == kF16 ? 0x1p-11 : 0x1p-8;
}

class MuonOptions : public testing::TestWithParam<Options> {};
INSTANTIATE_TEST_SUITE_P(, MuonOptions, testing::ValuesIn(kOptions),
                         [](const auto &info) { return std::to_string(info.index); });

TEST_P(MuonOptions, MatchAPlainStepBitwise) {
    Training plain(GetParam(), true, false), with(GetParam(), false, false), pure(GetParam(), false, true);
    for (uint64_t t = 1; t <= 4; ++t) {
        plain.step(t);
        with.step(t);
        pure.step(t);
        // The sum of a weight and its delta is rounded.
        if (with.options.out == kDelta)
            for (size_t i = 0; i < plain.cuts.size(); ++i) {
                const double size = norm_of(doubles_of(plain.weights()[i].floats()));
                for (Training *run : {&with, &pure}) {
                    EXPECT_LE(norm_of(difference(doubles_of(run->weights()[i].floats()),
                                                 doubles_of(plain.weights()[i].floats()))),
                              2 * rounding_of(plain.options) * size);
                    run->weights()[i].write(plain.weights()[i].text());
                }
            }
        ASSERT_TRUE(same(with.snapshot(), plain.snapshot())) << t;
        ASSERT_TRUE(same(pure.snapshot(), plain.snapshot())) << t;
        ASSERT_TRUE(same_bits(with.report, plain.report)) << t;
        ASSERT_TRUE(same_bits(pure.report, plain.report)) << t;
    }
    EXPECT_TRUE(plain.intact() && with.intact() && pure.intact());
}

TEST(MuonDelta, IsTheDifferenceOfWeights) {
    const std::vector<Cut> cuts = {matrix(20, 33), {{17, 48}, 17, 16}};
    const Trainer plain = muon_trainer(cuts), with = muon_trainer(cuts);
    for (uint64_t t = 1; t <= 3; ++t) {
        plain.train(t);
        with.model.make_gradients(t);
        std::vector<Array> outs;
        for (const Cut &cut : cuts) outs.emplace_back(kF32, size_t(cut.numel()), 7.0f);
        const std::vector<dsopt_tensor> out = list_of(outs);
        dsopt_step step = with.arguments();
        step.out = out.data();
        step.flags = DSOPT_STEP_DELTA;
        must(with.step(step));
        for (size_t i = 0; i < cuts.size(); ++i)
            for (size_t k = 0; k < outs[i].size(); ++k) {
                ASSERT_EQ(outs[i][k], plain.model.params[i][k] - with.model.params[i][k]) << k;
                with.model.params[i].set(k, plain.model.params[i][k]);
            }
    }
}

TEST_P(MuonOptions, MatchTheExactStep) {
    Training run(GetParam(), true, false);
    std::vector<int32_t> counters(run.cuts.size());
    for (uint64_t t = 1; t <= 4; ++t) {
        std::vector<MuonReference> references;
        for (size_t i = 0; i < run.cuts.size(); ++i)
            references.push_back({run.group, run.cuts[i], run.exact_weights(i),
                                  doubles_of(f32_state(run.opt(), int64_t(i), "momentum_buffer")), int64_t(t - 1)});
        run.step(t);
        const double divisor = run.report[DSOPT_REPORT_DIVISOR], limit = run.options.clip == kValue ? 0.01 : INFINITY;
        const bool clips = run.options.clip == kNorm || run.options.clip == kGroupNorm;
        EXPECT_TRUE(!clips || divisor > (run.options.scaled ? 65 : 1.1)) << divisor;
        double weights = 0, updates = 0, roundings = 0;
        for (size_t i = 0; i < run.cuts.size(); ++i) {
            MuonReference &reference = references[i];
            const Doubles before = reference.p, now = run.exact_weights(i);
            Doubles g = doubles_of(run.model.grads[i].floats());
            for (double &value : g) value = std::max(std::min(value / divisor, limit), -limit);
            reference.step(g);
            const double rounding = rounding_of(run.options) * norm_of(before) + 0x1p-24;
            ASSERT_LE(norm_of(difference(now, reference.p)),
                      ns_bound(run.options.products) * reference.length + rounding)
                << "step " << t << ", parameter " << i;
            const Doubles m = doubles_of(f32_state(run.opt(), int64_t(i), "momentum_buffer"));
            const double unit = run.options.format == kF32Moments    ? 4 * 0x1p-24
                                : run.options.format == kBf16Moments ? 0x1p-8
                                                                     : 0x1p-7;
            for (size_t k = 0; k < m.size(); ++k)
                ASSERT_NEAR(m[k], reference.m[k], unit * 1.01 * (std::fabs(reference.m[k]) + std::fabs(g[k])) + 1e-37);
            weights += norm_of(before) * norm_of(before);
            updates += norm_of(difference(now, before)) * norm_of(difference(now, before));
            roundings += rounding * rounding;
        }
        if (!run.options.norms) continue;
        EXPECT_NEAR(run.report[DSOPT_REPORT_WEIGHT_NORM], std::sqrt(weights), 1e-6 * std::sqrt(weights));
        EXPECT_NEAR(run.report[DSOPT_REPORT_UPDATE_NORM], std::sqrt(updates),
                    1e-6 * std::sqrt(updates) + std::sqrt(roundings));
    }
}

} // namespace muon_options_tests
