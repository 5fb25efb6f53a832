// SPDX-License-Identifier: Apache-2.0
// Text from callers and files, such as names, paths and metadata.
#pragma once
#include <string>
#include <string_view>

namespace dsopt {

/// True if `text` is UTF-8 without NUL. Names and metadata end up in C strings, where a NUL would make two different
/// names equal.
bool is_text(std::string_view text);

/// Returns untrusted text for a message: quoted, escaped, and without the middle if it is long.
std::string quoted(std::string_view text);

} // namespace dsopt
