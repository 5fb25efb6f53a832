// SPDX-License-Identifier: Apache-2.0
// Reads and writes growable structs of dsopt.h, whose size in the caller's header may be smaller or larger.
#pragma once
#include "base/status.h"
#include <cstring>

namespace dsopt {

/// sizeof of every growable struct in version 0.2. A shorter struct is refused.
template <class T> struct FirstSize;
template <> struct FirstSize<dsopt_context_desc> { static constexpr size_t value = 80; };
template <> struct FirstSize<dsopt_context_info> { static constexpr size_t value = 24; };
template <> struct FirstSize<dsopt_group> { static constexpr size_t value = 144; };
template <> struct FirstSize<dsopt_optimizer_desc> { static constexpr size_t value = 96; };
template <> struct FirstSize<dsopt_state_info> { static constexpr size_t value = 72; };
template <> struct FirstSize<dsopt_step> { static constexpr size_t value = 152; };
template <> struct FirstSize<dsopt_ready> { static constexpr size_t value = 64; };
template <> struct FirstSize<dsopt_schedule_info> { static constexpr size_t value = 40; };
template <> struct FirstSize<dsopt_report> { static constexpr size_t value = 216; };
template <> struct FirstSize<dsopt_comm_table> { static constexpr size_t value = 80; };
template <> struct FirstSize<dsopt_comm_desc> { static constexpr size_t value = 64; };
template <> struct FirstSize<dsopt_comm_info> { static constexpr size_t value = 240; };
template <> struct FirstSize<dsopt_scaler_desc> { static constexpr size_t value = 56; };
template <> struct FirstSize<dsopt_scaler_info> { static constexpr size_t value = 56; };
template <> struct FirstSize<dsopt_compressed> { static constexpr size_t value = 80; };
template <> struct FirstSize<dsopt_io> { static constexpr size_t value = 80; };

template <class T> T *not_null(T *pointer, const char *what) {
    if (pointer == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "%s is NULL", what);
    return pointer;
}

template <class T> void check_size(size_t size, const char *type) {
    static_assert(sizeof(T) >= FirstSize<T>::value, "structs only grow");
    // An uninitialized size is usually far larger. Without this limit, the library would read or clear that many bytes.
    constexpr size_t most = 4096;
    if (size > most)
        throw Error(DSOPT_ERR_VERSION, "%s.size is %zu: no version has more than %zu bytes", type, size, most);
    if (size < FirstSize<T>::value)
        throw Error(DSOPT_ERR_VERSION, "%s.size is %zu, version 0.2 has %zu bytes", type, size, FirstSize<T>::value);
}

/// Returns a copy of a caller's struct, with the fields that this library knows. Fields that the caller's header lacks
/// are zero in the copy. Fields that this library lacks must be zero in the caller's struct.
template <class T> T read_struct(const T *user, const char *type) {
    T known{};
    if (user == nullptr) {
        known.size = sizeof known;
        return known;
    }
    check_size<T>(user->size, type);
    const auto *bytes = reinterpret_cast<const unsigned char *>(user);
    for (size_t i = sizeof known; i < user->size; ++i)
        if (bytes[i] != 0)
            throw Error(DSOPT_ERR_VERSION, "%s has a field at byte %zu that this library does not know", type, i);
    std::memcpy(&known, user, user->size < sizeof known ? user->size : sizeof known);
    known.size = sizeof known;
    return known;
}

/// Writes `known` to a caller's struct, at most `user->size` bytes.
template <class T> void write_struct(T *user, T known, const char *type) {
    const size_t size = not_null(user, type)->size;
    check_size<T>(size, type);
    known.size = size;
    std::memcpy(user, &known, size < sizeof known ? size : sizeof known);
}

} // namespace dsopt
