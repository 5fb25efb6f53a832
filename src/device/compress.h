// SPDX-License-Identifier: Apache-2.0
// Error-compensated 1-bit mean over the ranks of a comm (spec of Tang et al. 2021; DeepSpeed's compressed_allreduce).
//
// Every rank adds the residual of its earlier messages to its values. The sums are the compensated values, which are
// stored for the next call. One sign bit per element and one scale per scale group form the message to the server of
// these elements, the rank that averages their chunk. The server averages the messages, adds its own residual, and
// sends one bit per element and its scales to all ranks.
//
// The residual is `value - scale * sign(value)` of a compensated value. The next call computes the residual from the
// stored value and its scale, which saves a pass.
//
// Two levels: the ranks of a node first average in full precision, each rank one slice. A slice is then compressed and
// exchanged by the ranks that have it, one per node, and its results are sent to every rank of the node. A list is
// averaged itself (ExchangeUse::list); a step averages gradients, and feeds its slice as with one level.
#pragma once
#include "base/range.h"
#include "base/sizes.h"
#include "rules/onebit.h"
#include <memory>

namespace dsopt {

/// Maps each element of a vector to its index among a worker's values, among a server's values, and in a message. All
/// arrays of a layout are in one block of memory: with a copy of the block, place() creates the same layout on a
/// device.
struct CompressLayout {
    /// A vector that is partitioned into one chunk per rank.
    struct Unit {
        int64_t begin;  // index of the unit's first element among the worker's elements
        int64_t chunk;  // elements per rank
        int64_t server; // index of each chunk's first element among its server's elements, and of its bit in a message
    };
    /// Elements of the worker that share one scale.
    struct ScaleGroup : Range {
        int64_t used; // elements that belong to tensors; the rest is padding
        Unit unit;    // the unit that contains the elements
    };
    /// The scales at the start of a message are those of consecutive scale groups.
    struct Chunk {
        int32_t first_group, scales;
    };
    /// The elements of a scale group that are in one chunk.
    struct Segment : Range { // range of the worker's elements
        int64_t server;      // index of the first element among the server's elements, and of its bit in a message
    };
    int32_t ranks = 1, rank = 0;
    int32_t group_count = 0, segment_count = 0;
    int64_t worker_numel = 0, server_numel = 0;
    /// True: groups begin at whole words of bits, no chunk begins between two groups, and elements from `used_numel` on, a
    /// multiple of 32, follow the last group. False: groups end at any byte, and no elements are between or after them.
    bool whole_words = false;
    /// True: the vector also has tensors that are never exchanged, which groups without elements stand for. Bits between
    /// groups are then set before messages are packed, because chunks may begin there.
    bool has_holes = false;
    int64_t used_numel = 0;
    int64_t message_scales = 0; // at the start of every message, before the bits
    /// A multiple of 16: messages are contiguous, and NCCL copies a message that is not aligned to 16 bytes byte by
    /// byte.
    int64_t message_bytes = 0;
    int64_t group_leaves = 0, segment_leaves = 0; // total of all groups, and of all segments
    ScaleGroup *groups = nullptr;
    Chunk *chunks = nullptr;     // one per rank
    Segment *segments = nullptr; // of this rank's chunk: one per scale, in the same order
    // Prefix sums of leaf counts, with one entry more than there are groups or segments.
    int64_t *group_leaf = nullptr, *segment_leaf = nullptr;

