// SPDX-License-Identifier: Apache-2.0
// Invalid input of step, apply and zero_grad. Each call returns the documented status and a text that names the invalid
// argument, and changes nothing.
#include "support/harness.h"
#include <functional>

using namespace test;

LABEL_FILE(one_thread);

namespace refusals_step_tests {

/// All lists and arrays of a call. Each case makes one of them invalid.
struct Arguments {
    std::vector<dsopt_tensor> grads, params, out, state;
    Shared<float> report{std::vector<float>(DSOPT_REPORT_FLOATS, -7)}, lr{0.1f, 0.1f}, scale{1}, norms{1, 1};
    Shared<int32_t> skip{0};
    char *workspace = nullptr;
    void misalign(std::vector<dsopt_tensor> &list, size_t i, int bytes) {
        list[i].data = static_cast<char *>(list[i].data) + bytes;
    }
};
template <class T> T *shifted(T *pointer, int bytes) {
    return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(pointer) + uintptr_t(bytes));
}

struct Case {
    const char *name;
    std::function<void(Arguments &, dsopt_step &)> change;
    dsopt_status status;
    const char *words;
};

// The parameters are "p0", 50 elements in fp32, and "layer.weight", 60 elements in bf16 with a master.
const Case kStepAndApply[] = {
    {"UnknownFlags", [](auto &, auto &s) { s.flags = 1u << 30; }, DSOPT_ERR_ARGUMENT, "flags|40000000"},
    {"Reserved", [](auto &, auto &s) { s.reserved = 1; }, DSOPT_ERR_ARGUMENT, "reserved"},
    {"CountTooSmall", [](auto &, auto &s) { s.count = 1; }, DSOPT_ERR_SHAPE, "count|1|2"},
    {"CountTooLarge", [](auto &, auto &s) { s.count = 3; }, DSOPT_ERR_SHAPE, "count|3|2"},
    {"CountNegative", [](auto &, auto &s) { s.count = -2; }, DSOPT_ERR_SHAPE, "count|-2"},
    {"CountHuge", [](auto &, auto &s) { s.count = INT64_MAX; }, DSOPT_ERR_SHAPE, "count"},
    {"GradsNull", [](auto &, auto &s) { s.grads = nullptr; }, DSOPT_ERR_ARGUMENT, "grads|NULL"},
    {"GradNumelSmall", [](auto &l, auto &) { l.grads[1].numel = 59; }, DSOPT_ERR_SHAPE,
     "gradient|'layer.weight'|59|60"},
    {"GradNumelNegative", [](auto &l, auto &) { l.grads[1].numel = -60; }, DSOPT_ERR_SHAPE,
     "gradient|'layer.weight'|-60"},
    {"GradNumelOverflows", [](auto &l, auto &) { l.grads[1].numel = INT64_MAX; }, DSOPT_ERR_SHAPE,
     "gradient|'layer.weight'|overflows"},
    {"GradDtypeZero", [](auto &l, auto &) { l.grads[1].dtype = 0; }, DSOPT_ERR_DTYPE, "gradient|'layer.weight'|0"},
    {"GradDtypeInteger", [](auto &l, auto &) { l.grads[0].dtype = DSOPT_DTYPE_I32; }, DSOPT_ERR_DTYPE,
     "gradient|'p0'|I32"},
    {"GradDtypeDouble", [](auto &l, auto &) { l.grads[0].dtype = DSOPT_DTYPE_F64; }, DSOPT_ERR_DTYPE,
     "gradient|'p0'|F64"},
    {"GradDtypeUnknown", [](auto &l, auto &) { l.grads[1].dtype = -5; }, DSOPT_ERR_DTYPE, "gradient|'layer.weight'|-5"},
    {"GradReserved", [](auto &l, auto &) { l.grads[1].reserved = 9; }, DSOPT_ERR_ARGUMENT,
     "gradient|'layer.weight'|reserved|9"},
    {"GradMisaligned", [](auto &l, auto &) { l.misalign(l.grads, 0, 2); }, DSOPT_ERR_ALIGNMENT,
     "gradient|'p0'|aligned"},
    {"GradMisalignedHalf", [](auto &l, auto &) { l.misalign(l.grads, 1, 1); }, DSOPT_ERR_ALIGNMENT,
     "gradient|'layer.weight'|aligned"},
    {"ParamNumel", [](auto &l, auto &) { l.params[1].numel = 61; }, DSOPT_ERR_SHAPE, "parameter|'layer.weight'|61"},
    {"ParamDtype", [](auto &l, auto &) { l.params[1].dtype = DSOPT_DTYPE_F16; }, DSOPT_ERR_DTYPE,
     "parameter|'layer.weight'"},
    {"ParamDtypeInteger", [](auto &l, auto &) { l.params[0].dtype = DSOPT_DTYPE_I32; }, DSOPT_ERR_DTYPE,
     "parameter|'p0'|I32"},
    {"ParamReserved", [](auto &l, auto &) { l.params[0].reserved = 1; }, DSOPT_ERR_ARGUMENT, "parameter|'p0'|reserved"},
    {"ParamMisaligned", [](auto &l, auto &) { l.misalign(l.params, 0, 1); }, DSOPT_ERR_ALIGNMENT,
     "parameter|'p0'|aligned"},
    {"ParamWithoutMemory", [](auto &l, auto &) { l.params[1].data = nullptr; }, DSOPT_ERR_STATE,
     "parameter|'layer.weight'|memory"},
    {"OutNumel", [](auto &l, auto &) { l.out[1].numel = 1; }, DSOPT_ERR_SHAPE, "output|'layer.weight'|1"},
    {"OutDtype", [](auto &l, auto &) { l.out[1].dtype = DSOPT_DTYPE_F64; }, DSOPT_ERR_DTYPE,
     "output|'layer.weight'|F64"},
    {"OutReserved", [](auto &l, auto &) { l.out[0].reserved = 3; }, DSOPT_ERR_ARGUMENT, "output|'p0'|reserved"},
    {"OutMisaligned", [](auto &l, auto &) { l.misalign(l.out, 0, 3); }, DSOPT_ERR_ALIGNMENT, "output|'p0'|aligned"},
    {"OutOnlyWithoutOut", [](auto &, auto &s) { s.out = nullptr, s.flags = DSOPT_STEP_OUT_ONLY; }, DSOPT_ERR_ARGUMENT,
     "OUT_ONLY|out"},
    {"DeltaWithoutOut", [](auto &, auto &s) { s.out = nullptr, s.flags = DSOPT_STEP_DELTA; }, DSOPT_ERR_ARGUMENT,
     "DELTA|out"},
    {"OutOnlyWithAHole", [](auto &l, auto &s) { l.out[0].data = nullptr, s.flags = DSOPT_STEP_OUT_ONLY; },
     DSOPT_ERR_ARGUMENT, "output|'p0'|memory"},
    {"DeltaWithAMaster", [](auto &, auto &s) { s.flags = DSOPT_STEP_DELTA; }, DSOPT_ERR_UNSUPPORTED,
     "DELTA|master|'layer.weight'"},
    {"LrMisaligned", [](auto &, auto &s) { s.lr = shifted(s.lr, 1); }, DSOPT_ERR_ALIGNMENT, "dsopt_step|aligned"},
    {"ScaleMisaligned", [](auto &, auto &s) { s.grad_scale = shifted(s.grad_scale, 2); }, DSOPT_ERR_ALIGNMENT,
     "dsopt_step|aligned"},
    {"SkipMisaligned", [](auto &, auto &s) { s.skip = shifted(s.skip, 3); }, DSOPT_ERR_ALIGNMENT, "dsopt_step|aligned"},
    {"NormsMisaligned", [](auto &l, auto &s) { s.grad_norms = shifted(&l.norms[0], 1); }, DSOPT_ERR_ALIGNMENT,
     "dsopt_step|aligned"},
    {"ReportMisaligned", [](auto &, auto &s) { s.report = shifted(s.report, 2); }, DSOPT_ERR_ALIGNMENT,
     "dsopt_step|aligned"},
    {"PoolWithoutAFunction", [](auto &l, auto &s) { s.parallel_user = &l; }, DSOPT_ERR_ARGUMENT, "parallel_user"},
    {"StateCount", [](auto &, auto &s) { --s.state_count; }, DSOPT_ERR_SHAPE, "state|5|6"},
    {"StateCountNegative", [](auto &, auto &s) { s.state_count = -1; }, DSOPT_ERR_SHAPE, "state|-1"},
    {"StateNumel", [](auto &l, auto &) { l.state[2].numel = 59; }, DSOPT_ERR_SHAPE, "master|'layer.weight'|59"},
    {"StateDtype", [](auto &l, auto &) { l.state[2].dtype = DSOPT_DTYPE_BF16; }, DSOPT_ERR_DTYPE,
     "master|'layer.weight'"},
    {"StateDtypeOfTheCounters", [](auto &l, auto &) { l.state[5].dtype = DSOPT_DTYPE_F32; }, DSOPT_ERR_DTYPE,
     "step|optimizer"},
    {"StateReserved", [](auto &l, auto &) { l.state[1].reserved = 1; }, DSOPT_ERR_ARGUMENT, "exp_avg_sq|'p0'|reserved"},
    {"StateMisaligned", [](auto &l, auto &) { l.misalign(l.state, 3, 2); }, DSOPT_ERR_ALIGNMENT,
     "exp_avg|'layer.weight'|aligned"},
};
const Case kStepOnly[] = {
    {"Workspace", [](auto &l, auto &s) { s.workspace = l.workspace; }, DSOPT_ERR_ARGUMENT, "workspace"},
    {"WorkspaceBytes", [](auto &, auto &s) { s.workspace_bytes = 256; }, DSOPT_ERR_ARGUMENT, "workspace"},
    {"StateCountWithoutState", [](auto &, auto &s) { s.state = nullptr; }, DSOPT_ERR_ARGUMENT, "state_count|6"},
};
const Case kApplyOnly[] = {
    {"WorkspaceNull", [](auto &, auto &s) { s.workspace = nullptr; }, DSOPT_ERR_WORKSPACE, "workspace"},
    {"WorkspaceSmall", [](auto &, auto &s) { s.workspace_bytes -= 256; }, DSOPT_ERR_WORKSPACE, "workspace|needed"},
    {"WorkspaceEmpty", [](auto &, auto &s) { s.workspace_bytes = 0; }, DSOPT_ERR_WORKSPACE, "workspace|0"},
    {"WorkspaceShifted",
     [](auto &, auto &s) {
         s.workspace = static_cast<char *>(s.workspace) + 1;
         --s.workspace_bytes; // the alignment leaves one byte too few
     },
     DSOPT_ERR_WORKSPACE, "workspace|needed"},
    {"ParamsNull", [](auto &, auto &s) { s.params = nullptr; }, DSOPT_ERR_ARGUMENT, "params"},
    {"StateNull", [](auto &, auto &s) { s.state = nullptr; }, DSOPT_ERR_ARGUMENT, "state"},
    {"StateWithAHole", [](auto &l, auto &) { l.state[4].data = nullptr; }, DSOPT_ERR_ARGUMENT,
     "exp_avg_sq|'layer.weight'|memory"},
    {"StateWithoutCounters", [](auto &l, auto &) { l.state[5].data = nullptr; }, DSOPT_ERR_ARGUMENT,
     "step|optimizer|memory"},
};

