// SPDX-License-Identifier: Apache-2.0
// Inside the fake runtime: what fake_cudart.cc, fake_streams.cc, fake_memory.cc and fake_graphs.cc share. Everything is
// under one lock, which is let go only while the work of a stream runs.
//
// For the thread sanitizer the work of a stream is a logical thread. It follows what the host did before the call that
// put it there, what its stream did before, and the events it waits for; the host follows it only after a call that
// waits.
#pragma once
#include "fakert.h"
#include "quiet_mutex.h"
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fakert {

/// One run of a task.
struct Run {
    std::unique_ptr<cuemu::EarlyGrid> early{}; // of a kernel that has begun before its turn
    bool triggered = false;                    // the kernel let the next one begin
};
struct Task { // queues and graphs share it, under the lock
    std::string label;
    bool early; // a kernel that may begin before the work before it has ended
    int holders = 0;
    explicit Task(std::string what, bool is_early = false) : label(std::move(what)), early(is_early) {}
    virtual ~Task() = default;
    virtual void begin(Run &) {} // of an early one
    virtual cudaError_t run(Run &run) = 0;
};
template <class F> struct TaskOf final : Task {
    F work;
    TaskOf(std::string what, F &&f) : Task(std::move(what)), work(std::move(f)) {}
    cudaError_t run(Run &) override { return work(); }
};
class Share {
public:
    Share() = default;
    explicit Share(Task *task) : task_(task) { ++task_->holders; }
    Share(const Share &other) : task_(other.task_) {
        if (task_) ++task_->holders;
    }
    Share(Share &&other) noexcept : task_(std::exchange(other.task_, nullptr)) {}
    Share &operator=(Share other) noexcept {
        std::swap(task_, other.task_);
        return *this;
    }
    ~Share() {
        if (task_ && !--task_->holders) delete task_;
    }
    Task *operator->() const { return task_; }

private:
    Task *task_ = nullptr;
};
template <class F> Share make_task(std::string label, F work) {
    return Share(new TaskOf<F>(std::move(label), std::move(work)));
}

struct Dependency {
    FakeStream *stream;
    uint64_t upto; // that many of its works are done
};
struct Work {
    Share task;
    std::vector<Dependency> after;
    std::thread::id thread; // of the host, that put it there
    uint64_t *called;       // place of the host's order before the call; NULL where there is no thread sanitizer
    Run run{};
};

/// A stream that joined a capture, and how much of it is recorded.
struct Branch {
    FakeStream *stream;
    uint64_t length;
};
struct NodeDependency {
    unsigned branch;
    uint64_t upto;
};
struct Node {
    Share task;
    unsigned branch;
    std::vector<NodeDependency> after;
};
struct Capture {
    uint64_t id;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    bool valid;
    std::vector<Branch> branches; // the first one is where it began
    std::vector<Node> nodes;
};

struct Block {
    size_t bytes, mapped;
    int device;
    bool alive;      // between its allocation and its release in stream order
    int context = 0; // as FakeStream's
};

} // namespace fakert

