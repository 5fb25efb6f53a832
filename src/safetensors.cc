// SPDX-License-Identifier: Apache-2.0
#include "safetensors.h"
#include "dtype.h"
#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <new>
#include <numeric>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

// RapidJSON in an unnamed namespace: none of its symbols can meet those of another copy in the process. A broken
// promise inside it must not abort the caller's process.
// clang-format off
#define RAPIDJSON_NAMESPACE dsopt::rapidjson
#define RAPIDJSON_NAMESPACE_BEGIN namespace dsopt { namespace { namespace rapidjson {
#define RAPIDJSON_NAMESPACE_END }}}
// clang-format on
#define RAPIDJSON_ASSERT(x) (static_cast<bool>(x) ? void(0) : throw ::dsopt::Error(DSOPT_ERR_INTERNAL, "JSON: %s", #x))
#if defined(__clang__) // its stack adds to a null pointer while it is empty, which clang's sanitizer reports
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

constexpr uint64_t kMaxHeader = 100'000'000; // the format's limit
constexpr size_t kMaxDims = 8;
constexpr size_t kMaxKeys = size_t(1) << 20;   // of metadata; more need more memory than their header
constexpr uint64_t kPiece = uint64_t(4) << 20; // no read, write or copy is larger, the header apart
constexpr size_t kDigits = 32;
constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::string_view kHeaderKey = "header_xxh3";
constexpr std::string_view kTensorKey = "xxh3.";
constexpr std::string_view kStart = R"({"__metadata__":{"header_xxh3":")"; // the digits follow

constexpr struct {
    std::string_view name;
    int32_t dtype;
} kDtypes[] = {{"F32", DSOPT_F32}, {"F16", DSOPT_F16}, {"BF16", DSOPT_BF16}, {"I32", DSOPT_I32},
               {"U8", DSOPT_U8},   {"I64", DSOPT_I64}, {"F64", DSOPT_F64}};

// ---- text and checksums ----

/// UTF-8 without NUL. Names and metadata end up in C strings, so a NUL would make two different names equal.
bool is_text(std::string_view text) {
    rapidjson::MemoryStream stream(text.data(), text.size());
    unsigned code = 0;
    while (stream.Tell() < text.size())
        if (!rapidjson::UTF8<>::Decode(stream, &code) || code == 0) return false;
    return true;
}

/// Foreign bytes for a message: quoted, escaped, the middle of long ones left out.
std::string shown(std::string_view text) {
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

[[noreturn]] void refuse(const std::string &why) { throw Error(DSOPT_ERR_FORMAT, "%s", why.c_str()); }
[[noreturn]] void throw_io(const char *what, const std::string &path, const std::string &reason) {
    throw Error(DSOPT_ERR_IO, "%s %s: %s", what, shown(path).c_str(), reason.c_str());
}
[[noreturn]] void throw_io(const char *what, const std::string &path, int error) {
    throw_io(what, path, std::generic_category().message(error));
}

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

/// Of the length field and the header, its own digits taken as zeros.
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
    for (uint64_t offset = 0; offset < total; offset += kPiece) use(offset, size_t(std::min(total - offset, kPiece)));
}
auto piece_buffer(uint64_t total) {
    return std::make_unique_for_overwrite<std::byte[]>(size_t(std::min(total, kPiece)));
}

// ---- files ----

