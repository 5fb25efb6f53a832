// SPDX-License-Identifier: Apache-2.0
#include "step/agree.h"
#include <cmath>

namespace dsopt {
namespace {

template <class Look> void for_each_with_peers(const CommSet &comms, const Look &look) {
    for (const Comm *comm : {comms.data, comms.node, comms.model})
        if (comm != nullptr && comm->ranks() > 1) look(*comm);
    for (int32_t k = 0; k < comms.expert_count; ++k)
        if (comms.experts[k]->ranks() > 1) look(*comms.experts[k]);
}

/// `table` with a message behind it is where `place` says; run(move) does a move there.
void reduce(const StepPlan &plan, const CommSet &comms, const NormTable &table, Place place,
            FunctionRef<void(const NormMove &)> run) {
    const auto add_up = [&](Comm *comm, double *values, int64_t count) {
        if (comm != nullptr) comm->all_reduce(values, count, DSOPT_DTYPE_F64, DSOPT_OP_SUM, plan.stream, place);
    };
    const int64_t size = NormTable::size(table.groups, table.classes);
    NormMove move{NormMove::take, table, table.at + size, 0, 1};
    for (int32_t k = 0; k < comms.expert_count; ++k) {
        const bool alone = comms.experts[k]->ranks() == 1;
        move.column = k + 1;
        move.kind = NormMove::take;
        if (!alone) run(move);
        add_up(comms.experts[k], move.message, table.groups + 2);
        move.kind = NormMove::put;
        if (!alone) run(move);
    }
    add_up(comms.model, table.at, size);
    const auto over_data = [&](double *values, int64_t count) {
        for (Comm *comm : {comms.node, comms.data}) add_up(comm, values, count);
    };
    const int64_t ranks = data_ranks(comms.data, comms.node);
    const bool local = plan.onebit != nullptr && plan.onebit->stage != Stage::full && plan.onebit->stage != Stage::dry;
    // Where gradients were not averaged all ranks clip by one norm: the root mean square of theirs.
    if (local && !plan.onebit->compat && ranks > 1) {
        over_data(table.at, size);
        move.kind = NormMove::mean;
        move.ranks = double(ranks);
        return run(move);
    }
    // The original trusts data-parallel ranks to have the same averaged gradients. What else may skip a step, it does
    // not have.
    const GivenScalars &given = plan.given;
    const bool has_values = given.lr != nullptr || given.hyper != nullptr || given.grad_scale != nullptr ||
                            given.grad_norms != nullptr || given.skip != nullptr;
    if (plan.wrapper == Wrapper::none || local || has_values) over_data(&table.reasons(), 1);
}

} // namespace

bool has_peers(const CommSet &comms) {
    bool peers = false;
    for_each_with_peers(comms, [&](const Comm &) { peers = true; });
    return peers;
}

void agree_on_norms(const StepPlan &plan, const CommSet &comms, const Device &device, StepLoops &loops, double *host) {
    bool in_place = true;
    for_each_with_peers(comms, [&](const Comm &comm) { in_place = in_place && comm.on_device(); });
    const int64_t groups = plan.group_count, classes = plan.classes();
    if (device.is_host() || in_place)
        return reduce(plan, comms, {plan.norms, groups, classes}, Place::backend,
                      [&](const NormMove &move) { loops.move_norms(move); });
    const size_t bytes = size_t(NormTable::size(groups, classes)) * sizeof(double);
    (void)device.finished(plan.stream); // refuses a stream that is being captured
    device.enqueue_copy(host, plan.norms, bytes, plan.stream);
    device.wait(plan.stream);
    reduce(plan, comms, {host, groups, classes}, Place::host, [](const NormMove &move) { move(); });
    device.enqueue_copy(plan.norms, host, bytes, plan.stream);
    device.wait(plan.stream); // the next step writes to `host`
}

bool has_shards(const StepPlan &plan, bool frozen) {
    const bool apart = plan.onebit != nullptr && plan.onebit->stage != Stage::full;
    for (int64_t i = 0; plan.shard_count != 0 && i < plan.count; ++i)
        if (plan.jobs[i].trust_slot >= 0 && (apart && plan.jobs[i].onebit) == frozen) return true;
    return false;
}

void agree_on_shards(const StepPlan &plan, const CommSet &comms, bool frozen) {
    constexpr int64_t doubles = sizeof(ShardSums) / sizeof(double);
    comms.model->all_reduce(plan.shard_sums, doubles * plan.shard_count, DSOPT_DTYPE_F64, DSOPT_OP_SUM, plan.stream,
                            Place::backend);
    if (frozen)
        comms.model->all_reduce(plan.shard_factors(), plan.shard_count, DSOPT_DTYPE_F64, DSOPT_OP_MAX, plan.stream,
                                Place::backend);
}

void norm_over_ranks(const Context &context, Comm *comm, const dsopt_tensor *list, int64_t count, int32_t kind,
                     double max_norm, dsopt_norm_result *result, void *stream) {
    const Device &device = context.device();
    const bool peers = comm != nullptr && comm->ranks() > 1;
    if (comm != nullptr) comm->all_reduce(nullptr, 0, DSOPT_DTYPE_F64, DSOPT_OP_SUM, stream); // says if it is lost
    if (peers) (void)device.finished(stream); // refuses a stream that is being captured
    device.loops().norm(list, count, kind, max_norm, peers, result, context.parallel(), stream);
    if (!peers) return;
    dsopt_norm_result r;
    device.enqueue_copy(&r, result, sizeof r, stream);
    device.wait(stream);
    double value = r.norm;
    double counts[2] = {double(r.nonfinite), std::isnan(value) ? 1.0 : 0.0};
    comm->all_reduce(&value, 1, DSOPT_DTYPE_F64, kind == DSOPT_NORM_MAX ? DSOPT_OP_MAX : DSOPT_OP_SUM, stream);
    comm->all_reduce(counts, 2, DSOPT_DTYPE_F64, DSOPT_OP_SUM, stream);
    r.nonfinite = int64_t(counts[0]);
    if (kind == DSOPT_NORM_MAX && counts[1] > 0) value = NAN; // MAX loses the NaN of a rank
    finish_norm(r, kind, value, max_norm);
    device.enqueue_copy(result, &r, sizeof r, stream);
    device.wait(stream);
}

} // namespace dsopt
