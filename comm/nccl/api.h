// SPDX-License-Identifier: Apache-2.0
// The part of NCCL's ABI that is used, in our own words: it has been stable since 2.4, and no header is needed to
// build. tests/doubles/nccl/abi_check.cc compares it with <nccl.h> where there is one.
#pragma once
#include "comm/library.h"
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
/// As in 2.14. Later libraries read the size and the version, and take defaults for what came after.
struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21400;
    int blocking = 0;
    int padding = 0;
};

struct Api {
    Result (*get_unique_id)(UniqueId *id);
    Result (*init)(Communicator *comm, int ranks, UniqueId id, int rank);
    Result (*init_config)(Communicator *comm, int ranks, UniqueId id, int rank, Config *config); // or NULL: before 2.14
    Result (*finalize)(Communicator comm);                                                       // likewise
    Result (*destroy)(Communicator comm);
    Result (*abort)(Communicator comm);
    Result (*async_error)(Communicator comm, Result *error);
    Result (*count)(Communicator comm, int *ranks);
    Result (*user_rank)(Communicator comm, int *rank);
    Result (*device)(Communicator comm, int *device);
    const char *(*error_string)(Result result);
    const char *(*last_error)(Communicator comm); // or NULL: before 2.13
    Result (*all_reduce)(const void *send, void *recv, size_t count, DataType type, Operation op, Communicator comm,
                         Stream stream);
    Result (*all_gather)(const void *send, void *recv, size_t count, DataType type, Communicator comm, Stream stream);
    Result (*group_start)();
    Result (*group_end)();
    Result (*send)(const void *data, size_t count, DataType type, int peer, Communicator comm,
                   Stream stream); // or NULL: before 2.7
    Result (*recv)(void *data, size_t count, DataType type, int peer, Communicator comm, Stream stream); // likewise

    explicit Api(const Library &library) {
        library.need(get_unique_id, "ncclGetUniqueId");
        library.need(init, "ncclCommInitRank");
        library.find(init_config, "ncclCommInitRankConfig");
        library.find(finalize, "ncclCommFinalize");
        library.need(destroy, "ncclCommDestroy");
        library.need(abort, "ncclCommAbort");
        library.need(async_error, "ncclCommGetAsyncError");
        library.need(count, "ncclCommCount");
        library.need(user_rank, "ncclCommUserRank");
        library.need(device, "ncclCommCuDevice");
        library.need(error_string, "ncclGetErrorString");
        library.find(last_error, "ncclGetLastError");
        library.need(all_reduce, "ncclAllReduce");
        library.need(all_gather, "ncclAllGather");
        library.need(group_start, "ncclGroupStart");
        library.need(group_end, "ncclGroupEnd");
        library.find(send, "ncclSend");
        library.find(recv, "ncclRecv");
    }
};

inline constexpr const char *kSoname = "libnccl.so.2", *kKnown = "ncclGetUniqueId", *kVariable = "DSOPT_NCCL_LIBRARY";

} // namespace dsopt::nccl
