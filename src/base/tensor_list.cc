// SPDX-License-Identifier: Apache-2.0
#include "base/tensor_list.h"
#include "base/struct_io.h"
#include <iterator>

namespace dsopt {

namespace {

std::string dtype_text(int32_t dtype) {
    const char *const name = dtype_name(dtype);
    return name != nullptr ? name : std::to_string(dtype);
}

uintptr_t begin_of(const dsopt_tensor &tensor) { return reinterpret_cast<uintptr_t>(tensor.data); }
uintptr_t end_of(const dsopt_tensor &tensor) {
    return begin_of(tensor) + (tensor.data != nullptr ? size_t(tensor.numel) * dtype_size(tensor.dtype) : 0);
}

} // namespace

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
    // The limit is 2^62 bytes: the sum of two such sizes does not overflow.
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

void check_like(const dsopt_tensor &tensor, int32_t dtype, int64_t registered, Label label) {
    if (tensor.dtype != dtype)
        throw Error(DSOPT_ERR_DTYPE, "%s '%s' has dtype %s, must be %s", label.role, label.name,
                    dtype_text(tensor.dtype).c_str(), dtype_text(dtype).c_str());
    check_tensor(tensor, label);
    check_numel(tensor, registered, label);
}

void check_length(const dsopt_tensor *list, int64_t count, size_t wanted, const char *what) {
    if (count != int64_t(wanted)) throw Error(DSOPT_ERR_SHAPE, "%s has %lld entries, not %zu", what, ll(count), wanted);
    if (wanted > 0) not_null(list, what);
}

void MemoryMap::check(const dsopt_tensor &tensor, Label label) const {
    const uintptr_t begin = begin_of(tensor), end = end_of(tensor);
    if (begin == end) return;
    const auto next = by_begin_.lower_bound(begin);
    const auto refuse = [](Label first, Label second, uintptr_t address) {
        throw Error(DSOPT_ERR_OVERLAP, "%s '%s' and %s '%s' share memory at %p", first.role, first.name, second.role,
                    second.name, reinterpret_cast<void *>(address));
    };
    if (next != by_begin_.end() && next->first < end) refuse(label, next->second.label, next->first);
    if (next == by_begin_.begin()) return;
    if (const auto &[before, range] = *std::prev(next); begin < range.end) refuse(range.label, label, begin);
}

void MemoryMap::add(const dsopt_tensor &tensor, Label label) {
    check(tensor, label);
    const uintptr_t begin = begin_of(tensor), end = end_of(tensor);
    if (begin != end) by_begin_.emplace(begin, AddressRange{end, label});
}

void MemoryMap::remove(const dsopt_tensor &tensor) noexcept {
    if (begin_of(tensor) != end_of(tensor)) by_begin_.erase(begin_of(tensor));
}

} // namespace dsopt
