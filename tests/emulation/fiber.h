// SPDX-License-Identifier: Apache-2.0
// Stacks to switch between, with the sanitizers told of every switch.
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
    void *tsan = nullptr;
    void *fake_stack = nullptr; // of the address sanitizer, while the fiber is away
    bool owns_stack = true;
};

/// With a page below its stack that nothing may touch.
Fiber *new_fiber(size_t size);
/// On memory that the caller keeps: map_stack().
Fiber *new_fiber(char *stack, size_t size);
/// The memory of a stack, or of several in a row: Linux allows a process 65,530 mappings.
char *map_stack(size_t size);
void unmap_stack(char *stack, size_t size);
void delete_fiber(Fiber *fiber);
/// The next switch to it enters `main`, which never returns. `tsan`: the logical thread of the thread sanitizer.
void prepare(Fiber &fiber, void (*main)(), void *tsan);
/// After a fiber was given up in the middle: the marks that its frames left on the stack.
void forget_frames(Fiber &fiber);
void switch_fiber(Fiber &from, Fiber &to);
/// First thing in `main`: where it came from is learned from the address sanitizer.
void entered(Fiber &self, Fiber &from);

} // namespace cuemu
