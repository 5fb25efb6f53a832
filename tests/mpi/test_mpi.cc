// SPDX-License-Identifier: Apache-2.0
// Tests of the MPI adapter, compiled with a small piece size. Every rank is a process: run.sh. The argument is the
// scenario; a rank on which an expectation fails reports it and exits with 1.
#define DSOPT_MPI_PIECE 4096
#include "doubles/shard_run.h"
#include "dsopt_mpi.h"
#include "support/onebit_run.h"
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace {

int failures = 0, rank = 0, ranks = 1;
#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::printf("rank %d, line %d: not %s; last error: %s\n", rank, __LINE__, #condition, dsopt_last_error()); \
            ++failures;                                                                                                \
        }                                                                                                              \
    } while (false)

dsopt_context *context() {
    static dsopt_context *shared = nullptr;
    if (shared == nullptr) EXPECT(dsopt_context_create(nullptr, &shared) == DSOPT_OK);
    return shared;
}
dsopt_comm *world(int timeout_ms = 60000) {
    dsopt_comm *comm = nullptr;
    EXPECT(dsopt_mpi_comm_timeout(context(), MPI_COMM_WORLD, timeout_ms, &comm) == DSOPT_OK);
    return comm;
}
/// Makes a collective call, which every rank must make: the norm, over the ranks, of a tensor with one element.
dsopt_status call_together(dsopt_comm *comm, double *norm = nullptr, int32_t kind = DSOPT_NORM_L2) {
    float value = float(rank + 1);
    const dsopt_tensor tensor = {&value, 1, DSOPT_DTYPE_F32, 0};
    dsopt_norm_result result = {};
    const dsopt_status status = dsopt_tensors_norm(context(), &tensor, 1, kind, 0, comm, &result, nullptr);
    if (norm != nullptr) *norm = result.norm;
    return status;
}
dsopt_status status_of(dsopt_comm *comm) {
    DSOPT_NEW(dsopt_comm_info, info);
    EXPECT(dsopt_comm_query(comm, &info) == DSOPT_OK);
    return info.status;
}
/// Rank 0 hangs in wait_for_other_ranks() until each other rank has received a status and calls notify_rank_0().
void notify_rank_0() {
    const int nothing = 0;
    EXPECT(MPI_Send(&nothing, 1, MPI_INT, 0, 77, MPI_COMM_WORLD) == MPI_SUCCESS);
}
void wait_for_other_ranks() {
    int nothing = 0;
    for (int other = 1; other < ranks; ++other)
        EXPECT(MPI_Recv(&nothing, 1, MPI_INT, other, 77, MPI_COMM_WORLD, MPI_STATUS_IGNORE) == MPI_SUCCESS);
}
void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// Calls the functions of the table directly, with sizes around the piece size.
struct Table {
    dsopt_mpi_ self{};
    Table() {
        EXPECT(MPI_Comm_dup(MPI_COMM_WORLD, &self.comm) == MPI_SUCCESS);
        self.rank = rank;
        self.ranks = ranks;
        self.timeout_ms = 60000;
        self.process = getpid();
        self.send = static_cast<char *>(std::malloc(DSOPT_MPI_PIECE + 64));
        self.recv = static_cast<char *>(std::malloc(DSOPT_MPI_PIECE + 64));
    }
    ~Table() {
        EXPECT(MPI_Comm_free(&self.comm) == MPI_SUCCESS);
        std::free(self.send);
        std::free(self.recv);
    }
    Table(const Table &) = delete;
    Table &operator=(const Table &) = delete;
};

template <class T> void check_reduce(Table &table, int32_t dtype, size_t count) {
    for (const int32_t op : {DSOPT_OP_SUM, DSOPT_OP_MAX}) {
        std::vector<T> data(count), wanted(count);
        for (size_t i = 0; i < count; ++i) {
            const auto of = [&](int other) { return T((other + 1) * int(i % 91) - 50); };
            data[i] = of(rank);
            wanted[i] = of(0);
            for (int other = 1; other < ranks; ++other)
                wanted[i] = op == DSOPT_OP_SUM ? T(wanted[i] + of(other)) : std::max(wanted[i], of(other));
        }
        std::vector<T> separate(count);
        EXPECT(dsopt_mpi_all_reduce_(&table.self, data.data(), separate.data(), int64_t(count), dtype, op, nullptr) ==
               0);
        EXPECT(separate == wanted);
        EXPECT(dsopt_mpi_all_reduce_(&table.self, data.data(), data.data(), int64_t(count), dtype, op, nullptr) == 0);
        EXPECT(data == wanted);
    }
}

