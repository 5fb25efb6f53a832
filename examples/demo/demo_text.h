// SPDX-License-Identifier: Apache-2.0
// Text for training the demo: one file, or the licence texts of a Debian system.
#ifndef DEMO_TEXT_H
#define DEMO_TEXT_H
#include <stddef.h>
#include <stdint.h>

struct text {
    uint8_t *symbols;     // every byte as its index in the vocabulary
    size_t size;          // at least 2000
    size_t train_size;    // the first nine tenths; the model never learns from the rest
    int vocabulary;       // number of different bytes in the text
    uint8_t byte_of[256]; // symbol -> byte
    char source[256];     // description of the source, for output
};

// Reads `path`, or the licence texts if `path` is NULL. Returns 0, or -1 after printing the reason on stderr.
int text_load(struct text *text, const char *path);
void text_free(struct text *text);

#endif
