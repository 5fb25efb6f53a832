// SPDX-License-Identifier: Apache-2.0
#include "demo_model.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { INPUTS = CONTEXT * EMBED, MAX_VOCABULARY = 256 };

uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

double random_uniform(uint64_t *state) { return (double)(random_next(state) >> 11) * 0x1p-53; }

/* ----------------------------------------------------------------------------------------------- parameters */
void model_shapes(int vocabulary, struct shape shapes[TENSORS]) {
    const int64_t v = vocabulary;
    shapes[EMBEDDING] = (struct shape){"embedding", 2, {v, EMBED}, v * EMBED};
    shapes[HIDDEN_WEIGHT] = (struct shape){"hidden.weight", 2, {INPUTS, HIDDEN}, INPUTS * HIDDEN};
    shapes[OUTPUT_WEIGHT] = (struct shape){"output.weight", 2, {HIDDEN, v}, HIDDEN * v};
    shapes[HIDDEN_BIAS] = (struct shape){"hidden.bias", 1, {HIDDEN, 0}, HIDDEN};
    shapes[OUTPUT_BIAS] = (struct shape){"output.bias", 1, {v, 0}, v};
}

struct tensors *tensors_create(int vocabulary) {
    struct shape shapes[TENSORS];
    struct tensors *tensors = calloc(1, sizeof *tensors);
    if (!tensors) return NULL;
    model_shapes(vocabulary, shapes);
    tensors->vocabulary = vocabulary;
    for (int i = 0; i < TENSORS; ++i) tensors->size += (size_t)shapes[i].numel;
    tensors->all = calloc(tensors->size, sizeof *tensors->all);
    if (!tensors->all) {
        free(tensors);
        return NULL;
    }
    float *next = tensors->all;
    for (int i = 0; i < TENSORS; ++i) {
        tensors->tensor[i] = next;
        next += shapes[i].numel;
    }
    return tensors;
}

void tensors_destroy(struct tensors *tensors) {
    if (!tensors) return;
    free(tensors->all);
    free(tensors);
}

static void fill(float *data, int64_t numel, double deviation, uint64_t *random) {
    const double width = 2 * sqrt(3.0) * deviation; // of the uniform distribution with this standard deviation
    for (int64_t i = 0; i < numel; ++i) data[i] = (float)(width * (random_uniform(random) - 0.5));
}

void model_init(struct tensors *parameters, uint64_t seed) {
    struct shape shapes[TENSORS];
    model_shapes(parameters->vocabulary, shapes);
    memset(parameters->all, 0, parameters->size * sizeof *parameters->all);
    fill(parameters->tensor[EMBEDDING], shapes[EMBEDDING].numel, 1, &seed);
    fill(parameters->tensor[HIDDEN_WEIGHT], shapes[HIDDEN_WEIGHT].numel, sqrt(2.0 / INPUTS),
         &seed); // He et al. 2015, for ReLU
    // Small, so that training starts from an almost uniform guess.
    fill(parameters->tensor[OUTPUT_WEIGHT], shapes[OUTPUT_WEIGHT].numel, 0.1 / sqrt(HIDDEN), &seed);
}

/* ---------------------------------------------------------------------------------------------- matrix product */
// A matrix with strides; element (i, j) is at data[i * row + j * column]. A transposed view costs nothing.
struct view {
    const float *data;
    size_t row, column;
};

enum { TILE_ROWS = 4, TILE_COLUMNS = 16 };

// gcc compiles the function once per instruction set, and the program selects a version when it starts. All versions
// give the same bits, because with -std=c99 gcc does not contract a product and a sum to an fma. Not with the thread
// sanitizer: the selection runs before the sanitizer has started.
#if defined __GNUC__ && !defined __clang__ && defined __x86_64__ && defined __GLIBC__ && !defined __SANITIZE_THREAD__
#define FOR_EACH_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_ISA
#endif

// Computes out = 4 rows of A times a panel of 16 columns of B. The 64 sums stay in registers, which makes it fast.
FOR_EACH_ISA static void multiply_tile(size_t inner, const float *const a[TILE_ROWS], size_t stride,
                                       const float *restrict panel, float *restrict out) {
    float sum[TILE_ROWS][TILE_COLUMNS];
    const float *a0 = a[0], *a1 = a[1], *a2 = a[2], *a3 = a[3];
    memset(sum, 0, sizeof sum);
    for (size_t p = 0; p < inner; ++p) {
        const float x0 = a0[p * stride], x1 = a1[p * stride], x2 = a2[p * stride], x3 = a3[p * stride];
        for (int j = 0; j < TILE_COLUMNS; ++j) {
            const float y = panel[p * TILE_COLUMNS + (size_t)j];
            sum[0][j] += x0 * y;
            sum[1][j] += x1 * y;
            sum[2][j] += x2 * y;
            sum[3][j] += x3 * y;
        }
    }
    memcpy(out, sum, sizeof sum);
}

