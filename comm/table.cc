// SPDX-License-Identifier: Apache-2.0
// The caller's own table.
#include "comm/provider.h"

namespace dsopt {

std::unique_ptr<Comm> make_table_comm(std::shared_ptr<const Context> context, const dsopt_comm_table &table,
                                      bool enqueues) {
    if (table.ranks < 1 || table.rank < 0 || table.rank >= table.ranks)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_table: rank %d of %d", table.rank, table.ranks);
    if (table.all_reduce == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_table.all_reduce is NULL");
    if (table.memory != DSOPT_MEMORY_HOST && table.memory != DSOPT_MEMORY_BACKEND)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_table.memory is %d", table.memory);
    if (table.reserved != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_table.reserved is %d, must be 0", table.reserved);
    if (enqueues && (context->device().is_host() || table.memory != DSOPT_MEMORY_BACKEND))
        throw Error(DSOPT_ERR_UNSUPPORTED,
                    "DSOPT_COMM_FLAG_ENQUEUE needs a CUDA context and a table that takes its memory");
    return std::make_unique<Comm>(std::move(context), table, Provider{.own_codes = true, .enqueues = enqueues});
}

} // namespace dsopt
