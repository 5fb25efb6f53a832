// SPDX-License-Identifier: Apache-2.0
// Moments and masters in fewer bytes: formats, remainders, their state tensors, conversion and refusals.
#include "support.h"
#include <cmath>
#include <cstring>

namespace low_precision_tests {

constexpr std::size_t kNumels[] = {7, 700}; // 1 and 3 blocks
constexpr std::uint32_t kSteps = 20;

float to_f32(dsopt::bf16 value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
    float made;
    std::memcpy(&made, &bits, sizeof made);
    return made;
}
std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
/// Level of a code, without its scale.
float to_f32(dsopt::f8_e4m3 code) {
    const int bits = static_cast<int>(code), exponent = bits >> 3 & 15, fraction = bits & 7;
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                          : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
    return bits & 0x80 ? -magnitude : magnitude;
}

/// Two BF16 parameters with the numbers of support.h, identical in each object.
struct Model {
    std::vector<dsopt::bf16> w[2];
    std::vector<float> g[2];
    std::vector<dsopt::param> params;
    std::vector<dsopt::tensor> weights, grads;
    Model() {
        for (std::uint32_t i = 0; i < 2; ++i) {
            for (const float value : values(kNumels[i], 10 + i)) w[i].push_back(dsopt::bf16(bits_of(value) >> 16));
            g[i] = values(kNumels[i], 20 + i);
            weights.push_back(dsopt::view(w[i]));
            grads.push_back(dsopt::view(g[i]));
            dsopt::param param;
            param.tensor = weights[i];
            param.name = i == 0 ? "a" : "b";
            params.push_back(param);
        }
    }
    void train(dsopt::optimizer &opt, std::uint32_t steps = kSteps) {
        for (std::uint32_t s = 0; s < steps; ++s) {
            next_gradients(s);
            opt.step(grads);
        }
    }
    void next_gradients(std::uint32_t step) {
        for (std::uint32_t i = 0; i < 2; ++i) {
            const std::vector<float> next = values(kNumels[i], 1000 * step + i);
            std::copy(next.begin(), next.end(), g[i].begin());
        }
    }
};

dsopt::adamw rule(dsopt::moment exp_avg = dsopt::moment::f32, dsopt::moment exp_avg_sq = dsopt::moment::f32) {
    dsopt::adamw group;
    group.lr = 0.01;
    group.weight_decay = 0.1;
    group.exp_avg_format = exp_avg;
    group.exp_avg_sq_format = exp_avg_sq;
    return group;
}
dsopt::optimizer_options remainders(std::uint64_t seed = 7) {
    dsopt::optimizer_options options;
    options.masters = dsopt::masters::remainder;
    options.seed = seed;
    return options;
}
/// E4M3, BF16_RANDOM and remainders: the recommended formats.
dsopt::optimizer low_precision(const dsopt::context &ctx, const Model &model, std::uint64_t seed = 7) {
    dsopt::optimizer opt(ctx, remainders(seed));
    opt.add_group(rule(dsopt::moment::e4m3, dsopt::moment::bf16_random), model.params);
    return opt;
}

/// Index of the entry of this name of a parameter.
std::int64_t find(const dsopt::optimizer &opt, const char *name, std::int64_t param) {
    for (std::int64_t i = 0; i < opt.state_count(); ++i) {
        const dsopt::state_entry entry = opt.state(i);
        if (std::strcmp(entry.name(), name) == 0 && entry.param() == param) return i;
    }
    throw std::out_of_range(name);
}
template <class T = float> std::vector<T> stored(dsopt::optimizer &opt, const char *name, std::int64_t param) {
    const std::int64_t index = find(opt, name, param);
    std::vector<T> copy(std::size_t(opt.state(index).numel()));
    opt.export_state(index, copy);
    return copy;
}
std::vector<float> as_f32(dsopt::optimizer &opt, const char *name, std::int64_t param) {
    const std::int64_t index = find(opt, name, param);
    std::vector<float> copy(std::size_t(opt.state(index).numel()));
    opt.export_f32(index, copy);
    return copy;
}
/// Root of the mean squared difference, relative to that of `exact`.
double difference(const std::vector<float> &values, const std::vector<float> &exact) {
    double error = 0, total = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
        error += std::pow(double(values[i]) - double(exact[i]), 2);
        total += std::pow(double(exact[i]), 2);
    }
    return std::sqrt(error / total);
}