struct FunctionCase {
    bool apply;
    const Case *input;
};
std::vector<FunctionCase> function_cases() {
    std::vector<FunctionCase> list;
    for (const Case &c : kStepAndApply)
        for (const bool apply : {false, true}) list.push_back({apply, &c});
    for (const Case &c : kStepOnly) list.push_back({false, &c});
    for (const Case &c : kApplyOnly) list.push_back({true, &c});
    return list;
}

class StepValidation : public testing::TestWithParam<FunctionCase> {
protected:
    StepValidation() :
        model_({{50, DSOPT_DTYPE_F32, DSOPT_DTYPE_F32}, {60, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16}}),
        context_(make_context()),
        opt_(make_optimizer(context_, optimizer_desc(1.0))) {
        auto list = model_.registered();
        list[1].name = "layer.weight";
        const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
        must(dsopt_optimizer_add_group(opt_.get(), &group, list.data(), 2));
        must(dsopt_optimizer_workspace(opt_.get(), &workspace_bytes_));
        workspace_.reset(static_cast<char *>(allocate_shared(workspace_bytes_ + 256)));
        outs_.emplace_back(DSOPT_DTYPE_F32, 50, 0.0f);
        outs_.emplace_back(DSOPT_DTYPE_F32, 60, 0.0f);
        const dsopt_step step = valid_step();
        must(dsopt_optimizer_step(opt_.get(), &step));
    }
    dsopt_step valid_step() {
        arguments_.grads = list_of(model_.grads);
        arguments_.params = list_of(model_.params);
        arguments_.out = list_of(outs_);
        arguments_.workspace = workspace_.get();
        DSOPT_NEW(dsopt_step, step);
        step.grads = arguments_.grads.data();
        step.count = 2;
        step.params = arguments_.params.data();
        step.out = arguments_.out.data();
        step.lr = arguments_.lr.data();
        step.grad_scale = arguments_.scale.data();
        step.skip = arguments_.skip.data();
        step.report = arguments_.report.data();
        return step;
    }
    dsopt_step valid_step(bool apply) {
        dsopt_step step = valid_step();
        arguments_.state.clear();
        for (int64_t i = 0; i < state_count(opt_.get()); ++i)
            arguments_.state.push_back(state_info(opt_.get(), i).tensor);
        step.state = arguments_.state.data();
        step.state_count = int64_t(arguments_.state.size());
        if (apply) {
            step.workspace = workspace_.get();
            step.workspace_bytes = workspace_bytes_;
        }
        return step;
    }
    dsopt_status run(bool apply, const dsopt_step &step) {
        return apply ? dsopt_optimizer_apply(opt_.get(), &step) : dsopt_optimizer_step(opt_.get(), &step);
    }
    std::string state_bytes() {
        std::string all = model_.text() + state_text(opt_.get()) + hyper_text(opt_.get());
        for (const auto *buffers : {&model_.grads, &outs_})
            for (const Array &buffer : *buffers) all += buffer.text();
        all.append(reinterpret_cast<const char *>(arguments_.report.data()), arguments_.report.size() * 4);
        const dsopt_report report = report_of(opt_.get());
        return all + std::to_string(report.calls) + "/" + std::to_string(report.skipped) + "/" +
               std::to_string(report.grad_norm);
    }
    Model model_;
    std::vector<Array> outs_;
    Context context_;
    Optimizer opt_;
    Arguments arguments_;
    size_t workspace_bytes_ = 0;
    std::unique_ptr<char, FreeShared> workspace_;
};

