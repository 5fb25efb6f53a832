// SPDX-License-Identifier: Apache-2.0
// Makes the plan of a step from checked lists.
#include "optimizer/plan.h"
#include "rules/group.h"
#include <algorithm>
#include <cmath>

namespace dsopt {
namespace {

/// Returns an empty slot for NULL.
Slot slot_or_none(const dsopt_tensor *tensor) {
    return tensor != nullptr ? slot_of(*tensor) : Slot{nullptr, Dtype::f32};
}

/// Returns an array from an element on; NULL stays NULL.
void *from_element(void *data, int64_t element, size_t size) {
    return data != nullptr ? static_cast<char *>(data) + size_t(element) * size : nullptr;
}

/// Returns the gradient of a parameter in a call; NULL if it has none.
const dsopt_tensor *gradient_of(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state,
                                size_t i) {
    if (request.flags & DSOPT_STEP_ACCUMULATED)
        return optimizer.params()[i].accumulated ? optimizer.state().find(state, StateKind::grad_accum, int64_t(i))
                                                 : nullptr;
    return !request.initial && request.step.grads[i].data != nullptr ? &request.step.grads[i] : nullptr;
}

/// Returns the memory of a whole parameter in a call.
void *memory_of_param(const Optimizer &optimizer, const StepRequest &request, size_t i) {
    return request.step.params != nullptr ? request.step.params[i].data : optimizer.params()[i].data;
}

/// Returns the ranks over which the engine averages a gradient in a step.
Averages averages_in(const StepRequest &request, const Participation &participation, Stage stage) {
    return request.initial ? Averages::none : participation.averages(stage);
}
Stage stage_of(const OneBitPlan *onebit) { return onebit != nullptr ? onebit->stage : Stage::full; }

/// True if every rank of a node needs the node's mean of every gradient: in local steps of 0/1 Adam.
bool needs_all_of_node(const OneBitPlan &onebit) { return makes_local_step(onebit); }

/// Fills the jobs of StepPlan::fed: the ranges of `jobs` that are in this rank's slice.
void plan_fed(const Optimizer &optimizer, const StepRequest &request, const OneBitPlan &onebit, const TensorJob *jobs,
              TensorJob *fed) {
    for (size_t i = 0; i < optimizer.params().size(); ++i) {
        const Param &param = optimizer.params()[i];
        const Range slice = optimizer.parts()->slice(i);
        const bool has_slice = averages_in(request, optimizer.participation()[i], onebit.stage) == Averages::in_node &&
                               !needs_all_of_node(onebit); // of the mean
        TensorJob &job = fed[i] = jobs[i];
        job.range = {param.begin + slice.begin, slice.numel, param.whole};
        job.first_leaf = param.first_leaf + slice.begin / kLeaf;
        job.zeroes = false;
        for (int k = 0; k < kSlots; ++k)
            if (k != kGrad || !has_slice)
                job.data[k] = from_element(job.data[k], slice.begin, size_t(size_of(job.formats[k])));
        job.data[kCopy] = job.data[kOut] = nullptr; // no pass over these jobs writes weights to them
    }
}

void plan_jobs(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state, float *means,
               const OneBitPlan *onebit, TensorJob *jobs) {
    const dsopt_step &step = request.step;
    const std::vector<Param> &params = optimizer.params();
    const std::shared_ptr<Comm> &model = optimizer.attachments().model;
    const bool rounds_at_random = optimizer.desc().flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
    const bool wrapped = optimizer.wrapper() != Wrapper::none;
    const bool first_model_rank = !model || model->rank() == 0;
    const Stage stage = stage_of(onebit);
    for (size_t i = 0; i < params.size(); ++i) {
        const Param &param = params[i];
        const auto state_of = [&](StateKind kind) { return optimizer.state().find(state, kind, int64_t(i)); };
        const auto memory_of = [&](StateKind kind) {
            const dsopt_tensor *const tensor = state_of(kind);
            return tensor != nullptr ? tensor->data : nullptr;
        };
        // The arrays of state have the part only; parameters and gradients are whole.
        const Range part = optimizer.part_of(i);
        const auto slot_of_part = [&](const Slot &slot) {
            return Slot{from_element(slot.data, part.begin, dtype_size(slot.format)), slot.format};
        };
        void *const data = memory_of_param(optimizer, request, i);
        const dsopt_tensor *out = step.out != nullptr && step.out[i].data != nullptr ? &step.out[i] : nullptr;
        const bool copies = param.has_master && !(request.flags & DSOPT_STEP_OUT_ONLY) && !request.initial;
        const dsopt_tensor *const grad = gradient_of(optimizer, request, state, i);
        const bool sharded = param.flags & DSOPT_PARAM_MODEL_PARALLEL;
        // With a wrapper an absent gradient counts as zeros, unless the parameter has no memory yet.
        const bool is_zeros = wrapped && (param.has_master || data != nullptr || param.numel == 0);
        const Participation &participation = optimizer.participation()[i];
        const Averages averages = averages_in(request, participation, stage);
        const bool present = grad != nullptr || is_zeros || (!request.initial && participation.absent_is_zeros(stage));
        jobs[i] = {.data = {},
                   .scale = {},
                   .remainder = static_cast<uint16_t *>(memory_of(StateKind::remainder)),
                   .random_key = param.random_key,
                   .range = {param.begin + part.begin, part.numel, param.whole},
                   .first_leaf = param.first_leaf + part.begin / kLeaf,
                   .leaves = param.leaves(),
                   .group = param.group,
                   .expert = param.expert,
                   .trust_slot = param.trust_slot,
                   .counter = int32_t(i),
                   .ordinal = 1,
                   .advance = present,
                   .owner = present ? participation.owner(stage) : Owner::none,
                   .present = present,
                   .has_master = param.has_master,
                   .in_norm = !(param.flags & DSOPT_PARAM_REPLICATED) && (sharded || first_model_rank),
                   .stochastic = rounds_at_random && param.dtype == DSOPT_DTYPE_BF16,
                   .zeroes = (request.flags & DSOPT_STEP_ZERO_GRADS) && grad != nullptr && !optimizer.shards(),
                   .formats = {},
                   .stored = param.stored()};
        const Slot param_slot = slot_of_part({data, Dtype(param.dtype)});
        const bool separate = param.has_master && !param.has_remainder;
        if (optimizer.parts() && averages != Averages::none) {
            jobs[i].set(kGrad, {means + optimizer.parts()->mean(i), Dtype::f32});
            jobs[i].zeroes = false;
        } else {
            jobs[i].set(kGrad, slot_of_part(slot_or_none(grad)));
        }
        jobs[i].set(kWeight, separate ? slot_of(*state_of(StateKind::master)) : param_slot);
        jobs[i].set(kCopy, {copies && separate ? param_slot.data : nullptr, param_slot.format});
        jobs[i].set(kOut, slot_or_none(out));
        for (int k = 0; k < kMoments; ++k) {
            const dsopt_tensor *const moment = state_of(moment_kind(k));
            // In compat mode moments may have the dtype of the parameter.
            const Format format = moment == nullptr                 ? Format::f32
                                  : param.formats[k] != Format::f32 ? param.formats[k]
                                                                    : Format(moment->dtype);
            jobs[i].data[kMoment + k] = moment != nullptr ? moment->data : nullptr;
            jobs[i].formats[kMoment + k] = format;
            jobs[i].scale[k] = static_cast<float *>(memory_of(scale_kind(k)));
        }
    }
}

/// The original's fused Adam has one step counter per group: the counter of the group's last tensor with a gradient. A
/// step advances it once per parameter dtype that is present, in the order f16, bf16, f32, and all tensors of a dtype
/// use the value after the advance for that dtype. With a wrapper the original's group is one fp32 tensor, so every
/// tensor has its own counter.
void assign_group_counters(const std::vector<dsopt_group> &groups, TensorJob *jobs, int64_t count) {
    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
        int32_t last = -1;
        bool present[3] = {};
        const auto type = [&](int64_t i) {
            switch (jobs[i].weight().format) {
            case Dtype::f16: return 0;
            case Dtype::bf16: return 1;
            case Dtype::f32: break;
            }
            return 2;
        };
        for (end = begin; end < count && jobs[end].group == jobs[begin].group; ++end)
            if (jobs[end].present) last = int32_t(end), present[type(end)] = true;
        if (last < 0 || !info_of(groups[size_t(jobs[begin].group)].algorithm).counts_per_group) continue;
        const uint8_t ordinals[] = {1, uint8_t(1 + present[0]), uint8_t(1 + present[0] + present[1])};
        for (int64_t i = begin; i < end; ++i) {
            jobs[i].counter = last;
            jobs[i].ordinal = ordinals[type(i)];
            jobs[i].advance = 0;
        }
        jobs[last].advance = uint8_t(present[0] + present[1] + present[2]);
    }
}

void plan_groups(const std::vector<dsopt_group> &groups, bool compat, Hyper *hypers) {
    for (size_t i = 0; i < groups.size(); ++i) {
        const dsopt_group &g = groups[i];
        Hyper &hyper = hypers[i] = {};
        for (const GroupField &field : kGroupFields)
            if (field.hyper != nullptr) hyper.*field.hyper = g.*field.value;
        hyper.rule = formula_of(g, compat);
        hyper.bias_correction = !(g.flags & DSOPT_GROUP_NO_BIAS_CORRECTION) && !is_onebit(g.algorithm);
        hyper.compat = compat && !is_onebit(g.algorithm);
        hyper.eps_uncorrected = (g.flags & DSOPT_GROUP_EPS_UNCORRECTED) != 0;
    }
}

} // namespace

