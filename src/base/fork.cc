// SPDX-License-Identifier: Apache-2.0
#include "base/fork.h"
#include "base/status.h"
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

namespace dsopt {
namespace {

constinit std::atomic<int64_t> generation{0};
constinit std::atomic<bool> watched{false};
constinit std::atomic<pid_t> no_child{0}; // a process that is known not to come from fork()

} // namespace

int64_t fork_generation() noexcept { return generation.load(std::memory_order_relaxed); }

void watch_forks() {
    if (watched.load(std::memory_order_acquire)) return;
    // Threads that come here at the same time register it several times, and the number then rises by more than one.
    const int failed = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
    if (failed != 0) throw Error(DSOPT_ERR_NOMEM, "pthread_atfork failed: %s", std::strerror(failed));
    watched.store(true, std::memory_order_release);
}

bool is_forked_child() {
    if (fork_generation() > 0) return true;
    // Of a parent that had not called watch_forks() Linux alone knows: PF_FORKNOEXEC, in the seventh field after the
    // name. Asked once in a process, because the answer takes as long as the rest of a context. The children of a
    // process that has asked have a generation, except those of _Fork() and clone(), which have another id.
    constexpr unsigned forked_without_exec = 0x40;
    const pid_t self = ::getpid();
    if (no_child.load(std::memory_order_relaxed) == self) return false;
    char text[512];
    const int file = ::open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    const ssize_t length = ::read(file, text, sizeof text - 1);
    ::close(file);
    text[std::max<ssize_t>(length, 0)] = 0;
    const char *const name_end = std::strrchr(text, ')'); // a name may have any character
    unsigned flags = 0;
    if (name_end != nullptr && std::sscanf(name_end + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) == 1 &&
        (flags & forked_without_exec) != 0)
        return true;
    no_child.store(self, std::memory_order_relaxed);
    return false;
}

} // namespace dsopt
