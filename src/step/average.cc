// SPDX-License-Identifier: Apache-2.0
#include "step/average.h"
#include "exchange/exchange.h"
#include <algorithm>

namespace dsopt {

void GradientMeans::add(TensorJob &job, float *mean, int64_t padded, const Device &device, void *stream) {
    dsopt_tensor local{mean, job.range.numel, DSOPT_DTYPE_F32, 0};
    if (!job.grad()) {
        device.clear(mean, size_t(job.range.numel) * sizeof(float), stream);
    } else {
        from_[count_] = {job.data[kGrad], job.range.numel, int32_t(job.grad().format), 0};
        to_[count_++] = local;
    }
    if (padded != job.range.numel)
        device.clear(mean + job.range.numel, size_t(padded - job.range.numel) * sizeof(float), stream);
    job.set(kGrad, {mean, Dtype::f32});
    job.zeroes = false;
    local.numel = padded;
    if (run_count_ != 0 && static_cast<float *>(runs_[run_count_ - 1].data) + runs_[run_count_ - 1].numel == mean)
        runs_[run_count_ - 1].numel += padded;
    else
        runs_[run_count_++] = local;
}

void GradientMeans::average(const Context &context, const CommSet &comms, float *scratch,
                            const Execution &execution) const {
    const Device &device = context.device();
    if (count_ != 0) device.kernels().axpby({}, from_, 0, to_, count_, execution.parallel, execution.stream);
    for (int64_t i = 0; i < run_count_; ++i)
        sum_over_ranks(context, comms.data, comms.node, static_cast<float *>(runs_[i].data), runs_[i].numel, scratch,
                       execution.parallel, execution.stream);
    const Factor share{.value = 1.0f / float(data_ranks(comms.data, comms.node))};
    if (run_count_ != 0)
        device.kernels().axpby(share, runs_, 0, runs_, run_count_, execution.parallel, execution.stream);
}

int64_t GradientMeans::longest() const {
    int64_t numel = 0;
    for (int64_t i = 0; i < run_count_; ++i) numel = std::max(numel, runs_[i].numel);
    return numel;
}

void GradientMeans::zero_originals(const Device &device, const Execution &execution) const {
    if (count_ != 0) device.kernels().zero(from_, count_, execution.parallel, execution.stream);
}

} // namespace dsopt
