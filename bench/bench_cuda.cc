// SPDX-License-Identifier: Apache-2.0
// Steps on a GPU beside a copy on the device that moves as many bytes, timed by events on the stream:
//   BM_Copy/B        B bytes an element, half of them read and half written: what the step's traffic costs at best
//   BM_Fp32          AdamW on fp32 weights, 28 bytes an element
//   BM_Mixed         16-bit gradients and weights, fp32 masters, loss scale, norm and clipping: 30 bytes
//   BM_MixedUpdate   the second pass of that alone: 28 bytes
//   BM_Lamb          LAMB on fp32 weights: 40 bytes
// and what one of 8 ranks does by itself with one bit an element, on fp32 weights, its collectives doing nothing:
//   BM_Compressed         dsopt_compressed_allreduce: 12 of the worker (value, kept sum in and out), 1 of the server,
//                         4 decoded, bits: 17
//   BM_OnebitAdam         a step that exchanges: worker 16 (gradient and momentum in place of the value), server 1,
//                         update 16 (weight, variance, momentum): 33
//   BM_OnebitAdam/bits    the same with MOMENTUM_BITS: 25
//   BM_ZeroOneAdam/local  0/1 Adam between exchanges: gradient, variance, momentum and weight: 24
//   BM_OnebitLamb         worker 16, server 1, moments 24 (the fresh variance too), weights 16: 57
// With a data comm every step waits for the device once, also a local one: whether a gradient is bad goes through the
// host. That is in these times, and in host_us.
// Each row's data is several times the last-level cache of any GPU so far, so nothing has to be flushed in between.
#include "bench_util.h"
#include <algorithm>
#include <benchmark/benchmark.h>
#include <chrono>
#include <cuda_runtime.h>

namespace {

using bench::check;

constexpr int kSteps = 10; // between two events: the queue stays filled, as in training
constexpr int kRanks = 8;

void check_cuda(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "bench_cuda: %s\n", cudaGetErrorString(error));
    std::exit(1);
}

/// Device memory with a pattern in it: `word`, with the low bits of its two halves stirred.
class DeviceMemory {
public:
    DeviceMemory(size_t bytes, uint32_t word) {
        check_cuda(cudaMalloc(&data_, bytes));
        std::vector<uint32_t> pattern(size_t(1) << 20);
        for (size_t i = 0; i < pattern.size(); ++i) pattern[i] = word ^ uint32_t(i * 2654435761u & 0x003f003fu);
        for (size_t at = 0; at < bytes; at += pattern.size() * 4) {
            const size_t rest = bytes - at;
            check_cuda(cudaMemcpy(static_cast<char *>(data_) + at, pattern.data(), std::min(rest, pattern.size() * 4),
                                  cudaMemcpyHostToDevice));
        }
    }
    ~DeviceMemory() { (void)cudaFree(data_); }
    DeviceMemory(const DeviceMemory &) = delete;
    DeviceMemory &operator=(const DeviceMemory &) = delete;
    char *data() const { return static_cast<char *>(data_); }

private:
    void *data_ = nullptr;
};

/// A list over one block: tensors lie one behind the other, each on a 256-byte line, as frameworks allocate them.
struct DeviceList {
    DeviceMemory memory;
    std::vector<dsopt_tensor> tensors;
    DeviceList(const std::vector<int64_t> &sizes, int32_t dtype, uint32_t word) : memory(bytes(sizes, dtype), word) {
        size_t at = 0;
        for (const int64_t n : sizes) {
            tensors.push_back({memory.data() + at, n, dtype, 0});
            at += rounded(n, dtype);
        }
    }
    static size_t rounded(int64_t n, int32_t dtype) {
        return (size_t(n) * (dtype == DSOPT_DTYPE_F32 ? 4 : 2) + 255) / 256 * 256;
    }
    static size_t bytes(const std::vector<int64_t> &sizes, int32_t dtype) {
        size_t sum = 256;
        for (const int64_t n : sizes) sum += rounded(n, dtype);
        return sum;
    }
};

/// Bits of two 16-bit numbers, or of one float, of about 1e-3.
uint32_t small(int32_t dtype) {
    return dtype == DSOPT_DTYPE_F32 ? 0x3a800000u : dtype == DSOPT_DTYPE_F16 ? 0x14001400u : 0x3a803a80u;
}

struct Trainer {
    std::vector<int64_t> sizes;
    DeviceList params, grads;
    dsopt_context *context = nullptr;
    dsopt_scaler *scaler = nullptr;
    dsopt_comm *comm = nullptr;
    dsopt_optimizer *optimizer = nullptr;

