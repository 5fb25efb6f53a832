// SPDX-License-Identifier: Apache-2.0
#include "cpu/newton_schulz.h"
#include <vector>

namespace dsopt::cpu {
namespace {

float rd(float x, Dtype input) {
    if (input == Dtype::f32) return x;
    const float y = input == Dtype::bf16 ? bf16_to_f32(f32_to_bf16(x)) : f16_to_f32(f32_to_f16(x));
    return y < kLeastInput && y > -kLeastInput ? 0.0f : y;
}
__attribute__((target("avx2,fma"))) void row(const float *left, const float *right, int64_t depth, int64_t cols,
                                             float *out) {
    for (int64_t j = 0; j < cols; ++j) out[j] = 0;
    for (int64_t k = 0; k < depth; ++k)
        for (int64_t j = 0; j < cols; ++j) out[j] = __builtin_fmaf(left[k], right[k * cols + j], out[j]);
}

} // namespace

const Products &choose_products() {
    static constexpr Products products;
    return products;
}
void newton_schulz(const Products &, const NsRecipe &recipe, const NsMatrix *matrices, int64_t count,
                   const Parallel &) {
    for (int64_t i = 0; i < count; ++i) {
        const auto &[n, m, x, in, a_, b_] = matrices[i];
        std::vector<float> h(size_t(n * m)), t(size_t(n * m)), a(size_t(n * n)), b(size_t(n * n)), s;
        s.resize(size_t(m));
        for (int step = 0; step < recipe.steps; ++step) {
            const float *c = recipe.at(step);
            for (int64_t k = 0; k < n * m; ++k) h[size_t(k)] = rd(x[k], recipe.input);
            for (int64_t r = 0; r < n; ++r)
                for (int64_t k = 0; k < m; ++k) t[size_t(k * n + r)] = h[size_t(r * m + k)];
            for (int64_t r = 0; r < n; ++r) {
                row(&h[size_t(r * m)], t.data(), m, n, &a[size_t(r * n)]);
                for (int64_t k = 0; k < n; ++k) a[size_t(r * n + k)] = rd(a[size_t(r * n + k)], recipe.input);
            }
            for (int64_t r = 0; r < n; ++r) {
                row(&a[size_t(r * n)], a.data(), n, n, &b[size_t(r * n)]);
                for (int64_t k = 0; k < n; ++k) {
                    const float u = c[1] * a[size_t(r * n + k)], v = c[2] * b[size_t(r * n + k)];
                    b[size_t(r * n + k)] = rd(u + v, recipe.input);
                }
            }
            for (int64_t r = 0; r < n; ++r) {
                row(&b[size_t(r * n)], h.data(), n, m, s.data());
                for (int64_t k = 0; k < m; ++k) {
                    const float u = c[0] * x[r * m + k];
                    x[r * m + k] = u + s[size_t(k)];
                }
            }
        }
        for (int64_t k = 0; k < n * m; ++k) x[k] = rd(x[k], recipe.input);
    }
}

} // namespace dsopt::cpu
