// SPDX-License-Identifier: Apache-2.0
// Compiled with -DDSOPT_ISA=<name> and that instruction set's flags, under the same rules as kernels.cc.
#include "cpu/onebit_kernels.h"
#include "cpu/tiles.h"

namespace dsopt::cpu {
namespace {

void add_residual(const float *x, float *value, float scale, int64_t n) {
    if (x == nullptr)
        for (int64_t i = 0; i < n; ++i) value[i] = error_of(value[i], scale);
    else
        apply([scale](float added, float &sum) { sum = added + error_of(sum, scale); }, n, x, value);
}

/// Sets inactive elements to 0. `first`: index of the bit of x[0], a multiple of 32. Most words have all bits set:
/// their elements are not read.
void zero_inactive(float *__restrict x, int64_t n, const int32_t *active, int64_t first) {
    for (int64_t i = 0; i < n; i += 32) {
        const uint32_t word = active_from(active, first + i);
        if (word == ~0u) continue;
        for (int64_t k = 0; k < least(32, n - i); ++k) x[i + k] = (word >> k) & 1u ? x[i + k] : 0.0f;
    }
}

void sum_slices(const float *rows, int64_t stride, int count, float factor, int64_t n, float *y) {
    Buffer sum;
    for (int64_t i = 0; i < n; i += kTile) {
        const int64_t size = least(kTile, n - i);
        convert_to_f32(rows + i, sum.at, size, F32{});
        for (int row = 1; row < count; ++row) {
            const float *next = rows + row * stride + i;
            for (int64_t k = 0; k < size; ++k) sum.at[k] += next[k];
        }
        for (int64_t k = 0; k < size; ++k) y[i + k] = sum.at[k] * factor;
    }
}

void add_slices(const float *slices, int64_t stride, int ranks, int64_t n, float *value, float scale,
                const int32_t *active) {
    Buffer mean;
    for (int64_t i = 0; i < n; i += kTile) {
        const int64_t size = least(kTile, n - i);
        sum_slices(slices + i, stride, ranks, 1.0f / float(ranks), size, mean.at);
        add_residual(mean.at, value + i, scale, size);
        if (active != nullptr) zero_inactive(value + i, size, active, i);
    }
}

/// Packs signs: most significant bit first, 1 = not negative.
void pack_bits(const float *x, int64_t n, uint8_t *bits) {
    int64_t i = 0;
#if defined(__AVX512F__)
    // A mask has the lowest bit first, so the elements of each byte are reversed before the comparison.
    const __m512i backwards = _mm512_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8);
    for (; i + 16 <= n; i += 16) {
        const __m512 value = _mm512_maskz_permutexvar_ps(0xffff, backwards, _mm512_loadu_ps(x + i));
        const __mmask16 mask = _mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_NLT_UQ);
        __builtin_memcpy(bits + i / 8, &mask, sizeof mask);
    }
#elif defined(__AVX2__)
    const __m256i backwards = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    for (; i + 8 <= n; i += 8) {
        const __m256 value = _mm256_permutevar8x32_ps(_mm256_loadu_ps(x + i), backwards);
        bits[i / 8] = uint8_t(_mm256_movemask_ps(_mm256_cmp_ps(value, _mm256_setzero_ps(), _CMP_NLT_UQ)));
    }
#elif defined(__aarch64__)
    const uint32x4_t high = {128, 64, 32, 16}, low = {8, 4, 2, 1};
    for (; i + 8 <= n; i += 8) {
        const uint32x4_t first = vbicq_u32(high, vcltzq_f32(vld1q_f32(x + i)));
        const uint32x4_t second = vbicq_u32(low, vcltzq_f32(vld1q_f32(x + i + 4)));
        bits[i / 8] = uint8_t(vaddvq_u32(vorrq_u32(first, second)));
    }
#endif
    for (; i < n; i += 8) {
        unsigned byte = 0;
        for (int64_t k = 0; k < 8; ++k) byte |= unsigned(i + k >= n || !(x[i + k] < 0)) << (7 - k);
        bits[i / 8] = uint8_t(byte);
    }
}

enum class StoreMode { store, stream, add };

