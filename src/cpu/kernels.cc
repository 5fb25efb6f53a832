// SPDX-License-Identifier: Apache-2.0
// Compiled with -DDSOPT_ISA=<name> and that instruction set's flags. Everything but the table is local to this file,
// and no function of the standard library is used: the linker keeps one copy of a shared inline function, and it could
// be this one.
#include "cpu/kernels.h"
#include "rules/lamb.h"
#include "rules/rounding.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace dsopt::cpu {
namespace {

// Arrays are worked on in tiles that stay in the first-level cache: 16-bit ones are widened into a buffer and rounded
// back, fp32 ones are used where they are. So a rule is one loop over floats, whatever the storage types. Tiles are
// short so that the loops of one run while the next one's memory is on its way.
constexpr int64_t kTile = 256;
static_assert(kLeaf % kTile == 0 && kTile % 32 == 0);

struct alignas(64) Buffer {
    float at[kTile];
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// ------------------------------------------------------------------------------------------------------- conversions
void widen(const uint16_t *from, float *to, int64_t n, F16) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i))));
#endif
    for (; i < n; ++i) to[i] = f16_to_f32(from[i]);
}
void narrow(const float *from, uint16_t *to, int64_t n, F16) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; ++i) to[i] = f32_to_f16(from[i]);
}
void widen(const uint16_t *from, float *to, int64_t n, BF16) {
    for (int64_t i = 0; i < n; ++i) to[i] = bf16_to_f32(from[i]);
}
void narrow(const float *from, uint16_t *to, int64_t n, BF16) {
    for (int64_t i = 0; i < n; ++i) to[i] = f32_to_bf16(from[i]);
}
void widen(const float *from, float *to, int64_t n, F32) {
    if (from != to) __builtin_memmove(to, from, size_t(n) * sizeof(float));
}
void narrow(const float *from, float *to, int64_t n, F32) { widen(from, to, n, F32{}); }

#if defined(__AVX2__)
/// Sixteen floats as one register. Through memory it would wait: two stores of 16 bytes do not forward to a load of 32.
__m256i narrow16(const float *from, F16) {
    return _mm256_set_m128i(_mm256_cvtps_ph(_mm256_loadu_ps(from + 8), _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
__m256i narrow8(const float *from, BF16) { // f32_to_bf16, in 32-bit lanes
    const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(from)), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    return _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}
__m256i narrow16(const float *from, BF16 tag) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow8(from, tag), narrow8(from + 8, tag)), 0xd8);
}
#endif

/// As `narrow`, past the caches: for arrays that are only written, and too long to be read again before they fall out.
/// Without it every line is read before it is overwritten.
template <class Tag> void narrow_streaming(const float *from, typename Tag::storage *to, int64_t n, Tag tag) {
#if defined(__AVX2__)
    if constexpr (sizeof(typename Tag::storage) == 2) {
        int64_t i = least(n, int64_t(-(reinterpret_cast<uintptr_t>(to) / 2) & 31));
        narrow(from, to, i, tag);
        for (; i + 32 <= n; i += 32)
            for (int64_t k = i; k < i + 32; k += 16)
                _mm256_stream_si256(reinterpret_cast<__m256i *>(to + k), narrow16(from + k, tag));
        narrow(from + i, to + i, n - i, tag);
        return;
    }
#endif
    narrow(from, to, n, tag);
}
/// Streaming stores are visible to other threads only after this.
void fence_streaming() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

template <class T> T *element(void *data, int64_t index) { return static_cast<T *>(data) + index; }
template <class T> const T *element(const void *data, int64_t index) { return static_cast<const T *>(data) + index; }

void load(const void *data, Dtype type, int64_t index, int64_t n, float *to) {
    visit(type, [&](auto tag) { widen(element<typename decltype(tag)::storage>(data, index), to, n, tag); });
}
void store(const float *from, void *data, Dtype type, int64_t index, int64_t n, bool streaming = false) {
    visit(type, [&](auto tag) {
        auto *to = element<typename decltype(tag)::storage>(data, index);
        if (streaming)
            narrow_streaming(from, to, n, tag);
        else
            narrow(from, to, n, tag);
    });
}

