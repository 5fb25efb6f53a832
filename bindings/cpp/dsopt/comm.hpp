/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSOPT_COMM_HPP
#define DSOPT_COMM_HPP
/** Comms of every kind, and the compressed all-reduce. Programs include dsopt.hpp. */
#include "context.hpp"
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace dsopt {

namespace detail {

/// Runs one function of a class that communicates. Stores its exception and returns the status to the library.
template <class F> int communicate(F &&function) noexcept {
    try {
        function();
        return 0;
    } catch (const comm_error &failure) {
        keep_exception();
        return -failure.status();
    } catch (...) { keep_exception(); }
    return -DSOPT_ERR_COMM;
}

template <class C>
using all_to_all_of = decltype(std::declval<C &>().all_to_all(
    static_cast<const void *>(nullptr), static_cast<void *>(nullptr), std::int64_t{}, static_cast<void *>(nullptr)));
template <class C>
using all_gather_of = decltype(std::declval<C &>().all_gather(
    static_cast<const void *>(nullptr), static_cast<void *>(nullptr), std::int64_t{}, static_cast<void *>(nullptr)));
template <class C>
using reduce_scatter_of =
    decltype(std::declval<C &>().reduce_scatter(static_cast<const void *>(nullptr), static_cast<void *>(nullptr),
                                                std::int64_t{}, dtype{}, op{}, static_cast<void *>(nullptr)));
template <class C> using error_of = decltype(std::string(std::declval<C &>().error()));
template <class C> using abort_of = decltype(std::declval<C &>().abort());

template <class C> dsopt_comm_table table_of(C *collectives, memory where) {
    dsopt_comm_table table = desc_of<dsopt_comm_table>();
    table.self = collectives;
    table.rank = collectives->rank();
    table.ranks = collectives->ranks();
    table.memory = static_cast<std::int32_t>(where);
    table.all_reduce = [](void *self, const void *send, void *recv, std::int64_t count, std::int32_t type,
                          std::int32_t operation, void *stream) {
        return communicate([&] {
            static_cast<C *>(self)->all_reduce(send, recv, count, static_cast<dtype>(type), static_cast<op>(operation),
                                               stream);
        });
    };
    if constexpr (has<all_to_all_of, C>) {
        table.all_to_all = [](void *self, const void *send, void *recv, std::int64_t bytes_per_rank, void *stream) {
            return communicate([&] { static_cast<C *>(self)->all_to_all(send, recv, bytes_per_rank, stream); });
        };
    }
    if constexpr (has<all_gather_of, C>) {
        table.all_gather = [](void *self, const void *send, void *recv, std::int64_t bytes_per_rank, void *stream) {
            return communicate([&] { static_cast<C *>(self)->all_gather(send, recv, bytes_per_rank, stream); });
        };
    }
    if constexpr (has<reduce_scatter_of, C>) {
        table.reduce_scatter = [](void *self, const void *send, void *recv, std::int64_t count, std::int32_t type,
                                  std::int32_t operation, void *stream) {
            return communicate([&] {
                static_cast<C *>(self)->reduce_scatter(send, recv, count, static_cast<dtype>(type),
                                                       static_cast<op>(operation), stream);
            });
        };
    }
    if constexpr (has<error_of, C>) {
        table.error = [](void *self, char *text, std::size_t capacity) {
            try {
                const std::string found = static_cast<C *>(self)->error();
                if (found.empty()) return 0;
                std::snprintf(text, capacity, "%s", found.c_str());
            } catch (const std::exception &failure) {
                std::snprintf(text, capacity, "%s", failure.what());
            } catch (...) { std::snprintf(text, capacity, "unknown exception"); }
            return -DSOPT_ERR_COMM;
        };
    }
    if constexpr (has<abort_of, C>) {
        table.abort = [](void *self) {
            try {
                static_cast<C *>(self)->abort();
            } catch (...) {} // any thread may call this, and the comm is aborted in any case
        };
    }
    table.destroy = [](void *self) { delete static_cast<C *>(self); };
    return table;
}
} // namespace detail

struct comm_options {
    /// Time-out of a call. 0 = ten minutes, negative = no limit.
    std::chrono::milliseconds timeout{0};
    /// Exchanges are enqueued on the stream: DSOPT_COMM_FLAG_ENQUEUE.
    bool enqueue = false;
    /// Means of gradients (averages) are added up by the provider, in its order: DSOPT_COMM_FLAG_PROVIDER_SUMS. Not of
    /// LOCAL.
    bool provider_sums = false;
};

/// Options of comm::of.
struct table_options {
    /// Memory of the arguments of the collectives.
    memory where = memory::host;
    /// They enqueue on the stream and return before the exchange is done: DSOPT_COMM_FLAG_ENQUEUE.
    bool enqueue = false;
    /// They pass device memory to a library that does not use CUDA streams: DSOPT_COMM_FLAG_SYNCHRONIZE.
    bool synchronize = false;
    /// Means of gradients (averages) are added up by the member reduce_scatter: DSOPT_COMM_FLAG_PROVIDER_SUMS.
    bool provider_sums = false;
    /// Members may be called by a thread of the library, one at a time: DSOPT_COMM_FLAG_ANY_THREAD.
    bool any_thread = false;
};

using comm_info = dsopt_comm_info;

/// Arguments of the compressed all-reduce. The sizes are those of comm::compressed_sizes.
struct compressed_arguments {
    /// F32, overwritten with the mean. The same sizes on all ranks.
    span<const tensor> tensors = {};
    /// Backend memory that is kept between calls, initially zero.
    span<float> worker_error = {}, server_error = {};
    /// Backend memory; holds no state.
    span<std::byte> workspace = {};
    dsopt::compat compat = dsopt::compat::none;
    /// The ranks of this node.
    comm *node = nullptr;
    void *stream = nullptr;
};

struct compressed_sizes {
    /// In floats: elements, then scales.
    std::int64_t worker_error = 0, server_error = 0;
    /// Elements of these buffers.
    std::int64_t worker_elements = 0, server_elements = 0;
    /// In bytes.
    std::size_t workspace = 0;
};

/// One rank's handle to a group of ranks that communicate.
class comm {
public:
    /// The bootstrap bytes of a LOCAL, NCCL or HCCL comm. One rank makes them and sends them to the others.
    static std::vector<std::byte> unique_id(comm_kind kind) {
        std::size_t bytes = 0;
        detail::check(dsopt_comm_unique_id(static_cast<std::int32_t>(kind), nullptr, &bytes));
        std::vector<std::byte> made(bytes);
        detail::check(dsopt_comm_unique_id(static_cast<std::int32_t>(kind), made.data(), &bytes));
        return made;
    }
    /// One rank.
    static comm self(const context &ctx) { return create(ctx, desc_of(comm_kind::self, {})); }
    /// Collective: LOCAL, NCCL or HCCL with an id.
    comm(const context &ctx, comm_kind kind, span<const std::byte> id, std::int32_t rank, std::int32_t ranks,
         const comm_options &options = {}) :
        comm(create(ctx, desc_of(kind, options, id, rank, ranks))) {}
    /// Ranks are threads of this process. Collective.
    static comm local(const context &ctx, span<const std::byte> id, std::int32_t rank, std::int32_t ranks,
                      const comm_options &options = {}) {
        return comm(ctx, comm_kind::local, id, rank, ranks, options);
    }
    static comm nccl(const context &ctx, span<const std::byte> id, std::int32_t rank, std::int32_t ranks,
                     const comm_options &options = {}) {
        return comm(ctx, comm_kind::nccl, id, rank, ranks, options);
    }
    static comm hccl(const context &ctx, span<const std::byte> id, std::int32_t rank, std::int32_t ranks,
                     const comm_options &options = {}) {
        return comm(ctx, comm_kind::hccl, id, rank, ranks, options);
    }
    /// An ncclComm_t or HcclComm of the caller, borrowed until this comm and everything made with it are destroyed.
    static comm native(const context &ctx, comm_kind kind, void *communicator, const comm_options &options = {}) {
        if (communicator == nullptr) detail::fail(DSOPT_ERR_ARGUMENT, "communicator is null");
        dsopt_comm_desc desc = desc_of(kind, options);
        desc.native = communicator;
        return create(ctx, desc);
    }
    /**
     * Collectives of any class; the comm owns the object. The class needs the members
     *
     *     std::int32_t rank();
     *     std::int32_t ranks();
     *     void all_reduce(const void *send, void *recv, std::int64_t count, dsopt::dtype, dsopt::op, void *stream);
     *
     * and may have these; dsopt_comm_table documents each:
     *
     *     void all_to_all(const void *send, void *recv, std::int64_t bytes_per_rank, void *stream);
     *     void all_gather(const void *send, void *recv, std::int64_t bytes_per_rank, void *stream);
     *     void reduce_scatter(const void *send, void *recv, std::int64_t count, dsopt::dtype, dsopt::op, void *stream);
     *     std::string error();    // any thread; empty: no error
     *     void abort();           // any thread: makes blocked calls return
     *
     * A collective that fails throws dsopt::timeout, dsopt::aborted, or any other exception.
     */
    template <class Collectives>
    static comm of(const context &ctx, std::unique_ptr<Collectives> collectives, const table_options &options = {}) {
        if (collectives == nullptr) detail::fail(DSOPT_ERR_ARGUMENT, "collectives is null");
        const dsopt_comm_table table = detail::table_of(collectives.get(), options.where);
        dsopt_comm_desc desc = detail::desc_of<dsopt_comm_desc>();
        desc.kind = DSOPT_COMM_KIND_TABLE;
        desc.table = &table;
        if (options.enqueue) desc.flags |= DSOPT_COMM_FLAG_ENQUEUE;
        if (options.synchronize) desc.flags |= DSOPT_COMM_FLAG_SYNCHRONIZE;
        if (options.any_thread) desc.flags |= DSOPT_COMM_FLAG_ANY_THREAD;
        if (options.provider_sums) desc.flags |= DSOPT_COMM_FLAG_PROVIDER_SUMS;
        dsopt_comm *made = nullptr;
        const dsopt_status status = dsopt_comm_create(ctx.get(), &desc, &made);
        if (status == DSOPT_OK) static_cast<void>(collectives.release()); // the table's `destroy` deletes it
        comm owner(made);
        detail::check(status);
        return owner;
    }
    /// Takes over a handle that was made in C, for example by dsopt_mpi_comm.
    static comm adopt(dsopt_comm *handle) noexcept { return comm(handle); }

    dsopt_comm *get() const noexcept { return handle_.get(); }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

    /// Rank, size, health and counters. Any thread.
    comm_info info() const {
        comm_info info = detail::desc_of<comm_info>();
        detail::check(dsopt_comm_query(get(), &info));
        return info;
    }
    /// In place. Collective: the same list on all ranks.
    void all_reduce(span<const tensor> list, op operation = op::mean, void *stream = nullptr) {
        detail::check(dsopt_comm_all_reduce(get(), list.data(), detail::count(list),
                                            static_cast<std::int32_t>(operation), stream));
    }
    /// Any thread: blocked and later calls throw dsopt::aborted.
    void abort() const noexcept { dsopt_comm_abort(get()); }

    /// Sizes for a list; reads only tensors, compat and node of `arguments`.
    dsopt::compressed_sizes compressed_sizes(const compressed_arguments &arguments) const {
        const dsopt_compressed desc = desc_of(arguments);
        dsopt::compressed_sizes sizes;
        detail::check(dsopt_compressed_sizes(get(), &desc, &sizes.worker_error, &sizes.server_error, &sizes.workspace));
        sizes.worker_elements = sizes.worker_error - detail::count(arguments.tensors); // a scale per tensor
        sizes.server_elements = sizes.worker_elements / info().ranks;
        return sizes;
    }
    /// The 1-bit mean of a list. Collective.
    void compressed_allreduce(const compressed_arguments &arguments) {
        const dsopt_compressed desc = desc_of(arguments);
        check_sizes(arguments);
        detail::check(dsopt_compressed_allreduce(get(), &desc));
    }
    /// Copies the residuals, worker_elements and server_elements floats, to host memory. An empty span is not written.
    void compressed_errors(const compressed_arguments &arguments, span<float> worker, span<float> server) const {
        const dsopt_compressed desc = desc_of(arguments);
        const dsopt::compressed_sizes sizes = check_sizes(arguments);
        float *const to_worker = detail::at_least("worker", worker, sizes.worker_elements);
        float *const to_server = detail::at_least("server", server, sizes.server_elements);
        detail::check(dsopt_compressed_errors(get(), &desc, to_worker, to_server));
    }

private:
    using handle = detail::handle<dsopt_comm, dsopt_comm_destroy>;
    explicit comm(dsopt_comm *made) noexcept : handle_(made) {}
    static dsopt_comm_desc desc_of(comm_kind kind, const comm_options &options, span<const std::byte> id = {},
                                   std::int32_t rank = 0, std::int32_t ranks = 0) {
        dsopt_comm_desc desc = detail::desc_of<dsopt_comm_desc>();
        desc.kind = static_cast<std::int32_t>(kind);
        desc.rank = rank;
        desc.ranks = ranks;
        const auto limit = options.timeout.count();
        if (limit > INT32_MAX) detail::fail(DSOPT_ERR_ARGUMENT, "timeout is above 2147483647 ms");
        desc.timeout_ms = limit < 0 ? -1 : static_cast<std::int32_t>(limit);
        desc.id = id.data();
        desc.id_bytes = id.size();
        if (options.enqueue) desc.flags |= DSOPT_COMM_FLAG_ENQUEUE;
        if (options.provider_sums) desc.flags |= DSOPT_COMM_FLAG_PROVIDER_SUMS;
        return desc;
    }
    static comm create(const context &ctx, const dsopt_comm_desc &desc) {
        return comm(detail::make<handle>([&](dsopt_comm **made) { return dsopt_comm_create(ctx.get(), &desc, made); }));
    }
    explicit comm(handle made) noexcept : handle_(std::move(made)) {}
    static dsopt_compressed desc_of(const compressed_arguments &arguments) {
        dsopt_compressed desc = detail::desc_of<dsopt_compressed>();
        desc.tensors = arguments.tensors.data();
        desc.count = detail::count(arguments.tensors);
        desc.worker_error = arguments.worker_error.data();
        desc.server_error = arguments.server_error.data();
        desc.workspace = arguments.workspace.data();
        desc.workspace_bytes = arguments.workspace.size();
        desc.stream = arguments.stream;
        desc.compat = static_cast<std::int32_t>(arguments.compat);
        desc.node = detail::get_or_null("node", arguments.node);
        return desc;
    }
    /// Checks the lengths of the errors, which are not passed to the library.
    dsopt::compressed_sizes check_sizes(const compressed_arguments &arguments) const {
        const dsopt::compressed_sizes sizes = compressed_sizes(arguments);
        detail::at_least("worker_error", arguments.worker_error, sizes.worker_error);
        detail::at_least("server_error", arguments.server_error, sizes.server_error);
        return sizes;
    }
    handle handle_;
};

inline void context::norm(span<const tensor> list, dsopt_norm_result *result, const norm_options &options) const {
    detail::check(dsopt_tensors_norm(get(), list.data(), detail::count(list), static_cast<std::int32_t>(options.kind),
                                     options.max_norm, detail::get_or_null("comm", options.comm), result,
                                     options.stream));
}

} // namespace dsopt
#endif
