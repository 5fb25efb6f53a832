// SPDX-License-Identifier: Apache-2.0
// dsopt_comm_all_reduce: a list over the ranks of a comm. Small tensors and those of 16 bits go through a bucket of
// fp32, so that a list of hundreds takes a few collectives and sums are rounded once; large fp32 tensors go as they
// are.
#include "comm/comm.h"
#include "device/device.h"
#include <algorithm>
#include <vector>

namespace dsopt {
namespace {

constexpr int64_t kBucket =
    int64_t(1) << 20; // floats: 4 MiB, a collective for which latency is small, and still in a cache
constexpr int64_t kAlone = int64_t(1) << 18; // fp32 tensors from here on are worth a collective of their own

/// A stretch of a tensor of the list.
dsopt_tensor stretch(const dsopt_tensor &tensor, int64_t begin, int64_t numel) {
    return {static_cast<char *>(tensor.data) + size_t(begin) * dtype_size(tensor.dtype), numel, tensor.dtype, 0};
}

/// What is in the bucket, in order.
class Bucket {
public:
    Bucket(Comm &comm, int64_t capacity, int32_t op, const Factor &factor, void *stream) :
        comm_(comm),
        device_(comm.context()->device()),
        parallel_(comm.context()->parallel()),
        memory_(capacity != 0 ? comm.bucket(capacity, stream) : nullptr),
        capacity_(capacity),
        op_(op),
        factor_(factor),
        stream_(stream) {}

    void add(const dsopt_tensor &tensor) {
        for (int64_t begin = 0; begin < tensor.numel;) {
            if (used_ == capacity_) flush();
            const int64_t numel = std::min(tensor.numel - begin, capacity_ - used_);
            own_.push_back(stretch(tensor, begin, numel));
            places_.push_back({memory_ + used_, numel, DSOPT_DTYPE_F32, 0});
            used_ += numel;
            begin += numel;
        }
    }
    void flush() {
        if (used_ == 0) return;
        const auto count = int64_t(own_.size());
        device_.loops().axpby({}, own_.data(), 0, places_.data(), count, parallel_, stream_);
        comm_.all_reduce(memory_, used_, DSOPT_DTYPE_F32, op_, stream_, Place::backend);
        device_.loops().axpby(factor_, places_.data(), 0, own_.data(), count, parallel_, stream_);
        own_.clear();
        places_.clear();
        used_ = 0;
    }

private:
    Comm &comm_;
    const Device &device_;
    const Parallel parallel_;
    float *memory_;
    int64_t capacity_, used_ = 0;
    int32_t op_;
    Factor factor_;
    void *stream_;
    std::vector<dsopt_tensor> own_, places_;
};

bool goes_alone(const dsopt_tensor &tensor) { return tensor.dtype == DSOPT_DTYPE_F32 && tensor.numel >= kAlone; }

} // namespace

void all_reduce_list(Comm &comm, const dsopt_tensor *list, int64_t count, int32_t op, void *stream) {
    const Device &device = comm.context()->device();
    const int32_t adds = op == DSOPT_OP_MEAN ? DSOPT_OP_SUM : op;
    const Factor factor{.value = op == DSOPT_OP_MEAN ? 1.0f / float(comm.ranks()) : 1.0f};
    comm.all_reduce(nullptr, 0, DSOPT_DTYPE_F32, adds, stream); // says if it is lost, for an empty list too
    if (comm.ranks() == 1) return;
    comm.check_stream(stream); // before the first piece of work is on it
    int64_t together = 0;
    for (int64_t i = 0; i < count; ++i)
        if (list[i].data != nullptr && !goes_alone(list[i])) together += list[i].numel;
    Bucket bucket(comm, std::min(together, kBucket), adds, factor, stream);
    const auto reduce = [&] {
        for (int64_t i = 0; i < count; ++i) {
            if (list[i].data == nullptr || list[i].numel == 0) continue;
            if (!goes_alone(list[i])) {
                bucket.add(list[i]);
                continue;
            }
            comm.all_reduce(list[i].data, list[i].numel, DSOPT_DTYPE_F32, adds, stream, Place::backend);
            if (op == DSOPT_OP_MEAN)
                device.loops().axpby(factor, list + i, 0, list + i, 1, comm.context()->parallel(), stream);
        }
        bucket.flush();
    };
    try {
        reduce();
    } catch (const Error &error) {                                        // ranks may be at different collectives now
        if (error.status() != DSOPT_ERR_STATE) comm.lose(error.status()); // a capture: nothing was enqueued
        throw;
    } catch (const std::exception &) {
        comm.lose(DSOPT_ERR_NOMEM);
        throw;
    }
}

} // namespace dsopt