/// The tile as floats: in place for fp32 unless a private copy is wanted, else widened into `buffer`.
float *open(void *data, Dtype type, int64_t index, int64_t n, Buffer &buffer, bool private_copy = false) {
    if (type == Dtype::f32 && !private_copy) return element<float>(data, index);
    load(data, type, index, n, buffer.at);
    return buffer.at;
}
void close(const float *tile, void *data, Dtype type, int64_t index, int64_t n) {
    if (type != Dtype::f32) store(tile, data, type, index, n);
}
/// As `open`, for memory that is only read.
const float *view(const void *data, Dtype type, int64_t index, int64_t n, Buffer &buffer) {
    return open(const_cast<void *>(data), type, index, n, buffer);
}
const float *open_gradient(const TensorJob &job, int64_t index, int64_t n, Buffer &buffer) {
    if (job.grad != nullptr) return view(job.grad, job.grad_type, index, n, buffer);
    __builtin_memset(buffer.at, 0, sizeof buffer.at);
    return buffer.at;
}
void zero_gradient(const TensorJob &job, int64_t index, int64_t n) {
    const size_t size = dtype_size(job.grad_type);
    __builtin_memset(static_cast<char *>(job.grad) + size_t(index) * size, 0, size_t(n) * size);
}

// -------------------------------------------------------------------------------------------------------- reductions
typedef float Float8 __attribute__((vector_size(32), aligned(4)));
typedef double Double8 __attribute__((vector_size(64)));

Float8 floats8(const float *x, F32) { return *reinterpret_cast<const Float8 *>(x); }
Float8 floats8(const uint16_t *x, BF16) {
#if defined(__AVX2__)
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(x));
    return Float8(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#else
    typedef uint16_t Half8 __attribute__((vector_size(16), aligned(2)));
    typedef uint32_t Word8 __attribute__((vector_size(32)));
    return Float8(__builtin_convertvector(*reinterpret_cast<const Half8 *>(x), Word8) << 16);
#endif
}
Float8 floats8(const uint16_t *x, F16) {
#if defined(__F16C__)
    return Float8(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x))));
#else
    Float8 all;
    for (int i = 0; i < 8; ++i) all[i] = f16_to_f32(x[i]);
    return all;
#endif
}

/// gcc 12 makes four instructions of the AVX-512 one when left to itself, and warns of its own header without a mask.
Double8 doubles8(Float8 x) {
#if defined(__AVX512F__)
    return Double8(_mm512_maskz_cvtps_pd(0xff, __m256(x)));
#else
    return __builtin_convertvector(x, Double8);
#endif
}

/// Sum of squares of a leaf: element i goes to lane i % 32, lanes are doubles, and the fold halves their number five
/// times. That order is part of the result on every backend.
struct LeafSum {
    Double8 lane[4] = {};

    /// `x` starts at a multiple of 32 in its leaf.
    template <class Tag> void add(const typename Tag::storage *x, int64_t n, Tag tag) {
        int64_t i = 0;
        Double8 l0 = lane[0], l1 = lane[1], l2 = lane[2], l3 = lane[3];
        for (; i + 32 <= n; i += 32) {
            l0 = plus_square(l0, doubles8(floats8(x + i, tag)));
            l1 = plus_square(l1, doubles8(floats8(x + i + 8, tag)));
            l2 = plus_square(l2, doubles8(floats8(x + i + 16, tag)));
            l3 = plus_square(l3, doubles8(floats8(x + i + 24, tag)));
        }
        lane[0] = l0, lane[1] = l1, lane[2] = l2, lane[3] = l3;
        for (int64_t k = 0; i < n; ++i, ++k) {
            const double element = double(Tag::load(x[i]));
            lane[k / 8][k % 8] += element * element;
        }
    }
    void add(const float *x, int64_t n) { add(x, n, F32{}); }
    double fold() const {
        double sum[32];
        for (int i = 0; i < 32; ++i) sum[i] = lane[i / 8][i % 8];
        for (int width = 16; width != 0; width /= 2)
            for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
        return sum[0];
    }
    /// The square of a float is exact in double, so a fused multiply-add rounds once like the two operations do.
    static Double8 plus_square(Double8 sum, Double8 x) {
#if defined(__AVX512F__)
        return Double8(_mm512_fmadd_pd(__m512d(x), __m512d(x), __m512d(sum)));
#else
        return sum + x * x;
#endif
    }
};

