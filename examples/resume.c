// SPDX-License-Identifier: Apache-2.0
// Four ranks train with 1-bit Adam and save one file each. Two ranks continue from the four files. Ranks are threads here.
// cc -pthread resume.c $(pkg-config --cflags --libs dsopt)
//
// Moments, counters and schedule are exact. Worker errors become their mean over the ranks that saved; server errors are joined
// and partitioned among the new ranks.
#include <dsopt.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 1000, OLD = 4, NEW = 2 };
static const char *const files[OLD] = {"rank0.safetensors", "rank1.safetensors", "rank2.safetensors",
                                       "rank3.safetensors"};
static int ranks;
static char id[64]; // the same bytes for all ranks of a comm
static size_t id_bytes;

static void check(dsopt_status status) {
    if (status == DSOPT_OK) return;
    fprintf(stderr, "%s: %s\n", dsopt_status_name(status), dsopt_last_error());
    exit(1);
}

static void *train(void *argument) {
    const int rank = *(const int *)argument;
    float w[N] = {0}, g[N];
    const dsopt_tensor grad = {g, N, DSOPT_DTYPE_F32, 0};
    const dsopt_param param = {.tensor = {w, N, DSOPT_DTYPE_F32, 0}, .name = "w"};
    const dsopt_step step = {.size = sizeof step, .grads = &grad, .count = 1};
    const dsopt_io save = {.size = sizeof save, .flags = DSOPT_IO_PARAMS}; // also the parameters
    const dsopt_io load = {.size = sizeof load, .flags = DSOPT_IO_PARAMS, .files = OLD, .paths = files};
    dsopt_context *ctx;
    dsopt_comm *comm;
    dsopt_optimizer *opt;
    dsopt_group group;
    DSOPT_NEW(dsopt_comm_desc, local);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    DSOPT_NEW(dsopt_report, report);
    check(dsopt_context_create(NULL, &ctx));
    local.kind = DSOPT_COMM_KIND_LOCAL, local.rank = rank, local.ranks = ranks;
    local.id = id, local.id_bytes = id_bytes;
    check(dsopt_comm_create(ctx, &local, &comm));
    desc.data = comm;
    desc.flags = DSOPT_OPTIMIZER_AVERAGES; // the step averages gradients itself where it needs their mean
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ONEBIT_ADAM));
    group.lr = 0.02;
    group.freeze_step = 40;
    check(dsopt_optimizer_add_group(opt, &group, &param, 1));
    if (ranks == NEW) check(dsopt_optimizer_load(opt, NULL, &load)); // every rank reads the files of all four
    for (int i = 0; i < 100; ++i) {
        for (int k = 0; k < N; ++k) g[k] = w[k] - (float)(k % 3) * (rank % 2 ? 0.5f : 1.5f);
        check(dsopt_optimizer_step(opt, &step));
    }
    check(dsopt_optimizer_report(opt, &report));
    if (ranks == OLD) check(dsopt_optimizer_save(opt, files[rank], &save));
    if (rank == 0)
        printf("%d ranks, step %d, w[2] = %.1f, resharded from %d ranks\n", ranks, (int)report.calls, (double)w[2],
               report.resharded_from);
    dsopt_optimizer_destroy(opt);
    dsopt_comm_destroy(comm);
    dsopt_context_destroy(ctx);
    return NULL;
}

int main(void) {
    for (ranks = OLD; ranks >= NEW; ranks -= OLD - NEW) {
        pthread_t threads[OLD];
        int rank[OLD];
        id_bytes = sizeof id;
        check(dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, id, &id_bytes));
        for (int r = 0; r < ranks; ++r)
            if (rank[r] = r, pthread_create(&threads[r], NULL, train, &rank[r])) return 1;
        for (int r = 0; r < ranks; ++r) pthread_join(threads[r], NULL);
    }
    return 0;
}

// Prints:
// 4 ranks, step 100, w[2] = 2.0, resharded from 0 ranks
// 2 ranks, step 200, w[2] = 2.0, resharded from 4 ranks
