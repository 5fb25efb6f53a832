// SPDX-License-Identifier: Apache-2.0
#include "fake_ascend.h"
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

namespace {

constexpr int kBad = 100000;
thread_local void *t_context = nullptr;
int g_device = 0; // its address is the context

/// Memory of the device; never destroyed, because streams may be leaked.
struct Blocks {
    std::mutex mutex;
    std::map<uintptr_t, size_t> all;
};
Blocks &blocks() {
    static auto *const all = new Blocks;
    return *all;
}

struct Stream {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    bool busy = false, quit = false;
    std::thread worker{[this] {
        std::unique_lock lock(mutex);
        for (;;) {
            changed.wait(lock, [this] { return quit || !queue.empty(); });
            if (queue.empty()) return;
            const std::function<void()> work = std::move(queue.front());
            queue.pop_front();
            busy = true;
            lock.unlock();
            work();
            lock.lock();
            busy = false;
        }
    }};
};

} // namespace

int fake_ascend_launch(void *stream, std::function<void()> work) {
    if (t_context == nullptr || stream == nullptr) return kBad;
    Stream &to = *static_cast<Stream *>(stream);
    const std::lock_guard lock(to.mutex);
    to.queue.push_back(std::move(work));
    to.changed.notify_all();
    return 0;
}
bool fake_ascend_owns(const void *memory, size_t bytes) {
    if (t_context == nullptr) return false;
    if (bytes == 0) return true;
    const std::lock_guard lock(blocks().mutex);
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    auto next = blocks().all.upper_bound(begin);
    if (next == blocks().all.begin()) return false;
    --next;
    return begin + bytes <= next->first + next->second;
}

extern "C" {
int aclrtSetDevice(int) {
    t_context = &g_device;
    return 0;
}
int aclrtGetCurrentContext(void **context) {
    *context = t_context;
    return t_context != nullptr ? 0 : kBad;
}
int aclrtSetCurrentContext(void *context) {
    t_context = context;
    return 0;
}
int aclrtMalloc(void **memory, size_t bytes, int) {
    if (t_context == nullptr || bytes == 0) return kBad;
    *memory = std::malloc(bytes);
    const std::lock_guard lock(blocks().mutex);
    blocks().all[reinterpret_cast<uintptr_t>(*memory)] = bytes;
    return 0;
}
int aclrtFree(void *memory) {
    const std::lock_guard lock(blocks().mutex);
    if (blocks().all.erase(reinterpret_cast<uintptr_t>(memory)) == 0) return kBad;
    std::free(memory);
    return 0;
}
int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int direction) {
    if (bytes > room || (direction != 1 && direction != 2)) return kBad;
    if (!fake_ascend_owns(direction == 1 ? to : from, bytes)) return kBad;
    std::memcpy(to, from, bytes);
    return 0;
}
int aclrtCreateStream(void **stream) {
    if (t_context == nullptr) return kBad;
    *stream = new Stream;
    return 0;
}
int aclrtDestroyStream(void *stream) {
    Stream *const old = static_cast<Stream *>(stream);
    {
        const std::lock_guard lock(old->mutex);
        old->quit = true;
        old->changed.notify_all();
    }
    old->worker.join();
    delete old;
    return 0;
}
int aclrtStreamQuery(void *stream, int *status) {
    if (t_context == nullptr) return kBad;
    Stream &of = *static_cast<Stream *>(stream);
    const std::lock_guard lock(of.mutex);
    *status = of.busy || !of.queue.empty();
    return 0;
}
}
