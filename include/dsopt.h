/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSOPT_H
#define DSOPT_H
/**
 * dsopt: the optimizer side of training behind one C header.
 *
 * The shortest useful program (error checks omitted):
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
 * There are two ways to step. Both take the same argument struct:
 *
 *   dsopt_optimizer_step    The optimizer remembers parameters, state and counters. One thread at a time.
 *   dsopt_optimizer_apply   The optimizer is constant. Everything that changes is in tensors of the caller. Any number
 *                           of threads. docs/functional.md describes the functional form.
 *
 * Rules that hold for every function:
 *
 *  - Units. Counts are elements or tensors. Sizes are bytes. Times are milliseconds.
 *  - Memory. "Backend memory" is host memory on the CPU backend, and memory of the context's device on CUDA.
 *  - Streams. `stream` is a cudaStream_t of the context's device; NULL is the legacy default stream. The CPU backend
 *    ignores it: the work is done when the call returns, except exchanges of dsopt_optimizer_ready. On CUDA all work
 *    runs in the primary context of the device, which the CUDA runtime uses too, whatever context is current in the
 *    calling thread. A stream of another device or context is refused with DSOPT_ERR_DEVICE and changes nothing; so is
 *    NULL while another context of that device is current. Streams of green contexts are accepted from driver 12.5 on.
 *  - Waiting. On CUDA a call that "waits for earlier calls" waits for all work that earlier calls on the same object
 *    enqueued, on every stream, and its own work is done when it returns. A scaler and all its optimizers count as one
 *    object. If the call uses tensors, it also waits for the legacy default stream, and returns DSOPT_ERR_STATE if CUDA
 *    forbids that: while another thread captures a stream that was made without cudaStreamNonBlocking. The call does
 *    not wait for kernels of the caller on other streams: synchronise these first if they use the same tensors.
 *    Captures of other threads continue. Once a call on the object was captured, such calls wait for the whole device,
 *    because graphs may be replayed on any stream; that invalidates captures of other threads. docs/graphs.md
 *  - Structs that begin with `size` can grow. Set every byte to zero, set `size`, then set the fields you need. A field
 *    that is 0 or NULL has its default; only dsopt_group is different, and dsopt_group_init fills it. DSOPT_NEW does
 *    both steps in C and C++. A struct shorter than in version 0.2 is refused with DSOPT_ERR_VERSION, and so are
 *    non-zero bytes after the last field that this library knows. A NULL desc means every default. Structs without
 *    `size` are passed in arrays and never change.
 *  - Reserved fields must be 0.
 *  - Integers. Fields and arguments that take a constant of this header are int32_t, and so is every enum: its last
 *    member, *_SIGNED = -1, only makes the type signed for all compilers and generators of bindings.
 *  - Ownership. Pointers in arguments are borrowed for the call, tensor memory until the stream has passed the call.
 *    Exceptions are documented at the function. Tensors of a list that is documented as an input are only read.
 *  - Handles. An object lives until all handles to it, and all objects that were made from it, are destroyed. Handles
 *    may be destroyed in any order. Destroying NULL does nothing. A handle must not be destroyed while another thread
 *    is in a call with that same handle; dsopt_optimizer_retain makes a handle for each owner.
 *  - Failure. Every function that can fail returns a dsopt_status; dsopt_last_error returns the reason as text. A
 *    failed call changes nothing, outputs included. Exceptions are documented at the function.
 *  - An option that would have no effect is refused with DSOPT_ERR_UNSUPPORTED.
 *  - Every function can also return DSOPT_ERR_ARGUMENT, _VERSION, _NOMEM, _BUSY, _FORKED, _HOOK and _INTERNAL, and with
 *    a stream DSOPT_ERR_DEVICE.
 *  - Threads. Calls on different objects may run at the same time. An object allows one call at a time, except where
 *    "Thread-safety" says otherwise; a second call on an optimizer returns DSOPT_ERR_BUSY. Stepping an optimizer is
 *    also a call on its scaler and on its comms. Any number of threads may use a context.
 *  - Hooks are the caller's functions in dsopt_context_desc, dsopt_step, dsopt_comm_table and dsopt_io. A hook must
 *    return: no longjmp, no pthread_exit, and no exception except where the hook's documentation defines the effect. It
 *    must not destroy a handle that was passed to the running call. It may make every call that another thread may make
 *    at that time: calls on the optimizer of the running call return DSOPT_ERR_BUSY, and its comms allow
 *    dsopt_comm_query and dsopt_comm_abort only.
 *  - pthread_cancel. The running call completes first, so objects stay usable; its status is lost. Functions with a
 *    dsopt_status are cancellation points, at their end; other functions are not. Hooks run with cancellation disabled
 *    and must not enable it. A call that waits for other ranks ends by dsopt_comm_abort or by its time-out.
 *  - fork(). In the child, objects made before the fork can only be destroyed; every other call returns
 *    DSOPT_ERR_FORKED. Destroying still calls `release` of the context and `destroy` of a comm table. The child may
 *    create new contexts, whatever other threads of the parent were doing in dsopt. It starts new library threads. An
 *    id of dsopt_comm_unique_id with DSOPT_COMM_KIND_LOCAL does not connect parent and child.
 *  - Library threads. CPU work runs on the calling thread and on threads of the library, started by the first call that
 *    needs them. They spin for at most 50 us after their work, then sleep, and live as long as the process. The thread
 *    that exchanges buckets (dsopt_optimizer_ready) sleeps between them and ends with its optimizer. All of them block
 *    all signals except SIGPROF and synchronous ones such as SIGSEGV, and inherit the CPU affinity of the thread that
 *    starts them. Their name is "dsopt". Concurrent calls use different threads. If a thread cannot be started, or is
 *    not scheduled in time, the calling thread does that work, with the same results.
 *  - Results. An element-wise step gives the same bits on every backend and instruction set, for any number of threads
 *    and for any order and packing of the lists. Norms give the same bits on every backend and instruction set and for
 *    any number of threads. Denormals are not flushed. Arithmetic is fp32 for all storage dtypes; multiply and add
 *    round separately.
 *    Muon: on the CPU the same bits on every instruction set, for any number of threads and ranks and any order and
 *    packing of the lists. On CUDA products come from cuBLASLt: the same bits from step to step for one library, device
 *    and list; against the CPU and between devices an orthogonalised matrix differs from the exact iteration by less
 *    than 4e-2 (BF16), 6e-3 (F16), 5e-5 (F32) of its norm, if its rank is 1 by less than 0.15, 2.5e-2, 5e-4
 *    (docs/muon.md). Momentum, norms, counters and all other groups keep the promises above.
 *  - Since: 0.1, unless a line says otherwise. Nothing is frozen before 1.0.
 */
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------- visibility and version */
#if defined(__GNUC__)
#define DSOPT_API __attribute__((visibility("default")))
#define DSOPT_CHECK __attribute__((warn_unused_result))
#else
#define DSOPT_API
#define DSOPT_CHECK
#endif

#define DSOPT_VERSION_MAJOR 0
#define DSOPT_VERSION_MINOR 3
#define DSOPT_VERSION_PATCH 0
#define DSOPT_ABI_VERSION 2

/**
 * `DSOPT_NEW(dsopt_step, step);` declares the variable `step`, zeroed and with its size set.
 * In C++ it is two statements: it cannot be a class member or const. Other languages zero the struct and set `size`.
 */
#ifdef __cplusplus
#define DSOPT_NEW(type, name)                                                                                          \
    type name = type();                                                                                                \
    name.size = sizeof(type)
#else
#define DSOPT_NEW(type, name) type name = {.size = sizeof(type)}
#endif

/** Version of the loaded library: major * 10000 + minor * 100 + patch. Cannot fail. Thread-safety: any. */
DSOPT_API int32_t dsopt_version(void);

/**
 * DSOPT_ABI_VERSION of the loaded library. Header and library are compatible if their numbers are equal. Cannot fail.
 * Thread-safety: any.
 */
DSOPT_API int32_t dsopt_abi_version(void);

/**
 * Description of the loaded library as a JSON object: "version", "abi", "compiler", "backends" and "comms" that are
 * built in and usable on this machine, "cuda" ("cuda", "no device" or "not in this build"), "cuda_reason" (why no
 * device can be used, absent if one can), "cuda_code" (compute capabilities of devices that the build has code for),
 * "cuda_runtime" and "cuda_driver" (versions of CUDA, absent without one), "cuda_devices" (the compute capability of
 * each device, absent without one), "nccl" and "hccl" (states of these libraries; none is loaded), "isa" (the CPU
 * instruction set in use), "isa_unknown" (the value of DSOPT_ISA, only if it is not an instruction set), "threads",
 * "checkpoint_format". In a build with CUDA the call counts the devices, which starts the CUDA driver: a child of a
 * later fork() then cannot use CUDA. Other functions start the driver only for contexts of DSOPT_BACKEND_CUDA.
 * @return static storage, "{}" if out of memory. Thread-safety: any.
 */
DSOPT_API const char *dsopt_build_info(void);

/* ----------------------------------------------------------------------------------------------------------- status */
/** The result of a call: one of enum dsopt_status_code. */
typedef int32_t dsopt_status;

enum dsopt_status_code {
    DSOPT_OK = 0,
    /* Invalid calls. */
    /** An argument is null, negative, out of range or not finite. The text names the argument, field or tensor. */
    DSOPT_ERR_ARGUMENT = 10,
    /** A count or numel differs from what was registered, or numel * size overflows. */
    DSOPT_ERR_SHAPE = 11,
    /** The dtype is unknown to this build, or wrong for this list. */
    DSOPT_ERR_DTYPE = 12,
    /** A pointer is not aligned to its element. */
    DSOPT_ERR_ALIGNMENT = 13,
    /** Two tensors share bytes. */
    DSOPT_ERR_OVERLAP = 14,
    /** A stream of another device or CUDA context. With DSOPT_CONTEXT_CHECK_POINTERS also memory of another device, or
     * host memory. */
    DSOPT_ERR_DEVICE = 15,
    /** The workspace is missing or too small. The text says how many bytes are needed. */
    DSOPT_ERR_WORKSPACE = 16,
    /** A struct is shorter than in version 0.2, or has non-zero fields that this library does not know. */
    DSOPT_ERR_VERSION = 17,
    /** Not possible in this combination or build, or without effect. The text names the option. */
    DSOPT_ERR_UNSUPPORTED = 18,
    /** Not possible now: for example no groups yet, or a parameter has no memory. */
    DSOPT_ERR_STATE = 19,
    /** The object is in use by another thread, or by the call from which a hook calls: try again. Or gradients of an
     * optimizer that uses the comm are ready: end its step first. */
    DSOPT_ERR_BUSY = 20,
    /** The object was made before fork(): in the child it can only be destroyed. */
    DSOPT_ERR_FORKED = 21,
    /** The skip budget is used up: that many steps in a row were skipped. */
    DSOPT_ERR_SKIPS = 22,
    /** `parallel_for` did not run every index exactly once, or threw. Weights, state, counters and outputs of the call
     * are then partly undefined: load a checkpoint. The objects stay usable. Other ranks may wait in a collective of
     * that call: abort its comms instead of repeating the call. Since: 0.2 */
    DSOPT_ERR_HOOK = 23,
    /* Failures of the system. */
    /** Out of host or backend memory. */
    DSOPT_ERR_NOMEM = 30,
    /** A driver or library that the call needs is not on this machine. */
    DSOPT_ERR_MISSING = 31,
    /** Opening, reading, writing, flushing or renaming failed. The text has the system's reason. */
    DSOPT_ERR_IO = 32,
    /** A bug in dsopt. */
    DSOPT_ERR_INTERNAL = 33,
    /** The device or its driver failed. The text has the driver's reason. */
    DSOPT_ERR_BACKEND = 34,
    /* Communication. The comm is unusable: each later call on it returns the same status. */
    /** A collective failed. The text has the provider's reason. */
    DSOPT_ERR_COMM = 50,
    /** A peer did not join a collective within the comm's time-out. */
    DSOPT_ERR_TIMEOUT = 51,
    /** dsopt_comm_abort was called. */
    DSOPT_ERR_ABORTED = 52,
    /* Files. */
    /** Not a dsopt checkpoint, or its header is damaged. */
    DSOPT_ERR_FORMAT = 70,
    /** Tensor data do not match their checksum. */
    DSOPT_ERR_CHECKSUM = 71,
    /** Algorithm, names, dtypes or sizes differ from this optimizer's, or lists and options of ranks from one another
     * (DSOPT_OPTIMIZER_CHECK_RANKS). */
    DSOPT_ERR_MISMATCH = 72,
    DSOPT_ERR_SIGNED = -1
};

/**
 * Name of a status, such as "DSOPT_ERR_SHAPE"; "unknown status" for other numbers. Static storage. Thread-safety: any.
 */
DSOPT_API const char *dsopt_status_name(dsopt_status status);

/**
 * Reason of the last failure in the calling thread. "" if there was none, never NULL.
 * @return valid until the thread's next failing call of this library. Thread-safety: any.
 */
DSOPT_API const char *dsopt_last_error(void);

/* ----------------------------------------------------------------------------------------------- dtypes and tensors */
enum dsopt_dtype {
    DSOPT_DTYPE_F32 = 1,
    DSOPT_DTYPE_F16 = 2,
    DSOPT_DTYPE_BF16 = 3,
    /** Integer state tensors. */
    DSOPT_DTYPE_I32 = 4,
    /** Only as an argument of dsopt_comm_table.all_reduce: no tensor has this dtype. */
    DSOPT_DTYPE_F64 = 5,
    /** State tensors: the remainders of masters. Since: 0.3 */
    DSOPT_DTYPE_I16 = 6,
    /** State tensors: codes of DSOPT_MOMENT_Q8. Since: 0.3 */
    DSOPT_DTYPE_U8 = 7,
    /** State tensors: OCP FP8 E4M3 (no infinity, largest value 448), the codes of DSOPT_MOMENT_E4M3. Since: 0.3 */
    DSOPT_DTYPE_F8_E4M3 = 8,
    DSOPT_DTYPE_SIGNED = -1
};

/**
 * A dense array in backend memory. An empty tensor (numel 0, data NULL) is legal in every list.
 * In a list of gradients, NULL data means that the parameter has no gradient in this call.
 */
typedef struct dsopt_tensor {
    /** Aligned to its element. Not written to if the tensor is an input. */
    void *data;
    /** Number of elements. */
    int64_t numel;
    /** enum dsopt_dtype. */
    int32_t dtype;
    int32_t reserved;
} dsopt_tensor;

/* ---------------------------------------------------------------------------------------------------------- handles */
/** Backend, device and hooks. Any number of threads may use it. */
typedef struct dsopt_context dsopt_context;
/** Groups, parameters and their state. */
typedef struct dsopt_optimizer dsopt_optimizer;
/** A loss scale. Several optimizers may share it. */
typedef struct dsopt_scaler dsopt_scaler;
/** One rank's handle to a group of ranks that communicate. */
typedef struct dsopt_comm dsopt_comm;

/* ---------------------------------------------------------------------------------------------------------- context */
enum dsopt_backend { DSOPT_BACKEND_CPU = 0, DSOPT_BACKEND_CUDA = 1, DSOPT_BACKEND_SIGNED = -1 };

enum dsopt_log_level {
    DSOPT_LOG_ERROR = 1,
    DSOPT_LOG_WARN = 2,
    DSOPT_LOG_INFO = 3,
    /** Also the phases of a step, in order: before the first step and whenever they change (docs/one-step.md). */
    DSOPT_LOG_TRACE = 4,
    DSOPT_LOG_SIGNED = -1
};

enum dsopt_context_flags {
    /** CUDA, for debugging: each step checks the device of each pointer. Memory of another device or of the host gives
     * DSOPT_ERR_DEVICE. Costs one driver call per pointer. */
    DSOPT_CONTEXT_CHECK_POINTERS = 1,
    DSOPT_CONTEXT_SIGNED = -1
};

/**
 * A thread pool: runs `body(arg, i)` exactly once for every i in [0, n), in any order and on any thread, and returns
 * when all calls of `body` have returned. The calling thread should run some of the calls: otherwise a pool whose
 * threads all wait inside dsopt deadlocks. If the function returns too early, runs an index twice, or throws, the call
 * into dsopt returns DSOPT_ERR_HOOK. Calling `body` after the return is undefined behaviour. `body` and calls of dsopt on
 * the CPU need 64 KiB of stack.
 */
typedef void (*dsopt_parallel_for)(void *user, int64_t n, void (*body)(void *arg, int64_t i), void *arg);

/**
 * Every field is optional. `allocate`, `release`, `parallel_for` and `log` are called only by threads that are inside a
 * dsopt call with this context, or with an object made from it; never by threads that dsopt started.
 */
