// SPDX-License-Identifier: Apache-2.0
// Groups and parameters of an optimizer, and the state tensors that follow from them.
#pragma once
#include "device/plan.h"
#include "optimizer/param.h"
#include "optimizer/scaler.h"
#include "optimizer/state_table.h"
#include <optional>
#include <set>

namespace dsopt {

class OneBit;

/// A value whose version rises with each write access: data computed from the value is valid as long as the version is
/// the same.
template <class T> class Versioned {
public:
    const T &operator*() const { return value_; }
    const T *operator->() const { return &value_; }
    T &change() {
        ++version_;
        return value_;
    }
    int64_t version() const { return version_; }

private:
    T value_;
    int64_t version_ = 1;
};

/// Groups and parameters of an optimizer. They are only appended; append() reverts a failed addition.
struct Registry {
    std::vector<dsopt_group> groups;
    std::vector<Param> params;
    std::set<std::string> names; // of the parameters; labels in `memory` point to them
    StateTable state;
    std::optional<MemoryMap> memory; // of parameters and state; nullopt: the next addition computes it again
    Wrapper wrapper = Wrapper::none; // of the original, whose order of events compat mode follows
    int32_t trust_slots = 0;         // number of tensors whose trust ratio depends on other model ranks
    int64_t stored_params = 0;       // number of parameters with TensorJob::stored
    int64_t family = -1;             // index of the first group of the 1-bit family; -1: there is none

    /// Lengths of the lists at one time. State tensors of the whole optimizer come after those of the parameters and
    /// depend on all parameters, so a mark has copies of them.
    struct Mark {
        size_t groups, params;
        Wrapper wrapper;
        int32_t trust_slots;
        int64_t stored_params, family;
        std::vector<StateEntry> of_optimizer;
    };
    Mark mark() const {
        return {groups.size(), params.size(), wrapper, trust_slots, stored_params, family, state.of_optimizer()};
    }
    void truncate(const Mark &mark) noexcept;
    /// Calls body(mark), which appends. If it throws, the registry is truncated to the mark.
    template <class F> void append(F &&body) {
        const Mark before = mark();
        try {
            body(before);
        } catch (...) {
            truncate(before);
            throw;
        }
    }

    /// Adds `group` and its parameters; if `group` is NULL, adds parameters to the groups that they name. Removes the
    /// state tensors of the whole optimizer: add_optimizer_state() adds them when all groups are there. Both must be
    /// called inside append(). `shares_trust`: model ranks have one trust ratio per sharded tensor.
    void add(const dsopt_group *group, const dsopt_param *given, int64_t count, const dsopt_optimizer_desc &desc,
             bool shares_trust);
    void add_optimizer_state(const OneBit *onebit, const Scaler *scaler);
    /// Returns the map of parameters and state, or of lists in their place. Throws OVERLAP.
    MemoryMap map_memory(const dsopt_tensor *in_place_of_params, const dsopt_tensor *in_place_of_state) const;

private:
    void add_params(const dsopt_param *given, int64_t count, bool named_groups, const dsopt_optimizer_desc &desc,
                    bool shares_trust);
    void add_param_state(int64_t index, const dsopt_optimizer_desc &desc);
    int64_t find_onebit(size_t first_new, const dsopt_optimizer_desc &desc) const;
};

} // namespace dsopt
