// SPDX-License-Identifier: Apache-2.0
// Common parts of the tests of the 1-bit family: groups, gradients that every rank can compute, ranks as threads.
#pragma once
#include "harness.h"

namespace test {

inline dsopt_group group_for(int32_t algorithm, int64_t freeze_step, double lr = 1e-2, double weight_decay = 0.01) {
    dsopt_group group = group_of(algorithm, lr, weight_decay);
    group.freeze_step = freeze_step;
    if (algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
        group.var_interval_steps = 2;
        group.local_interval_steps = 4;
        group.max_local_interval = 4;
    }
    return group;
}
inline int32_t reduction(const Trainer &trainer, int64_t call = 0) {
    int32_t value = -1;
    must(dsopt_optimizer_next_reduction(trainer.opt(), call, &value));
    return value;
}
inline char letter(int32_t reduction) {
    return reduction == DSOPT_REDUCTION_FULL ? 'F' : reduction == DSOPT_REDUCTION_COMPRESSED ? '1' : '-';
}
inline std::string schedule(const Trainer &trainer, int64_t calls) {
    std::string text;
    for (int64_t call = 1; call <= calls; ++call) text += letter(reduction(trainer, call));
    return text;
}

/// Gradients that every rank can compute, so that the mean needs no comm.
struct Problem {
    std::vector<size_t> sizes;
    int ranks;
    double size = 1; // of the gradients
    int32_t dtype = DSOPT_DTYPE_F32;

    std::vector<Array> weights() const {
        Random random(5);
        std::vector<Array> list;
        for (const size_t n : sizes) list.emplace_back(dtype, random.floats(n));
        return list;
    }
    std::vector<Array> local_gradients(int rank, int64_t call) const {
        Random random(uint64_t(1000 * call + rank));
        std::vector<Array> list;
        for (const size_t n : sizes) list.emplace_back(dtype, random.floats(n, -size, 1.2 * size));
        return list;
    }
    /// Returns the mean with the engine's roundings: the sum in rank order, times 1 / ranks.
    std::vector<Array> mean(int64_t call) const {
        std::vector<std::vector<float>> sums;
        for (int rank = 0; rank < ranks; ++rank) {
            const std::vector<Array> list = local_gradients(rank, call);
            for (size_t t = 0; t < list.size(); ++t) {
                if (rank == 0)
                    sums.push_back(list[t].floats());
                else
                    for (size_t i = 0; i < list[t].size(); ++i) sums[t][i] += list[t][i];
            }
        }
        std::vector<Array> result;
        for (auto &sum : sums) {
            for (float &value : sum) value *= 1.0f / float(ranks);
            result.emplace_back(DSOPT_DTYPE_F32, sum);
        }
        return result;
    }
    std::vector<Array> gradients_for(int32_t reduction, int rank, int64_t call) const {
        return reduction == DSOPT_REDUCTION_FULL ? mean(call) : local_gradients(rank, call);
    }
};
inline const Problem kProblem{{700, 1, 33, 0, 5000, 4096}, 1};
inline Problem problem_of(int ranks) {
    Problem problem = kProblem;
    problem.ranks = ranks;
    return problem;
}

inline Trainer trainer_of(const Context &ctx, const Comm &comm, const dsopt_group &group,
                          const std::vector<Array> &weights, uint32_t flags = 0) {
    return Trainer(ctx, desc_with(comm, DSOPT_COMPAT_NONE, flags), group, weights);
}

} // namespace test
