/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSOPT_CONTEXT_HPP
#define DSOPT_CONTEXT_HPP
/** Contexts, their hooks, and lists without an optimizer. Programs include dsopt.hpp. */
#include "types.hpp"
#include <string>

namespace dsopt {

class comm;

/// Version of the loaded library: major * 10000 + minor * 100 + patch.
inline std::int32_t version() noexcept { return dsopt_version(); }
inline std::int32_t abi_version() noexcept { return dsopt_abi_version(); }
/// Description of the loaded library as a JSON object. Static storage.
inline const char *build_info() noexcept { return dsopt_build_info(); }

/* ------------------------------------------------------------------------------------------------------------ hooks */
/// Work of a thread pool. A copy is two words; it is valid until the pool has returned.
class pieces {
public:
    pieces(void (*body)(void *, std::int64_t), void *argument) noexcept : body_(body), argument_(argument) {}
    /// Runs index i. Does not throw.
    void operator()(std::int64_t i) const noexcept { body_(argument_, i); }

private:
    void (*body_)(void *, std::int64_t);
    void *argument_;
};

/// A reference to a thread pool: an object that can be called with (std::int64_t n, dsopt::pieces run) and calls run(i)
/// once for every i in [0, n), on any threads, and returns when all of them are done. See dsopt_parallel_for.
class pool_ref {
public:
    pool_ref() noexcept = default;
    template <class Pool, class = std::enable_if_t<std::is_invocable_v<Pool &, std::int64_t, pieces> &&
                                                   !std::is_same_v<std::remove_const_t<Pool>, pool_ref>>>
    pool_ref(Pool &pool) noexcept :
        call_(call<Pool>),
        pool_(const_cast<void *>(static_cast<const void *>(std::addressof(pool)))) {}
    dsopt_parallel_for function() const noexcept { return call_; }
    void *user() const noexcept { return pool_; }

private:
    template <class Pool>
    static void call(void *pool, std::int64_t n, void (*body)(void *, std::int64_t), void *argument) {
        try {
            (*static_cast<Pool *>(pool))(n, pieces(body, argument));
        } catch (...) { detail::keep_exception(); } // the library counts the indices that have not run
    }
    dsopt_parallel_for call_ = nullptr;
    void *pool_ = nullptr;
};

namespace detail {
template <class H>
using allocate_of = decltype(static_cast<void *>(
    std::declval<H &>().allocate(std::size_t{}, std::size_t{}, static_cast<void *>(nullptr))));
template <class H>
using release_of =
    decltype(std::declval<H &>().release(static_cast<void *>(nullptr), std::size_t{}, static_cast<void *>(nullptr)));
template <class H>
using parallel_for_of = decltype(std::declval<H &>().parallel_for(std::int64_t{}, std::declval<pieces>()));
template <class H> using log_of = decltype(std::declval<H &>().log(log_level{}, static_cast<const char *>(nullptr)));

/// Sets the hooks of dsopt_context_desc to members of an object.
template <class Hooks> void set_hooks(dsopt_context_desc &desc, Hooks &hooks) noexcept {
    static_assert(has<allocate_of, Hooks> || has<parallel_for_of, Hooks> || has<log_of, Hooks>,
                  "no member of the hooks has the name and arguments of a hook");
    static_assert(has<allocate_of, Hooks> == has<release_of, Hooks>, "allocate and release come together");
    desc.user = std::addressof(hooks);
    if constexpr (has<allocate_of, Hooks>) {
        desc.allocate = [](void *user, std::size_t bytes, std::size_t alignment, void *stream) -> void * {
            try {
                return static_cast<Hooks *>(user)->allocate(bytes, alignment, stream);
            } catch (...) { keep_exception(); }
            return nullptr;
        };
        desc.release = [](void *user, void *memory, std::size_t bytes, void *stream) {
            try {
                static_cast<Hooks *>(user)->release(memory, bytes, stream);
            } catch (...) { keep_exception(); }
        };
    }
    if constexpr (has<parallel_for_of, Hooks>) {
        desc.parallel_for = [](void *user, std::int64_t n, void (*body)(void *, std::int64_t), void *argument) {
            try {
                static_cast<Hooks *>(user)->parallel_for(n, pieces(body, argument));
            } catch (...) { keep_exception(); }
        };
    }
    if constexpr (has<log_of, Hooks>) {
        desc.log = [](void *user, std::int32_t level, const char *text) {
            try {
                static_cast<Hooks *>(user)->log(static_cast<log_level>(level), text);
            } catch (...) { keep_exception(); }
        };
    }
}
} // namespace detail

/* ---------------------------------------------------------------------------------------------------------- context */
using context_info = dsopt_context_info;
struct context_options {
    dsopt::backend backend = dsopt::backend::cpu;
    std::int32_t device = 0;
    /// 0 = number of cores.
    std::int32_t threads = 0;
    dsopt::log_level log_level = dsopt::log_level::automatic;
    /// Smallest work item in elements, 0 = 4096.
    std::int64_t chunk = 0;
    bool check_pointers = false;
};

struct norm_options {
    norm_kind kind = norm_kind::l2;
    double max_norm = 0;
    /// If set, the norm is over all its ranks.
    dsopt::comm *comm = nullptr;
    void *stream = nullptr;
};

/// Backend, device and hooks, and functions on lists. Any number of threads may use it.
class context {
public:
    explicit context(const context_options &options = {}) : handle_(create(desc_of(options))) {}
    /**
     * With hooks: members of an object of any class, each of them optional:
     *
     *     void *allocate(std::size_t bytes, std::size_t alignment, void *stream);
     *     void release(void *memory, std::size_t bytes, void *stream);
     *     void parallel_for(std::int64_t n, dsopt::pieces run);
     *     void log(dsopt::log_level level, const char *text);
     *
     * The object must outlive the context and everything that was made from it.
     */
    template <class Hooks>
    context(const context_options &options, Hooks &hooks) : handle_(create_with(options, hooks)) {}
    /// Takes over a handle that was made in C.
    static context adopt(dsopt_context *handle) noexcept { return context(handle); }
    dsopt_context *get() const noexcept { return handle_.get(); }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

