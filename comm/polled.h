// SPDX-License-Identifier: Apache-2.0
// Base of the endpoints that poll their library, with a time-out, in place of a blocking wait.
#pragma once
#include "comm/bounded.h"
#include "comm/provider.h"

namespace dsopt {

/// Endpoint of one rank. Waits until its library is done, the time-out has passed, or any thread has called abort().
class PolledEndpoint : NotCopied {
public:
    PolledEndpoint(int ranks, int timeout_ms) : ranks_(ranks), timeout_ms_(timeout_ms) {}

    void abort() noexcept { abort_requested_.store(true); }
    /// Copies the reason why the last call failed.
    void describe(char *text, size_t capacity) {
        const std::lock_guard lock(text_mutex_);
        copy_text(text_, text, capacity);
    }

protected:
    int ranks() const { return ranks_; }
    void set_ranks(int ranks) { ranks_ = ranks; } // once the library has reported the number
    int timeout_ms() const { return timeout_ms_; }
    bool abort_requested() const noexcept { return abort_requested_.load(); }
    Deadline deadline() const { return Deadline(timeout_ms_); }
    void set_text(std::string text) {
        const std::lock_guard lock(text_mutex_);
        text_ = std::move(text);
    }
    /// Polls until query() returns a status; query() returns nullopt while the library is busy.
    template <class Query> dsopt_status poll_until(const Deadline &deadline, const Query &query) {
        std::optional<dsopt_status> status;
        const bool completed = poll(deadline, [&] {
            status = query();
            if (!status && abort_requested()) {
                set_text("the comm was aborted");
                status = DSOPT_ERR_ABORTED;
            }
            return status.has_value();
        });
        if (completed) return *status;
        set_text(ranks_are_missing(ranks_, timeout_ms_));
        return DSOPT_ERR_TIMEOUT;
    }

private:
    int ranks_;
    const int timeout_ms_;
    std::atomic<bool> abort_requested_{false};
    std::mutex text_mutex_;
    std::string text_;
};

} // namespace dsopt
