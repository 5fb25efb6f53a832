// SPDX-License-Identifier: Apache-2.0
// Tensors of a checkpoint, which may be in pieces in the files of several ranks.
#pragma once
#include "base/range.h"
#include "checkpoint/metadata.h"
#include <unordered_map>

namespace dsopt {

/// Consecutive bytes of a tensor of a file.
struct SavedSegment {
    const SafetensorsReader *file;
    size_t index;
    uint64_t offset, bytes;
    bool is_whole() const { return bytes == file->tensors()[index].bytes; }
};

/// A range of a saved tensor: segments, one after the other.
class SavedRange {
public:
    SavedRange() = default;
    /// A whole tensor of one file.
    SavedRange(const SafetensorsReader &file, size_t index) { add({&file, index, 0, file.tensors()[index].bytes}); }
    void add(const SavedSegment &segment) {
        segments_.push_back(segment);
        bytes_ += segment.bytes;
    }
    uint64_t bytes() const { return bytes_; }
    const std::vector<SavedSegment> &segments() const { return segments_; }
    /// Returns the name of the tensor, for messages. There must be a segment.
    const TensorEntry &tensor() const { return segments_[0].file->tensors()[segments_[0].index]; }
    /// Compares the checksums of the tensors that have the bytes. If `data` is not NULL, stores the bytes.
    void verify(char *data = nullptr) const;
    /// Reads bytes [offset, offset + bytes) without comparing a checksum.
    void read(uint64_t offset, char *data, size_t bytes) const;

private:
    std::vector<SavedSegment> segments_;
    uint64_t bytes_ = 0;
};

/// The tensors of all files of a save of sharded state, by name.
class SavedPieces {
public:
    /// `files` are in the order of ranks.
    explicit SavedPieces(const std::vector<std::unique_ptr<SafetensorsReader>> &files);
    /// Returns the dtype of a tensor; 0: there is none of that name.
    int32_t dtype(const std::string &name) const;
    /// Returns a range of a tensor. Throws MISMATCH unless its pieces have this dtype and tile the range.
    SavedRange find(const TensorEntry &whole, const Range &range) const;

private:
    struct Piece {
        size_t rank, index;
        int64_t begin;
    };
    const std::vector<std::unique_ptr<SafetensorsReader>> &files_;
    std::unordered_map<std::string, std::vector<Piece>> pieces_;
};

} // namespace dsopt
