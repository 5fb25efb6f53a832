// SPDX-License-Identifier: Apache-2.0
// Checkpoints of the 1-bit family that are loaded by another number of ranks: state that is kept exactly, redistributed
// error feedback, and refusals.
#include "support/list_vector.h"
#include "support/onebit.h"
#include <filesystem>
#include <fstream>
#include <random>

using namespace test;

namespace onebit_reshard_tests {

constexpr int64_t kFreeze = 12;
constexpr size_t kFirstIdle = 100, kLastIdle = 300; // elements of tensor 4 without any gradient
constexpr size_t kTensors = 6;
/// Returns a problem whose chunks end in the middle of tensors with any number of ranks.
Problem small(int ranks) { return {{300, 1, 33, 0, 700, 96}, ranks}; }

std::vector<Array> gradients(const Problem &problem, int32_t reduction, int rank, int64_t call) {
    std::vector<Array> grads = problem.gradients_for(reduction, rank, call);
    for (size_t i = kFirstIdle; i < kLastIdle; ++i) grads[4].set(i, 0);
    return grads;
}
void train_calls(Trainer &trainer, const Problem &problem, int rank, int64_t from, int64_t to) {
    for (int64_t call = from; call <= to; ++call)
        must(trainer.step(gradients(problem, reduction(trainer), rank, call)));
}

/// Files and state of all ranks of a run after one call.
struct SavedRun {
    std::vector<MemoryFile> files;
    std::vector<Snapshot> snapshots;
    std::vector<std::vector<float>> worker, server; // errors without scales
    std::vector<Snapshot> later;                    // at the end of the run
    std::string schedule;
    std::vector<const MemoryFile *> list() const {
        std::vector<const MemoryFile *> list;
        for (const MemoryFile &file : files) list.push_back(&file);
        return list;
    }
};
std::vector<float> errors_of(const Trainer &trainer, const char *name, int ranks) {
    if (ranks == 1) return {};
    std::vector<float> values = trainer.state("worker_error");
    const size_t elements = values.size() - kTensors; // one scale per tensor
    if (std::strcmp(name, "server_error") == 0) {
        values = trainer.state(name);
        values.resize(elements / size_t(ranks));
    } else {
        values.resize(elements);
    }
    return values;
}
SavedRun run_and_save(int32_t algorithm, int ranks, int64_t stop, int64_t later = 0, int32_t compat = DSOPT_COMPAT_NONE,
                      double lr = 1e-2) {
    SavedRun saved;
    const auto n = size_t(ranks);
    saved.files.resize(n);
    saved.snapshots.resize(n);
    saved.worker.resize(n);
    saved.server.resize(n);
    saved.later.resize(n);
    const Problem problem = small(ranks);
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer trainer(ctx, desc_with(comm, compat), group_for(algorithm, kFreeze, lr), problem.weights());
        const auto r = size_t(rank);
        if (rank == 0 && compat == DSOPT_COMPAT_NONE) saved.schedule = schedule(trainer, stop + later);
        train_calls(trainer, problem, rank, 1, stop);
        must(saved.files[r].save(trainer, DSOPT_IO_PARAMS));
        saved.snapshots[r] = trainer.snapshot();
        saved.worker[r] = errors_of(trainer, "worker_error", ranks);
        saved.server[r] = errors_of(trainer, "server_error", ranks);
        train_calls(trainer, problem, rank, stop + 1, stop + later);
        saved.later[r] = trainer.snapshot();
    });
    return saved;
}
/// Returns the last call up to `call` after which all ranks have the same parameters.
int64_t last_synchronized_call(int32_t algorithm, int64_t call) {
    const Context ctx = make_context(1);
    const Trainer trainer(ctx, optimizer_desc(), group_for(algorithm, kFreeze),
                          std::vector<Array>{Array(DSOPT_DTYPE_F32, 1, 0)});
    const std::string text = schedule(trainer, call);
    while (text[size_t(call - 1)] == '-') --call;
    return call;
}
Snapshot without(Snapshot snapshot, const std::vector<const char *> &names) {
    for (const char *name : names) snapshot.erase(name);
    return snapshot;
}
const std::vector<const char *> kResizedState = {"worker_error -1", "server_error -1", "active -1", "exp_avg_pad -1"};

