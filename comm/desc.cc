// SPDX-License-Identifier: Apache-2.0
// Creation of a comm from the caller's description: the checks that all providers share, and the choice of the
// provider. A single rank needs no provider. The caller's own table is a provider.
#include "base/struct_io.h"
#include "comm/provider.h"
#include "rules/options.h"

namespace dsopt {
namespace {

/// True if the description has what ranks find each other by.
bool has_rank_or_id(const dsopt_comm_desc &desc) {
    return desc.rank != 0 || desc.ranks != 0 || desc.id != nullptr || desc.id_bytes != 0;
}
Facts comm_facts(const dsopt_comm_desc &desc) {
    const auto flag = [&](int32_t bit) { return (desc.flags & bit) != 0; };
    return Facts()
        .add(facts::local_comm, desc.kind == DSOPT_COMM_KIND_LOCAL)
        .add(facts::table_comm, desc.kind == DSOPT_COMM_KIND_TABLE)
        .add(facts::nccl_comm, desc.kind == DSOPT_COMM_KIND_NCCL)
        .add(facts::hccl_comm, desc.kind == DSOPT_COMM_KIND_HCCL)
        .add(facts::table, desc.table != nullptr)
        .add(facts::native, desc.native != nullptr)
        .add(facts::rank_or_id, has_rank_or_id(desc))
        .add(facts::timeout, desc.timeout_ms != 0)
        .add(facts::enqueue, flag(DSOPT_COMM_FLAG_ENQUEUE))
        .add(facts::synchronize, flag(DSOPT_COMM_FLAG_SYNCHRONIZE))
        .add(facts::provider_sums, flag(DSOPT_COMM_FLAG_PROVIDER_SUMS))
        .add(facts::any_thread, flag(DSOPT_COMM_FLAG_ANY_THREAD));
}

std::unique_ptr<Comm> make_self_comm(std::shared_ptr<const Context> context) {
    dsopt_comm_table table{};
    table.ranks = 1;
    return std::make_unique<Comm>(std::move(context), table);
}

std::unique_ptr<Comm> make_table_comm(std::shared_ptr<const Context> context, const dsopt_comm_desc &desc) {
    const dsopt_comm_table table = read_struct(not_null(desc.table, "dsopt_comm_desc.table"), "dsopt_comm_table");
    const bool enqueues = desc.flags & DSOPT_COMM_FLAG_ENQUEUE;
    const bool synchronizes = desc.flags & DSOPT_COMM_FLAG_SYNCHRONIZE;
    const bool sums = desc.flags & DSOPT_COMM_FLAG_PROVIDER_SUMS;
    if (table.ranks < 1 || table.rank < 0 || table.rank >= table.ranks)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_table: rank %d of %d", table.rank, table.ranks);
    if (table.all_reduce == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_table.all_reduce is NULL");
    if (table.memory != DSOPT_MEMORY_HOST && table.memory != DSOPT_MEMORY_BACKEND)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_table.memory is %d", table.memory);
    if (table.reserved != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_table.reserved is %d, must be 0", table.reserved);
    const bool on_host = context->device().is_host() || table.memory != DSOPT_MEMORY_BACKEND;
    check_options<At::comm>(comm_facts(desc)
                                .add(facts::no_reduce_scatter, table.reduce_scatter == nullptr)
                                .add(facts::host_memory, on_host));
    return std::make_unique<Comm>(std::move(context), table,
                                  Provider{.of_caller = true,
                                           .enqueues = enqueues,
                                           .synchronizes = synchronizes,
                                           .sums = sums,
                                           .any_thread = (desc.flags & DSOPT_COMM_FLAG_ANY_THREAD) != 0});
}

} // namespace

std::unique_ptr<Comm> make_comm(std::shared_ptr<const Context> context, const dsopt_comm_desc &desc) {
    constexpr Facts joining{facts::local_comm, facts::nccl_comm, facts::hccl_comm};
    const Facts all = comm_facts(desc);
    constexpr int32_t known = DSOPT_COMM_FLAG_ENQUEUE | DSOPT_COMM_FLAG_SYNCHRONIZE | DSOPT_COMM_FLAG_PROVIDER_SUMS |
                              DSOPT_COMM_FLAG_ANY_THREAD;
    if (desc.flags & ~known)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_desc.flags has unknown bits: 0x%x", desc.flags);
    check_options<At::comm>(all, {.number = desc.kind});
    if (all.has_any(joining) && desc.native == nullptr) {
        if (desc.ranks < 1 || desc.ranks > kMaxRanks || desc.rank < 0 || desc.rank >= desc.ranks)
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_desc: rank %d of %d", desc.rank, desc.ranks);
        const size_t bytes = make_comm_id(desc.kind, nullptr, 0);
        if (desc.id == nullptr || desc.id_bytes != bytes)
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_desc.id has %zu bytes, one of kind %d %zu", desc.id_bytes,
                        desc.kind, bytes);
    }
    if (desc.reserved != 0) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_desc.reserved is %u, must be 0", desc.reserved);
    if (desc.timeout_ms < -1) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_desc.timeout_ms is %d", desc.timeout_ms);
    switch (desc.kind) {
    case DSOPT_COMM_KIND_SELF: return make_self_comm(std::move(context));
    case DSOPT_COMM_KIND_LOCAL: return make_local_comm(std::move(context), desc);
    case DSOPT_COMM_KIND_NCCL: return make_nccl_comm(std::move(context), desc);
    case DSOPT_COMM_KIND_HCCL: return make_hccl_comm(std::move(context), desc);
    case DSOPT_COMM_KIND_TABLE: return make_table_comm(std::move(context), desc);
    }
    throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_desc.kind is %d, which this library does not know", desc.kind);
}

size_t make_comm_id(int32_t kind, void *id, size_t capacity) {
    size_t bytes = 0;
    void (*make)(void *) = nullptr;
    switch (kind) {
    case DSOPT_COMM_KIND_LOCAL: bytes = kLocalIdBytes, make = make_local_id; break;
    case DSOPT_COMM_KIND_NCCL: bytes = kNcclIdBytes, make = make_nccl_id; break;
    case DSOPT_COMM_KIND_HCCL: bytes = kHcclIdBytes, make = make_hccl_id; break;
    default: throw Error(DSOPT_ERR_UNSUPPORTED, "comms of kind %d have no unique id", kind);
    }
    if (id == nullptr) return bytes;
    if (capacity < bytes) throw Error(DSOPT_ERR_SHAPE, "the id has %zu bytes, there is room for %zu", bytes, capacity);
    make(id);
    return bytes;
}

} // namespace dsopt
