// SPDX-License-Identifier: Apache-2.0
// The emulated execution model: kernels compute the same as on a device, in any order that a device allows. Reliance on
// what a device does not guarantee is an error.
#include "device_array.h"
#include "sample_kernels.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

using fakert::DeviceArray;
using fakert::Mode;
using fakert::Stream;

namespace {

#ifdef EMULATION_TSAN // TSan creates threads slowly
const std::vector<int64_t> kSizes{33, 130};
const std::vector<uint64_t> kSeeds{7};
const std::vector<Mode> kModes{Mode::lazy, Mode::threads};
#else
const std::vector<int64_t> kSizes{1, 3, 4, 31, 32, 33, 63, 64, 65, 511, 513, 5000};
const std::vector<uint64_t> kSeeds{0, 1, 7, 99};
const std::vector<Mode> kModes{Mode::eager, Mode::lazy, Mode::random, Mode::threads};
#endif

std::vector<float> random_floats(int64_t n, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution;
    std::vector<float> values(static_cast<size_t>(n));
    for (float &value : values) value = distribution(random);
    return values;
}

struct Order {
    Mode mode;
    uint64_t seed;
    unsigned workers;
};
std::vector<Order> orders() {
    std::vector<Order> all;
    for (const Mode mode : kModes)
        for (const uint64_t seed : kSeeds) all.push_back({mode, seed, seed == 7 ? 2u : 1u});
    return all;
}

class EmulatedKernels : public testing::TestWithParam<Order> {
protected:
    void SetUp() override {
        fakert::Config config;
        config.mode = GetParam().mode;
        config.seed = GetParam().seed + 1;
        fakert::reset(config);
        before_ = cuemu::options();
        cuemu::options().seed = GetParam().seed;
        cuemu::options().workers = GetParam().workers;
    }
    void TearDown() override {
        EXPECT_EQ(fakert::live_objects(), 0);
        fakert::reset();
        cuemu::options() = before_;
    }

private:
    cuemu::Options before_;
};
void PrintTo(const Order &order, std::ostream *out) { *out << int(order.mode) << ' ' << order.seed; }
std::string order_name(const testing::TestParamInfo<Order> &info) {
    const char *const names[] = {"eager", "lazy", "random", "threads"};
    return std::string(names[int(info.param.mode)]) + "_" + std::to_string(info.param.seed);
}
INSTANTIATE_TEST_SUITE_P(Orders, EmulatedKernels, testing::ValuesIn(orders()), order_name);

TEST_P(EmulatedKernels, AddVectors) {
    for (const int64_t n : kSizes) {
        const Stream stream(cudaStreamDefault);
        const auto x = random_floats(n, 1), y = random_floats(n, 2);
        const DeviceArray<float> dx(x), dy(y), sum(x.size());
        ASSERT_EQ(sample::add(dx.data(), dy.data(), sum.data(), n, stream), cudaSuccess);
        const auto got = sum.get();
        for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(got[i], x[i] + y[i]) << i;
    }
}

TEST_P(EmulatedKernels, ScaleWithVectorsAndTail) {
    for (const int64_t n : kSizes) {
        const auto x = random_floats(n, 3);
        const DeviceArray<float> dx(x);
        ASSERT_EQ(sample::scale(dx.data(), 3.0f, n, nullptr), cudaSuccess);
        const auto got = dx.get();
        for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(got[i], x[i] * 3.0f) << i;
    }
}

TEST_P(EmulatedKernels, SumInLastBlockWithSameBitsInAnyOrder) {
    const Stream stream;
    const DeviceArray<double> partial(8), result(1);
    const DeviceArray<unsigned> ticket(std::vector<unsigned>{0});
    for (const int64_t n : kSizes) {
        const auto x = random_floats(n, 4);
        const DeviceArray<float> dx(x);
        // Same order as the kernel: a grid stride per thread, warps by halves, warps of a block, blocks by halves.
        const size_t blocks = std::clamp<size_t>((x.size() + 63) / 64, 1, 8);
        std::vector<double> threads(blocks * 64, 0.0);
        for (size_t i = 0; i < x.size(); ++i) threads[i % threads.size()] += double(x[i]) * double(x[i]);
        const auto fold = [](const double *values) {
            double warps = 0;
            for (int warp = 0; warp < 2; ++warp) {
                double lanes[32];
                std::copy_n(values + warp * 32, 32, lanes);
                for (int half = 16; half; half /= 2)
                    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
                warps += lanes[0];
            }
            return warps;
        };
        std::vector<double> sums(64, 0.0);
        for (size_t block = 0; block < blocks; ++block) sums[block] = fold(&threads[block * 64]);
        for (int round = 0; round < 2; ++round) {
            ASSERT_EQ(sample::sum_squares(dx.data(), n, partial.data(), ticket.data(), result.data(), stream),
                      cudaSuccess);
            EXPECT_EQ(result.get()[0], fold(sums.data())) << n;
            EXPECT_EQ(ticket.get()[0], 0u);
        }
    }
}

TEST_P(EmulatedKernels, PackSignsByBallot) {
    for (const int64_t n : kSizes) {
        const auto x = random_floats(n, 5);
        const DeviceArray<float> dx(x);
        const DeviceArray<uint32_t> words(size_t(n + 31) / 32);
        ASSERT_EQ(sample::sign_pack(dx.data(), words.data(), n, nullptr), cudaSuccess);
        std::vector<uint32_t> expected(size_t(n + 31) / 32);
        for (size_t i = 0; i < x.size(); ++i) expected[i / 32] |= uint32_t(x[i] >= 0) << i % 32;
        EXPECT_EQ(words.get(), expected);
    }
}

TEST_P(EmulatedKernels, CountInDynamicSharedMemory) {
    for (const int64_t n : kSizes) {
        std::vector<uint8_t> x(static_cast<size_t>(n));
        std::iota(x.begin(), x.end(), uint8_t(0));
        const DeviceArray<uint8_t> dx(x);
        const DeviceArray<unsigned> bins(std::vector<unsigned>(64, 0u));
        ASSERT_EQ(sample::histogram(dx.data(), n, bins.data(), nullptr), cudaSuccess);
        std::vector<unsigned> expected(64);
        for (const uint8_t value : x) ++expected[value & 63];
        EXPECT_EQ(bins.get(), expected);
    }
}

TEST_P(EmulatedKernels, TakeLargeStructsByValue) {
    const DeviceArray<float> x(std::vector<float>(300, 1.0f));
    auto addresses = std::make_unique<sample::Addresses>();
    static_assert(sizeof *addresses > 32000);
    addresses->count = 300;
    for (int i = 0; i < 300; ++i) addresses->data[i] = x.data() + i;
    ASSERT_EQ(sample::increment_all(*addresses, nullptr), cudaSuccess);
    addresses.reset(); // the launch has a copy
    EXPECT_EQ(x.get(), std::vector<float>(300, 2.0f));
}

template <class... P, class... A>
cudaError_t run(void (*kernel)(P...), unsigned blocks, unsigned threads, A... arguments) {
    if (const cudaError_t error = dsopt::gpu::Launch{"test", blocks, threads, 0, nullptr}(kernel, arguments...))
        return error;
    return cudaDeviceSynchronize();
}

__global__ void shuffle_kernel(double *x, int *lanes) {
    const int lane = int(threadIdx.x % 32);
    x[threadIdx.x] = __shfl_xor_sync(~0u, double(lane), 5);
    lanes[threadIdx.x] = __shfl_sync(~0u, lane, 9, 8);
    lanes[threadIdx.x + 64] = __shfl_up_sync(~0u, lane, 3u, 16);
    lanes[threadIdx.x + 128] = __shfl_down_sync(~0u, lane, 3u, 16);
    if (lane < 4)
        lanes[threadIdx.x + 192] =
            int(__reduce_add_sync(0xfu, unsigned(lane)) + __reduce_max_sync(0xfu, unsigned(lane)));
    else
        lanes[threadIdx.x + 192] = __any_sync(~0xfu, lane == 31) * 2 + __all_sync(~0xfu, lane > 4);
}
TEST(Warps, ShuffleWithinGroupsAndVoteByMask) {
    fakert::reset();
    const DeviceArray<double> x(64);
    const DeviceArray<int> lanes(256);
    ASSERT_EQ(run(shuffle_kernel, 1, 64, x.data(), lanes.data()), cudaSuccess);
    const auto doubles = x.get();
    const auto got = lanes.get();
    for (int t = 0; t < 64; ++t) {
        const int lane = t % 32;
        EXPECT_EQ(doubles[size_t(t)], lane ^ 5);
        EXPECT_EQ(got[size_t(t)], lane / 8 * 8 + 1);
        EXPECT_EQ(got[size_t(t) + 64], lane % 16 < 3 ? lane : lane - 3);
        EXPECT_EQ(got[size_t(t) + 128], lane % 16 > 12 ? lane : lane + 3);
        EXPECT_EQ(got[size_t(t) + 192], lane < 4 ? 6 + 3 : 2);
    }
}

__global__ void votes_kernel(int *counts) {
    const int odd = int(threadIdx.x % 2);
    counts[threadIdx.x] = __syncthreads_count(odd) * 100 + __syncthreads_and(odd) * 10 + __syncthreads_or(odd);
}
TEST(Barriers, CountVotes) {
    fakert::reset();
    const DeviceArray<int> counts(70);
    ASSERT_EQ(run(votes_kernel, 1, 70, counts.data()), cudaSuccess);
    EXPECT_EQ(counts.get(), std::vector<int>(70, 3501));
}

__global__ void shape_kernel(unsigned *indices) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    indices[block * 24 + thread] = block * 24 + thread;
}
TEST(Grids, HaveThreeDimensions) {
    fakert::reset();
    const DeviceArray<unsigned> indices(24 * 24);
    const dsopt::gpu::Launch launch{"shape", dim3(2, 3, 4), dim3(4, 3, 2), 0, nullptr};
    ASSERT_EQ(launch(shape_kernel, indices.data()), cudaSuccess);
    std::vector<unsigned> expected(24 * 24);
    std::iota(expected.begin(), expected.end(), 0u);
    EXPECT_EQ(indices.get(), expected);
}

