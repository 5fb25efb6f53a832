// SPDX-License-Identifier: Apache-2.0
// Checks of the lists that callers hand in. Every failure names the tensor and the value.
#pragma once
#include "base/dtype.h"
#include <string>
#include <vector>

namespace dsopt {

/// How a message calls a tensor: "gradient of 'layer.weight'".
struct Label {
    const char *role;
    const char *name;
};

/// numel, dtype and reserved words; data may be NULL. Throws SHAPE, DTYPE, ALIGNMENT, ARGUMENT.
void check_tensor(const dsopt_tensor &tensor, Label label);
/// The same, and float only.
void check_float_tensor(const dsopt_tensor &tensor, Label label);
/// "F32", or the number of a dtype that has no name.
std::string dtype_text(int32_t dtype);
/// This dtype and no other.
void check_dtype(const dsopt_tensor &tensor, int32_t dtype, Label label);
/// The same numel as registered.
void check_numel(const dsopt_tensor &tensor, int64_t registered, Label label);

/// A stretch of memory and what it is called in a message.
struct Interval {
    uintptr_t begin, end;
    Label label;
};
/// Throws OVERLAP naming both if two of them share bytes. Reorders the list. Empty ones never do.
void check_overlap(std::vector<Interval> &intervals);
Interval interval_of(const dsopt_tensor &tensor, Label label);

} // namespace dsopt
