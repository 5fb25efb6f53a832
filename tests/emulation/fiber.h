// SPDX-License-Identifier: Apache-2.0
// Fibers: stacks to switch between. Every switch is reported to the sanitizers.
#pragma once
#include <cstddef>
#if !defined(__x86_64__) && !defined(CUDA_EMU_UCONTEXT)
#define CUDA_EMU_UCONTEXT 1
#endif
#ifdef CUDA_EMU_UCONTEXT
#include <ucontext.h>
#endif

namespace cuemu {

struct Fiber {
#ifdef CUDA_EMU_UCONTEXT
    ucontext_t context;
#else
    void *sp = nullptr;
#endif
    char *stack = nullptr;
    size_t size = 0;
    size_t unused = 0; // bytes at the upper end of the stack
    void *tsan = nullptr;
    void *fake_stack = nullptr; // the address sanitizer's, while the fiber does not run
    bool owns_stack = true;
};

/// Creates a fiber with a guard page below its stack.
Fiber *new_fiber(size_t size);
/// Creates a fiber on memory that the caller owns: map_stack().
Fiber *new_fiber(char *stack, size_t size);
/// Maps a stack, or several contiguous stacks: Linux allows a process 65,530 mappings.
char *map_stack(size_t size);
void unmap_stack(char *stack, size_t size);
void delete_fiber(Fiber *fiber);
/// The next switch to the fiber enters `main`, which never returns. `tsan`: the logical thread of the thread sanitizer.
void prepare(Fiber &fiber, void (*main)(), void *tsan);
/// Removes the address sanitizer's marks of stack frames after a fiber was abandoned.
void forget_frames(Fiber &fiber);
void switch_fiber(Fiber &from, Fiber &to);
/// Must be called first in `main`: it reads from the address sanitizer which stack the fiber came from.
void entered(Fiber &self, Fiber &from);

} // namespace cuemu
