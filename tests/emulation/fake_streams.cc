// SPDX-License-Identifier: Apache-2.0
// Streams and events of the fake runtime: queues of work, and when the work runs.
#include "fake_cudart.h"
#include "fiber.h"
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <unordered_map>

namespace fakert {
namespace {

struct Known {
    FakeStream *stream;
};
std::vector<Known> g_null;    // null streams by device
std::vector<Known> g_streams; // other streams
std::vector<Known> g_retired; // destroyed streams: events and queues may still point to them
/// True for events that are alive. Destroyed events are kept, because queued work still writes to them.
std::unordered_map<FakeEvent *, bool> g_events;
uint64_t g_random = 1;

/// Threads of streams' work for the thread sanitizer: logical threads whose parent was created before main(), so that
/// no host work happens before theirs. The last ended ones are kept, see g_ended in cuda_emu.cc.
class DeviceThreads {
public:
    DeviceThreads() : root_(sanitizer::tsan() ? __tsan_create_fiber(0) : nullptr) {}
    void *create() const {
        void *const host = __tsan_get_current_fiber();
        __tsan_switch_to_fiber(root_, sanitizer::kNoOrder);
        void *const thread = __tsan_create_fiber(0);
        __tsan_switch_to_fiber(host, sanitizer::kNoOrder);
        return thread;
    }
    void end(void *thread) {
        ended_.push_back({thread});
        if (ended_.size() <= 256) return;
        __tsan_destroy_fiber(ended_.front().thread);
        ended_.pop_front();
    }

private:
    struct Ended {
        void *thread;
    };
    void *root_;
    std::deque<Ended> ended_{};
} g_threads;

/// A call on a separate logical thread and stack. On the host's stack the sanitizer would report races with earlier
/// accesses of the host.
struct Job {
    void (*body)(const void *);
    const void *data;
    cuemu::Fiber *fiber = nullptr;
    cuemu::Fiber host{};
};
thread_local Job *t_job = nullptr;

void job_main() {
    Job &job = *t_job;
    job.body(job.data);
    for (;;) cuemu::switch_fiber(*job.fiber, job.host);
}

/// Releases the lock during its lifetime.
struct Unlocked {
    Unlocked() { g_mutex.unlock(); }
    ~Unlocked() { g_mutex.lock(); }
    Unlocked(const Unlocked &) = delete;
    Unlocked &operator=(const Unlocked &) = delete;
};

/// Calls body() without the lock.
template <class Body> void run_job(const Body &body) {
    Job job{[](const void *data) { (*static_cast<const Body *>(data))(); }, &body};
    if (!sanitizer::tsan()) {
        const Unlocked unlocked;
        body();
        return;
    }
    job.fiber = cuemu::new_fiber(size_t(512) << 10);
    cuemu::prepare(*job.fiber, job_main, g_threads.create());
    job.host.tsan = __tsan_get_current_fiber();
    {
        const Unlocked unlocked;
        Job *const outer = std::exchange(t_job, &job);
        cuemu::switch_fiber(job.host, *job.fiber);
        t_job = outer;
    }
    g_threads.end(job.fiber->tsan);
    cuemu::delete_fiber(job.fiber);
}
/// Calls both without the lock, as two jobs.
template <class First, class Second> void run_jobs(const First &first, const Second &second) {
    if (sanitizer::tsan()) {
        run_job(first);
        run_job(second);
        return;
    }
    const Unlocked unlocked;
    first();
    second();
}

bool threads_mode() { return g_config.mode == Mode::threads; }

uint64_t random_number() {
    g_random ^= g_random << 13;
    g_random ^= g_random >> 7;
    g_random ^= g_random << 17;
    return g_random;
}

/// A kernel may trigger the launch of its successor only if the next work that the same host thread enqueues is a
/// kernel that is launched early, because only such a kernel waits. Events, and work that other threads enqueue, may be
/// between. Not checked if a fault is configured: other work may follow a call that fails.
cudaError_t check_successor(FakeStream &stream, const Work &work) {
    const std::string &label = work.task->label;
    if (stream.trigger.kernel.empty() || work.thread != stream.trigger.thread || label == "event" || label == "wait")
        return cudaSuccess;
    const std::string kernel = std::exchange(stream.trigger.kernel, {});
    if (work.task->early || g_config.fail_call >= 0 || g_config.fail_kernel >= 0) return cudaSuccess;
    std::fprintf(stderr, "fakert: %s triggered the launch of its successor, which does not wait for it: %s\n",
                 kernel.c_str(), label.c_str());
    return cudaErrorLaunchFailure;
}

bool ready(const Work &work) {
    return std::all_of(work.after.begin(), work.after.end(),
                       [](const Dependency &dependency) { return dependency.stream->done >= dependency.upto; });
}
void prepare(Work &work) {
    if (!work.prepared) work.task->prepare(work.run);
    work.prepared = true;
}
/// Returns the next work, if it is a kernel that was launched early and can begin; else NULL.
Work *early_work(FakeStream *stream) {
    if (stream->queue.empty()) return nullptr;
    Work &next = stream->queue.front(); // its address does not change while others are appended
    if (!next.task->early || !ready(next)) return nullptr;
    prepare(next);
    return &next;
}

void run_one(FakeStream *stream) {
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    cudaError_t error = cudaSuccess;
    for (const Dependency &dependency : work.after)
        if (const cudaError_t failed = run_until(dependency.stream, dependency.upto)) error = failed;
    if (!error) error = check_successor(*stream, work);
    if (g_sticky) error = g_sticky;
    Work *const next = error ? nullptr : early_work(stream);
    if (!error) error = work.task->check();
    prepare(work);
    const cuemu::MemoryRights before = expose(stream->device);
    run_jobs(
        [&] {
            if (!next) return;
            sanitizer::acquire(next->called);
            sanitizer::acquire(&stream->sync_point);
            next->task->begin(next->run);
        },
        [&] {
            sanitizer::acquire(work.called);
            sanitizer::acquire(&stream->sync_point);
            for (const Dependency &dependency : work.after) sanitizer::acquire(&dependency.stream->sync_point);
            if (!error) error = work.task->run(work.run);
            sanitizer::release(&stream->sync_point);
        });
    work.task->finish(work.run);
    if (work.run.triggered) stream->trigger = {work.task->label, work.thread};
    end_exposure(stream->device, before);
    delete work.called;
    work = {};
    ++stream->done;
    if (error && !g_sticky) g_sticky = error;
}

/// Runs the next work of the stream while `more()`; other threads that need work of the stream wait meanwhile.
template <class More> void run_while(FakeStream *stream, const More &more) {
    stream->busy = true;
    while (more()) {
        run_one(stream);
        g_mutex.notify();
    }
    stream->busy = false;
    g_mutex.notify(); // another thread may wait for the stream to be free
}

void work_loop(FakeStream *stream) {
    const Lock lock;
    while (!stream->quit || !stream->queue.empty()) {
        run_while(stream, [&] { return !stream->queue.empty(); });
        g_mutex.wait([&] { return stream->quit || !stream->queue.empty(); });
    }
}

void stop_worker(FakeStream *stream) {
    if (!stream->worker.joinable()) return;
    stream->quit = true;
    g_mutex.notify();
    g_mutex.unlock();
    stream->worker.join();
    g_mutex.lock();
}

double now() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<Known>::iterator position(const FakeStream *stream) {
    return std::find_if(g_streams.begin(), g_streams.end(), [&](const Known &known) { return known.stream == stream; });
}

bool is_event(const FakeEvent *event) {
    const auto found = g_events.find(const_cast<FakeEvent *>(event));
    return found != g_events.end() && found->second;
}

} // namespace

QuietMutex g_mutex;

void host_follows(uint64_t *sync_point) {
    sanitizer::end_quiet();
    sanitizer::acquire(sync_point);
    sanitizer::begin_quiet();
}
void host_precedes(uint64_t *sync_point) {
    sanitizer::end_quiet();
    sanitizer::release(sync_point);
    sanitizer::begin_quiet();
}

FakeStream *null_stream(int device) {
    while (int(g_null.size()) <= device) {
        g_null.push_back({new FakeStream});
        g_null.back().stream->device = int(g_null.size()) - 1;
    }
    return g_null[size_t(device)].stream;
}

FakeStream *new_stream(int device, bool blocking, bool handle) {
    FakeStream *const stream = new FakeStream;
    stream->device = device;
    stream->blocking = blocking;
    stream->handle = handle;
    g_streams.push_back({stream});
    return stream;
}

void destroy_stream(FakeStream *stream) {
    run_until(stream, stream->queued); // on a device, the work finishes later; no program can observe the difference
    stop_worker(stream);
    g_streams.erase(position(stream));
    g_retired.push_back({stream});
}

cudaError_t find_stream(cudaStream_t handle, FakeStream *&stream) {
    if (!handle || handle == cudaStreamLegacy) {
        if (t_context != 0) return cudaErrorInvalidResourceHandle;
        stream = null_stream(t_device);
        return refuse_null_stream(t_device);
    }
    if (position(handle) == g_streams.end() || !handle->handle) return cudaErrorInvalidResourceHandle;
    if (handle->context != t_context) return cudaErrorInvalidResourceHandle;
    stream = handle;
    return stream->capture && !stream->capture->valid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

cudaError_t enqueue(FakeStream *stream, TaskRef task, std::vector<Dependency> after) {
    if (stream->capture) return record(stream, std::move(task));
    if (stream->blocking) { // the null stream and the blocking streams of its device wait for each other
        FakeStream *const null = null_stream(stream->device);
        if (stream != null && null->queued) after.push_back({null, null->queued});
        if (stream == null)
            for (const auto &[other] : g_streams)
                if (other->blocking && other->device == stream->device && other->queued)
                    after.push_back({other, other->queued});
    }
    uint64_t *const called = sanitizer::tsan() ? new uint64_t(0) : nullptr;
    if (called) host_precedes(called);
    stream->queue.push_back({std::move(task), std::move(after), std::this_thread::get_id(), called});
    ++stream->queued;
    if (g_config.mode == Mode::eager) return run_until(stream, stream->queued);
    if (!threads_mode()) return cudaSuccess;
    if (!stream->worker.joinable()) stream->worker = std::thread(work_loop, stream);
    g_mutex.notify();
    return cudaSuccess;
}

cudaError_t run_until(FakeStream *stream, uint64_t upto) {
    while (stream->done < upto)
        if (stream->busy || threads_mode())
            g_mutex.wait([&] { return stream->done >= upto || (!stream->busy && !threads_mode()); });
        else
            run_while(stream, [&] { return stream->done < upto; });
    return g_sticky;
}

cudaError_t wait_for(FakeStream *stream, uint64_t upto) {
    const cudaError_t error = run_until(stream, upto);
    host_follows(&stream->sync_point);
    return error;
}

cudaError_t wait_for_device(int device) {
    wait_for(null_stream(device), null_stream(device)->queued);
    for (const auto &[stream] : std::vector<Known>(g_streams))
        if (stream->device == device) wait_for(stream, stream->queued);
    return g_sticky;
}

cudaError_t query(FakeStream *stream, uint64_t upto) {
    if (stream->done >= upto) {
        host_follows(&stream->sync_point);
        return cudaSuccess;
    }
    if (!threads_mode() && !stream->busy) { // polling makes progress
        bool once = true;
        run_while(stream, [&] { return std::exchange(once, false); });
    }
    return g_sticky ? g_sticky : cudaErrorNotReady;
}

void run_some() {
    if (g_config.mode != Mode::random) return;
    const size_t all = g_streams.size() + g_null.size();
    if (!all) return;
    const size_t chosen = random_number() % all;
    FakeStream *const stream = (chosen < g_null.size() ? g_null[chosen] : g_streams[chosen - g_null.size()]).stream;
    if (stream->busy) return;
    uint64_t most = random_number() % 3;
    run_while(stream, [&] { return most != 0 && !stream->queue.empty() && most--; });
}

bool is_stream(const FakeStream *stream) { return position(stream) != g_streams.end() && stream->handle; }

long live_streams() {
    long count = 0;
    for (const auto &[stream] : g_streams) count += stream->handle;
    for (const auto &[event, alive] : g_events) count += alive;
    return count;
}

void reset_streams() {
    for (const auto &list : {g_null, g_streams})
        for (const auto &[stream] : list) {
            stop_worker(stream);
            g_retired.push_back({stream});
        }
    for (const auto &[stream] : g_retired) {
        for (const Work &work : stream->queue) delete work.called;
        delete stream;
    }
    for (const auto &[event, alive] : g_events) delete event;
    g_null.clear();
    g_streams.clear();
    g_retired.clear();
    g_events.clear();
    g_random = g_config.seed * 2 + 1;
}

} // namespace fakert

namespace fakert {
namespace {
/// Argument of a host function; it lives as long as a queue or a graph refers to it.
struct Argument {
    void *value;
    cudaHostFn_t drop;
    Argument(void *v, cudaHostFn_t d) : value(v), drop(d) {}
    Argument(Argument &&other) noexcept : value(other.value), drop(std::exchange(other.drop, nullptr)) {}
    Argument &operator=(Argument &&) = delete;
    ~Argument() {
        if (drop) drop(value);
    }
};
} // namespace

cudaError_t launch_host_function(cudaStream_t handle, cudaHostFn_t function, void *argument, cudaHostFn_t drop) {
    Argument owned(argument, drop);
    return call("cudaLaunchHostFunc", [&] {
        FakeStream *stream = nullptr;
        if (!function) return cudaErrorInvalidValue;
        if (const cudaError_t error = find_stream(handle, stream)) return error;
        ++g_counters.host_functions;
        return enqueue(stream, make_task("host function", [function, owned = std::move(owned)] {
                           t_in_host_function = true;
                           function(owned.value);
                           t_in_host_function = false;
                           return cudaSuccess;
                       }));
    });
}
} // namespace fakert

using namespace fakert;

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return call("cudaStreamCreate", [&] {
        if (!stream || flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
        *stream = new_stream(t_device, flags != cudaStreamNonBlocking, true);
        (*stream)->context = t_context;
        return cudaSuccess;
    });
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    return call_release("cudaStreamDestroy", [&] {
        FakeStream *stream = nullptr;
        if (!handle || handle == cudaStreamLegacy) return cudaErrorInvalidResourceHandle;
        if (find_stream(handle, stream) == cudaErrorInvalidResourceHandle) return cudaErrorInvalidResourceHandle;
        drop_captures_of(stream);
        destroy_stream(stream);
        return cudaSuccess;
    });
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    return call("cudaStreamSynchronize", [&] {
        FakeStream *stream = nullptr;
        ++g_counters.host_waits;
        if (const cudaError_t error = find_stream(handle, stream)) return error;
        if (stream->capture) return refuse(*stream->capture);
        if (const cudaError_t error = refuse_in_capture(false)) return error;
        return wait_for(stream, stream->queued);
    });
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
    return call("cudaStreamQuery", [&] {
        FakeStream *stream = nullptr;
        ++g_counters.host_queries;
        if (const cudaError_t error = find_stream(handle, stream)) return error;
        if (stream->capture) return refuse(*stream->capture);
        if (const cudaError_t error = refuse_in_capture(false)) return error;
        return query(stream, stream->queued);
    });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    return call("cudaStreamWaitEvent", [&] {
        FakeStream *stream = nullptr;
        if (flags != cudaEventWaitDefault) return cudaErrorInvalidValue;
        if (!is_event(event)) return cudaErrorInvalidResourceHandle;
        if (const cudaError_t error = find_stream(handle, stream)) return error;
        if (event->capture || stream->capture) return wait_event(stream, event);
        if (!event->stream || event->stream == stream) return cudaSuccess;
        return enqueue(stream, make_task("wait", [] { return cudaSuccess; }), {{event->stream, event->position}});
    });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    return fakert::launch_host_function(stream, function, argument, nullptr);
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return call("cudaEventCreate", [&] {
        if (!event || (flags & ~cudaEventDisableTiming)) return cudaErrorInvalidValue;
        *event = new FakeEvent{!(flags & cudaEventDisableTiming), t_device, t_context};
        g_events[*event] = true;
        return cudaSuccess;
    });
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return call_release("cudaEventDestroy", [&] {
        if (!is_event(event) || event->context != t_context) return cudaErrorInvalidResourceHandle;
        g_events[event] = false;
        return cudaSuccess;
    });
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    return call("cudaEventRecord", [&] {
        FakeStream *stream = nullptr;
        if (!is_event(event)) return cudaErrorInvalidResourceHandle;
        if (const cudaError_t error = find_stream(handle, stream)) return error;
        if (event->device != stream->device || event->context != stream->context) return cudaErrorInvalidResourceHandle;
        if (stream->capture) return record_event(event, stream);
        event->capture = 0;
        event->stream = stream;
        event->position = stream->queued + (event->timing ? 1 : 0);
        if (!event->timing) return cudaSuccess;
        return enqueue(stream, make_task("event", [=] {
                           event->milliseconds = now();
                           return cudaSuccess;
                       }));
    });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return call("cudaEventSynchronize", [&] {
        ++g_counters.host_waits;
        if (!is_event(event)) return cudaErrorInvalidResourceHandle;
        if (const cudaError_t error = refuse_captured(event)) return error;
        return event->stream ? wait_for(event->stream, event->position) : cudaSuccess;
    });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    return call("cudaEventQuery", [&] {
        ++g_counters.host_queries;
        if (!is_event(event)) return cudaErrorInvalidResourceHandle;
        if (const cudaError_t error = refuse_captured(event)) return error;
        return event->stream ? query(event->stream, event->position) : cudaSuccess;
    });
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    return call("cudaEventElapsedTime", [&] {
        for (const FakeEvent *event : {begin, end}) {
            if (!is_event(event) || !event->timing || !event->stream) return cudaErrorInvalidResourceHandle;
            if (event->capture) return cudaErrorCapturedEvent;
            if (event->stream->done < event->position) return cudaErrorNotReady;
        }
        *milliseconds = float(end->milliseconds - begin->milliseconds);
        return cudaSuccess;
    });
}

} // extern "C"
