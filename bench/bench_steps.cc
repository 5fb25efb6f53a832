// SPDX-License-Identifier: Apache-2.0
// bench_steps [LIST...]: times a step of each rule in each precision on each list (Step/RULE/DTYPE/LIST), and the same
// memory traffic without the arithmetic (Probe/RULE/DTYPE/LIST), on the same memory. bench/ratios.py interleaves them.
//   f32        weights and gradients in fp32
//   f16, bf16  both in 16 bits with fp32 masters: overflow check, loss scale, norm, clipping, step, 16-bit copy
//   delta      fp32; writes the change of the weights to an output and does not modify the weights
// 1-bit Adam is in its compressed stage, as one rank of 8 whose collectives do nothing. The probe does not include the
// server's part.
#include "bench_util.h"
#include <benchmark/benchmark.h>
#include <cstring>
#include <map>
#include <omp.h>
#include <optional>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

using bench::check;
using bench::List;

/// One pass over a list: number of arrays that are read, read and written, and only written. 16-bit gradients and
/// copies are counted separately.
struct Pass {
    int reads = 0, changes = 0, writes = 0, reads16 = 0, writes16 = 0;
    int bytes() const { return 4 * (reads + 2 * changes + writes) + 2 * (reads16 + writes16); }
};
struct Rule {
    const char *name;
    int32_t algorithm;
    double momentum;
    std::vector<Pass> passes; // fp32
};
const std::vector<Rule> kRules = {
    {"adamw", DSOPT_ALGORITHM_ADAMW, 0, {{.reads = 1, .changes = 3}}},
    {"sgd", DSOPT_ALGORITHM_SGD, 0, {{.reads = 1, .changes = 1}}},
    {"momentum", DSOPT_ALGORITHM_SGD, 0.9, {{.reads = 1, .changes = 2}}},
    {"lion", DSOPT_ALGORITHM_LION, 0, {{.reads = 1, .changes = 2}}},
    {"adagrad", DSOPT_ALGORITHM_ADAGRAD, 0, {{.reads = 1, .changes = 2}}},
    {"lamb", DSOPT_ALGORITHM_LAMB, 0, {{.reads = 2, .changes = 2}, {.reads = 2, .changes = 1}}},
    // Pass 1: gradient, momentum and residual to sign bits. Pass 2: decoded momentum and weights.
    {"onebit_adam",
     DSOPT_ALGORITHM_ONEBIT_ADAM,
     0,
     {{.reads = 2, .changes = 1}, {.reads = 1, .changes = 1, .writes = 1}}},
};
constexpr const char *kForms[] = {"f32", "f16", "bf16", "delta"};

int32_t dtype_of(const std::string &form) {
    return form == "f16" ? DSOPT_DTYPE_F16 : form == "bf16" ? DSOPT_DTYPE_BF16 : DSOPT_DTYPE_F32;
}
/// Returns the passes of a rule in a form.
std::vector<Pass> passes_of(const Rule &rule, const std::string &form) {
    std::vector<Pass> passes = rule.passes;
    if (form == "delta") { // the weights are read, the output is written
        --passes.back().changes, ++passes.back().reads, ++passes.back().writes;
    } else if (form != "f32") {
        --passes.front().reads, ++passes.front().reads16;
        ++passes.back().writes16;
        passes.insert(passes.begin(), Pass{.reads16 = 1});
    }
    return passes;
}

constexpr int kFloats = 4;
/// Memory of all steps of a form on a list.
struct Arrays {
    std::vector<int64_t> sizes;
    int64_t numel;
    std::vector<std::unique_ptr<List>> f32; // weights or masters, moments and other state
    std::optional<List> grads, half;
    Arrays(const std::string &list, int32_t dtype) : sizes(bench::shapes(list)), numel(bench::total(sizes)) {
        for (int i = 0; i < kFloats; ++i) f32.push_back(std::make_unique<List>(sizes, DSOPT_DTYPE_F32));
        grads.emplace(sizes, dtype);
        if (dtype != DSOPT_DTYPE_F32) half.emplace(sizes, dtype);
        for (size_t t = 0; t < sizes.size(); ++t)
            for (int64_t i = 0; i < sizes[t]; ++i) { // about 1e-3, so that no value is denormal
                const int low = int(i & 0x7f);
                void *const grad = grads->tensors[t].data;
                if (dtype == DSOPT_DTYPE_F32)
                    static_cast<float *>(grad)[i] = 1e-3f + 1e-6f * float(low);
                else
                    static_cast<uint16_t *>(grad)[i] = uint16_t((dtype == DSOPT_DTYPE_F16 ? 0x1400 : 0x3a80) + low);
                static_cast<float *>(f32[0]->tensors[t].data)[i] = 0.5f;
            }
    }
    float *floats(int array, size_t tensor) const {
        return static_cast<float *>(f32[size_t(array)]->tensors[tensor].data);
    }
};

