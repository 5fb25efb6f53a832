// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "optimizer/optimizer.h"

namespace dsopt {

/// Whether a state tensor counts or scales, so that not every word in it has a meaning.
bool has_meaning(StateKind kind);
/// Throws `status` unless a step can have left these words, in host memory, in such a tensor. `where` comes first in
/// the message. `rules`: of the scaler.
void check_contents(const Optimizer &optimizer, const StateEntry &entry, const void *words, const ScalerRules &rules,
                    dsopt_status status, const char *where);
/// The same of words from elsewhere than a file, with the rules as they are.
void check_contents(const Optimizer &optimizer, const StateEntry &entry, const void *words, const char *where);

} // namespace dsopt
