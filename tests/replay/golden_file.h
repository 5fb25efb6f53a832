// SPDX-License-Identifier: Apache-2.0
// One recorded case: a safetensors file in the format of tests/golden/README.md. Everything is checked on reading, so
// that a damaged file is an error text and never a wrong comparison.
#pragma once
#include "dsopt.h"
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace replay {

/// Why a case fails when it is not a difference of values.
class Failure : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char *format, ...);

// Dtypes are the DSOPT_ constants everywhere, and these two of recorded files.
constexpr int32_t kU8 = 101, kI64 = 102;
size_t element_size(int32_t dtype);
const char *dtype_name(int32_t dtype);
/// Any dtype as a double, exactly; an I64 that a double cannot hold is a Failure.
double to_double(const void *data, int32_t dtype, int64_t index);

struct Tensor {
    std::string name;
    int32_t dtype = 0;
    std::vector<int64_t> shape;
    int64_t numel = 0;
    const unsigned char *data = nullptr; ///< inside the GoldenFile, at any alignment

    /// Elements of one row of the leading dimension.
    int64_t row_numel() const;
    const void *row(int64_t t) const { return data + size_t(t * row_numel()) * element_size(dtype); }
    double value(int64_t index) const { return to_double(data, dtype, index); }
};

class GoldenFile {
public:
    explicit GoldenFile(const std::string &path);
    GoldenFile(const GoldenFile &) = delete;
    GoldenFile &operator=(const GoldenFile &) = delete;

    const std::map<std::string, Tensor> &tensors() const { return tensors_; }
    /// NULL if there is none such.
    const Tensor *find(const std::string &name) const;
    // What a rank has: a value that all ranks share is stored once. Where there is neither, the name of the shared one.
    std::string name_of(const std::string &scalar, int64_t rank) const;
    std::string name_of(const std::string &quantity, int64_t rank, const std::string &item) const;

    // Metadata. A value that is read is thereby understood; a missing or malformed one is a Failure that names the key.
    bool has(const std::string &key) const { return metadata_.count(key) != 0; }
    const std::string &text(const std::string &key);
    double number(const std::string &key);
    int64_t integer(const std::string &key);
    bool flag(const std::string &key); ///< "0" or "1"
    /// A key that says nothing about how to replay.
    void ignore(const std::string &key) { read_.insert(key); }
    /// Failure if a key was never read: it might change what the record means.
    void finish() const;

private:
    void parse_header(const char *json, size_t length, size_t data_bytes, const unsigned char *data);

    std::vector<unsigned char> bytes_;
    std::map<std::string, Tensor> tensors_;
    std::map<std::string, std::string> metadata_;
    std::set<std::string> read_;
};

/// The whole text as a number; Failure that names `what` otherwise.
double parse_number(const std::string &text, const std::string &what);

} // namespace replay
