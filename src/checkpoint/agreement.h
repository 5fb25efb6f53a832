// SPDX-License-Identifier: Apache-2.0
// Ranks that save or load sharded state together: all of them succeed, or none changes anything.
#pragma once
#include "optimizer/optimizer.h"

namespace dsopt {

/// Words that ranks compare.
using AgreedWords = std::array<int32_t, 8>;

/// One agreement of the ranks of an optimizer. Does nothing unless its state is sharded. `function`: the call that all
/// ranks must make, for the text of a time-out. `failed`: what a rank did that could not go on, such as "could not save".
class Agreement : NotCopied {
public:
    Agreement(const Optimizer &optimizer, const char *function, const char *failed) :
        optimizer_(optimizer),
        function_(function),
        failed_(failed) {}
    /// Waits for all ranks, and throws MISMATCH if one of them failed. Otherwise returns true if every word is the same
    /// on all ranks, and sets `words` to the maxima. Called once.
    bool reach(AgreedWords &words);
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
    const char *const function_, *const failed_;
    bool reached_ = false;
};

} // namespace dsopt
