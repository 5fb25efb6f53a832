// SPDX-License-Identifier: Apache-2.0
// Low-precision state has the same bits for any instruction set, number of threads, alignment, order of parameters and
// partition into slices, in dsopt_optimizer_step and _apply.
#include "support/caller_memory.h"
#include "support/formats.h"

using namespace test;

LABEL_FILE(one_thread);

namespace formats_bits_tests {

class FormatBits : public testing::TestWithParam<FormatCase> {};
INSTANTIATE_TEST_SUITE_P(Rules, FormatBits, testing::ValuesIn(all_format_cases()), format_case_name);

/// Returns weights and state after some steps, the second of which is skipped.
std::string trained(const FormatCase &c, const std::vector<Shape> &shapes, const dsopt_optimizer_desc &desc,
                    const dsopt_context_desc &context) {
    Trainer trainer(shapes, c.group(), desc, context);
    trainer.train(1);
    dsopt_step skipped = trainer.arguments();
    skipped.skip = on_device(int32_t(1));
    must(trainer.step(skipped));
    trainer.train(2, 4);
    EXPECT_TRUE(trainer.model.intact());
    return trainer.text();
}

LABEL(cpu);
TEST_P(FormatBits, AreEqualForEveryInstructionSet) {
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16}) {
        std::string first;
        for (const char *const isa : kIsas) {
            const Isa chosen(isa);
            const std::string text =
                trained(GetParam(), shapes_of(kFormatSizes, dtype, dtype), format_desc(), context_desc());
            if (first.empty()) first = text;
            EXPECT_TRUE(same(text, first)) << isa;
        }
    }
}

TEST_P(FormatBits, DoNotDependOnAlignment) {
    std::vector<Shape> shapes = shapes_of(kFormatSizes), moved = shapes;
    for (size_t i = 0; i < moved.size(); ++i) moved[i].offset = 4 * (i % 5 + 1);
    EXPECT_TRUE(same(trained(GetParam(), shapes, format_desc(), context_desc()),
                     trained(GetParam(), moved, format_desc(), context_desc())));
}

// dsopt_optimizer_apply on state that is only aligned to its elements.
TEST_P(FormatBits, AreEqualInApply) {
    const std::vector<Shape> shapes = shapes_of({1, 255, 257, 4097});
    const Context context = make_context();
    Trainer trainer(shapes, GetParam().group(), format_desc());
    const Optimizer pure = make_optimizer(context, format_desc());
    std::vector<dsopt_param> params;
    for (const Shape &shape : shapes) params.push_back(param_of({nullptr, shape.numel, shape.param, 0}));
    const dsopt_group group = GetParam().group();
    must(dsopt_optimizer_add_group(pure.get(), &group, params.data(), int64_t(params.size())));
    CallerMemory memory(pure.get(), trainer.model.params);
    must(memory.init());
    for (uint64_t t = 1; t <= 3; ++t) {
        trainer.train(t);
        EXPECT_OK(memory.apply(trainer.model.grads));
    }
    EXPECT_TRUE(same(memory.text(), trainer.text()));
    EXPECT_TRUE(memory.intact());
}

TEST(FormatThreads, DoNotChangeBits) {
    const std::vector<Shape> shapes = shapes_of({100000, 3, 5000, 256, 70000}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16);
    for (const FormatCase &c : few_format_cases()) {
        const std::string one = trained(c, shapes, format_desc(DSOPT_MASTERS_REMAINDER), context_desc(1));
        for (const int32_t threads : {2, 3, 8})
            EXPECT_TRUE(same(trained(c, shapes, format_desc(DSOPT_MASTERS_REMAINDER), context_desc(threads)), one))
                << c.name() << threads;
    }
}

