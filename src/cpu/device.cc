// SPDX-License-Identifier: Apache-2.0
#include "comm/comm.h"
#include "cpu/compress.h"
#include "cpu/cut.h"
#include "cpu/kernels.h"
#include "cpu/onebit.h"
#include "device/backend.h"
#include "device/decide.h"
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <sys/mman.h>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace dsopt {
namespace {

using cpu::Cut;
using cpu::Kernels;
using cpu::ListCut;
using cpu::Span;

const Kernels &choose_kernels() {
#if defined(__x86_64__)
    const char *wanted = secure_getenv("DSOPT_ISA");
    const auto allowed = [&](const char *isa) { return wanted == nullptr || std::strcmp(wanted, isa) == 0; };
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
    const bool avx2 = f16c && __builtin_cpu_supports("avx2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && allowed("avx512")) return cpu::kernels_avx512;
    if (avx2 && (allowed("avx2") || allowed("avx512"))) return cpu::kernels_avx2;
#endif
    return cpu::kernels_generic;
}

const cpu::OneBitKernels &choose_onebit_kernels(const Kernels &chosen) {
#if defined(__x86_64__)
    if (&chosen == &cpu::kernels_avx512) return cpu::onebit_avx512;
    if (&chosen == &cpu::kernels_avx2) return cpu::onebit_avx2;
#endif
    (void)chosen;
    return cpu::onebit_generic;
}

/// Time between two marks goes to a phase of the report.
class Stopwatch {
public:
    Stopwatch(bool on, double *ms) : on_(on), ms_(ms), last_(on ? Clock::now() : Clock::time_point()) {
        if (on) std::fill_n(ms, 8, 0.0);
    }
    void mark(int phase) {
        if (!on_) return;
        const auto now = Clock::now();
        ms_[phase] += std::chrono::duration<double, std::milli>(now - last_).count();
        last_ = now;
    }

private:
    using Clock = std::chrono::steady_clock;
    bool on_;
    double *ms_;
    Clock::time_point last_;
};

class CpuBackend final : public Backend {
public:
    CpuBackend() : kernels_(choose_kernels()), onebit_(choose_onebit_kernels(kernels_)) {}
    const char *name() const override { return "cpu"; }

    void *allocate(size_t bytes, void *) const override {
        // From 2 MiB on in whole huge pages: the step is bound by memory, and small pages cost a fifth of it.
        constexpr size_t huge = size_t(2) << 20;
        const size_t alignment = bytes >= huge ? huge : 64;
        if (bytes > SIZE_MAX - huge) throw std::bad_alloc();
        const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
        void *memory = std::aligned_alloc(alignment, std::max(rounded, alignment));
        if (memory == nullptr) throw Error(DSOPT_ERR_NOMEM, "out of host memory: %zu bytes of optimizer state", bytes);
        if (bytes >= huge) (void)madvise(memory, rounded, MADV_HUGEPAGE);
        return memory;
    }
    void release(void *memory, size_t, void *) const noexcept override { std::free(memory); }

    bool is_host() const override { return true; }
    bool owns(const void *) const override { return true; }
    size_t extra_bytes(int64_t, int64_t, int64_t, const OneBitSetup *) const override { return 0; }
    std::unique_ptr<StepCache> make_cache() const override { return nullptr; }
    HostBuffer host_buffer(size_t) const override { return {}; }
    void phase_times(StepCache *, double *) const override {} // they are in the outcome
    void step(const StepPlan &plan) const override;

    void clear(void *data, size_t bytes, void *) const override {
        if (bytes != 0) std::memset(data, 0, bytes); // an empty tensor may have no address
    }
    void zero(const dsopt_tensor *list, int64_t count, const Parallel &parallel, void *) const override {
        ListCut(list, count, parallel).run([&](int64_t i, int64_t begin, int64_t end) {
            const size_t size = dtype_size(list[i].dtype);
            std::memset(static_cast<char *>(list[i].data) + size_t(begin) * size, 0, size_t(end - begin) * size);
        });
    }
    void axpby(const Factor &a, const dsopt_tensor *x, float b, const dsopt_tensor *y, int64_t count,
               const Parallel &parallel, void *) const override {
        const float factor = a.data != nullptr ? *a.data : a.value; // read once: it may be an element of y
        ListCut(x, count, parallel).run([&](int64_t i, int64_t begin, int64_t end) {
            if (y[i].data != nullptr) kernels_.axpby(factor, x[i], b, y[i], begin, end);
        });
    }
    void clamp(const dsopt_tensor *list, int64_t count, float limit, const Parallel &parallel, void *) const override {
        ListCut(list, count, parallel).run([&](int64_t i, int64_t begin, int64_t end) {
            kernels_.clamp(list[i], limit, begin, end);
        });
    }
    void norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, Comm *comm,
              dsopt_norm_result *result, const Parallel &parallel, void *stream) const override;
    void update_scaler(const ScalerRules &rules, ScalerState *state, float *scale, const int32_t *overflow,
                       void *) const override {
        scaler_transition(rules, *state, overflow != nullptr ? *overflow != 0 : state->recorded != 0);
        *scale = scale_in_use(*state);
    }
    void write_scaler(const ScalerState &value, ScalerState *state, float *scale, void *) const override {
        *state = value;
        *scale = scale_in_use(value);
    }
    void write_reduction(const ScheduleRules &rules, const ScheduleState *schedule, int32_t *reduction,
                         void *) const override {
        *reduction = next_reduction_of(rules, schedule);
    }
    void copy(void *to, const void *from, size_t bytes, void *) const override {
        if (bytes != 0) std::memmove(to, from, bytes);
    }
    void copy_to_host(void *host, const void *from, size_t bytes, void *) const override {
        copy(host, from, bytes, nullptr);
    }
    std::unique_ptr<HostReader> reader() const override {
        struct InPlace final : HostReader {
            const void *view(const void *from, size_t, size_t) override { return from; }
        };
        return std::make_unique<InPlace>();
    }
    std::unique_ptr<HostWriter> writer() const override { return nullptr; }
    void copy_from_host(void *to, const void *host, size_t bytes, void *) const override {
        copy(to, host, bytes, nullptr);
    }
    void synchronize(void *) const override {}
    void enqueue_copy(void *to, const void *from, size_t bytes, void *) const override {
        copy(to, from, bytes, nullptr);
    }
    bool finished(void *) const override { return true; }
    void wait(void *) const override {}
    int device() const override { return 0; }
    void on_device(void (*body)(void *), void *argument) const override { body(argument); }

    void compress_feed(const Exchange &exchange, const dsopt_tensor *list, int64_t count, const Parallel &parallel,
                       void *) const override {
        (void)count;
        if (exchange.layout->has_levels())
            cpu::fill_message(exchange, list, parallel);
        else
            cpu::feed_and_pack(onebit_, exchange, list, parallel);
    }
    void compress_slice(const Exchange &exchange, const Parallel &parallel, void *) const override {
        cpu::pack_slice(onebit_, exchange, parallel);
    }
    void compress_serve(const Exchange &exchange, const Parallel &parallel, void *) const override {
        cpu::serve(onebit_, exchange, parallel);
    }
    void compress_decode(const Exchange &exchange, const dsopt_tensor *list, int64_t count, const Parallel &parallel,
                         void *) const override {
        cpu::decode(onebit_, exchange, list, count, parallel);
    }

private:
    const Kernels &kernels_;
    const cpu::OneBitKernels &onebit_;
};

void CpuBackend::norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, Comm *comm,
                      dsopt_norm_result *result, const Parallel &parallel, void *stream) const {
    std::vector<int64_t> first(size_t(count) + 1);
    for (int64_t i = 0; i < count; ++i)
        first[size_t(i) + 1] = first[size_t(i)] + (list[i].data != nullptr ? leaves_of(list[i].numel) : 0);
    const auto leaves = size_t(first[size_t(count)]);
    std::vector<double> squares(leaves);
    std::vector<int64_t> bad(leaves);
    std::vector<float> largest(leaves);
    ListCut(list, count, parallel).run([&](int64_t i, int64_t begin, int64_t end) {
        kernels_.inspect(list[i].data, Dtype(list[i].dtype), begin, end, squares.data(), bad.data(),
                         kind == DSOPT_NORM_MAX ? largest.data() : nullptr, first[size_t(i)] + begin / kLeaf);
    });
    dsopt_norm_result r{};
    r.first_bad = -1;
    double total = 0;
    float most = 0;
    for (int64_t i = 0; i < count; ++i) {
        double sum = 0;
        for (int64_t leaf = first[size_t(i)]; leaf < first[size_t(i) + 1]; ++leaf) {
            sum += squares[size_t(leaf)];
            r.nonfinite += bad[size_t(leaf)] & 0xffff;
            if (r.nonfinite != 0 && r.first_bad < 0) r.first_bad = i;
            const float magnitude = largest[size_t(leaf)];
            most = magnitude > most || magnitude != magnitude ? magnitude : most;
        }
        total += sum;
    }
    double shared[3] = {kind == DSOPT_NORM_MAX ? double(most) : total, double(r.nonfinite),
                        std::isnan(most) ? 1.0 : 0.0};
    if (comm != nullptr) {
        comm->all_reduce(&shared[0], 1, DSOPT_DTYPE_F64, kind == DSOPT_NORM_MAX ? DSOPT_OP_MAX : DSOPT_OP_SUM, stream);
        comm->all_reduce(&shared[1], 2, DSOPT_DTYPE_F64, DSOPT_OP_SUM, stream);
        r.nonfinite = int64_t(shared[1]);
        if (shared[2] > 0) shared[0] = NAN; // MAX loses the NaN of a rank
    }
    finish_norm(r, kind, shared[0], max_norm);
    *result = r;
}

/// From the sums of LAMB's first sweep. mine(i): that was in it.
template <class Mine> void find_trust_ratios(const StepPlan &plan, const Mine &mine) {
    const bool shards = has_shards(plan, false);
    if (shards) std::memset(plan.shard_sums, 0, shard_bytes(plan.shard_count));
    for (int64_t i = 0; i < plan.count; ++i) {
        const TensorJob &job = plan.jobs[i];
        const Hyper &hyper = plan.groups[job.group];
        if (!job.present || !mine(i)) continue;
        const double weights = fold_leaves(plan.sums_a, job), updates = fold_leaves(plan.sums_b, job);
        if (job.trust_slot >= 0)
            plan.shard_sums[job.trust_slot] = {weights, updates, 1};
        else
            plan.trust_ratio[i] = trust_ratio(weights, updates, hyper.min_trust, hyper.max_trust);
    }
    if (!shards) return;
    add_up_shards(plan, false);
    for (int64_t i = 0; i < plan.count; ++i) take_shared_trust(plan, i);
}

void CpuBackend::step(const StepPlan &plan) const {
    const DefaultFloatEnvironment environment;
    Outcome outcome{};
    if (plan.outcome != nullptr) outcome = *plan.outcome;
    Stopwatch watch(plan.timing, outcome.ms);
    const auto numel = [&](int64_t i) { return plan.jobs[i].numel; };
    const auto bytes = [&](int64_t i) -> int64_t {
        const TensorJob &job = plan.jobs[i];
        int64_t state = 0;
        for (const Moment &moment : job.moment) state += moment.data != nullptr ? 8 : 0;
        return 4 + state + int64_t(dtype_size(job.grad_type)) + (job.copy != nullptr ? 2 : 0) +
               (job.out != nullptr ? 4 : 0);
    };
    const Cut cut(plan.count, plan.cost, plan.chunk, plan.parallel, bytes, numel);

    if (plan.read_gradients)
        cut.run(numel, [&](int64_t i, int64_t begin, int64_t end) {
            const TensorJob &job = plan.jobs[i];
            if (!job.present || job.grad == nullptr) return;
            const int64_t leaf = job.first_leaf + begin / kLeaf;
            kernels_.inspect(job.grad, job.grad_type, begin, end, plan.sums_a, plan.bad, nullptr, leaf);
            // The original takes the experts' part of the norm from their weights. What is bad stays the gradient's.
            if (plan.wrapper == Wrapper::fused && job.expert != 0)
                kernels_.squares(job.weight, job.weight_type, begin, end, plan.sums_a, leaf);
        });
    watch.mark(DSOPT_MS_OVERFLOW_CHECK);
    const NormTable table{plan.norms, plan.group_count, plan.classes()};
    fold_gradients(plan, table, outcome);
    reduce_norms(plan, table, plan.norms + NormTable::size(table.groups, table.classes), Place::backend,
                 [](const NormMove &move) { move(); });
    if (plan.grad_norms != nullptr) take_given_norms(plan, table);
    watch.mark(DSOPT_MS_COMPUTE_NORM);

    const bool taken = decide(plan, table, outcome);
    if (taken)
        for (int64_t begin = 0, end = 0; begin < plan.count; begin = end) {
            const int32_t group = plan.jobs[begin].group;
            for (end = begin; end < plan.count && plan.jobs[end].group == group; ++end) {}
            advance_group(plan, group, begin, end);
        }
    watch.mark(DSOPT_MS_UNSCALE_AND_CLIP);

    const bool streaming = cpu::leaves_caches(cut.bytes());
    const auto span_of = [&](int64_t i, int64_t begin, int64_t end) {
        return Span{.job = &plan.jobs[i],
                    .scalars = &plan.scalars[i],
                    .begin = begin,
                    .end = end,
                    .flags = plan.flags,
                    .sums = plan.report_norms,
                    .sums_a = plan.sums_a,
                    .sums_b = plan.sums_b,
                    .trust = plan.trust_ratio != nullptr ? plan.trust_ratio[i] : 1.0f,
                    .step = plan.step[i],
                    .streaming = streaming};
    };
    std::optional<cpu::OneBitStep> onebit;
    if (plan.onebit != nullptr) onebit.emplace(plan, kernels_, onebit_);
    cut.run(numel, [&](int64_t i, int64_t begin, int64_t end) {
        const TensorJob &job = plan.jobs[i];
        const Rule rule = plan.groups[job.group].rule;
        const Span span = span_of(i, begin, end);
        const bool elsewhere = onebit && onebit->owns(i);
        if (!taken || !job.present || (elsewhere && plan.onebit->stage == Stage::dry))
            kernels_.unchanged(span);
        else if (elsewhere)
            return;
        else if (sweeps_of(rule) == 2)
            kernels_.lamb_moments(rule, span);
        else
            kernels_.update(rule, span);
    });
    if (taken && plan.has_lamb) {
        const auto sweeps = [&](int64_t i) {
            return sweeps_of(plan.groups[plan.jobs[i].group].rule) == 2 && !(onebit && onebit->owns(i));
        };
        find_trust_ratios(plan, sweeps);
        cut.run(numel, [&](int64_t i, int64_t begin, int64_t end) {
            if (plan.jobs[i].present && sweeps(i))
                kernels_.lamb_weights(plan.groups[plan.jobs[i].group].rule, span_of(i, begin, end));
        });
    }
    if (onebit && taken) onebit->run(cut, span_of, outcome.ms);
    if (onebit) onebit->end(cut, taken);
    if (taken && plan.report_norms) fold_updates(plan, outcome);
    watch.mark(DSOPT_MS_BASIC_STEP);
    for (const int phase : {DSOPT_MS_COMPRESS, DSOPT_MS_EXCHANGE, DSOPT_MS_DECOMPRESS})
        outcome.ms[DSOPT_MS_BASIC_STEP] -= plan.timing ? outcome.ms[phase] : 0.0;
    if (plan.report != nullptr) write_report(plan, outcome, plan.report);
    if (plan.outcome != nullptr) *plan.outcome = outcome;
}

} // namespace

const char *cpu_isa_name() { return choose_kernels().name; }
std::unique_ptr<Backend> make_cpu_backend() { return std::make_unique<CpuBackend>(); }

} // namespace dsopt