    /// `idle`: one of kRanks.
    Trainer(const std::string &list, int32_t algorithm, int32_t dtype, bool clip, bool idle = false,
            uint32_t flags = 0) :
        sizes(bench::shapes(list)),
        params(sizes, dtype, small(dtype)),
        grads(sizes, dtype, small(dtype)) {
        DSOPT_NEW(dsopt_context_desc, where);
        where.backend = DSOPT_BACKEND_CUDA;
        check(dsopt_context_create(&where, &context));
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.flags = flags;
        if (idle) desc.data = comm = bench::idle_comm(context, kRanks);
        if (clip) {
            DSOPT_NEW(dsopt_scaler_desc, how);
            how.init = 1024;
            check(dsopt_scaler_create(context, &how, &scaler));
            desc.scaler = scaler;
            desc.max_norm = 1.0;
        }
        check(dsopt_optimizer_create(context, &desc, &optimizer));
        std::vector<dsopt_param> entries(sizes.size());
        for (size_t i = 0; i < entries.size(); ++i) entries[i].tensor = params.tensors[i];
        dsopt_group group;
        check(dsopt_group_init(&group, sizeof group, algorithm));
        group.weight_decay = 0.01;
        if (idle) group.freeze_step = 1;
        if (algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) { // all steps from the fifth on are local
            group.local_interval_steps = 1;
            group.max_local_interval = int64_t(1) << 30;
        }
        check(dsopt_optimizer_add_group(optimizer, &group, entries.data(), int64_t(entries.size())));
    }
    ~Trainer() {
        dsopt_optimizer_destroy(optimizer);
        dsopt_comm_destroy(comm);
        dsopt_scaler_destroy(scaler);
        dsopt_context_destroy(context);
    }
};

/// Times body(stream), put kSteps times into a stream.
template <class Body> void time(benchmark::State &state, int64_t numel, int bytes, const Body &body) {
    cudaStream_t stream;
    cudaEvent_t begin, end;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check_cuda(cudaEventCreate(&begin));
    check_cuda(cudaEventCreate(&end));
    for (int i = 0; i < 2; ++i) body(stream);
    check_cuda(cudaStreamSynchronize(stream));
    double host = 0;
    for (auto _ : state) {
        check_cuda(cudaEventRecord(begin, stream));
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < kSteps; ++i) body(stream);
        host += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        check_cuda(cudaEventRecord(end, stream));
        check_cuda(cudaEventSynchronize(end));
        float ms = 0;
        check_cuda(cudaEventElapsedTime(&ms, begin, end));
        state.SetIterationTime(double(ms) / 1e3 / kSteps);
    }
    state.SetBytesProcessed(state.iterations() * numel * bytes);
    state.counters["host_us"] = host / double(state.iterations()) / kSteps * 1e6; // of one call
    check_cuda(cudaEventDestroy(begin));
    check_cuda(cudaEventDestroy(end));
    check_cuda(cudaStreamDestroy(stream));
}

void BM_Copy(benchmark::State &state, const std::string &list, int bytes) {
    const int64_t numel = bench::total(bench::shapes(list));
    const size_t half = size_t(numel) * size_t(bytes) / 2;
    const DeviceMemory from(half, small(DSOPT_DTYPE_F32)), to(half, 0);
    time(state, numel, bytes, [&](cudaStream_t stream) {
        check_cuda(cudaMemcpyAsync(to.data(), from.data(), half, cudaMemcpyDeviceToDevice, stream));
    });
}

void BM_Step(benchmark::State &state, const std::string &list, int32_t algorithm, int32_t dtype, bool clip, int bytes) {
    const Trainer trainer(list, algorithm, dtype, clip);
    DSOPT_NEW(dsopt_step, step);
    step.grads = trainer.grads.tensors.data();
    step.count = int64_t(trainer.grads.tensors.size());
    time(state, bench::total(trainer.sizes), bytes, [&](cudaStream_t stream) {
        step.stream = stream;
        check(dsopt_optimizer_step(trainer.optimizer, &step));
    });
    DSOPT_NEW(dsopt_report, report);
    check(dsopt_optimizer_report(trainer.optimizer, &report));
    if (report.skipped != 0) state.SkipWithError("steps were skipped: nothing was timed");
}

/// `reduction`: of all steps that are timed.
void BM_OneBit(benchmark::State &state, const std::string &list, int32_t algorithm, uint32_t flags, int32_t reduction,
               int bytes) {
    const Trainer trainer(list, algorithm, DSOPT_DTYPE_F32, false, true, flags);
    DSOPT_NEW(dsopt_step, step);
    step.grads = trainer.grads.tensors.data();
    step.count = int64_t(trainer.grads.tensors.size());
    for (int i = 0; i < 4; ++i) check(dsopt_optimizer_step(trainer.optimizer, &step));
    check_cuda(cudaStreamSynchronize(nullptr));
    const auto check_reduction = [&] {
        int32_t next = -1;
        check(dsopt_optimizer_next_reduction(trainer.optimizer, 0, &next));
        if (next != reduction) state.SkipWithError("the steps are of another stage");
    };
    check_reduction();
    time(state, bench::total(trainer.sizes), bytes, [&](cudaStream_t stream) {
        step.stream = stream;
        check(dsopt_optimizer_step(trainer.optimizer, &step));
    });
    check_reduction();
}

