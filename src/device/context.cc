// SPDX-License-Identifier: Apache-2.0
#include "device/context.h"
#include "base/fork.h"
#include "base/status.h"
#include "rules/options.h"
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace dsopt {
namespace {

int level_from_environment() {
    const char *wanted = secure_getenv("DSOPT_LOG");
    const char *const names[] = {"error", "warn", "info", "trace"};
    if (wanted != nullptr)
        for (int i = 0; i < 4; ++i)
            if (std::strcmp(wanted, names[i]) == 0) return i + 1;
    return DSOPT_LOG_WARN;
}

std::unique_ptr<Device> make_device(const dsopt_context_desc &desc) {
    switch (desc.backend) {
    case DSOPT_BACKEND_CPU:
        if (desc.device != 0)
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_context_desc.device is %d, the CPU is 0", desc.device);
        return make_cpu_device();
    case DSOPT_BACKEND_CUDA: return make_cuda_device(desc.device);
    }
    throw Error(DSOPT_ERR_ARGUMENT, "dsopt_context_desc.backend is %d, which is no backend", desc.backend);
}

} // namespace

Context::Context(const dsopt_context_desc &desc) :
    desc_(desc),
    chunk_(desc.chunk != 0 ? desc.chunk : kLeaf),
    log_level_(desc.log_level) {
    require_in(0, Parallel::kMaxThreads, "dsopt_context_desc.threads", desc.threads);
    require_in(0, DSOPT_LOG_TRACE, "dsopt_context_desc.log_level", desc.log_level);
    if ((desc.allocate == nullptr) != (desc.release == nullptr))
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_context_desc: allocate and release come together or not at all");
    if (chunk_ <= 0 || chunk_ % kLeaf != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_context_desc.chunk is %lld, not a positive multiple of %lld", ll(chunk_),
                    ll(kLeaf));
    if (desc.flags & ~uint32_t(DSOPT_CONTEXT_CHECK_POINTERS))
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_context_desc.flags has unknown bits: 0x%x", desc.flags);
    if (desc.reserved != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_context_desc.reserved is %u, must be 0", desc.reserved);
    check_options<At::context>(Facts()
                                   .add(facts::check_pointers, desc.flags & DSOPT_CONTEXT_CHECK_POINTERS)
                                   .add(facts::cpu, desc.backend == DSOPT_BACKEND_CPU));
    watch_forks();
    generation_ = fork_generation();
    device_ = make_device(desc);
    threads_ = desc.threads != 0 ? desc.threads : std::min(default_threads(), Parallel::kMaxThreads);
    if (log_level_ == 0) log_level_ = level_from_environment();
}

Parallel Context::parallel(dsopt_parallel_for hook, void *user) const {
    if (hook != nullptr) return {threads_, hook, user};
    return {threads_, desc_.parallel_for, desc_.user};
}

void *Context::allocate(size_t bytes, void *stream) const {
    void *memory =
        desc_.allocate != nullptr ? desc_.allocate(desc_.user, bytes, 64, stream) : device_->allocate(bytes, stream);
    if (memory == nullptr) throw Error(DSOPT_ERR_NOMEM, "the allocator returned no memory for %zu bytes", bytes);
    return memory;
}

void Context::release(void *memory, size_t bytes, void *stream) const noexcept {
    if (desc_.release != nullptr)
        desc_.release(desc_.user, memory, bytes, stream);
    else
        device_->release(memory, bytes, stream);
}

void Context::log(int32_t level, const char *format, ...) const noexcept {
    if (!logs(level)) return;
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    desc_.log(desc_.user, level, text);
}

void Context::check_process() const {
    if (generation_ != fork_generation())
        throw Error(DSOPT_ERR_FORKED, "the object was created before fork(): the child can only destroy it");
}

} // namespace dsopt
