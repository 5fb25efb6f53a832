// SPDX-License-Identifier: Apache-2.0
// Kernels of the matrix products in Newton-Schulz iterations. gemm_kernels.cc is compiled once per instruction set; the
// results are bitwise identical: an element is s = fma(x_k, y_k, s) in fp32, with k ascending from s = 0.
#pragma once
#include "base/dtype.h"

namespace dsopt::cpu {

/// The products of an iteration with coefficients (a, b, c). rd() rounds to the dtype of the inputs, see
/// Products::round. Results of `gram` and `polynomial` are symmetric.
enum class ProductKind : uint8_t {
    gram,       // A = rd(Xh Xh^T)
    polynomial, // B = rd(b A + c A A)
    update      // X = a X + B Xh
};

struct Product {
    ProductKind kind;
    Dtype input;     // dtype of xh, a and b
    bool last;       // `update` stores rd(X)
    int64_t n, m;    // rows and columns of X
    double scale;    // X is x * scale, rounded once, until `update` stores X
    float *x;        // n x m
    void *xh;        // n x m
    void *a, *b;     // n x n
    float triple[3]; // (a, b, c)
};

/// Rows [row, row_end) and columns [column, column_end) of a result.
struct ProductTile {
    int64_t row, row_end, column, column_end;
};

struct Products {
    const char *name;
    int32_t rows, columns;           // of a tile in registers
    int32_t most_rows, most_columns; // of a ProductTile, multiples of the above
    /// Stores rd(x * scale), where the product is rounded once: to nearest, ties to even, with magnitudes below
    /// kLeastInput as +0. F32 is not rounded a second time.
    void (*round)(const float *x, double scale, void *to, Dtype input, int64_t count);
    /// Computes a tile. Of symmetric results the elements on and below the diagonal are computed and stored twice.
    /// Tiles may be computed in any order and at the same time, with different `scratch` of `scratch_bytes`, aligned to
    /// 64 bytes, which is overwritten. The stack would be too small: threads of musl have 128 KiB.
    void (*run)(const Product &product, const ProductTile &tile, void *scratch);
    int64_t scratch_bytes;
    /// Returns true if this processor's instructions give the specified bits. NULL: they do by definition.
    bool (*verify)();
};

extern const Products products_generic;
#if defined(__x86_64__)
extern const Products products_avx2;   // with F16C and FMA
extern const Products products_avx512; // with F, BW, DQ and VL
extern const Products products_avx512_bf16;
#endif

} // namespace dsopt::cpu
