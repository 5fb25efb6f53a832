// SPDX-License-Identifier: Apache-2.0
// Compiled if <cublasLt.h> is found: checks the declarations of cuda/lt_api.h.
#include "cuda/lt_api.h"
#include <cstddef>
#include <cublasLt.h>

namespace declared = dsopt::gpu::lt;

constexpr bool same(long ours, long theirs) { return ours == theirs; }
static_assert(same(declared::success, CUBLAS_STATUS_SUCCESS) &&
              same(declared::alloc_failed, CUBLAS_STATUS_ALLOC_FAILED) &&
              same(declared::not_supported, CUBLAS_STATUS_NOT_SUPPORTED));
static_assert(same(declared::float32, CUDA_R_32F) && same(declared::float16, CUDA_R_16F) &&
              same(declared::bfloat16, CUDA_R_16BF) && same(declared::compute_float32, CUBLAS_COMPUTE_32F));
static_assert(same(declared::not_transposed, CUBLAS_OP_N) && same(declared::transposed, CUBLAS_OP_T));
static_assert(same(declared::batch_count, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) &&
              same(declared::batch_stride, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET));
static_assert(same(declared::transpose_a, CUBLASLT_MATMUL_DESC_TRANSA) &&
              same(declared::transpose_b, CUBLASLT_MATMUL_DESC_TRANSB));
static_assert(same(declared::workspace_bytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) &&
              same(declared::reductions, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) &&
              same(declared::reduce_in_compute_type, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
static_assert(same(declared::alignment_a, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES) &&
              same(declared::alignment_b, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES) &&
              same(declared::alignment_c, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES) &&
              same(declared::alignment_d, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES));
static_assert(sizeof(cublasStatus_t) == sizeof(declared::Status) && sizeof(cublasLtHandle_t) == sizeof(void *));
static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof(declared::Algorithm));
using Theirs = cublasLtMatmulHeuristicResult_t;
using Ours = declared::HeuristicResult;
static_assert(sizeof(Theirs) == sizeof(Ours) && offsetof(Theirs, algo) == offsetof(Ours, algorithm) &&
              offsetof(Theirs, workspaceSize) == offsetof(Ours, workspace_bytes) &&
              offsetof(Theirs, state) == offsetof(Ours, state) &&
              offsetof(Theirs, wavesCount) == offsetof(Ours, waves));

/// True if both functions take parameters of the same sizes, with integers and pointers in the same places, so that a
/// call passes them in the same registers.
template <class A, class B> constexpr bool is_alike = false;
template <class A>
constexpr bool is_pointer_or_integer = std::is_pointer_v<A> || std::is_integral_v<A> || std::is_enum_v<A>;
template <class... A, class... B>
constexpr bool is_alike<cublasStatus_t (*)(A...), declared::Status (*)(B...)> =
    ((sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> && is_pointer_or_integer<A> &&
      is_pointer_or_integer<B>)&&...);
static_assert(is_alike<decltype(&cublasLtCreate), decltype(declared::Api::create)>);
static_assert(is_alike<decltype(&cublasLtDestroy), decltype(declared::Api::destroy)>);
static_assert(is_alike<decltype(&cublasLtMatrixLayoutCreate), decltype(declared::Api::create_layout)>);
static_assert(is_alike<decltype(&cublasLtMatrixLayoutDestroy), decltype(declared::Api::destroy_layout)>);
static_assert(is_alike<decltype(&cublasLtMatrixLayoutSetAttribute), decltype(declared::Api::set_layout)>);
static_assert(is_alike<decltype(&cublasLtMatmulDescCreate), decltype(declared::Api::create_operation)>);
static_assert(is_alike<decltype(&cublasLtMatmulDescDestroy), decltype(declared::Api::destroy_operation)>);
static_assert(is_alike<decltype(&cublasLtMatmulDescSetAttribute), decltype(declared::Api::set_operation)>);
static_assert(is_alike<decltype(&cublasLtMatmulPreferenceCreate), decltype(declared::Api::create_preference)>);
static_assert(is_alike<decltype(&cublasLtMatmulPreferenceDestroy), decltype(declared::Api::destroy_preference)>);
static_assert(is_alike<decltype(&cublasLtMatmulPreferenceSetAttribute), decltype(declared::Api::set_preference)>);
static_assert(is_alike<decltype(&cublasLtMatmulAlgoGetHeuristic), decltype(declared::Api::find_algorithms)>);
static_assert(is_alike<decltype(&cublasLtMatmul), decltype(declared::Api::multiply)>);

int main() {}
