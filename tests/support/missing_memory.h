// SPDX-License-Identifier: Apache-2.0
// Parameters without memory or without gradient, in every stage of every algorithm: a call returns a status and never
// dereferences NULL. Runs on any device.
#pragma once
#include "expect.h"
#include "handles.h"
#include "memory.h"
#include <deque>
#include <string>
#include <vector>

namespace test {

/// Second group, with the second parameter, in addition to a group of the 1-bit family.
enum class SecondGroup { nothing, adamw, lamb, not_frozen };

struct MissingMemoryCase {
    int32_t algorithm, compat;
    int32_t ranks; // 1: without a comm
    bool apply;    // dsopt_optimizer_apply in place of dsopt_optimizer_step
    SecondGroup second_group;
    bool bound, gradient; // of the second parameter
    bool averages = false;

    std::string text() const {
        return name_of(algorithm) + (compat != DSOPT_COMPAT_NONE ? ", compat" : "") + ", ranks " +
               std::to_string(ranks) + (apply ? ", apply" : ", step") +
               (second_group == SecondGroup::adamw        ? ", second group AdamW"
                : second_group == SecondGroup::lamb       ? ", second group LAMB"
                : second_group == SecondGroup::not_frozen ? ", second group NON_FREEZE"
                                                          : "") +
               (bound ? "" : ", no memory") + (gradient ? "" : ", no gradient") + (averages ? ", averages" : "");
    }
};

inline std::vector<MissingMemoryCase> missing_memory_cases() {
    std::vector<MissingMemoryCase> cases;
    std::vector<int32_t> algorithms(std::begin(kStandardRules), std::end(kStandardRules));
    algorithms.insert(algorithms.end(), std::begin(kFamily), std::end(kFamily));
    const auto is_family = [](int32_t algorithm) {
        return std::find(std::begin(kFamily), std::end(kFamily), algorithm) != std::end(kFamily);
    };
    for (const int32_t algorithm : algorithms)
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
            const bool has_compat = is_family(algorithm) || std::find(std::begin(kAlgorithms), std::end(kAlgorithms),
                                                                      algorithm) != std::end(kAlgorithms);
            if (compat != DSOPT_COMPAT_NONE && !has_compat) continue;
            for (const int32_t ranks : {1, 2})
                for (const bool apply : {false, true})
                    for (const SecondGroup second_group :
                         {SecondGroup::nothing, SecondGroup::adamw, SecondGroup::lamb, SecondGroup::not_frozen})
                        for (const bool averages : {false, true})
                            for (const int memory : {0, 1, 2}) { // neither memory nor gradient, no memory, no gradient
                                const bool other = second_group != SecondGroup::nothing;
                                if ((other || averages) && !is_family(algorithm)) continue;
                                if (other && compat != DSOPT_COMPAT_NONE) continue;
                                if (second_group == SecondGroup::not_frozen && algorithm != DSOPT_ALGORITHM_ONEBIT_ADAM)
                                    continue;
                                cases.push_back({algorithm, compat, ranks, apply, second_group, memory == 2,
                                                 memory == 1, averages});
                            }
        }
    return cases;
}

/// Makes eleven calls on one rank, through every stage. Counts successful calls and records which parameters changed.
class MissingMemoryRank {
public:
    MissingMemoryRank(const Memory &memory, const Context &context, const Comm &comm,
                      const MissingMemoryCase &test_case) :
        memory_(memory),
        case_(test_case) {
        dsopt_optimizer_desc desc =
            desc_with(comm, test_case.compat, test_case.averages ? DSOPT_OPTIMIZER_AVERAGES : 0);
        opt_ = make_optimizer(context, desc);
        dsopt_group group = group_of(test_case.algorithm);
        if (group.freeze_step != 0) group.freeze_step = 3;
        if (group.max_local_interval != 0) {
            group.var_interval_steps = 1;
            group.local_interval_steps = 2;
            group.max_local_interval = 2;
        }
        const std::vector<float> ones(kNumel, 1.0f);
        for (int i = 0; i < 2; ++i) {
            blocks_.emplace_back(memory, kNumel * sizeof(float));
            blocks_.back().set(ones.data());
            const bool present = i == 0 || test_case.bound;
            params_.push_back({present ? blocks_.back().data() : nullptr, kNumel, DSOPT_DTYPE_F32, 0});
            blocks_.emplace_back(memory, kNumel * sizeof(float));
            blocks_.back().set(ones.data());
            const bool graded = i == 0 || test_case.gradient;
            grads_.push_back({graded ? blocks_.back().data() : nullptr, kNumel, DSOPT_DTYPE_F32, 0});
        }
        const dsopt_param list[] = {param_of(params_[0], "first"), param_of(params_[1], "second")};
        must(dsopt_optimizer_add_group(opt_.get(), &group, list,
                                       test_case.second_group != SecondGroup::nothing ? 1 : 2));
        if (test_case.second_group == SecondGroup::not_frozen)
            group.flags |= DSOPT_GROUP_NON_FREEZE;
        else
            group =
                group_of(test_case.second_group == SecondGroup::lamb ? DSOPT_ALGORITHM_LAMB : DSOPT_ALGORITHM_ADAMW);
        if (test_case.second_group != SecondGroup::nothing)
            must(dsopt_optimizer_add_group(opt_.get(), &group, list + 1, 1));
        if (!test_case.apply) return;
        for (const dsopt_state_info &info : state_of(opt_.get())) {
            const size_t bytes = size_t(info.tensor.numel) * size_of(info.tensor.dtype);
            blocks_.emplace_back(memory, bytes);
            blocks_.back().set(std::string(bytes, '\0'));
            state_.push_back(info.tensor);
            state_.back().data = blocks_.back().data();
        }
        must(dsopt_optimizer_workspace(opt_.get(), &workspace_bytes_));
        blocks_.emplace_back(memory, workspace_bytes_, 0);
        workspace_ = blocks_.back().data();
    }

