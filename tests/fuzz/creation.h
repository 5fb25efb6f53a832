// SPDX-License-Identifier: Apache-2.0
// Calls that create objects, groups and parameters, with good and bad arguments.
#pragma once
#include "world.h"

namespace fuzz {

/// Chooses an algorithm by a byte, and formats by the rest of the byte's value.
struct AlgorithmChoice {
    int32_t algorithm = 0;
    Formats formats;

    explicit AlgorithmChoice(uint8_t byte) : algorithm(algorithm_of(byte, kAlgorithms)) {
        constexpr int f32 = 7; // a third of the values of `rest`
        const int rest = byte / int(std::size(kAlgorithms));
        if (algorithm == DSOPT_ALGORITHM_MUON)
            formats = formats_of(algorithm, byte - kFirstOfMuon);
        else if (rest > f32)
            formats = formats_of(algorithm, rest - f32);
    }
};
void set_formats(dsopt_group &group, Formats formats);

class Creation : public World {
public:
    using World::World;

protected:
    void create_context();
    void create_comm();
    void create_scaler();
    void create_optimizer();
    /// Flags and dtypes are mostly those that are valid for the optimizer, and for groups with or without formats.
    /// matrices: mostly valid for Muon.
    std::vector<dsopt_param> new_params(const OptimizerRecord &o, bool onebit, bool has_formats, bool matrices,
                                        std::vector<dsopt_tensor> &tensors, int count);
    void add_group();
    void add_group_to(OptimizerRecord &o);
    void add_params();

private:
    static constexpr size_t kMaxDims = 8;
    std::deque<std::array<int64_t, kMaxDims>> dims_; // a deque because their addresses must not change
    void cut(dsopt_param &param, const Cut &cut);
};

} // namespace fuzz
