// SPDX-License-Identifier: Apache-2.0
// The system calls that this thread makes while it saves or loads: they can be made to fail, and what they do to a disk
// is written down. system_calls.cc stands before the C library, for the shared library too; one program has it.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace test {

/// Which call fails.
struct Faults {
    static inline thread_local bool armed = false;
    static inline thread_local int calls = 0, at = -1, error = 0;
    static inline thread_local bool lasting = false;
    static inline thread_local const char *failed = nullptr; // the name of the first one that failed
    static bool hit(const char *name);
};
/// `call` with its system call number `at` failing, and from then on if `lasting`. -1: none fails, and they are counted.
template <class F> auto with_fault(int at, bool lasting, int error, const F &call) {
    Faults::calls = 0;
    Faults::at = at;
    Faults::lasting = lasting;
    Faults::error = error;
    Faults::failed = nullptr;
    Faults::armed = true;
    const auto result = call();
    Faults::armed = false;
    return result;
}

/// A change of a folder, or a flush. Files are told apart by numbers of the log's own: a disk uses its numbers anew.
struct DiskChange {
    enum Kind { create, resize, write, flush_file, flush_folder, rename, unlink };
    Kind kind;
    int file = -1;         // of all but flush_folder
    std::string name = ""; // of create, rename (the new one), unlink
    std::string from = ""; // of rename
    uint64_t offset = 0;   // of write; of resize the size
    std::string data = ""; // of write
};
/// What was in a folder, and what became of it.
struct DiskRecord {
    std::map<std::string, int> names;
    std::map<int, std::string> contents;
    std::vector<DiskChange> changes;
};

/// What the calls of this thread do to one folder while it lives.
class DiskLog {
public:
    explicit DiskLog(const std::string &folder);
    ~DiskLog();
    DiskLog(const DiskLog &) = delete;
    DiskLog &operator=(const DiskLog &) = delete;

    DiskRecord record;

    // Of system_calls.cc.
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
    std::map<std::string, int> names_; // as they are now
    std::map<uint64_t, int> files_;    // by number on the disk
    int next_ = 0;
};

} // namespace test