    /// Sets the pointers to the arrays in a block.
    void place(Arena &block) {
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
    /// Returns the number of a server's elements up to the end of the last segment's last word.
    DSOPT_HD int64_t server_used_words() const {
        if (segment_count == 0) return 0;
        const Segment &last = segments[segment_count - 1];
        return bits_of_elements(last.server + last.numel);
    }
    /// Returns the number of bits that are written for `numel` elements of a group. Bits after the elements are 1, like
    /// all bits that belong to no group.
    DSOPT_HD int64_t bits_of_elements(int64_t numel) const { return whole_words ? round_up(numel, 32) : numel; }
    DSOPT_HD const Chunk &local_chunk() const { return chunks[rank]; }
    DSOPT_HD int64_t messages_bytes() const { return message_bytes * ranks; }
    /// Number of floats in the buffers that are kept between calls: elements, then scales.
    DSOPT_HD int64_t worker_floats() const { return worker_numel + group_count; }
    DSOPT_HD int64_t server_floats() const { return server_numel + message_scales; }
    // Contents of a message: scales, then bits.
    DSOPT_HD static float *scales(char *message) { return reinterpret_cast<float *>(message); }
    DSOPT_HD static const float *scales(const char *message) { return reinterpret_cast<const float *>(message); }
    DSOPT_HD uint8_t *bits(char *message) const { return reinterpret_cast<uint8_t *>(message) + message_scales * 4; }
    DSOPT_HD const uint8_t *bits(const char *message) const {
        return reinterpret_cast<const uint8_t *>(message) + message_scales * 4;
    }
};

/// Two levels: the vector of a whole list, and this rank's slice of the vector, which is compressed. With one level a
/// node has one rank, and the slice is the whole vector.
struct ExchangeLayout {
    CompressLayout whole; // one chunk per rank of all nodes
    CompressLayout slice; // one chunk per node; its scale groups contain the elements of tensors in the slice
    int32_t node_ranks = 1, node_rank = 0;

    bool has_levels() const { return node_ranks > 1; }
    /// True if there is a single node: nothing is compressed, and no buffers are kept. The slice's layout is empty.
    bool is_exact() const { return has_levels() && slice.ranks == 1; }
    /// Returns the range of the slice in the whole vector.
    Range slice_range() const {
        const int64_t numel = whole.worker_numel / node_ranks;
        return {node_rank * numel, numel, whole.worker_numel};
    }
    /// Returns the number of words of bits up to the last tensor's end, which is the same for any number of ranks.
    int64_t used_words() const { return (whole.used_numel + 31) / 32; }
    /// Sets the pointers of both layouts and returns the bytes of the block. `block` NULL: only returns the bytes.
    size_t place(void *block) {
        Arena arena(block);
        whole.place(arena);
        if (has_levels())
            slice.place(arena);
        else
            slice = whole;
        return arena.bytes();
    }
};

/// A layout that owns its block, in host memory.
struct OwnedLayout : ExchangeLayout {
    std::unique_ptr<char[]> block;
    size_t bytes = 0;
};

/// Compression of one vector by this rank, as a worker and as a server, with one level or two.
struct Compression {
    CompressLayout layout;
    int64_t begin = 0;                          // index of the worker's first element in the list's vector
    float *worker = nullptr, *server = nullptr; // compensated values, followed by their scales
    const int32_t *active = nullptr; // one bit per element of the worker, lowest first, 1 = active; NULL = all active
    char *send = nullptr;            // messages to each rank
    char *recv = nullptr;            // messages from each rank
    char *result = nullptr;          // the message that this rank sends as a server
    char *results = nullptr;         // messages of all servers
    double *sums = nullptr;          // sum of squares of each leaf
    int32_t *counts = nullptr;       // number of active elements of each leaf
    const int32_t *skip = nullptr;   // in backend memory, nonzero = leave everything unchanged; NULL = never skipped

