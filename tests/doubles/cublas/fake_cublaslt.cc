// SPDX-License-Identifier: Apache-2.0
#include "fake_cublaslt.h"
#include "base/dtype.h"
#include "cuda_runtime.h"
#include "fakert.h"
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

namespace {

enum Status { success = 0, not_initialized = 1, alloc_failed = 3, invalid_value = 7, failed = 13, not_supported = 15 };
enum Type { float32 = 0, float16 = 2, bfloat16 = 14 };
constexpr int kCompute32F = 68;
constexpr size_t kNeededWorkspace = size_t(1) << 20, kWorkspaceAlignment = 256;
constexpr size_t kTouchedWorkspace = 4096; // overwritten by each call
constexpr size_t kColumnAlignment = 16;

struct Handle {
    int device;
    void *memory;
};
struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t ld;
    int32_t count;
    int64_t stride;
};
struct Operation {
    int compute, scale;
    int32_t transposed_a, transposed_b;
};
struct Preference {
    uint64_t workspace = 0;
    uint32_t reductions = 7;
    uint32_t alignment[4] = {256, 256, 256, 256};
};
struct Algorithm {
    uint64_t data[8]; // hash of the shape; bytes of workspace; alignments of A to D
};
struct HeuristicResult {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

std::atomic<long> g_handles{0}, g_descriptors{0}, g_searches{0}, g_products{0}, g_products_run{0};
std::atomic<long> g_calls{0}, g_fail_at{0};
std::atomic<bool> g_find_none{false};

bool is_failing() { return ++g_calls == g_fail_at; }

template <class T> int create(T **object, const T &value) {
    if (is_failing()) return alloc_failed;
    if (object == nullptr) return invalid_value;
    *object = new T(value);
    ++g_descriptors;
    return success;
}
template <class T> int destroy(T *object) {
    if (object == nullptr) return invalid_value;
    delete object;
    --g_descriptors;
    return success;
}
template <class T> int set(T &to, const void *value, size_t bytes) {
    if (value == nullptr || bytes != sizeof to) return invalid_value;
    std::memcpy(&to, value, sizeof to);
    return success;
}

size_t size_of(int type) { return type == float32 ? 4 : 2; }

/// Sizes of a product, and its operands. `a` has `rows` x `depth` elements after op().
struct Product {
    Operation operation;
    Layout a, b, c, d;
    int64_t rows, cols, depth;

    Product(const Operation &op, const Layout &its_a, const Layout &its_b, const Layout &its_c, const Layout &its_d) :
        operation(op),
        a(its_a),
        b(its_b),
        c(its_c),
        d(its_d),
        rows(int64_t(d.rows)),
        cols(int64_t(d.cols)),
        depth(int64_t(op.transposed_a ? a.rows : a.cols)) {}

