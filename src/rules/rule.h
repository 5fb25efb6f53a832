// SPDX-License-Identifier: Apache-2.0
// What the engine knows of an update rule beside its arithmetic. A rule is two things, both in its own header: an
// algorithm of dsopt.h with its record (RuleInfo), and one or several formulas, which are functors that the loops of
// every device run. all.h lists them.
#pragma once
#include "base/hd.h"
#include "dsopt.h"
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

namespace dsopt {

/// The formulas as loops know them: an algorithm with the options that change what it computes.
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
    lion
};

/// What the driver runs for a formula, behind pass 1 over the gradients.
enum class Passes : uint8_t {
    elementwise, // one pass: the functor reads gradients and writes moments and weights
    /// Two passes: the functor Moments leaves sums of squares of the weights and of what it returns; from these, added
    /// up over model ranks, factor() follows for each tensor; the functor Weights is given the factor.
    reduced
};

constexpr int kMoments = 2; // of any rule, at most

/// call(moment[0], ..., moment[Count - 1]), with what kernels have of the moments of a rule.
template <int Count, class T, class Call> DSOPT_HD void with_moments(T *moment, const Call &call) {
    [&]<int... K>(std::integer_sequence<int, K...>) __attribute__((always_inline)) { call(moment[K]...); }
    (std::make_integer_sequence<int, Count>{});
}

/// A state tensor that a formula keeps beside each weight.
struct MomentInfo {
    const char *name = "";                // in dsopt_state_info and in checkpoints
    double dsopt_group::*start = nullptr; // the value that it starts with; nullptr: zeros
};
/// All of them, in the order in which the functor takes them. What is not listed has no name, memory or traffic.
struct MomentList {
    int count;
    MomentInfo at[kMoments];
};

/// What some rules have and others do not: hyper-parameters, and where they go.
enum Field : uint32_t {
    kBeta1 = 1,
    kBeta2 = 2,
    kEps = 4,
    kTrust = 8, // min_trust and max_trust
    kBiasCorrection = 16,
    kFoldedCorrection = 32, // sqrt(c2) / c1 is in the learning rate
    kMomentum = 64,         // and dampening
    kLrDecay = 128,         // and initial_accumulator_value
    kStepSize = 256,        // 1 / c1 is in the learning rate
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
    enum Range : uint8_t { not_negative, below_one };
    const char *name; // in messages and checkpoints
    double dsopt_group::*value;
    double Hyper::*hyper; // nullptr: steps do not read it
    int32_t place;        // in rows of dsopt_step.hyper, DSOPT_HYPER_...; -1: it is not there
    int32_t key;          // DSOPT_KEY_...
    uint32_t field;       // the Field that a rule must have, 0: every rule has it
    Range range;
    const char *whose; // for messages; NULL: of many
    bool always_saved; // also where the rule does not have it
};
inline constexpr GroupField kGroupFields[] = {
    {"lr", &dsopt_group::lr, &Hyper::lr, DSOPT_HYPER_LR, DSOPT_KEY_LR, 0, GroupField::not_negative, nullptr, true},
    {"beta1", &dsopt_group::beta1, &Hyper::beta1, DSOPT_HYPER_BETA1, DSOPT_KEY_BETA1, kBeta1, GroupField::below_one,
     nullptr, true},
    {"beta2", &dsopt_group::beta2, &Hyper::beta2, DSOPT_HYPER_BETA2, DSOPT_KEY_BETA2, kBeta2, GroupField::below_one,
     nullptr, true},
    {"eps", &dsopt_group::eps, &Hyper::eps, DSOPT_HYPER_EPS, DSOPT_KEY_EPS, kEps, GroupField::not_negative, nullptr,
     true},
    {"weight_decay", &dsopt_group::weight_decay, &Hyper::weight_decay, DSOPT_HYPER_WEIGHT_DECAY, DSOPT_KEY_WEIGHT_DECAY,
     0, GroupField::not_negative, nullptr, true},
    {"max_norm", &dsopt_group::max_norm, &Hyper::max_norm, DSOPT_HYPER_GROUP_MAX_NORM, DSOPT_KEY_GROUP_MAX_NORM, 0,
     GroupField::not_negative, nullptr, true},
    {"min_trust", &dsopt_group::min_trust, &Hyper::min_trust, -1, DSOPT_KEY_MIN_TRUST, kTrust, GroupField::not_negative,
     "LAMB", true},
    {"max_trust", &dsopt_group::max_trust, &Hyper::max_trust, -1, DSOPT_KEY_MAX_TRUST, kTrust, GroupField::not_negative,
     "LAMB", true},
    {"momentum", &dsopt_group::momentum, &Hyper::momentum, DSOPT_HYPER_MOMENTUM, DSOPT_KEY_MOMENTUM, kMomentum,
     GroupField::not_negative, "SGD", false},
    {"dampening", &dsopt_group::dampening, &Hyper::dampening, -1, DSOPT_KEY_DAMPENING, kMomentum,
     GroupField::not_negative, "SGD", false},
    {"lr_decay", &dsopt_group::lr_decay, &Hyper::lr_decay, -1, DSOPT_KEY_LR_DECAY, kLrDecay, GroupField::not_negative,
     "Adagrad", false},
    {"initial_accumulator_value", &dsopt_group::initial_accumulator_value, nullptr, -1,
     DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE, kLrDecay, GroupField::not_negative, "Adagrad", false},
};

/// call(index) with the index of each of them as a constant: device code cannot read the table at run time.
template <class Call> DSOPT_HD void for_group_fields(const Call &call) {
    [&]<size_t... I>(std::index_sequence<I...>) { (call(std::integral_constant<size_t, I>{}), ...); }
    (std::make_index_sequence<std::size(kGroupFields)>{});
}
/// Named places of a row of dsopt_step.hyper. The others must be 0 or NaN.
constexpr int kHyperPlaces = [] {
    int places = DSOPT_HYPER_MAX_NORM + 1;
    for (const GroupField &field : kGroupFields) places = field.place < places ? places : field.place + 1;
    return places;
}();

/// One flag of dsopt_group.
struct GroupFlag {
    int32_t flag; // DSOPT_GROUP_...
    const char *name;
    int32_t key; // DSOPT_KEY_..., 0: it cannot change
};
inline constexpr GroupFlag kGroupFlags[] = {
    {DSOPT_GROUP_NO_BIAS_CORRECTION, "no_bias_correction", 0}, // its key says the opposite
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
    int32_t flags = 0;                    // of enum dsopt_group_flags that have an effect
    bool compat = false;                  // compat mode has it
    bool one_count = false;               // and counts steps per group there: see count_like_original()
    void (*defaults)(dsopt_group &group); // of fields that do not start as 0
    void (*check)(const dsopt_group &group, bool compat) = nullptr; // what the tables above do not say
    Rule (*formula)(const dsopt_group &group, bool compat);         // which one its options choose
};

/// RuleInfo::formula of an algorithm with one formula, and of one that may have eps inside the root.
template <Rule Only> Rule always(const dsopt_group &, bool) { return Only; }
template <Rule Outside, Rule Inside> Rule by_eps(const dsopt_group &group, bool) {
    return group.flags & DSOPT_GROUP_EPS_INSIDE_SQRT ? Inside : Outside;
}

} // namespace dsopt
