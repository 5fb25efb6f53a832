// SPDX-License-Identifier: Apache-2.0
// Out of memory: for every n, the n-th allocation of a training run fails, either alone or with all later ones. Each
// call succeeds, or returns DSOPT_ERR_NOMEM and changes nothing. With retries the run has the same bits as without a
// failure.
#include "support/harness.h"

#include "support/alloc.h"
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <unistd.h>

using namespace test;
namespace fs = std::filesystem;

LABEL_FILE(one_thread);

namespace memory_oom_tests {

/// Checkpoint in memory. Its callbacks do not allocate, because they run while allocations fail.
struct MemoryFile {
    static int write(void *user, const void *data, size_t bytes) {
        auto *self = static_cast<MemoryFile *>(user);
        if (self->size + bytes > sizeof self->data) return 1;
        std::memcpy(self->data + self->size, data, bytes);
        self->size += bytes;
        return 0;
    }
    static int read(void *user, uint64_t offset, void *data, size_t bytes) {
        const auto *self = static_cast<const MemoryFile *>(user);
        if (offset > self->size || bytes > self->size - offset) return 2;
        std::memcpy(data, self->data + offset, bytes);
        return 0;
    }
    dsopt_io io() {
        DSOPT_NEW(dsopt_io, io);
        io.user = this;
        io.write = write;
        io.read = read;
        io.total = size;
        return io;
    }
    size_t size = 0;
    char data[256 * 1024];
};

/// A comm of two ranks, of which the other one sends the same data. It has no second thread and does not allocate.
/// `self` is its number of ranks: with one rank there is no other.
namespace mirror_comm {
int ranks_of(const void *self) { return *static_cast<const int *>(self); }
template <class T> void add(int ranks, const void *send, void *recv, int64_t count, int32_t op) {
    for (int64_t i = 0; i < count; ++i)
        static_cast<T *>(recv)[i] = static_cast<const T *>(send)[i] * T(op == DSOPT_OP_SUM ? ranks : 1);
}
int all_reduce(void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op, void *) {
    if (dtype == DSOPT_DTYPE_F32) add<float>(ranks_of(self), send, recv, count, op);
    if (dtype == DSOPT_DTYPE_F64) add<double>(ranks_of(self), send, recv, count, op);
    if (dtype == DSOPT_DTYPE_I32) add<int32_t>(ranks_of(self), send, recv, count, op);
    return 0;
}
int all_gather(void *self, const void *send, void *recv, int64_t bytes, void *) {
    for (int rank = 0; rank < ranks_of(self); ++rank)
        std::memmove(static_cast<char *>(recv) + rank * bytes, send, size_t(bytes));
    return 0;
}
dsopt_status create(dsopt_context *context, int ranks, dsopt_comm **comm) {
    static int counts[] = {0, 1, 2};
    DSOPT_NEW(dsopt_comm_table, table);
    table.self = &counts[ranks];
    table.ranks = ranks;
    table.all_reduce = all_reduce;
    table.all_to_all = all_gather; // both received messages are the first one sent
    table.all_gather = all_gather;
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = DSOPT_COMM_KIND_TABLE;
    desc.table = &table;
    return dsopt_comm_create(context, &desc, comm);
}
} // namespace mirror_comm

/// A training run, including its context, with an injected failure.
class Training {
public:
    Training(Failure news, Failure hooks) :
        model_({{40, DSOPT_DTYPE_BF16}, {70}, {20, DSOPT_DTYPE_F16, DSOPT_DTYPE_F16}, {0}, {30, DSOPT_DTYPE_F16}, {9}}),
        lasting_(news.lasting || hooks.lasting) {
        hook_.failure = hooks;
        NewCounter::calls = 0;
        NewCounter::failure = news;
    }
    ~Training() {
        // Destroying objects needs no memory.
        NewCounter::failure = {0, true};
        hook_.failure = {0, true};
        const int64_t before = hook_.calls;
        {
            const CountScope armed;
            dsopt_context_destroy(context_);
            dsopt_optimizer_destroy(opt_);
            dsopt_comm_destroy(comm_);
        }
        NewCounter::failure = {};
        EXPECT_EQ(hook_.calls, before);
        EXPECT_EQ(hook_.live, 0);
        EXPECT_EQ(hook_.live_bytes, 0);
        EXPECT_EQ(hook_.wrong, 0);
        EXPECT_TRUE(model_.intact());
    }
    int64_t failed() const { return failed_; }
    int64_t news() const { return news_; }
    int64_t hooks() const { return hooks_; }

