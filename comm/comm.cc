// SPDX-License-Identifier: Apache-2.0
#include "comm/comm.h"
#include "base/fork.h"
#include "base/sizes.h"
#include "comm/bounded.h"
#include <iterator>

namespace dsopt {

char *Comm::Scratch::get(const std::shared_ptr<const Context> &context, bool device, size_t bytes, void *stream) {
    if (bytes > bytes_) {
        bytes = round_up(bytes, 256);
        // a graph may use the old memory
        if (device && device_.data() != nullptr) outgrown_.push_back(std::move(device_));
        if (device)
            device_ = Memory(context, bytes, stream);
        else if (context->device().is_host())
            plain_.resize(bytes);
        else
            pinned_ = context->device().host_buffer(bytes);
        bytes_ = bytes;
    }
    return static_cast<char *>(device ? device_.data() : pinned_ ? pinned_.get() : plain_.data());
}
void Comm::Scratch::leak() {
    static constinit PerProcess<std::vector<Memory>> leaked; // never freed
    bytes_ = 0;
    if (device_.data() != nullptr) outgrown_.push_back(std::move(device_));
    leaked.with([&](auto &memories) {
        for (Memory &memory : outgrown_) memories.push_back(std::move(memory));
    });
    outgrown_.clear();
}

Comm::Comm(std::shared_ptr<const Context> context, const dsopt_comm_table &table, Provider provider) :
    context_(std::move(context)),
    table_(table),
    provider_(provider),
    device_(table.memory == DSOPT_MEMORY_BACKEND && !context_->device().is_host()) {}

Comm::~Comm() {
    if (table_.destroy == nullptr) return;
    try {
        if (!provider_.of_caller) context_->check_process();
    } catch (const Error &) {
        return; // after fork(): leaked, because the parent's threads may hold locks of the table
    }
    table_.destroy(table_.self);
}

void Comm::hold(const void *user) {
    const void *holder = nullptr;
    if (!holder_.compare_exchange_strong(holder, user) && holder != user) throw_held();
}
void Comm::release(const void *user) noexcept { holder_.compare_exchange_strong(user, nullptr); }
void Comm::throw_held() {
    throw Error(DSOPT_ERR_BUSY, "the comm is in use: gradients of an optimizer that uses it are ready");
}

void Comm::check_usable() {
    context_->check_process();
    check_not_held();
    const dsopt_status status = status_.load(std::memory_order_acquire);
    if (status == DSOPT_ERR_ABORTED) throw Error(status, "the comm was aborted");
    if (status != DSOPT_OK) throw Error(status, "the comm failed earlier and is unusable");
}

void Comm::set_unusable(dsopt_status status) noexcept {
    dsopt_status first = DSOPT_OK;
    status_.compare_exchange_strong(first, status);
}

int Comm::count_call(int kind, int result, int64_t moved) {
    Count &count = counts_[kind];
    count.calls.fetch_add(1, std::memory_order_relaxed);
    if (result == 0) count.moved.fetch_add(moved, std::memory_order_relaxed);
    return result;
}

void Comm::fail(int result, const char *what, void *stream) {
    dsopt_status status = DSOPT_ERR_COMM;
    if (!provider_.of_caller)
        status = result;
    else if (result <= -DSOPT_ERR_COMM && result >= -DSOPT_ERR_ABORTED)
        status = -result;
    set_unusable(status);
    if (status_.load() == DSOPT_ERR_ABORTED) status = DSOPT_ERR_ABORTED;
    char text[256] = "";
    if (thrown_[0] != 0)
        std::snprintf(text, sizeof text, "%s", thrown_);
    else if (table_.error != nullptr)
        (void)result_of([&] { return table_.error(table_.self, text, sizeof text); });
    if (device_) {
        // Pending work on the stream may still write to scratch memory, and freeing that memory would wait for the
        // work. A library that does not use CUDA streams may write to scratch memory at any time.
        bool completed = !provider_.synchronizes;
        try {
            completed = completed && poll(Deadline(200), [&] { return context_->device().finished(stream); });
        } catch (const std::exception &) {} // the stream has failed: no work is pending
        if (!completed)
            for (Scratch *scratch : {&staging_, &spare_, &gathered_, &bucket_}) scratch->leak();
    }
    throw Error(status, "%s over %d ranks failed on rank %d: %s (%d)", what, ranks(), rank(),
                text[0] != 0 ? text : status_name(status), result);
}

template <class Function> int Comm::result_of(const Function &function) {
    if (!provider_.of_caller) return function();
    try {
        return function();
    } catch (const std::exception &error) {
        std::snprintf(thrown_, sizeof thrown_, "a function of its table threw: %s", error.what());
    } catch (...) { std::snprintf(thrown_, sizeof thrown_, "a function of its table threw"); }
    return -DSOPT_ERR_COMM;
}

void Comm::move(void *to, const void *from, int64_t bytes, Place place, void *stream) const {
    if (to == from || bytes == 0) return;
    if (place == Place::backend)
        context_->device().enqueue_copy(to, from, size_t(bytes), stream);
    else
        std::memmove(to, from, size_t(bytes));
}

template <class Function> int Comm::call_table(void *stream, const Function &function) {
    if (!provider_.synchronizes) return result_of(function);
    const Device &device = context_->device();
    device.wait(stream);
    int result = 0;
    device.on_device([&] { result = result_of(function); });
    return result;
}

/// Waits for enqueued exchanges, with the comm's time-out. Called before copies from and to the host, because on a
/// device such copies may wait for the stream too, and longer.
int Comm::wait_for_enqueued(void *stream) {
    if (!provider_.enqueues) return 0;
    if (provider_.wait != nullptr) return provider_.wait(table_.self, stream); // of the engine's providers
    context_->device().wait(stream);
    char text[1];
    if (table_.error == nullptr) return 0;
    return result_of([&] { return table_.error(table_.self, text, sizeof text); });
}

/// Calls call(send, recv) with both pointers in the provider's kind of memory; in place if `send` and `recv` are the
/// same. With DSOPT_COMM_FLAG_SYNCHRONIZE both are always scratch memory of this comm, because the library may use it
/// after a failure for an unknown time.
template <class Call>
void Comm::run(const char *what, const void *send, int64_t sent, void *recv, int64_t received, Place place,
               void *stream, const Call &call) {
    const Device &device = context_->device();
    check_stream(stream, place);
    unusable_on_failure([&] {
        int result = 0;
        const bool is_outside = !device.is_host() && (place == Place::backend) != device_;
        if (!is_outside && !provider_.synchronizes) {
            result = call(send, recv);
        } else {
            const int64_t second = send == recv ? 0 : round_up(sent, int64_t(kCacheLine));
            char *const staged = staging_.get(context_, device_, size_t(second + received), stream);
            result = wait_for_enqueued(stream);
            if (result == 0) {
                device.enqueue_copy(staged, send, size_t(sent), stream);
                if (!device_) device.wait(stream);
                result = call(staged, staged + second);
            }
            if (result == 0) result = wait_for_enqueued(stream);
            if (result == 0) {
                device.enqueue_copy(recv, staged + second, size_t(received), stream);
                if (is_outside) {
                    device.wait(stream); // the next call overwrites the staged data, or the host reads the result
                    check_usable();      // throws if an abort has ended that wait
                }
            }
        }
        if (result != 0) fail(result, what, stream);
    });
}

int Comm::reduce(void *data, int64_t count, int32_t dtype, int32_t op, void *stream) {
    return count_call(
        DSOPT_COLLECTIVE_ALL_REDUCE,
        call_table(stream, [&] { return table_.all_reduce(table_.self, data, data, count, dtype, op, stream); }),
        count * int64_t(dtype_size(dtype)) * 2 * (ranks() - 1) / ranks());
}

int Comm::gather(const void *send, void *recv, int64_t bytes, void *stream) {
    if (table_.all_gather != nullptr)
        return count_call(DSOPT_COLLECTIVE_ALL_GATHER,
                          call_table(stream, [&] { return table_.all_gather(table_.self, send, recv, bytes, stream); }),
                          bytes * (ranks() - 1));
    char *const messages = static_cast<char *>(recv);
    // Composes the all-gather from an all-reduce: each rank adds its message to zeros of the other ranks. The sum is of
    // integers, so no bit changes.
    const int64_t padded = round_up(bytes, 4);
    char *const sums = spare_.get(context_, device_, size_t(padded * ranks()), stream);
    if (device_)
        context_->device().clear(sums, size_t(padded * ranks()), stream);
    else
        std::memset(sums, 0, size_t(padded * ranks()));
    move(sums + rank() * padded, send, bytes, provider_place(), stream);
    if (const int result = reduce(sums, padded / 4 * ranks(), DSOPT_DTYPE_I32, DSOPT_OP_SUM, stream)) return result;
    for (int other = 0; other < ranks(); ++other)
        move(messages + other * bytes, sums + other * padded, bytes, provider_place(), stream);
    return 0;
}

int Comm::exchange_messages(const void *send, void *recv, int64_t bytes, void *stream) {
    if (table_.all_to_all != nullptr)
        return count_call(DSOPT_COLLECTIVE_ALL_TO_ALL,
                          call_table(stream, [&] { return table_.all_to_all(table_.self, send, recv, bytes, stream); }),
                          bytes * (ranks() - 1));
    // Gathers the messages to one rank at a time, so that no more memory is needed than for the result. gather() may
    // use `spare_` itself.
    const char *const messages = static_cast<const char *>(send);
    char *const gathered = gathered_.get(context_, device_, size_t(bytes * ranks()), stream);
    for (int to = 0; to < ranks(); ++to) {
        if (const int result = gather(messages + to * bytes, gathered, bytes, stream)) return result;
        if (to == rank()) move(recv, gathered, bytes * ranks(), provider_place(), stream);
    }
    return 0;
}

void Comm::all_reduce(void *data, int64_t count, int32_t dtype, int32_t op, void *stream, Place place) {
    check_usable();
    if (ranks() == 1 || count == 0) return;
    const int64_t bytes = count * int64_t(dtype_size(dtype));
    run("all-reduce", data, bytes, data, bytes, place, stream,
        [&](const void *, void *memory) { return reduce(memory, count, dtype, op, stream); });
}

void Comm::all_to_all(const void *send, void *recv, int64_t bytes, void *stream, Place place) {
    check_usable();
    if (bytes == 0) return;
    if (ranks() == 1 && table_.all_to_all == nullptr) return move(recv, send, bytes, place, stream);
    run("all-to-all", send, bytes * ranks(), recv, bytes * ranks(), place, stream,
        [&](const void *from, void *to) { return exchange_messages(from, to, bytes, stream); });
}

void Comm::all_gather(const void *send, void *recv, int64_t bytes, void *stream, Place place) {
    check_usable();
    if (bytes == 0) return;
    if (ranks() == 1 && table_.all_gather == nullptr) return move(recv, send, bytes, place, stream);
    run("all-gather", send, bytes, recv, bytes * ranks(), place, stream,
        [&](const void *from, void *to) { return gather(from, to, bytes, stream); });
}

void Comm::reduce_scatter(const void *send, void *recv, int64_t count, void *stream, Place place) {
    check_usable();
    if (count == 0) return;
    const int64_t bytes = count * int64_t(sizeof(float));
    run("reduce-scatter", send, bytes * ranks(), recv, bytes, place, stream, [&](const void *from, void *to) {
        return count_call(DSOPT_COLLECTIVE_REDUCE_SCATTER,
                          call_table(stream,
                                     [&] {
                                         return table_.reduce_scatter(table_.self, from, to, count, DSOPT_DTYPE_F32,
                                                                      DSOPT_OP_SUM, stream);
                                     }),
                          bytes * (ranks() - 1));
    });
}

void Comm::check_not_held() const {
    const void *const holder = holder_.load(std::memory_order_relaxed);
    if (holder != nullptr && holder != CommUser::current()) throw_held();
}

void Comm::reserve(const Messages &messages, void *stream, Place place) {
    check_not_held(); // the thread of the holder uses the memory
    const auto reserve = [&](Scratch &scratch, int64_t bytes) {
        if (bytes != 0) (void)scratch.get(context_, device_, size_t(bytes), stream);
    };
    const auto reserve_spare = [&](int64_t message) { // for gather()
        if (table_.all_gather == nullptr) reserve(spare_, round_up(message, 4) * ranks());
    };
    const bool is_outside = !context_->device().is_host() && (place == Place::backend) != device_;
    const bool staged = is_outside || provider_.synchronizes;
    if (ranks() != 1 && staged) reserve(staging_, messages.all_reduce);
    if (messages.all_to_all != 0 && (ranks() != 1 || table_.all_to_all != nullptr)) {
        const int64_t all_bytes = messages.all_to_all * ranks();
        if (staged) reserve(staging_, round_up(all_bytes, int64_t(kCacheLine)) + all_bytes);
        if (table_.all_to_all == nullptr) {
            reserve(gathered_, all_bytes);
            reserve_spare(messages.all_to_all);
        }
    }
    if (messages.all_gather != 0 && (ranks() != 1 || table_.all_gather != nullptr)) {
        if (staged)
            reserve(staging_, round_up(messages.all_gather, int64_t(kCacheLine)) + messages.all_gather * ranks());
        reserve_spare(messages.all_gather);
    }
}

void Comm::check_stream(void *stream, Place place) const {
    const bool enqueues = provider_.enqueues && device_ && place == Place::backend;
    if (!enqueues) (void)context_->device().finished(stream); // throws if the stream is being captured
}

float *Comm::bucket(int64_t numel, void *stream) {
    check_not_held();
    const Device &device = context_->device();
    const size_t bytes = size_t(numel) * sizeof(float);
    if (!bucket_.holds(bytes)) (void)device.finished(stream); // no allocation in a capture
    return reinterpret_cast<float *>(bucket_.get(context_, !device.is_host(), bytes, stream));
}

void Comm::abort() noexcept {
    set_unusable(DSOPT_ERR_ABORTED);
    if (table_.abort != nullptr) table_.abort(table_.self);
}

dsopt_comm_info Comm::info() const {
    dsopt_comm_info info{};
    info.rank = rank();
    info.ranks = ranks();
    info.status = status_.load(std::memory_order_acquire);
    for (int kind = 0; kind < DSOPT_COLLECTIVE_SLOTS; ++kind) {
        const Count &count = counts_[kind];
        info.calls += info.calls_of[kind] = count.calls.load(std::memory_order_relaxed);
        info.sent_of[kind] = info.received_of[kind] = count.moved.load(std::memory_order_relaxed);
        info.bytes_sent += info.sent_of[kind];
        info.bytes_received += info.received_of[kind];
    }
    return info;
}

namespace {
/// Does the work of unusable_on_failure() for the comms from the k-th on.
void set_unusable_from(const CommSet &comms, int32_t k, FunctionRef<void()> body) {
    Comm *const others[] = {comms.data, comms.node, comms.model};
    constexpr auto first = int32_t(std::size(others));
    if (k == first + comms.expert_count) return body();
    Comm *const comm = k < first ? others[k] : comms.experts[k - first].get();
    if (comm == nullptr || comm->ranks() == 1) return set_unusable_from(comms, k + 1, body);
    comm->unusable_on_failure([&] { set_unusable_from(comms, k + 1, body); });
}
} // namespace

void unusable_on_failure(const CommSet &comms, FunctionRef<void()> body) { set_unusable_from(comms, 0, body); }

} // namespace dsopt
