// SPDX-License-Identifier: Apache-2.0
// Functions on the caller's memory: initial state, dsopt_optimizer_apply, the reduction of the next step, workspaces,
// and dims of state tensors.
#include "support/functional.h"

using namespace test;

namespace apply_functional_tests {

std::vector<OptimizerSettings> all_settings() {
    std::vector<OptimizerSettings> list;
    for (const int32_t algorithm : all_algorithms())
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED})
            for (const DtypeMix kind : {DtypeMix::f32, DtypeMix::no_master, DtypeMix::per_tensor, DtypeMix::flat})
                for (const bool scaled : {false, true})
                    for (const int ranks : {1, 2}) {
                        if (compat != DSOPT_COMPAT_NONE && !has_compat(algorithm)) continue;
                        if (is_onebit(algorithm) ? kind == DtypeMix::no_master : ranks > 1) continue;
                        OptimizerSettings settings;
                        settings.algorithm = algorithm;
                        settings.compat = compat;
                        settings.kind = kind;
                        settings.scaled = scaled;
                        settings.ranks = ranks;
                        settings.max_norm = compat == DSOPT_COMPAT_NONE || settings.wrapped() ? 20 : 0;
                        list.push_back(settings);
                    }
    return list;
}

class FunctionalApply : public testing::TestWithParam<OptimizerSettings> {
protected:
    const OptimizerSettings settings = GetParam();
};
INSTANTIATE_TEST_SUITE_P(, FunctionalApply, testing::ValuesIn(all_settings()),
                         [](const auto &info) { return info.param.name(); });

LABEL_PARAMS(long_emulated, "*Scaled*");
LABEL_PARAMS(long_emulated, "*NoMaster*");
LABEL_PARAMS(long_emulated, "*PerTensor*");
LABEL_PARAMS(long_emulated, "*Compat*F32*");
TEST_P(FunctionalApply, MatchesStepAfterInitState) {
    constexpr int64_t calls = 9;
    for (const bool passed : {false, true}) {
        if (passed && settings.scaled) continue;
        with_settings(settings, [&](int rank, const Context &ctx, const CommId *ids) {
            Stepper stepper(ctx, settings, false, passed, ids, rank),
                pure(ctx, settings, true, false, ids != nullptr ? ids + 1 : nullptr, rank);
            if (!passed) {
                stepper.allocate();
                ASSERT_TRUE(same(stepper.snapshot(), pure.snapshot())) << "before the first step";
            }
            for (int64_t call = 1; call <= calls; ++call) {
                std::vector<Array> grads = gradients_of(settings, rank, call);
                if (call == 3) grads[2] = Array::absent(settings.sizes[2]);
                const bool bad = settings.scaled && (call == 5 || call == 6) && rank == settings.ranks - 1;
                if (bad) grads[0].set(99, call == 5 ? kInf : kNaN);
                Shared<float> reports[2];
                for (Stepper *side : {&stepper, &pure}) {
                    Shared<float> &report = reports[side == &pure];
                    report.assign(DSOPT_REPORT_FLOATS, -7);
                    ASSERT_OK(side->step(grads, [&](dsopt_step &step) { step.report = report.data(); })) << call;
                }
                ASSERT_TRUE(same_bits(reports[0], reports[1])) << call << (passed ? ", passed" : "");
                EXPECT_EQ(reports[0][DSOPT_REPORT_SKIPPED], settings.scaled && (call == 5 || call == 6)) << call;
                ASSERT_TRUE(same(stepper.snapshot(), pure.snapshot())) << call << (passed ? ", passed" : "");
            }
        });
    }
}

