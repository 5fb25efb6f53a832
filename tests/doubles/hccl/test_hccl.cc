// SPDX-License-Identifier: Apache-2.0
// The HCCL provider over test doubles of libhccl.so and libascendcl.so.
#include "comm/provider.h"
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <gtest/gtest.h>
#include <string>
#include <thread>
#include <vector>

namespace hccl_tests {

using dsopt::Comm;
using Clock = std::chrono::steady_clock;

/// Returns a function of the runtime.
template <class F> F *runtime(const char *name) {
    void *const library = dlopen("libascendcl.so", RTLD_NOW);
    void *const function = library != nullptr ? dlsym(library, name) : nullptr;
    if (function == nullptr) throw std::runtime_error(std::string("no ") + name);
    return reinterpret_cast<F *>(function);
}
/// Selects a device, as a program must before it creates a comm.
void set_device() {
    if (runtime<int(int)>("aclrtSetDevice")(0) != 0) throw std::runtime_error("no device");
}
void run_ranks(int ranks, const std::function<void(int rank)> &body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank)
        threads.emplace_back([&body, rank] {
            try {
                set_device();
                body(rank);
            } catch (const std::exception &error) { ADD_FAILURE() << "rank " << rank << ": " << error.what(); }
        });
    for (std::thread &thread : threads) thread.join();
}

template <class Body> testing::AssertionResult fails(Body &&body, dsopt_status status, const char *text = "") {
    try {
        body();
    } catch (const dsopt::Error &error) {
        if (error.status() == status && std::strstr(error.what(), text) != nullptr) return testing::AssertionSuccess();
        return testing::AssertionFailure() << error.status() << " instead of " << status << ": " << error.what();
    }
    return testing::AssertionFailure() << "no failure";
}

std::shared_ptr<const dsopt::Context> context() {
    dsopt_context_desc desc{};
    desc.size = sizeof desc;
    desc.threads = 1;
    return std::make_shared<const dsopt::Context>(desc);
}
std::string new_id() {
    std::string id(dsopt::kHcclIdBytes, '\0');
    dsopt::make_hccl_id(id.data());
    return id;
}
std::unique_ptr<Comm> make(const std::string &id, int rank, int ranks, int timeout_ms = 60000) {
    dsopt_comm_desc desc{};
    desc.size = sizeof desc;
    desc.kind = DSOPT_COMM_KIND_HCCL;
    desc.rank = rank;
    desc.ranks = ranks;
    desc.timeout_ms = timeout_ms;
    desc.id = id.data();
    desc.id_bytes = id.size();
    return dsopt::make_comm(context(), desc);
}
double add(Comm &comm, double value) {
    comm.all_reduce(&value, 1, DSOPT_DTYPE_F64, DSOPT_OP_SUM, nullptr);
    return value;
}
class Fault {
public:
    explicit Fault(const char *value) { setenv("DSOPT_FAKE_HCCL_FAULT", value, 1); }
    ~Fault() { unsetenv("DSOPT_FAKE_HCCL_FAULT"); }
};

template <class T> void check_reduce(Comm &comm, int32_t dtype) {
    for (const int32_t op : {DSOPT_OP_SUM, DSOPT_OP_MAX})
        for (const size_t count : {size_t(1), size_t(1000)}) {
            std::vector<T> data(count), wanted(count);
            for (size_t i = 0; i < count; ++i) {
                const auto of = [&](int rank) { return T(int(i % 19) * (rank + 1) - 20); };
                data[i] = of(comm.rank());
                wanted[i] = of(0);
                for (int rank = 1; rank < comm.ranks(); ++rank)
                    wanted[i] = op == DSOPT_OP_SUM ? T(wanted[i] + of(rank)) : std::max(wanted[i], of(rank));
            }
            comm.all_reduce(data.data(), int64_t(count), dtype, op, nullptr);
            EXPECT_EQ(data, wanted);
        }
}

TEST(HcclComm, RunsCollectivesInHostMemory) {
    for (const int ranks : {1, 2, 3}) {
        const std::string id = new_id();
        run_ranks(ranks, [&](int rank) {
            const auto comm = make(id, rank, ranks);
            check_reduce<float>(*comm, DSOPT_DTYPE_F32);
            check_reduce<double>(*comm, DSOPT_DTYPE_F64);
            check_reduce<int32_t>(*comm, DSOPT_DTYPE_I32);
            for (const size_t bytes : {size_t(1), size_t(777), size_t(3)}) {
                const auto value = [&](int from, int to, size_t i) { return char(from * 50 + to * 7 + int(i % 41)); };
                std::vector<char> rows(bytes * size_t(ranks)), columns(rows.size()), wanted(rows.size()),
                    gathered(rows.size()), everything(rows.size()), row(bytes);
                for (int other = 0; other < ranks; ++other)
                    for (size_t i = 0; i < bytes; ++i) {
                        rows[size_t(other) * bytes + i] = value(rank, other, i);
                        wanted[size_t(other) * bytes + i] = value(other, rank, i);
                        everything[size_t(other) * bytes + i] = value(other, 0, i);
                        row[i] = value(rank, 0, i);
                    }
                comm->all_to_all(rows.data(), columns.data(), int64_t(bytes), nullptr);
                EXPECT_EQ(columns, wanted);
                comm->all_gather(row.data(), gathered.data(), int64_t(bytes), nullptr);
                EXPECT_EQ(gathered, everything);
            }
        });
    }
}

TEST(HcclComm, CreateRejectsThreadWithoutDevice) {
    std::thread([] {
        const std::string id = new_id();
        EXPECT_TRUE(fails([&] { (void)make(id, 0, 1); }, DSOPT_ERR_STATE, "aclrtSetDevice"));
    }).join();
}

