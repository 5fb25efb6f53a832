// SPDX-License-Identifier: Apache-2.0
// The device that the tests of a process run on. Depends on no test framework.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace test {

/// Returns DSOPT_BACKEND_CUDA if the environment has DSOPT_TEST_DEVICE=cuda (a GPU) or =emulated (the process must load
/// the libdsopt with the emulated device), else DSOPT_BACKEND_CPU.
int32_t default_backend();
bool on_cuda();
/// Returns the reason why the device cannot be used, or an empty text. Throws if DSOPT_TEST_DEVICE is `emulated` and
/// the libdsopt with the emulated device is not loaded.
std::string device_error();

bool is_emulated();
/// Returns and clears the last error of the CUDA runtime, or returns an empty text. Waits for the device.
std::string last_error();

/// Waits for all work of the device. Does nothing on the CPU.
void synchronize();
/// Memory that the host and the device access at one address, 256-byte aligned: managed memory on CUDA.
void *allocate_shared(size_t bytes);
void free_shared(void *memory);
struct FreeShared {
    void operator()(char *memory) const { free_shared(memory); }
};

/// Copies from and to device memory, including memory of the engine, after all work of the device is complete.
std::string device_text(const void *from, size_t bytes);
void write_device(void *to, const void *from, size_t bytes);
template <class T> T on_host(const T *from) {
    T value;
    std::memcpy(&value, device_text(from, sizeof value).data(), sizeof value);
    return value;
}
/// Copies values to memory of the device that lives until end_copies().
const void *device_copy(const void *from, size_t bytes);
template <class T> const T *on_device(const T &value) {
    return static_cast<const T *>(device_copy(&value, sizeof value));
}
template <class T> const T *on_device(const std::vector<T> &values) {
    return static_cast<const T *>(device_copy(values.data(), values.size() * sizeof(T)));
}
template <class T, size_t N> const T *on_device(const T (&values)[N]) {
    return static_cast<const T *>(device_copy(values, sizeof values));
}
void end_copies();

/// A vector in memory of the device. Access from the host waits for the device, except address().
template <class T> class Shared {
public:
    Shared() = default;
    explicit Shared(size_t count, T value = T()) { assign(count, value); }
    Shared(const std::vector<T> &values) { assign(values); }
    Shared(std::initializer_list<T> values) { assign(std::vector<T>(values)); }
    Shared(const Shared &other) { assign(other); }
    Shared(Shared &&) noexcept = default;
    Shared &operator=(Shared other) noexcept {
        count_ = other.count_;
        memory_ = std::move(other.memory_);
        return *this;
    }
    void assign(size_t count, T value) { assign(std::vector<T>(count, value)); }
    void assign(const std::vector<T> &values) {
        count_ = values.size();
        memory_.reset(static_cast<char *>(allocate_shared(count_ * sizeof(T))));
        std::copy(values.begin(), values.end(), address());
    }
    T *address() const { return reinterpret_cast<T *>(memory_.get()); }
    T *data() const {
        synchronize();
        return address();
    }
    size_t size() const { return count_; }
    T &operator[](size_t i) const { return data()[i]; }
    T &operator*() const { return *data(); }
    T *operator->() const { return data(); }
    T *begin() const { return data(); }
    T *end() const { return address() + count_; }
    T &back() const { return data()[count_ - 1]; }
    operator std::vector<T>() const { return {begin(), end()}; }
    bool operator==(const Shared &other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

private:
    size_t count_ = 0;
    std::unique_ptr<char, FreeShared> memory_;
};

} // namespace test
