// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm.h"
#include "base/fork.h"
#include "base/sizes.h"
#include <algorithm>
#include <atomic>

namespace dsopt::cpu {
namespace {

/// Partition of a result into tiles of equal size. Each thread packs the operands of its tiles, so tiles are as large as
/// the kernel allows, except where the threads would have fewer than kTilesPerThread.
class TileGrid {
public:
    TileGrid(const Products &products, const Product &product, int64_t threads) :
        rows_(product.n),
        columns_(product.kind == ProductKind::update ? product.m : product.n),
        symmetric_(product.kind != ProductKind::update) {
        partition(products, products.most_rows, products.most_columns);
        while (threads > 1 && useful() < kTilesPerThread * threads) {
            const bool halves_columns = tile_columns_ >= tile_rows_;
            const int64_t size = halves_columns ? tile_columns_ : tile_rows_;
            if (size <= 2 * (halves_columns ? products.columns : products.rows)) break;
            partition(products, halves_columns ? tile_rows_ : size / 2, halves_columns ? size / 2 : tile_columns_);
        }
    }
    int64_t count() const { return across_ * down_; }
    /// True for a tile with elements to compute.
    bool is_useful(int64_t index) const {
        const ProductTile tile = (*this)[index];
        return !symmetric_ || tile.column < tile.row_end;
    }
    /// Rows of symmetric results are in descending order: the last rows have the most elements.
    ProductTile operator[](int64_t index) const {
        const int64_t row = (down_ - 1 - index / across_) * tile_rows_, column = index % across_ * tile_columns_;
        return {row, std::min(row + tile_rows_, rows_), column, std::min(column + tile_columns_, columns_)};
    }

private:
    static constexpr int64_t kTilesPerThread = 6;

    /// Makes tiles of at most this size.
    void partition(const Products &products, int64_t most_rows, int64_t most_columns) {
        const auto equal = [](int64_t size, int64_t most, int64_t multiple) {
            const int64_t parts = (size + most - 1) / most;
            return round_up((size + parts - 1) / parts, multiple);
        };
        tile_rows_ = equal(rows_, most_rows, products.rows);
        tile_columns_ = equal(columns_, most_columns, products.columns);
        down_ = (rows_ + tile_rows_ - 1) / tile_rows_;
        across_ = (columns_ + tile_columns_ - 1) / tile_columns_;
    }
    int64_t useful() const { return symmetric_ ? (count() + 1) / 2 : count(); }

    const int64_t rows_, columns_;
    const bool symmetric_;
    int64_t tile_rows_ = 0, tile_columns_ = 0, down_ = 0, across_ = 0;
};

} // namespace

const Products &products_of(Isa isa) {
#if defined(__x86_64__)
    static constinit Lazy<bool> verified;
    const auto verify = [] {
        const DefaultFloatEnvironment environment;
        return products_avx512_bf16.verify();
    };
    switch (isa) {
    case Isa::generic: break;
    case Isa::avx2: return products_avx2;
    case Isa::avx512: return products_avx512;
    case Isa::avx512_bf16: return verified.get(verify) ? products_avx512_bf16 : products_avx512;
    }
#endif
    (void)isa;
    return products_generic;
}
const Products &choose_products() { return products_of(chosen_isa()); }

void run_product(const Products &products, const Product &product, const Parallel &parallel, char *scratch) {
    const TileGrid grid(products, product, parallel.threads);
    std::atomic<int64_t> next{0};
    parallel.run(std::min<int64_t>(parallel.threads, grid.count()), [&](int64_t part) {
        const DefaultFloatEnvironment environment;
        char *const own = scratch + part * products.scratch_bytes;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < grid.count();)
            if (grid.is_useful(i)) products.run(product, grid[i], own);
    });
}

} // namespace dsopt::cpu
