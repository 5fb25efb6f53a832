// SPDX-License-Identifier: Apache-2.0
// A device's kernels: for steps, for lists, for scalars in its memory, for compression. Everything is enqueued in
// stream order.
#pragma once
#include "base/function_ref.h"
#include "device/one_thread.h"
#include "device/step_cache.h"
#include "device/step_kernels.h"
#include "device/step_table.h"
#include <memory>
#include <variant>

namespace dsopt {

/// A factor in backend memory if `data` is not NULL, else `value`.
struct Factor {
    const float *data = nullptr;
    float value = 1;
};

// Element-wise operations on lists.
struct Zero {};
/// y = a x + b y in fp32.
struct Axpby {
    Factor a;
    float b;
};
struct Clamp {
    float limit;
};
/// y = x, byte by byte. Both have the same dtype.
struct Copy {};
/// y = share * (x + x' + x'' ...) of `count` arrays, each `stride` bytes after the one before, in fp32 and in order.
struct SumRows {
    int64_t stride;
    int count;
    float share;
};
using ElementOp = std::variant<Zero, Axpby, Clamp, Copy, SumRows>;

class DeviceKernels {
public:
    virtual ~DeviceKernels() = default;
    // Steps.
    /// Returns the size of Execution::device_workspace in bytes.
    virtual size_t device_workspace_bytes(const StepShape &shape) const = 0;
    virtual std::unique_ptr<StepCache> make_cache() const = 0;
    /// Throws UNSUPPORTED or MISSING if the device cannot multiply matrices.
    virtual void check_matrices() const = 0;
    /// Returns the memory for one batch, on up to `threads` threads.
    virtual MatrixSizes matrix_sizes(const MatrixBatch &batch, int threads) const = 0;
    /// Calls body(kernels) with the kernels of a step, which are valid during the call.
    virtual void run_step(const StepPlan &plan, FunctionRef<void(StepKernels &)> body) const = 0;
    // Lists. Entries without data are ignored.
    /// Applies one operation to every element. Lists of one operand are passed twice.
    virtual void for_elements(const ElementOp &op, const dsopt_tensor *x, const dsopt_tensor *y, int64_t count,
                              const Parallel &parallel, void *stream) const = 0;
    void zero(const dsopt_tensor *list, int64_t count, const Parallel &parallel, void *stream) const {
        for_elements(Zero{}, list, list, count, parallel, stream);
    }
    void axpby(const Factor &a, const dsopt_tensor *x, float b, const dsopt_tensor *y, int64_t count,
               const Parallel &parallel, void *stream) const {
        for_elements(Axpby{a, b}, x, y, count, parallel, stream);
    }
    void copy(const dsopt_tensor *x, const dsopt_tensor *y, int64_t count, const Parallel &parallel,
              void *stream) const {
        for_elements(Copy{}, x, y, count, parallel, stream);
    }
    void clamp(const dsopt_tensor *list, int64_t count, float limit, const Parallel &parallel, void *stream) const {
        for_elements(Clamp{limit}, list, list, count, parallel, stream);
    }
    /// Computes a norm. `raw`: result->norm is this rank's sum of squares or largest magnitude, and finish_norm()
    /// computes the norm after ranks have combined their values.
    virtual void norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, bool raw,
                      dsopt_norm_result *result, const Parallel &parallel, void *stream) const = 0;
    /// Calls the function in one thread of the device.
    virtual void run_in_one_thread(const OneThreadFunction &function, void *stream) const = 0;
    /// Calls body(kernels) with the kernels of an exchange of this list, without an optimizer. They are valid during
    /// the call.
    virtual void run_exchange(const Exchange &buffers, const dsopt_tensor *list, int64_t count,
                              const Parallel &parallel, void *stream,
                              FunctionRef<void(ExchangeKernels &)> body) const = 0;
};

} // namespace dsopt
