// SPDX-License-Identifier: Apache-2.0
// Exchanges of compressed values over comms: what devices pack goes over the wire, and what arrives is served. One
// level or two (device/compress.h).
#pragma once
#include "comm/comm.h"
#include "device/loops.h"
#include "exchange/layout.h"

namespace dsopt {

DataRank data_rank_of(const Comm *data, const Comm *node);

/// What a rank brings to an exchange: messages, or with two levels the vector. `feed` runs the loops that add values to
/// the compensated ones and pack them, or with two levels write them to the vector.
void prepare_exchange(ExchangeLoops &loops, const Exchange &buffers, FunctionRef<void()> feed);
/// From there to results on every rank. With one node the result is the exact mean, in the vector. `data` is NULL on
/// one node, `node` with one level.
void exchange(Comm *data, Comm *node, ExchangeLoops &loops, const Exchange &buffers, void *stream);

/// Memory of the comms for exchange(), and for sum_over_ranks() of so many values.
void reserve_exchange(Comm *data, Comm *node, const ExchangeLayout &layout, void *stream);
void reserve_sum(Comm *data, Comm *node, int64_t numel, void *stream);

/// Sum in full precision over all ranks. Without `node` it is one all-reduce. With `node` only this rank's slice leaves
/// the node; `numel` must be a multiple of its ranks, and `scratch` has as many floats. All ranks get the same bits,
/// because each element is added up in one order, and the ranks of a node in theirs, in one pass.
void sum_over_ranks(const Context &context, Comm *data, Comm *node, float *values, int64_t numel, float *scratch,
                    const Parallel &parallel, void *stream);

/// The ranks of a node as exchanges see them: NULL for a node of one rank. Refuses what cannot be one beside `data`.
const Comm *check_node(const Comm *data, const Comm *node, int32_t compat);

/// Residuals, one float an element of the worker's or the server's values, to host memory; NULL = not wanted.
void read_residuals(const Device &device, const Exchange &buffers, float *worker, float *server);

/// dsopt_compressed_allreduce, dsopt_compressed_errors and dsopt_compressed_sizes.
OwnedLayout make_layout(const Comm &comm, const Comm *node, const dsopt_compressed &args);
void compressed_allreduce(Comm &comm, Comm *node, const dsopt_compressed &args);
void compressed_errors(const Comm &comm, const Comm *node, const dsopt_compressed &args, float *worker, float *server);

} // namespace dsopt
