// SPDX-License-Identifier: Apache-2.0
// Which device memory an OS thread may access. A protection key of the processor marks the pages of a device, and each
// thread has a register with its rights to the pages of each key: changing them is no system call, and changes nothing
// for other threads. A new thread has the rights of the thread that created it; the first one has none.
#pragma once
#include <cstddef>
#include <cstdint>
#if defined(__x86_64__) && defined(__linux__)
#include <sys/mman.h>
#endif

namespace cuemu {

#if defined(__x86_64__) && defined(__linux__) && defined(PKEY_DISABLE_ACCESS)

/// Returns a new key, or -1 if there is none: there are 15, and some processors and kernels have none.
inline int new_memory_key() { return pkey_alloc(0, PKEY_DISABLE_ACCESS); }
/// Sets the protection key of pages. Returns false if that fails.
inline bool mark_memory(void *memory, size_t bytes, int key) {
    return pkey_mprotect(memory, bytes, PROT_READ | PROT_WRITE, key) == 0;
}

/// The rights of a thread. Without effect on a processor without protection keys.
class MemoryRights {
public:
    /// Must be called before the first key is allocated: it allocates one, and frees it.
    static bool exist() {
        static const bool exist = [] {
            const int key = new_memory_key();
            if (key >= 0) pkey_free(key);
            return key >= 0;
        }();
        return exist;
    }
    static MemoryRights current() {
        MemoryRights rights;
        if (!exist()) return rights;
        uint32_t high = 0;
        asm volatile("rdpkru" : "=a"(rights.denied_), "=d"(high) : "c"(0));
        return rights;
    }
    void apply() const {
        if (exist()) asm volatile("wrpkru" : : "a"(denied_), "c"(0), "d"(0) : "memory");
    }
    MemoryRights with(int key) const { return MemoryRights(key < 0 ? denied_ : denied_ & ~(3u << 2 * key)); }
    MemoryRights without(int key) const { return MemoryRights(key < 0 ? denied_ : denied_ | 3u << 2 * key); }

private:
    MemoryRights() = default;
    explicit MemoryRights(uint32_t denied) : denied_(denied) {}
    uint32_t denied_ = 0; // two bits for each key
};

#else

inline int new_memory_key() { return -1; }
inline bool mark_memory(void *, size_t, int) { return false; }
class MemoryRights {
public:
    static bool exist() { return false; }
    static MemoryRights current() { return {}; }
    void apply() const {}
    MemoryRights with(int) const { return {}; }
    MemoryRights without(int) const { return {}; }
};

#endif

} // namespace cuemu
