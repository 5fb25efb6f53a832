// SPDX-License-Identifier: Apache-2.0
// Records of update rules. A rule has two parts, both in the rule's own header: an algorithm of dsopt.h with its record
// (RuleInfo), and one or several formulas, which are functors that the kernels of every device run. all.h lists all
// rules.
#pragma once
#include "base/hd.h"
#include "dsopt.h"
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

namespace dsopt {

/// The formulas: algorithms with the options that change their arithmetic.
enum class Rule : uint8_t {
    adam,
    adamw,
    adam_compat,
    adamw_compat,
    lamb,
    lamb_eps_inside,
    legacy,
    legacy_eps_inside,
    sgd,
    sgd_momentum,
    sgd_nesterov,
    adagrad,
    adagrad_eps_inside,
    lion,
    muon,
    muon_nesterov
};

/// The passes that the driver runs for a formula, after pass 1 over the gradients.
enum class Passes : uint8_t {
    elementwise, // one pass: the functor reads gradients and writes moments and weights
    /// Two passes. The first pass runs the functor Moments, and sums squares of the weights and of the results of
    /// Moments. factor() computes the factor of each tensor from these sums, which are reduced over model ranks. The
    /// second pass runs the functor Weights with the factor.
    reduced,
    /// Passes over matrices, in batches (device/matrix_plan.h): the functor Form moves the momentum and computes what is
    /// orthogonalised, and MatrixApply moves the weights by the result.
    matrix
};

constexpr int kMoments = 2; // largest number of moments of a rule

/// Calls call(moment[0], ..., moment[Count - 1]). `moment`: the values of a rule's moments, or pointers to them.
template <int Count, class T, class Call> DSOPT_HD void with_moments(T *moment, const Call &call) {
    [&]<int... K>(std::integer_sequence<int, K...>) __attribute__((always_inline)) { call(moment[K]...); }
    (std::make_integer_sequence<int, Count>{});
}

/// A state tensor of a formula, with one element per weight.
struct MomentInfo {
    const char *name = "";       // in dsopt_state_info and in checkpoints
    const char *scale_name = ""; // of the tensor of its scales
    bool squares = false;        // a mean or sum of squares: not negative, format dsopt_group.exp_avg_sq_format
    double dsopt_group::*start = nullptr; // its starting value; nullptr: 0
};
/// All moments of a formula, in the order of the functor's arguments. Entries from `count` on have no name or memory.
struct MomentList {
    int count;
    MomentInfo info[kMoments];
};

/// Hyper-parameters that only some rules have, and forms of bias correction.
enum Field : uint32_t {
    kBeta1 = 1,
    kBeta2 = 2,
    kEps = 4,
    kTrust = 8, // min_trust and max_trust
    kBiasCorrection = 16,
    kFoldedCorrection = 32, // sqrt(c2) / c1 is in the learning rate
    kMomentum = 64,
    kLrDecay = 128,   // and initial_accumulator_value
    kStepSize = 256,  // 1 / c1 is in the learning rate
    kDampening = 512, // of the momentum
    kMatrix = 1024,   // the numbers of Newton-Schulz iterations
    // The 1-bit family
    kSchedule = 2048,  // freeze_step
    kIntervals = 4096, // of the variance and between synchronisations
    kTrustMean = 8192, // and the factor that corrects the frozen trust ratio
};

/// Hyper-parameters of a group as a step reads them.
struct Hyper {
    double lr, beta1, beta2, eps, weight_decay, max_norm, min_trust, max_trust, momentum, dampening, lr_decay;
    Rule rule;
    bool bias_correction;
    bool compat;
    bool eps_uncorrected; // standard mode, with bias correction
    uint8_t reserved[4];  // no padding: tables of these are compared byte by byte
};
static_assert(offsetof(Hyper, reserved) + 4 == sizeof(Hyper) && offsetof(Hyper, rule) % sizeof(double) == 0);

/// One hyper-parameter of dsopt_group.
struct GroupField {
    enum Range : uint8_t { not_negative, below_one, finite, count };
    const char *name;           // in messages and checkpoints
    double dsopt_group::*value; // nullptr: `whole` has it
    double Hyper::*hyper;       // nullptr: steps do not read it
    int32_t hyper_index;        // index in rows of dsopt_step.hyper, DSOPT_HYPER_...; -1: not in rows
    int32_t key;                // DSOPT_KEY_..., 0: it cannot change
    uint32_t field;             // the Field that a rule must have, 0: every rule has it
    Range range;
    const char *only_in; // the only algorithm with this hyper-parameter, for messages; NULL: several have it
    uint32_t saved_with; // the Field of the rules that save it, 0: all rules save it
    int64_t dsopt_group::*whole = nullptr;
};
inline constexpr GroupField kGroupFields[] = {
    {"lr", &dsopt_group::lr, &Hyper::lr, DSOPT_HYPER_LR, DSOPT_KEY_LR, 0, GroupField::not_negative, nullptr, 0},
    {"beta1", &dsopt_group::beta1, &Hyper::beta1, DSOPT_HYPER_BETA1, DSOPT_KEY_BETA1, kBeta1, GroupField::below_one,
     nullptr, 0},
    {"beta2", &dsopt_group::beta2, &Hyper::beta2, DSOPT_HYPER_BETA2, DSOPT_KEY_BETA2, kBeta2, GroupField::below_one,
     nullptr, 0},
    {"eps", &dsopt_group::eps, &Hyper::eps, DSOPT_HYPER_EPS, DSOPT_KEY_EPS, kEps, GroupField::not_negative, nullptr, 0},
    {"weight_decay", &dsopt_group::weight_decay, &Hyper::weight_decay, DSOPT_HYPER_WEIGHT_DECAY, DSOPT_KEY_WEIGHT_DECAY,
     0, GroupField::not_negative, nullptr, 0},
    {"max_norm", &dsopt_group::max_norm, &Hyper::max_norm, DSOPT_HYPER_GROUP_MAX_NORM, DSOPT_KEY_GROUP_MAX_NORM, 0,
     GroupField::not_negative, nullptr, 0},
    {"min_trust", &dsopt_group::min_trust, &Hyper::min_trust, -1, DSOPT_KEY_MIN_TRUST, kTrust, GroupField::not_negative,
     "LAMB", 0},
    {"max_trust", &dsopt_group::max_trust, &Hyper::max_trust, -1, DSOPT_KEY_MAX_TRUST, kTrust, GroupField::not_negative,
     "LAMB", 0},
    {"momentum", &dsopt_group::momentum, &Hyper::momentum, DSOPT_HYPER_MOMENTUM, DSOPT_KEY_MOMENTUM, kMomentum,
     GroupField::not_negative, "SGD and Muon", kMomentum},
    {"dampening", &dsopt_group::dampening, &Hyper::dampening, -1, DSOPT_KEY_DAMPENING, kDampening,
     GroupField::not_negative, "SGD", kDampening},
    {"lr_decay", &dsopt_group::lr_decay, &Hyper::lr_decay, -1, DSOPT_KEY_LR_DECAY, kLrDecay, GroupField::not_negative,
     "Adagrad", kLrDecay},
    {"initial_accumulator_value", &dsopt_group::initial_accumulator_value, nullptr, -1,
     DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE, kLrDecay, GroupField::not_negative, "Adagrad", kLrDecay},
    {"ns_a", &dsopt_group::ns_a, nullptr, -1, DSOPT_KEY_NS_A, kMatrix, GroupField::finite, "Muon", kMatrix},
    {"ns_b", &dsopt_group::ns_b, nullptr, -1, DSOPT_KEY_NS_B, kMatrix, GroupField::finite, "Muon", kMatrix},
    {"ns_c", &dsopt_group::ns_c, nullptr, -1, DSOPT_KEY_NS_C, kMatrix, GroupField::finite, "Muon", kMatrix},
    {"trust_beta", &dsopt_group::trust_beta, nullptr, -1, 0, kTrustMean, GroupField::below_one, "1-bit LAMB",
     kSchedule},
    {"trust_threshold", &dsopt_group::trust_threshold, nullptr, -1, 0, kTrustMean, GroupField::below_one, "1-bit LAMB",
     kSchedule},
    {"trust_min_change", &dsopt_group::trust_min_change, nullptr, -1, 0, kTrustMean, GroupField::not_negative,
     "1-bit LAMB", kSchedule},
    {"trust_max_change", &dsopt_group::trust_max_change, nullptr, -1, 0, kTrustMean, GroupField::not_negative,
     "1-bit LAMB", kSchedule},
    {"freeze_step", nullptr, nullptr, -1, DSOPT_KEY_FREEZE_STEP, kSchedule, GroupField::count, "the 1-bit family",
     kSchedule, &dsopt_group::freeze_step},
    {"var_interval_steps", nullptr, nullptr, -1, 0, kIntervals, GroupField::count, "0/1 Adam", kSchedule,
     &dsopt_group::var_interval_steps},
    {"local_interval_steps", nullptr, nullptr, -1, 0, kIntervals, GroupField::count, "0/1 Adam", kSchedule,
     &dsopt_group::local_interval_steps},
    {"max_local_interval", nullptr, nullptr, -1, 0, kIntervals, GroupField::count, "0/1 Adam", kSchedule,
     &dsopt_group::max_local_interval},
};

/// Calls call(value) with the field of a group, a double or an int64_t.
template <class Group, class Call> void with_value(const GroupField &field, Group &group, const Call &call) {
    if (field.whole != nullptr)
        call(group.*field.whole);
    else
        call(group.*field.value);
}
inline double value_of(const GroupField &field, const dsopt_group &group) {
    double value = 0;
    with_value(field, group, [&](auto stored) { value = double(stored); });
    return value;
}

/// One integer hyper-parameter of dsopt_group, which steps read from their plan.
struct GroupInt {
    const char *name; // in messages and checkpoints
    int32_t dsopt_group::*value;
    int32_t key;    // DSOPT_KEY_...
    bool settable;  // by key
    uint32_t field; // the Field that a rule must have
    int32_t low, high;
    const char *only_in; // as in GroupField
};
inline constexpr GroupInt kGroupInts[] = {
    {"ns_steps", &dsopt_group::ns_steps, DSOPT_KEY_NS_STEPS, true, kMatrix, 1, 99, "Muon"},
    {"ns_schedule", &dsopt_group::ns_schedule, DSOPT_KEY_NS_SCHEDULE, true, kMatrix, DSOPT_NS_CONSTANT, DSOPT_NS_YOU,
     "Muon"},
    {"ns_dtype", &dsopt_group::ns_dtype, DSOPT_KEY_NS_DTYPE, false, kMatrix, DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16, "Muon"},
    {"adjust", &dsopt_group::adjust, DSOPT_KEY_ADJUST, true, kMatrix, DSOPT_ADJUST_ORIGINAL, DSOPT_ADJUST_NONE, "Muon"},
};

/// Calls call(index) with each index of kGroupFields as a constant: device code cannot read the table at run time.
template <class Call> DSOPT_HD void for_group_fields(const Call &call) {
    [&]<size_t... I>(std::index_sequence<I...>) { (call(std::integral_constant<size_t, I>{}), ...); }
    (std::make_index_sequence<std::size(kGroupFields)>{});
}
/// Number of named entries in a row of dsopt_step.hyper. The other entries must be 0 or NaN.
constexpr int kHyperEntries = [] {
    int places = DSOPT_HYPER_MAX_NORM + 1;
    for (const GroupField &field : kGroupFields) places = field.hyper_index < places ? places : field.hyper_index + 1;
    return places;
}();

/// One flag of dsopt_group.
struct GroupFlag {
    int32_t flag; // DSOPT_GROUP_...
    const char *name;
    int32_t key; // DSOPT_KEY_..., 0: it cannot change
};
inline constexpr GroupFlag kGroupFlags[] = {
    {DSOPT_GROUP_NO_BIAS_CORRECTION, "no_bias_correction", 0}, // DSOPT_KEY_BIAS_CORRECTION is the opposite
    {DSOPT_GROUP_EPS_INSIDE_SQRT, "eps_inside_sqrt", DSOPT_KEY_EPS_INSIDE_SQRT},
    {DSOPT_GROUP_EPS_UNCORRECTED, "eps_uncorrected", DSOPT_KEY_EPS_UNCORRECTED},
    {DSOPT_GROUP_NON_FREEZE, "non_freeze", 0},
    {DSOPT_GROUP_NESTEROV, "nesterov", DSOPT_KEY_NESTEROV},
};

/// The record of an algorithm.
struct RuleInfo {
    int32_t algorithm;                    // DSOPT_ALGORITHM_...
    const char *name;                     // in checkpoints and messages
    uint32_t fields;                      // an OR of Field
    int32_t flags = 0;                    // flags of enum dsopt_group_flags that have an effect
    bool compat = false;                  // compat mode supports it
    bool counts_per_group = false;        // compat mode counts steps per group: see assign_group_counters()
    void (*defaults)(dsopt_group &group); // sets fields whose default is not 0
    void (*check)(const dsopt_group &group, bool compat) = nullptr; // checks what the tables above do not cover
    Rule (*formula)(const dsopt_group &group, bool compat);         // returns the formula for a group's options
};

/// RuleInfo::formula of an algorithm with one formula. by_eps: of an algorithm that may have eps inside the root.
template <Rule Only> Rule always(const dsopt_group &, bool) { return Only; }
template <Rule Outside, Rule Inside> Rule by_eps(const dsopt_group &group, bool) {
    return group.flags & DSOPT_GROUP_EPS_INSIDE_SQRT ? Inside : Outside;
}

} // namespace dsopt
