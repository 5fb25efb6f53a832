// SPDX-License-Identifier: Apache-2.0
// Parameters of Muon that are cut into matrices, and the algorithm in double precision, written from its formulas.
#pragma once
#include "harness.h"

namespace test {

using Doubles = std::vector<double>;

/// Returns a group with steps and decay that are large enough to be visible after a few calls.
inline dsopt_group muon_group(int32_t products = DSOPT_DTYPE_F32, double weight_decay = 0.1) {
    dsopt_group group = group_of(DSOPT_ALGORITHM_MUON, 0.02, weight_decay);
    group.ns_dtype = products;
    return group;
}
/// Largest relative error of an orthogonalised matrix, by the dtype of products.
inline double ns_bound(int32_t products) {
    return products == DSOPT_DTYPE_F32 ? 5e-5 : products == DSOPT_DTYPE_F16 ? 5e-3 : 4e-2;
}

/// The same for a matrix of rank 1, whose products add numbers of equal signs: rounding errors do not cancel.
inline double rank_1_bound(int32_t products) {
    return products == DSOPT_DTYPE_F32 ? 5e-4 : products == DSOPT_DTYPE_F16 ? 2.5e-2 : 0.15;
}

/// A parameter: its shape, and its matrix blocks.
struct Cut {
    std::vector<int64_t> dims;
    int64_t rows = 0, cols = 0; // both 0: one matrix
    int32_t flags = 0;
    int32_t param = DSOPT_DTYPE_F32, grad = DSOPT_DTYPE_F32;
    int64_t flat = 0; // number of elements, if there are no dims
    const char *name = nullptr;
    int64_t offset = 0;

