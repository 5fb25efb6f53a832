// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "optimizer/state_entry.h"
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace dsopt {

/// All state tensors of an optimizer: those of its parameters, then those of the whole. Found by parameter and kind.
class StateTable {
public:
    static constexpr int64_t kOptimizer = -1; // in place of a parameter

    /// Tensors of a parameter follow one another, and those of the optimizer follow all parameters'.
    void add(const StateEntry &entry) {
        if (entry.param >= int64_t(of_params_.size())) of_params_.resize(size_t(entry.param) + 1, no_slots());
        slots(entry.param)[size_t(entry.kind)] = int32_t(entries_.size());
        entries_.push_back(entry);
    }
    /// Takes those of the whole optimizer out.
    std::vector<StateEntry> take_optimizer() {
        const auto first = std::find_if(entries_.begin(), entries_.end(), [](const auto &e) { return e.param < 0; });
        std::vector<StateEntry> taken(first, entries_.end());
        entries_.erase(first, entries_.end());
        of_optimizer_ = no_slots();
        return taken;
    }

    /// Its place in lists of all state tensors; -1: there is none.
    int64_t slot(int64_t param, StateKind kind) const {
        if (param >= int64_t(of_params_.size())) return -1;
        return (param < 0 ? of_optimizer_ : of_params_[size_t(param)])[size_t(kind)];
    }
    const StateEntry *find(int64_t param, StateKind kind) const {
        const int64_t at = slot(param, kind);
        return at >= 0 ? &entries_[size_t(at)] : nullptr;
    }
    const StateEntry *find(StateKind kind) const { return find(kOptimizer, kind); }
    /// In such a list.
    const dsopt_tensor *find(const dsopt_tensor *list, int64_t param, StateKind kind) const {
        const int64_t at = slot(param, kind);
        return at >= 0 ? list + at : nullptr;
    }
    const dsopt_tensor *find(const dsopt_tensor *list, StateKind kind) const { return find(list, kOptimizer, kind); }

    size_t size() const { return entries_.size(); }
    bool empty() const { return entries_.empty(); }
    StateEntry &operator[](size_t i) { return entries_[i]; }
    const StateEntry &operator[](size_t i) const { return entries_[i]; }
    auto begin() { return entries_.begin(); }
    auto begin() const { return entries_.begin(); }
    auto end() { return entries_.end(); }
    auto end() const { return entries_.end(); }
    void swap(StateTable &other) noexcept { std::swap(*this, other); }

private:
    using Slots = std::array<int32_t, size_t(StateKind::step) + 1>;
    static Slots no_slots() {
        Slots none;
        none.fill(-1);
        return none;
    }
    Slots &slots(int64_t param) { return param < 0 ? of_optimizer_ : of_params_[size_t(param)]; }

    std::vector<StateEntry> entries_;
    std::vector<Slots> of_params_;
    Slots of_optimizer_ = no_slots();
};

} // namespace dsopt
