// SPDX-License-Identifier: Apache-2.0
// Steps of sharded state, in which each rank inspects and updates its part of every tensor: completion of the results of
// leaves, and the gather of weights.
#pragma once
#include "step/drive.h"

namespace dsopt {

/// Adds up `values`, one per leaf: each leaf has a value on the rank that visits it, and 0 on the others. x + 0 is exact,
/// so every rank gets the bits of an unsharded step.
void complete_leaves(const StepRun &run, double *values);
/// Sets one array of results of leaves to 0, before a pass writes those of its own leaves.
void clear_leaves(const StepRun &run, void *results);
// The same for the results of pass 1, and for the sums of the update.
void complete_squares(const StepRun &run);
void clear_squares(const StepRun &run);
void complete_sums(const StepRun &run);
void clear_sums(const StepRun &run);
/// Reserves memory of the comms for complete_leaves().
void reserve_leaves(const StepRun &run);

/// Sends the new weights of this rank's part to the other ranks. Every rank gets the bytes of its parameters.
void gather_weights(const StepRun &run);
/// Reserves memory of the comms for gather_weights().
void reserve_gather(const StepRun &run);

} // namespace dsopt
