// SPDX-License-Identifier: Apache-2.0
// digests LIST STEPS: trains each rule for STEPS steps over a list of shapes on the CPU and on the device, and compares
// digests of every parameter and state tensor and of the report. Prints a line per rule and `N passed, N failed`. Tests
// of the suite compare bits on short tensors; this does it at the size of a real model. Compiled with -DCPU_ONLY it
// prints the digests of the CPU, to be compared with those of another processor.
#include "bench_util.h"
#include "support/numbers.h"
#include <cstring>
#include <utility>
#ifndef CPU_ONLY
#include <cuda_runtime.h>
#endif

namespace {

using bench::check;

#ifndef CPU_ONLY
void check_cuda(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "digests: %s\n", cudaGetErrorString(error));
    std::exit(1);
}
bool has_device() {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) std::printf("no CUDA device: %s\n", cudaGetErrorString(error));
    return error == cudaSuccess && devices != 0;
}
void *allocate(size_t bytes) {
    void *memory = nullptr;
    check_cuda(cudaMalloc(&memory, bytes));
    return memory;
}
void release(void *memory) { (void)cudaFree(memory); }
void copy(void *to, const void *from, size_t bytes) {
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
    check_cuda(cudaDeviceSynchronize());
}
void enqueue_copy(void *to, const void *from, size_t bytes, void *stream) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
}
#else
bool has_device() { return false; }
void *allocate(size_t) { std::abort(); }
void release(void *) {}
void copy(void *, const void *, size_t) { std::abort(); }
void enqueue_copy(void *, const void *, size_t, void *) { std::abort(); }
#endif

/// A digest that depends on order and on every bit.
class Digest {
public:
    void add(const void *data, size_t bytes) {
        const char *position = static_cast<const char *>(data);
        for (; bytes != 0; position += step_of(bytes), bytes -= step_of(bytes)) {
            uint64_t word = 0;
            std::memcpy(&word, position, step_of(bytes));
            value_ = (value_ ^ word) * 0x9e3779b97f4a7c15u;
            value_ ^= value_ >> 29;
        }
    }
    uint64_t value() const { return value_; }

private:
    static size_t step_of(size_t bytes) { return bytes < 8 ? bytes : 8; }
    uint64_t value_ = 0x243f6a8885a308d3u;
};

/// All tensors of a list in one block of host or device memory, each aligned to 256 bytes.
class Block {
public:
    std::vector<dsopt_tensor> tensors;
    Block(bool device, const std::vector<int64_t> &sizes, int32_t dtype) : device_(device) {
        for (const int64_t n : sizes) bytes_ += (size_t(n) * test::size_of(dtype) + 255) / 256 * 256;
        data_ = device ? allocate(bytes_ + 1) : std::calloc(1, bytes_ + 1);
        size_t offset = 0;
        for (const int64_t n : sizes) {
            tensors.push_back({static_cast<char *>(data_) + offset, n, dtype, 0});
            offset += (size_t(n) * test::size_of(dtype) + 255) / 256 * 256;
        }
    }
    ~Block() {
        if (device_)
            release(data_);
        else
            std::free(data_);
    }
    Block(const Block &) = delete;
    Block &operator=(const Block &) = delete;
    void set(const std::vector<char> &host) {
        if (device_)
            copy(data_, host.data(), bytes_);
        else
            std::memcpy(data_, host.data(), bytes_);
    }
    size_t bytes() const { return bytes_; }

private:
    bool device_;
    size_t bytes_ = 0;
    void *data_ = nullptr;
};

/// Returns random values in [-size, size).
std::vector<char> values(size_t bytes, int32_t dtype, float size, uint64_t seed) {
    std::vector<char> result(bytes);
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    const size_t step = test::size_of(dtype);
    for (size_t offset = 0; offset + step <= bytes; offset += step) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        test::store(&result[offset], dtype, size * (float(state >> 40) * 0x1p-23f - 1.0f));
    }
    return result;
}

struct Rule {
    const char *name;
    int32_t algorithm, dtype;
    uint32_t flags = 0; // of the optimizer
    bool clips = false; // with a loss scale if dtype has 16 bits
    double momentum = 0;
    bool exchanges = false; // with 8 ranks that all send the same data
};

constexpr Rule kRules[] = {
    {"adamw f32", DSOPT_ALGORITHM_ADAMW, DSOPT_DTYPE_F32},
    {"adamw f16 masters clip", DSOPT_ALGORITHM_ADAMW, DSOPT_DTYPE_F16, 0, true},
    {"adamw bf16 masters clip", DSOPT_ALGORITHM_ADAMW, DSOPT_DTYPE_BF16, 0, true},
    {"adam f32 report norms", DSOPT_ALGORITHM_ADAM, DSOPT_DTYPE_F32, DSOPT_OPTIMIZER_REPORT_NORMS, true},
    {"lamb f32 clip", DSOPT_ALGORITHM_LAMB, DSOPT_DTYPE_F32, 0, true},
    {"sgd f32 momentum", DSOPT_ALGORITHM_SGD, DSOPT_DTYPE_F32, 0, false, 0.9},
    {"lion f32", DSOPT_ALGORITHM_LION, DSOPT_DTYPE_F32},
    {"adagrad bf16", DSOPT_ALGORITHM_ADAGRAD, DSOPT_DTYPE_BF16, 0, true},
    {"1-bit adam f32", DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_DTYPE_F32, 0, false, 0, true},
    {"0/1 adam f32", DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_DTYPE_F32, 0, false, 0, true},
    {"1-bit lamb f32", DSOPT_ALGORITHM_ONEBIT_LAMB, DSOPT_DTYPE_F32, 0, false, 0, true},
};