LABEL(long_emulated);
TEST_P(FunctionalApply, ChangesNoStateOfTheOptimizer) {
    with_settings(settings, [&](int rank, const Context &ctx, const CommId *ids) {
        const std::vector<Array> own = weights_of(settings);
        const Scaler scaler = settings.scaled ? make_scaler(ctx, 64, 2) : nullptr;
        const Comm comm = settings.ranks > 1 ? local_comm(ctx, ids[0], rank, settings.ranks) : nullptr;
        const Optimizer opt = make_optimizer(ctx, settings, own, true, scaler.get(), comm.get());
        CallerMemory caller_memory(opt.get(), own);
        must(caller_memory.init());
        for (int64_t call = 1; call <= 2; ++call) must(caller_memory.apply(gradients_of(settings, rank, call)));
        for (const dsopt_state_info &info : state_of(opt.get()))
            EXPECT_EQ(info.tensor.data != nullptr,
                      std::strcmp(info.name, "loss_scale") == 0 || std::strcmp(info.name, "scaler") == 0)
                << info.name;
        for (size_t i = 0; i < own.size(); ++i) EXPECT_EQ(own[i].text(), weights_of(settings)[i].text());
        if (settings.scaled) {
            EXPECT_EQ(info_of(scaler).updates, 0);
            EXPECT_EQ(info_of(scaler).scale, 64);
        }
        DSOPT_NEW(dsopt_report, report);
        must(dsopt_optimizer_report(opt.get(), &report));
        EXPECT_EQ(report.calls, 0);

        // The engine's own state, once allocated, is neither read nor written.
        Stepper other(ctx, settings, false, false, settings.ranks > 1 ? ids + 1 : nullptr, rank);
        must(other.step(gradients_of(settings, rank, 1)));
        const Snapshot before = other.snapshot();
        CallerMemory again(other.opt(), weights_of(settings), 0x77);
        must(again.init());
        for (int64_t call = 1; call <= 2; ++call) must(again.apply(gradients_of(settings, rank, call)));
        EXPECT_TRUE(same(other.snapshot(), before));
        EXPECT_TRUE(same(again.snapshot(), caller_memory.snapshot()));
    });
}

LABEL(long_emulated);
TEST_P(FunctionalApply, InitializesIdenticalStateOnManyThreads) {
    with_settings(settings, [&](int rank, const Context &ctx, const CommId *ids) {
        const Scaler scaler = settings.scaled ? make_scaler(ctx, 64, 2) : nullptr;
        const Comm comm = settings.ranks > 1 ? local_comm(ctx, ids[0], rank, settings.ranks) : nullptr;
        const Optimizer opt = make_optimizer(ctx, settings, weights_of(settings), false, scaler.get(), comm.get());
        CallerMemory first(opt.get(), weights_of(settings)), second(opt.get(), weights_of(settings), 0xff),
            third(opt.get(), weights_of(settings), 0x01);
        must(first.init());
        dsopt_status statuses[2] = {-1, -1};
        std::thread threads[2] = {std::thread([&] { statuses[0] = second.init(); }),
                                  std::thread([&] { statuses[1] = third.init(); })};
        for (std::thread &thread : threads) thread.join();
        for (const dsopt_status status : statuses) EXPECT_EQ(status, DSOPT_OK);
        EXPECT_TRUE(same(first.snapshot(), second.snapshot()));
        EXPECT_TRUE(same(first.snapshot(), third.snapshot()));
        // Initializes the same lists again after a step.
        must(second.apply(gradients_of(settings, rank, 1)));
        EXPECT_FALSE(same(first.snapshot(), second.snapshot()));
        second.model.params = weights_of(settings);
        must(second.init());
        EXPECT_TRUE(same(first.snapshot(), second.snapshot()));
    });
}

TEST(InitState, DecaysF32ParametersInPlaceNextToMasters) {
    const Context ctx = make_context(1);
    OptimizerSettings settings;
    settings.compat = DSOPT_COMPAT_DEEPSPEED;
    settings.kind = DtypeMix::per_tensor;
    const std::vector<Array> before = weights_of(settings);
    const Optimizer opt = make_optimizer(ctx, settings, before, false);
    CallerMemory caller_memory(opt.get(), before);
    must(caller_memory.init());
    EXPECT_EQ(caller_memory.model.params[0].text(), before[0].text()); // F16: only its master decays
    EXPECT_NE(caller_memory.values<float>("master", 0), before[0].floats());
    EXPECT_NE(caller_memory.model.params[3].text(), before[3].text()); // F32
    EXPECT_FLOAT_EQ(caller_memory.model.params[3][7], before[3][7] * (1 - 2e-2f * 0.05f));
    EXPECT_EQ(caller_memory.values<int32_t>("step"), std::vector<int32_t>(5, 1));
}

