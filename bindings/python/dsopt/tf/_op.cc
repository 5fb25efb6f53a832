// SPDX-License-Identifier: Apache-2.0
// The op of dsopt.tf: one step in place on resource variables. It is compiled against the installed TensorFlow
// (_build.py) and opens libdsopt at run time.
#include "dsopt_dl.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/threadpool.h"
#include "xla/stream_executor/stream.h"
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/synchronization/notification.h>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace tensorflow;

// Constant once dsopt_tf_load has returned, which is before the first op is made.
dsopt_dl dl;

absl::Status status_of(dsopt_status status, absl::string_view text) {
    const std::string message = absl::StrCat(text, " (", dl.dsopt_status_name(status), ")");
    switch (status) {
    case DSOPT_ERR_UNSUPPORTED: return absl::UnimplementedError(message);
    case DSOPT_ERR_STATE:
    case DSOPT_ERR_BUSY:
    case DSOPT_ERR_FORKED: return absl::FailedPreconditionError(message);
    case DSOPT_ERR_NOMEM: return absl::ResourceExhaustedError(message);
    case DSOPT_ERR_MISSING: return absl::NotFoundError(message);
    }
    return status < DSOPT_ERR_UNSUPPORTED ? absl::InvalidArgumentError(message) : absl::InternalError(message);
}

/// Converts the status of a call in this thread.
absl::Status check(dsopt_status status) {
    return status == DSOPT_OK ? absl::OkStatus() : status_of(status, dl.dsopt_last_error());
}

/// Returns the dtype of a parameter or gradient.
int32_t dtype_of(DataType type) {
    return type == DT_HALF ? DSOPT_DTYPE_F16 : type == DT_BFLOAT16 ? DSOPT_DTYPE_BF16 : DSOPT_DTYPE_F32;
}

/// Returns the type of a state variable. E4M3 codes are uint8, because Keras cannot load float8 from its files.
DataType type_of(int32_t dtype) {
    switch (dtype) {
    case DSOPT_DTYPE_BF16: return DT_BFLOAT16;
    case DSOPT_DTYPE_I16: return DT_INT16;
    case DSOPT_DTYPE_U8:
    case DSOPT_DTYPE_F8_E4M3: return DT_UINT8;
    }
    return DT_FLOAT;
}

/// Sets a field of a group that is a number.
absl::Status set_field(absl::string_view name, absl::string_view text, dsopt_group &group) {
    static constexpr std::pair<const char *, double dsopt_group::*> kNumbers[] = {
        {"beta1", &dsopt_group::beta1},       {"beta2", &dsopt_group::beta2},
        {"eps", &dsopt_group::eps},           {"weight_decay", &dsopt_group::weight_decay},
        {"momentum", &dsopt_group::momentum}, {"ns_a", &dsopt_group::ns_a},
        {"ns_b", &dsopt_group::ns_b},         {"ns_c", &dsopt_group::ns_c},
    };
    static constexpr std::pair<const char *, int32_t dsopt_group::*> kIntegers[] = {
        {"algorithm", &dsopt_group::algorithm},
        {"flags", &dsopt_group::flags},
        {"exp_avg_format", &dsopt_group::exp_avg_format},
        {"exp_avg_sq_format", &dsopt_group::exp_avg_sq_format},
        {"ns_steps", &dsopt_group::ns_steps},
        {"ns_schedule", &dsopt_group::ns_schedule},
        {"ns_dtype", &dsopt_group::ns_dtype},
        {"adjust", &dsopt_group::adjust},
    };
    for (const auto &[known, field] : kNumbers)
        if (name == known) {
            if (absl::SimpleAtod(text, &(group.*field))) return absl::OkStatus();
            return absl::InvalidArgumentError(absl::StrCat(name, " is '", text, "', which is no number"));
        }
    for (const auto &[known, field] : kIntegers)
        if (name == known) {
            if (absl::SimpleAtoi(text, &(group.*field))) return absl::OkStatus();
            return absl::InvalidArgumentError(absl::StrCat(name, " is '", text, "', which is no integer"));
        }
    return absl::InvalidArgumentError(absl::StrCat("'", name, "' is no field of a group"));
}