    /// Returns parameters, state and checkpoint.
    std::string train(MemoryFile &memory_file) {
        dsopt_context_desc desc = context_desc(2);
        hook_.attach(desc);
        desc.parallel_for = run_in_order;
        const dsopt_optimizer_desc optimizer = optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS);
        const dsopt_group first = make_group(DSOPT_ALGORITHM_ADAMW), second = make_group(DSOPT_ALGORITHM_LAMB),
                          third = make_group(DSOPT_ALGORITHM_ADAM);
        const auto list = model_.registered();
        const auto grads = list_of(model_.grads);
        std::vector<char> host(400);
        dsopt_io io = memory_file.io();
        uint64_t seed = 1;
        const auto step = [&](int64_t count) {
            model_.make_gradients(seed++);
            DSOPT_NEW(dsopt_step, step);
            step.grads = grads.data();
            step.count = count;
            call("optimizer_step", [&] { return dsopt_optimizer_step(opt_, &step); });
        };
        call("context_create", [&] { return dsopt_context_create(&desc, &context_); });
        call("optimizer_create", [&] { return dsopt_optimizer_create(context_, &optimizer, &opt_); });
        call("optimizer_add_group", [&] { return dsopt_optimizer_add_group(opt_, &first, list.data(), 2); });
        call("optimizer_add_group", [&] { return dsopt_optimizer_add_group(opt_, &second, list.data() + 2, 2); });
        for (int i = 0; i < 3; ++i) step(4);
        for (int64_t i = 0; i < state_count(opt_); ++i) {
            const dsopt_tensor tensor = state_info(opt_, i).tensor;
            const size_t bytes = size_t(tensor.numel) * size_of(tensor.dtype);
            call("optimizer_export", [&] { return dsopt_optimizer_export(opt_, i, host.data(), bytes); });
            call("optimizer_import", [&] { return dsopt_optimizer_import(opt_, i, host.data(), bytes); });
        }
        call("optimizer_set", [&] { return dsopt_optimizer_set(opt_, 0, DSOPT_KEY_LR, 0.125); });
        io.flags = DSOPT_IO_PARAMS;
        call("optimizer_save", [&] {
            memory_file.size = 0;
            return dsopt_optimizer_save(opt_, nullptr, &io);
        });
        step(4);
        io.total = memory_file.size;
        call("optimizer_load", [&] { return dsopt_optimizer_load(opt_, nullptr, &io); });
        io.flags = DSOPT_IO_PARAMS | DSOPT_IO_NO_MASTERS;
        call("optimizer_load", [&] { return dsopt_optimizer_load(opt_, nullptr, &io); });
        io.flags = DSOPT_IO_NO_STATE | DSOPT_IO_NO_HYPER;
        call("optimizer_load", [&] { return dsopt_optimizer_load(opt_, nullptr, &io); });
        call("optimizer_add_group", [&] { return dsopt_optimizer_add_group(opt_, &third, list.data() + 4, 2); });
        step(6);
        call("optimizer_bind", [&] { return dsopt_optimizer_bind(opt_, DSOPT_BIND_PARAMS, params().data(), 6); });
        call("optimizer_reset", [&] { return dsopt_optimizer_reset(opt_, DSOPT_RESET_MASTERS, nullptr); });
        step(6);
        call("optimizer_report", [&] {
            DSOPT_NEW(dsopt_report, report);
            return dsopt_optimizer_report(opt_, &report);
        });
        news_ = NewCounter::calls;
        hooks_ = hook_.calls;
        return model_.text() + state_text(opt_) + hyper_text(opt_) + std::string(memory_file.data, memory_file.size);
    }

