// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/in_use.h"
#include "base/once.h"
#include "base/scratch.h"
#include "comm/comm.h"
#include "device/context.h"
#include "optimizer/derived.h"
#include "optimizer/registry.h"
#include "optimizer/scaler.h"
#include "step/drive.h"
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace dsopt {

/// Objects that an optimizer shares with others and keeps alive.
struct Attachments {
    std::shared_ptr<Scaler> scaler;
    std::shared_ptr<Comm> data, model, node;
    std::vector<std::shared_ptr<Comm>> experts;
    std::shared_ptr<void> scaler_token;   // of Scaler::attach(): shows if the scaler was detached later
    std::shared_ptr<PendingWork> pending; // shared by all optimizers of the scaler; NULL on backends that are the host
};

/// The outcome of the steps so far, in backend memory. If that is not host memory, the host has a copy. See report.cc.
class LastOutcome {
public:
    void make(const std::shared_ptr<const Context> &context, void *stream);
    Outcome *data() const { return static_cast<Outcome *>(memory_.data()); }
    /// True if the host has a copy, which may be some steps old.
    bool is_copied() const { return mirror_ != nullptr; }
    /// Returns the outcome that the host can read without waiting; NULL before the first step.
    const Outcome *known() const { return is_copied() ? static_cast<const Outcome *>(mirror_.get()) : data(); }
    void enqueue_copy(const Device &device, void *stream) const;
    /// Reads the outcome from backend memory. The caller must have waited for the steps.
    Outcome read(const Device &device) const;
    /// Changes the outcome in backend memory and the copy. The caller must have waited for the steps. Does nothing
    /// before the first step.
    void change(const Device &device, void (*change)(Outcome &));

private:
    Memory memory_;
    HostBuffer mirror_;
};

/// Data of a loaded checkpoint, except its tensors.
struct LoadedMetadata {
    std::vector<dsopt_group> groups;
    double max_norm, max_value;
    int64_t calls;
    std::string accumulated; // one digit per parameter, as in Param::accumulated; "": stays as it is
    int resharded_from;      // number of ranks that saved; 0 = as many as now
    bool state, masters;     // true if loaded; masters that are not loaded start from the parameters
    bool resets_errors;
    bool has_scaler;                  // the scaler's state is loaded
    std::optional<ScalerRules> rules; // the scaler's new rules; nullopt: the rules stay unchanged
};

/// Largest count of calls: dsopt_optimizer_get returns the count as a double, which is exact up to 2^53.
constexpr int64_t kMaxCalls = int64_t(1) << 53;

struct StepRequest;
class ReadyGradients;

/// Host memory of dsopt_optimizer_step, made before the first one: memory for the tables of a step, and a copy of the
/// last call, with which the next one is compared.
struct CallMemory {
    dsopt_step call{};                                   // without the addresses of its lists
    std::vector<dsopt_tensor> grads, params, out, state; // lists of `call`
    std::vector<dsopt_tensor> all_state;                 // `state`, completed with the optimizer's own tensors
    std::vector<char> tables;                            // StepSizes::host_bytes
    int64_t version = 0; // of the registry for which the tables of `call` are valid; 0: none
};

/// Memory for the state tensors that have none.
struct ReservedState {
    static constexpr size_t kInBlock = SIZE_MAX; // in place of an offset: the tensor fits into its EngineBlock
    std::vector<size_t> missing, offsets;        // index of each tensor in the state, and its first byte in `arena`
    std::vector<dsopt_tensor> list;              // of all state
    Memory arena;
};

class Optimizer {
public:
    Optimizer(std::shared_ptr<const Context> context, const dsopt_optimizer_desc &desc, Attachments attachments);
    ~Optimizer();

    const Context &context() const { return *context_; }
    const std::shared_ptr<const Context> &shared_context() const { return context_; }
    const dsopt_optimizer_desc &desc() const { return desc_; }
    bool compat() const { return desc_.compat != DSOPT_COMPAT_NONE; }
    const Attachments &attachments() const { return attachments_; }
    const std::vector<dsopt_group> &groups() const { return registry_->groups; }
    const std::vector<Param> &params() const { return registry_->params; }
    const StateTable &state() const { return registry_->state; }
    // These follow from the lists. Before finalize_groups() they are empty.
    const OneBit *onebit() const { return derived_.onebit.get(); }
    const RankParts *parts() const { return derived_.parts.get(); }
    const std::vector<Participation> &participation() const { return derived_.participation; }
    const Matrices *matrices() const { return derived_.matrices.get(); }
    const StepSizes &sizes() const { return derived_.sizes; }
    bool shards() const { return derived_.shards(); }
    /// Returns the elements of a parameter whose state this rank keeps.
    Range part_of(size_t param) const { return parts() ? parts()->part(param) : whole_range(params()[param].numel); }
    InUse &in_use() const { return in_use_; }
    /// Returns the work that calls on this optimizer and on its scaler enqueued; NULL on backends that are the host.
    PendingWork *pending() const { return attachments_.pending.get(); }
    /// Waits for the work that earlier calls on this optimizer and its scaler enqueued. `replays`: also waits for
    /// launches of graphs that contain such calls.
    void wait_for_calls(bool replays = true) const {
        using Waits = PendingWork::Waits;
        if (attachments_.pending) attachments_.pending->wait(replays ? Waits::host_for_replays : Waits::host);
    }
    /// Makes a stream wait for that work.
    void order_after_calls(void *stream) const {
        if (attachments_.pending) attachments_.pending->wait(PendingWork::Waits::stream, stream);
    }
    /// Waits for earlier calls and for the default stream, where work of the caller may use the tensors. Throws
    /// DSOPT_ERR_STATE if CUDA forbids the use of the default stream.
    void wait_for_tensors() const;
    /// Allocates missing state and decodes the momentum. Afterwards the host may read and write every state tensor.
    void prepare_for_host();
    int64_t calls() const { return calls_; }
    DataRank data_rank() const { return data_rank_of(attachments_.data.get(), attachments_.node.get()); }
    /// Returns the wrapper of the original whose order of operations compat mode follows.
    Wrapper wrapper() const { return registry_->wrapper; }
    /// Returns the number of tensors whose trust ratio depends on other model ranks.
    int32_t trust_slots() const { return registry_->trust_slots; }
    /// Returns the number of parameters with TensorJob::stored.
    int64_t stored_params() const { return registry_->stored_params; }
    /// Throws DSOPT_ERR_STATE if the scaler was detached from this optimizer.
    void check_scaler() const {
        if (attachments_.scaler) attachments_.scaler->check_attached(attachments_.scaler_token);
    }

    void add_group(const dsopt_group &group, const dsopt_param *params, int64_t count);
    /// Adds parameters to the groups that dsopt_param.group names.
    void add_params(const dsopt_param *params, int64_t count);
    /// Lazily builds what depends on all groups: Derived and the state tensors of the whole optimizer. Must be called
    /// before every other method except add_group(), add_params(), set(), get(), step(), apply() and methods that only
    /// read groups and parameters. Any number of threads may call it at the same time.
    void finalize_groups();
    void set(int32_t group, int32_t key, double value);
    double get(int32_t group, int32_t key) const;
    /// bind_params() and bind_state() call finalize_groups() themselves, bind_params() only if a parameter gets new
    /// memory.
    void bind_params(const dsopt_tensor *list, int64_t count);
    void bind_state(const dsopt_tensor *list, int64_t count);
    void reset(int32_t what, void *stream);
    /// Allocates every state tensor that has no memory and writes its starting values. `params`: the source of masters,
    /// NULL = the bound parameters. `masters_follow`: masters are left uninitialized, because the caller fills them at
    /// once.
    void ensure_state(const dsopt_tensor *params, void *stream, bool masters_follow = false) {
        ensure_state(reserve_state(stream), params, stream, masters_follow);
    }
    /// The same with memory that reserve_state() returned, after which neither state nor parameters have changed.
    void ensure_state(ReservedState reserved, const dsopt_tensor *params, void *stream, bool masters_follow);
    /// Writes starting values to the caller's list, including the original's step on zero gradients.
    void init_state(const dsopt_tensor *params, int64_t count, const dsopt_tensor *state, int64_t state_count,
                    void *stream) const;
    /// Decodes exp_avg_bits to exp_avg, if the momentum is there (DSOPT_OPTIMIZER_MOMENTUM_BITS).
    void decode_momentum();
    /// Must be called when state tensors may have been written to, except by steps.
    void state_changed() const {
        if (onebit() != nullptr) onebit()->invalidate_schedule();
    }
    /// Allocates memory for the state tensors that have none, and leaves the optimizer as it is.
    ReservedState reserve_state(void *stream);
    /// Finishes a load after the caller has read and checked the file: gives all state tensors memory, calls
    /// fill_tensors(), then applies `loaded`. Loaded masters are uninitialized until fill_tensors(), and a failed load
    /// must not leave uninitialized masters.
    void adopt(LoadedMetadata loaded, ReservedState reserved, FunctionRef<void()> fill_tensors);
    void accumulate(const dsopt_tensor *grads, int64_t count, void *stream);

    /// A step in parts: implement the functions of that name in dsopt.h.
    void ready(dsopt_ready *ready);
    void wait(int64_t first, int64_t count, void *stream) const;
    TensorInterval bucket(int64_t param) const;
    void forget_ready(void *stream);
    /// Waits for exchanges that dsopt_optimizer_ready has begun.
    void wait_for_parts() const;
    /// After a failure: waits for them, and returns false if other ranks have been told.
    bool may_report_refusal();
    /// After that: forgets gradients if the step has used them.
    void end_failed_step();
    /// Throws STATE if a step in parts has begun.
    void check_nothing_ready() const;

    struct Planned;

    /// step() and apply() check the struct and call finalize_groups() themselves: other ranks are told of a failure.
    void step(const dsopt_step *step);
    /// Changes nothing but what finalize_groups() builds: any number of threads may call it at the same time.
    void apply(const dsopt_step *step);
    /// Returns the bytes of workspace, enough for memory of any alignment.
    size_t workspace_bytes() const { return with_alignment_padding(sizes().workspace_bytes); }
    dsopt_report report() const;
    /// Logs changes since the last report that was passed to this method: skipped steps and the loss scale.
    void log_changes(const dsopt_report &report);

private:
    void grow(const dsopt_group *group, const dsopt_param *params, int64_t count);
    void retire_step_memory();
    void check_not_frozen(const Registry::Mark &before) const;
    static void set_parts(const RankParts &parts, Registry &registry);
    struct Move { // a copy of a tensor of the whole optimizer to its block
        StateKind kind;
        const void *from;
        size_t kept, bytes; // the first `kept` of `bytes` are copied, the rest is zeroed
    };
    void fill_blocks(const std::vector<Move> &moves, StateTable &state) const;
    void save_contents(const std::vector<StateEntry> &entries, StateTable &state) const;
    void restore_contents(Registry &registry) const;
    void initialize(const StateEntry &entry, const dsopt_tensor *params, void *data, void *stream) const;
    void ensure_workspace(void *stream);

    std::optional<Phase> phase_of_parts() const;
    ReadyGradients &ready_gradients();
    void plan_parts(const dsopt_tensor *grads, void *stream);
    void plan_gradients(const dsopt_ready &ready);
    void run_part(const dsopt_ready &ready);
    void send_part(const dsopt_ready &ready);
    void begin_buckets(void *stream);
    void finish_buckets(const dsopt_step &step);
    int64_t free_from() const;
    dsopt_tensor sent_gradient(const dsopt_tensor &gradient, size_t i, bool accumulated) const;
    /// True if gradients are averaged bucket by bucket.
    bool exchanges_buckets() const {
        return parts() != nullptr && (desc_.flags & DSOPT_OPTIMIZER_AVERAGES) && desc_.bucket > 0;
    }
    void add_to_accumulators(const dsopt_ready &ready);
    dsopt_step complete_ready(const dsopt_step &step);

    void execute_step(const dsopt_step &step, bool &ranks_compared);
    void execute_whole_step(const dsopt_step &step, bool &ranks_compared);
    void check_skip_budget(void *stream) const;
    Reuse reuse_of(const dsopt_step &step);
    void check_call(const dsopt_step &step) const;
    const dsopt_tensor *find_state(const dsopt_step &step, bool *engine_schedule);
    void store_call(const StepRequest &request);
    void count_call(const dsopt_step &step);
    void execute_apply(const dsopt_step &step, bool &ranks_compared) const;
    void run(const StepRequest &request, const dsopt_tensor *state, void *workspace) const;
    void run_initial_step(const dsopt_tensor *params, const dsopt_tensor *state, void *workspace, void *stream) const;
    CommSet comms() const {
        return {attachments_.data.get(), attachments_.model.get(), attachments_.experts.data(),
                int32_t(attachments_.experts.size()), attachments_.node.get()};
    }

    const std::shared_ptr<const Context> context_;
    dsopt_optimizer_desc desc_;
    Attachments attachments_;
    Versioned<Registry> registry_;
    Once finalized_{true}; // `derived_` and the state tensors of the whole optimizer are those of the registry
    Derived derived_;
    LastOutcome outcome_;
    /// Memory of steps with the current lists.
    struct OfSteps {
        Memory workspace;
        std::unique_ptr<StepCache> cache; // it describes the workspace
        CallMemory call;
        bool lists_compared = false; // the ranks have compared their lists of parameters in a step
        mutable PhaseList logged;    // the phases of the last step, at level TRACE
    } of_steps_;
    std::vector<OfSteps> retired_;          // of earlier lists, for graphs that were captured with them
    std::unique_ptr<ReadyGradients> ready_; // NULL before the first part of a step of the current lists
    mutable ScratchPool host_scratch_, matrix_scratch_;
    int64_t calls_ = 0;          // of dsopt_optimizer_step
    int32_t resharded_from_ = 0; // as in dsopt_report
    struct {
        int64_t skipped = 0;
        double loss_scale = 0; // 0: unknown
    } logged_{};               // values of the last report, which log_changes() compares with the next report
    mutable InUse in_use_{0};
};

/// Returns the shape of a parameter's state tensor.
inline const std::vector<int64_t> &dims_of(const Param &param, const StateEntry &entry) {
    if (is_scale(entry.kind)) return param.scale_dims;
    return entry.flags & DSOPT_STATE_SHARDED ? param.part_dims : param.dims;
}
/// Throws STATE for an optimizer that has no groups yet.
void check_groups(const Optimizer &optimizer);
/// Takes the maximum of each 32-bit word over the data-parallel ranks. `words` are in host memory.
void max_over_ranks(const Optimizer &optimizer, void *words, size_t bytes, void *stream);
/// Compares lists of `count` keys over the data-parallel ranks. Returns the index of the first key that differs; -1: none.
int64_t first_different(const Optimizer &optimizer, size_t count, FunctionRef<uint64_t(size_t)> key, void *stream);
/// Implements dsopt_optimizer_shard.
Range find_part(const Optimizer &optimizer, int64_t param, int32_t rank);
/// Checks a list of all state tensors; check_state_tensor() checks one of them. `required`: a tensor without memory is
/// refused. Errors name the tensor.
void check_state_list(const Optimizer &optimizer, const dsopt_tensor *list, int64_t count, bool required);
void check_state_tensor(const Optimizer &optimizer, const dsopt_tensor &tensor, const StateEntry &entry, bool required);
/// Writes the next step's reduction of gradients, DSOPT_REDUCTION_..., to backend memory. It follows from the caller's
/// state tensor `schedule` (NULL: no group is of the 1-bit family).
void write_reduction(const Optimizer &optimizer, const dsopt_tensor *schedule, int32_t *reduction, void *stream);
/// Returns the reduction of gradients in a call, which follows from the optimizer's own schedule. `call`: as in OneBit.
int32_t next_reduction(const Optimizer &optimizer, int64_t call);
dsopt_schedule_info decode_schedule(const Optimizer &optimizer, const int32_t *words);
/// Throws ARGUMENT with the name `field`. A max_value below fp32's range would clip every gradient to zero.
void check_max_norm(double value, const char *field);
void check_max_value(double value, const char *field);

} // namespace dsopt
