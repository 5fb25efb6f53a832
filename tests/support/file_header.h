// SPDX-License-Identifier: Apache-2.0
// Edits headers of checkpoints.
#pragma once
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <xxhash.h>

namespace test {

/// Replaces text in the header of a file and updates the checksum of the header.
inline std::string with_header(const std::string &data, const std::string &find, const std::string &replace) {
    uint64_t length = 0;
    std::memcpy(&length, data.data(), 8);
    std::string header = data.substr(8, length);
    const size_t offset = header.find(find);
    if (offset == std::string::npos) throw std::runtime_error("not in the header: " + find);
    header.replace(offset, find.size(), replace);
    const std::string key = R"("header_xxh3":")";
    const size_t digits = header.find(key) + key.size();
    header.replace(digits, 32, std::string(32, '0'));
    length = header.size();
    std::string result(reinterpret_cast<const char *>(&length), 8);
    result += header;
    const XXH128_hash_t hash = XXH3_128bits(result.data(), result.size());
    char text[33];
    std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                  static_cast<unsigned long long>(hash.low64));
    return result.replace(8 + digits, 32, text, 32) +
           data.substr(data.size() - (data.size() - 8 - header.size() + replace.size() - find.size()));
}

} // namespace test
