// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/in_use.h"
#include "base/scratch.h"
#include "base/tensor_list.h"
#include "comm/comm.h"
#include "device/context.h"
#include "optimizer/onebit.h"
#include "optimizer/param.h"
#include "optimizer/scaler.h"
#include "optimizer/state_entry.h"
#include "step/drive.h"
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace dsopt {

/// Comms and scaler that an optimizer keeps alive.
struct Attachments {
    std::shared_ptr<Scaler> scaler;
    std::shared_ptr<Comm> data, model, node;
    std::vector<std::shared_ptr<Comm>> experts;
};

/// A max_value that clips, or none. Below fp32's range it would clip every gradient to zero.
inline bool is_max_value(double value) { return value == 0 || (std::isfinite(value) && value > 0 && float(value) > 0); }

class Optimizer {
public:
    Optimizer(std::shared_ptr<const Context> context, const dsopt_optimizer_desc &desc, Attachments attachments);
    ~Optimizer();

    const Context &context() const { return *context_; }
    const dsopt_optimizer_desc &desc() const { return desc_; }
    const std::vector<dsopt_group> &groups() const { return groups_; }
    const std::vector<Param> &params() const { return params_; }
    const StateTable &state() const { return state_; }
    InUse &in_use() const { return in_use_; }
    int64_t calls() const { return calls_; }
    /// Of the data-parallel ranks. Two levels: in the order of the chunks that they serve, so those that share a slice
    /// follow one another.
    int rank() const {
        return (with_.data ? with_.data->rank() : 0) + (with_.node ? with_.node->rank() * (ranks() / node_ranks()) : 0);
    }
    int ranks() const { return int(data_ranks(with_.data.get(), with_.node.get())); }
    int node_ranks() const { return with_.node ? with_.node->ranks() : 1; }
    DataRank data_rank() const { return {rank(), ranks(), node_ranks()}; }
    void note_loaded(int resharded_from) { resharded_from_ = resharded_from; }
    Scaler *scaler() const { return with_.scaler.get(); }
    /// Throws DSOPT_ERR_STATE if the scaler was detached since.
    void check_scaler() const {
        if (with_.scaler) with_.scaler->check_attached(scaler_ticket_);
    }

    void add_group(const dsopt_group &group, const dsopt_param *params, int64_t count);
    /// To the groups that the parameters name.
    void add_params(const dsopt_param *params, int64_t count);
    void set(int32_t group, int32_t key, double value);
    double get(int32_t group, int32_t key) const;
    void bind_params(const dsopt_tensor *list, int64_t count);
    void bind_state(const dsopt_tensor *list, int64_t count);
    void reset(int32_t what, void *stream);
    /// Memory for every state tensor that has none, with its starting values. `params`: where masters start from, NULL
    /// = where the parameters are bound. `masters_follow`: the caller fills them at once.
    void ensure_state(const dsopt_tensor *params, void *stream, bool masters_follow = false);
    /// What a checkpoint holds beside tensors; replaced as a whole by a load.
    void restore(std::vector<dsopt_group> groups, double max_norm, double max_value, int64_t calls);
    void accumulate(const dsopt_tensor *grads, int64_t count, void *stream);
    /// Which accumulators hold something, as a checkpoint keeps it: a digit a parameter.
    std::string accumulated() const;
    void set_accumulated(const std::string &digits);

    void step(const dsopt_step &step);
    void apply(const dsopt_step &step) const;
    /// With the slack for any alignment.
    size_t workspace_bytes() const;
    /// Starting values into the caller's list, the original's step on zero gradients included.
    void init_state(const dsopt_tensor *params, const dsopt_tensor *state, int64_t count, void *stream) const;
    void write_reduction(const dsopt_tensor *schedule, int32_t *reduction, void *stream) const;
    dsopt_schedule_info decode_schedule(const int32_t *words) const;
    dsopt_report report() const;
    int32_t next_reduction(int64_t call) const;
    /// Into host memory, as what it stands for.
    void export_entry(const StateEntry &entry, void *host) const;
    /// After a load: what the original forgets or decides anew there.
    void forget_like_original();
    /// NULL without a group of the 1-bit family.
    const OneBit *onebit() const { return onebit_.get(); }
    /// exp_avg is what it stands for, also with DSOPT_OPTIMIZER_MOMENTUM_BITS.
    void settle_momentum();
    /// To be called where state tensors may have been written to, other than by steps.
    void state_changed() const {
        if (onebit_) onebit_->forget_schedule();
    }

    const int64_t *dims_of(const StateEntry &entry, int32_t &count) const;

private:
    struct Arguments; // pointers of one call, checked
    struct Layout;    // where the parts of the workspace are
    struct OfEngine {
        Memory *outcome;
        bool own_schedule; // false: the call brings its own schedule tensor
    };

    Arguments check_step(const dsopt_step &step, bool functional) const;
    void take_step(const dsopt_step &step, bool &met);
    void take_apply(const dsopt_step &step, bool &met) const;
    // In rank_check.cc; `met` is set once the ranks have compared what they do.
    bool checks_ranks() const;
    void check_ranks(const StepPlan &plan, bool lists_only, bool remembers) const;
    void check_places(void *stream) const;
    void refuse_to_ranks(void *stream) const noexcept;
    void reduce_words(void *words, size_t bytes, void *stream) const;
    int64_t first_different(const std::vector<uint64_t> &keys, void *stream) const;
    /// `of_engine`: NULL in `apply`, which remembers nothing.
    void run(const Arguments &arguments, const dsopt_tensor *state, void *workspace, const OfEngine *of_engine) const;
    void ensure_workspace(void *stream);
    void check_pointers(const StepPlan &plan) const;
    static Outcome no_outcome();
    /// What the host knows of the last steps without waiting, NULL before the first one.
    const Outcome *last_known() const;
    void change_outcome(void (*change)(Outcome &));
    Layout layout() const;
    void grow(std::vector<dsopt_group> groups, const dsopt_param *params, int64_t count, bool named_groups);
    Param make_param(const dsopt_param &given, int64_t index, int32_t group) const;
    void add_param_state(const Param &param, int64_t index, const dsopt_group &group, StateTable &state) const;
    void add_own_state(const OneBit *onebit, const std::vector<dsopt_group> &groups, int64_t params,
                       StateTable &state) const;
    std::vector<Param> with_params(const std::vector<dsopt_group> &groups, const dsopt_param *added, int64_t count,
                                   bool named_groups) const;
    std::unique_ptr<OneBit> make_onebit(const std::vector<dsopt_group> &groups, const std::vector<Param> &params) const;
    std::vector<Memory> carry_state(const std::vector<StateEntry> &old, StateTable &state) const;
    CommSet comms() const {
        return {with_.data.get(), with_.model.get(), experts_.data(), int32_t(experts_.size()), with_.node.get()};
    }
    Wrapper wrapper() const;
    bool shares_trust() const; // with other model ranks: of tensors that are sharded over them
    bool shares_trust(const Param &param) const;
    int64_t shard_count() const; // of such tensors
    void take_initial_step(const dsopt_tensor *params, const dsopt_tensor *state, void *workspace, void *stream) const;
    int32_t plan_jobs(const Arguments &arguments, const dsopt_tensor *state, const OneBitPlan *onebit,
                      TensorJob *jobs) const;
    void plan_groups(Hyper *hypers) const;
    StepPlan make_plan(const Arguments &arguments, const dsopt_tensor *state, char *workspace, const Layout &place,
                       const StepTable &table, const OfEngine *of_engine) const;
    StepShape shape() const;
    static std::vector<dsopt_tensor> list_of(const StateTable &state);
    void check_state_list(const dsopt_tensor *list, int64_t count, bool required) const;
    void check_state_tensor(const dsopt_tensor &tensor, const StateEntry &entry, bool required) const;
    void check_param(const dsopt_tensor &given, const Param &param) const;
    const char *owner_of(const StateEntry &entry) const;
    const void *memory_of(const StateEntry &entry) const; // of its parameter
    /// The value that every element of a state tensor starts with, if it is not a copy of the parameter.
    double start_of(const StateEntry &entry) const;
    void fill(const dsopt_tensor &tensor, float value, void *stream) const; // F32
    void initialize(const StateEntry &entry, const void *source, void *data, void *stream) const;

    std::shared_ptr<const Context> context_;
    dsopt_optimizer_desc desc_;
    std::vector<dsopt_group> groups_;
    Attachments with_;
    int64_t scaler_ticket_ = 0;   // says whether the scaler was detached since
    std::vector<Comm *> experts_; // of with_, as a plan wants them
    std::vector<Param> params_;
    StateTable state_;
    std::vector<Memory> memory_; // what the engine owns of the state
    Memory workspace_;
    std::vector<dsopt_tensor> state_list_; // state_ as a list, made when memory is
    std::vector<dsopt_tensor> call_list_;  // the same with what a call brings
    Memory outcome_memory_;                // an Outcome
    HostBuffer mirror_;                    // its copy on the host, where backend memory is not
    std::unique_ptr<StepCache> cache_;
    std::unique_ptr<OneBit> onebit_; // with a group of the 1-bit family
    bool lists_compared_ = false;    // with those of other ranks, since the last group came
    mutable ScratchPool host_scratch_;
    int64_t calls_ = 0;
    int resharded_from_ = 0;
    mutable InUse in_use_{0};
};

} // namespace dsopt
