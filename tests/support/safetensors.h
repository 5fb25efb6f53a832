// SPDX-License-Identifier: Apache-2.0
// Containers for writing, and results of reading them.
#pragma once
#include "checkpoint/safetensors.h"
#include "harness.h"
#include <random>

namespace test {

using namespace dsopt;
namespace fs = std::filesystem;

struct Container {
    Metadata metadata;
    std::vector<TensorEntry> tensors;
    std::vector<std::string> bytes;

    void add(const std::string &name, int32_t dtype, std::vector<int64_t> shape, uint64_t size) {
        std::mt19937 random(unsigned(tensors.size()) + 1);
        std::string data(size, '\0');
        for (char &byte : data) byte = char(random());
        tensors.push_back({name, dtype, std::move(shape), size});
        bytes.push_back(std::move(data));
    }
    Deliver deliver() const {
        return [this](size_t index, uint64_t offset, size_t) -> const void * { return bytes[index].data() + offset; };
    }
};

inline Container small() {
    Container content;
    content.metadata = {{"format", "1"}, {"algorithm", "adamw"}};
    content.add("a.exp_avg", DSOPT_DTYPE_F32, {2, 3}, 24);
    content.add("b.empty", DSOPT_DTYPE_F32, {0, 7}, 0);
    content.add("b.exp_avg", DSOPT_DTYPE_BF16, {5}, 10);
    content.add("b.step", dsopt::kI64, {}, 8);
    return content;
}

inline void save(Sink &sink, const Container &content) {
    write_safetensors(sink, content.metadata, content.tensors, content.deliver());
}
inline void save(const std::string &path, const Container &content) { save(*file_sink(path.c_str()), content); }
inline std::string image(const Container &content) {
    MemoryFile memory;
    save(*callback_sink(memory.io()), content);
    return memory.data;
}
struct ReadOutcome {
    dsopt_status status = DSOPT_OK;
    std::string text;
};
template <class F> ReadOutcome outcome(F &&body) {
    try {
        body();
        return {};
    } catch (const Error &error) { return {error.status(), error.what()}; }
}

inline void load_all(std::unique_ptr<const Source> source) {
    const SafetensorsReader reader(std::move(source));
    for (size_t i = 0; i < reader.tensors().size(); ++i) reader.verify(i);
}
inline ReadOutcome load(const std::string &data) {
    MemoryFile memory{data};
    return outcome([&] { load_all(callback_source(memory.io())); });
}
inline bool refused(const ReadOutcome &result) {
    return result.status == DSOPT_ERR_FORMAT || result.status == DSOPT_ERR_CHECKSUM;
}

inline void expect_same(const SafetensorsReader &reader, const Container &content) {
    ASSERT_EQ(reader.tensors().size(), content.tensors.size());
    EXPECT_EQ(Metadata(reader.metadata().begin(), reader.metadata().end()), [&] {
        Metadata sorted = content.metadata;
        std::sort(sorted.begin(), sorted.end());
        return sorted;
    }());
    for (size_t i = 0; i < content.tensors.size(); ++i) {
        const size_t index = reader.find(content.tensors[i].name);
        ASSERT_NE(index, SafetensorsReader::npos) << content.tensors[i].name;
        const TensorEntry &entry = reader.tensors()[index];
        EXPECT_EQ(entry.name, content.tensors[i].name);
        EXPECT_EQ(entry.dtype, content.tensors[i].dtype);
        EXPECT_EQ(entry.shape, content.tensors[i].shape);
        ASSERT_EQ(entry.bytes, content.tensors[i].bytes);
        std::string data(entry.bytes, '\0');
        reader.verify(index, data.data());
        EXPECT_EQ(data, content.bytes[i]);
        for (const size_t offset : {size_t(0), size_t(entry.bytes / 2), size_t(entry.bytes)}) {
            std::string part(entry.bytes - offset, '\0');
            reader.read(index, offset, part.data(), part.size());
            EXPECT_EQ(part, content.bytes[i].substr(offset));
        }
    }
    EXPECT_EQ(reader.find("no such tensor"), SafetensorsReader::npos);
}

} // namespace test
