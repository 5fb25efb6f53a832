// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/safetensors.h"
#include "base/sizes.h"
#include "base/text.h"
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>

#define XXH_INLINE_ALL
#include <xxhash.h>

// RapidJSON is in an unnamed namespace, so that its symbols cannot clash with those of another copy in the process. A
// failed assertion in RapidJSON throws and does not abort the caller's process.
// clang-format off
#define RAPIDJSON_NAMESPACE dsopt::rapidjson
#define RAPIDJSON_NAMESPACE_BEGIN namespace dsopt { namespace { namespace rapidjson {
#define RAPIDJSON_NAMESPACE_END }}}
// clang-format on
#define RAPIDJSON_ASSERT(x) (static_cast<bool>(x) ? void(0) : throw ::dsopt::Error(DSOPT_ERR_INTERNAL, "JSON: %s", #x))
#if defined(__clang__) // RapidJSON's empty stack adds to a null pointer, which clang's sanitizer reports
#pragma clang attribute push(__attribute__((no_sanitize("pointer-overflow"))), apply_to = function)
#endif
#include <rapidjson/memorystream.h>
#include <rapidjson/reader.h>
#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace dsopt {
namespace {

static_assert(std::endian::native == std::endian::little, "tensor data are stored as they are in memory");

using ull = unsigned long long; // for printf

constexpr uint64_t kMaxHeader = SafetensorsReader::kLongestHeader;
constexpr size_t kMaxDims = 8;
constexpr size_t kMaxKeys = size_t(1) << 20; // of metadata; limits the memory that parsing needs
constexpr size_t kDigits = 32;
constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::string_view kHeaderKey = "header_xxh3";
constexpr std::string_view kTensorKey = "xxh3.";
constexpr std::string_view kStart = R"({"__metadata__":{"header_xxh3":")"; // the digits follow

// ---- checksums ----

[[noreturn]] void refuse(const std::string &why) { throw Error(DSOPT_ERR_FORMAT, "%s", why.c_str()); }

class Digest {
public:
    Digest() { XXH3_128bits_reset(&state_); }
    void add(const void *data, size_t bytes) { XXH3_128bits_update(&state_, data, bytes); }
    std::string hex() const {
        XXH128_canonical_t canonical;
        XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state_));
        std::string text;
        for (const unsigned char byte : canonical.digest) {
            text += "0123456789abcdef"[byte >> 4];
            text += "0123456789abcdef"[byte & 15];
        }
        return text;
    }

private:
    XXH3_state_t state_;
};

/// Returns the checksum of the length field and the header, with zeros in place of the checksum's own digits.
std::string header_digest(std::string_view length_and_header) {
    const size_t digits = 8 + kStart.size();
    Digest digest;
    digest.add(length_and_header.data(), digits);
    digest.add(std::string(kDigits, '0').data(), kDigits);
    digest.add(length_and_header.data() + digits + kDigits, length_and_header.size() - digits - kDigits);
    return digest.hex();
}

/// False if a dimension is negative or the product overflows.
bool tensor_bytes(int32_t dtype, const std::vector<int64_t> &shape, uint64_t *bytes) {
    *bytes = dtype_size(dtype);
    for (const int64_t n : shape)
        if (n < 0 || __builtin_mul_overflow(*bytes, uint64_t(n), bytes)) return false;
    return true;
}

template <class F> void for_pieces(uint64_t total, F &&use) {
    for (uint64_t offset = 0; offset < total; offset += kPiece)
        use(offset, size_t(std::min<uint64_t>(total - offset, kPiece)));
}
auto piece_buffer(uint64_t total) {
    return std::make_unique_for_overwrite<std::byte[]>(size_t(std::min<uint64_t>(total, kPiece)));
}

// ---- writing ----

void append_quoted(std::string &out, std::string_view text) {
    out += '"';
    for (const char c : text) {
        if (static_cast<unsigned char>(c) < 0x20) {
            char escaped[8];
            std::snprintf(escaped, sizeof escaped, "\\u%04x", unsigned(c));
            out += escaped;
        } else {
            if (c == '"' || c == '\\') out += '\\';
            out += c;
        }
    }
    out += '"';
}