/// Reads groups from words such as "beta1=0.9". A group begins with its algorithm, whose defaults the others replace.
absl::Status read_groups(const std::vector<std::string> &words, std::vector<dsopt_group> &groups) {
    for (const std::string &word : words) {
        const size_t end = std::min(word.find('='), word.size());
        const std::string name = word.substr(0, end), value = word.substr(std::min(end + 1, word.size()));
        const bool begins = name == "algorithm";
        if (begins) groups.emplace_back();
        if (groups.empty()) return absl::InvalidArgumentError("the first field of a group must be its algorithm");
        TF_RETURN_IF_ERROR(set_field(name, value, groups.back()));
        if (begins)
            TF_RETURN_IF_ERROR(
                check(dl.dsopt_group_init(&groups.back(), sizeof groups.back(), groups.back().algorithm)));
    }
    return absl::OkStatus();
}

dsopt_tensor view(const Tensor &tensor, int32_t dtype) {
    return {const_cast<char *>(tensor.tensor_data().data()), tensor.NumElements(), dtype, 0};
}

/// Indices of one parallel_for. Each thread claims the next index, so the caller finishes alone if the pool is full.
class Pieces {
public:
    Pieces(void (*body)(void *, int64_t), void *arg, int64_t count) : body_(body), arg_(arg), count_(count) {}
    void run() {
        int64_t mine = 0;
        for (int64_t i; (i = next_.fetch_add(1)) < count_; ++mine) body_(arg_, i);
        if (mine != 0 && finished_.fetch_add(mine) + mine == count_) all_.Notify();
    }
    void wait() { all_.WaitForNotification(); }

private:
    void (*const body_)(void *, int64_t);
    void *const arg_;
    const int64_t count_;
    std::atomic<int64_t> next_{0}, finished_{0};
    absl::Notification all_;
};

/// dsopt_parallel_for on TensorFlow's pool. A helper that the pool runs late finds no index left.
void run_on_pool(void *user, int64_t n, void (*body)(void *, int64_t), void *arg) {
    auto *const pool = static_cast<thread::ThreadPool *>(user);
    if (n <= 0) return;
    const auto pieces = std::make_shared<Pieces>(body, arg, n);
    const int64_t helpers = std::min<int64_t>(n - 1, pool->NumThreads());
    for (int64_t i = 0; i < helpers; ++i) pool->Schedule([pieces] { pieces->run(); });
    pieces->run();
    pieces->wait();
}

struct DestroyContext {
    void operator()(dsopt_context *context) const { dl.dsopt_context_destroy(context); }
};
struct DestroyOptimizer {
    void operator()(dsopt_optimizer *optimizer) const { dl.dsopt_optimizer_destroy(optimizer); }
};

/// Attributes describe the optimizer, which is created with the kernel; the variables are inputs of each call.
class DsoptStep : public OpKernel {
public:
    explicit DsoptStep(OpKernelConstruction *ctx) : OpKernel(ctx) {
        OP_REQUIRES(ctx, dl.library != nullptr,
                    absl::FailedPreconditionError("libdsopt is not loaded: import dsopt.tf"));
        const auto *const accelerator = ctx->device()->tensorflow_accelerator_device_info();
        on_gpu_ = ctx->device_type() == DeviceType(DEVICE_GPU);
        DSOPT_NEW(dsopt_context_desc, desc);
        if (on_gpu_) {
            desc.backend = DSOPT_BACKEND_CUDA;
            desc.device = accelerator->gpu_id;
        } else {
            desc.threads = ctx->device()->tensorflow_cpu_worker_threads()->num_threads;
        }
        dsopt_context *context = nullptr;
        OP_REQUIRES_OK(ctx, check(dl.dsopt_context_create(&desc, &context)));
        context_.reset(context);
        OP_REQUIRES_OK(ctx, make_optimizer(ctx));
        OP_REQUIRES_OK(ctx, add_params(ctx));
        OP_REQUIRES_OK(ctx, read_state(ctx));
        OP_REQUIRES_OK(ctx, check(dl.dsopt_optimizer_workspace(optimizer_.get(), &workspace_)));
    }

