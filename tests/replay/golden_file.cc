// SPDX-License-Identifier: Apache-2.0
#include "golden_file.h"
#include "support/numbers.h"
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <rapidjson/document.h>

namespace replay {
namespace {

struct DtypeRow {
    const char *name;
    int32_t dtype;
    size_t size;
};
constexpr DtypeRow dtype_rows[] = {{"F64", DSOPT_DTYPE_F64, 8},
                                   {"F32", DSOPT_DTYPE_F32, 4},
                                   {"F16", DSOPT_DTYPE_F16, 2},
                                   {"BF16", DSOPT_DTYPE_BF16, 2},
                                   {"I64", kI64, 8},
                                   {"I32", DSOPT_DTYPE_I32, 4},
                                   {"U8", DSOPT_DTYPE_U8, 1},
                                   {"I16", DSOPT_DTYPE_I16, 2},
                                   {"F8_E4M3", DSOPT_DTYPE_F8_E4M3, 1}};

const DtypeRow &dtype_row(int32_t dtype) {
    for (const DtypeRow &row : dtype_rows)
        if (row.dtype == dtype) return row;
    fail("dtype %d is not known", int(dtype));
}

template <class T> T load(const void *data, int64_t index) {
    T value;
    std::memcpy(&value, static_cast<const unsigned char *>(data) + size_t(index) * sizeof value, sizeof value);
    return value;
}

std::string string_of(const rapidjson::Value &value) { return {value.GetString(), value.GetStringLength()}; }

std::vector<unsigned char> read_all(const std::string &path) {
    std::ifstream stream(path, std::ios::binary);
    if (!stream) fail("cannot open %s: %s", path.c_str(), std::strerror(errno));
    std::vector<unsigned char> bytes{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
    if (stream.bad()) fail("cannot read %s", path.c_str());
    return bytes;
}

Tensor parse_tensor(const std::string &name, const rapidjson::Value &entry, size_t data_bytes,
                    const unsigned char *data, size_t &begin, size_t &end) {
    if (!entry.IsObject() || entry.MemberCount() != 3 || !entry.HasMember("dtype") || !entry.HasMember("shape") ||
        !entry.HasMember("data_offsets"))
        fail("tensor %s: an entry has dtype, shape and data_offsets", name.c_str());
    const auto &dtype = entry["dtype"], &shape = entry["shape"], &offsets = entry["data_offsets"];
    if (!dtype.IsString() || !shape.IsArray() || !offsets.IsArray() || offsets.Size() != 2 || !offsets[0].IsUint64() ||
        !offsets[1].IsUint64())
        fail("tensor %s: malformed entry", name.c_str());

    Tensor tensor;
    tensor.name = name;
    for (const DtypeRow &row : dtype_rows)
        if (std::strcmp(row.name, dtype.GetString()) == 0) tensor.dtype = row.dtype;
    if (tensor.dtype == 0) fail("tensor %s: dtype %s is not known", name.c_str(), dtype.GetString());
    tensor.numel = 1;
    for (const auto &dim : shape.GetArray()) {
        if (!dim.IsInt64() || dim.GetInt64() < 0) fail("tensor %s: malformed shape", name.c_str());
        if (__builtin_mul_overflow(tensor.numel, dim.GetInt64(), &tensor.numel) || tensor.numel > INT64_MAX / 8)
            fail("tensor %s: shape is too large", name.c_str());
        tensor.shape.push_back(dim.GetInt64());
    }
    begin = offsets[0].GetUint64();
    end = offsets[1].GetUint64();
    if (begin > end || end > data_bytes) fail("tensor %s: data_offsets lie outside the file", name.c_str());
    if (end - begin != size_t(tensor.numel) * element_size(tensor.dtype))
        fail("tensor %s: data_offsets do not fit dtype and shape", name.c_str());
    tensor.data = data + begin;
    return tensor;
}

} // namespace

void fail(const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    throw Failure(text);
}

size_t element_size(int32_t dtype) { return dtype_row(dtype).size; }
const char *dtype_name(int32_t dtype) { return dtype_row(dtype).name; }

double to_double(const void *data, int32_t dtype, int64_t index) {
    switch (dtype) {
    case DSOPT_DTYPE_F64: return load<double>(data, index);
    case DSOPT_DTYPE_F32: return double(load<float>(data, index));
    case DSOPT_DTYPE_F16: return double(test::to_fp32(load<uint16_t>(data, index), dtype));
    case DSOPT_DTYPE_BF16: return double(test::to_fp32(load<uint16_t>(data, index), dtype));
    case DSOPT_DTYPE_I32: return load<int32_t>(data, index);
    case DSOPT_DTYPE_U8:
    case DSOPT_DTYPE_F8_E4M3: return load<uint8_t>(data, index);
    case DSOPT_DTYPE_I16: return load<int16_t>(data, index);
    case kI64: {
        const int64_t value = load<int64_t>(data, index), limit = int64_t(1) << 53;
        if (value < -limit || value > limit)
            fail("integer %lld is too large to compare", static_cast<long long>(value));
        return double(value);
    }
    }
    fail("dtype %d is not known", int(dtype));
}

double parse_number(const std::string &text, const std::string &what) {
    double value = 0;
    const char *end = text.data() + text.size();
    const auto result = std::from_chars(text.data(), end, value);
    if (result.ec != std::errc() || result.ptr != end) fail("%s: '%s' is not a number", what.c_str(), text.c_str());
    return value;
}

int64_t Tensor::row_numel() const {
    int64_t product = 1;
    for (size_t i = 1; i < shape.size(); ++i) product *= shape[i];
    return product;
}

GoldenFile::GoldenFile(const std::string &path) : bytes_(read_all(path)) {
    if (bytes_.size() < 8) fail("file is too short");
    const uint64_t length = load<uint64_t>(bytes_.data(), 0);
    if (length > bytes_.size() - 8) fail("header is longer than the file");
    parse_header(reinterpret_cast<const char *>(bytes_.data()) + 8, length, bytes_.size() - 8 - length,
                 bytes_.data() + 8 + length);
}

void GoldenFile::parse_header(const char *json, size_t length, size_t data_bytes, const unsigned char *data) {
    rapidjson::Document document;
    document.Parse<rapidjson::kParseIterativeFlag | rapidjson::kParseValidateEncodingFlag>(json, length);
    if (document.HasParseError() || !document.IsObject()) fail("header is not a JSON object");

    std::vector<std::pair<size_t, size_t>> ranges;
    bool has_metadata = false;
    // Const, because clang considers comparisons of RapidJSON's other iterators ambiguous in C++20.
    for (const auto &member : static_cast<const rapidjson::Document &>(document).GetObject()) {
        const std::string name = string_of(member.name);
        if (name == "__metadata__") {
            if (has_metadata || !member.value.IsObject()) fail("header: malformed or repeated __metadata__");
            has_metadata = true;
            for (const auto &entry : member.value.GetObject()) {
                const std::string key = string_of(entry.name);
                if (!entry.value.IsString()) fail("metadata %s: not a string", key.c_str());
                if (!metadata_.emplace(key, string_of(entry.value)).second)
                    fail("metadata %s: given twice", key.c_str());
            }
            continue;
        }
        size_t begin = 0, end = 0;
        Tensor tensor = parse_tensor(name, member.value, data_bytes, data, begin, end);
        if (!tensors_.emplace(name, std::move(tensor)).second) fail("tensor %s: given twice", name.c_str());
        ranges.emplace_back(begin, end);
    }

    // Bytes that belong to no tensor or to two mean that the header does not describe this file.
    std::sort(ranges.begin(), ranges.end());
    size_t covered = 0;
    for (const auto &[begin, end] : ranges) {
        if (begin != covered) fail("header: tensors overlap or leave a gap at byte %zu of the data", covered);
        covered = end;
    }
    if (covered != data_bytes) fail("header: %zu bytes at the end belong to no tensor", data_bytes - covered);
}

const Tensor *GoldenFile::find(const std::string &name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : &found->second;
}

std::string GoldenFile::name_of(const std::string &scalar, int64_t rank) const {
    const std::string own = scalar + "/r" + std::to_string(rank);
    return find(scalar) == nullptr && find(own) != nullptr ? own : scalar;
}

std::string GoldenFile::name_of(const std::string &quantity, int64_t rank, const std::string &item) const {
    const std::string shared = quantity + "/all/" + item, own = quantity + "/r" + std::to_string(rank) + "/" + item;
    return find(shared) == nullptr && find(own) != nullptr ? own : shared;
}

const std::string &GoldenFile::text(const std::string &key) {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) fail("metadata %s is missing", key.c_str());
    read_.insert(key);
    return found->second;
}

double GoldenFile::number(const std::string &key) { return parse_number(text(key), "metadata " + key); }

int64_t GoldenFile::integer(const std::string &key) {
    const double value = number(key);
    if (!(std::abs(value) <= 0x1p53) || value != std::floor(value)) fail("metadata %s: not an integer", key.c_str());
    return int64_t(value);
}

bool GoldenFile::flag(const std::string &key) {
    const std::string &value = text(key);
    if (value != "0" && value != "1") fail("metadata %s: '%s' is neither 0 nor 1", key.c_str(), value.c_str());
    return value == "1";
}

void GoldenFile::finish() const {
    for (const auto &[key, value] : metadata_)
        if (read_.count(key) == 0)
            fail("metadata %s = %.100s is not understood by this algorithm's replay", key.c_str(), value.c_str());
}

} // namespace replay
