// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "device/device.h"
#include <memory>

namespace dsopt {

/// Device and hooks, shared by every object that is created from the context. Immutable after construction, so any
/// thread may use it.
class Context {
public:
    explicit Context(const dsopt_context_desc &desc);

    const Device &device() const { return *device_; }
    int ordinal() const { return desc_.device; }
    /// Returns the thread pool of a call: `hook` unless it is NULL, else the context's pool.
    Parallel parallel(dsopt_parallel_for hook = nullptr, void *user = nullptr) const;
    /// Returns the library's threads, whatever hook the context has.
    Parallel own_parallel() const { return {threads_, nullptr, nullptr}; }
    int64_t chunk() const { return chunk_; }
    bool checks_pointers() const { return desc_.flags & DSOPT_CONTEXT_CHECK_POINTERS; }

    void *allocate(size_t bytes, void *stream) const; // at least 64-byte aligned; throws DSOPT_ERR_NOMEM
    void release(void *memory, size_t bytes, void *stream) const noexcept;

    /// True if messages of this level are passed on.
    bool logs(int32_t level) const { return desc_.log != nullptr && level <= log_level_; }
    [[gnu::format(printf, 3, 4)]] void log(int32_t level, const char *format, ...) const noexcept;

    dsopt_context_info info() const { return {0, desc_.backend, desc_.device, threads_, log_level_}; }

    /// Throws DSOPT_ERR_FORKED in a child of the process that created the context.
    void check_process() const;

private:
    dsopt_context_desc desc_;
    std::unique_ptr<Device> device_;
    int64_t chunk_;
    int threads_;
    int log_level_;
    int64_t generation_ = 0;
};

/// A block of backend memory, released by the destructor.
class Memory {
public:
    Memory() = default;
    Memory(const std::shared_ptr<const Context> &context, size_t bytes, void *stream) :
        data_(context->allocate(bytes, stream), Release{context, bytes}) {}
    void *data() const { return data_.get(); }

private:
    struct Release {
        std::shared_ptr<const Context> context;
        size_t bytes;
        void operator()(void *data) const noexcept { context->release(data, bytes, nullptr); }
    };
    std::unique_ptr<void, Release> data_;
};

} // namespace dsopt
