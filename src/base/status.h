// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "dsopt.h"
#include <cstdint>
#include <exception>

namespace dsopt {

/// An exception that the C boundary converts to a status. The text is stored in the object, not on the heap, so that
/// memory exhaustion can be reported.
class Error : public std::exception {
public:
    /// Formats like printf and truncates the text to the capacity.
    [[gnu::format(printf, 3, 4)]] Error(dsopt_status status, const char *format, ...) noexcept;
    const char *what() const noexcept override { return text_; }
    dsopt_status status() const noexcept { return status_; }

private:
    dsopt_status status_;
    char text_[512];
};

/// Converts `value` for %lld, whichever type int64_t is.
constexpr long long ll(int64_t value) { return static_cast<long long>(value); }

/// Throws ARGUMENT unless `good`: "lr is -1, must be finite and not negative".
void require(bool good, const char *field, double value, const char *range);
/// Throws ARGUMENT unless `value` is in [least, most].
void require_in(int64_t least, int64_t most, const char *field, int64_t value);
/// Throws ALIGNMENT unless `data` begins at a multiple of `bytes`.
void check_aligned(const void *data, size_t bytes, const char *what);

/// Sets the text of dsopt_last_error() for the calling thread.
void set_last_error(const char *text) noexcept;
const char *last_error() noexcept;
const char *status_name(dsopt_status status) noexcept;

} // namespace dsopt
