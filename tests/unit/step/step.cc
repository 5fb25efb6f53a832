// SPDX-License-Identifier: Apache-2.0
// Everything in a step except its arithmetic: absent gradients, outputs, flags, scalars in memory, changing pointers.
#include "support/harness.h"

using namespace test;

LABEL_FILE(one_thread);

namespace step_tests {

const std::vector<int64_t> kSizes = {5000, 1, 0, 33, 4097};

class Step : public testing::TestWithParam<int32_t> {
protected:
    dsopt_group group() const { return make_group(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Algorithms, Step, testing::ValuesIn(kStandardRules), algorithm_name);
class StepMoments : public Step {}; // for the rules with exp_avg and exp_avg_sq
INSTANTIATE_TEST_SUITE_P(Algorithms, StepMoments, testing::ValuesIn(kAlgorithms), algorithm_name);

// ---------------------------------------------------------------------------------------------------- absent gradients
TEST_P(Step, KeepsTensorMomentsAndCountOfAbsentGradients) {
    for (const int32_t dtype : kDtypes) {
        Trainer trainer(shapes_of({5000, 33}, dtype, DSOPT_DTYPE_F32), group(), optimizer_desc(), context_desc(2));
        trainer.train(1, 2);
        const std::string param = trainer.model.params[0].text();
        const auto state_of_first = [&] {
            std::map<std::string, std::vector<float>> values;
            for (const dsopt_state_info &info : trainer.state())
                if (info.param == 0) values[info.name] = exported(trainer.opt(), 0, info.name);
            return values;
        };
        const auto state = state_of_first();
        EXPECT_EQ(state.empty(), GetParam() == DSOPT_ALGORITHM_SGD && dtype == DSOPT_DTYPE_F32);
        trainer.grads[0].data = nullptr;
        trainer.train(3, 4);
        EXPECT_TRUE(same(trainer.model.params[0].text(), param));
        EXPECT_EQ(state_of_first(), state);
        EXPECT_EQ(steps(trainer.opt()), (std::vector<int32_t>{2, 4}));
        EXPECT_EQ(report_of(trainer.opt()).calls, 4);
    }
}

// Gradients are present in different calls: each tensor has the bits of one that was trained alone, so counters and
// corrections are per tensor.
TEST_P(Step, CorrectsBiasWithTheCountOfEachTensor) {
    const std::vector<Shape> shapes = shapes_of({300, 5000, 40});
    Trainer trainer(shapes, group());
    const auto present = [](size_t i, uint64_t t) { return i == 0 || t % (i + 1) == 0; };
    for (uint64_t t = 1; t <= 7; ++t) {
        for (size_t i = 0; i < 3; ++i) trainer.grads[i].data = present(i, t) ? trainer.model.grads[i].data() : nullptr;
        trainer.train(t);
    }
    EXPECT_EQ(steps(trainer.opt()), (std::vector<int32_t>{7, 3, 2}));
    for (size_t i = 0; i < 3; ++i) {
        Shape shape = shapes[i];
        shape.content = int64_t(i);
        const Trainer alone({shape}, group());
        for (uint64_t t = 1; t <= 7; ++t)
            if (present(i, t)) alone.train(t);
        EXPECT_TRUE(same(alone.model.text(), trainer.model.params[i].text())) << i;
    }
}

TEST_P(Step, ChangesOnlyTheCallCountWithoutGradients) {
    Trainer trainer(shapes_of(kSizes), group(), optimizer_desc(1.0, DSOPT_OPTIMIZER_REPORT_NORMS));
    trainer.train(1);
    const std::string before = trainer.text();
    for (dsopt_tensor &grad : trainer.grads) grad.data = nullptr;
    trainer.train(2);
    EXPECT_TRUE(same(trainer.text(), before));
    const dsopt_report report = report_of(trainer.opt());
    EXPECT_EQ(report.calls, 2);
    EXPECT_EQ(report.skipped, 0);
    EXPECT_EQ(report.grad_norm, 0);
}

TEST_P(Step, DoesNotWriteGradients) {
    const Trainer trainer(shapes_of(kSizes, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F16), group(), optimizer_desc(0.1));
    trainer.model.make_gradients(3);
    std::string before, after;
    for (const Array &grad : trainer.model.grads) before += grad.text();
    must(trainer.step(trainer.arguments()));
    for (const Array &grad : trainer.model.grads) after += grad.text();
    EXPECT_TRUE(same(before, after));
}

// ------------------------------------------------------------------------------------------------------------- outputs
struct Outputs {
    Outputs(const Trainer &trainer, int32_t dtype) {
        for (const Array &param : trainer.model.params) buffers.emplace_back(dtype, param.size(), 0.0f, size_of(dtype));
        for (const Array &buffer : buffers) std::memset(buffer.data(), 0x77, buffer.bytes());
        list = list_of(buffers);
    }
    bool intact() const {
        return std::all_of(buffers.begin(), buffers.end(), [](const Array &buffer) { return buffer.intact(); });
    }
    std::vector<Array> buffers;
    std::vector<dsopt_tensor> list;
};

/// Returns the weights that a step updates: the master if there is one.
std::vector<float> weights(const Trainer &trainer, size_t i) {
    const Array &param = trainer.model.params[i];
    if (param.dtype() != DSOPT_DTYPE_F32) return exported(trainer.opt(), int64_t(i), "master");
    return {param.as<float>(), param.as<float>() + param.numel()};
}
testing::AssertionResult holds(const Array &buffer, const std::vector<float> &values) {
    for (size_t i = 0; i < values.size(); ++i) {
        const uint32_t wanted =
            buffer.dtype() == DSOPT_DTYPE_F32 ? bits_of(values[i]) : to_nearest_16_bits(values[i], buffer.dtype());
        const uint32_t got = buffer.dtype() == DSOPT_DTYPE_F32 ? buffer.as<uint32_t>()[i] : buffer.as<uint16_t>()[i];
        if (got != wanted)
            return testing::AssertionFailure()
                   << "element " << i << " of " << values.size() << " is " << got << ", not " << wanted;
    }
    return testing::AssertionSuccess();
}

TEST_P(Step, WritesNewWeightsToOutInItsDtype) {
    for (const int32_t param : kDtypes)
        for (const int32_t out_type : kDtypes) {
            const Trainer trainer(shapes_of(kSizes, param, DSOPT_DTYPE_F32), group(), optimizer_desc(),
                                  context_desc(2));
            const Trainer plain(shapes_of(kSizes, param, DSOPT_DTYPE_F32), group());
            Outputs out(trainer, out_type);
            out.list[3].data = nullptr; // no output for this parameter
            for (uint64_t t = 1; t <= 3; ++t) {
                trainer.model.make_gradients(t);
                dsopt_step step = trainer.arguments();
                step.out = out.list.data();
                must(trainer.step(step));
                plain.train(t);
                for (const size_t i : {0, 1, 2, 4}) EXPECT_TRUE(holds(out.buffers[i], weights(trainer, i))) << i;
            }
            EXPECT_TRUE(same(trainer.text(), plain.text()));
            EXPECT_TRUE(out.intact());
            EXPECT_EQ(out.buffers[3].data()[0], 0x77);
        }
}

TEST_P(Step, WritesOutIfSkippedOrTheGradientIsAbsent) {
    for (const int32_t param : kDtypes) {
        Trainer trainer(shapes_of(kSizes, param, DSOPT_DTYPE_F32), group());
        trainer.train(1);
        const std::string before = trainer.text();
        for (const bool skipped : {true, false}) {
            Outputs out(trainer, DSOPT_DTYPE_F32);
            dsopt_step step = trainer.arguments();
            const int32_t skip = 1;
            if (skipped)
                step.skip = on_device(skip);
            else
                for (dsopt_tensor &grad : trainer.grads) grad.data = nullptr;
            step.out = out.list.data();
            must(trainer.step(step));
            for (size_t i = 0; i < kSizes.size(); ++i) EXPECT_TRUE(holds(out.buffers[i], weights(trainer, i)));
            EXPECT_TRUE(same(trainer.text(), before));
        }
    }
}

TEST_P(Step, AcceptsTheParameterAsOut) {
    for (const int32_t dtype : kDtypes)
        for (const uint32_t flags : {0u, uint32_t(DSOPT_STEP_OUT_ONLY)}) {
            const Trainer trainer(shapes_of(kSizes, dtype, DSOPT_DTYPE_F32), group()),
                plain(shapes_of(kSizes, dtype, DSOPT_DTYPE_F32), group());
            const std::vector<dsopt_tensor> out = list_of(trainer.model.params);
            for (uint64_t t = 1; t <= 3; ++t) {
                plain.train(t);
                trainer.model.make_gradients(t);
                dsopt_step step = trainer.arguments();
                step.out = out.data();
                step.flags = flags;
                must(trainer.step(step));
            }
            EXPECT_TRUE(same(trainer.text(), plain.text()));
        }
}

TEST_P(Step, UpdatesStateButNotParametersWithOutOnly) {
    for (const int32_t dtype : kDtypes) {
        const Trainer trainer(shapes_of(kSizes, dtype, DSOPT_DTYPE_F32), group(),
                              optimizer_desc(0, DSOPT_OPTIMIZER_REPORT_NORMS));
        const Trainer plain(shapes_of(kSizes, dtype, DSOPT_DTYPE_F32), group(),
                            optimizer_desc(0, DSOPT_OPTIMIZER_REPORT_NORMS));
        const std::string before = trainer.model.text();
        const Outputs out(trainer, dtype);
        trainer.model.make_gradients(1);
        dsopt_step step = trainer.arguments();
        step.out = out.list.data();
        step.flags = DSOPT_STEP_OUT_ONLY;
        must(trainer.step(step));
        plain.train(1);
        EXPECT_TRUE(same(trainer.model.text(), before));
        for (size_t i = 0; i < kSizes.size(); ++i)
            EXPECT_TRUE(same(out.buffers[i].text(), plain.model.params[i].text()));
        EXPECT_TRUE(same(state_text(trainer.opt()), state_text(plain.opt())));
        EXPECT_EQ(report_of(trainer.opt()).update_norm, report_of(plain.opt()).update_norm);
    }
}

TEST_P(Step, WritesNewMinusOldAsDelta) {
    for (const int32_t dtype : kDtypes) {
        const dsopt_optimizer_desc desc =
            optimizer_desc(0, dtype == DSOPT_DTYPE_F32 ? 0u : uint32_t(DSOPT_OPTIMIZER_NO_MASTER));
        const Trainer trainer(shapes_of(kSizes, dtype, DSOPT_DTYPE_F32), group(), desc, context_desc(2));
        const Trainer plain(shapes_of(kSizes, dtype, DSOPT_DTYPE_F32), group(), desc);
        trainer.train(1);
        plain.train(1);
        const std::string before = trainer.model.text();
        const Outputs delta(trainer, DSOPT_DTYPE_F32), exact(plain, DSOPT_DTYPE_F32);
        trainer.model.make_gradients(2);
        plain.model.make_gradients(2);
        dsopt_step step = trainer.arguments();
        step.out = delta.list.data();
        step.flags = DSOPT_STEP_DELTA;
        must(trainer.step(step));
        EXPECT_TRUE(same(trainer.model.text(), before));
        std::vector<std::vector<float>> old;
        for (const Array &param : plain.model.params) {
            old.emplace_back();
            for (int64_t i = 0; i < param.numel(); ++i) old.back().push_back(param[size_t(i)]);
        }
        step = plain.arguments();
        step.out = exact.list.data(); // the fp32 result before it is rounded to the parameter
        must(plain.step(step));
        for (size_t i = 0; i < kSizes.size(); ++i) {
            std::vector<float> wanted(old[i].size());
            for (size_t k = 0; k < wanted.size(); ++k) wanted[k] = exact.buffers[i].as<float>()[k] - old[i][k];
            EXPECT_TRUE(holds(delta.buffers[i], wanted)) << i;
        }
        EXPECT_TRUE(same(state_text(trainer.opt()), state_text(plain.opt())));
        EXPECT_TRUE(delta.intact());
    }
}

TEST_P(Step, WritesZeroDeltaIfSkippedOrAbsent) {
    Trainer trainer(shapes_of(kSizes), group());
    const int32_t skip = 1;
    for (const bool skipped : {true, false}) {
        const Outputs delta(trainer, DSOPT_DTYPE_BF16);
        dsopt_step step = trainer.arguments();
        step.flags = DSOPT_STEP_DELTA;
        step.out = delta.list.data();
        if (skipped)
            step.skip = on_device(skip);
        else
            for (dsopt_tensor &grad : trainer.grads) grad.data = nullptr;
        must(trainer.step(step));
        for (const Array &buffer : delta.buffers) EXPECT_TRUE(same(buffer.text(), std::string(buffer.bytes(), '\0')));
    }
}

// --------------------------------------------------------------------------------------------------------------- flags
TEST_P(Step, ClearsGradientsWithZeroGradsEvenIfSkipped) {
    for (const int32_t grad : kDtypes)
        for (const int32_t skip : {0, 1}) {
            Trainer trainer(shapes_of(kSizes, DSOPT_DTYPE_F32, grad), group(), optimizer_desc(0.1), context_desc(2));
            const Trainer plain(shapes_of(kSizes, DSOPT_DTYPE_F32, grad), group(), optimizer_desc(0.1));
            trainer.grads[3].data = nullptr; // absent: not cleared
            const std::string absent = trainer.model.grads[3].text();
            dsopt_step step = trainer.arguments();
            step.flags = DSOPT_STEP_ZERO_GRADS;
            step.skip = on_device(skip);
            must(trainer.step(step));
            for (const size_t i : {0, 1, 2, 4})
                EXPECT_TRUE(same(trainer.model.grads[i].text(), std::string(trainer.model.grads[i].bytes(), '\0')));
            EXPECT_TRUE(same(trainer.model.grads[3].text(), absent));
            EXPECT_TRUE(trainer.model.intact());
            std::vector<dsopt_tensor> grads = plain.grads;
            grads[3].data = nullptr;
            dsopt_step other = plain.arguments();
            other.grads = grads.data();
            other.skip = on_device(skip);
            must(plain.step(other));
            EXPECT_TRUE(same(trainer.text(), plain.text()));
        }
}

TEST_P(Step, ChangesOnlyTheCallCountWithASkipFlag) {
    const Trainer trainer(shapes_of(kSizes, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16), group());
    trainer.train(1);
    const std::string before = trainer.text();
    for (const int32_t skip : {1, -1, INT32_MIN}) {
        dsopt_step step = trainer.arguments();
        step.skip = on_device(skip);
        must(trainer.step(step));
        EXPECT_TRUE(same(trainer.text(), before));
    }
    dsopt_report report = report_of(trainer.opt());
    EXPECT_EQ(report.calls, 4);
    EXPECT_EQ(report.skipped, 3);
    EXPECT_EQ(report.skipped_in_row, 3);
    EXPECT_EQ(report.last_skipped, 1);
    const int32_t go = 0;
    dsopt_step step = trainer.arguments();
    step.skip = on_device(go);
    must(trainer.step(step));
    EXPECT_FALSE(same(trainer.text(), before));
    report = report_of(trainer.opt());
    EXPECT_EQ(report.skipped, 3);
    EXPECT_EQ(report.skipped_in_row, 0);
    EXPECT_EQ(report.last_skipped, 0);
}

TEST_P(Step, AcceptsAllOptionsAtOnce) {
    const std::vector<Shape> shapes = shapes_of(kSizes, DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16);
    const Trainer trainer(shapes, group(), optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS), context_desc(3));
    const Trainer plain(shapes, group(), optimizer_desc(0.5));
    const float lr = 0.125f, scale = 64;
    const int32_t skip = 0;
    const Shared<float> report(DSOPT_REPORT_FLOATS, -7);
    must(dsopt_optimizer_set(plain.opt(), 0, DSOPT_KEY_LR, 0.125));
    for (uint64_t t = 1; t <= 3; ++t) {
        const Outputs out(trainer, DSOPT_DTYPE_F16);
        trainer.model.make_gradients(t);
        dsopt_step step = trainer.arguments();
        step.out = out.list.data();
        step.lr = on_device(lr);
        step.grad_scale = on_device(scale);
        step.skip = on_device(skip);
        step.report = report.data();
        step.flags = DSOPT_STEP_ZERO_GRADS;
        must(trainer.step(step));
        plain.model.make_gradients(t);
        step = plain.arguments();
        step.grad_scale = on_device(scale);
        must(plain.step(step));
        for (size_t i = 0; i < kSizes.size(); ++i) EXPECT_TRUE(holds(out.buffers[i], weights(trainer, i)));
    }
    EXPECT_TRUE(same(trainer.text(), plain.text()));
}

// --------------------------------------------------------------------------------------------------- scalars in memory
TEST_P(Step, ReadsLearningRatesFromMemory) {
    Trainer trainer(shapes_of({100, 200, 300}), optimizer_desc()), plain(shapes_of({100, 200, 300}), optimizer_desc());
    const Shared<float> rates{0.01f, 0.5f, 0};
    for (size_t i = 0; i < 3; ++i) {
        trainer.add(group(), 1);
        dsopt_group other = group();
        other.lr = double(rates[i]);
        plain.add(other, 1);
    }
    for (uint64_t t = 1; t <= 3; ++t) {
        trainer.model.make_gradients(t);
        dsopt_step step = trainer.arguments();
        step.lr = rates.data();
        must(trainer.step(step));
        plain.train(t);
    }
    EXPECT_TRUE(same(trainer.text(), plain.text()));
    // A schedule may write the same memory. Without step.lr, the learning rates of the groups apply again.
    rates[2] = 0.25f;
    must(dsopt_optimizer_set(plain.opt(), 2, DSOPT_KEY_LR, 0.25));
    dsopt_step step = trainer.arguments();
    step.lr = rates.data();
    must(trainer.step(step));
    must(plain.step(plain.arguments()));
    EXPECT_TRUE(same(trainer.text(), plain.text()));
    must(trainer.step(trainer.arguments()));
    must(dsopt_optimizer_set(plain.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_LR, group().lr));
    must(plain.step(plain.arguments()));
    EXPECT_TRUE(same(trainer.text(), plain.text()));
}

TEST_P(StepMoments, UseGradientsDividedByGradScale) {
    const dsopt_group no_decay = make_group(GetParam(), 0); // with L2 decay, the gradient and the decay could cancel
    const Trainer trainer(shapes_of({2000}), no_decay), plain(shapes_of({2000}), no_decay);
    const float scale = 3;
    dsopt_step step = trainer.arguments();
    step.grad_scale = on_device(scale);
    must(trainer.step(step));
    for (int64_t i = 0; i < 2000; ++i) plain.model.grads[0].as<float>()[i] /= scale;
    must(plain.step(plain.arguments()));
    const auto m = exported(trainer.opt(), 0, "exp_avg"), wanted = exported(plain.opt(), 0, "exp_avg");
    for (size_t i = 0; i < m.size(); ++i) EXPECT_NEAR(m[i], wanted[i], 4e-7 * std::fabs(wanted[i]));
    EXPECT_EQ(report_of(trainer.opt()).divisor, 3);
}

// --------------------------------------------------------------------------------------------------- changing pointers
TEST_P(Step, AcceptsOtherParameterPointersAtEachCall) {
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16}) {
        const Trainer moving(shapes_of(kSizes, dtype, dtype), group(), optimizer_desc(1.0)),
            fixed(shapes_of(kSizes, dtype, dtype), group(), optimizer_desc(1.0));
        std::vector<Array> buffers[2];
        for (auto &array_list : buffers)
            for (const int64_t numel : kSizes) array_list.emplace_back(dtype, size_t(numel), 0.0f, 2 * size_of(dtype));
        const std::vector<Array> *now = &moving.model.params;
        for (uint64_t t = 1; t <= 4; ++t) {
            const std::vector<Array> &next = buffers[t % 2];
            for (size_t i = 0; i < kSizes.size(); ++i) {
                std::memcpy(next[i].data(), (*now)[i].data(), next[i].bytes());
                std::memset((*now)[i].data(), 0x33, next[i].bytes()); // the old memory must not be read again
            }
            now = &next;
            const std::vector<dsopt_tensor> params = list_of(next);
            moving.model.make_gradients(t);
            dsopt_step step = moving.arguments();
            step.params = params.data();
            must(moving.step(step));
            fixed.train(t);
        }
        for (size_t i = 0; i < kSizes.size(); ++i) EXPECT_TRUE(same((*now)[i].text(), fixed.model.params[i].text()));
        EXPECT_TRUE(same(state_text(moving.opt()), state_text(fixed.opt())));
    }
}

