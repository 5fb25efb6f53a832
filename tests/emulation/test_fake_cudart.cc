// SPDX-License-Identifier: Apache-2.0
// The fake runtime: streams, events, memory, graphs, counters and faults. They behave as CUDA guarantees, and where it
// guarantees nothing, in the least favorable way.
#include "device_array.h"
#include "sample_kernels.h"
#include <cmath>
#include <csignal>
#include <thread>

using namespace fakert;

namespace {

constexpr size_t kCount = 100;

Config in(Mode mode) {
    Config config;
    config.mode = mode;
    return config;
}

class FakeRuntime : public testing::TestWithParam<Mode> {
protected:
    void SetUp() override { reset(in(GetParam())); }
    void TearDown() override {
        EXPECT_EQ(live_objects(), 0);
        reset();
    }
};
std::string mode_name(const testing::TestParamInfo<Mode> &info) {
    const char *const names[] = {"eager", "lazy", "random", "threads"};
    return names[int(info.param)];
}
#ifdef EMULATION_TSAN // TSan creates threads slowly
const auto kModes = testing::Values(Mode::lazy, Mode::threads);
constexpr long kEvery = 4;
#else
constexpr long kEvery = 1;
const auto kModes = testing::Values(Mode::eager, Mode::lazy, Mode::random, Mode::threads);
#endif
INSTANTIATE_TEST_SUITE_P(Modes, FakeRuntime, kModes, mode_name);

class LazyRuntime : public testing::Test {
protected:
    void SetUp() override { reset(in(Mode::lazy)); }
    void TearDown() override {
        EXPECT_EQ(live_objects(), 0);
        reset();
    }
};

/// Multiplies x by `factor` in a stream. The result depends on the order of such calls.
void scale(const DeviceArray<float> &x, float factor, cudaStream_t stream) {
    ASSERT_EQ(sample::scale(x.data(), factor, int64_t(x.bytes() / sizeof(float)), stream), cudaSuccess);
}
void add_one(const DeviceArray<float> &x, const DeviceArray<float> &ones, cudaStream_t stream) {
    ASSERT_EQ(sample::add(x.data(), ones.data(), x.data(), int64_t(x.bytes() / sizeof(float)), stream), cudaSuccess);
}
float first_of(const DeviceArray<float> &x, cudaStream_t stream) { // waits for this stream alone
    float value = 0;
    EXPECT_EQ(cudaMemcpyAsync(&value, x.data(), sizeof value, cudaMemcpyDeviceToHost, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return value;
}
const std::vector<float> kOnes(kCount, 1.0f);

TEST_P(FakeRuntime, StreamRunsInOrder) {
    const DeviceArray<float> x(kOnes), ones(kOnes);
    const Stream stream;
    scale(x, 3, stream);
    add_one(x, ones, stream);
    scale(x, 5, stream);
    EXPECT_EQ(first_of(x, stream), 20);
}

TEST_P(FakeRuntime, EventOrdersStreams) {
    const DeviceArray<float> x(kOnes), ones(kOnes);
    const Stream one, two;
    const Event done;
    scale(x, 3, one);
    ASSERT_EQ(cudaEventRecord(done, one), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(two, done), cudaSuccess);
    add_one(x, ones, two);
    EXPECT_EQ(first_of(x, two), 4);
    EXPECT_EQ(cudaEventSynchronize(done), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(done), cudaSuccess);
}

TEST_P(FakeRuntime, NullStreamOrdersBlockingStreams) {
    const DeviceArray<float> x(kOnes), ones(kOnes);
    const Stream one(cudaStreamDefault), two(cudaStreamDefault);
    scale(x, 3, one);
    add_one(x, ones, nullptr);
    scale(x, 5, two);
    EXPECT_EQ(first_of(x, two), 20);
}

TEST_P(FakeRuntime, QueryBecomesReady) {
    const DeviceArray<float> x(kOnes);
    const Stream stream;
    scale(x, 3, stream);
    cudaError_t state = cudaErrorNotReady;
    while (state == cudaErrorNotReady) state = cudaStreamQuery(stream);
    EXPECT_EQ(state, cudaSuccess);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess); // "not ready" is not recorded as an error
}

TEST_P(FakeRuntime, MeasuresTimeBetweenEvents) {
    const DeviceArray<float> x(kOnes);
    const Stream stream;
    const Event begin(cudaEventDefault), end(cudaEventDefault), untimed;
    float milliseconds = -1;
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorInvalidResourceHandle); // never recorded
    ASSERT_EQ(cudaEventRecord(begin, stream), cudaSuccess);
    scale(x, 3, stream);
    ASSERT_EQ(cudaEventRecord(end, stream), cudaSuccess);
    ASSERT_EQ(cudaEventSynchronize(end), cudaSuccess);
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaSuccess);
    EXPECT_GE(milliseconds, 0);
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, untimed), cudaErrorInvalidResourceHandle);
}

