// SPDX-License-Identifier: Apache-2.0
// fp16_optimizer: the original's wrappers, that is masters, loss scale and clipping, around an inner optimizer.
#include "cases.h"
#include "engine.h"
#include "layout.h"
#include "loss_scale.h"
#include "onebit_record.h"
#include <algorithm>
#include <memory>
#include <optional>

namespace replay {
namespace {

/// An inner optimizer of the wrappers.
struct Inner {
    const char *name; ///< as in the metadata
    dsopt_group (*group)(Layout &layout, size_t index);
    bool has_trust_ratios; ///< one per tensor
};
constexpr Inner inners[] = {
    {"fused_adam", adam_group, false},         {"fused_lamb", lamb_group, true},
    {"onebit_adam", onebit_adam_group, false}, {"zero_one_adam", zero_one_adam_group, false},
    {"onebit_lamb", onebit_lamb_group, true},
};

/// Setup from the metadata, the same on every rank.
struct Setup {
    explicit Setup(GoldenFile &file);

    Layout layout;
    const Inner *inner;
    bool onebit;
    bool flat; ///< one master per group instead of one per parameter
    int64_t steps, ranks;
    int32_t dtype = 0;
    double max_norm;
    std::optional<dsopt_scaler_desc> scaler;
    std::vector<dsopt_group> groups;

private:
    void read_scaler(GoldenFile &file, int32_t profile);
};

const Inner *read_inner(GoldenFile &file) {
    const std::string &name = file.text("inner");
    for (const Inner &inner : inners) {
        if (name != inner.name) continue;
        return &inner;
    }
    fail("metadata inner: '%s' is not known to this program", name.c_str());
}

Setup::Setup(GoldenFile &file) :
    layout(file),
    inner(read_inner(file)),
    steps(read_steps(file)),
    ranks(read_ranks(file)) {
    if (file.text("dry_run_call") != "constructor")
        fail("metadata dry_run_call: the wrappers' constructor makes it, not '%s'", file.text("dry_run_call").c_str());
    file.ignore("min_sign_margin");
    const int32_t wrapper = read_wrapper(file);
    flat = wrapper == DSOPT_PROFILE_FUSED;
    if (flat && inner->has_trust_ratios)
        fail("metadata wrapper: around %s it must be unfused, flat masters would have one trust ratio", inner->name);

    const std::vector<int32_t> dtypes = dtype_list(file, "dtype", layout.param_count());
    if (dtypes.empty()) fail("metadata param_shapes: there are no parameters");
    dtype = dtypes[0];
    if (dtype == DSOPT_DTYPE_F32 || std::count(dtypes.begin(), dtypes.end(), dtype) != int64_t(dtypes.size()))
        fail("metadata dtype: a wrapper has one dtype of 16 bits, not '%s'", file.text("dtype").c_str());
    max_norm = layout.common("clip_grad");
    read_scaler(file, wrapper);
    for (size_t g = 0; g < layout.group_count(); ++g) groups.push_back(inner->group(layout, g));
    onebit = is_onebit(groups[0].algorithm);
    if (!onebit && ranks != 1) fail("metadata world_size: %s has one rank, not %lld", inner->name, (long long)ranks);
    layout.finish();
}

void Setup::read_scaler(GoldenFile &file, int32_t profile) {
    if (dtype == DSOPT_DTYPE_BF16) {
        // Never scaled, regardless of the metadata. The unfused wrapper's scaler counts calls nevertheless.
        for (const char *key : {"loss_scale_static", "init_scale", "min_scale", "scale_window"}) file.ignore(key);
        if (!flat) scaler = static_scale(profile, 1);
    } else if (file.has("loss_scale_static")) {
        scaler = static_scale(profile, positive(file, "loss_scale_static"));
    } else {
        scaler = dynamic_scale(file, profile);
    }
}

struct WrappedParam {
    const Tensor *grad, *param;
    Array weights, gradient;
};

/// One state tensor of the inner optimizer: a parameter's, or those of a group, concatenated.
struct State {
    const Tensor *start, *recorded;
    std::vector<int64_t> entries; ///< indices in the engine's state list
};

class Fp16Rank {
public:
    Fp16Rank(const Case &recorded, Setup &setup, Wire &wire, int64_t rank) :
        file_(recorded.file),
        comparison_(recorded.comparison),
        setup_(setup),
        rank_(rank),
        engine_(recorded.backend),
        comm_(engine_, wire, rank),
        scaler_(make_scaler()),
        optimizer_(engine_, make_desc()),
        scale_(file_, comparison_, rank, setup.steps) {
        add_groups();
        add_states();
        const int64_t steps = setup_.steps, count = setup_.layout.param_count();
        lr_ = &comparison_.input(file_.name_of("lr", rank_), DSOPT_DTYPE_F64, {steps});
        if (setup_.onebit) {
            record_ = std::make_unique<OneBitRecord>(file_, comparison_, setup.layout, setup_.groups, setup_.flat, wire,
                                                     rank, steps);
            record_->prepare(optimizer_);
        } else { // gradients are recorded after averaging
            (void)comparison_.input("grads_averaged", DSOPT_DTYPE_U8, {steps});
        }
        if (file_.find("grad_present") != nullptr)
            present_ = &comparison_.input("grad_present", DSOPT_DTYPE_U8, {steps, count});
        overflow_ = &scalar("overflow");
        scale_used_ = &scalar("loss_scale_used");
        divisor_ = &scalar("combined_scale");
        norm_ = &scalar("global_grad_norm");
        step_ = &scalar("step");
        step_state_ = optimizer_.state_index("step", -1, DSOPT_DTYPE_I32, count);
        if (setup_.inner->has_trust_ratios) {
            coeff_ = &comparison_.output(file_.name_of("lamb_coeff", rank_), {steps, count});
            coeff_state_ = optimizer_.state_index("trust_ratio", -1, DSOPT_DTYPE_F32, count);
        }
    }

