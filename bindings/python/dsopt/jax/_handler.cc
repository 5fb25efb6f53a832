// SPDX-License-Identifier: Apache-2.0
// XLA's side of dsopt.jax: custom calls that make an optimizer from their attributes and apply it to the buffers of the
// call.
//
//   dsopt_init  params              -> state
//   dsopt_step  [values] [params] grads state -> params (or out) state report workspace
//
// The program text holds no addresses: the instantiate stage reads the attributes, and what it makes lives as long as
// the compiled program. _build.py compiles this file against the headers of the installed jaxlib.
#include "_memory.h"
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
// XLA's pool as dsopt_parallel_for. The caller runs pieces too, so a pool whose threads all wait in custom calls
// finishes; helpers that start late find nothing left, and so may outlive the call.
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
int32_t dtype_of(ffi::DataType type) {
    switch (type) {
    case ffi::DataType::F32: return DSOPT_DTYPE_F32;
    case ffi::DataType::F16: return DSOPT_DTYPE_F16;
    case ffi::DataType::BF16: return DSOPT_DTYPE_BF16;
    case ffi::DataType::S32: return DSOPT_DTYPE_I32;
    default: return 0; // the library refuses it, and names the tensor
    }
}

dsopt_tensor tensor_of(const ffi::AnyBuffer &buffer) {
    return {buffer.untyped_data(), static_cast<int64_t>(buffer.element_count()), dtype_of(buffer.element_type()), 0};
}

// Operands or results, read one after the other.
template <class Buffers> class Reader {
public:
    explicit Reader(const Buffers &buffers_) : buffers(buffers_) {}

    ffi::AnyBuffer next() {
        auto buffer = buffers.template get<ffi::AnyBuffer>(place++);
        if (!buffer) refuse("a buffer of the call is missing");
        if constexpr (std::is_same_v<Buffers, ffi::RemainingRets>)
            return **buffer;
        else
            return *buffer;
    }

    std::vector<dsopt_tensor> tensors(size_t n) {
        std::vector<dsopt_tensor> list(n);
        for (auto &tensor : list) tensor = tensor_of(next());
        return list;
    }

    size_t left() const { return buffers.size() - place; }

private:
    const Buffers &buffers;
    size_t place = 0;
};

// In and out are one memory because the call aliases them, which XLA keeps to by copying where it must.
void check_aliased(const std::vector<dsopt_tensor> &in, const std::vector<dsopt_tensor> &out) {
    for (size_t i = 0; i < in.size(); ++i)
        if (in[i].numel && in[i].data != out[i].data)
            throw Failure{ffi::ErrorCode::kInternal, "dsopt: XLA gave an array other memory than its alias"};
}

void init(Program &program, int32_t device, void *stream, const ffi::RemainingArgs &args,
          const ffi::RemainingRets &rets, const ffi::Dictionary &attrs) {
    const auto options = attribute<int64_t>(attrs, "options");
    Reader<ffi::RemainingArgs> in(args);
    Reader<ffi::RemainingRets> out(rets);
    const int64_t rank = options & kRank ? *static_cast<const int32_t *>(in.next().untyped_data()) : 0;
    const auto params = in.tensors(program.count());
    const auto state = out.tensors(out.left());
    check(dl.dsopt_optimizer_init_state(program.at(device, rank), params.data(), state.data(),
                                        static_cast<int64_t>(state.size()), stream));
}

void step(Program &program, int32_t device, void *stream, ffi::ThreadPool *pool, const ffi::RemainingArgs &args,
          const ffi::RemainingRets &rets, const ffi::Dictionary &attrs) {
    const auto options = attribute<int64_t>(attrs, "options");
    Reader<ffi::RemainingArgs> in(args);
    Reader<ffi::RemainingRets> out(rets);
    DSOPT_NEW(dsopt_step, step);
    auto value = [&](Option option) { return options & option ? in.next().untyped_data() : nullptr; };
    const auto *rank = static_cast<const int32_t *>(value(kRank));
    step.lr = static_cast<const float *>(value(kLr));
    step.hyper = static_cast<const float *>(value(kHyper));
    step.grad_scale = static_cast<const float *>(value(kGradScale));
    step.skip = static_cast<const int32_t *>(value(kSkip));
    value(kAfter);

    const size_t n = program.count();
    const auto params = options & kZeros ? program.zeros() : in.tensors(n);
    const auto grads = in.tensors(n);
    auto state = in.tensors(in.left());
    const auto written = out.tensors(n);
    check_aliased(state, out.tensors(state.size()));
    std::vector<int32_t> steps;
    if (options & kZeros) program.add_steps(state, steps);
    if (options & kOut) {
        if (program.backend == kCpu) advise_huge_pages(written);
        step.out = written.data();
    } else {
        check_aliased(params, written);
    }
    step.params = params.data();
    step.grads = grads.data();
    step.count = static_cast<int64_t>(n);
    step.state = state.data();
    step.state_count = static_cast<int64_t>(state.size());
    step.report = static_cast<float *>(out.next().untyped_data());
    const auto workspace = out.next();
    step.workspace = workspace.untyped_data();
    step.workspace_bytes = workspace.size_bytes();
    step.stream = stream;
    step.flags = static_cast<int32_t>(attribute<int64_t>(attrs, "flags"));
    if (pool) {
        step.parallel_for = parallel_for;
        step.parallel_user = pool;
    }
    check(dl.dsopt_optimizer_apply(program.at(device, rank ? *rank : 0), &step));
    if (program.backend == kCpu && (options & kHyperIsError) &&
        static_cast<int32_t>(step.report[DSOPT_REPORT_REASONS]) & DSOPT_SKIP_HYPER)
        refuse("a hyper-parameter that was given as an array is out of range, or eps_root is not 0");
}

ffi::Error init_cpu(Program *program, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
    return fence([&] { init(*program, 0, nullptr, args, rets, attrs); });
}

ffi::Error step_cpu(Program *program, ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attrs) {
    return fence([&] { step(*program, 0, nullptr, &pool, args, rets, attrs); });
}

// Before the program runs, and so outside of a capture: what the first call of a device allocates.
ffi::Error prepare_cuda(Program *program, int32_t device) {
    return fence([&] {
        if (program->ranks() > 1) refuse("the 1-bit family runs on the CPU devices of JAX only");
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
// Functions for _build.py. The first one comes before all others; it returns NULL or what is wrong.
const char *dsopt_jax_open(const char *path) { return dl.library ? nullptr : dsopt_dl_load(&dl, path); }
void *dsopt_jax_type_id(void) { return &Program::id; }
void *dsopt_jax_type_info(void) { return &program_info; }
// NULL takes the comm out of the registry.
void dsopt_jax_register_comm(const char *name, int64_t rank, dsopt_comm *comm) {
    std::lock_guard<std::mutex> lock(registry->mutex);
    if (comm)
        registry->comms[{name, rank}] = comm;
    else
        registry->comms.erase({name, rank});
}
}
#pragma GCC visibility pop
