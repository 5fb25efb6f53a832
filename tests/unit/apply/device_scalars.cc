// SPDX-License-Identifier: Apache-2.0
// Invalid numbers in backend memory: the step is skipped, reports the reason and changes nothing. The tests cover
// dsopt_optimizer_step and apply, both modes, one rank and two. A scaler recovers a usable scale.
#include "support/onebit.h"
#include <optional>

using namespace test;

namespace apply_device_scalars_tests {

const std::vector<size_t> kSizes{40, 1, 300};
const std::vector<size_t> kLeaves{40, 1, 5000}; // the sum of the last tensor has more than one leaf
constexpr int32_t kAll[] = {DSOPT_ALGORITHM_ADAM,        DSOPT_ALGORITHM_ADAMW,       DSOPT_ALGORITHM_LAMB,
                            DSOPT_ALGORITHM_ADAM_LEGACY, DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM,
                            DSOPT_ALGORITHM_ONEBIT_LAMB};
bool is_onebit(int32_t algorithm) { return algorithm >= DSOPT_ALGORITHM_ONEBIT_ADAM; }

/// Settings of the optimizer of a test.
struct Kind {
    int32_t algorithm = DSOPT_ALGORITHM_ADAMW;
    int32_t dtype = DSOPT_DTYPE_F32;
    int32_t compat = DSOPT_COMPAT_NONE;
    int32_t masters = DSOPT_MASTERS_PER_TENSOR;
    int32_t nonfinite = DSOPT_NONFINITE_AUTO;
    double max_norm = 0;
    bool scaler = true;
    const std::vector<size_t> *sizes = &kSizes;
    bool wrapped() const { return compat != DSOPT_COMPAT_NONE && dtype != DSOPT_DTYPE_F32; }
    std::string text() const {
        return "algorithm " + std::to_string(algorithm) + " dtype " + dtype_name(dtype) + " compat " +
               std::to_string(compat) + " masters " + std::to_string(masters) + " nonfinite " +
               std::to_string(nonfinite) + " max_norm " + std::to_string(max_norm) + (scaler ? " scaler" : "");
    }
};

/// Numbers of one step. A member without a value is not passed.
struct Numbers {
    std::optional<float> grad_scale, loss_scale;
    std::optional<std::vector<float>> lr, hyper, grad_norms;
    std::optional<int32_t> skip;
    float bad_gradient = 0; // in the first element
    void set_in(dsopt_step &step) const {
        if (grad_scale) step.grad_scale = on_device(*grad_scale);
        if (lr) step.lr = on_device(*lr);
        if (hyper) step.hyper = on_device(*hyper);
        if (grad_norms) step.grad_norms = on_device(*grad_norms);
        if (skip) step.skip = on_device(*skip);
    }
};
struct InvalidCase {
    const char *name;
    Numbers numbers;
    int32_t reasons;
};
Numbers with_lr(float first, float second) {
    Numbers n;
    n.lr = std::vector<float>{first, second};
    return n;
}
Numbers with_hyper(int row, int index, float value) {
    Numbers n;
    n.hyper = std::vector<float>(2 * DSOPT_HYPER_FLOATS, kNaN);
    (*n.hyper)[size_t(row * DSOPT_HYPER_FLOATS + index)] = value;
    return n;
}
Numbers with_norms(float first, float second) {
    Numbers n;
    n.grad_norms = std::vector<float>{first, second};
    return n;
}
Numbers with_scales(std::optional<float> grad_scale, std::optional<float> loss_scale) {
    Numbers n;
    n.grad_scale = grad_scale;
    n.loss_scale = loss_scale;
    return n;
}
Numbers with_skip(int32_t skip) {
    Numbers n;
    n.skip = skip;
    return n;
}

constexpr float kBadScales[] = {kNaN, kInf, -kInf, -1.0f, -1024.0f, 0.0f, -0.0f, 1e-45f, 1e-42f};

/// An optimizer under test. Steps with dsopt_optimizer_step or, if `functional`, with dsopt_optimizer_apply.
class Subject {
public:
    Subject(const Context &ctx, const Kind &kind, bool functional, dsopt_comm *comm = nullptr) :
        kind_(kind),
        functional_(functional) {
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.compat = kind.compat;
        desc.masters = kind.masters;
        desc.nonfinite = kind.nonfinite;
        desc.max_norm = kind.max_norm;
        desc.data = comm;
        if (kind.scaler) {
            scaler_ = make_scaler(ctx, 64, 2);
            desc.scaler = scaler_.get();
        }
        trainer_.emplace(ctx, desc);
        Random random(11);
        std::vector<Param> first, second;
        for (const size_t n : *kind.sizes) (n == 1 ? second : first).push_back({Array(kind.dtype, random.floats(n))});
        const dsopt_group group =
            is_onebit(kind.algorithm) ? group_for(kind.algorithm, 3) : group_of(kind.algorithm, 1e-2, 0.1);
        must(trainer_->add_group(group, std::move(first)));
        must(trainer_->add_group(group, std::move(second)));
        grads_ = good_gradients();
        if (!functional) {
            (void)trainer_->snapshot(); // allocates the state
            return;
        }
        for (const dsopt_state_info &info : trainer_->state()) {
            state_memory_.emplace_back(DSOPT_DTYPE_F32, size_t(info.tensor.numel), 5.0f);
            state_.push_back({state_memory_.back().tensor().data, info.tensor.numel, info.tensor.dtype, 0});
            names_.push_back(std::string(info.name) + " " + std::to_string(info.param));
        }
        const std::vector<dsopt_tensor> params = list_of(trainer_->weights());
        must(dsopt_optimizer_init_state(trainer_->opt(), params.data(), int64_t(params.size()), state_.data(),
                                        int64_t(state_.size()), nullptr));
        size_t bytes = 0;
        must(dsopt_optimizer_workspace(trainer_->opt(), &bytes));
        workspace_.assign(bytes, 0);
    }
    void step(const Numbers &numbers = {}) {
        if (numbers.loss_scale) write_state("loss_scale -1", &*numbers.loss_scale);
        grads_ = good_gradients();
        if (numbers.bad_gradient != 0) grads_[0].set(3, numbers.bad_gradient);
        const std::vector<dsopt_tensor> grads = list_of(grads_), params = list_of(trainer_->weights());
        DSOPT_NEW(dsopt_step, step);
        step.grads = grads.data();
        step.count = int64_t(grads.size());
        step.report = report.data();
        numbers.set_in(step);
        if (functional_) {
            step.params = params.data();
            step.state = state_.data();
            step.state_count = int64_t(state_.size());
            step.workspace = workspace_.data();
            step.workspace_bytes = workspace_.size();
        }
        must(functional_ ? dsopt_optimizer_apply(trainer_->opt(), &step)
                         : dsopt_optimizer_step(trainer_->opt(), &step));
        if (!functional_) {
            const dsopt_report step_report = trainer_->report();
            EXPECT_EQ(step_report.last_skipped, int32_t(report[DSOPT_REPORT_SKIPPED]));
            EXPECT_EQ(step_report.reasons, int32_t(report[DSOPT_REPORT_REASONS]));
            if (kind_.scaler) { EXPECT_EQ(float(step_report.loss_scale), report[DSOPT_REPORT_SCALE_NEXT]); }
        }
    }
    Snapshot snapshot() {
        if (!functional_) return trainer_->snapshot();
        Snapshot all;
        for (size_t i = 0; i < trainer_->weights().size(); ++i)
            all["param " + std::to_string(i)] = trainer_->weight(i).text();
        for (size_t i = 0; i < state_.size(); ++i)
            all[names_[i]] = device_text(state_[i].data, size_t(state_[i].numel) * size_of(state_[i].dtype));
        return all;
    }
    /// Returns the state that a skipped step must not change. This excludes the scaler and, in standard mode, the
    /// schedule and the mask of elements with a variance.
    Snapshot state_kept_by_skip() {
        Snapshot all = snapshot();
        for (const char *name : {"loss_scale -1", "scaler -1"}) all.erase(name);
        if (kind_.compat == DSOPT_COMPAT_NONE) all.erase("schedule -1"), all.erase("active -1");
        return all;
    }
    void write_state(const std::string &name, const void *bytes) {
        const std::vector<dsopt_state_info> list = trainer_->state();
        for (size_t i = 0; i < list.size(); ++i) {
            if (std::string(list[i].name) + " " + std::to_string(list[i].param) != name) continue;
            const size_t size = size_t(list[i].tensor.numel) * 4;
            // Writes memory because import refuses such words.
            write_device(functional_ ? state_[i].data : list[i].tensor.data, bytes, size);
            return;
        }
        throw std::runtime_error("no " + name);
    }
    /// Succeeds if weights are finite and the loss scale is usable.
    testing::AssertionResult is_valid() {
        for (size_t i = 0; i < trainer_->weights().size(); ++i)
            for (const float value : trainer_->weight(i).floats())
                if (!(std::fabs(value) < 100)) return testing::AssertionFailure() << "weight " << value << " in " << i;
        if (!kind_.scaler) return testing::AssertionSuccess();
        float scale;
        std::memcpy(&scale, snapshot().at("loss_scale -1").data(), 4);
        if (scale > 0 && std::isfinite(scale)) return testing::AssertionSuccess();
        return testing::AssertionFailure() << "the loss scale is " << scale;
    }
    Shared<float> report = Shared<float>(DSOPT_REPORT_FLOATS, 0.0f);

private:
    std::vector<Array> good_gradients() const {
        std::vector<Array> list;
        for (size_t i = 0; i < trainer_->weights().size(); ++i)
            list.emplace_back(kind_.dtype, trainer_->weights()[i].size(), 0.5f * float(i + 1));
        return list;
    }
    Kind kind_;
    bool functional_;
    Scaler scaler_;
    mutable std::optional<Trainer> trainer_;
    std::vector<Array> grads_, state_memory_;
    std::vector<dsopt_tensor> state_;
    std::vector<std::string> names_;
    Shared<char> workspace_;
};

std::vector<InvalidCase> invalid_cases_for(const Kind &kind, bool all) {
    std::vector<InvalidCase> list;
    for (const float bad : kBadScales) list.push_back({"grad_scale", with_scales(bad, {}), DSOPT_SKIP_SCALE});
    if (kind.scaler) {
        for (const float bad : kBadScales) list.push_back({"loss_scale", with_scales({}, bad), DSOPT_SKIP_SCALE});
        list.push_back({"both too large", with_scales(3e38f, 3e38f), DSOPT_SKIP_SCALE});
        list.push_back({"both too small", with_scales(1e-30f, 1e-30f), DSOPT_SKIP_SCALE});
        list.push_back({"both negative", with_scales(-2.0f, -2.0f), DSOPT_SKIP_SCALE});
    }
    for (const float bad : {kNaN, kInf, -kInf, -1.0f}) {
        list.push_back({"lr of group 0", with_lr(bad, 0.01f), DSOPT_SKIP_HYPER});
        list.push_back({"lr of group 1", with_lr(0.01f, bad), DSOPT_SKIP_HYPER});
    }
    list.push_back({"skip", with_skip(1), DSOPT_SKIP_CALLER});
    for (const float bad : {kNaN, kInf, -1.0f})
        if (kind.nonfinite != DSOPT_NONFINITE_APPLY)
            list.push_back({"grad_norms", with_norms(1, bad), DSOPT_SKIP_NORM});
    if (!all) return list;
    for (const int row : {0, 1}) {
        for (const float bad : {kInf, -kInf, -1.0f}) {
            list.push_back({"hyper lr", with_hyper(row, DSOPT_HYPER_LR, bad), DSOPT_SKIP_HYPER});
            list.push_back({"hyper eps", with_hyper(row, DSOPT_HYPER_EPS, bad), DSOPT_SKIP_HYPER});
            list.push_back({"hyper decay", with_hyper(row, DSOPT_HYPER_WEIGHT_DECAY, bad), DSOPT_SKIP_HYPER});
            list.push_back({"hyper norm", with_hyper(row, DSOPT_HYPER_GROUP_MAX_NORM, bad), DSOPT_SKIP_HYPER});
        }
        for (const float bad : {1.0f, -0.5f, kInf}) {
            list.push_back({"hyper beta1", with_hyper(row, DSOPT_HYPER_BETA1, bad), DSOPT_SKIP_HYPER});
            list.push_back({"hyper beta2", with_hyper(row, DSOPT_HYPER_BETA2, bad), DSOPT_SKIP_HYPER});
        }
        for (const float value : {-1.0f, 1.0f, kInf})
            for (int index = DSOPT_HYPER_MOMENTUM; index < DSOPT_HYPER_FLOATS; index += 4)
                list.push_back({"hyper without effect", with_hyper(row, index, value), DSOPT_SKIP_HYPER});
        list.push_back(
            {"hyper norm that is off on the host", with_hyper(row, DSOPT_HYPER_GROUP_MAX_NORM, 1), DSOPT_SKIP_HYPER});
    }
    list.push_back({"norm of all in row 1", with_hyper(1, DSOPT_HYPER_MAX_NORM, 1), DSOPT_SKIP_HYPER});
    list.push_back({"norm of all", with_hyper(0, DSOPT_HYPER_MAX_NORM, -1), DSOPT_SKIP_HYPER});
    if (kind.max_norm == 0)
        list.push_back({"norm of all, off", with_hyper(0, DSOPT_HYPER_MAX_NORM, 1), DSOPT_SKIP_HYPER});
    Numbers three = with_scales(0.0f, {});
    three.lr = std::vector<float>{-1, 1};
    three.skip = 7;
    list.push_back({"three reasons", three, DSOPT_SKIP_SCALE | DSOPT_SKIP_HYPER | DSOPT_SKIP_CALLER});
    return list;
}

/// Makes steps with and without the invalid numbers, and checks that those with them are skipped.
void expect_skipped(const Context &ctx, Kind kind, const InvalidCase &invalid) {
    if (invalid.reasons == DSOPT_SKIP_CALLER) kind.sizes = &kLeaves; // one reason per kind is enough
    for (const bool functional : {false, true}) {
        SCOPED_TRACE(kind.text() + (functional ? " apply: " : " step: ") + invalid.name);
        Subject subject(ctx, kind, functional);
        for (const bool skips : {false, true, false, true, false}) {
            if (!skips) {
                subject.step();
                ASSERT_EQ(subject.report[DSOPT_REPORT_SKIPPED], 0);
                ASSERT_EQ(subject.report[DSOPT_REPORT_REASONS], 0);
                ASSERT_TRUE(subject.is_valid());
                continue;
            }
            const Snapshot before = subject.state_kept_by_skip();
            subject.step(invalid.numbers);
            ASSERT_EQ(subject.report[DSOPT_REPORT_SKIPPED], 1);
            ASSERT_EQ(subject.report[DSOPT_REPORT_REASONS], float(invalid.reasons));
            ASSERT_TRUE(same(before, subject.state_kept_by_skip()));
            ASSERT_TRUE(subject.is_valid()) << "after the skipped step";
        }
    }
}

LABEL(one_of_many);
LABEL(long_emulated);
TEST(StepWithDeviceScalars, SkipsOnInvalidValuesWithAnyPolicy) {
    const Context ctx = make_context(1);
    for (const int32_t nonfinite : {DSOPT_NONFINITE_AUTO, DSOPT_NONFINITE_SKIP, DSOPT_NONFINITE_APPLY})
        for (const double max_norm : {0.0, 1.0})
            for (const bool scaler : {false, true}) {
                Kind kind;
                kind.nonfinite = nonfinite;
                kind.max_norm = max_norm;
                kind.scaler = scaler;
                for (const InvalidCase &invalid : invalid_cases_for(kind, true)) expect_skipped(ctx, kind, invalid);
            }
}

LABEL(one_of_many);
LABEL(long_emulated);
TEST(StepWithDeviceScalars, SkipsWithAnyAlgorithmInStandardMode) {
    const Context ctx = make_context(1);
    for (const int32_t algorithm : kAll)
        for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16}) {
            Kind kind;
            kind.algorithm = algorithm;
            kind.dtype = dtype;
            kind.max_norm = dtype == DSOPT_DTYPE_F32 ? 0 : 1;
            for (const InvalidCase &invalid : invalid_cases_for(kind, false)) expect_skipped(ctx, kind, invalid);
        }
}

