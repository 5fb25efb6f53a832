// SPDX-License-Identifier: Apache-2.0
// The parts of HCCL and of Ascend's runtime that are used, in our own words: no header is needed to build.
#pragma once
#include "comm/library.h"
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

struct Api {
    Result (*root_info)(RootInfo *info);
    Result (*init)(uint32_t ranks, const RootInfo *info, uint32_t rank, Communicator *comm);
    Result (*destroy)(Communicator comm);
    Result (*rank_size)(Communicator comm, uint32_t *ranks);
    Result (*rank_id)(Communicator comm, uint32_t *rank);
    Result (*all_reduce)(void *send, void *recv, uint64_t count, DataType type, Operation op, Communicator comm,
                         Stream s);
    Result (*all_gather)(void *send, void *recv, uint64_t count, DataType type, Communicator comm, Stream stream);
    Result (*all_to_all)(const void *send, uint64_t count, DataType type, const void *recv, uint64_t recv_count,
                         DataType recv_type, Communicator comm, Stream stream); // or NULL
    Result (*async_error)(Communicator comm, Result *error);                    // or NULL
    const char *(*error_string)(Result result);                                 // or NULL

    Result (*get_context)(Current *context);
    Result (*set_context)(Current context);
    Result (*allocate)(void **memory, size_t bytes, int policy);
    Result (*release)(void *memory);
    Result (*copy)(void *to, size_t room, const void *from, size_t bytes, Copy direction);
    Result (*create_stream)(Stream *stream);
    Result (*destroy_stream)(Stream stream);
    Result (*query_stream)(Stream stream, StreamStatus *status);

    Api(const Library &hccl, const Library &runtime) {
        hccl.need(root_info, "HcclGetRootInfo");
        hccl.need(init, "HcclCommInitRootInfo");
        hccl.need(destroy, "HcclCommDestroy");
        hccl.need(rank_size, "HcclGetRankSize");
        hccl.need(rank_id, "HcclGetRankId");
        hccl.need(all_reduce, "HcclAllReduce");
        hccl.need(all_gather, "HcclAllGather");
        hccl.find(all_to_all, "HcclAlltoAll");
        hccl.find(async_error, "HcclGetCommAsyncError");
        hccl.find(error_string, "HcclGetErrorString");
        runtime.need(get_context, "aclrtGetCurrentContext");
        runtime.need(set_context, "aclrtSetCurrentContext");
        runtime.need(allocate, "aclrtMalloc");
        runtime.need(release, "aclrtFree");
        runtime.need(copy, "aclrtMemcpy");
        runtime.need(create_stream, "aclrtCreateStream");
        runtime.need(destroy_stream, "aclrtDestroyStream");
        runtime.need(query_stream, "aclrtStreamQuery");
    }
};

inline constexpr const char *kName = "libhccl.so", *kKnown = "HcclGetRootInfo", *kVariable = "DSOPT_HCCL_LIBRARY";
inline constexpr const char *kRuntimeName = "libascendcl.so", *kRuntimeKnown = "aclrtMalloc",
                            *kRuntimeVariable = "DSOPT_ASCENDCL_LIBRARY";

} // namespace dsopt::hccl
