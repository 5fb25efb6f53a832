// SPDX-License-Identifier: Apache-2.0
// low_precision: one rank in standard mode, with moments and masters in formats other than F32. Everything must be equal
// to the recorded values, any NaN to any other.
#include "cases.h"
#include "engine.h"
#include "layout.h"
#include "loss_scale.h"
#include <algorithm>

namespace replay {
namespace {

struct StoredParam {
    const Tensor *grad, *weight;
    Array weights, gradient;
    struct State {
        const Tensor *recorded;
        int64_t index;
    };
    std::vector<State> state;
};

constexpr struct {
    const char *name;
    int32_t algorithm;
} kRules[] = {
    {"adam", DSOPT_ALGORITHM_ADAM},      {"adamw", DSOPT_ALGORITHM_ADAMW}, {"adam_legacy", DSOPT_ALGORITHM_ADAM_LEGACY},
    {"lamb", DSOPT_ALGORITHM_LAMB},      {"sgd", DSOPT_ALGORITHM_SGD},     {"lion", DSOPT_ALGORITHM_LION},
    {"adagrad", DSOPT_ALGORITHM_ADAGRAD}};
constexpr const char *kFormats[] = {"f32", "bf16", "bf16_random", "e4m3", "q8"}; // by enum dsopt_moment

/// Returns one format per group.
std::vector<int32_t> read_formats(GoldenFile &file, const char *key, size_t groups) {
    std::vector<int32_t> formats;
    const std::string text = file.text(key) + ",";
    for (size_t begin = 0; begin < text.size();) {
        const size_t comma = text.find(',', begin);
        const std::string word = text.substr(begin, comma - begin);
        begin = comma + 1;
        const auto found = std::find(std::begin(kFormats), std::end(kFormats), word);
        if (found == std::end(kFormats)) fail("metadata %s: '%s' is no format", key, word.c_str());
        formats.push_back(int32_t(found - std::begin(kFormats)));
    }
    if (formats.size() == 1) formats.resize(groups, formats[0]);
    if (formats.size() != groups) fail("metadata %s: must have one format, or one per group", key);
    return formats;
}

class LowPrecisionReplay {
public:
    explicit LowPrecisionReplay(const Case &recorded) :
        file_(recorded.file),
        comparison_(recorded.comparison),
        layout_(file_),
        engine_(recorded.backend),
        optimizer_(engine_, make_desc()),
        skip_value_(engine_, DSOPT_DTYPE_I32, 1) {
        steps_ = read_steps(file_);
        expect_one_rank(file_);
        if (file_.integer("block") != 256) fail("metadata block: not 256");
        const int64_t count = layout_.param_count();
        lr_ = &comparison_.input("lr", DSOPT_DTYPE_F64, {steps_});
        skip_ = &comparison_.input("skip", DSOPT_DTYPE_U8, {steps_});
        present_ = &comparison_.input("grad_present", DSOPT_DTYPE_U8, {steps_, count});
        add_groups();
        for (size_t i = 0; i < params_.size(); ++i) find_state(int64_t(i), layout_.order()[i]);
        step_ = &comparison_.output("state_step", {steps_, count});
        step_state_ = optimizer_.state_index("step", -1, DSOPT_DTYPE_I32, count);
        if (file_.text("rule") == "lamb") {
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
        const int64_t count = layout_.param_count();
        dtypes_ = dtype_list(file_, "dtype", count);
        grad_dtypes_ = dtype_list(file_, "grad_dtype", count);
        offsets_ = read_integers(file_, "offsets");
        if (int64_t(offsets_.size()) != count) fail("metadata offsets: not one per parameter");
        f32_moments_ = read_integers(file_, "f32_moments");
        const std::string &masters = file_.text("masters");
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.nonfinite = DSOPT_NONFINITE_APPLY;
        desc.seed = uint64_t(file_.integer("rounding_seed"));
        const bool has_16_bits = std::count(dtypes_.begin(), dtypes_.end(), DSOPT_DTYPE_F32) != count;
        if (masters == "remainder")
            desc.masters = DSOPT_MASTERS_REMAINDER;
        else if (masters == "none" && has_16_bits)
            desc.flags |= DSOPT_OPTIMIZER_NO_MASTER;
        else if (masters != "none" && masters != "f32")
            fail("metadata masters: '%s'", masters.c_str());
        if (file_.flag("stochastic_rounding")) desc.flags |= DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
        return desc;
    }

    dsopt_group make_group(size_t g, int32_t algorithm) {
        dsopt_group group;
        check(dsopt_group_init(&group, sizeof group, algorithm), "dsopt_group_init");
        const double beta1 = layout_.hyper(g, "beta1"), beta2 = layout_.hyper(g, "beta2"),
                     eps = layout_.hyper(g, "eps");
        const bool correction = layout_.hyper_flag(g, "bias_correction", true);
        group.lr = layout_.hyper(g, "lr");
        group.weight_decay = layout_.hyper(g, "weight_decay");
        const bool adagrad = algorithm == DSOPT_ALGORITHM_ADAGRAD, lion = algorithm == DSOPT_ALGORITHM_LION;
        const bool sgd = algorithm == DSOPT_ALGORITHM_SGD;
        if (!adagrad && !sgd) group.beta1 = beta1, group.beta2 = beta2;
        if (!lion && !sgd) group.eps = eps;
        if (!adagrad && !lion && !sgd && !correction) group.flags |= DSOPT_GROUP_NO_BIAS_CORRECTION;
        if (layout_.hyper_flag(g, "eps_inside_sqrt", false)) group.flags |= DSOPT_GROUP_EPS_INSIDE_SQRT;
        if (algorithm == DSOPT_ALGORITHM_LAMB) {
            group.min_trust = layout_.hyper(g, "min_coeff");
            group.max_trust = layout_.hyper(g, "max_coeff");
        }
        if (sgd) {
            group.momentum = layout_.hyper(g, "momentum");
            group.dampening = layout_.hyper(g, "dampening");
            if (layout_.hyper_flag(g, "nesterov", false)) group.flags |= DSOPT_GROUP_NESTEROV;
        }
        if (adagrad) {
            group.lr_decay = layout_.hyper(g, "lr_decay");
            group.initial_accumulator_value = layout_.hyper(g, "initial_accumulator_value");
        }
        return group;
    }

    void add_groups() {
        const std::string &name = file_.text("rule");
        const auto *const rule =
            std::find_if(std::begin(kRules), std::end(kRules), [&](const auto &entry) { return name == entry.name; });
        if (rule == std::end(kRules)) fail("metadata rule: '%s'", name.c_str());
        const std::vector<int32_t> first = read_formats(file_, "exp_avg_format", layout_.group_count());
        const std::vector<int32_t> second = read_formats(file_, "exp_avg_sq_format", layout_.group_count());
        for (size_t g = 0; g < layout_.group_count(); ++g) {
            dsopt_group group = make_group(g, rule->algorithm);
            group.exp_avg_format = first[g];
            group.exp_avg_sq_format = second[g];
            std::vector<dsopt_param> list;
            for (const int64_t index : layout_.group(g)) list.push_back(add_param(index));
            optimizer_.add_group(group, list);
        }
    }

    dsopt_param add_param(int64_t index) {
        const std::string item = "/" + layout_.item(index);
        const int64_t numel = layout_.numel(index);
        const int32_t dtype = dtypes_[size_t(index)], grad_dtype = grad_dtypes_[size_t(index)];
        StoredParam p{&comparison_.input("grad" + item, grad_dtype, {steps_, numel}),
                      &comparison_.output("param" + item, {steps_, numel}),
                      Array(engine_, dtype, numel),
                      Array(engine_, grad_dtype, numel),
                      {}};
        p.weights.upload(comparison_.input("param_init" + item, dtype, {numel}).data);
        params_.push_back(std::move(p));
        dsopt_param param = layout_.param(index, params_.back().weights.tensor());
        param.offset = offsets_[size_t(index)];
        if (std::find(f32_moments_.begin(), f32_moments_.end(), index) != f32_moments_.end())
            param.flags |= DSOPT_PARAM_F32_MOMENTS;
        return param;
    }

    /// Every state tensor must be recorded, with its dtype and size.
    void find_state(int64_t param, int64_t index) {
        for (const std::string &name : optimizer_.state_names(param)) {
            const Tensor *const recorded = file_.find(name + "/" + layout_.item(index));
            if (recorded == nullptr) fail("tensor %s/%s is missing", name.c_str(), layout_.item(index).c_str());
            params_[size_t(param)].state.push_back(
                {recorded, optimizer_.state_index(name, param, recorded->dtype, recorded->row_numel())});
        }
    }

    void step(int64_t t) {
        std::vector<dsopt_tensor> grads;
        for (size_t i = 0; i < params_.size(); ++i) {
            StoredParam &p = params_[i];
            const bool present = present_->value(t * layout_.param_count() + int64_t(i)) != 0;
            if (present) p.gradient.upload(p.grad->row(t));
            grads.push_back(present ? p.gradient.tensor() : p.gradient.absent());
        }
        const auto skip = int32_t(skip_->value(t));
        skip_value_.upload(&skip);
        optimizer_.set(DSOPT_ALL_GROUPS, DSOPT_KEY_LR, lr_->value(t));
        DSOPT_NEW(dsopt_step, step);
        step.grads = grads.data();
        step.count = int64_t(grads.size());
        step.skip = static_cast<const int32_t *>(skip_value_.data());
        optimizer_.step(step);
    }

    void compare(int64_t t) {
        for (StoredParam &p : params_) {
            comparison_.row(*p.weight, t, p.weights.values(), exact_rule);
            for (const StoredParam::State &state : p.state)
                comparison_.row(*state.recorded, t, optimizer_.state_values(state.index), exact_rule);
        }
        comparison_.row(*step_, t, optimizer_.state_values(step_state_), exact_rule);
        if (coeff_ != nullptr) comparison_.row(*coeff_, t, optimizer_.state_values(coeff_state_), exact_rule);
    }

    GoldenFile &file_;
    Comparison &comparison_;
    Layout layout_;
    std::vector<int32_t> dtypes_, grad_dtypes_; // by parameter index
    std::vector<int64_t> offsets_, f32_moments_;
    Engine engine_;
    std::vector<StoredParam> params_; // in optimizer order; outlives the optimizer, which borrows the weights
    Optimizer optimizer_;
    Array skip_value_;
    int64_t steps_ = 0, step_state_ = 0, coeff_state_ = 0;
    const Tensor *lr_ = nullptr, *skip_ = nullptr, *present_ = nullptr, *step_ = nullptr, *coeff_ = nullptr;
};

} // namespace

void replay_low_precision(const Case &recorded) { LowPrecisionReplay(recorded).run(); }

} // namespace replay
