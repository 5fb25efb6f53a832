// SPDX-License-Identifier: Apache-2.0
// Memory of the fake runtime. Device memory is host memory that is accessible only to work of its device, contains NaN
// at first, ends in a red zone, and is never reused.
#include "fake_cudart.h"
#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <sys/mman.h>

namespace fakert {
namespace {

constexpr size_t kPage = 4096, kRedZone = 256, kManagedLine = 256;
constexpr unsigned char kUnwrittenByte = 0xff, kRedZoneByte = 0xa5;

using Blocks = std::map<char *, Block>;
struct FreedBlock {
    char *memory;
    size_t mapped;
};
struct Device {
    int key; // protection key of its memory; -1: none, and page protection changes for the whole process
    // Only without a key:
    int working = 0;   // number of streams whose work runs now
    bool open = false; // its memory is accessible
    size_t used = 0;
};
Blocks g_device_blocks, g_host_blocks, g_managed_blocks;
std::vector<FreedBlock> g_freed;
std::vector<Device> g_devices;

/// Returns the key of a device; keys last until the end of the process.
int key_of(size_t number) {
    static const bool usable = from_environment("CUEMU_KEYS", 1) != 0 && cuemu::MemoryRights::exist();
    static std::array<int, 16> keys{}; // 0: not known yet; key 0 is that of ordinary memory
    if (!usable || !g_config.protect || number >= keys.size()) return -1;
    if (keys[number] == 0) keys[number] = cuemu::new_memory_key();
    return keys[number];
}

Device &device(int number) {
    while (g_devices.size() <= size_t(number)) g_devices.push_back({key_of(g_devices.size())});
    return g_devices[size_t(number)];
}

void set_access(char *memory, size_t bytes, bool on) {
    mprotect(memory, bytes, on ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void mark(char *memory, size_t bytes, int key) {
    if (cuemu::mark_memory(memory, bytes, key)) return;
    std::perror("fakert: protection key of device memory");
    std::abort();
}

Blocks::const_iterator find(const Blocks &blocks, const void *p) {
    char *const address = static_cast<char *>(const_cast<void *>(p));
    auto found = blocks.upper_bound(address);
    if (found == blocks.begin()) return blocks.end();
    --found;
    return address < found->first + found->second.bytes ? found : blocks.end();
}
/// Returns true if the bytes lie completely inside the block that contains `p`, or if no block contains it.
/// `found_block` becomes true if a block contains it.
bool inside(const Blocks &blocks, const void *p, size_t bytes, bool &found_block) {
    const auto found = find(blocks, p);
    found_block = found != blocks.end();
    return !found_block || bytes <= found->second.bytes - size_t(static_cast<const char *>(p) - found->first);
}

void open(int number, bool on) {
    device(number).open = on;
    if (!g_config.protect) return;
    // Adjacent blocks are changed together: a few system calls suffice for thousands of small blocks.
    char *begin = nullptr, *end = nullptr;
    for (const auto &[memory, block] : g_device_blocks) {
        if (block.device != number || !block.alive) continue;
        if (memory != end) {
            if (begin) set_access(begin, size_t(end - begin), on);
            begin = memory;
        }
        end = memory + block.mapped;
    }
    if (begin) set_access(begin, size_t(end - begin), on);
}

cudaError_t allocate(void **p, size_t bytes, bool alive) {
    if (!p) return cudaErrorInvalidValue;
    *p = nullptr;
    if (!bytes) return cudaSuccess;
    Device &owner = device(t_device);
    if (bytes > g_config.memory - owner.used) return cudaErrorMemoryAllocation;
    const size_t mapped = (bytes + kRedZone + kPage - 1) / kPage * kPage;
    void *const memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return cudaErrorMemoryAllocation;
    char *const begin = static_cast<char *>(memory);
    std::memset(begin, kUnwrittenByte, bytes);
    std::memset(begin + bytes, kRedZoneByte, mapped - bytes);
    if (sanitizer::asan()) __asan_poison_memory_region(begin + bytes, mapped - bytes);
    if (owner.key >= 0) mark(begin, mapped, owner.key);
    if (g_config.protect && (!alive || (owner.key < 0 && !owner.open))) set_access(begin, mapped, false);
    g_device_blocks[begin] = {bytes, mapped, t_device, alive, t_context};
    owner.used += bytes;
    *p = memory;
    return cudaSuccess;
}

void release(Blocks::iterator block_at) {
    char *const memory = block_at->first;
    const Block block = block_at->second;
    const cuemu::MemoryRights before = cuemu::MemoryRights::current();
    before.with(device(block.device).key).apply();
    if (device(block.device).key < 0 || !block.alive) set_access(memory, block.mapped, true);
    for (size_t i = block.bytes; i < block.mapped && !sanitizer::asan(); ++i) {
        if (static_cast<unsigned char>(memory[i]) == kRedZoneByte) continue;
        std::fprintf(stderr, "fakert: write past the end: byte %zu of a device block of %zu bytes\n", i, block.bytes);
        std::abort();
    }
    if (sanitizer::asan()) __asan_poison_memory_region(memory, block.mapped);
    madvise(memory, block.mapped, MADV_DONTNEED);
    set_access(memory, block.mapped, false);
    before.apply();
    g_freed.push_back({memory, block.mapped});
    device(block.device).used -= block.bytes;
    g_device_blocks.erase(block_at);
}

cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, FakeStream *stream, bool &pageable) {
    bool to_device = false, from_device = false, to_pinned = false, from_pinned = false, to_managed = false,
         from_managed = false;
    if (!inside(g_device_blocks, to, bytes, to_device) || !inside(g_device_blocks, from, bytes, from_device) ||
        !inside(g_host_blocks, to, bytes, to_pinned) || !inside(g_host_blocks, from, bytes, from_pinned) ||
        !inside(g_managed_blocks, to, bytes, to_managed) || !inside(g_managed_blocks, from, bytes, from_managed))
        return cudaErrorInvalidValue;
    // Managed memory counts as host or device memory, as `kind` says.
    to_device |= to_managed && (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice);
    from_device |= from_managed && (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
    if (kind != cudaMemcpyDefault && kind != (from_device ? 2 : 0) + (to_device ? 1 : 0)) return cudaErrorInvalidValue;
    pageable = (!to_device && !to_pinned && !to_managed) || (!from_device && !from_pinned && !from_managed);
    if (pageable && stream->capture) return refuse(*stream->capture);
    const char *label = "copy on host";
    if (to_device && from_device)
        ++g_counters.copies_on_device, label = "copy on device";
    else if (to_device)
        ++g_counters.copies_to_device, label = "copy to device";
    else if (from_device)
        ++g_counters.copies_to_host, label = "copy to host";
    return enqueue(stream, make_task(label, [=] {
                       copy_bytes(to, from, bytes);
                       return cudaSuccess;
                   }));
}

} // namespace

const Block *find_device(const void *p) {
    const auto found = find(g_device_blocks, p);
    return found == g_device_blocks.end() ? nullptr : &found->second;
}

cuemu::MemoryRights expose(int number) {
    Device &owner = device(number);
    const cuemu::MemoryRights before = cuemu::MemoryRights::current();
    if (owner.key >= 0) {
        before.with(owner.key).apply();
        return before;
    }
    ++owner.working;
    if (owner.open) return before;
    close_idle();
    open(number, true);
    return before;
}

void end_exposure(int number, const cuemu::MemoryRights &before) {
    Device &owner = device(number);
    if (owner.key < 0)
        --owner.working;
    else
        before.apply();
}

int memory_key(int number) { return device(number).key; }

bool hide(int number) {
    const Device &owner = device(number);
    if (!g_config.protect || owner.key >= 0 || owner.working != 1) return false;
    open(number, false);
    return true;
}
void show(int number) { open(number, true); }

void close_idle() {
    for (size_t i = 0; i < g_devices.size(); ++i)
        if (g_devices[i].open && !g_devices[i].working) open(int(i), false);
}

/// Copies bytes. A copy can access the memory of all devices; other work only that of its own device.
void copy_bytes(void *to, const void *from, size_t bytes) {
    int devices[2] = {-1, -1};
    const cuemu::MemoryRights before = cuemu::MemoryRights::current();
    {
        const Lock lock;
        if (const Block *block = find_device(to)) devices[0] = block->device;
        if (const Block *block = find_device(from)) devices[1] = block->device;
        for (const int number : devices)
            if (number >= 0) expose(number);
    }
    std::memmove(to, from, bytes); // visible to the sanitizers
    const Lock lock;
    for (const int number : devices)
        if (number >= 0) end_exposure(number, before);
}

long live_memory() { return long(g_device_blocks.size() + g_host_blocks.size() + g_managed_blocks.size()); }

void reset_memory() {
    while (!g_device_blocks.empty()) release(g_device_blocks.begin());
    for (const FreedBlock &freed : g_freed) {
        if (sanitizer::asan()) __asan_unpoison_memory_region(freed.memory, freed.mapped);
        munmap(freed.memory, freed.mapped);
    }
    for (const auto &[memory, block] : g_host_blocks) std::free(memory);
    for (const auto &[memory, block] : g_managed_blocks) std::free(memory);
    g_freed.clear();
    g_host_blocks.clear();
    g_managed_blocks.clear();
    g_devices.clear();
}

} // namespace fakert

using namespace fakert;

extern "C" {

cudaError_t cudaMalloc(void **p, size_t bytes) {
    return call("cudaMalloc", [&] {
        ++g_counters.device_allocations;
        if (const cudaError_t error = refuse_in_capture(false)) return error;
        return allocate(p, bytes, true);
    });
}
cudaError_t cudaFree(void *p) {
    return call_release("cudaFree", [&] {
        ++g_counters.device_frees;
        if (!p) return cudaSuccess;
        if (const auto managed = g_managed_blocks.find(static_cast<char *>(p)); managed != g_managed_blocks.end()) {
            ++g_counters.host_waits;
            const cudaError_t error = wait_for_device(managed->second.device);
            g_managed_blocks.erase(static_cast<char *>(p));
            std::free(p);
            return error;
        }
        auto block_at = g_device_blocks.find(static_cast<char *>(p));
        if (block_at == g_device_blocks.end() || block_at->second.context != t_context) return cudaErrorInvalidValue;
        if (const cudaError_t error = refuse_in_capture(true)) return error;
        ++g_counters.host_waits;
        const cudaError_t error = wait_for_device(block_at->second.device);
        block_at = g_device_blocks.find(static_cast<char *>(p));
        if (block_at == g_device_blocks.end()) return cudaErrorInvalidValue; // cudaFreeAsync() freed it already
        release(block_at);
        return error;
    });
}
cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t handle) {
    return call("cudaMallocAsync", [&] {
        FakeStream *stream = nullptr;
        if (const cudaError_t error = find_stream(handle, stream)) return error;
        // CUDA would add an allocation node to the graph, which the engine must never cause.
        if (stream->capture) return refuse(*stream->capture);
        ++g_counters.device_allocations;
        if (const cudaError_t error = allocate(p, bytes, false)) return error;
        if (!*p) return cudaSuccess;
        return enqueue(stream, make_task("allocation", [memory = static_cast<char *>(*p)] {
                           const Lock lock;
                           const auto block_at = g_device_blocks.find(memory);
                           block_at->second.alive = true;
                           set_access(memory, block_at->second.mapped, true);
                           return cudaSuccess;
                       }));
    });
}
cudaError_t cudaFreeAsync(void *p, cudaStream_t handle) {
    return call("cudaFreeAsync", [&] {
        FakeStream *stream = nullptr;
        if (const cudaError_t error = find_stream(handle, stream)) return error;
        if (stream->capture) return refuse(*stream->capture);
        ++g_counters.device_frees;
        if (!p) return cudaSuccess;
        if (!g_device_blocks.count(static_cast<char *>(p))) return cudaErrorInvalidValue;
        return enqueue(stream, make_task("release", [p] {
                           const Lock lock;
                           const auto block_at = g_device_blocks.find(static_cast<char *>(p));
                           if (block_at == g_device_blocks.end()) return cudaErrorInvalidValue; // freed twice
                           release(block_at);
                           return cudaSuccess;
                       }));
    });
}
cudaError_t cudaMallocManaged(void **p, size_t bytes, unsigned) {
    return call("cudaMallocManaged", [&] {
        if (!p || bytes == 0) return cudaErrorInvalidValue;
        if (const cudaError_t error = refuse_in_capture(false)) return error;
        *p = std::aligned_alloc(kManagedLine, (bytes + kManagedLine - 1) / kManagedLine * kManagedLine);
        if (!*p) return cudaErrorMemoryAllocation;
        g_managed_blocks[static_cast<char *>(*p)] = {bytes, bytes, t_device, true, t_context};
        return cudaSuccess;
    });
}
cudaError_t cudaMallocHost(void **p, size_t bytes) {
    return call("cudaMallocHost", [&] {
        ++g_counters.host_allocations;
        if (!p) return cudaErrorInvalidValue;
        if (const cudaError_t error = refuse_in_capture(false)) return error;
        *p = std::malloc(bytes ? bytes : 1);
        if (!*p) return cudaErrorMemoryAllocation;
        g_host_blocks[static_cast<char *>(*p)] = {bytes, bytes, -1, true};
        return cudaSuccess;
    });
}
cudaError_t cudaFreeHost(void *p) {
    return call_release("cudaFreeHost", [&] {
        ++g_counters.host_frees;
        if (p && !g_host_blocks.count(static_cast<char *>(p))) return cudaErrorInvalidValue;
        if (const cudaError_t error = refuse_in_capture(false)) return error;
        g_host_blocks.erase(static_cast<char *>(p));
        std::free(p);
        return cudaSuccess;
    });
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t handle) {
    return call("cudaMemcpyAsync", [&] {
        FakeStream *stream = nullptr;
        bool pageable = false;
        if (const cudaError_t error = find_stream(handle, stream)) return error;
        if (!bytes) return cudaSuccess;
        if (const cudaError_t error = copy(to, from, bytes, kind, stream, pageable)) return error;
        if (!pageable) return cudaSuccess;
        ++g_counters.host_waits; // a copy from or to pageable memory is staged during the call
        return wait_for(stream, stream->queued);
    });
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return call("cudaMemcpy", [&] {
        FakeStream *stream = nullptr;
        bool pageable = false;
        ++g_counters.host_waits;
        if (const cudaError_t error = find_stream(nullptr, stream)) return error;
        if (const cudaError_t error = refuse_in_capture(false)) return error;
        if (!bytes) return cudaSuccess;
        if (const cudaError_t error = copy(to, from, bytes, kind, stream, pageable)) return error;
        return wait_for(stream, stream->queued);
    });
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t handle) {
    return call("cudaMemsetAsync", [&] {
        FakeStream *stream = nullptr;
        bool on_device = false;
        if (const cudaError_t error = find_stream(handle, stream)) return error;
        if (!bytes) return cudaSuccess;
        bool managed = false;
        if (!inside(g_device_blocks, to, bytes, on_device) || !inside(g_managed_blocks, to, bytes, managed) ||
            !(on_device || managed))
            return cudaErrorInvalidValue;
        ++g_counters.fills;
        return enqueue(stream, make_task("fill", [=] {
                           std::memset(to, value, bytes);
                           return cudaSuccess;
                       }));
    });
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *p) {
    return call("cudaPointerGetAttributes", [&] {
        if (!attributes) return cudaErrorInvalidValue;
        void *const memory = const_cast<void *>(p);
        if (const Block *block = find_device(p))
            *attributes = {cudaMemoryTypeDevice, block->device, memory, nullptr};
        else if (const auto managed = find(g_managed_blocks, p); managed != g_managed_blocks.end())
            *attributes = {cudaMemoryTypeManaged, managed->second.device, memory, memory};
        else if (find(g_host_blocks, p) != g_host_blocks.end())
            *attributes = {cudaMemoryTypeHost, t_device, memory, memory};
        else
            *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, memory};
        return cudaSuccess;
    });
}

} // extern "C"
