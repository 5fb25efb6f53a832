// SPDX-License-Identifier: Apache-2.0
// The mixed-precision step, its lower bound and the passes that it replaces, interleaved in one run on one machine:
//   BM_Probe30     the step's memory traffic without its arithmetic: 2 + 28 bytes per element
//   BM_Mixed       fp16 or bf16 gradients and weights, fp32 masters: overflow check, norm, clip, AdamW, 16-bit copy
//   BM_MixedUpdate the second pass alone: no scaling, no clipping
//   BM_Fp32        AdamW on fp32 weights, 28 bytes per element
//   BM_SevenPass   the original's order of passes, each vectorized and on all threads: 70 bytes per element
#include "bench_util.h"
#include <benchmark/benchmark.h>
#include <cmath>
#include <cstring>
#include <map>
#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using bench::check;
using bench::List;

struct Engine;

/// Arrays and engines of one list of shapes, kept for the whole run. So no row includes page faults, and a repetition
/// can be as short as one step.
struct Fixture {
    std::map<int, std::unique_ptr<Engine>> engines;
    ~Fixture();
    Engine &engine(bool mixed, int32_t dtype, bool clip);
    std::vector<int64_t> sizes;
    int64_t numel;
    List grads16, params16, masters, exp_avg, exp_avg_sq, grads32, flat32;
    explicit Fixture(const std::string &name) :
        sizes(bench::shapes(name)),
        numel(bench::total(sizes)),
        grads16(sizes, DSOPT_DTYPE_F16),
        params16(sizes, DSOPT_DTYPE_F16),
        masters(sizes, DSOPT_DTYPE_F32),
        exp_avg(sizes, DSOPT_DTYPE_F32),
        exp_avg_sq(sizes, DSOPT_DTYPE_F32),
        grads32(sizes, DSOPT_DTYPE_F32),
        flat32(sizes, DSOPT_DTYPE_F32) {
        for (size_t i = 0; i < sizes.size(); ++i)
            for (int64_t k = 0; k < sizes[i]; ++k) {
                static_cast<uint16_t *>(grads16.tensors[i].data)[k] = uint16_t(0x1400 + (k & 0x3ff)); // about 1e-3
                static_cast<float *>(grads32.tensors[i].data)[k] = 1e-3f + 1e-6f * float(k & 0x3ff);
                static_cast<float *>(masters.tensors[i].data)[k] = 0.5f;
            }
    }
    static Fixture &of(const std::string &name) {
        static std::map<std::string, std::unique_ptr<Fixture>> all;
        auto &entry = all[name];
        if (!entry) {
            all.clear(); // one list at a time: the largest takes gigabytes
            entry = nullptr;
            return *(all[name] = std::make_unique<Fixture>(name));
        }
        return *entry;
    }
};

