// SPDX-License-Identifier: Apache-2.0
// Trains a small character language model with dsopt, once per row of a table of optimizers, and compares the rows.
//
//     demo [--quick] [--out DIR] [FILE]
//
// Every row starts from the same random parameters and sees the same batches, so only the optimizers cause differences.
#include "demo_model.h"
#include "demo_pool.h"
#include "demo_report.h"
#include "demo_rows.h"
#include "demo_svg.h"
#include "demo_text.h"
#include "dsopt.h"
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// A global batch is partitioned into quarters. Their gradients are computed independently and added in a fixed order,
// so the result does not depend on the number of threads.
enum { QUARTERS = 4, QUARTER_BATCH = MAX_ROWS, BATCH = QUARTERS * QUARTER_BATCH };
enum { SEED = 1, SAMPLE = 200 };

// One of several ranks: a thread that steps on a quarter of the batch. The first rank uses the trainer's own weights.
struct rank {
    struct trainer *trainer;
    int index;
    struct tensors *weights;
    dsopt_tensor params[TENSORS], grads[TENSORS];
    dsopt_comm *comm;
    dsopt_optimizer *optimizer;
    pthread_t thread;
};

struct trainer {
    const struct text *text;
    const struct plan *plan;
    dsopt_context *context;
    struct tensors *parameters, *gradient[QUARTERS]; // the first gradient becomes the sum
    struct activations *activations[QUARTERS];
    struct pool *pool;
    int64_t step;          // current step of the pool
    double loss[QUARTERS]; // results of the pool
    dsopt_optimizer *optimizer;
    dsopt_tensor params[TENSORS], grads[TENSORS]; // tensors of the model's computation, always F32
    // With 16-bit weights the optimizer works on these tensors instead. The model simulates one that computes in 16
    // bits: its weights, and the gradients that it passes to the optimizer, are rounded.
    dsopt_tensor half_params[TENSORS], half_grads[TENSORS];
    uint16_t *half;       // memory of both lists; NULL: weights are F32
    dsopt_scaler *scaler; // NULL: no loss scaling
    const float *loss_scale;
    struct rank rank[QUARTERS];
    const struct row *row;
    int ranks; // 0: all quarters are one batch
    unsigned char id[64];
    size_t id_bytes;
};

static void check(dsopt_status status) {
    if (status == DSOPT_OK) return;
    fprintf(stderr, "demo: %s: %s\n", dsopt_status_name(status), dsopt_last_error());
    exit(1);
}

static void *check_memory(void *memory) {
    if (!memory) {
        fprintf(stderr, "demo: out of memory\n");
        exit(1);
    }
    return memory;
}

/* ---------------------------------------------------------------------------------------------------- setting up */
static dsopt_optimizer *create_optimizer(struct trainer *t, const struct row *row, const dsopt_tensor *weights,
                                         dsopt_comm *comm) {
    dsopt_optimizer *optimizer;
    struct shape shapes[TENSORS];
    dsopt_param params[TENSORS];
    dsopt_group group;

    model_shapes(t->text->vocabulary, shapes);
    memset(params, 0, sizeof params);
    for (int i = 0; i < TENSORS; ++i) {
        params[i].tensor = weights[i];
        params[i].name = shapes[i].name;
        params[i].dims = shapes[i].dims;
        params[i].ndim = shapes[i].ndim;
    }

    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.max_norm = 1.0;
    desc.scaler = t->scaler;
    desc.data = comm;
    desc.masters = row->masters;
    desc.seed = SEED; // of moments that are rounded at random
    if (comm) desc.flags = DSOPT_OPTIMIZER_AVERAGES;
    check(dsopt_optimizer_create(t->context, &desc, &optimizer));
    check(dsopt_group_init(&group, sizeof group, row->algorithm));
    if (comm) group.freeze_step = t->plan->freeze_step;
    if (row->algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
        group.freeze_step = t->plan->zero_one_freeze_step;
        group.var_interval_steps = t->plan->var_interval_steps;
        group.local_interval_steps = t->plan->local_interval_steps;
        group.max_local_interval = 4;
    }
    group.weight_decay = 0.01;
    group.exp_avg_format = row->exp_avg_format;
    group.exp_avg_sq_format = row->exp_avg_sq_format;
    check(dsopt_optimizer_add_group(optimizer, &group, NULL, 0));
    group.weight_decay = 0;                                            // a bias needs no decay
    group.exp_avg_format = group.exp_avg_sq_format = DSOPT_MOMENT_F32; // biases are too few to save bytes
    check(dsopt_optimizer_add_group(optimizer, &group, NULL, 0));
    for (int i = 0; i < TENSORS; ++i) params[i].group = i >= WEIGHTS;
    if (row->hidden_algorithm) {
        check(dsopt_group_init(&group, sizeof group, row->hidden_algorithm));
        group.weight_decay = 0.01;
        group.adjust = DSOPT_ADJUST_MATCH_RMS_ADAMW;
        check(dsopt_optimizer_add_group(optimizer, &group, NULL, 0));
        params[HIDDEN_WEIGHT].group = 2;
        params[HIDDEN_WEIGHT].flags = DSOPT_PARAM_ROWS_ARE_INPUTS; // of (inputs, outputs)
    }
    check(dsopt_optimizer_add_params(optimizer, params, TENSORS));
    return optimizer;
}