TEST_P(Step, AcceptsParametersRegisteredWithoutMemory) {
    const Model model(shapes_of(kSizes, DSOPT_DTYPE_F16, DSOPT_DTYPE_F32));
    const Trainer plain(shapes_of(kSizes, DSOPT_DTYPE_F16, DSOPT_DTYPE_F32), group());
    const Context context = make_context();
    const Optimizer opt = make_optimizer(context);
    std::vector<dsopt_param> registered = model.registered();
    for (dsopt_param &param : registered) param.tensor.data = nullptr;
    const dsopt_group g = group();
    ASSERT_OK(dsopt_optimizer_add_group(opt.get(), &g, registered.data(), int64_t(registered.size())));
    const auto params = list_of(model.params), grads = list_of(model.grads);
    DSOPT_NEW(dsopt_step, step);
    step.grads = grads.data();
    step.count = int64_t(grads.size());
    EXPECT_TRUE(refused(dsopt_optimizer_step(opt.get(), &step), DSOPT_ERR_STATE, "'p0'|memory"));
    step.params = params.data(); // masters start from these parameters
    ASSERT_OK(dsopt_optimizer_step(opt.get(), &step));
    plain.train(1);
    EXPECT_TRUE(same(model.text(), plain.model.text()));
    EXPECT_TRUE(same(state_text(opt.get()), state_text(plain.opt())));
}

