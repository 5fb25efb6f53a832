// SPDX-License-Identifier: Apache-2.0
// Save and load: a resumed run has the same bits as an uninterrupted one.
#include "support/file.h"
#include "support/harness.h"
#include <cfenv>
#include <clocale>
#include <filesystem>
#include <fstream>
#include <locale>
#include <unistd.h>

using namespace test;

LABEL_FILE(one_thread);
namespace fs = std::filesystem;

namespace checkpoint_tests {

std::string saved(const Trainer &trainer, uint32_t flags = 0) {
    MemoryFile memory_file;
    const dsopt_io io = memory_file.io(flags);
    must(dsopt_optimizer_save(trainer.opt(), nullptr, &io));
    return memory_file.data;
}
dsopt_status load(const Trainer &trainer, const std::string &data, uint32_t flags = 0) {
    MemoryFile memory_file{data};
    const dsopt_io io = memory_file.io(flags);
    return dsopt_optimizer_load(trainer.opt(), nullptr, &io);
}
std::string all_bytes(const Trainer &trainer) { return trainer.text() + hyper_text(trainer.opt()); }

/// Two groups with every dtype. The counters differ, because the last tensor has a gradient only in every other step.
Trainer make_mixed(int32_t algorithm, const dsopt_optimizer_desc &desc = optimizer_desc(0.7)) {
    Trainer trainer({{500, DSOPT_DTYPE_F32},
                     {0, DSOPT_DTYPE_F32},
                     {4097, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16},
                     {33, DSOPT_DTYPE_F16, DSOPT_DTYPE_F16}},
                    desc, context_desc(2));
    trainer.add(make_group(algorithm), 3);
    trainer.add(make_group(DSOPT_ALGORITHM_LAMB), 1);
    return trainer;
}
void train(Trainer &trainer, uint64_t first, uint64_t last) {
    for (uint64_t t = first; t <= last; ++t) {
        trainer.grads[3].data = t % 2 ? trainer.model.grads[3].data() : nullptr;
        trainer.train(t);
    }
}

class Checkpoint : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, Checkpoint, testing::ValuesIn(kStandardRules), algorithm_name);

TEST_P(Checkpoint, ResumedRunEqualsUninterruptedRun) {
    const Folder folder;
    const std::string path = folder / "run.safetensors";
    for (const bool by_path : {false, true}) {
        Trainer whole = make_mixed(GetParam()), first = make_mixed(GetParam()), second = make_mixed(GetParam());
        train(whole, 1, 10);
        train(first, 1, 5);
        must(dsopt_optimizer_set(first.opt(), 0, DSOPT_KEY_LR, 0.03125));
        DSOPT_NEW(dsopt_io, io);
        io.flags = DSOPT_IO_PARAMS;
        std::string data;
        if (by_path)
            ASSERT_OK(dsopt_optimizer_save(first.opt(), path.c_str(), &io));
        else
            data = saved(first, DSOPT_IO_PARAMS);
        for (const Array &param : second.model.params) param.fill(999); // the load must overwrite all of it
        train(second, 7, 9);
        if (by_path)
            ASSERT_OK(dsopt_optimizer_load(second.opt(), path.c_str(), &io));
        else
            ASSERT_OK(load(second, data, DSOPT_IO_PARAMS));
        EXPECT_TRUE(same(all_bytes(second), all_bytes(first)));
        EXPECT_EQ(report_of(second.opt()).calls, 5);
        EXPECT_EQ(get(second.opt(), 0, DSOPT_KEY_LR), 0.03125);
        must(dsopt_optimizer_set(second.opt(), 0, DSOPT_KEY_LR, make_group(GetParam()).lr));
        train(second, 6, 10);
        EXPECT_TRUE(same(all_bytes(second), all_bytes(whole)));
        EXPECT_EQ(steps(second.opt()), (std::vector<int32_t>{10, 10, 10, 5}));
    }
}

