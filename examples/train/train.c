// SPDX-License-Identifier: Apache-2.0
// A common form of training program: one flat array of parameters, one of gradients, a loop. A small network learns to
// spell: it predicts the fourth letter from three letters. The lines between `dsopt {` and `dsopt }` add the optimizer:
// AdamW with decay for matrices alone, clipping, a learning rate per step, a checkpoint. They replace a loop with
// `params[i] -= lr * grads[i]`.
#include <math.h>
// dsopt {
#include <dsopt.h>
// dsopt }
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 27, CONTEXT = 3, EMBED = 8, INPUT = CONTEXT * EMBED, HIDDEN = 48, BATCH = 32 };

static const char text[] =
    "the quick brown fox jumps over the lazy dog and the five boxing wizards jump quickly while we pack my box with a "
    "dozen jugs of liquid veneer and sphinx of black quartz judge my vow ";

/* ------------------------------------------------------------------------------------------------------------ model */
enum { EMBEDDING, W1, B1, W2, B2, TENSORS };
static const struct {
    const char *name;
    int rows, columns; // 0 rows for a bias
} shapes[TENSORS] = {
    {"embedding", VOCAB, EMBED}, {"w1", HIDDEN, INPUT}, {"b1", 0, HIDDEN}, {"w2", VOCAB, HIDDEN}, {"b2", 0, VOCAB}};

typedef struct model {
    int sizes[TENSORS];
    int parameters;
    float *params, *grads;                                  // flat
    float *param_of[TENSORS], *grad_of[TENSORS];            // pointers into `params` and `grads`
    float input[INPUT], hidden[HIDDEN], probability[VOCAB]; // of one example
} model;

static float uniform(unsigned *state) { // in [-0.5, 0.5)
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / 16777216.0f - 0.5f;
}

static void model_init(model *m) {
    unsigned seed = 42;
    m->parameters = 0;
    for (int t = 0; t < TENSORS; ++t) {
        m->sizes[t] = (shapes[t].rows != 0 ? shapes[t].rows : 1) * shapes[t].columns;
        m->parameters += m->sizes[t];
    }
    m->params = calloc((size_t)m->parameters, sizeof(float));
    m->grads = calloc((size_t)m->parameters, sizeof(float));
    if (m->params == NULL || m->grads == NULL) exit(1);
    for (int t = 0, offset = 0; t < TENSORS; offset += m->sizes[t++]) {
        m->param_of[t] = m->params + offset;
        m->grad_of[t] = m->grads + offset;
        for (int i = 0; i < m->sizes[t] && shapes[t].rows != 0; ++i) {
            m->param_of[t][i] = 2 * uniform(&seed) / sqrtf((float)shapes[t].columns);
        }
    }
}

static int letter(char c) { return c == ' ' ? 26 : c - 'a'; }

// Returns the loss of predicting the fourth of these letters from the first three.
static float forward(model *m, const char *letters) {
    for (int c = 0; c < CONTEXT; ++c) {
        memcpy(m->input + c * EMBED, m->param_of[EMBEDDING] + letter(letters[c]) * EMBED, EMBED * sizeof(float));
    }
    for (int h = 0; h < HIDDEN; ++h) {
        float sum = m->param_of[B1][h];
        for (int i = 0; i < INPUT; ++i) sum += m->param_of[W1][h * INPUT + i] * m->input[i];
        m->hidden[h] = tanhf(sum);
    }
    float largest = -INFINITY, total = 0;
    for (int v = 0; v < VOCAB; ++v) {
        float sum = m->param_of[B2][v];
        for (int h = 0; h < HIDDEN; ++h) sum += m->param_of[W2][v * HIDDEN + h] * m->hidden[h];
        m->probability[v] = sum;
        if (sum > largest) largest = sum;
    }
    for (int v = 0; v < VOCAB; ++v) total += m->probability[v] = expf(m->probability[v] - largest);
    for (int v = 0; v < VOCAB; ++v) m->probability[v] /= total;
    return -logf(m->probability[letter(letters[CONTEXT])]);
}

