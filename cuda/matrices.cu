// SPDX-License-Identifier: Apache-2.0
// Passes over matrices. cuBLASLt multiplies; the kernels here do the element-wise rest. In a skipped step the kernels
// change nothing, and products of old workspace are not used.
#include "formats.cuh"
#include "kernels.h"
#include "matrix_memory.h"
#include "reduce.cuh"

namespace dsopt::gpu {

/// Passed by value to the kernels. Pointers are device pointers.
struct DeviceMatrices {
    DevicePlan d;
    MatrixBatch batch;
    MatrixMemory memory;
    const MatrixJob *jobs;     // of the batch
    const MatrixPlace *places; // of the batch; NULL: this rank orthogonalises all
    int64_t rank, row_bytes;
    char *row, *rows;
    __device__ __forceinline__ bool is_mine(int64_t matrix) const {
        return places == nullptr || places[matrix].rank == rank;
    }
};

/// Divides integers that are not negative. On a device a division of 64 bits takes four times that of 32 bits.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
    if (uint64_t(a | b) >> 32 != 0) return a / b;
    return int64_t(uint32_t(a) / uint32_t(b));
}

// ---------------------------------------------------------------------------------------------------- jobs of a block
/// The job of a block's current matrices, in shared memory.
struct SharedMatrices {
    SharedTensor tensor; // its job's tensor
    MatrixJob job;
    MatrixApply rule;
    uint64_t key;    // of the momentum, if it is rounded at random
    int64_t ordinal; // of the job in the batch
    bool active;     // the step updates the tensor
};

/// Loads a job and its tensor. Called by a whole block.
__device__ __forceinline__ void load_job(const DeviceMatrices &b, int64_t index, SharedMatrices &m) {
    SharedTensor &s = m.tensor;
    __syncthreads();
    if (threadIdx.x < 32) {
        const int64_t tensor = b.jobs[index].tensor;
        const auto *const from = reinterpret_cast<const uint64_t *>(b.d.plan.jobs + tensor);
        if (threadIdx.x < LeavesAhead::words) reinterpret_cast<uint64_t *>(&s.job)[threadIdx.x] = from[threadIdx.x];
        __syncwarp();
        if (threadIdx.x == 0) {
            m.job = b.jobs[index];
            m.ordinal = index;
            m.active = s.job.owner == Owner::matrix;
            s.aligned = all_aligned(s.job);
            s.tensor = int32_t(tensor);
            find_scalars(b.d, s.tensor, s);
            m.rule = MatrixApply(s.hyper, b.batch.adjust);
            m.key = moment_key(s.job.random_key, MomentKind::gradient, s.step);
        }
    }
    __syncthreads();
}

/// Calls body(item) for this block's items, which are consecutive, with the job of each item in `m`. Job k has items
/// first_of(k) to first_of(k + 1) - 1.
template <class First, class Body>
__device__ __forceinline__ void for_items(const DeviceMatrices &b, int64_t items, SharedMatrices &m,
                                          const First &first_of, const Body &body) {
    if (threadIdx.x == 0) m.tensor.group = -1, m.tensor.step = -1, m.tensor.trust = 1;
    const int64_t begin = items * blockIdx.x / gridDim.x, end = items * (blockIdx.x + 1) / gridDim.x;
    int64_t job = 0, next = 0; // `next`: first item of the next job
    for (int64_t item = begin; item < end; ++item) {
        if (item >= next) {
            if (item == begin)
                for (int64_t last = b.batch.jobs; last - job > 1;) { // binary search
                    const int64_t middle = (job + last) / 2;
                    (first_of(middle) <= item ? job : last) = middle;
                }
            else
                ++job;
            load_job(b, job, m);
            next = job + 1 < b.batch.jobs ? first_of(job + 1) : items;
        }
        if (m.active) body(item);
    }
}

/// Elements of a leaf of a matrix, in its row-major order: where they are in the tensor and in a workspace with rows of
/// `ld` elements.
struct MatrixLeaf {
    int64_t cols, stride, ld;
    int64_t element, packed; // of the first element of the first element's row
    int64_t col;             // of the first element
    Leaf where;

    __device__ __forceinline__ MatrixLeaf(const MatrixShape &shape, int64_t rows_before, int64_t first, int64_t width,
                                          int64_t leaf) :
        cols(shape.cols),
        stride(shape.stride),
        ld(width),
        where(shape.numel(), leaf) {
        const int64_t row = quotient(where.begin, cols);
        col = where.begin - row * cols;
        element = first + row * stride;
        packed = (rows_before + row) * ld;
    }
    struct At {
        int64_t element, packed;
        bool ends_row; // V elements from here on are the last ones of a row
    };
    template <int V> __device__ __forceinline__ At at(int i) const {
        const int64_t from_row = col + i, row = quotient(from_row, cols), in_row = from_row - row * cols;
        return {element + row * stride + in_row, packed + row * ld + in_row, in_row + V == cols};
    }
};

