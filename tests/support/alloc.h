// SPDX-License-Identifier: Apache-2.0
// Counts allocations and makes them fail: calls of the program's global operator new, which the shared library uses,
// too, and of the allocator hook of a context. A program that uses this header links alloc.cc, which defines the
// operators.
#pragma once
#include "dsopt.h"
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace test {

/// The call that fails, counted from 0; `lasting`: all later calls fail too.
struct Failure {
    int64_t failing_call = -1;
    bool lasting = false;
    bool hits(int64_t call) const {
        return failing_call >= 0 && (lasting ? call >= failing_call : call == failing_call);
    }
};

/// Calls of operator new, and their bytes, in threads with `armed` set. `live` counts all allocations that are not
/// deleted yet.
struct NewCounter {
    static inline thread_local bool armed = false;
    static inline std::atomic<int64_t> calls{0}, bytes{0}, live{0};
    static inline Failure failure;
    static inline void (*on_failure)() = nullptr; // called in place of failing
    static inline bool (*is_ignored)() = nullptr; // returns true in a thread whose calls do not count
    static bool counts() { return armed && (is_ignored == nullptr || !is_ignored()); }
};
struct CountScope {
    CountScope() { NewCounter::armed = true; }
    ~CountScope() { NewCounter::armed = false; }
};

/// Allocator hooks for a context.
struct HookCounter {
    std::atomic<int64_t> calls{0}, live{0}, live_bytes{0}, wrong{0};
    Failure failure;
    void attach(dsopt_context_desc &desc) {
        desc.user = this;
        desc.allocate = [](void *user, size_t bytes, size_t alignment, void *) -> void * {
            auto *self = static_cast<HookCounter *>(user);
            if (self->failure.hits(self->calls++)) return nullptr;
            if (alignment < 64 || bytes == 0) ++self->wrong;
            ++self->live;
            self->live_bytes += int64_t(bytes);
            void *memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
            std::memset(memory, 0xd7, bytes); // not zeros, so that code that expects zeros fails
            return memory;
        };
        desc.release = [](void *user, void *memory, size_t bytes, void *) {
            auto *self = static_cast<HookCounter *>(user);
            --self->live;
            self->live_bytes -= int64_t(bytes);
            std::free(memory);
        };
    }
};

} // namespace test
