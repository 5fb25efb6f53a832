// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/byte_io.h"
#include "base/sizes.h"
#include "base/text.h"
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <dirent.h>
#include <fcntl.h>
#include <string>
#include <string_view>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace dsopt {
namespace {

using ull = unsigned long long; // for printf

[[noreturn]] void throw_io(const char *what, const std::string &path, const std::string &reason) {
    throw Error(DSOPT_ERR_IO, "%s %s: %s", what, quoted(path).c_str(), reason.c_str());
}
[[noreturn]] void throw_io(const char *what, const std::string &path, int error) {
    throw_io(what, path, std::generic_category().message(error));
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

/// Returns the folder with a trailing slash; "" if the path has no slash.
std::string folder_of(const std::string &path) { return path.substr(0, path.rfind('/') + 1); }

/// Resolves symlinks, so that a save replaces the target of a link and not the link: a link often points to another
/// disk. In a sticky folder that is writable for all users, only links of this user and of the
/// folder's owner are followed: another user's link could make this process replace any file that it may write. The
/// kernel has the same rule (fs.protected_symlinks), but does not apply it to links that a program resolves itself.
std::string follow_links(std::string path) {
    for (int depth = 0; depth < 40; ++depth) {
        const Fd link(::open(path.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
        // A path that is too long is refused, although opening its folder first might work.
        if (!link && errno == ENAMETOOLONG) throw_io("cannot save", path, errno);
        struct stat now, folder_status;
        // Not a link. Other errors are reported when the directory is opened.
        if (!link || ::fstat(link.get(), &now) != 0 || !S_ISLNK(now.st_mode)) return path;
        const std::string folder = folder_of(path);
        if (::stat(folder.empty() ? "." : folder.c_str(), &folder_status) != 0) throw_io("cannot save", path, errno);
        constexpr mode_t shared = S_ISVTX | S_IWOTH;
        if ((folder_status.st_mode & shared) == shared && now.st_uid != ::geteuid() &&
            now.st_uid != folder_status.st_uid)
            throw_io("cannot save", path, "it is another user's link in a folder that is writable for all users");
        char buffer[PATH_MAX];
        const ssize_t length = ::readlinkat(link.get(), "", buffer, sizeof buffer);
        if (length < 0) throw_io("cannot save", path, errno);
        const std::string target(buffer, size_t(length));
        path = target[0] == '/' ? target : folder + target;
    }
    throw_io("cannot save", path, ELOOP);
}

class FileSink final : public Sink {
public:
    explicit FileSink(const char *path) : path_(follow_links(path)) {
        const std::string folder = folder_of(path_);
        name_ = path_.substr(folder.size());
        if (name_.empty()) fail(path_.empty() ? ENOENT : EISDIR);
        directory_ = Fd(::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        if (!directory_) fail(errno);
        struct stat old;
        if (::fstatat(directory_.get(), name_.c_str(), &old, AT_SYMLINK_NOFOLLOW) == 0) {
            if (S_ISDIR(old.st_mode)) fail(EISDIR);
            if (!S_ISREG(old.st_mode)) throw_io("cannot save", path_, "not a regular file");
            old_mode_ = int(old.st_mode & 0777);
        } else if (errno != ENOENT) {
            fail(errno);
        }
        // The prefix has a hash of the name, not the name: the temporary name must not exceed the length limit.
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
        // Reports a full disk before the first write. posix_fallocate is not used: it writes a byte to every block if
        // the file system does not support fallocate.
        int result;
        do result = ::fallocate(file_.get(), 0, 0, off_t(total));
        while (result != 0 && errno == EINTR);
        if (result != 0 && errno != EOPNOTSUPP && errno != EINVAL && errno != ENOSYS) fail(errno);
    }

    void write(const void *data, size_t bytes) override {
        const char *next = static_cast<const char *>(data);
        beginning_.append(next, std::min(bytes, kBeginning - beginning_.size()));
        while (bytes > 0) {
            const ssize_t written = ::write(file_.get(), next, bytes);
            if (written < 0 && errno == EINTR) continue;
            if (written <= 0) fail(written < 0 ? errno : EIO);
            next += written;
            bytes -= size_t(written);
        }
    }

    void flush() override {
        if (old_mode_ >= 0) (void)!::fchmod(file_.get(), mode_t(old_mode_)); // some file systems have no modes
        // No retry: after a failure the kernel has dropped the dirty pages, and a second fsync would report success.
        if (::fsync(file_.get()) != 0) fail(errno);
    }
    void commit() override {
        if (::renameat(directory_.get(), temporary_.c_str(), directory_.get(), name_.c_str()) != 0) fail(errno);
        temporary_.clear();
        if (::fstat(file_.get(), &own_) != 0) own_.st_ino = 0; // then is_in_place() knows nothing
        file_ = Fd(); // releases the lock, only now: sweep() must not find the temporary file unlocked
        // EINVAL: this file system does not flush directories.
        if (::fsync(directory_.get()) != 0 && errno != EINVAL)
            throw_io("saved, but may not survive a power loss:", path_, errno);
    }
    bool is_in_place() const override {
        struct stat found;
        if (own_.st_ino == 0) return true;
        if (::fstatat(directory_.get(), name_.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) return errno != ENOENT;
        return (found.st_dev == own_.st_dev && found.st_ino == own_.st_ino) || begins_as_written();
    }

private:
    /// For file systems that give a file another inode number in each lookup: reads the header, which names the rank.
    bool begins_as_written() const {
        const Fd file(::openat(directory_.get(), name_.c_str(), O_RDONLY | O_CLOEXEC));
        std::string text(beginning_.size(), 0);
        return !file || ::pread(file.get(), text.data(), text.size(), 0) != ssize_t(text.size()) || text == beginning_;
    }
    [[noreturn]] void fail(int error) const { throw_io("cannot save", path_, error); }

    /// Creates and locks the temporary file. Its mode is that of the target if the target exists, else 0666 less the
    /// umask, as for any output file. The lock shows that the writer is alive: unlike a pid, it is valid across
    /// containers and is not reused.
    void create() {
        const mode_t mode = old_mode_ < 0 ? 0666 : mode_t(old_mode_ | 0600);
        for (int attempt = 0; attempt < 1000; ++attempt) {
            std::string name =
                prefix_ + std::to_string(::getpid()) + "-" + std::to_string(temporary_counter++) + ".tmp";
            Fd file(::openat(directory_.get(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
            if (!file && (errno == EEXIST || errno == EINTR)) continue;
            if (!file) fail(errno);
            // Another process's sweep() may run between open and flock and remove the file. On other errors the file
            // system has no locks, so sweep() removes nothing.
            struct stat now;
            if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) continue;
            if (::fstat(file.get(), &now) == 0 && now.st_nlink == 0) continue;
            file_ = std::move(file);
            temporary_ = std::move(name); // a copy could throw and leave the file behind
            return;
        }
        fail(EEXIST);
    }

    /// Removes temporary files that killed savers of the same target left behind. Ignores failures: the next save tries
    /// again.
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
            // With a link count of 0 another sweep removed the file, and the name may already be a new saver's.
            if (S_ISREG(now.st_mode) && now.st_nlink > 0) ::unlinkat(directory_.get(), entry->d_name, 0);
        }
    }

    std::string path_, name_, prefix_, temporary_;
    Fd directory_, file_;
    struct stat own_ {};    // of the file in place
    std::string beginning_; // of its bytes
    static constexpr size_t kBeginning = size_t(64) << 10;
    int old_mode_ = -1;
};

class FileSource final : public Source {
public:
    FileSource(const char *path, bool keep_open) : path_(path) {
        Fd file = open(&opened_);
        if (S_ISDIR(opened_.st_mode)) throw_io("cannot load", path_, EISDIR);
        if (!S_ISREG(opened_.st_mode)) throw_io("cannot load", path_, "not a regular file");
        if (keep_open) file_ = std::move(file);
    }
    uint64_t size() const override { return uint64_t(opened_.st_size); }
    void read(uint64_t offset, void *data, size_t bytes) const override {
        if (bytes == 0) return;
        if (file_) return read(file_, offset, data, bytes);
        struct stat now;
        const Fd file = open(&now);
        if (now.st_dev != opened_.st_dev || now.st_ino != opened_.st_ino)
            throw_io("cannot read", path_, "the file was replaced");
        read(file, offset, data, bytes);
    }

private:
    Fd open(struct stat *now) const {
        // O_NONBLOCK: opening a FIFO must not wait for a writer.
        Fd file(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
        if (!file || ::fstat(file.get(), now) != 0) throw_io("cannot load", path_, errno);
        return file;
    }
    void read(const Fd &file, uint64_t offset, void *data, size_t bytes) const {
        char *next = static_cast<char *>(data);
        while (bytes > 0) {
            const ssize_t count = ::pread(file.get(), next, bytes, off_t(offset));
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) throw_io("cannot read", path_, errno);
            if (count == 0) throw_io("cannot read", path_, "the file became shorter");
            next += count;
            offset += uint64_t(count);
            bytes -= size_t(count);
        }
    }

    std::string path_;
    Fd file_; // closed between reads unless it is kept open
    struct stat opened_;
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
    void flush() override {}
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

} // namespace

std::unique_ptr<Sink> file_sink(const char *path) { return std::make_unique<FileSink>(path); }
std::unique_ptr<Source> file_source(const char *path, bool keep_open) {
    return std::make_unique<FileSource>(path, keep_open);
}
std::unique_ptr<Sink> callback_sink(const dsopt_io &io) { return std::make_unique<CallbackSink>(io); }
std::unique_ptr<Source> callback_source(const dsopt_io &io) { return std::make_unique<CallbackSource>(io); }

void check_io(const char *path, const dsopt_io &io, bool callback, uint32_t known) {
    if (io.flags & ~known)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_io.flags has flags that this function does not accept: 0x%x",
                    io.flags & ~known);
    if (io.reserved != 0) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_io.reserved is %u, must be 0", io.reserved);
    require_in(0, kMaxRanks, "dsopt_io.files", io.files);
    if (io.reserved2 != 0) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_io.reserved2 is %d, must be 0", io.reserved2);
    if (io.files == 0) {
        if (io.paths != nullptr || io.users != nullptr || io.totals != nullptr)
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_io.paths, users or totals without dsopt_io.files");
        if ((path == nullptr) != callback)
            throw Error(DSOPT_ERR_ARGUMENT,
                        callback ? "a path and a callback: which one?" : "neither a path nor a callback");
        return;
    }
    if (path != nullptr) throw Error(DSOPT_ERR_ARGUMENT, "a path and dsopt_io.files: which one?");
    if ((io.paths == nullptr) != callback || (io.users != nullptr) != callback || (io.totals != nullptr) != callback)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_io.files needs either paths, or read with users and totals");
    for (int32_t i = 0; i < io.files; ++i)
        if (io.paths != nullptr && io.paths[i] == nullptr)
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_io.paths[%d] is NULL", i);
}

} // namespace dsopt
