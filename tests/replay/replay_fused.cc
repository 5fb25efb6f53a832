// SPDX-License-Identifier: Apache-2.0
// fused_adam and fused_lamb: one rank, no loss scaler, moments in the parameter's dtype.
#include "cases.h"
#include "engine.h"
#include "layout.h"

namespace replay {
namespace {

struct FusedParam {
    const Tensor *grad, *param, *exp_avg, *exp_avg_sq, *param_out /* NULL: not recorded */;
    int64_t exp_avg_state = 0, exp_avg_sq_state = 0;
    Array weights, gradient;
    std::vector<Array> out; ///< zero or one element
};

class FusedReplay {
public:
    FusedReplay(const Case &recorded, bool lamb) :
        file_(recorded.file),
        comparison_(recorded.comparison),
        lamb_(lamb),
        layout_(file_),
        engine_(recorded.backend),
        optimizer_(engine_, make_desc()),
        scale_(engine_, DSOPT_DTYPE_F32, 1) {
        steps_ = read_steps(file_);
        expect_one_rank(file_);
        if (lamb_) {
            const auto divisor = float(layout_.common("grad_divisor"));
            scaled_ = divisor != 1;
            scale_.upload(&divisor);
        }
        add_groups();
        for (size_t param = 0; param < params_.size(); ++param) {
            FusedParam &p = params_[param];
            p.exp_avg_state = find_state("exp_avg", param, *p.exp_avg);
            p.exp_avg_sq_state = find_state("exp_avg_sq", param, *p.exp_avg_sq);
        }
        const int64_t count = layout_.param_count();
        lr_ = &comparison_.input("lr", DSOPT_DTYPE_F64, {steps_});
        if (file_.find("grad_present") != nullptr)
            present_ = &comparison_.input("grad_present", DSOPT_DTYPE_U8, {steps_, count});
        step_ = &comparison_.output("state_step", {steps_, count});
        step_state_ = optimizer_.state_index("step", -1, DSOPT_DTYPE_I32, count);
        if (lamb_) {
            coeff_ = &comparison_.output("lamb_coeff", {steps_, count});
            coeff_state_ = optimizer_.state_index("trust_ratio", -1, DSOPT_DTYPE_F32, count);
        }
        layout_.finish();
    }

    void run() {
        for (int64_t t = 0; t < steps_; ++t) {
            step(t);
            compare(t);
        }
    }

private:
    dsopt_optimizer_desc make_desc() {
        dtypes_ = dtype_list(file_, "dtype", layout_.param_count());
        grad_dtypes_ = lamb_ ? dtype_list(file_, "grad_dtype", layout_.param_count()) : dtypes_;
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.compat = DSOPT_COMPAT_DEEPSPEED;
        desc.nonfinite = DSOPT_NONFINITE_APPLY; // the original does not check
        for (const int32_t dtype : dtypes_)
            if (dtype != DSOPT_DTYPE_F32) desc.flags = DSOPT_OPTIMIZER_NO_MASTER;
        return desc;
    }

    void add_groups() {
        for (size_t g = 0; g < layout_.group_count(); ++g) {
            std::vector<dsopt_param> list;
            for (const int64_t index : layout_.group(g)) list.push_back(add_param(index));
            optimizer_.add_group(lamb_ ? lamb_group(layout_, g) : adam_group(layout_, g), list);
        }
    }

    dsopt_param add_param(int64_t index) {
        const std::string item = "/" + layout_.item(index);
        const int64_t numel = layout_.numel(index);
        const int32_t dtype = dtypes_[size_t(index)], grad_dtype = grad_dtypes_[size_t(index)];
        FusedParam p{&comparison_.input("grad" + item, grad_dtype, {steps_, numel}),
                     &output("param" + item, dtype, numel),
                     &output("exp_avg" + item, dtype, numel),
                     &output("exp_avg_sq" + item, dtype, numel),
                     lamb_ ? file_.find("param_out" + item) : nullptr,
                     0,
                     0,
                     Array(engine_, dtype, numel),
                     Array(engine_, grad_dtype, numel),
                     {}};
        if (p.param_out != nullptr) {
            // The original writes this copy in the gradient's type.
            (void)output(p.param_out->name, grad_dtype, numel);
            p.out.emplace_back(engine_, grad_dtype, numel);
            has_out_ = true;
        }
        p.weights.upload(comparison_.input("param_init" + item, dtype, {numel}).data);
        params_.push_back(std::move(p));
        return layout_.param(index, params_.back().weights.tensor());
    }

    const Tensor &output(const std::string &name, int32_t dtype, int64_t numel) const {
        const Tensor &tensor = comparison_.output(name, {steps_, numel});
        if (tensor.dtype != dtype)
            fail("tensor %s is %s, expected %s", name.c_str(), dtype_name(tensor.dtype), dtype_name(dtype));
        return tensor;
    }

    /// The state must have the recorded dtype: an engine with fp32 moments instead would not reproduce the original.
    int64_t find_state(const char *name, size_t param, const Tensor &recorded) const {
        return optimizer_.state_index(name, int64_t(param), recorded.dtype, recorded.row_numel());
    }

    void step(int64_t t) {
        std::vector<dsopt_tensor> grads, outs;
        for (size_t param = 0; param < params_.size(); ++param) {
            FusedParam &p = params_[param];
            const auto column = t * layout_.param_count() + int64_t(param);
            const bool present = present_ == nullptr || present_->value(column) != 0;
            if (present) p.gradient.upload(p.grad->row(t));
            grads.push_back(present ? p.gradient.tensor() : p.gradient.absent());
            outs.push_back(p.out.empty() ? p.weights.absent() : p.out[0].tensor());
        }
        optimizer_.set(DSOPT_ALL_GROUPS, DSOPT_KEY_LR, lr_->value(t));
        DSOPT_NEW(dsopt_step, step);
        step.grads = grads.data();
        step.count = int64_t(grads.size());
        if (has_out_) step.out = outs.data();
        if (scaled_) step.grad_scale = static_cast<const float *>(scale_.data());
        optimizer_.step(step);
    }

    void compare(int64_t t) {
        for (FusedParam &p : params_) {
            comparison_.row(*p.param, t, p.weights.values());
            comparison_.row(*p.exp_avg, t, optimizer_.state_values(p.exp_avg_state));
            comparison_.row(*p.exp_avg_sq, t, optimizer_.state_values(p.exp_avg_sq_state));
            if (p.param_out != nullptr) comparison_.row(*p.param_out, t, p.out[0].values());
        }
        comparison_.row(*step_, t, optimizer_.state_values(step_state_));
        if (coeff_ != nullptr) comparison_.row(*coeff_, t, optimizer_.state_values(coeff_state_));
    }

    GoldenFile &file_;
    Comparison &comparison_;
    bool lamb_;
    Layout layout_;
    std::vector<int32_t> dtypes_, grad_dtypes_; // by parameter index
    Engine engine_;
    std::vector<FusedParam> params_; // in optimizer order; outlives the optimizer, which borrows the weights
    Optimizer optimizer_;
    Array scale_;
    int64_t steps_ = 0, step_state_ = 0, coeff_state_ = 0;
    bool scaled_ = false, has_out_ = false;
    const Tensor *lr_ = nullptr, *present_ = nullptr, *step_ = nullptr, *coeff_ = nullptr;
};

} // namespace

void replay_fused_adam(const Case &recorded) { FusedReplay(recorded, false).run(); }
void replay_fused_lamb(const Case &recorded) { FusedReplay(recorded, true).run(); }

} // namespace replay
