// SPDX-License-Identifier: Apache-2.0
// A step of the 1-bit family on the CPU, in addition to cpu/step.cc.
#pragma once
#include "cpu/compress.h"
#include "cpu/partition.h"
#include "device/step_kernels.h"
#include <cstring>

namespace dsopt::cpu {

/// Folds the results of a tensor's leaves, like LeafFold in cuda/fold.cuh.
struct LeafFold {
    static constexpr bool lead = true;
    static double sum(const double *leaves, int32_t count) {
        return add_in_lanes(count, [&](int64_t leaf) { return leaves[leaf]; });
    }
    static double max(const double *factors, int32_t count) {
        double largest = 0;
        for (int32_t leaf = 0; leaf < count; ++leaf) largest = larger_factor(largest, factors[leaf]);
        return largest;
    }
};

class OneBitStep final : public OneBitStepKernels {
public:
    /// `sent`: of the jobs of OneBitPass::feed.
    OneBitStep(const StepPlan &plan, const Kernels &kernels, const StepPartition &partition,
               const StepPartition &sent) :
        plan_(plan),
        onebit_(*plan.onebit),
        kernels_(kernels),
        partition_(partition),
        sent_(sent),
        exchange_(kernels.onebit, plan.execution.parallel, onebit_.has_peers ? *onebit_.exchange : Exchange()) {
        exchange_.buffers.local.skip = &plan.control->skip;
    }

    void run(ExchangePass pass) override { exchange_.run(pass); }

    void run(OneBitPass pass) override {
        // A skipped step may freeze the variance, too.
        const bool always =
            pass == OneBitPass::find_active || pass == OneBitPass::freeze || pass == OneBitPass::freeze_variance;
        if (!always && is_skipped()) return;
        switch (pass) {
        case OneBitPass::momentum_squares: return momentum_squares();
        case OneBitPass::feed: return feed();
        case OneBitPass::feed_padding: return feed_padding();
        case OneBitPass::apply_mean: return for_local(false, kernels_.onebit.apply_mean);
        case OneBitPass::store_results:
            std::memcpy(onebit_.momentum, mean().results, size_t(mean().layout.messages_bytes()));
            return;
        case OneBitPass::local: return for_local(false, kernels_.onebit.local);
        case OneBitPass::decompress_padding: {
            const CompressLayout::ScaleGroup &group = mean().layout.groups[0];
            return kernels_.onebit.mean(view_of(0), group.begin + group.used, group.numel - group.used, onebit_.padding,
                                        nullptr, false);
        }
        case OneBitPass::lamb_moments:
            return for_local(false, [&](const OneBitSpan &span) { kernels_.onebit.lamb_mean(span, onebit_.factors); });
        case OneBitPass::lamb_weights: return for_local(false, kernels_.onebit.lamb_weights);
        case OneBitPass::find_active: return find_active();
        case OneBitPass::freeze: return freeze(false);
        case OneBitPass::freeze_variance: return freeze(true);
        }
    }

    void decide(OneBitDecision decision) override {
        const bool skipped = is_skipped();
        const auto for_tensors = [&](const auto &body) {
            for (int64_t i = 0; !skipped && i < plan_.count; ++i) body(i);
        };
        const auto for_groups = [&](const auto &body) {
            for (int64_t g = 0; !skipped && g < plan_.group_count; ++g) body(g);
        };
        switch (decision) {
        case OneBitDecision::begin:
            for_tensors([&](int64_t i) { begin_tensor(onebit_, i); });
            return for_groups([&](int64_t g) { begin_group(plan_, onebit_, g); });
        case OneBitDecision::scale_momenta: {
            if (skipped || has_momentum_scaling(onebit_)) return;
            for_tensors([&](int64_t i) { find_momentum_rms(plan_, onebit_, i, LeafFold()); });
            const double mean =
                add_in_lanes(plan_.count, [&](int64_t i) { return share_of_mean_rms(plan_, onebit_, i); });
            return for_tensors([&](int64_t i) { scale_momentum(onebit_, i, mean); });
        }
        case OneBitDecision::trust:
            return for_tensors([&](int64_t i) { find_frozen_trust(plan_, onebit_, i, LeafFold()); });
        case OneBitDecision::shared_trust:
            return for_tensors([&](int64_t i) { store_shared_frozen_trust_ratio(plan_, onebit_, i); });
        case OneBitDecision::end:
            for_tensors([&](int64_t i) { end_tensor(plan_, onebit_, i); });
            for_groups([&](int64_t g) { end_group(onebit_, g); });
            return end_schedule(onebit_, !skipped);
        }
    }

private:
    bool is_skipped() const { return plan_.control->skip != 0; }
    const Compression &local() const { return exchange_.buffers.local; }
    const ListMean &mean() const { return exchange_.buffers.mean; }
    /// Returns the location of a scale group's mean. MeanView::of is NULL if there are no other ranks.
    MeanView view_of(int32_t group) const { return {onebit_.has_peers ? &mean() : nullptr, mean().results, group}; }