TEST(CheckpointHyper, RestoresEpsUncorrected) {
    const dsopt_group flagged = make_group(DSOPT_ALGORITHM_ADAMW, 0.01, DSOPT_GROUP_EPS_UNCORRECTED);
    Trainer first(shapes_of({500}), flagged), second(shapes_of({500}), make_group(DSOPT_ALGORITHM_ADAMW));
    first.train(1, 3);
    ASSERT_OK(load(second, saved(first, DSOPT_IO_PARAMS), DSOPT_IO_PARAMS));
    EXPECT_EQ(get(second.opt(), 0, DSOPT_KEY_EPS_UNCORRECTED), 1);
    first.train(4, 6);
    second.train(4, 6);
    EXPECT_TRUE(same(all_bytes(second), all_bytes(first)));
}

TEST_P(Checkpoint, LoadsIntoNewOptimizer) {
    Trainer whole = make_mixed(GetParam()), target = make_mixed(GetParam());
    train(whole, 1, 4);
    ASSERT_OK(load(target, saved(whole, DSOPT_IO_PARAMS), DSOPT_IO_PARAMS));
    EXPECT_TRUE(same(all_bytes(target), all_bytes(whole)));
    train(whole, 5, 6);
    train(target, 5, 6);
    EXPECT_TRUE(same(all_bytes(target), all_bytes(whole)));
}

TEST_P(Checkpoint, SavesSameBytesAgainAndChangesNothing) {
    const Folder folder;
    Trainer trainer = make_mixed(GetParam());
    train(trainer, 1, 3);
    const std::string before = all_bytes(trainer);
    const std::string data = saved(trainer);
    EXPECT_TRUE(same(all_bytes(trainer), before));
    EXPECT_TRUE(same(saved(trainer), data));
    ASSERT_OK(dsopt_optimizer_save(trainer.opt(), (folder / "a").c_str(), nullptr));
    std::ifstream file(folder / "a", std::ios::binary);
    EXPECT_TRUE(same(std::string(std::istreambuf_iterator<char>(file), {}), data));
}

TEST_P(Checkpoint, RestoresStateBeforeFirstStep) {
    Trainer trainer = make_mixed(GetParam()), other = make_mixed(GetParam()), plain = make_mixed(GetParam());
    const std::string data = saved(trainer);
    train(other, 1, 3);
    for (size_t i = 0; i < 4; ++i)
        std::memcpy(other.model.params[i].data(), trainer.model.params[i].data(), trainer.model.params[i].bytes());
    ASSERT_OK(load(other, data));
    train(other, 1, 3);
    train(plain, 1, 3);
    EXPECT_TRUE(same(all_bytes(other), all_bytes(plain)));
}

TEST_P(Checkpoint, LoadsIntoBoundState) {
    Trainer from = make_mixed(GetParam()), to = make_mixed(GetParam());
    train(from, 1, 3);
    std::vector<Array> buffers;
    for (int64_t i = 0; i < state_count(to.opt()); ++i) {
        const dsopt_tensor tensor = state_info(to.opt(), i).tensor;
        buffers.emplace_back(tensor.dtype, size_t(tensor.numel), 0.0f);
    }
    const std::vector<dsopt_tensor> list = list_of(buffers);
    ASSERT_OK(dsopt_optimizer_bind(to.opt(), DSOPT_BIND_STATE, list.data(), int64_t(list.size())));
    ASSERT_OK(load(to, saved(from)));
    std::string text;
    for (const Array &buffer : buffers) text += buffer.text();
    EXPECT_TRUE(same(text, state_text(from.opt())));
}

