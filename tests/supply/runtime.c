// SPDX-License-Identifier: Apache-2.0
// Compares a wheel library's replacements for functions of later versions of glibc with those of this system's glibc.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static int passed, failed;
static void expect(int holds, const char *what) {
    holds ? ++passed : ++failed;
    if (!holds) printf("%s: does not hold\n", what);
}

#ifdef DLFO_EH_SEGMENT_TYPE // glibc 2.35
typedef int (*find_function)(void *, struct dl_find_object *);

static void finds_what_the_system_finds(void) {
    find_function systems_function;
    *(void **)&systems_function = dlsym(RTLD_NEXT, "_dl_find_object");
    expect(systems_function != NULL && systems_function != _dl_find_object,
           "the system has a _dl_find_object to compare with");
    if (systems_function == NULL) return;
    static int data;
    int local;
    void *const heap = malloc(16);
    void *const addresses[] = {*(void **)&(find_function){_dl_find_object},
                               (void *)&data,
                               dlsym(RTLD_DEFAULT, "printf"),
                               dlsym(RTLD_DEFAULT, "dlopen"),
                               &local,
                               heap,
                               NULL};
    for (size_t i = 0; i < sizeof addresses / sizeof addresses[0]; ++i) {
        struct dl_find_object found, system_found;
        const int status = _dl_find_object(addresses[i], &found),
                  wanted = systems_function(addresses[i], &system_found);
        expect(status == wanted, "the same objects are found");
        expect((status == 0) == (i < 4), "code and data belong to an object, the stack and the heap do not");
        if (status != 0 || wanted != 0) continue;
        expect(found.dlfo_eh_frame == system_found.dlfo_eh_frame, "the object has the same table for the unwinder");
        expect((char *)addresses[i] >= (char *)found.dlfo_map_start &&
                   (char *)addresses[i] < (char *)found.dlfo_map_end,
               "the object contains the address");
    }
    free(heap);
}
#else
static void finds_what_the_system_finds(void) {}
#endif

static struct timespec time_after(clockid_t clock, int64_t nanoseconds) {
    struct timespec time;
    clock_gettime(clock, &time);
    const int64_t sum = time.tv_nsec + nanoseconds;
    time.tv_sec += sum / 1000000000;
    time.tv_nsec = sum % 1000000000;
    return time;
}

static int is_past(clockid_t clock, const struct timespec *when) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec > when->tv_sec || (now.tv_sec == when->tv_sec && now.tv_nsec >= when->tv_nsec);
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static int ready;

static void *signals(void *unused) {
    pthread_mutex_lock(&mutex);
    ready = 1;
    pthread_cond_signal(&condition);
    pthread_mutex_unlock(&mutex);
    return unused;
}

static void waits(void) {
    const clockid_t clocks[] = {CLOCK_MONOTONIC, CLOCK_REALTIME};
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < 2; ++i) {
        struct timespec until = time_after(clocks[i], 0);
        expect(pthread_cond_clockwait(&condition, &mutex, clocks[i], &until) == ETIMEDOUT,
               "a deadline in the past times out at once");
        for (int64_t wait = 20000000; wait <= 1500000000; wait += 1480000000) { // the second is longer than a slice
            until = time_after(clocks[i], wait);
            int status = 0;
            while (status == 0) // like every caller, because a wait may end early
                status = pthread_cond_clockwait(&condition, &mutex, clocks[i], &until);
            expect(status == ETIMEDOUT && is_past(clocks[i], &until), "the wait ends after its deadline");
        }
        until.tv_nsec = 1000000000;
        expect(pthread_cond_clockwait(&condition, &mutex, clocks[i], &until) == EINVAL,
               "nanoseconds from 10^9 on are rejected");
    }
    const struct timespec far = time_after(CLOCK_MONOTONIC, INT64_C(3600000000000));
    pthread_t thread;
    expect(pthread_create(&thread, NULL, signals, NULL) == 0, "the thread is created");
    while (!ready)
        expect(pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &far) == 0, "a signal ends the wait");
    pthread_mutex_unlock(&mutex);
    pthread_join(thread, NULL);
}

int main(void) {
    finds_what_the_system_finds();
    waits();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
