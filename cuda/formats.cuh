// SPDX-License-Identifier: Apache-2.0
// Codecs of rules/formats.h for the kernels of stored state: a warp loads, updates and stores a block of 256 elements,
// eight per thread.
#pragma once
#include "rules/formats.h"
#include "update.cuh"

namespace dsopt::gpu {

/// A base class, so that a codec without a table needs no memory.
template <class Codec> struct MapOf : Codec::Map {
    __device__ __forceinline__ typename Codec::Map &map() { return *this; }
};
/// The tables of all codecs, in shared memory: threads of a warp read different entries at once.
template <class List> struct MapsOf;
template <class... Codec> struct MapsOf<CodecList<Codec...>> : MapOf<Codec>... {
    template <class One> __device__ __forceinline__ const typename One::Map &of(One) const {
        return static_cast<const MapOf<One> &>(*this);
    }
    /// Called by one thread.
    __device__ __forceinline__ void fill() { ((MapOf<Codec>::map() = Codec::map()), ...); }
};
using Maps = MapsOf<Codecs>;

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
    int lane; // of the calling thread
    __device__ __forceinline__ int first() const { return lane * (fours ? 4 : 1); }
    __device__ __forceinline__ int from_first(int k) const { return fours ? k / 4 * 128 + k % 4 : 32 * k; }
    __device__ __forceinline__ int in_block(int k) const { return first() + from_first(k); }
    __device__ __forceinline__ bool has(int k) const { return fours || 32 * k < n - first(); }
    __device__ __forceinline__ int64_t at(int k) const { return begin + first() + from_first(k); }
};

/// A warp's position in a leaf, in shared memory: loops over elements need the registers.
struct Position {
    int64_t leaf; // its first element
    int n, first; // elements of the leaf; the block's first element in it
    bool aligned; // arrays are aligned to groups of four
    __device__ __forceinline__ Block block() const {
        const int left = n - first;
        return {leaf + first, left < int(kBlock) ? left : int(kBlock), aligned && left >= int(kBlock),
                int(thread_read_here() % 32)};
    }
    __device__ __forceinline__ Leaf whole_leaf(const TensorJob &job) const {
        return Leaf(job.range.numel, leaf / kLeaf);
    }
};
/// Calls body(position) for the blocks of a leaf, each by a warp. `positions`: one per warp.
template <class Body>
__device__ __forceinline__ void for_blocks(Position *positions, const Leaf &where, bool aligned, const Body &body) {
    Position &own = positions[threadIdx.x / 32];
    if (threadIdx.x % 32 == 0) own = {where.begin, where.n, int(threadIdx.x / 32) * int(kBlock), aligned};
    __syncwarp();
    while (own.first < own.n) {
        body(own);
        __syncwarp();
        if (threadIdx.x % 32 == 0) own.first += kWarps * int(kBlock);
        __syncwarp();
        forget_shared();
    }
}

/// Returns the largest value of a warp, in all lanes.
__device__ __forceinline__ uint32_t largest_in_warp(uint32_t value) {
#if defined(CUDA_EMU)
    if (cuemu::options().capability >= 80) return __reduce_max_sync(0xffffffffu, value);
#elif __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, value);
#endif
    for (int width = 16; width != 0; width /= 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, value, width);
        value = other > value ? other : value;
    }
    return value;
}

__device__ __forceinline__ Slot plain_slot(const Moment &moment) { return {moment.data, plain_dtype(moment.format)}; }

