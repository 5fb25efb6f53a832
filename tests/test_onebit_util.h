// SPDX-License-Identifier: Apache-2.0
// What the tests of the 1-bit family share: groups, gradients that every rank can make, ranks as threads.
#pragma once
#include "test_mixed_util.h"

namespace dsopt_test {

inline constexpr int32_t kFamily[] = {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM,
                                      DSOPT_ALGORITHM_ONEBIT_LAMB};
inline const char *name_of(int32_t algorithm) {
    return algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM     ? "OneBitAdam"
           : algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM ? "ZeroOneAdam"
                                                        : "OneBitLamb";
}
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
inline dsopt_optimizer_desc desc_of(uint32_t flags = 0) {
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.flags = flags;
    return desc;
}
inline dsopt_optimizer_desc desc_with(const Comm &comm, int32_t compat = DSOPT_COMPAT_NONE, uint32_t flags = 0) {
    dsopt_optimizer_desc desc = desc_of(flags);
    desc.data = comm.get();
    desc.compat = compat;
    return desc;
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

/// Gradients that every rank can make, so that the mean needs no comm.
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
    std::vector<Array> own(int rank, int64_t call) const {
        Random random(uint64_t(1000 * call + rank));
        std::vector<Array> list;
        for (const size_t n : sizes) list.emplace_back(dtype, random.floats(n, -size, 1.2 * size));
        return list;
    }
    /// As the engine has it: the sum in rank order, times the share.
    std::vector<Array> mean(int64_t call) const {
        std::vector<std::vector<float>> sums;
        for (int rank = 0; rank < ranks; ++rank) {
            const std::vector<Array> list = own(rank, call);
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
    std::vector<Array> wanted(int32_t reduction, int rank, int64_t call) const {
        return reduction == DSOPT_REDUCTION_FULL ? mean(call) : own(rank, call);
    }
};
inline const Problem kProblem{{700, 1, 33, 0, 5000, 4096}, 1};
inline Problem problem_of(int ranks) {
    Problem problem = kProblem;
    problem.ranks = ranks;
    return problem;
}

/// body(rank, comm) on every rank.
inline void with_ranks(int ranks, const std::function<void(int, const Context &, const Comm &)> &body) {
    const CommId id = new_id();
    run_ranks(ranks, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm comm = local_comm(ctx, id, rank, ranks);
        body(rank, ctx, comm);
    });
}
inline Trainer trainer_of(const Context &ctx, const Comm &comm, const dsopt_group &group,
                          const std::vector<Array> &weights, uint32_t flags = 0) {
    dsopt_optimizer_desc desc = desc_of(flags);
    desc.data = comm.get();
    return Trainer(ctx, desc, group, weights);
}

} // namespace dsopt_test