TEST_P(StepValidation, NamesInvalidArgumentAndChangesNothing) {
    const auto [apply, input] = GetParam();
    dsopt_step step = valid_step(apply);
    const std::string before = state_bytes();
    input->change(arguments_, step);
    EXPECT_TRUE(refused(run(apply, step), input->status, input->words));
    EXPECT_TRUE(same(state_bytes(), before));
    step = valid_step(apply); // the same call with valid arguments
    EXPECT_OK(run(apply, step));
    EXPECT_FALSE(same(state_bytes(), before));
}

std::string case_name(const testing::TestParamInfo<FunctionCase> &info) {
    return std::string(info.param.apply ? "Apply" : "Step") + info.param.input->name;
}
INSTANTIATE_TEST_SUITE_P(Inputs, StepValidation, testing::ValuesIn(function_cases()), case_name);

TEST(StepRequirements, RefusesOptimizerWithoutGroups) {
    const Context context = make_context();
    const Optimizer opt = make_optimizer(context);
    DSOPT_NEW(dsopt_step, step);
    EXPECT_TRUE(refused(dsopt_optimizer_step(opt.get(), &step), DSOPT_ERR_STATE, "groups"));
    EXPECT_TRUE(refused(dsopt_optimizer_apply(opt.get(), &step), DSOPT_ERR_STATE, "groups"));
    EXPECT_TRUE(refused(dsopt_optimizer_step(opt.get(), nullptr), DSOPT_ERR_ARGUMENT, "step|NULL"));
    EXPECT_TRUE(refused(dsopt_optimizer_apply(opt.get(), nullptr), DSOPT_ERR_ARGUMENT, "step|NULL"));
}

