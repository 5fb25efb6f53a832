// SPDX-License-Identifier: Apache-2.0
// Ranks that save or load sharded state together: all of them succeed, or none changes anything.
#pragma once
#include "optimizer/optimizer.h"

namespace dsopt {

/// Words that ranks compare.
using AgreedWords = std::array<int32_t, 8>;

/// A point of a call at which ranks agree.
enum class CallPoint : int32_t { save_begins = 1, save_is_written, save_is_placed, save_is_kept, load_begins };

/// What must be the same on all ranks, by name. The ranks' lists may differ in length.
class Alike {
public:
    /// `text`: the value, for messages.
    void add(std::string name, std::string text);
    /// Adds contents that are compared by a hash.
    void add(std::string name, const void *data, size_t bytes);
    size_t size() const { return entries_.size(); }
    /// Returns a hash of an entry, 0 behind the last one.
    uint64_t key(size_t i) const { return i < entries_.size() ? entries_[i].key : 0; }
    uint64_t hash() const { return hash_; }
    /// Returns "group.0.lr, which is 0.1 on this rank".
    std::string describe(size_t i) const;

private:
    struct Entry {
        std::string name, text;
        uint64_t key;
    };
    std::vector<Entry> entries_;
    uint64_t hash_ = 0;
};

/// One agreement of the ranks of an optimizer. Does nothing unless its state is sharded. `function`: the call that all
/// ranks must make, for texts. `failed`: what a rank did that could not go on, such as "could not save".
class Agreement : NotCopied {
public:
    Agreement(const Optimizer &optimizer, CallPoint point, const char *function, const char *failed) :
        optimizer_(optimizer),
        point_(point),
        function_(function),
        failed_(failed) {}
    /// Waits for all ranks. Throws MISMATCH if one of them failed, is at another point, or has something else in
    /// `alike`. Otherwise returns true if every word is the same on all ranks, and sets `words` to the maxima. Called
    /// once.
    bool reach(AgreedWords &words, const Alike &alike = {});
    /// Calls body(), which calls reach(). If it throws before that, the other ranks learn that this rank failed.
    template <class Body> void run(const Body &body) {
        try {
            body();
        } catch (...) {
            if (!reached_) report_failure();
            throw;
        }
    }

private:
    void report_failure() noexcept;

    const Optimizer &optimizer_;
    const CallPoint point_;
    const char *const function_, *const failed_;
    bool reached_ = false;
};

} // namespace dsopt
