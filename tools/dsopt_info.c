// SPDX-License-Identifier: Apache-2.0
// dsopt-info: reports the properties of the installed library, and what this machine can use of it. Everything comes
// through dsopt.h, except the properties of the system and the paths of libraries, which the ABI does not provide.
#include <dlfcn.h>
#include <dsopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

enum { FITS = 0, UNFIT = 1, USAGE = 2 };

static const char usage[] = "usage: dsopt-info [--json | --version | --help]\n"
                            "\n"
                            "Prints what the installed dsopt library is and what of it this machine can use.\n"
                            "\n"
                            "  --json     what the library says of itself (dsopt_build_info), as JSON\n"
                            "  --version  the version of the library\n"
                            "  --help     this text\n"
                            "\n"
                            "Exit status: 0 if the library works, 1 if it does not fit this program, cannot make a\n"
                            "context on the CPU, or nothing can be written, 2 for a wrong argument.\n";

static void line(const char *name, const char *value) { printf("%-16s %s\n", name, value); }

static int starts(const char *text, const char *with) { return strncmp(text, with, strlen(with)) == 0; }

/// Returns the value of a member of a flat JSON object as plain text, without quotes, and with blanks between the
/// entries of a list. The library's texts have no escapes.
static const char *member(const char *json, const char *key) {
    static char text[512];
    char quoted[32];
    size_t length = 0;
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    const char *at = strstr(json, quoted);
    if (at == NULL) return "unknown";
    int in_list = 0, in_string = 0;
    for (at += strlen(quoted); *at != 0 && length + 1 < sizeof text; ++at) {
        if (*at == '"')
            in_string = !in_string;
        else if (in_string)
            text[length++] = *at;
        else if (*at == '[')
            in_list = 1;
        else if (*at == '}' || *at == ']' || (*at == ',' && !in_list))
            break;
        else if (*at != ',')
            text[length++] = *at;
    }
    text[length] = 0;
    return text;
}

static int has(const char *json, const char *key) { return strcmp(member(json, key), "unknown") != 0; }

/// Returns word number `index` of a text, or NULL.
static const char *word(const char *text, int index) {
    static char found[16];
    for (int length = 0; sscanf(text, "%15s%n", found, &length) == 1; text += length)
        if (index-- == 0) return found;
    return NULL;
}

static void operating_system(void) {
    struct utsname name;
    char text[512];
    if (uname(&name) != 0) return;
    snprintf(text, sizeof text, "%.120s %.120s, %.120s", name.sysname, name.release, name.machine);
    line("system", text);
}

/// Prints the instruction sets that the library has kernels for and that this processor has.
static void instruction_sets(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const int bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    line("processor has", bf16     ? "generic avx2 avx512 avx512_bf16"
                          : avx512 ? "generic avx2 avx512"
                          : avx2   ? "generic avx2"
                                   : "generic");
#else
    line("processor has", "generic");
#endif
    const char *wanted = getenv("DSOPT_ISA");
    if (wanted != NULL) line("DSOPT_ISA", wanted);
}

/// Prints whether a context can be created on a device of a backend. @param capability of a CUDA device, else NULL.
/// @return the status of that.
static dsopt_status device(const char *name, int32_t backend, int32_t ordinal, const char *capability) {
    DSOPT_NEW(dsopt_context_desc, desc);
    dsopt_context *ctx = NULL;
    char label[32], text[64] = "usable";
    desc.backend = backend;
    desc.device = ordinal;
    const dsopt_status status = dsopt_context_create(&desc, &ctx);
    snprintf(label, sizeof label, "device %s:%d", name, (int)ordinal);
    if (capability != NULL) snprintf(text, sizeof text, "usable, compute capability %s", capability);
    line(label, status == DSOPT_OK ? text : dsopt_last_error());
    dsopt_context_destroy(ctx);
    return status;
}

/// Returns the path of the first file in the process whose name begins with `stem`, otherwise `stem`.
static const char *mapped(const char *stem) {
    static char text[1024];
    FILE *const maps = fopen("/proc/self/maps", "r");
    const char *path = NULL;
    while (maps != NULL && path == NULL && fgets(text, sizeof text, maps) != NULL) {
        const char *const file = strrchr(text, '/');
        text[strcspn(text, "\n")] = 0;
        if (file != NULL && starts(file + 1, stem)) path = strchr(text, '/');
    }
    if (maps != NULL) (void)fclose(maps);
    return path != NULL ? path : stem;
}

/// Prints which cuBLASLt a group of Muon on CUDA would load, in the order of cuda/lt.cc.
static void cublaslt(const char *json) {
    static const char variable[] = "DSOPT_CUBLASLT_LIBRARY";
    const char *const chosen = getenv(variable);
    char file[64];
    if (!has(json, "cuda_runtime")) {
        line("cuBLASLt", "needs CUDA");
        return;
    }
    snprintf(file, sizeof file, "libcublasLt.so.%d", atoi(member(json, "cuda_runtime")));
    if (chosen != NULL && chosen[0] != '/')
        printf("%-16s %s is '%s', not an absolute path\n", "cuBLASLt", variable, chosen);
    else if (dlopen(chosen != NULL ? chosen : file, RTLD_NOW | RTLD_LOCAL) == NULL)
        line("cuBLASLt", dlerror());
    else
        line("cuBLASLt", chosen != NULL ? chosen : mapped("libcublasLt.so"));
}

