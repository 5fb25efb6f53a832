// SPDX-License-Identifier: Apache-2.0
// Products of Newton-Schulz iterations on the CPU: src/cpu/gemm.h and newton_schulz.h. Every instruction set of this
// processor gives the bits of a loop over scalars.
#include "base/status.h"
#include "cpu/newton_schulz.h"
#include "rules/muon.h"
#include "support/harness.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace inside_products_tests {

using namespace dsopt;
using namespace dsopt::cpu;

constexpr Dtype kInputs[] = {Dtype::f32, Dtype::bf16, Dtype::f16};
constexpr ProductKind kKinds[] = {ProductKind::gram, ProductKind::polynomial, ProductKind::update};
constexpr float kTriple[] = {3.4445f, -4.7750f, 2.0315f};

/// Returns the kernels of all instruction sets that this processor has.
std::vector<const Products *> all_products() {
    std::vector<const Products *> all;
    for (int isa = 0; isa <= int(processor_isa()); ++isa) all.push_back(&products_of(cpu::Isa(isa)));
    return all;
}

float rd(float x, Dtype input) {
    if (input == Dtype::f32) return x;
    const float rounded = test::rounded(x, int32_t(input));
    return std::fabs(rounded) < 0x1p-50f ? 0.0f : rounded;
}

/// The products by scalars. Matrices that the kernels store in 16 bits hold the same values in fp32.
struct Reference {
    int64_t n, m;
    std::vector<float> x, xh, a, b;
    Reference(int64_t rows, int64_t columns, const std::vector<float> &values) :
        n(rows),
        m(columns),
        x(values),
        xh(values.size()),
        a(size_t(n * n)),
        b(size_t(n * n)) {}
    void run(const float (&triple)[3], Dtype input, bool last) {
        const auto at = [](int64_t row, int64_t stride, int64_t column) { return size_t(row * stride + column); };
        for (size_t i = 0; i < x.size(); ++i) xh[i] = rd(x[i], input);
        for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j <= i; ++j) {
                float sum = 0;
                for (int64_t k = 0; k < m; ++k) sum = std::fma(xh[at(i, m, k)], xh[at(j, m, k)], sum);
                a[at(i, n, j)] = a[at(j, n, i)] = rd(sum, input);
            }
        for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j <= i; ++j) {
                float sum = 0;
                for (int64_t k = 0; k < n; ++k) sum = std::fma(a[at(i, n, k)], a[at(k, n, j)], sum);
                const float scaled = triple[2] * sum, first = triple[1] * a[at(i, n, j)];
                b[at(i, n, j)] = b[at(j, n, i)] = rd(first + scaled, input);
            }
        std::vector<float> sums(static_cast<size_t>(m));
        for (int64_t i = 0; i < n; ++i) {
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (int64_t k = 0; k < n; ++k)
                for (int64_t j = 0; j < m; ++j)
                    sums[size_t(j)] = std::fma(b[at(i, n, k)], xh[at(k, m, j)], sums[size_t(j)]);
            for (int64_t j = 0; j < m; ++j) {
                const float scaled = triple[0] * x[at(i, m, j)], sum = scaled + sums[size_t(j)];
                x[at(i, m, j)] = last ? rd(sum, input) : sum;
            }
        }
    }
};

/// A matrix with the workspace of the kernels. Bytes after each array are checked for overwrites.
struct Workspace {
    std::vector<float> x;
    std::vector<char> memory;
    NsMatrix matrix;
    Workspace(int64_t n, int64_t m, const std::vector<float> &values, Dtype input) :
        x(values),
        memory(size_t(ns_workspace_bytes(n, m, input)), char(0x5a)) {
        x.push_back(17);
        matrix = ns_matrix(n, m, 1, x.data(), memory.data(), input);
    }
    std::vector<float> loaded(const void *array, int64_t count, Dtype input) const {
        std::vector<float> values;
        const size_t size = dtype_size(input);
        for (int64_t i = 0; i < count; ++i)
            values.push_back(test::loaded(static_cast<const char *>(array) + size_t(i) * size, int32_t(input)));
        return values;
    }
    std::vector<float> result() const { return {x.begin(), x.end() - 1}; }
};

