// SPDX-License-Identifier: Apache-2.0
// Checkpoints of low-precision state: exact resume, conversion between formats, and masters that files of both kinds
// share.
#include "support/file.h"
#include "support/formats.h"

using namespace test;

LABEL_FILE(one_thread);

namespace formats_files_tests {

constexpr int32_t kBf16 = DSOPT_DTYPE_BF16;
const std::vector<int64_t> kSizes = {0, 1, 255, 256, 257, 5000};

Trainer make_trainer(const FormatCase &c, int32_t masters, uint64_t seed = 5) {
    return Trainer(shapes_of(kSizes, kBf16, kBf16), c.group(), format_desc(masters, seed));
}

class FormatFiles : public testing::TestWithParam<FormatCase> {};
INSTANTIATE_TEST_SUITE_P(Rules, FormatFiles, testing::ValuesIn(all_format_cases()), format_case_name);

TEST_P(FormatFiles, ResumeWithTheSameBits) {
    for (const int32_t masters : {DSOPT_MASTERS_PER_TENSOR, DSOPT_MASTERS_REMAINDER}) {
        const Trainer whole = make_trainer(GetParam(), masters), first = make_trainer(GetParam(), masters),
                      second = make_trainer(GetParam(), masters);
        whole.train(1, 6);
        first.train(1, 3);
        MemoryFile file;
        must(file.save(first, DSOPT_IO_PARAMS));
        second.train(9);
        must(file.load(second, DSOPT_IO_PARAMS));
        EXPECT_TRUE(same(second.text(), first.text()));
        second.train(4, 6);
        EXPECT_TRUE(same(second.text(), whole.text()));
    }
}

/// Formats of exp_avg that CONVERT goes between, with those of exp_avg_sq that exist.
std::vector<Formats> convertible() {
    std::vector<Formats> all;
    for (int32_t first = DSOPT_MOMENT_F32; first <= DSOPT_MOMENT_Q8; ++first)
        for (const int32_t second : {DSOPT_MOMENT_F32, DSOPT_MOMENT_BF16_RANDOM, DSOPT_MOMENT_Q8})
            if (second == DSOPT_MOMENT_F32 || first == second || first == DSOPT_MOMENT_E4M3)
                all.push_back({first, second});
    return all;
}
int32_t stored(int32_t format) { return format == DSOPT_MOMENT_BF16_RANDOM ? int32_t(DSOPT_MOMENT_BF16) : format; }

TEST(FormatConversion, IsThroughFp32ToNearest) {
    for (const Formats &from : convertible()) {
        const FormatCase saved{DSOPT_ALGORITHM_ADAMW, from};
        const Trainer source = make_trainer(saved, DSOPT_MASTERS_PER_TENSOR);
        source.train(1, 3);
        MemoryFile file;
        must(file.save(source));
        for (const Formats &to : convertible()) {
            const FormatCase c{DSOPT_ALGORITHM_ADAMW, to};
            const Trainer loaded = make_trainer(c, DSOPT_MASTERS_PER_TENSOR),
                          imported = make_trainer(c, DSOPT_MASTERS_PER_TENSOR);
            loaded.train(8);
            const std::string before = loaded.text();
            const bool differs = stored(from.first) != stored(to.first) || stored(from.second) != stored(to.second);
            if (differs) {
                EXPECT_TRUE(refused(file.load(loaded), DSOPT_ERR_MISMATCH, "exp_avg|dtype"));
                EXPECT_TRUE(same(loaded.text(), before));
            }
            must(file.load(loaded, DSOPT_IO_CONVERT));
            for (size_t p = 0; p < kSizes.size(); ++p)
                for (const std::string name : {"exp_avg", "exp_avg_sq"}) {
                    const bool squares = name == "exp_avg_sq";
                    const bool copies =
                        stored(squares ? from.second : from.first) == stored(squares ? to.second : to.first);
                    const std::vector<float> values = f32_state(source.opt(), int64_t(p), name);
                    must(dsopt_optimizer_import_f32(imported.opt(), state_index(imported.opt(), int64_t(p), name),
                                                    values.data(), int64_t(values.size())));
                    EXPECT_TRUE(same_bits(f32_state(loaded.opt(), int64_t(p), name),
                                          copies ? values : f32_state(imported.opt(), int64_t(p), name)))
                        << saved.name() << " to " << c.name() << ' ' << name;
                }
            EXPECT_EQ(steps(loaded.opt()), steps(source.opt()));
        }
    }
}

TEST(FormatConversion, OfTheSameStorageCopies) {
    const FormatCase nearest{DSOPT_ALGORITHM_LION, {DSOPT_MOMENT_BF16, DSOPT_MOMENT_F32}};
    const FormatCase random{DSOPT_ALGORITHM_LION, {DSOPT_MOMENT_BF16_RANDOM, DSOPT_MOMENT_F32}};
    const Trainer source = make_trainer(nearest, DSOPT_MASTERS_PER_TENSOR),
                  target = make_trainer(random, DSOPT_MASTERS_PER_TENSOR);
    source.train(1, 3);
    MemoryFile file;
    must(file.save(source, DSOPT_IO_PARAMS));
    must(file.load(target, DSOPT_IO_PARAMS));
    EXPECT_TRUE(same(target.text(), source.text()));
}

// Conversions are in pieces of 2^20 elements, which have their own scales.
LABEL(long_emulated);
TEST(FormatConversion, OfSeveralPiecesIsThatOfAnImport) {
    constexpr int64_t numel = (1 << 21) + 300;
    const auto make = [](int32_t format) {
        return Trainer(shapes_of({numel}), FormatCase{DSOPT_ALGORITHM_LION, {format, DSOPT_MOMENT_F32}}.group());
    };
    const Trainer source = make(DSOPT_MOMENT_Q8);
    source.train(1);
    const std::vector<float> values = f32_state(source.opt(), 0, "exp_avg");
    MemoryFile file;
    must(file.save(source));
    for (const int32_t format : {DSOPT_MOMENT_F32, DSOPT_MOMENT_BF16, DSOPT_MOMENT_E4M3}) {
        const Trainer loaded = make(format), imported = make(format);
        must(file.load(loaded, DSOPT_IO_CONVERT));
        must(dsopt_optimizer_import_f32(imported.opt(), state_index(imported.opt(), 0, "exp_avg"), values.data(),
                                        numel));
        EXPECT_TRUE(same_bits(f32_state(loaded.opt(), 0, "exp_avg"), f32_state(imported.opt(), 0, "exp_avg")))
            << kFormatNames[format];
    }
}

TEST(FormatConversion, OfAFlaggedParameterIsToAndFromF32) {
    const FormatCase c{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_Q8}};
    const Context context = make_context();
    const auto make = [&](int32_t flags) {
        Array weights(DSOPT_DTYPE_F32, 600, 0), gradient(DSOPT_DTYPE_F32, 600, 0);
        weights.fill(1);
        gradient.fill(2);
        Trainer trainer(context, format_desc(), c.group(), {{weights, "w", flags}});
        must(trainer.step({gradient}));
        return trainer;
    };
    for (const int32_t saved : {0, int32_t(DSOPT_PARAM_F32_MOMENTS)}) {
        const Trainer source = make(saved), target = make(saved ^ DSOPT_PARAM_F32_MOMENTS);
        MemoryFile file;
        must(file.save(source));
        EXPECT_TRUE(refused(file.load(target), DSOPT_ERR_MISMATCH, "w.exp_avg|F32"));
        must(dsopt_optimizer_reset(target.opt(), DSOPT_RESET_MOMENTS, nullptr));
        must(file.load(target, DSOPT_IO_CONVERT));
        for (const char *const name : {"exp_avg", "exp_avg_sq"}) {
            const std::vector<float> values = f32_state(source.opt(), 0, name);
            if (saved == 0) {
                EXPECT_TRUE(same_bits(f32_state(target.opt(), 0, name), values)) << name;
                continue;
            }
            const Trainer imported = make(0);
            const int64_t index = state_index(imported.opt(), 0, name);
            must(dsopt_optimizer_import_f32(imported.opt(), index, values.data(), 600));
            EXPECT_TRUE(same_bits(f32_state(target.opt(), 0, name), f32_state(imported.opt(), 0, name))) << name;
        }
    }
}

