// SPDX-License-Identifier: Apache-2.0
// 1-bit compression and the 1-bit family on the device: same bits as the CPU backend, for each rank and step.
#include "side.h"

using namespace cuda_test;

namespace {

using Snapshots = std::vector<std::vector<std::vector<char>>>; // per step

class CudaOneBit : public Cuda {
protected:
    /// Returns settings with sizes around words, leaves and, with two or three ranks, chunks.
    static Setting setting(int32_t algorithm) {
        Setting s;
        s.algorithm = algorithm;
        s.sizes = {7, 0, 4097, 33, 9000, 31};
        s.change = plain;
        return s;
    }
    static void plain(dsopt_group &g, int) {
        g.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
        g.freeze_step = 4;
        if (g.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
            g.var_interval_steps = 2;
            g.local_interval_steps = 2;
            g.max_local_interval = 4;
        }
    }
    static void second_is_not_frozen(dsopt_group &g, int index) {
        plain(g, index);
        if (index == 1) g.flags |= DSOPT_GROUP_NON_FREEZE;
    }

    /// Trains ranks of one comm, or of nodes.
    static std::vector<Snapshots> train(bool device, const Setting &setting, int ranks, int bad_step,
                                        int per_node = 0) {
        const Nodes nodes(per_node > 0 ? per_node : 1, per_node > 0 ? ranks / per_node : ranks);
        std::vector<Snapshots> all(static_cast<size_t>(ranks));
        Ranks::run(ranks, [&](int rank) {
            const int d = rank / nodes.per_node, l = rank % nodes.per_node;
            Side side(device, setting, &nodes.across[size_t(l)], d, per_node > 0 ? &nodes.inside[size_t(d)] : nullptr,
                      l);
            if (setting.param_flags & DSOPT_PARAM_MASKED) mask(side);
            for (int t = 0; t < 14; ++t) {
                side.fill_gradients(t + 20 * rank, t == bad_step && rank == ranks - 1 ? 4 : -1);
                if (!setting.sizes.empty()) side.gradients[3].data = t == 6 ? nullptr : side.grads[3].data();
                if (t == 9) Side::good(dsopt_optimizer_set(side.optimizer, DSOPT_ALL_GROUPS, DSOPT_KEY_LR, 5e-3));
                const dsopt_status status = side.step();
                EXPECT_EQ(status, DSOPT_OK) << dsopt_last_error();
                if (status != DSOPT_OK) return;
                if ((t + 1) % setting.exports_every == 0) all[size_t(rank)].push_back(side.everything());
            }
        });
        return all;
    }
    static void mask(Side &side) {
        int64_t count = 0;
        Side::good(dsopt_optimizer_state_count(side.optimizer, &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            Side::good(dsopt_optimizer_state(side.optimizer, i, &info));
            if (std::strcmp(info.name, "mask") != 0) continue;
            std::vector<float> values(size_t(info.tensor.numel));
            for (size_t k = 0; k < values.size(); ++k) values[k] = k % 3 != 0;
            Side::good(dsopt_optimizer_import(side.optimizer, i, values.data(), values.size() * sizeof(float)));
        }
    }
    static void expect_same_bits(const Setting &setting, int ranks, int bad_step, const std::string &what,
                                 int per_node = 0) {
        SCOPED_TRACE(what + ", " + std::to_string(ranks) + " ranks, in a node " + std::to_string(per_node));
        const std::vector<Snapshots> host = train(false, setting, ranks, bad_step, per_node),
                                     device = train(true, setting, ranks, bad_step, per_node);
        for (size_t rank = 0; rank < host.size(); ++rank) {
            ASSERT_EQ(host[rank].size(), device[rank].size());
            for (size_t t = 0; t < host[rank].size(); ++t)
                ASSERT_TRUE(same(host[rank][t], device[rank][t])) << "step " << t << " of rank " << rank;
        }
    }
    static const char *name_of(int32_t algorithm) {
        return algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM     ? "1-bit Adam"
               : algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM ? "0/1 Adam"
                                                            : "1-bit LAMB";
    }
    static constexpr int32_t kFamily[] = {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM,
                                          DSOPT_ALGORITHM_ONEBIT_LAMB};
};

TEST_F(CudaOneBit, GivesTheBitsOfTheCpuInBothModes) {
    for (const int32_t algorithm : kFamily)
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED})
            for (const int ranks : {1, 2, 3}) {
                Setting s = setting(algorithm);
                s.desc.compat = compat;
                s.gaps = true;
                expect_same_bits(s, ranks, -1, std::string(name_of(algorithm)) + (compat ? ", compat" : ""));
            }
}