/// Scratch of these threads, whose bytes after the end are checked for overwrites.
class Scratch {
public:
    Scratch(const Products &products, int threads) :
        bytes_(size_t(products.scratch_bytes) * size_t(threads)),
        memory_(bytes_ + 2 * kCacheLine, char(0x5a)) {}
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    ~Scratch() {
        for (size_t i = 0; i < kCacheLine; ++i) EXPECT_EQ(data()[bytes_ + i], char(0x5a));
    }
    char *data() { return memory_.data() + (0 - uintptr_t(memory_.data())) % kCacheLine; }

private:
    const size_t bytes_;
    std::vector<char> memory_;
};
/// newton_schulz() with scratch of its own.
void iterate(const Products &products, const NsRecipe &recipe, const NsMatrix *matrices, int64_t count,
             const Parallel &parallel) {
    Scratch scratch(products, parallel.threads);
    newton_schulz(products, recipe, matrices, count, parallel, scratch.data());
}

bool same_bits(const std::vector<float> &x, const std::vector<float> &y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
}

/// Runs one iteration by the three products.
void run_products(const Products &products, const NsMatrix &matrix, Dtype input, bool last, const Parallel &parallel) {
    Product product{ProductKind::gram, input,        last,     matrix.n, matrix.m, 1,
                    matrix.x,          matrix.input, matrix.a, matrix.b, {}};
    std::copy_n(kTriple, 3, product.triple);
    Scratch scratch(products, parallel.threads);
    products.round(matrix.x, 1, matrix.input, input, matrix.n * matrix.m);
    for (const ProductKind kind : kKinds) {
        product.kind = kind;
        run_product(products, product, parallel, scratch.data());
    }
}

/// Compares an iteration of all kernels with the reference.
void expect_chain(int64_t n, int64_t m, Dtype input, const std::vector<float> &values, const Parallel &parallel = {}) {
    for (const bool last : {false, true}) {
        Reference expected(n, m, values);
        expected.run(kTriple, input, last);
        for (const Products *products : all_products()) {
            SCOPED_TRACE(std::string(products->name) + " " + std::to_string(n) + "x" + std::to_string(m) + " " +
                         test::dtype_name(int32_t(input)));
            Workspace found(n, m, values, Dtype::f32); // large enough for any input
            run_products(*products, found.matrix, input, last, parallel);
            ASSERT_TRUE(same_bits(found.loaded(found.matrix.input, n * m, input), expected.xh));
            ASSERT_TRUE(same_bits(found.loaded(found.matrix.a, n * n, input), expected.a));
            ASSERT_TRUE(same_bits(found.loaded(found.matrix.b, n * n, input), expected.b));
            ASSERT_TRUE(same_bits(found.result(), expected.x));
            ASSERT_EQ(found.x.back(), 17);
        }
        if (n > 24) break; // what the last iteration does differently is the same for all sizes
    }
}

LABEL(one_thread);
TEST(Products, HaveBitsOfAScalarChainForAllSmallSizes) {
    test::Random random(1);
    for (int64_t n = 1; n <= 70; n += test::kSanitized && n > 33 ? 5 : 1)
        for (const Dtype input : kInputs)
            for (const int64_t m : {n, n + 1 + (n * 7) % 23}) expect_chain(n, m, input, random.floats(size_t(n * m)));
}

LABEL(one_thread);
LABEL(slow);
TEST(Products, HaveBitsOfAScalarChainAroundSizesOfTilesAndBlocks) {
    test::Random random(2);
    // Blocks have 192 or 256 words of one or two elements; tiles have at most 168 rows and 256 columns.
    for (const int64_t m : {191, 192, 193, 255, 256, 257, 383, 385, 511, 513, 769})
        for (const Dtype input : kInputs) expect_chain(3, m, input, random.floats(size_t(3 * m)));
    for (const int64_t n : {95, 97, 143, 144, 145, 167, 169, 259}) {
        if (test::kSanitized && n != 145) continue;
        for (const Dtype input : kInputs) expect_chain(n, n + 3, input, random.floats(size_t(n * (n + 3))));
    }
}

