// SPDX-License-Identifier: Apache-2.0
// 1-bit Adam over MPI. Each rank has different targets; the ranks together fit their mean.
// mpicc onebit_mpi.c $(pkg-config --cflags --libs dsopt) && mpirun -n 4 ./a.out
//
// Up to `freeze_step` the gradients must be averaged over the ranks, which dsopt_optimizer_next_reduction reports before the
// backward pass. After that each rank passes its local gradients, and the step exchanges one bit per element.
#include <dsopt_mpi.h>

enum { N = 65536, FREEZE = 100, STEPS = 300 };

static void check(dsopt_status status) {
    if (status == DSOPT_OK) return;
    fprintf(stderr, "%s: %s\n", dsopt_status_name(status), dsopt_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv) {
    static float w[N], g[N];
    const dsopt_tensor grad = {g, N, DSOPT_DTYPE_F32, 0};
    const dsopt_param param = {.tensor = {w, N, DSOPT_DTYPE_F32, 0}, .name = "w"};
    const dsopt_step step = {.size = sizeof step, .grads = &grad, .count = 1};
    dsopt_context *ctx;
    dsopt_comm *comm;
    dsopt_optimizer *opt;
    dsopt_group group;
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    DSOPT_NEW(dsopt_comm_info, info);
    if (MPI_Init(&argc, &argv) != MPI_SUCCESS) return 1;
    check(dsopt_context_create(NULL, &ctx));
    check(dsopt_mpi_comm(ctx, MPI_COMM_WORLD, &comm));
    check(dsopt_comm_query(comm, &info));
    desc.data = comm; // the data-parallel ranks
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ONEBIT_ADAM));
    group.freeze_step = FREEZE; // number of steps with gradients in full precision
    check(dsopt_optimizer_add_group(opt, &group, &param, 1));
    for (int i = 1; i <= STEPS; ++i) {
        const int64_t sent = info.bytes_sent;
        int32_t reduction;
        check(dsopt_optimizer_next_reduction(opt, 0, &reduction)); // known before the backward pass
        check(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_LR, 0.05 * (STEPS + 1 - i) / STEPS));
        for (int k = 0; k < N; ++k) g[k] = w[k] - (float)(k % 3) * (info.rank % 2 ? 0.5f : 1.5f);
        if (reduction == DSOPT_REDUCTION_FULL) check(dsopt_comm_all_reduce(comm, &grad, 1, DSOPT_OP_MEAN, NULL));
        check(dsopt_optimizer_step(opt, &step));
        check(dsopt_comm_query(comm, &info));
        if (info.rank == 0 && (i == FREEZE || i == STEPS))
            printf("step %d: %d bytes sent, w[2] = %.1f\n", i, (int)(info.bytes_sent - sent), (double)w[2]);
    }
    dsopt_optimizer_destroy(opt);
    dsopt_comm_destroy(comm);
    dsopt_context_destroy(ctx);
    MPI_Finalize();
    return 0;
}

// Prints with four ranks:
// step 100: 393228 bytes sent, w[2] = 2.0
// step 300: 12420 bytes sent, w[2] = 2.0
