// SPDX-License-Identifier: Apache-2.0
// Steps on a GPU, and copies on the device that move as many bytes, timed by events on the stream. Rows of the engine,
// with their bytes per element; `/graph` is the same step captured once and replayed:
//   Fp32             AdamW on fp32 weights, 28
//   Mixed            16-bit gradients and weights, fp32 masters, loss scale, norm and clipping: 30
//   MixedUpdate      the second pass of Mixed alone: 28
//   Pass1/f16, /bf16 the first pass alone, as dsopt_tensors_norm of 16-bit gradients: 2
//   Lamb, Lamb/clip  LAMB on fp32 weights: 40, and 44 with the norm of the gradients
//   Sgd, Adagrad, Lion   on fp32 weights: 12, 20 and 20
// and the local work of one of 8 ranks with one bit per element, on fp32 weights. Its collectives return this rank's
// messages, in stream order:
//   Compressed           dsopt_compressed_allreduce: 12 of the worker (value, compensated value read and written), 1 of
//                        the server, 4 decoded, bits: 17
//   OnebitAdam           a step that exchanges: worker 16 (gradient and momentum in place of the value), server 1,
//                        update 16 (weight, variance, momentum): 33
//   OnebitAdam/bits      the same with MOMENTUM_BITS: 25
//   ZeroOneAdam/local    0/1 Adam between exchanges: gradient, variance, momentum and weight: 24
//   OnebitLamb           worker 16, server 1, moments 24 (the fresh variance too), weights 16: 57
// Memset writes 4 bytes per element and reads none; it is the reference for decoding an exchange.
// Peers: Chunked is AdamW by a launcher in the form of apex's (cuda_peers.h); PyTorch's are in torch_cuda.py.
//
// Every row is set up once per list. All rows use the same parameters, gradients and moments. A repetition is one batch
// of steps. Google Benchmark interleaves the rows at random, so a copy is timed close to each step.
#include "bench_util.h"
#include "cuda_peers.h"
#include <algorithm>
#include <benchmark/benchmark.h>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>

namespace {

using bench::check;

constexpr int kRanks = 8;
/// Number of steps between two events: the queue stays filled, as in training. DSOPT_BENCH_STEPS shortens rehearsals.
int steps_of_batch() {
    const char *const text = std::getenv("DSOPT_BENCH_STEPS");
    return text == nullptr ? 10 : std::max(1, std::atoi(text));
}
const int kSteps = steps_of_batch();

void check_cuda(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "bench_cuda: %s\n", cudaGetErrorString(error));
    std::exit(1);
}

/// Device memory filled with `word`, in which the low bits of both halves vary.
class DeviceMemory {
public:
    DeviceMemory(size_t bytes, uint32_t word) {
        check_cuda(cudaMalloc(&data_, bytes));
        std::vector<uint32_t> pattern(std::min(bytes / 4 + 1, size_t(1) << 20));
        for (size_t i = 0; i < pattern.size(); ++i)
            pattern[i] = word == 0 ? 0 : word ^ uint32_t(i * 2654435761u & 0x003f003fu);
        for (size_t offset = 0; offset < bytes; offset += pattern.size() * 4)
            check_cuda(cudaMemcpy(static_cast<char *>(data_) + offset, pattern.data(),
                                  std::min(bytes - offset, pattern.size() * 4), cudaMemcpyHostToDevice));
    }
    ~DeviceMemory() { (void)cudaFree(data_); }
    DeviceMemory(const DeviceMemory &) = delete;
    DeviceMemory &operator=(const DeviceMemory &) = delete;
    char *data() const { return static_cast<char *>(data_); }

private:
    void *data_ = nullptr;
};

/// A list in one block of memory: consecutive tensors, each aligned to 256 bytes, as frameworks allocate them.
struct DeviceList {
    DeviceMemory memory;
    std::vector<dsopt_tensor> tensors;
    DeviceList(const std::vector<int64_t> &sizes, int32_t dtype, uint32_t word) : memory(bytes(sizes, dtype), word) {
        size_t offset = 0;
        for (const int64_t n : sizes) {
            tensors.push_back({memory.data() + offset, n, dtype, 0});
            offset += rounded(n, dtype);
        }
    }
    float *floats(size_t i) const { return static_cast<float *>(tensors[i].data); }
    static size_t rounded(int64_t n, int32_t dtype) {
        return (size_t(n) * bench::List::element(dtype) + 255) / 256 * 256;
    }
    static size_t bytes(const std::vector<int64_t> &sizes, int32_t dtype) {
        size_t sum = 256;
        for (const int64_t n : sizes) sum += rounded(n, dtype);
        return sum;
    }
};

