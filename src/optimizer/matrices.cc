// SPDX-License-Identifier: Apache-2.0
#include "optimizer/matrices.h"
#include "optimizer/group.h"
#include <algorithm>
#include <numeric>
#include <tuple>

namespace dsopt {
namespace {

constexpr int64_t kMostRows = INT32_MAX; // and columns

/// Returns the distance between rows of `cols` elements in a tensor; 0: it has no such rows.
int64_t row_stride(const dsopt_param &given, int64_t cols) {
    if (given.ndim <= 1) return cols; // flat
    int64_t product = 1;
    for (int k = given.ndim; k-- > 0;)
        if ((product *= given.dims[k]) == cols) return cols;
    const int64_t last = given.dims[given.ndim - 1];
    return last % cols == 0 ? last : 0;
}

Dtype input_of(const dsopt_group &group, const MatrixShape &shape) {
    return ns_input(shape.n(), Dtype(group.ns_dtype));
}

NsRecipe recipe_of(const dsopt_group &group, Dtype input) {
    const NsTriples triples = ns_triples_of(group);
    NsRecipe recipe{.triple = {}, .triples = triples.count, .steps = group.ns_steps, .input = input, .reserved = {}};
    for (int k = 0; k < triples.count; ++k) {
        const NsTriple &triple = triples.at[k];
        float *const to = recipe.triple[k];
        to[0] = float(triple.a), to[1] = float(triple.b), to[2] = float(triple.c);
    }
    return recipe;
}

/// Returns the smallest number of matrices of a tensor whose elements end at a leaf: sums of a leaf are not divided
/// among batches.
int64_t smallest_part(const MatrixShape &shape) { return shape.across() * (kLeaf / std::gcd(shape.band(), kLeaf)); }

} // namespace

std::string to_text(const MatrixShape &shape) { return std::to_string(shape.rows) + "," + std::to_string(shape.cols); }

MatrixShape matrix_shape_of(const dsopt_param &given, const Param &param, const dsopt_group &rules) {
    const char *const name = param.name.c_str();
    const bool is_set = given.rows != 0 || given.cols != 0;
    if (!is_matrix_rule(rules.algorithm)) return {};
    if (!is_set && given.ndim != 2)
        throw Error(DSOPT_ERR_ARGUMENT,
                    "parameter '%s' has %d dims and no rows and cols: muon needs 2 dims, or rows and cols", name,
                    given.ndim);
    MatrixShape shape{given.rows, given.cols, given.cols};
    if (!is_set) shape = {given.dims[0], given.dims[1], given.dims[1]};
    if (is_set && (shape.rows <= 0 || shape.cols <= 0))
        throw Error(DSOPT_ERR_ARGUMENT, "parameter '%s' has rows %lld and cols %lld, both must be above 0", name,
                    ll(given.rows), ll(given.cols));
    if (shape.rows > kMostRows || shape.cols > kMostRows)
        throw Error(DSOPT_ERR_ARGUMENT, "parameter '%s' has matrices of %lld x %lld, rows and cols must be below 2^31",
                    name, ll(shape.rows), ll(shape.cols));
    if (param.numel == 0) return is_set ? shape : MatrixShape{};
    if (is_set) shape.stride = row_stride(given, shape.cols);
    if (shape.stride == 0 || param.numel / shape.stride % shape.rows != 0 || param.numel % shape.band() != 0)
        throw Error(DSOPT_ERR_SHAPE, "parameter '%s' of %lld elements cannot be cut into matrices of %lld x %lld", name,
                    ll(param.numel), ll(shape.rows), ll(shape.cols));
    return shape;
}

Matrices::Matrices(const std::vector<Param> &params, const std::vector<dsopt_group> &groups, const RankParts *parts,
                   int ranks, int rank) :
    ranks_(ranks),
    rank_(rank) {
    const auto has_matrices = [&](size_t i) {
        return params[i].numel != 0 && params[i].matrix.rows != 0 && (parts == nullptr || parts->part(i).numel != 0);
    };
    const auto is_alike = [&](const Param &a, const Param &b) {
        const auto inputs = [](const Param &param) { return param.flags & DSOPT_PARAM_ROWS_ARE_INPUTS; };
        return a.group == b.group && a.matrix.rows == b.matrix.rows && a.matrix.cols == b.matrix.cols &&
               a.matrix.stride == b.matrix.stride && inputs(a) == inputs(b);
    };
    std::vector<bool> done(params.size());
    for (size_t k = 0; k < params.size(); ++k) {
        if (done[k] || !has_matrices(k)) continue;
        const Param &model = params[k];
        const MatrixShape &shape = model.matrix;
        const Dtype input = input_of(groups[size_t(model.group)], shape);
        const int64_t capacity = std::max<int64_t>(kMatrixWorkspace / matrix_bytes(shape, input), 1),
                      part = smallest_part(shape);
        const auto add_batch = [&] {
            batches_.push_back({.shape = shape,
                                .adjust = 0,
                                .recipe = {.triple = {}, .triples = 0, .steps = 0, .input = input, .reserved = {}},
                                .group = model.group,
                                .reserved = 0,
                                .first_job = int64_t(jobs_.size()),
                                .jobs = 0,
                                .first = counts_.matrices,
                                .count = 0});
            rows_are_inputs_.push_back((model.flags & DSOPT_PARAM_ROWS_ARE_INPUTS) != 0);
        };
        add_batch();
        for (size_t i = k; i < params.size(); ++i) {
            if (done[i] || !has_matrices(i) || !is_alike(params[i], model)) continue;
            done[i] = true;
            const int64_t all = params[i].numel / shape.numel();
            for (int64_t first = 0; first < all;) {
                const int64_t left = all - first, space = capacity - batches_.back().count;
                int64_t count = left <= space ? left : space / part * part;
                if (count <= 0 && batches_.back().count != 0) {
                    add_batch();
                    continue;
                }
                if (count <= 0) count = std::min(left, part);
                MatrixBatch &batch = batches_.back();
                jobs_.push_back({int64_t(i), first, count, batch.count});
                ++batch.jobs;
                batch.count += count;
                counts_.matrices += count;
                first += count;
            }
        }
    }
    counts_.jobs = int64_t(jobs_.size());
    counts_.batches = int64_t(batches_.size());
    counts_.split = ranks > 1;
    if (counts_.split) assign_ranks();
}

/// Partitions matrices among ranks by the cost of an iteration. Costs are in the order of the list, not of batches.
void Matrices::assign_ranks() {
    struct Entry {
        int64_t param, of_param, matrix;
        const MatrixBatch *batch;
    };
    std::vector<Entry> entries; // in the order of batches
    for (const MatrixBatch &batch : batches_)
        for (int64_t k = batch.first_job; k < batch.first_job + batch.jobs; ++k) {
            const MatrixJob &job = jobs_[size_t(k)];
            for (int64_t j = 0; j < job.count; ++j)
                entries.push_back({job.tensor, job.first + j, batch.first + job.index + j, &batch});
        }
    std::vector<Entry> list = entries;
    std::sort(list.begin(), list.end(), [](const Entry &a, const Entry &b) {
        return std::tie(a.param, a.of_param) < std::tie(b.param, b.of_param);
    });
    std::vector<double> costs;
    for (const Entry &entry : list) costs.push_back(entry.batch->shape.cost());
    const std::vector<int> ranks = partition_by_cost(costs, ranks_);
    places_.resize(list.size());
    for (size_t k = 0; k < list.size(); ++k) places_[size_t(list[k].matrix)].rank = ranks[k];
    std::vector<int64_t> bytes(size_t(ranks_), 0);
    for (const Entry &entry : entries) {
        MatrixPlace &place = places_[size_t(entry.matrix)];
        int64_t &end = bytes[size_t(place.rank)];
        place.offset = end;
        end += round_up(entry.batch->shape.numel() * int64_t(dtype_size(entry.batch->recipe.input)), int64_t(16));
    }
    row_bytes_ = round_up(*std::max_element(bytes.begin(), bytes.end()), int64_t(kCacheLine));
}

MatrixPlan Matrices::plan(const std::vector<dsopt_group> &groups, const StepTable &table, bool reused) const {
    MatrixPlan plan{.jobs = table.matrix_jobs,
                    .batches = table.matrix_batches,
                    .places = table.matrix_places,
                    .counts = counts_,
                    .rank = rank_,
                    .row_bytes = row_bytes_,
                    .row = nullptr,
                    .rows = nullptr,
                    .workspace = nullptr,
                    .scratch = nullptr};
    if (reused) return plan;
    std::copy(jobs_.begin(), jobs_.end(), plan.jobs);
    std::copy(places_.begin(), places_.end(), plan.places);
    for (size_t i = 0; i < batches_.size(); ++i) {
        MatrixBatch &batch = plan.batches[i] = batches_[i];
        const dsopt_group &group = groups[size_t(batch.group)];
        const int64_t rows = batch.shape.rows, cols = batch.shape.cols;
        batch.recipe = recipe_of(group, batch.recipe.input);
        batch.adjust =
            rows_are_inputs_[i] ? adjustment(group.adjust, cols, rows) : adjustment(group.adjust, rows, cols);
    }
    return plan;
}

} // namespace dsopt
