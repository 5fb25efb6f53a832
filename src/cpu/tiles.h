// SPDX-License-Identifier: Apache-2.0
// Building blocks of the kernels in kernels.cc and onebit_kernels.cc. Included by files that are compiled once per
// instruction set, so everything is local to the including file.
#pragma once
#include "cpu/codecs.h"
#include "cpu/kernels.h"
#include "cpu/prefetch.h"
#include "cpu/registers.h"
#include "rules/formats.h"
#include "rules/lane_sum.h"
#include "rules/rounding.h"

namespace dsopt::cpu {
namespace {

// Arrays are processed in tiles that stay in the first-level cache: 16-bit arrays are converted to fp32 in a buffer and
// rounded back, fp32 arrays are used in place. So a rule is one loop over floats for all storage types. Tiles are
// short, so that the arithmetic of one tile overlaps with the loads of the next. The most common forms of a step use
// registers in place of tiles: see kernels.cc.
constexpr int64_t kTile = 256;
static_assert(kLeaf % kTile == 0 && kTile % kLeafLanes == 0);

struct alignas(64) Buffer {
    float at[kTile];
};

/// Precedes a loop over arrays that do not overlap. gcc drops __restrict when it inlines a function, and then tests
/// for overlap before each tile, which costs LAMB a tenth of its time in cache.
#if defined(__GNUC__) && !defined(__clang__)
#define DSOPT_LOOP_NO_ALIAS _Pragma("GCC ivdep")
#else
#define DSOPT_LOOP_NO_ALIAS
#endif

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline void assign(float &to, float value) { to = value; }
inline void assign(const float &, float) {}
/// Applies the rule to one element of each array. The rule changes copies: all elements are read before any is written,
/// so the compiler need not read again in case arrays overlap. Arrays that are not const are written even if the rule
/// did not change the copy.
template <class R, class... T> inline void apply_once(const R &rule, T &...x) {
    [&](auto... value) {
        rule(value...);
        (assign(x, value), ...);
    }(x...);
}
/// Applies the rule to the N elements of a small register. Not inlined: the compiler would merge several of these
/// kernels. The rule is passed by reference: passed by value, it would be spilled with narrow stores and loaded with
/// wide ones (store-forwarding stall), which wait for all earlier stores, including the main loop's.
template <int N, class R, class... T> __attribute__((noinline)) void apply_to(const R &rule, T *__restrict... x) {
    for (int i = 0; i < N; ++i) apply_once(rule, x[i]...);
}
/// Calls rule(x[i]...) for n elements of arrays that do not overlap, in loops that the compiler vectorises. The
/// elements after the last whole register use smaller registers, which is about four times faster than single elements.
template <class R, class... T> void apply(const R &rule, int64_t n, T *__restrict... x) {
    const R local = rule; // a local copy whose address does not escape: it stays in registers
    const int64_t whole = n & -16;
    DSOPT_LOOP_NO_ALIAS
    for (int64_t i = 0; i < whole; ++i) apply_once(local, x[i]...);
    if (whole == n) return;
    if (n & 8) apply_to<8>(rule, x + whole...);
    if (n & 4) apply_to<4>(rule, x + (n & -8)...);
    DSOPT_LOOP_NO_ALIAS
    for (int64_t i = 0, rest = n & 3; i < rest; ++i) apply_once(local, x[n - rest + i]...);
}

// ------------------------------------------------------------------------------------------------------- conversions
template <class Tag> void convert_to_f32(const typename Tag::storage *from, float *to, int64_t n, Tag tag) {
    int64_t i = 0;
#if DSOPT_HAS_REGISTERS
    for (; i + kWide <= n; i += kWide) write(load(from + i, tag), to + i);
#endif
    for (; i < n; ++i) to[i] = tag.load(from[i]);
}
inline void convert_to_f32(const float *from, float *to, int64_t n, F32) {
    if (from != to) __builtin_memmove(to, from, size_t(n) * sizeof(float));
}
template <class Tag> void convert_from_f32(const float *from, typename Tag::storage *to, int64_t n, Tag tag) {
    int64_t i = 0;
#if DSOPT_HAS_REGISTERS
    for (; i + kWide <= n; i += kWide) write(rounded(load(from + i, F32{}), tag), to + i);
#endif
    for (; i < n; ++i) to[i] = tag.store(from[i]);
}
inline void convert_from_f32(const float *from, float *to, int64_t n, F32 tag) { convert_to_f32(from, to, n, tag); }

/// Like convert_from_f32(), with non-temporal stores: for arrays that are only written and longer than the caches.
/// Plain stores read every cache line before they overwrite it.
template <class Tag> void convert_from_f32_streaming(const float *from, typename Tag::storage *to, int64_t n, Tag tag) {
#if DSOPT_HAS_REGISTERS
    constexpr int64_t size = sizeof *to, line = 64 / size;
    const int64_t head = least(n, int64_t(-(reinterpret_cast<uintptr_t>(to) / size) & (line - 1)));
    const int64_t whole = head + ((n - head) & -line);
    convert_from_f32(from, to, head, tag);
    for (int64_t i = head; i < whole; i += kWide) write_streaming(rounded(load(from + i, F32{}), tag), to + i);
    convert_from_f32(from + whole, to + whole, n - whole, tag);
#else
    convert_from_f32(from, to, n, tag);
#endif
}

template <class T> T *element(void *data, int64_t index) { return static_cast<T *>(data) + index; }
template <class T> const T *element(const void *data, int64_t index) { return static_cast<const T *>(data) + index; }

/// Codec of a format: load() converts n elements of an array, from `index` on, to fp32; store() converts them back.
inline void load(const Slot &from, int64_t index, int64_t n, float *to) {
    visit(from.format,
          [&](auto tag) { convert_to_f32(element<typename decltype(tag)::storage>(from.data, index), to, n, tag); });
}
inline void store(const float *from, const Slot &slot, int64_t index, int64_t n, bool streaming = false) {
    visit(slot.format, [&](auto tag) {
        auto *to = element<typename decltype(tag)::storage>(slot.data, index);
        if (streaming)
            convert_from_f32_streaming(from, to, n, tag);
        else
            convert_from_f32(from, to, n, tag);
    });
}

/// Calls body(i, random) for each i below n, with the random bits of element first + i. A loop has elements with the same
/// upper 32 bits, so that it has no 64-bit operations.
template <class Body> void for_random_rows(uint64_t key, int64_t first, int64_t n, const Body &body) {
    for (int64_t begin = 0; begin < n;) {
        const auto element = uint64_t(first + begin);
        const int64_t end = least(n, begin + int64_t((uint64_t(1) << 32) - (element & 0xffffffffu)));
        const RandomRow row(key, element);
        const uint32_t low = uint32_t(element) - uint32_t(begin);
        DSOPT_LOOP_NO_ALIAS
        for (int64_t i = begin; i < end; ++i) body(i, row.bits(low + uint32_t(i)));
        begin = end;
    }
}
inline void round_stochastically(float *p, uint64_t key, int64_t first, int64_t n) {
    for_random_rows(key, first, n, [&](int64_t i, uint32_t random) { p[i] = round_stochastic_bf16(p[i], random); });
}

// A case per format, and no visit_codec(): with it LAMB's step of small fp32 tensors takes 6 % longer.
inline void load_moment(const Moment &moment, int64_t index, int64_t n, float *to) {
    const auto load_codes = [&]<class Codec>(Codec) {
        load_stored_block<Codec>(element<uint8_t>(moment.data, index), moment.scale[index / kBlock], n, to);
    };
    switch (moment.format) {
    case Format::f32:
    case Format::f16:
    case Format::bf16: return load({moment.data, Dtype(moment.format)}, index, n, to);
    case Format::bf16_random: return load({moment.data, Dtype::bf16}, index, n, to);
    case Format::e4m3: return load_codes(E4M3{});
    case Format::q8: return load_codes(Q8{});
    case Format::q8_squares: return load_codes(Q8Squares{});
    }
}
/// `key`: of the random numbers, moment_key(). `first`: index of the array's first element in the whole tensor.
inline void store_moment(const float *from, const Moment &moment, int64_t index, int64_t n, uint64_t key,
                         int64_t first) {
    const auto store_codes = [&]<class Codec>(Codec) {
        store_stored_block<Codec>(from, n, element<uint8_t>(moment.data, index), moment.scale + index / kBlock);
    };
    switch (moment.format) {
    case Format::f32:
    case Format::f16:
    case Format::bf16: return store(from, {moment.data, Dtype(moment.format)}, index, n);
    case Format::bf16_random: {
        auto *const to = element<uint16_t>(moment.data, index);
        return for_random_rows(key, first + index, n, [&](int64_t i, uint32_t random) {
            to[i] = uint16_t(bits_of(round_stochastic_bf16(from[i], random)) >> 16);
        });
    }
    case Format::e4m3: return store_codes(E4M3{});
    case Format::q8: return store_codes(Q8{});
    case Format::q8_squares: return store_codes(Q8Squares{});
    }
}

/// Returns the tile as fp32: in place for fp32 arrays unless `private_copy`, else converted into `buffer`.
inline float *open(const Slot &slot, int64_t index, int64_t n, Buffer &buffer, bool private_copy = false) {
    if (slot.format == Dtype::f32 && !private_copy) return element<float>(slot.data, index);
    load(slot, index, n, buffer.at);
    return buffer.at;
}
inline void close(const float *tile, const Slot &slot, int64_t index, int64_t n) {
    if (slot.format != Dtype::f32) store(tile, slot, index, n);
}
/// The same for the k-th moment of a span. `n` is kTile or ends at the tensor's end: a tile is a block.
static_assert(kTile == kBlock);
inline float *open_moment(const Span &span, int k, int64_t index, int64_t n, Buffer &buffer) {
    const TensorJob &job = *span.job;
    if (!job.stored) return open(job.moment(k), index, n, buffer);
    const Moment moment = job.stored_moment(k);
    if (moment.format == Format::f32) return element<float>(moment.data, index);
    load_moment(moment, index, n, buffer.at);
    return buffer.at;
}
template <class R> void close_moment(const float *tile, const Span &span, int k, int64_t index, int64_t n) {
    const TensorJob &job = *span.job;
    if (!job.stored) return close(tile, job.moment(k), index, n);
    const Moment moment = job.stored_moment(k);
    if (moment.format == Format::f32) return;
    const MomentKind kind = R::moments.info[k].squares ? MomentKind::square : MomentKind::gradient;
    store_moment(tile, moment, index, n, moment_key(job.random_key, kind, span.step), job.range.begin);
}
/// The same for the weights, which are masters if there is a remainder.
inline float *open_weights(const TensorJob &job, int64_t index, int64_t n, Buffer &buffer, bool private_copy = false) {
    if (job.remainder == nullptr) return open(job.weight(), index, n, buffer, private_copy);
    const auto *const weight = element<uint16_t>(job.weight().data, index), *const remainder = job.remainder + index;
    for (int64_t i = 0; i < n; ++i) buffer.at[i] = join_master({weight[i], remainder[i]});
    return buffer.at;
}
/// Stores remainders and, unless `skips_weights`, the weights.
inline void store_masters(const float *masters, const TensorJob &job, int64_t index, int64_t n, bool skips_weights) {
    uint16_t *const remainder = job.remainder + index, *const weight = element<uint16_t>(job.data[kWeight], index);
    if (skips_weights) {
        for (int64_t i = 0; i < n; ++i) remainder[i] = split_master(masters[i]).remainder;
        return;
    }
    DSOPT_LOOP_NO_ALIAS
    for (int64_t i = 0; i < n; ++i) {
        const SplitMaster split = split_master(masters[i]);
        weight[i] = split.weight;
        remainder[i] = split.remainder;
    }
}
/// Rounds masters to the weights that belong to their remainders.
inline void store_split_weights(const float *masters, void *weights, int64_t index, int64_t n) {
    auto *const to = element<uint16_t>(weights, index);
    for (int64_t i = 0; i < n; ++i) to[i] = split_master(masters[i]).weight;
}
inline const float *open_gradient(const TensorJob &job, int64_t index, int64_t n, Buffer &buffer) {
    if (job.grad()) return open(job.grad(), index, n, buffer);
    __builtin_memset(buffer.at, 0, sizeof buffer.at);
    return buffer.at;
}

// -------------------------------------------------------------------------------------------------------- reductions
// Register of doubles. The compiler keeps wider vectors, and arrays of them, in memory.
#if defined(__AVX512F__)
constexpr int kDoubles = 8;
#elif defined(__AVX2__)
constexpr int kDoubles = 4;
#else
constexpr int kDoubles = 2;
#endif
typedef double Doubles __attribute__((vector_size(kDoubles * 8)));

/// Loads kDoubles elements of an array.
template <class Tag> Doubles doubles(const typename Tag::storage *x, [[maybe_unused]] Tag tag) {
#if defined(__AVX512F__) // masked: gcc 12 makes four instructions of the plain form
    if constexpr (std::is_same_v<Tag, F32>)
        return Doubles(_mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(x)));
    else
        return Doubles(_mm512_maskz_cvtps_pd(0xff, as_f32(read<__m128i>(x), tag)));
#elif defined(__AVX2__)
    if constexpr (std::is_same_v<Tag, F32>)
        return Doubles(_mm256_cvtps_pd(_mm_loadu_ps(x)));
    else
        return Doubles(_mm256_cvtps_pd(as_f32x4(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(x)), tag)));
#elif defined(__aarch64__)
    if constexpr (std::is_same_v<Tag, F32>)
        return Doubles(vcvt_f64_f32(vld1_f32(x)));
    else
        return Doubles(
            vcvt_f64_f32(vget_low_f32(float32x4_t(as_f32(vreinterpret_u16_u32(vdup_n_u32(read<uint32_t>(x))), tag)))));
#else
    return Doubles{double(Tag::load(x[0])), double(Tag::load(x[1]))};
#endif
}

