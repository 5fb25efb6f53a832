// SPDX-License-Identifier: Apache-2.0
// The loops of a CUDA device as the engine calls them: tables are uploaded, kernels launched.
#pragma once
#include "lists.cuh"
#include "step.cuh"
#include "upload.cuh"
#include <algorithm>
#include <cstring>

namespace dsopt::gpu {

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

class CudaLoops final : public Loops {
public:
    explicit CudaLoops(int device) : device_(device) {
        const OnDevice on(device);
        int processors = 0;
        check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
        multiprocessors_ = unsigned(processors);
    }
    size_t extra_bytes(const StepShape &shape) const override { return Extra(shape).bytes; }
    std::unique_ptr<StepCache> make_cache() const override { return std::make_unique<Cache>(device_); }
    void run_step(const StepPlan &plan, FunctionRef<void(StepLoops &)> body) const override {
        const OnDevice on(device_);
        const Launcher launcher = this->launcher(plan.how.stream);
        Step step(plan, launcher);
        body(step);
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

private:
    static cudaStream_t as_stream(void *stream) { return static_cast<cudaStream_t>(stream); }
    Launcher launcher(void *stream) const { return {multiprocessors_, as_stream(stream), pool_}; }
    unsigned blocks_for(int64_t pieces) const { return launcher(nullptr).blocks_for(pieces); }
    template <class Body>
    void with_exchange(const ExchangeBuffers &exchange, const dsopt_tensor *list, int64_t count, void *stream,
                       const Body &body) const;
    template <class Launch>
    void run_list(const dsopt_tensor *x, const dsopt_tensor *y, int64_t count, void *stream,
                  const Launch &launch) const;

    int device_;
    unsigned multiprocessors_ = 1;
    mutable PinnedPool pool_;
};

/// body(exchange, list) with everything in device memory: in a step the layout is there, otherwise it lives as long as
/// the launch.
template <class Body>
void CudaLoops::with_exchange(const ExchangeBuffers &exchange, const dsopt_tensor *list, int64_t count, void *where,
                              const Body &body) const {
    const OnDevice on(device_);
    if (exchange.table != nullptr) return body(device_exchange(exchange, exchange.table), nullptr);
    const auto stream = as_stream(where);
    const size_t layout = LayoutImage::bytes(*exchange.layout);
    std::vector<char> image(layout + round_up(size_t(count) * sizeof(dsopt_tensor)));
    LayoutImage::write(*exchange.layout, image.data());
    if (count != 0) std::memcpy(image.data() + layout, list, size_t(count) * sizeof(dsopt_tensor));
    AsyncMemory memory(image.size(), stream);
    upload(memory.get(), image.data(), image.size(), pool_, stream);
    body(device_exchange(exchange, memory.get()),
         reinterpret_cast<const dsopt_tensor *>(static_cast<const char *>(memory.get()) + layout));
    memory.release();
}

/// A list that nobody keeps: its table lives as long as the launch.
template <class Launch>
void CudaLoops::run_list(const dsopt_tensor *x, const dsopt_tensor *y, int64_t count, void *where,
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
    AsyncMemory memory(image.size(), stream);
    upload(memory.get(), image.data(), image.size(), pool_, stream);
    const char *base = static_cast<const char *>(memory.get());
    const DeviceList list{reinterpret_cast<const dsopt_tensor *>(base),
                          reinterpret_cast<const dsopt_tensor *>(base + ys_at),
                          reinterpret_cast<const int64_t *>(base + first_at), int64_t(xs.size()), first.back()};
    check(launch(list, blocks_for(first.back()), stream), "list");
    memory.release();
}

inline void CudaLoops::norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, bool raw,
                            dsopt_norm_result *result, const Parallel &, void *where) const {
    const OnDevice on(device_);
    const auto stream = as_stream(where);
    int64_t leaves = 0;
    for (int64_t i = 0; i < count; ++i)
        if (list[i].data != nullptr) leaves += leaves_of(list[i].numel);
    const size_t squares = 0, bad = round_up(size_t(leaves) * 8), largest = bad * 2,
                 sums = largest + round_up(size_t(leaves) * 4), ticket = sums + round_up(size_t(count) * 8);
    AsyncMemory memory(ticket + kLine, stream);
    char *base = static_cast<char *>(memory.get());
    const NormParts parts{reinterpret_cast<double *>(base + squares), reinterpret_cast<int64_t *>(base + bad),
                          reinterpret_cast<float *>(base + largest), reinterpret_cast<double *>(base + sums),
                          reinterpret_cast<uint32_t *>(base + ticket)};
    check(cudaMemsetAsync(parts.ticket, 0, kLine, stream), "cudaMemsetAsync");
    // An empty list has a norm too, so there is always a launch.
    check(::gpu::launch("no_norm", no_norm_kernel, 1, 1, 0, stream, result), "norm");
    run_list(list, nullptr, count, where, [&](const DeviceList &device, unsigned blocks, cudaStream_t stream_) {
        return ::gpu::launch("norm", norm_kernel, blocks, kThreads, 0, stream_, device, parts, kind, raw, max_norm,
                             result);
    });
    memory.release();
}

} // namespace dsopt::gpu