TEST_F(CudaOneBit, GivesTheBitsOfTheCpuWithMastersAScalerClippingAndSkippedSteps) {
    for (const int32_t algorithm : kFamily)
        for (const int bad_step : {1, 3, 8}) { // before, at and after the freeze of the variance
            Setting s = setting(algorithm);
            s.param = DSOPT_DTYPE_F16;
            s.grad = DSOPT_DTYPE_BF16;
            s.scaler = s.shifted = true;
            s.desc.max_norm = 1;
            s.step_flags = DSOPT_STEP_ZERO_GRADS;
            s.out = DSOPT_DTYPE_BF16;
            expect_same_bits(s, 2, bad_step, name_of(algorithm));
        }
}

TEST_F(CudaOneBit, GivesTheBitsOfTheCpuUnderTheOriginalsWrappers) {
    for (const int32_t algorithm : kFamily)
        for (const int32_t masters : {DSOPT_MASTERS_FLAT, DSOPT_MASTERS_PER_TENSOR}) {
            Setting s = setting(algorithm);
            s.param = s.grad = DSOPT_DTYPE_F16;
            s.desc.compat = DSOPT_COMPAT_DEEPSPEED;
            s.desc.masters = masters;
            s.scaler = true;
            expect_same_bits(s, 2, 8, name_of(algorithm));
        }
}

TEST_F(CudaOneBit, GivesTheBitsOfTheCpuWithMasksAndGradientsThatItAverages) {
    for (const int32_t algorithm : kFamily)
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
            Setting s = setting(algorithm);
            s.desc.compat = compat;
            s.desc.flags = DSOPT_OPTIMIZER_AVERAGES;
            s.param_flags = DSOPT_PARAM_MASKED;
            s.step_flags = DSOPT_STEP_ZERO_GRADS;
            expect_same_bits(s, 2, -1, name_of(algorithm));
        }
}

TEST_F(CudaOneBit, GivesTheBitsOfTheCpuWithAGroupThatIsNotFrozen) {
    for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED})
        for (const int ranks : {1, 2}) {
            Setting s = setting(DSOPT_ALGORITHM_ONEBIT_ADAM);
            s.desc.compat = compat;
            s.change = second_is_not_frozen;
            expect_same_bits(s, ranks, -1, compat ? "compat" : "standard");
        }
}

TEST_F(CudaOneBit, GivesTheBitsOfTheCpuWithTheMomentumInBits) {
    for (const int bad_step : {-1, 4, 8}) { // 4: the first exchange
        Setting s = setting(DSOPT_ALGORITHM_ONEBIT_ADAM);
        s.desc.flags = DSOPT_OPTIMIZER_MOMENTUM_BITS;
        s.desc.max_norm = 1;
        s.gaps = true;
        for (const int ranks : {1, 2}) expect_same_bits(s, ranks, bad_step, std::to_string(bad_step));
        s.exports_every = 5;
        expect_same_bits(s, 3, bad_step, "seldom looked at");
    }
}

TEST_F(CudaOneBit, GivesTheBitsOfTheCpuInTwoLevels) {
    const struct { int per_node, nodes; } shapes[] = {{2, 2}, {3, 2}, {2, 1}, {1, 2}};
    for (const auto &shape : shapes) {
        for (const int32_t algorithm : kFamily) {
            Setting s = setting(algorithm);
            s.desc.flags = DSOPT_OPTIMIZER_AVERAGES;
            s.gaps = true;
            expect_same_bits(s, shape.per_node * shape.nodes, -1, name_of(algorithm), shape.per_node);
        }
        Setting s = setting(DSOPT_ALGORITHM_ONEBIT_ADAM);
        s.desc.flags = DSOPT_OPTIMIZER_MOMENTUM_BITS;
        s.desc.max_norm = 1;
        s.param = s.grad = DSOPT_DTYPE_F16;
        s.scaler = true;
        s.exports_every = 4;
        expect_same_bits(s, shape.per_node * shape.nodes, 6, "momentum in bits", shape.per_node);
    }
}

TEST_F(CudaOneBit, TakesStepsWhereNothingGoesIntoExchanges) {
    for (const int32_t algorithm : kFamily)
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
            Setting s = setting(algorithm);
            s.sizes = {};
            s.desc.compat = compat;
            expect_same_bits(s, 2, -1, name_of(algorithm));
            if (compat == DSOPT_COMPAT_NONE) expect_same_bits(s, 4, -1, name_of(algorithm), 2);
        }
    Setting s = setting(DSOPT_ALGORITHM_ONEBIT_ADAM);
    s.change = [](dsopt_group &g, int) {
        plain(g, 0);
        g.flags |= DSOPT_GROUP_NON_FREEZE;
    };
    expect_same_bits(s, 4, -1, "no group is frozen", 2);
}

