// SPDX-License-Identifier: Apache-2.0
// Linear regression, y = 2 x0 - 3 x1 + 1, in fp32 with AdamW: cc fp32.c $(pkg-config --cflags --libs dsopt)
#include <dsopt.h>
#include <stdio.h>
#include <stdlib.h>

static void check(dsopt_status status) {
    if (status == DSOPT_OK) return;
    fprintf(stderr, "%s: %s\n", dsopt_status_name(status), dsopt_last_error());
    exit(1);
}

int main(void) {
    float w[2] = {0}, b[1] = {0}, gw[2] = {0}, gb[1] = {0};
    dsopt_param params[] = {{.tensor = {w, 2, DSOPT_DTYPE_F32, 0}, .name = "w"},
                            {.tensor = {b, 1, DSOPT_DTYPE_F32, 0}, .name = "b"}};
    dsopt_tensor grads[] = {{gw, 2, DSOPT_DTYPE_F32, 0}, {gb, 1, DSOPT_DTYPE_F32, 0}};
    dsopt_context *ctx;
    dsopt_optimizer *opt;
    dsopt_group group;
    check(dsopt_context_create(NULL, &ctx)); // CPU
    check(dsopt_optimizer_create(ctx, NULL, &opt));
    check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    group.lr = 0.02, group.weight_decay = 0;
    check(dsopt_optimizer_add_group(opt, &group, params, 2));
    for (int i = 0; i < 4000; ++i) {
        float x0 = (float)(i % 7) / 7, x1 = (float)(i % 5) / 5;
        float e = w[0] * x0 + w[1] * x1 + b[0] - (2 * x0 - 3 * x1 + 1);
        gw[0] += e * x0, gw[1] += e * x1, gb[0] += e;
        check(dsopt_optimizer_step(opt, &(dsopt_step){.size = sizeof(dsopt_step), .grads = grads, .count = 2}));
        check(dsopt_zero_grad(ctx, grads, 2, DSOPT_ZERO_FILL, NULL));
    }
    printf("%.2f %.2f %.2f\n", (double)w[0], (double)w[1], (double)b[0]);
    check(dsopt_optimizer_save(opt, "run.safetensors", NULL));
    dsopt_optimizer_destroy(opt);
    dsopt_context_destroy(ctx);
    return 0;
}

// Prints:
// 2.00 -3.00 1.00
