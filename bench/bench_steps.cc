// SPDX-License-Identifier: Apache-2.0
// bench_steps [LIST...]: times a step of each rule in each precision on each list (Step/RULE/DTYPE/LIST), and the same
// memory traffic without the arithmetic (Probe/RULE/DTYPE/LIST), on the same memory. bench/ratios.py interleaves them.
//   f32        weights and gradients in fp32
//   f16, bf16  both in 16 bits with fp32 masters: overflow check, loss scale, norm, clipping, step, 16-bit copy
//   delta      fp32; writes the change of the weights to an output and does not modify the weights
//   remainder  as bf16, with masters of bf16 + 16 bits (DSOPT_MASTERS_REMAINDER)
//   random     as bf16, without masters, with stochastic rounding
// A rule such as adamw_e4m3 stores its moments in low precision (kFormats); adamw has them in fp32.
// Muon steps the matrices of the layers of a list, with BF16 products (muon) or F32 (muon_f32), and AdamW the other
// tensors; its probe has the traffic of Muon's passes over all tensors, without the products.
// 1-bit Adam is in its compressed stage, as one rank of 8 whose collectives do nothing. The probe does not include the
// server's part.
#include "bench_util.h"
#include <algorithm>
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
/// copies are counted separately. `low16`, `low8`: arrays of weights, remainders and moments in low precision.
struct Pass {
    int reads = 0, changes = 0, writes = 0, reads16 = 0, writes16 = 0;
    int low16 = 0, low8 = 0;
    bool stores_low = true; // they are read and written, else only read
    /// Per element. An 8-bit array has a scale of 4 bytes per block.
    double bytes() const {
        const double low = 2 * low16 + (1 + 4.0 / kBlock) * low8;
        return 4 * (reads + 2 * changes + writes) + 2 * (reads16 + writes16) + (stores_low ? 2 : 1) * low;
    }
    static constexpr int kBlock = 256;
};
/// Formats of moments, enum dsopt_moment.
struct Formats {
    const char *name;
    int32_t exp_avg, exp_avg_sq;
};
constexpr Formats kFormats[] = {{"", DSOPT_MOMENT_F32, DSOPT_MOMENT_F32},
                                {"bf16", DSOPT_MOMENT_BF16, DSOPT_MOMENT_BF16_RANDOM},
                                {"e4m3", DSOPT_MOMENT_E4M3, DSOPT_MOMENT_BF16_RANDOM},
                                {"q8", DSOPT_MOMENT_Q8, DSOPT_MOMENT_Q8}};
enum { kF32, kBf16, kE4m3, kQ8 }; // indices of kFormats
bool has_scales(int32_t moment) { return moment >= DSOPT_MOMENT_E4M3; }

struct Rule {
    std::string name;
    int32_t algorithm;
    double momentum;
    std::vector<Pass> passes; // fp32 weights and gradients
    Formats formats = kFormats[kF32];
    int32_t products = 0; // Muon: dtype of their inputs
    bool low() const { return formats.exp_avg != DSOPT_MOMENT_F32; }
};
/// Returns a rule of two moments in low precision. Of its passes only the first one stores moments.
Rule in_format(const Rule &rule, int format) {
    Rule low = rule;
    low.formats = kFormats[format];
    low.name += std::string("_") + low.formats.name;
    for (Pass &pass : low.passes) {
        for (const int32_t moment : {low.formats.exp_avg, low.formats.exp_avg_sq})
            ++(has_scales(moment) ? pass.low8 : pass.low16);
        pass.stores_low = &pass == low.passes.data();
        (pass.stores_low ? pass.changes : pass.reads) -= 2;
    }
    return low;
}
const Rule kAdamW = {"adamw", DSOPT_ALGORITHM_ADAMW, 0, {{.reads = 1, .changes = 3}}};
// Pass 1 writes the update before it is orthogonalised, pass 2 reads it afterwards.
const std::vector<Pass> kMuonPasses = {{.reads = 1, .changes = 1, .writes = 1}, {.reads = 1, .changes = 1}};
const Rule kLamb = {"lamb", DSOPT_ALGORITHM_LAMB, 0, {{.reads = 2, .changes = 2}, {.reads = 2, .changes = 1}}};
const std::vector<Rule> kRules = {
    kAdamW,
    in_format(kAdamW, kBf16),
    in_format(kAdamW, kE4m3),
    in_format(kAdamW, kQ8),
    {"sgd", DSOPT_ALGORITHM_SGD, 0, {{.reads = 1, .changes = 1}}},
    {"momentum", DSOPT_ALGORITHM_SGD, 0.9, {{.reads = 1, .changes = 2}}},
    {"lion", DSOPT_ALGORITHM_LION, 0, {{.reads = 1, .changes = 2}}},
    {"adagrad", DSOPT_ALGORITHM_ADAGRAD, 0, {{.reads = 1, .changes = 2}}},
    kLamb,
    in_format(kLamb, kE4m3),
    in_format(kLamb, kQ8),
    {"muon", DSOPT_ALGORITHM_MUON, 0.95, kMuonPasses, kFormats[kF32], DSOPT_DTYPE_BF16},
    {"muon_f32", DSOPT_ALGORITHM_MUON, 0.95, kMuonPasses, kFormats[kF32], DSOPT_DTYPE_F32},
    // Pass 1: gradient, momentum and residual to sign bits. Pass 2: decoded momentum and weights.
    {"onebit_adam",
     DSOPT_ALGORITHM_ONEBIT_ADAM,
     0,
     {{.reads = 2, .changes = 1}, {.reads = 1, .changes = 1, .writes = 1}}},
};
constexpr const char *kForms[] = {"f32", "f16", "bf16", "delta", "remainder", "random"};
/// True for forms whose weights have no fp32 master.
bool is_low(const std::string &form) { return form == "remainder" || form == "random"; }
bool has_form(const Rule &rule, const std::string &form) {
    if (rule.algorithm == DSOPT_ALGORITHM_MUON) return form == "f32" || form == "bf16";
    if (is_low(form)) return rule.algorithm == DSOPT_ALGORITHM_ADAMW;
    if (rule.low()) return form == "f32" || (form == "bf16" && rule.algorithm == DSOPT_ALGORITHM_ADAMW);
    return form != "delta" || rule.algorithm != DSOPT_ALGORITHM_ONEBIT_ADAM; // an unsupported combination
}

