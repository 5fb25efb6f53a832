// SPDX-License-Identifier: Apache-2.0
// Formats and options that are refused. Each text names the field, and nothing changes.
#include "support/formats.h"

using namespace test;

LABEL_FILE(one_thread);

namespace formats_refusals_tests {

constexpr int32_t kF32 = DSOPT_MOMENT_F32, kBf16 = DSOPT_MOMENT_BF16, kRandom = DSOPT_MOMENT_BF16_RANDOM,
                  kE4m3 = DSOPT_MOMENT_E4M3, kQ8 = DSOPT_MOMENT_Q8;

class FormatRefusals : public testing::Test {
protected:
    void expect_refused(const dsopt_group &group, dsopt_status status, const std::string &words,
                        dsopt_optimizer_desc desc = optimizer_desc(), std::vector<Param> params = {}) {
        Trainer trainer(context_, desc);
        const auto size = [&] {
            int64_t groups = 0, count = 0;
            must(dsopt_optimizer_count(trainer.opt(), &groups, &count));
            return groups + count;
        };
        EXPECT_TRUE(refused(trainer.add_group(group, std::move(params)), status, words)) << words;
        EXPECT_EQ(size(), 0);
    }
    static dsopt_group group(int32_t algorithm, int32_t first, int32_t second) {
        dsopt_group group = make_group(algorithm);
        group.exp_avg_format = first;
        group.exp_avg_sq_format = second;
        return group;
    }
    static Param param(int64_t offset, int32_t flags = 0, int32_t dtype = DSOPT_DTYPE_F32) {
        return {Array(dtype, 300, 1), "weight", flags, 0, offset};
    }
    const Context context_ = make_context();
};

TEST_F(FormatRefusals, UnknownFormat) {
    for (const int32_t bad : {-1, 5, INT32_MAX, INT32_MIN})
        for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_SGD, DSOPT_ALGORITHM_ONEBIT_ADAM}) {
            expect_refused(group(algorithm, bad, kF32), DSOPT_ERR_ARGUMENT, "exp_avg_format|" + std::to_string(bad));
            expect_refused(group(algorithm, kF32, bad), DSOPT_ERR_ARGUMENT, "exp_avg_sq_format|" + std::to_string(bad));
        }
}

TEST_F(FormatRefusals, FormatThatSquaresDoNotHave) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ADAM_LEGACY,
                                    DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ADAGRAD}) {
        expect_refused(group(algorithm, kF32, kBf16), DSOPT_ERR_UNSUPPORTED, "exp_avg_sq_format|BF16|nearest");
        expect_refused(group(algorithm, kF32, kE4m3), DSOPT_ERR_UNSUPPORTED, "exp_avg_sq_format|E4M3|range");
    }
    expect_refused(group(DSOPT_ALGORITHM_ADAGRAD, kF32, kQ8), DSOPT_ERR_UNSUPPORTED, "exp_avg_sq_format|Q8|sum");
}

TEST_F(FormatRefusals, FormatOfAMomentThatTheRuleDoesNotHave) {
    for (const int32_t format : {kBf16, kRandom, kE4m3, kQ8}) {
        expect_refused(group(DSOPT_ALGORITHM_LION, kF32, format), DSOPT_ERR_UNSUPPORTED,
                       "exp_avg_sq_format|no effect|lion");
        expect_refused(group(DSOPT_ALGORITHM_ADAGRAD, format, kF32), DSOPT_ERR_UNSUPPORTED,
                       "exp_avg_format|no effect|adagrad");
        dsopt_group sgd = group(DSOPT_ALGORITHM_SGD, kF32, format);
        expect_refused(sgd, DSOPT_ERR_UNSUPPORTED, "exp_avg_sq_format|no effect|sgd");
        sgd.momentum = 0.9;
        expect_refused(sgd, DSOPT_ERR_UNSUPPORTED, "exp_avg_sq_format|no effect|sgd");
        expect_refused(group(DSOPT_ALGORITHM_SGD, format, kF32), DSOPT_ERR_UNSUPPORTED,
                       "exp_avg_format|no effect|without momentum");
    }
}

TEST_F(FormatRefusals, FamilyCompatModeAndFlatMasters) {
    for (const int32_t algorithm : kFamily)
        expect_refused(group(algorithm, kE4m3, kF32), DSOPT_ERR_UNSUPPORTED, "exp_avg_format|E4M3|F32");
    dsopt_optimizer_desc compat = optimizer_desc();
    compat.compat = DSOPT_COMPAT_DEEPSPEED;
    expect_refused(group(DSOPT_ALGORITHM_ADAMW, kE4m3, kF32), DSOPT_ERR_UNSUPPORTED, "exp_avg_format|standard", compat);
    dsopt_optimizer_desc flat = optimizer_desc();
    flat.masters = DSOPT_MASTERS_FLAT;
    expect_refused(group(DSOPT_ALGORITHM_ADAMW, kE4m3, kF32), DSOPT_ERR_UNSUPPORTED, "exp_avg_format|FLAT", flat);
    expect_refused(group(DSOPT_ALGORITHM_ADAMW, kF32, kRandom), DSOPT_ERR_UNSUPPORTED, "exp_avg_sq_format|FLAT", flat);
}