__global__ void atomics_kernel(int *i, unsigned *u, unsigned long long *l) {
    const int n = int(threadIdx.x);
    atomicAdd(&i[0], -1), atomicMax(&i[1], n), atomicMin(&i[2], -n), atomicCAS(&i[3], 0, n + 1),
        atomicAdd(&i[4], 1 << 30);
    atomicAdd(&u[0], 2u), atomicMax(&u[1], unsigned(n)), atomicOr(&u[2], 1u << n), atomicAnd(&u[3], ~(1u << n));
    atomicInc(&u[4], 9u), atomicExch(&u[5], 5u);
    atomicAdd(&l[0], 1ull << 40), atomicMax(&l[1], static_cast<unsigned long long>(n)), atomicMin(&l[2], 3ull);
}
TEST(Atomics, WorkOnIntegersAndWrap) {
    fakert::reset();
    const DeviceArray<int> i(std::vector<int>(5, 0));
    const DeviceArray<unsigned> u(std::vector<unsigned>{0, 0, 0, ~0u, 0, 0});
    const DeviceArray<unsigned long long> l(std::vector<unsigned long long>{0, 0, 9});
    ASSERT_EQ(run(atomics_kernel, 1, 32, i.data(), u.data(), l.data()), cudaSuccess);
    const auto gi = i.get();
    EXPECT_EQ(gi[0], -32);
    EXPECT_EQ(gi[1], 31);
    EXPECT_EQ(gi[2], -31);
    EXPECT_NE(gi[3], 0);
    EXPECT_EQ(gi[4], 0); // 32 * 2^30
    EXPECT_EQ(u.get(), (std::vector<unsigned>{64, 31, ~0u, 0, 2, 5}));
    EXPECT_EQ(l.get(), (std::vector<unsigned long long>{32ull << 40, 31, 3}));
}
template <class T>
concept CanAdd = requires(T *p, T v) {
    atomicAdd(p, v);
};
TEST(Atomics, HaveNoFloatOverloads) {
    static_assert(CanAdd<int> && CanAdd<unsigned> && CanAdd<unsigned long long>);
    static_assert(!CanAdd<float> && !CanAdd<double>);
}

