// SPDX-License-Identifier: Apache-2.0
// AdamW with sharded state: mpicc sharded_mpi.c $(pkg-config --cflags --libs dsopt) && mpirun -n 4 ./a.out
#include <dsopt_mpi.h>

enum { N = 250000, STEPS = 100 };
static float w[N], g[N];

static void check(dsopt_status status) {
    if (status == DSOPT_OK) return;
    fprintf(stderr, "%s: %s\n", dsopt_status_name(status), dsopt_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv) {
    dsopt_param param = {.tensor = {w, N, DSOPT_DTYPE_F32, 0}, .name = "w"};
    dsopt_tensor grad = {g, N, DSOPT_DTYPE_F32, 0};
    dsopt_context *ctx;
    dsopt_comm *data;
    dsopt_optimizer *opt;
    dsopt_group group;
    int rank;
    char path[64];
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    if (MPI_Init(&argc, &argv) != MPI_SUCCESS || MPI_Comm_rank(MPI_COMM_WORLD, &rank) != MPI_SUCCESS) return 1;
    check(dsopt_context_create(NULL, &ctx));
    check(dsopt_mpi_comm(ctx, MPI_COMM_WORLD, &data));
    desc.data = data;
    desc.flags = DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_AVERAGES; // each rank passes its own gradients
    desc.max_norm = 1;
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    group.lr = 0.1, group.weight_decay = 0;
    check(dsopt_optimizer_add_group(opt, &group, &param, 1));
    for (int t = 0; t < STEPS; ++t) {
        for (int i = 0; i < N; ++i) g[i] = w[i] - (float)(i % 7 + rank); // the ranks together fit the mean
        check(dsopt_optimizer_step(opt, &(dsopt_step){.size = sizeof(dsopt_step), .grads = &grad, .count = 1}));
    }
    DSOPT_NEW(dsopt_report, report);
    check(dsopt_optimizer_report(opt, &report));
    if (rank == 0) printf("w[3] = %.1f, %d bytes of state of %d\n", (double)w[3], (int)report.state_bytes, 8 * N);
    (void)snprintf(path, sizeof path, "sharded.%d.safetensors", rank);
    check(dsopt_optimizer_save(opt, path, NULL)); // any number of ranks can load the files
    dsopt_optimizer_destroy(opt);
    dsopt_comm_destroy(data);
    dsopt_context_destroy(ctx);
    return MPI_Finalize();
}

// Prints with four ranks:
// w[3] = 4.5, 524292 bytes of state of 2000000
