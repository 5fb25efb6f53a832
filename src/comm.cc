// SPDX-License-Identifier: Apache-2.0
#include "comm.h"
#include "abi.h"
#include "onebit.h"
#include "rules/decide.h"

namespace dsopt {

Comm::Comm(std::shared_ptr<const Context> context, const dsopt_comm_table &table, bool returns_status) :
    context_(std::move(context)),
    table_(table),
    returns_status_(returns_status) {}

Comm::~Comm() {
    if (table_.destroy != nullptr) table_.destroy(table_.self);
}

void Comm::begin() {
    context_->check_process();
    const dsopt_status status = status_.load(std::memory_order_acquire);
    if (status == DSOPT_ERR_ABORTED) throw Error(status, "the comm was aborted");
    if (status != DSOPT_OK) throw Error(status, "the comm failed earlier and is lost");
}

void Comm::check(int result, const char *what, int64_t sent, int64_t received) {
    calls_.fetch_add(1, std::memory_order_relaxed);
    if (result == 0) {
        sent_.fetch_add(sent, std::memory_order_relaxed);
        received_.fetch_add(received, std::memory_order_relaxed);
        return;
    }
    dsopt_status status = returns_status_ ? result : DSOPT_ERR_COMM, first = DSOPT_OK;
    status_.compare_exchange_strong(first, status);
    if (first == DSOPT_ERR_ABORTED) status = first;
    char text[256] = "";
    if (table_.error != nullptr) (void)table_.error(table_.self, text, sizeof text);
    throw Error(status, "%s over %d ranks failed on rank %d: %s (%d)", what, ranks(), rank(),
                text[0] != 0 ? text : status_name(status), result);
}

void Comm::all_reduce(void *data, int64_t count, int32_t dtype, int32_t op, void *stream) {
    begin();
    if (ranks() == 1 || count == 0) return;
    const int64_t moved = count * int64_t(dtype_size(dtype)) * 2 * (ranks() - 1) / ranks();
    check(table_.all_reduce(table_.self, data, data, count, dtype, op, stream), "all-reduce", moved, moved);
}

void Comm::all_to_all(const void *send, void *recv, int64_t bytes, void *stream) {
    begin();
    if (bytes == 0) return;
    if (ranks() == 1 && table_.all_to_all == nullptr)
        return context_->backend().copy(recv, send, size_t(bytes), stream);
    const int64_t moved = bytes * (ranks() - 1);
    check(table_.all_to_all(table_.self, send, recv, bytes, stream), "all-to-all", moved, moved);
}

void Comm::all_gather(const void *send, void *recv, int64_t bytes, void *stream) {
    begin();
    if (bytes == 0) return;
    if (ranks() == 1 && table_.all_gather == nullptr)
        return context_->backend().copy(recv, send, size_t(bytes), stream);
    const int64_t moved = bytes * (ranks() - 1);
    check(table_.all_gather(table_.self, send, recv, bytes, stream), "all-gather", moved, moved);
}

void Comm::broadcast(void *buffer, int64_t bytes, int root, void *stream) {
    begin();
    if (ranks() == 1 || bytes == 0) return;
    const bool sends = rank() == root;
    check(table_.broadcast(table_.self, buffer, bytes, root, stream), "broadcast", sends ? bytes : 0,
          sends ? 0 : bytes);
}

void Comm::barrier() {
    begin();
    if (ranks() == 1 || table_.barrier == nullptr) return;
    check(table_.barrier(table_.self), "barrier", 0, 0);
}

void Comm::abort() noexcept {
    dsopt_status first = DSOPT_OK;
    status_.compare_exchange_strong(first, DSOPT_ERR_ABORTED);
    if (table_.abort != nullptr) table_.abort(table_.self);
}

dsopt_comm_info Comm::info() const {
    dsopt_comm_info info{};
    info.rank = rank();
    info.ranks = ranks();
    info.status = status_.load(std::memory_order_acquire);
    info.calls = calls_.load(std::memory_order_relaxed);
    info.bytes_sent = sent_.load(std::memory_order_relaxed);
    info.bytes_received = received_.load(std::memory_order_relaxed);
    return info;
}

void reduce_norms(const StepPlan &plan, const NormTable &table, double *message) {
    for (int32_t k = 0; k < plan.comms.expert_count; ++k) {
        for (int64_t g = 0; g <= table.groups; ++g) message[g] = table.square(g, k + 1);
        message[table.groups + 1] = table.reasons();
        plan.comms.experts[k]->all_reduce(message, table.groups + 2, DSOPT_F64, DSOPT_SUM, plan.stream);
        for (int64_t g = 0; g <= table.groups; ++g) table.square(g, k + 1) = message[g];
        table.reasons() = message[table.groups + 1];
    }
    if (plan.comms.model != nullptr)
        plan.comms.model->all_reduce(table.at, NormTable::size(table.groups, table.classes), DSOPT_F64, DSOPT_SUM,
                                     plan.stream);
    if (plan.comms.data == nullptr) return;
    // Where gradients were not averaged all ranks clip by one norm: the root mean square of theirs.
    if (plan.local_gradients && !plan.onebit->compat && plan.comms.data->ranks() > 1) {
        const int64_t size = NormTable::size(table.groups, table.classes);
        plan.comms.data->all_reduce(table.at, size, DSOPT_F64, DSOPT_SUM, plan.stream);
        for (int64_t i = 0; i < size - 1; ++i) table.at[i] /= plan.comms.data->ranks();
        return;
    }
    // The original trusts data-parallel ranks to have the same averaged gradients.
    if (plan.wrapper == Wrapper::none || plan.local_gradients)
        plan.comms.data->all_reduce(&table.reasons(), 1, DSOPT_F64, DSOPT_SUM, plan.stream);
}

bool has_peers(const CommSet &comms) {
    bool peers =
        (comms.data != nullptr && comms.data->ranks() > 1) || (comms.model != nullptr && comms.model->ranks() > 1);
    for (int32_t k = 0; k < comms.expert_count; ++k) peers = peers || comms.experts[k]->ranks() > 1;
    return peers;
}

std::unique_ptr<Comm> make_comm(std::shared_ptr<const Context> context, const dsopt_comm_desc &desc) {
    const bool has_id = desc.id != nullptr || desc.id_bytes != 0;
    if (desc.kind != DSOPT_COMM_TABLE && desc.table != nullptr)
        throw Error(DSOPT_ERR_UNSUPPORTED, "dsopt_comm_desc.table has no effect with kind %d", desc.kind);
    if (desc.kind != DSOPT_COMM_LOCAL && (has_id || desc.rank != 0 || desc.ranks != 0 || desc.timeout_ms != 0))
        throw Error(DSOPT_ERR_UNSUPPORTED,
                    "id, rank, ranks and timeout_ms of dsopt_comm_desc have no effect with kind %d", desc.kind);
    switch (desc.kind) {
    case DSOPT_COMM_SELF: return make_self_comm(std::move(context));
    case DSOPT_COMM_LOCAL: return make_local_comm(std::move(context), desc);
    case DSOPT_COMM_TABLE:
        return make_table_comm(std::move(context),
                               read_struct(not_null(desc.table, "dsopt_comm_desc.table"), "dsopt_comm_table"));
    }
    throw Error(DSOPT_ERR_ARGUMENT, "dsopt_comm_desc.kind is %d, which this library does not know", desc.kind);
}

} // namespace dsopt
