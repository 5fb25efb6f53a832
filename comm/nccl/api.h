// SPDX-License-Identifier: Apache-2.0
// Own declarations of the part of NCCL's ABI that is used, so that the build needs no header. The ABI has been stable
// since 2.4. tests/doubles/nccl/abi_check.cc compares these declarations with <nccl.h> if it is installed.
#pragma once
#include "base/library.h"
#include <cstddef>

namespace dsopt::nccl {

using Communicator = void *; // ncclComm_t
using Stream = void *;       // cudaStream_t
using Result = int;          // ncclResult_t
enum : Result { success = 0, remote_error = 6, in_progress = 7 };
enum DataType : int { uint8 = 1, int32 = 2, float32 = 7, float64 = 8 };
enum Operation : int { sum = 0, max = 2 };
struct UniqueId {
    char bytes[128];
};
/// Layout of 2.14. Later libraries read the size and the version, and use defaults for members added later.
struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21400;
    int blocking = 0;
    int padding = 0;
};

struct Api {
    Library library;
    Result (*get_unique_id)(UniqueId *id) = library.need("ncclGetUniqueId");
    Result (*init)(Communicator *comm, int ranks, UniqueId id, int rank) = library.need("ncclCommInitRank");
    Result (*destroy)(Communicator comm) = library.need("ncclCommDestroy");
    Result (*abort)(Communicator comm) = library.need("ncclCommAbort");
    Result (*async_error)(Communicator comm, Result *error) = library.need("ncclCommGetAsyncError");
    Result (*count)(Communicator comm, int *ranks) = library.need("ncclCommCount");
    Result (*user_rank)(Communicator comm, int *rank) = library.need("ncclCommUserRank");
    Result (*device)(Communicator comm, int *device) = library.need("ncclCommCuDevice");
    const char *(*error_string)(Result result) = library.need("ncclGetErrorString");
    Result (*all_reduce)(const void *send, void *recv, size_t count, DataType type, Operation op, Communicator comm,
                         Stream stream) = library.need("ncclAllReduce");
    Result (*all_gather)(const void *send, void *recv, size_t count, DataType type, Communicator comm,
                         Stream stream) = library.need("ncclAllGather");
    Result (*reduce_scatter)(const void *send, void *recv, size_t count, DataType type, Operation op, Communicator comm,
                             Stream stream) = library.need("ncclReduceScatter");
    Result (*group_start)() = library.need("ncclGroupStart");
    Result (*group_end)() = library.need("ncclGroupEnd");
    // NULL before 2.7.
    Result (*send)(const void *data, size_t count, DataType type, int peer, Communicator comm,
                   Stream stream) = library.find("ncclSend");
    Result (*recv)(void *data, size_t count, DataType type, int peer, Communicator comm,
                   Stream stream) = library.find("ncclRecv");
    // NULL before 2.13.
    const char *(*last_error)(Communicator comm) = library.find("ncclGetLastError");
    // NULL before 2.14.
    Result (*init_config)(Communicator *comm, int ranks, UniqueId id, int rank,
                          Config *config) = library.find("ncclCommInitRankConfig");
    Result (*finalize)(Communicator comm) = library.find("ncclCommFinalize");
};

inline constexpr LibraryNames kLibrary = {"libnccl.so.2", "ncclGetUniqueId", "DSOPT_NCCL_LIBRARY", "nvidia-nccl-cu13"};

} // namespace dsopt::nccl
