// SPDX-License-Identifier: Apache-2.0
// `injected_defects NAME` runs kernels with one defect, and exits with status 1 if the emulation or a check of values
// detects it. A sanitizer ends the program with its own message. injected_defects.sh lists which kind of build must
// detect which defect.
#include "fakert.h"
#include "launch.h"
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

constexpr int kCount = 256; // floats in most blocks of memory; few enough threads for TSan

__device__ int global_index() { return int(blockIdx.x * blockDim.x + threadIdx.x); }

__global__ void fill(float *x, float value, int n) {
    if (global_index() < n) x[global_index()] = value;
}
__global__ void add_one(const float *x, float *y, int n) {
    if (global_index() < n) y[global_index()] = x[global_index()] + 1;
}
__global__ void reverse(float *x, int n) { // without a defect
    __shared__ float s[64];
    const int i = global_index();
    s[threadIdx.x] = i < n ? x[i] : 0;
    __syncthreads();
    float v = s[63 - threadIdx.x];
    for (int lanes = 16; lanes; lanes >>= 1) v += __shfl_xor_sync(~0u, v, lanes);
    if (i < n) x[i] = v;
}
__global__ void past_block(float *x, int n) {
    if (global_index() <= n) x[global_index()] = 1;
}
__global__ void past_shared(float *x) {
    __shared__ float s[8];
    float *const p = s; // hides the array's end from the compiler
    p[threadIdx.x / 7] = 1;
    __syncthreads();
    x[threadIdx.x] = s[0];
}
__global__ void past_dynamic_shared(float *x) {
    DYNAMIC_SHARED(float, s);
    s[threadIdx.x + 1] = 1;
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x + 1];
}
__global__ void missing_barrier(float *x) {
    __shared__ float s[64];
    s[threadIdx.x] = 1;
    /* __syncthreads() */
    x[global_index()] = s[63 - threadIdx.x];
}
__global__ void missing_syncwarp(float *x) {
    __shared__ float s[32];
    s[threadIdx.x] = 1;
    const float one = __shfl_xor_sync(~0u, 1.0f, 1); // orders no memory
    x[threadIdx.x] = s[threadIdx.x ^ 1] * one;
}
__global__ void missing_second_barrier(float *x) {
    __shared__ float s[64];
    float sum = 0;
    for (int round = 0; round < 2; ++round) {
        s[threadIdx.x] = 1;
        __syncthreads();
        sum += s[63 - threadIdx.x]; // while others are in the next round
    }
    x[threadIdx.x] = sum;
}
__global__ void last_block(float *partial, unsigned *ticket, float *result, bool release, bool acquire) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = 1;
        if (release) __threadfence();
        last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
        if (acquire) __threadfence();
    }
    __syncthreads();
    if (!last || threadIdx.x != 0) return;
    float sum = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) sum += partial[i];
    *result = sum;
}
__global__ void last_block_by_barriers(float *partial, unsigned *ticket, float *result) {
    __shared__ bool last;
    partial[global_index()] = 1;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1u) == gridDim.x - 1;
        if (last) atomicExch(ticket, 0u);
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    float sum = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) sum += partial[i * blockDim.x + threadIdx.x];
    if (threadIdx.x == 0) *result = sum;
}
__global__ void add_without_atomic(float *x) {
    if (threadIdx.x == blockIdx.x) x[0] += 1;
}
__global__ void barrier_in_branch(float *x) {
    if (threadIdx.x < 100) __syncthreads();
    x[threadIdx.x] = 1;
}
__global__ void return_before_barrier(float *x, int n) {
    if (int(threadIdx.x) >= n) return;
    __syncthreads();
    x[threadIdx.x] = 1;
}
__global__ void shuffle_in_branch(float *x) {
    float v = 1;
    if (threadIdx.x % 32 < 20)
        v = __shfl_xor_sync(~0u, v, 1);
    else
        __syncwarp();
    x[threadIdx.x] = v;
}
__global__ void mask_without_caller(float *x) { x[threadIdx.x] = __shfl_down_sync(0x0000ffffu, 1.0f, 1); }
__global__ void misaligned(float *x) { reinterpret_cast<float4 *>(x + 1)[threadIdx.x] = make_float4(1, 2, 3, 4); }
__global__ void misaligned_cached(float *x) {
    __stcs(&reinterpret_cast<float4 *>(x + 1)[threadIdx.x], make_float4(1, 2, 3, 4));
}
__global__ void index_overflow(float *x, int rows, int columns) { x[threadIdx.x] = rows * columns > 0 ? 1 : 0; }
__global__ void dropped_tail(float *x, int n) { // ignores the elements that do not fill a vector
    const int i = global_index();
    if (i < n / 4) reinterpret_cast<float4 *>(x)[i] = make_float4(1, 1, 1, 1);
}