// ------------------------------------------------------------------------------------------------------------ kernels
/// Rounds as products' inputs are.
template <int V> __device__ __forceinline__ Pack<V> round_input(const Pack<V> &x, Dtype input) {
    if (input == Dtype::f32) return x;
    Pack<V> y;
    unrolled<V>([&](int k) INLINED {
        const float rounded = half_to_f32(uint16_t(f32_to_half(x.at[k], input)), input);
        y.at[k] = rounded < kLeastInput && rounded > -kLeastInput ? 0.0f : rounded;
    });
    return y;
}

__device__ __forceinline__ int64_t first_matrix(const DeviceMatrices &b, int64_t job) { return b.jobs[job].index; }

/// Calls body(matrix, leaf) for the leaves of the batch's matrices, with the job of each in `m`.
template <class Body>
__device__ __forceinline__ void for_matrix_leaves(const DeviceMatrices &b, SharedMatrices &m, const Body &body) {
    const int64_t leaves = b.batch.shape.leaves();
    for_items(
        b, b.batch.count * leaves, m, [&](int64_t job) INLINED { return first_matrix(b, job) * leaves; },
        [&](int64_t item) INLINED {
            const int64_t matrix = quotient(item, leaves);
            body(matrix, item - matrix * leaves);
        });
}

/// Moves momenta, and stores what is orthogonalised, with the sums of squares of its leaves.
__global__ void __launch_bounds__(kThreads, kBlocks)
    form_kernel(GRID_CONSTANT const PdlArgument<DeviceMatrices> argument) {
    const DeviceMatrices &b = argument.begin_kernel();
    DYNAMIC_SHARED(float, tile);
    __shared__ SharedMatrices m;
    if (skipped(b.d)) return;
    const MatrixShape &shape = b.batch.shape;
    for_matrix_leaves(b, m, [&](int64_t matrix, int64_t index) INLINED {
        const SharedTensor &s = m.tensor;
        const TensorJob &job = s.job;
        const MatrixLeaf leaf(shape, matrix * shape.rows, shape.first(m.job.first + matrix - m.job.index), b.memory.ld,
                              index);
        const Moment moment = job.stored_moment(0);
        const Slot momentum = plain_slot(moment);
        const bool random = moment.format == Format::bf16_random, mine = b.is_mine(matrix);
        for_packs(leaf.where.n, s.aligned && shape.cols % 4 == 0, [&]<int V>(Width<V>, int i) INLINED {
            const auto at = leaf.at<V>(i);
            Pack<V> g = fetch_gradient<V>(job, at.element), v = fetch<V>(momentum, at.element), u{};
            g = convert_to_f32(g, job.grad().format);
            v = convert_to_f32(v, momentum.format);
            visit_rule<Passes::matrix>(s.rule, [&](auto formula) INLINED {
                const typename decltype(formula)::type::Form rule{s.scalars};
                unrolled<V>([&](int k) INLINED { rule(g.at[k], v.at[k], u.at[k]); });
            });
            if (random)
                unrolled<V>([&](int k) INLINED {
                    v.at[k] =
                        round_stochastic_bf16(v.at[k], random_bits(m.key, uint64_t(job.range.begin + at.element + k)));
                });
            store(v, momentum, at.element);
            if (!mine) return;
            to_tile(u, tile + i);
            store(u, b.memory.x, at.packed);
            for (int64_t k = leaf.cols; at.ends_row && k < leaf.ld; ++k) b.memory.x[at.packed + V - leaf.cols + k] = 0;
        });
        if (!mine) return;
        __syncthreads();
        sum_tiles<1>(tile, leaf.where.n,
                     [&](int, double sum) INLINED { b.memory.squares[matrix * shape.leaves() + index] = sum; });
    });
}

