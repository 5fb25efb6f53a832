// SPDX-License-Identifier: Apache-2.0
// What the next step does with gradients, as callers ask for it.
#include "optimizer/optimizer.h"
#include <cstring>

namespace dsopt {

void Optimizer::write_reduction(const dsopt_tensor *schedule, int32_t *reduction, void *stream) const {
    if (groups_.empty()) throw Error(DSOPT_ERR_STATE, "the optimizer has no groups yet");
    if (reduction == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "reduction is NULL");
    if (reinterpret_cast<uintptr_t>(reduction) % sizeof *reduction != 0)
        throw Error(DSOPT_ERR_ALIGNMENT, "reduction is at %p, not aligned to 4 bytes", static_cast<void *>(reduction));
    const StateEntry *const entry = state_.find(StateKind::schedule);
    if ((schedule != nullptr) != (entry != nullptr))
        throw Error(DSOPT_ERR_ARGUMENT,
                    entry != nullptr ? "schedule is NULL" : "schedule is given, and no group is of the 1-bit family");
    if (entry != nullptr) check_state_tensor(*schedule, *entry, true);
    context_->device().loops().write_reduction(
        entry != nullptr ? onebit_->setup().rules : ScheduleRules{},
        entry != nullptr ? static_cast<const ScheduleState *>(schedule->data) : nullptr, reduction, stream);
}

dsopt_schedule_info Optimizer::decode_schedule(const int32_t *words) const {
    if (!onebit_) throw Error(DSOPT_ERR_UNSUPPORTED, "no group is of the 1-bit family: there is no schedule");
    ScheduleState state;
    std::memcpy(&state, words, sizeof state);
    dsopt_schedule_info info{};
    info.step = state.step;
    info.frozen = state.frozen;
    info.var_interval = state.var_interval;
    info.var_counter = state.var_counter;
    info.local_interval = state.local_interval;
    info.local_counter = state.local_counter;
    info.momentum_in_bits = state.momentum_in_bits;
    info.reduction = next_reduction_of(onebit_->setup().rules, &state);
    return info;
}

int32_t Optimizer::next_reduction(int64_t call) const {
    if (groups_.empty()) throw Error(DSOPT_ERR_STATE, "the optimizer has no groups yet");
    if (call < 0 || call > INT32_MAX) throw Error(DSOPT_ERR_ARGUMENT, "call is %lld, not in [0, 2^31)", ll(call));
    if (!onebit_) return DSOPT_REDUCTION_FULL;
    return onebit_->next_reduction(state_, call, wrapper() != Wrapper::none);
}

} // namespace dsopt
