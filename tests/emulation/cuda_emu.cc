// SPDX-License-Identifier: Apache-2.0
// The scheduler of the emulated threads. Compiled without sanitizers; see sanitizer.h.
//
// What orders memory for the thread sanitizer is what CUDA promises and no more: barriers, __syncwarp(), fences.
// Shuffles, votes and the emulator's own switches order nothing. Every CUDA thread is a logical thread of the sanitizer
// then, and every block has an OS thread of its own, for shared memory without a history.
#include "cuda_emu.h"
#include "fence_order.h"
#include "fiber.h"
#include "sanitizer.h"
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

__thread uint3 threadIdx CUDA_EMU_TLS;
__thread uint3 blockIdx CUDA_EMU_TLS;
__thread dim3 blockDim CUDA_EMU_TLS;
__thread dim3 gridDim CUDA_EMU_TLS;

namespace cuemu {
namespace {

constexpr unsigned kLanes = 32;
constexpr unsigned kMaxThreads = 1024;

enum class State : uint8_t { fresh, ready, running, at_barrier, at_warp, done };

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
    uint64_t end = 0;
    FenceOrder fences{};
};

struct Spin { // uninstrumented, so that it orders nothing
    std::atomic_flag taken = ATOMIC_FLAG_INIT;
    void lock() {
        while (taken.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    }
    void unlock() { taken.clear(std::memory_order_release); }
};
Spin g_lock;
char g_error[512];
std::mutex g_one_grid; // under the address sanitizer, where shared memory is the process's

struct Grid {
    const Launch &launch;
    void (*body)(const void *);
    const void *argument;
    uint64_t count;
    uint64_t stride = 1;
    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{false};
    std::once_flag waited{};
    std::unique_ptr<GridPlaces> places{}; // only for the thread sanitizer, here and there
};

struct Worker { // runs one block at a time
    Fiber scheduler{};
    std::vector<Fiber *> all{}, spare{};
    std::vector<Thread> threads{};
    std::vector<Warp> warps{};
    std::vector<Thread *> order{}, ready{};
    Grid *grid = nullptr;
    Thread *current = nullptr;
    BlockPlaces *places = nullptr;
    dim3 shape{0, 0, 0};
    unsigned count = 0, next = 0, done = 0, at_barrier = 0;
    unsigned round = 0, yes = 0;
    unsigned votes[2] = {0, 0}; // of the last two rounds: a thread may be a round late in reading its result
    void *dynamic = nullptr;
    size_t dynamic_bytes = 0;
    uint64_t random = 0;
    bool aborted = false;
    Worker *next_idle = nullptr;
};

/// Idle ones, with the stacks they own, outlive the OS threads that used them.
Worker *g_idle = nullptr;
__thread Worker *t_worker CUDA_EMU_TLS = nullptr;

Worker &take_worker() {
    sanitizer::Quiet quiet;
    const std::lock_guard<Spin> hold(g_lock);
    if (!g_idle) return *new Worker;
    return *std::exchange(g_idle, g_idle->next_idle);
}

void return_worker(Worker &w) {
    const std::lock_guard<Spin> hold(g_lock);
    w.next_idle = std::exchange(g_idle, &w);
}

/// Fibers of the thread sanitizer that ended. It gives the identity of a dead one to the next, and takes the two for
/// one thread: they are kept to the end of the grid, as far as its own limit allows.
struct Grave {
    void *fiber;
};
std::vector<Grave> g_graves;

void bury(void *fiber, size_t room) {
    sanitizer::Quiet quiet;
    const std::lock_guard<Spin> hold(g_lock);
    if (fiber) g_graves.push_back({fiber});
    if (g_graves.size() <= room) return;
    for (const Grave &grave : g_graves) __tsan_destroy_fiber(grave.fiber);
    g_graves.clear();
}

uint64_t random_number(Worker &w) {
    w.random ^= w.random << 13;
    w.random ^= w.random >> 7;
    w.random ^= w.random << 17;
    return w.random;
}

[[gnu::format(printf, 2, 3)]] void fail(Worker &w, const char *format, ...) {
    sanitizer::Quiet quiet;
    char message[sizeof g_error];
    int used =
        std::snprintf(message, sizeof message, "kernel %s, block (%u,%u,%u), thread (%u,%u,%u): ", w.grid->launch.name,
                      blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    used = used < 0 ? 0 : used < int(sizeof message) ? used : int(sizeof message) - 1;
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message + used, sizeof message - size_t(used), format, arguments);
    va_end(arguments);
    w.aborted = true;
    w.grid->failed = true;
    std::fprintf(stderr, "cuemu: %s\n", message);
    const std::lock_guard<Spin> hold(g_lock);
    if (!g_error[0]) std::memcpy(g_error, message, sizeof message);
}

/// From inside a thread: the block is given up, and this never resumes. Kernels own nothing that would leak.
[[noreturn]] void abandon(Worker &w) {
    for (;;) switch_fiber(*w.current->fiber, w.scheduler);
}

void wait(Worker &w, Thread &self) {
    if (w.places) sanitizer::release(&w.grid->places->end); // in case the block is given up and this never resumes
    switch_fiber(*self.fiber, w.scheduler);
}

void run_as(Worker &w, Thread &thread) {
    w.current = &thread;
    threadIdx = thread.index;
    thread.state = State::running;
}

void wake(Worker &w, Thread &thread) {
    thread.state = State::ready;
    w.ready.push_back(&thread);
}

void finish_barrier(Worker &w, Thread &self) {
    w.votes[w.round & 1] = w.yes;
    for (unsigned i = 0; i < w.count; ++i)
        if (Thread &thread = w.threads[i]; &thread != &self) wake(w, thread);
    w.yes = 0;
    w.at_barrier = 0;
    ++w.round;
    if (w.places) w.grid->places->fences.barrier();
}

uint64_t combine(Op op, const Thread *lanes, uint32_t need) {
    uint64_t result = 0;
    bool first = true;
    for (uint32_t m = need; m; m &= m - 1, first = false) {
        const unsigned lane = unsigned(__builtin_ctz(m));
        const uint32_t v = uint32_t(lanes[lane].in), r = uint32_t(result);
        switch (op) {
        case Op::ballot: result |= uint64_t(v) << lane; break;
        case Op::add_u32: result = uint32_t(r + v); break;
        case Op::min_u32: result = first || v < r ? v : r; break;
        case Op::max_u32: result = first || v > r ? v : r; break;
        case Op::and_u32: result = first ? v : r & v; break;
        case Op::or_u32: result = r | v; break;
        case Op::xor_u32: result = r ^ v; break;
        default: return 0;
        }
    }
    return result;
}

/// The lane that a shuffle reads; its own where the lane would be outside its group.
int source_lane(const Thread &thread, int lane) {
    const int low = lane & ~(thread.width - 1), high = low + thread.width;
    int source = lane;
    switch (thread.op) {
    case Op::shfl_idx: return low + (thread.argument & (thread.width - 1));
    case Op::shfl_up: source = lane - thread.argument; break;
    case Op::shfl_down: source = lane + thread.argument; break;
    default: return (lane ^ thread.argument) < high ? lane ^ thread.argument : lane;
    }
    return source < low || source >= high ? lane : source;
}

/// Completes the collective on `mask` if all of its lanes that still run have arrived.
bool complete(Worker &w, unsigned number, uint32_t mask, const Thread *self) {
    Warp &warp = w.warps[number];
    const uint32_t need = mask & warp.exists & ~warp.exited;
    if (!need || (warp.waiting & need) != need) return false;
    Thread *const lanes = &w.threads[number * kLanes];
    const Op op = lanes[__builtin_ctz(need)].op;
    for (uint32_t m = need; m; m &= m - 1) {
        const int lane = __builtin_ctz(m);
        if (lanes[lane].mask == mask && lanes[lane].op == op) continue;
        fail(w, "warp %u: lane %d is at another collective (%d, mask %08x) than its partners (%d, mask %08x)", number,
             lane, int(lanes[lane].op), lanes[lane].mask, int(op), mask);
        return false;
    }
    const uint64_t combined = combine(op, lanes, need);
    const bool shuffle = op >= Op::shfl_idx && op <= Op::shfl_xor;
    for (uint32_t m = need; m; m &= m - 1) {
        Thread &thread = lanes[__builtin_ctz(m)];
        thread.out = combined;
        if (!shuffle) continue;
        const int source = source_lane(thread, __builtin_ctz(m));
        // What a lane without a part gives is undefined: NaN, as float and as double.
        thread.out = need >> source & 1u ? lanes[source].in : 0x7fffdead7fffdeadull;
    }
    warp.waiting &= ~need;
    for (uint32_t m = need; m; m &= m - 1)
        if (Thread &thread = lanes[__builtin_ctz(m)]; &thread != self) wake(w, thread);
    return true;
}

void returned(Worker &w, Thread &self) {
    if (w.grid->launch.early && !self.waited && !w.aborted)
        fail(w, "returned without having waited for the kernel before, though its own may begin early");
    self.state = State::done;
    ++w.done;
    if (w.places) sanitizer::release(&w.grid->places->end);
    const unsigned number = self.number / kLanes;
    Warp &warp = w.warps[number];
    warp.exited |= 1u << self.number % kLanes;
    for (uint32_t left = warp.waiting; left && !w.aborted; left &= left - 1) { // it may be the last one waited for
        const unsigned lane = unsigned(__builtin_ctz(left));
        if (warp.waiting >> lane & 1u) complete(w, number, w.threads[number * kLanes + lane].mask, nullptr);
    }
    if (w.at_barrier && !w.aborted)
        fail(w, "returned while %u threads of its block wait at __syncthreads()", w.at_barrier);
}

Thread &next_fresh(Worker &w) {
    Thread &thread = w.order.empty() ? w.threads[w.next] : *w.order[w.next];
    ++w.next;
    return thread;
}

void thread_main() {
    entered(*t_worker->current->fiber, t_worker->scheduler);
    for (;;) {
        Worker &w = *t_worker;
        w.grid->body(w.grid->argument);
        Thread &self = *w.current;
        Fiber &fiber = *self.fiber;
        returned(w, self);
        if (w.ready.empty() && w.next < w.count && !w.aborted && !fiber.tsan) { // nobody waits: the next, on this stack
            Thread &following = next_fresh(w);
            following.fiber = &fiber;
            run_as(w, following);
            continue;
        }
        switch_fiber(fiber, w.scheduler);
    }
}

Fiber *take_fiber(Worker &w) {
    if (w.spare.empty()) {
        sanitizer::Quiet quiet;
        w.spare.push_back(new_fiber(size_t(sanitizer::asan() ? 256 : 128) << 10)); // kernels take up to 32 KiB by value
        w.all.push_back(w.spare.back());
    }
    Fiber *const fiber = w.spare.back();
    w.spare.pop_back();
    // Not quiet: a thread follows what was before the launch.
    prepare(*fiber, thread_main, sanitizer::tsan() ? __tsan_create_fiber(0) : nullptr);
    return fiber;
}

/// Under the thread sanitizer a stack has no second use in a block: it would take what two threads write there for a
/// race.
void drop_fibers(Worker &w) {
    if (!sanitizer::tsan()) return;
    sanitizer::Quiet quiet;
    for (Fiber *fiber : w.all) {
        bury(fiber->tsan, 6000);
        delete_fiber(fiber);
    }
    w.all.clear();
    w.spare.clear();
}

void prepare_threads(Worker &w, dim3 shape) {
    w.shape = shape;
    w.count = shape.x * shape.y * shape.z;
    w.threads.assign(size_t(w.count + kLanes - 1) / kLanes * kLanes, Thread{});
    w.warps.assign(w.threads.size() / kLanes, Warp{});
    for (unsigned i = 0; i < w.count; ++i) {
        w.threads[i].index = {i % shape.x, i / shape.x % shape.y, i / (shape.x * shape.y)};
        w.threads[i].number = i;
        w.warps[i / kLanes].exists |= 1u << i % kLanes;
    }
    w.ready.reserve(w.count);
}

void prepare_dynamic_shared(Worker &w, size_t bytes) {
    sanitizer::Quiet quiet;
    // Anew for each block under a sanitizer: red zones where it ends, and no history.
    if (w.dynamic == nullptr || w.dynamic_bytes != bytes || sanitizer::tsan() || sanitizer::asan()) {
        std::free(w.dynamic);
        w.dynamic = nullptr;
        w.dynamic_bytes = bytes;
        // No bytes have an address, too, as on a device: kernels make others from it.
        if (posix_memalign(&w.dynamic, 128, bytes != 0 ? bytes : 1)) std::abort();
    }
    if (bytes) std::memset(w.dynamic, 0xff, bytes); // unwritten floats read as NaN
}

void report_deadlock(Worker &w) {
    unsigned barrier = 0, collective = 0;
    const Thread *shown = nullptr;
    for (unsigned i = 0; i < w.count; ++i) {
        const Thread &thread = w.threads[i];
        barrier += thread.state == State::at_barrier;
        collective += thread.state == State::at_warp;
        if (!shown || (thread.state == State::at_warp && shown->state != State::at_warp)) shown = &thread;
    }
    threadIdx = shown->index;
    fail(w, "deadlock: %u threads wait at __syncthreads(), %u in a warp collective%s, %u returned", barrier, collective,
         collective ? " (this one too)" : "", w.done);
}

void run_block(Worker &w, uint64_t block) {
    const uint64_t seed = options().seed;
    for (unsigned i = 0; i < w.count; ++i) {
        w.threads[i].state = State::fresh;
        w.threads[i].waited = false;
    }
    for (Warp &warp : w.warps) warp.exited = warp.waiting = 0;
    w.ready.clear();
    w.order.clear();
    w.random = (seed ^ (block + 1) * 0x9e3779b97f4a7c15ull) | 1;
    if (seed) {
        for (unsigned i = 0; i < w.count; ++i) w.order.push_back(&w.threads[i]);
        for (unsigned i = w.count; i > 1; --i) std::swap(w.order[i - 1], w.order[random_number(w) % i]);
    }
    w.next = w.done = w.at_barrier = w.round = w.yes = 0;
    w.aborted = false;
    prepare_dynamic_shared(w, w.grid->launch.shared);
    if (sanitizer::tsan()) {
        w.places = new BlockPlaces{};
        w.grid->places->fences.begin_block(w.count);
    }
    while (w.done < w.count && !w.aborted) {
        bool resume = !w.ready.empty();
        if (resume && seed && w.next < w.count) resume = random_number(w) & 1;
        if (resume) {
            if (seed) std::swap(w.ready.back(), w.ready[random_number(w) % w.ready.size()]);
            Thread &thread = *w.ready.back();
            w.ready.pop_back();
            run_as(w, thread);
        } else if (w.next < w.count) {
            Thread &thread = next_fresh(w);
            thread.fiber = take_fiber(w);
            run_as(w, thread);
        } else {
            report_deadlock(w);
            break;
        }
        Fiber *const fiber = w.current->fiber;
        switch_fiber(w.scheduler, *fiber);
        if (w.current->state == State::done && !fiber->tsan) w.spare.push_back(fiber);
    }
    if (w.aborted) { // take back the stacks of threads that never came home
        w.spare = w.all;
        for (Fiber *fiber : w.all) forget_frames(*fiber);
    }
    drop_fibers(w);
    sanitizer::Quiet quiet;
    delete std::exchange(w.places, nullptr);
}

void run_share(Grid &grid, uint64_t limit) {
    Worker &w = take_worker();
    t_worker = &w;
    w.grid = &grid;
    w.scheduler.stack = nullptr;
    w.scheduler.tsan = sanitizer::tsan() ? __tsan_get_current_fiber() : nullptr;
    const dim3 size = grid.launch.grid, shape = grid.launch.block;
    blockDim = shape;
    gridDim = size;
    if (w.shape.x != shape.x || w.shape.y != shape.y || w.shape.z != shape.z) {
        sanitizer::Quiet quiet;
        prepare_threads(w, shape);
    }
    for (uint64_t k = 0; k < limit && !grid.failed; ++k) {
        const uint64_t i = grid.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= grid.count) break;
        const uint64_t block = grid.stride == 1 ? i : (i * grid.stride + options().seed) % grid.count;
        blockIdx = {unsigned(block % size.x), unsigned(block / size.x % size.y), unsigned(block / size.x / size.y)};
        run_block(w, block);
    }
    t_worker = nullptr;
    return_worker(w);
}

struct Helper {
    std::thread thread;
};

void run_blocks(Grid &grid) {
    if (sanitizer::tsan()) {
        while (grid.next < grid.count && !grid.failed) std::thread([&] { run_share(grid, 1); }).join();
        return;
    }
    std::vector<Helper> helpers;
    if (!sanitizer::asan())
        for (unsigned i = 1; i < options().workers && i < grid.count; ++i)
            helpers.push_back({std::thread([&] { run_share(grid, UINT64_MAX); })});
    run_share(grid, UINT64_MAX);
    for (Helper &helper : helpers) helper.thread.join();
}

uint64_t from_environment(const char *name, uint64_t otherwise) {
    const char *const text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

} // namespace

Options &options() {
    static Options options{unsigned(from_environment("CUEMU_WORKERS", 1)), from_environment("CUEMU_SEED", 0)};
    return options;
}

const char *last_error() { return g_error; }

void clear_error() {
    const std::lock_guard<Spin> hold(g_lock);
    g_error[0] = 0;
}

bool run_grid(const Launch &launch, void (*body)(const void *), const void *argument) {
    Grid grid{launch, body, argument, uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z};
    const uint64_t seed = options().seed;
    if (seed && grid.count > 1) {
        grid.stride = (seed * 2654435761u) % grid.count | 1;
        while (std::gcd(grid.stride, grid.count) != 1) grid.stride += 2;
    }
    if (sanitizer::tsan()) grid.places = std::make_unique<GridPlaces>();
    {
        std::unique_lock<std::mutex> hold(g_one_grid, std::defer_lock);
        if (sanitizer::asan()) hold.lock();
        run_blocks(grid);
    }
    if (sanitizer::tsan()) {
        sanitizer::acquire(&grid.places->end);
        bury(nullptr, 0);
        sanitizer::Quiet quiet;
        grid.places.reset();
    }
    return !grid.failed;
}

void trap(const char *why) {
    fail(*t_worker, "%s", why);
    abandon(*t_worker);
}

void *dynamic_shared() { return t_worker->dynamic; }

void fence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (t_worker->places) t_worker->grid->places->fences.fence(t_worker->current->number);
}

