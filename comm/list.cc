// SPDX-License-Identifier: Apache-2.0
// dsopt_comm_all_reduce: reduces a list over the ranks of a comm. Small fp32 tensors and 16-bit tensors are packed into
// an fp32 bucket, so that a list of hundreds of tensors takes a few collectives and sums are rounded once. Large fp32
// tensors are reduced in place.
#include "comm/comm.h"
#include "device/device.h"
#include <algorithm>
#include <vector>

namespace dsopt {
namespace {

// Number of floats in the bucket: 4 MiB, large enough to hide latency and small enough for a cache.
constexpr int64_t kBucket = int64_t(1) << 20;
// Minimum size of an fp32 tensor that gets a collective of its own.
constexpr int64_t kUnbucketed = int64_t(1) << 18;

bool bypasses_bucket(const dsopt_tensor &tensor) {
    return tensor.dtype == DSOPT_DTYPE_F32 && tensor.numel >= kUnbucketed;
}

} // namespace

void all_reduce_list(Comm &comm, const dsopt_tensor *list, int64_t count, int32_t op, void *stream) {
    const DeviceKernels &kernels = comm.context()->device().kernels();
    const Parallel parallel = comm.context()->parallel();
    const int32_t reduction = op == DSOPT_OP_MEAN ? DSOPT_OP_SUM : op;
    const Factor factor{.value = op == DSOPT_OP_MEAN ? 1.0f / float(comm.ranks()) : 1.0f};
    // throws if the comm is unusable, also for an empty list
    comm.all_reduce(nullptr, 0, DSOPT_DTYPE_F32, reduction, stream);
    if (comm.ranks() == 1) return;
    comm.check_stream(stream, Place::backend); // before any work is enqueued
    int64_t capacity = 0, packed_count = 0;    // elements of the bucket, and tensors that are packed
    int64_t largest_unbucketed = 0;            // elements of the largest other tensor
    for (int64_t i = 0; i < count; ++i) {
        if (list[i].data == nullptr) continue;
        if (bypasses_bucket(list[i])) {
            largest_unbucketed = std::max(largest_unbucketed, list[i].numel);
        } else {
            capacity += list[i].numel;
            ++packed_count;
        }
    }
    capacity = std::min(capacity, kBucket);
    float *const bucket = capacity != 0 ? comm.bucket(capacity, stream) : nullptr;
    int64_t used = 0;
    std::vector<dsopt_tensor> slices, packed; // the slices of tensors that are in the bucket, and their copies there
    // Nothing is allocated after the first collective.
    for (auto *entries : {&slices, &packed}) entries->reserve(size_t(packed_count) + 1);
    comm.reserve({.all_reduce = std::max(capacity, largest_unbucketed) * int64_t(sizeof(float))}, stream,
                 Place::backend);

    const auto flush = [&] {
        if (used == 0) return;
        kernels.axpby({}, slices.data(), 0, packed.data(), int64_t(packed.size()), parallel, stream);
        comm.all_reduce(bucket, used, DSOPT_DTYPE_F32, reduction, stream, Place::backend);
        kernels.axpby(factor, packed.data(), 0, slices.data(), int64_t(packed.size()), parallel, stream);
        slices.clear();
        packed.clear();
        used = 0;
    };
    comm.unusable_on_failure([&] {
        for (int64_t i = 0; i < count; ++i) {
            const dsopt_tensor &tensor = list[i];
            if (tensor.data == nullptr) continue;
            if (bypasses_bucket(tensor)) {
                comm.all_reduce(tensor.data, tensor.numel, DSOPT_DTYPE_F32, reduction, stream, Place::backend);
                if (op == DSOPT_OP_MEAN) kernels.axpby(factor, &tensor, 0, &tensor, 1, parallel, stream);
                continue;
            }
            for (int64_t begin = 0, numel = 0; begin < tensor.numel; begin += numel) {
                if (used == capacity) flush();
                numel = std::min(tensor.numel - begin, capacity - used);
                char *const data = static_cast<char *>(tensor.data) + size_t(begin) * dtype_size(tensor.dtype);
                slices.push_back({data, numel, tensor.dtype, 0});
                packed.push_back({bucket + used, numel, DSOPT_DTYPE_F32, 0});
                used += numel;
            }
        }
        flush();
    });
}

} // namespace dsopt
