// SPDX-License-Identifier: Apache-2.0
// Sizes of caches, from which kernels choose how they read and write memory. No choice changes a bit of the result.
#pragma once
#include <cstdint>

namespace dsopt::cpu {

struct CacheSizes {
    int64_t core; // bytes of the second level, which mostly is a core's own
    int64_t last; // bytes of the last level
};

/// What the kernel says of the first processor; where it says nothing, usual sizes. DSOPT_CACHES=CORE,LAST in the
/// environment, in bytes, comes before both; with a CORE of 0 every list is prefetched.
CacheSizes cache_sizes();

} // namespace dsopt::cpu
