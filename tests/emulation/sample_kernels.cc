// SPDX-License-Identifier: Apache-2.0
// Shows how a .cu file becomes part of a test: the same text, compiled for the host.
#include "sample_kernels.cu" // NOLINT
