// SPDX-License-Identifier: Apache-2.0
// Exchanges of compressed values over comms, in one level or two (device/compress.h): sends the messages that devices
// pack, and runs the kernels that average received messages.
#pragma once
#include "comm/comm.h"
#include "device/kernels.h"
#include "exchange/layout.h"

namespace dsopt {

DataRank data_rank_of(const Comm *data, const Comm *node);

/// Packs this rank's messages. `feed` runs the kernels that compute compensated values and pack them.
void pack_messages(ExchangeKernels &kernels, FunctionRef<void()> feed);
/// Exchanges packed messages, so that every rank of `comm` has the results.
void exchange_messages(Comm &comm, ExchangeKernels &kernels, const Compression &local, void *stream);

// ExchangeUse::list.
/// Prepares the messages of this rank, or with two levels its vector. `feed` runs the kernels that compute compensated
/// values and pack them, or with two levels store values to the vector.
void prepare_exchange(ExchangeKernels &kernels, const Exchange &buffers, FunctionRef<void()> feed);
/// Sends the prepared messages or vector. Afterwards every rank has the results. With one node the result is the exact
/// mean, in the vector. `data` is NULL with one node, `node` is NULL with one level.
void exchange(Comm *data, Comm *node, ExchangeKernels &kernels, const Exchange &buffers, void *stream);

/// Reserves memory of the comms for exchange() or, according to `use`, for the exchange of a step.
void reserve_exchange(Comm *data, Comm *node, const ExchangeLayout &layout, ExchangeUse use, void *stream);

/// Returns `node`, or NULL for a node of one rank. Throws if `node` cannot be used together with `data` or `compat`.
const Comm *check_node(const Comm *data, const Comm *node, int32_t compat);

/// Writes residuals to host memory, one float per element of the worker's or the server's values; NULL = not wanted.
void read_residuals(const Device &device, const Exchange &buffers, float *worker, float *server);

/// Implement dsopt_compressed_sizes, dsopt_compressed_allreduce and dsopt_compressed_errors.
OwnedLayout make_layout(const Comm &comm, const Comm *node, const dsopt_compressed &args);
void compressed_allreduce(Comm &comm, Comm *node, const dsopt_compressed &args);
void compressed_errors(const Comm &comm, const Comm *node, const dsopt_compressed &args, float *worker, float *server);

} // namespace dsopt
