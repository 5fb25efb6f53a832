// SPDX-License-Identifier: Apache-2.0
// Codecs of rules/formats.h for the kernels of stored state: a warp loads, updates and stores a block of 256 elements,
// eight per thread.
#pragma once
#include "rules/formats.h"
#include "update.cuh"

namespace dsopt::gpu {

/// The tables of both 8-bit maps, in shared memory: threads of a warp read different entries at once.
struct Maps {
    DynamicMap with_sign, without_sign;
    __device__ __forceinline__ const DynamicMap &of(Q8) const { return with_sign; }
    __device__ __forceinline__ const DynamicMap &of(Q8Squares) const { return without_sign; }
    __device__ __forceinline__ static E4M3::Map of(E4M3) { return {}; }
    /// Called by one thread.
    __device__ __forceinline__ void fill() {
        with_sign = signed_map();
        without_sign = unsigned_map();
    }
};

/// Elements of a block that a thread of its warp processes: packs of V neighbours. With V = 4 a thread has elements 4 l
/// and 128 + 4 l on, with V = 1 every 32nd.
template <int V> struct BlockPacks {
    static constexpr int count = 8 / V;
    int64_t begin; // in the job's arrays
    int n;         // number of elements; 256 if V = 4
    __device__ __forceinline__ int in_block(int pack) const { return int(threadIdx.x % 32) * V + pack * 32 * V; }
    __device__ __forceinline__ bool has(int pack) const { return V == 4 || in_block(pack) < n; }
    __device__ __forceinline__ int64_t at(int pack) const { return begin + in_block(pack); }
};
/// A thread's part of a block.
template <int V> struct BlockPart { Pack<V> pack[BlockPacks<V>::count]; };

/// Returns the largest value of a warp, in all lanes.
__device__ __forceinline__ uint32_t largest_in_warp(uint32_t value) {
#if defined(CUDA_EMU) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800)
    return __reduce_max_sync(0xffffffffu, value);
#else
    for (int width = 16; width != 0; width /= 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, value, width);
        value = other > value ? other : value;
    }
    return value;
#endif
}

/// Calls body(codec) with the codec of a format that has scales.
template <class Body> __device__ __forceinline__ void visit_codec(Format format, const Body &body) {
    switch (format) {
    case Format::e4m3: body(E4M3{}); return;
    case Format::q8: body(Q8{}); return;
    case Format::q8_squares: body(Q8Squares{}); return;
    default: break;
    }
    __builtin_unreachable();
}

__device__ __forceinline__ Slot plain_slot(const Moment &moment) {
    return {moment.data, moment.format == Format::bf16_random ? Dtype::bf16 : Dtype(moment.format)};
}

/// Loads a pack of a moment in the format of memory: V codes are in one word. Nothing here uses the loaded values.
template <int V> __device__ __forceinline__ Pack<V> fetch_moment(const Moment &moment, int64_t i) {
    if (!has_scales(moment.format)) return fetch<V>(plain_slot(moment), i);
    const uint8_t *const from = global(static_cast<const uint8_t *>(moment.data) + i);
    Pack<V> codes{};
    if constexpr (V == 1)
        codes.at[0] = float_of(*from);
    else
        codes.at[0] = float_of(*reinterpret_cast<const uint32_t *>(from));
    return codes;
}
/// Converts what fetch_moment() loaded. `scale`: of the block.
template <int V>
__device__ __forceinline__ Pack<V> decode_moment(const Pack<V> &x, Format format, float scale, const Maps &maps) {
    if (!has_scales(format)) return convert_to_f32(x, format == Format::bf16_random ? Dtype::bf16 : Dtype(format));
    Pack<V> y;
    const uint32_t codes = bits_of(x.at[0]);
    visit_codec(format, [&](auto codec) INLINED {
        unrolled<V>([&](int k) INLINED { y.at[k] = codec.level(maps.of(codec), uint8_t(codes >> (8 * k))) * scale; });
    });
    return y;
}

/// Stores up to four codes.
template <int V> __device__ __forceinline__ void store_codes(const uint8_t (&code)[V], void *codes, int64_t i) {
    uint8_t *const to = global(static_cast<uint8_t *>(codes) + i);
    if constexpr (V == 1)
        store_as_is(to, code[0]);
    else
        store_as_is(reinterpret_cast<uint32_t *>(to),
                    uint32_t(code[0]) | uint32_t(code[1]) << 8 | uint32_t(code[2]) << 16 | uint32_t(code[3]) << 24);
}
/// Stores 16-bit elements.
template <int V> __device__ __forceinline__ void store_halves(const uint16_t (&half)[V], void *data, int64_t i) {
    uint16_t *const to = global(static_cast<uint16_t *>(data) + i);
    if constexpr (V == 1)
        store_as_is(to, half[0]);
    else
        store_as_is(reinterpret_cast<uint2 *>(to),
                    uint2{half[0] | uint32_t(half[1]) << 16, half[2] | uint32_t(half[3]) << 16});
}