void check_names(std::vector<std::string_view> names, const char *what) {
    std::sort(names.begin(), names.end());
    for (size_t i = 0; i < names.size(); ++i) {
        if (!is_text(names[i]) || names[i] == kMetadataKey || names[i] == kHeaderKey)
            throw Error(DSOPT_ERR_ARGUMENT, "%s %s: not UTF-8, has a NUL, or is reserved", what,
                        quoted(names[i]).c_str());
        if (i > 0 && names[i] == names[i - 1])
            throw Error(DSOPT_ERR_ARGUMENT, "%s %s is there twice", what, quoted(names[i]).c_str());
    }
}

void check_lists(const Metadata &metadata, const std::vector<TensorEntry> &tensors) {
    std::vector<std::string_view> names;
    if (metadata.size() + tensors.size() >= kMaxKeys) // the header adds one more key
        throw Error(DSOPT_ERR_UNSUPPORTED, "%zu tensors and metadata keys are too many",
                    metadata.size() + tensors.size());
    for (const auto &[key, value] : metadata) {
        if (!is_text(value) || key.starts_with(kTensorKey))
            throw Error(DSOPT_ERR_ARGUMENT, "metadata key %s: reserved, or value not UTF-8", quoted(key).c_str());
        names.push_back(key);
    }
    check_names(std::move(names), "metadata key");
    names.clear();
    for (const auto &[name, dtype, shape, bytes] : tensors) {
        uint64_t expected;
        if (dtype_size(dtype) == 0)
            throw Error(DSOPT_ERR_DTYPE, "tensor %s: unknown dtype %d", quoted(name).c_str(), dtype);
        if (shape.size() > kMaxDims || !tensor_bytes(dtype, shape, &expected) || bytes != expected)
            throw Error(DSOPT_ERR_SHAPE, "tensor %s: shape and size do not fit together", quoted(name).c_str());
        names.push_back(name);
    }
    check_names(std::move(names), "tensor");
}

struct Header {
    std::string text;            // length field included
    std::vector<size_t> digests; // offset in `text` of the digits of the i-th tensor of the file
    uint64_t data_bytes = 0;
};

/// Makes a header with zeros in place of checksums, so that the size of the file is known before the first tensor is
/// read.
Header make_header(const Metadata &metadata, const std::vector<TensorEntry> &tensors,
                   const std::vector<size_t> &order) {
    Header header;
    std::string &text = header.text;
    const std::string zeros(kDigits, '0');
    text.assign(8, '\0').append(kStart).append(zeros) += '"';
    for (const auto &[key, value] : metadata) {
        append_quoted(text += ',', key);
        append_quoted(text += ':', value);
    }
    for (const size_t i : order) {
        append_quoted(text += ',', std::string(kTensorKey) + tensors[i].name);
        header.digests.push_back(text.size() + 2);
        text.append(":\"").append(zeros) += '"';
    }
    text += '}';
    for (const size_t i : order) {
        const TensorEntry &tensor = tensors[i];
        const uint64_t begin = header.data_bytes;
        if (__builtin_add_overflow(begin, tensor.bytes, &header.data_bytes) ||
            header.data_bytes > INT64_MAX - 2 * kMaxHeader)
            throw Error(DSOPT_ERR_SHAPE, "tensor %s: the file would have 2^63 bytes", quoted(tensor.name).c_str());
        append_quoted(text += ',', tensor.name);
        text.append(R"(:{"dtype":")").append(dtype_name(tensor.dtype)).append(R"(","shape":[)");
        for (size_t d = 0; d < tensor.shape.size(); ++d) text += (d ? "," : "") + std::to_string(tensor.shape[d]);
        text += R"(],"data_offsets":[)" + std::to_string(begin) + ',' + std::to_string(header.data_bytes) + "]}";
    }
    text += '}';
    // Page-aligned data can be mapped, or read with direct I/O. A small file would be mostly padding.
    const size_t alignment = header.data_bytes < (size_t(1) << 20) ? 64 : 4096;
    text.resize((text.size() + alignment - 1) / alignment * alignment, ' ');
    const uint64_t length = text.size() - 8;
    if (length > kMaxHeader)
        throw Error(DSOPT_ERR_UNSUPPORTED, "header of %llu bytes, the format allows %llu", ull(length),
                    ull(kMaxHeader));
    std::memcpy(text.data(), &length, sizeof length);
    return header;
}