__global__ void intrinsics_kernel(unsigned *u, int *i) {
    u[0] = __float_as_uint(1.0f), u[1] = __brev(1u), u[2] = __float2uint_rn(-3.0f), u[3] = __float2uint_rn(1e20f);
    u[4] = unsigned(__double_as_longlong(2.0) >> 32),
    u[5] = __float_as_uint(float(__longlong_as_double(0x3ff0000000000000)));
    i[0] = __popc(0xf0u), i[1] = __clz(1), i[2] = __clz(0), i[3] = __ffs(8), i[4] = __float2int_rn(2.5f);
    i[5] = __float2int_rz(-2.5f), i[6] = __float2int_rn(NAN), i[7] = __float2int_rn(-1e20f),
    i[8] = __float2int_rn(1e20f);
    i[9] = __clzll(1), i[10] = __float2int_rd(-0.5f), i[11] = __float2int_ru(0.5f);
}
TEST(Intrinsics, ConvertAndCountBits) {
    fakert::reset();
    const DeviceArray<unsigned> u(6);
    const DeviceArray<int> i(12);
    ASSERT_EQ(run(intrinsics_kernel, 1, 1, u.data(), i.data()), cudaSuccess);
    EXPECT_EQ(u.get(), (std::vector<unsigned>{0x3f800000, 0x80000000, 0, ~0u, 0x40000000, 0x3f800000}));
    const int low = std::numeric_limits<int>::min(), high = std::numeric_limits<int>::max();
    EXPECT_EQ(i.get(), (std::vector<int>{4, 31, 32, 4, 2, -2, 0, low, high, 63, -1, 1}));
}

