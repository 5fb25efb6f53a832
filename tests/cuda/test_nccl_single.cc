// SPDX-License-Identifier: Apache-2.0
// One rank with the real NCCL, as far as one GPU allows: communicators are created, used, captured, finalized and
// aborted. A build with the emulated device and the double of the library rehearses this test.
#include "dsopt.h"
#include "runtime.h"
#include "support/cuda_memory.h"
#include "support/expect.h"
#include "support/handles.h"
#include "support/numbers.h"
#include <vector>

namespace {

class NcclSingle : public testing::Test {
protected:
    void SetUp() override {
        cuda_test::begin_test();
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = DSOPT_BACKEND_CUDA;
        EXPECT_OK(dsopt_context_create(&context_desc, &context));
        ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    }
    void TearDown() override {
        EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
        dsopt_context_destroy(context);
        cuda_test::end_test();
    }
    dsopt_comm *join(int32_t flags) const {
        size_t bytes = 0;
        EXPECT_OK(dsopt_comm_unique_id(DSOPT_COMM_KIND_NCCL, nullptr, &bytes));
        std::vector<char> id(bytes);
        EXPECT_OK(dsopt_comm_unique_id(DSOPT_COMM_KIND_NCCL, id.data(), &bytes));
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = DSOPT_COMM_KIND_NCCL;
        desc.ranks = 1;
        desc.id = id.data();
        desc.id_bytes = id.size();
        desc.timeout_ms = 60000;
        desc.flags = flags;
        dsopt_comm *comm = nullptr;
        EXPECT_OK(dsopt_comm_create(context, &desc, &comm));
        return comm;
    }
    dsopt_context *context = nullptr;
    cudaStream_t stream = nullptr;
};

constexpr int64_t kNumel = 5000;

const test::Memory &device_memory() {
    static const test::Memory memory = test::cuda_memory(nullptr);
    return memory;
}

struct Floats : test::Block {
    explicit Floats(float value) : Block(device_memory(), size_t(kNumel) * sizeof(float), 0) {
        const std::vector<float> all(size_t(kNumel), value);
        Block::set(static_cast<const void *>(all.data()));
    }
    dsopt_tensor tensor() const { return {data(), kNumel, DSOPT_DTYPE_F32, 0}; }
    float last() const {
        const std::string bytes = text();
        float value;
        std::memcpy(&value, bytes.data() + (kNumel - 1) * sizeof value, sizeof value);
        return value;
    }
};

TEST_F(NcclSingle, MeanOverOneRankIsIdentity) {
    for (const int32_t flags : {0, int32_t(DSOPT_COMM_FLAG_ENQUEUE)}) {
        dsopt_comm *const comm = join(flags);
        const Floats values(3.5f);
        const dsopt_tensor list[] = {values.tensor()};
        EXPECT_OK(dsopt_comm_all_reduce(comm, list, 1, DSOPT_OP_MEAN, stream));
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        EXPECT_EQ(values.last(), 3.5f);
        dsopt_comm_destroy(comm);
    }
}

TEST_F(NcclSingle, StepWithNormOverCommCanBeReplayed) {
    dsopt_comm *const comm = join(DSOPT_COMM_FLAG_ENQUEUE);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.data = comm;
    desc.max_norm = 1;
    dsopt_optimizer *optimizer = nullptr;
    EXPECT_OK(dsopt_optimizer_create(context, &desc, &optimizer));
    const Floats weights(1.0f), gradients(0.5f);
    dsopt_param param{};
    param.tensor = weights.tensor();
    dsopt_group group;
    EXPECT_OK(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    EXPECT_OK(dsopt_optimizer_add_group(optimizer, &group, &param, 1));
    const dsopt_tensor grads[] = {gradients.tensor()};
    DSOPT_NEW(dsopt_step, step);
    step.grads = grads;
    step.count = 1;
    step.stream = stream;
    EXPECT_OK(dsopt_optimizer_step(optimizer, &step));
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const float first = weights.last();
    EXPECT_LT(first, 1.0f);

    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_OK(dsopt_optimizer_step(optimizer, &step));
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    EXPECT_EQ(weights.last(), first) << "a capture runs nothing";
    for (int i = 0; i < 3; ++i) ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_LT(weights.last(), first);
    // Graphs with nodes of NCCL must be destroyed before its communicator.
    EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    dsopt_optimizer_destroy(optimizer);
    dsopt_comm_destroy(comm);
}

TEST_F(NcclSingle, AbortedCommRejectsCalls) {
    dsopt_comm *const comm = join(0);
    dsopt_comm_abort(comm);
    const Floats values(3.5f);
    const dsopt_tensor list[] = {values.tensor()};
    EXPECT_NE(dsopt_comm_all_reduce(comm, list, 1, DSOPT_OP_MEAN, stream), DSOPT_OK);
    dsopt_comm_destroy(comm);
}

} // namespace