// ------------------------------------------------------------------------------------------------------ several ranks
const FormatCase kRanked{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_Q8}};

/// Returns the files of ranks that have taken steps on the same averaged gradients, and the state of the first one.
std::vector<MemoryFile> saved_by_ranks(int ranks, std::string *state) {
    std::vector<MemoryFile> files(static_cast<size_t>(ranks));
    with_ranks(ranks, [&](int rank, const Context &context, const Comm &comm) {
        dsopt_optimizer_desc desc = desc_with(comm, DSOPT_COMPAT_NONE, DSOPT_OPTIMIZER_CHECK_RANKS);
        desc.masters = DSOPT_MASTERS_REMAINDER;
        Trainer trainer(context, desc, kRanked.group(), std::vector<Array>{Array(kBf16, 700, 1), Array(kBf16, 257, 2)});
        for (uint64_t t = 1; t <= 3; ++t) {
            std::vector<Array> gradients = {Array(kBf16, 700, 0), Array(kBf16, 257, 0)};
            for (Array &gradient : gradients) gradient.fill(t);
            must(trainer.step(gradients));
        }
        must(files[size_t(rank)].save(trainer, DSOPT_IO_PARAMS));
        if (rank == 0) *state = trainer.text();
    });
    return files;
}

TEST(FormatFilesOfRanks, LoadIntoAnyNumberOfRanks) {
    std::string state;
    std::vector<MemoryFile> files = saved_by_ranks(2, &state);
    for (const int ranks : {1, 2, 3})
        with_ranks(ranks, [&](int, const Context &context, const Comm &comm) {
            dsopt_optimizer_desc desc = desc_with(comm, DSOPT_COMPAT_NONE, 0);
            desc.masters = DSOPT_MASTERS_REMAINDER;
            const Trainer trainer(context, desc, kRanked.group(),
                                  std::vector<Array>{Array(kBf16, 700, 3), Array(kBf16, 257, 3)});
            EXPECT_OK(load_all(trainer.opt(), {&files[0], &files[1]}, DSOPT_IO_PARAMS));
            EXPECT_TRUE(same(trainer.text(), state)) << ranks;
        });
}

