// SPDX-License-Identifier: Apache-2.0
// How lists are shared out among threads.
#pragma once
#include "device/plan.h"
#include <algorithm>
#include <vector>

namespace dsopt::cpu {

/// Lists that do not stay in a last-level cache of usual size; below it who reads next finds the results there.
constexpr bool leaves_caches(int64_t bytes) { return bytes > int64_t(64) << 20; }

/// A list laid out as one line of bytes and cut into equal parts at chunk borders. The cut follows from the list and
/// the number of parts alone, so nothing has to be handed out while it runs.
class Cut {
public:
    /// bytes(i): how many an element of tensor i moves. `ruler` has room for count + 1.
    template <class Bytes, class Numel>
    Cut(int64_t count, int64_t *ruler, int64_t chunk, const Parallel &parallel, const Bytes &bytes,
        const Numel &numel) :
        count_(count),
        ruler_(ruler),
        chunk_(chunk),
        parallel_(parallel) {
        ruler[0] = 0;
        for (int64_t i = 0; i < count; ++i) ruler[i + 1] = ruler[i] + numel(i) * bytes(i);
        // A part below 256 KiB is done before another thread has woken up.
        parts_ = std::clamp<int64_t>(ruler[count] >> 18, 1, parallel.threads);
    }

    /// visit(tensor, begin, end) for every piece, on all threads.
    template <class Numel, class Visit> void run(const Numel &numel, const Visit &visit) const {
        parallel_.run(parts_, [&](int64_t part) {
            const DefaultFloatEnvironment environment;
            const Position first = position(part, numel), last = position(part + 1, numel);
            for (int64_t i = first.tensor; i < count_ && i <= last.tensor; ++i) {
                const int64_t begin = i == first.tensor ? first.element : 0;
                const int64_t end = i == last.tensor ? last.element : numel(i);
                if (begin < end) visit(i, begin, end);
            }
        });
    }

    int64_t bytes() const { return ruler_[count_]; }

private:
    struct Position {
        int64_t tensor, element;
    };
    template <class Numel> Position position(int64_t part, const Numel &numel) const {
        if (part == parts_) return {count_, 0};
        const int64_t at = int64_t(__int128(ruler_[count_]) * part / parts_);
        const int64_t tensor = std::upper_bound(ruler_, ruler_ + count_, at) - ruler_ - 1;
        if (tensor < 0 || numel(tensor) == 0) return {std::max<int64_t>(tensor, 0), 0};
        const int64_t element = (at - ruler_[tensor]) / ((ruler_[tensor + 1] - ruler_[tensor]) / numel(tensor));
        return {tensor, element / chunk_ * chunk_};
    }
    int64_t count_;
    const int64_t *ruler_;
    int64_t chunk_;
    const Parallel &parallel_;
    int64_t parts_;
};

/// Cut of a plain list. Passed over: entries without data.
class ListCut {
public:
    ListCut(const dsopt_tensor *list, int64_t count, const Parallel &parallel) :
        list_(list),
        long_ruler_(count < kShort ? 0 : size_t(count) + 1),
        cut_(
            count, count < kShort ? short_ruler_ : long_ruler_.data(), kLeaf, parallel,
            [&](int64_t i) { return int64_t(dtype_size(list[i].dtype)); },
            [&](int64_t i) { return list[i].data != nullptr ? list[i].numel : 0; }) {}
    template <class Visit> void run(const Visit &visit) const {
        cut_.run([&](int64_t i) { return list_[i].data != nullptr ? list_[i].numel : 0; }, visit);
    }

private:
    static constexpr int64_t kShort =
        32; // such a list needs no memory, so what works on it cannot fail for want of any
    const dsopt_tensor *list_;
    int64_t short_ruler_[kShort];
    std::vector<int64_t> long_ruler_;
    Cut cut_;
};

} // namespace dsopt::cpu
