// SPDX-License-Identifier: Apache-2.0
// Sums of elements, leaves and tensors: the documented order, for counts below and above the number that one thread, a
// row of lanes and a warp add.
#include "backend_optimizer.h"
#include "support/lanes.h"

using namespace cuda_test;

namespace cuda_sums_tests {

constexpr int kCounts[] = {0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65};

class CudaSums : public Cuda {
protected:
    void SetUp() override {
        Cuda::SetUp();
        must(dsopt_context_create(&cuda_desc(), &context_));
    }
    void TearDown() override {
        dsopt_context_destroy(context_);
        Cuda::TearDown();
    }
    static void must(dsopt_status status) { ASSERT_EQ(status, DSOPT_OK) << dsopt_last_error(); }
    static const dsopt_context_desc &cuda_desc() {
        static const dsopt_context_desc desc = [] {
            DSOPT_NEW(dsopt_context_desc, d);
            d.backend = DSOPT_BACKEND_CUDA;
            return d;
        }();
        return desc;
    }
    /// Returns the norm of a list in device memory whose tensors begin `skipped` elements after a multiple of 16 bytes.
    double norm(const std::vector<std::vector<float>> &list, int32_t dtype = DSOPT_DTYPE_F32, size_t skipped = 0) {
        std::vector<Bytes> memory;
        std::vector<dsopt_tensor> tensors;
        const size_t size = test::size_of(dtype);
        for (const std::vector<float> &values : list) {
            std::vector<char> raw((skipped + values.size()) * size);
            for (size_t i = 0; i < values.size(); ++i) test::store(&raw[(skipped + i) * size], dtype, values[i]);
            memory.emplace_back(true, raw.size(), 0);
            memory.back().set(raw);
            tensors.push_back({memory.back().data() + skipped * size, int64_t(values.size()), dtype, 0});
        }
        Bytes result_memory(true, sizeof(dsopt_norm_result), 0);
        must(dsopt_tensors_norm(context_, tensors.data(), int64_t(tensors.size()), DSOPT_NORM_L2, 0, nullptr,
                                reinterpret_cast<dsopt_norm_result *>(result_memory.data()), nullptr));
        dsopt_norm_result result;
        std::memcpy(&result, result_memory.get().data(), sizeof result);
        return result.norm;
    }
    /// Returns random numbers of very different magnitudes, so that sums of their squares depend on the order.
    float uneven() {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return std::ldexp(1.0f + float(state_ >> 40) * 0x1p-24f, int(state_ >> 33 & 15) - 8);
    }

    dsopt_context *context_ = nullptr;
    uint64_t state_ = 1;
};

/// Sizes around a row of 128 elements, the elements of all loads in flight, and a leaf, with remainders of groups
/// of four elements and of single elements.
TEST_F(CudaSums, AddElementsInLaneOrder) {
    for (const size_t base : {0, 128, 512, 1024, 4096})
        for (const int extra : {-5, -4, -3, -1, 0, 1, 2, 4, 5, 127, 128, 129}) {
            if (int(base) + extra < 1) continue;
            for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16}) {
                std::vector<float> values(base + size_t(extra));
                for (float &value : values) value = test::rounded(uneven(), dtype);
                for (const size_t skipped : {0, 1, 3})
                    EXPECT_EQ(norm({values}, dtype, skipped), std::sqrt(lanes::squares(values)))
                        << values.size() << " of " << test::dtype_name(dtype) << " from the " << skipped << "th";
            }
        }
}

/// Gradient norms per group and overall, norms of weights and updates, and LAMB's trust ratios.
TEST_F(CudaSums, MatchCpuInSteps) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB})
        for (const int tensors : kCounts)
            for (const int leaves : {1, 33}) {
                if (leaves == 33 && tensors > 9) continue;
                Setting s;
                s.algorithm = algorithm;
                s.sizes.assign(size_t(tensors), 3);
                if (tensors > 1) s.sizes[1] = leaves * 4096 - 5, s.sizes[size_t(tensors) - 1] = 0;
                s.desc.max_norm = 0.5;
                s.desc.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
                s.change = [](dsopt_group &group, int index) { group.max_norm = index == 0 ? 0.25 : 0.125; };
                BackendOptimizer host(false, s), device(true, s);
                for (BackendOptimizer *side : {&host, &device}) {
                    side->fill_gradients(1);
                    must(side->step());
                }
                EXPECT_TRUE(same(host.all_bytes(), device.all_bytes())) << tensors << " tensors";
            }
}

/// Numbers of tensors around two limits of a block: tensors that it counts itself, and leaf counts that it loads at
/// once. Some tensors have two leaves, one has no elements, and the last but one is not finite in the first step.
TEST_F(CudaSums, MatchCpuWithManyTensors) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB})
        for (const size_t tensors : {256, 257, 1024, 1025}) {
            if (algorithm == DSOPT_ALGORITHM_LAMB && tensors != 1025) continue;
            allow_many_blocks();
            Setting s;
            s.algorithm = algorithm;
            s.sizes.assign(tensors, 3);
            s.sizes[1] = s.sizes[tensors / 2] = s.sizes[tensors - 1] = 4099;
            s.sizes[5] = 0;
            s.desc.max_norm = 0.5;
            s.desc.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
            s.desc.nonfinite = DSOPT_NONFINITE_SKIP;
            BackendOptimizer host(false, s), device(true, s);
            for (int t = 0; t < 2; ++t) {
                for (BackendOptimizer *side : {&host, &device}) {
                    side->fill_gradients(t, t == 0 ? int(tensors) - 2 : -1);
                    must(side->step());
                }
                EXPECT_TRUE(same(host.all_bytes(), device.all_bytes())) << tensors << " tensors, step " << t;
            }
        }
}

/// Scales of 1-bit compression, of messages and of server results, are root mean squares.
TEST_F(CudaSums, MatchCpuInScales) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB})
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
            Setting s;
            s.algorithm = algorithm;
            s.desc.compat = compat;
            s.sizes.assign(33, 5);
            s.sizes[3] = 4096 * 7, s.sizes[20] = 4096 * 65 + 1;
            s.change = [](dsopt_group &group, int) {
                group.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
                group.freeze_step = 1;
            };
            std::vector<std::vector<std::vector<char>>> results[2];
            for (const bool device : {false, true}) {
                results[device].resize(2);
                const Ranks group(2);
                group.run([&](int rank) {
                    BackendOptimizer side(device, s, &group, rank);
                    for (int t = 0; t < 3; ++t) {
                        side.fill_gradients(t + 9 * rank);
                        must(side.step());
                    }
                    results[device][size_t(rank)] = side.all_bytes();
                });
            }
            for (size_t rank = 0; rank < 2; ++rank) EXPECT_TRUE(same(results[0][rank], results[1][rank])) << algorithm;
        }
}

} // namespace cuda_sums_tests
