// SPDX-License-Identifier: Apache-2.0
// The fake runtime: configuration, faults and counters, devices, launches, errors.
#include "fake_cudart.h"
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <set>

namespace fakert {
namespace {

constexpr size_t kShared = size_t(48) << 10, kSharedOptin = size_t(227) << 10;

struct CallCount {
    const char *function;
    long count;
};
struct LaunchedKernel {
    const char *name; // names of launches are constant
};
struct SharedMemoryLimit { // of a kernel, for dynamic shared memory
    const void *function;
    size_t bytes;
};
std::vector<CallCount> g_calls;
std::vector<LaunchedKernel> g_launched, g_late;
std::set<const void *> g_loaded, g_early;
std::vector<SharedMemoryLimit> g_shared_limits;
std::vector<bool> g_contexts; // devices with a primary context
std::vector<int> g_others;    // devices of the contexts that are not primary
std::vector<LaunchedKernel> g_triggering;
long g_all_calls = 0;
bool g_begun = false;  // a call was made
bool g_forked = false; // this process was created by fork() after a call
thread_local cudaError_t t_last = cudaSuccess;
struct Current {
    int device, context;
    bool bound;
};
// Contexts that were current before a push. An array, which has no destructor: static objects may free device memory
// at the end of the process, after thread-local variables of the main thread were destroyed.
thread_local std::array<Current, 64> t_pushed_contexts;
thread_local size_t t_pushed = 0;

long count_call(const char *function) {
    for (CallCount &known : g_calls) // nearly always the same string
        if (known.function == function) return known.count++;
    for (CallCount &known : g_calls)
        if (!std::strcmp(known.function, function)) return known.count++;
    g_calls.push_back({function, 1});
    return 0;
}

struct OwnedCall : KernelCall { // owns the arguments
    explicit OwnedCall(const KernelCall &call) : KernelCall(call) {}
    OwnedCall(OwnedCall &&other) noexcept : KernelCall(other) { other.data = nullptr; }
    OwnedCall &operator=(OwnedCall &&) = delete;
    ~OwnedCall() {
        if (data) drop(data);
    }
};
class Kernel final : public Task {
public:
    Kernel(OwnedCall &&call, int device) :
        Task(std::string("kernel ") + call.launch.name, call.launch.early),
        call_(std::move(call)),
        device_(device) {}