    static bool matches(const Layout &layout, int64_t rows, int64_t cols, bool transposed) {
        return int64_t(transposed ? layout.cols : layout.rows) == rows &&
               int64_t(transposed ? layout.rows : layout.cols) == cols && layout.ld >= int64_t(layout.rows);
    }
    bool is_valid() const {
        const bool known = (operation.transposed_a | operation.transposed_b | 1) == 1; // 0 or 1
        const bool fits = matches(a, rows, depth, operation.transposed_a) &&
                          matches(b, depth, cols, operation.transposed_b) && matches(c, rows, cols, false) &&
                          matches(d, rows, cols, false);
        const bool same_count = a.count == d.count && b.count == d.count && c.count == d.count && d.count >= 1;
        const bool apart = d.count == 1 || d.stride >= (cols - 1) * d.ld + rows;
        return known && fits && same_count && apart && rows > 0 && cols > 0 && depth > 0;
    }
    /// True for types that the library's table of kernels has, and columns that vector loads can read.
    bool is_supported() const {
        const bool types =
            a.type == b.type && c.type == d.type &&
            (a.type == float32 ? d.type == float32
                               : (a.type == float16 || a.type == bfloat16) && (d.type == a.type || d.type == float32));
        const auto is_aligned = [](const Layout &layout) {
            const size_t size = size_of(layout.type);
            return size_t(layout.ld) * size % kColumnAlignment == 0 &&
                   (layout.count == 1 || size_t(layout.stride) * size % kColumnAlignment == 0);
        };
        return types && operation.compute == kCompute32F && operation.scale == float32 && is_aligned(a) &&
               is_aligned(b) && is_aligned(c) && is_aligned(d);
    }
    uint64_t hash() const {
        uint64_t hash = 1469598103934665603u;
        const auto add = [&](uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
        for (const Layout *layout : {&a, &b, &c, &d})
            for (const uint64_t value : {uint64_t(layout->type), layout->rows, layout->cols, uint64_t(layout->ld),
                                         uint64_t(layout->count), uint64_t(layout->stride)})
                add(value);
        add(uint64_t(operation.transposed_a));
        add(uint64_t(operation.transposed_b));
        return hash;
    }
};

// ---------------------------------------------------------------------------------------------------------- arithmetic
float load(const void *data, int type, int64_t i) {
    if (type == float32) return static_cast<const float *>(data)[i];
    const uint16_t half = static_cast<const uint16_t *>(data)[i];
    return type == float16 ? dsopt::f16_to_f32(half) : dsopt::bf16_to_f32(half);
}
void store(float value, void *data, int type, int64_t i) {
    if (type == float32) {
        static_cast<float *>(data)[i] = value;
        return;
    }
    uint16_t half = type == float16 ? dsopt::f32_to_f16(value) : dsopt::f32_to_bf16(value);
    const float rounded = type == float16 ? dsopt::f16_to_f32(half) : dsopt::bf16_to_f32(half);
    if (rounded < 0x1p-50f && rounded > -0x1p-50f) half = 0;
    static_cast<uint16_t *>(data)[i] = half;
}

constexpr int kWidth = 64; // rows of D at once
/// Computes kWidth elements of a column: s = fma(a, b, s), k ascending.
inline __attribute__((always_inline)) void chain(const float *a, const float *b, int64_t depth, float *out) {
    float sum[kWidth] = {};
    for (int64_t k = 0; k < depth; ++k)
        for (int i = 0; i < kWidth; ++i) sum[i] = __builtin_fmaf(a[k * kWidth + i], b[k], sum[i]);
    for (int i = 0; i < kWidth; ++i) out[i] = sum[i];
}
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void chain_fma(const float *a, const float *b, int64_t depth, float *out) {
    chain(a, b, depth, out);
}
#endif
void chain_generic(const float *a, const float *b, int64_t depth, float *out) { chain(a, b, depth, out); }
auto *choose_chain() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return chain_fma;
#endif
    return chain_generic;
}

struct Call {
    Product product;
    float alpha, beta;
    const void *a, *b, *c;
    void *d, *workspace;
    Call *next = nullptr; // in the list of free ones
};

void multiply(const Call &call, int64_t index) {
    const auto &[operation, a, b, c, d, rows, cols, depth] = call.product;
    static auto *const its_chain = choose_chain();
    thread_local std::vector<float> left, right;
    left.assign(size_t(depth) * kWidth, 0.0f);
    right.resize(size_t(depth * cols));
    for (int64_t j = 0; j < cols; ++j)
        for (int64_t k = 0; k < depth; ++k)
            right[size_t(j * depth + k)] =
                load(call.b, b.type, index * b.stride + (operation.transposed_b ? j + k * b.ld : k + j * b.ld));
    for (int64_t first = 0; first < rows; first += kWidth) {
        const int64_t count = std::min<int64_t>(kWidth, rows - first);
        for (int64_t k = 0; k < depth; ++k)
            for (int64_t i = 0; i < count; ++i) {
                const int64_t row = first + i;
                left[size_t(k * kWidth + i)] =
                    load(call.a, a.type, index * a.stride + (operation.transposed_a ? k + row * a.ld : row + k * a.ld));
            }
        for (int64_t j = 0; j < cols; ++j) {
            float sum[kWidth];
            its_chain(left.data(), right.data() + j * depth, depth, sum);
            for (int64_t i = 0; i < count; ++i) {
                const int64_t element = first + i + j * d.ld;
                float value = call.alpha * sum[i];
                if (call.beta != 0) {
                    const float old = call.beta * load(call.c, c.type, index * c.stride + first + i + j * c.ld);
                    value = old + value;
                }
                store(value, call.d, d.type, index * d.stride + element);
            }
        }
    }
}

/// Calls that are not in use. There are enough before the first product, so that no product allocates memory.
std::mutex g_mutex;
Call *g_free = nullptr;
long g_free_count = 0;
constexpr long kEnough = 1024;

void run(void *argument) {
    const Call &call = *static_cast<const Call *>(argument);
    std::memset(call.workspace, 0xff, kTouchedWorkspace);
    for (int64_t i = 0; i < call.product.d.count; ++i) multiply(call, i);
    g_products_run += call.product.d.count;
}
void drop(void *argument) {
    const std::lock_guard lock(g_mutex);
    auto *const call = static_cast<Call *>(argument);
    call->next = g_free;
    g_free = call;
    ++g_free_count;
}
Call *take(const Call &value) {
    const std::lock_guard lock(g_mutex);
    if (g_free == nullptr) return new Call(value);
    Call *const call = g_free;
    g_free = call->next;
    --g_free_count;
    *call = value;
    return call;
}

bool is_aligned(const void *data, uint64_t to) { return reinterpret_cast<uintptr_t>(data) % to == 0; }

} // namespace

