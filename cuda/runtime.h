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

/// While it lives, calls of this thread that may allocate or look at other streams spoil no other thread's capture.
class RelaxedCaptures {
public:
    RelaxedCaptures() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
    ~RelaxedCaptures() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
    RelaxedCaptures(const RelaxedCaptures &) = delete;
    RelaxedCaptures &operator=(const RelaxedCaptures &) = delete;

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// Blocks of memory that the work of streams uses for a while. A block goes back to the pool while that work is still
/// to come, with an event behind it, and is taken again when the event has come.
template <class Memory, Memory (*allocate)(size_t)> class BlockPool {
public:
    struct Block {
        Memory memory;
        size_t bytes = 0;
        std::unique_ptr<Event> used;
    };
    Block take(size_t bytes) {
        const RelaxedCaptures relaxed;
        const std::lock_guard lock(mutex_);
        for (size_t i = 0; i < blocks_.size(); ++i) {
            if (blocks_[i].bytes < bytes || cudaEventQuery(blocks_[i].used->get()) != cudaSuccess) continue;
            Block block = std::move(blocks_[i]);
            blocks_.erase(blocks_.begin() + long(i));
            return block;
        }
        (void)cudaGetLastError(); // "not ready" is no error
        return {allocate(bytes), bytes, std::make_unique<Event>(cudaEventDisableTiming)};
    }
    void give_back(Block block, cudaStream_t stream) {
        check(cudaEventRecord(block.used->get(), stream), "cudaEventRecord");
        const std::lock_guard lock(mutex_);
        blocks_.push_back(std::move(block));
    }
    /// A block that a graph uses, as long as the pool lives.
    void *keep(Block block) {
        const std::lock_guard lock(mutex_);
        kept_.push_back(std::move(block.memory));
        return kept_.back().get();
    }

private:
    std::mutex mutex_;
    std::vector<Block> blocks_;
    std::vector<Memory> kept_;
};
using PinnedPool = BlockPool<PinnedMemory, pinned_memory>;
using ScratchPool = BlockPool<DeviceMemory, device_memory>;

/// Device memory for what a call enqueues on a stream.
class Scratch {
public:
    Scratch(ScratchPool &pool, size_t bytes, cudaStream_t stream) : pool_(pool), stream_(stream) {
        block_ = pool.take(bytes);
        memory_ = capturing(stream) ? pool.keep(std::move(block_)) : block_.memory.get();
    }
    ~Scratch() {
        if (!block_.memory) return;
        try {
            pool_.give_back(std::move(block_), stream_);
        } catch (const std::exception &) { // cudaFree() waits for the work
        }
    }
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    char *get() const { return static_cast<char *>(memory_); }

private:
    ScratchPool &pool_;
    cudaStream_t stream_;
    ScratchPool::Block block_;
    void *memory_;
};

} // namespace dsopt::gpu
