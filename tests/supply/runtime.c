// SPDX-License-Identifier: Apache-2.0
// Compares a wheel library's replacements for functions of later versions of glibc with those of this system's glibc.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__) || defined(__aarch64__)
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

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

typedef ssize_t (*random_function)(void *, size_t, unsigned);

/// What a call returned.
struct answer {
    ssize_t count;
    int error;
    int written; // an element is no longer zero
};
static struct answer call(random_function function, void *buffer, size_t length, unsigned flags) {
    if (buffer != NULL) memset(buffer, 0, length);
    errno = 0;
    struct answer answer = {function(buffer, length, flags), errno, 0};
    for (size_t i = 0; buffer != NULL && i < length; ++i) answer.written |= ((char *)buffer)[i] != 0;
    return answer;
}

static void makes_random_bytes_as_the_system_does(void) {
    random_function systems_function;
    *(void **)&systems_function = dlsym(RTLD_NEXT, "getrandom");
    expect(systems_function != NULL && systems_function != getrandom, "the system has a getrandom to compare with");
    if (systems_function == NULL) return;
    char first[256], second[256];
    const struct {
        void *buffer;
        size_t length;
        unsigned flags;
    } calls[] = {{first, 0, 0},       {first, 16, 0}, {first, sizeof first, 0}, {first, 64, GRND_NONBLOCK},
                 {first, 16, 0x8000}, // no flag
                 {NULL, 16, 0}};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; ++i) {
        const struct answer found = call(getrandom, calls[i].buffer, calls[i].length, calls[i].flags),
                            wanted = call(systems_function, calls[i].buffer, calls[i].length, calls[i].flags);
        expect(found.count == wanted.count && found.error == wanted.error, "getrandom returns what the system's does");
        expect(found.written == wanted.written, "getrandom writes bytes if the system's does");
    }
    call(getrandom, first, sizeof first, 0);
    call(getrandom, second, sizeof second, 0);
    expect(memcmp(first, second, sizeof first) != 0, "two calls give different bytes");
}

/// In a child, to which the system call does not exist: Linux before 3.17.
static void makes_random_bytes_without_the_system_call(void) {
#if defined(__x86_64__) || defined(__aarch64__)
    const pid_t child = fork();
    if (child == 0) {
        struct sock_filter instructions[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getrandom, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        const struct sock_fprog filter = {sizeof instructions / sizeof instructions[0], instructions};
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) != 0)
            _exit(2);
        char bytes[256];
        random_function systems_function;
        *(void **)&systems_function = dlsym(RTLD_NEXT, "getrandom");
        if (call(systems_function, bytes, 16, 0).error != ENOSYS) _exit(2);
        const struct answer some = call(getrandom, bytes, sizeof bytes, 0), none = call(getrandom, bytes, 0, 0);
        _exit(some.count != sizeof bytes || !some.written || none.count != 0);
    }
    int status = -1;
    expect(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status), "the child ends");
    if (WIFEXITED(status) && WEXITSTATUS(status) == 2) {
        puts("the system call cannot be disabled here: not tested without it");
        return;
    }
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "getrandom needs no system call of Linux 3.17");
#endif
}

int main(void) {
    finds_what_the_system_finds();
    makes_random_bytes_as_the_system_does();
    makes_random_bytes_without_the_system_call();
    waits();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