// ---- reading ----

/// Allocates with realloc and throws on failure, because RapidJSON does not check the result. Memory only grows.
struct JsonAllocator {
    void *Realloc(void *memory, size_t, size_t bytes) {
        void *const moved = std::realloc(memory, bytes);
        if (!moved) throw std::bad_alloc();
        return moved;
    }
    static void Free(void *memory) { std::free(memory); }
};

/// Receives the events of the JSON parser and accepts only the layout of safetensors. Any other event throws at once,
/// so nesting is never deeper than three.
class HeaderHandler : public rapidjson::BaseReaderHandler<rapidjson::UTF8<>, HeaderHandler> {
public:
    SortedMetadata metadata;
    std::vector<TensorEntry> tensors;
    uint64_t data_bytes = 0;

    bool Default() { fail("a value of a wrong kind, or where it does not belong"); }
    bool Uint(unsigned value) { return Uint64(value); }
    bool Uint64(uint64_t value) {
        if (depth_ != 3) return Default();
        if (key_ == "data_offsets") {
            bounds_.push_back(value);
            if (bounds_.size() > 2) fail("more than two data_offsets");
        } else {
            tensors.back().shape.push_back(int64_t(value)); // 2^63 or more is negative: tensor_bytes() refuses it
            if (tensors.back().shape.size() > kMaxDims) fail("too many dimensions");
        }
        return true;
    }
    bool String(const char *data, unsigned length, bool) {
        const std::string_view text(data, length);
        if (depth_ != 2 || (!in_metadata_ && key_ != "dtype")) return Default();
        if (in_metadata_) {
            if (!is_text(text)) fail("the value is not UTF-8 or has a NUL");
            metadata.find(key_)->second = text;
        } else {
            for (const auto &known : kDtypes)
                if (known.name == text) tensors.back().dtype = known.dtype;
            if (tensors.back().dtype == 0) fail("unknown dtype " + quoted(text));
        }
        return true;
    }
    bool Key(const char *data, unsigned length, bool) {
        key_.assign(data, length);
        if (depth_ == 2 && !in_metadata_) {
            const unsigned bit = key_ == "dtype" ? 1 : key_ == "shape" ? 2 : key_ == "data_offsets" ? 4 : 0;
            if (bit == 0) fail("unknown field " + quoted(key_));
            if (fields_ & bit) fail("field " + quoted(key_) + " is there twice");
            fields_ |= bit;
            return true;
        }
        if (!is_text(key_)) refuse("header: name " + quoted(key_) + " is not UTF-8 or has a NUL");
        if (depth_ == 2) {
            if (!metadata.emplace(key_, "").second) fail("is there twice");
            if (metadata.size() > kMaxKeys) fail("too many keys");
        } else if (key_ == kMetadataKey) {
            if (!metadata.empty()) refuse("header: __metadata__ is there twice");
            in_metadata_ = true;
        } else {
            in_metadata_ = false;
            tensors.push_back(TensorEntry{key_, 0, {}, 0});
            bounds_.clear();
            fields_ = 0;
        }
        return true;
    }
    bool StartObject() { return depth_ > 1 ? Default() : ++depth_ > 0; }
    bool EndObject(unsigned) {
        if (depth_ == 2 && !in_metadata_) finish_tensor();
        return --depth_ >= 0;
    }
    bool StartArray() { return depth_ != 2 || in_metadata_ || key_ == "dtype" ? Default() : ++depth_ > 0; }
    bool EndArray(unsigned) { return --depth_ > 0; }

private:
    [[noreturn]] void fail(const std::string &why) const {
        if (depth_ > 0 && in_metadata_) refuse("header: metadata key " + quoted(key_) + ": " + why);
        if (depth_ > 0 && !tensors.empty()) refuse("header: tensor " + quoted(tensors.back().name) + ": " + why);
        refuse("header: " + why);
    }
    void finish_tensor() {
        TensorEntry &tensor = tensors.back();
        if (fields_ != 7 || bounds_.size() != 2) fail("dtype, shape or data_offsets missing");
        if (!tensor_bytes(tensor.dtype, tensor.shape, &tensor.bytes)) fail("the shape overflows");
        if (bounds_[0] != data_bytes)
            fail(std::string(bounds_[0] < data_bytes ? "overlap with" : "hole behind") + " the tensor before");
        if (bounds_[1] < bounds_[0] || bounds_[1] - bounds_[0] != tensor.bytes)
            fail("data_offsets do not fit the shape");
        data_bytes = bounds_[1];
    }

