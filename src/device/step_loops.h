// SPDX-License-Identifier: Apache-2.0
// The loops of a step, as the driver (src/step) calls them: on every device in the same order. Each call enqueues work
// in stream order; where a device fuses loops, a later call finds its work done. Nothing here knows other ranks.
#pragma once
#include "device/decide.h"
#include "device/onebit_plan.h"

namespace dsopt {

/// Loops over the tensors that go into exchanges of the 1-bit family. In a skipped step they change nothing.
class OneBitLoops {
public:
    /// Buffers of the exchange as the device wants them used.
    virtual const ExchangeBuffers &buffers() const = 0;
    /// Counters that the exchange reads: begin_tensor(), begin_group().
    virtual void begin() = 0;
    /// Compat mode of 1-bit LAMB: trust_scaling, unless it is known.
    virtual void scale_momenta() = 0;
    /// What this rank brings to the exchange, to rows, or with two levels to the message. Before a synchronisation 0/1
    /// Adam takes its own step here.
    virtual void feed(Feed feed) = 0;
    /// From rows of results, or without other ranks from the own values, to moments and weights.
    virtual void take(Feed feed) = 0;
    /// 0/1 Adam between exchanges.
    virtual void local() = 0;
    /// 1-bit LAMB in place of take(): moments, with sums of squares of the updates and the largest factor of each leaf.
    virtual void lamb_moments() = 0;
    /// find_frozen_trust() of each tensor.
    virtual void lamb_trust() = 0;
    /// take_shared_frozen_trust() of each tensor.
    virtual void lamb_shared_trust() = 0;
    virtual void lamb_weights() = 0;
    /// After everything else of the step: end_tensor(), end_group(), end_schedule().
    virtual void end() = 0;
    /// Standard mode: which elements have a variance.
    virtual void find_active() = 0;
    /// The variance is frozen by this step: anchors and, if wanted, copies of the variance are taken, and errors start
    /// anew. Compat mode: not in a skipped step.
    virtual void freeze(bool copies_variance) = 0;

protected:
    ~OneBitLoops() = default;
};

class StepLoops {
public:
    /// Time since the last mark belongs to this phase, DSOPT_MS_...; -1: the first mark of a step, which resets all
    /// phases.
    virtual void mark(int phase) = 0;
    /// Pass 1, where the plan reads gradients, and the fold into the table of norms with this rank's reasons to skip.
    /// Without `agrees` a device may decide at once.
    virtual void inspect(bool agrees) = 0;
    /// A move of the table of norms, which is in backend memory.
    virtual void move_norms(const NormMove &move) = 0;
    /// decide_step(). Where ranks agree on the table, they have done so.
    virtual void decide() = 0;
    /// Passes::elementwise; of Passes::reduced the first pass, and the factors of tensors that no other rank has a part
    /// of. If the plan reduces nothing: counters of a step that is taken, norms and the report, too.
    virtual void update() = 0;
    /// The second pass of Passes::reduced, after take_shared_trust() where model ranks have added up the sums of `shared`
    /// tensors; then counters, norms and the report.
    virtual void update_weights(bool shared) = 0;
    /// NULL where the plan has none.
    virtual OneBitLoops *onebit() = 0;

protected:
    ~StepLoops() = default;
};

} // namespace dsopt
