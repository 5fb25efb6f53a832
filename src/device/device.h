// SPDX-License-Identifier: Apache-2.0
// Interface between the engine, which defines steps, and the devices that run them. One Device per kind of memory.
#pragma once
#include "base/not_copied.h"
#include "base/sizes.h"
#include "device/kernels.h"
#include <atomic>
#include <memory>
#include <string>

namespace dsopt {

/// Page-locked host memory, which the device copies to and from asynchronously.
using HostBuffer = std::shared_ptr<void>;

/// Work that calls on an object have enqueued. The host can wait for this work without waiting for the whole device.
/// Any number of threads may use it at the same time.
class PendingWork {
public:
    virtual ~PendingWork() = default;
    /// Adds everything that is on `stream` now. If the stream is being captured, the work runs when a graph is
    /// launched.
    virtual void add(void *stream) noexcept = 0;
    enum class Waits : uint8_t {
        host,
        /// After a capture, the host also waits for launches of graphs. These may be on any stream, so it waits for the
        /// whole device, which invalidates captures of other threads.
        host_for_replays,
        stream // makes it wait; a stream that is being captured must be ordered by the caller
    };
    /// Waits for all of the work.
    virtual void wait(Waits who, void *stream = nullptr) const = 0;
    /// True if work was added while its stream was being captured: launches of a graph use memory of that call.
    bool captured() const { return captured_; }

protected:
    std::atomic<bool> captured_{false};
};

/// Adds the work that a scope enqueues on a stream, even if the scope throws. `work` NULL: the backend is the host.
class Enqueues : NotCopied {
public:
    Enqueues(PendingWork *work, void *stream) : work_(work), stream_(stream) {}
    ~Enqueues() {
        if (work_ != nullptr) work_->add(stream_);
    }

private:
    PendingWork *work_;
    void *stream_;
};

/// Memory, streams and copies of one kind of device.
class Device : NotCopied {
public:
    /// `is_host`: the host reads and writes backend memory in place. `kernels` may be constructed after this.
    Device(const char *name, bool is_host, const DeviceKernels &kernels) :
        name_(name),
        is_host_(is_host),
        kernels_(kernels) {}
    virtual ~Device() = default;
    const char *name() const { return name_; }
    bool is_host() const { return is_host_; }
    const DeviceKernels &kernels() const { return kernels_; }
    /// Allocates memory for a context without an allocator hook. Throws on failure.
    virtual void *allocate(size_t bytes, void *stream) const = 0;
    virtual void release(void *memory, size_t bytes, void *stream) const noexcept = 0;
    /// False for memory that this device cannot access, such as memory of another device. Slow; for debugging.
    virtual bool owns(const void *pointer) const = 0;
    virtual HostBuffer host_buffer(size_t bytes) const = 0; // pinned; not for backends that are the host
    /// Throws DSOPT_ERR_DEVICE if a stream of the caller does not belong to this device, or belongs to another context
    /// of the driver. Called once per call, first. In other functions NULL is the default stream of the device.
    virtual void check_stream(void *stream) const = 0;
    /// Returns NULL on backends that are the host. The object must not outlive the device.
    virtual std::shared_ptr<PendingWork> make_pending_work() const = 0;
    /// Returns the device's own stream, for copies in calls in which the host may wait: the default stream may be
    /// captured. Returns NULL on backends that are the host.
    virtual void *copy_stream() const = 0;
    /// Copies between host and backend memory in any direction, in stream order. The host's memory may change after the
    /// call unless it is page-locked.
    virtual void enqueue_copy(void *to, const void *from, size_t bytes, void *stream) const = 0;
    /// Copies synchronously. The caller has waited for work that uses the memory.
    void copy(void *to, const void *from, size_t bytes) const {
        if (bytes == 0) return;
        enqueue_copy(to, from, bytes, copy_stream());
        wait(copy_stream());
    }
    virtual void clear(void *data, size_t bytes, void *stream) const = 0; // zeros
    /// Returns true if everything on `stream` has completed. Throws if it failed, and DSOPT_ERR_STATE while the stream
    /// is being captured.
    virtual bool finished(void *stream) const = 0;
    /// Waits for everything on `stream` and nothing else. NULL is the legacy default stream: throws DSOPT_ERR_STATE
    /// while a stream that it waits for is being captured.
    virtual void wait(void *stream) const = 0;
    void wait_for_default_stream() const { wait(nullptr); }
    virtual void on_device(FunctionRef<void()> body) const = 0; // calls body with the device current in this thread

private:
    const char *const name_;
    const bool is_host_;
    const DeviceKernels &kernels_;
};

/// Returns the name of the CPU backend's instruction set: the best of this machine, limited by DSOPT_ISA.
const char *cpu_isa_name();
/// Returns the value of DSOPT_ISA if it is not a known instruction set, else NULL. The generic kernels then run.
const char *unknown_isa();
std::unique_ptr<Device> make_cpu_device();
/// Throws DSOPT_ERR_UNSUPPORTED in a build without CUDA, DSOPT_ERR_MISSING without a driver or device.
std::unique_ptr<Device> make_cuda_device(int device);
/// What dsopt_build_info() says about CUDA. The texts have no characters that JSON would escape.
struct CudaInfo {
    const char *state;               // "cuda": there is a device; "no device"; "not in this build"
    std::string reason;              // why there is none, else ""
    const char *code;                // compute capabilities of devices that the build has code for
    std::string driver{}, runtime{}; // versions of CUDA, such as "13.0"; "": there is none
    std::string devices{};           // their compute capabilities as a list of JSON's strings, "" without a device
    bool usable() const { return reason.empty(); }
};
/// Starts the CUDA driver.
CudaInfo cuda_info();

} // namespace dsopt
