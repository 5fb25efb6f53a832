// SPDX-License-Identifier: Apache-2.0
// Checkpoints of an optimizer: selects the tensors and metadata to save, and checks that they fit before a load.
#pragma once
#include "optimizer/optimizer.h"

namespace dsopt {

void save_state(Optimizer &optimizer, const char *path, const dsopt_io &io);
void load_state(Optimizer &optimizer, const char *path, const dsopt_io &io);

} // namespace dsopt
