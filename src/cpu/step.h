// SPDX-License-Identifier: Apache-2.0
// A step on the CPU: each call of the driver runs at once, on all threads.
#pragma once
#include "base/function_ref.h"
#include "cpu/caches.h"
#include "cpu/kernels.h"
#include "device/loops.h"

namespace dsopt::cpu {

/// Whether the sweep over a list asks for memory ahead of itself. Where a list does not fit the caches, an Intel Xeon is
/// up to a fifth faster with it and an AMD EPYC up to a third slower, so both are tried in the first steps.
class AheadTrial final : public StepCache {
public:
    /// For the next sweep, over a list of so many bytes.
    bool asks(int64_t bytes) {
        if (bytes != bytes_) *this = AheadTrial(bytes);
        return sweeps_ < kSweeps ? sweeps_ % 2 == 1 : asks_;
    }
    /// How long it took.
    void note(double seconds) {
        if (sweeps_ == kSweeps) return;
        double &best = best_[sweeps_ % 2];
        if (sweeps_ >= 2 && (best == 0 || seconds < best))
            best = seconds; // the first ones may meet pages for the first time
        if (++sweeps_ == kSweeps) asks_ = best_[1] < 0.95 * best_[0];
    }
    explicit AheadTrial(int64_t bytes = 0) : bytes_(bytes) {}
    void add_phase_times(double *) const override {} // they are in the outcome

private:
    static constexpr int kSweeps = 14;
    int64_t bytes_;
    int sweeps_ = 0;
    double best_[2] = {}; // seconds, without and with asking
    bool asks_ = false;
};

void run_step(const StepPlan &plan, const Kernels &kernels, const CacheSizes &caches,
              FunctionRef<void(StepLoops &)> body);

} // namespace dsopt::cpu
