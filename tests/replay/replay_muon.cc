// SPDX-License-Identifier: Apache-2.0
// muon: one rank in standard mode. A record has the weights of the original and those of the same recurrence in double
// precision. Each record is replayed with inputs of products in F32, F16 and BF16, 16-bit weights with and without
// masters. An orthogonalised matrix may differ from the exact one by a fraction of its norm, so weights may differ by
// that fraction of the length of the path, which is the sum of all lr * adjustment * |O| so far.
#include "cases.h"
#include "engine.h"
#include "layout.h"
#include <algorithm>
#include <cmath>
#include <cstdio>

namespace replay {
namespace {

struct Products {
    const char *name;
    int32_t dtype;
    double bound; // of |O - exact| / |exact|
};
constexpr Products kProducts[] = {
    {"f32", DSOPT_DTYPE_F32, 5e-5}, {"f16", DSOPT_DTYPE_F16, 5e-3}, {"bf16", DSOPT_DTYPE_BF16, 4e-2}};

struct Adjustment {
    const char *name;
    int32_t adjust;
};
constexpr Adjustment kAdjustments[] = {{"original", DSOPT_ADJUST_ORIGINAL},
                                       {"match_rms_adamw", DSOPT_ADJUST_MATCH_RMS_ADAMW},
                                       {"spectral_unclamped", DSOPT_ADJUST_SPECTRAL},
                                       {"none", DSOPT_ADJUST_NONE}};

double norm_of(const std::vector<double> &values) {
    double squares = 0;
    for (const double value : values) squares += value * value;
    return std::sqrt(squares);
}

/// Returns the norm of the errors if every value is rounded once to nearest.
double rounding_of(const std::vector<double> &values, int32_t dtype) {
    const int fraction = dtype == DSOPT_DTYPE_F32 ? 23 : dtype == DSOPT_DTYPE_F16 ? 10 : 7;
    const int least = dtype == DSOPT_DTYPE_F16 ? -14 : -126;
    double squares = 0;
    for (const double value : values) {
        const int exponent = value == 0 || !std::isfinite(value) ? least : std::max(std::ilogb(value), least);
        const double half = std::ldexp(0.5, exponent - fraction);
        squares += half * half;
    }
    return std::sqrt(squares);
}

/// One training with a record's gradients.
class MuonReplay {
public:
    MuonReplay(const Case &recorded, const Products &products, bool masters) :
        file_(recorded.file),
        comparison_(recorded.comparison),
        products_(products),
        masters_(masters),
        layout_(file_),
        dtypes_(dtype_list(file_, "dtype", layout_.param_count())),
        engine_(recorded.backend),
        optimizer_(engine_, make_desc(masters)) {
        steps_ = read_steps(file_);
        expect_one_rank(file_);
        const int64_t count = layout_.param_count();
        lr_ = &comparison_.input("lr", DSOPT_DTYPE_F64, {steps_});
        length_ = &comparison_.output("update_length", {steps_, count});
        if (file_.find("original_error") != nullptr)
            error_ = &comparison_.input("original_error", DSOPT_DTYPE_F64, {steps_, count});
        if (const Tensor *const present = file_.find("grad_present"))
            present_ = &comparison_.input("grad_present", present->dtype, {steps_, count});
        add_groups();
        for (size_t i = 0; i < params_.size(); ++i) {
            Param &p = params_[i];
            p.momentum_state =
                optimizer_.state_index("momentum_buffer", int64_t(i), DSOPT_DTYPE_F32, layout_.numel(p.index));
            if (has_master(p))
                p.master_state = optimizer_.state_index("master", int64_t(i), DSOPT_DTYPE_F32, layout_.numel(p.index));
        }
        layout_.finish();
    }

