// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/not_copied.h"
#include <atomic>
#include <cstdint>

namespace dsopt {

/// Lazy initialization by the first thread that needs a value; the other threads wait. forget() allows another
/// initialization. After a failure the next thread tries again.
class Once : NotCopied {
public:
    explicit Once(bool is_made) : state_(is_made ? made : missing) {}
    template <class Make> void get(const Make &make) {
        for (;;) {
            int32_t now = state_.load(std::memory_order_acquire);
            if (now == made) return;
            if (now == being_made) {
                state_.wait(being_made, std::memory_order_acquire);
            } else if (state_.compare_exchange_strong(now, being_made, std::memory_order_acquire)) {
                try {
                    make();
                } catch (...) {
                    end(missing);
                    throw;
                }
                return end(made);
            }
        }
    }
    /// May be called only while no other thread uses the object.
    void forget() { state_.store(missing, std::memory_order_release); }

private:
    enum State : int32_t { missing, being_made, made };
    void end(State state) {
        state_.store(state, std::memory_order_release);
        state_.notify_all();
    }
    std::atomic<int32_t> state_;
};

} // namespace dsopt