typedef struct dsopt_context_desc {
    size_t size;
    /** enum dsopt_backend. */
    int32_t backend;
    /** CUDA ordinal; 0 on the CPU. */
    int32_t device;
    /** Number of work items per step, and of threads that run them, calling thread included. 0 = the environment
     * variable OMP_NUM_THREADS, else the number of processors on which the calling thread may run; at most
     * OMP_THREAD_LIMIT. Both are read when the context is created. */
    int32_t threads;
    /** Highest level passed to `log`. 0 = the environment's DSOPT_LOG (error, warn, info, trace), else warn. */
    int32_t log_level;
    /** Backend memory, at least 64-byte aligned. Returns NULL when out of memory. */
    void *(*allocate)(void *user, size_t bytes, size_t alignment, void *stream);
    /** Set if and only if `allocate` is set. */
    void (*release)(void *user, void *memory, size_t bytes, void *stream);
    /** Thread pool that replaces the library's threads. dsopt_step.parallel_for replaces it for one call. */
    dsopt_parallel_for parallel_for;
    /** NULL: nothing is ever printed. */
    void (*log)(void *user, int32_t level, const char *text);
    /** First argument of the four hooks. */
    void *user;
    /** Smallest work item in elements: a multiple of 4096, the leaf size of all reductions. 0 = 4096. */
    int64_t chunk;
    /** enum dsopt_context_flags. */
    int32_t flags;
    int32_t reserved;
} dsopt_context_desc;

/**
 * Create a context. The environment's DSOPT_ISA (generic, avx2, avx512, avx512_bf16) limits the CPU instruction set.
 * @param[in]  desc  NULL = CPU with every default.
 * @param[out] ctx   release with dsopt_context_destroy.
 * @return DSOPT_OK; DSOPT_ERR_UNSUPPORTED: the backend is not in this build; DSOPT_ERR_MISSING: no driver or device.
 * Thread-safety: any.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_context_create(const dsopt_context_desc *desc, dsopt_context **ctx);

/** What a context was made with, where dsopt_context_desc leaves a choice. Since: 0.3 */
typedef struct dsopt_context_info {
    size_t size;
    /** enum dsopt_backend. */
    int32_t backend;
    /** CUDA ordinal; 0 on the CPU. */
    int32_t device;
    /** Number of work items per step on the CPU, and of threads that run them, calling thread included; with a
     * parallel_for hook its pool chooses the threads. On CUDA that of calls that work on the host. */
    int32_t threads;
    /** Highest level passed to `log`. */
    int32_t log_level;
} dsopt_context_info;

/** Backend, threads and log level. `info->size` must be set. @return DSOPT_OK; DSOPT_ERR_ARGUMENT: NULL;
 * DSOPT_ERR_VERSION: `info->size`; DSOPT_ERR_FORKED. Thread-safety: any. Since: 0.3 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_context_query(const dsopt_context *ctx, dsopt_context_info *info);

/** Release the handle. Never blocks. */
DSOPT_API void dsopt_context_destroy(dsopt_context *ctx);

/* -------------------------------------------------------------------------------------------- groups and parameters */
/**
 * Algorithms. In the formulas g is the unscaled, clipped gradient, t the step of the tensor, m and v the running means
 * of g and g^2, c1 = 1 - beta1^t, c2 = 1 - beta2^t, wd the weight decay. Factors that depend only on lr, wd, c1 and c2
 * are computed once per step in double and rounded once to fp32.
 */
enum dsopt_algorithm {
    /** Kingma and Ba 2015, decay as L2: g += wd p; p -= lr/c1 m / (sqrt(v) / sqrt(c2) + eps). Compat mode divides
     * before it takes the root: p -= lr (m/c1) / (sqrt(v/c2) + eps). */
    DSOPT_ALGORITHM_ADAM = 2,
    /** Loshchilov and Hutter 2019, decoupled decay: p -= lr/c1 m / (sqrt(v) / sqrt(c2) + eps) + lr wd p. Compat mode:
     * p -= lr ((m/c1) / (sqrt(v/c2) + eps) + wd p). */
    DSOPT_ALGORITHM_ADAMW = 3,
    /** You et al. 2020, as in DeepSpeed's FusedLamb: u = m / (sqrt(v) + eps) + wd p; p -= lr sqrt(c2)/c1 r u.
     * The trust ratio r = clamp(|p| / |u|, min_trust, max_trust) is one number per tensor, and 1 if a norm is 0. For a
     * DSOPT_PARAM_MODEL_PARALLEL tensor both norms are those of the whole tensor, over all model ranks. Compat mode
     * computes one ratio per shard, as the original does. */
    DSOPT_ALGORITHM_LAMB = 4,
    /**
     * The first fused Adam of apex: p -= lr sqrt(c2)/c1 (m / (sqrt(v) + eps) + wd p). eps acts on the uncorrected v.
     */
    DSOPT_ALGORITHM_ADAM_LEGACY = 7,
    /** Stochastic gradient descent as in torch.optim.SGD, decay as L2: g += wd p. With `momentum` mu and `dampening` d:
     * b = g at the tensor's first step, b = mu b + (1 - d) g later; p -= lr b. DSOPT_GROUP_NESTEROV:
     * p -= lr (g + mu b). Without momentum there is no state, and p -= lr g. Standard mode only. Since: 0.2 */
    DSOPT_ALGORITHM_SGD = 8,
    /** Duchi et al. 2011 as in torch.optim.Adagrad, decay as L2: g += wd p; s += g^2;
     * p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps). The sum s starts as initial_accumulator_value.
     * With DSOPT_GROUP_EPS_INSIDE_SQRT it is optax.adagrad: g / sqrt(s + eps), and 0 where s is 0. Standard mode only.
     * Since: 0.2 */
    DSOPT_ALGORITHM_ADAGRAD = 9,
    /** Chen et al. 2023, as in optax.lion: p -= lr (sign(beta1 m + (1 - beta1) g) + wd p), then
     * m = beta2 m + (1 - beta2) g. The sign of 0 is 0. Standard mode only. Since: 0.2 */
    DSOPT_ALGORITHM_LION = 10,
    /** Jordan et al. 2024, as in torch.optim.Muon, for matrices: m = mu m + (1 - mu) g; u = (1 - mu) g + mu m with
     * DSOPT_GROUP_NESTEROV, else u = m; O = NS(u / max(|u|, eps)); p = p (1 - lr wd) - lr adjust O. NS is `ns_steps`
     * Newton-Schulz iterations A = X X^T; X = a X + (b A + c A A) X, which bring all singular values of X close to 1;
     * of a matrix with more rows than columns they take the transpose. X is fp32; inputs of products are rounded to
     * `ns_dtype`, and sums are fp32. A zero matrix stays zero. With bias correction and NESTEROV,
     * u = mu / (1 - mu^(t+1)) m + (1 - mu) / (1 - mu^t) g, as in optax.
     * Each parameter is one matrix or is partitioned into matrices (dsopt_param.rows, cols). Other parameters, such as
     * embeddings, norms and biases, go into a group of another algorithm, outside the 1-bit family. One NaN that is
     * applied ends a whole matrix, so prefer DSOPT_NONFINITE_SKIP. Standard mode only. docs/muon.md. Since: 0.3 */
    DSOPT_ALGORITHM_MUON = 11,
    /* The 1-bit family: data-parallel ranks exchange one bit per element. None has bias correction. docs/onebit.md */
    /** 1-bit Adam, Tang et al. 2021. Up to freeze_step it is AdamW on averaged gradients. After that v is frozen, each
     * rank adds its gradient to m, m becomes the 1-bit mean over ranks, and p -= lr (m / (sqrt(v) + eps) + wd p). */
    DSOPT_ALGORITHM_ONEBIT_ADAM = 16,
    /** 0/1 Adam, Lu et al. 2022. Up to freeze_step, v changes only in variance steps, whose interval doubles after
     * every var_interval_steps of them. These average gradients in full precision; other steps update m with the 1-bit
     * mean of the gradients. After freeze_step ranks step locally. At an interval that doubles every
     * local_interval_steps steps, up to max_local_interval, they synchronise: each applies the 1-bit mean of these
     * local weight changes. */
    DSOPT_ALGORITHM_ZERO_ONE_ADAM = 17,
    /** 1-bit LAMB, Li et al. 2021. Up to freeze_step it is LAMB. After that it is 1-bit Adam with a trust ratio: the
     * running mean times a factor computed from an estimate of the unfrozen variance. Sharded tensors as in LAMB: mean,
     * factor and ratio are one number per tensor. */
    DSOPT_ALGORITHM_ONEBIT_LAMB = 18,
    DSOPT_ALGORITHM_SIGNED = -1
};

/** No algorithm has AMSGrad, as in the originals, whose fused classes refuse `amsgrad`. */
enum dsopt_group_flags {
    /** c1 = c2 = 1. */
    DSOPT_GROUP_NO_BIAS_CORRECTION = 1,
    /** sqrt(v + eps) in place of sqrt(v) + eps. LAMB, ADAM_LEGACY and ADAGRAD only. */
    DSOPT_GROUP_EPS_INSIDE_SQRT = 2,
    /**
     * eps next to the uncorrected variance, as in the last paragraph of Kingma and Ba 2015, section 2, and in Keras:
     * lr sqrt(c2)/c1 m / (sqrt(v) + eps). That is the formula above with eps / sqrt(c2) for eps. The decay of ADAMW is
     * not scaled by sqrt(c2)/c1. ADAM and ADAMW with bias correction, standard mode only. Since: 0.2
     */
    DSOPT_GROUP_EPS_UNCORRECTED = 4,
    /** 1-bit Adam only: the group is never compressed and its variance never frozen. In steps with an exchange the
     * engine averages the group's gradients, so dsopt_optimizer_next_reduction holds for all groups. */
    DSOPT_GROUP_NON_FREEZE = 16,
    /** SGD and Muon: Nesterov's momentum. In SGD it needs a momentum above 0 and a dampening of 0. Since: 0.2 */
    DSOPT_GROUP_NESTEROV = 32,
    DSOPT_GROUP_SIGNED = -1
};

/** Muon: coefficients of the Newton-Schulz iterations. Steps after the last triple of a preset repeat it. Since: 0.3 */
enum dsopt_ns {
    /** ns_a, ns_b and ns_c in every step. */
    DSOPT_NS_CONSTANT = 0,
    /** Polar Express, Amsel et al. 2025: five triples. */
    DSOPT_NS_POLAR_EXPRESS = 1,
    /** You's five triples ("quintic"), from modded-nanogpt. */
    DSOPT_NS_YOU = 2,
    DSOPT_NS_SIGNED = -1
};

/** Muon: factor of the learning rate, for a matrix of r outputs and c inputs. Weight decay does not have it. r is
 * dsopt_param.rows, or cols with DSOPT_PARAM_ROWS_ARE_INPUTS. Since: 0.3 */
enum dsopt_adjust {
    /** sqrt(max(1, r / c)) */
    DSOPT_ADJUST_ORIGINAL = 0,
    /** 0.2 sqrt(max(r, c)): updates as large as AdamW's (Moonlight), whose learning rate and decay then fit. */
    DSOPT_ADJUST_MATCH_RMS_ADAMW = 1,
    /** sqrt(r / c) */
    DSOPT_ADJUST_SPECTRAL = 2,
    /** 1 */
    DSOPT_ADJUST_NONE = 3,
    DSOPT_ADJUST_SIGNED = -1
};

/**
 * How a moment is stored between steps. Within a step it is fp32: it is converted, the rule computes the new moment and
 * moves the weights by it before it is rounded (LAMB: by the stored moment), and the new moment is converted back. The
 * bits are the same on every backend and for any sharding. Which format is for what, and how exact each is:
 * docs/low_precision.md. Not for the 1-bit family, compat mode and DSOPT_MASTERS_FLAT. Since: 0.3
 *
 * E4M3 and Q8 have one F32 scale per block of 256 consecutive elements of the tensor, the last block shorter. An Inf or
 * NaN in a block makes the whole block NaN until it is reset, so skip such steps (DSOPT_NONFINITE_SKIP). A block of
 * zeros is zero bytes.
 */
enum dsopt_moment {
    DSOPT_MOMENT_F32 = 0,
    /** BF16, rounded to nearest. Not for squares: where 1 - beta2 < 2^-9 a rounded mean of squares could never fall. */
    DSOPT_MOMENT_BF16 = 1,
    /** BF16, rounded up or down at random, in proportion to the distance. The random number depends on seed, name, step
     * and element only. */
    DSOPT_MOMENT_BF16_RANDOM = 2,
    /** FP8 E4M3 with scales. Not for squares, whose range it does not have. */
    DSOPT_MOMENT_E4M3 = 3,
    /** The 8-bit dynamic map of bitsandbytes and torchao with scales. Squares in Q8 follow falling gradients late: keep
     * embeddings and norms in F32 (DSOPT_PARAM_F32_MOMENTS). */
    DSOPT_MOMENT_Q8 = 4,
    DSOPT_MOMENT_SIGNED = -1
};

/**
 * Algorithm and hyper-parameters of a group of parameters, filled by dsopt_group_init. Fields that the algorithm does
 * not use are 0 and must stay 0. Groups of an optimizer may have different algorithms, at most one of the 1-bit family.
 */
typedef struct dsopt_group {
    size_t size;
    /** enum dsopt_algorithm. */
    int32_t algorithm;
    /** enum dsopt_group_flags. */
    int32_t flags;
    /** Learning rate: finite in fp32, >= 0. */
    double lr;
    /** Decay of the moments, in [0, 1). */
    double beta1, beta2;
    /** Finite in fp32, >= 0. Below 2^-126, also 0, it counts as 2^-126: an element whose gradients were all 0 stays as
     * it is. Muon: in [2^-100, 1]. */
    double eps;
    /** Finite in fp32, >= 0. */
    double weight_decay;
    /** Clip by the L2 norm of this group's gradients alone. 0 = off. See also dsopt_optimizer_desc.max_norm. */
    double max_norm;
    /** LAMB: bounds of the trust ratio, 0 <= min_trust <= max_trust. */
    double min_trust, max_trust;
    /* The 1-bit family: the fields up to trust_max_change must be the same in all its groups. */
    /** Number of the last step that changes the variance, >= 1. */
    int64_t freeze_step;
    /** 0/1 Adam, >= 1. The original's var_update_scaler. */
    int64_t var_interval_steps;
    /** 0/1 Adam, >= 1. The original's local_step_scaler. */
    int64_t local_interval_steps;
    /** 0/1 Adam, >= 1. The original's local_step_clipper. */
    int64_t max_local_interval;
    /** 1-bit LAMB, in [0, 1): decay of the running mean of the trust ratio. The original's coeff_beta. */
    double trust_beta;
    /** 1-bit LAMB, in [0, 1): largest relative change of the factor per step. The original's factor_threshold. */
    double trust_threshold;
    /** 1-bit LAMB: bounds of the factor, 0 <= min <= max. */
    double trust_min_change, trust_max_change;
    /** SGD: finite in fp32, >= 0. Cannot change between 0 and another value: the state tensor momentum_buffer exists
     * only with momentum. Muon: in (0, 1). Since: 0.2 */
    double momentum;
    /** SGD with momentum: fraction of the gradient that is not added to the momentum after the first step, in [0, 1].
     * Since: 0.2 */
    double dampening;
    /** Adagrad: finite in fp32, >= 0. Since: 0.2 */
    double lr_decay;
    /** Adagrad: initial sum of squares, for state that is created or reset after the field is set. Finite in fp32,
     * >= 0. Since: 0.2 */
    double initial_accumulator_value;
    /** enum dsopt_moment: of exp_avg and momentum_buffer. Cannot change later. Since: 0.3 */
    int32_t exp_avg_format;
    /** enum dsopt_moment: of exp_avg_sq (F32, BF16_RANDOM or Q8) and sum (F32 or BF16_RANDOM). Cannot change later.
     * Since: 0.3 */
    int32_t exp_avg_sq_format;
    /** Muon with DSOPT_NS_CONSTANT: finite in fp32. With a preset: 0. Since: 0.3 */
    double ns_a, ns_b, ns_c;
    /** Muon: number of Newton-Schulz iterations, 1 to 99. Since: 0.3 */
    int32_t ns_steps;
    /** Muon: enum dsopt_ns. Since: 0.3 */
    int32_t ns_schedule;
    /** Muon: dtype of the inputs of products, DSOPT_DTYPE_BF16, _F16 or _F32. Matrices with fewer than 16 rows or
     * columns use F32. Cannot change later. Since: 0.3 */
    int32_t ns_dtype;
    /** Muon: enum dsopt_adjust. Since: 0.3 */
    int32_t adjust;
} dsopt_group;