TEST_F(CudaOneBit, CompressesListsLikeTheCpu) {
    const std::vector<int64_t> sizes{1, 31, 0, 32, 4096, 33, 9001};
    const struct {
        int32_t compat;
        int per_node, nodes;
    } rows[] = {{DSOPT_COMPAT_NONE, 0, 1},      {DSOPT_COMPAT_NONE, 0, 2},      {DSOPT_COMPAT_NONE, 0, 3},
                {DSOPT_COMPAT_NONE, 0, 5},      {DSOPT_COMPAT_DEEPSPEED, 0, 1}, {DSOPT_COMPAT_DEEPSPEED, 0, 2},
                {DSOPT_COMPAT_DEEPSPEED, 0, 3}, {DSOPT_COMPAT_DEEPSPEED, 0, 5}, {DSOPT_COMPAT_NONE, 2, 2},
                {DSOPT_COMPAT_NONE, 3, 1},      {DSOPT_COMPAT_NONE, 1, 3},      {DSOPT_COMPAT_NONE, 2, 3}};
    for (const auto &row : rows) {
        const Nodes nodes(row.per_node > 0 ? row.per_node : 1, row.nodes);
        const int count = nodes.count();
        SCOPED_TRACE(std::to_string(row.nodes) + " nodes of " + std::to_string(row.per_node) +
                     (row.compat ? ", compat" : ""));
        std::vector<std::vector<std::vector<char>>> results[2];
        for (const bool device : {false, true}) {
            results[device].resize(size_t(count));
            const Nodes group(nodes.per_node, nodes.nodes);
            Ranks::run(count, [&](int rank) {
                const int d = rank / nodes.per_node, l = rank % nodes.per_node;
                DSOPT_NEW(dsopt_context_desc, where);
                where.backend = device ? DSOPT_BACKEND_CUDA : DSOPT_BACKEND_CPU;
                dsopt_context *context = nullptr;
                ASSERT_OK(dsopt_context_create(&where, &context));
                dsopt_comm *comm = group.across[size_t(l)].join(context, d), *node = nullptr;
                if (row.per_node > 0) node = group.inside[size_t(d)].join(context, l);
                {
                    std::vector<Bytes> memory;
                    std::vector<dsopt_tensor> list;
                    for (const int64_t n : sizes) {
                        memory.emplace_back(device, size_t(n) * sizeof(float), n % 2 ? sizeof(float) : 0);
                        list.push_back({memory.back().data(), n, DSOPT_DTYPE_F32, 0});
                    }
                    DSOPT_NEW(dsopt_compressed, args);
                    args.tensors = list.data();
                    args.count = int64_t(list.size());
                    args.compat = row.compat;
                    args.node = node;
                    int64_t worker = 0, server = 0;
                    ASSERT_OK(dsopt_compressed_sizes(comm, &args, &worker, &server, &args.workspace_bytes));
                    Bytes worker_error(device, size_t(worker) * sizeof(float), 0),
                        server_error(device, size_t(server) * sizeof(float), 0),
                        workspace(device, args.workspace_bytes + 256, 0);
                    worker_error.set(std::vector<char>(size_t(worker) * sizeof(float)));
                    server_error.set(std::vector<char>(size_t(server) * sizeof(float)));
                    args.worker_error = reinterpret_cast<float *>(worker_error.data());
                    args.server_error = reinterpret_cast<float *>(server_error.data());
                    args.workspace =
                        workspace.data() + (256 - reinterpret_cast<uintptr_t>(workspace.data()) % 256) % 256;
                    for (int call = 0; call < 4; ++call) {
                        for (size_t i = 0; i < sizes.size(); ++i) {
                            const int64_t n = sizes[i];
                            std::vector<char> values(static_cast<size_t>(n) * sizeof(float));
                            for (int64_t k = 0; k < n; ++k)
                                store(&values[size_t(k) * sizeof(float)], DSOPT_DTYPE_F32,
                                      std::sin(float(k * (rank + 2) + call + int64_t(i))));
                            memory[i].set(values);
                        }
                        ASSERT_OK(dsopt_compressed_allreduce(comm, &args));
                        for (const Bytes &bytes : memory) results[device][size_t(rank)].push_back(bytes.get());
                    }
                    std::vector<float> owed_worker(static_cast<size_t>(worker)),
                        owed_server(static_cast<size_t>(server));
                    ASSERT_OK(dsopt_compressed_errors(comm, &args, owed_worker.data(), owed_server.data()));
                    for (const std::vector<float> *owed : {&owed_worker, &owed_server})
                        results[device][size_t(rank)].emplace_back(
                            reinterpret_cast<const char *>(owed->data()),
                            reinterpret_cast<const char *>(owed->data() + owed->size()));
                }
                dsopt_comm_destroy(node);
                dsopt_comm_destroy(comm);
                dsopt_context_destroy(context);
            });
        }
        for (size_t rank = 0; rank < size_t(count); ++rank)
            ASSERT_TRUE(same(results[0][rank], results[1][rank])) << "rank " << rank;
    }
}

