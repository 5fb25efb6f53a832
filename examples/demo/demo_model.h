// SPDX-License-Identifier: Apache-2.0
// A character language model with one hidden layer, and hand-written forward and backward passes:
//
//     the last CONTEXT characters -> one embedding each, concatenated -> HIDDEN units, ReLU -> softmax over the
//     vocabulary
//
// All of it is single-threaded and adds in a fixed order, so equal arguments give equal bits. The caller may use
// several threads.
#ifndef DEMO_MODEL_H
#define DEMO_MODEL_H
#include <stddef.h>
#include <stdint.h>

enum { CONTEXT = 16, EMBED = 24, HIDDEN = 256, MAX_ROWS = 64 };

// Weights first, then biases: the optimizer has one group of each, and its lists have this order.
enum { EMBEDDING, HIDDEN_WEIGHT, OUTPUT_WEIGHT, HIDDEN_BIAS, OUTPUT_BIAS, TENSORS, WEIGHTS = HIDDEN_BIAS };

struct shape {
    const char *name;
    int32_t ndim;
    int64_t dims[2];
    int64_t numel;
};
void model_shapes(int vocabulary, struct shape shapes[TENSORS]);

// A set of tensors in the model's shapes: parameters or a gradient. The tensors are in one block of `size` floats,
// which begins at `all`.
struct tensors {
    int vocabulary;
    size_t size;
    float *all;
    float *tensor[TENSORS];
};
struct tensors *tensors_create(int vocabulary); // zeroed; NULL = out of memory
void tensors_destroy(struct tensors *tensors);

void model_init(struct tensors *parameters, uint64_t seed);

// Memory for the activations of MAX_ROWS rows. One per thread.
struct activations;
struct activations *activations_create(void); // NULL = out of memory
void activations_destroy(struct activations *activations);

// Row r predicts symbols[positions[r]] from the CONTEXT symbols before it; 1 to MAX_ROWS rows. Returns the sum of the
// rows' losses in nats.
double model_loss(const struct tensors *parameters, const uint8_t *symbols, const size_t *positions, int rows,
                  struct activations *a);
// Same as model_loss(), and adds `weight` times the gradient of the sum to `gradient`.
double model_gradient(const struct tensors *parameters, const uint8_t *symbols, const size_t *positions, int rows,
                      float weight, struct tensors *gradient, struct activations *a);
// Draws the symbol after `context`; a temperature below 1 makes likely symbols more likely.
int model_sample(const struct tensors *parameters, const uint8_t context[CONTEXT], double temperature, uint64_t *random,
                 struct activations *a);

// The random generator splitmix64, because rand() differs between C libraries.
uint64_t random_next(uint64_t *state);
double random_uniform(uint64_t *state); // in [0, 1)

#endif
