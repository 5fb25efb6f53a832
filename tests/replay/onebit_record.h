// SPDX-License-Identifier: Apache-2.0
// Data that every record of the 1-bit family has, with or without a wrapper, on one rank.
#pragma once
#include "compare.h"
#include "engine.h"
#include "layout.h"
#include "wire.h"

namespace replay {

dsopt_group onebit_adam_group(Layout &layout, size_t index);
dsopt_group zero_one_adam_group(Layout &layout, size_t index);
dsopt_group onebit_lamb_group(Layout &layout, size_t index);
bool is_onebit(int32_t algorithm);

/// A set of elements that the original compresses as one vector.
struct Vector {
    std::string item;
    int64_t numel;
    bool frozen; ///< never compressed (non_freeze)
};
/// `flat`: one vector per group, as under the fused wrapper.
std::vector<Vector> compressed_vectors(const Layout &layout, const std::vector<dsopt_group> &groups, bool flat);

class OneBitRecord {
public:
    OneBitRecord(GoldenFile &file, Comparison &comparison, Layout &layout, const std::vector<dsopt_group> &groups,
                 bool flat, Wire &wire, int64_t rank, int64_t steps);
    /// Sets the masks of a new optimizer.
    void prepare(Optimizer &optimizer);
    void before() { exchanges_ = wire_.exchanges(rank_); }
    void compare(int64_t t, Optimizer &optimizer, bool dry);

private:
    struct Errors {
        const Tensor *worker_error, *server_error, *worker_scale, *server_scale;
        int64_t vector_index; ///< among the compressed vectors, -1 = not compressed
        int64_t padded, chunk;
    };
    struct PerParam {
        const Tensor *recorded;
        const char *state;
        std::vector<int64_t> params; ///< indices of parameters whose tensors are concatenated in the record
    };
    void compare_errors(int64_t t, Optimizer &optimizer);
    std::vector<double> words(Optimizer &optimizer, const char *name, int64_t numel);
    const Tensor *scalar(const char *name) const;

    GoldenFile &file_;
    Comparison &comparison_;
    Layout &layout_;
    Wire &wire_;
    int64_t rank_, steps_, exchanges_ = 0;
    int32_t algorithm_;
    size_t groups_;
    std::vector<Padded> padded_;
    std::vector<Errors> errors_;
    std::vector<PerParam> per_param_;
    std::vector<size_t> group_of_;
    const Tensor *pad_ = nullptr;
};

} // namespace replay