// --------------------------------------------------------------------------------------------------------------- order
/// An optimizer whose parameters have these names. The first letter determines size, dtype and content.
struct NamedOptimizer {
    NamedOptimizer(const std::vector<std::string> &names, size_t first_group) :
        model([&] {
            std::vector<Shape> shapes;
            for (const std::string &name : names)
                shapes.push_back({10 * (name[0] - 'a' + 1), name[0] % 2 ? DSOPT_DTYPE_F32 : DSOPT_DTYPE_BF16,
                                  DSOPT_DTYPE_F32, 0, name[0]});
            return shapes;
        }()),
        context(make_context()),
        opt(make_optimizer(context)),
        grads(list_of(model.grads)),
        names(names) {
        auto list = model.registered();
        for (size_t i = 0; i < names.size(); ++i) list[i].name = names[i].c_str();
        const dsopt_group a = make_group(DSOPT_ALGORITHM_ADAMW), b = make_group(DSOPT_ALGORITHM_LAMB);
        must(dsopt_optimizer_add_group(opt.get(), &a, list.data(), int64_t(first_group)));
        must(dsopt_optimizer_add_group(opt.get(), &b, list.data() + first_group, int64_t(names.size() - first_group)));
    }
    void step(uint64_t t) {
        model.make_gradients(t);
        for (size_t i = 0; i < names.size(); ++i)
            grads[i].data = t % uint64_t(names[i][0] - 'a' + 1) == 0 ? model.grads[i].data() : nullptr;
        DSOPT_NEW(dsopt_step, step);
        step.grads = grads.data();
        step.count = int64_t(grads.size());
        must(dsopt_optimizer_step(opt.get(), &step));
    }
    Model model;
    Context context;
    Optimizer opt;
    std::vector<dsopt_tensor> grads;
    std::vector<std::string> names;
};

TEST(CheckpointNames, MatchParametersInDifferentOrder) {
    NamedOptimizer from({"a", "b", "c", "d", "e"}, 3), to({"c", "a", "b", "e", "d"}, 3);
    for (uint64_t t = 1; t <= 12; ++t) from.step(t);
    MemoryFile memory_file;
    dsopt_io io = memory_file.io(DSOPT_IO_PARAMS);
    ASSERT_OK(dsopt_optimizer_save(from.opt.get(), nullptr, &io));
    io = memory_file.io(DSOPT_IO_PARAMS);
    ASSERT_OK(dsopt_optimizer_load(to.opt.get(), nullptr, &io));
    EXPECT_EQ(steps(from.opt.get()), (std::vector<int32_t>{12, 6, 4, 3, 2}));
    EXPECT_EQ(steps(to.opt.get()), (std::vector<int32_t>{4, 12, 6, 2, 3}));
    const std::vector<float> trust = exported(from.opt.get(), -1, "trust_ratio");
    EXPECT_EQ(exported(to.opt.get(), -1, "trust_ratio"), (std::vector<float>{0, 0, 0, trust[4], trust[3]}));
    const size_t source[] = {2, 0, 1, 4, 3};
    for (uint64_t t = 13; t <= 20; ++t) {
        from.step(t);
        to.step(t);
    }
    for (size_t i = 0; i < 5; ++i) {
        EXPECT_TRUE(same(to.model.params[i].text(), from.model.params[source[i]].text())) << i;
        EXPECT_EQ(exported(to.opt.get(), int64_t(i), "exp_avg"),
                  exported(from.opt.get(), int64_t(source[i]), "exp_avg"));
    }
}

TEST(CheckpointNames, MayContainAnyText) {
    const std::vector<std::string> names = {"a.exp_avg", "b\"\\\n\x01", "c/3:1:x", "d\xf0\x9f\x98\x80",
                                            "e" + std::string(999, 'z')};
    NamedOptimizer from(names, 2), to({names[1], names[0], names[4], names[3], names[2]}, 2);
    for (uint64_t t = 1; t <= 3; ++t) from.step(t);
    MemoryFile memory_file;
    dsopt_io io = memory_file.io();
    ASSERT_OK(dsopt_optimizer_save(from.opt.get(), nullptr, &io));
    io = memory_file.io();
    ASSERT_OK(dsopt_optimizer_load(to.opt.get(), nullptr, &io));
    EXPECT_EQ(exported(to.opt.get(), 1, "exp_avg_sq"), exported(from.opt.get(), 0, "exp_avg_sq"));
}

