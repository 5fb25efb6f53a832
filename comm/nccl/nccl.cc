// SPDX-License-Identifier: Apache-2.0
// Ranks over NCCL. The host polls every collective, because a blocking wait for a dead peer would never end. Meanwhile
// it checks the communicator, the clock and the abort flag. With DSOPT_COMM_FLAG_ENQUEUE the host does not wait at all.
//
// While a thread aborts a communicator, NCCL allows no other thread to use it. So abort() only sets a flag. The thread
// that holds `busy_` ends the communicator: the call that sees the flag, or the thread that called abort() if no call
// is running.
#include "comm/nccl/api.h"
#include "comm/polled.h"
#include <cstring>
#include <string>
#include <tuple>

namespace dsopt {
namespace nccl {
namespace {

constexpr int kAbortMs = 2000, kDestroyMs = 5000;

/// A communicator, shared with the thread that ends it.
struct Session {
    Api api;
    std::shared_ptr<const Context> context;
    Communicator comm;
    bool owned, enqueues;

    std::string describe(Result result) const {
        std::string text = api.error_string(result);
        const char *const last = api.last_error != nullptr ? api.last_error(comm) : nullptr;
        if (last != nullptr && last[0] != 0) text += std::string(", ") + last;
        return text;
    }
    /// Returns the state of the communicator, or the error of the query.
    Result state() const {
        Result state = success;
        const Result query_result = api.async_error(comm, &state);
        return query_result != success ? query_result : state;
    }
    /// Finalizes and destroys the communicator, which needs the other ranks, or aborts it.
    void end(bool graceful, const Deadline &deadline) const {
        // Without ncclCommFinalize, ncclCommDestroy waits for the stream if collectives are only enqueued. Nothing
        // could end that wait, so such a communicator is aborted.
        if (graceful && (api.finalize != nullptr || !enqueues)) {
            Result state = success;
            if (api.finalize != nullptr) {
                state = api.finalize(comm);
                if (state == in_progress || state == success)
                    (void)poll(deadline,
                               [&] { return api.async_error(comm, &state) != success || state != in_progress; });
            }
            if (state == success) {
                (void)api.destroy(comm);
                return;
            }
        }
        (void)api.abort(comm);
    }
};

/// Ends the communicator on a separate thread, because destroy and abort can block forever. A thread that blocks is
/// detached.
void end_bounded(const std::shared_ptr<const Session> &session, bool graceful, int limit_ms) noexcept {
    const Deadline graceful_deadline(limit_ms / 2);
    (void)run_bounded(Deadline(limit_ms), [session, graceful, graceful_deadline] {
        session->context->device().on_device([&] { session->end(graceful, graceful_deadline); });
        return true;
    });
}

class Endpoint final : public PolledEndpoint {
public:
    Endpoint(std::shared_ptr<Session> session, int ranks, int timeout_ms) :
        PolledEndpoint(ranks, timeout_ms),
        session_(std::move(session)) {}

    ~Endpoint() {
        if (session_->owned && !ended_) end_bounded(session_, true, kDestroyMs);
    }

