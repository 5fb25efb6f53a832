// SPDX-License-Identifier: Apache-2.0
// Every system call of a save and of a load fails in turn, once or from then on. The call ends in a status or succeeds;
// the old file or the new one is there and loads; nothing else is left; and the same call succeeds afterwards.
#include "support/harness.h"
#include "support/system_calls.h"
#include <cerrno>
#include <filesystem>
#include <set>

using namespace test;

LABEL_FILE(one_thread);

namespace {

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