/// Each rank gets the sum of its row, also in place of that row.
void check_reduce_scatter(Table &table, size_t count) {
    const auto of = [&](int from, int row, size_t i) { return float((from + 1) * int(i % 91) + row * 7 - 50); };
    std::vector<float> rows(count * size_t(ranks)), wanted(count), sums(count);
    for (size_t i = 0; i < count; ++i)
        for (int other = 0; other < ranks; ++other) {
            rows[size_t(other) * count + i] = of(rank, other, i);
            wanted[i] += of(other, rank, i);
        }
    const std::vector<float> sent = rows;
    float *const own = rows.data() + size_t(rank) * count;
    const auto reduce = [&](float *to) {
        return dsopt_mpi_reduce_scatter_(&table.self, rows.data(), to, int64_t(count), DSOPT_DTYPE_F32, DSOPT_OP_SUM,
                                         nullptr);
    };
    EXPECT(reduce(sums.data()) == 0);
    EXPECT(sums == wanted);
    EXPECT(rows == sent);
    EXPECT(reduce(own) == 0);
    EXPECT(std::vector<float>(own, own + count) == wanted);
}

void collectives() {
    Table table;
    for (const size_t count : {size_t(0), size_t(1), size_t(511), size_t(512), size_t(513), size_t(5000)})
        check_reduce_scatter(table, count);
    for (const size_t count : {size_t(0), size_t(1), size_t(511), size_t(512), size_t(513), size_t(5000)}) {
        check_reduce<float>(table, DSOPT_DTYPE_F32, count);
        check_reduce<double>(table, DSOPT_DTYPE_F64, count);
        check_reduce<int32_t>(table, DSOPT_DTYPE_I32, count);
    }
    const auto value = [](int from, int to, size_t i) { return char(from * 37 + to * 11 + int(i % 113)); };
    for (const size_t bytes :
         {size_t(0), size_t(1), size_t(1023), size_t(1024), size_t(1025), size_t(4096), size_t(20001)}) {
        const size_t all = bytes * size_t(ranks);
        std::vector<char> rows(all), columns(all), wanted(all), row(bytes), gathered(all), everything(all);
        for (int other = 0; other < ranks; ++other)
            for (size_t i = 0; i < bytes; ++i) {
                rows[size_t(other) * bytes + i] = value(rank, other, i);
                wanted[size_t(other) * bytes + i] = value(other, rank, i);
                everything[size_t(other) * bytes + i] = value(other, 0, i);
            }
        for (size_t i = 0; i < bytes; ++i) row[i] = value(rank, 0, i);
        EXPECT(dsopt_mpi_all_to_all_(&table.self, rows.data(), columns.data(), int64_t(bytes), nullptr) == 0);
        EXPECT(columns == wanted);
        EXPECT(dsopt_mpi_all_gather_(&table.self, row.data(), gathered.data(), int64_t(bytes), nullptr) == 0);
        EXPECT(gathered == everything);
    }
}

/// Reduces floats of very different magnitude, so that another order of additions on some rank would be noticed.
void same_bits() {
    Table table;
    std::vector<float> data(3000);
    for (size_t i = 0; i < data.size(); ++i)
        data[i] = std::ldexp(std::sin(float(i + 1) * float(rank + 3)), int(i * 7 + size_t(rank) * 5) % 40 - 20);
    EXPECT(dsopt_mpi_all_reduce_(&table.self, data.data(), data.data(), 3000, DSOPT_DTYPE_F32, DSOPT_OP_SUM, nullptr) ==
           0);
    std::vector<float> first = data;
    EXPECT(MPI_Bcast(first.data(), 3000, MPI_FLOAT, 0, MPI_COMM_WORLD) == MPI_SUCCESS);
    EXPECT(std::memcmp(first.data(), data.data(), data.size() * sizeof(float)) == 0);
}

