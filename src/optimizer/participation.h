// SPDX-License-Identifier: Apache-2.0
// What each parameter takes part in, of the steps of an optimizer: who averages its gradient, whether it is exchanged
// with one bit per element, who updates it, and what an absent gradient means. It follows from the list, the options
// and the ranks.
#pragma once
#include "device/plan.h"
#include "exchange/layout.h"
#include "optimizer/param.h"
#include "rules/schedule.h"

namespace dsopt {

struct OneBitSetup;

/// The ranks over which the engine averages a gradient.
enum class Averages : uint8_t { none, all, in_node };

struct Participation {
    bool is_matrix = false;               // a rule with Passes::matrix updates it
    bool exchanged = false;               // after the freeze ranks exchange it with one bit per element
    bool sent = false;                    // it has a place in messages of exchanges
    Averages full = Averages::none;       // in full steps of the 1-bit family, and in every step of other rules
    Averages compressed = Averages::none; // in stages exchange and sync
    Averages local = Averages::none;      // in local steps of 0/1 Adam
    bool mean_of_slice = false;           // the mean is needed for this rank's slice of its node only

    /// `stage` is Stage::full without a group of the 1-bit family.
    Averages averages(Stage stage) const {
        switch (stage) {
        case Stage::dry:
        case Stage::full: return full;
        case Stage::local: return local;
        case Stage::exchange:
        case Stage::sync: break;
        }
        return compressed;
    }
    /// True if the engine averages the gradient in some stage.
    bool is_averaged() const {
        return full != Averages::none || compressed != Averages::none || local != Averages::none;
    }
    /// True if an absent gradient is zeros in a stage, so that all ranks send messages of the same size. Otherwise the
    /// parameter is not updated.
    bool absent_is_zeros(Stage stage) const {
        const bool in_message = sent && (stage == Stage::exchange || stage == Stage::sync);
        return in_message || averages(stage) != Averages::none;
    }
    /// Returns who updates the parameter in a stage, if it has a gradient.
    Owner owner(Stage stage) const {
        if (is_matrix) return Owner::matrix;
        if (!exchanged || stage == Stage::full) return Owner::update;
        return stage == Stage::dry ? Owner::none : Owner::exchange;
    }
};

/// Returns that of each parameter. `onebit`: NULL without a group of the 1-bit family.
std::vector<Participation> participation_of(const std::vector<Param> &params, const std::vector<dsopt_group> &groups,
                                            const dsopt_optimizer_desc &desc, const DataRank &local,
                                            const OneBitSetup *onebit);
/// True if ranks exchange rows of means or weights: several ranks with sharded state, or that average gradients.
bool exchanges_rows(const std::vector<dsopt_group> &groups, const dsopt_optimizer_desc &desc, const DataRank &local);

} // namespace dsopt
