// SPDX-License-Identifier: Apache-2.0
#pragma once
// DSOPT_HD marks a function that host and device share. Always inlined on the host: the same header is compiled for
// several instruction sets, and an out-of-line copy kept by the linker could be the one that the running CPU lacks.
#if defined(__CUDACC__)
#define DSOPT_HD __host__ __device__ __forceinline__
#else
#define DSOPT_HD __attribute__((always_inline)) inline
#endif