class Reshard : public testing::TestWithParam<std::tuple<int32_t, int, int>> {
protected:
    const int32_t algorithm = std::get<0>(GetParam());
    const int from = std::get<1>(GetParam()), to = std::get<2>(GetParam());
};
INSTANTIATE_TEST_SUITE_P(, Reshard,
                         testing::Combine(testing::ValuesIn(kFamily), testing::Values(1, 2, 3, 4),
                                          testing::Values(1, 2, 3, 4)),
                         [](const auto &info) {
                             return std::string(name_of(std::get<0>(info.param))) + "From" +
                                    std::to_string(std::get<1>(info.param)) + "To" +
                                    std::to_string(std::get<2>(info.param));
                         });

LABEL_PARAMS(one_of_many, "*From[123]To*");
LABEL_PARAMS(one_of_many, "*From4To[124]");
LABEL_PARAMS(one_of_many, "[OZ]*Adam*");
LABEL_PARAMS(long_emulated, "*From[134]To*");
LABEL_PARAMS(long_emulated, "*From2To[124]");
LABEL_PARAMS(long_emulated, "[OZ]*Adam*");
TEST_P(Reshard, KeepsMomentsAndRedistributesErrors) {
    for (const int64_t latest : {6, 12, 13, 20, 33}) {
        const int64_t stop = last_synchronized_call(algorithm, latest), later = 12;
        const SavedRun saved = run_and_save(algorithm, from, stop, later);
        const Problem problem = small(to);
        std::vector<const MemoryFile *> list = saved.list();
        std::reverse(list.begin(), list.end()); // the order of files does not matter
        std::vector<Snapshot> ends{size_t(to)};
        std::vector<std::vector<float>> joined{size_t(to)};
        with_ranks(to, [&](int rank, const Context &ctx, const Comm &comm) {
            Trainer trainer = trainer_of(ctx, comm, group_for(algorithm, 99, 0.5, 0), problem.weights());
            ASSERT_OK(load_all(trainer.opt(), list, DSOPT_IO_PARAMS));
            EXPECT_EQ(trainer.report().resharded_from, from == to ? 0 : from);
            EXPECT_EQ(trainer.report().calls, stop);
            EXPECT_EQ(schedule(trainer, stop + later), saved.schedule);
            const Snapshot loaded = trainer.snapshot();
            if (from == to) { EXPECT_TRUE(same(loaded, saved.snapshots[size_t(rank)])); }
            EXPECT_TRUE(same(without(loaded, kResizedState), without(saved.snapshots[0], kResizedState)))
                << "after " << stop;
            if (to > 1) {
                const std::vector<float> error = errors_of(trainer, "worker_error", to);
                joined[size_t(rank)] = errors_of(trainer, "server_error", to);
                bool any_error = false;
                for (size_t i = 0; i < error.size(); ++i) {
                    double sum = 0;
                    for (int old = 0; old < from && from > 1; ++old)
                        if (i < saved.worker[size_t(old)].size()) sum += double(saved.worker[size_t(old)][i]);
                    if (from != to) { ASSERT_EQ(error[i], float(sum / from)) << i << ", after " << stop; }
                    any_error = any_error || error[i] != 0;
                }
                const bool began = saved.schedule.substr(0, size_t(stop)).find('1') != std::string::npos;
                EXPECT_EQ(any_error, from > 1 && began && stop != kFreeze) << "after " << stop;
                std::vector<int32_t> active(loaded.at("active -1").size() / 4);
                std::memcpy(active.data(), loaded.at("active -1").data(), active.size() * 4);
                const ListVector vector(problem.sizes);
                const char next = letter(reduction(trainer, stop + 1));
                for (size_t t = 0; t < problem.sizes.size(); ++t) {
                    const auto begin = size_t(vector.begin[t]);
                    const std::vector<float> v = trainer.state("exp_avg_sq", int64_t(t));
                    for (size_t i = 0; i < v.size() && next != 'F'; ++i)
                        ASSERT_EQ((uint32_t(active[(begin + i) / 32]) >> ((begin + i) % 32)) & 1u, v[i] != 0)
                            << "tensor " << t << ", element " << i << ", after " << stop;
                    for (size_t i = kFirstIdle; i < kLastIdle && t == 4; ++i) ASSERT_EQ(error[begin + i], 0) << i;
                }
            }
            train_calls(trainer, problem, rank, stop + 1, stop + later);
            ends[size_t(rank)] = trainer.snapshot();
            for (const Array &weight : trainer.weights())
                for (const float value : weight.floats()) ASSERT_LT(std::fabs(value), 100);
        });
        if (from == to) {
            for (size_t rank = 0; rank < size_t(to); ++rank)
                EXPECT_TRUE(same(ends[rank], saved.later[rank])) << "differs from the uninterrupted run";
            continue;
        }
        std::vector<float> before, after;
        for (const auto &chunk : saved.server) before.insert(before.end(), chunk.begin(), chunk.end());
        for (const auto &chunk : joined) after.insert(after.end(), chunk.begin(), chunk.end());
        if (to > 1) {
            before.resize(std::max(before.size(), after.size())); // the rest is padding
            after.resize(before.size());
            EXPECT_TRUE(same_bits(after, before)) << "after " << stop;
        }
        if (saved.schedule.back() == '-') continue; // replicas differ in local steps
        for (size_t rank = 1; rank < size_t(to); ++rank)
            EXPECT_TRUE(same(without(ends[rank], kResizedState), without(ends[0], kResizedState))) << "replicas differ";
    }
}

