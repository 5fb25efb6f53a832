// SPDX-License-Identifier: Apache-2.0
// Error-compensated 1-bit mean over the ranks of a comm (spec of Tang et al. 2021; DeepSpeed's compressed_allreduce).
//
// Every rank adds what earlier calls owe to its values and keeps the sum; one bit an element and one scale a tensor of
// it go to the rank that serves the chunk in which the element lies. That rank averages, adds what it owes itself, and
// sends one bit an element and its own scales to all.
//
// What is owed, the error, is `kept - scale * sign(kept)`: with the kept sum and its scale at hand it is formed on the
// fly in the next call, which saves a pass over it.
//
// Two levels: the ranks of a node first take their exact mean, each that of one slice of the vector; a slice is then
// compressed and exchanged by the ranks that have it, one a node, and ends in every rank of the node as bits.
#pragma once
#include "rules/onebit.h"
#include <memory>
#include <vector>

namespace dsopt {

/// Where each element is: in a worker's buffer, in a server's buffer, and in the row that goes over the wire.
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
        int64_t used; // elements that are some tensor's; the rest is padding
        int32_t unit;
    };
    /// The stretch of a part in one chunk.
    struct Segment {
        int64_t begin, numel; // in the worker's elements
        int64_t server;       // as in Unit
        int32_t part;
    };
    int ranks, rank;
    int64_t worker_numel = 0, server_numel = 0;
    int64_t row_scales = 0; // in front of the bits of every row
    std::vector<Unit> units;
    std::vector<Part> parts;
    std::vector<std::vector<Segment>> chunks; // one a rank
    std::vector<int32_t> first_part;          // of every chunk; its scale is the first in the row
    std::vector<int32_t> slots;               // of every chunk: scales in the row
    // Running numbers of leaves, one more than there are parts, and segments of the own chunk.
    std::vector<int64_t> part_leaf{0}, segment_leaf{0};
    /// Two levels: the layout of the whole vector, with one chunk for each rank of each node. The other members then
    /// describe this rank's slice, with one chunk for each node; its parts are the stretches of tensors in the slice.
    std::shared_ptr<const CompressLayout> whole;
    int node_ranks = 1;
    int64_t slice = 0, slice_begin = 0; // elements

    explicit CompressLayout(int count = 1, int own = 0) :
        ranks(count),
        rank(own),
        chunks(size_t(count)),
        first_part(size_t(count)),
        slots(size_t(count)) {}
    /// The original's: every tensor is a vector of its own, padded to a multiple of ranks * lcm(ranks, 8) with elements
    /// that count like any other.
    static CompressLayout padded(int ranks, int rank, const std::vector<int64_t> &numels);
    /// The whole list is one vector, with one scale a tensor. Tensors begin at multiples of 32 elements; what is
    /// between them takes no part.
    static CompressLayout bucket(int ranks, int rank, const std::vector<int64_t> &numels);
    /// The same vector in slices. With one node nothing is compressed, and there is nothing to keep.
    static CompressLayout two_level(int ranks, int rank, int node_ranks, int node_rank,
                                    const std::vector<int64_t> &numels);

    bool has_levels() const { return whole != nullptr; }
    bool is_exact() const { return has_levels() && ranks == 1; }
    /// Where tensors are in the list's vector.
    const CompressLayout &all() const { return whole ? *whole : *this; }
    /// Words of bits up to the last part's end: the same for any number of ranks.
    int64_t used_words() const {
        const std::vector<Part> &list = all().parts;
        return list.empty() ? 0 : (list.back().begin + list.back().numel + 31) / 32;
    }
    int64_t rows_bytes() const { return row_bytes() * ranks; }
    /// Whole vectors of 16 bytes: rows follow one another, and NCCL copies what does not begin at one byte by byte.
    int64_t row_bytes() const { return (row_scales * 4 + server_numel / 8 + 15) / 16 * 16; }
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
struct ExchangeBuffers {
    const CompressLayout *layout = nullptr;
    float *worker = nullptr, *server = nullptr;
    const int32_t *active = nullptr; // a bit for each element of the list, lowest first: it takes part; NULL = all do
    char *send = nullptr;            // rows to each rank
    char *recv = nullptr;            // rows from each rank
    char *result = nullptr;          // the row that this rank makes as a server
    char *results = nullptr;         // the results of all ranks; with two levels those of all slices
    double *sums = nullptr;          // sum of squares of each leaf
    int32_t *counts = nullptr;       // how many elements of each leaf take part
    const void *table = nullptr;     // CUDA: the layout in device memory; NULL until it is uploaded
    const int32_t *skip = nullptr;   // in backend memory, nonzero = leave everything unchanged; NULL = never skipped
    float *message = nullptr;        // two levels: the whole vector, one slice for each rank of the node
    float *slices = nullptr;         // two levels: this rank's slice as each rank of the node sent it
    char *slice_results = nullptr;   // the results of this rank's slice; with one level the same as `results`
    ExchangeBuffers() = default;
    ExchangeBuffers(const CompressLayout &layout, float *worker, float *server, void *workspace);
    size_t take_from(void *workspace);
    /// The same of the worker's elements. Slices begin at whole words.
    const int32_t *own_active() const { return active != nullptr ? active + layout->slice_begin / 32 : nullptr; }
    float *worker_scales() const { return worker + layout->worker_numel; }
    float *server_scales() const { return server + layout->server_numel; }
    char *row(char *rows, int64_t index) const { return rows + index * layout->row_bytes(); }
    static float *scales(char *row) { return reinterpret_cast<float *>(row); }
    uint8_t *bits(char *row) const { return reinterpret_cast<uint8_t *>(row) + layout->row_scales * 4; }
};

} // namespace dsopt