    int depth_ = 0; // 1: in the header, 2: in the metadata or a tensor, 3: in shape or data_offsets
    bool in_metadata_ = false;
    std::string key_;              // the last key
    unsigned fields_ = 0;          // one bit per field of the current tensor that was read
    std::vector<uint64_t> bounds_; // data_offsets of the current tensor
};

/// Returns the length field and the header, after comparing the checksum.
std::string read_header(const Source &source, uint64_t longest) {
    const uint64_t total = source.size();
    uint64_t length = 0;
    if (total < sizeof length) refuse("not a checkpoint: it has " + std::to_string(total) + " bytes");
    source.read(0, &length, sizeof length);
    if (length > kMaxHeader) refuse("not a checkpoint: header of " + std::to_string(length) + " bytes");
    if (length > longest)
        refuse("header of " + std::to_string(length) + " bytes, that of a checkpoint of this optimizer has at most " +
               std::to_string(longest));
    if (length > total - sizeof length)
        refuse("cut off: header of " + std::to_string(length) + " bytes in a file of " + std::to_string(total));
    std::string text(sizeof length + size_t(length), '\0');
    source.read(0, text.data(), text.size());
    const std::string_view header = std::string_view(text).substr(sizeof length);
    if (!header.starts_with(kStart) || header.size() < kStart.size() + kDigits)
        refuse("not a dsopt checkpoint: the header has no checksum");
    // Compared as text: "AB" differs from "ab", so every bit of the file is covered.
    if (header.substr(kStart.size(), kDigits) != header_digest(text))
        refuse("header: damaged, checksum does not match");
    return text;
}

} // namespace

void write_safetensors(Sink &sink, const Metadata &metadata, const std::vector<TensorEntry> &tensors,
                       const Deliver &deliver, const std::function<void()> &before_commit) {
    check_lists(metadata, tensors);
    std::vector<size_t> order(tensors.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return dtype_size(tensors[a].dtype) > dtype_size(tensors[b].dtype); });
    Header header = make_header(metadata, tensors, order);
    sink.begin(header.text.size() + header.data_bytes);

    const auto digest_of = [&](size_t index, auto &&use) {
        Digest digest;
        for_pieces(tensors[index].bytes, [&](uint64_t offset, size_t bytes) {
            const void *const data = deliver(index, offset, bytes);
            digest.add(data, bytes);
            use(data, bytes);
        });
        return digest.hex();
    };
    // Reads the tensors twice, because the sink receives bytes in order, and the checksums are in the header.
    for (size_t i = 0; i < order.size(); ++i)
        header.text.replace(header.digests[i], kDigits, digest_of(order[i], [](const void *, size_t) {}));
    header.text.replace(8 + kStart.size(), kDigits, header_digest(header.text));
    sink.write(header.text.data(), header.text.size());
    for (size_t i = 0; i < order.size(); ++i) {
        const std::string digest =
            digest_of(order[i], [&](const void *data, size_t bytes) { sink.write(data, bytes); });
        // Otherwise a file that cannot be loaded would replace a valid old file.
        if (header.text.compare(header.digests[i], kDigits, digest) != 0)
            throw Error(DSOPT_ERR_BUSY, "tensor %s changed while it was saved", quoted(tensors[order[i]].name).c_str());
    }
    sink.flush();
    before_commit();
    sink.commit();
}