TEST(InitState, NeedsNoParametersWithoutMasters) {
    const Context ctx = make_context(1);
    for (const DtypeMix kind : {DtypeMix::f32, DtypeMix::no_master}) {
        OptimizerSettings settings;
        settings.kind = kind;
        const Optimizer opt = make_optimizer(ctx, settings, weights_of(settings), false);
        CallerMemory with(opt.get(), weights_of(settings)), without(opt.get(), weights_of(settings));
        must(with.init());
        const std::vector<dsopt_tensor> state = without.state;
        ASSERT_OK(dsopt_optimizer_init_state(opt.get(), nullptr, 0, state.data(), int64_t(state.size()), nullptr));
        EXPECT_TRUE(same(with.snapshot(), without.snapshot()));
    }
}

TEST(InitState, IgnoresAddressesOfEmptyTensors) {
    const Context ctx = make_context(1);
    for (const int32_t algorithm : kBothModes)
        for (const DtypeMix kind : {DtypeMix::per_tensor, DtypeMix::flat}) {
            OptimizerSettings settings;
            settings.algorithm = algorithm;
            settings.compat = DSOPT_COMPAT_DEEPSPEED;
            settings.kind = kind;
            settings.sizes = {3, 0, 5, 0};
            const Optimizer opt = make_optimizer(ctx, settings, weights_of(settings), false);
            CallerMemory with(opt.get(), weights_of(settings)), without(opt.get(), weights_of(settings));
            must(with.init());
            std::vector<dsopt_tensor> state = without.state, params = list_of(without.model.params),
                                      grads = list_of(gradients_of(settings, 0, 1));
            const auto remove_addresses = [](std::vector<dsopt_tensor> &list) {
                for (dsopt_tensor &tensor : list)
                    if (tensor.numel == 0) tensor.data = nullptr;
            };
            remove_addresses(state);
            remove_addresses(params);
            must(dsopt_optimizer_init_state(opt.get(), params.data(), int64_t(params.size()), state.data(),
                                            int64_t(state.size()), nullptr));
            EXPECT_TRUE(same(with.snapshot(), without.snapshot())) << settings.name();
            const std::vector<Array> gradients = gradients_of(settings, 0, 1);
            must(with.apply(gradients));
            must(without.apply(gradients, [&](dsopt_step &step) {
                step.params = params.data();
                step.state = state.data();
            }));
            EXPECT_TRUE(same(with.snapshot(), without.snapshot())) << settings.name();
        }
}

TEST(InitState, RefusesInvalidListsAndChangesNothing) {
    const Context ctx = make_context(1);
    OptimizerSettings settings;
    settings.kind = DtypeMix::per_tensor;
    for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
        settings.compat = compat;
        const Optimizer opt = make_optimizer(ctx, settings, weights_of(settings), false);
        CallerMemory caller_memory(opt.get(), weights_of(settings));
        const Snapshot before = caller_memory.snapshot();
        const std::vector<dsopt_tensor> params = list_of(caller_memory.model.params), state = caller_memory.state;
        const auto count = int64_t(state.size());
        const auto call = [&](const dsopt_tensor *p, const dsopt_tensor *s, int64_t n) {
            return dsopt_optimizer_init_state(opt.get(), p, p != nullptr ? int64_t(params.size()) : 0, s, n, nullptr);
        };
        EXPECT_TRUE(refused(call(params.data(), nullptr, count), DSOPT_ERR_ARGUMENT, "state"));
        EXPECT_TRUE(refused(call(params.data(), state.data(), count - 1), DSOPT_ERR_SHAPE, "entries"));
        EXPECT_TRUE(refused(call(nullptr, state.data(), count), DSOPT_ERR_ARGUMENT, "p0"));
        std::vector<dsopt_tensor> other = state;
        other.back().data = nullptr;
        EXPECT_TRUE(refused(call(params.data(), other.data(), count), DSOPT_ERR_ARGUMENT, "step"));
        other = state;
        other[0].dtype = DSOPT_DTYPE_BF16;
        EXPECT_TRUE(refused(call(params.data(), other.data(), count), DSOPT_ERR_DTYPE, "master"));
        other = state;
        other[0].numel += 1;
        EXPECT_TRUE(refused(call(params.data(), other.data(), count), DSOPT_ERR_SHAPE, "master"));
        other = state;
        other[0].data = static_cast<char *>(other[0].data) + 1;
        EXPECT_TRUE(refused(call(params.data(), other.data(), count), DSOPT_ERR_ALIGNMENT, "master"));
        other = params;
        other[0].data = nullptr;
        EXPECT_TRUE(refused(call(other.data(), state.data(), count), DSOPT_ERR_ARGUMENT, "p0"));
        other = params;
        other[2].dtype = DSOPT_DTYPE_F16;
        EXPECT_TRUE(refused(call(other.data(), state.data(), count), DSOPT_ERR_DTYPE, "p2"));
        other = params;
        other[3].data = nullptr; // F32: only the step on zero gradients of compat mode reads it
        if (compat != DSOPT_COMPAT_NONE) {
            EXPECT_TRUE(refused(call(other.data(), state.data(), count), DSOPT_ERR_ARGUMENT, "p3"));
        }
        EXPECT_TRUE(same(caller_memory.snapshot(), before));
        if (compat == DSOPT_COMPAT_NONE) { EXPECT_OK(call(other.data(), state.data(), count)); }
    }
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    const Trainer empty(ctx, desc);
    EXPECT_TRUE(refused(dsopt_optimizer_init_state(empty.opt(), nullptr, 0, nullptr, 0, nullptr), DSOPT_ERR_STATE));
}

