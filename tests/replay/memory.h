// SPDX-License-Identifier: Apache-2.0
// Device memory, which dsopt.h leaves to the caller: allocates tensors of a case where the engine's backend can access
// them.
#pragma once
#include "support/memory.h"

namespace replay {

/// Memory of the emulated device if it is loaded. Otherwise memory in the device's primary context, through the driver
/// library, which is loaded at run time: replay is built without CUDA. Failure if there is no driver. Copies wait for
/// all work enqueued on the legacy default stream, which replay steps on.
test::Memory cuda_memory(int device);

} // namespace replay
