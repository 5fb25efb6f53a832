// SPDX-License-Identifier: Apache-2.0
// Communicators without an optimizer: creation, waiting, failures and counters. ranks.cc tests steps over them.
#include "support/harness.h"
#include <chrono>

using namespace test;

namespace comm_tests {

using Clock = std::chrono::steady_clock;

/// Sleeps until other threads are probably blocked. Tests pass if they are not, too.
void let_others_block() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

class LocalComm : public testing::Test {
protected:
    const Context ctx = make_context(1);
    const CommId id = new_id();

    dsopt_status create(int rank, int ranks, int timeout_ms) {
        const dsopt_comm_desc desc = local_desc(id, rank, ranks, timeout_ms);
        dsopt_comm *const untouched = reinterpret_cast<dsopt_comm *>(16), *comm = untouched;
        const dsopt_status status = dsopt_comm_create(ctx.get(), &desc, &comm);
        EXPECT_EQ(comm == untouched, status != DSOPT_OK);
        if (status == DSOPT_OK) dsopt_comm_destroy(comm);
        return status;
    }
    std::vector<Comm> group(int ranks, int timeout_ms = 60000) {
        std::vector<Comm> comms(static_cast<size_t>(ranks));
        run_ranks(ranks, [&](int rank) { comms[size_t(rank)] = local_comm(ctx, id, rank, ranks, timeout_ms); });
        return comms;
    }
};

TEST_F(LocalComm, ReducesOverOneToFourRanks) {
    for (const int ranks : {1, 2, 3, 4}) {
        const CommId new_comm_id = new_id();
        run_ranks(ranks, [&](int rank) {
            const Comm comm = local_comm(ctx, new_comm_id, rank, ranks);
            EXPECT_EQ(info_of(comm).rank, rank);
            EXPECT_EQ(info_of(comm).ranks, ranks);
            EXPECT_EQ(info_of(comm).status, DSOPT_OK);
            for (int round = 0; round < 50; ++round) {
                dsopt_norm_result result;
                ASSERT_OK(call_collective(ctx, comm, float(rank + round), &result));
                double squares = 0;
                for (int other = 0; other < ranks; ++other) squares += double((other + round) * (other + round));
                ASSERT_EQ(result.norm, std::sqrt(squares));
            }
        });
    }
}

TEST_F(LocalComm, TimesOutIfARankIsNotCreatedAndCanReuseTheId) {
    const auto begin = Clock::now();
    EXPECT_TRUE(refused(create(0, 2, 50), DSOPT_ERR_TIMEOUT));
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
    EXPECT_GE(waited, 50);
    EXPECT_LT(waited, 20000);
    const std::vector<Comm> comms = group(2);
    run_ranks(2, [&](int rank) { EXPECT_OK(call_collective(ctx, comms[size_t(rank)])); });
}

TEST_F(LocalComm, TimesOutIfARankDoesNotCallAndStaysUnusable) {
    const std::vector<Comm> comms = group(3, 1500);
    run_ranks(2, [&](int rank) { EXPECT_TRUE(refused(call_collective(ctx, comms[size_t(rank)]), DSOPT_ERR_TIMEOUT)); });
    EXPECT_TRUE(refused(call_collective(ctx, comms[2]), DSOPT_ERR_TIMEOUT)) << "a rank that calls late fails, too";
    for (const Comm &comm : comms) {
        EXPECT_EQ(info_of(comm).status, DSOPT_ERR_TIMEOUT);
        EXPECT_TRUE(refused(call_collective(ctx, comm), DSOPT_ERR_TIMEOUT)) << "sticky";
    }
}

TEST_F(LocalComm, ReleasesABlockedRankOnAbort) {
    for (const int aborter : {0, 1}) { // through the handle of the blocked rank or of the other one
        const CommId new_comm_id = new_id();
        std::vector<Comm> comms(2);
        run_ranks(2, [&](int rank) { comms[size_t(rank)] = local_comm(ctx, new_comm_id, rank, 2, -1); });
        std::thread blocked([&] { EXPECT_TRUE(refused(call_collective(ctx, comms[0]), DSOPT_ERR_ABORTED)); });
        let_others_block();
        dsopt_comm_abort(comms[size_t(aborter)].get());
        blocked.join();
        EXPECT_TRUE(refused(call_collective(ctx, comms[1]), DSOPT_ERR_ABORTED));
        EXPECT_EQ(info_of(comms[0]).status, DSOPT_ERR_ABORTED);
        EXPECT_EQ(info_of(comms[1]).status, DSOPT_ERR_ABORTED);
    }
    dsopt_comm_abort(nullptr);
}

TEST_F(LocalComm, RefusesCallsOfASingleRankAfterAbort) {
    const Comm alone = local_comm(ctx, id, 0, 1), self = self_comm(ctx);
    for (const Comm *comm : {&alone, &self}) {
        ASSERT_OK(call_collective(ctx, *comm));
        dsopt_comm_abort(comm->get());
        EXPECT_TRUE(refused(call_collective(ctx, *comm), DSOPT_ERR_ABORTED));
    }
}

TEST_F(LocalComm, FailsBlockedCallsIfARankIsDestroyed) {
    std::vector<Comm> comms = group(3, -1);
    std::vector<std::thread> blocked;
    for (const size_t rank : {size_t(0), size_t(1)})
        blocked.emplace_back(
            [&, rank] { EXPECT_TRUE(refused(call_collective(ctx, comms[rank]), DSOPT_ERR_COMM, "rank 2 has left")); });
    let_others_block();
    comms[2].reset();
    for (std::thread &thread : blocked) thread.join();
    EXPECT_TRUE(refused(call_collective(ctx, comms[0]), DSOPT_ERR_COMM));
    EXPECT_EQ(info_of(comms[1]).status, DSOPT_ERR_COMM);
}

TEST_F(LocalComm, FailsACallAfterARankWasDestroyed) {
    std::vector<Comm> comms = group(2, -1);
    comms[0].reset();
    EXPECT_TRUE(refused(call_collective(ctx, comms[1]), DSOPT_ERR_COMM, "rank 0 has left"));
}

TEST_F(LocalComm, AllowsDestroyRightAfterTheLastCall) {
    for (int i = 0; i < 200; ++i) {
        const CommId new_comm_id = new_id();
        run_ranks(3, [&](int rank) {
            const Comm comm = local_comm(ctx, new_comm_id, rank, 3);
            EXPECT_OK(call_collective(ctx, comm)) << "rank " << rank;
        });
    }
}

TEST_F(LocalComm, ReportsDifferentCollectives) {
    const std::vector<Comm> comms = group(3);
    run_ranks(3, [&](int rank) {
        const Array array(DSOPT_DTYPE_F32, 1, 1);
        const dsopt_tensor tensor = array.tensor();
        dsopt_norm_result result;
        const int32_t kind = rank == 1 ? DSOPT_NORM_MAX : DSOPT_NORM_L2; // another reduction
        EXPECT_TRUE(
            refused(dsopt_tensors_norm(ctx.get(), &tensor, 1, kind, 0, comms[size_t(rank)].get(), &result, nullptr),
                    DSOPT_ERR_COMM, "different"));
    });
}

TEST_F(LocalComm, ReportsDifferentSizes) {
    const std::vector<Comm> comms = group(2);
    run_ranks(2, [&](int rank) {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.model = comms[size_t(rank)].get();
        desc.max_norm = 1;
        Trainer trainer(ctx, desc);
        std::vector<Array> grads;
        for (int g = 0; g <= rank; ++g) { // one group, two groups
            must(trainer.add_group(group_of(DSOPT_ALGORITHM_ADAM), {{Array(DSOPT_DTYPE_F32, 3, 1)}}));
            grads.emplace_back(DSOPT_DTYPE_F32, 3, 1.0f);
        }
        const Snapshot before = trainer.snapshot();
        EXPECT_TRUE(refused(trainer.step(grads), DSOPT_ERR_COMM, "sizes"));
        EXPECT_TRUE(same(before, trainer.snapshot()));
    });
}

TEST_F(LocalComm, RefusesADuplicateRankAndADifferentSize) {
    const std::vector<Comm> comms = group(2);
    EXPECT_TRUE(refused(create(0, 2, 50), DSOPT_ERR_ARGUMENT, "rank 0")) << "the rank exists";
    EXPECT_TRUE(refused(create(1, 3, 50), DSOPT_ERR_COMM, "3")) << "another number of ranks";
    run_ranks(2, [&](int rank) { EXPECT_OK(call_collective(ctx, comms[size_t(rank)])); });
}

TEST_F(LocalComm, CountsCallsAndBytes) {
    for (const int ranks : {1, 2, 3, 4}) {
        const CommId new_comm_id = new_id();
        run_ranks(ranks, [&](int rank) {
            const Comm comm = local_comm(ctx, new_comm_id, rank, ranks);
            EXPECT_EQ(info_of(comm).calls, 0);
            EXPECT_EQ(info_of(comm).bytes_sent, 0);
            DSOPT_NEW(dsopt_optimizer_desc, desc);
            desc.data = comm.get();
            Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM),
                            std::vector<Array>{Array(DSOPT_DTYPE_F16, 3, 1)});
            for (int64_t step = 1; step <= 4; ++step) {
                must(trainer.step({Array(DSOPT_DTYPE_F16, 3, 1)}));
                // The data ranks reduce one double.
                EXPECT_EQ(info_of(comm).calls, ranks == 1 ? 0 : step);
                EXPECT_EQ(info_of(comm).bytes_sent, step * (8 * 2 * (ranks - 1) / ranks));
                EXPECT_EQ(info_of(comm).bytes_received, info_of(comm).bytes_sent);
            }
        });
    }
}

