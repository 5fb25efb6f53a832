// SPDX-License-Identifier: Apache-2.0
// Tensor lists of real models, and memory with the same layout.
#pragma once
#include "dsopt.h"
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <regex>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <vector>

namespace bench {

inline void check(dsopt_status status) {
    if (status == DSOPT_OK) return;
    std::fprintf(stderr, "%s: %s\n", dsopt_status_name(status), dsopt_last_error());
    std::exit(1);
}

/// Returns element counts: of a list of bench/shapes such as "gpt2-124m", or "NxM" for N tensors of M elements.
inline std::vector<int64_t> shapes(const std::string &name) {
    std::vector<int64_t> sizes;
    long long count = 0, numel = 0;
    if (std::sscanf(name.c_str(), "%lldx%lld", &count, &numel) == 2) return std::vector<int64_t>(size_t(count), numel);
    std::ifstream file(std::string(DSOPT_SHAPES) + "/" + name + ".csv");
    if (!file) {
        std::fprintf(stderr, "no list of shapes called %s\n", name.c_str());
        std::exit(1);
    }
    std::string line;
    std::getline(file, line); // the heading
    while (std::getline(file, line)) sizes.push_back(std::stoll(line.substr(line.rfind(',') + 1)));
    return sizes;
}
/// Rows and columns of a tensor; both 0 if Muon does not step it.
struct Matrix {
    int64_t rows = 0, cols = 0;
};
/// Returns the matrices of a list: the tensors of two dimensions of its numbered layers, which embeddings and heads are
/// not. "NxM" has none.
inline std::vector<Matrix> matrices(const std::string &name) {
    std::vector<Matrix> found(shapes(name).size());
    std::ifstream file(std::string(DSOPT_SHAPES) + "/" + name + ".csv");
    const std::regex row("[^,]*[._][0-9]+\\.[^,]*,([0-9]+)x([0-9]+),[0-9]+");
    std::string line;
    std::getline(file, line);
    for (size_t i = 0; std::getline(file, line); ++i)
        if (std::smatch dims; std::regex_match(line, dims, row)) found[i] = {std::stoll(dims[1]), std::stoll(dims[2])};
    return found;
}
inline int64_t total(const std::vector<int64_t> &sizes) {
    int64_t sum = 0;
    for (const int64_t n : sizes) sum += n;
    return sum;
}

/// Zeroed memory in huge pages, like the memory from the allocators of frameworks and of this engine.
class Memory {
public:
    explicit Memory(size_t bytes) : bytes_((bytes + kHuge - 1) / kHuge * kHuge) {
        data_ = std::aligned_alloc(kHuge, bytes_);
        if (data_ == nullptr) std::abort();
        (void)madvise(data_, bytes_, MADV_HUGEPAGE);
        char *memory = static_cast<char *>(data_);
        for (size_t i = 0; i < bytes_; ++i) memory[i] = 0;
    }
    ~Memory() { std::free(data_); }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    template <class T> T *as() const { return static_cast<T *>(data_); }

private:
    static constexpr size_t kHuge = size_t(2) << 20;
    void *data_;
    size_t bytes_;
};

/// A list in one block of memory: consecutive tensors, each aligned to 64 bytes.
struct List {
    Memory memory;
    std::vector<dsopt_tensor> tensors;
    List(const std::vector<int64_t> &sizes, int32_t dtype) : memory(bytes(sizes, dtype)) {
        size_t offset = 0;
        for (const int64_t n : sizes) {
            tensors.push_back({memory.as<char>() + offset, n, dtype, 0});
            offset += rounded(n, dtype);
        }
    }
    static size_t element(int32_t dtype) {
        return dtype == DSOPT_DTYPE_F32 ? 4 : dtype == DSOPT_DTYPE_U8 || dtype == DSOPT_DTYPE_F8_E4M3 ? 1 : 2;
    }
    static size_t rounded(int64_t n, int32_t dtype) { return (size_t(n) * element(dtype) + 63) / 64 * 64; }
    static size_t bytes(const std::vector<int64_t> &sizes, int32_t dtype) {
        size_t sum = 64;
        for (const int64_t n : sizes) sum += rounded(n, dtype);
        return sum;
    }
};

using Exchange = int (*)(void *self, const void *send, void *recv, int64_t bytes, void *stream);
inline int no_exchange(void *, const void *, void *, int64_t, void *) { return 0; }
/// Creates a comm of rank 0 of `ranks`, for memory of the context's device. Its all-reduce does nothing.
inline dsopt_comm *idle_comm(dsopt_context *context, int ranks, Exchange exchange = no_exchange) {
    DSOPT_NEW(dsopt_comm_table, table);
    table.ranks = ranks;
    table.memory = DSOPT_MEMORY_BACKEND;
    table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 0; };
    table.all_to_all = table.all_gather = exchange;
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = DSOPT_COMM_KIND_TABLE;
    desc.table = &table;
    dsopt_comm *comm = nullptr;
    check(dsopt_comm_create(context, &desc, &comm));
    return comm;
}

} // namespace bench