/* -------------------------------------------------------------------------------------------------------- ranks */
static void on_all_ranks(struct trainer *t, void *(*body)(void *rank)) {
    for (int q = 0; q < QUARTERS; ++q)
        if (pthread_create(&t->rank[q].thread, NULL, body, &t->rank[q])) {
            fprintf(stderr, "demo: no thread for rank %d\n", q);
            exit(1);
        }
    for (int q = 0; q < QUARTERS; ++q) pthread_join(t->rank[q].thread, NULL);
}

static void *join_comm(void *argument) {
    struct rank *r = argument;
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = DSOPT_COMM_KIND_LOCAL;
    desc.rank = r->index;
    desc.ranks = QUARTERS;
    desc.id = r->trainer->id;
    desc.id_bytes = r->trainer->id_bytes;
    check(dsopt_comm_create(r->trainer->context, &desc, &r->comm)); // returns when all ranks have joined
    r->optimizer = create_optimizer(r->trainer, r->trainer->row, r->params, r->comm);
    return NULL;
}

static void *rank_step(void *argument) {
    struct rank *r = argument;
    DSOPT_NEW(dsopt_step, args);
    args.grads = r->grads;
    args.count = TENSORS;
    args.flags = DSOPT_STEP_ZERO_GRADS;
    check(dsopt_optimizer_step(r->optimizer, &args));
    return NULL;
}

static void create_ranks(struct trainer *t) {
    t->ranks = QUARTERS;
    t->id_bytes = sizeof t->id;
    check(dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, t->id, &t->id_bytes));
    for (int q = 0; q < QUARTERS; ++q) {
        struct rank *r = &t->rank[q];
        r->trainer = t;
        r->index = q;
        r->weights = q == 0 ? t->parameters : check_memory(tensors_create(t->text->vocabulary));
        memcpy(r->weights->all, t->parameters->all, t->parameters->size * sizeof(float));
        for (int i = 0; i < TENSORS; ++i) {
            r->params[i] = (dsopt_tensor){r->weights->tensor[i], t->params[i].numel, DSOPT_DTYPE_F32, 0};
            r->grads[i] = (dsopt_tensor){t->gradient[q]->tensor[i], t->params[i].numel, DSOPT_DTYPE_F32, 0};
        }
    }
    on_all_ranks(t, join_comm);
    t->optimizer = t->rank[0].optimizer;
}

static void destroy_ranks(struct trainer *t) {
    for (int q = 0; q < t->ranks; ++q) {
        if (q > 0) dsopt_optimizer_destroy(t->rank[q].optimizer);
        if (q > 0) tensors_destroy(t->rank[q].weights);
        dsopt_comm_destroy(t->rank[q].comm);
    }
}

static void create_half(struct trainer *t, const struct row *row) {
    uint16_t *next = t->half = check_memory(calloc(2 * t->parameters->size, sizeof *t->half));
    for (int i = 0; i < TENSORS; next += t->params[i++].numel)
        t->half_params[i] = (dsopt_tensor){next, t->params[i].numel, row->dtype, 0};
    for (int i = 0; i < TENSORS; next += t->grads[i++].numel)
        t->half_grads[i] = (dsopt_tensor){next, t->grads[i].numel, row->dtype, 0};
    check(dsopt_tensors_axpby(t->context, NULL, t->params, 0, t->half_params, TENSORS, NULL));
}

