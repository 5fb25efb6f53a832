// SPDX-License-Identifier: Apache-2.0
#include "optimizer/buckets.h"
#include "step/agree.h"
#include "step/average.h"
#include <algorithm>

namespace dsopt {
namespace {

constexpr int kInFlight = 2; // buckets, unless the caller says another number
constexpr auto kNothing = [] {};

/// Returns the bytes of the largest packed bucket of at most twice the size of buckets.
int64_t capacity_of(const Optimizer &optimizer) {
    const RowLayout &layout = optimizer.parts()->layout();
    int64_t capacity = 0;
    for (int bucket = 0; bucket < optimizer.parts()->buckets(); ++bucket) {
        const ListVector &vector = layout.section(bucket).vectors[0];
        int64_t numel = 0, bytes = 0;
        for (size_t i = 0; i < vector.tensors(); ++i) numel += vector.range(i).numel;
        if (numel / 2 > optimizer.desc().bucket) continue;
        for (int64_t stripe = layout.first_stripe(bucket); stripe < layout.first_stripe(bucket + 1); ++stripe)
            bytes += layout.ranks() * layout.row_bytes(stripe, [](size_t) { return int64_t(sizeof(float)); });
        capacity = std::max(capacity, bytes);
    }
    return capacity;
}

} // namespace

BucketExchange::BucketExchange(const Optimizer &optimizer) :
    optimizer_(optimizer),
    buckets_(optimizer.parts()->buckets()),
    capacity_(capacity_of(optimizer)),
    sizes_(size_t(buckets_)),
    missing_(size_t(buckets_)),
    packed_(size_t(buckets_)),
    dtypes_(optimizer.params().size()),
    lists_(in_this_thread() ? 0 : size_t(2 * optimizer.parts()->layout().max_pieces())),
    next_(buckets_ - 1),
    free_bucket_(buckets_),
    worker_([this](int64_t task) { exchange(task); }) {
    for (size_t i = 0; i < optimizer.params().size(); ++i)
        if (optimizer.parts()->is_in_bucket(i)) ++sizes_[size_t(optimizer.parts()->bucket_of(i))];
    missing_ = sizes_;
}

void BucketExchange::make_slots() {
    const int wanted = optimizer_.desc().buckets_in_flight;
    const int count = in_this_thread() ? 0 : std::min(wanted != 0 ? wanted : kInFlight, buckets_);
    while (int(slots_.size()) < count) slots_.emplace_back(optimizer_.shared_context(), size_t(capacity_), nullptr);
}

BucketExchange::~BucketExchange() {
    if (!has_begun() || !worker_.is_of_this_process()) return;
    try {
        optimizer_.context().check_process();
    } catch (const Error &) { return; } // other threads of the parent may have held locks of the comms
    if (has_sent()) for_comms([](Comm &comm) { comm.abort(); });
    worker_.wait();
    end();
}

/// True if the thread whose call completes a bucket exchanges it. On CUDA that is enqueued on its stream.
bool BucketExchange::in_this_thread() const {
    const auto takes = [](const Comm *comm) { return comm == nullptr || comm->any_thread(); };
    return !optimizer_.context().device().is_host() || !takes(optimizer_.attachments().data.get()) ||
           !takes(optimizer_.attachments().node.get());
}

void BucketExchange::begin(const Optimizer::Planned &planned, std::optional<Phase> phase,
                           std::optional<Compared> compared) {
    const CommUser user(&optimizer_);
    try {
        for_comms([this](Comm &comm) { comm.hold(&optimizer_); });
        reserve(planned.run(optimizer_, kNothing, compared ? kComparedBytes : 0));
    } catch (...) {
        for_comms([this](Comm &comm) { comm.release(&optimizer_); });
        throw;
    }
    plan_ = planned.plan;
    if (!in_this_thread()) plan_.execution.parallel = optimizer_.context().own_parallel();
    phase_ = phase;
    compared_ = compared;
    planned_ = &planned;
}

void BucketExchange::add(size_t param, const dsopt_tensor &gradient) {
    set(param, gradient);
    const RankParts &parts = *optimizer_.parts();
    if (!parts.is_in_bucket(param)) return;
    --missing_[size_t(parts.bucket_of(param))];
    while (next_ >= 0 && missing_[size_t(next_)] == 0) start(in_this_thread());
}

/// Starts the next bucket.
void BucketExchange::start(bool here) {
    const auto bucket = size_t(next_);
    packed_[bucket] = nullptr;
    if (!here && !has_failed()) {
        StepRows rows = *planned_->rows;
        rows.lists = lists_.data();
        StepRun run = planned_->run(optimizer_, kNothing, 0);
        run.rows = &rows;
        if (packed_bytes(run, next_) <= capacity_) {
            const size_t slot = bucket % slots_.size();
            // The bucket that was in this memory before.
            worker_.wait_for(std::max<int64_t>(buckets_ - int64_t(bucket + slots_.size()), 0));
            auto *const to = static_cast<char *>(slots_[slot].data());
            try {
                unusable_on_failure(run.comms, [&] { pack_bucket(run, next_, to); });
                packed_[bucket] = to;
            } catch (...) { fail(); } // of a hook: as an exchange that fails
        }
    }
    --next_;
    worker_.add(here);
}

void BucketExchange::exchange(int64_t task) noexcept {
    if (has_failed()) return; // the comms of all ranks are at the same place
    try {
        const CommUser user(&optimizer_);
        run(int(buckets_ - 1 - task));
    } catch (...) { fail(); }
}

/// Stores the exception that is being handled, unless there is one.
void BucketExchange::fail() noexcept {
    if (failing_.exchange(true)) return;
    error_ = std::current_exception();
    failed_.store(true);
}

void BucketExchange::run(int bucket) {
    const StepRun run = planned_->run(optimizer_, kNothing, 0);
    const StepRun step{.context = run.context,
                       .plan = plan_,
                       .phases = run.phases,
                       .compare = kNothing,
                       .compared_bytes = 0,
                       .comms = run.comms,
                       .host_norms = run.host_norms,
                       .rows = run.rows,
                       .zeroed = nullptr,
                       .parts = {}};
    const bool is_first = bucket == buckets_ - 1;
    const TensorInterval tensors = optimizer_.parts()->tensors_of(bucket);
    if (compared_) {
        Compared compared = *compared_;
        compared.lists = compared.lists && is_first;
        compared.of = Compared::Of::in_buckets;
        compared.gradients = tensors;
        check_ranks(optimizer_, plan_, run.phases, run.rows, compared);
    }
    unusable_on_failure(run.comms, [&] {
        average_bucket(step, bucket, packed_[size_t(bucket)]);
        if (phase_) run_phase(step, bucket);
    });
}

void BucketExchange::run_phase(const StepRun &step, int bucket) {
    const bool is_first = bucket == buckets_ - 1;
    const TensorInterval tensors = optimizer_.parts()->tensors_of(bucket);
    drive_part(step, *phase_, is_first, [&](FunctionRef<void(const TensorInterval &)> body) {
        // Without whole tensors of matrices, which are averaged by the step.
        for (int64_t i = tensors.first; i < tensors.end(); ++i) {
            if (!optimizer_.parts()->is_in_bucket(size_t(i))) continue;
            TensorInterval each{i, 1};
            while (each.end() < tensors.end() && optimizer_.parts()->is_in_bucket(size_t(each.end()))) ++each.count;
            body(each);
            i = each.end() - 1;
        }
    });
}

void BucketExchange::finish(const Parallel &parallel) {
    worker_.wait();
    plan_.execution.parallel = parallel; // of the step
    while (next_ >= 0 && !has_failed()) start(true);
    check();
}

void BucketExchange::wait_for(size_t param) {
    worker_.wait_for(std::min<int64_t>(worker_.added(), buckets_ - optimizer_.parts()->bucket_of(param)));
    check();
}

void BucketExchange::check() const {
    if (failed_.load()) std::rethrow_exception(error_);
}

void BucketExchange::end() {
    for_comms([this](Comm &comm) { comm.release(&optimizer_); });
    missing_ = sizes_;
    next_ = buckets_ - 1;
    free_bucket_ = buckets_;
    planned_ = nullptr;
    error_ = nullptr;
    failed_.store(false);
    failing_.store(false);
    worker_.restart();
}

int64_t BucketExchange::free_from() {
    while (free_bucket_ - 1 > next_ &&
           (packed_[size_t(free_bucket_ - 1)] != nullptr || worker_.done() >= buckets_ - free_bucket_ + 1))
        --free_bucket_;
    return free_bucket_ < buckets_ ? optimizer_.parts()->tensors_of(free_bucket_).first
                                   : int64_t(optimizer_.params().size());
}

} // namespace dsopt
