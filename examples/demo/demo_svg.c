// SPDX-License-Identifier: Apache-2.0
#include "demo_svg.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>

enum { WIDTH = 860, HEIGHT = 520, LEFT = 76, RIGHT = 32, TOP = 84, BOTTOM = 64, LEGEND_LINE = 22 };

// Distinguishable for color-blind readers too (Okabe and Ito). The dashes keep overlapping curves apart.
static const struct {
    const char *colour, *dashes;
} styles[] = {{"#0072b2", "none"},     {"#d55e00", "9 4"}, {"#009e73", "3 3"},
              {"#aa4499", "10 3 2 3"}, {"#7a6a00", "6 2"}, {"#56b4e9", "14 4"}};
enum { STYLES = sizeof styles / sizeof styles[0] };

struct axis {
    double low, high, tick;
    int decimals;
};

// Returns an axis with about `wanted` ticks of 1, 2 or 5 times a power of ten; it begins and ends on a tick.
static struct axis make_axis(double low, double high, int wanted) {
    struct axis axis;
    if (!(high - low > 1e-9)) high = low + 1;
    const double raw = (high - low) / wanted, power = pow(10, floor(log10(raw))), mantissa = raw / power;
    axis.tick = power * (mantissa < 1.5 ? 1 : mantissa < 3.5 ? 2 : mantissa < 7.5 ? 5 : 10);
    axis.low = floor(low / axis.tick + 1e-9) * axis.tick;
    axis.high = ceil(high / axis.tick - 1e-9) * axis.tick;
    axis.decimals = axis.tick >= 1 ? 0 : (int)ceil(-log10(axis.tick) - 1e-9);
    return axis;
}

static int tick_count(const struct axis *axis) { return (int)lround((axis->high - axis->low) / axis->tick); }
static double tick_value(const struct axis *axis, int i) { return axis->low + i * axis->tick; }

static double pixel_x(const struct axis *axis, double x) {
    return LEFT + (WIDTH - LEFT - RIGHT) * (x - axis->low) / (axis->high - axis->low);
}
static double pixel_y(const struct axis *axis, double y) {
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - axis->low) / (axis->high - axis->low);
}

static void put_text(FILE *out, double x, double y, const char *attributes, const char *text) {
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes);
    for (; *text; ++text) switch (*text) {
        case '&': fputs("&amp;", out); break;
        case '<': fputs("&lt;", out); break;
        case '>': fputs("&gt;", out); break;
        default: fputc((unsigned char)*text < 32 ? ' ' : *text, out);
        }
    fputs("</text>\n", out);
}

static void put_axes(FILE *out, const struct chart *chart, const struct axis *x, const struct axis *y) {
    char label[64];
    const double bottom = HEIGHT - BOTTOM, right = WIDTH - RIGHT;
    for (int i = 0; i <= tick_count(y); ++i) {
        const double pixel = pixel_y(y, tick_value(y, i));
        fprintf(out, "<path d=\"M%d %.1fH%.1f\" stroke=\"#e3e6ea\"/>\n", LEFT, pixel, right);
        snprintf(label, sizeof label, "%.*f", y->decimals, tick_value(y, i));
        put_text(out, LEFT - 10, pixel + 4, "text-anchor=\"end\"", label);
    }
    for (int i = 0; i <= tick_count(x); ++i) {
        const double pixel = pixel_x(x, tick_value(x, i));
        fprintf(out, "<path d=\"M%.1f %.1fv6\" stroke=\"#5b6570\"/>\n", pixel, bottom);
        snprintf(label, sizeof label, "%.*f", x->decimals, tick_value(x, i));
        put_text(out, pixel, bottom + 22, "text-anchor=\"middle\"", label);
    }
    fprintf(out, "<path d=\"M%d %dV%.1fH%.1f\" fill=\"none\" stroke=\"#5b6570\"/>\n", LEFT, TOP, bottom, right);
    put_text(out, (LEFT + right) / 2, HEIGHT - 16, "text-anchor=\"middle\"", chart->x_label);
    put_text(out, 0, 0, "text-anchor=\"middle\" transform=\"translate(24 276) rotate(-90)\"", chart->y_label);
}

