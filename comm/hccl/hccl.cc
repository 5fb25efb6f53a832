// SPDX-License-Identifier: Apache-2.0
// Ranks over HCCL, the collectives of Ascend. The engine has no backend there, so data are in host memory and are
// copied to and from buffers on the device that was current when the comm was created. The host polls instead of
// waiting, so that a dead peer costs no more than the time-out. HCCL has no abort: a failed communicator is leaked.
#include "comm/hccl/api.h"
#include "comm/polled.h"
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace dsopt {
namespace hccl {
namespace {

constexpr int kDestroyMs = 5000;

/// Makes a context current in this thread, and restores the previous context in the destructor.
class ScopedContext : NotCopied {
public:
    ScopedContext(const Api &api, hccl::Current context) : api_(api) {
        if (api_.get_context(&before_) != 0) before_ = nullptr; // the thread has none
        if (before_ != context && api_.set_context(context) != 0)
            throw Error(DSOPT_ERR_BACKEND, "the Ascend context cannot be made current");
    }
    ~ScopedContext() {
        if (before_ != nullptr) (void)api_.set_context(before_);
    }

private:
    const Api &api_;
    hccl::Current before_ = nullptr;
};

class Endpoint final : public PolledEndpoint {
public:
    Endpoint(const Api &functions, const dsopt_comm_desc &desc) :
        PolledEndpoint(desc.ranks, timeout_of(desc)),
        api_(functions) {
        if (api_.get_context(&context_) != 0 || context_ == nullptr)
            throw Error(DSOPT_ERR_STATE, "this thread has no Ascend device: call aclrtSetDevice before");
    }
    /// Fills rank and ranks.
    void open(const dsopt_comm_desc &desc, dsopt_comm_table &table) {
        owned_ = desc.native == nullptr;
        comm_ = desc.native;
        if (owned_) join(desc);
        uint32_t ranks = 0, rank = 0;
        check(api_.rank_size(comm_, &ranks), "HcclGetRankSize");
        check(api_.rank_id(comm_, &rank), "HcclGetRankId");
        table.rank = int(rank);
        table.ranks = int(ranks);
        set_ranks(table.ranks);
        check(api_.create_stream(&stream_), "aclrtCreateStream");
    }
    ~Endpoint() {
        if (unusable_) return; // pending work on the device may use the buffers and the stream
        try {
            const ScopedContext current(api_, context_);
            for (Buffer &buffer : buffers_)
                if (buffer.memory != nullptr) (void)api_.release(buffer.memory);
            if (stream_ != nullptr) (void)api_.destroy_stream(stream_);
        } catch (const Error &) { // the device is unusable
            return;
        }
        if (owned_ && comm_ != nullptr)
            (void)run_bounded(Deadline(kDestroyMs), [functions = api_, context = context_, comm = comm_] {
                return functions.set_context(context) == 0 && functions.destroy(comm) == 0;
            });
    }

    dsopt_status all_reduce(const void *from, void *to, int64_t count, int32_t dtype, int32_t op, void *) {
        if (dtype == DSOPT_DTYPE_F64) return reduce_doubles(from, static_cast<double *>(to), count, op);
        if (dtype != DSOPT_DTYPE_F32 && dtype != DSOPT_DTYPE_I32) return DSOPT_ERR_DTYPE;
        return call(from, count * 4, to, count * 4, [&](void *send, void *recv) {
            return api_.all_reduce(send, recv, uint64_t(count), dtype == DSOPT_DTYPE_F32 ? float32 : int32,
                                   op == DSOPT_OP_MAX ? max : sum, comm_, stream_);
        });
    }
    dsopt_status all_gather(const void *from, void *to, int64_t bytes, void *) {
        return call(from, bytes, to, bytes * ranks(), [&](void *send, void *recv) {
            return api_.all_gather(send, recv, uint64_t(bytes), uint8, comm_, stream_);
        });
    }
    static bool has_reduce_scatter() { return true; }
    dsopt_status reduce_scatter(const void *from, void *to, int64_t count, int32_t, int32_t, void *) {
        return call(from, count * 4 * ranks(), to, count * 4, [&](void *send, void *recv) {
            return api_.reduce_scatter(send, recv, uint64_t(count), float32, sum, comm_, stream_);
        });
    }
    bool has_all_to_all() const { return api_.all_to_all != nullptr; }
    dsopt_status all_to_all(const void *from, void *to, int64_t bytes, void *) {
        return call(from, bytes * ranks(), to, bytes * ranks(), [&](void *send, void *recv) {
            return api_.all_to_all(send, uint64_t(bytes), uint8, recv, uint64_t(bytes), uint8, comm_, stream_);
        });
    }

private:
    /// Device memory, kept for the next call.
    struct Buffer {
        void *memory = nullptr;
        size_t bytes = 0;
    };

    /// Copies data to the device, calls enqueue(send, recv), waits, and copies the result back.
    template <class Enqueue>
    dsopt_status call(const void *from, int64_t sent, void *to, int64_t received, const Enqueue &enqueue) {
        if (abort_requested()) return DSOPT_ERR_ABORTED;
        if (unusable_) return DSOPT_ERR_COMM;
        try {
            const ScopedContext current(api_, context_);
            const Deadline end = deadline();
            void *const send = grow(buffers_[0], size_t(sent)), *const recv = grow(buffers_[1], size_t(received));
            if (sent != 0) check(api_.copy(send, size_t(sent), from, size_t(sent), to_device), "aclrtMemcpy");
            unusable_ = true; // until the exchange has succeeded
            check(enqueue(send, recv), "the call");
            if (const dsopt_status status = wait(end)) return status;
            unusable_ = false;
            check(api_.copy(to, size_t(received), recv, size_t(received), to_host), "aclrtMemcpy");
            return DSOPT_OK;
        } catch (const Error &error) {
            set_text(error.what());
            return error.status();
        }
    }
    /// HCCL does not reduce fp64: gathers the values of all ranks and reduces them in rank order on the host.
    dsopt_status reduce_doubles(const void *from, double *to, int64_t count, int32_t op) {
        gathered_.resize(size_t(count) * size_t(ranks()));
        const dsopt_status status = all_gather(from, gathered_.data(), count * int64_t(sizeof(double)), nullptr);
        if (status != DSOPT_OK) return status;
        std::copy_n(gathered_.data(), count, to);
        for (int rank = 1; rank < ranks(); ++rank) reduce_into(to, gathered_.data() + rank * count, count, op);
        return DSOPT_OK;
    }
    void join(const dsopt_comm_desc &desc) {
        RootInfo info;
        std::memcpy(info.bytes, desc.id, sizeof info.bytes);
        // Blocks until all ranks have joined. A thread that never returns keeps what it uses.
        const auto joined = run_bounded(deadline(), [functions = api_, context = context_, info, desc] {
            Communicator comm = nullptr;
            Result result = functions.set_context(context);
            if (result == 0) result = functions.init(uint32_t(desc.ranks), &info, uint32_t(desc.rank), &comm);
            return std::pair(result, comm);
        });
        if (!joined) throw_ranks_missing(desc.ranks, timeout_ms());
        check(joined->first, "HcclCommInitRootInfo");
        comm_ = joined->second;
    }
    void *grow(Buffer &buffer, size_t bytes) {
        if (bytes > buffer.bytes) {
            if (buffer.memory != nullptr) (void)api_.release(buffer.memory);
            buffer = {};
            const Result result = api_.allocate(&buffer.memory, bytes, 0);
            if (result != 0) throw Error(DSOPT_ERR_NOMEM, "aclrtMalloc of %zu bytes: error %d", bytes, result);
            buffer.bytes = bytes;
        }
        return buffer.memory;
    }
    dsopt_status wait(const Deadline &deadline) {
        return poll_until(deadline, [&]() -> std::optional<dsopt_status> {
            StreamStatus status = complete;
            check(api_.query_stream(stream_, &status), "aclrtStreamQuery");
            Result error = 0;
            if (api_.async_error != nullptr) check(api_.async_error(comm_, &error), "HcclGetCommAsyncError");
            check(error, "the communicator");
            if (status != complete) return {};
            return DSOPT_OK;
        });
    }
    void check(Result result, const char *what) const {
        if (result == 0) return;
        const char *const text = api_.error_string != nullptr ? api_.error_string(result) : nullptr;
        throw Error(DSOPT_ERR_COMM, "%s: %s (%d)", what, text != nullptr ? text : "error", result);
    }

    const Api api_;
    hccl::Current context_ = nullptr;
    Communicator comm_ = nullptr;
    hccl::Stream stream_ = nullptr;
    Buffer buffers_[2];            // for sending and for receiving
    std::vector<double> gathered_; // gathered values of reduce_doubles()
    bool owned_ = false, unusable_ = false;
};

} // namespace
} // namespace hccl

void make_hccl_id(void *id) {
    using namespace hccl;
    const Api api{Library::any(kLibrary)};
    const Result result = api.root_info(static_cast<RootInfo *>(id));
    if (result != 0) throw Error(DSOPT_ERR_COMM, "HcclGetRootInfo: error %d", result);
}

std::unique_ptr<Comm> make_hccl_comm(std::shared_ptr<const Context> context, const dsopt_comm_desc &desc) {
    using namespace hccl;
    auto endpoint = std::make_unique<Endpoint>(Api{Library::for_comm(kLibrary, desc)}, desc);
    dsopt_comm_table table{};
    endpoint->open(desc, table);
    return make_comm_from_endpoint(std::move(context), std::move(endpoint), table,
                                   Provider{.sums = (desc.flags & DSOPT_COMM_FLAG_PROVIDER_SUMS) != 0});
}

const char *hccl_state() { return Library::state(hccl::kLibrary); }

} // namespace dsopt
