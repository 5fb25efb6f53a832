// SPDX-License-Identifier: Apache-2.0
// Calls on long lists whose allocations are counted or fail, on the CPU and on the emulated device. A program that uses
// this header links alloc.cc.
#pragma once
#include "alloc.h"
#include "handles.h"
#include "memory.h"
#include "numbers.h"
#include <functional>
#include <gtest/gtest.h>
#include <vector>

namespace test {

/// Parameters and gradients of a few floats each.
class SmallTensors {
public:
    SmallTensors(const Memory &memory, size_t count) :
        weights_(memory, 4 * sizeof(float) * count),
        grads_(memory, 4 * sizeof(float) * count) {
        std::vector<float> weights, grads;
        for (size_t i = 0; i < count; ++i) {
            const auto numel = int64_t(1 + i % 3);
            for (int k = 0; k < 4; ++k) {
                weights.push_back(0.5f + float(i % 7));
                grads.push_back(0.25f * float(1 + i % 5));
            }
            list_.push_back({weights_.data() + 4 * sizeof(float) * i, numel, DSOPT_DTYPE_F32, 0});
            present_.push_back({grads_.data() + 4 * sizeof(float) * i, numel, DSOPT_DTYPE_F32, 0});
            params_.push_back(param_of(list_.back()));
        }
        weights_.set(weights.data());
        grads_.set(grads.data());
        some_ = present_;
    }
    const std::vector<dsopt_param> &params() const { return params_; }
    const std::vector<dsopt_tensor> &weights() const { return list_; }
    /// Returns gradients of which every third is absent, different ones in each call. Valid until the next call.
    const dsopt_tensor *gradients(int call) {
        for (size_t i = 0; i < some_.size(); ++i)
            some_[i].data = (i + size_t(call)) % 3 == 0 && some_.size() > 1 ? nullptr : present_[i].data;
        return some_.data();
    }
    std::string text() const { return weights_.text(); }
    int64_t count() const { return int64_t(params_.size()); }

private:
    Block weights_, grads_; // four floats per tensor
    std::vector<dsopt_param> params_;
    std::vector<dsopt_tensor> list_, present_, some_;
};

/// Returns the number of calls of operator new during call(), in this thread and in other armed ones.
template <class Call> int64_t count_allocations(const Call &call) {
    const int64_t before = NewCounter::calls;
    dsopt_status status;
    {
        const CountScope armed;
        status = call();
    }
    must(status);
    return NewCounter::calls - before;
}

/// Tests steps with gradients that the engine averages over two ranks, in every stage of 1-bit Adam. Different
/// gradients are absent in each call.
inline void expect_no_allocations_in_averaging_steps(int32_t backend, const Memory &memory, size_t tensors, int calls) {
    NewCounter::calls = 0;
    const CommId id = new_id();
    run_ranks(2, [&](int rank) {
        const Context context = make_context(context_desc(1, backend));
        const Comm comm = local_comm(context, id, rank, 2);
        SmallTensors lists(memory, tensors);
        const Optimizer opt = make_optimizer(context, desc_with(comm, DSOPT_COMPAT_NONE, DSOPT_OPTIMIZER_AVERAGES));
        dsopt_group group = make_group(DSOPT_ALGORITHM_ONEBIT_ADAM);
        group.freeze_step = calls / 2;
        must(dsopt_optimizer_add_group(opt.get(), &group, lists.params().data(), lists.count()));
        for (int call = 0; call < calls; ++call) {
            DSOPT_NEW(dsopt_step, step);
            step.grads = lists.gradients(call);
            step.count = lists.count();
            step.flags = call % 2 == 1 ? DSOPT_STEP_ZERO_GRADS : 0;
            NewCounter::armed = call > 0; // set per thread: the other rank may still be in its first call
            const dsopt_status status = dsopt_optimizer_step(opt.get(), &step);
            NewCounter::armed = false;
            must(status);
        }
    });
    EXPECT_EQ(NewCounter::calls, 0) << tensors << " tensors";
}

/// Tests step, accumulate, zero_grad and apply without other ranks.
inline void expect_no_allocations_in_warm_calls(int32_t backend, const Memory &memory, size_t tensors, int calls) {
    const Context context = make_context(context_desc(1, backend));
    SmallTensors lists(memory, tensors);
    const Optimizer opt = make_optimizer(context, optimizer_desc(1.0, DSOPT_OPTIMIZER_ACCUMULATE)),
                    pure = make_optimizer(context, optimizer_desc(1.0));
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
    for (const Optimizer *each : {&opt, &pure})
        must(dsopt_optimizer_add_group(each->get(), &group, lists.params().data(), lists.count()));
    int64_t entries = 0;
    size_t bytes = 0;
    must(dsopt_optimizer_state_count(pure.get(), &entries));
    must(dsopt_optimizer_workspace(pure.get(), &bytes));
    const Block workspace(memory, bytes);
    std::vector<dsopt_tensor> state;
    size_t state_bytes = 0;
    for (int64_t i = 0; i < entries; ++i) {
        DSOPT_NEW(dsopt_state_info, info);
        must(dsopt_optimizer_state(pure.get(), i, &info));
        state.push_back(info.tensor);
        state_bytes += size_t(info.tensor.numel) * 4;
    }
    const Block state_memory(memory, state_bytes);
    char *at = state_memory.data();
    for (dsopt_tensor &tensor : state) {
        tensor.data = at;
        at += size_t(tensor.numel) * 4;
    }
    const std::vector<dsopt_tensor> &weights = lists.weights();
    must(dsopt_optimizer_init_state(pure.get(), weights.data(), lists.count(), state.data(), entries, nullptr));
    for (int call = 0; call < calls; ++call) {
        const auto expect_none = [&](const char *what, const auto &body) {
            const int64_t news = count_allocations(body);
            EXPECT_EQ(call > 0 ? news : 0, 0) << what << " of " << tensors << " tensors";
        };
        const dsopt_tensor *const grads = lists.gradients(call);
        DSOPT_NEW(dsopt_step, step);
        step.count = lists.count();
        step.flags = DSOPT_STEP_ACCUMULATED;
        expect_none("accumulate", [&] { return dsopt_optimizer_accumulate(opt.get(), grads, lists.count(), nullptr); });
        expect_none("step", [&] { return dsopt_optimizer_step(opt.get(), &step); });
        step.flags = 0;
        step.grads = grads;
        expect_none("step", [&] { return dsopt_optimizer_step(opt.get(), &step); });
        std::vector<dsopt_tensor> zeroed(grads, grads + lists.count());
        expect_none("zero_grad", [&] {
            return dsopt_zero_grad(context.get(), zeroed.data(), lists.count(), DSOPT_ZERO_FILL, nullptr);
        });
        step.params = weights.data();
        step.state = state.data();
        step.state_count = entries;
        step.workspace = workspace.data();
        step.workspace_bytes = workspace.bytes();
        expect_none("apply", [&] { return dsopt_optimizer_apply(pure.get(), &step); });
    }
}

/// Makes the n-th allocation of rank 0's first step fail, for every n. The failed call has sent nothing, so a repeated
/// call is the step that rank 1 waits for.
inline void expect_first_step_repeatable(int32_t backend, const Memory &memory, int32_t algorithm, uint32_t flags) {
    const auto train = [&](int64_t failing, bool &reached) {
        std::string text[2];
        const CommId id = new_id();
        run_ranks(2, [&](int rank) {
            const Context context = make_context(context_desc(1, backend));
            const Comm comm = local_comm(context, id, rank, 2, 20000);
            SmallTensors lists(memory, 40);
            const Optimizer opt = make_optimizer(context, desc_with(comm, DSOPT_COMPAT_NONE, flags));
            dsopt_group group = make_group(algorithm);
            group.freeze_step = 1;
            must(dsopt_optimizer_add_group(opt.get(), &group, lists.params().data(), lists.count()));
            for (int call = 0; call < 3; ++call) {
                DSOPT_NEW(dsopt_step, step);
                step.grads = lists.gradients(call + rank);
                step.count = lists.count();
                dsopt_status status = DSOPT_ERR_NOMEM;
                if (rank == 0 && call == 0) {
                    NewCounter::calls = 0;
                    NewCounter::failure = {failing};
                    {
                        const CountScope armed;
                        status = dsopt_optimizer_step(opt.get(), &step);
                    }
                    reached = NewCounter::calls > failing;
                    NewCounter::failure = {};
                    if (status != DSOPT_OK) {
                        EXPECT_EQ(status, DSOPT_ERR_NOMEM) << failing << ": " << dsopt_last_error();
                    }
                }
                if (status == DSOPT_ERR_NOMEM) status = dsopt_optimizer_step(opt.get(), &step);
                EXPECT_EQ(status, DSOPT_OK) << "allocation " << failing << ", call " << call << " of rank " << rank
                                            << ": " << dsopt_last_error();
                if (status != DSOPT_OK) return;
            }
            text[rank] = lists.text();
        });
        return text[0] + text[1];
    };
    bool reached = true;
    const std::string expected = train(INT64_MAX, reached);
    for (int64_t failing = 0; failing == 0 || reached; failing += kSanitized ? 5 : 1)
        ASSERT_EQ(train(failing, reached), expected) << "allocation " << failing;
}

} // namespace test
