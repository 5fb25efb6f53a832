// SPDX-License-Identifier: Apache-2.0
// Error-compensated 1-bit mean over the ranks of a comm (spec of Tang et al. 2021; DeepSpeed's compressed_allreduce).
//
// Every rank adds what earlier calls owe to its values and keeps the sum; one bit an element and one scale a tensor of
// it go to the rank that serves the chunk in which the element lies. That rank averages, adds what it owes itself, and
// sends one bit an element and its own scales to all.
//
// What is owed, the error, is `kept - scale * sign(kept)`: with the kept sum and its scale at hand it is formed on the
// fly in the next call, which saves a pass over it.
#pragma once
#include "context.h"
#include <vector>

namespace dsopt {

class Comm;

/// Where everything is: in the buffer of a worker, in that of a server, in a row of a message.
struct CompressLayout {
    /// A vector that is cut into one chunk a rank.
    struct Unit {
        int64_t begin;  // first of the worker's elements
        int64_t chunk;  // elements a rank
        int64_t server; // first of a server's elements, and of a row's bits
    };
    /// What has one scale among a worker's elements.
    struct Part {
        int64_t begin, numel;
        int32_t unit;
    };
    /// The stretch of a part in one chunk.
    struct Segment {
        int64_t begin, numel; // in the worker's elements
        int64_t server;       // as in Unit
        int32_t part;
    };
    int ranks = 1, rank = 0;
    int64_t worker_numel = 0, server_numel = 0;
    int64_t row_scales = 0; // in front of the bits of every row
    std::vector<Unit> units;
    std::vector<Part> parts;
    std::vector<std::vector<Segment>> chunks; // one a rank
    std::vector<int32_t> first_part;          // of every chunk; its scale is the first in the row
    // Running numbers of leaves, one more than there are parts, and segments of the own chunk.
    std::vector<int64_t> part_leaf{0}, segment_leaf{0};

    /// The original's: every tensor is a vector of its own, padded to a multiple of ranks * lcm(ranks, 8) with elements
    /// that count like any other.
    static CompressLayout padded(int ranks, int rank, const std::vector<int64_t> &numels);
    /// The whole list is one vector, with one scale a tensor. Tensors begin at multiples of 32 elements; what is
    /// between them takes no part.
    static CompressLayout bucket(int ranks, int rank, const std::vector<int64_t> &numels);

    /// Words of bits up to the last part's end: the same for any number of ranks.
    int64_t used_words() const { return parts.empty() ? 0 : (parts.back().begin + parts.back().numel + 31) / 32; }
    int64_t row_bytes() const { return row_scales * 4 + (server_numel / 8 + 3) / 4 * 4; }
    /// Floats of the buffers that are kept from call to call: elements, then scales.
    int64_t worker_floats() const { return worker_numel + int64_t(parts.size()); }
    int64_t server_floats() const { return server_numel + row_scales; }
    int64_t leaves() const { return part_leaf.back() > segment_leaf.back() ? part_leaf.back() : segment_leaf.back(); }
    const std::vector<Segment> &own_segments() const { return chunks[size_t(rank)]; }
    size_t workspace_bytes() const;

private:
    void count_leaves();
};

/// One exchange: buffers and where the parts of the workspace are.
struct Exchange {
    const CompressLayout *layout = nullptr;
    float *worker = nullptr, *server = nullptr;
    const int32_t *active =
        nullptr; // a bit for each of the worker's elements, lowest first: it takes part; NULL = all do
    // Rows: one a rank, one a rank, one, one a rank. One a leaf: the sum of squares, and how many elements take part.
    char *send = nullptr, *recv = nullptr, *result = nullptr, *results = nullptr;
    double *sums = nullptr;
    int32_t *counts = nullptr;
    // Of a backend that is not the host: the layout in its memory, and where it says that nothing is to change. NULL:
    // there is none yet, there is no such word.
    const void *table = nullptr;
    const int32_t *skip = nullptr;
    Exchange() = default;
    Exchange(const CompressLayout &layout, float *worker, float *server, void *workspace);
    float *worker_scales() const { return worker + layout->worker_numel; }
    float *server_scales() const { return server + layout->server_numel; }
    char *row(char *rows, int64_t index) const { return rows + index * layout->row_bytes(); }
    static float *scales(char *row) { return reinterpret_cast<float *>(row); }
    uint8_t *bits(char *row) const { return reinterpret_cast<uint8_t *>(row) + layout->row_scales * 4; }
};

/// From rows to rows of results on every rank.
void exchange(const Context &context, Comm &comm, const Exchange &exchange, const Parallel &parallel, void *stream);

/// dsopt_compressed_allreduce, dsopt_compressed_errors and dsopt_compressed_sizes.
CompressLayout make_layout(const Comm *comm, const dsopt_compressed &args);
void compressed_allreduce(const Context &context, Comm &comm, const dsopt_compressed &args);
void compressed_errors(const Context &context, const Comm &comm, const dsopt_compressed &args, float *worker,
                       float *server);

} // namespace dsopt
