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

constexpr int kPerThread = int(kBlock) / 32;
/// A thread's elements of a block.
struct Eight {
    float at[kPerThread];
};

/// A block of a tensor: elements [begin, begin + n) of the job's arrays.
struct Block {
    int64_t begin;
    int n;
    /// A whole block of aligned arrays: a thread has elements 4 l and 128 + 4 l on. Else every 32nd.
    bool fours;
    __device__ __forceinline__ int in_block(int k) const {
        const int lane = int(threadIdx.x % 32);
        return fours ? lane * 4 + k / 4 * 128 + k % 4 : lane + 32 * k;
    }
    __device__ __forceinline__ bool has(int k) const { return fours || in_block(k) < n; }
    __device__ __forceinline__ int64_t at(int k) const { return begin + in_block(k); }
};

/// Calls body(block) for the blocks of a leaf, each by a warp. `aligned`: arrays are aligned to groups of four.
template <class Body> __device__ __forceinline__ void for_blocks(const Leaf &where, bool aligned, const Body &body) {
    for (int i = int(threadIdx.x / 32) * int(kBlock); i < where.n; i += kWarps * int(kBlock)) {
        const int left = where.n - i;
        body(Block{where.begin + i, left < int(kBlock) ? left : int(kBlock), aligned && left >= int(kBlock)});
    }
}

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

// ------------------------------------------------------------------------------------------------------ plain arrays
/// Loads in the format of memory: two 16-bit elements per word in a group of four. Nothing uses the loaded values.
__device__ __forceinline__ Eight fetch(const Slot &slot, const Block &block) {
    Eight x{};
    if (block.fours) {
        unrolled<2>([&](int half) INLINED {
            const Pack<4> four = gpu::fetch<4>(slot, block.at(4 * half));
            unrolled<4>([&](int k) INLINED { x.at[4 * half + k] = four.at[k]; });
        });
    } else {
        unrolled<kPerThread>([&](int k) INLINED {
            if (block.has(k)) x.at[k] = gpu::fetch<1>(slot, block.at(k)).at[0];
        });
    }
    return x;
}
/// Returns the bits of a 16-bit element that fetch() loaded.
__device__ __forceinline__ uint16_t half_of(const Eight &x, const Block &block, int k) {
    const uint32_t word = block.fours ? bits_of(x.at[k / 4 * 4 + k % 4 / 2]) >> (k % 2 * 16) : bits_of(x.at[k]);
    return uint16_t(word);
}
__device__ __forceinline__ Eight convert_to_f32(const Eight &x, const Block &block, Dtype format) {
    if (format == Dtype::f32) return x;
    Eight y;
    unrolled<kPerThread>([&](int k) INLINED { y.at[k] = half_to_f32(half_of(x, block, k), format); });
    return y;
}
__device__ __forceinline__ void store(const Eight &x, const Slot &slot, const Block &block) {
    if (block.fours)
        unrolled<2>([&](int half) INLINED {
            const Pack<4> four{x.at[4 * half], x.at[4 * half + 1], x.at[4 * half + 2], x.at[4 * half + 3]};
            gpu::store(four, slot, block.at(4 * half));
        });
    else
        unrolled<kPerThread>([&](int k) INLINED {
            if (block.has(k)) gpu::store(Pack<1>{x.at[k]}, slot, block.at(k));
        });
}
/// Stores 16-bit elements.
__device__ __forceinline__ void store_halves(const uint16_t (&half)[kPerThread], void *data, const Block &block) {
    uint16_t *const to = global(static_cast<uint16_t *>(data));
    if (block.fours)
        unrolled<2>([&](int i) INLINED {
            const uint16_t *const four = half + 4 * i;
            store_as_is(reinterpret_cast<uint2 *>(to + block.at(4 * i)),
                        uint2{four[0] | uint32_t(four[1]) << 16, four[2] | uint32_t(four[3]) << 16});
        });
    else
        unrolled<kPerThread>([&](int k) INLINED {
            if (block.has(k)) store_as_is(to + block.at(k), half[k]);
        });
}