/// Returns the bits of two 16-bit numbers, or of one float, of about 1e-3.
uint32_t small_word(int32_t dtype) {
    return dtype == DSOPT_DTYPE_F32 ? 0x3a800000u : dtype == DSOPT_DTYPE_F16 ? 0x14001400u : 0x3a803a80u;
}

/// Work that is enqueued on a stream repeatedly.
struct Job {
    virtual ~Job() = default;
    virtual void run(cudaStream_t stream) = 0;
    /// Returns an error text if the runs so far are not valid measurements, else NULL.
    virtual const char *problem() { return nullptr; }
};

/// Memory and jobs of one list of shapes.
class Fixture {
public:
    const std::string list;
    const std::vector<int64_t> sizes;
    const int64_t numel = bench::total(sizes);
    cudaStream_t stream = nullptr;

    explicit Fixture(const std::string &name) : list(name), sizes(bench::shapes(name)) {
        check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }
    ~Fixture() {
        jobs_.clear();
        check_cuda(cudaStreamDestroy(stream));
    }
    Fixture(const Fixture &) = delete;
    Fixture &operator=(const Fixture &) = delete;

    /// Returns the same list to every job with the same name and dtype.
    DeviceList &tensors(const std::string &name, int32_t dtype, uint32_t word) {
        auto &entry = lists_[name + std::to_string(dtype)];
        if (!entry) entry = std::make_unique<DeviceList>(sizes, dtype, word);
        return *entry;
    }
    DeviceMemory &memory(const std::string &name, size_t bytes) {
        auto &entry = memory_[name];
        if (!entry) entry = std::make_unique<DeviceMemory>(bytes, small_word(DSOPT_DTYPE_F32));
        return *entry;
    }
    DeviceList &params(int32_t dtype) { return tensors("param", dtype, small_word(dtype)); }
    DeviceList &grads(int32_t dtype) { return tensors("grad", dtype, small_word(dtype)); }

    Job &job(const std::string &name, const std::function<std::unique_ptr<Job>(Fixture &)> &make) {
        auto &entry = jobs_[name];
        if (!entry) {
            entry = make(*this);
            for (int i = 0; i < 6; ++i) entry->run(stream); // the first steps, up to the compressed stage
            check_cuda(cudaStreamSynchronize(stream));
        }
        return *entry;
    }
    /// Returns the fixture of a list. Only one fixture is kept, because the largest list takes tens of gigabytes.
    static Fixture &of(const std::string &name) {
        static std::unique_ptr<Fixture> current;
        if (!current || current->list != name) {
            current.reset();
            current = std::make_unique<Fixture>(name);
        }
        return *current;
    }

private:
    std::map<std::string, std::unique_ptr<DeviceMemory>> memory_;
    std::map<std::string, std::unique_ptr<DeviceList>> lists_;
    std::map<std::string, std::unique_ptr<Job>> jobs_;
};

struct Copy final : Job {
    static constexpr int kMaxBytes = 57; // bytes per element, half of them read
    DeviceMemory &from, &to;
    size_t bytes;
    Copy(Fixture &f, int element_bytes) :
        from(f.memory("from", bytes_of(f))),
        to(f.memory("to", bytes_of(f))),
        bytes(size_t(f.numel) * size_t(element_bytes) / 2) {}
    static size_t bytes_of(const Fixture &f) { return size_t(f.numel) * kMaxBytes / 2 + 4; } // each of the two blocks
    void run(cudaStream_t stream) override {
        check_cuda(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, stream));
    }
};

struct Memset final : Job {
    static constexpr int kBytes = 4; // per element
    DeviceMemory &to;
    size_t bytes;
    explicit Memset(Fixture &f) : to(f.memory("to", Copy::bytes_of(f))), bytes(size_t(f.numel) * kBytes) {}
    void run(cudaStream_t stream) override { check_cuda(cudaMemsetAsync(to.data(), 0, bytes, stream)); }
};

