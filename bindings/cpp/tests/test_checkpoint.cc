// SPDX-License-Identifier: Apache-2.0
// Checkpoints in files and in objects.
#include "model.h"
#include <cstdio>
#include <cstring>
#include <unistd.h>

namespace checkpoint_tests {

TEST(CppCheckpoint, SavesToAFileAndLoads) {
    const std::string path = ::testing::TempDir() + "dsopt-cpp-" + std::to_string(::getpid()) + ".safetensors";
    Model first, second;
    dsopt::context ctx;
    dsopt::optimizer opt(ctx);
    opt.add_group(rule(), first.params);
    opt.step(first.grads);
    dsopt::save_options all;
    all.params = true;
    opt.save(path, all);
    dsopt::optimizer loaded(ctx);
    loaded.add_group(rule(), second.params);
    dsopt::load_options options;
    options.params = true;
    loaded.load(path, options);
    expect_same(first, second);
    opt.step(first.grads);
    loaded.step(first.grads);
    expect_same(first, second);
    options = {};
    options.no_state = options.no_hyper = true;
    loaded.set(dsopt::key::lr, 0.5);
    loaded.load(path, options);
    EXPECT_EQ(loaded.get(dsopt::key::lr), 0.5);
    loaded.load(path);
    EXPECT_EQ(loaded.get(dsopt::key::lr), 0.01);
    const std::string paths[] = {path};
    loaded.load(paths);
    std::remove(path.c_str());
    EXPECT_REFUSED(loaded.load(path), dsopt::io_error, path);
    EXPECT_REFUSED(opt.save("/nowhere/at/all"), dsopt::io_error, "/nowhere/at/all");
    const std::string cut[] = {path + '\0' + "more"}; // C would use only the part before NUL
    EXPECT_REFUSED(opt.save(cut[0]), dsopt::argument_error, "path has a zero byte");
    EXPECT_REFUSED(opt.load(cut[0]), dsopt::argument_error, "path has a zero byte");
    EXPECT_REFUSED(opt.load(cut), dsopt::argument_error, "path has a zero byte");
}

/// A checkpoint in memory, whose callbacks can fail.
struct Memory {
    std::vector<char> bytes;
    bool broken = false;
    void write(const void *data, std::size_t size) {
        if (broken) throw std::length_error("the disk is full");
        bytes.insert(bytes.end(), static_cast<const char *>(data), static_cast<const char *>(data) + size);
    }
    std::uint64_t size() const { return bytes.size(); }
    void read(std::uint64_t offset, void *data, std::size_t size) {
        if (broken) throw std::length_error("the disk is gone");
        if (size != 0) std::memcpy(data, bytes.data() + offset, size);
    }
};

TEST(CppCheckpoint, SavesToAnObjectAndLoads) {
    Model first, second;
    dsopt::context ctx;
    dsopt::optimizer opt(ctx), loaded(ctx);
    opt.add_group(rule(), first.params);
    loaded.add_group(rule(), second.params);
    opt.step(first.grads);
    Memory memory;
    opt.save_to(memory);
    EXPECT_GT(memory.size(), 8u);
    loaded.load_from(memory);
    Memory several[1] = {memory};
    loaded.load_from(dsopt::span<Memory>(several));
    std::int32_t steps[3] = {};
    loaded.export_state(6, steps);
    EXPECT_EQ(steps[1], 1);
    memory.bytes[memory.bytes.size() - 5] ^= 1;
    EXPECT_REFUSED(loaded.load_from(memory), dsopt::checkpoint_error, "");
    memory.broken = true;
    EXPECT_THROW(opt.save_to(memory), std::length_error);
    EXPECT_THROW(loaded.load_from(memory), std::length_error);
    opt.step(first.grads); // no effect of the failures remains
    dsopt::optimizer other(ctx);
    dsopt::adam another;
    other.add_group(another, second.params);
    memory.broken = false;
    memory.bytes[memory.bytes.size() - 5] ^= 1;
    EXPECT_REFUSED(other.load_from(memory), dsopt::checkpoint_error, "\"adamw\", here it is adam");
}

} // namespace checkpoint_tests