    /// True if the step is skipped. The exchange still runs, because other ranks take part in it, and changes nothing.
    DSOPT_HD bool skipped() const { return skip != nullptr && *skip != 0; }
    DSOPT_HD float *worker_scales() const { return worker + layout.worker_numel; }
    DSOPT_HD float *server_scales() const { return server + layout.server_numel; }
    DSOPT_HD char *message_to(int64_t rank) const { return send + rank * layout.message_bytes; }
};

/// Mean of a list after an exchange, the same on every rank.
struct ListMean {
    CompressLayout layout;
    int64_t begin = 0;               // index of the first element in the list's vector
    char *results = nullptr;         // messages of all servers
    const float *values = nullptr;   // the mean itself if nothing is compressed; else NULL
    const int32_t *active = nullptr; // as in Compression, for all elements of the list
};

/// Two levels: the full-precision mean inside a node.
struct NodeSlices {
    int32_t ranks = 1;
    int64_t numel = 0;       // elements per slice
    float *vector = nullptr; // a slice for each rank of the node; NULL: one level
    float *slices = nullptr; // this rank's slice, from each rank of the node
};

/// Users of exchanges. They differ in two levels only.
enum class ExchangeUse : uint8_t {
    list,        // dsopt_compressed_allreduce: the ranks of a node average their lists first
    step,        // a step of an optimizer: its gradients are the node's, and each rank feeds its slice
    sharded_step // the same, and each rank takes the mean of its slice only
};

/// Layouts and buffers of one exchange, for the host or, from on_device(), for kernels.
struct Exchange {
    const OwnedLayout *layout = nullptr; // in host memory
    ExchangeUse use = ExchangeUse::list;
    Compression local; // of the list; with two levels, of this rank's slice
    ListMean mean;
    NodeSlices node;

    Exchange() = default;
    /// `active`: of the whole list; of the slice for ExchangeUse::sharded_step.
    Exchange(const OwnedLayout &its_layout, float *worker, float *server, const int32_t *active, void *workspace,
             ExchangeUse its_use = ExchangeUse::list) :
        layout(&its_layout),
        use(its_use),
        local{.layout = its_layout.slice, .worker = worker, .server = server, .active = active},
        mean{.layout = its_layout.whole, .active = active},
        node{.ranks = its_layout.node_ranks, .numel = its_layout.slice_range().numel} {
        if (use != ExchangeUse::list) local.begin = its_layout.slice_range().begin;
        if (use == ExchangeUse::sharded_step) {
            mean.layout = its_layout.slice;
            mean.begin = local.begin;
        } else if (active != nullptr) {
            local.active += its_layout.slice_range().begin / 32; // slices begin at whole words
        }
        (void)take_from(workspace);
    }
    /// Returns the number of words of `active`.
    int64_t active_words() const {
        if (use != ExchangeUse::sharded_step) return layout->used_words();
        const Range words = intersection({0, layout->used_words(), 0}, {local.begin / 32, node.numel / 32, 0});
        return words.numel;
    }
    static size_t workspace_bytes(const OwnedLayout &layout, ExchangeUse use = ExchangeUse::list) {
        return Exchange(layout, nullptr, nullptr, nullptr, nullptr, use).take_from(nullptr);
    }
    /// Returns the exchange for kernels. `block`: copy of the layout's block in device memory. `skip`: see Compression.
    Exchange on_device(void *block, const int32_t *skip) const {
        Exchange on_device = *this;
        ExchangeLayout copy = *layout;
        (void)copy.place(block);
        on_device.local.layout = copy.slice;
        on_device.mean.layout = use == ExchangeUse::sharded_step ? copy.slice : copy.whole;
        on_device.local.skip = skip;
        return on_device;
    }

private:
    /// Sets the buffers in `workspace` and returns the bytes that they use. NULL: only returns the bytes.
    size_t take_from(void *workspace) {
        const CompressLayout &compressed = local.layout;
        const int64_t leaves =
            compressed.group_leaves > compressed.segment_leaves ? compressed.group_leaves : compressed.segment_leaves;
        Arena arena(workspace);
        for (char **messages : {&local.send, &local.recv, &local.results})
            arena.take(*messages, compressed.messages_bytes());
        arena.take(local.result, compressed.message_bytes);
        arena.take(local.sums, leaves);
        arena.take(local.counts, leaves);
        mean.results = local.results;
        if (!layout->has_levels() || use == ExchangeUse::sharded_step) return arena.bytes();
        arena.take(mean.results, layout->is_exact() ? 0 : mean.layout.messages_bytes());
        if (use == ExchangeUse::step) return arena.bytes();
        arena.take(node.vector, mean.layout.worker_numel);
        arena.take(node.slices, mean.layout.worker_numel);
        if (layout->is_exact()) mean.values = node.vector;
        return arena.bytes();
    }
};

} // namespace dsopt