TEST(FormatConversion, IsLogged) {
    std::string log;
    dsopt_context_desc context = context_desc();
    context.log_level = DSOPT_LOG_INFO;
    context.user = &log;
    context.log = [](void *user, int32_t, const char *text) { *static_cast<std::string *>(user) += text; };
    const FormatCase f32{DSOPT_ALGORITHM_LION, {DSOPT_MOMENT_F32, DSOPT_MOMENT_F32}};
    const FormatCase e4m3{DSOPT_ALGORITHM_LION, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_F32}};
    const Trainer source(shapes_of({300}), f32.group());
    const Trainer target(shapes_of({300}), e4m3.group(), format_desc(), context);
    MemoryFile file;
    must(file.save(source));
    must(file.load(target, DSOPT_IO_CONVERT));
    EXPECT_NE(log.find("p0.exp_avg was saved in F32, and was converted to F8_E4M3"), std::string::npos) << log;
}

TEST(FormatConversion, IsNoOptionOfASave) {
    const FormatCase c{DSOPT_ALGORITHM_LION, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_F32}};
    const Trainer trainer = make_trainer(c, DSOPT_MASTERS_PER_TENSOR);
    MemoryFile file;
    EXPECT_TRUE(refused(file.save(trainer, DSOPT_IO_CONVERT), DSOPT_ERR_ARGUMENT, "flags"));
}

TEST(FormatFile, NamesFormatsInItsMetadata) {
    const FormatCase c{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_BF16_RANDOM}};
    MemoryFile file;
    must(file.save(make_trainer(c, DSOPT_MASTERS_PER_TENSOR)));
    EXPECT_NE(file.data.find("\"group.0.exp_avg_format\":\"e4m3\""), std::string::npos);
    EXPECT_NE(file.data.find("\"group.0.exp_avg_sq_format\":\"bf16_random\""), std::string::npos);
    must(file.save(Trainer(shapes_of({5}), make_group(DSOPT_ALGORITHM_ADAMW))));
    EXPECT_EQ(file.data.find("_format\":\"f32"), std::string::npos);
}

