// SPDX-License-Identifier: Apache-2.0
#include "base/text.h"
#include <cstddef>
#include <cstdio>

namespace dsopt {

bool is_text(std::string_view text) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    for (size_t i = 0; i < text.size();) {
        const unsigned char c = byte(i);
        const size_t length = c > 0 && c < 0x80       ? 1
                              : c >= 0xc2 && c < 0xe0 ? 2
                              : c >= 0xe0 && c < 0xf0 ? 3
                              : c >= 0xf0 && c < 0xf5 ? 4
                                                      : 0;
        if (length == 0 || length > text.size() - i) return false;
        for (size_t k = 1; k < length; ++k)
            if ((byte(i + k) & 0xc0) != 0x80) return false;
        // The first two bytes identify overlong forms, surrogates and code points past U+10FFFF.
        if ((c == 0xe0 && byte(i + 1) < 0xa0) || (c == 0xed && byte(i + 1) > 0x9f) ||
            (c == 0xf0 && byte(i + 1) < 0x90) || (c == 0xf4 && byte(i + 1) > 0x8f))
            return false;
        i += length;
    }
    return true;
}

std::string quoted(std::string_view text) {
    constexpr size_t head = 40, tail = 60;
    const bool utf8 = is_text(text);
    std::string out = "\"";
    size_t skip_from = text.size(), skip_to = text.size();
    if (text.size() > head + tail + 3) {
        const auto inside = [&](size_t i) { return utf8 && (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80; };
        for (skip_from = head; inside(skip_from);) --skip_from;
        for (skip_to = text.size() - tail; inside(skip_to);) ++skip_to;
    }
    for (size_t i = 0; i < text.size(); ++i) {
        if (i == skip_from) {
            out += "...";
            i = skip_to;
        }
        const unsigned char c = static_cast<unsigned char>(text[i]);
        if (c < 0x20 || c == 0x7f || c == '"' || c == '\\' || (c >= 0x80 && !utf8)) {
            char escaped[8];
            std::snprintf(escaped, sizeof escaped, "\\x%02x", c);
            out += escaped;
        } else {
            out += char(c);
        }
    }
    return out += '"';
}

} // namespace dsopt
