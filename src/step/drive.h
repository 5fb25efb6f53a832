// SPDX-License-Identifier: Apache-2.0
// The driver of a step: one order of events on every device, and all communication. A device sees no other ranks, and
// nothing here knows how a loop runs.
#pragma once
#include "step/average.h"

namespace dsopt {

/// A step that is ready to run.
struct StepRun {
    const Context &context;
    const StepPlan &plan;
    FunctionRef<void()> compare; // throws MISMATCH on all ranks if they are about to do different things
    int64_t compared_bytes;      // of its largest all-reduce, 0 if it compares nothing
    const CommSet &comms;
    double *host_norms;         // NormTable::size_with_message() on the host, unless backend memory is the host's
    const GradientMeans *means; // NULL where the engine averages no gradients
    float *mean_scratch;        // for sum_over_ranks()
};

/// Compare ranks, average gradients, inspect, agree over comms, decide, exchange, update.
///
/// All memory that a step needs, tables and messages included, is allocated before ranks compare. So a step that fails
/// for lack of memory has sent nothing, and the same call can be repeated. A failure after that makes the comms of the
/// step unusable: ranks would no longer be at the same collective.
///
/// Tensors of the 1-bit family come before the others, because an exchange may fail. What such a failure leaves is the
/// same on every device: the decision is made (loss scale and outcome), and errors hold sums that were to be sent.
/// Parameters, moments, counters and schedule are as before the step, except those that 0/1 Adam moves by itself before
/// a synchronisation.
void drive(const StepRun &run);

bool has_peers(const CommSet &comms);

} // namespace dsopt
