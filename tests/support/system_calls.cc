// SPDX-License-Identifier: Apache-2.0
#include "system_calls.h"
#include "file.h"
#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <dlfcn.h>
#include <fcntl.h>
#include <filesystem>
#include <stdexcept>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

template <class F> F next(const char *name) { return reinterpret_cast<F>(::dlsym(RTLD_NEXT, name)); }
mode_t mode_of(int flags, va_list list) { return flags & (O_CREAT | O_TMPFILE) ? mode_t(va_arg(list, int)) : 0; }
/// Bypasses the fault injection.
struct stat64 information(int descriptor) {
    static const auto real = next<int (*)(int, struct stat64 *)>("fstat64");
    struct stat64 now {};
    if (real(descriptor, &now) != 0) throw std::runtime_error("the descriptor has no file");
    return now;
}
thread_local test::DiskLog *current_log = nullptr;

} // namespace

namespace test {

bool Faults::hit(const char *name) {
    if (!armed) return false;
    const int call = calls++;
    if (failing_call < 0 || (lasting ? call < failing_call : call != failing_call)) return false;
    if (failed == nullptr) failed = name;
    errno = error;
    return true;
}

DiskLog::DiskLog(const std::string &folder) {
    struct stat now;
    if (::stat(folder.c_str(), &now) != 0) throw std::runtime_error("no folder " + folder);
    folder_ = now.st_ino;
    for (const auto &entry : std::filesystem::directory_iterator(folder)) {
        if (::stat(entry.path().c_str(), &now) != 0)
            throw std::runtime_error("a file of the folder does not exist any more");
        record.contents[next_] = read_file(entry.path());
        files_[now.st_ino] = names_[entry.path().filename()] = next_++;
    }
    record.names = names_;
    current_log = this;
}
DiskLog::~DiskLog() { current_log = nullptr; }
DiskLog *DiskLog::current() { return current_log; }

void DiskLog::expect_folder(int descriptor) const {
    if (information(descriptor).st_ino != folder_) throw std::runtime_error("the folder is not that of the log");
}
void DiskLog::created(int descriptor, int folder, const char *name) {
    expect_folder(folder);
    const int file = files_[information(descriptor).st_ino] = names_[name] = next_++;
    add({.kind = DiskChange::create, .file = file, .name = name});
}
void DiskLog::renamed(int folder, const char *from, const char *to) {
    expect_folder(folder);
    const int file = names_[to] = names_.at(from);
    names_.erase(from);
    add({.kind = DiskChange::rename, .file = file, .name = to, .from = from});
}
void DiskLog::unlinked(int folder, const char *name) {
    expect_folder(folder);
    add({.kind = DiskChange::unlink, .file = names_.at(name), .name = name});
    names_.erase(name);
}
void DiskLog::flushed(int descriptor) {
    const struct stat64 now = information(descriptor);
    if (S_ISDIR(now.st_mode)) {
        expect_folder(descriptor);
        add({.kind = DiskChange::flush_folder});
    } else {
        add({.kind = DiskChange::flush_file, .file = files_.at(now.st_ino)});
    }
}
void DiskLog::resized(int descriptor, uint64_t bytes) {
    add({.kind = DiskChange::resize, .file = files_.at(information(descriptor).st_ino), .offset = bytes});
}
void DiskLog::written(int descriptor, const void *data, size_t bytes) {
    const off_t end = ::lseek(descriptor, 0, SEEK_CUR);
    if (end < off_t(bytes)) throw std::runtime_error("the offset of the file is less than the bytes written");
    add({.kind = DiskChange::write,
         .file = files_.at(information(descriptor).st_ino),
         .offset = uint64_t(end) - bytes,
         .data = std::string(static_cast<const char *>(data), bytes)});
}

} // namespace test

using test::DiskLog;
using test::Faults;

