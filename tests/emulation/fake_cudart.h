// SPDX-License-Identifier: Apache-2.0
// Internals of the fake runtime, shared by fake_cudart.cc, fake_streams.cc, fake_memory.cc and fake_graphs.cc. One lock
// protects everything; it is released only while the work of a stream runs.
//
// For the thread sanitizer, the work of a stream is a logical thread. It happens after what the host did before the
// call that enqueued the work, after earlier work of its stream, and after the events it waits for. The host happens
// after the work only after a call that waits.
#pragma once
#include "fakert.h"
#include "memory_rights.h"
#include "quiet_mutex.h"
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fakert {

/// State of one execution of a task.
struct Run {
    std::unique_ptr<cuemu::EarlyGrid> early{}; // of a kernel that has begun early
    bool first = false;                        // first launch of this kernel
    int key = -1;                              // of the device's memory
    bool triggered = false;                    // the kernel allowed the next one to begin
};
struct Task { // reference-counted by queues and graphs, under the lock
    std::string label;
    bool early; // a kernel that may begin before the preceding kernel has ended
    int holders = 0;
    explicit Task(std::string what, bool is_early = false) : label(std::move(what)), early(is_early) {}
    virtual ~Task() = default;
    // Called under the lock: before begin() or run(), before run(), and after run(). The work of a stream takes the
    // lock no more often than it must, because many threads compete for it.
    virtual void prepare(Run &) {}
    virtual cudaError_t check() { return cudaSuccess; }
    virtual void finish(Run &) {}
    // Called without the lock:
    virtual void begin(Run &) {} // starts a kernel that was launched early
    virtual cudaError_t run(Run &run) = 0;
};
template <class F> struct TaskOf final : Task {
    F work;
    TaskOf(std::string what, F &&f) : Task(std::move(what)), work(std::move(f)) {}
    cudaError_t run(Run &) override { return work(); }
};
class TaskRef {
public:
    TaskRef() = default;
    explicit TaskRef(Task *task) : task_(task) { ++task_->holders; }
    TaskRef(const TaskRef &other) : task_(other.task_) {
        if (task_) ++task_->holders;
    }
    TaskRef(TaskRef &&other) noexcept : task_(std::exchange(other.task_, nullptr)) {}
    TaskRef &operator=(TaskRef other) noexcept {
        std::swap(task_, other.task_);
        return *this;
    }
    ~TaskRef() {
        if (task_ && !--task_->holders) delete task_;
    }
    Task *operator->() const { return task_; }

private:
    Task *task_ = nullptr;
};
template <class F> TaskRef make_task(std::string label, F work) {
    return TaskRef(new TaskOf<F>(std::move(label), std::move(work)));
}

struct Dependency {
    FakeStream *stream;
    uint64_t upto; // the stream must have completed this many pieces of work
};
struct Work {
    TaskRef task;
    std::vector<Dependency> after;
    std::thread::id thread; // host thread that enqueued the work
    uint64_t *called;       // address that orders the host before the call; NULL without the thread sanitizer
    Run run{};
    bool prepared = false;
};

/// A stream that joined a capture, and the number of its recorded nodes.
struct Branch {
    FakeStream *stream;
    uint64_t length;
};
struct NodeDependency {
    unsigned branch;
    uint64_t upto;
};
struct Node {
    TaskRef task;
    unsigned branch;
    std::vector<NodeDependency> after;
};
struct Capture {
    uint64_t id;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    bool valid;
    std::vector<Branch> branches; // the first one is the stream where the capture began
    std::vector<Node> nodes;
};

struct Block {
    size_t bytes, mapped;
    int device;
    bool alive;      // between allocation and release in stream order
    int context = 0; // same values as FakeStream::context
};

} // namespace fakert

struct FakeStream {
    int device = 0;
    int context = 0;    // 0: the primary context of its device; other contexts are numbered from 1
    bool green = false; // of a green context; used with the primary context current
    bool blocking = true;
    bool handle = true; // the program holds the handle
    bool busy = false, quit = false;
    uint64_t queued = 0, done = 0;
    std::deque<fakert::Work> queue{};
    struct Trigger {
        std::string kernel{};
        std::thread::id thread{};
    } trigger{};             // of the kernel that ran last; "": none
    uint64_t sync_point = 0; // address that represents the stream's order for the thread sanitizer
    std::thread worker{};
    fakert::Capture *capture = nullptr;
    unsigned branch = 0; // of that capture
};
struct FakeEvent {
    bool timing;
    int device, context;          // where the event was created
    FakeStream *stream = nullptr; // NULL: never recorded
    uint64_t position = 0;        // in the stream's queue, or among the nodes of `branch`
    double milliseconds = 0;
    uint64_t capture = 0; // the capture in which it was recorded last; 0: none
    unsigned branch = 0;
};
struct FakeGraph {
    std::vector<fakert::Node> nodes;
    std::vector<fakert::Branch> branches;
};
struct FakeGraphExec {
    // Branches are streams of the graph, except the first, which is replaced by the stream of the launch.
    FakeGraph graph;
    fakert::Dependency last; // two launches of one graph never overlap
};

