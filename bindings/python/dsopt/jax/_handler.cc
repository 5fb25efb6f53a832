// SPDX-License-Identifier: Apache-2.0
// XLA's side of dsopt.jax: custom calls that make an optimizer from their attributes and apply it to the buffers of the
// call.
//
//   dsopt_init  params              -> state
//   dsopt_step  [values] [params] grads state -> params (or out) state report workspace
//               with option NORMS: grads      -> norms
//
// The program text holds no addresses: the instantiate stage reads the attributes, and its objects live as long as the
// compiled program. _build.py compiles this file against the headers of the installed jaxlib.
#include "_memory.h"
#include "_operands.h"
#include "_program.h"
#include "dsopt_dl.h"
#include "xla/ffi/api/ffi.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

template <Backend backend> ffi::ErrorOr<std::unique_ptr<Program>> instantiate(ffi::Dictionary attrs) {
    std::unique_ptr<Program> program;
    auto error = fence([&] { program = std::make_unique<Program>(backend, attrs); });
    if (error.failure()) return ffi::Unexpected(error);
    return program;
}

// --------------------------------------------------------------------------------------------------------- thread pool
// XLA's pool as dsopt_parallel_for. The caller runs indices too, so a pool whose threads all wait in custom calls does
// not deadlock; helpers that start late find no index left, and so may outlive the call.
struct Job {
    Job(int64_t n_, void (*body_)(void *, int64_t), void *arg_) : n(n_), body(body_), arg(arg_) {}

    void work() {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
            body(arg, i);
            if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == n) {
                std::lock_guard<std::mutex> lock(mutex);
                all_done.notify_one();
            }
        }
    }

    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        all_done.wait(lock, [this] { return done.load(std::memory_order_acquire) == n; });
    }

private:
    const int64_t n;
    void (*const body)(void *, int64_t);
    void *const arg;
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;
};

void parallel_for(void *user, int64_t n, void (*body)(void *, int64_t), void *arg) {
    auto *pool = static_cast<ffi::ThreadPool *>(user);
    const int64_t helpers = std::min(n, pool->num_threads()) - 1;
    if (n == 1 || helpers < 1) {
        for (int64_t i = 0; i < n; ++i) body(arg, i);
        return;
    }
    auto job = std::make_shared<Job>(n, body, arg);
    for (int64_t i = 0; i < helpers; ++i) pool->Schedule([job] { job->work(); });
    job->work();
    job->wait();
}

// --------------------------------------------------------------------------------------------------------------- calls
// Returns the rank operand of a call: 0 if there is none.
int32_t read_rank(Program &program, int64_t options, Reader<ffi::RemainingArgs> &in) {
    if (!(options & kRank)) return 0;
    if (program.backend != kCpu) refuse("operand 'rank' is supported on the CPU only, where the host can read it");
    return *static_cast<const int32_t *>(in.exact({"operand 'rank'"}, ffi::DataType::S32, {}).untyped_data());
}

std::vector<ffi::AnyBuffer> read_params(const Program &program, Reader<ffi::RemainingArgs> &in) {
    std::vector<ffi::AnyBuffer> params;
    for (size_t i = 0; i < program.count(); ++i)
        params.push_back(in.elements({"parameter", &program.name(i)}, program.type(i), program.numel(i)));
    return params;
}

// Returns the next buffer as this entry of the state. `shapes` has the shapes of the parameters.
template <class Buffers>
ffi::AnyBuffer read_state(const Program &program, const Program::Entry &entry,
                          const std::vector<ffi::AnyBuffer> &shapes, Reader<Buffers> &from) {
    const auto dims =
        entry.has_shape_of_param ? shapes[static_cast<size_t>(entry.param)].dimensions() : Dims(&entry.numel, 1);
    return from.exact(program.label(entry), type_of(entry.dtype), dims);
}

std::vector<dsopt_tensor> tensors_of(const std::vector<ffi::AnyBuffer> &buffers) {
    std::vector<dsopt_tensor> list;
    for (const auto &buffer : buffers) list.push_back(tensor_of(buffer));
    return list;
}

void init(Program &program, int32_t device, void *stream, const ffi::RemainingArgs &args,
          const ffi::RemainingRets &rets, const ffi::Dictionary &attrs) {
    const auto options = attribute<int64_t>(attrs, "options");
    if (options & ~kRank) refuse("attribute options is " + std::to_string(options) + ", must be 0 or 1 in dsopt_init");
    Reader<ffi::RemainingArgs> in(args);
    Reader<ffi::RemainingRets> out(rets);
    const int64_t rank = read_rank(program, options, in);
    const auto shapes = read_params(program, in);
    in.end();
    const auto params = tensors_of(shapes);
    std::vector<dsopt_tensor> state;
    for (const auto &entry : program.entries(device, rank))
        state.push_back(tensor_of(read_state(program, entry, shapes, out)));
    out.end();
    check(dl.dsopt_optimizer_init_state(program.at(device, rank), params.data(), static_cast<int64_t>(params.size()),
                                        state.data(), static_cast<int64_t>(state.size()), stream));
}