LABEL_PARAMS(one_of_many, "*From[123]To*");
LABEL_PARAMS(one_of_many, "*From4To[124]");
LABEL_PARAMS(long_emulated, "*From[134]To*");
LABEL_PARAMS(long_emulated, "*From2To[124]");
TEST_P(Reshard, DropsErrorsInCompatMode) {
    if (algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM && from == 1) return; // one rank ignores gradients there
    const int64_t stop = algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM ? 8 : 20;
    const SavedRun saved = run_and_save(algorithm, from, stop, 0, DSOPT_COMPAT_DEEPSPEED);
    Snapshot plain;
    with_ranks(from, [&](int rank, const Context &ctx, const Comm &comm) {
        const Problem problem = small(from);
        Trainer trainer(ctx, desc_with(comm, DSOPT_COMPAT_DEEPSPEED), group_for(algorithm, 99), problem.weights());
        MemoryFile file = saved.files[size_t(rank)];
        must(file.load(trainer, DSOPT_IO_PARAMS));
        if (rank == 0) plain = trainer.snapshot();
    });
    with_ranks(to, [&](int rank, const Context &ctx, const Comm &comm) {
        const Problem problem = small(to);
        Trainer trainer(ctx, desc_with(comm, DSOPT_COMPAT_DEEPSPEED), group_for(algorithm, 99), problem.weights());
        ASSERT_OK(load_all(trainer.opt(), saved.list(), DSOPT_IO_PARAMS));
        const Snapshot loaded = trainer.snapshot();
        EXPECT_TRUE(same(without(loaded, kResizedState), without(plain, kResizedState)));
        for (const char *name : {"worker_error -1", "server_error -1"})
            if (to > 1) { EXPECT_EQ(loaded.at(name).find_first_not_of('\0'), std::string::npos) << name; }
        train_calls(trainer, problem, rank, stop + 1, stop + 4);
    });
}

/// Calls body(trainer) on rank 0 of `ranks` after some steps, and checks that it changes nothing.
void expect_unchanged(int32_t algorithm, int ranks, const std::function<void(const Trainer &)> &body) {
    const Problem problem = small(ranks);
    with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer trainer = trainer_of(ctx, comm, group_for(algorithm, 3, 0.1), problem.weights());
        train_calls(trainer, problem, rank, 1, 5);
        const Snapshot before = trainer.snapshot();
        if (rank == 0) body(trainer);
        EXPECT_TRUE(same(trainer.snapshot(), before));
        EXPECT_EQ(trainer.get(DSOPT_KEY_FREEZE_STEP), 3);
        EXPECT_EQ(trainer.get(DSOPT_KEY_LR), 0.1);
        EXPECT_EQ(trainer.report().calls, 5);
    });
}

