// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/hd.h"
#include <cstdint>

namespace dsopt {

/// Increments a counter, at most to INT32_MAX. Counters may come from the caller's memory, which may have any value.
DSOPT_HD int32_t saturating_add(int32_t count, int32_t increment) {
    return count < INT32_MAX - increment ? count + increment : INT32_MAX;
}
DSOPT_HD int32_t saturating_increment(int32_t count) { return saturating_add(count, 1); }

} // namespace dsopt
