/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSOPT_H
#define DSOPT_H
/**
 * dsopt: the optimizer side of training behind one C header.
 *
 * The shortest useful program (error checks left out):
 *
 *     dsopt_context *ctx;   dsopt_context_create(NULL, &ctx);                  // CPU
 *     dsopt_optimizer *opt; dsopt_optimizer_create(ctx, NULL, &opt);           // the engine owns the state
 *     dsopt_group g; dsopt_group_init(&g, sizeof g, DSOPT_ALGORITHM_ADAMW); g.lr = 3e-4;
 *     dsopt_optimizer_add_group(opt, &g, params, n);                           // dsopt_param params[n]
 *     DSOPT_NEW(dsopt_step, step); step.grads = grads; step.count = n;         // dsopt_tensor grads[n]
 *     for (;;) { backward(); dsopt_optimizer_step(opt, &step); dsopt_zero_grad(ctx, grads, n, DSOPT_ZERO_FILL, NULL); }
 *     dsopt_optimizer_save(opt, "run.safetensors", NULL);
 *     dsopt_optimizer_destroy(opt); dsopt_context_destroy(ctx);
 *
 * Two ways to step, one argument struct:
 *   dsopt_optimizer_step   the optimizer remembers parameters, state and counters. One thread at a time.
 *   dsopt_optimizer_apply  the optimizer is a constant; everything that changes is in the caller's tensors. Any number
 * of threads.
 *
 * Rules that hold for every function here:
 *  - Units: counts are elements or tensors, sizes are bytes. "Backend memory" is host memory on the CPU backend and
 * memory of the context's device on CUDA. `stream` is a cudaStream_t of that device, NULL the legacy default stream;
 * the CPU backend ignores it and has finished when a call returns.
 *  - Structs that begin with `size`: set every byte to zero, set `size`, then set what you need; 0 and NULL mean "the
 * default" in every field except those of dsopt_group, which dsopt_group_init fills. DSOPT_NEW(type, name) does it in C
 * and C++. A struct shorter than in version 0.1 is refused, and so are bytes behind the last field known to this
 * library that are not zero (DSOPT_ERR_VERSION). A NULL desc is an all-zero desc. Structs without `size` travel in
 * arrays and never change.
 *  - Handles are released, not freed: an object lives on while another one was made from it, so handles may be
 * destroyed in any order (finalizers of garbage-collected languages do). destroy(NULL) does nothing.
 *  - Pointers in arguments are borrowed for the call; tensor memory until the stream has passed it. Exceptions are said
 * where they are.
 *  - Outputs come last and are untouched on failure. A failed call changes nothing. An option that would have no effect
 * is refused (DSOPT_ERR_UNSUPPORTED), never ignored. Reserved fields must be 0.
 *  - Every status function can also return DSOPT_ERR_ARGUMENT, _VERSION, _NOMEM, _BUSY, _FORKED, _INTERNAL.
 *  - Thread-safety, unless said otherwise: free on distinct objects; one thread at a time on one object (another one
 * gets DSOPT_ERR_BUSY from dsopt_optimizer_* calls); a context serves all threads.
 *  - Results: an element-wise step gives the same bits on every backend, instruction set, thread count, order and
 * packing of the lists; norms give the same bits for any thread count and instruction set. Denormals are kept.
 * Arithmetic is fp32, multiply and add rounded separately, whatever the storage type.
 *  - Since: 0.1 for everything that does not say otherwise.
 */
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------- visibility and version
 */
#if defined(__GNUC__)
#define DSOPT_API __attribute__((visibility("default")))
#define DSOPT_CHECK __attribute__((warn_unused_result))
#else
#define DSOPT_API
#define DSOPT_CHECK
#endif

#define DSOPT_VERSION_MAJOR 0
#define DSOPT_VERSION_MINOR 1
#define DSOPT_VERSION_PATCH 0
#define DSOPT_ABI_VERSION 0

/** A zeroed struct with its size set: `DSOPT_NEW(dsopt_step, s);` declares `dsopt_step s`. Other languages zero and set
 * `size`. */
#ifdef __cplusplus
#define DSOPT_NEW(type, name)                                                                                          \
    type name = type();                                                                                                \
    name.size = sizeof(type)
#else
#define DSOPT_NEW(type, name) type name = {.size = sizeof(type)}
#endif

/** Version of the loaded library, major * 10000 + minor * 100 + patch. Never fails. Thread-safety: any. */
DSOPT_API int32_t dsopt_version(void);

/** DSOPT_ABI_VERSION of the loaded library: equal numbers fit together. Never fails. Thread-safety: any. */
DSOPT_API int32_t dsopt_abi_version(void);

/**
 * What the loaded file is, as a JSON object: version, abi, compiler, "backends" and "comms" built in and usable here,
 * "isa" (the CPU instruction set that will be used), checkpoint format. Static storage. Thread-safety: any.
 */
DSOPT_API const char *dsopt_build_info(void);

/* ------------------------------------------------------------------------------------------------------------- status
 */
typedef int32_t dsopt_status;
enum {
    DSOPT_OK = 0,
    /* the call is wrong */
    DSOPT_ERR_ARGUMENT = 10,  /**< null, negative, out of range, not finite; the text names argument, field or tensor */
    DSOPT_ERR_SHAPE = 11,     /**< count or numel is not what was registered, or numel * size overflows */
    DSOPT_ERR_DTYPE = 12,     /**< not a dtype of this build, or not for this list */
    DSOPT_ERR_ALIGNMENT = 13, /**< pointer not aligned to its element */
    DSOPT_ERR_OVERLAP = 14,   /**< two tensors share bytes */
    DSOPT_ERR_DEVICE = 15,    /**< memory of another device, with DSOPT_CONTEXT_CHECK_POINTERS */
    DSOPT_ERR_WORKSPACE = 16, /**< workspace missing or too small; the text says how many bytes */
    DSOPT_ERR_VERSION =
        17, /**< struct shorter than version 0.1, or fields that this library does not know are not zero */
    DSOPT_ERR_UNSUPPORTED = 18, /**< valid elsewhere, not in this combination or build; the text names the option */
    DSOPT_ERR_STATE = 19,       /**< wrong moment: no groups yet, parameters not bound */
    DSOPT_ERR_BUSY = 20,        /**< the object is in use by another thread */
    DSOPT_ERR_FORKED = 21,      /**< made before fork(): in the child only destroy works */
    DSOPT_ERR_SKIPS = 22,       /**< the skip budget is used up: that many steps in a row were skipped */
    DSOPT_ERR_HOOK = 23,        /**< a hook of the caller did not do what it promises */
    /* the system is at fault */
    DSOPT_ERR_NOMEM = 30,    /**< out of host or backend memory */
    DSOPT_ERR_MISSING = 31,  /**< a driver or library that the call needs is not on this machine */
    DSOPT_ERR_IO = 32,       /**< open, read, write, flush or rename failed; the text has the system's reason */
    DSOPT_ERR_INTERNAL = 33, /**< a defect of dsopt */
    DSOPT_ERR_BACKEND = 34,  /**< the device or its driver failed; the text has its reason */
    /* communication; sticky for the comm */
    DSOPT_ERR_COMM = 50,    /**< a collective failed; the text has the provider's reason */
    DSOPT_ERR_TIMEOUT = 51, /**< a peer did not come within the comm's time-out */
    DSOPT_ERR_ABORTED = 52, /**< dsopt_comm_abort was called */
    /* files */
    DSOPT_ERR_FORMAT = 70,   /**< not a dsopt checkpoint, or a damaged header */
    DSOPT_ERR_CHECKSUM = 71, /**< tensor data do not match their checksum */
    DSOPT_ERR_MISMATCH = 72  /**< another algorithm, other names, dtypes or sizes than this optimizer's; also of
                                other ranks, with DSOPT_OPTIMIZER_CHECK_RANKS */
};

/** Name of a status, "DSOPT_ERR_SHAPE"; "unknown status" for others. Static storage. Thread-safety: any. */
DSOPT_API const char *dsopt_status_name(dsopt_status status);

/** Text of the last failure in the calling thread, "" if there was none; valid until its next failing dsopt call. Never
 * NULL. */
DSOPT_API const char *dsopt_last_error(void);

/* ------------------------------------------------------------------------------------------------- dtypes and tensors
 */