int32_t dtype_of(const std::string &form) {
    return form == "f16" ? DSOPT_DTYPE_F16 : form == "f32" || form == "delta" ? DSOPT_DTYPE_F32 : DSOPT_DTYPE_BF16;
}
/// Returns the passes of a rule in a form.
std::vector<Pass> passes_of(const Rule &rule, const std::string &form) {
    std::vector<Pass> passes = rule.passes;
    if (form == "delta") { // the weights are read, the output is written
        --passes.back().changes, ++passes.back().reads, ++passes.back().writes;
    } else if (form != "f32") {
        --passes.front().reads, ++passes.front().reads16;
        if (is_low(form))
            --passes.back().changes, passes.back().low16 += form == "remainder" ? 2 : 1;
        else
            ++passes.back().writes16;
        passes.insert(passes.begin(), Pass{.reads16 = 1});
    }
    return passes;
}

constexpr int kFloats = 4;
/// Memory of all steps of a form on a list.
struct Arrays {
    std::vector<int64_t> sizes;
    std::vector<bench::Matrix> matrices; // of each tensor
    int64_t numel;
    std::vector<std::unique_ptr<List>> f32; // weights or masters, moments and other state
    std::optional<List> grads, half;        // half: the weights
    std::map<std::string, List> low;        // state in low precision, with its scales: see low_list()
    Arrays(const std::string &list, int32_t dtype) :
        sizes(bench::shapes(list)),
        matrices(bench::matrices(list)),
        numel(bench::total(sizes)) {
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
                if (half)
                    static_cast<uint16_t *>(half->tensors[t].data)[i] = dtype == DSOPT_DTYPE_F16 ? 0x3800 : 0x3f00;
            }
    }
    /// Returns the list of a state tensor of each parameter, which is allocated by the first call. Rules whose formats
    /// are the same share it; codes of different formats would be invalid for each other.
    const List &low_list(const Formats &formats, const std::string &name, int32_t dtype, bool scales = false) {
        const std::string key = name == "remainder" ? name : formats.name + ("/" + name);
        if (const auto found = low.find(key); found != low.end()) return found->second;
        std::vector<int64_t> elements = sizes;
        for (int64_t &n : elements)
            if (scales) n = (n + Pass::kBlock - 1) / Pass::kBlock;
        return low.try_emplace(key, elements, dtype).first->second;
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
typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));

