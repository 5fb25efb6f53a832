// SPDX-License-Identifier: Apache-2.0
// Partitioning of lists among threads.
#pragma once
#include "base/not_copied.h"
#include "cpu/caches.h"
#include "cpu/kernels.h"
#include "cpu/prefetch.h"
#include "device/decide.h"
#include <algorithm>

namespace dsopt::cpu {

/// Returns the number of threads for work on `bytes` bytes. Each has at least 256 KiB: less work takes no longer than
/// waking a thread.
inline int64_t threads_for(int64_t bytes, const Parallel &parallel) {
    return std::clamp<int64_t>(bytes >> 18, 1, parallel.threads);
}

/// Static partition of a list into parts of equal bytes, which begin at multiples of a chunk. The partition depends
/// only on the list and the number of parts, so threads need no work queue. A List has `count`, numel(i) and bytes(i):
/// the bytes that are read and written per element of tensor i.
template <class List> class Partition {
public:
    /// `offsets` receives the byte offset of every `stride`-th tensor, and of the list's end. `reuses_offsets`:
    /// `offsets` already has the offsets of an identical list.
    Partition(const List &list, int64_t *offsets, int64_t stride, int64_t chunk, const Parallel &parallel,
              bool reuses_offsets = false) :
        list_(list),
        offsets_(offsets),
        stride_(stride),
        offset_count_((list.count + stride - 1) / stride),
        chunk_(chunk),
        parallel_(parallel) {
        int64_t offset = 0;
        for (int64_t entry = 0; !reuses_offsets && entry < offset_count_; ++entry) {
            offsets[entry] = offset;
            for (int64_t i = entry * stride; i < end_of(entry); ++i) offset += list.numel(i) * list.bytes(i);
        }
        if (!reuses_offsets) offsets[offset_count_] = offset;
        parts_ = threads_for(bytes(), parallel);
    }

    struct Position {
        int64_t tensor, element;
    };

    /// Calls, on each thread, state = start(first, last) with the bounds of the thread's part, then visit(tensor,
    /// begin, end, state) for each piece, which is the elements of one tensor in that part.
    template <class Start, class Visit> void run(const Start &start, const Visit &visit) const {
        parallel_.run(parts_, [&](int64_t part) {
            const DefaultFloatEnvironment environment;
            const Position first = position(part), last = position(part + 1);
            auto state = start(first, last);
            for (int64_t i = first.tensor; i < list_.count && i <= last.tensor; ++i) {
                const int64_t begin = i == first.tensor ? first.element : 0;
                const int64_t end = i == last.tensor ? last.element : list_.numel(i);
                if (begin < end) visit(i, begin, end, state);
            }
        });
    }

    int64_t bytes() const { return offsets_[offset_count_]; }
    int64_t bytes_of_part() const { return bytes() / parts_; }

private:
    int64_t end_of(int64_t entry) const { return std::min((entry + 1) * stride_, list_.count); }
    Position position(int64_t part) const {
        if (part == parts_) return {list_.count, 0};
        const int64_t offset = int64_t(__int128(bytes()) * part / parts_);
        const int64_t entry = std::upper_bound(offsets_, offsets_ + offset_count_, offset) - offsets_ - 1;
        if (entry < 0) return {0, 0};
        int64_t tensor = entry * stride_, begin = offsets_[entry];
        const auto size = [&] { return list_.numel(tensor) * list_.bytes(tensor); };
        for (; tensor + 1 < end_of(entry) && begin + size() <= offset; ++tensor) begin += size();
        if (list_.numel(tensor) == 0) return {tensor, 0};
        return {tensor, (offset - begin) / list_.bytes(tensor) / chunk_ * chunk_};
    }

    const List list_;
    const int64_t *offsets_;
    int64_t stride_, offset_count_;
    int64_t chunk_;
    const Parallel &parallel_;
    int64_t parts_;
};

/// Number of offsets of partitions that need no memory whatever their list, and the stride of their offsets.
constexpr int64_t kFewOffsets = 64;
constexpr int64_t stride_of(int64_t count) { return std::max<int64_t>((count + kFewOffsets - 1) / kFewOffsets, 1); }

/// Partition of a plain list of any length. Allocates nothing, so that it cannot fail between two collectives. Skips
/// entries without data.
class ListPartition {
public:
    ListPartition(const dsopt_tensor *list, int64_t count, const Parallel &parallel) :
        partition_({list, count}, offsets_, stride_of(count), kLeaf, parallel) {}
    /// Calls visit(tensor, begin, end) for every piece, on all threads.
    template <class Visit> void run(const Visit &visit) const {
        partition_.run([](auto, auto) { return 0; },
                       [&](int64_t i, int64_t begin, int64_t end, int) { visit(i, begin, end); });
    }

private:
    struct List {
        const dsopt_tensor *tensors;
        int64_t count;
        int64_t numel(int64_t i) const { return tensors[i].data != nullptr ? tensors[i].numel : 0; }
        int64_t bytes(int64_t i) const { return int64_t(dtype_size(tensors[i].dtype)); }
    };
    int64_t offsets_[kFewOffsets + 1];
    Partition<List> partition_;
};

/// Partition of a step's tensors.
class StepPartition : NotCopied {
public:
    /// `jobs`: those of the plan, or StepPlan::slice_jobs.
    StepPartition(const StepPlan &plan, const TensorJob *jobs, const CacheSizes &caches, bool bf16_instruction) :
        plan_(plan),
        jobs_(jobs),
        caches_(caches),
        partition_({jobs, plan.count},
                   static_cast<int64_t *>(plan.execution.device_workspace) + (jobs == plan.jobs ? 0 : plan.count + 1),
                   1, plan.execution.chunk, plan.execution.parallel, plan.execution.reuse != Reuse::nothing),
        streaming_(partition_.bytes() > caches.last),
        bf16_instruction_(bf16_instruction) {}
    /// Partition of some of the tensors, for one pass. Its cost does not depend on the number of the others.
    StepPartition(const StepPlan &plan, const TensorJob *jobs, const TensorInterval &tensors, const CacheSizes &caches,
                  bool bf16_instruction) :
        plan_(plan),
        jobs_(jobs + tensors.first),
        first_(tensors.first),
        caches_(caches),
        partition_({jobs_, tensors.count}, few_offsets_, stride_of(tensors.count), plan.execution.chunk,
                   plan.execution.parallel),
        streaming_(partition_.bytes() > caches.last),
        bf16_instruction_(bf16_instruction) {}
    /// Returns the size of Execution::device_workspace in bytes.
    static size_t device_workspace_bytes(const StepShape &shape) {
        return size_t(shape.tensors + 1) * sizeof(int64_t) * (shape.has_slice_jobs ? 2 : 1);
    }

