// SPDX-License-Identifier: Apache-2.0
// Every public function, one fence each. Nothing is decided here.
#include "abi.h"
#include "optimizer.h"
#include "state_io.h"
#include <cstdio>
#include <memory>
#include <string>

using namespace dsopt;

// Handles keep shared ownership, so an object lives as long as one made from it.
struct dsopt_context {
    std::shared_ptr<const Context> object;
};
struct dsopt_optimizer {
    std::shared_ptr<Optimizer> object;
};

namespace {

/// For calls that change an optimizer or compute with it.
template <class F> dsopt_status with(dsopt_optimizer *handle, F &&body) noexcept {
    return fence([&] {
        Optimizer &optimizer = *not_null(handle, "the optimizer")->object;
        optimizer.context().check_process();
        const Exclusive alone(optimizer.in_use());
        body(optimizer);
    });
}
/// For readers, any number at once.
template <class F> dsopt_status with(const dsopt_optimizer *handle, F &&body) noexcept {
    return fence([&] {
        const Optimizer &optimizer = *not_null(handle, "the optimizer")->object;
        optimizer.context().check_process();
        body(optimizer);
    });
}

const StateEntry &entry_at(const Optimizer &optimizer, int64_t index) {
    if (index < 0 || size_t(index) >= optimizer.state().size())
        throw Error(DSOPT_ERR_ARGUMENT, "state index is %lld, there are %zu entries", static_cast<long long>(index),
                    optimizer.state().size());
    return optimizer.state()[size_t(index)];
}

const StateEntry &entry_for_copy(Optimizer &optimizer, int64_t index, const void *host, size_t bytes) {
    const StateEntry &entry = entry_at(optimizer, index);
    if (bytes != entry.bytes())
        throw Error(DSOPT_ERR_SHAPE, "%s has %zu bytes, the buffer %zu", entry.name, entry.bytes(), bytes);
    if (bytes != 0) not_null(host, "host");
    optimizer.ensure_state(nullptr, nullptr);
    return entry_at(optimizer, index);
}

std::string make_build_info() {
    char text[512];
    std::snprintf(text, sizeof text,
                  "{\"version\": \"%d.%d.%d\", \"abi\": %d, \"compiler\": \"%s\", \"backends\": [\"cpu\"], \"comms\": [], "
                  "\"isa\": \"%s\", \"threads\": \"%s\", \"checkpoint_format\": 1}",
                  DSOPT_VERSION_MAJOR, DSOPT_VERSION_MINOR, DSOPT_VERSION_PATCH, DSOPT_ABI_VERSION, __VERSION__,
                  cpu_isa_name(),
#if defined(_OPENMP)
                  "openmp"
#else
                  "std"
#endif
    );
    return text;
}

} // namespace

int32_t dsopt_version(void) { return DSOPT_VERSION_MAJOR * 10000 + DSOPT_VERSION_MINOR * 100 + DSOPT_VERSION_PATCH; }
int32_t dsopt_abi_version(void) { return DSOPT_ABI_VERSION; }
const char *dsopt_status_name(dsopt_status status) { return status_name(status); }
const char *dsopt_last_error(void) { return last_error(); }

const char *dsopt_build_info(void) {
    static const char *text = "{}";
    (void)fence([&] {
        static const std::string info = make_build_info();
        text = info.c_str();
    });
    return text;
}

// ---------------------------------------------------------------------------------------------------------- context
dsopt_status dsopt_context_create(const dsopt_context_desc *desc, dsopt_context **ctx) {
    return fence([&] {
        not_null(ctx, "ctx");
        auto object = std::make_shared<const Context>(read_struct(desc, "dsopt_context_desc"));
        object->log(DSOPT_LOG_INFO, "dsopt %d.%d.%d: %s backend, %s", DSOPT_VERSION_MAJOR, DSOPT_VERSION_MINOR,
                    DSOPT_VERSION_PATCH, object->backend().name(), cpu_isa_name());
        *ctx = new dsopt_context{std::move(object)};
    });
}
void dsopt_context_destroy(dsopt_context *ctx) { delete ctx; }

// ----------------------------------------------------------------------------------------------- groups, optimizer
dsopt_status dsopt_group_init(dsopt_group *group, size_t size, int32_t algorithm) {
    return fence([&] {
        not_null(group, "group");
        check_size<dsopt_group>(size, "dsopt_group");
        dsopt_group defaults{};
        defaults.size = size;
        defaults.algorithm = algorithm;
        defaults.lr = 1e-3;
        defaults.beta1 = 0.9;
        defaults.beta2 = 0.999;
        defaults.eps = 1e-8;
        if (algorithm == DSOPT_LAMB) {
            defaults.min_trust = 0.01;
            defaults.max_trust = 10;
        }
        Optimizer::check_group(defaults);
        std::memset(group, 0, size);
        group->size = size;
        write_struct(group, defaults, "dsopt_group");
    });
}

dsopt_status dsopt_optimizer_create(dsopt_context *ctx, const dsopt_optimizer_desc *desc, dsopt_optimizer **opt) {
    return fence([&] {
        not_null(ctx, "ctx")->object->check_process();
        not_null(opt, "opt");
        *opt = new dsopt_optimizer{std::make_shared<Optimizer>(ctx->object, read_struct(desc, "dsopt_optimizer_desc"))};
    });
}
void dsopt_optimizer_destroy(dsopt_optimizer *opt) { delete opt; }

dsopt_status dsopt_optimizer_add_group(dsopt_optimizer *opt, const dsopt_group *group, const dsopt_param *params,
                                       int64_t count) {
    return with(opt, [&](Optimizer &optimizer) {
        optimizer.add_group(read_struct(not_null(group, "group"), "dsopt_group"), params, count);
    });
}

