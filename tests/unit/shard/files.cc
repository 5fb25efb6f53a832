// SPDX-License-Identifier: Apache-2.0
// Checkpoints of sharded state: any number of ranks loads what any other number saved, and goes on with the same bits.
#include "support/file.h"
#include "support/shard.h"
#include <atomic>
#include <sys/resource.h>

using namespace test;

namespace shard_files_tests {

/// Ranks and options of a run. Without a flag state is not sharded.
const std::vector<Topology> kRuns = {{1, 1, 0},
                                     {1, 1},
                                     {1, 2},
                                     {1, 3},
                                     {1, 5},
                                     {2, 2},
                                     {3, 2},
                                     {2, 2, DSOPT_OPTIMIZER_SHARD_NODE},
                                     {1, 3, 0},
                                     {1, 3, DSOPT_OPTIMIZER_SHARD, 4096},
                                     {2, 2, DSOPT_OPTIMIZER_SHARD_NODE, 8192}};

/// The files of all ranks after some steps, and the training on one rank that they belong to.
struct Saved {
    std::vector<MemoryFile> files;
    std::vector<const MemoryFile *> list() const {
        std::vector<const MemoryFile *> list;
        for (const MemoryFile &file : files) list.push_back(&file);
        return list;
    }
};

dsopt_optimizer_desc desc_of(const ShardTraining &training, const Topology &topology, const NodeRank &rank) {
    dsopt_optimizer_desc desc = training.desc;
    desc.flags |= int32_t(topology.flag);
    desc.bucket = topology.bucket;
    desc.data = rank.data.get();
    if (topology.per_node > 1) desc.node = rank.node.get();
    return desc;
}
void train_steps(const ShardTraining &training, Trainer &trainer, int64_t from, int64_t to) {
    for (int64_t step = from; step <= to; ++step) must(trainer.step(training.gradients(step)));
}
int number_of(const NodeRank &rank, const Topology &topology) { return rank.l * topology.nodes + rank.d; }

Saved save_after(const ShardTraining &training, const Topology &topology, int64_t steps, uint32_t flags = 0) {
    Saved saved;
    saved.files.resize(size_t(topology.ranks()));
    with_nodes(topology.per_node, topology.nodes, [&](const NodeRank &rank) {
        Scaler scaler;
        Trainer trainer = training.trainer(rank.ctx, desc_of(training, topology, rank), scaler);
        train_steps(training, trainer, 1, steps);
        must(saved.files[size_t(number_of(rank, topology))].save(trainer, flags));
    });
    return saved;
}

/// Loads the files and trains on; compares with a training on one rank that was not interrupted.
void expect_resumed(const ShardTraining &training, const Topology &topology, const Saved &saved, int64_t steps,
                    uint32_t flags = 0) {
    with_nodes(topology.per_node, topology.nodes, [&](const NodeRank &rank) {
        Scaler scaler, one_scaler;
        Trainer whole = training.trainer(rank.ctx, training.desc, one_scaler);
        train_steps(training, whole, 1, steps);
        Trainer resumed = training.trainer(rank.ctx, desc_of(training, topology, rank), scaler);
        // Masters that are half in the parameters come with them.
        if (!(flags & DSOPT_IO_PARAMS) && training.desc.masters != DSOPT_MASTERS_REMAINDER) // the caller's weights
            for (size_t i = 0; i < resumed.weights().size(); ++i) resumed.weight(i).write(whole.weight(i).text());
        const std::vector<const MemoryFile *> list = saved.list();
        if (list.size() == 1 && topology.ranks() == 1 && topology.flag == 0) {
            MemoryFile file = *list[0];
            ASSERT_OK(file.load(resumed, flags));
        } else {
            ASSERT_OK(load_all(resumed.opt(), list, flags));
        }
        // Before a step, which would gather weights that only some ranks have loaded.
        for (size_t i = 0; i < whole.weights().size(); ++i)
            ASSERT_TRUE(same(resumed.weight(i).text(), whole.weight(i).text()))
                << "weights of tensor " << i << ", loaded";
        for (int64_t step = steps + 1; step <= steps + 3; ++step) {
            must(whole.step(training.gradients(step)));
            ASSERT_OK(resumed.step(training.gradients(step)));
        }
        for (size_t i = 0; i < whole.weights().size(); ++i)
            ASSERT_TRUE(same(resumed.weight(i).text(), whole.weight(i).text())) << "weights of tensor " << i;
        for (int64_t i = 0; i < state_count(whole.opt()); ++i) {
            const StatePart part = part_of_state(resumed.opt(), i);
            const dsopt_state_info info = state_info(whole.opt(), i);
            const size_t size = size_of(info.tensor.dtype);
            ASSERT_TRUE(
                same(exported_text(resumed.opt(), i),
                     exported_text(whole.opt(), i).substr(size_t(part.begin) * size, size_t(part.numel) * size)))
                << info.name << " of parameter " << info.param;
        }
        EXPECT_EQ(resumed.report().calls, whole.report().calls);
    });
}

class ShardFiles : public testing::TestWithParam<Topology> {};
INSTANTIATE_TEST_SUITE_P(, ShardFiles, testing::ValuesIn(kRuns), topology_name);

// Masters, two rules, a loss scale.
LABEL_PARAMS(long_emulated, "[135]x*");
LABEL_PARAMS(long_emulated, "2x[12]");
TEST_P(ShardFiles, AreLoadedByAnyNumberOfRanks) {
    const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW), group_of(DSOPT_ALGORITHM_LAMB)},
                                 .param = DSOPT_DTYPE_BF16,
                                 .grad = DSOPT_DTYPE_BF16,
                                 .scaled = true,
                                 .absent = 4};
    const Saved saved = save_after(training, GetParam(), 3);
    for (const Topology &topology : kRuns) {
        SCOPED_TRACE(topology.name());
        expect_resumed(training, topology, saved, 3);
        if (HasFatalFailure()) return;
    }
}