enum {
    DSOPT_DTYPE_F32 = 1,
    DSOPT_DTYPE_F16 = 2,
    DSOPT_DTYPE_BF16 = 3,
    DSOPT_DTYPE_I32 = 4,
    DSOPT_U8 = 5,
    DSOPT_I64 = 6,
    DSOPT_DTYPE_F64 = 7
};

/** A dense array. `numel` 0 with NULL data is legal everywhere. In a gradient list NULL data means "no gradient this
 * time". */
typedef struct dsopt_tensor {
    void *data; /**< aligned to its element */
    int64_t numel;
    int32_t dtype;    /**< DSOPT_DTYPE_F32 ... */
    int32_t reserved; /**< 0 */
} dsopt_tensor;

/* ------------------------------------------------------------------------------------------------------------ context
 */
typedef struct dsopt_context dsopt_context;

enum { DSOPT_BACKEND_CPU = 0, DSOPT_BACKEND_CUDA = 1 };
enum { DSOPT_LOG_ERROR = 1, DSOPT_LOG_WARN = 2, DSOPT_LOG_INFO = 3, DSOPT_LOG_TRACE = 4 };

enum {
    DSOPT_CONTEXT_CHECK_POINTERS =
        1 /**< CUDA: every step asks the driver where each pointer belongs, and memory of another device, or of
               the host only, is DSOPT_ERR_DEVICE. For debugging: it costs a driver call a pointer */
};

/** Runs `body(arg, i)` for every i in [0, n), in any order and on any thread, and returns when all are done. */
typedef void (*dsopt_parallel_for)(void *user, int64_t n, void (*body)(void *arg, int64_t i), void *arg);

/** All optional. The hooks are called from any thread that is inside a dsopt call with this context or with an object
 * made from it. */
typedef struct dsopt_context_desc {
    size_t size;
    int32_t backend;   /**< DSOPT_BACKEND_CPU or DSOPT_BACKEND_CUDA */
    int32_t device;    /**< CUDA ordinal; 0 on the CPU */
    int32_t threads;   /**< into how many parts a step is cut, and how many workers run them; 0 = as many as cores */
    int32_t log_level; /**< highest level passed to `log`; 0 = the environment's DSOPT_LOG (error, warn, info, trace),
                          else warn */
    void *(*allocate)(void *user, size_t bytes, size_t alignment,
                      void *stream); /**< backend memory; NULL return = out of memory */
    void (*release)(void *user, void *memory, size_t bytes, void *stream); /**< given together with `allocate` */
    dsopt_parallel_for
        parallel_for; /**< thread pool of the caller in place of OpenMP; dsopt_step can bring another one */
    void (*log)(void *user, int32_t level, const char *text); /**< NULL: nothing is ever printed */
    void *user;                                               /**< first argument of the four hooks */
    int64_t chunk; /**< smallest piece of work in elements, a multiple of 4096 (the leaf of all reductions); 0 = 4096 */
    uint32_t flags; /**< DSOPT_CONTEXT_... */
    uint32_t reserved;
} dsopt_context_desc;

/**
 * @param[in]  desc  NULL = CPU with all defaults. The environment's DSOPT_ISA (generic, avx2, avx512) lowers the
 * instruction set.
 * @param[out] ctx   the new context; release with dsopt_context_destroy.
 * @return DSOPT_OK; DSOPT_ERR_UNSUPPORTED: backend not built in; DSOPT_ERR_MISSING: no driver or device. Thread-safety:
 * any.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_context_create(const dsopt_context_desc *desc, dsopt_context **ctx);
/** Release the handle. Never blocks. */
DSOPT_API void dsopt_context_destroy(dsopt_context *ctx);

/* --------------------------------------------------------------------------------------------------------------- comm
 */
/*
 * Ranks that agree on norms and on skipped steps. Every rank makes the same calls in the same order. A comm is used by
 * one thread at a time, but dsopt_comm_query and dsopt_comm_abort may be called from any thread at any time.
 *
 * The first failure loses the comm: later calls return its status without trying. A rank that does not come, that died
 * or that made another call gives the others DSOPT_ERR_TIMEOUT after `timeout_ms`, or DSOPT_ERR_COMM at once where the
 * provider notices. Every kind works with every context unless it says otherwise: data that are not in the memory the
 * kind works in are staged by the engine.
 *
 * The host waits for each exchange, so a step with comms of several ranks cannot be captured in a graph
 * (DSOPT_ERR_STATE, the comm is as good as before), unless all of them were made with DSOPT_COMM_FLAG_ENQUEUE.
 */
typedef struct dsopt_comm dsopt_comm;

enum {
    DSOPT_COMM_KIND_SELF = 0,  /**< one rank */
    DSOPT_COMM_KIND_LOCAL = 1, /**< ranks are threads of this process, host memory */
    /** NCCL 2.4 or later, found at run time; needs a CUDA context, works in device memory. A copy that the process has
     * loaded is taken first; else the environment's DSOPT_NCCL_LIBRARY (an absolute path), else libnccl.so.2.
     * DSOPT_ERR_MISSING without one. Time-outs count from the call, with what is on the stream before it. Inside the
     * library they bind with communicators that do not block: those made here from 2.14 on. */
    DSOPT_COMM_KIND_NCCL = 2,
    /** HCCL of Ascend, found at run time as NCCL is: libhccl.so and libascendcl.so, or what DSOPT_HCCL_LIBRARY and
     * DSOPT_ASCENDCL_LIBRARY name. Takes host memory and uses the Ascend device that is current in the creating thread
     * (DSOPT_ERR_STATE: none). Tested against a double of both libraries, never on that hardware. */
    DSOPT_COMM_KIND_HCCL = 3,
    DSOPT_COMM_KIND_TABLE = 4 /**< the caller's functions; for MPI see dsopt_mpi.h */
};
/**
 * Exchanges of device memory are put on the stream and the host does not wait for them: NCCL, or a TABLE that takes
 * memory of a CUDA context, whose functions then come back once the exchange is enqueued and can be captured.
 *  - A step waits for nothing but, with values that the host needs: the comparison of lists before the first exchange
 *    of bits and with CHECK_RANKS, a skip budget, and what dsopt_optimizer_step says of the 1-bit family.
 *  - `timeout_ms` bounds enqueueing and waits for results that the host needs, and nothing else. A peer that hangs
 *    holds up the stream, and whoever waits for the device (a skip budget, reading a schedule, releasing memory),
 *    until dsopt_comm_abort (from any thread) or, with `native`, until its owner aborts it.
 *  - A failure comes with a later call. Steps that were enqueued behind the failed exchange leave undefined weights and
 *    state: load a checkpoint.
 *  - Synchronise the stream, or abort its comms, before anything is destroyed that steps on it use. dsopt_comm_destroy
 *    may abort what is still there.
 *  - Counters count what is enqueued and captured, not replays. All calls of a comm go to one stream, or to several
 *    that the caller keeps in order.
 */
enum { DSOPT_COMM_FLAG_ENQUEUE = 1 };
enum { DSOPT_OP_SUM = 0, DSOPT_OP_MAX = 1 };
enum {
    DSOPT_MEMORY_HOST = 0,
    DSOPT_MEMORY_BACKEND = 1 /**< of the context: device memory on CUDA */
};

/**
 * Collectives of the caller (MPI, Gloo, ...). Functions return 0, or their own error code, or a status of this header
 * as a negative number where they know it: -DSOPT_ERR_COMM, -DSOPT_ERR_TIMEOUT, -DSOPT_ERR_ABORTED. They block until
 * done; with DSOPT_MEMORY_BACKEND it is enough to be done in the order of `stream`.
 * Optional functions that are NULL are made from the others, at a price in bytes: broadcast from all_gather, all_gather
 * from broadcast, all_to_all from all_gather, and each of them from all_reduce of I32 where nothing else is there;
 * barrier from all_reduce.
 */
typedef struct dsopt_comm_table {
    size_t size;
    void *self; /**< first argument of every function; must live until `destroy` */
    int32_t rank;
    int32_t ranks;
    int (*all_reduce)(void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                      void *stream);                                                                   /**< F32, F64,
       I32; SUM, MAX; send may be recv; every rank must get the same bits */
    int (*all_to_all)(void *self, const void *send, void *recv, int64_t bytes_per_rank, void *stream); /**< optional */
    int (*all_gather)(void *self, const void *send, void *recv, int64_t bytes_per_rank, void *stream); /**< optional */
    int (*broadcast)(void *self, void *buffer, int64_t bytes, int32_t root, void *stream);             /**< optional */
    int (*barrier)(void *self);                                                                        /**< optional */
    int (*error)(void *self, char *text,
                 size_t capacity); /**< optional: state of the communicator, any thread; 0 = fine */
    void (*abort)(void *self);     /**< optional: make blocked calls return, any thread, more than once */
    void (*destroy)(void *self);   /**< optional: last call; must not wait for other ranks for ever */
    int32_t memory;                /**< what the functions take: DSOPT_MEMORY_... */
    int32_t reserved;
} dsopt_comm_table;

