// SPDX-License-Identifier: Apache-2.0
// Capture of streams into graphs, and launches of graphs. A graph is the work of each captured stream, and the waits
// between these streams. A launch enqueues that work in the stream of the launch and in streams of the graph. So a
// replay runs like all other work, in every mode and under every sanitizer.
#include "fake_cudart.h"
#include <algorithm>

namespace fakert {
namespace {

struct KnownCapture {
    Capture *capture;
};
struct KnownGraph {
    FakeGraph *graph;
};
struct KnownExec {
    FakeGraphExec *exec;
};
std::vector<KnownCapture> g_captures; // captures that have begun and not ended
std::vector<KnownGraph> g_graphs;
std::vector<KnownExec> g_execs;
uint64_t g_last_id = 0;
// Determines which captures the calls of this thread invalidate.
thread_local cudaStreamCaptureMode t_mode = cudaStreamCaptureModeGlobal;

bool is_graph(const FakeGraph *graph) {
    return std::any_of(g_graphs.begin(), g_graphs.end(), [&](const KnownGraph &known) { return known.graph == graph; });
}
bool is_exec(const FakeGraphExec *exec) {
    return std::any_of(g_execs.begin(), g_execs.end(), [&](const KnownExec &known) { return known.exec == exec; });
}

Capture *find_capture(uint64_t id) {
    for (const auto &[capture] : g_captures)
        if (capture->id == id) return capture;
    return nullptr;
}

void join(Capture &capture, FakeStream *stream) {
    stream->capture = &capture;
    stream->branch = unsigned(capture.branches.size());
    capture.branches.push_back({stream, 0});
}

void end(Capture *capture) {
    for (const Branch &branch : capture->branches) branch.stream->capture = nullptr;
    g_captures.erase(std::find_if(g_captures.begin(), g_captures.end(),
                                  [&](const KnownCapture &known) { return known.capture == capture; }));
    delete capture;
}

/// Returns true if everything recorded comes before the end of the stream where the capture began.
bool joined(const Capture &capture) {
    std::vector<Branch> reached(capture.branches), position(capture.branches);
    for (size_t i = 1; i < reached.size(); ++i) reached[i].length = 0;
    for (auto node = capture.nodes.rbegin(); node != capture.nodes.rend(); ++node) {
        if (position[node->branch].length-- > reached[node->branch].length) continue;
        for (const NodeDependency &dependency : node->after)
            reached[dependency.branch].length = std::max(reached[dependency.branch].length, dependency.upto);
    }
    for (size_t i = 0; i < reached.size(); ++i)
        if (reached[i].length != capture.branches[i].length) return false;
    return true;
}

cudaError_t begin_capture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    FakeStream *stream = nullptr;
    if (!handle || handle == cudaStreamLegacy) return cudaErrorStreamCaptureUnsupported;
    if (find_stream(handle, stream) == cudaErrorInvalidResourceHandle) return cudaErrorInvalidResourceHandle;
    if (stream->capture) return cudaErrorIllegalState;
    g_captures.push_back({new Capture{++g_last_id, mode, std::this_thread::get_id(), true, {}, {}}});
    join(*g_captures.back().capture, stream);
    return cudaSuccess;
}

cudaError_t end_capture(cudaStream_t handle, cudaGraph_t *graph) {
    FakeStream *stream = nullptr;
    if (!graph) return cudaErrorInvalidValue;
    *graph = nullptr;
    if (!handle || handle == cudaStreamLegacy) return cudaErrorStreamCaptureUnsupported;
    if (find_stream(handle, stream) == cudaErrorInvalidResourceHandle) return cudaErrorInvalidResourceHandle;
    Capture *const capture = stream->capture;
    if (!capture) return cudaErrorIllegalState;
    if (stream->branch != 0) return refuse(*capture, cudaErrorStreamCaptureUnmatched);
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
        return cudaErrorStreamCaptureWrongThread;
    cudaError_t error = cudaSuccess;
    if (!capture->valid)
        error = cudaErrorStreamCaptureInvalidated;
    else if (!joined(*capture))
        error = cudaErrorStreamCaptureUnjoined;
    else
        g_graphs.push_back({ *graph = new FakeGraph{std::move(capture->nodes), capture->branches}});
    end(capture);
    return error;
}

cudaError_t launch_graph(FakeGraphExec &exec, FakeStream *stream) {
    if (stream->device != exec.graph.branches[0].stream->device) return cudaErrorInvalidValue;
    // Every branch begins after the earlier work of the stream, and after the previous launch of this graph.
    std::vector<Dependency> before;
    if (exec.last.stream) before.push_back(exec.last);
    if (const cudaError_t error = enqueue(stream, make_task("graph", [] { return cudaSuccess; }), before)) return error;
    std::vector<Branch> branches(exec.graph.branches);
    branches[0].stream = stream;
    for (Branch &branch : branches) branch.length = branch.stream->queued;
    for (const Node &node : exec.graph.nodes) {
        std::vector<Dependency> after;
        for (const NodeDependency &dependency : node.after) {
            const Branch &branch = branches[dependency.branch];
            after.push_back({branch.stream, branch.length + dependency.upto});
        }
        if (const cudaError_t error = enqueue(branches[node.branch].stream, node.task, std::move(after))) return error;
    }
    exec.last = {stream, stream->queued};
    return cudaSuccess;
}

} // namespace

