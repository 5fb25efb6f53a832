// SPDX-License-Identifier: Apache-2.0
// Error-compensated 1-bit mean over the ranks of a comm (spec of Tang et al. 2021; DeepSpeed's compressed_allreduce).
//
// Every rank adds the residual of earlier calls to its values and keeps the result, the compensated values. One bit an
// element and one scale a scale group of them form the message to the rank that serves the chunk in which the elements
// are. That rank averages the messages, adds its own residual, and sends one bit an element and its scales to all.
//
// The residual is `value - scale * sign(value)` of a compensated value: with that and its scale at hand it is formed on
// the fly in the next call, which saves a pass over it.
//
// Two levels: the ranks of a node first take the exact mean of the vector, each that of one slice; a slice is then
// compressed and exchanged by the ranks that have it, one a node, and its results go to every rank of the node.
#pragma once
#include "base/range.h"
#include "base/sizes.h"
#include "rules/onebit.h"
#include <memory>

namespace dsopt {

/// Where each element of a vector is: among a worker's values, among a server's, and in a message. Plain numbers, and
/// arrays that are all in one block of memory: a copy of the block and place() make the same layout on a device.
struct CompressLayout {
    /// A vector that is cut into one chunk a rank.
    struct Unit {
        int64_t begin;  // first of the worker's elements
        int64_t chunk;  // elements a rank
        int64_t server; // first of a server's elements, and of a message's bits
    };
    /// The worker's elements that have one scale.
    struct ScaleGroup : Range {
        int64_t used; // elements that are some tensor's; the rest is padding
        Unit unit;    // in which they are
    };
    /// The scales in front of a message are those of scale groups that follow one another.
    struct Chunk {
        int32_t first_group, scales;
    };
    /// The elements of a scale group that are in one chunk.
    struct Segment : Range { // of the worker's elements
        int64_t server;      // as in Unit
    };
    int32_t ranks = 1, rank = 0;
    int32_t group_count = 0, segment_count = 0;
    int64_t worker_numel = 0, server_numel = 0;
    /// Every scale group has whole words of bits of its own, and so has what is behind the last one: the worker's
    /// elements from `used_numel` on, a multiple of 32. Else groups end at any byte, and nothing is behind them.
    bool whole_words = false;
    int64_t used_numel = 0;
    int64_t message_scales = 0; // in front of the bits of every message
    /// Whole vectors of 16 bytes: messages are contiguous, and NCCL copies what does not begin at one byte by byte.
    int64_t message_bytes = 0;
    int64_t group_leaves = 0, segment_leaves = 0; // of all groups, and of all segments
    ScaleGroup *groups = nullptr;
    Chunk *chunks = nullptr;     // one a rank
    Segment *segments = nullptr; // of this rank's chunk, one for each of its scales, in their order
    // Running numbers of leaves, one more than there are groups or segments.
    int64_t *group_leaf = nullptr, *segment_leaf = nullptr;

    /// Where the arrays are in a block.
    void place(Pieces &block) {
        block.take(groups, group_count);
        block.take(chunks, ranks);
        block.take(segments, segment_count);
        block.take(group_leaf, group_count + 1);
        block.take(segment_leaf, segment_count + 1);
    }
    DSOPT_HD static Segment segment_of(const ScaleGroup &group, int64_t chunk) {
        const Range all{group.unit.begin + chunk * group.unit.chunk, group.unit.chunk, group.whole};
        const Range range = intersection(group, all);
        return {range, group.unit.server + range.begin - all.begin};
    }
    /// Of a server's elements: the end of the last word that is a segment's.
    DSOPT_HD int64_t used_by_server() const {
        if (segment_count == 0) return 0;
        const Segment &last = segments[segment_count - 1];
        return bits_of_elements(last.server + last.numel);
    }
    /// Signs that are written where a group has so many elements: those behind them are 1, as all that no group has.
    DSOPT_HD int64_t bits_of_elements(int64_t numel) const { return whole_words ? round_up(numel, 32) : numel; }
    DSOPT_HD const Chunk &own_chunk() const { return chunks[rank]; }
    DSOPT_HD int64_t messages_bytes() const { return message_bytes * ranks; }
    /// Floats of the buffers that are kept from call to call: elements, then scales.
    DSOPT_HD int64_t worker_floats() const { return worker_numel + group_count; }
    DSOPT_HD int64_t server_floats() const { return server_numel + message_scales; }
    // What is in a message.
    DSOPT_HD static float *scales(char *message) { return reinterpret_cast<float *>(message); }
    DSOPT_HD static const float *scales(const char *message) { return reinterpret_cast<const float *>(message); }
    DSOPT_HD uint8_t *bits(char *message) const { return reinterpret_cast<uint8_t *>(message) + message_scales * 4; }
    DSOPT_HD const uint8_t *bits(const char *message) const {
        return reinterpret_cast<const uint8_t *>(message) + message_scales * 4;
    }
};

/// Two levels: the vector of a whole list, and this rank's slice of it, which is what is compressed. With one level a
/// node has one rank, and the slice is the whole.
struct ExchangeLayout {
    CompressLayout whole; // one chunk for each rank of each node
    CompressLayout slice; // one chunk for each node; its scale groups are the elements of tensors in the slice
    int32_t node_ranks = 1, node_rank = 0;

