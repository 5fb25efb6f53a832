// SPDX-License-Identifier: Apache-2.0
// The peers' kernels for the emulated device.
#include "cuda_peers.cu" // NOLINT