    /// Loads a checkpoint into a new optimizer before its first step.
    std::string resume(MemoryFile &memory_file) {
        dsopt_context_desc desc = context_desc(1);
        hook_.attach(desc);
        const dsopt_group first = make_group(DSOPT_ALGORITHM_ADAMW), second = make_group(DSOPT_ALGORITHM_LAMB);
        const auto list = model_.registered();
        const dsopt_io io = memory_file.io();
        call("context_create", [&] { return dsopt_context_create(&desc, &context_); });
        call("optimizer_create", [&] { return dsopt_optimizer_create(context_, nullptr, &opt_); });
        call("optimizer_add_group", [&] { return dsopt_optimizer_add_group(opt_, &first, list.data(), 2); });
        call("optimizer_add_group", [&] { return dsopt_optimizer_add_group(opt_, &second, list.data() + 2, 2); });
        call("optimizer_load", [&] { return dsopt_optimizer_load(opt_, nullptr, &io); });
        news_ = NewCounter::calls;
        hooks_ = hook_.calls;
        return model_.text() + state_text(opt_) + hyper_text(opt_);
    }

    /// Trains in compat mode with flat masters, where allocating the state includes a step on zero gradients.
    std::string wrap(MemoryFile &) {
        dsopt_context_desc desc = context_desc(1);
        hook_.attach(desc);
        dsopt_optimizer_desc wrapper = optimizer_desc(0.5);
        wrapper.compat = DSOPT_COMPAT_DEEPSPEED;
        wrapper.masters = DSOPT_MASTERS_FLAT;
        return train_briefly(desc, wrapper, {});
    }
    /// Trains with accumulated gradients.
    std::string accumulate(MemoryFile &) {
        dsopt_context_desc desc = context_desc(1);
        hook_.attach(desc);
        return train_briefly(desc, optimizer_desc(0.5, DSOPT_OPTIMIZER_ACCUMULATE), [&] {
            const auto grads = list_of(model_.grads);
            for (int i = 0; i < 2; ++i)
                call("optimizer_accumulate",
                     [&] { return dsopt_optimizer_accumulate(opt_, grads.data(), 4, nullptr); });
        });
    }

    /// Trains with gradients that are made ready one by one, the first one of the last step with the step. With
    /// AVERAGES as a rank of two.
    template <int32_t Flags> std::string parts(MemoryFile &) {
        dsopt_context_desc desc = context_desc(2);
        hook_.attach(desc);
        desc.parallel_for = run_in_order;
        dsopt_optimizer_desc optimizer = optimizer_desc(Flags == DSOPT_OPTIMIZER_EARLY_UPDATE ? 0 : 0.5, Flags);
        const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
        const auto list = model_.registered();
        auto grads = list_of(model_.grads);
        call("context_create", [&] { return dsopt_context_create(&desc, &context_); });
        if (Flags & DSOPT_OPTIMIZER_AVERAGES) {
            call("comm_create", [&] { return mirror_comm::create(context_, 2, &comm_); });
            optimizer.data = comm_;
            optimizer.bucket = 4096;
        }
        call("optimizer_create", [&] { return dsopt_optimizer_create(context_, &optimizer, &opt_); });
        call("optimizer_add_group", [&] { return dsopt_optimizer_add_group(opt_, &group, list.data(), 4); });
        for (uint64_t t = 1; t <= 3; ++t) {
            model_.make_gradients(t);
            for (int64_t i = 3; i >= (t == 3 ? 1 : 0); --i) {
                DSOPT_NEW(dsopt_ready, ready);
                ready.first = i;
                ready.count = 1;
                ready.grads = &grads[size_t(i)];
                call("optimizer_ready", [&] { return dsopt_optimizer_ready(opt_, &ready); });
            }
            auto left = grads;
            for (size_t i = t == 3 ? 1 : 0; i < left.size(); ++i) left[i].data = nullptr;
            DSOPT_NEW(dsopt_step, step);
            step.count = 4;
            step.grads = left.data();
            step.flags = DSOPT_STEP_READY;
            call("optimizer_step", [&] { return dsopt_optimizer_step(opt_, &step); });
        }
        news_ = NewCounter::calls;
        hooks_ = hook_.calls;
        return model_.text() + state_text(opt_) + hyper_text(opt_);
    }