/// Arrays in low precision that a step uses.
struct Low {
    std::vector<const List *> half, byte, scale; // scales in the order of `byte`
};
Low low_of(const Rule &rule, const std::string &form, Arrays &arrays) {
    Low low;
    if (is_low(form)) low.half.push_back(&*arrays.half);
    if (form == "remainder") low.half.push_back(&arrays.low_list(rule.formats, "remainder", DSOPT_DTYPE_I16));
    const std::pair<const char *, int32_t> moments[] = {{"exp_avg", rule.formats.exp_avg},
                                                        {"exp_avg_sq", rule.formats.exp_avg_sq}};
    for (const auto &[name, moment] : moments) {
        if (moment == DSOPT_MOMENT_F32) continue;
        if (!has_scales(moment)) {
            low.half.push_back(&arrays.low_list(rule.formats, name, DSOPT_DTYPE_BF16));
            continue;
        }
        const int32_t dtype = moment == DSOPT_MOMENT_E4M3 ? DSOPT_DTYPE_F8_E4M3 : DSOPT_DTYPE_U8;
        low.byte.push_back(&arrays.low_list(rule.formats, name, dtype));
        low.scale.push_back(&arrays.low_list(rule.formats, name + std::string("_scale"), DSOPT_DTYPE_F32, true));
    }
    return low;
}
template <class T> T *data_of(const List *list, size_t tensor) { return static_cast<T *>(list->tensors[tensor].data); }

/// Processes elements [begin, end) of a tensor; `begin` and all arrays are aligned to 64 bytes. Arrays in low precision
/// keep their values, because others are invalid for a step: they are combined with a 0 that the compiler does not know.
template <int Reads, int Changes, int Writes, int Reads16, int Writes16, int Low16, int Low8, int StoresLow>
void move(const Arrays &arrays, const Low &low, size_t tensor, int64_t begin, int64_t end) {
    const float *read[Reads + 1];
    float *change[Changes + 1], *write[Writes + 1], *scale[Low8 + 1];
    uint16_t *half[Low16 + 1];
    uint8_t *byte[Low8 + 1];
    int array = 0;
    for (int i = 0; i < Changes; ++i) change[i] = arrays.floats(array++, tensor);
    for (int i = 0; i < Writes; ++i) write[i] = arrays.floats(array++, tensor);
    const bool grads32 = !Reads16 && !arrays.half;
    for (int i = 0; i < Reads; ++i)
        read[i] = i == 0 && grads32 ? static_cast<const float *>(arrays.grads->tensors[tensor].data)
                                    : arrays.floats(array++, tensor);
    for (int i = 0; i < Low16; ++i) half[i] = data_of<uint16_t>(low.half[size_t(i)], tensor);
    for (int i = 0; i < Low8; ++i) byte[i] = data_of<uint8_t>(low.byte[size_t(i)], tensor);
    for (int i = 0; i < Low8; ++i) scale[i] = data_of<float>(low.scale[size_t(i)], tensor);
    const auto *const grad = static_cast<const uint16_t *>(arrays.grads->tensors[tensor].data);
    auto *const copy = Writes16 ? static_cast<uint16_t *>(arrays.half->tensors[tensor].data) : nullptr;
    Floats sum = {};
    Halves any = {};
    Bytes any8 = {};
    uint8_t zero = 0;
    benchmark::DoNotOptimize(zero);
    const int64_t whole = begin + (end - begin) / 16 * 16;
    for (int64_t k = begin; k < whole; k += 16) {
        for (int i = 0; i < Reads; ++i) sum += *reinterpret_cast<const Floats *>(read[i] + k);
        for (int i = 0; i < Changes; ++i) *reinterpret_cast<Floats *>(change[i] + k) += 1e-9f;
        if constexpr (Reads16 > 0) any |= *reinterpret_cast<const Halves *>(grad + k);
        for (int i = 0; i < Low16; ++i) {
            Halves &low16 = *reinterpret_cast<Halves *>(half[i] + k);
            if constexpr (StoresLow)
                low16 |= zero;
            else
                any |= low16;
        }
        for (int i = 0; i < Low8; ++i) {
            Bytes &low8 = *reinterpret_cast<Bytes *>(byte[i] + k);
            if constexpr (StoresLow)
                low8 |= zero;
            else
                any8 |= low8;
        }
        for (int i = 0; i < Low8 && k % Pass::kBlock == 0; ++i) {
            sum[0] += scale[i][k / Pass::kBlock];
            if constexpr (StoresLow) scale[i][k / Pass::kBlock] += zero;
        }
        for (int i = 0; i < Writes; ++i) store_streaming(write[i] + k, 1e-3f);
        if constexpr (Writes16 > 0) store_streaming(copy + k, uint16_t(0x3800));
    }
    for (int64_t k = whole; k < end; ++k) {
        for (int i = 0; i < Reads; ++i) sum[0] += read[i][k];
        for (int i = 0; i < Changes; ++i) change[i][k] += 1e-9f;
        if constexpr (Reads16 > 0) any[0] |= grad[k];
        for (int i = 0; i < Low16; ++i) half[i][k] |= zero;
        for (int i = 0; i < Low8; ++i) byte[i][k] |= zero;
        for (int i = 0; i < Writes; ++i) write[i][k] = 1e-3f;
        if constexpr (Writes16 > 0) copy[k] = 0x3800;
    }
    if (Writes + Writes16 > 0) fence();
    benchmark::DoNotOptimize(sum);
    benchmark::DoNotOptimize(any);
    benchmark::DoNotOptimize(any8);
}