struct Chunked final : Job {
    bench::ChunkedAdamW peer;
    int64_t step = 0;
    explicit Chunked(Fixture &f) {
        const DeviceList &g = f.grads(DSOPT_DTYPE_F32), &p = f.params(DSOPT_DTYPE_F32);
        const DeviceList &m = f.tensors("exp_avg", DSOPT_DTYPE_F32, 0),
                         &v = f.tensors("exp_avg_sq", DSOPT_DTYPE_F32, 0);
        for (size_t i = 0; i < f.sizes.size(); ++i)
            peer.add(g.floats(i), p.floats(i), m.floats(i), v.floats(i), f.sizes[i]);
    }
    void run(cudaStream_t stream) override { check_cuda(peer.run(++step, stream)); }
};

dsopt_context *make_context() {
    DSOPT_NEW(dsopt_context_desc, desc);
    desc.backend = DSOPT_BACKEND_CUDA;
    dsopt_context *context = nullptr;
    check(dsopt_context_create(&desc, &context));
    return context;
}
/// All-to-all and all-gather in which all kRanks ranks send the same data, so that scales and signs are as with real
/// data.
int mirror(void *, const void *send, void *recv, int64_t bytes, void *stream) {
    for (int rank = 0; rank < kRanks; ++rank)
        check_cuda(cudaMemcpyAsync(static_cast<char *>(recv) + rank * bytes, send, size_t(bytes),
                                   cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
    return 0;
}
dsopt_comm *make_mirror(dsopt_context *context) { return bench::idle_comm(context, kRanks, mirror); }

struct Setting {
    int32_t algorithm = DSOPT_ALGORITHM_ADAMW, dtype = DSOPT_DTYPE_F32;
    bool clips = false;
    int32_t reduction = DSOPT_REDUCTION_FULL; // with another value: a step of the 1-bit family in that stage
    uint32_t flags = 0;
};

struct Step final : Job {
    Setting setting;
    dsopt_context *context = make_context();
    dsopt_scaler *scaler = nullptr;
    dsopt_comm *comm = nullptr;
    dsopt_optimizer *optimizer = nullptr;
    dsopt_step step{};

    Step(Fixture &f, const Setting &its_setting) : setting(its_setting) {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.flags = setting.flags;
        const bool exchanges = setting.reduction != DSOPT_REDUCTION_FULL;
        if (exchanges) desc.data = comm = make_mirror(context);
        if (setting.clips) {
            desc.max_norm = 1.0;
            DSOPT_NEW(dsopt_scaler_desc, scaling);
            scaling.init = 1024;
            scaling.window = 1 << 30; // no growth, which would make moments denormal
            if (setting.dtype != DSOPT_DTYPE_F32) check(dsopt_scaler_create(context, &scaling, &scaler));
            desc.scaler = scaler;
        }
        check(dsopt_optimizer_create(context, &desc, &optimizer));
        std::vector<dsopt_param> params(f.sizes.size());
        for (size_t i = 0; i < params.size(); ++i) params[i].tensor = f.params(setting.dtype).tensors[i];
        dsopt_group group;
        check(dsopt_group_init(&group, sizeof group, setting.algorithm));
        group.weight_decay = 0.01;
        if (exchanges) group.freeze_step = 1;
        if (setting.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) { // all steps from the fifth on are local
            group.local_interval_steps = 1;
            group.max_local_interval = int64_t(1) << 30;
        }
        check(dsopt_optimizer_add_group(optimizer, &group, params.data(), int64_t(params.size())));
        bind_state(f);
        step.size = sizeof step;
        step.grads = f.grads(setting.dtype).tensors.data();
        step.count = int64_t(f.sizes.size());
    }
    ~Step() override {
        dsopt_optimizer_destroy(optimizer);
        dsopt_comm_destroy(comm);
        dsopt_scaler_destroy(scaler);
        dsopt_context_destroy(context);
    }
    void run(cudaStream_t stream) override {
        step.stream = stream;
        check(dsopt_optimizer_step(optimizer, &step));
    }
    const char *problem() override {
        int32_t reduction = setting.reduction;
        if (comm != nullptr) check(dsopt_optimizer_next_reduction(optimizer, 0, &reduction));
        if (reduction != setting.reduction) return "the steps are in another stage";
        DSOPT_NEW(dsopt_report, report);
        check(dsopt_optimizer_report(optimizer, &report));
        return report.skipped != 0 ? "steps were skipped: nothing was timed" : nullptr;
    }

private:
    static DeviceList &state_list(Fixture &f, const std::string &name) {
        return f.tensors(name, DSOPT_DTYPE_F32, name == "master" ? small_word(DSOPT_DTYPE_F32) : 0);
    }
    /// Binds moments and masters to the fixture's memory. The engine allocates all other state.
    void bind_state(Fixture &f) const {
        int64_t count = 0;
        check(dsopt_optimizer_state_count(optimizer, &count));
        std::vector<dsopt_tensor> state;
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            check(dsopt_optimizer_state(optimizer, i, &info));
            info.tensor.data = nullptr;
            for (const char *name : {"master", "exp_avg", "exp_avg_sq", "momentum_buffer", "sum"})
                if (info.param >= 0 && info.tensor.dtype == DSOPT_DTYPE_F32 && !std::strcmp(info.name, name) &&
                    info.tensor.numel == f.sizes[size_t(info.param)])
                    info.tensor.data = state_list(f, name).tensors[size_t(info.param)].data;
            state.push_back(info.tensor);
        }
        check(dsopt_optimizer_bind(optimizer, DSOPT_BIND_STATE, state.data(), count));
    }
};

struct Pass1 final : Job {
    dsopt_context *context = make_context();
    const std::vector<dsopt_tensor> &grads;
    DeviceMemory result{sizeof(dsopt_norm_result), 0};
    Pass1(Fixture &f, int32_t dtype) : grads(f.grads(dtype).tensors) {}
    ~Pass1() override { dsopt_context_destroy(context); }
    void run(cudaStream_t stream) override {
        check(dsopt_tensors_norm(context, grads.data(), int64_t(grads.size()), DSOPT_NORM_L2, 1.0, nullptr,
                                 reinterpret_cast<dsopt_norm_result *>(result.data()), stream));
    }
};

struct Compressed final : Job {
    dsopt_context *context = make_context();
    dsopt_comm *comm = make_mirror(context);
    dsopt_compressed args{};
    std::unique_ptr<DeviceMemory> errors, workspace;
    explicit Compressed(Fixture &f) {
        args.size = sizeof args;
        const DeviceList &values = f.grads(DSOPT_DTYPE_F32);
        args.tensors = values.tensors.data();
        args.count = int64_t(values.tensors.size());
        int64_t worker = 0, server = 0;
        check(dsopt_compressed_sizes(comm, &args, &worker, &server, &args.workspace_bytes));
        errors = std::make_unique<DeviceMemory>(size_t(worker + server) * sizeof(float), 0);
        workspace = std::make_unique<DeviceMemory>(args.workspace_bytes, 0);
        args.worker_error = reinterpret_cast<float *>(errors->data());
        args.server_error = args.worker_error + worker;
        args.workspace = workspace->data();
    }
    ~Compressed() override {
        dsopt_comm_destroy(comm);
        dsopt_context_destroy(context);
    }
    void run(cudaStream_t stream) override {
        args.stream = stream;
        check(dsopt_compressed_allreduce(comm, &args));
    }
};

/// A job that is captured once.
class Graph {
public:
    Graph(Job &job, cudaStream_t stream) {
        cudaGraph_t graph = nullptr;
        check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        job.run(stream);
        check_cuda(cudaStreamEndCapture(stream, &graph));
        check_cuda(cudaGraphInstantiate(&exec_, graph, 0));
        check_cuda(cudaGraphDestroy(graph));
    }
    ~Graph() { (void)cudaGraphExecDestroy(exec_); }
    Graph(const Graph &) = delete;
    Graph &operator=(const Graph &) = delete;
    void run(cudaStream_t stream) const { check_cuda(cudaGraphLaunch(exec_, stream)); }

private:
    cudaGraphExec_t exec_ = nullptr;
};

using Make = std::function<std::unique_ptr<Job>(Fixture &)>;

/// Runs one repetition: a batch of steps between two events. host_us: time of a call on the host.
void run_row(benchmark::State &state, const std::string &list, const std::string &name, const Make &make, int bytes,
             bool replays) {
    Fixture &f = Fixture::of(list);
    Job &job = f.job(name, make);
    std::unique_ptr<Graph> graph;
    if (replays) {
        graph = std::make_unique<Graph>(job, f.stream);
        graph->run(f.stream);
    } else {
        job.run(f.stream); // reloads the caches after other rows
    }
    cudaEvent_t begin, end;
    check_cuda(cudaEventCreate(&begin));
    check_cuda(cudaEventCreate(&end));
    double host = 0;
    for (auto _ : state) {
        check_cuda(cudaStreamSynchronize(f.stream));
        check_cuda(cudaEventRecord(begin, f.stream));
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < kSteps; ++i)
            if (graph)
                graph->run(f.stream);
            else
                job.run(f.stream);
        host += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        check_cuda(cudaEventRecord(end, f.stream));
        check_cuda(cudaEventSynchronize(end));
        float ms = 0;
        check_cuda(cudaEventElapsedTime(&ms, begin, end));
        state.SetIterationTime(double(ms) / 1e3 / kSteps);
    }
    state.SetBytesProcessed(state.iterations() * f.numel * bytes);
    state.counters["host_us"] = host / double(state.iterations()) / kSteps * 1e6;
    check_cuda(cudaEventDestroy(begin));
    check_cuda(cudaEventDestroy(end));
    if (const char *problem = job.problem()) state.SkipWithError(problem);
}