// --------------------------------------------------------------------------------------------------------- reduction
int32_t next_reduction_of(const Stepper &side) {
    const CallerMemory &caller_memory = *side.caller_memory;
    const dsopt_tensor schedule = caller_memory.blocks[caller_memory.index("schedule")].tensor();
    int32_t reduction = -1;
    must(dsopt_optimizer_next_reduction_on_device(side.opt(), &schedule, &reduction, nullptr));
    const std::vector<int32_t> words = caller_memory.values<int32_t>("schedule");
    DSOPT_NEW(dsopt_schedule_info, info);
    must(dsopt_schedule_decode(side.opt(), words.data(), &info));
    EXPECT_EQ(info.reduction, reduction);
    EXPECT_EQ(info.step, words[0]);
    EXPECT_EQ(info.frozen, words[1]);
    EXPECT_EQ(info.var_interval, words[2]);
    EXPECT_EQ(info.var_counter, words[3]);
    EXPECT_EQ(info.local_interval, words[4]);
    EXPECT_EQ(info.local_counter, words[5]);
    EXPECT_EQ(info.momentum_in_bits, words[6]);
    return reduction;
}

class NextReductionOnDevice : public testing::TestWithParam<std::tuple<int32_t, int>> {
protected:
    OptimizerSettings form_of(int32_t compat, DtypeMix kind) const {
        OptimizerSettings settings;
        settings.algorithm = std::get<0>(GetParam());
        settings.ranks = std::get<1>(GetParam());
        settings.compat = compat;
        settings.kind = kind;
        settings.freeze_step = 9;
        settings.sizes = {70, 33};
        return settings;
    }
};
INSTANTIATE_TEST_SUITE_P(, NextReductionOnDevice, testing::Combine(testing::ValuesIn(kFamily), testing::Values(1, 2)),
                         [](const auto &info) {
                             return name_of(std::get<0>(info.param)) + std::to_string(std::get<1>(info.param));
                         });

TEST_P(NextReductionOnDevice, MatchesTheReductionOfTheCall) {
    const OptimizerSettings settings = form_of(DSOPT_COMPAT_NONE, DtypeMix::f32);
    with_settings(settings, [&](int rank, const Context &ctx, const CommId *ids) {
        Stepper pure(ctx, settings, true, false, ids, rank);
        for (int64_t call = 1; call <= 40; ++call) {
            int32_t wanted = -1;
            must(dsopt_optimizer_next_reduction(pure.opt(), call, &wanted));
            ASSERT_EQ(next_reduction_of(pure), wanted) << call;
            const int32_t skip = call % 7 == 0 || call == 9;
            must(pure.step(gradients_of(settings, rank, call), [&](dsopt_step &step) { step.skip = on_device(skip); }));
            EXPECT_EQ(pure.caller_memory->values<int32_t>("schedule")[0], call);
        }
    });
}

