// SPDX-License-Identifier: Apache-2.0
// Tables into device memory without a copy from the host: the bytes travel in the arguments of a kernel, which a stream
// that is being captured accepts too.
#pragma once
#include "plan.cuh"
#include "runtime.h"
#include <cstring>

namespace dsopt::gpu {

constexpr int kWords = 1024; // of a patch: 12 KiB of kernel arguments

struct Patch {
    uint64_t words[kWords];
    uint32_t places[kWords]; // in words
    int32_t count;
};
__global__ void __launch_bounds__(kThreads) patch_kernel(uint64_t *table, GRID_CONSTANT const Patch patch) {
    for (int i = int(threadIdx.x); i < patch.count; i += kThreads) table[patch.places[i]] = patch.words[i];
}

struct Bytes {
    uint64_t words[kWords];
};
__global__ void __launch_bounds__(kThreads) put_kernel(uint64_t *to, GRID_CONSTANT const Bytes bytes, const int count) {
    for (int i = int(threadIdx.x); i < count; i += kThreads) to[i] = bytes.words[i];
}

/// Host bytes (a multiple of 8) to device memory: through kernel arguments when there are few, else through page-locked
/// memory.
inline void upload(void *to, const void *from, size_t bytes, PinnedPool &pool, cudaStream_t stream) {
    constexpr size_t few = 4 * sizeof(Bytes);
    if (bytes > few) {
        if (capturing(stream))
            throw Error(DSOPT_ERR_STATE,
                        "a table of %zu bytes cannot be uploaded while the stream is being captured, %zu can", bytes,
                        few);
        pool.upload(to, from, bytes, stream);
        return;
    }
    for (size_t at = 0; at < bytes; at += sizeof(Bytes)) {
        Bytes piece;
        const size_t here = bytes - at < sizeof piece ? bytes - at : sizeof piece;
        memcpy(piece.words, static_cast<const char *>(from) + at, here);
        check(::gpu::launch("put", put_kernel, 1, kThreads, 0, stream,
                            reinterpret_cast<uint64_t *>(static_cast<char *>(to) + at), piece, int(here / 8)),
              "put");
    }
}

} // namespace dsopt::gpu