LABEL(long_emulated);
TEST_P(ShardFiles, HaveParametersForAnyNumberOfRanks) {
    const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}};
    const Saved saved = save_after(training, GetParam(), 2, DSOPT_IO_PARAMS);
    for (const Topology &topology : kRuns) {
        SCOPED_TRACE(topology.name());
        expect_resumed(training, topology, saved, 2, DSOPT_IO_PARAMS);
        if (HasFatalFailure()) return;
    }
}

// Tensors of Muon are whole on one rank.
LABEL(long_emulated);
TEST_P(ShardFiles, HaveWholeMatricesForAnyNumberOfRanks) {
    dsopt_group muon;
    must(dsopt_group_init(&muon, sizeof muon, DSOPT_ALGORITHM_MUON));
    const ShardTraining training{.groups = {muon, group_of(DSOPT_ALGORITHM_ADAMW)},
                                 .param = DSOPT_DTYPE_BF16,
                                 .grad = DSOPT_DTYPE_BF16,
                                 .sizes = {24 * 40, 96 * 16, 0, 700, 5000, 0},
                                 .blocks = {{24, 40}, {48, 16}, {8, 8}}};
    const Saved saved = save_after(training, GetParam(), 2);
    for (const Topology &topology : kRuns) {
        SCOPED_TRACE(topology.name());
        expect_resumed(training, topology, saved, 2);
        if (HasFatalFailure()) return;
    }
}

// Codes with scales, and masters that are half in the parameters.
LABEL(long_emulated);
TEST_P(ShardFiles, HaveLowPrecisionStateForAnyNumberOfRanks) {
    for (const FormatCase &c : few_format_cases()) {
        const ShardTraining training{.groups = {c.group()},
                                     .param = DSOPT_DTYPE_BF16,
                                     .grad = DSOPT_DTYPE_BF16,
                                     .desc = format_desc(DSOPT_MASTERS_REMAINDER)};
        const Saved saved = save_after(training, GetParam(), 2);
        for (const Topology &topology : kFewTopologies) {
            SCOPED_TRACE(c.name() + topology.name());
            expect_resumed(training, topology, saved, 2);
            if (HasFatalFailure()) return;
        }
    }
}

