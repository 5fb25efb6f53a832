// SPDX-License-Identifier: Apache-2.0
#include "files.h"
#define XXH_INLINE_ALL
#include <cstdlib>
#include <cstring>
#include <xxhash.h>

namespace fuzz {
namespace {

constexpr size_t kDigest = 32; // hexadecimal digits
const Bytes kStart = R"({"__metadata__":{"header_xxh3":")";

Bytes digest_of(const char *data, size_t bytes) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, bytes));
    Bytes text;
    for (const unsigned char byte : canonical.digest)
        for (const int digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
    return text;
}

/// Returns the name of the tensor whose description contains `index`: the string before the last ":{".
Bytes name_before(const Bytes &header, size_t index) {
    const size_t brace = header.rfind("\":{", index);
    if (brace == Bytes::npos || brace == 0) return {};
    size_t quote = brace;
    do {
        quote = header.rfind('"', quote - 1);
    } while (quote != Bytes::npos && quote != 0 && header[quote - 1] == '\\');
    return quote == Bytes::npos ? Bytes() : header.substr(quote + 1, brace - quote - 1);
}

/// Same as Bytes::find(), which would take a quarter of the time of a load.
size_t find_word(const Bytes &text, const Bytes &word, size_t from) {
    const void *const found = ::memmem(text.data() + from, text.size() - from, word.data(), word.size());
    return found != nullptr ? size_t(static_cast<const char *>(found) - text.data()) : Bytes::npos;
}

void correct_tensor_checksums(Bytes &header, const Bytes &data) {
    const Bytes offsets = R"("data_offsets":[)";
    size_t last = 0; // end of the last checksum: the next one is usually after it
    for (size_t index = 0; (index = find_word(header, offsets, index)) != Bytes::npos;) {
        const Bytes name = name_before(header, index);
        index += offsets.size();
        char *rest = nullptr;
        const unsigned long long begin = std::strtoull(header.c_str() + index, &rest, 10);
        const unsigned long long end = *rest == ',' ? std::strtoull(rest + 1, nullptr, 10) : 0;
        if (name.empty() || end < begin || end > data.size()) continue;
        const Bytes key = "\"xxh3." + name + "\":\"";
        size_t digest = find_word(header, key, last);
        if (digest == Bytes::npos) digest = find_word(header, key, 0);
        if (digest != Bytes::npos) last = digest;
        if (digest == Bytes::npos || digest + key.size() + kDigest > header.size()) continue;
        header.replace(digest + key.size(), kDigest, digest_of(data.data() + begin, end - begin));
    }
}

} // namespace

File File::split(const Bytes &file) {
    uint64_t length = 0;
    std::memcpy(&length, file.data(), sizeof length);
    File result{file.substr(sizeof length, length), file.substr(sizeof length + length)};
    result.header.erase(result.header.find_last_not_of(' ') + 1);
    return result;
}

Bytes File::assembled(bool correct_tensors, bool correct_header) const {
    Bytes text = header;
    if (correct_tensors) correct_tensor_checksums(text, data);
    while (text.size() % 64 != 64 - sizeof(uint64_t)) text += ' ';
    const uint64_t length = text.size();
    Bytes file(reinterpret_cast<const char *>(&length), sizeof length);
    file += text;
    const size_t digest = sizeof length + kStart.size();
    if (correct_header && text.size() >= kStart.size() + kDigest) {
        file.replace(digest, kDigest, Bytes(kDigest, '0')); // the digest is computed with zeros in its place
        file.replace(digest, kDigest, digest_of(file.data(), file.size()));
    }
    return file + data;
}

} // namespace fuzz
