// SPDX-License-Identifier: Apache-2.0
// Products of matrices by cuBLASLt, which is loaded at run time.
#pragma once
#include "base/dtype.h"
#include "lt_api.h"
#include "runtime.h"
#include <compare>
#include <map>
#include <mutex>

namespace dsopt::gpu {

/// Workspace of a product. NVIDIA recommends 32 MiB for devices of capability 9.0. The emulated device fills all memory
/// that it allocates, which takes long, and the double of the library needs 1 MiB.
#if defined(CUDA_EMU)
constexpr size_t kLtWorkspace = size_t(1) << 20;
#else
constexpr size_t kLtWorkspace = size_t(32) << 20;
#endif
/// Alignment in bytes of the first element of every matrix, and of every column.
constexpr int64_t kLtAlignment = 16;
/// Largest number of matrices in a call: the library's kernels have one index of the grid for it.
constexpr int64_t kLtMostMatrices = 32768;

/// A matrix of a product, column-major.
struct LtMatrix {
    int64_t ld, stride; // elements from a column to the next column, and from a matrix of the batch to the next one
    bool transposed;
    auto operator<=>(const LtMatrix &) const = default;
};
/// Products D = alpha op(A) op(B) + beta C of a batch. C has the layout of D, and may be D.
struct LtShape {
    int64_t rows, cols, depth;
    LtMatrix a, b, d;
    int32_t count;
    Dtype input, output; // of A and B, and of C and D
    auto operator<=>(const LtShape &) const = default;
};
struct LtOperands {
    float alpha;
    const void *a, *b;
    float beta;
    const void *c;
    void *d;
};

/// A handle of the library, and the algorithms of the shapes so far. Several threads may use it at once.
class Lt : NotCopied {
public:
    /// Loads the library. Throws MISSING.
    explicit Lt(const Gpu &gpu);
    ~Lt();
    /// Chooses the algorithm of a shape, unless it is known. Allocates memory on the host.
    void prepare(const LtShape &shape);
    /// Enqueues the products. Of a shape that is prepared, allocates nothing. `workspace`: of kLtWorkspace bytes,
    /// aligned to 256 bytes.
    void multiply(const LtShape &shape, const LtOperands &operands, void *workspace, cudaStream_t stream);

private:
    struct Plan;
    const Plan &plan_of(const LtShape &shape);
    void check(lt::Status status, const char *what) const;

    const Gpu &gpu_;
    const lt::Api api_;
    lt::Handle handle_ = nullptr;
    std::mutex mutex_;
    std::map<LtShape, std::unique_ptr<const Plan>> plans_;
};

} // namespace dsopt::gpu
