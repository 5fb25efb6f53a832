// SPDX-License-Identifier: Apache-2.0
#include "fake_mpi.h"
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <gtest/gtest.h>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

enum class Kind { duplicate, all_reduce, reduce, reduce_scatter, broadcast, all_to_all, all_gather, send, receive };
struct Call {
    Kind kind;
    int count, type, op, root;
    bool operator==(const Call &) const = default;
};

struct FakeMpiOperation {
    FakeMpiEndpoint *endpoint = nullptr;
    int64_t number = 0; // sequence number of the collective
    Call call{};
    std::vector<char> sent;     // a copy: ranks read it at different times
    const void *from = nullptr; // of a message to send
    void *to = nullptr;
    bool tested = false;   // MPI_Test was called
    bool complete = false; // the message is complete
    int error = MPI_SUCCESS;
};
/// Messages from one rank to another. A message is copied when both ranks have posted it, even after other calls have
/// failed. Only then is the sender's memory read and the send complete.
struct Channel {
    std::list<FakeMpiOperation> operations;
    std::deque<FakeMpiOperation *> sends, receives; // not matched yet
};
struct Collective {
    std::vector<FakeMpiOperation> operations;
    int arrived = 0, done = 0;
    struct FakeMpiShared *duplicate = nullptr;
};
struct FakeMpiEndpoint {
    struct FakeMpiShared *shared;
    int rank;
    int64_t calls = 0;
    int64_t pending = 0; // requests that MPI_Test has not reported as complete
    /// Buffers passed to collectives. An abandoned collective may use its buffer until the communicator is freed, so a
    /// leak checker must not report the buffer.
    std::set<const void *> buffers;
};
struct FakeMpiShared {
    explicit FakeMpiShared(int ranks) {
        for (int rank = 0; rank < ranks; ++rank) endpoints.push_back({this, rank, 0, 0, {}});
    }
    std::vector<FakeMpiEndpoint> endpoints;
    std::map<int64_t, Collective> collectives;       // collectives that some rank has not completed
    std::map<std::pair<int, int>, Channel> channels; // key: sender and receiver
    bool broken = false;                             // a call has failed and the network reports it
};