LABEL(one_of_many);
LABEL(long_emulated);
TEST(StepWithDeviceScalars, SkipsWithAnyAlgorithmInCompatMode) {
    const Context ctx = make_context(1);
    for (const int32_t algorithm : kAll)
        for (const int wrapper : {0, 1, 2}) {
            Kind kind;
            kind.algorithm = algorithm;
            kind.compat = DSOPT_COMPAT_DEEPSPEED;
            kind.dtype = wrapper == 0 ? DSOPT_DTYPE_F32 : DSOPT_DTYPE_F16;
            kind.masters = wrapper == 2 ? DSOPT_MASTERS_FLAT : DSOPT_MASTERS_PER_TENSOR;
            for (const bool scaler : {true, false}) {
                kind.scaler = scaler;
                kind.nonfinite = scaler ? DSOPT_NONFINITE_AUTO : DSOPT_NONFINITE_APPLY;
                for (const InvalidCase &invalid : invalid_cases_for(kind, false)) expect_skipped(ctx, kind, invalid);
            }
        }
}

TEST(StepWithDeviceScalars, AcceptsValuesAtTheLimits) {
    const Context ctx = make_context(1);
    for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
        Kind kind;
        kind.compat = compat;
        kind.scaler = false;
        for (const Numbers &numbers :
             {with_scales(2e-38f, {}), with_scales(3e38f, {}), with_lr(0, -0.0f), with_hyper(0, DSOPT_HYPER_BETA1, 0),
              with_hyper(1, DSOPT_HYPER_EPS, 1e-45f), with_skip(0), with_norms(0, 0)}) {
            Subject subject(ctx, kind, true);
            subject.step(numbers);
            EXPECT_EQ(subject.report[DSOPT_REPORT_SKIPPED], 0);
            EXPECT_TRUE(subject.is_valid());
        }
    }
}

