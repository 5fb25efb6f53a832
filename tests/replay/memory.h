// SPDX-License-Identifier: Apache-2.0
// Device memory, which dsopt.h leaves to the caller: tensors of a case live where the engine's backend can reach them.
#pragma once
#include "support/memory.h"

namespace replay {

/// Memory of the emulated device if it is there. Else of the device's primary context, through the driver library found
/// at run time: replay itself is built without CUDA. Failure if there is no driver. Copies wait for what was enqueued on
/// the legacy default stream, the one that replay steps on.
test::Memory cuda_memory(int device);

} // namespace replay
