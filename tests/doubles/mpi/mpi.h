// SPDX-License-Identifier: Apache-2.0
// A test double of the part of MPI that dsopt_mpi.h calls. Ranks are threads of one process.
#pragma once
#include <cstddef>
#include <cstdint>

struct FakeMpiEndpoint;  // one rank's endpoint of a communicator
struct FakeMpiOperation; // one rank's arguments of a collective, or of a send or receive
struct MPI_Status;
using MPI_Comm = FakeMpiEndpoint *;
using MPI_Request = FakeMpiOperation *;
using MPI_Datatype = int;
using MPI_Op = int;
using MPI_Errhandler = int;

enum { MPI_SUCCESS = 0, MPI_ERR_TRUNCATE = 14, MPI_ERR_OTHER = 15, MPI_MAX_ERROR_STRING = 128 };
enum { MPI_BYTE, MPI_INT32_T, MPI_INT64_T, MPI_FLOAT, MPI_DOUBLE };
enum { MPI_SUM, MPI_MAX };
enum { MPI_ERRORS_RETURN = 1 };
enum { MPI_THREAD_SINGLE, MPI_THREAD_MULTIPLE = 3 };
#define MPI_COMM_NULL nullptr
#define MPI_COMM_WORLD fake_mpi_world()
#define MPI_STATUS_IGNORE nullptr

/// Returns the communicator of the calling thread: see FakeMpi.
MPI_Comm fake_mpi_world();

double MPI_Wtime();
int MPI_Initialized(int *flag);
int MPI_Query_thread(int *level);
int MPI_Finalized(int *flag);
int MPI_Error_string(int code, char *text, int *length);
int MPI_Comm_set_errhandler(MPI_Comm comm, MPI_Errhandler handler);
int MPI_Comm_rank(MPI_Comm comm, int *rank);
int MPI_Comm_size(MPI_Comm comm, int *ranks);
int MPI_Comm_idup(MPI_Comm comm, MPI_Comm *other, MPI_Request *request);
int MPI_Comm_free(MPI_Comm *comm);
int MPI_Test(MPI_Request *request, int *complete, MPI_Status *status);
int MPI_Isend(const void *from, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request);
int MPI_Irecv(void *to, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request *request);
int MPI_Iallreduce(const void *from, void *to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                   MPI_Request *request);
int MPI_Ireduce(const void *from, void *to, int count, MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm,
                MPI_Request *request);
int MPI_Ireduce_scatter_block(const void *from, void *to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                              MPI_Request *request);
int MPI_Ibcast(void *data, int count, MPI_Datatype type, int root, MPI_Comm comm, MPI_Request *request);
int MPI_Ialltoall(const void *from, int count, MPI_Datatype type, void *to, int received, MPI_Datatype received_type,
                  MPI_Comm comm, MPI_Request *request);
int MPI_Iallgather(const void *from, int count, MPI_Datatype type, void *to, int received, MPI_Datatype received_type,
                   MPI_Comm comm, MPI_Request *request);
