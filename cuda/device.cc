// SPDX-License-Identifier: Apache-2.0
#include "device/device.h"
#include "kernels.h"
#include "lt.h"
#include "pending.h"
#include <string>

namespace dsopt {
namespace gpu {
namespace {

/// Loads every kernel. tests/cuda/kernels.py finds a kernel that is missing here.
void load_kernels(KernelLoader &load) {
    load_upload_kernels(load);
    load_one_thread_kernels(load);
    load_list_kernels(load);
    load_inspect_kernels(load);
    load_update_kernels(load);
    load_stored_kernels(load);
    load_compress_kernels(load);
    load_onebit_kernels(load);
    load_matrix_kernels(load);
}

} // namespace

void refuse_device(const Gpu &gpu) {
    throw Error(
        DSOPT_ERR_MISSING,
        "CUDA device %d has compute capability %s, and this build has code for %s. A build from source has that "
        "of the Meson option device_archs, 7.5 or later",
        gpu.ordinal(), gpu.capability().c_str(), DSOPT_CUDA_CODE);
}

namespace {

class CudaKernels final : public DeviceKernels {
public:
    explicit CudaKernels(const Gpu &gpu) : gpu_(gpu), shared_(gpu) {
        const OnDevice on(gpu_);
        KernelLoader load(gpu_, shared_);
        load_kernels(load);
        shared_.early = load.ptx() >= 90;
    }
    size_t device_workspace_bytes(const StepShape &shape) const override { return gpu::device_workspace_bytes(shape); }
    std::unique_ptr<StepCache> make_cache() const override { return gpu::make_cache(gpu_); }
    void check_matrices() const override {
        const std::lock_guard lock(mutex_);
        if (!lt_) lt_ = std::make_unique<Lt>(gpu_);
    }
    MatrixSizes matrix_sizes(const MatrixBatch &batch, int) const override {
        return {gpu::matrix_workspace_bytes(batch), 0};
    }
    void run_step(const StepPlan &plan, FunctionRef<void(StepKernels &)> body) const override {
        Lt *const lt = plan.matrices != nullptr ? lt_.get() : nullptr; // else another thread may be setting it
        gpu::run_step(plan, lt, launcher_of(plan.execution.stream), body);
    }
    void for_elements(const ElementOp &op, const dsopt_tensor *x, const dsopt_tensor *y, int64_t count,
                      const Parallel &, void *stream) const override {
        gpu::for_elements(op, x, y, count, launcher_of(stream));
    }
    void norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, bool raw,
              dsopt_norm_result *result, const Parallel &, void *stream) const override {
        gpu::norm(list, count, kind, max_norm, raw, result, launcher_of(stream));
    }
    void run_in_one_thread(const OneThreadFunction &function, void *stream) const override {
        gpu::run_in_one_thread(function, launcher_of(stream));
    }
    void run_exchange(const Exchange &buffers, const dsopt_tensor *list, int64_t count, const Parallel &, void *stream,
                      FunctionRef<void(ExchangeKernels &)> body) const override {
        gpu::run_exchange(buffers, list, count, launcher_of(stream), body);
    }

private:
    Launcher launcher_of(void *stream) const { return {OnDevice(gpu_), shared_, static_cast<cudaStream_t>(stream)}; }

    const Gpu &gpu_;
    mutable Shared shared_;
    mutable std::mutex mutex_;
    mutable std::unique_ptr<Lt> lt_; // once an optimizer has matrices
};

class CudaDevice final : public Device {
public:
    explicit CudaDevice(int device) :
        Device("cuda", false, kernels_),
        gpu_(device),
        kernels_(gpu_),
        copy_stream_(gpu_.stream()) {}

    bool owns(const void *pointer) const override {
        const OnDevice on(gpu_);
        cudaPointerAttributes attributes{};
        if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
            (void)cudaGetLastError();
            return false;
        }
        if (attributes.type == cudaMemoryTypeUnregistered) return false;
        return attributes.type != cudaMemoryTypeDevice || attributes.device == gpu_.ordinal();
    }
    HostBuffer host_buffer(size_t bytes) const override { return gpu_.pinned_memory(bytes); }
    void *allocate(size_t bytes, void *stream) const override {
        const OnDevice on(gpu_);
        if (stream != nullptr && capturing(as_stream(stream)))
            throw Error(DSOPT_ERR_STATE,
                        "%zu bytes cannot be allocated while the stream is being captured: make this call once before",
                        bytes);
        return gpu_.device_memory(bytes).release();
    }
    void release(void *memory, size_t, void *) const noexcept override { FreedBy<cudaFree>{&gpu_}(memory); }

