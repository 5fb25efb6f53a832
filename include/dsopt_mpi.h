/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSOPT_MPI_H
#define DSOPT_MPI_H
/**
 * A dsopt_comm over MPI (3.0 or later), compiled by the program with its MPI, so one libdsopt works with all of them:
 *
 *     MPI_Init(&argc, &argv);
 *     dsopt_comm *comm; dsopt_mpi_comm(ctx, MPI_COMM_WORLD, &comm);
 *
 * Everything here is static and built on dsopt_comm_table. The table works in host memory; the engine stages data of a
 * CUDA context. dsopt_mpi_comm_device makes a comm that passes device memory to a CUDA-aware MPI.
 *
 *  - Calls that use the comm, and destroying its last handle, call MPI: make them from threads that MPI_Init_thread
 *    allows. dsopt_comm_abort does not call MPI and may be called from any thread. With MPI_THREAD_MULTIPLE a thread of
 *    the library exchanges buckets while gradients are missing (DSOPT_COMM_FLAG_ANY_THREAD).
 *  - Requests are polled, with a time-out, so if a rank hangs, the others return DSOPT_ERR_TIMEOUT. Requests of such a
 *    call cannot be cancelled: buffers and communicator are leaked, and MPI_Finalize may wait for the rank that hangs;
 *    MPI_Abort does not. If a rank dies, most launchers end the job before another rank can report it.
 *  - Ranks that make different calls, or calls with different sizes, get DSOPT_ERR_COMM. So do ranks if some of them
 *    made the comm with dsopt_mpi_comm_device and others with dsopt_mpi_comm: all ranks must call the same function.
 *  - Destroyed after MPI_Finalize, or in a child of fork(), the comm only frees its memory.
 */
#include "dsopt.h"
#include <mpi.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Largest number of bytes per call of MPI; more are sent in pieces, because MPI's counts are int. */
#ifndef DSOPT_MPI_PIECE
#define DSOPT_MPI_PIECE (4 << 20)
#endif
#if DSOPT_MPI_PIECE < 4096
#error "DSOPT_MPI_PIECE: 4096 at least, and no less than 4 bytes per rank"
#endif

/* Private up to dsopt_mpi_comm_timeout. */
typedef struct dsopt_mpi_ {
    MPI_Comm comm;
    int rank, ranks;
    int timeout_ms;
    int aborted; /* set by any thread */
    int lost;    /* MPI may still write to `send` and `recv` */
    long process;
    double begin; /* start of the call, for the time-out */
    /* Buffers of one piece. The caller's memory is not passed to MPI, because MPI may access it after a time-out. */
    char *send, *recv;
    MPI_Request *requests; /* NULL: the table works in host memory; else two per rank */
    char text[256];
} dsopt_mpi_;

static inline int dsopt_mpi_fail_(dsopt_mpi_ *self, int code) {
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    if (code > 0 && MPI_Error_string(code, text, &length) == MPI_SUCCESS)
        (void)snprintf(self->text, sizeof self->text, "%.250s", text);
    self->lost = 1;
    return code;
}

/* Returns 0 when the request is complete. */
static inline int dsopt_mpi_wait_(dsopt_mpi_ *self, MPI_Request *request, int started) {
    const double begin = MPI_Wtime();
    if (started != MPI_SUCCESS) return dsopt_mpi_fail_(self, started);
    for (;;) {
        int over = 0;
        double now;
        const int code = MPI_Test(request, &over, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS) return dsopt_mpi_fail_(self, code);
        if (over) return 0;
        now = MPI_Wtime();
        if (__atomic_load_n(&self->aborted, __ATOMIC_ACQUIRE)) return dsopt_mpi_fail_(self, -DSOPT_ERR_ABORTED);
        if (self->timeout_ms >= 0 && (now - self->begin) * 1e3 >= self->timeout_ms) {
            (void)snprintf(self->text, sizeof self->text, "not all ranks arrived within %d ms", self->timeout_ms);
            return dsopt_mpi_fail_(self, -DSOPT_ERR_TIMEOUT);
        }
        if (now - begin < 0.05)
            (void)sched_yield(); /* MPI makes progress only while it is polled */
        else
            (void)poll(NULL, 0, 1);
    }
}