class Fd {
public:
    explicit Fd(int fd = -1) : fd_(fd) {}
    Fd(Fd &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd &operator=(Fd &&other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Fd() {
        if (fd_ >= 0) ::close(fd_);
    }
    explicit operator bool() const { return fd_ >= 0; }
    int get() const { return fd_; }

private:
    int fd_;
};

constinit std::atomic<unsigned> temporary_counter{0};

/// The file behind a symlink is what gets replaced: such a link often leads to the disk meant for checkpoints.
std::string follow_links(std::string path) {
    for (int depth = 0; depth < 40; ++depth) {
        char buffer[PATH_MAX];
        const ssize_t length = ::readlink(path.c_str(), buffer, sizeof buffer);
        if (length < 0 && errno == ENAMETOOLONG) throw_io("cannot save", path, errno); // in parts it might still work
        if (length <= 0) return path; // not a link; what else may be wrong shows up when the directory is opened
        const std::string target(buffer, size_t(length));
        const size_t slash = path.rfind('/');
        path = target[0] == '/' || slash == std::string::npos ? target : path.substr(0, slash + 1) + target;
    }
    throw_io("cannot save", path, ELOOP);
}

class FileSink final : public Sink {
public:
    explicit FileSink(const char *path) : path_(follow_links(path)) {
        const size_t slash = path_.rfind('/');
        name_ = slash == std::string::npos ? path_ : path_.substr(slash + 1);
        if (name_.empty()) fail(path_.empty() ? ENOENT : EISDIR);
        const std::string directory = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
        directory_ = Fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        if (!directory_) fail(errno);
        struct stat old;
        if (::fstatat(directory_.get(), name_.c_str(), &old, AT_SYMLINK_NOFOLLOW) == 0) {
            if (S_ISDIR(old.st_mode)) fail(EISDIR);
            if (!S_ISREG(old.st_mode)) throw_io("cannot save", path_, "not a regular file");
            old_mode_ = int(old.st_mode & 0777);
        } else if (errno != ENOENT) {
            fail(errno);
        }
        // A hash in place of the name: the temporary's name must not be too long where the target's is not.
        char prefix[32];
        std::snprintf(prefix, sizeof prefix, ".dsopt-%016llx-", ull(XXH3_64bits(name_.data(), name_.size())));
        prefix_ = prefix;
    }
    ~FileSink() override {
        if (!temporary_.empty()) ::unlinkat(directory_.get(), temporary_.c_str(), 0);
    }

    void begin(uint64_t total) override {
        sweep();
        create();
        // A full disk is noticed here and not after an hour of writing. Not posix_fallocate: where the file system
        // cannot do it, that one writes a byte to every block.
        int result;
        do result = ::fallocate(file_.get(), 0, 0, off_t(total));
        while (result != 0 && errno == EINTR);
        if (result != 0 && errno != EOPNOTSUPP && errno != EINVAL && errno != ENOSYS) fail(errno);
    }

    void write(const void *data, size_t bytes) override {
        const char *at = static_cast<const char *>(data);
        while (bytes > 0) {
            const ssize_t written = ::write(file_.get(), at, bytes);
            if (written < 0 && errno == EINTR) continue;
            if (written <= 0) fail(written < 0 ? errno : EIO);
            at += written;
            bytes -= size_t(written);
        }
    }

    void commit() override {
        if (old_mode_ >= 0) (void)!::fchmod(file_.get(), mode_t(old_mode_)); // some file systems have no modes
        // Never a second try: after a failure the kernel has dropped the dirty pages, and fsync would report success.
        if (::fsync(file_.get()) != 0) fail(errno);
        if (::renameat(directory_.get(), temporary_.c_str(), directory_.get(), name_.c_str()) != 0) fail(errno);
        temporary_.clear();
        file_ = Fd(); // and with it the lock, only now: a sweep must not find the temporary unlocked
        // EINVAL: this file system does not flush directories.
        if (::fsync(directory_.get()) != 0 && errno != EINVAL)
            throw_io("saved, but may not survive a power loss:", path_, errno);
    }

private:
    [[noreturn]] void fail(int error) const { throw_io("cannot save", path_, error); }

    /// Readable for others as the umask says, like any output file; whoever wants it private says so by umask or
    /// directory. If the target exists, its mode is kept. The lock says that the writer lives: other than a pid it
    /// holds across containers and is not reused.
    void create() {
        const mode_t mode = old_mode_ < 0 ? 0666 : mode_t(old_mode_ | 0600);
        for (int attempt = 0; attempt < 1000; ++attempt) {
            std::string name =
                prefix_ + std::to_string(::getpid()) + "-" + std::to_string(temporary_counter++) + ".tmp";
            Fd file(::openat(directory_.get(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
            if (!file && (errno == EEXIST || errno == EINTR)) continue;
            if (!file) fail(errno);
            // A sweep can come between open and flock; then the file is gone or about to be. Other failures: no locks
            // here, hence no sweeps either.
            struct stat now;
            if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) continue;
            if (::fstat(file.get(), &now) == 0 && now.st_nlink == 0) continue;
            file_ = std::move(file);
            temporary_ = std::move(name); // a copy could fail, and leave the file behind
            return;
        }
        fail(EEXIST);
    }

    /// Removes what savers of the same target left behind when they were killed. Best effort: failures are the next
    /// save's matter.
    void sweep() const {
        const int copy = ::openat(directory_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (copy < 0) return;
        const std::unique_ptr<DIR, int (*)(DIR *)> list(::fdopendir(copy), ::closedir);
        if (!list) {
            ::close(copy);
            return;
        }
        while (const dirent *entry = ::readdir(list.get())) {
            const std::string_view name = entry->d_name;
            if (!name.starts_with(prefix_) || !name.ends_with(".tmp")) continue;
            const Fd file(::openat(directory_.get(), entry->d_name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
            struct stat now;
            if (!file || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0 || ::fstat(file.get(), &now) != 0) continue;
            // Without a link another sweep was faster, and the name may already be a new saver's.
            if (S_ISREG(now.st_mode) && now.st_nlink > 0) ::unlinkat(directory_.get(), entry->d_name, 0);
        }
    }

    std::string path_, name_, prefix_, temporary_;
    Fd directory_, file_;
    int old_mode_ = -1;
};

class FileSource final : public Source {
public:
    explicit FileSource(const char *path) : path_(path) {
        // O_NONBLOCK: opening a FIFO must not wait for a writer.
        file_ = Fd(::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
        struct stat now;
        if (!file_ || ::fstat(file_.get(), &now) != 0) throw_io("cannot load", path_, errno);
        if (S_ISDIR(now.st_mode)) throw_io("cannot load", path_, EISDIR);
        if (!S_ISREG(now.st_mode)) throw_io("cannot load", path_, "not a regular file");
        size_ = uint64_t(now.st_size);
    }
    uint64_t size() const override { return size_; }
    void read(uint64_t offset, void *data, size_t bytes) const override {
        char *at = static_cast<char *>(data);
        while (bytes > 0) {
            const ssize_t count = ::pread(file_.get(), at, bytes, off_t(offset));
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) throw_io("cannot read", path_, errno);
            if (count == 0) throw_io("cannot read", path_, "the file became shorter");
            at += count;
            offset += uint64_t(count);
            bytes -= size_t(count);
        }
    }

private:
    std::string path_;
    Fd file_;
    uint64_t size_ = 0;
};

// ---- callbacks ----

class CallbackSink final : public Sink {
public:
    explicit CallbackSink(const dsopt_io &io) : io_(io) {
        if (!io.write) throw Error(DSOPT_ERR_ARGUMENT, "io.write is NULL");
    }
    void begin(uint64_t) override {}
    void write(const void *data, size_t bytes) override {
        const int result = io_.write(io_.user, data, bytes);
        if (result != 0) throw Error(DSOPT_ERR_IO, "io.write returned %d at offset %llu", result, ull(offset_));
        offset_ += bytes;
    }
    void commit() override {}

private:
    dsopt_io io_;
    uint64_t offset_ = 0;
};

class CallbackSource final : public Source {
public:
    explicit CallbackSource(const dsopt_io &io) : io_(io) {
        if (!io.read) throw Error(DSOPT_ERR_ARGUMENT, "io.read is NULL");
    }
    uint64_t size() const override { return io_.total; }
    void read(uint64_t offset, void *data, size_t bytes) const override {
        if (bytes == 0) return;
        const int result = io_.read(io_.user, offset, data, bytes);
        if (result != 0) throw Error(DSOPT_ERR_IO, "io.read returned %d at offset %llu", result, ull(offset));
    }

private:
    dsopt_io io_;
};

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
                        shown(names[i]).c_str());
        if (i > 0 && names[i] == names[i - 1])
            throw Error(DSOPT_ERR_ARGUMENT, "%s %s is there twice", what, shown(names[i]).c_str());
    }
}

void check_lists(const Metadata &metadata, const std::vector<TensorEntry> &tensors) {
    std::vector<std::string_view> names;
    if (metadata.size() + tensors.size() >= kMaxKeys) // one more is the header's own
        throw Error(DSOPT_ERR_UNSUPPORTED, "%zu tensors and metadata keys are too many",
                    metadata.size() + tensors.size());
    for (const auto &[key, value] : metadata) {
        if (!is_text(value) || key.starts_with(kTensorKey))
            throw Error(DSOPT_ERR_ARGUMENT, "metadata key %s: reserved, or value not UTF-8", shown(key).c_str());
        names.push_back(key);
    }
    check_names(std::move(names), "metadata key");
    names.clear();
    for (const auto &[name, dtype, shape, bytes] : tensors) {
        uint64_t expected;
        if (dtype_size(dtype) == 0)
            throw Error(DSOPT_ERR_DTYPE, "tensor %s: unknown dtype %d", shown(name).c_str(), dtype);
        if (shape.size() > kMaxDims || !tensor_bytes(dtype, shape, &expected) || bytes != expected)
            throw Error(DSOPT_ERR_SHAPE, "tensor %s: shape and size do not fit together", shown(name).c_str());
        names.push_back(name);
    }
    check_names(std::move(names), "tensor");
}

struct Header {
    std::string text;            // length field included
    std::vector<size_t> digests; // where in `text` the digits of the i-th tensor of the file are
    uint64_t data_bytes = 0;
};

/// With zeros for the checksums: so the size of the file is known before the first tensor is read.
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
            throw Error(DSOPT_ERR_SHAPE, "tensor %s: the file would have 2^63 bytes", shown(tensor.name).c_str());
        append_quoted(text += ',', tensor.name);
        text += R"(:{"dtype":")";
        for (const auto &known : kDtypes)
            if (known.dtype == tensor.dtype) text += known.name;
        text += R"(","shape":[)";
        for (size_t d = 0; d < tensor.shape.size(); ++d) text += (d ? "," : "") + std::to_string(tensor.shape[d]);
        text += R"(],"data_offsets":[)" + std::to_string(begin) + ',' + std::to_string(header.data_bytes) + "]}";
    }
    text += '}';
    // Data at page boundaries can be mapped or read directly; for small files that would be mostly padding.
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

/// malloc that throws: RapidJSON, which only makes memory larger with it, does not look at the result.
struct JsonAllocator {
    void *Realloc(void *memory, size_t, size_t bytes) {
        void *const moved = std::realloc(memory, bytes);
        if (!moved) throw std::bad_alloc();
        return moved;
    }
    static void Free(void *memory) { std::free(memory); }
};

/// Gets the header's JSON event by event and lets only the layout of safetensors through. What it does not expect ends
/// the parse at once, so nesting is never deeper than three.
class HeaderHandler : public rapidjson::BaseReaderHandler<rapidjson::UTF8<>, HeaderHandler> {
public:
    std::map<std::string, std::string, std::less<>> metadata;
    std::vector<TensorEntry> tensors;
    std::vector<uint64_t> offsets; // from the start of the data
    uint64_t data_bytes = 0;

    bool Default() { fail("a value of a wrong kind, or where it does not belong"); }
    bool Uint(unsigned value) { return Uint64(value); }
    bool Uint64(uint64_t value) {
        if (depth_ != 3) return Default();
        if (key_ == "data_offsets") {
            bounds_.push_back(value);
            if (bounds_.size() > 2) fail("more than two data_offsets");
        } else {
            tensors.back().shape.push_back(int64_t(value)); // from 2^63 on negative, which tensor_bytes() refuses
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
            if (tensors.back().dtype == 0) fail("unknown dtype " + shown(text));
        }
        return true;
    }
    bool Key(const char *data, unsigned length, bool) {
        key_.assign(data, length);
        if (depth_ == 2 && !in_metadata_) {
            const unsigned bit = key_ == "dtype" ? 1 : key_ == "shape" ? 2 : key_ == "data_offsets" ? 4 : 0;
            if (bit == 0) fail("unknown field " + shown(key_));
            if (fields_ & bit) fail("field " + shown(key_) + " is there twice");
            fields_ |= bit;
            return true;
        }
        if (!is_text(key_)) refuse("header: name " + shown(key_) + " is not UTF-8 or has a NUL");
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
        if (depth_ > 0 && in_metadata_) refuse("header: metadata key " + shown(key_) + ": " + why);
        if (depth_ > 0 && !tensors.empty()) refuse("header: tensor " + shown(tensors.back().name) + ": " + why);
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
        offsets.push_back(bounds_[0]);
        data_bytes = bounds_[1];
    }

    int depth_ = 0; // 1: in the header, 2: in the metadata or a tensor, 3: in shape or data_offsets
    bool in_metadata_ = false;
    std::string key_;              // the last one
    unsigned fields_ = 0;          // of the tensor being read, a bit each
    std::vector<uint64_t> bounds_; // its data_offsets
};

/// Length field and header, checksum compared.
std::string read_header(const Source &source) {
    const uint64_t total = source.size();
    uint64_t length = 0;
    if (total < sizeof length) refuse("not a checkpoint: it has " + std::to_string(total) + " bytes");
    source.read(0, &length, sizeof length);
    if (length > kMaxHeader) refuse("not a checkpoint: header of " + std::to_string(length) + " bytes");
    if (length > total - sizeof length)
        refuse("cut off: header of " + std::to_string(length) + " bytes in a file of " + std::to_string(total));
    std::string text(sizeof length + size_t(length), '\0');
    source.read(0, text.data(), text.size());
    const std::string_view header = std::string_view(text).substr(sizeof length);
    if (!header.starts_with(kStart) || header.size() < kStart.size() + kDigits)
        refuse("not a dsopt checkpoint: the header has no checksum");
    // Compared as text: each bit counts, so "AB" is not "ab".
    if (header.substr(kStart.size(), kDigits) != header_digest(text))
        refuse("header: damaged, checksum does not match");
    return text;
}

} // namespace

std::unique_ptr<Sink> file_sink(const char *path) { return std::make_unique<FileSink>(path); }
std::unique_ptr<Source> file_source(const char *path) { return std::make_unique<FileSource>(path); }
std::unique_ptr<Sink> callback_sink(const dsopt_io &io) { return std::make_unique<CallbackSink>(io); }
std::unique_ptr<Source> callback_source(const dsopt_io &io) { return std::make_unique<CallbackSource>(io); }

void write_safetensors(Sink &sink, const Metadata &metadata, const std::vector<TensorEntry> &tensors,
                       const Deliver &deliver) {
    check_lists(metadata, tensors);
    std::vector<size_t> order(tensors.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return dtype_size(tensors[a].dtype) > dtype_size(tensors[b].dtype); });
    Header header = make_header(metadata, tensors, order);
    sink.begin(header.text.size() + header.data_bytes);