/// Rounds X to the inputs of products. `Normalise`: divides X by its norm before.
template <bool Normalise>
__global__ void __launch_bounds__(kThreads, 4) inputs_kernel(GRID_CONSTANT const PdlArgument<DeviceMatrices> argument) {
    const DeviceMatrices &b = argument.begin_kernel();
    __shared__ double scale;
    if (skipped(b.d)) return;
    const MatrixShape &shape = b.batch.shape;
    const int64_t padded = b.memory.padded(shape), leaves = leaves_of(padded), items = b.batch.count * leaves;
    const Slot inputs{b.memory.inputs, b.batch.recipe.input};
    const int64_t begin = items * blockIdx.x / gridDim.x, end = items * (blockIdx.x + 1) / gridDim.x;
    for (int64_t item = begin; item < end; ++item) {
        const int64_t matrix = quotient(item, leaves), index = item - matrix * leaves;
        if (!b.is_mine(matrix)) continue;
        if (Normalise && (item == begin || index == 0)) {
            __syncthreads();
            if (threadIdx.x < 32) {
                const double *const squares = b.memory.squares + matrix * shape.leaves();
                const double sum = add_by_warp(int32_t(shape.leaves()), [&](int32_t i) INLINED { return squares[i]; });
                if (threadIdx.x == 0) scale = ns_scale(sum, hyper_of(b.d.plan, b.batch.group).eps);
            }
            __syncthreads();
        }
        const Leaf where(padded, index);
        for_packs(where.n, true, [&]<int V>(Width<V>, int offset) INLINED {
            const int64_t i = matrix * padded + where.begin + offset;
            Pack<V> x = load<V>(b.memory.x, i);
            if constexpr (Normalise) {
                unrolled<V>([&](int k) INLINED { x.at[k] = float(double(x.at[k]) * scale); });
                store(x, b.memory.x, i);
            }
            store(round_input(x, inputs.format), inputs, i);
        });
    }
}

/// Stores this rank's results to its row, or loads all results from the rows.
template <bool Sends>
__global__ void __launch_bounds__(kThreads, 4)
    results_kernel(GRID_CONSTANT const PdlArgument<DeviceMatrices> argument) {
    const DeviceMatrices &b = argument.begin_kernel();
    __shared__ SharedMatrices m;
    if (skipped(b.d)) return;
    const MatrixShape &shape = b.batch.shape;
    for_matrix_leaves(b, m, [&](int64_t matrix, int64_t index) INLINED {
        const MatrixPlace place = b.places[matrix];
        if (Sends && place.rank != b.rank) return;
        char *const row = Sends ? b.row : b.rows + place.rank * b.row_bytes;
        const Slot sent{row + place.offset, b.batch.recipe.input};
        const MatrixLeaf leaf(shape, matrix * shape.rows, 0, b.memory.ld, index);
        for_packs(leaf.where.n, shape.cols % 4 == 0, [&]<int V>(Width<V>, int i) INLINED {
            const int64_t packed = leaf.at<V>(i).packed, in_row = leaf.where.begin + i;
            if constexpr (Sends)
                store(round_input(load<V>(b.memory.x, packed), sent.format), sent, in_row);
            else
                store(load<V>(sent, in_row), b.memory.x, packed);
        });
    });
}

/// Position of a leaf's first element among the matrices of a batch, in shared memory.
struct TensorPosition {
    int64_t col;          // in a row of the tensor
    int64_t row;          // in a band
    int64_t first_matrix; // of the band; index in the batch
};
/// Returns the index in X of the i-th element after the first one of a leaf of the tensor.
__device__ __forceinline__ int64_t packed_index(const MatrixShape &shape, const TensorPosition &first, int64_t ld,
                                                int i) {
    const int64_t from_row = first.col + i, rows_after = quotient(from_row, shape.stride);
    int64_t col = from_row - rows_after * shape.stride, row = first.row + rows_after;
    if (shape.stride == shape.cols) return (first.first_matrix * shape.rows + row) * ld + col; // rows follow on
    const int64_t bands = quotient(row, shape.rows), across = quotient(col, shape.cols);
    row -= bands * shape.rows;
    col -= across * shape.cols;
    return ((first.first_matrix + bands * shape.across() + across) * shape.rows + row) * ld + col;
}

/// Loads results of a block, rounded.
__device__ __forceinline__ Eight load_results(const DeviceMatrices &b, const TensorPosition &first, const Position &at,
                                              const Block &block) {
    const MatrixShape &shape = b.batch.shape;
    const auto index = [&](int k)
                           INLINED { return packed_index(shape, first, b.memory.ld, at.first + block.in_block(k)); };
    Eight o{};
    if (block.fours && shape.cols % 4 == 0)
        unrolled<2>([&](int half) INLINED {
            const Pack<4> four = round_input(load<4>(b.memory.x, index(4 * half)), b.batch.recipe.input);
            unrolled<4>([&](int k) INLINED { o.at[4 * half + k] = four.at[k]; });
        });
    else
        unrolled<kPerThread>([&](int k) INLINED {
            if (block.has(k)) o.at[k] = round_input(load<1>(b.memory.x, index(k)), b.batch.recipe.input).at[0];
        });
    return o;
}

