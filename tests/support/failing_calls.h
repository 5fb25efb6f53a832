// SPDX-License-Identifier: Apache-2.0
// A run of two ranks in which the n-th call of a comm's library fails. The run creates a comm and makes steps, an
// exchange, a save and a load. Each call returns a status and changes nothing, or only what dsopt.h documents. With a
// new comm and the last checkpoint the same call succeeds, with the same bits as in a run without failure.
#pragma once
#include "fabric.h"
#include "onebit_run.h"
#include <barrier>
#include <chrono>
#include <gtest/gtest.h>

namespace test {

class FailingCallRun {
public:
    static constexpr int kRanks = 2;
    /// Results of a run in which nothing fails.
    struct Record {
        std::vector<int64_t> calls;                         // of rank 0, up to the end of each attempt
        std::vector<std::array<std::string, kRanks>> bytes; // after each attempt
        int64_t all_calls = 0;
    };

    /// `healthy` NULL: nothing fails.
    FailingCallRun(FailingFabric &fabric, int32_t algorithm, int64_t fail_at = 0, const Record *healthy = nullptr) :
        fabric_(fabric),
        algorithm_(algorithm),
        fail_at_(fail_at),
        healthy_(healthy) {}
    /// Throws if a check fails.
    Record run() {
        fabric_.prepare_comm(kRanks);
        run_ranks(kRanks, [&](int rank) {
            try {
                run_rank(rank);
            } catch (...) {
                barrier_.arrive_and_drop();
                throw;
            }
        });
        return record_;
    }
    bool has_failed() const { return has_failed_; }

private:
    struct Member {
        Memory memory;
        Context context;
        Comm comm;
        std::unique_ptr<onebit_run::RankTrainer> trainer;
    };

    onebit_run::Setting setting() const {
        onebit_run::Setting setting;
        setting.algorithm = algorithm_;
        setting.sizes = {70, 1, 33};
        setting.max_norm = 20;
        const bool family = algorithm_ >= DSOPT_ALGORITHM_ONEBIT_ADAM;
        setting.freeze_step = family ? 1 : 0;
        setting.averages = family;
        return setting;
    }

    void run_rank(int rank) {
        if (rank == 0) fabric_.fail_at(fail_at_);
        Member member{fabric_.memory(rank), fabric_.context(rank), nullptr, nullptr};
        barrier_.arrive_and_wait();
        size_t count = 0;
        const auto attempt = [&](const char *what, const std::function<dsopt_status()> &body) {
            return this->attempt(member, rank, count++, what, body);
        };
        if (attempt("create", [&] { return make(member, rank); })) return;
        member.trainer = new_trainer(member, rank);
        int64_t call = 0;
        const auto step = [&] { return member.trainer->step(call); };
        for (const char *const what : {"first step", "step 2", "step 3"}) {
            ++call;
            if (attempt(what, step)) return;
        }
        if (attempt("all-reduce", [&] { return all_reduce(member, rank); })) return;
        if (attempt("exchange", [&] { return exchange(member, rank); })) return;
        const int64_t before = rank == 0 ? fabric_.calls() : 0;
        std::string saved = member.trainer->save();
        member.trainer->load(saved);
        if (rank == 0 && fabric_.calls() != before) throw std::runtime_error("a save or a load calls the comm");
        ++call;
        if (attempt("step 4", step)) return;
        release(member);
        if (rank == 0) record_.all_calls = fabric_.calls();
        recreate_comm(member, rank); // a failure while releasing is not reported
        must(all_reduce(member, rank), "all-reduce with a new comm");
    }

    /// Runs body() on all ranks. If the failing call is in body(), runs it a second time with a new comm and returns
    /// true, which ends the run.
    bool attempt(Member &member, int rank, size_t count, const char *what, const std::function<dsopt_status()> &body) {
        const int64_t begin_calls = healthy_ == nullptr || count == 0 ? 0 : healthy_->calls.at(count - 1);
        if (healthy_ == nullptr || fail_at_ <= begin_calls || fail_at_ > healthy_->calls.at(count)) {
            must(body(), what);
            if (healthy_ != nullptr) return false;
            barrier_.arrive_and_wait();
            if (rank == 0) {
                record_.calls.push_back(fabric_.calls());
                record_.bytes.emplace_back();
            }
            barrier_.arrive_and_wait();
            record_.bytes.back()[size_t(rank)] = member.trainer ? member.trainer->bytes() : "";
            return false;
        }
        const auto bytes = [&](bool whole) { return member.trainer ? member.trainer->bytes(whole) : ""; };
        const std::string before = bytes(true), before_without_errors = bytes(false);
        std::string saved = member.trainer ? member.trainer->save() : "";
        barrier_.arrive_and_wait();
        const auto begin = std::chrono::steady_clock::now();
        const dsopt_status status = body();
        const auto duration = std::chrono::steady_clock::now() - begin;
        failed_[size_t(rank)] = status != DSOPT_OK;
        const std::string text = std::string(what) + ", rank " + std::to_string(rank) + ": " +
                                 dsopt_status_name(status) + ": " + dsopt_last_error();
        const auto check = [&](bool holds, const char *reason) {
            if (!holds) throw std::runtime_error(text + ": " + reason);
        };
        check(duration < std::chrono::milliseconds(kTimeout / 2), "the status came after half the time-out");
        if (status != DSOPT_OK) {
            check(status == DSOPT_ERR_COMM || (status == DSOPT_ERR_STATE && !member.comm),
                  "the status is not that of a failed comm");
            // 0/1 Adam changes weights before a synchronization.
            if (algorithm_ != DSOPT_ALGORITHM_ZERO_ONE_ADAM)
                check(bytes(false) == before_without_errors, "state has changed");
            if (member.comm) check(body() == status, "the comm does not return the same status again");
        }
        barrier_.arrive_and_wait();
        if (failed_ != std::array<bool, kRanks>{}) {
            if (rank == 0) has_failed_ = true;
            release(member);
            recreate_comm(member, rank);
            if (!before.empty()) {
                member.trainer = new_trainer(member, rank);
                member.trainer->load(saved);
                check(bytes(true) == before, "the loaded state differs from the saved one");
                must(body(), "the same call with a new comm");
            }
        }
        check(bytes(true) == healthy_->bytes.at(count)[size_t(rank)], "the bits differ from a run without a failure");
        return true;
    }
    void recreate_comm(Member &member, int rank) {
        barrier_.arrive_and_wait();
        if (rank == 0) fabric_.prepare_comm(kRanks);
        barrier_.arrive_and_wait();
        must(make(member, rank), "create a new comm");
    }

