// SPDX-License-Identifier: Apache-2.0
// Newton-Schulz iterations on the CPU.
#pragma once
#include "device/matrix_plan.h"

namespace dsopt::cpu {

struct Products {};
const Products &choose_products();
/// One matrix of n x m, n <= m, row-major. `x` is normalised; newton_schulz() replaces it by the result.
struct NsMatrix {
    int64_t n, m;
    float *x;
    void *input, *a, *b;
};
void newton_schulz(const Products &products, const NsRecipe &recipe, const NsMatrix *matrices, int64_t count,
                   const Parallel &parallel);

} // namespace dsopt::cpu