    void prepare(Run &run) override {
        run.first = early && g_early.insert(call_.function).second;
        run.key = memory_key(device_);
    }
    cudaError_t check() override {
        return g_kernels_run++ == g_config.fail_kernel ? g_config.fail_kernel_with : cudaSuccess;
    }
    void begin(Run &run) override {
        // Device memory is inaccessible to an early kernel until it waits for the preceding kernel. At the first launch
        // of a kernel, several of its blocks begin early. At later launches one block does, and without protection keys
        // it may read old values, because changing the page protection is slow.
        bool hidden = false;
        if (run.first) {
            const Lock lock;
            hidden = hide(device_);
        }
        const cuemu::MemoryRights before = cuemu::MemoryRights::current();
        before.without(run.key).apply();
        run.early = std::make_unique<cuemu::EarlyGrid>(call_.launch, call_.body, call_.data, run.first ? 4 : 1);
        before.apply();
        if (!hidden) return;
        const Lock lock;
        show(device_);
    }
    cudaError_t run(Run &run) override {
        if (early && !run.early) begin(run);
        const bool ran = early ? run.early->finish(run.triggered)
                               : cuemu::run_grid(call_.launch, call_.body, call_.data, run.triggered);
        return ran ? cudaSuccess : cudaErrorLaunchFailure;
    }
    void finish(Run &run) override {
        if (run.triggered) g_triggering.push_back({call_.launch.name});
    }

private:
    OwnedCall call_;
    int device_;
};

bool launchable(const cuemu::Launch &launch, const void *function) {
    size_t shared = kShared;
    for (const SharedMemoryLimit &limit : g_shared_limits)
        if (limit.function == function) shared = limit.bytes;
    const dim3 g = launch.grid, b = launch.block;
    return g.x && g.y && g.z && g.x <= 2147483647u && g.y <= 65535 && g.z <= 65535 && b.x && b.y && b.z &&
           b.x <= 1024 && b.y <= 1024 && b.z <= 64 && uint64_t(b.x) * b.y * b.z <= 1024 && launch.shared <= shared;
}

std::vector<std::string> names_of(const std::vector<LaunchedKernel> &kernels) {
    std::vector<std::string> names;
    for (const LaunchedKernel &kernel : kernels) names.emplace_back(kernel.name);
    return names;
}

void make_context(int device) {
    if (g_contexts.size() <= size_t(device)) g_contexts.resize(size_t(device) + 1);
    g_contexts[size_t(device)] = true;
}

// Handles of primary contexts are numbers from 1 on, by device; handles of other contexts follow kOthers. The driver's
// own errors are 1 invalid value, 101 invalid device, 201 invalid context, 400 invalid handle. Functions of the driver
// also fail as configured, always with 999.
constexpr int kOthers = 4096, kGreen = 8192;
template <class F> int driver(const char *function, const F &body) {
    const cudaError_t last = t_last; // errors of the driver are not errors of the runtime
    const cudaError_t error = call(function, [&] { return cudaError_t(body()); });
    t_last = last;
    return error == 1 || error == 101 || error == 201 || error == 400 || error == 906 || error == 0 ? int(error) : 999;
}
void *handle_of(int device, int context) {
    return reinterpret_cast<void *>(uintptr_t(context == 0 ? device + 1 : kOthers + context));
}
void push_context(int device, int context) {
    t_pushed_contexts.at(t_pushed++) = {t_device, t_context, t_bound};
    t_device = device;
    t_context = context;
    t_bound = true;
}
void pop_context() {
    const Current &before = t_pushed_contexts.at(--t_pushed);
    t_device = before.device;
    t_context = before.context;
    t_bound = before.bound;
}
int retain(void **context, int device) {
    return driver("cuDevicePrimaryCtxRetain", [&] {
        if (device < 0 || device >= g_config.devices) return 101;
        make_context(device);
        *context = handle_of(device, 0);
        return 0;
    });
}
int release(int device) {
    return driver("cuDevicePrimaryCtxRelease", [&] { return device < 0 || device >= g_config.devices ? 101 : 0; });
}
int push(void *context) {
    return driver("cuCtxPushCurrent", [&] {
        const auto device = int(reinterpret_cast<uintptr_t>(context)) - 1;
        if (device < 0 || device >= g_config.devices) return 201;
        push_context(device, 0);
        return 0;
    });
}
int pop(void **context) {
    const Lock lock; // cannot fail: the pushed context exists
    if (t_pushed == 0) return 201;
    *context = handle_of(t_device, t_context);
    pop_context();
    return 0;
}
int current_device(int *device) {
    return driver("cuCtxGetDevice", [&] {
        if (!t_bound) return 201;
        *device = t_device;
        return 0;
    });
}
int context_of(cudaStream_t stream, void **context, void **green) {
    return driver("cuStreamGetCtx", [&] {
        *green = nullptr;
        if (!stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
            if (!t_bound) return 201;
            *context = handle_of(t_device, t_context);
            return 0;
        }
        if (!is_stream(stream)) return 400;
        *context = handle_of(stream->device, stream->context);
        if (stream->green) *green = reinterpret_cast<void *>(uintptr_t(kGreen));
        return 0;
    });
}
int context_of_before_12_5(cudaStream_t stream, void **context) {
    void *green = nullptr;
    const int error = context_of(stream, context, &green);
    if (green) *context = green;
    return error;
}
struct DriverFunction {
    const char *name;
    void *address;
    int since = 12000; // ascending in this list
};
const DriverFunction kDriver[] = {{"cuDevicePrimaryCtxRetain", reinterpret_cast<void *>(retain)},
                                  {"cuDevicePrimaryCtxRelease", reinterpret_cast<void *>(release)},
                                  {"cuCtxPushCurrent", reinterpret_cast<void *>(push)},
                                  {"cuCtxPopCurrent", reinterpret_cast<void *>(pop)},
                                  {"cuCtxGetDevice", reinterpret_cast<void *>(current_device)},
                                  {"cuStreamGetCtx", reinterpret_cast<void *>(context_of_before_12_5)},
                                  {"cuStreamGetCtx", reinterpret_cast<void *>(context_of), 12050}};

/// Returns true for calls that need a context. If no context is current, such a call makes the primary context of the
/// thread's device current.
bool needs_context(const char *function) {
    for (const char *name : {"cudaRuntimeGetVersion", "cudaDriverGetVersion", "cudaGetDeviceCount", "cudaGetDevice",
                             "cudaSetDevice", "cudaDeviceGetAttribute", "cudaGetDriverEntryPointByVersion"})
        if (!std::strcmp(function, name)) return false;
    return !std::strncmp(function, "cuda", 4); // false for functions of the driver
}

int ptx_version() { return g_config.ptx ? g_config.ptx : g_config.capability; }

struct AtExit { // ends the workers of streams before the objects that they use are destroyed
    ~AtExit() { reset(Config{}); }
};

} // namespace

uint64_t from_environment(const char *name, uint64_t otherwise) {
    const char *const text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

Config g_config = config_from_environment();
Counters g_counters{};
cudaError_t g_sticky = cudaSuccess;
long g_kernels_run = 0;
thread_local int t_device = 0;
thread_local int t_context = 0;
thread_local bool t_bound = false;
thread_local bool t_in_host_function = false;
thread_local int t_locks = 0;
bool in_runtime_call() { return t_locks != 0; }

cudaError_t begin_call(const char *function) {
    static const AtExit at_exit;
    static const int watches = pthread_atfork(nullptr, nullptr, [] { g_forked = g_begun; });
    g_begun = watches == 0;
    if (g_forked) return cudaErrorInitializationError; // a driver that the parent initialized cannot be used in a child
    if (t_in_host_function) return cudaErrorNotPermitted;
    if (!t_bound && needs_context(function)) need_context();
    const bool counted = !g_config.fail_function || !std::strcmp(g_config.fail_function, function);
    const long of_function = count_call(function), of_all = g_all_calls++;
    if (counted && (g_config.fail_function ? of_function : of_all) == g_config.fail_call) return g_config.fail_with;
    if (g_sticky) return g_sticky;
    run_some();
    return g_sticky;
}

cudaError_t end_call(cudaError_t error) {
    close_idle();
    if (error && error != cudaErrorNotReady) t_last = error;
    return error;
}

Config config_from_environment() {
    Config config;
    config.seed = from_environment("CUEMU_STREAM_SEED", config.seed);
    config.devices = int(from_environment("CUEMU_DEVICES", uint64_t(config.devices)));
    config.multiprocessors = int(from_environment("CUEMU_MULTIPROCESSORS", uint64_t(config.multiprocessors)));
    config.capability = int(from_environment("CUEMU_CAPABILITY", uint64_t(config.capability)));
    config.protect = from_environment("CUEMU_PROTECT", 1) != 0;
    const char *const mode = std::getenv("CUEMU_MODE");
    const char *const names[] = {"eager", "lazy", "random", "threads"};
    for (int i = 0; mode && i < 4; ++i)
        if (!std::strcmp(mode, names[i])) config.mode = Mode(i);
    return config;
}

void reset(const Config &config) {
    const Lock lock;
    reset_graphs();
    reset_streams();
    reset_memory();
    cuemu::clear_error();
    g_config = config;
    cuemu::options().capability = unsigned(config.capability);
    g_counters = {};
    g_sticky = t_last = cudaSuccess;
    g_kernels_run = g_all_calls = 0;
    g_calls.clear();
    g_launched.clear();
    g_late.clear();
    g_loaded.clear();
    g_early.clear();
    g_shared_limits.clear();
    g_contexts.clear();
    g_others.clear();
    g_triggering.clear();
    t_device = t_context = 0;
    t_bound = false;
    t_pushed = 0;
}

long calls(const char *function) {
    const Lock lock;
    if (!function) return g_all_calls;
    for (const CallCount &known : g_calls)
        if (!std::strcmp(known.function, function)) return known.count;
    return 0;
}
long kernels_run() {
    const Lock lock;
    return g_kernels_run;
}
long live_objects() {
    const Lock lock;
    return live_memory() + live_streams() + live_graphs();
}

void need_context() {
    if (!t_bound) make_context(t_device);
    t_bound = true;
}
Context::Context(int device) {
    const Lock lock;
    g_others.push_back(device);
    push_context(device, int(g_others.size()));
}
Context::~Context() {
    const Lock lock;
    pop_context();
}
cudaStream_t green_stream() {
    const Lock lock;
    need_context();
    FakeStream *const stream = new_stream(t_device, false, true);
    stream->green = true;
    return stream;
}
bool has_context(int device) {
    const Lock lock;
    return size_t(device) < g_contexts.size() && g_contexts[size_t(device)];
}

void mark() {
    const Lock lock;
    g_counters = {};
    g_launched.clear();
    g_triggering.clear();
}
Counters counters() {
    const Lock lock;
    return g_counters;
}
std::vector<std::string> launched_kernels() {
    const Lock lock;
    return names_of(g_launched);
}
std::vector<std::string> triggering_kernels() {
    const Lock lock;
    std::vector<std::string> names(names_of(g_triggering));
    std::sort(names.begin(), names.end());
    return names;
}
std::vector<std::string> late_loads() {
    const Lock lock;
    return names_of(g_late);
}

void *allocate_arguments(size_t bytes) { return std::malloc(bytes); }
void free_arguments(void *memory) { std::free(memory); }
bool launches() { return g_config.launches; }
cudaError_t launch_kernel(const KernelCall &kernel_call, cudaStream_t handle) {
    OwnedCall owned(kernel_call);
    return call("cudaLaunchKernel", [&] {
        FakeStream *stream = nullptr;
        if (!launchable(kernel_call.launch, kernel_call.function)) return cudaErrorInvalidConfiguration;
        if (const cudaError_t error = find_stream(handle, stream)) return error;
        if (stream->device != t_device) return cudaErrorInvalidResourceHandle;
        ++g_counters.kernel_launches;
        // A device of capability 90 accepts a kernel from older PTX, but that kernel would not wait for the preceding
        // one.
        if (kernel_call.launch.early && (g_config.capability < 90 || ptx_version() < 90)) return cudaErrorInvalidValue;
        g_counters.early_launches += kernel_call.launch.early;
        if (g_loaded.insert(kernel_call.function).second) {
            g_late.push_back({kernel_call.launch.name});
            if (g_config.first_launch_waits)
                if (const cudaError_t error = wait_for_device(t_device)) return error;
        }
        g_launched.push_back({kernel_call.launch.name});
        return enqueue(stream, TaskRef(new Kernel(std::move(owned), t_device)));
    });
}

cudaError_t resident_blocks(int *blocks, int threads, size_t shared) {
    return call("cudaOccupancyMaxActiveBlocksPerMultiprocessor", [&] {
        if (!blocks || threads < 1 || shared > g_config.occupancy_shared) return cudaErrorInvalidValue;
        *blocks = threads > 1024 || shared > kSharedOptin ? 0 : g_config.blocks_per_multiprocessor;
        return cudaSuccess;
    });
}

cudaError_t set_attribute(const void *function, cudaFuncAttribute attribute, int value) {
    return call("cudaFuncSetAttribute", [&] {
        if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || size_t(value) > kSharedOptin)
            return cudaErrorInvalidValue;
        for (SharedMemoryLimit &known : g_shared_limits)
            if (known.function == function) {
                known.bytes = size_t(value);
                return cudaSuccess;
            }
        g_shared_limits.push_back({function, size_t(value)});
        return cudaSuccess;
    });
}

} // namespace fakert