TEST(Products, HaveTheSameBitsOnAnyNumberOfThreads) {
    test::Random random(3);
    for (const Dtype input : kInputs)
        for (const int threads : {2, 3, 4, 5}) {
            expect_chain(49, 161, input, random.floats(49 * 161), {threads});
            expect_chain(2, 1000, input, random.floats(2 * 1000), {threads});
        }
}

/// A pool of the caller that runs pieces in descending order, except those before `first`.
struct Pool {
    int64_t first = 0, calls = 0;
    static void run(void *user, int64_t n, void (*body)(void *, int64_t), void *arg) {
        auto &self = *static_cast<Pool *>(user);
        ++self.calls;
        for (int64_t i = n; i-- > self.first;) body(arg, i);
    }
};

TEST(Products, HaveTheSameBitsOnACallersPool) {
    test::Random random(4);
    Pool pool;
    for (const Dtype input : kInputs) expect_chain(70, 90, input, random.floats(70 * 90), {4, Pool::run, &pool});
    EXPECT_GE(pool.calls, 3 * 3);
}

TEST(Products, KeepDenormalsInF32WhateverTheCallersEnvironment) {
    test::Random random(5);
    std::vector<float> values;
    for (int i = 0; i < 20 * 30; ++i) values.push_back(random.number(-80, -55));
    expect_chain(20, 30, Dtype::f32, values);
#if defined(__x86_64__)
    const auto environment = [&](unsigned bits) {
        Workspace found(20, 30, values, Dtype::f32);
        const unsigned saved = _mm_getcsr();
        _mm_setcsr(saved | bits);
        const NsRecipe recipe{{{kTriple[0], kTriple[1], kTriple[2]}}, 1, 2, Dtype::f32};
        iterate(choose_products(), recipe, &found.matrix, 1, {});
        _mm_setcsr(saved);
        return found.result();
    };
    EXPECT_TRUE(same_bits(environment(0), environment(0x8040 /* flushes denormals */)));
#endif
}

TEST(Products, OfTinyAndHugeInputsHaveBitsOfTheChain) {
    test::Random random(6);
    for (const Dtype input : {Dtype::bf16, Dtype::f16}) {
        std::vector<float> values;
        for (int i = 0; i < 33 * 47; ++i)
            values.push_back(random.below(5) == 0 ? 0.0f : random.number(input == Dtype::bf16 ? -60 : -26, 3));
        expect_chain(33, 47, input, values);
    }
}

TEST(Products, SpreadNonFiniteElements) {
    for (const Products *products : all_products())
        for (const Dtype input : kInputs) {
            std::vector<float> values(17 * 19, 0.01f);
            values[5] = test::kNaN;
            Workspace found(17, 19, values, input);
            run_products(*products, found.matrix, input, true, {});
            EXPECT_EQ(std::count_if(found.x.begin(), found.x.end() - 1, [](float x) { return std::isnan(x); }), 17 * 19)
                << products->name;
        }
}

