// SPDX-License-Identifier: Apache-2.0
// The line between what a step means (Optimizer) and where it runs. One Backend per kind of memory.
#pragma once
#include "base/function_ref.h"
#include "device/step_loops.h"
#include "device/step_table.h"
#include <memory>

namespace dsopt {

/// Host memory that the device can copy to and from while the host goes on.
using HostBuffer = std::shared_ptr<void>;

/// Backend memory as the host reads it, piece by piece. Where there is a copy to make, the next piece is on its way
/// while the caller works on this one.
class HostReader {
public:
    virtual ~HostReader() = default;
    /// [from, from + bytes) of an array that goes on for `rest` bytes after it. Valid until the next call. `bytes` is
    /// at most 4 MiB.
    virtual const void *view(const void *from, size_t bytes, size_t rest) = 0;
};
/// The other direction: the caller fills buffers that are copied while it fills the next one.
class HostWriter {
public:
    virtual ~HostWriter() = default;
    /// Room for a piece of at most 4 MiB.
    virtual void *room() = 0;
    /// Copies what is in the room to `to`.
    virtual void write(void *to, size_t bytes) = 0;
    virtual void finish() = 0; // all copies have arrived
};
constexpr size_t kPiece = size_t(4) << 20;

/// A factor that the host knows, or one in backend memory.
struct Factor {
    const float *data = nullptr;
    float value = 1;
};

/// What a backend keeps for one optimizer between steps, such as tables in device memory.
class StepCache {
public:
    virtual ~StepCache() = default;
};

class Backend {
public:
    virtual ~Backend() = default;
    virtual const char *name() const = 0;
    /// Memory when the caller brought no allocator. Throws on failure.
    virtual void *allocate(size_t bytes, void *stream) const = 0;
    virtual void release(void *memory, size_t bytes, void *stream) const noexcept = 0;
    /// False for memory that belongs elsewhere: another device's, or the host's only. Slow; for debugging.
    virtual bool owns(const void *pointer) const = 0;
    /// True if the host reads and writes backend memory in place.
    virtual bool is_host() const = 0;
    /// Memory for StepPlan::extra.
    virtual size_t extra_bytes(const StepShape &shape) const = 0;
    virtual std::unique_ptr<StepCache> make_cache() const = 0; // NULL if it keeps nothing
    virtual HostBuffer host_buffer(size_t bytes) const = 0;    // pinned; not for backends that are the host
    /// Calls body(loops) with the loops of a step, which live as long as the call.
    virtual void run_step(const StepPlan &plan, FunctionRef<void(StepLoops &)> body) const = 0;
    /// Times of the phases of the last step, where its outcome does not have them. The step is over.
    virtual void phase_times(StepCache *cache, double *ms) const = 0;
    virtual void clear(void *data, size_t bytes, void *stream) const = 0; // zeros
    // Lists; entries without data are passed over.
    virtual void zero(const dsopt_tensor *list, int64_t count, const Parallel &parallel, void *stream) const = 0;
    /// y = a x + b y in fp32.
    virtual void axpby(const Factor &a, const dsopt_tensor *x, float b, const dsopt_tensor *y, int64_t count,
                       const Parallel &parallel, void *stream) const = 0;
    /// y = the sum of `count` rows of n floats, in their order, `stride` apart. y may be the first row.
    virtual void add_up_rows(const float *rows, int64_t stride, int count, int64_t n, float *y,
                             const Parallel &parallel, void *stream) const = 0;
    virtual void clamp(const dsopt_tensor *list, int64_t count, float limit, const Parallel &parallel,
                       void *stream) const = 0;
    /// A norm as it is before ranks add theirs: its parts, with which finish_norm() makes the result.
    virtual void norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, bool raw,
                      dsopt_norm_result *result, const Parallel &parallel, void *stream) const = 0;
    /// One transition, with what is at `overflow` or, if NULL, what steps recorded.
    virtual void update_scaler(const ScalerRules &rules, ScalerState *state, float *scale, const int32_t *overflow,
                               void *stream) const = 0;
    /// A scaler's words and its scale in stream order.
    virtual void write_scaler(const ScalerState &value, ScalerState *state, float *scale, void *stream) const = 0;
    /// What the next step does to gradients by this schedule, to backend memory. NULL: without the 1-bit family.
    virtual void write_reduction(const ScheduleRules &rules, const ScheduleState *schedule, int32_t *reduction,
                                 void *stream) const = 0;
    // 1-bit compression, compress.h.
    /// Adds the list to the kept sums and packs them into the rows to send. Two levels: copies the list to the message.
    virtual void compress_feed(const ExchangeBuffers &buffers, const dsopt_tensor *list, int64_t count,
                               const Parallel &parallel, void *stream) const = 0;
    /// Averages the rows that all ranks sent, adds what this server owes, and packs its row of results.
    virtual void compress_serve(const ExchangeBuffers &buffers, const Parallel &parallel, void *stream) const = 0;
    /// Writes the means that the rows of results hold to the list.
    virtual void compress_decode(const ExchangeBuffers &buffers, const dsopt_tensor *list, int64_t count,
                                 const Parallel &parallel, void *stream) const = 0;
    /// Two levels: averages this rank's slice over the node, adds it to the kept sums and packs those. With one node it
    /// stops after the average, which is then in the first of the slices.
    virtual void compress_slice(const ExchangeBuffers &buffers, const Parallel &parallel, void *stream) const = 0;
    virtual void copy(void *to, const void *from, size_t bytes, void *stream) const = 0;
    virtual void copy_to_host(void *host, const void *from, size_t bytes, void *stream) const = 0;
    virtual std::unique_ptr<HostReader> reader() const = 0;
    virtual std::unique_ptr<HostWriter> writer() const = 0; // not for backends that are the host
    virtual void copy_from_host(void *to, const void *host, size_t bytes, void *stream) const = 0;
    virtual void synchronize(void *stream) const = 0;
    // For comms.
    /// In stream order, between host and backend memory in any direction.
    virtual void enqueue_copy(void *to, const void *from, size_t bytes, void *stream) const = 0;
    /// Whether everything on `stream` is over. Throws if it failed, and DSOPT_ERR_STATE while it is being captured.
    virtual bool finished(void *stream) const = 0;
    virtual void wait(void *stream) const = 0; // for everything on `stream` and nothing else
    virtual int device() const = 0;
    virtual void on_device(void (*body)(void *), void *argument) const = 0; // with the device current in this thread
};

/// The instruction set that the CPU backend will use: the best of this machine, lowered by DSOPT_ISA.
const char *cpu_isa_name();
std::unique_ptr<Backend> make_cpu_backend();
/// Throws DSOPT_ERR_UNSUPPORTED in a build without CUDA, DSOPT_ERR_MISSING without a driver or device.
std::unique_ptr<Backend> make_cuda_backend(int device);
/// "cuda" where the backend is in the build and a device is there, else why not.
const char *cuda_state();

} // namespace dsopt
