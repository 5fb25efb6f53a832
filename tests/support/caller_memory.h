// SPDX-License-Identifier: Apache-2.0
// Caller's memory for dsopt_optimizer_apply: everything that the call reads and writes.
#pragma once
#include "harness.h"

namespace test {

/// Bytes aligned to 256, with a guard after them.
class Workspace {
public:
    explicit Workspace(const dsopt_optimizer *opt);
    void corrupt(int byte) {
        synchronize();
        std::memset(memory_, byte, bytes_);
    }
    bool intact() const;
    char *data() const { return memory_; }
    size_t bytes() const { return bytes_; }

private:
    size_t bytes_ = 0;
    std::unique_ptr<char, FreeShared> allocation_;
    char *memory_ = nullptr;
};

class CallerMemory {
public:
    /// Allocates state from the optimizer's list, initialized by the rules of dsopt.h: zeros, or a copy of the
    /// parameter.
    CallerMemory(const dsopt_optimizer *opt, const std::vector<Shape> &shapes);
    /// Allocates state with garbage, which init() replaces.
    CallerMemory(const dsopt_optimizer *opt, std::vector<Array> weights, int garbage = 0xee);

    dsopt_status init();
    /// Returns the arguments of a call with the current lists.
    dsopt_step arguments() const;
    /// Calls dsopt_optimizer_apply with the current memory and a workspace full of garbage.
    [[nodiscard]] dsopt_status apply(const std::vector<Array> &gradients,
                                     const std::function<void(dsopt_step &)> &change = {});

    /// Returns the index of a state tensor in the list.
    size_t index(const char *name, int64_t param = -1) const;
    template <class T> std::vector<T> values(const char *name, int64_t param = -1) const {
        const Array &block = blocks[index(name, param)];
        return {block.as<T>(), block.as<T>() + block.bytes() / sizeof(T)};
    }
    Snapshot snapshot() const;
    /// Returns the bytes of parameters and state.
    std::string text() const;
    bool intact() const;

    Model model;
    Workspace workspace;
    std::vector<Array> blocks; // for state, aligned only to an element
    std::vector<dsopt_tensor> params, grads, state;

private:
    void allocate(int byte);
    void list();
    const dsopt_optimizer *opt_;
    std::vector<dsopt_state_info> infos_;
    int garbage_ = 0;
};

/// Creates an optimizer whose parameters have sizes and dtypes, and no memory.
Optimizer make_pure(const Context &context, const std::vector<Shape> &shapes, int32_t algorithm,
                    const dsopt_optimizer_desc &desc);

} // namespace test