// ----------------------------------------------------------------------------------------------------------- moments
/// As fetch(), of a moment: four codes are in one word.
__device__ __forceinline__ Eight fetch_moment(const Moment &moment, const Block &block) {
    if (!has_scales(moment.format)) return fetch(plain_slot(moment), block);
    const uint8_t *const from = global(static_cast<const uint8_t *>(moment.data));
    Eight x{};
    if (block.fours)
        unrolled<2>([&](int half) INLINED {
            x.at[4 * half] = float_of(*reinterpret_cast<const uint32_t *>(from + block.at(4 * half)));
        });
    else
        unrolled<kPerThread>([&](int k) INLINED {
            if (block.has(k)) x.at[k] = float_of(from[block.at(k)]);
        });
    return x;
}
/// Converts what fetch_moment() loaded. `scale`: of the block.
__device__ __forceinline__ Eight decode_moment(const Eight &x, const Block &block, Format format, float scale,
                                               const Maps &maps) {
    if (!has_scales(format))
        return convert_to_f32(x, block, format == Format::bf16_random ? Dtype::bf16 : Dtype(format));
    Eight y;
    visit_codec(format, [&](auto codec) INLINED {
        unrolled<kPerThread>([&](int k) INLINED {
            const uint32_t word = block.fours ? bits_of(x.at[k / 4 * 4]) >> (k % 4 * 8) : bits_of(x.at[k]);
            y.at[k] = codec.level(maps.of(codec), uint8_t(word)) * scale;
        });
    });
    return y;
}

/// Stores codes, one in each of eight words.
__device__ __forceinline__ void store_codes(const uint32_t (&code)[kPerThread], void *codes, const Block &block) {
    uint8_t *const to = global(static_cast<uint8_t *>(codes));
    if (block.fours)
        unrolled<2>([&](int half) INLINED {
            const uint32_t *const four = code + 4 * half;
            store_as_is(reinterpret_cast<uint32_t *>(to + block.at(4 * half)),
                        four[0] | four[1] << 8 | four[2] << 16 | four[3] << 24);
        });
    else
        unrolled<kPerThread>([&](int k) INLINED {
            if (block.has(k)) store_as_is(to + block.at(k), uint8_t(code[k]));
        });
}

/// Stores a block of a moment. Called by a whole warp. `key`: of its random numbers. `first`: index of the job's first
/// element in the whole tensor. `reads_back`: `x` becomes what a later load will give.
__device__ __forceinline__ void store_moment(Eight &x, const Moment &moment, const Block &block, uint64_t key,
                                             int64_t first, const Maps &maps, bool reads_back) {
    if (moment.format == Format::bf16_random) {
        uint16_t half[kPerThread];
        unrolled<kPerThread>([&](int k) INLINED {
            const uint32_t random = random_bits(key, uint64_t(first + block.at(k)));
            const float rounded = round_stochastic_bf16(x.at[k], random);
            half[k] = uint16_t(bits_of(rounded) >> 16);
            if (reads_back) x.at[k] = rounded;
        });
        return store_halves(half, moment.data, block);
    }
    if (!has_scales(moment.format)) {
        store(x, plain_slot(moment), block);
        if (reads_back && moment.format == Format::bf16)
            unrolled<kPerThread>([&](int k) INLINED { x.at[k] = bf16_to_f32(f32_to_bf16(x.at[k])); });
        return;
    }
    // Magnitudes of either sign as integers, whose order is that of the floats; a NaN is larger than all.
    uint32_t positive = 0, negative = 0;
    unrolled<kPerThread>([&](int k) INLINED {
        const uint32_t bits = block.has(k) ? bits_of(x.at[k]) : 0, magnitude = bits & 0x7fffffffu;
        const uint32_t without = bits >> 31 ? 0 : magnitude, with = bits >> 31 ? magnitude : 0;
        positive = without > positive ? without : positive;
        negative = with > negative ? with : negative;
    });
    positive = largest_in_warp(positive);
    negative = largest_in_warp(negative);
    visit_codec(moment.format, [&](auto codec) INLINED {
        const uint32_t top = positive > negative ? positive : negative;
        const BlockScale by = codec.scale(top, float_of(positive), float_of(negative));
        uint32_t code[kPerThread];
        unrolled<kPerThread>([&](int k) INLINED {
            code[k] = by.zeros ? 0u : codec.code_of(maps.of(codec), x.at[k], by.factor);
            if (reads_back) x.at[k] = codec.level(maps.of(codec), uint8_t(code[k])) * by.scale;
        });
        store_codes(code, moment.data, block);
        // Stored as an integer: a NaN keeps its bits.
        if (threadIdx.x % 32 == 0)
            store_as_is(reinterpret_cast<uint32_t *>(moment.scale) + block.begin / kBlock, bits_of(by.scale));
    });
}