TEST(StepWithDeviceScalars, SkipsNonFiniteGradientsByPolicy) {
    const Context ctx = make_context(1);
    for (const float bad : {kNaN, kInf, -kInf})
        for (const bool functional : {false, true}) {
            Kind kind;
            Subject subject(ctx, kind, functional);
            Numbers numbers;
            numbers.bad_gradient = bad;
            subject.step(numbers);
            EXPECT_EQ(subject.report[DSOPT_REPORT_SKIPPED], 1);
            EXPECT_EQ(subject.report[DSOPT_REPORT_NONFINITE], 1);
            EXPECT_EQ(int32_t(subject.report[DSOPT_REPORT_REASONS]) & DSOPT_SKIP_GRADIENTS, DSOPT_SKIP_GRADIENTS);
            EXPECT_EQ(int32_t(subject.report[DSOPT_REPORT_REASONS]) & ~(DSOPT_SKIP_GRADIENTS | DSOPT_SKIP_NORM), 0);
            EXPECT_TRUE(subject.is_valid());
            kind.nonfinite = DSOPT_NONFINITE_APPLY;
            Subject other(ctx, kind, functional);
            other.step(numbers);
            EXPECT_EQ(other.report[DSOPT_REPORT_SKIPPED], 0);
            EXPECT_EQ(other.report[DSOPT_REPORT_REASONS], 0);
        }
}

