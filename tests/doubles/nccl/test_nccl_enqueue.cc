// SPDX-License-Identifier: Apache-2.0
// DSOPT_COMM_FLAG_ENQUEUE: exchanges in stream order. The results are the same as without the flag, and as with threads
// on the CPU.
#include "fakert.h"
#include "nccl_device.h"
#include <barrier>
#include <cmath>

namespace nccl_test {
namespace nccl_enqueue_tests {

using onebit_run::Memory;
using onebit_run::must;

constexpr int kRanks = 2;
constexpr int64_t kCalls = 7;
using Comms = std::vector<dsopt_comm *>; // data, model, experts

/// Steps of AdamW, or of LAMB on shards, with every reduction of a step: norms of a sharded model and of experts,
/// clipping, overflow, trust ratios.
class MultiCommTrainer {
public:
    MultiCommTrainer(dsopt_context *context, const Comms &comms, int rank, Memory memory, int32_t algorithm) :
        rank_(rank),
        memory_(std::move(memory)) {
        DSOPT_NEW(dsopt_scaler_desc, scaler_desc);
        scaler_desc.init = 64;
        scaler_desc.window = 2;
        must(dsopt_scaler_create(context, &scaler_desc, &scaler_));
        dsopt_comm *const experts[] = {comms[2]};
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.scaler = scaler_;
        desc.max_norm = 1;
        desc.data = comms[0];
        desc.model = comms[1];
        desc.experts = experts;
        desc.expert_count = 1;
        must(dsopt_optimizer_create(context, &desc, &opt_));
        dsopt_group group;
        must(dsopt_group_init(&group, sizeof group, algorithm));
        for (const bool second : {false, true}) {
            std::vector<dsopt_param> params;
            for (size_t t = second ? 2 : 0; t < (second ? 4u : 2u); ++t) {
                const std::vector<float> values(size_t(kSizes[t]), 0.5f);
                weights_.push_back(memory_.allocate(values.size() * sizeof(float)));
                grads_.push_back(memory_.allocate(values.size() * sizeof(float)));
                memory_.write(weights_[t], values.data(), values.size() * sizeof(float));
                dsopt_param param{};
                param.tensor = {weights_[t], kSizes[t], DSOPT_DTYPE_F32, 0};
                param.expert = t % 2 ? 1 : 0;
                param.flags = algorithm == DSOPT_ALGORITHM_LAMB ? DSOPT_PARAM_MODEL_PARALLEL : 0;
                params.push_back(param);
            }
            must(dsopt_optimizer_add_group(opt_, &group, params.data(), int64_t(params.size())));
            group.lr = 1e-2;
            group.max_norm = 0.25;
        }
    }
    ~MultiCommTrainer() {
        dsopt_optimizer_destroy(opt_);
        dsopt_scaler_destroy(scaler_);
        for (const auto *list : {&weights_, &grads_, &state_memory_})
            for (void *memory : *list) memory_.release(memory);
    }
    MultiCommTrainer(const MultiCommTrainer &) = delete;
    MultiCommTrainer &operator=(const MultiCommTrainer &) = delete;

