// SPDX-License-Identifier: Apache-2.0
// dsopt_comm_all_reduce of lists in device memory: staged through a LOCAL comm, by NCCL, in stream order, and in a
// graph. The bits are the same as on the CPU.
#include "fakert.h"
#include "nccl_device.h"
#include <array>

namespace nccl_test {
namespace nccl_lists_tests {

constexpr int kRanks = 2;

struct Entry {
    int64_t numel;
    int32_t dtype;
};
// Small tensors of each dtype, one that is large enough for a separate collective, and an empty one.
const std::vector<Entry> kEntries{{7, DSOPT_DTYPE_F32},       {700, DSOPT_DTYPE_F16}, {0, DSOPT_DTYPE_F32},
                                  {1 << 18, DSOPT_DTYPE_F32}, {33, DSOPT_DTYPE_BF16}, {5, DSOPT_DTYPE_F32}};
size_t bytes_of_entry(const Entry &entry) { return size_t(entry.numel) * (entry.dtype == DSOPT_DTYPE_F32 ? 4 : 2); }

/// Returns bit patterns of small numbers.
Bytes content(int rank, size_t t, int round) {
    const Entry &entry = kEntries[t];
    Bytes bytes(bytes_of_entry(entry));
    for (int64_t i = 0; i < entry.numel; ++i) {
        const auto k = uint32_t(i * 7 + rank * 13 + round * 5 + int(t));
        if (entry.dtype == DSOPT_DTYPE_F32) {
            const float value = float(int(k % 61) - 30) / 8;
            std::memcpy(&bytes[size_t(i) * 4], &value, 4);
        } else {
            const auto bits =
                uint16_t(((entry.dtype == DSOPT_DTYPE_F16 ? 0x3c00 : 0x3f80) + k % 64) | (k % 2 != 0 ? 0x8000 : 0));
            std::memcpy(&bytes[size_t(i) * 2], &bits, 2);
        }
    }
    return bytes;
}

dsopt_comm *local_comm(dsopt_context *context, const std::array<char, 16> &id, int rank) {
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = DSOPT_COMM_KIND_LOCAL;
    desc.rank = rank;
    desc.ranks = kRanks;
    desc.timeout_ms = 60000;
    desc.id = id.data();
    desc.id_bytes = id.size();
    dsopt_comm *comm = nullptr;
    onebit_run::must(dsopt_comm_create(context, &desc, &comm));
    return comm;
}
std::array<char, 16> local_id() {
    std::array<char, 16> id{};
    size_t bytes = id.size();
    onebit_run::must(dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, id.data(), &bytes));
    return id;
}

using Lists = std::vector<Bytes>;
/// Returns the result of rank 0 on the CPU; the other ranks get the same.
Lists on_cpu_threads(int32_t op, int round) {
    std::vector<Lists> all(kRanks);
    const std::array<char, 16> id = local_id();
    run_ranks(kRanks, [&](int rank) {
        dsopt_context *context = nullptr;
        onebit_run::must(dsopt_context_create(nullptr, &context));
        dsopt_comm *const comm = local_comm(context, id, rank);
        Lists contents;
        std::vector<dsopt_tensor> list;
        for (size_t t = 0; t < kEntries.size(); ++t) contents.push_back(content(rank, t, round));
        for (size_t t = 0; t < kEntries.size(); ++t)
            list.push_back({contents[t].data(), kEntries[t].numel, kEntries[t].dtype, 0});
        onebit_run::must(dsopt_comm_all_reduce(comm, list.data(), int64_t(list.size()), op, nullptr));
        all[size_t(rank)] = contents;
        dsopt_comm_destroy(comm);
        dsopt_context_destroy(context);
    });
    EXPECT_TRUE(all[0] == all[1]);
    return all[0];
}

/// The list of one rank on its device.
class DeviceList {
public:
    explicit DeviceList(int rank) : rank_(rank) {
        for (const Entry &entry : kEntries) {
            void *data = nullptr;
            EXPECT_EQ(cudaMalloc(&data, bytes_of_entry(entry) + 1), cudaSuccess);
            list.push_back({data, entry.numel, entry.dtype, 0});
        }
        list.push_back({nullptr, 99, DSOPT_DTYPE_F16, 0});
    }
    ~DeviceList() {
        for (const dsopt_tensor &tensor : list) (void)cudaFree(tensor.data);
    }
    DeviceList(const DeviceList &) = delete;
    DeviceList &operator=(const DeviceList &) = delete;
    void fill(int round) {
        for (size_t t = 0; t < kEntries.size(); ++t) {
            const Bytes bytes = content(rank_, t, round);
            if (bytes.empty()) continue;
            EXPECT_EQ(cudaMemcpy(list[t].data, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), cudaSuccess);
        }
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    dsopt_status reduce(dsopt_comm *comm, int32_t op, cudaStream_t stream) {
        return dsopt_comm_all_reduce(comm, list.data(), int64_t(list.size()), op, stream);
    }
    Lists get(cudaStream_t stream) {
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        Lists all;
        for (size_t t = 0; t < kEntries.size(); ++t) {
            Bytes bytes(bytes_of_entry(kEntries[t]));
            if (!bytes.empty()) {
                EXPECT_EQ(cudaMemcpy(bytes.data(), list[t].data, bytes.size(), cudaMemcpyDeviceToHost), cudaSuccess);
            }
            all.push_back(bytes);
        }
        return all;
    }
    std::vector<dsopt_tensor> list;

private:
    int rank_;
};

constexpr int32_t kOps[] = {DSOPT_OP_SUM, DSOPT_OP_MEAN, DSOPT_OP_MAX};

TEST(NcclAllReduce, MatchesCpuWithAndWithoutEnqueueFlag) {
    std::vector<Lists> wanted;
    for (int round = 0; round < 3; ++round) wanted.push_back(on_cpu_threads(kOps[round], round));
    for (const uint32_t flags : {uint32_t(0), uint32_t(DSOPT_COMM_FLAG_ENQUEUE)}) {
        const std::string id = new_id();
        run_ranks(kRanks, [&](int rank) {
            const Device device(id, rank, kRanks, 60000, flags);
            DeviceList lists(rank);
            for (int round = 0; round < 3; ++round) {
                lists.fill(round);
                onebit_run::must(lists.reduce(device.comm, kOps[round], device.stream));
                EXPECT_TRUE(lists.get(device.stream) == wanted[size_t(round)]) << "rank " << rank << " op " << round;
            }
            DSOPT_NEW(dsopt_comm_info, info);
            onebit_run::must(dsopt_comm_query(device.comm, &info));
            EXPECT_EQ(info.calls, 6) << "one bucket and one large tensor each";
        });
    }
}

TEST(NcclAllReduce, LocalCommReducesDeviceMemory) {
    const Lists wanted = on_cpu_threads(DSOPT_OP_MEAN, 1);
    const std::array<char, 16> id = local_id();
    run_ranks(kRanks, [&](int rank) {
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = DSOPT_BACKEND_CUDA;
        context_desc.device = rank;
        dsopt_context *context = nullptr;
        onebit_run::must(dsopt_context_create(&context_desc, &context));
        dsopt_comm *const comm = local_comm(context, id, rank);
        cudaStream_t stream = nullptr;
        EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        {
            DeviceList lists(rank);
            lists.fill(1);
            // The call is staged through host memory, so it fails before any work is captured.
            cudaGraph_t graph = nullptr;
            EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
            EXPECT_EQ(lists.reduce(comm, DSOPT_OP_MEAN, stream), DSOPT_ERR_STATE) << dsopt_last_error();
            EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
            (void)cudaGraphDestroy(graph);
            onebit_run::must(lists.reduce(comm, DSOPT_OP_MEAN, stream));
            EXPECT_TRUE(lists.get(stream) == wanted) << "rank " << rank;
        }
        (void)cudaStreamDestroy(stream);
        dsopt_comm_destroy(comm);
        dsopt_context_destroy(context);
    });
}

TEST(NcclAllReduce, RejectsCaptureBeforeBucketIsAllocated) {
    const std::string id = new_id();
    const Lists wanted = on_cpu_threads(DSOPT_OP_SUM, 0);
    run_ranks(kRanks, [&](int rank) {
        const Device device(id, rank, kRanks, 60000, DSOPT_COMM_FLAG_ENQUEUE);
        DeviceList lists(rank);
        lists.fill(0);
        cudaGraph_t graph = nullptr;
        EXPECT_EQ(cudaStreamBeginCapture(device.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        EXPECT_EQ(lists.reduce(device.comm, DSOPT_OP_SUM, device.stream), DSOPT_ERR_STATE) << dsopt_last_error();
        EXPECT_EQ(cudaStreamEndCapture(device.stream, &graph), cudaSuccess);
        (void)cudaGraphDestroy(graph);
        onebit_run::must(lists.reduce(device.comm, DSOPT_OP_SUM, device.stream)); // the comm is still usable
        EXPECT_TRUE(lists.get(device.stream) == wanted) << "rank " << rank;
    });
}

// The bucket is allocated in stream order, in a graph too. The emulated device has no allocation nodes, so this list
// has only large tensors.
TEST(NcclAllReduce, GraphMatchesPlainCalls) {
    constexpr size_t large = 3;
    const std::string id = new_id();
    std::vector<Lists> wanted;
    for (int round = 0; round < 3; ++round) wanted.push_back(on_cpu_threads(DSOPT_OP_SUM, round));
    run_ranks(kRanks, [&](int rank) {
        const Device device(id, rank, kRanks, 60000, DSOPT_COMM_FLAG_ENQUEUE);
        DeviceList lists(rank);
        lists.fill(0);
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        EXPECT_EQ(cudaStreamBeginCapture(device.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        EXPECT_EQ(dsopt_comm_all_reduce(device.comm, &lists.list[large], 1, DSOPT_OP_SUM, device.stream), DSOPT_OK)
            << dsopt_last_error();
        EXPECT_EQ(cudaStreamEndCapture(device.stream, &graph), cudaSuccess);
        EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        for (int round = 0; round < 3; ++round) {
            lists.fill(round);
            EXPECT_EQ(cudaGraphLaunch(exec, device.stream), cudaSuccess);
            EXPECT_TRUE(lists.get(device.stream)[large] == wanted[size_t(round)][large])
                << "rank " << rank << " replay " << round;
        }
        (void)cudaGraphExecDestroy(exec);
        (void)cudaGraphDestroy(graph);
    });
}

} // namespace nccl_lists_tests
} // namespace nccl_test
