// SPDX-License-Identifier: Apache-2.0
#include "memory.h"
#include "emulated.h"
#include "golden_file.h"
#include <cstdint>
#include <dlfcn.h>
#include <memory>

namespace replay {
namespace {

template <class F> void find(void *library, F &function, const char *name) {
    void *symbol = dlsym(library, name);
    if (symbol == nullptr) fail("there is no %s", name);
    function = reinterpret_cast<F>(symbol);
}

/// The emulated runtime has no driver API. cudaError_t is an int.
class EmulatedMemory {
public:
    explicit EmulatedMemory(int ordinal) {
        int (*set_device)(int) = nullptr;
        find(RTLD_DEFAULT, set_device, "cudaSetDevice");
        find(RTLD_DEFAULT, allocate_, "cudaMalloc");
        find(RTLD_DEFAULT, release_, "cudaFree");
        find(RTLD_DEFAULT, copy_, "cudaMemcpy");
        check(set_device(ordinal), "cudaSetDevice");
    }
    void *allocate(size_t bytes) {
        void *memory = nullptr;
        check(allocate_(&memory, bytes), "cudaMalloc");
        return memory;
    }
    void release(void *memory) { (void)release_(memory); }
    void upload(void *to, const void *from, size_t bytes) {
        if (bytes != 0) check(copy_(to, from, bytes, 1), "cudaMemcpy to the device");
    }
    void download(void *to, const void *from, size_t bytes) {
        if (bytes != 0) check(copy_(to, from, bytes, 2), "cudaMemcpy to the host");
    }

private:
    static void check(int error, const char *what) {
        if (error != 0) fail("%s: CUDA error %d", what, error);
    }

    int (*allocate_)(void **, size_t) = nullptr;
    int (*release_)(void *) = nullptr;
    int (*copy_)(void *, const void *, size_t, int) = nullptr; // cudaMemcpyKind: 1 is to the device, 2 to the host
};

// The part of the driver's stable interface that is used here: CUresult is an int, CUdeviceptr has 64 bits.
class CudaMemory {
public:
    explicit CudaMemory(int ordinal) {
        library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library_ == nullptr) fail("no CUDA driver: %s", dlerror());
        int (*init)(unsigned) = nullptr, (*get)(int *, int) = nullptr, (*retain)(void **, int) = nullptr;
        find(library_, init, "cuInit");
        find(library_, get, "cuDeviceGet");
        find(library_, retain, "cuDevicePrimaryCtxRetain");
        find(library_, set_current_, "cuCtxSetCurrent");
        find(library_, drop_, "cuDevicePrimaryCtxRelease_v2");
        find(library_, allocate_, "cuMemAlloc_v2");
        find(library_, release_, "cuMemFree_v2");
        find(library_, upload_, "cuMemcpyHtoD_v2");
        find(library_, download_, "cuMemcpyDtoH_v2");
        check(init(0), "cuInit");
        check(get(&device_, ordinal), "cuDeviceGet");
        check(retain(&context_, device_), "cuDevicePrimaryCtxRetain");
    }
    ~CudaMemory() { (void)drop_(device_); } // not unloaded: the engine may use it, too

    void *allocate(size_t bytes) {
        make_current();
        uint64_t memory = 0;
        check(allocate_(&memory, bytes), "cuMemAlloc");
        return reinterpret_cast<void *>(memory);
    }
    void release(void *memory) {
        (void)set_current_(context_);
        (void)release_(address(memory));
    }
    void upload(void *to, const void *from, size_t bytes) {
        make_current();
        if (bytes != 0) check(upload_(address(to), from, bytes), "cuMemcpyHtoD");
    }
    void download(void *to, const void *from, size_t bytes) {
        make_current();
        if (bytes != 0) check(download_(to, address(from), bytes), "cuMemcpyDtoH");
    }

private:
    void make_current() { check(set_current_(context_), "cuCtxSetCurrent"); } // for this thread: every rank has its own
    static uint64_t address(const void *memory) { return reinterpret_cast<uint64_t>(memory); }
    static void check(int result, const char *what) {
        if (result != 0) fail("%s: CUDA driver error %d", what, result);
    }
    void *library_ = nullptr;
    void *context_ = nullptr;
    int device_ = 0;
    int (*set_current_)(void *) = nullptr;
    int (*drop_)(int) = nullptr;
    int (*allocate_)(uint64_t *, size_t) = nullptr;
    int (*release_)(uint64_t) = nullptr;
    int (*upload_)(uint64_t, const void *, size_t) = nullptr;
    int (*download_)(void *, uint64_t, size_t) = nullptr;
};

template <class Device> test::Memory memory_of(const std::shared_ptr<Device> &device) {
    return {[device](size_t bytes) { return device->allocate(bytes); },
            [device](void *memory) { device->release(memory); },
            [device](void *to, const void *from, size_t bytes) { device->upload(to, from, bytes); },
            [device](void *to, const void *from, size_t bytes) { device->download(to, from, bytes); }};
}

} // namespace

test::Memory cuda_memory(int device) {
    return is_emulated() ? memory_of(std::make_shared<EmulatedMemory>(device))
                         : memory_of(std::make_shared<CudaMemory>(device));
}

} // namespace replay
