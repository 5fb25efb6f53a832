// SPDX-License-Identifier: Apache-2.0
// Locks of the emulator that are no synchronization for the thread sanitizer. They call the C library, because functions
// of the C++ library are templates that instrumented code instantiates too.
#pragma once
#include "sanitizer.h"
#include <pthread.h>
#include <semaphore.h>

class QuietMutex {
public:
    void lock() {
        sanitizer::begin_quiet();
        pthread_mutex_lock(&mutex_);
    }
    void unlock() {
        pthread_mutex_unlock(&mutex_);
        sanitizer::end_quiet();
    }
    /// Waits until `ready()` returns true. It is also called by threads that call notify(), with the lock held.
    template <class Ready> void wait(const Ready &ready) {
        if (ready()) return;
        Waiter self{[](const void *data) { return (*static_cast<const Ready *>(data))(); }, &ready, waiters_};
        waiters_ = &self;
        while (!ready()) pthread_cond_wait(&self.changed, &mutex_);
        Waiter **at = &waiters_;
        while (*at != &self) at = &(*at)->next;
        *at = self.next;
        pthread_cond_destroy(&self.changed);
    }
    /// Wakes the threads that need not wait any longer, and no others.
    void notify() {
        for (Waiter *waiter = waiters_; waiter; waiter = waiter->next)
            if (waiter->ready(waiter->data)) pthread_cond_signal(&waiter->changed);
    }

private:
    struct Waiter {
        bool (*ready)(const void *);
        const void *data;
        Waiter *next;
        pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
    };
    pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
    Waiter *waiters_ = nullptr;
};

/// A semaphore for two threads that run alternately: half of the system calls of a lock and notify(), because a thread
/// that is woken does not wait for a lock.
class QuietSemaphore {
public:
    QuietSemaphore() { sem_init(&semaphore_, 0, 0); }
    ~QuietSemaphore() { sem_destroy(&semaphore_); }
    QuietSemaphore(const QuietSemaphore &) = delete;
    QuietSemaphore &operator=(const QuietSemaphore &) = delete;
    void post() {
        const sanitizer::Quiet quiet;
        sem_post(&semaphore_);
    }
    void wait() {
        const sanitizer::Quiet quiet;
        while (sem_wait(&semaphore_) != 0) {} // interrupted by a signal
    }

private:
    sem_t semaphore_;
};