using Move = void (*)(const Arrays &, const Low &, size_t, int64_t, int64_t);
template <int... Counts> bool is(const Pass &pass) {
    const int counts[] = {Counts...}, wanted[] = {pass.reads,    pass.changes, pass.writes, pass.reads16,
                                                  pass.writes16, pass.low16,   pass.low8,   pass.stores_low};
    return std::memcmp(counts, wanted, sizeof wanted) == 0;
}
template <int Reads, int Changes, int Writes, int Reads16, int Writes16, int Low16 = 0, int Low8 = 0, int StoresLow = 1>
Move if_is(const Pass &pass) {
    return is<Reads, Changes, Writes, Reads16, Writes16, Low16, Low8, StoresLow>(pass)
               ? move<Reads, Changes, Writes, Reads16, Writes16, Low16, Low8, StoresLow>
               : nullptr;
}
Move move_of(const Pass &p) {
    for (const Move move :
         {if_is<0, 0, 0, 1, 0>(p), if_is<1, 3, 0, 0, 0>(p), if_is<1, 1, 0, 0, 0>(p), if_is<1, 2, 0, 0, 0>(p),
          if_is<2, 2, 0, 0, 0>(p), if_is<2, 1, 0, 0, 0>(p), if_is<1, 1, 1, 0, 0>(p), if_is<0, 3, 0, 1, 1>(p),
          if_is<0, 1, 0, 1, 1>(p), if_is<0, 2, 0, 1, 1>(p), if_is<1, 2, 0, 1, 0>(p), if_is<2, 1, 0, 0, 1>(p),
          if_is<1, 1, 0, 1, 0>(p), if_is<1, 1, 1, 0, 1>(p), if_is<0, 1, 1, 1, 0>(p), if_is<1, 1, 0, 0, 1>(p),
          if_is<2, 2, 1, 0, 0>(p), if_is<2, 0, 1, 0, 0>(p), if_is<2, 1, 1, 0, 0>(p), if_is<3, 0, 1, 0, 0>(p),
          // adamw_bf16, _e4m3 and _q8 in f32 and bf16, then all in remainder and random
          if_is<1, 1, 0, 0, 0, 2, 0>(p), if_is<1, 1, 0, 0, 0, 1, 1>(p), if_is<1, 1, 0, 0, 0, 0, 2>(p),
          if_is<0, 1, 0, 1, 1, 2, 0>(p), if_is<0, 1, 0, 1, 1, 1, 1>(p), if_is<0, 1, 0, 1, 1, 0, 2>(p),
          if_is<0, 2, 0, 1, 0, 2, 0>(p), if_is<0, 0, 0, 1, 0, 4, 0>(p), if_is<0, 0, 0, 1, 0, 3, 1>(p),
          if_is<0, 0, 0, 1, 0, 2, 2>(p), if_is<0, 2, 0, 1, 0, 1, 0>(p), if_is<0, 0, 0, 1, 0, 3, 0>(p),
          if_is<0, 0, 0, 1, 0, 2, 1>(p), if_is<0, 0, 0, 1, 0, 1, 2>(p),
          // lamb_e4m3 and lamb_q8
          if_is<2, 0, 0, 0, 0, 1, 1>(p), if_is<2, 0, 0, 0, 0, 0, 2>(p), if_is<0, 1, 0, 0, 0, 1, 1, 0>(p),
          if_is<0, 1, 0, 0, 0, 0, 2, 0>(p)})
        if (move != nullptr) return move;
    std::fprintf(stderr, "bench_steps: no probe for the arrays of a pass\n");
    std::exit(1);
}

/// Runs `move` on all threads, each with one range of the whole list: fewer boundaries than in the engine, the same
/// number of bytes.
void sweep(const Arrays &arrays, const Low &low, Move move) {
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
            if (const int64_t b = within(begin), e = within(end); b < e) move(arrays, low, i, b, e);
            offset += n;
        }
    }
}

