// SPDX-License-Identifier: Apache-2.0
// Kernels read no host memory. On a GPU such an access is illegal, or slow with some drivers. The emulated device is
// this process and would not notice it. So the engine's allocations here have pages of their own and its calls run on a
// separate stack; both are inaccessible while kernels run.
#include "backend_optimizer.h"
#include "noop_comm.h"
#include <csignal>
#include <mutex>
#include <new>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr size_t kPage = 4096, kMaxRegions = 100000;

/// Allocations that have pages of their own.
struct Region {
    void *memory;
    size_t bytes;
};
Region g_regions[kMaxRegions];
size_t g_count = 0;
std::mutex g_mutex;
thread_local bool t_in_engine = false;

void *allocate(size_t bytes) {
    if (!t_in_engine || fakert::in_runtime_call()) {
        void *const memory = std::malloc(bytes != 0 ? bytes : 1);
        if (memory == nullptr) throw std::bad_alloc();
        return memory;
    }
    const size_t size = (bytes / kPage + 1) * kPage;
    void *const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const std::lock_guard lock(g_mutex);
    if (memory == MAP_FAILED || g_count == kMaxRegions) throw std::bad_alloc();
    g_regions[g_count++] = {memory, size};
    return memory;
}
void release(void *memory) {
    if (memory == nullptr) return;
    if (reinterpret_cast<uintptr_t>(memory) % kPage == 0) {
        const std::lock_guard lock(g_mutex);
        for (size_t i = 0; i < g_count; ++i) {
            if (g_regions[i].memory != memory) continue;
            munmap(memory, g_regions[i].bytes);
            g_regions[i] = g_regions[--g_count];
            return;
        }
    }
    std::free(memory);
}
/// Runs all enqueued work while the engine's memory is inaccessible.
void run_kernels() {
    const auto allow = [](int access) {
        const std::lock_guard lock(g_mutex);
        for (size_t i = 0; i < g_count; ++i) mprotect(g_regions[i].memory, g_regions[i].bytes, access);
    };
    const long before = fakert::kernels_run();
    allow(PROT_NONE);
    const cudaError_t error = cudaDeviceSynchronize();
    allow(PROT_READ | PROT_WRITE);
    EXPECT_EQ(error, cudaSuccess);
    EXPECT_GT(fakert::kernels_run(), before) << "the kernels ran earlier: the call waited for them";
}

/// Runs body() on a stack that is unmapped afterwards.
template <class Body> void in_engine(const Body &body) {
    constexpr size_t bytes = size_t(1) << 20;
    void *const stack = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(stack, MAP_FAILED);
    pthread_attr_t attributes;
    pthread_t thread;
    (void)pthread_attr_init(&attributes);
    ASSERT_EQ(pthread_attr_setstack(&attributes, stack, bytes), 0);
    const auto run = [](void *argument) -> void * {
        t_in_engine = true;
        (*static_cast<const Body *>(argument))();
        t_in_engine = false;
        return nullptr;
    };
    ASSERT_EQ(pthread_create(&thread, &attributes, run, const_cast<Body *>(&body)), 0);
    ASSERT_EQ(pthread_join(thread, nullptr), 0);
    (void)pthread_attr_destroy(&attributes);
    (void)munmap(stack, bytes);
}

} // namespace

void *operator new(size_t bytes) { return allocate(bytes); }
void *operator new[](size_t bytes) { return allocate(bytes); }
void operator delete(void *memory) noexcept { release(memory); }
void operator delete[](void *memory) noexcept { release(memory); }
void operator delete(void *memory, size_t) noexcept { release(memory); }
void operator delete[](void *memory, size_t) noexcept { release(memory); }

using namespace cuda_test;

namespace {

class CudaHostMemory : public testing::Test {
protected:
    void SetUp() override { begin_test(); }
    void TearDown() override { end_test(); }
    static void steps(const Setting &setting, int count) {
        BackendOptimizer side(true, setting);
        side.fill_gradients(0);
        for (int t = 0; t < count; ++t) {
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            in_engine([&] { EXPECT_OK(side.step()); });
            run_kernels();
        }
    }
};

TEST_F(CudaHostMemory, IsNotReadByStepKernels) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB}) {
        Setting s;
        s.algorithm = algorithm;
        steps(s, 2);
        s.desc.max_norm = 1;
        s.desc.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
        s.param = s.grad = DSOPT_DTYPE_F16;
        s.scaler = true;
        steps(s, 2);
        s = {};
        s.algorithm = algorithm;
        s.desc.compat = DSOPT_COMPAT_DEEPSPEED; // tensors of a group share one count
        steps(s, 2);
    }
}

TEST_F(CudaHostMemory, IsNotReadByExchangeKernels) {
    const NoOpComm noop(DSOPT_COMM_FLAG_ENQUEUE);
    for (const int32_t algorithm :
         {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB}) {
        Setting s;
        s.algorithm = algorithm;
        s.context = noop.context;
        s.desc.data = noop.comm;
        s.change = [](dsopt_group &group, int) {
            group.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
            group.freeze_step = 2;
            if (group.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM)
                group.local_interval_steps = group.max_local_interval = 2;
        };
        steps(s, 6);
    }
}

TEST_F(CudaHostMemory, IsNotReadByListKernels) {
    BackendOptimizer side(true, Setting{});
    side.fill_gradients(0);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    in_engine([&] {
        const auto count = int64_t(side.gradients.size());
        std::vector<dsopt_tensor> weights = side.gradients; // destroyed before the kernels run
        for (size_t i = 0; i < weights.size(); ++i) weights[i].data = side.params[i].data();
        EXPECT_OK(
            dsopt_tensors_axpby(side.context, nullptr, side.gradients.data(), 0.5f, weights.data(), count, nullptr));
        EXPECT_OK(dsopt_tensors_clamp(side.context, weights.data(), count, 0.25, nullptr));
        EXPECT_OK(dsopt_zero_grad(side.context, side.gradients.data(), count, DSOPT_ZERO_FILL, nullptr));
    });
    run_kernels();
}

} // namespace
