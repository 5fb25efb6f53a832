// SPDX-License-Identifier: Apache-2.0
// Compiled if <nccl.h> is found: checks the declarations of comm/nccl/api.h.
#include "comm/nccl/api.h"
#include <cstddef>
#include <nccl.h>

namespace declared = dsopt::nccl;

constexpr bool same(int ours, int theirs) { return ours == theirs; }
static_assert(same(declared::success, ncclSuccess) && same(declared::in_progress, ncclInProgress));
static_assert(same(declared::remote_error, ncclRemoteError));
static_assert(same(declared::uint8, ncclUint8) && same(declared::int32, ncclInt32));
static_assert(same(declared::float32, ncclFloat32) && same(declared::float64, ncclFloat64));
static_assert(same(declared::sum, ncclSum) && same(declared::max, ncclMax));
static_assert(sizeof(ncclResult_t) == sizeof(declared::Result) && sizeof(ncclDataType_t) == sizeof(declared::DataType));
static_assert(sizeof(ncclUniqueId) == sizeof(declared::UniqueId));
static_assert(sizeof(ncclConfig_t) >= sizeof(declared::Config));
static_assert(offsetof(ncclConfig_t, size) == offsetof(declared::Config, size));
static_assert(offsetof(ncclConfig_t, magic) == offsetof(declared::Config, magic));
static_assert(offsetof(ncclConfig_t, version) == offsetof(declared::Config, version));
static_assert(offsetof(ncclConfig_t, blocking) == offsetof(declared::Config, blocking));

int main() {
    const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
    const declared::Config ours;
    return theirs.magic == ours.magic && NCCL_VERSION(2, 14, 0) == ours.version ? 0 : 1;
}
