// SPDX-License-Identifier: Apache-2.0
// dsopt_mpi_comm_device: memory of emulated devices over the double of MPI. The double copies messages like a
// CUDA-aware MPI. Device memory is protected: any other access of the host ends the program.
#include "mpi_fabric.h"
#include "support/cuda_memory.h"
#include "support/failing_calls.h"
#include "support/rank_faults.h"
#include <array>

using namespace test;

namespace mpi_device_tests {

void copy_between_memories(void *to, const void *from, size_t bytes) {
    EXPECT_EQ(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), cudaSuccess);
}

constexpr int kMostRanks = 3, kDevices = 2;
class DeviceMpiFabric final : public MpiFabric {
public:
    DeviceMpiFabric() { FakeMpi::copy_messages_by(copy_between_memories); }
    ~DeviceMpiFabric() override {
        for (const cudaStream_t stream : streams_) (void)cudaStreamDestroy(stream);
    }
    dsopt_status join(int rank, int timeout_ms, dsopt_context *context, dsopt_comm **comm) override {
        world().enter(rank);
        return dsopt_mpi_comm_device(context, MPI_COMM_WORLD, timeout_ms, comm);
    }
    Context context(int rank) const override {
        return make_context(context_desc(1, DSOPT_BACKEND_CUDA, rank % kDevices));
    }
    int work_factor() const override { return 4; }
    Memory memory(int rank) const override {
        cudaStream_t &stream = streams_[size_t(rank)];
        EXPECT_EQ(cudaSetDevice(rank % kDevices), cudaSuccess);
        if (stream == nullptr) { EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess); }
        return cuda_memory(stream);
    }

private:
    mutable std::array<cudaStream_t, kMostRanks> streams_{};
};

Comm join(Fabric &fabric, int rank, const Context &context) {
    dsopt_comm *comm = nullptr;
    must(fabric.join(rank, 60000, context.get(), &comm));
    return Comm(comm);
}

TEST(MpiDeviceComm, MatchesThreads) {
    DeviceMpiFabric fabric;
    for (const int ranks : {2, 3})
        for (const onebit_run::Setting &setting : onebit_run::settings()) {
            SCOPED_TRACE(onebit_run::name_of(setting) + ", ranks " + std::to_string(ranks));
            const auto wanted = onebit_run::run_threads(setting, ranks);
            fabric.prepare_comm(ranks);
            run_ranks(ranks, [&](int rank) {
                const Memory memory = fabric.memory(rank);
                const Context context = fabric.context(rank);
                const Comm comm = join(fabric, rank, context);
                EXPECT_TRUE(onebit_run::RankTrainer(context.get(), comm.get(), rank, setting, memory).run() ==
                            wanted[size_t(rank)]);
                const dsopt_comm_info info = info_of(comm);
                EXPECT_GE(info.calls_of[DSOPT_COLLECTIVE_ALL_TO_ALL], 4);
                EXPECT_EQ(info.calls_of[DSOPT_COLLECTIVE_ALL_TO_ALL], info.calls_of[DSOPT_COLLECTIVE_ALL_GATHER]);
            });
        }
}

TEST(MpiDeviceComm, AllReduceMatchesHostComm) {
    constexpr size_t kFloats = 5000; // several pieces
    const auto sum = [](Fabric &fabric) {
        std::array<std::string, 3> results;
        fabric.prepare_comm(3);
        run_ranks(3, [&](int rank) {
            const Memory memory = fabric.memory(rank);
            const Context context = fabric.context(rank);
            const Comm comm = join(fabric, rank, context);
            std::vector<float> values(kFloats);
            for (size_t i = 0; i < kFloats; ++i)
                values[i] =
                    std::ldexp(std::sin(float(i + 1) * float(rank + 3)), int(i * 7 + size_t(rank) * 5) % 40 - 20);
            const Block block(memory, kFloats * sizeof(float));
            block.set(values.data());
            const dsopt_tensor tensor = {block.data(), kFloats, DSOPT_DTYPE_F32, 0};
            for (const int32_t op : {DSOPT_OP_MEAN, DSOPT_OP_SUM, DSOPT_OP_MAX})
                EXPECT_EQ(dsopt_comm_all_reduce(comm.get(), &tensor, 1, op, memory.stream), DSOPT_OK)
                    << dsopt_last_error();
            results[size_t(rank)] = block.text();
        });
        return results;
    };
    MpiFabric host;
    DeviceMpiFabric device;
    EXPECT_EQ(sum(device), sum(host));
}

TEST(MpiDeviceComm, ReturnsStatusIfOtherRankUsesHostMemory) {
    DeviceMpiFabric fabric;
    fabric.prepare_comm(2);
    run_ranks(2, [&](int rank) {
        const Memory memory = fabric.memory(rank);
        const Context context = fabric.context(rank);
        dsopt_comm *made = nullptr;
        must(rank == 0 ? fabric.MpiFabric::join(rank, 60000, context.get(), &made)
                       : fabric.join(rank, 60000, context.get(), &made));
        const Comm comm(made);
        const Block block(memory, std::string(64, '\0'));
        const dsopt_tensor tensor = {block.data(), 16, DSOPT_DTYPE_F32, 0};
        EXPECT_EQ(dsopt_comm_all_reduce(comm.get(), &tensor, 1, DSOPT_OP_SUM, memory.stream), DSOPT_ERR_COMM);
        EXPECT_NE(std::strstr(dsopt_last_error(), "different"), nullptr) << dsopt_last_error();
    });
}