TEST_F(LocalComm, LivesAsLongAsAnOptimizerUsesIt) {
    std::vector<Comm> comms = group(2);
    run_ranks(2, [&](int rank) {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.data = comms[size_t(rank)].get();
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), std::vector<Array>{Array(DSOPT_DTYPE_F16, 3, 1)});
        comms[size_t(rank)].reset();
        for (int step = 0; step < 3; ++step) EXPECT_OK(trainer.step({Array(DSOPT_DTYPE_F16, 3, 1)}));
    });
}

LABEL(long_emulated);
TEST_F(LocalComm, ReleasesEveryRankOnAbortAtAnyTime) {
    for (int i = 0; i < 100; ++i) {
        const CommId new_comm_id = new_id();
        std::vector<Comm> comms(3);
        run_ranks(3, [&](int rank) { comms[size_t(rank)] = local_comm(ctx, new_comm_id, rank, 3, -1); });
        std::atomic<int> rounds{0};
        std::thread aborter([&] {
            while (rounds.load() < i % 40) std::this_thread::yield();
            dsopt_comm_abort(comms[size_t(i % 3)].get());
        });
        run_ranks(3, [&](int rank) {
            dsopt_norm_result result;
            dsopt_status status = DSOPT_OK;
            for (; status == DSOPT_OK; ++rounds) {
                status = call_collective(ctx, comms[size_t(rank)], 2, &result);
                EXPECT_TRUE(status != DSOPT_OK || result.norm == std::sqrt(12.0));
            }
            EXPECT_EQ(status, DSOPT_ERR_ABORTED);
        });
        aborter.join();
    }
}

