// SPDX-License-Identifier: Apache-2.0
// What the host calls of each .cu file: functions that launch its kernels, in stream order, and one that loads them.
#pragma once
#include "base/function_ref.h"
#include "device/loops.h"
#include "device_plan.h"
#include "launcher.h"

namespace dsopt::gpu {

// upload.cu; what launches its kernels is declared in launcher.h and table.h.
void load_upload_kernels(KernelLoader &load);

// one_thread.cu
void run_in_one_thread(const OneThreadFunction &function, const Launcher &launcher);
void load_one_thread_kernels(KernelLoader &load);

// lists.cu, as Loops has them.
void for_elements(const ElementOp &op, const dsopt_tensor *x, const dsopt_tensor *y, int64_t count,
                  const Launcher &launcher);
void add_up_rows(const float *rows, int64_t stride, int count, int64_t n, float *y, const Launcher &launcher);
void norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, bool raw, dsopt_norm_result *result,
          const Launcher &launcher);
void load_list_kernels(KernelLoader &load);

// inspect.cu
/// Pass 1. `decides`: the last block also decides.
void inspect(const DevicePlan &d, bool decides, const Launcher &launcher);
/// Does what is left of pass 1, as Step::inspect() and Step::decide() ask.
void decide(const DevicePlan &d, bool folds, bool decides, const Launcher &launcher);
void load_inspect_kernels(KernelLoader &load);

// update.cu
void update(const DevicePlan &d, const Launcher &launcher);
/// Trust ratios of tensors that model ranks share.
void share_trust(const DevicePlan &d, const Launcher &launcher);
void update_weights(const DevicePlan &d, const Launcher &launcher);
void load_update_kernels(KernelLoader &load);

// compress.cu
/// One pass of an exchange whose layout, and list, are in device memory. A step has no list.
void run_pass(ExchangePass pass, const Exchange &x, const dsopt_tensor *list, const Launcher &launcher);
/// As Loops has it.
void run_exchange(const Exchange &buffers, const dsopt_tensor *list, int64_t count, const Launcher &launcher,
                  FunctionRef<void(ExchangeLoops &)> body);
void load_compress_kernels(KernelLoader &load);

// onebit.cu
/// Calls body(loops of the 1-bit family). `plan` as the host has it, `d` as kernels do. `jobs`, `layout`: in device
/// memory; `layout` is read only if OneBitPlan::exchanges.
void with_onebit_loops(const StepPlan &plan, const DevicePlan &d, const OneBitJob *jobs, void *layout,
                       const Launcher &launcher, FunctionRef<void(OneBitLoops &)> body);
void load_onebit_kernels(KernelLoader &load);

// step.cc
size_t extra_bytes(const StepShape &shape);
std::unique_ptr<StepCache> make_cache(const Gpu &gpu);
void run_step(const StepPlan &plan, const Launcher &launcher, FunctionRef<void(StepLoops &)> body);

} // namespace dsopt::gpu