/* Sends message d of `send` to rank d and receives message s of `recv` from rank s, for `count` ranks starting with
 * this rank. `send_step` and `recv_step` are the distances between messages in bytes. Device memory is used in
 * point-to-point messages only: every CUDA-aware MPI supports that. Open MPI's non-blocking collectives do not. */
static inline int dsopt_mpi_messages_(dsopt_mpi_ *self, int count, const char *send, int64_t send_step, char *recv,
                                      int64_t recv_step, int bytes) {
    int i, started = 0, code = MPI_SUCCESS;
    for (i = 0; code == MPI_SUCCESS && i < 2 * count; ++i) {
        MPI_Request *const request = &self->requests[started];
        const int receives = i < count; /* posted first */
        const int rank = (self->rank + (receives ? self->ranks - i : i - count)) % self->ranks;
        if (receives)
            code = MPI_Irecv(recv + rank * recv_step, bytes, MPI_BYTE, rank, 0, self->comm, request);
        else
            code = MPI_Isend(send + rank * send_step, bytes, MPI_BYTE, rank, 0, self->comm, request);
        started += code == MPI_SUCCESS;
    }
    if (code != MPI_SUCCESS) return dsopt_mpi_fail_(self, code);
    for (i = 0; !code && i < started; ++i) code = dsopt_mpi_wait_(self, &self->requests[i], MPI_SUCCESS);
    return code;
}

/* Copies between a buffer of `self` and memory of the table. MPI copies device memory, as a message of the rank to
 * itself. */
static inline int dsopt_mpi_copy_(dsopt_mpi_ *self, void *to, const void *from, size_t bytes) {
    if (self->requests) return dsopt_mpi_messages_(self, 1, (const char *)from, 0, (char *)to, 0, (int)bytes);
    memcpy(to, from, bytes);
    return 0;
}

/* Fails if ranks make different calls. MPI itself would return wrong data or wait forever. */
static inline int dsopt_mpi_begin_(dsopt_mpi_ *self, int kind, int64_t count, int32_t dtype, int32_t op) {
    int64_t *const mine = (int64_t *)(void *)self->send, *const most = (int64_t *)(void *)self->recv;
    /* A comm for host memory uses collectives, a comm for device memory uses point-to-point messages. */
    const int64_t call[4] = {self->requests ? -kind : kind, count, dtype, op};
    MPI_Request request;
    int i, code;
    if (self->lost) return -DSOPT_ERR_COMM;
    self->begin = MPI_Wtime();
    for (i = 0; i < 4; ++i) {
        mine[2 * i] = call[i];
        mine[2 * i + 1] = -call[i];
    }
    code = MPI_Iallreduce(mine, most, 8, MPI_INT64_T, MPI_MAX, self->comm, &request);
    code = dsopt_mpi_wait_(self, &request, code);
    if (code) return code;
    for (i = 0; i < 4; ++i)
        if (most[2 * i] != -most[2 * i + 1]) {
            (void)snprintf(self->text, sizeof self->text,
                           "ranks called different collectives or sizes, or made the comm by different functions");
            return -DSOPT_ERR_COMM;
        }
    return 0;
}

static inline int dsopt_mpi_all_reduce_(void *of, const void *send, void *recv, int64_t count, int32_t dtype,
                                        int32_t op, void *stream) {
    dsopt_mpi_ *const self = (dsopt_mpi_ *)of;
    const int64_t size = dtype == DSOPT_DTYPE_F64 ? 8 : 4, most = DSOPT_MPI_PIECE / size;
    const MPI_Datatype type = dtype == DSOPT_DTYPE_F64   ? MPI_DOUBLE
                              : dtype == DSOPT_DTYPE_F32 ? MPI_FLOAT
                                                         : MPI_INT32_T;
    const MPI_Op what = op == DSOPT_OP_MAX ? MPI_MAX : MPI_SUM;
    int64_t at;
    int code = dsopt_mpi_begin_(self, 1, count, dtype, op);
    (void)stream;
    for (at = 0; !code && at < count; at += most) {
        const int part = (int)(count - at < most ? count - at : most);
        const size_t bytes = (size_t)(part * size);
        MPI_Request request;
        code = dsopt_mpi_copy_(self, self->send, (const char *)send + at * size, bytes);
        if (code) break;
        if (dtype == DSOPT_DTYPE_I32 || op == DSOPT_OP_MAX) {
            code = MPI_Iallreduce(self->send, self->recv, part, type, what, self->comm, &request);
            code = dsopt_mpi_wait_(self, &request, code);
        } else {
            /* MPI does not guarantee that an all-reduce sums in the same order on every rank. */
            code = MPI_Ireduce(self->send, self->recv, part, type, what, 0, self->comm, &request);
            code = dsopt_mpi_wait_(self, &request, code);
            if (code) break;
            code = MPI_Ibcast(self->recv, part, type, 0, self->comm, &request);
            code = dsopt_mpi_wait_(self, &request, code);
        }
        if (!code) code = dsopt_mpi_copy_(self, (char *)recv + at * size, self->recv, bytes);
    }
    return code;
}

