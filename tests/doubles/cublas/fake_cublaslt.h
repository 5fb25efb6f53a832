// SPDX-License-Identifier: Apache-2.0
// A test double of libcublasLt. Products run as host functions on the streams of tests/emulation. An element is a chain
// of fused multiply-adds in the order of the index, and 16-bit outputs become 0 below 2^-50, so that Newton-Schulz
// iterations have the bits of the CPU (src/cpu/newton_schulz.h); the library has another order, and no such limit.
//
// The double refuses what the library refuses: sizes that do not match, leading dimensions below the number of rows,
// batches whose outputs overlap, types without kernels, a workspace that is too small or not aligned, pointers with
// less alignment than the preferences of the search promised. For columns that are not aligned to 16 bytes it has no
// algorithm; the library has slow ones.
#pragma once

/// Numbers of events in this process.
struct FakeCublasLtCounts {
    long handles, descriptors; // that exist
    long searches;             // for an algorithm
    long products;             // of two matrices, when they are enqueued or captured
    long products_run;
};
extern "C" FakeCublasLtCounts fake_cublaslt_counts();
/// Makes the n-th call of a function that returns a status fail, counted from 1. Functions that destroy do not count.
/// 0: no call fails.
extern "C" void fake_cublaslt_fail_at(long n);
/// Returns the number of calls since fake_cublaslt_fail_at().
extern "C" long fake_cublaslt_calls();
/// While `none`, searches find no algorithm.
extern "C" void fake_cublaslt_find_none(bool none);
