// SPDX-License-Identifier: Apache-2.0
// Compares variants of a training run: on the CPU and on the emulated CUDA device; with different threads, chunks,
// instruction sets and alignments; by step and by apply. Every status and every bit must be the same.
#include "harness.h"
#include "support/cuda_memory.h"
#include "support/memory.h"
#include "support/numbers.h"
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>

namespace fuzz {
namespace {

using test::Block;

// -------------------------------------------------------------------------------------------------------------- a case
constexpr int32_t kAlgorithms[] = {
    DSOPT_ALGORITHM_ADAM,          DSOPT_ALGORITHM_ADAMW,       DSOPT_ALGORITHM_LAMB,  DSOPT_ALGORITHM_ADAM_LEGACY,
    DSOPT_ALGORITHM_SGD,           DSOPT_ALGORITHM_ADAGRAD,     DSOPT_ALGORITHM_LION,  DSOPT_ALGORITHM_ONEBIT_ADAM,
    DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB, DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB,
    DSOPT_ALGORITHM_MUON};
// Sizes next to the edges of a vector, a word of bits, a warp, a tile and a leaf. One in four is large, so that there
// are many cases.
constexpr int64_t kSmallSizes[] = {0, 1, 2, 7, 8, 9, 15, 17, 31, 32, 33, 64, 100};
constexpr int64_t kLargeSizes[] = {255, 256, 257, 1000, 4095, 4096, 4097, 5000};
constexpr int32_t kDtypes[] = {DSOPT_DTYPE_F32, DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16};
constexpr double kRates[] = {1e-3, 1e-2, 0, 0.1, 1};
constexpr float kPoisons[] = {test::kNaN, test::kInf, -test::kInf, 3e38f, 1e-40f};

struct ParamCase {
    int64_t numel;
    int32_t dtype, gradient;
    int32_t flags;
    size_t shift; // offset from an aligned address, in elements
    size_t index; // in the case, also if the list has another order
    Cut cut = {};
};
struct StepCase {
    int32_t flags = 0;
    std::optional<float> lr, scale, hyper;
    bool skips = false, outs = false;
    std::vector<bool> absent;
    int poisoned = -1; // index of the parameter, -1 = none
    float poison = 0;
    uint64_t seed = 0;
};
struct Case {
    int32_t algorithm = 0, compat = 0, flags = 0, nonfinite = 0, masters = 0, group_flags = 0;
    Formats formats; // of the moments
    int ranks = 1;
    double max_norm = 0, max_value = 0, group_norm = 0, decay = 0, lr = 0, momentum = 0;
    bool scaler = false;
    size_t second_group = 0; // its first parameter
    std::vector<ParamCase> params;
    std::vector<StepCase> steps;
    dsopt_group iterations{};                                                     // of Muon
    bool is_beside = false;                                                       // the second group is of AdamW
    bool splits() const { return (flags & DSOPT_OPTIMIZER_SPLIT_MATRICES) != 0; } // absent gradients send nothing
    bool is_muon() const { return algorithm == DSOPT_ALGORITHM_MUON; }
    bool is_onebit() const { return algorithm >= DSOPT_ALGORITHM_ONEBIT_ADAM; }
};

/// Chooses formats of moments that the algorithm has, and remainders.
void choose_formats(Choices &choose, Case &c) {
    if (c.algorithm != DSOPT_ALGORITHM_SGD || c.momentum != 0)
        c.formats = formats_of(c.algorithm, choose.below(kFormatChoices));
    c.masters = DSOPT_MASTERS_PER_TENSOR;
    if (!(c.flags & DSOPT_OPTIMIZER_NO_MASTER) && choose.flip()) c.masters = DSOPT_MASTERS_REMAINDER;
    for (ParamCase &param : c.params) {
        if (c.masters == DSOPT_MASTERS_REMAINDER && param.dtype == DSOPT_DTYPE_F16) param.dtype = DSOPT_DTYPE_BF16;
        if (!c.formats.are_f32() && choose.rarely(4)) param.flags |= DSOPT_PARAM_F32_MOMENTS;
    }
}

/// Chooses the fields of Muon, and partitions its parameters into matrices. If ranks partition those, all are alike: this rank
/// sends no less than the others, so they send defined values.
void choose_matrices(Choices &choose, Case &c) {
    c.compat = DSOPT_COMPAT_NONE;
    must("group_init", dsopt_group_init(&c.iterations, sizeof c.iterations, c.algorithm));
    choose_iterations(choose, c.iterations);
    c.is_beside = choose.flip();
    const bool splits = (c.flags & DSOPT_OPTIMIZER_SHARD) != 0 && choose.flip();
    if (splits) c.flags ^= DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_SPLIT_MATRICES;
    for (size_t i = 0; i < c.params.size(); ++i) {
        if (c.is_beside && i >= c.second_group) continue;
        c.params[i].cut = splits && i != 0 ? c.params[0].cut : cut_of(choose);
        c.params[i].numel = c.params[i].cut.numel;
    }
}

Case case_of(Choices &choose) {
    Case c;
    c.algorithm = choose.of(kAlgorithms);
    c.compat = choose.rarely(3) ? DSOPT_COMPAT_DEEPSPEED : DSOPT_COMPAT_NONE;
    if (choose.rarely(3)) c.flags |= DSOPT_OPTIMIZER_NO_MASTER;
    if (choose.rarely(3)) c.flags |= DSOPT_OPTIMIZER_REPORT_NORMS;
    const bool stochastic = (c.flags & DSOPT_OPTIMIZER_NO_MASTER) != 0 && choose.rarely(3);
    if (stochastic) c.flags |= DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
    if (c.is_onebit() && choose.flip()) {
        c.ranks = 2 + choose.below(3);
        c.flags |= DSOPT_OPTIMIZER_AVERAGES;
        if (choose.rarely(3)) c.flags |= DSOPT_OPTIMIZER_MOMENTUM_BITS;
    }
    if (!c.is_onebit() && c.compat == DSOPT_COMPAT_NONE && choose.rarely(3)) {
        c.ranks = 2 + choose.below(3);
        c.flags |= DSOPT_OPTIMIZER_SHARD;
        if (choose.flip()) c.flags |= DSOPT_OPTIMIZER_AVERAGES;
    }
    c.nonfinite = choose.below(3);
    c.masters = choose.rarely(4) ? DSOPT_MASTERS_FLAT : DSOPT_MASTERS_PER_TENSOR;
    if (choose.rarely(2)) c.max_norm = choose.flip() ? 1 : 0.01;
    if (choose.rarely(4)) c.max_value = 0.5;
    if (choose.rarely(4)) c.group_norm = 0.5;
    if (choose.rarely(3)) c.group_flags = 1 << choose.below(6);
    c.decay = choose.flip() ? 0.1 : 0;
    c.lr = choose.of(kRates);
    c.momentum = choose.flip() ? 0.9 : 0;
    c.scaler = choose.rarely(3);
    const int params = 1 + choose.below(6);
    for (int i = 0; i < params; ++i) {
        const int32_t dtype = stochastic ? int32_t(DSOPT_DTYPE_BF16) : choose.of(kDtypes);
        const int32_t flags = choose.rarely(6) ? 1 << choose.below(c.is_onebit() ? 3 : 2) : 0;
        const int64_t numel = choose.rarely(4) ? choose.of(kLargeSizes) : choose.of(kSmallSizes);
        c.params.push_back({numel, dtype, choose.of(kDtypes), flags, size_t(choose.below(9)), size_t(i)});
    }
    // The other ranks send what this one sends, for elements of other tensors. In one dtype a NaN stays a NaN.
    if (c.flags & DSOPT_OPTIMIZER_SHARD)
        for (ParamCase &param : c.params) param.dtype = c.params[0].dtype;
    c.second_group = size_t(choose.below(params + 1));
    if (!c.is_onebit() && c.compat == DSOPT_COMPAT_NONE && choose.flip()) choose_formats(choose, c);
    if (c.is_muon()) choose_matrices(choose, c);
    const int steps = 1 + choose.below(6);
    for (int k = 0; k < steps; ++k) {
        StepCase step;
        if (choose.rarely(3)) step.flags = 1 << choose.below(5);
        if (step.flags == DSOPT_STEP_ACCUMULATED) step.flags = 0;
        if (choose.rarely(4)) step.lr = float(choose.of(kRates));
        if (choose.rarely(4)) step.scale = choose.rarely(8) ? choose.of(kPoisons) : 4.0f;
        if (!step.lr && choose.rarely(6)) step.hyper = choose.rarely(4) ? choose.of(kPoisons) : 0.05f;
        step.skips = choose.rarely(12);
        step.outs = choose.rarely(3) || (step.flags & (DSOPT_STEP_OUT_ONLY | DSOPT_STEP_DELTA)) != 0;
        for (int i = 0; i < params; ++i) step.absent.push_back(choose.rarely(8) && !c.splits());
        if (choose.rarely(6)) step.poisoned = choose.below(params), step.poison = choose.of(kPoisons);
        step.seed = choose.byte();
        c.steps.push_back(step);
    }
    return c;
}

// ------------------------------------------------------------------------------------------------------------ variants
struct Variant {
    const char *name;
    int32_t backend = DSOPT_BACKEND_CPU;
    int32_t threads = 1;
    int64_t chunk = 0;
    const char *isa = nullptr;
    size_t shift = 0; // offset that makes all memory less aligned, in elements
    bool applies = false;
    bool reorders = false; // the parameters of each group are in reverse order
};
constexpr Variant kReference{.name = "one thread"};
constexpr Variant kVariants[] = {
    {.name = "three threads", .threads = 3},
    {.name = "larger pieces", .threads = 2, .chunk = 8192},
    {.name = "no vectors", .isa = "generic"},
    {.name = "avx2", .isa = "avx2"},
    {.name = "avx512", .isa = "avx512"},
    {.name = "other alignment", .shift = 1},
    {.name = "the emulated device", .backend = DSOPT_BACKEND_CUDA},
    {.name = "the emulated device, other alignment", .backend = DSOPT_BACKEND_CUDA, .shift = 1},
    {.name = "apply", .applies = true},
    {.name = "another order", .reorders = true}};

/// False if results depend on the order of the list: norms over lists are added in list order, chunks of an exchange
/// have their own scales, and the original's counters are stored with the last tensor of a group (docs/compat.md).
bool keeps_bits_in_any_order(const Case &c) {
    return c.compat == DSOPT_COMPAT_NONE && c.max_norm == 0 && c.group_norm == 0 && c.ranks == 1 &&
           !(c.flags & DSOPT_OPTIMIZER_REPORT_NORMS);
}
Case reordered(Case c) {
    const auto middle = c.params.begin() + int64_t(c.second_group);
    std::reverse(c.params.begin(), middle);
    std::reverse(middle, c.params.end());
    for (StepCase &step : c.steps) {
        const StepCase before = step;
        for (size_t i = 0; i < c.params.size(); ++i) {
            step.absent[i] = before.absent[c.params[i].index];
            if (before.poisoned == int(c.params[i].index)) step.poisoned = int(i);
        }
    }
    return c;
}

void run_backwards(void *, int64_t count, void (*body)(void *, int64_t), void *arg) {
    while (count-- > 0) body(arg, count);
}
/// Contexts are created once per variant, because detecting the processor's features takes as long as a step.
test::Context make_context_of(const Variant &variant) {
    dsopt_context_desc desc = test::context_desc(variant.threads, variant.backend);
    desc.chunk = variant.chunk;
    if (variant.threads > 1 && variant.chunk != 0) desc.parallel_for = run_backwards;
    if (variant.isa != nullptr) setenv("DSOPT_ISA", variant.isa, 1);
    dsopt_context *context = nullptr;
    const dsopt_status status = dsopt_context_create(&desc, &context);
    unsetenv("DSOPT_ISA");
    must("context_create", status);
    return test::Context(context);
}

const test::Context &context_of(const Variant &variant) {
    // Leaked: the emulated device may end before static destructors run.
    static auto *const all = new std::map<const Variant *, test::Context>;
    test::Context &one = (*all)[&variant];
    if (one == nullptr) one = make_context_of(variant);
    return one;
}

/// Replaces every NaN by the same one.
void canonicalize_nans(Bytes &bytes, int32_t dtype) {
    if (dtype == DSOPT_DTYPE_I32 || dtype == DSOPT_DTYPE_I16 || dtype == DSOPT_DTYPE_U8 || dtype == DSOPT_DTYPE_F8_E4M3)
        return;
    const auto canonicalize = [&]<class Word>(Word sign_less, Word infinity) {
        const Word nan = sign_less;
        for (size_t at = 0; at + sizeof(Word) <= bytes.size(); at += sizeof(Word)) {
            Word word;
            std::memcpy(&word, &bytes[at], sizeof word);
            if ((word & sign_less) > infinity) std::memcpy(&bytes[at], &nan, sizeof nan);
        }
    };
    switch (dtype) {
    case DSOPT_DTYPE_F16: return canonicalize(uint16_t(0x7fff), uint16_t(0x7c00));
    case DSOPT_DTYPE_BF16: return canonicalize(uint16_t(0x7fff), uint16_t(0x7f80));
    case DSOPT_DTYPE_F32: return canonicalize(uint32_t(0x7fffffff), uint32_t(0x7f800000));
    default: return canonicalize(uint64_t(0x7fffffffffffffff), uint64_t(0x7ff0000000000000));
    }
}

/// All observable results in order, each as a name and its bytes.
using Transcript = std::vector<std::pair<std::string, Bytes>>;

class Training {
public:
    Training(const Case &c, const Variant &variant) :
        case_(c),
        way_(variant),
        memory_(variant.backend == DSOPT_BACKEND_CUDA ? test::cuda_memory(nullptr) : test::host_memory()),
        context_(context_of(variant)) {
        if (c.ranks > 1) comm_ = echo_comm(context_, echo_ = {0, c.ranks});
        if (note("create", create()) && note("groups", add_groups()) &&
            (!variant.applies || note("init_state", init_state())))
            for (const StepCase &step : c.steps) take(step);
        if (made_) note_state();
    }
    Transcript transcript;

private:
    bool note(const std::string &what, dsopt_status status) {
        transcript.push_back({what, std::to_string(status)});
        return status == DSOPT_OK;
    }
    void note(const std::string &what, Bytes bytes, int32_t dtype) {
        canonicalize_nans(bytes, dtype);
        transcript.push_back({what, std::move(bytes)});
    }
    Block block(size_t elements, int32_t dtype, size_t shift) const {
        return {memory_, elements * size_of(dtype), (shift + way_.shift) * size_of(dtype)};
    }
    static Bytes numbers(uint64_t seed, int64_t numel, int32_t dtype, double size) {
        test::Random random(seed);
        Bytes bytes(size_t(numel) * size_of(dtype), 0);
        for (int64_t i = 0; i < numel; ++i)
            test::store(&bytes[size_t(i) * size_of(dtype)], dtype, float(random.uniform(-size, size)));
        return bytes;
    }

