// SPDX-License-Identifier: Apache-2.0
// Helpers for the CUDA runtime: errors, the current device, memory with owners.
#pragma once
#include "base/not_copied.h"
#include "base/status.h"
#include "launch.h"
#include <bit>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace dsopt::gpu {

inline void check(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    (void)cudaGetLastError(); // clears the error, so that the caller's own calls do not report it
    throw Error(error == cudaErrorMemoryAllocation ? DSOPT_ERR_NOMEM : DSOPT_ERR_BACKEND, "%s: %s", what,
                cudaGetErrorString(error));
}

[[noreturn]] inline void refuse_default_stream() {
    throw Error(DSOPT_ERR_STATE, "the default stream cannot be used while a stream that waits for it is being "
                                 "captured: capture streams made with cudaStreamNonBlocking");
}

class Gpu;

/// Frees the object of a unique_ptr in the device's context. Otherwise the runtime would create a context on device 0
/// in a thread without a context.
template <auto Free> struct FreedBy {
    const Gpu *gpu = nullptr;
    template <class T> void operator()(T *handle) const noexcept;
};
using DeviceMemory = std::unique_ptr<void, FreedBy<cudaFree>>;
using PinnedMemory = std::unique_ptr<void, FreedBy<cudaFreeHost>>;
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, FreedBy<cudaEventDestroy>>;
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, FreedBy<cudaStreamDestroy>>;

/// Returns the compute capability of a device, such as "7.5".
inline std::string capability_of(int device);

/// A device with its primary context, which is retained as long as this object lives. All memory, streams and events of
/// the engine belong to that context, and must be freed before this object.
class Gpu : NotCopied {
public:
    explicit Gpu(int ordinal) :
        ordinal_(ordinal),
        push_(function<Status(void *)>("cuCtxPushCurrent")),
        pop_(function<Status(void **)>("cuCtxPopCurrent")),
        release_(function<Status(int)>("cuDevicePrimaryCtxRelease")),
        current_device_(function<Status(int *)>("cuCtxGetDevice")),
        context_of_(function<Status(cudaStream_t, void **)>("cuStreamGetCtx")) {
        int driver = 0;
        check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
        if (driver >= kGreenContexts)
            green_context_of_ = function<Status(cudaStream_t, void **, void **)>("cuStreamGetCtx", kGreenContexts);
        check_driver(function<Status(void **, int)>("cuDevicePrimaryCtxRetain")(&context_, ordinal),
                     "cuDevicePrimaryCtxRetain");
    }
    ~Gpu() { (void)release_(ordinal_); }
    int ordinal() const { return ordinal_; }
    std::string capability() const { return capability_of(ordinal_); }
    void enter() const { check_driver(push_(context_), "cuCtxPushCurrent"); }
    void leave() const {
        void *context = nullptr;
        (void)pop_(&context);
    }
    /// Throws DSOPT_ERR_DEVICE if a stream of the caller does not belong to the primary context: its work could not use
    /// the engine's memory and events. Called before enter(), because a default stream belongs to the context that is
    /// current in the caller's thread.
    void check_stream(cudaStream_t stream) const;

    DeviceMemory device_memory(size_t bytes) const;
    PinnedMemory pinned_memory(size_t bytes) const;
    Event event(unsigned flags) const;
    Stream stream() const;

private:
    using Status = int; // of the driver; 0 is success
    static constexpr Status kInvalidContext = 201;
    static constexpr int kGreenContexts = 12050; // the first driver version that reports them
    template <class F> static F *function(const char *name, unsigned version = 12000) {
        void *found = nullptr;
        cudaDriverEntryPointQueryResult result{};
        check(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result), name);
        if (found == nullptr) throw Error(DSOPT_ERR_MISSING, "the CUDA driver has no %s", name);
        return reinterpret_cast<F *>(found);
    }
    static void check_driver(Status status, const char *what) {
        if (status != 0) throw Error(DSOPT_ERR_BACKEND, "%s: error %d of the CUDA driver", what, status);
    }

    int ordinal_;
    Status (*push_)(void *);
    Status (*pop_)(void **);
    Status (*release_)(int);
    Status (*current_device_)(int *);
    Status (*context_of_)(cudaStream_t, void **context);
    Status (*green_context_of_)(cudaStream_t, void **context, void **green) = nullptr;
    void *context_ = nullptr;
};

