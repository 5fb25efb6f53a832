// SPDX-License-Identifier: Apache-2.0
// Loops of the 1-bit family on the CPU, beside those of cpu/step.cc.
#pragma once
#include "cpu/compress.h"
#include "cpu/cut.h"
#include "device/step_loops.h"
#include <cstring>

namespace dsopt::cpu {

class OneBitStep final : public OneBitLoops {
public:
    OneBitStep(const StepPlan &plan, const Kernels &kernels, const StepCut &cut) :
        plan_(plan),
        onebit_(*plan.onebit),
        kernels_(kernels),
        cut_(cut) {
        if (onebit_.exchanges) buffers_ = *onebit_.buffers;
        buffers_.skip = &plan.control->skip;
    }

    const ExchangeBuffers &buffers() const override { return buffers_; }

    void begin() override {
        if (is_skipped()) return;
        for (int64_t i = 0; i < plan_.count; ++i) begin_tensor(onebit_, i);
        for (int64_t g = 0; g < plan_.group_count; ++g) begin_group(plan_, onebit_, g);
    }

    void scale_momenta() override {
        float *const scaling = onebit_.trust_scaling;
        if (is_skipped() || plan_.count == 0 || scaling[0] != 0) return;
        cut_.run([&](int64_t, const Span &span) {
            kernels_.squares(span.job->moment(0), span.begin, span.end, plan_.sums_a,
                             span.job->first_leaf + span.begin / kLeaf);
        });
        for (int64_t i = 0; i < plan_.count; ++i)
            scaling[i] = rms_of(fold_leaves(plan_.sums_a, plan_.jobs[i]), plan_.jobs[i].numel);
        const double mean =
            add_in_lanes(plan_.count, [&](int64_t i) { return double(scaling[i]) / double(plan_.count); });
        for (int64_t i = 0; i < plan_.count; ++i) scaling[i] = scaling[i] > 0 ? float(mean / double(scaling[i])) : 1.0f;
    }

    void feed(Feed feed) override {
        const auto all = [&] { for_own(feed, true, kernels_.onebit.feed); };
        if (!onebit_.exchanges) {
            if (feed == Feed::distance) all();
            return;
        }
        if (buffers_.layout->has_levels()) {
            clear_gaps(buffers_);
            return all();
        }
        begin_rows(buffers_);
        if (!onebit_.rules.compat) {
            feed_leaves(feed);
            return end_rows(buffers_);
        }
        if (is_skipped()) return;
        all();
        const auto &parts = buffers_.layout->parts;
        for (size_t k = 0; k < parts.size(); ++k)
            if (parts[k].numel > parts[k].used)
                kernels_.onebit.add_error(onebit_.padding, buffers_.worker + parts[k].begin + parts[k].used,
                                          buffers_.worker_scales()[k], parts[k].numel - parts[k].used);
        pack(kernels_.onebit, buffers_, plan_.how.parallel);
    }

    void take(Feed feed) override {
        for_own(feed, false, kernels_.onebit.finish);
        if (onebit_.momentum != nullptr && !is_skipped())
            std::memcpy(onebit_.momentum, buffers_.results, size_t(buffers_.layout->all().rows_bytes()));
    }

    void local() override { for_own(Feed::distance, false, kernels_.onebit.local); }

    void lamb_moments() override {
        if (onebit_.padding != nullptr && !is_skipped()) {
            const CompressLayout::Part &part = buffers_.layout->parts[0];
            kernels_.onebit.mean(view_of(buffers_, 0), part.begin + part.used, part.numel - part.used, onebit_.padding,
                                 nullptr, false);
        }
        for_own(Feed::scaled, false, [&](const OneBitSpan &span) { kernels_.onebit.lamb_mean(span, onebit_.factors); });
    }

    void lamb_trust() override {
        if (is_skipped()) return;
        for (int64_t i = 0; i < plan_.count; ++i) {
            const TensorJob &job = plan_.jobs[i];
            if (job.owner != Owner::exchange) continue;
            double factor = 0;
            for (int64_t leaf = job.first_leaf; leaf < job.first_leaf + leaves_of(job.numel); ++leaf)
                factor = larger_factor(factor, onebit_.factors[leaf]);
            find_frozen_trust(plan_, onebit_, i, factor, fold_leaves(plan_.sums_a, job),
                              fold_leaves(plan_.sums_b, job));
        }
    }