enum dsopt_param_flags {
    /** Sharded over the model comm: this rank has one shard, and each rank's shard counts in norms. The gradients of
     * parameters without this flag count in norms on model rank 0 only.
     * LAMB computes one trust ratio for all shards (standard mode). All model ranks must then register the same LAMB
     * tensors with this flag in the same order, empty if a rank has no elements, and pass gradients for the same
     * tensors. A shard without a gradient counts as zeros. So a model comm of LAMB must not span pipeline stages with
     * different tensors. */
    DSOPT_PARAM_MODEL_PARALLEL = 1,
    /** Another pipeline stage has the same parameter and counts it in norms: it is excluded from norms here. */
    DSOPT_PARAM_REPLICATED = 2,
    /** The 1-bit family: the exchanged mean is multiplied with state tensor "mask". A 0 stops compression noise from
     * changing an element that never has a gradient. The mask is initially 0: fill it before the first step. */
    DSOPT_PARAM_MASKED = 4,
    /** The moments are F32, whatever the formats of the group: for embeddings, norms and biases. Since: 0.3 */
    DSOPT_PARAM_F32_MOMENTS = 8,
    /** Muon: the weight is used as y = x W, as in JAX and in GPT-2's Conv1D, so a matrix has `cols` outputs (enum
     * dsopt_adjust). Since: 0.3 */
    DSOPT_PARAM_ROWS_ARE_INPUTS = 16,
    DSOPT_PARAM_SIGNED = -1
};

/** One parameter as registered. It is passed in arrays and has no `size`. */
typedef struct dsopt_param {
    /** F32, F16 or BF16. NULL data: bound later, or passed to each call. */
    dsopt_tensor tensor;
    /** Copied. UTF-8, 1 to 1000 bytes, unique in the optimizer. NULL = "p<index>". */
    const char *name;
    /** Copied. Optional shape, for checkpoints and dsopt_state_info. The product must be numel. */
    const int64_t *dims;
    /** Length of `dims`, at most 8. 0 = flat. */
    int32_t ndim;
    /** enum dsopt_param_flags. */
    int32_t flags;
    /** Index of the first element if it is a slice of a tensor of that name. For rounding at random, and for moments in
     * E4M3 or Q8, where it must be a multiple of 256; else 0. A slice has the bits of the whole tensor. */
    int64_t offset;
    /** 0 = dense. k: the ranks of expert comm k - 1 hold different experts, and the squares of their gradients add up,
     * as in DeepSpeed 0.19.6 (get_norm_with_moe_layers). The form of 2023, the mean of the ranks' norms, is not
     * supported. Compat mode: docs/compat.md, "norm of experts". */
    int32_t expert;
    /** dsopt_optimizer_add_params: index of the parameter's group. dsopt_optimizer_add_group: 0. Since: 0.2 */
    int32_t group;
    /** Muon: the tensor is partitioned into matrices of rows x cols, each orthogonalised on its own. Both 0: a tensor
     * with two dims is one matrix. If cols is the product of the last dims, every `rows` consecutive rows of that
     * length are a matrix: of a convolution (out, in, height, width) with cols = in height width, a stack (experts,
     * out, in), or fused queries, keys and values (3 d, d) with rows = cols = d. Otherwise cols must divide the last
     * dim, and a matrix is `cols` columns of `rows` rows: x W with W of (d, 3 d). A parameter of at most one dim is
     * flat: it needs both, and every rows * cols consecutive elements are a matrix. They must divide the tensor
     * without rest (DSOPT_ERR_SHAPE). Other algorithms: 0. Since: 0.3 */
    int64_t rows, cols;
} dsopt_param;

/**
 * Fill `group` with every default of an algorithm, as the original documents them: lr 1e-3, betas 0.9 and 0.999, eps
 * 1e-8, trust ratio 0.01 to 10. Weight decay is 0.01 in ADAMW and 0 elsewhere. SGD: lr 1e-3, no momentum. Adagrad: lr
 * 1e-2, eps 1e-10, initial sum 0. Lion: lr 1e-4, betas 0.9 and 0.99. Muon, as torch.optim.Muon: lr 1e-3, momentum 0.95
 * with NESTEROV and NO_BIAS_CORRECTION, weight decay 0.1, eps 1e-7, five iterations with 3.4445, -4.7750 and 2.0315 in
 * BF16, ADJUST_ORIGINAL. The 1-bit family: freeze_step 100000, intervals 16, 32678 and 16, trust_beta 0.9,
 * trust_threshold 0.1, change 0.5 to 4.
 * @param[out] group      every byte is written.
 * @param[in]  size       sizeof(dsopt_group) in the caller's header.
 * @param[in]  algorithm  enum dsopt_algorithm.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: unknown algorithm. Thread-safety: any.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_group_init(dsopt_group *group, size_t size, int32_t algorithm);

/* -------------------------------------------------------------------------------------------------------- optimizer */
enum dsopt_compat {
    /** The default: without the quirks of the original. */
    DSOPT_COMPAT_NONE = 0,
    /** DeepSpeed's optimizers step by step, quirks included. docs/compat.md lists every difference. */
    DSOPT_COMPAT_DEEPSPEED = 1,
    DSOPT_COMPAT_SIGNED = -1
};

/** Policy for Inf and NaN in gradients. */
enum dsopt_nonfinite {
    /** Skip the step if the gradients are read for scaling or clipping anyway, else apply them. With the 1-bit family
     * prefer SKIP: a NaN that is applied stays in the error feedback permanently. */
    DSOPT_NONFINITE_AUTO = 0,
    /** Always check, at the cost of one more read of the gradients, and skip. */
    DSOPT_NONFINITE_SKIP = 1,
    /** Apply them. */
    DSOPT_NONFINITE_APPLY = 2,
    DSOPT_NONFINITE_SIGNED = -1
};

enum dsopt_optimizer_flags {
    /** 16-bit parameters without an fp32 master. */
    DSOPT_OPTIMIZER_NO_MASTER = 1,
    /** Weight norm and update norm in the report. Needs no further pass over memory. Not for the 1-bit family. */
    DSOPT_OPTIMIZER_REPORT_NORMS = 2,
    /** With NO_MASTER: BF16 parameters are rounded up or down at random, in proportion to the distance. The random
     * number depends on seed, name, step and element only, so any sharding gives the same bits. */
    DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING = 4,
    /** An F32 gradient accumulator per parameter, see dsopt_optimizer_accumulate. */
    DSOPT_OPTIMIZER_ACCUMULATE = 8,
    /** Times per phase in the report. */
    DSOPT_OPTIMIZER_TIMING = 16,
    /** The step averages the gradients over the data-parallel ranks itself, into F32 workspace; the caller's gradients
     * are not changed. With the 1-bit family: if dsopt_optimizer_next_reduction returns FULL. The mean is the sum in
     * the order of ranks, in fp32, times 1 / ranks; with `node` the ranks of a node are added up first. Gradients are
     * sent in their own dtype, so an entry without data, which counts as zeros, needs the numel of its parameter and
     * the dtype that the other ranks send (DSOPT_ERR_SHAPE, _DTYPE); so does the 1-bit family with a node comm, or
     * beside a group of another algorithm. With one rank these are not checked. Ranks compare the dtypes in the first
     * step, and with CHECK_RANKS in every step; ranks that change them differently later get wrong averages. Needs
     * `data` or `node`. */
    DSOPT_OPTIMIZER_AVERAGES = 32,
    /** Before each step, also of dsopt_optimizer_apply, the data-parallel ranks compare their calls. If ranks differ,
     * each returns DSOPT_ERR_MISMATCH, nothing is changed and the comm stays usable. If a call of one rank fails before
     * the comparison, for its arguments or for lack of memory, it returns that status and the others return
     * DSOPT_ERR_MISMATCH. Without this flag such ranks hang, fail with the comm's status, or diverge. Cost: one
     * all-reduce of 148 bytes per step, and per bucket, two more with a node comm. Where ranks exchange, average or
     * shard, dsopt_optimizer_step compares lists and options at the first step after each new group even without it.
     *
     *     what ranks must have alike                                          compared
     *     parameters: number, order, numel, dtype, group, flags, master,      first step, CHECK_RANKS
     *       formats of moments, rows and cols, name and offset (the last
     *       two not of experts)
     *     options: every field of dsopt_group and of the scaler's rules;      first step, CHECK_RANKS
     *       compat, flags, nonfinite, masters, max_norm, max_value, bucket,
     *       skip_budget, and seed if something is rounded at random
     *     sharded state: whether the step reads gradients before the update,  first step, CHECK_RANKS
     *       REPORT_NORMS
     *     dtypes of gradients that the step averages                          first step, CHECK_RANKS
     *     ranks of nodes, rank in the node (node comm)                        first step, CHECK_RANKS
     *     gradients that are present, where the caller averages: not of       CHECK_RANKS
     *       experts, in compat wrappers, and in compressed 1-bit steps
     *     number of calls, stage and step of the 1-bit family's schedule      CHECK_RANKS
     *     flags of comms, options of contexts, experts, device scalars        never
     *     values: weights, averages of gradients, state, scale, counters      never
     *     TIMING, MOMENTUM_BITS, dims of parameters, and without sharded      may differ
     *       state REPORT_NORMS
     */
    DSOPT_OPTIMIZER_CHECK_RANKS = 64,
    /** 1-bit Adam in standard mode: keep the frozen stage's momentum as the bits of the last exchange, in
     * exp_avg_bits, which saves 8 bytes of memory traffic per element and step. The weights get the same bits. Between
     * calls exp_avg is stale; dsopt_optimizer_export, _import, _save, _bind, _reset and _add_group update it. Not with
     * masks. No effect with one rank or one node. */
    DSOPT_OPTIMIZER_MOMENTUM_BITS = 128,
    /** State tensors of parameters are spread over the data-parallel ranks (ZeRO stage 1): each rank keeps one part of
     * the list, updates it, and gets the other weights from the other ranks. Weights have the same bits as without it.
     * The gradients are averages, the same on all ranks, or with AVERAGES this rank's own. Parameters, gradients and
     * accumulated gradients are whole on every rank; for the part see dsopt_optimizer_shard. Every step and
     * dsopt_optimizer_apply are collective, also skipped steps; before the first step the ranks compare their lists.
     * Parameters are added before the first call that makes state: a step, even if it is refused then, or a load.
     * If the gather of weights fails, this rank's part and the counters are of the new step, which is not counted in
     * dsopt_report.calls: load a checkpoint.
     * Needs `data` or `node`. Standard mode, without experts, `dsopt_step.out` and the 1-bit family.
     * docs/sharding.md. Since: 0.3 */
    DSOPT_OPTIMIZER_SHARD = 256,
    /** The same over the ranks of `node`, which it needs: every node has all of the state. The form for 1-bit Adam and
     * 1-bit LAMB: weights have the bits of unsharded state with the same `data` and `node`. Not for 0/1 Adam.
     * Since: 0.3 */
    DSOPT_OPTIMIZER_SHARD_NODE = 512,
    /** Muon: the orthogonalisation of matrices is partitioned among the data-parallel ranks, with `node` among the
     * ranks of a node: each rank runs the iterations of some, and gets the results of the others with one all-gather of
     * 2 bytes per element (F32 products: 4). Bits do not depend on the number of ranks. Gradients are the same on all
     * ranks, or averaged by the step (AVERAGES), and absent on all ranks alike. If the exchange fails, moments are of
     * the new step and weights are not: load a checkpoint. Needs `data` or `node`, and a group of Muon at the first
     * step. Not with SHARD and SHARD_NODE, which partition whole tensors. Since: 0.3 */
    DSOPT_OPTIMIZER_SPLIT_MATRICES = 1024,
    /** dsopt_optimizer_ready updates a parameter as soon as its gradient is complete, with AVERAGES and several ranks
     * as soon as its `bucket` is averaged (without `bucket` the step updates all), with the hyper-parameters of the
     * first ready of the step; counters advance at the end of the step. Refused with everything that decides about a
     * whole step: max_norm of the optimizer and of groups, a scaler, DSOPT_NONFINITE_SKIP, a skip budget,
     * REPORT_NORMS, LAMB, Muon and the 1-bit family; in a step also params, state, out, lr, hyper, grad_scale, skip
     * and grad_norms. So parameters are registered with memory or bound. A step that was begun cannot be taken back:
     * if a call fails or gradients are reset before it ends, some parameters are of the new step: load a checkpoint.
     * Since: 0.3 */
    DSOPT_OPTIMIZER_EARLY_UPDATE = 2048,
    DSOPT_OPTIMIZER_SIGNED = -1
};

enum dsopt_masters {
    /** Masters are separate tensors. Compat mode: FP16_UnfusedOptimizer. */
    DSOPT_MASTERS_PER_TENSOR = 0,
    /** The masters of a group are contiguous, except for parameters added after the state was allocated. Compat mode:
     * FP16_Optimizer. */
    DSOPT_MASTERS_FLAT = 1,
    /** BF16 parameters: the master is the parameter itself together with 16 more bits, in state tensor "remainder" (2
     * bytes per element in place of 4). The weight is the master rounded to nearest, ties away from zero. The master
     * has the bits that a separate one would have. A parameter that the caller overwrites keeps its remainder, at most
     * half a unit in the last place of the weight; DSOPT_RESET_MASTERS sets remainders to 0. F32 parameters are their
     * own masters; F16 parameters are refused. Standard mode, not with NO_MASTER or the 1-bit family. Since: 0.3 */
    DSOPT_MASTERS_REMAINDER = 2,
    DSOPT_MASTERS_SIGNED = -1
};

typedef struct dsopt_optimizer_desc {
    size_t size;
    /** enum dsopt_compat. */
    int32_t compat;
    /** enum dsopt_optimizer_flags. */
    int32_t flags;
    /** enum dsopt_nonfinite. */
    int32_t nonfinite;
    /** enum dsopt_masters. */
    int32_t masters;
    /** Clip by the L2 norm of all gradients: g /= max(1, (norm + 1e-6) / max_norm). 0 = off. If a group has a max_norm
     * too, the larger of the two divisors is used. */
    double max_norm;
    /** Clip every element of the unscaled gradient to [-max_value, max_value], after clipping by norm. 0 = off. */
    double max_value;
    /** Retained. NULL = no loss scaling. */
    dsopt_scaler *scaler;
    /** Retained. Data-parallel ranks, which agree on skipping; in compat mode as the original (docs/compat.md). NULL =
     * one rank. */
    dsopt_comm *data;
    /** Retained. Model-parallel ranks, which sum norms, agree on skipping, and compute LAMB's trust ratios of sharded
     * tensors with one more all-reduce per step of 24 bytes per such tensor. NULL = one rank. */
    dsopt_comm *model;
    /** The comms are retained, the array is not. Expert-parallel ranks, see dsopt_param.expert. */
    dsopt_comm *const *experts;
    /** Length of `experts`, at most 1024. */
    int32_t expert_count;
    /** After this many skipped steps in a row dsopt_optimizer_step returns DSOPT_ERR_SKIPS. 0 = never. */
    int32_t skip_budget;
    /** Seed of STOCHASTIC_ROUNDING and of moments in BF16_RANDOM. */
    uint64_t seed;
    /** Retained. The ranks of this node, as in dsopt_compressed; NULL = one rank. With `node` the data-parallel ranks
     * are the ranks of all nodes, and `data` connects the ranks that have the same rank in their nodes. The 1-bit
     * family exchanges in two levels: in stages other than full a step averages the gradients inside the node and then
     * is a step with one rank per node. Ranks agree on skipping and norms over both comms. */
    dsopt_comm *node;
    /** AVERAGES, SHARD, SHARD_NODE: gradients are averaged and weights are gathered in buckets: consecutive parameters,
     * until they have at least this many elements. A multiple of 4096; 0 = one bucket, and dsopt_optimizer_ready sends
     * nothing. Buckets are exchanged from the last one to the first, so parameters are registered in the order of the
     * forward pass. Buckets decide which part of a tensor a rank keeps, and do not change the bits of a result, except
     * of means with PROVIDER_SUMS. A rank keeps at most one block of 4096 elements per bucket more than its share.
     * Since: 0.3 */
    int64_t bucket;
    /** Memory for this many buckets whose gradients are free and which are not sent yet, 1 to 16. 0 = 2. If all are in
     * use, dsopt_optimizer_ready waits. A bucket of more than 2 `bucket` elements is not copied: its gradients are free
     * when it was sent. Since: 0.3 */
    int32_t buckets_in_flight;
    int32_t reserved;
} dsopt_optimizer_desc;

/**
 * Create an optimizer without parameters.
 * @param[in]  desc  NULL = standard mode, no scaling, no clipping, fp32 masters for 16-bit parameters.
 * @param[out] opt   release with dsopt_optimizer_destroy.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: a field is out of range; DSOPT_ERR_UNSUPPORTED: an option without effect;
 * DSOPT_ERR_STATE: the scaler has an optimizer already and is not SHARED. Thread-safety: any.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_create(dsopt_context *ctx, const dsopt_optimizer_desc *desc,
                                                          dsopt_optimizer **opt);

/**
 * Release the handle. Destroying the last handle frees the state tensors of the engine and, on CUDA, waits for the
 * device. If buckets of a step were sent that has not ended, its comms are aborted: other ranks get a status at once.
 */
