// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/in_use.h"
#include "base/once.h"
#include "base/scratch.h"
#include "comm/comm.h"
#include "device/context.h"
#include "optimizer/onebit.h"
#include "optimizer/registry.h"
#include "optimizer/scaler.h"
#include "step/drive.h"
#include <memory>
#include <string>
#include <vector>

namespace dsopt {

/// What an optimizer shares with other objects and keeps alive.
struct Attachments {
    std::shared_ptr<Scaler> scaler;
    std::shared_ptr<Comm> data, model, node;
    std::vector<std::shared_ptr<Comm>> experts;
    std::shared_ptr<void> scaler_token;   // says whether the scaler was detached since
    std::shared_ptr<PendingWork> pending; // with all that the scaler serves; NULL on backends that are the host
};

/// What the last steps came to: in backend memory, with a copy on the host where that is another. See report.cc.
class LastOutcome {
public:
    void make(const std::shared_ptr<const Context> &context, void *stream);
    Outcome *data() const { return static_cast<Outcome *>(memory_.data()); }
    /// True if the host has a copy, which lags behind.
    bool is_copied() const { return mirror_ != nullptr; }
    /// What the host knows without waiting; NULL before the first step.
    const Outcome *known() const { return is_copied() ? static_cast<const Outcome *>(mirror_.get()) : data(); }
    void enqueue_copy(const Device &device, void *stream) const;
    /// After the steps so far, for which the caller has waited.
    Outcome read(const Device &device) const;
    /// The same. Nothing to change before the first step.
    void change(const Device &device, void (*change)(Outcome &));

private:
    Memory memory_;
    HostBuffer mirror_;
};

/// What a load brings beside tensors.
struct Loaded {
    std::vector<dsopt_group> groups;
    double max_norm, max_value;
    int64_t calls;
    std::string accumulated; // a digit per parameter; "": left as it is
    int resharded_from;      // ranks; 0 = as many as these
    bool state, masters;     // among the tensors; masters that are not start from the parameters
    bool resets_errors;
    bool has_scaler;                  // its state is among the tensors, and
    std::optional<ScalerRules> rules; // its rules are these; nullopt: they stay
};

/// Calls are counted so far: a double holds the number, as dsopt_optimizer_get returns it.
constexpr int64_t kMostCalls = int64_t(1) << 53;

struct StepRequest;

class Optimizer {
public:
    Optimizer(std::shared_ptr<const Context> context, const dsopt_optimizer_desc &desc, Attachments attachments);
    ~Optimizer();

    const Context &context() const { return *context_; }
    const dsopt_optimizer_desc &desc() const { return desc_; }
    bool compat() const { return desc_.compat != DSOPT_COMPAT_NONE; }
    const Attachments &attachments() const { return with_; }
    const std::vector<dsopt_group> &groups() const { return registry_->groups; }
    const std::vector<Param> &params() const { return registry_->params; }
    const StateTable &state() const { return registry_->state; }
    /// NULL without a group of the 1-bit family, and before settle().
    const OneBit *onebit() const { return onebit_.get(); }
    InUse &in_use() const { return in_use_; }
    /// The work of calls on this optimizer and on its scaler; NULL on backends that are the host.
    PendingWork *pending() const { return with_.pending.get(); }
    /// Waits for the work that earlier calls on this optimizer and its scaler enqueued. `replays`: also for graphs that
    /// contain such calls.
    void wait_for_calls(bool replays = true) const {
        if (with_.pending) with_.pending->wait(replays);
    }
    /// Waits for earlier calls and for the default stream, where work of the caller may use the tensors. Throws
    /// DSOPT_ERR_STATE where CUDA forbids the use of the default stream.
    void wait_for_tensors() const;
    /// Makes missing state and decodes the momentum. Afterwards the host may read and write every state tensor.
    void prepare_for_host();
    int64_t calls() const { return told_.calls; }
    DataRank data_rank() const { return data_rank_of(with_.data.get(), with_.node.get()); }
    /// Which of the original's wrappers compat mode stands for.
    Wrapper wrapper() const { return registry_->wrapper; }
    /// How many tensors have a trust ratio that other model ranks have a part in.
    int32_t trust_slots() const { return registry_->trust_slots; }
    /// Throws DSOPT_ERR_STATE if the scaler was detached since.
    void check_scaler() const {
        if (with_.scaler) with_.scaler->check_attached(with_.scaler_token);
    }

