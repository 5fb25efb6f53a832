// SPDX-License-Identifier: Apache-2.0
// Own declarations of the parts of HCCL and of Ascend's runtime that are used, so that the build needs no headers.
#pragma once
#include "base/library.h"
#include <cstddef>
#include <cstdint>

namespace dsopt::hccl {

using Communicator = void *; // HcclComm
using Stream = void *;       // aclrtStream
using Current = void *;      // aclrtContext
using Result = int;          // HcclResult, aclError; 0 = success
enum DataType : int { int32 = 2, float32 = 4, uint8 = 7 };
enum Operation : int { sum = 0, max = 2 };
enum Copy : int { to_device = 1, to_host = 2 };
enum StreamStatus : int { complete = 0 };
struct RootInfo {
    char bytes[4108];
};

inline constexpr LibraryNames kLibrary = {"libhccl.so", "HcclGetRootInfo", "DSOPT_HCCL_LIBRARY"},
                              kRuntime = {"libascendcl.so", "aclrtMalloc", "DSOPT_ASCENDCL_LIBRARY"};

struct Api {
    Library hccl, runtime = Library::any(kRuntime);
    Result (*root_info)(RootInfo *info) = hccl.need("HcclGetRootInfo");
    Result (*init)(uint32_t ranks, const RootInfo *info, uint32_t rank,
                   Communicator *comm) = hccl.need("HcclCommInitRootInfo");
    Result (*destroy)(Communicator comm) = hccl.need("HcclCommDestroy");
    Result (*rank_size)(Communicator comm, uint32_t *ranks) = hccl.need("HcclGetRankSize");
    Result (*rank_id)(Communicator comm, uint32_t *rank) = hccl.need("HcclGetRankId");
    Result (*all_reduce)(void *send, void *recv, uint64_t count, DataType type, Operation op, Communicator comm,
                         Stream stream) = hccl.need("HcclAllReduce");
    Result (*all_gather)(void *send, void *recv, uint64_t count, DataType type, Communicator comm,
                         Stream stream) = hccl.need("HcclAllGather");
    Result (*reduce_scatter)(void *send, void *recv, uint64_t count, DataType type, Operation op, Communicator comm,
                             Stream stream) = hccl.need("HcclReduceScatter");
    // Each of these may be NULL.
    Result (*all_to_all)(const void *send, uint64_t count, DataType type, const void *recv, uint64_t recv_count,
                         DataType recv_type, Communicator comm, Stream stream) = hccl.find("HcclAlltoAll");
    Result (*async_error)(Communicator comm, Result *error) = hccl.find("HcclGetCommAsyncError");
    const char *(*error_string)(Result result) = hccl.find("HcclGetErrorString");

    Result (*get_context)(Current *context) = runtime.need("aclrtGetCurrentContext");
    Result (*set_context)(Current context) = runtime.need("aclrtSetCurrentContext");
    Result (*allocate)(void **memory, size_t bytes, int policy) = runtime.need("aclrtMalloc");
    Result (*release)(void *memory) = runtime.need("aclrtFree");
    Result (*copy)(void *to, size_t capacity, const void *from, size_t bytes,
                   Copy direction) = runtime.need("aclrtMemcpy");
    Result (*create_stream)(Stream *stream) = runtime.need("aclrtCreateStream");
    Result (*destroy_stream)(Stream stream) = runtime.need("aclrtDestroyStream");
    Result (*query_stream)(Stream stream, StreamStatus *status) = runtime.need("aclrtStreamQuery");
};

} // namespace dsopt::hccl
