// SPDX-License-Identifier: Apache-2.0
// Muon on the emulated device, with the double of cuBLASLt: bits as on the CPU, costs of a step, and failures of calls
// of the library.
#include "backend_optimizer.h"
#include "doubles/cublas/fake_cublaslt.h"
#include <algorithm>

using namespace cuda_test;

namespace cuda_matrices_tests {

constexpr int kSteps = 5; // Newton-Schulz iterations

using CudaMatrices = Cuda;
using CudaMatricesCost = Cuda;
using CudaMatricesFaults = Cuda;

/// Groups of Muon and of AdamW.
Setting setting_of(const std::vector<std::array<int64_t, 2>> &matrices, std::vector<int64_t> sizes) {
    Setting s;
    s.algorithm = DSOPT_ALGORITHM_MUON;
    s.group_flags = DSOPT_GROUP_NESTEROV | DSOPT_GROUP_NO_BIAS_CORRECTION;
    s.matrices = matrices;
    s.sizes = std::move(sizes);
    s.desc.nonfinite = DSOPT_NONFINITE_SKIP;
    s.change = [](dsopt_group &group, int index) {
        if (index == 0) return;
        BackendOptimizer::must(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
        group.weight_decay = 0.1;
    };
    return s;
}
/// Wide, tall and small matrices, two in a tensor, and rows that need padding; four tensors of AdamW.
Setting all_shapes() {
    return setting_of({{24, 40}, {40, 24}, {24, 40}, {3, 5}, {33, 37}},
                      {24 * 40, 40 * 24, 2 * 24 * 40, 15, 33 * 37, 7, 4097, 0, 33, 9});
}
/// One batch of three matrices.
Setting one_batch() { return setting_of({{20, 32}, {20, 32}}, {2 * 20 * 32, 20 * 32, 5, 9}); }

std::vector<std::string> launches(BackendOptimizer &side) {
    fakert::mark();
    EXPECT_EQ(side.step(), DSOPT_OK) << dsopt_last_error();
    return fakert::launched_kernels();
}

TEST_F(CudaMatrices, MatchTheCpuBitwiseForAllProducts) {
    expect_same_bits(all_shapes(), "BF16");
    Setting s = all_shapes();
    s.change = [](dsopt_group &group, int index) {
        if (index == 0) {
            group.ns_dtype = DSOPT_DTYPE_F32;
            return;
        }
        BackendOptimizer::must(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_MUON));
        group.ns_dtype = DSOPT_DTYPE_F16;
        group.ns_schedule = DSOPT_NS_POLAR_EXPRESS;
        group.ns_a = group.ns_b = group.ns_c = 0;
    };
    s.matrices = {{40, 24}, {16, 17}, {20, 30}, {64, 70}};
    s.sizes = {40 * 24, 16 * 17, 20 * 30, 64 * 70};
    expect_same_bits(s, "F32 and F16");
}

TEST_F(CudaMatrices, MatchTheCpuBitwiseForAllFormats) {
    for (const int32_t masters : {DSOPT_MASTERS_PER_TENSOR, DSOPT_MASTERS_REMAINDER})
        for (const int32_t format : {DSOPT_MOMENT_F32, DSOPT_MOMENT_BF16, DSOPT_MOMENT_BF16_RANDOM}) {
            Setting s = one_batch();
            s.param = s.grad = DSOPT_DTYPE_BF16;
            s.desc.masters = masters;
            s.desc.seed = 3;
            s.desc.max_norm = 1;
            s.desc.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
            s.first_format = format;
            s.step_flags = DSOPT_STEP_ZERO_GRADS;
            s.out = DSOPT_DTYPE_BF16;
            expect_same_bits(s, masters == DSOPT_MASTERS_REMAINDER ? "remainders" : "masters");
        }
    Setting s = one_batch();
    s.mixed = s.shifted = true;
    s.desc.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
    expect_same_bits(s, "dtypes alternate");
    s.mixed = false;
    s.out = DSOPT_DTYPE_F32;
    s.step_flags = DSOPT_STEP_DELTA;
    expect_same_bits(s, "changes");
}

TEST_F(CudaMatrices, StepIsCapturedAndReplayed) {
    const Setting s = all_shapes();
    BackendOptimizer host(false, s), device(true, s);
    for (BackendOptimizer *side : {&host, &device}) {
        side->fill_gradients(0);
        ASSERT_OK(side->step());
    }
    const Captured captured([&](cudaStream_t stream) { ASSERT_OK(step_on(device, stream)); });
    for (int t = 1; t < 4; ++t) {
        for (BackendOptimizer *side : {&host, &device}) side->fill_gradients(t, t == 2 ? 1 : -1);
        ASSERT_OK(host.step());
        captured.replay();
        ASSERT_TRUE(same(host.all_bytes(), device.all_bytes())) << "step " << t;
    }
}

TEST_F(CudaMatricesCost, BatchHasFourLaunchesPerIterationAndTwo) {
    BackendOptimizer side(true, one_batch());
    side.fill_gradients(0);
    ASSERT_OK(side.step());
    const FakeCublasLtCounts before = fake_cublaslt_counts();
    const std::vector<std::string> kernels = launches(side);
    std::vector<std::string> expected{"inspect", "update", "form", "normalise"};
    expected.insert(expected.end(), kSteps - 1, "round");
    expected.insert(expected.end(), {"apply_matrices", "finish"});
    EXPECT_EQ(kernels, expected);
    const fakert::Counters c = fakert::counters();
    EXPECT_EQ(c.host_functions, 3 * kSteps);
    EXPECT_EQ(
        c.host_waits + c.device_allocations + c.copies_to_device + c.copies_to_host + c.host_allocations + c.fills, 0);
    const FakeCublasLtCounts after = fake_cublaslt_counts();
    EXPECT_EQ(after.products - before.products, 3 * kSteps * 3) << "three matrices";
    EXPECT_EQ(after.searches, before.searches);
}

TEST_F(CudaMatricesCost, AbsentTensorHasNoProducts) {
    BackendOptimizer side(true, one_batch());
    side.fill_gradients(0);
    ASSERT_OK(side.step());
    side.gradients[0].data = nullptr;
    FakeCublasLtCounts before = fake_cublaslt_counts();
    ASSERT_OK(side.step());
    EXPECT_EQ(fake_cublaslt_counts().products - before.products, 3 * kSteps);
    side.gradients[1].data = nullptr;
    before = fake_cublaslt_counts();
    EXPECT_EQ(launches(side).back(), "finish");
    EXPECT_EQ(fake_cublaslt_counts().products, before.products);
}

TEST_F(CudaMatricesFaults, StepWithoutAlgorithmChangesNothing) {
    BackendOptimizer host(false, one_batch()), side(true, one_batch());
    for (BackendOptimizer *each : {&host, &side}) each->fill_gradients(0);
    const auto before = side.all_bytes();
    fake_cublaslt_find_none(true);
    EXPECT_EQ(side.step(), DSOPT_ERR_BACKEND);
    EXPECT_NE(std::string(dsopt_last_error())
                  .find("no algorithm for 3 products of 20 x 20 x 32 in BF16 on a device of "
                        "compute capability 9.0; another dsopt_group.ns_dtype may have one"),
              std::string::npos)
        << dsopt_last_error();
    EXPECT_TRUE(same(side.all_bytes(), before));
    fake_cublaslt_find_none(false);
    ASSERT_OK(host.step());
    ASSERT_OK(side.step());
    EXPECT_TRUE(same(host.all_bytes(), side.all_bytes()));
}

TEST_F(CudaMatricesFaults, EveryCallOfTheLibraryReturnsItsStatus) {
    const FakeCublasLtCounts before = fake_cublaslt_counts();
    const auto run = [](dsopt_status &status) {
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = DSOPT_BACKEND_CUDA;
        dsopt_context *context = nullptr;
        ASSERT_OK(dsopt_context_create(&context_desc, &context));
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        dsopt_optimizer *optimizer = nullptr;
        ASSERT_OK(dsopt_optimizer_create(context, &desc, &optimizer));
        {
            const Bytes p(true, 20 * 16 * 4, 0), g(true, 20 * 16 * 4, 0);
            dsopt_param param{};
            param.tensor = {p.data(), 20 * 16, DSOPT_DTYPE_F32, 0};
            param.rows = 20, param.cols = 16;
            dsopt_group group;
            ASSERT_OK(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_MUON));
            group.ns_steps = 2;
            status = dsopt_optimizer_add_group(optimizer, &group, &param, 1);
            const dsopt_tensor grad{g.data(), 20 * 16, DSOPT_DTYPE_F32, 0};
            DSOPT_NEW(dsopt_step, step);
            step.grads = &grad;
            step.count = 1;
            for (int t = 0; t < 2 && status == DSOPT_OK; ++t) status = dsopt_optimizer_step(optimizer, &step);
            dsopt_optimizer_destroy(optimizer);
        }
        dsopt_context_destroy(context);
    };
    fake_cublaslt_fail_at(0);
    dsopt_status status = DSOPT_ERR_INTERNAL;
    run(status);
    ASSERT_OK(status);
    const long calls = fake_cublaslt_calls();
    EXPECT_GT(calls, 3 * 2 * 2);
    for (long n = 1; n <= calls; ++n) {
        fake_cublaslt_fail_at(n);
        run(status);
        EXPECT_TRUE(status == DSOPT_ERR_BACKEND || status == DSOPT_ERR_NOMEM) << n << ": " << status;
    }
    fake_cublaslt_fail_at(0);
    const FakeCublasLtCounts after = fake_cublaslt_counts();
    EXPECT_EQ(after.handles, before.handles);
    EXPECT_EQ(after.descriptors, before.descriptors);
}

} // namespace cuda_matrices_tests
