// SPDX-License-Identifier: Apache-2.0
// Each system call of a save and of a load fails, one per run: either only that call or also all later ones. The save
// or load returns an error or succeeds. The old or the new file exists and loads, no other file is left, and the same
// call succeeds afterwards.
#include "support/harness.h"
#include "support/system_calls.h"
#include <cerrno>
#include <filesystem>
#include <set>

using namespace test;

LABEL_FILE(one_thread);

namespace checkpoint_faults_tests {

Trainer make_trainer() {
    return {shapes_of({3000, 0, 33}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16), make_group(DSOPT_ALGORITHM_ADAMW)};
}

class SystemCallFault : public testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Errors, SystemCallFault,
                         testing::Combine(testing::Values(EIO, ENOSPC, EACCES, EMFILE), testing::Bool()));

TEST_P(SystemCallFault, SaveLeavesOldOrNewFile) {
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
    const std::string old = read_file(file);
    trainer.train(2);
    ASSERT_OK(with_fault(-1, false, 0, save));
    const int total = Faults::calls;
    const std::string new_text = read_file(file);
    ASSERT_NE(old, new_text);
    ASSERT_GT(total, 12);
    std::set<std::string> seen;
    int refused_saves = 0;
    for (int n = 0; n < total; ++n) {
        SCOPED_TRACE("call " + std::to_string(n));
        write_file(file, old);
        const dsopt_status status = with_fault(n, lasting, error, save);
        const std::string text = dsopt_last_error(), now = read_file(file);
        ASSERT_NE(Faults::failed, nullptr);
        seen.insert(Faults::failed);
        if (status == DSOPT_OK) {
            EXPECT_TRUE(same(now, new_text)) << Faults::failed;
        } else {
            ++refused_saves;
            EXPECT_EQ(status, DSOPT_ERR_IO) << text;
            // The flush of the folder comes after the rename.
            const bool renamed = text.find("saved, but may not survive") != std::string::npos;
            EXPECT_TRUE(same(now, renamed ? new_text : old)) << text;
        }
        // A temporary that could not be removed is left for the next save.
        if (!lasting && Faults::failed != std::string("unlinkat")) { EXPECT_EQ(temporaries(), 0) << Faults::failed; }
        EXPECT_OK(dsopt_optimizer_load(reader.opt(), file.c_str(), nullptr));
        ASSERT_OK(save()) << "after " << Faults::failed;
        EXPECT_TRUE(same(read_file(file), new_text));
        EXPECT_EQ(temporaries(), 0) << Faults::failed;
    }
    for (const char *name : {"open", "openat", "stat", "fstat", "fstatat", "readlinkat", "fallocate", "write", "fchmod",
                             "fsync", "flock", "renameat"})
        EXPECT_TRUE(seen.contains(name)) << name;
    EXPECT_GT(refused_saves, 6);
}

TEST_P(SystemCallFault, LoadReturnsErrorAndChangesNothing) {
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

// A signal can interrupt write, pread and fallocate while they work on data; the library must retry them.
TEST(InterruptedSystemCall, IsRetried) {
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

// A signal, or the limit of 2 GiB per call, can end write and pread after a part of the bytes.
TEST(PartialTransfer, IsContinued) {
    const Folder folder;
    const std::string file = folder / "file";
    const Trainer trainer = make_trainer();
    trainer.train(1);
    ASSERT_OK(dsopt_optimizer_save(trainer.opt(), file.c_str(), nullptr));
    const std::string whole = read_file(file), saved = state_text(trainer.opt());
    Faults::longest = 1000;
    const dsopt_status save = dsopt_optimizer_save(trainer.opt(), file.c_str(), nullptr);
    Faults::longest = SIZE_MAX;
    ASSERT_OK(save);
    EXPECT_TRUE(same(read_file(file), whole));
    trainer.train(2);
    Faults::longest = 1000;
    const dsopt_status load = dsopt_optimizer_load(trainer.opt(), file.c_str(), nullptr);
    Faults::longest = SIZE_MAX;
    ASSERT_OK(load);
    EXPECT_TRUE(same(state_text(trainer.opt()), saved));
}

} // namespace checkpoint_faults_tests
