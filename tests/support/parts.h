// SPDX-License-Identifier: Apache-2.0
// Steps in parts: the order in which gradients are made ready, and a step that is made so.
#pragma once
#include "support/trainer.h"
#include <algorithm>
#include <numeric>
#include <random>

namespace test {

/// How the gradients of a step are passed to dsopt_optimizer_ready.
enum class Parts {
    backward,  // one by one, from the last to the first
    forward,   // one by one
    random,    // one by one, in a random order
    groups,    // in calls with several, in a random order
    intervals, // in calls without a list of indices
    half,      // every other one; the step has the others
    none       // the step has all
};
inline constexpr Parts kAllParts[] = {Parts::backward,  Parts::forward, Parts::random, Parts::groups,
                                      Parts::intervals, Parts::half,    Parts::none};
inline const char *name_of(Parts parts) {
    constexpr const char *kNames[] = {"backward", "forward", "random", "groups", "intervals", "half", "none"};
    return kNames[size_t(parts)];
}

/// Returns the indices of each call.
inline std::vector<std::vector<int64_t>> calls_of(Parts parts, int64_t count, uint64_t seed) {
    std::vector<int64_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), int64_t(0));
    std::mt19937_64 random(seed);
    if (parts == Parts::backward) std::reverse(order.begin(), order.end());
    if (parts == Parts::random || parts == Parts::groups) std::shuffle(order.begin(), order.end(), random);
    std::vector<std::vector<int64_t>> calls;
    for (size_t k = 0; parts != Parts::none && k < order.size();) {
        const size_t most = parts == Parts::groups || parts == Parts::intervals ? 1 + random() % 4 : 1;
        const size_t end = std::min(k + most, order.size());
        if (parts != Parts::half || k % 2 == 0)
            calls.emplace_back(order.begin() + int64_t(k), order.begin() + int64_t(end));
        k = end;
    }
    if (parts == Parts::intervals) std::reverse(calls.begin(), calls.end());
    return calls;
}

/// Makes a step of gradients that are passed in parts. Gradients that are free are overwritten at once. `change` sets
/// other members of the step.
inline dsopt_status step_in_parts(Trainer &trainer, std::vector<Array> gradients, Parts parts, uint64_t seed,
                                  const std::function<void(dsopt_step &)> &change = {}, int32_t ready_flags = 0) {
    std::vector<dsopt_tensor> left = list_of(gradients);
    const auto count = int64_t(gradients.size());
    for (const std::vector<int64_t> &call : calls_of(parts, count, seed)) {
        std::vector<dsopt_tensor> list;
        for (const int64_t i : call) {
            list.push_back(left[size_t(i)]);
            left[size_t(i)].data = nullptr;
        }
        DSOPT_NEW(dsopt_ready, ready);
        ready.flags = ready_flags;
        ready.grads = list.data();
        ready.count = int64_t(call.size());
        if (parts == Parts::intervals)
            ready.first = call.front();
        else
            ready.params = call.data();
        const dsopt_status status = dsopt_optimizer_ready(trainer.opt(), &ready);
        if (status != DSOPT_OK) return status;
        for (const int64_t i : call) {
            int64_t first = -1, in_bucket = -1;
            must(dsopt_optimizer_bucket(trainer.opt(), i, &first, &in_bucket));
            const bool is_kept = in_bucket == 0, is_free = !is_kept && i >= ready.free_from;
            if (is_free || (ready_flags & DSOPT_READY_ACCUMULATED)) gradients[size_t(i)].corrupt(0xff);
        }
    }
    DSOPT_NEW(dsopt_step, step);
    step.count = count;
    step.flags = DSOPT_STEP_READY;
    if (ready_flags & DSOPT_READY_ACCUMULATED)
        step.flags |= DSOPT_STEP_ACCUMULATED;
    else
        step.grads = left.data();
    if (change) change(step);
    const dsopt_status status = dsopt_optimizer_step(trainer.opt(), &step);
    for (const Array &gradient : gradients) gradient.corrupt(0xff); // free now
    return status;
}

} // namespace test