DSOPT_API void dsopt_optimizer_destroy(dsopt_optimizer *opt);

/**
 * Make one more handle to the same optimizer. Each handle is destroyed by its owner, in any order and by any thread.
 * For independent owners, such as a compiled program whose asynchronous calls of dsopt_optimizer_apply may outlive the
 * object that made it.
 * @param[out] other  release with dsopt_optimizer_destroy.
 * @return DSOPT_OK. Thread-safety: any, concurrently with every other call. Since: 0.2
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_retain(dsopt_optimizer *opt, dsopt_optimizer **other);

/**
 * Append a group and its parameters. The parameters of all calls, in the order of registration, are the flat order of
 * every list of this API. May be called between steps: existing state is kept, except that error feedback of the 1-bit
 * family is reset. Lists of later calls are longer, and a state list that was bound must be bound again. Once there is
 * state, this call waits for earlier calls. So does the next call other than dsopt_optimizer_add_group, _add_params,
 * _set and _get, even a query: it allocates the state of the whole optimizer, so it cannot be captured. It can be
 * repeated if it fails with DSOPT_ERR_NOMEM or _BACKEND.
 * @param[in] group   copied.
 * @param[in] params  copied, names and dims too. Tensor memory is borrowed until the optimizer is destroyed or bound to
 *                    other memory. NULL if count is 0.
 * @param[in] count   number of parameters; 0 is legal.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: hyper-parameter, name, dims or flags; _DTYPE; _SHAPE: numel * size overflows,
 * or rows and cols do not divide the tensor; _MISSING: Muon on CUDA without cuBLASLt on this machine; _ALIGNMENT;
 * _OVERLAP: among these parameters or with earlier ones; _UNSUPPORTED: an option that the algorithm does not have;
 * _STATE: the 1-bit family's variance is frozen, and new parameters would have none; or there is sharded state.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_add_group(dsopt_optimizer *opt, const dsopt_group *group,
                                                             const dsopt_param *params, int64_t count);

/**
 * Append parameters to existing groups: dsopt_param.group is the group's index. A model whose groups alternate (decay
 * for weights, none for biases) adds its groups without parameters first, and then all parameters in model order.
 * Standard mode; in compat mode the parameters of a group must be consecutive, as in the original.
 * @param[in] params  as in dsopt_optimizer_add_group.
 * @return as dsopt_optimizer_add_group. DSOPT_ERR_ARGUMENT also for an unknown group; DSOPT_ERR_STATE also without
 * groups, or in compat mode once there is state; DSOPT_ERR_UNSUPPORTED also in compat mode for parameters that are not
 * consecutive. Since: 0.2
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_add_params(dsopt_optimizer *opt, const dsopt_param *params,
                                                              int64_t count);

enum dsopt_group_index {
    /** In place of the index of one group. */
    DSOPT_ALL_GROUPS = -1
};

/** Hyper-parameters that can be read and set later. */
enum dsopt_key {
    /* Of a group: the fields of dsopt_group. */
    DSOPT_KEY_LR = 1,
    DSOPT_KEY_BETA1 = 2,
    DSOPT_KEY_BETA2 = 3,
    DSOPT_KEY_EPS = 4,
    DSOPT_KEY_WEIGHT_DECAY = 5,
    DSOPT_KEY_GROUP_MAX_NORM = 6,
    DSOPT_KEY_MIN_TRUST = 7,
    DSOPT_KEY_MAX_TRUST = 8,
    /** 0 or 1. */
    DSOPT_KEY_BIAS_CORRECTION = 9,
    /** 0 or 1. */
    DSOPT_KEY_EPS_INSIDE_SQRT = 10,
    /** Read only. */
    DSOPT_KEY_ALGORITHM = 11,
    /** The 1-bit family; only for all groups at once. */
    DSOPT_KEY_FREEZE_STEP = 12,
    /** 0 or 1. Since: 0.2 */
    DSOPT_KEY_EPS_UNCORRECTED = 13,
    /** SGD and Muon. Since: 0.2 */
    DSOPT_KEY_MOMENTUM = 14,
    /** SGD. Since: 0.2 */
    DSOPT_KEY_DAMPENING = 15,
    /** 0 or 1. SGD and Muon. Since: 0.2 */
    DSOPT_KEY_NESTEROV = 16,
    /** Adagrad. Since: 0.2 */
    DSOPT_KEY_LR_DECAY = 17,
    /** Adagrad. Since: 0.2 */
    DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE = 18,
    /** Muon. Since: 0.3 */
    DSOPT_KEY_NS_STEPS = 19,
    /** Muon with DSOPT_NS_CONSTANT. Since: 0.3 */
    DSOPT_KEY_NS_A = 20,
    /** Muon with DSOPT_NS_CONSTANT. Since: 0.3 */
    DSOPT_KEY_NS_B = 21,
    /** Muon with DSOPT_NS_CONSTANT. Since: 0.3 */
    DSOPT_KEY_NS_C = 22,
    /** Muon: enum dsopt_adjust. Since: 0.3 */
    DSOPT_KEY_ADJUST = 23,
    /** Muon: enum dsopt_ns. A preset sets ns_a, ns_b and ns_c to 0, CONSTANT to their defaults. Since: 0.3 */
    DSOPT_KEY_NS_SCHEDULE = 24,
    /** Muon: enum dsopt_dtype. Read only: it determines the size of the workspace. Since: 0.3 */
    DSOPT_KEY_NS_DTYPE = 25,
    /* Of the optimizer: `group` must be DSOPT_ALL_GROUPS. */
    DSOPT_KEY_MAX_NORM = 32,
    /** Number of steps so far, skipped ones included. Set by callers that keep their own checkpoints. */
    DSOPT_KEY_CALLS = 33,
    DSOPT_KEY_MAX_VALUE = 34,
    /** Setting it also resets the count of consecutive skips, and waits for earlier calls. */
    DSOPT_KEY_SKIP_BUDGET = 35,
    DSOPT_KEY_SIGNED = -1
};

/**
 * Change a hyper-parameter from the next call on.
 * @param[in] group  index, or DSOPT_ALL_GROUPS: every group, or none on failure.
 * @param[in] key    enum dsopt_key.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: group, key or value out of range; DSOPT_ERR_UNSUPPORTED: the group's algorithm
 * has no such hyper-parameter, or this value needs other state tensors; DSOPT_ERR_STATE: no groups; DSOPT_ERR_BACKEND:
 * DSOPT_KEY_SKIP_BUDGET on CUDA.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_set(dsopt_optimizer *opt, int32_t group, int32_t key, double value);

/**
 * Read a hyper-parameter. DSOPT_ALL_GROUPS reads group 0.
 * @return as dsopt_optimizer_set. Thread-safety: any number of readers.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_get(const dsopt_optimizer *opt, int32_t group, int32_t key,
                                                       double *value);

/**
 * Number of groups and of parameters. No function describes an optimizer as text. Bindings format optimizers themselves
 * (__repr__, Debug, show) from this function and dsopt_optimizer_get.
 * @param[out] groups  NULL = not wanted.
 * @param[out] params  NULL = not wanted.
 * @return DSOPT_OK. Thread-safety: any number of readers.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_count(const dsopt_optimizer *opt, int64_t *groups, int64_t *params);

/* ---------------------------------------------------------------------------------------------------- state tensors */
/*
 * Everything that a step changes, apart from the parameters, is a list of state tensors. Their names, sizes and order
 * follow from the groups, so a framework can allocate the list before the first step, keep it in its own checkpoints,
 * bind it or pass it to dsopt_optimizer_apply. The tensors of parameter 0 are first, then those of parameter 1 and so
 * on, then those of the whole optimizer, each in the order of this table. A tensor exists only where it is used.
 *
 *   of each parameter (numel and dims of the parameter)      present
 *   master                F32  copy in full precision         16-bit parameters, without NO_MASTER and REMAINDER
 *   remainder             I16  lower 16 bits of the master    BF16 parameters with DSOPT_MASTERS_REMAINDER
 *   exp_avg               (*)  running mean of gradients      Adam, LAMB, Lion, and the 1-bit family
 *   exp_avg_scale         F32  a scale per 256 elements       exp_avg in E4M3 or Q8
 *   exp_avg_sq            (*)  running mean of squares        Adam, LAMB, and the 1-bit family
 *   exp_avg_sq_scale      F32  a scale per 256 elements       exp_avg_sq in Q8
 *   momentum_buffer       (*)  momentum                       SGD with momentum, Muon
 *   momentum_buffer_scale F32  a scale per 256 elements       momentum_buffer in E4M3 or Q8
 *   sum                   (*)  sum of squares                 Adagrad; starts as initial_accumulator_value
 *   grad_accum            F32  sum of gradients               ACCUMULATE
 *   anchor                F32  weights at the last exchange   0/1 Adam, standard mode; rank local
 *   momentum_accumulator  F32  updates since the exchange     0/1 Adam, compat mode; rank local
 *   exp_avg_sq_fresh      F32  unfrozen variance              1-bit LAMB
 *   mask                  F32  0 = do not change              DSOPT_PARAM_MASKED
 *
 *   of the optimizer      elements                            present
 *   worker_error          F32  see dsopt_compressed           1-bit family with several ranks; rank local
 *   server_error          F32  see dsopt_compressed           1-bit family with several ranks; rank local
 *   active                I32  a bit per element with v != 0  1-bit family with several ranks, standard mode
 *   exp_avg_bits          I32  bits of the last exchange      MOMENTUM_BITS; never in files
 *   schedule              I32  8: dsopt_schedule_decode       1-bit family
 *   lr_sum                I32  2 per group: a double          0/1 Adam
 *   trust_average         F32  1 per parameter                1-bit LAMB
 *   trust_factor          F32  1 per parameter                1-bit LAMB
 *   trust_scaling         F32  1 per parameter                1-bit LAMB, compat mode
 *   trust_weight          F32  1 per parameter                1-bit LAMB, standard mode
 *   exp_avg_pad           F32  momentum of the padding        1-bit LAMB with several ranks, compat mode
 *   loss_scale            F32  1                              with a scaler
 *   scaler                I32  12: dsopt_scaler_decode        with a scaler
 *   trust_ratio           F32  1 per parameter                with a LAMB group
 *   step                  I32  1 per parameter                always
 *
 * (*) F32, or with a format of the group: BF16, F8_E4M3 or U8. In compat mode with NO_MASTER the parameter's dtype.
 * A scale tensor has ceil(numel / 256) elements and one dimension, and belongs to the tensor before it: code * scale,
 * so codes are only meaningful together with their scales.
 * Engine-owned loss_scale and scaler are memory of the attached scaler.
 * An export of worker_error and server_error has the residuals, followed by scales of 0.
 */
enum dsopt_state_flags {
    /** Initially a copy of the parameter. */
    DSOPT_STATE_FROM_PARAM = 1,
    /** Differs between data-parallel ranks. */
    DSOPT_STATE_RANK_LOCAL = 2,
    /** The part of the parameter that this rank keeps, see dsopt_optimizer_shard. Since: 0.3 */
    DSOPT_STATE_SHARDED = 4,
    DSOPT_STATE_SIGNED = -1
};

/** One entry of the state list. */
typedef struct dsopt_state_info {
    size_t size;
    /** "exp_avg", "step", ... Static storage. */
    const char *name;
    /** Index of the parameter; -1: of the whole optimizer. */
    int64_t param;
    /**
     * dtype, numel and current memory: NULL while the entry is neither allocated nor bound. The engine frees none of
     * its memory before the optimizer is destroyed, so the pointer stays readable until then. It points to this tensor
     *  - if it is a parameter's or the scaler's: until dsopt_optimizer_bind names other memory;
     *  - if it is the whole optimizer's, such as "step" or the errors: until `generation` changes. These tensors grow
     *    with the list: in place while their memory suffices, else in other memory, with a capacity of at least 1.5
     *    times the old one. Tensors that are reset when parameters are added ("worker_error", "server_error",
     *    "exp_avg_bits", "exp_avg_pad") are then new tensors.
     */
    dsopt_tensor tensor;
    /** Shape: the parameter's if `param` >= 0, so state can be sharded as its parameter is; else, for scales and with
     * DSOPT_STATE_SHARDED, one dimension. Owned by the optimizer, valid until parameters are added or the optimizer is
     * destroyed. Since: 0.2 */
    const int64_t *dims;
    int32_t ndim;
    /** enum dsopt_state_flags. */
    int32_t flags;
    /** Changes whenever `tensor.data` becomes other memory: allocated, bound, or reallocated. While it is the same, an
     * earlier pointer still points to this tensor, which may have more elements by now. 0 = no memory. Since: 0.2 */
    int64_t generation;
    /** Number of elements of the parameter per element of this tensor: 256 for scales, 1 for other tensors of a
     * parameter, 0: of the whole optimizer. Since: 0.3 */
    int32_t block;
    int32_t reserved;
} dsopt_state_info;

/** Length of the list. @return DSOPT_OK. Thread-safety: any number of readers. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_state_count(const dsopt_optimizer *opt, int64_t *count);

/**
 * One entry.
 * @param[out] info  `info->size` must be set.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: index. Thread-safety: any number of readers.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_state(const dsopt_optimizer *opt, int64_t index,
                                                         dsopt_state_info *info);

/**
 * The part of a parameter whose state a rank keeps: elements [begin, begin + numel). It follows from the list, so it is
 * known before the first step and changes when parameters are added. Without DSOPT_OPTIMIZER_SHARD it is the whole
 * parameter on every rank. A tensor of Muon is whole on one rank (of each node, with SHARD_NODE), and empty on others.
 * @param[in]  rank   of the data-parallel ranks: rank in `data` + ranks of `data` * rank in `node`; -1 = this one.
 * @param[out] begin  a multiple of 4096; 0 if there is nothing.
 * @param[out] numel  0: nothing.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: parameter or rank; DSOPT_ERR_STATE: no groups. Thread-safety: any number of
 * readers. Since: 0.3
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_shard(const dsopt_optimizer *opt, int64_t param, int32_t rank,
                                                         int64_t *begin, int64_t *numel);

/**
 * Copy one entry to host memory. Before the first step the call allocates and initializes the state, except for
 * loss_scale and scaler, which exist from the start. Waits for earlier calls.
 * @param[out] host   numel * size bytes.
 * @param[in]  bytes  must be numel * size.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE: wrong `bytes`; DSOPT_ERR_STATE: a master whose parameter has no memory yet, or the
 * default stream cannot be used.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_export(dsopt_optimizer *opt, int64_t index, void *host,
                                                          size_t bytes);

/** Copy host memory to one entry. To start from fp32 weights, import "master". Waits for earlier calls.
 * @return as dsopt_optimizer_export; DSOPT_ERR_ARGUMENT: step, schedule, lr_sum, loss_scale or scaler with a value that
 * no step produces.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_import(dsopt_optimizer *opt, int64_t index, const void *host,
                                                          size_t bytes);

/**
 * Copy one entry to host memory as fp32, whatever its format: a moment, or, for "remainder", the master that consists
 * of the parameter and the remainder. F32 entries are copied as by dsopt_optimizer_export. Waits for earlier calls.
 * @param[out] host   `count` floats.
 * @param[in]  count  must be numel of the entry.
 * @return DSOPT_OK; DSOPT_ERR_DTYPE: an I32 entry; DSOPT_ERR_SHAPE: wrong `count`; DSOPT_ERR_STATE: a parameter without
 * memory, and as dsopt_optimizer_export. Since: 0.3
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_export_f32(dsopt_optimizer *opt, int64_t index, float *host,
                                                              int64_t count);

/**
 * Copy fp32 values from host memory to one entry, in its format, rounded to nearest (BF16_RANDOM too). A moment in E4M3
 * or Q8 gets new scales as well; "remainder" also sets the parameter. Waits for earlier calls.
 * @return as dsopt_optimizer_export_f32; DSOPT_ERR_ARGUMENT as dsopt_optimizer_import. Since: 0.3
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_import_f32(dsopt_optimizer *opt, int64_t index, const float *host,
                                                              int64_t count);

enum dsopt_bind { DSOPT_BIND_PARAMS = 1, DSOPT_BIND_STATE = 2, DSOPT_BIND_SIGNED = -1 };

/**
 * Set the memory of parameters or state from now on. dtype and numel stay as registered. Contents are neither copied
 * nor changed: bound state must hold its values, from dsopt_optimizer_init_state or a saved state. If you overwrite
 * bound state, bind it again: for the 1-bit family on CUDA the host caches the schedule and would miss the change.
 * Binding state waits for earlier calls. Parameters with NULL data have no memory from then on. A list in which each
 * parameter has NULL data, or its current memory, allocates nothing: that call cannot fail with DSOPT_ERR_NOMEM.
 * @param[in] what   enum dsopt_bind.
 * @param[in] list   borrowed memory until it is bound elsewhere. State entries with NULL data keep theirs.
 * @param[in] count  number of parameters, or of state entries.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE, _ALIGNMENT, _OVERLAP, each naming the tensor; _ARGUMENT as in
 * dsopt_optimizer_import; _STATE: the default stream cannot be used.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_bind(dsopt_optimizer *opt, int32_t what, const dsopt_tensor *list,
                                                        int64_t count);

enum dsopt_reset {
    /** Copies parameters to masters, after new weights were loaded (the original's refresh_fp32_params). Sets
     * remainders to 0, which needs no memory of the parameters. */
    DSOPT_RESET_MASTERS = 1,
    DSOPT_RESET_MOMENTS = 2,
    DSOPT_RESET_COUNTERS = 4,
    /** Gradient accumulators. */
    DSOPT_RESET_GRADS = 8,
    /** Error feedback of the 1-bit family. */
    DSOPT_RESET_ERRORS = 16,
    /** Forget the gradients of dsopt_optimizer_ready, for example because the backward pass failed. With AVERAGES,
     * `bucket` and several ranks it is collective, also for a rank with nothing ready: what is left of the buckets is
     * exchanged as zeros in the dtypes of the last exchange, and all results are dropped, so ranks may be at different
     * buckets. Since: 0.3 */
    DSOPT_RESET_READY = 32,
    DSOPT_RESET_SIGNED = -1
};