TEST_F(FormatRefusals, RemaindersWhereTheyAreNotPossible) {
    dsopt_optimizer *opt = nullptr;
    dsopt_optimizer_desc desc = format_desc(DSOPT_MASTERS_REMAINDER);
    desc.flags = DSOPT_OPTIMIZER_NO_MASTER;
    EXPECT_TRUE(
        refused(dsopt_optimizer_create(context_.get(), &desc, &opt), DSOPT_ERR_UNSUPPORTED, "masters|NO_MASTER"));
    desc = format_desc(DSOPT_MASTERS_REMAINDER);
    desc.compat = DSOPT_COMPAT_DEEPSPEED;
    EXPECT_TRUE(
        refused(dsopt_optimizer_create(context_.get(), &desc, &opt), DSOPT_ERR_UNSUPPORTED, "REMAINDER|standard"));
    EXPECT_EQ(opt, nullptr);
    desc = format_desc(DSOPT_MASTERS_REMAINDER);
    for (const int32_t algorithm : kFamily)
        expect_refused(make_group(algorithm), DSOPT_ERR_UNSUPPORTED, "REMAINDER|1-bit", desc);
    expect_refused(make_group(DSOPT_ALGORITHM_ADAMW), DSOPT_ERR_UNSUPPORTED, "'weight'|F16", desc,
                   {param(0, 0, DSOPT_DTYPE_F16)});
}

TEST_F(FormatRefusals, FlagAndOffsetWithoutEffect) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_SGD})
        expect_refused(make_group(algorithm), DSOPT_ERR_UNSUPPORTED, "F32_MOMENTS|'weight'|no effect", optimizer_desc(),
                       {param(0, DSOPT_PARAM_F32_MOMENTS)});
    expect_refused(group(DSOPT_ALGORITHM_ADAMW, kBf16, kF32), DSOPT_ERR_UNSUPPORTED, "'weight'|offset 256",
                   optimizer_desc(), {param(256)});
    expect_refused(group(DSOPT_ALGORITHM_ADAMW, kE4m3, kRandom), DSOPT_ERR_UNSUPPORTED, "'weight'|offset 256",
                   optimizer_desc(), {param(256, DSOPT_PARAM_F32_MOMENTS)});
    for (const int32_t format : {kE4m3, kQ8})
        for (const int64_t offset : {1, 255, 257})
            expect_refused(group(DSOPT_ALGORITHM_ADAMW, format, kF32), DSOPT_ERR_ARGUMENT,
                           "'weight'|offset " + std::to_string(offset) + "|256", optimizer_desc(), {param(offset)});
    expect_refused(group(DSOPT_ALGORITHM_ADAMW, kE4m3, kF32), DSOPT_ERR_UNSUPPORTED, "'weight'|offset -256",
                   optimizer_desc(), {param(-256)});
    Trainer trainer(context_, optimizer_desc());
    EXPECT_OK(trainer.add_group(group(DSOPT_ALGORITHM_ADAMW, kBf16, kRandom), {param(3)}));
    EXPECT_OK(
        trainer.add_group(group(DSOPT_ALGORITHM_ADAMW, kE4m3, kQ8), {{Array(DSOPT_DTYPE_F32, 9, 1), "v", 0, 0, 512}}));
}

TEST_F(FormatRefusals, MomentumOf0InAGroupWithAFormat) {
    dsopt_group sgd = group(DSOPT_ALGORITHM_SGD, kF32, kF32);
    sgd.momentum = 0.9;
    sgd.exp_avg_format = kQ8;
    const Trainer trainer(shapes_of({300}), sgd);
    EXPECT_TRUE(refused(dsopt_optimizer_set(trainer.opt(), 0, DSOPT_KEY_MOMENTUM, 0), DSOPT_ERR_UNSUPPORTED));
    EXPECT_EQ(trainer.get(DSOPT_KEY_LR), sgd.lr);
}