using namespace fakert;

extern "C" {

cudaError_t cudaDriverGetVersion(int *version) {
    return call("cudaDriverGetVersion", [&] {
        if (!version) return cudaErrorInvalidValue;
        *version = g_config.driver;
        return cudaSuccess;
    });
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    return call("cudaRuntimeGetVersion", [&] {
        if (!version) return cudaErrorInvalidValue;
        *version = g_config.runtime;
        return cudaSuccess;
    });
}
cudaError_t cudaGetDeviceCount(int *count) {
    return call("cudaGetDeviceCount", [&] {
        if (!count) return cudaErrorInvalidValue;
        if (g_config.driver < g_config.runtime) return cudaErrorInsufficientDriver;
        *count = g_config.devices;
        return cudaSuccess;
    });
}
cudaError_t cudaGetDevice(int *device) {
    return call("cudaGetDevice", [&] {
        if (!device) return cudaErrorInvalidValue;
        *device = t_device;
        return cudaSuccess;
    });
}
cudaError_t cudaSetDevice(int device) {
    return call("cudaSetDevice", [&] {
        if (device < 0 || device >= g_config.devices) return cudaErrorInvalidDevice;
        t_device = device;
        t_context = 0;
        t_bound = false;
        need_context();
        return cudaSuccess;
    });
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel) {
    return call("cudaFuncGetAttributes", [&] {
        if (!attributes || !kernel) return cudaErrorInvalidValue;
        if (!g_config.images) return cudaErrorNoKernelImageForDevice;
        g_loaded.insert(kernel);
        *attributes = {0, 0, 0, 1024, 32, ptx_version()};
        return cudaSuccess;
    });
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult *result) {
    return call("cudaGetDriverEntryPointByVersion", [&] {
        if (!symbol || !function || version < 12000 || flags != cudaEnableDefault) return cudaErrorInvalidValue;
        *function = nullptr;
        for (const DriverFunction &known : kDriver) // the newest version that both the caller and the driver support
            if (!std::strcmp(known.name, symbol) && known.since <= std::min(int(version), g_config.driver))
                *function = known.address;
        if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
        return cudaSuccess;
    });
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    return call("cudaDeviceGetAttribute", [&] {
        if (!value) return cudaErrorInvalidValue;
        if (device < 0 || device >= g_config.devices) return cudaErrorInvalidDevice;
        switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; return cudaSuccess;
        case cudaDevAttrMultiProcessorCount: *value = g_config.multiprocessors; return cudaSuccess;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; return cudaSuccess;
        case cudaDevAttrComputeCapabilityMajor: *value = g_config.capability / 10; return cudaSuccess;
        case cudaDevAttrComputeCapabilityMinor: *value = g_config.capability % 10; return cudaSuccess;
        case cudaDevAttrCooperativeLaunch: *value = 0; return cudaSuccess; // no grid-wide barriers
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(kSharedOptin); return cudaSuccess;
        case cudaDevAttrMemoryPoolsSupported: *value = 1; return cudaSuccess;
        }
        return cudaErrorInvalidValue;
    });
}
cudaError_t cudaDeviceSynchronize(void) {
    return call("cudaDeviceSynchronize", [&] {
        ++g_counters.host_waits;
        if (const cudaError_t error = refuse_null_stream(t_device)) return error;
        if (const cudaError_t error = refuse_captures_on(t_device)) return error;
        return wait_for_device(t_device);
    });
}