extern "C" {

FakeCublasLtCounts fake_cublaslt_counts() { return {g_handles, g_descriptors, g_searches, g_products, g_products_run}; }
void fake_cublaslt_fail_at(long n) {
    g_calls = 0;
    g_fail_at = n;
}
long fake_cublaslt_calls() { return g_calls; }
void fake_cublaslt_find_none(bool none) { g_find_none = none; }

const char *cublasLtGetStatusString(int status) {
    switch (status) {
    case success: return "CUBLAS_STATUS_SUCCESS";
    case not_initialized: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case alloc_failed: return "CUBLAS_STATUS_ALLOC_FAILED";
    case invalid_value: return "CUBLAS_STATUS_INVALID_VALUE";
    case failed: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case not_supported: return "CUBLAS_STATUS_NOT_SUPPORTED";
    default: return "CUBLAS_STATUS_UNKNOWN";
    }
}

/// Allocates device memory, as the library does: not while a thread captures in global mode.
int cublasLtCreate(Handle **handle) {
    if (is_failing()) return not_initialized;
    if (handle == nullptr) return invalid_value;
    Handle made{};
    if (cudaGetDevice(&made.device) != cudaSuccess || cudaMalloc(&made.memory, 256) != cudaSuccess) {
        (void)cudaGetLastError();
        return not_initialized;
    }
    const Layout empty{};
    while (g_free_count < kEnough) drop(new Call{{{}, empty, empty, empty, empty}, 0, 0, {}, {}, {}, {}, {}});
    *handle = new Handle(made);
    ++g_handles;
    return success;
}
int cublasLtDestroy(Handle *handle) {
    if (handle == nullptr) return not_initialized;
    const bool freed = cudaFree(handle->memory) == cudaSuccess;
    delete handle;
    --g_handles;
    return freed ? success : not_initialized;
}

int cublasLtMatrixLayoutCreate(Layout **layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    return create(layout, {type, rows, cols, ld, 1, 0});
}
int cublasLtMatrixLayoutDestroy(Layout *layout) { return destroy(layout); }
int cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *value, size_t bytes) {
    if (is_failing()) return invalid_value;
    if (layout == nullptr) return invalid_value;
    switch (attribute) {
    case 5: return set(layout->count, value, bytes);
    case 6: return set(layout->stride, value, bytes);
    default: return invalid_value;
    }
}

int cublasLtMatmulDescCreate(Operation **operation, int compute, int scale) {
    return create(operation, {compute, scale, 0, 0});
}
int cublasLtMatmulDescDestroy(Operation *operation) { return destroy(operation); }
int cublasLtMatmulDescSetAttribute(Operation *operation, int attribute, const void *value, size_t bytes) {
    if (is_failing()) return invalid_value;
    if (operation == nullptr) return invalid_value;
    switch (attribute) {
    case 3: return set(operation->transposed_a, value, bytes);
    case 4: return set(operation->transposed_b, value, bytes);
    default: return invalid_value;
    }
}

