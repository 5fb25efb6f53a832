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

enum class Kind { duplicate, all_reduce, reduce, broadcast, all_to_all, all_gather, send, receive };
struct Call {
    Kind kind;
    int count, type, op, root;
    bool operator==(const Call &) const = default;
};

struct FakeMpiPart {
    FakeMpiEnd *end = nullptr;
    int64_t number = 0; // sequence number of the collective
    Call call{};
    std::vector<char> sent;     // a copy: ranks read it at different times
    const void *from = nullptr; // of a message to send
    void *to = nullptr;
    bool seen = false; // MPI_Test was called
    bool over = false; // the message is complete
    int error = MPI_SUCCESS;
};
/// Messages from one rank to another. A message moves when both ranks have posted it, however late, even if the posting
/// calls have failed in the meantime. Only then is the sender's memory read and the send complete.
struct Channel {
    std::list<FakeMpiPart> parts;
    std::deque<FakeMpiPart *> sends, receives; // not matched yet
};
struct Meeting {
    std::vector<FakeMpiPart> parts;
    int here = 0, done = 0;
    struct FakeMpiShared *duplicate = nullptr;
};
struct FakeMpiEnd {
    struct FakeMpiShared *shared;
    int rank;
    int64_t calls = 0;
    int64_t open = 0; // requests that MPI_Test has not reported as complete
    /// Buffers passed to collectives. An abandoned collective may use its buffer until the communicator is freed, so a
    /// leak checker must not report the buffer.
    std::set<const void *> given;
};
struct FakeMpiShared {
    explicit FakeMpiShared(int ranks) {
        for (int rank = 0; rank < ranks; ++rank) ends.push_back({this, rank, 0, 0, {}});
    }
    std::vector<FakeMpiEnd> ends;
    std::map<int64_t, Meeting> meetings;             // collectives that some rank has not completed
    std::map<std::pair<int, int>, Channel> channels; // key: sender and receiver
    bool broken = false;                             // a call has failed and the network reports it
};

