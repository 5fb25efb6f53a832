// SPDX-License-Identifier: Apache-2.0
// Replaces the CUDA backend in a build without it.
#include "device/device.h"

namespace dsopt {

std::unique_ptr<Device> make_cuda_device(int) {
    throw Error(
        DSOPT_ERR_UNSUPPORTED,
        "the CUDA backend is not in this build: %s. A build from source has it with a CUDA toolkit 12.5 or later, "
        "whose nvcc is in PATH, and the Meson option cuda=enabled",
        DSOPT_NO_CUDA);
}
CudaInfo cuda_info() { return {"not in this build", DSOPT_NO_CUDA, ""}; }

} // namespace dsopt