namespace {

std::mutex g_mutex; // protects everything
thread_local MPI_Comm t_world = nullptr;
void copy_on_host(void *to, const void *from, size_t bytes) { std::memcpy(to, from, bytes); }
void (*g_copy)(void *to, const void *from, size_t bytes) = copy_on_host;
std::set<const void *> g_message_buffers; // buffers passed to messages of all communicators
thread_local int64_t t_calls = 0, t_failing_call = 0, t_posts = 0, t_hanging_post = 0;

FakeMpiShared *new_shared(int ranks) {
    static auto &all = *new std::vector<std::unique_ptr<FakeMpiShared>>; // never freed, see FakeMpi::enter()
    all.push_back(std::make_unique<FakeMpiShared>(ranks));
    return all.back().get();
}
bool injected_failure(MPI_Comm comm = nullptr) {
    if (++t_calls != t_failing_call) return false;
    for (const MPI_Comm affected : {comm, t_world})
        if (affected != nullptr) affected->shared->broken = true;
    return true;
}

bool injected_hang() { return ++t_posts == t_hanging_post; }

size_t size_of(int type) {
    constexpr size_t sizes[] = {1, 4, 8, 4, 8};
    return sizes[type];
}

int post(MPI_Comm comm, const Call &call, const void *from, size_t bytes, void *to, MPI_Request *request) {
    const std::lock_guard lock(g_mutex);
    FakeMpiShared &shared = *comm->shared;
    const int64_t number = comm->calls++;
    Collective &collective = shared.collectives[number];
    collective.operations.resize(shared.endpoints.size());
    FakeMpiOperation &operation = collective.operations[size_t(comm->rank)];
    comm->buffers.insert({from, to}); // also for a call that fails: a real library may already use the buffers
    if (injected_failure(comm)) return MPI_ERR_OTHER;
    const auto *const bytes_from = static_cast<const char *>(from);
    operation.endpoint = comm;
    operation.number = number;
    operation.call = call;
    operation.sent.assign(bytes_from, bytes_from + bytes);
    operation.to = to;
    if (!injected_hang()) ++collective.arrived;
    ++comm->pending;
    *request = &operation;
    return MPI_SUCCESS;
}

void deliver(FakeMpiOperation &send, FakeMpiOperation &receive) {
    send.complete = receive.complete = true;
    if (send.call.count > receive.call.count) {
        receive.error = MPI_ERR_TRUNCATE;
        return;
    }
    std::vector<char> message(size_t(send.call.count)); // also between devices
    if (message.empty()) return;
    g_copy(message.data(), send.from, message.size());
    g_copy(receive.to, message.data(), message.size());
}

int post_message(int from, int to, MPI_Comm comm, Kind kind, size_t bytes, const void *data, MPI_Request *request) {
    const std::lock_guard lock(g_mutex);
    Channel &channel = comm->shared->channels[{from, to}];
    comm->buffers.insert(data);
    g_message_buffers.insert(data);
    if (injected_failure(comm)) return MPI_ERR_OTHER;
    FakeMpiOperation &operation = channel.operations.emplace_back();
    operation.endpoint = comm;
    operation.call = {kind, int(bytes), MPI_BYTE, 0, 0};
    if (!injected_hang()) (kind == Kind::send ? channel.sends : channel.receives).push_back(&operation);
    if (kind == Kind::send)
        operation.from = data;
    else
        operation.to = const_cast<void *>(data);
    if (!channel.sends.empty() && !channel.receives.empty()) {
        deliver(*channel.sends.front(), *channel.receives.front());
        channel.sends.pop_front();
        channel.receives.pop_front();
    }
    ++comm->pending;
    *request = &operation;
    return MPI_SUCCESS;
}

/// Reduces elements of each rank, of which the first is element `begin`.
template <class T> void reduce(const Collective &collective, const Call &call, size_t begin, void *to) {
    std::vector<T> total(size_t(call.count)), theirs(size_t(call.count));
    for (size_t rank = 0; rank < collective.operations.size(); ++rank) {
        const std::vector<char> &sent = collective.operations[rank].sent;
        if (!sent.empty()) std::memcpy(theirs.data(), sent.data() + begin * sizeof(T), theirs.size() * sizeof(T));
        for (size_t i = 0; i < total.size(); ++i)
            total[i] = rank == 0            ? theirs[i]
                       : call.op == MPI_SUM ? T(total[i] + theirs[i])
                                            : std::max(total[i], theirs[i]);
    }
    if (!total.empty()) std::memcpy(to, total.data(), total.size() * sizeof(T));
}
void finish(Collective &collective, const FakeMpiOperation &operation) {
    const Call &call = operation.call;
    const size_t bytes = size_t(call.count) * size_of(call.type), rank = size_t(operation.endpoint->rank);
    auto *const to = static_cast<char *>(operation.to);
    const auto copy = [&](size_t offset, const std::vector<char> &sent, size_t from) {
        if (bytes != 0) std::memcpy(to + offset, sent.data() + from, bytes);
    };
    switch (call.kind) {
    case Kind::duplicate:
        if (collective.duplicate == nullptr) collective.duplicate = new_shared(int(collective.operations.size()));
        *static_cast<MPI_Comm *>(operation.to) = &collective.duplicate->endpoints[rank];
        return;
    case Kind::reduce:
        if (int(rank) != call.root) return;
        [[fallthrough]];
    case Kind::all_reduce:
    case Kind::reduce_scatter: {
        const size_t begin = call.kind == Kind::reduce_scatter ? rank * size_t(call.count) : 0;
        if (call.type == MPI_INT32_T) return reduce<int32_t>(collective, call, begin, to);
        if (call.type == MPI_INT64_T) return reduce<int64_t>(collective, call, begin, to);
        if (call.type == MPI_FLOAT) return reduce<float>(collective, call, begin, to);
        return reduce<double>(collective, call, begin, to);
    }
    case Kind::broadcast: return copy(0, collective.operations[size_t(call.root)].sent, 0);
    case Kind::all_to_all:
        for (size_t r = 0; r < collective.operations.size(); ++r)
            copy(r * bytes, collective.operations[r].sent, rank * bytes);
        return;
    case Kind::all_gather:
        for (size_t r = 0; r < collective.operations.size(); ++r) copy(r * bytes, collective.operations[r].sent, 0);
        return;
    case Kind::send:
    case Kind::receive: return; // handled by post_message()
    }
}

int return_value(int *out, int value) {
    const std::lock_guard lock(g_mutex);
    if (injected_failure()) return MPI_ERR_OTHER;
    *out = value;
    return MPI_SUCCESS;
}

} // namespace

FakeMpi::FakeMpi(int ranks) :
    shared_([ranks] {
        const std::lock_guard lock(g_mutex);
        g_message_buffers.clear();
        return new_shared(ranks);
    }()) {}
void FakeMpi::enter(int rank) const { t_world = &shared_->endpoints[size_t(rank)]; }
void FakeMpi::fail_at(int64_t n) {
    t_calls = t_hanging_post = 0;
    t_failing_call = n;
}
void FakeMpi::hang_at(int64_t n) {
    fail_at(0);
    t_posts = 0;
    t_hanging_post = n;
}
int64_t FakeMpi::calls() { return t_calls; }
void FakeMpi::copy_messages_by(void (*copy)(void *to, const void *from, size_t bytes)) { g_copy = copy; }
bool FakeMpi::was_passed(const void *begin, size_t bytes) {
    const std::lock_guard lock(g_mutex);
    const auto found = g_message_buffers.lower_bound(begin);
    return found != g_message_buffers.end() && *found < static_cast<const char *>(begin) + bytes;
}

