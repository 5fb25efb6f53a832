// SPDX-License-Identifier: Apache-2.0
// Sizes of caches, from which kernels choose how they read and write memory. No choice changes a bit of the result.
#pragma once
#include <cstdint>

namespace dsopt::cpu {

struct CacheSizes {
    int64_t core; // bytes of the second level, which is private to a core on most processors
    int64_t last; // bytes of the last level
};

/// Returns the sizes that the operating system reports for the first processor, or typical sizes where it reports none.
/// The environment variable DSOPT_CACHES=CORE,LAST, in bytes, overrides both; with a CORE of 0 every list is
/// prefetched.
CacheSizes cache_sizes();

} // namespace dsopt::cpu