/* Exchanges messages of `bytes` with every rank, in slices of at most `most` bytes per message. */
static inline int dsopt_mpi_rows_(dsopt_mpi_ *self, const void *send, void *recv, int64_t bytes, int all_to_all) {
    const int64_t shared = DSOPT_MPI_PIECE / self->ranks > 0 ? DSOPT_MPI_PIECE / self->ranks : 1;
    const int64_t most = self->requests ? DSOPT_MPI_PIECE : shared;
    int64_t at;
    int row, code = dsopt_mpi_begin_(self, all_to_all ? 2 : 3, bytes, 0, 0);
    for (at = 0; !code && at < bytes; at += most) {
        const int part = (int)(bytes - at < most ? bytes - at : most);
        MPI_Request request;
        if (self->requests) {
            code = dsopt_mpi_messages_(self, self->ranks, (const char *)send + at, all_to_all ? bytes : 0,
                                       (char *)recv + at, bytes, part);
            continue;
        }
        for (row = 0; row < (all_to_all ? self->ranks : 1); ++row)
            memcpy(self->send + (int64_t)row * part, (const char *)send + row * bytes + at, (size_t)part);
        if (all_to_all)
            code = MPI_Ialltoall(self->send, part, MPI_BYTE, self->recv, part, MPI_BYTE, self->comm, &request);
        else
            code = MPI_Iallgather(self->send, part, MPI_BYTE, self->recv, part, MPI_BYTE, self->comm, &request);
        code = dsopt_mpi_wait_(self, &request, code);
        for (row = 0; !code && row < self->ranks; ++row)
            memcpy((char *)recv + row * bytes + at, self->recv + (int64_t)row * part, (size_t)part);
    }
    return code;
}
static inline int dsopt_mpi_all_to_all_(void *of, const void *send, void *recv, int64_t bytes, void *stream) {
    (void)stream;
    return dsopt_mpi_rows_((dsopt_mpi_ *)of, send, recv, bytes, 1);
}
static inline int dsopt_mpi_all_gather_(void *of, const void *send, void *recv, int64_t bytes, void *stream) {
    (void)stream;
    return dsopt_mpi_rows_((dsopt_mpi_ *)of, send, recv, bytes, 0);
}

/* Each rank gets the sum of its row, in pieces of at most DSOPT_MPI_PIECE bytes from all rows. */
static inline int dsopt_mpi_reduce_scatter_(void *of, const void *send, void *recv, int64_t count, int32_t dtype,
                                            int32_t op, void *stream) {
    dsopt_mpi_ *const self = (dsopt_mpi_ *)of;
    const int64_t most = DSOPT_MPI_PIECE / 4 / self->ranks;
    int64_t at;
    int row, code = dsopt_mpi_begin_(self, 4, count, dtype, op);
    (void)stream;
    for (at = 0; !code && at < count; at += most) {
        const int part = (int)(count - at < most ? count - at : most);
        const size_t bytes = (size_t)part * 4;
        MPI_Request request;
        for (row = 0; !code && row < self->ranks; ++row)
            code = dsopt_mpi_copy_(self, self->send + (size_t)row * bytes, (const char *)send + (row * count + at) * 4,
                                   bytes);
        if (code) break;
        code = MPI_Ireduce_scatter_block(self->send, self->recv, part, MPI_FLOAT, MPI_SUM, self->comm, &request);
        code = dsopt_mpi_wait_(self, &request, code);
        if (!code) code = dsopt_mpi_copy_(self, (char *)recv + at * 4, self->recv, bytes);
    }
    return code;
}

