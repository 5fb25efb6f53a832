// SPDX-License-Identifier: Apache-2.0
#include "demo_report.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BAR = 14 };

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

void progress_start(struct progress *progress, const char *name, int64_t steps) {
    *progress = (struct progress){.steps = steps, .started = now(), .terminal = isatty(STDOUT_FILENO)};
    printf("%s\n", name);
    fflush(stdout);
}

int progress_due(const struct progress *progress, int64_t step) {
    if (step == 0) return 1;
    if (progress->terminal) return step == progress->steps || now() - progress->drawn > 0.1;
    return step * 10 / progress->steps > progress->tenths;
}

void progress_show(struct progress *progress, int64_t step, double train_loss, double held_out_loss,
                   const char *detail) {
    char bar[BAR + 1], line[160];
    const int full = (int)(step * BAR / progress->steps);
    const double elapsed = now() - progress->started;
    memset(bar, '.', BAR);
    memset(bar, '#', (size_t)full);
    bar[BAR] = 0;
    const int used =
        snprintf(line, sizeof line, "[%s] %*lld/%lld", bar, snprintf(NULL, 0, "%lld", (long long)progress->steps),
                 (long long)step, (long long)progress->steps);
    if (step == 0)
        snprintf(line + used, sizeof line - (size_t)used, "  held-out %.3f", held_out_loss);
    else
        snprintf(line + used, sizeof line - (size_t)used, "  train %.3f  held-out %.3f  %s  ETA %.0f s", train_loss,
                 held_out_loss, detail, elapsed / (double)step * (double)(progress->steps - step));
    // The line is padded to overwrite a longer previous line. It is below 80 columns, because a wrapped line could not
    // be redrawn.
    if (progress->terminal)
        printf("\r%-79.79s%s", line, step == progress->steps ? "\n" : "");
    else
        printf("%s\n", line);
    fflush(stdout);
    progress->drawn = now();
    progress->tenths = step * 10 / progress->steps;
}

void print_loss_scale(double first, double last, int64_t skipped) {
    printf("loss scale: 2^%g at first, 2^%g at the end; steps skipped for overflow: %lld\n", log2(first), log2(last),
           (long long)skipped);
}

void print_table(const struct result *results, size_t count) {
    int width = (int)strlen("row");
    for (size_t i = 0; i < count; ++i)
        if ((int)strlen(results[i].name) > width) width = (int)strlen(results[i].name);
    printf("%-*s  held-out loss   steps   bytes/param  bytes sent  times        optimizer   total\n", width, "");
    printf("%-*s  first  final  skipped  state  total    per step   less  ms/step   share  time s\n", width, "row");
    for (int i = 0; i < width + 81; ++i) putchar('-');
    putchar('\n');
    for (size_t i = 0; i < count; ++i) {
        const struct result *r = &results[i];
        char less[16] = "-";
        if (r->bytes_sent > 0) snprintf(less, sizeof less, "%.1f", r->reduction);
        printf("%-*s  %5.3f  %5.3f  %7lld  %5.2f  %5.2f  %10.0f  %5s  %7.3f  %4.1f %%  %6.1f\n", width, r->name,
               r->first_loss, r->final_loss, (long long)r->skipped, r->state_bytes, r->bytes, r->bytes_sent, less,
               1e3 * r->optimizer_seconds / (double)r->steps, 100 * r->optimizer_seconds / r->total_seconds,
               r->total_seconds);
    }
    puts("bytes/param: state of the optimizer; total: with weight and gradient. bytes sent: by each rank");
}
