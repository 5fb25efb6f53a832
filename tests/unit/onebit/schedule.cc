// SPDX-License-Identifier: Apache-2.0
// Volume that published settings send, computed with dsopt_optimizer_next_reduction alone. The tests print the table in
// docs/onebit.md.
#include "support/harness.h"

using namespace test;

LABEL_FILE(one_thread);
LABEL_FILE(cpu); // trains nothing

namespace onebit_schedule_tests {

/// Bits per parameter and step, in each direction, with many ranks and gradients in half precision.
constexpr double kFull = 16, kCompressed = 1;

struct Volume {
    int64_t steps = 0, full = 0, compressed = 0, local = 0, last_full = 0;
    double bits() const { return (kFull * double(full) + kCompressed * double(compressed)) / double(steps); }
    double rounds() const { return double(full + compressed) / double(steps); }
};

/// Counts the reductions of all calls. Most queries are for the next call (number 0), because the function computes any
/// other number from the first call on.
Volume volume(const dsopt_group &group, int64_t steps) {
    const Context ctx = make_context(1);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    Trainer trainer(ctx, desc, group, std::vector<Array>{Array(DSOPT_DTYPE_F32, 1, 1)});
    const int32_t skip = 1; // the call advances the schedule and computes nothing
    const std::vector<Array> grads = {Array(DSOPT_DTYPE_F32, 1, 1)};
    Volume volume;
    volume.steps = steps;
    for (int64_t call = 1; call <= steps; ++call) {
        int32_t what = 0;
        must(dsopt_optimizer_next_reduction(trainer.opt(), 0, &what));
        if (call < 200 || call % 20011 == 0) {
            int32_t reduction = 0;
            must(dsopt_optimizer_next_reduction(trainer.opt(), call, &reduction));
            EXPECT_EQ(reduction, what) << call;
        }
        volume.full += what == DSOPT_REDUCTION_FULL;
        volume.compressed += what == DSOPT_REDUCTION_COMPRESSED;
        volume.local += what == DSOPT_REDUCTION_LOCAL;
        if (what == DSOPT_REDUCTION_FULL) volume.last_full = call;
        must(trainer.step(grads, [&](dsopt_step &step) { step.skip = on_device(skip); }));
    }
    EXPECT_EQ(volume.full + volume.compressed + volume.local, steps);
    return volume;
}
Volume onebit(int64_t steps, int64_t freeze_step) {
    dsopt_group group = group_of(DSOPT_ALGORITHM_ONEBIT_ADAM);
    group.freeze_step = freeze_step;
    return volume(group, steps);
}
Volume zero_one(int64_t steps, int64_t freeze_step, int64_t local_interval_steps) {
    dsopt_group group = group_of(DSOPT_ALGORITHM_ZERO_ONE_ADAM);
    group.freeze_step = freeze_step;
    group.var_interval_steps = 16;
    group.local_interval_steps = local_interval_steps;
    group.max_local_interval = 16;
    return volume(group, steps);
}
void print(const char *what, const Volume &v) {
    std::printf("| %s | %lld | %lld | %lld | %lld | %.3f | %.1fx | %.3f |\n", what, (long long)v.steps,
                (long long)v.full, (long long)v.compressed, (long long)v.local, v.bits(), kFull / v.bits(), v.rounds());
}

TEST(NextReduction, CutsTheVolumeOfOneBitAdamToAFifth) {
    struct {
        const char *what;
        int64_t steps, freeze_step;
        double min_factor, max_factor; // reduction factor relative to Adam
    } const rows[] = {{"1-bit Adam, BERT, freeze_step 16000", 118000, 16000, 5.0, 5.5},
                      {"1-bit Adam, BERT, freeze_step 23000", 118000, 23000, 4.0, 4.5},
                      {"1-bit Adam, BERT, freeze_step 23000", 152000, 23000, 4.5, 5.0},
                      {"1-bit Adam, SQuAD, freeze_step 400", 1825, 400, 3.5, 4.0},
                      {"1-bit Adam, GPT-2, freeze_step 45000", 300000, 45000, 4.5, 5.0}};
    for (const auto &row : rows) {
        if (kSanitized && &row != &rows[3]) continue; // only the shortest
        const Volume v = onebit(row.steps, row.freeze_step);
        print(row.what, v);
        EXPECT_EQ(v.full, row.freeze_step);
        EXPECT_EQ(v.last_full, row.freeze_step);
        EXPECT_EQ(v.local, 0);
        EXPECT_EQ(v.rounds(), 1);
        const double warm = double(row.freeze_step) / double(row.steps);
        EXPECT_NEAR(kFull / v.bits(), 1 / (warm + (1 - warm) / 16), 1e-9);
        EXPECT_GE(kFull / v.bits(), row.min_factor);
        EXPECT_LE(kFull / v.bits(), row.max_factor);
    }
}

LABEL(slow);
TEST(NextReduction, CutsTheVolumeOfZeroOneAdamFurther) {
    struct {
        const char *what;
        int64_t steps, freeze_step, local_interval_steps, onebit_freeze_step;
        double min_bits, max_bits, min_rounds, max_rounds; // savings relative to 1-bit Adam
    } const rows[] = {{"0/1 Adam, BERT", 118000, 12500, 32678, 16000, 0.78, 0.87, 0.38, 0.54},
                      {"0/1 Adam, BERT", 118000, 12500, 32678, 23000, 0.83, 0.87, 0.38, 0.54},
                      {"0/1 Adam, BERT", 152000, 12500, 32678, 23000, 0.83, 0.87, 0.48, 0.54},
                      {"0/1 Adam, GPT-2", 300000, 3000, 32678, 45000, 0.90, 0.94, 0.72, 0.78},
                      {"0/1 Adam, numbers of the tutorial", 118000, 1000, 1000, 23000, 0.95, 0.99, 0.90, 0.94}};
    for (const auto &row : rows) {
        if (kSanitized && &row != &rows[0]) continue;
        const Volume v = zero_one(row.steps, row.freeze_step, row.local_interval_steps),
                     other = onebit(row.steps, row.onebit_freeze_step);
        print(row.what, v);
        const double bits = 1 - v.bits() / other.bits(), rounds = 1 - v.rounds() / other.rounds();
        std::printf("    %.1f%% less data and %.1f%% fewer rounds than 1-bit Adam\n", 100 * bits, 100 * rounds);
        EXPECT_GE(bits, row.min_bits);
        EXPECT_LE(bits, row.max_bits);
        EXPECT_GE(rounds, row.min_rounds);
        EXPECT_LE(rounds, row.max_rounds);
        EXPECT_LE(v.last_full, row.freeze_step);
        // Each interval of 1, 2, 4 ... steps lasts 16 variance steps, so k intervals reach step 16 * (2^k - 1).
        const double most = 16 * (std::log2(double(row.freeze_step) / 16 + 1) + 1);
        EXPECT_LE(double(v.full), most);
        EXPECT_GE(double(v.full), most - 32);
    }
}

} // namespace onebit_schedule_tests