TEST(CppLowPrecision, ExportF32DecodesWhatIsStored) {
    Model model;
    dsopt::context ctx;
    dsopt::optimizer opt = low_precision(ctx, model);
    model.train(opt);
    const std::vector<dsopt::f8_e4m3> codes = stored<dsopt::f8_e4m3>(opt, "exp_avg", 1);
    const std::vector<float> scales = stored(opt, "exp_avg_scale", 1), exp_avg = as_f32(opt, "exp_avg", 1);
    for (std::size_t i = 0; i < codes.size(); ++i) EXPECT_EQ(exp_avg[i], to_f32(codes[i]) * scales[i / 256]) << i;
    const std::vector<dsopt::bf16> squares = stored<dsopt::bf16>(opt, "exp_avg_sq", 1);
    const std::vector<float> exp_avg_sq = as_f32(opt, "exp_avg_sq", 1);
    for (std::size_t i = 0; i < squares.size(); ++i) EXPECT_EQ(exp_avg_sq[i], to_f32(squares[i])) << i;
    EXPECT_EQ(as_f32(opt, "exp_avg_scale", 1), scales); // F32 entries as they are
}

TEST(CppLowPrecision, ImportF32RestoresMomentsAndMasters) {
    Model first, second;
    dsopt::context ctx;
    dsopt::optimizer opt = low_precision(ctx, first), other = low_precision(ctx, second);
    first.train(opt);
    for (const char *const name : {"remainder", "exp_avg", "exp_avg_sq"}) {
        for (std::int64_t p = 0; p < 2; ++p) other.import_f32(find(other, name, p), as_f32(opt, name, p));
    }
    std::int32_t steps[2] = {};
    opt.export_state(opt.state_count() - 1, steps);
    other.import_state(other.state_count() - 1, steps);
    for (int p = 0; p < 2; ++p) EXPECT_EQ(second.w[p], first.w[p]);
    EXPECT_EQ(stored<dsopt::f8_e4m3>(other, "exp_avg", 1), stored<dsopt::f8_e4m3>(opt, "exp_avg", 1));
    first.train(opt, 1);
    second.train(other, 1);
    for (int p = 0; p < 2; ++p) EXPECT_EQ(second.w[p], first.w[p]);
    EXPECT_EQ(as_f32(other, "remainder", 1), as_f32(opt, "remainder", 1));
}

TEST(CppLowPrecision, StateListHasDtypesBlocksAndDims) {
    Model model;
    dsopt::context ctx;
    model.params[1].dims = {7, 100};
    const dsopt::optimizer opt = low_precision(ctx, model);
    struct Entry {
        const char *name;
        std::int32_t dtype, block;
        std::vector<std::int64_t> dims;
    };
    const Entry expected[] = {{"remainder", DSOPT_DTYPE_I16, 1, {7, 100}},
                              {"exp_avg", DSOPT_DTYPE_F8_E4M3, 1, {7, 100}},
                              {"exp_avg_scale", DSOPT_DTYPE_F32, 256, {3}},
                              {"exp_avg_sq", DSOPT_DTYPE_BF16, 1, {7, 100}}};
    const std::vector<dsopt::state_entry> list = opt.state_list();
    ASSERT_EQ(list.size(), 9u);
    for (std::size_t i = 0; i < 4; ++i) {
        EXPECT_STREQ(list[4 + i].name(), expected[i].name);
        EXPECT_EQ(list[4 + i].dtype(), expected[i].dtype) << expected[i].name;
        EXPECT_EQ(list[4 + i].block(), expected[i].block) << expected[i].name;
        EXPECT_EQ(list[4 + i].dims(), expected[i].dims) << expected[i].name;
    }
    EXPECT_STREQ(list[8].name(), "step");
    EXPECT_EQ(list[8].block(), 0);

    dsopt::optimizer q8(ctx);
    q8.add_group(rule(dsopt::moment::q8, dsopt::moment::q8), model.params);
    EXPECT_EQ(q8.state(find(q8, "exp_avg", 0)).dtype(), DSOPT_DTYPE_U8);
    EXPECT_EQ(q8.state(find(q8, "exp_avg_sq_scale", 0)).block(), 256);
}