namespace fakert {

extern QuietMutex g_mutex;
extern thread_local int t_locks;
struct Lock {
    Lock() {
        ++t_locks;
        g_mutex.lock();
    }
    ~Lock() {
        g_mutex.unlock();
        --t_locks;
    }
    Lock(const Lock &) = delete;
    Lock &operator=(const Lock &) = delete;
};

extern Config g_config;
extern Counters g_counters;
extern cudaError_t g_sticky; // the error that made the device unusable
extern long g_kernels_run;
extern thread_local int t_device;
extern thread_local int t_context; // the current context, as in FakeStream::context
// False: no context is current, and a call that needs one makes the primary context of the device current.
extern thread_local bool t_bound;
void need_context();
extern thread_local bool t_in_host_function;
uint64_t from_environment(const char *name, uint64_t otherwise);

/// Acquire and release for the host under the thread sanitizer, which otherwise ignores synchronization under the lock.
void host_follows(uint64_t *sync_point);
void host_precedes(uint64_t *sync_point);

/// Begin and end of every call that can fail. An error is the configured fault, the error of a device that has failed,
/// or that of the call itself.
cudaError_t begin_call(const char *function);
cudaError_t end_call(cudaError_t error);
template <class F> cudaError_t call(const char *function, F &&body) {
    const Lock lock;
    cudaError_t error = begin_call(function);
    if (!error) error = body();
    return end_call(error);
}
/// Runs a call that releases an object. After a failure of the device it still releases, and returns the device's
/// error.
template <class F> cudaError_t call_release(const char *function, F &&body) {
    const Lock lock;
    cudaError_t error = begin_call(function);
    if (!error || error == g_sticky)
        if (const cudaError_t released = body(); !error) error = released;
    return end_call(error);
}

// Streams. All of these are called under the lock.
FakeStream *null_stream(int device);
FakeStream *new_stream(int device, bool blocking, bool handle);
void destroy_stream(FakeStream *stream); // after its work
/// Waits for all work of a device; for the thread sanitizer the host then happens after that work.
cudaError_t wait_for_device(int device);
/// Finds the stream of a handle, for work. Returns cudaErrorInvalidResourceHandle if there is none, and an error if
/// a capture forbids work on the stream.
cudaError_t find_stream(cudaStream_t handle, FakeStream *&stream);
bool is_stream(const FakeStream *stream); // true if the program holds its handle
/// Appends to the queue, or to the capture.
cudaError_t enqueue(FakeStream *stream, TaskRef task, std::vector<Dependency> after = {});
cudaError_t run_until(FakeStream *stream, uint64_t upto);
/// Same as run_until(); for the thread sanitizer the host then happens after the work.
cudaError_t wait_for(FakeStream *stream, uint64_t upto);
/// Returns the state of a stream or event as a query reports it; polling makes progress.
cudaError_t query(FakeStream *stream, uint64_t upto);
/// Mode::random: runs some of the queued work.
void run_some();
long live_streams(); // includes events
void reset_streams();

// Memory. Called under the lock, except copy_bytes().
const Block *find_device(const void *p);
/// Makes the memory of a device accessible to this thread while it runs work of the device, and returns its previous
/// rights. Without protection keys, the memory becomes accessible to all threads, and stays so until close_idle(), at
/// the end of every call, or until work of another device begins. So page protection changes only once for all work
/// that a call runs.
cuemu::MemoryRights expose(int device);
void end_exposure(int device, const cuemu::MemoryRights &before);
/// Returns the protection key of a device's memory; -1: none.
int memory_key(int device);
/// Without protection keys: makes the memory inaccessible again if only one piece of work runs on the device. Returns
/// false if there is other work, or if memory is not protected.
bool hide(int device);
void show(int device);
void close_idle();
void copy_bytes(void *to, const void *from, size_t bytes);
long live_memory();
void reset_memory();

// Captures. Called under the lock.
/// Refuses a call that may wait or allocate if this thread captures, or any thread in global mode, and invalidates that
/// capture. `relaxed_too`: also for a capture in relaxed mode, which forbids only calls that wait.
cudaError_t refuse_in_capture(bool relaxed_too);
/// Refuses a call that waits for a whole device, and invalidates every capture there, whatever its mode and thread.
cudaError_t refuse_captures_on(int device);
/// Refuses the use of a device's null stream during a capture of a stream that the null stream would wait for.
cudaError_t refuse_null_stream(int device);
/// Refuses an operation on a capturing stream that cannot be recorded.
cudaError_t refuse(Capture &capture, cudaError_t why = cudaErrorStreamCaptureUnsupported);
cudaError_t record(FakeStream *stream, TaskRef task, std::vector<NodeDependency> after = {});
cudaError_t record_event(FakeEvent *event, FakeStream *stream);
cudaError_t wait_event(FakeStream *stream, const FakeEvent *event);
/// Refuses queries of an event that was recorded in a capture, with cudaErrorCapturedEvent.
cudaError_t refuse_captured(const FakeEvent *event);
void drop_captures_of(const FakeStream *stream);
long live_graphs();
void reset_graphs();

} // namespace fakert
