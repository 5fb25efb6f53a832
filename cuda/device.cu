// SPDX-License-Identifier: Apache-2.0
#include "device/backend.h"
#include "lists.cuh"
#include "pinned.h"
#include "step.cuh"
#include "upload.cuh"
#include <algorithm>
#include <cstring>
#include <string>

namespace dsopt {
namespace gpu {
namespace {

__global__ void update_scaler_kernel(const ScalerRules rules, ScalerState *state, float *scale,
                                     const int32_t *overflow) {
    scaler_transition(rules, *state, overflow != nullptr ? *overflow != 0 : state->recorded != 0);
    *scale = scale_in_use(*state);
}
__global__ void write_scaler_kernel(const ScalerState value, ScalerState *state, float *scale) {
    *state = value;
    *scale = scale_in_use(value);
}
__global__ void write_reduction_kernel(const ScheduleRules rules, const ScheduleState *schedule, int32_t *reduction) {
    *reduction = next_reduction_of(rules, schedule);
}

class CudaBackend final : public Backend {
public:
    explicit CudaBackend(int device) : device_(device) {
        const OnDevice on(device);
        int processors = 0;
        check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
        blocks_ = unsigned(processors) * 4;
        check(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    ~CudaBackend() override { (void)cudaStreamDestroy(own_stream_); }

    const char *name() const override { return "cuda"; }
    bool is_host() const override { return false; }
    bool owns(const void *pointer) const override {
        const OnDevice on(device_);
        cudaPointerAttributes attributes{};
        if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
            (void)cudaGetLastError();
            return false;
        }
        if (attributes.type == cudaMemoryTypeUnregistered) return false;
        return attributes.type != cudaMemoryTypeDevice || attributes.device == device_;
    }
    size_t extra_bytes(const StepShape &shape) const override { return Extra(shape).bytes; }
    std::unique_ptr<StepCache> make_cache() const override { return std::make_unique<Cache>(); }
    HostBuffer host_buffer(size_t bytes) const override {
        const OnDevice on(device_);
        return HostBuffer(pinned_memory(bytes).release(), PinnedFree());
    }
    void *allocate(size_t bytes, void *) const override {
        const OnDevice on(device_);
        return device_memory(bytes).release();
    }
    void release(void *memory, size_t, void *) const noexcept override {
        try {
            const OnDevice on(device_);
            (void)cudaFree(memory);
        } catch (const std::exception &) { // the device is lost, and the memory with it
        }
    }
    void run_step(const StepPlan &plan, FunctionRef<void(StepLoops &)> body) const override {
        const OnDevice on(device_);
        const Launcher launcher = this->launcher(plan.stream);
        Step step(plan, launcher);
        body(step);
    }
    void phase_times(StepCache *cache, double *ms) const override {
        if (cache == nullptr) return;
        const OnDevice on(device_);
        static_cast<const Cache *>(cache)->marks.times(ms);
    }

    void clear(void *data, size_t bytes, void *stream) const override {
        const OnDevice on(device_);
        if (bytes != 0) check(cudaMemsetAsync(data, 0, bytes, as_stream(stream)), "cudaMemsetAsync");
    }
    void zero(const dsopt_tensor *list, int64_t count, const Parallel &, void *stream) const override {
        run_list(list, nullptr, count, stream, [&](const DeviceList &device, unsigned blocks, cudaStream_t on) {
            return ::gpu::launch("zero", zero_kernel, blocks, kThreads, 0, on, device);
        });
    }
    void axpby(const Factor &a, const dsopt_tensor *x, float b, const dsopt_tensor *y, int64_t count, const Parallel &,
               void *stream) const override {
        if (count == 1) {
            if (x->data == nullptr || x->numel == 0 || y->data == nullptr) return;
            const OnDevice on(device_);
            const OnePair pair{*x, *y, {0, leaves_of(x->numel)}};
            check(::gpu::launch("axpby_one", axpby_one_kernel, blocks_for(pair.first_leaf[1]), kThreads, 0,
                                as_stream(stream), pair, a.data, a.value, b),
                  "axpby_one");
            return;
        }
        run_list(x, y, count, stream, [&](const DeviceList &device, unsigned blocks, cudaStream_t on) {
            return ::gpu::launch("axpby", axpby_kernel, blocks, kThreads, 0, on, device, a.data, a.value, b);
        });
    }
    void add_up_rows(const float *rows, int64_t stride, int count, int64_t n, float *y, const Parallel &,
                     void *stream) const override {
        const OnDevice on(device_);
        check(::gpu::launch("add_up_rows", add_up_rows_kernel, blocks_for(n / kThreads + 1), kThreads, 0,
                            as_stream(stream), rows, stride, count, n, y),
              "add_up_rows");
    }
    void clamp(const dsopt_tensor *list, int64_t count, float limit, const Parallel &, void *stream) const override {
        run_list(list, nullptr, count, stream, [&](const DeviceList &device, unsigned blocks, cudaStream_t on) {
            return ::gpu::launch("clamp", clamp_kernel, blocks, kThreads, 0, on, device, limit);
        });
    }
    void norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, bool raw,
              dsopt_norm_result *result, const Parallel &, void *stream) const override;
    void compress_feed(const ExchangeBuffers &exchange, const dsopt_tensor *list, int64_t count, const Parallel &,
                       void *stream) const override {
        const CompressLayout &layout = *exchange.layout;
        with_exchange(exchange, list, count, stream, [&](const DeviceExchange &x, const dsopt_tensor *tensors) {
            if (layout.has_levels()) {
                clear_gaps(x, launcher(stream));
                check(::gpu::launch("fill_message", fill_message_kernel, blocks_for(layout.whole->part_leaf.back()),
                                    kThreads, 0, as_stream(stream), x, tensors),
                      "fill_message");
                return;
            }
            clear_rows(x.send, layout.row_bytes() * layout.ranks, as_stream(stream));
            check(::gpu::launch("feed_list", feed_list_kernel, blocks_for(layout.part_leaf.back()), kThreads, 0,
                                as_stream(stream), x, tensors),
                  "feed_list");
            end_rows(x, launcher(stream));
        });
    }
    void compress_slice(const ExchangeBuffers &exchange, const Parallel &, void *stream) const override {
        with_exchange(exchange, nullptr, 0, stream, [&](const DeviceExchange &x, const dsopt_tensor *) {
            pack_slice(*exchange.layout, x, launcher(stream));
        });
    }
    void compress_serve(const ExchangeBuffers &exchange, const Parallel &, void *stream) const override {
        with_exchange(exchange, nullptr, 0, stream, [&](const DeviceExchange &x, const dsopt_tensor *) {
            serve_rows(*exchange.layout, x, launcher(stream));
        });
    }
    void compress_decode(const ExchangeBuffers &exchange, const dsopt_tensor *list, int64_t count, const Parallel &,
                         void *stream) const override {
        with_exchange(exchange, list, count, stream, [&](const DeviceExchange &x, const dsopt_tensor *tensors) {
            check(::gpu::launch("decode", decode_kernel, blocks_for(exchange.layout->all().part_leaf.back()), kThreads,
                                0, as_stream(stream), x, tensors),
                  "decode");
        });
    }
    void update_scaler(const ScalerRules &rules, ScalerState *state, float *scale, const int32_t *overflow,
                       void *stream) const override {
        const OnDevice on(device_);
        check(::gpu::launch("update_scaler", update_scaler_kernel, 1, 1, 0, as_stream(stream), rules, state, scale,
                            overflow),
              "update_scaler");
    }
    void write_scaler(const ScalerState &value, ScalerState *state, float *scale, void *stream) const override {
        const OnDevice on(device_);
        check(::gpu::launch("write_scaler", write_scaler_kernel, 1, 1, 0, as_stream(stream), value, state, scale),
              "write_scaler");
    }
    void write_reduction(const ScheduleRules &rules, const ScheduleState *schedule, int32_t *reduction,
                         void *stream) const override {
        const OnDevice on(device_);
        check(::gpu::launch("write_reduction", write_reduction_kernel, 1, 1, 0, as_stream(stream), rules, schedule,
                            reduction),
              "write_reduction");
    }

