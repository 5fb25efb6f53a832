// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/dtype.h"
#include "device/plan.h"
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace dsopt {

/// What dsopt_optimizer_step was last called with. A call that repeats it needs no checks, and the tables of tensors
/// and groups are those of the last step. Whatever changes the optimizer otherwise forgets it.
class LastStep {
public:
    Repeats repeats(const dsopt_step &step) const {
        const dsopt_step other = without_lists(step);
        if (!kept_ || std::memcmp(&other, &step_, sizeof other) != 0 || !params_.equals(step.params) ||
            !out_.equals(step.out) || !state_.equals(step.state))
            return Repeats::nothing;
        if (grads_.equals(step.grads)) return Repeats::all;
        return grads_.may_be_at(step.grads) ? Repeats::all_but_places : Repeats::nothing;
    }
    /// After forget(). `request_flags`: what the checks made of those of the call. `repeats`: how much is there still.
    void keep(const dsopt_step &step, uint32_t request_flags, Repeats repeats) noexcept {
        try {
            if (repeats == Repeats::nothing) {
                step_ = without_lists(step);
                request_flags_ = request_flags;
                // For the lists that this call did not bring, too: no step after the first one allocates.
                for (List *list : {&grads_, &params_, &out_}) list->tensors.reserve(size_t(step.count));
                params_.assign(step.params, step.count);
                out_.assign(step.out, step.count);
                state_.assign(step.state, step.state_count);
            }
            if (repeats != Repeats::all) grads_.assign(step.grads, step.count);
            kept_ = true;
        } catch (const std::bad_alloc &) { // the step was taken; the next one is checked anew
        }
    }
    void forget() { kept_ = false; }
    uint32_t request_flags() const { return request_flags_; }

private:
    static_assert(sizeof(dsopt_tensor) == 24, "no padding: lists are compared byte by byte");
    struct List {
        bool given = false;
        std::vector<dsopt_tensor> tensors;
        void assign(const dsopt_tensor *list, int64_t count) {
            given = list != nullptr;
            if (given) tensors.assign(list, list + count);
        }
        bool equals(const dsopt_tensor *list) const {
            return given == (list != nullptr) &&
                   (!given || tensors.empty() || std::memcmp(tensors.data(), list, tensors.size() * sizeof *list) == 0);
        }
        /// Whether the list differs in addresses alone, and these are legal.
        bool may_be_at(const dsopt_tensor *list) const {
            if (given != (list != nullptr)) return false;
            bool may = true;
            for (size_t i = 0; i < tensors.size() && may; ++i) {
                const dsopt_tensor &now = list[i], &old = tensors[i];
                may = now.numel == old.numel && now.dtype == old.dtype && now.reserved == old.reserved &&
                      (now.data != nullptr) == (old.data != nullptr) &&
                      reinterpret_cast<uintptr_t>(now.data) % dtype_size(now.dtype) == 0;
            }
            return may;
        }
    };
    /// What is compared as it is. The stream says only when.
    static dsopt_step without_lists(dsopt_step step) {
        step.grads = step.params = step.out = step.state = nullptr;
        step.stream = nullptr;
        return step;
    }

    bool kept_ = false;
    dsopt_step step_{};
    uint32_t request_flags_ = 0;
    List grads_, params_, out_, state_;
};

} // namespace dsopt
