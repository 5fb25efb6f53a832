// SPDX-License-Identifier: Apache-2.0
// What the parts of a step hand on: request.cc checks, plan.cc plans, step.cc runs.
#pragma once
#include "optimizer/optimizer.h"

namespace dsopt {

/// The lists of one call after checking. `params` NULL: where they are bound.
struct Optimizer::Arguments {
    const dsopt_step &step;
    const dsopt_tensor *params, *out;
    uint32_t flags;
    Parallel parallel;
    bool initial; // the original's step on zero gradients when a wrapper is made
    bool *met = nullptr;
};

/// Offsets of the parts of a step's memory, each on its own line. They rise with parameters only, so sizes are
/// constant. What the host writes comes behind the rest where backend memory is host memory, and in memory of its own
/// otherwise.
struct Optimizer::Layout {
    size_t shared, scalars, divisors, norms, sums_a, sums_b, bad, factors, shards, extra, exchange, mean, bytes;
    size_t table, lists, host_norms, host_bytes;
};

/// First in a workspace: what must be zero before the first step there.
struct SharedWords {
    Control control;
    Outcome outcome; // of calls that bring none
};

} // namespace dsopt