// Computes c += a b, with c row-major, rows x columns. Each panel of B is packed first: then the inner loop reads
// contiguous memory whatever the strides are, and columns past the edge are zeros instead of special cases.
static void multiply_add(float *restrict c, size_t rows, size_t columns, size_t inner, struct view a, struct view b) {
    float panel[(INPUTS > MAX_VOCABULARY ? INPUTS : MAX_VOCABULARY) * TILE_COLUMNS];
    float out[TILE_ROWS * TILE_COLUMNS];
    for (size_t j0 = 0; j0 < columns; j0 += TILE_COLUMNS) {
        const size_t width = columns - j0 < TILE_COLUMNS ? columns - j0 : TILE_COLUMNS;
        for (size_t p = 0; p < inner; ++p)
            for (size_t j = 0; j < TILE_COLUMNS; ++j)
                panel[p * TILE_COLUMNS + j] = j < width ? b.data[p * b.row + (j0 + j) * b.column] : 0;
        for (size_t i0 = 0; i0 < rows; i0 += TILE_ROWS) {
            const float *tile[TILE_ROWS]; // the last row is repeated past the edge; its sums are dropped
            for (size_t i = 0; i < TILE_ROWS; ++i) tile[i] = a.data + (i0 + i < rows ? i0 + i : rows - 1) * a.row;
            multiply_tile(inner, tile, a.column, panel, out);
            for (size_t i = 0; i < TILE_ROWS && i0 + i < rows; ++i)
                for (size_t j = 0; j < width; ++j) c[(i0 + i) * columns + j0 + j] += out[i * TILE_COLUMNS + j];
        }
    }
}

static void copy_bias(float *c, size_t rows, size_t columns, const float *bias) {
    for (size_t i = 0; i < rows; ++i) memcpy(c + i * columns, bias, columns * sizeof *c);
}

static void add_rows(float *restrict sum, size_t rows, size_t columns, const float *restrict c) {
    for (size_t i = 0; i < rows; ++i)
        for (size_t j = 0; j < columns; ++j) sum[j] += c[i * columns + j];
}

/* ------------------------------------------------------------------------------------------ forward and backward */
struct activations {
    float input[MAX_ROWS * INPUTS], hidden[MAX_ROWS * HIDDEN], output[MAX_ROWS * MAX_VOCABULARY];
    float d_input[MAX_ROWS * INPUTS], d_hidden[MAX_ROWS * HIDDEN];
};

struct activations *activations_create(void) {
    return malloc(sizeof(struct activations));
}
void activations_destroy(struct activations *activations) { free(activations); }

static void position_factors(float factors[CONTEXT]) {
    factors[CONTEXT - 1] = 1;
    for (int k = CONTEXT - 2; k >= 0; --k) factors[k] = 0.7f * factors[k + 1];
}

// Computes logits from the CONTEXT symbols before each position. `output` receives rows of `vocabulary` floats.
static void forward(const struct tensors *parameters, const uint8_t *symbols, const size_t *positions, int row_count,
                    struct activations *a) {
    const size_t rows = (size_t)row_count, vocabulary = (size_t)parameters->vocabulary;
    float factors[CONTEXT];
    position_factors(factors);
    for (size_t r = 0; r < rows; ++r)
        for (size_t k = 0; k < CONTEXT; ++k) {
            const float *embedding =
                parameters->tensor[EMBEDDING] + (size_t)symbols[positions[r] - CONTEXT + k] * EMBED;
            for (size_t j = 0; j < EMBED; ++j) a->input[r * INPUTS + k * EMBED + j] = factors[k] * embedding[j];
        }
    copy_bias(a->hidden, rows, HIDDEN, parameters->tensor[HIDDEN_BIAS]);
    multiply_add(a->hidden, rows, HIDDEN, INPUTS, (struct view){a->input, INPUTS, 1},
                 (struct view){parameters->tensor[HIDDEN_WEIGHT], HIDDEN, 1});
    for (size_t i = 0; i < rows * HIDDEN; ++i) a->hidden[i] = a->hidden[i] > 0 ? a->hidden[i] : 0;
    copy_bias(a->output, rows, vocabulary, parameters->tensor[OUTPUT_BIAS]);
    multiply_add(a->output, rows, vocabulary, HIDDEN, (struct view){a->hidden, HIDDEN, 1},
                 (struct view){parameters->tensor[OUTPUT_WEIGHT], vocabulary, 1});
}

