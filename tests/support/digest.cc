// SPDX-License-Identifier: Apache-2.0
#include "digest.h"
#include "numbers.h"
#include <atomic>

namespace test {
namespace {

bool g_on = false;
std::atomic<uint64_t> g_sum{0};

/// Returns the bits of element `i`. All NaNs have the same bits.
uint32_t element(const void *data, size_t i, int32_t dtype) {
    const char *const address = static_cast<const char *>(data) + i * size_of(dtype);
    if (is_float(dtype) && std::isnan(loaded(address, dtype))) return 0x7fffffffu;
    uint32_t bits = 0;
    std::memcpy(&bits, address, size_of(dtype));
    return bits;
}

} // namespace

void start_digests() { g_on = true; }
void digest(const void *data, size_t bytes, int32_t dtype) {
    if (!g_on || size_of(dtype) > sizeof(uint32_t)) return;
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes / size_of(dtype); ++i) hash = (hash ^ element(data, i, dtype)) * 0x100000001b3u;
    g_sum += hash;
}
uint64_t take_digest() { return g_sum.exchange(0); }

} // namespace test
