// SPDX-License-Identifier: Apache-2.0
// An interval of a registered tensor, or of another array.
#pragma once
#include "base/hd.h"
#include <cstdint>

namespace dsopt {

/// Elements [begin, end()) of an array of `whole` elements.
struct Range {
    int64_t begin, numel, whole;

    DSOPT_HD constexpr int64_t end() const { return begin + numel; }
    /// Returns the same elements, which must be in `outer`, with indices relative to the begin of `outer`.
    DSOPT_HD constexpr Range within(const Range &outer) const { return {begin - outer.begin, numel, outer.numel}; }
};
DSOPT_HD constexpr Range whole_range(int64_t numel) { return {0, numel, numel}; }

/// Returns the elements that are in both ranges of an array. An empty result begins in `b`, or at its end.
DSOPT_HD constexpr Range intersection(const Range &a, const Range &b) {
    const int64_t begin = a.begin < b.begin   ? b.begin
                          : a.begin < b.end() ? a.begin
                                              : b.end(),
                  end = a.end() < b.end() ? a.end() : b.end();
    return {begin, end > begin ? end - begin : 0, b.whole};
}

} // namespace dsopt