// Slices at multiples of 256 of one tensor, each in an optimizer of its own. LAMB's trust ratio is that of a tensor.
TEST(FormatSlices, MatchTheWholeTensorBitwise) {
    constexpr int64_t total = 5000;
    for (const FormatCase &c : all_format_cases()) {
        if (c.algorithm == DSOPT_ALGORITHM_LAMB) continue;
        const Context context = make_context();
        Array weights(DSOPT_DTYPE_F32, total, 0), gradients(DSOPT_DTYPE_F32, total, 0);
        weights.fill(1);
        gradients.fill(2);
        const auto part = [](const Array &whole, int64_t begin, int64_t n) {
            const std::vector<float> values = whole.floats();
            return Array(DSOPT_DTYPE_F32, std::vector<float>(values.begin() + begin, values.begin() + begin + n));
        };
        Trainer whole(context, format_desc(), c.group(), {{weights, "w"}});
        for (int t = 0; t < 3; ++t) must(whole.step({gradients}));
        for (const auto &[begin, n] : {std::pair<int64_t, int64_t>{0, 1024}, {1024, 256}, {1280, total - 1280}}) {
            const bool offset = std::max(c.formats.first, c.formats.second) >= DSOPT_MOMENT_BF16_RANDOM;
            Trainer slice(context, format_desc(), c.group(),
                          {{part(weights, begin, n), "w", 0, 0, offset ? begin : 0}});
            for (int t = 0; t < 3; ++t) must(slice.step({part(gradients, begin, n)}));
            EXPECT_TRUE(same_bits(slice.weight().floats(), part(whole.weight(), begin, n).floats())) << c.name();
            for (const std::string &name : c.moments()) {
                const std::vector<float> all = f32_state(whole.opt(), 0, name);
                EXPECT_TRUE(same_bits(f32_state(slice.opt(), 0, name), {all.begin() + begin, all.begin() + begin + n}))
                    << c.name();
            }
        }
    }
}

TEST(FormatOffsets, ReachBeyond32Bits) {
    const FormatCase c{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_BF16_RANDOM, DSOPT_MOMENT_BF16_RANDOM}};
    const Context context = make_context();
    std::vector<std::string> moments;
    for (const int64_t offset : {int64_t(0), (int64_t(1) << 31) + 256, (int64_t(1) << 40) + 512}) {
        Array weights(DSOPT_DTYPE_F32, 600, 1), gradients(DSOPT_DTYPE_F32, 600, 0);
        gradients.fill(3);
        Trainer trainer(context, format_desc(), c.group(), {{weights, "w", 0, 0, offset}});
        must(trainer.step({gradients}));
        moments.push_back(exported_text(trainer.opt(), state_index(trainer.opt(), 0, "exp_avg")));
    }
    EXPECT_NE(moments[0], moments[1]); // other random numbers
    EXPECT_NE(moments[1], moments[2]);
}

// Tensors with and without formats, and both kinds of masters, in one step.
TEST(FormatLists, MixedWithF32MomentsMatchEachAloneBitwise) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB}) {
        const FormatCase c{algorithm, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_Q8}};
        const Context context = make_context();
        const auto weights = [](uint64_t seed, size_t n) {
            Array array(DSOPT_DTYPE_F32, n, 0);
            array.fill(seed);
            return array;
        };
        dsopt_optimizer_desc desc = format_desc();
        desc.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
        Trainer both(context, desc, c.group(),
                     {{weights(1, 700), "a"}, {weights(2, 5000), "b", DSOPT_PARAM_F32_MOMENTS}});
        Trainer first(context, desc, c.group(), {{weights(1, 700), "a"}});
        Trainer second(context, desc, group_of(algorithm), {{weights(2, 5000), "b"}});
        for (uint64_t t = 10; t < 13; ++t) {
            must(both.step({weights(t, 700), weights(t + 10, 5000)}));
            must(first.step({weights(t, 700)}));
            must(second.step({weights(t + 10, 5000)}));
        }
        EXPECT_TRUE(same(both.weight(0).text(), first.weight().text()));
        EXPECT_TRUE(same(both.weight(1).text(), second.weight().text()));
        for (const char *const name : {"exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"})
            EXPECT_EQ(exported<uint8_t>(both.opt(), 0, name), exported<uint8_t>(first.opt(), 0, name)) << name;
        for (const char *const name : {"exp_avg", "exp_avg_sq"})
            EXPECT_EQ(exported<uint8_t>(both.opt(), 1, name), exported<uint8_t>(second.opt(), 0, name)) << name;
        const double a = first.report().update_norm, b = second.report().update_norm;
        EXPECT_NEAR(both.report().update_norm, std::sqrt(a * a + b * b), 1e-9);
    }
}

