// SPDX-License-Identifier: Apache-2.0
// What kernels of a step read about tensors and groups: brought to the device, and kept there while it stays the same.
#pragma once
#include "compress.cuh"
#include "device/device.h"
#include "runtime.h"
#include "upload.cuh"
#include <cstring>
#include <memory>
#include <vector>

namespace dsopt::gpu {

/// How the host launches kernels.
struct Launcher {
    unsigned multiprocessors;
    cudaStream_t stream;
    PinnedPool &pool;

    /// A grid over so many pieces of work.
    unsigned blocks_for(int64_t pieces, unsigned per_multiprocessor = 4) const {
        const int64_t most = int64_t(multiprocessors) * per_multiprocessor;
        return unsigned(pieces < 1 ? 1 : pieces > most ? most : pieces);
    }
};

/// What Execution::extra holds.
struct Extra {
    size_t table, map, squares, updates, cell, layout, bytes;
    explicit Extra(const StepShape &shape) {
        size_t at = 0;
        const auto place = [&](size_t size) {
            const size_t offset = at;
            at += round_up(size);
            return offset;
        };
        table = place(StepTable::bytes(shape));
        map = place(size_t(shape.leaves) * sizeof(int32_t));
        squares = place(size_t(shape.tensors) * sizeof(double));
        updates = place(size_t(shape.tensors) * sizeof(double));
        cell = place(size_t(shape.tensors) * sizeof(int32_t));
        layout = place(shape.exchange != nullptr ? LayoutImage::bytes(*shape.exchange) : 0);
        bytes = at;
    }
};

/// Events between the phases of a step.
class Marks {
public:
    void clear() { count_ = 0; }
    /// Time since the last mark belongs to this phase.
    void add(int phase, cudaStream_t stream) {
        Mark &mark = marks_[count_];
        if (!mark.event) mark.event = std::make_unique<Event>(cudaEventDefault);
        check(cudaEventRecord(mark.event->get(), stream), "cudaEventRecord");
        mark.phase = phase;
        ++count_;
    }
    void add_times(double *ms) const {
        for (int k = 1; k < count_; ++k) {
            float time = 0;
            check(cudaEventElapsedTime(&time, marks_[k - 1].event->get(), marks_[k].event->get()),
                  "cudaEventElapsedTime");
            ms[marks_[k].phase] += double(time);
        }
    }

private:
    struct Mark {
        std::unique_ptr<Event> event;
        int phase;
    };
    Mark marks_[DSOPT_MS_PHASES + 1]; // no phase comes twice
    int count_ = 0;
};

/// The table in device memory that steps of one optimizer read, and what the host knows of its contents.
class Cache final : public StepCache {
public:
    explicit Cache(int device) : device_(device) {}
    void add_phase_times(double *ms) const override {
        const OnDevice on(device_);
        marks.add_times(ms);
    }

    void *table = nullptr;      // in the workspace, or in one of `own`
    std::vector<char> contents; // of `table`; empty = unknown
    const void *workspace = nullptr;
    bool captured = false; // a graph reads `table`: it must stay as it is
    std::vector<DeviceMemory> own;
    std::vector<uint32_t> changed; // words, kept for the next step
    Marks marks;

private:
    const int device_;
};

__global__ void __launch_bounds__(kThreads)
    map_kernel(const TensorJob *jobs, int32_t *tensor_of_leaf, const int64_t count) {
    for (int64_t i = blockIdx.x; i < count; i += gridDim.x)
        for (int64_t leaf = threadIdx.x; leaf < leaves_of(jobs[i].numel); leaf += kThreads)
            tensor_of_leaf[jobs[i].first_leaf + leaf] = int32_t(i);
}

/// The StepTable that begins with StepPlan::jobs, where kernels read it. Lists that stay bound cost nothing, up to kWords changed words a launch of a
/// small kernel, more than that one upload.
inline void *bring_table(const StepPlan &plan, const StepShape &shape, const Extra &extra, const Launcher &launcher) {
    char *workspace = static_cast<char *>(plan.how.extra);
    const cudaStream_t stream = launcher.stream;
    const size_t bytes = StepTable::bytes(shape);
    const char *image = reinterpret_cast<const char *>(plan.jobs);
    Cache *cache = static_cast<Cache *>(plan.how.cache);
    const bool fresh = cache == nullptr || cache->workspace != plan.how.extra;
    const bool in_capture = capturing(stream);
    if (fresh && cache != nullptr) {
        if (in_capture) throw Error(DSOPT_ERR_STATE, "take one step before capturing: the first one makes tables");
        cache->workspace = plan.how.extra;
        cache->table = workspace + extra.table;
        cache->contents.clear();
        cache->captured = false;
        cache->changed.reserve(kWords + 1);
    }
    void *table = cache != nullptr ? cache->table : workspace + extra.table;
    const bool known = cache != nullptr && cache->contents.size() == bytes;
    size_t changes = 0; // only up to the number that still travels in arguments
    if (known) {
        cache->changed.clear();
        for (size_t word = 0; word < bytes / 8 && cache->changed.size() <= kWords; ++word)
            if (std::memcmp(image + word * 8, cache->contents.data() + word * 8, 8) != 0)
                cache->changed.push_back(uint32_t(word));
        changes = cache->changed.size();
        if (changes == 0) {
            cache->captured = cache->captured || in_capture;
            return table;
        }
    }
    if (cache != nullptr && cache->captured) {
        // A graph reads the table as it was captured. It keeps it, and plain steps go on with another one.
        if (in_capture)
            throw Error(DSOPT_ERR_STATE,
                        "the lists changed since an earlier capture: take one plain step before capturing again");
        cache->own.push_back(device_memory(bytes));
        table = cache->own.back().get();
        cache->contents.clear();
    }
    if (known && changes <= kWords && !cache->contents.empty()) {
        Patch patch;
        patch.count = int32_t(changes);
        for (size_t i = 0; i < changes; ++i) {
            patch.places[i] = cache->changed[i];
            std::memcpy(&patch.words[i], image + size_t(cache->changed[i]) * 8, 8);
        }
        check(::gpu::launch("patch", patch_kernel, 1, kThreads, 0, stream, static_cast<uint64_t *>(table), patch),
              "patch");
    } else {
        upload(table, image, bytes, launcher.pool, stream);
    }
    if (fresh) {
        check(::gpu::launch("map", map_kernel, launcher.blocks_for(plan.count), kThreads, 0, stream,
                            static_cast<const TensorJob *>(table), reinterpret_cast<int32_t *>(workspace + extra.map),
                            plan.count),
              "map");
        if (shape.exchange != nullptr) {
            std::vector<char> layout(LayoutImage::bytes(*shape.exchange));
            LayoutImage::write(*shape.exchange, layout.data());
            upload(workspace + extra.layout, layout.data(), layout.size(), launcher.pool, stream);
        }
    }
    if (cache != nullptr) {
        cache->contents.assign(image, image + bytes);
        cache->table = table;
        cache->captured = in_capture;
    }
    return table;
}

} // namespace dsopt::gpu
