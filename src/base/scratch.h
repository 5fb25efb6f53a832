// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace dsopt {

/// Host memory for the duration of a call. `apply` may run on several threads at once, so there is a pool of it; it
/// grows to their number and stays.
class ScratchPool {
public:
    struct Block {
        std::unique_ptr<char[]> data;
        size_t bytes = 0;
    };
    Block take(size_t bytes) {
        Block block;
        {
            const std::lock_guard lock(mutex_);
            if (!free_.empty()) {
                block = std::move(free_.back());
                free_.pop_back();
            }
        }
        if (block.bytes < bytes) block = {std::make_unique<char[]>(bytes), bytes};
        return block;
    }
    void give(Block block) noexcept {
        const std::lock_guard lock(mutex_);
        try {
            free_.push_back(std::move(block));
        } catch (const std::bad_alloc &) { // then it is freed
        }
    }

private:
    std::mutex mutex_;
    std::vector<Block> free_;
};
class HostScratch {
public:
    HostScratch(ScratchPool &pool, size_t bytes) : pool_(pool) {
        if (bytes != 0) block_ = pool.take(bytes);
    }
    ~HostScratch() {
        if (block_.bytes != 0) pool_.give(std::move(block_));
    }
    HostScratch(const HostScratch &) = delete;
    HostScratch &operator=(const HostScratch &) = delete;
    char *data() const { return block_.data.get(); }

private:
    ScratchPool &pool_;
    ScratchPool::Block block_;
};

} // namespace dsopt