/// Sum of squares of a leaf in the order of rules/lane_sum.h.
class LeafSum {
public:
    /// `numel`: number of elements of the leaf. Lanes that a short leaf does not reach are neither cleared nor folded:
    /// as zeros they would not change the sum, and for tensors of a few elements they would take most of the time.
    explicit LeafSum(int64_t numel) : used_(numel <= 8 ? 8 : numel <= 32 ? 32 : kLeafLanes) {
        clear<0, 8>();
        if (used_ > 8) clear<8, 32>();
        if (used_ > 32) clear<32, kLeafLanes>();
    }

    /// `x` starts at a multiple of kLeafLanes in its leaf. Prefetches `Ahead` elements ahead, unless `Ahead` is 0.
    template <int64_t Ahead = 0, class Tag> void add(const typename Tag::storage *x, int64_t n, Tag tag) {
        const int64_t whole = n & -kLeafLanes;
        for (int lane = 0; lane < kLeafLanes && whole != 0; lane += kHeld) add_rows<Ahead>(x, whole, lane, tag);
        int64_t i = whole;
        int k = 0;
        for (; i + kDoubles <= n; i += kDoubles, ++k) lane_[k] = plus_square(lane_[k], doubles(x + i, tag));
        for (int j = 0; i < n; ++i, ++j) {
            const double element = double(Tag::load(x[i]));
            lane_[k][j] += element * element;
        }
    }
    void add(const float *x, int64_t n) { add(x, n, F32{}); }
    double fold() const {
        if (used_ == 8) return fold_first<8>();
        return used_ == 32 ? fold_first<32>() : fold_all();
    }

private:
    /// Number of lanes that are in registers at once. The other lanes are in memory meanwhile, and the rows of a tile
    /// are processed in stripes of kHeld columns. AVX-512 has registers for all lanes, but then the loads and stores of
    /// lanes overlap with no other work: pass 1 in the second-level cache took 1.4 times as long.
#if defined(__AVX2__) || defined(__aarch64__)
    static constexpr int kHeld = 32;
#else
    static constexpr int kHeld = 16;
#endif

