/* SPDX-License-Identifier: Apache-2.0 */
/* Regression tests of defects that callers reported, each a few lines through the shared library that need only
 * dsopt.h. Prints a line for each defect that is present, and nothing otherwise. */
#include <dsopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

unsigned alarm(unsigned seconds); /* declared by POSIX; headers in C99 mode may omit it */

enum { N = 4, LARGE = 1 << 16, MOST_STATE = 32 };
static int defects;

static void defect(int number, const char *text) {
    printf("%d. %s (last error: %s)\n", number, text, dsopt_last_error());
    ++defects;
}
/* For calls that only prepare a case: if they fail, the results below are meaningless. */
static void must(dsopt_status status) {
    if (status == DSOPT_OK) return;
    printf("%s: %s\n", dsopt_status_name(status), dsopt_last_error());
    exit(1);
}

static dsopt_optimizer *make(dsopt_context *ctx, dsopt_scaler *scaler, int32_t compat, int32_t algorithm,
                             const dsopt_param *param) {
    dsopt_optimizer *opt = NULL;
    dsopt_group group;
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.scaler = scaler;
    desc.compat = compat;
    must(dsopt_optimizer_create(ctx, &desc, &opt));
    must(dsopt_group_init(&group, sizeof group, algorithm));
    if (algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM) group.freeze_step = 2;
    must(dsopt_optimizer_add_group(opt, &group, param, 1));
    return opt;
}

/* A state list in the caller's memory. */
struct State {
    dsopt_tensor list[MOST_STATE];
    int64_t count;
    int64_t loss_scale, scaler, schedule, step; /* indices in the list, -1 = absent */
};
static struct State new_state(const dsopt_optimizer *opt) {
    struct State state;
    memset(&state, 0, sizeof state);
    state.loss_scale = state.scaler = state.schedule = state.step = -1;
    must(dsopt_optimizer_state_count(opt, &state.count));
    for (int64_t i = 0; i < state.count; ++i) {
        DSOPT_NEW(dsopt_state_info, info);
        must(dsopt_optimizer_state(opt, i, &info));
        state.list[i] = info.tensor;
        state.list[i].data = calloc((size_t)info.tensor.numel + 1, 4);
        if (!strcmp(info.name, "loss_scale")) state.loss_scale = i;
        if (!strcmp(info.name, "scaler")) state.scaler = i;
        if (!strcmp(info.name, "schedule")) state.schedule = i;
        if (!strcmp(info.name, "step")) state.step = i;
    }
    return state;
}
static void free_state(struct State *state) {
    for (int64_t i = 0; i < state->count; ++i) free(state->list[i].data);
}
static dsopt_status apply(const dsopt_optimizer *opt, const dsopt_tensor *param, const dsopt_tensor *grad,
                          const struct State *state, float *report) {
    size_t bytes = 0;
    must(dsopt_optimizer_workspace(opt, &bytes));
    void *workspace = malloc(bytes);
    DSOPT_NEW(dsopt_step, step);
    step.params = param;
    step.grads = grad;
    step.count = 1;
    step.state = state->list;
    step.state_count = state->count;
    step.workspace = workspace;
    step.workspace_bytes = bytes;
    step.report = report;
    const dsopt_status status = dsopt_optimizer_apply(opt, &step);
    free(workspace);
    return status;
}

