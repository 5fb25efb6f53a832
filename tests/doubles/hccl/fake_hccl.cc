// SPDX-License-Identifier: Apache-2.0
// A test double of libhccl.so. Ranks are threads of one process. DSOPT_FAKE_HCCL_FAULT is "rank:call:kind"; kind is
//   hang   the rank never arrives
//   error  the call returns an error
//   async  the communicator reports an error later
// Like the library, the double does not reduce fp64.
#include "fake_ascend.h"
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

enum Result { success, bad_parameter = 1, internal = 4, not_supported = 5, remote = 21 };
enum Type { int32 = 2, float32 = 4, uint8 = 7 };

struct Operation {
    int kind = 0, type = 0, detail = 0;
    uint64_t count = 0;
    const char *data = nullptr;
};
struct Group {
    explicit Group(uint32_t n) : operations(n) {}
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<Operation> operations;
    uint32_t arrived = 0, joined = 0;
    uint64_t round = 0;

    void rendezvous(std::unique_lock<std::mutex> &lock) {
        const uint64_t before = round;
        if (++arrived == operations.size()) {
            arrived = 0;
            ++round;
            changed.notify_all();
        }
        changed.wait(lock, [&] { return round != before; });
    }
};
struct Comm {
    std::shared_ptr<Group> group;
    uint32_t rank;
    int calls = 0;
    std::atomic<int> error{success};
};
struct Groups {
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<Group>> all;
    std::vector<Comm *> comms; // never freed, because hanging ranks still use theirs
};
Groups &groups() {
    static auto *const all = new Groups; // never destroyed: ranks may be leaked
    return *all;
}

bool fault(const Comm &comm, const char *kind) {
    const char *const text = std::getenv("DSOPT_FAKE_HCCL_FAULT");
    return text != nullptr && std::to_string(comm.rank) + ":" + std::to_string(comm.calls) + ":" + kind == text;
}
/// Reduces `count` elements of each rank, which begin with element `begin`.
template <class T>
void reduce(const std::vector<Operation> &operations, int op, T *to, uint64_t begin, uint64_t count) {
    for (uint64_t i = begin; i < begin + count; ++i) {
        T total = reinterpret_cast<const T *>(operations[0].data)[i];
        for (size_t rank = 1; rank < operations.size(); ++rank) {
            const T next = reinterpret_cast<const T *>(operations[rank].data)[i];
            total = op == 0 ? T(total + next) : next > total ? next : total;
        }
        to[i - begin] = total;
    }
}

int post(Comm *comm, const Operation &operation, size_t sent, char *to, size_t received, void *stream) {
    if (!fake_ascend_owns(operation.data, sent) || !fake_ascend_owns(to, received)) return bad_parameter;
    if (operation.type != int32 && operation.type != float32 && operation.type != uint8) return not_supported;
    const bool hangs = fault(*comm, "hang"), late = fault(*comm, "async"), refused = fault(*comm, "error");
    ++comm->calls;
    if (refused) return internal;
    return fake_ascend_launch(stream, [=] {
        Group &group = *comm->group;
        std::unique_lock lock(group.mutex);
        if (late) comm->error = remote;
        if (hangs || late) return group.changed.wait(lock, [] { return false; });
        group.operations[comm->rank] = operation;
        group.rendezvous(lock);
        bool same = true;
        for (const Operation &other : group.operations)
            same = same && other.kind == operation.kind && other.type == operation.type &&
                   other.detail == operation.detail && other.count == operation.count;
        std::vector<char> result(received);
        const size_t ranks = group.operations.size();
        const bool reduces = operation.kind == 1 || operation.kind == 4;
        const uint64_t begin = operation.kind == 4 ? comm->rank * operation.count : 0;
        if (!same)
            comm->error = bad_parameter;
        else if (reduces && operation.type == float32)
            reduce(group.operations, operation.detail, reinterpret_cast<float *>(result.data()), begin,
                   operation.count);
        else if (reduces)
            reduce(group.operations, operation.detail, reinterpret_cast<int32_t *>(result.data()), begin,
                   operation.count);
        else
            for (size_t from = 0; from < ranks && received != 0; ++from) {
                const char *const theirs = group.operations[from].data;
                if (operation.kind == 2) std::memcpy(&result[from * operation.count], theirs, operation.count);
                if (operation.kind == 3)
                    std::memcpy(&result[from * operation.count], theirs + comm->rank * operation.count,
                                operation.count);
            }
        group.rendezvous(lock); // all ranks have read
        if (same && received != 0) std::memcpy(to, result.data(), received);
        group.rendezvous(lock);
    });
}

} // namespace

extern "C" {
int HcclGetRootInfo(char *info) {
    static std::atomic<int> next{0};
    std::memset(info, 0, 4108);
    std::snprintf(info, 4108, "fake-hccl-%d", next++);
    info[4107] = 1;
    return success;
}
int HcclCommInitRootInfo(uint32_t ranks, const char *info, uint32_t rank, void **comm) {
    if (!fake_ascend_owns(nullptr, 0) || info[4107] != 1 || rank >= ranks) return bad_parameter;
    std::shared_ptr<Group> group;
    {
        const std::lock_guard lock(groups().mutex);
        std::shared_ptr<Group> &entry = groups().all[info];
        if (!entry) entry = std::make_shared<Group>(ranks);
        group = entry;
        groups().comms.push_back(new Comm{group, rank});
        *comm = groups().comms.back();
    }
    std::unique_lock lock(group->mutex);
    ++group->joined;
    group->changed.notify_all();
    group->changed.wait(lock, [&] { return group->joined == ranks; });
    return success;
}
int HcclCommDestroy(void *) { return success; }
int HcclGetRankSize(void *comm, uint32_t *ranks) {
    *ranks = uint32_t(static_cast<Comm *>(comm)->group->operations.size());
    return success;
}
int HcclGetRankId(void *comm, uint32_t *rank) {
    *rank = static_cast<Comm *>(comm)->rank;
    return success;
}
int HcclGetCommAsyncError(void *comm, int *error) {
    *error = static_cast<Comm *>(comm)->error;
    return success;
}
const char *HcclGetErrorString(int result) {
    return result == remote ? "an injected remote error" : "an injected error";
}
int HcclAllReduce(char *from, char *to, uint64_t count, int type, int op, void *comm, void *stream) {
    return post(static_cast<Comm *>(comm), {1, type, op, count, from}, count * 4, to, count * 4, stream);
}
int HcclAllGather(char *from, char *to, uint64_t count, int type, void *comm, void *stream) {
    const size_t ranks = static_cast<Comm *>(comm)->group->operations.size();
    return post(static_cast<Comm *>(comm), {2, type, 0, count, from}, count, to, count * ranks, stream);
}
int HcclReduceScatter(char *from, char *to, uint64_t count, int type, int op, void *comm, void *stream) {
    const size_t ranks = static_cast<Comm *>(comm)->group->operations.size();
    return post(static_cast<Comm *>(comm), {4, type, op, count, from}, count * 4 * ranks, to, count * 4, stream);
}
int HcclAlltoAll(const char *from, uint64_t count, int type, char *to, uint64_t, int, void *comm, void *stream) {
    const size_t all = count * static_cast<Comm *>(comm)->group->operations.size();
    return post(static_cast<Comm *>(comm), {3, type, 0, count, from}, all, to, all, stream);
}
}