__global__ void unwritten_kernel(float *x) {
    DYNAMIC_SHARED(float, s);
    x[threadIdx.x] = s[threadIdx.x];
}
TEST(SharedMemory, ReadsAsNanUntilWritten) {
    fakert::reset();
    const DeviceArray<float> x(32);
    const dsopt::gpu::Launch launch{"unwritten", 1, 32, 32 * sizeof(float), nullptr};
    ASSERT_EQ(launch(unwritten_kernel, x.data()), cudaSuccess);
    for (const float value : x.get()) EXPECT_TRUE(std::isnan(value));
}

// Broken kernels: the report names the thread, and the emulation continues with the next launch.
__global__ void barrier_in_branch_kernel(int *x, int limit) {
    if (int(threadIdx.x) < limit) __syncthreads();
    x[threadIdx.x] = 1;
}
__global__ void return_before_barrier_kernel(int *x) {
    if (threadIdx.x < 4) return;
    __syncthreads();
    x[threadIdx.x] = 1;
}
__global__ void half_warp_kernel(int *x) {
    if (threadIdx.x < 16)
        x[threadIdx.x] = __shfl_sync(~0u, 1, 0);
    else
        __syncthreads();
}
__global__ void other_collective_kernel(int *x) {
    x[threadIdx.x] = threadIdx.x < 20 ? __shfl_sync(~0u, 1, 0) : int(__ballot_sync(~0u, 1));
}
__global__ void mask_without_caller_kernel(int *x) { x[threadIdx.x] = __shfl_sync(0xffffu, 1, 0); }
__global__ void trap_kernel(int *x) {
    if (blockIdx.x == 1 && threadIdx.x == 3) __trap();
    x[blockIdx.x * 32 + threadIdx.x] = 1;
}
struct Broken {
    const char *name;
    cudaError_t (*run)(int *x);
    const char *report;
};
const Broken kBroken[] = {
    {"BarrierInBranch", [](int *x) { return run(barrier_in_branch_kernel, 1, 64, x, 40); },
     "kernel test, block (0,0,0), thread (40,0,0): returned while 40 threads of its block wait at __syncthreads()"},
    {"BarrierInBranchOfNoThread", [](int *x) { return run(barrier_in_branch_kernel, 1, 64, x, 0); }, ""},
    {"ReturnBeforeBarrier", [](int *x) { return run(return_before_barrier_kernel, 1, 64, x); },
     "thread (4,0,0): __syncthreads() after 4 threads of the block returned"},
    {"OtherCollective", [](int *x) { return run(other_collective_kernel, 1, 32, x); },
     "warp 0: lane 20 is at another collective"},
    {"MaskWithoutCaller", [](int *x) { return run(mask_without_caller_kernel, 1, 32, x); },
     "thread (16,0,0): a warp collective with mask 0000ffff, which leaves out the caller, lane 16"},
    {"ShuffleOfHalfAWarp", [](int *x) { return run(half_warp_kernel, 1, 64, x); },
     "deadlock: 48 threads wait at __syncthreads(), 16 in a warp collective (this thread too), 0 returned"},
    {"Trap", [](int *x) { return run(trap_kernel, 2, 32, x); }, "block (1,0,0), thread (3,0,0): __trap()"},
};
void PrintTo(const Broken &broken, std::ostream *out) { *out << broken.name; }
class BrokenKernels : public testing::TestWithParam<Broken> {};
INSTANTIATE_TEST_SUITE_P(All, BrokenKernels, testing::ValuesIn(kBroken),
                         [](const testing::TestParamInfo<Broken> &info) { return info.param.name; });
