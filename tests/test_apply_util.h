// SPDX-License-Identifier: Apache-2.0
// The caller's side of dsopt_optimizer_apply: everything that it reads and writes.
#pragma once
#include "test_util.h"

namespace test {

/// Bytes on a 256-byte border with a guard behind them.
class Workspace {
public:
    explicit Workspace(const dsopt_optimizer *opt) {
        check(dsopt_optimizer_workspace(opt, &bytes_));
        memory_.reset(static_cast<char *>(std::aligned_alloc(256, (bytes_ + 512) / 256 * 256)));
        spoil(0xff);
        std::memset(memory_.get() + bytes_, 0x5a, 64);
    }
    void spoil(int byte) { std::memset(memory_.get(), byte, bytes_); }
    bool intact() const {
        return std::all_of(memory_.get() + bytes_, memory_.get() + bytes_ + 64, [](char c) { return c == 0x5a; });
    }
    char *data() const { return memory_.get(); }
    size_t bytes() const { return bytes_; }

private:
    struct Free {
        void operator()(char *memory) const { std::free(memory); }
    };
    size_t bytes_ = 0;
    std::unique_ptr<char, Free> memory_;
};

/// Everything that `apply` reads and writes, made from the list that the optimizer gives.
struct Owned {
    Owned(const dsopt_optimizer *opt, const std::vector<Shape> &shapes) :
        model(shapes),
        workspace(opt),
        params(Model::list_of(model.params)),
        grads(Model::list_of(model.grads)) {
        for (int64_t i = 0; i < state_count(opt); ++i) {
            const dsopt_state_info info = state_info(opt, i);
            buffers.emplace_back(info.tensor.numel, info.tensor.dtype, size_of(info.tensor.dtype));
            if (info.flags & DSOPT_STATE_FROM_PARAM)
                for (int64_t k = 0; k < info.tensor.numel; ++k)
                    buffers.back().set(k, model.params[size_t(info.param)].get(k));
        }
        state = Model::list_of(buffers);
    }
    dsopt_step arguments() const {
        DSOPT_NEW(dsopt_step, step);
        step.grads = grads.data();
        step.count = int64_t(grads.size());
        step.params = params.data();
        step.state = state.data();
        step.state_count = int64_t(state.size());
        step.workspace = workspace.data();
        step.workspace_bytes = workspace.bytes();
        return step;
    }
    std::string text() const {
        std::string all = model.text();
        for (const Buffer &buffer : buffers) all += buffer.text();
        return all;
    }
    bool intact() const {
        return model.intact() && workspace.intact() &&
               std::all_of(buffers.begin(), buffers.end(), [](const Buffer &b) { return b.intact(); });
    }
    Model model;
    Workspace workspace;
    std::vector<Buffer> buffers;
    std::vector<dsopt_tensor> params, grads, state;
};

/// An optimizer that knows sizes and hyper-parameters alone, as one made without a device would.
inline Optimizer make_pure(const Context &context, const std::vector<Shape> &shapes, int32_t algorithm,
                           const dsopt_optimizer_desc &desc) {
    Optimizer opt = make_optimizer(context, desc);
    std::vector<dsopt_param> params;
    for (const Shape &shape : shapes) params.push_back(param_of({nullptr, shape.numel, shape.param, 0}));
    const dsopt_group group = make_group(algorithm);
    check(dsopt_optimizer_add_group(opt.get(), &group, params.data(), int64_t(params.size())));
    return opt;
}

} // namespace test