    template <class Call, int... K> static void with_each(const Call &call, std::integer_sequence<int, K...>) {
        (call.template operator()<K>(), ...);
    }
    /// Clears lanes one by one: gcc would clear an array with a slow loop in microcode.
    template <int Begin, int End> void clear() {
        with_each([&]<int K>() { lane_[Begin / kDoubles + K] = Doubles{}; },
                  std::make_integer_sequence<int, (End - Begin) / kDoubles>{});
    }
    /// Adds columns [lane, lane + kHeld) of whole rows to their lanes.
    template <int64_t Ahead, class Tag> void add_rows(const typename Tag::storage *x, int64_t n, int lane, Tag tag) {
        constexpr int line = int(64 / sizeof *x);
        Doubles *const local = lane_ + lane / kDoubles;
        [&]<int... K>(std::integer_sequence<int, K...>) {
            Doubles held[] = {local[K]...};
            for (int64_t i = lane; i < n; i += kLeafLanes) {
                for (int k = 0; Ahead != 0 && k < kHeld; k += line) __builtin_prefetch(x + i + Ahead + k);
                ((held[K] = plus_square(held[K], doubles(x + i + K * kDoubles, tag))), ...);
            }
            ((local[K] = held[K]), ...);
        }
        (std::make_integer_sequence<int, kHeld / kDoubles>{});
    }
    /// Returns the sums of adjacent pairs: first those of a, then those of b.
    static Doubles add_pairs(Doubles a, Doubles b) {
#if defined(__AVX512F__)
        return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
               __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#elif defined(__AVX2__)
        return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#else
        return __builtin_shufflevector(a, b, 0, 2) + __builtin_shufflevector(a, b, 1, 3);
#endif
    }
    /// The same as fold_leaf_lanes(). Scalar additions are faster for so few lanes.
    template <int Lanes> double fold_first() const {
        double lane[Lanes];
        __builtin_memcpy(lane, lane_, sizeof lane);
        return fold_leaf_lanes(lane);
    }
    /// The same as fold_leaf_lanes().
    double fold_all() const {
        double sum[kLanes];
        with_each(
            [&]<int K>() {
                const Doubles *const local = lane_ + 4 * K;
                const Doubles four = add_pairs(add_pairs(local[0], local[1]), add_pairs(local[2], local[3]));
                __builtin_memcpy(sum + K * kDoubles, &four, sizeof four);
            },
            std::make_integer_sequence<int, kLanes / kDoubles>{});
        return fold_lanes<kLanes>(sum);
    }
    /// The square of a float is exact in double, so a fused multiply-add rounds once like the two operations do.
    static Doubles plus_square(Doubles sum, Doubles x) {
#if defined(__AVX512F__)
        return Doubles(_mm512_fmadd_pd(__m512d(x), __m512d(x), __m512d(sum)));
#else
        return sum + x * x;
#endif
    }

