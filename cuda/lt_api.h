// SPDX-License-Identifier: Apache-2.0
// Own declarations of the part of cuBLASLt's ABI that is used, so that the build needs no header. The ABI is the same in
// 12 and 13. tests/doubles/cublas/abi_check.cc compares these declarations with <cublasLt.h> if it is installed.
#pragma once
#include "base/library.h"
#include <cstddef>
#include <cstdint>

namespace dsopt::gpu::lt {

using Handle = void *;     // cublasLtHandle_t
using Layout = void *;     // cublasLtMatrixLayout_t
using Operation = void *;  // cublasLtMatmulDesc_t
using Preference = void *; // cublasLtMatmulPreference_t
using Stream = void *;     // cudaStream_t
using Status = int;        // cublasStatus_t
enum : Status { success = 0, alloc_failed = 3, invalid_value = 7, execution_failed = 13, not_supported = 15 };
enum DataType : int { float32 = 0, float16 = 2, bfloat16 = 14 };
/// Products of 16-bit inputs are exact in fp32. Inputs in fp32 are not rounded to TF32.
enum ComputeType : int { compute_float32 = 68 };
enum Transposition : int32_t { not_transposed = 0, transposed = 1 };
enum LayoutAttribute : int { batch_count = 5, batch_stride = 6 };   // int32_t, int64_t
enum OperationAttribute : int { transpose_a = 3, transpose_b = 4 }; // int32_t
enum PreferenceAttribute : int {
    workspace_bytes = 1, // uint64_t
    reductions = 3,      // uint32_t: mask of ways to add partial sums of one element
    alignment_a = 5,     // uint32_t, as the next three
    alignment_b = 6,
    alignment_c = 7,
    alignment_d = 8
};
/// Adds partial sums in fp32. Other ways round each partial sum to the type of the output.
constexpr uint32_t reduce_in_compute_type = 2;

struct Algorithm {
    uint64_t data[8];
};
struct HeuristicResult {
    Algorithm algorithm;
    size_t workspace_bytes;
    Status state;
    float waves;
    int reserved[4];
};

struct Api {
    Library library;
    Status (*create)(Handle *handle) = library.need("cublasLtCreate");
    Status (*destroy)(Handle handle) = library.need("cublasLtDestroy");
    const char *(*status_string)(Status status) = library.need("cublasLtGetStatusString");
    Status (*create_layout)(Layout *layout, DataType type, uint64_t rows, uint64_t cols,
                            int64_t ld) = library.need("cublasLtMatrixLayoutCreate");
    Status (*destroy_layout)(Layout layout) = library.need("cublasLtMatrixLayoutDestroy");
    Status (*set_layout)(Layout layout, LayoutAttribute attribute, const void *value,
                         size_t bytes) = library.need("cublasLtMatrixLayoutSetAttribute");
    Status (*create_operation)(Operation *operation, ComputeType compute,
                               DataType scale) = library.need("cublasLtMatmulDescCreate");
    Status (*destroy_operation)(Operation operation) = library.need("cublasLtMatmulDescDestroy");
    Status (*set_operation)(Operation operation, OperationAttribute attribute, const void *value,
                            size_t bytes) = library.need("cublasLtMatmulDescSetAttribute");
    Status (*create_preference)(Preference *preference) = library.need("cublasLtMatmulPreferenceCreate");
    Status (*destroy_preference)(Preference preference) = library.need("cublasLtMatmulPreferenceDestroy");
    Status (*set_preference)(Preference preference, PreferenceAttribute attribute, const void *value,
                             size_t bytes) = library.need("cublasLtMatmulPreferenceSetAttribute");
    Status (*find_algorithms)(Handle handle, Operation operation, Layout a, Layout b, Layout c, Layout d,
                              Preference preference, int requested, HeuristicResult *results,
                              int *found) = library.need("cublasLtMatmulAlgoGetHeuristic");
    /// D = alpha op(A) op(B) + beta C. All matrices are column-major.
    Status (*multiply)(Handle handle, Operation operation, const void *alpha, const void *a, Layout a_layout,
                       const void *b, Layout b_layout, const void *beta, const void *c, Layout c_layout, void *d,
                       Layout d_layout, const Algorithm *algorithm, void *workspace, size_t workspace_bytes,
                       Stream stream) = library.need("cublasLtMatmul");
};

} // namespace dsopt::gpu::lt
