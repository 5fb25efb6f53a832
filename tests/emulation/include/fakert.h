// SPDX-License-Identifier: Apache-2.0
// Controls of the fake CUDA runtime for tests. Product code does not use them.
#pragma once
#include "cuda_runtime.h"
#include <string>
#include <vector>

/// Memory that the host may read and write while no work of the device is in progress. For tests: the engine must not
/// allocate managed memory.
extern "C" cudaError_t cudaMallocManaged(void **memory, size_t bytes, unsigned flags);

namespace fakert {

/// When the work of streams runs.
enum class Mode {
    eager,  // at the call
    lazy,   // only if something waits for it: a missing wait reads old data
    random, // as lazy, but each call may also run some of the work, in any order that the streams allow
    threads // a worker per stream, as on a device: needed if work itself can wait, as collectives do
};

struct Config {
    Mode mode = Mode::lazy;
    uint64_t seed = 1; // for Mode::random
    int devices = 2;
    int multiprocessors = 4; // a small number, so that persistent grids stay small
    int blocks_per_multiprocessor = 2;
    size_t memory = size_t(1) << 40; // bytes per device
    bool protect = true;             // device memory is accessible only while work of its device runs
    bool images = true;              // the program has code of the kernels for the devices
    bool launches = true;            // false: launches are accepted and kernels do not run, for timing the host
    // Lazy loading: the first launch of a kernel waits for the device, unless the kernel was queried before.
    bool first_launch_waits = false;
    int capability = 90; // of the devices: major and minor number
    int ptx = 0;         // PTX version from which the kernels' code was compiled; 0: the devices' version
    int driver = 13000;  // version of the driver; 0: there is none
    int runtime = 13000; // version of the runtime, which refuses an earlier driver
    // For more dynamic shared memory than this, the occupancy query returns an error instead of 0 blocks.
    size_t occupancy_shared = SIZE_MAX;

    // Index of the call that fails, among calls of `fail_function` (such as "cudaMalloc"; NULL: of all functions); -1:
    // none. Launches count as "cudaLaunchKernel".
    long fail_call = -1;
    const char *fail_function = nullptr;
    cudaError_t fail_with = cudaErrorMemoryAllocation;
    // The n-th kernel that runs fails, and the device with it: every later call returns the error.
    long fail_kernel = -1;
    cudaError_t fail_kernel_with = cudaErrorIllegalAddress;
};
/// Returns the defaults, changed by the environment: CUEMU_MODE (eager, lazy, random, threads), CUEMU_STREAM_SEED,
/// CUEMU_DEVICES, CUEMU_MULTIPROCESSORS, CUEMU_CAPABILITY, CUEMU_PROTECT (0, 1). CUEMU_KEYS=0: memory is protected as on a processor
/// without protection keys.
Config config_from_environment();
/// Resets all state, leaked objects too. Before the first reset, config_from_environment() is in effect.
void reset(const Config &config = config_from_environment());

/// Returns the number of calls since reset() that can be configured to fail, of one function or of all.
long calls(const char *function = nullptr);
/// Returns the number of kernels that ran since reset().
long kernels_run();
/// Returns the number of objects not released: device blocks, page-locked blocks, streams, events, graphs.
long live_objects();

/// Calls to the runtime since mark(). Calls in a captured stream count too; a launch of a graph counts once.
struct Counters {
    long kernel_launches, graph_launches;
    long early_launches; // kernels that may begin before the preceding kernel has ended
    long host_waits;     // synchronizations, also implicit ones: cudaFree, pageable and synchronous copies
    long host_queries;
    long copies_to_device, copies_to_host, copies_on_device, fills;
    long device_allocations, device_frees, host_allocations, host_frees;
    long host_functions;
};
void mark();
/// Returns true while this thread is inside a call of the runtime.
bool in_runtime_call();
Counters counters();
/// Returns true if the primary context of a device exists. It is created by cudaSetDevice(), by retaining it, or by any
/// runtime call (also a free) of a thread that has no current context and uses that device (device 0 by default).
bool has_context(int device);
/// A non-primary context of a device, current in this thread during the object's lifetime. Streams, events and device
/// memory belong to the context that was current when they were created, and are refused in others. Such a context has
/// no default stream here.
class Context {
public:
    explicit Context(int device);
    ~Context();
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;
};
/// Creates a non-blocking stream of a green context of the current device. It is used with the primary context current.
cudaStream_t green_stream();
/// Returns the names of the kernels that ran since mark() and called cudaTriggerProgrammaticLaunchCompletion(), in
/// alphabetical order.
std::vector<std::string> triggering_kernels();
/// Returns the kernels that were launched since reset() without an earlier cudaFuncGetAttributes(): with lazy loading,
/// the driver may wait at such a launch.
std::vector<std::string> late_loads();
/// Same as cudaLaunchHostFunc, but also calls drop(argument) when no queue and no graph refers to the argument any
/// more. A library gets this with cudaUserObjectCreate and cudaGraphRetainUserObject. `drop` must not call the runtime.
cudaError_t launch_host_function(cudaStream_t stream, cudaHostFn_t function, void *argument, cudaHostFn_t drop);
/// Returns the names of the kernels launched since mark(), in order.
std::vector<std::string> launched_kernels();
/// Returns the nodes of a graph in capture order: "kernel norm", "copy to device", "fill", "host function", "wait".
std::vector<std::string> nodes(cudaGraph_t graph);

} // namespace fakert
