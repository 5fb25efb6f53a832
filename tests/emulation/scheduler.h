// SPDX-License-Identifier: Apache-2.0
// Internals of the emulator, shared by its scheduler (cuda_emu.cc) and the barriers and collectives (collectives.cc).
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

enum class State : uint8_t { not_started, ready, running, at_barrier, at_warp, at_dependency, done };

struct Thread {
    uint3 index;
    unsigned number;
    State state;
    bool waited; // for the preceding kernel
    Fiber *fiber;
    // The collective or barrier round in which the thread waits.
    Op op;
    uint32_t mask;
    int argument, width;
    uint64_t in, out;
};

struct Warp {
    uint32_t exists, exited, waiting;
};

/// Addresses of happens-before edges for the thread sanitizer. Allocated per block, because an address keeps its
/// history as long as it is allocated.
struct BlockSyncPoints {
    uint64_t barrier[2];
    uint64_t warp[kMaxThreads / kLanes];
};
struct GridSyncPoints {
    uint64_t end = 0, dependency = 0;
    FenceOrder fences{};
};

struct Grid {
    const Launch &launch;
    void (*body)(const void *);
    const void *argument;
    uint64_t count, stride;
    std::unique_ptr<GridSyncPoints> sync_points; // only under the thread sanitizer, also below
    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{false};
    std::atomic<bool> triggered{false};
    bool holds = false; // threads stop at their wait for the preceding kernel
};

struct Worker { // runs one block at a time
    Fiber scheduler{};
    std::vector<Fiber *> all{}, spare{};
    char *stacks = nullptr; // under the thread sanitizer: the stacks of all threads of the block
    std::vector<Thread> threads{};
    std::vector<Warp> warps{};
    std::vector<Thread *> order{}, ready{};
    Grid *grid = nullptr;
    Thread *current = nullptr;
    BlockSyncPoints *sync_points = nullptr;
    dim3 shape{0, 0, 0};
    uint3 block{0, 0, 0};
    unsigned count = 0, next = 0, done = 0, at_barrier = 0, at_dependency = 0;
    unsigned round = 0, yes = 0;
    unsigned votes[2] = {0, 0}; // of the last two rounds: a thread may read its result one round late
    void *dynamic = nullptr;
    size_t dynamic_bytes = 0;
    uint64_t random = 0;
    bool aborted = false;
    Worker *next_idle = nullptr;
};

extern __thread Worker *t_worker CUDA_EMU_TLS;

/// Records a violation of the execution model. The block of `w` is abandoned.
[[gnu::format(printf, 2, 3)]] void fail(Worker &w, const char *format, ...);
/// Called in a thread: abandons the block; the thread never resumes. Kernels own nothing that would leak.
[[noreturn]] void abandon(Worker &w);
/// Suspends the thread until another one calls wake().
void wait(Worker &w, Thread &self);
void wake(Worker &w, Thread &thread);
/// Completes the collective on `mask` if all of its lanes that still run have arrived.
bool complete(Worker &w, unsigned number, uint32_t mask, const Thread *self);

} // namespace cuemu