TEST(MpiDeviceComm, RejectsCpuContext) {
    MpiFabric fabric;
    fabric.prepare_comm(1);
    dsopt_comm *comm = nullptr;
    const Context context = fabric.context(0);
    must(fabric.join(0, 1000, context.get(), &comm));
    dsopt_comm_destroy(comm);
    comm = nullptr;
    EXPECT_EQ(dsopt_mpi_comm_device(context.get(), MPI_COMM_WORLD, 1000, &comm), DSOPT_ERR_UNSUPPORTED);
    EXPECT_NE(std::strstr(dsopt_last_error(), "needs a CUDA context"), nullptr) << dsopt_last_error();
    EXPECT_EQ(comm, nullptr);
    EXPECT_EQ(dsopt_mpi_comm_device(context.get(), MPI_COMM_WORLD, -2, &comm), DSOPT_ERR_ARGUMENT);
}

TEST(MpiDeviceComm, RejectsCaptureAndStaysUsable) {
    DeviceMpiFabric fabric;
    fabric.prepare_comm(2);
    run_ranks(2, [&](int rank) {
        const Memory memory = fabric.memory(rank);
        const Context context = fabric.context(rank);
        const Comm comm = join(fabric, rank, context);
        const Block block(memory, std::string(64, '\0'));
        const dsopt_tensor tensor = {block.data(), 16, DSOPT_DTYPE_F32, 0};
        const auto reduce = [&] { return dsopt_comm_all_reduce(comm.get(), &tensor, 1, DSOPT_OP_SUM, memory.stream); };
        EXPECT_EQ(reduce(), DSOPT_OK) << dsopt_last_error();
        const auto stream = static_cast<cudaStream_t>(memory.stream);
        EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        EXPECT_EQ(reduce(), DSOPT_ERR_STATE);
        cudaGraph_t graph = nullptr;
        EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        (void)cudaGraphDestroy(graph);
        EXPECT_EQ(reduce(), DSOPT_OK) << dsopt_last_error();
    });
}

/// A context that counts releases of memory that was passed to MPI.
struct Watched {
    std::atomic<int> released{0};
    Context context;
    explicit Watched(int device) {
        dsopt_context_desc desc = context_desc(1, DSOPT_BACKEND_CUDA, device);
        desc.user = this;
        desc.allocate = [](void *, size_t bytes, size_t, void *) -> void * {
            void *memory = nullptr;
            return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : nullptr;
        };
        desc.release = [](void *user, void *memory, size_t bytes, void *) {
            static_cast<Watched *>(user)->released += FakeMpi::was_passed(memory, bytes);
            EXPECT_EQ(cudaFree(memory), cudaSuccess);
        };
        context = make_context(desc);
    }
};

/// MPI may still write to the memory of a failed call. So that memory is not released, whichever MPI call failed.
TEST(MpiDeviceComm, LeaksMemoryThatMpiMayStillUse) {
    DeviceMpiFabric fabric;
    bool failed = true;
    int64_t calls = 0;
    for (; failed && calls < 1000; ++calls) {
        fabric.prepare_comm(2);
        std::array<dsopt_status, 2> statuses{};
        static std::vector<std::unique_ptr<Watched>> never_freed; // leaked memory refers to its context
        std::array<Watched *, 2> watched{};
        for (int rank = 0; rank < 2; ++rank)
            watched[size_t(rank)] = never_freed.emplace_back(std::make_unique<Watched>(rank)).get();
        run_ranks(2, [&](int rank) {
            const Memory memory = fabric.memory(rank);
            Comm comm = join(fabric, rank, watched[size_t(rank)]->context);
            onebit_run::Setting setting;
            setting.sizes = {700, 33};
            setting.freeze_step = 1;
            onebit_run::RankTrainer trainer(watched[size_t(rank)]->context.get(), comm.get(), rank, setting, memory);
            must(trainer.step(1));
            if (rank == 0) fabric.fail_at(calls + 1);
            statuses[size_t(rank)] = trainer.step(2); // a step that exchanges
            if (rank == 0) fabric.fail_at(0);
            EXPECT_EQ(info_of(comm).status, statuses[size_t(rank)]);
        });
        failed = statuses[0] != DSOPT_OK;
        for (size_t rank = 0; rank < 2; ++rank) {
            watched[rank]->context.reset();
            if (failed && statuses[rank] != DSOPT_OK) {
                EXPECT_EQ(statuses[rank], DSOPT_ERR_COMM);
                EXPECT_EQ(watched[rank]->released, 0) << "rank " << rank << ", call " << calls + 1;
            }
            if (!failed) { EXPECT_GT(watched[rank]->released, 0) << "of a comm that did not fail"; }
        }
    }
    EXPECT_GT(calls, 10) << "calls of MPI in an exchange";
    EXPECT_FALSE(failed);
}

TEST(MpiDeviceFaults, ReturnStatusAndNewCommSucceeds) {
    DeviceMpiFabric fabric;
    fail_each_call(fabric, DSOPT_ALGORITHM_ADAMW, true);
}

TEST(RankFaults, ReturnStatusInBoundedTime) {
    std::vector<std::unique_ptr<Fabric>> fabrics;
    for (int i = 0; i < 2; ++i) fabrics.push_back(std::make_unique<DeviceMpiFabric>());
    run_all_rank_faults(fabrics, 1, kMostRanks, true);
}

} // namespace mpi_device_tests
