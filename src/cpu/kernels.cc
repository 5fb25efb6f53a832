// SPDX-License-Identifier: Apache-2.0
// Compiled with -DDSOPT_ISA=<name> and that instruction set's flags. Everything except the table is local to this file,
// and no function of the standard library is used: of an inline function that several files define, the linker keeps
// one copy, which could be this file's, with instructions that the processor does not have.
#include "cpu/tiles.h"
#include "rules/all.h"
#include <type_traits>

namespace dsopt::cpu {
namespace {

int64_t count_nonfinite(const float *x, int64_t n) {
    int32_t bad = 0, nans = 0;
    for (int64_t i = 0; i < n; ++i) {
        bad += (bits_of(x[i]) & 0x7f800000u) == 0x7f800000u;
        nans += (bits_of(x[i]) & 0x7fffffffu) > 0x7f800000u;
    }
    return bad + (int64_t(nans) << 32);
}

void squares(const Slot &slot, int64_t begin, int64_t end, double *squares, int64_t index) {
    visit(slot.format, [&](auto tag) {
        const auto *x = element<typename decltype(tag)::storage>(slot.data, 0);
        for (int64_t leaf = begin; leaf < end; leaf += kLeaf, ++index) {
            const int64_t stop = least(leaf + kLeaf, end);
            LeafSum sum(stop - leaf);
            // With one stream per thread the hardware prefetchers do not keep up, so the next leaf is prefetched here.
            const bool more = leaf + 2 * kLeaf <= end;
            for (int64_t i = leaf; i < stop; i += kTile) {
                if (more)
                    sum.add<kLeaf>(x + i, kTile, tag);
                else
                    sum.add(x + i, least(kTile, stop - i), tag);
            }
            squares[index] = sum.fold();
        }
    });
}

void inspect(const Slot &slot, int64_t begin, int64_t end, double *sums, int64_t *bad, float *largest, int64_t index) {
    squares(slot, begin, end, sums, index);
    Buffer buffer;
    for (int64_t leaf = begin; leaf < end; leaf += kLeaf, ++index) {
        bad[index] = 0;
        // The sum of 4,096 squares of finite floats does not overflow a double, so a finite sum means finite elements.
        // Only a leaf with a non-finite sum is read again, to count its non-finite elements.
        const bool suspect = !__builtin_isfinite(sums[index]);
        if (!suspect && largest == nullptr) continue;
        const int64_t stop = least(leaf + kLeaf, end);
        float most = 0;
        for (int64_t i = leaf; i < stop; i += kTile) {
            const int64_t n = least(kTile, stop - i);
            const float *x = open(slot, i, n, buffer);
            if (suspect) bad[index] += count_nonfinite(x, n);
            if (largest != nullptr) most = largest_magnitude(x, n, most);
        }
        if (largest != nullptr) largest[index] = most;
    }
}

// ------------------------------------------------------------------------------------------------------------- rules
DSOPT_HD bool moments_are_f32(const TensorJob &job) {
    bool all = !job.stored;
    for (int k = 0; k < kMoments; ++k) all = all && (!job.moment(k) || job.moment(k).format == Dtype::f32);
    return all;
}

#if DSOPT_HAS_REGISTERS
/// True if non-temporal stores, where the span has them, are aligned.
bool stores_aligned(const Span &span) {
    const auto is_aligned = [](const void *data) { return reinterpret_cast<uintptr_t>(data) % 64 == 0; };
    return !span.streaming || (is_aligned(span.job->data[kCopy]) && is_aligned(span.job->data[kOut]));
}
/// True if the span can be updated in vector registers, without buffers: the types of weight and gradient have a
/// kernel, moments are fp32, non-temporal stores are aligned, and neither sums nor stochastic rounding need whole
/// tiles. Without masked loads and stores, a span that is shorter than a register does not qualify.
bool fits_registers(const Span &span) {
    if (!DSOPT_HAS_MASKS && span.end - span.begin < kWide) return false;
    const TensorJob &job = *span.job;
    const Dtype grad = job.grad().format, weight = job.weight().format;
    return job.grad() && !job.stochastic && !span.sums && moments_are_f32(job) &&
           (weight == Dtype::f32 || grad == Dtype::f32 || weight == grad) && stores_aligned(span) &&
           !(kFewRegisters && job.copy() && job.copy().format == Dtype::bf16);
}

/// Update of one register of weights: change(g, p, m), with an array of moments in `m`. The rule is in a closure: gcc
/// 12 copies a struct that contains the rule member by member, which slows down small tensors.
template <int Count, bool WritesMoments, class F> struct RegisterUpdate {
    static constexpr int count = Count;
    static constexpr bool writes_moments = WritesMoments;
    const F change;
};
template <class R> auto update_by(const R &rule) {
    const auto change = [rule](Floats g, Floats & p, Floats * m) __attribute__((always_inline)) {
        with_moments<R::moments.count>(
            m, [&](auto &...each) __attribute__((always_inline)) { rule(g, p, each...); });
    };
    return RegisterUpdate<R::moments.count, true, decltype(change)>{change};
}
/// The second pass of Passes::reduced, which only reads the moments.
template <int Count, class R> auto update_by_moments(const R &rule) {
    const auto change = [rule](Floats, Floats & p, Floats * m) __attribute__((always_inline)) {
        with_moments<Count>(
            m, [&](const auto &...each) __attribute__((always_inline)) { rule(p, each...); });
    };
    return RegisterUpdate<Count, false, decltype(change)>{change};
}

// GCOVR_EXCL_BR_START: hundreds of instantiations, not all of which have every type
/// Options for storing a register.
template <class Lanes> struct StoreOptions {
    const Lanes lanes;
    const bool streaming, by_instruction;
};
template <class Tag, class Lanes>
DSOPT_HD void store_lanes(Floats x, void *to, Tag tag, int64_t i, const StoreOptions<Lanes> &options) {
    auto *const target = element<typename Tag::storage>(to, i);
    if (std::is_same_v<Lanes, AllLanes> && options.streaming)
        write_streaming(rounded(x, tag, options.by_instruction), target);
    else
        write(rounded(x, tag, options.by_instruction), target, options.lanes);
}
template <class Lanes>
DSOPT_HD void store_lanes(Floats x, const Slot &to, int64_t i, const StoreOptions<Lanes> &options) {
    visit(
        to.format, [&](auto tag) __attribute__((always_inline)) { store_lanes(x, to.data, tag, i, options); });
}

/// Updates elements [begin, end), of which each register holds these lanes: each array is read once, converted to fp32,
/// updated, rounded and written once. `CopiesOnly`: the tensor has a copy, of the gradient's type, and no output.
template <bool CopiesOnly, class C, class Grad, class Weight, class Lanes>
DSOPT_HD void update_lanes(const C update, const Span &span, int64_t begin, int64_t end, Grad grad, Weight weight,
                           Lanes lanes) {
    const TensorJob &job = *span.job;
    const bool skips_store = skips_weight_store(span), by_instruction = span.bf16_instruction;
    const StoreOptions<Lanes> weights{lanes, false, by_instruction};
    const StoreOptions<Lanes> copies{lanes, span.streaming, by_instruction};
    // An output that overwrites the gradients is already in the caches.
    const StoreOptions<Lanes> outputs{lanes, span.streaming && job.data[kOut] != job.data[kGrad], by_instruction};
    const Slot copy = job.copy(), out = job.out();
    const auto *const g = element<typename Grad::storage>(job.grad().data, 0);
    auto *const w = element<typename Weight::storage>(job.weight().data, 0);
    float *moment[kMoments];
    for (int k = 0; k < C::count; ++k) moment[k] = element<float>(job.moment(k).data, 0);
    for (int64_t i = begin; i < end; i += kWide) {
        const Floats old = load(w + i, weight, lanes);
        Floats p = old, m[kMoments];
        for (int k = 0; k < C::count; ++k) m[k] = load(moment[k] + i, F32{}, lanes);
        update.change(load(g + i, grad, lanes), p, m);
        for (int k = 0; C::writes_moments && k < C::count; ++k) write(m[k], moment[k] + i, lanes);
        if (!skips_store) store_lanes(p, w, weight, i, weights);
        if constexpr (CopiesOnly) {
            store_lanes(p, copy.data, grad, i, copies);
        } else {
            if (copy) store_lanes(p, copy, i, copies);
            if (out) store_lanes(span.flags & DSOPT_STEP_DELTA ? p - old : p, out, i, outputs);
        }
    }
    if (job.zeroes) zero_gradients(job, begin, end - begin);
}
#if DSOPT_HAS_MASKS
/// Updates the elements after the last whole register. Not inlined: inlining makes the loop over whole registers
/// slower.
template <bool CopiesOnly, class C, class Grad, class Weight>
__attribute__((noinline)) void update_rest(const C &update, const Span &span, int64_t begin, int64_t end, Grad grad,
                                           Weight weight) {
    update_lanes<CopiesOnly>(update, span, begin, end, grad, weight, FirstLanes(end - begin));
}
#endif
/// update_lanes() for moments and masters that are stored in 16 bits. The formats are tested at run time: each test has
/// the same result for all registers of a span.
template <class C, class Lanes>
DSOPT_HD void update_stored_lanes(const C update, const Span &span, int64_t begin, int64_t end, const RandomRow *rows,
                                  Lanes lanes) {
    const TensorJob &job = *span.job;
    const bool skips_store = skips_weight_store(span), by_instruction = span.bf16_instruction;
    const StoreOptions<Lanes> options{lanes, false, by_instruction}, copies{lanes, span.streaming, by_instruction};
    const StoreOptions<Lanes> outputs{lanes, span.streaming && job.data[kOut] != job.data[kGrad], by_instruction};
    const Slot grad = job.grad(), weight = job.weight(), copy = job.copy(), out = job.out();
    Words index{};
    for (int k = 0; k < kWide; ++k) index[k] = uint32_t(job.range.begin + begin) + uint32_t(k);
    const auto load_any = [&](const Slot &slot, int64_t i) __attribute__((always_inline)) {
        Floats x{};
        visit(
            slot.format, [&](auto tag) __attribute__((always_inline)) {
                x = load(element<typename decltype(tag)::storage>(slot.data, i), tag, lanes);
            });
        return x;
    };
    const auto load_half = [&](const void *data, int64_t i) __attribute__((always_inline)) {
        return load(element<uint16_t>(data, i), BF16{}, lanes);
    };
    for (int64_t i = begin; i < end; i += kWide, index += kWide) {
        Floats p, m[kMoments];
        if (job.remainder != nullptr)
            p = joined(Words(load_half(weight.data, i)), Words(load_half(job.remainder, i)));
        else
            p = load_any(weight, i);
        for (int k = 0; k < C::count; ++k) {
            const void *const data = job.data[kMoment + k];
            m[k] = job.formats[kMoment + k] == Format::f32 ? load(element<float>(data, i), F32{}, lanes)
                                                           : load_half(data, i);
        }
        const Floats old = p;
        update.change(load_any(grad, i), p, m);
        for (int k = 0; k < C::count; ++k) {
            const Format format = job.formats[kMoment + k];
            if (format == Format::f32)
                write(m[k], element<float>(job.data[kMoment + k], i), lanes);
            else if (format == Format::bf16)
                write(rounded(m[k], BF16{}, by_instruction), element<uint16_t>(job.data[kMoment + k], i), lanes);
            else
                write(rounded_at_random(m[k], rows[k].bits(index)), element<uint16_t>(job.data[kMoment + k], i), lanes);
        }
        if (job.remainder != nullptr) {
            const SplitMasters split(p);
            if (!skips_store) write(split.weights, element<uint16_t>(weight.data, i), lanes);
            write(split.remainders, job.remainder + i, lanes);
            if (out && out.format == Dtype::bf16)
                write(split.weights, element<uint16_t>(out.data, i), lanes);
            else if (out)
                store_lanes(p, out, i, outputs);
            continue;
        }
        if (!skips_store) store_lanes(p, weight, i, options);
        if (copy) store_lanes(p, copy, i, copies);
        if (out) store_lanes(span.flags & DSOPT_STEP_DELTA ? p - old : p, out, i, outputs);
    }
    if (job.zeroes) zero_gradients(job, begin, end - begin);
}
#if DSOPT_HAS_MASKS
template <class C>
__attribute__((noinline)) void update_stored_rest(const C &update, const Span &span, int64_t begin, int64_t end,
                                                  const RandomRow *rows) {
    update_stored_lanes(update, span, begin, end, rows, FirstLanes(end - begin));
}
#endif
struct RandomRows {
    RandomRow row[kMoments];
};
/// True if the span can be updated by update_stored_lanes(). Random numbers change their row every 2^32 elements.
bool fits_stored_registers(const Span &span) {
    const TensorJob &job = *span.job;
    bool fits = job.stored && job.grad() && !job.stochastic && !span.sums && stores_aligned(span), halves = false;
    for (int k = 0; k < kMoments; ++k) {
        fits = fits && !has_scales(job.formats[kMoment + k]);
        halves = halves || job.formats[kMoment + k] != Format::f32;
    }
    if (kFewRegisters && !halves) return false; // remainders alone: tiles are faster
    const auto row = [&](int64_t index) { return uint64_t(job.range.begin + index) >> 32; };
    return fits && span.end > span.begin && row(span.begin) == row(span.end - 1);
}
/// Returns the index of the first element that is not updated.
template <class R> int64_t update_stored_in_registers(const R &rule, const Span &span, int64_t begin, int64_t end) {
    const TensorJob &job = *span.job;
    const auto row = [&](int k) {
        const MomentKind kind = R::moments.info[k].squares ? MomentKind::square : MomentKind::gradient;
        return RandomRow(moment_key(job.random_key, kind, span.step), uint64_t(job.range.begin + begin));
    };
    const RandomRows rows = [&]<int... K>(std::integer_sequence<int, K...>) { return RandomRows{{row(K)...}}; }
    (std::make_integer_sequence<int, kMoments>{});
    const auto update = update_by(rule);
    const int64_t whole = begin + ((end - begin) & -kWide);
    if (begin < whole) update_stored_lanes(update, span, begin, whole, rows.row, AllLanes{});
#if DSOPT_HAS_MASKS
    if (whole < end) update_stored_rest(update, span, whole, end, rows.row);
    return end;
#else
    return whole;
#endif
}
/// Updates whole registers and, with masks, the rest. Returns the index of the first element that is not updated.
template <bool CopiesOnly, class C, class Grad, class Weight>
int64_t update_in_registers(const C &update, const Span &span, int64_t begin, int64_t end, Grad grad, Weight weight) {
    const int64_t whole = begin + ((end - begin) & -kWide);
    if (begin < whole) update_lanes<CopiesOnly>(update, span, begin, whole, grad, weight, AllLanes{});
#if DSOPT_HAS_MASKS
    if (whole < end) update_rest<CopiesOnly>(update, span, whole, end, grad, weight);
    return end;
#else
    return whole;
#endif
}
// GCOVR_EXCL_BR_STOP
/// Returns the index of the first element that is not updated.
template <class C> int64_t update_in_registers(const C &update, const Span &span, int64_t begin, int64_t end) {
    const TensorJob &job = *span.job;
    const Dtype weight_format = job.weight().format;
    const bool copies_only = job.copy() && !job.out() && job.copy().format == job.grad().format;
    visit(job.grad().format, [&](auto grad) {
        const auto run = [&](auto weight) {
            begin = update_in_registers<false>(update, span, begin, end, grad, weight);
        };
        if constexpr (std::is_same_v<decltype(grad), F32>) {
            visit(weight_format, run);
        } else if (weight_format != Dtype::f32) {
            run(grad);
        } else if (copies_only) {
            begin = update_in_registers<true>(update, span, begin, end, grad, F32{});
        } else {
            run(F32{});
        }
    });
    return begin;
}
#endif

/// True if the step consists only of the rule's loop over fp32 arrays, as in most fp32 training.
bool is_plain(const Span &span) {
    const TensorJob &job = *span.job;
    return job.grad() && job.grad().format == Dtype::f32 && job.weight().format == Dtype::f32 && !job.copy() &&
           !job.out() && !job.stochastic && !span.sums && !skips_weight_store(span) && moments_are_f32(job);
}
template <class R> void update_plain(const R &rule, const Span &span) {
    const TensorJob &job = *span.job;
    const int64_t tile = span.prefetch == nullptr ? span.end - span.begin : kTile;
    for (int64_t i = span.begin; i < span.end; i += tile) {
        const int64_t n = least(tile, span.end - i);
        prefetch_next(span.prefetch, n);
        const float *g = element<float>(job.grad().data, i);
        float *p = element<float>(job.weight().data, i), *moment[kMoments] = {};
        for (int k = 0; k < R::moments.count; ++k) moment[k] = element<float>(job.moment(k).data, i);
        with_moments<R::moments.count>(moment, [&](auto... each) { apply(rule, n, g, p, each...); });
    }
    if (job.zeroes) zero_gradients(job, span.begin, span.end - span.begin);
}

template <class R> void update_with(const R &rule, const Span &span) {
    // The compiler's loop is as fast as update_in_registers(), and handles the rest in smaller registers.
    if (is_plain(span)) return update_plain(rule, span);
    constexpr int count = R::moments.count;
    const TensorJob &job = *span.job;
    WeightTile weights(span, span.sums);
    Buffer g_buffer, moment_buffer[count > 0 ? count : 1];
#if DSOPT_HAS_REGISTERS
    const bool stored_in_registers = fits_stored_registers(span),
               in_registers = stored_in_registers || fits_registers(span);
#else
    constexpr bool in_registers = false;
#endif
    const int64_t tile = in_registers && span.prefetch == nullptr ? kLeaf : kTile;
    for (int64_t leaf = span.begin; leaf < span.end; leaf += kLeaf) {
        const int64_t stop = least(leaf + kLeaf, span.end);
        const int64_t summed = span.sums ? stop - leaf : 0;
        LeafSum weight_sum(summed), change_sum(summed);
        for (int64_t i = leaf; i < stop; i += tile) {
            const int64_t end = least(i + tile, stop);
            prefetch_next(span.prefetch, end - i);
            int64_t rest = i;
#if DSOPT_HAS_REGISTERS
            if (stored_in_registers)
                rest = update_stored_in_registers(rule, span, i, end);
            else if (in_registers)
                rest = update_in_registers(update_by(rule), span, i, end);
#endif
            const int64_t n = end - rest;
            if (n == 0) continue;
            // Handles all other types, and the elements after the last whole register.
            const float *g = open_gradient(job, rest, n, g_buffer);
            float *p = weights.open(rest, n), *moment[kMoments] = {};
            for (int k = 0; k < count; ++k) moment[k] = open_moment(span, k, rest, n, moment_buffer[k]);
            if (span.sums) weight_sum.add(p, n);
            with_moments<count>(moment, [&](auto... each) { apply(rule, n, g, p, each...); });
            for (int k = 0; k < count; ++k) close_moment<R>(moment[k], span, k, rest, n);
            weights.close(rest, n);
            if (span.sums) change_sum.add(weights.change(), n);
        }
        if (span.sums) {
            span.sums_a[job.first_leaf + leaf / kLeaf] = weight_sum.fold();
            span.sums_b[job.first_leaf + leaf / kLeaf] = change_sum.fold();
        }
    }
}

/// First pass of Passes::reduced over elements [i, i + n) of a tile. `update` receives the rule's update, whose norm
/// the trust ratio needs.
template <int Count, class R>
void reduced_tile(const R &rule, const TensorJob &job, int64_t i, int64_t n, const float *p, float *const *moment,
                  float *update) {
    int64_t done = 0;
#if DSOPT_HAS_REGISTERS
    if (!kFewRegisters && job.grad() && job.grad().format != Dtype::f32) // without a buffer for the gradient
        visit(job.grad().format, [&](auto tag) {
            const auto *const g = element<typename decltype(tag)::storage>(job.grad().data, i);
            DSOPT_LOOP_NO_ALIAS
            for (; done + kWide <= n; done += kWide) {
                Floats next[Count];
                for (int k = 0; k < Count; ++k) next[k] = load(moment[k] + done, F32{});
                with_moments<Count>(
                    next, [&](auto &...each) __attribute__((always_inline)) {
                        write(rule(load(g + done, tag), load(p + done, F32{}), each...), update + done);
                    });
                for (int k = 0; k < Count; ++k) write(next[k], moment[k] + done);
            }
        });
    if (done == n) return;
#endif
    Buffer buffer;
    const float *const g = open_gradient(job, i + done, n - done, buffer);
    const auto change = [rule](float g, float p, float &update, auto &...each) { update = rule(g, p, each...); };
    with_moments<Count>(moment,
                        [&](auto... each) { apply(change, n - done, g, p + done, update + done, each + done...); });
}

/// The same for stored moments: `update` is that of the moments that the second pass will load.
template <class R, class Rule>
void stored_tile(const Rule &rule, const Span &span, int64_t i, int64_t n, const float *p, float *const *moment,
                 Buffer *buffers, float *update) {
    constexpr int count = R::moments.count;
    Buffer g_buffer;
    const float *const g = open_gradient(*span.job, i, n, g_buffer);
    with_moments<count>(moment, [&](auto... each) {
        apply([rule](float g, auto &...each) { rule.take_gradient(g, each...); }, n, g, each...);
    });
    const float *rounded[count];
    for (int k = 0; k < count; ++k) {
        close_moment<R>(moment[k], span, k, i, n);
        rounded[k] = open_moment(span, k, i, n, buffers[k]);
    }
    with_moments<count>(rounded, [&](auto... each) {
        apply([rule](float p, float &update, auto... each) { update = rule.update(p, each...); }, n, p, update,
              each...);
    });
}

// The two passes of Passes::reduced construct their functors: passed by reference, a functor is spilled with narrow
// stores and loaded with wide ones (store-forwarding stall).
template <class R> void reduced_first_pass(const Span &span) {
    constexpr int count = R::moments.count;
    const typename R::Moments rule{*span.scalars};
    const TensorJob &job = *span.job;
    Buffer p_buffer, moment_buffer[count], u;
    for (int64_t leaf = span.begin; leaf < span.end; leaf += kLeaf) {
        const int64_t stop = least(leaf + kLeaf, span.end);
        LeafSum weight_sum(stop - leaf), update_sum(stop - leaf);
        for (int64_t i = leaf; i < stop; i += kTile) {
            const int64_t n = least(kTile, stop - i);
            prefetch_next(span.prefetch, n);
            const float *p = open_weights(job, i, n, p_buffer);
            float *moment[count];
            for (int k = 0; k < count; ++k) moment[k] = open_moment(span, k, i, n, moment_buffer[k]);
            if (job.stored)
                stored_tile<R>(rule, span, i, n, p, moment, moment_buffer, u.at);
            else
                reduced_tile<count>(rule, job, i, n, p, moment, u.at);
            weight_sum.add(p, n);
            update_sum.add(u.at, n);
            for (int k = 0; k < count && !job.stored; ++k) close(moment[k], job.moment(k), i, n);
        }
        span.sums_a[job.first_leaf + leaf / kLeaf] = weight_sum.fold();
        span.sums_b[job.first_leaf + leaf / kLeaf] = update_sum.fold();
    }
}

void update(const Span &span) {
    visit(span.rule, [&](auto formula) {
        using R = typename decltype(formula)::type;
        if constexpr (R::passes == Passes::elementwise) {
            update_with(R{*span.scalars}, span);
        } else if constexpr (R::passes == Passes::reduced) {
            reduced_first_pass<R>(span);
        } else {
            static_assert(R::passes == Passes::matrix); // in matrix_kernels.cc
        }
    });
}

template <class R> void reduced_second_pass(const Span &span) {
    constexpr int count = R::moments.count;
    const typename R::Weights rule{*span.scalars, span.trust};
    WeightTile weights(span);
    Buffer moment_buffer[count];
    int64_t begin = span.begin;
#if DSOPT_HAS_REGISTERS
    if (fits_registers(span)) begin = update_in_registers(update_by_moments<count>(rule), span, begin, span.end);
#endif
    for (int64_t i = begin; i < span.end; i += kTile) {
        const int64_t n = least(kTile, span.end - i);
        float *p = weights.open(i, n);
        const float *moment[count];
        for (int k = 0; k < count; ++k) moment[k] = open_moment(span, k, i, n, moment_buffer[k]);
        with_moments<count>(moment, [&](auto... each) { apply(rule, n, p, each...); });
        weights.close(i, n);
    }
}

void update_weights(const Span &span) {
    visit(span.rule, [&](auto formula) {
        using R = typename decltype(formula)::type;
        if constexpr (R::passes == Passes::reduced) reduced_second_pass<R>(span);
    });
}

void unchanged(const Span &span) {
    const TensorJob &job = *span.job;
    if (!job.out() && !job.zeroes) return;
    Buffer buffer;
    const Buffer no_change{};
    if (job.remainder != nullptr && job.out() && job.out().format == Dtype::bf16) { // the weights as they are
        const auto bytes = size_t(span.end - span.begin) * sizeof(uint16_t);
        __builtin_memmove(element<uint16_t>(job.out().data, span.begin),
                          element<uint16_t>(job.weight().data, span.begin), bytes);
        if (job.zeroes) zero_gradients(job, span.begin, span.end - span.begin);
        return;
    }
    for (int64_t i = span.begin; i < span.end; i += kTile) {
        const int64_t n = least(kTile, span.end - i);
        const float *weights = job.out() ? open_weights(job, i, n, buffer) : nullptr;
        write_outputs(span, weights, no_change.at, i, n);
    }
}

void axpby(float a, const dsopt_tensor &x, float b, const dsopt_tensor &y, int64_t begin, int64_t end) {
    Buffer x_buffer, y_buffer, result;
    for (int64_t i = begin; i < end; i += kTile) {
        const int64_t n = least(kTile, end - i);
        const float *from = open(slot_of(x), i, n, x_buffer);
        if (b == 0) {
            for (int64_t k = 0; k < n; ++k) result.at[k] = a * from[k];
        } else {
            const float *old = open(slot_of(y), i, n, y_buffer);
            for (int64_t k = 0; k < n; ++k) result.at[k] = a * from[k] + b * old[k];
        }
        store(result.at, slot_of(y), i, n);
    }
}

void clamp(const dsopt_tensor &x, float limit, int64_t begin, int64_t end) {
    Buffer buffer;
    for (int64_t i = begin; i < end; i += kTile) {
        const int64_t n = least(kTile, end - i);
        float *tile = open(slot_of(x), i, n, buffer);
        for (int64_t k = 0; k < n; ++k) {
            const float value = tile[k] > limit ? limit : tile[k];
            tile[k] = value < -limit ? -limit : value;
        }
        close(tile, slot_of(x), i, n);
    }
}

} // namespace

extern const OneBitKernels DSOPT_JOIN(onebit_, DSOPT_ISA);
void DSOPT_JOIN(form_, DSOPT_ISA)(const MatrixSpan &span);
void DSOPT_JOIN(apply_matrices_, DSOPT_ISA)(const Span &span, const MatrixResults &results);

namespace {
// Evaluated at compile time: no code of this file may run on a processor without its instruction set.
constexpr Kernels table(const char *name, bool bf16_instruction) {
    return {name,
            DSOPT_JOIN(onebit_, DSOPT_ISA),
            inspect,
            squares,
            update,
            update_weights,
            DSOPT_JOIN(form_, DSOPT_ISA),
            DSOPT_JOIN(apply_matrices_, DSOPT_ISA),
            unchanged,
            axpby,
            clamp,
            bf16_instruction};
}
} // namespace

constinit const Kernels DSOPT_JOIN(kernels_, DSOPT_ISA) = table(DSOPT_TEXT(DSOPT_ISA), false);
#if defined(__AVX512F__)
constinit const Kernels DSOPT_JOIN(DSOPT_JOIN(kernels_, DSOPT_ISA), _bf16) = table(DSOPT_TEXT(DSOPT_ISA) "_bf16", true);
#endif

} // namespace dsopt::cpu