TEST_P(FakeRuntime, HostFunctionRunsInOrderAndCannotCallRuntime) {
    const Stream stream;
    struct Seen {
        cudaError_t error = cudaSuccess;
        bool ran = false;
    } seen;
    const auto function = [](void *data) {
        Seen *const all = static_cast<Seen *>(data);
        int device = 0;
        all->error = cudaGetDevice(&device);
        all->ran = true;
    };
    ASSERT_EQ(cudaLaunchHostFunc(stream, function, &seen), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_TRUE(seen.ran);
    EXPECT_EQ(seen.error, cudaErrorNotPermitted);
}

TEST_P(FakeRuntime, AllocatesAndFreesInStreamOrder) {
    const Stream stream;
    float *x = nullptr;
    ASSERT_EQ(cudaMallocAsync(&x, 400, stream), cudaSuccess);
    ASSERT_EQ(cudaMemsetAsync(x, 0, 400, stream), cudaSuccess);
    ASSERT_EQ(sample::scale(x, 2, 100, stream), cudaSuccess);
    float value = 1;
    ASSERT_EQ(cudaMemcpyAsync(&value, x, 4, cudaMemcpyDeviceToHost, stream), cudaSuccess);
    ASSERT_EQ(cudaFreeAsync(x, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(value, 0);
    EXPECT_EQ(cudaFree(x), cudaErrorInvalidValue);
}

TEST_P(FakeRuntime, CopiesBetweenDevices) {
    const DeviceArray<float> x(kOnes);
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    {
        const DeviceArray<float> y(kCount);
        ASSERT_EQ(cudaMemcpy(y.data(), x.data(), x.bytes(), cudaMemcpyDeviceToDevice), cudaSuccess);
        EXPECT_EQ(y.get(), kOnes);
        EXPECT_EQ(sample::scale(y.data(), 2, 100, nullptr), cudaSuccess);
        cudaPointerAttributes attributes{};
        EXPECT_EQ(cudaPointerGetAttributes(&attributes, y.data() + 99), cudaSuccess);
        EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
        EXPECT_EQ(attributes.device, 1);
    }
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

TEST_P(FakeRuntime, GraphReplaysWithArgumentsOfCapture) {
    const DeviceArray<float> x(kOnes), ones(kOnes);
    const Stream stream, other;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    float factor = 3;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    scale(x, factor, stream);
    add_one(x, ones, stream);
    factor = 100;
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    EXPECT_EQ(first_of(x, stream), 1); // recorded, not run
    EXPECT_EQ(nodes(graph), (std::vector<std::string>{"kernel scale", "kernel add"}));
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, other), cudaSuccess); // after the previous launch, in any stream
    EXPECT_EQ(first_of(x, other), 13);
    add_one(x, ones, other);
    ASSERT_EQ(cudaGraphLaunch(exec, other), cudaSuccess);
    EXPECT_EQ(first_of(x, other), 43);
    ASSERT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
}

TEST_P(FakeRuntime, GraphCopiesDataAtLaunch) {
    const DeviceArray<float> x(kOnes);
    const Stream stream;
    float *staging = nullptr;
    ASSERT_EQ(cudaMallocHost(&staging, 2 * sizeof(float)), cudaSuccess);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    ASSERT_EQ(cudaMemsetAsync(x.data(), 0, x.bytes(), stream), cudaSuccess);
    ASSERT_EQ(cudaMemcpyAsync(x.data(), staging, 4, cudaMemcpyHostToDevice, stream), cudaSuccess);
    scale(x, 2, stream);
    ASSERT_EQ(cudaMemcpyAsync(staging + 1, x.data(), 4, cudaMemcpyDeviceToHost, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    EXPECT_EQ(nodes(graph), (std::vector<std::string>{"fill", "copy to device", "kernel scale", "copy to host"}));
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph), cudaSuccess);
    for (const float value : {5.0f, 7.0f}) {
        staging[0] = value;
        ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        EXPECT_EQ(staging[1], 2 * value);
    }
    EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(staging), cudaSuccess);
}

TEST_P(FakeRuntime, GraphForksAndJoins) {
    const DeviceArray<float> x(kOnes), y(kOnes), ones(kOnes);
    const Stream stream, side;
    const Event forked, joined;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    scale(x, 3, stream);
    ASSERT_EQ(cudaEventRecord(forked, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(side, forked), cudaSuccess);
    cudaStreamCaptureStatus status{};
    ASSERT_EQ(cudaStreamIsCapturing(side, &status), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusActive); // the wait added the stream to the capture
    ASSERT_EQ(sample::add(x.data(), y.data(), y.data(), kCount, side), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(joined, side), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(stream, joined), cudaSuccess);
    add_one(y, ones, stream);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaStreamIsCapturing(side, &status), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusNone);
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph), cudaSuccess);
    for (int i = 0; i < 2; ++i) ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    EXPECT_EQ(first_of(y, stream), 1 + 3 + 1 + 9 + 1);
    EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

