// SPDX-License-Identifier: Apache-2.0
// The driver of a step: all communication, and the order of kernels, which is the same on every device. A device knows
// no other ranks, and the driver does not know how a device runs its kernels.
#pragma once
#include "device/context.h"
#include "device/kernels.h"
#include "step/phases.h"

namespace dsopt {

/// A step in parts: one of its phases, inspect or update, has run for some tensors, and what the driver does before it
/// without ranks.
struct StepParts {
    Phase phase;
    std::span<const TensorInterval> left; // the other tensors
};

/// A step that is ready to run.
struct StepRun {
    const Context &context;
    const StepPlan &plan;
    const PhaseList &phases;
    FunctionRef<void()> compare; // throws MISMATCH on all ranks if they are about to do different things
    int64_t compared_bytes;      // of its largest all-reduce, 0 if it compares nothing
    const CommSet &comms;
    double *host_norms;         // NormTable::size_with_message() on the host, unless backend memory is the host's
    const StepRows *rows;       // NULL unless the engine averages gradients, or state is sharded
    const dsopt_tensor *zeroed; // gradients that are zeroed after the step, one entry per tensor; NULL: by kernels
    std::optional<StepParts> parts;
};

/// Runs a step: compares ranks, then runs the phases.
///
/// All memory that a step needs, tables and messages included, is allocated before ranks compare. So a step that fails
/// for lack of memory has sent nothing, and the same call can be repeated. A failure after that makes the comms of the
/// step unusable: ranks would no longer be at the same collective.
///
/// Tensors of the 1-bit family are updated before the others, because an exchange may fail. After such a failure the
/// state is the same on every device: loss scale and outcome are those of the decision, and error buffers hold the
/// compensated values that were to be sent. Parameters, moments, counters and schedule are as before the step, except
/// for 0/1 Adam's local step before a synchronisation.
void drive(const StepRun &run);
/// Reserves memory of the comms for every collective of a step. Sends nothing.
void reserve(const StepRun &run);
/// Runs a phase for the tensors that `for_intervals` passes on, before drive() runs the rest of the step. `is_first`:
/// also runs what precedes the phase and concerns all tensors.
void drive_part(const StepRun &run, Phase phase, bool is_first,
                FunctionRef<void(FunctionRef<void(const TensorInterval &)>)> for_intervals);

} // namespace dsopt
