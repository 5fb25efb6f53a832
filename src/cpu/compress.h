// SPDX-License-Identifier: Apache-2.0
// 1-bit compression on the CPU. Work is partitioned into leaves, so results are bitwise identical for any number of
// threads.
#pragma once
#include "cpu/onebit_kernels.h"
#include "device/step_kernels.h"

namespace dsopt::cpu {

/// Adds `added` and the residual to form the compensated values of one leaf of a scale group, then packs the leaf into
/// the messages. `added` NULL: the compensated values are already complete.
void pack_leaf(const OneBitKernels &kernels, const Compression &local, int64_t group, int64_t leaf,
               const FeedInputs *added = nullptr);

/// The passes of one exchange.
struct ExchangeRun final : ExchangeKernels {
    const OneBitKernels &kernels;
    const Parallel &parallel;
    Exchange buffers;
    const dsopt_tensor *list; // one tensor per scale group; NULL in a step, which uses no list
    int64_t last_cache;       // bytes of the last-level cache: longer lists are written with non-temporal stores

    ExchangeRun(const OneBitKernels &its_kernels, const Parallel &its_threads, const Exchange &its_buffers,
                const dsopt_tensor *tensors = nullptr, int64_t cache = 0) :
        kernels(its_kernels),
        parallel(its_threads),
        buffers(its_buffers),
        list(tensors),
        last_cache(cache) {}
    void run(ExchangePass pass) override;

private:
    void pack(const float *slices, bool adds_list) const;
    void message_scales() const;
    void reduce_messages() const;
    void result_scales() const;
    void decode() const;
    void clear_gaps() const;
    void copy_list() const;
    void average_slice() const;
};

} // namespace dsopt::cpu