    void Compute(OpKernelContext *ctx) override {
        OpInputList grads, scales;
        OP_REQUIRES_OK(ctx, ctx->input_list("grads", &grads));
        OP_REQUIRES_OK(ctx, ctx->input_list("grad_scale", &scales));
        const Tensor *steps = nullptr, *lr = nullptr;
        OP_REQUIRES_OK(ctx, ctx->input("steps", &steps));
        OP_REQUIRES_OK(ctx, ctx->input("lr", &lr));
        OP_REQUIRES_OK(ctx, check_shape(*steps, TensorShape({count()}), "steps"));
        OP_REQUIRES_OK(ctx, check_shape(*lr, TensorShape({groups_}), "lr"));
        for (const Tensor &scale : scales) OP_REQUIRES_OK(ctx, check_shape(scale, TensorShape({}), "grad_scale"));

        std::vector<core::RefCountPtr<Var>> variables(entries_.size());
        for (int i = 0; i < int(entries_.size()); ++i) {
            const auto name = [&] { return label(entries_[size_t(i)].what, entries_[size_t(i)].param); };
            if (ctx->input(i).dims() != 0)
                OP_REQUIRES_OK(ctx, check_shape(ctx->input(i), TensorShape({}), absl::StrCat("handle of ", name())));
            const absl::Status found = LookupResource(ctx, HandleFromInput(ctx, i), &variables[size_t(i)]);
            OP_REQUIRES(
                ctx, !absl::IsInvalidArgument(found),
                absl::InvalidArgumentError(absl::StrCat(name(), " must be a resource variable: ", found.message())));
            OP_REQUIRES(ctx, found.ok(),
                        absl::FailedPreconditionError(absl::StrCat(name(), " is not initialized: ", found.message())));
        }
        std::vector<Var *> order;
        for (const auto &variable : variables) order.push_back(variable.get());
        // As in every TensorFlow op that locks several variables: two concurrent steps then cannot deadlock.
        std::sort(order.begin(), order.end(), [](Var *a, Var *b) { return std::less<>()(a->mu(), b->mu()); });
        OP_REQUIRES(ctx, std::adjacent_find(order.begin(), order.end()) == order.end(),
                    absl::InvalidArgumentError("a variable is in the list twice"));
        std::deque<mutex_lock> locks;
        for (Var *variable : order) locks.emplace_back(*variable->mu());

        std::vector<dsopt_tensor> params, state, gradients;
        for (size_t i = 0; i < entries_.size(); ++i)
            OP_REQUIRES_OK(ctx, add(ctx, *variables[i], entries_[i], i < names_.size() ? params : state));
        for (int i = 0; i < count(); ++i) {
            OP_REQUIRES_OK(ctx, check_shape(grads[i], entries_[size_t(i)], "gradient of"));
            gradients.push_back(view(grads[i], dtype_of(grads[i].dtype())));
        }
        // The step increments a copy. The caller updates the persistent counter.
        Tensor counters, workspace;
        OP_REQUIRES_OK(ctx, ctx->allocate_temp(DT_INT32, steps->shape(), &counters));
        OP_REQUIRES_OK(ctx, copy(ctx, *steps, counters));
        state.push_back(view(counters, DSOPT_DTYPE_I32));
        OP_REQUIRES_OK(ctx, ctx->allocate_temp(DT_UINT8, {int64_t(workspace_)}, &workspace));

        DSOPT_NEW(dsopt_step, step);
        step.params = params.data();
        step.grads = gradients.data();
        step.count = count();
        step.state = state.data();
        step.state_count = int64_t(state.size());
        step.lr = lr->flat<float>().data();
        if (scales.size() != 0) step.grad_scale = scales[0].flat<float>().data();
        step.workspace = const_cast<char *>(workspace.tensor_data().data());
        step.workspace_bytes = workspace_;
        float report[DSOPT_REPORT_FLOATS] = {};
        if (on_gpu_) {
            step.stream = ctx->op_device_context()->stream()->platform_specific_handle().stream;
        } else {
            step.report = report;
            step.parallel_for = run_on_pool;
            step.parallel_user = ctx->device()->tensorflow_cpu_worker_threads()->workers;
        }
        OP_REQUIRES_OK(ctx, check(dl.dsopt_optimizer_apply(optimizer_.get(), &step)));
        if ((int(report[DSOPT_REPORT_REASONS]) & DSOPT_SKIP_HYPER) == 0) return;
        const float *const wrong =
            std::find_if(step.lr, step.lr + groups_ - 1, [](float rate) { return !std::isfinite(rate) || rate < 0; });
        ctx->SetStatus(absl::InvalidArgumentError(
            absl::StrCat("learning_rate is ", *wrong, ", must be finite in fp32 and not negative")));
    }

private:
    /// A variable among the inputs, as the attributes describe it.
    struct Entry {
        const char *what; // in error texts
        size_t param;     // index
        int32_t dtype;
        DataType type;
        PartialTensorShape shape;
    };