StepShape shape_of(const Optimizer &optimizer) {
    const std::vector<Param> &params = optimizer.params();
    const OneBit *const onebit = optimizer.onebit();
    const int64_t leaves = params.empty() ? 0 : params.back().leaves().end();
    const bool exchanges = onebit != nullptr && onebit->setup().compresses;
    return {.tensors = int64_t(params.size()),
            .groups = int64_t(optimizer.groups().size()),
            .leaves = leaves,
            .onebit = onebit != nullptr,
            .feeds_slice = exchanges && onebit->setup().layout.has_levels() && !optimizer.shards(),
            .exchange = exchanges ? &onebit->setup().layout : nullptr,
            .matrices = optimizer.matrices() != nullptr ? &optimizer.matrices()->counts() : nullptr};
}

StepMemory::StepMemory(const Optimizer &optimizer, void *workspace, void *host) {
    const StepShape shape = shape_of(optimizer);
    const NormTable table_of_norms{nullptr, shape.groups, 1 + optimizer.desc().expert_count};
    const OneBitSetup *const onebit = shape.onebit ? &optimizer.onebit()->setup() : nullptr;
    const bool lamb = onebit != nullptr && onebit->rules.algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB;
    const Device &device = optimizer.context().device();
    Arena arena(workspace);
    arena.take(control, 1);
    arena.take(outcome, 1);
    arena.take(scalars, shape.tensors);
    arena.take(divisors, shape.groups);
    arena.take(norms, table_of_norms.size_with_lanes());
    arena.take(sums_a, shape.leaves);
    arena.take(sums_b, shape.leaves);
    arena.take(bad, shape.leaves);
    arena.take(factors, lamb ? shape.leaves : 0);
    arena.take_bytes(shards, ShardTable{nullptr, optimizer.trust_slots(), 0}.bytes());
    arena.take_bytes(device_workspace, device.kernels().device_workspace_bytes(shape));
    arena.take_bytes(exchange, shape.exchange != nullptr ? Exchange::workspace_bytes(*shape.exchange, onebit->use) : 0);
    const RankParts *const parts = optimizer.parts();
    arena.take(mean, parts != nullptr ? parts->mean_numel() : 0);
    for (char *&staged : staging) arena.take(staged, parts != nullptr ? parts->layout().staging_bytes() : 0);
    const Matrices *const own = optimizer.matrices();
    const int threads = optimizer.context().parallel().threads;
    size_t batch_bytes = 0;
    for (size_t i = 0; own != nullptr && i < own->batches().size(); ++i)
        batch_bytes = std::max(batch_bytes, device.kernels().matrix_sizes(own->batches()[i], threads).workspace);
    arena.take_bytes(matrices, batch_bytes);
    const int64_t row_bytes = own != nullptr ? own->row_bytes() : 0;
    arena.take(matrix_row, row_bytes);
    arena.take(matrix_rows, own != nullptr ? row_bytes * own->ranks() : 0);
    Arena host_arena(host);
    Arena &host_arrays = device.is_host() ? arena : host_arena;
    host_arrays.take_bytes(table, StepTable(nullptr, shape).bytes);
    for (dsopt_tensor **list : {&weights, &averaged, &averaged_in_node, &gradients})
        host_arrays.take(*list, parts != nullptr ? shape.tensors : 0);
    host_arrays.take(pieces, parts != nullptr ? 2 * parts->layout().max_pieces() : 0);
    host_arrays.take(host_norms, device.is_host() ? 0 : table_of_norms.size_with_message());
    bytes = arena.bytes();
    host_bytes = host_arena.bytes();
}

