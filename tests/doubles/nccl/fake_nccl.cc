// SPDX-License-Identifier: Apache-2.0
#include "fake_nccl.h"
#include "cuda_runtime.h"
#include "fakert.h"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <memory>
#include <mutex>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

enum Result { success, cuda_error, system_error, internal_error, bad_argument, bad_usage, remote_error, in_progress };
enum Kind : int { reduces, gathers, scatters, sends, receives };
const char *const kKinds[] = {"all-reduce", "all-gather", "reduce-scatter", "send", "receive"};
constexpr int kMaxRanks = 8;
constexpr size_t kChunk = size_t(16) << 10;

struct UniqueId {
    char name[128];
};
struct Call {
    Kind kind;
    int type, op, root;
    size_t count;
};
struct Slot {
    std::atomic<int> pid;
    std::atomic<uint64_t> arrived;
    std::atomic<bool> leaves;
    Call call;
};
struct Channel {                          // from one rank to another
    std::atomic<uint64_t> sent, received; // numbers of chunks
    size_t bytes;
    char data[kChunk];
};
struct Shared {
    std::atomic<int> joined;
    Slot slots[kMaxRanks];
    char chunks[kMaxRanks][kChunk];
    Channel channels[kMaxRanks][kMaxRanks];
};

size_t element(int type) {
    constexpr size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type >= 0 && type < 10 ? sizes[type] : 0;
}
bool set_to(const char *variable, const char *value) {
    const char *const text = std::getenv(variable);
    return text != nullptr && std::strcmp(text, value) == 0;
}
void pause_polling(int &polls) {
    if (++polls < 64)
        sched_yield();
    else
        usleep(polls < 512 ? 50 : 500);
}

thread_local std::string t_last;
std::atomic<int> g_created{0}, g_destroyed{0}, g_aborted{0}, g_ids{0}, g_inside{0}, g_count_queries{0};

/// Ids created by this process. If not all ranks join, the shared memory of the others is removed when this process
/// ends.
class Names {
public:
    ~Names() {
        for (const std::string &name : names_) shm_unlink(name.c_str());
    }
    void add(const char *name) {
        const std::lock_guard lock(mutex_);
        names_.emplace_back(name);
    }

private:
    std::mutex mutex_;
    std::vector<std::string> names_;
} g_names;

/// The call that is to fail, see fake_nccl_fail_at().
struct Plan {
    std::mutex mutex;
    std::string id;
    int rank = 0;
    long failing_call = 0, calls = 0;
    bool failed = false; // ranks that wait for others to join get an error
} g_plan;

/// Returns true if this call of a rank fails.
bool injected_failure(const std::string &id, int rank) {
    const std::lock_guard lock(g_plan.mutex);
    if (g_plan.id != id || g_plan.rank != rank || ++g_plan.calls != g_plan.failing_call) return false;
    g_plan.failed = true;
    return true;
}
bool has_failed(const std::string &id) {
    const std::lock_guard lock(g_plan.mutex);
    return g_plan.failed && g_plan.id == id;
}

} // namespace

struct FakeComm {
    int rank, ranks, device = 0;
    Shared *shared = nullptr;
    std::string name, message;
    std::mutex mutex; // protects the message
    std::atomic<int> state{in_progress}, users{0}, pending{0};
    std::atomic<int> graphs{0}; // number of groups in graphs
    std::atomic<bool> aborted{false}, stuck{false}, ending{false};
    uint64_t rendezvous_count = 0;
    int calls = 0;
    // An error was queried since the last other call; further queries do not count.
    std::atomic<bool> error_queried{false};
    std::thread joiner;

    /// Returns true if this call fails.
    bool fails() {
        error_queried = false;
        return injected_failure(name, rank);
    }
    bool fault(const char *kind, int call) const {
        const char *const all = std::getenv("DSOPT_FAKE_NCCL_FAULT");
        if (all == nullptr) return false;
        const std::string wanted = std::to_string(rank) + ":" + std::to_string(call) + ":" + kind + ",";
        return (std::string(",") + all + ",").find("," + wanted) != std::string::npos;
    }
};