    /// Trains matrices beside a group of another rule, and saves and loads them.
    std::string orthogonalize(MemoryFile &memory_file) {
        dsopt_context_desc desc = context_desc(2);
        hook_.attach(desc);
        desc.parallel_for = run_in_order;
        const dsopt_group muon = group_of(DSOPT_ALGORITHM_MUON), adam_group = make_group(DSOPT_ALGORITHM_ADAMW);
        auto list = model_.registered();
        list[0].rows = 5, list[0].cols = 4; // two matrices
        list[1].rows = 7, list[1].cols = 10;
        const auto grads = list_of(model_.grads);
        call("context_create", [&] { return dsopt_context_create(&desc, &context_); });
        call("optimizer_create", [&] { return dsopt_optimizer_create(context_, nullptr, &opt_); });
        call("optimizer_add_group", [&] { return dsopt_optimizer_add_group(opt_, &muon, list.data(), 2); });
        call("optimizer_add_group", [&] { return dsopt_optimizer_add_group(opt_, &adam_group, list.data() + 2, 2); });
        dsopt_io io = memory_file.io();
        for (uint64_t t = 1; t <= 3; ++t) {
            model_.make_gradients(t);
            DSOPT_NEW(dsopt_step, step);
            step.grads = grads.data();
            step.count = 4;
            call("optimizer_step", [&] { return dsopt_optimizer_step(opt_, &step); });
            if (t != 2) continue;
            call("optimizer_save", [&] {
                memory_file.size = 0;
                return dsopt_optimizer_save(opt_, nullptr, &io);
            });
            io.total = memory_file.size;
            call("optimizer_load", [&] { return dsopt_optimizer_load(opt_, nullptr, &io); });
        }
        news_ = NewCounter::calls;
        hooks_ = hook_.calls;
        return model_.text() + state_text(opt_) + hyper_text(opt_);
    }