void step() {
    dsopt_comm *const comm = world();
    dsopt_optimizer *opt = nullptr;
    DSOPT_NEW(dsopt_optimizer_desc, how);
    how.model = comm;
    how.max_norm = 1;
    EXPECT(dsopt_optimizer_create(context(), &how, &opt) == DSOPT_OK);
    dsopt_comm_destroy(comm); // the optimizer keeps a reference
    dsopt_group group;
    EXPECT(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW) == DSOPT_OK);
    std::vector<float> weight(100, 0.5f), grad(100, float(rank + 1));
    dsopt_param param = {};
    param.tensor = {weight.data(), 100, DSOPT_DTYPE_F32, 0};
    param.flags = DSOPT_PARAM_MODEL_PARALLEL;
    EXPECT(dsopt_optimizer_add_group(opt, &group, &param, 1) == DSOPT_OK);
    const dsopt_tensor gradient = {grad.data(), 100, DSOPT_DTYPE_F32, 0};
    DSOPT_NEW(dsopt_step, step);
    step.grads = &gradient;
    step.count = 1;
    double squares = 0;
    for (int other = 1; other <= ranks; ++other) squares += 100.0 * other * other;
    for (int i = 0; i < 3; ++i) EXPECT(dsopt_optimizer_step(opt, &step) == DSOPT_OK);
    DSOPT_NEW(dsopt_report, report);
    EXPECT(dsopt_optimizer_report(opt, &report) == DSOPT_OK);
    EXPECT(std::fabs(report.grad_norm - std::sqrt(squares)) < 1e-9);
    dsopt_optimizer_destroy(opt);
}

/// The 1-bit family over processes must give the same bits as over threads, in every call.
void onebit() {
    for (const onebit_run::Setting &setting : onebit_run::settings()) {
        dsopt_comm *const comm = world();
        const auto wanted = onebit_run::run_threads(setting, ranks)[size_t(rank)];
        const std::vector<std::string> all = onebit_run::RankTrainer(context(), comm, rank, setting).run();
        for (size_t call = 0; call < all.size(); ++call)
            if (all[call] != wanted[call]) {
                std::printf("%s, call %d:\n", onebit_run::name_of(setting).c_str(), int(call + 1));
                EXPECT(all[call] == wanted[call]);
                break;
            }
        DSOPT_NEW(dsopt_comm_info, info);
        EXPECT(dsopt_comm_query(comm, &info) == DSOPT_OK);
        EXPECT(info.calls_of[DSOPT_COLLECTIVE_ALL_TO_ALL] >= 4);
        EXPECT(info.calls_of[DSOPT_COLLECTIVE_ALL_TO_ALL] == info.calls_of[DSOPT_COLLECTIVE_ALL_GATHER]);
        EXPECT(all.back() != all[all.size() - 2]); // the last call changed something
        dsopt_comm_destroy(comm);
    }
}

/// Sharded state, and means of gradients: the bits of one rank, and equal weights if MPI adds.
void shard() {
    dsopt_comm *comm = world();
    try {
        shard_run::expect_bits_of_one_rank(context(), comm, rank, ranks, test::host_memory());
        dsopt_comm_destroy(comm);
        comm = nullptr;
        EXPECT(dsopt_mpi_comm_sums(context(), MPI_COMM_WORLD, 60000, &comm) == DSOPT_OK);
        const std::string weights =
            shard_run::train_with_provider_sums(context(), comm, ranks, rank, test::host_memory());
        std::string first = weights;
        EXPECT(MPI_Bcast(first.data(), int(first.size()), MPI_BYTE, 0, MPI_COMM_WORLD) == MPI_SUCCESS);
        EXPECT(weights == first);
    } catch (const std::exception &error) {
        std::printf("rank %d, line 0: not as expected: %s\n", rank, error.what());
        std::fflush(stdout);
        MPI_Abort(MPI_COMM_WORLD, 1); // the other ranks wait for this one
    }
    dsopt_comm_destroy(comm);
}

/// Rank 0 hangs before its second sharded step.
void rank_that_hangs_in_a_sharded_step() {
    dsopt_comm *const comm = world(2000);
    shard_run::Setting setting;
    setting.flags |= DSOPT_OPTIMIZER_AVERAGES;
    {
        shard_run::RankTrainer trainer(context(), comm, setting, test::host_memory());
        EXPECT(trainer.step(1, shard_run::gradients_of(rank)) == DSOPT_OK);
        const shard_run::RankTrainer::Saved before = trainer.save();
        if (rank == 0) wait_for_other_ranks();
        const auto begin = std::chrono::steady_clock::now();
        EXPECT(trainer.step(2, shard_run::gradients_of(rank)) == DSOPT_ERR_TIMEOUT);
        if (rank != 0) notify_rank_0();
        EXPECT(std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(20000));
        EXPECT(trainer.save() == before);
        EXPECT(status_of(comm) == DSOPT_ERR_TIMEOUT);
        EXPECT(trainer.step(3, shard_run::gradients_of(rank)) == DSOPT_ERR_TIMEOUT);
    }
    dsopt_comm_destroy(comm);
}