int64_t count_nonfinite(const float *x, int64_t n) {
    int32_t bad = 0, nans = 0;
    for (int64_t i = 0; i < n; ++i) {
        bad += (bits_of(x[i]) & 0x7f800000u) == 0x7f800000u;
        nans += (bits_of(x[i]) & 0x7fffffffu) > 0x7f800000u;
    }
    return bad + (int64_t(nans) << 32);
}

/// Magnitudes compare as integers, and a NaN is above them all.
float largest_magnitude(const float *x, int64_t n, float so_far) {
    uint32_t most = bits_of(so_far);
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    return float_of(most);
}

void squares(const void *data, Dtype type, int64_t begin, int64_t end, double *squares, int64_t index) {
    visit(type, [&](auto tag) {
        const auto *x = element<typename decltype(tag)::storage>(data, 0);
        for (int64_t leaf = begin; leaf < end; leaf += kLeaf, ++index) {
            // One stream a thread is too little for the hardware's prefetchers, so the next leaf is asked for here.
            const bool more = leaf + 2 * kLeaf <= end;
            LeafSum sum;
            for (int64_t i = leaf, stop = least(leaf + kLeaf, end); i < stop; i += kTile) {
                if (more)
                    for (int64_t k = 0; k < kTile; k += int64_t(64 / sizeof *x)) __builtin_prefetch(x + i + kLeaf + k);
                sum.add(x + i, least(kTile, stop - i), tag);
            }
            squares[index] = sum.fold();
        }
    });
}

void inspect(const void *data, Dtype type, int64_t begin, int64_t end, double *sums, int64_t *bad, float *largest,
             int64_t index) {
    squares(data, type, begin, end, sums, index);
    Buffer buffer;
    for (int64_t leaf = begin; leaf < end; leaf += kLeaf, ++index) {
        bad[index] = 0;
        // Squares of floats and 4,096 of them cannot overflow a double, so a finite sum means finite elements. Only a
        // leaf with a non-finite one is read again to count them.
        const bool suspect = !__builtin_isfinite(sums[index]);
        if (!suspect && largest == nullptr) continue;
        const int64_t stop = least(leaf + kLeaf, end);
        float most = 0;
        for (int64_t i = leaf; i < stop; i += kTile) {
            const int64_t n = least(kTile, stop - i);
            const float *x = view(data, type, i, n, buffer);
            if (suspect) bad[index] += count_nonfinite(x, n);
            if (largest != nullptr) most = largest_magnitude(x, n, most);
        }
        if (largest != nullptr) largest[index] = most;
    }
}

// ------------------------------------------------------------------------------------------------------------- rules
template <class R>
void apply(const R rule, const float *__restrict g, float *__restrict p, float *__restrict m, float *__restrict v,
           int64_t n) {
    for (int64_t i = 0; i < n; ++i) rule(g[i], p[i], m[i], v[i]);
}

/// old becomes now - old, or what `out` gets with the delta flag.
void subtract(const float *__restrict now, float *__restrict old, int64_t n) {
    for (int64_t i = 0; i < n; ++i) old[i] = now[i] - old[i];
}

/// Where the new weights of a tile go: the weight itself, the low-precision copy, the output.
void publish(const Span &span, const float *tile, const float *delta, int64_t index, int64_t n) {
    const TensorJob &job = *span.job;
    if (job.copy != nullptr) store(tile, job.copy, job.copy_type, index, n, span.streaming);
    if (job.out != nullptr) store(span.flags & kDelta ? delta : tile, job.out, job.out_type, index, n);
    if (span.flags & kZeroGrads && job.grad != nullptr) zero_gradient(job, index, n);
}

void round_stochastic(float *__restrict p, uint64_t key, int64_t first, int64_t n) {
    for (int64_t i = 0; i < n; ++i) p[i] = round_stochastic_bf16(p[i], random_bits(key, uint64_t(first + i)));
}
/// Rounds the tile where that is random; what follows it then rounds nothing any more.
void settle(const Span &span, float *tile, int64_t index, int64_t n) {
    const TensorJob &job = *span.job;
    if (job.stochastic) round_stochastic(tile, rounding_key(job.random_key, span.step), job.offset + index, n);
}

