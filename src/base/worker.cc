// SPDX-License-Identifier: Apache-2.0
#include "base/worker.h"
#include "base/thread_pool.h"
#include <new>
#include <unistd.h>

namespace dsopt {

Worker::~Worker() {
    if (!started_) return;
    if (!is_of_this_process()) {
        // The lock may be that of a thread that this process does not have: nothing is destroyed.
        new (&mutex_) std::mutex;
        new (&changed_) std::condition_variable;
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        ends_ = true;
    }
    changed_.notify_all();
    (void)::pthread_join(thread_, nullptr);
}

bool Worker::is_of_this_process() const { return !started_ || process_ == ::getpid(); }

void Worker::add(bool here) {
    if (!here && !started_) {
        started_ = start_library_thread(thread_, loop, this);
        process_ = ::getpid();
    }
    if (here || !started_) {
        wait();
        run_(added_);
        const std::lock_guard lock(mutex_);
        done_ = ++added_;
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        ++added_;
    }
    changed_.notify_all();
}

void Worker::wait_for(int64_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= count; });
}

int64_t Worker::done() {
    const std::lock_guard lock(mutex_);
    return done_;
}

void Worker::restart() {
    const std::lock_guard lock(mutex_);
    added_ = done_ = 0;
}

void *Worker::loop(void *self) noexcept {
    Worker &worker = *static_cast<Worker *>(self);
    ::pthread_setname_np(::pthread_self(), "dsopt");
    std::unique_lock lock(worker.mutex_);
    for (;;) {
        worker.changed_.wait(lock, [&] { return worker.ends_ || worker.done_ < worker.added_; });
        if (worker.done_ == worker.added_) return nullptr;
        const int64_t task = worker.done_;
        lock.unlock();
        worker.run_(task);
        lock.lock();
        worker.done_ = task + 1;
        worker.changed_.notify_all();
    }
}

} // namespace dsopt