typedef struct dsopt_comm_desc {
    size_t size;
    int32_t kind;       /**< DSOPT_COMM_...; SELF needs nothing else */
    int32_t rank;       /**< with `id`: this rank */
    int32_t ranks;      /**< with `id`: number of ranks */
    int32_t timeout_ms; /**< longest wait in any call, but see ENQUEUE; 0 = 600000; -1 = none. TABLE: the functions' own
                           affair, must be 0 */
    const void *id;     /**< bytes of dsopt_comm_unique_id, the same on all ranks; creating is then collective */
    size_t id_bytes;
    const dsopt_comm_table *table; /**< TABLE: copied */
    void *native;   /**< in place of `id`, NCCL: an ncclComm_t of the caller on the context's device; HCCL: an HcclComm;
                       from a copy of the library that the process has loaded. Borrowed until the comm and what was made
                       with it are gone: never aborted or destroyed here. After a time-out its collective stays on the
                       stream */
    uint32_t flags; /**< DSOPT_COMM_FLAG_ENQUEUE or 0 */
    uint32_t reserved;
} dsopt_comm_desc;

/** Kinds of collectives, and what a rank sends in one, which is what counters count (no headers, no retries). */
enum {
    DSOPT_COLLECTIVE_ALL_REDUCE = 0, /**< 2 (ranks - 1) / ranks of the data, what a ring needs at least; receives so */
    DSOPT_COLLECTIVE_ALL_TO_ALL = 1, /**< a row to each other rank; receives as many */
    DSOPT_COLLECTIVE_ALL_GATHER = 2, /**< its row to each other rank; receives theirs */
    DSOPT_COLLECTIVE_BROADCAST = 3,  /**< the root the data once, others nothing; those receive it */
    DSOPT_COLLECTIVE_BARRIER = 4,    /**< nothing */
    DSOPT_COLLECTIVE_SLOTS = 8       /**< length of lists; places that are not named are 0 */
};
typedef struct dsopt_comm_info {
    size_t size;
    int32_t rank, ranks;
    dsopt_status status; /**< DSOPT_OK, or the first failure of this comm */
    int32_t reserved;
    /* Since creation, of all kinds, and then of each. With one rank next to nothing is called. */
    int64_t calls;      /**< calls of the provider's functions: one that is made from others counts as those */
    int64_t bytes_sent; /**< payload put on the wire by this rank in calls that did not fail */
    int64_t bytes_received;
    int64_t calls_of[DSOPT_COLLECTIVE_SLOTS];
    int64_t sent_of[DSOPT_COLLECTIVE_SLOTS];
    int64_t received_of[DSOPT_COLLECTIVE_SLOTS];
} dsopt_comm_info;

/**
 * Make a bootstrap blob on one rank; carry it to the others by any means.
 * @param[in]     kind   DSOPT_COMM_KIND_LOCAL (16 bytes), DSOPT_COMM_KIND_NCCL (128), DSOPT_COMM_KIND_HCCL (4108).
 * @param[out]    id     may be NULL to ask for the size only.
 * @param[in,out] bytes  capacity of `id`; then the size.
 * @return DSOPT_OK; DSOPT_ERR_UNSUPPORTED: the kind has no blob, or is not in this build; DSOPT_ERR_SHAPE: capacity;
 * DSOPT_ERR_MISSING: its library is not on this machine; DSOPT_ERR_COMM: it refused. Thread-safety: any.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_comm_unique_id(int32_t kind, void *id, size_t *bytes);
/**
 * Make a comm; collective where `id` is given.
 * @return DSOPT_OK; DSOPT_ERR_TIMEOUT: not all ranks came; DSOPT_ERR_COMM: the provider refused, or the ranks do not
 * fit together; DSOPT_ERR_MISSING: its library is not on this machine, or too old; DSOPT_ERR_UNSUPPORTED: not with this
 * context, not in this build, or an option without effect; DSOPT_ERR_DEVICE: `native` belongs to another device;
 * DSOPT_ERR_BACKEND. The caller keeps a table, and what `native` is, when this fails.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_comm_create(dsopt_context *ctx, const dsopt_comm_desc *desc,
                                                     dsopt_comm **comm);
/** Rank, size, health and counters, without waiting; `info->size` must be set. Thread-safety: any. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_comm_query(const dsopt_comm *comm, dsopt_comm_info *info);
/** Make every blocked or later call on this comm return DSOPT_ERR_ABORTED, on all ranks of a LOCAL one. Other ranks of
 * other kinds learn of it as of a rank that died. Never blocks for long. Thread-safety: any. */
DSOPT_API void dsopt_comm_abort(dsopt_comm *comm);
/** Release the handle. The last owner of an NCCL comm waits for the other ranks to let go of theirs, 5 seconds at most;
 * where ending it takes the library still longer, it is left behind. */
DSOPT_API void dsopt_comm_destroy(dsopt_comm *comm);

/* -------------------------------------------------------------------------------------------------------- loss scaler
 */
typedef struct dsopt_scaler dsopt_scaler;

/** Where zero fields of dsopt_scaler_desc come from. */
enum {
    DSOPT_PROFILE_DEFAULT = 0, /**< init 2^16, factor 2, window 1000, min 1, hysteresis 1 */
    DSOPT_PROFILE_FUSED = 1,   /**< FP16_Optimizer: init 2^32, min 1. Hysteresis is ignored there, hence refused here */
    DSOPT_PROFILE_UNFUSED = 2, /**< FP16_UnfusedOptimizer: init 2^16, min 0.25, likewise */
    DSOPT_PROFILE_DYNAMIC = 3  /**< DynamicLossScaler: init 2^32, min 1, FAIL_AT_MIN */
};
enum {
    /** Never changes by itself; overflow skips the step all the same. */
    DSOPT_SCALER_STATIC = 1,
    /** Consecutive hysteresis: every good step refills the budget. */
    DSOPT_SCALER_REFILL = 2,
    /** Overflow at the minimum counts in dsopt_scaler_info.failures and changes nothing else. */
    DSOPT_SCALER_FAIL_AT_MIN = 4,
    /** Takes FAIL_AT_MIN out of the DYNAMIC profile; both together are refused. */
    DSOPT_SCALER_KEEP_AT_MIN = 8,
    /** Steps only record overflow; dsopt_scaler_update makes the transition, once an iteration. Needed for a second
     * optimizer (else DSOPT_ERR_STATE when that is created). */
    DSOPT_SCALER_SHARED = 16,
    /** Grow in the step that makes `window` good ones (2023 form), not in the one after it. */
    DSOPT_SCALER_GROWTH_AT_WINDOW = 32
};
typedef struct dsopt_scaler_desc {
    size_t size;
    int32_t profile;    /**< DSOPT_PROFILE_DEFAULT ... */
    uint32_t flags;     /**< DSOPT_SCALER_STATIC ... */
    double init;        /**< 0 = of the profile; STATIC: 1 */
    double factor;      /**< > 1; 0 = 2 */
    double min;         /**< 0 = of the profile */
    double max;         /**< 0 = none */
    int32_t window;     /**< good steps until growth; 0 = 1000 */
    int32_t hysteresis; /**< overflows until the scale shrinks (delayed_shift); 0 = 1 */
} dsopt_scaler_desc;
typedef struct dsopt_scaler_info {
    size_t size;
    double scale;           /**< what the next backward pass must use, override included */
    double dynamic;         /**< the machine's own value */
    int64_t updates;        /**< transitions so far (cur_iter) */
    int64_t last_overflow;  /**< number of the last one with overflow (last_overflow_iter), -1 if none */
    int32_t hysteresis;     /**< overflows left until the scale shrinks */
    int32_t overridden;     /**< 1 while an override is set */
    int32_t failures;       /**< overflows at the minimum, with FAIL_AT_MIN */
    int32_t skipped_in_row; /**< transitions with overflow in a row */
} dsopt_scaler_info;
enum { DSOPT_SCALE_VALUE = 0, DSOPT_SCALE_OVERRIDE = 1, DSOPT_SCALE_CLEAR_OVERRIDE = 2 };