// ------------------------------------------------------------------------------------------------------ plain arrays
/// Loads in the format of memory: in groups of four, two 16-bit elements per word, the later words unused. Nothing uses
/// the loaded values.
__device__ __forceinline__ Eight fetch(const Slot &slot, const Block &block) {
    Eight x{};
    if (!block.fours) {
        unrolled<kPerThread>([&](int k) INLINED {
            if (block.has(k)) x.at[k] = gpu::fetch<1>(slot, block.at(k)).at[0];
        });
        return x;
    }
    // The words of both groups are neighbours, so that all formats are loaded to the same registers: copies would wait.
    const auto load = [&](Dtype format, auto words) INLINED {
        unrolled<2>([&](int half) INLINED {
            const Pack<4> four = gpu::fetch<4>(Slot{slot.data, format}, block.at(4 * half));
            unrolled<words>([&](int k) INLINED { x.at[half * words + k] = four.at[k]; });
        });
    };
    if (slot.format == Dtype::f32)
        load(Dtype::f32, Width<4>{});
    else
        load(Dtype::bf16, Width<2>{}); // or f16
    return x;
}
/// Returns the bits of a 16-bit element that fetch() loaded.
__device__ __forceinline__ uint16_t half_of(const Eight &x, const Block &block, int k) {
    return uint16_t(block.fours ? bits_of(x.at[k / 2]) >> (k % 2 * 16) : bits_of(x.at[k]));
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
/// As fetch(), of a moment: in groups of four, codes are in the first two words.
__device__ __forceinline__ Eight fetch_moment(const Moment &moment, const Block &block) {
    if (!has_scales(moment.format)) return fetch(plain_slot(moment), block);
    const uint8_t *const from = global(static_cast<const uint8_t *>(moment.data));
    Eight x{};
    if (block.fours)
        unrolled<2>([&](int half) INLINED {
            x.at[half] = float_of(*reinterpret_cast<const uint32_t *>(from + block.at(4 * half)));
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
    if (!has_scales(format)) return convert_to_f32(x, block, plain_dtype(format));
    Eight y;
    visit_codec(format, [&](auto codec) INLINED {
        unrolled<kPerThread>([&](int k) INLINED {
            const uint32_t word = block.fours ? bits_of(x.at[k / 4]) >> (k % 4 * 8) : bits_of(x.at[k]);
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
/// As fetch(), of weights with remainders: in registers that 16-bit weights leave free. Call it after all other loads
/// of a block: of arrays that are not aligned, it waits for its loads.
__device__ __forceinline__ Eight fetch_masters(const TensorJob &job, const Block &block) {
    Eight x = fetch(job.weight(), block);
    if (job.remainder == nullptr) return x;
    forget_shared();
    const Eight remainders = fetch(remainder_slot(job), block);
    if (block.fours)
        unrolled<kPerThread / 2>([&](int k) INLINED { x.at[kPerThread / 2 + k] = remainders.at[k]; });
    else
        unrolled<kPerThread>([&](int k)
                                 INLINED { x.at[k] = float_of(bits_of(x.at[k]) | bits_of(remainders.at[k]) << 16); });
    return x;
}
/// Converts what fetch_masters() loaded.
__device__ __forceinline__ Eight join(const TensorJob &job, const Eight &x, const Block &block) {
    if (job.remainder == nullptr) return convert_to_f32(x, block, job.weight().format);
    Eight masters;
    unrolled<kPerThread>([&](int k) INLINED {
        const uint32_t upper =
            block.fours ? bits_of(x.at[kPerThread / 2 + k / 2]) >> (k % 2 * 16) : bits_of(x.at[k]) >> 16;
        masters.at[k] = join_master({half_of(x, block, k), uint16_t(upper)});
    });
    return masters;
}
__device__ __forceinline__ Eight load_masters(const TensorJob &job, const Block &block) {
    return join(job, fetch_masters(job, block), block);
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
        uint16_t half[kPerThread]; // one array at a time: registers are short
        unrolled<kPerThread>([&](int k) INLINED { half[k] = split_master(p.at[k]).weight; });
        if (!out_only) store_halves(half, job.data[kWeight], block);
        if (job.out() && job.out().format == Dtype::bf16) store_halves(half, job.data[kOut], block);
        unrolled<kPerThread>([&](int k) INLINED { half[k] = split_master(p.at[k]).remainder; });
        store_halves(half, job.remainder, block);
        if (job.out() && job.out().format != Dtype::bf16) store(p, job.out(), block);
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

/// Stores a block's values to a tile, whose first element is the block's.
__device__ __forceinline__ void to_tile(const Eight &x, float *tile, const Block &block) {
    unrolled<kPerThread>([&](int k) INLINED {
        if (block.has(k)) tile[block.in_block(k)] = x.at[k];
    });
}
/// True if the update needs the weights before it: they are in Tiles::a meanwhile, because registers are short.
__host__ __device__ __forceinline__ bool keeps_old(const StepPlan &plan) {
    return plan.policy.report_norms || (plan.flags & DSOPT_STEP_DELTA) != 0;
}
/// Stores to Tiles::b the changes of a block's weights from those in Tiles::a.
__device__ __forceinline__ void store_changes(const Eight &p, const Tiles &tiles, const Position &at) {
    const Block block = at.block();
    unrolled<kPerThread>([&](int k) INLINED {
        const int i = at.first + block.in_block(k);
        if (block.has(k)) tiles.b[i] = p.at[k] - tiles.a[i];
    });
}

/// Values that a thread keeps in shared memory, because registers are short: half of its elements of each array.
struct Stash {
    struct alignas(16) Four {
        float at[4];
    };
    Four moment[kMoments][kThreads], gradient[kThreads];
    __device__ __forceinline__ Four &of(int m) { return moment[m][threadIdx.x]; }
    __device__ __forceinline__ Four &of_gradient() { return gradient[threadIdx.x]; }
};
/// The arrays of a block: all weights are in registers, and of gradients and moments one half, the other in the stash.
struct BlockInputs {
    static constexpr int kHalf = kPerThread / 2;
    Stash &stash;
    Stash::Four g, moment[kMoments];
    Eight p;

    /// Loads a block; the first halves are in registers. `Gradient` false: `g` is not set.
    template <bool Gradient>
    __device__ __forceinline__ void load(const TensorJob &job, const Block &block, const Maps &maps) {
        // Compiled for each case: where loads of both meet, the compiler copies what they load and so waits for it.
        if (block.fours)
            load_fours<Gradient>(job, Block{block.begin, int(kBlock), true, block.lane}, maps);
        else
            load_singles<Gradient>(job, Block{block.begin, block.n, false, block.lane}, maps);
    }
    /// All loads are in flight before the first conversion waits.
    template <bool Gradient>
    __device__ __forceinline__ void load_fours(const TensorJob &job, const Block &block, const Maps &maps) {
        float scale[kMoments];
        Eight raw[kMoments];
        unrolled<kMoments>([&](int m) INLINED {
            const Moment from = job.stored_moment(m);
            scale[m] = load_scale(from, block);
            raw[m] = from ? fetch_moment(from, block) : Eight{};
        });
        const Eight raw_g = Gradient && job.grad() ? fetch(job.grad(), block) : Eight{};
        const Eight raw_p = fetch_masters(job, block);
        forget_shared();
        unrolled<kMoments>([&](int m) INLINED { set_moment(job, m, raw[m], block, scale[m], maps); });
        set<Gradient>(job, raw_g, raw_p, block);
    }
    /// Waits for each array, which takes fewer registers.
    template <bool Gradient>
    __device__ __forceinline__ void load_singles(const TensorJob &job, const Block &block, const Maps &maps) {
        unrolled<kMoments>([&](int m) INLINED {
            const Moment from = job.stored_moment(m);
            if (from) set_moment(job, m, fetch_moment(from, block), block, load_scale(from, block), maps);
        });
        set<Gradient>(job, Gradient && job.grad() ? fetch(job.grad(), block) : Eight{}, fetch_masters(job, block),
                      block);
    }
    __device__ __forceinline__ static float load_scale(const Moment &from, const Block &block) {
        return from && has_scales(from.format) ? *global(from.scale + block.begin / kBlock) : 0.0f;
    }
    __device__ __forceinline__ void set_moment(const TensorJob &job, int m, const Eight &raw, const Block &block,
                                               float scale, const Maps &maps) {
        const Moment from = job.stored_moment(m);
        if (from) moment[m] = halve(decode_moment(raw, block, from.format, scale, maps), stash.of(m));
    }
    template <bool Gradient>
    __device__ __forceinline__ void set(const TensorJob &job, const Eight &raw_g, const Eight &raw_p,
                                        const Block &block) {
        if (Gradient) g = halve(convert_to_f32(raw_g, block, job.grad().format), stash.of_gradient());
        p = join(job, raw_p, block);
    }
    /// Returns the first half and stores the second one.
    __device__ __forceinline__ static Stash::Four halve(const Eight &x, Stash::Four &stashed) {
        Stash::Four first, second;
        unrolled<kHalf>([&](int k) INLINED {
            first.at[k] = x.at[k];
            second.at[k] = x.at[kHalf + k];
        });
        stashed = second;
        return first;
    }
    /// Exchanges the half in registers and the half in the stash.
    template <int Count> __device__ __forceinline__ void swap() {
        forget_shared();
        unrolled<Count>([&](int m) INLINED {
            const Stash::Four other = stash.of(m);
            stash.of(m) = moment[m];
            moment[m] = other;
        });
        forget_shared();
    }
    /// Calls call(k, moment...) for the elements of both halves. Before and after it, the first half and the second
    /// half are in registers.
    template <int Count, bool Gradient = false, class Call>
    __device__ __forceinline__ void for_elements(const Call &call) {
        unrolled<2>([&](int half) INLINED {
            if (half == 1) {
                swap<Count>();
                if (Gradient) g = stash.of_gradient();
            }
            unrolled<kHalf>([&](int k) INLINED {
                [&]<int... M>(std::integer_sequence<int, M...>) INLINED { call(half * kHalf + k, moment[M].at[k]...); }
                (std::make_integer_sequence<int, Count>{});
            });
        });
    }
    /// Stores the moments after for_elements(). `reads_back`: they become what a later load will give, with the first
    /// half in registers.
    __device__ __forceinline__ void store_moments(const TensorJob &job, const Position &at, const uint64_t *keys,
                                                  const Maps &maps, bool reads_back) {
        unrolled<kMoments>([&](int m) INLINED {
            forget_shared();
            const Moment to = job.stored_moment(m);
            if (!to) return;
            const Stash::Four first = stash.of(m);
            Eight x;
            unrolled<kHalf>([&](int k) INLINED {
                x.at[k] = first.at[k];
                x.at[kHalf + k] = moment[m].at[k];
            });
            store_moment(x, to, at.block(), keys[m], job.range.begin, maps, reads_back);
            if (reads_back) moment[m] = halve(x, stash.of(m));
        });
    }
};

} // namespace dsopt::gpu