    /// Trains an algorithm of the 1-bit family through all stages, with a second group, and saves and loads it.
    template <int32_t Algorithm> std::string exchange(MemoryFile &memory_file) {
        dsopt_context_desc desc = context_desc(2);
        hook_.attach(desc);
        desc.parallel_for = run_in_order;
        dsopt_group group = make_group(Algorithm);
        group.freeze_step = 3;
        if (Algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM)
            group.var_interval_steps = 1, group.local_interval_steps = 2, group.max_local_interval = 2;
        return train_over_ranks(memory_file, desc, group, 0, 2);
    }
    /// Trains with sharded state. Of a rank of two, the checkpoint is not loaded: it is half of the state.
    template <int32_t Algorithm, uint32_t Flag, int Ranks> std::string shard(MemoryFile &memory_file) {
        dsopt_context_desc desc = context_desc(2);
        hook_.attach(desc);
        desc.parallel_for = run_in_order;
        dsopt_group group = make_group(Algorithm);
        if (Flag == DSOPT_OPTIMIZER_SHARD_NODE) group.freeze_step = 3;
        return train_over_ranks(memory_file, desc, group, Flag, Ranks);
    }

private:
    std::string train_over_ranks(MemoryFile &memory_file, const dsopt_context_desc &desc, const dsopt_group &group,
                                 uint32_t shard_flag, int ranks) {
        const dsopt_group adam_group = make_group(DSOPT_ALGORITHM_ADAMW);
        const auto list = model_.registered();
        const auto grads = list_of(model_.grads);
        call("context_create", [&] { return dsopt_context_create(&desc, &context_); });
        call("comm_create", [&] { return mirror_comm::create(context_, ranks, &comm_); });
        dsopt_optimizer_desc optimizer =
            optimizer_desc(0.5, DSOPT_OPTIMIZER_AVERAGES | DSOPT_OPTIMIZER_CHECK_RANKS | shard_flag);
        (shard_flag == DSOPT_OPTIMIZER_SHARD_NODE ? optimizer.node : optimizer.data) = comm_;
        call("optimizer_create", [&] { return dsopt_optimizer_create(context_, &optimizer, &opt_); });
        call("optimizer_add_group", [&] { return dsopt_optimizer_add_group(opt_, &group, list.data(), 2); });
        call("optimizer_add_group", [&] { return dsopt_optimizer_add_group(opt_, &adam_group, list.data() + 2, 2); });
        dsopt_io io = memory_file.io();
        for (uint64_t t = 1; t <= 9; ++t) {
            model_.make_gradients(t);
            DSOPT_NEW(dsopt_step, step);
            step.grads = grads.data();
            step.count = 4;
            call("optimizer_step", [&] { return dsopt_optimizer_step(opt_, &step); });
            if (t % 3 != 2) continue;
            call("optimizer_save", [&] {
                memory_file.size = 0;
                return dsopt_optimizer_save(opt_, nullptr, &io);
            });
            io.total = memory_file.size;
            if (shard_flag != 0 && ranks > 1) continue;
            call("optimizer_load", [&] { return dsopt_optimizer_load(opt_, nullptr, &io); });
        }
        news_ = NewCounter::calls;
        hooks_ = hook_.calls;
        return model_.text() + state_text(opt_) + hyper_text(opt_);
    }
    std::string train_briefly(const dsopt_context_desc &desc, const dsopt_optimizer_desc &optimizer,
                              const std::function<void()> &accumulate) {
        const dsopt_group first = make_group(DSOPT_ALGORITHM_ADAMW), second = make_group(DSOPT_ALGORITHM_ADAMW);
        const auto list = model_.registered();
        const auto grads = list_of(model_.grads);
        call("context_create", [&] { return dsopt_context_create(&desc, &context_); });
        call("optimizer_create", [&] { return dsopt_optimizer_create(context_, &optimizer, &opt_); });
        call("optimizer_add_group", [&] { return dsopt_optimizer_add_group(opt_, &first, list.data(), 2); });
        call("optimizer_add_group", [&] { return dsopt_optimizer_add_group(opt_, &second, list.data() + 2, 2); });
        for (uint64_t t = 1; t <= 3; ++t) {
            model_.make_gradients(t);
            DSOPT_NEW(dsopt_step, step);
            step.count = 4;
            if (accumulate) {
                accumulate();
                step.flags = DSOPT_STEP_ACCUMULATED;
            } else {
                step.grads = grads.data();
            }
            call("optimizer_step", [&] { return dsopt_optimizer_step(opt_, &step); });
        }
        news_ = NewCounter::calls;
        hooks_ = hook_.calls;
        return model_.text() + state_text(opt_) + hyper_text(opt_);
    }
    const std::vector<dsopt_tensor> &params() {
        if (params_.empty()) params_ = list_of(model_.params);
        return params_;
    }
    std::vector<dsopt_tensor> state_tensors() {
        std::vector<dsopt_tensor> list;
        int64_t count = 0;
        if (opt_ != nullptr && dsopt_optimizer_state_count(opt_, &count) == DSOPT_ERR_NOMEM) end_failure();
        for (int64_t i = 0; opt_ != nullptr && i < state_count(opt_); ++i) list.push_back(state_info(opt_, i).tensor);
        return list;
    }
    /// Returns parameters, hyper-parameters, and the state that had memory when `known` was read.
    std::string fingerprint(const std::vector<dsopt_tensor> &known) {
        std::string all = model_.text() + (context_ != nullptr ? "c" : "-");
        if (opt_ == nullptr) return all;
        const std::vector<dsopt_tensor> now = state_tensors();
        for (size_t i = 0; i < now.size() && i < known.size(); ++i) {
            if (known[i].data == nullptr) continue;
            all.append(reinterpret_cast<const char *>(&now[i]), sizeof now[i]);
            all.append(static_cast<const char *>(now[i].data), size_t(now[i].numel) * size_of(now[i].dtype));
        }
        return all + hyper_text(opt_) + std::to_string(now.size()) + "/" + std::to_string(report_of(opt_).calls);
    }
    void end_failure() {
        ++failed_;
        NewCounter::failure = hook_.failure = {};
    }
    void call(const char *what, const std::function<dsopt_status()> &f) {
        params();
        const std::vector<dsopt_tensor> known = state_tensors();
        const std::string before = fingerprint(known);
        const auto run = [&] {
            const CountScope armed;
            return f();
        };
        dsopt_status status = run();
        if (status == DSOPT_ERR_NOMEM) {
            EXPECT_TRUE(same(fingerprint(known), before)) << what << " failed and changed state";
            if (lasting_) {
                EXPECT_EQ(run(), DSOPT_ERR_NOMEM) << what;
                EXPECT_TRUE(same(fingerprint(known), before)) << what;
            }
            end_failure();
            status = run();
        }
        if (status != DSOPT_OK)
            throw std::runtime_error(std::string(what) + ": " + dsopt_status_name(status) + ": " + dsopt_last_error());
    }
    Model model_;
    std::vector<dsopt_tensor> params_;
    HookCounter hook_;
    dsopt_context *context_ = nullptr;
    dsopt_comm *comm_ = nullptr;
    dsopt_optimizer *opt_ = nullptr;
    bool lasting_;
    int64_t failed_ = 0, news_ = 0, hooks_ = 0;
};