namespace {

[[gnu::format(printf, 3, 4)]] Result fail(FakeComm *comm, Result result, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (comm == nullptr) {
        t_last = text;
    } else { // not a thread_local: under the thread sanitizer, work of streams runs on separate logical threads
        const std::lock_guard lock(comm->mutex);
        comm->message = text;
        int before = success;
        comm->state.compare_exchange_strong(before, result);
    }
    return result;
}

/// Counts the threads that use a communicator.
class Inside {
public:
    explicit Inside(FakeComm *comm) : comm_(comm) {
        if (comm_->aborted) ++g_inside;
        ++comm_->users;
    }
    ~Inside() { --comm_->users; }
    Inside(const Inside &) = delete;
    Inside &operator=(const Inside &) = delete;

private:
    FakeComm *comm_;
};

/// Returns false if the communicator failed or was aborted.
bool wait_until(FakeComm *comm, const std::function<bool()> &ready) {
    for (int polls = 0; !ready(); pause_polling(polls)) {
        if (comm->aborted || comm->state != success) return false;
        if (polls % 64 != 63 || !set_to("DSOPT_FAKE_NCCL_DEAD", "error")) continue;
        for (int other = 0; other < comm->ranks; ++other) {
            const int pid = comm->shared->slots[other].pid;
            if (pid < 0 || (pid > 0 && kill(pid, 0) != 0)) {
                fail(comm, remote_error, "rank %d is gone", other);
                return false;
            }
        }
    }
    return true;
}
bool rendezvous(FakeComm *comm) {
    const uint64_t wanted = ++comm->rendezvous_count;
    comm->shared->slots[comm->rank].arrived = wanted;
    for (int other = 0; other < comm->ranks; ++other)
        if (!wait_until(comm, [&] { return comm->shared->slots[other].arrived >= wanted; })) return false;
    return true;
}

template <class T> void reduce_as(const FakeComm *comm, void *to, size_t count, int op) {
    for (size_t i = 0; i < count; ++i) {
        T total{};
        for (int rank = 0; rank < comm->ranks; ++rank) {
            T value;
            std::memcpy(&value, comm->shared->chunks[rank] + i * sizeof(T), sizeof value);
            if (rank == 0)
                total = value;
            else
                total = op == 0 ? T(total + value) : value > total ? value : total;
        }
        std::memcpy(static_cast<char *>(to) + i * sizeof(T), &total, sizeof total);
    }
}

struct Posted {
    FakeComm *comm;
    Call call;
    const void *from;
    void *to;
    int peer;
    cudaStream_t stream;
    int number;
};

template <class T> void reduce_chunk(const Posted &posted, int row, size_t begin, size_t count) {
    const FakeComm *const comm = posted.comm;
    if (posted.call.kind == reduces || row == comm->rank)
        reduce_as<T>(comm, static_cast<T *>(posted.to) + begin, count, posted.call.op);
}

/// Each rank copies a chunk to shared memory, waits for all ranks, reads its operands, and waits again. A reduce-scatter
/// does so with each row.
void run_collective(const Posted &posted) {
    FakeComm *const comm = posted.comm;
    const Call &call = posted.call;
    Shared &shared = *comm->shared;
    shared.slots[comm->rank].call = call;
    if (!rendezvous(comm)) return;
    for (int other = 0; other < comm->ranks; ++other) {
        const Call &theirs = shared.slots[other].call;
        if (theirs.kind == call.kind && theirs.type == call.type && theirs.op == call.op && theirs.root == call.root &&
            theirs.count == call.count)
            continue;
        fail(comm, bad_usage, "rank %d calls %s of %zu elements, rank %d %s of %zu", comm->rank, kKinds[call.kind],
             call.count, other, kKinds[theirs.kind], theirs.count);
        return;
    }
    const size_t size = element(call.type), most = kChunk / size;
    const int rows = call.kind == scatters ? comm->ranks : 1;
    char *const to = static_cast<char *>(posted.to);
    for (int row = 0; row < rows; ++row)
        for (size_t begin = 0; begin < call.count; begin += most) {
            if (!rendezvous(comm)) return;
            const size_t count = std::min(most, call.count - begin), sent = size_t(row) * call.count + begin;
            std::memcpy(shared.chunks[comm->rank], static_cast<const char *>(posted.from) + sent * size, count * size);
            if (!rendezvous(comm)) return;
            if (call.kind == gathers) {
                for (int rank = 0; rank < comm->ranks; ++rank)
                    std::memcpy(to + (size_t(rank) * call.count + begin) * size, shared.chunks[rank], count * size);
                continue;
            }
            if (call.type == 7) reduce_chunk<float>(posted, row, begin, count);
            if (call.type == 8) reduce_chunk<double>(posted, row, begin, count);
            if (call.type == 2) reduce_chunk<int32_t>(posted, row, begin, count);
        }
    (void)rendezvous(comm);
}

/// Runs the sends and receives of one group concurrently.
void run_exchange(const std::vector<Posted> &group) {
    FakeComm *const comm = group[0].comm;
    std::vector<size_t> done(group.size(), 0);
    size_t left = 0;
    for (const Posted &posted : group) left += posted.call.count * element(posted.call.type);
    const auto advance = [&] {
        bool moved = false;
        for (size_t i = 0; i < group.size(); ++i) {
            const Posted &posted = group[i];
            const size_t rest = posted.call.count * element(posted.call.type) - done[i];
            const bool sending = posted.call.kind == sends;
            Channel &channel = sending ? comm->shared->channels[comm->rank][posted.peer]
                                       : comm->shared->channels[posted.peer][comm->rank];
            const bool waiting = channel.sent != channel.received;
            if (rest == 0 || sending == waiting) continue;
            const size_t bytes = sending ? std::min(rest, kChunk) : channel.bytes;
            if (bytes > rest) {
                fail(comm, bad_usage, "rank %d receives less than rank %d sends", comm->rank, posted.peer);
                return true;
            }
            if (sending) {
                std::memcpy(channel.data, static_cast<const char *>(posted.from) + done[i], bytes);
                channel.bytes = bytes;
                ++channel.sent;
            } else {
                std::memcpy(static_cast<char *>(posted.to) + done[i], channel.data, bytes);
                ++channel.received;
            }
            done[i] += bytes;
            left -= bytes;
            moved = true;
        }
        return moved;
    };
    while (left != 0)
        if (!wait_until(comm, advance)) return;
}

void run_group(const std::vector<Posted> &group) {
    FakeComm *const comm = group[0].comm;
    for (const Posted &posted : group) {
        if (comm->fault("kill", posted.number)) kill(getpid(), SIGKILL);
        if (comm->fault("async", posted.number)) fail(comm, remote_error, "an injected error");
        if (comm->fault("hang", posted.number))
            for (int polls = 600; !comm->aborted;) pause_polling(polls);
    }
    if (comm->state == success && !comm->aborted) {
        if (group[0].call.kind >= sends)
            run_exchange(group);
        else
            for (const Posted &posted : group) run_collective(posted);
    }
    --comm->pending;
}
void run_posted(void *argument) {
    const std::unique_ptr<std::vector<Posted>> group(static_cast<std::vector<Posted> *>(argument));
    run_group(*group);
}
/// Runs at each launch of a graph.
void run_captured(void *argument) {
    const auto &group = *static_cast<const std::vector<Posted> *>(argument);
    ++group[0].comm->pending;
    run_group(group);
}
/// Runs when no graph refers to the group any more.
void drop_captured(void *argument) {
    const std::unique_ptr<std::vector<Posted>> group(static_cast<std::vector<Posted> *>(argument));
    --(*group)[0].comm->graphs;
}

thread_local int t_depth = 0;
thread_local std::vector<Posted> t_group;
// Group functions have no communicator. A group begins as a call of the communicator that this thread queried or used
// last, and ends as a call of the communicator whose exchanges are in it.
struct LastUsed {
    std::string name;
    int rank;
    void set(const FakeComm *comm) { name = comm->name, rank = comm->rank; }
};
thread_local LastUsed t_last_used;

Result flush() {
    if (t_group.empty()) return success;
    auto group = std::make_unique<std::vector<Posted>>();
    group->swap(t_group);
    FakeComm *const comm = (*group)[0].comm;
    const cudaStream_t stream = (*group)[0].stream;
    for (const Posted &posted : *group)
        if (comm->fault("busy", posted.number)) comm->stuck = true;
    cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &state) == cudaSuccess && state != cudaStreamCaptureStatusNone) {
        ++comm->graphs;
        // The argument is dropped also if the call fails.
        if (fakert::launch_host_function(stream, run_captured, group.release(), drop_captured) != cudaSuccess)
            return fail(comm, cuda_error, "the stream takes no work");
        return comm->stuck ? in_progress : success;
    }
    ++comm->pending;
    if (cudaLaunchHostFunc(stream, run_posted, group.get()) != cudaSuccess) {
        --comm->pending;
        return fail(comm, cuda_error, "the stream takes no work");
    }
    (void)group.release();
    return comm->stuck ? in_progress : success;
}