// Another format here than in the files.
TEST(ShardedFile, ConvertsFormatsPieceByPiece) {
    const ShardTraining codes{.groups = {FormatCase{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_Q8, DSOPT_MOMENT_Q8}}.group()},
                              .desc = format_desc()};
    const ShardTraining floats{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .desc = format_desc()};
    const Saved saved = save_after(codes, {1, 3}, 2), one = save_after(codes, {1, 1, 0}, 2);
    with_nodes(1, 2, [&](const NodeRank &rank) {
        Scaler none;
        Trainer whole = floats.trainer(rank.ctx, floats.desc, none);
        MemoryFile file = one.files[0];
        ASSERT_OK(file.load(whole, DSOPT_IO_CONVERT));
        Trainer parts = floats.trainer(rank.ctx, desc_of(floats, {1, 2}, rank), none);
        EXPECT_TRUE(refused(load_all(parts.opt(), saved.list()), DSOPT_ERR_MISMATCH, "has dtype U8, here it is F32"));
        ASSERT_OK(load_all(parts.opt(), saved.list(), DSOPT_IO_CONVERT));
        for (int64_t i = 0; i < state_count(whole.opt()); ++i) {
            const StatePart part = part_of_state(parts.opt(), i);
            const size_t size = size_of(part.info.tensor.dtype);
            EXPECT_TRUE(
                same(exported_text(parts.opt(), i),
                     exported_text(whole.opt(), i).substr(size_t(part.begin) * size, size_t(part.numel) * size)));
        }
    });
}

TEST(ShardedFile, NamesPiecesByTheirFirstElement) {
    const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .sizes = {10000, 300}};
    const Saved saved = save_after(training, {1, 2}, 1);
    const auto has = [&](size_t rank, const std::string &text) {
        return saved.files[rank].data.find("\"" + text + "\":") != std::string::npos;
    };
    EXPECT_TRUE(has(0, "t0.exp_avg@0") && !has(1, "t0.exp_avg@0"));
    EXPECT_TRUE(has(1, "t0.exp_avg@8192") && !has(0, "t0.exp_avg@8192"));
    EXPECT_TRUE(has(1, "t1.exp_avg") && !has(0, "t1.exp_avg"));
    EXPECT_TRUE(has(0, "optimizer.step") && has(1, "optimizer.step"));
    EXPECT_TRUE(has(0, "shape.t0") && has(0, "save_id") && !has(0, "shape.t1"));
}

TEST(ShardedFile, IsThatOfUnshardedStateWithOneRank) {
    const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}};
    EXPECT_EQ(save_after(training, {1, 1}, 2).files[0].data, save_after(training, {1, 1, 0}, 2).files[0].data);
}

TEST(ShardedFile, OfEveryRankIsNeededOnce) {
    const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}};
    const Saved saved = save_after(training, {1, 3}, 1), other = save_after(training, {1, 3}, 1);
    const Context context = make_context(1);
    Scaler none;
    Trainer trainer = training.trainer(context, training.desc, none);
    const std::string before = trainer.text();
    const auto load = [&](const std::vector<const MemoryFile *> &files) { return load_all(trainer.opt(), files); };
    EXPECT_TRUE(refused(load({&saved.files[0], &saved.files[2]}), DSOPT_ERR_MISMATCH, "rank 1 is not there"));
    EXPECT_TRUE(refused(load({&saved.files[0], &saved.files[1], &saved.files[1]}), DSOPT_ERR_MISMATCH,
                        "second file of rank 1"));
    MemoryFile alone = saved.files[0];
    EXPECT_TRUE(refused(alone.load(trainer), DSOPT_ERR_MISMATCH, "rank 1 is not there"));
    EXPECT_TRUE(refused(load({&saved.files[0], &saved.files[1], &other.files[2]}), DSOPT_ERR_MISMATCH,
                        "file of rank 2 is of another save than that of rank 0"));
    EXPECT_EQ(trainer.text(), before);
    EXPECT_OK(load({&saved.files[2], &saved.files[0], &saved.files[1]}));
}