LABEL(long_emulated);
TEST(ReshardedLoad, RefusesFilesOfDifferentSaves) {
    for (const int32_t algorithm : kFamily) {
        const int64_t stop = last_synchronized_call(algorithm, 20),
                      other_stop = last_synchronized_call(algorithm, stop - 1);
        const SavedRun saved = run_and_save(algorithm, 3, stop), earlier = run_and_save(algorithm, 3, other_stop),
                       two = run_and_save(algorithm, 2, stop), another = run_and_save(algorithm, 3, stop, 0, 0, 2e-2);
        const auto &files = saved.files;
        MemoryFile damaged = files[1];
        damaged.data[damaged.data.size() - 100] ^= 1;
        for (const int ranks : {1, 2, 3})
            expect_unchanged(algorithm, ranks, [&](const Trainer &trainer) {
                const auto expect = [&](const std::vector<const MemoryFile *> &list, const char *text,
                                        dsopt_status status = DSOPT_ERR_MISMATCH) {
                    EXPECT_TRUE(refused(load_all(trainer.opt(), list), status, text)) << ranks << " ranks";
                };
                expect({&files[0], &files[2]}, "the file of rank 1 is not there");
                expect({&files[1], &files[2]}, "the file of rank 0 is not there");
                expect({&files[2]}, "rank 0 is not there");
                expect({&files[0], &files[1], &files[1], &files[2]}, "file 2 is a second file of rank 1");
                expect({&files[0], &files[1], &earlier.files[2]}, "\"calls\"");
                expect({&files[0], &two.files[1], &files[2]}, "file 1 is of rank 1 of 2, file 0 of rank 0 of 3");
                expect({&files[0], &files[1], &another.files[2]}, "\"group.0.lr\"");
                if (ranks != 3) { expect({&files[0], &damaged, &files[2]}, "checksum", DSOPT_ERR_CHECKSUM); }
            });
    }
}

TEST(ReshardedLoad, RefusesReplicatedTensorsThatDiffer) {
    // Two runs with the same numbers in their metadata, but with other gradients.
    std::array<MemoryFile, 2> files, others;
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        const Problem problem = small(2);
        for (const bool other : {false, true}) {
            Trainer trainer = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), problem.weights());
            const int64_t first = other ? 11 : 1;
            for (int64_t call = first; call < first + 4; ++call)
                must(trainer.step(problem.gradients_for(reduction(trainer), rank, call)));
            must((other ? others : files)[size_t(rank)].save(trainer));
        }
    });
    expect_unchanged(DSOPT_ALGORITHM_ONEBIT_ADAM, 3, [&](const Trainer &trainer) {
        EXPECT_TRUE(refused(load_all(trainer.opt(), {&files[0], &others[1]}), DSOPT_ERR_MISMATCH, "\"p0.exp_avg\""));
    });
    with_ranks(3, [&](int, const Context &ctx, const Comm &comm) {
        Trainer trainer = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 3), small(3).weights());
        EXPECT_OK(load_all(trainer.opt(), {&files[0], &files[1]}));
    });
}

TEST(ReshardedLoad, RefusesZeroOneAdamBetweenSynchronizations) {
    const int64_t synced = last_synchronized_call(DSOPT_ALGORITHM_ZERO_ONE_ADAM, 40), between = synced + 1;
    const SavedRun three_ranks = run_and_save(DSOPT_ALGORITHM_ZERO_ONE_ADAM, 3, between),
                   one_rank = run_and_save(DSOPT_ALGORITHM_ZERO_ONE_ADAM, 1, between);
    ASSERT_EQ(three_ranks.schedule.back(), '-');
    for (const int ranks : {1, 2, 4})
        expect_unchanged(DSOPT_ALGORITHM_ZERO_ONE_ADAM, ranks, [&](const Trainer &trainer) {
            EXPECT_TRUE(refused(load_all(trainer.opt(), three_ranks.list()), DSOPT_ERR_MISMATCH,
                                "between two synchronisations"));
            MemoryFile file = three_ranks.files[0];
            for (const uint32_t flags : {0, int(DSOPT_IO_RESET_ERRORS)})
                EXPECT_TRUE(refused(file.load(trainer, flags), DSOPT_ERR_MISMATCH, "between two synchronisations"));
        });
    with_ranks(3, [&](int rank, const Context &ctx, const Comm &comm) { // the same number of ranks can load the files
        Trainer trainer = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ZERO_ONE_ADAM, 3), small(3).weights());
        ASSERT_OK(load_all(trainer.opt(), three_ranks.list(), DSOPT_IO_PARAMS));
        EXPECT_TRUE(same(trainer.snapshot(), three_ranks.snapshots[size_t(rank)]));
    });
    std::array<Snapshot, 2> ends;
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) { // from a file of one rank
        const Problem problem = small(2);
        Trainer trainer = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ZERO_ONE_ADAM, 3), problem.weights());
        ASSERT_OK(load_all(trainer.opt(), one_rank.list(), DSOPT_IO_PARAMS));
        EXPECT_TRUE(same(without(trainer.snapshot(), kResizedState), one_rank.snapshots[0]));
        train_calls(trainer, problem, rank, between + 1,
                    last_synchronized_call(DSOPT_ALGORITHM_ZERO_ONE_ADAM, between + 8));
        ends[size_t(rank)] = without(trainer.snapshot(), kResizedState);
    });
    EXPECT_TRUE(same(ends[0], ends[1]));
}

