// SPDX-License-Identifier: Apache-2.0
// The passes over matrices on the CPU.
#pragma once
#include "cpu/kernels.h"
#include "cpu/newton_schulz.h"
#include "device/kernels.h"

namespace dsopt::cpu {

/// Workspace of a batch: one block of each array for all matrices.
struct MatrixMemory {
    NsMatrix *matrices; // those of the step's tensors, in the order of the batch
    double *squares;    // of leaves
    float *x;
    char *products; // of ns_workspace_bytes() for each matrix
    size_t bytes;
    /// With `memory` NULL only `bytes`.
    MatrixMemory(const MatrixBatch &batch, void *memory);
};

class MatrixStep final : public MatrixStepKernels {
public:
    MatrixStep(const StepPlan &plan, const Kernels &kernels, const Products &products) :
        plan_(plan),
        matrices_(*plan.matrices),
        kernels_(kernels),
        products_(products) {}
    void run(MatrixPass pass, int64_t batch) override;

private:
    bool is_active(const MatrixJob &job) const { return plan_.jobs[job.tensor].owner == Owner::matrix; }
    bool is_mine(int64_t matrix) const {
        return matrices_.places == nullptr || matrices_.places[matrix].rank == matrices_.rank;
    }
    template <class Visit> void for_leaves(const MatrixBatch &batch, bool mine, const Visit &visit) const;
    void form(const MatrixBatch &batch, const MatrixMemory &memory) const;
    void orthogonalize(const MatrixBatch &batch, const MatrixMemory &memory) const;
    void exchange(const MatrixBatch &batch, const MatrixMemory &memory, bool sends) const;
    void apply(const MatrixBatch &batch, const MatrixMemory &memory) const;

    const StepPlan &plan_;
    const MatrixPlan &matrices_;
    const Kernels &kernels_;
    const Products &products_;
};

} // namespace dsopt::cpu