    void run() {
        for (Param &p : params_) p.before = weights(p);
        for (int64_t t = 0; t < steps_; ++t) {
            step(t);
            for (size_t i = 0; i < params_.size(); ++i) compare(t, int64_t(i));
        }
        const auto not_f32 = [](int32_t dtype) { return dtype != DSOPT_DTYPE_F32; };
        const bool is_16_bits = std::any_of(dtypes_.begin(), dtypes_.end(), not_f32);
        char text[160];
        std::snprintf(text, sizeof text, "; %s%s: exact %.2g recorded %.2g", products_.name,
                      !is_16_bits ? ""
                      : masters_  ? " masters"
                                  : " no masters",
                      used_exact_, used_recorded_);
        comparison_.note(text);
    }

private:
    struct Param {
        int64_t index; // in the record
        double decay;
        const Tensor *grad;
        bool grad_u8;
        const Tensor *exact, *exact_last, *param, *param_last, *momentum_last; // NULL: not recorded
        Array weights, gradient;
        int64_t momentum_state = -1, master_state = -1;
        std::vector<double> before = {}; // weights, or masters, before a step
        // Sums over the steps so far.
        double length = 0, original_error = 0, rounding = 0, recorded_rounding = 0;
    };

    static dsopt_optimizer_desc make_desc(bool masters) {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.nonfinite = DSOPT_NONFINITE_APPLY;
        if (!masters) desc.flags = DSOPT_OPTIMIZER_NO_MASTER;
        return desc;
    }
    bool has_master(const Param &p) const { return masters_ && dtypes_[size_t(p.index)] != DSOPT_DTYPE_F32; }

    dsopt_group make_group(size_t g) {
        dsopt_group group;
        check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_MUON), "dsopt_group_init");
        group.lr = layout_.hyper(g, "lr");
        group.momentum = layout_.hyper(g, "momentum");
        group.weight_decay = layout_.hyper(g, "weight_decay");
        group.eps = layout_.hyper(g, "eps");
        group.ns_a = layout_.hyper(g, "ns_a");
        group.ns_b = layout_.hyper(g, "ns_b");
        group.ns_c = layout_.hyper(g, "ns_c");
        group.ns_steps = int32_t(layout_.hyper(g, "ns_steps"));
        group.ns_dtype = products_.dtype;
        group.flags = 0;
        if (layout_.hyper_flag(g, "nesterov", true)) group.flags |= DSOPT_GROUP_NESTEROV;
        if (!layout_.common_flag("bias_correction", false)) group.flags |= DSOPT_GROUP_NO_BIAS_CORRECTION;
        const std::string word = layout_.hyper_word(g, "adjust");
        const auto *const found = std::find_if(std::begin(kAdjustments), std::end(kAdjustments),
                                               [&](const Adjustment &entry) { return word == entry.name; });
        if (found == std::end(kAdjustments)) fail("metadata adjust: '%s'", word.c_str());
        group.adjust = found->adjust;
        return group;
    }

    void add_groups() {
        const int32_t flags = layout_.common_flag("rows_are_inputs", false) ? DSOPT_PARAM_ROWS_ARE_INPUTS : 0;
        for (size_t g = 0; g < layout_.group_count(); ++g) {
            const dsopt_group group = make_group(g);
            std::vector<dsopt_param> list;
            for (const int64_t index : layout_.group(g)) {
                list.push_back(add_param(index, group.weight_decay));
                list.back().flags |= flags;
            }
            optimizer_.add_group(group, list);
        }
    }

