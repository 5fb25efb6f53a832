// SPDX-License-Identifier: Apache-2.0
// A lock of the emulator that is no synchronization for the thread sanitizer. It calls the C library, because functions
// of the C++ library are templates that instrumented code instantiates too.
#pragma once
#include "sanitizer.h"
#include <pthread.h>

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
    void wait() { pthread_cond_wait(&changed_, &mutex_); }
    void notify() { pthread_cond_broadcast(&changed_); }

private:
    pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed_ = PTHREAD_COND_INITIALIZER;
};
