// SPDX-License-Identifier: Apache-2.0
// The loops of a CUDA device as the engine calls them: tables are uploaded, kernels launched.
#pragma once
#include "step.cuh"
#include <algorithm>
#include <climits>

namespace dsopt::gpu {

template <class Function> __global__ void one_thread_kernel(const Function function) {
    begin_kernel();
    function();
}

/// Memory of a list's norm: the list, which is uploaded, and what leaves and tensors leave.
struct NormMemory {
    int64_t *first_leaf;
    dsopt_tensor *tensors;
    NormParts parts;
    size_t image, bytes;

    /// `memory` NULL: only to know the bytes.
    NormMemory(void *memory, int64_t count, int64_t leaves) {
        Pieces pieces(memory);
        pieces.take(first_leaf, count + 1);
        pieces.take(tensors, count);
        image = pieces.bytes();
        pieces.take(parts.squares, leaves);
        pieces.take(parts.bad, leaves);
        pieces.take(parts.largest, leaves);
        pieces.take(parts.sums, count);
        pieces.take(parts.ticket, 1);
        bytes = pieces.bytes();
    }
};

/// Every kernel.
template <class Visit> void for_kernels(const Visit &visit) {
    for (const auto kernel : kFeedKernels) visit(kernel);
    for (const auto kernel : kFinishKernels)
        if (kernel != nullptr) visit(kernel);
    const auto all = [&](auto... kernels) { (visit(kernels), ...); };
    all(put_kernel, patch_kernel, map_kernel, inspect_kernel, move_norms_kernel, decide_kernel, update_kernel,
        shared_trust_kernel, update_weights_kernel);
    all(zero_kernel<kFewTensors>, zero_kernel<kManyTensors>, axpby_kernel<kFewTensors>, axpby_kernel<kManyTensors>,
        clamp_kernel<kFewTensors>, clamp_kernel<kManyTensors>, add_up_rows_kernel, no_norm_kernel, norm_kernel,
        one_thread_kernel<UpdateScaler>, one_thread_kernel<WriteScaler>, one_thread_kernel<WriteReduction>);
    all(pack_kernel, feed_list_kernel, message_scales_kernel, serve_kernel, result_scales_kernel, decode_kernel,
        clear_gaps_kernel, copy_list_kernel, feed_slice_kernel, mean_slice_kernel);
    all(begin_onebit_kernel, momentum_squares_kernel, momentum_scaling_kernel, feed_padding_kernel, take_padding_kernel,
        keep_results_kernel, local_kernel, onebit_lamb_moments_kernel, onebit_trust_kernel, onebit_shared_trust_kernel,
        onebit_lamb_weights_kernel, find_active_kernel, freeze_kernel, end_onebit_kernel);
}

class CudaLoops final : public Loops {
public:
    /// Loads every kernel now: at its first launch the driver may wait for everything on the device, and so for other
    /// ranks that wait for this one.
    explicit CudaLoops(const Gpu &gpu) : gpu_(gpu), shared_(gpu) {
        const OnDevice on(gpu_);
        int ptx = INT_MAX;
        for_kernels([&](auto kernel) {
            cudaFuncAttributes attributes;
            const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
            if (error != cudaErrorNoKernelImageForDevice) {
                check(error, "cudaFuncGetAttributes");
                // Asked now for each size of dynamic shared memory: a step allocates nothing to remember it.
                for (const size_t tiles : {0, 1, 2}) (void)shared_.resident_blocks(kernel, tiles * kTileBytes);
                ptx = std::min(ptx, attributes.ptxVersion);
                return;
            }
            (void)cudaGetLastError();
            throw Error(DSOPT_ERR_MISSING,
                        "this build has no code for CUDA device %d: see the Meson option device_archs", gpu_.ordinal());
        });
        // Not the capability of the device: the driver may have compiled PTX of an older one for it.
        shared_.early = ptx >= 90;
    }
    size_t extra_bytes(const StepShape &shape) const override { return Extra(nullptr, shape).bytes; }
    std::unique_ptr<StepCache> make_cache() const override { return std::make_unique<Cache>(gpu_); }
    void run_step(const StepPlan &plan, FunctionRef<void(StepLoops &)> body) const override {
        const Launcher launcher = launcher_of(plan.how.stream);
        Step step(plan, launcher);
        body(step);
    }
    void zero(const dsopt_tensor *list, int64_t count, const Parallel &, void *stream) const override {
        in_batches(list, list, count, stream, []<int N>(const Launcher &launcher, const ListBatch<N> &batch) {
            launcher.over(batch.leaves(), "zero", zero_kernel<N>, batch);
        });
    }
    void axpby(const Factor &a, const dsopt_tensor *x, float b, const dsopt_tensor *y, int64_t count, const Parallel &,
               void *stream) const override {
        in_batches(x, y, count, stream, [&]<int N>(const Launcher &launcher, const ListBatch<N> &batch) {
            launcher.over(batch.leaves(), "axpby", axpby_kernel<N>, batch, a.data, a.value, b);
        });
    }
    void add_up_rows(const float *rows, int64_t stride, int count, int64_t n, float *y, const Parallel &,
                     void *stream) const override {
        launcher_of(stream).over(n / kThreads + 1, "add_up_rows", add_up_rows_kernel, rows, stride, count, n, y);
    }
    void clamp(const dsopt_tensor *list, int64_t count, float limit, const Parallel &, void *stream) const override {
        in_batches(list, list, count, stream, [&]<int N>(const Launcher &launcher, const ListBatch<N> &batch) {
            launcher.over(batch.leaves(), "clamp", clamp_kernel<N>, batch, limit);
        });
    }
    void norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, bool raw,
              dsopt_norm_result *result, const Parallel &, void *stream) const override {
        // An empty list has a norm too.
        launcher_of(stream).thread("no_norm", no_norm_kernel, result);
        int64_t leaves = 0;
        for (int64_t i = 0; i < count; ++i) leaves += list[i].data != nullptr ? leaves_of(list[i].numel) : 0;
        if (leaves == 0) return;
        const Launcher launcher = launcher_of(stream);
        const size_t bytes = NormMemory(nullptr, count, leaves).bytes;
        const Scratch scratch(shared_.scratch, bytes, launcher.stream);
        const NormMemory memory(scratch.get(), count, leaves);
        launcher.upload(scratch.get(), memory.image, [&](char *to) {
            const NormMemory image(to, count, leaves);
            for (int64_t i = 0; i < count; ++i)
                image.first_leaf[i + 1] =
                    image.first_leaf[i] + (list[i].data != nullptr ? leaves_of(list[i].numel) : 0);
            std::memcpy(image.tensors, list, size_t(count) * sizeof *list);
        });
        const DeviceList there{memory.tensors, memory.first_leaf, count, leaves};
        const NormParts &parts = memory.parts;
        launcher.fill(parts.ticket, 0, sizeof *parts.ticket);
        launcher.over(leaves / kWarps + 1, "norm", norm_kernel, there, parts, kind, raw, max_norm, result);
    }
    void run_in_one_thread(const OneThreadFunction &function, void *stream) const override {
        std::visit(
            [&]<class Function>(const Function &call) {
                launcher_of(stream).thread(Function::name, one_thread_kernel<Function>, call);
            },
            function);
    }
    void run_exchange(const Exchange &buffers, const dsopt_tensor *list, int64_t count, const Parallel &, void *stream,
                      FunctionRef<void(ExchangeLoops &)> body) const override {
        class Run final : public ExchangeLoops {
        public:
            explicit Run(const ExchangeRun &run) : run_(run) {}
            void run(ExchangePass pass) override { run_.run(pass); }

        private:
            const ExchangeRun run_;
        };
        const Launcher launcher = launcher_of(stream);
        const size_t layout = buffers.layout->bytes, tensors = size_t(count) * sizeof(dsopt_tensor);
        const Scratch memory(shared_.scratch, layout + tensors, launcher.stream); // as long as the work
        launcher.upload(memory.get(), layout + tensors, [&](char *to) {
            std::memcpy(to, buffers.layout->block.get(), layout);
            if (count != 0) std::memcpy(to + layout, list, tensors);
        });
        const auto *const there = reinterpret_cast<const dsopt_tensor *>(memory.get() + layout);
        Run loops({launcher, buffers.on_device(memory.get(), nullptr), there});
        body(loops);
    }

private:
    Launcher launcher_of(void *stream) const { return {OnDevice(gpu_), shared_, static_cast<cudaStream_t>(stream)}; }
    /// launch(launcher, batch) for the tensors that have data in both lists, as many at once as arguments hold.
    template <class Launch>
    void in_batches(const dsopt_tensor *x, const dsopt_tensor *y, int64_t count, void *stream,
                    const Launch &launch) const {
        if (count <= kFewTensors) return in_batches_of<kFewTensors>(x, y, count, stream, launch);
        in_batches_of<kManyTensors>(x, y, count, stream, launch);
    }
    template <int N, class Launch>
    void in_batches_of(const dsopt_tensor *x, const dsopt_tensor *y, int64_t count, void *stream,
                       const Launch &launch) const {
        const Launcher launcher = launcher_of(stream);
        ListBatch<N> batch;
        batch.count = 0;
        batch.first_leaf[0] = 0;
        const auto flush = [&] {
            if (batch.count != 0) launch(launcher, batch);
            batch.count = 0;
        };
        for (int64_t i = 0; i < count; ++i) {
            if (x[i].data == nullptr || y[i].data == nullptr || x[i].numel == 0) continue;
            const int32_t at = batch.count++;
            batch.first_leaf[at + 1] = batch.first_leaf[at] + leaves_of(x[i].numel);
            batch.x[at] = x[i].data;
            batch.y[at] = y[i].data;
            batch.numel[at] = x[i].numel;
            batch.x_type[at] = Dtype(x[i].dtype);
            batch.y_type[at] = Dtype(y[i].dtype);
            if (batch.count == N) flush();
        }
        flush();
    }

    const Gpu &gpu_;
    mutable Shared shared_;
};

} // namespace dsopt::gpu
