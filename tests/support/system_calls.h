// SPDX-License-Identifier: Apache-2.0
// System calls that this thread makes while it saves or loads. They can be made to fail, and their effects on a disk
// are recorded. system_calls.cc overrides functions of the C library, for the shared library too; only one program
// links it.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace test {

/// Selects the call that fails, or limits what a call transfers.
struct Faults {
    static inline thread_local bool armed = false;
    static inline thread_local int calls = 0, failing_call = -1, error = 0;
    static inline thread_local bool lasting = false;
    static inline thread_local size_t longest = SIZE_MAX;    // bytes that a write or a read transfers
    static inline thread_local const char *failed = nullptr; // name of the first call that failed
    static bool hit(const char *name);
};
/// Runs `call`. Its system call number `failing_call` fails and, if `lasting`, all later ones. -1: no system call
/// fails, and all are counted.
template <class F> auto with_fault(int failing_call, bool lasting, int error, const F &call) {
    Faults::calls = 0;
    Faults::failing_call = failing_call;
    Faults::lasting = lasting;
    Faults::error = error;
    Faults::failed = nullptr;
    Faults::armed = true;
    const auto result = call();
    Faults::armed = false;
    return result;
}

/// A change of a folder, or a flush. Files have ids of the log, because a disk reuses inode numbers.
struct DiskChange {
    enum Kind { create, resize, write, flush_file, flush_folder, rename, unlink };
    Kind kind;
    int file = -1;         // for all except flush_folder
    std::string name = ""; // for create, rename (the new name) and unlink
    std::string from = ""; // for rename
    uint64_t offset = 0;   // for write; the size for resize
    std::string data = ""; // for write
};
/// Contents of a folder at the beginning, and the changes to it.
struct DiskRecord {
    std::map<std::string, int> names;
    std::map<int, std::string> contents;
    std::vector<DiskChange> changes;
};

/// Records the changes that calls of this thread make to one folder during its lifetime.
class DiskLog {
public:
    explicit DiskLog(const std::string &folder);
    ~DiskLog();
    DiskLog(const DiskLog &) = delete;
    DiskLog &operator=(const DiskLog &) = delete;

    DiskRecord record;

    // Called by system_calls.cc.
    static DiskLog *current();
    void created(int descriptor, int folder, const char *name);
    void renamed(int folder, const char *from, const char *to);
    void unlinked(int folder, const char *name);
    void flushed(int descriptor);
    void resized(int descriptor, uint64_t bytes);
    void written(int descriptor, const void *data, size_t bytes);

private:
    void expect_folder(int descriptor) const;
    void add(DiskChange change) { record.changes.push_back(std::move(change)); }

    uint64_t folder_;
    std::map<std::string, int> names_; // current names
    std::map<uint64_t, int> files_;    // by inode number
    int next_ = 0;
};

} // namespace test
