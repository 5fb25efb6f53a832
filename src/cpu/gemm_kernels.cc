// SPDX-License-Identifier: Apache-2.0
// Compiled with -DDSOPT_ISA=<name> and that instruction set's flags, see kernels.cc. A tile of a product is computed in
// blocks of the chains' length. Each block packs the left rows into panels that stay in the second-level cache, then
// each panel of right columns, which stays in the first-level cache; partial sums are stored as fp32 between blocks.
#include "cpu/gemm_kernels.h"
#include "cpu/gemm_panels.h"
#include <new>
#include <utility>

namespace dsopt::cpu {
namespace {

#if !DSOPT_HAS_REGISTERS
constexpr int kWide = 4;
typedef float Floats __attribute__((vector_size(kWide * 4)));
#endif

// A tile in registers has kRows x kColumns elements: as many as fit next to the operands.
#if defined(__AVX512F__)
constexpr int kRows = 14, kMostRows = 168;
#elif defined(__AVX2__)
constexpr int kRows = 6, kMostRows = 144;
#elif defined(__aarch64__)
constexpr int kRows = 12, kMostRows = 144;
#else
constexpr int kRows = 4, kMostRows = 96;
#endif
constexpr int kColumns = 2 * kWide, kMostColumns = 256;
/// Words of a block of a chain.
constexpr int64_t kDepth = kWide == 16 ? 192 : 256;
/// Words after a panel that packing overwrites.
constexpr int kPadding = 8;
/// Distance of rows of sums. Not a power of two: elements of a column would share the sets of the cache.
constexpr int64_t kSumsStride = kMostColumns + 16;

DSOPT_HD Floats broadcast_word(const float *from) {
#if defined(__AVX512F__)
    return Floats(_mm512_set1_ps(*from));
#elif defined(__AVX2__)
    return Floats(_mm256_broadcast_ss(from));
#else
    return Floats{*from, *from, *from, *from};
#endif
}

template <class Tag> DSOPT_HD Floats multiply_add(Floats x, Floats y, Floats s, Singles<Tag>) {
#if defined(__AVX512F__)
    return Floats(_mm512_fmadd_ps(__m512(x), __m512(y), __m512(s)));
#elif defined(__AVX2__)
    return Floats(_mm256_fmadd_ps(__m256(x), __m256(y), __m256(s)));
#elif defined(__aarch64__)
    return Floats(vfmaq_f32(float32x4_t(s), float32x4_t(x), float32x4_t(y)));
#else
    // Products of 16-bit inputs are exact in fp32.
    if constexpr (!std::is_same_v<Tag, F32>) return x * y + s;
    for (int k = 0; k < kWide; ++k) s[k] = __builtin_fmaf(x[k], y[k], s[k]);
    return s;
#endif
}
#if defined(__AVX512F__)
DSOPT_HD Floats multiply_add(Floats x, Floats y, Floats s, Pairs) {
    // Assembly: the file is compiled without AVX512_BF16.
    asm("vdpbf16ps %2, %1, %0" : "+v"(s) : "v"(x), "v"(y));
    return s;
}
#endif

template <class Words> DSOPT_HD void multiply_add_row(const float *left, Floats y0, Floats y1, Floats &s0, Floats &s1) {
    const Floats x = broadcast_word(left);
    s0 = multiply_add(x, y0, s0, Words{});
    s1 = multiply_add(x, y1, s1, Words{});
}
DSOPT_HD void store_row_of_tile(float *to, Floats s0, Floats s1) {
    store_as(s0, to);
    store_as(s1, to + kWide);
}
/// Row R of a register tile is in s0[R] and s1[R]. The indices are constants: gcc 12 keeps an array that a loop indexes
/// in memory.
template <class Words, bool First, int... R>
DSOPT_HD void multiply_rows(int64_t count, const float *left, const float *right, float *sums,
                            std::integer_sequence<int, R...>) {
    Floats s0[] = {(First ? Floats{} : load_as<Floats>(sums + R * kSumsStride))...};
    Floats s1[] = {(First ? Floats{} : load_as<Floats>(sums + R * kSumsStride + kWide))...};
    do { // at least once: gcc 12 would spill registers for a loop that may not run
        const Floats y0 = load_as<Floats>(right), y1 = load_as<Floats>(right + kWide);
        (multiply_add_row<Words>(left + R, y0, y1, s0[R], s1[R]), ...);
        left += kRows;
        right += kColumns;
    } while (--count > 0);
    (store_row_of_tile(sums + R * kSumsStride, s0[R], s1[R]), ...);
}
/// Adds `count` words of the chains to a register tile of sums. `First`: the chains begin.
template <class Words, bool First>
__attribute__((noinline)) void multiply(int64_t count, const float *left, const float *right, float *sums) {
    multiply_rows<Words, First>(count, left, right, sums, std::make_integer_sequence<int, kRows>{});
}

/// Operands of a product: matrices in which chains are rows (`by_rows`) or columns.
template <class T> struct Operands {
    const T *left, *right;
    int64_t left_stride, right_stride, length;
    bool by_rows;
    explicit Operands(const Product &product) {
        const auto *const xh = static_cast<const T *>(product.xh);
        const auto *const a = static_cast<const T *>(product.a), *const b = static_cast<const T *>(product.b);
        by_rows = product.kind == ProductKind::gram;
        left = by_rows ? xh : product.kind == ProductKind::polynomial ? a : b; // a and b are symmetric
        right = product.kind == ProductKind::polynomial ? a : xh;
        left_stride = by_rows ? product.m : product.n;
        right_stride = product.kind == ProductKind::polynomial ? product.n : product.m;
        length = by_rows ? product.m : product.n;
    }
};

/// Packs a panel of `Width` chains from chain `first` of `chains`: `length` elements from element `k` of `whole`.
template <class Words, int Width, class T>
DSOPT_HD void pack(const T *from, int64_t stride, bool by_rows, int64_t k, int64_t length, int64_t whole, int64_t first,
                   int64_t chains, float *panel) {
    const int64_t begin = by_rows ? first * stride + k : k * stride + first;
    if (by_rows)
        pack_rows<Words, Width>(from + begin, stride, length, chains - first, panel);
    else
        pack_columns<Words, Width>(from + begin, stride, length, chains - first, whole * stride - begin, panel);
}

/// Products::run's memory.
struct Scratch {
    alignas(64) float left[kMostRows * kDepth + kPadding]; // panels
    alignas(64) float right[kDepth * kColumns + kPadding]; // a panel
    alignas(64) float sums[kMostRows * kSumsStride];       // of the tile
};

/// Computes the sums of a tile. With `lower`, register tiles above the diagonal are left out.
template <class Words>
void sum_tile(const Operands<typename Words::T> &operands, const ProductTile &tile, int64_t rows, int64_t columns,
              bool lower, Scratch &scratch) {
    float *const left = scratch.left, *const right = scratch.right;
    constexpr int64_t most = kDepth * Words::elements;
    const int64_t blocks = (operands.length + most - 1) / most;
    const int64_t block = ((operands.length + blocks - 1) / blocks + 15) / 16 * 16;
    for (int64_t k = 0; k < operands.length; k += block) {
        const int64_t length = smaller(block, operands.length - k);
        const int64_t count = (length + Words::elements - 1) / Words::elements;
        float *panel = left;
        for (int64_t r = tile.row; r < tile.row_end; r += kRows, panel += kRows * count)
            pack<Words, kRows>(operands.left, operands.left_stride, operands.by_rows, k, length, operands.length, r,
                               rows, panel);
        for (int64_t c = tile.column; c < tile.column_end; c += kColumns) {
            pack<Words, kColumns>(operands.right, operands.right_stride, operands.by_rows, k, length, operands.length,
                                  c, columns, right);
            panel = left;
            for (int64_t r = tile.row; r < tile.row_end; r += kRows, panel += kRows * count) {
                if (lower && c >= r + kRows) continue;
                float *const to = scratch.sums + (r - tile.row) * kSumsStride + (c - tile.column);
                if (k == 0)
                    multiply<Words, true>(count, panel, right, to);
                else
                    multiply<Words, false>(count, panel, right, to);
            }
        }
    }
}

/// Returns how many elements of row i of a symmetric tile are stored: those on and below the diagonal, and up to seven
/// elements that the same tile stores again.
DSOPT_HD int64_t lower_count(const ProductTile &tile, int64_t i) {
    const int64_t end = (i + 1 - tile.column + 7) / 8 * 8;
    return smaller(end, smaller(tile.column_end, tile.row_end) - tile.column);
}

/// Stores rd(sums) on and below the diagonal, and the same elements above it.
template <class Tag> void store_symmetric(const float *sums, const ProductTile &tile, void *to, int64_t n, Tag tag) {
    auto *const result = static_cast<typename Tag::storage *>(to);
    for (int64_t i = tile.row > tile.column ? tile.row : tile.column; i < tile.row_end; ++i)
        store_row(sums + (i - tile.row) * kSumsStride, result + i * n + tile.column, lower_count(tile, i), tag);
    constexpr EightWords index{0, 1, 2, 3, 4, 5, 6, 7};
    for (int64_t j = tile.column; j < tile.column_end; j += 8)
        for (int64_t i = tile.row; i < tile.row_end; i += 8) {
            if (i + 7 < j) continue;
            const float *const from = sums + (i - tile.row) * kSumsStride + (j - tile.column);
            if ((i == j || i > j + 7) && i + 8 <= tile.row_end && j + 8 <= tile.column_end) {
                Eight x[8];
                for (int k = 0; k < 8; ++k) x[k] = load_as<Eight>(from + k * kSumsStride);
                transpose(x);
                for (int k = 0; k < 8; ++k) {
                    if (i == j) x[k] = index > uint32_t(k) ? x[k] : load_as<Eight>(from + k * kSumsStride);
                    store_eight(x[k], result + (j + k) * n + i, tag);
                }
                continue;
            }
            for (int64_t row = i; row < smaller(i + 8, tile.row_end); ++row)
                for (int64_t column = j; column < smaller(j + 8, smaller(tile.column_end, row)); ++column)
                    store_one(from[(row - i) * kSumsStride + column - j], result + column * n + row, tag);
        }
}

/// Replaces sums by b A + c sums.
template <class Tag> void mix(float *sums, const ProductTile &tile, const Product &product, Tag tag) {
    const auto *const a = static_cast<const typename Tag::storage *>(product.a);
    const float b = product.triple[1], c = product.triple[2];
    for (int64_t i = tile.row > tile.column ? tile.row : tile.column; i < tile.row_end; ++i) {
        const auto *const old = a + i * product.n + tile.column;
        float *const row = sums + (i - tile.row) * kSumsStride;
        const int64_t count = lower_count(tile, i);
        int64_t j = 0;
        for (; j + 8 <= count; j += 8) store_as(b * load_eight(old + j, tag) + c * load_as<Eight>(row + j), row + j);
        for (; j < count; ++j) row[j] = b * tag.load(old[j]) + c * row[j];
    }
}

/// X = a X + sums, and rd() of it in the last iteration. `Scales`: in the first one, where X is x * scale.
template <bool Scales, class Tag>
void update(const float *sums, const ProductTile &tile, const Product &product, Tag tag) {
    const float a = product.triple[0];
    const int64_t count = tile.column_end - tile.column;
    typename Tag::storage rounded[8];
    for (int64_t i = tile.row; i < tile.row_end; ++i) {
        float *const x = product.x + i * product.m + tile.column;
        const float *const sum = sums + (i - tile.row) * kSumsStride;
        int64_t j = 0;
        for (; j + 8 <= count; j += 8) {
            Eight value = load_as<Eight>(x + j);
            if constexpr (Scales) value = scaled(value, product.scale);
            value = a * value + load_as<Eight>(sum + j);
            if (product.last) {
                store_eight(value, rounded, tag);
                value = load_eight(rounded, tag);
            }
            store_as(value, x + j);
        }
        for (; j < count; ++j) {
            x[j] = a * (Scales ? scaled(x[j], product.scale) : x[j]) + sum[j];
            if (!product.last) continue;
            store_one(x[j], rounded, tag);
            x[j] = tag.load(*rounded);
        }
    }
}

template <class Words> void run_tile(const Product &product, const ProductTile &whole, void *memory) {
    Scratch &scratch = *new (memory) Scratch;
    float *const sums = scratch.sums;
    const typename Words::tag tag;
    const bool symmetric = product.kind != ProductKind::update;
    ProductTile tile = whole;
    if (symmetric) tile.column_end = smaller(tile.column_end, tile.row_end);
    if (tile.column >= tile.column_end) return; // above the diagonal
    sum_tile<Words>(Operands<typename Words::T>(product), tile, product.n, symmetric ? product.n : product.m, symmetric,
                    scratch);
    switch (product.kind) {
    case ProductKind::gram: return store_symmetric(sums, tile, product.a, product.n, tag);
    case ProductKind::polynomial:
        mix(sums, tile, product, tag);
        return store_symmetric(sums, tile, product.b, product.n, tag);
    case ProductKind::update:
        return product.scale == 1 ? update<false>(sums, tile, product, tag) : update<true>(sums, tile, product, tag);
    }
}

void run(const Product &product, const ProductTile &tile, void *scratch) {
    visit(product.input, [&](auto tag) { run_tile<Singles<decltype(tag)>>(product, tile, scratch); });
}
template <class Tag> void round_row(const float *x, double scale, typename Tag::storage *to, int64_t count, Tag tag) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) store_eight(scaled(load_as<Eight>(x + i), scale), to + i, tag);
    for (; i < count; ++i) store_one(scaled(x[i], scale), to + i, tag);
}
void round(const float *x, double scale, void *to, Dtype input, int64_t count) {
    visit(input, [&](auto tag) {
        auto *const rounded = static_cast<typename decltype(tag)::storage *>(to);
        scale == 1 ? store_row(x, rounded, count, tag) : round_row(x, scale, rounded, count, tag);
    });
}