/// Stores a block of a moment. Called by a whole warp. `key`: of its random numbers. `first`: index of the job's first
/// element in the whole tensor. `ReadsBack`: `x` becomes what a later load will give.
template <bool ReadsBack, int V>
__device__ __forceinline__ void store_moment(BlockPart<V> &x, const Moment &moment, const BlockPacks<V> &packs,
                                             uint64_t key, int64_t first, const Maps &maps) {
    constexpr int count = BlockPacks<V>::count;
    if (moment.format == Format::bf16_random) {
        unrolled<count>([&](int q) INLINED {
            if (!packs.has(q)) return;
            uint16_t half[V];
            unrolled<V>([&](int k) INLINED {
                const uint32_t random = random_bits(key, uint64_t(first + packs.at(q) + k));
                const float rounded = round_stochastic_bf16(x.pack[q].at[k], random);
                half[k] = uint16_t(bits_of(rounded) >> 16);
                if constexpr (ReadsBack) x.pack[q].at[k] = rounded;
            });
            store_halves<V>(half, moment.data, packs.at(q));
        });
        return;
    }
    if (!has_scales(moment.format)) {
        unrolled<count>([&](int q) INLINED {
            if (!packs.has(q)) return;
            store(x.pack[q], plain_slot(moment), packs.at(q));
            if constexpr (ReadsBack) {
                if (moment.format == Format::bf16)
                    unrolled<V>([&](int k) INLINED { x.pack[q].at[k] = bf16_to_f32(f32_to_bf16(x.pack[q].at[k])); });
            }
        });
        return;
    }
    // Magnitudes of either sign as integers, whose order is that of the floats; a NaN is larger than all.
    uint32_t positive = 0, negative = 0;
    unrolled<count>([&](int q) INLINED {
        if (!packs.has(q)) return;
        unrolled<V>([&](int k) INLINED {
            const uint32_t bits = bits_of(x.pack[q].at[k]);
            if (bits >> 31 == 0)
                positive = bits > positive ? bits : positive;
            else
                negative = (bits & 0x7fffffffu) > negative ? bits & 0x7fffffffu : negative;
        });
    });
    positive = largest_in_warp(positive);
    negative = largest_in_warp(negative);
    visit_codec(moment.format, [&](auto codec) INLINED {
        const uint32_t top = positive > negative ? positive : negative;
        const BlockScale by = codec.scale(top, float_of(positive), float_of(negative));
        unrolled<count>([&](int q) INLINED {
            if (!packs.has(q)) return;
            uint8_t code[V];
            unrolled<V>([&](int k) INLINED {
                code[k] = by.zeros ? uint8_t(0) : codec.code_of(maps.of(codec), x.pack[q].at[k], by.factor);
                if constexpr (ReadsBack) x.pack[q].at[k] = codec.level(maps.of(codec), code[k]) * by.scale;
            });
            store_codes<V>(code, moment.data, packs.at(q));
        });
        // Stored as an integer: a NaN keeps its bits.
        if (threadIdx.x % 32 == 0)
            store_as_is(reinterpret_cast<uint32_t *>(moment.scale) + packs.begin / kBlock, bits_of(by.scale));
    });
}