TEST(ProductsRound, RoundsToEvenAndMagnitudesBelow2ToMinus50ToZero) {
    test::Random random(7);
    std::vector<float> values = {0.0f,       -0.0f,     0x1p-50f, -0x1p-50f, 0x1.fep-51f, 0x1.ffp-51f, -0x1.ffp-51f,
                                 0x1p-149f,  -0x1p-60f, 0x1p-24f, -0x1p-25f, 0x1.8p-25f,  1.00390625f, 1.01171875f,
                                 test::kInf, -1e30f,    65519.0f, -65520.0f, 3.4e38f};
    for (int i = 0; i < 1000; ++i) values.push_back(random.number(-55, 20));
    for (const Products *products : all_products())
        for (const Dtype input : kInputs)
            for (const size_t count : {size_t(0), size_t(1), size_t(7), size_t(8), size_t(9), values.size()}) {
                std::vector<float> found(count + 1, 3.0f);
                products->round(values.data(), 1, found.data(), input, int64_t(count));
                const size_t size = dtype_size(input);
                for (size_t i = 0; i < count; ++i) {
                    const float x = test::loaded(reinterpret_cast<char *>(found.data()) + i * size, int32_t(input));
                    ASSERT_EQ(test::bits_of(x), test::bits_of(rd(values[i], input)))
                        << products->name << " " << values[i] << " " << test::dtype_name(int32_t(input));
                }
                EXPECT_EQ(found[count], 3.0f);
            }
}

// ----------------------------------------------------------------------------------------------------- newton_schulz()
using Doubles = std::vector<double>;

NsRecipe recipe_of(Dtype input, int steps = 5) { return {{{kTriple[0], kTriple[1], kTriple[2]}}, 1, steps, input}; }

/// Returns `n` random orthonormal rows.
Doubles orthonormal_rows(int64_t n, int64_t m, test::Random &random) {
    Doubles rows;
    for (int64_t i = 0; i < n * m; ++i) {
        double normal = -6;
        for (int k = 0; k < 12; ++k) normal += random.uniform();
        rows.push_back(normal);
    }
    for (int64_t i = 0; i < n; ++i) {
        double *const row = rows.data() + i * m;
        for (int repetition = 0; repetition < 2; ++repetition)
            for (int64_t j = 0; j <= i; ++j) {
                const double *const other = rows.data() + j * m;
                double dot = 0;
                for (int64_t k = 0; k < m; ++k) dot += row[k] * other[k];
                if (j == i)
                    for (int64_t k = 0; k < m; ++k) row[k] /= std::sqrt(dot);
                else
                    for (int64_t k = 0; k < m; ++k) row[k] -= dot * other[k];
            }
    }
    return rows;
}

/// Adds x times y, of which y has m columns.
void add_product(const Doubles &x, const Doubles &y, double factor, int64_t n, int64_t m, Doubles &sum) {
    for (int64_t i = 0; i < n; ++i)
        for (int64_t k = 0; k < n; ++k) {
            const double value = factor * x[size_t(i * n + k)];
            const double *const row = y.data() + k * m;
            double *const to = sum.data() + i * m;
            for (int64_t j = 0; j < m; ++j) to[j] += value * row[j];
        }
}

/// The recurrence in double.
Doubles recurrence(Doubles x, int64_t n, int64_t m, int steps) {
    for (int step = 0; step < steps; ++step) {
        Doubles a(size_t(n * n)), b, next = x;
        for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j < n; ++j) {
                double dot = 0;
                for (int64_t k = 0; k < m; ++k) dot += x[size_t(i * m + k)] * x[size_t(j * m + k)];
                a[size_t(i * n + j)] = dot;
            }
        b = a;
        for (double &value : b) value *= kJordan.b;
        add_product(a, a, kJordan.c, n, n, b);
        for (double &value : next) value *= kJordan.a;
        add_product(b, x, 1, n, m, next);
        x = next;
    }
    return x;
}

struct Spectrum {
    const char *name;
    double (*value)(int64_t k, int64_t n); // singular value k of n; NULL: noise
};
const Spectrum kSpectra[] = {
    {"noise", nullptr},
    {"1/k", [](int64_t k, int64_t) { return 1 / double(k + 1); }},
    {"decay", [](int64_t k, int64_t n) { return std::exp(-6 * double(k) / double(std::max<int64_t>(n - 1, 1))); }},
    {"step", [](int64_t k, int64_t n) { return k < std::max<int64_t>(n / 8, 1) ? 1.0 : 1e-3; }},
};

