// SPDX-License-Identifier: Apache-2.0
// Memory for the tensors of a test: host memory or device memory. Depends on no test framework.
#pragma once
#include "device.h"
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <utility>

namespace test {

/// Functions that throw if they fail. `write` and `read` copy from and to the host; they return after the copy, which
/// runs after the work that was enqueued on `stream`.
struct Memory {
    std::function<void *(size_t bytes)> allocate;
    std::function<void(void *memory)> release;
    std::function<void(void *to, const void *from, size_t bytes)> write, read;
    void *stream = nullptr; // of the steps
};

/// Returns functions that allocate exact sizes with malloc, so that a sanitizer detects accesses past the end of a
/// tensor.
inline Memory host_memory() {
    const auto copy = [](void *to, const void *from, size_t bytes) {
        if (bytes != 0) std::memcpy(to, from, bytes);
    };
    const auto allocate = [](size_t bytes) {
        void *const memory = std::malloc(bytes != 0 ? bytes : 1);
        if (memory == nullptr) throw std::bad_alloc();
        return memory;
    };
    return {allocate, [](void *memory) { std::free(memory); }, copy, copy};
}

/// Memory of the device under test.
inline Memory memory_under_test() {
    if (!on_cuda()) return host_memory();
    return {allocate_shared, free_shared, write_device,
            [](void *to, const void *from, size_t bytes) { write_device(to, from, bytes); }};
}

/// A block of bytes, which begins `shift` bytes after the start of its allocation. The Memory must outlive the block.
/// The address is not NULL even for 0 bytes.
class Block {
public:
    Block(const Memory &memory, size_t bytes, size_t shift = 0) :
        memory_(&memory),
        bytes_(bytes),
        shift_(shift),
        base_(static_cast<char *>(memory.allocate(bytes + shift + (bytes + shift == 0)))) {}
    Block(const Memory &memory, const std::string &text) : Block(memory, text.size()) { set(text); }
    ~Block() {
        if (base_ != nullptr) memory_->release(base_);
    }
    Block(Block &&other) noexcept :
        memory_(other.memory_),
        bytes_(other.bytes_),
        shift_(other.shift_),
        base_(std::exchange(other.base_, nullptr)) {}
    Block &operator=(Block &&) = delete;

    char *data() const { return base_ + shift_; }
    size_t bytes() const { return bytes_; }
    void set(const void *from) const { memory_->write(data(), from, bytes_); }
    void set(const std::string &from) const { set(static_cast<const void *>(from.data())); }
    std::string text() const {
        std::string to(bytes_, '\0');
        memory_->read(to.data(), data(), bytes_);
        return to;
    }

private:
    const Memory *memory_;
    size_t bytes_, shift_;
    char *base_;
};

} // namespace test
