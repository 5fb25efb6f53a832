// SPDX-License-Identifier: Apache-2.0
// The order of additions in every sum of squares. The order determines the bits of the result.
// Sums over leaves of a tensor, and over tensors of a list, have 32 lanes: lane l adds values l, l + 32, ... in order.
// Then the upper half of the lanes is added to the lower half, five times. Sums over elements of a leaf have 128 lanes,
// also in order. Lanes 4t to 4t + 3 are then added as (a + b) + (c + d), and the 32 sums are added by halves as above.
// So a thread of a GPU adds up the four neighbours that it loads, and a CPU has four stripes of 32 lanes.
#pragma once
#include "base/hd.h"
#include <stdint.h>

namespace dsopt {

constexpr int kLanes = 32, kLeafLanes = 128;

/// Returns the sum of all lanes, which is also in lane[0].
template <int Lanes> DSOPT_HD double fold_lanes(double *lane) {
    for (int l = 0; l < Lanes / 2; ++l) lane[l] += lane[l + Lanes / 2];
    if constexpr (Lanes > 2) fold_lanes<Lanes / 2>(lane);
    return lane[0];
}

/// Returns the sum of lanes 4t to 4t + 3 of a leaf, which one GPU thread has.
DSOPT_HD double add_neighbours(double a, double b, double c, double d) { return (a + b) + (c + d); }
/// Returns the sum of the lanes of a leaf, or of its first lanes if the other lanes are zeros.
template <int Lanes> DSOPT_HD double fold_leaf_lanes(const double (&lane)[Lanes]) {
    double sum[Lanes / 4];
    for (int t = 0; t < Lanes / 4; ++t)
        sum[t] = add_neighbours(lane[4 * t], lane[4 * t + 1], lane[4 * t + 2], lane[4 * t + 3]);
    return fold_lanes<Lanes / 4>(sum);
}

/// Returns the sum of value(0), value(1), ... value(count - 1), computed by one thread. `count` is at most `Lanes`. The
/// lanes from `Lanes` to kLanes are omitted: they would be zeros, which change no bit of a sum of squares.
template <int Lanes, class Value> DSOPT_HD double add_few(int64_t count, const Value &value) {
    double lane[Lanes];
    for (int l = 0; l < Lanes; ++l) lane[l] = l < count ? value(l) : 0.0;
    return fold_lanes<Lanes>(lane);
}

/// Returns the sum of any number of values, on the host.
template <class Value> double add_in_lanes(int64_t count, const Value &value) {
    if (count <= 1) return count == 1 ? value(0) : 0.0; // most tensors of a long list
    if (count <= 8) return add_few<8>(count, value);
    double lane[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        for (int l = 0; l < kLanes; ++l) lane[l] += value(i + l);
    for (int l = 0; i < count; ++i, ++l) lane[l] += value(i);
    return fold_lanes<kLanes>(lane);
}

} // namespace dsopt
