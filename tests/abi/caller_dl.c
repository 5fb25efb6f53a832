// SPDX-License-Identifier: Apache-2.0
// Linear regression of examples/fp32.c, y = 2 x0 - 3 x1 + 1, without linking to dsopt. C99 and C++11.
#include <dsopt_dl.h>
#include <stdio.h>
#include <stdlib.h>

static dsopt_dl dl;

static void check(dsopt_status status) {
    if (status == DSOPT_OK) return;
    fprintf(stderr, "%s: %s\n", dl.dsopt_status_name(status), dl.dsopt_last_error());
    exit(1);
}

int main(int argc, char **argv) {
    float w[3] = {0}, g[3] = {0};
    dsopt_tensor grads[] = {{g, 2, DSOPT_DTYPE_F32, 0}, {g + 2, 1, DSOPT_DTYPE_F32, 0}};
    dsopt_param params[] = {{{w, 2, DSOPT_DTYPE_F32, 0}, "w", NULL, 0, 0, 0, 0, 0, 0, 0},
                            {{w + 2, 1, DSOPT_DTYPE_F32, 0}, "b", NULL, 0, 0, 0, 0, 0, 0, 0}};
    dsopt_context *ctx;
    dsopt_optimizer *opt;
    dsopt_group group;
    const char *problem = dsopt_dl_load(&dl, argc > 1 ? argv[1] : NULL);
    if (problem) {
        fprintf(stderr, "%s\n", problem);
        return 1;
    }
    check(dl.dsopt_context_create(NULL, &ctx)); // CPU
    check(dl.dsopt_optimizer_create(ctx, NULL, &opt));
    check(dl.dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    group.lr = 0.02, group.weight_decay = 0;
    check(dl.dsopt_optimizer_add_group(opt, &group, params, 2));
    DSOPT_NEW(dsopt_step, step);
    step.grads = grads;
    step.count = 2;
    for (int i = 0; i < 4000; ++i) {
        float x0 = (float)(i % 7) / 7, x1 = (float)(i % 5) / 5;
        float e = w[0] * x0 + w[1] * x1 + w[2] - (2 * x0 - 3 * x1 + 1);
        g[0] = e * x0;
        g[1] = e * x1;
        g[2] = e;
        check(dl.dsopt_optimizer_step(opt, &step));
    }
    printf("%.2f %.2f %.2f\n", (double)w[0], (double)w[1], (double)w[2]);
    check(dl.dsopt_optimizer_save(opt, "run.safetensors", NULL));
    dl.dsopt_optimizer_destroy(opt);
    dl.dsopt_context_destroy(ctx);
    dsopt_dl_unload(&dl);
    return 0;
}