// --------------------------------------------------------------------------------------------------------------- ranks
TEST(StepWithDeviceScalars, SkipsOnBothRanksAndReportsPeer) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ONEBIT_ADAM,
                                    DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB})
        for (const int mode : {0, 1, 2, 3}) {
            Kind kind;
            kind.algorithm = algorithm;
            kind.compat = mode == 0 ? DSOPT_COMPAT_NONE : DSOPT_COMPAT_DEEPSPEED;
            kind.dtype = mode < 2 ? DSOPT_DTYPE_F32 : DSOPT_DTYPE_F16;
            kind.masters = mode == 3 ? DSOPT_MASTERS_FLAT : DSOPT_MASTERS_PER_TENSOR;
            with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
                for (const bool functional : {false, true}) {
                    SCOPED_TRACE(kind.text() + (functional ? " apply" : " step"));
                    Subject subject(ctx, kind, functional, comm.get());
                    Numbers scale = with_scales(1.0f, {}), lr = with_lr(0.01f, 0.01f), skip = with_skip(0);
                    const Numbers good[] = {scale, lr, skip};
                    scale.grad_scale = 0.0f, lr.lr->back() = kNaN, skip.skip = 1;
                    const InvalidCase invalid_cases[] = {{"scale", scale, DSOPT_SKIP_SCALE},
                                                         {"lr", lr, DSOPT_SKIP_HYPER},
                                                         {"skip", skip, DSOPT_SKIP_CALLER}};
                    for (int call = 0; call < 8; ++call) {
                        const InvalidCase &invalid = invalid_cases[call % 3];
                        if (call % 2 == 0) {
                            subject.step();
                            ASSERT_EQ(subject.report[DSOPT_REPORT_REASONS], 0) << "call " << call;
                            continue;
                        }
                        const bool has_reason = rank == call / 2 % 2; // ranks alternate
                        const Snapshot before = subject.state_kept_by_skip();
                        subject.step(has_reason ? invalid.numbers : good[call % 3]);
                        EXPECT_EQ(subject.report[DSOPT_REPORT_SKIPPED], 1) << "call " << call;
                        EXPECT_EQ(subject.report[DSOPT_REPORT_REASONS],
                                  float(has_reason ? invalid.reasons : DSOPT_SKIP_PEER))
                            << "call " << call << " " << invalid.name;
                        ASSERT_TRUE(same(before, subject.state_kept_by_skip())) << "call " << call;
                    }
                    EXPECT_TRUE(subject.is_valid());
                }
            });
        }
}

