// SPDX-License-Identifier: Apache-2.0
// Owners of device memory and streams for tests.
#pragma once
#include "fakert.h"
#include <gtest/gtest.h>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#define EMULATION_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define EMULATION_TSAN 1
#endif
#endif

namespace fakert {

template <class T> class DeviceArray {
public:
    explicit DeviceArray(size_t count) : count_(count) {
        EXPECT_EQ(cudaMalloc(&data_, count * sizeof(T)), cudaSuccess);
    }
    explicit DeviceArray(const std::vector<T> &host) : DeviceArray(host.size()) {
        EXPECT_EQ(cudaMemcpy(data_, host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
    }
    ~DeviceArray() { (void)cudaFree(data_); }
    DeviceArray(const DeviceArray &) = delete;
    DeviceArray &operator=(const DeviceArray &) = delete;

    T *data() const { return data_; }
    size_t bytes() const { return count_ * sizeof(T); }
    /// Copies to the host after a synchronization with the whole device.
    std::vector<T> get() const {
        std::vector<T> host(count_);
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuemu::last_error();
        EXPECT_EQ(cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost), cudaSuccess);
        return host;
    }

private:
    T *data_ = nullptr;
    size_t count_;
};

class Stream {
public:
    explicit Stream(unsigned flags = cudaStreamNonBlocking) {
        EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, flags), cudaSuccess);
    }
    ~Stream() { (void)cudaStreamDestroy(stream_); }
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;
    operator cudaStream_t() const { return stream_; }

private:
    cudaStream_t stream_ = nullptr;
};

class Event {
public:
    explicit Event(unsigned flags = cudaEventDisableTiming) {
        EXPECT_EQ(cudaEventCreateWithFlags(&event_, flags), cudaSuccess);
    }
    ~Event() { (void)cudaEventDestroy(event_); }
    Event(const Event &) = delete;
    Event &operator=(const Event &) = delete;
    operator cudaEvent_t() const { return event_; }

private:
    cudaEvent_t event_ = nullptr;
};

} // namespace fakert
