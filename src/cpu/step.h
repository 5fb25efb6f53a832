// SPDX-License-Identifier: Apache-2.0
// A step on the CPU: each call of the driver runs synchronously, on all threads.
#pragma once
#include "base/function_ref.h"
#include "cpu/caches.h"
#include "cpu/kernels.h"
#include "cpu/newton_schulz.h"
#include "device/kernels.h"

namespace dsopt::cpu {

void run_step(const StepPlan &plan, const Kernels &kernels, const Products &products, const CacheSizes &caches,
              FunctionRef<void(StepKernels &)> body);

} // namespace dsopt::cpu