#if !defined(FAKE_CUBLASLT_OLD)
int cublasLtMatmulPreferenceCreate(Preference **preference) { return create(preference, {}); }
#endif
int cublasLtMatmulPreferenceDestroy(Preference *preference) { return destroy(preference); }
int cublasLtMatmulPreferenceSetAttribute(Preference *preference, int attribute, const void *value, size_t bytes) {
    if (is_failing()) return invalid_value;
    if (preference == nullptr) return invalid_value;
    switch (attribute) {
    case 1: return set(preference->workspace, value, bytes);
    case 3: return set(preference->reductions, value, bytes);
    case 5:
    case 6:
    case 7:
    case 8: return set(preference->alignment[attribute - 5], value, bytes);
    default: return invalid_value;
    }
}

int cublasLtMatmulAlgoGetHeuristic(Handle *handle, const Operation *operation, const Layout *a, const Layout *b,
                                   const Layout *c, const Layout *d, const Preference *preference, int requested,
                                   HeuristicResult *results, int *found) {
    if (is_failing()) return failed;
    ++g_searches;
    if (handle == nullptr || operation == nullptr || a == nullptr || b == nullptr || c == nullptr || d == nullptr ||
        preference == nullptr || requested < 1 || results == nullptr || found == nullptr)
        return invalid_value;
    const Product product(*operation, *a, *b, *c, *d);
    *found = 0;
    if (!product.is_valid()) return invalid_value;
    if (g_find_none || !product.is_supported() || preference->workspace < kNeededWorkspace) return not_supported;
    const auto &alignment = preference->alignment;
    results[0] = {};
    results[0].algorithm = {{product.hash(), kNeededWorkspace, alignment[0], alignment[1], alignment[2], alignment[3]}};
    results[0].workspace = kNeededWorkspace;
    results[0].waves = 1;
    *found = 1;
    return success;
}

int cublasLtMatmul(Handle *handle, const Operation *operation, const void *alpha, const void *a, const Layout *a_layout,
                   const void *b, const Layout *b_layout, const void *beta, const void *c, const Layout *c_layout,
                   void *d, const Layout *d_layout, const Algorithm *algorithm, void *workspace, size_t workspace_bytes,
                   cudaStream_t stream) {
    if (is_failing()) return failed;
    if (handle == nullptr || operation == nullptr || a_layout == nullptr || b_layout == nullptr ||
        c_layout == nullptr || d_layout == nullptr || alpha == nullptr || beta == nullptr || algorithm == nullptr)
        return invalid_value;
    const Call call{{*operation, *a_layout, *b_layout, *c_layout, *d_layout},
                    *static_cast<const float *>(alpha),
                    *static_cast<const float *>(beta),
                    a,
                    b,
                    c,
                    d,
                    workspace};
    const uint64_t *const chosen = algorithm->data;
    int device = -1;
    const bool is_current = cudaGetDevice(&device) == cudaSuccess && device == handle->device;
    const bool has_operands = a != nullptr && b != nullptr && d != nullptr && (c != nullptr || call.beta == 0);
    if (!is_current || !call.product.is_valid() || !has_operands || d == a || d == b) return invalid_value;
    if (call.product.hash() != chosen[0] || workspace == nullptr || workspace_bytes < chosen[1] ||
        !is_aligned(workspace, kWorkspaceAlignment) || !is_aligned(a, chosen[2]) || !is_aligned(b, chosen[3]) ||
        !is_aligned(c, chosen[4]) || !is_aligned(d, chosen[5]))
        return not_supported;
    // The argument is dropped also if the call fails.
    if (fakert::launch_host_function(stream, run, take(call), drop) != cudaSuccess) {
        (void)cudaGetLastError();
        return failed;
    }
    g_products += call.product.d.count;
    return success;
}

} // extern "C"
