// SPDX-License-Identifier: Apache-2.0
// The bits do not depend on instruction set, threads, hooks, order and packing of the list, or on the form of the call.
#include "support/caller_memory.h"
#include "support/muon.h"
#include <numeric>

using namespace test;

LABEL_FILE(long_emulated);

namespace muon_bits_tests {

/// Sizes at the edges of tiles and leaves, several matrices of one shape, and an empty one.
std::vector<Cut> all_cuts() {
    return {matrix(64, 64),      matrix(130, 70), matrix(33, 257), matrix(16, 16),  {{3, 40, 40}, 40, 40},
            {{40, 120}, 40, 40}, matrix(40, 40),  matrix(1, 300),  matrix(300, 1),  matrix(15, 31),
            matrix(0, 8),        matrix(1, 1),    matrix(70, 130), {{8, 24}, 8, 8}, matrix(200, 180)};
}

/// Trains with one product dtype and returns weights and state.
std::string trained(int32_t products, int32_t threads, const char *isa = nullptr,
                    const std::function<void(dsopt_context_desc &)> &change = {}) {
    dsopt_context_desc context = context_desc(threads);
    if (change) change(context);
    if (isa != nullptr) setenv("DSOPT_ISA", isa, 1);
    const Trainer trainer =
        muon_trainer(all_cuts(), muon_group(products), optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS), context);
    unsetenv("DSOPT_ISA");
    trainer.train(1, 2);
    const dsopt_report report = trainer.report();
    std::string text = trainer.text();
    for (const double norm : {report.grad_norm, report.weight_norm, report.update_norm})
        text.append(reinterpret_cast<const char *>(&norm), sizeof norm);
    return text;
}

class MuonBits : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Products, MuonBits, testing::ValuesIn(kDtypes),
                         [](const auto &info) { return dtype_name(info.param); });

TEST_P(MuonBits, AreTheSameForAnyNumberOfThreads) {
    const std::string wanted = trained(GetParam(), 1);
    for (const int32_t threads : {2, 3, 4}) EXPECT_TRUE(same(trained(GetParam(), threads), wanted)) << threads;
}

TEST_P(MuonBits, AreTheSameWithHooks) {
    const std::string wanted = trained(GetParam(), 1);
    Workers workers;
    EXPECT_TRUE(same(trained(GetParam(), 4, nullptr,
                             [&](dsopt_context_desc &desc) {
                                 desc.parallel_for = Workers::run;
                                 desc.user = &workers;
                             }),
                     wanted));
    for (const auto hook : {run_reversed, run_in_order})
        EXPECT_TRUE(
            same(trained(GetParam(), 4, nullptr, [&](dsopt_context_desc &desc) { desc.parallel_for = hook; }), wanted));
}

LABEL(one_thread);
TEST_P(MuonBits, AreTheSameOnAllInstructionSets) {
    const std::string wanted = trained(GetParam(), 1);
    for (const char *isa : kIsas) EXPECT_TRUE(same(trained(GetParam(), 1, isa), wanted)) << isa;
}

// Each matrix alone, and the list in reverse and in halves: packing into batches changes nothing.
LABEL(one_thread);
TEST_P(MuonBits, AreTheSameForAnyOrderAndPacking) {
    const std::vector<Cut> cuts = all_cuts();
    const auto train_list = [&](const std::vector<size_t> &order) {
        std::vector<Cut> list;
        std::vector<Shape> shapes;
        for (const size_t i : order) {
            list.push_back(cuts[i]);
            shapes.push_back({cuts[i].numel(), DSOPT_DTYPE_F32, DSOPT_DTYPE_F32, 0, int64_t(i)});
        }
        Trainer trainer(shapes, optimizer_desc());
        trainer.add(muon_group(GetParam()), params_of(list));
        trainer.train(1, 2);
        std::map<size_t, std::string> texts;
        for (size_t k = 0; k < order.size(); ++k)
            texts[order[k]] = trainer.model.params[k].text() +
                              exported_text(trainer.opt(), state_index(trainer.opt(), int64_t(k), "momentum_buffer"));
        return texts;
    };
    std::vector<size_t> all(cuts.size());
    std::iota(all.begin(), all.end(), size_t(0));
    const std::map<size_t, std::string> wanted = train_list(all);
    const auto expect_wanted = [&](const std::vector<size_t> &order) {
        for (const auto &[i, text] : train_list(order)) EXPECT_TRUE(same(text, wanted.at(i))) << i;
    };
    expect_wanted({all.rbegin(), all.rend()});
    expect_wanted({all.begin(), all.begin() + 7});
    expect_wanted({all.begin() + 7, all.end()});
    for (const size_t i : all) expect_wanted({i});
}

// One group, or one for each parameter.
LABEL(one_thread);
TEST_P(MuonBits, AreTheSameForAnyPartitionIntoGroups) {
    const std::vector<Cut> cuts = all_cuts();
    Trainer groups(cut_shapes(cuts), optimizer_desc());
    for (const Cut &cut : cuts) groups.add(muon_group(GetParam()), params_of({cut}));
    const Trainer one = muon_trainer(cuts, muon_group(GetParam()));
    groups.train(1, 2);
    one.train(1, 2);
    EXPECT_TRUE(same(groups.text(), one.text()));
}

LABEL(one_thread);
TEST_P(MuonBits, AreTheSameInStepAndApply) {
    const Trainer trainer = muon_trainer(all_cuts(), muon_group(GetParam()));
    CallerMemory pure(trainer.opt(), trainer.model.params, 0x7f);
    must(pure.init());
    for (uint64_t t = 1; t <= 2; ++t) {
        trainer.train(t);
        must(pure.apply(trainer.model.grads));
    }
    EXPECT_TRUE(same(pure.text(), trainer.text()));
    EXPECT_TRUE(pure.intact());
}

// Tensors need the alignment of their elements only.
LABEL(one_thread);
TEST_P(MuonBits, AreTheSameAtAnyAlignment) {
    for (const int32_t dtype : kDtypes) {
        const std::vector<Cut> cuts = {matrix(33, 70, dtype, dtype), {{17, 51}, 17, 17, 0, dtype, dtype}};
        const auto train_at = [&](size_t offset) {
            std::vector<Shape> shapes = cut_shapes(cuts);
            for (Shape &shape : shapes) shape.offset = offset;
            Trainer trainer(shapes, optimizer_desc());
            trainer.add(muon_group(GetParam()), params_of(cuts));
            trainer.train(1, 2);
            EXPECT_TRUE(trainer.model.intact());
            return trainer.text();
        };
        const std::string wanted = train_at(0);
        for (const size_t offset : {size_of(dtype), 12 * size_of(dtype)}) EXPECT_TRUE(same(train_at(offset), wanted));
    }
}

} // namespace muon_bits_tests