/// Returns a matrix of norm 1 with these singular values.
std::vector<float> matrix_with(const Spectrum &spectrum, int64_t n, int64_t m, test::Random &random) {
    Doubles x(size_t(n * m));
    if (spectrum.value == nullptr) {
        for (double &value : x) value = random.uniform(-1, 1);
    } else {
        Doubles left = orthonormal_rows(n, n, random);
        for (int64_t i = 0; i < n; ++i)
            for (int64_t k = 0; k < n; ++k) left[size_t(i * n + k)] *= spectrum.value(k, n);
        add_product(left, orthonormal_rows(n, m, random), 1, n, m, x);
    }
    double squares = 0;
    for (const double value : x) squares += value * value;
    std::vector<float> result;
    for (const double value : x) result.push_back(float(value / std::sqrt(squares)));
    return result;
}

double relative_error(const std::vector<float> &found, const Doubles &expected) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
        error += (double(found[i]) - expected[i]) * (double(found[i]) - expected[i]);
        norm += expected[i] * expected[i];
    }
    return std::sqrt(error / norm);
}

LABEL(numbers_only);
LABEL(slow);
TEST(NewtonSchulz, IsCloseToTheRecurrenceInDoubleForEverySpectrum) {
    constexpr int64_t sizes[][2] = {{1, 64}, {3, 5}, {32, 32}, {16, 64}, {96, 128}, {256, 256}};
    test::Random random(8);
    for (const auto &[n, m] : sizes)
        for (const Spectrum &spectrum : kSpectra) {
            if (test::kSanitized && n == 256 && spectrum.value != nullptr) continue;
            const std::vector<float> values = matrix_with(spectrum, n, m, random);
            const Doubles expected = recurrence(Doubles(values.begin(), values.end()), n, m, 5);
            for (const Dtype input : kInputs) {
                Workspace found(n, m, values, input);
                iterate(choose_products(), recipe_of(input), &found.matrix, 1, {2});
                const Dtype rounded = ns_input(n, input);
                const double bound = rounded == Dtype::bf16 ? 4e-2 : rounded == Dtype::f16 ? 5e-3 : 5e-5;
                EXPECT_LE(relative_error(found.x, expected), bound)
                    << spectrum.name << " " << n << "x" << m << " " << test::dtype_name(int32_t(input));
            }
        }
}

TEST(NewtonSchulz, RunsIterationsOfTheProductsAndRoundsTheResult) {
    test::Random random(9);
    for (const Dtype input : kInputs) {
        const std::vector<float> values = random.floats(18 * 40, -0.03, 0.03);
        Reference expected(18, 40, values);
        const float other[] = {2, -1.5, 0.5};
        expected.run(other, input, false);
        for (int step = 1; step < 4; ++step) expected.run(kTriple, input, step == 3);
        // A step after the last triple repeats it.
        const NsRecipe recipe{{{2, -1.5, 0.5}, {kTriple[0], kTriple[1], kTriple[2]}}, 2, 4, input};
        Workspace found(18, 40, values, input);
        iterate(choose_products(), recipe, &found.matrix, 1, {});
        EXPECT_TRUE(same_bits(found.result(), expected.x)) << test::dtype_name(int32_t(input));
    }
}

LABEL(one_of_many);
TEST(NewtonSchulz, BeginsWithTheScaledMatrixRoundedOnce) {
    test::Random random(12);
    for (const double scale : {0.0, 1.0 / 3, 1e-30, 0x1p100})
        for (const auto &[n, m] : {std::pair<int64_t, int64_t>{1, 1}, {7, 9}, {18, 41}, {30, 300}}) {
            const std::vector<float> values = random.floats(n * m, -0.1, 0.1);
            std::vector<float> unscaled = values, scaled;
            for (float &x : unscaled)
                if (scale != 0) x = float(double(x) / scale);
            for (const float x : unscaled) scaled.push_back(float(double(x) * scale));
            for (const Products *products : all_products())
                for (const Dtype input : kInputs) {
                    Workspace found(n, m, unscaled, input), expected(n, m, scaled, input);
                    found.matrix.scale = scale;
                    iterate(*products, recipe_of(input, 2), &found.matrix, 1, {2});
                    iterate(*products, recipe_of(input, 2), &expected.matrix, 1, {});
                    EXPECT_TRUE(same_bits(found.x, expected.x)) << products->name << " " << scale << " " << n;
                }
        }
}