using Scenario = std::string (Training::*)(MemoryFile &);

struct Plan {
    const char *name;
    Scenario scenario;
    bool hooks, lasting;
    friend void PrintTo(const Plan &plan, std::ostream *out) { *out << plan.name; }
};
class OutOfMemory : public testing::TestWithParam<Plan> {};

LABEL_PARAMS(slow, "OneBit*");
LABEL_PARAMS(slow, "ZeroOneAdam*");
TEST_P(OutOfMemory, GivesTheSameBitsAfterARetry) {
    const Scenario scenario = GetParam().scenario;
    const bool hooks = GetParam().hooks, lasting = GetParam().lasting;
    const auto memory_file = std::make_unique<MemoryFile>(), saved = std::make_unique<MemoryFile>();
    { // the checkpoint that resume() loads, with two groups
        Trainer two({{40, DSOPT_DTYPE_BF16}, {70}, {20, DSOPT_DTYPE_F16, DSOPT_DTYPE_F16}, {0}}, optimizer_desc());
        two.add(make_group(DSOPT_ALGORITHM_ADAMW), 2);
        two.add(make_group(DSOPT_ALGORITHM_LAMB), 2);
        two.train(5, 6);
        saved->size = 0;
        const dsopt_io io = saved->io();
        ASSERT_OK(dsopt_optimizer_save(two.opt(), nullptr, &io));
    }
    const auto run_with = [&](Failure failure, int64_t &news, int64_t &hook_calls, int64_t &failed) {
        *memory_file = *saved;
        Training run(hooks ? Failure{} : failure, hooks ? failure : Failure{});
        std::string result = (run.*scenario)(*memory_file);
        news = run.news();
        hook_calls = run.hooks();
        failed = run.failed();
        return result;
    };
    int64_t news = 0, hook_calls = 0, failed = 0;
    const std::string wanted = run_with({}, news, hook_calls, failed);
    ASSERT_EQ(failed, 0);
    const int64_t total = hooks ? hook_calls : news;
    ASSERT_GT(total, hooks ? 0 : 30);
    const int64_t live = NewCounter::live;
    // Sanitizers are slow: every seventh allocation, beginning with another one in some of the plans.
    const int64_t every = kSanitized ? 7 : 1,
                  first = int64_t(std::strlen(GetParam().name) + hooks + 2 * lasting) % every;
    int64_t failures = 0, runs = 0;
    for (int64_t n = first; n < total; n += every, ++runs) {
        int64_t ignored = 0;
        const std::string result = run_with({n, lasting}, ignored, ignored, failed);
        ASSERT_TRUE(same(result, wanted)) << "allocation " << n << " of " << total;
        failures += failed;
        if (HasFailure()) break;
    }
    if (!HasFailure()) { // after a failure the message of the test may be allocated
        EXPECT_EQ(NewCounter::live, live) << "leaked";
    }
    // Some allocations are optional (a buffer to sort faster), but not many.
    EXPECT_GE(failures, runs * (kSanitized ? 8 : 9) / 10);
    RecordProperty("allocations", std::to_string(total));
}