TEST_F(FormatRefusals, DtypesOfStateInOtherLists) {
    alignas(64) char memory[1024] = {};
    Trainer trainer(shapes_of({300}), make_group(DSOPT_ALGORITHM_ADAMW));
    trainer.train(1);
    const std::string before = trainer.text();
    for (const int32_t dtype : {DSOPT_DTYPE_I16, DSOPT_DTYPE_U8, DSOPT_DTYPE_F8_E4M3}) {
        dsopt_tensor bad{memory, 300, dtype, 0};
        const float one = 1;
        dsopt_step step = trainer.arguments();
        step.grads = &bad;
        EXPECT_TRUE(refused(trainer.step(step), DSOPT_ERR_DTYPE, "p0|" + dtype_name(dtype)));
        step = trainer.arguments();
        step.out = &bad;
        EXPECT_TRUE(refused(trainer.step(step), DSOPT_ERR_DTYPE, "p0|" + dtype_name(dtype)));
        step = trainer.arguments();
        step.params = &bad;
        EXPECT_TRUE(refused(trainer.step(step), DSOPT_ERR_DTYPE, "p0|" + dtype_name(dtype)));
        const Context &context = trainer.own_context;
        EXPECT_TRUE(refused(dsopt_zero_grad(context.get(), &bad, 1, 0, nullptr), DSOPT_ERR_DTYPE, dtype_name(dtype)));
        EXPECT_TRUE(refused(dsopt_tensors_clamp(context.get(), &bad, 1, 1.0, nullptr), DSOPT_ERR_DTYPE));
        EXPECT_TRUE(
            refused(dsopt_tensors_axpby(context.get(), on_device(one), &bad, 0, &bad, 1, nullptr), DSOPT_ERR_DTYPE));
        EXPECT_TRUE(refused(dsopt_optimizer_bind(trainer.opt(), DSOPT_BIND_PARAMS, &bad, 1), DSOPT_ERR_DTYPE));
    }
    EXPECT_TRUE(same(trainer.text(), before));
}

TEST_F(FormatRefusals, StateOfAnotherFormatInBind) {
    const FormatCase c{DSOPT_ALGORITHM_LION, {kQ8, kF32}};
    Trainer trainer(shapes_of({300}), c.group());
    trainer.train(1);
    std::vector<dsopt_tensor> list;
    for (const dsopt_state_info &info : trainer.state())
        list.push_back({nullptr, info.tensor.numel, info.tensor.dtype, 0});
    std::vector<dsopt_tensor> bad = list;
    bad[0].dtype = DSOPT_DTYPE_F8_E4M3;
    EXPECT_TRUE(refused(dsopt_optimizer_bind(trainer.opt(), DSOPT_BIND_STATE, bad.data(), int64_t(bad.size())),
                        DSOPT_ERR_DTYPE, "exp_avg|F8_E4M3|U8"));
    bad = list;
    bad[1].numel = 300;
    EXPECT_TRUE(refused(dsopt_optimizer_bind(trainer.opt(), DSOPT_BIND_STATE, bad.data(), int64_t(bad.size())),
                        DSOPT_ERR_SHAPE, "exp_avg_scale|300"));
}

// CHECK_RANKS compares formats, flag and kind of masters.
LABEL(cpu);
TEST_F(FormatRefusals, RanksWithDifferentFormats) {
    struct Rank {
        int32_t format, masters, flags;
    };
    struct Pair {
        Rank first, second;
        const char *text;
    };
    const Pair pairs[] = {
        {{kE4m3, DSOPT_MASTERS_PER_TENSOR, 0}, {kQ8, DSOPT_MASTERS_PER_TENSOR, 0}, "exp_avg_format"},
        {{kBf16, DSOPT_MASTERS_PER_TENSOR, 0}, {kRandom, DSOPT_MASTERS_PER_TENSOR, 0}, "exp_avg_format"},
        {{kE4m3, DSOPT_MASTERS_PER_TENSOR, 0}, {kE4m3, DSOPT_MASTERS_PER_TENSOR, DSOPT_PARAM_F32_MOMENTS}, "'weight'"},
        {{kE4m3, DSOPT_MASTERS_PER_TENSOR, 0}, {kE4m3, DSOPT_MASTERS_REMAINDER, 0}, "masters"}};
    for (const Pair &pair : pairs)
        with_ranks(2, [&](int rank, const Context &context, const Comm &comm) {
            const Rank &own = rank == 0 ? pair.first : pair.second;
            dsopt_optimizer_desc desc = desc_with(comm, DSOPT_COMPAT_NONE, DSOPT_OPTIMIZER_CHECK_RANKS);
            desc.masters = own.masters;
            Trainer trainer(context, desc, group(DSOPT_ALGORITHM_LION, own.format, kF32),
                            {{Array(DSOPT_DTYPE_BF16, 300, 1), "weight", own.flags}});
            if (!refused(trainer.step({Array(DSOPT_DTYPE_BF16, 300, 1)}), DSOPT_ERR_MISMATCH, pair.text))
                throw std::runtime_error("accepted, or another text: " + std::string(dsopt_last_error()));
        });
}

} // namespace formats_refusals_tests