// Behavior of lazy streams.
#ifndef EMULATION_TSAN // a race for TSan
TEST_F(LazyRuntime, MissingWaitReadsOldData) {
    const DeviceArray<float> x(kOnes);
    const Stream one, two;
    scale(x, 3, one);
    EXPECT_EQ(first_of(x, two), 1);
    EXPECT_EQ(first_of(x, one), 3);
}
#endif
TEST_F(LazyRuntime, NewMemoryIsNan) {
    const DeviceArray<float> x(kCount);
    for (const float value : x.get()) EXPECT_TRUE(std::isnan(value));
}
TEST_F(LazyRuntime, RejectsInvalidMemoryAndDevices) {
    const DeviceArray<float> x(kOnes);
    const Stream stream;
    float host = 0;
    EXPECT_EQ(cudaMemcpy(x.data(), &host, x.bytes() + 1, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemcpy(x.data(), &host, 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemsetAsync(&host, 0, 4, stream), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFree(x.data() + 1), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFreeHost(&host), cudaErrorInvalidValue);
    EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_STREQ(cudaGetErrorName(cudaErrorInvalidDevice), "cudaErrorInvalidDevice");
    EXPECT_STREQ(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
}

__global__ void nothing_kernel() {}
TEST_F(LazyRuntime, ChecksLaunchConfiguration) {
    const auto launch = [](dim3 grid, dim3 block, size_t shared) {
        return dsopt::gpu::Launch{"nothing", grid, block, shared, nullptr}(nothing_kernel);
    };
    EXPECT_EQ(launch(1, 1024, 48 << 10), cudaSuccess);
    EXPECT_EQ(launch(0, 1, 0), cudaErrorInvalidConfiguration);
    EXPECT_EQ(launch(1, 1025, 0), cudaErrorInvalidConfiguration);
    EXPECT_EQ(launch(1, dim3(1, 1, 65), 0), cudaErrorInvalidConfiguration);
    EXPECT_EQ(launch(dim3(1, 65536), 1, 0), cudaErrorInvalidConfiguration);
    EXPECT_EQ(launch(1, 1, 100 << 10), cudaErrorInvalidConfiguration);
    ASSERT_EQ(cudaFuncSetAttribute(nothing_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10),
              cudaSuccess);
    EXPECT_EQ(launch(1, 1, 100 << 10), cudaSuccess);
    EXPECT_EQ(cudaFuncSetAttribute(nothing_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 300 << 10),
              cudaErrorInvalidValue);
}
__global__ void queried_kernel() {}
TEST_F(LazyRuntime, FirstLaunchOfUnloadedKernelWaitsForDevice) {
    Config config;
    config.first_launch_waits = true;
    reset(config);
    cudaFuncAttributes attributes;
    ASSERT_EQ(cudaFuncGetAttributes(&attributes, queried_kernel), cudaSuccess);
    ASSERT_EQ((dsopt::gpu::Launch{"queried", 1, 32, 0, nullptr}(queried_kernel)), cudaSuccess);
    EXPECT_EQ(kernels_run(), 0);
    for (int round = 0; round < 2; ++round) {
        ASSERT_EQ((dsopt::gpu::Launch{"nothing", 1, 32, 0, nullptr}(nothing_kernel)), cudaSuccess);
        EXPECT_EQ(kernels_run(), 1);
    }
    EXPECT_EQ(late_loads(), std::vector<std::string>{"nothing"});
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}
TEST_F(LazyRuntime, ReportsDeviceAttributes) {
    Config config;
    config.multiprocessors = 7;
    config.devices = 3;
    reset(config);
    int value = 0;
    EXPECT_EQ(cudaGetDeviceCount(&value), cudaSuccess);
    EXPECT_EQ(value, 3);
    EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 2), cudaSuccess);
    EXPECT_EQ(value, 7);
    EXPECT_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&value, nothing_kernel, 256, 0), cudaSuccess);
    EXPECT_EQ(value, 2);
}
TEST_F(LazyRuntime, RunsOutOfMemory) {
    Config config;
    config.memory = 1000;
    reset(config);
    void *one = nullptr, *two = nullptr;
    EXPECT_EQ(cudaMalloc(&one, 600), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&two, 600), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaFree(one), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&two, 600), cudaSuccess);
    EXPECT_EQ(cudaFree(two), cudaSuccess);
}