std::vector<Plan> plans() {
    std::vector<Plan> list;
    const auto add = [&](const char *name, Scenario scenario) {
        for (const bool hooks : {false, true})
            for (const bool lasting : {false, true}) list.push_back({name, scenario, hooks, lasting});
    };
    add("Train", &Training::train);
    add("Resume", &Training::resume);
    add("Wrap", &Training::wrap);
    add("Accumulate", &Training::accumulate);
    add("Parts", &Training::parts<0>);
    add("AveragedParts", &Training::parts<DSOPT_OPTIMIZER_AVERAGES>);
    add("EarlyParts", &Training::parts<DSOPT_OPTIMIZER_EARLY_UPDATE>);
    add("Muon", &Training::orthogonalize);
    add("OneBitAdam", &Training::exchange<DSOPT_ALGORITHM_ONEBIT_ADAM>);
    add("ZeroOneAdam", &Training::exchange<DSOPT_ALGORITHM_ZERO_ONE_ADAM>);
    add("OneBitLamb", &Training::exchange<DSOPT_ALGORITHM_ONEBIT_LAMB>);
    add("ShardedLamb", &Training::shard<DSOPT_ALGORITHM_LAMB, DSOPT_OPTIMIZER_SHARD, 1>);
    add("ShardedAdamW", &Training::shard<DSOPT_ALGORITHM_ADAMW, DSOPT_OPTIMIZER_SHARD, 2>);
    add("OneBitAdamInNode", &Training::shard<DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_OPTIMIZER_SHARD_NODE, 2>);
    return list;
}
std::string plan_name(const testing::TestParamInfo<Plan> &info) {
    return std::string(info.param.name) + (info.param.hooks ? "Hook" : "New") +
           (info.param.lasting ? "Lasting" : "Once");
}
INSTANTIATE_TEST_SUITE_P(Failures, OutOfMemory, testing::ValuesIn(plans()), plan_name);

