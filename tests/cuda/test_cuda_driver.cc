// SPDX-License-Identifier: Apache-2.0
// The driver of a step on both backends: what ranks send, also in skipped steps, and the state after a failed exchange.
#include "backend_optimizer.h"
#include <algorithm>
#include <memory>
#include <tuple>

using namespace cuda_test;

namespace cuda_driver_tests {

constexpr int32_t kOneBitFamily[] = {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM,
                                     DSOPT_ALGORITHM_ONEBIT_LAMB};
constexpr int64_t kFreeze = 3;

Setting setting_of(int32_t algorithm, int32_t compat) {
    Setting s;
    s.algorithm = algorithm;
    s.sizes = {7, 4097, 33, 9000};
    s.desc.compat = compat;
    s.desc.nonfinite = DSOPT_NONFINITE_SKIP;
    s.change = [](dsopt_group &g, int) {
        if (g.algorithm == DSOPT_ALGORITHM_LAMB || g.algorithm == DSOPT_ALGORITHM_ADAMW) return;
        g.flags = 0;
        g.freeze_step = kFreeze;
        if (g.algorithm != DSOPT_ALGORITHM_ZERO_ONE_ADAM) return;
        g.var_interval_steps = 2;
        g.local_interval_steps = 2;
        g.max_local_interval = 4;
    };
    return s;
}

using Counts = std::tuple<int64_t, int64_t, int64_t>;
Counts counts_of(const dsopt_comm *comm) {
    DSOPT_NEW(dsopt_comm_info, info);
    BackendOptimizer::must(dsopt_comm_query(comm, &info));
    return {info.calls, info.bytes_sent, info.bytes_received};
}

class CudaStepDriver : public Cuda {
protected:
    /// Returns the counts of every step on rank 0. Every third step is skipped.
    static std::vector<Counts> traffic(bool device, const Setting &setting, bool model) {
        const Ranks ranks(2);
        std::vector<Counts> all;
        ranks.run([&](int rank) {
            Setting rank_setting = setting;
            if (model) {
                rank_setting.model = &ranks;
                rank_setting.model_rank = rank;
            }
            BackendOptimizer side(device, rank_setting, model ? nullptr : &ranks, rank);
            for (int t = 0; t < 12; ++t) {
                const bool skipped = t % 3 == 1;
                side.fill_gradients(t, skipped && rank == 1 ? 1 : -1);
                const dsopt_comm *comm = model ? side.model : side.comm;
                const Counts before = counts_of(comm);
                EXPECT_OK(side.step());
                const Counts after = counts_of(comm);
                DSOPT_NEW(dsopt_report, report);
                EXPECT_OK(dsopt_optimizer_report(side.optimizer, &report));
                EXPECT_EQ(report.last_skipped, skipped) << t;
                if (rank == 0)
                    all.emplace_back(std::get<0>(after) - std::get<0>(before), std::get<1>(after) - std::get<1>(before),
                                     std::get<2>(after) - std::get<2>(before));
            }
        });
        return all;
    }
};

TEST_F(CudaStepDriver, SendsSameBytesAsCpuEvenIfSkipped) {
    for (const int32_t algorithm : kOneBitFamily)
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
            const std::vector<Counts> host = traffic(false, setting_of(algorithm, compat), false);
            EXPECT_EQ(traffic(true, setting_of(algorithm, compat), false), host) << algorithm << ", " << compat;
            // In standard mode the host does not wait to find out that a step is skipped. In compat mode a skipped step
            // sends nothing.
            if (algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) continue; // its steps differ from each other
            const size_t skipped = 7, taken = 8;
            if (compat == DSOPT_COMPAT_NONE)
                EXPECT_EQ(host[skipped], host[taken]);
            else
                EXPECT_LT(std::get<1>(host[skipped]), std::get<1>(host[taken]));
        }
}

TEST_F(CudaStepDriver, SendsSameBytesAsCpuForShards) {
    Setting s = setting_of(DSOPT_ALGORITHM_LAMB, DSOPT_COMPAT_NONE);
    s.param_flags = DSOPT_PARAM_MODEL_PARALLEL;
    EXPECT_EQ(traffic(true, s, true), traffic(false, s, true));
}

/// Collectives with another rank that sends the same data as this rank. They fail after `left` calls.
struct Failing {
    int left = INT32_MAX; // calls until one fails
    int call() { return --left < 0 ? 7 : 0; }
    static int all_reduce(void *self, const void *, void *, int64_t, int32_t, int32_t, void *) {
        return static_cast<Failing *>(self)->call();
    }
    static int copy_to_all(void *self, const void *send, void *recv, int64_t bytes, void *) {
        for (int row = 0; row < 2; ++row) std::memcpy(static_cast<char *>(recv) + row * bytes, send, size_t(bytes));
        return static_cast<Failing *>(self)->call();
    }
};