static void put_curve(FILE *out, const struct curve *curve, size_t style, const struct axis *x, const struct axis *y) {
    int pen_down = 0;
    fputs("<path d=\"", out);
    for (size_t i = 0; i < curve->count; ++i) {
        if (isfinite(curve->y[i]))
            fprintf(out, "%c%.1f %.1f", pen_down ? 'L' : 'M', pixel_x(x, curve->x[i]), pixel_y(y, curve->y[i]));
        pen_down = isfinite(curve->y[i]);
    }
    fprintf(out,
            "\" fill=\"none\" stroke=\"%s\" stroke-dasharray=\"%s\" stroke-width=\"2.2\" stroke-linejoin=\"round\"/>\n",
            styles[style].colour, styles[style].dashes);
    if (pen_down)
        fprintf(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" fill=\"%s\"/>\n",
                pixel_x(x, curve->x[curve->count - 1]), pixel_y(y, curve->y[curve->count - 1]), styles[style].colour);
}

static void put_legend(FILE *out, const struct chart *chart, double top) {
    char text[160];
    size_t longest = 0;
    for (size_t i = 0; i < chart->count; ++i) {
        size_t length = 0;
        while (chart->curves[i].name[length]) ++length;
        longest = length > longest ? length : longest;
    }
    const double right = WIDTH - RIGHT - 8, amounts = right - 84, left = amounts - 92 - 7.2 * (double)longest;
    fprintf(out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%zu\" fill=\"#ffffff\" fill-opacity=\"0.85\"/>\n",
            left - 8, top - 14, right + 7 - left + 8, (chart->count + 1) * LEGEND_LINE + 6);
    put_text(out, amounts, top + 4.5, "text-anchor=\"end\" fill=\"#5b6570\"", chart->amount_label);
    put_text(out, right, top + 4.5, "text-anchor=\"end\" fill=\"#5b6570\"", chart->last_label);
    for (size_t i = 0; i < chart->count; ++i) {
        const struct curve *curve = &chart->curves[i];
        const double y = top + (double)(i + 1) * LEGEND_LINE;
        fprintf(out, "<path d=\"M%.1f %.1fh30\" stroke=\"%s\" stroke-dasharray=\"%s\" stroke-width=\"2.2\"/>\n", left,
                y, styles[i % STYLES].colour, styles[i % STYLES].dashes);
        put_text(out, left + 40, y + 4.5, "", curve->name);
        snprintf(text, sizeof text, "%.1f", curve->amount);
        put_text(out, amounts, y + 4.5, "text-anchor=\"end\" font-weight=\"600\"", text);
        snprintf(text, sizeof text, "%.3f", curve->count ? curve->y[curve->count - 1] : NAN);
        put_text(out, right, y + 4.5, "text-anchor=\"end\" font-weight=\"600\"", text);
    }
}

int svg_write(const char *path, const struct chart *chart) {
    double last = 1, low = chart->reference, high = chart->reference;
    for (size_t c = 0; c < chart->count; ++c)
        for (size_t i = 0; i < chart->curves[c].count; ++i) {
            const double y = chart->curves[c].y[i];
            if (chart->curves[c].x[i] > last) last = chart->curves[c].x[i];
            if (isfinite(y) && y < low) low = y;
            if (isfinite(y) && y > high) high = y;
        }
    const struct axis x = make_axis(0, last, 8), y = make_axis(low, high, 7);
    // Loss curves usually fall from the reference at the top, so the corner below it on the right is free; but a curve
    // may also rise.
    const double line = pixel_y(&y, chart->reference);
    const int below = line < (double)(TOP + HEIGHT - BOTTOM) / 2;

    FILE *out = fopen(path, "w");
    if (!out) return -1;
    fprintf(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
        "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif\" font-size=\"13\" fill=\"#30363d\">\n"
        "<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n",
        WIDTH, HEIGHT, WIDTH, HEIGHT, WIDTH, HEIGHT);
    put_text(out, LEFT, 34, "font-size=\"20\" font-weight=\"600\" fill=\"#1b1f24\"", chart->title);
    put_text(out, LEFT, 58, "fill=\"#5b6570\"", chart->subtitle);
    put_axes(out, chart, &x, &y);
    fprintf(out, "<path d=\"M%d %.1fH%d\" stroke=\"#8a939d\" stroke-dasharray=\"2 4\" stroke-width=\"1.5\"/>\n", LEFT,
            line, WIDTH - RIGHT);
    put_text(out, WIDTH - RIGHT - 8, below ? line + 18 : line - 8, "text-anchor=\"end\" fill=\"#5b6570\"",
             chart->reference_label);
    for (size_t i = 0; i < chart->count; ++i) put_curve(out, &chart->curves[i], i % STYLES, &x, &y);
    put_legend(out, chart, below ? line + 48 : TOP + 24);
    fputs("</svg>\n", out);
    const int failed = ferror(out), error = errno;
    if (fclose(out)) return -1;
    errno = error;
    return failed ? -1 : 0;
}