    void lamb_shared_trust() override {
        if (is_skipped()) return;
        for (int64_t i = 0; i < plan_.count; ++i) take_shared_frozen_trust(plan_, onebit_, i);
    }

    void lamb_weights() override { for_own(Feed::scaled, false, kernels_.onebit.lamb_weights); }

    void end() override {
        const bool taken = !is_skipped();
        for (int64_t i = 0; taken && i < plan_.count; ++i) end_tensor(plan_, onebit_, i);
        for (int64_t g = 0; taken && g < plan_.group_count; ++g) end_group(onebit_, g);
        end_schedule(onebit_, taken);
    }

    void find_active() override {
        cut_.run([&](int64_t i, const Span &span) {
            const int64_t worker = onebit_.jobs[i].worker; // a whole word, as `span.begin` is
            const auto *v = static_cast<const float *>(span.job->data[kMoment + 1]);
            for (int64_t k = span.begin; worker >= 0 && k < span.end; k += 32) {
                uint32_t word = 0;
                for (int64_t b = 0; b < 32 && k + b < span.end; ++b) word |= uint32_t(v[k + b] != 0) << b;
                onebit_.active[(worker + k) / 32] = int32_t(word);
            }
        });
    }

    void freeze(bool copies_variance) override {
        if (onebit_.rules.compat && is_skipped()) return;
        for (int64_t i = 0; i < plan_.count; ++i) {
            const TensorJob &job = plan_.jobs[i];
            const OneBitJob &one = onebit_.jobs[i];
            const auto bytes = size_t(job.numel) * sizeof(float);
            if (bytes == 0) continue;
            if (copies_variance && one.fresh != nullptr) std::memcpy(one.fresh, job.data[kMoment + 1], bytes);
            if (one.anchor != nullptr) std::memcpy(one.anchor, job.data[kWeight], bytes);
        }
        if (!onebit_.exchanges || buffers_.layout->is_exact()) return; // nothing is owed
        // Either is NULL where there are no elements, which memset() may not be given.
        std::fill_n(buffers_.worker, buffers_.layout->worker_floats(), 0.0f);
        std::fill_n(buffers_.server, buffers_.layout->server_floats(), 0.0f);
    }

private:
    bool is_skipped() const { return plan_.control->skip != 0; }

    /// `feeding`: before the exchange, when the momentum may still be in the rows of the last one.
    OneBitSpan span_of(int64_t i, const Span &plain, Feed feed, bool feeding) const {
        const OneBitJob &job = onebit_.jobs[i];
        OneBitSpan span(plain);
        span.feed = feed;
        span.onebit = onebit_scalars(onebit_, feed, i, plain.job->group);
        span.track = job.track();
        span.fresh = job.fresh;
        span.mask = job.mask;
        if (job.worker < 0) return span; // one rank
        span.worker = job.worker;
        span.message = buffers_.message;
        if (span.message == nullptr) {
            span.kept = buffers_.worker;
            span.kept_scale = buffers_.worker_scales()[job.part];
        }
        span.active = buffers_.active;
        span.mean = view_of(buffers_, job.part);
        span.momentum_goes = onebit_.momentum != nullptr;
        if (feeding && span.momentum_goes && onebit_.schedule->momentum_in_bits != 0) {
            span.momentum = span.mean;
            span.momentum.rows = onebit_.momentum;
        }
        return span;
    }

    template <class Visit> void for_own(Feed feed, bool feeding, const Visit &visit) const {
        if (is_skipped()) return;
        cut_.run([&](int64_t i, const Span &span) {
            if (span.job->owner != Owner::exchange) return;
            OneBitSpan own = span_of(i, span, feed, feeding);
            visit(own);
        });
    }

    /// Every part is one tensor and begins with its leaves: they are packed while they are in the cache.
    void feed_leaves(Feed feed) const {
        for_own(feed, true, [&](OneBitSpan &span) {
            for (const int64_t end = span.end; span.begin < end; span.begin += kLeaf) {
                span.end = std::min(span.begin + kLeaf, end);
                kernels_.onebit.feed(span);
                pack_leaf(kernels_.onebit, buffers_, span.mean.part, span.begin / kLeaf);
            }
        });
    }

    const StepPlan &plan_;
    const OneBitPlan &onebit_;
    const Kernels &kernels_;
    const StepCut &cut_;
    ExchangeBuffers buffers_;
};

} // namespace dsopt::cpu
