// SPDX-License-Identifier: Apache-2.0
// What an optimizer has been told: its groups, its parameters, and the state tensors that follow from them.
#pragma once
#include "device/plan.h"
#include "optimizer/param.h"
#include "optimizer/scaler.h"
#include "optimizer/state_table.h"
#include <optional>
#include <set>

namespace dsopt {

class OneBit;

/// A value whose version rises with each write access: what was computed from it is right as long as the version is
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

/// Groups and parameters are only ever appended; append() takes a failed addition back.
struct Registry {
    std::vector<dsopt_group> groups;
    std::vector<Param> params;
    std::set<std::string> names; // of the parameters; labels of `memory` point here
    StateTable state;
    std::optional<MemoryMap> memory; // of parameters and state; nullopt: it is computed again for the next ones
    Wrapper wrapper = Wrapper::none; // of the original's, which compat mode stands for
    int32_t trust_slots = 0;         // tensors with a trust ratio that other model ranks have a part in
    int64_t family = -1;             // the first group of the 1-bit family; -1: there is none

    /// How far the lists go. State tensors of the whole optimizer stand behind those of the parameters and follow from
    /// all of them, so they are here as they were.
    struct Mark {
        size_t groups, params;
        Wrapper wrapper;
        int32_t trust_slots;
        int64_t family;
        std::vector<StateEntry> of_optimizer;
    };
    Mark mark() const { return {groups.size(), params.size(), wrapper, trust_slots, family, state.of_optimizer()}; }
    void truncate(const Mark &mark) noexcept;
    /// body(the mark before it), which appends. If it fails, the registry is as before.
    template <class F> void append(F &&body) {
        const Mark before = mark();
        try {
            body(before);
        } catch (...) {
            truncate(before);
            throw;
        }
    }

    /// For append(): a group unless NULL, and parameters of it, or else of the groups that they name. The state tensors
    /// of the whole optimizer go: add_own_state() makes them when all groups are there. `shares_trust`: model ranks
    /// have one trust ratio for a sharded tensor.
    void add(const dsopt_group *group, const dsopt_param *given, int64_t count, const dsopt_optimizer_desc &desc,
             bool shares_trust);
    void add_own_state(const OneBit *onebit, const Scaler *scaler);
    /// Returns the memory of parameters and state, or of lists in their place; throws OVERLAP.
    MemoryMap map_memory(const dsopt_tensor *in_place_of_params, const dsopt_tensor *in_place_of_state) const;

private:
    void add_params(const dsopt_param *given, int64_t count, bool named_groups, const dsopt_optimizer_desc &desc,
                    bool shares_trust);
    void add_param_state(int64_t index, const dsopt_optimizer_desc &desc);
    int64_t find_family(size_t first_new, const dsopt_optimizer_desc &desc) const;
};

} // namespace dsopt
