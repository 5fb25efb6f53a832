// SPDX-License-Identifier: Apache-2.0
// Trainings of ranks whose comm is of any kind, with sharded state or with gradients that the step averages, through
// the C header alone. Depends on no test framework, because MPI's programs have none.
#pragma once
#include "support/handles.h"
#include "support/list_vector.h"
#include "support/memory.h"
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace shard_run {

using test::Memory;
using test::must;

struct Setting {
    uint32_t flags = DSOPT_OPTIMIZER_SHARD; // of the optimizer
    int32_t algorithm = DSOPT_ALGORITHM_ADAMW;
    double lr = 1e-2, weight_decay = 0.1, max_norm = 0.5;
    bool zero_weights = false;
    // Blocks that several tensors share, tensors of several blocks, an empty one.
    std::vector<int64_t> sizes = {700, 1, 33, 0, 5000, 4096, 12345, 64};
};

/// Returns a number that depends on all arguments, of many magnitudes: other orders of additions give other sums.
inline float number(int64_t of, size_t tensor, size_t i) {
    uint64_t x = (uint64_t(of) * 1000003u + tensor) * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u;
    x ^= x >> 31;
    x *= 0x94d049bb133111ebu;
    return std::ldexp(float(int64_t(x >> 39) - (int64_t(1) << 24)), -24 - int(x % 12));
}
inline float gradient(int rank, int64_t call, size_t tensor, size_t i) {
    return number(100 * call + rank + 1, tensor, i);
}
/// Returns the mean of the gradients of all ranks, added up in their order in fp32.
inline float mean(int ranks, int64_t call, size_t tensor, size_t i) {
    volatile float sum = gradient(0, call, tensor, i);
    for (int rank = 1; rank < ranks; ++rank) sum = sum + gradient(rank, call, tensor, i);
    return sum * (1.0f / float(ranks));
}
using Gradients = std::function<float(int64_t call, size_t tensor, size_t i)>;
inline Gradients gradients_of(int rank) {
    return [rank](int64_t call, size_t tensor, size_t i) { return gradient(rank, call, tensor, i); };
}
inline Gradients means_of(int ranks) {
    return [ranks](int64_t call, size_t tensor, size_t i) { return mean(ranks, call, tensor, i); };
}

/// An optimizer and its memory.
class RankTrainer {
public:
    struct Part {
        int64_t begin, numel;
    };

    /// `comm` NULL: one rank, which has all of the state.
    RankTrainer(dsopt_context *context, dsopt_comm *comm, const Setting &setting, Memory memory) :
        setting_(setting),
        memory_(std::move(memory)) {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.flags = comm != nullptr ? int32_t(setting.flags) : 0;
        desc.max_norm = setting.max_norm;
        desc.data = comm;
        dsopt_optimizer *made = nullptr;
        must(dsopt_optimizer_create(context, &desc, &made));
        opt_.reset(made);
        dsopt_group group;
        must(dsopt_group_init(&group, sizeof group, setting.algorithm));
        group.lr = setting.lr;
        group.weight_decay = setting.weight_decay;
        std::vector<dsopt_param> params;
        for (size_t t = 0; t < setting.sizes.size(); ++t) {
            std::vector<float> values(size_t(setting.sizes[t]));
            for (size_t i = 0; i < values.size(); ++i) values[i] = setting.zero_weights ? 0 : number(0, t, i);
            weights_.emplace_back(memory_, values.size() * sizeof(float));
            grads_.emplace_back(memory_, values.size() * sizeof(float));
            weights_[t].set(values.data());
            dsopt_param param{};
            param.tensor = {weights_[t].data(), setting.sizes[t], DSOPT_DTYPE_F32, 0};
            params.push_back(param);
        }
        must(dsopt_optimizer_add_group(opt_.get(), &group, params.data(), int64_t(params.size())));
    }
    RankTrainer(const RankTrainer &) = delete;
    RankTrainer &operator=(const RankTrainer &) = delete;

    const Setting &setting() const { return setting_; }
    dsopt_status step(int64_t call, const Gradients &gradients) {
        fill(call, gradients);
        return step();
    }
    void fill(int64_t call, const Gradients &gradients) {
        for (size_t t = 0; t < grads_.size(); ++t) {
            std::vector<float> values(size_t(setting_.sizes[t]));
            for (size_t i = 0; i < values.size(); ++i) values[i] = gradients(call, t, i);
            grads_[t].set(values.data());
        }
    }
    /// Steps with the gradients of the last fill().
    dsopt_status step() {
        std::vector<dsopt_tensor> list;
        for (size_t t = 0; t < grads_.size(); ++t)
            list.push_back({grads_[t].data(), setting_.sizes[t], DSOPT_DTYPE_F32, 0});
        DSOPT_NEW(dsopt_step, step);
        step.grads = list.data();
        step.count = int64_t(list.size());
        step.stream = memory_.stream;
        return dsopt_optimizer_step(opt_.get(), &step);
    }

    /// Returns the part of a parameter whose state this rank has.
    Part part(size_t tensor) const {
        Part part{};
        must(dsopt_optimizer_shard(opt_.get(), int64_t(tensor), -1, &part.begin, &part.numel));
        return part;
    }
    std::string weight(size_t tensor) const { return weights_[tensor].text(); }
    std::string weights() const {
        std::string all;
        for (const test::Block &weight : weights_) all += weight.text();
        return all;
    }
    /// Returns the weights of this rank's part.
    std::string own_weights() const {
        std::string all;
        for (size_t t = 0; t < weights_.size(); ++t)
            all += weight(t).substr(size_t(part(t).begin) * sizeof(float), size_t(part(t).numel) * sizeof(float));
        return all;
    }
    std::vector<dsopt_state_info> state() const {
        int64_t count = 0;
        must(dsopt_optimizer_state_count(opt_.get(), &count));
        std::vector<dsopt_state_info> list;
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            must(dsopt_optimizer_state(opt_.get(), i, &info));
            list.push_back(info);
        }
        return list;
    }
    /// Returns the bytes of each state tensor; all have elements of 4 bytes.
    std::vector<std::string> state_bytes() {
        std::vector<std::string> all;
        for (const dsopt_state_info &info : state()) {
            std::string bytes(size_t(info.tensor.numel) * 4, '\0');
            must(dsopt_optimizer_export(opt_.get(), int64_t(all.size()), bytes.data(), bytes.size()));
            all.push_back(std::move(bytes));
        }
        return all;
    }
    int64_t calls() const {
        DSOPT_NEW(dsopt_report, report);
        must(dsopt_optimizer_report(opt_.get(), &report));
        return report.calls;
    }

    struct Saved {
        std::vector<std::string> weights, state;
        bool operator==(const Saved &) const = default;
    };
    Saved save() {
        Saved saved{{}, state_bytes()};
        for (const test::Block &weight : weights_) saved.weights.push_back(weight.text());
        return saved;
    }
    void load(const Saved &saved) {
        for (size_t t = 0; t < weights_.size(); ++t) weights_[t].set(saved.weights[t]);
        for (size_t i = 0; i < saved.state.size(); ++i)
            must(dsopt_optimizer_import(opt_.get(), int64_t(i), saved.state[i].data(), saved.state[i].size()));
    }

private:
    Setting setting_;
    Memory memory_;
    std::vector<test::Block> weights_, grads_;
    test::Optimizer opt_; // destroyed first
};

