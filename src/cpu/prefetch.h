// SPDX-License-Identifier: Apache-2.0
// Software prefetch in the pass of a step that reads and writes all arrays: the distance, the arrays, and a trial that
// finds out if prefetch is faster on this machine. Nothing here changes a bit of the result.
#pragma once
#include "base/not_copied.h"
#include "cpu/caches.h"
#include "device/plan.h"
#include "device/step_cache.h"
#include <chrono>

namespace dsopt::cpu {

/// Position of a thread's next prefetch. It is kDistance elements ahead of the loop, also across the ends of tensors,
/// which hardware prefetchers cannot predict.
struct PrefetchCursor {
    static constexpr int64_t kDistance = 512; // elements
    const TensorJob *jobs;
    int64_t tensor, element;           // next element to prefetch
    int64_t last_tensor, last_element; // the end of the thread's part of the list
    bool copies;                       // also prefetches low-precision copies, unless they use non-temporal stores
    int64_t due = kDistance;           // elements to prefetch in addition to those of the next call
};

// Local to each file that includes this one: some are compiled once per instruction set.
namespace {

/// Prefetches elements of `size` bytes; none if `data` is NULL.
inline void prefetch_lines(const void *data, size_t size, int64_t index, int64_t n) {
    if (data == nullptr) return;
    const char *line = static_cast<const char *>(data) + size_t(index) * size;
    const char *const end = line + size_t(n) * size;
    for (line -= reinterpret_cast<uintptr_t>(line) % 64; line < end; line += 64) __builtin_prefetch(line);
}
/// Called before each n elements that a kernel processes. `cursor` NULL: no prefetch.
inline void prefetch_next(PrefetchCursor *cursor, int64_t n) {
    if (cursor == nullptr) return;
    PrefetchCursor &position = *cursor;
    n += position.due;
    position.due = 0;
    while (n > 0) {
        const bool last = position.tensor == position.last_tensor;
        if (position.tensor > position.last_tensor || (last && position.element == position.last_element)) return;
        const TensorJob &job = position.jobs[position.tensor];
        const int64_t end = last ? position.last_element : job.range.numel, left = end - position.element,
                      size = n < left ? n : left;
        const auto prefetch = [&](int slot) {
            prefetch_lines(job.data[slot], size_t(size_of(job.formats[slot])), position.element, size);
        };
        if (job.present) {
            prefetch(kGrad);
            prefetch(kWeight);
            for (int k = 0; k < kMoments; ++k) prefetch(kMoment + k);
            prefetch_lines(job.remainder, sizeof *job.remainder, position.element, size);
            if (position.copies) prefetch(kCopy);
        }
        n -= size;
        position.element += size;
        if (position.element == end) ++position.tensor, position.element = 0;
    }
}

} // namespace

/// Decides if the steps of an optimizer prefetch. With lists larger than the caches, prefetch makes an Intel Xeon up to
/// a fifth faster and an AMD EPYC up to a third slower. The first kPasses passes alternate between passes without and
/// with prefetch. Prefetch stays on only if it was clearly faster in every pair, because other work on the machine
/// disturbs some measurements.
class PrefetchTrial final : public StepCache {
public:
    explicit PrefetchTrial(int64_t bytes = 0) : bytes_(bytes) {}
    /// True if the next pass, over a list of `bytes` bytes, prefetches.
    bool prefetches(int64_t bytes) {
        if (bytes != bytes_) *this = PrefetchTrial(bytes);
        return passes_ < kPasses ? passes_ % 2 == 1 : wins_;
    }
    /// Records the time of the pass for which prefetches() was called.
    void record(double seconds) {
        if (passes_ == kPasses) return;
        const bool with = passes_ % 2 == 1, counts = passes_ >= 2; // the first pair may include page faults
        if (with && counts) wins_ = wins_ && seconds < 0.97 * last_;
        last_ = seconds;
        ++passes_;
    }
    void add_phase_times(double *) const override {} // StepKernels::mark() writes Outcome::ms

private:
    static constexpr int kPasses = 12;
    int64_t bytes_;
    int passes_ = 0;
    double last_ = 0; // seconds of the previous pass
    bool wins_ = true;
};

/// One pass of the trial in `cache`; lives as long as the pass runs.
class TimedPass : NotCopied {
public:
    /// Does not prefetch if a thread's part is at most 4 times the core's cache, because the next level then delivers
    /// it in time. A core cache of 0 bytes always prefetches.
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
