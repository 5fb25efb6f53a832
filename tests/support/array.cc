// SPDX-License-Identifier: Apache-2.0
#include "array.h"
#include "digest.h"
#if __has_include(<sanitizer/asan_interface.h>) // its macros do nothing without the sanitizer
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes) ((void)(begin), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) ((void)(begin), (void)(bytes))
#endif

namespace test {
namespace {

constexpr size_t kLine = 64;
constexpr char kGuard = 0x5a;

bool is_guard(const char *begin, size_t bytes) {
    return std::all_of(begin, begin + bytes, [](char c) { return c == kGuard; });
}

} // namespace

void Array::allocate() {
    const size_t all = (begin_ + bytes() + 2 * kLine) / kLine * kLine;
    memory_.reset(static_cast<char *>(allocate_shared(all)));
    tail_ = all - begin_ - bytes();
    std::memset(memory_.get(), kGuard, begin_);
    std::memset(address() + bytes(), kGuard, tail_);
    guard();
}
void Array::guard() const {
    ASAN_POISON_MEMORY_REGION(memory_.get(), begin_);
    ASAN_POISON_MEMORY_REGION(address() + bytes(), tail_);
}

Array::Array(int32_t dtype, size_t numel, float value, size_t offset) :
    numel_(int64_t(numel)),
    dtype_(dtype),
    begin_(kLine + offset) {
    allocate();
    corrupt(0);
    if (bits_of(value) != 0)
        for (size_t i = 0; i < numel; ++i) store(address() + i * size_of(dtype), dtype, value);
}
Array::Array(int32_t dtype, const std::vector<float> &values) : Array(dtype, values.size(), 0) {
    for (size_t i = 0; i < values.size(); ++i) store(address() + i * size_of(dtype), dtype, values[i]);
}
Array Array::absent(size_t numel, int32_t dtype) {
    Array array(dtype, numel, 0);
    array.absent_ = true;
    return array;
}
Array::Array(const Array &other) :
    numel_(other.numel_),
    dtype_(other.dtype_),
    absent_(other.absent_),
    begin_(other.begin_) {
    allocate();
    std::memcpy(data(), other.data(), bytes());
}
Array &Array::operator=(Array other) noexcept {
    numel_ = other.numel_;
    dtype_ = other.dtype_;
    absent_ = other.absent_;
    begin_ = other.begin_;
    tail_ = other.tail_;
    memory_ = std::move(other.memory_);
    return *this;
}

std::vector<float> Array::floats() const {
    std::vector<float> values(size());
    const char *const from = data();
    for (size_t i = 0; i < size(); ++i) values[i] = loaded(from + i * size_of(dtype_), dtype_);
    digest(from, bytes(), dtype_);
    return values;
}
std::string Array::text() const {
    std::string text(data(), bytes());
    digest(text.data(), bytes(), dtype_);
    return text;
}
void Array::fill(uint64_t seed) const {
    Random random(seed);
    char *const to = data();
    for (int64_t i = 0; i < numel_; ++i) {
        const uint64_t r = random.next(), exponent = (r >> 40) % 9, sign = r >> 63;
        if (dtype_ == DSOPT_DTYPE_F32) {
            const auto bits = uint32_t(sign << 31 | (119 + exponent) << 23 | (r & 0x7fffffu));
            std::memcpy(to + 4 * i, &bits, 4);
        } else {
            const uint64_t pattern =
                dtype_ == DSOPT_DTYPE_F16 ? (7 + exponent) << 10 | (r & 0x3ffu) : (119 + exponent) << 7 | (r & 0x7fu);
            const auto bits = uint16_t(sign << 15 | pattern);
            std::memcpy(to + 2 * i, &bits, 2);
        }
    }
}
bool Array::intact() const {
    ASAN_UNPOISON_MEMORY_REGION(memory_.get(), begin_ + bytes() + tail_);
    synchronize();
    const bool good = is_guard(memory_.get(), begin_) && is_guard(address() + bytes(), tail_);
    guard();
    return good;
}

std::vector<dsopt_tensor> list_of(const std::vector<Array> &arrays) {
    std::vector<dsopt_tensor> list;
    for (const Array &array : arrays) list.push_back(array.tensor());
    return list;
}
std::vector<Shape> shapes_of(const std::vector<int64_t> &sizes, int32_t param, int32_t grad) {
    std::vector<Shape> shapes;
    for (const int64_t numel : sizes) shapes.push_back({numel, param, grad});
    return shapes;
}

Model::Model(const std::vector<Shape> &shapes) : shapes_(shapes) {
    for (size_t i = 0; i < shapes.size(); ++i) {
        if (shapes_[i].content < 0) shapes_[i].content = int64_t(i);
        params.emplace_back(shapes[i].param, size_t(shapes[i].numel), 0.0f, shapes[i].offset);
        grads.emplace_back(shapes[i].grad, size_t(shapes[i].numel), 0.0f, shapes[i].offset);
        params[i].fill(1000 + uint64_t(shapes_[i].content));
    }
    make_gradients(1);
}
void Model::make_gradients(uint64_t seed) const {
    for (size_t i = 0; i < grads.size(); ++i) grads[i].fill(seed * 1000003 + uint64_t(shapes_[i].content));
}
std::vector<dsopt_param> Model::registered(size_t begin, size_t end) const {
    std::vector<dsopt_param> list;
    for (size_t i = begin; i < std::min(end, params.size()); ++i) {
        dsopt_param param{};
        param.tensor = params[i].tensor();
        list.push_back(param);
    }
    return list;
}
std::string Model::text() const {
    std::string all;
    for (const Array &param : params) all += param.text();
    return all;
}
bool Model::intact() const {
    const auto good = [](const Array &array) { return array.intact(); };
    return std::all_of(params.begin(), params.end(), good) && std::all_of(grads.begin(), grads.end(), good);
}

} // namespace test
