// SPDX-License-Identifier: Apache-2.0
// Tables of tensors and groups that kernels of a step read: uploaded to the device, and reused while they are
// unchanged.
#pragma once
#include "device/device.h"
#include "launcher.h"

namespace dsopt::gpu {

/// Map from the leaves that a rank visits to their tensors, and the leaf counts of tensors.
struct LeafMap {
    int32_t *tensor_of_leaf; // by position
    int32_t *tensor_leaves;  // number of leaves of each tensor
};

/// Arrays in Execution::device_workspace.
struct DeviceWorkspace {
    char *table;
    LeafMap map;
    int32_t *slice_map;        // LeafMap::tensor_of_leaf of StepPlan::slice_jobs
    double *squares, *updates; // one per tensor
    int32_t *cell;             // one per tensor
    char *layout;              // the block of an exchange's layout
    size_t bytes;

    /// `memory` NULL: only computes `bytes`.
    DeviceWorkspace(void *memory, const StepShape &shape) {
        Arena arena(memory);
        arena.take_bytes(table, shape.table_bytes);
        arena.take(map.tensor_of_leaf, shape.leaves);
        arena.take(map.tensor_leaves, shape.tensors);
        arena.take(slice_map, shape.has_slice_jobs ? shape.leaves : 0);
        arena.take(squares, shape.tensors);
        arena.take(updates, shape.tensors);
        arena.take(cell, shape.tensors);
        arena.take_bytes(layout, shape.exchange != nullptr ? shape.exchange->bytes : 0);
        bytes = arena.bytes();
    }
};

/// Events between the phases of a step.
class Marks {
public:
    explicit Marks(const Gpu &gpu) : gpu_(gpu) {}
    /// Makes the events, so that add() allocates nothing.
    void reserve() {
        for (Mark &mark : marks_)
            if (!mark.event) mark.event = gpu_.event(cudaEventDefault);
    }
    void clear() { count_ = 0; }
    /// Adds the time since the last mark to this phase.
    void add(int phase, cudaStream_t stream) {
        Mark &mark = marks_[count_];
        check(cudaEventRecord(mark.event.get(), stream), "cudaEventRecord");
        mark.phase = phase;
        ++count_;
    }
    void add_times(double *ms) const {
        for (int k = 1; k < count_; ++k) {
            float time = 0;
            check(cudaEventElapsedTime(&time, marks_[k - 1].event.get(), marks_[k].event.get()),
                  "cudaEventElapsedTime");
            ms[marks_[k].phase] += double(time);
        }
    }

private:
    struct Mark {
        Event event;
        int phase;
    };
    const Gpu &gpu_;
    /// Each phase occurs at most once, except DSOPT_MS_EXCHANGE, three times, and DSOPT_MS_BASIC_STEP, twice.
    Mark marks_[DSOPT_MS_PHASES + 4];
    int count_ = 0;
};

constexpr int kPatchWords = 1024; // 12 KiB of kernel arguments
struct Patch {
    uint64_t words[kPatchWords];
    uint32_t offsets[kPatchWords]; // offsets, in words
    int32_t count;
};
void patch_words(uint64_t *table, const Patch &patch, const Launcher &launcher);
/// Makes the map; without tensor_leaves, only the rest. With it, sets the cell of tensors without elements to -1
/// (none), because no other kernel visits them.
void map_leaves(const TensorJob *jobs, const LeafMap &map, int32_t *cell, int64_t count, const Launcher &launcher);

/// The table that the steps of one optimizer read, and the host's copy of its contents. The table is in separate
/// memory; steps without a cache upload their table to the workspace.
class Cache final : public StepCache {
public:
    const void *workspace = nullptr; // the workspace whose map and layout are written
    const void *slice_map = nullptr; // the map of slice jobs that is written
    Marks marks;

    explicit Cache(const Gpu &gpu) : marks(gpu), gpu_(gpu) {}
    void add_phase_times(double *ms) const override {
        const OnDevice on(gpu_);
        marks.add_times(ms);
    }

