// SPDX-License-Identifier: Apache-2.0
// Every system call of a save and of a load fails in turn, once or from then on. The call ends in a status or succeeds;
// the old file or the new one is there and loads; nothing else is left; and the same call succeeds afterwards. The
// functions here stand before those of the C library, for the shared library too.
#include "support/harness.h"
#include <cerrno>
#include <cstdarg>
#include <dlfcn.h>
#include <fcntl.h>
#include <filesystem>
#include <set>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

/// The calls of this thread while a save or a load is under way.
struct Faults {
    static inline thread_local bool armed = false;
    static inline thread_local int calls = 0, at = -1, error = 0;
    static inline thread_local bool lasting = false;
    static inline thread_local const char *failed = nullptr; // the name of the first one that failed
    static bool hit(const char *name) {
        if (!armed) return false;
        const int call = calls++;
        if (at < 0 || (lasting ? call < at : call != at)) return false;
        if (failed == nullptr) failed = name;
        errno = error;
        return true;
    }
};
template <class F> F next(const char *name) { return reinterpret_cast<F>(::dlsym(RTLD_NEXT, name)); }
mode_t mode_of(int flags, va_list list) { return flags & (O_CREAT | O_TMPFILE) ? mode_t(va_arg(list, int)) : 0; }

} // namespace

// The library is compiled with 64-bit offsets, so these are the names that it calls.
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
    return Faults::hit("openat") ? -1 : real(folder, path, flags, mode);
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
    return Faults::hit("fallocate") ? -1 : real(file, mode, offset, bytes);
}
ssize_t write(int file, const void *data, size_t bytes) {
    static const auto real = next<ssize_t (*)(int, const void *, size_t)>("write");
    return Faults::hit("write") ? -1 : real(file, data, bytes);
}
ssize_t pread64(int file, void *data, size_t bytes, off64_t offset) {
    static const auto real = next<ssize_t (*)(int, void *, size_t, off64_t)>("pread64");
    return Faults::hit("pread") ? -1 : real(file, data, bytes, offset);
}
int fchmod(int file, mode_t mode) noexcept {
    static const auto real = next<int (*)(int, mode_t)>("fchmod");
    return Faults::hit("fchmod") ? -1 : real(file, mode);
}
int fsync(int file) {
    static const auto real = next<int (*)(int)>("fsync");
    return Faults::hit("fsync") ? -1 : real(file);
}
int flock(int file, int what) noexcept {
    static const auto real = next<int (*)(int, int)>("flock");
    return Faults::hit("flock") ? -1 : real(file, what);
}
int renameat(int from_folder, const char *from, int to_folder, const char *to) noexcept {
    static const auto real = next<int (*)(int, const char *, int, const char *)>("renameat");
    return Faults::hit("renameat") ? -1 : real(from_folder, from, to_folder, to);
}
int unlinkat(int folder, const char *path, int flags) noexcept {
    static const auto real = next<int (*)(int, const char *, int)>("unlinkat");
    return Faults::hit("unlinkat") ? -1 : real(folder, path, flags);
}
}

using namespace test;

namespace {

/// `at` -1: none fails, and they are counted.
template <class F> dsopt_status with_fault(int at, bool lasting, int error, const F &call) {
    Faults::calls = 0;
    Faults::at = at;
    Faults::lasting = lasting;
    Faults::error = error;
    Faults::failed = nullptr;
    Faults::armed = true;
    const dsopt_status status = call();
    Faults::armed = false;
    return status;
}

Trainer make_trainer() {
    return {shapes_of({3000, 0, 33}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16), make_group(DSOPT_ALGORITHM_ADAMW)};
}

class SystemCalls : public testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Errors, SystemCalls,
                         testing::Combine(testing::Values(EIO, ENOSPC, EACCES, EMFILE), testing::Bool()));

