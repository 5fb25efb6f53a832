// SPDX-License-Identifier: Apache-2.0
// Checkpoints of an optimizer: which tensors and metadata go into the container, and what must fit before they come
// back.
#pragma once
#include "optimizer/optimizer.h"

namespace dsopt {

void save_state(Optimizer &optimizer, const char *path, const dsopt_io &io);
void load_state(Optimizer &optimizer, const char *path, const dsopt_io &io);

} // namespace dsopt
