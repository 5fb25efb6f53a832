// SPDX-License-Identifier: Apache-2.0
#include "device.h"
#include "dsopt.h"
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <new>
#include <stdexcept>

namespace test {
namespace {

/// Functions of the CUDA runtime: the emulated one is part of its libdsopt, the real one is loaded. The programs do not
/// link it, so that one program runs on each device.
struct Runtime {
    int (*malloc_managed)(void **memory, size_t bytes, unsigned flags) = nullptr;
    int (*free)(void *memory) = nullptr;
    int (*synchronize)() = nullptr;
    int (*copy)(void *to, const void *from, size_t bytes, int kind) = nullptr;
    int (*count)(int *devices) = nullptr;
    int (*last_error)() = nullptr;
    const char *(*text)(int error) = nullptr;
    bool emulated = false;

    Runtime() {
        void *library = RTLD_DEFAULT;
        emulated = dlsym(library, "cudaMallocManaged") != nullptr;
        if (!emulated) {
            library = nullptr;
            for (const char *name : {"libcudart.so.13", "libcudart.so.12", "libcudart.so"})
                if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
            if (library == nullptr) return;
        }
        find(library, "cudaMallocManaged", malloc_managed);
        find(library, "cudaFree", free);
        find(library, "cudaDeviceSynchronize", synchronize);
        find(library, "cudaMemcpy", copy);
        find(library, "cudaGetDeviceCount", count);
        find(library, "cudaGetLastError", last_error);
        find(library, "cudaGetErrorString", text);
    }
    void check(int error, const char *what) const {
        if (error != 0) throw std::runtime_error(std::string(what) + ": " + text(error));
    }

private:
    template <class F> static void find(void *library, const char *name, F &function) {
        void *const found = dlsym(library, name);
        std::memcpy(&function, &found, sizeof found);
    }
};
const Runtime &runtime() {
    static const Runtime runtime;
    return runtime;
}

} // namespace

namespace {
const std::string &device() {
    static const std::string device = [] {
        const char *const value = std::getenv("DSOPT_TEST_DEVICE");
        return value == nullptr ? std::string() : std::string(value);
    }();
    return device;
}
} // namespace

bool on_cuda() { return device() == "cuda" || device() == "emulated"; }
int32_t default_backend() { return on_cuda() ? DSOPT_BACKEND_CUDA : DSOPT_BACKEND_CPU; }

std::string device_error() {
    if (!on_cuda()) return "";
    if (device() == "emulated" && !runtime().emulated)
        throw std::runtime_error("the process has not loaded the libdsopt with the emulated device");
    if (runtime().count == nullptr) return "libcudart.so is not found";
    int devices = 0;
    if (const int error = runtime().count(&devices); error != 0)
        return std::string("no CUDA device: ") + runtime().text(error);
    return devices == 0 ? "no CUDA device" : "";
}

bool is_emulated() { return on_cuda() && runtime().emulated; }
std::string last_error() {
    if (!on_cuda()) return "";
    const int work = runtime().synchronize(), error = runtime().last_error();
    const int first = work != 0 ? work : error;
    return first == 0 ? "" : std::string(runtime().text(first)) + " (" + std::to_string(first) + ")";
}

void synchronize() {
    if (on_cuda()) runtime().check(runtime().synchronize(), "cudaDeviceSynchronize");
}
void write_device(void *to, const void *from, size_t bytes) {
    synchronize();
    if (bytes == 0) return;
    if (on_cuda())
        runtime().check(runtime().copy(to, from, bytes, 4), "cudaMemcpy"); // cudaMemcpyDefault
    else
        std::memcpy(to, from, bytes);
    synchronize(); // cudaMemcpy() alone returns while small pageable copies are pending
}
std::string device_text(const void *from, size_t bytes) {
    std::string text(bytes, '\0');
    write_device(text.data(), from, bytes);
    return text;
}

namespace {

std::mutex g_copies_mutex;
std::vector<std::unique_ptr<char, FreeShared>> g_copies;

} // namespace
const void *device_copy(const void *from, size_t bytes) {
    auto *const memory = static_cast<char *>(allocate_shared(bytes));
    if (bytes != 0) std::memcpy(memory, from, bytes);
    const std::lock_guard<std::mutex> hold(g_copies_mutex);
    g_copies.emplace_back(memory);
    return memory;
}
void end_copies() {
    const std::lock_guard<std::mutex> hold(g_copies_mutex);
    g_copies.clear();
}

void *allocate_shared(size_t bytes) {
    void *memory = nullptr;
    bytes = std::max<size_t>(bytes, 1);
    if (on_cuda())
        runtime().check(runtime().malloc_managed(&memory, bytes, 1), "cudaMallocManaged"); // cudaMemAttachGlobal
    else if (posix_memalign(&memory, 256, bytes) != 0)
        throw std::bad_alloc();
    return memory;
}
void free_shared(void *memory) {
    if (on_cuda())
        (void)runtime().free(memory);
    else
        std::free(memory);
}

} // namespace test