static inline int dsopt_mpi_error_(void *of, char *text, size_t capacity) {
    (void)snprintf(text, capacity, "%s", ((dsopt_mpi_ *)of)->text);
    return ((dsopt_mpi_ *)of)->lost;
}
static inline void dsopt_mpi_abort_(void *of) { __atomic_store_n(&((dsopt_mpi_ *)of)->aborted, 1, __ATOMIC_RELEASE); }
static inline void dsopt_mpi_destroy_(void *of) {
    dsopt_mpi_ *const self = (dsopt_mpi_ *)of;
    int finalized = 1;
    if (self->process == (long)getpid()) (void)MPI_Finalized(&finalized);
    /* The communicator of an unusable comm has a collective under way: it must not be freed. */
    if (!finalized && !self->lost && self->comm != MPI_COMM_NULL) (void)MPI_Comm_free(&self->comm);
    if (!self->lost || finalized) {
        free(self->send);
        free(self->recv);
    }
    free(self->requests);
    free(self);
}

static inline dsopt_status dsopt_mpi_create_(dsopt_context *ctx, MPI_Comm mpi, int32_t timeout_ms, int device,
                                             int32_t flags, dsopt_comm **comm) {
    dsopt_mpi_ *self;
    int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE, code;
    MPI_Request request;
    dsopt_status status;
    DSOPT_NEW(dsopt_comm_table, table);
    DSOPT_NEW(dsopt_comm_desc, desc);
    if (timeout_ms < -1) return DSOPT_ERR_ARGUMENT;
    (void)MPI_Initialized(&initialized);
    (void)MPI_Finalized(&finalized);
    if (!initialized || finalized) return DSOPT_ERR_STATE;
    self = (dsopt_mpi_ *)calloc(1, sizeof *self);
    if (!self) return DSOPT_ERR_NOMEM;
    self->comm = MPI_COMM_NULL;
    self->process = (long)getpid();
    self->timeout_ms = timeout_ms == 0 ? 600000 : timeout_ms;
    self->send = (char *)malloc(DSOPT_MPI_PIECE + 64);
    self->recv = (char *)malloc(DSOPT_MPI_PIECE + 64);
    if (!self->send || !self->recv) {
        dsopt_mpi_destroy_(self);
        return DSOPT_ERR_NOMEM;
    }
    self->begin = MPI_Wtime();
    code = MPI_Comm_idup(mpi, &self->comm, &request);
    code = dsopt_mpi_wait_(self, &request, code);
    if (code) return code < 0 ? -code : DSOPT_ERR_COMM; /* MPI still writes to *self */
    code = MPI_Comm_set_errhandler(self->comm, MPI_ERRORS_RETURN);
    if (!code) code = MPI_Comm_rank(self->comm, &self->rank);
    if (!code) code = MPI_Comm_size(self->comm, &self->ranks);
    if (code || self->ranks > DSOPT_MPI_PIECE / 4) {
        dsopt_mpi_destroy_(self);
        return code ? DSOPT_ERR_COMM : DSOPT_ERR_ARGUMENT;
    }
    if (device) {
        self->requests = (MPI_Request *)calloc(2 * (size_t)self->ranks, sizeof *self->requests);
        if (!self->requests) {
            dsopt_mpi_destroy_(self);
            return DSOPT_ERR_NOMEM;
        }
        table.memory = DSOPT_MEMORY_BACKEND;
        flags |= DSOPT_COMM_FLAG_SYNCHRONIZE;
    }
    if (MPI_Query_thread(&level) == MPI_SUCCESS && level == MPI_THREAD_MULTIPLE) flags |= DSOPT_COMM_FLAG_ANY_THREAD;
    table.self = self;
    table.rank = self->rank;
    table.ranks = self->ranks;
    table.all_reduce = dsopt_mpi_all_reduce_;
    table.all_to_all = dsopt_mpi_all_to_all_;
    table.all_gather = dsopt_mpi_all_gather_;
    table.reduce_scatter = dsopt_mpi_reduce_scatter_;
    table.error = dsopt_mpi_error_;
    table.abort = dsopt_mpi_abort_;
    table.destroy = dsopt_mpi_destroy_;
    desc.kind = DSOPT_COMM_KIND_TABLE;
    desc.table = &table;
    desc.flags = flags;
    status = dsopt_comm_create(ctx, &desc, comm);
    if (status != DSOPT_OK) dsopt_mpi_destroy_(self);
    return status;
}