/**
 * Reset parts of the state to their initial values, in stream order. With DSOPT_RESET_COUNTERS or MOMENTUM_BITS the
 * call waits for earlier calls and cannot be captured. With DSOPT_RESET_READY and others, gradients are forgotten
 * first.
 * @param[in] what  an OR of enum dsopt_reset.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: unknown bits; DSOPT_ERR_STATE: a parameter has no memory to copy from, this
 * call cannot be captured, or gradients are ready and `what` does not include DSOPT_RESET_READY; with that flag and
 * buckets also what dsopt_optimizer_step returns for exchanges.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_reset(dsopt_optimizer *opt, int32_t what, void *stream);

/* ------------------------------------------------------------------------------------------------------------- step */
enum dsopt_step_flags {
    /** Set gradients to zero in the same pass, also when the step is skipped. Gradients are then written to. */
    DSOPT_STEP_ZERO_GRADS = 1,
    /** Do not write `params`: new values are written only to `out`, which must then have memory for every parameter.
     * Refused for 0/1 Adam without masters, whose local steps accumulate in the parameters. In compat mode with masters
     * the first use of the state still writes F32 parameters (docs/compat.md, "construction"). */
    DSOPT_STEP_OUT_ONLY = 2,
    /** As OUT_ONLY, but `out` receives new - old; zeros if skipped. Refused for parameters with a master. */
    DSOPT_STEP_DELTA = 4,
    /** dsopt_optimizer_step: the gradients are the accumulators of dsopt_optimizer_accumulate; `grads` is NULL. The
     * accumulators are zeroed. In `apply` pass the accumulators as gradients instead. */
    DSOPT_STEP_ACCUMULATED = 8,
    /** `report` has -1 in place of every NaN. For tools that stop at any NaN. Since: 0.2 */
    DSOPT_STEP_NO_NAN = 16,
    /** dsopt_optimizer_step: ends a step whose gradients were passed to dsopt_optimizer_ready. `grads` may be NULL:
     * parameters that were not made ready have no gradient; with AVERAGES and several ranks there must be none, because
     * an absent gradient needs its dtype (DSOPT_ERR_SHAPE). Otherwise `grads` has the gradients of these, and NULL data
     * for parameters that were made ready. Legal without a call of dsopt_optimizer_ready. Not with ZERO_GRADS.
     * Since: 0.3 */
    DSOPT_STEP_READY = 32,
    DSOPT_STEP_SIGNED = -1
};

/** Indices of dsopt_step.report. Norms are of unscaled gradients before clipping, NaN if not computed. */
enum dsopt_report_index {
    /** 1 if this step was skipped. */
    DSOPT_REPORT_SKIPPED = 0,
    DSOPT_REPORT_GRAD_NORM = 1,
    /** Before the step. With REPORT_NORMS. */
    DSOPT_REPORT_WEIGHT_NORM = 2,
    /** |new - old|. With REPORT_NORMS. */
    DSOPT_REPORT_UPDATE_NORM = 3,
    /** Number of Inf and NaN elements found on this rank. 0 if not checked. */
    DSOPT_REPORT_NONFINITE = 4,
    /** Index of the first parameter with such an element, -1 = none. */
    DSOPT_REPORT_FIRST_BAD = 5,
    /** Divisor of the gradients: scale and clipping. Group 0's if groups clip separately. 0 if skipped. */
    DSOPT_REPORT_DIVISOR = 6,
    /** Loss scale of the gradients; 1 without a scaler. */
    DSOPT_REPORT_SCALE_USED = 7,
    /** Loss scale for the next backward pass. */
    DSOPT_REPORT_SCALE_NEXT = 8,
    /** Norm of the experts' gradients, over all their ranks. */
    DSOPT_REPORT_EXPERT_NORM = 9,
    /** Consecutive skipped steps as counted by the scaler; 0 without a scaler. */
    DSOPT_REPORT_SKIPPED_IN_ROW = 10,
    /** Why the step was skipped: an OR of enum dsopt_skip. Since: 0.2 */
    DSOPT_REPORT_REASONS = 11,
    /** Length of the report. Entries without a name are 0. */
    DSOPT_REPORT_FLOATS = 16,
    DSOPT_REPORT_SIGNED = -1
};

/** Why a step was skipped. Since: 0.2 */
enum dsopt_skip {
    /** Inf or NaN in a gradient. */
    DSOPT_SKIP_GRADIENTS = 1,
    /** A norm is not finite, or one of `grad_norms` is negative. */
    DSOPT_SKIP_NORM = 2,
    /** The loss scale, `grad_scale` or their product is not positive, not finite in fp32, or its reciprocal overflows
     * fp32; or the state tensor "scaler" is invalid. */
    DSOPT_SKIP_SCALE = 4,
    /** `lr` or `hyper` has a value that dsopt_optimizer_set would refuse. */
    DSOPT_SKIP_HYPER = 8,
    /** `skip` is not 0. */
    DSOPT_SKIP_CALLER = 16,
    /** Another rank had a reason. With expert comms, not reported by a rank that has a reason too. */
    DSOPT_SKIP_PEER = 32,
    DSOPT_SKIP_SIGNED = -1
};

/** Indices in a row of dsopt_step.hyper. Since: 0.2 */
enum dsopt_hyper_index {
    DSOPT_HYPER_LR = 0,
    DSOPT_HYPER_BETA1 = 1,
    DSOPT_HYPER_BETA2 = 2,
    DSOPT_HYPER_EPS = 3,
    DSOPT_HYPER_WEIGHT_DECAY = 4,
    /** dsopt_group.max_norm. */
    DSOPT_HYPER_GROUP_MAX_NORM = 5,
    /** dsopt_optimizer_desc.max_norm. Read from the row of group 0; NaN or 0 in the others. */
    DSOPT_HYPER_MAX_NORM = 6,
    /** SGD with momentum: above 0. Muon: in (0, 1). NaN or 0 in the other groups. */
    DSOPT_HYPER_MOMENTUM = 7,
    /** Length of a row. Indices 8 to 15 are reserved: NaN or 0. */
    DSOPT_HYPER_FLOATS = 16,
    DSOPT_HYPER_SIGNED = -1
};

/**
 * Arguments of one step. Lists have one entry per parameter, in flat order. `grads` and `count` are always needed, all
 * else is optional unless it says otherwise. The members from `lr` to `grad_norms` are in backend memory and are read
 * in stream order. If a scale or hyper-parameter in backend memory has a value that the host would refuse, the step is
 * skipped (DSOPT_SKIP_SCALE, _HYPER), whatever the policy for non-finite gradients.
 */
typedef struct dsopt_step {
    size_t size;
    /** F32, F16 or BF16, chosen per tensor. NULL data = no gradient: the parameter, its state and its counter do not
     * change. Only read, unless ZERO_GRADS is set. */
    const dsopt_tensor *grads;
    /** Number of parameters. */
    int64_t count;
    /** Memory of the parameters. NULL = as bound. Required in `apply`. */
    const dsopt_tensor *params;
    /** New weights, rounded to the entry's dtype. NULL data = not wanted. Also written when the step is skipped or the
     * gradient is absent: then with the unchanged weight. May be the parameter's memory, or, without ZERO_GRADS and
     * outside the 1-bit family, memory of its gradient of the same dtype. With DSOPT_MASTERS_REMAINDER, of a BF16
     * parameter: BF16 gives the new parameter, F32 the master; with OUT_ONLY it must be BF16, which together with the
     * new remainder is the new master. */
    const dsopt_tensor *out;
    /** Memory of the state. Required in `apply`: every entry, in list order, with memory unless it is empty. In `step`,
     * NULL or entries with NULL data mean the bound memory. */
    const dsopt_tensor *state;
    int64_t state_count;
    /** Learning rate, one per group. NULL = the value set on the host. Not together with `hyper`. */
    const float *lr;
    /** Additional factor by which the gradients are scaled, such as the number of accumulated micro-batches or a scale
     * of the caller; they are divided by it and by the loss scale. NULL = 1. */
    const float *grad_scale;
    /** Nonzero = skip: write nothing except `out`, `report` and zeroed gradients. Counters do not change. The scaler
     * treats it as an overflow, like every other reason. */
    const int32_t *skip;
    /** L2 norms of the gradients as passed (scaled), one per group. Saves reading the gradients for the norm. With
     * DSOPT_OPTIMIZER_AVERAGES: of their averages, the same on all ranks; other norms make ranks diverge. A negative or
     * non-finite norm counts as an overflow: it skips the step unless the policy is APPLY. */
    const float *grad_norms;
    /** Out: DSOPT_REPORT_FLOATS floats, enum dsopt_report_index. */
    float *report;
    /** `apply`: backend memory of any alignment; holds no state. `step`: NULL, the engine allocates it. */
    void *workspace;
    /** At least the number that dsopt_optimizer_workspace returns, or 255 less if the memory is 256-byte aligned. */
    size_t workspace_bytes;
    void *stream;
    /** Thread pool for this call, CPU backend. The first call initializes state with the context's pool. */
    dsopt_parallel_for parallel_for;
    /** First argument of `parallel_for`. */
    void *parallel_user;
    /** enum dsopt_step_flags. */
    int32_t flags;
    int32_t reserved;
    /** Hyper-parameters: one row of DSOPT_HYPER_FLOATS floats per group, enum dsopt_hyper_index. NaN = the value set on
     * the host, which is also more exact than a float. A max_norm other than 0 requires that the same max_norm is
     * positive on the host, which enables that clipping; else the step is skipped (DSOPT_SKIP_HYPER). Since: 0.2 */
    const float *hyper;
} dsopt_step;

/**
 * Update every parameter that has a gradient, once. Checks the lists, enqueues on `stream`, and returns before the
 * device is done. The first call allocates; later calls on an unchanged optimizer do not, whichever gradients are
 * absent. A call that returns DSOPT_ERR_NOMEM has changed nothing and can be repeated. With CHECK_RANKS the other ranks
 * return DSOPT_ERR_MISMATCH and repeat it too; without, nothing was sent to them, and they wait until it is repeated.
 *
 * A skipped step leaves parameters, state and counters as they are. It happens for the reasons of enum dsopt_skip, on
 * this rank or another one. `out` and `report` are still written, gradients are still zeroed (ZERO_GRADS), and the
 * scaler is still updated. In standard mode the schedule of the 1-bit family counts the step and freezes the variance
 * if that is due; ranks exchange as much as in an executed step and discard the result. In compat mode nothing is
 * exchanged after the decision to skip.
 *
 * The host waits in four cases only. It waits for `stream` in the first three, and for earlier calls in the last one:
 *  - a comm of several ranks without DSOPT_COMM_FLAG_ENQUEUE;
 *  - with ENQUEUE: values that the host needs, see DSOPT_COMM_FLAG_ENQUEUE;
 *  - the 1-bit family on CUDA, in compat mode or when the schedule is in memory of the caller;
 *  - a skip budget and comms of several ranks.
 *
 * The originals call a closure first. Call it before this function instead. The originals' fp16 wrappers ignore a
 * closure.
 *
 * Overlap among gradients, or of gradients and parameters, is not checked, nor is an array passed twice.
 * CUDA graphs: docs/graphs.md. The 1-bit family cannot be captured, because the host chooses the stage of a step.
 *
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE, _ALIGNMENT, _DEVICE, each naming the tensor; _UNSUPPORTED; _STATE: a
 * parameter has no memory, the scaler was detached, or this call cannot be captured; _SKIPS; _MISMATCH: see
 * CHECK_RANKS; _NOMEM; _BACKEND. DSOPT_ERR_COMM, _TIMEOUT, _ABORTED: the comms are unusable, as after any other failure
 * between two collectives, such as DSOPT_ERR_HOOK. Parameters, moments and counters of all groups are unchanged, on
 * every backend, with five exceptions: the all-gather of SPLIT_MATRICES, when moments and other groups are already
 * updated and the weights of Muon are not; the sums of REPORT_NORMS with sharded state, when weights and moments of this
 * rank's part are already updated and counters are not; the local update of 0/1 Adam before a synchronisation; a failure
 * of the model comm between LAMB's two passes, when LAMB's moments and other groups are already updated; and comms made
 * with ENQUEUE. In these cases, and after a failed exchange of the 1-bit family, whose error buffers then hold
 * compensated values that were not sent, load a checkpoint (docs/onebit.md).
 * Thread-safety: one thread per optimizer, per scaler and per comm.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_step(dsopt_optimizer *opt, const dsopt_step *step);

/* ------------------------------------------------------------------------------------------------- a step in parts */
enum dsopt_ready_flags {
    /** Add the gradients to the accumulators first (DSOPT_OPTIMIZER_ACCUMULATE), which are then complete; `grads` NULL:
     * there is nothing to add. All calls of a step have the flag or none has, and the step that ends them has
     * DSOPT_STEP_ACCUMULATED accordingly. */
    DSOPT_READY_ACCUMULATED = 1,
    DSOPT_READY_SIGNED = -1
};

/** Arguments of dsopt_optimizer_ready. Since: 0.3 */
typedef struct dsopt_ready {
    size_t size;
    /** `count` indices of parameters, in any order, each once per step. NULL: [first, first + count). */
    const int64_t *params;
    int64_t first;
    int64_t count;
    /** One per parameter of this call. F32, F16 or BF16. NULL data: the parameter has no gradient in this step, with
     * numel and dtype as in dsopt_step.grads. The memory is borrowed until it is free. */
    const dsopt_tensor *grads;
    /** Calls of a step may have different streams: later ones, and the step, are ordered after all of them. During a
     * capture the caller orders the streams. */
    void *stream;
    /** enum dsopt_ready_flags. */
    int32_t flags;
    int32_t reserved;
    /** Out: the gradients of parameters from this index on are free: not read any more, on CUDA in order of `stream`.
     * Number of parameters: none. With buckets, those whose bucket was copied or sent. Gradients that are kept
     * (dsopt_optimizer_bucket) are free when the step has returned, on CUDA in order of its stream, whatever this
     * number. */
    int64_t free_from;
} dsopt_ready;

