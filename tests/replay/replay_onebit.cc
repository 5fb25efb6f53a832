// SPDX-License-Identifier: Apache-2.0
// onebit_adam, zero_one_adam and onebit_lamb without a wrapper: fp32, ranks as threads.
#include "cases.h"
#include "engine.h"
#include "layout.h"
#include "onebit_record.h"
#include "wire.h"
#include <cstring>

namespace replay {
namespace {

struct OnebitParam {
    const Tensor *grad, *param, *exp_avg, *exp_avg_sq;
    int64_t exp_avg_state = 0, exp_avg_sq_state = 0;
    Array weights, gradient;
};

class OneBitRank {
public:
    OneBitRank(const Case &recorded, Layout &layout, const std::vector<dsopt_group> &groups, Wire &wire, int64_t rank) :
        file_(recorded.file),
        comparison_(recorded.comparison),
        layout_(layout),
        groups_(groups),
        rank_(rank),
        engine_(recorded.backend),
        comm_(engine_, wire, rank),
        steps_(read_steps(file_)) {
        for (const int64_t index : layout_.order()) {
            const std::string &item = layout_.item(index);
            const int64_t numel = layout_.numel(index);
            const auto output = [&](const char *name) {
                return &comparison_.output(file_.name_of(name, rank_, item), {steps_, numel});
            };
            OnebitParam p{&comparison_.input(file_.name_of("grad", rank_, item), DSOPT_DTYPE_F32, {steps_, numel}),
                          output("param"),
                          output("exp_avg"),
                          output("exp_avg_sq"),
                          0,
                          0,
                          Array(engine_, DSOPT_DTYPE_F32, numel),
                          Array(engine_, DSOPT_DTYPE_F32, numel)};
            p.weights.upload(comparison_.input("param_init/" + item, DSOPT_DTYPE_F32, {numel}).data);
            params_.push_back(std::move(p));
        }
        lr_ = &comparison_.input(file_.name_of("lr", rank_), DSOPT_DTYPE_F64, {steps_});
        record_ = std::make_unique<OneBitRecord>(file_, comparison_, layout_, groups_, false, wire, rank, steps_);
        if (groups_[0].algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB)
            coeff_ = &comparison_.output(file_.name_of("lamb_coeff", rank_), {steps_, layout_.param_count()});
        make();
    }

    void step(int64_t t) {
        std::vector<dsopt_tensor> grads;
        for (OnebitParam &p : params_) {
            p.gradient.upload(p.grad->row(t));
            grads.push_back(p.gradient.tensor());
        }
        optimizer_->set(DSOPT_ALL_GROUPS, DSOPT_KEY_LR, lr_->value(t));
        record_->before();
        DSOPT_NEW(dsopt_step, step);
        step.grads = grads.data();
        step.count = int64_t(grads.size());
        optimizer_->step(step);
    }

    void compare(int64_t t) {
        for (const OnebitParam &p : params_) {
            comparison_.row(*p.param, t, p.weights.values());
            comparison_.row(*p.exp_avg, t, optimizer_->state_values(p.exp_avg_state));
            comparison_.row(*p.exp_avg_sq, t, optimizer_->state_values(p.exp_avg_sq_state));
        }
        record_->compare(t, *optimizer_, t == 0);
        if (coeff_ != nullptr)
            comparison_.row(*coeff_, t,
                            optimizer_->state_values(
                                optimizer_->state_index("trust_ratio", -1, DSOPT_DTYPE_F32, layout_.param_count())));
    }