constexpr int kRanks = 8;
template <bool Device> int mirror(void *, const void *send, void *recv, int64_t bytes, void *stream) {
    for (int rank = 0; rank < kRanks; ++rank) {
        char *const to = static_cast<char *>(recv) + rank * bytes;
        if (Device)
            enqueue_copy(to, send, size_t(bytes), stream);
        else
            std::memcpy(to, send, size_t(bytes));
    }
    return 0;
}
int leave_unchanged(void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 0; }

uint64_t train(bool device, const Rule &rule, const std::vector<int64_t> &sizes, int steps) {
    DSOPT_NEW(dsopt_context_desc, context_desc);
    context_desc.backend = device ? DSOPT_BACKEND_CUDA : DSOPT_BACKEND_CPU;
    dsopt_context *context = nullptr;
    check(dsopt_context_create(&context_desc, &context));
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.flags = rule.flags;
    desc.max_norm = rule.clips ? 1.0 : 0.0;
    dsopt_scaler *scaler = nullptr;
    if (rule.clips && rule.dtype != DSOPT_DTYPE_F32) {
        DSOPT_NEW(dsopt_scaler_desc, scaling);
        scaling.init = 1024;
        scaling.window = 8;
        check(dsopt_scaler_create(context, &scaling, &scaler));
        desc.scaler = scaler;
    }
    dsopt_comm *comm = nullptr;
    if (rule.exchanges) {
        DSOPT_NEW(dsopt_comm_table, table);
        table.ranks = kRanks;
        table.memory = DSOPT_MEMORY_BACKEND;
        table.all_reduce = leave_unchanged;
        table.all_to_all = table.all_gather = device ? mirror<true> : mirror<false>;
        DSOPT_NEW(dsopt_comm_desc, comm_desc);
        comm_desc.kind = DSOPT_COMM_KIND_TABLE;
        comm_desc.table = &table;
        check(dsopt_comm_create(context, &comm_desc, &comm));
        desc.data = comm;
    }
    dsopt_optimizer *optimizer = nullptr;
    check(dsopt_optimizer_create(context, &desc, &optimizer));
    Block params(device, sizes, rule.dtype), grads(device, sizes, rule.dtype);
    params.set(values(params.bytes(), rule.dtype, 0.5f, 7));
    std::vector<dsopt_param> list(sizes.size());
    for (size_t i = 0; i < list.size(); ++i) list[i].tensor = params.tensors[i];
    dsopt_group group;
    check(dsopt_group_init(&group, sizeof group, rule.algorithm));
    group.weight_decay = 0.01;
    group.momentum = rule.momentum;
    if (rule.exchanges) group.freeze_step = steps / 4 + 1;
    check(dsopt_optimizer_add_group(optimizer, &group, list.data(), int64_t(list.size())));

    // Four sets of gradients are used in rotation: generating values takes longer than a step.
    std::vector<std::vector<char>> gradients;
    for (uint64_t seed = 0; seed < 4; ++seed) gradients.push_back(values(grads.bytes(), rule.dtype, 0.01f, seed + 11));
    DSOPT_NEW(dsopt_step, step);
    step.grads = grads.tensors.data();
    step.count = int64_t(grads.tensors.size());
    for (int t = 0; t < steps; ++t) {
        grads.set(gradients[size_t(t) % gradients.size()]);
        check(dsopt_optimizer_step(optimizer, &step));
    }

    Digest digest;
    for (const dsopt_tensor &param : params.tensors) {
        std::vector<char> host(size_t(param.numel) * test::size_of(rule.dtype));
        if (device)
            copy(host.data(), param.data, host.size());
        else
            std::memcpy(host.data(), param.data, host.size());
        digest.add(host.data(), host.size());
    }
    int64_t count = 0;
    check(dsopt_optimizer_state_count(optimizer, &count));
    for (int64_t i = 0; i < count; ++i) {
        DSOPT_NEW(dsopt_state_info, info);
        check(dsopt_optimizer_state(optimizer, i, &info));
        std::vector<char> host(size_t(info.tensor.numel) * test::size_of(info.tensor.dtype));
        check(dsopt_optimizer_export(optimizer, i, host.data(), host.size()));
        digest.add(host.data(), host.size());
    }
    DSOPT_NEW(dsopt_report, report);
    check(dsopt_optimizer_report(optimizer, &report));
    for (const double value : {report.grad_norm, report.weight_norm, report.update_norm, report.loss_scale})
        if (value == value) digest.add(&value, sizeof value);
    dsopt_optimizer_destroy(optimizer);
    dsopt_comm_destroy(comm);
    dsopt_scaler_destroy(scaler);
    dsopt_context_destroy(context);
    return digest.value();
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 3 || std::atoi(argv[2]) <= 0) {
        std::fprintf(stderr, "usage: digests LIST STEPS\n");
        return 2;
    }
#ifndef CPU_ONLY
    if (!has_device()) return 77;
#endif
    const bool compares = has_device();
    const std::vector<int64_t> sizes = bench::shapes(argv[1]);
    int passed = 0, failed = 0;
    for (const Rule &rule : kRules) {
        const uint64_t host = train(false, rule, sizes, std::atoi(argv[2]));
        const uint64_t device = compares ? train(true, rule, sizes, std::atoi(argv[2])) : host;
        (host == device ? passed : failed) += 1;
        std::printf("%s %-24s cpu %016llx", host == device ? "PASS" : "FAIL", rule.name,
                    static_cast<unsigned long long>(host));
        if (compares) std::printf(" device %016llx", static_cast<unsigned long long>(device));
        std::printf("\n");
        std::fflush(stdout);
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