TEST(StepRequirements, RefusesMissingParamMemoryOnlyIfNeeded) {
    const Model model(shapes_of({5, 6}));
    const Context context = make_context();
    const Optimizer opt = make_optimizer(context);
    auto list = model.registered();
    list[1].tensor.data = nullptr;
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
    ASSERT_OK(dsopt_optimizer_add_group(opt.get(), &group, list.data(), 2));
    std::vector<dsopt_tensor> grads = list_of(model.grads);
    DSOPT_NEW(dsopt_step, step);
    step.grads = grads.data();
    step.count = 2;
    const std::string before = model.text();
    EXPECT_TRUE(refused(dsopt_optimizer_step(opt.get(), &step), DSOPT_ERR_STATE, "'p1'|memory"));
    EXPECT_TRUE(same(model.text(), before));
    grads[1].data = nullptr; // without a gradient the parameter is not accessed
    EXPECT_OK(dsopt_optimizer_step(opt.get(), &step));
}

// Texts are truncated to their buffer. Format characters in names are not interpreted.
TEST(StepMessages, TruncateLongNames) {
    const Model model(shapes_of({5}));
    const Context context = make_context();
    const Optimizer opt = make_optimizer(context);
    const std::string name(1000, '%');
    auto list = model.registered();
    list[0].name = name.c_str();
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
    ASSERT_OK(dsopt_optimizer_add_group(opt.get(), &group, list.data(), 1));
    std::vector<dsopt_tensor> grads = list_of(model.grads);
    grads[0].numel = 4;
    DSOPT_NEW(dsopt_step, step);
    step.grads = grads.data();
    step.count = 1;
    EXPECT_TRUE(refused(dsopt_optimizer_step(opt.get(), &step), DSOPT_ERR_SHAPE, "gradient|%%%%"));
    EXPECT_LT(std::strlen(dsopt_last_error()), 1024u);
}

