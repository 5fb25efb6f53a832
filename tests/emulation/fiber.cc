// SPDX-License-Identifier: Apache-2.0
#include "fiber.h"
#include "sanitizer.h"
#include <atomic>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>

#ifndef CUDA_EMU_UCONTEXT
// Saves callee-saved registers and switches the stack. ucontext makes two more system calls. It ends in a jump, because
// the processor predicts that `ret` returns to the last call, which is on the other stack.
extern "C" void cuda_emu_switch(void **save_sp, void *load_sp);
asm(R"(
.text
.p2align 4
.type cuda_emu_switch,@function
cuda_emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
.size cuda_emu_switch,.-cuda_emu_switch
)");
#endif

namespace cuemu {
namespace {

constexpr size_t kGuard = 4096;
constexpr size_t kColors = 128, kColor = 208; // no power of 2

} // namespace

char *map_stack(size_t size) {
    void *const stack = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) {
        std::perror("cuemu: stack of a thread");
        std::abort();
    }
    return static_cast<char *>(stack);
}

void unmap_stack(char *stack, size_t size) { munmap(stack, size); }

Fiber *new_fiber(char *stack, size_t size) {
    Fiber *const fiber = new Fiber;
    fiber->size = size;
    fiber->stack = stack;
    fiber->owns_stack = false;
    return fiber;
}

Fiber *new_fiber(size_t size) {
    Fiber *const fiber = new_fiber(map_stack(size), size);
    fiber->owns_stack = true;
    // Otherwise the upper ends of all stacks share a few lines of the caches, and nearly every switch misses them.
    static std::atomic<unsigned> fibers{0};
    fiber->unused = fibers.fetch_add(1, std::memory_order_relaxed) % kColors * kColor;
    if (mprotect(fiber->stack, kGuard, PROT_NONE)) {
        std::perror("cuemu: guard of a stack");
        std::abort();
    }
    return fiber;
}

void delete_fiber(Fiber *fiber) {
    if (fiber->owns_stack) unmap_stack(fiber->stack, fiber->size);
    delete fiber;
}

void prepare(Fiber &fiber, void (*main)(), void *tsan) {
    fiber.tsan = tsan;
#ifdef CUDA_EMU_UCONTEXT
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack + kGuard;
    fiber.context.uc_stack.ss_size = fiber.size - kGuard;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, main, 0);
#else
    void **sp = reinterpret_cast<void **>(fiber.stack + fiber.size - fiber.unused);
    *--sp = nullptr; // aligns the stack as a call does
    *--sp = reinterpret_cast<void *>(main);
    sp -= 6;
    std::memset(sp, 0, 6 * sizeof *sp);
    fiber.sp = sp;
#endif
}

void forget_frames(Fiber &fiber) {
    if (sanitizer::asan()) __asan_unpoison_memory_region(fiber.stack + kGuard, fiber.size - kGuard);
}

void switch_fiber(Fiber &from, Fiber &to) {
    if (sanitizer::asan()) __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.size);
    if (to.tsan) __tsan_switch_to_fiber(to.tsan, sanitizer::kNoOrder);
#ifdef CUDA_EMU_UCONTEXT
    swapcontext(&from.context, &to.context);
#else
    cuda_emu_switch(&from.sp, to.sp);
#endif
    if (!sanitizer::asan()) return;
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
    from.fake_stack = nullptr;
}

void entered(Fiber &self, Fiber &from) {
    if (!sanitizer::asan()) return;
    const void *bottom = nullptr;
    size_t size = 0;
    // Continues on the fake stack of the previous thread.
    __sanitizer_finish_switch_fiber(self.fake_stack, &bottom, &size);
    self.fake_stack = nullptr;
    if (from.stack) return;
    from.stack = const_cast<char *>(static_cast<const char *>(bottom));
    from.size = size;
}

} // namespace cuemu
