// SPDX-License-Identifier: Apache-2.0
// The power goes while a file is saved. What a save does to its folder is recorded, and every disk is made that may be
// found afterwards: changes that were not flushed are there or not in any combination, those of names and those of data,
// and a write is there in parts. The file loads on each of these disks and is the old or the new one; once the save
// has returned it is the new one. What the replay would say of a save that flushes less shows that it looks.
#include "support/harness.h"
#include "support/system_calls.h"
#include <cerrno>
#include <cstdio>
#include <set>

using namespace test;

LABEL_FILE(one_thread);

namespace {

using Files = std::map<std::string, std::string>; // contents by name

constexpr uint64_t kNone = 0, kAll = ~kNone, kHalf = 0xffffffff;

/// `reached` says which 64ths of a write are on the disk, in sectors; of a new size the lowest bit alone.
void apply(std::string &file, const DiskChange &change, uint64_t reached, char elsewhere) {
    constexpr size_t sector = 512;
    if (change.kind == DiskChange::resize) {
        if ((reached & 1) && change.offset > file.size()) file.resize(size_t(change.offset), elsewhere);
        return;
    }
    for (size_t begin = 0; begin < change.data.size(); begin += sector) {
        if (!(reached >> (begin * 64 / change.data.size()) & 1)) continue;
        const std::string piece = change.data.substr(begin, sector);
        const size_t at = size_t(change.offset) + begin;
        if (file.size() < at + piece.size()) file.resize(at + piece.size(), elsewhere);
        file.replace(at, piece.size(), piece);
    }
}

/// What a file may hold: each of the changes that were not flushed is there, is not, or is there in parts.
std::set<std::string> variants(const std::string &flushed, const std::vector<DiskChange> &pending) {
    constexpr size_t most = 6; // changes of which every combination is taken; of more, random ones
    constexpr int tries = 40;
    std::set<std::string> all;
    const auto add = [&](const auto &reached_of) {
        for (const char elsewhere : {'\0', '\xa5'}) { // what the disk has where nothing was written
            std::string file = flushed;
            for (size_t i = 0; i < pending.size(); ++i) apply(file, pending[i], reached_of(i), elsewhere);
            all.insert(std::move(file));
        }
    };
    Random random(11);
    if (pending.size() <= most)
        for (uint64_t mask = 0; mask < 1u << pending.size(); ++mask)
            add([&](size_t i) { return mask >> i & 1 ? kAll : kNone; });
    for (size_t torn = 0; torn < pending.size(); ++torn)
        for (const uint64_t part : {kNone, kAll, kHalf, ~kHalf, random.next(), random.next()}) {
            add([&](size_t i) { return i == torn ? part : kAll; }); // all the others reached the disk
            add([&](size_t i) { return i == torn ? part : i < torn ? kAll : kNone; }); // those before it did
        }
    for (int n = 0; n < tries && !pending.empty(); ++n) add([&](size_t) { return random.next(); });
    if (pending.empty()) all.insert(flushed);
    return all;
}

using Names = std::map<std::string, int>;

/// Every combination of changes of names: each happened or not, and a rename may have left the old name too.
std::set<Names> combinations(const Names &flushed, const std::vector<DiskChange> &pending) {
    std::set<Names> all = {flushed};
    for (const DiskChange &change : pending) {
        std::set<Names> next = all;
        for (Names names : all) {
            if (change.kind == DiskChange::unlink) {
                names.erase(change.name);
            } else {
                names[change.name] = change.file;
                next.insert(names);
                names.erase(change.from);
            }
            next.insert(names);
        }
        all = std::move(next);
    }
    return all;
}

/// Every disk after the first `count` changes.
std::set<Files> disks_after(const DiskRecord &record, size_t count) {
    Names names = record.names;
    std::map<int, std::string> contents = record.contents;
    std::vector<DiskChange> pending_names;
    std::map<int, std::vector<DiskChange>> pending_data;
    for (size_t i = 0; i < count; ++i) {
        const DiskChange &change = record.changes[i];
        switch (change.kind) {
        case DiskChange::create:
        case DiskChange::rename:
        case DiskChange::unlink: pending_names.push_back(change); break;
        case DiskChange::resize:
        case DiskChange::write: pending_data[change.file].push_back(change); break;
        case DiskChange::flush_file:
            for (const DiskChange &data : std::exchange(pending_data[change.file], {}))
                apply(contents[change.file], data, kAll, '\0');
            break;
        case DiskChange::flush_folder:
            for (const DiskChange &name : std::exchange(pending_names, {})) {
                if (name.kind == DiskChange::unlink) {
                    names.erase(name.name);
                } else {
                    names[name.name] = name.file;
                    names.erase(name.from);
                }
            }
        }
    }
    std::set<Files> all;
    for (const Names &found : combinations(names, pending_names)) {
        std::vector<Files> disks = {{}};
        std::set<int> files; // two names of one file have the same contents
        for (const auto &[name, file] : found) files.insert(file);
        for (const int file : files) {
            std::vector<Files> next;
            for (const std::string &held : variants(contents[file], pending_data[file]))
                for (Files disk : disks) {
                    for (const auto &[name, of] : found)
                        if (of == file) disk[name] = held;
                    next.push_back(std::move(disk));
                }
            disks = std::move(next);
        }
        all.insert(disks.begin(), disks.end());
    }
    return all;
}

const std::string kName = "run.safetensors";

/// What is left of a saver that was killed before its file was renamed.
void leave_a_temporary(const std::function<dsopt_status()> &save) {
    for (int at = 0; at < 100; ++at) {
        (void)with_fault(at, true, EIO, save);
        if (Faults::failed == std::string("fsync")) return;
    }
    throw std::runtime_error("a save without fsync");
}

enum Found { nothing, old_state, new_state, unreadable };

/// One save, recorded, and what is found after a power loss in the middle of it.
class PowerLoss : public testing::Test {
protected:
    dsopt_status save() { return dsopt_optimizer_save(trainer.opt(), (folder / kName).c_str(), nullptr); }
    void record_save(bool old_file, bool temporary) {
        trainer.train(1);
        if (old_file) must(save());
        if (temporary) leave_a_temporary([&] { return save(); });
        ASSERT_EQ(folder.entries(), size_t(old_file) + size_t(temporary));
        old = state_text(trainer.opt());
        trainer.train(2);
        DiskLog log(folder.path);
        must(save());
        record = log.record;
        fresh = state_text(trainer.opt());
        fresh_file = slurp(folder / kName);
    }
    /// Of the file alone: what else is on the disk does not matter to a load.
    Found load(const Files &disk) {
        const auto file = disk.find(kName);
        if (file == disk.end()) return nothing;
        const auto known = verdicts.find(file->second);
        if (known != verdicts.end()) return known->second;
        spill(found / kName, file->second);
        Found verdict = unreadable;
        if (dsopt_optimizer_load(reader.opt(), (found / kName).c_str(), nullptr) == DSOPT_OK) {
            const std::string state = state_text(reader.opt());
            verdict = state == old ? old_state : state == fresh ? new_state : unreadable;
        }
        std::filesystem::remove(found / kName);
        return verdicts[file->second] = verdict;
    }
    /// After so many changes.
    std::set<Found> after(size_t count) {
        std::set<Found> all;
        for (const Files &disk : disks_after(record, count)) all.insert(load(disk));
        return all;
    }
    std::set<Found> at_any_moment() {
        std::set<Found> all;
        for (size_t count = 0; count <= record.changes.size(); ++count) all.merge(after(count));
        return all;
    }
    size_t first(DiskChange::Kind kind) const {
        for (size_t i = 0; i < record.changes.size(); ++i)
            if (record.changes[i].kind == kind) return i;
        throw std::runtime_error("the save has no such change");
    }
    void drop(DiskChange::Kind kind) { record.changes.erase(record.changes.begin() + ptrdiff_t(first(kind))); }

