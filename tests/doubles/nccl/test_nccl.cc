// SPDX-License-Identifier: Apache-2.0
// The NCCL provider on emulated devices, over a test double of the library. --rank: runs one rank as a process.
#include "comm/nccl/api.h"
#include "fakert.h"
#include "nccl_ranks.h"
#include <cmath>
#include <csignal>
#include <sys/wait.h>
#include <unistd.h>

namespace nccl_test {

namespace nccl_tests {
char value_at(int rank, size_t i) { return char(rank * 31 + int(i % 101) + 1); }
Bytes bytes_of(int rank, size_t count) {
    Bytes bytes(count);
    for (size_t i = 0; i < count; ++i) bytes[i] = value_at(rank, i);
    return bytes;
}
template <class T> void check_sums(const StreamComm &rank, Place place, size_t count, int32_t dtype) {
    const int ranks = rank.comm->ranks();
    for (const int32_t op : {DSOPT_OP_SUM, DSOPT_OP_MAX}) {
        std::vector<T> values(count), wanted(count);
        for (size_t i = 0; i < count; ++i) {
            for (int other = 0; other < ranks; ++other) {
                const T theirs = T(int(i % 57) * (other + 1) - 100);
                if (other == rank.comm->rank()) values[i] = theirs;
                wanted[i] = other == 0           ? theirs
                            : op == DSOPT_OP_SUM ? T(wanted[i] + theirs)
                                                 : std::max(wanted[i], theirs);
            }
        }
        Bytes data(count * sizeof(T)), result(count * sizeof(T));
        if (count != 0) std::memcpy(data.data(), values.data(), data.size());
        if (count != 0) std::memcpy(result.data(), wanted.data(), result.size());
        if (place == Place::host) {
            rank.comm->all_reduce(data.data(), int64_t(count), dtype, op, rank.stream, place);
            EXPECT_EQ(data, result);
        } else {
            const DeviceBytes device_data(data);
            rank.comm->all_reduce(device_data.data(), int64_t(count), dtype, op, rank.stream, place);
            EXPECT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
            EXPECT_EQ(device_data.get(), result);
        }
    }
}
} // namespace nccl_tests

using namespace nccl_tests;

void run_all_collectives(const StreamComm &rank) {
    Comm &comm = *rank.comm;
    const int ranks = comm.ranks();
    for (const Place place : {Place::host, Place::backend}) {
        for (const size_t count : {0, 1, 1000, 20000}) {
            check_sums<float>(rank, place, count, DSOPT_DTYPE_F32);
            check_sums<double>(rank, place, count, DSOPT_DTYPE_F64);
            check_sums<int32_t>(rank, place, count, DSOPT_DTYPE_I32);
        }
        for (const size_t bytes : {size_t(1), size_t(3), size_t(4), size_t(70001)}) {
            Bytes gathered, rows, columns;
            for (int other = 0; other < ranks; ++other) {
                const Bytes theirs = bytes_of(other, bytes);
                gathered.insert(gathered.end(), theirs.begin(), theirs.end());
                const Bytes to_other = bytes_of(comm.rank() * ranks + other, bytes);
                rows.insert(rows.end(), to_other.begin(), to_other.end());
                const Bytes from_other = bytes_of(other * ranks + comm.rank(), bytes);
                columns.insert(columns.end(), from_other.begin(), from_other.end());
            }
            const auto all = bytes * size_t(ranks);
            EXPECT_EQ(
                rank.on(place, bytes_of(comm.rank(), bytes), all,
                        [&](void *from, void *to) { comm.all_gather(from, to, int64_t(bytes), rank.stream, place); }),
                gathered);
            EXPECT_EQ(
                rank.on(place, rows, all,
                        [&](void *from, void *to) { comm.all_to_all(from, to, int64_t(bytes), rank.stream, place); }),
                columns);
        }
    }
}

namespace nccl_tests {

TEST(NcclComm, RunsCollectivesInHostAndDeviceMemory) {
    for (const int ranks : {1, 2, 3}) {
        const World world(ranks);
        run_ranks(ranks, [&](int rank) {
            EXPECT_EQ(world[rank].comm->rank(), rank);
            EXPECT_EQ(world[rank].comm->ranks(), ranks);
            run_all_collectives(world[rank]);
            EXPECT_EQ(world[rank].comm->info().status, DSOPT_OK);
        });
    }
}

TEST(NcclComm, IsDestroyedWithoutAbort) {
    (void)new_id();
    const FakeNcclCounts before = counts();
    { const World world(2); }
    EXPECT_EQ(counts().created - before.created, 2);
    EXPECT_EQ(counts().destroyed - before.destroyed, 2);
    EXPECT_EQ(counts().aborted, before.aborted);
}

TEST(NcclComm, CountsCallsAndBytes) {
    const World world(3);
    run_ranks(3, [&](int rank) {
        Comm &comm = *world[rank].comm;
        char from[30] = {}, to[30];
        comm.all_to_all(from, to, 10, world[rank].stream);
        comm.all_gather(from, to, 10, world[rank].stream);
        const dsopt_comm_info info = comm.info();
        EXPECT_EQ(info.calls, 2);
        EXPECT_EQ(info.bytes_sent, 40);
        EXPECT_EQ(info.bytes_received, 40);
        for (const int kind : {DSOPT_COLLECTIVE_ALL_TO_ALL, DSOPT_COLLECTIVE_ALL_GATHER}) {
            EXPECT_EQ(info.calls_of[kind], 1);
            EXPECT_EQ(info.sent_of[kind], 20);
            EXPECT_EQ(info.received_of[kind], 20);
        }
    });
}

// For a communicator with a call in progress, ncclCommCount() would return "in progress" and the call would send
// nothing.
TEST(NcclComm, AllToAllDoesNotQueryNumberOfRanks) {
    const World world(2);
    const int before = counts().count_queries;
    run_ranks(2, [&](int rank) {
        const DeviceBytes sent(Bytes{char(rank), char(rank)}), received(Bytes(2));
        world[rank].comm->all_to_all(sent.data(), received.data(), 1, world[rank].stream, Place::backend);
        EXPECT_EQ(received.get(), (Bytes{0, 1}));
    });
    EXPECT_EQ(counts().count_queries, before);
}

TEST(NcclComm, AcceptsInProgressInGroup) {
    const Environment fault("DSOPT_FAKE_NCCL_FAULT", "0:0:slow,0:3:slow,1:2:slow,2:5:slow");
    const World world(3);
    run_ranks(3, [&](int rank) {
        Comm &comm = *world[rank].comm;
        const char from[3] = {char(10 * rank), char(10 * rank + 1), char(10 * rank + 2)};
        const DeviceBytes sent(Bytes(from, from + 3)), received(Bytes(3));
        comm.all_to_all(sent.data(), received.data(), 1, world[rank].stream, Place::backend);
        EXPECT_EQ(received.get(), (Bytes{char(rank), char(10 + rank), char(20 + rank)}));
        EXPECT_EQ(comm.info().status, DSOPT_OK);
    });
}

TEST(NcclComm, CreateTimesOutWithoutLeakIfRankIsMissing) {
    const auto context = cuda_context();
    const std::string id = new_id();
    const FakeNcclCounts before = counts();
    const auto begin = Clock::now();
    const Outcome outcome = outcome_of([&] { (void)dsopt::make_comm(context, desc_of(id, 0, 2, 100)); });
    EXPECT_TRUE(fails(outcome, DSOPT_ERR_TIMEOUT, "2 ranks"));
    EXPECT_GE(milliseconds_since(begin), 100);
    EXPECT_LT(milliseconds_since(begin), kLongestMs);
    EXPECT_EQ(counts().created - before.created, counts().aborted - before.aborted);
}

TEST(NcclComm, CreateReportsErrorTextOfLibrary) {
    const Environment fault("DSOPT_FAKE_NCCL_FAULT", "0:0:init");
    const auto context = cuda_context();
    const std::string id = new_id();
    const Outcome outcome = outcome_of([&] { (void)dsopt::make_comm(context, desc_of(id, 0, 1, 1000)); });
    EXPECT_TRUE(fails(outcome, DSOPT_ERR_COMM, "an injected error"));
}

TEST(NcclComm, TimesOutAndBecomesUnusableIfRankDoesNotCall) {
    const World world(3, 1500);
    const FakeNcclCounts before = counts();
    run_ranks(2, [&](int rank) {
        const auto begin = Clock::now();
        EXPECT_TRUE(fails(outcome_of([&] { world[rank].add(1); }), DSOPT_ERR_TIMEOUT, "1500 ms"));
        EXPECT_GE(milliseconds_since(begin), 1500);
        EXPECT_LT(milliseconds_since(begin), kLongestMs);
        EXPECT_EQ(world[rank].comm->info().status, DSOPT_ERR_TIMEOUT);
        EXPECT_TRUE(fails(outcome_of([&] { world[rank].add(1); }), DSOPT_ERR_TIMEOUT, "unusable"));
        EXPECT_EQ(cudaStreamSynchronize(world[rank].stream), cudaSuccess) << "the stream still waits";
    });
    EXPECT_EQ(counts().aborted - before.aborted, 2);
    EXPECT_TRUE(fails(outcome_of([&] { world[2].add(1); }), DSOPT_ERR_TIMEOUT))
        << "a later call of the rank that did not call";
}

TEST(NcclComm, TimesOutIfRankHangsInCollective) {
    const Environment fault("DSOPT_FAKE_NCCL_FAULT", "1:1:hang");
    const World world(2, 1500);
    run_ranks(2, [&](int rank) {
        EXPECT_EQ(world[rank].add(rank + 1), 3);
        EXPECT_TRUE(fails(outcome_of([&] { world[rank].add(1); }), DSOPT_ERR_TIMEOUT));
    });
}

TEST(NcclComm, TimesOutIfCallStaysInProgress) {
    const Environment fault("DSOPT_FAKE_NCCL_FAULT", "0:0:busy,1:0:busy");
    const World world(2, 1500);
    run_ranks(2, [&](int rank) { EXPECT_TRUE(fails(outcome_of([&] { world[rank].add(1); }), DSOPT_ERR_TIMEOUT)); });
}

TEST(NcclComm, ReturnsStatusAndTextOfFailedCall) {
    const Environment fault("DSOPT_FAKE_NCCL_FAULT", "1:0:error");
    const World world(2, 1500);
    run_ranks(2, [&](int rank) {
        const Outcome outcome = outcome_of([&] { world[rank].add(1); });
        if (rank == 1)
            EXPECT_TRUE(fails(outcome, DSOPT_ERR_COMM, "unhandled system error, an injected error"));
        else
            EXPECT_TRUE(fails(outcome, DSOPT_ERR_TIMEOUT));
    });
}

TEST(NcclComm, ReturnsStatusOfAsynchronousError) {
    const Environment fault("DSOPT_FAKE_NCCL_FAULT", "0:1:async,1:1:async");
    const World world(2);
    run_ranks(2, [&](int rank) {
        EXPECT_EQ(world[rank].add(1), 2);
        EXPECT_TRUE(fails(outcome_of([&] { world[rank].add(1); }), DSOPT_ERR_COMM, "remote rank gone"));
    });
}

TEST(NcclComm, ReturnsStatusIfRanksMakeDifferentCalls) {
    const World world(2);
    run_ranks(2, [&](int rank) {
        double values[2] = {};
        const Outcome outcome = outcome_of(
            [&] { world[rank].comm->all_reduce(values, rank + 1, DSOPT_DTYPE_F64, DSOPT_OP_SUM, world[rank].stream); });
        EXPECT_TRUE(fails(outcome, DSOPT_ERR_COMM, "elements"));
    });
}

TEST(NcclComm, AbortReleasesBlockedRankWithNoThreadInLibrary) {
    for (int round = 0; round < 5; ++round) {
        World world(2, -1);
        const FakeNcclCounts before = counts();
        std::thread blocked([&] { EXPECT_TRUE(fails(outcome_of([&] { world[0].add(1); }), DSOPT_ERR_ABORTED)); });
        sleep_briefly();
        world[0].comm->abort();
        blocked.join();
        EXPECT_EQ(world[0].comm->info().status, DSOPT_ERR_ABORTED);
        EXPECT_TRUE(fails(outcome_of([&] { world[0].add(1); }), DSOPT_ERR_ABORTED));
        world[1].comm->abort();
        EXPECT_EQ(counts().aborted - before.aborted, 2) << "dsopt_comm_abort() ends an idle comm itself";
        EXPECT_EQ(counts().inside_while_aborted, 0);
    }
}

TEST(NcclComm, AbortAtAnyTimeReleasesAllRanks) {
    for (int round = 0; round < 20; ++round) {
        const World world(2, 20000);
        std::thread aborter([&] {
            std::this_thread::sleep_for(std::chrono::microseconds(round * 100));
            for (const int rank : {0, 1}) world[rank].comm->abort();
        });
        run_ranks(2, [&](int rank) {
            Outcome outcome;
            while (outcome.status == DSOPT_OK) outcome = outcome_of([&] { EXPECT_EQ(world[rank].add(1), 2); });
            EXPECT_EQ(outcome.status, DSOPT_ERR_ABORTED) << outcome.text;
        });
        aborter.join();
    }
    EXPECT_EQ(counts().inside_while_aborted, 0);
}

TEST(NcclComm, DestroyReturnsIfPeerNeverDestroys) {
    World world(2);
    const FakeNcclCounts before = counts();
    const auto begin = Clock::now();
    world.destroy(0);
    EXPECT_LT(milliseconds_since(begin), kLongestMs);
    EXPECT_EQ(counts().aborted - before.aborted, 1);
}

TEST(NcclComm, IsLeakedIfAbortHangs) {
    World world(2, 1500);
    EXPECT_TRUE(fails(outcome_of([&] {
                          const Environment slow("DSOPT_FAKE_NCCL_ABORT", "hang");
                          const auto begin = Clock::now();
                          try {
                              world[0].add(1);
                          } catch (...) {
                              EXPECT_LT(milliseconds_since(begin), kLongestMs);
                              throw;
                          }
                      }),
                      DSOPT_ERR_TIMEOUT));
    const auto begin = Clock::now();
    world.destroy(0);
    EXPECT_LT(milliseconds_since(begin), kLongestMs) << "the abort is tried again";
    world[1].comm->abort();
}

TEST(NcclComm, RejectsCapture) {
    const World world(1);
    const World two(2);
    const StreamComm &rank = two[0];
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
    EXPECT_TRUE(fails(outcome_of([&] { rank.add(1); }), DSOPT_ERR_STATE, "captured"));
    EXPECT_EQ(cudaStreamEndCapture(rank.stream, &graph), cudaSuccess);
    (void)cudaGraphDestroy(graph);
    EXPECT_EQ(rank.comm->info().status, DSOPT_OK) << "the rejected call made the comm unusable";
}

// ------------------------------------------------------------------------------------------- the caller's communicator
class NcclNativeComm : public testing::Test {
protected:
    const dsopt::nccl::Api api{dsopt::Library::any(dsopt::nccl::kLibrary)};
    dsopt::nccl::Communicator theirs[2] = {};
    FakeNcclCounts before{};