TEST(ReshardedLoad, RefusesFrozenZeroOneAdamInCompatMode) {
    const SavedRun saved = run_and_save(DSOPT_ALGORITHM_ZERO_ONE_ADAM, 3, 16, 0, DSOPT_COMPAT_DEEPSPEED);
    with_ranks(2, [&](int, const Context &ctx, const Comm &comm) {
        Trainer trainer(ctx, desc_with(comm, DSOPT_COMPAT_DEEPSPEED), group_for(DSOPT_ALGORITHM_ZERO_ONE_ADAM, 3),
                        small(2).weights());
        const Snapshot before = trainer.snapshot();
        EXPECT_TRUE(refused(load_all(trainer.opt(), saved.list(), DSOPT_IO_PARAMS), DSOPT_ERR_MISMATCH, "\"p0."));
        EXPECT_TRUE(same(trainer.snapshot(), before));
    });
}

TEST(ReshardedLoad, RefusesAccumulatedGradients) {
    std::array<MemoryFile, 2> files;
    const auto make = [](const Context &ctx, const Comm &comm, int ranks) {
        return Trainer(ctx, desc_with(comm, 0, DSOPT_OPTIMIZER_ACCUMULATE | DSOPT_OPTIMIZER_AVERAGES),
                       group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), small(ranks).weights());
    };
    for (const bool pending : {true, false}) {
        with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
            Trainer trainer = make(ctx, comm, 2);
            for (int64_t call = 1; call <= 4; ++call) {
                must(trainer.accumulate(small(2).local_gradients(rank, call)));
                if (call < 4 || !pending) must(trainer.step_accumulated());
            }
            must(files[size_t(rank)].save(trainer));
        });
        with_ranks(3, [&](int, const Context &ctx, const Comm &comm) {
            Trainer trainer = make(ctx, comm, 3);
            const Snapshot before = trainer.snapshot();
            const dsopt_status status = load_all(trainer.opt(), {&files[0], &files[1]});
            if (pending) {
                EXPECT_TRUE(refused(status, DSOPT_ERR_MISMATCH, "accumulators"));
                EXPECT_TRUE(same(trainer.snapshot(), before));
            } else {
                EXPECT_OK(status);
            }
        });
    }
}

LABEL(long_emulated);
TEST(ReshardedLoad, RefusesASingleFileAndTheFileOfAnotherRank) {
    for (const int32_t algorithm : kFamily) {
        const SavedRun saved = run_and_save(algorithm, 2, last_synchronized_call(algorithm, 20));
        MemoryFile file = saved.files[1];
        expect_unchanged(algorithm, 3, [&](const Trainer &trainer) {
            EXPECT_TRUE(refused(file.load(trainer), DSOPT_ERR_MISMATCH, "rank 1 of 2, and this is rank 0 of 3"));
            EXPECT_TRUE(refused(file.load(trainer), DSOPT_ERR_MISMATCH, "dsopt_io.files"));
        });
        expect_unchanged(algorithm, 2, [&](const Trainer &trainer) {
            EXPECT_TRUE(refused(file.load(trainer), DSOPT_ERR_MISMATCH, "rank 1 of 2, and this is rank 0"));
        });
        for (const int ranks : {1, 2, 3, 4}) // without errors the file of any rank can be loaded
            with_ranks(ranks, [&](int, const Context &ctx, const Comm &comm) {
                Trainer trainer = trainer_of(ctx, comm, group_for(algorithm, 3), small(ranks).weights());
                MemoryFile own = file;
                ASSERT_OK(own.load(trainer, DSOPT_IO_PARAMS | DSOPT_IO_RESET_ERRORS));
                EXPECT_TRUE(
                    same(without(trainer.snapshot(), kResizedState), without(saved.snapshots[1], kResizedState)));
                for (const char *name : {"worker_error", "server_error"}) {
                    if (ranks == 1) continue;
                    for (const float value : trainer.state(name)) ASSERT_EQ(value, 0);
                }
            });
    }
}