void BM_Compressed(benchmark::State &state, const std::string &list, int bytes) {
    const std::vector<int64_t> sizes = bench::shapes(list);
    const DeviceList values(sizes, DSOPT_DTYPE_F32, small(DSOPT_DTYPE_F32));
    DSOPT_NEW(dsopt_context_desc, where);
    where.backend = DSOPT_BACKEND_CUDA;
    dsopt_context *context = nullptr;
    check(dsopt_context_create(&where, &context));
    dsopt_comm *const comm = bench::idle_comm(context, kRanks);
    DSOPT_NEW(dsopt_compressed, args);
    args.tensors = values.tensors.data();
    args.count = int64_t(values.tensors.size());
    int64_t worker = 0, server = 0;
    check(dsopt_compressed_sizes(comm, &args, &worker, &server, &args.workspace_bytes));
    const DeviceMemory kept(size_t(worker + server) * sizeof(float), 0), workspace(args.workspace_bytes, 0);
    check_cuda(cudaMemsetAsync(kept.data(), 0, size_t(worker + server) * sizeof(float), nullptr));
    check_cuda(cudaMemsetAsync(workspace.data(), 0, args.workspace_bytes, nullptr)); // what the others did not send
    check_cuda(cudaDeviceSynchronize());
    args.worker_error = reinterpret_cast<float *>(kept.data());
    args.server_error = args.worker_error + worker;
    args.workspace = workspace.data();
    time(state, bench::total(sizes), bytes, [&](cudaStream_t stream) {
        args.stream = stream;
        check(dsopt_compressed_allreduce(comm, &args));
    });
    dsopt_comm_destroy(comm);
    dsopt_context_destroy(context);
}

} // namespace

int main(int argc, char **argv) {
    benchmark::Initialize(&argc, argv);
    int devices = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess || devices == 0) {
        std::fprintf(stderr, "bench_cuda: no CUDA device: %s\n", cudaGetErrorString(error));
        return 77;
    }
    std::vector<std::string> lists{"gpt2-124m", "resnet50", "10000x1000", "1x67108864"};
    if (argc > 1) lists.assign(argv + 1, argv + argc);
    for (const std::string &list : lists) {
        const auto add = [&](const std::string &name, auto function, auto... rest) {
            benchmark::RegisterBenchmark((name + "/" + list).c_str(), function, list, rest...)
                ->UseManualTime()
                ->Unit(benchmark::kMillisecond);
        };
        for (const int bytes : {12, 17, 20, 24, 25, 28, 30, 33, 40, 57})
            add("BM_Copy/" + std::to_string(bytes), BM_Copy, bytes);
        add("BM_Fp32", BM_Step, int32_t(DSOPT_ALGORITHM_ADAMW), int32_t(DSOPT_DTYPE_F32), false, 28);
        add("BM_Mixed/f16", BM_Step, int32_t(DSOPT_ALGORITHM_ADAMW), int32_t(DSOPT_DTYPE_F16), true, 30);
        add("BM_Mixed/bf16", BM_Step, int32_t(DSOPT_ALGORITHM_ADAMW), int32_t(DSOPT_DTYPE_BF16), true, 30);
        add("BM_MixedUpdate/f16", BM_Step, int32_t(DSOPT_ALGORITHM_ADAMW), int32_t(DSOPT_DTYPE_F16), false, 28);
        add("BM_Lamb", BM_Step, int32_t(DSOPT_ALGORITHM_LAMB), int32_t(DSOPT_DTYPE_F32), false, 40);
        add("BM_Sgd", BM_Step, int32_t(DSOPT_ALGORITHM_SGD), int32_t(DSOPT_DTYPE_F32), false, 12);
        add("BM_Adagrad", BM_Step, int32_t(DSOPT_ALGORITHM_ADAGRAD), int32_t(DSOPT_DTYPE_F32), false, 20);
        add("BM_Lion", BM_Step, int32_t(DSOPT_ALGORITHM_LION), int32_t(DSOPT_DTYPE_F32), false, 20);
        add("BM_Compressed", BM_Compressed, 17);
        const auto add_onebit = [&](const std::string &name, int32_t algorithm, uint32_t flags, int32_t reduction,
                                    int bytes) { add(name, BM_OneBit, algorithm, flags, reduction, bytes); };
        add_onebit("BM_OnebitAdam", DSOPT_ALGORITHM_ONEBIT_ADAM, 0, DSOPT_REDUCTION_COMPRESSED, 33);
        add_onebit("BM_OnebitAdam/bits", DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_OPTIMIZER_MOMENTUM_BITS,
                   DSOPT_REDUCTION_COMPRESSED, 25);
        add_onebit("BM_ZeroOneAdam/local", DSOPT_ALGORITHM_ZERO_ONE_ADAM, 0, DSOPT_REDUCTION_LOCAL, 24);
        add_onebit("BM_OnebitLamb", DSOPT_ALGORITHM_ONEBIT_LAMB, 0, DSOPT_REDUCTION_COMPRESSED, 57);
    }
    benchmark::RunSpecifiedBenchmarks();
}