#if defined(__AVX512F__)
void run_with_pairs(const Product &product, const ProductTile &tile, void *scratch) {
    if (product.input == Dtype::bf16)
        run_tile<Pairs>(product, tile, scratch);
    else
        run(product, tile, scratch);
}

/// Compares the instruction with the chain, on elements whose exponents are close to each other (so that sums cancel)
/// and far apart.
bool verify_pairs() {
    uint64_t state = 1;
    const auto random = [&] { return uint32_t((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); };
    static constexpr uint32_t ranges[] = {2, 6, 24, 60};
    for (const uint32_t exponents : ranges) {
        const auto element = [&] {
            const uint32_t exponent = 127 + 9 - random() % exponents;
            return random() % 16 == 0 ? 0u : (random() & 0x807fu) | exponent << 7;
        };
        float by_chain[kWide] = {};
        Floats sums{};
        for (int repetition = 0; repetition < 512; ++repetition) {
            float x[kWide], y[kWide];
            for (int k = 0; k < kWide; ++k) {
                const uint32_t x0 = element(), x1 = element(), y0 = element(), y1 = element();
                x[k] = float_of(x0 << 16 | x1);
                y[k] = float_of(y0 << 16 | y1);
                by_chain[k] = __builtin_fmaf(float_of(x0 << 16), float_of(y0 << 16), by_chain[k]);
                by_chain[k] = __builtin_fmaf(float_of(x1 << 16), float_of(y1 << 16), by_chain[k]);
            }
            sums = multiply_add(load_as<Floats>(x), load_as<Floats>(y), sums, Pairs{});
            if (__builtin_memcmp(&sums, by_chain, sizeof sums) != 0) return false;
        }
    }
    return true;
}
#endif

constexpr Products table(const char *name, decltype(Products::run) tile_kernel, decltype(Products::verify) verify) {
    return {name, kRows, kColumns, kMostRows, kMostColumns, round, tile_kernel, int64_t(sizeof(Scratch)), verify};
}

} // namespace

constinit const Products DSOPT_JOIN(products_, DSOPT_ISA) = table(DSOPT_TEXT(DSOPT_ISA), run, nullptr);
#if defined(__AVX512F__)
constinit const Products DSOPT_JOIN(DSOPT_JOIN(products_, DSOPT_ISA), _bf16) = table(DSOPT_TEXT(DSOPT_ISA) "_bf16",
                                                                                     run_with_pairs, verify_pairs);
#endif

} // namespace dsopt::cpu
