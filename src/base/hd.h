// SPDX-License-Identifier: Apache-2.0
#pragma once
// DSOPT_HD marks a function that host and device share. It is always inlined on the host: the same header is compiled
// for several instruction sets, and the out-of-line copy that the linker keeps could use instructions that the running
// CPU lacks.
#if defined(__CUDACC__)
#define DSOPT_HD __host__ __device__ __forceinline__
#else
#define DSOPT_HD __attribute__((always_inline)) inline
#endif