LABEL_PARAMS(long_emulated, "*2");
TEST_P(NextReductionOnDevice, MatchesTheReductionOfStepInCompatMode) {
    for (const DtypeMix kind : {DtypeMix::f32, DtypeMix::per_tensor, DtypeMix::flat}) {
        const OptimizerSettings settings = form_of(DSOPT_COMPAT_DEEPSPEED, kind);
        with_settings(settings, [&](int rank, const Context &ctx, const CommId *ids) {
            Stepper stepper(ctx, settings, false, false, ids, rank),
                pure(ctx, settings, true, false, ids != nullptr ? ids + 1 : nullptr, rank);
            for (int64_t call = 1; call <= 40; ++call) {
                int32_t wanted = -1;
                must(dsopt_optimizer_next_reduction(stepper.opt(), 0, &wanted));
                ASSERT_EQ(next_reduction_of(pure), wanted) << call;
                const int32_t skip = call % 7 == 0 || call == 9;
                for (Stepper *side : {&stepper, &pure})
                    must(side->step(gradients_of(settings, rank, call),
                                    [&](dsopt_step &step) { step.skip = on_device(skip); }));
            }
            EXPECT_TRUE(same(stepper.snapshot(), pure.snapshot()));
        });
    }
}

TEST(NextReduction, IsFullOnDeviceWithoutASchedule) {
    const Context ctx = make_context(1);
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_LAMB}) {
        OptimizerSettings settings;
        settings.algorithm = algorithm;
        const Optimizer opt = make_optimizer(ctx, settings, weights_of(settings), false);
        const Shared<int32_t> reduction{-1}, words(8);
        ASSERT_OK(dsopt_optimizer_next_reduction_on_device(opt.get(), nullptr, reduction.data(), nullptr));
        EXPECT_EQ(*reduction, DSOPT_REDUCTION_FULL);
        const dsopt_tensor schedule{words.data(), 8, DSOPT_DTYPE_I32, 0};
        EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(opt.get(), &schedule, reduction.data(), nullptr),
                            DSOPT_ERR_ARGUMENT));
        EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(opt.get(), nullptr, nullptr, nullptr),
                            DSOPT_ERR_ARGUMENT));
        DSOPT_NEW(dsopt_schedule_info, info);
        EXPECT_TRUE(refused(dsopt_schedule_decode(opt.get(), words.data(), &info), DSOPT_ERR_UNSUPPORTED));
    }
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    const Trainer empty(ctx, desc);
    int32_t reduction = -1;
    EXPECT_TRUE(
        refused(dsopt_optimizer_next_reduction_on_device(empty.opt(), nullptr, &reduction, nullptr), DSOPT_ERR_STATE));
    EXPECT_EQ(reduction, -1);
}

TEST(NextReduction, RefusesInvalidSchedulesOnDevice) {
    const Context ctx = make_context(1);
    OptimizerSettings settings;
    settings.algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM;
    const Optimizer opt = make_optimizer(ctx, settings, weights_of(settings), false);
    const Shared<int32_t> memory(9), reduction{-1};
    int32_t *const words = memory.data();
    const auto call = [&](dsopt_tensor schedule) {
        return dsopt_optimizer_next_reduction_on_device(opt.get(), &schedule, reduction.data(), nullptr);
    };
    EXPECT_TRUE(refused(dsopt_optimizer_next_reduction_on_device(opt.get(), nullptr, reduction.data(), nullptr),
                        DSOPT_ERR_ARGUMENT));
    EXPECT_TRUE(refused(call({words, 7, DSOPT_DTYPE_I32, 0}), DSOPT_ERR_SHAPE));
    EXPECT_TRUE(refused(call({words, 8, DSOPT_DTYPE_F32, 0}), DSOPT_ERR_DTYPE));
    EXPECT_TRUE(refused(call({reinterpret_cast<char *>(words) + 2, 8, DSOPT_DTYPE_I32, 0}), DSOPT_ERR_ALIGNMENT));
    EXPECT_TRUE(refused(call({nullptr, 8, DSOPT_DTYPE_I32, 0}), DSOPT_ERR_ARGUMENT));
    const dsopt_tensor good{words, 8, DSOPT_DTYPE_I32, 0};
    auto *const misaligned = reinterpret_cast<int32_t *>(reinterpret_cast<uintptr_t>(words) + 1);
    EXPECT_TRUE(
        refused(dsopt_optimizer_next_reduction_on_device(opt.get(), &good, misaligned, nullptr), DSOPT_ERR_ALIGNMENT));
    EXPECT_EQ(*reduction, -1);
    EXPECT_OK(call(good));
    EXPECT_EQ(*reduction, DSOPT_REDUCTION_FULL);
}

