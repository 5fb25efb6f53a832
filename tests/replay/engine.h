// SPDX-License-Identifier: Apache-2.0
// RAII wrappers of dsopt.h: a failed call throws a Failure with the engine's last error, and everything is released.
#pragma once
#include "golden_file.h"
#include "memory.h"
#include "support/handles.h"
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace replay {

inline void check(dsopt_status status, const char *what) {
    if (status != DSOPT_OK) fail("%s: %s: %s", what, dsopt_status_name(status), dsopt_last_error());
}

class Engine {
public:
    explicit Engine(int32_t backend) {
        DSOPT_NEW(dsopt_context_desc, desc);
        desc.backend = backend;
        dsopt_context *context = nullptr;
        check(dsopt_context_create(&desc, &context), "dsopt_context_create");
        context_.reset(context);
        memory_ = backend == DSOPT_BACKEND_CUDA ? cuda_memory(desc.device) : test::host_memory();
    }
    dsopt_context *context() const { return context_.get(); }
    const test::Memory &memory() const { return memory_; }

private:
    test::Memory memory_;
    test::Context context_; // destroyed last
};

/// A tensor in backend memory. An empty one also has an address: a null address would mean "no gradient".
class Array {
public:
    Array(const Engine &engine, int32_t dtype, int64_t numel) :
        dtype_(dtype),
        numel_(numel),
        block_(engine.memory(), size_t(numel) * element_size(dtype)) {}

    void upload(const void *host) { block_.set(host); }
    std::vector<double> values() const {
        const std::string host = block_.text();
        std::vector<double> values(static_cast<size_t>(numel_));
        for (int64_t i = 0; i < numel_; ++i) values[size_t(i)] = to_double(host.data(), dtype_, i);
        return values;
    }
    void *data() const { return block_.data(); }
    dsopt_tensor tensor() const { return {data(), numel_, dtype_, 0}; }
    /// Returns a list entry that means "no gradient in this step".
    dsopt_tensor absent() const { return {nullptr, numel_, dtype_, 0}; }

private:
    int32_t dtype_;
    int64_t numel_;
    test::Block block_;
};

class Scaler {
public:
    Scaler(const Engine &engine, const dsopt_scaler_desc &desc) : memory_(&engine.memory()) {
        dsopt_scaler *scaler = nullptr;
        check(dsopt_scaler_create(engine.context(), &desc, &scaler), "dsopt_scaler_create");
        handle_.reset(scaler);
    }
    dsopt_scaler *get() const { return handle_.get(); }

    /// `overflow`: one I32.
    void update(const Array &overflow) {
        check(dsopt_scaler_update(get(), static_cast<const int32_t *>(overflow.data()), nullptr),
              "dsopt_scaler_update");
    }
    /// Returns the scaler's values. Failure unless the float that the backward pass reads is the dynamic scale.
    dsopt_scaler_info info() const {
        DSOPT_NEW(dsopt_scaler_info, info);
        check(dsopt_scaler_query(get(), &info), "dsopt_scaler_query");
        float used = 0;
        memory_->read(&used, dsopt_scaler_device_scale(get()), sizeof used);
        if (used != float(info.dynamic) || double(used) != info.scale)
            fail("the loss scale in device memory is %.9g, the queried scale is %.9g, the dynamic scale is %.17g",
                 double(used), info.scale, info.dynamic);
        return info;
    }

private:
    const test::Memory *memory_;
    test::Scaler handle_;
};

class Optimizer {
public:
    Optimizer(const Engine &engine, const dsopt_optimizer_desc &desc) {
        dsopt_optimizer *optimizer = nullptr;
        check(dsopt_optimizer_create(engine.context(), &desc, &optimizer), "dsopt_optimizer_create");
        handle_.reset(optimizer);
    }
    dsopt_optimizer *get() const { return handle_.get(); }

    void add_group(const dsopt_group &group, const std::vector<dsopt_param> &params) {
        check(dsopt_optimizer_add_group(get(), &group, params.data(), int64_t(params.size())),
              "dsopt_optimizer_add_group");
    }
    void set(int32_t group, int32_t key, double value) {
        check(dsopt_optimizer_set(get(), group, key, value), "dsopt_optimizer_set");
    }
    void step(const dsopt_step &step) { check(dsopt_optimizer_step(get(), &step), "dsopt_optimizer_step"); }
    dsopt_report report() {
        DSOPT_NEW(dsopt_report, report);
        check(dsopt_optimizer_report(get(), &report), "dsopt_optimizer_report");
        return report;
    }

    /// Returns the index in the state list of entry `name` of a parameter (its index in the flat order; -1 = the whole
    /// optimizer). Failure unless the entry has this dtype and size.
    int64_t state_index(const std::string &name, int64_t param, int32_t dtype, int64_t numel) const {
        int64_t count = 0;
        check(dsopt_optimizer_state_count(get(), &count), "dsopt_optimizer_state_count");
        for (int64_t i = 0; i < count; ++i) {
            const dsopt_state_info info = state_info(i);
            if (info.param != param || name != info.name) continue;
            if (info.tensor.dtype != dtype || info.tensor.numel != numel)
                fail("state %s of parameter %lld: the engine has %lld of %s, expected %lld of %s", name.c_str(),
                     (long long)param, (long long)info.tensor.numel, dtype_name(info.tensor.dtype), (long long)numel,
                     dtype_name(dtype));
            return i;
        }
        fail("the engine has no state %s of parameter %lld", name.c_str(), (long long)param);
    }
    /// Returns the names of a parameter's state tensors.
    std::vector<std::string> state_names(int64_t param) const {
        int64_t count = 0;
        check(dsopt_optimizer_state_count(get(), &count), "dsopt_optimizer_state_count");
        std::vector<std::string> names;
        for (int64_t i = 0; i < count; ++i)
            if (const dsopt_state_info info = state_info(i); info.param == param) names.emplace_back(info.name);
        return names;
    }
    std::vector<double> state_values(int64_t index) {
        const dsopt_tensor tensor = state_info(index).tensor;
        const size_t bytes = size_t(tensor.numel) * element_size(tensor.dtype);
        // Never NULL; the engine receives the exact size.
        const auto host = std::make_unique<unsigned char[]>(bytes + 1);
        check(dsopt_optimizer_export(get(), index, host.get(), bytes), "dsopt_optimizer_export");
        std::vector<double> values(static_cast<size_t>(tensor.numel));
        for (int64_t i = 0; i < tensor.numel; ++i) values[size_t(i)] = to_double(host.get(), tensor.dtype, i);
        return values;
    }

private:
    dsopt_state_info state_info(int64_t index) const {
        DSOPT_NEW(dsopt_state_info, info);
        check(dsopt_optimizer_state(get(), index, &info), "dsopt_optimizer_state");
        return info;
    }
    test::Optimizer handle_;
};

} // namespace replay
