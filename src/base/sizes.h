// SPDX-License-Identifier: Apache-2.0
// Sizes and limits that several folders use.
#pragma once
#include <cstddef>
#include <cstdint>

namespace dsopt {

/// Size of a cache line in bytes. Arrays that different threads write are aligned to it, to avoid false sharing.
constexpr size_t kCacheLine = 64;

constexpr size_t round_up(size_t bytes, size_t to = kCacheLine) { return (bytes + to - 1) / to * to; }
constexpr int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

/// Largest size in bytes of a read, write or copy between a file, the host and a device.
constexpr size_t kPiece = size_t(4) << 20;

/// Partitions a block of memory into arrays that are aligned to kCacheLine. With NULL memory it only counts bytes, and
/// the arrays are NULL.
class Arena {
public:
    explicit Arena(void *memory) : memory_(static_cast<char *>(memory)) {}
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

/// Alignment in bytes of the first array in a workspace. The caller's memory may have any alignment.
constexpr size_t kWorkspaceAlignment = 256;

/// Returns the size to request from the caller, so that `bytes` aligned bytes fit whatever the memory's alignment.
constexpr size_t with_alignment_padding(size_t bytes) { return bytes == 0 ? 0 : bytes + kWorkspaceAlignment - 1; }
/// Returns the number of bytes from `memory` to the next multiple of kWorkspaceAlignment.
inline size_t alignment_padding(const void *memory) {
    const auto address = size_t(reinterpret_cast<uintptr_t>(memory));
    return round_up(address, kWorkspaceAlignment) - address;
}

/// Largest number of ranks of a comm, and of files of a checkpoint. No machine has more, and sizes computed from it do
/// not overflow.
constexpr int32_t kMaxRanks = 65536;
/// Largest number of data-parallel ranks of all nodes: fp32 represents every integer up to 2^24.
constexpr int64_t kMaxDataRanks = int64_t(1) << 24;

} // namespace dsopt
