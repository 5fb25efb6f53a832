// SPDX-License-Identifier: Apache-2.0
// All public functions. Each has one fence, checks its arguments and forwards to the engine.
#include "base/fork.h"
#include "base/sizes.h"
#include "base/struct_io.h"
#include "base/text.h"
#include "checkpoint/checkpoint.h"
#include "comm/provider.h"
#include "exchange/exchange.h"
#include "optimizer/contents.h"
#include "optimizer/convert.h"
#include "optimizer/group.h"
#include "step/agree.h"
#include <cctype>
#include <cmath>
#include <cstdio>
#include <memory>
#include <new>
#include <pthread.h>
#include <string>
#include <utility>

using namespace dsopt;

namespace dsopt {
/// A handle shares ownership: an object lives at least as long as its handles and the objects that were created from
/// it.
template <class T> struct Handle { std::shared_ptr<T> object; };
} // namespace dsopt
struct dsopt_context : Handle<const Context> {};
struct dsopt_comm : Handle<Comm> {};
struct dsopt_scaler : Handle<Scaler> {};
struct dsopt_optimizer : Handle<Optimizer> {};

namespace {

/// Defers pthread_cancel: parallel sections, destructors and the caller's hooks cannot be unwound.
class CancellationDeferred : NotCopied {
public:
    CancellationDeferred() { (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
    /// May unwind a thread whose cancellation is asynchronous.
    ~CancellationDeferred() noexcept(false) { (void)pthread_setcancelstate(before_, nullptr); }

private:
    int before_ = PTHREAD_CANCEL_ENABLE;
};

/// Converts exceptions to a status and the text of dsopt_last_error().
template <class F> dsopt_status status_of(F &&body) noexcept {
    try {
        std::forward<F>(body)();
        return DSOPT_OK;
    } catch (const Error &e) {
        set_last_error(e.what());
        return e.status();
    } catch (const std::bad_alloc &) {
        set_last_error("out of host memory");
        return DSOPT_ERR_NOMEM;
    } catch (const std::exception &e) {
        set_last_error(e.what());
        return DSOPT_ERR_INTERNAL;
    } catch (...) {
        set_last_error("unknown exception");
        return DSOPT_ERR_INTERNAL;
    }
}

/// Runs the body of a public function that returns no status. Such functions are not cancellation points, because
/// destructors and cleanup handlers call them.
template <class F> void run_without_status(F &&body) {
    const CancellationDeferred deferred;
    (void)status_of(std::forward<F>(body));
}

/// Runs the body of a public function that returns a status. No exception leaves it. Its end is a cancellation point.
template <class F> dsopt_status fence(F &&body) {
    dsopt_status status;
    {
        const CancellationDeferred deferred;
        status = status_of(std::forward<F>(body));
    }
    pthread_testcancel();
    return status;
}

const Context &context_of(const Context &context) { return context; }
const Context &context_of(const Comm &comm) { return *comm.context(); }
template <class T> const Context &context_of(const T &object) { return object.context(); }

/// Returns the object of a handle. Throws FORKED in a child of fork(), where a handle can only be destroyed.
template <class T> const std::shared_ptr<T> &object_of(const Handle<T> *handle, const char *what) {
    context_of(*not_null(handle, what)->object).check_process();
    return handle->object;
}

/// What a call uses of an optimizer: groups and parameters only, or also what Optimizer::finalize_groups() derives from
/// them.
enum class Needs { groups, everything };
/// Runs a call that changes an optimizer.
template <Needs A = Needs::everything, class F> dsopt_status with(dsopt_optimizer *handle, F &&body) {
    return fence([&] {
        Optimizer &optimizer = *object_of(handle, "the optimizer");
        const Exclusive lock(optimizer.in_use());
        if (A == Needs::everything) optimizer.finalize_groups();
        optimizer.wait_for_parts();
        body(optimizer);
    });
}
/// Runs a call that only reads an optimizer. Any number of these may run at the same time.
template <Needs A = Needs::everything, class F> dsopt_status with(const dsopt_optimizer *handle, F &&body) {
    return fence([&] {
        Optimizer &optimizer = *object_of(handle, "the optimizer");
        const Shared lock(optimizer.in_use());
        if (A == Needs::everything) optimizer.finalize_groups();
        body(std::as_const(optimizer));
    });
}

const StateEntry &entry_at(const Optimizer &optimizer, int64_t index) {
    if (index < 0 || size_t(index) >= optimizer.state().size())
        throw Error(DSOPT_ERR_ARGUMENT, "state index is %lld, there are %zu entries", ll(index),
                    optimizer.state().size());
    return optimizer.state()[size_t(index)];
}

const StateEntry &entry_for_copy(Optimizer &optimizer, int64_t index, const void *host, size_t bytes) {
    const StateEntry &entry = entry_at(optimizer, index);
    if (bytes != entry.bytes())
        throw Error(DSOPT_ERR_SHAPE, "%s has %zu bytes, the buffer %zu", entry.name(), entry.bytes(), bytes);
    if (bytes != 0) not_null(host, "host");
    if (entry.of_scaler()) // a scaler allocates its memory when it is created
        optimizer.wait_for_tensors();
    else
        optimizer.prepare_for_host();
    return entry;
}

template <class F> dsopt_status with(const dsopt_scaler *handle, F &&body) {
    return fence([&] { body(*object_of(handle, "the scaler")); });
}

void export_bytes(Optimizer &optimizer, int64_t index, void *host, size_t bytes) {
    const StateEntry &entry = entry_for_copy(optimizer, index, host, bytes);
    if (bytes == 0) return; // `host` may be NULL
    if (entry.is_error())
        optimizer.onebit()->export_errors(optimizer.state(), entry, static_cast<float *>(host));
    else
        optimizer.context().device().copy(host, entry.data, bytes);
}
void import_bytes(Optimizer &optimizer, int64_t index, const void *host, size_t bytes) {
    optimizer.check_nothing_ready();
    const StateEntry &entry = entry_for_copy(optimizer, index, host, bytes);
    if (entry.of_scaler()) optimizer.check_scaler();
    check_contents(optimizer, entry, host, "import");
    optimizer.context().device().copy(entry.data, host, bytes);
    optimizer.state_changed();
}

/// Checks the arguments of dsopt_optimizer_export_f32 and _import_f32.
void check_f32_copy(const Optimizer &optimizer, int64_t index, const float *host, int64_t count) {
    const StateEntry &entry = entry_at(optimizer, index);
    if (entry.dtype == DSOPT_DTYPE_I32)
        throw Error(DSOPT_ERR_DTYPE, "%s has integers of 32 bits, no floats", entry.name());
    if (count != entry.numel)
        throw Error(DSOPT_ERR_SHAPE, "%s has %lld elements, the buffer %lld", entry.name(), ll(entry.numel), ll(count));
    if (count != 0) not_null(host, "host");
}

/// Returns a function that checks the caller's stream and then calls `body`.
template <class F> auto on_stream(void *stream, F body) {
    return [=](auto &object) {
        context_of(object).device().check_stream(stream);
        body(object);
    };
}

std::shared_ptr<Comm> comm_if_any(const dsopt_comm *handle) {
    return handle != nullptr ? object_of(handle, "the comm") : nullptr;
}

/// Runs a call with a dsopt_compressed, which describes an exchange without an optimizer.
template <class F> dsopt_status with(const dsopt_comm *handle, const dsopt_compressed *args, F &&body) {
    return fence([&] {
        Comm &data = *object_of(handle, "the comm");
        const dsopt_compressed known = read_struct(not_null(args, "args"), "dsopt_compressed");
        body(data, comm_if_any(known.node).get(), known);
    });
}

Attachments attachments_of(const dsopt_optimizer_desc &desc) {
    Attachments attachments;
    if (desc.scaler != nullptr) attachments.scaler = object_of(desc.scaler, "the scaler");
    attachments.data = comm_if_any(desc.data);
    attachments.model = comm_if_any(desc.model);
    attachments.node = comm_if_any(desc.node);
    require_in(0, 1024, "dsopt_optimizer_desc.expert_count", desc.expert_count);
    if ((desc.expert_count > 0) != (desc.experts != nullptr))
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_desc: %d expert comms, the list is %s", desc.expert_count,
                    desc.experts != nullptr ? "given" : "NULL");
    for (int32_t i = 0; i < desc.expert_count; ++i)
        attachments.experts.push_back(object_of(desc.experts[i], "an entry of dsopt_optimizer_desc.experts"));
    return attachments;
}

/// Checks a list that belongs to no optimizer. Messages name its tensors by index.
void check_list(const dsopt_tensor *list, int64_t count, const char *role) {
    if (count < 0) throw Error(DSOPT_ERR_ARGUMENT, "count is %lld", ll(count));
    if (count > INT32_MAX) throw Error(DSOPT_ERR_SHAPE, "count is %lld, more than 2^31", ll(count));
    if (count > 0) not_null(list, role);
    for (int64_t i = 0; i < count; ++i) {
        const std::string name = std::to_string(i); // short enough for the string's internal buffer
        check_float_tensor(list[i], {role, name.c_str()});
    }
}

std::string make_build_info() {
    // This report does not load NCCL: that copy would take precedence over a copy that the caller may load later.
    const char *const nccl = nccl_state(), *const hccl = hccl_state(); // the first one counts CUDA devices
    const bool has_nccl = std::strcmp(nccl, "loaded") == 0 || std::strncmp(nccl, "looked", 6) == 0;
    const bool has_hccl = std::strcmp(hccl, "loaded") == 0;
    std::string unknown; // DSOPT_ISA may contain any bytes, and the text is JSON
    if (const char *const isa = unknown_isa()) {
        unknown = std::string(isa, strnlen(isa, 32));
        for (char &c : unknown)
            if (std::isalnum(static_cast<unsigned char>(c)) == 0 && std::strchr("-_+. ", c) == nullptr) c = '?';
        unknown = "\"isa_unknown\": \"" + unknown + "\", ";
    }
    const CudaInfo cuda = cuda_info();
    std::string about_cuda;
    const auto add = [&](const char *key, const std::string &value) {
        if (!value.empty()) about_cuda += std::string("\"") + key + "\": \"" + value + "\", ";
    };
    add("cuda_reason", cuda.reason);
    add("cuda_code", cuda.code);
    add("cuda_runtime", cuda.runtime);
    add("cuda_driver", cuda.driver);
    if (!cuda.devices.empty()) about_cuda += "\"cuda_devices\": [" + cuda.devices + "], ";
    char first[512], last[512];
    std::snprintf(first, sizeof first,
                  "{\"version\": \"%d.%d.%d\", \"abi\": %d, \"compiler\": \"%s\", \"backends\": [\"cpu\"%s], \"cuda\": "
                  "\"%s\", ",
                  DSOPT_VERSION_MAJOR, DSOPT_VERSION_MINOR, DSOPT_VERSION_PATCH, DSOPT_ABI_VERSION, __VERSION__,
                  cuda.usable() ? ", \"cuda\"" : "", cuda.state);
    std::snprintf(
        last, sizeof last,
        "\"comms\": [\"self\", \"local\", \"table\"%s%s], \"nccl\": \"%s\", \"hccl\": \"%s\", \"isa\": \"%s\", "
        "%s\"threads\": \"pool\", \"checkpoint_format\": 1}",
        has_nccl ? ", \"nccl\"" : "", has_hccl ? ", \"hccl\"" : "", nccl, hccl, cpu_isa_name(), unknown.c_str());
    return first + about_cuda + last;
}

} // namespace

int32_t dsopt_version(void) { return DSOPT_VERSION_MAJOR * 10000 + DSOPT_VERSION_MINOR * 100 + DSOPT_VERSION_PATCH; }
int32_t dsopt_abi_version(void) { return DSOPT_ABI_VERSION; }
const char *dsopt_status_name(dsopt_status status) { return status_name(status); }
const char *dsopt_last_error(void) { return last_error(); }

const char *dsopt_build_info(void) {
    const char *text = "{}";
    run_without_status([&] {
        static constinit Lazy<std::string> info;
        text = info.get(make_build_info).c_str();
    });
    return text;
}

// ---------------------------------------------------------------------------------------------------------- context
dsopt_status dsopt_context_create(const dsopt_context_desc *desc, dsopt_context **ctx) {
    return fence([&] {
        not_null(ctx, "ctx");
        auto object = std::make_shared<const Context>(read_struct(desc, "dsopt_context_desc"));
        const int threads = object->parallel().threads;
        object->log(DSOPT_LOG_INFO, "dsopt %d.%d.%d: %s backend, %s, %d thread%s", DSOPT_VERSION_MAJOR,
                    DSOPT_VERSION_MINOR, DSOPT_VERSION_PATCH, object->device().name(), cpu_isa_name(), threads,
                    threads == 1 ? "" : "s");
        if (const char *const isa = unknown_isa())
            object->log(DSOPT_LOG_WARN,
                        "DSOPT_ISA is %s, not generic, avx2, avx512 or avx512_bf16: the %s kernels are used",
                        quoted(isa).c_str(), cpu_isa_name());
        *ctx = new dsopt_context{std::move(object)};
    });
}
dsopt_status dsopt_context_query(const dsopt_context *ctx, dsopt_context_info *info) {
    return fence([&] { write_struct(info, object_of(ctx, "ctx")->info(), "dsopt_context_info"); });
}
void dsopt_context_destroy(dsopt_context *ctx) {
    run_without_status([&] { delete ctx; });
}

// ------------------------------------------------------------------------------------------------------------- comms
dsopt_status dsopt_comm_unique_id(int32_t kind, void *id, size_t *bytes) {
    return fence([&] {
        not_null(bytes, "bytes");
        *bytes = make_comm_id(kind, id, *bytes);
    });
}
dsopt_status dsopt_comm_create(dsopt_context *ctx, const dsopt_comm_desc *desc, dsopt_comm **comm) {
    return fence([&] {
        const auto &context = object_of(ctx, "ctx");
        not_null(comm, "comm");
        *comm = new dsopt_comm{make_comm(context, read_struct(desc, "dsopt_comm_desc"))};
    });
}
dsopt_status dsopt_comm_query(const dsopt_comm *comm, dsopt_comm_info *info) {
    return fence([&] { write_struct(info, object_of(comm, "the comm")->info(), "dsopt_comm_info"); });
}
dsopt_status dsopt_comm_all_reduce(dsopt_comm *comm, const dsopt_tensor *list, int64_t count, int32_t op,
                                   void *stream) {
    return fence([&] {
        Comm &object = *object_of(comm, "the comm");
        if (op != DSOPT_OP_SUM && op != DSOPT_OP_MAX && op != DSOPT_OP_MEAN)
            throw Error(DSOPT_ERR_ARGUMENT, "op is %d, not SUM, MAX or MEAN", op);
        check_list(list, count, "tensor");
        context_of(object).device().check_stream(stream);
        all_reduce_list(object, list, count, op, stream);
    });
}
void dsopt_comm_abort(dsopt_comm *comm) {
    // After fork() object_of() throws, so that the parent's ranks continue.
    if (comm != nullptr) run_without_status([&] { object_of(comm, "the comm")->abort(); });
}
void dsopt_comm_destroy(dsopt_comm *comm) {
    run_without_status([&] { delete comm; });
}

// ------------------------------------------------------------------------------------------------------------ scaler
dsopt_status dsopt_scaler_create(dsopt_context *ctx, const dsopt_scaler_desc *desc, dsopt_scaler **scaler) {
    return fence([&] {
        const auto &context = object_of(ctx, "ctx");
        not_null(scaler, "scaler");
        *scaler = new dsopt_scaler{std::make_shared<Scaler>(context, read_struct(desc, "dsopt_scaler_desc"))};
    });
}
void dsopt_scaler_destroy(dsopt_scaler *scaler) {
    run_without_status([&] { delete scaler; });
}
const float *dsopt_scaler_device_scale(const dsopt_scaler *scaler) {
    return scaler != nullptr ? scaler->object->scale() : nullptr;
}
dsopt_status dsopt_scaler_set(dsopt_scaler *scaler, int32_t what, double value, void *stream) {
    return with(scaler, on_stream(stream, [&](Scaler &object) { object.set(what, value, stream); }));
}
dsopt_status dsopt_scaler_update(dsopt_scaler *scaler, const int32_t *overflow, void *stream) {
    return with(scaler, on_stream(stream, [&](Scaler &object) { object.update(overflow, stream); }));
}
dsopt_status dsopt_scaler_query(dsopt_scaler *scaler, dsopt_scaler_info *info) {
    return with(scaler, [&](Scaler &object) { write_struct(info, object.info(), "dsopt_scaler_info"); });
}
dsopt_status dsopt_scaler_detach(dsopt_scaler *scaler) {
    return with(scaler, [&](Scaler &object) { object.detach_all(); });
}
dsopt_status dsopt_scaler_init_state(const dsopt_scaler *scaler, const dsopt_tensor *state, int64_t count,
                                     void *stream) {
    return with(scaler, on_stream(stream, [&](Scaler &object) { object.init_state(state, count, stream); }));
}
dsopt_status dsopt_scaler_update_arrays(const dsopt_scaler *scaler, const dsopt_tensor *state, int64_t count,
                                        const int32_t *overflow, void *stream) {
    return with(scaler, on_stream(stream, [&](Scaler &object) { object.transition(state, count, overflow, stream); }));
}
dsopt_status dsopt_scaler_decode(const int32_t *words, dsopt_scaler_info *info) {
    return fence([&] {
        ScalerState state;
        std::memcpy(&state, not_null(words, "words"), sizeof state);
        write_struct(info, Scaler::decode(state), "dsopt_scaler_info");
    });
}
dsopt_status dsopt_scaler_scale_loss(const dsopt_scaler *scaler, const dsopt_tensor *loss, void *stream) {
    return with(scaler, on_stream(stream, [&](Scaler &object) { object.scale_loss(*not_null(loss, "loss"), stream); }));
}

// ----------------------------------------------------------------------------------------------- groups, optimizer
dsopt_status dsopt_group_init(dsopt_group *group, size_t size, int32_t algorithm) {
    return fence([&] {
        not_null(group, "group");
        check_size<dsopt_group>(size, "dsopt_group");
        const dsopt_group defaults = default_group(algorithm);
        std::memset(group, 0, size);
        group->size = size;
        write_struct(group, defaults, "dsopt_group");
    });
}

dsopt_status dsopt_optimizer_create(dsopt_context *ctx, const dsopt_optimizer_desc *desc, dsopt_optimizer **opt) {
    return fence([&] {
        const auto &context = object_of(ctx, "ctx");
        not_null(opt, "opt");
        dsopt_optimizer_desc known = read_struct(desc, "dsopt_optimizer_desc");
        Attachments attachments = attachments_of(known);
        known.experts = nullptr; // the caller's array is not kept
        *opt = new dsopt_optimizer{std::make_shared<Optimizer>(context, known, std::move(attachments))};
    });
}
void dsopt_optimizer_destroy(dsopt_optimizer *opt) {
    run_without_status([&] { delete opt; });
}
dsopt_status dsopt_optimizer_retain(dsopt_optimizer *opt, dsopt_optimizer **other) {
    return fence([&] {
        const auto &object = object_of(opt, "the optimizer");
        not_null(other, "other"); // checked first: a new handle would leak
        *other = new dsopt_optimizer{object};
    });
}

dsopt_status dsopt_optimizer_add_group(dsopt_optimizer *opt, const dsopt_group *group, const dsopt_param *params,
                                       int64_t count) {
    return with<Needs::groups>(opt, [&](Optimizer &optimizer) {
        optimizer.add_group(read_struct(not_null(group, "group"), "dsopt_group"), params, count);
    });
}
dsopt_status dsopt_optimizer_add_params(dsopt_optimizer *opt, const dsopt_param *params, int64_t count) {
    return with<Needs::groups>(opt, [&](Optimizer &optimizer) { optimizer.add_params(params, count); });
}

dsopt_status dsopt_optimizer_set(dsopt_optimizer *opt, int32_t group, int32_t key, double value) {
    return with<Needs::groups>(opt, [&](Optimizer &optimizer) { optimizer.set(group, key, value); });
}
dsopt_status dsopt_optimizer_get(const dsopt_optimizer *opt, int32_t group, int32_t key, double *value) {
    return with<Needs::groups>(
        opt, [&](const Optimizer &optimizer) { *not_null(value, "value") = optimizer.get(group, key); });
}
dsopt_status dsopt_optimizer_count(const dsopt_optimizer *opt, int64_t *groups, int64_t *params) {
    return with<Needs::groups>(opt, [&](const Optimizer &optimizer) {
        if (groups != nullptr) *groups = int64_t(optimizer.groups().size());
        if (params != nullptr) *params = int64_t(optimizer.params().size());
    });
}

// ------------------------------------------------------------------------------------------------------------- state
dsopt_status dsopt_optimizer_state_count(const dsopt_optimizer *opt, int64_t *count) {
    return with(opt,
                [&](const Optimizer &optimizer) { *not_null(count, "count") = int64_t(optimizer.state().size()); });
}
dsopt_status dsopt_optimizer_state(const dsopt_optimizer *opt, int64_t index, dsopt_state_info *info) {
    return with(opt, [&](const Optimizer &optimizer) {
        const StateEntry &entry = entry_at(optimizer, index);
        dsopt_state_info known{};
        known.name = entry.name();
        known.param = entry.param;
        known.tensor = entry.tensor();
        known.flags = entry.flags;
        known.generation = entry.generation;
        known.block = entry.block();
        if (entry.param < 0) {
            known.ndim = 1;
            known.dims = optimizer.state().flat_dims(entry.kind);
        } else {
            const std::vector<int64_t> &dims = dims_of(optimizer.params()[size_t(entry.param)], entry);
            known.ndim = int32_t(dims.size());
            known.dims = dims.data();
        }
        write_struct(info, known, "dsopt_state_info");
    });
}
dsopt_status dsopt_optimizer_shard(const dsopt_optimizer *opt, int64_t param, int32_t rank, int64_t *begin,
                                   int64_t *numel) {
    return with(opt, [&](const Optimizer &optimizer) {
        not_null(begin, "begin");
        not_null(numel, "numel");
        const Range part = find_part(optimizer, param, rank);
        *begin = part.begin;
        *numel = part.numel;
    });
}
dsopt_status dsopt_optimizer_export(dsopt_optimizer *opt, int64_t index, void *host, size_t bytes) {
    return with(opt, [&](Optimizer &optimizer) { export_bytes(optimizer, index, host, bytes); });
}
dsopt_status dsopt_optimizer_import(dsopt_optimizer *opt, int64_t index, const void *host, size_t bytes) {
    return with(opt, [&](Optimizer &optimizer) { import_bytes(optimizer, index, host, bytes); });
}
dsopt_status dsopt_optimizer_export_f32(dsopt_optimizer *opt, int64_t index, float *host, int64_t count) {
    return with(opt, [&](Optimizer &optimizer) {
        check_f32_copy(optimizer, index, host, count);
        if (!is_converted(entry_at(optimizer, index)))
            return export_bytes(optimizer, index, host, size_t(count) * sizeof(float));
        optimizer.prepare_for_host();
        if (count != 0) export_f32(optimizer, entry_at(optimizer, index), host);
    });
}
dsopt_status dsopt_optimizer_import_f32(dsopt_optimizer *opt, int64_t index, const float *host, int64_t count) {
    return with(opt, [&](Optimizer &optimizer) {
        optimizer.check_nothing_ready();
        check_f32_copy(optimizer, index, host, count);
        if (!is_converted(entry_at(optimizer, index)))
            return import_bytes(optimizer, index, host, size_t(count) * sizeof(float));
        optimizer.prepare_for_host();
        if (count != 0) import_f32(optimizer, entry_at(optimizer, index), host);
        optimizer.state_changed();
    });
}
dsopt_status dsopt_optimizer_bind(dsopt_optimizer *opt, int32_t what, const dsopt_tensor *list, int64_t count) {
    return with<Needs::groups>(opt, [&](Optimizer &optimizer) {
        optimizer.check_nothing_ready();
        if (what == DSOPT_BIND_PARAMS)
            optimizer.bind_params(list, count);
        else if (what == DSOPT_BIND_STATE)
            optimizer.bind_state(list, count);
        else
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_bind: what is %d", what);
    });
}
dsopt_status dsopt_optimizer_reset(dsopt_optimizer *opt, int32_t what, void *stream) {
    return with(opt, on_stream(stream, [&](Optimizer &optimizer) { optimizer.reset(what, stream); }));
}

// -------------------------------------------------------------------------------------------------------------- step
dsopt_status dsopt_optimizer_step(dsopt_optimizer *opt, const dsopt_step *step) {
    return with<Needs::groups>(opt, [&](Optimizer &optimizer) { optimizer.step(step); });
}
dsopt_status dsopt_optimizer_apply(const dsopt_optimizer *opt, const dsopt_step *step) {
    return fence([&] { // as with(), which would finalize groups before a failure can be reported to other ranks
        Optimizer &optimizer = *object_of(opt, "the optimizer");
        const Shared lock(optimizer.in_use());
        optimizer.apply(step);
    });
}
dsopt_status dsopt_optimizer_init_state(const dsopt_optimizer *opt, const dsopt_tensor *params, int64_t count,
                                        const dsopt_tensor *state, int64_t state_count, void *stream) {
    return with(opt, on_stream(stream, [&](const Optimizer &optimizer) {
                    optimizer.init_state(params, count, state, state_count, stream);
                }));
}
dsopt_status dsopt_optimizer_next_reduction_on_device(const dsopt_optimizer *opt, const dsopt_tensor *schedule,
                                                      int32_t *reduction, void *stream) {
    return with(opt, on_stream(stream, [&](const Optimizer &optimizer) {
                    write_reduction(optimizer, schedule, reduction, stream);
                }));
}
dsopt_status dsopt_schedule_decode(const dsopt_optimizer *opt, const int32_t *words, dsopt_schedule_info *info) {
    return with(opt, [&](const Optimizer &optimizer) {
        write_struct(info, decode_schedule(optimizer, not_null(words, "words")), "dsopt_schedule_info");
    });
}
dsopt_status dsopt_optimizer_next_reduction(dsopt_optimizer *opt, int64_t call, int32_t *reduction) {
    const auto query = [&](const Optimizer &optimizer) {
        *not_null(reduction, "reduction") = next_reduction(optimizer, call);
    };
    return call == 0 ? with(opt, query) : with(static_cast<const dsopt_optimizer *>(opt), query);
}
dsopt_status dsopt_optimizer_accumulate(dsopt_optimizer *opt, const dsopt_tensor *grads, int64_t count, void *stream) {
    return with(opt, on_stream(stream, [&](Optimizer &optimizer) { optimizer.accumulate(grads, count, stream); }));
}
dsopt_status dsopt_optimizer_workspace(const dsopt_optimizer *opt, size_t *bytes) {
    return with(opt, [&](const Optimizer &optimizer) { *not_null(bytes, "bytes") = optimizer.workspace_bytes(); });
}
dsopt_status dsopt_optimizer_report(dsopt_optimizer *opt, dsopt_report *report) {
    return with(opt, [&](Optimizer &optimizer) {
        const dsopt_report found = optimizer.report();
        write_struct(report, found, "dsopt_report");
        optimizer.log_changes(found);
    });
}

// --------------------------------------------------------------------------------------------------- a step in parts
dsopt_status dsopt_optimizer_ready(dsopt_optimizer *opt, dsopt_ready *ready) {
    return fence([&] { // as with(), which would wait for exchanges that earlier calls have begun
        Optimizer &optimizer = *object_of(opt, "the optimizer");
        const Exclusive lock(optimizer.in_use());
        optimizer.finalize_groups();
        optimizer.ready(ready);
    });
}
dsopt_status dsopt_optimizer_wait(dsopt_optimizer *opt, int64_t first, int64_t count, void *stream) {
    return fence([&] {
        Optimizer &optimizer = *object_of(opt, "the optimizer");
        const Exclusive lock(optimizer.in_use());
        optimizer.finalize_groups();
        on_stream(stream, [&](Optimizer &known) { known.wait(first, count, stream); })(optimizer);
    });
}
dsopt_status dsopt_optimizer_bucket(const dsopt_optimizer *opt, int64_t param, int64_t *first, int64_t *count) {
    return with(opt, [&](const Optimizer &optimizer) {
        not_null(first, "first");
        not_null(count, "count");
        const TensorInterval found = optimizer.bucket(param);
        *first = found.first;
        *count = found.count;
    });
}

// ----------------------------------------------------------------------------------------------------- save and load
dsopt_status dsopt_optimizer_save(dsopt_optimizer *opt, const char *path, const dsopt_io *io) {
    return with(opt, [&](Optimizer &optimizer) {
        optimizer.check_nothing_ready();
        save_state(optimizer, path, read_struct(io, "dsopt_io"));
    });
}
dsopt_status dsopt_optimizer_load(dsopt_optimizer *opt, const char *path, const dsopt_io *io) {
    return with(opt, [&](Optimizer &optimizer) {
        optimizer.check_nothing_ready();
        load_state(optimizer, path, read_struct(io, "dsopt_io"));
    });
}

// ------------------------------------------------------------------------------------------------------------- lists
dsopt_status dsopt_zero_grad(dsopt_context *ctx, dsopt_tensor *grads, int64_t count, int32_t how, void *stream) {
    return fence([&] {
        const Context &context = *object_of(ctx, "ctx");
        if (how != DSOPT_ZERO_FILL && how != DSOPT_ZERO_NONE)
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_zero_grad: how is %d", how);
        check_list(grads, count, "gradient");
        context.device().check_stream(stream);
        if (how == DSOPT_ZERO_FILL)
            context.device().kernels().zero(grads, count, context.parallel(), stream);
        else
            for (int64_t i = 0; i < count; ++i) grads[i].data = nullptr;
    });
}
dsopt_status dsopt_compressed_sizes(const dsopt_comm *comm, const dsopt_compressed *args, int64_t *worker,
                                    int64_t *server, size_t *workspace) {
    return with(comm, args, [&](const Comm &data, const Comm *node, const dsopt_compressed &known) {
        const OwnedLayout layout = make_layout(data, node, known);
        if (worker != nullptr) *worker = layout.slice.worker_floats();
        if (server != nullptr) *server = layout.slice.server_floats();
        if (workspace != nullptr) *workspace = with_alignment_padding(Exchange::workspace_bytes(layout));
    });
}
dsopt_status dsopt_compressed_allreduce(dsopt_comm *comm, const dsopt_compressed *args) {
    return with(comm, args, compressed_allreduce);
}
dsopt_status dsopt_compressed_errors(const dsopt_comm *comm, const dsopt_compressed *args, float *worker,
                                     float *server) {
    return with(comm, args, [&](const Comm &data, const Comm *node, const dsopt_compressed &known) {
        compressed_errors(data, node, known, worker, server);
    });
}
dsopt_status dsopt_tensors_norm(dsopt_context *ctx, const dsopt_tensor *list, int64_t count, int32_t norm,
                                double max_norm, dsopt_comm *comm, dsopt_norm_result *result, void *stream) {
    return fence([&] {
        const Context &context = *object_of(ctx, "ctx");
        if (norm != DSOPT_NORM_L2 && norm != DSOPT_NORM_MAX)
            throw Error(DSOPT_ERR_ARGUMENT, "norm is %d, not L2 or MAX", norm);
        check_max_norm(max_norm, "max_norm");
        not_null(result, "result");
        check_aligned(result, alignof(dsopt_norm_result), "result");
        check_list(list, count, "tensor");
        context.device().check_stream(stream);
        norm_over_ranks(context, comm_if_any(comm).get(), list, count, norm, max_norm, result, stream);
    });
}
dsopt_status dsopt_tensors_axpby(dsopt_context *ctx, const float *a, const dsopt_tensor *x, float b,
                                 const dsopt_tensor *y, int64_t count, void *stream) {
    return fence([&] {
        const Context &context = *object_of(ctx, "ctx");
        check_list(x, count, "x");
        check_list(y, count, "y");
        for (int64_t i = 0; i < count; ++i)
            if (x[i].numel != y[i].numel)
                throw Error(DSOPT_ERR_SHAPE, "x '%lld' has numel %lld, y has %lld", ll(i), ll(x[i].numel),
                            ll(y[i].numel));
        context.device().check_stream(stream);
        context.device().kernels().axpby({.data = a}, x, b, y, count, context.parallel(), stream);
    });
}
dsopt_status dsopt_tensors_clamp(dsopt_context *ctx, const dsopt_tensor *list, int64_t count, double limit,
                                 void *stream) {
    return fence([&] {
        const Context &context = *object_of(ctx, "ctx");
        require(limit > 0, "limit", limit, "above 0");
        check_list(list, count, "tensor");
        context.device().check_stream(stream);
        context.device().kernels().clamp(list, count, float(limit), context.parallel(), stream);
    });
}