using Early = dsopt::gpu::PdlArgument<const float *>; // for kernels that may be launched early
__global__ void early_without_wait(const Early) {}
__global__ void early_waits(const Early argument, float *y) {
    const float *const x = argument.begin_kernel();
    y[global_index()] = x[global_index()] + 1;
}
__global__ void early_reads_first(const Early argument, const float *x, float *y) {
    const float v = x[global_index()];
    (void)argument.begin_kernel();
    y[global_index()] = v + 1;
}
__global__ void early_has_a_barrier_first(const Early argument) {
    __syncthreads();
    (void)argument.begin_kernel();
}

int found(const char *how) {
    std::printf("found: %s\n", how);
    return 1;
}
void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::printf("found: %s\n", cudaGetErrorName(error));
    std::exit(1);
}
float *device(int floats) {
    float *p = nullptr;
    check(cudaMalloc(&p, size_t(floats) * sizeof(float)));
    return p;
}
cudaStream_t new_stream() {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}
/// Compares results with the expected value.
int expect(const float *x, int floats, float value, cudaStream_t stream) {
    std::vector<float> host(size_t(floats), NAN);
    check(cudaMemcpyAsync(host.data(), x, size_t(floats) * sizeof(float), cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    for (const float v : host)
        if (v != value) return found("wrong value");
    return 0;
}
template <class Kernel, class... A>
void launch(Kernel kernel, int blocks, int threads, cudaStream_t stream, A... arguments) {
    check(dsopt::gpu::Launch{"injected", unsigned(blocks), unsigned(threads), 0, stream}(kernel, arguments...));
}

/// Launches a kernel early after the kernel that writes its input.
int run_early(bool reads_first, bool protect, bool in_graph) {
    fakert::Config config;
    config.mode = fakert::Mode::lazy;
    config.protect = protect;
    fakert::reset(config);
    float *const x = device(kCount), *const y = device(kCount);
    const cudaStream_t s = new_stream();
    check(cudaMemsetAsync(x, 0, kCount * sizeof(float), s));
    if (in_graph) check(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    launch(fill, 4, 64, s, x, 1.f, kCount);
    const dsopt::gpu::Launch early{"injected", 4, 64, 0, s};
    check(reads_first ? early({.early = true}, early_reads_first, x, x, y) : early({.early = true}, early_waits, x, y));
    if (in_graph) {
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        check(cudaStreamEndCapture(s, &graph));
        check(cudaGraphInstantiate(&exec, graph));
        check(cudaGraphLaunch(exec, s));
    }
    return expect(y, kCount, 2, s);
}

int run(const char *name) {
    const auto is = [&](const char *other) { return !std::strcmp(name, other); };
    const bool luck = std::strstr(name, "by-luck") != nullptr; // eager work runs in the right order by chance
    fakert::Config config;
    config.mode = luck ? fakert::Mode::eager : fakert::Mode::lazy;
    fakert::reset(config);
    float *const x = device(kCount), *const y = device(kCount);
    cudaStream_t s = new_stream(), other = new_stream();

    if (is("clean")) {
        launch(fill, 4, 64, s, x, 1.f, kCount);
        launch(reverse, 4, 64, s, x, kCount);
        return expect(x, kCount, 32, s);
    }
    const dsopt::gpu::Launch early{"injected", 4, 64, 0, s};
    if (is("early-kernel") || is("early-kernel-in-graph")) return run_early(false, true, is("early-kernel-in-graph"));
    if (is("early-kernel-reads-before-it-waits")) return run_early(true, true, false);
    if (is("early-kernel-reads-old-values")) return run_early(true, false, false);
    if (is("early-kernel-in-graph-reads-old-values")) return run_early(true, false, true);
    if (is("early-kernel-never-waits")) {
        launch(fill, 4, 64, s, x, 1.f, kCount);
        check(early({.early = true}, early_without_wait, x));
    }
    if (is("early-kernel-has-a-barrier-first")) check(early({.early = true}, early_has_a_barrier_first, x));
    if (is("triggers-before-a-copy") || is("triggers-before-a-kernel-that-does-not-wait")) {
        check(early({.triggers = true}, early_waits, x, y));
        if (is("triggers-before-a-copy")) return expect(y, kCount, 1, s);
        launch(fill, 4, 64, s, x, 1.f, kCount);
    }
    if (is("write-past-block")) {
        float *const z = device(100);
        launch(past_block, 2, 64, s, z, 100);
        check(cudaFree(z));
        return 0;
    }
    if (is("write-past-shared")) launch(past_shared, 1, 64, s, x);
    if (is("write-past-dynamic-shared"))
        check(dsopt::gpu::Launch{"injected", 1, 64, 64 * sizeof(float), s}(past_dynamic_shared, x));
    if (is("missing-barrier")) {
        launch(missing_barrier, 4, 64, s, x);
        return expect(x, kCount, 1, s);
    }
    if (is("missing-syncwarp")) {
        launch(missing_syncwarp, 1, 32, s, x);
        return expect(x, 32, 1, s);
    }
    if (is("missing-second-barrier")) {
        launch(missing_second_barrier, 1, 64, s, x);
        return expect(x, 64, 2, s);
    }
    if (is("fences-and-barriers")) {
        unsigned *ticket = nullptr;
        check(cudaMalloc(&ticket, sizeof *ticket));
        check(cudaMemsetAsync(ticket, 0, sizeof *ticket, s));
        for (int round = 0; round < 2; ++round) launch(last_block_by_barriers, 4, 32, s, x, ticket, y);
        return expect(y, 1, 4, s);
    }
    if (is("both-fences") || is("missing-fence-before-ticket") || is("missing-fence-after-ticket")) {
        unsigned *ticket = nullptr;
        check(cudaMalloc(&ticket, sizeof *ticket));
        check(cudaMemsetAsync(ticket, 0, sizeof *ticket, s));
        for (int round = 0; round < 2; ++round)
            launch(last_block, 4, 32, s, x, ticket, y, !is("missing-fence-before-ticket"),
                   !is("missing-fence-after-ticket"));
        return expect(y, 1, 4, s);
    }
    if (is("add-without-atomic")) launch(add_without_atomic, 4, 32, s, x);
    if (is("barrier-in-branch")) launch(barrier_in_branch, 1, 256, s, x);
    if (is("return-before-barrier")) launch(return_before_barrier, 1, 256, s, x, 250);
    if (is("shuffle-in-branch")) launch(shuffle_in_branch, 1, 64, s, x);
    if (is("mask-without-caller")) launch(mask_without_caller, 1, 32, s, x);
    if (is("misaligned-vector")) launch(misaligned, 1, 32, s, x);
    if (is("misaligned-cached-vector")) launch(misaligned_cached, 1, 32, s, x);
    if (is("index-overflow")) launch(index_overflow, 1, 32, s, x, 70000, 70000);
    if (is("dropped-tail")) {
        launch(dropped_tail, 1, 64, s, x, kCount - 1);
        return expect(x, kCount - 1, 1, s);
    }
    if (is("host-reads-device-memory")) {
        launch(fill, 4, 64, s, x, 1.f, kCount);
        check(cudaStreamSynchronize(s));
        return x[0] == 1 ? 0 : 2;
    }
    if (is("memory-of-another-device")) {
        check(cudaSetDevice(1));
        float *const z = device(kCount);
        check(cudaSetDevice(0));
        launch(fill, 4, 64, s, z, 1.f, kCount);
    }
    if (is("use-after-free")) {
        check(cudaFree(x));
        launch(fill, 4, 64, s, x, 1.f, kCount);
    }
    if (is("missing-event") || is("missing-event-by-luck")) {
        check(cudaMemsetAsync(x, 0, kCount * sizeof(float), s));
        check(cudaStreamSynchronize(s));
        launch(fill, 4, 64, s, x, 1.f, kCount);
        launch(add_one, 4, 64, other, x, y, kCount); // `other` should wait for `s`
        return expect(y, kCount, 2, other);
    }
    if (is("missing-event-in-graph-by-luck")) {
        cudaEvent_t forked = nullptr, joined = nullptr;
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        check(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming));
        check(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
        check(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        check(cudaEventRecord(forked, s));
        check(cudaStreamWaitEvent(other, forked));
        launch(fill, 4, 64, s, x, 1.f, kCount);
        launch(add_one, 4, 64, other, x, y, kCount); // parallel to the kernel before, not after it
        check(cudaEventRecord(joined, other));
        check(cudaStreamWaitEvent(s, joined));
        check(cudaStreamEndCapture(s, &graph));
        check(cudaGraphInstantiate(&exec, graph));
        check(cudaGraphLaunch(exec, s));
        return expect(y, kCount, 2, s);
    }
    if (is("page-locked-memory-refilled")) {
        float *staging = nullptr;
        check(cudaMallocHost(&staging, sizeof(float)));
        for (const int i : {0, 1}) {
            *staging = float(1 - i);
            check(cudaMemcpyAsync(x + i, staging, sizeof(float), cudaMemcpyHostToDevice, s));
        }
        return expect(x, 1, 1, s);
    }
    if (is("result-read-by-luck")) {
        float *result = nullptr;
        check(cudaMallocHost(&result, sizeof(float)));
        launch(fill, 4, 64, s, x, 1.f, kCount);
        check(cudaMemcpyAsync(result, x, sizeof(float), cudaMemcpyDeviceToHost, s));
        return *result == 1 ? 0 : 2; // without a wait
    }
    if (is("unwritten-memory")) return expect(x, 1, 0, s);

    check(cudaDeviceSynchronize());
    return 0;
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    const int status = run(argv[1]);
    fakert::reset();
    return status;
}
