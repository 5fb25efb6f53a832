// SPDX-License-Identifier: Apache-2.0
#include "step/agree.h"
#include <cmath>

namespace dsopt {
namespace {

/// Calls `look` for each comm of a step that has other ranks.
template <class Look> void for_each_with_peers(const CommSet &comms, const Look &look) {
    for (const Comm *comm : {comms.data, comms.node, comms.model})
        if (comm != nullptr && comm->ranks() > 1) look(*comm);
    for (int32_t k = 0; k < comms.expert_count; ++k)
        if (comms.experts[k]->ranks() > 1) look(*comms.experts[k]);
}

/// True if the table of norms is all-reduced in backend memory.
bool agrees_in_place(const StepRun &run) {
    bool in_place = true;
    for_each_with_peers(run.comms, [&](const Comm &comm) { in_place = in_place && comm.on_device(); });
    return run.context.device().is_host() || in_place;
}

/// All-reduces `table`, which is in memory of kind `place`. run(move) makes a move of the table there.
void all_reduce_table(const StepPlan &plan, const CommSet &comms, const NormTable &table, Place place,
                      FunctionRef<void(const NormMove &)> run) {
    const auto over = [&](Comm *comm, double *values, int64_t count) {
        if (comm != nullptr)
            comm->all_reduce(values, count, DSOPT_DTYPE_F64, DSOPT_OP_SUM, plan.execution.stream, place);
    };
    const auto over_data = [&](double *values, int64_t count) {
        over(comms.node, values, count);
        over(comms.data, values, count);
    };
    for (int32_t k = 0; k < comms.expert_count; ++k) {
        Comm *const expert = comms.experts[k].get();
        if (expert->ranks() > 1) run({NormMove::to_message, table, k + 1, 1});
        over(expert, table.message(), table.message_size());
        if (expert->ranks() > 1) run({NormMove::from_message, table, k + 1, 1});
    }
    over(comms.model, table.values, table.size());
    const bool local = plan.onebit != nullptr && plan.onebit->stage != Stage::full && plan.onebit->stage != Stage::dry;
    // If gradients were not averaged over all ranks, all of them clip by the same norm: the root mean square of the
    // ranks' norms or, with a node comm, of the nodes' norms.
    if (local && !plan.onebit->rules.compat && data_ranks(comms.data, comms.node) > 1) {
        over(comms.node, &table.reasons(), 1);
        if (comms.data == nullptr || comms.data->ranks() == 1) return;
        over(comms.data, table.values, table.size());
        return run({NormMove::mean, table, 0, double(comms.data->ranks())});
    }
    // The original assumes that data-parallel ranks have the same averaged gradients. It has no other reasons to skip a
    // step.
    if (plan.policy.wrapper == Wrapper::none || local || plan.caller.any()) over_data(&table.reasons(), 1);
}

} // namespace

bool has_peers(const CommSet &comms) {
    bool peers = false;
    for_each_with_peers(comms, [&](const Comm &) { peers = true; });
    return peers;
}

void reserve_norms(const StepRun &run) {
    const Place place = agrees_in_place(run) ? Place::backend : Place::host;
    const int64_t bytes = run.plan.norms.size_with_message() * int64_t(sizeof(double));
    const auto reserve = [&](Comm *comm) {
        if (comm != nullptr) comm->reserve({.all_reduce = bytes}, run.plan.execution.stream, place);
    };
    for (Comm *comm : {run.comms.data, run.comms.node, run.comms.model}) reserve(comm);
    for (int32_t k = 0; k < run.comms.expert_count; ++k) reserve(run.comms.experts[k].get());
}

void all_reduce_norms(const StepRun &run) {
    const StepPlan &plan = run.plan;
    const Device &device = run.context.device();
    if (agrees_in_place(run))
        return all_reduce_table(plan, run.comms, plan.norms, Place::backend, [&](const NormMove &move) {
            device.kernels().run_in_one_thread(move, plan.execution.stream);
        });
    NormTable host = plan.norms;
    host.values = run.host_norms;
    const size_t bytes = size_t(host.size()) * sizeof(double);
    (void)device.finished(plan.execution.stream); // refuses a stream that is being captured
    device.enqueue_copy(host.values, plan.norms.values, bytes, plan.execution.stream);
    device.wait(plan.execution.stream);
    all_reduce_table(plan, run.comms, host, Place::host, [](const NormMove &move) { move(); });
    device.enqueue_copy(plan.norms.values, host.values, bytes, plan.execution.stream);
    device.wait(plan.execution.stream); // the next step writes to `host`
}

void clear_shard_sums(const StepRun &run) {
    const ShardTable &shards = run.plan.shards;
    run.context.device().clear(shards.sums, shards.bytes(), run.plan.execution.stream);
}

void reserve_shards(const StepRun &run) {
    run.comms.model->reserve({.all_reduce = int64_t(run.plan.shards.bytes())}, run.plan.execution.stream,
                             Place::backend);
}

void all_reduce_shards(const StepRun &run, bool frozen) {
    const StepPlan &plan = run.plan;
    const ShardTable &shards = plan.shards;
    constexpr int64_t doubles = sizeof(ShardSums) / sizeof(double);
    run.comms.model->all_reduce(shards.sums, doubles * shards.count, DSOPT_DTYPE_F64, DSOPT_OP_SUM,
                                plan.execution.stream, Place::backend);
    if (frozen)
        run.comms.model->all_reduce(shards.factors(), shards.count, DSOPT_DTYPE_F64, DSOPT_OP_MAX,
                                    plan.execution.stream, Place::backend);
}

void norm_over_ranks(const Context &context, Comm *comm, const dsopt_tensor *list, int64_t count, int32_t kind,
                     double max_norm, dsopt_norm_result *result, void *stream) {
    const Device &device = context.device();
    const bool peers = comm != nullptr && comm->ranks() > 1;
    if (comm != nullptr)
        comm->all_reduce(nullptr, 0, DSOPT_DTYPE_F64, DSOPT_OP_SUM, stream); // refuses an unusable comm
    if (peers) (void)device.finished(stream);                                // refuses a stream that is being captured
    device.kernels().norm(list, count, kind, max_norm, peers, result, context.parallel(), stream);
    if (!peers) return;
    dsopt_norm_result r;
    device.enqueue_copy(&r, result, sizeof r, stream);
    device.wait(stream);
    double value = r.norm;
    double counts[2] = {double(r.nonfinite), std::isnan(value) ? 1.0 : 0.0};
    comm->all_reduce(&value, 1, DSOPT_DTYPE_F64, kind == DSOPT_NORM_MAX ? DSOPT_OP_MAX : DSOPT_OP_SUM, stream);
    comm->all_reduce(counts, 2, DSOPT_DTYPE_F64, DSOPT_OP_SUM, stream);
    r.nonfinite = int64_t(counts[0]);
    if (kind == DSOPT_NORM_MAX && counts[1] > 0) value = NAN; // MAX may drop the NaN of a rank
    finish_norm(r, kind, value, max_norm);
    device.enqueue_copy(result, &r, sizeof r, stream);
    device.wait(stream);
}

} // namespace dsopt
