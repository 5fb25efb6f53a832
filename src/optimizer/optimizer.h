// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/tensor_list.h"
#include "comm/comm.h"
#include "device/context.h"
#include "device/plan.h"
#include "optimizer/onebit.h"
#include "optimizer/scaler.h"
#include "optimizer/state_entry.h"
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace dsopt {

struct Param {
    std::string name;
    std::vector<int64_t> dims;
    void *data;
    int64_t numel;
    int32_t dtype;
    int32_t group;
    StateSlots state; // where its state tensors are
    int64_t first_leaf;
    int64_t offset;
    uint64_t random_key; // of stochastic rounding: name and seed
    int32_t flags;       // DSOPT_PARAM_...
    int32_t expert;
    bool has_master;
    bool accumulated; // its accumulator got something since the last step
};

/// Comms and scaler that an optimizer keeps alive.
struct Attachments {
    std::shared_ptr<Scaler> scaler;
    std::shared_ptr<Comm> data, model, node;
    std::vector<std::shared_ptr<Comm>> experts;
};

/// Host memory for the duration of a call. `apply` may run on several threads at once, so there is a pool of it; it
/// grows to their number and stays.
class ScratchPool {
public:
    struct Block {
        std::unique_ptr<char[]> data;
        size_t bytes = 0;
    };
    Block take(size_t bytes) {
        Block block;
        {
            const std::lock_guard lock(mutex_);
            if (!free_.empty()) {
                block = std::move(free_.back());
                free_.pop_back();
            }
        }
        if (block.bytes < bytes) block = {std::make_unique<char[]>(bytes), bytes};
        return block;
    }
    void give(Block block) noexcept {
        const std::lock_guard lock(mutex_);
        try {
            free_.push_back(std::move(block));
        } catch (const std::bad_alloc &) { // then it is freed
        }
    }

private:
    std::mutex mutex_;
    std::vector<Block> free_;
};
class HostScratch {
public:
    HostScratch(ScratchPool &pool, size_t bytes) : pool_(pool) {
        if (bytes != 0) block_ = pool.take(bytes);
    }
    ~HostScratch() {
        if (block_.bytes != 0) pool_.give(std::move(block_));
    }
    HostScratch(const HostScratch &) = delete;
    HostScratch &operator=(const HostScratch &) = delete;
    char *data() const { return block_.data.get(); }

private:
    ScratchPool &pool_;
    ScratchPool::Block block_;
};

/// Who is in an optimizer: 0 = nobody, -1 = one call that changes it, n > 0 = as many that read it.
using InUse = std::atomic<int32_t>;
[[noreturn]] inline void refuse_second() {
    throw Error(DSOPT_ERR_BUSY, "the optimizer is in use by another thread, or by the call whose callback this is");
}

/// Nobody else: whoever comes second gets DSOPT_ERR_BUSY instead of a race.
class Exclusive {
public:
    explicit Exclusive(InUse &in_use) : in_use_(in_use) {
        int32_t nobody = 0;
        if (!in_use.compare_exchange_strong(nobody, -1, std::memory_order_acquire, std::memory_order_relaxed))
            refuse_second();
    }
    ~Exclusive() { in_use_.store(0, std::memory_order_release); }
    Exclusive(const Exclusive &) = delete;
    Exclusive &operator=(const Exclusive &) = delete;

private:
    InUse &in_use_;
};

/// Nobody who changes it; readers never stand in each other's way.
class Shared {
public:
    explicit Shared(InUse &in_use) : in_use_(in_use) {
        int32_t readers = in_use.load(std::memory_order_relaxed);
        do {
            if (readers < 0) refuse_second();
        } while (
            !in_use.compare_exchange_weak(readers, readers + 1, std::memory_order_acquire, std::memory_order_relaxed));
    }
    ~Shared() { in_use_.fetch_sub(1, std::memory_order_release); }
    Shared(const Shared &) = delete;
    Shared &operator=(const Shared &) = delete;

private:
    InUse &in_use_;
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
    const std::vector<StateEntry> &state() const { return state_; }
    InUse &in_use() const { return in_use_; }
    int64_t calls() const { return calls_; }
    /// Of the data-parallel ranks. Two levels: in the order of the chunks that they serve, so those that share a slice
    /// follow one another.
    int rank() const {
        return (with_.data ? with_.data->rank() : 0) + (with_.node ? with_.node->rank() * (ranks() / node_ranks()) : 0);
    }
    int ranks() const { return int(data_ranks(with_.data.get(), with_.node.get())); }
    int node_ranks() const { return with_.node ? with_.node->ranks() : 1; }
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
    const OneBitSetup *onebit() const { return onebit_.get(); }
    /// exp_avg is what it stands for, also with DSOPT_OPTIMIZER_MOMENTUM_BITS.
    void settle_momentum();
    /// To be called where state tensors may have been written to, other than by steps.
    void state_changed() const { known_schedule_.valid = false; }

    const int64_t *dims_of(const StateEntry &entry, int32_t &count) const;

private:
    struct Arguments; // pointers of one call, checked
    struct Layout;    // where the parts of the workspace are
    struct OfEngine {
        Memory *outcome;
        KnownSchedule *schedule; // NULL: the call brings its own schedule tensor
    };

    Arguments check_step(const dsopt_step &step, bool functional) const;
    void take_step(const dsopt_step &step, bool &met);
    void take_apply(const dsopt_step &step, bool &met) const;
    // In rank_check.cc; `met` is set once the ranks have compared what they do.
    bool checks_ranks() const;
    void check_ranks(const StepPlan &plan, bool lists_only) const;
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
    void add_param_state(Param &param, int64_t index, const dsopt_group &group, std::vector<StateEntry> &state) const;
    /// Of a parameter in a list of all state tensors; NULL where it has none of that kind.
    static const dsopt_tensor *find_state(const dsopt_tensor *state, const Param &param, StateKind kind) {
        const int64_t slot = param.state[kind];
        return slot >= 0 ? state + slot : nullptr;
    }
    std::vector<StateEntry> optimizer_state(const OneBitSetup *setup, const std::vector<dsopt_group> &groups,
                                            int64_t params) const;
    CommSet comms() const {
        return {with_.data.get(), with_.model.get(), experts_.data(), int32_t(experts_.size()), with_.node.get()};
    }
    Wrapper wrapper() const;
    bool shares_trust() const; // with other model ranks: of tensors that are sharded over them
    bool shares_trust(const Param &param) const;
    int64_t shard_count() const; // of such tensors
    void take_initial_step(const dsopt_tensor *params, const dsopt_tensor *state, void *workspace, void *stream) const;
    void follow_groups(); // the schedule's rules are theirs
    OneBitPlan plan_onebit(const dsopt_tensor *state, OneBitJob *jobs, void *workspace, size_t exchange,
                           const KnownSchedule *known, void *stream) const;
    ScheduleState read_schedule(const void *data, const KnownSchedule *known, void *stream) const;
    /// Gradients that the engine averages itself become those of copies in `mean`. `lists`: room for three of them.
    void average_gradients(const StepPlan &plan, float *mean, dsopt_tensor *lists) const;
    static std::vector<dsopt_tensor> list_of(const std::vector<StateEntry> &state);
    /// Of the whole optimizer, NULL where there is none: in a list of all state tensors, and the engine's own.
    const dsopt_tensor *find_state(const dsopt_tensor *state, StateKind kind) const;
    const StateEntry *find_entry(StateKind kind) const;
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
    std::vector<StateEntry> state_;
    std::vector<Memory> memory_; // what the engine owns of the state
    Memory workspace_;
    std::vector<dsopt_tensor> state_list_; // state_ as a list, made when memory is
    std::vector<dsopt_tensor> call_list_;  // the same with what a call brings
    Memory outcome_memory_;                // an Outcome
    HostBuffer mirror_;                    // its copy on the host, where backend memory is not
    std::unique_ptr<StepCache> cache_;
    std::unique_ptr<OneBitSetup> onebit_;  // with a group of the 1-bit family
    mutable KnownSchedule known_schedule_; // `apply` may be given the memory that it is about
    bool lists_compared_ = false;          // with those of other ranks, since the last group came
    mutable ScratchPool host_scratch_;
    int64_t calls_ = 0;
    int resharded_from_ = 0;
    mutable InUse in_use_{0};
};

OneBitSetup make_onebit_setup(const std::vector<dsopt_group> &groups, const std::vector<Param> &params,
                              const dsopt_optimizer_desc &desc, int rank, int ranks, int node_ranks = 1);

} // namespace dsopt