TEST(StepWithDeviceScalars, ReportsPeerInAdditionToItsOwnReason) {
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        Subject subject(ctx, Kind{}, false, comm.get());
        subject.step(rank == 0 ? with_scales(kNaN, {}) : with_lr(kNaN, 1));
        EXPECT_EQ(subject.report[DSOPT_REPORT_REASONS],
                  float((rank == 0 ? DSOPT_SKIP_SCALE : DSOPT_SKIP_HYPER) | DSOPT_SKIP_PEER));
        subject.step(with_scales({}, rank == 0 ? 64.0f : kNaN)); // the loss scale of rank 1 is invalid
        EXPECT_EQ(subject.report[DSOPT_REPORT_REASONS], float(rank == 0 ? DSOPT_SKIP_PEER : DSOPT_SKIP_SCALE));
        EXPECT_TRUE(subject.is_valid());
    });
}

TEST(StepWithDeviceScalars, DoesNotReportItselfAsPeer) {
    const CommId data_id = new_id(), expert_id = new_id();
    run_ranks(2, [&](int rank) {
        const Context ctx = make_context(1);
        const Comm data = local_comm(ctx, data_id, rank, 2), experts = local_comm(ctx, expert_id, rank, 2);
        dsopt_comm *const list[] = {experts.get()};
        dsopt_optimizer_desc desc = desc_with(data);
        desc.experts = list;
        desc.expert_count = 1;
        desc.max_norm = 1;
        Trainer trainer(ctx, desc);
        must(trainer.add_group(group_of(DSOPT_ALGORITHM_ADAMW),
                               {{Array(DSOPT_DTYPE_F32, 4, 1), "dense"}, {Array(DSOPT_DTYPE_F32, 4, 1), "own", 0, 1}}));
        const float scale = rank == 1 ? 0.0f : 1.0f;
        const std::vector<Array> grads{Array(DSOPT_DTYPE_F32, 4, 1), Array(DSOPT_DTYPE_F32, 4, 1)};
        must(trainer.step(grads, [&](dsopt_step &step) { step.grad_scale = on_device(scale); }));
        EXPECT_EQ(trainer.report().last_skipped, 1);
        EXPECT_EQ(trainer.report().reasons, rank == 1 ? DSOPT_SKIP_SCALE : DSOPT_SKIP_PEER);
    });
}