    /// Backend, number of threads, log level. Any thread.
    context_info info() const {
        context_info info = detail::desc_of<context_info>();
        detail::check(dsopt_context_query(get(), &info));
        return info;
    }

    /// Fills the memory of the entries with zeros.
    void zero_grad(span<const tensor> grads, void *stream = nullptr) const {
        zero(const_cast<tensor *>(grads.data()), grads.size(), DSOPT_ZERO_FILL, stream);
    }
    /// Sets `data` of the entries to nullptr, "no gradient" for the next step. Their memory is not touched.
    void set_to_none(span<tensor> grads) const { zero(grads.data(), grads.size(), DSOPT_ZERO_NONE, nullptr); }
    /// `result` is in backend memory, written in stream order.
    void norm(span<const tensor> list, dsopt_norm_result *result, const norm_options &options = {}) const;
    /// y = a x + b y. `a` is a float in backend memory; nullptr is 1.
    void axpby(const float *a, span<const tensor> x, float b, span<const tensor> y, void *stream = nullptr) const {
        if (x.size() != y.size()) detail::refuse_size("y", y.size(), "x has", detail::count(x));
        detail::check(dsopt_tensors_axpby(get(), a, x.data(), b, y.data(), detail::count(x), stream));
    }
    /// Clips every element to [-limit, limit].
    void clamp(span<const tensor> list, double limit, void *stream = nullptr) const {
        detail::check(dsopt_tensors_clamp(get(), list.data(), detail::count(list), limit, stream));
    }

private:
    using handle = detail::handle<dsopt_context, dsopt_context_destroy>;
    explicit context(dsopt_context *made) noexcept : handle_(made) {}
    static dsopt_context_desc desc_of(const context_options &options) noexcept {
        dsopt_context_desc desc = detail::desc_of<dsopt_context_desc>();
        desc.backend = static_cast<std::int32_t>(options.backend);
        desc.device = options.device;
        desc.threads = options.threads;
        desc.log_level = static_cast<std::int32_t>(options.log_level);
        desc.chunk = options.chunk;
        desc.flags = options.check_pointers ? DSOPT_CONTEXT_CHECK_POINTERS : 0;
        return desc;
    }
    static handle create(const dsopt_context_desc &desc) {
        return detail::make<handle>([&](dsopt_context **made) { return dsopt_context_create(&desc, made); });
    }
    template <class Hooks> static handle create_with(const context_options &options, Hooks &hooks) {
        dsopt_context_desc desc = desc_of(options);
        detail::set_hooks(desc, hooks);
        return create(desc);
    }
    void zero(tensor *grads, std::size_t size, std::int32_t mode, void *stream) const {
        detail::check(dsopt_zero_grad(get(), grads, static_cast<std::int64_t>(size), mode, stream));
    }
    handle handle_;
};

} // namespace dsopt
#endif
