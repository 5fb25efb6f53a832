// SPDX-License-Identifier: Apache-2.0
#include "step/phases.h"
#include "device/onebit_plan.h"
#include "step/agree.h"
#include <algorithm>

namespace dsopt {

bool PhaseList::has(Phase phase) const { return std::find(phases_, phases_ + count_, phase) != phases_ + count_; }

PhaseList phases_of(const StepPlan &plan, const StepRows *rows, const CommSet &comms) {
    const StepPolicy &policy = plan.policy;
    const OneBitPlan *const onebit = plan.onebit;
    const bool averages = rows != nullptr && (rows->averaged != nullptr || rows->averaged_in_node != nullptr) &&
                          !(rows->buckets_are_averaged && rows->buckets == rows->layout.sections());
    const bool shards = rows != nullptr && rows->sharding != Sharding::none;
    // Of these steps each rank inspects a part. The sums of updates are partial if state is sharded.
    const bool in_parts = shards || plan.slice_jobs != nullptr,
               partial_sums = shards && (policy.reduces || policy.report_norms);
    const bool shares_trust = plan.shards.count != plan.shards.exchanged;
    PhaseList list;
    list.add_if(averages, Phase::average);
    if (policy.read_gradients) {
        list.add_if(in_parts, Phase::clear_squares);
        list.add(Phase::inspect);
        list.add_if(in_parts, Phase::complete_squares);
    }
    list.add(in_parts ? Phase::fold_completed : Phase::fold);
    list.add_if(has_peers(comms) && !policy.early, Phase::agree);
    list.add(Phase::decide);
    if (onebit != nullptr) {
        list.add_if(onebit->trust_factor != nullptr || makes_local_step(*onebit), Phase::begin_onebit);
        list.add_if(onebit->stage != Stage::dry && onebit->stage != Stage::full, Phase::onebit);
    }
    list.add_if(shares_trust, Phase::clear_shards);
    list.add_if(partial_sums, Phase::clear_sums);
    list.add(Phase::update);
    list.add_if(policy.reduces && !shards, Phase::trust);
    list.add_if(plan.matrices != nullptr, Phase::matrices);
    list.add_if(partial_sums, Phase::complete_sums);
    list.add_if(policy.reduces && shards, Phase::trust);
    list.add_if(shares_trust, Phase::sum_shards);
    if (policy.reduces) {
        list.add_if(shares_trust, Phase::shared_trust);
        list.add(Phase::weights);
    }
    list.add(Phase::finish);
    list.add_if(onebit != nullptr, Phase::end_onebit);
    list.add_if(shards, Phase::gather);
    return list;
}

std::string to_text(const PhaseList &phases, const StepPlan &plan, const CommSet &comms) {
    const auto has_ranks = [](const Comm *comm) { return comm != nullptr && comm->ranks() > 1; };
    bool experts = false;
    for (int32_t k = 0; k < comms.expert_count; ++k) experts = experts || has_ranks(comms.experts[k].get());
    const bool split = plan.matrices != nullptr && plan.matrices->places != nullptr;
    const struct {
        const char *name;
        uint8_t phases; // PhaseRanks
        bool is_used;
    } with[] = {{"node", kDataRanks, has_ranks(comms.node)},
                {"data", kDataRanks, has_ranks(comms.data)},
                {"model", kModelRanks, has_ranks(comms.model)},
                {"experts", kExpertRanks, experts},
                {comms.matrices() == comms.node ? "node" : "data", kMatrixRanks, split}};
    std::string text;
    for (const Phase phase : phases.all()) {
        const PhaseInfo &info = info_of(phase);
        if (!text.empty()) text += ", ";
        text += info.name;
        const char *before = " (", *after = "";
        for (const auto &[name, mask, is_used] : with) {
            if (!is_used || !(info.ranks & mask)) continue;
            text += before;
            text += name;
            before = ", ", after = ")";
        }
        text += after;
    }
    return text;
}

} // namespace dsopt