    dsopt_status all_reduce(const void *send, void *recv, int64_t count, int32_t dtype, int32_t op, void *stream) {
        DataType type;
        switch (dtype) {
        case DSOPT_DTYPE_F32: type = float32; break;
        case DSOPT_DTYPE_F64: type = float64; break;
        case DSOPT_DTYPE_I32: type = int32; break;
        default: return DSOPT_ERR_DTYPE;
        }
        return call(stream, [&](const Api &api, Communicator comm) {
            return api.all_reduce(send, recv, size_t(count), type, op == DSOPT_OP_MAX ? max : sum, comm, stream);
        });
    }
    dsopt_status all_gather(const void *send, void *recv, int64_t bytes, void *stream) {
        return call(stream, [&](const Api &api, Communicator comm) {
            return api.all_gather(send, recv, size_t(bytes), uint8, comm, stream);
        });
    }
    static bool has_reduce_scatter() { return true; }
    dsopt_status reduce_scatter(const void *send, void *recv, int64_t count, int32_t, int32_t, void *stream) {
        return call(stream, [&](const Api &api, Communicator comm) {
            return api.reduce_scatter(send, recv, size_t(count), float32, sum, comm, stream);
        });
    }
    bool has_all_to_all() const { return session_->api.send != nullptr && session_->api.recv != nullptr; }
    dsopt_status all_to_all(const void *send, void *recv, int64_t bytes, void *stream) {
        return call(stream, [&](const Api &api, Communicator comm) {
            Result result = api.group_start();
            if (result != success) return result;
            const auto is_accepted = [](Result code) { return code == success || code == in_progress; };
            for (int peer = 0; peer < ranks() && is_accepted(result); ++peer) {
                const char *const from = static_cast<const char *>(send) + peer * bytes;
                char *const to = static_cast<char *>(recv) + peer * bytes;
                result = api.send(from, size_t(bytes), uint8, peer, comm, stream);
                if (is_accepted(result)) result = api.recv(to, size_t(bytes), uint8, peer, comm, stream);
            }
            const Result ended = api.group_end(); // also after a failure: the group belongs to the thread
            return is_accepted(result) ? ended : result;
        });
    }
    dsopt_status wait(void *stream) {
        return with_communicator([&](const Deadline &deadline) { return wait(stream, deadline); });
    }
    void abort() noexcept {
        PolledEndpoint::abort();
        stop_if_aborted();
    }

private:
    /// enqueue() enqueues the collective on the stream. If the comm only enqueues, this call also reports the failure
    /// of an earlier collective.
    template <class Enqueue> dsopt_status call(void *stream, const Enqueue &enqueue) {
        return with_communicator([&](const Deadline &deadline) {
            const dsopt_status status = wait_for_call(enqueue(session_->api, session_->comm), deadline);
            if (status != DSOPT_OK) return status;
            return session_->enqueues ? check_state() : wait(stream, deadline);
        });
    }
    /// Calls body() while no other thread uses the communicator. A failure ends the communicator.
    template <class Body> dsopt_status with_communicator(const Body &body) {
        dsopt_status status = DSOPT_ERR_INTERNAL;
        {
            const std::lock_guard lock(busy_);
            try {
                session_->context->device().on_device(
                    [&] { status = abort_requested() ? DSOPT_ERR_ABORTED : body(deadline()); });
            } catch (const Error &error) {
                set_text(error.what());
                status = error.status();
            }
            if (status != DSOPT_OK) stop();
        }
        stop_if_aborted(); // for an abort() that set the flag after it was read and while `busy_` was still held
        return status;
    }
    dsopt_status record_failure(Result result) {
        set_text(session_->describe(result));
        return DSOPT_ERR_COMM;
    }

    /// Waits until a call of a non-blocking communicator has completed.
    dsopt_status wait_for_call(Result result, const Deadline &deadline) {
        return poll_until(deadline, [&]() -> std::optional<dsopt_status> {
            if (result == in_progress) result = session_->state();
            if (result == in_progress) return {};
            return result == success ? DSOPT_OK : record_failure(result);
        });
    }
    /// Returns DSOPT_OK, or the error of the communicator.
    dsopt_status check_state() {
        const Result state = session_->state();
        return state == success || state == in_progress ? DSOPT_OK : record_failure(state);
    }
    dsopt_status wait(void *stream, const Deadline &deadline) {
        return poll_until(deadline, [&]() -> std::optional<dsopt_status> {
            const bool completed = session_->context->device().finished(stream);
            // Checked after `over`: a collective that an error has ended is over too.
            const dsopt_status status = check_state();
            if (status != DSOPT_OK || completed) return status;
            return {};
        });
    }

    void stop() noexcept { // with `busy_` held
        if (session_->owned && !ended_) end_bounded(session_, false, kAbortMs);
        ended_ = true;
    }
    void stop_if_aborted() noexcept {
        if (!abort_requested() || !busy_.try_lock()) return;
        stop();
        busy_.unlock();
    }