/** dsopt_mpi_comm with a time-out in milliseconds, 0 = 600000, -1 = none; it bounds this call too. */
static inline dsopt_status dsopt_mpi_comm_timeout(dsopt_context *ctx, MPI_Comm mpi, int32_t timeout_ms,
                                                  dsopt_comm **comm) {
    return dsopt_mpi_create_(ctx, mpi, timeout_ms, 0, 0, comm);
}

/**
 * dsopt_mpi_comm_timeout with means of gradients that MPI adds up: DSOPT_COMM_FLAG_PROVIDER_SUMS. All ranks must call
 * this function. Since: 0.3
 */
static inline dsopt_status dsopt_mpi_comm_sums(dsopt_context *ctx, MPI_Comm mpi, int32_t timeout_ms,
                                               dsopt_comm **comm) {
    return dsopt_mpi_create_(ctx, mpi, timeout_ms, 0, DSOPT_COMM_FLAG_PROVIDER_SUMS, comm);
}

/**
 * dsopt_mpi_comm_timeout for a CUDA-aware MPI, which receives device memory of the context. All ranks must call this
 * function.
 *  - The MPI library must be CUDA-aware. There is no portable way to check this, so it is not checked. An MPI library
 *    that is not CUDA-aware reads device memory as host memory, which crashes most programs. Ranks may be on devices of
 *    different machines.
 *  - All-to-all and all-gather do not use host memory unless MPI does. They are point-to-point messages of at most
 *    DSOPT_MPI_PIECE bytes between device memory of two ranks.
 *  - An all-reduce sums in host memory, in the order of dsopt_mpi_comm and with its bits; MPI copies each piece from
 *    the device and back, as a message of the rank to itself.
 *  - Order: the host waits for the stream of the call before MPI receives the data, and for MPI before the call
 *    continues. Steps with such a comm of several ranks cannot be captured in a graph.
 *  - The device's primary context is current while a collective calls MPI. It need not be when this function calls MPI
 *    (MPI_Comm_idup and queries), nor when the comm is destroyed (MPI_Comm_free) or its error text is read.
 *  - Ownership: MPI receives memory that belongs to the comm, not to the caller. If a collective fails with
 *    DSOPT_ERR_TIMEOUT, _ABORTED or _COMM, that device memory and the host buffers are leaked, because MPI may still
 *    read and write them. Tensors, workspaces and optimizers can be freed. A call that is refused because the comm is
 *    already unusable leaks nothing. See also DSOPT_COMM_FLAG_SYNCHRONIZE.
 * @return as dsopt_mpi_comm; DSOPT_ERR_UNSUPPORTED: not a CUDA context. Since: 0.2
 */
static inline dsopt_status dsopt_mpi_comm_device(dsopt_context *ctx, MPI_Comm mpi, int32_t timeout_ms,
                                                 dsopt_comm **comm) {
    return dsopt_mpi_create_(ctx, mpi, timeout_ms, 1, 0, comm);
}

/**
 * Make a comm over the ranks of `mpi`, which is duplicated; all of them must call. MPI errors of the duplicate do not
 * end the program, as they do by default.
 * @return as dsopt_comm_create; DSOPT_ERR_STATE: before MPI_Init or after MPI_Finalize; DSOPT_ERR_TIMEOUT;
 * DSOPT_ERR_COMM: MPI failed. dsopt_last_error() has a text only for failures of dsopt_comm_create.
 */
static inline dsopt_status dsopt_mpi_comm(dsopt_context *ctx, MPI_Comm mpi, dsopt_comm **comm) {
    return dsopt_mpi_comm_timeout(ctx, mpi, 0, comm);
}

#ifdef __cplusplus
}
#endif
#endif