// ------------------------------------------------------------------------------------------------ the caller's table
/// A table of four ranks, of which the other three always have the same data as this one.
struct FakeTable {
    int calls = 0, aborted = 0, destroyed = 0, fail_with = 0;
    int64_t bytes = 0;
    bool after_destroy = false;

    static int all_reduce(void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op, void *) {
        FakeTable &fake = *static_cast<FakeTable *>(self);
        fake.after_destroy = fake.after_destroy || fake.destroyed != 0;
        ++fake.calls;
        if (fake.fail_with != 0) return fake.fail_with;
        fake.bytes += count * (dtype == DSOPT_DTYPE_F64 ? 8 : 4);
        for (int64_t i = 0; i < count; ++i) {
            const double factor = op == DSOPT_OP_SUM ? 4 : 1;
            if (dtype == DSOPT_DTYPE_F64)
                static_cast<double *>(recv)[i] = factor * static_cast<const double *>(send)[i];
            else if (dtype == DSOPT_DTYPE_F32)
                static_cast<float *>(recv)[i] = float(factor) * static_cast<const float *>(send)[i];
            else
                static_cast<int32_t *>(recv)[i] = int32_t(factor) * static_cast<const int32_t *>(send)[i];
        }
        return 0;
    }
    static int error(void *, char *text, size_t capacity) {
        std::snprintf(text, capacity, "the cable is cut");
        return 9;
    }
    dsopt_comm_table table() {
        DSOPT_NEW(dsopt_comm_table, table);
        table.self = this;
        table.rank = 1;
        table.ranks = 4;
        table.all_reduce = all_reduce;
        table.abort = [](void *self) { ++static_cast<FakeTable *>(self)->aborted; };
        table.destroy = [](void *self) { ++static_cast<FakeTable *>(self)->destroyed; };
        return table;
    }
};