// ----------------------------------------------------------------------------------------------------------- weights
__device__ __forceinline__ Slot remainder_slot(const TensorJob &job) { return {job.remainder, Dtype::bf16}; }
/// Returns masters from weights and remainders as fetch() loads them.
__device__ __forceinline__ Eight join(const Eight &weights, const Eight &remainders, const Block &block) {
    Eight masters;
    unrolled<kPerThread>([&](int k) INLINED {
        masters.at[k] = join_master({half_of(weights, block, k), half_of(remainders, block, k)});
    });
    return masters;
}
__device__ __forceinline__ Eight load_masters(const TensorJob &job, const Block &block) {
    return join(fetch(job.weight(), block), fetch(remainder_slot(job), block), block);
}
/// Stores new weights as store_weights(), and their remainders. `old`: the weights before, in shared memory, from the
/// block's first element on; for DSOPT_STEP_DELTA.
__device__ __forceinline__ void store_masters(const StepPlan &plan, const SharedTensor &s, Eight &p, const float *old,
                                              const Block &block) {
    const TensorJob &job = s.job;
    const bool out_only = (plan.flags & DSOPT_STEP_OUT_ONLY) != 0;
    if (job.stochastic) {
        const uint64_t key = rounding_key(job.random_key, s.step);
        unrolled<kPerThread>([&](int k) INLINED {
            p.at[k] = round_stochastic_bf16(p.at[k], random_bits(key, uint64_t(job.range.begin + block.at(k))));
        });
    }
    if (job.remainder != nullptr) {
        uint16_t weight[kPerThread], remainder[kPerThread];
        unrolled<kPerThread>([&](int k) INLINED {
            const SplitMaster split = split_master(p.at[k]);
            weight[k] = split.weight;
            remainder[k] = split.remainder;
        });
        if (!out_only) store_halves(weight, job.data[kWeight], block);
        store_halves(remainder, job.remainder, block);
        if (job.out() && job.out().format == Dtype::bf16)
            store_halves(weight, job.data[kOut], block);
        else if (job.out())
            store(p, job.out(), block);
    } else {
        if (!out_only || job.has_master) store(p, job.weight(), block);
        if (job.copy()) store(p, job.copy(), block);
        if (job.out()) {
            Eight written = p;
            if (plan.flags & DSOPT_STEP_DELTA)
                unrolled<kPerThread>([&](int k) INLINED {
                    if (block.has(k)) written.at[k] = p.at[k] - old[block.in_block(k)];
                });
            store(written, job.out(), block);
        }
    }
    if (job.zeroes) store(Eight{}, job.grad(), block);
}

/// The arrays of a block in registers.
struct BlockInputs {
    Eight g, p, moment[kMoments];
    /// Loads a block. All loads are in flight before the first conversion waits. `Gradient` false: `g` is zeros.
    template <bool Gradient>
    __device__ __forceinline__ void load(const TensorJob &job, const Block &block, const Maps &maps) {
        float scale[kMoments];
        Eight remainder{};
        unrolled<kMoments>([&](int m) INLINED {
            const Moment from = job.stored_moment(m);
            scale[m] = from && has_scales(from.format) ? from.scale[block.begin / kBlock] : 0.0f;
            moment[m] = from ? fetch_moment(from, block) : Eight{};
        });
        g = Gradient && job.grad() ? fetch(job.grad(), block) : Eight{};
        p = fetch(job.weight(), block);
        if (job.remainder != nullptr) remainder = fetch(remainder_slot(job), block);
        if (Gradient) g = convert_to_f32(g, block, job.grad().format);
        p = job.remainder != nullptr ? join(p, remainder, block) : convert_to_f32(p, block, job.weight().format);
        unrolled<kMoments>([&](int m) INLINED {
            const Moment from = job.stored_moment(m);
            if (from) moment[m] = decode_moment(moment[m], block, from.format, scale[m], maps);
        });
    }
    __device__ __forceinline__ void store_moments(const TensorJob &job, const Block &block, const uint64_t *keys,
                                                  const Maps &maps, bool reads_back) {
        unrolled<kMoments>([&](int m) INLINED {
            const Moment to = job.stored_moment(m);
            if (to) store_moment(moment[m], to, block, keys[m], job.range.begin, maps, reads_back);
        });
    }
    /// Calls call(moment...) for the k-th element.
    template <int Count, class Call> __device__ __forceinline__ void with_moments_of(int k, const Call &call) {
        [&]<int... M>(std::integer_sequence<int, M...>) INLINED { call(moment[M].at[k]...); }
        (std::make_integer_sequence<int, Count>{});
    }
};

} // namespace dsopt::gpu