    // These serve calls in which the host asks, and may wait: after everything on the device, on a stream of their own.
    void copy(void *to, const void *from, size_t bytes, void *) const override {
        wait_copy(to, from, bytes, cudaMemcpyDeviceToDevice);
    }
    void copy_to_host(void *host, const void *from, size_t bytes, void *) const override {
        wait_copy(host, from, bytes, cudaMemcpyDeviceToHost);
    }
    void copy_from_host(void *to, const void *host, size_t bytes, void *) const override {
        wait_copy(to, host, bytes, cudaMemcpyHostToDevice);
    }
    std::unique_ptr<HostReader> reader() const override { return std::make_unique<PinnedReader>(device_); }
    std::unique_ptr<HostWriter> writer() const override { return std::make_unique<PinnedWriter>(device_); }
    void synchronize(void *) const override {
        const OnDevice on(device_);
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    void enqueue_copy(void *to, const void *from, size_t bytes, void *stream) const override {
        const OnDevice on(device_);
        if (bytes != 0)
            check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, as_stream(stream)), "cudaMemcpyAsync");
    }
    bool finished(void *stream) const override {
        const OnDevice on(device_);
        if (capturing(as_stream(stream)))
            throw Error(DSOPT_ERR_STATE, "the host waits here: this call cannot be captured");
        const cudaError_t error = cudaStreamQuery(as_stream(stream));
        if (error == cudaErrorNotReady) {
            (void)cudaGetLastError(); // "not ready" is no error
            return false;
        }
        check(error, "cudaStreamQuery");
        return true;
    }
    void wait(void *stream) const override {
        const OnDevice on(device_);
        check(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize");
    }
    int device() const override { return device_; }
    void on_device(void (*body)(void *), void *argument) const override {
        const OnDevice on(device_);
        body(argument);
    }

private:
    static cudaStream_t as_stream(void *stream) { return static_cast<cudaStream_t>(stream); }
    Launcher launcher(void *stream) const { return {blocks_, as_stream(stream), pool_}; }
    unsigned blocks_for(int64_t pieces) const { return launcher(nullptr).blocks_for(pieces); }

    void wait_copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) const {
        if (bytes == 0) return;
        const OnDevice on(device_);
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        check(cudaMemcpyAsync(to, from, bytes, kind, own_stream_), "cudaMemcpyAsync");
        check(cudaStreamSynchronize(own_stream_), "cudaStreamSynchronize");
    }

