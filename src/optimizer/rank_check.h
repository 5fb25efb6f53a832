// SPDX-License-Identifier: Apache-2.0
// DSOPT_OPTIMIZER_CHECK_RANKS: before the first collective of a step the data-parallel ranks compare what they are
// about to do; where they will exchange bits, they compare their lists before the first step in any case.
#pragma once
#include "optimizer/optimizer.h"

namespace dsopt {

/// Whether every step is compared.
bool checks_ranks(const Optimizer &optimizer);
/// `lists_only`: the lists of parameters and nothing of the step. `remembers`: calls are counted, as in
/// dsopt_optimizer_step. Throws MISMATCH naming what differs.
void check_ranks(const Optimizer &optimizer, const StepPlan &plan, bool lists_only, bool remembers);
/// In place of check_ranks() where this rank takes no part: the others must not wait for it.
void refuse_to_ranks(const Optimizer &optimizer, void *stream) noexcept;

} // namespace dsopt