// --------------------------------------------------------------------------------------------------------------- flags
struct LoadFlags : testing::Test {
    LoadFlags() : from(make_mixed(DSOPT_ALGORITHM_ADAMW)), to(make_mixed(DSOPT_ALGORITHM_ADAMW)) {
        must(dsopt_optimizer_set(from.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_LR, 0.5));
        must(dsopt_optimizer_set(from.opt(), 1, DSOPT_KEY_BIAS_CORRECTION, 0));
        must(dsopt_optimizer_set(from.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM, 0.25));
        train(from, 1, 4);
        train(to, 11, 12);
        data = saved(from, DSOPT_IO_PARAMS);
        params = to.model.text();
        hyper = hyper_text(to.opt());
        moments = exported(to.opt(), 2, "exp_avg");
        master = exported(to.opt(), 2, "master");
    }
    Trainer from, to;
    std::string data, params, hyper;
    std::vector<float> moments, master;
};

TEST_F(LoadFlags, NoneRestoresStateAndHyperButNoParams) {
    ASSERT_OK(load(to, data));
    EXPECT_TRUE(same(to.model.text(), params));
    EXPECT_TRUE(same(state_text(to.opt()), state_text(from.opt())));
    EXPECT_TRUE(same(hyper_text(to.opt()), hyper_text(from.opt())));
}

TEST_F(LoadFlags, NoStateKeepsMomentsAndCounters) {
    ASSERT_OK(load(to, data, DSOPT_IO_NO_STATE));
    EXPECT_EQ(exported(to.opt(), 2, "exp_avg"), moments);
    EXPECT_EQ(steps(to.opt()), (std::vector<int32_t>{2, 2, 2, 1}));
    EXPECT_EQ(report_of(to.opt()).calls, 2);
    EXPECT_EQ(exported(to.opt(), 2, "master"), exported(from.opt(), 2, "master"));
    EXPECT_EQ(get(to.opt(), 0, DSOPT_KEY_LR), 0.5);
    EXPECT_EQ(get(to.opt(), 1, DSOPT_KEY_BIAS_CORRECTION), 0);
    EXPECT_TRUE(same(to.model.text(), params));
}

TEST_F(LoadFlags, NoMastersCopiesMastersFromParams) {
    ASSERT_OK(load(to, data, DSOPT_IO_NO_MASTERS));
    const std::vector<float> now = exported(to.opt(), 2, "master");
    for (int64_t i = 0; i < 4097; ++i) ASSERT_EQ(now[size_t(i)], to.model.params[2][size_t(i)]);
    EXPECT_NE(now, master);
    EXPECT_EQ(exported(to.opt(), 2, "exp_avg"), exported(from.opt(), 2, "exp_avg"));
    EXPECT_TRUE(same(to.model.text(), params));
}

TEST_F(LoadFlags, NoMastersWithParamsCopiesFromLoadedParams) {
    ASSERT_OK(load(to, data, DSOPT_IO_NO_MASTERS | DSOPT_IO_PARAMS));
    EXPECT_TRUE(same(to.model.text(), from.model.text()));
    const std::vector<float> now = exported(to.opt(), 2, "master");
    for (int64_t i = 0; i < 4097; ++i) ASSERT_EQ(now[size_t(i)], from.model.params[2][size_t(i)]);
}

TEST_F(LoadFlags, NoHyperKeepsCurrentHyper) {
    ASSERT_OK(load(to, data, DSOPT_IO_NO_HYPER));
    EXPECT_EQ(get(to.opt(), 0, DSOPT_KEY_LR), 1e-3);
    EXPECT_EQ(get(to.opt(), 1, DSOPT_KEY_BIAS_CORRECTION), 1);
    EXPECT_EQ(get(to.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM), 0.7);
    EXPECT_TRUE(same(state_text(to.opt()), state_text(from.opt())));
    EXPECT_EQ(report_of(to.opt()).calls, 4);
}

