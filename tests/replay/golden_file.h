// SPDX-License-Identifier: Apache-2.0
// One recorded case: a safetensors file in the format of tests/golden/README.md. Reading checks everything, so that a
// damaged file leads to an error text and never to a wrong comparison.
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

/// The reason why a case fails, other than a difference of values.
class Failure : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char *format, ...);

// Dtypes are DSOPT_ constants everywhere, in addition to this one of recorded files. An E4M3 number has the value of its
// code.
constexpr int32_t kI64 = 102;
size_t element_size(int32_t dtype);
const char *dtype_name(int32_t dtype);
/// Converts any dtype to double exactly. An I64 that a double cannot represent is a Failure.
double to_double(const void *data, int32_t dtype, int64_t index);

struct Tensor {
    std::string name;
    int32_t dtype = 0;
    std::vector<int64_t> shape;
    int64_t numel = 0;
    const unsigned char *data = nullptr; ///< inside the GoldenFile, at any alignment

    /// Number of elements of one row of the leading dimension.
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
    /// Returns NULL if there is no such tensor.
    const Tensor *find(const std::string &name) const;
    // Tensor name for a rank: a value shared by all ranks is stored once. If neither exists, the shared name.
    std::string name_of(const std::string &scalar, int64_t rank) const;
    std::string name_of(const std::string &quantity, int64_t rank, const std::string &item) const;

    // Metadata. Reading a value marks it as understood; a missing or malformed one is a Failure that names the key.
    bool has(const std::string &key) const { return metadata_.count(key) != 0; }
    const std::string &text(const std::string &key);
    double number(const std::string &key);
    int64_t integer(const std::string &key);
    bool flag(const std::string &key); ///< "0" or "1"
    /// Marks a key as understood that does not affect the replay.
    void ignore(const std::string &key) { read_.insert(key); }
    /// Failure if a key was never read, because it might change the meaning of the record.
    void finish() const;

private:
    void parse_header(const char *json, size_t length, size_t data_bytes, const unsigned char *data);

    std::vector<unsigned char> bytes_;
    std::map<std::string, Tensor> tensors_;
    std::map<std::string, std::string> metadata_;
    std::set<std::string> read_;
};

/// Parses the whole text as a number. On error throws a Failure that names `what`.
double parse_number(const std::string &text, const std::string &what);

} // namespace replay
