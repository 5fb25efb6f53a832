// SPDX-License-Identifier: Apache-2.0
// What the demo prints: a progress bar for each row and the table at the end.
#ifndef DEMO_REPORT_H
#define DEMO_REPORT_H
#include <stddef.h>
#include <stdint.h>

struct result {
    const char *name;
    double first_loss, final_loss; // held-out, nats a character
    int64_t skipped;               // steps
    double bytes_sent;             // a rank and step; 0 without ranks
    double reduction;              // how many times more averaging fp32 gradients would send
    int64_t steps;
    double optimizer_seconds, total_seconds;
    double *curve_step, *curve_loss; // held-out loss after so many steps
    size_t curve_size;
};

struct progress {
    int64_t steps;
    double started, drawn; // seconds
    int64_t tenths;        // of the way that have been printed
    int terminal;
};

double now(void); // seconds since some fixed moment

void progress_start(struct progress *progress, const char *name, int64_t steps);
// Whether a line is wanted after `step`: on a terminal often enough to look alive, elsewhere every tenth of the way.
int progress_due(const struct progress *progress, int64_t step);
// `detail`: what matters in this row beside the losses; a dozen characters.
void progress_show(struct progress *progress, int64_t step, double train_loss, double held_out_loss,
                   const char *detail);

void print_loss_scale(double first, double last, int64_t skipped);

void print_table(const struct result *results, size_t count);

#endif
