// SPDX-License-Identifier: Apache-2.0
// Linear regression with fp16 weights and gradients: fp32 masters, a dynamic loss scale, clipping by the global norm.
// cc mixed.c $(pkg-config --cflags --libs dsopt)
//
// fp16 holds nothing above 65504, so the first scaled gradients overflow. A step that finds an Inf is skipped and halves the
// loss scale. After 500 good steps in a row the loss scale doubles.
#include <dsopt.h>
#include <stdio.h>
#include <stdlib.h>

static void check(dsopt_status status) {
    if (status == DSOPT_OK) return;
    fprintf(stderr, "%s: %s\n", dsopt_status_name(status), dsopt_last_error());
    exit(1);
}

int main(void) {
    uint16_t w16[3] = {0}, g16[3] = {0}; // the model's memory: IEEE half precision
    float w[3], g[3];                    // C99 has no fp16, so this program computes on copies in fp32
    const dsopt_tensor half_w = {w16, 3, DSOPT_DTYPE_F16, 0}, half_g = {g16, 3, DSOPT_DTYPE_F16, 0};
    const dsopt_tensor float_w = {w, 3, DSOPT_DTYPE_F32, 0}, float_g = {g, 3, DSOPT_DTYPE_F32, 0};
    const dsopt_param param = {.tensor = half_w, .name = "w"};
    dsopt_context *ctx;
    dsopt_scaler *scaler;
    dsopt_optimizer *opt;
    dsopt_group group;
    DSOPT_NEW(dsopt_scaler_desc, scaling);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    DSOPT_NEW(dsopt_report, report);
    const dsopt_step step = {.size = sizeof step, .grads = &half_g, .count = 1};

    check(dsopt_context_create(NULL, &ctx));
    scaling.init = 1 << 20; // so large that the first gradients overflow
    scaling.window = 500;   // number of good steps after which the scale doubles
    check(dsopt_scaler_create(ctx, &scaling, &scaler));
    desc.scaler = scaler; // the step checks for Inf and NaN, divides by the scale, and updates it
    desc.max_norm = 1;    // norm of the unscaled gradients
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    group.lr = 0.02, group.weight_decay = 0;
    check(dsopt_optimizer_add_group(opt, &group, &param, 1));
    for (int i = 0; i < 4000; ++i) {
        const float scale = *dsopt_scaler_device_scale(scaler); // on CUDA this is device memory
        const float x[3] = {(float)(i % 7) / 7, (float)(i % 5) / 5, 1};
        check(dsopt_tensors_axpby(ctx, NULL, &half_w, 0, &float_w, 1, NULL)); // fp16 to fp32
        float e = w[0] * x[0] + w[1] * x[1] + w[2] - (2 * x[0] - 3 * x[1] + 1);
        for (int k = 0; k < 3; ++k) g[k] = scale * e * x[k];
        check(dsopt_tensors_axpby(ctx, NULL, &float_g, 0, &half_g, 1, NULL)); // fp32 to fp16
        check(dsopt_optimizer_step(opt, &step));
    }
    check(dsopt_optimizer_report(opt, &report));
    printf("%.1f %.1f %.1f, %d steps skipped, loss scale %.0f\n", (double)w[0], (double)w[1], (double)w[2],
           (int)report.skipped, report.loss_scale);
    dsopt_optimizer_destroy(opt);
    dsopt_scaler_destroy(scaler);
    dsopt_context_destroy(ctx);
    return 0;
}

// Prints:
// 2.0 -3.0 1.0, 6 steps skipped, loss scale 2097152
