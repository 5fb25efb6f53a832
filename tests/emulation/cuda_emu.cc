// SPDX-License-Identifier: Apache-2.0
// The scheduler of the emulated threads, and grids. Compiled without sanitizers; see sanitizer.h.
//
// Only what CUDA guarantees is a happens-before edge for the thread sanitizer: barriers, __syncwarp() and fences.
// Shuffles, votes and the emulator's own switches are not. So each CUDA thread is a logical thread of the sanitizer,
// and each block has its own OS thread, whose shared memory has no access history.
#include "memory_rights.h"
#include "quiet_mutex.h"
#include "scheduler.h"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

__thread uint3 threadIdx CUDA_EMU_TLS;
__thread uint3 blockIdx CUDA_EMU_TLS;
__thread dim3 blockDim CUDA_EMU_TLS;
__thread dim3 gridDim CUDA_EMU_TLS;

namespace cuemu {

__thread Worker *t_worker CUDA_EMU_TLS = nullptr;

namespace {

struct Spin { // uninstrumented, so that it is no synchronization for the sanitizer
    std::atomic_flag taken = ATOMIC_FLAG_INIT;
    void lock() {
        while (taken.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    }
    void unlock() { taken.clear(std::memory_order_release); }
};
Spin g_lock;
char g_error[512];
std::mutex g_one_grid; // used under the address sanitizer, where shared memory belongs to the process

/// Idle workers. They own stacks and outlive the OS threads that used them.
Worker *g_idle = nullptr;

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

/// Ended fibers of the thread sanitizer. The sanitizer reuses the identity of a destroyed fiber for the next one and
/// takes both for one thread. So ended fibers are kept until the end of the grid, as far as the sanitizer's limit
/// allows.
std::vector<void *> g_ended;

size_t g_fibers = 0; // of the thread sanitizer: running ones and those that ended

/// Requires g_lock.
void destroy_ended() {
    for (void *fiber : g_ended) __tsan_destroy_fiber(fiber);
    g_fibers -= g_ended.size();
    g_ended.clear();
}

void keep_ended(void *fiber) {
    sanitizer::Quiet quiet;
    const std::lock_guard<Spin> hold(g_lock);
    g_ended.push_back(fiber);
}

/// The sanitizer ends the process at 8,128 threads.
void *create_tsan_fiber() {
    {
        sanitizer::Quiet quiet;
        const std::lock_guard<Spin> hold(g_lock);
        if (g_fibers >= 6000) destroy_ended();
        ++g_fibers;
    }
    return __tsan_create_fiber(0);
}

uint64_t random_number(Worker &w) {
    w.random ^= w.random << 13;
    w.random ^= w.random >> 7;
    w.random ^= w.random << 17;
    return w.random;
}

} // namespace

void fail(Worker &w, const char *format, ...) {
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

void abandon(Worker &w) {
    for (;;) switch_fiber(*w.current->fiber, w.scheduler);
}

void wake(Worker &w, Thread &thread) {
    thread.state = State::ready;
    w.ready.push_back(&thread);
}

namespace {

void run_as(Worker &w, Thread &thread) {
    w.current = &thread;
    threadIdx = thread.index;
    thread.state = State::running;
}

void returned(Worker &w, Thread &self) {
    if (w.grid->launch.early && !self.waited && !w.aborted)
        fail(w, "returned without a wait for the preceding kernel, although this kernel was launched early");
    self.state = State::done;
    ++w.done;
    if (w.sync_points) sanitizer::release(&w.grid->sync_points->end);
    const unsigned number = self.number / kLanes;
    Warp &warp = w.warps[number];
    warp.exited |= 1u << self.number % kLanes;
    // other lanes may have waited only for this one
    for (uint32_t left = warp.waiting; left && !w.aborted; left &= left - 1) {
        const unsigned lane = unsigned(__builtin_ctz(left));
        if (warp.waiting >> lane & 1u) complete(w, number, w.threads[number * kLanes + lane].mask, nullptr);
    }
    if (w.at_barrier && !w.aborted)
        fail(w, "returned while %u threads of its block wait at __syncthreads()", w.at_barrier);
}

Thread &next_new_thread(Worker &w) {
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
        // If no thread is ready, the next new thread runs on this stack.
        if (w.ready.empty() && w.next < w.count && !w.aborted && !fiber.tsan) {
            Thread &following = next_new_thread(w);
            following.fiber = &fiber;
            run_as(w, following);
            continue;
        }
        if (!w.ready.empty() && !w.aborted && !fiber.tsan && options().seed == 0) { // as choose_next() would choose
            Thread &following = *w.ready.back();
            w.ready.pop_back();
            w.spare.push_back(&fiber);
            run_as(w, following);
            switch_fiber(fiber, *following.fiber); // does not return: the next use of the stack begins at its upper end
        }
        switch_fiber(fiber, w.scheduler);
    }
}

// Kernels take up to 32 KiB by value. With clang's address sanitizer the frame of the largest has 275 KiB, unless
// detect_stack_use_after_return keeps frames elsewhere.
const size_t kStack = size_t(sanitizer::asan() ? 512 : 160) << 10;

Fiber *add_fiber(Worker &w) {
    if (!sanitizer::tsan()) return new_fiber(kStack);
    if (w.stacks == nullptr) w.stacks = map_stack(w.count * kStack);
    return new_fiber(w.stacks + w.all.size() * kStack, kStack);
}

Fiber *take_fiber(Worker &w) {
    if (w.spare.empty()) {
        sanitizer::Quiet quiet;
        w.spare.push_back(add_fiber(w));
        w.all.push_back(w.spare.back());
    }
    Fiber *const fiber = w.spare.back();
    w.spare.pop_back();
    // Synchronization is visible to the sanitizer here: a thread happens after everything before the launch.
    prepare(*fiber, thread_main, sanitizer::tsan() ? create_tsan_fiber() : nullptr);
    return fiber;
}

/// Makes the thread that runs next the current one. Returns false if none can run, or if the block is abandoned.
bool choose_next(Worker &w) {
    const uint64_t seed = options().seed;
    if (w.aborted) return false;
    bool resume = !w.ready.empty();
    if (resume && seed && w.next < w.count) resume = random_number(w) & 1;
    if (resume) {
        if (seed) std::swap(w.ready.back(), w.ready[random_number(w) % w.ready.size()]);
        Thread &thread = *w.ready.back();
        w.ready.pop_back();
        run_as(w, thread);
    } else if (w.next < w.count) {
        Thread &thread = next_new_thread(w);
        thread.fiber = take_fiber(w);
        run_as(w, thread);
    } else {
        return false;
    }
    return true;
}

/// Frees the fibers under the thread sanitizer. A stack is not reused within a block, because the sanitizer would
/// report a race between the writes of two threads to it.
void drop_fibers(Worker &w) {
    if (!sanitizer::tsan()) return;
    for (Fiber *fiber : w.all) {
        if (fiber->tsan != nullptr) keep_ended(fiber->tsan);
        delete_fiber(fiber);
    }
    if (w.stacks != nullptr) unmap_stack(std::exchange(w.stacks, nullptr), w.count * kStack);
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
    // A sanitizer needs a new allocation per block: red zones at its end, and no access history.
    if (w.dynamic == nullptr || w.dynamic_bytes != bytes || sanitizer::tsan() || sanitizer::asan()) {
        std::free(w.dynamic);
        w.dynamic = nullptr;
        w.dynamic_bytes = bytes;
        // An empty allocation has an address too, as on a device: kernels compute other addresses from it.
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
         collective ? " (this thread too)" : "", w.done);
}

void begin_block(Worker &w, uint64_t block) {
    const uint64_t seed = options().seed;
    const dim3 size = w.grid->launch.grid;
    w.block = {unsigned(block % size.x), unsigned(block / size.x % size.y), unsigned(block / size.x / size.y)};
    for (unsigned i = 0; i < w.count; ++i) {
        w.threads[i].state = State::not_started;
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
    w.next = w.done = w.at_barrier = w.at_dependency = w.round = w.yes = 0;
    w.aborted = false;
    prepare_dynamic_shared(w, w.grid->launch.shared);
    if (sanitizer::tsan()) {
        w.sync_points = new BlockSyncPoints{};
        w.grid->sync_points->fences.begin_block(w.count);
    }
}

/// Runs until all threads have returned or wait for the preceding kernel.
void run_threads(Worker &w) {
    t_worker = &w;
    blockIdx = w.block;
    while (choose_next(w)) {
        switch_fiber(w.scheduler, *w.current->fiber);
        if (Fiber *const fiber = w.current->fiber; w.current->state == State::done && !fiber->tsan)
            w.spare.push_back(fiber);
    }
    if (w.done < w.count && !w.aborted && w.at_dependency == 0) report_deadlock(w);
}

void end_block(Worker &w) {
    sanitizer::Quiet quiet;
    if (w.aborted) { // reuse the stacks of threads that did not return
        w.spare = w.all;
        for (Fiber *fiber : w.all) forget_frames(*fiber);
    }
    drop_fibers(w);
    delete std::exchange(w.sync_points, nullptr);
}

/// Returns a worker for blocks of the grid on this OS thread.
Worker &take_worker_for(Grid &grid) {
    Worker &w = take_worker();
    w.grid = &grid;
    w.scheduler.stack = nullptr;
    w.scheduler.tsan = sanitizer::tsan() ? __tsan_get_current_fiber() : nullptr;
    const dim3 shape = grid.launch.block;
    blockDim = shape;
    gridDim = grid.launch.grid;
    if (w.shape.x != shape.x || w.shape.y != shape.y || w.shape.z != shape.z) {
        sanitizer::Quiet quiet;
        prepare_threads(w, shape);
    }
    return w;
}

bool take_block(Grid &grid, uint64_t &block) {
    if (grid.failed) return false;
    const uint64_t i = grid.next.fetch_add(1, std::memory_order_relaxed);
    block = grid.stride == 1 ? i : (i * grid.stride + options().seed) % grid.count;
    return i < grid.count;
}

void run_share(Grid &grid, uint64_t limit) {
    Worker &w = take_worker_for(grid);
    uint64_t block = 0;
    for (uint64_t k = 0; k < limit && take_block(grid, block); ++k) {
        begin_block(w, block);
        run_threads(w);
        end_block(w);
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

void wait(Worker &w, Thread &self) {
    if (w.sync_points) {
        // If the block is abandoned, this thread never resumes. For the thread sanitizer a new thread happens after the
        // one that creates its fiber, which must be the scheduler.
        sanitizer::release(&w.grid->sync_points->end);
        switch_fiber(*self.fiber, w.scheduler);
    } else {
        switch_fiber(*self.fiber, choose_next(w) ? *w.current->fiber : w.scheduler);
    }
}

Options &options() {
    static Options options{unsigned(from_environment("CUEMU_WORKERS", 1)), from_environment("CUEMU_SEED", 0),
                           unsigned(from_environment("CUEMU_CAPABILITY", 90))};
    return options;
}

const char *last_error() { return g_error; }

void clear_error() {
    const std::lock_guard<Spin> hold(g_lock);
    g_error[0] = 0;
}

namespace {

Grid make_grid(const Launch &launch, void (*body)(const void *), const void *argument) {
    const uint64_t count = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z, seed = options().seed;
    uint64_t stride = 1;
    if (seed && count > 1) {
        stride = (seed * 2654435761u) % count | 1;
        while (std::gcd(stride, count) != 1) stride += 2;
    }
    return {launch, body, argument, count, stride, sanitizer::tsan() ? std::make_unique<GridSyncPoints>() : nullptr};
}

/// Locks the process under the address sanitizer: shared memory belongs to the process, so only one block may run.
std::unique_lock<std::mutex> one_grid() {
    std::unique_lock<std::mutex> hold(g_one_grid, std::defer_lock);
    if (sanitizer::asan()) hold.lock();
    return hold;
}

bool end_grid(Grid &grid, bool &triggered) {
    if (sanitizer::tsan()) {
        sanitizer::acquire(&grid.sync_points->end);
        sanitizer::Quiet quiet;
        {
            const std::lock_guard<Spin> hold(g_lock);
            destroy_ended();
        }
        grid.sync_points.reset();
    }
    triggered = grid.triggered;
    return !grid.failed;
}

} // namespace

bool run_grid(const Launch &launch, void (*body)(const void *), const void *argument, bool &triggered) {
    Grid grid = make_grid(launch, body, argument);
    {
        const auto hold = one_grid();
        run_blocks(grid);
    }
    return end_grid(grid, triggered);
}

namespace {

/// An OS thread and its creator, of which one runs at a time. A thread whose function has returned waits for the next
/// one, until the end of the process: creating a thread takes longer than most kernels. Under the thread sanitizer every
/// function has a new thread, whose shared memory has no access history.
class Coroutine {
public:
    static Coroutine &acquire() {
        if (!sanitizer::tsan()) {
            const std::lock_guard<Spin> hold(g_lock);
            if (Coroutine *const idle = g_idle_coroutines) {
                g_idle_coroutines = idle->next_idle_;
                return *idle;
            }
        }
        Coroutine *const made = new Coroutine;
        made->thread_ = std::thread([made] { made->loop(); });
        return *made;
    }
    /// Returns when the function pauses or has returned.
    void call(void (*body)(void *), void *data) {
        body_ = body;
        data_ = data;
        resume();
    }
    void resume() {
        run_.post();
        stopped_.wait();
    }
    /// Called in the function: returns at the next resume().
    void pause() {
        stopped_.post();
        run_.wait();
    }
    /// Called after the function has returned.
    void release() {
        if (sanitizer::tsan()) {
            thread_.join();
            delete this;
            return;
        }
        const std::lock_guard<Spin> hold(g_lock);
        next_idle_ = std::exchange(g_idle_coroutines, this);
    }

private:
    void loop() {
        do {
            run_.wait();
            body_(data_);
            stopped_.post();
        } while (!sanitizer::tsan());
    }

    static Coroutine *g_idle_coroutines; // protected by g_lock
    QuietSemaphore run_, stopped_;
    std::thread thread_{};
    void (*body_)(void *) = nullptr;
    void *data_ = nullptr;
    Coroutine *next_idle_ = nullptr;
};
Coroutine *Coroutine::g_idle_coroutines = nullptr;

} // namespace

/// State of a grid that was launched early. It has its own OS thread, because shared memory and threadIdx are per OS
/// thread.
struct EarlyGrid::State {
    Launch launch;
    size_t blocks;
    Grid grid;
    std::vector<Worker *> held{};
    bool abandoned = false, ended = false;
    MemoryRights rights = MemoryRights::current(); // before the wait, then those after it
    Coroutine &thread = Coroutine::acquire();

    State(const Launch &l, void (*body)(const void *), const void *argument, size_t count) :
        launch(l),
        blocks(count),
        grid(make_grid(launch, body, argument)) {}

    /// Runs the first blocks up to their wait.
    void begin() {
        const auto hold = one_grid();
        // The thread sanitizer needs an OS thread per block.
        const size_t most = sanitizer::tsan() ? 1 : blocks;
        uint64_t block = 0;
        while (held.size() < most && take_block(grid, block)) {
            Worker &w = take_worker_for(grid);
            held.push_back(&w);
            begin_block(w, block);
            run_threads(w);
        }
    }
    void resume() {
        const auto hold = one_grid();
        for (Worker *w : held) {
            w->aborted = w->aborted || abandoned;
            w->at_dependency = 0;
            for (unsigned i = w->count; i > 0; --i)
                if (Thread &thread = w->threads[i - 1]; thread.state == cuemu::State::at_dependency) wake(*w, thread);
            run_threads(*w);
            end_block(*w);
            return_worker(*w);
        }
        t_worker = nullptr;
        if (!abandoned) run_blocks(grid);
    }
    void end() {
        thread.resume();
        thread.release();
        ended = true;
    }
    void run() {
        rights.apply();
        grid.holds = true;
        begin();
        grid.holds = false;
        thread.pause();
        rights.apply();
        if (sanitizer::tsan()) sanitizer::acquire(&grid.sync_points->dependency); // for blocks that have not begun
        resume();
    }
};

EarlyGrid::EarlyGrid(const Launch &launch, void (*body)(const void *), const void *argument, size_t blocks) :
    state_(new State(launch, body, argument, blocks)) {
    state_->thread.call([](void *state) { static_cast<State *>(state)->run(); }, state_);
}
EarlyGrid::~EarlyGrid() {
    bool triggered = false;
    if (!state_->ended) {
        state_->abandoned = true;
        state_->end();
        end_grid(state_->grid, triggered);
    }
    delete state_;
}
bool EarlyGrid::finish(bool &triggered) {
    if (sanitizer::tsan()) sanitizer::release(&state_->grid.sync_points->dependency);
    state_->rights = MemoryRights::current();
    state_->end();
    return end_grid(state_->grid, triggered);
}

void trap(const char *why) {
    fail(*t_worker, "%s", why);
    abandon(*t_worker);
}

void *dynamic_shared() { return t_worker->dynamic; }

void fence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (t_worker->sync_points) t_worker->grid->sync_points->fences.fence(t_worker->current->number);
}

void note_atomic(const void *address) {
    if (t_worker->sync_points) t_worker->grid->sync_points->fences.atomic(t_worker->current->number, address);
}

void note_store(const void *address, size_t bytes) {
    if (options().stores == nullptr || t_worker == nullptr) return;
    options().stores->push_back({t_worker->grid->launch.name, blockIdx.x, t_worker->current->number,
                                 reinterpret_cast<uintptr_t>(address), unsigned(bytes)});
}

void wait_for_previous() {
    Worker &w = *t_worker;
    Thread &self = *w.current;
    if (w.grid->holds && !self.waited) {
        self.state = State::at_dependency;
        ++w.at_dependency;
        wait(w, self);
    }
    self.waited = true;
    if (w.sync_points) sanitizer::acquire(&w.grid->sync_points->dependency);
}

void trigger_successor() { t_worker->grid->triggered.store(true, std::memory_order_relaxed); }

} // namespace cuemu