inline void Gpu::check_stream(cudaStream_t stream) const {
    void *context = nullptr, *green = nullptr;
    const Status status =
        green_context_of_ != nullptr ? green_context_of_(stream, &context, &green) : context_of_(stream, &context);
    const bool is_default = stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    if (is_default && status == kInvalidContext) return;                   // no context is current in this thread
    if (status == cudaErrorStreamCaptureImplicit) refuse_default_stream(); // the driver uses the same number
    check_driver(status, "cuStreamGetCtx");
    // A stream of a green context works in the primary context. The default stream of a green context is not the
    // default stream of the primary context.
    if (context == context_ && !(is_default && green != nullptr)) return;
    if (!is_default)
        throw Error(DSOPT_ERR_DEVICE,
                    "the stream does not belong to the primary CUDA context of device %d, in which dsopt works: create "
                    "the stream with the CUDA runtime, or after cuDevicePrimaryCtxRetain and cuCtxSetCurrent",
                    ordinal_);
    int device = -1;
    check_driver(current_device_(&device), "cuCtxGetDevice");
    if (device == ordinal_)
        throw Error(
            DSOPT_ERR_DEVICE,
            "the default stream is that of the CUDA context that is current in this thread, and that is not the "
            "primary one of device %d, in which dsopt works: pass a stream of the primary context",
            ordinal_);
}

/// While this object lives, the device's primary context is current in this thread, and the thread may allocate memory
/// and query streams without invalidating captures of other threads. The context is pushed: restoring the caller's
/// device with cudaSetDevice() would create a context on a device that the caller may never have used.
class OnDevice : NotCopied {
public:
    explicit OnDevice(const Gpu &gpu) : gpu_(gpu) {
        gpu.enter(); // first: a call of the runtime creates a context in a thread without one
        const cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode_);
        if (error == cudaSuccess) return;
        gpu.leave();
        check(error, "cudaThreadExchangeStreamCaptureMode");
    }
    ~OnDevice() {
        (void)cudaThreadExchangeStreamCaptureMode(&mode_);
        gpu_.leave();
    }

private:
    const Gpu &gpu_;
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

template <auto Free> template <class T> void FreedBy<Free>::operator()(T *handle) const noexcept {
    try {
        const OnDevice on(*gpu);
        (void)Free(handle);
    } catch (const std::exception &) {} // the device has failed, and its memory with it
}
inline std::string capability_of(int device) {
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    return std::to_string(major) + "." + std::to_string(minor);
}
inline DeviceMemory Gpu::device_memory(size_t bytes) const {
    const OnDevice on(*this);
    void *memory = nullptr;
    check(cudaMalloc(&memory, bytes != 0 ? bytes : 1), "cudaMalloc");
    return {memory, {this}};
}
inline PinnedMemory Gpu::pinned_memory(size_t bytes) const {
    const OnDevice on(*this);
    void *memory = nullptr;
    check(cudaMallocHost(&memory, bytes != 0 ? bytes : 1), "cudaMallocHost");
    return {memory, {this}};
}
inline Event Gpu::event(unsigned flags) const {
    const OnDevice on(*this);
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreate");
    return Event(event, {this});
}
inline Stream Gpu::stream() const {
    const OnDevice on(*this);
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return Stream(stream, {this});
}

/// True if the result of a query is that the work has completed. Clears "not ready", so that the caller's own calls do
/// not report it.
inline bool is_done(cudaError_t error, const char *what) {
    if (error == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return false;
    }
    check(error, what);
    return true;
}

