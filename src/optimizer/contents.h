// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "optimizer/optimizer.h"

namespace dsopt {

/// True if a state tensor is a counter or a scale, so that not every word in it has a meaning.
bool has_meaning(StateKind kind);
/// Throws `status` unless a step can have left these words, in host memory, in such a tensor. `where` comes first in
/// the message. `rules`: of the scaler, NULL = as they are.
void check_contents(const Optimizer &optimizer, const StateEntry &entry, const void *words, const char *where,
                    dsopt_status status = DSOPT_ERR_ARGUMENT, const ScalerRules *rules = nullptr);

} // namespace dsopt
