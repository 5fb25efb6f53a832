// SPDX-License-Identifier: Apache-2.0
// Memory that a caller lends for one call.
#pragma once
#include <cstddef>
#include <cstdint>

namespace dsopt {

/// Parts of a workspace begin on lines of their own, counted from here. The caller's memory may begin anywhere.
constexpr size_t kWorkspaceAlignment = 256;

/// Parts of other memory begin on lines of a cache.
constexpr size_t kLine = 64;
constexpr size_t whole_lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

/// What to ask of the caller, so that `bytes` fit behind any address.
constexpr size_t with_slack(size_t bytes) { return bytes == 0 ? 0 : bytes + kWorkspaceAlignment - 1; }
/// How far the first line is from `memory`.
inline size_t slack_of(const void *memory) {
    return (kWorkspaceAlignment - reinterpret_cast<uintptr_t>(memory) % kWorkspaceAlignment) % kWorkspaceAlignment;
}

} // namespace dsopt
