// SPDX-License-Identifier: Apache-2.0
// Tables of tensors and groups that kernels of a step read: uploaded to the device, and reused while they are
// unchanged.
#pragma once
#include "device/device.h"
#include "launcher.h"

namespace dsopt::gpu {

/// Map from leaves to their tensors, and the leaf counts of tensors.
struct LeafMap {
    int32_t *tensor_of_leaf;
    int32_t *tensor_leaves; // number of leaves of each tensor
};

/// Arrays in Execution::extra.
struct DeviceWorkspace {
    char *table;
    LeafMap map;
    double *squares, *updates; // one per tensor
    int32_t *cell;             // one per tensor
    char *layout;              // the block of an exchange's layout
    size_t bytes;

    /// `memory` NULL: only computes `bytes`.
    DeviceWorkspace(void *memory, const StepShape &shape) {
        Arena pieces(memory);
        pieces.take_bytes(table, StepTable(nullptr, shape).bytes);
        pieces.take(map.tensor_of_leaf, shape.leaves);
        pieces.take(map.tensor_leaves, shape.tensors);
        pieces.take(squares, shape.tensors);
        pieces.take(updates, shape.tensors);
        pieces.take(cell, shape.tensors);
        pieces.take_bytes(layout, shape.exchange != nullptr ? shape.exchange->bytes : 0);
        bytes = pieces.bytes();
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
    Mark marks_[DSOPT_MS_PHASES + 1]; // each phase occurs at most once
    int count_ = 0;
};

constexpr int kPatchWords = 1024; // 12 KiB of kernel arguments
struct Patch {
    uint64_t words[kPatchWords];
    uint32_t at[kPatchWords]; // offsets, in words
    int32_t count;
};
void patch_words(uint64_t *table, const Patch &patch, const Launcher &launcher);
/// Makes the map. Sets the cell of tensors without elements to -1 (none), because no other kernel visits them.
void map_leaves(const TensorJob *jobs, const LeafMap &map, int32_t *cell, int64_t count, const Launcher &launcher);

/// The table that the steps of one optimizer read, and the host's copy of its contents. The table has its own memory:
/// steps without a cache upload theirs to the workspace.
class Cache final : public StepCache {
public:
    const void *workspace = nullptr; // the workspace whose map and layout are written
    Marks marks;

    explicit Cache(const Gpu &gpu) : marks(gpu), gpu_(gpu) {}
    void add_phase_times(double *ms) const override {
        const OnDevice on(gpu_);
        marks.add_times(ms);
    }

    /// Returns `image` in device memory. `repeats`: `image` is identical to that of the last step. An unchanged table
    /// costs nothing, up to kPatchWords changed words cost one small kernel, more changes cost an upload.
    void *upload_if_changed(const char *image, size_t bytes, bool repeats, const Launcher &launcher) {
        const bool in_capture = capturing(launcher.stream), known = !contents_.empty();
        if (known && (repeats || std::memcmp(image, contents_.data(), bytes) == 0)) {
            captured_ = captured_ || in_capture;
            return tables_.back().get();
        }
        if (captured_ && in_capture)
            throw Error(DSOPT_ERR_STATE,
                        "the lists changed since an earlier capture: run one step without capture first");
        // A graph keeps its table as it was captured; later steps use another table.
        const bool fresh = tables_.empty() || captured_;
        if (fresh) tables_.push_back(gpu_.device_memory(bytes));
        if (fresh || !known || !patch(image, launcher)) {
            contents_.clear();
            launcher.upload(tables_.back().get(), image, bytes);
        }
        // A captured upload has not run yet, and may never run.
        contents_.assign(image, image + (in_capture ? 0 : bytes));
        captured_ = in_capture;
        return tables_.back().get();
    }

private:
    /// Returns false if too many words have changed.
    bool patch(const char *image, const Launcher &launcher) const {
        Patch patch;
        patch.count = 0;
        for (size_t at = 0; at < contents_.size(); at += sizeof(uint64_t)) {
            if (std::memcmp(image + at, contents_.data() + at, sizeof(uint64_t)) == 0) continue;
            if (patch.count == kPatchWords) return false;
            std::memcpy(&patch.words[patch.count], image + at, sizeof(uint64_t));
            patch.at[patch.count++] = uint32_t(at / sizeof(uint64_t));
        }
        patch_words(static_cast<uint64_t *>(tables_.back().get()), patch, launcher);
        return true;
    }

    const Gpu &gpu_;
    std::vector<DeviceMemory> tables_; // the last one is in use, graphs read the others
    std::vector<char> contents_;       // of the last table; empty = unknown
    bool captured_ = false;            // a graph reads the last table, which must not change
};

/// Returns the StepTable that begins at StepPlan::jobs, in device memory. In a new workspace, also writes the data that
/// is derived from the table.
inline StepTable upload_table(const StepPlan &plan, const DeviceWorkspace &device_workspace, const Launcher &launcher) {
    const StepShape &shape = plan.how.shape;
    const char *const image = reinterpret_cast<const char *>(plan.jobs);
    const size_t bytes = StepTable(nullptr, shape).bytes;
    Cache *const cache = static_cast<Cache *>(plan.how.cache);
    const bool fresh = cache == nullptr || cache->workspace != plan.how.device_workspace;
    if (fresh && cache != nullptr && capturing(launcher.stream))
        throw Error(DSOPT_ERR_STATE, "run one step before capturing: the first step allocates tables");
    void *table = device_workspace.table;
    if (cache != nullptr)
        table = cache->upload_if_changed(image, bytes, plan.how.repeats == Reuse::all, launcher);
    else
        launcher.upload(table, image, bytes);
    const StepTable there(table, shape);
    if (!fresh) return there;
    map_leaves(there.jobs, device_workspace.map, device_workspace.cell, plan.count, launcher);
    if (const OwnedLayout *const layout = shape.exchange; layout != nullptr)
        launcher.upload(device_workspace.layout, layout->bytes,
                        [&](char *to) { std::memcpy(to, layout->block.get(), layout->bytes); });
    if (cache != nullptr)
        cache->workspace = plan.how.device_workspace; // last: if a call above fails, the next step repeats it
    return there;
}

} // namespace dsopt::gpu
