// SPDX-License-Identifier: Apache-2.0
// A step in parts on CUDA: the order of streams, what is launched, and captures. The bits are those of the unit tests
// of folder parts. These tests need the emulated device, which runs work only when something waits for it.
#include "backend_optimizer.h"

using namespace cuda_test;

namespace cuda_parts_tests {

class CudaParts : public Cuda {
protected:
    static Setting setting(bool early) {
        Setting s;
        s.sizes = {5, 4100, 0, 9000};
        if (early)
            s.desc.flags = DSOPT_OPTIMIZER_EARLY_UPDATE;
        else
            s.desc.max_norm = 0.5;
        return s;
    }
    static dsopt_status ready(const BackendOptimizer &side, int64_t param, cudaStream_t stream = nullptr) {
        DSOPT_NEW(dsopt_ready, ready);
        ready.first = param;
        ready.count = 1;
        ready.grads = &side.gradients[size_t(param)];
        ready.stream = stream;
        return dsopt_optimizer_ready(side.optimizer, &ready);
    }
    static dsopt_status end(const BackendOptimizer &side, cudaStream_t stream = nullptr) {
        DSOPT_NEW(dsopt_step, step);
        step.count = int64_t(side.gradients.size());
        step.flags = DSOPT_STEP_READY;
        step.stream = stream;
        return dsopt_optimizer_step(side.optimizer, &step);
    }
    static dsopt_status all(const BackendOptimizer &side, cudaStream_t stream = nullptr) {
        for (int64_t i = int64_t(side.gradients.size()); i-- > 0;)
            if (const dsopt_status status = ready(side, i, stream); status != DSOPT_OK) return status;
        return end(side, stream);
    }
    static std::vector<std::vector<char>> weights(const BackendOptimizer &side) {
        std::vector<std::vector<char>> list;
        for (const Bytes &param : side.params) list.push_back(param.get());
        return list;
    }
};

class Streams {
public:
    Streams() {
        for (cudaStream_t &stream : streams_)
            EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    }
    ~Streams() {
        for (cudaStream_t stream : streams_) (void)cudaStreamDestroy(stream);
    }
    Streams(const Streams &) = delete;
    Streams &operator=(const Streams &) = delete;
    cudaStream_t operator[](size_t i) const { return streams_[i % std::size(streams_)]; }

private:
    cudaStream_t streams_[3]{};
};

// Each gradient is written on the stream of its call, directly before it.
TEST_F(CudaParts, AreOrderedAfterEveryStreamThatBroughtGradients) {
    for (const bool early : {false, true}) {
        const Setting s = setting(early);
        BackendOptimizer whole(true, s), divided(true, s);
        const Streams streams;
        for (int t = 0; t < 3; ++t) {
            whole.fill_gradients(t);
            ASSERT_OK(whole.step());
            divided.fill_gradients(7);
            std::vector<std::vector<char>> values;
            for (const Bytes &gradient : whole.grads) values.push_back(gradient.get());
            for (size_t i = s.sizes.size(); i-- > 0;) {
                if (!values[i].empty()) {
                    ASSERT_EQ(cudaMemcpyAsync(divided.grads[i].data(), values[i].data(), values[i].size(),
                                              cudaMemcpyHostToDevice, streams[i]),
                              cudaSuccess);
                }
                ASSERT_OK(ready(divided, int64_t(i), streams[i]));
            }
            ASSERT_OK(end(divided, streams[size_t(t)]));
            // A stream that is ordered after everything reads the weights.
            ASSERT_OK(dsopt_optimizer_wait(divided.optimizer, 0, int64_t(s.sizes.size()), streams[size_t(t) + 1]));
            ASSERT_EQ(cudaStreamSynchronize(streams[size_t(t) + 1]), cudaSuccess);
            EXPECT_EQ(weights(divided), weights(whole)) << t << (early ? ", early" : "");
        }
    }
}

TEST_F(CudaParts, NeedNoWaitAllocationOrUploadAfterTheFirstStep) {
    for (const bool early : {false, true}) {
        BackendOptimizer side(true, setting(early));
        side.fill_gradients(0);
        ASSERT_OK(all(side));
        ASSERT_OK(all(side));
        fakert::mark();
        ASSERT_OK(all(side));
        // The tensor without elements needs no launch.
        const std::vector<std::string> clipped = {"inspect", "inspect", "inspect", "fold_pieces", "update"},
                                       updated = {"update", "update", "update", "finish"};
        EXPECT_EQ(fakert::launched_kernels(), early ? updated : clipped);
        const fakert::Counters c = fakert::counters();
        EXPECT_EQ(c.host_waits + c.device_allocations + c.copies_to_device + c.copies_to_host + c.host_allocations, 0);
    }
}

TEST_F(CudaParts, AreCapturedTogether) {
    for (const bool early : {false, true}) {
        const Setting s = setting(early);
        BackendOptimizer whole(true, s), divided(true, s);
        const Streams streams;
        whole.fill_gradients(3);
        divided.fill_gradients(3);
        ASSERT_OK(whole.step());
        ASSERT_OK(all(divided, streams[0])); // allocates
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        ASSERT_EQ(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeRelaxed), cudaSuccess);
        ASSERT_OK(all(divided, streams[0]));
        ASSERT_EQ(cudaStreamEndCapture(streams[0], &graph), cudaSuccess);
        ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
        for (int t = 0; t < 5; ++t) {
            ASSERT_OK(whole.step());
            ASSERT_EQ(cudaGraphLaunch(executable, streams[0]), cudaSuccess);
        }
        ASSERT_OK(whole.step());
        ASSERT_OK(all(divided, streams[0]));
        ASSERT_EQ(cudaStreamSynchronize(streams[0]), cudaSuccess);
        EXPECT_EQ(weights(divided), weights(whole));
        (void)cudaGraphExecDestroy(executable);
        (void)cudaGraphDestroy(graph);
    }
}

} // namespace cuda_parts_tests