// Packing: lists of one tensor and of all of them, in both orders. LAMB's trust ratios are those of tensors.
TEST(FormatLists, MatchEachTensorAloneBitwiseInAnyOrder) {
    for (const FormatCase &c : all_format_cases()) {
        const Context context = make_context();
        const auto param_of_size = [](int64_t size) {
            Array weights(DSOPT_DTYPE_BF16, size_t(size), 0);
            weights.fill(uint64_t(size) + 1);
            return Param{weights, "w" + std::to_string(size)};
        };
        const auto gradient_of_size = [](int64_t size, uint64_t t) {
            Array gradient(DSOPT_DTYPE_BF16, size_t(size), 0);
            gradient.fill(100 * t + uint64_t(size));
            return gradient;
        };
        /// Returns the weights and state of each tensor of the list, by its size.
        const auto trained_list = [&](const std::vector<int64_t> &sizes) {
            std::vector<Param> params;
            for (const int64_t size : sizes) params.push_back(param_of_size(size));
            Trainer trainer(context, format_desc(DSOPT_MASTERS_REMAINDER), c.group(), params);
            for (uint64_t t = 1; t <= 3; ++t) {
                std::vector<Array> gradients;
                for (const int64_t size : sizes) gradients.push_back(gradient_of_size(size, t));
                must(trainer.step(gradients));
            }
            std::map<int64_t, std::string> texts;
            for (size_t i = 0; i < sizes.size(); ++i) texts[sizes[i]] = trainer.weight(i).text();
            for (int64_t k = 0; k < state_count(trainer.opt()); ++k) {
                const dsopt_state_info info = state_info(trainer.opt(), k);
                if (info.param >= 0) texts[sizes[size_t(info.param)]] += exported_text(trainer.opt(), k);
            }
            return texts;
        };
        const std::map<int64_t, std::string> all = trained_list(kFormatSizes);
        EXPECT_EQ(trained_list({kFormatSizes.rbegin(), kFormatSizes.rend()}), all) << c.name();
        for (const int64_t size : kFormatSizes)
            EXPECT_TRUE(same(trained_list({size}).at(size), all.at(size))) << c.name() << ' ' << size;
    }
}

// Ranks round alike: nothing depends on the rank.
TEST(FormatSeeds, SelectTheRandomNumbers) {
    const FormatCase c{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_BF16_RANDOM, DSOPT_MOMENT_BF16_RANDOM}};
    const auto run = [&](uint64_t seed, const char *name) {
        const Context context = make_context();
        Array weights(DSOPT_DTYPE_F32, 999, 1), gradients(DSOPT_DTYPE_F32, 999, 0);
        gradients.fill(7);
        Trainer trainer(context, format_desc(DSOPT_MASTERS_PER_TENSOR, seed), c.group(), {{weights, name}});
        must(trainer.step({gradients}));
        return exported_text(trainer.opt(), state_index(trainer.opt(), 0, "exp_avg_sq"));
    };
    EXPECT_EQ(run(1, "w"), run(1, "w"));
    EXPECT_NE(run(1, "w"), run(2, "w"));
    EXPECT_NE(run(1, "w"), run(1, "v"));
}

} // namespace formats_bits_tests
