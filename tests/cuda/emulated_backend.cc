// SPDX-License-Identifier: Apache-2.0
// The CUDA backend, its kernels included, compiled for the host against tests/emulation.
#include "cuda/device.cu"
