// SPDX-License-Identifier: Apache-2.0
// Digest of the parameters and state that a test reads: one number, equal on the CPU and on CUDA. Depends on no test
// framework.
#pragma once
#include <cstddef>
#include <cstdint>

namespace test {

/// digest() does nothing before this call.
void start_digests();
/// Adds to the number of the running test. The order does not count, because ranks are threads. All NaN are the same.
void digest(const void *data, size_t bytes, int32_t dtype);
/// Returns the number and starts the next one at 0.
uint64_t take_digest();

} // namespace test