/// Stores the values of n bits, from bit `first` on, to y, or adds them to y. StoreMode::stream, with non-temporal
/// stores, requires that y is aligned to 32 bytes and `first` is a multiple of 8.
template <StoreMode mode>
void unpack_bits(const uint8_t *bits, int64_t first, int64_t n, float scale, float *__restrict y) {
    int64_t i = 0;
    const auto single = [&](int64_t k) {
        const float value = (bits[(first + k) / 8] >> (7 - (first + k) % 8)) & 1 ? scale : -scale;
        y[k] = mode == StoreMode::add ? y[k] + value : value;
    };
    for (; i < n && (first + i) % 8 != 0; ++i) single(i);
#if defined(__AVX2__)
    const __m256i place8 = _mm256_setr_epi32(128, 64, 32, 16, 8, 4, 2, 1);
    const auto eight = [&] {
        const __m256i byte = _mm256_and_si256(_mm256_set1_epi32(bits[(first + i) / 8]), place8);
        const __m256 negative = _mm256_castsi256_ps(_mm256_cmpeq_epi32(byte, _mm256_setzero_si256()));
        const __m256 values = _mm256_blendv_ps(_mm256_set1_ps(scale), _mm256_set1_ps(-scale), negative);
        if (mode == StoreMode::stream)
            _mm256_stream_ps(y + i, values);
        else
            _mm256_storeu_ps(y + i, mode == StoreMode::add ? _mm256_add_ps(_mm256_loadu_ps(y + i), values) : values);
        i += 8;
    };
#endif
#if defined(__AVX512F__)
    const __m512 plus = _mm512_set1_ps(scale), minus = _mm512_set1_ps(-scale);
    const __m512i low = _mm512_setr_epi32(0x80, 0x40, 0x20, 0x10, 0x8, 0x4, 0x2, 0x1, //
                                          0x8000, 0x4000, 0x2000, 0x1000, 0x800, 0x400, 0x200, 0x100);
    const __m512i high = _mm512_slli_epi32(low, 16);
    const auto sixteen = [&](__m512i word, __m512i place) {
        const __m512 values = _mm512_mask_blend_ps(_mm512_test_epi32_mask(word, place), minus, plus);
        if (mode == StoreMode::stream)
            _mm512_stream_ps(y + i, values);
        else
            _mm512_storeu_ps(y + i, mode == StoreMode::add ? _mm512_add_ps(_mm512_loadu_ps(y + i), values) : values);
        i += 16;
    };
    if (mode == StoreMode::stream && i + 8 <= n && reinterpret_cast<uintptr_t>(y + i) % 64 != 0) eight();
    while (i + 32 <= n) {
        int32_t word;
        __builtin_memcpy(&word, bits + (first + i) / 8, sizeof word);
        sixteen(_mm512_set1_epi32(word), low);
        sixteen(_mm512_set1_epi32(word), high);
    }
#endif
#if defined(__aarch64__)
    const float32x4_t plus = vdupq_n_f32(scale), minus = vdupq_n_f32(-scale);
    const uint32x4_t places[] = {{128, 64, 32, 16}, {8, 4, 2, 1}};
    while (i + 8 <= n)
        for (const uint32x4_t place : places) {
            const uint32x4_t byte = vdupq_n_u32(bits[(first + i) / 8]);
            const float32x4_t values = vbslq_f32(vtstq_u32(byte, place), plus, minus);
            vst1q_f32(y + i, mode == StoreMode::add ? vaddq_f32(vld1q_f32(y + i), values) : values);
            i += 4;
        }
#endif
#if defined(__AVX2__)
    while (i + 8 <= n) eight();
#endif
    for (; i < n; ++i) single(i);
}

double pack(const FeedInputs *added, float *value, int64_t n, uint8_t *bits) {
    LeafSum sum(n);
    for (int64_t i = 0; i < n; i += kTile) {
        const int64_t size = least(kTile, n - i);
        if (added != nullptr) {
            const int64_t real = added->numel > i ? least(size, added->numel - i) : 0;
            // Prefetches two tiles ahead: hardware prefetchers stop at the end of a page, and callers' pages are often
            // small.
            if (added->numel >= i + 3 * kTile)
                for (int64_t k = 0; k < kTile; k += 16) __builtin_prefetch(added->x + i + 2 * kTile + k);
            if (real > 0) add_residual(added->x + i, value + i, added->scale, real);
            if (real < size) add_residual(nullptr, value + i + real, added->scale, size - real);
        }
        sum.add(value + i, size);
        pack_bits(value + i, size, bits + i / 8);
    }
    return sum.fold();
}

