// SPDX-License-Identifier: Apache-2.0
// Products of Newton-Schulz iterations on one thread, as shares of the processor's peak. The peak is measured before
// each benchmark, by multiply-adds of registers. Operations of symmetric results are counted for one triangle. DSOPT_ISA
// selects the kernels; the peak is of the best instruction set.
#include "cpu/newton_schulz.h"
#include <algorithm>
#include <benchmark/benchmark.h>
#include <chrono>
#include <cmath>
#include <string>
#include <vector>

using namespace dsopt;
using namespace dsopt::cpu;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kChains = 24;
#elif defined(__AVX__)
constexpr int kLanes = 8, kChains = 12;
#else
constexpr int kLanes = 4, kChains = 12;
#endif
typedef float Lanes __attribute__((vector_size(kLanes * 4)));

/// Returns multiply-adds per second, counted as two operations. Compiled with contraction.
double measure_peak() {
    constexpr int64_t steps = 2'000'000;
    double best = 0;
    for (int repetition = 0; repetition < 8; ++repetition) {
        Lanes sums[kChains] = {}, x{}, y{};
        x += 0.5f;
        benchmark::DoNotOptimize(x);
        benchmark::DoNotOptimize(y);
        for (Lanes &sum : sums) benchmark::DoNotOptimize(sum); // otherwise the chains are one
        const auto begin = std::chrono::steady_clock::now();
        for (int64_t k = 0; k < steps; ++k)
#pragma GCC unroll 24
            for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * x + y;
        for (Lanes &sum : sums) benchmark::DoNotOptimize(sum);
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
        best = std::max(best, double(steps) * kChains * kLanes * 2 / seconds.count());
    }
    return best;
}

struct Matrix {
    std::vector<float> x;
    std::vector<char> workspace;
    NsMatrix matrix;
    Matrix(int64_t n, int64_t m, Dtype input) :
        x(size_t(n * m)),
        workspace(size_t(ns_workspace_bytes(n, m, input)) + kCacheLine) {
        uint32_t state = 1;
        for (float &value : x) {
            state = state * 1664525u + 1013904223u;
            value = float(int32_t(state)) / 2147483648.0f / std::sqrt(float(n * m) / 3);
        }
        char *const memory = workspace.data();
        matrix =
            ns_matrix(n, m, 1, x.data(), memory + round_up(uintptr_t(memory), kCacheLine) - uintptr_t(memory), input);
    }
};

/// Memory of one thread.
struct Scratch {
    std::vector<char> memory = std::vector<char>(size_t(choose_products().scratch_bytes) + kCacheLine);
    char *data() { return memory.data() + round_up(uintptr_t(memory.data()), kCacheLine) - uintptr_t(memory.data()); }
};

const NsRecipe kRecipe{{{3.4445f, -4.7750f, 2.0315f}}, 1, 5, Dtype::f32};

void set_operations(benchmark::State &state, double peak, double operations) {
    const double total = operations * double(state.iterations());
    state.counters["of_peak"] = benchmark::Counter(total / peak, benchmark::Counter::kIsRate);
    state.counters["flops"] = benchmark::Counter(total, benchmark::Counter::kIsRate);
    state.counters["peak"] = peak;
}
double operations_of(ProductKind kind, int64_t n, int64_t m) {
    const auto rows = double(n), columns = double(m);
    switch (kind) {
    case ProductKind::gram: return rows * (rows + 1) * columns;
    case ProductKind::polynomial: return rows * (rows + 1) * rows;
    case ProductKind::update: return 2 * rows * rows * columns;
    }
    return 0;
}

void BM_Product(benchmark::State &state, ProductKind kind, int64_t n, int64_t m, Dtype input) {
    const double peak = measure_peak();
    Matrix data(n, m, input);
    const NsMatrix &matrix = data.matrix;
    const Products &products = choose_products();
    Scratch scratch;
    Product product{kind, input, false, n, m, 1, matrix.x, matrix.input, matrix.a, matrix.b, {1, 0.5f, 0.5f}};
    products.round(matrix.x, 1, matrix.input, input, n * m);
    for (const ProductKind first : {ProductKind::gram, ProductKind::polynomial}) {
        product.kind = first;
        run_product(products, product, Parallel{}, scratch.data());
    }
    product.kind = kind;
    product.triple[0] = 0;
    for (auto _ : state) run_product(products, product, Parallel{}, scratch.data());
    set_operations(state, peak, operations_of(kind, n, m));
}

/// Five iterations of `count` matrices.
void BM_NewtonSchulz(benchmark::State &state, int64_t count, int64_t n, int64_t m, Dtype input) {
    const double peak = measure_peak();
    std::vector<Matrix> data;
    std::vector<NsMatrix> matrices;
    for (int64_t i = 0; i < count; ++i) data.emplace_back(n, m, input);
    for (Matrix &matrix : data) matrices.push_back(matrix.matrix);
    NsRecipe recipe = kRecipe;
    recipe.input = input;
    Scratch scratch;
    for (auto _ : state) newton_schulz(choose_products(), recipe, matrices.data(), count, Parallel{}, scratch.data());
    double operations = 0;
    for (const ProductKind kind : {ProductKind::gram, ProductKind::polynomial, ProductKind::update})
        operations += operations_of(kind, n, m);
    set_operations(state, peak, operations * double(recipe.steps * count));
}

} // namespace

int main(int argc, char **argv) {
    struct Kind {
        const char *name;
        ProductKind kind;
    };
    struct Input {
        const char *name;
        Dtype dtype;
    };
    const Kind kinds[] = {
        {"gram", ProductKind::gram}, {"polynomial", ProductKind::polynomial}, {"update", ProductKind::update}};
    const Input inputs[] = {{"fp32", Dtype::f32}, {"bf16", Dtype::bf16}, {"fp16", Dtype::f16}};
    const int64_t shapes[][2] = {{768, 768}, {768, 3072}, {1600, 6400}};
    const auto text = [](int64_t n, int64_t m) { return std::to_string(n) + "x" + std::to_string(m); };
    for (const auto &[n, m] : shapes)
        for (const Input &input : inputs) {
            const std::string end = "/" + text(n, m) + "/" + input.name;
            for (const Kind &kind : kinds)
                benchmark::RegisterBenchmark(("BM_Product/" + std::string(kind.name) + end).c_str(), BM_Product,
                                             kind.kind, n, m, input.dtype);
            benchmark::RegisterBenchmark(("BM_NewtonSchulz/1" + end).c_str(), BM_NewtonSchulz, 1, n, m, input.dtype);
        }
    for (const Input &input : inputs)
        benchmark::RegisterBenchmark(("BM_NewtonSchulz/1000/24x24/" + std::string(input.name)).c_str(), BM_NewtonSchulz,
                                     1000, 24, 24, input.dtype);
    benchmark::Initialize(&argc, argv);
    benchmark::RunSpecifiedBenchmarks();
}