// Files of versions before 0.3 have no field `layout`; their error feedback and `active` lie in another vector.
TEST(ReshardedLoad, RefusesErrorFeedbackOfVersionsBefore03) {
    for (const int32_t algorithm : kFamily) {
        SavedRun saved = run_and_save(algorithm, 2, last_synchronized_call(algorithm, 20));
        for (MemoryFile &file : saved.files) {
            file.data = with_header(file.data, R"(,"layout":"2")", "");
            file.data = with_tensor_name(file.data, "optimizer.active", "optimizer.older"); // not read
        }
        const char *const text = "error feedback of a version before 0.3: DSOPT_IO_RESET_ERRORS";
        for (const int ranks : {2, 3}) // one rank has no error feedback
            expect_unchanged(algorithm, ranks, [&](const Trainer &trainer) {
                EXPECT_TRUE(refused(load_all(trainer.opt(), saved.list()), DSOPT_ERR_MISMATCH, text)) << ranks;
            });
        for (const int ranks : {1, 2, 3})
            with_ranks(ranks, [&](int, const Context &ctx, const Comm &comm) {
                Trainer trainer = trainer_of(ctx, comm, group_for(algorithm, 3), small(ranks).weights());
                ASSERT_OK(load_all(trainer.opt(), saved.list(), DSOPT_IO_PARAMS | DSOPT_IO_RESET_ERRORS));
                EXPECT_TRUE(
                    same(without(trainer.snapshot(), kResizedState), without(saved.snapshots[0], kResizedState)));
                if (ranks == 1) return;
                EXPECT_TRUE(same(trainer.snapshot()["active -1"], saved.snapshots[0]["active -1"])) << ranks;
            });
    }
}

TEST(ReshardedLoad, RefusesContradictoryArguments) {
    const Context ctx = make_context(1);
    Trainer trainer(ctx, optimizer_desc(), group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 3), small(1).weights());
    MemoryFile file;
    must(file.save(trainer));
    const Snapshot before = trainer.snapshot();
    const char *const paths[] = {"/nowhere/a", nullptr};
    void *const users[] = {&file};
    const uint64_t totals[] = {file.data.size()};
    const auto load = [&](const std::function<void(dsopt_io &)> &change, const char *path = nullptr) {
        DSOPT_NEW(dsopt_io, io);
        io.files = 1;
        change(io);
        return dsopt_optimizer_load(trainer.opt(), path, &io);
    };
    const auto good = [&](dsopt_io &io) {
        io.read = MemoryFile::read;
        io.users = users;
        io.totals = totals;
    };
    EXPECT_OK(load(good));
    EXPECT_TRUE(refused(load([&](dsopt_io &io) { io.paths = paths; }, "a"), DSOPT_ERR_ARGUMENT, "which one"));
    EXPECT_TRUE(refused(load([&](dsopt_io &) {}), DSOPT_ERR_ARGUMENT, "paths"));
    EXPECT_TRUE(refused(load([&](dsopt_io &io) { good(io), io.paths = paths; }), DSOPT_ERR_ARGUMENT, "paths"));
    EXPECT_TRUE(refused(load([&](dsopt_io &io) { good(io), io.users = nullptr; }), DSOPT_ERR_ARGUMENT, "users"));
    EXPECT_TRUE(refused(load([&](dsopt_io &io) { good(io), io.totals = nullptr; }), DSOPT_ERR_ARGUMENT, "totals"));
    EXPECT_TRUE(
        refused(load([&](dsopt_io &io) { good(io), io.files = 0; }), DSOPT_ERR_ARGUMENT, "without dsopt_io.files"));
    EXPECT_TRUE(refused(load([&](dsopt_io &io) { good(io), io.files = -1; }), DSOPT_ERR_ARGUMENT, "-1"));
    EXPECT_TRUE(refused(load([&](dsopt_io &io) { good(io), io.reserved2 = 7; }), DSOPT_ERR_ARGUMENT, "reserved2 is 7"));
    EXPECT_TRUE(refused(load([&](dsopt_io &io) { io.paths = paths; }), DSOPT_ERR_IO, "/nowhere/a"));
    EXPECT_TRUE(refused(load([&](dsopt_io &io) { io.paths = paths, io.files = 2; }), DSOPT_ERR_ARGUMENT, "paths[1]"));
    dsopt_io io = file.io();
    io.files = 1;
    io.paths = paths;
    EXPECT_TRUE(refused(dsopt_optimizer_save(trainer.opt(), nullptr, &io), DSOPT_ERR_UNSUPPORTED, "dsopt_io.files"));
    EXPECT_TRUE(same(trainer.snapshot(), before));
}

