// SPDX-License-Identifier: Apache-2.0
// Checks of the lists that callers hand in. Every failure names the tensor and the value.
#pragma once
#include "base/dtype.h"
#include <map>
#include <string>

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
/// check_tensor(), and this dtype and numel.
void check_like(const dsopt_tensor &tensor, int32_t dtype, int64_t registered, Label label);
/// The same numel as registered.
void check_numel(const dsopt_tensor &tensor, int64_t registered, Label label);

/// A list of this length; an empty one may be NULL. Throws SHAPE, ARGUMENT.
void check_length(const dsopt_tensor *list, int64_t count, size_t wanted, const char *what);

/// Tensors that share no bytes. Empty ones and those without memory take up nothing.
class MemoryMap {
public:
    /// Throws OVERLAP naming both if the tensor shares bytes with one of these.
    void check(const dsopt_tensor &tensor, Label label) const;
    /// The same, and then it is one of them. The label's text must outlive the map.
    void add(const dsopt_tensor &tensor, Label label);
    /// No longer one of these. The caller has checked that no other tensor begins there.
    void remove(const dsopt_tensor &tensor) noexcept;

private:
    struct Stretch {
        uintptr_t end;
        Label label;
    };
    std::map<uintptr_t, Stretch> by_begin_;
};

} // namespace dsopt
