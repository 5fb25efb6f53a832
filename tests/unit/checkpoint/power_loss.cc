// SPDX-License-Identifier: Apache-2.0
// Power loss during a save. The tests record the changes that a save makes to its folder, and enumerate every disk that
// a power loss can leave: any subset of the unflushed changes of names and of data, with any write torn. On each of
// these disks the file loads and is the old or the new one. After the save has returned, it is the new one. The last
// four tests replay saves that flush too little or too late, and show that the enumeration detects them.
#include "support/harness.h"
#include "support/system_calls.h"
#include <cerrno>
#include <cstdio>
#include <set>

using namespace test;

LABEL_FILE(one_thread);

namespace checkpoint_power_loss_tests {

using Files = std::map<std::string, std::string>; // contents by name

constexpr uint64_t kNone = 0, kAll = ~kNone, kHalf = 0xffffffff;

/// Applies a change of data. Bit i of `reached`: the i-th 64th of a write, in whole sectors, is on the disk. For a
/// resize only bit 0 counts. `unwritten` fills bytes that were never written.
void apply(std::string &file, const DiskChange &change, uint64_t reached, char unwritten) {
    constexpr size_t sector = 512;
    if (change.kind == DiskChange::resize) {
        if ((reached & 1) && change.offset > file.size()) file.resize(size_t(change.offset), unwritten);
        return;
    }
    for (size_t begin = 0; begin < change.data.size(); begin += sector) {
        if (!(reached >> (begin * 64 / change.data.size()) & 1)) continue;
        const std::string piece = change.data.substr(begin, sector);
        const size_t offset = size_t(change.offset) + begin;
        if (file.size() < offset + piece.size()) file.resize(offset + piece.size(), unwritten);
        file.replace(offset, piece.size(), piece);
    }
}

/// Returns the possible contents of a file: each unflushed change is complete, absent or torn.
std::set<std::string> possible_contents(const std::string &flushed, const std::vector<DiskChange> &pending) {
    constexpr size_t max_exhaustive = 6; // enumerates all subsets of up to this many changes, else random subsets
    constexpr int tries = 40;
    std::set<std::string> all;
    const auto add = [&](const auto &reached_of) {
        for (const char unwritten : {'\0', '\xa5'}) { // content of the disk before the writes
            std::string file = flushed;
            for (size_t i = 0; i < pending.size(); ++i) apply(file, pending[i], reached_of(i), unwritten);
            all.insert(std::move(file));
        }
    };
    Random random(11);
    if (pending.size() <= max_exhaustive)
        for (uint64_t mask = 0; mask < 1u << pending.size(); ++mask)
            add([&](size_t i) { return mask >> i & 1 ? kAll : kNone; });
    for (size_t torn = 0; torn < pending.size(); ++torn)
        for (const uint64_t part : {kNone, kAll, kHalf, ~kHalf, random.next(), random.next()}) {
            add([&](size_t i) { return i == torn ? part : kAll; }); // all other changes are on the disk
            add([&](size_t i) { return i == torn ? part : i < torn ? kAll : kNone; }); // only earlier changes are
        }
    for (int n = 0; n < tries && !pending.empty(); ++n) add([&](size_t) { return random.next(); });
    if (pending.empty()) all.insert(flushed);
    return all;
}

using Names = std::map<std::string, int>;

/// Returns every subset of the changes of names. A rename may also leave the old name in place.
std::set<Names> possible_names(const Names &flushed, const std::vector<DiskChange> &pending) {
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

/// Returns every possible disk after the first `count` changes.
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
    for (const Names &found : possible_names(names, pending_names)) {
        std::vector<Files> disks = {{}};
        std::set<int> files; // two names of one file have the same contents
        for (const auto &[name, file] : found) files.insert(file);
        for (const int file : files) {
            std::vector<Files> next;
            for (const std::string &text : possible_contents(contents[file], pending_data[file]))
                for (Files disk : disks) {
                    for (const auto &[name, id] : found)
                        if (id == file) disk[name] = text;
                    next.push_back(std::move(disk));
                }
            disks = std::move(next);
        }
        all.insert(disks.begin(), disks.end());
    }
    return all;
}

const std::string kName = "run.safetensors";

/// Leaves a temporary file, as a process does that is killed before it renames its file.
void leave_temporary(const std::function<dsopt_status()> &save) {
    for (int call = 0; call < 100; ++call) {
        (void)with_fault(call, true, EIO, save);
        if (Faults::failed == std::string("fsync")) return;
    }
    throw std::runtime_error("the save does not call fsync");
}

enum Found { nothing, old_state, new_state, unreadable };

/// Records one save, and loads what a power loss during the save leaves.
class SavePowerLoss : public testing::Test {
protected:
    dsopt_status save() { return dsopt_optimizer_save(trainer.opt(), (folder / kName).c_str(), nullptr); }
    void record_save(bool old_file, bool temporary) {
        trainer.train(1);
        if (old_file) must(save());
        if (temporary) leave_temporary([&] { return save(); });
        ASSERT_EQ(folder.entries(), size_t(old_file) + size_t(temporary));
        old = state_text(trainer.opt());
        trainer.train(2);
        DiskLog log(folder.path);
        must(save());
        record = log.record;
        new_text = state_text(trainer.opt());
        new_file = read_file(folder / kName);
    }
    /// Loads the file from the disk. Other files on the disk do not affect a load.
    Found load(const Files &disk) {
        const auto file = disk.find(kName);
        if (file == disk.end()) return nothing;
        const auto known = verdicts.find(file->second);
        if (known != verdicts.end()) return known->second;
        write_file(found / kName, file->second);
        Found verdict = unreadable;
        if (dsopt_optimizer_load(reader.opt(), (found / kName).c_str(), nullptr) == DSOPT_OK) {
            const std::string state = state_text(reader.opt());
            verdict = state == old ? old_state : state == new_text ? new_state : unreadable;
        }
        std::filesystem::remove(found / kName);
        return verdicts[file->second] = verdict;
    }
    /// Returns all results of a load if the power fails after `count` changes.
    std::set<Found> after(size_t count) {
        std::set<Found> all;
        for (const Files &disk : disks_after(record, count)) all.insert(load(disk));
        return all;
    }
    std::set<Found> after_any_change() {
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
    std::string old, new_text, new_file; // two states, and the file with the new one

private:
    static Trainer make_trainer() {
        return {shapes_of({700, 0, 33}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16), make_group(DSOPT_ALGORITHM_ADAMW)};
    }
    std::map<std::string, Found> verdicts; // by contents
};

TEST_F(SavePowerLoss, LeavesOldOrNewFile) {
    record_save(true, false);
    EXPECT_EQ(after_any_change(), (std::set{old_state, new_state}));
    EXPECT_EQ(after(first(DiskChange::rename)), std::set{old_state});
    EXPECT_EQ(after(first(DiskChange::flush_folder)), (std::set{old_state, new_state}));
}

TEST_F(SavePowerLoss, LeavesNoFileOrNewFileDuringFirstSave) {
    record_save(false, false);
    EXPECT_EQ(after_any_change(), (std::set{nothing, new_state}));
}

TEST_F(SavePowerLoss, LeavesNewFileAfterSaveReturns) {
    for (const bool old_file : {false, true}) {
        record_save(old_file, true);
        EXPECT_EQ(after(record.changes.size()), std::set{new_state});
        EXPECT_EQ(disks_after(record, record.changes.size()), std::set{(Files{{kName, new_file}})});
        std::filesystem::remove(folder / kName);
    }
}

// The folder also has the temporary of a killed process, which a power loss may restore after its removal.
TEST_F(SavePowerLoss, NextSaveSucceedsAndRemovesTemporaries) {
    record_save(true, true);
    std::map<std::set<std::string>, Files> by_names; // only the names on a disk affect the next save
    size_t disks = 0;
    for (size_t count = 0; count <= record.changes.size(); ++count)
        for (const Files &disk : disks_after(record, count)) {
            ++disks;
            EXPECT_TRUE(load(disk) == old_state || load(disk) == new_state);
            std::set<std::string> names;
            for (const auto &[name, text] : disk) names.insert(name);
            by_names[names] = disk;
        }
    std::printf("%zu changes, %zu disks\n", record.changes.size(), disks);
    EXPECT_GE(by_names.size(), 4u); // with and without each of two temporaries
    for (const auto &[names, disk] : by_names) {
        const Folder copy;
        for (const auto &[name, text] : disk) write_file(copy / name, text);
        EXPECT_OK(dsopt_optimizer_save(trainer.opt(), (copy / kName).c_str(), nullptr));
        EXPECT_EQ(copy.entries(), 1u);
        EXPECT_TRUE(same(read_file(copy / kName), new_file));
    }
}

// Replays of defective saves: the tests above must detect each of them.
TEST_F(SavePowerLoss, ReplayDetectsMissingFileFlush) {
    record_save(true, false);
    drop(DiskChange::flush_file);
    EXPECT_TRUE(after_any_change().contains(unreadable));
}
TEST_F(SavePowerLoss, ReplayDetectsRenameBeforeFlush) {
    record_save(true, false);
    std::swap(record.changes[first(DiskChange::flush_file)], record.changes[first(DiskChange::rename)]);
    EXPECT_TRUE(after_any_change().contains(unreadable));
}
TEST_F(SavePowerLoss, ReplayDetectsMissingFolderFlush) {
    record_save(true, false);
    drop(DiskChange::flush_folder);
    EXPECT_EQ(after(record.changes.size()), (std::set{old_state, new_state}));
}
TEST_F(SavePowerLoss, ReplayDetectsSaveInPlace) {
    record_save(true, false);
    const int target = record.names.at(kName);
    std::vector<DiskChange> changes;
    for (DiskChange change : record.changes)
        if (change.kind == DiskChange::write) {
            change.file = target;
            changes.push_back(change);
        }
    record.changes = changes;
    EXPECT_TRUE(after_any_change().contains(unreadable));
}

} // namespace checkpoint_power_loss_tests