    void add_group(const dsopt_group &group, const dsopt_param *params, int64_t count);
    /// To the groups that the parameters name.
    void add_params(const dsopt_param *params, int64_t count);
    /// What depends on all groups together is made when a call first asks for it, not again with each group. To be
    /// called before everything but the two above, set(), get() and what only reads groups and parameters; any number
    /// of threads at once.
    void settle();
    void set(int32_t group, int32_t key, double value);
    double get(int32_t group, int32_t key) const;
    /// These two call settle() if they need it. Parameters that lose their memory or keep it are bound without.
    void bind_params(const dsopt_tensor *list, int64_t count);
    void bind_state(const dsopt_tensor *list, int64_t count);
    void reset(int32_t what, void *stream);
    /// Memory for every state tensor that has none, with its starting values. `params`: where masters start from, NULL
    /// = where the parameters are bound. `masters_follow`: the caller fills them at once.
    void ensure_state(const dsopt_tensor *params, void *stream, bool masters_follow = false);
    /// Starting values into the caller's list, the original's step on zero gradients included.
    void init_state(const dsopt_tensor *params, int64_t count, const dsopt_tensor *state, int64_t state_count,
                    void *stream) const;
    /// exp_avg becomes what it stands for, also with DSOPT_OPTIMIZER_MOMENTUM_BITS.
    void decode_momentum();
    /// To be called where state tensors may have been written to, other than by steps.
    void state_changed() const {
        if (onebit_) onebit_->forget_schedule();
    }
    /// A load, by a caller who has read and checked everything: memory for all state tensors, then fill_tensors(), then
    /// all else. Memory comes when nothing in the file can fail any more: masters that follow are left for
    /// fill_tensors(), and a load that fails must not leave such ones behind.
    void adopt(Loaded loaded, FunctionRef<void()> fill_tensors);
    void accumulate(const dsopt_tensor *grads, int64_t count, void *stream);

    void step(const dsopt_step &step);
    void apply(const dsopt_step &step) const;
    /// With the slack for any alignment.
    size_t workspace_bytes() const;
    dsopt_report report() const;
    /// Logs what a report has that the last one of this function did not have: skipped steps, another loss scale.
    void log_changes(const dsopt_report &report);

private:
    void grow(const dsopt_group *group, const dsopt_param *params, int64_t count);
    void check_not_frozen(const Registry::Mark &before) const;
    struct Move { // of what a tensor of the whole optimizer holds, into its block
        StateKind kind;
        const void *from;
        size_t kept, bytes; // of these the first ones have contents
    };
    void fill_blocks(const std::vector<Move> &moves, StateTable &state) const;
    void keep_contents(const std::vector<StateEntry> &own, StateTable &state) const;
    void carry_contents(Registry &registry) const;
    void initialize(const StateEntry &entry, const dsopt_tensor *params, void *data, void *stream) const;
    void ensure_workspace(void *stream);

    void take_step(const dsopt_step &step, bool &met);
    void check_skip_budget(void *stream) const;
    Repeats repeats_of(const dsopt_step &step);
    void check_call(const dsopt_step &step) const;
    const dsopt_tensor *find_state(const dsopt_step &step, bool *is_own);
    void keep_call(const StepRequest &request);
    void count_call(const dsopt_step &step);
    void take_apply(const dsopt_step &step, bool &met) const;
    void run(const StepRequest &request, const dsopt_tensor *state, void *workspace) const;
    void take_initial_step(const dsopt_tensor *params, const dsopt_tensor *state, void *workspace, void *stream) const;
    CommSet comms() const {
        return {with_.data.get(), with_.model.get(), with_.experts.data(), int32_t(with_.experts.size()),
                with_.node.get()};
    }

    const std::shared_ptr<const Context> context_;
    dsopt_optimizer_desc desc_;
    Attachments with_;
    Versioned<Registry> registry_;
    Once settled_{true}; // else `onebit_` and the state tensors of the whole optimizer are not there
    std::unique_ptr<OneBit> onebit_;
    LastOutcome outcome_;
    Memory workspace_;
    std::vector<char> host_memory_; // HostMemory of step.cc
    std::unique_ptr<StepCache> cache_;
    dsopt_step last_call_{}; // without addresses of lists; these are in `host_memory_`
    int64_t planned_ = 0;    // the version of the registry for which its tables are in the workspace; 0: of none
    mutable ScratchPool host_scratch_;
    dsopt_report told_{}; // by log_changes(), where its loss scale 0 is unknown; `calls` and `resharded_from` as of now
    mutable InUse in_use_{0};
};

/// Throws STATE for an optimizer that has no groups yet.
void check_groups(const Optimizer &optimizer);
/// A list of all state tensors, and one of them. `required`: each has memory. Failures name the tensor.
void check_state_list(const Optimizer &optimizer, const dsopt_tensor *list, int64_t count, bool required);
void check_state_tensor(const Optimizer &optimizer, const dsopt_tensor &tensor, const StateEntry &entry, bool required);
/// What the next step does with gradients, as callers ask for it: by a schedule tensor of theirs to backend memory
/// (`schedule` NULL: there is none), or by the optimizer's own.
void write_reduction(const Optimizer &optimizer, const dsopt_tensor *schedule, int32_t *reduction, void *stream);
int32_t next_reduction(const Optimizer &optimizer, int64_t call);
dsopt_schedule_info decode_schedule(const Optimizer &optimizer, const int32_t *words);
/// Throw ARGUMENT that names `field`. A max_value below fp32's range would clip every gradient to zero.
void check_max_norm(double value, const char *field);
void check_max_value(double value, const char *field);

} // namespace dsopt