double reduce_messages(const char *messages, int64_t message_bytes, int64_t message_scales, int ranks, int64_t slot,
                       int64_t bit, int64_t n, float *value, float scale, const int32_t *active, uint8_t *bits) {
    LeafSum total(n);
    Buffer sum;
    const float share = 1.0f / float(ranks);
    for (int64_t i = 0; i < n; i += kTile) {
        const int64_t size = least(kTile, n - i);
        for (int rank = 0; rank < ranks; ++rank) {
            const char *message = messages + rank * message_bytes;
            const auto *from = reinterpret_cast<const uint8_t *>(message) + message_scales * 4;
            const float mean = CompressLayout::scales(message)[slot] * share;
            if (rank == 0)
                unpack_bits<StoreMode::store>(from, bit + i, size, mean, sum.at);
            else
                unpack_bits<StoreMode::add>(from, bit + i, size, mean, sum.at);
        }
        add_residual(sum.at, value + i, scale, size);
        if (active != nullptr) zero_inactive(value + i, size, active, i);
        total.add(value + i, size);
        pack_bits(value + i, size, bits + (bit + i) / 8);
    }
    return total.fold();
}

template <StoreMode mode = StoreMode::store> void mean(const MeanView &view, int64_t worker, int64_t n, float *y) {
    if (view.of->values != nullptr) return convert_to_f32(view.of->values + worker, y, n, F32{});
    const CompressLayout &layout = view.of->layout;
    const CompressLayout::Unit unit = layout.groups[view.group].unit;
    while (n > 0) {
        const int64_t in_unit = worker - unit.begin, d = in_unit / unit.chunk, in_chunk = in_unit - d * unit.chunk;
        const int64_t size = least(n, unit.chunk - in_chunk);
        const char *const message = view.results + d * layout.message_bytes;
        unpack_bits<mode>(layout.bits(message), unit.server + in_chunk, size,
                          CompressLayout::scales(message)[view.group - layout.chunks[d].first_group], y);
        worker += size;
        n -= size;
        y += size;
    }
}

void mean_of_list(const MeanView &view, int64_t worker, int64_t n, float *y, const int32_t *active, bool streaming) {
    // Non-temporal stores need aligned vectors in y whose bits begin at whole bytes.
    const CompressLayout::Unit &unit = view.of->layout.groups[view.group].unit;
    if (streaming && active == nullptr && unit.begin % 8 == 0 && unit.chunk % 8 == 0 && unit.server % 8 == 0 &&
        worker % 8 == 0 && reinterpret_cast<uintptr_t>(y) % 32 == 0) {
        mean<StoreMode::stream>(view, worker, n, y);
        return fence_streaming();
    }
    mean(view, worker, n, y);
    if (active != nullptr) zero_inactive(y, n, active, worker);
}

// ------------------------------------------------------------------------------------------------ kernels of a step
/// One tile of all arrays that the rules read, as fp32.
struct Tile {
    Buffer g_buffer, m_buffer, v_buffer, track_buffer;
    const float *g, *v;
    float *p, *m, *track;
    WeightTile weights;

    explicit Tile(const OneBitSpan &span) : weights(span) {}
    /// `replaces_momentum`: the caller writes the momentum without reading it.
    void open_all(const OneBitSpan &span, int64_t i, int64_t n, bool replaces_momentum = false) {
        const TensorJob &job = *span.job;
        g = open_gradient(job, i, n, g_buffer);
        p = weights.open(i, n);
        m = m_buffer.at;
        if (!replaces_momentum && span.momentum.of != nullptr)
            mean(span.momentum, span.in_mean + i, n, m);
        else if (!replaces_momentum)
            m = open(job.moment(0), i, n, m_buffer);
        v = open(job.moment(1), i, n, v_buffer);
        track = span.track != nullptr ? span.track + i : track_buffer.at;
    }
};

