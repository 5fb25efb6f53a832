// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/in_use.h"
#include "base/scratch.h"
#include "comm/comm.h"
#include "device/context.h"
#include "optimizer/last_step.h"
#include "optimizer/onebit.h"
#include "optimizer/scaler.h"
#include "step/drive.h"
#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace dsopt {

/// Comms and scaler that an optimizer keeps alive.
struct Attachments {
    std::shared_ptr<Scaler> scaler;
    std::shared_ptr<Comm> data, model, node;
    std::vector<std::shared_ptr<Comm>> experts;
};

/// What the last steps came to: in backend memory, with a copy on the host where that is another. See report.cc.
class LastOutcome {
public:
    void make(const std::shared_ptr<const Context> &context, void *stream);
    Outcome *data() const { return static_cast<Outcome *>(memory_.data()); }
    /// Whether the host has a copy, which lags behind.
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

/// What a checkpoint holds beside tensors; replaced as a whole by a load.
struct Restored {
    std::vector<dsopt_group> groups;
    double max_norm, max_value;
    int64_t calls;
    std::string accumulated; // a digit per parameter; "": left as it is
    int resharded_from;      // ranks; 0 = as many as these
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
    const std::vector<dsopt_group> &groups() const { return groups_; }
    const std::vector<Param> &params() const { return params_; }
    const StateTable &state() const { return state_; }
    /// NULL without a group of the 1-bit family, and before settle().
    const OneBit *onebit() const { return onebit_.get(); }
    InUse &in_use() const { return in_use_; }
    /// The work of calls on this optimizer and on its scaler; NULL on backends that are the host.
    PendingWork *pending() const { return pending_.get(); }
    /// Waits for the work that earlier calls on this optimizer and its scaler enqueued. `replays`: also for graphs that
    /// contain such calls.
    void wait_for_calls(bool replays = true) const {
        if (pending_) pending_->wait(replays);
    }
    /// Waits for earlier calls and for the default stream, where work of the caller may use the tensors. Throws
    /// DSOPT_ERR_STATE where CUDA forbids the use of the default stream.
    void wait_for_tensors() const;
    /// Makes missing state and decodes the momentum. Afterwards the host may read and write every state tensor.
    void prepare_for_host();
    int64_t calls() const { return calls_; }
    DataRank data_rank() const { return data_rank_of(with_.data.get(), with_.node.get()); }
    /// Which of the original's wrappers compat mode stands for.
    Wrapper wrapper() const { return wrapper_; }
    /// How many tensors have a trust ratio that other model ranks have a part in.
    int32_t trust_slots() const { return trust_slots_; }
    /// Throws DSOPT_ERR_STATE if the scaler was detached since.
    void check_scaler() const {
        if (with_.scaler) with_.scaler->check_attached(scaler_token_);
    }

    void add_group(const dsopt_group &group, const dsopt_param *params, int64_t count);
    /// To the groups that the parameters name.
    void add_params(const dsopt_param *params, int64_t count);
    /// What depends on all groups together is made when a call first asks for it, not anew with each group. To be
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
    /// After the tensors of a load. Does not fail.
    void restore(Restored restored);
    void accumulate(const dsopt_tensor *grads, int64_t count, void *stream);

    void step(const dsopt_step &step);
    void apply(const dsopt_step &step) const;
    /// With the slack for any alignment.
    size_t workspace_bytes() const;
    dsopt_report report() const;
    /// Logs what a report has that the last one did not have: skipped steps, another loss scale.
    void log_changes(const dsopt_report &report);

private:
    void grow(const dsopt_group *group, const dsopt_param *params, int64_t count);
    struct Added { // with parameters that are not there for good yet
        std::set<std::string> names;
        MemoryMap memory; // its labels point to the names
    };
    void append_params(const dsopt_param *given, int64_t count, bool named_groups, Added &added);
    int64_t find_family(size_t first_new) const;
    void add_param_state(int64_t index);
    void add_own_state(const OneBit *onebit);
    /// Contents of tensors of the whole optimizer, while groups or parameters come.
    using Kept = std::map<StateKind, std::vector<char>>;
    /// The engine's memory for a tensor of the whole optimizer, with room for parameters to come.
    struct OwnBlock {
        void *data = nullptr;
        size_t capacity = 0;
        int64_t generation = 0; // of the tensor while it is here; 0: it is elsewhere
        /// Bytes of another block, for a tensor that has outgrown this one: geometric, so that all of them together
        /// take memory in proportion to the last one.
        size_t grown(size_t bytes) const { return std::max(bytes, capacity + capacity / 2); }
    };
    Kept keep_contents(const std::vector<StateEntry> &own) const;
    void check_not_frozen(size_t first_new, const Kept &kept) const;
    void carry_contents();
    MemoryMap map_memory(const dsopt_tensor *params, const dsopt_tensor *state) const;
    void initialize(const StateEntry &entry, const dsopt_tensor *params, void *data, void *stream) const;
    void ensure_workspace(void *stream);
    void take_step(const dsopt_step &step, bool &met);
    void take_apply(const dsopt_step &step, bool &met) const;
    void run(const StepRequest &request, const dsopt_tensor *state, void *workspace) const;
    void take_initial_step(const dsopt_tensor *params, const dsopt_tensor *state, void *workspace, void *stream) const;
    CommSet comms() const {
        return {with_.data.get(), with_.model.get(), experts_.data(), int32_t(experts_.size()), with_.node.get()};
    }

    std::shared_ptr<const Context> context_;
    dsopt_optimizer_desc desc_;
    std::vector<dsopt_group> groups_;
    int64_t family_ = -1;             // the first group of the 1-bit family; -1: there is none
    std::atomic<bool> settled_{true}; // else `onebit_` and the state tensors of the whole optimizer are not there
    std::mutex settling_;
    Attachments with_;
    std::shared_ptr<void> scaler_token_; // says whether the scaler was detached since
    std::shared_ptr<PendingWork> pending_;
    std::vector<Comm *> experts_; // of with_, as a plan wants them
    std::vector<Param> params_;
    std::set<std::string> names_; // theirs; labels of memory_map_ point here
    Wrapper wrapper_ = Wrapper::none;
    int32_t trust_slots_ = 0;
    StateTable state_;
    std::vector<Memory> memory_; // what the engine owns of the state; none is freed, callers have pointers
    Kept kept_;                  // until settle()
    std::map<StateKind, OwnBlock> own_blocks_;
    int64_t generations_ = 0;             // given to memory of state tensors so far
    std::optional<MemoryMap> memory_map_; // of parameters and state; nullopt: to be made anew
    Memory workspace_;
    std::vector<dsopt_tensor> state_list_; // state_ as a list, made when memory is
    std::vector<dsopt_tensor> call_list_;  // the same with what a call brings
    LastStep last_step_;
    std::vector<char> host_memory_; // StepMemory's of the host for last_step_
    LastOutcome outcome_;
    // dsopt_report.skipped and .loss_scale at the last log_changes(). Before the first one the scale may be unknown:
    // reading it could wait.
    int64_t logged_skips_ = 0;
    std::optional<double> logged_scale_;
    std::unique_ptr<StepCache> cache_;
    std::unique_ptr<OneBit> onebit_;
    bool lists_compared_ = false; // with those of other ranks, since the last group came
    mutable ScratchPool host_scratch_;
    int64_t calls_ = 0;
    int resharded_from_ = 0;
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