static void create_scaler(struct trainer *t, const struct row *row) {
    DSOPT_NEW(dsopt_scaler_desc, desc);
    desc.init = row->loss_scale;
    desc.window = t->plan->scale_window;
    check(dsopt_scaler_create(t->context, &desc, &t->scaler));
    t->loss_scale = dsopt_scaler_device_scale(t->scaler); // readable by the host, because the backend is the CPU
}

static void trainer_create(struct trainer *t, const struct row *row, const struct text *text, const struct plan *plan,
                           struct pool *pool, dsopt_context *context) {
    static const float one = 1;
    struct shape shapes[TENSORS];
    memset(t, 0, sizeof *t);
    t->text = text;
    t->plan = plan;
    t->pool = pool;
    t->context = context;
    t->loss_scale = &one;
    t->parameters = check_memory(tensors_create(text->vocabulary));
    for (int q = 0; q < QUARTERS; ++q) {
        t->gradient[q] = check_memory(tensors_create(text->vocabulary));
        t->activations[q] = check_memory(activations_create());
    }
    model_init(t->parameters, SEED);
    model_shapes(text->vocabulary, shapes);
    for (int i = 0; i < TENSORS; ++i) {
        t->params[i] = (dsopt_tensor){t->parameters->tensor[i], shapes[i].numel, DSOPT_DTYPE_F32, 0};
        t->grads[i] = (dsopt_tensor){t->gradient[0]->tensor[i], shapes[i].numel, DSOPT_DTYPE_F32, 0};
    }
    t->row = row;
    if (row->dtype) create_half(t, row);
    if (row->loss_scale > 0) create_scaler(t, row);
    if (row->ranks)
        create_ranks(t);
    else
        t->optimizer = create_optimizer(t, row, t->half ? t->half_params : t->params, NULL);
}

static void trainer_destroy(struct trainer *t) {
    dsopt_optimizer_destroy(t->optimizer);
    destroy_ranks(t);
    dsopt_scaler_destroy(t->scaler);
    free(t->half);
    for (int q = 0; q < QUARTERS; ++q) {
        tensors_destroy(t->gradient[q]);
        activations_destroy(t->activations[q]);
    }
    tensors_destroy(t->parameters);
}

/* ------------------------------------------------------------------------------------------------------ training */
// Adds a quarter's contribution to the mean gradient over the global batch, times the loss scale, to gradient[q], and
// its contribution to the mean loss to loss[q]. With ranks, the gradient is the mean over the quarter.
static void quarter_gradient(void *trainer, int q) {
    struct trainer *t = trainer;
    uint64_t random = SEED + (uint64_t)t->step * QUARTERS + (uint64_t)q;
    size_t positions[QUARTER_BATCH];
    for (int i = 0; i < QUARTER_BATCH; ++i)
        positions[i] = CONTEXT + (size_t)(random_uniform(&random) * (double)(t->text->train_size - CONTEXT));
    const float share = *t->loss_scale / (t->ranks ? QUARTER_BATCH : BATCH);
    t->loss[q] += model_gradient(t->ranks ? t->rank[q].weights : t->parameters, t->text->symbols, positions,
                                 QUARTER_BATCH, share, t->gradient[q], t->activations[q]) /
                  BATCH;
}

// Runs `body` for every quarter. Returns the sum of the values added to `loss`.
static double run_quarters(struct trainer *t, void (*body)(void *trainer, int q)) {
    double sum = 0;
    memset(t->loss, 0, sizeof t->loss);
    pool_run(t->pool, QUARTERS, body, t);
    for (int q = 0; q < QUARTERS; ++q) sum += t->loss[q];
    return sum;
}

// Leaves the gradient of the global batch, times the loss scale, in gradient[0] and zeros in the others. Returns the
// mean loss.
static double batch_gradient(struct trainer *t, int64_t step) {
    t->step = step;
    const double loss = run_quarters(t, quarter_gradient);
    for (int q = 1; q < QUARTERS && !t->ranks; ++q) {
        float *restrict sum = t->gradient[0]->all, *restrict part = t->gradient[q]->all;
        for (size_t i = 0; i < t->parameters->size; ++i) {
            sum[i] += part[i];
            part[i] = 0;
        }
    }
    return loss;
}

static size_t held_out_count(const struct trainer *t) {
    const size_t size = t->text->size - t->text->train_size;
    return size < t->plan->held_out ? size : t->plan->held_out;
}