// Masters are copies of the parameters in the first successful step, not in a failed one: weights may be loaded in
// between.
TEST(OutOfMemoryStep, InitializesMastersInTheSuccessfulStep) {
    const std::vector<Shape> shapes = shapes_of({300, 40}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16);
    const auto load_weights = [](const Trainer &trainer) {
        for (size_t i = 0; i < 2; ++i) trainer.model.params[i].fill(77 + i);
    };
    const Trainer plain(shapes, make_group(DSOPT_ALGORITHM_ADAMW));
    load_weights(plain);
    plain.train(1);
    const std::string wanted = plain.text();
    for (int64_t n = 0;; ++n) {
        const Trainer trainer(shapes, make_group(DSOPT_ALGORITHM_ADAMW));
        trainer.model.make_gradients(1);
        const dsopt_step step = trainer.arguments();
        NewCounter::calls = 0;
        NewCounter::failure = {n, false};
        dsopt_status status;
        {
            const CountScope armed;
            status = trainer.step(step);
        }
        NewCounter::failure = {};
        if (status == DSOPT_OK) break;
        EXPECT_EQ(status, DSOPT_ERR_NOMEM);
        load_weights(trainer);
        trainer.train(1);
        EXPECT_TRUE(same(trainer.text(), wanted)) << "allocation " << n;
    }
}

// A failed save keeps the old file and leaves no temporary file.
TEST(OutOfMemoryFile, KeepsFileAndStateIfACallFails) {
    const fs::path folder = fs::path(testing::TempDir()) / ("dsopt_oom_" + std::to_string(::getpid()));
    const std::shared_ptr<void> cleanup(nullptr, [&](void *) { fs::remove_all(folder); });
    fs::create_directories(folder);
    const std::string path = (folder / "state").string();
    const auto read_file = [&] {
        std::ifstream file(path, std::ios::binary);
        return std::string(std::istreambuf_iterator<char>(file), {});
    };
    {
        const Trainer trainer(shapes_of({20, 3}, DSOPT_DTYPE_BF16), make_group(DSOPT_ALGORITHM_LAMB));
        trainer.train(1);
        must(dsopt_optimizer_save(trainer.opt(), path.c_str(), nullptr));
        const std::string old = read_file();
        trainer.train(2);
        int64_t left_behind = 0;
        for (const bool lasting : {false, true})
            for (int64_t n = 0;; ++n) {
                NewCounter::calls = 0;
                NewCounter::failure = {n, lasting};
                dsopt_status status;
                {
                    const CountScope armed;
                    status = dsopt_optimizer_save(trainer.opt(), path.c_str(), nullptr);
                }
                NewCounter::failure = {};
                left_behind += std::distance(fs::directory_iterator(folder), fs::directory_iterator()) - 1;
                if (status == DSOPT_OK) {
                    ASSERT_NE(read_file(), old);
                    std::ofstream(path, std::ios::binary) << old;
                    if (NewCounter::calls <= n) break;
                } else {
                    ASSERT_EQ(status, DSOPT_ERR_NOMEM) << dsopt_last_error();
                    ASSERT_EQ(read_file(), old);
                }
            }
        EXPECT_EQ(left_behind, 0) << "temporary files";
        for (const bool lasting : {false, true}) {
            trainer.train(3); // makes the state differ from the file
            const std::string state = trainer.text();
            for (int64_t n = 0;; ++n) {
                NewCounter::calls = 0;
                NewCounter::failure = {n, lasting};
                dsopt_status status;
                {
                    const CountScope armed;
                    status = dsopt_optimizer_load(trainer.opt(), path.c_str(), nullptr);
                }
                NewCounter::failure = {};
                if (status == DSOPT_OK) break;
                ASSERT_EQ(status, DSOPT_ERR_NOMEM) << dsopt_last_error();
                ASSERT_TRUE(same(trainer.text(), state)) << n;
            }
        }
    }
}

TEST(BuildInfo, SucceedsWithoutMemory) {
    NewCounter::calls = 0;
    NewCounter::failure = {0, true};
    const char *text = nullptr;
    {
        const CountScope armed;
        text = dsopt_build_info();
    }
    NewCounter::failure = {};
    ASSERT_NE(text, nullptr);
    EXPECT_EQ(text[0], '{');
    EXPECT_NE(std::strstr(dsopt_build_info(), "\"version\""), nullptr);
}

} // namespace memory_oom_tests