TEST_F(LoadFlags, AllExclusionsChangeOnlyMasters) {
    ASSERT_OK(load(to, data, DSOPT_IO_NO_HYPER | DSOPT_IO_NO_MASTERS | DSOPT_IO_NO_STATE));
    EXPECT_TRUE(same(hyper_text(to.opt()), hyper));
    EXPECT_EQ(exported(to.opt(), 2, "exp_avg"), moments);
    EXPECT_TRUE(same(to.model.text(), params));
}

TEST_F(LoadFlags, ParamsRestoresParams) {
    ASSERT_OK(load(to, data, DSOPT_IO_PARAMS));
    EXPECT_TRUE(same(all_bytes(to), all_bytes(from)));
}

// ------------------------------------------------------------------------ numbers in any locale and rounding mode
/// Sets numbers that need all digits of a double.
void set_exact_numbers(const Trainer &trainer) {
    dsopt_optimizer *const opt = trainer.opt();
    must(dsopt_optimizer_set(opt, 0, DSOPT_KEY_LR, 1.0 / 3));
    must(dsopt_optimizer_set(opt, 0, DSOPT_KEY_BETA1, 1 - 0x1p-53));
    must(dsopt_optimizer_set(opt, 0, DSOPT_KEY_BETA2, 0.7));
    must(dsopt_optimizer_set(opt, 0, DSOPT_KEY_EPS, 5e-324));
    must(dsopt_optimizer_set(opt, 0, DSOPT_KEY_WEIGHT_DECAY, 3.4028234663852886e38));
    must(dsopt_optimizer_set(opt, 0, DSOPT_KEY_GROUP_MAX_NORM, 1e23)); // between two doubles
    must(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM, 0.1 + 0.2));
    must(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_CALLS, 9007199254740992.0));
}

TEST(CheckpointHyper, RoundTripsDoublesExactly) {
    const Trainer from(shapes_of({3}), make_group(DSOPT_ALGORITHM_ADAMW)),
        to(shapes_of({3}), make_group(DSOPT_ALGORITHM_ADAMW));
    set_exact_numbers(from);
    ASSERT_OK(load(to, saved(from)));
    EXPECT_TRUE(same(hyper_text(to.opt()), hyper_text(from.opt())));
}

class CheckpointRoundingMode : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Modes, CheckpointRoundingMode,
                         testing::Values(FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO));

TEST_P(CheckpointRoundingMode, DoesNotAffectNumbers) {
    const Trainer from(shapes_of({3}), make_group(DSOPT_ALGORITHM_ADAMW)),
        to(shapes_of({3}), make_group(DSOPT_ALGORITHM_ADAMW));
    set_exact_numbers(from);
    const std::string data = saved(from);
    MemoryFile in{data}, out;
    const dsopt_io reading = in.io(), writing = out.io();
    std::fesetround(GetParam());
    const dsopt_status wrote = dsopt_optimizer_save(from.opt(), nullptr, &writing);
    const dsopt_status read = dsopt_optimizer_load(to.opt(), nullptr, &reading);
    std::fesetround(FE_TONEAREST);
    ASSERT_OK(wrote);
    ASSERT_OK(read);
    EXPECT_TRUE(same(out.data, data));
    EXPECT_TRUE(same(hyper_text(to.opt()), hyper_text(from.opt())));
}

/// Formats numbers as 1.234,5. Unlike a locale of the C library, it is available on every machine.
struct CommaNumbers : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
};