// ------------------------------------------------------------------------------------------------------------ masters
const FormatCase kRemainders{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_BF16_RANDOM}};

TEST(RemainderFile, LoadsIntoSeparateMastersAndBack) {
    const Trainer split = make_trainer(kRemainders, DSOPT_MASTERS_REMAINDER),
                  separate = make_trainer(kRemainders, DSOPT_MASTERS_PER_TENSOR),
                  back = make_trainer(kRemainders, DSOPT_MASTERS_REMAINDER);
    split.train(1, 4);
    MemoryFile file;
    must(file.save(split, DSOPT_IO_PARAMS));
    must(file.load(separate, DSOPT_IO_PARAMS));
    for (size_t p = 0; p < kSizes.size(); ++p)
        EXPECT_TRUE(
            same_bits(exported(separate.opt(), int64_t(p), "master"), f32_state(split.opt(), int64_t(p), "remainder")));
    must(file.save(separate));
    must(file.load(back)); // without DSOPT_IO_PARAMS
    EXPECT_TRUE(same(back.text(), split.text()));
}

TEST(RemainderFile, MasterDecidesNextToAnotherParameter) {
    const Trainer first = make_trainer(kRemainders, DSOPT_MASTERS_PER_TENSOR),
                  target = make_trainer(kRemainders, DSOPT_MASTERS_REMAINDER);
    first.train(1, 2);
    for (const Array &param : first.model.params) param.corrupt(0x3f); // other weights than those of the masters
    MemoryFile file;
    must(file.save(first, DSOPT_IO_PARAMS));
    must(file.load(target, DSOPT_IO_PARAMS));
    for (size_t p = 0; p < kSizes.size(); ++p)
        EXPECT_TRUE(
            same_bits(f32_state(target.opt(), int64_t(p), "remainder"), exported(first.opt(), int64_t(p), "master")));
}

TEST(RemainderFile, WithoutMastersSetsRemaindersTo0) {
    const Trainer source = make_trainer(kRemainders, DSOPT_MASTERS_REMAINDER),
                  target = make_trainer(kRemainders, DSOPT_MASTERS_REMAINDER);
    source.train(1, 3);
    target.train(4, 6);
    const std::string weights = target.model.text();
    MemoryFile file;
    must(file.save(source, DSOPT_IO_PARAMS));
    must(file.load(target, DSOPT_IO_NO_MASTERS));
    EXPECT_TRUE(same(target.model.text(), weights));
    for (size_t p = 0; p < kSizes.size(); ++p)
        EXPECT_EQ(f32_state(target.opt(), int64_t(p), "remainder"), target.model.params[p].floats());
    must(file.load(target, DSOPT_IO_NO_MASTERS | DSOPT_IO_PARAMS));
    EXPECT_TRUE(same(target.model.text(), source.model.text()));
}

TEST(RemainderFile, NeedsMemoryOfParameters) {
    const Trainer source = make_trainer(kRemainders, DSOPT_MASTERS_REMAINDER),
                  target = make_trainer(kRemainders, DSOPT_MASTERS_REMAINDER);
    source.train(1);
    target.train(2);
    MemoryFile file, other;
    must(file.save(source));
    std::vector<dsopt_tensor> none;
    for (const int64_t size : kSizes) none.push_back({nullptr, size, kBf16, 0});
    must(dsopt_optimizer_bind(target.opt(), DSOPT_BIND_PARAMS, none.data(), int64_t(none.size())));
    const std::string state = exported_text(target.opt(), state_index(target.opt(), 5, "remainder"));
    EXPECT_TRUE(refused(file.load(target), DSOPT_ERR_STATE, "p1|memory"));
    EXPECT_TRUE(refused(other.save(target), DSOPT_ERR_STATE, "p1|memory"));
    EXPECT_TRUE(same(exported_text(target.opt(), state_index(target.opt(), 5, "remainder")), state));
    EXPECT_OK(file.load(target, DSOPT_IO_NO_MASTERS));
}

} // namespace formats_files_tests
