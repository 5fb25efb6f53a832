// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/saved_tensors.h"
#include <algorithm>
#include <cstring>

namespace dsopt {
namespace {

/// Splits NAME@BEGIN. Returns 0 for a name without a piece's begin.
int64_t split_name(const std::string &text, std::string &name) {
    const size_t mark = text.rfind(kPieceMark);
    int64_t begin = 0;
    name = text;
    if (mark == std::string::npos) return 0;
    const char *const first = text.data() + mark + 1, *const last = text.data() + text.size();
    const auto [end, error] = std::from_chars(first, last, begin);
    if (error != std::errc() || end != last || begin < 0) return 0; // the name of a parameter has the mark
    name.resize(mark);
    return begin;
}

} // namespace

void SavedRange::verify(char *data) const {
    for (const SavedSegment &segment : segments_) {
        segment.file->verify(segment.index, segment.offset, data, data != nullptr ? size_t(segment.bytes) : 0);
        if (data != nullptr) data += segment.bytes;
    }
}

void SavedRange::read(uint64_t offset, char *data, size_t bytes) const {
    for (const SavedSegment &segment : segments_) {
        if (offset < segment.bytes && bytes != 0) {
            const auto count = size_t(std::min<uint64_t>(bytes, segment.bytes - offset));
            segment.file->read(segment.index, segment.offset + offset, data, count);
            data += count;
            bytes -= count;
            offset = 0;
        } else {
            offset -= std::min(offset, segment.bytes);
        }
    }
}

SavedPieces::SavedPieces(const std::vector<std::unique_ptr<SafetensorsReader>> &files) : files_(files) {
    std::string name;
    for (size_t rank = 0; rank < files.size(); ++rank)
        for (size_t i = 0; i < files[rank]->tensors().size(); ++i) {
            const int64_t begin = split_name(files[rank]->tensors()[i].name, name);
            pieces_[name].push_back({rank, i, begin});
        }
    for (auto &[key, list] : pieces_)
        std::stable_sort(list.begin(), list.end(), [](const Piece &a, const Piece &b) { return a.begin < b.begin; });
}

int32_t SavedPieces::dtype(const std::string &name) const {
    const auto found = pieces_.find(name);
    if (found == pieces_.end()) return 0;
    const Piece &piece = found->second[0];
    return files_[piece.rank]->tensors()[piece.index].dtype;
}

SavedRange SavedPieces::find(const TensorEntry &whole, const Range &range) const {
    const std::string name = quoted(whole.name);
    const auto found = pieces_.find(whole.name);
    if (found == pieces_.end()) throw Error(DSOPT_ERR_MISMATCH, "the checkpoint has no tensor %s", name.c_str());
    const auto size = int64_t(dtype_size(whole.dtype));
    SavedRange result;
    int64_t end = range.begin; // of what was found
    size_t rank_before = 0;
    for (const Piece &piece : found->second) {
        const TensorEntry &tensor = files_[piece.rank]->tensors()[piece.index];
        if (tensor.dtype != whole.dtype)
            throw Error(DSOPT_ERR_MISMATCH, "tensor %s of the checkpoint has dtype %s, here it is %s", name.c_str(),
                        dtype_name(tensor.dtype), dtype_name(whole.dtype));
        const int64_t numel = int64_t(tensor.bytes) / size;
        if (numel > range.whole || piece.begin > range.whole - numel)
            throw Error(DSOPT_ERR_MISMATCH, "%s: the checkpoint has %lld elements from %lld on, here it has %lld",
                        name.c_str(), ll(numel), ll(piece.begin), ll(range.whole)); // the end may be beyond 2^63
        const Range have{piece.begin, numel, range.whole}, both = intersection(have, range);
        if (both.numel == 0) {
            if (range.numel == 0 && numel == 0 && result.segments().empty())
                result.add({files_[piece.rank].get(), piece.index, 0, 0});
            continue;
        }
        if (both.begin < end)
            throw Error(DSOPT_ERR_MISMATCH, "%s: elements %lld to %lld are in the files of ranks %zu and %zu",
                        name.c_str(), ll(both.begin), ll(std::min(end, both.end()) - 1), rank_before, piece.rank);
        if (both.begin > end) break;
        result.add({files_[piece.rank].get(), piece.index, uint64_t((both.begin - piece.begin) * size),
                    uint64_t(both.numel * size)});
        end = both.end();
        rank_before = piece.rank;
    }
    if (end != range.end()) {
        int64_t next = range.end(); // where the next piece begins
        for (const Piece &piece : found->second)
            if (piece.begin > end) next = std::min(next, piece.begin);
        throw Error(DSOPT_ERR_MISMATCH, "%s: elements %lld to %lld are in no file", name.c_str(), ll(end),
                    ll(next - 1));
    }
    return result;
}

} // namespace dsopt