Result post(FakeComm *comm, const Call &call, const void *from, void *to, int peer, cudaStream_t stream) {
    if (comm == nullptr) return fail(nullptr, bad_argument, "no communicator");
    const Inside inside(comm);
    if (comm->state != success || comm->ending) return fail(nullptr, bad_usage, "the communicator is not ready");
    int device = -1;
    if (cudaGetDevice(&device) != cudaSuccess || device != comm->device)
        return fail(nullptr, bad_usage, "device %d is current, the communicator is on %d", device, comm->device);
    if (element(call.type) == 0 || call.root < 0 || call.root >= comm->ranks || peer < 0 || peer >= comm->ranks)
        return fail(nullptr, bad_argument, "type %d, root %d, peer %d", call.type, call.root, peer);
    const int number = comm->calls++;
    t_last_used.set(comm);
    if (comm->fails() || comm->fault("error", number)) return fail(comm, system_error, "an injected error");
    t_group.push_back({comm, call, from, to, peer, stream, number});
    if (t_depth != 0) return comm->fault("slow", number) ? in_progress : success;
    return flush();
}

void join(FakeComm *comm) {
    ++comm->shared->joined;
    for (int polls = 0; comm->shared->joined < comm->ranks && !comm->aborted && !has_failed(comm->name);)
        pause_polling(polls);
    shm_unlink(comm->name.c_str()); // either all ranks have mapped it, or no other rank will: nothing is leaked
    int before = in_progress;
    const bool complete = comm->shared->joined >= comm->ranks;
    if (!comm->aborted) comm->state.compare_exchange_strong(before, complete ? success : remote_error);
}