// -------------------------------------------------------------------------------------------------------------- steps
class Engine {
public:
    Engine(const Rule &rule, const std::string &form, Arrays &arrays) :
        arrays_(arrays),
        formats_(rule.formats),
        delta_(form == "delta") {
        const bool mixed = arrays.half.has_value(), exchanges = rule.algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM;
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
        if (form == "remainder") desc.masters = DSOPT_MASTERS_REMAINDER;
        if (form == "random") desc.flags = DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
        if (exchanges) desc.data = comm_ = bench::idle_comm(context_, 8);
        check(dsopt_optimizer_create(context_, &desc, &optimizer_));
        dsopt_group group;
        check(dsopt_group_init(&group, sizeof group, rule.algorithm));
        group.momentum = rule.momentum;
        group.weight_decay = 0.01;
        group.exp_avg_format = rule.formats.exp_avg;
        group.exp_avg_sq_format = rule.formats.exp_avg_sq;
        if (exchanges) group.freeze_step = 1;
        if (rule.products != 0) group.ns_dtype = rule.products;
        check(dsopt_optimizer_add_group(optimizer_, &group, nullptr, 0));
        check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
        if (rule.products != 0) check(dsopt_optimizer_add_group(optimizer_, &group, nullptr, 0));
        std::vector<dsopt_param> params(arrays.sizes.size());
        for (size_t i = 0; i < params.size(); ++i) {
            params[i].tensor = mixed ? arrays.half->tensors[i] : arrays.f32[0]->tensors[i];
            if (rule.products == 0) continue;
            const bench::Matrix &matrix = arrays.matrices[i];
            params[i].rows = matrix.rows, params[i].cols = matrix.cols;
            params[i].group = matrix.rows == 0;
        }
        check(dsopt_optimizer_add_params(optimizer_, params.data(), int64_t(params.size())));
        bind();
        step_.size = sizeof step_;
        step_.grads = arrays.grads->tensors.data();
        step_.count = int64_t(arrays.sizes.size());
        if (delta_) {
            step_.out = arrays.f32.back()->tensors.data();
            step_.flags = DSOPT_STEP_DELTA;
        }
        // Reaches the compressed stage, and ends the trial of prefetching (cpu/prefetch.h), whose effect on a step of
        // Muon, which takes seconds, is small.
        for (int i = 0; i < (rule.products == 0 ? 16 : 1); ++i) run();
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
            const int32_t dtype = info.tensor.dtype;
            const bool scales = info.block == Pass::kBlock;
            const bool whole = info.param >= 0 && info.tensor.numel == arrays_.sizes[size_t(info.param)] &&
                               dtype == DSOPT_DTYPE_F32 && std::strstr(info.name, "error") == nullptr;
            if (scales || (info.param >= 0 && dtype != DSOPT_DTYPE_F32 && dtype != DSOPT_DTYPE_I32)) {
                const List &list = arrays_.low_list(formats_, info.name, dtype, scales);
                info.tensor.data = list.tensors[size_t(info.param)].data;
            } else if (whole) {
                const size_t index = array.emplace(info.name, array.size()).first->second;
                if (index + delta_ >= arrays_.f32.size()) std::abort();
                info.tensor.data = arrays_.f32[index]->tensors[size_t(info.param)].data;
            }
            state.push_back(info.tensor);
        }
        check(dsopt_optimizer_bind(optimizer_, DSOPT_BIND_STATE, state.data(), count));
    }

    Arrays &arrays_;
    const Formats formats_;
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

bool has_matrices(const std::string &list) {
    const std::vector<bench::Matrix> matrices = bench::matrices(list);
    return std::any_of(matrices.begin(), matrices.end(), [](const bench::Matrix &each) { return each.rows != 0; });
}

void set_counters(benchmark::State &state, const Arrays &arrays, const std::vector<Pass> &passes) {
    double bytes = 0;
    for (const Pass &pass : passes) bytes += pass.bytes();
    state.SetBytesProcessed(int64_t(double(state.iterations() * arrays.numel) * bytes));
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
    Arrays &arrays = Fixture::of(list, form).arrays;
    const Low low = low_of(rule, form, arrays);
    const std::vector<Pass> passes = passes_of(rule, form);
    std::vector<Move> moves;
    for (const Pass &pass : passes) moves.push_back(move_of(pass));
    for (const Move move : moves) sweep(arrays, low, move);
    for (auto _ : state)
        for (const Move move : moves) sweep(arrays, low, move);
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
                if (!has_form(rule, form)) continue;
                if (rule.products != 0 && !has_matrices(list)) continue;
                const std::string name = rule.name + "/" + form + "/" + list;
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
