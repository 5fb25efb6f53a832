// SPDX-License-Identifier: Apache-2.0
// Optimizers of every kind with a distinct checkpoint layout, small enough to create thousands of them.
#pragma once
#include "harness.h"
#include "support/numbers.h"

namespace fuzz {

constexpr int kKinds = 34;

class Subject {
public:
    // ranks 0: as many as the kind has
    explicit Subject(int kind, int rank = 0, int ranks = 0);
    /// True if each rank of this kind saves a part of the state.
    static bool is_sharded(int kind);
    /// Returns the world sizes whose files an optimizer of the kind may load.
    static std::vector<int> rank_counts(int kind);

    /// Trains past the freeze of the 1-bit family.
    void train();
    dsopt_status step();
    Bytes save(uint32_t flags);
    dsopt_status load(std::vector<Bytes> &files, bool as_list, uint32_t flags);
    void query_reduction(int64_t call);
    /// Exports each state tensor of floating-point values as fp32 and imports the values.
    void copy_as_f32();
    /// Returns everything observable. `state`: also the state tensors, which are created if they do not exist.
    Bytes text(bool state);

private:
    const int kind_;
    Echo echo_, node_echo_; // their addresses are passed to the comms
    test::Comm comm_, node_;
    test::Scaler scaler_;
    test::Optimizer optimizer_;
    // each of its exact size, so that a sanitizer detects overruns
    std::vector<std::vector<char>> weights_, gradients_;
    std::vector<dsopt_tensor> list_; // of gradients
    int64_t steps_;

    /// Pairs of group and key that an optimizer of the kind accepts.
    using Keys = std::vector<std::pair<int32_t, int32_t>>;
    const Keys &keys() const;
};

} // namespace fuzz
