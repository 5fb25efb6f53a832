// SPDX-License-Identifier: Apache-2.0
// Replaces the CUDA backend in a build without it.
#include "device/device.h"

namespace dsopt {

std::unique_ptr<Device> make_cuda_device(int) {
    throw Error(DSOPT_ERR_UNSUPPORTED, "the CUDA backend is not in this build");
}
const char *cuda_state() { return "not in this build"; }

} // namespace dsopt
