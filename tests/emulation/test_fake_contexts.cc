// SPDX-License-Identifier: Apache-2.0
// Contexts of the fake runtime: calls that create a context, and objects that belong to it.
#include "device_array.h"
#include "sample_kernels.h"
#include <thread>

using namespace fakert;

namespace {

class FakeContexts : public testing::Test {
protected:
    void SetUp() override { reset(Config{}); }
    void TearDown() override {
        EXPECT_EQ(live_objects(), 0);
        reset();
    }
    /// Multiplies x by 2 and returns its first element.
    static float doubled(float *x, cudaStream_t stream) {
        float value = 0;
        EXPECT_EQ(sample::scale(x, 2, 1, stream), cudaSuccess);
        EXPECT_EQ(cudaMemcpyAsync(&value, x, sizeof value, cudaMemcpyDeviceToHost, stream), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        return value;
    }
    static void set_to_one(float *x, cudaStream_t stream) {
        const float one = 1;
        EXPECT_EQ(cudaMemcpyAsync(x, &one, sizeof one, cudaMemcpyHostToDevice, stream), cudaSuccess);
    }
};

TEST_F(FakeContexts, AnyCallCreatesPrimaryContextOfCurrentDevice) {
    using Call = cudaError_t (*)();
    const Call calls[] = {[] { return cudaFree(nullptr); },
                          [] { return cudaFreeHost(nullptr); },
                          [] { return cudaEventDestroy(nullptr); },
                          [] { return cudaStreamDestroy(nullptr); },
                          [] { return cudaStreamQuery(nullptr); },
                          [] { return cudaDeviceSynchronize(); },
                          [] { return cudaMemsetAsync(nullptr, 0, 0); }};
    for (const Call call : calls) {
        reset(Config{});
        std::thread([&] {
            int value = 0;
            EXPECT_EQ(cudaGetDeviceCount(&value), cudaSuccess);
            EXPECT_EQ(cudaGetDevice(&value), cudaSuccess);
            EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
            EXPECT_FALSE(has_context(0));
            (void)call();
            EXPECT_TRUE(has_context(0));
        }).join();
        reset(Config{});
        std::thread([&] {
            EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
            (void)call();
            EXPECT_TRUE(has_context(1));
            EXPECT_FALSE(has_context(0));
        }).join();
    }
}

TEST_F(FakeContexts, RejectStreamsEventsAndMemoryOfOthers) {
    const DeviceArray<float> x(1);
    const Stream stream;
    const fakert::Event event;
    set_to_one(x.data(), stream);
    const auto expect_refused = [&] {
        EXPECT_EQ(sample::scale(x.data(), 2, 1, stream), cudaErrorInvalidResourceHandle);
        EXPECT_EQ(sample::scale(x.data(), 2, 1, nullptr), cudaErrorInvalidResourceHandle);
        EXPECT_EQ(cudaMemsetAsync(x.data(), 0, 4, stream), cudaErrorInvalidResourceHandle);
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
        EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
        EXPECT_EQ(cudaEventDestroy(event), cudaErrorInvalidResourceHandle);
        EXPECT_EQ(cudaFree(x.data()), cudaErrorInvalidValue);
    };
    {
        const Context other(0);
        expect_refused();
        const DeviceArray<float> y(1);
        const Stream its_stream;
        const fakert::Event its_event;
        set_to_one(y.data(), its_stream);
        EXPECT_EQ(doubled(y.data(), its_stream), 2);
        EXPECT_EQ(cudaEventRecord(event, its_stream), cudaErrorInvalidResourceHandle);
        EXPECT_EQ(cudaEventRecord(its_event, its_stream), cudaSuccess);
        const Context third(0);
        expect_refused();
        EXPECT_EQ(cudaStreamSynchronize(its_stream), cudaErrorInvalidResourceHandle);
    }
    EXPECT_EQ(doubled(x.data(), stream), 2);
    EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
}

TEST_F(FakeContexts, PrimaryContextAcceptsGreenStreams) {
    const DeviceArray<float> x(1);
    const cudaStream_t stream = green_stream();
    set_to_one(x.data(), stream);
    EXPECT_EQ(doubled(x.data(), stream), 2);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST_F(FakeContexts, RejectEventsInStreamsOfOtherDevices) {
    const Stream stream;
    const fakert::Event event;
    EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
    {
        const Stream distant;
        EXPECT_EQ(cudaEventRecord(event, distant), cudaErrorInvalidResourceHandle);
    }
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
}

} // namespace
