// SPDX-License-Identifier: Apache-2.0
// The vector of a list and its partition among ranks: src/exchange/vector.h.
#include "exchange/vector.h"
#include "support/harness.h"
#include "support/numbers.h"
#include <algorithm>
#include <numeric>

using dsopt::ListVector;
using dsopt::Range;
using dsopt::VectorPartition;

namespace inside_vector_tests {

constexpr int64_t kBlock = ListVector::kBlock;

std::vector<int64_t> begins_of(const std::vector<int64_t> &numels) {
    const ListVector vector(numels);
    std::vector<int64_t> begins;
    for (size_t i = 0; i < numels.size(); ++i) begins.push_back(vector.range(i).begin);
    return begins;
}

TEST(ListVector, SmallTensorsShareABlock) {
    EXPECT_EQ(begins_of({1, 1, 64, 65, 3}), (std::vector<int64_t>{0, 64, 128, 192, 320}));
    EXPECT_EQ(ListVector({1, 1, 64, 65, 3}).blocks(), 1);
}

TEST(ListVector, TensorThatDoesNotFitIntoTheRestBeginsABlock) {
    EXPECT_EQ(begins_of({64, kBlock - 64, 1}), (std::vector<int64_t>{0, 64, kBlock}));
    EXPECT_EQ(begins_of({64, kBlock - 63, 1}), (std::vector<int64_t>{0, kBlock, 2 * kBlock}));
    EXPECT_EQ(begins_of({1, kBlock + 1, 1}), (std::vector<int64_t>{0, kBlock, 2 * kBlock + 64}));
}

TEST(ListVector, EmptyTensorsTakeNoPlace) {
    EXPECT_EQ(begins_of({0, 5, 0, 5}), (std::vector<int64_t>{0, 0, 5, 64}));
    EXPECT_EQ(ListVector({0, 0}).blocks(), 0);
    EXPECT_EQ(ListVector({}).numel(), 0);
}

std::vector<int64_t> random_numels(test::Random &random) {
    std::vector<int64_t> numels(size_t(random.below(40)));
    for (int64_t &numel : numels) numel = random.below(1 << random.below(17));
    return numels;
}

TEST(ListVector, NoLeafCrossesABlock) {
    test::Random random(1);
    for (int repetition = 0; repetition < 300; ++repetition) {
        const std::vector<int64_t> numels = random_numels(random);
        const ListVector vector(numels);
        int64_t end = 0;
        for (size_t i = 0; i < numels.size(); ++i) {
            const Range range = vector.range(i);
            EXPECT_EQ(range.numel, numels[i]);
            EXPECT_EQ(range.whole, vector.numel());
            EXPECT_GE(range.begin, end);
            if (range.numel == 0) continue;
            end = range.end();
            EXPECT_EQ(range.begin % ListVector::kAlignment, 0);
            for (int64_t leaf = 0; leaf < range.numel; leaf += kBlock) {
                const int64_t last = std::min(leaf + kBlock, range.numel) - 1;
                EXPECT_EQ((range.begin + leaf) / kBlock, (range.begin + last) / kBlock);
            }
        }
        EXPECT_EQ(vector.blocks(), (end + kBlock - 1) / kBlock);
    }
}

TEST(VectorPartition, EveryElementIsInOnePart) {
    test::Random random(2);
    for (int repetition = 0; repetition < 300; ++repetition) {
        const std::vector<int64_t> numels = random_numels(random);
        const ListVector vector(numels);
        const int ranks = 1 + repetition % 13;
        const VectorPartition partition{vector.blocks(), ranks};
        std::vector<int64_t> ends(numels.size());
        int64_t chunks = 0;
        for (int rank = 0; rank < ranks; ++rank) {
            const Range chunk = partition.chunks(rank);
            chunks += chunk.numel;
            EXPECT_LE(chunk.numel, partition.chunk_numel());
            for (size_t i = 0; i < numels.size(); ++i) {
                const Range part = part_of(vector.range(i), chunk);
                EXPECT_EQ(part.whole, numels[i]);
                if (part.numel == 0) continue;
                EXPECT_EQ(part.begin, ends[i]);
                EXPECT_EQ(part.begin % kBlock, 0);
                EXPECT_TRUE(part.end() % kBlock == 0 || part.end() == numels[i]);
                ends[i] = part.end();
            }
        }
        EXPECT_EQ(chunks, vector.numel());
        EXPECT_EQ(ends, numels);
    }
}

TEST(VectorPartition, LastRanksOfAShortVectorHaveNothing) {
    const VectorPartition partition{3, 8};
    for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(partition.chunks(rank).numel, rank < 3 ? kBlock : 0);
    EXPECT_EQ(VectorPartition({5, 4}).chunks(2).numel, kBlock); // two blocks each
    EXPECT_EQ(VectorPartition({5, 4}).chunks(3).numel, 0);
    EXPECT_EQ(VectorPartition({0, 4}).chunks(3).numel, 0);
}

TEST(VectorPartition, ConsecutiveChunksAreOneRange) {
    const VectorPartition partition{11, 4};
    EXPECT_EQ(partition.chunks(1, 2).begin, 3 * kBlock);
    EXPECT_EQ(partition.chunks(1, 2).numel, 6 * kBlock);
    EXPECT_EQ(partition.chunks(2, 2).end(), 11 * kBlock);
}

TEST(VectorPartition, Of65536RanksIsInClosedForm) {
    constexpr int64_t numel = int64_t(70'000) * kBlock * 3;
    const ListVector vector({numel});
    const VectorPartition partition{vector.blocks(), 65536};
    EXPECT_EQ(partition.chunk_blocks(), 4);
    for (int64_t rank : {0, 1, 52499, 52500, 65535}) {
        const Range part = part_of(vector.range(0), partition.chunks(rank));
        EXPECT_EQ(part.numel, std::clamp<int64_t>(numel - rank * 4 * kBlock, 0, 4 * kBlock)) << rank;
        if (part.numel != 0) { EXPECT_EQ(part.begin, rank * 4 * kBlock); }
    }
}

/// Returns by how much the ranks' chunks together are longer than the tensors, in percent.
double added_by_chunks(const std::vector<int64_t> &numels, int ranks) {
    const ListVector vector(numels);
    const VectorPartition partition{vector.blocks(), ranks};
    const double numel = double(std::accumulate(numels.begin(), numels.end(), int64_t(0)));
    return (double(partition.chunk_numel() * ranks) / numel - 1) * 100;
}

TEST(VectorPartition, PaddingOfManySmallTensorsIsSmallForFewRanks) {
    const std::vector<int64_t> thousands(10'000, 1000), sixties(100'000, 64);
    EXPECT_NEAR(added_by_chunks(thousands, 1), 2.4, 0.05); // four tensors of 1024 elements to a block
    EXPECT_NEAR(added_by_chunks(thousands, 8), 2.6, 0.05);
    EXPECT_NEAR(added_by_chunks(thousands, 64), 4.9, 0.05);
    EXPECT_NEAR(added_by_chunks(thousands, 1024), 26, 0.5);
    EXPECT_NEAR(added_by_chunks(sixties, 1), 0.03, 0.01);
    EXPECT_NEAR(added_by_chunks(sixties, 8), 0.35, 0.01);
    EXPECT_NEAR(added_by_chunks(sixties, 1024), 31, 0.5);
}

} // namespace inside_vector_tests
