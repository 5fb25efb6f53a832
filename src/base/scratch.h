// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/not_copied.h"
#include <cstddef>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace dsopt {

/// Pool of host memory blocks, each in use for the duration of a call. `apply` may run on several threads at once: the
/// pool grows to one block per concurrent call and keeps the blocks.
class ScratchPool {
public:
    using Block = std::vector<char>;
    Block acquire(size_t bytes) {
        Block block;
        if (const std::lock_guard lock(mutex_); !free_.empty()) {
            block = std::move(free_.back());
            free_.pop_back();
        }
        if (block.size() < bytes) block = Block(bytes);
        return block;
    }
    /// Allocates a block of this size, so that the next call of acquire() need not.
    void reserve(size_t bytes) {
        if (bytes != 0) release(acquire(bytes));
    }
    void release(Block block) noexcept {
        const std::lock_guard lock(mutex_);
        try {
            free_.push_back(std::move(block));
        } catch (const std::bad_alloc &) { // the block is freed
        }
    }

private:
    std::mutex mutex_;
    std::vector<Block> free_;
};
/// A block of a pool, for the life of the object. With 0 bytes it uses no block.
class HostScratch : NotCopied {
public:
    HostScratch(ScratchPool &pool, size_t bytes) : pool_(pool) {
        if (bytes != 0) block_ = pool.acquire(bytes);
    }
    ~HostScratch() {
        if (!block_.empty()) pool_.release(std::move(block_));
    }
    char *data() { return block_.data(); }

private:
    ScratchPool &pool_;
    ScratchPool::Block block_;
};

} // namespace dsopt
