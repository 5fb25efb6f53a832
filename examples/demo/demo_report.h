// SPDX-License-Identifier: Apache-2.0
// Output of the demo: a progress bar per row, and the table at the end.
#ifndef DEMO_REPORT_H
#define DEMO_REPORT_H
#include <stddef.h>
#include <stdint.h>

struct result {
    const char *name;
    double first_loss, final_loss; // held-out, nats per character
    int64_t skipped;               // steps
    double state_bytes;            // of the optimizer, per parameter; with ranks, of the first rank
    double bytes;                  // weight, gradient and state_bytes
    double bytes_sent;             // per rank and step; 0 without ranks
    double reduction;              // bytes of averaging fp32 gradients / bytes_sent
    int64_t steps;
    double optimizer_seconds, total_seconds;
    double *curve_step, *curve_loss; // held-out loss after this number of steps
    size_t curve_size;
};

struct progress {
    int64_t steps;
    double started, drawn; // seconds
    int64_t tenths;        // printed tenths of the run
    int terminal;
};

double now(void); // seconds since a fixed moment

void progress_start(struct progress *progress, const char *name, int64_t steps);
// Returns true if a line should be printed after `step`: before the first step; then often on a terminal, elsewhere
// after each tenth of the run.
int progress_due(const struct progress *progress, int64_t step);
// `detail`: the row's most important value in addition to the losses; a dozen characters. Before the first step only
// the held-out loss is known and shown.
void progress_show(struct progress *progress, int64_t step, double train_loss, double held_out_loss,
                   const char *detail);

void print_loss_scale(double first, double last, int64_t skipped);

void print_table(const struct result *results, size_t count);

#endif
