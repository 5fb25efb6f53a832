// SPDX-License-Identifier: Apache-2.0
// A plugin with a private static copy of dsopt. It exports one function, whose name is ENTRY.
#include <dsopt.h>
#include <stddef.h>

// If `fail`, makes a call that must fail, otherwise takes a step. Returns an address in this copy, or NULL if the
// result is not as expected, and the copy's last error text.
const void *ENTRY(int fail, const char **last_error);
const void *ENTRY(int fail, const char **last_error) {
    enum { COUNT = 1 << 20 }; // enough for two threads
    static float w[COUNT] = {1}, g[COUNT] = {1};
    dsopt_param param = {.tensor = {w, COUNT, DSOPT_DTYPE_F32, 0}, .name = "w"};
    dsopt_tensor grad = {g, COUNT, DSOPT_DTYPE_F32, 0};
    dsopt_context *ctx = NULL;
    dsopt_optimizer *opt = NULL;
    dsopt_group group;
    DSOPT_NEW(dsopt_context_desc, desc);
    DSOPT_NEW(dsopt_step, step);
    desc.backend = fail ? 77 : DSOPT_BACKEND_CPU, desc.threads = 2;
    step.grads = &grad, step.count = 1;
    const int succeeded = dsopt_context_create(&desc, &ctx) == DSOPT_OK &&
                          dsopt_optimizer_create(ctx, NULL, &opt) == DSOPT_OK &&
                          dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW) == DSOPT_OK &&
                          dsopt_optimizer_add_group(opt, &group, &param, 1) == DSOPT_OK &&
                          dsopt_optimizer_step(opt, &step) == DSOPT_OK && w[0] < 1;
    dsopt_optimizer_destroy(opt);
    dsopt_context_destroy(ctx);
    *last_error = dsopt_last_error();
    return succeeded != fail ? (const void *)dsopt_build_info() : NULL;
}