    dsopt_status create() {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.compat = case_.compat;
        desc.flags = case_.flags;
        desc.nonfinite = case_.nonfinite;
        desc.masters = case_.masters;
        desc.max_norm = case_.max_norm;
        desc.max_value = case_.max_value;
        desc.seed = 5;
        desc.data = comm_.get();
        if (case_.scaler) scaler_ = test::make_scaler(context_, 64, 2);
        desc.scaler = scaler_.get();
        dsopt_optimizer *optimizer = nullptr;
        const dsopt_status status =
            counted("optimizer_create", dsopt_optimizer_create(context_.get(), &desc, &optimizer));
        optimizer_.reset(optimizer);
        return status;
    }
    dsopt_status add_groups() {
        dsopt_group group;
        must("group_init", dsopt_group_init(&group, sizeof group, case_.algorithm));
        if (case_.is_muon()) group = case_.iterations;
        group.flags |= case_.group_flags;
        group.lr = case_.lr;
        group.weight_decay = case_.decay;
        group.exp_avg_format = case_.formats.first;
        group.exp_avg_sq_format = case_.formats.second;
        group.max_norm = case_.group_norm;
        if (case_.algorithm == DSOPT_ALGORITHM_SGD) group.momentum = case_.momentum;
        if (case_.is_onebit()) group.freeze_step = 2;
        if (case_.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
            group.var_interval_steps = 1;
            group.local_interval_steps = 1;
            group.max_local_interval = 2;
        }
        std::vector<dsopt_param> params;
        for (const ParamCase &p : case_.params) {
            weights_.push_back(block(size_t(p.numel), p.dtype, p.shift));
            weights_.back().set(numbers(p.index + 1, p.numel, p.dtype, 1));
            names_.push_back("p" + std::to_string(p.index));
            dsopt_param param{};
            param.tensor = {weights_.back().data(), p.numel, p.dtype, 0};
            param.flags = p.flags;
            p.cut.describe(param);
            params.push_back(param);
        }
        for (size_t i = 0; i < params.size(); ++i) params[i].name = names_[i].c_str();
        const size_t first = case_.second_group;
        dsopt_status status =
            counted("add_group", dsopt_optimizer_add_group(optimizer_.get(), &group, params.data(), int64_t(first)));
        if (case_.is_beside) {
            dsopt_group other;
            must("group_init", dsopt_group_init(&other, sizeof other, DSOPT_ALGORITHM_ADAMW));
            other.exp_avg_format = case_.formats.first;
            other.max_norm = case_.group_norm;
            group = other;
        }
        if (status == DSOPT_OK)
            status = counted("add_group", dsopt_optimizer_add_group(optimizer_.get(), &group, params.data() + first,
                                                                    int64_t(params.size() - first)));
        made_ = status == DSOPT_OK;
        return status;
    }
    std::vector<dsopt_tensor> weight_list() const {
        std::vector<dsopt_tensor> list;
        for (size_t i = 0; i < weights_.size(); ++i)
            list.push_back({weights_[i].data(), case_.params[i].numel, case_.params[i].dtype, 0});
        return list;
    }
    dsopt_status init_state() {
        int64_t count = 0;
        must("state_count", dsopt_optimizer_state_count(optimizer_.get(), &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            must("state", dsopt_optimizer_state(optimizer_.get(), i, &info));
            state_.push_back(block(size_t(info.tensor.numel), info.tensor.dtype, 0));
            state_list_.push_back({state_.back().data(), info.tensor.numel, info.tensor.dtype, 0});
        }
        size_t bytes = 0;
        must("workspace", dsopt_optimizer_workspace(optimizer_.get(), &bytes));
        workspace_.emplace(memory_, bytes);
        const std::vector<dsopt_tensor> weights = weight_list();
        return counted("init_state",
                       dsopt_optimizer_init_state(optimizer_.get(), weights.data(), int64_t(weights.size()),
                                                  state_list_.data(), int64_t(state_list_.size()), nullptr));
    }

    void take(const StepCase &s) {
        std::vector<Block> gradients, outs;
        std::vector<dsopt_tensor> list, out_list;
        for (size_t i = 0; i < case_.params.size(); ++i) {
            const ParamCase &p = case_.params[i];
            Bytes bytes = numbers(1000 * s.seed + p.index, p.numel, p.gradient, 2);
            if (int(i) == s.poisoned && p.numel != 0) test::store(&bytes[0], p.gradient, s.poison);
            gradients.push_back(block(size_t(p.numel), p.gradient, p.shift));
            gradients.back().set(bytes);
            list.push_back({s.absent[i] ? nullptr : gradients.back().data(), p.numel, p.gradient, 0});
            outs.push_back(block(size_t(p.numel), p.dtype, p.shift));
            outs.back().set(Bytes(outs.back().bytes(), 0));
            out_list.push_back({outs.back().data(), p.numel, p.dtype, 0});
        }
        const std::vector<float> hypers = hyper_rows(s);
        const std::vector<float> rates(2, s.lr.value_or(0));
        const float scale = s.scale.value_or(1);
        const int32_t skips = s.skips;
        const Block report = block(DSOPT_REPORT_FLOATS, DSOPT_DTYPE_F32, 0),
                    given_rates = given(rates.data(), rates.size()), given_hypers = given(hypers.data(), hypers.size()),
                    given_scale = given(&scale, 1), given_skip = given(&skips, 1);
        report.set(Bytes(report.bytes(), 0));
        DSOPT_NEW(dsopt_step, step);
        step.grads = list.data();
        step.count = int64_t(list.size());
        step.flags = s.flags;
        step.report = reinterpret_cast<float *>(report.data());
        if (s.outs) step.out = out_list.data();
        if (s.lr) step.lr = reinterpret_cast<const float *>(given_rates.data());
        if (s.hyper) step.hyper = reinterpret_cast<const float *>(given_hypers.data());
        if (s.scale) step.grad_scale = reinterpret_cast<const float *>(given_scale.data());
        if (s.skips) step.skip = reinterpret_cast<const int32_t *>(given_skip.data());
        const std::vector<dsopt_tensor> weights = weight_list();
        if (way_.applies) {
            step.params = weights.data();
            step.state = state_list_.data();
            step.state_count = int64_t(state_list_.size());
            step.workspace = workspace_->data();
            step.workspace_bytes = workspace_->bytes();
        }
        note("step", way_.applies ? counted("apply", dsopt_optimizer_apply(optimizer_.get(), &step))
                                  : counted("step", dsopt_optimizer_step(optimizer_.get(), &step)));
        // The report contains indices in the list.
        note("report", way_.reorders ? Bytes() : report.text(), DSOPT_DTYPE_F32);
        for (const size_t i : places()) {
            const std::string number = " " + std::to_string(case_.params[i].index);
            note("weights" + number, weights_[i].text(), case_.params[i].dtype);
            note("out" + number, outs[i].text(), case_.params[i].dtype);
            note("gradient" + number, gradients[i].text(), case_.params[i].gradient);
        }
    }
    template <class T> Block given(const T *values, size_t count) const {
        Block copy(memory_, count * sizeof(T));
        copy.set(static_cast<const void *>(values));
        return copy;
    }
    static std::vector<float> hyper_rows(const StepCase &s) {
        std::vector<float> rows(2 * DSOPT_HYPER_FLOATS, test::kNaN); // as the host has them
        rows[DSOPT_HYPER_LR] = rows[DSOPT_HYPER_FLOATS + DSOPT_HYPER_WEIGHT_DECAY] = s.hyper.value_or(0);
        return rows;
    }
    /// Returns, for each parameter of the case, its index in the list.
    std::vector<size_t> places() const {
        std::vector<size_t> list(case_.params.size());
        for (size_t i = 0; i < list.size(); ++i) list[case_.params[i].index] = i;
        return list;
    }
    /// Sorts the values by the case's order of parameters.
    Bytes in_order(const char *name, const Bytes &bytes) const {
        const std::string per_param = " step trust_average trust_factor trust_scaling trust_weight trust_ratio ";
        if (per_param.find(" " + std::string(name) + " ") == std::string::npos) return bytes;
        Bytes ordered;
        for (const size_t i : places()) ordered += bytes.substr(4 * i, 4);
        return ordered;
    }
    void note_state() {
        // Lists of `apply` store residuals and momenta of exchanges in the engine's layout.
        if (way_.applies && case_.is_onebit()) return;
        int64_t count = 0;
        must("state_count", dsopt_optimizer_state_count(optimizer_.get(), &count));
        const size_t first = transcript.size();
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            must("state", dsopt_optimizer_state(optimizer_.get(), i, &info));
            Bytes bytes(size_t(info.tensor.numel) * size_of(info.tensor.dtype), 0);
            if (!way_.applies)
                must("export", dsopt_optimizer_export(optimizer_.get(), i, bytes.data(), bytes.size()));
            else if (size_t(i) < state_.size())
                bytes = state_[size_t(i)].text();
            // The bits are interleaved with scales; any two NaN scales are equal.
            const bool scales = std::strcmp(info.name, "exp_avg_bits") == 0;
            const int64_t param = info.param < 0 ? -1 : int64_t(case_.params[size_t(info.param)].index);
            note(std::string(info.name) + " " + std::to_string(param), in_order(info.name, bytes),
                 scales ? int32_t(DSOPT_DTYPE_F32) : info.tensor.dtype);
        }
        std::sort(transcript.begin() + int64_t(first), transcript.end());
    }