/**
 * Pass gradients as the backward pass completes them, before the step, which DSOPT_STEP_READY ends. Begins a step if
 * none is begun. What the step does with these gradients alone is done now. All results have the bits of the step with
 * all gradients at once, whatever the order and the grouping of calls.
 *
 *     optimizer                          when                          what
 * AVERAGES, `bucket`, several ranks  a bucket is complete, and so  it is averaged over the ranks; then as below, for
 *                                        are those after it            this rank's part
 *     EARLY_UPDATE                       a gradient is ready           the update of its parameter
 *     max_norm, a scaler, NONFINITE_SKIP a gradient is ready           sums of squares, non-finite elements
 *
 * Gradients are kept for the step in all other cases: AVERAGES without `bucket`, the 1-bit family, and matrices of Muon
 * in sharded state.
 *
 * Buckets are exchanged in one order on all ranks, which may be at different gradients, and of which some may make
 * undivided steps. With the exchanges of the CPU a thread of the optimizer does it, if the comms have
 * DSOPT_COMM_FLAG_ANY_THREAD, from a copy of the gradients; it calls no hook. On CUDA they are enqueued on `stream`.
 * The ranks compare dtypes before each bucket where they compare them before a step. From the first call of a step with
 * buckets on, the comms `data` and `node` are in use: other calls on them, also of other optimizers, return
 * DSOPT_ERR_BUSY, except dsopt_comm_query and dsopt_comm_abort. A failed exchange is returned by this function, by
 * dsopt_optimizer_wait and by the step, which ends it: weights, moments and counters are unchanged (EARLY_UPDATE: load
 * a checkpoint), and the comms are unusable unless the status is DSOPT_ERR_MISMATCH. With CHECK_RANKS a step that is
 * refused ends the step on all ranks, and gradients are forgotten. Destroying the optimizer before the step aborts its
 * comms.
 *
 * Until the step, other calls that would change what it uses return DSOPT_ERR_STATE: dsopt_optimizer_step without
 * READY, _accumulate of these parameters, _save, _load, _bind, _import, _add_group, _add_params, _reset except of
 * READY, and with EARLY_UPDATE _set.
 *
 * Other calls on the optimizer, except queries that take a const handle, first wait for exchanges that have begun.
 *
 * The first call of a step may allocate; later calls do not, and in later steps none does, as for dsopt_optimizer_step.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: an index, a parameter that is ready already, flags that differ between calls;
 * _SHAPE, _DTYPE, _ALIGNMENT, each naming the tensor; _STATE: with EARLY_UPDATE, a parameter has no memory, the scaler
 * was detached, or this call cannot be captured; _UNSUPPORTED: compat mode, accumulators without ACCUMULATE; _NOMEM;
 * _BACKEND; _SKIPS; _BUSY: a comm is in use. These have changed nothing: the gradients of earlier calls stay ready.
 * _MISMATCH, _COMM, _TIMEOUT, _ABORTED: of an exchange that an earlier call has begun. Thread-safety: one thread per
 * optimizer. Since: 0.3
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_ready(dsopt_optimizer *opt, dsopt_ready *ready);

/**
 * Wait, on CUDA make `stream` wait, for the work that earlier ready and step calls have begun on parameters [first,
 * first + count): their gradients are then read, unless they are kept, and weights that EARLY_UPDATE writes are in
 * place. A bucket that is not complete is not waited for.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: the range; _STATE: no groups; _BACKEND; the status of an exchange that failed.
 * Thread-safety: one thread per optimizer. Since: 0.3
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_wait(dsopt_optimizer *opt, int64_t first, int64_t count,
                                                        void *stream);

/**
 * The bucket of a parameter: parameters [first, first + count) are worked on when all of them are ready.
 * @param[out] first  index of its first parameter.
 * @param[out] count  0: the gradient of this parameter is kept for the step.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: the index; _STATE: no groups; _UNSUPPORTED: compat mode. Thread-safety: any
 * number of readers. Since: 0.3
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_bucket(const dsopt_optimizer *opt, int64_t param, int64_t *first,
                                                          int64_t *count);

/**
 * dsopt_optimizer_step as a pure function: reads and writes only what `step` names, and keeps no state. Nothing is
 * allocated except host memory for tables, which is cached and grows with the number of concurrent calls. The host
 * waits only in the cases that dsopt_optimizer_step lists; the schedule of the 1-bit family is always in memory of the
 * caller here. The state list must hold the values of dsopt_optimizer_init_state or of an earlier call.
 * After dsopt_optimizer_set or _add_group, calls use the new values: a compiled program that must ignore them passes
 * `hyper`.
 * @return as dsopt_optimizer_step; DSOPT_ERR_WORKSPACE. Thread-safety: any number of threads, on different memory.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_apply(const dsopt_optimizer *opt, const dsopt_step *step);

/**
 * Bytes of workspace that `apply` needs at any alignment. Changes only when parameters are added.
 * @return DSOPT_OK. Thread-safety: any number of readers.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_workspace(const dsopt_optimizer *opt, size_t *bytes);

/**
 * Write the initial values of every state tensor into the caller's list, in stream order: masters from `params`, zeros,
 * the scaler's initial scale and counters from its desc. In compat mode with masters this includes the step on zero
 * gradients that the original executes when it is constructed, which also decays F32 parameters in place. Afterwards
 * dsopt_optimizer_apply gives the same bits as dsopt_optimizer_step. State that the optimizer owns is not read.
 * If the step on zero gradients is executed, the call allocates and frees workspace, the host may wait for the device,
 * and the call cannot be captured in a graph. Nor can it be captured if a state tensor has an initial value other than
 * 0.
 * @param[in,out] params  one entry per parameter, only read unless the step on zero gradients is executed. NULL is
 * legal if there are no
 *                        masters.
 * @param[in]     count   number of parameters; 0 with params NULL.
 * @param[out]    state   every entry, in list order, with memory unless it is empty.
 * @param[in]     state_count  number of state entries.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE, _ALIGNMENT, _ARGUMENT: no memory, each naming the tensor; _STATE: no
 * groups, or this call cannot be captured. Thread-safety: any number of threads, on different memory. Since: 0.2
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_init_state(const dsopt_optimizer *opt, const dsopt_tensor *params,
                                                              int64_t count, const dsopt_tensor *state,
                                                              int64_t state_count, void *stream);

/**
 * Add gradients to the accumulators: grad_accum += g, in fp32, as passed. The next step with DSOPT_STEP_ACCUMULATED
 * uses and zeroes them, even if it is skipped. A parameter to which nothing was added has no gradient in that step.
 * @param[in] grads  F32, F16 or BF16, only read. NULL data = nothing to add.
 * @param[in] count  number of parameters.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE, _ALIGNMENT; _ARGUMENT: no list; _UNSUPPORTED: made without
 *         DSOPT_OPTIMIZER_ACCUMULATE.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_accumulate(dsopt_optimizer *opt, const dsopt_tensor *grads,
                                                              int64_t count, void *stream);

/** Reduction of the gradients of a step. Without the 1-bit family: FULL. */
enum dsopt_reduction {
    /** The gradients must be averaged over the data-parallel ranks before the step. */
    DSOPT_REDUCTION_FULL = 1,
    /** Leave the gradients local: the step exchanges one bit per element. */
    DSOPT_REDUCTION_COMPRESSED = 2,
    /** Leave the gradients local: the step sends nothing. */
    DSOPT_REDUCTION_LOCAL = 3,
    DSOPT_REDUCTION_SIGNED = -1
};

/**
 * The reduction of a call of dsopt_optimizer_step, known before the backward pass.
 * @param[in]  call       1, 2, ...: the result is a pure function of this number, because skipped calls count, too.
 *                        0 = the next call. In compat mode only 0 is allowed, because skipped calls do not count
 *                        there. On CUDA, 0 waits for earlier calls in compat mode, and after state was imported, bound
 *                        or loaded.
 * @param[out] reduction  enum dsopt_reduction.
 * @return DSOPT_OK; DSOPT_ERR_STATE: no groups, or the default stream cannot be used; DSOPT_ERR_UNSUPPORTED: a number
 * in compat mode. Thread-safety: if `call` is 0 one thread per optimizer, else any number of readers.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_next_reduction(dsopt_optimizer *opt, int64_t call,
                                                                  int32_t *reduction);

/**
 * The reduction of the next dsopt_optimizer_apply with this schedule, in every mode, in stream order and without
 * waiting.
 * @param[in]  schedule   the state tensor "schedule", in backend memory. NULL without the 1-bit family.
 * @param[out] reduction  one int32 in backend memory, enum dsopt_reduction.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE, _ALIGNMENT, _ARGUMENT; _STATE: no groups.
 * Thread-safety: any number of readers. Since: 0.2
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_next_reduction_on_device(const dsopt_optimizer *opt,
                                                                            const dsopt_tensor *schedule,
                                                                            int32_t *reduction, void *stream);

/**
 * The state tensor "schedule". Its words are, in this order, the members from `step` to `momentum_in_bits`. Since: 0.2
 */
typedef struct dsopt_schedule_info {
    size_t size;
    /** Calls so far; in compat mode executed steps. */
    int32_t step;
    /** 1 once the variance is frozen. */
    int32_t frozen;
    /** 0/1 Adam: interval of variance steps (0 = not started, which counts as 1), and number of variance steps with
     * this interval so far. */
    int32_t var_interval, var_counter;
    /** 0/1 Adam: interval of exchanges after the freeze (0 as above), and number of steps with this interval so far. */
    int32_t local_interval, local_counter;
    /** 1 while exp_avg_bits has the momentum in place of exp_avg. */
    int32_t momentum_in_bits;
    /** enum dsopt_reduction: of the next call. */
    int32_t reduction;
} dsopt_schedule_info;

/**
 * Decode the 8 words of a schedule.
 * @param[in]  words  host memory.
 * @param[out] info   `info->size` must be set.
 * @return DSOPT_OK; DSOPT_ERR_UNSUPPORTED: no group of the 1-bit family. Thread-safety: any number of readers. Since:
 * 0.2
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_schedule_decode(const dsopt_optimizer *opt, const int32_t *words,
                                                         dsopt_schedule_info *info);

/** Indices of dsopt_report.ms: phases, most of them with the original's timer names. */
enum dsopt_phase {
    /** Pass 1: finite check and squares, in one read of the gradients. */
    DSOPT_MS_OVERFLOW_CHECK = 0,
    /** Sums over leaves and ranks. With one rank, CUDA computes them in OVERFLOW_CHECK. */
    DSOPT_MS_COMPUTE_NORM = 1,
    /** The divisor, which CUDA computes in OVERFLOW_CHECK; the division is in BASIC_STEP. */
    DSOPT_MS_UNSCALE_AND_CLIP = 2,
    /** Pass 2, which also writes 16-bit parameters. */
    DSOPT_MS_BASIC_STEP = 3,
    /* Not part of BASIC_STEP. */
    /** Compression. */
    DSOPT_MS_COMPRESS = 4,
    /** The collectives of an exchange, and the work of the rank between them; averages of gradients
     * (DSOPT_OPTIMIZER_AVERAGES); the gather of weights (DSOPT_OPTIMIZER_SHARD). */
    DSOPT_MS_EXCHANGE = 5,
    /** Decompression and update. */
    DSOPT_MS_DECOMPRESS = 6,
    /** Length of dsopt_report.ms. */
    DSOPT_MS_PHASES = 8,
    DSOPT_MS_SIGNED = -1
};

/** Kinds of non-finite values. */
enum dsopt_nonfinite_kind {
    DSOPT_FOUND_NOTHING = 0,
    DSOPT_FOUND_INF = 1,
    DSOPT_FOUND_NAN = 2,
    DSOPT_FOUND_SIGNED = -1
};

typedef struct dsopt_report {
    size_t size;
    /** Calls of dsopt_optimizer_step: all calls, skipped steps, and consecutive skipped steps up to now. */
    int64_t calls, skipped, skipped_in_row;
    /** Inf and NaN elements found in the last call on this rank, whether the step was skipped or applied them. Counted
     * where the gradients are read before the update: with a scaler, max_norm, or DSOPT_NONFINITE_SKIP. Elsewhere 0,
     * and grad_norm is NaN, whatever the gradients are. */
    int64_t nonfinite;
    /** Index of the first parameter with such an element in the last call, -1 = none. */
    int64_t first_bad;
    /** Name of that parameter, owned by the optimizer, valid until parameters are added. NULL = none. */
    const char *first_bad_name;
    /** 1 if the last call was skipped. */
    int32_t last_skipped;
    /** enum dsopt_nonfinite_kind: what was found in the first bad parameter. */
    int32_t kind;
    /** Loss scale for the next backward pass; 1 without a scaler. */
    double loss_scale;
    /** Loss scale of the last call's gradients. */
    double scale_used;
    /** Of the last call, as in enum dsopt_report_index. NaN if not computed. */
    double grad_norm, weight_norm, update_norm;
    /** Parts of grad_norm: grad_norm^2 = dense_norm^2 + expert_norm^2. expert_norm is over the ranks of all expert
     * comms, see dsopt_param.expert. */
    double dense_norm, expert_norm;
    /** As DSOPT_REPORT_DIVISOR. */
    double divisor;
    /** Milliseconds of the last call, enum dsopt_phase. With DSOPT_OPTIMIZER_TIMING. */
    double ms[8];
    int64_t state_bytes, workspace_bytes;
    /** Number of ranks that saved the last loaded checkpoint, if different from now; else 0. */
    int32_t resharded_from;
    /** Why the last call was skipped: an OR of enum dsopt_skip. Since: 0.2 */
    int32_t reasons;
} dsopt_report;

/**
 * Statistics of the steps so far. Waits for earlier calls, but not for the default stream. Replays of captured steps
 * that were launched before this call are included, whatever their stream.
 * Logs one line (INFO) if steps were skipped or the loss scale changed since the last report of this optimizer, such as
 * "call 12: 3 steps were skipped since the last report; the loss scale changed from 65536 to 8192"; otherwise nothing.
 * The first report has no earlier scale to compare with if the scaler was in use before the optimizer was made. Steps
 * log no results: they would have to wait. dsopt_optimizer_reset with DSOPT_RESET_COUNTERS sets the skipped steps to 0.
 * @param[out] report  `report->size` must be set.
 * @return DSOPT_OK; DSOPT_ERR_BACKEND.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_report(dsopt_optimizer *opt, dsopt_report *report);

/* ---------------------------------------------------------------------------------------------------- save and load */
enum dsopt_io_flags {
    /** Load: leave moments, counters, schedule and error feedback unchanged. */
    DSOPT_IO_NO_STATE = 1,
    /** Load: ignore saved masters and copy them from the parameters; remainders become 0. */
    DSOPT_IO_NO_MASTERS = 2,
    /** Load: keep the current hyper-parameters, including those of the optimizer and the scaler's rules. Files of
     * several ranks may then differ in them. */
    DSOPT_IO_NO_HYPER = 4,
    /** Save and load the parameters as well. With DSOPT_MASTERS_REMAINDER a load of masters writes the parameters,
     * which are half of each master, with and without this flag. */
    DSOPT_IO_PARAMS = 8,
    /** Load: keep the loss scale and its counters. */
    DSOPT_IO_NO_SCALER = 16,
    /** Load: reset error feedback of the 1-bit family, whichever ranks saved it. */
    DSOPT_IO_RESET_ERRORS = 32,
    /** Load: moments that were saved in another format are converted through fp32, to nearest. The log (INFO) names
     * them. Without this flag they are refused. Since: 0.3 */
    DSOPT_IO_CONVERT = 64,
    DSOPT_IO_SIGNED = -1
};

/** Read and write callbacks, and the list of files of several ranks. The functions return 0 or an error number. */
typedef struct dsopt_io {
    size_t size;
    /** enum dsopt_io_flags. */
    int32_t flags;
    int32_t reserved;
    /** First argument of `write` and `read`. */
    void *user;
    /** Save: called in order, from offset 0. */
    int (*write)(void *user, const void *data, size_t bytes);
    /** Load: called in any order. */
    int (*read)(void *user, uint64_t offset, void *data, size_t bytes);
    /** Load: total bytes that `read` can read. */
    uint64_t total;
    /** Load with another number of ranks, or a checkpoint of sharded state: number of files, one per rank that saved,
     * in any order. 0 = one file, `path`. */
    int32_t files;
    int32_t reserved2;
    /** With `files`: the paths, or NULL to use `read`. */
    const char *const *paths;
    /** With `files` and `read`: the first argument of `read` for each file. */
    void *const *users;
    /** With `files` and `read`: the length of each file. */
    const uint64_t *totals;
} dsopt_io;

