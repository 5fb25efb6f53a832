// SPDX-License-Identifier: Apache-2.0
// Construction of an optimizer, and addition of groups and parameters. The lists are in registry.cc, hyper-parameters
// in hyper.cc, the state's memory in state_memory.cc, the step in step.cc.
#include "optimizer/optimizer.h"
#include "base/sizes.h"
#include "base/struct_io.h"
#include "optimizer/group.h"
#include "optimizer/ready.h"
#include <algorithm>
#include <utility>

namespace dsopt {

Optimizer::Optimizer(std::shared_ptr<const Context> context, const dsopt_optimizer_desc &desc,
                     Attachments attachments) :
    context_(std::move(context)),
    desc_(desc),
    attachments_(std::move(attachments)) {
    logged_.loss_scale = attachments_.scaler ? attachments_.scaler->host_written_scale().value_or(0) : 1;
    if (desc.compat != DSOPT_COMPAT_NONE && desc.compat != DSOPT_COMPAT_DEEPSPEED)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_desc.compat is %d, which this library does not know",
                    desc.compat);
    constexpr int32_t known = DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_REPORT_NORMS |
                              DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING | DSOPT_OPTIMIZER_ACCUMULATE |
                              DSOPT_OPTIMIZER_TIMING | DSOPT_OPTIMIZER_AVERAGES | DSOPT_OPTIMIZER_CHECK_RANKS |
                              DSOPT_OPTIMIZER_MOMENTUM_BITS | DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_SHARD_NODE |
                              DSOPT_OPTIMIZER_SPLIT_MATRICES | DSOPT_OPTIMIZER_EARLY_UPDATE;
    if (desc.flags & ~known)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_desc.flags has unknown bits: 0x%x", desc.flags);
    require_in(DSOPT_NONFINITE_AUTO, DSOPT_NONFINITE_APPLY, "dsopt_optimizer_desc.nonfinite", desc.nonfinite);
    require_in(DSOPT_MASTERS_PER_TENSOR, DSOPT_MASTERS_REMAINDER, "dsopt_optimizer_desc.masters", desc.masters);
    check_max_norm(desc.max_norm, "dsopt_optimizer_desc.max_norm");
    check_max_value(desc.max_value, "dsopt_optimizer_desc.max_value");
    require(desc.bucket >= 0 && desc.bucket % ListVector::kBlock == 0, "dsopt_optimizer_desc.bucket",
            double(desc.bucket), "a multiple of 4096, not negative");
    require_in(0, 16, "dsopt_optimizer_desc.buckets_in_flight", desc.buckets_in_flight);
    if (desc.reserved != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_desc.reserved is %d, must be 0", desc.reserved);
    require(desc.skip_budget >= 0, "dsopt_optimizer_desc.skip_budget", desc.skip_budget, "not negative");
    Facts all = facts_of(desc);
    all.add(facts::hysteresis, attachments_.scaler && attachments_.scaler->rules().hysteresis > 1);
    check_options<At::optimizer>(all);
    if (check_node(attachments_.data.get(), attachments_.node.get(), desc.compat) == nullptr) attachments_.node.reset();
    if (attachments_.scaler) attachments_.scaler_token = attachments_.scaler->attach();
    // Steps of all optimizers of a scaler update its scale, so these optimizers share their pending work.
    attachments_.pending =
        attachments_.scaler ? attachments_.scaler->pending() : context_->device().make_pending_work();
}

Optimizer::~Optimizer() {
    ready_.reset();
    // Comms are released before memory: releasing memory waits for the device, on which a collective may wait for a
    // dead peer. Destroying a comm ends its collectives.
    for (auto *comm : {&attachments_.data, &attachments_.model, &attachments_.node}) comm->reset();
    attachments_.experts.clear();
}

void check_groups(const Optimizer &optimizer) {
    if (optimizer.groups().empty()) throw Error(DSOPT_ERR_STATE, "the optimizer has no groups yet");
}

void Optimizer::add_group(const dsopt_group &group, const dsopt_param *params, int64_t count) {
    check_group(group, facts_of(desc_));
    if (is_matrix_rule(group.algorithm)) context_->device().kernels().check_matrices();
    grow(&group, params, count);
}
void Optimizer::add_params(const dsopt_param *params, int64_t count) {
    check_groups(*this);
    grow(nullptr, params, count);
}

/// Appends to the registry, which is restored on failure. Then drops objects that were built for the shorter lists.
void Optimizer::grow(const dsopt_group *group, const dsopt_param *given, int64_t count) {
    check_nothing_ready();
    const auto has_any = [](const StateEntry &entry) { return entry.data != nullptr && !entry.of_scaler(); };
    if (is_sharded(desc_) && std::any_of(state().begin(), state().end(), has_any))
        throw Error(DSOPT_ERR_STATE, "state is sharded by the whole list: parameters come before the first step");
    decode_momentum(); // the layout of exp_avg_bits is that of the current list
    retired_.reserve(retired_.size() + 1);
    bool drops_errors = false;
    Registry &registry = registry_.change();
    registry.append([&](const Registry::Mark &before) {
        // The original has one trust ratio per shard.
        const bool shares_trust = !compat() && attachments_.model && attachments_.model->ranks() > 1;
        registry.add(group, given, count, desc_, shares_trust);
        const bool had_memory = std::any_of(before.of_optimizer.begin(), before.of_optimizer.end(), has_any);
        if (had_memory) wait_for_tensors();
        check_not_frozen(before);
        for (const StateEntry &entry : before.of_optimizer) drops_errors |= entry.is_error() && entry.data != nullptr;
        save_contents(before.of_optimizer, registry.state);
        if (had_memory) registry.memory.reset(); // bound memory is no longer used
    });
    finalized_.forget();
    derived_ = {};
    retire_step_memory();
    if (drops_errors) context_->log(DSOPT_LOG_INFO, "parameters were added: error feedback begins with zeros");
}

/// Releases the memory that steps of the current lists use. After a capture it is kept, because the graph may be launched.
/// Needs room in `retired_`.
void Optimizer::retire_step_memory() {
    ready_.reset();
    OfSteps old = std::exchange(of_steps_, {});
    if (old.cache && attachments_.pending && attachments_.pending->captured()) retired_.push_back(std::move(old));
}

/// Throws STATE if a new parameter would go into exchanges and the variance is frozen.
void Optimizer::check_not_frozen(const Registry::Mark &before) const {
    const EngineBlock &block = state().block(StateKind::schedule);
    const void *schedule = block.kept ? block.data : nullptr; // kept by an earlier addition
    for (const StateEntry &entry : before.of_optimizer)
        if (entry.kind == StateKind::schedule) schedule = entry.data;
    for (size_t i = before.params; schedule != nullptr && i < params().size(); ++i) {
        if (!is_exchanged(groups()[size_t(params()[i].group)])) continue;
        ScheduleState now;
        context_->device().copy(&now, schedule, sizeof now);
        if (now.frozen == 0) return;
        throw Error(DSOPT_ERR_STATE, "the variance is frozen: '%s' would have none, and never move",
                    params()[i].name.c_str());
    }
}

void Optimizer::finalize_groups() {
    finalized_.get([&] {
        Registry &registry = registry_.change();
        registry.append([&](const Registry::Mark &) {
            Derived derived = derive(registry, desc_, *context_, data_rank(), comms().matrices());
            registry.add_optimizer_state(derived.onebit.get(), attachments_.scaler.get());
            if (derived.shards()) set_parts(*derived.parts, registry);
            matrix_scratch_.reserve(derived.sizes.matrix_scratch); // later `apply` allocates nothing
            restore_contents(registry); // last: contents that were restored are not there for another attempt
            derived_ = std::move(derived);
        });
    });
}

/// Limits the state tensors of parameters to this rank's parts. Accumulated gradients stay whole: they are this rank's
/// own, or will be averaged.
void Optimizer::set_parts(const RankParts &parts, Registry &registry) {
    for (size_t i = 0; i < registry.params.size(); ++i) {
        Param &param = registry.params[i];
        const int64_t numel = parts.part(i).numel;
        param.part_dims.assign(1, numel);
        if (!param.scale_dims.empty()) param.scale_dims.assign(1, blocks_of(numel));
    }
    for (size_t i = 0; i < registry.state.size(); ++i) {
        const StateEntry &entry = registry.state[i];
        if (entry.param < 0 || entry.kind == StateKind::grad_accum) continue;
        const Range part = parts.part(size_t(entry.param));
        const Range scales{part.begin / kBlock, blocks_of(part.numel), blocks_of(part.whole)};
        registry.state.set_part(i, is_scale(entry.kind) ? scales : part);
    }
}

void Optimizer::adopt(LoadedMetadata loaded, ReservedState reserved, FunctionRef<void()> fill_tensors) {
    const Device &device = context_->device();
    ensure_state(std::move(reserved), nullptr, nullptr, loaded.masters);
    device.wait_for_default_stream();
    fill_tensors();
    if (!loaded.masters) reset(DSOPT_RESET_MASTERS, nullptr);
    if (loaded.rules) attachments_.scaler->restore(*loaded.rules);
    if (loaded.has_scaler) attachments_.scaler->clamp_hysteresis();
    Registry &registry = registry_.change();
    registry.groups.swap(loaded.groups);
    for (size_t i = 0; i < loaded.accumulated.size(); ++i)
        registry.params[i].accumulated = loaded.accumulated[i] == '1';
    desc_.max_norm = loaded.max_norm;
    desc_.max_value = loaded.max_value;
    calls_ = loaded.calls;
    resharded_from_ = loaded.resharded_from;
    if (derived_.onebit) derived_.onebit->set_rules(registry.groups);
    state_changed();
    if (loaded.state && onebit() != nullptr) onebit()->reset_as_original_load(state());
    if (loaded.resets_errors) reset(DSOPT_RESET_ERRORS, nullptr);
    device.wait_for_default_stream();
}

void Optimizer::accumulate(const dsopt_tensor *grads, int64_t count, void *stream) {
    check_options<At::step>(
        Facts{facts::accumulated}.add(facts::accumulate, (desc_.flags & DSOPT_OPTIMIZER_ACCUMULATE) != 0));
    check_length(grads, count, params().size(), "the list of gradients");
    for (size_t i = 0; i < params().size(); ++i)
        if (grads[i].data != nullptr) {
            check_same_numel(grads[i], params()[i], "gradient of");
            if (ready_ && ready_->has(i)) check_nothing_ready();
        }
    const Enqueues work(pending(), stream);
    ensure_state(nullptr, stream);
    dsopt_ready all{};
    all.grads = grads;
    all.count = count;
    all.stream = stream;
    add_to_accumulators(all);
}

void Optimizer::add_to_accumulators(const dsopt_ready &ready) {
    if (ready.grads == nullptr) return;
    HostScratch scratch(host_scratch_, size_t(ready.count) * sizeof(dsopt_tensor));
    auto *const sums = reinterpret_cast<dsopt_tensor *>(scratch.data());
    for (int64_t k = 0; k < ready.count; ++k)
        sums[k] = *state().find(state().list().data(), StateKind::grad_accum, int64_t(param_of(ready, k)));
    context_->device().kernels().axpby({}, ready.grads, 1, sums, ready.count, context_->parallel(), ready.stream);
    Registry &registry = registry_.change();
    for (int64_t k = 0; k < ready.count; ++k)
        registry.params[param_of(ready, k)].accumulated |= ready.grads[k].data != nullptr;
}

} // namespace dsopt
