// SPDX-License-Identifier: Apache-2.0
// Checkpoints on disk: a save replaces the file atomically, despite kills, full disks and concurrent saves.
#include "support/fork.h"
#include "support/safetensors.h"
#include <chrono>
#include <csignal>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

using namespace test;

LABEL_FILE(one_thread);

namespace checkpoint_safetensors_files_tests {

ReadOutcome save_outcome(const std::string &path, const Container &content = small()) {
    return outcome([&] { save(path, content); });
}
ReadOutcome load_outcome(const std::string &path) {
    return outcome([&] { load_all(file_source(path.c_str())); });
}
void expect_io(const ReadOutcome &result, const std::string &reason) {
    EXPECT_EQ(result.status, DSOPT_ERR_IO) << result.text;
    EXPECT_NE(result.text.find(reason), std::string::npos) << result.text;
}

TEST(SafetensorsFile, ReportsIoErrorForInvalidPaths) {
    const Folder folder;
    fs::create_directory(folder / "directory");
    ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
    std::string dots = folder.path.string();
    while (dots.size() < 4090) dots += "/."; // the length of the directory is legal, that of the path is not
    for (const auto &[path, saved, loaded] : std::initializer_list<std::tuple<std::string, std::string, std::string>>{
             {folder / "directory", "Is a directory", "Is a directory"},
             {folder / "directory/", "Is a directory", "Is a directory"},
             {folder / "directory/..", "Is a directory", "Is a directory"},
             {folder / "fifo", "not a regular file", "not a regular file"},
             {folder / "missing/file", "No such file", "No such file"},
             {"", "No such file", "No such file"},
             {folder / std::string(4096, 'n'), "name too long", "name too long"},
             {folder / std::string(256, 'n'), "name too long", "name too long"},
             {dots + "/abcdef", "name too long", "name too long"}}) {
        expect_io(save_outcome(path), saved);
        expect_io(load_outcome(path), loaded);
    }
    EXPECT_EQ(folder.entries(), 2u);
}

TEST(SafetensorsFile, AcceptsNameOfMaximumLength) {
    const Folder folder;
    const std::string path = folder / std::string(255, 'n');
    EXPECT_EQ(save_outcome(path).text, "");
    EXPECT_EQ(load_outcome(path).text, "");
}

TEST(SafetensorsFile, ResolvesBareNameInCurrentDirectory) {
    const Folder folder;
    const fs::path before = fs::current_path();
    fs::current_path(folder.path);
    const ReadOutcome saved = save_outcome("plain"), loaded = load_outcome("plain");
    fs::current_path(before);
    EXPECT_EQ(saved.text + loaded.text, "");
    EXPECT_EQ(folder.entries(), 1u);
}

TEST(SafetensorsFile, ReportsIoErrorForReadOnlyDirectory) {
    if (::geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
    const Folder folder;
    fs::permissions(folder.path, fs::perms::owner_read | fs::perms::owner_exec);
    expect_io(save_outcome(folder / "a"), "Permission denied");
    fs::permissions(folder.path, fs::perms::owner_all);
}

TEST(SafetensorsFile, TakesModeFromUmaskOrExistingFile) {
    const Folder folder;
    const mode_t before = ::umask(027);
    save(folder / "a", small());
    ::umask(0);
    struct stat now;
    ::stat((folder / "a").c_str(), &now);
    EXPECT_EQ(now.st_mode & 0777, 0640u);
    ::chmod((folder / "a").c_str(), 0400);
    save(folder / "a", small());
    ::umask(before);
    ::stat((folder / "a").c_str(), &now);
    EXPECT_EQ(now.st_mode & 0777, 0400u);
}

// In a folder like /tmp, a symbolic link of another user must not determine which file this process replaces. The
// kernel refuses to follow it only if fs.protected_symlinks is set, and does not check a name read with readlink.
TEST(SafetensorsFile, DoesNotFollowForeignSymlinkInStickyFolder) {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can create links of another user";
    constexpr uid_t stranger = 65534;
    const Folder folder;
    write_file(folder / "target", "unchanged");
    for (const bool sticky : {true, false})
        for (const uid_t link_owner : {uid_t(0), stranger})
            for (const uid_t folder_owner : {uid_t(0), stranger}) {
                const std::string shared = folder / ("shared" + std::to_string(sticky) + std::to_string(link_owner) +
                                                     std::to_string(folder_owner));
                fs::create_directory(shared);
                ASSERT_EQ(::chown(shared.c_str(), folder_owner, gid_t(folder_owner)), 0);
                ASSERT_EQ(::chmod(shared.c_str(), sticky ? 01777 : 0755), 0);
                const std::string link = shared + "/run.safetensors";
                fs::create_symlink(folder / "target", link);
                ASSERT_EQ(::lchown(link.c_str(), link_owner, gid_t(link_owner)), 0);
                const ReadOutcome saved = save_outcome(link);
                const bool foreign = sticky && link_owner == stranger && folder_owner != stranger;
                if (foreign) {
                    expect_io(saved, "another user");
                    EXPECT_EQ(read_file(folder / "target"), "unchanged");
                } else {
                    EXPECT_EQ(saved.text, "");
                    EXPECT_EQ(load_outcome(folder / "target").text, "");
                    write_file(folder / "target", "unchanged");
                }
                EXPECT_TRUE(fs::is_symlink(link));
            }
}

// The same checks as another user than root: a link of that user and a link of a third one.
TEST(SafetensorsFile, FollowsOnlyOwnSymlinkInStickyFolder) {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can change its user";
    constexpr uid_t user = 65534, other = 65533;
    const Folder folder;
    const std::string shared = folder / "shared", own = folder / "own";
    for (const std::string &path : {shared, own}) fs::create_directory(path);
    ASSERT_EQ(::chmod(folder.path.c_str(), 0755), 0);
    ASSERT_EQ(::chmod(shared.c_str(), 01777), 0);
    ASSERT_EQ(::chown(own.c_str(), user, user), 0);
    for (const uid_t owner : {user, other}) {
        const std::string link = shared + "/" + std::to_string(owner);
        fs::create_symlink(own + "/file", link);
        ASSERT_EQ(::lchown(link.c_str(), owner, owner), 0);
        EXPECT_TRUE(passes_in_child([&](const auto &expect) {
            expect(::setgid(user) == 0 && ::setuid(user) == 0);
            expect((save_outcome(link).status == DSOPT_OK) == (owner == user));
        }));
        EXPECT_EQ(fs::exists(own + "/file"), owner == user);
        fs::remove(own + "/file");
    }
}

TEST(SafetensorsFile, ReplacesTargetOfSymlink) {
    const Folder folder;
    fs::create_directory(folder / "disk");
    fs::create_symlink("disk/file", folder / "relative"); // dangling at first
    fs::create_symlink(folder / "relative", folder / "absolute");
    fs::create_symlink("loop", folder / "loop");
    EXPECT_EQ(save_outcome(folder / "absolute").text, "");
    EXPECT_EQ(save_outcome(folder / "relative").text, "");
    EXPECT_TRUE(fs::is_symlink(folder / "absolute"));
    EXPECT_TRUE(fs::is_symlink(folder / "relative"));
    EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(folder / "disk/file")));
    EXPECT_EQ(load_outcome(folder / "absolute").text, "");
    expect_io(save_outcome(folder / "loop"), "symbolic links");
}

