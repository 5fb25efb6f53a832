// SPDX-License-Identifier: Apache-2.0
#include "cpu/onebit.h"
#include "cpu/compress.h"
#include "device/decide.h"
#include <cmath>
#include <cstring>

namespace dsopt::cpu {
template <class Visit> void OneBitStep::for_own(const Cut &cut, const SpanOf &span_of, const Visit &visit) {
    cut.run([&](int64_t i) { return plan_.jobs[i].numel; },
            [&](int64_t i, int64_t begin, int64_t end) {
                if (!owns(i) || !plan_.jobs[i].present) return;
                const Span span = span_of(i, begin, end);
                visit(onebit_span(i, span));
            });
}

OneBitSpan OneBitStep::onebit_span(int64_t i, const Span &span) const {
    const OneBitJob &job = one_.jobs[i];
    const int32_t group = plan_.jobs[i].group;
    OneBitSpan result{};
    result.span = &span;
    result.feed = feed_;
    result.one = {.scaling = one_.scaling != nullptr && one_.compat ? one_.scaling[i] : 1.0f,
                  .lr_sum = one_.lr_sum != nullptr ? float(read_double(one_.lr_sum + 2 * group)) : 0.0f,
                  .drops = one_.compat && !one_.setup->compresses && feed_ == Feed::gradient,
                  .anchored = !one_.compat};
    result.drift = job.drift;
    result.fresh = job.fresh;
    result.mask = job.mask;
    if (job.worker < 0) return result; // one rank
    result.worker = job.worker;
    result.message = one_.exchange.message;
    if (result.message == nullptr) {
        result.kept = one_.exchange.worker;
        result.scale = one_.exchange.worker_scales()[job.part];
    }
    result.active = one_.exchange.active;
    result.mean = view_of(one_.exchange, job.part);
    result.momentum_goes = one_.momentum != nullptr;
    // The rows of results are those of the last exchange until this one's come.
    if (momentum_in_bits_) result.momentum = result.mean;
    return result;
}

/// Own values to the kept sums, bits to all, and back.
void OneBitStep::send(const Cut &cut, const SpanOf &span_of) {
    if (!one_.setup->compresses) {
        if (feed_ == Feed::distance) for_own(cut, span_of, onebit_.feed);
        return;
    }
    const CompressLayout &layout = one_.setup->layout;
    const auto &parts = layout.parts;
    if (one_.node != nullptr) {
        clear_gaps(one_.exchange);
        for_own(cut, span_of, onebit_.feed);
        mark(DSOPT_MS_COMPRESS);
        two_level_exchange(*one_.context, one_.comm, *one_.node, one_.exchange, plan_.parallel, plan_.stream);
        mark(DSOPT_MS_EXCHANGE);
        return;
    }
    if (!one_.compat) { // every part is one tensor and begins with its leaves: they are packed while they are in the
                        // cache
        begin_rows(one_.exchange);
        for_own(cut, span_of, [&](const OneBitSpan &one) {
            Span leaf = *one.span;
            OneBitSpan of_leaf = one;
            of_leaf.span = &leaf;
            for (int64_t begin = one.span->begin; begin < one.span->end; begin += kLeaf) {
                leaf.begin = begin;
                leaf.end = std::min(begin + kLeaf, one.span->end);
                onebit_.feed(of_leaf);
                pack_leaf(onebit_, one_.exchange, one.mean.part, begin / kLeaf);
            }
        });
        end_rows(one_.exchange);
    } else {
        for_own(cut, span_of, onebit_.feed);
        for (size_t k = 0; k < parts.size(); ++k) {
            const int64_t used = one_.setup->used[k], rest = parts[k].numel - used;
            if (rest > 0)
                onebit_.add_error(one_.padding, one_.exchange.worker + parts[k].begin + used,
                                  one_.exchange.worker_scales()[k], rest);
        }
        pack(onebit_, one_.exchange, plan_.parallel);
    }
    mark(DSOPT_MS_COMPRESS);
    exchange(*one_.context, *one_.comm, one_.exchange, plan_.parallel, plan_.stream);
    mark(DSOPT_MS_EXCHANGE);
    if (one_.padding != nullptr)
        onebit_.mean(view_of(one_.exchange, 0), parts[0].begin + one_.setup->used[0],
                     parts[0].numel - one_.setup->used[0], one_.padding, nullptr, false);
}

void OneBitStep::mark(int phase) {
    if (ms_ == nullptr) return;
    const auto now = std::chrono::steady_clock::now();
    ms_[phase] += std::chrono::duration<double, std::milli>(now - last_).count();
    last_ = now;
}

void OneBitStep::run(const Cut &cut, const SpanOf &span_of, double *ms) {
    ms_ = plan_.timing ? ms : nullptr;
    if (ms_ != nullptr) last_ = std::chrono::steady_clock::now();
    const int32_t algorithm = one_.setup->rules.algorithm;
    if (one_.trust_factor != nullptr)
        for (int64_t i = 0; i < plan_.count; ++i)
            if (one_.trust_factor[i] == 0) one_.trust_factor[i] = 1;
    if (one_.stage == Stage::dry) return;
    if (one_.stage == Stage::full) {
        if (algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB) average_trust();
        return;
    }
    if (algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB) return lamb(cut, span_of);
    if (algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM)
        feed_ = one_.stage == Stage::exchange ? Feed::gradient : Feed::distance;
    if (one_.stage == Stage::local || one_.stage == Stage::sync)
        for (int64_t g = 0; g < plan_.group_count; ++g) {
            write_double(one_.lr_sum + 2 * g, read_double(one_.lr_sum + 2 * g) + hyper_of(plan_, g).lr);
        }
    if (one_.stage == Stage::local) return for_own(cut, span_of, onebit_.local);
    momentum_in_bits_ = one_.momentum != nullptr && one_.schedule->momentum_in_bits != 0;
    send(cut, span_of);
    momentum_in_bits_ = false;
    for_own(cut, span_of, onebit_.finish);
    mark(DSOPT_MS_DECOMPRESS);
    if (one_.momentum != nullptr) one_.schedule->momentum_in_bits = 1;
    if (one_.stage == Stage::sync)
        for (int64_t g = 0; g < plan_.group_count; ++g) write_double(one_.lr_sum + 2 * g, 0);
}

void OneBitStep::average_trust() {
    for (int64_t i = 0; i < plan_.count; ++i)
        if (moves_trust(plan_, plan_.jobs[i]) && sweeps_of(plan_.groups[plan_.jobs[i].group].rule) == 2)
            dsopt::average_trust(one_.trust, plan_.trust_ratio[i], one_.trust_average[i], one_.scaling[i]);
}

void OneBitStep::lamb(const Cut &cut, const SpanOf &span_of) {
    feed_ = Feed::scaled;
    if (one_.compat && plan_.count != 0 && one_.scaling[0] == 0) {
        // The original has one scale for everything, so momenta are first brought to the same size.
        double mean = 0;
        cut.run([&](int64_t i) { return plan_.jobs[i].numel; },
                [&](int64_t i, int64_t begin, int64_t end) {
                    const TensorJob &job = plan_.jobs[i];
                    kernels_.squares(job.moment[0].data, job.moment[0].type, begin, end, plan_.sums_a,
                                     job.first_leaf + begin / kLeaf);
                });
        for (int64_t i = 0; i < plan_.count; ++i) {
            const TensorJob &job = plan_.jobs[i];
            one_.scaling[i] =
                job.numel == 0 ? 0.0f : float(std::sqrt(fold_leaves(plan_.sums_a, job)) / std::sqrt(double(job.numel)));
            mean += double(one_.scaling[i]) / double(plan_.count);
        }
        for (int64_t i = 0; i < plan_.count; ++i)
            one_.scaling[i] = one_.scaling[i] > 0 ? float(mean / double(one_.scaling[i])) : 1.0f;
    }
    send(cut, span_of);
    auto *const factors = reinterpret_cast<double *>(plan_.bad);
    for_own(cut, span_of, [&](const OneBitSpan &one) { onebit_.lamb_mean(one, factors); });
    find_frozen_trust(factors);
    for_own(cut, span_of, onebit_.lamb_weights);
    mark(DSOPT_MS_DECOMPRESS);
}

/// `factors`: one a leaf.
void OneBitStep::find_frozen_trust(const double *factors) {
    const auto take = [&](int64_t i, double factor, double without, double with) {
        plan_.trust_ratio[i] =
            frozen_trust(one_.trust, factor, without, with, hyper_of(plan_, plan_.jobs[i].group).weight_decay > 0,
                         one_.trust_average[i], one_.scaling[i], one_.trust_factor[i]);
    };
    const bool shards = has_shards(plan_, true);
    if (shards) std::memset(plan_.shard_sums, 0, shard_bytes(plan_.shard_count));
    for (int64_t i = 0; i < plan_.count; ++i) {
        const TensorJob &job = plan_.jobs[i];
        if (!owns(i) || !job.present) continue;
        double factor = 0;
        for (int64_t leaf = job.first_leaf; leaf < job.first_leaf + leaves_of(job.numel); ++leaf)
            factor = larger_factor(factor, factors[leaf]);
        const double without = fold_leaves(plan_.sums_a, job), with = fold_leaves(plan_.sums_b, job);
        if (job.trust_slot < 0) {
            take(i, factor, without, with);
        } else {
            plan_.shard_sums[job.trust_slot] = {without, with, 1};
            plan_.shard_factors()[job.trust_slot] = factor_to_send(factor);
        }
    }
    if (!shards) return;
    add_up_shards(plan_, true);
    for (int64_t i = 0; i < plan_.count; ++i) {
        const int32_t slot = plan_.jobs[i].trust_slot;
        if (slot < 0 || !moves_trust(plan_, plan_.jobs[i])) continue;
        const ShardSums &sums = plan_.shard_sums[slot];
        take(i, plan_.shard_factors()[slot], sums.weights, sums.updates);
    }
}

void OneBitStep::end(const Cut &cut, bool taken) {
    if (!taken && one_.compat) return; // the original never hears of a skipped step
    const bool copies = one_.setup->rules.algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB;
    const bool froze = advance_schedule(one_.setup->rules, *one_.schedule);
    // Only where an exchange follows: this reads the whole variance.
    if (one_.stage == Stage::full && one_.active != nullptr &&
        stage_of(one_.setup->rules, *one_.schedule) != Stage::full)
        cut.run([&](int64_t i) { return plan_.jobs[i].numel; },
                [&](int64_t i, int64_t begin, int64_t end) {
                    const int64_t worker = one_.jobs[i].worker; // a whole word, as `begin` is
                    const auto *v = static_cast<const float *>(plan_.jobs[i].moment[1].data);
                    for (int64_t k = begin; worker >= 0 && k < end; k += 32) {
                        uint32_t word = 0;
                        for (int64_t b = 0; b < 32 && k + b < end; ++b) word |= uint32_t(v[k + b] != 0) << b;
                        one_.active[(worker + k) / 32] = int32_t(word);
                    }
                });
    if (!froze) return;
    const bool late = one_.compat && one_.schedule->step != one_.setup->rules.freeze_step;
    for (int64_t i = 0; i < plan_.count; ++i) {
        const TensorJob &job = plan_.jobs[i];
        const auto bytes = size_t(job.numel) * sizeof(float);
        if (bytes == 0) continue;
        if (copies && one_.jobs[i].fresh != nullptr && !late)
            std::memcpy(one_.jobs[i].fresh, job.moment[1].data, bytes);
        if (one_.jobs[i].drift != nullptr && !one_.compat) std::memcpy(one_.jobs[i].drift, job.weight, bytes);
    }
    const CompressLayout &layout = one_.setup->layout;
    if (!one_.setup->compresses || layout.is_exact()) return; // nothing is owed
    std::memset(one_.exchange.worker, 0, size_t(layout.worker_floats()) * sizeof(float));
    std::memset(one_.exchange.server, 0, size_t(layout.server_floats()) * sizeof(float));
}

} // namespace dsopt::cpu
