// SPDX-License-Identifier: Apache-2.0
// dsopt_mpi_comm_device over an MPI of this machine, with an emulated device. Its memory is host memory, which any MPI
// accepts. Every rank is a process: run.sh. A rank on which an expectation fails exits with 1.
#define DSOPT_MPI_PIECE 4096
#include "doubles/shard_run.h"
#include "dsopt_mpi.h"
#include "support/cuda_memory.h"
#include "support/onebit_run.h"
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

namespace {

using test::must;

int rank = 0, ranks = 1;
void expect(bool holds, const std::string &what) {
    if (!holds) throw std::runtime_error("not " + what + "; last error: " + dsopt_last_error());
}

test::Comm world(const test::Context &context, int timeout_ms = 60000) {
    dsopt_comm *comm = nullptr;
    must(dsopt_mpi_comm_device(context.get(), MPI_COMM_WORLD, timeout_ms, &comm));
    return test::Comm(comm);
}

void all_reduce(const test::Context &context, const test::Memory &memory) {
    const test::Comm comm = world(context);
    const std::vector<float> values(5000, float(rank + 1)), sums(5000, float(ranks * (ranks + 1) / 2));
    const test::Block block(memory, values.size() * sizeof(float));
    block.set(values.data());
    const dsopt_tensor tensor = {block.data(), 5000, DSOPT_DTYPE_F32, 0};
    must(dsopt_comm_all_reduce(comm.get(), &tensor, 1, DSOPT_OP_SUM, memory.stream));
    expect(std::memcmp(block.text().data(), sums.data(), block.bytes()) == 0, "the sum over the ranks");
}

/// The 1-bit family must give the same bits as with ranks on threads, in every call.
void onebit(const test::Context &context, const test::Memory &memory) {
    for (onebit_run::Setting setting : onebit_run::settings()) {
        setting.calls = 8;
        const test::Comm comm = world(context);
        const auto wanted = onebit_run::run_threads(setting, ranks)[size_t(rank)];
        expect(onebit_run::RankTrainer(context.get(), comm.get(), rank, setting, memory).run() == wanted,
               "the bits of ranks that are threads: " + onebit_run::name_of(setting));
    }
}

void shard(const test::Context &context, const test::Memory &memory) {
    const test::Comm comm = world(context);
    shard_run::expect_bits_of_one_rank(context.get(), comm.get(), rank, ranks, memory);
}

/// Runs last, because MPI_Finalize may wait for pending operations. Rank 0 waits until the others have received a
/// status.
void rank_that_hangs(const test::Context &context, const test::Memory &memory) {
    MPI_Barrier(MPI_COMM_WORLD); // creating the comm has the same time-out
    test::Comm comm = world(context, 10000);
    int nothing = 0;
    for (int other = 1; rank == 0 && other < ranks; ++other)
        MPI_Recv(&nothing, 1, MPI_INT, other, 77, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    const test::Block block(memory, std::string(64, '\0'));
    const dsopt_tensor tensor = {block.data(), 16, DSOPT_DTYPE_F32, 0};
    expect(dsopt_comm_all_reduce(comm.get(), &tensor, 1, DSOPT_OP_SUM, memory.stream) == DSOPT_ERR_TIMEOUT,
           "a time-out");
    comm.reset();
    if (rank != 0) MPI_Send(&nothing, 1, MPI_INT, 0, 77, MPI_COMM_WORLD);
}

} // namespace

int main(int argc, char **argv) {
    int level = 0;
    if (MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS) return 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    try {
        const test::Context context = test::make_context(test::context_desc(1, DSOPT_BACKEND_CUDA));
        expect(cudaSetDevice(0) == cudaSuccess, "a device");
        cudaStream_t stream = nullptr;
        expect(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "a stream");
        const test::Memory memory = test::cuda_memory(stream);
        all_reduce(context, memory);
        onebit(context, memory);
        shard(context, memory);
        rank_that_hangs(context, memory);
    } catch (const std::exception &error) {
        std::printf("rank %d, line 0: not as expected: %s\n", rank, error.what());
        std::fflush(stdout);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    std::printf("rank finished\n");
    std::fflush(stdout);
    MPI_Barrier(MPI_COMM_WORLD);
    (void)poll(nullptr, 0, 200); // time for launchers to forward the output of ranks
    MPI_Abort(MPI_COMM_WORLD, 0);
}