TEST(SafetensorsFile, ReplacesFileWhileItIsRead) {
    const Folder folder;
    save(folder / "a", small());
    const SafetensorsReader reader(file_source((folder / "a").c_str()));
    Container other = small();
    other.metadata = {};
    save(folder / "a", other);
    expect_same(reader, small());
    expect_same(SafetensorsReader(file_source((folder / "a").c_str())), other);
}

TEST(SafetensorsFile, ReportsIoErrorForTruncationDuringRead) {
    const Folder folder;
    save(folder / "a", small());
    const SafetensorsReader reader(file_source((folder / "a").c_str()));
    fs::resize_file(folder / "a", fs::file_size(folder / "a") - 1);
    expect_io(outcome([&] { reader.verify(reader.find("b.exp_avg")); }), "shorter");
}

TEST(SafetensorsFile, AllowsTwoConcurrentSavesToOneName) {
    const Folder folder;
    const Container content = small();
    Container other = small();
    other.metadata = {};
    const auto slow = file_sink((folder / "a").c_str());
    bool first = true;
    write_safetensors(*slow, content.metadata, content.tensors,
                      [&](size_t index, uint64_t offset, size_t) -> const void * {
                          if (std::exchange(first, false))
                              save(folder / "a", other); // must not remove the temporary of `slow`
                          return content.bytes[index].data() + offset;
                      });
    expect_same(SafetensorsReader(file_source((folder / "a").c_str())), content);
    EXPECT_EQ(folder.entries(), 1u);
}

TEST(SafetensorsFile, RemovesTemporaryOfUncommittedSink) {
    const Folder folder;
    save(folder / "a", small());
    const std::string before = read_file(folder / "a");
    {
        const auto sink = file_sink((folder / "a").c_str());
        sink->begin(1000);
        sink->write("half", 4);
        EXPECT_EQ(folder.entries(), 2u);
    }
    EXPECT_EQ(folder.entries(), 1u);
    EXPECT_EQ(read_file(folder / "a"), before);
}