TEST_P(SystemCalls, OfASaveFailInTurnAndTheOldFileOrTheNewOneIsThere) {
    const auto [error, lasting] = GetParam();
    const Folder folder;
    const Trainer trainer = make_trainer(), reader = make_trainer();
    std::filesystem::create_directory(folder / "disk");
    std::filesystem::create_symlink("disk/file", folder / "link");
    const std::string file = folder / "disk/file", link = folder / "link";
    const auto save = [&] { return dsopt_optimizer_save(trainer.opt(), link.c_str(), nullptr); };
    const auto temporaries = [&] {
        return std::distance(std::filesystem::directory_iterator(folder / "disk"), {}) - 1;
    };
    trainer.train(1);
    ASSERT_OK(save());
    const std::string old = slurp(file);
    trainer.train(2);
    ASSERT_OK(with_fault(-1, false, 0, save));
    const int total = Faults::calls;
    const std::string fresh = slurp(file);
    ASSERT_NE(old, fresh);
    ASSERT_GT(total, 12);
    std::set<std::string> seen;
    int refused_saves = 0;
    for (int n = 0; n < total; ++n) {
        SCOPED_TRACE("call " + std::to_string(n));
        spill(file, old);
        const dsopt_status status = with_fault(n, lasting, error, save);
        const std::string text = dsopt_last_error(), now = slurp(file);
        ASSERT_NE(Faults::failed, nullptr);
        seen.insert(Faults::failed);
        if (status == DSOPT_OK) {
            EXPECT_TRUE(same(now, fresh)) << Faults::failed;
        } else {
            ++refused_saves;
            EXPECT_EQ(status, DSOPT_ERR_IO) << text;
            const bool behind = text.find("saved, but may not survive") != std::string::npos; // the folder's flush
            EXPECT_TRUE(same(now, behind ? fresh : old)) << text;
        }
        // A temporary that cannot be removed is what the next save finds.
        if (!lasting && Faults::failed != std::string("unlinkat")) { EXPECT_EQ(temporaries(), 0) << Faults::failed; }
        EXPECT_OK(dsopt_optimizer_load(reader.opt(), file.c_str(), nullptr));
        ASSERT_OK(save()) << "after " << Faults::failed;
        EXPECT_TRUE(same(slurp(file), fresh));
        EXPECT_EQ(temporaries(), 0) << Faults::failed;
    }
    for (const char *name : {"open", "openat", "stat", "fstat", "fstatat", "readlinkat", "fallocate", "write", "fchmod",
                             "fsync", "flock", "renameat"})
        EXPECT_TRUE(seen.contains(name)) << name;
    EXPECT_GT(refused_saves, 6);
}

TEST_P(SystemCalls, OfALoadFailInTurnAndNothingChanges) {
    const auto [error, lasting] = GetParam();
    const Folder folder;
    const std::string file = folder / "file";
    const Trainer trainer = make_trainer();
    trainer.train(1);
    ASSERT_OK(dsopt_optimizer_save(trainer.opt(), file.c_str(), nullptr));
    const std::string saved = state_text(trainer.opt());
    const auto load = [&] { return dsopt_optimizer_load(trainer.opt(), file.c_str(), nullptr); };
    ASSERT_OK(with_fault(-1, false, 0, load));
    const int total = Faults::calls;
    ASSERT_GT(total, 5);
    for (int n = 0; n < total; ++n) {
        trainer.train(uint64_t(n + 2));
        const std::string before = trainer.text() + hyper_text(trainer.opt());
        EXPECT_TRUE(refused(with_fault(n, lasting, error, load), DSOPT_ERR_IO)) << Faults::failed;
        EXPECT_TRUE(same(trainer.text() + hyper_text(trainer.opt()), before)) << Faults::failed;
        ASSERT_OK(load());
        EXPECT_TRUE(same(state_text(trainer.opt()), saved));
    }
}

// What a signal interrupts is tried again, wherever that can happen while data move.
TEST(SystemCallsInterrupted, AreTriedAgain) {
    const Folder folder;
    const std::string file = folder / "file";
    const Trainer trainer = make_trainer();
    trainer.train(1);
    const auto save = [&] { return dsopt_optimizer_save(trainer.opt(), file.c_str(), nullptr); };
    const auto load = [&] { return dsopt_optimizer_load(trainer.opt(), file.c_str(), nullptr); };
    for (const auto &call : {std::function<dsopt_status()>(save), std::function<dsopt_status()>(load)}) {
        ASSERT_OK(with_fault(-1, false, 0, call));
        const int total = Faults::calls;
        for (int n = 0; n < total; ++n) {
            const dsopt_status status = with_fault(n, false, EINTR, call);
            const std::string name = Faults::failed;
            if (name == "write" || name == "pread" || name == "fallocate") {
                EXPECT_EQ(status, DSOPT_OK) << name << ": " << dsopt_last_error();
            } else {
                EXPECT_TRUE(status == DSOPT_OK || status == DSOPT_ERR_IO) << name << ": " << dsopt_last_error();
            }
            ASSERT_OK(call());
        }
    }
}

} // namespace
