// SPDX-License-Identifier: Apache-2.0
// Small things around the CUDA runtime: errors, the current device, memory with owners.
#pragma once
#include "base/not_copied.h"
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

/// A device, and its primary context, which is there as long as this.
class Gpu : NotCopied {
public:
    explicit Gpu(int ordinal) :
        ordinal_(ordinal),
        push_(function<Status(void *)>("cuCtxPushCurrent")),
        pop_(function<Status(void **)>("cuCtxPopCurrent")),
        release_(function<Status(int)>("cuDevicePrimaryCtxRelease")) {
        say(function<Status(void **, int)>("cuDevicePrimaryCtxRetain")(&context_, ordinal), "cuDevicePrimaryCtxRetain");
    }
    ~Gpu() { (void)release_(ordinal_); }
    int ordinal() const { return ordinal_; }
    void enter() const { say(push_(context_), "cuCtxPushCurrent"); }
    void leave() const {
        void *context = nullptr;
        (void)pop_(&context);
    }

private:
    using Status = int; // of the driver; 0 is success
    template <class F> static F *function(const char *name) {
        void *found = nullptr;
        cudaDriverEntryPointQueryResult result{};
        check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name);
        if (found == nullptr) throw Error(DSOPT_ERR_MISSING, "the CUDA driver has no %s", name);
        return reinterpret_cast<F *>(found);
    }
    static void say(Status status, const char *what) {
        if (status != 0) throw Error(DSOPT_ERR_BACKEND, "%s: error %d of the CUDA driver", what, status);
    }

    int ordinal_;
    Status (*push_)(void *);
    Status (*pop_)(void **);
    Status (*release_)(int);
    void *context_ = nullptr;
};

/// While it lives, the device is current in this thread, and what the thread does may allocate, or ask about streams,
/// beside captures of others without spoiling them. The context is pushed: cudaSetDevice(), which would give the
/// caller's device back, makes a context on a device that the caller may never have used.
class OnDevice : NotCopied {
public:
    explicit OnDevice(const Gpu &gpu) : gpu_(gpu) {
        int before = 0;
        check(cudaGetDevice(&before), "cudaGetDevice");
        check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
        try {
            entered_ = before != gpu.ordinal();
            if (entered_) gpu.enter();
        } catch (...) {
            (void)cudaThreadExchangeStreamCaptureMode(&mode_);
            throw;
        }
    }
    ~OnDevice() {
        if (entered_) gpu_.leave();
        (void)cudaThreadExchangeStreamCaptureMode(&mode_);
    }

private:
    const Gpu &gpu_;
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
    bool entered_ = false;
};

template <auto Free> struct FreedBy {
    void operator()(void *memory) const { (void)Free(memory); }
};
using DeviceMemory = std::unique_ptr<void, FreedBy<cudaFree>>;
using PinnedMemory = std::unique_ptr<void, FreedBy<cudaFreeHost>>;
inline DeviceMemory device_memory(size_t bytes) {
    void *memory = nullptr;
    check(cudaMalloc(&memory, bytes != 0 ? bytes : 1), "cudaMalloc");
    return DeviceMemory(memory);
}

inline PinnedMemory pinned_memory(size_t bytes) {
    void *memory = nullptr;
    check(cudaMallocHost(&memory, bytes != 0 ? bytes : 1), "cudaMallocHost");
    return PinnedMemory(memory);
}

class Event : NotCopied {
public:
    explicit Event(unsigned flags) { check(cudaEventCreateWithFlags(&event_, flags), "cudaEventCreate"); }
    ~Event() { (void)cudaEventDestroy(event_); }
    cudaEvent_t get() const { return event_; }

private:
    cudaEvent_t event_ = nullptr;
};

inline bool capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

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
        const std::lock_guard lock(mutex_);
        for (size_t i = 0; i < blocks_.size(); ++i) {
            if (blocks_[i].bytes < bytes || cudaEventQuery(blocks_[i].used->get()) != cudaSuccess) continue;
            Block block = std::move(blocks_[i]);
            blocks_.erase(blocks_.begin() + long(i));
            return block;
        }
        (void)cudaGetLastError(); // "not ready" is no error
        // What comes back must find a place: work may still use it.
        blocks_.reserve(++made_);
        kept_.reserve(made_);
        return {allocate(bytes), bytes, std::make_unique<Event>(cudaEventDisableTiming)};
    }
    void give_back(Block block, cudaStream_t stream) {
        const cudaError_t error = cudaEventRecord(block.used->get(), stream);
        const std::lock_guard lock(mutex_);
        if (error == cudaSuccess)
            blocks_.push_back(std::move(block));
        else if (cudaStreamSynchronize(stream) != cudaSuccess) // nobody knows when it can go
            kept_.push_back(std::move(block.memory));
        check(error, "cudaEventRecord");
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
    size_t made_ = 0;
};
using PinnedPool = BlockPool<PinnedMemory, pinned_memory>;
using ScratchPool = BlockPool<DeviceMemory, device_memory>;

/// Device memory for what a call enqueues on a stream.
class Scratch : NotCopied {
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
    char *get() const { return static_cast<char *>(memory_); }

private:
    ScratchPool &pool_;
    cudaStream_t stream_;
    ScratchPool::Block block_;
    void *memory_;
};

} // namespace dsopt::gpu