    int64_t numel() const {
        int64_t product = dims.empty() ? flat : 1;
        for (const int64_t dim : dims) product *= dim;
        return product;
    }
    dsopt_param registered() const {
        dsopt_param registered{};
        registered.name = name;
        registered.dims = dims.empty() ? nullptr : dims.data();
        registered.ndim = int32_t(dims.size());
        registered.flags = flags;
        registered.offset = offset;
        registered.rows = rows;
        registered.cols = cols;
        return registered;
    }
};
inline Cut matrix(int64_t rows, int64_t cols, int32_t param = DSOPT_DTYPE_F32, int32_t grad = DSOPT_DTYPE_F32) {
    return {{rows, cols}, 0, 0, 0, param, grad};
}
inline std::vector<Shape> cut_shapes(const std::vector<Cut> &cuts) {
    std::vector<Shape> shapes;
    for (const Cut &cut : cuts) shapes.push_back({cut.numel(), cut.param, cut.grad});
    return shapes;
}
inline std::vector<dsopt_param> params_of(const std::vector<Cut> &cuts) {
    std::vector<dsopt_param> params;
    for (const Cut &cut : cuts) params.push_back(cut.registered());
    return params;
}
/// Creates an optimizer with one group of these parameters.
inline Trainer muon_trainer(const std::vector<Cut> &cuts, const dsopt_group &group = muon_group(),
                            const dsopt_optimizer_desc &desc = optimizer_desc(),
                            const dsopt_context_desc &context = context_desc()) {
    Trainer trainer(cut_shapes(cuts), desc, context);
    trainer.add(group, params_of(cuts));
    return trainer;
}

/// One matrix of a parameter, as the indices of its elements, row by row.
struct Matrix {
    int64_t rows, cols;
    std::vector<size_t> at;
};
inline std::vector<Matrix> matrices_of(const Cut &cut) {
    const int64_t rows = cut.rows != 0 ? cut.rows : cut.dims.at(0), cols = cut.cols != 0 ? cut.cols : cut.dims.at(1);
    int64_t row_length = cut.dims.empty() ? cols : cut.dims.back(), product = 1; // of a row of the tensor
    for (size_t k = cut.dims.size(); k-- > 0;) {
        product *= cut.dims[k];
        if (product == cols) row_length = cols;
    }
    std::vector<Matrix> list;
    if (cut.numel() == 0) return list;
    for (int64_t top = 0; top < cut.numel() / row_length; top += rows)
        for (int64_t left = 0; left < row_length; left += cols) {
            Matrix block{rows, cols, {}};
            for (int64_t r = top; r < top + rows; ++r)
                for (int64_t c = left; c < left + cols; ++c) block.at.push_back(size_t(r * row_length + c));
            list.push_back(std::move(block));
        }
    return list;
}

// ---------------------------------------------------------------------------------------------------------- reference
inline double norm_of(const Doubles &values) {
    double squares = 0;
    for (const double value : values) squares += value * value;
    return std::sqrt(squares);
}

/// Coefficients of iteration `k`, as published.
inline std::array<double, 3> ns_triple(const dsopt_group &group, int k) {
    constexpr double express[5][3] = {{8.28721201814563, -23.595886519098837, 17.300387312530933},
                                      {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                                      {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                                      {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                                      {2.300652019954817, -1.6689039845747493, 0.4188073119525673}};
    constexpr double you[5][3] = {{4.0848, -6.8946, 2.9270},
                                  {3.9505, -6.3029, 2.6377},
                                  {3.7418, -5.5913, 2.3037},
                                  {2.8769, -3.1427, 1.2046},
                                  {2.8366, -3.0525, 1.2012}};
    const int row = std::min(k, 4);
    switch (group.ns_schedule) {
    case DSOPT_NS_POLAR_EXPRESS:
        return {express[row][0] / 1.05, express[row][1] / std::pow(1.05, 3), express[row][2] / std::pow(1.05, 5)};
    case DSOPT_NS_YOU: return {you[row][0], you[row][1], you[row][2]};
    default: return {group.ns_a, group.ns_b, group.ns_c};
    }
}

/// Returns the orthogonalised matrix.
inline Doubles newton_schulz(const dsopt_group &group, int64_t rows, int64_t cols, const Doubles &u) {
    const bool tall = rows > cols;
    const auto n = size_t(std::min(rows, cols)), m = size_t(std::max(rows, cols));
    const double norm = std::max(norm_of(u), group.eps);
    Doubles x(n * m), next(n * m), a(n * n), b(n * n);
    for (size_t i = 0; i < n; ++i)
        for (size_t j = 0; j < m; ++j) x[i * m + j] = (tall ? u[j * n + i] : u[i * m + j]) / norm;
    for (int k = 0; k < group.ns_steps; ++k) {
        const auto [first, third, fifth] = ns_triple(group, k);
        for (size_t i = 0; i < n; ++i)
            for (size_t j = i; j < n; ++j) {
                double sum = 0;
                for (size_t l = 0; l < m; ++l) sum += x[i * m + l] * x[j * m + l];
                a[i * n + j] = a[j * n + i] = sum;
            }
        for (size_t i = 0; i < n; ++i)
            for (size_t j = i; j < n; ++j) {
                double sum = 0;
                for (size_t l = 0; l < n; ++l) sum += a[i * n + l] * a[j * n + l];
                b[i * n + j] = b[j * n + i] = third * a[i * n + j] + fifth * sum;
            }
        for (size_t i = 0; i < n; ++i) {
            for (size_t j = 0; j < m; ++j) next[i * m + j] = first * x[i * m + j];
            for (size_t l = 0; l < n; ++l)
                for (size_t j = 0; j < m; ++j) next[i * m + j] += b[i * n + l] * x[l * m + j];
        }
        x.swap(next);
    }
    if (!tall) return x;
    for (size_t i = 0; i < n; ++i)
        for (size_t j = 0; j < m; ++j) next[j * n + i] = x[i * m + j];
    return next;
}

/// Returns the factor of the learning rate.
inline double adjustment(const dsopt_group &group, const Cut &cut, const Matrix &block) {
    const bool swapped = (cut.flags & DSOPT_PARAM_ROWS_ARE_INPUTS) != 0;
    const auto outputs = double(swapped ? block.cols : block.rows), inputs = double(swapped ? block.rows : block.cols);
    switch (group.adjust) {
    case DSOPT_ADJUST_ORIGINAL: return std::sqrt(std::max(1.0, outputs / inputs));
    case DSOPT_ADJUST_MATCH_RMS_ADAMW: return 0.2 * std::sqrt(std::max(outputs, inputs));
    case DSOPT_ADJUST_SPECTRAL: return std::sqrt(outputs / inputs);
    default: return 1;
    }
}

/// One parameter in double precision.
struct MuonReference {
    dsopt_group group;
    Cut cut;
    Doubles p, m = {};
    int64_t t = 0;
    double length = 0; // of the path: sum of the norms of the updates, which the tolerance is relative to

    void step(const Doubles &g) {
        m.resize(p.size());
        ++t;
        const double mu = group.momentum;
        const bool corrected = !(group.flags & DSOPT_GROUP_NO_BIAS_CORRECTION);
        const double now = corrected ? 1 - std::pow(mu, double(t)) : 1;
        const double after = corrected ? 1 - std::pow(mu, double(t + 1)) : 1;
        double squares = 0;
        for (const Matrix &block : matrices_of(cut)) {
            Doubles u;
            for (const size_t i : block.at) {
                m[i] = mu * m[i] + (1 - mu) * g[i];
                u.push_back(group.flags & DSOPT_GROUP_NESTEROV ? mu / after * m[i] + (1 - mu) / now * g[i] : m[i]);
            }
            const Doubles o = newton_schulz(group, block.rows, block.cols, u);
            const double lr = group.lr * adjustment(group, cut, block);
            for (size_t k = 0; k < o.size(); ++k) {
                double &weight = p[block.at[k]];
                weight = weight * (1 - group.lr * group.weight_decay) - lr * o[k];
            }
            squares += lr * lr * norm_of(o) * norm_of(o);
        }
        length += std::sqrt(squares);
    }
};

inline Doubles doubles_of(const std::vector<float> &values) { return {values.begin(), values.end()}; }
inline Doubles difference(const Doubles &a, const Doubles &b) {
    Doubles result(a.size());
    for (size_t i = 0; i < a.size(); ++i) result[i] = a[i] - b[i];
    return result;
}
inline double peak_of(const Doubles &values) {
    double peak = 0;
    for (const double value : values) peak = std::max(peak, std::fabs(value));
    return peak;
}

} // namespace test