/**
 * The machine (updates i, last overflow l): on overflow, with the budget of `hysteresis` at 1, scale = max(scale /
 * factor, min); else one less in the budget; l = i. On a good step with k = i - l - 1 > 0 and k a multiple of `window`:
 * scale = min(scale * factor, max) and a full budget. Then i + 1. (DeepSpeed's loss_scaler.py.)
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: a field is out of range; DSOPT_ERR_UNSUPPORTED: an option without effect.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_create(dsopt_context *ctx, const dsopt_scaler_desc *desc,
                                                       dsopt_scaler **scaler);
/** Release the handle; optimizers that it is attached to keep the scaler alive. */
DSOPT_API void dsopt_scaler_destroy(dsopt_scaler *scaler);
/** One float in backend memory, fixed for the scaler's life: the loss, or its gradient, is multiplied by it. NULL only
 * for NULL. */
DSOPT_API const float *dsopt_scaler_device_scale(const dsopt_scaler *scaler);
/** Stream-ordered: set the value, set an override (used by backward and unscaling; the machine pauses), or clear it. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_set(dsopt_scaler *scaler, int32_t what, double value, void *stream);
/**
 * One transition. With DSOPT_SCALER_SHARED once an iteration, after the last step; else for a scaler used without an
 * optimizer.
 * @param[in] overflow  an int32 in backend memory, nonzero = overflow; NULL = what the attached optimizers recorded.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_update(dsopt_scaler *scaler, const int32_t *overflow, void *stream);
/** Current values; `info->size` must be set. Waits for the work that was enqueued with this scaler. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_query(dsopt_scaler *scaler, dsopt_scaler_info *info);
/** Multiply a loss (one F32, F16 or BF16 in backend memory) by the scale, in place and in stream order: the backward
 * helper. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_scale_loss(const dsopt_scaler *scaler, const dsopt_tensor *loss,
                                                           void *stream);

/* ---------------------------------------------------------------------------------------------- groups and parameters
 */
/** Algorithms. Formulas are with g the unscaled, clipped gradient, t the step of the tensor, c1 = 1 - beta1^t, c2 = 1 -
 * beta2^t. */
enum {
    DSOPT_ALGORITHM_ADAM =
        2, /**< Kingma and Ba 2015, decay as L2: g += wd p; m, v; p -= lr (m/c1) / (sqrt(v/c2) + eps) */
    DSOPT_ALGORITHM_ADAMW =
        3, /**< Loshchilov and Hutter 2019, decoupled decay: p -= lr ((m/c1) / (sqrt(v/c2) + eps) + wd p) */
    DSOPT_ALGORITHM_LAMB =
        4, /**< You et al. 2020 as in DeepSpeed's FusedLamb: u = m/(sqrt(v) + eps) + wd p; p -= lr sqrt(c2)/c1 r u with
              one trust ratio r = clamp(|p|/|u|, min_trust, max_trust) a tensor, 1 where a norm is 0 */
    /** 1-bit Adam (Tang et al. 2021). Up to freeze_step AdamW without bias correction on averaged gradients; then v
     * stays, each rank puts its own gradient into m, m becomes the 1-bit mean over the data-parallel ranks, and p -= lr
     * (m / (sqrt(v) + eps) + wd p). */
    DSOPT_ALGORITHM_ONEBIT_ADAM = 16,
    /** 0/1 Adam (Lu et al. 2022). Up to freeze_step v moves in steps whose number is a multiple of an interval that
     * doubles every var_interval_steps of them, on averaged gradients; in the others m takes the 1-bit mean of the
     * gradients. Then ranks step alone, and every interval, which doubles every local_interval_steps steps up to
     * max_local_interval, the 1-bit mean of how far they went brings them together again. */
    DSOPT_ALGORITHM_ZERO_ONE_ADAM = 17,
    /** 1-bit LAMB (Li et al. 2021). Up to freeze_step LAMB without bias correction; then as 1-bit Adam, with the
     * running mean of the trust ratio times a factor that follows how the variance would have gone on. */
    DSOPT_ALGORITHM_ONEBIT_LAMB = 18,
    DSOPT_ALGORITHM_ADAM_LEGACY =
        7 /**< apex's first fused Adam: p -= lr sqrt(c2)/c1 (m/(sqrt(v) + eps) + wd p): eps acts on the uncorrected v */
};
enum {
    DSOPT_GROUP_NO_BIAS_CORRECTION = 1,
    DSOPT_GROUP_EPS_INSIDE_SQRT = 2, /**< sqrt(v + eps); LAMB and ADAM_LEGACY, refused elsewhere */
    DSOPT_GROUP_AMSGRAD = 4,         /**< refused: no algorithm here has it */
    DSOPT_GROUP_SPARSE = 8,          /**< refused: gradients are dense */
    /** 1-bit Adam: never compressed, the variance never frozen. In exchange steps the engine averages its gradients
     * itself, so the answer of dsopt_optimizer_next_reduction holds for all groups. */
    DSOPT_GROUP_NON_FREEZE = 16
};

/**
 * Algorithm and hyper-parameters of some parameters. Filled by dsopt_group_init; fields that the algorithm does not use
 * are 0 there and must stay 0. Groups of one optimizer may differ in algorithm.
 */
typedef struct dsopt_group {
    size_t size;
    int32_t algorithm;
    uint32_t flags;      /**< DSOPT_GROUP_... */
    double lr;           /**< finite, >= 0 */
    double beta1, beta2; /**< in [0, 1) */
    double eps;          /**< finite, >= 0 */
    double weight_decay; /**< finite, >= 0 */
    double max_norm; /**< clip by the L2 norm of this group's gradients alone; 0 = off. See also dsopt_optimizer_desc */
    double min_trust, max_trust; /**< LAMB: bounds of the trust ratio, 0 <= min <= max */
    /* The 1-bit family; the same in all its groups, of which an optimizer has one algorithm. */
    int64_t freeze_step;          /**< number of the last step that changes the variance, >= 1 */
    int64_t var_interval_steps;   /**< 0/1 Adam, >= 1; the original's var_update_scaler */
    int64_t local_interval_steps; /**< 0/1 Adam, >= 1; the original's local_step_scaler */
    int64_t max_local_interval;   /**< 0/1 Adam, >= 1; the original's local_step_clipper */
    double trust_beta;            /**< 1-bit LAMB, in [0, 1): of the running mean of the trust ratio (coeff_beta) */
    double trust_threshold; /**< 1-bit LAMB, in [0, 1): relative change of the factor in a step (factor_threshold) */
    double trust_min_change, trust_max_change; /**< 1-bit LAMB: bounds of the factor, 0 <= min <= max */
} dsopt_group;

/** What the global norm makes of a parameter's gradient. */
enum {
    DSOPT_PARAM_MODEL_PARALLEL =
        1, /**< sharded over the model comm: every rank's part counts. Others count on its rank 0 */
    DSOPT_PARAM_REPLICATED = 2, /**< exists on another pipeline stage too, which counts it: left out of norms here */
    /** The 1-bit family: the mean is multiplied with state tensor "mask", where 0 keeps what has no gradient from being
     * moved by noise. It starts as zeros: fill it before the first step. */
    DSOPT_PARAM_MASKED = 4
};

/** One parameter as registered. No `size`: it travels in arrays. */
typedef struct dsopt_param {
    dsopt_tensor tensor; /**< F32, F16 or BF16; data may be NULL: bound later, or given at each call */
    const char *name;    /**< copied; UTF-8, at most 1000 bytes, unique in the optimizer; NULL = "p<index>" */
    const int64_t *dims; /**< copied; optional, for checkpoints; the product must be numel */
    int32_t ndim;        /**< 0 = flat; at most 8 */
    uint32_t flags;      /**< DSOPT_PARAM_... */
    int64_t offset; /**< where this piece begins if it is a slice of a tensor of that name: stochastic rounding follows
                       it */
    int32_t expert; /**< 0 = dense; k = its ranks in expert comm k - 1 hold different experts, whose squares add up */
    int32_t reserved; /**< 0 */
} dsopt_param;

/**
 * Every default of an algorithm, as the original documents them (lr 1e-3, betas 0.9 and 0.999, eps 1e-8, no decay,
 * trust 0.01 to 10; 1-bit family: freeze_step 100000, intervals 16, 32678 and 16, trust_beta 0.9, threshold 0.1, change
 * 0.5 to 4, no bias correction).
 * @param[in] size  sizeof(dsopt_group) of the caller's header.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: unknown algorithm. Thread-safety: any.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_group_init(dsopt_group *group, size_t size, int32_t algorithm);

/* ---------------------------------------------------------------------------------------------------------- optimizer
 */