    int count() const { return int(names_.size()); }
    std::string label(const char *what, size_t param) const { return absl::StrCat(what, " '", names_[param], "'"); }

    absl::Status make_optimizer(OpKernelConstruction *ctx) {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        // Keras has no masters and does not check gradients.
        bool remainders = false;
        int64_t seed = 0;
        TF_RETURN_IF_ERROR(ctx->GetAttr("remainders", &remainders));
        TF_RETURN_IF_ERROR(ctx->GetAttr("seed", &seed));
        desc.flags = remainders ? 0 : DSOPT_OPTIMIZER_NO_MASTER;
        desc.masters = remainders ? DSOPT_MASTERS_REMAINDER : DSOPT_MASTERS_PER_TENSOR;
        desc.seed = uint64_t(seed);
        desc.nonfinite = DSOPT_NONFINITE_APPLY;
        TF_RETURN_IF_ERROR(read(ctx, "clipvalue", desc.max_value));
        dsopt_optimizer *optimizer = nullptr;
        TF_RETURN_IF_ERROR(check(dl.dsopt_optimizer_create(context_.get(), &desc, &optimizer)));
        optimizer_.reset(optimizer);

        std::vector<std::string> fields;
        std::vector<dsopt_group> groups;
        TF_RETURN_IF_ERROR(ctx->GetAttr("fields", &fields));
        TF_RETURN_IF_ERROR(read_groups(fields, groups));
        groups_ = int64_t(groups.size());
        for (const dsopt_group &group : groups)
            TF_RETURN_IF_ERROR(check(dl.dsopt_optimizer_add_group(optimizer_.get(), &group, nullptr, 0)));
        return absl::OkStatus();
    }

    /// TensorFlow's float attributes have 32 bits, which would leave 14 bits for 1 - beta_2.
    static absl::Status read(OpKernelConstruction *ctx, const char *name, double &value) {
        std::string text;
        TF_RETURN_IF_ERROR(ctx->GetAttr(name, &text));
        if (absl::SimpleAtod(text, &value)) return absl::OkStatus();
        return absl::InvalidArgumentError(absl::StrCat(name, " is '", text, "', which is no number"));
    }