Result create(FakeComm **out, int ranks, const UniqueId &id, int rank, bool blocking) {
    *out = nullptr;
    if (ranks < 1 || ranks > kMaxRanks || rank < 0 || rank >= ranks || std::strncmp(id.name, "/fake-nccl-", 11) != 0)
        return fail(nullptr, bad_argument, "rank %d of %d, or the id", rank, ranks);
    auto comm = std::make_unique<FakeComm>();
    comm->rank = rank;
    comm->ranks = ranks;
    comm->name = id.name;
    if (comm->fails() || comm->fault("init", 0)) return fail(nullptr, system_error, "an injected error");
    if (cudaGetDevice(&comm->device) != cudaSuccess) return fail(nullptr, cuda_error, "no device");
    const int file = shm_open(id.name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) return fail(nullptr, system_error, "no shared memory");
    void *const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return fail(nullptr, system_error, "no shared memory");
    comm->shared = static_cast<Shared *>(memory);
    comm->shared->slots[rank].pid = getpid();
    ++g_created;
    FakeComm *const created = *out = comm.release();
    if (blocking)
        join(created);
    else
        created->joiner = std::thread(join, created);
    return blocking ? success : in_progress;
}

void leave(FakeComm *comm) {
    comm->shared->slots[comm->rank].pid = -1;
    munmap(comm->shared, sizeof(Shared));
    delete comm;
}

} // namespace

// ------------------------------------------------------------------------------------------------------------- the ABI
#define API extern "C" __attribute__((visibility("default")))

API FakeNcclCounts fake_nccl_counts() { return {g_created, g_destroyed, g_aborted, g_ids, g_inside, g_count_queries}; }

API void fake_nccl_fail_at(const char *id, int rank, long n) {
    const std::lock_guard lock(g_plan.mutex);
    g_plan.id = id;
    g_plan.rank = rank;
    g_plan.failing_call = n;
    g_plan.calls = 0;
    g_plan.failed = false;
}
API long fake_nccl_calls() {
    const std::lock_guard lock(g_plan.mutex);
    return g_plan.calls;
}

