// SPDX-License-Identifier: Apache-2.0
// Checks of the lists that callers pass. Every error names the tensor and the value.
#pragma once
#include "base/dtype.h"
#include <map>
#include <string>

namespace dsopt {

/// Names a tensor in a message: role "gradient of" and name "layer.weight" give "gradient of 'layer.weight'".
struct Label {
    const char *role;
    const char *name;
};

/// Checks numel, dtype, alignment and the reserved word; data may be NULL. Throws SHAPE, DTYPE, ALIGNMENT, ARGUMENT.
void check_tensor(const dsopt_tensor &tensor, Label label);
/// Calls check_tensor(), and throws DTYPE unless the dtype is F32, F16 or BF16.
void check_float_tensor(const dsopt_tensor &tensor, Label label);
/// Calls check_tensor(), and throws unless the tensor has this dtype and numel.
void check_like(const dsopt_tensor &tensor, int32_t dtype, int64_t registered, Label label);
/// Throws SHAPE unless numel is as registered.
void check_numel(const dsopt_tensor &tensor, int64_t registered, Label label);

/// Throws SHAPE unless `count` is `wanted`, and ARGUMENT if the list is NULL. An empty list may be NULL.
void check_length(const dsopt_tensor *list, int64_t count, size_t wanted, const char *what);

/// A set of tensors that share no bytes. Empty tensors and tensors without memory are ignored.
class MemoryMap {
public:
    /// Throws OVERLAP naming both tensors if `tensor` shares bytes with a tensor of the set.
    void check(const dsopt_tensor &tensor, Label label) const;
    /// Calls check() and adds the tensor. The label's text must outlive the map.
    void add(const dsopt_tensor &tensor, Label label);
    /// Removes the tensor. The caller must have checked that no other tensor of the set begins at its address.
    void remove(const dsopt_tensor &tensor) noexcept;

private:
    struct AddressRange {
        uintptr_t end;
        Label label;
    };
    std::map<uintptr_t, AddressRange> by_begin_;
};

} // namespace dsopt
