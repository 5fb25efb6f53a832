// SPDX-License-Identifier: Apache-2.0
// What a test sets, and asks, of the fake CUDA runtime. Product code has no use for it.
#pragma once
#include "cuda_runtime.h"
#include <string>
#include <vector>

namespace fakert {

/// When the work of streams runs.
enum class Mode {
    eager,  // at the call
    lazy,   // only when something waits for it: a missing wait gives old data
    random, // as lazy, but every call may also run some of the work, in any order that the streams allow
    threads // a worker for each stream, as on a device: needed where work itself can wait, as collectives do
};

struct Config {
    Mode mode = Mode::lazy;
    uint64_t seed = 1; // of Mode::random
    int devices = 2;
    int multiprocessors = 4; // a few: persistent grids stay small
    int blocks_per_multiprocessor = 2;
    size_t memory = size_t(1) << 40; // of each device, bytes
    bool protect = true;             // device memory can be reached only while work of its device runs
    bool images = true;              // there is code of the kernels for the devices
    bool launches = true;            // else kernels are accepted and forgotten, for what times the host
    bool first_launch_waits =
        false;           // lazy loading: the first launch of a kernel nobody asked about waits for the device
    int capability = 90; // of the devices, major and minor number
    int ptx = 0;         // the PTX version that the kernels' code was compiled from; 0: that of the devices
    int driver = 13000;  // version of the driver
    // Dynamic shared memory above this makes the occupancy query an invalid value, not 0 blocks.
    size_t occupancy_shared = SIZE_MAX;

    // One failing call. -1: none. `fail_function` as "cudaMalloc"; NULL counts all calls; launches are
    // "cudaLaunchKernel".
    long fail_call = -1;
    const char *fail_function = nullptr;
    cudaError_t fail_with = cudaErrorMemoryAllocation;
    // The n-th kernel, as they run, fails and with it the device: every later call returns the error.
    long fail_kernel = -1;
    cudaError_t fail_kernel_with = cudaErrorIllegalAddress;
};
/// The default with what the environment says: CUEMU_MODE (eager, lazy, random, threads), CUEMU_STREAM_SEED,
/// CUEMU_DEVICES, CUEMU_MULTIPROCESSORS, CUEMU_PROTECT (0, 1).
Config config_from_environment();
/// Forgets everything, leaks too, and begins anew. Before the first call it is config_from_environment() that holds.
void reset(const Config &config = config_from_environment());

/// Calls since reset() that could have been made to fail, of one function or of all; kernels run since reset().
long calls(const char *function = nullptr);
long kernels_run();
/// Not given back: device blocks, page-locked blocks, streams, events, graphs.
long live_objects();

/// What was asked of the runtime since mark(). In a captured stream too: what a graph runs later counts as one launch.
struct Counters {
    long kernel_launches, graph_launches;
    long early_launches; // of those kernels that may begin before the one before has ended
    long host_waits; // synchronisations, and what synchronises on the side: cudaFree, pageable and synchronous copies
    long host_queries;
    long copies_to_device, copies_to_host, copies_on_device, fills;
    long device_allocations, device_frees, host_allocations, host_frees;
    long host_functions;
};
void mark();
/// Whether this thread is in the runtime now, and not in what called it.
bool works();
Counters counters();
/// Whether a device has its primary context: from cudaSetDevice() on, or since it was retained, or since any call of the
/// runtime, frees included, in a thread in which no context was current and the device was chosen, or was device 0.
bool has_context(int device);
/// A context of a device that is not the primary one, current in this thread as long as the object lives. Streams, events
/// and device memory belong to the context that was current when they were made, and are refused in others. Such a
/// context has no default stream here.
class Context {
public:
    explicit Context(int device);
    ~Context();
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;
};
/// A non-blocking stream of a green context of the current device: it is used while the primary context is current.
cudaStream_t green_stream();
/// Names of the kernels that ran since mark() and called cudaTriggerProgrammaticLaunchCompletion(), in alphabetical
/// order.
std::vector<std::string> triggering_kernels();
/// Kernels launched since reset() without cudaFuncGetAttributes() before: with lazy loading the driver may wait then.
std::vector<std::string> late_loads();
/// cudaLaunchHostFunc, which also calls drop(argument) once no queue and no graph has it any more: what a library learns
/// by cudaUserObjectCreate and cudaGraphRetainUserObject. `drop` must not call the runtime.
cudaError_t launch_host_function(cudaStream_t stream, cudaHostFn_t function, void *argument, cudaHostFn_t drop);
/// Names of the kernels launched since mark(), in order.
std::vector<std::string> launched_kernels();
/// Nodes of a graph in the order of their capture: "kernel norm", "copy to device", "fill", "host function", "wait".
std::vector<std::string> nodes(cudaGraph_t graph);

} // namespace fakert