TEST(NewtonSchulz, DoesNotRoundInputsOfMatricesWithFewerThan16Rows) {
    test::Random random(10);
    for (const int64_t n : {int64_t(1), kLeastRounded - 1, kLeastRounded}) {
        const std::vector<float> values = random.floats(size_t(n * 40), -0.03, 0.03);
        Workspace f32(n, 40, values, Dtype::f32), bf16(n, 40, values, Dtype::bf16);
        iterate(choose_products(), recipe_of(Dtype::f32), &f32.matrix, 1, {});
        iterate(choose_products(), recipe_of(Dtype::bf16), &bf16.matrix, 1, {});
        EXPECT_EQ(same_bits(f32.x, bf16.x), n < kLeastRounded);
    }
}

TEST(NewtonSchulz, LeavesAMatrixOfZerosAtPlusZero) {
    for (const Products *products : all_products())
        for (const Dtype input : kInputs)
            for (const int64_t n : {1, 7, 16, 33}) {
                std::vector<float> values(size_t(n * 40), 0.0f);
                values[0] = -0.0f;
                Workspace found(n, 40, values, input);
                iterate(*products, recipe_of(input), &found.matrix, 1, {});
                values[0] = 0.0f;
                EXPECT_TRUE(same_bits(found.result(), values)) << products->name << " " << n;
            }
}

/// Matrices of several sizes, on both sides of the limit at which products are partitioned, and empty ones.
struct List {
    std::vector<Workspace> matrices;
    explicit List(Dtype input) {
        constexpr int64_t sizes[][2] = {{1, 1},   {24, 24}, {0, 5}, {160, 160}, {24, 24},  {2, 3},
                                        {30, 60}, {0, 0},   {5, 5}, {24, 24},   {64, 120}, {144, 170}};
        test::Random random(11);
        for (const auto &[n, m] : sizes) matrices.emplace_back(n, m, random.floats(size_t(n * m), -0.02, 0.02), input);
    }
    void run(const NsRecipe &recipe, const Parallel &parallel) {
        std::vector<NsMatrix> list;
        for (Workspace &matrix : matrices) list.push_back(matrix.matrix);
        iterate(choose_products(), recipe, list.data(), int64_t(list.size()), parallel);
    }
};

TEST(NewtonSchulz, OfAListHasTheSameBitsOnAnyNumberOfThreadsAndACallersPool) {
    for (const Dtype input : kInputs) {
        List expected(input);
        expected.run(recipe_of(input, 2), {});
        Pool pool;
        for (const Parallel &parallel :
             {Parallel{2}, Parallel{3}, Parallel{4}, Parallel{5}, Parallel{3, Pool::run, &pool}}) {
            List found(input);
            found.run(recipe_of(input, 2), parallel);
            for (size_t i = 0; i < found.matrices.size(); ++i)
                EXPECT_TRUE(same_bits(found.matrices[i].x, expected.matrices[i].x)) << i << " " << parallel.threads;
        }
        EXPECT_GE(pool.calls, 1);
    }
}

TEST(NewtonSchulz, CountsThreeProductsPerStepAndMatrix) {
    List list(Dtype::bf16);
    const int64_t before = products_run();
    list.run(recipe_of(Dtype::bf16, 4), {3});
    EXPECT_EQ(products_run() - before, 10 * 4 * 3); // two matrices are empty
    iterate(choose_products(), recipe_of(Dtype::f32), nullptr, 0, {3});
    EXPECT_EQ(products_run() - before, 10 * 4 * 3);
}

