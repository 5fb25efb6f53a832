// SPDX-License-Identifier: Apache-2.0
// The optimizers that the demo compares, one per row of its table, and the lengths of their training runs.
#ifndef DEMO_ROWS_H
#define DEMO_ROWS_H
#include "dsopt.h"

struct row {
    const char *name;  // short, for the table
    const char *title; // long form
    int32_t algorithm;
    int32_t hidden_algorithm; // of the hidden layer's weights; 0: that of the other weights
    double lr;                // the maximum
    // Of weights and gradients. 0: they are F32. Else they have 16 bits, and the optimizer keeps masters.
    int32_t dtype;
    double loss_scale;                         // initial; 0: no loss scaling
    int32_t masters;                           // enum dsopt_masters
    int32_t exp_avg_format, exp_avg_sq_format; // enum dsopt_moment, of weights; the moments of biases are F32
    // If not 0: one rank per quarter of the batch, each with separate weights, connected by a comm.
    int ranks;
    const char *checkpoint; // file name
};
static const struct row rows[] = {
    {.name = "fp32 AdamW",
     .title = "fp32 AdamW",
     .algorithm = DSOPT_ALGORITHM_ADAMW,
     .lr = 3e-3,
     .checkpoint = "adamw.safetensors"},
    // Muon is for matrices of layers. Its updates are as large as those of AdamW, so one learning rate is for both.
    {.name = "Muon and AdamW",
     .title = "Muon for the hidden layer's weights, AdamW for the others",
     .algorithm = DSOPT_ALGORITHM_ADAMW,
     .hidden_algorithm = DSOPT_ALGORITHM_MUON,
     .lr = 3e-3,
     .checkpoint = "muon.safetensors"},
    // The scale is so large that the first steps overflow: the scaler must find the right one.
    {.name = "fp16 AdamW",
     .title = "fp16 AdamW: fp16 weights, f32 masters, dynamic loss scaling",
     .algorithm = DSOPT_ALGORITHM_ADAMW,
     .lr = 3e-3,
     .dtype = DSOPT_DTYPE_F16,
     .loss_scale = 0x1p24,
     .checkpoint = "fp16.safetensors"},
    {.name = "bf16 AdamW, E4M3",
     .title = "bf16 AdamW: E4M3 and bf16 moments, masters of 16 more bits",
     .algorithm = DSOPT_ALGORITHM_ADAMW,
     .lr = 3e-3,
     .dtype = DSOPT_DTYPE_BF16,
     .masters = DSOPT_MASTERS_REMAINDER,
     .exp_avg_format = DSOPT_MOMENT_E4M3,
     .exp_avg_sq_format = DSOPT_MOMENT_BF16_RANDOM,
     .checkpoint = "low_precision.safetensors"},
    // The first updates of the next two rows are larger, because they have no bias correction: the learning rate is
    // smaller.
    {.name = "1-bit Adam, 4 ranks",
     .title = "1-bit Adam on 4 ranks",
     .algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM,
     .lr = 1.5e-3,
     .ranks = 1,
     .checkpoint = "onebit_adam.safetensors"},
    {.name = "0/1 Adam, 4 ranks",
     .title = "0/1 Adam on 4 ranks",
     .algorithm = DSOPT_ALGORITHM_ZERO_ONE_ADAM,
     .lr = 1.5e-3,
     .ranks = 1,
     .checkpoint = "zero_one_adam.safetensors"},
};
enum { ROWS = sizeof rows / sizeof rows[0] };

struct plan {
    int64_t steps, warm_up, points; // points: of the held-out curve, in addition to the one before the first step
    // Maximum number of characters; if there are more, evenly spaced ones are used.
    size_t held_out;
    int32_t scale_window; // good steps until the loss scale is doubled
    int64_t freeze_step;  // 1-bit Adam: the variance is updated until this step
    int64_t zero_one_freeze_step;
    int64_t var_interval_steps;   // 0/1 Adam: number of updates of the variance until they become half as frequent
    int64_t local_interval_steps; // 0/1 Adam: then ranks exchange in ever fewer steps, down to every fourth
};
// A training of days uses a window of 1000 good steps, with which the loss scale would hardly change in this short run.
static const struct plan full_plan = {.steps = 800,
                                      .warm_up = 50,
                                      .points = 20,
                                      .held_out = 8192,
                                      .scale_window = 64,
                                      .freeze_step = 180,
                                      .zero_one_freeze_step = 350,
                                      .var_interval_steps = 40,
                                      .local_interval_steps = 150};
static const struct plan quick_plan = {.steps = 40,
                                       .warm_up = 4,
                                       .points = 5,
                                       .held_out = 1024,
                                       .scale_window = 10,
                                       .freeze_step = 10,
                                       .zero_one_freeze_step = 16,
                                       .var_interval_steps = 8,
                                       .local_interval_steps = 10};

#endif