// ------------------------------------------------------------------------------------------------------------- probes
#if defined(__AVX512F__)
void store_streaming(float *to, float x) { _mm512_stream_ps(to, _mm512_set1_ps(x)); }
void store_streaming(uint16_t *to, uint16_t x) {
    _mm256_stream_si256(reinterpret_cast<__m256i *>(to), _mm256_set1_epi16(short(x)));
}
void fence() { _mm_sfence(); }
#else
template <class T> void store_streaming(T *to, T x) {
    for (int i = 0; i < 16; ++i) to[i] = x;
}
void fence() {}
#endif

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

/// Processes elements [begin, end) of a tensor; `begin` and all arrays are aligned to 64 bytes.
template <int Reads, int Changes, int Writes, int Reads16, int Writes16>
void move(const Arrays &arrays, size_t tensor, int64_t begin, int64_t end) {
    const float *read[Reads + 1];
    float *change[Changes + 1], *write[Writes + 1];
    int array = 0;
    for (int i = 0; i < Changes; ++i) change[i] = arrays.floats(array++, tensor);
    for (int i = 0; i < Writes; ++i) write[i] = arrays.floats(array++, tensor);
    const bool grads32 = !Reads16 && !arrays.half;
    for (int i = 0; i < Reads; ++i)
        read[i] = i == 0 && grads32 ? static_cast<const float *>(arrays.grads->tensors[tensor].data)
                                    : arrays.floats(array++, tensor);
    const auto *const grad = static_cast<const uint16_t *>(arrays.grads->tensors[tensor].data);
    auto *const copy = Writes16 ? static_cast<uint16_t *>(arrays.half->tensors[tensor].data) : nullptr;
    Floats sum = {};
    Halves any = {};
    const int64_t whole = begin + (end - begin) / 16 * 16;
    for (int64_t k = begin; k < whole; k += 16) {
        for (int i = 0; i < Reads; ++i) sum += *reinterpret_cast<const Floats *>(read[i] + k);
        for (int i = 0; i < Changes; ++i) *reinterpret_cast<Floats *>(change[i] + k) += 1e-9f;
        if constexpr (Reads16 > 0) any |= *reinterpret_cast<const Halves *>(grad + k);
        for (int i = 0; i < Writes; ++i) store_streaming(write[i] + k, 1e-3f);
        if constexpr (Writes16 > 0) store_streaming(copy + k, uint16_t(0x3800));
    }
    for (int64_t k = whole; k < end; ++k) {
        for (int i = 0; i < Reads; ++i) sum[0] += read[i][k];
        for (int i = 0; i < Changes; ++i) change[i][k] += 1e-9f;
        if constexpr (Reads16 > 0) any[0] |= grad[k];
        for (int i = 0; i < Writes; ++i) write[i][k] = 1e-3f;
        if constexpr (Writes16 > 0) copy[k] = 0x3800;
    }
    if (Writes + Writes16 > 0) fence();
    benchmark::DoNotOptimize(sum);
    benchmark::DoNotOptimize(any);
}

