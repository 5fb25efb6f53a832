// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/parallel.h"
#include "cpu/gemm_kernels.h"
#include "cpu/isa.h"

namespace dsopt::cpu {

/// Returns the kernels for an instruction set that the processor has. A kernel whose verify() fails is replaced by the
/// kernel of the preceding instruction set.
const Products &products_of(Isa isa);
/// Returns the kernels for chosen_isa().
const Products &choose_products();

/// Computes a product on up to `parallel.threads` threads, each of which uses Products::scratch_bytes of `scratch`. The
/// number of threads does not change the result.
void run_product(const Products &products, const Product &product, const Parallel &parallel, char *scratch);

} // namespace dsopt::cpu
