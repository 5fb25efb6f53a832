// SPDX-License-Identifier: Apache-2.0
#include "cpu/newton_schulz.h"
#include <algorithm>
#include <atomic>

namespace dsopt::cpu {
namespace {

constinit std::atomic<int64_t> run_so_far{0};

/// Operations of an iteration from which on each product is partitioned among threads.
constexpr double kLeastPartitioned = 2e7;

double operations(int64_t rows, int64_t columns) {
    const auto n = double(rows), m = double(columns);
    return 4 * n * n * m + 2 * n * n * n;
}
double operations(const NsMatrix &matrix) { return operations(matrix.n, matrix.m); }
bool is_large(const NsMatrix &matrix) { return operations(matrix) >= kLeastPartitioned; }
bool is_empty(const NsMatrix &matrix) { return matrix.n == 0 || matrix.m == 0; }

/// Xh = rd(X).
void round_input(const Products &products, const Product &product, const Parallel &parallel) {
    constexpr int64_t least = int64_t(1) << 15;
    const int64_t count = product.n * product.m, size = int64_t(dtype_size(product.input));
    const int64_t parts = std::clamp<int64_t>(count / least, 1, parallel.threads);
    const int64_t part = round_up((count + parts - 1) / parts, int64_t(kCacheLine));
    parallel.run(parts, [&](int64_t i) {
        const DefaultFloatEnvironment environment;
        const int64_t begin = i * part, end = std::min(begin + part, count);
        if (begin < end)
            products.round(product.x + begin, product.scale, static_cast<char *>(product.xh) + begin * size,
                           product.input, end - begin);
    });
}

/// Runs all iterations of a matrix.
void iterate(const Products &products, const NsRecipe &recipe, const NsMatrix &matrix, const Parallel &parallel,
             char *scratch) {
    Product product{ProductKind::gram,
                    ns_input(matrix.n, recipe.input),
                    false,
                    matrix.n,
                    matrix.m,
                    matrix.scale,
                    matrix.x,
                    matrix.input,
                    matrix.a,
                    matrix.b,
                    {}};
    for (int step = 0; step < recipe.steps; ++step) {
        std::copy_n(recipe.at(step), 3, product.triple);
        product.last = step == recipe.steps - 1;
        round_input(products, product, parallel);
        for (const ProductKind kind : {ProductKind::gram, ProductKind::polynomial, ProductKind::update}) {
            product.kind = kind;
            run_product(products, product, parallel, scratch);
        }
        product.scale = 1;
        run_so_far.fetch_add(3, std::memory_order_relaxed);
    }
}

/// Spreads small matrices over the threads, largest first. There is no memory for a sorted list, so the matrices are
/// visited once per power of two of their operations.
class SmallMatrices {
public:
    SmallMatrices(const NsMatrix *matrices, int64_t count) : matrices_(matrices), count_(count) {
        for (int64_t i = 0; i < count; ++i)
            if (is_small(matrices[i])) {
                present_ |= 1u << size_of(matrices[i]);
                ++small_;
            }
    }
    int64_t count() const { return small_; }
    /// Calls use(matrix) for matrices that no other thread has visited, until all are visited.
    template <class Use> void visit(const Use &use) {
        for (int size = kSizes - 1; size >= 0; --size) {
            if (!(present_ >> size & 1)) continue;
            for (int64_t i; (i = next_[size].fetch_add(1, std::memory_order_relaxed)) < count_;)
                if (is_small(matrices_[i]) && size_of(matrices_[i]) == size) use(matrices_[i]);
        }
    }

private:
    static constexpr int kSizes = 32;
    static bool is_small(const NsMatrix &matrix) { return !is_empty(matrix) && !is_large(matrix); }
    static int size_of(const NsMatrix &matrix) { return 31 - __builtin_clz(uint32_t(operations(matrix))); }

    const NsMatrix *const matrices_;
    const int64_t count_;
    int64_t small_ = 0;
    uint32_t present_ = 0; // a bit for each size
    std::atomic<int64_t> next_[kSizes] = {};
};

} // namespace

int64_t ns_scratch_bytes(const Products &products, int64_t n, int64_t m, int64_t count, int64_t threads) {
    const bool large = operations(n, m) >= kLeastPartitioned;
    return products.scratch_bytes * (large ? threads : std::min(count, threads));
}

void newton_schulz(const Products &products, const NsRecipe &recipe, const NsMatrix *matrices, int64_t count,
                   const Parallel &parallel, char *scratch) {
    for (int64_t i = 0; i < count; ++i)
        if (!is_empty(matrices[i]) && is_large(matrices[i])) iterate(products, recipe, matrices[i], parallel, scratch);
    SmallMatrices small(matrices, count);
    parallel.run(std::min<int64_t>(parallel.threads, small.count()), [&](int64_t part) {
        char *const own = scratch + part * products.scratch_bytes;
        small.visit([&](const NsMatrix &matrix) { iterate(products, recipe, matrix, Parallel{}, own); });
    });
}

int64_t products_run() { return run_so_far.load(std::memory_order_relaxed); }

} // namespace dsopt::cpu
