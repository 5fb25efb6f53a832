// SPDX-License-Identifier: Apache-2.0
// Tensors in memory of the device under test with known contents, between guard bytes that must not change.
#pragma once
#include "device.h"
#include "numbers.h"
#include <memory>
#include <string>
#include <vector>

namespace test {

/// A tensor that begins `offset` bytes after a multiple of 64. Writes before or after the tensor are detected; with the
/// address sanitizer reads are detected, too. A const Array is writable for the engine: a step may zero gradients.
class Array {
public:
    Array() : Array(DSOPT_DTYPE_F32, 0, 0) {}
    Array(int32_t dtype, size_t numel, float value, size_t offset = 0);
    Array(int32_t dtype, const std::vector<float> &values);
    /// Returns the entry of a gradient list for a parameter without a gradient: its address is NULL.
    static Array absent(size_t numel, int32_t dtype = DSOPT_DTYPE_F32);
    Array(const Array &other);
    Array(Array &&) noexcept = default;
    Array &operator=(Array other) noexcept;

    /// Waits for the device, like every function that reads or writes the elements.
    char *data() const {
        synchronize();
        return address();
    }
    template <class T> T *as() const { return reinterpret_cast<T *>(data()); }
    int64_t numel() const { return numel_; }
    size_t size() const { return size_t(numel_); }
    int32_t dtype() const { return dtype_; }
    size_t bytes() const { return size() * size_of(dtype_); }
    dsopt_tensor tensor() const { return {absent_ ? nullptr : address(), numel_, dtype_, 0}; }

    float operator[](size_t i) const { return loaded(data() + i * size_of(dtype_), dtype_); }
    void set(size_t i, float value) const { store(data() + i * size_of(dtype_), dtype_, value); }
    std::vector<float> floats() const;
    /// Returns the bytes of the elements.
    std::string text() const;
    void write(const std::string &text) const { std::memcpy(data(), text.data(), text.size()); }
    void corrupt(int byte) const { std::memset(data(), byte, bytes()); }
    /// Fills with signs and fractions of all kinds and exponents from 2^-8 to 1, exact in the storage type.
    void fill(uint64_t seed) const;
    /// Returns true if the guard bytes before and after are unchanged.
    bool intact() const;

private:
    void allocate();
    void guard() const;
    char *address() const { return memory_.get() + begin_; }

    int64_t numel_;
    int32_t dtype_;
    bool absent_ = false;
    size_t begin_, tail_ = 0; // bytes before the first element, and after the last one
    std::unique_ptr<char, FreeShared> memory_;
};

std::vector<dsopt_tensor> list_of(const std::vector<Array> &arrays);

struct Shape {
    int64_t numel;
    int32_t param = DSOPT_DTYPE_F32, grad = DSOPT_DTYPE_F32;
    size_t offset = 0;    // bytes after a multiple of 64
    int64_t content = -1; // selects the numbers; -1: by index in the list
};
std::vector<Shape> shapes_of(const std::vector<int64_t> &sizes, int32_t param = DSOPT_DTYPE_F32,
                             int32_t grad = DSOPT_DTYPE_F32);

/// Parameters and gradients of several tensors.
class Model {
public:
    Model() = default;
    explicit Model(const std::vector<Shape> &shapes);
    void make_gradients(uint64_t seed) const;
    std::vector<dsopt_param> registered(size_t begin = 0, size_t end = SIZE_MAX) const;
    /// Returns the bytes of the parameters.
    std::string text() const;
    bool intact() const;
    std::vector<Array> params, grads;

private:
    std::vector<Shape> shapes_;
};

} // namespace test