/// Moves the weights of tensors by the results. A block processes a leaf of a tensor, of which several matrices may
/// have elements.
__global__ void __launch_bounds__(kThreads, kBlocks)
    apply_matrices_kernel(GRID_CONSTANT const PdlArgument<DeviceMatrices> argument) {
    const DeviceMatrices &b = argument.begin_kernel();
    DYNAMIC_SHARED(float, memory);
    __shared__ SharedMatrices m;
    __shared__ Position positions[kWarps];
    __shared__ TensorPosition first;
    if (skipped(b.d)) return;
    const StepPlan &plan = b.d.plan;
    const MatrixShape &shape = b.batch.shape;
    const Tiles tiles{memory, memory + kLeaf};
    // At least as many items as the job has leaves: no table has the leaves of jobs.
    const auto first_of = [&](int64_t job) INLINED { return first_matrix(b, job) * shape.numel() / kLeaf + job; };
    for_items(b, b.batch.count * shape.numel() / kLeaf + b.batch.jobs, m, first_of, [&](int64_t item) INLINED {
        const int64_t band = m.job.first / shape.across(), begin = band * shape.band();
        const int64_t end = begin + m.job.count * shape.numel();
        const int64_t job_item = item - (m.job.index * shape.numel() / kLeaf + m.ordinal);
        if (begin + job_item * kLeaf >= end) return;
        const Leaf where(end, begin / kLeaf + job_item);
        __syncthreads(); // the position of the last leaf has been used
        if (threadIdx.x == 0) {
            const int64_t row = where.begin / shape.stride, its_band = row / shape.rows;
            first = {where.begin - row * shape.stride, row - its_band * shape.rows,
                     m.job.index + (its_band - band) * shape.across()};
        }
        __syncthreads();
        for_blocks(positions, where, m.tensor.aligned, [&](const Position &at) INLINED {
            const TensorJob &job = m.tensor.job;
            Eight p = load_masters(job, at.block());
            if (keeps_old(plan)) to_tile(p, tiles.a + at.first, at.block());
            const Eight o = load_results(b, first, at, at.block());
            unrolled<kPerThread>([&](int k) INLINED { m.rule(p.at[k], o.at[k]); });
            store_masters(plan, m.tensor, p, tiles.a + at.first, at.block());
            if (plan.policy.report_norms) store_changes(p, tiles, at);
        });
        if (plan.policy.report_norms) sum_tiles(plan, m.tensor.job, where, tiles);
    });
}

class MatrixStep final : public MatrixStepKernels {
public:
    MatrixStep(const StepPlan &plan, const DevicePlan &d, const StepTable &table, Lt &lt, const Launcher &launcher) :
        plan_(plan),
        matrices_(*plan.matrices),
        d_(d),
        table_(table),
        lt_(lt),
        launcher_(launcher) {
        for (int64_t i = 0; i < matrices_.counts.batches; ++i) { // before anything is enqueued: this may fail
            const MatrixBatch &batch = matrices_.batches[i];
            const MatrixMemory memory(batch, nullptr);
            for_runs(batch, [&](const MatrixRun &run) {
                const MatrixProducts products(batch, memory, run);
                for (const LtShape *shape : {&products.gram, &products.square, &products.update}) lt_.prepare(*shape);
            });
        }
    }

    void run(MatrixPass pass, int64_t index) override {
        const MatrixBatch &batch = matrices_.batches[index];
        if (!has_active(batch)) return;
        const MatrixMemory memory(batch, matrices_.workspace);
        const MatrixShape &shape = batch.shape;
        const bool split = matrices_.places != nullptr;
        const DeviceMatrices b{.d = d_,
                               .batch = batch,
                               .memory = memory,
                               .jobs = table_.matrix_jobs + batch.first_job,
                               .places = split ? table_.matrix_places + batch.first : nullptr,
                               .rank = matrices_.rank,
                               .row_bytes = matrices_.row_bytes,
                               .row = matrices_.row,
                               .rows = matrices_.rows};
        const int64_t leaves = batch.count * shape.leaves();
        switch (pass) {
        case MatrixPass::form:
            // Of matrices that other ranks have, a collective may be next.
            launcher_.launch_grid({leaves, kTileBytes}, {"form", kernel_if(!split)}, form_kernel, b);
            return;
        case MatrixPass::orthogonalize: return orthogonalize(b);
        case MatrixPass::send: launcher_.launch_grid(leaves, "send", results_kernel<true>, b); return;
        case MatrixPass::take: launcher_.launch_grid(leaves, {"take", Next::kernel}, results_kernel<false>, b); return;
        case MatrixPass::apply:
            launcher_.launch_grid(
                {batch.count * shape.numel() / kLeaf + batch.jobs, keeps_old(plan_) ? 2 * kTileBytes : 0},
                "apply_matrices", apply_matrices_kernel, b);
            return;
        }
    }

private:
    bool is_active(const MatrixJob &job) const { return plan_.jobs[job.tensor].owner == Owner::matrix; }
    bool has_active(const MatrixBatch &batch) const {
        const MatrixJob *const jobs = matrices_.jobs + batch.first_job;
        return std::any_of(jobs, jobs + batch.jobs, [this](const MatrixJob &job) { return is_active(job); });
    }

