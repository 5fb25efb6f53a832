// SPDX-License-Identifier: Apache-2.0
#include "caller_memory.h"

namespace test {
namespace {

constexpr size_t kAlignment = 256, kGuardBytes = 64;

} // namespace

Workspace::Workspace(const dsopt_optimizer *opt) {
    must(dsopt_optimizer_workspace(opt, &bytes_));
    allocation_.reset(static_cast<char *>(allocate_shared(bytes_ + kAlignment + kGuardBytes)));
    memory_ =
        allocation_.get() + (kAlignment - reinterpret_cast<uintptr_t>(allocation_.get()) % kAlignment) % kAlignment;
    corrupt(0xff);
    std::memset(memory_ + bytes_, 0x5a, kGuardBytes);
}
bool Workspace::intact() const {
    synchronize();
    return std::all_of(memory_ + bytes_, memory_ + bytes_ + kGuardBytes, [](char c) { return c == 0x5a; });
}

CallerMemory::CallerMemory(const dsopt_optimizer *opt, const std::vector<Shape> &shapes) :
    model(shapes),
    workspace(opt),
    opt_(opt) {
    allocate(0);
    for (size_t i = 0; i < infos_.size(); ++i)
        if (infos_[i].flags & DSOPT_STATE_FROM_PARAM)
            for (size_t k = 0; k < blocks[i].size(); ++k) blocks[i].set(k, model.params[size_t(infos_[i].param)][k]);
}
CallerMemory::CallerMemory(const dsopt_optimizer *opt, std::vector<Array> weights, int garbage) :
    workspace(opt),
    opt_(opt) {
    model.params = std::move(weights);
    allocate(garbage);
}
void CallerMemory::allocate(int byte) {
    infos_ = state_of(opt_);
    for (const dsopt_state_info &info : infos_) {
        blocks.emplace_back(info.tensor.dtype, size_t(info.tensor.numel), 0.0f, size_of(info.tensor.dtype));
        blocks.back().corrupt(byte);
    }
    list();
}
void CallerMemory::list() {
    params = list_of(model.params);
    grads = list_of(model.grads);
    state = list_of(blocks);
}

dsopt_status CallerMemory::init() {
    list();
    return dsopt_optimizer_init_state(opt_, params.data(), int64_t(params.size()), state.data(), int64_t(state.size()),
                                      nullptr);
}
dsopt_step CallerMemory::arguments() const {
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
dsopt_status CallerMemory::apply(const std::vector<Array> &gradients, const std::function<void(dsopt_step &)> &change) {
    list();
    grads = list_of(gradients);
    workspace.corrupt(garbage_ += 37);
    dsopt_step step = arguments();
    if (change) change(step);
    return dsopt_optimizer_apply(opt_, &step);
}

size_t CallerMemory::index(const char *name, int64_t param) const {
    for (size_t i = 0; i < infos_.size(); ++i)
        if (infos_[i].param == param && std::strcmp(infos_[i].name, name) == 0) return i;
    throw std::runtime_error(std::string("no state ") + name);
}
Snapshot CallerMemory::snapshot() const {
    Snapshot all;
    for (size_t i = 0; i < model.params.size(); ++i) all["param " + std::to_string(i)] = model.params[i].text();
    for (size_t i = 0; i < infos_.size(); ++i) all[key_of(infos_[i])] = blocks[i].text();
    return all;
}
std::string CallerMemory::text() const {
    std::string all = model.text();
    for (const Array &block : blocks) all += block.text();
    return all;
}
bool CallerMemory::intact() const {
    return model.intact() && workspace.intact() &&
           std::all_of(blocks.begin(), blocks.end(), [](const Array &block) { return block.intact(); });
}

Optimizer make_pure(const Context &context, const std::vector<Shape> &shapes, int32_t algorithm,
                    const dsopt_optimizer_desc &desc) {
    Optimizer opt = make_optimizer(context, desc);
    std::vector<dsopt_param> params;
    for (const Shape &shape : shapes) params.push_back(param_of({nullptr, shape.numel, shape.param, 0}));
    const dsopt_group group = make_group(algorithm);
    must(dsopt_optimizer_add_group(opt.get(), &group, params.data(), int64_t(params.size())));
    return opt;
}

} // namespace test
