// SPDX-License-Identifier: Apache-2.0
// The exchange of a step's buckets, which begins while gradients are still missing.
#pragma once
#include "base/worker.h"
#include "optimizer/plan.h"
#include <exception>
#include <memory>
#include <vector>

namespace dsopt {

/// Buckets are exchanged from the last one to the first: one is begun when all its gradients are there and the one
/// after it has begun. If the comms allow it, the optimizer's thread does it, from a copy of the gradients; else the
/// calling thread. The methods are called by one thread at a time.
class BucketExchange : NotCopied {
public:
    /// Allocates all but messages of the comms and slots.
    explicit BucketExchange(const Optimizer &optimizer);
    /// Aborts the comms if buckets were sent: other ranks get a status at once.
    ~BucketExchange();

    /// Begins the exchanges of a step, whose plan must live until end(). `phase`: what averaged gradients go through.
    /// `compared`: what the ranks compare before each bucket, lists before the first one. Holds the comms.
    void begin(const Optimizer::Planned &planned, std::optional<Phase> phase, std::optional<Compared> compared);
    /// Allocates memory for buckets that are copied.
    void make_slots();
    std::optional<Phase> phase() const { return phase_; }
    /// Of the calls that follow, if exchanges are enqueued.
    void set_stream(void *stream) {
        if (in_this_thread()) plan_.execution.stream = stream;
    }
    bool has_begun() const { return planned_ != nullptr; }
    /// True if a bucket was sent, or may have been.
    bool has_sent() const { return next_ + 1 != buckets_; }
    bool has_left() const { return next_ >= 0; }
    bool compares() const { return compared_.has_value(); }
    /// Sets the gradient of a parameter. The last one of a bucket starts the buckets that are complete now.
    void add(size_t param, const dsopt_tensor &gradient);
    /// Sets the gradient of a parameter, and starts nothing.
    void set(size_t param, const dsopt_tensor &gradient) {
        planned_->memory.averaged[param] = gradient;
        dtypes_[param] = gradient.dtype;
    }
    /// Sets zeros of the dtype that was sent last.
    void set_zeros(size_t param, int64_t numel) { set(param, {nullptr, numel, dtypes_[param], 0}); }
    /// What was averaged is not used.
    void drop_results() { phase_.reset(); }
    /// Exchanges the buckets that are left, with the gradients of StepRows::averaged, in this thread. Throws what an
    /// exchange has thrown.
    void finish(const Parallel &parallel);
    /// Waits for the bucket of a parameter, or if it has not begun, for all that have.
    void wait_for(size_t param);
    /// Waits for all that were started. Does not throw.
    void wait() noexcept { worker_.wait(); }
    /// Throws what an exchange has thrown.
    void check() const;
    bool has_failed() const { return failed_.load(); }
    /// Ends the step.
    void end();

    /// Returns the index from which on all gradients are free.
    int64_t free_from();

private:
    bool in_this_thread() const;
    void start(bool here);
    void exchange(int64_t task) noexcept;
    void run(int bucket);
    void run_phase(const StepRun &step, int bucket);
    void fail() noexcept;
    template <class Body> void for_comms(const Body &body) const {
        for (Comm *comm : {optimizer_.attachments().data.get(), optimizer_.attachments().node.get()})
            if (comm != nullptr) body(*comm);
    }

    const Optimizer &optimizer_;
    std::optional<Phase> phase_;
    const int buckets_;
    const int64_t capacity_;               // bytes of a slot
    std::vector<int64_t> sizes_, missing_; // number of parameters of each bucket; of those that have no gradient yet
    std::vector<Memory> slots_;
    std::vector<const char *> packed_; // of each bucket; NULL: not packed
    std::vector<int32_t> dtypes_;      // in which gradients were sent last
    std::vector<dsopt_tensor> lists_;  // StepRows::lists of the calling thread
    const Optimizer::Planned *planned_ = nullptr;
    StepPlan plan_; // of the thread that exchanges
    std::optional<Compared> compared_;
    int next_, free_bucket_;
    std::exception_ptr error_;
    std::atomic<bool> failing_{false}, failed_{false};
    Worker worker_; // last: its thread uses the others
};

} // namespace dsopt