TEST(CppLowPrecision, KeepsF32MomentsOfFlaggedParameters) {
    Model model;
    dsopt::context ctx;
    model.params[0].f32_moments = true;
    dsopt::optimizer opt = low_precision(ctx, model);
    EXPECT_EQ(opt.state(find(opt, "exp_avg", 0)).dtype(), DSOPT_DTYPE_F32);
    EXPECT_EQ(opt.state(find(opt, "exp_avg_sq", 0)).dtype(), DSOPT_DTYPE_F32);
    EXPECT_EQ(opt.state(find(opt, "exp_avg", 1)).dtype(), DSOPT_DTYPE_F8_E4M3);
    EXPECT_THROW(find(opt, "exp_avg_scale", 0), std::out_of_range);
}

TEST(CppLowPrecision, SeedDeterminesRandomRounding) {
    Model models[3];
    dsopt::context ctx;
    std::vector<dsopt::bf16> squares[3];
    for (int i = 0; i < 3; ++i) {
        dsopt::optimizer opt = low_precision(ctx, models[i], i == 2 ? 8 : 7);
        models[i].train(opt, 3);
        squares[i] = stored<dsopt::bf16>(opt, "exp_avg_sq", 1);
    }
    EXPECT_EQ(squares[0], squares[1]);
    EXPECT_NE(squares[0], squares[2]);
}

TEST(CppLowPrecision, ApplyGivesSameBitsAsStep) {
    Model stepped, applied;
    dsopt::context ctx;
    dsopt::optimizer opt = low_precision(ctx, stepped);
    std::vector<std::vector<std::int16_t>> i16(2);
    std::vector<std::vector<dsopt::f8_e4m3>> f8(2);
    std::vector<std::vector<float>> scales(2);
    std::vector<std::vector<dsopt::bf16>> bf16(2);
    std::vector<dsopt::tensor> state;
    for (std::size_t p = 0; p < 2; ++p) {
        const std::size_t numel = kNumels[p];
        i16[p].resize(numel), f8[p].resize(numel), scales[p].resize((numel + 255) / 256), bf16[p].resize(numel);
        for (const dsopt::tensor &tensor :
             {dsopt::view(i16[p]), dsopt::view(f8[p]), dsopt::view(scales[p]), dsopt::view(bf16[p])})
            state.push_back(tensor);
    }
    std::int32_t steps[2];
    state.push_back(dsopt::view(steps));
    opt.init_state(applied.weights, state);
    std::vector<std::byte> workspace(opt.workspace());
    // New weights are written to `out`, and with the new remainder are the new master.
    std::vector<dsopt::bf16> out[] = {applied.w[0], applied.w[1]};
    const dsopt::tensor outs[] = {dsopt::view(out[0]), dsopt::view(out[1])};
    dsopt::step_options options;
    options.params = applied.weights;
    options.state = state;
    options.workspace = workspace;
    options.out = outs;
    options.out_only = true;
    for (std::uint32_t s = 0; s < 3; ++s) {
        applied.next_gradients(s);
        opt.apply(applied.grads, options);
        for (std::size_t p = 0; p < 2; ++p) std::copy(out[p].begin(), out[p].end(), applied.w[p].begin());
    }
    stepped.train(opt, 3);
    for (std::size_t p = 0; p < 2; ++p) {
        EXPECT_EQ(applied.w[p], stepped.w[p]);
        EXPECT_EQ(i16[p], stored<std::int16_t>(opt, "remainder", std::int64_t(p)));
        EXPECT_EQ(f8[p], stored<dsopt::f8_e4m3>(opt, "exp_avg", std::int64_t(p)));
        EXPECT_EQ(scales[p], stored(opt, "exp_avg_scale", std::int64_t(p)));
        EXPECT_EQ(bf16[p], stored<dsopt::bf16>(opt, "exp_avg_sq", std::int64_t(p)));
    }
}

