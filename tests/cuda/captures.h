// SPDX-License-Identifier: Apache-2.0
// Captures of other threads, which calls of the engine must not invalidate.
#pragma once
#include "runtime.h"
#include <barrier>
#include <thread>

namespace cuda_test {

/// Runs body() while another thread captures, in mode `mode`, a stream that was created with `flags`.
template <class Body> void during_capture(cudaStreamCaptureMode mode, unsigned flags, const Body &body) {
    std::barrier barrier(2);
    std::thread other([&] {
        cudaStream_t stream = nullptr;
        cudaGraph_t graph = nullptr;
        EXPECT_EQ(cudaStreamCreateWithFlags(&stream, flags), cudaSuccess);
        EXPECT_EQ(cudaStreamBeginCapture(stream, mode), cudaSuccess);
        barrier.arrive_and_wait();
        barrier.arrive_and_wait();
        EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess) << "the capture was invalidated";
        (void)cudaGraphDestroy(graph);
        (void)cudaStreamDestroy(stream);
    });
    barrier.arrive_and_wait();
    body();
    barrier.arrive_and_wait();
    other.join();
}
/// Runs body() during a capture in global mode, which calls of any thread can invalidate.
template <class Body> void during_global_capture(const Body &body) {
    during_capture(cudaStreamCaptureModeGlobal, cudaStreamNonBlocking, body);
}

} // namespace cuda_test
