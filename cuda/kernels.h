// SPDX-License-Identifier: Apache-2.0
// Host functions of each .cu file. They launch its kernels, in stream order. One function per file loads its kernels.
#pragma once
#include "base/function_ref.h"
#include "device/kernels.h"
#include "device_plan.h"
#include "launcher.h"

namespace dsopt::gpu {

// upload.cu. The functions that launch its kernels are declared in launcher.h and table.h.
void load_upload_kernels(KernelLoader &load);

// one_thread.cu
void run_in_one_thread(const OneThreadFunction &function, const Launcher &launcher);
void load_one_thread_kernels(KernelLoader &load);

// lists.cu. These functions implement the methods of DeviceKernels with the same names.
void for_elements(const ElementOp &op, const dsopt_tensor *x, const dsopt_tensor *y, int64_t count,
                  const Launcher &launcher);
void norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, bool raw, dsopt_norm_result *result,
          const Launcher &launcher);
void load_list_kernels(KernelLoader &load);

// inspect.cu
// In these and the functions of update.cu, DevicePlan::tail says what the last kernel's last block does, and `next` what
// follows in the stream.
/// Launches pass 1.
void inspect(const DevicePlan &d, Next next, const Launcher &launcher);
/// Folds the results of pass 1 in several kernels or, if ranks have `completed` them, of several ranks.
void fold(const DevicePlan &d, bool completed, Next next, const Launcher &launcher);
/// Completes pass 1: see decide_kernel.
void decide(const DevicePlan &d, bool folds, bool decides, Next next, const Launcher &launcher);
void load_inspect_kernels(KernelLoader &load);

// update.cu
void update(const DevicePlan &d, Next next, const Launcher &launcher);
void update_weights(const DevicePlan &d, Next next, const Launcher &launcher);
// Phases in kernels of their own.
void find_trust(const DevicePlan &d, Next next, const Launcher &launcher);
void find_shared_trust(const DevicePlan &d, Next next, const Launcher &launcher);
void finish(const DevicePlan &d, Next next, const Launcher &launcher);
void load_update_kernels(KernelLoader &load);

// stored.cu: the same for tensors with TensorJob::stored.
void update_stored(const DevicePlan &d, Next next, const Launcher &launcher);
void update_stored_weights(const DevicePlan &d, Next next, const Launcher &launcher);
void load_stored_kernels(KernelLoader &load);

// compress.cu
/// Launches one pass of an exchange. The layout and the list are in device memory; a step has no list.
void run_pass(ExchangePass pass, const Exchange &exchange, const dsopt_tensor *list, const Launcher &launcher);
/// Implements DeviceKernels::run_exchange().
void run_exchange(const Exchange &buffers, const dsopt_tensor *list, int64_t count, const Launcher &launcher,
                  FunctionRef<void(ExchangeKernels &)> body);
void load_compress_kernels(KernelLoader &load);

// onebit.cu
/// Calls body() with the kernels of the 1-bit family. `plan` has host pointers, `d` has device pointers. `jobs` and
/// `layout` are in device memory; `layout` is only used if OneBitPlan::has_peers.
void with_onebit_kernels(const StepPlan &plan, const DevicePlan &d, const DevicePlan &sent, const OneBitJob *jobs,
                         void *layout, const Launcher &launcher, FunctionRef<void(OneBitStepKernels &)> body);
void load_onebit_kernels(KernelLoader &load);

// matrices.cu
class Lt;
/// Calls body() with the kernels of matrices. `plan` has host pointers, `d` and `table` have device pointers.
void with_matrix_kernels(const StepPlan &plan, const DevicePlan &d, const StepTable &table, Lt &lt,
                         const Launcher &launcher, FunctionRef<void(MatrixStepKernels &)> body);
size_t matrix_workspace_bytes(const MatrixBatch &batch);
void load_matrix_kernels(KernelLoader &load);

// step.cc
size_t device_workspace_bytes(const StepShape &shape);
std::unique_ptr<StepCache> make_cache(const Gpu &gpu);
/// `lt`: NULL unless the plan has matrices.
void run_step(const StepPlan &plan, Lt *lt, const Launcher &launcher, FunctionRef<void(StepKernels &)> body);

} // namespace dsopt::gpu
