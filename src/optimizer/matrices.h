// SPDX-License-Identifier: Apache-2.0
// Matrices of a list of parameters: how tensors are partitioned, the batches of a step, and which rank orthogonalises which
// matrix.
#pragma once
#include "device/step_table.h"
#include "exchange/layout.h"
#include "optimizer/param.h"
#include "optimizer/shard.h"

namespace dsopt {

/// Returns how a parameter is partitioned into matrices. `given.dims` were checked. Throws ARGUMENT, SHAPE or UNSUPPORTED.
MatrixShape matrix_shape_of(const dsopt_param &given, const Param &param, const dsopt_group &rules);
/// Returns the text of a shape's rows and columns for messages and files.
std::string to_text(const MatrixShape &shape);

/// The tables of a list's matrices. They follow from parameters, groups and ranks; numbers of iterations are read from
/// the groups in each step.
class Matrices {
public:
    /// `parts`: of sharded state, else NULL; a rank has the matrices of its own tensors. `ranks`, `rank`: of those that
    /// matrices are partitioned among, 1 and 0 if each rank orthogonalises all.
    Matrices(const std::vector<Param> &params, const std::vector<dsopt_group> &groups, const RankParts *parts,
             int ranks, int rank);
    const MatrixCounts &counts() const { return counts_; }
    const std::vector<MatrixBatch> &batches() const { return batches_; }
    int64_t row_bytes() const { return row_bytes_; }
    int ranks() const { return ranks_; }
    /// Writes the tables, unless `reused`, and returns the plan without its memory.
    MatrixPlan plan(const std::vector<dsopt_group> &groups, const StepTable &table, bool reused) const;

private:
    void assign_ranks();

    const int ranks_, rank_;
    std::vector<MatrixJob> jobs_;
    std::vector<MatrixBatch> batches_;  // without recipe and adjust
    std::vector<bool> rows_are_inputs_; // per batch
    std::vector<MatrixPlace> places_;
    MatrixCounts counts_{};
    int64_t row_bytes_ = 0;
};

} // namespace dsopt
