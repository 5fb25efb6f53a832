// SPDX-License-Identifier: Apache-2.0
#include "base/status.h"
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace dsopt {
namespace {
thread_local char last_error_text[1024];

/// Removes an incomplete UTF-8 character from the end of a truncated text.
void drop_incomplete_character(char *text) {
    const size_t length = std::strlen(text);
    size_t begin = length; // index of the first byte of the last character
    while (begin > 0 && length - begin < 4 && (static_cast<unsigned char>(text[begin - 1]) & 0xc0) == 0x80) --begin;
    if (begin == 0) return;
    const auto first = static_cast<unsigned char>(text[--begin]);
    const size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc0 ? 2 : 1;
    if (length - begin < bytes) text[begin] = 0;
}
} // namespace

Error::Error(dsopt_status status, const char *format, ...) noexcept : status_(status) {
    va_list arguments;
    va_start(arguments, format);
    if (std::vsnprintf(text_, sizeof text_, format, arguments) >= int(sizeof text_)) drop_incomplete_character(text_);
    va_end(arguments);
}

void require(bool good, const char *field, double value, const char *range) {
    if (!good) throw Error(DSOPT_ERR_ARGUMENT, "%s is %g, must be %s", field, value, range);
}

void require_in(int64_t least, int64_t most, const char *field, int64_t value) {
    if (value < least || value > most)
        throw Error(DSOPT_ERR_ARGUMENT, "%s is %lld, not in [%lld, %lld]", field, ll(value), ll(least), ll(most));
}

void check_aligned(const void *data, size_t bytes, const char *what) {
    if (reinterpret_cast<uintptr_t>(data) % bytes != 0)
        throw Error(DSOPT_ERR_ALIGNMENT, "%s is at %p, not aligned to %zu bytes", what, data, bytes);
}

void set_last_error(const char *text) noexcept { std::snprintf(last_error_text, sizeof last_error_text, "%s", text); }
const char *last_error() noexcept { return last_error_text; }

const char *status_name(dsopt_status status) noexcept {
    switch (status) {
    case DSOPT_OK: return "DSOPT_OK";
    case DSOPT_ERR_ARGUMENT: return "DSOPT_ERR_ARGUMENT";
    case DSOPT_ERR_SHAPE: return "DSOPT_ERR_SHAPE";
    case DSOPT_ERR_DTYPE: return "DSOPT_ERR_DTYPE";
    case DSOPT_ERR_ALIGNMENT: return "DSOPT_ERR_ALIGNMENT";
    case DSOPT_ERR_OVERLAP: return "DSOPT_ERR_OVERLAP";
    case DSOPT_ERR_DEVICE: return "DSOPT_ERR_DEVICE";
    case DSOPT_ERR_WORKSPACE: return "DSOPT_ERR_WORKSPACE";
    case DSOPT_ERR_VERSION: return "DSOPT_ERR_VERSION";
    case DSOPT_ERR_UNSUPPORTED: return "DSOPT_ERR_UNSUPPORTED";
    case DSOPT_ERR_STATE: return "DSOPT_ERR_STATE";
    case DSOPT_ERR_BUSY: return "DSOPT_ERR_BUSY";
    case DSOPT_ERR_FORKED: return "DSOPT_ERR_FORKED";
    case DSOPT_ERR_SKIPS: return "DSOPT_ERR_SKIPS";
    case DSOPT_ERR_HOOK: return "DSOPT_ERR_HOOK";
    case DSOPT_ERR_COMM: return "DSOPT_ERR_COMM";
    case DSOPT_ERR_TIMEOUT: return "DSOPT_ERR_TIMEOUT";
    case DSOPT_ERR_ABORTED: return "DSOPT_ERR_ABORTED";
    case DSOPT_ERR_NOMEM: return "DSOPT_ERR_NOMEM";
    case DSOPT_ERR_MISSING: return "DSOPT_ERR_MISSING";
    case DSOPT_ERR_IO: return "DSOPT_ERR_IO";
    case DSOPT_ERR_INTERNAL: return "DSOPT_ERR_INTERNAL";
    case DSOPT_ERR_BACKEND: return "DSOPT_ERR_BACKEND";
    case DSOPT_ERR_FORMAT: return "DSOPT_ERR_FORMAT";
    case DSOPT_ERR_CHECKSUM: return "DSOPT_ERR_CHECKSUM";
    case DSOPT_ERR_MISMATCH: return "DSOPT_ERR_MISMATCH";
    }
    return "unknown status";
}

} // namespace dsopt