// Pieces of three ranks: [0, 8192), [8192, 16384) and [16384, 20000).
TEST(ShardedFile, WithAGapOrAnOverlapIsRefused) {
    const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .sizes = {20000, 300}};
    const Saved saved = save_after(training, {1, 3}, 1);
    const Context context = make_context(1);
    Scaler none;
    Trainer trainer = training.trainer(context, training.desc, none);
    const std::string before = trainer.text();
    for (const auto &[name, text] : std::initializer_list<std::pair<std::string, std::string>>{
             {"t0.exp_avg@4096", R"("t0.exp_avg": elements 4096 to 8191 are in the files of ranks 0 and 1)"},
             {"t0.exp_avg@8256", R"("t0.exp_avg": elements 8192 to 8255 are in no file)"},
             {"t0.other@8192", R"("t0.exp_avg": elements 8192 to 16383 are in no file)"},
             {"t0.exp_avg@12288", R"("t0.exp_avg": the checkpoint has 8192 elements from 12288 on, here it has 20000)"},
             {"t0.exp_avg@9223372036854775808", R"("t0.exp_avg": elements 8192 to 16383 are in no file)"},
             {"t0.exp_avg@-8192", R"("t0.exp_avg": elements 8192 to 16383 are in no file)"}}) {
        MemoryFile edited = saved.files[1];
        edited.data = with_tensor_name(edited.data, "t0.exp_avg@8192", name);
        EXPECT_TRUE(
            refused(load_all(trainer.opt(), {&saved.files[0], &edited, &saved.files[2]}), DSOPT_ERR_MISMATCH, text));
        EXPECT_EQ(trainer.text(), before) << name;
    }
    MemoryFile last = saved.files[2];
    last.data = with_tensor_name(last.data, "t0.exp_avg@16384", "t0.exp_avg@9223372036854775807");
    EXPECT_TRUE(refused(load_all(trainer.opt(), {&saved.files[0], &saved.files[1], &last}), DSOPT_ERR_MISMATCH,
                        R"("t0.exp_avg": the checkpoint has 3616 elements from 9223372036854775807 on)"));
    EXPECT_EQ(trainer.text(), before);
    EXPECT_OK(load_all(trainer.opt(), saved.list()));
}

// A rank reads the files of all ranks, and may have fewer of them open at once.
TEST(ShardedFile, IsLoadedFromMoreFilesThanAProcessMayHaveOpen) {
    ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}};
    training.sizes = {5000, 70, 4096};
    const Saved saved = save_after(training, {1, 66}, 1);
    const Folder folder;
    std::vector<std::string> paths;
    for (const MemoryFile &file : saved.files) {
        paths.push_back(folder / std::to_string(paths.size()));
        write_file(paths.back(), file.data);
    }
    std::vector<const char *> list;
    for (const std::string &path : paths) list.push_back(path.c_str());
    Scaler none;
    const Context context = make_context(1);
    Trainer trainer = training.trainer(context, training.desc, none);
    DSOPT_NEW(dsopt_io, io);
    io.files = int32_t(list.size());
    io.paths = list.data();
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    const auto opened = std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
    const rlimit few{rlim_t(opened) + 10, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    const dsopt_status status = dsopt_optimizer_load(trainer.opt(), nullptr, &io);
    const std::string text = dsopt_last_error();
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    EXPECT_EQ(status, DSOPT_OK) << text;
    EXPECT_EQ(trainer.report().calls, 1);
}

TEST(ShardedFile, IsLoadedByAllRanksOrByNone) {
    const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}};
    const Saved saved = save_after(training, {1, 3}, 1), other = save_after(training, {1, 3}, 1);
    with_nodes(1, 3, [&](const NodeRank &rank) {
        Scaler none;
        Trainer trainer = training.trainer(rank.ctx, desc_of(training, {1, 3}, rank), none);
        for (const int64_t call : {1, 2}) must(trainer.step(training.gradients(call))); // a call more than the files
        const std::string before = trainer.text();
        std::vector<MemoryFile> files = saved.files;
        if (rank.d == 2) files[2].data[files[2].data.size() - 1] ^= 1;
        std::vector<const MemoryFile *> list;
        for (const MemoryFile &file : files) list.push_back(&file);
        const dsopt_status status = load_all(trainer.opt(), list);
        if (rank.d == 2)
            EXPECT_TRUE(refused(status, DSOPT_ERR_CHECKSUM));
        else
            EXPECT_TRUE(refused(status, DSOPT_ERR_MISMATCH, "rank 2 refuses its files, so no rank loads"));
        EXPECT_EQ(trainer.text(), before);
        EXPECT_TRUE(refused(load_all(trainer.opt(), rank.d == 1 ? other.list() : saved.list()), DSOPT_ERR_MISMATCH,
                            "ranks load files of different saves"));
        EXPECT_EQ(trainer.text(), before);
        EXPECT_OK(load_all(trainer.opt(), saved.list()));
    });
}