void info() {
    dsopt_comm *const comm = world();
    DSOPT_NEW(dsopt_comm_info, info);
    EXPECT(call_together(comm) == DSOPT_OK);
    EXPECT(dsopt_comm_query(comm, &info) == DSOPT_OK);
    EXPECT(info.rank == rank && info.ranks == ranks && info.calls > 0 && info.status == DSOPT_OK);
    // A communicator of some of the ranks, which the program frees.
    MPI_Comm half;
    EXPECT(MPI_Comm_split(MPI_COMM_WORLD, rank % 2, 0, &half) == MPI_SUCCESS);
    dsopt_comm *half_comm = nullptr;
    EXPECT(dsopt_mpi_comm(context(), half, &half_comm) == DSOPT_OK);
    EXPECT(MPI_Comm_free(&half) == MPI_SUCCESS);
    EXPECT(call_together(half_comm) == DSOPT_OK);
    EXPECT(dsopt_comm_query(half_comm, &info) == DSOPT_OK && info.ranks == (ranks + (rank % 2 == 0)) / 2);
    dsopt_comm_destroy(half_comm);
    dsopt_comm_destroy(comm);
}

void different_calls() {
    dsopt_comm *const comm = world();
    EXPECT(call_together(comm, nullptr, rank == 0 ? DSOPT_NORM_MAX : DSOPT_NORM_L2) == DSOPT_ERR_COMM);
    EXPECT(std::strstr(dsopt_last_error(), "different collectives") != nullptr);
    EXPECT(call_together(comm) == DSOPT_ERR_COMM);
    dsopt_comm_destroy(comm);
}

void rank_that_hangs() {
    dsopt_comm *const comm = world(1500);
    if (rank == 0) wait_for_other_ranks();
    const auto begin = std::chrono::steady_clock::now();
    EXPECT(call_together(comm) == DSOPT_ERR_TIMEOUT);
    if (rank != 0) notify_rank_0();
    if (rank != 0) EXPECT(std::strstr(dsopt_last_error(), "1500 ms") != nullptr);
    EXPECT(std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(20000));
    EXPECT(status_of(comm) == DSOPT_ERR_TIMEOUT);
    dsopt_comm_destroy(comm);
}

/// Rank 0 hangs in the middle of a compressed step, between its collectives.
void rank_that_hangs_in_a_compressed_step() {
    dsopt_comm *const comm = world(2000);
    DSOPT_NEW(dsopt_context_desc, where);
    where.threads = 2; // so that the step uses a thread pool
    dsopt_context *two = nullptr;
    EXPECT(dsopt_context_create(&where, &two) == DSOPT_OK);
    onebit_run::Setting setting;
    setting.sizes = {700000};
    setting.averages = false;
    setting.freeze_step = 1;
    static int64_t current_call;
    static int times;
    setting.change = [](int64_t call, dsopt_step &step) {
        current_call = call;
        times = 0;
        step.parallel_for = [](void *, int64_t n, void (*body)(void *, int64_t), void *arg) {
            if (rank == 0 && current_call == 3 && ++times == 2)
                wait_for_other_ranks(); // 1st call: packing, 2nd: reduction
            for (int64_t i = 0; i < n; ++i) body(arg, i);
        };
    };
    {
        onebit_run::RankTrainer trainer(two, comm, rank, setting);
        EXPECT(trainer.step(1) == DSOPT_OK);
        EXPECT(trainer.step(2) == DSOPT_OK);
        const std::string before = trainer.bytes(false);
        const auto begin = std::chrono::steady_clock::now();
        EXPECT(trainer.step(3) == DSOPT_ERR_TIMEOUT);
        if (rank != 0) notify_rank_0();
        EXPECT(std::strstr(dsopt_last_error(), "all-gather") != nullptr);
        if (rank != 0) EXPECT(std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(20000));
        EXPECT(trainer.bytes(false) == before);
        EXPECT(status_of(comm) == DSOPT_ERR_TIMEOUT);
        EXPECT(trainer.step(4) == DSOPT_ERR_TIMEOUT);
    }
    dsopt_comm_destroy(comm);
    dsopt_context_destroy(two);
}

