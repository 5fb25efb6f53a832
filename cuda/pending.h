// SPDX-License-Identifier: Apache-2.0
// Tracks the work that calls on an optimizer or scaler have enqueued, by one event per stream.
#pragma once
#include "device/device.h"
#include "runtime.h"
#include <atomic>

namespace dsopt::gpu {

/// Each add() costs one cudaEventRecord, except while the stream is being captured. Only the constructor allocates.
class CudaPendingWork final : public PendingWork {
public:
    explicit CudaPendingWork(const Gpu &gpu) : gpu_(gpu) {
        for (Mark &mark : marks_) mark.event = gpu.event(cudaEventDisableTiming);
    }

    void add(void *handle) noexcept override {
        const auto stream = static_cast<cudaStream_t>(handle);
        try {
            const OnDevice on(gpu_);
            if (capturing(stream)) {
                captured_ = true;
                return;
            }
            const std::lock_guard lock(mutex_);
            Mark &mark = mark_for(stream);
            check(cudaEventRecord(mark.event.get(), stream), "cudaEventRecord");
            mark.stream = stream;
            mark.used = true;
        } catch (const std::exception &) { // the result of the call does not depend on the event
            (stream == nullptr ? default_unknown_ : unknown_) = true;
        }
    }

    void wait(Waits who, void *stream) const override {
        const OnDevice on(gpu_);
        if (who == Waits::stream && capturing(static_cast<cudaStream_t>(stream))) return;
        const bool unknown = unknown_.exchange(false);
        if (unknown || (who == Waits::host_for_replays && captured_)) {
            const cudaError_t error = cudaDeviceSynchronize();
            if (unknown && error != cudaSuccess) unknown_ = true;
            return check(error, "cudaDeviceSynchronize");
        }
        if (default_unknown_) {
            (void)capturing(nullptr); // throws if the default stream cannot be waited for
            default_unknown_ = false;
            const cudaError_t error = cudaStreamSynchronize(nullptr);
            if (error != cudaSuccess) default_unknown_ = true;
            check(error, "cudaStreamSynchronize");
        }
        cudaEvent_t events[kMarks];
        int count = 0;
        {
            const std::lock_guard lock(mutex_);
            for (const Mark &mark : marks_)
                if (mark.used && (who != Waits::stream || mark.stream != stream)) events[count++] = mark.event.get();
        }
        for (int k = 0; k < count; ++k)
            if (who == Waits::stream)
                check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), events[k], cudaEventWaitDefault),
                      "cudaStreamWaitEvent");
            else
                check(cudaEventSynchronize(events[k]), "cudaEventSynchronize");
    }

private:
    static constexpr int kMarks = 8;
    struct Mark {
        Event event;
        cudaStream_t stream = nullptr;
        bool used = false;
    };
    /// Returns the mark of earlier work on the stream, or a mark that is unused or done. If more streams have pending
    /// work than there are marks, the stream waits for one of the marks, which then covers both streams. A new stream
    /// may have the handle of a destroyed stream and then reuses its mark. This is correct, because the caller must
    /// order calls on the same memory.
    Mark &mark_for(cudaStream_t stream) {
        for (Mark &mark : marks_)
            if (mark.used && mark.stream == stream) return mark;
        for (Mark &mark : marks_)
            if (!mark.used || is_done(cudaEventQuery(mark.event.get()), "cudaEventQuery")) return mark;
        Mark &mark = marks_[next_];
        next_ = (next_ + 1) % kMarks;
        check(cudaStreamWaitEvent(stream, mark.event.get(), cudaEventWaitDefault), "cudaStreamWaitEvent");
        return mark;
    }

    const Gpu &gpu_;
    mutable std::mutex mutex_;
    Mark marks_[kMarks];
    int next_ = 0;
    // True if there is work that no event covers. The default stream cannot be destroyed, so it is waited for directly.
    mutable std::atomic<bool> unknown_{false}, default_unknown_{false};
};

} // namespace dsopt::gpu