inline void expect(bool holds, const std::string &what) {
    if (!holds) throw std::runtime_error("not " + what);
}

/// Compares all weights and this rank's part of the state with an optimizer that has all of the state.
inline void expect_same(RankTrainer &sharded, RankTrainer &whole, const std::string &where) {
    const auto name = [&](const char *what, int64_t tensor) {
        return where + ": the same " + what + " of tensor " + std::to_string(tensor);
    };
    for (size_t t = 0; t < whole.setting().sizes.size(); ++t)
        expect(sharded.weight(t) == whole.weight(t), name("weights", int64_t(t)));
    const std::vector<dsopt_state_info> infos = sharded.state(), whole_infos = whole.state();
    const std::vector<std::string> parts = sharded.state_bytes(), all = whole.state_bytes();
    expect(infos.size() == whole_infos.size(), where + ": the same number of state tensors");
    for (size_t i = 0; i < all.size(); ++i) {
        expect(std::strcmp(infos[i].name, whole_infos[i].name) == 0, where + ": the same order of state tensors");
        RankTrainer::Part part{0, whole_infos[i].tensor.numel};
        if ((infos[i].flags & DSOPT_STATE_SHARDED) != 0) part = sharded.part(size_t(infos[i].param));
        expect(parts[i] == all[i].substr(size_t(part.begin) * 4, size_t(part.numel) * 4),
               name(infos[i].name, infos[i].param));
    }
}

/// Trains with sharded state, with means of the caller and with means of the step, and with means of the step alone.
/// Compares each step with one rank that gets the mean.
inline void expect_bits_of_one_rank(dsopt_context *context, dsopt_comm *comm, int rank, int ranks,
                                    const Memory &memory) {
    for (const uint32_t flags :
         {uint32_t(DSOPT_OPTIMIZER_SHARD), uint32_t(DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_AVERAGES),
          uint32_t(DSOPT_OPTIMIZER_AVERAGES), uint32_t(DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_CHECK_RANKS)}) {
        Setting setting;
        setting.flags = flags;
        RankTrainer trainer(context, comm, setting, memory), whole(context, nullptr, setting, memory);
        const bool averages = (flags & DSOPT_OPTIMIZER_AVERAGES) != 0;
        for (int64_t call = 1; call <= 4; ++call) {
            must(trainer.step(call, averages ? gradients_of(rank) : means_of(ranks)), "the step of a rank");
            must(whole.step(call, means_of(ranks)), "the step of one rank");
            expect_same(trainer, whole,
                        "flags " + std::to_string(flags) + ", rank " + std::to_string(rank) + ", call " +
                            std::to_string(call));
        }
    }
}