using Move = void (*)(const Arrays &, size_t, int64_t, int64_t);
template <int... Counts> bool is(const Pass &pass) {
    const int counts[] = {Counts...}, wanted[] = {pass.reads, pass.changes, pass.writes, pass.reads16, pass.writes16};
    return std::memcmp(counts, wanted, sizeof wanted) == 0;
}
template <int Reads, int Changes, int Writes, int Reads16, int Writes16> Move if_is(const Pass &pass) {
    return is<Reads, Changes, Writes, Reads16, Writes16>(pass) ? move<Reads, Changes, Writes, Reads16, Writes16>
                                                               : nullptr;
}
Move move_of(const Pass &p) {
    for (const Move move :
         {if_is<0, 0, 0, 1, 0>(p), if_is<1, 3, 0, 0, 0>(p), if_is<1, 1, 0, 0, 0>(p), if_is<1, 2, 0, 0, 0>(p),
          if_is<2, 2, 0, 0, 0>(p), if_is<2, 1, 0, 0, 0>(p), if_is<1, 1, 1, 0, 0>(p), if_is<0, 3, 0, 1, 1>(p),
          if_is<0, 1, 0, 1, 1>(p), if_is<0, 2, 0, 1, 1>(p), if_is<1, 2, 0, 1, 0>(p), if_is<2, 1, 0, 0, 1>(p),
          if_is<1, 1, 0, 1, 0>(p), if_is<1, 1, 1, 0, 1>(p), if_is<2, 2, 1, 0, 0>(p), if_is<2, 0, 1, 0, 0>(p),
          if_is<2, 1, 1, 0, 0>(p), if_is<3, 0, 1, 0, 0>(p)})
        if (move != nullptr) return move;
    std::fprintf(stderr, "bench_steps: no probe for the arrays of a pass\n");
    std::exit(1);
}

/// Runs `move` on all threads, each with one range of the whole list: fewer boundaries than in the engine, the same
/// number of bytes.
void sweep(const Arrays &arrays, Move move) {
#pragma omp parallel
    {
        const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        const int64_t begin = arrays.numel * part / parts, end = arrays.numel * (part + 1) / parts;
        int64_t offset = 0;
        for (size_t i = 0; i < arrays.sizes.size() && offset < end; ++i) {
            const int64_t n = arrays.sizes[i];
            const auto within = [&](int64_t index) { // element of this tensor, aligned to 64 bytes
                return index <= offset ? 0 : index >= offset + n ? n : (index - offset) / 16 * 16;
            };
            if (const int64_t b = within(begin), e = within(end); b < e) move(arrays, i, b, e);
            offset += n;
        }
    }
}