typedef struct dsopt_optimizer dsopt_optimizer;

enum { DSOPT_COMPAT_NONE = 0, DSOPT_COMPAT_DEEPSPEED = 1 };
enum { DSOPT_NONFINITE_AUTO = 0, DSOPT_NONFINITE_SKIP = 1, DSOPT_NONFINITE_APPLY = 2 };
enum {
    DSOPT_OPTIMIZER_NO_MASTER = 1,    /**< 16-bit parameters without an fp32 master */
    DSOPT_OPTIMIZER_REPORT_NORMS = 2, /**< weight and update norm in the report (no further pass over memory) */
    DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING =
        4, /**< with NO_MASTER: BF16 parameters are rounded up or down at random, in proportion. The
                random number follows from seed, name, step and element alone: any sharding gives the same */
    DSOPT_OPTIMIZER_ACCUMULATE = 8, /**< an F32 gradient accumulator per parameter, see dsopt_optimizer_accumulate */
    DSOPT_OPTIMIZER_TIMING = 16,    /**< times per phase in the report */
    /** When dsopt_optimizer_next_reduction says FULL the step averages the gradients over the data-parallel ranks
     * itself (into F32 workspace; the caller's are not changed). For the 1-bit family. */
    DSOPT_OPTIMIZER_AVERAGES = 32,
    /** Before the first collective of every step the data-parallel ranks compare what they are about to do: their
     * lists (names, sizes, dtypes, groups, algorithms; of experts not the names), the number of calls, step and stage
     * of the 1-bit family's schedule, and, where the caller averages, which gradients are there. If they differ every
     * rank gets DSOPT_ERR_MISMATCH, nothing is changed and the comm is as good as before; so too if a rank refuses its
     * arguments, which alone gets the reason. Without it such ranks hang, fail as the comm does, or drift apart. One
     * all-reduce of 100 bytes, which compares the lists of the 1-bit family with the first dsopt_optimizer_step after
     * every new group in any case; with a node comm also whether both comms fit together, by two short ones more */
    DSOPT_OPTIMIZER_CHECK_RANKS = 64,
    /** 1-bit Adam in standard mode: once the variance is frozen the momentum is what the last exchange brought, a bit
     * an element and a few scales, and is kept as that in exp_avg_bits: a step moves 8 bytes an element less, to the
     * same bits. exp_avg is brought up to date by dsopt_optimizer_export, _import, _save, _bind, _reset and _add_group,
     * and holds an older momentum in between. No masks; no effect with one rank, or one node */
    DSOPT_OPTIMIZER_MOMENTUM_BITS = 128
};
enum {
    DSOPT_MASTERS_PER_TENSOR = 0, /**< compat mode: FP16_UnfusedOptimizer */
    DSOPT_MASTERS_FLAT =
        1 /**< the masters of a group lie one behind the other without gaps; compat mode: FP16_Optimizer */
};

typedef struct dsopt_optimizer_desc {
    size_t size;
    int32_t
        compat; /**< DSOPT_COMPAT_NONE, or DSOPT_COMPAT_DEEPSPEED: the original step by step, quirks included. Without
                       masters that is FusedAdam and FusedLamb: betas and 1 - beta in fp32, Adam's steps counted by one
                       counter a group, moments in the parameter's dtype. With masters it is the fp16 wrapper that
                       `masters` names: the first use of the state takes a step on zero gradients, absent gradients are
                       zeros, the scale moves before gradients are divided by it, a norm that is not finite in fp32
                       counts as 1, experts count by their weights (FLAT) or not at all, and non-finite gradients
                       without a scaler are applied (FLAT) */
    uint32_t flags; /**< DSOPT_OPTIMIZER_... */
    int32_t
        nonfinite; /**< Inf or NaN in a gradient. AUTO: skip the step if the gradients are read for scaling or clipping
                      anyway, else apply; SKIP: always look (one more read of the gradients); APPLY: let them through */
    int32_t masters;  /**< DSOPT_MASTERS_... */
    double max_norm;  /**< clip by the L2 norm of all gradients: g /= max(1, (norm + 1e-6) / max_norm); 0 = off. Where a
                         group has its own max_norm too, the larger of the two divisors holds */
    double max_value; /**< clip every element of the unscaled gradient to [-max_value, max_value], after the norm; 0 =
                         off */
    dsopt_scaler *scaler;       /**< kept; NULL = no loss scaling */
    dsopt_comm *data;           /**< kept: data-parallel ranks, which agree on skipping; NULL = one */
    dsopt_comm *model;          /**< kept: model-parallel ranks, which add up norms and agree on skipping; NULL = one */
    dsopt_comm *const *experts; /**< kept: expert_count comms of expert-parallel ranks */
    int32_t expert_count;
    int32_t skip_budget; /**< after this many skipped steps in a row dsopt_optimizer_step returns DSOPT_ERR_SKIPS; 0 =
                            never */
    uint64_t seed;       /**< of STOCHASTIC_ROUNDING */
    dsopt_comm *node;    /**< kept: the ranks of this node, as in dsopt_compressed; NULL = one. The data-parallel ranks
                            are then those of all nodes, and `data` has those with the same rank in their node: the
                            1-bit family exchanges in two levels, and skips and norms are agreed over both */
} dsopt_optimizer_desc;

/**
 * An optimizer without parameters yet.
 * @param[in] desc  NULL = standard mode, no scaling, no clipping, fp32 masters for 16-bit parameters.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: a field is out of range; DSOPT_ERR_UNSUPPORTED: an option without effect;
 * DSOPT_ERR_STATE: the scaler has an optimizer already and is not SHARED. Thread-safety: any.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_create(dsopt_context *ctx, const dsopt_optimizer_desc *desc,
                                                          dsopt_optimizer **opt);
/** Release the handle and, when nothing else uses them, the state tensors that the engine owns. */
DSOPT_API void dsopt_optimizer_destroy(dsopt_optimizer *opt);

/**
 * Append a group. Its parameters follow those of earlier groups: every list of this API has that one flat order. May be
 * called between steps: existing state is kept (but error feedback of the 1-bit family, which starts anew), the lists
 * of later calls are longer, and a state list bound before must be bound anew.
 * @param[in] params  copied, names too; tensor memory is borrowed until the optimizer is destroyed or bound to other
 * memory.
 * @param[in] count   0 is legal.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: hyper-parameter, name, dims or flags; _DTYPE; _SHAPE: numel * size overflows;
 * _ALIGNMENT; _OVERLAP: with each other or with earlier ones; _UNSUPPORTED: an option that this algorithm does not
 * have; _STATE: parameters for exchanges of the 1-bit family once its variance is frozen, which they would not have.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_add_group(dsopt_optimizer *opt, const dsopt_group *group,
                                                             const dsopt_param *params, int64_t count);

enum { DSOPT_ALL_GROUPS = -1 };
enum {
    DSOPT_KEY_LR = 1,
    DSOPT_KEY_BETA1 = 2,
    DSOPT_KEY_BETA2 = 3,
    DSOPT_KEY_EPS = 4,
    DSOPT_KEY_WEIGHT_DECAY = 5,
    DSOPT_KEY_GROUP_MAX_NORM = 6,
    DSOPT_KEY_MIN_TRUST = 7,
    DSOPT_KEY_MAX_TRUST = 8,
    DSOPT_KEY_BIAS_CORRECTION = 9,  /**< 0 or 1 */
    DSOPT_KEY_EPS_INSIDE_SQRT = 10, /**< 0 or 1 */
    DSOPT_KEY_ALGORITHM = 11,       /**< read only */
    DSOPT_KEY_FREEZE_STEP = 12,     /**< of all groups at once */
    /* of the optimizer; group must be DSOPT_ALL_GROUPS: */
    DSOPT_KEY_MAX_NORM = 32,
    DSOPT_KEY_MAX_VALUE = 34,
    DSOPT_KEY_SKIP_BUDGET = 35, /**< setting it also forgives the skips so far */
    DSOPT_KEY_CALLS =
        33 /**< number of steps so far, skipped ones included; set by a caller that keeps its own checkpoints */
};
/**
 * Change a hyper-parameter from the next step on. With DSOPT_ALL_GROUPS every group, or none on failure.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: group, key or value out of range; DSOPT_ERR_UNSUPPORTED: the group's algorithm
 * has none such.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_set(dsopt_optimizer *opt, int32_t group, int32_t key, double value);
/** Read one; DSOPT_ALL_GROUPS reads group 0. @return as dsopt_optimizer_set; DSOPT_ERR_STATE: no groups. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_get(const dsopt_optimizer *opt, int32_t group, int32_t key,
                                                       double *value);
/** Number of groups and of parameters; either output may be NULL. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_count(const dsopt_optimizer *opt, int64_t *groups, int64_t *params);

/* ------------------------------------------------------------------------------------------------------ state tensors
 */
