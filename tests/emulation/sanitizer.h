// SPDX-License-Identifier: Apache-2.0
// Interface of the emulator to the sanitizers. The emulator is compiled without sanitizers, and finds the program's
// sanitizer by weak symbols.
//
// The emulator's containers hold only types of its own. Otherwise the linker would merge an inline library function
// with the instrumented instantiation of the same function, and one of the two would be lost.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>

extern "C" {
#define CUDA_EMU_WEAK __attribute__((weak))
CUDA_EMU_WEAK void *__tsan_get_current_fiber(void);
CUDA_EMU_WEAK void *__tsan_create_fiber(unsigned flags);
CUDA_EMU_WEAK void __tsan_destroy_fiber(void *fiber);
CUDA_EMU_WEAK void __tsan_switch_to_fiber(void *fiber, unsigned flags);
CUDA_EMU_WEAK void __tsan_acquire(void *address);
CUDA_EMU_WEAK void __tsan_release(void *address);
CUDA_EMU_WEAK void AnnotateIgnoreReadsBegin(const char *file, int line);
CUDA_EMU_WEAK void AnnotateIgnoreReadsEnd(const char *file, int line);
CUDA_EMU_WEAK void AnnotateIgnoreWritesBegin(const char *file, int line);
CUDA_EMU_WEAK void AnnotateIgnoreWritesEnd(const char *file, int line);
CUDA_EMU_WEAK void AnnotateIgnoreSyncBegin(const char *file, int line);
CUDA_EMU_WEAK void AnnotateIgnoreSyncEnd(const char *file, int line);
CUDA_EMU_WEAK void __sanitizer_start_switch_fiber(void **fake_stack, const void *bottom, size_t size);
CUDA_EMU_WEAK void __sanitizer_finish_switch_fiber(void *fake_stack, const void **bottom_old, size_t *size_old);
CUDA_EMU_WEAK void __asan_poison_memory_region(const volatile void *address, size_t size);
CUDA_EMU_WEAK void __asan_unpoison_memory_region(const volatile void *address, size_t size);
#undef CUDA_EMU_WEAK
}

namespace sanitizer {

inline bool tsan() { return __tsan_create_fiber != nullptr; }
inline bool asan() { return __asan_poison_memory_region != nullptr; }

constexpr unsigned kNoOrder = 1; // flag of __tsan_switch_to_fiber: the switch orders nothing

/// A happens-before edge that CUDA guarantees: code after acquire() follows everything before release() of the same
/// address.
inline void acquire(void *sync_point) {
    if (__tsan_acquire) __tsan_acquire(sync_point);
}
inline void release(void *sync_point) {
    if (__tsan_release) __tsan_release(sync_point);
}

/// While such an object lives, the thread sanitizer ignores accesses and synchronization of this thread. Otherwise its
/// interceptors would see the emulator's own locks, malloc() and memcpy().
inline void begin_quiet() {
    if (!AnnotateIgnoreSyncBegin) return;
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
inline void end_quiet() {
    if (!AnnotateIgnoreSyncEnd) return;
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
}
/// Releases and acquires are ignored during its lifetime too.
struct Quiet {
    Quiet() { begin_quiet(); }
    ~Quiet() { end_quiet(); }
    Quiet(const Quiet &) = delete;
    Quiet &operator=(const Quiet &) = delete;
};

} // namespace sanitizer
