// SPDX-License-Identifier: Apache-2.0
#include "onebit_record.h"
#include <algorithm>
#include <cstring>

namespace replay {
bool is_onebit(int32_t algorithm) {
    return algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM || algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM ||
           algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB;
}

dsopt_group onebit_adam_group(Layout &layout, size_t index) {
    dsopt_group group = common_group(layout, index, DSOPT_ALGORITHM_ONEBIT_ADAM);
    group.freeze_step = int64_t(layout.common("freeze_step"));
    if (layout.hyper_flag(index, "non_freeze", false)) group.flags |= DSOPT_GROUP_NON_FREEZE;
    return group;
}

dsopt_group zero_one_adam_group(Layout &layout, size_t index) {
    dsopt_group group = common_group(layout, index, DSOPT_ALGORITHM_ZERO_ONE_ADAM);
    group.freeze_step = int64_t(layout.common("var_freeze_step"));
    group.var_interval_steps = int64_t(layout.common("var_update_scaler"));
    group.local_interval_steps = int64_t(layout.common("local_step_scaler"));
    group.max_local_interval = int64_t(layout.common("local_step_clipper"));
    return group;
}

dsopt_group onebit_lamb_group(Layout &layout, size_t index) {
    dsopt_group group = common_group(layout, index, DSOPT_ALGORITHM_ONEBIT_LAMB);
    group.freeze_step = int64_t(layout.common("freeze_step"));
    group.min_trust = layout.hyper(index, "min_coeff");
    group.max_trust = layout.hyper(index, "max_coeff");
    group.trust_beta = layout.common("coeff_beta");
    group.trust_threshold = layout.common("factor_threshold");
    group.trust_min_change = layout.common("factor_min");
    group.trust_max_change = layout.common("factor_max");
    return group;
}

std::vector<Vector> compressed_vectors(const Layout &layout, const std::vector<dsopt_group> &groups, bool flat) {
    std::vector<Vector> vectors;
    if (groups[0].algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB) {
        vectors.push_back({"flat", 0, false});
        for (const int64_t index : layout.order()) vectors[0].numel += layout.numel(index);
        return vectors;
    }
    for (size_t g = 0; g < groups.size(); ++g) {
        const bool frozen = groups[g].flags & DSOPT_GROUP_NON_FREEZE;
        if (flat) vectors.push_back({"g" + std::to_string(g), 0, frozen});
        for (const int64_t index : layout.group(g)) {
            if (flat)
                vectors.back().numel += layout.numel(index);
            else
                vectors.push_back({layout.item(index), layout.numel(index), frozen});
        }
    }
    return vectors;
}

OneBitRecord::OneBitRecord(GoldenFile &file, Comparison &comparison, Layout &layout,
                           const std::vector<dsopt_group> &groups, bool flat, Wire &wire, int64_t rank, int64_t steps) :
    file_(file),
    comparison_(comparison),
    layout_(layout),
    wire_(wire),
    rank_(rank),
    steps_(steps),
    algorithm_(groups[0].algorithm),
    groups_(groups.size()) {
    (void)comparison_.input("grads_averaged", DSOPT_DTYPE_U8, {steps_}); // gradients are recorded after averaging
    const std::vector<Vector> vectors = compressed_vectors(layout_, groups, flat);
    std::vector<int64_t> numels;
    for (const Vector &vector : vectors)
        if (!vector.frozen) numels.push_back(vector.numel);
    padded_ = padded_layout(numels, wire.ranks());
    int64_t vector_index = 0;
    for (const Vector &vector : vectors) {
        if (wire.ranks() == 1) break; // nothing is compressed
        const Padded padded = padded_layout({vector.numel}, wire.ranks())[0];
        const auto output = [&](const char *name, std::vector<int64_t> shape) {
            shape.insert(shape.begin(), steps_);
            return &comparison_.output(file_.name_of(name, rank_, vector.item), shape);
        };
        errors_.push_back({output("worker_error", {padded.padded}), output("server_error", {padded.chunk}),
                           output("worker_scale", {}), output("server_scale", {}), vector.frozen ? -1 : vector_index,
                           padded.padded, padded.chunk});
        vector_index += !vector.frozen;
        if (algorithm_ == DSOPT_ALGORITHM_ONEBIT_LAMB && padded.padded > vector.numel)
            pad_ = output("exp_avg_pad", {padded.padded - vector.numel});
    }
    for (size_t g = 0; g < groups_; ++g) group_of_.insert(group_of_.end(), layout_.group(g).size(), g);
    const char *state = algorithm_ == DSOPT_ALGORITHM_ZERO_ONE_ADAM ? "momentum_accumulator" : "exp_avg_sq_fresh";
    if (algorithm_ == DSOPT_ALGORITHM_ONEBIT_ADAM) return;
    for (size_t p = 0; p < layout_.order().size(); ++p) {
        const int64_t index = layout_.order()[p];
        const bool joins = flat && algorithm_ == DSOPT_ALGORITHM_ZERO_ONE_ADAM;
        if (joins && p > 0 && group_of_[p] == group_of_[p - 1]) {
            per_param_.back().params.push_back(int64_t(p));
            continue;
        }
        const std::string item = joins ? "g" + std::to_string(group_of_[p]) : layout_.item(index);
        per_param_.push_back({file_.find(file_.name_of(state, rank_, item)), state, {int64_t(p)}});
        if (per_param_.back().recorded == nullptr) fail("tensor %s of %s is missing", state, item.c_str());
    }
}

const Tensor *OneBitRecord::scalar(const char *name) const {
    return &comparison_.output(file_.name_of(name, rank_), {steps_});
}

void OneBitRecord::prepare(Optimizer &optimizer) {
    for (size_t p = 0; p < layout_.order().size(); ++p) {
        const int64_t index = layout_.order()[p];
        const std::string name = "exp_avg_mask/" + layout_.item(index);
        if (file_.find(name) == nullptr) continue;
        const Tensor &mask = comparison_.input(name, DSOPT_DTYPE_F32, {layout_.numel(index)});
        const int64_t entry = optimizer.state_index("mask", int64_t(p), DSOPT_DTYPE_F32, layout_.numel(index));
        check(dsopt_optimizer_import(optimizer.get(), entry, mask.data, size_t(mask.numel) * sizeof(float)),
              "dsopt_optimizer_import");
    }
}

std::vector<double> OneBitRecord::words(Optimizer &optimizer, const char *name, int64_t numel) {
    const int32_t dtype = std::strncmp(name, "trust", 5) == 0 ? DSOPT_DTYPE_F32 : DSOPT_DTYPE_I32;
    return optimizer.state_values(optimizer.state_index(name, -1, dtype, numel));
}

void OneBitRecord::compare_errors(int64_t t, Optimizer &optimizer) {
    if (errors_.empty()) return;
    const size_t count = padded_.size();
    const auto worker = optimizer.state_values(
        optimizer.state_index("worker_error", -1, DSOPT_DTYPE_F32,
                              padded_.empty() ? 0 : padded_.back().worker + padded_.back().padded + int64_t(count)));
    const auto server = optimizer.state_values(
        optimizer.state_index("server_error", -1, DSOPT_DTYPE_F32,
                              padded_.empty() ? 0 : padded_.back().server + padded_.back().chunk + int64_t(count)));
    const bool exchanged = wire_.exchanges(rank_) != exchanges_;
    for (const Errors &e : errors_) {
        std::vector<double> w(size_t(e.padded), 0), s(size_t(e.chunk), 0);
        double ws = 0, ss = 0;
        if (e.vector_index >= 0) {
            const Padded &padded = padded_[size_t(e.vector_index)];
            w.assign(worker.begin() + padded.worker, worker.begin() + padded.worker + padded.padded);
            s.assign(server.begin() + padded.server, server.begin() + padded.server + padded.chunk);
            if (exchanged) {
                ws = Message{wire_.sent_to_all(rank_).data(), count}.scale(size_t(e.vector_index));
                ss = Message{wire_.gathered(rank_).data(), count}.scale(size_t(e.vector_index));
            }
        }
        comparison_.row(*e.worker_error, t, w, error_rule(comparison_, *e.worker_error, *e.worker_scale));
        comparison_.row(*e.server_error, t, s, error_rule(comparison_, *e.server_error, *e.server_scale));
        comparison_.row(*e.worker_scale, t, {ws});
        comparison_.row(*e.server_scale, t, {ss});
    }
}

void OneBitRecord::compare(int64_t t, Optimizer &optimizer, bool dry) {
    compare_errors(t, optimizer);
    const auto put = [&](const char *name, double value) { comparison_.row(*scalar(name), t, {value}); };
    const bool exchanged = wire_.exchanges(rank_) != exchanges_;
    // The original compresses zeros in its dry run, the engine does not.
    const bool compressed = dry ? wire_.ranks() > 1 : exchanged;
    put("compressed_calls", compressed ? double(padded_.size()) : 0);
    int32_t reduction = 0;
    check(dsopt_optimizer_next_reduction(optimizer.get(), 0, &reduction), "dsopt_optimizer_next_reduction");
    put("enable_backward_allreduce", reduction == DSOPT_REDUCTION_FULL);
    const std::vector<double> schedule = words(optimizer, "schedule", 8);
    put("step", schedule[0]);
    put(algorithm_ == DSOPT_ALGORITHM_ZERO_ONE_ADAM ? "local_step_stage" : "compression_stage", schedule[1]);
    const auto count = int64_t(layout_.order().size());
    for (const PerParam &p : per_param_) {
        std::vector<double> all;
        for (const int64_t param : p.params) {
            const int64_t numel = layout_.numel(layout_.order()[size_t(param)]);
            const auto part = optimizer.state_values(optimizer.state_index(p.state, param, DSOPT_DTYPE_F32, numel));
            all.insert(all.end(), part.begin(), part.end());
        }
        comparison_.row(*p.recorded, t, all);
    }
    if (algorithm_ == DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
        put("var_interval", std::max(1.0, schedule[2]));
        put("var_counter", schedule[3]);
        put("local_step_interval", std::max(1.0, schedule[4]));
        put("local_step_counter", schedule[5]);
        const Tensor &lrs = *file_.find(file_.name_of("lrs", rank_));
        const std::vector<double> sums = words(optimizer, "lr_sum", 2 * int64_t(groups_));
        std::vector<double> got;
        const int64_t columns = lrs.row_numel(); // one per parameter, or one per group under the fused wrapper
        for (int64_t column = 0; column < columns; ++column) {
            const size_t g = columns == count ? group_of_[size_t(column)] : size_t(column);
            const int32_t pair[2] = {int32_t(sums[2 * g]), int32_t(sums[2 * g + 1])};
            double value;
            std::memcpy(&value, pair, sizeof value);
            got.push_back(value);
        }
        comparison_.row(lrs, t, got);
    }
    if (algorithm_ == DSOPT_ALGORITHM_ONEBIT_LAMB) {
        const auto row = [&](const char *name, const char *state) {
            comparison_.row(comparison_.output(file_.name_of(name, rank_), {steps_, count}), t,
                            words(optimizer, state, count));
        };
        row("lamb_coeff_freeze", "trust_average");
        row("last_factor", "trust_factor");
        row("scaling_coeff", "trust_scaling");
        if (pad_ != nullptr)
            comparison_.row(
                *pad_, t,
                optimizer.state_values(optimizer.state_index("exp_avg_pad", -1, DSOPT_DTYPE_F32, pad_->row_numel())));
    }
}

} // namespace replay
