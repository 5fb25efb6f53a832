// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "optimizer/optimizer.h"

namespace dsopt {

/// True if a state tensor has counters or scales, so that not every bit pattern in it is valid.
bool needs_check(StateKind kind);
/// Throws `status` unless `words`, which are in host memory, are valid contents of the state tensor. The message begins
/// with `where`. `rules`: of the scaler, NULL = its current rules.
void check_contents(const Optimizer &optimizer, const StateEntry &entry, const void *words, const char *where,
                    dsopt_status status = DSOPT_ERR_ARGUMENT, const ScalerRules *rules = nullptr);

} // namespace dsopt