    const Folder folder, found;
    const Trainer trainer = make_trainer(), reader = make_trainer();
    DiskRecord record;
    std::string old, fresh, fresh_file; // states, and the file with the new one

private:
    static Trainer make_trainer() {
        return {shapes_of({700, 0, 33}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16), make_group(DSOPT_ALGORITHM_ADAMW)};
    }
    std::map<std::string, Found> verdicts; // by contents
};

TEST_F(PowerLoss, AtAnyMomentOfASaveLeavesTheOldFileOrTheNewOne) {
    record_save(true, false);
    EXPECT_EQ(at_any_moment(), (std::set{old_state, new_state}));
    EXPECT_EQ(after(first(DiskChange::rename)), std::set{old_state});
    EXPECT_EQ(after(first(DiskChange::flush_folder)), (std::set{old_state, new_state}));
}

TEST_F(PowerLoss, AtAnyMomentOfTheFirstSaveLeavesNothingOrTheFile) {
    record_save(false, false);
    EXPECT_EQ(at_any_moment(), (std::set{nothing, new_state}));
}

TEST_F(PowerLoss, AfterASaveThatSucceededLeavesTheNewFile) {
    for (const bool old_file : {false, true}) {
        record_save(old_file, true);
        EXPECT_EQ(after(record.changes.size()), std::set{new_state});
        EXPECT_EQ(disks_after(record, record.changes.size()), std::set{(Files{{kName, fresh_file}})});
        std::filesystem::remove(folder / kName);
    }
}

// Also where the folder has what a saver left that was killed, and a power loss brings it back.
TEST_F(PowerLoss, TheNextSaveSucceedsAndRemovesWhatWasLeft) {
    record_save(true, true);
    std::map<std::set<std::string>, Files> by_names; // what else the disks have does not matter to a save
    size_t disks = 0;
    for (size_t count = 0; count <= record.changes.size(); ++count)
        for (const Files &disk : disks_after(record, count)) {
            ++disks;
            EXPECT_TRUE(load(disk) == old_state || load(disk) == new_state);
            std::set<std::string> names;
            for (const auto &[name, held] : disk) names.insert(name);
            by_names[names] = disk;
        }
    std::printf("%zu changes, %zu disks\n", record.changes.size(), disks);
    EXPECT_GE(by_names.size(), 4u); // with and without each of two temporaries
    for (const auto &[names, disk] : by_names) {
        const Folder again;
        for (const auto &[name, held] : disk) spill(again / name, held);
        EXPECT_OK(dsopt_optimizer_save(trainer.opt(), (again / kName).c_str(), nullptr));
        EXPECT_EQ(again.entries(), 1u);
        EXPECT_TRUE(same(slurp(again / kName), fresh_file));
    }
}

// What these tests would say of a save that flushed less, or too late.
TEST_F(PowerLoss, IsSeenToSpoilASaveThatDoesNotFlushTheFile) {
    record_save(true, false);
    drop(DiskChange::flush_file);
    EXPECT_TRUE(at_any_moment().contains(unreadable));
}
TEST_F(PowerLoss, IsSeenToSpoilASaveThatRenamesBeforeItFlushes) {
    record_save(true, false);
    std::swap(record.changes[first(DiskChange::flush_file)], record.changes[first(DiskChange::rename)]);
    EXPECT_TRUE(at_any_moment().contains(unreadable));
}
TEST_F(PowerLoss, IsSeenToUndoASaveThatDoesNotFlushTheFolder) {
    record_save(true, false);
    drop(DiskChange::flush_folder);
    EXPECT_EQ(after(record.changes.size()), (std::set{old_state, new_state}));
}
TEST_F(PowerLoss, IsSeenToSpoilASaveInPlace) {
    record_save(true, false);
    const int there = record.names.at(kName);
    std::vector<DiskChange> changes;
    for (DiskChange change : record.changes)
        if (change.kind == DiskChange::write) {
            change.file = there;
            changes.push_back(change);
        }
    record.changes = changes;
    EXPECT_TRUE(at_any_moment().contains(unreadable));
}

} // namespace
