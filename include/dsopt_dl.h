/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSOPT_DL_H
#define DSOPT_DL_H
/**
 * dsopt for programs that are not linked to it: opens the shared library at run time, and has a typed pointer to each
 * function of dsopt.h under the function's own name.
 *
 *     dsopt_dl dl;
 *     const char *problem = dsopt_dl_load(&dl, NULL);
 *     if (problem) { fprintf(stderr, "no dsopt: %s\n", problem); return 1; }
 *     dsopt_context *ctx;
 *     if (dl.dsopt_context_create(NULL, &ctx) != DSOPT_OK) fprintf(stderr, "%s\n", dl.dsopt_last_error());
 *
 * Everything here is static; link with -ldl where dlopen has a library of its own. C99 and C++11, systems with dlfcn.h.
 * Written by scripts/generate/abi.py from dsopt.h: change that. Since: 0.2
 */
#include "dsopt.h"
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * The functions of a loaded library. dsopt.h describes them. After dsopt_dl_load the struct is constant, and may be
 * copied: a copy is good until one of them is unloaded.
 */
typedef struct dsopt_dl {
    /** What dlopen returned; NULL = nothing is loaded. */
    void *library;
    int32_t (*dsopt_version)(void);
    int32_t (*dsopt_abi_version)(void);
    const char *(*dsopt_build_info)(void);
    const char *(*dsopt_status_name)(dsopt_status status);
    const char *(*dsopt_last_error)(void);
    DSOPT_CHECK dsopt_status (*dsopt_context_create)(const dsopt_context_desc *desc, dsopt_context **ctx);
    void (*dsopt_context_destroy)(dsopt_context *ctx);
    DSOPT_CHECK dsopt_status (*dsopt_group_init)(dsopt_group *group, size_t size, int32_t algorithm);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_create)(dsopt_context *ctx, const dsopt_optimizer_desc *desc,
                                                       dsopt_optimizer **opt);
    void (*dsopt_optimizer_destroy)(dsopt_optimizer *opt);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_retain)(dsopt_optimizer *opt, dsopt_optimizer **other);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_add_group)(dsopt_optimizer *opt, const dsopt_group *group,
                                                          const dsopt_param *params, int64_t count);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_add_params)(dsopt_optimizer *opt, const dsopt_param *params,
                                                           int64_t count);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_set)(dsopt_optimizer *opt, int32_t group, int32_t key, double value);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_get)(const dsopt_optimizer *opt, int32_t group, int32_t key,
                                                    double *value);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_count)(const dsopt_optimizer *opt, int64_t *groups, int64_t *params);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_state_count)(const dsopt_optimizer *opt, int64_t *count);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_state)(const dsopt_optimizer *opt, int64_t index,
                                                      dsopt_state_info *info);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_export)(dsopt_optimizer *opt, int64_t index, void *host, size_t bytes);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_import)(dsopt_optimizer *opt, int64_t index, const void *host,
                                                       size_t bytes);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_bind)(dsopt_optimizer *opt, int32_t what, const dsopt_tensor *list,
                                                     int64_t count);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_reset)(dsopt_optimizer *opt, int32_t what, void *stream);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_step)(dsopt_optimizer *opt, const dsopt_step *step);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_apply)(const dsopt_optimizer *opt, const dsopt_step *step);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_workspace)(const dsopt_optimizer *opt, size_t *bytes);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_init_state)(const dsopt_optimizer *opt, const dsopt_tensor *params,
                                                           int64_t count, const dsopt_tensor *state,
                                                           int64_t state_count, void *stream);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_accumulate)(dsopt_optimizer *opt, const dsopt_tensor *grads,
                                                           int64_t count, void *stream);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_next_reduction)(dsopt_optimizer *opt, int64_t call, int32_t *reduction);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_next_reduction_on_device)(const dsopt_optimizer *opt,
                                                                         const dsopt_tensor *schedule,
                                                                         int32_t *reduction, void *stream);
    DSOPT_CHECK dsopt_status (*dsopt_schedule_decode)(const dsopt_optimizer *opt, const int32_t *words,
                                                      dsopt_schedule_info *info);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_report)(dsopt_optimizer *opt, dsopt_report *report);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_save)(dsopt_optimizer *opt, const char *path, const dsopt_io *io);
    DSOPT_CHECK dsopt_status (*dsopt_optimizer_load)(dsopt_optimizer *opt, const char *path, const dsopt_io *io);
    DSOPT_CHECK dsopt_status (*dsopt_scaler_create)(dsopt_context *ctx, const dsopt_scaler_desc *desc,
                                                    dsopt_scaler **scaler);
    void (*dsopt_scaler_destroy)(dsopt_scaler *scaler);
    DSOPT_CHECK dsopt_status (*dsopt_scaler_detach)(dsopt_scaler *scaler);
    const float *(*dsopt_scaler_device_scale)(const dsopt_scaler *scaler);
    DSOPT_CHECK dsopt_status (*dsopt_scaler_set)(dsopt_scaler *scaler, int32_t what, double value, void *stream);
    DSOPT_CHECK dsopt_status (*dsopt_scaler_update)(dsopt_scaler *scaler, const int32_t *overflow, void *stream);
    DSOPT_CHECK dsopt_status (*dsopt_scaler_query)(dsopt_scaler *scaler, dsopt_scaler_info *info);
    DSOPT_CHECK dsopt_status (*dsopt_scaler_scale_loss)(const dsopt_scaler *scaler, const dsopt_tensor *loss,
                                                        void *stream);
    DSOPT_CHECK dsopt_status (*dsopt_scaler_init_state)(const dsopt_scaler *scaler, const dsopt_tensor *state,
                                                        int64_t count, void *stream);
    DSOPT_CHECK dsopt_status (*dsopt_scaler_update_arrays)(const dsopt_scaler *scaler, const dsopt_tensor *state,
                                                           int64_t count, const int32_t *overflow, void *stream);
    DSOPT_CHECK dsopt_status (*dsopt_scaler_decode)(const int32_t *words, dsopt_scaler_info *info);
    DSOPT_CHECK dsopt_status (*dsopt_comm_unique_id)(int32_t kind, void *id, size_t *bytes);
    DSOPT_CHECK dsopt_status (*dsopt_comm_create)(dsopt_context *ctx, const dsopt_comm_desc *desc, dsopt_comm **comm);
    DSOPT_CHECK dsopt_status (*dsopt_comm_query)(const dsopt_comm *comm, dsopt_comm_info *info);
    DSOPT_CHECK dsopt_status (*dsopt_comm_all_reduce)(dsopt_comm *comm, const dsopt_tensor *list, int64_t count,
                                                      int32_t op, void *stream);
    void (*dsopt_comm_abort)(dsopt_comm *comm);
    void (*dsopt_comm_destroy)(dsopt_comm *comm);
    DSOPT_CHECK dsopt_status (*dsopt_zero_grad)(dsopt_context *ctx, dsopt_tensor *grads, int64_t count, int32_t how,
                                                void *stream);
    DSOPT_CHECK dsopt_status (*dsopt_tensors_norm)(dsopt_context *ctx, const dsopt_tensor *list, int64_t count,
                                                   int32_t norm, double max_norm, dsopt_comm *comm,
                                                   dsopt_norm_result *result, void *stream);
    DSOPT_CHECK dsopt_status (*dsopt_tensors_axpby)(dsopt_context *ctx, const float *a, const dsopt_tensor *x, float b,
                                                    const dsopt_tensor *y, int64_t count, void *stream);
    DSOPT_CHECK dsopt_status (*dsopt_tensors_clamp)(dsopt_context *ctx, const dsopt_tensor *list, int64_t count,
                                                    double limit, void *stream);
    DSOPT_CHECK dsopt_status (*dsopt_compressed_sizes)(const dsopt_comm *comm, const dsopt_compressed *args,
                                                       int64_t *worker, int64_t *server, size_t *workspace);
    DSOPT_CHECK dsopt_status (*dsopt_compressed_allreduce)(dsopt_comm *comm, const dsopt_compressed *args);
    DSOPT_CHECK dsopt_status (*dsopt_compressed_errors)(const dsopt_comm *comm, const dsopt_compressed *args,
                                                        float *worker, float *server);
} dsopt_dl;