// -------------------------------------------------------------------------------------------------------------- scaler
/// The words of state tensor "scaler".
struct Words {
    double dynamic, forced;
    int32_t rest[8]; // updates, last_overflow, hysteresis, failures, overridden, recorded, skipped_in_row, reserved
};
static_assert(sizeof(Words) == 48);
constexpr double kNaN64 = std::numeric_limits<double>::quiet_NaN(), kInf64 = std::numeric_limits<double>::infinity();
/// Invalid words: no update of a scaler produces them.
const Words kInvalidWords[] = {{0, 0, {0, 0, 0, 0, 0, 0, 0, 0}},
                               {kNaN64, 0, {0, -1, 1, 0, 0, 0, 0, 0}},
                               {kInf64, 0, {5, -1, 1, 0, 0, 0, 0, 0}},
                               {-kInf64, 0, {5, -1, 2, 0, 0, 0, 0, 0}},
                               {-64, 0, {5, -1, 3, 0, 0, 0, 0, 0}},
                               {0, 0, {5, -1, 3, 0, 0, 0, 0, 0}},
                               {64, kNaN64, {5, -1, 1, 0, 1, 0, 0, 0}},
                               {64, 0, {5, -1, 1, 0, 1, 0, 0, 0}},
                               {64, -3, {5, -1, 1, 0, -1, 0, 0, 0}},
                               {kNaN64, kInf64, {-1, -1, -1, -1, -1, -1, -1, -1}},
                               {1e-300, 0, {5, -1, 1, 0, 0, 0, 0, 0}},
                               {kNaN64, kNaN64, {INT32_MAX, INT32_MIN, INT32_MAX, INT32_MAX, 0, 1, INT32_MAX, 0}},
                               {64, 0, {INT32_MIN, INT32_MAX, INT32_MIN, 0, 0, 0, INT32_MIN, 0}}};