cudaError_t refuse(Capture &capture, cudaError_t why) {
    capture.valid = false;
    return why;
}

cudaError_t refuse_in_capture(bool relaxed_too) {
    bool refused = false;
    for (const auto &[capture] : g_captures) {
        const bool mine = capture->thread == std::this_thread::get_id();
        const bool relaxed = capture->mode == cudaStreamCaptureModeRelaxed || t_mode == cudaStreamCaptureModeRelaxed;
        const bool global = capture->mode == cudaStreamCaptureModeGlobal && t_mode == cudaStreamCaptureModeGlobal;
        if (!(mine ? relaxed_too || !relaxed : global)) continue;
        capture->valid = false;
        refused = true;
    }
    return refused ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

namespace {
/// Invalidates captures of the device's streams, or only of those that wait for its null stream. Returns false if there
/// are none.
bool invalidate_captures_on(int device, bool blocking_only) {
    bool found = false;
    for (const auto &[capture] : g_captures)
        for (const Branch &branch : capture->branches) {
            if (branch.stream->device != device || (blocking_only && !branch.stream->blocking)) continue;
            capture->valid = false;
            found = true;
        }
    return found;
}
} // namespace

cudaError_t refuse_captures_on(int device) {
    return invalidate_captures_on(device, false) ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t refuse_null_stream(int device) {
    return invalidate_captures_on(device, true) ? cudaErrorStreamCaptureImplicit : cudaSuccess;
}

cudaError_t record(FakeStream *stream, TaskRef task, std::vector<NodeDependency> after) {
    stream->capture->nodes.push_back({std::move(task), stream->branch, std::move(after)});
    ++stream->capture->branches[stream->branch].length;
    return cudaSuccess;
}

cudaError_t record_event(FakeEvent *event, FakeStream *stream) {
    event->capture = stream->capture->id;
    event->branch = stream->branch;
    event->position = stream->capture->branches[stream->branch].length;
    return cudaSuccess;
}

cudaError_t wait_event(FakeStream *stream, const FakeEvent *event) {
    if (!event->capture) // work recorded outside of the capture is not part of the graph
        return event->stream ? refuse(*stream->capture, cudaErrorStreamCaptureIsolation) : cudaSuccess;
    Capture *const capture = find_capture(event->capture);
    if (!capture) return stream->capture ? refuse(*stream->capture, cudaErrorCapturedEvent) : cudaErrorCapturedEvent;
    if (!capture->valid) return cudaErrorStreamCaptureInvalidated;
    if (stream == null_stream(stream->device)) return refuse(*capture);
    if (stream->capture && stream->capture != capture) {
        stream->capture->valid = false;
        return refuse(*capture, cudaErrorStreamCaptureMerge);
    }
    if (!stream->capture)
        join(*capture, stream);
    else if (stream->branch == event->branch)
        return cudaSuccess;
    return record(stream, make_task("wait", [] { return cudaSuccess; }), {{event->branch, event->position}});
}

cudaError_t refuse_captured(const FakeEvent *event) {
    if (!event->capture) return refuse_in_capture(false);
    if (Capture *const capture = find_capture(event->capture)) capture->valid = false;
    return cudaErrorCapturedEvent;
}

void drop_captures_of(const FakeStream *stream) {
    Capture *const capture = stream->capture;
    if (!capture) return;
    capture->valid = false;
    if (capture->branches[0].stream == stream) end(capture); // no call can end it any more
}

long live_graphs() { return long(g_graphs.size() + g_execs.size()); }

void reset_graphs() {
    while (!g_captures.empty()) end(g_captures.back().capture);
    for (const auto &[graph] : g_graphs) delete graph;
    for (const auto &[exec] : g_execs) delete exec;
    g_graphs.clear();
    g_execs.clear();
}

std::vector<std::string> nodes(cudaGraph_t graph) {
    const Lock lock;
    std::vector<std::string> labels;
    if (is_graph(graph))
        for (const Node &node : graph->nodes) labels.push_back(node.task->label);
    return labels;
}

} // namespace fakert

using namespace fakert;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    return call("cudaStreamBeginCapture", [&] { return begin_capture(handle, mode); });
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    return call("cudaStreamEndCapture", [&] { return end_capture(handle, graph); });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
    return call("cudaStreamIsCapturing", [&] {
        if (!status) return cudaErrorInvalidValue;
        *status = cudaStreamCaptureStatusNone;
        FakeStream *stream = nullptr;
        // The only use of the null stream that does not invalidate captures.
        if (!handle || handle == cudaStreamLegacy) {
            for (const auto &[capture] : g_captures)
                for (const Branch &branch : capture->branches)
                    if (branch.stream->blocking && branch.stream->device == t_device)
                        return cudaErrorStreamCaptureImplicit;
            return cudaSuccess;
        }
        if (find_stream(handle, stream) == cudaErrorInvalidResourceHandle) return cudaErrorInvalidResourceHandle;
        if (stream->capture)
            *status = stream->capture->valid ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
        return cudaSuccess;
    });
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    return call("cudaThreadExchangeStreamCaptureMode", [&] {
        if (!mode || unsigned(*mode) > cudaStreamCaptureModeRelaxed) return cudaErrorInvalidValue;
        std::swap(*mode, t_mode);
        return cudaSuccess;
    });
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    return call("cudaGraphInstantiate", [&] {
        if (!exec || flags || !is_graph(graph)) return cudaErrorInvalidValue;
        *exec = new FakeGraphExec{*graph, {}};
        for (size_t i = 1; i < graph->branches.size(); ++i)
            (*exec)->graph.branches[i].stream = new_stream(graph->branches[i].stream->device, false, false);
        g_execs.push_back({*exec});
        return cudaSuccess;
    });
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
    return call("cudaGraphLaunch", [&] {
        FakeStream *stream = nullptr;
        if (!is_exec(exec)) return cudaErrorInvalidValue;
        if (const cudaError_t error = find_stream(handle, stream)) return error;
        // CUDA would record a node; the fake runtime does not support that.
        if (stream->capture) return refuse(*stream->capture);
        ++g_counters.graph_launches;
        return launch_graph(*exec, stream);
    });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    return call_release("cudaGraphExecDestroy", [&] {
        if (!is_exec(exec)) return cudaErrorInvalidValue;
        for (size_t i = 1; i < exec->graph.branches.size(); ++i) destroy_stream(exec->graph.branches[i].stream);
        g_execs.erase(
            std::find_if(g_execs.begin(), g_execs.end(), [&](const KnownExec &known) { return known.exec == exec; }));
        delete exec;
        return cudaSuccess;
    });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    return call_release("cudaGraphDestroy", [&] {
        if (!is_graph(graph)) return cudaErrorInvalidValue;
        g_graphs.erase(std::find_if(g_graphs.begin(), g_graphs.end(),
                                    [&](const KnownGraph &known) { return known.graph == graph; }));
        delete graph;
        return cudaSuccess;
    });
}

} // extern "C"