inline bool capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(stream, &status);
    if (error == cudaErrorStreamCaptureImplicit) {
        (void)cudaGetLastError();
        refuse_default_stream();
    }
    check(error, "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

/// Pool of memory blocks for the work of streams. A block returns to the pool while its work is pending, with an event
/// that is recorded after the work, and is used again when the event has completed. Sizes are powers of two, so that
/// growing requests leave little unused memory. No block is freed before the pool: cudaFree() waits for the whole
/// device, and so for collectives that wait for this thread.
template <class Memory, Memory (Gpu::*allocate)(size_t) const> class BlockPool {
public:
    struct Block {
        Memory memory;
        size_t bytes = 0;
        Event used;
    };
    explicit BlockPool(const Gpu &gpu) : gpu_(gpu) {}
    Block take(size_t bytes) {
        const std::lock_guard lock(mutex_);
        bool exists = false;
        Block block = find_free(bytes, exists);
        return block.memory ? std::move(block) : make(bytes);
    }
    /// Returns an empty block if pending work uses all blocks that are large enough: a call does not allocate memory
    /// only because the device lags behind. If no block is large enough, allocates two.
    Block take_if_free(size_t bytes) {
        const std::lock_guard lock(mutex_);
        bool exists = false;
        Block block = find_free(bytes, exists);
        if (block.memory || exists) return block;
        block = make(bytes);
        blocks_.push_back(make(bytes));
        return block;
    }
    void return_block(Block block, cudaStream_t stream) {
        const cudaError_t error = cudaEventRecord(block.used.get(), stream);
        const std::lock_guard lock(mutex_);
        if (error == cudaSuccess)
            blocks_.push_back(std::move(block));
        else if (cudaStreamSynchronize(stream) != cudaSuccess) // work may still use it
            kept_.push_back(std::move(block.memory));
        check(error, "cudaEventRecord");
    }
    /// Keeps a block that a graph uses for the life of the pool. Returns the block's memory.
    void *keep(Block block) {
        const std::lock_guard lock(mutex_);
        kept_.push_back(std::move(block.memory));
        return kept_.back().get();
    }

private:
    // Called with the lock held.
    Block find_free(size_t bytes, bool &exists) {
        for (size_t i = 0; i < blocks_.size(); ++i) {
            if (blocks_[i].bytes < bytes) continue;
            exists = true;
            if (!is_done(cudaEventQuery(blocks_[i].used.get()), "cudaEventQuery")) continue;
            Block block = std::move(blocks_[i]);
            blocks_.erase(blocks_.begin() + long(i));
            return block;
        }
        return {};
    }
    Block make(size_t bytes) {
        // return_block() and keep() must not allocate: if the allocation failed, the block would be freed while work
        // may use it.
        blocks_.reserve(++made_);
        kept_.reserve(made_);
        bytes = std::bit_ceil(bytes);
        return {(gpu_.*allocate)(bytes), bytes, gpu_.event(cudaEventDisableTiming)};
    }

    const Gpu &gpu_;
    std::mutex mutex_;
    std::vector<Block> blocks_;
    std::vector<Memory> kept_;
    size_t made_ = 0;
};
using PinnedPool = BlockPool<PinnedMemory, &Gpu::pinned_memory>;
using ScratchPool = BlockPool<DeviceMemory, &Gpu::device_memory>;

/// Device memory for the work that a call enqueues on a stream.
class Scratch : NotCopied {
public:
    Scratch(ScratchPool &pool, size_t bytes, cudaStream_t stream) : pool_(pool), stream_(stream) {
        block_ = pool.take(bytes);
        memory_ = capturing(stream) ? pool.keep(std::move(block_)) : block_.memory.get();
    }
    ~Scratch() {
        if (!block_.memory) return;
        try {
            pool_.return_block(std::move(block_), stream_);
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
