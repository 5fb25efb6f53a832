// SPDX-License-Identifier: Apache-2.0
// Barriers of a block and collectives of a warp. Compiled without sanitizers; see sanitizer.h.
#include "scheduler.h"

namespace cuemu {
namespace {

/// Fails if an early thread reaches a barrier or collective before it has waited for the preceding kernel: until then,
/// all blocks that were launched early share one `__shared__` memory.
void require_wait(Worker &w, const Thread &self, const char *what) {
    if (!w.grid->launch.early || self.waited) return;
    fail(w, "%s before the kernel, which was launched early, has waited for the preceding kernel", what);
    abandon(w);
}

void finish_barrier(Worker &w, Thread &self) {
    w.votes[w.round & 1] = w.yes;
    for (unsigned i = 0; i < w.count; ++i)
        if (Thread &thread = w.threads[i]; &thread != &self) wake(w, thread);
    w.yes = 0;
    w.at_barrier = 0;
    ++w.round;
    if (w.sync_points) w.grid->sync_points->fences.barrier();
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

/// Returns the lane that a shuffle reads: the calling lane if the source would be outside its group.
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

} // namespace

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
        // The value of a lane that does not participate is undefined: NaN, as float and as double.
        thread.out = need >> source & 1u ? lanes[source].in : 0x7fffdead7fffdeadull;
    }
    warp.waiting &= ~need;
    for (uint32_t m = need; m; m &= m - 1)
        if (Thread &thread = lanes[__builtin_ctz(m)]; &thread != self) wake(w, thread);
    return true;
}

int block_barrier(bool predicate, Vote vote) {
    Worker &w = *t_worker;
    Thread &self = *w.current;
    if (w.done) {
        fail(w, "__syncthreads() after %u threads of the block returned", w.done);
        abandon(w);
    }
    require_wait(w, self, "__syncthreads()");
    const unsigned round = w.round & 1;
    if (w.sync_points) sanitizer::release(&w.sync_points->barrier[round]);
    w.yes += predicate;
    if (++w.at_barrier == w.count) {
        finish_barrier(w, self);
    } else {
        self.state = State::at_barrier;
        wait(w, self);
    }
    if (w.sync_points) sanitizer::acquire(&w.sync_points->barrier[round]);
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
    require_wait(w, self, "a warp collective");
    self.op = op;
    self.mask = mask;
    self.in = in;
    self.argument = argument;
    self.width = width;
    w.warps[number].waiting |= 1u << lane;
    if (op == Op::syncwarp && w.sync_points) sanitizer::release(&w.sync_points->warp[number]);
    if (!complete(w, number, mask, &self)) {
        if (w.aborted) abandon(w);
        self.state = State::at_warp;
        wait(w, self);
    }
    if (op == Op::syncwarp && w.sync_points) sanitizer::acquire(&w.sync_points->warp[number]);
    return self.out;
}

} // namespace cuemu