    /// Throws if a check fails.
    void run() {
        for (int call = 1; call <= 11; ++call) {
            DSOPT_NEW(dsopt_step, step);
            step.grads = grads_.data();
            step.count = 2;
            step.stream = memory_.stream;
            if (case_.apply) {
                step.params = params_.data();
                step.state = state_.data();
                step.state_count = int64_t(state_.size());
                step.workspace = workspace_;
                step.workspace_bytes = workspace_bytes_;
            }
            const std::string before = all_bytes();
            const dsopt_status status =
                case_.apply ? dsopt_optimizer_apply(opt_.get(), &step) : dsopt_optimizer_step(opt_.get(), &step);
            if (status == DSOPT_OK) {
                ++successes;
                continue;
            }
            const std::string text = dsopt_last_error();
            if (status != DSOPT_ERR_STATE || text.find("'second'") == std::string::npos)
                throw std::runtime_error("call " + std::to_string(call) + ": " + dsopt_status_name(status) + ": " +
                                         text);
            if (all_bytes() != before) throw std::runtime_error("a refused call has changed memory");
        }
        const std::string ones(blocks_[1].text()); // a gradient, which has the initial values of the parameters
        changed = blocks_[0].text() != ones;
        second_changed = blocks_[2].text() != ones;
    }
    int successes = 0;
    bool changed = false, second_changed = false;

private:
    static constexpr int64_t kNumel = 70;
    std::string all_bytes() const {
        std::string text;
        for (const Block &block : blocks_)
            if (block.data() != workspace_) text += block.text();
        return text;
    }

    const Memory &memory_;
    const MissingMemoryCase case_;
    Optimizer opt_;
    std::deque<Block> blocks_; // weight and gradient of the first parameter, of the second, state, workspace
    std::vector<dsopt_tensor> params_, grads_, state_;
    size_t workspace_bytes_ = 0;
    char *workspace_ = nullptr;
};

/// If a parameter without memory is not refused, the other parameters change as if it did not exist.
inline void expect_status_or_unchanged(const Memory &memory, const dsopt_context_desc &desc,
                                       const MissingMemoryCase &test_case) {
    SCOPED_TRACE(test_case.text());
    const CommId id = new_id();
    std::vector<int> successes(size_t(test_case.ranks));
    EXPECT_NO_THROW(run_ranks(test_case.ranks, [&](int rank) {
        const Context context = make_context(desc);
        const Comm comm = test_case.ranks > 1  ? local_comm(context, id, rank, test_case.ranks)
                          : test_case.averages ? self_comm(context)
                                               : nullptr;
        MissingMemoryRank checked(memory, context, comm, test_case);
        checked.run();
        successes[size_t(rank)] = checked.successes;
        if (checked.successes == 0 && test_case.bound)
            throw std::runtime_error("every call is refused, although all parameters have memory");
        if (checked.successes > 0 && !checked.changed) throw std::runtime_error("the first parameter did not change");
        if (!test_case.bound && checked.second_changed)
            throw std::runtime_error("memory that was not passed to the engine has changed");
    }));
    for (const int count : successes) EXPECT_EQ(count, successes[0]);
}

} // namespace test
