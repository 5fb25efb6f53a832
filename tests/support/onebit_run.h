// SPDX-License-Identifier: Apache-2.0
// Training of one rank with the 1-bit family through the C header alone, so that every kind of comm can be compared bit
// by bit with ranks that are threads. Depends on no test framework, because MPI's programs have none.
#pragma once
#include "handles.h"
#include "memory.h"
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace onebit_run {

using test::Memory;
using test::must;

struct Setting {
    int32_t algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM, compat = DSOPT_COMPAT_NONE;
    std::vector<int64_t> sizes = {700, 1, 33, 5000, 4096};
    int64_t freeze_step = 4, calls = 16;
    bool averages = true;        // the engine averages gradients in full steps
    double max_norm = 0;         // 0 in compat mode, where clipping needs a wrapper
    int32_t flags = 0;           // additional flags of the optimizer
    dsopt_comm *model = nullptr; // if set, all parameters are sharded over its ranks
    std::function<void(int64_t call, dsopt_step &step)> change = {};
};
inline std::vector<Setting> settings() {
    std::vector<Setting> list;
    for (const int32_t algorithm :
         {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB})
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
            Setting setting;
            setting.algorithm = algorithm;
            setting.compat = compat;
            setting.max_norm = compat == DSOPT_COMPAT_NONE ? 20 : 0;
            list.push_back(setting);
        }
    return list;
}
inline std::string name_of(const Setting &setting) {
    const std::string name = setting.algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM     ? "1-bit Adam"
                             : setting.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM ? "0/1 Adam"
                                                                                  : "1-bit LAMB";
    return name + (setting.compat == DSOPT_COMPAT_NONE ? "" : ", compat");
}

/// An optimizer and its memory. Sums of gradients, and of their squares, are exact, so that results do not depend on
/// the order in which a comm adds.
class RankTrainer {
public:
    RankTrainer(dsopt_context *context, dsopt_comm *comm, int rank, const Setting &setting,
                Memory memory = test::host_memory()) :
        rank_(rank),
        setting_(setting),
        memory_(std::move(memory)) {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.compat = setting.compat;
        desc.flags = setting.flags | (setting.averages ? DSOPT_OPTIMIZER_AVERAGES : 0);
        desc.max_norm = setting.max_norm;
        desc.data = comm;
        desc.model = setting.model;
        must(dsopt_optimizer_create(context, &desc, &opt_));
        dsopt_group group;
        must(dsopt_group_init(&group, sizeof group, setting.algorithm));
        group.lr = 1e-2;
        group.weight_decay = 0.01;
        group.freeze_step = setting.freeze_step;
        if (setting.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
            group.var_interval_steps = 2;
            group.local_interval_steps = 2;
            group.max_local_interval = 4;
        }
        std::vector<dsopt_param> params;
        for (size_t t = 0; t < setting.sizes.size(); ++t) {
            const auto n = size_t(setting.sizes[t]);
            std::vector<float> values(n);
            for (size_t i = 0; i < n; ++i) values[i] = number(t, i, 0) / 100;
            weights_.push_back(memory_.allocate(n * sizeof(float)));
            grads_.push_back(memory_.allocate(n * sizeof(float)));
            memory_.write(weights_[t], values.data(), n * sizeof(float));
            dsopt_param param{};
            param.tensor = {weights_[t], setting.sizes[t], DSOPT_DTYPE_F32, 0};
            param.flags = setting.model != nullptr ? DSOPT_PARAM_MODEL_PARALLEL : 0;
            params.push_back(param);
        }
        must(dsopt_optimizer_add_group(opt_, &group, params.data(), int64_t(params.size())));
    }
    ~RankTrainer() {
        dsopt_optimizer_destroy(opt_);
        for (void *memory : weights_) memory_.release(memory);
        for (void *memory : grads_) memory_.release(memory);
    }
    RankTrainer(const RankTrainer &) = delete;
    RankTrainer &operator=(const RankTrainer &) = delete;