TEST(ShardedFile, IsSavedByAllRanksOrByNone) {
    const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}};
    const Folder folder;
    with_nodes(1, 3, [&](const NodeRank &rank) {
        Scaler none;
        Trainer trainer = training.trainer(rank.ctx, desc_of(training, {1, 3}, rank), none);
        must(trainer.step(training.gradients(1)));
        const std::string path = folder / (std::to_string(rank.d) + ".safetensors");
        ASSERT_OK(dsopt_optimizer_save(trainer.opt(), path.c_str(), nullptr));
        const std::string first = read_file(path);
        must(trainer.step(training.gradients(2)));
        const std::string missing = folder / "missing/x.safetensors";
        for (const bool argument : {false, true}) {
            DSOPT_NEW(dsopt_io, io);
            io.flags = rank.d == 1 && argument ? int32_t(DSOPT_IO_NO_STATE) : 0;
            const std::string &target = rank.d == 1 && !argument ? missing : path;
            const dsopt_status status = dsopt_optimizer_save(trainer.opt(), target.c_str(), &io);
            if (rank.d == 1)
                EXPECT_TRUE(refused(status, argument ? DSOPT_ERR_ARGUMENT : DSOPT_ERR_IO));
            else
                EXPECT_TRUE(refused(status, DSOPT_ERR_MISMATCH, "rank 1 could not save"));
            EXPECT_EQ(read_file(path), first);
        }
        ASSERT_OK(dsopt_optimizer_save(trainer.opt(), path.c_str(), nullptr));
        EXPECT_NE(read_file(path), first);
    });
    EXPECT_EQ(folder.entries(), 3u); // no temporary file
}

void set_all(const Trainer &trainer, int32_t key, double value) {
    must(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, key, value));
}
void set_steps(const Trainer &trainer, const std::vector<int32_t> &steps) {
    must(dsopt_optimizer_import(trainer.opt(), state_index(trainer.opt(), -1, "step"), steps.data(), steps.size() * 4));
}

// A load compares these, whatever its flags, so such files could never be loaded.
TEST(ShardedFile, IsNotSavedIfRanksDifferInWhatALoadCompares) {
    struct Difference {
        std::string text;
        void (*change)(const Trainer &), (*restore)(const Trainer &);
        uint32_t flags = 0; // of dsopt_io on one rank
    };
    const std::vector<Difference> differences = {
        {"\"group.0.lr\", which is", [](const Trainer &t) { set_all(t, DSOPT_KEY_LR, 0.5); },
         [](const Trainer &t) { set_all(t, DSOPT_KEY_LR, 1e-2); }},
        {"\"max_norm\", which is", [](const Trainer &t) { set_all(t, DSOPT_KEY_MAX_NORM, 7); },
         [](const Trainer &t) { set_all(t, DSOPT_KEY_MAX_NORM, 0); }},
        {"\"calls\", which is", [](const Trainer &t) { set_all(t, DSOPT_KEY_CALLS, 100); },
         [](const Trainer &t) { set_all(t, DSOPT_KEY_CALLS, 2); }},
        {"\"optimizer.step\"",
         [](const Trainer &t) {
             set_steps(t, {1, 2});
         },
         [](const Trainer &t) {
             set_steps(t, {2, 2});
         }},
        {"\"dsopt_io.flags\", which is", [](const Trainer &) {}, [](const Trainer &) {}, DSOPT_IO_PARAMS}};
    const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .sizes = {9000, 300}};
    const Folder folder;
    Saved saved;
    saved.files.resize(2);
    with_nodes(1, 2, [&](const NodeRank &rank) {
        Scaler none;
        Trainer trainer = training.trainer(rank.ctx, desc_of(training, {1, 2}, rank), none);
        for (const int64_t call : {1, 2}) must(trainer.step(training.gradients(call)));
        const std::string path = folder / std::to_string(rank.d);
        for (const Difference &difference : differences) {
            SCOPED_TRACE(difference.text);
            if (rank.d == 1) difference.change(trainer);
            DSOPT_NEW(dsopt_io, io);
            io.flags = rank.d == 1 ? difference.flags : 0;
            EXPECT_TRUE(refused(dsopt_optimizer_save(trainer.opt(), path.c_str(), &io), DSOPT_ERR_MISMATCH,
                                "dsopt_optimizer_save: ranks differ in " + difference.text));
            EXPECT_FALSE(std::filesystem::exists(path));
            if (rank.d == 1) difference.restore(trainer);
        }
        ASSERT_OK(saved.files[size_t(rank.d)].save(trainer, DSOPT_IO_PARAMS));
    });
    EXPECT_EQ(folder.entries(), 0u);
    for (const Topology &topology : {Topology{1, 1}, Topology{1, 3}})
        expect_resumed(training, topology, saved, 2, DSOPT_IO_PARAMS);
}