namespace {

std::mutex g_mutex; // protects everything
thread_local MPI_Comm t_world = nullptr;
void copy_on_host(void *to, const void *from, size_t bytes) { std::memcpy(to, from, bytes); }
void (*g_copy)(void *to, const void *from, size_t bytes) = copy_on_host;
std::set<const void *> g_given; // buffers passed to messages of all communicators
thread_local int64_t t_calls = 0, t_fail_at = 0;

FakeMpiShared *new_shared(int ranks) {
    static auto &all = *new std::vector<std::unique_ptr<FakeMpiShared>>; // never freed, see FakeMpi::enter()
    all.push_back(std::make_unique<FakeMpiShared>(ranks));
    return all.back().get();
}
bool injected_failure(MPI_Comm comm = nullptr) {
    if (++t_calls != t_fail_at) return false;
    for (const MPI_Comm one : {comm, t_world})
        if (one != nullptr) one->shared->broken = true;
    return true;
}

size_t size_of(int type) {
    constexpr size_t sizes[] = {1, 4, 8, 4, 8};
    return sizes[type];
}

int post(MPI_Comm comm, const Call &call, const void *from, size_t bytes, void *to, MPI_Request *request) {
    const std::lock_guard lock(g_mutex);
    FakeMpiShared &shared = *comm->shared;
    const int64_t number = comm->calls++;
    Meeting &meeting = shared.meetings[number];
    meeting.parts.resize(shared.ends.size());
    FakeMpiPart &part = meeting.parts[size_t(comm->rank)];
    comm->given.insert({from, to}); // also for a call that fails: a real library may already use the buffers
    if (injected_failure(comm)) return MPI_ERR_OTHER;
    const auto *const bytes_from = static_cast<const char *>(from);
    part.end = comm;
    part.number = number;
    part.call = call;
    part.sent.assign(bytes_from, bytes_from + bytes);
    part.to = to;
    ++meeting.here;
    ++comm->open;
    *request = &part;
    return MPI_SUCCESS;
}

void deliver(FakeMpiPart &send, FakeMpiPart &receive) {
    send.over = receive.over = true;
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
    comm->given.insert(data);
    g_given.insert(data);
    if (injected_failure(comm)) return MPI_ERR_OTHER;
    FakeMpiPart &part = channel.parts.emplace_back();
    part.end = comm;
    part.call = {kind, int(bytes), MPI_BYTE, 0, 0};
    (kind == Kind::send ? channel.sends : channel.receives).push_back(&part);
    if (kind == Kind::send)
        part.from = data;
    else
        part.to = const_cast<void *>(data);
    if (!channel.sends.empty() && !channel.receives.empty()) {
        deliver(*channel.sends.front(), *channel.receives.front());
        channel.sends.pop_front();
        channel.receives.pop_front();
    }
    ++comm->open;
    *request = &part;
    return MPI_SUCCESS;
}

template <class T> void reduce(const Meeting &meeting, const Call &call, void *to) {
    std::vector<T> total(size_t(call.count)), theirs(size_t(call.count));
    for (size_t rank = 0; rank < meeting.parts.size(); ++rank) {
        const std::vector<char> &sent = meeting.parts[rank].sent;
        if (!sent.empty()) std::memcpy(theirs.data(), sent.data(), sent.size());
        for (size_t i = 0; i < total.size(); ++i)
            total[i] = rank == 0            ? theirs[i]
                       : call.op == MPI_SUM ? T(total[i] + theirs[i])
                                            : std::max(total[i], theirs[i]);
    }
    if (!total.empty()) std::memcpy(to, total.data(), total.size() * sizeof(T));
}
void take(Meeting &meeting, const FakeMpiPart &part) {
    const Call &call = part.call;
    const size_t bytes = size_t(call.count) * size_of(call.type), own = size_t(part.end->rank);
    auto *const to = static_cast<char *>(part.to);
    const auto copy = [&](size_t at, const std::vector<char> &sent, size_t from) {
        if (bytes != 0) std::memcpy(to + at, sent.data() + from, bytes);
    };
    switch (call.kind) {
    case Kind::duplicate:
        if (meeting.duplicate == nullptr) meeting.duplicate = new_shared(int(meeting.parts.size()));
        *static_cast<MPI_Comm *>(part.to) = &meeting.duplicate->ends[own];
        return;
    case Kind::reduce:
        if (int(own) != call.root) return;
        [[fallthrough]];
    case Kind::all_reduce:
        if (call.type == MPI_INT32_T) return reduce<int32_t>(meeting, call, to);
        if (call.type == MPI_INT64_T) return reduce<int64_t>(meeting, call, to);
        if (call.type == MPI_FLOAT) return reduce<float>(meeting, call, to);
        return reduce<double>(meeting, call, to);
    case Kind::broadcast: return copy(0, meeting.parts[size_t(call.root)].sent, 0);
    case Kind::all_to_all:
        for (size_t r = 0; r < meeting.parts.size(); ++r) copy(r * bytes, meeting.parts[r].sent, own * bytes);
        return;
    case Kind::all_gather:
        for (size_t r = 0; r < meeting.parts.size(); ++r) copy(r * bytes, meeting.parts[r].sent, 0);
        return;
    case Kind::send:
    case Kind::receive: return; // handled by post_message()
    }
}

int answer(int *out, int value) {
    const std::lock_guard lock(g_mutex);
    if (injected_failure()) return MPI_ERR_OTHER;
    *out = value;
    return MPI_SUCCESS;
}

} // namespace

FakeMpi::FakeMpi(int ranks) :
    shared_([ranks] {
        const std::lock_guard lock(g_mutex);
        g_given.clear();
        return new_shared(ranks);
    }()) {}
