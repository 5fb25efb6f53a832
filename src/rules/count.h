// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/hd.h"
#include <cstdint>

namespace dsopt {

/// Counters stay at the end of their range. They may come from a caller's words, which may be anything.
DSOPT_HD int32_t more(int32_t count, int32_t by) { return count < INT32_MAX - by ? count + by : INT32_MAX; }
DSOPT_HD int32_t one_more(int32_t count) { return more(count, 1); }

} // namespace dsopt