struct FakeStream {
    int device = 0;
    int context = 0;    // 0: the primary one of its device; others have numbers from 1 on
    bool green = false; // of a green context, which works in the primary one
    bool blocking = true;
    bool handle = true; // the program has it
    bool busy = false, quit = false;
    uint64_t queued = 0, done = 0;
    std::deque<fakert::Work> queue{};
    struct Trigger {
        std::string kernel{};
        std::thread::id thread{};
    } trigger{};        // by the kernel that ran last; "": none
    uint64_t place = 0; // where the thread sanitizer books its order
    std::thread worker{};
    fakert::Capture *capture = nullptr;
    unsigned branch = 0; // in that capture
};
struct FakeEvent {
    bool timing;
    int device, context;          // where it was made
    FakeStream *stream = nullptr; // NULL: never recorded
    uint64_t at = 0;
    double milliseconds = 0;
    uint64_t capture = 0; // recorded last in that capture, at `at` of `branch`
    unsigned branch = 0;
};
struct FakeGraph {
    std::vector<fakert::Node> nodes;
    std::vector<fakert::Branch> branches;
};
struct FakeGraphExec {
    FakeGraph graph;         // its branches are streams of its own, but for the first: that is the stream of the launch
    fakert::Dependency last; // two launches of one never overlap
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
extern cudaError_t g_sticky; // what broke the device
extern long g_kernels_run;
extern thread_local int t_device;
extern thread_local int t_context; // that is current, as FakeStream's
extern thread_local bool t_bound;  // else none is current, and a call that needs one makes that of the device current
void need_context();
extern thread_local bool t_in_host_function;

/// The order of the host for the thread sanitizer, told in spite of the quiet under the lock.
void host_follows(uint64_t *place);
void host_precedes(uint64_t *place);

/// Every call that can fail: faults as configured, then a broken device, then the call itself under the lock.
cudaError_t begin_call(const char *function);
cudaError_t end_call(cudaError_t error);
template <class F> cudaError_t call(const char *function, F &&body) {
    const Lock lock;
    cudaError_t error = begin_call(function);
    if (!error) error = body();
    return end_call(error);
}
/// A call that gives something back. On a broken device it does so too, and says that the device is broken.
template <class F> cudaError_t give_back(const char *function, F &&body) {
    const Lock lock;
    cudaError_t error = begin_call(function);
    if (!error || error == g_sticky)
        if (const cudaError_t own = body(); !error) error = own;
    return end_call(error);
}

// Streams. All of these under the lock.
FakeStream *null_stream(int device);
FakeStream *new_stream(int device, bool blocking, bool handle);
void destroy_stream(FakeStream *stream); // when its work is done
/// All work of a device, and the host follows.
cudaError_t wait_for_device(int device);
/// The stream behind a handle, for work: 400 if there is none, else what captures say about it.
cudaError_t find_stream(cudaStream_t handle, FakeStream *&stream);
bool is_stream(const FakeStream *stream); // one that the program has
/// Into the queue, or into the capture.
cudaError_t put(FakeStream *stream, Share task, std::vector<Dependency> after = {});
cudaError_t run_until(FakeStream *stream, uint64_t upto);
/// As run_until(), and the host follows.
cudaError_t wait_for(FakeStream *stream, uint64_t upto);
/// The state of a stream or event as a query sees it; polling makes progress.
cudaError_t query(FakeStream *stream, uint64_t upto);
/// Mode::random: some of what is queued.
void run_some();
long live_streams(); // and events
void reset_streams();

// Memory. Under the lock but for copy_bytes().
const Block *find_device(const void *p);
/// While work of a device runs, its memory can be reached. It stays so until close_idle(), at the end of every call, or
/// until work of another device begins: the pages are switched once for all that a call runs.
void expose(int device, bool on);
/// Takes that back while one work alone runs on the device; false where another one does, or nothing is protected.
bool hide(int device);
void show(int device);
void close_idle();
void copy_bytes(void *to, const void *from, size_t bytes);
long live_memory();
void reset_memory();

// Captures. Under the lock.
/// A call that may wait or allocate: refused, and the capture spoilt, if this thread captures (or any, in global mode).
/// `relaxed_too`: also where the capture is relaxed, for what waits.
cudaError_t refuse_in_capture(bool relaxed_too);
/// Refuses a call that waits for a whole device, and invalidates every capture there, whatever its mode and thread.
cudaError_t refuse_captures_on(int device);
/// Use of the null stream of a device while a stream captures that it would wait for.
cudaError_t refuse_null_stream(int device);
/// Something with a capturing stream that cannot be recorded.
cudaError_t refuse(Capture &capture, cudaError_t why = cudaErrorStreamCaptureUnsupported);
cudaError_t record(FakeStream *stream, Share task, std::vector<NodeDependency> after = {});
cudaError_t record_event(FakeEvent *event, FakeStream *stream);
cudaError_t wait_event(FakeStream *stream, const FakeEvent *event);
/// For events that are asked about: 907 if recorded in a capture.
cudaError_t refuse_captured(const FakeEvent *event);
void drop_captures_of(const FakeStream *stream);
long live_graphs();
void reset_graphs();

} // namespace fakert