    /// Compares the state after the original's constructor. The engine creates it when it is first requested, with the
    /// learning rate of that time.
    void compare_start() {
        for (const State &state : states_) comparison_.whole(*state.start, values(state));
    }

    void step(int64_t t) {
        std::vector<dsopt_tensor> grads;
        for (size_t param = 0; param < params_.size(); ++param) {
            WrappedParam &p = params_[param];
            const auto column = t * int64_t(params_.size()) + int64_t(param);
            const bool present = present_ == nullptr || present_->value(column) != 0;
            if (present) p.gradient.upload(p.grad->row(t));
            grads.push_back(present ? p.gradient.tensor() : p.gradient.absent());
        }
        optimizer_.set(DSOPT_ALL_GROUPS, DSOPT_KEY_LR, lr_->value(t));
        used_ = scaler_info().dynamic;
        DSOPT_NEW(dsopt_step, step);
        step.grads = grads.data();
        step.count = int64_t(grads.size());
        if (record_) record_->before();
        optimizer_.step(step);
    }

    void compare(int64_t t) {
        for (const WrappedParam &p : params_) comparison_.row(*p.param, t, p.weights.values());
        for (const State &state : states_) comparison_.row(*state.recorded, t, values(state));
        scale_.compare(t, scaler_info());
        comparison_.row(*scale_used_, t, {used_}, exact_rule);

        const dsopt_report report = optimizer_.report();
        if (report.scale_used != double(float(used_)))
            fail("step %lld: the report has the loss scale %.9g, the backward pass used %.9g", (long long)t,
                 report.scale_used, used_);
        const bool skipped = report.last_skipped != 0;
        if (!skipped) last_norm_ = report.grad_norm; // a skipped call does not change the original's attribute
        comparison_.row(*overflow_, t, {double(skipped || report.nonfinite != 0)});
        comparison_.row(*divisor_, t, {report.divisor});
        comparison_.row(*norm_, t, {last_norm_});

        // The original has one counter; the engine has one per parameter.
        const std::vector<double> steps = optimizer_.state_values(step_state_);
        const auto other = std::find_if(steps.begin(), steps.end(), [&](double step) { return step != steps[0]; });
        if (other != steps.end())
            fail("step %lld: the engine's counters are %g and %g", (long long)t, steps[0], *other);
        comparison_.row(*step_, t, {steps[0]});
        if (record_) record_->compare(t, optimizer_, false);
        if (coeff_ != nullptr) comparison_.row(*coeff_, t, optimizer_.state_values(coeff_state_));
    }

private:
    std::optional<Scaler> make_scaler() const {
        if (!setup_.scaler) return std::nullopt;
        return Scaler(engine_, *setup_.scaler);
    }
    dsopt_optimizer_desc make_desc() const {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.compat = DSOPT_COMPAT_DEEPSPEED;
        desc.masters = setup_.flat ? DSOPT_MASTERS_FLAT : DSOPT_MASTERS_PER_TENSOR;
        desc.max_norm = setup_.max_norm;
        if (scaler_) desc.scaler = scaler_->get();
        if (setup_.onebit) desc.data = comm_.get();
        return desc;
    }

    void add_groups() {
        for (size_t g = 0; g < setup_.groups.size(); ++g) {
            std::vector<dsopt_param> list;
            for (const int64_t index : setup_.layout.group(g)) list.push_back(add_param(index));
            optimizer_.add_group(setup_.groups[g], list);
        }
    }