// The library is compiled with 64-bit offsets, so it calls these names.
extern "C" {
int open64(const char *path, int flags, ...) {
    static const auto real = next<int (*)(const char *, int, ...)>("open64");
    va_list list;
    va_start(list, flags);
    const mode_t mode = mode_of(flags, list);
    va_end(list);
    return Faults::hit("open") ? -1 : real(path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    static const auto real = next<int (*)(int, const char *, int, ...)>("openat64");
    va_list list;
    va_start(list, flags);
    const mode_t mode = mode_of(flags, list);
    va_end(list);
    if (Faults::hit("openat")) return -1;
    const int file = real(folder, path, flags, mode);
    if (DiskLog *log = DiskLog::current(); log && file >= 0 && (flags & O_CREAT)) log->created(file, folder, path);
    return file;
}
int stat64(const char *path, struct stat64 *now) noexcept {
    static const auto real = next<int (*)(const char *, struct stat64 *)>("stat64");
    return Faults::hit("stat") ? -1 : real(path, now);
}
int fstat64(int file, struct stat64 *now) noexcept {
    static const auto real = next<int (*)(int, struct stat64 *)>("fstat64");
    return Faults::hit("fstat") ? -1 : real(file, now);
}
int fstatat64(int folder, const char *path, struct stat64 *now, int flags) noexcept {
    static const auto real = next<int (*)(int, const char *, struct stat64 *, int)>("fstatat64");
    return Faults::hit("fstatat") ? -1 : real(folder, path, now, flags);
}
ssize_t readlinkat(int folder, const char *path, char *text, size_t bytes) noexcept {
    static const auto real = next<ssize_t (*)(int, const char *, char *, size_t)>("readlinkat");
    return Faults::hit("readlinkat") ? -1 : real(folder, path, text, bytes);
}
int fallocate64(int file, int mode, off64_t offset, off64_t bytes) {
    static const auto real = next<int (*)(int, int, off64_t, off64_t)>("fallocate64");
    if (Faults::hit("fallocate")) return -1;
    const int result = real(file, mode, offset, bytes);
    if (DiskLog *log = DiskLog::current(); log && result == 0) log->resized(file, uint64_t(offset + bytes));
    return result;
}
ssize_t write(int file, const void *data, size_t bytes) {
    static const auto real = next<ssize_t (*)(int, const void *, size_t)>("write");
    if (Faults::hit("write")) return -1;
    const ssize_t written = real(file, data, std::min(bytes, Faults::longest));
    if (DiskLog *log = DiskLog::current(); log && written > 0) log->written(file, data, size_t(written));
    return written;
}
ssize_t pread64(int file, void *data, size_t bytes, off64_t offset) {
    static const auto real = next<ssize_t (*)(int, void *, size_t, off64_t)>("pread64");
    return Faults::hit("pread") ? -1 : real(file, data, std::min(bytes, Faults::longest), offset);
}
int fchmod(int file, mode_t mode) noexcept {
    static const auto real = next<int (*)(int, mode_t)>("fchmod");
    return Faults::hit("fchmod") ? -1 : real(file, mode);
}
int fsync(int file) {
    static const auto real = next<int (*)(int)>("fsync");
    if (Faults::hit("fsync")) return -1;
    const int result = real(file);
    if (DiskLog *log = DiskLog::current(); log && result == 0) log->flushed(file);
    return result;
}
int flock(int file, int what) noexcept {
    static const auto real = next<int (*)(int, int)>("flock");
    return Faults::hit("flock") ? -1 : real(file, what);
}
int renameat(int from_folder, const char *from, int to_folder, const char *to) noexcept {
    static const auto real = next<int (*)(int, const char *, int, const char *)>("renameat");
    if (Faults::hit("renameat")) return -1;
    const int result = real(from_folder, from, to_folder, to);
    if (DiskLog *log = DiskLog::current(); log && result == 0) log->renamed(to_folder, from, to);
    return result;
}
int unlinkat(int folder, const char *path, int flags) noexcept {
    static const auto real = next<int (*)(int, const char *, int)>("unlinkat");
    if (Faults::hit("unlinkat")) return -1;
    const int result = real(folder, path, flags);
    if (DiskLog *log = DiskLog::current(); log && result == 0) log->unlinked(folder, path);
    return result;
}
}