// Captures refuse the same calls as CUDA and are invalid afterwards.
struct Refused {
    const char *name;
    cudaStreamCaptureMode mode;
    unsigned flags; // of the stream that captures
    cudaError_t (*call)(cudaStream_t stream, float *device, float *pinned);
    cudaError_t error;
};
void PrintTo(const Refused &refused, std::ostream *out) { *out << refused.name; }
constexpr auto kLocal = cudaStreamCaptureModeThreadLocal;
constexpr auto kRelaxed = cudaStreamCaptureModeRelaxed;
constexpr auto kUnsupported = cudaErrorStreamCaptureUnsupported;
#define CALL [](cudaStream_t stream [[maybe_unused]], float *device [[maybe_unused]], float *pinned [[maybe_unused]])
// clang-format takes the macro for a statement.
// clang-format off
const Refused kRefused[] = {
    {"SynchronizingStream", kRelaxed, 1, CALL { return cudaStreamSynchronize(stream); }, kUnsupported},
    {"QueryingStream", kRelaxed, 1, CALL { return cudaStreamQuery(stream); }, kUnsupported},
    {"SynchronizingDevice", kRelaxed, 1, CALL { return cudaDeviceSynchronize(); }, kUnsupported},
    {"Allocating", kLocal, 1, CALL { void *p = nullptr; return cudaMalloc(&p, 4); }, kUnsupported},
    {"AllocatingPinned", kLocal, 1, CALL { void *p = nullptr; return cudaMallocHost(&p, 4); }, kUnsupported},
    {"AllocatingInStreamOrder", kRelaxed, 1,
     CALL { void *p = nullptr; return cudaMallocAsync(&p, 4, stream); }, kUnsupported},
    {"Freeing", kRelaxed, 1, CALL { return cudaFree(device); }, kUnsupported},
    {"FreeingPinned", kLocal, 1, CALL { return cudaFreeHost(pinned); }, kUnsupported},
    {"CopyingPageable", kRelaxed, 1,
     CALL { float f = 0; return cudaMemcpyAsync(device, &f, 4, cudaMemcpyHostToDevice, stream); }, kUnsupported},
    {"CopyingSynchronously", kLocal, 1,
     CALL { return cudaMemcpy(device, pinned, 4, cudaMemcpyHostToDevice); }, kUnsupported},
    {"CopyingDuringBlockingCapture", kLocal, 0,
     CALL { return cudaMemcpy(device, pinned, 4, cudaMemcpyHostToDevice); }, cudaErrorStreamCaptureImplicit},
    {"FillingOnNullStreamDuringBlockingCapture", kLocal, 0,
     CALL { return cudaMemsetAsync(device, 0, 4, nullptr); }, cudaErrorStreamCaptureImplicit},
    {"LaunchingOnNullStreamDuringBlockingCapture", kLocal, 0,
     CALL { return sample::scale(device, 1, 1, nullptr); }, cudaErrorStreamCaptureImplicit},
};
// clang-format on
class Captures : public testing::TestWithParam<Refused> {};
INSTANTIATE_TEST_SUITE_P(All, Captures, testing::ValuesIn(kRefused),
                         [](const testing::TestParamInfo<Refused> &info) { return info.param.name; });