size_t Optimizer::workspace_bytes() const { return with_alignment_padding(StepMemory(*this, nullptr, nullptr).bytes); }

StepPlan make_plan(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state,
                   const StepMemory &memory, const StepTable &table, const OneBitPlan *onebit,
                   const MatrixPlan *matrices) {
    const Context &context = optimizer.context();
    const dsopt_optimizer_desc &desc = optimizer.desc();
    const std::vector<dsopt_group> &groups = optimizer.groups();
    const Attachments &with = optimizer.attachments();
    const StateTable &entries = optimizer.state();
    const dsopt_step &step = request.step;
    if (request.reuse == Reuse::all_but_addresses) {
        const bool own = !optimizer.parts() || !(desc.flags & DSOPT_OPTIMIZER_AVERAGES); // not means
        for (int64_t i = 0; own && i < step.count; ++i)
            table.jobs[i].data[kGrad] =
                from_element(step.grads[i].data, optimizer.part_of(size_t(i)).begin, dtype_size(step.grads[i].dtype));
    } else if (request.reuse == Reuse::nothing) {
        plan_jobs(optimizer, request, state, memory.mean, onebit, table.jobs);
        plan_groups(groups, optimizer.compat(), table.groups);
        if (optimizer.compat() && optimizer.wrapper() == Wrapper::none)
            assign_group_counters(groups, table.jobs, int64_t(optimizer.params().size()));
    }
    // In the stages that exchange. Such plans are never reused.
    const bool feeds = table.fed != nullptr && (onebit->stage == Stage::exchange || onebit->stage == Stage::sync);
    if (feeds) plan_fed(optimizer, request, *onebit, table.jobs, table.fed);
    bool clips = desc.max_norm > 0, reduces = false;
    for (size_t i = 0; i < groups.size(); ++i) {
        clips = clips || table.groups[i].max_norm > 0;
        reduces = reduces || passes_of(table.groups[i].rule) == Passes::reduced;
    }
    const Wrapper wrapped = optimizer.wrapper();
    const bool has_scaler = with.scaler != nullptr && !request.initial;
    // The fused wrapper inspects every gradient; without a scaler it only reports. The unfused wrapper also skips.
    const bool inspects =
        (desc.nonfinite == DSOPT_NONFINITE_SKIP || clips || has_scaler || wrapped != Wrapper::none) && !request.initial;
    const bool reports_only = wrapped == Wrapper::fused && !has_scaler && desc.nonfinite == DSOPT_NONFINITE_AUTO;
    const bool exchanges = onebit != nullptr && onebit->stage != Stage::full;
    const int64_t exchanged = exchanges ? optimizer.onebit()->setup().trust_slots : 0;
    PlannedScaler scaler{};
    if (has_scaler)
        scaler = {entries.data<float>(state, StateKind::loss_scale),
                  entries.data<ScalerState>(state, StateKind::scaler), with.scaler->rules()};
    return {
        .jobs = table.jobs,
        .fed = feeds ? table.fed : nullptr,
        .count = int64_t(optimizer.params().size()),
        .groups = table.groups,
        .group_count = int64_t(groups.size()),
        .flags = request.flags,
        .policy = {.wrapper = wrapped,
                   .read_gradients = inspects && step.grad_norms == nullptr,
                   .skip_nonfinite = desc.nonfinite != DSOPT_NONFINITE_APPLY && !reports_only,
                   .report_norms = (desc.flags & DSOPT_OPTIMIZER_REPORT_NORMS) != 0,
                   .reduces = reduces,
                   .stored = optimizer.stored_params() != 0,
                   .plain =
                       optimizer.stored_params() != int64_t(optimizer.params().size()) || optimizer.params().empty(),
                   // The first call of compat mode is dry: learning rates are 0. NON_FREEZE groups do update moments.
                   .dry = onebit != nullptr && onebit->stage == Stage::dry,
                   .parts = optimizer.shards(),
                   .completes = optimizer.shards() || feeds,
                   .ends_later = optimizer.shards() || matrices != nullptr},
        .limits = {request.initial ? 0.0 : desc.max_norm, desc.max_value > 0 ? float(desc.max_value) : INFINITY},
        .caller = {step.lr, step.hyper, step.grad_scale, step.grad_norms, step.skip},
        .scaler = scaler,
        .step = entries.data<int32_t>(state, StateKind::step),
        .onebit = onebit,
        .matrices = matrices,
        .trust_ratio = entries.data<float>(state, StateKind::trust_ratio),
        .report = step.report,
        .outcome = memory.outcome,
        .execution = {step.stream, context.parallel(step.parallel_for, step.parallel_user), context.chunk(),
                      memory.device_workspace, shape_of(optimizer), nullptr, (desc.flags & DSOPT_OPTIMIZER_TIMING) != 0,
                      request.reuse},
        .control = memory.control,
        .scalars = memory.scalars,
        .divisors = memory.divisors,
        .norms = {memory.norms, int64_t(groups.size()), 1 + int64_t(request.initial ? 0 : with.experts.size())},
        .leaf = {memory.sums_a, memory.sums_b, memory.bad},
        .visited = optimizer.shards() ? optimizer.parts()->leaves() : LeafInterval{0, shape_of(optimizer).leaves},
        .fed_visited = feeds                ? optimizer.parts()->slice_leaves()
                       : optimizer.shards() ? optimizer.parts()->inspected_leaves()
                                            : LeafInterval{0, shape_of(optimizer).leaves},
        .shards = {memory.shards, optimizer.trust_slots(), exchanged}};
}