std::vector<dsopt_scaler_desc> scaler_descs() {
    std::vector<dsopt_scaler_desc> list;
    for (const int32_t profile :
         {DSOPT_PROFILE_DEFAULT, DSOPT_PROFILE_FUSED, DSOPT_PROFILE_UNFUSED, DSOPT_PROFILE_DYNAMIC})
        for (const int32_t flags : {0, int32_t(DSOPT_SCALER_GROWTH_AT_WINDOW), int32_t(DSOPT_SCALER_SHARED)})
            for (const int32_t hysteresis : {1, 3}) {
                if (hysteresis > 1 && (profile == DSOPT_PROFILE_FUSED || profile == DSOPT_PROFILE_UNFUSED)) continue;
                DSOPT_NEW(dsopt_scaler_desc, desc);
                desc.profile = profile;
                desc.flags = flags | (hysteresis > 1 ? DSOPT_SCALER_REFILL : 0);
                desc.hysteresis = hysteresis;
                list.push_back(desc);
            }
    return list;
}

TEST(InvalidScaler, RecoversAfterAnOverflow) {
    const Context ctx = make_context(1);
    const int32_t overflow = 1, none = 0;
    for (const dsopt_scaler_desc &desc : scaler_descs()) {
        const Scaler scaler = make_scaler(ctx, desc);
        for (size_t i = 0; i < std::size(kInvalidWords); ++i) {
            SCOPED_TRACE("words " + std::to_string(i) + " profile " + std::to_string(desc.profile));
            const Shared<float> scale{kNaN};
            const Shared<Words> words{kInvalidWords[i]};
            const dsopt_tensor list[2] = {{scale.data(), 1, DSOPT_DTYPE_F32, 0},
                                          {words.data(), 12, DSOPT_DTYPE_I32, 0}};
            for (int round = 0; round < 4; ++round) {
                must(dsopt_scaler_update_arrays(scaler.get(), list, 2, on_device(overflow), nullptr));
                ASSERT_TRUE(*scale > 0 && std::isfinite(*scale)) << *scale << " after " << round + 1;
                DSOPT_NEW(dsopt_scaler_info, info);
                must(dsopt_scaler_decode(reinterpret_cast<const int32_t *>(words.data()), &info));
                EXPECT_EQ(float(info.scale), *scale);
            }
            for (int round = 0; round < 4; ++round)
                must(dsopt_scaler_update_arrays(scaler.get(), list, 2, on_device(none), nullptr));
            EXPECT_TRUE(*scale > 0 && std::isfinite(*scale));
        }
    }
}

