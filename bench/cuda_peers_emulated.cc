// SPDX-License-Identifier: Apache-2.0
// Kernels of the peers for the emulated device.
#include "cuda_peers.cu" // NOLINT
