// SPDX-License-Identifier: Apache-2.0
// A test double of libnccl.so.2. Ranks are threads or processes that share memory; collectives run as host functions on
// the streams of tests/emulation. Other than the library it says which rank made another call, and fails on request:
//
//   DSOPT_FAKE_NCCL_FAULT  "rank:call:kind", separated by commas; `call` counts a rank's collectives from 0
//                            kill   the process dies by SIGKILL        hang   the rank never arrives, until aborted
//                            error  the call returns an error          async  the communicator reports one later
//                            init   making the communicator fails      busy   the call stays "in progress" until
//                            aborted
//                            slow   in a group the call says "in progress", and all is well
//   DSOPT_FAKE_NCCL_DEAD   "error": peers see a dead rank as over a network; else nothing, as over NVLink
//   DSOPT_FAKE_NCCL_ABORT  "hang": ncclCommAbort takes 20 s
#pragma once

/// How often, in this process, since it began.
struct FakeNcclCounts {
    int made, destroyed, aborted, ids;
    int inside_while_aborted; // calls of other threads during an abort: the library allows none
    int sizes;                // calls of ncclCommCount()
};
extern "C" FakeNcclCounts fake_nccl_counts();

/// The n-th call of the library by a rank of the communicator with an id fails, counted from 1: in any function that
/// returns a result, once. Looking for an error again does not count, nor does a text. 0: none. The id "" is for ids
/// themselves. Ranks that wait for this one to come are told.
extern "C" void fake_nccl_fail_at(const char *id, int rank, long n);
/// By that rank, since then.
extern "C" long fake_nccl_calls();