// An optimizer that runs no iterations still trains, more slowly, so only a count shows it.
TEST(MuonStep, RunsThreeProductsPerIterationOfEachMatrixWithAGradient) {
    dsopt_group group;
    test::must(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_MUON));
    group.ns_steps = 4;
    const test::Context context = test::make_context(2);
    dsopt_optimizer_desc desc = test::optimizer_desc();
    desc.nonfinite = DSOPT_NONFINITE_SKIP;
    const auto stack = [](const char *name) {
        return test::Param{test::Array(DSOPT_DTYPE_F32, size_t(3 * 20 * 16), 0.5f), name, 0, 0, 0, 20, 16};
    };
    test::Trainer trainer(context, desc, group, {stack("a"), stack("b")});
    test::Array gradient(DSOPT_DTYPE_F32, size_t(3 * 20 * 16), 0);
    gradient.fill(7);
    const int64_t before = products_run();
    test::must(trainer.step({gradient, gradient}));
    EXPECT_EQ(products_run() - before, 6 * 4 * 3);
    test::must(trainer.step({gradient, test::Array::absent(3 * 20 * 16)}));
    EXPECT_EQ(products_run() - before, 9 * 4 * 3);
    gradient.set(0, test::kInf);
    test::must(trainer.step({gradient, gradient}));
    EXPECT_EQ(products_run() - before, 9 * 4 * 3) << "in a skipped step";
}

TEST(NewtonSchulz, ThrowsHookIfACallersPoolLeavesAPieceOut) {
    for (const int64_t n : {24, 160}) { // matrices on several threads, and a partitioned product
        std::vector<Workspace> matrices(2, Workspace(n, n, std::vector<float>(size_t(n * n), 0.01f), Dtype::f32));
        std::vector<NsMatrix> list;
        for (Workspace &matrix : matrices)
            list.push_back(ns_matrix(n, n, 1, matrix.x.data(), matrix.memory.data(), Dtype::f32));
        Pool pool{.first = 1};
        try {
            iterate(choose_products(), recipe_of(Dtype::f32), list.data(), 2, {2, Pool::run, &pool});
            FAIL() << "no exception";
        } catch (const Error &error) { EXPECT_EQ(error.status(), DSOPT_ERR_HOOK); }
    }
}

TEST(NsWorkspace, RoundsEachArrayUpTo64Bytes) {
    EXPECT_EQ(ns_workspace_bytes(16, 33, Dtype::bf16), 1088 + 2 * 512);
    EXPECT_EQ(ns_workspace_bytes(16, 33, Dtype::f32), 2112 + 2 * 1024);
    EXPECT_EQ(ns_workspace_bytes(1, 1, Dtype::bf16), 3 * 64);
    EXPECT_EQ(ns_workspace_bytes(15, 20, Dtype::bf16), ns_workspace_bytes(15, 20, Dtype::f32));
    EXPECT_EQ(ns_workspace_bytes(0, 5, Dtype::f16), 0);
}

TEST(NsScratch, HasRoomForEachThreadThatMultiplies) {
    for (const Products *products : all_products()) {
        EXPECT_EQ(products->scratch_bytes % int64_t(kCacheLine), 0);
        EXPECT_LE(products->scratch_bytes, 352 << 10) << products->name;
        EXPECT_EQ(ns_scratch_bytes(*products, 24, 24, 5, 3), 3 * products->scratch_bytes);
        EXPECT_EQ(ns_scratch_bytes(*products, 24, 24, 2, 3), 2 * products->scratch_bytes) << "a thread per matrix";
        EXPECT_EQ(ns_scratch_bytes(*products, 200, 200, 1, 3), 3 * products->scratch_bytes) << "partitioned products";
    }
}

TEST(ChooseProducts, FollowsTheInstructionSetThatIsSelected) {
    for (const char *name : {"generic", "avx2", "avx512", "avx512_bf16"}) {
        const test::Isa isa(name);
        EXPECT_EQ(&choose_products(), &products_of(chosen_isa())) << name;
        EXPECT_LE(chosen_isa(), processor_isa());
    }
    const test::Isa isa("generic");
    EXPECT_STREQ(choose_products().name, "generic");
}

} // namespace inside_products_tests