TEST_F(CudaOneBit, ReadsItsStageFromWhatWasImported) {
    for (const int32_t algorithm : kFamily) {
        SCOPED_TRACE(name_of(algorithm));
        Setting s = setting(algorithm);
        Side device(true, s), host(false, s);
        for (Side *side : {&device, &host}) {
            for (int t = 0; t < 6; ++t) {
                side->fill_gradients(t);
                ASSERT_OK(side->step());
            }
            ASSERT_OK(dsopt_optimizer_reset(side->optimizer, DSOPT_RESET_COUNTERS, nullptr));
            int32_t what = -1;
            ASSERT_OK(dsopt_optimizer_next_reduction(side->optimizer, 0, &what));
            EXPECT_EQ(what, DSOPT_REDUCTION_FULL);
            for (int t = 0; t < 6; ++t) {
                side->fill_gradients(t);
                ASSERT_OK(side->step());
            }
        }
        EXPECT_TRUE(same(host.everything(), device.everything()));
    }
}

TEST_F(CudaOneBit, TellsTimesOfStepsWithoutOtherRanks) {
    for (const int32_t algorithm : kFamily) {
        Setting s = setting(algorithm);
        s.desc.flags = DSOPT_OPTIMIZER_TIMING;
        Side side(true, s);
        for (int t = 0; t < 9; ++t) {
            side.fill_gradients(t);
            ASSERT_OK(side.step());
            DSOPT_NEW(dsopt_report, report);
            ASSERT_OK(dsopt_optimizer_report(side.optimizer, &report));
            for (const int phase : {DSOPT_MS_COMPRESS, DSOPT_MS_EXCHANGE, DSOPT_MS_DECOMPRESS})
                EXPECT_EQ(report.ms[phase], 0) << "there is no exchange";
        }
    }
}

TEST_F(CudaOneBit, KnowsItsStageAfterStepsThatBroughtItsOwnState) {
    for (const int32_t algorithm : kFamily)
        for (const bool applies : {false, true}) {
            SCOPED_TRACE(std::string(name_of(algorithm)) + (applies ? ", apply" : ", step"));
            Setting s = setting(algorithm);
            Side device(true, s), host(false, s);
            for (Side *side : {&device, &host}) {
                size_t bytes = 0;
                ASSERT_OK(dsopt_optimizer_workspace(side->optimizer, &bytes));
                const Bytes workspace(side == &device, bytes + 256, 0);
                for (int t = 0; t < 9; ++t) {
                    side->fill_gradients(t);
                    dsopt_step step = side->arguments();
                    std::vector<dsopt_tensor> state, params;
                    if (t >= 1 && t <= 5) { // before and after the freeze
                        state = side->state();
                        step.state = state.data();
                        step.state_count = int64_t(state.size());
                    }
                    if (step.state != nullptr && applies) {
                        for (size_t i = 0; i < side->params.size(); ++i)
                            params.push_back({side->params[i].data(), side->gradients[i].numel, s.param, 0});
                        step.params = params.data();
                        step.workspace_bytes = bytes;
                        step.workspace =
                            workspace.data() + (256 - reinterpret_cast<uintptr_t>(workspace.data()) % 256) % 256;
                        ASSERT_OK(dsopt_optimizer_apply(side->optimizer, &step));
                    } else {
                        ASSERT_OK(dsopt_optimizer_step(side->optimizer, &step));
                    }
                }
            }
            EXPECT_TRUE(same(host.everything(), device.everything()));
        }
}

TEST_F(CudaOneBit, RefusesToBeCaptured) {
    Side side(true, setting(DSOPT_ALGORITHM_ONEBIT_ADAM));
    side.fill_gradients(0);
    ASSERT_OK(side.step());
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    dsopt_step step = side.arguments();
    step.stream = stream;
    EXPECT_EQ(dsopt_optimizer_step(side.optimizer, &step), DSOPT_ERR_STATE);
    EXPECT_NE(std::string(dsopt_last_error()).find("captured"), std::string::npos) << dsopt_last_error();
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    ASSERT_OK(side.step());
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

} // namespace