// Computes norm and finite check of the gradients: one dsopt_norm_result for all of them, or one for each.
void norms(Program &program, int32_t device, void *stream, ffi::ThreadPool *pool, const ffi::RemainingArgs &args,
           const ffi::RemainingRets &rets, int64_t options) {
    if (options != kNorms) refuse("attribute options is " + std::to_string(options) + ", NORMS excludes other options");
    Reader<ffi::RemainingArgs> in(args);
    Reader<ffi::RemainingRets> out(rets);
    std::vector<dsopt_tensor> list;
    for (size_t i = 0; i < program.count(); ++i)
        list.push_back(tensor_of(in.float_elements({"gradient of", &program.name(i)}, program.numel(i))));
    in.end();
    const auto buffer = out.any({"result 'norms'"});
    out.end();
    const auto n = static_cast<int64_t>(list.size());
    constexpr int64_t words = sizeof(dsopt_norm_result) / 4;
    const int64_t one[] = {1, words}, each[] = {n, words};
    if (buffer.element_type() != ffi::DataType::U32 ||
        !(same(buffer.dimensions(), Dims(one, 2)) || same(buffer.dimensions(), Dims(each, 2))))
        refuse("result 'norms' is " + text_of(buffer.element_type(), buffer.dimensions()) + ", must be u32[1,8] or " +
               "u32[" + std::to_string(n) + ",8]");
    Context own; // with the thread pool of this call
    if (pool) {
        DSOPT_NEW(dsopt_context_desc, desc);
        desc.parallel_for = parallel_for;
        desc.user = pool;
        dsopt_context *made;
        check(dl.dsopt_context_create(&desc, &made));
        own.reset(made);
    }
    dsopt_context *const context = pool ? own.get() : program.context(device);
    auto *const results = static_cast<dsopt_norm_result *>(buffer.untyped_data());
    const int64_t rows = buffer.dimensions()[0], length = rows == 1 ? n : 1;
    for (int64_t row = 0; row < rows; ++row)
        check(dl.dsopt_tensors_norm(context, list.data() + row, length, DSOPT_NORM_L2, 0, nullptr, results + row,
                                    stream));
}

// Gradients are not aliased to results, and parameters only without kOut: neither may be written.
int32_t checked_flags(int64_t options, int64_t flags) {
    constexpr int64_t kKeep = DSOPT_STEP_OUT_ONLY | DSOPT_STEP_DELTA;
    if (options & ~kOptions || (options & kZeros && !(options & kOut)))
        refuse("attribute options is " + std::to_string(options) +
               ", must be a sum of _call.OPTIONS, OUT, HYPER_IS_ERROR and ZEROS, with ZEROS only if OUT is there, or "
               "NORMS alone");
    if (flags & ~(kKeep | DSOPT_STEP_NO_NAN) || !(flags & kKeep) != !(options & kOut))
        refuse("attribute flags is " + std::to_string(flags) + " with options " + std::to_string(options) +
               ", must be a sum of NO_NAN and, if and only if option OUT is there, OUT_ONLY or DELTA");
    return static_cast<int32_t>(flags);
}

