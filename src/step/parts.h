// SPDX-License-Identifier: Apache-2.0
// Steps of sharded state, in which each rank inspects and updates its part of every tensor: completion of the results of
// leaves, and the gather of weights.
#pragma once
#include "comm/comm.h"
#include "device/plan.h"
#include "exchange/layout.h"
#include "step/rows.h"

namespace dsopt {

struct StepRun;

/// The parts of a step, and memory for messages.
struct StepParts {
    const RowLayout &rows;
    bool in_node;                // DSOPT_OPTIMIZER_SHARD_NODE: every node has all of the state
    const dsopt_tensor *weights; // the whole parameters
    dsopt_tensor *lists;         // lists_of(rows) tensors
    char *staging;               // staging_bytes() bytes

    static int64_t lists_of(const RowLayout &rows) { return 2 * rows.max_pieces(); }
    static int64_t staging_bytes(const RowLayout &rows, const DataRank &local, bool in_node);
};

/// Adds up `values`, one per leaf: each leaf has a value on the rank that visits it, and 0 on the others. x + 0 is exact,
/// so every rank gets the bits of an unsharded step.
void complete_leaves(const StepRun &run, double *values);
/// Sets the results of all leaves to 0, before a pass writes those of its own leaves.
void clear_sums(const StepRun &run, bool counts);
/// Sends the new weights of this rank's part to the other ranks. Every rank gets the bytes of its parameters.
void gather_weights(const StepRun &run);
/// Reserves memory of the comms for these functions.
void reserve_parts(const StepRun &run);

} // namespace dsopt