/*
 * Everything that a step changes apart from the parameters is a list of state tensors in one fixed order: per parameter
 * (master, exp_avg, exp_avg_sq, grad_accum; 0/1 Adam: anchor, in compat mode momentum_accumulator; 1-bit LAMB:
 * exp_avg_sq_fresh; mask), then of the optimizer (1-bit family: worker_error and server_error as in dsopt_compressed,
 * active: I32, a bit an element whose variance is not 0, with MOMENTUM_BITS exp_avg_bits: I32, the rows of the last
 * exchange, never in files, schedule: I32, 8 words; 0/1 Adam lr_sum: a double a group as
 * I32 words; 1-bit LAMB trust_average, trust_factor and trust_scaling: F32, one a parameter, exp_avg_pad; with a scaler
 * loss_scale: F32, one, and scaler: I32, 12 words; trust_ratio where a group is LAMB: F32, one a parameter; step: I32,
 * one a parameter). Export writes errors as what is owed, followed by scales of 0. Each is there only where it is used.
 * loss_scale and scaler are the attached scaler's own memory. Names, sizes and order are known from the groups, before
 * the first step and without memory: a framework can allocate the list, keep it in its own checkpoints, and pass it to
 * apply or bind it. State tensors are F32, but in compat mode with NO_MASTER the moments have the parameter's dtype.
 */
enum {
    DSOPT_STATE_FROM_PARAM = 1, /**< starts as a copy of the parameter (master), otherwise as `fill` in every element */
    DSOPT_STATE_RANK_LOCAL = 2  /**< differs between data-parallel ranks */
};
typedef struct dsopt_state_info {
    size_t size;
    const char *name;    /**< "exp_avg", "step", ...; static storage */
    int64_t param;       /**< parameter index; -1: of the whole optimizer */
    dsopt_tensor tensor; /**< dtype and numel; data: where it is now, NULL while not allocated or bound */
    double fill;
    uint32_t flags; /**< DSOPT_STATE_... */
    uint32_t reserved;
} dsopt_state_info;

/** Length of the list. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_state_count(const dsopt_optimizer *opt, int64_t *count);
/** One entry; `info->size` must be set. @return DSOPT_OK; DSOPT_ERR_ARGUMENT: index. Thread-safety: any number of
 * readers. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_state(const dsopt_optimizer *opt, int64_t index,
                                                         dsopt_state_info *info);
/**
 * Copy one entry to host memory of exactly numel * size bytes. Before the first step this allocates and gives the
 * starting values.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE: bytes; DSOPT_ERR_STATE: a master whose parameter has no memory yet.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_export(dsopt_optimizer *opt, int64_t index, void *host,
                                                          size_t bytes);
/** The reverse. @return as dsopt_optimizer_export. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_import(dsopt_optimizer *opt, int64_t index, const void *host,
                                                          size_t bytes);

enum { DSOPT_BIND_PARAMS = 1, DSOPT_BIND_STATE = 2 };
/**
 * Say where parameters or state are from now on; dtype and numel as registered. State entries with NULL data stay with
 * the engine. Contents are neither copied nor changed: bound state must hold its values (`fill`, or a saved state).
 * Bind anew after writing other values to it: of a device's schedule (1-bit family) the host keeps count. Borrowed
 * until then.
 * @return DSOPT_OK; _SHAPE, _DTYPE, _ALIGNMENT, _OVERLAP, each naming the tensor.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_bind(dsopt_optimizer *opt, int32_t what, const dsopt_tensor *list,
                                                        int64_t count);

enum {
    DSOPT_RESET_MASTERS = 1, /**< from the parameters, after new weights were loaded (refresh_fp32_params) */
    DSOPT_RESET_MOMENTS = 2,
    DSOPT_RESET_COUNTERS = 4,
    DSOPT_RESET_GRADS = 8,  /**< accumulators */
    DSOPT_RESET_ERRORS = 16 /**< error feedback of the 1-bit family */
};
/** Give the named parts (an OR) their starting values, in stream order. @return DSOPT_OK; DSOPT_ERR_ARGUMENT;
 * DSOPT_ERR_STATE. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_reset(dsopt_optimizer *opt, uint32_t what, void *stream);

/* --------------------------------------------------------------------------------------------------------------- step
 */
enum {
    DSOPT_STEP_ZERO_GRADS = 1, /**< set gradients to zero in the same pass, also when the step is skipped */
    DSOPT_STEP_OUT_ONLY =
        2, /**< do not write params: the new values go to `out` alone, which must then name every parameter. Refused, as
              DELTA, for parameters of 0/1 Adam without a master: its local steps add up in them */
    DSOPT_STEP_ACCUMULATED =
        8, /**< gradients are those of dsopt_optimizer_accumulate; `grads` is NULL; accumulators are zeroed */
    DSOPT_STEP_DELTA =
        4 /**< as OUT_ONLY, and `out` gets new - old, zeros when skipped. Refused for parameters with a master */
};
enum { DSOPT_REPORT_FLOATS = 16 };
/** Places in dsopt_step.report; the others are 0. Norms are of unscaled gradients before clipping, NaN if not computed.
 */
enum {
    DSOPT_REPORT_SKIPPED = 0, /**< 1 if this step was skipped */
    DSOPT_REPORT_GRAD_NORM = 1,
    DSOPT_REPORT_WEIGHT_NORM = 2, /**< before the step, with REPORT_NORMS */
    DSOPT_REPORT_UPDATE_NORM = 3, /**< |new - old|, with REPORT_NORMS */
    DSOPT_REPORT_NONFINITE = 4,   /**< number of Inf and NaN elements found, 0 if not looked for */
    DSOPT_REPORT_FIRST_BAD = 5,   /**< index of the first parameter with one, -1 = none */
    DSOPT_REPORT_DIVISOR = 6,     /**< what gradients were divided by: scale and clipping; of group 0 if groups clip by
                                   themselves; 0 if skipped */
    DSOPT_REPORT_SCALE_USED = 7,  /**< loss scale that the gradients carried, 1 without */
    DSOPT_REPORT_SCALE_NEXT = 8,  /**< loss scale for the next backward pass */
    DSOPT_REPORT_EXPERT_NORM = 9, /**< the experts' part of the norm, over all their ranks */
    DSOPT_REPORT_SKIPPED_IN_ROW = 10 /**< by the scaler's count, 0 without */
};

/** Arguments of one step. Only `grads` and `count` are always needed. Lists have `count` = all parameters, in order. */
typedef struct dsopt_step {
    size_t size;
    const dsopt_tensor *grads; /**< F32, F16 or BF16, free per tensor; data NULL = no gradient: the tensor and its
                                  counter are left alone */
    int64_t count;
    const dsopt_tensor *params; /**< NULL = where they are bound. In `apply`: required */
    const dsopt_tensor
        *out; /**< optional: new weights rounded to the entry's dtype; data NULL = not wanted. Also written when the
                 step is skipped or the gradient absent (then the unchanged weight). May be the parameter's memory */
    const dsopt_tensor
        *state; /**< NULL = where it is bound. In `apply`: required, all entries in list order, data never NULL */
    int64_t state_count;
    /* In backend memory, read when the stream gets there; NULL = the value set on the host. */
    const float *lr; /**< one per group */
    const float
        *grad_scale;     /**< gradients are this much too large, beside the attached scaler's scale, and get divided by
                            both: the number of accumulated micro-batches, or a scale that the caller keeps; NULL = 1 */
    const int32_t *skip; /**< nonzero = write nothing but out, report and zeroed gradients; counters stay. To the scaler
                            it is an overflow, as is every reason to skip */
    const float
        *grad_norms; /**< one per group: L2 norms of the gradients as given (scaled), which saves reading them for the
                        norm; negative or not finite = overflow, the step is skipped unless the policy is APPLY */
    float *report;   /**< out, DSOPT_REPORT_FLOATS floats */
    void *workspace; /**< `apply`: backend memory, 256-byte aligned; `step`: NULL, the engine has its own */
    size_t workspace_bytes;
    void *stream;
    dsopt_parallel_for parallel_for; /**< thread pool of this call (CPU backend) */
    void *parallel_user;
    uint32_t flags; /**< DSOPT_STEP_... */
    uint32_t reserved;
} dsopt_step;