// Adds the gradients of the example of the last call of `forward`.
static void backward(model *m, const char *letters) {
    float d_hidden[HIDDEN] = {0}, d_input[INPUT] = {0};
    for (int v = 0; v < VOCAB; ++v) {
        const float d = (m->probability[v] - (v == letter(letters[CONTEXT]) ? 1.0f : 0.0f)) / BATCH;
        m->grad_of[B2][v] += d;
        for (int h = 0; h < HIDDEN; ++h) {
            m->grad_of[W2][v * HIDDEN + h] += d * m->hidden[h];
            d_hidden[h] += d * m->param_of[W2][v * HIDDEN + h];
        }
    }
    for (int h = 0; h < HIDDEN; ++h) {
        const float d = d_hidden[h] * (1 - m->hidden[h] * m->hidden[h]);
        m->grad_of[B1][h] += d;
        for (int i = 0; i < INPUT; ++i) {
            m->grad_of[W1][h * INPUT + i] += d * m->input[i];
            d_input[i] += d * m->param_of[W1][h * INPUT + i];
        }
    }
    for (int i = 0; i < INPUT; ++i) m->grad_of[EMBEDDING][letter(letters[i / EMBED]) * EMBED + i % EMBED] += d_input[i];
}

/* --------------------------------------------------------------------------------------------------------- training */
// dsopt {
static void check(dsopt_status status) {
    if (status != DSOPT_OK) fprintf(stderr, "%s\n", dsopt_last_error()), exit(1);
}
// dsopt }

int main(int argc, char **argv) {
    static model m;
    const int steps = argc > 1 ? atoi(argv[1]) : 600;
    const int examples = (int)sizeof text - 1 - CONTEXT;
    model_init(&m);
    // dsopt {
    dsopt_context *ctx;
    dsopt_optimizer *opt;
    dsopt_group matrices, biases;
    dsopt_tensor grads[TENSORS];
    const dsopt_optimizer_desc desc = {.size = sizeof desc, .max_norm = 1};
    const dsopt_step arguments = {.size = sizeof arguments, .grads = grads, .count = TENSORS};
    check(dsopt_context_create(NULL, &ctx));
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    check(dsopt_group_init(&matrices, sizeof matrices, DSOPT_ALGORITHM_ADAMW));
    biases = matrices;
    biases.weight_decay = 0; // 0.01 for matrices
    for (int t = 0; t < TENSORS; ++t) {
        const dsopt_param param = {{m.param_of[t], m.sizes[t], DSOPT_DTYPE_F32, 0}, .name = shapes[t].name};
        grads[t] = (dsopt_tensor){m.grad_of[t], m.sizes[t], DSOPT_DTYPE_F32, 0};
        check(dsopt_optimizer_add_group(opt, shapes[t].rows ? &matrices : &biases, &param, 1));
    }
    // dsopt }
    for (int step = 0; step < steps; ++step) {
        const double lr = 0.01 * (step < 20 ? (step + 1) / 20.0 : 0.5 + 0.5 * cos(3.141592653589793 * step / steps));
        float loss = 0;
        memset(m.grads, 0, (size_t)m.parameters * sizeof(float));
        for (int b = 0; b < BATCH; ++b) {
            const char *letters = text + (step * BATCH + b) * 7 % examples;
            loss += forward(&m, letters) / BATCH;
            backward(&m, letters);
        }
        // dsopt {
        check(dsopt_optimizer_set(opt, DSOPT_ALL_GROUPS, DSOPT_KEY_LR, lr));
        check(dsopt_optimizer_step(opt, &arguments));
        // dsopt }
        if (step % 100 == 0 || step == steps - 1) printf("step %3d  rate %.4f  loss %.3f\n", step, lr, (double)loss);
    }
    // dsopt {
    check(dsopt_optimizer_save(opt, "train.safetensors", NULL));
    dsopt_optimizer_destroy(opt), dsopt_context_destroy(ctx);
    // dsopt }
    free(m.params);
    free(m.grads);
    return 0;
}
