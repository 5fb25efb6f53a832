// SPDX-License-Identifier: Apache-2.0
// A thread of one object, which does its work in order while calls on the object return.
#pragma once
#include "base/not_copied.h"
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <pthread.h>

namespace dsopt {

/// Tasks are numbered from 0. The thread is started by the first one and lives as long as the object. If it cannot be
/// started, the calling threads do its work, with the same results. Calls come from one thread at a time.
class Worker : NotCopied {
public:
    /// `run` does a task and must not throw.
    explicit Worker(std::function<void(int64_t)> run) : run_(std::move(run)) {}
    /// Waits for all tasks. In a child of fork() it does not: the thread is in the parent.
    ~Worker();
    /// Adds the next task. `here`: it runs in this call, after all earlier ones.
    void add(bool here);
    /// Waits until the first `count` tasks are done.
    void wait_for(int64_t count);
    void wait() { wait_for(added_); }
    int64_t added() const { return added_; }
    int64_t done();
    /// False in a child of fork() whose parent has the thread.
    bool is_of_this_process() const;
    /// Begins to count from 0. All tasks must be done.
    void restart();

private:
    static void *loop(void *self) noexcept;

    const std::function<void(int64_t)> run_;
    std::mutex mutex_;
    std::condition_variable changed_;
    int64_t added_ = 0, done_ = 0; // written with the lock
    bool ends_ = false, started_ = false;
    pthread_t thread_{};
    int64_t process_ = 0; // in which the thread is
};

} // namespace dsopt
