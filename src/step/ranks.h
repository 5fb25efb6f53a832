// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "comm/comm.h"

namespace dsopt {

/// Ranks that take a step together; NULL = one rank.
struct CommSet {
    Comm *data, *model;
    Comm *const *experts;
    int32_t expert_count;
    Comm *node; // with it the data ranks are those of all nodes, and `data` has those of the same place in each
};

bool has_peers(const CommSet &comms);

} // namespace dsopt