// -------------------------------------------------------------------------------------------------------------- steps
class Engine {
public:
    Engine(const Rule &rule, const std::string &form, Arrays &arrays) : arrays_(arrays), delta_(form == "delta") {
        const bool mixed = form == "f16" || form == "bf16", exchanges = rule.algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM;
        check(dsopt_context_create(nullptr, &context_));
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        if (mixed) {
            DSOPT_NEW(dsopt_scaler_desc, scaling);
            scaling.init = 1024;
            scaling.window = 1 << 30; // no growth, which would make moments denormal
            check(dsopt_scaler_create(context_, &scaling, &scaler_));
            desc.scaler = scaler_;
            desc.max_norm = 1;
        }
        if (exchanges) desc.data = comm_ = bench::idle_comm(context_, 8);
        check(dsopt_optimizer_create(context_, &desc, &optimizer_));
        dsopt_group group;
        check(dsopt_group_init(&group, sizeof group, rule.algorithm));
        group.momentum = rule.momentum;
        group.weight_decay = 0.01;
        if (exchanges) group.freeze_step = 1;
        std::vector<dsopt_param> params(arrays.sizes.size());
        for (size_t i = 0; i < params.size(); ++i)
            params[i].tensor = mixed ? arrays.half->tensors[i] : arrays.f32[0]->tensors[i];
        check(dsopt_optimizer_add_group(optimizer_, &group, params.data(), int64_t(params.size())));
        bind();
        step_.size = sizeof step_;
        step_.grads = arrays.grads->tensors.data();
        step_.count = int64_t(arrays.sizes.size());
        if (delta_) {
            step_.out = arrays.f32.back()->tensors.data();
            step_.flags = DSOPT_STEP_DELTA;
        }
        for (int i = 0; i < 16; ++i)
            run(); // reaches the compressed stage, and ends the trial of prefetching (cpu/prefetch.h)
    }
    ~Engine() {
        dsopt_optimizer_destroy(optimizer_);
        dsopt_comm_destroy(comm_);
        dsopt_scaler_destroy(scaler_);
        dsopt_context_destroy(context_);
    }
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;
    void run() { check(dsopt_optimizer_step(optimizer_, &step_)); }

private:
    /// Binds state with as many elements as the parameters to the arrays of the probe. The engine allocates all other
    /// state.
    void bind() {
        std::vector<dsopt_tensor> state;
        std::map<std::string, size_t> array = {{"master", 0}};
        int64_t count = 0;
        check(dsopt_optimizer_state_count(optimizer_, &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            check(dsopt_optimizer_state(optimizer_, i, &info));
            const bool whole = info.param >= 0 && info.tensor.numel == arrays_.sizes[size_t(info.param)] &&
                               info.tensor.dtype == DSOPT_DTYPE_F32 && std::strstr(info.name, "error") == nullptr;
            if (whole) {
                const size_t index = array.emplace(info.name, array.size()).first->second;
                if (index + delta_ >= arrays_.f32.size()) std::abort();
                info.tensor.data = arrays_.f32[index]->tensors[size_t(info.param)].data;
            }
            state.push_back(info.tensor);
        }
        check(dsopt_optimizer_bind(optimizer_, DSOPT_BIND_STATE, state.data(), count));
    }

    Arrays &arrays_;
    const bool delta_;
    dsopt_context *context_ = nullptr;
    dsopt_scaler *scaler_ = nullptr;
    dsopt_comm *comm_ = nullptr;
    dsopt_optimizer *optimizer_ = nullptr;
    dsopt_step step_ = {};
};

/// Memory of one list and form, and engines that use it. Only one fixture is kept, because the largest list takes
/// gigabytes. The engines are kept too, so that no row includes page faults and a repetition can be as short as one
/// step.
struct Fixture {
    Arrays arrays;
    std::map<std::string, std::unique_ptr<Engine>> engines;
    static Fixture &of(const std::string &list, const std::string &form) {
        static std::map<std::string, std::unique_ptr<Fixture>> all;
        const std::string name = list + "/" + form;
        auto found = all.find(name);
        if (found == all.end()) {
            all.clear();
            found = all.emplace(name, new Fixture{{list, dtype_of(form)}, {}}).first;
        }
        return *found->second;
    }
    Engine &engine(const Rule &rule, const std::string &form) {
        auto &entry = engines[rule.name];
        if (!entry) entry = std::make_unique<Engine>(rule, form, arrays);
        return *entry;
    }
};

void set_counters(benchmark::State &state, const Arrays &arrays, const std::vector<Pass> &passes) {
    int bytes = 0;
    for (const Pass &pass : passes) bytes += pass.bytes();
    state.SetBytesProcessed(state.iterations() * arrays.numel * bytes);
    state.counters["B/el"] = bytes;
}
void step(benchmark::State &state, const Rule &rule, const std::string &form, const std::string &list) {
    Fixture &fixture = Fixture::of(list, form);
    Engine &engine = fixture.engine(rule, form);
    engine.run();
    for (auto _ : state) engine.run();
    set_counters(state, fixture.arrays, passes_of(rule, form));
}
void probe(benchmark::State &state, const Rule &rule, const std::string &form, const std::string &list) {
    const Arrays &arrays = Fixture::of(list, form).arrays;
    const std::vector<Pass> passes = passes_of(rule, form);
    std::vector<Move> moves;
    for (const Pass &pass : passes) moves.push_back(move_of(pass));
    for (const Move move : moves) sweep(arrays, move);
    for (auto _ : state)
        for (const Move move : moves) sweep(arrays, move);
    set_counters(state, arrays, passes);
}

} // namespace

int main(int argc, char **argv) {
    benchmark::Initialize(&argc, argv);
    std::vector<std::string> lists{"gpt2-124m",  "bert-large", "resnet50", "10000x1000",
                                   "1x67108864", "1x1048576",  "1x65536"};
    if (argc > 1) lists.assign(argv + 1, argv + argc);
    for (const std::string &list : lists)
        for (const std::string form : kForms)
            for (const Rule &rule : kRules) {
                // an unsupported combination
                if (form == "delta" && rule.algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM) continue;
                const std::string name = std::string(rule.name) + "/" + form + "/" + list;
                const auto add = [&](const char *kind, auto function) {
                    benchmark::RegisterBenchmark(
                        (kind + name).c_str(),
                        [=, &rule](benchmark::State &state) { function(state, rule, form, list); })
                        ->UseRealTime()
                        ->Unit(benchmark::kMillisecond);
                };
                add("Step/", step);
                add("Probe/", probe);
            }
    benchmark::RunSpecifiedBenchmarks();
}