/// A group of 1-bit Adam or LAMB and a group of AdamW, whose gradients the engine averages.
class FailingSide {
public:
    FailingSide(bool device, int32_t algorithm) : FailingSide(device, setting_of(algorithm, DSOPT_COMPAT_NONE)) {}
    FailingSide(bool device, Setting s) {
        DSOPT_NEW(dsopt_comm_table, table);
        table.self = &failing;
        table.ranks = 2;
        table.all_reduce = Failing::all_reduce;
        table.all_to_all = Failing::copy_to_all;
        table.all_gather = Failing::copy_to_all;
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = device ? DSOPT_BACKEND_CUDA : DSOPT_BACKEND_CPU;
        BackendOptimizer::must(dsopt_context_create(&context_desc, &context_));
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = DSOPT_COMM_KIND_TABLE;
        desc.table = &table;
        BackendOptimizer::must(dsopt_comm_create(context_, &desc, &comm));
        s.context = context_;
        s.desc.data = comm;
        s.change = [](dsopt_group &g, int index) {
            BackendOptimizer::must(
                dsopt_group_init(&g, sizeof g, index == 0 ? g.algorithm : int32_t(DSOPT_ALGORITHM_ADAMW)));
            if (index == 0) g.freeze_step = kFreeze;
        };
        side = std::make_unique<BackendOptimizer>(device, s);
    }
    ~FailingSide() {
        side.reset();
        dsopt_comm_destroy(comm);
        dsopt_context_destroy(context_);
    }
    /// Returns parameters and state except residuals (error feedback), which hold the sums that were to be sent.
    std::vector<std::vector<char>> state() const {
        std::vector<std::vector<char>> all;
        int64_t count = 0;
        BackendOptimizer::must(dsopt_optimizer_state_count(side->optimizer, &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            BackendOptimizer::must(dsopt_optimizer_state(side->optimizer, i, &info));
            if (info.param < 0 && (info.flags & DSOPT_STATE_RANK_LOCAL)) continue;
            all.emplace_back(size_t(info.tensor.numel) * 4);
            BackendOptimizer::must(dsopt_optimizer_export(side->optimizer, i, all.back().data(), all.back().size()));
        }
        for (const Bytes &bytes : side->params) all.push_back(bytes.get());
        return all;
    }
    Failing failing;
    dsopt_comm *comm = nullptr;
    std::unique_ptr<BackendOptimizer> side;

private:
    dsopt_context *context_ = nullptr;
};

TEST_F(CudaStepDriver, FailedCollectiveLeavesStateUnchanged) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB})
        for (const bool device : {false, true}) {
            // All-to-all and all-gather of gradients, norms, all-to-all and all-gather of the exchange.
            constexpr int collectives = 5;
            for (int successful = 0; successful <= collectives; ++successful) {
                FailingSide run(device, algorithm);
                for (int t = 0; t < kFreeze + 2; ++t) {
                    run.side->fill_gradients(t);
                    EXPECT_OK(run.side->step());
                }
                run.side->fill_gradients(10);
                const auto before = run.state();
                run.failing.left = successful;
                const std::string what = std::to_string(algorithm) + (device ? ", device, " : ", host, ") +
                                         std::to_string(successful) + " collectives";
                if (successful == collectives) {
                    EXPECT_OK(run.side->step());
                    EXPECT_FALSE(same(run.state(), before)) << what;
                    continue;
                }
                EXPECT_EQ(run.side->step(), DSOPT_ERR_COMM) << what << dsopt_last_error();
                EXPECT_TRUE(same(run.state(), before)) << what;
            }
        }
}

#if !defined(ON_A_GPU)
TEST_F(CudaStepDriver, ZeroesAveragedGradientsInOneLaunch) {
    std::vector<size_t> launches;
    for (const size_t count : {4, 40}) {
        Setting s = setting_of(DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_COMPAT_NONE);
        s.sizes.assign(count, 40);
        s.desc.flags = DSOPT_OPTIMIZER_AVERAGES;
        s.step_flags = DSOPT_STEP_ZERO_GRADS;
        FailingSide run(true, s);
        for (int t = 0; t < 2; ++t) { // full steps; the first one creates tables
            run.side->fill_gradients(t);
            fakert::mark();
            EXPECT_OK(run.side->step());
        }
        const std::vector<std::string> kernels = fakert::launched_kernels();
        EXPECT_EQ(std::count(kernels.begin(), kernels.end(), "zero"), 1);
        launches.push_back(kernels.size());
        for (const Bytes &bytes : run.side->grads)
            for (const char byte : bytes.get()) ASSERT_EQ(byte, 0);
    }
    EXPECT_EQ(launches[0], launches[1]);
}
#endif

} // namespace cuda_driver_tests
