// SPDX-License-Identifier: Apache-2.0
// The checkpoint container: a safetensors file in which every bit is covered by a checksum. This file does not depend
// on optimizers.
//
//   8 bytes   length of the header, little-endian
//   header    JSON, padded with spaces so that the data begin at a multiple of 64 (4096 from 1 MiB of data on):
//             {"__metadata__":{"header_xxh3":"<32 hex digits>", <metadata>, "xxh3.<name>":"<32 hex digits>", ...},
//              "<name>":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}, ...}
//   data      the tensors, contiguous, those with large elements first, so that each is aligned
//
// The digits are XXH3-128 in its canonical byte order. "header_xxh3" comes first. It is the checksum of the length
// field and the header, computed with '0' in place of its own digits. Any safetensors reader can read the file; only
// files with these checksums are read here.
#pragma once
#include "base/dtype.h"
#include "base/status.h"
#include "checkpoint/byte_io.h"
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
    int32_t dtype;              ///< DSOPT_DTYPE_F32 ...
    std::vector<int64_t> shape; ///< at most 8 dimensions; none = a scalar
    uint64_t bytes;             ///< elements times element size
};

/// Returns host memory with bytes [offset, offset + bytes) of tensor `index` of the list, valid until the next call.
/// `bytes` is from 1 byte to 4 MiB. The pieces of a tensor are requested in order, and every tensor twice.
using Deliver = std::function<const void *(size_t index, uint64_t offset, size_t bytes)>;
using Metadata = std::vector<std::pair<std::string, std::string>>;
using SortedMetadata = std::map<std::string, std::string, std::less<>>;

/// Writes a container. Checks everything and calls begin() before it requests the first tensor. Calls before_commit(),
/// which may throw, when all bytes are durable and not yet visible.
/// Throws DSOPT_ERR_ARGUMENT, _DTYPE, _SHAPE: a wrong entry; _UNSUPPORTED: header over the format's limit; _BUSY: a
/// tensor changed meanwhile; and what the sink and `deliver` throw.
void write_safetensors(
    Sink &sink, const Metadata &metadata, const std::vector<TensorEntry> &tensors, const Deliver &deliver,
    const std::function<void()> &before_commit = [] {});

/// An open container. Several threads may call const methods if the source allows that, as file_source() does.
class SafetensorsReader {
public:
    /// Reads and checks the whole header; throws DSOPT_ERR_IO or DSOPT_ERR_FORMAT. Needs memory for the header, not for
    /// tensors. A header longer than `longest_header` is refused before it is read.
    explicit SafetensorsReader(std::unique_ptr<const Source> source, uint64_t longest_header = kLongestHeader);

    static constexpr uint64_t kLongestHeader = 100'000'000; // the format's limit
    static constexpr size_t npos = size_t(-1);
    const SortedMetadata &metadata() const { return metadata_; }                     ///< without the checksums
    const std::vector<TensorEntry> &tensors() const { return tensors_; }             ///< in file order
    size_t find(std::string_view name) const;                                        ///< index of a tensor, or npos
    const std::string &checksum(size_t index) const { return checksums_.at(index); } ///< as saved

    /// Reads a tensor in pieces. Throws DSOPT_ERR_CHECKSUM if the checksum differs. If `data` is not NULL, the bytes
    /// are stored there, even if the checksum differs.
    void verify(size_t index, void *data = nullptr) const;
    /// The same, and stores bytes [offset, offset + bytes) only.
    void verify(size_t index, uint64_t offset, void *data, size_t bytes) const;
    /// Reads a part of a tensor without comparing the checksum.
    void read(size_t index, uint64_t offset, void *data, size_t bytes) const;

private:
    std::unique_ptr<const Source> source_;
    SortedMetadata metadata_;
    std::vector<TensorEntry> tensors_;
    std::vector<uint64_t> offsets_; // from the start of the file
    std::vector<std::string> checksums_;
    std::map<std::string_view, size_t> index_; // views into tensors_
};

} // namespace dsopt
