// SPDX-License-Identifier: Apache-2.0
// Backend memory, which dsopt.h leaves to the caller: tensors of a case live where the engine's backend can reach them.
#pragma once
#include <cstddef>
#include <memory>

namespace replay {

class Memory {
public:
    virtual ~Memory() = default;
    /// Aligned to any element. Failure if there is none left.
    virtual void *allocate(size_t bytes) = 0;
    virtual void release(void *memory) = 0;
    // Both wait for what was enqueued on the legacy default stream, the one that replay steps on.
    virtual void upload(void *to, const void *from, size_t bytes) = 0;
    virtual void download(void *to, const void *from, size_t bytes) = 0;
};

/// malloc with exact sizes, so that a sanitizer sees an engine that runs past the end of a tensor.
std::unique_ptr<Memory> host_memory();

/// Memory of the emulated device if it is there. Else of the device's primary context, through the driver library found
/// at run time: replay itself is built without CUDA. Failure if there is no driver.
std::unique_ptr<Memory> cuda_memory(int device);

} // namespace replay