static void quarter_held_out(void *trainer, int q) {
    struct trainer *t = trainer;
    const size_t size = t->text->size - t->text->train_size, count = held_out_count(t);
    const size_t end = count * (size_t)(q + 1) / QUARTERS;
    for (size_t i = count * (size_t)q / QUARTERS; i < end;) {
        size_t positions[MAX_ROWS];
        int rows_used = 0;
        for (; rows_used < MAX_ROWS && i < end; ++i)
            positions[rows_used++] = t->text->train_size + (size_t)((double)i * (double)size / (double)count);
        t->loss[q] += model_loss(t->parameters, t->text->symbols, positions, rows_used, t->activations[q]);
    }
}

// Converts the optimizer's weights to fp32 for the model.
static void params_to_fp32(struct trainer *t) {
    if (t->half) check(dsopt_tensors_axpby(t->context, NULL, t->half_params, 0, t->params, TENSORS, NULL));
}

// Converts the model's gradients to 16 bits for the optimizer. Values too large for F16 become infinite, which is why
// steps are skipped. Values too small become zero, which is why gradients are scaled. BF16 has the range of F32.
static void grads_to_half(struct trainer *t) {
    if (!t->half) return;
    check(dsopt_tensors_axpby(t->context, NULL, t->grads, 0, t->half_grads, TENSORS, NULL));
    // The backward pass adds to the gradients.
    check(dsopt_zero_grad(t->context, t->grads, TENSORS, DSOPT_ZERO_FILL, NULL));
}

// Returns the mean loss over the last tenth of the text, or over evenly spaced characters of it.
static double held_out_loss(struct trainer *t) { return run_quarters(t, quarter_held_out) / (double)held_out_count(t); }

// Returns the learning rate: linear warm-up, then half a cosine down to a twentieth.
static double learning_rate(const struct plan *plan, double highest, int64_t step) {
    if (step < plan->warm_up) return highest * (double)(step + 1) / (double)plan->warm_up;
    const double done = (double)(step - plan->warm_up) / (double)(plan->steps - plan->warm_up);
    return highest * (0.05 + 0.95 * (0.5 + 0.5 * cos(3.14159265358979 * done)));
}

// Returns the step after which the held-out loss is measured; these steps are denser at the beginning, where the curve
// bends.
static int64_t point_step(const struct plan *plan, size_t point) {
    return (int64_t)ceil((double)plan->steps * pow((double)point / (double)plan->points, 2));
}

// Returns the bytes of the tensors that the optimizer works on. The fp32 tensors that simulate a model of 16 bits are
// not counted.
static double weight_and_gradient_bytes(const struct trainer *t) {
    const dsopt_tensor *params = t->half ? t->half_params : t->params, *grads = t->half ? t->half_grads : t->grads;
    double sum = 0;
    for (int i = 0; i < TENSORS; ++i) {
        sum += (double)params[i].numel * (params[i].dtype == DSOPT_DTYPE_F32 ? 4 : 2);
        sum += (double)grads[i].numel * (grads[i].dtype == DSOPT_DTYPE_F32 ? 4 : 2);
    }
    return sum;
}