    void clear(void *data, size_t bytes, void *stream) const override {
        const OnDevice on(gpu_);
        if (bytes != 0) check(cudaMemsetAsync(data, 0, bytes, as_stream(stream)), "cudaMemsetAsync");
    }

    void *copy_stream() const override { return copy_stream_.get(); }
    void check_stream(void *stream) const override { gpu_.check_stream(as_stream(stream)); }
    std::shared_ptr<PendingWork> make_pending_work() const override { return std::make_shared<CudaPendingWork>(gpu_); }
    void enqueue_copy(void *to, const void *from, size_t bytes, void *stream) const override {
        const OnDevice on(gpu_);
        if (bytes != 0)
            check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, as_stream(stream)), "cudaMemcpyAsync");
    }
    bool finished(void *stream) const override {
        const OnDevice on(gpu_);
        if (capturing(as_stream(stream)))
            throw Error(DSOPT_ERR_STATE, "the host waits here: this call cannot be captured");
        return is_done(cudaStreamQuery(as_stream(stream)), "cudaStreamQuery");
    }
    void wait(void *stream) const override {
        const OnDevice on(gpu_);
        if (stream == nullptr) (void)capturing(nullptr); // throws if waiting would invalidate a capture
        check(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize");
    }
    void on_device(FunctionRef<void()> body) const override {
        const OnDevice on(gpu_);
        body();
    }

private:
    static cudaStream_t as_stream(void *stream) { return static_cast<cudaStream_t>(stream); }

    Gpu gpu_;
    CudaKernels kernels_;
    Stream copy_stream_;
};

std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// Returns the reason for cudaErrorInsufficientDriver: the driver is not there, or it is too old.
std::string driver_reason() {
    int driver = 0, runtime = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || cudaRuntimeGetVersion(&runtime) != cudaSuccess) driver = 0;
    const std::string needed = version_text(runtime / 1000 * 1000); // of any minor version
    if (driver == 0)                                                // seen for drivers of CUDA 11, too
        return "there is no CUDA driver (libcuda.so.1), or one before CUDA 12; this build needs one for CUDA " +
               needed + " or later";
    return "the driver is for CUDA " + version_text(driver) + ", and this build needs one for CUDA " + needed +
           " or later: update the driver, or build from source with a CUDA toolkit of the driver's version, 12.5 or "
           "later";
}

/// Returns the number of devices that can be used. If there are none, `reason` receives the reason.
int count_devices(std::string &reason) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0) return count;
    (void)cudaGetLastError();
    reason = error == cudaSuccess                   ? "the CUDA driver finds no device"
             : error == cudaErrorInsufficientDriver ? driver_reason()
                                                    : cudaGetErrorString(error);
    if (error == cudaErrorInitializationError)
        reason += " (a child of fork() cannot use CUDA if the parent has used it, for example in dsopt_build_info)";
    return 0;
}

} // namespace
} // namespace gpu

std::unique_ptr<Device> make_cuda_device(int device) {
    std::string reason;
    const int count = gpu::count_devices(reason);
    if (count == 0) throw Error(DSOPT_ERR_MISSING, "no CUDA device can be used here: %s", reason.c_str());
    if (device < 0 || device >= count)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_context_desc.device is %d, there are %d CUDA devices", device, count);
    return std::make_unique<gpu::CudaDevice>(device);
}

CudaInfo cuda_info() {
    CudaInfo info{"cuda", "", DSOPT_CUDA_CODE};
    const int count = gpu::count_devices(info.reason);
    if (count == 0) info.state = "no device";
    for (int i = 0; i < count; ++i) info.devices += (i > 0 ? ", \"" : "\"") + gpu::capability_of(i) + "\"";
    int driver = 0, runtime = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver != 0) info.driver = gpu::version_text(driver);
    if (cudaRuntimeGetVersion(&runtime) == cudaSuccess) info.runtime = gpu::version_text(runtime);
    return info;
}

} // namespace dsopt