/// Loads weights, joined with their remainders if there are any.
template <int V> __device__ __forceinline__ Pack<V> join(const Pack<V> &weights, const Pack<V> &remainders) {
    Pack<V> masters;
    unrolled<V>([&](int k) INLINED {
        const auto half = [&](const Pack<V> &x) INLINED { return uint16_t(bits_of(x.at[k / 2]) >> (k % 2 * 16)); };
        masters.at[k] = join_master({half(weights), half(remainders)});
    });
    return masters;
}
__device__ __forceinline__ Slot remainder_slot(const TensorJob &job) { return {job.remainder, Dtype::bf16}; }
template <int V> __device__ __forceinline__ Pack<V> load_masters(const TensorJob &job, int64_t i) {
    if (job.remainder == nullptr) return load<V>(job.weight(), i);
    return join(fetch<V>(job.weight(), i), fetch<V>(remainder_slot(job), i));
}
/// Stores new weights as store_weights(), and their remainders.
template <int V>
__device__ __forceinline__ void store_masters(const StepPlan &plan, const SharedTensor &s, Pack<V> &p,
                                              const Pack<V> &old, int64_t i) {
    const TensorJob &job = s.job;
    if (job.remainder == nullptr) return store_weights(plan, s, job, p, old, i);
    uint16_t weight[V], remainder[V];
    unrolled<V>([&](int k) INLINED {
        const SplitMaster split = split_master(p.at[k]);
        weight[k] = split.weight;
        remainder[k] = split.remainder;
    });
    if (!(plan.flags & DSOPT_STEP_OUT_ONLY)) store_halves<V>(weight, job.data[kWeight], i);
    store_halves<V>(remainder, job.remainder, i);
    if (job.out() && job.out().format == Dtype::bf16)
        store_halves<V>(weight, job.data[kOut], i);
    else if (job.out())
        store(p, job.out(), i);
    if (job.zeroes) store(Pack<V>{}, job.grad(), i);
}
template <int V>
__device__ __forceinline__ void unchanged_masters(const StepPlan &plan, const TensorJob &job, int64_t i) {
    if (job.remainder != nullptr && job.out() && job.out().format != Dtype::bf16) {
        store(load_masters<V>(job, i), job.out(), i);
        if (job.zeroes) store(Pack<V>{}, job.grad(), i);
    } else {
        unchanged_pack<V>(plan, job, i);
    }
}

/// Calls body(BlockPacks<V>) for the blocks of a leaf, each by a warp. `whole`: arrays are aligned to groups of four.
template <class Body> __device__ __forceinline__ void for_blocks(const Leaf &where, bool aligned, const Body &body) {
    for (int i = int(threadIdx.x / 32) * int(kBlock); i < where.n; i += kWarps * int(kBlock)) {
        const int left = where.n - i;
        if (aligned && left >= int(kBlock))
            body(BlockPacks<4>{where.begin + i, int(kBlock)});
        else
            body(BlockPacks<1>{where.begin + i, left < int(kBlock) ? left : int(kBlock)});
    }
}

/// The arrays of a block in registers.
template <int V> struct BlockInputs {
    BlockPart<V> g, p, moment[kMoments];
    /// Loads a block. All loads are in flight before the first conversion waits. `Gradient`: false leaves `g` undefined.
    template <int Count, bool Gradient = true>
    __device__ __forceinline__ void load(const TensorJob &job, const BlockPacks<V> &packs, const Maps &maps) {
        constexpr int count = BlockPacks<V>::count;
        BlockPart<V> remainder;
        float scale[kMoments];
        unrolled<Count>([&](int m) INLINED {
            scale[m] = has_scales(job.formats[kMoment + m]) ? job.scale[m][packs.begin / kBlock] : 0.0f;
        });
        unrolled<count>([&](int q) INLINED {
            const bool has = packs.has(q);
            const int64_t i = packs.at(q);
            if constexpr (Gradient) g.pack[q] = has && job.grad() ? fetch<V>(job.grad(), i) : Pack<V>{};
            p.pack[q] = has ? fetch<V>(job.weight(), i) : Pack<V>{};
            remainder.pack[q] = has && job.remainder != nullptr ? fetch<V>(remainder_slot(job), i) : Pack<V>{};
            unrolled<Count>(
                [&](int m) INLINED { moment[m].pack[q] = has ? fetch_moment<V>(job.stored_moment(m), i) : Pack<V>{}; });
        });
        unrolled<count>([&](int q) INLINED {
            if constexpr (Gradient) g.pack[q] = convert_to_f32(g.pack[q], job.grad().format);
            p.pack[q] = job.remainder != nullptr ? join(p.pack[q], remainder.pack[q])
                                                 : convert_to_f32(p.pack[q], job.weight().format);
            unrolled<Count>([&](int m) INLINED {
                moment[m].pack[q] = decode_moment(moment[m].pack[q], job.formats[kMoment + m], scale[m], maps);
            });
        });
    }
    /// Calls call(moment...) for the k-th neighbour of a pack.
    template <int Count, class Call> __device__ __forceinline__ void with_moments_of(int q, int k, const Call &call) {
        [&]<int... M>(std::integer_sequence<int, M...>) INLINED { call(moment[M].pack[q].at[k]...); }
        (std::make_integer_sequence<int, Count>{});
    }
};

} // namespace dsopt::gpu
