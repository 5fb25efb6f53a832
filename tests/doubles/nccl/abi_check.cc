// SPDX-License-Identifier: Apache-2.0
// Compiled if <nccl.h> is found: checks the declarations of comm/nccl/api.h.
#include "comm/nccl/api.h"
#include <cstddef>
#include <nccl.h>

namespace own = dsopt::nccl;

constexpr bool same(int ours, int theirs) { return ours == theirs; }
static_assert(same(own::success, ncclSuccess) && same(own::in_progress, ncclInProgress));
static_assert(same(own::remote_error, ncclRemoteError));
static_assert(same(own::uint8, ncclUint8) && same(own::int32, ncclInt32));
static_assert(same(own::float32, ncclFloat32) && same(own::float64, ncclFloat64));
static_assert(same(own::sum, ncclSum) && same(own::max, ncclMax));
static_assert(sizeof(ncclResult_t) == sizeof(own::Result) && sizeof(ncclDataType_t) == sizeof(own::DataType));
static_assert(sizeof(ncclUniqueId) == sizeof(own::UniqueId));
static_assert(sizeof(ncclConfig_t) >= sizeof(own::Config));
static_assert(offsetof(ncclConfig_t, size) == offsetof(own::Config, size));
static_assert(offsetof(ncclConfig_t, magic) == offsetof(own::Config, magic));
static_assert(offsetof(ncclConfig_t, version) == offsetof(own::Config, version));
static_assert(offsetof(ncclConfig_t, blocking) == offsetof(own::Config, blocking));

int main() {
    const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
    const own::Config ours;
    return theirs.magic == ours.magic && NCCL_VERSION(2, 14, 0) == ours.version ? 0 : 1;
}
