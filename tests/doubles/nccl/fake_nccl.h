// SPDX-License-Identifier: Apache-2.0
// A test double of libnccl.so.2. Ranks are threads or processes with shared memory; collectives run as host functions
// on the streams of tests/emulation. In contrast to the library, the double reports which rank made a different call,
// and fails on request:
//
//   DSOPT_FAKE_NCCL_FAULT  "rank:call:kind", separated by commas; `call` counts a rank's collectives from 0
//                            kill   the process dies by SIGKILL
//                            hang   the rank does not arrive, until the communicator is aborted
//                            error  the call returns an error
//                            async  the communicator reports an error later
//                            init   the creation of the communicator fails
//                            busy   the call stays "in progress" until aborted
//                            slow   in a group the call returns "in progress", and succeeds
//   DSOPT_FAKE_NCCL_DEAD   "error": peers get an error if a rank is dead, as over a network; otherwise they do not
//                          detect it, as over NVLink
//   DSOPT_FAKE_NCCL_ABORT  "hang": ncclCommAbort takes 20 s
#pragma once

/// Numbers of events in this process.
struct FakeNcclCounts {
    int created, destroyed, aborted, ids;
    int inside_while_aborted; // calls of other threads during an abort, which the library does not allow
    int count_queries;        // calls of ncclCommCount()
};
extern "C" FakeNcclCounts fake_nccl_counts();

/// Makes the n-th call, counted from 1, of a rank of the communicator with the id `id` fail once, in any function that
/// returns a result. Repeated queries for an error and queries for texts do not count. 0: no call fails. The id ""
/// selects the creation of ids. Ranks that wait for the failing rank to join get an error.
extern "C" void fake_nccl_fail_at(const char *id, int rank, long n);
/// Returns the number of calls of that rank since fake_nccl_fail_at().
extern "C" long fake_nccl_calls();
