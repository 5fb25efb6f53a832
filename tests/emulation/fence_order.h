// SPDX-License-Identifier: Apache-2.0
// Reports to the thread sanitizer how fences and atomics order blocks. Atomics alone order nothing, as on the device: a
// fence before the atomic of one thread releases, and a fence after the atomic of another thread acquires. A barrier
// extends both to the other threads of the block: all threads may fence before it, and one may draw the ticket after
// it.
#pragma once
#include "sanitizer.h"
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

namespace cuemu {

/// Order within one grid, whose blocks run one after the other under the thread sanitizer.
class FenceOrder {
public:
    void begin_block(unsigned threads);
    void barrier();
    void fence(unsigned thread);
    void atomic(unsigned thread, const void *address);

private:
    struct SyncPoint {
        uint64_t unused;
    };
    struct Published { // by atomics on one address
        std::vector<SyncPoint *> sync_points;
    };
    struct Seen { // by an atomic: what had been published at that time
        const Published *published;
        size_t count;
    };
    struct ThreadFences { // state of a thread since the last barrier
        SyncPoint *fenced = nullptr;
        std::vector<Seen> seen{};
    };
    SyncPoint *new_sync_point();
    static void remember(std::vector<Seen> &all, Seen seen);

    std::deque<SyncPoint> sync_points_;
    std::map<const void *, Published> published_;
    std::vector<ThreadFences> threads_;
    SyncPoint *round_fenced_ = nullptr; // by any thread since the last barrier
    std::vector<Seen> round_seen_;
    std::vector<SyncPoint *> block_fenced_; // by any thread before the last barrier
    std::vector<Seen> block_seen_;
    std::vector<SyncPoint *> acquired_;
};

inline FenceOrder::SyncPoint *FenceOrder::new_sync_point() {
    sync_points_.push_back({0});
    return &sync_points_.back();
}

inline void FenceOrder::remember(std::vector<Seen> &all, Seen seen) {
    for (Seen &known : all)
        if (known.published == seen.published) {
            known.count = seen.count;
            return;
        }
    all.push_back(seen);
}

inline void FenceOrder::begin_block(unsigned threads) {
    const sanitizer::Quiet quiet;
    threads_.assign(threads, ThreadFences{});
    round_fenced_ = nullptr;
    round_seen_.clear();
    block_fenced_.clear();
    block_seen_.clear();
}

inline void FenceOrder::barrier() {
    const sanitizer::Quiet quiet;
    if (round_fenced_) block_fenced_.push_back(round_fenced_);
    round_fenced_ = nullptr;
    for (const Seen &seen : round_seen_) remember(block_seen_, seen);
    round_seen_.clear();
    for (ThreadFences &fences : threads_) fences = ThreadFences{};
}

inline void FenceOrder::fence(unsigned thread) {
    ThreadFences &fences = threads_[thread];
    {
        const sanitizer::Quiet quiet;
        acquired_.clear();
        for (const auto *all : {&fences.seen, &block_seen_})
            for (const Seen &seen : *all)
                acquired_.insert(acquired_.end(), seen.published->sync_points.begin(),
                                 seen.published->sync_points.begin() + long(seen.count));
        fences.seen.clear();
        fences.fenced = new_sync_point();
        if (!round_fenced_) round_fenced_ = new_sync_point();
    }
    for (SyncPoint *sync_point : acquired_) sanitizer::acquire(sync_point);
    sanitizer::release(fences.fenced);
    sanitizer::release(round_fenced_);
}

inline void FenceOrder::atomic(unsigned thread, const void *address) {
    const sanitizer::Quiet quiet;
    ThreadFences &fences = threads_[thread];
    Published &published = published_[address];
    const Seen seen{&published, published.sync_points.size()};
    remember(fences.seen, seen);
    remember(round_seen_, seen);
    if (fences.fenced) published.sync_points.push_back(fences.fenced);
    published.sync_points.insert(published.sync_points.end(), block_fenced_.begin(), block_fenced_.end());
}

} // namespace cuemu