TEST(CheckpointHyper, IgnoresGlobalStreamLocale) {
    const Trainer from(shapes_of({3}), make_group(DSOPT_ALGORITHM_ADAMW)),
        to(shapes_of({3}), make_group(DSOPT_ALGORITHM_ADAMW));
    set_exact_numbers(from);
    const std::string plain = saved(from);
    const std::locale before = std::locale::global(std::locale(std::locale::classic(), new CommaNumbers));
    const std::string data = saved(from);
    const dsopt_status status = load(to, data);
    std::locale::global(before);
    EXPECT_EQ(data, plain);
    EXPECT_EQ(status, DSOPT_OK) << dsopt_last_error();
    EXPECT_TRUE(same(hyper_text(to.opt()), hyper_text(from.opt())));
}

TEST(CheckpointHyper, IgnoresCLocale) {
    const char *const set = std::setlocale(LC_ALL, "de_DE.UTF-8");
    if (set == nullptr) GTEST_SKIP() << "the locale is not installed"; // the test above needs none
    const Trainer from(shapes_of({3}), make_group(DSOPT_ALGORITHM_ADAMW)),
        to(shapes_of({3}), make_group(DSOPT_ALGORITHM_ADAMW));
    set_exact_numbers(from);
    const std::string data = saved(from);
    const dsopt_status status = load(to, data);
    std::setlocale(LC_ALL, "C");
    EXPECT_EQ(status, DSOPT_OK) << dsopt_last_error();
    EXPECT_TRUE(same(saved(from), data));
    EXPECT_TRUE(same(hyper_text(to.opt()), hyper_text(from.opt())));
}

TEST(SaveLoad, RestoresTensorsOfSeveralPieces) {
    const Trainer from(shapes_of({1500000, 3}), make_group(DSOPT_ALGORITHM_ADAMW)),
        to(shapes_of({1500000, 3}), make_group(DSOPT_ALGORITHM_ADAMW));
    from.train(1);
    ASSERT_OK(load(to, saved(from, DSOPT_IO_PARAMS), DSOPT_IO_PARAMS));
    EXPECT_TRUE(same(all_bytes(to), all_bytes(from)));
}

// -------------------------------------------------------------------------------------------------------- wrong calls
TEST(SaveLoad, RefusesInvalidArguments) {
    const Folder folder;
    const std::string path = folder / "x";
    const Trainer trainer(shapes_of({3}), make_group(DSOPT_ALGORITHM_ADAMW));
    dsopt_optimizer *const opt = trainer.opt();
    MemoryFile memory_file;
    dsopt_io io = memory_file.io();
    EXPECT_TRUE(refused(dsopt_optimizer_save(opt, path.c_str(), &io), DSOPT_ERR_ARGUMENT, "path|callback"));
    EXPECT_TRUE(refused(dsopt_optimizer_load(opt, path.c_str(), &io), DSOPT_ERR_ARGUMENT, "path|callback"));
    EXPECT_TRUE(refused(dsopt_optimizer_save(opt, nullptr, nullptr), DSOPT_ERR_ARGUMENT, "path|callback"));
    EXPECT_TRUE(refused(dsopt_optimizer_load(opt, nullptr, nullptr), DSOPT_ERR_ARGUMENT, "path|callback"));
    io.reserved = 1;
    EXPECT_TRUE(refused(dsopt_optimizer_save(opt, nullptr, &io), DSOPT_ERR_ARGUMENT, "reserved"));
    EXPECT_TRUE(refused(dsopt_optimizer_load(opt, nullptr, &io), DSOPT_ERR_ARGUMENT, "reserved"));
    io.reserved = 0;
    io.flags = 1u << 31;
    EXPECT_TRUE(refused(dsopt_optimizer_save(opt, nullptr, &io), DSOPT_ERR_ARGUMENT, "flags|80000000"));
    EXPECT_TRUE(refused(dsopt_optimizer_load(opt, nullptr, &io), DSOPT_ERR_ARGUMENT, "flags|80000000"));
    for (const uint32_t flag : {DSOPT_IO_NO_STATE, DSOPT_IO_NO_MASTERS, DSOPT_IO_NO_HYPER}) { // flags for load only
        io.flags = flag;
        EXPECT_NE(dsopt_optimizer_save(opt, nullptr, &io), DSOPT_OK);
    }
    EXPECT_TRUE(memory_file.data.empty());
    EXPECT_FALSE(fs::exists(path));
}

