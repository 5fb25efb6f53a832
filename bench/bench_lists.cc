// SPDX-License-Identifier: Apache-2.0
// Local work of a rank in dsopt_comm_all_reduce: 16-bit and small tensors are packed into an fp32 bucket and unpacked.
// The comm's collectives do nothing here. Compared with a copy that moves as many bytes, and with one collective and
// two conversions per tensor.
#include "bench_util.h"
#include <benchmark/benchmark.h>
#include <cstring>

namespace {

using bench::check;
constexpr int kRanks = 4;

struct Fixture {
    std::vector<int64_t> sizes;
    bench::List list;
    dsopt_context *context = nullptr;
    dsopt_comm *comm = nullptr;
    Fixture(const std::string &name, int32_t dtype) : sizes(bench::shapes(name)), list(sizes, dtype) {
        DSOPT_NEW(dsopt_context_desc, desc);
        desc.threads = 1;
        check(dsopt_context_create(&desc, &context));
        comm = bench::idle_comm(context, kRanks);
    }
    ~Fixture() {
        dsopt_comm_destroy(comm);
        dsopt_context_destroy(context);
    }
    int64_t bytes(int32_t dtype) const { // of copies to the bucket and back
        return bench::total(sizes) * int64_t(2 * (bench::List::element(dtype) + 4));
    }
};

void set_bytes(benchmark::State &state, int64_t bytes) { state.SetBytesProcessed(state.iterations() * bytes); }

void BM_AllReduceList(benchmark::State &state, const std::string &name, int32_t dtype) {
    Fixture f(name, dtype);
    for (auto _ : state)
        check(dsopt_comm_all_reduce(f.comm, f.list.tensors.data(), int64_t(f.list.tensors.size()), DSOPT_OP_MEAN,
                                    nullptr));
    set_bytes(state, f.bytes(dtype));
}

/// The loop of a caller without dsopt_comm_all_reduce: one collective and two conversions per tensor.
void BM_TensorByTensor(benchmark::State &state, const std::string &name, int32_t dtype) {
    Fixture f(name, dtype);
    int64_t longest = 0;
    for (const int64_t n : f.sizes) longest = n > longest ? n : longest;
    const bench::Memory buffer(size_t(longest) * sizeof(float));
    const float share = 1.0f / kRanks;
    for (auto _ : state)
        for (const dsopt_tensor &tensor : f.list.tensors) {
            const dsopt_tensor converted{buffer.as<float>(), tensor.numel, DSOPT_DTYPE_F32, 0};
            check(dsopt_tensors_axpby(f.context, nullptr, &tensor, 0, &converted, 1, nullptr));
            check(dsopt_comm_all_reduce(f.comm, &converted, 1, DSOPT_OP_SUM, nullptr));
            check(dsopt_tensors_axpby(f.context, &share, &converted, 0, &tensor, 1, nullptr));
        }
    set_bytes(state, f.bytes(dtype));
}

void BM_Copy(benchmark::State &state, const std::string &name, int32_t dtype) {
    const int64_t bytes = bench::total(bench::shapes(name)) * int64_t(2 * (bench::List::element(dtype) + 4));
    const bench::Memory from(size_t(bytes / 2)), to(size_t(bytes / 2));
    for (auto _ : state) {
        std::memcpy(to.as<char>(), from.as<char>(), size_t(bytes / 2));
        benchmark::ClobberMemory();
    }
    set_bytes(state, bytes);
}

} // namespace

int main(int argc, char **argv) {
    for (const char *name : {"gpt2-124m", "resnet50", "10000x1000"})
        for (const int32_t dtype : {int32_t(DSOPT_DTYPE_BF16), int32_t(DSOPT_DTYPE_F16)}) {
            const std::string end = std::string("/") + name + (dtype == DSOPT_DTYPE_BF16 ? "/bf16" : "/fp16");
            benchmark::RegisterBenchmark(("BM_AllReduceList" + end).c_str(), BM_AllReduceList, name, dtype);
            benchmark::RegisterBenchmark(("BM_TensorByTensor" + end).c_str(), BM_TensorByTensor, name, dtype);
            benchmark::RegisterBenchmark(("BM_Copy" + end).c_str(), BM_Copy, name, dtype);
        }
    benchmark::Initialize(&argc, argv);
    benchmark::RunSpecifiedBenchmarks();
    return 0;
}
