// SPDX-License-Identifier: Apache-2.0
// A step on the CPU: each call of the driver runs at once, on all threads.
#pragma once
#include "base/function_ref.h"
#include "cpu/caches.h"
#include "cpu/kernels.h"
#include "device/loops.h"

namespace dsopt::cpu {

/// Whether the sweep over a list asks for memory ahead of itself. Where a list does not fit the caches, an Intel Xeon
/// is up to a fifth faster with it and an AMD EPYC up to a third slower. So the first steps try both in turns, and it
/// stays on only if it was clearly faster each time: other work on the machine disturbs some of them.
class AheadTrial final : public StepCache {
public:
    explicit AheadTrial(int64_t bytes = 0) : bytes_(bytes) {}
    /// For the next sweep, over a list of so many bytes.
    bool asks(int64_t bytes) {
        if (bytes != bytes_) *this = AheadTrial(bytes);
        return sweeps_ < kSweeps ? sweeps_ % 2 == 1 : wins_;
    }
    /// How long it took.
    void note(double seconds) {
        if (sweeps_ == kSweeps) return;
        const bool asked = sweeps_ % 2 == 1, counts = sweeps_ >= 2; // the first pair may meet pages for the first time
        if (asked && counts) wins_ = wins_ && seconds < 0.97 * last_;
        last_ = seconds;
        ++sweeps_;
    }
    void add_phase_times(double *) const override {} // they are in the outcome

private:
    static constexpr int kSweeps = 12;
    int64_t bytes_;
    int sweeps_ = 0;
    double last_ = 0; // seconds of the sweep before
    bool wins_ = true;
};

void run_step(const StepPlan &plan, const Kernels &kernels, const CacheSizes &caches,
              FunctionRef<void(StepLoops &)> body);

} // namespace dsopt::cpu
