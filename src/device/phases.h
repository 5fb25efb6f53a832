// SPDX-License-Identifier: Apache-2.0
// The phases of a step. Its plan is a list of them (src/step/phases.cc), which the driver runs in order.
#pragma once
#include "dsopt.h"
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>

namespace dsopt {

enum class Phase : uint8_t {
    average,          // averages gradients over ranks
    clear_squares,    // zeroes the results of pass 1, of which this rank computes only those of its part
    inspect,          // pass 1: counts non-finite elements, sums squares
    complete_squares, // adds the results of pass 1 of other ranks
    fold,             // folds results into the table of norms, with this rank's reasons to skip
    fold_completed,   // the same after complete_squares
    agree,            // all-reduces the table of norms
    decide,           // decide_step()
    begin_onebit,     // 1-bit family: OneBitDecision::begin
    onebit,           // 1-bit family: exchange, and update of the tensors in it
    clear_shards,     // zeroes the sums of tensors that are sharded over model ranks
    clear_sums,       // zeroes the sums of the update, like clear_squares
    update,           // Passes::elementwise and the first pass of Passes::reduced; outputs of all tensors if skipped
    matrices,         // Passes::matrix
    complete_sums,    // adds the sums of the update of other ranks
    trust,            // computes the trust ratios that need no other model rank
    sum_shards,       // all-reduces the sums of tensors that are sharded over model ranks
    shared_trust,     // computes their trust ratios
    weights,          // the second pass of Passes::reduced
    finish,           // advances counters if the step is taken, writes norms and the report
    end_onebit,       // 1-bit family: advances counters and schedule, freezes the variance when it is due
    gather,           // gathers the weights of sharded state
};

/// The ranks that a phase communicates with, as a mask.
enum PhaseRanks : uint8_t {
    kNoRanks = 0,
    kDataRanks = 1, // the comms `data` and `node`
    kModelRanks = 2,
    kExpertRanks = 4,
    kMatrixRanks = 8, // of CommSet::matrices(), if matrices are partitioned among ranks
};

struct PhaseInfo {
    Phase phase;
    const char *name;
    int ms;         // DSOPT_MS_... that its time counts for
    bool on_device; // StepKernels::run() runs it; otherwise the driver
    uint8_t ranks;  // PhaseRanks
};
inline constexpr PhaseInfo kPhases[] = {
    {Phase::average, "average", DSOPT_MS_EXCHANGE, false, kDataRanks},
    {Phase::clear_squares, "clear squares", DSOPT_MS_OVERFLOW_CHECK, false, kNoRanks},
    {Phase::inspect, "inspect", DSOPT_MS_OVERFLOW_CHECK, true, kNoRanks},
    {Phase::complete_squares, "complete squares", DSOPT_MS_OVERFLOW_CHECK, false, kDataRanks},
    {Phase::fold, "fold", DSOPT_MS_COMPUTE_NORM, true, kNoRanks},
    {Phase::fold_completed, "fold", DSOPT_MS_COMPUTE_NORM, true, kNoRanks},
    {Phase::agree, "agree", DSOPT_MS_COMPUTE_NORM, false, kDataRanks | kModelRanks | kExpertRanks},
    {Phase::decide, "decide", DSOPT_MS_UNSCALE_AND_CLIP, true, kNoRanks},
    {Phase::begin_onebit, "begin 1-bit", DSOPT_MS_BASIC_STEP, true, kNoRanks},
    {Phase::onebit, "1-bit", DSOPT_MS_BASIC_STEP, false, kDataRanks | kModelRanks},
    {Phase::clear_shards, "clear shards", DSOPT_MS_BASIC_STEP, false, kNoRanks},
    {Phase::clear_sums, "clear sums", DSOPT_MS_BASIC_STEP, false, kNoRanks},
    {Phase::update, "update", DSOPT_MS_BASIC_STEP, true, kNoRanks},
    {Phase::matrices, "matrices", DSOPT_MS_BASIC_STEP, false, kMatrixRanks},
    {Phase::complete_sums, "complete sums", DSOPT_MS_BASIC_STEP, false, kDataRanks},
    {Phase::trust, "trust", DSOPT_MS_BASIC_STEP, true, kNoRanks},
    {Phase::sum_shards, "sum shards", DSOPT_MS_BASIC_STEP, false, kModelRanks},
    {Phase::shared_trust, "shared trust", DSOPT_MS_BASIC_STEP, true, kNoRanks},
    {Phase::weights, "weights", DSOPT_MS_BASIC_STEP, true, kNoRanks},
    {Phase::finish, "finish", DSOPT_MS_BASIC_STEP, true, kNoRanks},
    {Phase::end_onebit, "end 1-bit", DSOPT_MS_BASIC_STEP, false, kNoRanks},
    {Phase::gather, "gather", DSOPT_MS_EXCHANGE, false, kDataRanks},
};
constexpr const PhaseInfo &info_of(Phase phase) { return kPhases[size_t(phase)]; }
constexpr bool has_all_phases() {
    for (size_t i = 0; i < std::size(kPhases); ++i)
        if (size_t(kPhases[i].phase) != i) return false;
    return std::size(kPhases) == size_t(Phase::gather) + 1;
}
static_assert(has_all_phases());

/// Consecutive phases of a step.
using Phases = std::span<const Phase>;

/// Consecutive tensors of a step: [first, first + count).
struct TensorInterval {
    int64_t first, count;
    int64_t end() const { return first + count; }
};

/// Neighbours in the list of a step.
struct PhaseRun {
    Phases all;
    size_t begin, end;
    /// Runs one phase, inspect or update, for some tensors only. After one run for each tensor, in any order, the
    /// results are those of one run for all.
    std::optional<TensorInterval> tensors{};
    Phases phases() const { return all.subspan(begin, end - begin); }
    bool is_followed_by(Phase phase) const { return end < all.size() && all[end] == phase; }
    /// True if the time until the end of phases()[k] does not count for the same DSOPT_MS_... as the next phase.
    bool ends_timing(size_t k) const {
        const size_t i = begin + k;
        return i + 1 == all.size() || info_of(all[i + 1]).ms != info_of(all[i]).ms;
    }
};

} // namespace dsopt
