// SPDX-License-Identifier: Apache-2.0
// Replaces the NCCL provider in a build without it.
#include "comm/provider.h"

namespace dsopt {

void make_nccl_id(void *) { throw Error(DSOPT_ERR_UNSUPPORTED, "NCCL is not in this build"); }
std::unique_ptr<Comm> make_nccl_comm(std::shared_ptr<const Context>, const dsopt_comm_desc &) {
    throw Error(DSOPT_ERR_UNSUPPORTED, "NCCL is not in this build");
}
const char *nccl_state() { return "not in this build"; }

} // namespace dsopt