    Doubles lane_[kLeafLanes / kDoubles];
    const int used_;
};

/// Returns the largest magnitude. Magnitudes are compared as integers, in which NaNs are the largest.
inline float largest_magnitude(const float *x, int64_t n, float so_far) {
    uint32_t most = bits_of(so_far);
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    return float_of(most);
}

// ---------------------------------------------------------------------------------------------------------- outputs
inline void zero_gradients(const TensorJob &job, int64_t index, int64_t n) {
    const auto [data, format] = job.grad();
    const size_t size = dtype_size(format);
    __builtin_memset(static_cast<char *>(data) + size_t(index) * size, 0, size_t(n) * size);
}
/// Writes the output and zeroes the gradients of a tile, whose weights are new or unchanged.
inline void write_outputs(const Span &span, const float *weights, const float *change, int64_t index, int64_t n) {
    const TensorJob &job = *span.job;
    // An output that overwrites the gradients is already in the caches.
    const bool streaming = span.streaming && job.data[kOut] != job.data[kGrad];
    if (job.remainder != nullptr && job.out().format == Dtype::bf16 && job.out())
        store_split_weights(weights, job.data[kOut], index, n);
    else if (job.out())
        store(span.flags & DSOPT_STEP_DELTA ? change : weights, job.out(), index, n, streaming);
    if (job.zeroes) zero_gradients(job, index, n);
}

