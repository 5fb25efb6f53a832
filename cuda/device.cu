// SPDX-License-Identifier: Apache-2.0
#include "agree.cuh"
#include "device/backend.h"
#include "lists.cuh"
#include "onebit_step.cuh"
#include "pinned.h"
#include "update.cuh"
#include "upload.cuh"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>

namespace dsopt {
namespace gpu {
namespace {

constexpr size_t kLine = 64;
constexpr size_t rounded(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

__global__ void __launch_bounds__(kThreads)
    map_kernel(const TensorJob *jobs, int32_t *tensor_of_leaf, const int64_t count) {
    for (int64_t i = blockIdx.x; i < count; i += gridDim.x)
        for (int64_t leaf = threadIdx.x; leaf < leaves_of(jobs[i].numel); leaf += kThreads)
            tensor_of_leaf[jobs[i].first_leaf + leaf] = int32_t(i);
}
__global__ void update_scaler_kernel(const ScalerRules rules, ScalerState *state, float *scale,
                                     const int32_t *overflow) {
    scaler_transition(rules, *state, overflow != nullptr ? *overflow != 0 : state->recorded != 0);
    *scale = scale_in_use(*state);
}
__global__ void write_scaler_kernel(const ScalerState value, ScalerState *state, float *scale) {
    *state = value;
    *scale = scale_in_use(value);
}
__global__ void write_reduction_kernel(const ScheduleRules rules, const ScheduleState *schedule, int32_t *reduction) {
    *reduction = next_reduction_of(rules, schedule);
}

/// Parts of StepPlan::extra.
struct Extra {
    size_t table, map, squares, updates, cell, layout, control, outcome, bytes;
    Extra(int64_t tensors, int64_t groups, int64_t leaves, const OneBitSetup *onebit) {
        size_t at = 0;
        const auto place = [&](size_t size) {
            const size_t offset = at;
            at += rounded(size);
            return offset;
        };
        table = place(table_bytes(tensors, groups, onebit));
        map = place(size_t(leaves) * sizeof(int32_t));
        squares = place(size_t(tensors) * sizeof(double));
        updates = place(size_t(tensors) * sizeof(double));
        cell = place(size_t(tensors) * sizeof(int32_t));
        layout = place(onebit != nullptr && onebit->compresses ? LayoutImage::bytes(onebit->layout) : 0);
        control = place(sizeof(Control));
        outcome = place(sizeof(Outcome));
        bytes = at;
    }
    /// Jobs, hyper-parameters, jobs of the 1-bit family, each on its own line: as the host has them.
    static size_t table_bytes(int64_t tensors, int64_t groups, const OneBitSetup *onebit) {
        return onebit_at(tensors, groups) + (onebit != nullptr ? rounded(size_t(tensors) * sizeof(OneBitJob)) : 0);
    }
    static size_t onebit_at(int64_t tensors, int64_t groups) {
        return rounded(size_t(tensors) * sizeof(TensorJob)) + rounded(size_t(groups) * sizeof(Hyper));
    }
};

/// The table in device memory that steps of one optimizer read, and what the host knows of its contents.
class Cache final : public StepCache {
public:
    void *table = nullptr;      // in the workspace, or in one of `own`
    std::vector<char> contents; // of `table`; empty = unknown
    const void *workspace = nullptr;
    bool captured = false; // a graph reads `table`: it must stay as it is
    std::vector<DeviceMemory> own;
    std::unique_ptr<Event> marks[6]; // of the phases
    bool timed = false, exchanged = false;
};

class CudaBackend final : public Backend {
public:
    explicit CudaBackend(int device) : device_(device) {
        const OnDevice on(device);
        int processors = 0;
        check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
        blocks_ = unsigned(processors) * 4;
        check(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    ~CudaBackend() override { (void)cudaStreamDestroy(own_stream_); }

    const char *name() const override { return "cuda"; }
    bool is_host() const override { return false; }
    bool owns(const void *pointer) const override {
        const OnDevice on(device_);
        cudaPointerAttributes attributes{};
        if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
            (void)cudaGetLastError();
            return false;
        }
        if (attributes.type == cudaMemoryTypeUnregistered) return false;
        return attributes.type != cudaMemoryTypeDevice || attributes.device == device_;
    }
    size_t extra_bytes(int64_t tensors, int64_t groups, int64_t leaves, const OneBitSetup *onebit) const override {
        return Extra(tensors, groups, leaves, onebit).bytes;
    }
    std::unique_ptr<StepCache> make_cache() const override { return std::make_unique<Cache>(); }
    HostBuffer host_buffer(size_t bytes) const override {
        const OnDevice on(device_);
        return HostBuffer(pinned_memory(bytes).release(), PinnedFree());
    }
    void *allocate(size_t bytes, void *) const override {
        const OnDevice on(device_);
        return device_memory(bytes).release();
    }
    void release(void *memory, size_t, void *) const noexcept override {
        try {
            const OnDevice on(device_);
            (void)cudaFree(memory);
        } catch (const std::exception &) { // the device is lost, and the memory with it
        }
    }
    void step(const StepPlan &plan) const override;
    void phase_times(StepCache *cache, double *ms) const override;

    void clear(void *data, size_t bytes, void *stream) const override {
        const OnDevice on(device_);
        if (bytes != 0) check(cudaMemsetAsync(data, 0, bytes, as_stream(stream)), "cudaMemsetAsync");
    }
    void zero(const dsopt_tensor *list, int64_t count, const Parallel &, void *stream) const override {
        run_list(list, nullptr, count, stream, [&](const DeviceList &device, unsigned blocks, cudaStream_t on) {
            return ::gpu::launch("zero", zero_kernel, blocks, kThreads, 0, on, device);
        });
    }
    void axpby(const Factor &a, const dsopt_tensor *x, float b, const dsopt_tensor *y, int64_t count, const Parallel &,
               void *stream) const override {
        if (count == 1) {
            if (x->data == nullptr || x->numel == 0 || y->data == nullptr) return;
            const OnDevice on(device_);
            const OnePair pair{*x, *y, {0, leaves_of(x->numel)}};
            check(::gpu::launch("axpby_one", axpby_one_kernel, blocks_for(pair.first_leaf[1]), kThreads, 0,
                                as_stream(stream), pair, a.data, a.value, b),
                  "axpby_one");
            return;
        }
        run_list(x, y, count, stream, [&](const DeviceList &device, unsigned blocks, cudaStream_t on) {
            return ::gpu::launch("axpby", axpby_kernel, blocks, kThreads, 0, on, device, a.data, a.value, b);
        });
    }
    void clamp(const dsopt_tensor *list, int64_t count, float limit, const Parallel &, void *stream) const override {
        run_list(list, nullptr, count, stream, [&](const DeviceList &device, unsigned blocks, cudaStream_t on) {
            return ::gpu::launch("clamp", clamp_kernel, blocks, kThreads, 0, on, device, limit);
        });
    }
    void norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, Comm *comm,
              dsopt_norm_result *result, const Parallel &, void *stream) const override;
    void compress_feed(const Exchange &exchange, const dsopt_tensor *list, int64_t count, const Parallel &,
                       void *stream) const override {
        const CompressLayout &layout = *exchange.layout;
        with_exchange(exchange, list, count, stream, [&](const DeviceExchange &x, const dsopt_tensor *tensors) {
            if (layout.has_levels()) {
                clear_gaps(x, blocks_, as_stream(stream));
                check(::gpu::launch("fill_message", fill_message_kernel, blocks_for(layout.whole->part_leaf.back()),
                                    kThreads, 0, as_stream(stream), x, tensors),
                      "fill_message");
                return;
            }
            clear_rows(x.send, layout.row_bytes() * layout.ranks, as_stream(stream));
            check(::gpu::launch("feed_list", feed_list_kernel, blocks_for(layout.part_leaf.back()), kThreads, 0,
                                as_stream(stream), x, tensors),
                  "feed_list");
            end_rows(x, blocks_, as_stream(stream));
        });
    }
    void compress_slice(const Exchange &exchange, const Parallel &, void *stream) const override {
        with_exchange(exchange, nullptr, 0, stream, [&](const DeviceExchange &x, const dsopt_tensor *) {
            pack_slice(*exchange.layout, x, blocks_, as_stream(stream));
        });
    }
    void compress_serve(const Exchange &exchange, const Parallel &, void *stream) const override {
        with_exchange(exchange, nullptr, 0, stream, [&](const DeviceExchange &x, const dsopt_tensor *) {
            serve_rows(*exchange.layout, x, blocks_, as_stream(stream));
        });
    }
    void compress_decode(const Exchange &exchange, const dsopt_tensor *list, int64_t count, const Parallel &,
                         void *stream) const override {
        with_exchange(exchange, list, count, stream, [&](const DeviceExchange &x, const dsopt_tensor *tensors) {
            check(::gpu::launch("decode", decode_kernel, blocks_for(exchange.layout->all().part_leaf.back()), kThreads,
                                0, as_stream(stream), x, tensors),
                  "decode");
        });
    }
    void update_scaler(const ScalerRules &rules, ScalerState *state, float *scale, const int32_t *overflow,
                       void *stream) const override {
        const OnDevice on(device_);
        check(::gpu::launch("update_scaler", update_scaler_kernel, 1, 1, 0, as_stream(stream), rules, state, scale,
                            overflow),
              "update_scaler");
    }
    void write_scaler(const ScalerState &value, ScalerState *state, float *scale, void *stream) const override {
        const OnDevice on(device_);
        check(::gpu::launch("write_scaler", write_scaler_kernel, 1, 1, 0, as_stream(stream), value, state, scale),
              "write_scaler");
    }
    void write_reduction(const ScheduleRules &rules, const ScheduleState *schedule, int32_t *reduction,
                         void *stream) const override {
        const OnDevice on(device_);
        check(::gpu::launch("write_reduction", write_reduction_kernel, 1, 1, 0, as_stream(stream), rules, schedule,
                            reduction),
              "write_reduction");
    }

    // These serve calls in which the host asks, and may wait: after everything on the device, on a stream of their own.
    void copy(void *to, const void *from, size_t bytes, void *) const override {
        wait_copy(to, from, bytes, cudaMemcpyDeviceToDevice);
    }
    void copy_to_host(void *host, const void *from, size_t bytes, void *) const override {
        wait_copy(host, from, bytes, cudaMemcpyDeviceToHost);
    }
    void copy_from_host(void *to, const void *host, size_t bytes, void *) const override {
        wait_copy(to, host, bytes, cudaMemcpyHostToDevice);
    }
    std::unique_ptr<HostReader> reader() const override { return std::make_unique<PinnedReader>(device_); }
    std::unique_ptr<HostWriter> writer() const override { return std::make_unique<PinnedWriter>(device_); }
    void synchronize(void *) const override {
        const OnDevice on(device_);
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    void enqueue_copy(void *to, const void *from, size_t bytes, void *stream) const override {
        const OnDevice on(device_);
        if (bytes != 0)
            check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, as_stream(stream)), "cudaMemcpyAsync");
    }
    bool finished(void *stream) const override {
        const OnDevice on(device_);
        if (capturing(as_stream(stream)))
            throw Error(DSOPT_ERR_STATE, "the host waits here: this call cannot be captured");
        const cudaError_t error = cudaStreamQuery(as_stream(stream));
        if (error == cudaErrorNotReady) {
            (void)cudaGetLastError(); // "not ready" is no error
            return false;
        }
        check(error, "cudaStreamQuery");
        return true;
    }
    void wait(void *stream) const override {
        const OnDevice on(device_);
        check(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize");
    }
    int device() const override { return device_; }
    void on_device(void (*body)(void *), void *argument) const override {
        const OnDevice on(device_);
        body(argument);
    }

private:
    static cudaStream_t as_stream(void *stream) { return static_cast<cudaStream_t>(stream); }
    unsigned blocks_for(int64_t pieces) const { return unsigned(std::clamp<int64_t>(pieces, 1, blocks_)); }

    void wait_copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) const {
        if (bytes == 0) return;
        const OnDevice on(device_);
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        check(cudaMemcpyAsync(to, from, bytes, kind, own_stream_), "cudaMemcpyAsync");
        check(cudaStreamSynchronize(own_stream_), "cudaStreamSynchronize");
    }

    void *bring_table(const StepPlan &plan, const Extra &extra, cudaStream_t stream) const;
    template <class Body>
    void with_exchange(const Exchange &exchange, const dsopt_tensor *list, int64_t count, void *stream,
                       const Body &body) const;
    template <class Launch>
    void run_list(const dsopt_tensor *x, const dsopt_tensor *y, int64_t count, void *stream,
                  const Launch &launch) const;

    int device_;
    unsigned blocks_ = 1;
    cudaStream_t own_stream_ = nullptr;
    mutable PinnedPool pool_;
};

/// Jobs and hyper-parameters where kernels read them. Lists that stay bound cost nothing, up to kWords changed words a
/// launch of a small kernel, more than that one upload.
void *CudaBackend::bring_table(const StepPlan &plan, const Extra &extra, cudaStream_t stream) const {
    char *workspace = static_cast<char *>(plan.extra);
    const OneBitSetup *onebit = plan.onebit != nullptr ? plan.onebit->setup : nullptr;
    const size_t bytes = Extra::table_bytes(plan.count, plan.group_count, onebit);
    const char *image = reinterpret_cast<const char *>(plan.jobs);
    int32_t *map = reinterpret_cast<int32_t *>(workspace + extra.map);
    Cache *cache = static_cast<Cache *>(plan.cache);
    const bool fresh = cache == nullptr || cache->workspace != plan.extra;
    const bool in_capture = capturing(stream);
    if (fresh && cache != nullptr) {
        if (in_capture) throw Error(DSOPT_ERR_STATE, "take one step before capturing: the first one makes tables");
        cache->workspace = plan.extra;
        cache->table = workspace + extra.table;
        cache->contents.clear();
        cache->captured = false;
    }
    void *table = cache != nullptr ? cache->table : workspace + extra.table;
    std::vector<uint32_t> changed; // only up to the number that still travels in arguments
    const bool known = cache != nullptr && cache->contents.size() == bytes;
    if (known)
        for (size_t word = 0; word < bytes / 8 && changed.size() <= kWords; ++word)
            if (std::memcmp(image + word * 8, cache->contents.data() + word * 8, 8) != 0)
                changed.push_back(uint32_t(word));
    if (known && changed.empty()) {
        cache->captured = cache->captured || in_capture;
        return table;
    }
    if (cache != nullptr && cache->captured) {
        // A graph reads the table as it was captured. It keeps it, and plain steps go on with another one.
        if (in_capture)
            throw Error(DSOPT_ERR_STATE,
                        "the lists changed since an earlier capture: take one plain step before capturing again");
        cache->own.push_back(device_memory(bytes));
        table = cache->own.back().get();
        cache->contents.clear();
    }
    if (known && changed.size() <= kWords && !cache->contents.empty()) {
        Patch patch;
        patch.count = int32_t(changed.size());
        for (size_t i = 0; i < changed.size(); ++i) {
            patch.places[i] = changed[i];
            std::memcpy(&patch.words[i], image + size_t(changed[i]) * 8, 8);
        }
        check(::gpu::launch("patch", patch_kernel, 1, kThreads, 0, stream, static_cast<uint64_t *>(table), patch),
              "patch");
    } else {
        upload(table, image, bytes, pool_, stream);
    }
    if (fresh) {
        check(cudaMemsetAsync(workspace + extra.control, 0, extra.bytes - extra.control, stream), "cudaMemsetAsync");
        check(::gpu::launch("map", map_kernel, blocks_for(plan.count), kThreads, 0, stream,
                            static_cast<const TensorJob *>(table), map, plan.count),
              "map");
        if (onebit != nullptr && onebit->compresses) {
            std::vector<char> layout(LayoutImage::bytes(onebit->layout));
            LayoutImage::write(onebit->layout, onebit->used, layout.data());
            upload(workspace + extra.layout, layout.data(), layout.size(), pool_, stream);
        }
    }
    if (cache != nullptr) {
        cache->contents.assign(image, image + bytes);
        cache->table = table;
        cache->captured = in_capture;
    }
    return table;
}

/// Whether the update has something to do where all tensors that take part are updated elsewhere.
bool leaves_work(const StepPlan &plan) {
    if (plan.flags & kZeroGrads) return true;
    for (int64_t i = 0; i < plan.count; ++i)
        if (!plan.jobs[i].onebit || plan.jobs[i].out != nullptr) return true;
    return false;
}

void CudaBackend::step(const StepPlan &plan) const {
    const OnDevice on(device_);
    const auto stream = as_stream(plan.stream);
    const int64_t leaves =
        plan.count == 0 ? 0 : plan.jobs[plan.count - 1].first_leaf + leaves_of(plan.jobs[plan.count - 1].numel);
    const Extra parts(plan.count, plan.group_count, leaves, plan.onebit != nullptr ? plan.onebit->setup : nullptr);
    if (plan.onebit != nullptr && capturing(stream))
        throw Error(DSOPT_ERR_STATE, "the host chooses the stage of a 1-bit step: it cannot be captured");
    char *workspace = static_cast<char *>(plan.extra);
    bool narrow = false, counted = false; // 16-bit arrays; the original's way of counting
    for (int64_t i = 0; i < plan.count; ++i) {
        const TensorJob &job = plan.jobs[i];
        for (const Moment &moment : job.moment) narrow = narrow || moment.type != Dtype::f32;
        narrow = narrow || job.grad_type != Dtype::f32 || job.weight_type != Dtype::f32 ||
                 (job.copy != nullptr && job.copy_type != Dtype::f32) ||
                 (job.out != nullptr && job.out_type != Dtype::f32);
    }
    for (int64_t g = 0; g < plan.group_count; ++g)
        counted =
            counted || (plan.groups[g].compat && sweeps_of(plan.groups[g].rule) == 1 && plan.wrapper == Wrapper::none);
    // 2^31 leaves are 2^43 elements: more than any device holds.
    if (leaves > INT32_MAX)
        throw Error(DSOPT_ERR_SHAPE, "the list has %lld leaves, more than 2^31", static_cast<long long>(leaves));
    void *table = bring_table(plan, parts, stream);

    DevicePlan d{.plan = plan,
                 .leaves = uint32_t(leaves),
                 .tensor_of_leaf = reinterpret_cast<const int32_t *>(workspace + parts.map),
                 .tensor_squares = reinterpret_cast<double *>(workspace + parts.squares),
                 .tensor_updates = reinterpret_cast<double *>(workspace + parts.updates),
                 .tensor_cell = reinterpret_cast<int32_t *>(workspace + parts.cell),
                 .control = reinterpret_cast<Control *>(workspace + parts.control),
                 .outcome =
                     plan.outcome != nullptr ? plan.outcome : reinterpret_cast<Outcome *>(workspace + parts.outcome),
                 .elsewhere = Elsewhere::no,
                 .decided = false,
                 .counted = counted};
    d.plan.jobs = static_cast<TensorJob *>(table);
    d.plan.groups =
        reinterpret_cast<const Hyper *>(static_cast<char *>(table) + rounded(size_t(plan.count) * sizeof(TensorJob)));
    const bool peers = has_peers(plan.comms);
    d.decided = plan.read_gradients || plan.grad_norms != nullptr || plan.grad_scale != nullptr || plan.lr != nullptr ||
                plan.hyper != nullptr || plan.scaler != nullptr || peers || counted || plan.onebit != nullptr;
    if (plan.onebit != nullptr && plan.onebit->stage != Stage::full)
        d.elsewhere = plan.onebit->stage == Stage::dry ? Elsewhere::idle : Elsewhere::yes;

    Cache *cache = static_cast<Cache *>(plan.cache);
    const bool timing = plan.timing && cache != nullptr && !capturing(stream);
    const auto mark = [&](int phase) {
        if (!timing) return;
        if (!cache->marks[phase]) cache->marks[phase] = std::make_unique<Event>(cudaEventDefault);
        check(cudaEventRecord(cache->marks[phase]->get(), stream), "cudaEventRecord");
        cache->timed = true;
    };
    mark(0);
    if (plan.read_gradients) {
        DevicePlan first = d;
        first.decided = d.decided && !peers;
        check(::gpu::launch("inspect", inspect_kernel, blocks_for((leaves + kWarps - 1) / kWarps), kThreads, 0, stream,
                            first),
              "inspect");
    }
    if (peers) {
        if (!plan.read_gradients) check(::gpu::launch("fold", fold_kernel, 1, kThreads, 0, stream, d), "fold");
        agree_on_norms(plan, stream);
        check(::gpu::launch("decide", decide_kernel, 1, kThreads, 0, stream, d, false), "decide");
    } else if (d.decided && !plan.read_gradients) {
        check(::gpu::launch("decide", decide_kernel, 1, kThreads, 0, stream, d, true), "decide");
    }
    mark(1);
    std::optional<OneBitStep> onebit;
    if (plan.onebit != nullptr) {
        const void *jobs = static_cast<char *>(table) + Extra::onebit_at(plan.count, plan.group_count);
        const void *layout = plan.onebit->setup->compresses ? workspace + parts.layout : nullptr;
        onebit.emplace(plan, d, static_cast<const OneBitJob *>(jobs), layout, blocks_, stream);
        if (cache != nullptr) cache->exchanged = false;
        onebit->run([&](int phase) {
            mark(3 + phase);
            if (cache != nullptr && phase == 1)
                cache->exchanged = true; // not on one rank, which has the last phase only
        });
        if (d.elsewhere == Elsewhere::yes && !leaves_work(plan)) d.leaves = 0;
    }
    const unsigned blocks = blocks_for(d.leaves);
    const size_t rooms = plan.has_lamb || plan.report_norms ? 2 * kLeaf * sizeof(float) : 0;
    const bool shards = has_shards(plan, false);
    if (shards) clear_shards(plan, stream);
    if (narrow)
        check(::gpu::launch("update8", update_kernel<8>, blocks, kThreads, rooms, stream, d), "update");
    else
        check(::gpu::launch("update4", update_kernel<4>, blocks, kThreads, rooms, stream, d), "update");
    if (shards) {
        agree_on_shards(plan, &d.control->skip, false, stream);
        check(::gpu::launch("shared_trust", shared_trust_kernel, blocks_for(plan.count / kThreads + 1), kThreads, 0,
                            stream, d),
              "shared_trust");
    }
    if (plan.has_lamb) {
        if (narrow)
            check(::gpu::launch("lamb_weights8", lamb_weights_kernel<8>, blocks, kThreads, 0, stream, d),
                  "lamb_weights");
        else
            check(::gpu::launch("lamb_weights4", lamb_weights_kernel<4>, blocks, kThreads, 0, stream, d),
                  "lamb_weights");
    }
    if (onebit) onebit->end();
    mark(2);
    if (plan.mirror != nullptr)
        check(cudaMemcpyAsync(plan.mirror, d.outcome, sizeof(Outcome), cudaMemcpyDeviceToHost, stream), "outcome");
}

void CudaBackend::phase_times(StepCache *state, double *ms) const {
    Cache *cache = static_cast<Cache *>(state);
    if (cache == nullptr || !cache->timed) return;
    const OnDevice on(device_);
    const auto between = [&](int from, int to) {
        float time = 0;
        check(cudaEventElapsedTime(&time, cache->marks[from]->get(), cache->marks[to]->get()), "cudaEventElapsedTime");
        return double(time);
    };
    ms[DSOPT_MS_OVERFLOW_CHECK] = between(0, 1);
    ms[DSOPT_MS_BASIC_STEP] = between(1, 2);
    if (!cache->exchanged) return;
    ms[DSOPT_MS_COMPRESS] = between(1, 3);
    ms[DSOPT_MS_EXCHANGE] = between(3, 4);
    ms[DSOPT_MS_DECOMPRESS] = between(4, 5);
    ms[DSOPT_MS_BASIC_STEP] = between(5, 2);
}

/// body(exchange, list) with everything in device memory: in a step the layout is there, otherwise it lives as long as
/// the launch.
template <class Body>
void CudaBackend::with_exchange(const Exchange &exchange, const dsopt_tensor *list, int64_t count, void *where,
                                const Body &body) const {
    const OnDevice on(device_);
    if (exchange.table != nullptr) return body(device_exchange(exchange, exchange.table), nullptr);
    const auto stream = as_stream(where);
    const size_t layout = LayoutImage::bytes(*exchange.layout);
    std::vector<char> image(layout + rounded(size_t(count) * sizeof(dsopt_tensor)));
    LayoutImage::write(*exchange.layout, {}, image.data());
    if (count != 0) std::memcpy(image.data() + layout, list, size_t(count) * sizeof(dsopt_tensor));
    void *memory = nullptr;
    check(cudaMallocAsync(&memory, image.size(), stream), "cudaMallocAsync");
    try {
        upload(memory, image.data(), image.size(), pool_, stream);
        body(device_exchange(exchange, memory),
             reinterpret_cast<const dsopt_tensor *>(static_cast<const char *>(memory) + layout));
    } catch (...) {
        (void)cudaFreeAsync(memory, stream);
        throw;
    }
    check(cudaFreeAsync(memory, stream), "cudaFreeAsync");
}

/// A list that nobody keeps: its table lives as long as the launch.
template <class Launch>
void CudaBackend::run_list(const dsopt_tensor *x, const dsopt_tensor *y, int64_t count, void *where,
                           const Launch &launch) const {
    const OnDevice on(device_);
    const auto stream = as_stream(where);
    std::vector<dsopt_tensor> xs, ys;
    std::vector<int64_t> first{0};
    for (int64_t i = 0; i < count; ++i) {
        if (x[i].data == nullptr || x[i].numel == 0 || (y != nullptr && y[i].data == nullptr)) continue;
        xs.push_back(x[i]);
        if (y != nullptr) ys.push_back(y[i]);
        first.push_back(first.back() + leaves_of(x[i].numel));
    }
    if (xs.empty()) return;
    std::vector<char> image(rounded(xs.size() * sizeof(dsopt_tensor)) * (y != nullptr ? 2 : 1) +
                            rounded(first.size() * 8));
    const size_t ys_at = rounded(xs.size() * sizeof(dsopt_tensor)), first_at = ys_at * (y != nullptr ? 2 : 1);
    std::memcpy(image.data(), xs.data(), xs.size() * sizeof(dsopt_tensor));
    if (y != nullptr) std::memcpy(image.data() + ys_at, ys.data(), ys.size() * sizeof(dsopt_tensor));
    std::memcpy(image.data() + first_at, first.data(), first.size() * 8);
    void *memory = nullptr;
    check(cudaMallocAsync(&memory, image.size(), stream), "cudaMallocAsync");
    try {
        upload(memory, image.data(), image.size(), pool_, stream);
        const char *base = static_cast<const char *>(memory);
        const DeviceList list{reinterpret_cast<const dsopt_tensor *>(base),
                              reinterpret_cast<const dsopt_tensor *>(base + ys_at),
                              reinterpret_cast<const int64_t *>(base + first_at), int64_t(xs.size()), first.back()};
        check(launch(list, blocks_for(first.back()), stream), "list");
    } catch (...) {
        (void)cudaFreeAsync(memory, stream);
        throw;
    }
    check(cudaFreeAsync(memory, stream), "cudaFreeAsync");
}

void CudaBackend::norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, Comm *comm,
                       dsopt_norm_result *result, const Parallel &, void *where) const {
    const OnDevice on(device_);
    const auto stream = as_stream(where);
    int64_t leaves = 0;
    std::vector<int64_t> place; // in the caller's list, of the entries that are looked at
    for (int64_t i = 0; i < count; ++i)
        if (list[i].data != nullptr && list[i].numel != 0) leaves += leaves_of(list[i].numel), place.push_back(i);
    const bool peers = comm != nullptr && comm->ranks() > 1;
    const size_t squares = 0, bad = rounded(size_t(leaves) * 8), largest = bad * 2,
                 sums = largest + rounded(size_t(leaves) * 4), ticket = sums + rounded(place.size() * 8);
    void *memory = nullptr;
    check(cudaMallocAsync(&memory, ticket + kLine, stream), "cudaMallocAsync");
    char *base = static_cast<char *>(memory);
    const NormParts parts{reinterpret_cast<double *>(base + squares), reinterpret_cast<int64_t *>(base + bad),
                          reinterpret_cast<float *>(base + largest), reinterpret_cast<double *>(base + sums),
                          reinterpret_cast<uint32_t *>(base + ticket)};
    try {
        check(cudaMemsetAsync(parts.ticket, 0, kLine, stream), "cudaMemsetAsync");
        // An empty list has a norm too, so there is always a launch.
        check(::gpu::launch("no_norm", no_norm_kernel, 1, 1, 0, stream, result), "norm");
        run_list(list, nullptr, count, where, [&](const DeviceList &device, unsigned blocks, cudaStream_t stream_) {
            return ::gpu::launch("norm", norm_kernel, blocks, kThreads, 0, stream_, device, parts, kind, peers,
                                 max_norm, result);
        });
    } catch (...) {
        (void)cudaFreeAsync(memory, stream);
        throw;
    }
    check(cudaFreeAsync(memory, stream), "cudaFreeAsync");
    const bool all = place.size() == size_t(count);
    if (!peers && all) return;
    // The place in the caller's list, and what other ranks have: both are the host's to know.
    if (capturing(stream)) throw Error(DSOPT_ERR_STATE, "a norm over ranks or a list with gaps cannot be captured");
    dsopt_norm_result r;
    check(cudaMemcpyAsync(&r, result, sizeof r, cudaMemcpyDeviceToHost, stream), "norm");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    if (r.first_bad >= 0) r.first_bad = place[size_t(r.first_bad)];
    if (peers) {
        double shared[3] = {r.norm, double(r.nonfinite), std::isnan(r.norm) ? 1.0 : 0.0};
        comm->all_reduce(&shared[0], 1, DSOPT_DTYPE_F64, kind == DSOPT_NORM_MAX ? DSOPT_OP_MAX : DSOPT_OP_SUM, where);
        comm->all_reduce(&shared[1], 2, DSOPT_DTYPE_F64, DSOPT_OP_SUM, where);
        r.nonfinite = int64_t(shared[1]);
        if (kind == DSOPT_NORM_MAX && shared[2] > 0) shared[0] = NAN; // MAX loses the NaN of a rank
        finish_norm(r, kind, shared[0], max_norm);
    }
    check(cudaMemcpyAsync(result, &r, sizeof r, cudaMemcpyHostToDevice, stream), "norm");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

/// Devices that can be used, or why there are none.
int count_devices(std::string &reason) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0) return count;
    (void)cudaGetLastError();
    reason = error == cudaSuccess ? "there is no CUDA device" : cudaGetErrorString(error);
    return 0;
}

} // namespace
} // namespace gpu

std::unique_ptr<Backend> make_cuda_backend(int device) {
    std::string reason;
    const int count = gpu::count_devices(reason);
    if (count == 0) throw Error(DSOPT_ERR_MISSING, "no CUDA device can be used here: %s", reason.c_str());
    if (device < 0 || device >= count)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_context_desc.device is %d, there are %d CUDA devices", device, count);
    return std::make_unique<gpu::CudaBackend>(device);
}

const char *cuda_state() {
    std::string reason;
    return gpu::count_devices(reason) > 0 ? "cuda" : "no device";
}

} // namespace dsopt
