// SPDX-License-Identifier: Apache-2.0
// call_cost [STEPS]: the fixed cost of a call. Times one dsopt_optimizer_step of AdamW over 148 fp32 tensors of 4
// elements, as many tensors as GPT-2 has, and prints `c MEDIAN`, in microseconds. The benches of the bindings time the
// same step.
#include <dsopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { TENSORS = 148, NUMEL = 4, WARM_UP = 100 };

static void check(dsopt_status status) {
    if (status == DSOPT_OK) return;
    fprintf(stderr, "%s: %s\n", dsopt_status_name(status), dsopt_last_error());
    exit(1);
}

static double microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    const int steps = argc > 1 ? atoi(argv[1]) : 2000;
    static float weights[TENSORS][NUMEL], gradients[TENSORS][NUMEL];
    dsopt_param params[TENSORS];
    dsopt_tensor grads[TENSORS];
    dsopt_context *ctx;
    dsopt_optimizer *opt;
    dsopt_group group;
    DSOPT_NEW(dsopt_step, step);
    double *times = malloc((size_t)(steps > 0 ? steps : 1) * sizeof *times);
    if (steps <= 0 || times == NULL) {
        fprintf(stderr, "usage: call_cost [STEPS]\n");
        return 1;
    }
    for (int i = 0; i < TENSORS; ++i) {
        for (int k = 0; k < NUMEL; ++k) gradients[i][k] = 0.01f * (float)(k + 1);
        params[i] = (dsopt_param){.tensor = {weights[i], NUMEL, DSOPT_DTYPE_F32, 0}};
        grads[i] = (dsopt_tensor){gradients[i], NUMEL, DSOPT_DTYPE_F32, 0};
    }
    check(dsopt_context_create(NULL, &ctx));
    check(dsopt_optimizer_create(ctx, NULL, &opt));
    check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    check(dsopt_optimizer_add_group(opt, &group, params, TENSORS));
    step.grads = grads;
    step.count = TENSORS;
    for (int i = 0; i < WARM_UP; ++i) check(dsopt_optimizer_step(opt, &step));
    for (int i = 0; i < steps; ++i) {
        const double begin = microseconds();
        check(dsopt_optimizer_step(opt, &step));
        times[i] = microseconds() - begin;
    }
    qsort(times, (size_t)steps, sizeof *times, compare);
    printf("c %.2f\n", times[steps / 2]);
    dsopt_optimizer_destroy(opt);
    dsopt_context_destroy(ctx);
    free(times);
    return 0;
}
