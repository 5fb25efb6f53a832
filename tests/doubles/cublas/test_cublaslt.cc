// SPDX-License-Identifier: Apache-2.0
// How the engine finds cuBLASLt, and the double itself. The program has the whole engine with the emulated device, but
// not the double, which is loaded as the library would be.
#include "base/dtype.h"
#include "cuda/lt_api.h"
#include "dsopt.h"
#include "fake_cublaslt.h"
#include "fakert.h"
#include "support/handles.h"
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace {

namespace lt = dsopt::gpu::lt;
constexpr const char *kVariable = "DSOPT_CUBLASLT_LIBRARY";
constexpr dsopt::LibraryNames kNames{"libcublasLt.so.13", "cublasLtMatmul", kVariable};

/// Sets an environment variable during the object's lifetime.
class Variable {
public:
    explicit Variable(const char *value) {
        const char *const before = std::getenv(kVariable);
        if (before != nullptr) before_ = before;
        had_ = before != nullptr;
        (void)setenv(kVariable, value, 1);
    }
    ~Variable() { (void)(had_ ? setenv(kVariable, before_.c_str(), 1) : unsetenv(kVariable)); }
    Variable(const Variable &) = delete;
    Variable &operator=(const Variable &) = delete;

private:
    std::string before_;
    bool had_;
};

/// Creates an optimizer on the emulated device, and returns the status of add_group() with a group of the algorithm.
dsopt_status add_group(int32_t algorithm) {
    const test::Context context = test::make_context(test::context_desc(1, DSOPT_BACKEND_CUDA));
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    dsopt_optimizer *optimizer = nullptr;
    EXPECT_EQ(dsopt_optimizer_create(context.get(), &desc, &optimizer), DSOPT_OK) << dsopt_last_error();
    void *memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, 64), cudaSuccess);
    const int64_t dims[] = {4, 4};
    dsopt_param param{};
    param.tensor = {memory, 16, DSOPT_DTYPE_F32, 0};
    param.dims = dims;
    param.ndim = 2;
    dsopt_group group;
    EXPECT_EQ(dsopt_group_init(&group, sizeof group, algorithm), DSOPT_OK);
    const dsopt_status status = dsopt_optimizer_add_group(optimizer, &group, &param, 1);
    dsopt_optimizer_destroy(optimizer);
    EXPECT_EQ(cudaFree(memory), cudaSuccess);
    return status;
}
testing::AssertionResult is_missing(const char *text) {
    const dsopt_status status = add_group(DSOPT_ALGORITHM_MUON);
    const std::string reason = dsopt_last_error();
    if (status == DSOPT_ERR_MISSING && reason.find(text) != std::string::npos) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "status " << status << ": " << reason;
}

TEST(NoCublasLt, AddGroupOfMuonReturnsMissing) {
    EXPECT_TRUE(is_missing(kVariable));
    EXPECT_EQ(add_group(DSOPT_ALGORITHM_ADAMW), DSOPT_OK) << dsopt_last_error();
}
TEST(NoCublasLt, AddGroupRejectsRelativePath) {
    const Variable path("libcublasLt.so.13");
    EXPECT_EQ(add_group(DSOPT_ALGORITHM_MUON), DSOPT_ERR_ARGUMENT);
}
TEST(OldCublasLt, AddGroupNamesTheMissingFunction) { EXPECT_TRUE(is_missing("cublasLtMatmulPreferenceCreate")); }

TEST(CublasLt, IsFoundByName) { EXPECT_EQ(add_group(DSOPT_ALGORITHM_MUON), DSOPT_OK) << dsopt_last_error(); }
TEST(CublasLtInProcess, ComesBeforeThatOfTheEnvironment) {
    void *const library = dlopen(std::getenv("DSOPT_TEST_CUBLASLT"), RTLD_NOW | RTLD_GLOBAL);
    ASSERT_NE(library, nullptr) << dlerror();
    EXPECT_EQ(add_group(DSOPT_ALGORITHM_MUON), DSOPT_OK) << dsopt_last_error();
}

TEST(CublasLtOfCuda12, IsUsedIfTheProcessHasIt) {
    const auto load = [](const char *variable) {
        void *const library = dlopen(std::getenv(variable), RTLD_NOW | RTLD_LOCAL);
        EXPECT_NE(library, nullptr) << dlerror();
        return reinterpret_cast<decltype(&fake_cublaslt_calls)>(dlsym(library, "fake_cublaslt_calls"));
    };
    const auto calls_of_12 = load("DSOPT_TEST_CUBLASLT_12");
    ASSERT_EQ(add_group(DSOPT_ALGORITHM_MUON), DSOPT_OK) << dsopt_last_error();
    const long before = calls_of_12();
    EXPECT_GT(before, 0);
    const auto calls_of_13 = load("DSOPT_TEST_CUBLASLT"); // which comes first
    ASSERT_EQ(add_group(DSOPT_ALGORITHM_MUON), DSOPT_OK) << dsopt_last_error();
    EXPECT_EQ(calls_of_12(), before);
    EXPECT_GT(calls_of_13(), 0);
}