void step(Program &program, int32_t device, void *stream, ffi::ThreadPool *pool, const ffi::RemainingArgs &args,
          const ffi::RemainingRets &rets, const ffi::Dictionary &attrs) {
    const auto options = attribute<int64_t>(attrs, "options");
    if (options & kNorms) return norms(program, device, stream, pool, args, rets, options);
    DSOPT_NEW(dsopt_step, step);
    step.flags = checked_flags(options, attribute<int64_t>(attrs, "flags"));
    Reader<ffi::RemainingArgs> in(args);
    Reader<ffi::RemainingRets> out(rets);
    using Shape = std::initializer_list<int64_t>;
    auto value = [&](Option option, const char *role, ffi::DataType type, Shape dims) {
        return options & option ? in.exact({role}, type, dims).untyped_data() : nullptr;
    };
    const auto groups = static_cast<int64_t>(program.groups());
    const int32_t rank = read_rank(program, options, in);
    step.lr = static_cast<const float *>(value(kLr, "operand 'lr'", ffi::DataType::F32, {groups}));
    step.hyper =
        static_cast<const float *>(value(kHyper, "operand 'hyper'", ffi::DataType::F32, {groups, DSOPT_HYPER_FLOATS}));
    step.grad_scale = static_cast<const float *>(value(kGradScale, "operand 'grad_scale'", ffi::DataType::F32, {}));
    step.skip = static_cast<const int32_t *>(value(kSkip, "operand 'skip'", ffi::DataType::S32, {}));
    if (options & kAfter) in.any({"operand 'after'"});
    step.grad_norms =
        static_cast<const float *>(value(kGradNorms, "operand 'grad_norms'", ffi::DataType::F32, {groups}));

    const size_t n = program.count();
    std::vector<ffi::AnyBuffer> given, grads, moved;
    if (!(options & kZeros)) given = read_params(program, in);
    for (size_t i = 0; i < n; ++i) {
        const Label label{"gradient of", &program.name(i)};
        grads.push_back(options & kZeros ? in.float_elements(label, program.numel(i))
                                         : in.floats(label, given[i].dimensions()));
    }
    const auto params = options & kZeros ? program.zeros() : tensors_of(given);
    for (const auto &entry : program.entries(device, rank))
        if (!(options & kZeros && entry.is_step)) moved.push_back(read_state(program, entry, grads, in));
    in.end();

    std::vector<dsopt_tensor> written;
    for (size_t i = 0; i < n; ++i) {
        if (options & kOut)
            written.push_back(tensor_of(out.floats({"update of", &program.name(i)}, grads[i].dimensions())));
        else
            out.aliased({"new value of", &program.name(i)}, given[i]);
    }
    size_t read = 0;
    for (const auto &entry : program.entries(device, rank))
        if (!(options & kZeros && entry.is_step)) out.aliased(program.label(entry), moved[read++]);
    step.report =
        static_cast<float *>(out.exact({"result 'report'"}, ffi::DataType::F32, {DSOPT_REPORT_FLOATS}).untyped_data());
    const auto workspace = out.any({"result 'workspace'"});
    if (workspace.element_type() != ffi::DataType::U8 || workspace.dimensions().size() != 1)
        refuse("result 'workspace' is " + text_of(workspace.element_type(), workspace.dimensions()) +
               ", must be u8 with one dimension");
    out.end();

    const auto gradients = tensors_of(grads);
    auto state = tensors_of(moved);
    std::vector<int32_t> steps;
    if (options & kZeros) program.add_steps(state, steps);
    if (options & kOut) {
        if (program.backend == kCpu) advise_huge_pages(written);
        step.out = written.data();
    }
    step.params = params.data();
    step.grads = gradients.data();
    step.count = static_cast<int64_t>(n);
    step.state = state.data();
    step.state_count = static_cast<int64_t>(state.size());
    step.workspace = workspace.untyped_data();
    step.workspace_bytes = workspace.size_bytes();
    step.stream = stream;
    if (pool) {
        step.parallel_for = parallel_for;
        step.parallel_user = pool;
    }
    check(dl.dsopt_optimizer_apply(program.at(device, rank), &step));
    if (program.backend == kCpu && (options & kHyperIsError) &&
        static_cast<int32_t>(step.report[DSOPT_REPORT_REASONS]) & DSOPT_SKIP_HYPER)
        refuse("a hyper-parameter that was passed as an array is out of range, or eps_root is not 0");
}

ffi::Error init_cpu(Program *program, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
    return fence([&] { init(*program, 0, nullptr, args, rets, attrs); });
}

ffi::Error step_cpu(Program *program, ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attrs) {
    return fence([&] { step(*program, 0, nullptr, &pool, args, rets, attrs); });
}

// Runs before the program, and so outside of a capture: allocates what the first call on a device needs.
ffi::Error prepare_cuda(Program *program, int32_t device) {
    return fence([&] {
        if (program->ranks() > 1) refuse("steps over a mesh axis run on the CPU devices of JAX only");
        program->at(device, 0);
    });
}

ffi::Error init_cuda(Program *program, void *stream, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Dictionary attrs) {
    return fence([&] { init(*program, device, stream, args, rets, attrs); });
}

ffi::Error step_cuda(Program *program, void *stream, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Dictionary attrs) {
    return fence([&] { step(*program, device, stream, nullptr, args, rets, attrs); });
}

} // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(dsopt_jax_instantiate_cpu, instantiate<kCpu>, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dsopt_jax_instantiate_cuda, instantiate<kCuda>, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dsopt_jax_init_cpu, init_cpu,
                              ffi::Ffi::Bind().Ctx<ffi::State<Program>>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    dsopt_jax_step_cpu, step_cpu,
    ffi::Ffi::Bind().Ctx<ffi::State<Program>>().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    dsopt_jax_prepare_cuda, prepare_cuda,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::State<Program>>().Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dsopt_jax_init_cuda, init_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<Program>>()
                                  .Ctx<ffi::PlatformStream<void *>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dsopt_jax_step_cuda, step_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<Program>>()
                                  .Ctx<ffi::PlatformStream<void *>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

extern "C" {
// Functions for _build.py. The first one must be called before all others; it returns NULL or an error text.
const char *dsopt_jax_open(const char *path) { return dl.library ? nullptr : dsopt_dl_load(&dl, path); }
void *dsopt_jax_type_id(void) { return &Program::id; }
void *dsopt_jax_type_info(void) { return &program_info; }
// NULL removes the comm from the registry.
void dsopt_jax_register_comm(const char *name, int64_t rank, dsopt_comm *comm) {
    std::lock_guard<std::mutex> lock(registry->mutex);
    if (comm)
        registry->comms[{name, rank}] = comm;
    else
        registry->comms.erase({name, rank});
}
}
#pragma GCC visibility pop