    void fill(int64_t call) {
        for (size_t t = 0; t < grads_.size(); ++t) {
            std::vector<float> values(static_cast<size_t>(kSizes[t]));
            for (size_t i = 0; i < values.size(); ++i) values[i] = float((i * 7 + size_t(call + rank_) * 5) % 23) - 11;
            if (call == 3 && rank_ == 1 && t == 0) values.back() = INFINITY;
            if (call == 5 && rank_ == 0 && t == 3) values.front() = NAN;
            memory_.write(grads_[t], values.data(), values.size() * sizeof(float));
        }
    }
    void step() {
        const std::vector<dsopt_tensor> list = list_of(grads_);
        DSOPT_NEW(dsopt_step, step);
        step.grads = list.data();
        step.count = int64_t(list.size());
        step.stream = memory_.stream;
        must(dsopt_optimizer_step(opt_, &step));
    }
    /// Allocates memory for apply().
    void init_state() {
        const std::vector<dsopt_tensor> params = list_of(weights_);
        int64_t count = 0;
        must(dsopt_optimizer_state_count(opt_, &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            must(dsopt_optimizer_state(opt_, i, &info));
            state_memory_.push_back(memory_.allocate(size_t(info.tensor.numel) * sizeof(float)));
            state_.push_back({state_memory_.back(), info.tensor.numel, info.tensor.dtype, 0});
        }
        must(dsopt_optimizer_init_state(opt_, params.data(), int64_t(params.size()), state_.data(), count,
                                        memory_.stream));
        must(dsopt_optimizer_workspace(opt_, &workspace_bytes_));
        state_memory_.push_back(memory_.allocate(workspace_bytes_));
    }
    void apply() {
        const std::vector<dsopt_tensor> params = list_of(weights_), list = list_of(grads_);
        DSOPT_NEW(dsopt_step, step);
        step.params = params.data();
        step.grads = list.data();
        step.count = int64_t(list.size());
        step.state = state_.data();
        step.state_count = int64_t(state_.size());
        step.workspace = state_memory_.back();
        step.workspace_bytes = workspace_bytes_;
        step.stream = memory_.stream;
        must(dsopt_optimizer_apply(opt_, &step));
    }
    std::string weights() {
        std::string all;
        for (size_t t = 0; t < weights_.size(); ++t) {
            std::string part(size_t(kSizes[t]) * sizeof(float), '\0');
            memory_.read(part.data(), weights_[t], part.size());
            all += part;
        }
        return all;
    }
    /// Returns the weights and the report.
    std::string bytes() {
        std::string all = weights();
        DSOPT_NEW(dsopt_report, report);
        must(dsopt_optimizer_report(opt_, &report));
        for (const double number : {double(report.skipped), report.grad_norm, report.dense_norm, report.expert_norm,
                                    report.loss_scale, report.divisor})
            all += std::isnan(number) ? "nan," : std::to_string(number) + ",";
        return all;
    }
    std::vector<std::string> run() {
        std::vector<std::string> all;
        for (int64_t call = 1; call <= kCalls; ++call) {
            fill(call);
            step();
            all.push_back(bytes());
        }
        return all;
    }

private:
    static constexpr int64_t kSizes[] = {5000, 33, 1, 4096};
    static std::vector<dsopt_tensor> list_of(const std::vector<void *> &memory) {
        std::vector<dsopt_tensor> list;
        for (size_t t = 0; t < memory.size(); ++t) list.push_back({memory[t], kSizes[t], DSOPT_DTYPE_F32, 0});
        return list;
    }
    int rank_;
    Memory memory_;
    std::vector<void *> weights_, grads_, state_memory_;
    std::vector<dsopt_tensor> state_;
    size_t workspace_bytes_ = 0;
    dsopt_scaler *scaler_ = nullptr;
    dsopt_optimizer *opt_ = nullptr;
};

/// Context, stream and three comms of one rank.
class ThreeComms {
public:
    ThreeComms(const std::vector<std::string> &ids, int rank, uint32_t flags) :
        device_(ids[0], rank, kRanks, 60000, flags),
        comms{device_.comm, nullptr, nullptr} {
        for (size_t k = 1; k < comms.size(); ++k) {
            const dsopt_comm_desc desc = desc_of(ids[k], rank, kRanks, 60000, flags);
            must(dsopt_comm_create(device_.context, &desc, &comms[k]));
        }
    }
    ~ThreeComms() {
        for (size_t k = 1; k < comms.size(); ++k) dsopt_comm_destroy(comms[k]);
    }
    ThreeComms(const ThreeComms &) = delete;
    ThreeComms &operator=(const ThreeComms &) = delete;
    dsopt_context *context() const { return device_.context; }
    cudaStream_t stream() const { return device_.stream; }

private:
    Device device_;

public:
    Comms comms;
};

/// Leaves the barrier if the rank throws, so that other ranks do not wait for it.
class LeaveOnThrow {
public:
    explicit LeaveOnThrow(std::barrier<> &barrier) : barrier_(barrier), thrown_(std::uncaught_exceptions()) {}
    ~LeaveOnThrow() {
        if (std::uncaught_exceptions() > thrown_) barrier_.arrive_and_drop();
    }
    LeaveOnThrow(const LeaveOnThrow &) = delete;
    LeaveOnThrow &operator=(const LeaveOnThrow &) = delete;

private:
    std::barrier<> &barrier_;
    int thrown_;
};
/// A graph of the work that body() enqueues.
class Graph {
public:
    template <class Body> Graph(cudaStream_t stream, const Body &body) : stream_(stream) {
        EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        body();
        EXPECT_EQ(cudaStreamEndCapture(stream, &graph_), cudaSuccess);
        EXPECT_EQ(cudaGraphInstantiate(&exec_, graph_, 0), cudaSuccess);
    }
    ~Graph() {
        (void)cudaGraphExecDestroy(exec_);
        (void)cudaGraphDestroy(graph_);
    }
    Graph(const Graph &) = delete;
    Graph &operator=(const Graph &) = delete;
    void launch() const { EXPECT_EQ(cudaGraphLaunch(exec_, stream_), cudaSuccess); }

private:
    cudaStream_t stream_;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t exec_ = nullptr;
};
void expect_busy(cudaStream_t stream) {
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    (void)cudaGetLastError();
}

constexpr int32_t kAlgorithms[] = {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB};

/// Returns the results of threads on the CPU.
std::vector<std::vector<std::string>> on_cpu_threads(int32_t algorithm) {
    std::vector<std::vector<std::string>> all(kRanks);
    onebit_run::with_threads(kRanks, [&](dsopt_context *context, dsopt_comm *comm, int rank) {
        // The same comm three times: its calls are in the same order on both ranks.
        all[size_t(rank)] = MultiCommTrainer(context, {comm, comm, comm}, rank, test::host_memory(), algorithm).run();
    });
    return all;
}

TEST(NcclEnqueued, StepMatchesCpuWithModelAndExpertComms) {
    for (const int32_t algorithm : kAlgorithms) {
        const auto wanted = on_cpu_threads(algorithm);
        ASSERT_NE(wanted[0][2].find("2.0"), std::string::npos) << "the bytes contain no number of the report";
        for (const uint32_t flags : {uint32_t(0), uint32_t(DSOPT_COMM_FLAG_ENQUEUE)}) {
            const std::vector<std::string> ids{new_id(), new_id(), new_id()};
            run_ranks(kRanks, [&](int rank) {
                const ThreeComms rank_comms(ids, rank, flags);
                const std::vector<std::string> all = MultiCommTrainer(rank_comms.context(), rank_comms.comms, rank,
                                                                      test::cuda_memory(rank_comms.stream()), algorithm)
                                                         .run();
                for (size_t call = 0; call < all.size(); ++call)
                    EXPECT_TRUE(all[call] == wanted[size_t(rank)][call])
                        << "algorithm " << algorithm << ", flags " << flags << ", rank " << rank << ", call "
                        << call + 1 << ": " << all[call].substr(all[call].size() - 80) << " instead of "
                        << wanted[size_t(rank)][call].substr(wanted[size_t(rank)][call].size() - 80);
            });
        }
    }
}

class NcclEnqueuedStep : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(, NcclEnqueuedStep, testing::ValuesIn(kAlgorithms), [](const auto &info) {
    return std::string(info.param == DSOPT_ALGORITHM_LAMB ? "Lamb" : "AdamW");
});

TEST_P(NcclEnqueuedStep, ReturnsBeforePeerBegins) {
    const std::vector<std::string> ids{new_id(), new_id(), new_id()};
    std::barrier barrier(kRanks);
    run_ranks(kRanks, [&](int rank) {
        const LeaveOnThrow leave_on_throw(barrier);
        const ThreeComms rank_comms(ids, rank, DSOPT_COMM_FLAG_ENQUEUE);
        MultiCommTrainer trainer(rank_comms.context(), rank_comms.comms, rank, test::cuda_memory(rank_comms.stream()),
                                 GetParam());
        trainer.fill(1);
        trainer.step();
        trainer.fill(2); // waits for the first step
        barrier.arrive_and_wait();
        if (rank == 0) {
            fakert::mark();
            trainer.step();
            const fakert::Counters c = fakert::counters();
            EXPECT_EQ(c.host_waits + c.host_queries + c.copies_to_host + c.copies_to_device + c.device_allocations, 0);
            expect_busy(rank_comms.stream());
        }
        barrier.arrive_and_wait();
        if (rank == 1) trainer.step();
        EXPECT_EQ(cudaStreamSynchronize(rank_comms.stream()), cudaSuccess);
    });
}

TEST_P(NcclEnqueuedStep, GraphMatchesPlainSteps) {
    constexpr int replays = 3;
    std::vector<std::string> wanted(kRanks), got(kRanks);
    for (const bool captured : {false, true}) {
        const std::vector<std::string> ids{new_id(), new_id(), new_id()};
        run_ranks(kRanks, [&](int rank) {
            const ThreeComms rank_comms(ids, rank, DSOPT_COMM_FLAG_ENQUEUE);
            MultiCommTrainer trainer(rank_comms.context(), rank_comms.comms, rank,
                                     test::cuda_memory(rank_comms.stream()), GetParam());
            trainer.fill(1);
            trainer.step();
            trainer.fill(2);
            if (!captured) {
                for (int i = 0; i < replays; ++i) trainer.step();
                wanted[size_t(rank)] = trainer.bytes();
                return;
            }
            const Graph graph(rank_comms.stream(), [&] { trainer.step(); });
            for (int i = 0; i < replays; ++i) graph.launch();
            got[size_t(rank)] = trainer.bytes();
        });
    }
    EXPECT_TRUE(got == wanted);
}

TEST_P(NcclEnqueuedStep, FirstApplyCanBeCaptured) {
    constexpr int replays = 3;
    std::vector<std::string> wanted(kRanks), got(kRanks);
    for (const bool captured : {false, true}) {
        const std::vector<std::string> ids{new_id(), new_id(), new_id()};
        run_ranks(kRanks, [&](int rank) {
            const ThreeComms rank_comms(ids, rank, DSOPT_COMM_FLAG_ENQUEUE);
            MultiCommTrainer trainer(rank_comms.context(), rank_comms.comms, rank,
                                     test::cuda_memory(rank_comms.stream()), GetParam());
            trainer.fill(1);
            trainer.init_state();
            const std::string before = trainer.weights();
            if (captured) {
                const Graph graph(rank_comms.stream(), [&] { trainer.apply(); });
                for (int i = 0; i < replays; ++i) graph.launch();
                got[size_t(rank)] = trainer.weights();
            } else {
                for (int i = 0; i < replays; ++i) trainer.apply();
                wanted[size_t(rank)] = trainer.weights();
                EXPECT_TRUE(wanted[size_t(rank)] != before);
            }
        });
    }
    EXPECT_TRUE(got == wanted);
}

/// A graph of an all-reduce, captured and owned by the program.
struct GraphOfSum {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    GraphOfSum(const Device &device, void *value) {
        dsopt_tensor list{value, 1, DSOPT_DTYPE_F32, 0};
        // The first call allocates memory.
        must(dsopt_comm_all_reduce(device.comm, &list, 1, DSOPT_OP_SUM, device.stream));
        EXPECT_EQ(cudaStreamSynchronize(device.stream), cudaSuccess);
        EXPECT_EQ(cudaStreamBeginCapture(device.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        must(dsopt_comm_all_reduce(device.comm, &list, 1, DSOPT_OP_SUM, device.stream));
        EXPECT_EQ(cudaStreamEndCapture(device.stream, &graph), cudaSuccess);
        EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    }
    void destroy() const {
        (void)cudaGraphExecDestroy(exec);
        (void)cudaGraphDestroy(graph);
    }
};

// NCCL does not destroy a communicator while a graph refers to it (docs/graphs.md). If the comm is destroyed first, the
// call returns in bounded time, and a thread destroys the communicator after the graph.
TEST(NcclEnqueued, DestroyReturnsBeforeGraphIsDestroyed) {
    for (const bool graph_first : {true, false}) {
        const std::string id = new_id();
        const bool has_finalize = std::getenv("DSOPT_NCCL_LIBRARY") == nullptr;
        const FakeNcclCounts before = counts();
        run_ranks(kRanks, [&](int rank) {
            Device device(id, rank, kRanks, 60000, DSOPT_COMM_FLAG_ENQUEUE);
            void *value = nullptr;
            EXPECT_EQ(cudaMalloc(&value, sizeof(float)), cudaSuccess);
            const GraphOfSum graph(device, value);
            if (graph_first) graph.destroy();
            const auto begin = Clock::now();
            dsopt_comm_destroy(device.comm);
            device.comm = nullptr;
            EXPECT_LT(milliseconds_since(begin), kLongestMs);
            if (!graph_first) graph.destroy();
            (void)cudaFree(value);
        });
        const auto ended = [&] {
            const FakeNcclCounts now = counts();
            return now.destroyed + now.aborted - before.destroyed - before.aborted;
        };
        for (int waits = 0; ended() < kRanks && waits < 600; ++waits) sleep_briefly();
        EXPECT_EQ(ended(), kRanks);
        // An old library can only abort a comm in stream order.
        const int aborted = graph_first && has_finalize ? 0 : kRanks;
        EXPECT_EQ(counts().aborted - before.aborted, aborted);
    }
}

// The driver may wait for the whole device at the first launch of a kernel. That would be a deadlock behind an exchange
// that waits for a rank that has not begun.
TEST(NcclEnqueued, LoadsKernelsBeforeFirstExchange) {
    std::barrier barrier(kRanks);
    const std::string id = new_id();
    run_ranks(kRanks, [&](int rank) {
        const LeaveOnThrow leave_on_throw(barrier);
        const Device device(id, rank, kRanks, 20000, DSOPT_COMM_FLAG_ENQUEUE);
        onebit_run::Setting setting;
        setting.freeze_step = 1;
        onebit_run::RankTrainer trainer(device.context, device.comm, rank, setting, test::cuda_memory(device.stream));
        must(trainer.step(1)); // ranks compare their lists
        for (int64_t call = 2; call <= 3; ++call) {
            EXPECT_EQ(cudaStreamSynchronize(device.stream), cudaSuccess);
            barrier.arrive_and_wait();
            if (rank == 0) must(trainer.step(call));
            barrier.arrive_and_wait(); // rank 1 begins after rank 0 has enqueued its step
            if (rank == 1) must(trainer.step(call));
        }
        EXPECT_EQ(cudaStreamSynchronize(device.stream), cudaSuccess);
    });
    EXPECT_EQ(fakert::late_loads(), std::vector<std::string>());
}

TEST(NcclEnqueued, OneBitStepsMatchThreads) {
    for (onebit_run::Setting setting : onebit_run::settings()) {
        setting.sizes = {300, 1, 33, 4100};
        setting.calls = 10;
        const auto wanted = onebit_run::run_threads(setting, kRanks);
        const std::string id = new_id();
        run_ranks(kRanks, [&](int rank) {
            const Device device(id, rank, kRanks, 60000, DSOPT_COMM_FLAG_ENQUEUE);
            onebit_run::RankTrainer trainer(device.context, device.comm, rank, setting,
                                            test::cuda_memory(device.stream));
            EXPECT_TRUE(trainer.run() == wanted[size_t(rank)]) << onebit_run::name_of(setting) << ", rank " << rank;
        });
    }
}

/// Settings of two model ranks of 1-bit LAMB, with a skipped step before and after the freeze.
onebit_run::Setting shards_of_onebit_lamb(dsopt_comm *model, const int32_t *skip) {
    onebit_run::Setting setting;
    setting.algorithm = DSOPT_ALGORITHM_ONEBIT_LAMB;
    setting.sizes = {300, 1, 33, 4100};
    setting.calls = 10;
    setting.averages = false;
    setting.model = model;
    setting.change = [skip](int64_t call, dsopt_step &step) { step.skip = call == 2 || call == 7 ? skip : nullptr; };
    return setting;
}

TEST(NcclEnqueued, OneBitLambOnShardsMatchesThreads) {
    const int32_t one = 1;
    std::vector<std::vector<std::string>> wanted(kRanks);
    onebit_run::with_threads(kRanks, [&](dsopt_context *context, dsopt_comm *comm, int rank) {
        wanted[size_t(rank)] = onebit_run::RankTrainer(context, nullptr, rank, shards_of_onebit_lamb(comm, &one)).run();
    });
    for (const uint32_t flags : {uint32_t(0), uint32_t(DSOPT_COMM_FLAG_ENQUEUE)}) {
        const std::string id = new_id();
        run_ranks(kRanks, [&](int rank) {
            const Device device(id, rank, kRanks, 60000, flags);
            const DeviceBytes skip(Bytes{1, 0, 0, 0});
            onebit_run::RankTrainer trainer(
                device.context, nullptr, rank,
                shards_of_onebit_lamb(device.comm, reinterpret_cast<const int32_t *>(skip.data())),
                test::cuda_memory(device.stream));
            const std::vector<std::string> all = trainer.run();
            for (size_t call = 0; call < all.size(); ++call)
                EXPECT_TRUE(all[call] == wanted[size_t(rank)][call])
                    << "flags " << flags << ", rank " << rank << ", call " << call + 1;
        });
    }
}

TEST(NcclEnqueued, OneBitStepReturnsBeforePeerBegins) {
    std::barrier barrier(kRanks);
    const std::string id = new_id();
    run_ranks(kRanks, [&](int rank) {
        const LeaveOnThrow leave_on_throw(barrier);
        const Device device(id, rank, kRanks, 60000, DSOPT_COMM_FLAG_ENQUEUE);
        onebit_run::Setting setting;
        setting.freeze_step = 2;
        setting.max_norm = 20;
        setting.change = [&](int64_t call, dsopt_step &) {
            if (call != 5) return;
            barrier.arrive_and_wait();                // gradients are written
            if (rank == 1) barrier.arrive_and_wait(); // rank 0's call has returned
            if (rank == 0) fakert::mark();
        };
        onebit_run::RankTrainer trainer(device.context, device.comm, rank, setting, test::cuda_memory(device.stream));
        for (int64_t call = 1; call <= 4; ++call) must(trainer.step(call));
        must(trainer.step(5));
        if (rank == 0) {
            const fakert::Counters c = fakert::counters();
            EXPECT_EQ(c.host_waits + c.host_queries + c.copies_to_host + c.copies_to_device + c.device_allocations, 0);
            expect_busy(device.stream);
            barrier.arrive_and_wait();
        }
        EXPECT_EQ(cudaStreamSynchronize(device.stream), cudaSuccess);
    });
}

TEST(NcclEnqueued, AbortReleasesStreamThatWaitsForPeer) {
    const std::string id = new_id();
    std::barrier finished(kRanks);
    run_ranks(kRanks, [&](int rank) {
        const LeaveOnThrow leave_on_throw(finished);
        const Device device(id, rank, kRanks, 60000, DSOPT_COMM_FLAG_ENQUEUE);
        onebit_run::RankTrainer trainer(device.context, device.comm, rank, {}, test::cuda_memory(device.stream));
        must(trainer.step(1));
        EXPECT_EQ(cudaStreamSynchronize(device.stream), cudaSuccess);
        if (rank == 1) return finished.arrive_and_wait(); // never makes the second step
        must(trainer.step(2));
        expect_busy(device.stream);
        std::thread other([&] {
            sleep_briefly();
            dsopt_comm_abort(device.comm);
        });
        EXPECT_EQ(cudaStreamSynchronize(device.stream), cudaSuccess);
        other.join();
        EXPECT_EQ(trainer.step(3), DSOPT_ERR_ABORTED);
        finished.arrive_and_wait();
    });
}

TEST(NcclEnqueued, DestroyReturnsWhilePeerBlocksStream) {
    const std::string id = new_id();
    std::barrier finished(kRanks);
    run_ranks(kRanks, [&](int rank) {
        const LeaveOnThrow leave_on_throw(finished);
        Device device(id, rank, kRanks, 60000, DSOPT_COMM_FLAG_ENQUEUE);
        auto trainer = std::make_unique<onebit_run::RankTrainer>(
            device.context, device.comm, rank, onebit_run::Setting{}, test::cuda_memory(device.stream));
        must(trainer->step(1));
        EXPECT_EQ(cudaStreamSynchronize(device.stream), cudaSuccess);
        if (rank == 1) return finished.arrive_and_wait();
        must(trainer->step(2));
        const auto begin = Clock::now();
        dsopt_comm_destroy(device.comm);
        device.comm = nullptr;
        trainer.reset(); // the last owner
        EXPECT_LT(milliseconds_since(begin), kLongestMs);
        finished.arrive_and_wait();
    });
}

TEST(NcclEnqueued, AbortReleasesBlockingHostCall) {
    const World world(kRanks, 60000, DSOPT_COMM_FLAG_ENQUEUE);
    std::thread other([&] {
        sleep_briefly();
        world[0].comm->abort();
    });
    EXPECT_TRUE(fails(outcome_of([&] { world[0].add(1); }), DSOPT_ERR_ABORTED));
    other.join();
    world[1].comm->abort();
}

TEST(NcclEnqueued, BlockingHostCallReturnsStatusOfFailure) {
    const Environment fault("DSOPT_FAKE_NCCL_FAULT", "0:0:async,1:0:async");
    const World world(kRanks, 60000, DSOPT_COMM_FLAG_ENQUEUE);
    run_ranks(kRanks, [&](int rank) { EXPECT_TRUE(fails(outcome_of([&] { world[rank].add(1); }), DSOPT_ERR_COMM)); });
}

TEST(NcclEnqueued, BlockingHostCallTimesOut) {
    const World world(kRanks, 1500, DSOPT_COMM_FLAG_ENQUEUE);
    EXPECT_TRUE(fails(outcome_of([&] { world[0].add(1); }), DSOPT_ERR_TIMEOUT, "1500 ms"));
    world[1].comm->abort();
}

TEST(NcclEnqueued, LaterCallReturnsStatusOfStreamFailure) {
    const Environment fault("DSOPT_FAKE_NCCL_FAULT", "0:1:async,1:1:async");
    const World world(kRanks, 60000, DSOPT_COMM_FLAG_ENQUEUE);
    run_ranks(kRanks, [&](int rank) {
        const DeviceBytes data(Bytes(64, 0));
        const auto add = [&] {
            world[rank].comm->all_reduce(data.data(), 8, DSOPT_DTYPE_F64, DSOPT_OP_SUM, world[rank].stream,
                                         Place::backend);
        };
        add();
        EXPECT_EQ(cudaStreamSynchronize(world[rank].stream), cudaSuccess);
        // The failure happens on the stream, perhaps after the call has returned.
        const Outcome second = outcome_of(add);
        EXPECT_EQ(cudaStreamSynchronize(world[rank].stream), cudaSuccess);
        EXPECT_TRUE(second.status == DSOPT_OK || second.status == DSOPT_ERR_COMM) << second.text;
        EXPECT_TRUE(fails(outcome_of(add), DSOPT_ERR_COMM));
        EXPECT_EQ(world[rank].comm->info().status, DSOPT_ERR_COMM);
    });
}

} // namespace nccl_enqueue_tests
} // namespace nccl_test
