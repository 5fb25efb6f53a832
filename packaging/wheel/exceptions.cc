// SPDX-License-Identifier: Apache-2.0
// What the library of a wheel has from its own libstdc++ and unwinder, called from a program with others: exceptions of the library, those
// of functions of this program, which pass through the library's frames, and a wait that ends. Exit status 0 if all is as it must be.
#include "dsopt.h"
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace {

int wrong = 0;

void expect(const char *what, dsopt_status status, dsopt_status wanted, const char *text) {
    const char *const said = status == DSOPT_OK ? "" : dsopt_last_error();
    if (status == wanted && std::strstr(said, text) != nullptr) return;
    std::printf("%s: status %d, \"%s\"\n", what, int(status), said);
    ++wrong;
}

using AllReduce = decltype(dsopt_comm_table::all_reduce);

void all_reduce(dsopt_context *context, const char *what, AllReduce function, dsopt_status wanted, const char *text) {
    dsopt_comm_table table = {};
    table.size = sizeof table;
    table.ranks = 2;
    table.all_reduce = function;
    dsopt_comm_desc desc = {};
    desc.size = sizeof desc;
    desc.kind = DSOPT_COMM_KIND_TABLE;
    desc.table = &table;
    dsopt_comm *comm = nullptr;
    expect(what, dsopt_comm_create(context, &desc, &comm), DSOPT_OK, "");
    float values[4] = {1, 2, 3, 4};
    const dsopt_tensor tensor = {values, 4, DSOPT_DTYPE_F32, 0};
    expect(what, dsopt_comm_all_reduce(comm, &tensor, 1, DSOPT_OP_SUM, nullptr), wanted, text);
    dsopt_comm_destroy(comm);
}

} // namespace

int main() {
    dsopt_context_desc cpu = {};
    cpu.size = sizeof cpu;
    dsopt_context *context = nullptr;
    expect("context", dsopt_context_create(&cpu, &context), DSOPT_OK, "");

    all_reduce(
        context, "no exception", [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 0; },
        DSOPT_OK, "");
    all_reduce(
        context, "std::runtime_error",
        [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) -> int {
            throw std::runtime_error("the cable is cut");
        },
        DSOPT_ERR_COMM, "the cable is cut");
    all_reduce(
        context, "int", [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) -> int { throw 42; },
        DSOPT_ERR_COMM, "threw");

    cpu.backend = 77;
    dsopt_context *none = nullptr;
    expect("unknown backend", dsopt_context_create(&cpu, &none), DSOPT_ERR_ARGUMENT, "77");

    unsigned char id[256];
    size_t bytes = sizeof id;
    expect("id", dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, id, &bytes), DSOPT_OK, "");
    dsopt_comm_desc local = {};
    local.size = sizeof local;
    local.kind = DSOPT_COMM_KIND_LOCAL;
    local.ranks = 2;
    local.timeout_ms = 1500; // more than a slice of pthread_cond_clockwait in runtime.c
    local.id = id;
    local.id_bytes = bytes;
    dsopt_comm *comm = nullptr;
    expect("a rank alone", dsopt_comm_create(context, &local, &comm), DSOPT_ERR_TIMEOUT, "");
    dsopt_context_destroy(context);
    return wrong;
}