TEST_P(Captures, RejectCallAndBecomeInvalid) {
    reset(in(Mode::lazy));
    {
        const DeviceArray<float> x(kOnes);
        const Stream stream(GetParam().flags);
        float *pinned = nullptr;
        ASSERT_EQ(cudaMallocHost(&pinned, 4), cudaSuccess);
        ASSERT_EQ(cudaStreamBeginCapture(stream, GetParam().mode), cudaSuccess);
        EXPECT_EQ(GetParam().call(stream, x.data(), pinned), GetParam().error);
        cudaStreamCaptureStatus status{};
        EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
        EXPECT_EQ(status, cudaStreamCaptureStatusInvalidated);
        EXPECT_EQ(sample::scale(x.data(), 2, kCount, stream), cudaErrorStreamCaptureInvalidated);
        cudaGraph_t graph = nullptr;
        EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
        EXPECT_EQ(graph, nullptr);
        scale(x, 2, stream); // the stream works as before
        EXPECT_EQ(first_of(x, stream), 2);
        EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
    }
    EXPECT_EQ(live_objects(), 0);
    reset();
}

TEST_F(LazyRuntime, RelaxedCaptureAllowsAllocation) {
    const Stream stream;
    void *p = nullptr;
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&p, 4), cudaSuccess);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    EXPECT_EQ(cudaFree(p), cudaSuccess);
}
TEST_F(LazyRuntime, ThreadLocalCaptureAllowsCallsOfOtherThreads) {
    const Stream stream;
    cudaGraph_t graph = nullptr;
    const auto allocate_in_other_thread = [] {
        cudaError_t error = cudaSuccess;
        std::thread([&] {
            void *p = nullptr;
            error = cudaMalloc(&p, 4);
            if (!error) error = cudaFree(p);
        }).join();
        return error;
    };
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(allocate_in_other_thread(), cudaSuccess);
    cudaError_t error = cudaSuccess;
    std::thread([&] { error = cudaStreamEndCapture(stream, &graph); }).join();
    EXPECT_EQ(error, cudaErrorStreamCaptureWrongThread);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_EQ(allocate_in_other_thread(), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
}
TEST_F(LazyRuntime, DeviceSynchronizeInvalidatesAllCaptures) {
    const Stream stream, side;
    const Event event;
    const auto in_other_thread = [](const auto &body) { // in a thread with the most permissive capture mode
        cudaError_t error = cudaSuccess;
        std::thread([&] {
            cudaStreamCaptureMode mode = kRelaxed;
            EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
            error = body();
        }).join();
        return error;
    };
    for (const cudaStreamCaptureMode mode : {cudaStreamCaptureModeGlobal, kLocal, kRelaxed}) {
        SCOPED_TRACE(mode);
        cudaGraph_t graph = nullptr;
        ASSERT_EQ(cudaStreamBeginCapture(stream, mode), cudaSuccess);
        EXPECT_EQ(in_other_thread([&] { return cudaEventRecord(event, side); }), cudaSuccess);
        EXPECT_EQ(in_other_thread([&] { return cudaEventSynchronize(event); }), cudaSuccess);
        EXPECT_EQ(in_other_thread([&] { return cudaStreamSynchronize(side); }), cudaSuccess);
        EXPECT_EQ(in_other_thread([] {
                      EXPECT_EQ(cudaSetDevice(1), cudaSuccess); // no stream of this device is captured
                      return cudaDeviceSynchronize();
                  }),
                  cudaSuccess);
        EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
        ASSERT_EQ(cudaStreamBeginCapture(stream, mode), cudaSuccess);
        EXPECT_EQ(in_other_thread([] { return cudaDeviceSynchronize(); }), kUnsupported);
        EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    }
}
TEST_F(LazyRuntime, RejectsInvalidCaptureSequences) {
    const Stream stream, side;
    const Event before, forked;
    cudaGraph_t graph = nullptr;
    cudaStreamCaptureStatus status{};
    EXPECT_EQ(cudaStreamBeginCapture(nullptr, kLocal), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorIllegalState);
    ASSERT_EQ(cudaEventRecord(before, side), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, kLocal), cudaSuccess);
    EXPECT_EQ(cudaStreamBeginCapture(stream, kLocal), cudaErrorIllegalState);
    EXPECT_EQ(cudaStreamIsCapturing(nullptr, &status),
              cudaSuccess); // the null stream does not wait for non-blocking streams
    ASSERT_EQ(cudaEventRecord(forked, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(side, forked), cudaSuccess);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureUnjoined);
    EXPECT_EQ(cudaEventSynchronize(forked), cudaErrorCapturedEvent);

    ASSERT_EQ(cudaStreamBeginCapture(stream, kLocal), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(stream, before), cudaErrorStreamCaptureIsolation);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);

    ASSERT_EQ(cudaStreamBeginCapture(stream, kLocal), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(side, kLocal), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(forked, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(side, forked), cudaErrorStreamCaptureMerge);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(cudaStreamEndCapture(side, &graph), cudaErrorStreamCaptureInvalidated);
}
TEST_F(LazyRuntime, NullStreamIsUnusableDuringBlockingCapture) {
    const Stream stream(cudaStreamDefault);
    cudaStreamCaptureStatus status{};
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, kLocal), cudaSuccess);
    EXPECT_EQ(cudaStreamIsCapturing(nullptr, &status), cudaErrorStreamCaptureImplicit);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess); // the query did not invalidate it
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(LazyRuntime, CountsCallsByKind) {
    const DeviceArray<float> x(kOnes), ones(kOnes);
    const Stream stream;
    float *staging = nullptr;
    ASSERT_EQ(cudaMallocHost(&staging, 400), cudaSuccess);
    mark();
    scale(x, 2, stream);
    add_one(x, ones, stream);
    Counters counted = counters();
    EXPECT_EQ(counted.kernel_launches, 2);
    EXPECT_EQ(counted.host_waits + counted.host_queries + counted.device_allocations + counted.copies_to_device, 0);
    EXPECT_EQ(launched_kernels(), (std::vector<std::string>{"scale", "add"}));

    mark();
    EXPECT_EQ(cudaMemcpyAsync(x.data(), staging, 400, cudaMemcpyHostToDevice, stream), cudaSuccess);
    EXPECT_EQ(counters().copies_to_device, 1);
    EXPECT_EQ(counters().host_waits, 0);
    EXPECT_EQ(cudaMemcpyAsync(x.data(), kOnes.data(), 400, cudaMemcpyHostToDevice, stream), cudaSuccess);
    EXPECT_EQ(counters().copies_to_device, 2);
    EXPECT_EQ(counters().host_waits, 1); // pageable memory
    EXPECT_EQ(cudaMemcpyAsync(x.data(), ones.data(), 400, cudaMemcpyDeviceToDevice, stream), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(x.data(), 0, 400, stream), cudaSuccess);
    (void)cudaStreamQuery(stream);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    void *p = nullptr;
    EXPECT_EQ(cudaMallocAsync(&p, 4, stream), cudaSuccess);
    EXPECT_EQ(cudaFreeAsync(p, stream), cudaSuccess);
    counted = counters();
    EXPECT_EQ(counted.copies_on_device, 1);
    EXPECT_EQ(counted.fills, 1);
    EXPECT_EQ(counted.host_queries, 1);
    EXPECT_EQ(counted.host_waits, 2);
    EXPECT_EQ(counted.device_allocations, 1);
    EXPECT_EQ(counted.device_frees, 1);
    EXPECT_EQ(launched_kernels(), std::vector<std::string>{});
    EXPECT_EQ(cudaFreeHost(staging), cudaSuccess);
}