void rank_that_hangs_in_creating() {
    dsopt_comm *comm = nullptr;
    if (rank == 0) wait_for_other_ranks();
    const dsopt_status status = dsopt_mpi_comm_timeout(context(), MPI_COMM_WORLD, 200, &comm);
    if (rank != 0) EXPECT(status == DSOPT_ERR_TIMEOUT && comm == nullptr);
    if (rank != 0) notify_rank_0();
    dsopt_comm_destroy(comm);
}

void abort_from_another_thread() {
    dsopt_comm *const comm = world(-1);
    std::thread other([&] {
        sleep_ms(100 + 20 * rank);
        dsopt_comm_abort(comm);
    });
    // Rank 0 never calls, so the other ranks are blocked until the abort.
    if (rank != 0) EXPECT(call_together(comm) == DSOPT_ERR_ABORTED);
    other.join();
    EXPECT(status_of(comm) == DSOPT_ERR_ABORTED);
    EXPECT(call_together(comm) == DSOPT_ERR_ABORTED);
    dsopt_comm_destroy(comm);
}

dsopt_comm *kept_comm;
void released_after_finalize() {
    kept_comm = world();
    EXPECT(call_together(kept_comm) == DSOPT_OK);
}

void released_in_a_child() {
    dsopt_comm *const comm = world();
    const pid_t child = fork();
    if (child == 0) {
        dsopt_comm_destroy(comm);
        _exit(0);
    }
    EXPECT(child > 0);
    sleep_ms(50);
    EXPECT(call_together(comm) == DSOPT_OK);
    dsopt_comm_destroy(comm);
}

void check_create_is_rejected() { // before MPI_Init and after MPI_Finalize
    dsopt_comm *comm = nullptr;
    EXPECT(dsopt_mpi_comm(context(), MPI_COMM_WORLD, &comm) == DSOPT_ERR_STATE);
    EXPECT(dsopt_mpi_comm_timeout(context(), MPI_COMM_WORLD, -2, &comm) == DSOPT_ERR_ARGUMENT);
    EXPECT(comm == nullptr);
}

} // namespace

int main(int argc, char **argv) {
    const std::map<std::string, void (*)()> scenarios = {
        {"collectives", collectives},
        {"same-bits", same_bits},
        {"step", step},
        {"onebit", onebit},
        {"shard", shard},
        {"info", info},
        {"different-calls", different_calls},
        {"rank-that-hangs", rank_that_hangs},
        {"rank-that-hangs-in-creating", rank_that_hangs_in_creating},
        {"rank-that-hangs-in-a-compressed-step", rank_that_hangs_in_a_compressed_step},
        {"rank-that-hangs-in-a-sharded-step", rank_that_hangs_in_a_sharded_step},
        {"abort-from-another-thread", abort_from_another_thread},
        {"released-after-finalize", released_after_finalize},
        {"released-in-a-child", released_in_a_child}};
    if (argc != 2 || scenarios.count(argv[1]) == 0) return 2;
    check_create_is_rejected();
    int level = 0;
    EXPECT(MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level) == MPI_SUCCESS);
    EXPECT(MPI_Comm_rank(MPI_COMM_WORLD, &rank) == MPI_SUCCESS && MPI_Comm_size(MPI_COMM_WORLD, &ranks) == MPI_SUCCESS);
    EXPECT(ranks > 1);
    scenarios.at(argv[1])();
    EXPECT(MPI_Barrier(MPI_COMM_WORLD) == MPI_SUCCESS); // also after a failure: other communicators still work
    if (std::strncmp(argv[1], "rank-that-hangs", 15) == 0 || std::strncmp(argv[1], "abort", 5) == 0) {
        // Operations that were started are still pending: MPI_Finalize may wait for them.
        std::fflush(stdout);
        if (failures != 0) MPI_Abort(MPI_COMM_WORLD, 1);
        EXPECT(MPI_Barrier(MPI_COMM_WORLD) == MPI_SUCCESS);
        std::printf("rank finished\n");
        std::fflush(stdout);
        sleep_ms(200);
        MPI_Abort(MPI_COMM_WORLD, 0);
    }
    EXPECT(MPI_Finalize() == MPI_SUCCESS);
    check_create_is_rejected();
    dsopt_comm_destroy(kept_comm);
    dsopt_context_destroy(context());
    std::printf("rank finished\n");
    return failures != 0;
}