    const auto buffer = piece_buffer(header.data_bytes);
    const auto digest_of = [&](size_t index, auto &&use) {
        Digest digest;
        for_pieces(tensors[index].bytes, [&](uint64_t offset, size_t bytes) {
            const void *const data = deliver(index, offset, bytes, buffer.get());
            digest.add(data, bytes);
            use(data, bytes);
        });
        return digest.hex();
    };
    // Twice over the tensors: a sink takes bytes in order only, and the checksums come first.
    for (size_t i = 0; i < order.size(); ++i)
        header.text.replace(header.digests[i], kDigits, digest_of(order[i], [](const void *, size_t) {}));
    header.text.replace(8 + kStart.size(), kDigits, header_digest(header.text));
    sink.write(header.text.data(), header.text.size());
    for (size_t i = 0; i < order.size(); ++i) {
        const std::string digest =
            digest_of(order[i], [&](const void *data, size_t bytes) { sink.write(data, bytes); });
        // Otherwise a good old file would be replaced by one that is refused on the day it is needed.
        if (header.text.compare(header.digests[i], kDigits, digest) != 0)
            throw Error(DSOPT_ERR_BUSY, "tensor %s changed while it was saved", shown(tensors[order[i]].name).c_str());
    }
    sink.commit();
}

SafetensorsReader::SafetensorsReader(std::unique_ptr<const Source> source) : source_(std::move(source)) {
    const std::string text = read_header(*source_);
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
    offsets_ = std::move(handler.offsets);
    metadata_.erase(metadata_.find(kHeaderKey));
    std::string key;
    for (size_t i = 0; i < tensors_.size(); ++i) {
        const std::string &name = tensors_[i].name;
        if (!index_.emplace(name, i).second) refuse("header: tensor " + shown(name) + " is there twice");
        const auto checksum = metadata_.find(key.assign(kTensorKey).append(name));
        if (checksum == metadata_.end()) refuse("header: tensor " + shown(name) + " has no checksum");
        checksums_.push_back(std::move(checksum->second));
        metadata_.erase(checksum);
        offsets_[i] += text.size();
    }
    const auto rest = metadata_.lower_bound(kTensorKey);
    if (rest != metadata_.end() && rest->first.starts_with(kTensorKey))
        refuse("header: metadata key " + shown(rest->first) + " belongs to no tensor");
}

size_t SafetensorsReader::find(std::string_view name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? npos : found->second;
}

void SafetensorsReader::verify(size_t index, void *data) const {
    const TensorEntry &tensor = tensors_.at(index);
    const auto buffer = data ? nullptr : piece_buffer(tensor.bytes);
    Digest digest;
    for_pieces(tensor.bytes, [&](uint64_t offset, size_t bytes) {
        void *const piece = data ? static_cast<std::byte *>(data) + offset : buffer.get();
        source_->read(offsets_[index] + offset, piece, bytes);
        digest.add(piece, bytes);
    });
    if (digest.hex() != checksums_[index])
        throw Error(DSOPT_ERR_CHECKSUM, "tensor %s: damaged, checksum does not match", shown(tensor.name).c_str());
}

void SafetensorsReader::read(size_t index, uint64_t offset, void *data, size_t bytes) const {
    const TensorEntry &tensor = tensors_.at(index);
    if (offset > tensor.bytes || bytes > tensor.bytes - offset)
        throw Error(DSOPT_ERR_INTERNAL, "read behind the end of tensor %s", shown(tensor.name).c_str());
    source_->read(offsets_[index] + offset, data, bytes);
}

} // namespace dsopt
