// SPDX-License-Identifier: Apache-2.0
// Runs every kernel once, on the shortest lists that occupy two blocks: for the thread sanitizer on the emulated
// device, and for compute-sanitizer on a GPU, where a long suite would take hours.
#include "backend_optimizer.h"

using namespace cuda_test;

namespace cuda_small_tests {

class CudaSmall : public Cuda {
protected:
    /// Returns settings with ten leaves, so that two blocks of eight warps read gradients; one tensor ends inside a
    /// vector.
    static Setting small(int32_t algorithm) {
        Setting s;
        s.algorithm = algorithm;
        s.sizes = {0, 5, 36867};
        return s;
    }
    static void compare(const Setting &setting, int bad) {
        BackendOptimizer host(false, setting), device(true, setting);
        for (BackendOptimizer *side : {&host, &device})
            for (int t = 0; t < 2; ++t) {
                side->fill_gradients(t, t == 0 ? bad : -1);
                ASSERT_OK(side->step());
            }
        EXPECT_TRUE(same(host.all_bytes(), device.all_bytes()));
    }
};

TEST_F(CudaSmall, AdamMatchesCpu) { compare(small(DSOPT_ALGORITHM_ADAM), -1); }

TEST_F(CudaSmall, LambWithClippingMatchesCpu) {
    Setting s = small(DSOPT_ALGORITHM_LAMB);
    s.desc.max_norm = 0.5;
    compare(s, -1);
}

TEST_F(CudaSmall, MixedLambWithScalerMatchesCpuAfterSkip) {
    Setting s = small(DSOPT_ALGORITHM_LAMB);
    s.param = s.grad = DSOPT_DTYPE_F16;
    s.scaler = s.shifted = true;
    compare(s, 2);
}

TEST_F(CudaSmall, OneBitExchangeMatchesCpu) {
    const struct {
        int32_t algorithm, compat;
        int steps;
    } rows[] = {{DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_COMPAT_NONE, 2},
                {DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_COMPAT_NONE, 4},
                {DSOPT_ALGORITHM_ONEBIT_LAMB, DSOPT_COMPAT_DEEPSPEED, 3}};
    for (const auto &row : rows) {
        Setting s = small(row.algorithm);
        s.sizes = {5, 4100};
        s.desc.compat = row.compat;
        s.change = [](dsopt_group &group, int) {
            group.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
            group.freeze_step = 1;
            if (group.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM)
                group.local_interval_steps = group.max_local_interval = 2;
        };
        std::vector<std::vector<std::vector<char>>> results[2];
        for (const bool device : {false, true}) {
            results[device].resize(2);
            const Ranks group(2);
            group.run([&](int rank) {
                BackendOptimizer side(device, s, &group, rank);
                for (int t = 0; t < row.steps; ++t) {
                    side.fill_gradients(t + 9 * rank);
                    ASSERT_OK(side.step());
                }
                results[device][size_t(rank)] = side.all_bytes();
            });
        }
        for (size_t rank = 0; rank < 2; ++rank)
            EXPECT_TRUE(same(results[0][rank], results[1][rank])) << "algorithm " << row.algorithm << ", rank " << rank;
    }
}

TEST_F(CudaSmall, StepsWithChangedPointersMatchCpu) {
    for (const size_t count : {size_t(2), size_t(1200)}) { // fits into kernel arguments; needs an upload
        allow_many_blocks();
        Setting s;
        s.sizes.assign(count, 3);
        BackendOptimizer host(false, s), device(true, s);
        for (BackendOptimizer *side : {&host, &device}) {
            side->fill_gradients(1);
            ASSERT_OK(side->step());
            for (size_t i = 0; i + 1 < count; i += 2) std::swap(side->gradients[i].data, side->gradients[i + 1].data);
            ASSERT_OK(side->step());
        }
        EXPECT_TRUE(same(host.all_bytes(), device.all_bytes())) << count << " tensors";
    }
}

TEST_F(CudaSmall, ListFunctionsMatchCpu) {
    const Setting s = small(DSOPT_ALGORITHM_ADAM);
    BackendOptimizer host(false, s), device(true, s);
    dsopt_norm_result results[2] = {};
    for (BackendOptimizer *side : {&host, &device}) {
        const bool on_device = side == &device;
        side->fill_gradients(1);
        const auto count = int64_t(side->gradients.size());
        Bytes result(on_device, sizeof(dsopt_norm_result), 0);
        ASSERT_OK(dsopt_tensors_norm(side->context, side->gradients.data(), count, DSOPT_NORM_MAX, 0.5, nullptr,
                                     reinterpret_cast<dsopt_norm_result *>(result.data()), nullptr));
        std::vector<dsopt_tensor> weights = side->gradients;
        for (size_t i = 0; i < weights.size(); ++i) weights[i].data = side->params[i].data();
        ASSERT_OK(
            dsopt_tensors_axpby(side->context, nullptr, side->gradients.data(), 0.5f, weights.data(), count, nullptr));
        ASSERT_OK(dsopt_tensors_clamp(side->context, weights.data(), count, 0.75, nullptr));
        ASSERT_OK(dsopt_zero_grad(side->context, side->gradients.data(), count, DSOPT_ZERO_FILL, nullptr));
        const std::vector<char> bytes = result.get();
        std::memcpy(&results[on_device], bytes.data(), sizeof results[0]);
    }
    EXPECT_GT(results[0].norm, 0);
    EXPECT_EQ(results[0].norm, results[1].norm);
    EXPECT_EQ(results[0].coefficient, results[1].coefficient);
    for (size_t i = 0; i < host.params.size(); ++i) {
        EXPECT_TRUE(host.params[i].get() == device.params[i].get()) << i;
        EXPECT_TRUE(host.grads[i].get() == device.grads[i].get()) << i;
    }
}

} // namespace cuda_small_tests
