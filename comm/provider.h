// SPDX-License-Identifier: Apache-2.0
// Functions that each provider of comms defines, and helpers that providers share. Each provider fills the table of
// dsopt.h; Comm does the rest.
#pragma once
#include "base/sizes.h"
#include "comm/comm.h"
#include <algorithm>
#include <string>

namespace dsopt {

// One function per provider. make_comm() has checked rank, ranks, id and time-out of `desc`.
std::unique_ptr<Comm> make_local_comm(std::shared_ptr<const Context> context, const dsopt_comm_desc &desc);
std::unique_ptr<Comm> make_nccl_comm(std::shared_ptr<const Context> context, const dsopt_comm_desc &desc);
std::unique_ptr<Comm> make_hccl_comm(std::shared_ptr<const Context> context, const dsopt_comm_desc &desc);

// Ids by which ranks find each other.
constexpr size_t kLocalIdBytes = 16, kNcclIdBytes = 128, kHcclIdBytes = 4108;
void make_local_id(void *id);
void make_nccl_id(void *id);
void make_hccl_id(void *id);

/// These return Library::state(), or the reason why the library cannot be used.
const char *nccl_state();
const char *hccl_state();

/// Returns the time-out in milliseconds, -1 = none. dsopt_mpi.h has the same default.
inline int timeout_of(const dsopt_comm_desc &desc) { return desc.timeout_ms == 0 ? 600000 : desc.timeout_ms; }

/// Returns the text of a time-out while waiting for other ranks.
inline std::string ranks_are_missing(int ranks, int timeout_ms) {
    return "not all of the " + std::to_string(ranks) + " ranks arrived within " + std::to_string(timeout_ms) + " ms";
}
[[noreturn]] inline void throw_ranks_missing(int ranks, int timeout_ms) {
    throw Error(DSOPT_ERR_TIMEOUT, "%s", ranks_are_missing(ranks, timeout_ms).c_str());
}

/// Copies as much of `from` as fits into `capacity` bytes, for dsopt_comm_table.error.
inline void copy_text(const std::string &from, char *to, size_t capacity) {
    if (capacity != 0) to[from.copy(to, capacity - 1)] = 0;
}

/// Reduces the elements of the next rank into `result`. Called in rank order, so every rank computes the same bits.
template <class T> void reduce_into(T *result, const T *next, int64_t count, int32_t op) {
    for (int64_t i = 0; i < count; ++i)
        result[i] = op == DSOPT_OP_SUM ? result[i] + next[i] : std::max(result[i], next[i]);
}

/// Creates a comm whose functions are methods of `endpoint`, which the comm owns. `table` has rank, ranks and memory.
template <class Endpoint>
std::unique_ptr<Comm> make_comm_from_endpoint(std::shared_ptr<const Context> context,
                                              std::unique_ptr<Endpoint> endpoint, dsopt_comm_table table,
                                              Provider provider = {}) {
    table.size = sizeof table;
    table.self = endpoint.get();
    table.all_reduce = [](void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                          void *stream) -> int {
        return static_cast<Endpoint *>(self)->all_reduce(send, recv, count, dtype, op, stream);
    };
    if (endpoint->has_all_to_all())
        table.all_to_all = [](void *self, const void *send, void *recv, int64_t bytes, void *stream) -> int {
            return static_cast<Endpoint *>(self)->all_to_all(send, recv, bytes, stream);
        };
    table.all_gather = [](void *self, const void *send, void *recv, int64_t bytes, void *stream) -> int {
        return static_cast<Endpoint *>(self)->all_gather(send, recv, bytes, stream);
    };
    if (endpoint->has_reduce_scatter())
        table.reduce_scatter = [](void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                                  void *stream) -> int {
            return static_cast<Endpoint *>(self)->reduce_scatter(send, recv, count, dtype, op, stream);
        };
    table.error = [](void *self, char *text, size_t capacity) {
        static_cast<Endpoint *>(self)->describe(text, capacity);
        return 0;
    };
    table.abort = [](void *self) { static_cast<Endpoint *>(self)->abort(); };
    table.destroy = [](void *self) { delete static_cast<Endpoint *>(self); };
    auto comm = std::make_unique<Comm>(std::move(context), table, provider);
    (void)endpoint.release(); // the table's destroy owns it now
    return comm;
}

} // namespace dsopt