void FakeMpi::enter(int rank) const { t_world = &shared_->ends[size_t(rank)]; }
void FakeMpi::fail_at(int64_t n) {
    t_calls = 0;
    t_fail_at = n;
}
int64_t FakeMpi::calls() { return t_calls; }
void FakeMpi::copy_messages_by(void (*copy)(void *to, const void *from, size_t bytes)) { g_copy = copy; }
bool FakeMpi::was_passed(const void *begin, size_t bytes) {
    const std::lock_guard lock(g_mutex);
    const auto found = g_given.lower_bound(begin);
    return found != g_given.end() && *found < static_cast<const char *>(begin) + bytes;
}

MPI_Comm fake_mpi_world() { return t_world; }
double MPI_Wtime() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
int MPI_Initialized(int *flag) { return answer(flag, 1); }
int MPI_Finalized(int *flag) { return answer(flag, 0); }
int MPI_Error_string(int code, char *text, int *length) {
    *length = std::snprintf(text, MPI_MAX_ERROR_STRING, "error %d of the double", code);
    return MPI_SUCCESS;
}
int MPI_Comm_set_errhandler(MPI_Comm, MPI_Errhandler) {
    int nothing;
    return answer(&nothing, 0);
}
int MPI_Comm_rank(MPI_Comm comm, int *rank) { return answer(rank, comm->rank); }
int MPI_Comm_size(MPI_Comm comm, int *ranks) { return answer(ranks, int(comm->shared->ends.size())); }
int MPI_Comm_idup(MPI_Comm comm, MPI_Comm *other, MPI_Request *request) {
    return post(comm, {Kind::duplicate, 0, 0, 0, 0}, nullptr, 0, other, request);
}
int MPI_Comm_free(MPI_Comm *comm) {
    {
        const std::lock_guard lock(g_mutex);
        (*comm)->given.clear();
        EXPECT_EQ((*comm)->open, 0) << "requests of a communicator that is freed were not waited for";
    }
    *comm = MPI_COMM_NULL;
    int nothing;
    return answer(&nothing, 0);
}
int MPI_Test(MPI_Request *request, int *over, MPI_Status *) {
    const std::lock_guard lock(g_mutex);
    FakeMpiPart &part = **request;
    FakeMpiShared &shared = *part.end->shared;
    if (!part.seen && injected_failure(part.end)) return MPI_ERR_OTHER;
    part.seen = true;
    *over = 0;
    if (part.call.kind == Kind::send || part.call.kind == Kind::receive) {
        if (!part.over) return shared.broken ? MPI_ERR_OTHER : MPI_SUCCESS;
        *over = 1;
        *request = nullptr;
        --part.end->open;
        return part.error;
    }
    Meeting &meeting = shared.meetings[part.number];
    if (meeting.here < int(shared.ends.size())) return shared.broken ? MPI_ERR_OTHER : MPI_SUCCESS;
    for (const FakeMpiPart &other : meeting.parts)
        if (other.call != part.call) return MPI_ERR_OTHER;
    take(meeting, part);
    --part.end->open;
    *over = 1;
    *request = nullptr;
    if (++meeting.done == int(shared.ends.size())) shared.meetings.erase(part.number);
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
int MPI_Ibcast(void *data, int count, MPI_Datatype type, int root, MPI_Comm comm, MPI_Request *request) {
    return post(comm, {Kind::broadcast, count, type, 0, root}, data, size_t(count) * size_of(type), data, request);
}
int MPI_Ialltoall(const void *from, int count, MPI_Datatype type, void *to, int, MPI_Datatype, MPI_Comm comm,
                  MPI_Request *request) {
    const size_t bytes = size_t(count) * size_of(type) * comm->shared->ends.size();
    return post(comm, {Kind::all_to_all, count, type, 0, 0}, from, bytes, to, request);
}
int MPI_Iallgather(const void *from, int count, MPI_Datatype type, void *to, int, MPI_Datatype, MPI_Comm comm,
                   MPI_Request *request) {
    return post(comm, {Kind::all_gather, count, type, 0, 0}, from, size_t(count) * size_of(type), to, request);
}