static void train(struct trainer *t, const struct row *row, struct result *result) {
    const struct plan *plan = t->plan;
    struct progress progress;
    double smooth = 0, weight = 0;
    char detail[32];
    DSOPT_NEW(dsopt_report, report);

    result->name = row->name;
    result->steps = plan->steps;
    result->curve_step = check_memory(calloc((size_t)plan->points + 1, sizeof(double)));
    result->curve_loss = check_memory(calloc((size_t)plan->points + 1, sizeof(double)));
    progress_start(&progress, row->title, plan->steps);

    for (int64_t step = 0;; ++step) {
        params_to_fp32(t);
        if (step == point_step(plan, result->curve_size)) {
            result->curve_step[result->curve_size] = (double)step;
            result->curve_loss[result->curve_size++] = result->final_loss = held_out_loss(t);
        }
        if (progress_due(&progress, step)) {
            check(dsopt_optimizer_report(t->optimizer, &report)); // may wait, so called only if something is printed
            if (t->scaler)
                snprintf(detail, sizeof detail, "skipped %lld", (long long)report.skipped);
            else
                snprintf(detail, sizeof detail, "|g| %.2f", report.grad_norm);
            progress_show(&progress, step, step > 0 ? smooth / weight : 0, result->final_loss, detail);
        }
        if (step == plan->steps) break;

        const double loss = batch_gradient(t, step);
        smooth = 0.98 * smooth + loss;
        weight = 0.98 * weight + 1;
        grads_to_half(t); // not part of the optimizer's time: a model that computes in 16 bits has no such pass

        const double before = now();
        DSOPT_NEW(dsopt_step, args);
        args.grads = t->half ? t->half_grads : t->grads;
        args.count = TENSORS;
        args.flags = t->half ? 0 : DSOPT_STEP_ZERO_GRADS; // the backward pass adds to the gradients
        const double lr = learning_rate(plan, row->lr, step);
        for (int q = 1; q < t->ranks; ++q)
            check(dsopt_optimizer_set(t->rank[q].optimizer, DSOPT_ALL_GROUPS, DSOPT_KEY_LR, lr));
        check(dsopt_optimizer_set(t->optimizer, DSOPT_ALL_GROUPS, DSOPT_KEY_LR, lr));
        if (t->ranks)
            on_all_ranks(t, rank_step);
        else
            check(dsopt_optimizer_step(t->optimizer, &args));
        result->optimizer_seconds += now() - before;
    }
    result->total_seconds = now() - progress.started;
    result->first_loss = result->curve_loss[0];
    check(dsopt_optimizer_report(t->optimizer, &report));
    result->skipped = report.skipped;
    result->state_bytes = (double)report.state_bytes / (double)t->parameters->size;
    result->bytes = result->state_bytes + weight_and_gradient_bytes(t) / (double)t->parameters->size;
    if (t->scaler) print_loss_scale(row->loss_scale, report.loss_scale, report.skipped);
    if (t->ranks) {
        DSOPT_NEW(dsopt_comm_info, info);
        check(dsopt_comm_query(t->rank[0].comm, &info));
        result->bytes_sent = (double)info.bytes_sent / (double)plan->steps;
        // Bytes that a ring all-reduce of fp32 gradients sends.
        const double full = 2.0 * (QUARTERS - 1) / QUARTERS * 4.0 * (double)t->parameters->size;
        result->reduction = full / result->bytes_sent;
    }
}

/* ------------------------------------------------------------------------------------------------------- results */
static char *join(const char *folder, const char *name) {
    const size_t size = strlen(folder) + strlen(name) + 2;
    char *path = check_memory(malloc(size));
    snprintf(path, size, "%s/%s", folder, name);
    return path;
}

static void save(const struct trainer *t, const struct row *row, const char *folder) {
    char *path = join(folder, row->checkpoint);
    DSOPT_NEW(dsopt_io, io);
    io.flags = DSOPT_IO_PARAMS; // includes the model, so that training can continue from this file alone
    check(dsopt_optimizer_save(t->optimizer, path, &io));
    printf("checkpoint: %s\n", path);
    free(path);
}

// Prints a continuation of the text from where the held-out part begins.
static void print_sample(const struct trainer *t, const struct row *row) {
    uint8_t context[CONTEXT];
    uint64_t random = SEED;
    printf("\n%d characters by \"%s\", which continues where the held-out part begins:\n", SAMPLE, row->name);
    memcpy(context, t->text->symbols + t->text->train_size - CONTEXT, CONTEXT);
    for (int i = 0; i < SAMPLE; ++i) {
        const int symbol = model_sample(t->parameters, context, 0.7, &random, t->activations[0]);
        const int byte = t->text->byte_of[symbol];
        if (byte == '\n' || (byte >= 32 && byte < 127))
            putchar(byte);
        else
            printf("\\x%02x", (unsigned)byte); // any byte may occur, and some control a terminal
        memmove(context, context + 1, CONTEXT - 1);
        context[CONTEXT - 1] = (uint8_t)symbol;
    }
    putchar('\n');
}