    dsopt_status make(Member &member, int rank) {
        dsopt_comm *comm = nullptr;
        const dsopt_status status = fabric_.join(rank, kTimeout, member.context.get(), &comm);
        if (status != DSOPT_OK && comm != nullptr) throw std::runtime_error("a failed creation returned a comm");
        member.comm.reset(comm);
        return status;
    }
    std::unique_ptr<onebit_run::RankTrainer> new_trainer(const Member &member, int rank) const {
        return std::make_unique<onebit_run::RankTrainer>(member.context.get(), member.comm.get(), rank, setting(),
                                                         member.memory);
    }
    static void release(Member &member) {
        member.trainer.reset();
        member.comm.reset();
    }

    static Block filled(const Memory &memory, size_t floats, float value) {
        const std::vector<float> values(floats, value);
        Block block(memory, floats * sizeof(float));
        block.set(values.data());
        return block;
    }
    static dsopt_status wanted(const Block &block, dsopt_status status, float value, size_t floats) {
        const std::vector<float> values(floats, value);
        if (status == DSOPT_OK &&
            block.text() != std::string(reinterpret_cast<const char *>(values.data()), floats * sizeof(float)))
            throw std::runtime_error("the result is wrong");
        return status;
    }
    static dsopt_status all_reduce(const Member &member, int rank) {
        const Block block = filled(member.memory, 40, float(rank + 1));
        const dsopt_tensor tensor = {block.data(), 40, DSOPT_DTYPE_F32, 0};
        return wanted(block, dsopt_comm_all_reduce(member.comm.get(), &tensor, 1, DSOPT_OP_SUM, member.memory.stream),
                      3, 40);
    }
    static dsopt_status exchange(const Member &member, int rank) {
        const Block block = filled(member.memory, 64, float(rank + 1));
        const dsopt_tensor tensor = {block.data(), 64, DSOPT_DTYPE_F32, 0};
        DSOPT_NEW(dsopt_compressed, args);
        args.tensors = &tensor;
        args.count = 1;
        args.stream = member.memory.stream;
        int64_t worker = 0, server = 0;
        must(dsopt_compressed_sizes(member.comm.get(), &args, &worker, &server, &args.workspace_bytes));
        const Block workers = filled(member.memory, size_t(worker), 0),
                    servers = filled(member.memory, size_t(server), 0), workspace(member.memory, args.workspace_bytes);
        args.worker_error = reinterpret_cast<float *>(workers.data());
        args.server_error = reinterpret_cast<float *>(servers.data());
        args.workspace = workspace.data();
        // Equal numbers, so the result is exact.
        return wanted(block, dsopt_compressed_allreduce(member.comm.get(), &args), 1.5f, 64);
    }

    static constexpr int kTimeout = 60000; // never reached: the failing rank informs the others
    FailingFabric &fabric_;
    const int32_t algorithm_;
    const int64_t fail_at_;
    const Record *const healthy_;
    std::barrier<> barrier_{kRanks};
    std::array<bool, kRanks> failed_{};
    bool has_failed_ = false;
    Record record_;
};

/// Runs with a failure in each call of the library in turn. `all` false: only in calls that steps make, because the
/// other calls are the same for every algorithm.
inline void fail_each_call(FailingFabric &fabric, int32_t algorithm, bool all) {
    const FailingCallRun::Record healthy = FailingCallRun(fabric, algorithm).run();
    const int64_t first = all ? 1 : healthy.calls[0] + 1, last = all ? healthy.all_calls : healthy.calls[3];
    int failures = 0;
    for (int64_t call = first; call <= last; ++call) {
        FailingCallRun failing_run(fabric, algorithm, call, &healthy);
        EXPECT_NO_THROW(failing_run.run()) << name_of(algorithm) << ", call " << call;
        failures += failing_run.has_failed();
    }
    EXPECT_GT(failures, (last - first) / 2) << "calls whose failure makes the run fail, of " << last - first + 1;
    testing::Test::RecordProperty("calls", std::to_string(last - first + 1));
    testing::Test::RecordProperty("failures", std::to_string(failures));
}

} // namespace test
