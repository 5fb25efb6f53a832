// SPDX-License-Identifier: Apache-2.0
// The functional form, for XLA and other functional frameworks: the optimizer is constant, and everything that a step
// changes is memory of this program. Threads can step one optimizer at the same time, each with its own memory.
// cc apply.c $(pkg-config --cflags --libs dsopt)
#include <dsopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void check(dsopt_status status) {
    if (status == DSOPT_OK) return;
    fprintf(stderr, "%s: %s\n", dsopt_status_name(status), dsopt_last_error());
    exit(1);
}
static void *allocate(size_t bytes) {
    void *memory = malloc(bytes != 0 ? bytes : 1);
    if (memory == NULL) exit(1);
    return memory;
}

int main(void) {
    float w[3] = {0}, g[3], report[DSOPT_REPORT_FLOATS], hyper[DSOPT_HYPER_FLOATS];
    const dsopt_tensor weights = {w, 3, DSOPT_DTYPE_F32, 0}, grads = {g, 3, DSOPT_DTYPE_F32, 0};
    const dsopt_param param = {.tensor = {NULL, 3, DSOPT_DTYPE_F32, 0}, .name = "w"}; // each call passes the memory
    dsopt_context *ctx;
    dsopt_optimizer *opt;
    dsopt_group group;
    DSOPT_NEW(dsopt_step, step);
    check(dsopt_context_create(NULL, &ctx));
    check(dsopt_optimizer_create(ctx, NULL, &opt));
    check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    group.weight_decay = 0;
    check(dsopt_optimizer_add_group(opt, &group, &param, 1));

    check(dsopt_optimizer_state_count(opt, &step.state_count));
    dsopt_tensor *state = allocate((size_t)step.state_count * sizeof *state);
    for (int64_t i = 0; i < step.state_count; ++i) {
        DSOPT_NEW(dsopt_state_info, info); // name, parameter, dtype and shape are known before the first step
        check(dsopt_optimizer_state(opt, i, &info));
        printf("%s ", info.name);
        state[i] = info.tensor;
        state[i].data = allocate((size_t)info.tensor.numel * 4); // F32 or I32
    }
    check(dsopt_optimizer_init_state(opt, &weights, 1, state, step.state_count, NULL));
    check(dsopt_optimizer_workspace(opt, &step.workspace_bytes));
    step.workspace = allocate(step.workspace_bytes);
    for (int k = 0; k < DSOPT_HYPER_FLOATS; ++k) hyper[k] = NAN; // NaN: the value of the group
    step.grads = &grads, step.params = &weights, step.count = 1;
    step.state = state, step.hyper = hyper, step.report = report;
    for (int i = 0; i < 4000; ++i) {
        const float x[3] = {(float)(i % 7) / 7, (float)(i % 5) / 5, 1};
        float e = w[0] * x[0] + w[1] * x[1] + w[2] - (2 * x[0] - 3 * x[1] + 1);
        for (int k = 0; k < 3; ++k) g[k] = e * x[k];
        hyper[DSOPT_HYPER_LR] = i < 100 ? 0.0002f * (float)(i + 1) : 0.02f; // warm-up
        check(dsopt_optimizer_apply(opt, &step));
        if (report[DSOPT_REPORT_SKIPPED] != 0) printf("step %d was skipped\n", i);
    }
    printf("%.2f %.2f %.2f\n", (double)w[0], (double)w[1], (double)w[2]);
    for (int64_t i = 0; i < step.state_count; ++i) free(state[i].data);
    free(state);
    free(step.workspace);
    dsopt_optimizer_destroy(opt);
    dsopt_context_destroy(ctx);
    return 0;
}

// Prints:
// exp_avg exp_avg_sq step 2.00 -3.00 1.00