/// Passes an array to apply() as read-only, so that its elements are not written back.
const float *read_only(const float *x) { return x; }

template <Feed F> struct FeedTag { static constexpr Feed value = F; };
/// Calls `f` with the tag of `feed`. No default: -Werror=switch finds the code that a new Feed must extend.
template <class F> void visit(Feed feed, const F &f) {
    switch (feed) {
    case Feed::momentum: return f(FeedTag<Feed::momentum>{});
    case Feed::scaled: return f(FeedTag<Feed::scaled>{});
    case Feed::gradient: return f(FeedTag<Feed::gradient>{});
    case Feed::distance: return f(FeedTag<Feed::distance>{});
    }
}

void feed_tile(const OneBitSpan &span, const Tile &t, int64_t n, float *to) {
    visit(span.feed, [&](auto tag) {
        constexpr Feed feed = decltype(tag)::value;
        const auto rule = [s = *span.scalars, o = span.onebit](float g, float p, float m, float v, float track,
                                                               float &x) {
            x = feed_value(feed, s, o, g, p, m, v, track);
        };
        apply(rule, n, t.g, read_only(t.p), read_only(t.m), t.v, read_only(t.track), to);
    });
}

void mean_tile(const OneBitSpan &span, const float *mean, const Tile &t, int64_t n) {
    visit(span.feed, [&](auto tag) {
        constexpr Feed feed = decltype(tag)::value;
        const auto rule = [s = *span.scalars, o = span.onebit](float y, float &p, float &m, float v, float &track) {
            apply_mean(feed, s, o, y, p, m, v, track);
        };
        if constexpr (feed == Feed::distance)
            apply(rule, n, mean, t.p, t.m, t.v, t.track);
        else
            apply(rule, n, mean, t.p, t.m, t.v, read_only(t.track));
    });
}

void local_tile(const OneBitSpan &span, const Tile &t, int64_t n) {
    const auto rule = [s = *span.scalars, o = span.onebit](float g, float &p, float &m, float v, float &track) {
        local_step(s, o, g, p, m, v, track);
    };
    if (span.onebit.anchored)
        apply(rule, n, t.g, t.p, t.m, t.v, read_only(t.track));
    else
        apply(rule, n, t.g, t.p, t.m, t.v, t.track);
}

void feed(const OneBitSpan &span) {
    const TensorJob &job = *span.job;
    Tile t(span);
    Buffer x;
    for (int64_t i = span.begin; i < span.end; i += kTile) {
        const int64_t n = least(kTile, span.end - i);
        t.open_all(span, i, n);
        if (span.feed == Feed::distance && span.steps) {
            local_tile(span, t, n);
            close(t.p, job.weight(), i, n);
            close(t.m, job.moment(0), i, n);
        }
        if (span.compensated == nullptr) continue;
        float *const value = span.compensated + span.in_local + i;
        feed_tile(span, t, n, x.at);
        add_residual(x.at, value, span.scale, n);
        if (span.active != nullptr) zero_inactive(value, n, span.active, span.in_mean + i);
    }
}

/// Writes the mean of a tile to y. Without an exchange the mean is this rank's values.
void mean_of(const OneBitSpan &span, const Tile &t, int64_t i, int64_t n, float *y) {
    if (span.mean.of == nullptr)
        feed_tile(span, t, n, y);
    else
        mean(span.mean, span.in_mean + i, n, y);
}

void apply_mean(const OneBitSpan &span) {
    const TensorJob &job = *span.job;
    const bool replaces = span.feed == Feed::momentum && span.mean.of != nullptr;
    Tile t(span);
    Buffer y;
    for (int64_t i = span.begin; i < span.end; i += kTile) {
        const int64_t n = least(kTile, span.end - i);
        t.open_all(span, i, n, replaces);
        if (span.momentum_in_results) t.m = t.m_buffer.at;
        mean_of(span, t, i, n, y.at);
        if (span.mask != nullptr)
            for (int64_t k = 0; k < n; ++k) y.at[k] *= span.mask[i + k];
        mean_tile(span, y.at, t, n);
        if (!span.momentum_in_results && replaces)
            store(t.m, job.moment(0), i, n, span.streaming);
        else if (!span.momentum_in_results)
            close(t.m, job.moment(0), i, n);
        t.weights.close(i, n);
    }
}