    dsopt_param add_param(int64_t index, double decay) {
        const std::string item = "/" + layout_.item(index);
        const int64_t numel = layout_.numel(index);
        const int32_t dtype = dtypes_[size_t(index)];
        const bool grad_u8 = file_.find("grad_u8" + item) != nullptr;
        const Tensor *const grad = grad_u8 ? &comparison_.input("grad_u8" + item, DSOPT_DTYPE_U8, {steps_, numel})
                                           : &comparison_.input("grad" + item, dtype, {steps_, numel});
        const auto output = [&](const std::string &name, const std::vector<int64_t> &shape) {
            const Tensor *const tensor = file_.find(name + item);
            return tensor == nullptr ? nullptr : &comparison_.output(name + item, shape);
        };
        Param p{index,
                decay,
                grad,
                grad_u8,
                output("exact", {steps_, numel}),
                output("exact_last", {numel}),
                output("param", {steps_, numel}),
                output("param_last", {numel}),
                output("momentum_last", {numel}),
                Array(engine_, dtype, numel),
                Array(engine_, grad_u8 ? int32_t(DSOPT_DTYPE_F32) : dtype, numel)};
        if (p.exact == nullptr && p.exact_last == nullptr) fail("tensor exact%s is missing", item.c_str());
        if (p.param == nullptr && p.param_last == nullptr) fail("tensor param%s is missing", item.c_str());
        upload_initial(p, "param_init" + item, dtype, numel);
        params_.push_back(std::move(p));
        return layout_.param(index, params_.back().weights.tensor());
    }

    /// Weights in F32 may be recorded in BF16 if that is exact.
    void upload_initial(Param &p, const std::string &name, int32_t dtype, int64_t numel) {
        const Tensor *const found = file_.find(name);
        const bool narrow = found != nullptr && found->dtype == DSOPT_DTYPE_BF16 && dtype == DSOPT_DTYPE_F32;
        const Tensor &initial = comparison_.input(name, narrow ? int32_t(DSOPT_DTYPE_BF16) : dtype, {numel});
        if (!narrow) return p.weights.upload(initial.data);
        std::vector<float> values;
        for (int64_t i = 0; i < numel; ++i) values.push_back(float(initial.value(i)));
        p.weights.upload(values.data());
    }

    bool is_present(int64_t t, int64_t param) const {
        return present_ == nullptr || present_->value(t * layout_.param_count() + param) != 0;
    }

    void step(int64_t t) {
        std::vector<dsopt_tensor> grads;
        for (size_t i = 0; i < params_.size(); ++i) {
            Param &p = params_[i];
            const bool present = is_present(t, int64_t(i));
            if (present) upload_gradient(p, t);
            grads.push_back(present ? p.gradient.tensor() : p.gradient.absent());
        }
        optimizer_.set(DSOPT_ALL_GROUPS, DSOPT_KEY_LR, lr_->value(t));
        DSOPT_NEW(dsopt_step, step);
        step.grads = grads.data();
        step.count = int64_t(grads.size());
        optimizer_.step(step);
    }

    static void upload_gradient(Param &p, int64_t t) {
        if (!p.grad_u8) return p.gradient.upload(p.grad->row(t));
        std::vector<float> values;
        const int64_t numel = p.grad->row_numel();
        for (int64_t i = 0; i < numel; ++i) values.push_back(float((p.grad->value(t * numel + i) - 128) / 32));
        p.gradient.upload(values.data());
    }

    /// Returns masters where there are some.
    std::vector<double> weights(const Param &p) {
        return has_master(p) ? optimizer_.state_values(p.master_state) : p.weights.values();
    }