// --------------------------------------------------------------------------------------------------------- workspace
/// Memory that begins `shift` bytes after a multiple of 256, with guards on both sides.
class GuardedMemory {
public:
    GuardedMemory(size_t bytes, size_t shift) :
        memory_(bytes + 1024, 0x5a),
        begin_(256 + (256 - reinterpret_cast<uintptr_t>(memory_.data()) % 256) % 256 + shift),
        bytes_(bytes) {}
    void *data() { return memory_.data() + begin_; }
    bool intact() const {
        const std::vector<unsigned char> memory = memory_;
        for (size_t i = 0; i < memory.size(); ++i)
            if ((i < begin_ || i >= begin_ + bytes_) && memory[i] != 0x5a) return false;
        return true;
    }

private:
    Shared<unsigned char> memory_;
    size_t begin_, bytes_;
};

LABEL(long_emulated);
TEST(ApplyWorkspace, IsUsedWithinItsBytesAtAnyAddress) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ONEBIT_ADAM}) {
        OptimizerSettings settings;
        settings.algorithm = algorithm;
        settings.max_norm = 0.5;
        settings.ranks = algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM ? 2 : 1;
        settings.freeze_step = 1;
        settings.sizes = {300, 33, 0, 5};
        with_settings(settings, [&](int rank, const Context &ctx, const CommId *ids) {
            Stepper pure(ctx, settings, true, false, ids, rank);
            size_t bytes = 0;
            must(dsopt_optimizer_workspace(pure.opt(), &bytes));
            must(pure.step(gradients_of(settings, rank, 1)));
            const std::vector<Array> blocks = pure.caller_memory->blocks;
            const std::vector<Array> weights = pure.caller_memory->model.params;
            must(pure.step(gradients_of(settings, rank, 2)));
            const Snapshot wanted = pure.snapshot();
            for (size_t shift = 0; shift < 256; ++shift) {
                pure.caller_memory->blocks = blocks;
                pure.caller_memory->model.params = weights;
                const size_t size = shift == 0 ? bytes - 255 : bytes;
                GuardedMemory guarded(size, shift);
                ASSERT_OK(pure.step(gradients_of(settings, rank, 2), [&](dsopt_step &step) {
                    step.workspace = guarded.data();
                    step.workspace_bytes = size;
                })) << shift;
                ASSERT_TRUE(guarded.intact()) << shift;
                ASSERT_TRUE(same(pure.snapshot(), wanted)) << shift;
            }
            for (const size_t shift : {0, 1, 128}) { // one byte too small
                GuardedMemory guarded(bytes, shift);
                const size_t size = bytes - 255 + (256 - shift) % 256 - 1;
                EXPECT_TRUE(refused(pure.step(gradients_of(settings, rank, 2),
                                              [&](dsopt_step &step) {
                                                  step.workspace = guarded.data();
                                                  step.workspace_bytes = size;
                                              }),
                                    DSOPT_ERR_WORKSPACE, std::to_string(size + 1).c_str()));
            }
        });
    }
}