template <class J, class... A> Make makes(const A &...arguments) {
    return [=](Fixture &f) -> std::unique_ptr<Job> { return std::make_unique<J>(f, arguments...); };
}

void add_rows(const std::string &list) {
    const auto add = [&](const std::string &name, int bytes, const Make &make, bool replays = false) {
        for (int graph = 0; graph <= int(replays); ++graph)
            benchmark::RegisterBenchmark((name + (graph ? "/graph/" : "/") + list).c_str(), run_row, list, name, make,
                                         bytes,
                                         graph != 0)
                ->UseManualTime()
                ->Iterations(1) // the time of a batch must not change the number of runs
                ->Unit(benchmark::kMillisecond);
    };
    for (const int bytes : {2, 12, 17, 20, 24, 25, 28, 30, 33, 40, 44, 57})
        add("Copy/" + std::to_string(bytes), bytes, makes<Copy>(bytes));
    add("Memset", Memset::kBytes, makes<Memset>());
    const auto step = [&](const std::string &name, int bytes, const Setting &setting, bool replays = true) {
        add(name, bytes, makes<Step>(setting), replays);
    };
    step("Fp32", 28, {});
    for (const int32_t dtype : {int32_t(DSOPT_DTYPE_F16), int32_t(DSOPT_DTYPE_BF16)}) {
        const std::string suffix = dtype == DSOPT_DTYPE_F16 ? "/f16" : "/bf16";
        step("Mixed" + suffix, 30, {.dtype = dtype, .clips = true});
        step("MixedUpdate" + suffix, 28, {.dtype = dtype}, false);
        add("Pass1" + suffix, 2, makes<Pass1>(dtype));
    }
    step("Lamb", 40, {.algorithm = DSOPT_ALGORITHM_LAMB});
    step("Lamb/clip", 44, {.algorithm = DSOPT_ALGORITHM_LAMB, .clips = true}, false);
    step("Sgd", 12, {.algorithm = DSOPT_ALGORITHM_SGD}, false);
    step("Adagrad", 20, {.algorithm = DSOPT_ALGORITHM_ADAGRAD}, false);
    step("Lion", 20, {.algorithm = DSOPT_ALGORITHM_LION}, false);
    add("Chunked", 28, makes<Chunked>());
    add("Compressed", 17, makes<Compressed>());
    step("OnebitAdam", 33, {.algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM, .reduction = DSOPT_REDUCTION_COMPRESSED}, false);
    step("OnebitAdam/bits", 25,
         {.algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM,
          .reduction = DSOPT_REDUCTION_COMPRESSED,
          .flags = DSOPT_OPTIMIZER_MOMENTUM_BITS},
         false);
    step("ZeroOneAdam/local", 24, {.algorithm = DSOPT_ALGORITHM_ZERO_ONE_ADAM, .reduction = DSOPT_REDUCTION_LOCAL},
         false);
    step("OnebitLamb", 57, {.algorithm = DSOPT_ALGORITHM_ONEBIT_LAMB, .reduction = DSOPT_REDUCTION_COMPRESSED}, false);
}

} // namespace

int main(int argc, char **argv) {
    benchmark::Initialize(&argc, argv);
    int devices = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess || devices == 0) {
        std::fprintf(stderr, "bench_cuda: no CUDA device: %s\n", cudaGetErrorString(error));
        return 77;
    }
    if (argc != 2) { // interleaving across lists would allocate each list's gigabytes again and again
        std::fprintf(stderr, "usage: bench_cuda [--benchmark_...] LIST\n");
        return 2;
    }
    add_rows(argv[1]);
    benchmark::RunSpecifiedBenchmarks();
}