static int write_curves(const struct result *results, const struct text *text, size_t parameters, const char *folder) {
    struct curve curves[ROWS];
    char subtitle[512], reference[64];
    char *path = join(folder, "loss.svg");
    for (size_t i = 0; i < ROWS; ++i)
        curves[i] = (struct curve){.name = rows[i].title,
                                   .x = results[i].curve_step,
                                   .y = results[i].curve_loss,
                                   .count = results[i].curve_size,
                                   .amount = results[i].bytes};
    snprintf(subtitle, sizeof subtitle, "%zu parameters, batches of %d, text of %zu bytes, the last tenth held out",
             parameters, BATCH, text->size);
    snprintf(reference, sizeof reference, "uniform guess, ln %d = %.3f", text->vocabulary, log(text->vocabulary));
    const struct chart chart = {
        .title = "Character language model: held-out loss",
        .subtitle = subtitle,
        .x_label = "step",
        .y_label = "held-out loss, nats per character",
        .reference = log(text->vocabulary),
        .reference_label = reference,
        .amount_label = "bytes per parameter: weight + gradient + optimizer state",
        .last_label = "final loss",
        .curves = curves,
        .count = ROWS,
    };
    const int status = svg_write(path, &chart);
    if (status)
        fprintf(stderr, "demo: cannot write %s: %s\n", path, strerror(errno));
    else
        printf("loss curves: %s\n", path);
    free(path);
    return status;
}

/* -------------------------------------------------------------------------------------------------- command line */
// Creates the folder before the training, so that a folder that cannot be written to costs no time.
static int make_folder(const char *folder) {
    char *path = join(folder, "");
    int status = 0;
    for (char *end = path + 1; !status && (end = strchr(end, '/')); ++end) {
        *end = 0;
        status = mkdir(path, 0777) && errno != EEXIST ? -1 : 0;
        *end = '/';
    }
    if (!status) status = access(path, W_OK | X_OK);
    if (status) fprintf(stderr, "demo: cannot write to folder %s: %s\n", folder, strerror(errno));
    free(path);
    return status;
}

int main(int argc, char **argv) {
    static const char usage[] = "usage: demo [--quick] [--out DIR] [FILE]\n"
                                "  --quick    a few steps only, to see that everything works\n"
                                "  --out DIR  where the results go; default demo-out\n"
                                "  FILE       the text to learn; default: the licence texts of a Debian system\n";
    const struct plan *plan = &full_plan;
    const char *folder = "demo-out", *file = NULL;
    for (int i = 1; i < argc; ++i) {
        if (!strcmp(argv[i], "--quick"))
            plan = &quick_plan;
        else if (!strcmp(argv[i], "--out") && i + 1 < argc && *argv[i + 1])
            folder = argv[++i];
        else if (!strcmp(argv[i], "--help"))
            return fputs(usage, stdout) < 0;
        else if (argv[i][0] != '-' && !file)
            file = argv[i];
        else {
            fputs(usage, stderr);
            return 2;
        }
    }

    struct text text;
    struct result results[ROWS];
    size_t parameters = 0;
    int failed = 0;
    memset(results, 0, sizeof results);
    if (text_load(&text, file)) return 2;
    if (make_folder(folder)) {
        text_free(&text);
        return 2;
    }
    printf("text: %s, %zu bytes, the last %zu held out\n", text.source, text.size, text.size - text.train_size);
    printf("a uniform guess over %d different bytes costs ln %d = %.3f nats per character\n\n", text.vocabulary,
           text.vocabulary, log(text.vocabulary));

    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    const int threads = cores < QUARTERS ? (int)cores : QUARTERS;
    struct pool *pool = check_memory(pool_create(threads));

    for (size_t i = 0; i < ROWS; ++i) {
        struct trainer trainer;
        // Updating so few parameters takes less time than waking a second thread, except for Muon's matrix products.
        dsopt_context *context;
        DSOPT_NEW(dsopt_context_desc, desc);
        desc.threads = rows[i].hidden_algorithm == DSOPT_ALGORITHM_MUON ? threads : 1;
        check(dsopt_context_create(&desc, &context));
        trainer_create(&trainer, &rows[i], &text, plan, pool, context);
        parameters = trainer.parameters->size;
        train(&trainer, &rows[i], &results[i]);
        if (!isfinite(results[i].final_loss)) {
            // The other rows are still useful; a checkpoint of this row is not.
            fprintf(stderr, "demo: %s: the held-out loss is not finite at the end\n", rows[i].name);
            failed = 1;
        } else {
            save(&trainer, &rows[i], folder);
            if (i == 0) print_sample(&trainer, &rows[i]);
        }
        putchar('\n');
        trainer_destroy(&trainer);
        dsopt_context_destroy(context);
    }
    print_table(results, ROWS);
    if (write_curves(results, &text, parameters, folder)) failed = 1;

    for (size_t i = 0; i < ROWS; ++i) {
        free(results[i].curve_step);
        free(results[i].curve_loss);
    }
    pool_destroy(pool);
    text_free(&text);
    return failed;
}