    void compare(int64_t t, int64_t i) {
        Param &p = params_[size_t(i)];
        const std::vector<double> now = weights(p);
        const int32_t dtype = dtypes_[size_t(p.index)];
        const bool rounds = dtype != DSOPT_DTYPE_F32 && !masters_;
        const int64_t column = t * layout_.param_count() + i;
        const double length = length_->value(column);
        // In fp32 a step rounds the decayed weight and the new weight.
        const double rounding = 2 * rounding_of(now, rounds ? dtype : int32_t(DSOPT_DTYPE_F32));
        p.length += length;
        p.rounding += rounds ? rounding / 2 : rounding;
        p.recorded_rounding += 2 * rounding_of(now, dtype); // by the original, which has no masters
        if (error_ != nullptr) p.original_error += length * error_->value(column);
        if (!rounds) compare_length(p, t, column, now, products_.bound * length + rounding);
        p.before = now;

        const double allowed = products_.bound * p.length + p.rounding + rounding_of(now, DSOPT_DTYPE_F32);
        const double from_recorded = allowed + p.original_error + p.recorded_rounding;
        const bool last = t + 1 == steps_;
        used_exact_ = std::max(used_exact_, compare_weights(p.exact, t, now, allowed));
        used_recorded_ = std::max(used_recorded_, compare_weights(p.param, t, now, from_recorded));
        if (has_master(p)) { // the weights are masters rounded once
            const double once = rounding_of(now, dtype);
            const std::vector<double> rounded = p.weights.values();
            (void)compare_weights(p.exact, t, rounded, allowed + once);
            (void)compare_weights(p.param, t, rounded, from_recorded + once);
        }
        if (!last) return;
        used_exact_ = std::max(used_exact_, compare_weights(p.exact_last, -1, now, allowed));
        used_recorded_ = std::max(used_recorded_, compare_weights(p.param_last, -1, now, from_recorded));
        if (p.momentum_last != nullptr) compare_momentum(p);
    }

    double compare_weights(const Tensor *recorded, int64_t t, const std::vector<double> &got, double allowed) {
        return recorded == nullptr ? 0 : comparison_.within_norm(*recorded, t, got, allowed);
    }

    /// Compares how far the step moved the weights, apart from the decay.
    void compare_length(const Param &p, int64_t t, int64_t column, const std::vector<double> &now, double allowed) {
        const bool present = is_present(t, column % layout_.param_count());
        const double decay = present ? 1 - lr_->value(t) * p.decay : 1;
        std::vector<double> moved(now.size());
        for (size_t k = 0; k < now.size(); ++k) moved[k] = now[k] - decay * p.before[k];
        comparison_.one(*length_, column, norm_of(moved), {Rule::within, allowed});
    }

    /// An original in BF16 rounds its momentum in each step: errors of half a unit add up to at most 1 / (1 - mu), here
    /// 8, of them in ten steps.
    void compare_momentum(const Param &p) {
        const bool narrow = p.momentum_last->dtype == DSOPT_DTYPE_BF16;
        const Rule rule = narrow ? Rule{Rule::within, 8 * 0x1p-9 * comparison_.peak(*p.momentum_last)} : Rule{};
        comparison_.whole(*p.momentum_last, optimizer_.state_values(p.momentum_state), rule);
    }

    GoldenFile &file_;
    Comparison &comparison_;
    const Products products_;
    const bool masters_;
    Layout layout_;
    std::vector<int32_t> dtypes_; // by index in the record
    Engine engine_;
    std::vector<Param> params_; // in optimizer order; outlives the optimizer, which borrows the weights
    Optimizer optimizer_;
    int64_t steps_ = 0;
    const Tensor *lr_ = nullptr, *length_ = nullptr, *error_ = nullptr, *present_ = nullptr;
    double used_exact_ = 0, used_recorded_ = 0; // largest fraction of the tolerance
};

} // namespace

void replay_muon(const Case &recorded) {
    const std::vector<int32_t> dtypes = dtype_list(recorded.file, "dtype", Layout(recorded.file).param_count());
    const bool has_f32_only = std::all_of(dtypes.begin(), dtypes.end(), [](int32_t d) { return d == DSOPT_DTYPE_F32; });
    // These records divide by |u| + eps. The engine divides by max(|u|, eps), which is as close as F32 products.
    const bool eps_added = recorded.file.flag("eps_added");
    for (const Products &products : kProducts)
        for (const bool masters : {true, false}) {
            if ((has_f32_only && !masters) || (eps_added && products.dtype != DSOPT_DTYPE_F32)) continue;
            MuonReplay(recorded, products, masters).run();
        }
}

} // namespace replay
