// SPDX-License-Identifier: Apache-2.0
// The order of additions in every sum of squares. It is part of the result: lane l of 32 adds values l, l + 32, ... one
// after the other, then the upper half of the lanes is added to the lower half, five times. The elements of a leaf are
// added up so, the leaves of a tensor, and the tensors of a list. A GPU has a thread for each lane, a CPU a vector.
#pragma once
#include "base/hd.h"
#include <stdint.h>

namespace dsopt {

constexpr int kLanes = 32;

/// The sum of all lanes, in lane[0].
template <int Lanes> DSOPT_HD double fold_lanes(double *lane) {
    for (int l = 0; l < Lanes / 2; ++l) lane[l] += lane[l + Lanes / 2];
    if constexpr (Lanes > 2) fold_lanes<Lanes / 2>(lane);
    return lane[0];
}

/// value(0), value(1), ... value(count - 1) by one thread, at most `Lanes` of them. The lanes that are left out would
/// hold zeros, which change no bit of a sum of squares.
template <int Lanes, class Value> DSOPT_HD double add_few(int64_t count, const Value &value) {
    double lane[Lanes];
    for (int l = 0; l < Lanes; ++l) lane[l] = l < count ? value(l) : 0.0;
    return fold_lanes<Lanes>(lane);
}

/// Any number of values, on the host.
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
