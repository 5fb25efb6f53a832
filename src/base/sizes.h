// SPDX-License-Identifier: Apache-2.0
// Sizes and limits that more than one folder knows.
#pragma once
#include <cstddef>
#include <cstdint>

namespace dsopt {

/// Arrays that different threads write begin on cache lines of their own.
constexpr size_t kLine = 64;

constexpr size_t round_up(size_t bytes, size_t to = kLine) { return (bytes + to - 1) / to * to; }
constexpr int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

/// No read, write or copy between a file, the host and a device is larger.
constexpr size_t kPiece = size_t(4) << 20;

/// A block of memory in pieces that begin on lines of their own. NULL: they are counted, and are nowhere.
class Pieces {
public:
    explicit Pieces(void *memory) : memory_(static_cast<char *>(memory)) {}
    template <class T> void take_bytes(T *&piece, size_t bytes) {
        piece = memory_ != nullptr ? reinterpret_cast<T *>(memory_ + bytes_) : nullptr;
        bytes_ += round_up(bytes);
    }
    template <class T> void take(T *&piece, int64_t count) { take_bytes(piece, size_t(count) * sizeof(T)); }
    size_t bytes() const { return bytes_; }

private:
    char *const memory_;
    size_t bytes_ = 0;
};

/// The first line of a workspace begins at a multiple of this. The caller's memory may begin anywhere.
constexpr size_t kWorkspaceAlignment = 256;

/// What to ask of the caller, so that `bytes` fit behind any address.
constexpr size_t with_slack(size_t bytes) { return bytes == 0 ? 0 : bytes + kWorkspaceAlignment - 1; }
/// How far the first line is from `memory`.
inline size_t slack_of(const void *memory) {
    const auto address = size_t(reinterpret_cast<uintptr_t>(memory));
    return round_up(address, kWorkspaceAlignment) - address;
}

/// Ranks of one comm, and files of one save. No machine has so many; sizes that are made from them do not overflow.
constexpr int32_t kMostRanks = 65536;
/// Data-parallel ranks of all nodes: fp32 counts no further, one by one.
constexpr int64_t kMostDataRanks = int64_t(1) << 24;

} // namespace dsopt