TEST(ShardedFile, IsNeitherSavedNorLoadedIfRanksMakeDifferentCalls) {
    const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}};
    const Saved saved = save_after(training, {1, 2}, 1);
    const Folder folder;
    with_nodes(1, 2, [&](const NodeRank &rank) {
        Scaler none;
        Trainer trainer = training.trainer(rank.ctx, desc_of(training, {1, 2}, rank), none);
        for (const int64_t call : {1, 2}) must(trainer.step(training.gradients(call)));
        const std::string before = trainer.text(), path = folder / "file";
        const dsopt_status status = rank.d == 0 ? dsopt_optimizer_save(trainer.opt(), path.c_str(), nullptr)
                                                : load_all(trainer.opt(), saved.list());
        EXPECT_TRUE(refused(status, DSOPT_ERR_MISMATCH, "another rank is in another call"));
        EXPECT_EQ(trainer.text(), before);
        EXPECT_OK(load_all(trainer.opt(), saved.list())); // the ranks can go on
    });
    EXPECT_EQ(folder.entries(), 0u);
}

TEST(ShardedFile, OfTwoRanksInOnePlaceIsReportedByBoth) {
    const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}};
    const Folder folder;
    std::atomic<int> replaced{0};
    with_nodes(1, 2, [&](const NodeRank &rank) {
        Scaler none;
        Trainer trainer = training.trainer(rank.ctx, desc_of(training, {1, 2}, rank), none);
        must(trainer.step(training.gradients(1)));
        const std::string path = folder / "one";
        const dsopt_status status = dsopt_optimizer_save(trainer.opt(), path.c_str(), nullptr);
        EXPECT_EQ(status, DSOPT_ERR_MISMATCH);
        const std::string text = dsopt_last_error();
        if (text.find("another rank, or another program, saved to the same path") != std::string::npos)
            ++replaced;
        else
            EXPECT_NE(text.find("could not put its file in place"), std::string::npos) << text;
        const std::string own = folder / std::to_string(rank.d);
        EXPECT_OK(dsopt_optimizer_save(trainer.opt(), own.c_str(), nullptr));
    });
    EXPECT_EQ(replaced, 1);
}

TEST(ShardedFile, IsNotLoadedWithOtherFlagsOrFilesOnAnotherRank) {
    const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}};
    const Saved saved = save_after(training, {1, 2}, 1);
    const Saved first = save_after(training, {1, 1, 0}, 1), second = save_after(training, {1, 1, 0}, 2); // unsharded
    with_nodes(1, 2, [&](const NodeRank &rank) {
        Scaler none;
        Trainer trainer = training.trainer(rank.ctx, desc_of(training, {1, 2}, rank), none);
        for (const int64_t call : {1, 2, 3}) must(trainer.step(training.gradients(call)));
        const std::string before = trainer.text();
        for (const uint32_t flag : {uint32_t(DSOPT_IO_NO_STATE), uint32_t(DSOPT_IO_NO_HYPER)})
            EXPECT_TRUE(refused(load_all(trainer.opt(), saved.list(), rank.d == 1 ? flag : 0), DSOPT_ERR_MISMATCH,
                                "ranks differ in \"dsopt_io.flags\", which is"));
        EXPECT_TRUE(refused(load_all(trainer.opt(), (rank.d == 1 ? first : second).list()), DSOPT_ERR_MISMATCH,
                            "dsopt_optimizer_load: ranks differ in"));
        EXPECT_EQ(trainer.text(), before);
        EXPECT_OK(load_all(trainer.opt(), first.list()));
    });
}

// As earlier versions saved them, if the learning rate was not the same on all ranks.
TEST(ShardedFile, WithOtherHyperParametersIsLoadedWithoutThem) {
    const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW, 0.125)}};
    const Saved saved = save_after(training, {1, 2}, 1);
    MemoryFile edited = saved.files[1];
    edited.data = with_header(edited.data, R"("group.0.lr":"0.125")", R"("group.0.lr":"0.25")");
    const Context context = make_context(1);
    Scaler none;
    Trainer trainer = training.trainer(context, training.desc, none);
    const std::vector<const MemoryFile *> list = {&saved.files[0], &edited};
    EXPECT_TRUE(refused(load_all(trainer.opt(), list), DSOPT_ERR_MISMATCH, "group.0.lr"));
    ASSERT_OK(load_all(trainer.opt(), list, DSOPT_IO_NO_HYPER));
    EXPECT_EQ(trainer.report().calls, 1);
    EXPECT_EQ(trainer.get(DSOPT_KEY_LR), 0.125);
}

} // namespace shard_files_tests