    absl::Status add_params(OpKernelConstruction *ctx) {
        std::vector<int32> groups;
        std::vector<int64_t> blocks;
        std::vector<bool> f32_moments, rows_are_inputs;
        DataTypeVector types;
        std::vector<PartialTensorShape> shapes;
        TF_RETURN_IF_ERROR(ctx->GetAttr("names", &names_));
        TF_RETURN_IF_ERROR(ctx->GetAttr("dtypes", &types));
        TF_RETURN_IF_ERROR(ctx->GetAttr("shapes", &shapes));
        TF_RETURN_IF_ERROR(ctx->GetAttr("group_of", &groups));
        TF_RETURN_IF_ERROR(ctx->GetAttr("f32_moments", &f32_moments));
        TF_RETURN_IF_ERROR(ctx->GetAttr("blocks", &blocks));
        TF_RETURN_IF_ERROR(ctx->GetAttr("rows_are_inputs", &rows_are_inputs));
        int inputs = 0;
        TF_RETURN_IF_ERROR(ctx->GetAttr("n", &inputs));
        DataTypeVector gradients;
        TF_RETURN_IF_ERROR(ctx->GetAttr("grad_types", &gradients));
        int scaled = 0;
        TF_RETURN_IF_ERROR(ctx->GetAttr("scaled", &scaled));
        if (scaled > 1)
            return absl::InvalidArgumentError(absl::StrCat("grad_scale has ", scaled, " tensors, must have 0 or 1"));
        for (const auto &[name, size] : {std::pair("names", names_.size()),
                                         {"dtypes", types.size()},
                                         {"shapes", shapes.size()},
                                         {"group_of", groups.size()},
                                         {"f32_moments", f32_moments.size()},
                                         {"rows_are_inputs", rows_are_inputs.size()},
                                         {"grads", gradients.size()}})
            if (size != size_t(inputs))
                return absl::InvalidArgumentError(
                    absl::StrCat(name, " has ", size, " elements, must have ", inputs, ", one per variable"));
        if (blocks.size() != 2 * names_.size())
            return absl::InvalidArgumentError(
                absl::StrCat("blocks has ", blocks.size(), " elements, must have ", 2 * inputs, ", two per variable"));
        std::vector<dsopt_param> params(names_.size());
        std::vector<std::vector<int64_t>> dims(names_.size());
        for (size_t i = 0; i < params.size(); ++i) {
            if (!shapes[i].IsFullyDefined())
                return absl::InvalidArgumentError(absl::StrCat("shapes: variable '", names_[i], "' has shape ",
                                                               shapes[i].DebugString(), ", must be fully defined"));
            entries_.push_back({"variable", i, dtype_of(types[i]), types[i], shapes[i]});
            params[i].tensor = {nullptr, shapes[i].num_elements(), entries_[i].dtype, 0};
            params[i].name = names_[i].c_str();
            for (int k = 0; k < shapes[i].dims(); ++k) dims[i].push_back(shapes[i].dim_size(k));
            params[i].dims = dims[i].data();
            params[i].ndim = int32_t(dims[i].size());
            params[i].group = groups[i];
            params[i].flags =
                (f32_moments[i] ? DSOPT_PARAM_F32_MOMENTS : 0) | (rows_are_inputs[i] ? DSOPT_PARAM_ROWS_ARE_INPUTS : 0);
            params[i].rows = blocks[2 * i];
            params[i].cols = blocks[2 * i + 1];
        }
        return check(dl.dsopt_optimizer_add_params(optimizer_.get(), params.data(), int64_t(params.size())));
    }

    /// Appends the state of the parameters, in the order of the optimizer.
    absl::Status read_state(OpKernelConstruction *ctx) {
        static constexpr std::pair<const char *, const char *> kWhat[] = {{"remainder", "remainder of"},
                                                                          {"exp_avg", "momentum of"},
                                                                          {"exp_avg_scale", "momentum_scale of"},
                                                                          {"exp_avg_sq", "velocity of"},
                                                                          {"exp_avg_sq_scale", "velocity_scale of"},
                                                                          {"momentum_buffer", "momentum of"}};
        int64_t entries = 0;
        int given = 0;
        TF_RETURN_IF_ERROR(check(dl.dsopt_optimizer_state_count(optimizer_.get(), &entries)));
        TF_RETURN_IF_ERROR(ctx->GetAttr("m", &given));
        for (int64_t i = 0; i < entries; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            TF_RETURN_IF_ERROR(check(dl.dsopt_optimizer_state(optimizer_.get(), i, &info)));
            if (info.param < 0) continue;
            const char *what = info.name;
            for (const auto &[name, text] : kWhat)
                if (std::string(name) == info.name) what = text;
            const auto param = size_t(info.param);
            const PartialTensorShape flat({info.tensor.numel});
            entries_.push_back({what, param, info.tensor.dtype, type_of(info.tensor.dtype),
                                info.block == 1 ? entries_[param].shape : flat});
        }
        const size_t wanted = entries_.size() - names_.size();
        if (wanted == size_t(given)) return absl::OkStatus();
        return absl::InvalidArgumentError(
            absl::StrCat("state has ", given, " variables, must have ", wanted, " with these attributes"));
    }

    static absl::Status check_shape(const Tensor &tensor, const TensorShape &wanted, absl::string_view what) {
        if (tensor.shape() == wanted) return absl::OkStatus();
        return absl::InvalidArgumentError(
            absl::StrCat(what, " has shape ", tensor.shape().DebugString(), ", must be ", wanted.DebugString()));
    }

    absl::Status check_shape(const Tensor &tensor, const Entry &wanted, const char *what) const {
        if (wanted.shape.IsIdenticalTo(tensor.shape())) return absl::OkStatus();
        return absl::InvalidArgumentError(absl::StrCat(label(what, wanted.param), " has shape ",
                                                       tensor.shape().DebugString(), ", must be ",
                                                       wanted.shape.DebugString()));
    }