TEST(SaveLoad, RefusesMissingGroupsOrMemory) {
    const Context context = make_context();
    const Optimizer opt = make_optimizer(context);
    MemoryFile memory_file;
    dsopt_io io = memory_file.io();
    EXPECT_TRUE(refused(dsopt_optimizer_save(opt.get(), nullptr, &io), DSOPT_ERR_STATE, "groups"));
    EXPECT_TRUE(refused(dsopt_optimizer_load(opt.get(), nullptr, &io), DSOPT_ERR_STATE, "groups"));
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
    const dsopt_param param = param_of({nullptr, 5, DSOPT_DTYPE_BF16, 0}, "w");
    ASSERT_OK(dsopt_optimizer_add_group(opt.get(), &group, &param, 1));
    EXPECT_TRUE(refused(dsopt_optimizer_save(opt.get(), nullptr, &io), DSOPT_ERR_STATE,
                        "'w'|memory")); // the master is initialized from the parameter
    io.flags = DSOPT_IO_PARAMS;
    EXPECT_TRUE(refused(dsopt_optimizer_save(opt.get(), nullptr, &io), DSOPT_ERR_STATE, "'w'|memory"));
    EXPECT_TRUE(memory_file.data.empty());
}

TEST(SaveLoad, StopsSaveAtFailedWriteCallback) {
    const Trainer trainer = make_mixed(DSOPT_ALGORITHM_ADAM);
    trainer.train(1);
    const std::string before = all_bytes(trainer);
    for (int n = 0;; ++n) {
        MemoryFile memory_file;
        memory_file.fail_at = n;
        const dsopt_io io = memory_file.io();
        const dsopt_status status = dsopt_optimizer_save(trainer.opt(), nullptr, &io);
        EXPECT_TRUE(same(all_bytes(trainer), before));
        if (memory_file.calls <= n) {
            EXPECT_EQ(status, DSOPT_OK);
            EXPECT_GT(n, 5);
            break;
        }
        ASSERT_TRUE(refused(status, DSOPT_ERR_IO, "4711"));
    }
}

TEST(SaveLoad, ReportsIoErrorForInvalidPaths) {
    const Folder folder;
    const Trainer trainer(shapes_of({3}), make_group(DSOPT_ALGORITHM_ADAMW));
    trainer.train(1);
    const std::string before = all_bytes(trainer);
    EXPECT_TRUE(refused(dsopt_optimizer_save(trainer.opt(), (folder / "no/such/folder").c_str(), nullptr), DSOPT_ERR_IO,
                        "No such file"));
    EXPECT_TRUE(refused(dsopt_optimizer_save(trainer.opt(), folder.path.c_str(), nullptr), DSOPT_ERR_IO, "directory"));
    EXPECT_TRUE(refused(dsopt_optimizer_save(trainer.opt(), "", nullptr), DSOPT_ERR_IO, ""));
    EXPECT_TRUE(refused(dsopt_optimizer_load(trainer.opt(), (folder / "nothing").c_str(), nullptr), DSOPT_ERR_IO,
                        "No such file"));
    EXPECT_TRUE(refused(dsopt_optimizer_load(trainer.opt(), folder.path.c_str(), nullptr), DSOPT_ERR_IO, "directory"));
    EXPECT_TRUE(refused(dsopt_optimizer_load(trainer.opt(), "/dev/null", nullptr), DSOPT_ERR_IO, "regular"));
    EXPECT_TRUE(same(all_bytes(trainer), before));
    EXPECT_TRUE(fs::is_empty(folder.path));
}

} // namespace checkpoint_tests