SafetensorsReader::SafetensorsReader(std::unique_ptr<const Source> source, uint64_t longest_header) :
    source_(std::move(source)) {
    const std::string text = read_header(*source_, longest_header);
    HeaderHandler handler;
    JsonAllocator allocator;
    rapidjson::GenericReader<rapidjson::UTF8<>, rapidjson::UTF8<>, JsonAllocator> reader(&allocator);
    rapidjson::MemoryStream stream(text.data() + 8, text.size() - 8);
    const auto result =
        reader.Parse<rapidjson::kParseIterativeFlag | rapidjson::kParseValidateEncodingFlag>(stream, handler);
    const size_t end = result.IsError() ? result.Offset() : stream.Tell(); // a NUL ends the text for RapidJSON
    if (result.IsError() || end != text.size() - 8) refuse("header: not valid JSON at byte " + std::to_string(end));
    const uint64_t present = source_->size() - text.size();
    if (present != handler.data_bytes)
        refuse((present < handler.data_bytes ? "cut off: " : "something was appended: ") + std::to_string(present) +
               " bytes of tensors where the header says " + std::to_string(handler.data_bytes));

    metadata_ = std::move(handler.metadata);
    tensors_ = std::move(handler.tensors);
    metadata_.erase(metadata_.find(kHeaderKey));
    std::string key;
    uint64_t offset = text.size(); // the tensors are contiguous
    for (size_t i = 0; i < tensors_.size(); ++i) {
        const std::string &name = tensors_[i].name;
        if (!index_.emplace(name, i).second) refuse("header: tensor " + quoted(name) + " is there twice");
        const auto checksum = metadata_.find(key.assign(kTensorKey).append(name));
        if (checksum == metadata_.end()) refuse("header: tensor " + quoted(name) + " has no checksum");
        checksums_.push_back(std::move(checksum->second));
        metadata_.erase(checksum);
        offsets_.push_back(offset);
        offset += tensors_[i].bytes;
    }
    const auto rest = metadata_.lower_bound(kTensorKey);
    if (rest != metadata_.end() && rest->first.starts_with(kTensorKey))
        refuse("header: metadata key " + quoted(rest->first) + " belongs to no tensor");
}

size_t SafetensorsReader::find(std::string_view name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? npos : found->second;
}

void SafetensorsReader::verify(size_t index, void *data) const {
    verify(index, 0, data, data != nullptr ? size_t(tensors_.at(index).bytes) : 0);
}

void SafetensorsReader::verify(size_t index, uint64_t offset, void *data, size_t bytes) const {
    const TensorEntry &tensor = tensors_.at(index);
    const bool whole = bytes == tensor.bytes;
    const auto buffer = whole ? nullptr : piece_buffer(tensor.bytes);
    Digest digest;
    for_pieces(tensor.bytes, [&](uint64_t begin, size_t count) {
        std::byte *const piece = whole ? static_cast<std::byte *>(data) + begin : buffer.get();
        source_->read(offsets_[index] + begin, piece, count);
        digest.add(piece, count);
        const uint64_t first = std::max(begin, offset), end = std::min(begin + count, offset + bytes);
        if (!whole && first < end)
            std::memcpy(static_cast<std::byte *>(data) + (first - offset), piece + (first - begin), end - first);
    });
    if (digest.hex() != checksums_[index])
        throw Error(DSOPT_ERR_CHECKSUM, "tensor %s: damaged, checksum does not match", quoted(tensor.name).c_str());
}

void SafetensorsReader::read(size_t index, uint64_t offset, void *data, size_t bytes) const {
    const TensorEntry &tensor = tensors_.at(index);
    if (offset > tensor.bytes || bytes > tensor.bytes - offset)
        throw Error(DSOPT_ERR_INTERNAL, "read behind the end of tensor %s", quoted(tensor.name).c_str());
    source_->read(offsets_[index] + offset, data, bytes);
}

} // namespace dsopt
