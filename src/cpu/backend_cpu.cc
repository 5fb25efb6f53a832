// SPDX-License-Identifier: Apache-2.0
#include "backend.h"
#include "cpu/kernels.h"
#include "rules/decide.h"
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace dsopt {
namespace {

using cpu::Kernels;
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

/// Bytes that a step moves for a tensor: how long it takes, compared with the others of the list.
int64_t bytes_of(const TensorJob &job) {
    return 4 * 5 + int64_t(job.grad != nullptr ? dtype_size(job.grad_type) : 0) + (job.copy != nullptr ? 2 : 0) +
           int64_t(job.out != nullptr ? dtype_size(job.out_type) : 0);
}

/// The whole list as one line of bytes, cut into equal parts at leaf borders. The cut follows from the list and the number of
/// parts alone, so nothing has to be handed out while the step runs.
class Cut {
public:
    explicit Cut(const StepPlan &plan) : plan_(plan) {
        plan.cost[0] = 0;
        for (int64_t i = 0; i < plan.count; ++i)
            plan.cost[i + 1] = plan.cost[i] + plan.jobs[i].numel * bytes_of(plan.jobs[i]);
        // A part below 64 KiB is done before another thread has woken up.
        parts_ = std::clamp<int64_t>(plan.cost[plan.count] >> 16, 1, plan.parallel.threads);
    }

    /// visit(tensor, begin, end) for every piece, on all threads.
    template <class Visit> void run(const Visit &visit) const {
        plan_.parallel.run(parts_, [&](int64_t part) {
            const DefaultFloatEnvironment environment;
            const Position first = position(part), last = position(part + 1);
            for (int64_t i = first.tensor; i < plan_.count && i <= last.tensor; ++i) {
                const int64_t begin = i == first.tensor ? first.element : 0;
                const int64_t end = i == last.tensor ? last.element : plan_.jobs[i].numel;
                if (begin < end) visit(i, begin, end);
            }
        });
    }

private:
    struct Position {
        int64_t tensor, element;
    };
    Position position(int64_t part) const {
        const int64_t total = plan_.cost[plan_.count];
        if (part == parts_) return {plan_.count, 0};
        const int64_t at = int64_t(__int128(total) * part / parts_);
        const int64_t tensor = std::upper_bound(plan_.cost, plan_.cost + plan_.count, at) - plan_.cost - 1;
        if (tensor < 0) return {0, 0};
        const int64_t element = (at - plan_.cost[tensor]) / bytes_of(plan_.jobs[tensor]);
        return {tensor, element / plan_.chunk * plan_.chunk};
    }
    const StepPlan &plan_;
    int64_t parts_;
};

class CpuBackend final : public Backend {
public:
    CpuBackend() : kernels_(choose_kernels()) {}
    const char *name() const override { return "cpu"; }

    void *allocate(size_t bytes, void *) const override {
        // From 2 MiB on in whole huge pages: the step is bound by memory, and small pages cost a fifth of it.
        constexpr size_t huge = size_t(2) << 20;
        const size_t alignment = bytes >= huge ? huge : 64;
        if (bytes > SIZE_MAX - huge) throw std::bad_alloc();
        const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
        void *memory = std::aligned_alloc(alignment, std::max(rounded, alignment));
        if (memory == nullptr)
            throw Error(DSOPT_ERR_NOMEM, "out of host memory: %zu bytes of optimizer state", bytes);
        if (bytes >= huge) (void)madvise(memory, rounded, MADV_HUGEPAGE);
        return memory;
    }
    void release(void *memory, size_t, void *) const noexcept override { std::free(memory); }

    void step(const StepPlan &plan) const override;

    void fill(void *data, int32_t dtype, int64_t numel, double value, void *) const override {
        switch (dtype) {
        case DSOPT_F32: std::fill_n(static_cast<float *>(data), numel, float(value)); return;
        case DSOPT_I32: std::fill_n(static_cast<int32_t *>(data), numel, int32_t(value)); return;
        case DSOPT_F16: std::fill_n(static_cast<uint16_t *>(data), numel, f32_to_f16(float(value))); return;
        case DSOPT_BF16: std::fill_n(static_cast<uint16_t *>(data), numel, f32_to_bf16(float(value))); return;
        }
        throw Error(DSOPT_ERR_INTERNAL, "no fill for dtype %d", dtype);
    }

    void zero(const dsopt_tensor *list, int64_t count, const Parallel &parallel, void *) const override {
        int64_t bytes = 0;
        for (int64_t i = 0; i < count; ++i) bytes += list[i].numel * int64_t(dtype_size(list[i].dtype));
        const int64_t parts = std::clamp<int64_t>(bytes >> 18, 1, parallel.threads);
        parallel.run(parts, [&](int64_t part) {
            const int64_t first = int64_t(__int128(bytes) * part / parts);
            const int64_t last = int64_t(__int128(bytes) * (part + 1) / parts);
            int64_t at = 0;
            for (int64_t i = 0; i < count && at < last; ++i) {
                const int64_t length = list[i].numel * int64_t(dtype_size(list[i].dtype));
                const int64_t begin = std::clamp<int64_t>(first - at, 0, length);
                const int64_t end = std::clamp<int64_t>(last - at, 0, length);
                if (begin < end && list[i].data != nullptr)
                    std::memset(static_cast<char *>(list[i].data) + begin, 0, size_t(end - begin));
                at += length;
            }
        });
    }

    void convert(void *to, Dtype to_type, const void *from, Dtype from_type, int64_t numel, const Parallel &parallel,
                 void *) const override {
        const int64_t leaves = leaves_of(numel), parts = std::clamp<int64_t>(leaves / 16, 1, parallel.threads);
        parallel.run(parts, [&](int64_t part) {
            const DefaultFloatEnvironment environment;
            const int64_t begin = leaves * part / parts * kLeaf;
            const int64_t end = std::min(numel, leaves * (part + 1) / parts * kLeaf);
            kernels_.convert(static_cast<char *>(to) + size_t(begin) * dtype_size(to_type), to_type,
                             static_cast<const char *>(from) + size_t(begin) * dtype_size(from_type), from_type,
                             end - begin);
        });
    }
    void copy(void *to, const void *from, size_t bytes, void *) const override {
        if (bytes != 0) std::memmove(to, from, bytes);
    }
    void copy_to_host(void *host, const void *from, size_t bytes, void *) const override { copy(host, from, bytes, nullptr); }
    const void *view_on_host(const void *from, size_t, void *) const override { return from; }
    void copy_from_host(void *to, const void *host, size_t bytes, void *) const override { copy(to, host, bytes, nullptr); }
    void synchronize(void *) const override {}

private:
    const Kernels &kernels_;
};

/// Sums of a tensor's leaves, in order.
double fold_leaves(const double *sums, const TensorJob &job) {
    double sum = 0;
    for (int64_t leaf = job.first_leaf; leaf < job.first_leaf + leaves_of(job.numel); ++leaf) sum += sums[leaf];
    return sum;
}

void CpuBackend::step(const StepPlan &plan) const {
    const DefaultFloatEnvironment environment;
    const Cut cut(plan);
    double *divisors = plan.divisors, *group_squares = plan.divisors + plan.group_count;
    Outcome local{};
    Outcome &outcome = plan.outcome != nullptr ? *plan.outcome : local;

    GradientStats stats;
    if (plan.read_gradients) {
        cut.run([&](int64_t i, int64_t begin, int64_t end) {
            if (plan.jobs[i].grad != nullptr) kernels_.gradients(plan.jobs[i], begin, end, plan.sums_a, plan.bad);
        });
        stats = fold_gradients(plan, group_squares);
    } else {
        std::fill_n(group_squares, plan.group_count, 0.0);
    }
    if (plan.grad_norms != nullptr) {
        const GradientStats given = given_norms(plan, group_squares);
        stats.total_squares = given.total_squares;
    }

    const bool taken = decide(plan, stats, group_squares, divisors, outcome);
    if (taken)
        for (int64_t begin = 0, end = 0; begin < plan.count; begin = end) {
            const int32_t group = plan.jobs[begin].group;
            for (end = begin; end < plan.count && plan.jobs[end].group == group; ++end) {}
            advance_group(plan, group, begin, end, divisors[group]);
        }

    const auto span_of = [&](int64_t i, int64_t begin, int64_t end) {
        return Span{&plan.jobs[i], &plan.scalars[i],    begin,       end,         plan.flags,
                    plan.report_norms, plan.sums_a, plan.sums_b, plan.trust_ratio != nullptr ? plan.trust_ratio[i] : 1.0f};
    };
    cut.run([&](int64_t i, int64_t begin, int64_t end) {
        const TensorJob &job = plan.jobs[i];
        const Rule rule = plan.groups[job.group].rule;
        const Span span = span_of(i, begin, end);
        if (!taken || job.grad == nullptr) kernels_.unchanged(span);
        else if (is_lamb(rule)) kernels_.lamb_moments(rule, span);
        else kernels_.update(rule, span);
    });
    if (taken && plan.has_lamb) {
        for (int64_t i = 0; i < plan.count; ++i) {
            const TensorJob &job = plan.jobs[i];
            const Hyper &hyper = plan.groups[job.group];
            if (job.grad != nullptr && is_lamb(hyper.rule))
                plan.trust_ratio[i] = trust_ratio(fold_leaves(plan.sums_a, job), fold_leaves(plan.sums_b, job),
                                                  hyper.min_trust, hyper.max_trust);
        }
        cut.run([&](int64_t i, int64_t begin, int64_t end) {
            const Rule rule = plan.groups[plan.jobs[i].group].rule;
            if (plan.jobs[i].grad != nullptr && is_lamb(rule)) kernels_.lamb_weights(rule, span_of(i, begin, end));
        });
    }
    if (taken && plan.report_norms) {
        double weights = 0, updates = 0;
        for (int64_t i = 0; i < plan.count; ++i) {
            const TensorJob &job = plan.jobs[i];
            if (job.grad == nullptr) continue;
            double factor = 1; // LAMB sums its update before the factor that makes a change of it
            if (is_lamb(plan.groups[job.group].rule)) factor = double(plan.scalars[i].lr) * double(plan.trust_ratio[i]);
            weights += fold_leaves(plan.sums_a, job);
            updates += factor * factor * fold_leaves(plan.sums_b, job);
        }
        outcome.weight_norm = std::sqrt(weights);
        outcome.update_norm = std::sqrt(updates);
    }
    if (plan.report != nullptr) write_report(outcome, plan.report);
}

} // namespace

const char *cpu_isa_name() { return choose_kernels().name; }
std::unique_ptr<Backend> make_cpu_backend() { return std::make_unique<CpuBackend>(); }

} // namespace dsopt
