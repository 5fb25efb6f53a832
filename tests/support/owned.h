// SPDX-License-Identifier: Apache-2.0
// The caller's side of dsopt_optimizer_apply: everything that it reads and writes.
#pragma once
#include "harness.h"

namespace test {

/// Bytes on a 256-byte border, with a guard behind them.
class Workspace {
public:
    explicit Workspace(const dsopt_optimizer *opt);
    void spoil(int byte) { std::memset(memory_.get(), byte, bytes_); }
    bool intact() const;
    char *data() const { return memory_.get(); }
    size_t bytes() const { return bytes_; }

private:
    struct Free {
        void operator()(char *memory) const { std::free(memory); }
    };
    size_t bytes_ = 0;
    std::unique_ptr<char, Free> memory_;
};

class Owned {
public:
    /// Made from the list that the optimizer gives, by the rules of dsopt.h: zeros, and what begins as its parameter.
    Owned(const dsopt_optimizer *opt, const std::vector<Shape> &shapes);
    /// With garbage that init() replaces.
    Owned(const dsopt_optimizer *opt, std::vector<Array> weights, int garbage = 0xee);

    dsopt_status init();
    /// One call with the lists as they are now.
    dsopt_step arguments() const;
    /// One call with the memory that is there now, and a workspace full of garbage.
    [[nodiscard]] dsopt_status apply(const std::vector<Array> &gradients,
                                     const std::function<void(dsopt_step &)> &change = {});

    /// Place of a state tensor in the list.
    size_t index(const char *name, int64_t param = -1) const;
    template <class T> std::vector<T> values(const char *name, int64_t param = -1) const {
        const Array &block = blocks[index(name, param)];
        return {block.as<T>(), block.as<T>() + block.bytes() / sizeof(T)};
    }
    Snapshot snapshot() const;
    /// The bytes of parameters and state.
    std::string text() const;
    bool intact() const;

    Model model;
    Workspace workspace;
    std::vector<Array> blocks; // of state, aligned to an element and no further
    std::vector<dsopt_tensor> params, grads, state;

private:
    void allocate(int byte);
    void list();
    const dsopt_optimizer *opt_;
    std::vector<dsopt_state_info> infos_;
    int garbage_ = 0;
};

/// An optimizer that knows sizes and hyper-parameters alone, as one made without a device would.
Optimizer make_pure(const Context &context, const std::vector<Shape> &shapes, int32_t algorithm,
                    const dsopt_optimizer_desc &desc);

} // namespace test