    dsopt_optimizer *opt() const { return opt_; }
    dsopt_status step(int64_t call) {
        std::vector<dsopt_tensor> list;
        for (size_t t = 0; t < grads_.size(); ++t) {
            const auto n = size_t(setting_.sizes[t]);
            std::vector<float> values(n);
            for (size_t i = 0; i < n; ++i) values[i] = number(t, i, 100 * call + rank_ + 1);
            memory_.write(grads_[t], values.data(), n * sizeof(float));
            list.push_back({grads_[t], setting_.sizes[t], DSOPT_DTYPE_F32, 0});
        }
        DSOPT_NEW(dsopt_step, step);
        step.grads = list.data();
        step.count = int64_t(list.size());
        step.stream = memory_.stream;
        if (setting_.change) setting_.change(call, step);
        return dsopt_optimizer_step(opt_, &step);
    }
    /// Returns weights and all state; errors are exported as residuals. `whole` false: without errors and the tensors'
    /// step counters, which an exchange changes even if it fails half-way.
    std::string bytes(bool whole = true) {
        std::string all;
        for (size_t t = 0; t < weights_.size(); ++t) {
            std::string part(size_t(setting_.sizes[t]) * sizeof(float), '\0');
            memory_.read(part.data(), weights_[t], part.size());
            all += part;
        }
        int64_t count = 0;
        must(dsopt_optimizer_state_count(opt_, &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            must(dsopt_optimizer_state(opt_, i, &info));
            const bool errors = (info.flags & DSOPT_STATE_RANK_LOCAL) && info.param < 0;
            if (!whole && (errors || std::strcmp(info.name, "step") == 0)) continue;
            std::string part(size_t(info.tensor.numel) * 4, '\0'); // all state here has 4-byte elements
            must(dsopt_optimizer_export(opt_, i, part.data(), part.size()));
            all += part;
        }
        return all;
    }
    std::string save() {
        std::string file;
        DSOPT_NEW(dsopt_io, io);
        io.flags = DSOPT_IO_PARAMS;
        io.user = &file;
        io.write = [](void *user, const void *data, size_t size) {
            static_cast<std::string *>(user)->append(static_cast<const char *>(data), size);
            return 0;
        };
        must(dsopt_optimizer_save(opt_, nullptr, &io));
        return file;
    }
    /// Loads this rank's own file.
    void load(std::string &file) {
        DSOPT_NEW(dsopt_io, io);
        io.flags = DSOPT_IO_PARAMS;
        io.read = read;
        io.user = &file;
        io.total = file.size();
        must(dsopt_optimizer_load(opt_, nullptr, &io));
    }
    /// Loads the files of all ranks that saved.
    void load(std::vector<std::string> &files) {
        std::vector<void *> users;
        std::vector<uint64_t> totals;
        for (std::string &file : files) {
            users.push_back(&file);
            totals.push_back(file.size());
        }
        DSOPT_NEW(dsopt_io, io);
        io.flags = DSOPT_IO_PARAMS;
        io.read = read;
        io.files = int32_t(files.size());
        io.users = users.data();
        io.totals = totals.data();
        must(dsopt_optimizer_load(opt_, nullptr, &io));
    }
    /// Returns the bytes after every call.
    std::vector<std::string> run() {
        std::vector<std::string> all;
        for (int64_t call = 1; call <= setting_.calls; ++call) {
            must(step(call));
            all.push_back(bytes());
        }
        return all;
    }

private:
    static int read(void *user, uint64_t offset, void *data, size_t size) {
        std::memcpy(data, static_cast<std::string *>(user)->data() + offset, size);
        return 0;
    }
    /// Returns a multiple of 1/64 in [-4, 4.2].
    static float number(size_t tensor, size_t i, int64_t of) {
        uint64_t x = (uint64_t(of) * 1000003u + tensor) * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u;
        x ^= x >> 31;
        x *= 0x94d049bb133111ebu;
        return float(int64_t((x >> 40) % 526) - 256) / 64;
    }

    int rank_;
    Setting setting_;
    Memory memory_;
    std::vector<void *> weights_, grads_;
    dsopt_optimizer *opt_ = nullptr;
};

/// Runs body(context, comm, rank) on one thread per rank, with a local comm.
inline void with_threads(int ranks, const std::function<void(dsopt_context *, dsopt_comm *, int rank)> &body) {
    test::with_ranks(ranks, [&](int rank, const test::Context &context, const test::Comm &comm) {
        body(context.get(), comm.get(), rank);
    });
}
/// Returns the results of threads: for each rank a list of the bytes after every call.
inline std::vector<std::vector<std::string>> run_threads(const Setting &setting, int ranks) {
    std::vector<std::vector<std::string>> all{size_t(ranks)};
    with_threads(ranks, [&](dsopt_context *context, dsopt_comm *comm, int rank) {
        all[size_t(rank)] = RankTrainer(context, comm, rank, setting).run();
    });
    return all;
}

} // namespace onebit_run