    dsopt_param add_param(int64_t index) {
        const std::string &item = setup_.layout.item(index);
        const int64_t numel = setup_.layout.numel(index), steps = setup_.steps;
        const int32_t dtype = setup_.dtype;
        WrappedParam p{&comparison_.input(file_.name_of("grad16", rank_, item), dtype, {steps, numel}),
                       &output(file_.name_of("param16", rank_, item), dtype, {steps, numel}),
                       Array(engine_, dtype, numel), Array(engine_, dtype, numel)};
        p.weights.upload(comparison_.input("param16_init/" + item, dtype, {numel}).data);
        params_.push_back(std::move(p));
        return setup_.layout.param(index, params_.back().weights.tensor());
    }

    void add_states() {
        int64_t first_param = 0; // in optimizer order
        for (size_t g = 0; g < setup_.groups.size(); ++g) {
            const int64_t end = first_param + int64_t(setup_.layout.group(g).size());
            if (setup_.flat)
                add_state("g" + std::to_string(g), first_param, end);
            else
                for (int64_t p = first_param; p < end; ++p)
                    add_state(setup_.layout.item(setup_.layout.order()[size_t(p)]), p, p + 1);
            first_param = end;
        }
    }

    void add_state(const std::string &item, int64_t begin, int64_t end) {
        int64_t numel = 0;
        for (int64_t p = begin; p < end; ++p) numel += setup_.layout.numel(setup_.layout.order()[size_t(p)]);
        for (const std::string name : {"master", "exp_avg", "exp_avg_sq"}) {
            State state{&output(name + "_init/" + item, DSOPT_DTYPE_F32, {numel}),
                        &output(file_.name_of(name, rank_, item), DSOPT_DTYPE_F32, {setup_.steps, numel}),
                        {}};
            for (int64_t p = begin; p < end; ++p) {
                const int64_t own = setup_.layout.numel(setup_.layout.order()[size_t(p)]);
                state.entries.push_back(optimizer_.state_index(name, p, DSOPT_DTYPE_F32, own));
            }
            states_.push_back(std::move(state));
        }
    }

    const Tensor &output(const std::string &name, int32_t dtype, const std::vector<int64_t> &shape) const {
        const Tensor &tensor = comparison_.output(name, shape);
        if (tensor.dtype != dtype)
            fail("tensor %s is %s, expected %s", name.c_str(), dtype_name(tensor.dtype), dtype_name(dtype));
        return tensor;
    }
    const Tensor &scalar(const char *name) const {
        return comparison_.output(file_.name_of(name, rank_), {setup_.steps});
    }

    std::vector<double> values(const State &state) {
        std::vector<double> all;
        for (const int64_t entry : state.entries) {
            const std::vector<double> part = optimizer_.state_values(entry);
            all.insert(all.end(), part.begin(), part.end());
        }
        return all;
    }

    /// Without scaling the original's scaler keeps its initial state.
    dsopt_scaler_info scaler_info() const {
        if (scaler_) return scaler_->info();
        DSOPT_NEW(dsopt_scaler_info, info);
        info.scale = info.dynamic = 1;
        info.last_overflow = -1;
        return info;
    }

    GoldenFile &file_;
    Comparison &comparison_;
    const Setup &setup_;
    int64_t rank_;
    Engine engine_;
    Comm comm_;
    std::optional<Scaler> scaler_;
    std::vector<WrappedParam> params_; // in optimizer order; outlives the optimizer, which borrows the weights
    Optimizer optimizer_;
    std::vector<State> states_;
    ScaleRecord scale_;
    std::unique_ptr<OneBitRecord> record_;
    double used_ = 1, last_norm_ = 0;
    int64_t step_state_ = 0, coeff_state_ = 0;
    const Tensor *lr_ = nullptr, *present_ = nullptr, *overflow_ = nullptr, *scale_used_ = nullptr;
    const Tensor *divisor_ = nullptr, *norm_ = nullptr, *step_ = nullptr, *coeff_ = nullptr;
};

} // namespace

void replay_fp16_optimizer(const Case &recorded) {
    Setup setup(recorded.file);
    Wire wire(setup.ranks);
    std::vector<std::unique_ptr<Fp16Rank>> ranks;
    for (int64_t r = 0; r < setup.ranks; ++r) ranks.push_back(std::make_unique<Fp16Rank>(recorded, setup, wire, r));
    for (const auto &rank : ranks) rank->compare_start();
    for (int64_t t = 0; t < setup.steps; ++t) {
        wire.on_all([&](int64_t r) { ranks[size_t(r)]->step(t); });
        for (const auto &rank : ranks) rank->compare(t);
    }
}

} // namespace replay
