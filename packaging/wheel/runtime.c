// SPDX-License-Identifier: Apache-2.0
// What a library with its own libstdc++ and unwinder needs to run with glibc 2.17: functions of later versions of glibc, which
// libstdc++.a, libgcc_eh.a and the headers of the machine that builds use, and a start of the unwinder. All of it is hidden, because the
// other libraries of the process have what the system has. scripts/wheel_link.sh
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
#include <unwind.h>

#define HIDDEN __attribute__((visibility("hidden")))

// glibc 2.32: true lets reference counts change without atomic instructions.
HIDDEN char __libc_single_threaded = 0;

#ifdef DLFO_EH_SEGMENT_TYPE // where the machine that builds has it, libgcc_eh.a calls it
struct search {
    uintptr_t address;
    struct dl_find_object *result;
};

static int find(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    const struct search *const search = data;
    uintptr_t start = UINTPTR_MAX, end = 0, unwind = 0;
    int inside = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr) *const header = &info->dlpi_phdr[i];
        const uintptr_t first = info->dlpi_addr + header->p_vaddr, last = first + header->p_memsz;
        if (header->p_type == PT_GNU_EH_FRAME) unwind = first;
        if (header->p_type != PT_LOAD) continue;
        if (first < start) start = first;
        if (last > end) end = last;
        inside |= search->address >= first && search->address < last;
    }
    if (!inside) return 0;
    if (unwind == 0) return -1;
    memset(search->result, 0, sizeof *search->result);
    search->result->dlfo_map_start = (void *)start;
    search->result->dlfo_map_end = (void *)end;
    search->result->dlfo_eh_frame = (void *)unwind;
    return 1;
}

// glibc 2.35: the unwinder's table for an address.
HIDDEN int _dl_find_object(void *address, struct dl_find_object *result) {
    struct search search = {(uintptr_t)address, result};
    return dl_iterate_phdr(find, &search) == 1 ? 0 : -1;
}
#endif

// glibc 2.30: as pthread_cond_timedwait, with a time of `clock`. Waits for at most a second of the other clock, which may be set
// during the wait, and then wakes up without a reason, as every wait may.
HIDDEN int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                                  const struct timespec *until) {
    const int64_t second = 1000000000;
    struct timespec now, slice;
    if (until->tv_nsec < 0 || until->tv_nsec >= second || clock_gettime(clock, &now) != 0) return EINVAL;
    int64_t left =
        until->tv_sec - now.tv_sec > 1 ? second : (until->tv_sec - now.tv_sec) * second + until->tv_nsec - now.tv_nsec;
    const int whole = left < second;
    if (!whole) left = second;
    if (left < 0) left = 0;
    clock_gettime(CLOCK_REALTIME, &slice);
    slice.tv_sec += (slice.tv_nsec + left) / second;
    slice.tv_nsec = (slice.tv_nsec + left) % second;
    const int status = pthread_cond_timedwait(condition, mutex, &slice);
    return status == ETIMEDOUT && !whole ? 0 : status;
}

// glibc 2.25: random bytes. The system call is of Linux 3.17, later than some systems with glibc 2.17.
HIDDEN ssize_t getrandom(void *buffer, size_t length, unsigned flags) {
    const ssize_t made = syscall(SYS_getrandom, buffer, length, flags);
    if (made >= 0 || errno != ENOSYS) return made;
    const int device = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (device < 0) return -1;
    const ssize_t count = read(device, buffer, length);
    const int error = errno;
    close(device);
    errno = error;
    return count;
}

static _Unwind_Reason_Code stop(struct _Unwind_Context *context, void *data) {
    (void)context, (void)data;
    return _URC_END_OF_STACK;
}

// An exception of another library that passes through this one is unwound by the other's unwinder, which calls functions of this one that
// abort until the first own exception has filled in their table of register sizes. A walk along the stack does so too.
__attribute__((constructor)) static void start_unwinder(void) { _Unwind_Backtrace(stop, NULL); }

// Tables of virtual functions refer to this function weakly, and for weak references a linker takes nothing from an archive.
extern void __cxa_pure_virtual(void);
__attribute__((used)) static void (*const pure_virtual)(void) = __cxa_pure_virtual;
