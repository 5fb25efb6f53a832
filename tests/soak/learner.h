// SPDX-License-Identifier: Apache-2.0
// One rank that learns fixed numbers from noisy gradients, so that there is a loss that must decrease.
#pragma once
#include "support/handles.h"
#include <string>
#include <vector>

namespace soak {

/// Settings of a training run. Results depend only on the settings and the step, not on the rank that computes them.
struct Course {
    int32_t algorithm = DSOPT_ALGORITHM_ADAMW;
    int64_t steps = 200;
    uint64_t seed = 1;
    int32_t first_format = DSOPT_MOMENT_F32, second_format = DSOPT_MOMENT_F32; // of the moments
    bool remainders = false; // BF16 weights with DSOPT_MASTERS_REMAINDER, in place of F32 weights
    /// DSOPT_OPTIMIZER_SHARD, with AVERAGES or without. All ranks pass the same gradients, so that weights have the same
    /// bits with any number of ranks; with AVERAGES, with a power of 2, whose mean is exact.
    int32_t shard = 0;

    std::string name() const;
    bool averages() const { return shard & DSOPT_OPTIMIZER_AVERAGES; }
};

class Learner {
public:
    /// `comm` NULL: a single rank.
    Learner(const test::Context &context, const test::Comm &comm, int rank, const Course &course);
    Learner(const Learner &) = delete;
    Learner &operator=(const Learner &) = delete;

    dsopt_optimizer *opt() const { return opt_.get(); }
    [[nodiscard]] dsopt_status step();
    /// Saves the state and the parameters.
    [[nodiscard]] dsopt_status save(const std::string &path);
    /// `flags`: in addition to DSOPT_IO_PARAMS. Several files: those of all ranks that saved.
    [[nodiscard]] dsopt_status load(const std::vector<std::string> &files, uint32_t flags = 0);
    int64_t steps() const; ///< steps taken, in this process or before
    double loss() const;   ///< mean squared distance from the targets, without noise
    bool same_weights(const Learner &other) const { return weights_ == other.weights_; }

private:
    Course course_;
    int rank_;
    dsopt_comm *comm_;
    int32_t weight_dtype() const { return course_.remainders ? DSOPT_DTYPE_BF16 : DSOPT_DTYPE_F32; }
    float weight(size_t tensor, size_t index) const;

    std::vector<std::vector<char>> weights_;
    std::vector<std::vector<float>> grads_, goals_;
    test::Optimizer opt_;
};

} // namespace soak
