// SPDX-License-Identifier: Apache-2.0
// Common parts of the tests of two-level exchanges: ranks in nodes as threads, and the partition of elements.
#pragma once
#include "list_vector.h"
#include "onebit.h"

namespace test {

/// Indices and comms of one rank of a node.
struct NodeRank {
    int l, d; // rank in its node, and number of the node
    const Context &ctx;
    const Comm &node, &data;
};
/// Runs body for every rank of `nodes` nodes of `per_node` ranks. `make` creates the context of a rank.
inline void with_nodes(
    int per_node, int nodes, const std::function<void(const NodeRank &)> &body,
    const std::function<Context(int)> &make = [](int) { return make_context(1); }) {
    std::vector<CommId> in_node(size_t(nodes), CommId{}), between(size_t(per_node), CommId{});
    for (CommId &id : in_node) id = new_id();
    for (CommId &id : between) id = new_id();
    run_ranks(per_node * nodes, [&](int rank) {
        const int l = rank % per_node, d = rank / per_node;
        const Context ctx = make(rank);
        const Comm node = local_comm(ctx, in_node[size_t(d)], l, per_node),
                   data = local_comm(ctx, between[size_t(l)], d, nodes);
        body({l, d, ctx, node, data});
    });
}

/// Partition of a vector into one slice per rank of a node, and of each slice into one chunk per node.
struct ExchangeLayout {
    int64_t per_node, nodes, chunk = 0, scales = 0;
    std::vector<int64_t> begin, numel;
    ExchangeLayout(int64_t l, int64_t d, const std::vector<int64_t> &sizes) : per_node(l), nodes(d), numel(sizes) {
        const ListVector vector(sizes);
        begin = vector.begin;
        chunk = vector.chunk(l * d);
        for (int64_t c = 0; c < l * d; ++c) {
            int64_t first = -1, last = -1;
            for (size_t t = 0; t < sizes.size(); ++t)
                if (from(t, c * chunk) < to(t, (c + 1) * chunk)) {
                    if (first < 0) first = int64_t(t);
                    last = int64_t(t);
                }
            if (first >= 0) scales = std::max(scales, last - first + 1);
        }
    }
    int64_t slice() const { return chunk * nodes; }
    int64_t message_bytes() const { return (4 * scales + chunk / 8 + 15) / 16 * 16; }
    /// Returns the first element of tensor t at or after `index`.
    int64_t from(size_t t, int64_t index) const { return std::max(begin[t], index); }
    /// Returns the end of the elements of tensor t before `index`.
    int64_t to(size_t t, int64_t index) const { return std::min(begin[t] + numel[t], index); }
};

} // namespace test
