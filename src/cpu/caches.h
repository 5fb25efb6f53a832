// SPDX-License-Identifier: Apache-2.0
// Sizes of caches, from which loops choose how they ask for memory. No choice changes a bit of the result.
#pragma once
#include <cstdint>

namespace dsopt::cpu {

struct CacheSizes {
    int64_t core; // bytes of the second level, which mostly is a core's own
    int64_t last; // bytes of the last level
};

/// What the kernel says of the first processor; where it says nothing, usual sizes. DSOPT_CACHES=CORE,LAST in the
/// environment, in bytes, comes before both; a CORE of 0 has every list asked for ahead.
CacheSizes cache_sizes();

} // namespace dsopt::cpu