/**
 * Update every parameter that has a gradient, once. Checks the lists, then enqueues on `stream` and returns before the
 * device is done. All or nothing: on failure nothing is enqueued and nothing changed. If the step turns out to be
 * skipped (non-finite gradients here or on another rank, norm not finite, `skip`) parameters, state and counters stay;
 * `out`, `report`, ZERO_GRADS and the scaler still happen. The first call allocates, later ones do not. Gradients that
 * overlap each other or parameters are not looked for here. CUDA: launches are the same from step to step and
 * capturable in a CUDA graph once one plain step has been taken. A graph keeps lists and host-side values (lr set with
 * dsopt_optimizer_set, max_norm) as they were at its capture; device scalars are read at every replay. While a stream
 * is being captured the lists must be those of the last plain step or differ in few pointers (DSOPT_ERR_STATE), the
 * counters of dsopt_report come from the device, and `calls` counts calls of this function, not replays. The 1-bit
 * family cannot be captured (DSOPT_ERR_STATE): the host chooses the stage of a step. It keeps count and does not wait,
 * but in compat mode, where only the device knows whether the last step was taken, and where `state` or apply bring
 * the schedule. Write to the engine's schedule with dsopt_optimizer_import alone.
 * @return DSOPT_OK; _SHAPE, _DTYPE, _ALIGNMENT, _DEVICE, each naming the tensor; _UNSUPPORTED; _STATE: no memory bound
 * for a parameter, or a capture as above; _SKIPS; _MISMATCH: see CHECK_RANKS; _BACKEND; _COMM, _TIMEOUT, _ABORTED:
 * parameters and state are unchanged (but see DSOPT_COMM_FLAG_ENQUEUE), the comms are lost. In an exchange of the 1-bit
 * family that fails once it has begun only the compressed parameters (but 0/1 Adam's, which have taken their own step)
 * and their moments are unchanged, not errors, counters and other groups: go on from a checkpoint.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_step(dsopt_optimizer *opt, const dsopt_step *step);

/**
 * The same as a pure function: reads and writes only what `step` names. Nothing is remembered, allocated or
 * synchronised, but that the host reads the schedule of the 1-bit family.
 * @return as dsopt_optimizer_step; DSOPT_ERR_WORKSPACE. Thread-safety: any number of threads at once, on memory that
 * differs.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_apply(const dsopt_optimizer *opt, const dsopt_step *step);

/**
 * Add gradients to the accumulators: grad_accum += g, in fp32, as given. The step with DSOPT_STEP_ACCUMULATED uses and
 * zeroes them; a parameter that got nothing since the last such step has no gradient then. Not taken back if that step
 * is skipped.
 * @param[in] grads  F32, F16 or BF16; data NULL = nothing to add. count = all parameters.
 * @return DSOPT_OK; _SHAPE, _DTYPE, _ALIGNMENT; DSOPT_ERR_UNSUPPORTED: not made with DSOPT_OPTIMIZER_ACCUMULATE.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_accumulate(dsopt_optimizer *opt, const dsopt_tensor *grads,
                                                              int64_t count, void *stream);

/** Bytes of workspace that `apply` needs. Changes only with add_group. Thread-safety: any number of readers. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_workspace(const dsopt_optimizer *opt, size_t *bytes);

enum {
    DSOPT_REDUCTION_FULL = 1,       /**< gradients must be averaged over the data-parallel ranks before the step */
    DSOPT_REDUCTION_COMPRESSED = 2, /**< leave them local: the step exchanges one bit an element */
    DSOPT_REDUCTION_LOCAL = 3       /**< leave them local: the step sends nothing */
};
/**
 * What happens to the gradients of a call, so that it is known before backward. Without the 1-bit family: FULL.
 * @param[in] call  1, 2, ...: calls count whether skipped or not, so the answer is a pure function; 0 = the next call.
 * In compat mode only 0: there skipped calls do not count.
 * @return DSOPT_OK; DSOPT_ERR_STATE: no groups; DSOPT_ERR_UNSUPPORTED: a number in compat mode. Thread-safety: as
 * dsopt_optimizer_step if call is 0, else any.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_next_reduction(dsopt_optimizer *opt, int64_t call,
                                                                  int32_t *reduction);

/** Places in dsopt_report.ms, under the original's timer names. What needs no phase of its own here is 0. */
enum {
    DSOPT_MS_OVERFLOW_CHECK = 0,   /**< pass 1: finite check and squares in one read of the gradients */
    DSOPT_MS_COMPUTE_NORM = 1,     /**< adding up leaves and ranks */
    DSOPT_MS_UNSCALE_AND_CLIP = 2, /**< the divisor; the division is part of basic_step */
    DSOPT_MS_BASIC_STEP = 3,       /**< pass 2, which also writes 16-bit parameters */
    DSOPT_MS_UPDATE_FP16 = 4,      /**< 0: see basic_step */
    /* Of steps with an exchange, and not part of basic_step: */
    DSOPT_MS_COMPRESS = 5,  /**< own values to bits */
    DSOPT_MS_EXCHANGE = 6,  /**< the collectives, and what the rank does between them */
    DSOPT_MS_DECOMPRESS = 7 /**< bits to means, and with them the update */
};
typedef struct dsopt_report {
    size_t size;
    int64_t calls, skipped, skipped_in_row;     /**< of dsopt_optimizer_step */
    int64_t nonfinite;                          /**< Inf and NaN elements found in the last call, on this rank */
    int64_t first_bad;                          /**< first parameter with one in the last call, -1 = none */
    const char *first_bad_name;                 /**< its name, owned by the optimizer; NULL = none */
    int32_t last_skipped;                       /**< 1 if the last call was skipped */
    int32_t kind;                               /**< what was found in the first bad tensor: 0 nothing, 1 Inf, 2 NaN */
    double loss_scale;                          /**< for the next backward pass; 1 without scaler */
    double scale_used;                          /**< that the gradients of the last call carried */
    double grad_norm, weight_norm, update_norm; /**< of the last call, as DSOPT_R_...; NaN if not computed */
    double dense_norm, expert_norm;             /**< parts of grad_norm: grad_norm^2 = dense_norm^2 + expert_norm^2 */
    double divisor;                             /**< as DSOPT_REPORT_DIVISOR */
    double ms[8]; /**< milliseconds of the last call, DSOPT_MS_...; with DSOPT_OPTIMIZER_TIMING */
    int64_t state_bytes, workspace_bytes;
    int32_t resharded_from; /**< number of ranks that saved what was last loaded, if it is another one than now; 0 */
    int32_t reserved;
} dsopt_report;
/** What happened; `report->size` must be set. Waits for the last step of this optimizer; stepping itself never waits.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_report(dsopt_optimizer *opt, dsopt_report *report);

/* ------------------------------------------------------------------------------------------------------ save and load
 */