    /// Calls body(run) for the matrices that this rank orthogonalises in this step, as runs with a constant distance.
    template <class Body> void for_runs(const MatrixBatch &batch, const Body &body) const {
        MatrixRun run{};
        const auto add = [&](int64_t matrix) {
            const int64_t step = matrix - (run.first + (run.count - 1) * run.step);
            if (run.count == 0 || (run.count > 1 && step != run.step) || run.count == kLtMostMatrices) {
                if (run.count != 0) body(run);
                run = {matrix, 0, 1};
            } else {
                run.step = step;
                ++run.count;
            }
        };
        for (int64_t k = batch.first_job; k < batch.first_job + batch.jobs; ++k) {
            const MatrixJob &job = matrices_.jobs[k];
            for (int64_t i = job.index; is_active(job) && i < job.index + job.count; ++i)
                if (matrices_.places == nullptr || matrices_.places[batch.first + i].rank == matrices_.rank) add(i);
        }
        if (run.count != 0) body(run);
    }

    void orthogonalize(const DeviceMatrices &b) const {
        const MatrixBatch &batch = b.batch;
        const MatrixMemory &memory = b.memory;
        const MatrixShape &shape = batch.shape;
        const auto size = int64_t(dtype_size(batch.recipe.input));
        const int64_t padded = memory.padded(shape), square_bytes = shape.n() * memory.size_ld * size;
        const int64_t items = batch.count * leaves_of(padded);
        launcher_.launch_grid(items, "normalise", inputs_kernel<true>, b);
        for (int32_t step = 0; step < batch.recipe.steps; ++step) {
            if (step != 0) launcher_.launch_grid(items, "round", inputs_kernel<false>, b);
            const float *const triple = batch.recipe.at(step);
            for_runs(batch, [&](const MatrixRun &run) {
                const MatrixProducts products(batch, memory, run);
                const auto first_of = [&](void *data, int64_t bytes) {
                    return static_cast<void *>(static_cast<char *>(data) + run.first * bytes);
                };
                float *const x = memory.x + run.first * padded;
                void *const inputs = first_of(memory.inputs, padded * size),
                            *const square = first_of(memory.a, square_bytes),
                            *const polynomial = first_of(memory.b, square_bytes);
                const bool tall = shape.tall();
                multiply(memory, products.gram, {1, inputs, inputs, 0, square, square});
                multiply(memory, products.square, {triple[2], square, square, triple[1], square, polynomial});
                multiply(memory, products.update,
                         {1, tall ? polynomial : inputs, tall ? inputs : polynomial, triple[0], x, x});
            });
        }
    }
    void multiply(const MatrixMemory &memory, const LtShape &shape, const LtOperands &operands) const {
        lt_.multiply(shape, operands, memory.lt, launcher_.stream);
    }

    const StepPlan &plan_; // with host pointers to tables
    const MatrixPlan &matrices_;
    const DevicePlan &d_;
    const StepTable &table_; // in device memory
    Lt &lt_;
    const Launcher &launcher_;
};

void with_matrix_kernels(const StepPlan &plan, const DevicePlan &d, const StepTable &table, Lt &lt,
                         const Launcher &launcher, FunctionRef<void(MatrixStepKernels &)> body) {
    MatrixStep step(plan, d, table, lt, launcher);
    body(step);
}
size_t matrix_workspace_bytes(const MatrixBatch &batch) { return MatrixMemory(batch, nullptr).bytes; }

void load_matrix_kernels(KernelLoader &load) {
    load(form_kernel, inputs_kernel<true>, inputs_kernel<false>, results_kernel<true>, results_kernel<false>,
         apply_matrices_kernel);
}

} // namespace dsopt::gpu