// A short program, run repeatedly with a failure of another call each time.
cudaError_t short_program(float *result) {
    const auto memory_deleter = [](void *p) { (void)cudaFree(p); };
    const auto stream_deleter = [](cudaStream_t s) { (void)cudaStreamDestroy(s); };
    float *p = nullptr;
    cudaStream_t s = nullptr;
    if (const cudaError_t error = cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking)) return error;
    const std::unique_ptr<FakeStream, decltype(stream_deleter)> stream(s, stream_deleter);
    if (const cudaError_t error = cudaMalloc(&p, 400)) return error;
    const std::unique_ptr<void, decltype(memory_deleter)> memory(p, memory_deleter);
    if (const cudaError_t error = cudaMemcpyAsync(p, kOnes.data(), 400, cudaMemcpyHostToDevice, s)) return error;
    if (const cudaError_t error = sample::scale(p, 3, kCount, s)) return error;
    if (const cudaError_t error = sample::add(p, p, p, kCount, s)) return error;
    if (const cudaError_t error = cudaMemcpyAsync(result, p, 4, cudaMemcpyDeviceToHost, s)) return error;
    return cudaStreamSynchronize(s);
}
TEST_P(FakeRuntime, FailsAtNthCallAndRecovers) {
    Config config = in(GetParam());
    float result = 0;
    ASSERT_EQ(short_program(&result), cudaSuccess);
    const long all = calls();
    EXPECT_EQ(all, 9);
    EXPECT_EQ(calls("cudaLaunchKernel"), 2);
    for (config.fail_call = 0; config.fail_call < all; config.fail_call += kEvery) {
        reset(config);
        const bool at_the_end = config.fail_call >= 7; // a release failed
        EXPECT_EQ(short_program(&result), at_the_end ? cudaSuccess : cudaErrorMemoryAllocation) << config.fail_call;
        EXPECT_EQ(live_objects(), at_the_end ? 1 : 0) << config.fail_call;
        reset(in(GetParam()));
        ASSERT_EQ(short_program(&result), cudaSuccess);
        EXPECT_EQ(result, 6);
    }
}
TEST_P(FakeRuntime, FailsAtNthCallOfFunction) {
    Config config = in(GetParam());
    config.fail_function = "cudaLaunchKernel";
    config.fail_call = 1;
    config.fail_with = cudaErrorLaunchFailure;
    reset(config);
    float result = 0;
    EXPECT_EQ(short_program(&result), cudaErrorLaunchFailure);
    EXPECT_EQ(calls("cudaLaunchKernel"), 2);
    EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
    EXPECT_EQ(short_program(&result), cudaSuccess); // the call failed, not the device
}
TEST_P(FakeRuntime, FailsInNthKernel) {
    Config config = in(GetParam());
    config.fail_kernel = 1;
    reset(config);
    float result = 0;
    EXPECT_EQ(short_program(&result), cudaErrorIllegalAddress);
    EXPECT_EQ(kernels_run(), 2);
    EXPECT_EQ(short_program(&result), cudaErrorIllegalAddress); // the device stays unusable
    EXPECT_EQ(live_objects(), 0);
}

using DeathTest = LazyRuntime;
TEST_F(DeathTest, HostCannotReadDeviceMemory) {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    const DeviceArray<float> x(kOnes);
    const volatile float *const p = x.data();
    EXPECT_DEATH((void)*p, "");
}
TEST_F(DeathTest, FreeDetectsWritePastBlock) {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    const auto write = [] {
        const DeviceArray<float> x(kOnes);
        (void)sample::scale(x.data(), 2, kCount + 1, nullptr);
        (void)cudaDeviceSynchronize();
    };
    EXPECT_DEATH(write(), "write past the end: byte|AddressSanitizer");
}

} // namespace