/**
 * Write a checkpoint: a safetensors file with one tensor "<param>.<state>" per state entry, "optimizer.<state>" for
 * those of the whole optimizer, "<param>.param" with DSOPT_IO_PARAMS. Algorithm, hyper-parameters and an XXH3-128
 * checksum per tensor are in the metadata. A file is written under a temporary name, flushed and renamed, and its
 * folder is flushed: a crash leaves the old file or the new one. Waits for earlier calls. docs/checkpoints.md
 * Symbolic links are followed and their target is replaced, also for /dev/stdout or /proc/self/fd/N: the open
 * descriptor still refers to the old file. To write to a descriptor, use `io->write`.
 *
 * With sharded state (DSOPT_OPTIMIZER_SHARD, _SHARD_NODE) every data-parallel rank calls it: the call is collective.
 * Either all ranks replace their files or none does, and it returns when every file is in place. A call that is refused
 * for its pointers, a struct's `size`, or BUSY takes no part: the other ranks wait until the comm's time-out.
 * @param[in] path  NULL = to `io->write`.
 * @param[in] io    NULL = defaults.
 * @return DSOPT_OK; DSOPT_ERR_IO, with an existing file unchanged; DSOPT_ERR_STATE: no groups, a parameter that is
 * to be saved, or has a remainder, has no memory (DSOPT_BIND_PARAMS), or the default stream cannot be used. With
 * sharded state also DSOPT_ERR_MISMATCH: another rank could not save or makes another call, or ranks differ in what a
 * load requires to be equal in all files, such as hyper-parameters and step counts, with nothing written; or another
 * rank saved to the same path. DSOPT_ERR_COMM, _TIMEOUT, _ABORTED.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_save(dsopt_optimizer *opt, const char *path, const dsopt_io *io);

/**
 * Read a checkpoint. Everything, checksums included, is checked before anything changes. Waits for earlier calls.
 *
 * Each data-parallel rank saves one file. With the same number of ranks each loads the file that it saved and continues
 * with the same bits. With another number, every rank reads the files of all ranks that saved (dsopt_io.files):
 * moments, masters, counters and schedule are exact, and the 1-bit family's error feedback is repartitioned as
 * docs/checkpoints.md says. dsopt_report.resharded_from and an INFO log message report it.
 *
 * A checkpoint of sharded state is loaded from the files of all ranks that saved, also with the same number of ranks,
 * and a rank reads the tensors of which it keeps a part. If the state of this optimizer is sharded, the call is
 * collective, as dsopt_optimizer_save is: all ranks load or none does.
 *
 * @return DSOPT_OK; DSOPT_ERR_IO; _FORMAT, _CHECKSUM: a damaged file; _MISMATCH: a checkpoint of another optimizer,
 * files of different saves, or a state that only the same number of ranks can continue (0/1 Adam between two exchanges,
 * gradients in accumulators), or another rank refuses its files, makes another call or has other flags; _STATE: a
 * parameter that is to be loaded, or is part of a master, has no memory; _COMM, _TIMEOUT, _ABORTED, with sharded state.
 * The text names the tensor or field.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_optimizer_load(dsopt_optimizer *opt, const char *path, const dsopt_io *io);

/* ------------------------------------------------------------------------------------------------------ loss scaler */
/** Defaults of dsopt_scaler_desc's zero fields. */
enum dsopt_profile {
    /** init 2^16, factor 2, window 1000, min 1, hysteresis 1. */
    DSOPT_PROFILE_DEFAULT = 0,
    /** FP16_Optimizer: init 2^32, min 1. Hysteresis is ignored there, hence refused here. */
    DSOPT_PROFILE_FUSED = 1,
    /** FP16_UnfusedOptimizer: init 2^16, min 0.25. Hysteresis is refused. */
    DSOPT_PROFILE_UNFUSED = 2,
    /** DynamicLossScaler: init 2^32, min 1, FAIL_AT_MIN. */
    DSOPT_PROFILE_DYNAMIC = 3,
    DSOPT_PROFILE_SIGNED = -1
};

enum dsopt_scaler_flags {
    /** The scale never changes automatically. An overflow still skips the step. */
    DSOPT_SCALER_STATIC = 1,
    /** Consecutive hysteresis: every good step refills the budget. */
    DSOPT_SCALER_REFILL = 2,
    /** An overflow at the minimum counts in dsopt_scaler_info.failures and changes nothing else. */
    DSOPT_SCALER_FAIL_AT_MIN = 4,
    /** Removes FAIL_AT_MIN from the DYNAMIC profile. Both flags together are refused. */
    DSOPT_SCALER_KEEP_AT_MIN = 8,
    /** For several optimizers: steps only record overflow. Once per iteration, after the last step,
     * dsopt_scaler_update (on arrays dsopt_scaler_update_arrays) updates the scale. */
    DSOPT_SCALER_SHARED = 16,
    /** Grow in the step that completes `window` good steps (2023 form) and not in the next one. */
    DSOPT_SCALER_GROWTH_AT_WINDOW = 32,
    DSOPT_SCALER_SIGNED = -1
};

typedef struct dsopt_scaler_desc {
    size_t size;
    /** enum dsopt_profile. */
    int32_t profile;
    /** enum dsopt_scaler_flags. */
    int32_t flags;
    /** Starting scale. 0 = the profile's; 1 if STATIC. */
    double init;
    /** > 1. 0 = 2. */
    double factor;
    /** 0 = the profile's. */
    double min;
    /** 0 = none. */
    double max;
    /** Good steps until growth. 0 = 1000. */
    int32_t window;
    /** Overflows until the scale shrinks (delayed_shift). 0 = 1. */
    int32_t hysteresis;
} dsopt_scaler_desc;

typedef struct dsopt_scaler_info {
    size_t size;
    /** Scale for the next backward pass, override included. */
    double scale;
    /** The dynamic scale, without override. */
    double dynamic;
    /** Transitions so far (cur_iter). */
    int64_t updates;
    /** Number of the last transition with overflow (last_overflow_iter), -1 if none. */
    int64_t last_overflow;
    /** Overflows left until the scale shrinks. */
    int32_t hysteresis;
    /** 1 while an override is set. */
    int32_t overridden;
    /** Overflows at the minimum, with FAIL_AT_MIN. */
    int32_t failures;
    /** Transitions with overflow in a row. */
    int32_t skipped_in_row;
} dsopt_scaler_info;

/** Values that dsopt_scaler_set sets. */
enum dsopt_scale {
    /** The dynamic scale. */
    DSOPT_SCALE_VALUE = 0,
    /** A scale that replaces the dynamic scale. While it is set, transitions change nothing. */
    DSOPT_SCALE_OVERRIDE = 1,
    DSOPT_SCALE_CLEAR_OVERRIDE = 2,
    DSOPT_SCALE_SIGNED = -1
};

/**
 * Create a scaler. Transitions are as in DeepSpeed's loss_scaler.py, with i = updates and l = last_overflow:
 *  - On overflow with 1 left in the hysteresis budget, scale = max(scale / factor, min); with more, the budget shrinks
 *    by 1. Then l = i.
 *  - On a good step with k = i - l - 1 > 0 and k a multiple of `window`, scale = min(scale * factor, max) and the
 *    budget is refilled. The scale grows no further than 2^127, the largest power of two in fp32.
 *  - Then i = i + 1.
 * @param[in]  desc    NULL = every default.
 * @param[out] scaler  release with dsopt_scaler_destroy.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT: a field is out of range; DSOPT_ERR_UNSUPPORTED: an option without effect.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_create(dsopt_context *ctx, const dsopt_scaler_desc *desc,
                                                       dsopt_scaler **scaler);

/** Release the handle. Optimizers that it is attached to keep the scaler alive. */
DSOPT_API void dsopt_scaler_destroy(dsopt_scaler *scaler);

/**
 * Detach the scaler from the optimizers that were created with it, so that a new optimizer can use it. A step of the
 * old optimizers then returns DSOPT_ERR_STATE. For garbage-collected languages, whose unused optimizers may live on.
 * @return DSOPT_OK. Since: 0.2
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_detach(dsopt_scaler *scaler);

/**
 * The loss scale: one float in backend memory, at a fixed address. Multiply the loss or its gradient by it.
 * Returns NULL only if `scaler` is NULL.
 */
DSOPT_API const float *dsopt_scaler_device_scale(const dsopt_scaler *scaler);

/**
 * Set the scale, set an override, or clear the override. Waits for earlier calls and for `stream`.
 * @param[in] what    enum dsopt_scale.
 * @param[in] value   positive and finite in fp32; 0 to clear.
 * @param[in] stream  the stream on which kernels of the caller read the scale: they read the old value before this call
 *                    and the new one after it.
 * @return DSOPT_OK; DSOPT_ERR_ARGUMENT; DSOPT_ERR_STATE: the stream is being captured, or cannot be used; _BACKEND.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_set(dsopt_scaler *scaler, int32_t what, double value, void *stream);

/**
 * One transition. With DSOPT_SCALER_SHARED once per iteration, after the last step; else for a scaler without an
 * optimizer.
 * @param[in] overflow  an int32 in backend memory, nonzero = overflow. NULL = the overflow that the optimizers
 * recorded. @return DSOPT_OK; DSOPT_ERR_ALIGNMENT.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_update(dsopt_scaler *scaler, const int32_t *overflow, void *stream);

/**
 * Current values. Waits for earlier calls, and not for the default stream. @param[out] info  `info->size` must be set.
 * @return DSOPT_OK; DSOPT_ERR_BACKEND.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_query(dsopt_scaler *scaler, dsopt_scaler_info *info);

/**
 * Multiply a loss by the scale, in place and in stream order.
 * @param[in,out] loss  one F32, F16 or BF16 in backend memory.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE, _ALIGNMENT.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_scale_loss(const dsopt_scaler *scaler, const dsopt_tensor *loss,
                                                           void *stream);

/*
 * The scaler on arrays, for the functional form. `state` is a list of the two state tensors "loss_scale" (F32, 1) and
 * "scaler" (I32, 12), in this order. The rules are those of the handle, whose scale is neither read nor written. Words
 * of "scaler": 0-1 the dynamic scale, 2-3 the override (doubles, low word first), 4 updates, 5 last_overflow, 6
 * hysteresis, 7 failures, 8 overridden, 9 overflow recorded since the last transition, 10 skipped_in_row, 11 reserved.
 */
/**
 * Write the initial values of the desc. dsopt_optimizer_init_state does this too.
 * @param[out] state  both tensors.
 * @param[in]  count  2.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE, _ALIGNMENT, _ARGUMENT: no memory.
 * Thread-safety: any number of threads, on different memory. Since: 0.2
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_init_state(const dsopt_scaler *scaler, const dsopt_tensor *state,
                                                           int64_t count, void *stream);

/**
 * dsopt_scaler_update on arrays.
 * @param[in,out] state     both tensors.
 * @param[in]     count     2.
 * @param[in]     overflow  as in dsopt_scaler_update. NULL = the overflow that dsopt_optimizer_apply recorded in
 *                          "scaler".
 * @return as dsopt_scaler_init_state. Thread-safety: any number of threads, on different memory. Since: 0.2
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_update_arrays(const dsopt_scaler *scaler, const dsopt_tensor *state,
                                                              int64_t count, const int32_t *overflow, void *stream);

/**
 * Decode the 12 words of "scaler".
 * @param[in]  words  host memory.
 * @param[out] info   `info->size` must be set.
 * @return DSOPT_OK. Thread-safety: any. Since: 0.2
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_scaler_decode(const int32_t *words, dsopt_scaler_info *info);

/* ------------------------------------------------------------------------------------------------------------ comms */
/*
 * Every rank makes the same calls in the same order. One thread at a time uses a comm; only dsopt_comm_query and
 * dsopt_comm_abort may be called by any thread at any time.
 *
 * The first failure makes the comm unusable: later calls return its status at once. If a rank does not join, has died,
 * or makes another call, the others return DSOPT_ERR_TIMEOUT after `timeout_ms`, or DSOPT_ERR_COMM at once if the
 * provider detects it. All calls on a comm must use one stream, or several that the caller orders. Every kind works
 * with every context unless documented otherwise: the engine copies data to and from the memory that the kind works in.
 *
 * The host waits for each exchange, so a step with comms of several ranks cannot be captured in a graph
 * (DSOPT_ERR_STATE, the comm stays usable) unless all of them were made with DSOPT_COMM_FLAG_ENQUEUE.
 */
enum dsopt_comm_kind {
    /** One rank. */
    DSOPT_COMM_KIND_SELF = 0,
    /** Ranks are threads of this process. Host memory. */
    DSOPT_COMM_KIND_LOCAL = 1,
    /** NCCL 2.4 or later; needs a CUDA context and works in device memory. Found at run time: a copy that the process
     * has loaded, else the library that the environment's DSOPT_NCCL_LIBRARY (an absolute path) names, else
     * libnccl.so.2. DSOPT_ERR_MISSING without one. The time-out starts at the call and includes work already on the
     * stream. It can interrupt a call inside NCCL only for non-blocking communicators: those made here, with
     * NCCL 2.14 or later.
     */
    DSOPT_COMM_KIND_NCCL = 2,
    /** HCCL of Ascend, found at run time as NCCL is: libhccl.so and libascendcl.so, or the libraries that
     * DSOPT_HCCL_LIBRARY and DSOPT_ASCENDCL_LIBRARY name. Works in host memory and uses the Ascend device that is
     * current in the creating thread (DSOPT_ERR_STATE: none). Tested with doubles of both libraries only, not on
     * hardware. */
    DSOPT_COMM_KIND_HCCL = 3,
    /** Functions of the caller. For MPI see dsopt_mpi.h. */
    DSOPT_COMM_KIND_TABLE = 4,
    DSOPT_COMM_KIND_SIGNED = -1
};

enum dsopt_comm_flags {
    /**
     * Exchanges of device memory are enqueued on the stream and the host does not wait for them. For NCCL, and for a
     * TABLE that works in memory of a CUDA context: its functions return once the exchange is enqueued, and can be
     * captured.
     *  - A step does not block, with three exceptions: the rank comparison (at the first step where ranks exchange,
     *    average or shard, and before every step with CHECK_RANKS), a skip budget, and the 1-bit cases listed at
     *    dsopt_optimizer_step.
     *  - `timeout_ms` bounds enqueueing, and waits for results that the host needs. A peer that hangs blocks the
     *    stream, and all waits for the stream, until dsopt_comm_abort is called (from any thread) or, with `native`,
     *    until the caller aborts the native communicator.
     *  - A failure is returned by a later call. Steps that were enqueued after the failed exchange leave undefined
     *    weights and state: load a checkpoint.
     *  - Synchronise the stream, or abort its comms, before destroying anything that steps on the stream use.
     *    dsopt_comm_destroy may abort pending exchanges.
     *  - Destroy graphs that contain NCCL exchanges before the comm: else NCCL waits for them and the comm is aborted.
     *  - Counters count what is enqueued or captured, not replays.
     */
    DSOPT_COMM_FLAG_ENQUEUE = 1,
    /**
     * For a TABLE that works in memory of a CUDA context and passes it to a library that does not use CUDA streams,
     * such as a CUDA-aware MPI (dsopt_mpi_comm_device).
     *  - Before each collective the host waits for `stream`: the data are complete when a function of the table is
     *    called, and the device's context is current in the calling thread. The result must be complete on return.
     *  - The functions receive memory of the comm only. The engine copies data there and back on the device. After a
     *    failure that memory is neither used again nor freed, because the library may still read and write it.
     *  - The comm allocates memory for the largest message, sent and received. That memory, and smaller buffers that it
     *    replaced, are freed when the comm is destroyed.
     * Not together with ENQUEUE. Since: 0.2
     */
    DSOPT_COMM_FLAG_SYNCHRONIZE = 2,
    /** Means of gradients (DSOPT_OPTIMIZER_AVERAGES) are added up by the provider, in its order and in F32, for links
     * on which an all-to-all is slow. Without it the engine adds in the order of ranks: the same bits with every
     * provider. For NCCL, HCCL and a TABLE with reduce_scatter. Refused for LOCAL, which adds in the order of ranks.
     * Since: 0.3 */
    DSOPT_COMM_FLAG_PROVIDER_SUMS = 4,
    /** The functions of a table may be called by a thread of the library, one at a time. Without it, exchanges of
     * dsopt_optimizer_ready run in the thread whose call completes a bucket, which waits for the other ranks: the same
     * results without overlap. Collectives of the program must then have the same place among the calls of ready on all
     * ranks. All other kinds have it; dsopt_mpi.h sets it if MPI has MPI_THREAD_MULTIPLE. Since: 0.3 */
    DSOPT_COMM_FLAG_ANY_THREAD = 8,
    DSOPT_COMM_FLAG_SIGNED = -1
};

/** Operations of an all-reduce. */
enum dsopt_op {
    DSOPT_OP_SUM = 0,
    DSOPT_OP_MAX = 1,
    /** The sum times 1 / ranks, both in fp32. dsopt_comm_all_reduce only. Since: 0.2 */
    DSOPT_OP_MEAN = 2,
    DSOPT_OP_SIGNED = -1
};

enum dsopt_memory {
    DSOPT_MEMORY_HOST = 0,
    /** Memory of the context: device memory on CUDA. */
    DSOPT_MEMORY_BACKEND = 1,
    DSOPT_MEMORY_SIGNED = -1
};

/**
 * Collectives of the caller (MPI, Gloo, ...). The functions return 0 or any error code; if they know the status,
 * -DSOPT_ERR_COMM, -DSOPT_ERR_TIMEOUT or -DSOPT_ERR_ABORTED. They return when the collective is complete. With
 * DSOPT_MEMORY_BACKEND the data are ready in the order of `stream`, and completion in that order is enough; see
 * DSOPT_COMM_FLAG_SYNCHRONIZE for functions that cannot use a stream. An exception of a collective or of error is a
 * failed collective, whatever is thrown: DSOPT_ERR_COMM, and the comm is unusable.
 * Optional functions may be NULL. The engine then builds all_to_all from all_gather, and all_gather from I32
 * all_reduce, with more bytes.
 */