TEST(HcclComm, AcceptsCallsFromThreadWithoutDevice) {
    const std::string id = new_id();
    std::unique_ptr<Comm> comm;
    run_ranks(1, [&](int) { comm = make(id, 0, 1); });
    std::thread([&] {
        std::vector<char> row(1);
        comm->all_gather(row.data(), row.data(), 1, nullptr);
    }).join();
    comm.reset();
}

TEST(HcclComm, RestoresTheContextOfTheThread) {
    const std::string id = new_id();
    std::unique_ptr<Comm> comm;
    run_ranks(1, [&](int) { comm = make(id, 0, 1); });
    std::thread([&] {
        int other = 0; // its address is a context of the double
        void *now = nullptr;
        ASSERT_EQ(runtime<int(void *)>("aclrtSetCurrentContext")(&other), 0);
        std::vector<char> row(1);
        comm->all_gather(row.data(), row.data(), 1, nullptr);
        ASSERT_EQ(runtime<int(void **)>("aclrtGetCurrentContext")(&now), 0);
        EXPECT_EQ(now, &other);
    }).join();
}

TEST(HcclComm, CreateTimesOutIfRankIsMissing) {
    const std::string id = new_id();
    run_ranks(1, [&](int) {
        const auto begin = Clock::now();
        EXPECT_TRUE(fails([&] { (void)make(id, 0, 2, 100); }, DSOPT_ERR_TIMEOUT, "2 ranks"));
        EXPECT_LT(Clock::now() - begin, std::chrono::seconds(50));
    });
}

TEST(HcclComm, TimesOutIfRankDoesNotCall) {
    const std::string id = new_id();
    run_ranks(3, [&](int rank) {
        const auto begin = Clock::now();
        const auto comm = make(id, rank, 3, 1500);
        if (rank == 2) return;
        EXPECT_TRUE(fails([&] { add(*comm, 1); }, DSOPT_ERR_TIMEOUT, "1500 ms"));
        EXPECT_TRUE(fails([&] { add(*comm, 1); }, DSOPT_ERR_TIMEOUT, "unusable"));
        EXPECT_LT(Clock::now() - begin, std::chrono::seconds(50));
    });
}

TEST(HcclComm, ReturnsStatusAndTextOfFaults) {
    const struct {
        const char *fault;
        dsopt_status faulty_rank, other_rank;
        const char *text;
    } cases[] = {{"1:1:hang", DSOPT_ERR_TIMEOUT, DSOPT_ERR_TIMEOUT, ""},
                 {"1:1:error", DSOPT_ERR_COMM, DSOPT_ERR_TIMEOUT, "an injected error"},
                 {"1:1:async", DSOPT_ERR_COMM, DSOPT_ERR_TIMEOUT, "an injected remote error"}};
    for (const auto &test : cases) {
        const Fault fault(test.fault);
        const std::string id = new_id();
        run_ranks(2, [&](int rank) {
            const auto comm = make(id, rank, 2, 1500);
            EXPECT_EQ(add(*comm, rank + 1), 3);
            if (rank == 1)
                EXPECT_TRUE(fails([&] { add(*comm, 1); }, test.faulty_rank, test.text)) << test.fault;
            else
                EXPECT_TRUE(fails([&] { add(*comm, 1); }, test.other_rank)) << test.fault;
        });
    }
}

TEST(HcclComm, ReturnsStatusIfSizesDiffer) {
    const std::string id = new_id();
    run_ranks(2, [&](int rank) {
        const auto comm = make(id, rank, 2, 60000);
        float values[3] = {};
        EXPECT_TRUE(
            fails([&] { comm->all_reduce(values, rank + 1, DSOPT_DTYPE_F32, DSOPT_OP_SUM, nullptr); }, DSOPT_ERR_COMM));
    });
}

TEST(HcclComm, AbortReleasesBlockedRank) {
    const std::string id = new_id();
    run_ranks(2, [&](int rank) {
        const auto comm = make(id, rank, 2, -1);
        if (rank == 1) return;
        std::thread aborter([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            comm->abort();
        });
        EXPECT_TRUE(fails([&] { add(*comm, 1); }, DSOPT_ERR_ABORTED));
        aborter.join();
        EXPECT_EQ(comm->info().status, DSOPT_ERR_ABORTED);
    });
}

TEST(HcclComm, ReadsRanksOfNativeComm) {
    const std::string id = new_id();
    void *const library = dlopen("libhccl.so", RTLD_NOW);
    ASSERT_NE(library, nullptr);
    using Init = int(uint32_t, const char *, uint32_t, void **);
    auto *const init = reinterpret_cast<Init *>(dlsym(library, "HcclCommInitRootInfo"));
    run_ranks(2, [&](int rank) {
        void *theirs = nullptr;
        ASSERT_EQ(init(2, id.data(), uint32_t(rank), &theirs), 0);
        dsopt_comm_desc desc{};
        desc.size = sizeof desc;
        desc.kind = DSOPT_COMM_KIND_HCCL;
        desc.native = theirs;
        const auto comm = dsopt::make_comm(context(), desc);
        EXPECT_EQ(comm->rank(), rank);
        EXPECT_EQ(comm->ranks(), 2);
        EXPECT_EQ(add(*comm, rank + 1), 3);
    });
}

TEST(NoHccl, ErrorNamesEnvironmentVariable) {
    const std::string id(dsopt::kHcclIdBytes, 'x');
    EXPECT_TRUE(fails([&] { (void)make(id, 0, 1); }, DSOPT_ERR_MISSING, "DSOPT_HCCL_LIBRARY"));
}

} // namespace hccl_tests
