// SPDX-License-Identifier: Apache-2.0
// Virtual memory: zeros that need no physical pages, and advice for huge pages.
#pragma once

#include "dsopt.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace {

// Zeros to read: pages that were never written all map the system's zero page. They need no memory and little
// bandwidth, whereas an array of zeros among XLA's temporaries is written in every run.
class Zeros {
public:
    Zeros() = default;
    explicit Zeros(size_t bytes_) : bytes(bytes_) {
        at = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) throw std::runtime_error("no address space for zeros");
#ifdef MADV_HUGEPAGE
        (void)madvise(at, bytes, MADV_HUGEPAGE);
#endif
    }
    Zeros(Zeros &&other) noexcept : at(std::exchange(other.at, nullptr)), bytes(other.bytes) {}
    Zeros &operator=(Zeros &&other) noexcept {
        std::swap(at, other.at);
        std::swap(bytes, other.bytes);
        return *this;
    }
    ~Zeros() {
        if (at) munmap(at, bytes);
    }
    void *data() const { return at; }

private:
    void *at = nullptr;
    size_t bytes = 0;
};

// XLA's temporary memory is new in every run, so results there cause a page fault per page, which can take longer than
// the step. Huge pages cause 512 times fewer faults. Only advice: nothing changes if the system ignores it.
void advise_huge_pages(const std::vector<dsopt_tensor> &list) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t kHuge = uintptr_t{1} << 21, kBetween = 4096;
    std::vector<std::pair<uintptr_t, uintptr_t>> ranges; // neighbours become one: their edges are in no huge page else
    for (const auto &tensor : list) {
        const auto at = reinterpret_cast<uintptr_t>(tensor.data);
        ranges.push_back({at, at + static_cast<uintptr_t>(tensor.numel) * (tensor.dtype == DSOPT_DTYPE_F32 ? 4 : 2)});
    }
    std::sort(ranges.begin(), ranges.end());
    for (size_t i = 0; i < ranges.size();) {
        auto [begin, end] = ranges[i++];
        for (; i < ranges.size() && ranges[i].first <= end + kBetween; ++i) end = std::max(end, ranges[i].second);
        const uintptr_t first = (begin + kHuge - 1) & ~(kHuge - 1), last = end & ~(kHuge - 1);
        if (first < last) (void)madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);
    }
#else
    (void)list;
#endif
}

} // namespace