/// Operands of a batch of products, in memory that the host may read.
class Products : public testing::Test {
protected:
    void SetUp() override {
        fakert::reset();
        ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
        ASSERT_EQ(api.create(&handle), lt::success);
        for (lt::Layout *layout : {&a, &b, &d}) *layout = nullptr;
        for (char **memory : {&a_data, &b_data, &d_data}) *memory = managed(kBytes);
        workspace = managed(kWorkspace);
        ASSERT_EQ(api.create_operation(&operation, lt::compute_float32, lt::float32), lt::success);
        ASSERT_EQ(api.create_preference(&preference), lt::success);
        prefer(lt::workspace_bytes, uint64_t(kWorkspace));
    }
    void TearDown() override {
        for (const lt::Layout layout : {a, b, d}) (void)api.destroy_layout(layout);
        (void)api.destroy_operation(operation);
        (void)api.destroy_preference(preference);
        (void)api.destroy(handle);
        fakert::reset();
    }
    static char *managed(size_t bytes) {
        void *memory = nullptr;
        EXPECT_EQ(cudaMallocManaged(&memory, bytes, 1), cudaSuccess);
        return static_cast<char *>(memory);
    }
    template <class T> void prefer(lt::PreferenceAttribute attribute, T value) {
        EXPECT_EQ(api.set_preference(preference, attribute, &value, sizeof value), lt::success);
    }
    void transpose(lt::OperationAttribute attribute, bool is_transposed) {
        const int32_t value = is_transposed;
        EXPECT_EQ(api.set_operation(operation, attribute, &value, sizeof value), lt::success);
    }
    void layout(lt::Layout &to, lt::DataType type, int64_t rows, int64_t cols, int64_t ld, int32_t count = 1,
                int64_t stride = 0) {
        (void)api.destroy_layout(to);
        EXPECT_EQ(api.create_layout(&to, type, uint64_t(rows), uint64_t(cols), ld), lt::success);
        EXPECT_EQ(api.set_layout(to, lt::batch_count, &count, sizeof count), lt::success);
        EXPECT_EQ(api.set_layout(to, lt::batch_stride, &stride, sizeof stride), lt::success);
    }
    lt::Status search() {
        int found = 0;
        const lt::Status status = api.find_algorithms(handle, operation, a, b, d, d, preference, 1, &result, &found);
        EXPECT_EQ(found, status == lt::success);
        return status;
    }
    lt::Status multiply(float alpha = 1, float beta = 0, size_t a_shift = 0, size_t workspace_bytes = kWorkspace) {
        return api.multiply(handle, operation, &alpha, a_data + a_shift, a, b_data, b, &beta, d_data, d, d_data, d,
                            &result.algorithm, workspace, workspace_bytes, nullptr);
    }
    /// Sets the layouts of one product of 8 x 8 matrices.
    void small_product() {
        for (lt::Layout *each : {&a, &b, &d}) layout(*each, lt::bfloat16, 8, 8, 8);
    }

    static constexpr size_t kBytes = size_t(1) << 16, kWorkspace = size_t(4) << 20;
    const lt::Api api{dsopt::Library::any(kNames)};
    lt::Handle handle = nullptr;
    lt::Operation operation = nullptr;
    lt::Preference preference = nullptr;
    lt::Layout a = nullptr, b = nullptr, d = nullptr;
    lt::HeuristicResult result{};
    char *a_data = nullptr, *b_data = nullptr, *d_data = nullptr, *workspace = nullptr;
};
using CublasLtDouble = Products;