MPI_Comm fake_mpi_world() { return t_world; }
double MPI_Wtime() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
int MPI_Initialized(int *flag) { return return_value(flag, 1); }
int MPI_Query_thread(int *level) { return return_value(level, int(MPI_THREAD_MULTIPLE)); }
int MPI_Finalized(int *flag) { return return_value(flag, 0); }
int MPI_Error_string(int code, char *text, int *length) {
    *length = std::snprintf(text, MPI_MAX_ERROR_STRING, "error %d of the double", code);
    return MPI_SUCCESS;
}
int MPI_Comm_set_errhandler(MPI_Comm, MPI_Errhandler) {
    int nothing;
    return return_value(&nothing, 0);
}
int MPI_Comm_rank(MPI_Comm comm, int *rank) { return return_value(rank, comm->rank); }
int MPI_Comm_size(MPI_Comm comm, int *ranks) { return return_value(ranks, int(comm->shared->endpoints.size())); }
int MPI_Comm_idup(MPI_Comm comm, MPI_Comm *other, MPI_Request *request) {
    return post(comm, {Kind::duplicate, 0, 0, 0, 0}, nullptr, 0, other, request);
}
int MPI_Comm_free(MPI_Comm *comm) {
    {
        const std::lock_guard lock(g_mutex);
        (*comm)->buffers.clear();
        EXPECT_EQ((*comm)->pending, 0) << "requests of a communicator that is freed were not waited for";
    }
    *comm = MPI_COMM_NULL;
    int nothing;
    return return_value(&nothing, 0);
}
int MPI_Test(MPI_Request *request, int *complete, MPI_Status *) {
    const std::lock_guard lock(g_mutex);
    FakeMpiOperation &operation = **request;
    FakeMpiShared &shared = *operation.endpoint->shared;
    if (!operation.tested && injected_failure(operation.endpoint)) return MPI_ERR_OTHER;
    operation.tested = true;
    *complete = 0;
    if (operation.call.kind == Kind::send || operation.call.kind == Kind::receive) {
        if (!operation.complete) return shared.broken ? MPI_ERR_OTHER : MPI_SUCCESS;
        *complete = 1;
        *request = nullptr;
        --operation.endpoint->pending;
        return operation.error;
    }
    Collective &collective = shared.collectives[operation.number];
    if (collective.arrived < int(shared.endpoints.size())) return shared.broken ? MPI_ERR_OTHER : MPI_SUCCESS;
    for (const FakeMpiOperation &other : collective.operations)
        if (other.call != operation.call) return MPI_ERR_OTHER;
    finish(collective, operation);
    --operation.endpoint->pending;
    *complete = 1;
    *request = nullptr;
    if (++collective.done == int(shared.endpoints.size())) shared.collectives.erase(operation.number);
    return MPI_SUCCESS;
}
int MPI_Isend(const void *from, int count, MPI_Datatype type, int to, int, MPI_Comm comm, MPI_Request *request) {
    return post_message(comm->rank, to, comm, Kind::send, size_t(count) * size_of(type), from, request);
}
int MPI_Irecv(void *to, int count, MPI_Datatype type, int from, int, MPI_Comm comm, MPI_Request *request) {
    return post_message(from, comm->rank, comm, Kind::receive, size_t(count) * size_of(type), to, request);
}
int MPI_Iallreduce(const void *from, void *to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                   MPI_Request *request) {
    return post(comm, {Kind::all_reduce, count, type, op, 0}, from, size_t(count) * size_of(type), to, request);
}
int MPI_Ireduce(const void *from, void *to, int count, MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm,
                MPI_Request *request) {
    return post(comm, {Kind::reduce, count, type, op, root}, from, size_t(count) * size_of(type), to, request);
}
int MPI_Ireduce_scatter_block(const void *from, void *to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                              MPI_Request *request) {
    const size_t bytes = size_t(count) * size_of(type) * comm->shared->endpoints.size();
    return post(comm, {Kind::reduce_scatter, count, type, op, 0}, from, bytes, to, request);
}
int MPI_Ibcast(void *data, int count, MPI_Datatype type, int root, MPI_Comm comm, MPI_Request *request) {
    return post(comm, {Kind::broadcast, count, type, 0, root}, data, size_t(count) * size_of(type), data, request);
}
int MPI_Ialltoall(const void *from, int count, MPI_Datatype type, void *to, int, MPI_Datatype, MPI_Comm comm,
                  MPI_Request *request) {
    const size_t bytes = size_t(count) * size_of(type) * comm->shared->endpoints.size();
    return post(comm, {Kind::all_to_all, count, type, 0, 0}, from, bytes, to, request);
}
int MPI_Iallgather(const void *from, int count, MPI_Datatype type, void *to, int, MPI_Datatype, MPI_Comm comm,
                   MPI_Request *request) {
    return post(comm, {Kind::all_gather, count, type, 0, 0}, from, size_t(count) * size_of(type), to, request);
}