TEST(ReshardedLoad, ReadsPathsAndLogsTheResharding) {
    const std::filesystem::path folder =
        std::filesystem::path(testing::TempDir()) / ("dsopt-reshard-" + std::to_string(std::random_device()()));
    std::filesystem::create_directory(folder);
    const SavedRun saved = run_and_save(DSOPT_ALGORITHM_ONEBIT_LAMB, 3, 20);
    std::vector<std::string> names;
    std::vector<const char *> paths;
    for (size_t rank = 0; rank < 3; ++rank) {
        names.push_back((folder / ("rank" + std::to_string(rank))).string());
        std::ofstream(names.back(), std::ios::binary) << saved.files[rank].data;
    }
    for (const std::string &name : names) paths.push_back(name.c_str());
    for (const int ranks : {1, 2, 3}) {
        std::vector<std::string> logs(static_cast<size_t>(ranks));
        const CommId id = new_id();
        run_ranks(ranks, [&](int rank) {
            DSOPT_NEW(dsopt_context_desc, context);
            context.threads = 1;
            context.log_level = DSOPT_LOG_INFO;
            context.log = [](void *user, int32_t, const char *text) { *static_cast<std::string *>(user) += text; };
            context.user = &logs[size_t(rank)];
            dsopt_context *created = nullptr;
            must(dsopt_context_create(&context, &created));
            const Context ctx(created);
            const Comm comm = local_comm(ctx, id, rank, ranks);
            Trainer trainer = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ONEBIT_LAMB, 3), small(ranks).weights());
            DSOPT_NEW(dsopt_io, io);
            io.flags = DSOPT_IO_PARAMS;
            io.files = 3;
            io.paths = paths.data();
            ASSERT_OK(dsopt_optimizer_load(trainer.opt(), nullptr, &io));
            EXPECT_TRUE(same(without(trainer.snapshot(), kResizedState), without(saved.snapshots[0], kResizedState)));
        });
        for (const std::string &log : logs) {
            EXPECT_EQ(log.find("re-sharded a checkpoint of 3 ranks") != std::string::npos, ranks != 3) << log;
            EXPECT_EQ(log.find("error feedback is dropped") != std::string::npos, ranks == 1) << log;
        }
    }
    std::filesystem::remove_all(folder);
}

TEST(ReshardedLoad, AcceptsOptimizersWithoutErrorFeedback) {
    std::array<MemoryFile, 3> files;
    std::array<Snapshot, 3> snapshots;
    with_ranks(3, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer trainer(ctx, desc_with(comm), group_of(DSOPT_ALGORITHM_ADAMW), small(3).weights());
        for (int64_t call = 1; call <= 3; ++call) must(trainer.step(small(3).mean(call)));
        must(files[size_t(rank)].save(trainer, DSOPT_IO_PARAMS));
        snapshots[size_t(rank)] = trainer.snapshot();
    });
    with_ranks(2, [&](int, const Context &ctx, const Comm &comm) {
        Trainer trainer(ctx, desc_with(comm), group_of(DSOPT_ALGORITHM_ADAMW), small(2).weights());
        EXPECT_TRUE(refused(load_all(trainer.opt(), {&files[0], &files[2]}), DSOPT_ERR_MISMATCH, "rank 1"));
        ASSERT_OK(load_all(trainer.opt(), {&files[0], &files[1], &files[2]}, DSOPT_IO_PARAMS));
        EXPECT_TRUE(same(trainer.snapshot(), snapshots[0]));
    });
}

} // namespace onebit_reshard_tests
