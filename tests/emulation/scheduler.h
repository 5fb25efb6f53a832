// SPDX-License-Identifier: Apache-2.0
// Inside the emulator: what its scheduler (cuda_emu.cc) and the barriers and collectives (collectives.cc) share.
#pragma once
#include "cuda_emu.h"
#include "fence_order.h"
#include "fiber.h"
#include "sanitizer.h"
#include <atomic>
#include <memory>
#include <vector>

namespace cuemu {

constexpr unsigned kLanes = 32;
constexpr unsigned kMaxThreads = 1024;

enum class State : uint8_t { fresh, ready, running, at_barrier, at_warp, at_dependency, done };

struct Thread {
    uint3 index;
    unsigned number;
    State state;
    bool waited; // for the kernel before
    Fiber *fiber;
    // The collective it waits in, or the barrier round.
    Op op;
    uint32_t mask;
    int argument, width;
    uint64_t in, out;
};

struct Warp {
    uint32_t exists, exited, waiting;
};

/// Where orders of memory are booked. Made anew for each block: a place keeps its history as long as it is allocated.
struct BlockPlaces {
    uint64_t barrier[2];
    uint64_t warp[kMaxThreads / kLanes];
};
struct GridPlaces {
    uint64_t end = 0, dependency = 0;
    FenceOrder fences{};
};

struct Grid {
    const Launch &launch;
    void (*body)(const void *);
    const void *argument;
    uint64_t count, stride;
    std::unique_ptr<GridPlaces> places; // only for the thread sanitizer, here and there
    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{false};
    std::atomic<bool> triggered{false};
    bool holds = false; // threads stop at their wait for the kernel before
};

struct Worker { // runs one block at a time
    Fiber scheduler{};
    std::vector<Fiber *> all{}, spare{};
    char *stacks = nullptr; // under the thread sanitizer: those of all threads of the block
    std::vector<Thread> threads{};
    std::vector<Warp> warps{};
    std::vector<Thread *> order{}, ready{};
    Grid *grid = nullptr;
    Thread *current = nullptr;
    BlockPlaces *places = nullptr;
    dim3 shape{0, 0, 0};
    uint3 block{0, 0, 0};
    unsigned count = 0, next = 0, done = 0, at_barrier = 0, at_dependency = 0;
    unsigned round = 0, yes = 0;
    unsigned votes[2] = {0, 0}; // of the last two rounds: a thread may be a round late in reading its result
    void *dynamic = nullptr;
    size_t dynamic_bytes = 0;
    uint64_t random = 0;
    bool aborted = false;
    Worker *next_idle = nullptr;
};

extern __thread Worker *t_worker CUDA_EMU_TLS;

/// Notes what broke the execution model. The block of `w` is given up.
[[gnu::format(printf, 2, 3)]] void fail(Worker &w, const char *format, ...);
/// From inside a thread: the block is given up, and this never resumes. Kernels own nothing that would leak.
[[noreturn]] void abandon(Worker &w);
/// The thread goes on when another one calls wake().
void wait(Worker &w, Thread &self);
void wake(Worker &w, Thread &thread);
/// Completes the collective on `mask` if all of its lanes that still run have arrived.
bool complete(Worker &w, unsigned number, uint32_t mask, const Thread *self);

} // namespace cuemu