StepRows plan_rows(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state,
                   const StepMemory &memory, const StepPlan &plan) {
    const RankParts &parts = *optimizer.parts();
    StepRows rows{.layout = parts.layout(),
                  .sharding = parts.sharding(),
                  .comms = row_comms(optimizer.attachments().data.get(), optimizer.attachments().node.get(),
                                     parts.sharding(), plan.fed != nullptr),
                  .averaged = nullptr,
                  .averaged_in_node = nullptr,
                  .all_of_node = plan.onebit != nullptr && needs_all_of_node(*plan.onebit),
                  .weights = optimizer.shards() ? memory.weights : nullptr,
                  .lists = memory.pieces,
                  .staging = {memory.staging[0], memory.staging[1]}};
    for (size_t i = 0; i < optimizer.params().size(); ++i) {
        const Param &param = optimizer.params()[i];
        const dsopt_tensor *const gradient = gradient_of(optimizer, request, state, i);
        memory.weights[i] = param.tensor();
        memory.weights[i].data = memory_of_param(optimizer, request, i);
        memory.averaged[i] = memory.averaged_in_node[i] = memory.gradients[i] = {};
        const Averages averages = averages_in(request, optimizer.participation()[i], stage_of(plan.onebit));
        if (averages != Averages::none) {
            const bool accumulated = request.flags & DSOPT_STEP_ACCUMULATED, all = averages == Averages::all;
            (all ? memory.averaged : memory.averaged_in_node)[i] = {
                gradient != nullptr ? gradient->data : nullptr, param.numel,
                accumulated ? int32_t(DSOPT_DTYPE_F32) : request.step.grads[i].dtype, 0};
            (all ? rows.averaged : rows.averaged_in_node) = all ? memory.averaged : memory.averaged_in_node;
        }
        if (gradient != nullptr && (averages != Averages::none || optimizer.shards())) memory.gradients[i] = *gradient;
    }
    return rows;
}

