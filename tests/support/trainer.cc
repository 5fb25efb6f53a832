// SPDX-License-Identifier: Apache-2.0
#include "trainer.h"
#include "digest.h"

namespace test {

std::vector<dsopt_state_info> state_of(const dsopt_optimizer *opt) {
    std::vector<dsopt_state_info> list;
    const int64_t count = state_count(opt);
    for (int64_t i = 0; i < count; ++i) list.push_back(state_info(opt, i));
    return list;
}
int64_t state_count(const dsopt_optimizer *opt) {
    int64_t count = 0;
    must(dsopt_optimizer_state_count(opt, &count));
    return count;
}
dsopt_state_info state_info(const dsopt_optimizer *opt, int64_t index) {
    DSOPT_NEW(dsopt_state_info, info);
    must(dsopt_optimizer_state(opt, index, &info));
    return info;
}
int64_t state_index(const dsopt_optimizer *opt, int64_t param, const std::string &name) {
    const std::vector<dsopt_state_info> list = state_of(opt);
    for (size_t i = 0; i < list.size(); ++i)
        if (list[i].param == param && name == list[i].name) return int64_t(i);
    throw std::runtime_error("no state " + name);
}
std::string exported_text(dsopt_optimizer *opt, int64_t index) {
    const dsopt_tensor tensor = state_info(opt, index).tensor;
    std::string bytes(size_t(tensor.numel) * size_of(tensor.dtype), '\0');
    must(dsopt_optimizer_export(opt, index, bytes.data(), bytes.size()));
    digest(bytes.data(), bytes.size(), tensor.dtype);
    return bytes;
}
std::vector<int32_t> steps(dsopt_optimizer *opt) { return exported<int32_t>(opt, -1, "step"); }
std::string state_text(dsopt_optimizer *opt) {
    std::string all;
    for (int64_t i = 0; i < state_count(opt); ++i) all += exported_text(opt, i);
    return all;
}

double get(const dsopt_optimizer *opt, int32_t group, int32_t key) {
    double value = 0;
    must(dsopt_optimizer_get(opt, group, key, &value));
    return value;
}

namespace {

/// Returns true if the algorithm has this hyper-parameter.
bool has(int32_t algorithm, int32_t key) {
    const bool sgd = algorithm == DSOPT_ALGORITHM_SGD, adagrad = algorithm == DSOPT_ALGORITHM_ADAGRAD;
    const bool muon = algorithm == DSOPT_ALGORITHM_MUON;
    switch (key) {
    case DSOPT_KEY_BETA1:
    case DSOPT_KEY_BETA2: return !sgd && !adagrad && !muon;
    case DSOPT_KEY_EPS: return !sgd && algorithm != DSOPT_ALGORITHM_LION;
    case DSOPT_KEY_MIN_TRUST:
    case DSOPT_KEY_MAX_TRUST: return algorithm == DSOPT_ALGORITHM_LAMB;
    case DSOPT_KEY_MOMENTUM: return sgd || muon;
    case DSOPT_KEY_DAMPENING: return sgd;
    case DSOPT_KEY_LR_DECAY:
    case DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE: return adagrad;
    case DSOPT_KEY_FREEZE_STEP: return false; // 1-bit family only
    }
    return key < DSOPT_KEY_NS_STEPS || muon;
}

} // namespace
std::string hyper_text(const dsopt_optimizer *opt) {
    std::string all;
    const auto add = [&](double value) { all.append(reinterpret_cast<const char *>(&value), sizeof value); };
    int64_t groups = 0;
    must(dsopt_optimizer_count(opt, &groups, nullptr));
    for (int32_t group = 0; group < groups; ++group)
        for (int32_t key = DSOPT_KEY_LR; key <= DSOPT_KEY_NS_DTYPE; ++key)
            if (has(int32_t(get(opt, group, DSOPT_KEY_ALGORITHM)), key)) add(get(opt, group, key));
    for (const int32_t key : {DSOPT_KEY_MAX_NORM, DSOPT_KEY_MAX_VALUE, DSOPT_KEY_SKIP_BUDGET, DSOPT_KEY_CALLS})
        add(get(opt, DSOPT_ALL_GROUPS, key));
    return all;
}
dsopt_report report_of(dsopt_optimizer *opt) {
    DSOPT_NEW(dsopt_report, report);
    must(dsopt_optimizer_report(opt, &report));
    return report;
}
std::string key_of(const dsopt_state_info &info) { return std::string(info.name) + " " + std::to_string(info.param); }

Trainer::Trainer(const Context &context, const dsopt_optimizer_desc &desc) : opt_(make_optimizer(context, desc)) {}
Trainer::Trainer(const Context &context, const dsopt_optimizer_desc &desc, const dsopt_group &group,
                 std::vector<Param> params) :
    Trainer(context, desc) {
    must(add_group(group, std::move(params)));
}
Trainer::Trainer(const Context &context, const dsopt_optimizer_desc &desc, const dsopt_group &group,
                 const std::vector<Array> &weights) :
    Trainer(context, desc) {
    std::vector<Param> params;
    for (const Array &weight : weights) params.push_back({weight});
    must(add_group(group, std::move(params)));
}
Trainer::Trainer(const std::vector<Shape> &shapes, const dsopt_optimizer_desc &desc,
                 const dsopt_context_desc &context_desc) :
    own_context(make_context(context_desc)),
    model(shapes),
    grads(list_of(model.grads)),
    opt_(make_optimizer(own_context, desc)) {}
Trainer::Trainer(const std::vector<Shape> &shapes, const dsopt_group &group, const dsopt_optimizer_desc &desc,
                 const dsopt_context_desc &context_desc) :
    Trainer(shapes, desc, context_desc) {
    add(group, shapes.size());
}

dsopt_status Trainer::add_group(const dsopt_group &group, std::vector<Param> params) {
    std::vector<dsopt_param> list;
    for (const Param &param : params)
        list.push_back({param.weight.tensor(), param.name.empty() ? nullptr : param.name.c_str(), nullptr, 0,
                        param.flags, param.offset, param.expert, 0, param.rows, param.cols});
    const dsopt_status status = dsopt_optimizer_add_group(opt(), &group, list.data(), int64_t(list.size()));
    for (Param &param : params) model.params.push_back(std::move(param.weight)); // the memory does not move
    return status;
}
void Trainer::add(const dsopt_group &group, size_t count) { add(group, std::vector<dsopt_param>(count)); }
void Trainer::add(const dsopt_group &group, std::vector<dsopt_param> params) {
    for (size_t i = 0; i < params.size(); ++i) params[i].tensor = model.params[added_ + i].tensor();
    must(dsopt_optimizer_add_group(opt(), &group, params.data(), int64_t(params.size())));
    added_ += params.size();
}

dsopt_step Trainer::arguments() const {
    DSOPT_NEW(dsopt_step, step);
    step.grads = grads.data();
    step.count = int64_t(added_);
    return step;
}
dsopt_status Trainer::step(const dsopt_step &step) const { return dsopt_optimizer_step(opt(), &step); }
dsopt_status Trainer::step(const std::vector<Array> &gradients, const std::function<void(dsopt_step &)> &change) {
    const std::vector<dsopt_tensor> list = list_of(gradients);
    DSOPT_NEW(dsopt_step, arguments);
    arguments.grads = list.data();
    arguments.count = int64_t(list.size());
    if (change) change(arguments);
    return step(arguments);
}
dsopt_status Trainer::step_accumulated() {
    DSOPT_NEW(dsopt_step, arguments);
    arguments.count = int64_t(model.params.size());
    arguments.flags = DSOPT_STEP_ACCUMULATED;
    return step(arguments);
}
dsopt_status Trainer::accumulate(const std::vector<Array> &gradients) {
    const std::vector<dsopt_tensor> list = list_of(gradients);
    return dsopt_optimizer_accumulate(opt(), list.data(), int64_t(list.size()), nullptr);
}
void Trainer::train(uint64_t first, uint64_t last) const {
    for (uint64_t seed = first; seed <= last; ++seed) {
        model.make_gradients(seed);
        must(step(arguments()));
    }
}

std::vector<float> Trainer::state(const char *name, int64_t param) const {
    const int64_t index = state_index(opt(), param, name);
    const int32_t dtype = state_info(opt(), index).tensor.dtype;
    const std::string text = exported_text(opt(), index);
    std::vector<float> values(text.size() / size_of(dtype));
    for (size_t i = 0; i < values.size(); ++i) {
        const char *const at = text.data() + i * size_of(dtype);
        if (dtype == DSOPT_DTYPE_I32) {
            int32_t integer;
            std::memcpy(&integer, at, 4);
            values[i] = float(integer);
        } else {
            values[i] = loaded(at, dtype);
        }
    }
    return values;
}
Snapshot Trainer::snapshot() const {
    Snapshot all;
    for (size_t i = 0; i < model.params.size(); ++i) all["param " + std::to_string(i)] = model.params[i].text();
    const std::vector<dsopt_state_info> list = state();
    for (size_t i = 0; i < list.size(); ++i) all[key_of(list[i])] = exported_text(opt(), int64_t(i));
    return all;
}

} // namespace test
