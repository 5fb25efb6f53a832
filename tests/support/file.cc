// SPDX-License-Identifier: Apache-2.0
#include "file.h"
#include "trainer.h"
#include <atomic>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace test {

int MemoryFile::write(void *user, const void *bytes, size_t size) {
    auto *self = static_cast<MemoryFile *>(user);
    if (self->count_call() == self->fail_at) return 4711;
    self->data.append(static_cast<const char *>(bytes), size);
    return 0;
}
int MemoryFile::read(void *user, uint64_t offset, void *bytes, size_t size) {
    auto *self = static_cast<MemoryFile *>(user);
    if (self->count_call() == self->fail_at) return -42;
    if (offset > self->data.size() || size > self->data.size() - offset) return 99;
    std::memcpy(bytes, self->data.data() + offset, size);
    return 0;
}
dsopt_io MemoryFile::io(uint32_t flags) {
    DSOPT_NEW(dsopt_io, io);
    io.flags = flags;
    io.user = this;
    io.write = write;
    io.read = read;
    io.total = data.size();
    return io;
}
dsopt_status MemoryFile::save(const Trainer &from, uint32_t flags) {
    data.clear();
    const dsopt_io to = io(flags);
    return dsopt_optimizer_save(from.opt(), nullptr, &to);
}
dsopt_status MemoryFile::load(const Trainer &into, uint32_t flags) {
    const dsopt_io from = io(flags);
    return dsopt_optimizer_load(into.opt(), nullptr, &from);
}
dsopt_status load_all(dsopt_optimizer *into, const std::vector<const MemoryFile *> &files, uint32_t flags) {
    std::vector<void *> users;
    std::vector<uint64_t> totals;
    for (const MemoryFile *file : files) {
        users.push_back(const_cast<MemoryFile *>(file)); // read() counts its calls
        totals.push_back(file->data.size());
    }
    DSOPT_NEW(dsopt_io, io);
    io.flags = flags;
    io.read = MemoryFile::read;
    io.files = int32_t(files.size());
    io.users = users.data();
    io.totals = totals.data();
    return dsopt_optimizer_load(into, nullptr, &io);
}

Folder::Folder() {
    static std::atomic<int> counter{0};
    path = std::filesystem::temp_directory_path() /
           ("dsopt_test_" + std::to_string(::getpid()) + "_" + std::to_string(counter++));
    std::filesystem::create_directories(path);
}
Folder::~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
}
size_t Folder::entries() const {
    return size_t(std::distance(std::filesystem::directory_iterator(path), std::filesystem::directory_iterator()));
}
std::string read_file(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}
void write_file(const std::string &path, const std::string &data) { std::ofstream(path, std::ios::binary) << data; }

std::string with_header(const std::string &data, const std::string &find, const std::string &replace) {
    uint64_t length = 0;
    std::memcpy(&length, data.data(), 8);
    std::string header = data.substr(8, length);
    const size_t offset = header.find(find);
    if (offset == std::string::npos) throw std::runtime_error("not in the header: " + find);
    header.replace(offset, find.size(), replace);
    const std::string key = R"("header_xxh3":")";
    const size_t digits = header.find(key) + key.size();
    header.replace(digits, 32, std::string(32, '0'));
    length = header.size();
    std::string result(reinterpret_cast<const char *>(&length), 8);
    result += header;
    const XXH128_hash_t hash = XXH3_128bits(result.data(), result.size());
    char text[33];
    std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                  static_cast<unsigned long long>(hash.low64));
    return result.replace(8 + digits, 32, text, 32) +
           data.substr(data.size() - (data.size() - 8 - header.size() + replace.size() - find.size()));
}

std::string with_tensor_name(const std::string &data, const std::string &from, const std::string &to) {
    const std::string renamed = with_header(data, "\"" + from + "\":", "\"" + to + "\":");
    return with_header(renamed, "\"xxh3." + from + "\":", "\"xxh3." + to + "\":");
}

} // namespace test
