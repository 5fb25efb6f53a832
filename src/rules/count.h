// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/hd.h"
#include <cstdint>

namespace dsopt {

/// Counters saturate. They may come from the caller's memory, which may have any value.
DSOPT_HD int32_t more(int32_t count, int32_t by) { return count < INT32_MAX - by ? count + by : INT32_MAX; }
DSOPT_HD int32_t one_more(int32_t count) { return more(count, 1); }

} // namespace dsopt
