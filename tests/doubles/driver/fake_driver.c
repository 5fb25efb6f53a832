// SPDX-License-Identifier: Apache-2.0
// A test double of libcuda.so.1, the CUDA driver, for what the CUDA runtime asks it first. The environment sets its
// answers: FAKE_DRIVER_VERSION, such as 13000; FAKE_DRIVER_INIT, the result of cuInit. Appends `load`, and the names of
// functions that are called except cuGetProcAddress, to the file FAKE_DRIVER_TRACE. There is no device: functions that
// the runtime needs for one, of which some are not documented, fail.
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NO_DEVICE = 100, NOT_FOUND = 500, NOT_SUPPORTED = 801 };

static int setting(const char *name, int otherwise) {
    const char *const text = getenv(name);
    return text != NULL ? atoi(text) : otherwise;
}

static void trace(const char *name) {
    const char *const path = getenv("FAKE_DRIVER_TRACE");
    const int file = path != NULL ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    char line[64];
    if (file < 0) return;
    const size_t length = strlen(name);
    if (length + 1 < sizeof line) {
        memcpy(line, name, length);
        line[length] = '\n';
        if (write(file, line, length + 1) < 0) abort();
    }
    (void)close(file);
}

__attribute__((constructor)) static void load(void) { trace("load"); }

int cuInit(unsigned flags);
int cuInit(unsigned flags) {
    trace("cuInit");
    return flags != 0 ? INVALID_VALUE : setting("FAKE_DRIVER_INIT", SUCCESS);
}

int cuDriverGetVersion(int *version);
int cuDriverGetVersion(int *version) {
    trace("cuDriverGetVersion");
    *version = setting("FAKE_DRIVER_VERSION", 13000);
    return SUCCESS;
}

int cuDeviceGetCount(int *count);
int cuDeviceGetCount(int *count) {
    trace("cuDeviceGetCount");
    *count = 0;
    return setting("FAKE_DRIVER_INIT", SUCCESS);
}

int cuGetExportTable(const void **table, const void *id);
int cuGetExportTable(const void **table, const void *id) {
    trace("cuGetExportTable");
    (void)id;
    *table = NULL;
    return INVALID_VALUE;
}

static int unsupported(void) {
    trace("another function");
    return NOT_SUPPORTED;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);
int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags);

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    static const struct {
        const char *name;
        void (*address)(void);
    } known[] = {{"cuInit", (void (*)(void))cuInit},
                 {"cuDriverGetVersion", (void (*)(void))cuDriverGetVersion},
                 {"cuDeviceGetCount", (void (*)(void))cuDeviceGetCount},
                 {"cuGetExportTable", (void (*)(void))cuGetExportTable},
                 {"cuGetProcAddress", (void (*)(void))cuGetProcAddress_v2}};
    void (*address)(void) = (void (*)(void))unsupported;
    (void)flags;
    for (size_t i = 0; i < sizeof known / sizeof *known; ++i)
        if (strcmp(known[i].name, name) == 0) address = known[i].address;
    if (version > setting("FAKE_DRIVER_VERSION", 13000)) address = NULL;
    memcpy(function, &address, sizeof address);
    if (status != NULL) *status = address != NULL ? 0 : 1;
    return address != NULL ? SUCCESS : NOT_FOUND;
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