struct LambTile {
    Buffer without_decay, update, factor;
};
/// 1-bit LAMB for one tile, with the mean momentum `y`. `mask` NULL: all ones.
void apply_lamb_mean(const Scalars s, const OneBitScalars o, const float *__restrict y, const float *__restrict mask,
                     const float *__restrict p, float *__restrict m, const float *__restrict v,
                     float *__restrict fresh_variance, LambTile &out, int64_t n) {
    const auto apply_to_element = [&](int64_t i, float factor) {
        float momentum = m[i], variance = fresh_variance[i]; // copies, as in apply_once()
        const LambUpdate u = lamb_apply_mean(s, o, y[i], factor, p[i], momentum, v[i], variance);
        m[i] = momentum;
        fresh_variance[i] = variance;
        out.without_decay.at[i] = u.without_decay;
        out.update.at[i] = u.update;
        out.factor.at[i] = u.factor;
    };
    if (mask == nullptr) {
        DSOPT_LOOP_NO_ALIAS
        for (int64_t i = 0; i < n; ++i) apply_to_element(i, 1.0f);
    } else {
        DSOPT_LOOP_NO_ALIAS
        for (int64_t i = 0; i < n; ++i) apply_to_element(i, mask[i]);
    }
}

void lamb_mean(const OneBitSpan &span, double *factors) {
    const TensorJob &job = *span.job;
    const Scalars s = *span.scalars;
    Tile t(span);
    Buffer y;
    LambTile tile;
    for (int64_t leaf = span.begin; leaf < span.end; leaf += kLeaf) {
        const int64_t stop = least(leaf + kLeaf, span.end);
        LeafSum sum_without(stop - leaf), sum_with(stop - leaf);
        float largest = 0;
        for (int64_t i = leaf; i < stop; i += kTile) {
            const int64_t n = least(kTile, stop - i);
            t.open_all(span, i, n);
            mean_of(span, t, i, n, y.at);
            apply_lamb_mean(s, span.onebit, y.at, span.mask != nullptr ? span.mask + i : nullptr, t.p, t.m, t.v,
                            span.fresh_variance + i, tile, n);
            sum_without.add(tile.without_decay.at, n);
            sum_with.add(tile.update.at, n);
            largest = largest_magnitude(tile.factor.at, n, largest); // factors are not negative
            close(t.m, job.moment(0), i, n);
        }
        const int64_t index = job.first_leaf + leaf / kLeaf;
        span.sums_a[index] = sum_without.fold();
        span.sums_b[index] = sum_with.fold();
        factors[index] = double(largest);
    }
}

void lamb_weights(const OneBitSpan &span) {
    const Scalars s = *span.scalars;
    const float lr = s.lr * span.trust;
    Tile t(span);
    for (int64_t i = span.begin; i < span.end; i += kTile) {
        const int64_t n = least(kTile, span.end - i);
        t.open_all(span, i, n);
        apply([=](float &p, float m, float v) { p = p - lr * frozen_update(s, p, m, v); }, n, t.p, read_only(t.m), t.v);
        t.weights.close(i, n);
    }
}

void local(const OneBitSpan &span) {
    const TensorJob &job = *span.job;
    Tile t(span);
    for (int64_t i = span.begin; i < span.end; i += kTile) {
        const int64_t n = least(kTile, span.end - i);
        t.open_all(span, i, n);
        local_tile(span, t, n);
        close(t.m, job.moment(0), i, n);
        t.weights.close(i, n);
    }
}

} // namespace

extern const OneBitKernels DSOPT_JOIN(onebit_, DSOPT_ISA);
const OneBitKernels DSOPT_JOIN(onebit_, DSOPT_ISA) = {add_residual,    sum_slices,   add_slices, pack,
                                                      reduce_messages, mean_of_list, feed,       apply_mean,
                                                      lamb_mean,       lamb_weights, local};

} // namespace dsopt::cpu