    bool has_levels() const { return node_ranks > 1; }
    /// One node: nothing is compressed, and there is nothing to keep. The slice's layout is empty.
    bool is_exact() const { return has_levels() && slice.ranks == 1; }
    /// Of the whole vector.
    Range slice_range() const {
        const int64_t numel = whole.worker_numel / node_ranks;
        return {node_rank * numel, numel, whole.worker_numel};
    }
    /// Words of bits up to the last tensor's end: the same for any number of ranks.
    int64_t used_words() const {
        if (whole.group_count == 0) return 0;
        const CompressLayout::ScaleGroup &last = whole.groups[whole.group_count - 1];
        return (last.end() + 31) / 32;
    }
    /// Returns the bytes of the block. `block` NULL: only to know them.
    size_t place(void *block) {
        Pieces pieces(block);
        whole.place(pieces);
        if (has_levels())
            slice.place(pieces);
        else
            slice = whole;
        return pieces.bytes();
    }
};

/// A layout that owns its block, in host memory.
struct OwnedLayout : ExchangeLayout {
    std::unique_ptr<char[]> block;
    size_t bytes = 0;
};

/// Compression of one vector by this rank, as a worker and as a server. Knows nothing of levels.
struct Compression {
    CompressLayout layout;
    float *worker = nullptr, *server = nullptr; // compensated values, and their scales behind them
    const int32_t *active = nullptr; // a bit for each of the worker's elements, lowest first: it takes part; NULL = all
    char *send = nullptr;            // messages to each rank
    char *recv = nullptr;            // messages from each rank
    char *result = nullptr;          // the message that this rank makes as a server
    char *results = nullptr;         // those of all servers
    double *sums = nullptr;          // sum of squares of each leaf
    int32_t *counts = nullptr;       // how many elements of each leaf take part
    const int32_t *skip = nullptr;   // in backend memory, nonzero = leave everything unchanged; NULL = never skipped

    /// The exchange of a skipped step goes on, as other ranks expect, and changes nothing.
    DSOPT_HD bool skipped() const { return skip != nullptr && *skip != 0; }
    DSOPT_HD float *worker_scales() const { return worker + layout.worker_numel; }
    DSOPT_HD float *server_scales() const { return server + layout.server_numel; }
    DSOPT_HD char *message_to(int64_t rank) const { return send + rank * layout.message_bytes; }
};

/// The mean of a list, as an exchange leaves it on every rank.
struct ListMean {
    CompressLayout layout;
    char *results = nullptr;         // messages of all servers
    const float *values = nullptr;   // the mean itself, where nothing is compressed; else NULL
    const int32_t *active = nullptr; // as in Compression, for all elements of the list
};

/// Two levels: full precision inside a node.
struct NodeSlices {
    int32_t ranks = 1;
    int64_t numel = 0;       // of a slice
    float *vector = nullptr; // a slice for each rank of the node; NULL: one level
    float *slices = nullptr; // this rank's slice as each rank of the node sent it
};

/// One exchange, on the host and as kernels see it.
struct Exchange {
    const OwnedLayout *layout = nullptr; // the host's
    Compression own;                     // of the list; with two levels of this rank's slice
    ListMean mean;
    NodeSlices node;

    Exchange() = default;
    Exchange(const OwnedLayout &of, float *worker, float *server, const int32_t *active, void *workspace) :
        layout(&of),
        own{.layout = of.slice,
            .worker = worker,
            .server = server,
            .active =
                active != nullptr ? active + of.slice_range().begin / 32 : nullptr}, // slices begin at whole words
        mean{.layout = of.whole, .active = active},
        node{.ranks = of.node_ranks, .numel = of.slice_range().numel} {
        (void)take_from(workspace);
    }
    static size_t workspace_bytes(const OwnedLayout &layout) {
        return Exchange(layout, nullptr, nullptr, nullptr, nullptr).take_from(nullptr);
    }
    /// For a device that has a copy of the layout's block at `block`, and a word that says that the step is skipped.
    Exchange on_device(void *block, const int32_t *skip) const {
        Exchange there = *this;
        ExchangeLayout copy = *layout;
        (void)copy.place(block);
        there.own.layout = copy.slice;
        there.mean.layout = copy.whole;
        there.own.skip = skip;
        return there;
    }

private:
    /// Returns how many bytes it takes. NULL: it only counts them.
    size_t take_from(void *workspace) {
        const CompressLayout &sent = own.layout;
        const int64_t leaves = sent.group_leaves > sent.segment_leaves ? sent.group_leaves : sent.segment_leaves;
        Pieces pieces(workspace);
        for (char **messages : {&own.send, &own.recv, &own.results}) pieces.take(*messages, sent.messages_bytes());
        pieces.take(own.result, sent.message_bytes);
        pieces.take(own.sums, leaves);
        pieces.take(own.counts, leaves);
        mean.results = own.results;
        if (!layout->has_levels()) return pieces.bytes();
        pieces.take(mean.results, layout->is_exact() ? 0 : mean.layout.messages_bytes());
        pieces.take(node.vector, mean.layout.worker_numel);
        pieces.take(node.slices, mean.layout.worker_numel);
        if (layout->is_exact()) mean.values = node.vector;
        return pieces.bytes();
    }
};

} // namespace dsopt
