// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "optimizer/optimizer.h"

namespace dsopt {

/// True if a state tensor has counters or scales, so that not every bit pattern in it is valid.
bool has_meaning(StateKind kind);
/// Throws `status` unless a step can leave `words`, which are in host memory, in the state tensor. The message begins
/// with `where`. `rules`: of the scaler, NULL = its current rules.
void check_contents(const Optimizer &optimizer, const StateEntry &entry, const void *words, const char *where,
                    dsopt_status status = DSOPT_ERR_ARGUMENT, const ScalerRules *rules = nullptr);

} // namespace dsopt