TEST_F(CublasLtDouble, ComputesChainsOfFusedMultiplyAdds) {
    constexpr int64_t rows = 70, cols = 9, depth = 11, count = 2;
    for (const lt::DataType type : {lt::float32, lt::float16, lt::bfloat16})
        for (const int transposed : {0, 1, 2, 3}) {
            const bool ta = transposed & 1, tb = transposed & 2;
            const int64_t lda = ta ? 16 : 72, ldb = tb ? 16 : 16, ldd = 72;
            const int64_t stride_a = lda * (ta ? rows : depth), stride_b = ldb * (tb ? depth : cols);
            const auto put = [type](char *to, int64_t i, float value) {
                const uint16_t half = type == lt::float16 ? dsopt::f32_to_f16(value) : dsopt::f32_to_bf16(value);
                if (type == lt::float32)
                    std::memcpy(to + i * 4, &value, 4);
                else
                    std::memcpy(to + i * 2, &half, 2);
            };
            const auto get = [type](const char *from, int64_t i) {
                float value;
                uint16_t half;
                std::memcpy(&value, from + i * (type == lt::float32 ? 4 : 0), 4);
                std::memcpy(&half, from + i * 2, 2);
                return type == lt::float32   ? value
                       : type == lt::float16 ? dsopt::f16_to_f32(half)
                                             : dsopt::bf16_to_f32(half);
            };
            for (int64_t i = 0; i < count * stride_a; ++i) put(a_data, i, std::sin(float(i)));
            for (int64_t i = 0; i < count * stride_b; ++i) put(b_data, i, std::cos(float(i)));
            const auto old = [](int64_t i) { return std::sin(float(3 * i)); };
            for (int64_t i = 0; i < count * ldd * cols; ++i) {
                const float value = old(i);
                std::memcpy(d_data + i * 4, &value, 4);
            }
            transpose(lt::transpose_a, ta);
            transpose(lt::transpose_b, tb);
            layout(a, type, ta ? depth : rows, ta ? rows : depth, lda, count, stride_a);
            layout(b, type, tb ? cols : depth, tb ? depth : cols, ldb, count, stride_b);
            layout(d, lt::float32, rows, cols, ldd, count, ldd * cols);
            ASSERT_EQ(search(), lt::success);
            ASSERT_EQ(multiply(0.7f, 3.1f), lt::success);
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            for (int64_t m = 0; m < count; ++m)
                for (int64_t j = 0; j < cols; ++j)
                    for (int64_t i = 0; i < rows; ++i) {
                        float sum = 0;
                        for (int64_t k = 0; k < depth; ++k)
                            sum = std::fma(get(a_data, m * stride_a + (ta ? k + i * lda : i + k * lda)),
                                           get(b_data, m * stride_b + (tb ? j + k * ldb : k + j * ldb)), sum);
                        const int64_t at = m * ldd * cols + i + j * ldd;
                        const float scaled = 0.7f * sum, kept = 3.1f * old(at), wanted = kept + scaled;
                        float value;
                        std::memcpy(&value, d_data + at * 4, 4);
                        ASSERT_EQ(value, wanted) << type << ' ' << transposed << ": " << i << ", " << j;
                    }
        }
}

TEST_F(CublasLtDouble, RoundsSmallOutputsToZero) {
    small_product();
    ASSERT_EQ(search(), lt::success);
    std::memset(a_data, 0, kBytes);
    std::memset(b_data, 0, kBytes);
    auto *const x = reinterpret_cast<uint16_t *>(a_data), *const y = reinterpret_cast<uint16_t *>(b_data);
    x[0] = dsopt::f32_to_bf16(0x1p-25f);
    x[1] = dsopt::f32_to_bf16(-0x1.8p-26f);
    y[0] = dsopt::f32_to_bf16(0x1p-25f);
    ASSERT_EQ(multiply(), lt::success);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto *const out = reinterpret_cast<const uint16_t *>(d_data);
    EXPECT_EQ(out[0], dsopt::f32_to_bf16(0x1p-50f));
    EXPECT_EQ(out[1], 0);
}

TEST_F(CublasLtDouble, RefusesWhatTheLibraryRefuses) {
    small_product();
    ASSERT_EQ(search(), lt::success);
    EXPECT_EQ(multiply(1, 0, 16), lt::not_supported) << "the search was for 256 bytes";
    for (const auto attribute : {lt::alignment_a, lt::alignment_b, lt::alignment_c, lt::alignment_d})
        prefer(attribute, uint32_t(16));
    ASSERT_EQ(search(), lt::success);
    EXPECT_EQ(multiply(1, 0, 16), lt::success);
    EXPECT_EQ(multiply(1, 0, 8), lt::not_supported);
    EXPECT_EQ(multiply(1, 0, 0, 4096), lt::not_supported) << "workspace";
    layout(b, lt::bfloat16, 8, 7, 8);
    EXPECT_EQ(search(), lt::invalid_value) << "columns";
    layout(b, lt::bfloat16, 8, 8, 7);
    EXPECT_EQ(search(), lt::invalid_value) << "leading dimension below the rows";
    layout(b, lt::bfloat16, 8, 8, 9);
    EXPECT_EQ(search(), lt::not_supported) << "columns are not aligned";
    layout(b, lt::float16, 8, 8, 8);
    EXPECT_EQ(search(), lt::not_supported) << "two types of inputs";
    layout(b, lt::bfloat16, 8, 8, 8, 2, 64);
    EXPECT_EQ(search(), lt::invalid_value) << "other numbers of matrices";
    layout(a, lt::bfloat16, 8, 8, 8, 2, 64);
    layout(d, lt::bfloat16, 8, 8, 8, 2, 56);
    EXPECT_EQ(search(), lt::invalid_value) << "outputs overlap";
    layout(d, lt::bfloat16, 8, 8, 8, 2, 64);
    EXPECT_EQ(search(), lt::success);
    layout(d, lt::bfloat16, 8, 8, 16, 2, 128);
    EXPECT_EQ(multiply(), lt::not_supported) << "an algorithm of another shape";
    prefer(lt::workspace_bytes, uint64_t(0));
    EXPECT_EQ(search(), lt::not_supported) << "no workspace";
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

/// As the library, which allocates memory of the device.
TEST_F(CublasLtDouble, IsNotCreatedDuringAGlobalCapture) {
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    lt::Handle other = nullptr;
    EXPECT_NE(api.create(&other), lt::success);
    (void)cudaStreamEndCapture(stream, &graph);
    (void)cudaStreamDestroy(stream);
}

} // namespace
