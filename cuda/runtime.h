// SPDX-License-Identifier: Apache-2.0
// Small things around the CUDA runtime: errors, the current device, memory with owners.
#pragma once
#include "base/status.h"
#include "launch.h"
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace dsopt::gpu {

inline void check(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    (void)cudaGetLastError(); // it has been told; it must not show up again in the caller's own calls
    throw Error(error == cudaErrorMemoryAllocation ? DSOPT_ERR_NOMEM : DSOPT_ERR_BACKEND, "%s: %s", what,
                cudaGetErrorString(error));
}

/// Makes a device current and gives the caller's back.
class OnDevice {
public:
    explicit OnDevice(int device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
        changed_ = before_ != device;
    }
    ~OnDevice() {
        if (changed_) (void)cudaSetDevice(before_);
    }
    OnDevice(const OnDevice &) = delete;
    OnDevice &operator=(const OnDevice &) = delete;

private:
    int before_ = 0;
    bool changed_ = false;
};

struct DeviceFree {
    void operator()(void *memory) const { (void)cudaFree(memory); }
};
using DeviceMemory = std::unique_ptr<void, DeviceFree>;
inline DeviceMemory device_memory(size_t bytes) {
    void *memory = nullptr;
    check(cudaMalloc(&memory, bytes != 0 ? bytes : 1), "cudaMalloc");
    return DeviceMemory(memory);
}

/// Memory for work on one stream, given back in its order.
class AsyncMemory {
public:
    AsyncMemory(size_t bytes, cudaStream_t stream) : stream_(stream) {
        check(cudaMallocAsync(&memory_, bytes, stream), "cudaMallocAsync");
    }
    ~AsyncMemory() {
        if (memory_ != nullptr) (void)cudaFreeAsync(memory_, stream_);
    }
    AsyncMemory(const AsyncMemory &) = delete;
    AsyncMemory &operator=(const AsyncMemory &) = delete;
    void *get() const { return memory_; }
    /// Says if it fails, unlike the destructor.
    void release() { check(cudaFreeAsync(std::exchange(memory_, nullptr), stream_), "cudaFreeAsync"); }

private:
    void *memory_ = nullptr;
    cudaStream_t stream_;
};

struct PinnedFree {
    void operator()(void *memory) const { (void)cudaFreeHost(memory); }
};
using PinnedMemory = std::unique_ptr<void, PinnedFree>;
inline PinnedMemory pinned_memory(size_t bytes) {
    void *memory = nullptr;
    check(cudaMallocHost(&memory, bytes != 0 ? bytes : 1), "cudaMallocHost");
    return PinnedMemory(memory);
}

class Event {
public:
    explicit Event(unsigned flags) { check(cudaEventCreateWithFlags(&event_, flags), "cudaEventCreate"); }
    ~Event() { (void)cudaEventDestroy(event_); }
    Event(const Event &) = delete;
    Event &operator=(const Event &) = delete;
    cudaEvent_t get() const { return event_; }

private:
    cudaEvent_t event_ = nullptr;
};

inline bool capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

/// Page-locked buffers for uploads. One goes back to the pool at once and is taken again when its copy has run.
class PinnedPool {
public:
    struct Buffer {
        PinnedMemory memory;
        size_t bytes;
        std::unique_ptr<Event> copied;
    };
    /// Copies `bytes` from host memory that may change afterwards. Not for streams that are being captured.
    void upload(void *to, const void *from, size_t bytes, cudaStream_t stream) {
        Buffer buffer = take(bytes);
        memcpy(buffer.memory.get(), from, bytes);
        check(cudaMemcpyAsync(to, buffer.memory.get(), bytes, cudaMemcpyHostToDevice, stream), "upload");
        check(cudaEventRecord(buffer.copied->get(), stream), "cudaEventRecord");
        const std::lock_guard lock(mutex_);
        pool_.push_back(std::move(buffer));
    }

private:
    Buffer take(size_t bytes) {
        {
            const std::lock_guard lock(mutex_);
            for (size_t i = 0; i < pool_.size(); ++i) {
                if (pool_[i].bytes < bytes || cudaEventQuery(pool_[i].copied->get()) != cudaSuccess) continue;
                Buffer buffer = std::move(pool_[i]);
                pool_.erase(pool_.begin() + long(i));
                return buffer;
            }
        }
        (void)cudaGetLastError(); // "not ready" is no error
        return {pinned_memory(bytes), bytes, std::make_unique<Event>(cudaEventDisableTiming)};
    }
    std::mutex mutex_;
    std::vector<Buffer> pool_;
};

} // namespace dsopt::gpu