inline dsopt_comm_info info_of(dsopt_comm *comm) {
    DSOPT_NEW(dsopt_comm_info, info);
    must(dsopt_comm_query(comm, &info));
    return info;
}

/// Returns the bytes of one rank's row of F32 gradients: the longest row of any rank, in which each tensor's piece
/// begins at a multiple of 64 bytes. For lists that fit into one stripe.
inline int64_t row_bytes(const std::vector<int64_t> &sizes, int ranks) {
    const test::ListVector vector(sizes);
    const int64_t chunk = vector.chunk(ranks);
    int64_t longest = 0;
    for (int64_t row = 0; row < ranks; ++row) {
        int64_t bytes = 0;
        for (size_t t = 0; t < sizes.size(); ++t) {
            const int64_t begin = std::max(vector.begin[t], row * chunk),
                          end = std::min(vector.begin[t] + sizes[t], (row + 1) * chunk);
            if (begin < end) bytes += ((end - begin) * int64_t(sizeof(float)) + 63) / 64 * 64;
        }
        longest = std::max(longest, bytes);
    }
    return longest;
}

/// Trains over a comm with DSOPT_COMM_FLAG_PROVIDER_SUMS. Checks the means and the comm's counters. Returns the weights,
/// which all ranks must have.
inline std::string train_with_provider_sums(dsopt_context *context, dsopt_comm *comm, int ranks, int rank,
                                            const Memory &memory) {
    std::string weights;
    for (const uint32_t flags : {uint32_t(DSOPT_OPTIMIZER_SHARD), uint32_t(0)}) {
        const std::string where = "flags " + std::to_string(flags) + ", rank " + std::to_string(rank);
        // Steps of SGD from zeros: the weights are the negative means.
        Setting setting;
        setting.flags = flags | DSOPT_OPTIMIZER_AVERAGES;
        setting.algorithm = DSOPT_ALGORITHM_SGD;
        setting.lr = 1;
        setting.weight_decay = setting.max_norm = 0;
        setting.zero_weights = true;
        {
            RankTrainer trainer(context, comm, setting, memory);
            const dsopt_comm_info before = info_of(comm);
            must(trainer.step(1, gradients_of(rank)), "the step of a rank");
            const dsopt_comm_info after = info_of(comm);
            for (size_t t = 0; t < setting.sizes.size(); ++t) {
                const std::string text = trainer.weight(t);
                for (size_t i = 0; i < size_t(setting.sizes[t]); ++i) {
                    float value = 0;
                    std::memcpy(&value, &text[i * sizeof value], sizeof value);
                    double sum = 0, bound = 0;
                    for (int r = 0; r < ranks; ++r) {
                        sum += double(gradient(r, 1, t, i));
                        bound += std::fabs(double(gradient(r, 1, t, i)));
                    }
                    expect(std::fabs(double(value) + sum / ranks) <= bound * std::ldexp(1, -24),
                           where + ": the mean of element " + std::to_string(i) + " of tensor " + std::to_string(t));
                }
            }
            weights += trainer.weights();
            const auto counted = [&](const auto field, int kind) {
                return (after.*field)[kind] - (before.*field)[kind];
            };
            expect(counted(&dsopt_comm_info::calls_of, DSOPT_COLLECTIVE_REDUCE_SCATTER) == 1,
                   where + ": one reduce-scatter");
            expect(counted(&dsopt_comm_info::calls_of, DSOPT_COLLECTIVE_ALL_TO_ALL) == 0, where + ": no all-to-all");
            const int64_t others = (ranks - 1) * row_bytes(setting.sizes, ranks);
            for (const auto field : {&dsopt_comm_info::sent_of, &dsopt_comm_info::received_of})
                expect(counted(field, DSOPT_COLLECTIVE_REDUCE_SCATTER) == others,
                       where + ": " + std::to_string(others) + " bytes, but " +
                           std::to_string(counted(field, DSOPT_COLLECTIVE_REDUCE_SCATTER)));
        }
        setting = Setting{};
        setting.flags = flags | DSOPT_OPTIMIZER_AVERAGES;
        RankTrainer trainer(context, comm, setting, memory);
        for (int64_t call = 1; call <= 3; ++call) must(trainer.step(call, gradients_of(rank)), "the step of a rank");
        weights += trainer.weights();
    }
    return weights;
}

} // namespace shard_run