    const std::shared_ptr<Session> session_;
    std::mutex busy_;
    bool ended_ = false;
};

// ------------------------------------------------------------------------------------------------------------- setup
/// Fills `session->comm`.
void create(const std::shared_ptr<Session> &session, const dsopt_comm_desc &desc, int timeout_ms) {
    const Deadline deadline(timeout_ms);
    const Api &api = session->api;
    UniqueId id;
    std::memcpy(id.bytes, desc.id, sizeof id.bytes);
    Result result = success;
    if (api.init_config == nullptr) {
        // Blocks until all ranks have joined. A thread that never returns keeps what it uses.
        const auto joined =
            run_bounded(deadline, [api, context = session->context, ranks = desc.ranks, rank = desc.rank, id] {
                std::pair<Communicator, Result> created{nullptr, remote_error};
                try {
                    context->device().on_device([&] { created.second = api.init(&created.first, ranks, id, rank); });
                } catch (const std::exception &) {} // the device has failed
                return created;
            });
        if (!joined) throw_ranks_missing(desc.ranks, timeout_ms);
        std::tie(session->comm, result) = *joined;
    } else {
        session->context->device().on_device([&] {
            Config config;
            result = api.init_config(&session->comm, desc.ranks, id, desc.rank, &config);
            // Even success means only that the initialization has begun.
            if ((result != success && result != in_progress) || session->comm == nullptr) return;
            (void)poll(deadline, [&] {
                result = session->state();
                return result != in_progress;
            });
        });
    }
    if (result == success && session->comm != nullptr) return;
    const std::string text = session->describe(result);
    if (session->comm != nullptr) end_bounded(session, false, kAbortMs);
    if (result == in_progress) throw_ranks_missing(desc.ranks, timeout_ms);
    throw Error(DSOPT_ERR_COMM, "NCCL made no communicator: %s", text.c_str());
}

/// Reads rank and ranks from the caller's communicator.
void borrow(const Session &session, dsopt_comm_table &table) {
    const auto check = [&](Result result) {
        if (result != success)
            throw Error(DSOPT_ERR_COMM, "dsopt_comm_desc.native: %s", session.describe(result).c_str());
    };
    check(session.state());
    int device = 0;
    check(session.api.user_rank(session.comm, &table.rank));
    check(session.api.count(session.comm, &table.ranks));
    check(session.api.device(session.comm, &device));
    if (device != session.context->ordinal())
        throw Error(DSOPT_ERR_DEVICE, "dsopt_comm_desc.native is on device %d, the context on %d", device,
                    session.context->ordinal());
}

} // namespace
} // namespace nccl

void make_nccl_id(void *id) {
    using namespace nccl;
    const Api api{Library::any(kLibrary)};
    const Result result = api.get_unique_id(static_cast<UniqueId *>(id));
    if (result != success) throw Error(DSOPT_ERR_COMM, "ncclGetUniqueId: %s", api.error_string(result));
}

std::unique_ptr<Comm> make_nccl_comm(std::shared_ptr<const Context> context, const dsopt_comm_desc &desc) {
    using namespace nccl;
    if (context->device().is_host())
        throw Error(DSOPT_ERR_UNSUPPORTED, "NCCL works in device memory: it needs a CUDA context");
    const bool enqueues = desc.flags & DSOPT_COMM_FLAG_ENQUEUE;
    const auto session = std::make_shared<Session>(
        Session{Api{Library::for_comm(kLibrary, desc)}, context, desc.native, desc.native == nullptr, enqueues});
    const int timeout_ms = timeout_of(desc);
    dsopt_comm_table table{};
    table.rank = desc.rank;
    table.ranks = desc.ranks;
    table.memory = DSOPT_MEMORY_BACKEND;
    if (session->owned)
        create(session, desc, timeout_ms);
    else
        borrow(*session, table);
    return make_comm_from_endpoint(
        std::move(context), std::make_unique<Endpoint>(session, table.ranks, timeout_ms), table,
        Provider{.enqueues = enqueues,
                 .sums = (desc.flags & DSOPT_COMM_FLAG_PROVIDER_SUMS) != 0,
                 .wait = [](void *self, void *stream) -> int { return static_cast<Endpoint *>(self)->wait(stream); }});
}

const char *nccl_state() {
    if (!cuda_info().usable()) return "needs CUDA";
    return Library::state(nccl::kLibrary);
}

} // namespace dsopt
