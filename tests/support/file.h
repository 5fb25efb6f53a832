// SPDX-License-Identifier: Apache-2.0
// Checkpoints in memory, and folders on disk.
#pragma once
#include "handles.h"
#include <atomic>
#include <filesystem>
#include <string>
#include <vector>

namespace test {

class Trainer;

/// A file in memory, with read and write callbacks. `fail_at` is the call that fails, counted over writes and reads.
struct MemoryFile {
    std::string data;
    int calls = 0, fail_at = -1;
    /// Returns the number of the call. Several ranks may read one object at once.
    int count_call() { return std::atomic_ref(calls)++; }
    static int write(void *user, const void *bytes, size_t size);
    static int read(void *user, uint64_t offset, void *bytes, size_t size);
    dsopt_io io(uint32_t flags = 0);

    dsopt_status save(const Trainer &from, uint32_t flags = 0);
    dsopt_status load(const Trainer &into, uint32_t flags = 0);
};
/// Loads the files of several ranks, in the given order.
dsopt_status load_all(dsopt_optimizer *into, const std::vector<const MemoryFile *> &files, uint32_t flags = 0);

/// A folder of one test, removed on destruction.
struct Folder {
    Folder();
    ~Folder();
    Folder(const Folder &) = delete;
    Folder &operator=(const Folder &) = delete;
    std::string operator/(const std::string &name) const { return (path / name).string(); }
    size_t entries() const;
    std::filesystem::path path;
};
std::string read_file(const std::string &path);
void write_file(const std::string &path, const std::string &data);

/// Replaces text in the header of a file and updates the checksum of the header.
std::string with_header(const std::string &data, const std::string &find, const std::string &replace);
/// Renames a tensor in a file.
std::string with_tensor_name(const std::string &data, const std::string &from, const std::string &to);

} // namespace test
