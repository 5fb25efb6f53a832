// SPDX-License-Identifier: Apache-2.0
// The 1-bit family on emulated devices connected by the double of NCCL: the bits are the same as with threads on the
// CPU.
#include "nccl_device.h"

namespace nccl_test {
namespace nccl_onebit_tests {

TEST(NcclOneBit, MatchesThreadsInEveryCallAndMode) {
    constexpr int ranks = 3; // one per device
    for (onebit_run::Setting setting : onebit_run::settings()) {
        setting.sizes = {300, 1, 33, 4100};
        setting.calls = 12;
        const auto wanted = onebit_run::run_threads(setting, ranks);
        const std::string id = new_id();
        run_ranks(ranks, [&](int rank) {
            const Device device(id, rank, ranks, 60000);
            onebit_run::RankTrainer trainer(device.context, device.comm, rank, setting,
                                            test::cuda_memory(device.stream));
            const std::vector<std::string> all = trainer.run();
            for (size_t call = 0; call < all.size(); ++call)
                ASSERT_TRUE(all[call] == wanted[size_t(rank)][call])
                    << onebit_run::name_of(setting) << ", rank " << rank << " of " << ranks << ", call " << call + 1;
            DSOPT_NEW(dsopt_comm_info, info);
            onebit_run::must(dsopt_comm_query(device.comm, &info));
            EXPECT_GE(info.calls_of[DSOPT_COLLECTIVE_ALL_TO_ALL], 4);
            EXPECT_EQ(info.calls_of[DSOPT_COLLECTIVE_ALL_TO_ALL], info.calls_of[DSOPT_COLLECTIVE_ALL_GATHER]);
        });
    }
}

TEST(NcclOneBit, LoadsCheckpointsOfOtherRankCountsLikeCpu) {
    for (onebit_run::Setting setting : onebit_run::settings()) {
        setting.sizes = {300, 1, 33, 4100};
        setting.calls = 6; // the checkpoint is not taken between two synchronizations
        // After synchronizations of the original, ranks differ by rounding.
        if (setting.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM && setting.compat != DSOPT_COMPAT_NONE) continue;
        for (const int from : {1, 2}) {
            std::vector<std::string> files(static_cast<size_t>(from));
            onebit_run::with_threads(from, [&](dsopt_context *context, dsopt_comm *comm, int rank) {
                onebit_run::RankTrainer trainer(context, comm, rank, setting);
                (void)trainer.run();
                files[size_t(rank)] = trainer.save();
            });
            const auto continue_from = [&](onebit_run::RankTrainer &trainer, std::vector<std::string> files_) {
                std::vector<std::string> all;
                trainer.load(files_);
                all.push_back(trainer.bytes());
                for (int64_t call = setting.calls + 1; call <= setting.calls + 4; ++call) {
                    onebit_run::must(trainer.step(call));
                    all.push_back(trainer.bytes());
                }
                return all;
            };
            std::vector<std::vector<std::string>> wanted(3);
            onebit_run::with_threads(3, [&](dsopt_context *context, dsopt_comm *comm, int rank) {
                onebit_run::RankTrainer trainer(context, comm, rank, setting);
                wanted[size_t(rank)] = continue_from(trainer, files);
            });
            const std::string id = new_id();
            run_ranks(3, [&](int rank) {
                const Device device(id, rank, 3, 60000);
                onebit_run::RankTrainer trainer(device.context, device.comm, rank, setting,
                                                test::cuda_memory(device.stream));
                EXPECT_TRUE(continue_from(trainer, files) == wanted[size_t(rank)])
                    << onebit_run::name_of(setting) << " from " << from << " ranks, rank " << rank;
            });
        }
    }
}

/// Milliseconds; much longer than a step on emulated devices.
constexpr int kTimeout = test::kSanitized ? 3000 : 1000;

TEST(NcclOneBit, TimesOutIfRankHangsInEitherCollective) {
    // Calls of a rank: one in the first step, then norms, all-to-all and all-gather.
    for (const char *where : {"1:2:hang", "1:3:hang"})
        for (const int32_t algorithm : {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB}) {
            const Environment fault("DSOPT_FAKE_NCCL_FAULT", where);
            onebit_run::Setting setting;
            setting.algorithm = algorithm;
            setting.freeze_step = 1;
            setting.averages = false;
            const std::string id = new_id();
            run_ranks(2, [&](int rank) {
                const Device device(id, rank, 2, kTimeout);
                onebit_run::RankTrainer trainer(device.context, device.comm, rank, setting,
                                                test::cuda_memory(device.stream));
                onebit_run::must(trainer.step(1));
                const std::string before = trainer.bytes(false);
                const auto begin = Clock::now();
                EXPECT_EQ(trainer.step(2), DSOPT_ERR_TIMEOUT) << where << ": " << dsopt_last_error();
                EXPECT_LT(milliseconds_since(begin), kLongestMs);
                EXPECT_TRUE(trainer.bytes(false) == before) << where;
                EXPECT_EQ(trainer.step(3), DSOPT_ERR_TIMEOUT) << "the comm is unusable";
            });
        }
}

TEST(NcclOneBit, TimesOutIfModelRankHangsInTrustRatios) {
    // Calls of a rank: norms and sums in the first step; norms, sums and the largest factors in the second.
    for (const char *where : {"1:1:hang", "1:3:hang", "1:4:hang"}) {
        const Environment fault("DSOPT_FAKE_NCCL_FAULT", where);
        const int64_t good = where[2] == '1' ? 0 : 1;
        const std::string id = new_id();
        run_ranks(2, [&](int rank) {
            const Device device(id, rank, 2, kTimeout);
            onebit_run::Setting setting;
            setting.algorithm = DSOPT_ALGORITHM_ONEBIT_LAMB;
            setting.freeze_step = 1;
            setting.averages = false;
            setting.model = device.comm;
            onebit_run::RankTrainer trainer(device.context, nullptr, rank, setting, test::cuda_memory(device.stream));
            for (int64_t call = 1; call <= good; ++call) onebit_run::must(trainer.step(call));
            const auto begin = Clock::now();
            EXPECT_EQ(trainer.step(good + 1), DSOPT_ERR_TIMEOUT) << where << ": " << dsopt_last_error();
            EXPECT_LT(milliseconds_since(begin), kLongestMs);
            EXPECT_EQ(trainer.step(good + 2), DSOPT_ERR_TIMEOUT) << "the comm is unusable";
        });
    }
}

} // namespace nccl_onebit_tests
} // namespace nccl_test