    const Case &case_;
    const Variant &way_;
    const test::Memory memory_;
    Echo echo_;
    const test::Context &context_;
    test::Comm comm_;
    test::Scaler scaler_;
    test::Optimizer optimizer_;
    bool made_ = false; // created with its groups
    std::vector<std::string> names_;
    std::vector<Block> weights_, state_;
    std::vector<dsopt_tensor> state_list_;
    std::optional<Block> workspace_;
};

std::string text_of(const Case &c) {
    std::string text = "algorithm " + std::to_string(c.algorithm) + " compat " + std::to_string(c.compat) + " flags " +
                       std::to_string(c.flags) + " group flags " + std::to_string(c.group_flags) + " ranks " +
                       std::to_string(c.ranks) + ", sizes";
    for (const ParamCase &p : c.params) text += " " + std::to_string(p.numel);
    return text;
}

bool is_status(const std::string &what) {
    return what == "create" || what == "groups" || what == "step" || what == "init_state";
}

void compare(const Case &c, const Variant &variant, const Transcript &wanted, const Transcript &got) {
    std::map<std::string, int> times;
    size_t i = 0;
    // In compat mode weights may change when the state is created: in init_state() or the first good step.
    bool stepped = false;
    for (const auto &[what, bytes] : got) {
        if (variant.applies && what == "init_state") {
            if (bytes != "0") return; // rejected before the first step
            continue;
        }
        const auto same = i < wanted.size() && wanted[i].first == what;
        if (!same)
            finding("%s, %s: '%s' in place of '%s'", text_of(c).c_str(), variant.name, what.c_str(),
                    i < wanted.size() ? wanted[i].first.c_str() : "nothing");
        const int time = ++times[what];
        stepped = stepped || (what == "step" && bytes == "0");
        const bool counts = !variant.reorders || what != "report";
        if (counts && wanted[i].second != bytes && (stepped || !variant.applies || is_status(what))) {
            // Some cases work only if the engine owns memory and cannot be applied; for others it is the reverse.
            if (variant.applies && is_status(what) && (bytes != "0") != (wanted[i].second != "0")) return;
            // If a list has several errors, the first in list order is reported.
            if (variant.reorders && is_status(what) && bytes != "0" && wanted[i].second != "0") return;
            size_t at = 0;
            while (at < bytes.size() && at < wanted[i].second.size() && bytes[at] == wanted[i].second[at]) ++at;
            finding("%s, %s: %s is different at byte %zu, the %dth time%s%s", text_of(c).c_str(), variant.name,
                    what.c_str(), at, time, is_status(what) ? ": " : "", is_status(what) ? bytes.c_str() : "");
        }
        ++i;
    }
}

} // namespace
} // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz::count_runs();
    fuzz::Choices choose(data, size);
    const bool shifts = choose.flip(); // runs of the emulated device take half of the time
    const fuzz::Case c = fuzz::case_of(choose);
    const fuzz::Transcript wanted = fuzz::Training(c, fuzz::kReference).transcript;
    const fuzz::Case other_order = fuzz::reordered(c);
    for (const fuzz::Variant &variant : fuzz::kVariants) {
        if (variant.backend == DSOPT_BACKEND_CUDA && shifts != (variant.shift != 0)) continue;
        if (variant.backend == DSOPT_BACKEND_CUDA && c.is_muon()) continue; // products have other bits there
        if (variant.reorders && !fuzz::keeps_bits_in_any_order(c)) continue;
        fuzz::compare(c, variant, wanted, fuzz::Training(variant.reorders ? other_order : c, variant).transcript);
    }
    return 0;
}
