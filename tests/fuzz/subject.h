// SPDX-License-Identifier: Apache-2.0
// Optimizers of every kind that has a checkpoint of its own, small enough to be made by the thousand.
#pragma once
#include "harness.h"
#include "support/numbers.h"

namespace fuzz {

constexpr int kKinds = 20;

class Subject {
public:
    explicit Subject(int kind, int rank = 0, int ranks = 0); // ranks 0: as many as the kind has
    /// Numbers of ranks whose files one of the kind may be given.
    static std::vector<int> rank_counts(int kind);

    /// Past the freeze of the 1-bit family.
    void train();
    dsopt_status step();
    Bytes save(uint32_t flags);
    dsopt_status load(std::vector<Bytes> &files, bool as_list, uint32_t flags);
    void ask_reduction(int64_t call);
    /// Everything that can be seen from outside. `state`: its tensors too, which are made if they are not there.
    Bytes text(bool state);

private:
    const int kind_;
    Echo echo_, node_echo_; // the comms have their addresses
    test::Comm comm_, node_;
    test::Scaler scaler_;
    test::Optimizer optimizer_;
    std::vector<std::vector<char>> weights_, gradients_; // of exact size, so that a sanitizer sees what runs past them
    std::vector<dsopt_tensor> list_;                     // of gradients
    int64_t steps_;

    /// Groups and keys that one of the kind can be asked for.
    using Keys = std::vector<std::pair<int32_t, int32_t>>;
    const Keys &keys() const;
};

} // namespace fuzz
