// SPDX-License-Identifier: Apache-2.0
// Matrix blocks of a parameter. Each form has the bits of an optimizer in which every matrix is a parameter.
#include "support/muon.h"

using namespace test;

LABEL_FILE(one_thread);

namespace muon_blocks_tests {

/// Trains one parameter, and its matrices as parameters of their own, and compares weights and momenta.
void expect_cut(const Cut &cut, size_t matrices, const dsopt_group &group = muon_group(DSOPT_DTYPE_BF16)) {
    const std::vector<Matrix> blocks = matrices_of(cut);
    ASSERT_EQ(blocks.size(), matrices);
    std::vector<Cut> apart;
    for (const Matrix &block : blocks)
        apart.push_back({{block.rows, block.cols}, 0, 0, cut.flags, cut.param, cut.grad});
    const Trainer whole = muon_trainer({cut}, group), pieces = muon_trainer(apart, group);
    const auto scatter = [&](const Array &from, const std::vector<Array> &to) {
        for (size_t b = 0; b < blocks.size(); ++b)
            for (size_t k = 0; k < blocks[b].at.size(); ++k) to[b].set(k, from[blocks[b].at[k]]);
    };
    scatter(whole.model.params[0], pieces.model.params);
    for (uint64_t t = 1; t <= 3; ++t) {
        whole.model.make_gradients(t);
        scatter(whole.model.grads[0], pieces.model.grads);
        must(whole.step(whole.arguments()));
        must(pieces.step(pieces.arguments()));
    }
    const std::vector<float> weights = whole.model.params[0].floats(), momenta = whole.state("momentum_buffer", 0);
    for (size_t b = 0; b < blocks.size(); ++b) {
        std::vector<float> block_weights, block_momenta;
        for (const size_t i : blocks[b].at) {
            block_weights.push_back(weights[i]);
            block_momenta.push_back(momenta[i]);
        }
        ASSERT_TRUE(same_bits(pieces.model.params[b].floats(), block_weights)) << "matrix " << b;
        ASSERT_TRUE(same_bits(pieces.state("momentum_buffer", int64_t(b)), block_momenta)) << "matrix " << b;
    }
    EXPECT_TRUE(whole.model.intact());
}

TEST(MuonBlocks, TakesTwoDimsAsOneMatrix) { expect_cut({{20, 33}}, 1); }
TEST(MuonBlocks, TakesRowsAndColsOfTheWholeMatrix) { expect_cut({{20, 33}, 20, 33}, 1); }
TEST(MuonBlocks, FlattensFiltersOfAConvolutionIntoRows) { expect_cut({{18, 4, 3, 3}, 18, 36}, 1); }
TEST(MuonBlocks, CutsGroupsOfFiltersIntoMatrices) { expect_cut({{18, 4, 3, 3}, 6, 36}, 3); }
TEST(MuonBlocks, CutsAStackOfExpertsIntoOneMatrixEach) { expect_cut({{3, 17, 20}, 17, 20}, 3); }
TEST(MuonBlocks, CutsFusedQueriesKeysAndValues) { expect_cut({{48, 16}, 16, 16}, 3); }
TEST(MuonBlocks, CutsHeadsIntoMatrices) { expect_cut({{4 * 5, 24}, 5, 24}, 4); }
TEST(MuonBlocks, CutsColumnsOfFusedQueriesKeysAndValues) { expect_cut({{17, 3 * 17}, 17, 17}, 3); }
TEST(MuonBlocks, CutsColumnsAndRows) { expect_cut({{34, 40}, 17, 20}, 4); }
TEST(MuonBlocks, CutsColumnsOfAStack) { expect_cut({{2, 17, 40}, 17, 20}, 4); }
TEST(MuonBlocks, CutsAFlatParameterIntoConsecutiveMatrices) {
    Cut cut;
    cut.flat = 3 * 20 * 16;
    cut.rows = 20;
    cut.cols = 16;
    expect_cut(cut, 3);
}
TEST(MuonBlocks, CutsRowsOfOneElement) { expect_cut({{6, 5}, 3, 1}, 10); }
TEST(MuonBlocks, CutsColumnsOfOneElement) { expect_cut({{6, 5}, 1, 5}, 6); }
TEST(MuonBlocks, CutsIntoSingleElements) { expect_cut({{3, 4}, 1, 1}, 12); }
TEST(MuonBlocks, TakesLeadingDimsOfOne) { expect_cut({{1, 1, 20, 18}, 20, 18}, 1); }
TEST(MuonBlocks, TakesTrailingDimsOfOne) { expect_cut({{20, 18, 1, 1}, 20, 18}, 1); }
TEST(MuonBlocks, TakesAVectorAsOneRow) { expect_cut({{50}, 1, 50}, 1); }
TEST(MuonBlocks, CutsTensorsOfSeveralLeaves) { expect_cut({{3, 70, 60}, 70, 60}, 3); }
TEST(MuonBlocks, CutsColumnsOfSeveralLeaves) { expect_cut({{130, 3 * 66}, 130, 66}, 3); }

// The adjustment depends on the rows and columns of a matrix, not of the tensor.
TEST(MuonBlocks, AdjustsToTheShapeOfAMatrix) {
    for (const int32_t adjust : {DSOPT_ADJUST_ORIGINAL, DSOPT_ADJUST_MATCH_RMS_ADAMW, DSOPT_ADJUST_SPECTRAL})
        for (const int32_t flags : {0, int(DSOPT_PARAM_ROWS_ARE_INPUTS)}) {
            dsopt_group group = muon_group();
            group.adjust = adjust;
            expect_cut({{32, 4, 3, 3}, 32, 36, flags}, 1, group);
            expect_cut({{40, 64}, 40, 16, flags}, 4, group);
        }
}

TEST(MuonBlocks, CutsSixteenBitTensors) {
    for (const int32_t dtype : {DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16})
        for (const int32_t products : kDtypes) {
            expect_cut({{2, 17, 24}, 17, 24, 0, dtype, dtype}, 2, muon_group(products));
            expect_cut({{17, 48}, 17, 16, 0, dtype, DSOPT_DTYPE_F32}, 3, muon_group(products));
        }
}

TEST(MuonBlocks, CutsRandomDims) {
    Random random(4);
    for (int i = 0; i < 60; ++i) {
        Cut cut;
        const int ndim = 2 + random.below(3);
        for (int k = 0; k < ndim; ++k) cut.dims.push_back(1 + random.below(k == 0 ? 12 : 6));
        const auto divisor_of = [&](int64_t n) {
            int64_t d = 1 + random.below(int(n));
            while (n % d != 0) --d;
            return d;
        };
        int64_t row_length = cut.dims.back();
        if (random.below(2) != 0) { // several of the last dims
            for (int k = ndim - 1 - random.below(ndim - 1); k < ndim - 1; ++k) row_length *= cut.dims[size_t(k)];
            cut.cols = row_length;
        } else {
            cut.cols = divisor_of(row_length);
        }
        cut.rows = divisor_of(cut.numel() / row_length);
        SCOPED_TRACE("case " + std::to_string(i));
        expect_cut(cut, size_t(cut.numel() / (cut.rows * cut.cols)));
    }
}

TEST(MuonBlocks, KeepsDimsOfTheTensorInItsState) {
    const Trainer trainer = muon_trainer({{{18, 4, 3, 3}, 18, 36}});
    const dsopt_state_info info = state_info(trainer.opt(), state_index(trainer.opt(), 0, "momentum_buffer"));
    EXPECT_EQ(std::vector<int64_t>(info.dims, info.dims + info.ndim), (std::vector<int64_t>{18, 4, 3, 3}));
    EXPECT_EQ(state_count(trainer.opt()), 2); // and counters
}

TEST(MuonBlocks, TakesParametersOfDifferentFormsInOneGroup) {
    const std::vector<Cut> cuts = {{{20, 33}}, {{48, 16}, 16, 16}, {{17, 34}, 17, 17}, {{0, 8}}, {{3, 5, 7}, 3, 35}};
    const Trainer together = muon_trainer(cuts);
    together.train(1, 3);
    for (size_t i = 0; i < cuts.size(); ++i) {
        Trainer alone({{cuts[i].numel(), cuts[i].param, cuts[i].grad, 0, int64_t(i)}}, optimizer_desc());
        alone.add(muon_group(), params_of({cuts[i]}));
        alone.train(1, 3);
        EXPECT_TRUE(same(alone.model.params[0].text(), together.model.params[i].text())) << i;
    }
}

// Parameters may be added through dsopt_optimizer_add_params, too.
TEST(MuonBlocks, CutsParametersThatAreAddedLater) {
    const std::vector<Cut> cuts = {{{48, 16}, 16, 16}, {{17, 34}, 17, 17}};
    const Trainer wanted = muon_trainer(cuts);
    Trainer later(cut_shapes(cuts), optimizer_desc());
    later.add(muon_group(), std::vector<dsopt_param>{});
    std::vector<dsopt_param> params = params_of(cuts);
    for (size_t i = 0; i < cuts.size(); ++i) params[i].tensor = later.model.params[i].tensor();
    ASSERT_OK(dsopt_optimizer_add_params(later.opt(), params.data(), 2));
    for (uint64_t t = 1; t <= 3; ++t) {
        wanted.train(t);
        later.model.make_gradients(t);
        dsopt_step step = later.arguments();
        step.count = 2;
        ASSERT_OK(later.step(step));
    }
    EXPECT_TRUE(same(later.text(), wanted.text()));
}

} // namespace muon_blocks_tests
