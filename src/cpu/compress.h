// SPDX-License-Identifier: Apache-2.0
// 1-bit compression on the CPU: work is cut at leaves, so bits do not depend on the number of threads.
#pragma once
#include "cpu/onebit_kernels.h"
#include "device/step_loops.h"

namespace dsopt::cpu {

/// Packs one leaf of a scale group, after what `added` adds to its compensated values.
void pack_leaf(const OneBitKernels &kernels, const Compression &own, int64_t group, int64_t leaf,
               const Added *added = nullptr);

/// The passes of one exchange.
struct ExchangeRun final : ExchangeLoops {
    const OneBitKernels &kernels;
    const Parallel &parallel;
    Exchange x;
    const dsopt_tensor *list; // a tensor for each scale group; NULL in a step, which reads none
    int64_t last_cache;       // bytes of the last cache: a longer list is written past it

    ExchangeRun(const OneBitKernels &by, const Parallel &on, const Exchange &of, const dsopt_tensor *tensors = nullptr,
                int64_t cache = 0) :
        kernels(by),
        parallel(on),
        x(of),
        list(tensors),
        last_cache(cache) {}
    void run(ExchangePass pass) override;

private:
    void pack(const float *slices, bool adds_list) const;
    void message_scales() const;
    void serve() const;
    void result_scales() const;
    void decode() const;
    void clear_gaps() const;
    void copy_list() const;
    void average_slice() const;
};

} // namespace dsopt::cpu