typedef struct dsopt_comm_table {
    size_t size;
    /** First argument of every function. Must live until `destroy`. */
    void *self;
    int32_t rank;
    int32_t ranks;
    /** F32, F64 and I32; SUM and MAX. `send` may be `recv`. Every rank must receive the same bits. */
    int (*all_reduce)(void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op, void *stream);
    /** Optional. Message d of `send` goes to rank d; message s of `recv` comes from rank s. */
    int (*all_to_all)(void *self, const void *send, void *recv, int64_t bytes_per_rank, void *stream);
    /** Optional. Message s of `recv` comes from rank s. */
    int (*all_gather)(void *self, const void *send, void *recv, int64_t bytes_per_rank, void *stream);
    /** Optional, any thread: 0 if the communicator is usable, else its error and a text. */
    int (*error)(void *self, char *text, size_t capacity);
    /** Optional, any thread, more than once: make blocked calls return. */
    void (*abort)(void *self);
    /** Optional, the last call. Must not wait for other ranks forever. */
    void (*destroy)(void *self);
    /** enum dsopt_memory of `send` and `recv`. */
    int32_t memory;
    int32_t reserved;
    /** Optional. `send` has `ranks` rows of `count` elements; `recv` gets the sum of row `rank` over all ranks, in any
     * order of additions. F32, SUM. `recv` may be that row. Since: 0.3 */
    int (*reduce_scatter)(void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                          void *stream);
} dsopt_comm_table;

typedef struct dsopt_comm_desc {
    size_t size;
    /** enum dsopt_comm_kind. SELF needs nothing else. */
    int32_t kind;
    /** With `id`: this rank. */
    int32_t rank;
    /** With `id`: number of ranks. */
    int32_t ranks;
    /**
     * Longest wait in any call, except with ENQUEUE. 0 = 600000, -1 = no limit. TABLE: must be 0; the table's functions
     * implement their time-out.
     */
    int32_t timeout_ms;
    /** The bytes of dsopt_comm_unique_id, the same on all ranks. Creating is then collective. */
    const void *id;
    size_t id_bytes;
    /** TABLE: copied. */
    const dsopt_comm_table *table;
    /** In place of `id`. NCCL: an ncclComm_t of the caller on the context's device. HCCL: an HcclComm. It must be from
     * the copy of the library that the process has loaded. Borrowed until the comm, and everything made with it, is
     * destroyed; dsopt never aborts or destroys it. After a time-out its collective stays on the stream. */
    void *native;
    /** enum dsopt_comm_flags. */
    int32_t flags;
    int32_t reserved;
} dsopt_comm_desc;

/** Collectives, and the payload that each adds to the counters of a rank: no headers, no retries. */
enum dsopt_collective {
    /** 2 (ranks - 1) / ranks of the data in each direction, the minimum of a ring. */
    DSOPT_COLLECTIVE_ALL_REDUCE = 0,
    /** One message to each other rank, one message from each. */
    DSOPT_COLLECTIVE_ALL_TO_ALL = 1,
    /** This rank's message to each other rank, one message from each. */
    DSOPT_COLLECTIVE_ALL_GATHER = 2,
    /** (ranks - 1) / ranks of the rows in each direction. Since: 0.3 */
    DSOPT_COLLECTIVE_REDUCE_SCATTER = 3,
    /** Length of the arrays. Entries without a name are 0. */
    DSOPT_COLLECTIVE_SLOTS = 8,
    DSOPT_COLLECTIVE_SIGNED = -1
};

typedef struct dsopt_comm_info {
    size_t size;
    int32_t rank, ranks;
    /** DSOPT_OK, or the first failure of this comm. */
    dsopt_status status;
    int32_t reserved;
    /** Calls of the provider's functions since creation. If the engine builds a collective from another collective, the
     * calls of the other collective count. With one rank there are almost no calls. */
    int64_t calls;
    /** Payload that this rank sent and received, in calls that did not fail. */
    int64_t bytes_sent;
    int64_t bytes_received;
    /** The same per enum dsopt_collective. */
    int64_t calls_of[8];
    int64_t sent_of[8];
    int64_t received_of[8];
} dsopt_comm_info;

/**
 * Make the bootstrap bytes of a comm on one rank; send them to the others by any means.
 * @param[in]     kind   LOCAL (16 bytes), NCCL (128) or HCCL (4108).
 * @param[out]    id     NULL = query the size only.
 * @param[in,out] bytes  capacity of `id`; then the size.
 * @return DSOPT_OK; DSOPT_ERR_UNSUPPORTED: the kind has no id, or is not in this build; DSOPT_ERR_SHAPE: `bytes` is too
 * small; DSOPT_ERR_MISSING: its library is not on this machine; DSOPT_ERR_COMM: the library failed.
 * Thread-safety: any.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_comm_unique_id(int32_t kind, void *id, size_t *bytes);

/**
 * Create a comm. Collective if `id` is given.
 * @param[out] comm  release with dsopt_comm_destroy.
 * @return DSOPT_OK; DSOPT_ERR_TIMEOUT: not all ranks joined; DSOPT_ERR_COMM: the provider failed, or the ranks
 * disagree; DSOPT_ERR_MISSING: its library is not on this machine, or too old; DSOPT_ERR_UNSUPPORTED: not with this
 * context, not in this build, or an option without effect; DSOPT_ERR_DEVICE: `native` belongs to another device;
 * DSOPT_ERR_BACKEND. On failure the caller still owns the table and `native`.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_comm_create(dsopt_context *ctx, const dsopt_comm_desc *desc,
                                                     dsopt_comm **comm);

/** Rank, size, health and counters, without waiting. `info->size` must be set. @return DSOPT_OK. Thread-safety: any. */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_comm_query(const dsopt_comm *comm, dsopt_comm_info *info);

/**
 * All-reduce a list in place, such as the gradients before a step. Collective: the same list on all ranks. Sums are in
 * fp32 and rounded once to the dtype of the tensor; all ranks receive equal bits. Small tensors are sent together in
 * buckets, which the comm caches. Entries without data are ignored, and must be the same on all ranks.
 * @param[in,out] list  F32, F16 or BF16 in backend memory.
 * @param[in]     op    enum dsopt_op.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE, _ALIGNMENT, _DEVICE with nothing changed; _STATE: it cannot be captured
 * (docs/graphs.md). With any other failure the comm is unusable and the list undefined. MAX of a NaN is unspecified.
 * Thread-safety: one thread per comm. Since: 0.2
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_comm_all_reduce(dsopt_comm *comm, const dsopt_tensor *list, int64_t count,
                                                         int32_t op, void *stream);

/**
 * Make every blocked or later call on this comm return DSOPT_ERR_ABORTED; for a LOCAL comm on all ranks. For other
 * kinds the other ranks fail as if this rank had died. Never blocks for long. Thread-safety: any.
 */
DSOPT_API void dsopt_comm_abort(dsopt_comm *comm);

/**
 * Release the handle. Destroying the last handle of an NCCL comm waits for the other ranks to do so, 5 seconds at most;
 * if NCCL takes longer, the communicator is leaked.
 */
DSOPT_API void dsopt_comm_destroy(dsopt_comm *comm);

/* --------------------------------------------------------------------------------------- lists without an optimizer */
enum dsopt_zero {
    /** Every element becomes zero, in stream order. */
    DSOPT_ZERO_FILL = 0,
    /** Memory is not touched: `data` of every entry becomes NULL, "no gradient" for the next step. */
    DSOPT_ZERO_NONE = 1,
    DSOPT_ZERO_SIGNED = -1
};

/**
 * Zero-grad of a list. Entries without data are ignored.
 * @param[in,out] grads  the entries are written to with DSOPT_ZERO_NONE, their memory with DSOPT_ZERO_FILL.
 * @param[in]     how    enum dsopt_zero.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE, _ALIGNMENT with nothing changed. Thread-safety: any, on different lists.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_zero_grad(dsopt_context *ctx, dsopt_tensor *grads, int64_t count, int32_t how,
                                                   void *stream);

enum dsopt_norm { DSOPT_NORM_L2 = 0, DSOPT_NORM_MAX = 1, DSOPT_NORM_SIGNED = -1 };

/** Result of dsopt_tensors_norm. */
typedef struct dsopt_norm_result {
    /** L2: squares and sums in double. Each tensor is split into leaves of 4096 elements. Elements of a leaf: lane l of
     *  128 adds elements l, l + 128, ..., lanes 4t to 4t + 3 are added as (a + b) + (c + d), and the upper half of the
     *  32 sums is added to the lower half, five times. Leaves of a tensor, and tensors of the list: lane l of 32 adds
     *  values l, l + 32, ..., then halves as above.
     *  MAX: largest magnitude, NaN if there is a NaN. */
    double norm;
    /** Factor that clips: min(1, max_norm / (norm + 1e-6)); 1 if max_norm is 0. */
    float coefficient;
    int32_t reserved;
    /** Number of Inf and NaN elements. */
    int64_t nonfinite;
    /** Index of the first tensor with such an element, -1 = none. */
    int64_t first_bad;
} dsopt_norm_result;

/**
 * Norm and finite check of a list in one read. Entries without data are ignored, here and below.
 * @param[in]  list    only read.
 * @param[in]  norm    enum dsopt_norm.
 * @param[in]  comm    optional: `norm` and `nonfinite` are over all its ranks; `first_bad` stays local.
 * @param[out] result  backend memory, written in stream order.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE, _ALIGNMENT; _COMM, _TIMEOUT, _ABORTED. Thread-safety: any, on different
 * lists.
 *
 * The norm over model and expert ranks, as the originals' get_grad_norm and get_weight_norm with mpu compute it. `list`
 * has the gradients or the weights of `params`. A parameter that every model rank has counts on model rank 0. With
 * DSOPT_PARAM_MODEL_PARALLEL the shard of each model rank counts, also of an expert. With DSOPT_PARAM_REPLICATED the
 * parameter is excluded, because another pipeline stage counts it. The squares of experts add up over the ranks of
 * their comm, then over the model ranks. The result is -1 if it is not finite. Steps do the same themselves
 * (dsopt_report.grad_norm), in fp64 all the way.
 *
 *     static dsopt_status norm_over_ranks(dsopt_context *ctx, const dsopt_param *params, const dsopt_tensor *list,
 *                                         dsopt_tensor *part, int64_t count, dsopt_comm *model, int model_rank,
 *                                         dsopt_comm *const *experts, int32_t expert_count, double *norm) {
 *         double squares = 0;
 *         for (int32_t k = 0; k <= expert_count; ++k) { // 0: dense parameters
 *             dsopt_norm_result result;                 // on CUDA in device memory, read once the stream is done
 *             for (int64_t i = 0; i < count; ++i) {
 *                 const int32_t flags = params[i].flags;
 *                 const int elsewhere = model_rank > 0 && !(flags & DSOPT_PARAM_MODEL_PARALLEL);
 *                 part[i] = list[i];
 *                 if (params[i].expert != k || elsewhere || (flags & DSOPT_PARAM_REPLICATED)) part[i].data = NULL;
 *             }
 *             dsopt_comm *const comm = k == 0 ? model : experts[k - 1];
 *             dsopt_status status = dsopt_tensors_norm(ctx, part, count, DSOPT_NORM_L2, 0, comm, &result, NULL);
 *             if (status == DSOPT_OK && k > 0 && model != NULL) { // and over the model ranks; fp32 as in the originals
 *                 float expert_norm = (float)result.norm;         // on CUDA in device memory
 *                 const dsopt_tensor tensor = {&expert_norm, 1, DSOPT_DTYPE_F32, 0};
 *                 status = dsopt_tensors_norm(ctx, &tensor, 1, DSOPT_NORM_L2, 0, model, &result, NULL);
 *             }
 *             if (status != DSOPT_OK) return status;
 *             squares += result.norm * result.norm;
 *         }
 *         *norm = squares <= DBL_MAX ? sqrt(squares) : -1;
 *         return DSOPT_OK;
 *     }
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_tensors_norm(dsopt_context *ctx, const dsopt_tensor *list, int64_t count,
                                                      int32_t norm, double max_norm, dsopt_comm *comm,
                                                      dsopt_norm_result *result, void *stream);

/**
 * y = a * x + b * y, element by element in fp32, between any two of the float dtypes. Clip (x = y, a = coefficient,
 * b = 0), scale, convert (b = 0), accumulate 16-bit gradients into fp32 (b = 1). y is not read if b = 0.
 * @param[in]     a      one float in backend memory; NULL = 1.
 * @param[in]     x      only read.
 * @param[in,out] y      as many entries with the same numels. Memory of x and y is equal or disjoint.
 * @param[in]     count  length of both lists.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE, _ALIGNMENT with nothing changed. Thread-safety: any, on different lists.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_tensors_axpby(dsopt_context *ctx, const float *a, const dsopt_tensor *x,
                                                       float b, const dsopt_tensor *y, int64_t count, void *stream);

/**
 * Clip every element to [-limit, limit]. NaN stays.
 * @param[in,out] list   F32, F16 or BF16.
 * @param[in]     limit  > 0.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE, _ALIGNMENT with nothing changed. Thread-safety: any, on different lists.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_tensors_clamp(dsopt_context *ctx, const dsopt_tensor *list, int64_t count,
                                                       double limit, void *stream);

/* -------------------------------------------------------------------------------------------- compressed all-reduce */
/**
 * Error-compensated 1-bit mean of a list over the ranks of a comm: one bit per element in each direction, two
 * collectives for the whole list (Tang et al. 2021; DeepSpeed's compressed_allreduce).
 *  - Each rank adds the residual of earlier calls, and sends signs and one scale (root mean square) per tensor.
 *  - The server rank of a chunk averages the messages, adds its residual, and sends signs and scales of the result to
 *    all ranks.
 *  - All ranks receive the same bits. Zeros and NaN count as positive. A NaN or Inf corrupts the buffers permanently:
 *    check for them first.
 * With `node` the exchange has two levels: full precision inside a node, bits between nodes. docs/onebit.md
 */
typedef struct dsopt_compressed {
    size_t size;
    /** F32, overwritten with the mean. The same sizes on all ranks. */
    const dsopt_tensor *tensors;
    int64_t count;
    /** Error feedback of this rank as a worker and as a server. Backend memory of the caller, kept between calls,
     * initially zero; sizes in floats from dsopt_compressed_sizes. They hold compensated values and scales, from which
     * dsopt_compressed_errors computes the residuals. */
    float *worker_error;
    float *server_error;
    /** Backend memory of any alignment. Holds no state. */
    void *workspace;
    size_t workspace_bytes;
    void *stream;
    /** enum dsopt_compat. NONE: one scale per tensor and chunk, without padding. DEEPSPEED: each tensor is padded to a
     * multiple of ranks * lcm(ranks, 8) elements, which enter scales and have residuals like all others. */
    int32_t compat;
    int32_t reserved;
    /** Optional: the ranks of this node, the same number in every node. The ranks of the comm, one per node, must all
     * have the same rank in `node`. A comm of one rank is treated as NULL. Refused in compat mode. */
    dsopt_comm *node;
} dsopt_compressed;

/**
 * Sizes for a list. Reads `tensors` (without their data), `count`, `compat` and `node`.
 * A buffer has elements first and scales after them. A worker has `count` scales, and as many elements as a server
 * times the ranks of the comm.
 * @param[out] worker     floats of worker_error. NULL = not wanted.
 * @param[out] server     floats of server_error. NULL = not wanted.
 * @param[out] workspace  bytes, enough for any alignment. NULL = not wanted.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE. Thread-safety: any.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_compressed_sizes(const dsopt_comm *comm, const dsopt_compressed *args,
                                                          int64_t *worker, int64_t *server, size_t *workspace);

/**
 * Exchange and average the list. Collective: the same list on all ranks.
 * @return DSOPT_OK; DSOPT_ERR_SHAPE, _DTYPE, _ARGUMENT, _ALIGNMENT, _WORKSPACE with nothing changed; _COMM, _TIMEOUT,
 * _ABORTED: the buffers are corrupted; _UNSUPPORTED by the backend or the comm. Thread-safety: one thread per comm.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_compressed_allreduce(dsopt_comm *comm, const dsopt_compressed *args);

/**
 * Copy the residuals of this rank as a worker and as a server: one float per element, without the scales. With two
 * levels a worker has the residuals of its slice only. Waits for `args->stream`.
 * @param[out] worker  host memory. NULL = not wanted.
 * @param[out] server  host memory. NULL = not wanted.
 * @return as dsopt_compressed_allreduce. Thread-safety: any.
 */
DSOPT_API DSOPT_CHECK dsopt_status dsopt_compressed_errors(const dsopt_comm *comm, const dsopt_compressed *args,
                                                           float *worker, float *server);

#ifdef __cplusplus
}
#endif
#endif