enum {
    DSOPT_IO_NO_STATE = 1,     /**< load: leave moments and counters */
    DSOPT_IO_NO_MASTERS = 2,   /**< load: leave saved masters out and make them from the parameters */
    DSOPT_IO_NO_HYPER = 4,     /**< load: keep the hyper-parameters that are set now */
    DSOPT_IO_NO_SCALER = 16,   /**< load: keep the loss scale and its counters */
    DSOPT_IO_PARAMS = 8,       /**< save and load the parameters as well */
    DSOPT_IO_RESET_ERRORS = 32 /**< load: error feedback of the 1-bit family starts anew, whoever saved it */
};
/** Where bytes go when not to a file, and where those of several ranks are. Functions return 0 or an error number. */
typedef struct dsopt_io {
    size_t size;
    uint32_t flags; /**< DSOPT_IO_... */
    uint32_t reserved;
    void *user;
    int (*write)(void *user, const void *data, size_t bytes);           /**< save: in order, from offset 0 */
    int (*read)(void *user, uint64_t offset, void *data, size_t bytes); /**< load: any order */
    uint64_t total;                                                     /**< load: length of what `read` reads */
    /** load: this many files, one of each rank that saved, in any order: what another number of ranks needs. 0 = one */
    int32_t files;
    int32_t reserved2;
    const char *const *paths; /**< with `files`: their paths; or NULL, and with `read`: */
    void *const *users;       /**< its first argument for each, and */
    const uint64_t *totals;   /**< their lengths */
} dsopt_io;
/**
 * Write a checkpoint: safetensors, one tensor "<param>.<state>" a state entry ("optimizer.<state>" for those of the
 * whole optimizer;
 * "<param>.param" with DSOPT_IO_PARAMS), algorithm, hyper-parameters and an XXH3-128 checksum a tensor in the metadata.
 * To a file: under a temporary name, flushed, renamed, directory flushed, so that a crash leaves the old file or the
 * new one.
 * @param[in] path  NULL = to `io->write`. @param[in] io  NULL = defaults.
 * @return DSOPT_OK; DSOPT_ERR_IO, with an existing file unharmed; DSOPT_ERR_STATE: no groups.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_save(dsopt_optimizer *opt, const char *path, const dsopt_io *io);
/**
 * Read one. Everything, checksums included, is checked before anything changes.
 *
 * Data-parallel ranks save a file each; most of it is the same in all. With the 1-bit family each loads its own
 * and goes on with the same bits. Another number of ranks hands the files of all that saved to every rank
 * (dsopt_io.files): weights, moments, counters and schedule are those of the files, which must agree in them (their
 * checksums are compared); worker_error is the mean over the ranks that saved (in double, rounded once), the same on
 * every new rank; server_error, of which each had one chunk, is joined and cut into the new chunks. One rank has no
 * errors, nor have those of one node: they are dropped, or begin with zeros. With node comms a slice of worker_error is
 * the mean over the nodes, and as many ranks in other nodes are another number. Compat mode drops them, as the original
 * does. dsopt_report and the log (INFO) tell. Refused (_MISMATCH): sets of files that are not all of one save; 0/1 Adam
 * saved between two synchronisations (in compat mode after the freeze: roundings leave its ranks apart), and gradients
 * in accumulators, which only the same number of ranks can go on with. With as many ranks as saved a list is legal too:
 * each takes its own file from it.
 * @return DSOPT_OK; _IO; _FORMAT, _CHECKSUM, _MISMATCH: the text names the tensor or field.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_load(dsopt_optimizer *opt, const char *path, const dsopt_io *io);

/* ---------------------------------------------------------------------------------------- lists without an optimizer
 */
enum {
    DSOPT_ZERO_FILL = 0, /**< every element becomes zero, in stream order */
    DSOPT_ZERO_NONE =
        1 /**< memory is not touched: `data` of every entry becomes NULL, "no gradient" for the next step */
};
/**
 * Zero-grad of a list. Entries without data are passed over.
 * @return DSOPT_OK; _SHAPE, _DTYPE, _ALIGNMENT with nothing changed. Thread-safety: any, on lists that differ.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_zero_grad(dsopt_context *ctx, dsopt_tensor *grads, int64_t count, int32_t how,
                                                   void *stream);

enum { DSOPT_NORM_L2 = 0, DSOPT_NORM_MAX = 1 };
/** What dsopt_tensors_norm finds, in backend memory. */
typedef struct dsopt_norm_result {
    double norm; /**< L2: squares and sums in double, leaves of 4,096 in order; MAX: largest magnitude, NaN if there is
                    one */
    float coefficient; /**< what to multiply by to clip: min(1, max_norm / (norm + 1e-6)); 1 if max_norm is 0 */
    int32_t reserved;
    int64_t nonfinite; /**< number of Inf and NaN elements */
    int64_t first_bad; /**< first tensor with one, -1 = none */
} dsopt_norm_result;
/**
 * Norm and finite check of any list in one read. Entries without data are passed over, here and below.
 * @param[in]  comm    optional: the norm over all its ranks; nonfinite then too, first_bad stays local.
 * @param[out] result  backend memory, in stream order.
 * @return DSOPT_OK; _SHAPE, _DTYPE, _ALIGNMENT; _COMM, _TIMEOUT, _ABORTED. Thread-safety: any, on lists that differ.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_tensors_norm(dsopt_context *ctx, const dsopt_tensor *list, int64_t count,
                                                      int32_t norm, double max_norm, dsopt_comm *comm,
                                                      dsopt_norm_result *result, void *stream);
/**
 * y = a * x + b * y, element-wise, between any two of the float dtypes, in fp32: clip (x = y, a = coefficient, b = 0),
 * scale, convert (b = 0), accumulate 16-bit gradients into fp32 (b = 1). y is not read when b = 0.
 * @param[in] a  in backend memory; NULL = 1. @param[in] x, y  `count` entries each, the same numel; equal or disjoint
 * memory.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_tensors_axpby(dsopt_context *ctx, const float *a, const dsopt_tensor *x,
                                                       float b, const dsopt_tensor *y, int64_t count, void *stream);
/** Clip every element to [-limit, limit]; NaN stays. @param[in] limit  > 0. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_tensors_clamp(dsopt_context *ctx, const dsopt_tensor *list, int64_t count,
                                                       double limit, void *stream);

/**
 * Error-compensated 1-bit mean over the ranks of a comm: one bit an element each way, two collectives for the whole
 * list. Every rank adds what it still owes from earlier calls, sends signs and one scale (root mean square) a tensor,
 * the rank that serves a chunk averages them, adds what it owes itself, and sends signs and scales of the mean to all,
 * so results are the same bits on every rank. (Tang et al. 2021, 1-bit Adam; DeepSpeed's compressed_allreduce.) Zeros
 * and NaN count as positive. A NaN or Inf spoils the buffers for good: look for them before.
 *
 * Two levels, with `node`: every rank of a node first takes the exact mean of one slice of the list over that node; the
 * slice goes as above between the ranks that have it, one a node, which are those of the comm; the bits of all slices
 * then go around in the node. What leaves a node falls by its number of ranks, and so does a worker's buffer. Inside
 * the node an element takes 4 bytes there and a bit back, and a rank needs 8 bytes of workspace an element. With one
 * node nothing leaves it and nothing is compressed: the mean is exact, both buffers have size 0.
 */
typedef struct dsopt_compressed {
    size_t size;
    const dsopt_tensor *tensors; /**< F32; overwritten with the mean. The same sizes on all ranks */
    int64_t count;
    /** Kept by the caller from call to call, in backend memory, zeros at the start; sizes in floats from
     * dsopt_compressed_sizes. They hold sums and scales, from which the errors follow (dsopt_compressed_errors). */
    float *worker_error;
    float *server_error;
    void *workspace; /**< backend memory, 256-byte aligned; nothing is kept in it */
    size_t workspace_bytes;
    void *stream;
    int32_t compat; /**< STANDARD: one scale a tensor and chunk, padding takes no part. COMPAT_DEEPSPEED: every tensor
                       is padded to a multiple of ranks * lcm(ranks, 8) elements, which count and owe like the others */
    int32_t reserved;
    dsopt_comm *node; /**< optional: the ranks of this node, as many in each; the ranks of the comm, one a node, must
                         all have the same rank here. One rank is as none. Refused in compat mode */
} dsopt_compressed;
/**
 * Sizes for a list: of worker_error and server_error in floats, of the workspace in bytes; each may be NULL. Reads
 * tensors (data not needed), count, compat and node. A buffer has its elements first and its scales behind them; a
 * worker's are `count` scales, and its elements as many as a server's times the ranks of the comm.
 * @return DSOPT_OK; _SHAPE, _DTYPE, _ARGUMENT. Thread-safety: any.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_compressed_sizes(const dsopt_comm *comm, const dsopt_compressed *args,
                                                          int64_t *worker, int64_t *server, size_t *workspace);
/**
 * Collective: every rank calls it with the same list. On failure of a comm the buffers are spoilt.
 * @return DSOPT_OK; _SHAPE, _DTYPE, _ARGUMENT, _ALIGNMENT, _WORKSPACE with nothing changed; _COMM, _TIMEOUT, _ABORTED;
 * _UNSUPPORTED: the backend or the comm cannot. Thread-safety: one thread a comm.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_compressed_allreduce(dsopt_comm *comm, const dsopt_compressed *args);
/**
 * What a worker and a server still owe: one float an element, without the scales, into host memory; NULL = not wanted.
 * Of two levels a worker has its own slice.
 * Waits for the stream. @return as dsopt_compressed_allreduce. Thread-safety: any.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_compressed_errors(const dsopt_comm *comm, const dsopt_compressed *args,
                                                           float *worker, float *server);

#ifdef __cplusplus
}
#endif
#endif
