// SPDX-License-Identifier: Apache-2.0
// Gradients of a step in parts: those that dsopt_optimizer_ready has received, and what was done with them.
#pragma once
#include "optimizer/buckets.h"
#include "optimizer/plan.h"
#include <vector>

namespace dsopt {

class ReadyGradients : NotCopied {
public:
    enum class Progress : uint8_t {
        none,
        kept, // ready, and not read yet
        done  // its part of StepParts::phase is done
    };

    explicit ReadyGradients(size_t params) :
        grads_(params),
        progress_(params),
        intervals_(params),
        done_from_(int64_t(params)) {}

    bool empty() const { return count_ == 0; }
    bool has(size_t param) const { return progress_[param] != Progress::none; }
    /// Returns the index of a parameter that is ready. There must be one.
    size_t first() const;
    /// True if calls of this step add to accumulators (DSOPT_READY_ACCUMULATED).
    bool accumulated() const { return accumulated_; }

    /// Adds the gradients of a call, which was checked. Throws ARGUMENT if one of them is ready already.
    void add(const dsopt_ready &ready, const std::vector<Param> &params);
    /// Takes back what add() of the same call did.
    void remove(const dsopt_ready &ready);
    /// Notes that the phase ran for the parameters of a call, or for all that are in buckets.
    void set_done(const dsopt_ready &ready);
    void set_done(const RankParts &parts);
    void clear();

    /// Returns the gradients of the whole step, one entry per parameter; those of parameters that are not ready are
    /// `others`, or absent if it is NULL.
    const dsopt_tensor *complete(const dsopt_tensor *others);
    const dsopt_tensor *grads() const { return grads_.data(); }
    /// Returns the parameters for which the phase is left.
    std::span<const TensorInterval> left();
    /// Returns the index from which on all parameters are done.
    int64_t done_from() const { return done_from_; }

    /// The plan of the parts, made by the first call of a step that has work to do.
    std::optional<Optimizer::Planned> planned;
    std::unique_ptr<BucketExchange> buckets; // NULL before the first step that exchanges buckets
    bool begun = false;                      // the phase has run for some tensors, and what precedes it
    bool reuses_tables = false;              // the tables of the last step are still valid
    bool ended = false; // the step has begun its phases: these gradients are forgotten, come what may

private:
    std::vector<dsopt_tensor> grads_;
    std::vector<Progress> progress_;
    std::vector<TensorInterval> intervals_; // for left()
    int64_t count_ = 0, done_from_;
    bool accumulated_ = false;
};

/// Returns the index of the k-th parameter of a call.
inline size_t param_of(const dsopt_ready &ready, int64_t k) {
    return size_t(ready.params != nullptr ? ready.params[k] : ready.first + k);
}
/// Calls body(interval) for the runs of neighbours in the order of a call.
template <class Body> void for_intervals(const dsopt_ready &ready, const Body &body) {
    for (int64_t k = 0; k < ready.count;) {
        TensorInterval run{int64_t(param_of(ready, k)), 1};
        for (++k; k < ready.count; ++k) {
            const auto next = int64_t(param_of(ready, k));
            if (next != run.end() && next != run.first - 1) break;
            run.first = std::min(run.first, next);
            ++run.count;
        }
        body(run);
    }
}

} // namespace dsopt
