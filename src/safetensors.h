// SPDX-License-Identifier: Apache-2.0
// The checkpoint container: a safetensors file in which every bit is covered by a checksum. Knows nothing of
// optimizers.
//
//   8 bytes   length of the header, little-endian
//   header    JSON, padded with spaces so that the data begin at a multiple of 64 (4096 from 1 MiB of data on):
//             {"__metadata__":{"header_xxh3":"<32 hex digits>", <metadata>, "xxh3.<name>":"<32 hex digits>", ...},
//              "<name>":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}, ...}
//   data      the tensors one behind the other, those with large elements first, so that each is aligned
//
// The digits are XXH3-128 in its canonical byte order. "header_xxh3" comes first and is taken over the length field and
// the header with its own digits as '0'. Any safetensors reader can read the file; only files with these checksums are
// read here.
#pragma once
#include "status.h"
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dsopt {

struct TensorEntry {
    std::string name;           ///< UTF-8 without NUL, unique
    int32_t dtype;              ///< DSOPT_F32 ...
    std::vector<int64_t> shape; ///< at most 8 dimensions; none = a scalar
    uint64_t bytes;             ///< elements times element size
};

/// Takes bytes in order. Destroyed without commit() it leaves nothing behind.
class Sink {
public:
    virtual ~Sink() = default;
    virtual void begin(uint64_t total) = 0; ///< once, first: how many bytes will come
    virtual void write(const void *data, size_t bytes) = 0;
    virtual void commit() = 0; ///< once, last: makes what was written visible and durable
};

/// Gives bytes from anywhere.
class Source {
public:
    virtual ~Source() = default;
    virtual uint64_t size() const = 0;
    virtual void read(uint64_t offset, void *data, size_t bytes) const = 0; ///< all of them, or throws
};

/// Replaces a file, as a whole and durably: a crash at any time leaves the old file or the new one. Errors are
/// DSOPT_ERR_IO with the old file untouched; the one exception is a failing flush of the directory, after which the new
/// file is in place. The temporary is ".dsopt-<hash of the name>-<pid>-<counter>.tmp" beside the target; what killed
/// savers left of these is removed at the next save of the same target.
std::unique_ptr<Sink> file_sink(const char *path);
std::unique_ptr<Source> file_source(const char *path);

/// The caller's functions; `io` is copied. A return other than 0 is DSOPT_ERR_IO naming the number.
std::unique_ptr<Sink> callback_sink(const dsopt_io &io);
std::unique_ptr<Source> callback_source(const dsopt_io &io);

/// Delivers bytes [offset, offset + bytes) of tensor `index` of the list: returns a pointer to where they are in host
/// memory, or copies them to `buffer` and returns that. `bytes` is 1 to 4 MiB, pieces of a tensor come in order, and
/// every tensor is asked for twice.
using Deliver = std::function<const void *(size_t index, uint64_t offset, size_t bytes, void *buffer)>;
using Metadata = std::vector<std::pair<std::string, std::string>>;

/// Writes a container. Everything is checked and begin() called before the first tensor is asked for.
/// Throws DSOPT_ERR_ARGUMENT, _DTYPE, _SHAPE: a wrong entry; _UNSUPPORTED: header over the format's limit; _BUSY: a
/// tensor changed meanwhile; and what the sink and `deliver` throw.
void write_safetensors(Sink &sink, const Metadata &metadata, const std::vector<TensorEntry> &tensors,
                       const Deliver &deliver);

/// An open container. Const calls may come from several threads if the source allows it (the one of a file does).
class SafetensorsReader {
public:
    /// Reads and checks the whole header; throws DSOPT_ERR_IO or DSOPT_ERR_FORMAT. Needs memory for the header, not for
    /// tensors.
    explicit SafetensorsReader(std::unique_ptr<const Source> source);

    static constexpr size_t npos = size_t(-1);
    const std::map<std::string, std::string, std::less<>> &metadata() const {
        return metadata_;
    }                                                                                ///< without the checksums
    const std::vector<TensorEntry> &tensors() const { return tensors_; }             ///< in file order
    size_t find(std::string_view name) const;                                        ///< index of a tensor, or npos
    const std::string &checksum(size_t index) const { return checksums_.at(index); } ///< as saved

    /// Reads a tensor piece by piece and compares the checksum: DSOPT_ERR_CHECKSUM. `data`, if given, gets the bytes,
    /// good or not.
    void verify(size_t index, void *data = nullptr) const;
    /// Part of a tensor, unchecked.
    void read(size_t index, uint64_t offset, void *data, size_t bytes) const;

private:
    std::unique_ptr<const Source> source_;
    std::map<std::string, std::string, std::less<>> metadata_;
    std::vector<TensorEntry> tensors_;
    std::vector<uint64_t> offsets_; // from the start of the file
    std::vector<std::string> checksums_;
    std::map<std::string_view, size_t> index_; // views into tensors_
};

} // namespace dsopt
