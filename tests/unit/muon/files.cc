// SPDX-License-Identifier: Apache-2.0
// Checkpoints of Muon.
#include "support/muon.h"

using namespace test;

LABEL_FILE(long_emulated);

LABEL_FILE(one_thread);

namespace muon_files_tests {

std::string saved(const Trainer &trainer, uint32_t flags = 0) {
    MemoryFile file;
    const dsopt_io io = file.io(flags);
    must(dsopt_optimizer_save(trainer.opt(), nullptr, &io));
    return file.data;
}
dsopt_status load(const Trainer &trainer, const std::string &data, uint32_t flags = 0) {
    MemoryFile file{data};
    const dsopt_io io = file.io(flags);
    return dsopt_optimizer_load(trainer.opt(), nullptr, &io);
}

/// A group of Muon with every form of matrices, and a group of AdamW.
Trainer make_trainer(const dsopt_group &group, const dsopt_optimizer_desc &desc = optimizer_desc(0.7)) {
    Cut flat;
    flat.flat = 3 * 20 * 16;
    flat.rows = 20, flat.cols = 16;
    std::vector<Cut> cuts = {matrix(20, 33, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16),
                             {{17, 48}, 17, 16},
                             {{6, 4, 3, 3}, 6, 36},
                             flat,
                             matrix(0, 8)};
    cuts[1].flags = DSOPT_PARAM_ROWS_ARE_INPUTS;
    std::vector<Shape> shapes = cut_shapes(cuts);
    shapes.push_back({500, DSOPT_DTYPE_F16, DSOPT_DTYPE_F16});
    Trainer trainer(shapes, desc, context_desc(1));
    trainer.add(group, params_of(cuts));
    trainer.add(group_of(DSOPT_ALGORITHM_ADAMW), 1);
    return trainer;
}

TEST(MuonFile, ResumedRunEqualsUninterruptedRun) {
    std::vector<dsopt_group> groups(5, muon_group(DSOPT_DTYPE_BF16));
    groups[1].flags = DSOPT_GROUP_NESTEROV;
    groups[2].flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
    groups[2].exp_avg_format = DSOPT_MOMENT_BF16;
    groups[3].exp_avg_format = DSOPT_MOMENT_BF16_RANDOM;
    groups[4].ns_schedule = DSOPT_NS_YOU;
    groups[4].ns_a = groups[4].ns_b = groups[4].ns_c = 0;
    for (const dsopt_group &group : groups) {
        const Trainer whole = make_trainer(group), first = make_trainer(group), second = make_trainer(group);
        whole.train(1, 53);
        first.train(1, 3);
        const std::string data = saved(first, DSOPT_IO_PARAMS);
        second.train(7); // the load must overwrite all of it
        ASSERT_OK(load(second, data, DSOPT_IO_PARAMS));
        EXPECT_TRUE(same(second.text(), first.text()));
        second.train(4, 53);
        EXPECT_TRUE(same(second.text(), whole.text()));
        EXPECT_EQ(hyper_text(second.opt()), hyper_text(whole.opt()));
    }
}

TEST(MuonFile, RestoresHyperParameters) {
    dsopt_group group = muon_group(DSOPT_DTYPE_F16);
    group.ns_a = 2, group.ns_b = -1.5, group.ns_c = 0.5;
    group.ns_steps = 7;
    group.adjust = DSOPT_ADJUST_SPECTRAL;
    group.momentum = 0.5;
    group.flags = DSOPT_GROUP_NESTEROV;
    dsopt_group preset = muon_group(DSOPT_DTYPE_F16);
    preset.ns_schedule = DSOPT_NS_POLAR_EXPRESS;
    preset.ns_a = preset.ns_b = preset.ns_c = 0;
    for (const dsopt_group &given : {group, preset}) {
        const Trainer from = make_trainer(given), to = make_trainer(muon_group(DSOPT_DTYPE_F16));
        from.train(1, 2);
        EXPECT_NE(hyper_text(to.opt()), hyper_text(from.opt()));
        ASSERT_OK(load(to, saved(from, DSOPT_IO_PARAMS), DSOPT_IO_PARAMS));
        EXPECT_EQ(hyper_text(to.opt()), hyper_text(from.opt()));
        from.train(3, 5);
        to.train(3, 5);
        EXPECT_TRUE(same(to.text(), from.text()));
    }
}

// The dtype of products determines the workspace: it is that of the optimizer that loads.
TEST(MuonFile, KeepsTheDtypeOfProducts) {
    const Trainer from = make_trainer(muon_group(DSOPT_DTYPE_F32)), to = make_trainer(muon_group(DSOPT_DTYPE_BF16));
    from.train(1, 2);
    ASSERT_OK(load(to, saved(from)));
    EXPECT_EQ(get(to.opt(), 0, DSOPT_KEY_NS_DTYPE), DSOPT_DTYPE_BF16);
    EXPECT_EQ(to.state("momentum_buffer", 0), from.state("momentum_buffer", 0));
}

TEST(MuonFile, SavesTheSameBytesAgain) {
    const Trainer trainer = make_trainer(muon_group(DSOPT_DTYPE_BF16));
    trainer.train(1, 2);
    const std::string before = trainer.text(), data = saved(trainer);
    EXPECT_TRUE(same(saved(trainer), data));
    EXPECT_TRUE(same(trainer.text(), before));
    for (const char *text :
         {"muon", "blocks.p1", "17,16", "param_flags.p1", "blocks.p3", "20,16", "ns_steps", "adjust"})
        EXPECT_NE(data.find(text), std::string::npos) << text;
    for (const char *text : {"blocks.p0", "param_flags.p0", "blocks.p5"})
        EXPECT_EQ(data.find(text), std::string::npos) << text;
}

TEST(MuonFile, RefusesOtherMatrices) {
    const auto trainer_of = [](const Cut &cut) {
        Cut named = cut;
        named.name = "weight";
        return muon_trainer({named});
    };
    Cut swapped = matrix(24, 48);
    swapped.flags = DSOPT_PARAM_ROWS_ARE_INPUTS;
    const std::vector<Cut> cuts = {matrix(24, 48), {{24, 48}, 24, 24}, {{24, 48}, 12, 48}, {{24, 48}, 24, 12}, swapped};
    for (size_t i = 0; i < cuts.size(); ++i) {
        const Trainer from = trainer_of(cuts[i]);
        from.train(1, 2);
        const std::string data = saved(from);
        for (size_t k = 0; k < cuts.size(); ++k) {
            const Trainer to = trainer_of(cuts[k]);
            to.train(3);
            const std::string before = to.text();
            if (i == k) {
                EXPECT_OK(load(to, data));
                continue;
            }
            const bool flags = cuts[i].rows == cuts[k].rows && cuts[i].cols == cuts[k].cols;
            EXPECT_TRUE(
                refused(load(to, data), DSOPT_ERR_MISMATCH, flags ? "weight|ROWS_ARE_INPUTS" : "weight|matrix blocks"))
                << i << " into " << k;
            EXPECT_TRUE(same(to.text(), before));
        }
    }
    // Rows and cols of the whole matrix are the matrix.
    const Trainer whole = trainer_of({{24, 48}, 24, 48});
    const Trainer plain = trainer_of(matrix(24, 48));
    plain.train(1);
    EXPECT_OK(load(whole, saved(plain)));
    EXPECT_OK(load(plain, saved(whole)));
}

TEST(MuonFile, RefusesOtherAlgorithms) {
    const Trainer muon = muon_trainer({matrix(4, 6)});
    muon.train(1);
    for (const int32_t algorithm : {DSOPT_ALGORITHM_SGD, DSOPT_ALGORITHM_ADAMW}) {
        dsopt_group group = group_of(algorithm);
        if (algorithm == DSOPT_ALGORITHM_SGD) group.momentum = 0.9;
        Trainer other(cut_shapes(std::vector<Cut>{matrix(4, 6)}), optimizer_desc());
        other.add(group, params_of({matrix(4, 6)}));
        other.train(1);
        EXPECT_TRUE(refused(load(other, saved(muon)), DSOPT_ERR_MISMATCH, "muon"));
        EXPECT_TRUE(refused(load(muon, saved(other)), DSOPT_ERR_MISMATCH, "muon"));
    }
}

// A momentum that was saved in BF16 is loaded as F32 with DSOPT_IO_CONVERT only, and the other way round.
TEST(MuonFile, ConvertsTheFormatOfTheMomentum) {
    dsopt_group narrow = muon_group();
    narrow.exp_avg_format = DSOPT_MOMENT_BF16;
    const Trainer from = muon_trainer({matrix(20, 33)}, narrow), to = muon_trainer({matrix(20, 33)});
    from.train(1, 2);
    EXPECT_TRUE(refused(load(to, saved(from)), DSOPT_ERR_MISMATCH, "momentum_buffer"));
    EXPECT_OK(load(to, saved(from), DSOPT_IO_CONVERT));
    EXPECT_EQ(to.state("momentum_buffer", 0), from.state("momentum_buffer", 0));
}

} // namespace muon_files_tests