void note_atomic(const void *address) {
    if (t_worker->places) t_worker->grid->places->fences.atomic(t_worker->current->number, address);
}

void note_store(const void *address, size_t bytes) {
    if (options().stores == nullptr || t_worker == nullptr) return;
    options().stores->push_back({t_worker->grid->launch.name, blockIdx.x, t_worker->current->number,
                                 reinterpret_cast<uintptr_t>(address), unsigned(bytes)});
}

void wait_for_previous() {
    t_worker->current->waited = true;
    const Launch &launch = t_worker->grid->launch;
    if (launch.waited != nullptr) std::call_once(t_worker->grid->waited, launch.waited, launch.argument);
}

void let_next_begin() {
    bool *const triggered = t_worker->grid->launch.triggered;
    if (triggered != nullptr) std::atomic_ref(*triggered).store(true, std::memory_order_relaxed);
}

int block_barrier(bool predicate, Vote vote) {
    Worker &w = *t_worker;
    Thread &self = *w.current;
    if (w.done) {
        fail(w, "__syncthreads() after %u threads of the block returned", w.done);
        abandon(w);
    }
    const unsigned round = w.round & 1;
    if (w.places) sanitizer::release(&w.places->barrier[round]);
    w.yes += predicate;
    if (++w.at_barrier == w.count) {
        finish_barrier(w, self);
    } else {
        self.state = State::at_barrier;
        wait(w, self);
    }
    if (w.places) sanitizer::acquire(&w.places->barrier[round]);
    const unsigned yes = w.votes[round];
    return vote == Vote::count ? int(yes) : vote == Vote::all ? yes == w.count : vote == Vote::any ? yes != 0 : 0;
}

uint64_t warp_op(Op op, uint32_t mask, uint64_t in, int argument, int width) {
    Worker &w = *t_worker;
    Thread &self = *w.current;
    const unsigned number = self.number / kLanes, lane = self.number % kLanes;
    if (!(mask >> lane & 1u)) {
        fail(w, "a warp collective with mask %08x, which leaves out the caller, lane %u", mask, lane);
        abandon(w);
    }
    if (width <= 0 || width > int(kLanes) || (width & (width - 1))) {
        fail(w, "a shuffle of width %d", width);
        abandon(w);
    }
    self.op = op;
    self.mask = mask;
    self.in = in;
    self.argument = argument;
    self.width = width;
    w.warps[number].waiting |= 1u << lane;
    if (op == Op::syncwarp && w.places) sanitizer::release(&w.places->warp[number]);
    if (!complete(w, number, mask, &self)) {
        if (w.aborted) abandon(w);
        self.state = State::at_warp;
        wait(w, self);
    }
    if (op == Op::syncwarp && w.places) sanitizer::acquire(&w.places->warp[number]);
    return self.out;
}

} // namespace cuemu
