// SPDX-License-Identifier: Apache-2.0
#include "cpu/onebit.h"
#include "cpu/compress.h"
#include <cmath>
#include <cstring>

namespace dsopt::cpu {

OneBitStep::OneBitStep(const StepPlan &plan, const Kernels &kernels, const OneBitKernels &onebit, const Cut &cut,
                       const SpanSource &spans) :
    plan_(plan),
    one_(*plan.onebit),
    kernels_(kernels),
    onebit_(onebit),
    cut_(cut),
    spans_(spans) {
    if (one_.exchanges) buffers_ = *one_.buffers;
    buffers_.skip = &plan.control->skip;
}

template <class Visit> void OneBitStep::for_own(Feed feed, bool feeding, const Visit &visit) const {
    if (is_skipped()) return;
    cut_.run([&](int64_t i) { return plan_.jobs[i].numel; },
             [&](int64_t i, int64_t begin, int64_t end) {
                 if (!owns(i) || !plan_.jobs[i].present) return;
                 const Span span = spans_.span_of(i, begin, end);
                 visit(span_of(i, span, feed, feeding));
             });
}

OneBitSpan OneBitStep::span_of(int64_t i, const Span &span, Feed feed, bool feeding) const {
    const OneBitJob &job = one_.jobs[i];
    OneBitSpan result{};
    result.span = &span;
    result.feed = feed;
    result.one = onebit_scalars(one_, feed, i, plan_.jobs[i].group);
    result.track = job.track();
    result.fresh = job.fresh;
    result.mask = job.mask;
    if (job.worker < 0) return result; // one rank
    result.worker = job.worker;
    result.message = buffers_.message;
    if (result.message == nullptr) {
        result.kept = buffers_.worker;
        result.scale = buffers_.worker_scales()[job.part];
    }
    result.active = buffers_.active;
    result.mean = view_of(buffers_, job.part);
    result.momentum_goes = one_.momentum != nullptr;
    if (feeding && one_.momentum != nullptr && one_.schedule->momentum_in_bits != 0) {
        result.momentum = result.mean;
        result.momentum.rows = one_.momentum;
    }
    return result;
}

void OneBitStep::begin() {
    if (is_skipped()) return;
    for (int64_t i = 0; i < plan_.count; ++i) begin_tensor(one_, i);
    for (int64_t g = 0; g < plan_.group_count; ++g) begin_group(plan_, one_, g);
}

void OneBitStep::scale_momenta() {
    if (is_skipped() || plan_.count == 0 || one_.trust_scaling[0] != 0) return;
    cut_.run([&](int64_t i) { return plan_.jobs[i].numel; },
             [&](int64_t i, int64_t begin, int64_t end) {
                 const TensorJob &job = plan_.jobs[i];
                 kernels_.squares(job.moment[0].data, job.moment[0].type, begin, end, plan_.sums_a,
                                  job.first_leaf + begin / kLeaf);
             });
    for (int64_t i = 0; i < plan_.count; ++i)
        one_.trust_scaling[i] = rms_of(fold_leaves(plan_.sums_a, plan_.jobs[i]), plan_.jobs[i].numel);
    const double mean =
        add_in_lanes(plan_.count, [&](int64_t i) { return double(one_.trust_scaling[i]) / double(plan_.count); });
    for (int64_t i = 0; i < plan_.count; ++i)
        one_.trust_scaling[i] = one_.trust_scaling[i] > 0 ? float(mean / double(one_.trust_scaling[i])) : 1.0f;
}

/// Every part is one tensor and begins with its leaves: they are packed while they are in the cache.
void OneBitStep::feed_leaves(Feed feed) const {
    for_own(feed, true, [&](const OneBitSpan &one) {
        Span leaf = *one.span;
        OneBitSpan of_leaf = one;
        of_leaf.span = &leaf;
        for (int64_t begin = one.span->begin; begin < one.span->end; begin += kLeaf) {
            leaf.begin = begin;
            leaf.end = std::min(begin + kLeaf, one.span->end);
            onebit_.feed(of_leaf);
            pack_leaf(onebit_, buffers_, one.mean.part, begin / kLeaf);
        }
    });
}

void OneBitStep::feed(Feed feed) {
    const auto all = [&] { for_own(feed, true, onebit_.feed); };
    if (!one_.exchanges) {
        if (feed == Feed::distance) all();
        return;
    }
    if (buffers_.layout->has_levels()) {
        clear_gaps(buffers_);
        return all();
    }
    begin_rows(buffers_);
    if (!one_.compat) {
        feed_leaves(feed);
        return end_rows(buffers_);
    }
    if (is_skipped()) return;
    all();
    const auto &parts = buffers_.layout->parts;
    for (size_t k = 0; k < parts.size(); ++k) {
        const int64_t used = parts[k].used, rest = parts[k].numel - used;
        if (rest > 0)
            onebit_.add_error(one_.padding, buffers_.worker + parts[k].begin + used, buffers_.worker_scales()[k], rest);
    }
    pack(onebit_, buffers_, plan_.how.parallel);
}

void OneBitStep::take(Feed feed) {
    for_own(feed, false, onebit_.finish);
    if (one_.momentum != nullptr && !is_skipped())
        std::memcpy(one_.momentum, buffers_.results, size_t(buffers_.layout->all().rows_bytes()));
}

void OneBitStep::local() { for_own(Feed::distance, false, onebit_.local); }

void OneBitStep::lamb_moments() {
    if (one_.padding != nullptr && !is_skipped()) {
        const CompressLayout::Part &part = buffers_.layout->parts[0];
        onebit_.mean(view_of(buffers_, 0), part.begin + part.used, part.numel - part.used, one_.padding, nullptr,
                     false);
    }
    for_own(Feed::scaled, false, [&](const OneBitSpan &one) { onebit_.lamb_mean(one, one_.factors); });
}

void OneBitStep::lamb_trust() {
    if (is_skipped()) return;
    for (int64_t i = 0; i < plan_.count; ++i) {
        const TensorJob &job = plan_.jobs[i];
        if (!owns(i) || !job.present) continue;
        double factor = 0;
        for (int64_t leaf = job.first_leaf; leaf < job.first_leaf + leaves_of(job.numel); ++leaf)
            factor = larger_factor(factor, one_.factors[leaf]);
        find_frozen_trust(plan_, one_, i, factor, fold_leaves(plan_.sums_a, job), fold_leaves(plan_.sums_b, job));
    }
}

void OneBitStep::lamb_shared_trust() {
    if (is_skipped()) return;
    for (int64_t i = 0; i < plan_.count; ++i) take_shared_frozen_trust(plan_, one_, i);
}

void OneBitStep::lamb_weights() { for_own(Feed::scaled, false, onebit_.lamb_weights); }

void OneBitStep::end() {
    const bool taken = !is_skipped();
    for (int64_t i = 0; taken && i < plan_.count; ++i) end_tensor(plan_, one_, i);
    for (int64_t g = 0; taken && g < plan_.group_count; ++g) end_group(one_, g);
    end_schedule(one_, taken);
}

void OneBitStep::find_active() {
    cut_.run([&](int64_t i) { return plan_.jobs[i].numel; },
             [&](int64_t i, int64_t begin, int64_t end) {
                 const int64_t worker = one_.jobs[i].worker; // a whole word, as `begin` is
                 const auto *v = static_cast<const float *>(plan_.jobs[i].moment[1].data);
                 for (int64_t k = begin; worker >= 0 && k < end; k += 32) {
                     uint32_t word = 0;
                     for (int64_t b = 0; b < 32 && k + b < end; ++b) word |= uint32_t(v[k + b] != 0) << b;
                     one_.active[(worker + k) / 32] = int32_t(word);
                 }
             });
}

void OneBitStep::freeze(bool copies_variance) {
    if (one_.compat && is_skipped()) return;
    for (int64_t i = 0; i < plan_.count; ++i) {
        const TensorJob &job = plan_.jobs[i];
        const OneBitJob &one = one_.jobs[i];
        const auto bytes = size_t(job.numel) * sizeof(float);
        if (bytes == 0) continue;
        if (copies_variance && one.fresh != nullptr) std::memcpy(one.fresh, job.moment[1].data, bytes);
        if (one.anchor != nullptr) std::memcpy(one.anchor, job.weight, bytes);
    }
    if (!one_.exchanges || buffers_.layout->is_exact()) return; // nothing is owed
    std::memset(buffers_.worker, 0, size_t(buffers_.layout->worker_floats()) * sizeof(float));
    std::memset(buffers_.server, 0, size_t(buffers_.layout->server_floats()) * sizeof(float));
}

} // namespace dsopt::cpu