/**
 * Let go of the library. No call into it may be running or come later. The library itself stays in memory until the
 * process ends, so that threads and handles that it made come to no harm.
 * @param[in,out] dl  every byte becomes zero. If nothing is loaded nothing else happens.
 * Thread-safety: one thread per struct.
 */
static inline void dsopt_dl_unload(dsopt_dl *dl) {
    if (dl->library) (void)dlclose(dl->library);
    memset(dl, 0, sizeof *dl);
}

/**
 * Open the shared library, look up every function of this header, and check that header and library fit together.
 * @param[out] dl    release with dsopt_dl_unload. On failure every byte is zero and the library is closed again.
 * @param[in]  path  as for dlopen. NULL = "libdsopt.so.1", where the system looks for libraries.
 * @return NULL, or what is wrong in words: of dlopen, the name of the first function that the library lacks, or another
 * DSOPT_ABI_VERSION. The text is valid until the thread's next call of a dl function. Thread-safety: one thread per
 * struct.
 */
DSOPT_CHECK static inline const char *dsopt_dl_load(dsopt_dl *dl, const char *path) {
    /* The version first: of another ABI, a function that is missing says nothing. */
    static const struct {
        const char *problem;
        size_t offset;
    } functions[] = {
        {"the library has no dsopt_abi_version", offsetof(dsopt_dl, dsopt_abi_version)},
        {"the library has no dsopt_version", offsetof(dsopt_dl, dsopt_version)},
        {"the library has no dsopt_build_info", offsetof(dsopt_dl, dsopt_build_info)},
        {"the library has no dsopt_status_name", offsetof(dsopt_dl, dsopt_status_name)},
        {"the library has no dsopt_last_error", offsetof(dsopt_dl, dsopt_last_error)},
        {"the library has no dsopt_context_create", offsetof(dsopt_dl, dsopt_context_create)},
        {"the library has no dsopt_context_destroy", offsetof(dsopt_dl, dsopt_context_destroy)},
        {"the library has no dsopt_group_init", offsetof(dsopt_dl, dsopt_group_init)},
        {"the library has no dsopt_optimizer_create", offsetof(dsopt_dl, dsopt_optimizer_create)},
        {"the library has no dsopt_optimizer_destroy", offsetof(dsopt_dl, dsopt_optimizer_destroy)},
        {"the library has no dsopt_optimizer_retain", offsetof(dsopt_dl, dsopt_optimizer_retain)},
        {"the library has no dsopt_optimizer_add_group", offsetof(dsopt_dl, dsopt_optimizer_add_group)},
        {"the library has no dsopt_optimizer_add_params", offsetof(dsopt_dl, dsopt_optimizer_add_params)},
        {"the library has no dsopt_optimizer_set", offsetof(dsopt_dl, dsopt_optimizer_set)},
        {"the library has no dsopt_optimizer_get", offsetof(dsopt_dl, dsopt_optimizer_get)},
        {"the library has no dsopt_optimizer_count", offsetof(dsopt_dl, dsopt_optimizer_count)},
        {"the library has no dsopt_optimizer_state_count", offsetof(dsopt_dl, dsopt_optimizer_state_count)},
        {"the library has no dsopt_optimizer_state", offsetof(dsopt_dl, dsopt_optimizer_state)},
        {"the library has no dsopt_optimizer_export", offsetof(dsopt_dl, dsopt_optimizer_export)},
        {"the library has no dsopt_optimizer_import", offsetof(dsopt_dl, dsopt_optimizer_import)},
        {"the library has no dsopt_optimizer_bind", offsetof(dsopt_dl, dsopt_optimizer_bind)},
        {"the library has no dsopt_optimizer_reset", offsetof(dsopt_dl, dsopt_optimizer_reset)},
        {"the library has no dsopt_optimizer_step", offsetof(dsopt_dl, dsopt_optimizer_step)},
        {"the library has no dsopt_optimizer_apply", offsetof(dsopt_dl, dsopt_optimizer_apply)},
        {"the library has no dsopt_optimizer_workspace", offsetof(dsopt_dl, dsopt_optimizer_workspace)},
        {"the library has no dsopt_optimizer_init_state", offsetof(dsopt_dl, dsopt_optimizer_init_state)},
        {"the library has no dsopt_optimizer_accumulate", offsetof(dsopt_dl, dsopt_optimizer_accumulate)},
        {"the library has no dsopt_optimizer_next_reduction", offsetof(dsopt_dl, dsopt_optimizer_next_reduction)},
        {"the library has no dsopt_optimizer_next_reduction_on_device",
         offsetof(dsopt_dl, dsopt_optimizer_next_reduction_on_device)},
        {"the library has no dsopt_schedule_decode", offsetof(dsopt_dl, dsopt_schedule_decode)},
        {"the library has no dsopt_optimizer_report", offsetof(dsopt_dl, dsopt_optimizer_report)},
        {"the library has no dsopt_optimizer_save", offsetof(dsopt_dl, dsopt_optimizer_save)},
        {"the library has no dsopt_optimizer_load", offsetof(dsopt_dl, dsopt_optimizer_load)},
        {"the library has no dsopt_scaler_create", offsetof(dsopt_dl, dsopt_scaler_create)},
        {"the library has no dsopt_scaler_destroy", offsetof(dsopt_dl, dsopt_scaler_destroy)},
        {"the library has no dsopt_scaler_detach", offsetof(dsopt_dl, dsopt_scaler_detach)},
        {"the library has no dsopt_scaler_device_scale", offsetof(dsopt_dl, dsopt_scaler_device_scale)},
        {"the library has no dsopt_scaler_set", offsetof(dsopt_dl, dsopt_scaler_set)},
        {"the library has no dsopt_scaler_update", offsetof(dsopt_dl, dsopt_scaler_update)},
        {"the library has no dsopt_scaler_query", offsetof(dsopt_dl, dsopt_scaler_query)},
        {"the library has no dsopt_scaler_scale_loss", offsetof(dsopt_dl, dsopt_scaler_scale_loss)},
        {"the library has no dsopt_scaler_init_state", offsetof(dsopt_dl, dsopt_scaler_init_state)},
        {"the library has no dsopt_scaler_update_arrays", offsetof(dsopt_dl, dsopt_scaler_update_arrays)},
        {"the library has no dsopt_scaler_decode", offsetof(dsopt_dl, dsopt_scaler_decode)},
        {"the library has no dsopt_comm_unique_id", offsetof(dsopt_dl, dsopt_comm_unique_id)},
        {"the library has no dsopt_comm_create", offsetof(dsopt_dl, dsopt_comm_create)},
        {"the library has no dsopt_comm_query", offsetof(dsopt_dl, dsopt_comm_query)},
        {"the library has no dsopt_comm_all_reduce", offsetof(dsopt_dl, dsopt_comm_all_reduce)},
        {"the library has no dsopt_comm_abort", offsetof(dsopt_dl, dsopt_comm_abort)},
        {"the library has no dsopt_comm_destroy", offsetof(dsopt_dl, dsopt_comm_destroy)},
        {"the library has no dsopt_zero_grad", offsetof(dsopt_dl, dsopt_zero_grad)},
        {"the library has no dsopt_tensors_norm", offsetof(dsopt_dl, dsopt_tensors_norm)},
        {"the library has no dsopt_tensors_axpby", offsetof(dsopt_dl, dsopt_tensors_axpby)},
        {"the library has no dsopt_tensors_clamp", offsetof(dsopt_dl, dsopt_tensors_clamp)},
        {"the library has no dsopt_compressed_sizes", offsetof(dsopt_dl, dsopt_compressed_sizes)},
        {"the library has no dsopt_compressed_allreduce", offsetof(dsopt_dl, dsopt_compressed_allreduce)},
        {"the library has no dsopt_compressed_errors", offsetof(dsopt_dl, dsopt_compressed_errors)},
    };
    const size_t name = sizeof "the library has no " - 1;
    const char *problem = NULL;
    size_t i;
    memset(dl, 0, sizeof *dl);
    dl->library = dlopen(path ? path : "libdsopt.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!dl->library) {
        problem = dlerror();
        return problem ? problem : "dlopen failed";
    }
    for (i = 0; i < sizeof functions / sizeof *functions && !problem; ++i) {
        void *found = dlsym(dl->library, functions[i].problem + name);
        /* Copied, because C has no cast from a pointer to data to one to a function. */
        memcpy((char *)dl + functions[i].offset, &found, sizeof found);
        if (!found)
            problem = functions[i].problem;
        else if (i == 0 && dl->dsopt_abi_version() != DSOPT_ABI_VERSION)
            problem = "the library has another DSOPT_ABI_VERSION than dsopt.h";
    }
    if (problem) dsopt_dl_unload(dl);
    return problem;
}

#ifdef __cplusplus
}
#endif
#endif
