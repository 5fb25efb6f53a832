// SPDX-License-Identifier: Apache-2.0
// Software prefetch in the pass of a step that reads and writes everything: how far in front of the loop, what of a
// tensor, and whether it pays on this machine. Nothing here changes a bit of the result.
#pragma once
#include "base/not_copied.h"
#include "cpu/caches.h"
#include "device/plan.h"
#include "device/step_cache.h"
#include <chrono>

namespace dsopt::cpu {

/// The next elements that a thread prefetches. They are kDistance in front of the loop, across the ends of tensors,
/// which the processor's own prefetchers do not see coming.
struct PrefetchCursor {
    static constexpr int64_t kDistance = 512; // elements
    const TensorJob *jobs;
    int64_t tensor, element;           // of the next one
    int64_t last_tensor, last_element; // the end of the thread's part of the list
    bool copies;                       // low-precision copies, too; those that are stored non-temporally are not read
    int64_t due = kDistance;           // elements to prefetch in addition to those of the next call
};

// In files that are compiled once per instruction set: local to each of them.
namespace {

inline void prefetch_lines(const Slot &slot, int64_t index, int64_t n) {
    if (!slot) return;
    const size_t size = dtype_size(slot.format);
    const char *line = static_cast<const char *>(slot.data) + size_t(index) * size;
    const char *const end = line + size_t(n) * size;
    for (line -= reinterpret_cast<uintptr_t>(line) % 64; line < end; line += 64) __builtin_prefetch(line);
}
/// Called before each n elements that a kernel works on. `cursor` NULL: without prefetch.
inline void prefetch_next(PrefetchCursor *cursor, int64_t n) {
    if (cursor == nullptr) return;
    PrefetchCursor &at = *cursor;
    n += at.due;
    at.due = 0;
    while (n > 0) {
        const bool last = at.tensor == at.last_tensor;
        if (at.tensor > at.last_tensor || (last && at.element == at.last_element)) return;
        const TensorJob &job = at.jobs[at.tensor];
        const int64_t end = last ? at.last_element : job.range.numel, left = end - at.element,
                      size = n < left ? n : left;
        if (job.present) {
            prefetch_lines(job.grad(), at.element, size);
            prefetch_lines(job.weight(), at.element, size);
            for (int k = 0; k < kMoments; ++k) prefetch_lines(job.moment(k), at.element, size);
            if (at.copies) prefetch_lines(job.copy(), at.element, size);
        }
        n -= size;
        at.element += size;
        if (at.element == end) ++at.tensor, at.element = 0;
    }
}

} // namespace

/// Decides whether the steps of an optimizer prefetch. Where a list does not fit the caches, an Intel Xeon is up to a
/// fifth faster with it and an AMD EPYC up to a third slower. So the first steps alternate between both, and prefetch
/// stays on only if it was clearly faster each time: other work on the machine disturbs some of them.
class PrefetchTrial final : public StepCache {
public:
    explicit PrefetchTrial(int64_t bytes = 0) : bytes_(bytes) {}
    /// True if the next pass, over a list of so many bytes, is to prefetch.
    bool prefetches(int64_t bytes) {
        if (bytes != bytes_) *this = PrefetchTrial(bytes);
        return passes_ < kPasses ? passes_ % 2 == 1 : wins_;
    }
    /// Records the time of that pass.
    void record(double seconds) {
        if (passes_ == kPasses) return;
        const bool with = passes_ % 2 == 1, counts = passes_ >= 2; // the first pair may meet pages for the first time
        if (with && counts) wins_ = wins_ && seconds < 0.97 * last_;
        last_ = seconds;
        ++passes_;
    }
    void add_phase_times(double *) const override {} // they are in the outcome

private:
    static constexpr int kPasses = 12;
    int64_t bytes_;
    int passes_ = 0;
    double last_ = 0; // seconds of the previous pass
    bool wins_ = true;
};

/// One pass of the trial in `cache`, which lives as long as the pass runs.
class TimedPass : NotCopied {
public:
    /// A thread's part of the list that is little longer than the core's own cache comes from the next level in time.
    TimedPass(StepCache *cache, const CacheSizes &caches, int64_t bytes, int64_t bytes_of_part) :
        trial_(bytes_of_part > 4 * caches.core ? static_cast<PrefetchTrial *>(cache) : nullptr),
        prefetches_(caches.core == 0 || (trial_ != nullptr && trial_->prefetches(bytes))) {
        if (trial_ != nullptr) begin_ = Clock::now();
    }
    ~TimedPass() {
        if (trial_ != nullptr) trial_->record(std::chrono::duration<double>(Clock::now() - begin_).count());
    }
    bool prefetches() const { return prefetches_; }

private:
    using Clock = std::chrono::steady_clock;
    PrefetchTrial *const trial_;
    const bool prefetches_;
    Clock::time_point begin_;
};

} // namespace dsopt::cpu