    /// Appends the memory of a locked variable. Checks it against the attributes first, and copies it if an earlier
    /// read still references the buffer.
    absl::Status add(OpKernelContext *ctx, Var &variable, const Entry &wanted, std::vector<dsopt_tensor> &list) const {
        Tensor &tensor = *variable.tensor();
        if (!variable.is_initialized || !tensor.IsInitialized())
            return absl::FailedPreconditionError(absl::StrCat(label(wanted.what, wanted.param), " is not initialized"));
        if (tensor.dtype() != wanted.type)
            return absl::InvalidArgumentError(absl::StrCat(label(wanted.what, wanted.param), " has dtype ",
                                                           DataTypeString(tensor.dtype()), ", must be ",
                                                           DataTypeString(wanted.type)));
        TF_RETURN_IF_ERROR(check_shape(tensor, wanted, wanted.what));
        if (!tensor.RefCountIsOne()) {
            Tensor own;
            AllocatorAttributes attributes;
            attributes.set_gpu_compatible(true); // as TensorFlow allocates variables
            attributes.set_nic_compatible(true);
            TF_RETURN_IF_ERROR(ctx->allocate_temp(wanted.type, tensor.shape(), &own, attributes));
            TF_RETURN_IF_ERROR(copy(ctx, tensor, own));
            tensor = own;
        }
        list.push_back(view(tensor, wanted.dtype));
        return absl::OkStatus();
    }

    absl::Status copy(OpKernelContext *ctx, const Tensor &from, Tensor &to) const {
        absl::Status result;
        const size_t bytes = from.TotalBytes();
        if (bytes == 0) return result;
        if (on_gpu_) // on the stream; `done` is called once the copy is enqueued
            ctx->op_device_context()->CopyTensorInSameDevice(&from, static_cast<Device *>(ctx->device()), &to,
                                                             [&](const absl::Status &status) { result = status; });
        else
            std::memcpy(const_cast<char *>(to.tensor_data().data()), from.tensor_data().data(), bytes);
        return result;
    }

    bool on_gpu_ = false;
    std::unique_ptr<dsopt_context, DestroyContext> context_;
    std::unique_ptr<dsopt_optimizer, DestroyOptimizer> optimizer_;
    int64_t groups_ = 0;
    size_t workspace_ = 0;
    std::vector<std::string> names_;
    std::vector<Entry> entries_; // parameters, then their state
};

} // namespace

/// Opens libdsopt for all ops of the process. Called once, by _build.py. Returns NULL, or an error text.
extern "C" DSOPT_API const char *dsopt_tf_load(const char *path) { return dsopt_dl_load(&dl, path); }

REGISTER_OP("DsoptStep")
    .Input("params: n * resource")
    .Input("state: m * resource") // of each parameter, in the order of dsopt.h
    .Input("grads: grad_types")
    .Input("steps: int32")               // done so far, one per parameter
    .Input("lr: float")                  // one per group
    .Input("grad_scale: scaled * float") // gradients are divided by it
    .Attr("n: int >= 1")
    .Attr("m: int >= 1")
    .Attr("grad_types: list({float, half, bfloat16}) >= 1")
    .Attr("scaled: int >= 0")
    .Attr("names: list(string)")
    .Attr("dtypes: list({float, half, bfloat16})")
    .Attr("shapes: list(shape)")
    // Fields of each group in turn, such as "beta1=0.9", from its algorithm on. TensorFlow takes attributes for equal
    // if their texts are, in which it omits the middle of strings of more than 80 characters.
    .Attr("fields: list(string) >= 1")
    .Attr("group_of: list(int)") // index of the group of each parameter
    .Attr("f32_moments: list(bool)")
    .Attr("blocks: list(int)") // rows and cols of each parameter
    .Attr("rows_are_inputs: list(bool)")
    .Attr("remainders: bool")
    .Attr("seed: int")
    .Attr("clipvalue: string")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs)
    .Doc("One step of an optimizer by dsopt, in place. Hyper-parameters are decimal numbers.");

REGISTER_KERNEL_BUILDER(Name("DsoptStep").Device(DEVICE_CPU), DsoptStep);
REGISTER_KERNEL_BUILDER(Name("DsoptStep").Device(DEVICE_GPU).HostMemory("params").HostMemory("state"), DsoptStep);