    std::vector<char> save() {
        std::vector<char> bytes;
        DSOPT_NEW(dsopt_io, io);
        io.user = &bytes;
        io.write = [](void *user, const void *data, size_t size) {
            auto &to = *static_cast<std::vector<char> *>(user);
            const auto *from = static_cast<const char *>(data);
            to.insert(to.end(), from, from + size);
            return 0;
        };
        io.flags = DSOPT_IO_PARAMS;
        check(dsopt_optimizer_save(optimizer_->get(), nullptr, &io), "dsopt_optimizer_save");
        return bytes;
    }
    /// Creates a new optimizer and loads what another rank saved.
    void resume(const std::vector<char> &bytes) {
        make();
        DSOPT_NEW(dsopt_io, io);
        io.user = const_cast<std::vector<char> *>(&bytes);
        io.read = [](void *user, uint64_t offset, void *data, size_t size) {
            const auto &from = *static_cast<const std::vector<char> *>(user);
            if (offset > from.size() || size > from.size() - offset) return 1;
            std::memcpy(data, from.data() + offset, size);
            return 0;
        };
        io.total = bytes.size();
        io.flags = DSOPT_IO_PARAMS;
        check(dsopt_optimizer_load(optimizer_->get(), nullptr, &io), "dsopt_optimizer_load");
    }

private:
    void make() {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.compat = DSOPT_COMPAT_DEEPSPEED;
        desc.nonfinite = DSOPT_NONFINITE_APPLY; // the original does not check
        desc.data = comm_.get();
        optimizer_.reset();
        optimizer_ = std::make_unique<Optimizer>(engine_, desc);
        size_t param = 0;
        for (size_t g = 0; g < groups_.size(); ++g) {
            std::vector<dsopt_param> list;
            for (const int64_t index : layout_.group(g)) {
                list.push_back(layout_.param(index, params_[param++].weights.tensor()));
                if (file_.find("exp_avg_mask/" + layout_.item(index)) != nullptr)
                    list.back().flags = DSOPT_PARAM_MASKED;
            }
            optimizer_->add_group(groups_[g], list);
        }
        for (param = 0; param < params_.size(); ++param) {
            OnebitParam &p = params_[param];
            const int64_t index = layout_.order()[param];
            p.exp_avg_state = optimizer_->state_index("exp_avg", int64_t(param), DSOPT_DTYPE_F32, layout_.numel(index));
            p.exp_avg_sq_state =
                optimizer_->state_index("exp_avg_sq", int64_t(param), DSOPT_DTYPE_F32, layout_.numel(index));
        }
        record_->prepare(*optimizer_);
    }

    GoldenFile &file_;
    Comparison &comparison_;
    Layout &layout_;
    const std::vector<dsopt_group> &groups_;
    int64_t rank_;
    Engine engine_;
    Comm comm_;
    int64_t steps_;
    std::vector<OnebitParam> params_; // in optimizer order; outlives the optimizer, which borrows the weights
    std::unique_ptr<Optimizer> optimizer_;
    std::unique_ptr<OneBitRecord> record_;
    const Tensor *lr_ = nullptr, *coeff_ = nullptr;
};

void replay_onebit(const Case &recorded, dsopt_group (*make_group)(Layout &, size_t)) {
    GoldenFile &file = recorded.file;
    file.ignore("min_sign_margin");
    Layout layout(file);
    const int64_t steps = read_steps(file);
    if (file.text("dry_run_call") != "0")
        fail("metadata dry_run_call: without a wrapper the first call is it, not '%s'",
             file.text("dry_run_call").c_str());
    const int64_t resume = file.has("resume_before_call") ? file.integer("resume_before_call") : -1;
    Wire wire(read_ranks(file));
    std::vector<dsopt_group> groups;
    for (size_t g = 0; g < layout.group_count(); ++g) groups.push_back(make_group(layout, g));
    layout.finish();
    std::vector<std::unique_ptr<OneBitRank>> ranks;
    for (int64_t r = 0; r < wire.ranks(); ++r)
        ranks.push_back(std::make_unique<OneBitRank>(recorded, layout, groups, wire, r));
    for (int64_t t = 0; t < steps; ++t) {
        if (t == resume) {
            const std::vector<char> checkpoint = ranks[0]->save();
            for (const auto &rank : ranks) rank->resume(checkpoint);
        }
        wire.on_all([&](int64_t r) { ranks[size_t(r)]->step(t); });
        for (const auto &rank : ranks) rank->compare(t);
    }
}

} // namespace

void replay_onebit_adam(const Case &recorded) { replay_onebit(recorded, onebit_adam_group); }
void replay_zero_one_adam(const Case &recorded) { replay_onebit(recorded, zero_one_adam_group); }
void replay_onebit_lamb(const Case &recorded) { replay_onebit(recorded, onebit_lamb_group); }

} // namespace replay
