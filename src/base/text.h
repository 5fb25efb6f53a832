// SPDX-License-Identifier: Apache-2.0
// Text from outside: names, paths, what is in a file.
#pragma once
#include <string>
#include <string_view>

namespace dsopt {

/// UTF-8 without NUL. Names and metadata end up in C strings, so a NUL would make two different names equal.
bool is_text(std::string_view text);

/// Foreign bytes for a message: quoted, escaped, the middle of long ones left out.
std::string shown(std::string_view text);

} // namespace dsopt
