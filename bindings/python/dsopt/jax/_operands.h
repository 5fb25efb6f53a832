// SPDX-License-Identifier: Apache-2.0
// Operands and results of a custom call. A program may be exported or edited, so type and shape of each buffer are
// compared with the attributes before the buffer is read or written.
#pragma once

#include "dsopt.h"
#include "xla/ffi/api/ffi.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>
#include <type_traits>

namespace ffi = xla::ffi;

namespace {

struct Failure {
    ffi::ErrorCode code;
    std::string text;
};

[[noreturn]] void refuse(const std::string &text) { throw Failure{ffi::ErrorCode::kInvalidArgument, "dsopt: " + text}; }

using Dims = ffi::AnyBuffer::Dimensions;

// A buffer's name in error texts: a role, and optionally the name of a parameter.
struct Label {
    const char *role;
    const std::string *name = nullptr;

    std::string text() const { return name ? std::string(role) + " '" + *name + "'" : role; }
};

std::string text_of(Dims dims) {
    std::string text = "[";
    for (size_t i = 0; i < dims.size(); ++i) text += (i ? "," : "") + std::to_string(dims[i]);
    return text + "]";
}

// Returns the type as in the text of an HLO program, such as f32[64,8].
std::string text_of(ffi::DataType type, Dims dims) {
    std::ostringstream stream;
    stream << type;
    std::string text = stream.str();
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
    return text + text_of(dims);
}

// Returns 0 if the library has no such dtype.
int32_t dtype_of(ffi::DataType type) {
    switch (type) {
    case ffi::DataType::F32: return DSOPT_DTYPE_F32;
    case ffi::DataType::F16: return DSOPT_DTYPE_F16;
    case ffi::DataType::BF16: return DSOPT_DTYPE_BF16;
    case ffi::DataType::S32: return DSOPT_DTYPE_I32;
    case ffi::DataType::S16: return DSOPT_DTYPE_I16;
    case ffi::DataType::U8: return DSOPT_DTYPE_U8;
    case ffi::DataType::F8E4M3FN: return DSOPT_DTYPE_F8_E4M3;
    default: return 0;
    }
}

// Returns INVALID if XLA has no such type, or no call of dsopt.jax uses it.
ffi::DataType type_of(int32_t dtype) {
    switch (dtype) {
    case DSOPT_DTYPE_F32: return ffi::DataType::F32;
    case DSOPT_DTYPE_F16: return ffi::DataType::F16;
    case DSOPT_DTYPE_BF16: return ffi::DataType::BF16;
    case DSOPT_DTYPE_I32: return ffi::DataType::S32;
    case DSOPT_DTYPE_I16: return ffi::DataType::S16;
    case DSOPT_DTYPE_U8: return ffi::DataType::U8;
    case DSOPT_DTYPE_F8_E4M3: return ffi::DataType::F8E4M3FN;
    default: return ffi::DataType::INVALID;
    }
}

bool same(Dims a, Dims b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

int64_t numel_of(const ffi::AnyBuffer &buffer) { return static_cast<int64_t>(buffer.element_count()); }

dsopt_tensor tensor_of(const ffi::AnyBuffer &buffer) {
    return {buffer.untyped_data(), numel_of(buffer), dtype_of(buffer.element_type()), 0};
}

// True for the dtypes of parameters and gradients.
bool is_float(const ffi::AnyBuffer &buffer) {
    const ffi::DataType type = buffer.element_type();
    return type == ffi::DataType::F32 || type == ffi::DataType::F16 || type == ffi::DataType::BF16;
}

// Reads operands or results sequentially. Each function returns the next one, or refuses it by its label.
template <class Buffers> class Reader {
public:
    explicit Reader(const Buffers &buffers_) : buffers(buffers_) {}

    ffi::AnyBuffer any(Label label) {
        auto buffer = buffers.template get<ffi::AnyBuffer>(index++);
        if (!buffer) refuse(label.text() + " is missing: the call has " + count_text());
        if constexpr (kResults)
            return **buffer;
        else
            return *buffer;
    }

    ffi::AnyBuffer exact(Label label, ffi::DataType type, Dims dims) {
        const auto buffer = any(label);
        if (buffer.element_type() != type || !same(buffer.dimensions(), dims))
            refuse_as(label, buffer, text_of(type, dims));
        return buffer;
    }
    ffi::AnyBuffer exact(Label label, ffi::DataType type, std::initializer_list<int64_t> dims) {
        return exact(label, type, Dims(dims.begin(), dims.size()));
    }

    // A buffer of this type and number of elements, in any shape.
    ffi::AnyBuffer elements(Label label, ffi::DataType type, int64_t numel) {
        const auto buffer = any(label);
        if (buffer.element_type() != type || numel_of(buffer) != numel)
            refuse_as(label, buffer, text_of(type, Dims(&numel, 1)) + " or another shape with as many elements");
        return buffer;
    }

    // A buffer of 16-bit or 32-bit floats, in this shape.
    ffi::AnyBuffer floats(Label label, Dims dims) {
        const auto buffer = any(label);
        if (!is_float(buffer) || !same(buffer.dimensions(), dims))
            refuse_as(label, buffer, "f32, f16 or bf16, and the shape " + text_of(dims));
        return buffer;
    }

    // A buffer of 16-bit or 32-bit floats, in any shape.
    ffi::AnyBuffer float_elements(Label label, int64_t numel) {
        const auto buffer = any(label);
        if (!is_float(buffer) || numel_of(buffer) != numel)
            refuse_as(label, buffer, "f32, f16 or bf16, and have " + std::to_string(numel) + " elements");
        return buffer;
    }

    // A result that the call aliases to this operand: the same type, shape and memory. XLA copies if necessary.
    void aliased(Label label, const ffi::AnyBuffer &operand) {
        const auto buffer = exact(label, operand.element_type(), operand.dimensions());
        if (numel_of(buffer) && buffer.untyped_data() != operand.untyped_data())
            refuse(label.text() + " is in other memory than its operand: the call must alias the two");
    }

    void end() const {
        if (buffers.size() != index) refuse("the call has " + count_text() + ", must have " + std::to_string(index));
    }

private:
    static constexpr bool kResults = std::is_same_v<Buffers, ffi::RemainingRets>;

    std::string count_text() const { return std::to_string(buffers.size()) + (kResults ? " results" : " operands"); }

    [[noreturn]] static void refuse_as(Label label, const ffi::AnyBuffer &buffer, const std::string &wanted) {
        refuse(label.text() + " is " + text_of(buffer.element_type(), buffer.dimensions()) + ", must be " + wanted);
    }

    const Buffers &buffers;
    size_t index = 0;
};

} // namespace