TEST_P(BrokenKernels, AreReportedAndDisableDevice) {
    fakert::reset();
    int *x = nullptr;
    ASSERT_EQ(cudaMalloc(&x, 64 * sizeof(int)), cudaSuccess);
    if (!*GetParam().report) { // not an error: no thread waits
        EXPECT_EQ(GetParam().run(x), cudaSuccess);
        fakert::reset();
        return;
    }
    EXPECT_EQ(GetParam().run(x), cudaErrorLaunchFailure);
    EXPECT_NE(std::string(cuemu::last_error()).find(GetParam().report), std::string::npos) << cuemu::last_error();
    EXPECT_EQ(cudaMemsetAsync(x, 0, 4), cudaErrorLaunchFailure); // as on a device that failed
    EXPECT_EQ(cudaFree(x), cudaErrorLaunchFailure);              // the memory is freed anyway
    EXPECT_EQ(fakert::live_objects(), 0);

    fakert::reset();
    EXPECT_STREQ(cuemu::last_error(), "");
    const DeviceArray<int> again(std::vector<int>(64, 0));
    EXPECT_EQ(run(barrier_in_branch_kernel, 1, 64, again.data(), 64), cudaSuccess);
    EXPECT_EQ(again.get(), std::vector<int>(64, 1));
}

__global__ void order_kernel(unsigned *next, unsigned *order) {
    order[atomicAdd(next, 1u)] = blockIdx.x * 8 + threadIdx.x;
}
TEST(Seeds, PermuteBlocksAndThreadsReproducibly) {
    fakert::reset();
    const cuemu::Options before = cuemu::options();
    const auto run_with = [](uint64_t seed) {
        cuemu::options() = {1, seed};
        const DeviceArray<unsigned> next(std::vector<unsigned>{0}), order(64);
        EXPECT_EQ(run(order_kernel, 8, 8, next.data(), order.data()), cudaSuccess);
        return order.get();
    };
    auto natural = run_with(0), first = run_with(1), second = run_with(2);
    EXPECT_TRUE(std::is_sorted(natural.begin(), natural.end()));
    EXPECT_EQ(first, run_with(1));
    EXPECT_NE(first, second);
    EXPECT_FALSE(std::is_sorted(first.begin(), first.end()));
    std::sort(first.begin(), first.end());
    EXPECT_EQ(first, natural);
    cuemu::options() = before;
}

} // namespace