// Converts logits to probabilities in place. Returns log(sum of exp(logit)); -log p of a symbol is the result minus its
// logit.
static double softmax(float *logits, int vocabulary) {
    float largest = logits[0];
    double sum = 0;
    for (int i = 1; i < vocabulary; ++i) largest = logits[i] > largest ? logits[i] : largest;
    for (int i = 0; i < vocabulary; ++i) {
        logits[i] = expf(logits[i] - largest);
        sum += (double)logits[i];
    }
    for (int i = 0; i < vocabulary; ++i) logits[i] = (float)((double)logits[i] / sum);
    return (double)largest + log(sum);
}

double model_loss(const struct tensors *parameters, const uint8_t *symbols, const size_t *positions, int rows,
                  struct activations *a) {
    double loss = 0;
    forward(parameters, symbols, positions, rows, a);
    for (int r = 0; r < rows; ++r) {
        float *row = a->output + (size_t)r * (size_t)parameters->vocabulary;
        const float logit = row[symbols[positions[r]]];
        loss += softmax(row, parameters->vocabulary) - (double)logit;
    }
    return loss;
}

double model_gradient(const struct tensors *parameters, const uint8_t *symbols, const size_t *positions, int row_count,
                      float weight, struct tensors *gradient, struct activations *a) {
    const double loss = model_loss(parameters, symbols, positions, row_count, a);
    const size_t rows = (size_t)row_count, vocabulary = (size_t)parameters->vocabulary;
    float factors[CONTEXT];
    position_factors(factors);

    // d loss / d logit = probability - (1 for the right symbol)
    for (size_t r = 0; r < rows; ++r) a->output[r * vocabulary + symbols[positions[r]]] -= 1;
    for (size_t i = 0; i < rows * vocabulary; ++i) a->output[i] *= weight;
    add_rows(gradient->tensor[OUTPUT_BIAS], rows, vocabulary, a->output);
    multiply_add(gradient->tensor[OUTPUT_WEIGHT], HIDDEN, vocabulary, rows, (struct view){a->hidden, 1, HIDDEN},
                 (struct view){a->output, vocabulary, 1});

    memset(a->d_hidden, 0, rows * HIDDEN * sizeof(float));
    multiply_add(a->d_hidden, rows, HIDDEN, vocabulary, (struct view){a->output, vocabulary, 1},
                 (struct view){parameters->tensor[OUTPUT_WEIGHT], 1, vocabulary});
    for (size_t i = 0; i < rows * HIDDEN; ++i) a->d_hidden[i] = a->hidden[i] > 0 ? a->d_hidden[i] : 0;
    add_rows(gradient->tensor[HIDDEN_BIAS], rows, HIDDEN, a->d_hidden);
    multiply_add(gradient->tensor[HIDDEN_WEIGHT], INPUTS, HIDDEN, rows, (struct view){a->input, 1, INPUTS},
                 (struct view){a->d_hidden, HIDDEN, 1});

    memset(a->d_input, 0, rows * INPUTS * sizeof(float));
    multiply_add(a->d_input, rows, INPUTS, HIDDEN, (struct view){a->d_hidden, HIDDEN, 1},
                 (struct view){parameters->tensor[HIDDEN_WEIGHT], 1, HIDDEN});
    for (size_t r = 0; r < rows; ++r)
        for (size_t k = 0; k < CONTEXT; ++k) {
            float *embedding = gradient->tensor[EMBEDDING] + (size_t)symbols[positions[r] - CONTEXT + k] * EMBED;
            for (size_t j = 0; j < EMBED; ++j) embedding[j] += factors[k] * a->d_input[r * INPUTS + k * EMBED + j];
        }
    return loss;
}

int model_sample(const struct tensors *parameters, const uint8_t context[CONTEXT], double temperature, uint64_t *random,
                 struct activations *a) {
    const size_t positions = CONTEXT;
    double left = random_uniform(random);
    forward(parameters, context, &positions, 1, a);
    for (int i = 0; i < parameters->vocabulary; ++i) a->output[i] /= (float)temperature;
    softmax(a->output, parameters->vocabulary);
    for (int i = 0; i < parameters->vocabulary - 1; ++i)
        if ((left -= (double)a->output[i]) < 0) return i;
    return parameters->vocabulary - 1;
}