/// Prints where mpiexec is. The library itself does not use MPI.
static void mpi(void) {
    const char *path = getenv("PATH");
    char file[1024];
    while (path != NULL && path[0] != 0) {
        const int length = (int)strcspn(path, ":");
        snprintf(file, sizeof file, "%.*s/mpiexec", length, path);
        if (length > 0 && access(file, X_OK) == 0) {
            printf("%-16s by dsopt_mpi.h, in the program that includes it; mpiexec is %s\n", "MPI", file);
            return;
        }
        path += length + (path[length] == ':');
    }
    line("MPI", "by dsopt_mpi.h, in the program that includes it; mpiexec is not in PATH");
}

/// Prints the state of a collective library. If the state that dsopt reports is no obstacle, creates an id, which loads
/// the library or fails with a reason.
static void collectives(const char *name, int32_t kind, const char *state, const char *stem) {
    size_t bytes = 0;
    if (!starts(state, "loaded") && !starts(state, "looked for")) {
        line(name, state);
        return;
    }
    dsopt_status status = dsopt_comm_unique_id(kind, NULL, &bytes);
    void *id = status == DSOPT_OK ? malloc(bytes) : NULL;
    if (id != NULL) status = dsopt_comm_unique_id(kind, id, &bytes);
    if (status != DSOPT_OK)
        line(name, dsopt_last_error());
    else if (id == NULL)
        line(name, "out of memory");
    else
        printf("%-16s usable, %s\n", name, mapped(stem));
    free(id);
}

static int report(void) {
    const char *const info = dsopt_build_info();
    char number[32];
    line("version", member(info, "version"));
    line("ABI", member(info, "abi"));
    line("compiler", member(info, "compiler"));
    line("checkpoint", member(info, "checkpoint_format"));
    line("backends", member(info, "backends"));
    line("CUDA", member(info, "cuda"));
    if (has(info, "cuda_reason")) line("CUDA reason", member(info, "cuda_reason"));
    if (has(info, "cuda_code")) {
        line("code for", member(info, "cuda_code"));
        line("CUDA runtime", member(info, "cuda_runtime"));
        line("CUDA driver", has(info, "cuda_driver") ? member(info, "cuda_driver") : "none");
    }
    operating_system();
    line("in use", member(info, "isa"));
    instruction_sets();
    line("threads", member(info, "threads"));
    snprintf(number, sizeof number, "%ld", sysconf(_SC_NPROCESSORS_ONLN));
    line("processors", number);
    const dsopt_status cpu = device("cpu", DSOPT_BACKEND_CPU, 0, NULL);
    const char *capability = word(member(info, "cuda_devices"), 0);
    if (!has(info, "cuda_devices"))
        (void)device("cuda", DSOPT_BACKEND_CUDA, 0, NULL); // prints the reason
    else
        for (int32_t i = 0; capability != NULL; capability = word(member(info, "cuda_devices"), ++i))
            (void)device("cuda", DSOPT_BACKEND_CUDA, i, capability);
    line("comms", member(info, "comms"));
    cublaslt(info);
    collectives("NCCL", DSOPT_COMM_KIND_NCCL, member(info, "nccl"), "libnccl.so");
    collectives("HCCL", DSOPT_COMM_KIND_HCCL, member(info, "hccl"), "libhccl.so");
    mpi();
    return cpu == DSOPT_OK ? FITS : UNFIT;
}

int main(int argc, char **argv) {
    int result = FITS;
    if (argc > 2) {
        fputs(usage, stderr);
        return USAGE;
    }
    const char *const option = argc == 2 ? argv[1] : "";
    if (strcmp(option, "--help") == 0) {
        fputs(usage, stdout);
    } else if (dsopt_abi_version() != DSOPT_ABI_VERSION) {
        fprintf(stderr, "dsopt-info: the library has ABI %d, this program was compiled for %d\n",
                (int)dsopt_abi_version(), DSOPT_ABI_VERSION);
        return UNFIT;
    } else if (strcmp(option, "--version") == 0) {
        const int version = (int)dsopt_version();
        printf("dsopt %d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);
    } else if (strcmp(option, "--json") == 0) {
        puts(dsopt_build_info());
    } else if (argc == 1) {
        result = report();
    } else {
        fprintf(stderr, "dsopt-info: unknown argument %s\n%s", option, usage);
        return USAGE;
    }
    if (fflush(stdout) != 0 || ferror(stdout)) {
        perror("dsopt-info: standard output");
        return UNFIT;
    }
    return result;
}