TEST(TableComm, CallsTheCallersFunctionsAndCountsThem) {
    const Context ctx = make_context(1);
    FakeTable fake;
    Comm comm;
    {
        const dsopt_comm_table table = fake.table(); // copied
        comm = table_comm(ctx, table);
    }
    EXPECT_EQ(info_of(comm).rank, 1);
    EXPECT_EQ(info_of(comm).ranks, 4);
    for (int i = 0; i < 5; ++i) {
        dsopt_norm_result result;
        ASSERT_OK(call_collective(ctx, comm, 3, &result));
        EXPECT_EQ(result.norm, 6);
        EXPECT_EQ(info_of(comm).calls, fake.calls);
        EXPECT_EQ(info_of(comm).bytes_sent, fake.bytes * 2 * 3 / 4);
    }
    EXPECT_GT(fake.calls, 0);
    comm.reset();
    EXPECT_EQ(fake.destroyed, 1);
}

TEST(TableComm, ReturnsTheCallersErrorTextAndStaysUnusable) {
    const Context ctx = make_context(1);
    for (const bool with_text : {true, false}) {
        FakeTable fake;
        dsopt_comm_table table = fake.table();
        if (with_text) table.error = FakeTable::error;
        const Comm comm = table_comm(ctx, table);
        ASSERT_OK(call_collective(ctx, comm));
        fake.fail_with = 4711;
        EXPECT_TRUE(refused(call_collective(ctx, comm), DSOPT_ERR_COMM, "4711"));
        EXPECT_EQ(std::strstr(dsopt_last_error(), "the cable is cut") != nullptr, with_text);
        EXPECT_EQ(info_of(comm).status, DSOPT_ERR_COMM);
        fake.fail_with = 0;
        const int calls = fake.calls;
        EXPECT_TRUE(refused(call_collective(ctx, comm), DSOPT_ERR_COMM));
        EXPECT_EQ(fake.calls, calls) << "an unusable comm is not called again";
    }
}

struct Thrown {
    const char *text; // NULL: the exception is no std::exception
    [[noreturn]] void throw_it() const {
        if (text == nullptr) throw 42;
        throw std::runtime_error(text);
    }
};

