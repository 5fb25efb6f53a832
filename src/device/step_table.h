// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/sizes.h"
#include "device/onebit_plan.h"

namespace dsopt {

/// What the sizes of a step's memory follow from.
struct StepShape {
    int64_t tensors, groups, leaves;
    bool onebit;                    // with a group of the 1-bit family
    const CompressLayout *exchange; // NULL: no other ranks
};

/// What the host tells a device of tensors and groups, in one block of memory, so that it can be compared and copied as
/// a whole. Each table begins on its own line.
struct StepTable {
    TensorJob *jobs;
    Hyper *groups;
    OneBitJob *onebit; // NULL without the family

    static size_t bytes(const StepShape &shape) { return Offsets(shape).bytes; }
    static StepTable at(void *memory, const StepShape &shape) {
        const Offsets offset(shape);
        char *const base = static_cast<char *>(memory);
        return {reinterpret_cast<TensorJob *>(base), reinterpret_cast<Hyper *>(base + offset.groups),
                shape.onebit ? reinterpret_cast<OneBitJob *>(base + offset.onebit) : nullptr};
    }

private:
    struct Offsets {
        size_t groups, onebit, bytes;
        explicit Offsets(const StepShape &shape) :
            groups(round_up(size_t(shape.tensors) * sizeof(TensorJob))),
            onebit(groups + round_up(size_t(shape.groups) * sizeof(Hyper))),
            bytes(onebit + (shape.onebit ? round_up(size_t(shape.tensors) * sizeof(OneBitJob)) : 0)) {}
    };
};

} // namespace dsopt
