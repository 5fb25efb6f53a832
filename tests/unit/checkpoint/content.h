// SPDX-License-Identifier: Apache-2.0
// Checkpoints in memory that a test changes before it loads them.
#pragma once
#include "checkpoint/safetensors.h"
#include "support/file.h"
#include "support/harness.h"

namespace test {

inline std::string saved(const dsopt_optimizer *opt, uint32_t flags = 0) {
    MemoryFile memory_file;
    const dsopt_io io = memory_file.io(flags);
    must(dsopt_optimizer_save(const_cast<dsopt_optimizer *>(opt), nullptr, &io));
    return memory_file.data;
}
inline dsopt_status load(dsopt_optimizer *opt, const std::string &data, uint32_t flags = 0) {
    MemoryFile memory_file{data};
    const dsopt_io io = memory_file.io(flags);
    return dsopt_optimizer_load(opt, nullptr, &io);
}

/// The parsed content of a checkpoint. text() writes it again, with valid checksums.
struct Content {
    explicit Content(const std::string &data) {
        MemoryFile memory_file{data};
        const dsopt::SafetensorsReader reader(dsopt::callback_source(memory_file.io()));
        metadata.assign(reader.metadata().begin(), reader.metadata().end());
        tensors = reader.tensors();
        for (size_t i = 0; i < tensors.size(); ++i) {
            bytes.emplace_back(tensors[i].bytes, '\0');
            reader.read(i, 0, bytes[i].data(), bytes[i].size());
        }
    }
    std::string &field(const std::string &key) {
        for (auto &[name, value] : metadata)
            if (name == key) return value;
        throw std::runtime_error("no field " + key);
    }
    dsopt::TensorEntry &tensor(const std::string &name) {
        for (dsopt::TensorEntry &entry : tensors)
            if (entry.name == name) return entry;
        throw std::runtime_error("no tensor " + name);
    }
    void drop_tensor(const std::string &name) {
        const size_t i = size_t(&tensor(name) - tensors.data());
        tensors.erase(tensors.begin() + int64_t(i));
        bytes.erase(bytes.begin() + int64_t(i));
    }
    std::string text() const {
        MemoryFile memory_file;
        const auto sink = dsopt::callback_sink(memory_file.io());
        dsopt::write_safetensors(*sink, metadata, tensors,
                                 [&](size_t i, uint64_t offset, size_t) { return bytes[i].data() + offset; });
        return memory_file.data;
    }
    dsopt::Metadata metadata;
    std::vector<dsopt::TensorEntry> tensors;
    std::vector<std::string> bytes;
};

} // namespace test