TEST(CppLowPrecision, EveryAlgorithmTrainsWithItsFormats) {
    dsopt::context ctx;
    const auto moved = [&](const auto &group, const char *moment, std::int32_t dtype) {
        Model model;
        const Model before;
        dsopt::optimizer opt(ctx, remainders());
        opt.add_group(group, model.params);
        model.train(opt, 2);
        EXPECT_EQ(opt.state(find(opt, moment, 1)).dtype(), dtype) << moment;
        EXPECT_NE(model.w[1], before.w[1]) << moment;
    };
    dsopt::adam adam;
    adam.exp_avg_format = dsopt::moment::bf16;
    moved(adam, "exp_avg", DSOPT_DTYPE_BF16);
    dsopt::adam_legacy legacy;
    legacy.exp_avg_sq_format = dsopt::moment::bf16_random;
    moved(legacy, "exp_avg_sq", DSOPT_DTYPE_BF16);
    dsopt::lamb lamb;
    lamb.exp_avg_sq_format = dsopt::moment::q8;
    moved(lamb, "exp_avg_sq", DSOPT_DTYPE_U8);
    dsopt::sgd sgd;
    sgd.lr = 0.1, sgd.momentum = 0.9, sgd.exp_avg_format = dsopt::moment::e4m3;
    moved(sgd, "momentum_buffer", DSOPT_DTYPE_F8_E4M3);
    dsopt::lion lion;
    lion.exp_avg_format = dsopt::moment::q8;
    moved(lion, "exp_avg", DSOPT_DTYPE_U8);
    dsopt::adagrad adagrad;
    adagrad.exp_avg_sq_format = dsopt::moment::bf16_random;
    moved(adagrad, "sum", DSOPT_DTYPE_BF16);
}

/// A checkpoint in memory.
struct Memory {
    std::vector<char> bytes;
    void write(const void *data, std::size_t size) {
        bytes.insert(bytes.end(), static_cast<const char *>(data), static_cast<const char *>(data) + size);
    }
    std::uint64_t size() const { return bytes.size(); }
    void read(std::uint64_t offset, void *data, std::size_t size) {
        if (size != 0) std::memcpy(data, bytes.data() + offset, size);
    }
};

TEST(CppLowPrecision, LoadConvertsMomentsOnlyIfAsked) {
    Model exact, low;
    dsopt::context ctx;
    dsopt::optimizer reference(ctx), opt = low_precision(ctx, low);
    reference.add_group(rule(), exact.params);
    exact.train(reference);
    Memory memory;
    reference.save_to(memory);
    const Model before;
    EXPECT_REFUSED(opt.load_from(memory), dsopt::checkpoint_error, "a.exp_avg");
    EXPECT_EQ(low.w[1], before.w[1]);
    dsopt::load_options options;
    options.convert = true;
    opt.load_from(memory, options);
    EXPECT_EQ(as_f32(opt, "remainder", 1), as_f32(reference, "master", 1)); // exact, like the parameters
    EXPECT_LT(difference(as_f32(opt, "exp_avg", 1), as_f32(reference, "exp_avg", 1)), 0.05);
    EXPECT_NE(as_f32(opt, "exp_avg", 1), as_f32(reference, "exp_avg", 1));

    // And back: fp32 holds every level.
    Memory back;
    opt.save_to(back);
    reference.load_from(back, options);
    EXPECT_EQ(as_f32(reference, "exp_avg", 1), as_f32(opt, "exp_avg", 1));
    EXPECT_EQ(as_f32(reference, "master", 1), as_f32(opt, "remainder", 1));
}

TEST(CppLowPrecision, RefusesFormatsThatCannotBe) {
    Model model;
    dsopt::context ctx;
    const auto refused = [&](const dsopt_group &group, const char *words, const dsopt::optimizer_options &options) {
        dsopt::optimizer opt(ctx, options);
        EXPECT_REFUSED(opt.add_group(group, model.params), dsopt::unsupported_error, words);
        EXPECT_EQ(opt.group_count(), 0);
    };
    refused(rule(dsopt::moment::f32, dsopt::moment::e4m3), "exp_avg_sq_format is E4M3", {});
    refused(rule(dsopt::moment::f32, dsopt::moment::bf16), "exp_avg_sq_format is BF16", {});
    dsopt::adagrad adagrad;
    adagrad.exp_avg_sq_format = dsopt::moment::q8;
    refused(adagrad, "exp_avg_sq_format is Q8", {});
    dsopt::sgd sgd;
    sgd.exp_avg_format = dsopt::moment::e4m3;
    refused(sgd, "exp_avg_format has no effect in sgd without momentum", {});
    dsopt::optimizer_options options;
    options.masters = dsopt::masters::flat;
    refused(rule(dsopt::moment::e4m3), "MASTERS_FLAT", options);
    options = {};
    options.compat = dsopt::compat::deepspeed;
    refused(rule(dsopt::moment::e4m3), "standard mode", options);
    refused(dsopt::onebit_adam{}, "REMAINDER", remainders());
    dsopt::optimizer opt(ctx);
    EXPECT_REFUSED(opt.add_group(rule(static_cast<dsopt::moment>(5)), {}), dsopt::argument_error, "exp_avg_format");
}