    void momentum_squares() const {
        if (has_momentum_scaling(onebit_)) return;
        partition_.run([&](int64_t, const Span &span) {
            kernels_.squares(span.job->moment(0), span.begin, span.end, plan_.leaf.sums_a,
                             span.job->first_leaf + span.begin / kLeaf);
        });
    }

    void feed() const {
        if (!feed_also_packs(onebit_)) return for_local(true, kernels_.onebit.feed);
        // A scale group is one tensor and has the same leaves, so each leaf is packed while it is in the cache.
        for_local(true, [&](OneBitSpan &span) {
            for (const int64_t end = span.end; span.begin < end; span.begin += kLeaf) {
                span.end = std::min(span.begin + kLeaf, end);
                kernels_.onebit.feed(span);
                pack_leaf(kernels_.onebit, local(), span.mean.group, span.begin / kLeaf);
            }
        });
    }

    void feed_padding() const {
        const CompressLayout &layout = local().layout;
        for (int32_t i = 0; i < layout.group_count; ++i) {
            const CompressLayout::ScaleGroup &group = layout.groups[i];
            if (group.numel > group.used)
                kernels_.onebit.add_residual(onebit_.padding, local().worker + group.begin + group.used,
                                             local().worker_scales()[i], group.numel - group.used);
        }
    }

    void find_active() const {
        partition_.run([&](int64_t i, const Span &span) {
            const int64_t worker = onebit_.jobs[i].worker; // a multiple of 32, like all other terms of the index
            const int64_t first = worker + span.job->begin() - mean().begin;
            const auto *v = static_cast<const float *>(span.job->data[kMoment + 1]);
            for (int64_t k = span.begin; worker >= 0 && k < span.end; k += 32) {
                uint32_t word = 0;
                for (int64_t b = 0; b < 32 && k + b < span.end; ++b) word |= uint32_t(has_variance(v[k + b])) << b;
                onebit_.active[(first + k) / 32] = int32_t(word);
            }
        });
    }

    void freeze(bool copies_variance) const {
        if (!freezes(onebit_, is_skipped())) return;
        for (int64_t i = 0; i < plan_.count; ++i) {
            const TensorJob &job = plan_.jobs[i];
            const OneBitJob &onebit_job = onebit_.jobs[i];
            const auto bytes = size_t(job.range.numel) * sizeof(float);
            if (bytes == 0) continue;
            if (copies_variance && onebit_job.fresh_variance != nullptr)
                std::memcpy(onebit_job.fresh_variance, job.data[kMoment + 1], bytes);
            if (onebit_job.anchor != nullptr) std::memcpy(onebit_job.anchor, job.data[kWeight], bytes);
        }
        if (!clears_residuals(onebit_, mean())) return;
        // A buffer without elements is NULL, which must not be passed to memset().
        std::fill_n(local().worker, local().layout.worker_floats(), 0.0f);
        std::fill_n(local().server, local().layout.server_floats(), 0.0f);
    }

    /// `feeding`: before the exchange, when the momentum may still be in the results of the previous exchange.
    OneBitSpan span_of(int64_t i, const Span &plain, bool feeding) const {
        const OneBitJob &job = onebit_.jobs[i];
        OneBitSpan span(plain);
        span.feed = onebit_.feed;
        span.onebit = onebit_scalars(onebit_, i, plain.job->group);
        span.steps = onebit_.feed_steps;
        // Arrays of the family are whole if slice jobs have only the ranges of a slice.
        const int64_t begin = plain.job->begin(), moved = feeding && plan_.slice_jobs != nullptr ? begin : 0;
        span.track = job.track() != nullptr ? job.track() + moved : nullptr;
        span.fresh_variance = job.fresh_variance;
        span.mask = job.mask;
        if (job.worker < 0) return span; // no other ranks
        span.in_mean = job.worker + begin - mean().begin;
        span.in_local = job.worker + begin - local().begin;
        span.compensated = local().worker;
        span.scale = local().worker_scales()[job.scale_group];
        span.active = mean().active;
        span.mean = view_of(job.scale_group);
        span.momentum_in_results = onebit_.momentum != nullptr;
        if (feeding && span.momentum_in_results && onebit_.schedule->momentum_in_bits != 0)
            span.momentum = {&mean(), onebit_.momentum, job.scale_group};
        return span;
    }

    template <class Visit> void for_local(bool feeding, const Visit &visit) const {
        (feeding ? sent_ : partition_).run([&](int64_t i, const Span &span) {
            if (span.job->owner != Owner::exchange) return;
            OneBitSpan local = span_of(i, span, feeding);
            visit(local);
        });
    }

    const StepPlan &plan_;
    const OneBitPlan &onebit_;
    const Kernels &kernels_;
    const StepPartition &partition_, &sent_;
    ExchangeRun exchange_;
};

} // namespace dsopt::cpu