// ----------------------------------------------------------------------------------------------------------- zero grad
TEST(ZeroGradValidation, NamesInvalidTensorAndChangesNothing) {
    const Model model(shapes_of({10, 20, 30}));
    const Context context = make_context();
    struct InvalidList {
        std::function<void(std::vector<dsopt_tensor> &)> change;
        dsopt_status status;
        const char *words;
    };
    const InvalidList cases[] = {
        {[](auto &l) { l[2].dtype = DSOPT_DTYPE_I32; }, DSOPT_ERR_DTYPE, "gradient|2|I32"},
        {[](auto &l) { l[2].dtype = 77; }, DSOPT_ERR_DTYPE, "gradient|2|77"},
        {[](auto &l) { l[2].numel = -1; }, DSOPT_ERR_SHAPE, "gradient|2|-1"},
        {[](auto &l) { l[2].numel = INT64_MAX; }, DSOPT_ERR_SHAPE, "gradient|2|overflows"},
        {[](auto &l) { l[2].data = static_cast<char *>(l[2].data) + 1; }, DSOPT_ERR_ALIGNMENT, "gradient|2|aligned"},
        {[](auto &l) { l[2].reserved = 1; }, DSOPT_ERR_ARGUMENT, "gradient|2|reserved"},
    };
    std::string before;
    for (const Array &grad : model.grads) before += grad.text();
    for (const InvalidList &invalid : cases)
        for (const int32_t how : {DSOPT_ZERO_FILL, DSOPT_ZERO_NONE}) {
            std::vector<dsopt_tensor> list = list_of(model.grads);
            invalid.change(list);
            EXPECT_TRUE(
                refused(dsopt_zero_grad(context.get(), list.data(), 3, how, nullptr), invalid.status, invalid.words));
            for (const dsopt_tensor &tensor : list) EXPECT_NE(tensor.data, nullptr);
        }
    std::vector<dsopt_tensor> list = list_of(model.grads);
    EXPECT_TRUE(refused(dsopt_zero_grad(nullptr, list.data(), 3, DSOPT_ZERO_FILL, nullptr), DSOPT_ERR_ARGUMENT, "ctx"));
    EXPECT_TRUE(
        refused(dsopt_zero_grad(context.get(), nullptr, 3, DSOPT_ZERO_FILL, nullptr), DSOPT_ERR_ARGUMENT, "grad|NULL"));
    EXPECT_TRUE(refused(dsopt_zero_grad(context.get(), list.data(), -1, DSOPT_ZERO_FILL, nullptr), DSOPT_ERR_ARGUMENT,
                        "count|-1"));
    for (const int32_t how : {-1, 2, 99})
        EXPECT_TRUE(refused(dsopt_zero_grad(context.get(), list.data(), 3, how, nullptr), DSOPT_ERR_ARGUMENT, "how"));
    std::string after;
    for (const Array &grad : model.grads) after += grad.text();
    EXPECT_TRUE(same(before, after));
}

} // namespace refusals_step_tests