/* 1. With a loss scale of zero in the state list, as after calloc, apply returned DSOPT_OK and wrote NaN weights. */
static void invalid_scales(dsopt_context *ctx) {
    const float scales[] = {0, NAN, INFINITY, -1024};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; ++i) {
        float w[N] = {1, 1, 1, 1}, g[N] = {1, 1, 1, 1}, report[DSOPT_REPORT_FLOATS];
        const dsopt_tensor param = {w, N, DSOPT_DTYPE_F32, 0}, grad = {g, N, DSOPT_DTYPE_F32, 0};
        const dsopt_param registered = {.tensor = {NULL, N, DSOPT_DTYPE_F32, 0}, .name = "w"};
        dsopt_scaler *scaler = NULL;
        must(dsopt_scaler_create(ctx, NULL, &scaler));
        dsopt_optimizer *opt = make(ctx, scaler, DSOPT_COMPAT_NONE, DSOPT_ALGORITHM_ADAMW, &registered);
        struct State state = new_state(opt);
        must(dsopt_optimizer_init_state(opt, &param, 1, state.list, state.count, NULL));
        if (*(float *)state.list[state.loss_scale].data != 65536)
            defect(1, "init_state does not initialize the loss scale");
        *(float *)state.list[state.loss_scale].data = scales[i];
        if (scales[i] == 0) memset(state.list[state.scaler].data, 0, 48);
        if (apply(opt, &param, &grad, &state, report) != DSOPT_OK) defect(1, "apply fails");
        if (report[DSOPT_REPORT_SKIPPED] != 1 || w[0] != 1) defect(1, "apply divides by an invalid loss scale");
        if ((int)report[DSOPT_REPORT_REASONS] != DSOPT_SKIP_SCALE) defect(1, "the report lacks the reason of the skip");
        if (apply(opt, &param, &grad, &state, report) != DSOPT_OK || report[DSOPT_REPORT_SKIPPED] != 0)
            defect(1, "the scaler does not recover from an invalid loss scale");
        free_state(&state);
        dsopt_optimizer_destroy(opt);
        dsopt_scaler_destroy(scaler);
    }
}

/* 2. The initial words of the scaler were unavailable before parameters had memory. */
static void initial_scaler_state(dsopt_context *ctx) {
    float scale = 0;
    int32_t words[12] = {0};
    const dsopt_tensor list[2] = {{&scale, 1, DSOPT_DTYPE_F32, 0}, {words, 12, DSOPT_DTYPE_I32, 0}};
    dsopt_scaler *scaler = NULL;
    must(dsopt_scaler_create(ctx, NULL, &scaler));
    DSOPT_NEW(dsopt_scaler_info, info);
    if (dsopt_scaler_init_state(scaler, list, 2, NULL) != DSOPT_OK || scale != 65536 ||
        dsopt_scaler_decode(words, &info) != DSOPT_OK || info.dynamic != 65536 || info.last_overflow != -1)
        defect(2, "a scaler has no initial values for arrays");
    dsopt_scaler_destroy(scaler);
}

/* 3. In compat mode with masters, apply did not do the first step on zero gradients, so its results differed from those
 * of step. */
static void first_step(dsopt_context *ctx) {
    uint16_t half[2][N] = {{0x3c00, 0x3c00, 0x3c00, 0x3c00}, {0x3c00, 0x3c00, 0x3c00, 0x3c00}};
    uint16_t g[N] = {0x3800, 0x3800, 0x3800, 0x3800};
    const dsopt_tensor grad = {g, N, DSOPT_DTYPE_F16, 0}, param = {half[0], N, DSOPT_DTYPE_F16, 0};
    const dsopt_param pure = {.tensor = {NULL, N, DSOPT_DTYPE_F16, 0}, .name = "w"},
                      bound = {.tensor = {half[1], N, DSOPT_DTYPE_F16, 0}, .name = "w"};
    dsopt_optimizer *a = make(ctx, NULL, DSOPT_COMPAT_DEEPSPEED, DSOPT_ALGORITHM_ADAMW, &pure),
                    *b = make(ctx, NULL, DSOPT_COMPAT_DEEPSPEED, DSOPT_ALGORITHM_ADAMW, &bound);
    struct State state = new_state(a);
    must(dsopt_optimizer_init_state(a, &param, 1, state.list, state.count, NULL));
    for (int i = 0; i < 3; ++i) {
        DSOPT_NEW(dsopt_step, step);
        step.grads = &grad;
        step.count = 1;
        must(dsopt_optimizer_step(b, &step));
        if (apply(a, &param, &grad, &state, NULL) != DSOPT_OK) defect(3, "apply fails");
    }
    int32_t counter = 0;
    must(dsopt_optimizer_export(b, state.step, &counter, sizeof counter));
    if (*(int32_t *)state.list[state.step].data != counter) defect(3, "apply and step count differently");
    if (memcmp(half[0], half[1], sizeof half[0]) != 0) defect(3, "apply and step compute different weights");
    free_state(&state);
    dsopt_optimizer_destroy(a);
    dsopt_optimizer_destroy(b);
}