    void SetUp() override {
        dsopt::nccl::UniqueId id;
        ASSERT_EQ(api.get_unique_id(&id), dsopt::nccl::success);
        run_ranks(2, [&](int rank) { EXPECT_EQ(api.init(&theirs[rank], 2, id, rank), dsopt::nccl::success); });
        before = counts();
    }
    void TearDown() override {
        EXPECT_EQ(counts().destroyed, before.destroyed);
        EXPECT_EQ(counts().aborted, before.aborted);
        for (const auto comm : theirs) EXPECT_EQ(api.abort(comm), dsopt::nccl::success);
    }
    static dsopt_comm_desc desc(void *native, int timeout_ms = 60000, uint32_t flags = 0) {
        dsopt_comm_desc desc{};
        desc.flags = flags;
        desc.size = sizeof desc;
        desc.kind = DSOPT_COMM_KIND_NCCL;
        desc.timeout_ms = timeout_ms;
        desc.native = native;
        return desc;
    }
};

TEST_F(NcclNativeComm, RunsCollectivesAndStaysUsable) {
    run_ranks(2, [&](int rank) {
        for (int round = 0; round < 2; ++round) {
            const StreamComm stream_comm(cuda_context(rank), desc(theirs[rank]));
            EXPECT_EQ(stream_comm.comm->rank(), rank);
            EXPECT_EQ(stream_comm.comm->ranks(), 2);
            run_all_collectives(stream_comm);
        }
    });
}

TEST_F(NcclNativeComm, IsNotAbortedByTimeOutOrAbort) {
    for (const uint32_t flags : {uint32_t(0), uint32_t(DSOPT_COMM_FLAG_ENQUEUE)}) {
        const auto stream_comm = std::make_unique<StreamComm>(cuda_context(), desc(theirs[0], 200, flags));
        EXPECT_TRUE(fails(outcome_of([&] { stream_comm->add(1); }), DSOPT_ERR_TIMEOUT));
        stream_comm->comm->abort();
        const auto begin = Clock::now();
        stream_comm->comm.reset(); // leaks the memory that the collective may still write to
        EXPECT_LT(milliseconds_since(begin), kLongestMs);
        // The other rank calls now, so that the stream completes.
        const StreamComm other(cuda_context(1), desc(theirs[1], 60000, flags));
        EXPECT_EQ(other.add(1), 2);
    }
}

TEST_F(NcclNativeComm, AbortReleasesHostButNotStream) {
    const StreamComm stream_comm(cuda_context(), desc(theirs[0], 60000, DSOPT_COMM_FLAG_ENQUEUE));
    std::thread aborts([&] {
        while (stream_comm.comm->info().calls == 0) sleep_briefly(); // the exchange is enqueued
        stream_comm.comm->abort();
    });
    EXPECT_TRUE(fails(outcome_of([&] { stream_comm.add(1); }), DSOPT_ERR_ABORTED));
    aborts.join();
    const StreamComm other(cuda_context(1), desc(theirs[1], 60000, DSOPT_COMM_FLAG_ENQUEUE));
    EXPECT_EQ(other.add(1), 2);
}

TEST_F(NcclNativeComm, IsRejectedOnAnotherDevice) {
    const auto context = cuda_context(1);
    EXPECT_TRUE(
        fails(outcome_of([&] { (void)dsopt::make_comm(context, desc(theirs[0])); }), DSOPT_ERR_DEVICE, "device 0"));
}

TEST_F(NcclNativeComm, IsRejectedTogetherWithId) {
    const std::string id = new_id();
    dsopt_comm_desc both = desc_of(id, 0, 2, 0);
    both.native = theirs[0];
    const auto context = cuda_context();
    EXPECT_TRUE(fails(outcome_of([&] { (void)dsopt::make_comm(context, both); }), DSOPT_ERR_UNSUPPORTED, "native"));
}

// ------------------------------------------------------------------------------------------------ through the C header
TEST(NcclUniqueId, HasDocumentedSize) {
    size_t bytes = 0;
    ASSERT_EQ(dsopt_comm_unique_id(DSOPT_COMM_KIND_NCCL, nullptr, &bytes), DSOPT_OK);
    EXPECT_EQ(bytes, 128u);
    char a[200] = {}, b[200] = {};
    bytes = 127;
    EXPECT_EQ(dsopt_comm_unique_id(DSOPT_COMM_KIND_NCCL, a, &bytes), DSOPT_ERR_SHAPE);
    bytes = sizeof a;
    ASSERT_EQ(dsopt_comm_unique_id(DSOPT_COMM_KIND_NCCL, a, &bytes), DSOPT_OK) << dsopt_last_error();
    EXPECT_EQ(bytes, 128u);
    ASSERT_EQ(dsopt_comm_unique_id(DSOPT_COMM_KIND_NCCL, b, &bytes), DSOPT_OK);
    EXPECT_NE(std::memcmp(a, b, 128), 0);
}

TEST(NcclCommCreate, RejectsInvalidDescriptions) {
    dsopt_context *cpu = nullptr, *gpu = nullptr;
    dsopt_comm *comm = nullptr;
    ASSERT_EQ(dsopt_context_create(nullptr, &cpu), DSOPT_OK);
    DSOPT_NEW(dsopt_context_desc, context_desc);
    context_desc.backend = DSOPT_BACKEND_CUDA;
    ASSERT_EQ(dsopt_context_create(&context_desc, &gpu), DSOPT_OK);
    const std::string id = new_id();
    dsopt_comm_desc desc = desc_of(id, 0, 1, 0);
    EXPECT_EQ(dsopt_comm_create(cpu, &desc, &comm), DSOPT_ERR_UNSUPPORTED);
    EXPECT_NE(std::strstr(dsopt_last_error(), "CUDA context"), nullptr);
    desc.id_bytes = 16;
    EXPECT_EQ(dsopt_comm_create(gpu, &desc, &comm), DSOPT_ERR_ARGUMENT);
    desc = desc_of(id, 1, 1, 0);
    EXPECT_EQ(dsopt_comm_create(gpu, &desc, &comm), DSOPT_ERR_ARGUMENT);
    desc = desc_of(id, 0, 1, -2);
    EXPECT_EQ(dsopt_comm_create(gpu, &desc, &comm), DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(comm, nullptr);
    EXPECT_NE(std::strstr(dsopt_build_info(), "\"table\", \"nccl\"]"), nullptr) << dsopt_build_info();
    dsopt_context_destroy(cpu);
    dsopt_context_destroy(gpu);
}

/// One rank's optimizer on the device. Every gradient is 3; the norm over the ranks of the model comm is clipped to 1.
class ClippedOptimizer {
public:
    ClippedOptimizer(const std::string &id, int rank, int ranks, int timeout_ms) :
        param_(values(0.5f)),
        grad_(values(3)) {
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = DSOPT_BACKEND_CUDA;
        context_desc.device = rank;
        EXPECT_EQ(dsopt_context_create(&context_desc, &context_), DSOPT_OK);
        const dsopt_comm_desc desc = desc_of(id, rank, ranks, timeout_ms);
        EXPECT_EQ(dsopt_comm_create(context_, &desc, &comm_), DSOPT_OK) << dsopt_last_error();
        DSOPT_NEW(dsopt_optimizer_desc, optimizer_desc);
        optimizer_desc.model = comm_;
        optimizer_desc.max_norm = 1;
        EXPECT_EQ(dsopt_optimizer_create(context_, &optimizer_desc, &opt_), DSOPT_OK);
        dsopt_group group;
        EXPECT_EQ(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW), DSOPT_OK);
        dsopt_param param{};
        param.tensor = {param_.data(), kCount, DSOPT_DTYPE_F32, 0};
        param.flags = DSOPT_PARAM_MODEL_PARALLEL;
        EXPECT_EQ(dsopt_optimizer_add_group(opt_, &group, &param, 1), DSOPT_OK) << dsopt_last_error();
        EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    }
    ~ClippedOptimizer() {
        dsopt_optimizer_destroy(opt_);
        dsopt_comm_destroy(comm_);
        dsopt_context_destroy(context_);
        (void)cudaStreamDestroy(stream_);
    }
    ClippedOptimizer(const ClippedOptimizer &) = delete;
    ClippedOptimizer &operator=(const ClippedOptimizer &) = delete;
    dsopt_status step() const {
        const dsopt_tensor grad = {grad_.data(), kCount, DSOPT_DTYPE_F32, 0};
        DSOPT_NEW(dsopt_step, step);
        step.grads = &grad;
        step.count = 1;
        step.stream = stream_;
        const dsopt_status status = dsopt_optimizer_step(opt_, &step);
        EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
        return status;
    }
    double norm() const {
        DSOPT_NEW(dsopt_report, report);
        EXPECT_EQ(dsopt_optimizer_report(opt_, &report), DSOPT_OK);
        return report.grad_norm;
    }
    Bytes param() const { return param_.get(); }

private:
    static constexpr int64_t kCount = 100;
    static Bytes values(float value) {
        Bytes bytes(kCount * sizeof value);
        for (size_t i = 0; i < size_t(kCount); ++i) std::memcpy(&bytes[i * sizeof value], &value, sizeof value);
        return bytes;
    }
    DeviceBytes param_, grad_;
    dsopt_context *context_ = nullptr;
    dsopt_comm *comm_ = nullptr;
    dsopt_optimizer *opt_ = nullptr;
    cudaStream_t stream_ = nullptr;
};

TEST(NcclStep, ClipsByNormOverAllRanks) {
    const std::string id = new_id();
    run_ranks(2, [&](int rank) {
        const ClippedOptimizer optimizer(id, rank, 2, 60000);
        for (int step = 0; step < 3; ++step) ASSERT_EQ(optimizer.step(), DSOPT_OK) << dsopt_last_error();
        EXPECT_DOUBLE_EQ(optimizer.norm(), std::sqrt(2 * 100 * 9.0));
    });
}

TEST(NcclStep, TimeOutLeavesParametersUnchanged) {
    const Environment fault("DSOPT_FAKE_NCCL_FAULT", "0:0:hang,1:0:hang");
    const std::string id = new_id();
    run_ranks(2, [&](int rank) {
        const ClippedOptimizer optimizer(id, rank, 2, 3000);
        const Bytes before = optimizer.param();
        EXPECT_EQ(optimizer.step(), DSOPT_ERR_TIMEOUT);
        EXPECT_EQ(optimizer.param(), before);
    });
}

// ------------------------------------------------------------------------------------------------ ranks as processes
std::string hex(const std::string &bytes) {
    std::string text;
    for (const char byte : bytes) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", unsigned(static_cast<unsigned char>(byte)));
        text += digits;
    }
    return text;
}
std::string from_hex(const char *text) {
    std::string bytes;
    for (; text[0] != 0; text += 2) bytes.push_back(char(std::strtol(std::string(text, 2).c_str(), nullptr, 16)));
    return bytes;
}

/// Reduces three times; the exit code is the status.
int run_process(char **argv) {
    const int rank = std::atoi(argv[0]), ranks = std::atoi(argv[1]);
    const std::string id = from_hex(argv[2]);
    const Outcome outcome = outcome_of([&] {
        const StreamComm stream_comm(cuda_context(), desc_of(id, rank, ranks, 5000));
        for (int i = 0; i < 3; ++i)
            if (stream_comm.add(rank) != ranks * (ranks - 1) / 2) throw dsopt::Error(DSOPT_ERR_INTERNAL, "a wrong sum");
    });
    return outcome.status;
}

/// Returns exit codes, or the negative number of the signal that ended the process.
std::vector<int> run_processes(int ranks) {
    const std::string id = hex(new_id());
    std::vector<pid_t> children;
    for (int rank = 0; rank < ranks; ++rank) {
        const std::string number = std::to_string(rank), count = std::to_string(ranks);
        const pid_t child = fork();
        if (child == 0) {
            execl("/proc/self/exe", "test_nccl", "--rank", number.c_str(), count.c_str(), id.c_str(), nullptr);
            _exit(127);
        }
        children.push_back(child);
    }
    std::vector<int> codes;
    for (const pid_t child : children) {
        int status = 0;
        EXPECT_EQ(waitpid(child, &status, 0), child);
        codes.push_back(WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
    }
    return codes;
}

TEST(NcclProcesses, SumOverRanks) { EXPECT_EQ(run_processes(3), (std::vector<int>{0, 0, 0})); }

TEST(NcclProcesses, TimeOutIfKilledRankIsNotDetected) {
    const Environment fault("DSOPT_FAKE_NCCL_FAULT", "1:1:kill");
    EXPECT_EQ(run_processes(3), (std::vector<int>{DSOPT_ERR_TIMEOUT, -SIGKILL, DSOPT_ERR_TIMEOUT}));
}

TEST(NcclProcesses, ReturnErrorIfNetworkDetectsKilledRank) {
    const Environment fault("DSOPT_FAKE_NCCL_FAULT", "0:2:kill");
    const Environment seen("DSOPT_FAKE_NCCL_DEAD", "error");
    // A killed process keeps its id until its parent waits for it, so the other rank may not detect it and time out.
    for (const int code : run_processes(2))
        EXPECT_TRUE(code == -SIGKILL || code == DSOPT_ERR_COMM || code == DSOPT_ERR_TIMEOUT) << code;
}

// ---------------------------------------------------------------------------------- other libraries; see meson.build
TEST(OldNccl, RunsCollectivesWithoutSendReceiveAndConfig) {
    const World world(3);
    run_ranks(3, [&](int rank) { run_all_collectives(world[rank]); });
}
TEST(OldNccl, CreateTimesOutAndLeaksWaitingThread) {
    const auto context = cuda_context();
    const std::string id = new_id();
    const auto begin = Clock::now();
    const Outcome outcome = outcome_of([&] { (void)dsopt::make_comm(context, desc_of(id, 0, 2, 100)); });
    EXPECT_TRUE(fails(outcome, DSOPT_ERR_TIMEOUT, "2 ranks"));
    EXPECT_LT(milliseconds_since(begin), kLongestMs);
}
TEST(OldNccl, CallTimesOut) {
    const World world(2, 1500);
    EXPECT_TRUE(fails(outcome_of([&] { world[0].add(1); }), DSOPT_ERR_TIMEOUT));
}

TEST(NoNccl, ErrorNamesEnvironmentVariable) {
    const auto context = cuda_context();
    const std::string id(128, 'x');
    const Outcome outcome = outcome_of([&] { (void)dsopt::make_comm(context, desc_of(id, 0, 2, 100)); });
    EXPECT_TRUE(fails(outcome, DSOPT_ERR_MISSING, "DSOPT_NCCL_LIBRARY"));
    EXPECT_TRUE(fails(outcome_of([&] { (void)new_id(); }), DSOPT_ERR_MISSING, "DSOPT_NCCL_LIBRARY"));
    dsopt_comm_desc borrowed{};
    borrowed.size = sizeof borrowed;
    borrowed.kind = DSOPT_COMM_KIND_NCCL;
    borrowed.native = &borrowed;
    EXPECT_TRUE(fails(outcome_of([&] { (void)dsopt::make_comm(context, borrowed); }), DSOPT_ERR_MISSING, "native"));
}
TEST(NoNccl, RejectsRelativePath) {
    const Environment path("DSOPT_NCCL_LIBRARY", "libnccl.so.2");
    EXPECT_TRUE(fails(outcome_of([&] { (void)new_id(); }), DSOPT_ERR_ARGUMENT, "absolute"));
}
TEST(NoNccl, RejectsLibraryWithoutFunctions) {
    const Environment path("DSOPT_NCCL_LIBRARY", std::getenv("DSOPT_TEST_OTHER_LIBRARY"));
    EXPECT_TRUE(fails(outcome_of([&] { (void)new_id(); }), DSOPT_ERR_MISSING, "ncclGetUniqueId"));
}

} // namespace nccl_tests
} // namespace nccl_test

int main(int argc, char **argv) {
    fakert::Config config = fakert::config_from_environment();
    config.devices = nccl_test::kDevices;
    config.mode = fakert::Mode::threads; // collectives wait inside a stream
    config.first_launch_waits = true;    // a driver that loads a kernel waits for those collectives
    fakert::reset(config);
    if (argc == 5 && std::strcmp(argv[1], "--rank") == 0) return nccl_test::nccl_tests::run_process(argv + 2);
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