cudaError_t cudaGetLastError(void) {
    const cudaError_t error = cudaPeekAtLastError();
    t_last = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) {
    const Lock lock;
    return g_sticky ? g_sticky : t_last;
}

#define FAKERT_ERRORS(X)                                                                                               \
    X(cudaSuccess, "no error")                                                                                         \
    X(cudaErrorInvalidValue, "invalid argument")                                                                       \
    X(cudaErrorMemoryAllocation, "out of memory")                                                                      \
    X(cudaErrorInitializationError, "initialization error")                                                            \
    X(cudaErrorInvalidConfiguration, "invalid configuration argument")                                                 \
    X(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version")                     \
    X(cudaErrorInvalidDevice, "invalid device ordinal")                                                                \
    X(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device")                     \
    X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                                       \
    X(cudaErrorIllegalState, "the operation cannot be performed in the present state")                                 \
    X(cudaErrorNotReady, "device not ready")                                                                           \
    X(cudaErrorIllegalAddress, "an illegal memory access was encountered")                                             \
    X(cudaErrorLaunchFailure, "unspecified launch failure")                                                            \
    X(cudaErrorNotPermitted, "operation not permitted")                                                                \
    X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")                           \
    X(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")                    \
    X(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences")                  \
    X(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began")                         \
    X(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")                                            \
    X(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream")                      \
    X(cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing blocking stream")  \
    X(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream")               \
    X(cudaErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread")

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define NAME(value, text)                                                                                              \
    case value: return #value;
        FAKERT_ERRORS(NAME)
#undef NAME
    }
    return "unrecognized error code";
}
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
#define TEXT(value, text)                                                                                              \
    case value: return text;
        FAKERT_ERRORS(TEXT)
#undef TEXT
    }
    return "unrecognized error code";
}
#undef FAKERT_ERRORS

} // extern "C"