TEST_P(StepMoments, AreReadFromTheStateOfTheCall) {
    const Trainer trainer(shapes_of({500, 40}), group()), plain(shapes_of({500, 40}), group());
    // The moments of the first tensor are passed to each call; the engine stores the others.
    const Array m(DSOPT_DTYPE_F32, 500, 0), v(DSOPT_DTYPE_F32, 500, 0);
    std::vector<dsopt_tensor> state;
    for (int64_t i = 0; i < state_count(trainer.opt()); ++i) {
        state.push_back(state_info(trainer.opt(), i).tensor);
        state.back().data = i == 0 ? m.data() : i == 1 ? v.data() : nullptr;
    }
    for (uint64_t t = 1; t <= 3; ++t) {
        trainer.model.make_gradients(t);
        dsopt_step step = trainer.arguments();
        step.state = state.data();
        step.state_count = int64_t(state.size());
        must(trainer.step(step));
        plain.train(t);
    }
    EXPECT_TRUE(same(trainer.model.text(), plain.model.text()));
    EXPECT_TRUE(holds(m, exported(plain.opt(), 0, "exp_avg")));
    EXPECT_EQ(exported(trainer.opt(), 0, "exp_avg"), std::vector<float>(500, 0));
    EXPECT_EQ(exported(trainer.opt(), 1, "exp_avg"), exported(plain.opt(), 1, "exp_avg"));
    EXPECT_EQ(steps(trainer.opt()), steps(plain.opt()));
}

TEST(StepDelta, IsRefusedForAParameterWithAMaster) {
    const Trainer trainer({{10, DSOPT_DTYPE_F32, DSOPT_DTYPE_F32}, {10, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F32}},
                          make_group(DSOPT_ALGORITHM_ADAMW));
    const Outputs out(trainer, DSOPT_DTYPE_F32);
    dsopt_step step = trainer.arguments();
    step.flags = DSOPT_STEP_DELTA;
    step.out = out.list.data();
    const std::string before = trainer.text();
    EXPECT_TRUE(refused(trainer.step(step), DSOPT_ERR_UNSUPPORTED, "'p1'|DELTA|master"));
    EXPECT_TRUE(same(trainer.text(), before));
}

} // namespace step_tests