TEST(InvalidScaler, DoesNotCorruptWeightsInAStep) {
    const Context ctx = make_context(1);
    for (const int mode : {0, 1, 2, 3})
        for (const bool functional : {false, true})
            for (size_t i = 0; i < std::size(kInvalidWords); ++i) {
                Kind kind;
                kind.compat = mode == 0 ? DSOPT_COMPAT_NONE : DSOPT_COMPAT_DEEPSPEED;
                kind.dtype = mode < 2 ? DSOPT_DTYPE_F32 : DSOPT_DTYPE_F16;
                kind.masters = mode == 3 ? DSOPT_MASTERS_FLAT : DSOPT_MASTERS_PER_TENSOR;
                SCOPED_TRACE(kind.text() + " words " + std::to_string(i));
                Subject subject(ctx, kind, functional);
                subject.step();
                const Snapshot before = subject.state_kept_by_skip();
                subject.write_state("scaler -1", &kInvalidWords[i]); // the loss scale itself is unchanged
                subject.step();
                ASSERT_TRUE(subject.is_valid());
                if (subject.report[DSOPT_REPORT_SKIPPED] != 0) {
                    EXPECT_EQ(subject.report[DSOPT_REPORT_REASONS], DSOPT_SKIP_SCALE);
                    EXPECT_TRUE(same(before, subject.state_kept_by_skip()));
                }
                for (int call = 0; call < 3; ++call) {
                    subject.step();
                    ASSERT_TRUE(subject.is_valid());
                }
                EXPECT_EQ(subject.report[DSOPT_REPORT_SKIPPED], 0) << "the scaler has recovered";
            }
}

TEST(InvalidScaler, SkipsAndRecoversFromZeros) {
    // Callers may initialize the state with zeros.
    const Context ctx = make_context(1);
    Subject subject(ctx, Kind{}, true);
    const Words zeros{};
    subject.write_state("scaler -1", &zeros);
    subject.step(with_scales({}, 0.0f));
    EXPECT_EQ(subject.report[DSOPT_REPORT_REASONS], DSOPT_SKIP_SCALE);
    EXPECT_TRUE(subject.is_valid());
    subject.step();
    EXPECT_EQ(subject.report[DSOPT_REPORT_SKIPPED], 0);
}

TEST(InvalidScaler, RecoversFromAScaleThatOverflowsDouble) {
    const Context ctx = make_context(1);
    DSOPT_NEW(dsopt_scaler_desc, desc);
    desc.window = 1;
    desc.factor = 1e30;
    const Scaler scaler = make_scaler(ctx, desc);
    const int32_t overflow = 1, none = 0;
    for (int i = 0; i < 40; ++i) must(dsopt_scaler_update(scaler.get(), on_device(none), nullptr));
    EXPECT_TRUE(std::isfinite(info_of(scaler).scale));
    for (int i = 0; i < 12; ++i) must(dsopt_scaler_update(scaler.get(), on_device(overflow), nullptr));
    EXPECT_EQ(info_of(scaler).scale, 1);
}

} // namespace apply_device_scalars_tests
