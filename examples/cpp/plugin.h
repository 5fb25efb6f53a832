// SPDX-License-Identifier: Apache-2.0
// The plugin's only export, a C function. Fits w to target by gradient descent with AdamW. Returns 0 on success;
// otherwise the text of the failure is in `error`.
#pragma once
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
typedef int fit_function(float *w, const float *target, size_t count, int steps, char *error, size_t capacity);
__attribute__((visibility("default"))) fit_function fit;
#ifdef __cplusplus
}
#endif