    template <class Body>
    void with_exchange(const ExchangeBuffers &exchange, const dsopt_tensor *list, int64_t count, void *stream,
                       const Body &body) const;
    template <class Launch>
    void run_list(const dsopt_tensor *x, const dsopt_tensor *y, int64_t count, void *stream,
                  const Launch &launch) const;

    int device_;
    unsigned blocks_ = 1;
    cudaStream_t own_stream_ = nullptr;
    mutable PinnedPool pool_;
};

/// body(exchange, list) with everything in device memory: in a step the layout is there, otherwise it lives as long as
/// the launch.
template <class Body>
void CudaBackend::with_exchange(const ExchangeBuffers &exchange, const dsopt_tensor *list, int64_t count, void *where,
                                const Body &body) const {
    const OnDevice on(device_);
    if (exchange.table != nullptr) return body(device_exchange(exchange, exchange.table), nullptr);
    const auto stream = as_stream(where);
    const size_t layout = LayoutImage::bytes(*exchange.layout);
    std::vector<char> image(layout + round_up(size_t(count) * sizeof(dsopt_tensor)));
    LayoutImage::write(*exchange.layout, image.data());
    if (count != 0) std::memcpy(image.data() + layout, list, size_t(count) * sizeof(dsopt_tensor));
    void *memory = nullptr;
    check(cudaMallocAsync(&memory, image.size(), stream), "cudaMallocAsync");
    try {
        upload(memory, image.data(), image.size(), pool_, stream);
        body(device_exchange(exchange, memory),
             reinterpret_cast<const dsopt_tensor *>(static_cast<const char *>(memory) + layout));
    } catch (...) {
        (void)cudaFreeAsync(memory, stream);
        throw;
    }
    check(cudaFreeAsync(memory, stream), "cudaFreeAsync");
}

/// A list that nobody keeps: its table lives as long as the launch.
template <class Launch>
void CudaBackend::run_list(const dsopt_tensor *x, const dsopt_tensor *y, int64_t count, void *where,
                           const Launch &launch) const {
    const OnDevice on(device_);
    const auto stream = as_stream(where);
    std::vector<dsopt_tensor> xs, ys;
    std::vector<int64_t> first{0};
    for (int64_t i = 0; i < count; ++i) {
        const bool counts = x[i].data != nullptr && (y == nullptr || y[i].data != nullptr);
        xs.push_back(x[i]);
        if (y != nullptr) ys.push_back(y[i]);
        first.push_back(first.back() + (counts ? leaves_of(x[i].numel) : 0));
    }
    if (first.back() == 0) return;
    std::vector<char> image(round_up(xs.size() * sizeof(dsopt_tensor)) * (y != nullptr ? 2 : 1) +
                            round_up(first.size() * 8));
    const size_t ys_at = round_up(xs.size() * sizeof(dsopt_tensor)), first_at = ys_at * (y != nullptr ? 2 : 1);
    std::memcpy(image.data(), xs.data(), xs.size() * sizeof(dsopt_tensor));
    if (y != nullptr) std::memcpy(image.data() + ys_at, ys.data(), ys.size() * sizeof(dsopt_tensor));
    std::memcpy(image.data() + first_at, first.data(), first.size() * 8);
    void *memory = nullptr;
    check(cudaMallocAsync(&memory, image.size(), stream), "cudaMallocAsync");
    try {
        upload(memory, image.data(), image.size(), pool_, stream);
        const char *base = static_cast<const char *>(memory);
        const DeviceList list{reinterpret_cast<const dsopt_tensor *>(base),
                              reinterpret_cast<const dsopt_tensor *>(base + ys_at),
                              reinterpret_cast<const int64_t *>(base + first_at), int64_t(xs.size()), first.back()};
        check(launch(list, blocks_for(first.back()), stream), "list");
    } catch (...) {
        (void)cudaFreeAsync(memory, stream);
        throw;
    }
    check(cudaFreeAsync(memory, stream), "cudaFreeAsync");
}

void CudaBackend::norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, bool raw,
                       dsopt_norm_result *result, const Parallel &, void *where) const {
    const OnDevice on(device_);
    const auto stream = as_stream(where);
    int64_t leaves = 0;
    for (int64_t i = 0; i < count; ++i)
        if (list[i].data != nullptr) leaves += leaves_of(list[i].numel);
    const size_t squares = 0, bad = round_up(size_t(leaves) * 8), largest = bad * 2,
                 sums = largest + round_up(size_t(leaves) * 4), ticket = sums + round_up(size_t(count) * 8);
    void *memory = nullptr;
    check(cudaMallocAsync(&memory, ticket + kLine, stream), "cudaMallocAsync");
    char *base = static_cast<char *>(memory);
    const NormParts parts{reinterpret_cast<double *>(base + squares), reinterpret_cast<int64_t *>(base + bad),
                          reinterpret_cast<float *>(base + largest), reinterpret_cast<double *>(base + sums),
                          reinterpret_cast<uint32_t *>(base + ticket)};
    try {
        check(cudaMemsetAsync(parts.ticket, 0, kLine, stream), "cudaMemsetAsync");
        // An empty list has a norm too, so there is always a launch.
        check(::gpu::launch("no_norm", no_norm_kernel, 1, 1, 0, stream, result), "norm");
        run_list(list, nullptr, count, where, [&](const DeviceList &device, unsigned blocks, cudaStream_t stream_) {
            return ::gpu::launch("norm", norm_kernel, blocks, kThreads, 0, stream_, device, parts, kind, raw, max_norm,
                                 result);
        });
    } catch (...) {
        (void)cudaFreeAsync(memory, stream);
        throw;
    }
    check(cudaFreeAsync(memory, stream), "cudaFreeAsync");
}

/// Devices that can be used, or why there are none.
int count_devices(std::string &reason) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0) return count;
    (void)cudaGetLastError();
    reason = error == cudaSuccess ? "there is no CUDA device" : cudaGetErrorString(error);
    return 0;
}

} // namespace
} // namespace gpu

std::unique_ptr<Backend> make_cuda_backend(int device) {
    std::string reason;
    const int count = gpu::count_devices(reason);
    if (count == 0) throw Error(DSOPT_ERR_MISSING, "no CUDA device can be used here: %s", reason.c_str());
    if (device < 0 || device >= count)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_context_desc.device is %d, there are %d CUDA devices", device, count);
    return std::make_unique<gpu::CudaBackend>(device);
}

const char *cuda_state() {
    std::string reason;
    return gpu::count_devices(reason) > 0 ? "cuda" : "no device";
}

} // namespace dsopt
