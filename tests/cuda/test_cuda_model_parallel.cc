// SPDX-License-Identifier: Apache-2.0
// LAMB and 1-bit LAMB on tensors that are sharded over model-parallel ranks: same bits as the CPU backend on every
// rank.
#include "side.h"

using namespace cuda_test;

namespace {

class CudaModelParallel : public Cuda {
protected:
    static constexpr uint32_t kSharded = DSOPT_PARAM_MODEL_PARALLEL;
    /// Returns settings with shards of different sizes, an empty one and one of many leaves, and a tensor that is whole
    /// on both ranks.
    static Setting setting(int32_t algorithm, int rank) {
        Setting s;
        s.algorithm = algorithm;
        s.sizes =
            rank == 0 ? std::vector<int64_t>{4097, 33, 0, 700, 1} : std::vector<int64_t>{9, 33, 5000, 40000, 4096};
        s.flags_of = {kSharded, 0, kSharded, kSharded, kSharded};
        s.change = [](dsopt_group &group, int) {
            if (group.algorithm != DSOPT_ALGORITHM_ONEBIT_LAMB) return;
            group.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
            group.freeze_step = 3;
        };
        return s;
    }
    using Snapshots = std::vector<std::vector<std::vector<char>>>; // per step
    /// Trains two model ranks and `data_ranks` data ranks. `bad_step`: a step with an overflow on one rank.
    static std::vector<Snapshots> train(bool device, const std::function<void(Setting &)> &change, int32_t algorithm,
                                        int data_ranks, int bad_step) {
        std::deque<Ranks> model_groups, data_groups;
        for (int d = 0; d < data_ranks; ++d) model_groups.emplace_back(2);
        for (int m = 0; m < 2; ++m) data_groups.emplace_back(data_ranks);
        std::vector<Snapshots> all(size_t(2 * data_ranks));
        Ranks::run(2 * data_ranks, [&](int rank) {
            const int m = rank % 2, d = rank / 2;
            Setting s = setting(algorithm, m);
            change(s);
            s.model = &model_groups[size_t(d)];
            s.model_rank = m;
            Side side(device, s, data_ranks > 1 ? &data_groups[size_t(m)] : nullptr, d);
            for (int t = 0; t < 7; ++t) {
                side.fill_gradients(t + 20 * rank, t == bad_step && rank == 1 ? 3 : -1);
                side.gradients[4].data = t == 2 ? nullptr : side.grads[4].data();
                const dsopt_status status = side.step();
                EXPECT_EQ(status, DSOPT_OK) << dsopt_last_error();
                if (status != DSOPT_OK) return;
                all[size_t(rank)].push_back(side.everything());
            }
        });
        return all;
    }
    static void expect_same_bits(const std::function<void(Setting &)> &change, const std::string &what, int bad_step,
                                 int32_t algorithm = DSOPT_ALGORITHM_LAMB, int data_ranks = 1) {
        SCOPED_TRACE(what + ", " + std::to_string(data_ranks) + " data ranks, bad step " + std::to_string(bad_step));
        const std::vector<Snapshots> host = train(false, change, algorithm, data_ranks, bad_step),
                                     device = train(true, change, algorithm, data_ranks, bad_step);
        for (size_t rank = 0; rank < host.size(); ++rank) {
            ASSERT_EQ(host[rank].size(), device[rank].size());
            for (size_t t = 0; t < host[rank].size(); ++t)
                ASSERT_TRUE(same(host[rank][t], device[rank][t])) << "step " << t << " of rank " << rank;
        }
    }
    static void plain(Setting &) {}
};

TEST_F(CudaModelParallel, LambOnShardsGivesTheBitsOfTheCpu) {
    expect_same_bits(plain, "fp32", -1);
    expect_same_bits([](Setting &s) { s.mixed = true; }, "mixed", -1);
    expect_same_bits(
        [](Setting &s) {
            s.param = DSOPT_DTYPE_F16;
            s.grad = DSOPT_DTYPE_BF16;
            s.scaler = s.shifted = true;
            s.desc.max_norm = 1;
            s.desc.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
            s.step_flags = DSOPT_STEP_ZERO_GRADS;
            s.out = DSOPT_DTYPE_BF16;
        },
        "masters, clipping, a scaler", 3);
    expect_same_bits([](Setting &s) { s.desc.compat = DSOPT_COMPAT_DEEPSPEED; }, "compat", -1);
    expect_same_bits(plain, "fp32", -1, DSOPT_ALGORITHM_LAMB, 2);
}

TEST_F(CudaModelParallel, OneBitLambOnShardsGivesTheBitsOfTheCpu) {
    for (const int data_ranks : {1, 2}) {
        expect_same_bits(plain, "fp32", -1, DSOPT_ALGORITHM_ONEBIT_LAMB, data_ranks);
        for (const int bad_step : {1, 2, 5})
            expect_same_bits(
                [](Setting &s) {
                    s.param = DSOPT_DTYPE_BF16;
                    s.scaler = true;
                    s.desc.max_norm = 1;
                    s.step_flags = DSOPT_STEP_ZERO_GRADS;
                },
                "masters, clipping, a scaler", bad_step, DSOPT_ALGORITHM_ONEBIT_LAMB, data_ranks);
    }
}

TEST_F(CudaModelParallel, OneBitLambBesideLambGivesTheBitsOfTheCpu) {
    expect_same_bits(
        [](Setting &s) {
            s.change = [](dsopt_group &group, int index) {
                if (index == 0) {
                    group.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
                    group.freeze_step = 3;
                    return;
                }
                const double lr = group.lr;
                Side::good(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_LAMB));
                group.lr = lr;
            };
        },
        "LAMB in the second group", -1, DSOPT_ALGORITHM_ONEBIT_LAMB);
}

} // namespace