TEST(TableComm, IsUnusableAfterAFunctionThrows) {
    enum Function { kAllReduce, kAllToAll, kAllGather, kError, kNone };
    const Context ctx = make_context(1);
    for (const Thrown thrown : {Thrown{"the cable is cut"}, Thrown{nullptr}})
        for (const Function function : {kAllReduce, kAllToAll, kAllGather, kError}) {
            struct Provider {
                Thrown thrown;
                Function throws = kNone;
                void may_throw(Function here) const {
                    if (throws == here) thrown.throw_it();
                }
            } self{thrown};
            DSOPT_NEW(dsopt_comm_table, table);
            table.self = &self;
            table.ranks = 2;
            table.all_reduce = [](void *self, const void *send, void *recv, int64_t count, int32_t, int32_t, void *) {
                static_cast<Provider *>(self)->may_throw(kAllReduce);
                if (send != recv) std::memcpy(recv, send, size_t(count) * sizeof(float));
                return static_cast<Provider *>(self)->throws == kError ? 5 : 0;
            };
            table.all_to_all = [](void *self, const void *send, void *recv, int64_t bytes, void *) {
                static_cast<Provider *>(self)->may_throw(kAllToAll);
                std::memcpy(recv, send, size_t(bytes) * 2);
                return 0;
            };
            table.all_gather = [](void *self, const void *send, void *recv, int64_t bytes, void *) {
                static_cast<Provider *>(self)->may_throw(kAllGather);
                for (int64_t row = 0; row < 2; ++row)
                    std::memcpy(static_cast<char *>(recv) + row * bytes, send, size_t(bytes));
                return 0;
            };
            table.error = [](void *self, char *text, size_t) {
                static_cast<Provider *>(self)->may_throw(kError);
                *text = 0;
                return 0;
            };
            const Comm comm = table_comm(ctx, table);
            const auto collective = [&] { return call_collective(ctx, comm); };
            const Shared<float> data(64, 1), errors(1 << 14), workspace(1 << 16);
            dsopt_tensor tensor{data.data(), int64_t(data.size()), DSOPT_DTYPE_F32, 0};
            DSOPT_NEW(dsopt_compressed, compressed);
            compressed.tensors = &tensor;
            compressed.count = 1;
            compressed.worker_error = errors.data();
            compressed.server_error = errors.data() + 9000; // after a block of 4,096 elements per rank, and scales
            compressed.workspace = workspace.data();
            compressed.workspace_bytes = workspace.size() * sizeof(float);
            const auto exchange = [&] { return dsopt_compressed_allreduce(comm.get(), &compressed); };
            ASSERT_OK(collective());
            ASSERT_OK(exchange());
            self.throws = function;
            const bool exchanges = function == kAllToAll || function == kAllGather;
            EXPECT_TRUE(refused(exchanges ? exchange() : collective(), DSOPT_ERR_COMM,
                                function == kError       ? "(5)"
                                : thrown.text != nullptr ? thrown.text
                                                         : "threw"));
            EXPECT_EQ(info_of(comm).status, DSOPT_ERR_COMM);
            self.throws = kNone;
            EXPECT_TRUE(refused(collective(), DSOPT_ERR_COMM, "earlier"));
            EXPECT_TRUE(refused(exchange(), DSOPT_ERR_COMM, "earlier"));
        }
}

TEST(TableComm, CallsTheCallersAbort) {
    const Context ctx = make_context(1);
    FakeTable fake;
    const Comm comm = table_comm(ctx, fake.table());
    dsopt_comm_abort(comm.get());
    EXPECT_EQ(fake.aborted, 1);
    EXPECT_TRUE(refused(call_collective(ctx, comm), DSOPT_ERR_ABORTED));
    EXPECT_EQ(fake.calls, 0);
    dsopt_comm_table minimal = fake.table();
    minimal.abort = nullptr;
    minimal.destroy = nullptr;
    const Comm without = table_comm(ctx, minimal);
    dsopt_comm_abort(without.get());
    EXPECT_TRUE(refused(call_collective(ctx, without), DSOPT_ERR_ABORTED));
}

TEST(TableComm, ReturnsAbortedFromACallThatAbortEnds) {
    // After an abort, a blocked function of the provider returns the provider's error code.
    static dsopt_comm *running;
    const Context ctx = make_context(1);
    FakeTable fake;
    dsopt_comm_table table = fake.table();
    table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) {
        dsopt_comm_abort(running);
        return 5;
    };
    const Comm comm = table_comm(ctx, table);
    running = comm.get();
    EXPECT_TRUE(refused(call_collective(ctx, comm), DSOPT_ERR_ABORTED));
    EXPECT_EQ(info_of(comm).status, DSOPT_ERR_ABORTED);
}

TEST(TableComm, IsDestroyedOnceAfterTheOptimizerThatUsesIt) {
    const Context ctx = make_context(1);
    FakeTable fake;
    {
        Comm comm = table_comm(ctx, fake.table());
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.data = desc.model = comm.get();
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), std::vector<Array>{Array(DSOPT_DTYPE_F16, 3, 1)});
        comm.reset();
        EXPECT_EQ(fake.destroyed, 0);
        ASSERT_OK(trainer.step({Array(DSOPT_DTYPE_F16, 3, 1)}));
        EXPECT_GT(fake.calls, 0);
    }
    EXPECT_EQ(fake.destroyed, 1);
    EXPECT_FALSE(fake.after_destroy);
}

// --------------------------------------------------------------------------------------------------- other kinds
TEST(SelfComm, HasOneRankAndSendsNothing) {
    const Context ctx = make_context(1);
    const Comm comm = self_comm(ctx);
    dsopt_norm_result result;
    ASSERT_OK(call_collective(ctx, comm, -5, &result));
    EXPECT_EQ(result.norm, 5);
    EXPECT_EQ(info_of(comm).rank, 0);
    EXPECT_EQ(info_of(comm).ranks, 1);
    EXPECT_EQ(info_of(comm).bytes_sent, 0);
}