/// Limits the size of files that the process may write. A longer write is an error and raises no signal.
struct FileSizeLimit {
    explicit FileSizeLimit(rlim_t bytes) {
        handler = std::signal(SIGXFSZ, SIG_IGN);
        ::getrlimit(RLIMIT_FSIZE, &before);
        set(bytes);
    }
    ~FileSizeLimit() {
        ::setrlimit(RLIMIT_FSIZE, &before);
        std::signal(SIGXFSZ, handler);
    }
    void set(rlim_t bytes) const {
        const rlimit limit{bytes, before.rlim_max};
        ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    rlimit before;
    void (*handler)(int);
};

TEST(SafetensorsFile, KeepsOldFileIfDiskIsFull) {
    const Folder folder;
    save(folder / "a", small());
    const std::string before = read_file(folder / "a");
    Container large;
    large.add("large", DSOPT_DTYPE_U8, {3'000'000}, 3'000'000);
    const auto not_called = [](size_t, uint64_t, size_t) -> const void * { throw std::logic_error("too late"); };
    const ReadOutcome early = outcome([&] {
        const FileSizeLimit limit(100'000);
        write_safetensors(*file_sink((folder / "a").c_str()), {}, large.tensors, not_called);
    });
    expect_io(early, "File too large");
    EXPECT_NE(early.text.find(folder / "a"), std::string::npos) << early.text;
    // The limit applies only after part of the data is written: the first write is short, and the next one fails.
    const ReadOutcome late = outcome([&] {
        const FileSizeLimit limit(RLIM_INFINITY);
        int requests = 0;
        write_safetensors(*file_sink((folder / "a").c_str()), {}, large.tensors,
                          [&](size_t index, uint64_t offset, size_t) {
                              if (++requests == 2) limit.set(2'000'000);
                              return static_cast<const void *>(large.bytes[index].data() + offset);
                          });
    });
    expect_io(late, "File too large");
    EXPECT_EQ(read_file(folder / "a"), before);
    EXPECT_EQ(folder.entries(), 1u);
}

// ---- crashes ----

/// Returns content that depends on the step, so that a mixture of two steps is detected.
Container content_of_step(uint64_t step) {
    Container content;
    content.metadata = {{"step", std::to_string(step)}};
    for (const char *name : {"exp_avg", "exp_avg_sq"}) {
        std::mt19937_64 random(step + content.tensors.size());
        std::string data(64 << 10, '\0');
        for (size_t i = 0; i < data.size(); i += 8) {
            const uint64_t value = random();
            std::memcpy(&data[i], &value, 8);
        }
        content.tensors.push_back({name, DSOPT_DTYPE_F32, {int64_t(data.size() / 4)}, data.size()});
        content.bytes.push_back(std::move(data));
    }
    return content;
}

TEST(SafetensorsFile, SurvivesKillAtAnyMoment) {
    const Folder folder;
    const std::string path = folder / "state.safetensors";
    save(path, content_of_step(1));
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 5; ++i) save(path, content_of_step(1));
    const auto five_saves =
        std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start);
    std::mt19937 random(7);
    uint64_t last = 1;
    size_t interrupted = 0; // in the middle of a save
    int kill = 0;
    for (; kill < (kSanitized ? 40 : 200); ++kill) {
        int pipe[2];
        ASSERT_EQ(::pipe(pipe), 0);
        const pid_t child = ::fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
            for (uint64_t step = last + 1;; ++step) {
                if (save_outcome(path, content_of_step(step)).status != DSOPT_OK) ::_exit(1);
                if (::write(pipe[1], &step, sizeof step) != sizeof step) ::_exit(1);
            }
        }
        ::close(pipe[1]);
        uint64_t acknowledged = last, step;
        if (kill % 2 && ::read(pipe[0], &step, sizeof step) == sizeof step) acknowledged = step; // in the second save
        ::usleep(useconds_t(random() % uint64_t(five_saves.count() / 4 + 1)));
        ::kill(child, SIGKILL);
        int status = 0;
        ::waitpid(child, &status, 0);
        EXPECT_TRUE(WIFSIGNALED(status)) << "a save failed";
        while (::read(pipe[0], &step, sizeof step) == sizeof step) acknowledged = step;
        ::close(pipe[0]);
        EXPECT_LE(folder.entries(), 2u); // more would mean that the next save leaves temporaries
        interrupted += folder.entries() - 1;
        const SafetensorsReader reader(file_source(path.c_str()));
        last = std::stoull(reader.metadata().at("step"));
        EXPECT_GE(last, acknowledged);
        expect_same(reader, content_of_step(last));
    }
    EXPECT_GT(last, 1u);
    EXPECT_GT(interrupted, 0u);
    std::printf("%d kills, %zu of them in the middle of a save, step %s\n", kill, interrupted,
                std::to_string(last).c_str());
    save(path, content_of_step(last));
    EXPECT_EQ(folder.entries(), 1u);
}

TEST(SafetensorsFile, RemovesStaleTemporariesOfSameTargetOnly) {
    const Folder folder;
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        for (const char *target : {"a", "a", "b"}) {
            auto sink = file_sink((folder / target).c_str());
            sink->begin(100'000);
            (void)sink.release(); // leaks the sink, so that its destructor does not remove the temporary
        }
        ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_EQ(folder.entries(), 3u);
    write_file(folder / ".dsopt-notes.tmp", "a file of the user");
    save(folder / "a", small());
    EXPECT_EQ(folder.entries(), 3u); // "a", the temporary of "b", the file of the user
    save(folder / "b", small());
    EXPECT_EQ(folder.entries(), 3u);
    EXPECT_EQ(read_file(folder / ".dsopt-notes.tmp"), "a file of the user");
}

} // namespace checkpoint_safetensors_files_tests