/* 4. A caller of apply had no way to learn that the 1-bit family no longer averages gradients. */
static void reductions(dsopt_context *ctx) {
    for (int32_t compat = DSOPT_COMPAT_NONE; compat <= DSOPT_COMPAT_DEEPSPEED; ++compat) {
        float w[N] = {1, 1, 1, 1}, g[N] = {1, 1, 1, 1};
        const dsopt_tensor param = {w, N, DSOPT_DTYPE_F32, 0}, grad = {g, N, DSOPT_DTYPE_F32, 0};
        const dsopt_param registered = {.tensor = {NULL, N, DSOPT_DTYPE_F32, 0}, .name = "w"};
        dsopt_optimizer *opt = make(ctx, NULL, compat, DSOPT_ALGORITHM_ONEBIT_ADAM, &registered);
        struct State state = new_state(opt);
        must(dsopt_optimizer_init_state(opt, &param, 1, state.list, state.count, NULL));
        for (int call = 1; call <= 5; ++call) {
            int32_t reduction = 0;
            DSOPT_NEW(dsopt_schedule_info, info);
            must(dsopt_schedule_decode(opt, state.list[state.schedule].data, &info));
            if (dsopt_optimizer_next_reduction_on_device(opt, &state.list[state.schedule], &reduction, NULL) !=
                    DSOPT_OK ||
                reduction != (call <= 2 ? DSOPT_REDUCTION_FULL : DSOPT_REDUCTION_COMPRESSED) ||
                reduction != info.reduction)
                defect(4, "the reduction of the next apply is not reported");
            must(apply(opt, &param, &grad, &state, NULL));
        }
        free_state(&state);
        dsopt_optimizer_destroy(opt);
    }
}

/* 5. A thread pool whose run function runs nothing was not detected. */
static void runs_nothing(void *user, int64_t n, void (*body)(void *, int64_t), void *arg) {
    (void)user, (void)n, (void)body, (void)arg;
}
static dsopt_status large_step(dsopt_context *ctx, float *w, float *g) {
    const dsopt_tensor grad = {g, LARGE, DSOPT_DTYPE_F32, 0};
    const dsopt_param param = {.tensor = {w, LARGE, DSOPT_DTYPE_F32, 0}, .name = "w"};
    dsopt_optimizer *opt = make(ctx, NULL, DSOPT_COMPAT_NONE, DSOPT_ALGORITHM_ADAMW, &param);
    DSOPT_NEW(dsopt_step, step);
    step.grads = &grad;
    step.count = 1;
    const dsopt_status status = dsopt_optimizer_step(opt, &step);
    dsopt_optimizer_destroy(opt);
    return status;
}
static void idle_thread_pool(float *w, float *g) {
    dsopt_context *ctx = NULL;
    DSOPT_NEW(dsopt_context_desc, desc);
    desc.parallel_for = runs_nothing;
    desc.threads = 2;
    must(dsopt_context_create(&desc, &ctx));
    if (large_step(ctx, w, g) != DSOPT_ERR_HOOK) defect(5, "a pool that runs no work item is not detected");
    dsopt_context_destroy(ctx);
}

/* 6. In a forked child the first step of a new context hung if the parent had taken a step. */
static void after_fork(float *w, float *g) {
    dsopt_context *ctx = NULL;
    DSOPT_NEW(dsopt_context_desc, desc);
    desc.threads = 2;
    must(dsopt_context_create(&desc, &ctx));
    must(large_step(ctx, w, g));
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        dsopt_context *child_context = NULL;
        alarm(30);
        if (dsopt_context_create(&desc, &child_context) != DSOPT_OK || large_step(child_context, w, g) != DSOPT_OK)
            _exit(1);
        _exit(large_step(child_context, w, g) == DSOPT_OK ? 0 : 1);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
        defect(6, "a context that is created after fork() cannot step");
    dsopt_context_destroy(ctx);
}

int main(void) {
    dsopt_context *ctx = NULL;
    must(dsopt_context_create(NULL, &ctx));
    invalid_scales(ctx);
    initial_scaler_state(ctx);
    first_step(ctx);
    reductions(ctx);
    dsopt_context_destroy(ctx);
    float *w = calloc(LARGE, sizeof *w), *g = calloc(LARGE, sizeof *g);
    idle_thread_pool(w, g);
    after_fork(w, g);
    free(w);
    free(g);
    return defects != 0;
}