/// True if the weights must not be written: DSOPT_STEP_OUT_ONLY leaves parameters unchanged. A separate master is state
/// and is written, and so are remainders.
inline bool skips_weight_store(const Span &span) {
    const bool separate = span.job->has_master && span.job->remainder == nullptr;
    return !separate && (span.flags & DSOPT_STEP_OUT_ONLY) != 0;
}

/// Tile of a span's weights, which a rule updates in place.
class WeightTile {
public:
    /// `sums_change`: change() is needed even if no output is a delta.
    explicit WeightTile(const Span &span, bool sums_change = false) :
        span_(span),
        skips_store_(skips_weight_store(span)),
        compares_(sums_change || (span.flags & DSOPT_STEP_DELTA) != 0) {}

    float *open(int64_t index, int64_t n) {
        tile_ = open_weights(*span_.job, index, n, buffer_, skips_store_);
        if (compares_) convert_to_f32(tile_, change_.at, n, F32{});
        return tile_;
    }
    /// Stores the new weights to the tensor, its low-precision copy and the output, if present.
    void close(int64_t index, int64_t n) {
        const TensorJob &job = *span_.job;
        // After stochastic rounding the stores below are exact.
        if (job.stochastic)
            round_stochastically(tile_, rounding_key(job.random_key, span_.step), job.range.begin + index, n);
        if (compares_) apply([](float now, float &old) { old = now - old; }, n, tile_, change_.at);
        if (job.remainder != nullptr)
            store_masters(tile_, job, index, n, skips_store_);
        else if (!skips_store_)
            dsopt::cpu::close(tile_, job.weight(), index, n);
        if (job.copy()) store(tile_, job.copy(), index, n, span_.streaming);
        write_outputs(span_, tile_, change_.at, index, n);
    }
    const float *change() const { return change_.at; }

private:
    const Span &span_;
    const bool skips_store_, compares_;
    float *tile_ = nullptr;
    Buffer buffer_, change_;
};

} // namespace
} // namespace dsopt::cpu
