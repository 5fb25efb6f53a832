// SPDX-License-Identifier: Apache-2.0
#include "alloc.h"

namespace test {
namespace {

void *watched_new(size_t bytes, size_t alignment) {
    if (NewCounter::counts()) {
        NewCounter::bytes += int64_t(bytes);
        if (NewCounter::failure.hits(NewCounter::calls++)) {
            if (NewCounter::on_failure == nullptr) throw std::bad_alloc();
            NewCounter::on_failure();
        }
    }
    void *memory = alignment == 0 ? std::malloc(bytes == 0 ? 1 : bytes)
                                  : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (memory == nullptr) throw std::bad_alloc();
    ++NewCounter::live;
    return memory;
}
void *watched_new_or_null(size_t bytes, size_t alignment) noexcept {
    try {
        return watched_new(bytes, alignment);
    } catch (const std::bad_alloc &) { return nullptr; }
}
void watched_delete(void *memory) noexcept {
    if (memory != nullptr) --NewCounter::live;
    std::free(memory);
}

} // namespace
} // namespace test

__attribute__((noinline)) void *operator new(size_t bytes) { return test::watched_new(bytes, 0); }
__attribute__((noinline)) void *operator new[](size_t bytes) { return test::watched_new(bytes, 0); }
__attribute__((noinline)) void *operator new(size_t bytes, std::align_val_t a) {
    return test::watched_new(bytes, size_t(a));
}
__attribute__((noinline)) void *operator new[](size_t bytes, std::align_val_t a) {
    return test::watched_new(bytes, size_t(a));
}
__attribute__((noinline)) void *operator new(size_t bytes, const std::nothrow_t &) noexcept {
    return test::watched_new_or_null(bytes, 0);
}
__attribute__((noinline)) void *operator new[](size_t bytes, const std::nothrow_t &) noexcept {
    return test::watched_new_or_null(bytes, 0);
}
__attribute__((noinline)) void operator delete(void *memory, const std::nothrow_t &) noexcept {
    test::watched_delete(memory);
}
__attribute__((noinline)) void operator delete[](void *memory, const std::nothrow_t &) noexcept {
    test::watched_delete(memory);
}
__attribute__((noinline)) void operator delete(void *memory) noexcept { test::watched_delete(memory); }
__attribute__((noinline)) void operator delete[](void *memory) noexcept { test::watched_delete(memory); }
__attribute__((noinline)) void operator delete(void *memory, size_t) noexcept { test::watched_delete(memory); }
__attribute__((noinline)) void operator delete[](void *memory, size_t) noexcept { test::watched_delete(memory); }
__attribute__((noinline)) void operator delete(void *memory, std::align_val_t) noexcept {
    test::watched_delete(memory);
}
__attribute__((noinline)) void operator delete[](void *memory, std::align_val_t) noexcept {
    test::watched_delete(memory);
}
__attribute__((noinline)) void operator delete(void *memory, size_t, std::align_val_t) noexcept {
    test::watched_delete(memory);
}
__attribute__((noinline)) void operator delete[](void *memory, size_t, std::align_val_t) noexcept {
    test::watched_delete(memory);
}