    /// Returns `image` in device memory. `unchanged`: `image` is identical to that of the last step. An unchanged table
    /// costs nothing, up to kPatchWords changed words cost one small kernel, more changes cost an upload.
    void *upload_if_changed(const char *image, size_t bytes, bool unchanged, const Launcher &launcher) {
        const bool in_capture = capturing(launcher.stream), known = !contents_.empty();
        if (known && (unchanged || std::memcmp(image, contents_.data(), bytes) == 0)) {
            captured_ = captured_ || in_capture;
            return tables_.back().get();
        }
        if (captured_ && in_capture)
            throw Error(DSOPT_ERR_STATE,
                        "the lists changed since an earlier capture: run one step without capture first");
        // A graph keeps its table as it was captured; later steps use another table.
        const bool is_new = tables_.empty() || captured_;
        if (is_new) tables_.push_back(gpu_.device_memory(bytes));
        if (is_new || !known || !patch(image, launcher)) {
            contents_.clear();
            launcher.upload(tables_.back().get(), image, bytes);
        }
        // A captured upload has not run yet, and may never run: the contents are unknown.
        contents_.assign(image, image + (in_capture ? 0 : bytes));
        captured_ = in_capture;
        return tables_.back().get();
    }

private:
    /// Returns false if too many words have changed.
    bool patch(const char *image, const Launcher &launcher) const {
        Patch patch;
        patch.count = 0;
        for (size_t offset = 0; offset < contents_.size(); offset += sizeof(uint64_t)) {
            if (std::memcmp(image + offset, contents_.data() + offset, sizeof(uint64_t)) == 0) continue;
            if (patch.count == kPatchWords) return false;
            std::memcpy(&patch.words[patch.count], image + offset, sizeof(uint64_t));
            patch.offsets[patch.count++] = uint32_t(offset / sizeof(uint64_t));
        }
        patch_words(static_cast<uint64_t *>(tables_.back().get()), patch, launcher);
        return true;
    }

    const Gpu &gpu_;
    std::vector<DeviceMemory> tables_; // the last table is in use, graphs read the other tables
    std::vector<char> contents_;       // of the last table; empty = unknown
    bool captured_ = false;            // a graph reads the last table, which must not change
};

/// Returns the StepTable that begins at StepPlan::jobs, in device memory. In a new workspace, also writes the data that
/// is derived from the table.
inline StepTable upload_table(const StepPlan &plan, const DeviceWorkspace &device_workspace, const Launcher &launcher) {
    const StepShape &shape = plan.execution.shape;
    const char *const image = reinterpret_cast<const char *>(plan.jobs);
    const size_t bytes = shape.table_bytes;
    Cache *const cache = static_cast<Cache *>(plan.execution.cache);
    const bool is_new = cache == nullptr || cache->workspace != plan.execution.device_workspace;
    if (is_new && cache != nullptr && capturing(launcher.stream))
        throw Error(DSOPT_ERR_STATE, "run one step before capturing: the first step allocates tables");
    void *table = device_workspace.table;
    if (cache != nullptr)
        table = cache->upload_if_changed(image, bytes, plan.execution.reuse == Reuse::all, launcher);
    else
        launcher.upload(table, image, bytes);
    const StepTable on_device(table, shape);
    if (plan.slice_jobs != nullptr && (cache == nullptr || cache->slice_map != device_workspace.slice_map)) {
        map_leaves(on_device.slice_jobs, {device_workspace.slice_map, nullptr}, nullptr, plan.count, launcher);
        if (cache != nullptr) cache->slice_map = device_workspace.slice_map;
    }
    if (!is_new) return on_device;
    map_leaves(on_device.jobs, device_workspace.map, device_workspace.cell, plan.count, launcher);
    if (const OwnedLayout *const layout = shape.exchange; layout != nullptr)
        launcher.upload(device_workspace.layout, layout->bytes,
                        [&](char *to) { std::memcpy(to, layout->block.get(), layout->bytes); });
    if (cache != nullptr)
        cache->workspace = plan.execution.device_workspace; // last: if a call above fails, the next step repeats it
    return on_device;
}

} // namespace dsopt::gpu
