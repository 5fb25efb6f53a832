// SPDX-License-Identifier: Apache-2.0
// Draws curves with axes, ticks and a legend as one self-contained SVG file.
#ifndef DEMO_SVG_H
#define DEMO_SVG_H
#include <stddef.h>

struct curve {
    const char *name;
    const double *x, *y; // points with a non-finite y leave a gap
    size_t count;
    double amount; // shown in the legend
};

struct chart {
    const char *title, *subtitle, *x_label, *y_label;
    double reference; // a dashed horizontal line
    const char *reference_label;
    const char *amount_label, *last_label; // above the legend's columns: the amounts, and the last y of the curves
    const struct curve *curves;
    size_t count;
};

// Returns 0, or -1 with errno.
int svg_write(const char *path, const struct chart *chart);

#endif