/// OUT_ONLY leaves parameters alone, but a master is state.
bool keeps_weight(const Span &span) { return (span.flags & kOutOnly) && !span.job->has_master; }

template <class R> void update_with(const R &rule, const Span &span) {
    const TensorJob &job = *span.job;
    const bool keep = keeps_weight(span), needs_old = span.sums || (span.flags & kDelta);
    Buffer g_buffer, p_buffer, m_buffer, v_buffer, old;
    for (int64_t leaf = span.begin; leaf < span.end; leaf += kLeaf) {
        const int64_t stop = least(leaf + kLeaf, span.end);
        LeafSum weight_sum, update_sum;
        for (int64_t i = leaf; i < stop; i += kTile) {
            const int64_t n = least(kTile, stop - i);
            const float *g = open_gradient(job, i, n, g_buffer);
            float *p = open(job.weight, job.weight_type, i, n, p_buffer, keep);
            float *m = open(job.m, job.state_type, i, n, m_buffer);
            float *v = open(job.v, job.state_type, i, n, v_buffer);
            if (needs_old) widen(p, old.at, n, F32{});
            if (span.sums) weight_sum.add(p, n);
            apply(rule, g, p, m, v, n);
            settle(span, p, i, n);
            if (needs_old) subtract(p, old.at, n);
            if (span.sums) update_sum.add(old.at, n);
            if (!keep) close(p, job.weight, job.weight_type, i, n);
            close(m, job.m, job.state_type, i, n);
            close(v, job.v, job.state_type, i, n);
            publish(span, p, old.at, i, n);
        }
        if (span.sums) {
            span.sums_a[job.first_leaf + leaf / kLeaf] = weight_sum.fold();
            span.sums_b[job.first_leaf + leaf / kLeaf] = update_sum.fold();
        }
    }
}

void update(Rule rule, const Span &span) {
    switch (rule) {
    case Rule::adam: update_with(Adam<false>{*span.scalars}, span); break;
    case Rule::adamw: update_with(Adam<true>{*span.scalars}, span); break;
    case Rule::legacy: update_with(LegacyAdam<false>{*span.scalars}, span); break;
    case Rule::legacy_eps_inside: update_with(LegacyAdam<true>{*span.scalars}, span); break;
    case Rule::lamb:
    case Rule::lamb_eps_inside: break; // two sweeps, below
    }
    if (span.streaming) fence_streaming();
}

template <class R>
void apply_moments(const R rule, const float *__restrict g, const float *__restrict p, float *__restrict m,
                   float *__restrict v, float *__restrict u, int64_t n) {
    for (int64_t i = 0; i < n; ++i) u[i] = rule(g[i], p[i], m[i], v[i]);
}

template <class R> void lamb_moments_with(const R &rule, const Span &span) {
    const TensorJob &job = *span.job;
    Buffer g_buffer, p_buffer, m_buffer, v_buffer, u;
    for (int64_t leaf = span.begin; leaf < span.end; leaf += kLeaf) {
        const int64_t stop = least(leaf + kLeaf, span.end);
        LeafSum weight_sum, update_sum;
        for (int64_t i = leaf; i < stop; i += kTile) {
            const int64_t n = least(kTile, stop - i);
            const float *g = open_gradient(job, i, n, g_buffer);
            const float *p = open(job.weight, job.weight_type, i, n, p_buffer);
            float *m = open(job.m, job.state_type, i, n, m_buffer);
            float *v = open(job.v, job.state_type, i, n, v_buffer);
            apply_moments(rule, g, p, m, v, u.at, n);
            weight_sum.add(p, n);
            update_sum.add(u.at, n);
            close(m, job.m, job.state_type, i, n);
            close(v, job.v, job.state_type, i, n);
        }
        span.sums_a[job.first_leaf + leaf / kLeaf] = weight_sum.fold();
        span.sums_b[job.first_leaf + leaf / kLeaf] = update_sum.fold();
    }
}

void lamb_moments(Rule rule, const Span &span) {
    if (rule == Rule::lamb)
        lamb_moments_with(LambMoments<false>{*span.scalars}, span);
    else
        lamb_moments_with(LambMoments<true>{*span.scalars}, span);
}