struct Engine {
    dsopt_context *context = nullptr;
    dsopt_scaler *scaler = nullptr;
    dsopt_optimizer *optimizer = nullptr;
    Engine(Fixture &f, bool mixed, int32_t grad_dtype, bool clip = true) {
        check(dsopt_context_create(nullptr, &context));
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        std::vector<dsopt_tensor> &weights = mixed ? f.params16.tensors : f.masters.tensors;
        if (mixed && clip) {
            DSOPT_NEW(dsopt_scaler_desc, scaling);
            scaling.init = 1024;
            scaling.window = 1 << 30; // no growth, which would make moments denormal
            check(dsopt_scaler_create(context, &scaling, &scaler));
            desc.scaler = scaler;
            desc.max_norm = 1.0;
        }
        check(dsopt_optimizer_create(context, &desc, &optimizer));
        std::vector<dsopt_param> params(f.sizes.size());
        for (size_t i = 0; i < params.size(); ++i) {
            params[i].tensor = weights[i];
            if (mixed) params[i].tensor.dtype = grad_dtype;
        }
        dsopt_group group;
        check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
        group.weight_decay = 0.01;
        check(dsopt_optimizer_add_group(optimizer, &group, params.data(), int64_t(params.size())));
        std::vector<dsopt_tensor> state;
        int64_t count = 0;
        check(dsopt_optimizer_state_count(optimizer, &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            check(dsopt_optimizer_state(optimizer, i, &info));
            if (info.param >= 0) { // the probe and the peers work on the same memory
                List &list = !std::strcmp(info.name, "master")    ? f.masters
                             : !std::strcmp(info.name, "exp_avg") ? f.exp_avg
                                                                  : f.exp_avg_sq;
                info.tensor.data = list.tensors[size_t(info.param)].data;
            }
            state.push_back(info.tensor);
        }
        check(dsopt_optimizer_bind(optimizer, DSOPT_BIND_STATE, state.data(), count));
    }
    ~Engine() {
        dsopt_optimizer_destroy(optimizer);
        dsopt_scaler_destroy(scaler);
        dsopt_context_destroy(context);
    }
};

Fixture::~Fixture() = default;
Engine &Fixture::engine(bool mixed, int32_t dtype, bool clip) {
    auto &entry = engines[(mixed ? 10 : 0) + (clip ? 100 : 0) + dtype];
    if (!entry) entry = std::make_unique<Engine>(*this, mixed, dtype, clip);
    return *entry;
}

void set_counters(benchmark::State &state, const Fixture &f, int bytes) {
    state.SetBytesProcessed(state.iterations() * f.numel * bytes);
    state.counters["ns/el"] = benchmark::Counter(double(f.numel), benchmark::Counter::kIsIterationInvariantRate |
                                                                      benchmark::Counter::kInvert);
}

void run_step(benchmark::State &state, Fixture &f, bool mixed, int32_t dtype, bool clip = true) {
    Engine &engine = f.engine(mixed, dtype, clip);
    std::vector<dsopt_tensor> grads = mixed ? f.grads16.tensors : f.grads32.tensors;
    if (mixed)
        for (dsopt_tensor &grad : grads) {
            grad.dtype = dtype;
            // About 1e-3 in either dtype. With the other dtype's bits the values would be denormal.
            for (int64_t k = 0; k < grad.numel; ++k)
                static_cast<uint16_t *>(grad.data)[k] =
                    uint16_t((dtype == DSOPT_DTYPE_F16 ? 0x1400 : 0x3a80) + (k & 0x7f));
        }
    DSOPT_NEW(dsopt_step, step);
    step.grads = grads.data();
    step.count = int64_t(grads.size());
    check(dsopt_optimizer_step(engine.optimizer, &step));
    for (auto _ : state) check(dsopt_optimizer_step(engine.optimizer, &step));
    set_counters(state, f, !mixed ? 28 : clip ? 30 : 28);
}
void BM_Mixed(benchmark::State &state, const std::string &list, int32_t dtype) {
    run_step(state, Fixture::of(list), true, dtype);
}
/// The second pass alone.
void BM_MixedUpdate(benchmark::State &state, const std::string &list, int32_t dtype) {
    run_step(state, Fixture::of(list), true, dtype, false);
}
void BM_Fp32(benchmark::State &state, const std::string &list) {
    run_step(state, Fixture::of(list), false, DSOPT_DTYPE_F32);
}

/// Calls body(tensor, begin, end) on all threads, each with one range of the whole list: fewer boundaries than in the
/// engine, the same number of bytes.
template <class Body> void for_ranges(const Fixture &f, const Body &body) {
#pragma omp parallel
    {
        const int part = omp_get_thread_num(), parts = omp_get_num_threads();
        int64_t begin = f.numel * part / parts, end = f.numel * (part + 1) / parts, offset = 0;
        for (size_t i = 0; i < f.sizes.size(); ++i) {
            const int64_t n = f.sizes[i], b = std::max<int64_t>(0, begin - offset), e = std::min(n, end - offset);
            if (b < e) body(i, b, e);
            offset += n;
        }
    }
}

void BM_Probe30(benchmark::State &state, const std::string &list) {
    Fixture &f = Fixture::of(list);
    for (auto _ : state) {
        uint32_t sum = 0;
#pragma omp parallel reduction(+ : sum)
        {
            const int part = omp_get_thread_num(), parts = omp_get_num_threads();
            const int64_t begin = f.numel * part / parts, end = f.numel * (part + 1) / parts;
            int64_t offset = 0;
            for (size_t i = 0; i < f.sizes.size(); ++i) {
                const auto *g = static_cast<const uint16_t *>(f.grads16.tensors[i].data);
                const int64_t b = std::max<int64_t>(0, begin - offset), e = std::min(f.sizes[i], end - offset);
                uint16_t any = 0;
                for (int64_t k = b; k < e; ++k) any |= g[k];
                sum += any;
                offset += f.sizes[i];
            }
        }
        benchmark::DoNotOptimize(sum);
        for_ranges(f, [&](size_t i, int64_t b, int64_t e) {
            const auto *__restrict g = static_cast<const uint16_t *>(f.grads16.tensors[i].data);
            auto *__restrict p = static_cast<float *>(f.masters.tensors[i].data);
            auto *__restrict m = static_cast<float *>(f.exp_avg.tensors[i].data);
            auto *__restrict v = static_cast<float *>(f.exp_avg_sq.tensors[i].data);
            auto *__restrict c = static_cast<uint16_t *>(f.params16.tensors[i].data);
            int64_t k = b;
#if defined(__AVX512F__)
            // Non-temporal stores to the one array that is only written, as in the engine's fastest variant.
            for (; k < e && reinterpret_cast<uintptr_t>(c + k) % 64 != 0; ++k)
                p[k] += 1, m[k] += 1, v[k] += 1, c[k] = g[k];
            for (; k + 32 <= e; k += 32) {
                const __m512i x = _mm512_loadu_si512(g + k);
                for (int h = 0; h < 32; h += 16) {
                    const __m512 one = _mm512_set1_ps(1e-9f);
                    _mm512_storeu_ps(p + k + h, _mm512_add_ps(_mm512_loadu_ps(p + k + h), one));
                    _mm512_storeu_ps(m + k + h, _mm512_add_ps(_mm512_loadu_ps(m + k + h), one));
                    _mm512_storeu_ps(v + k + h, _mm512_add_ps(_mm512_loadu_ps(v + k + h), one));
                }
                _mm512_stream_si512(reinterpret_cast<__m512i *>(c + k), x);
            }
            _mm_sfence();
#endif
            for (; k < e; ++k) {
                p[k] += 1e-9f;
                m[k] += 1e-9f;
                v[k] += 1e-9f;
                c[k] = g[k];
            }
        });
    }
    set_counters(state, f, 30);
}

#if defined(__F16C__)
float half(uint16_t h) { return _cvtsh_ss(h); }
uint16_t to_half(float x) { return _cvtss_sh(x, 0); }
#else
float half(uint16_t h) { return float(h) * 1e-8f; }
uint16_t to_half(float x) { return uint16_t(x * 1e8f); }
#endif

/// The passes of FP16_Optimizer.step: overflow check through an fp32 copy and its sum (10 bytes per element), cast (6),
/// flatten (8), norm (4), unscale (8), AdamW (28), copy back (6).
void BM_SevenPass(benchmark::State &state, const std::string &list) {
    Fixture &f = Fixture::of(list);
    const auto g16 = [&](size_t i) { return static_cast<const uint16_t *>(f.grads16.tensors[i].data); };
    const auto f32 = [](List &l, size_t i) { return static_cast<float *>(l.tensors[i].data); };
    for (auto _ : state) {
        for_ranges(f, [&](size_t i, int64_t b, int64_t e) {
            float *__restrict copy = f32(f.flat32, i);
            const uint16_t *__restrict g = g16(i);
            for (int64_t k = b; k < e; ++k) copy[k] = half(g[k]);
        });
        double total = 0;
        for_ranges(f, [&](size_t i, int64_t b, int64_t e) {
            const float *copy = f32(f.flat32, i);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t k = b; k < e; ++k) sum += copy[k];
            benchmark::DoNotOptimize(sum);
        });
        for_ranges(f, [&](size_t i, int64_t b, int64_t e) {
            float *__restrict cast = f32(f.grads32, i);
            const uint16_t *__restrict g = g16(i);
            for (int64_t k = b; k < e; ++k) cast[k] = half(g[k]);
        });
        for_ranges(f, [&](size_t i, int64_t b, int64_t e) {
            std::memcpy(f32(f.flat32, i) + b, f32(f.grads32, i) + b, size_t(e - b) * 4);
        });
        for_ranges(f, [&](size_t i, int64_t b, int64_t e) {
            const float *flat = f32(f.flat32, i);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t k = b; k < e; ++k) sum += flat[k] * flat[k];
#pragma omp atomic
            total += double(sum);
        });
        const float inverse = float(1.0 / (1024.0 * std::max(1.0, std::sqrt(total) / 1024.0)));
        for_ranges(f, [&](size_t i, int64_t b, int64_t e) {
            float *flat = f32(f.flat32, i);
            for (int64_t k = b; k < e; ++k) flat[k] *= inverse;
        });
        for_ranges(f, [&](size_t i, int64_t b, int64_t e) {
            const float *__restrict g = f32(f.flat32, i);
            float *__restrict p = f32(f.masters, i), *__restrict m = f32(f.exp_avg, i),
                              *__restrict v = f32(f.exp_avg_sq, i);
            for (int64_t k = b; k < e; ++k) {
                m[k] = 0.9f * m[k] + 0.1f * g[k];
                v[k] = 0.999f * v[k] + 0.001f * (g[k] * g[k]);
                p[k] -= 1e-3f * ((m[k] / 0.5f) / (std::sqrt(v[k] / 0.5f) + 1e-8f) + 0.01f * p[k]);
            }
        });
        for_ranges(f, [&](size_t i, int64_t b, int64_t e) {
            uint16_t *__restrict c = static_cast<uint16_t *>(f.params16.tensors[i].data);
            const float *__restrict p = f32(f.masters, i);
            for (int64_t k = b; k < e; ++k) c[k] = to_half(p[k]);
        });
    }
    set_counters(state, f, 70);
}

} // namespace

int main(int argc, char **argv) {
    benchmark::Initialize(&argc, argv);
    std::vector<std::string> lists{"gpt2-124m", "bert-large", "resnet50", "10000x1000", "1x1048576"};
    if (argc > 1) lists.assign(argv + 1, argv + argc);
    for (const std::string &list : lists) {
        const auto add = [&](const std::string &name, auto function, auto... rest) {
            benchmark::RegisterBenchmark((name + "/" + list).c_str(), function, list, rest...)
                ->UseRealTime()
                ->Unit(benchmark::kMillisecond);
        };
        add("BM_Probe30", BM_Probe30);
        add("BM_Mixed/f16", BM_Mixed, DSOPT_DTYPE_F16);
        add("BM_Mixed/bf16", BM_Mixed, DSOPT_DTYPE_BF16);
        add("BM_MixedUpdate/f16", BM_MixedUpdate, DSOPT_DTYPE_F16);
        add("BM_MixedUpdate/bf16", BM_MixedUpdate, DSOPT_DTYPE_BF16);
        add("BM_Fp32", BM_Fp32);
        add("BM_SevenPass", BM_SevenPass);
    }
    benchmark::RunSpecifiedBenchmarks();
}