    /// Calls visit(tensor, span) for every piece, on all threads.
    template <class Visit> void run(const Visit &visit) const { run(visit, false); }
    /// The same for the pass that reads and writes all arrays: its kernels prefetch if that is faster. The trial that
    /// finds it out compares passes over all tensors.
    template <class Visit> void run_main_pass(const Visit &visit) const {
        const TimedPass pass(plan_.execution.cache, caches_, partition_.bytes(), partition_.bytes_of_part());
        run(visit, pass.prefetches());
    }

private:
    struct PartState { // one per thread
        PrefetchCursor prefetch;
        const bool streaming;
        ~PartState() {
            if (streaming) fence_streaming();
        }
    };
    template <class Visit> void run(const Visit &visit, bool prefetches) const {
        const auto start = [&](const auto &first, const auto &last) {
            return PartState{{jobs_, first.tensor, first.element, last.tensor, last.element, !streaming_}, streaming_};
        };
        partition_.run(start, [&](int64_t i, int64_t begin, int64_t end, PartState &state) {
            const TensorJob &job = jobs_[i];
            const Rule rule = plan_.groups[job.group].rule;
            i += first_;
            visit(i,
                  Span{.job = &job,
                       .scalars = &plan_.scalars[i],
                       .rule = rule,
                       .begin = begin,
                       .end = end,
                       .flags = plan_.flags,
                       .sums = plan_.policy.report_norms && passes_of(rule) == Passes::elementwise,
                       .sums_a = plan_.leaf.sums_a,
                       .sums_b = plan_.leaf.sums_b,
                       .trust = plan_.trust_ratio != nullptr ? plan_.trust_ratio[i] : 1.0f,
                       .step = plan_.step != nullptr ? step_of(plan_, job) : 0, // pass 1 may run before there is state
                       .streaming = streaming_,
                       .bf16_instruction = bf16_instruction_,
                       .prefetch = prefetches ? &state.prefetch : nullptr});
        });
    }

    struct List {
        const TensorJob *jobs;
        int64_t count;
        int64_t numel(int64_t i) const { return jobs[i].range.numel; }
        int64_t bytes(int64_t i) const {
            const TensorJob &job = jobs[i];
            const auto size = [](const Slot &slot) { return int64_t(dtype_size(slot.format)); };
            int64_t bytes = 2 * size(job.weight()) + size(job.grad());
            for (int k = 0; k < kMoments; ++k)
                bytes += job.data[kMoment + k] ? 2 * size_of(job.formats[kMoment + k]) : 0;
            bytes += job.remainder != nullptr ? 2 * int64_t(sizeof *job.remainder) : 0;
            for (const Slot &written : {job.copy(), job.out()}) bytes += written ? size(written) : 0;
            return bytes;
        }
    };
    const StepPlan &plan_;
    const TensorJob *const jobs_; // of the first tensor
    const int64_t first_ = 0;     // its index in the plan
    const CacheSizes &caches_;
    int64_t few_offsets_[kFewOffsets + 1]; // of some of the tensors
    const Partition<List> partition_;
    const bool streaming_, bf16_instruction_;
};

} // namespace dsopt::cpu