dsopt_status dsopt_optimizer_set(dsopt_optimizer *opt, int32_t group, int32_t key, double value) {
    return with(opt, [&](Optimizer &optimizer) { optimizer.set(group, key, value); });
}
dsopt_status dsopt_optimizer_get(const dsopt_optimizer *opt, int32_t group, int32_t key, double *value) {
    return with(opt, [&](const Optimizer &optimizer) { *not_null(value, "value") = optimizer.get(group, key); });
}
dsopt_status dsopt_optimizer_count(const dsopt_optimizer *opt, int64_t *groups, int64_t *params) {
    return with(opt, [&](const Optimizer &optimizer) {
        if (groups != nullptr) *groups = int64_t(optimizer.groups().size());
        if (params != nullptr) *params = int64_t(optimizer.params().size());
    });
}

// ------------------------------------------------------------------------------------------------------------- state
dsopt_status dsopt_optimizer_state_count(const dsopt_optimizer *opt, int64_t *count) {
    return with(opt, [&](const Optimizer &optimizer) { *not_null(count, "count") = int64_t(optimizer.state().size()); });
}
dsopt_status dsopt_optimizer_state(const dsopt_optimizer *opt, int64_t index, dsopt_state_info *info) {
    return with(opt, [&](const Optimizer &optimizer) {
        const StateEntry &entry = entry_at(optimizer, index);
        dsopt_state_info known{};
        known.name = entry.name;
        known.param = entry.param;
        known.tensor = entry.tensor();
        known.flags = entry.flags;
        write_struct(info, known, "dsopt_state_info");
    });
}
dsopt_status dsopt_optimizer_export(dsopt_optimizer *opt, int64_t index, void *host, size_t bytes) {
    return with(opt, [&](Optimizer &optimizer) {
        const StateEntry &entry = entry_for_copy(optimizer, index, host, bytes);
        optimizer.context().backend().copy_to_host(host, entry.data, bytes, nullptr);
    });
}
dsopt_status dsopt_optimizer_import(dsopt_optimizer *opt, int64_t index, const void *host, size_t bytes) {
    return with(opt, [&](Optimizer &optimizer) {
        const StateEntry &entry = entry_for_copy(optimizer, index, host, bytes);
        optimizer.context().backend().copy_from_host(entry.data, host, bytes, nullptr);
    });
}
dsopt_status dsopt_optimizer_bind(dsopt_optimizer *opt, int32_t what, const dsopt_tensor *list, int64_t count) {
    return with(opt, [&](Optimizer &optimizer) {
        if (what == DSOPT_BIND_PARAMS) optimizer.bind_params(list, count);
        else if (what == DSOPT_BIND_STATE) optimizer.bind_state(list, count);
        else throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_bind: what is %d", what);
    });
}
dsopt_status dsopt_optimizer_reset(dsopt_optimizer *opt, uint32_t what, void *stream) {
    return with(opt, [&](Optimizer &optimizer) { optimizer.reset(what, stream); });
}

// -------------------------------------------------------------------------------------------------------------- step
dsopt_status dsopt_optimizer_step(dsopt_optimizer *opt, const dsopt_step *step) {
    return with(opt, [&](Optimizer &optimizer) {
        optimizer.step(read_struct(not_null(step, "step"), "dsopt_step"));
    });
}
dsopt_status dsopt_optimizer_apply(const dsopt_optimizer *opt, const dsopt_step *step) {
    return with(opt, [&](const Optimizer &optimizer) {
        optimizer.apply(read_struct(not_null(step, "step"), "dsopt_step"));
    });
}
dsopt_status dsopt_optimizer_workspace(const dsopt_optimizer *opt, size_t *bytes) {
    return with(opt, [&](const Optimizer &optimizer) { *not_null(bytes, "bytes") = optimizer.workspace_bytes(); });
}
dsopt_status dsopt_optimizer_report(dsopt_optimizer *opt, dsopt_report *report) {
    return with(opt, [&](Optimizer &optimizer) { write_struct(report, optimizer.report(), "dsopt_report"); });
}

// ----------------------------------------------------------------------------------------------------- save and load
dsopt_status dsopt_optimizer_save(dsopt_optimizer *opt, const char *path, const dsopt_io *io) {
    return with(opt, [&](Optimizer &optimizer) { save_state(optimizer, path, read_struct(io, "dsopt_io")); });
}
dsopt_status dsopt_optimizer_load(dsopt_optimizer *opt, const char *path, const dsopt_io *io) {
    return with(opt, [&](Optimizer &optimizer) { load_state(optimizer, path, read_struct(io, "dsopt_io")); });
}

// ------------------------------------------------------------------------------------------------------------- lists
dsopt_status dsopt_zero_grad(dsopt_context *ctx, dsopt_tensor *grads, int64_t count, int32_t how, void *stream) {
    return fence([&] {
        const Context &context = *not_null(ctx, "ctx")->object;
        context.check_process();
        if (count < 0) throw Error(DSOPT_ERR_ARGUMENT, "count is %lld", static_cast<long long>(count));
        if (count > 0) not_null(grads, "grads");
        if (how != DSOPT_ZERO_FILL && how != DSOPT_ZERO_NONE)
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_zero_grad: how is %d", how);
        for (int64_t i = 0; i < count; ++i) {
            char name[24];
            std::snprintf(name, sizeof name, "%lld", static_cast<long long>(i));
            check_float_tensor(grads[i], {"gradient", name});
        }
        if (how == DSOPT_ZERO_FILL) context.backend().zero(grads, count, context.parallel(), stream);
        else
            for (int64_t i = 0; i < count; ++i) grads[i].data = nullptr;
    });
}
