// SPDX-License-Identifier: Apache-2.0
#include "handles.h"
#include <cstdlib>
#include <thread>
#include <vector>

namespace test {

dsopt_context_desc context_desc(int32_t threads) {
    dsopt_context_desc desc = context_desc(threads, default_backend());
    if (on_cuda()) desc.flags = DSOPT_CONTEXT_CHECK_POINTERS;
    return desc;
}
dsopt_context_desc context_desc(int32_t threads, int32_t backend, int32_t device) {
    DSOPT_NEW(dsopt_context_desc, desc);
    desc.threads = threads;
    desc.backend = backend;
    desc.device = device;
    return desc;
}
Context make_context(const dsopt_context_desc &desc) {
    dsopt_context *context = nullptr;
    must(dsopt_context_create(&desc, &context));
    return Context(context);
}
Context make_context(int32_t threads, const char *isa) {
    if (isa == nullptr) return make_context(context_desc(threads));
    setenv("DSOPT_ISA", isa, 1);
    const dsopt_context_desc desc = context_desc(threads);
    dsopt_context *context = nullptr;
    const dsopt_status status = dsopt_context_create(&desc, &context);
    unsetenv("DSOPT_ISA");
    must(status);
    return Context(context);
}

dsopt_optimizer_desc optimizer_desc(double max_norm, uint32_t flags) {
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.max_norm = max_norm;
    desc.flags = flags;
    return desc;
}
dsopt_optimizer_desc desc_with(const Comm &comm, int32_t compat, uint32_t flags) {
    dsopt_optimizer_desc desc = optimizer_desc(0, flags);
    desc.data = comm.get();
    desc.compat = compat;
    return desc;
}
Optimizer make_optimizer(const Context &context, const dsopt_optimizer_desc &desc) {
    dsopt_optimizer *optimizer = nullptr;
    must(dsopt_optimizer_create(context.get(), &desc, &optimizer));
    return Optimizer(optimizer);
}
dsopt_group make_group(int32_t algorithm, double weight_decay, uint32_t flags) {
    dsopt_group group;
    must(dsopt_group_init(&group, sizeof group, algorithm));
    group.weight_decay = weight_decay;
    group.flags = flags;
    return group;
}
dsopt_group group_of(int32_t algorithm, double lr, double weight_decay) {
    dsopt_group group;
    must(dsopt_group_init(&group, sizeof group, algorithm));
    group.lr = lr;
    group.weight_decay = weight_decay;
    return group;
}
dsopt_param param_of(const dsopt_tensor &tensor, const char *name) {
    dsopt_param param{};
    param.tensor = tensor;
    param.name = name;
    return param;
}
std::string name_of(int32_t algorithm) {
    switch (algorithm) {
    case DSOPT_ALGORITHM_ADAM: return "Adam";
    case DSOPT_ALGORITHM_ADAMW: return "AdamW";
    case DSOPT_ALGORITHM_LAMB: return "Lamb";
    case DSOPT_ALGORITHM_ADAM_LEGACY: return "AdamLegacy";
    case DSOPT_ALGORITHM_SGD: return "Sgd";
    case DSOPT_ALGORITHM_ADAGRAD: return "Adagrad";
    case DSOPT_ALGORITHM_LION: return "Lion";
    case DSOPT_ALGORITHM_MUON: return "Muon";
    case DSOPT_ALGORITHM_ONEBIT_ADAM: return "OneBitAdam";
    case DSOPT_ALGORITHM_ZERO_ONE_ADAM: return "ZeroOneAdam";
    case DSOPT_ALGORITHM_ONEBIT_LAMB: return "OneBitLamb";
    }
    return "Algorithm" + std::to_string(algorithm);
}

Scaler make_scaler(const Context &context, const dsopt_scaler_desc &desc) {
    dsopt_scaler *scaler = nullptr;
    must(dsopt_scaler_create(context.get(), &desc, &scaler));
    return Scaler(scaler);
}
Scaler make_scaler(const Context &context, double init, int window, uint32_t flags) {
    DSOPT_NEW(dsopt_scaler_desc, desc);
    desc.init = init;
    desc.window = flags & DSOPT_SCALER_STATIC ? 0 : window;
    desc.flags = flags;
    return make_scaler(context, desc);
}
dsopt_scaler_info info_of(const Scaler &scaler) {
    DSOPT_NEW(dsopt_scaler_info, info);
    must(dsopt_scaler_query(scaler.get(), &info));
    return info;
}

CommId new_id() {
    CommId id;
    size_t bytes = id.size();
    must(dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, id.data(), &bytes));
    return id;
}
dsopt_comm_desc comm_desc(int32_t kind, const void *id, size_t id_bytes, int rank, int ranks, int timeout_ms) {
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = kind;
    desc.rank = rank;
    desc.ranks = ranks;
    desc.timeout_ms = timeout_ms;
    desc.id = id;
    desc.id_bytes = id_bytes;
    return desc;
}
dsopt_comm_desc local_desc(const CommId &id, int rank, int ranks, int timeout_ms) {
    return comm_desc(DSOPT_COMM_KIND_LOCAL, id.data(), id.size(), rank, ranks, timeout_ms);
}
Comm make_comm(const Context &context, const dsopt_comm_desc &desc) {
    dsopt_comm *comm = nullptr;
    must(dsopt_comm_create(context.get(), &desc, &comm));
    return Comm(comm);
}
Comm table_comm(const Context &context, const dsopt_comm_table &table, uint32_t flags) {
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = DSOPT_COMM_KIND_TABLE;
    desc.table = &table;
    desc.flags = flags;
    return make_comm(context, desc);
}
Comm local_comm(const Context &context, const CommId &id, int rank, int ranks, int timeout_ms) {
    return make_comm(context, local_desc(id, rank, ranks, timeout_ms));
}
Comm self_comm(const Context &context) {
    dsopt_comm *comm = nullptr;
    must(dsopt_comm_create(context.get(), nullptr, &comm));
    return Comm(comm);
}
dsopt_comm_info info_of(const Comm &comm) {
    DSOPT_NEW(dsopt_comm_info, info);
    must(dsopt_comm_query(comm.get(), &info));
    return info;
}

void run_ranks(int ranks, const std::function<void(int rank)> &body) {
    std::vector<std::thread> threads;
    std::vector<std::string> errors{size_t(ranks)};
    for (int rank = 0; rank < ranks; ++rank)
        threads.emplace_back([&body, &errors, rank] {
            try {
                body(rank);
            } catch (const std::exception &error) {
                errors[size_t(rank)] = "rank " + std::to_string(rank) + ": " + error.what() + "\n";
            }
        });
    for (std::thread &thread : threads) thread.join();
    std::string all;
    for (const std::string &error : errors) all += error;
    if (!all.empty()) throw std::runtime_error(all);
}
void with_ranks(int ranks, const std::function<void(int rank, const Context &, const Comm &)> &body) {
    const CommId id = new_id();
    run_ranks(ranks, [&](int rank) {
        const Context context = make_context(1);
        const Comm comm = local_comm(context, id, rank, ranks);
        body(rank, context, comm);
    });
}

} // namespace test