TEST(CommCreate, RefusesInvalidDescriptors) {
    using Desc = dsopt_comm_desc;
    static FakeTable fake;
    static const CommId id = new_id();
    static dsopt_comm_table good, ranks, rank, functions, short_table, memory, reserved;
    good = ranks = rank = functions = short_table = memory = reserved = fake.table();
    memory.memory = 2;
    reserved.reserved = 1;
    ranks.ranks = 0;
    rank.rank = 4;
    functions.all_reduce = nullptr;
    short_table.size = 16;
    struct {
        const char *what;
        void (*change)(Desc &);
        dsopt_status status;
    } const cases[] = {
        {"kind", [](Desc &d) { d.kind = 9; }, DSOPT_ERR_ARGUMENT},
        {"self with a rank", [](Desc &d) { d.rank = 1; }, DSOPT_ERR_UNSUPPORTED},
        {"self with ranks", [](Desc &d) { d.ranks = 2; }, DSOPT_ERR_UNSUPPORTED},
        {"self with a time-out", [](Desc &d) { d.timeout_ms = 5; }, DSOPT_ERR_UNSUPPORTED},
        {"self with an id", [](Desc &d) { d.id = id.data(), d.id_bytes = 16; }, DSOPT_ERR_UNSUPPORTED},
        {"self with a table", [](Desc &d) { d.table = &good; }, DSOPT_ERR_UNSUPPORTED},
        {"local without an id", [](Desc &d) { d.kind = DSOPT_COMM_KIND_LOCAL, d.ranks = 1; }, DSOPT_ERR_ARGUMENT},
        {"local with a short id", [](Desc &d) { d = local_desc(id, 0, 1), d.id_bytes = 8; }, DSOPT_ERR_ARGUMENT},
        {"local without ranks", [](Desc &d) { d = local_desc(id, 0, 0); }, DSOPT_ERR_ARGUMENT},
        {"local rank below", [](Desc &d) { d = local_desc(id, -1, 2); }, DSOPT_ERR_ARGUMENT},
        {"local rank above", [](Desc &d) { d = local_desc(id, 2, 2); }, DSOPT_ERR_ARGUMENT},
        {"local time-out", [](Desc &d) { d = local_desc(id, 0, 1, -2); }, DSOPT_ERR_ARGUMENT},
        {"local with a table", [](Desc &d) { d = local_desc(id, 0, 1), d.table = &good; }, DSOPT_ERR_UNSUPPORTED},
        {"table missing", [](Desc &d) { d.kind = DSOPT_COMM_KIND_TABLE; }, DSOPT_ERR_ARGUMENT},
        {"table with a time-out", [](Desc &d) { d.kind = DSOPT_COMM_KIND_TABLE, d.table = &good, d.timeout_ms = 5; },
         DSOPT_ERR_UNSUPPORTED},
        {"table with ranks", [](Desc &d) { d.kind = DSOPT_COMM_KIND_TABLE, d.table = &good, d.ranks = 4; },
         DSOPT_ERR_UNSUPPORTED},
        {"table without ranks", [](Desc &d) { d.kind = DSOPT_COMM_KIND_TABLE, d.table = &ranks; }, DSOPT_ERR_ARGUMENT},
        {"table rank", [](Desc &d) { d.kind = DSOPT_COMM_KIND_TABLE, d.table = &rank; }, DSOPT_ERR_ARGUMENT},
        {"table functions", [](Desc &d) { d.kind = DSOPT_COMM_KIND_TABLE, d.table = &functions; }, DSOPT_ERR_ARGUMENT},
        {"table memory", [](Desc &d) { d.kind = DSOPT_COMM_KIND_TABLE, d.table = &memory; }, DSOPT_ERR_ARGUMENT},
        {"table reserved", [](Desc &d) { d.kind = DSOPT_COMM_KIND_TABLE, d.table = &reserved; }, DSOPT_ERR_ARGUMENT},
        {"table with native", [](Desc &d) { d.kind = DSOPT_COMM_KIND_TABLE, d.table = &good, d.native = &fake; },
         DSOPT_ERR_UNSUPPORTED},
        {"self that enqueues", [](Desc &d) { d.flags = DSOPT_COMM_FLAG_ENQUEUE; }, DSOPT_ERR_UNSUPPORTED},
        {"table that enqueues",
         [](Desc &d) { d.kind = DSOPT_COMM_KIND_TABLE, d.table = &good, d.flags = DSOPT_COMM_FLAG_ENQUEUE; },
         DSOPT_ERR_UNSUPPORTED},
        {"self that synchronizes", [](Desc &d) { d.flags = DSOPT_COMM_FLAG_SYNCHRONIZE; }, DSOPT_ERR_UNSUPPORTED},
        {"table that synchronizes",
         [](Desc &d) { d.kind = DSOPT_COMM_KIND_TABLE, d.table = &good, d.flags = DSOPT_COMM_FLAG_SYNCHRONIZE; },
         DSOPT_ERR_UNSUPPORTED},
        {"flags that contradict each other",
         [](Desc &d) { d.flags = DSOPT_COMM_FLAG_ENQUEUE | DSOPT_COMM_FLAG_SYNCHRONIZE; }, DSOPT_ERR_ARGUMENT},
        {"flags", [](Desc &d) { d.flags = 16; }, DSOPT_ERR_ARGUMENT},
        {"reserved", [](Desc &d) { d.reserved = 1; }, DSOPT_ERR_ARGUMENT},
        {"local with native", [](Desc &d) { d = local_desc(id, 0, 1), d.native = &fake; }, DSOPT_ERR_UNSUPPORTED},
        {"hccl native with ranks", [](Desc &d) { d.kind = DSOPT_COMM_KIND_HCCL, d.ranks = 2, d.native = &fake; },
         DSOPT_ERR_UNSUPPORTED},
        {"hccl with a short id", [](Desc &d) { d = local_desc(id, 0, 1), d.kind = DSOPT_COMM_KIND_HCCL; },
         DSOPT_ERR_ARGUMENT},
        {"table size", [](Desc &d) { d.kind = DSOPT_COMM_KIND_TABLE, d.table = &short_table; }, DSOPT_ERR_VERSION},
        {"desc size", [](Desc &d) { d.size = 8; }, DSOPT_ERR_VERSION},
    };
    const Context ctx = make_context(1);
    auto *const untouched = reinterpret_cast<dsopt_comm *>(16);
    for (const auto &test : cases) {
        DSOPT_NEW(dsopt_comm_desc, desc);
        test.change(desc);
        dsopt_comm *comm = untouched;
        EXPECT_TRUE(refused(dsopt_comm_create(ctx.get(), &desc, &comm), test.status)) << test.what;
        EXPECT_EQ(comm, untouched) << test.what;
    }
    EXPECT_TRUE(refused(dsopt_comm_create(ctx.get(), nullptr, nullptr), DSOPT_ERR_ARGUMENT));
    DSOPT_NEW(dsopt_comm_info, info);
    EXPECT_TRUE(refused(dsopt_comm_query(nullptr, &info), DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(dsopt_comm_query(self_comm(ctx).get(), nullptr), DSOPT_ERR_ARGUMENT));
    EXPECT_EQ(fake.destroyed, 0) << "a refused table still belongs to the caller";
    dsopt_comm_destroy(nullptr);
}

TEST(CommUniqueId, HasAFixedSizeAndIsUnique) {
    size_t bytes = 0;
    ASSERT_OK(dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, nullptr, &bytes));
    EXPECT_EQ(bytes, 16u);
    char id[32];
    bytes = 15;
    EXPECT_TRUE(refused(dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, id, &bytes), DSOPT_ERR_SHAPE, "16"));
    EXPECT_EQ(bytes, 15u);
    bytes = sizeof id;
    ASSERT_OK(dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, id, &bytes));
    EXPECT_EQ(bytes, 16u);
    EXPECT_NE(new_id(), new_id());
    for (const int32_t kind : {int(DSOPT_COMM_KIND_SELF), int(DSOPT_COMM_KIND_TABLE), 99})
        EXPECT_TRUE(refused(dsopt_comm_unique_id(kind, id, &bytes), DSOPT_ERR_UNSUPPORTED));
    EXPECT_TRUE(refused(dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, id, nullptr), DSOPT_ERR_ARGUMENT));
}

} // namespace comm_tests
