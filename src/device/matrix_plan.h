// SPDX-License-Identifier: Apache-2.0
// Matrices of a step: the tensors of rules with Passes::matrix, partitioned into matrices, in batches of equal shape.
#pragma once
#include "base/sizes.h"
#include "device/plan.h"
#include "rules/muon.h"

namespace dsopt {

/// How a tensor is partitioned into matrices: into bands of `rows` rows, each of which has matrices of `cols` columns side by
/// side.
struct MatrixShape {
    int64_t rows, cols;
    int64_t stride; // elements from a row of a matrix to its next row; a multiple of `cols`
    DSOPT_HD bool tall() const { return rows > cols; }
    /// Returns the smaller and the larger of rows and columns.
    DSOPT_HD int64_t n() const { return tall() ? cols : rows; }
    DSOPT_HD int64_t m() const { return tall() ? rows : cols; }
    DSOPT_HD int64_t numel() const { return rows * cols; }
    DSOPT_HD int64_t leaves() const { return leaves_of(numel()); }
    /// Returns the number of matrices side by side.
    DSOPT_HD int64_t across() const { return stride / cols; }
    /// Returns a number proportional to the operations of an iteration.
    double cost() const { return double(n()) * double(n()) * (3 * double(m()) + double(n())); }
    DSOPT_HD int64_t band() const { return rows * stride; }
    /// Returns the index of a matrix's first element in the tensor.
    DSOPT_HD int64_t first(int64_t matrix) const { return matrix / across() * band() + matrix % across() * cols; }
};

/// Matrices with fewer rows or columns have fp32 products: rounded inputs would cost accuracy and save nothing.
constexpr int64_t kLeastRounded = 16;
/// Returns the dtype to which the inputs of products of a matrix are rounded. `n`: its rows or columns, whichever is less.
DSOPT_HD constexpr Dtype ns_input(int64_t n, Dtype input) { return n < kLeastRounded ? Dtype::f32 : input; }

/// Newton-Schulz iterations of a batch, with coefficients in fp32. A step after the last triple repeats it.
struct NsRecipe {
    float triple[5][3];
    int32_t triples, steps;
    Dtype input; // to which inputs of products are rounded; F32: they are not rounded
    uint8_t reserved[3] = {};
    DSOPT_HD const float *at(int32_t step) const { return triple[step < triples ? step : triples - 1]; }
};

/// Matrices of one tensor in a batch: whole bands, which begin at a leaf of the tensor.
struct MatrixJob {
    int64_t tensor;
    int64_t first, count; // of the tensor's matrices
    int64_t index;        // of the first one among the matrices of the batch
};
/// Matrices that are processed together. Workspace has room for the largest batch.
struct MatrixBatch {
    MatrixShape shape;
    double adjust; // factor of the learning rate
    NsRecipe recipe;
    int32_t group, reserved;
    int64_t first_job, jobs;
    int64_t first, count; // of all matrices of the list, in the order of batches
};
static_assert(sizeof(MatrixBatch) == 24 + 8 + sizeof(NsRecipe) + 8 + 32 && sizeof(NsRecipe) == 72,
              "no padding: tables of these are compared byte by byte");

/// Bytes of memory that a batch needs. `workspace` does not depend on the machine and its threads.
struct MatrixSizes {
    size_t workspace, scratch;
};

/// The rank that orthogonalises a matrix, if matrices are partitioned among ranks.
struct MatrixPlace {
    int64_t offset; // of the result in the rank's row, in bytes
    int64_t rank;
};

/// Numbers that determine the sizes of tables.
struct MatrixCounts {
    int64_t jobs, batches, matrices;
    bool split;
};

/// Everything that the passes over matrices need. Tables are in host memory (StepTable), `workspace` and rows are in
/// backend memory.
struct MatrixPlan {
    MatrixJob *jobs;
    MatrixBatch *batches;
    MatrixPlace *places; // one per matrix; NULL: this rank orthogonalises all
    MatrixCounts counts;
    int64_t rank;      // this rank among those that matrices are partitioned among
    int64_t row_bytes; // of a rank's results
    char *row, *rows;  // of this rank, and of all ranks
    char *workspace;   // of MatrixSizes::workspace bytes, for one batch
    char *scratch;     // of MatrixSizes::scratch bytes, for one batch; in host memory, aligned to 64 bytes
};

/// Largest workspace of a batch in bytes, unless one tensor's smallest part needs more.
constexpr int64_t kMatrixWorkspace = int64_t(256) << 20;
/// Returns about the bytes of workspace of a matrix: X in fp32, its rounded inputs, and two square matrices.
inline int64_t matrix_bytes(const MatrixShape &shape, Dtype input) {
    const int64_t size = input == Dtype::f32 ? 4 : 2, n = shape.n(), numel = shape.numel();
    return (4 + size) * numel + 2 * size * n * n;
}

/// Passes over the matrices of a batch. In a skipped step they change nothing.
enum class MatrixPass : uint8_t {
    form,          // moves momenta, and stores what is orthogonalised, with its sums of squares
    orthogonalize, // of the matrices that are this rank's
    send,          // stores results to MatrixPlan::row
    take,          // loads results from MatrixPlan::rows
    apply,         // moves weights, writes copies and outputs, zeroes gradients, sums for the report
};

/// The order of passes is in src/step/matrices.cc.
class MatrixStepKernels {
public:
    virtual void run(MatrixPass pass, int64_t batch) = 0;

protected:
    ~MatrixStepKernels() = default;
};

} // namespace dsopt