TEST(CppLowPrecision, RefusesParametersAndOptionsThatCannotBe) {
    Model model;
    dsopt::context ctx;
    dsopt::optimizer_options options = remainders();
    options.no_master = true;
    EXPECT_REFUSED(dsopt::optimizer(ctx, options), dsopt::unsupported_error, "NO_MASTER");
    options = remainders();
    options.compat = dsopt::compat::deepspeed;
    EXPECT_REFUSED(dsopt::optimizer(ctx, options), dsopt::unsupported_error, "REMAINDER");

    const dsopt::adamw e4m3 = rule(dsopt::moment::e4m3);
    dsopt::optimizer opt(ctx, remainders());
    std::vector<dsopt::f16> half(3);
    EXPECT_REFUSED(opt.add_group(rule(), {{dsopt::view(half), "h"}}), dsopt::unsupported_error, "'h' is F16");
    model.params[0].f32_moments = true;
    EXPECT_REFUSED(opt.add_group(rule(), model.params), dsopt::unsupported_error, "F32_MOMENTS of parameter 'a'");
    model.params[0].offset = 256; // nothing of it is rounded at random or has scales
    EXPECT_REFUSED(opt.add_group(e4m3, model.params), dsopt::unsupported_error, "'a' has offset 256");
    model.params[0].f32_moments = false;
    model.params[0].offset = 100;
    EXPECT_REFUSED(opt.add_group(e4m3, model.params), dsopt::argument_error, "'a' has offset 100");
    model.params[0].offset = 256;
    opt.add_group(e4m3, model.params);

    std::vector<dsopt::f8_e4m3> codes(kNumels[0]);
    const dsopt::tensor grads[] = {dsopt::view(codes), model.grads[1]};
    EXPECT_REFUSED(opt.step(grads), dsopt::argument_error, "F8_E4M3"); // for state tensors only
    std::vector<float> wide[] = {std::vector<float>(kNumels[0]), std::vector<float>(kNumels[1])};
    const dsopt::tensor outs[] = {dsopt::view(wide[0]), dsopt::view(wide[1])};
    dsopt::step_options step;
    step.out = outs;
    step.out_only = true;
    EXPECT_REFUSED(opt.step(model.grads, step), dsopt::argument_error, "must be BF16");
}

TEST(CppLowPrecision, RefusesWrongConversions) {
    Model model;
    dsopt::context ctx;
    dsopt::optimizer opt = low_precision(ctx, model);
    model.train(opt, 1);
    std::vector<float> six(6), two(2);
    EXPECT_REFUSED(opt.export_f32(find(opt, "exp_avg", 0), six), dsopt::argument_error, "7 elements, the buffer 6");
    EXPECT_REFUSED(opt.import_f32(find(opt, "exp_avg", 0), six), dsopt::argument_error, "7 elements, the buffer 6");
    EXPECT_REFUSED(opt.export_f32(opt.state_count() - 1, two), dsopt::argument_error, "integers");
    EXPECT_REFUSED(opt.export_f32(opt.state_count(), two), dsopt::argument_error, "index");
    for (dsopt::tensor &weights : model.weights) weights.data = nullptr;
    opt.bind_params(model.weights);
    std::vector<float> seven(7);
    EXPECT_REFUSED(opt.export_f32(find(opt, "remainder", 0), seven), dsopt::state_error, "'a' has no memory");
    EXPECT_REFUSED(opt.import_f32(find(opt, "remainder", 0), seven), dsopt::state_error, "'a' has no memory");
    opt.export_f32(find(opt, "exp_avg", 0), seven); // needs no parameter
}

} // namespace low_precision_tests