void check_pointers(const Optimizer &optimizer, const StepRequest &request, const StepPlan &plan) {
    const dsopt_tensor *const grads = request.step.grads;
    for (int64_t i = 0; i < plan.count; ++i) {
        const TensorJob &job = plan.jobs[i];
        const MomentList &moments = moments_of(optimizer.groups()[size_t(job.group)]);
        constexpr const char *kNames[] = {"gradient", "weight", "parameter", "output"}; // of SlotIndex
        static_assert(std::size(kNames) == kMoment);
        int64_t numel = optimizer.params()[size_t(i)].numel;
        const auto check = [&](const void *data, const char *role) {
            if (data != nullptr && numel != 0 && !optimizer.context().device().owns(data))
                throw Error(DSOPT_ERR_DEVICE, "%s of '%s' at %p is not memory of this context's device", role,
                            optimizer.params()[size_t(i)].name.c_str(), data);
        };
        // Whole tensors first: the job has this rank's part, and the average in place of the gradient.
        check(grads != nullptr ? grads[i].data : nullptr, kNames[kGrad]);
        check(memory_of_param(optimizer, request, size_t(i)), kNames[kCopy]);
        numel = job.range.numel;
        for (int k = 0; k < kSlots; ++k) check(job.data[k], k < kMoment ? kNames[k] : moments.info[k - kMoment].name);
        for (int k = 0; k < kMoments; ++k) check(job.scale[k], moments.info[k].scale_name);
        check(job.remainder, record_of(StateKind::remainder).name);
    }
}

} // namespace dsopt