API Result ncclGetUniqueId(UniqueId *id) {
    if (injected_failure("", 0)) return fail(nullptr, system_error, "an injected error");
    // Random, because a process id can be reused while files of a killed process with that id still exist.
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, 0) != sizeof random) return fail(nullptr, system_error, "no random number");
    std::memset(id, 0, sizeof *id);
    std::snprintf(id->name, sizeof id->name, "/fake-nccl-%016llx-%d", static_cast<unsigned long long>(random), ++g_ids);
    g_names.add(id->name);
    return success;
}
API Result ncclCommInitRank(FakeComm **comm, int ranks, UniqueId id, int rank) {
    return create(comm, ranks, id, rank, true);
}
API Result ncclCommAbort(FakeComm *comm) {
    const Result result = comm->fails() ? system_error : success; // a failed call aborts the communicator, too
    if (comm->users != 0) ++g_inside;
    comm->aborted = true;
    if (set_to("DSOPT_FAKE_NCCL_ABORT", "hang")) sleep(20);
    ++g_aborted;
    if (comm->joiner.joinable()) comm->joiner.join();
    for (int polls = 0; comm->pending != 0 || comm->graphs != 0;)
        pause_polling(polls); // pending work ends when it reads the flag
    leave(comm);
    return result;
}
API Result ncclCommDestroy(FakeComm *comm) {
    const Result result = comm->fails() ? system_error : success;
    ++g_destroyed;
    if (comm->joiner.joinable()) comm->joiner.join();
    for (int polls = 0; comm->pending != 0 || comm->graphs != 0;) pause_polling(polls);
    leave(comm);
    return result;
}
API Result ncclCommGetAsyncError(FakeComm *comm, Result *error) {
    const Inside inside(comm);
    t_last_used.set(comm);
    if (!comm->error_queried.exchange(true) && injected_failure(comm->name, comm->rank)) return system_error;
    *error = (comm->stuck || comm->ending) && comm->state == success ? in_progress : Result(comm->state.load());
    return success;
}
API Result ncclCommCount(FakeComm *comm, int *ranks) {
    ++g_count_queries;
    if (comm->fails()) return system_error;
    *ranks = comm->ranks;
    return success;
}
API Result ncclCommUserRank(FakeComm *comm, int *rank) {
    if (comm->fails()) return system_error;
    *rank = comm->rank;
    return success;
}
API Result ncclCommCuDevice(FakeComm *comm, int *device) {
    if (comm->fails()) return system_error;
    *device = comm->device;
    return success;
}
API const char *ncclGetErrorString(Result result) {
    const char *const texts[] = {"no error",         "unhandled cuda error", "unhandled system error", "internal error",
                                 "invalid argument", "invalid usage",        "remote rank gone",       "in progress"};
    return texts[result];
}
API Result ncclAllReduce(const void *from, void *to, size_t count, int type, int op, FakeComm *comm, cudaStream_t on) {
    return post(comm, {reduces, type, op, 0, count}, from, to, 0, on);
}
API Result ncclAllGather(const void *from, void *to, size_t count, int type, FakeComm *comm, cudaStream_t on) {
    return post(comm, {gathers, type, 0, 0, count}, from, to, 0, on);
}
API Result ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, FakeComm *comm,
                             cudaStream_t on) {
    return post(comm, {scatters, type, op, 0, count}, from, to, 0, on);
}
API Result ncclGroupStart() {
    if (!t_last_used.name.empty() && injected_failure(t_last_used.name, t_last_used.rank)) return system_error;
    ++t_depth;
    return success;
}
API Result ncclGroupEnd() {
    if (t_depth == 0) return fail(nullptr, bad_usage, "no group");
    if (--t_depth != 0) return success;
    FakeComm *const comm = t_group.empty() ? nullptr : t_group[0].comm;
    if (comm == nullptr || !comm->fails()) return flush();
    t_group.clear();
    return fail(comm, system_error, "an injected error");
}

#if !defined(FAKE_NCCL_OLD) // not in 2.4
API Result ncclCommInitRankConfig(FakeComm **comm, int ranks, UniqueId id, int rank, const void *config) {
    struct Head {
        size_t size;
        unsigned magic, version;
        int blocking;
    } head;
    std::memcpy(&head, config, sizeof head);
    if (head.magic != 0xcafebeef || head.size < sizeof head) return fail(nullptr, bad_argument, "the config");
    return create(comm, ranks, id, rank, head.blocking != 0);
}
API Result ncclCommFinalize(FakeComm *comm) {
    const Inside inside(comm);
    if (comm->state != success) return bad_usage;
    if (comm->fails()) return system_error;
    comm->ending = true;
    ++comm->pending;
    std::thread([comm] { // waits until enqueued work is done and the other ranks have arrived
        for (int polls = 0; comm->pending > 1 && !comm->aborted;) pause_polling(polls);
        for (int polls = 0; comm->graphs != 0;)
            pause_polling(polls); // an abort waits for this loop and does not end it
        comm->shared->slots[comm->rank].leaves = true;
        for (int polls = 0, other = 0; other < comm->ranks && !comm->aborted;)
            if (comm->shared->slots[other].leaves || comm->shared->slots[other].pid == -1)
                ++other;
            else
                pause_polling(polls);
        comm->ending = false;
        --comm->pending;
    })
        .detach();
    return in_progress;
}
API Result ncclSend(const void *from, size_t count, int type, int peer, FakeComm *comm, cudaStream_t on) {
    return post(comm, {sends, type, 0, 0, count}, from, nullptr, peer, on);
}
API Result ncclRecv(void *to, size_t count, int type, int peer, FakeComm *comm, cudaStream_t on) {
    return post(comm, {receives, type, 0, 0, count}, nullptr, to, peer, on);
}
API const char *ncclGetLastError(FakeComm *comm) {
    thread_local std::string text;
    text = t_last;
    if (comm != nullptr) {
        const std::lock_guard lock(comm->mutex);
        if (!comm->message.empty()) text = comm->message;
    }
    return text.c_str();
}
#endif
