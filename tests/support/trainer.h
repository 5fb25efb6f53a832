// SPDX-License-Identifier: Apache-2.0
// An optimizer with memory for its parameters, and functions that read an optimizer's state.
#pragma once
#include "array.h"
#include "handles.h"
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace test {

// -------------------------------------------------------------------------------------------------------------- state
std::vector<dsopt_state_info> state_of(const dsopt_optimizer *opt);
int64_t state_count(const dsopt_optimizer *opt);
dsopt_state_info state_info(const dsopt_optimizer *opt, int64_t index);
/// Returns the index of a state tensor. `param` -1: of the optimizer as a whole. Throws if there is none.
int64_t state_index(const dsopt_optimizer *opt, int64_t param, const std::string &name);
/// Returns the bytes of one state tensor.
std::string exported_text(dsopt_optimizer *opt, int64_t index);
template <class T = float> std::vector<T> exported(dsopt_optimizer *opt, int64_t param, const std::string &name) {
    const std::string text = exported_text(opt, state_index(opt, param, name));
    std::vector<T> values(text.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), text.data(), text.size());
    return values;
}
std::vector<int32_t> steps(dsopt_optimizer *opt);
/// Returns the concatenated bytes of all state tensors. Allocates them if necessary.
std::string state_text(dsopt_optimizer *opt);

double get(const dsopt_optimizer *opt, int32_t group, int32_t key);
/// Returns hyper-parameters of every group, clipping and the number of calls, as bytes.
std::string hyper_text(const dsopt_optimizer *opt);
dsopt_report report_of(dsopt_optimizer *opt);

/// Bytes of everything that a step may change; the key has the name and the index.
using Snapshot = std::map<std::string, std::string>;
std::string key_of(const dsopt_state_info &info);

// ------------------------------------------------------------------------------------------------------------ trainer
/// Registration of a parameter.
struct Param {
    Array weight;
    std::string name = "";
    int32_t flags = 0;
    int32_t expert = 0;
    int64_t offset = 0;
    int64_t rows = 0, cols = 0;
};

class Trainer {
public:
    // Uses a context of the caller, and gradients that are passed to each step.
    Trainer(const Context &context, const dsopt_optimizer_desc &desc);
    Trainer(const Context &context, const dsopt_optimizer_desc &desc, const dsopt_group &group,
            std::vector<Param> params);
    /// The usual case: one group of parameters without names.
    Trainer(const Context &context, const dsopt_optimizer_desc &desc, const dsopt_group &group,
            const std::vector<Array> &weights);

    // Creates a context, and parameters and gradients of these shapes. Without a group, add() adds groups.
    Trainer(const std::vector<Shape> &shapes, const dsopt_optimizer_desc &desc,
            const dsopt_context_desc &context_desc = test::context_desc());
    Trainer(const std::vector<Shape> &shapes, const dsopt_group &group,
            const dsopt_optimizer_desc &desc = optimizer_desc(),
            const dsopt_context_desc &context_desc = test::context_desc());

    dsopt_status add_group(const dsopt_group &group, std::vector<Param> params);
    /// Adds a group of the next `count` tensors of the model.
    void add(const dsopt_group &group, size_t count);
    /// The same for parameters with other members than their tensors, which are set here.
    void add(const dsopt_group &group, std::vector<dsopt_param> params);

    dsopt_optimizer *opt() const { return opt_.get(); }
    /// Destroys the optimizer before the other members.
    void drop() { opt_.reset(); }
    std::vector<Array> &weights() { return model.params; }
    Array &weight(size_t i = 0) { return model.params[i]; }

    /// Returns arguments of a step on the model's own gradients.
    dsopt_step arguments() const;
    [[nodiscard]] dsopt_status step(const dsopt_step &step) const;
    /// Steps on `gradients`; `change` sets other members of the step.
    [[nodiscard]] dsopt_status step(const std::vector<Array> &gradients,
                                    const std::function<void(dsopt_step &)> &change = {});
    [[nodiscard]] dsopt_status step_accumulated();
    [[nodiscard]] dsopt_status accumulate(const std::vector<Array> &gradients);
    /// Makes steps, which must succeed, with the model's gradients of these seeds.
    void train(uint64_t first, uint64_t last) const;
    void train(uint64_t seed) const { train(seed, seed); }

    dsopt_report report() const { return report_of(opt()); }
    double get(int32_t key) const { return test::get(opt(), DSOPT_ALL_GROUPS, key); }
    std::vector<dsopt_state_info> state() const { return state_of(opt()); }
    /// Returns the values of one state tensor; integers are converted to floats.
    std::vector<float> state(const char *name, int64_t param = -1) const;
    float first(const char *name, int64_t param = 0) const { return state(name, param).at(0); }
    /// Returns the bytes of parameters and state.
    std::string text() const { return model.text() + state_text(opt()); }
    Snapshot snapshot() const;

    Context own_context; // NULL: the context is the caller's
    Model model;
    std::vector<dsopt_tensor> grads; // of the model; may be changed between steps

private:
    Optimizer opt_;
    size_t added_ = 0;
};

} // namespace test
