// SPDX-License-Identifier: Apache-2.0
// Digest of the parameters and state that a test reads: one number, equal on the CPU and on CUDA. Depends on no test
// framework.
#pragma once
#include <cstddef>
#include <cstdint>

namespace test {

/// digest() does nothing before this call.
void start_digests();
/// Adds data to the digest of the running test. The digest does not depend on the order of calls, because ranks are
/// threads. All NaNs count as equal.
void digest(const void *data, size_t bytes, int32_t dtype);
/// Returns the digest and resets it to 0.
uint64_t take_digest();

} // namespace test