template <class R>
void apply_weights(const R rule, float *__restrict p, const float *__restrict m, const float *__restrict v, int64_t n) {
    for (int64_t i = 0; i < n; ++i) rule(p[i], m[i], v[i]);
}

template <class R> void lamb_weights_with(const R &rule, const Span &span) {
    const TensorJob &job = *span.job;
    const bool keep = keeps_weight(span);
    Buffer p_buffer, m_buffer, v_buffer, old;
    for (int64_t i = span.begin; i < span.end; i += kTile) {
        const int64_t n = least(kTile, span.end - i);
        float *p = open(job.weight, job.weight_type, i, n, p_buffer, keep);
        const float *m = open(job.m, job.state_type, i, n, m_buffer);
        const float *v = open(job.v, job.state_type, i, n, v_buffer);
        if (span.flags & kDelta) widen(p, old.at, n, F32{});
        apply_weights(rule, p, m, v, n);
        settle(span, p, i, n);
        if (span.flags & kDelta) subtract(p, old.at, n);
        if (!keep) close(p, job.weight, job.weight_type, i, n);
        publish(span, p, old.at, i, n);
    }
}

void lamb_weights(Rule rule, const Span &span) {
    if (rule == Rule::lamb)
        lamb_weights_with(LambWeights<false>{*span.scalars, span.trust}, span);
    else
        lamb_weights_with(LambWeights<true>{*span.scalars, span.trust}, span);
    if (span.streaming) fence_streaming();
}

void unchanged(const Span &span) {
    const TensorJob &job = *span.job;
    Buffer p_buffer;
    for (int64_t i = span.begin; i < span.end; i += kTile) {
        const int64_t n = least(kTile, span.end - i);
        if (job.out != nullptr) {
            if (span.flags & kDelta)
                __builtin_memset(p_buffer.at, 0, sizeof p_buffer.at);
            else
                load(job.weight, job.weight_type, i, n, p_buffer.at);
            store(p_buffer.at, job.out, job.out_type, i, n);
        }
        if (span.flags & kZeroGrads && job.grad != nullptr) zero_gradient(job, i, n);
    }
}

void multiply_add(float a, const float *x, float b, const float *y, float *result, int64_t n) {
    if (y == nullptr)
        for (int64_t i = 0; i < n; ++i) result[i] = a * x[i];
    else
        for (int64_t i = 0; i < n; ++i) result[i] = a * x[i] + b * y[i];
}

void axpby(float a, const dsopt_tensor &x, float b, const dsopt_tensor &y, int64_t begin, int64_t end) {
    Buffer x_buffer, y_buffer, result;
    for (int64_t i = begin; i < end; i += kTile) {
        const int64_t n = least(kTile, end - i);
        const float *from = view(x.data, Dtype(x.dtype), i, n, x_buffer);
        const float *old = b != 0 ? view(y.data, Dtype(y.dtype), i, n, y_buffer) : nullptr;
        multiply_add(a, from, b, old, result.at, n);
        store(result.at, y.data, Dtype(y.dtype), i, n);
    }
}

void clamp(const dsopt_tensor &x, float limit, int64_t begin, int64_t end) {
    Buffer buffer;
    for (int64_t i = begin; i < end; i += kTile) {
        const int64_t n = least(kTile, end - i);
        float *tile = open(x.data, Dtype(x.dtype), i, n, buffer);
        for (int64_t k = 0; k < n; ++k) {
            const float value = tile[k] > limit ? limit : tile[k];
            tile[k] = value < -limit ? -limit : value;
        }
        close(tile, x.data, Dtype(x.dtype), i, n);
    }
}

} // namespace

#define DSOPT_PASTE(a, b) a##b
#define DSOPT_TABLE(isa) DSOPT_PASTE(kernels_, isa)
#define DSOPT_TEXT(isa) DSOPT_QUOTE(isa)
#define DSOPT_QUOTE(isa) #isa
extern const Kernels DSOPT_TABLE(DSOPT_ISA);
const Kernels DSOPT_TABLE(DSOPT_ISA) = {DSOPT_TEXT(DSOPT_ISA), inspect,   squares, update, lamb_moments,
                                        lamb_weights,          unchanged, axpby,   clamp};

} // namespace dsopt::cpu
