// SPDX-License-Identifier: Apache-2.0
#include "base/tensor_list.h"
#include <algorithm>

namespace dsopt {

std::string dtype_text(int32_t dtype) {
    switch (dtype) {
    case DSOPT_DTYPE_F32: return "F32";
    case DSOPT_DTYPE_F16: return "F16";
    case DSOPT_DTYPE_BF16: return "BF16";
    case DSOPT_DTYPE_I32: return "I32";
    case DSOPT_DTYPE_F64: return "F64";
    }
    return std::to_string(dtype);
}

void check_dtype(const dsopt_tensor &tensor, int32_t dtype, Label label) {
    if (tensor.dtype != dtype)
        throw Error(DSOPT_ERR_DTYPE, "%s '%s' has dtype %s, must be %s", label.role, label.name,
                    dtype_text(tensor.dtype).c_str(), dtype_text(dtype).c_str());
}

void check_tensor(const dsopt_tensor &tensor, Label label) {
    const size_t size = dtype_size(tensor.dtype);
    if (size == 0)
        throw Error(DSOPT_ERR_DTYPE, "%s '%s' has dtype %d, which this build does not know", label.role, label.name,
                    tensor.dtype);
    if (tensor.reserved != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "%s '%s' has reserved word %d, must be 0", label.role, label.name,
                    tensor.reserved);
    if (tensor.numel < 0)
        throw Error(DSOPT_ERR_SHAPE, "%s '%s' has numel %lld", label.role, label.name, ll(tensor.numel));
    // 2^62 bytes: sums of two such sizes still fit, and no machine has them.
    if (tensor.numel > (int64_t(1) << 62) / int64_t(size))
        throw Error(DSOPT_ERR_SHAPE, "%s '%s' has numel %lld: its size overflows", label.role, label.name,
                    ll(tensor.numel));
    if (reinterpret_cast<uintptr_t>(tensor.data) % size != 0)
        throw Error(DSOPT_ERR_ALIGNMENT, "%s '%s' is at %p, not aligned to its %zu-byte elements", label.role,
                    label.name, tensor.data, size);
}

void check_float_tensor(const dsopt_tensor &tensor, Label label) {
    if (!is_float_dtype(tensor.dtype))
        throw Error(DSOPT_ERR_DTYPE, "%s '%s' has dtype %s, not F32, F16 or BF16", label.role, label.name,
                    dtype_text(tensor.dtype).c_str());
    check_tensor(tensor, label);
}

void check_numel(const dsopt_tensor &tensor, int64_t registered, Label label) {
    if (tensor.numel != registered)
        throw Error(DSOPT_ERR_SHAPE, "%s '%s' has numel %lld, registered are %lld", label.role, label.name,
                    ll(tensor.numel), ll(registered));
}

Interval interval_of(const dsopt_tensor &tensor, Label label) {
    const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
    return {begin, tensor.data == nullptr ? begin : begin + size_t(tensor.numel) * dtype_size(tensor.dtype), label};
}

void check_overlap(std::vector<Interval> &intervals) {
    std::sort(intervals.begin(), intervals.end(),
              [](const Interval &a, const Interval &b) { return a.begin < b.begin; });
    const Interval *widest = nullptr; // the one that reaches furthest so far
    for (const Interval &next : intervals) {
        if (next.begin == next.end) continue;
        if (widest != nullptr && next.begin < widest->end)
            throw Error(DSOPT_ERR_OVERLAP, "%s '%s' and %s '%s' share memory at %p", widest->label.role,
                        widest->label.name, next.label.role, next.label.name, reinterpret_cast<void *>(next.begin));
        if (widest == nullptr || next.end > widest->end) widest = &next;
    }
}

} // namespace dsopt