LABEL(long_emulated);
TEST(CompressedWorkspace, IsUsedWithinItsBytesAtAnyAddress) {
    for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED})
        with_ranks(2, [&](int rank, const Context &, const Comm &comm) {
            const Problem problem{{300, 33, 0, 5}, 2};
            std::vector<std::string> wanted;
            for (size_t shift = 0; shift < 256; ++shift) {
                const std::vector<Array> arrays = problem.local_gradients(rank, 1);
                const std::vector<dsopt_tensor> list = list_of(arrays);
                DSOPT_NEW(dsopt_compressed, args);
                args.tensors = list.data();
                args.count = int64_t(list.size());
                args.compat = compat;
                int64_t worker = 0, server = 0;
                size_t bytes = 0;
                must(dsopt_compressed_sizes(comm.get(), &args, &worker, &server, &bytes));
                Shared<float> worker_error(size_t(worker), 0), server_error(size_t(server), 0);
                args.worker_error = worker_error.data();
                args.server_error = server_error.data();
                const size_t needed = bytes - 255 + (256 - shift) % 256;
                GuardedMemory guarded(shift == 0 ? needed : bytes, shift);
                args.workspace = guarded.data();
                args.workspace_bytes = needed - 1;
                ASSERT_TRUE(refused(dsopt_compressed_allreduce(comm.get(), &args), DSOPT_ERR_WORKSPACE));
                args.workspace_bytes = needed;
                ASSERT_OK(dsopt_compressed_allreduce(comm.get(), &args)) << shift;
                ASSERT_TRUE(guarded.intact()) << shift;
                std::vector<std::string> got;
                for (const Array &array : arrays) got.push_back(array.text());
                for (const Shared<float> *errors : {&worker_error, &server_error})
                    got.emplace_back(reinterpret_cast<const char *>(errors->data()), errors->size() * 4);
                if (shift == 0) wanted = got;
                ASSERT_TRUE(got == wanted) << shift;
            }
        });
}

// -------------------------------------------------------------------------------------------------------------- dims
TEST(StateInfo, HasTheDimsOfTheParameterOrOneDimension) {
    const Context ctx = make_context(1);
    const int64_t matrix[] = {2, 3, 5}, nothing[] = {4, 0}, one[] = {1, 1};
    for (const int32_t algorithm : all_algorithms()) {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        const Scaler scaler = make_scaler(ctx, 64, 2);
        desc.scaler = scaler.get();
        Trainer trainer(ctx, desc);
        const std::vector<Array> arrays = {Array(DSOPT_DTYPE_BF16, 30, 1), Array(DSOPT_DTYPE_F32, 7, 1),
                                           Array(DSOPT_DTYPE_F32, 1, 1), Array(DSOPT_DTYPE_F16, 1, 1),
                                           Array(DSOPT_DTYPE_F32, 0, 1)};
        std::vector<dsopt_param> params(arrays.size());
        for (size_t i = 0; i < arrays.size(); ++i) params[i].tensor = arrays[i].tensor();
        params[0].dims = matrix, params[0].ndim = 3;
        params[3].dims = one, params[3].ndim = 2;
        params[4].dims = nothing, params[4].ndim = 2;
        const std::vector<int64_t> wanted[] = {{2, 3, 5}, {7}, {1}, {1, 1}, {4, 0}};
        const dsopt_group group = group_of(algorithm);
        must(dsopt_optimizer_add_group(trainer.opt(), &group, params.data(), int64_t(params.size())));
        const auto expect_dims = [&](const std::vector<dsopt_state_info> &list) {
            for (const dsopt_state_info &info : list) {
                const std::vector<int64_t> dims(info.dims, info.dims + info.ndim);
                int64_t product = 1;
                for (const int64_t dim : dims) product *= dim;
                EXPECT_EQ(product, info.tensor.numel) << info.name;
                EXPECT_EQ(dims, info.param < 0 ? std::vector<int64_t>{info.tensor.numel} : wanted[info.param])
                    << info.name;
            }
        };
        const std::vector<dsopt_state_info> before = trainer.state();
        expect_dims(before);
        must(trainer.step(arrays));
        expect_dims(before); // valid until parameters are added
        expect_dims(trainer.state());
        CallerMemory caller_memory(trainer.opt(), arrays);
        must(caller_memory.init());
        std::vector<dsopt_tensor> state = caller_memory.state;
        must(dsopt_optimizer_bind(trainer.opt(), DSOPT_BIND_STATE, state.data(), int64_t(state.size())));
        expect_dims(before);
        must(trainer.step(arrays));
        expect_dims(before);
        expect_dims(trainer.state());
    }
}

} // namespace apply_functional_tests
